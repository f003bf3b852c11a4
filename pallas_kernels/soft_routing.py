"""Soft routing: the expected leaf values of samples, and their gradient. The backward pass recomputes scores."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.choice import Implementation, choose, differentiable
from pallas_kernels.config import Config
from pallas_kernels.operands import check_route, checked, leaf_weights, one_number, scores
from pallas_kernels.routes import ROUTES
from pallas_kernels.routing import Tree, gradient, value
from pallas_kernels.timing import Program


def soft_routing(
    x: jax.Array,
    weights: jax.Array,
    bias: jax.Array,
    leaves: jax.Array,
    *,
    route: str = "sigmoid",
    scale: float | jax.Array = 1.0,
    implementation: Implementation = "xla",
) -> jax.Array:
    """Returns the expected leaf values under a soft routing, ``sum_l P_l(x) leaves_l``.

    Reverse mode differentiates all arrays and the scale. ``vmap`` adds an axis to the grid.

    Args:
      x: samples ``(n, p)``, float32 or bfloat16.
      weights: split weights ``(nodes, p)``, ``2**depth - 1`` nodes breadth first, depth 1 to 10.
      bias: split biases ``(nodes,)``.
      leaves: leaf values ``(leaves, k)``.
      route: ``"sigmoid"`` goes right with probability ``sigmoid(scale z)`` at a node with score ``z = w x + b``.
        ``"smooth_step"`` is TEL's cubic step of width ``1 / scale``. ``"violation"`` is RADDT's softmin over the
        leaves, of ``scale`` times the violation of their paths.
      scale: sharpness, above 0.
      implementation: see :mod:`pallas_kernels.choice`.

    Returns:
      Expected values ``(n, k)`` in float32.

    Raises:
      ValueError: for shapes or dtypes that do not fit, an unknown route or implementation.
      Unsupported: if no requested implementation can run the call.
    """
    tree = checked(x, weights, bias, leaves)
    check_route(route)
    scale = one_number("scale", scale)
    tree = tree._replace(weights=scale * tree.weights, bias=scale * tree.bias)
    # Triton made illegal memory accesses in smooth steps on an H200, with an earlier body and jax 0.11.2. The cause is
    # unknown.
    not_by = ("triton",) if route == "smooth_step" else ()
    call = lambda how, x, y, *tree: soft_routing(x, *tree, route=route, implementation=how)
    choice = choose(Program("soft_routing", route, call), implementation, tree.sizes, not_by=not_by)
    return differentiable(choice, partial(_soft_routing, route), partial(reference, route), *tree)


def reference(route: str, x: jax.Array, weights: jax.Array, bias: jax.Array, leaves: jax.Array) -> jax.Array:
    """Computes the plain definition."""
    weight = leaf_weights(scores(x, weights, bias), route)
    return jnp.matmul(weight.T, leaves, precision="highest")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _soft_routing(route: str, config: Config, *tree: Any) -> jax.Array:
    return value(ROUTES[route], config, Tree(*tree))[0]


def _backward(route: str, config: Config, tree: Any, cotangent: jax.Array) -> tuple[jax.Array, ...]:
    run = partial(gradient, ROUTES[route], config, Tree(*tree), cotangent)
    sums, d_x = run(), run(samples=True)["x"]  # the compiler drops an unused result
    return d_x.astype(tree[0].dtype), sums["weights"], sums["bias"], sums["leaves"]


_soft_routing.defvjp(lambda route, config, *tree: (_soft_routing(route, config, *tree), tree), _backward)
