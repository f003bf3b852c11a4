"""A step of lazy Adam on the rows of an ensemble that a batch touches."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrees.methods.tree_ensemble.ensemble import Ensemble
from jtrees.routing import by_level, conditional, frontier as paths
from jtrees.routing.by_level import Operands
from jtrees.training import LazyAdamState, lazy_adam
from jtrees.training.optimizers import adam_step
from jtrees.training.step import apply_in_place_if


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
    """Takes a lazy Adam step, at a cost that does not depend on the size of the ensemble.

    Returns the parameters, the state of ``lazy_adam(learning_rate)``, and the previous loss, a function of the outputs.
    """
    # `gamma` is the width of the uncertain region of a score. `width` is the capacity of the frontier of paths; None:
    # all splits are scored. `l2` is the strength of the penalty on split weights that have a gradient.
    leaf_shape = params.leaf_values.shape
    params, state = _with_leaves(params, state, (*leaf_shape[:2], -1))  # leaves of shape (trees, leaves, k)
    operands_of = lambda params: conditional.checked(x, params.weights, params.bias, params.leaf_values, gamma)
    column_loss = lambda outputs: loss(outputs.reshape(len(x), *leaf_shape[2:]))

    def update_all(carry: Any) -> Any:
        params, state = carry
        gradients = by_level.gradient(operands_of(params), cotangent)
        d_weights = _with_penalty(gradients.weights, params.weights, l2)
        gradient: Any = Ensemble(d_weights, gradients.bias, gradients.leaf_values)
        moved, state = lazy_adam(learning_rate).update(gradient, state)
        return jax.tree.map(jnp.add, params, moved), state

    def update_rows(carry: Any) -> Any:
        params, state = carry
        room = Operands(None, state.room.weights, state.room.bias, state.room.leaf_values, None)
        gradients = paths.add_gradient(frontier, operands_of(params), cotangent, room)
        gradient = Ensemble(gradients.weights, gradients.bias, gradients.leaf_values)
        return _move_rows(frontier, params, state._replace(room=gradient), l2, learning_rate, len(x))

    operands = operands_of(params)
    if width is None:
        value, cotangent = jax.value_and_grad(column_loss)(by_level.outputs(operands))
        params, state = update_all((params, state))
        return *_with_leaves(params, state, leaf_shape), value
    frontier, fits = paths.explore(operands, width, paths.smooth_step(operands.gamma))
    path_outputs = lambda: paths.outputs(frontier, operands)
    outputs = jax.lax.cond(fits, path_outputs, lambda: by_level.outputs(operands))
    value, cotangent = jax.value_and_grad(column_loss)(outputs)
    # A loop updates its carry in place only if no other operation reads the carry. So both branches read only the
    # carry.
    params, state = apply_in_place_if(~fits, update_all, apply_in_place_if(fits, update_rows, (params, state)))
    return *_with_leaves(params, state, leaf_shape), value


def _with_leaves(params: Any, state: LazyAdamState, shape: tuple[int, ...]) -> tuple[Any, LazyAdamState]:
    """Returns parameters and state with leaves of the given shape."""
    fold = lambda params: params.replace(leaf_values=params.leaf_values.reshape(shape))
    return fold(params), LazyAdamState(state.count, fold(state.mean), fold(state.square), fold(state.room))


def _with_penalty(gradient: Array, weights: Array, l2: Any) -> Array:
    return jnp.where(gradient != 0, gradient + 2 * l2 * weights, 0)


def _move_rows(
    frontier: paths.Frontier, params: Ensemble, state: LazyAdamState, l2: Any, rate: Any, n: int
) -> tuple[Ensemble, LazyAdamState]:
    """Returns parameters and state after an update of the rows touched by n samples; the gradient is in ``room``."""
    ensembles = params, state.room, state.mean, state.square
    splits = tuple((a.weights.reshape(-1, a.weights.shape[-1]), a.bias.reshape(-1)) for a in ensembles)
    leaves = tuple((a.leaf_values.reshape(-1, a.leaf_values.shape[-1]),) for a in ensembles)

    def move(rows: Array, arrays: Any) -> Any:
        current, gradient, mean, square = jax.tree.map(lambda a: a.at[rows].get(mode="fill", fill_value=0), arrays)
        if len(current) == 2:
            gradient = _with_penalty(gradient[0], current[0], l2), gradient[1]
        moved, mean, square = adam_step(gradient, mean, square, state.count, rate)
        # A repeated row has no further gradient. So it is updated only once. The zeros are computed from the gradient
        # to save a copy of it: they can only be written after the gradient is read.
        zeros = jax.tree.map(lambda g: g - g, gradient)
        new = jax.tree.map(jnp.add, current, moved), zeros, mean, square
        return jax.tree.map(lambda a, rows_now: a.at[rows].set(rows_now, mode="drop"), arrays, new)

    roots = len(params.weights) * n
    splits = paths.over_splits(frontier, roots, move, splits)
    leaves = paths.over_leaves(frontier, roots, params.leaf_values.shape[1], move, leaves)
    params, room, mean, square = (
        Ensemble(weights.reshape(a.weights.shape), bias.reshape(a.bias.shape), values.reshape(a.leaf_values.shape))
        for a, (weights, bias), (values,) in zip(ensembles, splits, leaves, strict=True)
    )
    return params, LazyAdamState(state.count + 1, mean, square, room)
