"""TEL's conditional computation fused: an ensemble under smooth-step routing whose blocks of samples descend only into
subtrees that some sample of the block reaches (Hazimeh et al. 2020, Algorithms 1 and 2).

The body is that of soft_routing.py, which skips a subtree if the weights of all samples of its tile are exactly 0
there. Samples are put in the order of where hard routing takes them, tree by tree, so that the samples of a tile have
few subtrees among them.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Config
from pallas_kernels.hard_routing import hard_routing
from pallas_kernels.soft_routing import soft_routing

_SORTED = 6  # levels from the root by which samples are put in order


def conditional(
    x: jax.Array,
    weights: jax.Array,
    bias: jax.Array,
    leaves: jax.Array,
    *,
    gamma: float | jax.Array = 1.0,
    implementation: str | Config | None = None,
) -> jax.Array:
    """The sum over trees of the mean over leaves of what they hold, by smooth steps of width gamma.

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
