"""Soft routings for kernels: the two factors of a node, and the slopes of their logarithms.

The weight of a leaf is the product of factors over its path. The factor is ``right(z)`` where the path turns right at a
node with score z, and ``left(z)`` where it turns left. Let G be the derivative of the loss with respect to relative
changes of leaf weights, summed over all leaves below one child. Then

    dloss/dz = G_right dlog right/dz + G_left dlog left/dz.

No division is needed, because G contains the factor whose slope it is multiplied by.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

_TINY = 1e-37  # a normal number of float32
_AGREES = 0.8807970779778823  # sigmoid(2): factor of a decision that agrees with a path, in DGT's softmax

Pair = tuple[jax.Array, jax.Array]  # for turning right, and for turning left


def indicator(mask: jax.Array) -> jax.Array:
    """Returns 1 where the mask is set, else 0, in float32."""
    return jnp.where(mask, jnp.float32(1), jnp.float32(0))


class Route(NamedTuple):
    """A soft routing.

    Attributes:
      factors: ``scores -> factors``, the two factors.
      slopes: ``(scores, factors) -> slopes``, the derivatives of the logarithms of the factors.
      normalised: whether the weights of the leaves sum to 1. If not, they are divided by their sum (at least 1).
      centred: whether the mean loss is subtracted from a leaf's loss.
      hard_leaves: whether the reached leaf receives the whole gradient of the leaves.
    """

    factors: Callable[[jax.Array], Pair]
    slopes: Callable[[jax.Array, Pair], Pair]
    normalised: bool = True
    centred: bool = False
    hard_leaves: bool = False


def _sigmoid(z: jax.Array) -> Pair:
    small = jnp.exp(-jnp.abs(z))
    near = 1 / (1 + small)
    far = small * near
    return jnp.where(z > 0, near, far), jnp.where(z > 0, far, near)


def cubic(a: jax.Array) -> jax.Array:
    """Returns TEL's smooth step (Hazimeh et al. 2020, eq. 4), ``a^2 (3 - 2 a)``, at position a.

    In a step of width gamma, a score z has the position ``a = 1/2 + z / gamma``, clipped to [0, 1]. The derivative is
    ``6 a (1 - a)``. The complement of the step is the step at ``1 - a``.
    """
    return a * a * (3 - 2 * a)


def _positions(z: jax.Array) -> Pair:
    """Returns the position of a score in the step of width 1, and the position in the step's mirror image."""
    t = jnp.clip(z, -0.5, 0.5)
    return 0.5 + t, 0.5 - t


def _smooth_step(z: jax.Array) -> Pair:
    a, b = _positions(z)
    return cubic(a), cubic(b)


def _smooth_step_slopes(z: jax.Array, _: Pair) -> Pair:
    a, b = _positions(z)
    slope = lambda a, b: jnp.where(a > 0, 6 * b / jnp.maximum(a * (3 - 2 * a), _TINY), 0.0)
    return slope(a, b), -slope(b, a)


# The softmin of violations is also a product over the path. The leaf of hard routing has no violation, and its product
# is 1. The sum of all products is therefore at least 1.
def _violation(z: jax.Array) -> Pair:
    return jnp.exp(jnp.minimum(z, 0)), jnp.exp(jnp.minimum(-z, 0))


# In DGT's path function, a decision has the factors sigmoid(2) and sigmoid(-2) for any score. The unit of scores is the
# half-width of the window. Scores pass gradients in a window of width 2 around 0 (Karthikeyan et al. 2022, eq. 4).
def _vote(z: jax.Array) -> Pair:
    right = jnp.where(z > 0, jnp.float32(_AGREES), jnp.float32(1 - _AGREES))
    return right, 1 - right


def _vote_slopes(z: jax.Array, _: Pair) -> Pair:
    inside = indicator(jnp.abs(z) <= 1)
    return inside, -inside


def _hard(z: jax.Array) -> Pair:
    right = indicator(z > 0)
    return right, 1 - right


ROUTES = {
    "sigmoid": Route(_sigmoid, lambda _, factors: (factors[1], -factors[0])),
    "smooth_step": Route(_smooth_step, _smooth_step_slopes),
    "violation": Route(_violation, lambda z, _: (indicator(z < 0), -indicator(z > 0)), normalised=False, centred=True),
}
VOTE = Route(_vote, _vote_slopes, centred=True, hard_leaves=True)
HARD = Route(_hard, lambda z, _: (jnp.zeros_like(z), jnp.zeros_like(z)))
