"""Functions of kernels on a tile of samples: scores, weights of leaves, leaves reached, losses of leaves.

Arrays are ``(rows, tile)``, samples last, of one subtree at a time (layout.py); ``refs`` are the references of a
program by name. Only portable operations: products, elementwise operations, sums.
"""

from types import SimpleNamespace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.backend import In, Out, whole
from pallas_kernels.layout import Layout
from pallas_kernels.routes import Pair, Route, ones

Loss = Literal["linear", "squared"]
Axis = Literal[0, 1]


# --- Operands --------------------------------------------------------------------------------------------------------


def splits(layout: Layout, x: jax.Array, weights: jax.Array, bias: jax.Array, *, each: bool = False) -> dict[str, In]:
    """Returns the operands of splits and path matrices.

    Those of all subtrees, or (``each``) of the subtree given by the grid's second axis.
    """
    padded = jnp.pad(weights, ((0, 0), (0, layout.p_rows - layout.p)))
    (top_w, w), (top_b, b) = layout.cut(padded), layout.cut(bias.astype(jnp.float32)[:, None])
    below = one_subtree if each else whole
    operands = {"b": below(b)} | {name: below(part) for name, part in _named("w", w, layout.split)}
    matrices = zip(("right", "left"), layout.of_subtree, strict=True)
    operands |= {name: whole(jnp.asarray(a, jnp.bfloat16)) for name, a in matrices}
    if layout.top:
        operands |= {"top_b": whole(top_b)}
        operands |= {name: whole(part) for name, part in _named("top_w", top_w, layout.split)}
        matrices = zip(("top_right", "top_left"), layout.of_top, strict=True)
        operands |= {name: whole(jnp.asarray(a, jnp.bfloat16)) for name, a in matrices}
    return operands


def _named(name: str, a: jax.Array, split: bool) -> list[tuple[str, jax.Array]]:
    """Returns the array under its name, or its parts under numbered names."""
    return [(f"{name}{i}", part) for i, part in enumerate(parts(a))] if split else [(name, a)]


def samples(layout: Layout, width: int, **arrays: jax.Array | None) -> dict[str, In]:
    """Returns operands ``(n, m)`` in blocks of ``width`` samples: x, y, and arrays with one number per sample."""
    rows = {"x": layout.p_rows, "y": layout.k_rows}
    given = {name: layout.samples(a, rows.get(name, 1)) for name, a in arrays.items() if a is not None}
    return {name: In(a, (a.shape[0], width), lambda i, *_: (0, i)) for name, a in given.items()}


def answers(layout: Layout, rows: int, dtype: Any = jnp.float32) -> Out:
    """Returns a result that each program of a grid over tiles writes for its samples."""
    return Out((rows, layout.columns), dtype, (rows, layout.tile), lambda i: (0, i))


def one_subtree(a: jax.Array) -> In:
    """Returns an operand ``(subtrees, ...)`` of which programs see the subtree given by the grid's second axis."""
    return In(a, (1, *a.shape[1:]), lambda i, t: (t, 0, 0))


# --- Small products --------------------------------------------------------------------------------------------------


def dot(a: jax.Array, b: jax.Array, over: tuple[Axis, Axis] = (1, 0)) -> jax.Array:
    """Returns the product that contracts axis ``over[0]`` of a with ``over[1]`` of b, in float32.

    Products of float32 numbers are in full precision: the sign of a score is a decision, and an error of a logarithm is
    a relative error of a weight.
    """
    precision = None if a.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    dimensions = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


Parts = tuple[jax.Array, ...]  # bfloat16 numbers, largest first, whose sum is a float32 number


def parts(a: jax.Array) -> Parts:
    """Returns the three bfloat16 numbers whose sum is ``a`` exactly, for finite numbers; a bfloat16 array as it is.

    The bits are cut by a mask: compilers remove a conversion to a shorter type and back.
    """
    if a.dtype == jnp.bfloat16:
        return (a,)
    found, rest = [], a
    for _ in range(3):
        bits = jax.lax.bitcast_convert_type(rest, jnp.int32) & jnp.int32(-(2**16))
        high = jax.lax.bitcast_convert_type(bits, jnp.float32)
        found.append(high.astype(jnp.bfloat16))
        rest = rest - high
    return tuple(found)


def dot_of_parts(a: Parts, b: Parts, over: tuple[Axis, Axis] = (1, 0)) -> jax.Array:
    """Returns the product of numbers given by their parts, for matrix units that multiply bfloat16 numbers.

    Products of parts below 2**-24 of the largest are left out. The smallest are added first.
    """
    pairs = [(i, j) for i in range(len(a)) for j in range(len(b)) if i + j < 3]
    return sum(dot(a[i], b[j], over) for i, j in sorted(pairs, key=sum, reverse=True))  # type: ignore[return-value]


def dot_of_ones(ones: jax.Array, a: jax.Array, over: tuple[Axis, Axis] = (1, 0)) -> jax.Array:
    """Returns the product of a bfloat16 matrix of zeros and ones with float32 numbers, in full precision."""
    return dot_of_parts((ones,), parts(a), over)


def of_leaves(values: jax.Array, a: jax.Array) -> jax.Array:
    """``values.T @ a`` for ``(leaves, k)`` and ``(leaves, tile)``; for one output without a matrix product."""
    return (values * a).sum(0, keepdims=True) if values.shape[1] == 1 else dot(values, a, (0, 0))


def of_outputs(values: jax.Array, y: jax.Array) -> jax.Array:
    """``values @ y`` for ``(leaves, k)`` and ``(k, tile)``, likewise."""
    return values * y if values.shape[1] == 1 else dot(values, y)


def of_samples(a: jax.Array, y: jax.Array) -> jax.Array:
    """``a @ y.T`` for ``(leaves, tile)`` and ``(k, tile)``, likewise."""
    return (a * y).sum(1, keepdims=True) if y.shape[0] == 1 else dot(a, y, (1, 1))


def row(a: jax.Array, index: Any) -> jax.Array:
    """Row ``index`` as ``(1, columns)``, by a sum, as arrays in a kernel cannot be indexed."""
    return jnp.where(_numbers(a, 0) == index, a, 0.0).sum(0, keepdims=True)


def row_as_column(a: jax.Array, index: Any) -> jax.Array:
    """Row ``index`` as ``(columns, 1)``, by a product with one-hot columns."""
    at = ones(jax.lax.broadcasted_iota(jnp.int32, (a.shape[0], 16), 0) == index).astype(a.dtype)
    return dot(a, at, (0, 0)).sum(1, keepdims=True) / 16


def with_row(a: jax.Array, index: Any, values: jax.Array) -> jax.Array:
    """``a`` with ``values`` added to row ``index``."""
    return a + jnp.where(_numbers(a, 0) == index, values, 0.0)


def _numbers(a: jax.Array, axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, a.shape, axis)


# --- Routing ---------------------------------------------------------------------------------------------------------


def features(layout: Layout, x: Any, samples: Any) -> list[Any]:
    """Returns the samples of a tile in blocks of features; as parts, where products are those of parts."""
    blocks = [x[block, samples] for block in layout.blocks_of_features]
    return [parts(x) for x in blocks] if layout.split else blocks


def weights(refs: SimpleNamespace, name: str, *index: Any) -> Any:
    """Returns ``refs.name[index]``, or the parts of it."""
    if hasattr(refs, name):
        return getattr(refs, name)[index]
    return tuple(part[index] for key, part in vars(refs).items() if key.rstrip("012") == name)


def scores(layout: Layout, refs: SimpleNamespace, name: str, *index: Any, bias: jax.Array, xs: list[Any]) -> jax.Array:
    """Returns the scores of the nodes whose weights are the operand ``name`` at an index."""
    blocks = zip(layout.blocks_of_features, xs, strict=True)
    return sum((product(weights(refs, name, *index, slice(None), f), x) for f, x in blocks), bias)


def product(a: Any, b: Any, over: tuple[Axis, Axis] = (1, 0)) -> jax.Array:
    """Returns the product of two arrays, of which either may be given by its parts.

    A bfloat16 array meets the parts of a float32 array, so that nothing is rounded before the sum.
    """
    if not (isinstance(a, tuple) or isinstance(b, tuple)) and a.dtype == b.dtype:
        return dot(a, b, over)
    a, b = (one if isinstance(one, tuple) else parts(one) for one in (a, b))
    return dot_of_parts(a, b, over)


def log_weights(route: Route, z: jax.Array, right: jax.Array, left: jax.Array, leaves: int) -> jax.Array:
    """Returns the logarithms of the weights of leaves; about minus infinity for padding."""
    to_right, to_left = route.logs(z)
    log = dot_of_ones(right, to_right) + dot_of_ones(left, to_left)
    return log if leaves == log.shape[0] else jnp.where(_numbers(log, 0) < leaves, log, -1e9)


def slopes(route: Route, z: jax.Array, refs: SimpleNamespace, samples: Any) -> Pair:
    """Returns the derivatives of the logarithms of factors; scores are in units of a window, if there is one."""
    return route.slopes(z / refs.window[:, samples] if hasattr(refs, "window") else z)


def score_gradient(right: jax.Array, left: jax.Array, change: jax.Array, slopes: Pair) -> jax.Array:
    """Returns the gradient for scores, for gradients ``change`` for relative leaf weights: see routes.py."""
    slope_right, slope_left = slopes
    return dot_of_ones(right, change, (0, 0)) * slope_right + dot_of_ones(left, change, (0, 0)) * slope_left


def reached(z: jax.Array, right: jax.Array, left: jax.Array, depth: int) -> jax.Array:
    """Returns 1 for the leaf of hard routing, with which all decisions agree, else 0.

    Signs, and sums of up to ten of them, are exact in products of bfloat16 numbers.
    """
    return ones(dot(right - left, (2 * ones(z > 0) - 1).astype(jnp.bfloat16)) > depth - 0.5)


def number(layout: Layout, at: jax.Array, subtree: Any) -> jax.Array:
    """Returns the index of the leaf with a 1, as int32 ``(1, tile)``; 0 if there is none."""
    numbers = _numbers(at, 0) + subtree * 2**layout.sub
    return jnp.where(at > 0, numbers, 0).sum(0, keepdims=True)


# --- Losses of leaves ------------------------------------------------------------------------------------------------


def losses(loss: Loss, refs: SimpleNamespace, values: jax.Array, samples: Any) -> jax.Array:
    """Returns the loss of every leaf on every sample: ``values . y``, or the weighted squared distance."""
    y = refs.y[:, samples]
    if loss == "linear":
        return of_outputs(values, y)
    if values.shape[1] == 1:
        return refs.share[:, samples] * (values - y) * (values - y)
    square = (values * values).sum(1, keepdims=True) + (y * y).sum(0, keepdims=True)
    return refs.share[:, samples] * (square - 2 * dot(values, y))


def pull(loss: Loss, refs: SimpleNamespace, values: jax.Array, weight: jax.Array, samples: Any) -> jax.Array:
    """Returns the gradient of ``(weight * losses).sum()`` for the values, ``(leaves, k)``."""
    y = refs.y[:, samples]
    if loss == "linear":
        return of_samples(weight, y)
    weight = refs.share[:, samples] * weight
    if values.shape[1] == 1:
        return 2 * (weight * (values - y)).sum(1, keepdims=True)
    return 2 * (values * weight.sum(1, keepdims=True) - dot(weight, y, (1, 1)))
