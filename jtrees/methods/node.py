"""NODE: layers of soft oblivious trees, in which all splits of a level are equal.

The source is Popov, Morozov & Babenko, "Neural Oblivious Decision Ensembles for Deep Learning on Tabular Data", ICLR
2020. ``node`` is the method for :func:`jtrees.train`, and ``NODE`` is the recipe. The model stays soft.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrees import io, losses, pytree, routing, topology, training, validation as checks
from jtrees.search import NetworkRecipe, Run, checked_values, option
from jtrees.tasks import Regression, Task
from jtrees.training import Batch

_ROWS_OF_START = 1024  # random rows of the data-aware initialisation


@io.part
@pytree.dataclass
class ObliviousTrees:
    """A layer of soft oblivious trees."""

    # (trees, depth, q). Their entmax is the weight of each of q features at a level.
    logits: Float[Array, "trees depth q"]
    threshold: Float[Array, "trees depth"]  # thresholds of the weighted features, (trees, depth)
    log_scale: Float[Array, "trees depth"]  # logarithms of the widths of the steps, (trees, depth)
    responses: Float[Array, "trees leaves *k"]  # values of the leaves, (trees, leaves) or (trees, leaves, k)

    def features(self, x: Float[Array, "n q"]) -> Float[Array, "depth trees n"]:
        """Returns the weighted feature of each level (eq. 2)."""
        return jnp.einsum("tdq,nq->dtn", routing.entmax(self.logits), x, precision="highest")

    def outputs(self, x: Float[Array, "n q"]) -> Float[Array, "n trees *k"]:
        """Returns the output of each tree: its responses weighted by products of steps (eq. 4 and 5)."""
        t = (self.features(x) - self.threshold.T[..., None]) * jnp.exp(-self.log_scale.T)[..., None]
        right = routing.entmax_step(t)
        # To sum over the lower levels first took half the time of a sum over all leaves on a CPU.
        middle = len(right) // 2
        upper, lower = _combinations(right[:middle]), _combinations(right[middle:])
        shape = len(self.responses), len(upper), len(lower), *self.responses.shape[2:]
        values = jnp.einsum("btn,tab...->tna...", lower, self.responses.reshape(shape), precision="highest")
        return jnp.einsum("atn,tna...->nt...", upper, values, precision="highest")


def _combinations(right: Float[Array, "levels trees n"]) -> Float[Array, "leaves trees n"]:
    """Returns the probabilities of all combinations of sides, the first level outermost."""
    reach = jnp.ones_like(right, shape=(1, *right.shape[1:]))
    for side in right:
        reach = topology.interleave(reach * (1 - side), reach * side)
    return reach


@io.part
@pytree.dataclass
class ObliviousLayers:
    """Layers of soft oblivious trees. A layer sees x and the outputs of all layers before it."""

    params: tuple[ObliviousTrees, ...]  # the layers

    def outputs(self, x: Float[Array, "n p"]) -> Float[Array, "n *k"]:
        """Returns the mean output of the trees of all layers."""
        outputs, features = [], x
        for layer in self.params:
            outputs.append(layer.outputs(features))
            features = jnp.concatenate([features, outputs[-1].reshape(len(x), -1)], axis=1)
        return jnp.concatenate(outputs, axis=1).mean(1)

    @property
    def features(self) -> int:
        return self.params[0].logits.shape[-1]

    def __str__(self) -> str:
        trees, depth, p = self.params[0].logits.shape[-3:]
        return f"layers={len(self.params)}, trees={trees}, depth={depth}, features={p}"


def random_layer(key: Array, x: Float[Array, "n q"], trees: int, depth: int, task: Task) -> ObliviousTrees:
    """Returns a layer for a few samples. No sample is beyond the end of a step (section 3.3)."""
    # Logits are from U(0, 1), responses from N(0, 1). A threshold is the weighted feature of a random sample.
    logits_key, rows_key, responses_key = jax.random.split(key, 3)
    logits = jax.random.uniform(logits_key, (trees, depth, x.shape[1]), x.dtype)
    responses = jax.random.normal(responses_key, (trees, topology.num_leaves(depth), *task.shape), x.dtype)
    features = jnp.einsum("tdq,nq->tdn", routing.entmax(logits), x, precision="highest")
    threshold = jnp.take_along_axis(features, jax.random.randint(rows_key, (trees, depth, 1), 0, len(x)), axis=-1)
    distance = jnp.abs(features - threshold).max(-1)
    return ObliviousTrees(logits, threshold[..., 0], jnp.log(jnp.where(distance > 0, distance, 1)), responses)


def node(depth: int, trees: int = 64, layers: int = 1, *, task: Task = Regression()) -> training.Method:
    """Returns the NODE method; parameters are :class:`ObliviousLayers`.

    ``harden`` returns None, because the model stays soft. The method assumes features of mean 0 and deviation 1, and
    regression targets of order 1. Responses of classes are logits. :class:`jtrees.NODE` describes the arguments.

    Raises:
      ValueError: for a number out of range.
    """
    checked = checked_values(NODE, depth=depth, trees=trees, layers=layers)
    depth, trees, layers = checked["depth"], checked["trees"], checked["layers"]

    def init(batch: Batch, *, key: Array) -> ObliviousLayers:
        task.check(batch.y)
        rows_key, *keys = jax.random.split(key, layers + 1)
        x = jax.random.choice(rows_key, batch.x, (min(len(batch.x), _ROWS_OF_START),), p=batch.weight)
        params: tuple[ObliviousTrees, ...] = ()
        initial = task.initial(batch).astype(x.dtype)
        for layer_key in keys:
            layer = random_layer(layer_key, x, trees, depth, task)
            params += (layer.replace(responses=layer.responses + initial),)
            x = jnp.concatenate([x, params[-1].outputs(x).reshape(len(x), -1)], axis=1)
        return ObliviousLayers(params)

    def loss(params: ObliviousLayers, batch: Batch, *, key: Array, step: Array) -> tuple[Array, Array]:
        value = losses.weighted_mean(task.loss(params.outputs(batch.x), batch.y), batch.weight)
        return value, value

    return training.Method(init, loss, lambda params, batch: None)


@pytree.dataclass(kw_only=True)
class NODE(NetworkRecipe):
    """NODE's recipe: layers of soft oblivious trees, trained jointly.

    The search trains on mini-batches with Adam. Early stopping chooses the number of updates, as in
    :class:`jtrees.TEL`. Features are scaled to mean 0 and deviation 1, regression targets to [0, 1].

    Attributes:
      depth: depth of the trees, 1 to 16.
      trees: number of trees of a layer. The paper has 2048 trees in all.
      layers: number of layers. A layer sees the features and the outputs of all layers before it.
      epochs: number of passes over the data; None: as in :class:`jtrees.DGT`, but 40 passes.
      batch_size: samples in a mini-batch, as in :class:`jtrees.DGT`.
      learning_rate: learning rate of Adam.
      early_stopping: whether a trial run chooses the number of updates, as in :class:`jtrees.TEL`.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> fit = jtrees.fit(jtrees.NODE(depth=1, trees=2, epochs=20), x, np.sign(x[:, 0]), key=jax.random.key(0))
      >>> fit.model
      SoftModel(ObliviousLayers(layers=1, trees=2, depth=1, features=1), Regression(), parameters=10)
    """

    depth: int = option(5, most=16)
    trees: int = option(64)
    layers: int = option(1)
    batch_size: int = option(256)
    learning_rate: float = option(0.02, above=0)
    early_stopping: bool = option(True)
    passes, chooses_updates = 40, True

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        outputs = math.prod(task.shape)
        widest = shape[1] + (self.layers - 1) * self.trees * outputs  # features that the last layer sees
        tree_size = topology.num_leaves(self.depth) * outputs + self.depth * widest
        checks.check_size("trees", self.trees, tree_size)
        super().check(task, shape)

    def method(self, run: Run) -> training.Method:
        return node(self.depth, self.trees, self.layers, task=run.task)
