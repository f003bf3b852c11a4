"""From a split score to the probability of going right: the four steps that the papers use.

Every function is elementwise, keeps the dtype, is finite for any finite score, and is right iff the score is above 0
(a score of exactly zero goes left under a hard step, and is one half under a soft one).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def hard_step(t: Float[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """Whether the sample goes right: ``t > 0``. A score of zero goes left."""
    return t > 0


def scaled_sigmoid(t: Float[Array, "*shape"], alpha: float | Float[Array, "..."]) -> Float[Array, "*shape"]:
    """``1 / (1 + exp(-alpha t))``, the smooth step of GET (Mao & Cao 2024, eq. 5); hard as ``alpha`` grows.

    Args:
      t: split scores.
      alpha: scale, above 0; broadcasts against ``t``.
    """
    # A product beyond the largest finite number is clipped to it: sigmoid and derivative are already exact there,
    # whereas an infinity would turn into NaN where the chain rule multiplies it by a derivative of zero.
    largest = jnp.finfo(t.dtype).max
    return jax.nn.sigmoid(jnp.clip(t * jnp.asarray(alpha, t.dtype), -largest, largest))


def smooth_step(t: Float[Array, "*shape"], gamma: float | Float[Array, "..."]) -> Float[Array, "*shape"]:
    """Cubic smooth step of TEL (Hazimeh et al. 2020, eq. 4): exactly 0 and 1 beyond ``-gamma/2`` and ``gamma/2``.

    Between them ``-2 u**3 + 3/2 u + 1/2`` with ``u = t / gamma``; its first derivative is continuous.

    Args:
      t: split scores.
      gamma: width of the soft region, above 0; broadcasts against ``t``.
    """
    gamma = jnp.asarray(gamma, t.dtype)
    # Clipping the score, not the ratio, keeps |u| <= 1/2 however small gamma is; at the ends the cubic itself is 0
    # and 1 with derivative 0, so what clip passes on there does not matter.
    half = gamma / 2
    u = jnp.clip(t, -half, half) / gamma
    return jnp.clip(0.5 + u * (1.5 - 2.0 * u * u), 0.0, 1.0)


@jax.custom_jvp
def straight_through_sign(t: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """``+1`` where ``t > 0``, else ``-1``; its derivative is taken to be ``1[|t| <= 1]``.

    The straight-through rule of DGT (Karthikeyan et al. 2022, eq. 4): the derivative of the clipped identity stands in
    for that of the sign, which is zero almost everywhere.
    """
    return jnp.where(hard_step(t), 1.0, -1.0).astype(t.dtype)


@straight_through_sign.defjvp
def _straight_through_sign_jvp(primals, tangents):
    (t,), (dt,) = primals, tangents
    return straight_through_sign(t), jnp.where(jnp.abs(t) <= 1, dt, jnp.zeros_like(dt))
