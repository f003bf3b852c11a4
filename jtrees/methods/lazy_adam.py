"""Adam that moves only what a batch touched: for ensembles whose gradient is mostly exactly zero."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int
import optax

Moments = tuple[Any, Any]  # of a parameter: means of its gradient and of its square


class LazyAdamState(NamedTuple):
    """Moments of the gradient, in the shapes of the parameters, and room for a gradient, zero between steps.

    Attributes:
      count: steps so far.
      mean: of the gradient.
      square: of its square.
      room: zeros, to add the gradient of a batch up in, so that no array of its size is made anew in each step.
    """

    count: Int[Array, ""]
    mean: Any
    square: Any
    room: Any


def lazy_adam(learning_rate: Any) -> optax.GradientTransformation:
    """Adam in which a number whose gradient is exactly zero rests: neither it nor its moments move.

    Dense Adam moves every number in every step by what it remembers, so that a row of weights that one sample in a
    thousand meets goes on drifting long after. Here it moves only when it is met. Its moments are means over the steps
    that met it, corrected for their start by the count of all steps, as in TensorFlow's LazyAdam.

    Args:
      learning_rate: a number, a traced one, or an optax schedule of the step.
    """

    def init(params: Any) -> LazyAdamState:
        zeros = lambda: jax.tree.map(jnp.zeros_like, params)
        return LazyAdamState(jnp.zeros((), jnp.int32), zeros(), zeros(), zeros())

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        moved, mean, square = moves(updates, state.mean, state.square, state.count, learning_rate)
        return moved, LazyAdamState(state.count + 1, mean, square, state.room)

    return optax.GradientTransformation(init, update)


def moves(gradient: Any, mean: Any, square: Any, count: Array, learning_rate: Any) -> tuple[Any, Any, Any]:
    """What is added to parameters, and their moments after it; of all of them, or of some rows."""
    now: Any = optax.ScaleByAdamState(count, mean, square)
    step, now = optax.scale_by_adam().update(gradient, now)
    rate = learning_rate(count) if callable(learning_rate) else learning_rate
    met = lambda new, old: jax.tree.map(lambda g, new, old: jnp.where(g != 0, new, old), gradient, new, old)
    moved = jax.tree.map(lambda g, a: jnp.where(g != 0, -jnp.asarray(rate, a.dtype) * a, 0), gradient, step)
    return moved, met(now.mu, mean), met(now.nu, square)
