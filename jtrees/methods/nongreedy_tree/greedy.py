"""Greedy growth of oblique trees, level by level, on the surrogate loss of a tree of depth one.

This is CO2's procedure, and the first part of the procedure of non-greedy trees. The functions are compiled functions
of a run, whose recipe is a :class:`jtrees.CO2`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import optax

from jtrees import losses, ops, pytree, splitting, topology, training
from jtrees.leaves.hierarchical import STRENGTHS
from jtrees.methods.nongreedy_tree.surrogate import Surrogate, flip_slope, projection, surrogate_update, with_leaves
from jtrees.monotone import without_negative
from jtrees.routing import inference
from jtrees.search import Evaluation, Run
from jtrees.search.cart import ridge_directions
from jtrees.search.engine import MOST
from jtrees.search.minibatch import Result, in_parts
from jtrees.segments import wide
from jtrees.splitting import Thresholds
from jtrees.tasks import Classification
from jtrees.training import Batch, TrainState
from jtrees.tree import ObliqueTree

# The surrogate loss pushes a split away from a nearby sample that is correctly routed. A sample is correctly routed if
# its loss is larger at the other leaf, and nearby if ``2 |score|`` is below the difference of the losses. An initial
# split of maximal norm may have no nearby sample, above all for features with few values, and would then never be
# updated. So the initial norm makes this fraction of the correctly routed samples nearby. No value of 0.1, 0.3 and 0.6
# was best on all of four data sets.
PUSHING = 0.3
# Default learning rate. A step moves the score of a sample by the rate times its squared norm, which is on average the
# number of features. These values were the best or nearly the best on eight data sets of 8 to 784 features.
_RATE, _RATE_OF_SCORES = 0.5, 8.0
_OPTIMIZER = training.lazy_momentum(0.0)  # its initial state does not depend on the learning rate
_WIDEST = 1024  # largest number of features for a ridge regression, which costs p^3


@pytree.dataclass
class GreedyState:
    """The state of a greedy tree, which grows level by level.

    Attributes:
      training: training state of the current level: the tree, its velocity, the order of samples.
      level: the current level.
      place: the node of each sample on this level.
      initial: weights ``(leaves / 2, p)`` and biases of the initial splits of the level.
      directions: unit vectors, ``(p, d)``. Their products with x are further features of initial splits.
      edges: edges of the bins of each feature of initial splits, ``(p + d, bins - 1)``.
    """

    training: TrainState
    level: Int[Array, ""]
    place: Int[Array, " n"]
    initial: tuple[Float[Array, "half p"], Float[Array, " half"]]
    directions: Float[Array, "p d"]
    edges: Float[Array, "features bins"]


# --- Data and optimiser ----------------------------------------------------------------------------------------------


def standardised(run: Run) -> Batch:
    """Returns the training rows with standardised targets, which make the losses of data sets comparable."""
    batch, weight = run.batch, run.weight
    if isinstance(run.task, Classification):
        return batch
    mean = jnp.tensordot(weight, batch.y, 1, precision="highest") / weight.sum()
    variance = jnp.tensordot(weight, jnp.square(batch.y - mean), 1, precision="highest") / weight.sum()
    deviation = jnp.sqrt(jnp.maximum(variance, jnp.finfo(variance.dtype).tiny))
    return batch._replace(y=(batch.y - mean) / deviation)


def rate(run: Run, steps: int) -> Callable[[Any], Any]:
    """Returns the schedule of the learning rate, which decays to zero in ``steps`` steps."""
    peak, share = run.recipe.learning_rate, optax.cosine_decay_schedule(1.0, steps)
    peak = min(_RATE, _RATE_OF_SCORES / run.batch.x.shape[1]) if peak is None else peak
    return lambda count: peak * training.at_step(share, count)


def restarted(state: TrainState, tree: Any) -> TrainState:
    """Returns the training state with a different tree, and zero velocity."""
    return state.replace(params=tree, opt_state=_OPTIMIZER.init(tree))


# --- Levels ----------------------------------------------------------------------------------------------------------


def first_level(run: Run, edges: Array) -> GreedyState:
    """Returns the initial state of the first level; ``edges`` are the edges of the bins of each feature."""
    batch, depth = standardised(run), run.recipe.depth
    (n, p), dtype, nodes = batch.x.shape, batch.x.dtype, topology.num_nodes(depth)
    splits = ObliqueTree(jnp.zeros((nodes, p), dtype), jnp.full(nodes, -1, dtype), None)
    root, edges, directions = jnp.zeros(n, jnp.int32), jnp.asarray(edges), jnp.zeros((p, 0), dtype)
    if run.recipe.ridge and p <= _WIDEST:
        directions = _with_signs(ridge_directions(batch, run.task), run.monotone)
        outputs = jnp.matmul(batch.x, directions, precision="highest")
        output_edges = splitting.edges_within(outputs, run.weight > 0, edges.shape[1] + 1)
        edges = jnp.concatenate([edges, output_edges.astype(edges.dtype)])
    tree = with_leaves(splits, root, batch, run.task)
    state = training.loop.init_state(tree, batch, key=run.key, optimizer=_OPTIMIZER)
    none = splits.weights[:0], splits.bias[:0]
    return _with_initial_splits(run, GreedyState(state, root[0], root, none, directions, edges))


def next_level(run: Run, state: GreedyState) -> GreedyState:
    """Returns the initial state of the next level."""
    tree, place = finished_level(run, state)
    trained = state.training.replace(params=tree)
    return _with_initial_splits(run, state.replace(training=trained, level=state.level + 1, place=place))


def _with_initial_splits(run: Run, state: GreedyState) -> GreedyState:
    """Returns the state with initial splits, and two leaves for each split, in the nodes of the level."""
    data, half, place, level = standardised(run), _half(run), state.place, state.level
    node = place - _first(level)
    x = jnp.concatenate([data.x, jnp.matmul(data.x, state.directions, precision="highest")], axis=1)
    statistics, impurity = splitting.statistics_of(run.task, data.y, run.weight)
    best = splitting.best_thresholds(x, state.edges, statistics, node, half, impurity)
    margin = jnp.take_along_axis(x, best.feature[node][:, None], axis=1)[:, 0] - best.threshold[node]
    right = ((best.gain[node] > 0) & (margin > 0)).astype(jnp.int32)
    leaf, sibling = _leaves_below(run, place, right, level)
    tree = with_leaves(state.training.params, leaf, data, run.task)
    leaf_loss = lambda leaf: run.task.loss(tree.leaves.values[leaf], data.y)
    score = jnp.abs(margin) / jnp.sqrt(1 + jnp.square(best.threshold[node]))
    length = pushing_lengths(score, leaf_loss(sibling) - leaf_loss(leaf), run.weight, node, half)
    initial = _splits_of(best, jnp.minimum(length, jnp.sqrt(run.recipe.nu)), state.directions)
    tree = _with_rows(tree, _rows(level, half), initial)
    return state.replace(training=restarted(state.training, tree), initial=initial)


def advanced(run: Run, state: GreedyState, before: Array, count: Array) -> tuple[GreedyState, Array, Array]:
    """Returns the state after ``count`` updates on the level, their losses, and False."""
    recipe, data, schedule = run.recipe, standardised(run), run.recipe.level(len(run.batch.x))
    rates, data = rate(run, schedule.steps), data._replace(y=(data.y, state.place))
    surrogate_of = lambda tree, batch: _stump_surrogate(run, tree, batch, state.level)
    update = surrogate_update(surrogate_of, rates, recipe.momentum, projection(recipe.nu, run.monotone), run.task)
    step = training.step.one_step(update, data, _OPTIMIZER, batch_size=schedule.batch_size)
    trained, history = training.loop.advance_up_to(step, state.training, count, MOST, step=before)
    return state.replace(training=trained), history.losses, jnp.array(False)


def _stump_surrogate(run: Run, tree: ObliqueTree, batch: Batch, level: Array) -> Surrogate:
    """Returns the surrogate loss of samples at the nodes of a level; each node is a tree of depth one."""
    y, node = batch.y
    scores = inference.scores_at(tree.weights, tree.bias, batch.x, node[None])
    leaf, sibling = _leaves_below(run, node, (scores[0] > 0).astype(jnp.int32), level)
    reached, flipped = (run.task.loss(tree.leaves.values[side], y) for side in (leaf, sibling))
    flips = flipped - 2 * jnp.abs(scores[0]) > reached
    slopes = jnp.where(flips, flip_slope(scores), 0)
    return Surrogate(jnp.where(flips, sibling, leaf), node[None], scores, slopes, reached)


def finished_level(run: Run, state: GreedyState) -> tuple[ObliqueTree, Array]:
    """Returns the tree after the training of a level, and the child that each sample reaches.

    Each node of the level has the better of its initial and its trained split.
    """
    tree, place, x, half = state.training.params, state.place, run.batch.x, _half(run)
    node, rows = place - _first(state.level), _rows(state.level, half)
    statistics, impurity = splitting.statistics_of(run.task, standardised(run).y, run.weight)
    trained = tuple(a.at[rows].get(mode="fill", fill_value=0) for a in (tree.weights, tree.bias))

    def right(splits: tuple[Array, Array]) -> Array:
        return (inference.scores_at(*splits, x, node[None])[0] > 0).astype(jnp.int32)

    def remaining_impurity(splits: tuple[Array, Array]) -> Array:
        sums = jax.ops.segment_sum(statistics, 2 * node + right(splits), 2 * half)
        return topology.pairs(impurity(sums)).sum(1)

    better = remaining_impurity(trained) < remaining_impurity(state.initial)
    weights, bias = (jnp.where(wide(better, a), a, b) for a, b in zip(trained, state.initial, strict=True))
    return _with_rows(tree, rows, (weights, bias)), 2 * place + 1 + right((weights, bias))


def grown_in_program(run: Run, edges: Array) -> GreedyState:
    """Returns the state after the updates of the last level, which :func:`finished_level` ends, within one program."""
    steps = run.recipe.level(len(run.batch.x)).steps

    def level_of(level: Array, state: GreedyState) -> GreedyState:
        state = jax.lax.cond(level > 0, partial(next_level, run), lambda state: state, state)
        return in_parts(advanced, run, state, steps, level * steps)

    return jax.lax.fori_loop(0, run.recipe.depth, level_of, first_level(run, edges))


# --- The result ------------------------------------------------------------------------------------------------------


class Shrinkage(NamedTuple):
    """The strengths of the shrinkage of a run.

    Attributes:
      best: the strength with the lowest loss on separate rows; negative without separate rows or without shrinkage.
      used: the strength that was used.
    """

    best: Array
    used: Array


def evaluate(run: Run, tree: ObliqueTree) -> Array:
    """Returns the loss on the evaluation rows of the tree with leaves refitted to the training rows."""
    leaf, reached = (ops.hard(tree.weights, tree.bias, rows.x) for rows in (run.batch, run.evaluation))
    tree = run.ordered(with_leaves(tree, leaf, run.batch, run.task), leaf)
    return _mean_loss(run, tree.leaves.values[reached])


def _mean_loss(run: Run, outputs: Array) -> Array:
    """Returns the mean loss of outputs for the evaluation rows."""
    return losses.mean_loss(run.task.loss(outputs, run.evaluation.y), run.evaluation.weight)


def result_of(run: Run, state: TrainState, tree: ObliqueTree, step: Array, strength: Array) -> Result:
    """Returns the result: the tree with refitted and shrunk leaves, its score, and the :class:`Shrinkage`.

    If there is a validation set, or if a trial holds out rows, the strength of the shrinkage has the lowest loss on
    these rows. Otherwise it is ``strength``. If ``strength`` is negative, generalised cross-validation chooses the
    strength, with a cost of ``1 + sqrt(m)`` for a split of m preconditioned features. The score of a training that was
    not finite is NaN.
    """
    batch, dtype = run.batch, run.batch.x.dtype
    leaf, reached = (ops.hard(tree.weights, tree.bias, rows.x) for rows in (batch, run.evaluation))
    ordered = lambda leaves: run.ordered(tree.replace(leaves=leaves), leaf).leaves
    loss = lambda leaves: _mean_loss(run, ordered(leaves).trainable().values[reached])
    leaves = with_leaves(tree, leaf, batch, run.task).leaves.refit(leaf, *batch)
    score, used = loss(leaves), jnp.zeros((), dtype)
    if run.recipe.shrink:
        # Greedy trees have many small leaves, whose splits follow noise. Candidates for the cost of a split of m
        # features were 2, 4, powers of m, and 1 + m / 2 to 1 + m / 10. The cost 1 + sqrt(m) had the best mean score
        # on 23 data sets. A split of one feature costs 2, the usual cost in this library.
        cost = 1 + jnp.sqrt((tree.weights != 0).sum(1).astype(dtype))
        shrunk = partial(leaves.refit_shrunk, leaf, *batch, cost=cost)
        strengths = jnp.asarray(STRENGTHS, dtype)

        def best() -> tuple[Array, Array]:
            scores = jax.lax.map(lambda strength: loss(shrunk(strength=strength)[0]), strengths)
            return scores.min(), strengths[scores.argmin()]

        score, strength = jax.lax.cond(run.kind >= Evaluation.HELD_OUT, best, lambda: (score, strength))
        leaves, used = jax.lax.cond(strength < 0, shrunk, lambda: shrunk(strength=strength))
    score = jnp.where(state.finite, score, jnp.nan)
    return Result(tree.replace(leaves=leaves), score, step, Shrinkage(strength, used))


# --- Nodes and splits of a level -------------------------------------------------------------------------------------


def _first(level: Array) -> Array:
    return (1 << level) - 1


def _half(run: Run) -> int:
    """Returns the largest number of splits of a level."""
    return topology.num_leaves(run.recipe.depth) // 2


def _leaves_below(run: Run, node: Array, right: Array, level: Array) -> tuple[Array, Array]:
    """Returns the leaf below the child that each sample reaches from its node of a level, and below the other child.

    It is the leftmost leaf, which holds the value of the child while the tree ends there.
    """
    below = lambda child: (child - _first(level + 1)) << (run.recipe.depth - level - 1)
    return below(2 * node + 1 + right), below(2 * node + 2 - right)


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
    positive = without_negative(directions.T, monotone).T
    length = jnp.linalg.norm(positive, axis=0)
    return positive / jnp.where(length > 0, length, 1)


def pushing_lengths(score: Array, suits: Array, weight: Array, node: Array, nodes: int) -> Float[Array, " nodes"]:
    """Returns the norms, bias included, at which a fraction of their samples push splits.

    ``score`` is the absolute score of a sample at norm 1, at the split of its node. ``suits`` is the loss of the sample
    at the other leaf minus its loss at its own leaf. The norm of a split is infinite if no sample of the split has
    positive ``suits``.
    """
    weight = jnp.where(suits > 0, weight, 0)
    longest = jnp.where(weight > 0, suits / (2 * score), 0)  # a sample is nearby if its score is below ``suits / 2``
    # Sorts the samples of each node by the norm up to which they push, in descending order. The norm of a split belongs
    # to the first sample at which the cumulative weight exceeds the fraction of the correctly routed weight.
    order, total = jnp.lexsort((-longest, node)), jax.ops.segment_sum(weight, node, nodes)
    node, longest = node[order], longest[order]
    cumulative = jnp.cumsum(weight[order]) - (jnp.cumsum(total) - total)[node]
    length = jax.ops.segment_max(jnp.where(cumulative > PUSHING * total[node], longest, 0), node, nodes)
    # Slightly below the norm of the sample. At exactly this norm, rounding would decide whether the sample pushes.
    return jnp.where(length > 0, 0.999 * length, jnp.inf)


def _splits_of(best: Thresholds, length: Array, directions: Array) -> tuple[Array, Array]:
    """Returns the weights and biases of splits, at their norms; a split without gain sends all samples left."""
    p, divides = len(directions), best.gain > 0
    threshold = jnp.where(divides, best.threshold, 1)
    size = length / jnp.sqrt(jnp.where(divides, 1 + jnp.square(threshold), 1))
    direction = jax.nn.one_hot(best.feature - p, directions.shape[1], dtype=directions.dtype)
    unit = jax.nn.one_hot(best.feature, p, dtype=directions.dtype)
    unit += jnp.matmul(direction, directions.T, precision="highest")
    weights = jnp.where(divides, size, 0)[:, None] * unit
    return weights.astype(threshold.dtype), (-size * threshold).astype(threshold.dtype)
