"""TEL's smooth step. A step maps a split score to the probability of going right.

GET's step is ``jax.nn.sigmoid`` of scaled scores, and DGT's straight-through rule is in
:mod:`jtrees.routing.path_sum`.

Every function is elementwise, keeps the dtype, and is finite for any finite score. A sample goes right if the score is
above 0. A score of exactly zero goes left under a hard step, and has probability one half under a soft step. Subnormal
numbers may be treated as zero, as XLA does on a CPU.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.routes import cubic

# --- The cubic step --------------------------------------------------------------------------------------------------
#
# Let u = t / gamma, clipped to [-1/2, 1/2], a = 1/2 + u and b = 1/2 - u (so a + b = 1). The cubic factors:
#
#     s = -2 u**3 + 3/2 u + 1/2 = cubic(a) = 1 - cubic(b),     cubic(a) = a**2 (3 - 2 a)
#     ds/dt = (3/2 - 6 u**2) / gamma = 6 a b / gamma
#     ds/dgamma = -u ds/dt
#
# The factors keep their digits near the ends. There a or b is a difference of neighbouring numbers, which is exact,
# whereas the powers of u cancel. Beyond the ends a or b is exactly 0. The derivative has its own rule, because the
# value rounds to 0 or 1 long before the derivative vanishes.


def smooth_step(t: Float[Array, "*shape"], gamma: float | Float[Array, "..."]) -> Float[Array, "*shape"]:
    """Returns the cubic smooth step of TEL (Hazimeh et al. 2020, eq. 4).

    The step is exactly 0 up to ``-gamma/2`` and exactly 1 from ``gamma/2`` on. Between these scores it is
    ``-2 u**3 + 3/2 u + 1/2`` with ``u = t / gamma``. Its first derivative is continuous. A derivative above the largest
    finite number is clipped to this number.

    Args:
      t: split scores.
      gamma: width of the soft region, above 0. It broadcasts against ``t``.

    Example:
      >>> print(jtrees.routing.smooth_step(jnp.array([-0.6, 0.0, 0.25, 0.5]), 1.0))
      [0.      0.5     0.84375 1.     ]
    """
    return _smooth_step(t, jnp.asarray(gamma, t.dtype))


@jax.custom_jvp
def _smooth_step(t: Array, gamma: Array) -> Array:
    u, a, b, _ = _cubic_parts(t, gamma)
    return jnp.where(u > 0, 1 - cubic(b), cubic(a))


@_smooth_step.defjvp
def _smooth_step_jvp(primals, tangents):
    u, _, _, slope = _cubic_parts(*primals)
    dt, dgamma = tangents
    return _smooth_step(*primals), slope * dt - u * slope * dgamma


def _cubic_parts(t: Array, gamma: Array) -> tuple[Array, Array, Array, Array]:
    """Returns ``u``, ``a``, ``b`` and ``ds/dt``, finite for every finite score and every width above 0."""
    info = jnp.finfo(t.dtype)
    gamma = jnp.maximum(gamma, 4 * info.tiny)  # then half of it is a normal number
    half = gamma / 2
    t = jnp.clip(t, -half, half)  # clips the score, not the ratio, for |u| <= 1/2 with any gamma
    a, b = (half + t) / gamma, (half - t) / gamma
    return t / gamma, a, b, jnp.minimum(6 * a * b / gamma, info.max)
