"""The surrogate loss of CO2 and non-greedy trees, an upper bound of the loss of the hard tree, and steps on it."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import optax

from jtrees import ops, routing, topology
from jtrees.monotone import without_negative
from jtrees.routing.inference import Scores, augmented_leaf
from jtrees.tasks import Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree, with_empty_leaves

MAX_DEPTH = 20
# A step is dense if the tree has at most this number of splits for each split that a batch may touch. Measured on two
# cores with 16, 126 and 784 features, by steps of 128 samples on trees of depth 8 to 12.
_DENSE = 2
# Fast inference scores all splits up to these numbers of splits, per feature and in total. Measured in the same
# setting.
_SCORED_A_FEATURE, _SCORED = 16, 2**11
INFERENCES = ("fast", "exact")


class Surrogate(NamedTuple):
    """The surrogate loss of each sample, ``loss at leaf + sum of slopes * scores``."""

    leaf: Int[Array, " n"]  # the leaf of the loss term, (n,)
    nodes: Int[Array, "r n"]  # splits whose scores enter the surrogate loss, (r, n)
    scores: Float[Array, "r n"]  # the scores of these splits, (r, n)
    slopes: Float[Array, "r n"]  # derivatives of the bound by the scores: 0, 2 or -2, (r, n)
    reached: Float[Array, " n"]  # loss at the leaf that the sample reaches, (n,)


def flip_slope(scores: Array) -> Array:
    """Returns the slope of ``-2 |score|``, the term of a flipped decision."""
    return jnp.where(scores > 0, -2, 2).astype(scores.dtype)


def fitted_leaves(tree: ObliqueTree, leaf: Int[Array, " n"], batch: Batch, task: Task) -> Any:
    """Returns fitted leaves of the tree: means of targets, or smoothed class frequencies."""
    return with_empty_leaves(tree, "constant", task).leaves.refit(leaf, *batch)


def with_leaves(tree: ObliqueTree, leaf: Int[Array, " n"], batch: Batch, task: Task) -> ObliqueTree:
    """Returns the tree with the trainable form of fitted leaves: class frequencies become logits."""
    return tree.replace(leaves=fitted_leaves(tree, leaf, batch, task).trainable())


def split(y: Any) -> tuple[Array, Array | None]:
    """Returns targets and the leaves that samples are assigned to, or targets and None."""
    return y if isinstance(y, tuple) else (y, None)


def surrogate_loss(params: ObliqueTree, batch: Batch, inference: str, task: Task) -> Surrogate:
    """Returns the surrogate loss of each sample."""
    # It is the maximum of `loss at l - 2 v_l` over the leaves l, where `v_l` is the violation of the path to l, which
    # is 0 for the leaf that the sample reaches. If samples are assigned to leaves, `2 v` of the path to the assigned
    # leaf is added (stable SGD, eq. 14). `inference` is `"fast"`, over leaves one decision away, or `"exact"`, over all
    # leaves. See `inference`.
    (y, assigned), values, (nodes, features) = split(batch.y), params.leaves.values, params.weights.shape
    leaf_loss = lambda leaf: task.loss(values[leaf], y)
    scores = Scores(params.weights, params.bias, batch.x)
    if inference == "exact" or nodes <= min(_SCORED, _SCORED_A_FEATURE * features):
        scores = scores._replace(all=ops.scores(*scores[:3]))

    def against_path(leaf: Array) -> tuple[Array, Array, Array]:
        """Returns the nodes on the path to a leaf, their scores, and slopes of minus twice the violation."""
        nodes = topology.ancestors(leaf, params.depth)
        level = jnp.arange(params.depth - 1, -1, -1)[:, None]
        right, path_scores = (leaf >> level) & 1 == 1, scores.at(nodes)
        return nodes, path_scores, jnp.where((path_scores > 0) != right, flip_slope(path_scores), 0)

    if inference == "exact":
        leaf = augmented_leaf(scores.all, params.leaves.losses(batch.x, y))
        nodes, node_scores, slopes = against_path(leaf)
        reached = leaf_loss(routing.leaf_index(scores.all))
    else:
        flips = scores.flips()
        leaf_losses = jax.vmap(leaf_loss)(flips.leaf)
        best = jnp.argmax(leaf_losses - 2 * flips.violations(), axis=0)[None]
        row_of = lambda array, row: jnp.take_along_axis(array, row, axis=0)
        leaf, flipped = row_of(flips.leaf, best)[0], jnp.maximum(best - 1, 0)
        nodes, node_scores = row_of(flips.path, flipped), row_of(flips.scores, flipped)
        slopes, reached = jnp.where(best > 0, flip_slope(node_scores), 0), leaf_losses[0]
    if assigned is not None:
        # Subtracts the maximum of ``h.z`` over the decisions h that lead to the assigned leaf.
        second = against_path(assigned)
        pairs = zip((nodes, node_scores, slopes), second, strict=True)
        nodes, node_scores, slopes = (jnp.concatenate(pair) for pair in pairs)
        slopes = slopes.at[-params.depth :].multiply(-1)
    return Surrogate(leaf, nodes, node_scores, slopes, reached)


def into_ball(tree: ObliqueTree, nu: Any, monotone: Array | None) -> ObliqueTree:
    """Returns the tree with rows of splits projected to ``|w|^2 + b^2 <= nu``."""
    # Negative weights of the monotone features become 0 before.
    weights, bias = without_negative(tree.weights, monotone), tree.bias
    square = jnp.square(weights).sum(1) + jnp.square(bias)
    factor = jnp.sqrt(nu / jnp.where(square > nu, square, nu)).astype(bias.dtype)
    return tree.replace(weights=weights * factor[:, None], bias=bias * factor)


def surrogate_update(
    surrogate_of: Callable[[ObliqueTree, Batch], Surrogate],
    optimizer: optax.GradientTransformation,
    project: Callable[[ObliqueTree], ObliqueTree],
    task: Task,
) -> Callable[..., Any]:
    """Returns the update of a :class:`jtrees.training.Method` that takes steps on a surrogate loss."""
    # In a large tree, a step moves only the rows that the samples touch. The gradient of the other rows is 0, for which
    # `optimizer`, a `lazy_momentum`, changes no parameter, and `project` works row by row.

    def update(
        params: ObliqueTree, state: Any, batch: Batch, *, key: Array, step: Array
    ) -> tuple[ObliqueTree, Any, tuple[Array, Array]]:
        """Returns parameters, state of the optimiser, and the previous surrogate loss and loss."""
        surrogate, y, n = surrogate_of(params, batch), split(batch.y)[0], len(batch.x)
        weight = jnp.full(n, 1 / n, batch.x.dtype) if batch.weight is None else batch.weight / n
        leaf_loss = lambda values: (weight * task.loss(values, y)).sum()
        loss, d_values = jax.value_and_grad(leaf_loss)(params.leaves.values[surrogate.leaf])
        value = loss + (weight * (surrogate.slopes * surrogate.scores).sum(0)).sum()

        slopes, node, leaf, touched = weight * surrogate.slopes, surrogate.nodes, surrogate.leaf, None
        if (count := len(params.bias)) > _DENSE * node.size:
            nodes, node = _distinct(jnp.where(slopes != 0, node, count), count)
            leaves, leaf = _distinct(leaf, count + 1)
            touched = nodes, leaves
        part, velocity = _rows(params, touched), _rows(state.velocity, touched)
        shares = jnp.zeros((len(part.bias), n), slopes.dtype).at[node, jnp.arange(n)].add(slopes)
        d_weights = jnp.matmul(shares, batch.x, precision="highest")
        d_leaves = part.leaves.with_outputs(lambda values: jnp.zeros_like(values).at[leaf].add(d_values))
        gradient: Any = ObliqueTree(d_weights, shares.sum(1), d_leaves)
        change, moved = optimizer.update(gradient, state._replace(velocity=velocity))
        part = project(jax.tree.map(jnp.add, part, change))
        state = moved._replace(velocity=_with_rows(state.velocity, touched, moved.velocity))
        return _with_rows(params, touched, part), state, (value, (weight * surrogate.reached).sum())

    return update


def _distinct(indices: Int[Array, "*n"], count: int) -> tuple[Int[Array, " u"], Int[Array, "*n"]]:
    """Returns the distinct indices below ``count``, padded with ``count``, and the position of each index in them."""
    size = min(indices.size, count + 1)
    distinct, position = jnp.unique(indices, size=size, fill_value=count, return_inverse=True)
    return distinct, position.reshape(indices.shape)


def _rows(tree: ObliqueTree, touched: tuple[Array, Array] | None) -> ObliqueTree:
    """Returns the touched splits and leaves of a tree; None: the whole tree."""
    if touched is None:
        return tree
    take = lambda rows, values: values.at[rows].get(mode="fill", fill_value=0)
    nodes, leaves = (partial(take, rows) for rows in touched)
    return tree.replace(weights=nodes(tree.weights), bias=nodes(tree.bias), leaves=tree.leaves.with_outputs(leaves))


def _with_rows(tree: ObliqueTree, touched: tuple[Array, Array] | None, part: ObliqueTree) -> ObliqueTree:
    """Returns the tree with new touched splits and leaves; None: ``part`` is the whole tree."""
    if touched is None:
        return part
    put = lambda rows, values, new: values.at[rows].set(new, mode="drop")
    nodes, leaves = (partial(put, rows) for rows in touched)
    weights, bias = nodes(tree.weights, part.weights), nodes(tree.bias, part.bias)
    return ObliqueTree(weights, bias, tree.leaves.replace(values=leaves(tree.leaves.values, part.leaves.values)))
