"""A method and its recipe in one file: the soft decision tree of Frosst & Hinton, "Distilling a Neural Network Into a
Soft Decision Tree" (2017).

Split j sends a sample right with probability ``sigmoid(beta_j (w_j x + b_j))``. The sharpness ``beta_j`` is learnt with
the split. A penalty asks each split to use both of its sides (their section 4.1). The loss is the expected loss over
the leaves. Unlike the paper's program, this file also does regression, and its result is the hard tree.

A method is three functions, and a recipe is its options and a search. :class:`SoftDecisionTree` can be fitted, tuned,
swept, bagged (``jtrees.Bagged(SoftDecisionTree())``), polished, saved, and put into the scikit-learn estimators.
"""

import jax
import jax.numpy as jnp
import optax

import jtrees
from jtrees import leaves, ops, pytree, routing, topology
from jtrees.search import Fitted, Problem, Run, Schedule, Training, fitted_tree, fold_rows, gather, options, trained


@pytree.dataclass
class SoftTree:
    """The trained parameters.

    Attributes:
      tree: splits and leaves.
      log_sharpness: logarithm of the sharpness of each split, ``(nodes,)``. The sharpness is then above 0.
    """

    tree: jtrees.ObliqueTree
    log_sharpness: jax.Array

    def sharpened(self) -> jtrees.ObliqueTree:
        """Returns the tree with splits multiplied by their sharpness, which does not change the hard routing."""
        sharpness = jnp.exp(self.log_sharpness)
        return self.tree.replace(weights=sharpness[:, None] * self.tree.weights, bias=sharpness * self.tree.bias)


def soft_decision_tree(depth: int, *, task: jtrees.tasks.Task, balance: float) -> jtrees.Method:
    """Returns the method, for :func:`jtrees.train`.

    Args:
      depth: depth of the tree.
      task: the task, such as regression.
      balance: strength of the penalty on splits that send most samples to one side. Each level has half the strength
        of the level above.
    """
    kind, nodes = leaves.kind_of("constant", task), topology.num_nodes(depth)
    strength = jnp.concatenate([jnp.full(2**level, balance / 2**level) for level in range(depth)])

    def init(batch: jtrees.Batch, *, key: jax.Array) -> SoftTree:
        task.check(batch.y)
        splits_key, leaves_key = jax.random.split(key)
        splits = jax.random.normal(splits_key, (nodes, batch.x.shape[1] + 1), batch.x.dtype) / batch.x.shape[1] ** 0.5
        values = kind.start(leaves_key, nodes + 1, batch.x, batch.y, task.shape)
        tree = jtrees.ObliqueTree(splits[:, 1:], splits[:, 0], values)
        return SoftTree(tree, jnp.zeros(nodes, batch.x.dtype))

    def loss(params: SoftTree, batch: jtrees.Batch, *, key: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        tree, (x, y, weight) = params.sharpened(), batch
        expected, leaf = ops.expected_loss(tree.weights, tree.bias, tree.leaves, x, y, weight=weight)
        # alpha_j is the share of the samples at node j that go right. The penalty is the cross entropy between alpha_j
        # and one half (their equation 5).
        right = jax.nn.sigmoid(ops.scores(tree.weights, tree.bias, x))
        reach = routing.reach_probabilities(right)[:nodes]
        share = (reach * right).sum(1) / reach.sum(1)
        penalty = -(jnp.log(share) + jnp.log1p(-share)) / 2
        return expected + (strength * penalty).sum(), tree.leaves.criterion(leaf, x, y, weight)

    def harden(params: SoftTree, batch: jtrees.Batch) -> jtrees.ObliqueTree:
        return params.sharpened().refit(*batch)

    return jtrees.Method(init, loss, harden)


@pytree.dataclass(kw_only=True)
class SoftDecisionTree(jtrees.Recipe):
    """The hard tree of a soft decision tree that Adam trains on mini-batches.

    Each start first has a trial: a tenth of the updates on four fifths of the rows. The start with the lowest held-out
    loss then trains again from the beginning, with all updates on all rows. If the time is up before, the result has
    the splits of the trial. Features are scaled to mean 0 and standard deviation 1, targets to [0, 1]. The report is a
    :class:`jtrees.search.TreeReport`.

    Attributes:
      depth: depth of the tree, 1 to 16.
      epochs: passes over the data.
      batch_size: samples in a mini-batch, at most n.
      learning_rate: learning rate of Adam.
      balance: strength of the penalty on splits that send most samples to one side.
      starts: number of random initial parameters to choose from.
    """

    depth: int = options.depth(4)
    epochs: int = options.count(100)
    batch_size: int = options.count(128)
    learning_rate: float = options.positive(0.01)
    balance: float = options.not_negative(0.1)
    starts: int = options.count(4)

    def training(self, run: Run) -> Training:
        """Returns the training of a run, as pure functions. Numeric options of the recipe are traced."""
        method = soft_decision_tree(self.depth, task=run.task, balance=self.balance)
        schedule = Schedule.of(len(run.batch.x), self.epochs, self.batch_size)
        return Training(method, optax.adam(self.learning_rate), schedule)

    async def search(self, problem: Problem) -> Fitted:
        best = problem
        if self.starts > 1:
            starts = problem.repeat(self.starts)
            [held_out] = fold_rows(problem)
            trials = await gather(*(trained(start.without(held_out), part=0.1) for start in starts))
            finite = [k for k, trial in enumerate(trials) if isinstance(trial, Fitted)]
            if not finite:
                raise trials[0]
            k = min(finite, key=lambda k: trials[k].score)
            if not problem.monitor.has_time():
                return fitted_tree(problem, trials[k], refit=True)
            best = starts[k]
        return fitted_tree(problem, await trained(best), refit=True)
