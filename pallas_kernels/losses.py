"""Losses of leaves on a tile of samples, ``(leaves, tile)``, and their gradients with respect to leaf values."""

from typing import Any, Literal

import jax

from pallas_kernels.fold import Level
from pallas_kernels.products import product

Loss = Literal["linear", "squared"]


def losses(loss: Loss, values: jax.Array, y: jax.Array, share: Any) -> jax.Array:
    """Returns the loss of every leaf of a block on every sample of a tile.

    The linear loss is ``values . y``. The squared loss is ``share |values - y|^2``. Values are ``(leaves, outputs)``, y
    is ``(outputs, tile)``, and the weights of the samples are ``(1, tile)``.
    """
    is_scalar = values.shape[1] == 1  # needs no matrix product
    if loss == "linear":
        return values * y if is_scalar else product(values, y)
    if is_scalar:
        return share * (values - y) * (values - y)
    square = (values * values).sum(1, keepdims=True) + (y * y).sum(0, keepdims=True)
    return share * (square - 2 * product(values, y))


def pull(loss: Loss, values: jax.Array, y: jax.Array, share: Any, weight: jax.Array) -> jax.Array:
    """Returns the gradient of ``(weight * losses).sum()`` with respect to the values, ``(leaves, outputs)``."""
    is_scalar = values.shape[1] == 1
    if loss == "linear":
        return (weight * y).sum(1, keepdims=True) if is_scalar else product(weight, y, (1, 1))
    weight = share * weight
    if is_scalar:
        return 2 * (weight * (values - y)).sum(1, keepdims=True)
    return 2 * (values * weight.sum(1, keepdims=True) - product(weight, y, (1, 1)))


def expected(values: Level, weight: Level) -> jax.Array:
    """Returns the mean of the leaf values, weighted by leaf weights, ``(outputs, tile)``."""
    parts = zip(values, weight, strict=True)
    if values[0].shape[1] == 1:
        return sum((v * w).sum(0, keepdims=True) for v, w in parts)  # type: ignore[return-value]
    return sum(product(v, w, (0, 0)) for v, w in parts)  # type: ignore[return-value]
