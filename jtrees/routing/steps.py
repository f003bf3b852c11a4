"""From a split score to the probability of going right: the four steps that the papers use.

Every function is elementwise, keeps the dtype, is finite for any finite score, and is right iff the score is above 0
(a score of exactly zero goes left under a hard step, and is one half under a soft one). Subnormal numbers may be taken
for zero, as XLA does on a CPU.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.routes import cubic


def hard_step(t: Float[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """Whether the sample goes right: ``t > 0``. A score of zero goes left.

    Example:
      >>> print(jtrees.routing.hard_step(jnp.array([-1.0, 0.0, 1.0])))
      [False False  True]
    """
    return t > 0


def scaled_sigmoid(t: Float[Array, "*shape"], alpha: float | Float[Array, "..."]) -> Float[Array, "*shape"]:
    """``1 / (1 + exp(-alpha t))``, the smooth step of GET (Mao & Cao 2024, eq. 5); hard as ``alpha`` grows.

    Args:
      t: split scores.
      alpha: scale, above 0; broadcasts against ``t``.

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
    # s (1 - s) comes first: where it is 0, a product of the others may be infinite, and 0 times that NaN.
    slope = s * (1 - s)
    return s, slope * alpha * dt + slope * t * dalpha


# --- The cubic step --------------------------------------------------------------------------------------------------
#
# With u = t / gamma, held between -1/2 and 1/2, and a = 1/2 + u, b = 1/2 - u (so a + b = 1), the cubic factors:
#
#     s = -2 u**3 + 3/2 u + 1/2 = cubic(a) = 1 - cubic(b),     cubic(a) = a**2 (3 - 2 a)
#     ds/dt = (3/2 - 6 u**2) / gamma = 6 a b / gamma
#     ds/dgamma = -u ds/dt
#
# The factors keep their digits near the ends, where a or b is a difference of neighbours, hence exact, and the powers
# of u cancel; they are exactly 0 beyond the ends. The derivative is a rule of its own because the value rounds to 0 or
# 1 long before the derivative vanishes: no derivative of the rounded value would do.


def smooth_step(t: Float[Array, "*shape"], gamma: float | Float[Array, "..."]) -> Float[Array, "*shape"]:
    """Cubic smooth step of TEL (Hazimeh et al. 2020, eq. 4): exactly 0 and 1 beyond ``-gamma/2`` and ``gamma/2``.

    Between them ``-2 u**3 + 3/2 u + 1/2`` with ``u = t / gamma``; its first derivative is continuous. A derivative
    beyond the largest finite number is clipped to it.

    Args:
      t: split scores.
      gamma: width of the soft region, above 0; broadcasts against ``t``.

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
    """``u``, ``a``, ``b`` and ``ds/dt``, finite for every finite score and every width above 0."""
    info = jnp.finfo(t.dtype)
    gamma = jnp.maximum(gamma, 4 * info.tiny)  # so that half of it is no subnormal number
    half = gamma / 2
    t = jnp.clip(t, -half, half)  # the score, not the ratio: then |u| <= 1/2 however small gamma is
    a, b = (half + t) / gamma, (half - t) / gamma
    return t / gamma, a, b, jnp.minimum(6 * a * b / gamma, info.max)


@jax.custom_jvp
def straight_through_sign(t: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """``+1`` where ``t > 0``, else ``-1``; its derivative is taken to be ``1[|t| <= 1]``.

    The straight-through rule of DGT (Karthikeyan et al. 2022, eq. 4): the derivative of the clipped identity stands in
    for that of the sign, which is zero almost everywhere.

    Example:
      >>> jax.grad(jtrees.routing.straight_through_sign)(0.5), jax.grad(jtrees.routing.straight_through_sign)(2.0)
      (Array(1., dtype=float32...), Array(0., dtype=float32...))
    """
    return jnp.where(hard_step(t), 1.0, -1.0).astype(t.dtype)


@straight_through_sign.defjvp
def _straight_through_sign_jvp(primals, tangents):
    (t,), (dt,) = primals, tangents
    return straight_through_sign(t), jnp.where(jnp.abs(t) <= 1, dt, jnp.zeros_like(dt))
