"""DTSemNet: a hard oblique tree as an equivalent network of ReLUs, trained by gradient descent.

The source is Panda et al., "Vanilla Gradient Descent for Oblique Decision Trees", ECAI 2024. ``dtsemnet`` is the method
for :func:`jtrees.train`, and ``DTSemNet`` is the recipe.

A linear layer computes the scores z_j of the splits. A second layer computes ``relu(z_j)`` and ``relu(-z_j)``. The
output of leaf l is the sum of the numbers that agree with its path. So it is ``sum_j |z_j| - v_l`` with the violation
v_l of :func:`jtrees.routing.path_violations`. The reached leaf has violation 0, and all other leaves have larger
violations. So the leaf with the largest output is the leaf that the tree reaches.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import optax

from jtrees import leaves as kinds, losses, ops, pytree, routing, topology, training
from jtrees.search import MiniBatchRecipe, Run, checked_values, option
from jtrees.tasks import Classification, Regression, Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree


def class_logits(
    scores: Float[Array, "nodes n"], classes: int, pooling: Literal["max", "sum"] = "max"
) -> Float[Array, "n classes"]:
    """Returns the pooled outputs of the leaves of each class, up to a constant of the sample. Leaf l has class l mod K.

    The constant is ``sum_j |z_j|``, the output of the reached leaf. A softmax does not depend on it. ``pooling`` is
    ``"max"``, or ``"sum"`` for the logarithm of the sum of the exponentials.
    """
    violations = routing.path_violations(scores)
    # One reduction of a padded array: slices for each class are far slower in the backward pass with many classes.
    missing = -len(violations) % classes
    outputs = jnp.pad(-violations, ((0, missing), (0, 0)), constant_values=-jnp.inf)
    outputs = outputs.reshape(-1, classes, outputs.shape[1])
    return (outputs.max(0) if pooling == "max" else jax.nn.logsumexp(outputs, axis=0)).T


def reached_value(scores: Float[Array, "nodes n"], leaves: Any, x: Float[Array, "n p"]) -> Float[Array, "n *k"]:
    """Returns the value of the reached leaf. The gradient of the scores is straight-through."""
    # It is the gradient of a softmax over the two largest outputs. They belong to the reached leaf and to the nearest
    # other leaf. A sample would reach the nearest other leaf if the smallest absolute score of its path changed sign. A
    # softmax over all leaves hardly learns numbers.
    violations, reached = routing.path_violations(scores), routing.leaf_index(scores)
    other_violations = jnp.where(jnp.arange(len(violations))[:, None] == reached, jnp.inf, violations)
    value_of = lambda leaf: leaves.values[leaf] if leaves.is_constant else leaves.at(leaf, x)
    value = value_of(reached)
    step = jax.lax.stop_gradient(value_of(other_violations.argmin(0)) - value)
    share = jax.nn.sigmoid(-other_violations.min(0))
    return value + (share - jax.lax.stop_gradient(share)).reshape(-1, *[1] * (step.ndim - 1)) * step


def dtsemnet(
    depth: int,
    *,
    task: Task = Regression(),
    leaves: Literal["constant", "linear"] = "constant",
    pooling: Literal["max", "sum"] = "max",
) -> training.Method:
    """Returns the DTSemNet method; parameters are an :class:`jtrees.ObliqueTree`.

    In classification, leaf l has class l mod K, and the loss is the loss of the logits of the classes. The gradient is
    exact. For other tasks, and for more classes than leaves, leaves hold values, and the gradient is straight-through.
    ``harden`` refits the leaves. The method assumes features of mean 0 and deviation 1, and regression targets of order
    1. :class:`jtrees.DTSemNet` describes the arguments, except ``task``: what is predicted, and by which loss.

    Raises:
      ValueError: for a depth out of range, an unknown kind of leaves or pooling, or linear leaves for another loss.
    """
    depth = checked_values(DTSemNet, depth=depth, pooling=pooling)["depth"]
    kind, nodes = kinds.kind_of(leaves, task), topology.num_nodes(depth)
    classes = task.shape[0] if isinstance(task, Classification) and task.shape[0] <= nodes + 1 else None

    def init(batch: Batch, *, key: Array) -> ObliqueTree:
        task.check(batch.y)
        splits_key, leaves_key = jax.random.split(key)
        p = batch.x.shape[1]
        bound = float(p) ** -0.5  # the usual initialisation of a linear layer
        splits = jax.random.uniform(splits_key, (nodes, p + 1), batch.x.dtype, -bound, bound)
        values = kind.start(leaves_key, nodes + 1, batch.x, batch.y, task.shape)
        return ObliqueTree(splits[:, 1:], splits[:, 0], values)

    def loss(params: ObliqueTree, batch: Batch, *, key: Array, step: Array) -> tuple[Array, Array]:
        scores = ops.scores(params.weights, params.bias, batch.x)
        if classes is None:
            outputs = reached_value(scores, params.leaves.trainable(), batch.x)
        else:
            outputs = class_logits(scores, classes, pooling)
            if not task.in_units:  # a loss of the user may depend on the constant that is left out
                outputs += jnp.abs(scores).sum(0)[:, None]
        value = losses.weighted_mean(task.loss(outputs, batch.y), batch.weight)
        return value, value

    return training.Method(init, loss, lambda params, batch: params.refit(*batch))


@pytree.dataclass(kw_only=True)
class DTSemNet(MiniBatchRecipe):
    """DTSemNet's recipe: a hard oblique tree that Adam trains as a network.

    The search trains on mini-batches, with a cosine decay of the learning rate. The model is the tree after the last
    update. If ``validation`` is given, the model is the evaluated tree with the lowest validation loss. Its leaves are
    fitted to the rows that reach them. Features are scaled to mean 0 and deviation 1, targets to [0, 1]. The report is
    a :class:`jtrees.search.TrainingReport`.

    Attributes:
      depth: depth of the tree, 1 to 16. Each class should have several leaves.
      leaves: ``"constant"``, or ``"linear"`` for the squared error, as in the paper.
      pooling: how the outputs of the leaves of a class are pooled: ``"max"``, as in the paper, or ``"sum"``, the
        logarithm of the sum of their exponentials. Each sample then moves the splits of all paths, which helps with
        many leaves.
      epochs: number of passes over the data; None: as in :class:`jtrees.DGT`.
      batch_size: samples in a mini-batch, as in :class:`jtrees.DGT`.
      learning_rate: initial learning rate of Adam.
      precondition: strength of the preconditioner, as in :class:`jtrees.DGT`.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> fit = jtrees.fit(jtrees.DTSemNet(depth=1, epochs=60), x, np.sign(x[:, 0]), key=jax.random.key(0))
      >>> fit.tree
      ObliqueTree(depth=1, features=1, splits=1, leaves=2, parameters=4, Values(SquaredError))
    """

    depth: int = option(4, most=16)
    leaves: Literal["constant", "linear"] = option("constant")
    pooling: Literal["max", "sum"] = option("max")
    learning_rate: float = option(0.03, above=0)
    precondition: float | Literal["auto"] = option("auto", least=0, below=1)

    refit = True

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        kinds.kind_of(self.leaves, task)  # raises for linear leaves with another loss than the squared error
        super().check(task, shape)

    def tree_leaves(self, task: Task) -> str:
        return self.leaves

    def method(self, run: Run) -> training.Method:
        return dtsemnet(self.depth, task=run.task, leaves=self.leaves, pooling=self.pooling)

    def optimizer(self, run: Run) -> optax.GradientTransformation:
        rate = optax.cosine_decay_schedule(1.0, self.schedule(len(run.batch.x)).steps)
        return optax.adam(lambda step: self.learning_rate * rate(step))
