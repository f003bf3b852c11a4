"""DTSemNet: a hard oblique tree as an equivalent network of ReLUs, trained by gradient descent.

The source is Panda et al., "Vanilla Gradient Descent for Oblique Decision Trees", ECAI 2024. ``dtsemnet`` is the method
for :func:`jtrees.train`, and ``DTSemNet`` is the recipe.

A linear layer computes the scores z_j of the splits. A second layer computes ``relu(z_j)`` and ``relu(-z_j)``. The
output of leaf l is the sum of all of these, except those that contradict its path. So it is ``sum_j |z_j| - v_l`` with
the violation v_l of :func:`jtrees.routing.path_violations`. The reached leaf has violation 0, and all other leaves have
larger violations. So the leaf with the largest output is the leaf that the tree reaches.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import optax

from jtrees import leaves as kinds, losses, ops, pytree, routing, topology, training, validation as checks
from jtrees.search import Fitted, Problem, Recipe, Run, fitted_tree, options
from jtrees.search.minibatch import Schedule, Training
from jtrees.search.precondition import after_short_trials
from jtrees.tasks import Classification, Regression, Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree


def class_logits(scores: Float[Array, "nodes n"], classes: int) -> Float[Array, "n classes"]:
    """Returns the largest output of the leaves of each class, up to a constant of the sample. Leaf l has class l mod K.

    The constant is ``sum_j |z_j|``, the output of the reached leaf. A softmax does not depend on it.

    Args:
      scores: split scores.
      classes: number of classes, at most the number of leaves.
    """
    violations = routing.path_violations(scores)
    return -jnp.stack([violations[k::classes].min(0) for k in range(classes)], axis=-1)


def reached_value(scores: Float[Array, "nodes n"], values: Float[Array, "leaves *k"]) -> Float[Array, "n *k"]:
    """Returns the value of the reached leaf. The gradient is that of a softmax over the outputs of the leaves.

    This is the straight-through rule of the paper for regression.
    """
    soft = routing.violation(scores)
    hard = jax.nn.one_hot(routing.leaf_index(scores), len(soft), axis=0, dtype=soft.dtype)
    return jnp.tensordot(soft + jax.lax.stop_gradient(hard - soft), values, ((0,), (0,)), precision="highest")


def dtsemnet(depth: int, *, task: Task = Regression()) -> training.Method:
    """Returns the DTSemNet method; parameters are an :class:`jtrees.ObliqueTree`.

    In classification, leaf l has class l mod K, and the loss is that of the classes' logits: the gradient is exact.
    For other tasks, and for more classes than leaves, leaves hold values, and the gradient is straight-through.
    ``harden`` refits the leaves. The method assumes features of mean 0 and deviation 1, and regression targets of order
    1.

    Args:
      depth: depth of the tree, 1 to 16.
      task: what is predicted, and by which loss.

    Raises:
      ValueError: for a depth out of range.
    """
    depth = checks.check_depth(depth)
    kind, nodes = kinds.kind_of("constant", task), topology.num_nodes(depth)
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
            outputs = reached_value(scores, params.leaves.trainable().values)
        else:
            outputs = class_logits(scores, classes)
        value = losses.weighted_mean(task.loss(outputs, batch.y), batch.weight)
        return value, value

    return training.Method(init, loss, lambda params, batch: params.refit(*batch))


@pytree.dataclass(kw_only=True)
class DTSemNet(Recipe):
    """DTSemNet's recipe: a hard oblique tree that Adam trains as a network.

    The search trains on mini-batches, with a cosine decay of the learning rate. The model is the tree after the last
    update. If ``validation`` is given, the model is the evaluated tree with the lowest validation loss. Its leaves are
    means of targets or class frequencies. Features are scaled to mean 0 and deviation 1, targets to [0, 1]. The report
    is a :class:`jtrees.search.TreeReport`.

    The paper's leaves of a regression tree may be linear; here they are constants.

    Attributes:
      depth: depth of the tree, 1 to 16. Each class should have several leaves.
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

    depth: int = options.depth(4)
    epochs: int | None = options.optional_count(None)
    batch_size: int = options.count(128)
    learning_rate: float = options.positive(0.01)
    precondition: float | Literal["auto"] = options.precondition()

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        self._schedule(shape[0])

    def _schedule(self, n: int) -> Schedule:
        return Schedule.of(n, self.epochs, self.batch_size)

    def training(self, run: Run) -> Training:
        """Returns the training of a run."""
        schedule = self._schedule(len(run.batch.x))
        rate = optax.cosine_decay_schedule(1.0, schedule.steps)
        optimizer = optax.adam(lambda step: self.learning_rate * rate(step))
        return Training(dtsemnet(self.depth, task=run.task), optimizer, schedule)

    async def search(self, problem: Problem) -> Fitted:
        result = await after_short_trials(problem, self.precondition)
        return fitted_tree(problem, result.fitted, refit=True, preconditioning=result.preconditioning)
