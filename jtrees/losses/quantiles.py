"""Weighted quantiles of the targets in each leaf."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Float, Int
import numpy as np

from jtrees import segments
from jtrees.segments import Array


def weighted_quantiles(
    leaf_index: Int[Array, " n"],
    y: Float[Array, " n"],
    num_leaves: int,
    levels: Sequence[float],
    *,
    sample_weight: Float[Array, " n"] | None = None,
) -> Float[Array, "leaves k"]:
    """Returns quantiles of the targets in each leaf. They minimise the pinball losses of the leaf's samples.

    If all values between two targets are minimisers, the quantile is the mid-point of the two targets. A leaf without
    weight has the quantiles of all samples. Quantiles of one leaf never cross. The cost is two sorts for any number of
    leaves. NumPy arrays are sorted on the host, and their weights are added in double precision.

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
    xp = segments.module_of(leaf_index, y)
    y = y.astype(np.float64) if xp is np else y if jnp.issubdtype(y.dtype, jnp.floating) else y.astype(jnp.float32)
    weight = segments.ones_or(sample_weight, y)
    in_leaves, filled = segments.quantiles(leaf_index, y, num_leaves, levels, weight)
    if xp is np and filled.all():
        return in_leaves
    overall, _ = segments.quantiles(xp.zeros_like(leaf_index), y, 1, levels, weight)
    return xp.where(filled[:, None], in_leaves, overall)
