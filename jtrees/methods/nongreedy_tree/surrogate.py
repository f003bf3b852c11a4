"""The surrogate loss of CO2 and non-greedy trees, and an update of the rows that a batch touches.

The surrogate loss is an upper bound of the loss of the hard tree.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrees import leaves as kinds, ops, routing, topology
from jtrees.monotone import without_negative
from jtrees.routing import inference as loss_augmented
from jtrees.tasks import Task
from jtrees.training import Batch, LazyMomentumState, at_step
from jtrees.training.optimizers import momentum_step
from jtrees.tree import ObliqueTree

MAX_DEPTH = 20
# A step is dense if the tree has at most this number of splits for each split that a batch may touch. Measured on two
# cores with 16, 126 and 784 features, by steps of 128 samples on trees of depth 8 to 12.
_DENSE = 2
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


def split(y: Any) -> tuple[Array, Array | None]:
    """Returns targets and the leaves that samples are assigned to, or targets and None."""
    return y if isinstance(y, tuple) else (y, None)


def surrogate_loss(
    params: ObliqueTree, batch: Batch, inference: str, task: Task, scores: Float[Array, "nodes n"] | None = None
) -> Surrogate:
    """Returns the surrogate loss of each sample.

    Args:
      params: the tree.
      batch: samples with targets, or with targets and assigned leaves.
      inference: ``"fast"`` or ``"exact"``.
      task: what is predicted.
      scores: scores of all splits. None: computed here. Fast inference in a large tree computes only those it needs.
    """
    (y, assigned), values, (nodes, features) = split(batch.y), params.leaves.values, params.weights.shape
    leaf_loss = lambda leaf: task.loss(values[leaf], y)
    splits = params.weights, params.bias
    if scores is None and (inference == "exact" or nodes <= min(_SCORED, _SCORED_A_FEATURE * features)):
        scores = ops.scores(*splits, batch.x)
    scores_at = lambda nodes: (
        loss_augmented.scores_at(*splits, batch.x, nodes) if scores is None else _rows_of(scores, nodes)
    )

    def against_path(leaf: Array) -> tuple[Array, Array, Array]:
        """Returns the nodes on the path to a leaf, their scores, and slopes of minus twice the violation."""
        nodes = topology.ancestors(leaf, params.depth)
        level = jnp.arange(params.depth - 1, -1, -1)[:, None]
        right, path_scores = (leaf >> level) & 1 == 1, scores_at(nodes)
        return nodes, path_scores, jnp.where((path_scores > 0) != right, flip_slope(path_scores), 0)

    if inference == "exact":
        assert scores is not None
        leaf = loss_augmented.augmented_leaf(scores, params.leaves.losses(batch.x, y))
        nodes, node_scores, slopes = against_path(leaf)
        reached = leaf_loss(routing.leaf_index(scores))
    else:
        alternatives = loss_augmented.flips(*splits, batch.x) if scores is None else loss_augmented.flips_of(scores)
        leaf_losses = jax.vmap(leaf_loss)(alternatives.leaf)
        best = jnp.argmax(leaf_losses - 2 * alternatives.violations(), axis=0)[None]
        leaf, flipped = _rows_of(alternatives.leaf, best)[0], jnp.maximum(best - 1, 0)
        nodes, node_scores = (_rows_of(values, flipped) for values in (alternatives.path, alternatives.scores))
        slopes, reached = jnp.where(best > 0, flip_slope(node_scores), 0), leaf_losses[0]
    if assigned is not None:
        # Subtracts the maximum of ``h.z`` over the decisions h that lead to the assigned leaf.
        second = against_path(assigned)
        pairs = zip((nodes, node_scores, slopes), second, strict=True)
        nodes, node_scores, slopes = (jnp.concatenate(pair) for pair in pairs)
        slopes = slopes.at[-params.depth :].multiply(-1)
    return Surrogate(leaf, nodes, node_scores, slopes, reached)


def _rows_of(array: Array, rows: Array) -> Array:
    return jnp.take_along_axis(array, rows, axis=0)


def projection(nu: Any, monotone: Array | None) -> Callable[[tuple[Array, Array]], tuple[Array, Array]]:
    """Returns the projection of rows of splits after a step: it removes negative weights of monotone features."""
    return lambda rows: into_ball((without_negative(rows[0], monotone), rows[1]), nu)


def into_ball(rows: tuple[Array, Array], nu: Any) -> tuple[Array, Array]:
    """Returns split weights ``(m, p)`` and biases ``(m,)`` projected to ``|w|^2 + b^2 <= nu`` row by row."""
    weights, bias = rows
    square = jnp.square(weights).sum(1) + jnp.square(bias)
    shrunk = jnp.sqrt(nu / jnp.where(square > nu, square, nu)).astype(bias.dtype)
    return weights * shrunk[:, None], bias * shrunk


def surrogate_update(
    surrogate_of: Callable[[ObliqueTree, Batch], Surrogate],
    rate: Any,
    momentum: Any,
    project: Callable[[tuple[Array, Array]], tuple[Array, Array]],
    task: Task,
) -> Callable[..., Any]:
    """Returns the update of a :class:`jtrees.training.Method` that takes steps of lazy momentum on a surrogate loss.

    Args:
      surrogate_of: returns the surrogate loss of a tree on a batch, whose ``y`` may be a pair: see :func:`split`.
      rate: learning rate, a number or a schedule.
      momentum: decay of the velocity.
      project: projection of the moved rows of splits: see :func:`projection`.
      task: what is predicted.
    """

    def update(
        params: ObliqueTree, state: LazyMomentumState, batch: Batch, *, key: Array, step: Array
    ) -> tuple[ObliqueTree, LazyMomentumState, tuple[Array, Array]]:
        """Returns parameters, state, and the previous surrogate loss and loss."""
        surrogate, y, n = surrogate_of(params, batch), split(batch.y)[0], len(batch.x)
        share = jnp.full(n, 1 / n, batch.x.dtype) if batch.weight is None else batch.weight / n
        leaf_loss = lambda values: (share * task.loss(values, y)).sum()
        loss, d_values = jax.value_and_grad(leaf_loss)(params.leaves.values[surrogate.leaf])
        value = loss + (share * (surrogate.slopes * surrogate.scores).sum(0)).sum()
        weighted = surrogate._replace(slopes=share * surrogate.slopes)
        move = lambda gradient, velocity: momentum_step(gradient, velocity, at_step(rate, state.count), momentum)
        is_dense = len(params.bias) <= _DENSE * surrogate.nodes.size
        take_step = _step_in_all if is_dense else _step_in_rows
        updated, velocity = take_step(params, state.velocity, batch.x, weighted, d_values, move, project)
        return updated, LazyMomentumState(state.count + 1, velocity), (value, (share * surrogate.reached).sum())

    return update


def _step_in_all(params, velocity, x, surrogate, d_values, move, project):
    shares = (
        jnp.zeros((len(params.bias), len(x)), x.dtype).at[surrogate.nodes, jnp.arange(len(x))].add(surrogate.slopes)
    )
    weights = jnp.matmul(shares, x, precision="highest")
    leaves = params.leaves.replace(values=jnp.zeros_like(params.leaves.values).at[surrogate.leaf].add(d_values))
    updates, velocity = move(ObliqueTree(weights, shares.sum(1), leaves), velocity)
    moved: Any = jax.tree.map(jnp.add, params, updates)
    weights, bias = project((moved.weights, moved.bias))
    return moved.replace(weights=weights, bias=bias), velocity


def _step_in_rows(params, velocity, x, surrogate, d_values, move, project):
    """Takes the step of :func:`_step_in_all` on the rows that the samples touch, for trees with many other rows."""
    product = lambda shares, sample_rows: jnp.tensordot(shares, sample_rows, ((1,), (0,)), precision="highest")
    rows, shares = _touched(surrogate.nodes, surrogate.slopes, len(params.bias))
    splits, speed = (params.weights, params.bias), (velocity.weights, velocity.bias)
    splits, speed = _moved_rows(splits, speed, rows, (product(shares, x), shares.sum(1)), move, project)
    values, leaf_velocity = params.leaves.values, velocity.leaves.values
    rows, shares = _touched(surrogate.leaf[None], jnp.ones_like(surrogate.slopes[:1]), len(values))
    values, leaf_velocity = _moved_rows(values, leaf_velocity, rows, product(shares, d_values), move)
    tree = lambda splits, values: ObliqueTree(splits[0], splits[1], params.leaves.replace(values=values))
    return tree(splits, values), tree(speed, leaf_velocity)


def _touched(
    rows: Int[Array, "r n"], slopes: Float[Array, "r n"], count: int
) -> tuple[Int[Array, " u"], Float[Array, "u n"]]:
    """Returns the distinct rows that samples touch, padded with ``count``, and the sum of coefficients of each sample.

    ``rows`` are indices of an array of ``count`` rows, r for each sample. ``slopes`` are the coefficients of the
    samples in their rows. A coefficient of 0 touches no row. The product of the summed coefficients with the features
    of the samples is the gradient of the rows.
    """
    rows = jnp.where(slopes != 0, rows, count).ravel()
    distinct, position = jnp.unique(rows, size=min(rows.size, count + 1), fill_value=count, return_inverse=True)
    sample = jnp.broadcast_to(jnp.arange(slopes.shape[1]), slopes.shape).ravel()
    shares = jnp.zeros((len(distinct), slopes.shape[1]), slopes.dtype)
    return distinct, shares.at[position.ravel(), sample].add(slopes.ravel())


def _moved_rows(params, velocity, rows, gradient, move, project=lambda rows: rows):
    """Returns pytrees of arrays and velocities after a step on distinct rows alone; other indices are ignored."""
    gather = lambda tree: jax.tree.map(lambda a: a.at[rows].get(mode="fill", fill_value=0), tree)
    scatter = lambda tree, new: jax.tree.map(lambda a, b: a.at[rows].set(b, mode="drop"), tree, new)
    updates, new_velocity = move(gradient, gather(velocity))
    return scatter(params, project(jax.tree.map(jnp.add, gather(params), updates))), scatter(velocity, new_velocity)
