"""Damped Newton steps towards the best constant of each leaf, for losses without a closed form."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Float, Int
import numpy as np

from jtrees import segments
from jtrees.segments import Array, module_of, wide

_STEPS = 20
_LONGEST = 1.0  # longest step of an output, for scaled targets


def newton_constants(
    samples: Callable[[Array, Array], Array],
    derivatives: Callable[[Array, Array], tuple[Array, Array]],
    start: Float[Array, "leaves *k"],
    leaf_index: Int[Array, " n"],
    y: Array,
    weight: Float[Array, " n"],
    *,
    longest: float = _LONGEST,
) -> Float[Array, "leaves *k"]:
    """Returns the constant of each leaf that minimises the loss of its samples, by 20 damped Newton steps.

    A leaf takes a step if the step does not raise the leaf's loss. Otherwise the leaf halves its step size. If the
    curvature is not positive and finite, the step follows the negative gradient. A leaf without weight has the constant
    of all samples.

    Args:
      samples: ``(outputs, y) -> (n,)``, the loss of each sample.
      derivatives: ``(outputs, y) -> (gradient, curvature)``, in the shape of the outputs.
      start: initial constants.
      leaf_index: leaf of each sample.
      y: targets.
      weight: nonnegative weights.
      longest: longest step; infinity for targets in the user's units.
    """
    xp = module_of(leaf_index, y, weight, start)
    filled = segments.sums(weight, leaf_index, len(start)) > 0
    descended = lambda start, leaf: _descended(samples, derivatives, start, leaf, y, weight, longest)
    in_leaves = descended(start, leaf_index)
    if xp is np and filled.all():
        return in_leaves
    overall = descended(start.mean(0, keepdims=True), xp.zeros_like(leaf_index))
    return xp.where(wide(filled, start), in_leaves, overall)


def _descended(
    samples: Any, derivatives: Any, start: Array, leaf_index: Array, y: Array, weight: Array, longest: float
) -> Array:
    xp, leaves = module_of(leaf_index, y, weight, start), len(start)
    tiny = np.finfo(start.dtype).tiny
    summed = lambda a: segments.sums(wide(weight, a) * a, leaf_index, leaves)
    loss = lambda values: summed(samples(values[leaf_index], y))

    def step(_: Any, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        values, leaf_losses, size = state
        gradient, curvature = (summed(a) for a in derivatives(values[leaf_index], y))
        count = wide(segments.sums(weight, leaf_index, leaves), gradient)
        curved = xp.isfinite(curvature) & (curvature > 0)
        steep = xp.where(curved, curvature, xp.maximum(count, tiny))
        change = (-gradient / xp.maximum(steep, tiny)).clip(-longest, longest)
        changed = values + wide(size, change) * change
        changed_losses = loss(changed)
        better = changed_losses <= leaf_losses
        size = xp.where(better, xp.minimum(1, 2 * size), size / 2)
        values = xp.where(wide(better, values), changed, values)
        return values, xp.where(better, changed_losses, leaf_losses), size

    state = start, loss(start), xp.ones(leaves, start.dtype)
    if xp is np:
        for i in range(_STEPS):
            state = step(i, state)
        return state[0]
    return jax.lax.fori_loop(0, _STEPS, step, state)[0]
