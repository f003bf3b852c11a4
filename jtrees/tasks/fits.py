"""Fits of the values of leaves: means, class frequencies, quantiles, and constants by Newton steps."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Num
import numpy as np

from jtrees import segments, topology
from jtrees.segments import Array, floating, module_of, ones_or, wide
from jtrees.tasks.labels import is_soft

_NEWTON_STEPS = 20


def fit_constant(
    leaf_index: Int[Array, " n"],
    y: Num[Array, "n *k"],
    num_leaves: int,
    *,
    sample_weight: Float[Array, " n"] | None = None,
) -> Float[Array, "leaves *k"]:
    """Returns the mean of the targets in each leaf (GET, Algorithm 1: deterministic leaves).

    As in GET, a leaf without samples or weight has the mid-range of ``y``.

    Args:
      leaf_index: leaf of each sample.
      y: targets, ``(n,)`` or ``(n, k)``.
      num_leaves: number of leaves.
      sample_weight: nonnegative weights.

    Returns:
      Values of shape ``(leaves,)`` or ``(leaves, k)``.

    Example:
      >>> leaf, y = jnp.array([0, 0, 1, 1]), jnp.array([1.0, 3.0, 5.0, 7.0])
      >>> print(jtrees.losses.fit_constant(leaf, y, 2))
      [2. 6.]
    """
    y = floating(y)
    middle = (y.min(0) + y.max(0)) / 2
    return segments.means(leaf_index, y, num_leaves, ones_or(sample_weight, y), default=middle)


def constant_fit_error(
    leaf_index: Int[Array, " n"],
    y: Num[Array, "n *k"],
    num_leaves: int,
    *,
    sample_weight: Float[Array, " n"] | None = None,
) -> Float[Array, ""]:
    """Returns the mean squared error of :func:`fit_constant` on the same samples, in one pass."""
    # The error is `(sum_i w_i y_i**2 - sum_l S_l**2 / N_l) / sum_i w_i`, averaged over the outputs. `S_l` is the
    # weighted sum of the centred targets in leaf l, and `N_l` is the leaf's total weight.
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


def class_counts(
    leaf_index: Int[Array, " n"],
    y: Int[Array, " n"] | Float[Array, "n k"],
    num_leaves: int,
    classes: int,
    *,
    sample_weight: Float[Array, " n"] | None = None,
) -> Float[Array, "leaves k"]:
    """Returns the total weight of each class in each leaf, or the expected weight for soft labels ``(n, classes)``."""
    weight = ones_or(sample_weight, y, jnp.float32 if sample_weight is None else sample_weight.dtype)
    if is_soft(y):
        return segments.sums(weight[:, None] * y.astype(weight.dtype), leaf_index, num_leaves)
    return segments.sums(weight, leaf_index * classes + y, num_leaves * classes).reshape(num_leaves, classes)


def smoothed(counts: Array, prior: Array) -> Float[Array, "leaves k"]:
    """Returns class frequencies after adding a sample with the frequencies of the prior to the counts of each leaf."""
    # Laplace's rule adds one sample of each class, which would dominate small leaves if there are many classes.
    return (counts + prior) / (counts.sum(1, keepdims=True) + 1)


def effective_counts(
    counts: Float[Array, "leaves k"], leaf_index: Int[Array, " n"], weight: Float[Array, " n"]
) -> tuple[Float[Array, "leaves k"], Float[Array, " k"]]:
    """Returns class counts that sum to the effective number of samples of each leaf, and the prior of the classes."""
    # Uneven weights w of a leaf count as `(sum w)^2 / sum w^2` samples (Kish). A heavy sample therefore makes its own
    # leaf small, but no other leaf. `counts` has the total weight of each class in each leaf, whose frequencies the
    # prior has.
    xp = module_of(counts, weight)
    squares = segments.sums(weight * weight, leaf_index, len(counts))
    factor = xp.where(squares > 0, counts.sum(1) / xp.where(squares > 0, squares, 1), 0)
    samples = factor[:, None] * counts
    counts = counts * (samples.sum() / counts.sum())
    return samples, (counts.sum(0) + 1) / (counts.sum() + counts.shape[1])  # with one more sample of each class


def samples_of_leaves(
    leaf_index: Int[Array, " n"], weight: Float[Array, " n"], num_leaves: int
) -> Float[Array, " leaves"]:
    """Returns the effective number of samples (Kish) of each leaf, or of its nearest ancestor if the leaf is empty."""
    xp = module_of(leaf_index, weight)
    sums = segments.sums(xp.stack([weight, weight * weight], axis=1), leaf_index, num_leaves)
    samples = xp.zeros_like(sums[:, 0])
    for _ in range(num_leaves.bit_length()):
        squares = xp.where(sums[:, 1] > 0, sums[:, 1], 1)
        samples = xp.where(samples > 0, samples, xp.repeat(xp.square(sums[:, 0]) / squares, num_leaves // len(sums)))
        sums = topology.pairs(sums).sum(1) if len(sums) > 1 else sums
    return samples


def weighted_quantiles(
    leaf_index: Int[Array, " n"],
    y: Float[Array, " n"],
    num_leaves: int,
    levels: Sequence[float],
    *,
    sample_weight: Float[Array, " n"] | None = None,
) -> Float[Array, "leaves k"]:
    """Returns quantiles of the targets in each leaf. They minimise the pinball losses of the leaf's samples."""
    # If all values between two targets are minimisers, the quantile is the mid-point of the two targets. A leaf without
    # weight has the quantiles of all samples. Quantiles of one leaf never cross. The cost is two sorts for any number
    # of leaves.
    xp = module_of(leaf_index, y)
    y = y.astype(np.float64) if xp is np else y if jnp.issubdtype(y.dtype, jnp.floating) else y.astype(jnp.float32)
    weight = ones_or(sample_weight, y)
    in_leaves, filled = segments.quantiles(leaf_index, y, num_leaves, levels, weight)
    if xp is np and filled.all():
        return in_leaves
    overall, _ = segments.quantiles(xp.zeros_like(leaf_index), y, 1, levels, weight)
    return xp.where(filled[:, None], in_leaves, overall)


def newton_constants(
    samples: Callable[[Array, Array], Array],
    derivatives: Callable[[Array, Array], tuple[Array, Array]],
    start: Float[Array, "leaves *k"],
    leaf_index: Int[Array, " n"],
    y: Array,
    weight: Float[Array, " n"],
    *,
    origin: Any = 0,
    direction: Any = 1,
) -> Float[Array, "leaves *k"]:
    """Returns the constant of each leaf that minimises the loss of its samples, by 20 damped Newton steps.

    The output of a sample is ``origin + direction * constant``.

    A leaf takes a step if the step does not raise the leaf's loss. Otherwise the leaf halves its step size. A step is
    at most as long as the range of the targets, or 1 if all targets are equal. If the curvature is not positive and
    finite, the step follows the negative gradient. A leaf without weight has the constant of all samples.

    Args:
      samples: ``(outputs, y) -> (n,)``, the loss of each sample.
      derivatives: ``(outputs, y) -> (gradient, curvature)``, in the shape of the outputs.
      start: initial constants.
      leaf_index: leaf of each sample.
      y: targets.
      weight: nonnegative weights.
      origin: outputs of the samples if the constants are 0, a number or ``(n, *k)``.
      direction: change of the outputs with the constants, a number or ``(n, *k)``.
    """
    xp, tiny = module_of(leaf_index, y, weight, start), np.finfo(start.dtype).tiny
    length = (y.max() - y.min()).astype(start.dtype)
    longest = xp.where(length > 0, length, 1)

    def descended(initial: Array, group: Array) -> Array:
        groups = len(initial)
        summed = lambda a: segments.sums(wide(weight, a) * a, group, groups)
        outputs = lambda values: origin + direction * values[group]
        loss = lambda values: summed(samples(outputs(values), y))

        def step(_: Any, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            values, losses, size = state
            gradient, curvature = derivatives(outputs(values), y)
            gradient, curvature = summed(gradient * direction), summed(curvature * direction**2)
            count = wide(segments.sums(weight, group, groups), gradient)
            curved = xp.isfinite(curvature) & (curvature > 0)
            steep = xp.where(curved, curvature, xp.maximum(count, tiny))
            change = (-gradient / xp.maximum(steep, tiny)).clip(-longest, longest)
            changed = values + wide(size, change) * change
            changed_losses = loss(changed)
            better = changed_losses <= losses
            size = xp.where(better, xp.minimum(1, 2 * size), size / 2)
            values = xp.where(wide(better, values), changed, values)
            return values, xp.where(better, changed_losses, losses), size

        state = initial, loss(initial), xp.ones(groups, initial.dtype)
        if xp is np:
            for i in range(_NEWTON_STEPS):
                state = step(i, state)
            return state[0]
        return jax.lax.fori_loop(0, _NEWTON_STEPS, step, state)[0]

    in_leaves, filled = descended(start, leaf_index), segments.sums(weight, leaf_index, len(start)) > 0
    if xp is np and filled.all():
        return in_leaves
    overall = descended(start.mean(0, keepdims=True), xp.zeros_like(leaf_index))
    return xp.where(wide(filled, start), in_leaves, overall)
