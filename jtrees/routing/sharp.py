"""The expected loss of one tree under sharp sigmoids, computed at the leaves that samples reach.

Sharp sigmoids give most leaves a probability that is too small to change a float32 sum. A split is therefore treated as
certain if a sample reaches it and takes its less probable side with a probability below :data:`TOLERANCE`. Each certain
split changes the loss of a sample by at most the tolerance times the range of the leaves' losses. The uncertain splits
are on few paths, which :mod:`jtrees.routing.frontier` lists.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrees.routing import frontier as paths
from jtrees.routing.by_level import Operands

TOLERANCE = 1e-6

# Capacity by depth, in paths per sample on average. The capacity is somewhat below the break-even, where paths take the
# same time as all splits, because a batch that does not fit costs both. Measured break-even on two cores with 6144 x 21
# samples: 2.1, 2.9, 4.2, 6.1 and 15 paths at depth 7, 8, 9, 10 and 12. Depth 11 is interpolated. At depth 8 complete
# fits, whose sharpness grows, were slower with paths.
WIDTHS = {9: 3.5, 10: 5, 11: 8, 12: 13}


def width_of(depth: int) -> float | None:
    """Returns the capacity in paths per sample; None if all splits are scored."""
    return WIDTHS.get(min(depth, max(WIDTHS, default=0)))


def sigmoid() -> paths.Step:
    """Returns the sigmoid as a step. The position is the probability of going right."""

    def position(z: Array, reach: Array) -> Array:
        right = jax.nn.sigmoid(z)
        certain = reach * jnp.minimum(right, 1 - right) < TOLERANCE
        return jnp.where(certain, (z > 0).astype(z.dtype), right)

    return paths.Step(position, lambda right: right, lambda right: right * (1 - right))


def visit(
    width: float,
    otherwise: Callable[..., Any],
    weights: Float[Array, "nodes p"],
    bias: Float[Array, " nodes"],
    leaves: Any,
    x: Float[Array, "n p"],
    y: Array,
    share: Float[Array, " n"],
) -> tuple[tuple[Float[Array, ""], Any], Int[Array, " n"]]:
    """Returns the expected loss, its gradient for weights, bias and leaves, and the hard leaf of each sample."""
    # `leaves` is a pytree with `losses(x, y)`, (leaves, n); the first axis of its arrays is over the leaves. `width` is
    # the capacity in paths per sample, on average. If the paths exceed it, `otherwise` receives the arrays and returns
    # the same results. `share` is the weight of each sample in the loss.
    operands, step = Operands(x, weights[None], bias[None], None, None), sigmoid()
    frontier, fits = paths.explore(operands, width, step)

    def leaf_loss(leaf: Any, x: Array, y: Array) -> Array:
        leaves = jax.tree.map(lambda a: a[None], leaf)
        return leaves.losses(x[None], y[None])[0, 0]

    losses_of = jax.vmap(jax.value_and_grad(leaf_loss))
    on_paths = lambda: paths.expected(frontier, operands, step, losses_of, leaves, y, share)
    return jax.lax.cond(fits, on_paths, lambda: otherwise(weights, bias, leaves, x, y, share))
