"""Damped Newton steps towards the best constant of each leaf, for losses without a closed form."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_STEPS = 20
_LONGEST = 1.0  # step: an output changes by no more


def newton_constants(
    samples: Callable[[Array, Array], Array],
    derivatives: Callable[[Array, Array], tuple[Array, Array]],
    start: Float[Array, "leaves *k"],
    leaf_index: Int[Array, " n"],
    y: Array,
    weight: Float[Array, " n"],
) -> Float[Array, "leaves *k"]:
    """Returns the constant of each leaf that minimises a loss of its samples, by 20 damped Newton steps.

    A step of a leaf is taken if it does not raise the loss there, else it is halved. An output without a positive,
    finite curvature takes a step along the gradient. A leaf without weight has the constant of all samples.

    Args:
      samples: ``(outputs, y) -> (n,)``, the loss of each sample.
      derivatives: ``(outputs, y) -> (gradient, curvature)``, of the shape of the outputs.
      start: initial constants.
      leaf_index: leaf of each sample.
      y: targets.
      weight: nonnegative weights.
    """
    filled = jax.ops.segment_sum(weight, leaf_index, len(start)) > 0
    arguments = samples, derivatives
    of_all = _descended(*arguments, start.mean(0, keepdims=True), jnp.zeros_like(leaf_index), y, weight)
    in_leaves = _descended(*arguments, start, leaf_index, y, weight)
    return jnp.where(filled.reshape(-1, *[1] * (start.ndim - 1)), in_leaves, of_all)


def _descended(samples: Any, derivatives: Any, start: Array, leaf_index: Array, y: Array, weight: Array) -> Array:
    leaves = len(start)
    wide = lambda a, like: a.reshape(a.shape + (1,) * (like.ndim - a.ndim))
    summed = lambda a: jax.ops.segment_sum(wide(weight, a) * a, leaf_index, leaves)
    loss = lambda values: summed(samples(values[leaf_index], y))

    def step(_: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        values, lost, size = state
        gradient, curvature = (summed(a) for a in derivatives(values[leaf_index], y))
        count = wide(jax.ops.segment_sum(weight, leaf_index, leaves), gradient)
        curved = jnp.isfinite(curvature) & (curvature > 0)
        steep = jnp.where(curved, curvature, jnp.maximum(count, jnp.finfo(count.dtype).tiny))
        change = jnp.clip(-gradient / jnp.maximum(steep, jnp.finfo(steep.dtype).tiny), -_LONGEST, _LONGEST)
        changed = values + wide(size, change) * change
        now = loss(changed)
        better = now <= lost
        size = jnp.where(better, jnp.minimum(1, 2 * size), size / 2)
        return jnp.where(wide(better, values), changed, values), jnp.where(better, now, lost), size

    return jax.lax.fori_loop(0, _STEPS, step, (start, loss(start), jnp.ones(leaves, start.dtype)))[0]
