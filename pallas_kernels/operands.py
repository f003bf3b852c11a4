"""Checks of kernel operands, and the plain definitions of scores and leaf weights."""

import jax
import jax.numpy as jnp

from pallas_kernels.config import DEEPEST
from pallas_kernels.routes import ROUTES, cubic
from pallas_kernels.routing import Tree


def checked(*arrays: jax.Array) -> Tree:
    """Returns ``x, weights, bias, leaves``; raises ``ValueError`` for shapes or dtypes that do not fit."""
    x, weights, bias, leaves = (jnp.asarray(a) for a in arrays)
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"x must be (n, p) with n and p above 0, got shape {x.shape}")
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
    return Tree(x, *(a.astype(jnp.float32) for a in (weights, bias, leaves)))


def one_number(name: str, value: jax.Array | float) -> jax.Array:
    """Returns a number in float32; raises ``ValueError`` for an array of several numbers."""
    value = jnp.asarray(value, jnp.float32)
    if value.size != 1:
        raise ValueError(f"{name} must be one number, got shape {value.shape}")
    return value.reshape(())


def check_route(route: str) -> None:
    """Raises ``ValueError`` for an unknown route."""
    if not isinstance(route, str) or route not in ROUTES:
        raise ValueError(f"route must be one of {', '.join(map(repr, ROUTES))}, got {route!r:.80}")


def scores(x: jax.Array, weights: jax.Array, bias: jax.Array) -> jax.Array:
    """Returns scores ``(nodes, n)`` by the plain definition, in float32."""
    return jnp.matmul(weights, x.astype(jnp.float32).T, precision="highest") + bias[:, None]


def leaf_weights(z: jax.Array, route: str) -> jax.Array:
    """Returns leaf probabilities ``(leaves, n)``, given scores ``(nodes, n)``, by textbook formulas."""
    depth, weight = z.shape[0].bit_length(), jnp.zeros_like(z[:1])
    if route == "violation":
        join = lambda total, z: (total + jax.nn.relu(z), total + jax.nn.relu(-z))
    else:
        right = jax.nn.sigmoid(z) if route == "sigmoid" else cubic(jnp.clip(0.5 + z, 0, 1))
        z, weight = right, weight + 1
        join = lambda total, right: (total * (1 - right), total * right)
    for level in range(depth):
        left, right = join(weight, z[2**level - 1 : 2 ** (level + 1) - 1])
        weight = jnp.stack([left, right], 1).reshape(-1, z.shape[1])
    return jax.nn.softmax(-weight, axis=0) if route == "violation" else weight
