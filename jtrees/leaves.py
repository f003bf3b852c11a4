"""Leaves fitted from a hard routing: given which samples are in which leaf, the best constant or linear model of each.

Everything is a segment sum over the samples and one batched solve; there is no loop over leaves.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

from jtrees import blocking
from jtrees.tree import ConstantLeaves, LinearLeaves


def mid_range(y: Float[Array, "n *k"]) -> Float[Array, "*k"]:
    """Half way between the smallest and the largest target: GET's value for a leaf that no sample reaches."""
    return (y.min(0) + y.max(0)) / 2


def _floating(y: Array) -> Array:
    return y if jnp.issubdtype(y.dtype, jnp.floating) else y.astype(jnp.float32)


def _ones(n: int, sample_weight: Array | None, dtype) -> Array:
    return jnp.ones(n, dtype) if sample_weight is None else jnp.asarray(sample_weight, dtype)


def _expand(weight: Array, like: Array) -> Array:
    return weight.reshape(weight.shape + (1,) * (like.ndim - weight.ndim))


def fit_constant(
    leaf_index: Int[Array, " n"],
    y: Num[Array, "n *k"],
    num_leaves: int,
    *,
    default: float | Array | None = None,
    sample_weight: Float[Array, " n"] | None = None,
) -> ConstantLeaves:
    """The mean of the targets in each leaf (GET, Algorithm 1: deterministic leaves).

    Args:
      leaf_index: leaf of each sample.
      y: targets, ``(n,)`` or ``(n, k)``.
      num_leaves: number of leaves.
      default: value of a leaf without samples (or without weight); by default the mid-range of ``y``.
      sample_weight: nonnegative weights.

    Returns:
      Values of shape ``(leaves,)`` or ``(leaves, k)``.
    """
    y = _floating(y)
    weight = _ones(y.shape[0], sample_weight, y.dtype)
    default = jnp.asarray(mid_range(y) if default is None else default, y.dtype)
    # Sums of deviations from the default, not of y itself: what is summed is then no larger than the spread of y.
    total = jax.ops.segment_sum(_expand(weight, y) * (y - default), leaf_index, num_leaves)
    count = jax.ops.segment_sum(weight, leaf_index, num_leaves)
    return ConstantLeaves(default + total / _expand(jnp.where(count > 0, count, 1), total))


def constant_fit_error(leaf_index: Int[Array, " n"], y: Num[Array, " n"], num_leaves: int) -> Float[Array, ""]:
    """Mean squared error that :func:`fit_constant` would leave on the same samples, without a second look at them.

    ``mean(y**2) - sum_l S_l**2 / (n N_l)`` with ``S_l`` and ``N_l`` sum and number of the (centred) targets in a leaf.
    """
    y = _floating(y) - y.mean()
    # One scatter of pairs costs half of two scatters.
    sums = jax.ops.segment_sum(jnp.stack([jnp.ones_like(y), y], axis=1), leaf_index, num_leaves)
    count, total = sums[:, 0], sums[:, 1]
    return (jnp.square(y).sum() - (jnp.square(total) / jnp.maximum(count, 1)).sum()) / y.shape[0]


def fit_linear(
    leaf_index: Int[Array, " n"],
    x: Float[Array, "n p"],
    y: Num[Array, " n"],
    num_leaves: int,
    *,
    ridge: float | Array = 1e-4,
    default: float | Array | None = None,
    sample_weight: Float[Array, " n"] | None = None,
) -> LinearLeaves:
    """Ridge regression in each leaf: normal equations by segment sums, solved in one batched Cholesky.

    Samples are centred within their leaf, so the intercept is not penalised, and the penalty of a leaf is ``ridge``
    times the mean diagonal of its normal equations, so it does not depend on units or on the number of samples. The
    ridge solution loses at most what the constant loses (coefficients of zero are among the candidates); a leaf whose
    solve is not finite, or which rounding has made worse than its constant, falls back to that constant.

    Args:
      leaf_index: leaf of each sample.
      x: samples.
      y: targets.
      num_leaves: number of leaves.
      ridge: relative penalty, above 0.
      default: value of a leaf without samples; by default the mid-range of ``y``.
      sample_weight: nonnegative weights.
    """
    n, p = x.shape
    y = _floating(y)
    weight = _ones(n, sample_weight, x.dtype)
    constant = fit_constant(leaf_index, y, num_leaves, default=default, sample_weight=sample_weight).values
    x_mean = fit_constant(leaf_index, x, num_leaves, sample_weight=sample_weight).values
    xc, yc = x - x_mean[leaf_index], y - constant[leaf_index]

    def moments(weight, xc, yc, leaf):
        row = jnp.concatenate([xc, yc[:, None]], axis=1)
        outer = weight[:, None, None] * row[:, :, None] * row[:, None, :]
        return jax.ops.segment_sum(outer, leaf, num_leaves), leaf

    block = blocking.block_size((p + 1) ** 2, n)
    gram, _ = blocking.sum_over_blocks(moments, weight, xc, yc, leaf_index, block=block)
    scale = jnp.trace(gram[:, :p, :p], axis1=1, axis2=2) / p
    penalty = ridge * scale + jnp.finfo(x.dtype).tiny ** 0.5
    # One batched factorisation a program: with jaxlib 0.10.2 two that do not depend on each other hang on two cores.
    factor = jax.scipy.linalg.cholesky(gram[:, :p, :p] + penalty[:, None, None] * jnp.eye(p, dtype=x.dtype), lower=True)
    coefficients = jax.scipy.linalg.cho_solve((factor, True), gram[:, :p, p:])[..., 0]

    def squared(residual):
        return jax.ops.segment_sum(weight * jnp.square(residual), leaf_index, num_leaves)

    # Judged by what will be answered, rounding and all; false where anything is NaN.
    fitted = LinearLeaves(coefficients, constant - (coefficients * x_mean).sum(1))
    better = squared(y - fitted.at(leaf_index, x)) <= squared(yc)
    return LinearLeaves(jnp.where(better[:, None], coefficients, 0), jnp.where(better, fitted.intercept, constant))
