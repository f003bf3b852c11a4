"""Optimisers that optax does not have: lazy optimisers, and the RMSprop and the schedule of DGT.

A lazy optimiser only updates parameters that have a nonzero gradient in the batch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import optax

from jtrees.training.state import Number, at_step, for_optax

_DECAY = 0.99  # decay of RMSprop's mean square in DGT's code
_LEAST_GAIN = 1e-4  # least fraction by which a mean loss is lower than the lowest, as in optax


def rmsprop(learning_rate: Any, momentum: Any = None, clip: Any = None) -> optax.GradientTransformation:
    """Returns RMSprop with the decay of DGT's authors, after clipping by the global norm.

    As in optax, momentum is applied after the learning rate.
    """
    update = optax.rmsprop(learning_rate, decay=_DECAY, eps=1e-8, eps_in_sqrt=False, momentum=momentum)
    return update if clip is None else optax.chain(optax.clip_by_global_norm(clip), update)


def cosine_cycles(steps: int, cycles: int) -> Callable[[Array | int], Array]:
    """Returns the schedule of the learning rate relative to its peak: ``cycles`` cosine decays from 1 to nearly 0."""
    # The first steps are computed on the host, because the product of steps and cycles may exceed 32 bits.
    first = jnp.asarray([-(-cycle * steps // cycles) for cycle in range(cycles + 1)], jnp.int32)

    def fraction(step: Array | int) -> Array:
        cycle = jnp.clip(jnp.searchsorted(first, step, side="right") - 1, 0, cycles - 1)
        phase = (step - first[cycle]).astype(jnp.float32) / (first[cycle + 1] - first[cycle]).astype(jnp.float32)
        return jnp.asarray(optax.cosine_decay_schedule(1.0, 1)(phase))

    return fraction


class PlateauState(NamedTuple):
    """State of :func:`reduce_until_vanished`.

    Attributes:
      lowest: lowest mean loss.
      waited: number of means since the last lower mean.
      scale: factor of the learning rate.
      count: number of losses in the current mean.
      mean: mean of these losses.
      vanished: whether the learning rate has vanished.
    """

    lowest: Float[Array, ""]
    waited: Int[Array, ""]
    scale: Float[Array, ""]
    count: Int[Array, ""]
    mean: Float[Array, ""]
    vanished: Bool[Array, ""]


def reduce_until_vanished(
    *, factor: float, patience: int | Array, accumulation_size: int, least: float
) -> optax.GradientTransformationExtraArgs:
    """Returns a reduction of the learning rate on a plateau, to exactly 0 when its factor falls below ``least``.

    It is ``optax.contrib.reduce_on_plateau``, except for losses below 0, such as minus a reward. There optax would take
    a higher loss for an improvement.

    Args:
      factor: factor of the learning rate on a plateau.
      patience: number of means without a lower mean that make a plateau. A mean is lower if it is below the lowest by
        1e-4 of its absolute value.
      accumulation_size: number of losses in a mean.
      least: least factor. The run can end below it, because all further updates are 0.
    """

    def init(params: Any) -> PlateauState:
        zero, dtype = jnp.zeros((), jnp.int32), optax.tree.dtype(params, "highest")
        scale = jnp.ones((), optax.tree.dtype(params, "lowest"))
        lowest, mean = jnp.asarray(jnp.inf, dtype), jnp.zeros((), dtype)
        return PlateauState(lowest, zero, scale, zero, mean, jnp.zeros((), bool))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        value, count = extra["value"], state.count + 1
        mean = ((state.count * state.mean + jnp.astype(value, state.mean.dtype)) / count).astype(state.mean.dtype)
        margin = jnp.where(jnp.isfinite(state.lowest), _LEAST_GAIN * jnp.abs(state.lowest), 0)
        gains, ends = mean < state.lowest - margin, count == accumulation_size
        waited = jnp.where(gains, 0, state.waited + 1)
        reduces = ends & (waited == patience)
        scale = jnp.where(reduces, state.scale * factor, state.scale)
        vanished = scale < least
        state = PlateauState(
            lowest=jnp.where(ends & gains, mean, state.lowest),
            waited=jnp.where(ends, jnp.where(reduces, 0, waited), state.waited),
            scale=scale,
            count=jnp.where(ends, 0, count),
            mean=jnp.where(ends, 0, mean),
            vanished=vanished,
        )
        return jax.tree.map(lambda a: jnp.where(vanished, 0, scale * a), updates), state

    return optax.GradientTransformationExtraArgs(init, update)


class LazyAdamState(NamedTuple):
    """State of :func:`lazy_adam`; the arrays have the shapes of the parameters.

    Attributes:
      count: number of steps.
      mean: mean of the gradient.
      square: mean of the squared gradient.
      room: buffer for the gradient of a batch, zero between steps. It avoids an allocation in each step.
    """

    count: Int[Array, ""]
    mean: Any
    square: Any
    room: Any


def lazy_adam(learning_rate: Number) -> optax.GradientTransformation:
    """Returns Adam that does not update a parameter and its moments if the gradient is exactly zero.

    Dense Adam updates every parameter in every step by its moments. If only a thousandth of the samples reach a row of
    weights, the row then changes for many updates after a sample. Lazy moments are means over the steps with a nonzero
    gradient. The bias correction uses the count of all steps, as in TensorFlow's LazyAdam.

    Args:
      learning_rate: a number, which may be traced, or an optax schedule of the step.
    """

    def init(params: Any) -> LazyAdamState:
        zeros = lambda: jax.tree.map(jnp.zeros_like, params)
        return LazyAdamState(jnp.zeros((), jnp.int32), zeros(), zeros(), zeros())

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        moved, mean, square = adam_step(updates, state.mean, state.square, state.count, learning_rate)
        return moved, LazyAdamState(state.count + 1, mean, square, state.room)

    return optax.GradientTransformation(init, update)


def adam_step(gradient: Any, mean: Any, square: Any, count: Array, learning_rate: Any) -> tuple[Any, Any, Any]:
    """Returns the updates and the new moments, of all parameters or of some rows."""
    adam: Any = optax.ScaleByAdamState(count, mean, square)
    with for_optax():
        step, adam = optax.scale_by_adam().update(gradient, adam)
    select = lambda new, old: jax.tree.map(lambda g, new, old: jnp.where(g != 0, new, old), gradient, new, old)
    return _moves(gradient, step, at_step(learning_rate, count)), select(adam.mu, mean), select(adam.nu, square)


def _moves(gradient: Any, directions: Any, rate: Any) -> Any:
    """Returns the updates against the directions, 0 where the gradient is 0."""
    return jax.tree.map(lambda g, a: jnp.where(g != 0, -jnp.asarray(rate, a.dtype) * a, 0), gradient, directions)


class LazyMomentumState(NamedTuple):
    """Number of steps, and the velocity in the shapes of the parameters."""

    count: Int[Array, ""]
    velocity: Any


def lazy_momentum(learning_rate: Number, decay: float | Array = 0.9) -> optax.GradientTransformation:
    """Returns momentum SGD that does not update a parameter and its velocity if the gradient is exactly zero.

    The cost of a step is then proportional to the number of nonzero gradients. Plain momentum updates every parameter
    in every step.

    Args:
      learning_rate: a number, which may be traced, or an optax schedule of the step.
      decay: decay of the velocity in a step with a nonzero gradient, in [0, 1).
    """

    def init(params: Any) -> LazyMomentumState:
        return LazyMomentumState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        accumulate = lambda g, v: jnp.where(g != 0, jnp.asarray(decay, v.dtype) * v + g, v)
        velocity = jax.tree.map(accumulate, updates, state.velocity)
        moved = _moves(updates, velocity, at_step(learning_rate, state.count))
        return moved, LazyMomentumState(state.count + 1, velocity)

    return optax.GradientTransformation(init, update)
