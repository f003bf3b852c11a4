"""Losses of leaves on a tile of samples, ``(leaves, tile)``, and what they pull the values of leaves to."""

from typing import Any, Literal

import jax

from pallas_kernels.fold import Level
from pallas_kernels.products import product

Loss = Literal["linear", "squared"]


def losses(loss: Loss, values: jax.Array, y: jax.Array, share: Any) -> jax.Array:
    """The loss of every leaf on every sample.

    ``values . y`` where it is linear; else the squared distance ``share |values - y|^2``.

    Args:
      loss: its name.
      values: of a block of leaves, ``(leaves, outputs)``.
      y: ``(outputs, tile)``.
      share: weights of the samples ``(1, tile)``.
    """
    one = values.shape[1] == 1  # needs no matrix product
    if loss == "linear":
        return values * y if one else product(values, y)
    if one:
        return share * (values - y) * (values - y)
    square = (values * values).sum(1, keepdims=True) + (y * y).sum(0, keepdims=True)
    return share * (square - 2 * product(values, y))


def pull(loss: Loss, values: jax.Array, y: jax.Array, share: Any, weight: jax.Array) -> jax.Array:
    """The gradient of ``(weight * losses).sum()`` for the values, ``(leaves, outputs)``."""
    one = values.shape[1] == 1
    if loss == "linear":
        return (weight * y).sum(1, keepdims=True) if one else product(weight, y, (1, 1))
    weight = share * weight
    if one:
        return 2 * (weight * (values - y)).sum(1, keepdims=True)
    return 2 * (values * weight.sum(1, keepdims=True) - product(weight, y, (1, 1)))


def expected(values: Level, weight: Level) -> jax.Array:
    """The mean of the values of leaves by their weights, ``(outputs, tile)``."""
    parts = zip(values, weight, strict=True)
    if values[0].shape[1] == 1:
        return sum((v * w).sum(0, keepdims=True) for v, w in parts)  # type: ignore[return-value]
    return sum(product(v, w, (0, 0)) for v, w in parts)  # type: ignore[return-value]
