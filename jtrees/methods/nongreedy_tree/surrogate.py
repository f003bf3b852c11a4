"""The surrogate loss of CO2 and non-greedy trees, and an update of the rows that a batch touches.

The surrogate loss is an upper bound of the loss of the hard tree.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrees import blocking, leaves as kinds, ops, routing, topology
from jtrees.methods.nongreedy_tree.lazy_rows import move_rows, touched
from jtrees.monotone import without_negative
from jtrees.routing import inference as loss_augmented
from jtrees.tasks import Task
from jtrees.training import Batch, LazyMomentumState
from jtrees.training.optimizers import momentum_step
from jtrees.tree import ObliqueTree

MAX_DEPTH = 20
# A step is dense if the tree has at most this number of splits for each split that a batch may touch. Measured on two
# cores with 16, 126 and 784 features, by steps of 128 samples on trees of depth 8 to 12.
_MOVED_WHOLE = 2
# Fast inference scores all splits up to these numbers of splits, per feature and in total. Measured in the same
# setting.
_SCORED_A_FEATURE, _SCORED = 16, 2**11
INFERENCES = ("fast", "exact")


class Surrogate(NamedTuple):
    """The surrogate loss of each sample, ``loss at leaf + sum of slopes * scores``.

    Attributes:
      leaf: the leaf of the loss term, ``(n,)``.
      nodes: splits whose scores enter the surrogate loss, ``(r, n)``.
      scores: the scores of these splits, ``(r, n)``.
      slopes: derivatives of the bound by the scores: 0, 2 or -2, ``(r, n)``.
      reached: loss at the leaf that the sample reaches, ``(n,)``.
    """

    leaf: Int[Array, " n"]
    nodes: Int[Array, "r n"]
    scores: Float[Array, "r n"]
    slopes: Float[Array, "r n"]
    reached: Float[Array, " n"]


def flip_slope(scores: Array) -> Array:
    """Returns the slope of ``-2 |score|``, the term of a flipped decision."""
    return jnp.where(scores > 0, -2, 2).astype(scores.dtype)


def with_leaves(tree: ObliqueTree, leaf: Int[Array, " n"], batch: Batch, task: Task) -> ObliqueTree:
    """Returns the tree with initial trainable leaves: means of targets, or smoothed class frequencies as logits."""
    empty = kinds.kind_of("constant", task).empty(topology.num_leaves(tree.depth), 0, task.shape, batch.x.dtype)
    return tree.replace(leaves=empty.refit(leaf, *batch).trainable())


def scores_of(params: ObliqueTree, x: Array, inference: str) -> Array | None:
    """Returns the scores of all splits, or None if it is faster to compute only the scores that inference needs."""
    nodes, features = params.weights.shape
    scored = inference == "exact" or nodes <= min(_SCORED, _SCORED_A_FEATURE * features)
    return ops.scores(params.weights, params.bias, x) if scored else None


def split(y: Any) -> tuple[Array, Array | None]:
    """Returns targets and the leaves that samples are assigned to, or targets and None."""
    return y if isinstance(y, tuple) else (y, None)


def surrogate_loss(
    params: ObliqueTree,
    batch: Batch,
    scores: Float[Array, "nodes n"] | None,
    inference: str,
    task: Task,
) -> Surrogate:
    """Returns the surrogate loss of each sample.

    Args:
      params: the tree.
      batch: samples with targets, or with targets and assigned leaves.
      scores: scores of all splits. None: fast inference computes only the scores that it needs.
      inference: ``"fast"`` or ``"exact"``.
      task: what is predicted.
    """
    (y, assigned), values = split(batch.y), params.leaves.values
    leaf_loss = lambda leaf: task.loss(values[leaf], y)
    splits = params.weights, params.bias
    scores_at = lambda nodes: (
        loss_augmented.scores_at(*splits, batch.x, nodes) if scores is None else _rows_of(scores, nodes)
    )

    def against_path(leaf: Array) -> tuple[Array, Array, Array]:
        """Returns the nodes on the path to a leaf, their scores, and slopes of minus twice the violation."""
        nodes = topology.ancestors(leaf, params.depth)
        level = jnp.arange(params.depth - 1, -1, -1)[:, None]
        right, own = (leaf >> level) & 1 == 1, scores_at(nodes)
        return nodes, own, jnp.where((own > 0) != right, flip_slope(own), 0)

    if inference == "exact":
        assert scores is not None
        leaf = loss_augmented.augmented_leaf(scores, params.leaves.losses(batch.x, y))
        nodes, own, slopes = against_path(leaf)
        reached = leaf_loss(routing.leaf_index(scores))
    else:
        alternatives = loss_augmented.flips(*splits, batch.x) if scores is None else loss_augmented.flips_of(scores)
        leaf_losses = jax.vmap(leaf_loss)(alternatives.leaf)
        best = jnp.argmax(leaf_losses - 2 * alternatives.violations(), axis=0)[None]
        leaf, flipped = _rows_of(alternatives.leaf, best)[0], jnp.maximum(best - 1, 0)
        nodes, own = _rows_of(alternatives.path, flipped), _rows_of(alternatives.scores, flipped)
        slopes, reached = jnp.where(best > 0, flip_slope(own), 0), leaf_losses[0]
    if assigned is not None:
        # Subtracts the maximum of ``h.z`` over the decisions h that lead to the assigned leaf.
        second = against_path(assigned)
        nodes, own, slopes = (jnp.concatenate(pair) for pair in zip((nodes, own, slopes), second, strict=True))
        slopes = slopes.at[-params.depth :].multiply(-1)
    return Surrogate(leaf, nodes, own, slopes, reached)


def _rows_of(array: Array, rows: Array) -> Array:
    return jnp.take_along_axis(array, rows, axis=0)


def mean_surrogate(tree: ObliqueTree, batch: Batch, *, task: Task, nu: Any, inference: str, block: int) -> Array:
    """Returns the mean surrogate loss over a batch, relative to the leaf that each sample reaches.

    Splits are scaled to the radius of the ball. A longer split is the same split with a tighter bound (Proposition 1).
    So the scaling makes the comparison of trees independent of the lengths of their splits.
    """
    norm = jnp.sqrt(jnp.square(tree.weights).sum(1) + jnp.square(tree.bias))
    factor = jnp.where(norm > 0, jnp.sqrt(nu) / jnp.where(norm > 0, norm, 1), 1).astype(norm.dtype)
    tree = tree.replace(weights=factor[:, None] * tree.weights, bias=factor * tree.bias)

    def block_sum(weight: Array, x: Array, y: Array) -> tuple[Array, Array]:
        surrogate = surrogate_loss(tree, Batch(x, y), scores_of(tree, x, inference), inference, task)
        value = task.loss(tree.leaves.values[surrogate.leaf], y) + (surrogate.slopes * surrogate.scores).sum(0)
        return (weight * value).sum(), value

    weight = jnp.ones(len(batch.x), batch.x.dtype) if batch.weight is None else batch.weight
    block = min(block, len(weight))
    total, _ = blocking.sum_over_blocks(block_sum, weight, batch.x, batch.y, block=block)
    return total / weight.sum()


def projection(nu: Any, monotone: Array | None) -> Callable[[tuple[Array, Array]], tuple[Array, Array]]:
    """Returns the projection of rows of splits after a step: it removes negative weights of monotone features."""
    return lambda rows: into_ball((without_negative(rows[0], monotone), rows[1]), nu)


def into_ball(rows: tuple[Array, Array], nu: Any) -> tuple[Array, Array]:
    """Returns split weights ``(m, p)`` and biases ``(m,)`` projected to ``|w|^2 + b^2 <= nu`` row by row."""
    weights, bias = rows
    square = jnp.square(weights).sum(1) + jnp.square(bias)
    shrunk = jnp.sqrt(nu / jnp.where(square > nu, square, nu)).astype(bias.dtype)
    return weights * shrunk[:, None], bias * shrunk


def surrogate_step(
    params: ObliqueTree,
    state: LazyMomentumState,
    batch: Batch,
    surrogate: Surrogate,
    *,
    rate: Any,
    decay: Any,
    project: Callable[[tuple[Array, Array]], tuple[Array, Array]],
    task: Task,
) -> tuple[ObliqueTree, LazyMomentumState, tuple[Array, Array]]:
    """Takes a step of lazy momentum; returns parameters, state, and the previous surrogate loss and loss.

    Args:
      params: the tree.
      state: state of the optimiser.
      batch: samples; ``y`` holds their targets.
      surrogate: surrogate loss of the samples.
      rate: learning rate.
      decay: decay of the velocity.
      project: projection of the moved rows of splits: see :func:`projection`.
      task: what is predicted.
    """
    n = len(batch.x)
    share = jnp.full(n, 1 / n, batch.x.dtype) if batch.weight is None else batch.weight / n
    leaf_loss = lambda values: (share * task.loss(values, batch.y)).sum()
    at_leaf, d_values = jax.value_and_grad(leaf_loss)(params.leaves.values[surrogate.leaf])
    step = _step_in_all if len(params.bias) <= _MOVED_WHOLE * surrogate.nodes.size else _step_in_rows
    updated, velocity = step(
        params, state.velocity, batch.x, surrogate, share * surrogate.slopes, d_values, rate, decay, project
    )
    value = at_leaf + (share * (surrogate.slopes * surrogate.scores).sum(0)).sum()
    return updated, LazyMomentumState(state.count + 1, velocity), (value, (share * surrogate.reached).sum())


def _step_in_all(params, velocity, x, surrogate, slopes, d_values, rate, decay, project):
    shares = jnp.zeros((len(params.bias), len(x)), x.dtype).at[surrogate.nodes, jnp.arange(len(x))].add(slopes)
    weights = jnp.matmul(shares, x, precision="highest")
    leaves = params.leaves.replace(values=jnp.zeros_like(params.leaves.values).at[surrogate.leaf].add(d_values))
    gradient = ObliqueTree(weights, shares.sum(1), leaves)
    moved, velocity = momentum_step(gradient, velocity, rate, decay)
    moved: Any = jax.tree.map(jnp.add, params, moved)
    weights, bias = project((moved.weights, moved.bias))
    return moved.replace(weights=weights, bias=bias), velocity


def _step_in_rows(params, velocity, x, surrogate, slopes, d_values, rate, decay, project):
    product = lambda shares, rows_of_samples: jnp.tensordot(shares, rows_of_samples, ((1,), (0,)), precision="highest")
    rates: Any = {"rate": rate, "decay": decay}
    rows, shares = touched(surrogate.nodes, slopes, len(params.bias))
    gradient = product(shares, x), shares.sum(1)
    splits, speed = (params.weights, params.bias), (velocity.weights, velocity.bias)
    splits, speed = move_rows(splits, speed, rows, gradient, project=project, **rates)
    values, leaf_velocity = params.leaves.values, velocity.leaves.values
    rows, shares = touched(surrogate.leaf[None], jnp.ones_like(slopes[:1]), len(values))
    values, leaf_velocity = move_rows(values, leaf_velocity, rows, product(shares, d_values), **rates)
    tree = lambda splits, values: ObliqueTree(splits[0], splits[1], params.leaves.replace(values=values))
    return tree(splits, values), tree(speed, leaf_velocity)
