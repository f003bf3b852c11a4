"""Steps of lazy momentum on the rows that a batch touches, for trees in which a sample touches few splits."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrees.training.optimizers import momentum_step


def touched(
    rows: Int[Array, "r n"], slopes: Float[Array, "r n"], count: int
) -> tuple[Int[Array, " u"], Float[Array, "u n"]]:
    """Returns the distinct rows that samples touch, and the coefficient of each sample in each row.

    Args:
      rows: row indices, r for each sample.
      slopes: coefficients of the samples in their rows. A coefficient of 0 touches no row.
      count: number of rows of the array.

    Returns:
      The distinct rows, padded with ``count``, and the summed coefficients. The product of the coefficients with the
      features of the samples is the gradient of the rows.
    """
    rows = jnp.where(slopes != 0, rows, count).ravel()
    distinct, position = jnp.unique(rows, size=min(rows.size, count + 1), fill_value=count, return_inverse=True)
    sample = jnp.broadcast_to(jnp.arange(slopes.shape[1]), slopes.shape).ravel()
    shares = jnp.zeros((len(distinct), slopes.shape[1]), slopes.dtype)
    return distinct, shares.at[position.ravel(), sample].add(slopes.ravel())


def move_rows(
    params: Any,
    velocity: Any,
    rows: Int[Array, " u"],
    gradient: Any,
    rate: Any,
    decay: Any,
    project: Callable[[Any], Any] = lambda rows: rows,
) -> tuple[Any, Any]:
    """Returns arrays and velocities after a step of :func:`jtrees.training.lazy_momentum` on the given rows alone.

    Args:
      params: a pytree of arrays ``(count, ...)``.
      velocity: the velocities of the arrays, a pytree of the same structure.
      rows: distinct row indices; indices out of range are ignored.
      gradient: gradients of the given rows, ``(u, ...)``, a pytree of the same structure.
      rate: learning rate.
      decay: decay of the velocity.
      project: projection of the updated rows.
    """
    gather = lambda tree: jax.tree.map(lambda a: a.at[rows].get(mode="fill", fill_value=0), tree)
    scatter = lambda tree, new: jax.tree.map(lambda a, b: a.at[rows].set(b, mode="drop"), tree, new)
    updates, new_velocity = momentum_step(gradient, gather(velocity), rate, decay)
    return scatter(params, project(jax.tree.map(jnp.add, gather(params), updates))), scatter(velocity, new_velocity)
