"""Greedy growth of oblique trees, level by level, on the surrogate loss of a tree of depth one.

This is CO2's procedure, and the first part of the procedure of non-greedy trees.
"""

from collections.abc import Callable
import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import optax

from jtrees import ops, pytree, splitting, topology, training
from jtrees.leaves.hierarchical import STRENGTHS
from jtrees.methods.nongreedy_tree.surrogate import (
    Surrogate,
    flip_slope,
    projection,
    surrogate_step,
    with_leaves,
)
from jtrees.monotone import without_negative
from jtrees.routing import inference
from jtrees.search import Run, SearchResult
from jtrees.search.cart import ridge_directions
from jtrees.search.minibatch import Schedule, evaluated
from jtrees.segments import ones_or
from jtrees.splitting import Thresholds
from jtrees.tasks import Classification, Task
from jtrees.training import Batch, LazyMomentumState, TrainState
from jtrees.tree import ObliqueTree

# The surrogate loss pushes a split away from a nearby sample that is correctly routed. A sample is correctly routed if
# its loss is larger at the other leaf, and nearby if ``2 |score|`` is below the difference of the losses. An initial
# split of maximal norm may have no nearby sample, above all for features with few values, and would then never be
# updated. So the initial norm makes this fraction of the correctly routed samples nearby. No value of 0.1, 0.3 and 0.6
# was best on all of four data sets.
_PUSHING = 0.3
_WIDEST = 1024  # largest number of features for a ridge regression, which costs p^3


@pytree.dataclass
class Growing:
    """The state of a greedy tree, which grows level by level.

    Attributes:
      run: training state of the current level: the tree, its velocity, the order of samples.
      level: the current level.
      place: the node of each sample on this level.
      initial: the initial splits of the level, ``(leaves / 2,)``. Their features are columns of
        :meth:`Greedy.candidates`.
      length: the norms of the initial splits, bias included.
      directions: unit vectors, ``(p, d)``. Their products with x are further features of initial splits.
      edges: edges of the bins of each feature of initial splits, ``(p + d, bins - 1)``.
    """

    run: TrainState
    level: Int[Array, ""]
    place: Int[Array, " n"]
    initial: Thresholds
    length: Float[Array, " half"]
    directions: Float[Array, "p d"]
    edges: Float[Array, "features bins"]


@dataclasses.dataclass(frozen=True)
class Greedy:
    """Greedy growth: pure functions for one task, with their options.

    Attributes:
      depth: depth of the tree.
      task: what is predicted.
      nu: squared radius of the ball of a split.
      momentum: momentum of the steps.
      learning_rate: initial learning rate of each level; it decays to zero.
      level: schedule of the mini-batches of a level.
      ridge: whether initial splits may also use the outputs of a ridge regression.
      shrink: whether the leaves of the result are shrunk towards their ancestors' values.
      monotone: the features in which predictions must not fall, ``(p,)`` bool, or None.
    """

    depth: int
    task: Task
    nu: Any
    momentum: Any
    learning_rate: Any
    level: Schedule
    ridge: bool
    shrink: bool
    monotone: Any = None

    def rate(self, steps: int) -> Callable[[Any], Any]:
        """Returns the schedule of the learning rate, which decays to zero in ``steps`` steps."""
        share = optax.cosine_decay_schedule(1.0, steps)
        return lambda count: self.learning_rate * training.at_step(share, count)

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The optimiser of a level."""
        return training.lazy_momentum(self.rate(self.level.steps), self.momentum)

    def standardised(self, batch: Batch) -> Batch:
        """Returns the batch with standardised targets, which make the losses of data sets comparable."""
        if isinstance(self.task, Classification):
            return batch
        weight = ones_or(batch.weight, batch.x)
        mean = jnp.tensordot(weight, batch.y, 1, precision="highest") / weight.sum()
        variance = jnp.tensordot(weight, jnp.square(batch.y - mean), 1, precision="highest") / weight.sum()
        deviation = jnp.sqrt(jnp.maximum(variance, jnp.finfo(variance.dtype).tiny))
        return batch._replace(y=(batch.y - mean) / deviation)

    def init(self, edges: Array, batch: Batch, *, key: Array) -> Growing:
        """Returns the state of the first level; ``edges`` are the edges of the bins of each feature."""
        n, p = batch.x.shape
        nodes, root = topology.num_nodes(self.depth), jnp.zeros(n, jnp.int32)
        splits = ObliqueTree(jnp.zeros((nodes, p), batch.x.dtype), jnp.full(nodes, -1, batch.x.dtype), None)
        data = self.standardised(batch)
        tree = with_leaves(splits, root, data, self.task)
        run = training.loop.init_state(tree, data, key=key, optimizer=self.optimizer)
        edges, directions = jnp.asarray(edges), jnp.zeros((p, 0), batch.x.dtype)
        if self.ridge and p <= _WIDEST:
            directions = _with_signs(ridge_directions(data, self.task), self.monotone)
            outputs = jnp.matmul(data.x, directions, precision="highest")
            of_outputs = splitting.edges_within(outputs, ones_or(data.weight, data.x) > 0, edges.shape[1] + 1)
            edges = jnp.concatenate([edges, of_outputs.astype(edges.dtype)])
        half = topology.num_leaves(self.depth) // 2
        none = Thresholds(jnp.zeros(half, jnp.int32), jnp.zeros(half, edges.dtype), jnp.zeros(half, batch.x.dtype))
        return self._init_level(Growing(run, root[0], root, none, none.gain, directions, edges), batch)

    def candidates(self, state: Growing, x: Array) -> Array:
        """Returns the features of initial splits: the features of x and the outputs of the ridge regression."""
        return jnp.concatenate([x, jnp.matmul(x, state.directions, precision="highest")], axis=1)

    def one_step(self, state: Growing, batch: Batch) -> Callable[..., Any]:
        """Returns the function that takes a step on the level (see :func:`jtrees.training.step.one_step`)."""
        rate, data = self.rate(self.level.steps), self.standardised(batch)

        def update(
            tree: ObliqueTree, velocity: LazyMomentumState, batch: Batch, *, key: Array, step: Array
        ) -> tuple[ObliqueTree, LazyMomentumState, tuple[Array, Array]]:
            y, node = batch.y
            surrogate = self._stump_surrogate(tree, batch.x, y, node, state.level)
            options: Any = {"rate": rate(velocity.count), "decay": self.momentum, "task": self.task}
            options["project"] = projection(self.nu, self.monotone)
            return surrogate_step(tree, velocity, batch._replace(y=y), surrogate, **options)

        data = data._replace(y=(data.y, state.place))
        return training.step.one_step(update, data, self.optimizer, batch_size=self.level.batch_size)

    def _stump_surrogate(self, tree: ObliqueTree, x: Array, y: Array, node: Array, level: Array) -> Surrogate:
        """Returns the surrogate loss of samples at the nodes of a level; each node is a tree of depth one."""
        scores = inference.scores_at(tree.weights, tree.bias, x, node[None])
        right = (scores[0] > 0).astype(jnp.int32)
        own_leaf, other_leaf = leaf_below(2 * node + 1 + jnp.stack([right, 1 - right]), level + 1, self.depth)
        reached, flipped = (self.task.loss(tree.leaves.values[leaf], y) for leaf in (own_leaf, other_leaf))
        flips = flipped - 2 * jnp.abs(scores[0]) > reached
        slopes = jnp.where(flips, flip_slope(scores), 0)
        return Surrogate(jnp.where(flips, other_leaf, own_leaf), node[None], scores, slopes, reached)

    def next_level(self, state: Growing, batch: Batch) -> Growing:
        """Returns the initial state of the next level."""
        tree, place = self.finished_level(state, batch)
        state = state.replace(run=state.run.replace(params=tree), level=state.level + 1, place=place)
        return self._init_level(state, batch)

    def _init_level(self, state: Growing, batch: Batch) -> Growing:
        """Returns the state with initial splits, and two leaves for each split, in the nodes of its level."""
        level, place, x = state.level, state.place, self.candidates(state, batch.x)
        half, local = topology.num_leaves(self.depth) // 2, place - _first(level)
        statistics, impurity = self._statistics(batch)
        initial = splitting.best_thresholds(x, state.edges, statistics, local, half, impurity)
        right = _goes_right(initial, x, local)
        own, other = leaf_below(2 * place + 1 + jnp.stack([right, 1 - right]), level + 1, self.depth)
        data = self.standardised(batch)
        tree = with_leaves(state.run.params, own, data, self.task)
        leaf_loss = lambda leaf: self.task.loss(tree.leaves.values[leaf], data.y)
        length = _lengths(initial, x, local, leaf_loss(other) - leaf_loss(own), ones_or(batch.weight, batch.x))
        state = state.replace(initial=initial, length=jnp.minimum(length, jnp.sqrt(self.nu)))
        tree = _with_rows(tree, _rows(level, half), _initial_rows(state))
        return state.replace(run=self.at_rest(state.run, tree))

    def at_rest(self, run: TrainState, tree: Any) -> TrainState:
        """Returns the run with a different tree, and zero velocity."""
        return run.replace(params=tree, opt_state=self.optimizer.init(tree))

    def finished_level(self, state: Growing, batch: Batch) -> tuple[ObliqueTree, Array]:
        """Returns the tree after the training of a level, and the child that each sample reaches.

        Each node of the level has the better of its initial and its trained split.
        """
        tree, place = state.run.params, state.place
        half, local = topology.num_leaves(self.depth) // 2, place - _first(state.level)
        scores = inference.scores_at(tree.weights, tree.bias, batch.x, place[None])[0]
        trained = (scores > 0).astype(jnp.int32)
        initial = _goes_right(state.initial, self.candidates(state, batch.x), local)
        statistics, impurity = self._statistics(batch)

        def remaining_impurity(right: Array) -> Array:
            sums = jax.ops.segment_sum(statistics, 2 * local + right, 2 * half)
            return topology.pairs(impurity(sums)).sum(1)

        better, rows = remaining_impurity(trained) < remaining_impurity(initial), _rows(state.level, half)
        trained_rows = jax.tree.map(lambda a: a.at[rows].get(mode="fill", fill_value=0), (tree.weights, tree.bias))
        weights, bias = _initial_rows(state)
        kept = jnp.where(better[:, None], trained_rows[0], weights), jnp.where(better, trained_rows[1], bias)
        below = 2 * place + 1 + jnp.where(better[local], trained, initial)
        return _with_rows(tree, rows, kept), below

    def _statistics(self, batch: Batch) -> tuple[Array, splitting.Impurity]:
        weight = ones_or(batch.weight, batch.x)
        if isinstance(self.task, Classification):
            return splitting.class_statistics(batch.y, weight, self.task.classes), splitting.entropy
        return splitting.target_statistics(self.standardised(batch).y, weight), splitting.squared_deviation

    # --- The result ---

    def evaluate(self, run: Run, tree: ObliqueTree) -> Array:
        """Returns the loss on the evaluation rows of the tree with leaves refitted to the training rows."""
        leaf, reached = (ops.hard(tree.weights, tree.bias, rows.x) for rows in (run.batch, run.by))
        tree = run.ordered(with_leaves(tree, leaf, run.batch, self.task), leaf)
        return evaluated(self.task, tree.leaves.values[reached], run.by)

    def result(self, tree: ObliqueTree, step: Array, finite: Array, run: Run, strength: Array) -> SearchResult:
        """Returns the result: the tree with refitted and shrunk leaves, and its score.

        If there is a validation set, or if a trial holds out rows, the strength of the shrinkage has the lowest loss on
        these rows. Otherwise it is ``strength``. If ``strength`` is negative, generalised cross-validation chooses the
        strength, with a cost of ``1 + sqrt(m)`` for a split of m preconditioned features.
        """
        batch, by = run.batch, run.by
        leaf, reached = (ops.hard(tree.weights, tree.bias, rows.x) for rows in (batch, by))
        ordered = lambda leaves: run.ordered(tree.replace(leaves=leaves), leaf).leaves
        loss = lambda leaves: evaluated(self.task, ordered(leaves).trainable().values[reached], by)
        leaves = with_leaves(tree, leaf, batch, self.task).leaves.refit(leaf, *batch)
        score, used = loss(leaves), jnp.zeros((), batch.x.dtype)
        if self.shrink:
            # Greedy trees have many small leaves, whose splits follow noise. Candidates for the cost of a split of m
            # features were 2, 4, powers of m, and 1 + m / 2 to 1 + m / 10. The cost 1 + sqrt(m) had the best mean score
            # on 23 data sets. A split of one feature costs 2, the usual cost in this library.
            cost = 1 + jnp.sqrt((tree.weights != 0).sum(1).astype(batch.x.dtype))
            shrunk = partial(leaves.refit_shrunk, leaf, *batch, cost=cost)
            strengths = jnp.asarray(STRENGTHS, batch.x.dtype)

            def best() -> tuple[Array, Array]:
                losses = jax.lax.map(lambda one: loss(shrunk(strength=one)[0]), strengths)
                return losses.min(), strengths[losses.argmin()]

            score, strength = jax.lax.cond(run.separate, best, lambda: (score, strength))
            leaves, used = jax.lax.cond(strength < 0, shrunk, lambda: shrunk(strength=strength))
        tree = run.on_x(tree.replace(leaves=leaves))
        return SearchResult(tree, score, finite & jnp.isfinite(score), step, Shrunk(strength, used))


class Shrunk(NamedTuple):
    """The strengths of the shrinkage of a run.

    Attributes:
      found: the strength with the lowest loss on separate rows; negative without separate rows or without shrinkage.
      used: the strength that was used.
    """

    found: Array
    used: Array


# --- Levels ----------------------------------------------------------------------------------------------------------


def leaf_below(node: Array, level: Array, depth: int) -> Array:
    """Returns the leftmost leaf below each node of a level. It holds the node's value while the tree ends there."""
    return (node - _first(level)) << (depth - level)


def _first(level: Array) -> Array:
    return (1 << level) - 1


def _rows(level: Array, half: int) -> Array:
    """Returns the nodes of a level, padded to ``half`` with an index beyond all nodes."""
    local = jnp.arange(half)
    return jnp.where(local <= _first(level), _first(level) + local, 2 * half)


def _with_rows(tree: ObliqueTree, rows: Array, new: tuple[Array, Array]) -> ObliqueTree:
    weights, bias = (a.at[rows].set(b, mode="drop") for a, b in zip((tree.weights, tree.bias), new, strict=True))
    return tree.replace(weights=weights, bias=bias)


def _with_signs(directions: Array, monotone: Array | None) -> Array:
    """Returns unit vectors ``(p, d)`` without negative entries of the monotone features."""
    if monotone is None:
        return directions
    kept = without_negative(directions.T, monotone).T
    length = jnp.linalg.norm(kept, axis=0)
    return kept / jnp.where(length > 0, length, 1)


def _goes_right(initial: Thresholds, x: Array, local: Array) -> Array:
    """Returns whether each sample goes right at the initial split of its node, 0 or 1."""
    feature = jnp.take_along_axis(x, initial.feature[local][:, None], axis=1)[:, 0]
    return ((initial.gain[local] > 0) & (feature > initial.threshold[local])).astype(jnp.int32)


def _lengths(initial: Thresholds, x: Array, local: Array, suits: Array, weight: Array) -> Float[Array, " half"]:
    """Returns the norms, bias included, at which a fraction of their samples push initial splits.

    ``suits`` is the loss of a sample at the other leaf minus its loss at its own leaf. The norm of a split is infinite
    if no sample of the split has positive ``suits``.
    """
    threshold, total = initial.threshold[local], lambda values: jax.ops.segment_sum(values, local, len(initial.gain))
    feature = jnp.take_along_axis(x, initial.feature[local][:, None], axis=1)[:, 0]
    # Score at norm 1; a sample is nearby if its score is below ``suits / 2``.
    score = jnp.abs(feature - threshold) / jnp.sqrt(1 + jnp.square(threshold))
    suited = (suits > 0) & (weight > 0)
    longest = jnp.where(suited, suits / (2 * score), 0)
    # Sorts the samples of each node by the norm up to which they push, in descending order. The norm of a split belongs
    # to the first sample at which the cumulative weight exceeds the fraction of the correctly routed weight.
    order = jnp.lexsort((-longest, local))
    node, rows = local[order], total(jnp.ones_like(local))
    first, sums = rows.cumsum() - rows, jnp.where(suited, weight, 0)[order].cumsum()
    weight_before = jnp.where(first > 0, sums[first - 1], 0)
    part = sums - weight_before[node] <= _PUSHING * total(jnp.where(suited, weight, 0))[node]
    position = first + jax.ops.segment_sum(part.astype(first.dtype), node, len(first))
    # Slightly below the norm of the sample. At exactly this norm, rounding would decide whether the sample pushes.
    length = 0.999 * longest[order][jnp.minimum(position, len(x) - 1)]
    return jnp.where(total(suited.astype(jnp.int32)) > 0, length, jnp.inf)


def _initial_rows(state: Growing) -> tuple[Array, Array]:
    """Returns the initial splits of a level, at their norms; a split without gain sends all samples left."""
    initial, p = state.initial, len(state.directions)
    divides = initial.gain > 0
    threshold = jnp.where(divides, initial.threshold, 1)
    size = state.length / jnp.sqrt(jnp.where(divides, 1 + jnp.square(threshold), 1))
    of_direction = jax.nn.one_hot(initial.feature - p, state.directions.shape[1], dtype=state.directions.dtype)
    unit = jax.nn.one_hot(initial.feature, p, dtype=state.directions.dtype)
    unit += jnp.matmul(of_direction, state.directions.T, precision="highest")
    weights = jnp.where(divides, size, 0)[:, None] * unit
    return weights.astype(threshold.dtype), (-size * threshold).astype(threshold.dtype)
