"""DGT's path function: the hard tree in the forward pass, a dense gradient in the backward pass.

The method is Algorithm 2 of Karthikeyan et al. 2022. The gradient is the gradient of soft routing with fixed
probabilities. Let q be the number of decisions that agree with the path of a leaf, minus the number that disagree. The
softmax of q is the weight of the leaf. This weight is a product over the path: ``sigmoid(2)`` for a decision that
agrees, and ``sigmoid(-2)`` for a decision that disagrees. ``jtrees.routing.path_sum`` has the derivation.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.choice import Implementation, choose, differentiable
from pallas_kernels.config import Config
from pallas_kernels.hard_routing import of_leaf_reached
from pallas_kernels.operands import checked, one_number, scores
from pallas_kernels.routes import VOTE, indicator
from pallas_kernels.routing import Tree, gradient
from pallas_kernels.timing import Program


def path_sum(
    x: jax.Array,
    weights: jax.Array,
    bias: jax.Array,
    leaves: jax.Array,
    *,
    window: float | jax.Array = 1.0,
    implementation: Implementation = "xla",
) -> jax.Array:
    """Returns the values of the reached leaf, with DGT's gradient.

    Splits and samples receive DGT's gradient. Leaves receive the gradient of the hard tree. Only reverse mode is
    available. ``vmap`` adds an axis to the grid.

    Args:
      x: samples ``(n, p)``, float32 or bfloat16.
      weights: split weights ``(nodes, p)``, ``2**depth - 1`` nodes breadth first, depth 1 to 10.
      bias: split biases ``(nodes,)``.
      leaves: finite leaf values ``(leaves, k)``.
      window: half-width of the window in which a score passes gradients, above 0. The derivative of a decision is
        ``1[|z| <= window] / window``. No gradient flows to the window.
      implementation: see :mod:`pallas_kernels.choice`.

    Returns:
      Values ``(n, k)`` in float32.

    Raises:
      ValueError: for shapes or dtypes that do not fit, or an unknown implementation.
      Unsupported: if no requested implementation can run the call.
    """
    tree = checked(x, weights, bias, leaves)
    window = jax.lax.stop_gradient(one_number("window", window))
    program = Program("path_sum", "", lambda how, x, y, *tree: path_sum(x, *tree, implementation=how))
    return differentiable(choose(program, implementation, tree.sizes), _path_sum, reference, *tree, window)


def reference(x: Any, weights: Any, bias: Any, leaves: Any, window: Any) -> jax.Array:
    """Computes the plain definition, with the gradient of the softmax and a straight-through sign."""
    z = scores(x, weights, bias)
    straight = jnp.where(jnp.abs(z) <= window, z - jax.lax.stop_gradient(z), 0) / window
    sign = 2 * indicator(z > 0) - 1 + straight
    agree = jnp.zeros_like(z[:1])
    for level in range(weights.shape[0].bit_length()):
        level_sign = sign[2**level - 1 : 2 ** (level + 1) - 1]
        agree = jnp.stack([agree - level_sign, agree + level_sign], 1).reshape(-1, x.shape[0])
    fixed, hard = jax.lax.stop_gradient((leaves, jax.nn.one_hot(agree.argmax(0), len(leaves), dtype=z.dtype)))
    soft = jnp.matmul(jax.nn.softmax(agree, axis=0).T, fixed, precision="highest")
    return jnp.matmul(hard, leaves, precision="highest") + soft - jax.lax.stop_gradient(soft)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _path_sum(config: Config, x: Any, weights: Any, bias: Any, leaves: Any, window: Any) -> jax.Array:
    return of_leaf_reached(config, x, weights, bias, leaves)


def _backward(config: Config, operands: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    *tree, window = operands
    run = partial(gradient, VOTE, config, Tree(*tree), cotangent, window=window.reshape(1, 1))
    sums, d_x = run(), run(samples=True)["x"]
    # The slope in the window is 1 / window. All gradients are linear in the slope, so the division comes last.
    d_splits = (d_x / window).astype(tree[0].dtype), sums["weights"] / window, sums["bias"] / window
    return *d_splits, sums["leaves"], jnp.zeros_like(window)


_path_sum.defvjp(lambda config, *operands: (_path_sum(config, *operands), operands), _backward)
