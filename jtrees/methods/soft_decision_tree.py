"""SoftDecisionTree: a tree whose splits send a sample right with a probability, and learn their sharpness.

The source is Frosst & Hinton, "Distilling a Neural Network Into a Soft Decision Tree" (2017). ``soft_decision_tree`` is
the method for :func:`jtrees.train`, and ``SoftDecisionTree`` is the recipe.

Split j sends a sample right with probability ``sigmoid(beta_j (w_j x + b_j))``. The sharpness ``beta_j`` is learnt with
the split. A penalty asks each split to use both of its sides (their section 4.1). The loss is the expected loss over
the leaves. Unlike the paper's program, this file also does regression, and its result is the hard tree.
"""

import jax
import jax.numpy as jnp
import optax

from jtrees import io, leaves, ops, pytree, routing, topology
from jtrees.search import Fitted, MiniBatchRecipe, Problem, Run, checked_values, fold_rows, gather, option, trained
from jtrees.tasks import Regression, Task, check_log_loss
from jtrees.training import Batch, Method
from jtrees.tree import ObliqueTree

_SMALLEST = 1e-6  # share of the samples beyond which the penalty does not grow
_UNREACHED = 1e-15  # probability below which no sample reaches a split; its square is a float32 number


@io.part
@pytree.dataclass
class SoftTree:
    """The trained parameters."""

    tree: ObliqueTree  # splits and leaves
    log_sharpness: jax.Array  # logarithm of the sharpness of each split, (nodes,). The sharpness is then above 0

    def sharpened(self) -> ObliqueTree:
        """Returns the tree with splits multiplied by their sharpness, which does not change the hard routing."""
        sharpness = jnp.exp(self.log_sharpness)
        return self.tree.replace(weights=sharpness[:, None] * self.tree.weights, bias=sharpness * self.tree.bias)


def soft_decision_tree(depth: int, *, task: Task = Regression(), balance: float | jax.Array = 0.1) -> Method:
    """Returns the method, for :func:`jtrees.train`.

    Args:
      depth: depth of the tree.
      task: what is predicted, and by which loss.
      balance: strength of the penalty on splits that send most samples to one side. Each level has half the strength
        of the level above.

    Raises:
      ValueError: for a depth or a strength out of range.
    """
    depth = checked_values(SoftDecisionTree, depth=depth, balance=balance)["depth"]
    kind, nodes = leaves.kind_of("constant", task), topology.num_nodes(depth)
    strength = jnp.concatenate([jnp.full(2**level, balance / 2**level) for level in range(depth)])

    def init(batch: Batch, *, key: jax.Array) -> SoftTree:
        task.check(batch.y)
        splits_key, leaves_key = jax.random.split(key)
        splits = jax.random.normal(splits_key, (nodes, batch.x.shape[1] + 1), batch.x.dtype) / batch.x.shape[1] ** 0.5
        values = kind.start(leaves_key, nodes + 1, batch.x, batch.y, task.shape)
        tree = ObliqueTree(splits[:, 1:], splits[:, 0], values)
        return SoftTree(tree, jnp.zeros(nodes, batch.x.dtype))

    def loss(params: SoftTree, batch: Batch, *, key: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        tree, (x, y, weight) = params.sharpened(), batch
        expected, leaf = ops.expected_loss(tree.weights, tree.bias, tree.leaves, x, y, weight=weight)
        # alpha_j is the share of the samples at node j that go right. The penalty is the cross entropy between alpha_j
        # and one half (their equation 5).
        right = jax.nn.sigmoid(ops.scores(tree.weights, tree.bias, x))
        reach = routing.reach_probabilities(right)[:nodes]
        reach = reach if weight is None else weight * reach
        share = (reach * right).sum(1) / jnp.maximum(reach.sum(1), _UNREACHED)
        share = jnp.clip(share, _SMALLEST, 1 - _SMALLEST)  # no sample, or only samples of one side, may reach a split
        penalty = -(jnp.log(share) + jnp.log1p(-share)) / 2
        return expected + (strength * penalty).sum(), tree.leaves.criterion(leaf, x, y, weight)

    def harden(params: SoftTree, batch: Batch) -> ObliqueTree:
        return params.sharpened().refit(*batch)

    return Method(init, loss, harden)


@pytree.dataclass(kw_only=True)
class SoftDecisionTree(MiniBatchRecipe):
    """The hard tree of a soft decision tree that Adam trains on mini-batches.

    Each start first has a trial: a tenth of the updates on four fifths of the rows. The start with the lowest held-out
    loss then trains again from the beginning, with all updates on all rows. If the time is up before, the result has
    the splits of the trial. Features are scaled to mean 0 and standard deviation 1, targets to [0, 1]. The report is a
    :class:`jtrees.search.TrainingReport`.

    Attributes:
      depth: depth of the tree, 1 to 16.
      epochs: passes over the data.
      batch_size: samples in a mini-batch, at most n.
      learning_rate: learning rate of Adam.
      balance: strength of the penalty on splits that send most samples to one side.
      starts: number of random initial parameters to choose from.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> recipe = jtrees.SoftDecisionTree(depth=1, starts=1, epochs=60)
      >>> jtrees.fit(recipe, x, np.sign(x[:, 0]), key=jax.random.key(0)).tree
      ObliqueTree(depth=1, features=1, splits=1, leaves=2, parameters=4, Values(SquaredError))
    """

    depth: int = option(4, most=16)
    epochs: int = option(100)
    balance: float = option(0.1, least=0)
    starts: int = option(4)

    refit = True

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        check_log_loss(task)
        super().check(task, shape)

    def method(self, run: Run) -> Method:
        return soft_decision_tree(self.depth, task=run.task, balance=self.balance)

    def optimizer(self, run: Run) -> optax.GradientTransformation:
        return optax.adam(self.learning_rate)

    async def search(self, problem: Problem) -> Fitted:
        best = problem
        if self.starts > 1:
            starts = problem.repeat(self.starts)
            [held_out] = fold_rows(problem)
            trials = await gather(*(trained(start.holding_out(held_out), part=0.1) for start in starts))
            finite = [k for k, trial in enumerate(trials) if isinstance(trial, Fitted)]
            if not finite:
                raise trials[0]
            k = min(finite, key=lambda k: trials[k].score)
            if not problem.monitor.has_time():
                return self.finish(problem, trials[k])
            best = starts[k]
        return self.finish(problem, await trained(best))
