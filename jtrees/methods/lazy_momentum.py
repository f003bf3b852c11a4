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
        rate = at_step(learning_rate, state.count)
        velocity = jax.tree.map(lambda g, v: _velocity(g, v, decay), updates, state.velocity)
        moved = jax.tree.map(lambda g, v: _move(g, v, rate), updates, velocity)
        return moved, LazyMomentumState(state.count + 1, velocity)

    return optax.GradientTransformation(init, update)


def _velocity(gradient: Array, velocity: Array, decay: Any) -> Array:
    return jnp.where(gradient != 0, jnp.asarray(decay, velocity.dtype) * velocity + gradient, velocity)


def _move(gradient: Array, velocity: Array, rate: Any) -> Array:
    return jnp.where(gradient != 0, -jnp.asarray(rate, velocity.dtype) * velocity, 0)


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
    into = lambda tree, new: jax.tree.map(lambda a, b: a.at[rows].set(b, mode="drop", unique_indices=False), tree, new)
    now = jax.tree.map(lambda g, v: _velocity(g, v, decay), gradient, of_rows(velocity))
    moved = jax.tree.map(lambda w, g, v: w + _move(g, v, rate), of_rows(params), gradient, now)
    return into(params, project(moved)), into(velocity, now)
