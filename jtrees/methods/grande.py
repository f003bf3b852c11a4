"""GRANDE: hard axis-aligned trees whose weights depend on the leaves that a sample reaches.

The source is Marton, Lüdtke, Bartelt & Stuckenschmidt, "GRANDE: Gradient-Based Decision Tree Ensembles for Tabular
Data", ICLR 2024. It extends GradTree (AAAI 2024). ``grande`` is the method for :func:`jtrees.train`, and ``GRANDE`` is
the recipe.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrees import io, losses, pytree, routing, topology, training, validation as checks
from jtrees.forest import Forest
from jtrees.methods.tree_ensemble.ensemble import Ensemble, hardened
from jtrees.search import NetworkRecipe, Run, checked_values, option
from jtrees.tasks import Regression, Task
from jtrees.training import Batch

_EXCLUDED = -1e4  # logit of a feature that a tree does not see; its probability and gradient stay 0
_START = 0.05  # standard deviation of initial leaf values and leaf weights


@io.part
@pytree.dataclass
class WeightedTrees:
    """Hard axis-aligned trees with a weight for each leaf."""

    logits: Float[Array, "trees nodes p"]  # (trees, nodes, p). A split has the feature with the largest logit
    thresholds: Float[Array, "trees nodes p"]  # threshold of each feature at each split, (trees, nodes, p)
    values: Float[Array, "trees leaves *k"]  # values of the leaves, (trees, leaves) or (trees, leaves, k)
    leaf_weights: Float[Array, "trees leaves"]  # logits of the trees' weights, for each leaf, (trees, leaves)

    def choices(self) -> Float[Array, "trees nodes p"]:
        """Returns 1 for the feature of a split, else 0. The gradient is the gradient of the entmax of the logits."""
        soft = routing.entmax(self.logits)
        hard = jax.nn.one_hot(self.logits.argmax(-1), self.logits.shape[-1], dtype=soft.dtype)
        return soft + jax.lax.stop_gradient(hard - soft)

    def splits(self) -> tuple[Float[Array, "trees nodes p"], Float[Array, "trees nodes"]]:
        """Returns the weights and biases of the splits: ``x_j - threshold_j`` for feature j."""
        choices = self.choices()
        return choices, -(choices * self.thresholds).sum(-1)

    def sides(self, x: Float[Array, "n p"]) -> Float[Array, "trees nodes n"]:
        """Returns 1 for a sample that goes right at a split, else 0. The gradient is the gradient of a softsign."""
        weights, bias = self.splits()
        z = jnp.einsum("tjp,np->tjn", weights, x, precision="highest") + bias[..., None]
        soft = (z / (1 + jnp.abs(z)) + 1) / 2
        return soft + jax.lax.stop_gradient((z > 0).astype(soft.dtype) - soft)

    def outputs(self, x: Float[Array, "n p"], active: Array | None = None) -> Float[Array, "n *k"]:
        """Returns the mean of the values of the reached leaves, weighted by a softmax of their weights."""
        # `active` says whether a tree takes part, (trees,) bool; None: all trees do.
        leaves = self.leaf_weights[..., None], self.values.reshape(*self.leaf_weights.shape, -1)
        reached = lambda right, leaves: jnp.matmul(leaves.T, routing.leaf_probabilities(right), precision="highest")
        answers = jax.vmap(reached)(self.sides(x), jnp.concatenate(leaves, axis=-1))
        share = jax.nn.softmax(answers[:, :1], axis=0, where=None if active is None else active[:, None, None])
        return (share * answers[:, 1:]).sum(0).T.reshape(len(x), *self.values.shape[2:])

    @property
    def params(self) -> tuple[Array, ...]:
        """The numbers of the hard trees: a feature and a threshold for each split, values and weights of leaves."""
        feature = self.logits.argmax(-1)
        threshold = jnp.take_along_axis(self.thresholds, feature[..., None], -1)[..., 0]
        return feature, threshold, self.values, self.leaf_weights

    @property
    def features(self) -> int:
        return self.logits.shape[-1]

    def __str__(self) -> str:
        trees, nodes, _ = self.logits.shape[-3:]
        return f"trees={trees}, depth={topology.depth_of(nodes)}, features={self.features}"


def grande(
    depth: int, trees: int = 64, *, task: Task = Regression(), selected: float = 0.8, dropout: float | Array = 0.0
) -> training.Method:
    """Returns the GRANDE method; parameters are :class:`WeightedTrees`.

    ``harden`` returns a ``Forest(combine="sum")`` with the trees' splits, whose leaves are refitted jointly. The method
    assumes features of mean 0 and deviation 1, and regression targets of order 1. In classification, leaves hold
    logits. :class:`jtrees.GRANDE` describes the arguments. By default there is no dropout here.

    Raises:
      ValueError: for a number out of range.
    """
    checked = checked_values(GRANDE, depth=depth, trees=trees, selected=selected, dropout=dropout)
    depth, trees = checked["depth"], checked["trees"]

    def init(batch: Batch, *, key: Array) -> WeightedTrees:
        task.check(batch.y)
        features_key, logits_key, rows_key, leaves_key = jax.random.split(key, 4)
        p, shape = batch.x.shape[1], (trees, topology.num_nodes(depth))
        order = jax.vmap(lambda key: jax.random.permutation(key, p))(jax.random.split(features_key, trees))
        excluded = order[:, None, :] >= max(1, round(selected * p))
        logits = jax.random.uniform(logits_key, (*shape, p), batch.x.dtype)
        thresholds = jax.random.choice(rows_key, batch.x, shape, p=batch.weight)
        count = math.prod(task.shape) + 1
        leaves = _START * jax.random.normal(leaves_key, (trees, topology.num_leaves(depth), count), batch.x.dtype)
        values = leaves[..., 1:].reshape(*leaves.shape[:2], *task.shape) + task.initial(batch).astype(leaves.dtype)
        return WeightedTrees(jnp.where(excluded, _EXCLUDED, logits), thresholds, values, leaves[..., 0])

    def loss(params: WeightedTrees, batch: Batch, *, key: Array, step: Array) -> tuple[Array, Array]:
        uniform = jax.random.uniform(key, (trees,))
        active = (uniform >= dropout) | (uniform == uniform.max())  # at least one tree takes part
        loss_of = lambda outputs: losses.weighted_mean(task.loss(outputs, batch.y), batch.weight)
        return loss_of(params.outputs(batch.x, active)), loss_of(params.outputs(batch.x))  # the score has all trees

    return training.Method(init, loss, lambda params, batch: additive(params, batch, task))


def additive(params: WeightedTrees, batch: Batch, task: Task) -> Forest:
    """Returns the sum of trees with the same splits, whose leaves are refitted jointly."""
    return hardened(Ensemble(*params.splits(), params.values / len(params.values)), batch, task)


@pytree.dataclass(kw_only=True)
class GRANDE(NetworkRecipe):
    """GRANDE's recipe: hard axis-aligned trees with weights for each sample, trained jointly.

    The search trains on mini-batches with Adam. Early stopping chooses the number of updates, as in
    :class:`jtrees.TEL`. Features are scaled to mean 0 and deviation 1, regression targets to [0, 1].

    Attributes:
      depth: depth of the trees, 1 to 16.
      trees: number of trees. The paper has 2048.
      epochs: number of passes over the data; None: as in :class:`jtrees.DGT`, but 40 passes.
      batch_size: samples in a mini-batch, as in :class:`jtrees.DGT`.
      learning_rate: learning rate of Adam.
      selected: share of the features that a tree sees, above 0 and at most 1.
      dropout: probability that a tree does not take part in an update, in [0, 1).
      hard: whether the model is a :class:`jtrees.Forest` without weights of trees, with leaves refitted jointly.
      early_stopping: whether a trial run chooses the number of updates, as in :class:`jtrees.TEL`.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> fit = jtrees.fit(jtrees.GRANDE(depth=1, trees=2, epochs=20), x, np.sign(x[:, 0]), key=jax.random.key(0))
      >>> fit.model
      SoftModel(WeightedTrees(trees=2, depth=1, features=1), Regression(), parameters=12)
    """

    depth: int = option(5, most=16)
    trees: int = option(64)
    batch_size: int = option(256)
    learning_rate: float = option(0.02, above=0)
    selected: float = option(0.8, above=0, most=1, traced=False)
    dropout: float = option(0.2, least=0, below=1)
    hard: bool = option(False)
    early_stopping: bool = option(True)
    passes, chooses_updates = 40, True

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        tree_size = topology.num_leaves(self.depth) * (2 * shape[1] + math.prod(task.shape))
        checks.check_size("trees", self.trees, tree_size)
        super().check(task, shape)

    def method(self, run: Run) -> training.Method:
        return grande(self.depth, self.trees, task=run.task, selected=self.selected, dropout=self.dropout)

    def model(self, run: Run, params: Any) -> Any:
        return additive(params, run.batch, run.task) if self.hard else params
