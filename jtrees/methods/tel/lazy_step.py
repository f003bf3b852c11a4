"""A step of lazy Adam in the rows of an ensemble that a batch meets."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrees.methods.tel.ensemble import Ensemble
from jtrees.routing import by_level, conditional, frontier as paths
from jtrees.routing.by_level import Asked
from jtrees.training import LazyAdamState, adam_step, apply_in_place_if, lazy_adam


def lazy_step(
    params: Ensemble,
    state: LazyAdamState,
    x: Float[Array, "n p"],
    loss: Any,
    *,
    gamma: Any,
    width: int | None,
    l2: Any,
    learning_rate: Any,
) -> tuple[Ensemble, LazyAdamState, Array]:
    """Parameters and state after a step of lazy Adam, and the loss before it: work that does not grow with the trees.

    Args:
      params: the ensemble.
      state: of ``lazy_adam(learning_rate)``.
      x: samples.
      loss: of outputs, ``(n,)`` or ``(n, k)`` as the leaves have it, a scalar.
      gamma: width of the uncertain region of a split's score.
      width: room for paths, None: all splits are scored.
      l2: strength of the penalty on split weights that have a gradient.
      learning_rate: a number, a traced one, or a schedule.
    """
    own = params.leaf_values.shape
    params, room, mean, square = (_with_columns(a) for a in (params, state.room, state.mean, state.square))
    state = LazyAdamState(state.count, mean, square, room)
    of = lambda params: conditional.checked(x, params.weights, params.bias, params.leaf_values, gamma)
    of_columns = lambda outputs: loss(outputs.reshape(len(x), *own[2:]))

    def whole(now: Any) -> Any:
        params, state = now
        found = by_level.gradient(of(params), cotangent)
        d_weights = _with_penalty(found.weights, params.weights, l2)
        gradient: Any = Ensemble(d_weights, found.bias, found.leaf_values)
        moved, state = lazy_adam(learning_rate).update(gradient, state)
        return jax.tree.map(jnp.add, params, moved), state

    def in_rows(now: Any) -> Any:
        params, state = now
        room = Asked(None, state.room.weights, state.room.bias, state.room.leaf_values, None)
        found = paths.add_gradient(frontier, of(params), cotangent, room)
        gradient = Ensemble(found.weights, found.bias, found.leaf_values)
        return _move_rows(frontier, params, state._replace(room=gradient), l2, learning_rate, len(x))

    asked = of(params)
    if width is None:
        value, cotangent = jax.value_and_grad(of_columns)(by_level.outputs(asked))
        params, state = whole((params, state))
        return *_with_leaves(params, state, own), value
    frontier, fits = paths.explore(asked, width)
    of_paths = lambda: paths.outputs(frontier, asked)
    outputs = jax.lax.cond(fits, of_paths, lambda: by_level.outputs(asked))
    value, cotangent = jax.value_and_grad(of_columns)(outputs)
    # What a loop changes in place is not to be looked at from outside: both take all from what they carry.
    params, state = apply_in_place_if(~fits, whole, apply_in_place_if(fits, in_rows, (params, state)))
    return *_with_leaves(params, state, own), value


def _with_columns(params: Any) -> Any:
    """The same with leaves ``(trees, leaves, k)``."""
    return params.replace(leaf_values=params.leaf_values.reshape(*params.leaf_values.shape[:2], -1))


def _with_leaves(params: Any, state: LazyAdamState, shape: tuple[int, ...]) -> tuple[Any, LazyAdamState]:
    """Both with leaves of this shape."""
    of = lambda params: params.replace(leaf_values=params.leaf_values.reshape(shape))
    return of(params), LazyAdamState(state.count, of(state.mean), of(state.square), of(state.room))


def _with_penalty(gradient: Array, weights: Array, l2: Any) -> Array:
    return jnp.where(gradient != 0, gradient + 2 * l2 * weights, 0)


def _move_rows(
    frontier: paths.Frontier, params: Ensemble, state: LazyAdamState, l2: Any, rate: Any, n: int
) -> tuple[Ensemble, LazyAdamState]:
    """Parameters moved in the rows that a batch of n samples met, by the gradient in the state's room."""
    of = params, state.room, state.mean, state.square
    splits = tuple((a.weights.reshape(-1, a.weights.shape[-1]), a.bias.reshape(-1)) for a in of)
    leaves = tuple((a.leaf_values.reshape(-1, a.leaf_values.shape[-1]),) for a in of)

    def move(rows: Array, arrays: Any) -> Any:
        now, gradient, mean, square = jax.tree.map(lambda a: a.at[rows].get(mode="fill", fill_value=0), arrays)
        if len(now) == 2:
            gradient = _with_penalty(gradient[0], now[0], l2), gradient[1]
        moved, mean, square = adam_step(gradient, mean, square, state.count, rate)
        # A row that comes again finds no gradient, and rests. Zeros that are made of what was read save a copy of the
        # room: they cannot be written before.
        zeros = jax.tree.map(lambda g: g - g, gradient)
        new = jax.tree.map(jnp.add, now, moved), zeros, mean, square
        return jax.tree.map(lambda a, rows_now: a.at[rows].set(rows_now, mode="drop"), arrays, new)

    roots = len(params.weights) * n
    splits = paths.over_splits(frontier, roots, move, splits)
    leaves = paths.over_leaves(frontier, roots, params.leaf_values.shape[1], move, leaves)
    params, room, mean, square = (
        Ensemble(weights.reshape(a.weights.shape), bias.reshape(a.bias.shape), values.reshape(a.leaf_values.shape))
        for a, (weights, bias), (values,) in zip(of, splits, leaves, strict=True)
    )
    return params, LazyAdamState(state.count + 1, mean, square, room)
