"""Checked operands of kernels, and the plain definition of scores."""

import jax
import jax.numpy as jnp

DEEPEST = 10


def checked(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns ``x, weights, bias, leaves`` as arrays of checked shapes and dtypes.

    Raises:
      ValueError: for shapes or dtypes that do not fit.
    """
    x, weights, bias, leaves = (jnp.asarray(a) for a in arrays)
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"x must be (n, p), neither of them 0, got shape {x.shape}")
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"x must be float32 or bfloat16, got {x.dtype}")
    depth = weights.shape[0].bit_length() if weights.ndim == 2 else 0
    if not 1 <= depth <= DEEPEST or weights.shape != (2**depth - 1, x.shape[1]):
        expected = f"(2**depth - 1, {x.shape[1]}) with a depth from 1 to {DEEPEST}"
        raise ValueError(f"weights must be {expected}, got shape {weights.shape}")
    if bias.shape != weights.shape[:1]:
        raise ValueError(f"bias must be ({weights.shape[0]},), got shape {bias.shape}")
    if leaves.ndim != 2 or leaves.shape[0] != 2**depth or leaves.shape[1] == 0:
        raise ValueError(f"leaves must be ({2**depth}, k), got shape {leaves.shape}")
    return x, weights.astype(jnp.float32), bias.astype(jnp.float32), leaves.astype(jnp.float32)


def scores(x: jax.Array, weights: jax.Array, bias: jax.Array) -> jax.Array:
    """Returns scores ``(nodes, n)`` by plain definition, in float32."""
    return jnp.matmul(weights, x.astype(jnp.float32).T, precision="highest") + bias[:, None]
