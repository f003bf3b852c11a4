"""Routes a tile of samples level by level: from scores to leaf weights, and back to the gradient of scores.

A level is a tuple of arrays ``(rows, tile)``. Together the arrays hold the nodes of the level, in the order of
layout.py. If the compiler can join and cut arrays, the tuple has one array. If it cannot (Triton), each array is a
block.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.layout import Layout
from pallas_kernels.products import product
from pallas_kernels.routes import Pair, Route, indicator

Level = tuple[jax.Array, ...]
Factors = list[tuple[Level, Level]]  # for each level: factors for turning right and for turning left


def map_arrays(fn: Callable[..., jax.Array], *levels: Level) -> Level:
    """Applies ``fn`` to the arrays of levels, one after another."""
    return tuple(map(fn, *levels))


def total(level: Level) -> jax.Array:
    """Returns the sum over all rows, ``(1, tile)``."""
    return sum(a.sum(0, keepdims=True) for a in level)  # type: ignore[return-value]


def scores(layout: Layout, weights: Any, bias: Any, xs: list[Any]) -> tuple[Level | None, list[Level]]:
    """Returns the scores of a subtree's ancestors (None if it has no ancestors), and the scores of each level.

    ``weights`` maps rows and features to a block of split weights, and ``bias`` rows to one of biases. ``xs`` has
    blocks of features of the samples, ``(tile, features)``, or ``(features, tile)`` if transposed.
    """

    def of_rows(rows: slice) -> jax.Array:
        blocks, over = layout.blocks_of_features, (1, 1 - layout.sample_axis)
        products = [product(weights(rows, f), x, over) for f, x in zip(blocks, xs, strict=True)]
        return sum(products, bias(rows))

    blocks = [of_rows(rows) for rows in layout.blocks_of_splits]
    levels, start = [], 0
    for size in ([layout.block] if layout.path else []) + layout.sizes:
        if layout.joined:
            levels.append((blocks[0][start : start + size],))
        else:
            levels.append(tuple(blocks[start // layout.block : (start + size) // layout.block]))
        start += size
    return (levels[0], levels[1:]) if layout.path else (None, levels)


def factors(route: Route, zs: list[Level]) -> Factors:
    """Returns the factors of all nodes."""
    return [tuple(zip(*map(route.factors, level), strict=True)) for level in zs]  # type: ignore[misc]


def leaf_weights(layout: Layout, factors: Factors, start: jax.Array | None = None) -> Level:
    """Returns the leaf weights: the products of the factors over the paths, times ``start (1, tile)``."""
    first = factors[0][0][0]
    reach: Level = (indicator(_rows(first) < 2**layout.below),)
    if start is not None:
        reach = (reach[0] * start,)
    for i, (right, left) in enumerate(factors):
        if 2**i < layout.block:
            reach = (reach[0] * jnp.where(_turn(first, i), right[0], left[0]),)
        else:
            reach = _join(layout, map_arrays(jnp.multiply, reach, left), map_arrays(jnp.multiply, reach, right))
    return reach


def score_gradients(layout: Layout, slopes: Factors, change: Level) -> list[Level]:
    """Returns the gradient with respect to the scores of all levels.

    ``change`` is the gradient with respect to relative changes of the leaf weights.
    """
    gradients = []
    for i, (right, left) in reversed([*enumerate(slopes)]):
        if 2**i < layout.block:
            gradients.append((change[0] * jnp.where(_turn(change[0], i), right[0], left[0]),))
        else:
            below_left, below_right = _halves(layout, change)
            gradients.append(map_arrays(lambda f, a, g, b: f * a + g * b, right, below_right, left, below_left))
            change = map_arrays(jnp.add, below_left, below_right)
    return gradients[::-1]


def path_weight(layout: Layout, factors: Pair, subtree: Any) -> jax.Array:
    """Returns the weight of a subtree's root, ``(1, tile)``, from the factors of its ancestors."""
    right, left = factors
    chosen = jnp.where(_path_turn(layout, right, subtree), right, left)
    logs = jnp.where(_rows(right) < layout.path, jnp.log(chosen), 0.0)  # a product of rows; Triton has only sums
    return jnp.exp(logs.sum(0, keepdims=True))


def path_gradient(layout: Layout, slopes: Pair, change: jax.Array, subtree: Any) -> jax.Array:
    """Returns the gradient with respect to the scores of the ancestors.

    ``change`` is the gradient with respect to relative changes of the root's weight, ``(1, tile)``.
    """
    right, left = slopes
    chosen = jnp.where(_path_turn(layout, right, subtree), right, left)
    return jnp.where(_rows(right) < layout.path, chosen * change, 0.0)


def _rows(like: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, like.shape, 0)


def _turn(like: jax.Array, level: int) -> jax.Array:
    """Returns whether the path through a row turns right at a level that is repeated in a block."""
    return (_rows(like) >> level & 1) > 0


def _path_turn(layout: Layout, like: jax.Array, subtree: Any) -> jax.Array:
    """Returns whether the path to a subtree turns right at the ancestor in a row."""
    return (jnp.right_shift(subtree, jnp.maximum(layout.path - 1 - _rows(like), 0)) & 1) > 0


def _join(layout: Layout, left: Level, right: Level) -> Level:
    """Returns the level of all left children, followed by all right children."""
    return (jnp.concatenate([left[0], right[0]]),) if layout.joined else left + right


def _halves(layout: Layout, level: Level) -> tuple[Level, Level]:
    """Applies the inverse of :func:`_join`."""
    parts, half = (level[0], len(level[0]) // 2) if layout.joined else (level, len(level) // 2)
    left, right = parts[:half], parts[half:]
    return ((left,), (right,)) if layout.joined else (left, right)  # type: ignore[return-value]
