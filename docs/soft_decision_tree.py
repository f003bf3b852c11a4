"""A sixth method in one file: the soft decision tree of Frosst & Hinton, "Distilling a Neural Network Into a Soft
Decision Tree" (2017).

Each split goes right with probability ``sigmoid(beta_j (w_j x + b_j))``, where the sharpness ``beta_j`` is learnt with
the split, and a penalty asks splits to use both of their sides (their section 4.1). The loss is the one that a sample
expects over the leaves; unlike the paper's program, this one also regresses, and ends in the hard tree.

A method is three functions; a recipe is its options and a search. That is all: :class:`SoftDecisionTree` can be fitted,
tuned, swept, bagged (``jtrees.Bagged(SoftDecisionTree())``), polished, saved, and put into the scikit-learn estimators.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jtrees
from jtrees import leaves, ops, pytree, routing, topology
from jtrees.search import (
    Run,
    Runs,
    Schedule,
    SearchResult,
    Training,
    advanced,
    held_out_rows,
    initial,
    options,
    trained,
)


@pytree.dataclass
class SoftTree:
    """What is trained.

    Attributes:
      tree: splits and leaves.
      log_sharpness: logarithm of the sharpness of each split, ``(nodes,)``.
    """

    tree: jtrees.ObliqueTree
    log_sharpness: jax.Array

    def sharpened(self) -> jtrees.ObliqueTree:
        """The tree with the sharpness multiplied into its splits, which leaves the hard routing as it is."""
        sharpness = jnp.exp(self.log_sharpness)
        return self.tree.replace(weights=sharpness[:, None] * self.tree.weights, bias=sharpness * self.tree.bias)


def soft_decision_tree(depth: int, *, task: jtrees.tasks.Task, balance: float) -> jtrees.Method:
    """The method, for :func:`jtrees.train`.

    Args:
      depth: depth of the tree.
      task: what is predicted.
      balance: strength of the penalty on splits that send most samples one way; halved on each level.
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
        # alpha_j, the share of the samples at node j that goes right: cross entropy with one half (their equation 5).
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
    """A soft decision tree, trained on mini-batches by Adam, as its hard tree.

    Several starts are trained briefly on four fifths of the rows; the best on the others is then trained on all rows.
    Features are scaled to mean 0 and deviation 1, targets to [0, 1]. The report is a
    :class:`jtrees.search.TreeReport`.

    Attributes:
      depth: depth of the tree, 1 to 16.
      epochs: passes over the data.
      batch_size: samples in a mini-batch; n if that is less.
      learning_rate: of Adam.
      balance: strength of the penalty on splits that send most samples one way.
      starts: number of initial parameters to choose from.
    """

    depth: int = options.depth(4)
    epochs: int = options.count(100)
    batch_size: int = options.count(128)
    learning_rate: float = options.positive(0.01)
    balance: float = options.not_negative(0.1)
    starts: int = options.count(4)

    def schedule(self, n: int) -> Schedule:
        """Returns the number and size of the mini-batches of n rows."""
        return Schedule.of(n, self.epochs, self.batch_size)

    def training(self, run: Run) -> Training:
        """Returns the training of one run, as pure functions; numeric options are traced."""
        method = soft_decision_tree(self.depth, task=run.task, balance=self.balance)
        return Training(method, optax.adam(self.learning_rate), self.schedule(len(run.batch.x)))

    def search(self, runs: Runs) -> list[SearchResult]:
        """Returns the result of each run: one of a fit, several of a sweep or of a bag."""
        if self.starts == 1:
            return trained(runs)
        starts = runs.repeat(self.starts)
        held_out = [rows for rows in held_out_rows(runs) for _ in range(self.starts)]
        trial = starts.on(held_out=held_out)
        steps = math.ceil(self.schedule(runs.shape[0]).steps / 10)
        found = trial.train(advanced, trial.map(initial), steps, name="starts")
        losses = np.reshape(trial.fetch(trial.map(held_out_loss, found.states)), (-1, self.starts))
        best = np.where(np.isfinite(losses), losses, np.inf).argmin(1)
        return trained(starts.select(best + self.starts * np.arange(len(runs))))


def held_out_loss(run: Run, state: jtrees.training.TrainState) -> jax.Array:
    """Returns the loss of a run's hard tree on the rows that the run leaves out; compiled for all runs at once."""
    return run.recipe.training(run).loss_on(run, state.params)
