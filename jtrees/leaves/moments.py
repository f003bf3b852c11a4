"""Means and second moments of samples by leaf, merged upwards or over blocks of data without cancellation."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrees import blocking, topology
from jtrees.leaves.constant import fit_constant


class Moments(NamedTuple):
    """Moments of m nodes; rows are p features and k targets.

    Attributes:
      count: weight of the samples, ``(m,)``.
      mean: mean of the rows, ``(m, p + k)``.
      second: sums of centred second moments, ``(m, p + k, p + k)``.
      low: smallest target, ``(m, k)``; infinite without samples.
      high: largest target, likewise.
    """

    count: Float[Array, " m"]
    mean: Float[Array, "m r"]
    second: Float[Array, "m r r"]
    low: Float[Array, "m k"]
    high: Float[Array, "m k"]


def merge(children: Moments) -> Moments:
    """Returns the moments of the union of two sets, ``(m, 2, ...)`` -> ``(m, ...)``, without cancellation."""
    count = children.count.sum(1)
    share = children.count / jnp.where(count > 0, count, 1)[:, None]
    difference = children.mean[:, 1] - children.mean[:, 0]
    between = (count * share[:, 0] * share[:, 1])[:, None, None] * difference[:, :, None] * difference[:, None, :]
    mean, second = (share[..., None] * children.mean).sum(1), children.second.sum(1) + between
    return Moments(count, mean, second, children.low.min(1), children.high.max(1))


def of_leaves(
    rows: Float[Array, "n r"], p: int, weight: Float[Array, " n"], leaf_index: Int[Array, " n"], num_leaves: int
) -> Moments:
    """Returns the moments of the samples of each leaf; ``rows`` are p features and the targets."""
    centre = fit_constant(leaf_index, rows, num_leaves, default=0.0, sample_weight=weight)

    def block_sums(weight, row, leaf):
        row = row - centre[leaf]
        outer = weight[:, None, None] * row[:, :, None] * row[:, None, :]
        return (jax.ops.segment_sum(outer, leaf, num_leaves), jax.ops.segment_sum(weight, leaf, num_leaves)), leaf

    block = blocking.block_size(rows.shape[1] ** 2, len(rows))
    (second, count), _ = blocking.sum_over_blocks(block_sums, weight, rows, leaf_index, block=block)
    positive, y = (weight > 0)[:, None], rows[:, p:]
    low = jax.ops.segment_min(jnp.where(positive, y, jnp.inf), leaf_index, num_leaves)
    high = jax.ops.segment_max(jnp.where(positive, y, -jnp.inf), leaf_index, num_leaves)
    return Moments(count, centre, second, low, high)


def of_levels(leaves: Moments) -> list[Moments]:
    """Returns the moments of the nodes of every level, from the root down, from those of the leaves."""
    levels = [leaves]
    while levels[0].count.shape[0] > 1:
        levels.insert(0, merge(jax.tree.map(topology.pairs, levels[0])))
    return levels
