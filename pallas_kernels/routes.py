"""Soft routings for kernels: the logarithms of a node's two factors, and their slopes.

The weight of a leaf is the product of factors over its path: ``right(z)`` where it goes right at a node of score z,
``left(z)`` where it goes left. With the path matrices R and L of layout.py,

    log weight = R log right(z) + L log left(z),

two products and one exponential per leaf. If a loss changes by G_l for a relative change of the weight of leaf l, then

    dloss/dz = (R^T G) dlog right/dz + (L^T G) dlog left/dz,

without division: every G_l that the slope of a zero factor is multiplied with contains that factor.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

NOTHING = -1e4  # stands for log 0: its exponential is 0, and 0 times it is 0
_TINY = 1e-37  # a normal number of float32
_VOTE = 2.0  # DGT's softmax gives a decision sigmoid(+-2)

Pair = tuple[jax.Array, jax.Array]  # for turning right, and for turning left


def ones(mask: jax.Array) -> jax.Array:
    """Returns 1 where the mask is set, else 0, in float32."""
    return jnp.where(mask, jnp.float32(1), jnp.float32(0))


class Route(NamedTuple):
    """A soft routing.

    Attributes:
      logs: scores -> logarithms of the two factors.
      slopes: scores -> their derivatives.
      normalised: whether the weights of the leaves sum to 1; else they are divided by their sum.
      centred: whether changes of a leaf's weight are relative to the others, so that G_l is the weight times the
        difference of the leaf's loss from the mean.
      hard_leaves: whether the leaf reached receives the whole gradient of the leaves.
      skips: whether factors are exactly 0 often enough to check for subtrees that no sample reaches.
    """

    logs: Callable[[jax.Array], Pair]
    slopes: Callable[[jax.Array], Pair]
    normalised: bool = True
    centred: bool = False
    hard_leaves: bool = False
    skips: bool = False


def _sigmoid_logs(z: jax.Array) -> Pair:
    beyond = jnp.log(1 + jnp.exp(-jnp.abs(z)))
    log = lambda z: jnp.maximum(jnp.minimum(z, 0) - beyond, NOTHING)
    return log(z), log(-z)


def _sigmoid_slopes(z: jax.Array) -> Pair:
    small = jnp.exp(-jnp.abs(z))
    near, far = 1 / (1 + small), small / (1 + small)  # the larger of the two probabilities, and the smaller
    return jnp.where(z > 0, far, near), -jnp.where(z > 0, near, far)


def cubic(a: jax.Array) -> jax.Array:
    """Returns TEL's smooth step (Hazimeh et al. 2020, eq. 4), ``a^2 (3 - 2 a)``, of a position in it.

    A score z is at ``a = 1/2 + z / gamma`` in a step of width gamma, held between 0 and 1. The derivative is
    ``6 a (1 - a)``; the complement of the step is the step at ``1 - a``.
    """
    return a * a * (3 - 2 * a)


def _positions(z: jax.Array) -> Pair:
    """Returns the position of a score in the step of width 1, and in its mirror image."""
    t = jnp.clip(z, -0.5, 0.5)
    return 0.5 + t, 0.5 - t


def _smooth_step_logs(z: jax.Array) -> Pair:
    a, b = _positions(z)
    log = lambda a: jnp.where(a > 0, jnp.log(jnp.maximum(cubic(a), _TINY)), NOTHING)
    return log(a), log(b)


def _smooth_step_slopes(z: jax.Array) -> Pair:
    a, b = _positions(z)
    slope = lambda a, b: jnp.where(a > 0, 6 * b / jnp.maximum(a * (3 - 2 * a), _TINY), 0.0)
    return slope(a, b), -slope(b, a)


def _violation_logs(z: jax.Array) -> Pair:
    return jnp.minimum(z, 0), jnp.minimum(-z, 0)


def _violation_slopes(z: jax.Array) -> Pair:
    return ones(z < 0), -ones(z > 0)


# DGT's path function: each decision has the weight sigmoid(2) against sigmoid(-2), for any score; scores, in units of
# the half-width of the window, pass gradients in a window of width 2 about 0 (Karthikeyan et al. 2022, eq. 4).
def _vote_logs(z: jax.Array) -> Pair:
    return _sigmoid_logs(jnp.where(z > 0, jnp.float32(_VOTE), jnp.float32(-_VOTE)))


def _vote_slopes(z: jax.Array) -> Pair:
    inside = ones(jnp.abs(z) <= 1)
    return inside, -inside


ROUTES = {
    "sigmoid": Route(_sigmoid_logs, _sigmoid_slopes),
    "smooth_step": Route(_smooth_step_logs, _smooth_step_slopes, skips=True),
    "violation": Route(_violation_logs, _violation_slopes, normalised=False, centred=True),
}
VOTE = Route(_vote_logs, _vote_slopes, centred=True, hard_leaves=True)
