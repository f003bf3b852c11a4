"""Optimisers that optax does not have: lazy optimisers, and the RMSprop and the schedule of DGT.

A lazy optimiser only updates parameters that have a nonzero gradient in the batch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int
import optax

from jtrees.training.state import Number, at_step, for_optax

_DECAY = 0.99  # decay of RMSprop's mean square in DGT's code


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
    """State of :func:`reduce_until_vanished`."""

    plateau: Any  # state of `optax.contrib.reduce_on_plateau`
    vanished: Bool[Array, ""]  # whether the learning rate has vanished


def reduce_until_vanished(
    *, factor: float, patience: int | Array, accumulation_size: int, least: float
) -> optax.GradientTransformationExtraArgs:
    """Returns ``optax.contrib.reduce_on_plateau`` whose scale becomes exactly 0 when it falls below ``least``.

    The run can end at that step, because all further updates are 0.
    """
    reduce: Any = optax.contrib.reduce_on_plateau(factor, patience, accumulation_size=accumulation_size)

    def init(params: Any) -> PlateauState:
        return PlateauState(reduce.init(params), jnp.zeros((), bool))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        updates, plateau = reduce.update(updates, state.plateau, params, **extra)
        vanished = plateau.scale < least
        updates = jax.tree.map(lambda a: jnp.where(vanished, 0, a), updates)
        return updates, PlateauState(plateau, vanished)

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
