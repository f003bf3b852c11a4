"""The expected loss of one tree under sharp sigmoids, at the leaves that samples reach.

Under sigmoids every sample reaches every leaf, but under sharp ones nearly all with a probability that no float32 sum
notices. A split is taken to be certain if a sample takes the less probable way with a probability below
:data:`TOLERANCE`, that of reaching the split included. Each certain split so changes the loss of a sample by at most
the tolerance times the range of the losses of the leaves. What remains is on few paths, of which
:mod:`jtrees.routing.frontier` keeps a list, as for the smooth step, whose splits are certain exactly.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrees.routing import frontier as paths
from jtrees.routing.by_level import Asked

TOLERANCE = 1e-6

# Paths per sample by depth, on average, for which there is room: somewhat below the number at which paths take as long
# as all splits, as what does not fit costs both. Measured on two cores with 6144 x 21 samples: 2.1, 2.9, 4.2, 6.1 and
# 15 at depth 7, 8, 9, 10 and 12; depth 11 is interpolated. At depth 8 whole fits, whose sharpness grows, were slower.
WIDTHS = {9: 3.5, 10: 5, 11: 8, 12: 13}


def width_of(depth: int) -> float | None:
    """Returns the room for paths per sample; None where all splits are to be scored."""
    return WIDTHS.get(min(depth, max(WIDTHS, default=0)))


def sigmoid() -> paths.Step:
    """Returns the sigmoid as a step; its position is the probability of going right."""

    def position(z: Array, reach: Array) -> Array:
        right = jax.nn.sigmoid(z)
        certain = reach * jnp.minimum(right, 1 - right) < TOLERANCE
        return jnp.where(certain, (z > 0).astype(z.dtype), right)

    return paths.Step(position, lambda right: right, lambda right: right * (1 - right))


def visit(
    losses_of: Callable[..., Array],
    width: float,
    otherwise: Callable[..., Any],
    weights: Float[Array, "nodes p"],
    bias: Float[Array, " nodes"],
    leaves: Any,
    x: Float[Array, "n p"],
    y: Array,
    share: Float[Array, " n"],
) -> tuple[tuple[Float[Array, ""], Any], Int[Array, " n"]]:
    """Returns the expected loss, its gradient for weights, bias and leaves, and the leaf that each sample reaches when
    the routing is hard.

    Args:
      losses_of: ``(leaves, x, y) -> (leaves, n)``.
      width: room for paths per sample, on average.
      otherwise: of the arrays, what is returned if there are more paths.
      weights: split weights.
      bias: split biases.
      leaves: a pytree of arrays whose first axis is over the leaves.
      x: samples.
      y: targets.
      share: weight of each sample in the loss.
    """
    asked, step = Asked(x, weights[None], bias[None], None, None), sigmoid()
    frontier, fits = paths.explore(asked, width, step)

    def one_loss(leaf: Any, x: Array, y: Array) -> Array:
        one = jax.tree.map(lambda a: a[None], leaf)
        return losses_of(one, x[None], y[None])[0, 0]

    def on_paths() -> Any:
        return paths.expected(frontier, asked, step, jax.vmap(jax.value_and_grad(one_loss)), leaves, y, share)

    return jax.lax.cond(fits, on_paths, lambda: otherwise(weights, bias, leaves, x, y, share))
