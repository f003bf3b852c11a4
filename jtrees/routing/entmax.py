"""Entmax with exponent 1.5: a sparse softmax, by which NODE and GRANDE choose features."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_STEPS = 6  # of Newton's method, when the threshold has the right size

# Let z = logits / 2. Entmax maximises <p, logits> plus the Tsallis entropy with exponent 1.5 over the simplex (Peters,
# Niculae & Martins 2019). The optimality conditions give p_i = max(z_i - t, 0)**2 with the t for which p sums to 1.
#
# The sum is convex and decreases in t, and at t = max z - 1 it is at least 1. So Newton's method from there increases t
# towards the root. While the sum is far above 1, a step halves the distance of t from the largest z. With k equal
# logits this distance is 1 / sqrt(k), after log2(k) / 2 steps. From there the error squares in each step. The paper
# sorts z instead, which took 9 to 30 times as long on a CPU, for 8 to 128 features.
#
# Derivative: with s_i = sqrt(p_i), dp_i = 2 s_i (dz_i - dt), and the dp sum to 0. So dt is the mean of dz weighted by
# s, and dp = s * (dlogits - mean_s(dlogits)). Entries of probability 0 have s = 0. The rule is linear and symmetric.


@jax.custom_jvp
def entmax(logits: Float[Array, "*shape k"]) -> Float[Array, "*shape k"]:
    """Returns probabilities over the last axis; logits far below the largest have probability exactly 0.

    The exponent is 1.5, between the softmax (1) and the projection on the simplex (2). The values are exact up to
    rounding (Peters, Niculae & Martins, *Sparse Sequence-to-Sequence Models*, 2019).

    Example:
      >>> print(jtrees.routing.entmax(jnp.array([2.0, 0.0, 0.0])))
      [1. 0. 0.]
    """
    z = (logits - logits.max(-1, keepdims=True)) / 2
    t = jnp.full_like(z[..., :1], -1)
    for _ in range(_STEPS + z.shape[-1].bit_length() // 2):
        above = jnp.maximum(z - t, 0)
        t += (jnp.square(above).sum(-1, keepdims=True) - 1) / (2 * above.sum(-1, keepdims=True))
    return jnp.square(jnp.maximum(z - t, 0))


@entmax.defjvp
def _entmax_jvp(primals, tangents):
    (logits,), (change,) = primals, tangents
    p = entmax(logits)
    s = jnp.where(p > 0, jnp.sqrt(jnp.where(p > 0, p, 1)), 0)  # the slope of the root at 0 is infinite
    return p, s * (change - (s * change).sum(-1, keepdims=True) / s.sum(-1, keepdims=True))


def entmax_step(t: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns the first of the two probabilities ``entmax([t, 0])``: exactly 0 up to -2, and exactly 1 from 2 on.

    This is the step of NODE (Popov, Morozov & Babenko 2020, eq. 3).

    Args:
      t: split scores.

    Example:
      >>> print(np.asarray(jtrees.routing.entmax_step(jnp.array([-2.0, 0.0, 1.0]))).round(3))
      [0.    0.5   0.831]
    """
    # p = max(t/2 - u, 0)**2 and 1 - p = max(-u, 0)**2 give u = (t/2 - sqrt(2 - (t/2)**2)) / 2.
    half = jnp.clip(t / 2, -1, 1)
    return jnp.square((half + jnp.sqrt(2 - jnp.square(half))) / 2)
