"""Weighted quantiles of the targets in each leaf."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def weighted_quantiles(
    leaf_index: Int[Array, " n"],
    y: Float[Array, " n"],
    num_leaves: int,
    levels: Sequence[float],
    *,
    sample_weight: Float[Array, " n"] | None = None,
) -> Float[Array, "leaves k"]:
    """Returns quantiles of the targets in each leaf, which minimise the pinball losses there.

    Where all values between two targets are minimisers, the quantile is their mid-point. A leaf without weight has the
    quantiles of all samples. Quantiles of one leaf never cross. Costs two sorts, whatever the number of leaves.

    Args:
      leaf_index: leaf of each sample.
      y: targets.
      num_leaves: number of leaves.
      levels: levels of the quantiles, k numbers above 0 and below 1.
      sample_weight: nonnegative weights.

    Example:
      >>> leaf, y = jnp.array([0, 0, 0, 1]), jnp.array([1.0, 2.0, 3.0, 8.0])
      >>> print(jtrees.losses.weighted_quantiles(leaf, y, 2, (0.25, 0.5)))
      [[1. 2.]
       [8. 8.]]
    """
    weight = jnp.ones_like(y) if sample_weight is None else sample_weight.astype(y.dtype)
    in_leaves, filled = _quantiles(leaf_index, y, num_leaves, levels, weight)
    of_all, _ = _quantiles(jnp.zeros_like(leaf_index), y, 1, levels, weight)
    return jnp.where(filled[:, None], in_leaves, of_all)


def _quantiles(leaf: Array, y: Array, num_leaves: int, levels: Sequence[float], weight: Array) -> tuple[Array, Array]:
    """Returns the quantiles of each leaf, and whether it has weight."""
    n = len(y)
    group = jnp.where(weight > 0, leaf, num_leaves)  # samples without weight come last
    order = jnp.lexsort((y, group))
    group, y, weight = group[order], y[order], weight[order]
    count = jax.ops.segment_sum(jnp.ones(n, jnp.int32), group, num_leaves + 1)[:num_leaves]
    first = jnp.cumsum(count) - count
    total = jnp.cumsum(weight)
    before = jnp.where(first > 0, total[jnp.maximum(first - 1, 0)], 0)
    inside = jnp.minimum(group, num_leaves - 1)
    # Weight in the leaf up to and with each sample; rounding of the sums must not decide ties.
    part, whole = total - before[inside], jax.ops.segment_sum(weight, group, num_leaves + 1)[:num_leaves]
    slack = 4 * jnp.finfo(y.dtype).eps * total[-1]

    def at_level(level: float) -> Array:
        wanted = level * whole
        below = lambda margin: jax.ops.segment_sum(
            ((part < wanted[inside] + margin) & (group < num_leaves)).astype(jnp.int32), group, num_leaves + 1
        )[:num_leaves]
        place = lambda passed: jnp.clip(first + jnp.minimum(passed, count - 1), 0, n - 1)
        low, high = y[place(below(-slack))], y[place(below(slack))]
        return low + (high - low) / 2

    return jnp.stack([at_level(level) for level in levels], axis=1), count > 0
