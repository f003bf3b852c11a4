"""Optimisers that optax lacks: lazy ones, which move only what a batch touched, and DGT's RMSprop and its schedule."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int
import optax

from jtrees.training.loop import Number, at_step

_DECAY = 0.99  # of RMSprop's mean square, as DGT's authors have it


def rmsprop(learning_rate: Any, momentum: Any = None, clip: Any = None) -> optax.GradientTransformation:
    """RMSprop with the authors' decay, after clipping by the norm of the whole gradient; momentum as optax has it, on
    updates that the learning rate has been applied to.
    """
    update = optax.rmsprop(learning_rate, decay=_DECAY, eps=1e-8, eps_in_sqrt=False, momentum=momentum)
    return update if clip is None else optax.chain(optax.clip_by_global_norm(clip), update)


def cosine_cycles(steps: int, cycles: int) -> Callable[[Array | int], Array]:
    """The learning rate at a step as a part of its peak: a cosine from 1 to almost 0, exactly ``cycles`` times."""
    # No product of steps and cycles is taken where integers have 32 bits.
    first = jnp.asarray([-(-cycle * steps // cycles) for cycle in range(cycles + 1)], jnp.int32)

    def share(step: Array | int) -> Array:
        cycle = jnp.clip(jnp.searchsorted(first, step, side="right") - 1, 0, cycles - 1)
        phase = (step - first[cycle]).astype(jnp.float32) / (first[cycle + 1] - first[cycle]).astype(jnp.float32)
        return jnp.asarray(optax.cosine_decay_schedule(1.0, 1)(phase))

    return share


# --- Lazy Adam ---------------------------------------------------------------------------------------------------------


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
        moved, mean, square = adam_step(updates, state.mean, state.square, state.count, learning_rate)
        return moved, LazyAdamState(state.count + 1, mean, square, state.room)

    return optax.GradientTransformation(init, update)


def adam_step(gradient: Any, mean: Any, square: Any, count: Array, learning_rate: Any) -> tuple[Any, Any, Any]:
    """What is added to parameters, and their moments after it; of all of them, or of some rows."""
    now: Any = optax.ScaleByAdamState(count, mean, square)
    step, now = optax.scale_by_adam().update(gradient, now)
    rate = learning_rate(count) if callable(learning_rate) else learning_rate
    met = lambda new, old: jax.tree.map(lambda g, new, old: jnp.where(g != 0, new, old), gradient, new, old)
    moved = jax.tree.map(lambda g, a: jnp.where(g != 0, -jnp.asarray(rate, a.dtype) * a, 0), gradient, step)
    return moved, met(now.mu, mean), met(now.nu, square)


# --- Lazy momentum -----------------------------------------------------------------------------------------------------


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
        moved, velocity = momentum_step(updates, state.velocity, at_step(learning_rate, state.count), decay)
        return moved, LazyMomentumState(state.count + 1, velocity)

    return optax.GradientTransformation(init, update)


def momentum_step(gradient: Any, velocity: Any, rate: Any, decay: Any) -> tuple[Any, Any]:
    """What is added to parameters, and their velocity after it; of all of them, or of some rows."""

    def now(g: Array, v: Array) -> Array:
        return jnp.where(g != 0, jnp.asarray(decay, v.dtype) * v + g, v)

    def move(g: Array, v: Array) -> Array:
        return jnp.where(g != 0, -jnp.asarray(rate, v.dtype) * v, 0)

    velocity = jax.tree.map(now, gradient, velocity)
    return jax.tree.map(move, gradient, velocity), velocity
