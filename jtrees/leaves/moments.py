"""Means and second moments of the samples in each leaf, merged upwards without cancellation."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

from jtrees import blocking, segments

_BLOCK = 2**12  # maximum number of samples in a block, whose products are added in sequence


class Moments(NamedTuple):
    """Moments of m nodes. A row holds p features and k targets."""

    count: Float[Array, " m"]  # weight of the samples, (m,)
    squares: Float[Array, " m"]  # sum of the squared weights, (m,)
    mean: Float[Array, "m r"]  # mean of the rows, (m, p + k)
    second: Float[Array, "m r r"]  # sums of centred second moments, (m, p + k, p + k)
    low: Float[Array, "m k"]  # smallest target, (m, k); infinity for a node without samples
    high: Float[Array, "m k"]  # largest target, (m, k); minus infinity for a node without samples


def merge(left: Moments, right: Moments) -> Moments:
    """Returns the moments of the union of each pair of sets, without cancellation."""
    count = left.count + right.count
    share, other = (part.count / jnp.where(count > 0, count, 1) for part in (left, right))
    difference = right.mean - left.mean
    between = (count * share * other)[:, None, None] * difference[:, :, None] * difference[:, None, :]
    mean, second = share[:, None] * left.mean + other[:, None] * right.mean, left.second + right.second + between
    squares = left.squares + right.squares
    return Moments(count, squares, mean, second, jnp.minimum(left.low, right.low), jnp.maximum(left.high, right.high))


def of_leaves(
    rows: Float[Array, "n r"], p: int, weight: Float[Array, " n"], leaf_index: Int[Array, " n"], num_leaves: int
) -> Moments:
    """Returns the moments of the samples in each leaf. ``rows`` holds p features and the targets."""
    columns = weight[:, None] * jnp.column_stack([rows, jnp.ones_like(weight), weight])
    sums = segments.sums(columns, leaf_index, num_leaves)
    count = sums[:, -2]
    centre = sums[:, :-2] / jnp.where(count > 0, count, 1)[:, None]

    def block_sums(weight, row, leaf):
        row = row - centre[leaf]
        outer = weight[:, None, None] * row[:, :, None] * row[:, None, :]
        return jax.ops.segment_sum(outer, leaf, num_leaves), leaf

    block = min(_BLOCK, blocking.block_size(rows.shape[1] ** 2, len(rows)))
    second, _ = blocking.sum_over_blocks(block_sums, weight, rows, leaf_index, block=block)
    y = rows[:, p:]
    ends = jnp.where((weight > 0)[:, None], jnp.concatenate([y, -y], axis=1), jnp.inf)
    low, high = jnp.split(jax.ops.segment_min(ends, leaf_index, num_leaves), 2, axis=1)
    return Moments(count, sums[:, -1], centre, second, low, -high)


def effective(nodes: Moments) -> Moments:
    """Returns moments of the same samples, whose weight is their effective number (Kish: ``(sum w)^2 / sum w^2``)."""
    factor = jnp.where(nodes.squares > 0, nodes.count / jnp.where(nodes.squares > 0, nodes.squares, 1), 0)
    return nodes._replace(count=factor * nodes.count, second=factor[:, None, None] * nodes.second)


def with_ancestors(leaves: Moments) -> Moments:
    """Returns the moments of all nodes, ``(2 leaves - 1, ...)``, numbered from left to right."""
    # Leaf i is node `2 i`. `ancestors` returns the ancestors of each leaf.
    m = len(leaves.count)
    node = np.arange(2 * m - 1)
    size = (node + 1) & -(node + 1)  # number of leaves
    nodes = jax.tree.map(lambda a: jnp.repeat(a, 2, axis=0)[:-1], leaves)

    # The compiled loop over levels merges all nodes, and keeps the merged nodes of the current level. The size of the
    # program therefore does not depend on the depth. The extra merges cost little.
    def up(height: Array, nodes: Moments) -> Moments:
        half = jax.lax.shift_left(1, height)
        child = lambda step: jax.tree.map(lambda a: jnp.take(a, node + step, axis=0, mode="clip"), nodes)
        update = lambda new, old: jnp.where(segments.wide(size == 2 * half, new), new, old)
        return jax.tree.map(update, merge(child(-half), child(half)), nodes)

    return jax.lax.fori_loop(0, m.bit_length() - 1, up, nodes)


def ancestors(num_leaves: int) -> np.ndarray:
    """Returns the nodes on the path to each leaf, from the root to the leaf, ``(depth + 1, leaves)``."""
    # The nodes are numbered as in `with_ancestors`.
    height = np.arange(num_leaves.bit_length() - 1, -1, -1)[:, None]
    return ((2 * (np.arange(num_leaves) >> height) + 1) << height) - 1
