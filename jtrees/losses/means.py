"""Means of the targets in each leaf, and the mean squared error of such leaves."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Num

from jtrees import segments
from jtrees.segments import Array, floating, module_of, ones_or


def fit_constant(
    leaf_index: Int[Array, " n"],
    y: Num[Array, "n *k"],
    num_leaves: int,
    *,
    default: float | Array | None = None,
    sample_weight: Float[Array, " n"] | None = None,
) -> Float[Array, "leaves *k"]:
    """Returns the mean of the targets in each leaf (GET, Algorithm 1: deterministic leaves).

    Args:
      leaf_index: leaf of each sample.
      y: targets, ``(n,)`` or ``(n, k)``.
      num_leaves: number of leaves.
      default: value of a leaf without samples or weight. If None, the mid-range of ``y``.
      sample_weight: nonnegative weights.

    Returns:
      Values of shape ``(leaves,)`` or ``(leaves, k)``.

    Example:
      >>> leaf, y = jnp.array([0, 0, 1, 1]), jnp.array([1.0, 3.0, 5.0, 7.0])
      >>> print(jtrees.losses.fit_constant(leaf, y, 2))
      [2. 6.]
    """
    y = floating(y)
    # The mid-range is GET's value of an empty leaf.
    default = (y.min(0) + y.max(0)) / 2 if default is None else default
    default = module_of(y).asarray(default, y.dtype)
    return segments.means(leaf_index, y, num_leaves, ones_or(sample_weight, y), default=default)


def constant_fit_error(
    leaf_index: Int[Array, " n"],
    y: Num[Array, "n *k"],
    num_leaves: int,
    *,
    sample_weight: Float[Array, " n"] | None = None,
) -> Float[Array, ""]:
    """Returns the mean squared error of :func:`fit_constant` on the same samples, in one pass.

    The error is ``(sum_i w_i y_i**2 - sum_l S_l**2 / N_l) / sum_i w_i``, averaged over the outputs. ``S_l`` is the
    weighted sum of the centred targets in leaf l, and ``N_l`` is the leaf's total weight.

    Example:
      >>> leaf, y = jnp.array([0, 0, 1, 1]), jnp.array([1.0, 3.0, 5.0, 7.0])
      >>> print(jtrees.losses.means.constant_fit_error(leaf, y, 2))
      1.0
    """
    y = floating(y).reshape(y.shape[0], -1)
    weight = ones_or(sample_weight, y)
    total = segments.total(weight)
    y = y - (segments.total(weight[:, None] * y) / total)[None]
    # One scatter of rows is cheaper than separate scatters of the weights and of each output.
    columns = weight[:, None] * jnp.pad(y, ((0, 0), (1, 0)), constant_values=1)
    sums = segments.sums(columns, leaf_index, num_leaves)
    explained = jnp.square(sums[:, 1:]) / jnp.where(sums[:, :1] > 0, sums[:, :1], 1)
    return (segments.total(weight[:, None] * jnp.square(y)).sum() - explained.sum()) / (total * y.shape[1])


def uniform_targets(key: Array, num_leaves: int, y: Array, dtype: Any) -> Float[Array, "leaves *k"]:
    """Returns random draws from U(min y, max y) for each output, the initialisation of GET."""
    low, high = y.min(0).astype(dtype), y.max(0).astype(dtype)
    return low + (high - low) * jax.random.uniform(key, (num_leaves, *y.shape[1:]), dtype)
