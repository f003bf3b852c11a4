"""Products of blocks in full float32 precision, on matrix units with or without float32 products."""

import jax
import jax.numpy as jnp

Axes = tuple[int, int]
Parts = tuple[jax.Array, ...]  # bfloat16 numbers, largest first, whose sum is a float32 number


def product(a: jax.Array | Parts, b: jax.Array | Parts, over: Axes = (1, 0)) -> jax.Array:
    """Returns the product that contracts axis ``over[0]`` of a with axis ``over[1]`` of b, in float32.

    Each operand may be given as its parts. A bfloat16 array is multiplied by the parts of a float32 array, so nothing
    is rounded before the sum. The precision is full, because the sign of a score is a decision.
    """
    if not (isinstance(a, tuple) or isinstance(b, tuple)) and a.dtype == b.dtype:
        return _dot(a, b, over)
    a, b = (factor if isinstance(factor, tuple) else parts(factor) for factor in (a, b))
    # Products of parts below 2**-24 of the product are omitted. The smallest products are added first.
    pairs = [(i, j) for i in range(len(a)) for j in range(len(b)) if i + j < 3]
    return sum(_dot(a[i], b[j], over) for i, j in sorted(pairs, key=sum, reverse=True))  # type: ignore[return-value]


def parts(a: jax.Array) -> Parts:
    """Returns three bfloat16 numbers whose sum is exactly ``a``, for magnitudes up to 3e38.

    A bfloat16 array is its only part. The bits are rounded by an addition and a mask, because compilers remove a
    conversion to a shorter type and back. If they were cut, all parts would have the sign of ``a``, and errors of
    omitted products would add up.
    """
    if a.dtype == jnp.bfloat16:
        return (a,)
    summands, rest = [], a
    for _ in range(3):
        bits = (jax.lax.bitcast_convert_type(rest, jnp.int32) + jnp.int32(2**15)) & jnp.int32(-(2**16))
        high = jax.lax.bitcast_convert_type(bits, jnp.float32)
        summands.append(high.astype(jnp.bfloat16))
        rest = rest - high
    return tuple(summands)


def _dot(a: jax.Array, b: jax.Array, over: Axes) -> jax.Array:
    precision = None if a.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    dimensions = (((over[0],), (over[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
