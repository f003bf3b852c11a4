"""A level of CO2 (Norouzi et al. 2015): all nodes of a level are trained side by side, each as a tree of depth one.

1. :func:`with_initial_splits` gives each node the split with the largest gain, and two leaves. A split is of one of
   the :func:`split_features`.
2. :func:`updated` trains the nodes on the surrogate loss of a tree of depth one.
3. :func:`with_better_splits` keeps the better of the initial and the trained split, and sends the samples down.

:func:`initial_state` comes before the first level, :func:`result_of` after the last. These are compiled functions of a
run, whose recipe is a :class:`jtrees.CO2`.
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
from jtrees.methods.nongreedy_tree import surrogate
from jtrees.routing.inference import Scores
from jtrees.search import Run
from jtrees.search.cart import ridge_directions
from jtrees.search.minibatch import Result, Schedule, in_parts
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
_WIDEST = 1024  # largest number of features for a ridge regression, which costs p^3

Splits = tuple[Float[Array, "m p"], Float[Array, " m"]]  # weights and biases


@pytree.dataclass
class GreedyState:
    """The state of a greedy tree, which grows level by level."""

    training: TrainState  # training state of the level: the tree, its velocity, the order of samples
    level: Int[Array, ""]  # the current level; after the last level, the depth of the tree
    node: Int[Array, " n"]  # the node of each sample, numbered from the left of the level
    initial: Splits  # the initial splits of the level: see _splits_at


def standardised(run: Run) -> Run:
    """Returns the run with standardised targets, which make the losses of data sets comparable."""
    batch, weight = run.batch, run.weight
    if not run.task.is_least_squares:
        return run
    mean = jnp.tensordot(weight, batch.y, 1, precision="highest") / weight.sum()
    variance = jnp.tensordot(weight, jnp.square(batch.y - mean), 1, precision="highest") / weight.sum()
    deviation = jnp.sqrt(jnp.maximum(variance, jnp.finfo(variance.dtype).tiny))
    return run.replace(batch=batch._replace(y=(batch.y - mean) / deviation))


def learning_rate(run: Run, schedule: Schedule) -> Callable[[Any], Any]:
    """Returns the learning rate of each update, which decays to zero over all updates of a schedule."""
    peak, decay = run.recipe.learning_rate, optax.cosine_decay_schedule(1.0, schedule.steps)
    peak = min(_RATE, _RATE_OF_SCORES / run.batch.x.shape[1]) if peak is None else peak
    return lambda step: peak * decay(step)


def optimizer(run: Run, schedule: Schedule) -> optax.GradientTransformation:
    """Returns the optimiser of a level or of the joint stage."""
    return training.lazy_momentum(learning_rate(run, schedule), run.recipe.momentum)


def split_features(run: Run, edges: Array) -> tuple[Float[Array, "p d"], Float[Array, "features bins"]]:
    """Returns the features of initial splits besides x: unit vectors, whose products with x are these features."""
    # Also returns the edges of the bins of all `p + d` features. The argument has the edges of the bins of x.
    x, edges = run.batch.x, jnp.asarray(edges)
    if not run.recipe.ridge or x.shape[1] > _WIDEST:
        return jnp.zeros((x.shape[1], 0), x.dtype), edges
    directions = ridge_directions(standardised(run).batch, run.task, run.monotone)
    outputs = jnp.matmul(x, directions, precision="highest")
    output_edges = splitting.edges_within(outputs, run.weight, edges.shape[1] + 1)
    return directions, jnp.concatenate([edges, output_edges.astype(edges.dtype)])


def initial_state(run: Run) -> GreedyState:
    """Returns the state before the first level."""
    run = standardised(run)
    (n, p), dtype, nodes = run.batch.x.shape, run.batch.x.dtype, topology.num_nodes(run.recipe.depth)
    node = jnp.zeros(n, jnp.int32)
    tree = ObliqueTree(jnp.zeros((nodes, p), dtype), jnp.full(nodes, -1, dtype), None)
    tree = surrogate.with_leaves(tree, node, run.batch, run.task)
    momentum = optimizer(run, run.recipe.level(n))
    state = training.loop.init_state(tree, run.batch, key=run.key, optimizer=momentum)
    return GreedyState(state, jnp.zeros((), jnp.int32), node, _splits_at(tree, 0))


def with_initial_splits(run: Run, state: GreedyState, features: tuple[Array, Array]) -> GreedyState:
    """Returns the state with initial splits, and two leaves for each split, in the nodes of the level."""
    run, (directions, edges) = standardised(run), features
    (x, y, _), node, half = run.batch, state.node, len(state.initial[1])
    values = jnp.concatenate([x, jnp.matmul(x, directions, precision="highest")], axis=1)
    statistics, impurity = splitting.statistics_of(run.task, y, run.weight)
    best = splitting.best_thresholds(values, edges, statistics, node, half, impurity)
    margin = jnp.take_along_axis(values, best.feature[node][:, None], axis=1)[:, 0] - best.threshold[node]
    right = ((best.gain[node] > 0) & (margin > 0)).astype(jnp.int32)
    leaf, sibling = _leaves_below(run, state.level, node, right)
    tree = surrogate.with_leaves(state.training.params, leaf, run.batch, run.task)
    leaf_loss = lambda leaf: run.task.loss(tree.leaves.values[leaf], y)
    score = jnp.abs(margin) / jnp.sqrt(1 + jnp.square(best.threshold[node]))
    length = pushing_lengths(score, leaf_loss(sibling) - leaf_loss(leaf), run.weight, node, half)
    initial = _splits_of(best, jnp.minimum(length, jnp.sqrt(run.recipe.nu)), directions)
    at_rest = jax.tree.map(jnp.zeros_like, state.training.opt_state)
    trained = state.training.replace(params=_with_splits(tree, state.level, initial), opt_state=at_rest)
    return state.replace(training=trained, initial=initial)


def updated(run: Run, state: GreedyState, before: Array, count: Array) -> tuple[GreedyState, Array, bool]:
    """Returns the state after ``count`` updates on the level, their losses, and False."""
    run = standardised(run)
    schedule = run.recipe.level(len(run.batch.x))
    momentum = optimizer(run, schedule)
    surrogate_of = lambda tree, batch: _stump_surrogate(run, state.level, tree, batch)
    project = partial(surrogate.into_ball, nu=run.recipe.nu, monotone=run.monotone)
    update = surrogate.surrogate_update(surrogate_of, momentum, project, run.task)
    batch = run.batch._replace(y=(run.batch.y, state.node))
    step = training.step.one_step(update, batch, momentum, batch_size=schedule.batch_size)
    trained, history = training.loop.advance_up_to(step, state.training, count, step=before)
    return state.replace(training=trained), history.losses, False


def _stump_surrogate(run: Run, level: Array, tree: ObliqueTree, batch: Batch) -> surrogate.Surrogate:
    """Returns the surrogate loss of samples at the nodes of a level; each node is a tree of depth one."""
    # Let z be the score of a sample, and l and m the losses at the leaves on its side and on the other side. The
    # surrogate loss is the larger of l and `m - 2 |z|`.
    y, node = batch.y
    nodes = (1 << level) - 1 + node[None]
    scores = Scores(tree.weights, tree.bias, batch.x).at(nodes)
    leaf, sibling = _leaves_below(run, level, node, (scores[0] > 0).astype(jnp.int32))
    reached, flipped = (run.task.loss(tree.leaves.values[side], y) for side in (leaf, sibling))
    flips = flipped - 2 * jnp.abs(scores[0]) > reached
    slopes = jnp.where(flips, surrogate.flip_slope(scores), 0)
    return surrogate.Surrogate(jnp.where(flips, sibling, leaf), nodes, scores, slopes, reached)


def with_better_splits(run: Run, state: GreedyState) -> GreedyState:
    """Returns the state of the next level. Each node of the level has the better of its initial and trained split."""
    run = standardised(run)
    (x, y, _), tree, node, half = run.batch, state.training.params, state.node, len(state.initial[1])
    statistics, impurity = splitting.statistics_of(run.task, y, run.weight)
    scores = lambda splits: Scores(splits[0], splits[1], x).at(node[None])[0]
    child_of = lambda splits: 2 * node + (scores(splits) > 0).astype(jnp.int32)
    impurity_of = lambda child: impurity(jax.ops.segment_sum(statistics, child, 2 * half)).reshape(half, 2).sum(1)
    initial, trained = state.initial, _splits_at(tree, state.level)
    initial_child, trained_child = child_of(initial), child_of(trained)
    is_better = impurity_of(trained_child) < impurity_of(initial_child)
    weights = jnp.where(is_better[:, None], trained[0], initial[0])
    tree = _with_splits(tree, state.level, (weights, jnp.where(is_better, trained[1], initial[1])))
    node = jnp.where(is_better[node], trained_child, initial_child)
    return state.replace(training=state.training.replace(params=tree), level=state.level + 1, node=node)


def grown_in_program(run: Run, edges: Array) -> GreedyState:
    """Returns the state after the last level, within one program."""
    steps, features = run.recipe.level(len(run.batch.x)).steps, split_features(run, edges)

    def grow_level(level: Array, state: GreedyState) -> GreedyState:
        state = with_initial_splits(run, state, features)
        return with_better_splits(run, in_parts(updated, run, state, steps, level * steps))

    return jax.lax.fori_loop(0, run.recipe.depth, grow_level, initial_state(run))


class Shrinkage(NamedTuple):
    """The strengths of the shrinkage of a run."""

    # The strength with the lowest loss on separate rows; negative without separate rows or without shrinkage
    best: Array
    used: Array  # the strength that was used


def evaluate(run: Run, tree: ObliqueTree) -> Array:
    """Returns the loss on the evaluation rows of the tree with leaves refitted to the training rows."""
    leaf, loss = _evaluation(run, tree)
    return loss(surrogate.fitted_leaves(tree, leaf, run.batch, run.task))


def _evaluation(run: Run, tree: ObliqueTree) -> tuple[Array, Callable[[Any], Array]]:
    """Returns the leaf of each training row, and the loss on the evaluation rows as a function of the leaves."""
    leaf, reached = (ops.hard(tree.weights, tree.bias, rows.x) for rows in (run.batch, run.evaluation))

    def loss(leaves: Any) -> Array:
        outputs = run.ordered(tree.replace(leaves=leaves), leaf).leaves.trainable().values[reached]
        return losses.mean_loss(run.task.loss(outputs, run.evaluation.y), run.evaluation.weight)

    return leaf, loss


def result_of(run: Run, tree: ObliqueTree, step: Array, finite: Array, strength: Array) -> Result:
    """Returns the result: the tree with refitted and shrunk leaves, its score, and the :class:`Shrinkage`."""
    # If there is a validation set, or if a trial holds out rows, the strength of the shrinkage has the lowest loss on
    # these rows. Otherwise it is `strength`. If `strength` is negative, generalised cross-validation chooses the
    # strength, with a cost of `1 + sqrt(m)` for a split of m preconditioned features. The score of a training that was
    # not `finite` is NaN.
    (leaf, loss), dtype = _evaluation(run, tree), run.batch.x.dtype
    leaves = surrogate.fitted_leaves(tree, leaf, run.batch, run.task)
    score, used = loss(leaves), jnp.zeros((), dtype)
    if run.recipe.shrink:
        # Greedy trees have many small leaves, whose splits follow noise. Candidates for the cost of a split of m
        # features were 2, 4, powers of m, and 1 + m / 2 to 1 + m / 10. The cost 1 + sqrt(m) had the best mean score
        # on 23 data sets. A split of one feature costs 2, the usual cost in this library.
        cost = 1 + jnp.sqrt((tree.weights != 0).sum(1).astype(dtype))
        shrunk = partial(leaves.refit_shrunk, leaf, *run.batch, cost=cost)
        strengths = jnp.asarray(STRENGTHS, dtype)

        def best() -> tuple[Array, Array]:
            scores = jax.lax.map(lambda strength: loss(shrunk(strength=strength)[0]), strengths)
            return scores.min(), strengths[scores.argmin()]

        score, strength = jax.lax.cond(run.has_separate_rows, best, lambda: (score, strength))
        leaves, used = jax.lax.cond(strength < 0, shrunk, lambda: shrunk(strength=strength))
    score = jnp.where(finite, score, jnp.nan)
    return Result(tree.replace(leaves=leaves), score, step, Shrinkage(strength, used))


def _splits_at(tree: ObliqueTree, level: Array | int) -> Splits:
    """Returns the splits of a level. There are as many as on the last level: others belong to the next levels."""
    first, half = (1 << level) - 1, (len(tree.bias) + 1) // 2
    weights, bias = (jax.lax.dynamic_slice_in_dim(a, first, half) for a in (tree.weights, tree.bias))
    return weights, bias


def _with_splits(tree: ObliqueTree, level: Array, splits: Splits) -> ObliqueTree:
    """Returns the tree with the splits of a level. Splits of the next levels replace the splits beyond the level."""
    put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=(1 << level) - 1, axis=0)
    return tree.replace(weights=put(tree.weights, splits[0]), bias=put(tree.bias, splits[1]))


def _leaves_below(run: Run, level: Array, node: Array, right: Array) -> tuple[Array, Array]:
    """Returns the leaf below the child that each sample reaches from its node of a level, and below the other child."""
    # It is the leftmost leaf, which holds the value of the child while the tree ends there.
    below = lambda child: child << (run.recipe.depth - level - 1)
    return below(2 * node + right), below(2 * node + 1 - right)


def pushing_lengths(score: Array, excess: Array, weight: Array, node: Array, nodes: int) -> Float[Array, " nodes"]:
    """Returns the norms, bias included, at which a fraction of their samples push splits; infinite if no sample does.

    ``score`` is the absolute score of a sample at norm 1, at the split of its node. ``excess`` is the loss of the
    sample at the other leaf minus its loss at its own leaf.
    """
    weight = jnp.where(excess > 0, weight, 0)
    longest = jnp.where(weight > 0, excess / (2 * score), 0)  # a sample is nearby if its score is below ``excess / 2``
    # Sorts the samples of each node by the norm up to which they push, in descending order. The norm of a split belongs
    # to the first sample at which the cumulative weight exceeds the fraction of the correctly routed weight.
    order, total = jnp.lexsort((-longest, node)), jax.ops.segment_sum(weight, node, nodes)
    node, longest = node[order], longest[order]
    cumulative = jnp.cumsum(weight[order]) - (jnp.cumsum(total) - total)[node]
    length = jax.ops.segment_max(jnp.where(cumulative > PUSHING * total[node], longest, 0), node, nodes)
    # Slightly below the norm of the sample. At exactly this norm, rounding would decide whether the sample pushes.
    return jnp.where(length > 0, 0.999 * length, jnp.inf)


def _splits_of(best: splitting.Thresholds, length: Array, directions: Array) -> tuple[Array, Array]:
    """Returns the weights and biases of splits, at their norms; a split without gain sends all samples left."""
    p, divides = len(directions), best.gain > 0
    threshold = jnp.where(divides, best.threshold, 1)
    size = length / jnp.sqrt(jnp.where(divides, 1 + jnp.square(threshold), 1))
    direction = jax.nn.one_hot(best.feature - p, directions.shape[1], dtype=directions.dtype)
    unit = jax.nn.one_hot(best.feature, p, dtype=directions.dtype)
    unit += jnp.matmul(direction, directions.T, precision="highest")
    weights = jnp.where(divides, size, 0)[:, None] * unit
    return weights.astype(threshold.dtype), (-size * threshold).astype(threshold.dtype)
