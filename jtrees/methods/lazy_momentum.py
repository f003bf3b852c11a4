"""Momentum that moves only what a batch touched: for trees of whose splits a sample touches a few."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import optax

from jtrees.training import Number, at_step


class LazyMomentumState(NamedTuple):
    """Steps so far, and the velocity, in the shapes of the parameters."""

    count: Int[Array, ""]
    velocity: Any


def lazy_momentum(learning_rate: Number, decay: float | Array = 0.9) -> optax.GradientTransformation:
    """Gradient descent with momentum in which a number whose gradient is exactly zero rests, and its velocity too.

    So a step is work in proportion to what it touched; with plain momentum every number moves in every step.

    Args:
      learning_rate: a number, a traced one, or an optax schedule of the step.
      decay: what is left of the velocity in a step that touches it, 0 to less than 1.
    """

    def init(params: Any) -> LazyMomentumState:
        return LazyMomentumState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        moved, velocity = moves(updates, state.velocity, at_step(learning_rate, state.count), decay)
        return moved, LazyMomentumState(state.count + 1, velocity)

    return optax.GradientTransformation(init, update)


def moves(gradient: Any, velocity: Any, rate: Any, decay: Any) -> tuple[Any, Any]:
    """What is added to parameters, and their velocity after it; of all of them, or of some rows."""

    def now(g: Array, v: Array) -> Array:
        return jnp.where(g != 0, jnp.asarray(decay, v.dtype) * v + g, v)

    def move(g: Array, v: Array) -> Array:
        return jnp.where(g != 0, -jnp.asarray(rate, v.dtype) * v, 0)

    velocity = jax.tree.map(now, gradient, velocity)
    return jax.tree.map(move, gradient, velocity), velocity


# --- The same in the rows that were touched --------------------------------------------------------------------------


def touched(
    rows: Int[Array, "r n"], slopes: Float[Array, "r n"], count: int
) -> tuple[Int[Array, " u"], Float[Array, "u n"]]:
    """The different rows that samples touch, and by how much each sample does.

    Args:
      rows: of an array of ``count`` rows, r for each sample.
      slopes: by how much it touches them; where this is 0, it does not.
      count: number of rows.

    Returns:
      Each row once, filled up with ``count``; and the sums of slopes, so that their product with what the samples hold
      is the gradient in these rows.
    """
    rows = jnp.where(slopes != 0, rows, count).ravel()
    once, at = jnp.unique(rows, size=min(rows.size, count + 1), fill_value=count, return_inverse=True)
    sample = jnp.broadcast_to(jnp.arange(slopes.shape[1]), slopes.shape).ravel()
    shares = jnp.zeros((len(once), slopes.shape[1]), slopes.dtype)
    return once, shares.at[at.ravel(), sample].add(slopes.ravel())


def move_rows(
    params: Any,
    velocity: Any,
    rows: Int[Array, " u"],
    gradient: Any,
    rate: Any,
    decay: Any,
    project: Callable[[Any], Any] = lambda rows: rows,
) -> tuple[Any, Any]:
    """Arrays, and their velocity, after a step of :func:`lazy_momentum` that touched the given rows alone.

    Args:
      params: a pytree of arrays ``(count, ...)``.
      velocity: the same of velocities.
      rows: numbers of rows, each once; those that are no row are left out.
      gradient: the same of gradients in these rows, ``(u, ...)``.
      rate: learning rate.
      decay: of the velocity.
      project: of the rows, after they have moved.
    """
    of_rows = lambda tree: jax.tree.map(lambda a: a.at[rows].get(mode="fill", fill_value=0), tree)
    into = lambda tree, new: jax.tree.map(lambda a, b: a.at[rows].set(b, mode="drop"), tree, new)
    moved, now = moves(gradient, of_rows(velocity), rate, decay)
    return into(params, project(jax.tree.map(jnp.add, of_rows(params), moved))), into(velocity, now)
