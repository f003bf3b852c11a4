"""The four steps of the papers. A step maps a split score to the probability of going right.

Every function is elementwise, keeps the dtype, and is finite for any finite score. A sample goes right if the score is
above 0. A score of exactly zero goes left under a hard step, and has probability one half under a soft step. Subnormal
numbers may be treated as zero, as XLA does on a CPU.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.routes import cubic


def hard_step(t: Float[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """Returns whether the sample goes right: ``t > 0``. A score of zero goes left.

    Example:
      >>> print(jtrees.routing.hard_step(jnp.array([-1.0, 0.0, 1.0])))
      [False False  True]
    """
    return t > 0


def scaled_sigmoid(t: Float[Array, "*shape"], alpha: float | Float[Array, "..."]) -> Float[Array, "*shape"]:
    """Returns ``1 / (1 + exp(-alpha t))``, the smooth step of GET (Mao & Cao 2024, eq. 5).

    The step becomes hard as ``alpha`` grows.

    Args:
      t: split scores.
      alpha: scale, above 0. It broadcasts against ``t``.

    Example:
      >>> print(np.asarray(jtrees.routing.scaled_sigmoid(jnp.array([-1.0, 0.0, 1.0]), 2.0)).round(2))
      [0.12 0.5  0.88]
    """
    return _scaled_sigmoid(t, jnp.asarray(alpha, t.dtype))


@jax.custom_jvp
def _scaled_sigmoid(t: Array, alpha: Array) -> Array:
    return jax.nn.sigmoid(t * alpha)


@_scaled_sigmoid.defjvp
def _scaled_sigmoid_jvp(primals, tangents):
    (t, alpha), (dt, dalpha) = primals, tangents
    s = _scaled_sigmoid(t, alpha)
    # s (1 - s) is the first factor. If it is 0, the product of the other factors may be infinite, and 0 times infinity
    # is NaN.
    slope = s * (1 - s)
    return s, slope * alpha * dt + slope * t * dalpha


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


@jax.custom_jvp
def straight_through_sign(t: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns ``+1`` if ``t > 0``, else ``-1``. Its derivative is defined as ``1[|t| <= 1]``.

    This is the straight-through rule of DGT (Karthikeyan et al. 2022, eq. 4). The derivative of the clipped identity
    replaces the derivative of the sign, which is zero almost everywhere.

    Example:
      >>> jax.grad(jtrees.routing.straight_through_sign)(0.5), jax.grad(jtrees.routing.straight_through_sign)(2.0)
      (Array(1., dtype=float32...), Array(0., dtype=float32...))
    """
    return jnp.where(hard_step(t), 1.0, -1.0).astype(t.dtype)


@straight_through_sign.defjvp
def _straight_through_sign_jvp(primals, tangents):
    (t,), (dt,) = primals, tangents
    return straight_through_sign(t), jnp.where(jnp.abs(t) <= 1, dt, jnp.zeros_like(dt))
