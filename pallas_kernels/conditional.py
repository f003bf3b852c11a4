"""TEL's fused conditional computation: an ensemble under smooth-step routing that evaluates only subtrees that some
sample of a block reaches (Hazimeh et al. 2020, Algorithms 1 and 2).

The body is that of soft_routing.py, which skips a subtree if the weights of all samples of the tile are exactly 0. For
each tree samples are sorted by their hard routing, so that those of a tile reach few subtrees.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Config
from pallas_kernels.hard_routing import hard_routing
from pallas_kernels.soft_routing import soft_routing

_SORTED = 6  # levels from the root by whose hard routing samples are sorted


def conditional(
    x: jax.Array,
    weights: jax.Array,
    bias: jax.Array,
    leaves: jax.Array,
    *,
    gamma: float | jax.Array = 1.0,
    implementation: str | Config | None = None,
) -> jax.Array:
    """Returns the sum over trees of expected leaf values under smooth steps of width gamma.

    Differentiable by reverse mode in all arrays and in gamma.

    Args:
      x: samples ``(n, p)``, float32 or bfloat16.
      weights: split weights ``(trees, nodes, p)``, nodes breadth first; depth 1 to 10.
      bias: ``(trees, nodes)``.
      leaves: ``(trees, leaves, k)``.
      gamma: width of the uncertain region, above 0.
      implementation: as for :func:`soft_routing`.

    Returns:
      ``(n, k)``, float32.

    Raises:
      ValueError: as :func:`soft_routing`.
      NotImplementedError: likewise.
    """
    upper = min(weights.shape[1], 2**_SORTED - 1)

    def tree(weights: jax.Array, bias: jax.Array, leaves: jax.Array) -> jax.Array:
        order = jnp.argsort(hard_routing(*jax.lax.stop_gradient((x, weights[:upper], bias[:upper]))))
        options = {"route": "smooth_step", "scale": 1 / gamma, "implementation": implementation}
        return soft_routing(x[order], weights, bias, leaves, **options)[jnp.argsort(order)]

    return jax.vmap(tree)(weights, bias, leaves).sum(0)
