"""Steps of lazy momentum in the rows that a batch touches: for trees of whose splits a sample touches a few."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrees.training import momentum_step


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
    """Arrays, and their velocity, after a step of :func:`jtrees.training.lazy_momentum` that touched the given rows alone.

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
    moved, now = momentum_step(gradient, of_rows(velocity), rate, decay)
    return into(params, project(jax.tree.map(jnp.add, of_rows(params), moved))), into(velocity, now)
