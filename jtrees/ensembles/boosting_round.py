"""Rounds of boosting as compiled functions: the targets of a tree, its leaves, and the outputs that it is added to."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jtrees import blocking, compilation, leaves as kinds, losses, ops, segments, sharding, topology
from jtrees.monotone import signs_of
from jtrees.search import Run
from jtrees.search.first_step import weighted_steps
from jtrees.tasks import Regression, Task
from jtrees.training import Batch
from jtrees.training.loop import MOST
from jtrees.training.state import NOT_TAKEN
from jtrees.tree import ObliqueTree

_FEW_ROWS, _BLOCK = 2**16, 2**12  # longer tables are routed in blocks of rows, which divide their padded length
_HALVINGS = 10  # largest number of halvings of a step that raises the loss of a leaf
_ROUNDING = 1e-5  # relative rise of the loss of a leaf that rounding errors can cause
_L2, _L2_OF_CLASSES = 1.0, 10.0  # labels are noisier than numbers
_MOST_OUTPUTS = 5  # largest number of targets for the splits of a tree


def base_task(task: Task) -> Regression:
    """Returns the task of the base: least squares of the steps, or of a few combinations of many steps."""
    return Regression(min(task.shape[0], _MOST_OUTPUTS) if task.shape else None)


# --- Compiled functions of a run -------------------------------------------------------------------------------------


class State(NamedTuple):
    """The state of boosting. Outputs are for scaled targets, before the link."""

    initial: Array  # the initial outputs, (*k,)
    curvature: Array  # the mean curvature at the initial outputs, (*k,)
    outputs: Array  # the outputs for the training rows, (n, *k)
    validated: Any  # the outputs for the validation set, or None


class Draws(NamedTuple):
    """The random draws of a round. If there are several rounds, arrays have a leading axis ``(rounds,)``."""

    rows: Any  # numbers of the rows, (m,), -1 for padding
    features: Any  # factors of the features, 1 or 0, (p,)
    combinations: Any  # combinations of the outputs, (outputs, targets), or None for all outputs
    key: Any  # data of the key of the tree
    tree: Any = ()  # further draws of the base, the argument `draws` of `grow`


class Rounds(NamedTuple):
    """Rounds of boosting. Arrays have a leading axis ``(rounds,)``."""

    trees: ObliqueTree  # the tree of each round, with its contribution to the outputs in the leaves
    features: Any  # the features of each tree, 1 or 0, (rounds, p)
    losses: Any  # the loss after each round on the rows for evaluation
    before: Any  # training loss before each round
    after: Any  # training loss after each round
    finite: Any  # whether each round had a finite tree. The outputs of a tree that is not finite are 0


@compilation.sums_in_order
def initial_state(run: Run) -> State:
    """Returns the state before the first round."""
    loss, shape, initial = run.task.loss_function, run.task.shape, run.task.initial(run.batch)
    outputs_on = lambda rows: jnp.broadcast_to(initial, (len(rows.x), *shape))
    outputs = outputs_on(run.batch)
    curvature = loss.derivatives(outputs, run.batch.y)[1] if loss.is_smooth(shape) else jnp.ones_like(outputs)
    # The curvature at the current outputs would vanish as rows are fitted, and the shrinkage would vanish with it.
    curvature = jnp.einsum("n,n...->...", run.weight, curvature, precision="highest") / run.weight.sum()
    return State(initial, curvature, outputs, outputs_on(run.evaluation) if run.has_validation_set else None)


@compilation.sums_in_order
def round_batch(run: Run, state: State, draws: Draws) -> Batch:
    """Returns the drawn rows of a round, with their targets and weights."""
    rows, combinations = draws.rows, draws.combinations
    every_row = sharding.keep_rows((run.batch.x, run.batch.y, state.outputs, run.weight))
    x, y, outputs, weight = jax.tree.map(lambda a: a[rows], every_row)
    step, weight = weighted_steps(run.task, outputs, y, jnp.where(rows < 0, 0, weight))
    if run.monotone is not None:  # the base keeps all targets non-decreasing in the monotone features
        step = step * jnp.asarray(signs_of(run.task), step.dtype).reshape(run.task.shape)
    step = step if combinations is None else jnp.matmul(step, combinations, precision="highest")
    low, high = segments.range_of(step, weight > 0)
    return Batch(x * draws.features, (step - low) / jnp.where(high - low > 0, high - low, 1), weight)


@compilation.sums_in_order
def added_to(run: Run, state: State, splits: ObliqueTree, features: Array, finite: Array) -> tuple[State, Rounds]:
    """Returns the state after a round, and the round."""
    loss, batch, weight = run.task.loss_function, run.batch, run.weight
    tree = splits.replace(weights=splits.weights * features)
    leaf = _leaf_of(tree, batch.x)
    fitted = _leaves(run, state, tree, leaf, features)
    finite &= jnp.isfinite(state.outputs + fitted.at(leaf, batch.x)).all()
    tree = jax.tree.map(lambda a: jnp.where(finite, a, 0), tree.replace(leaves=fitted))
    outputs = state.outputs + tree.leaves.at(leaf, batch.x)
    validated, evaluation, validates = state.validated, run.evaluation, run.has_validation_set
    if validates:
        validated = validated + tree.leaves.at(_leaf_of(tree, evaluation.x), evaluation.x)
    before, after = (losses.mean_loss(loss.samples(total, batch.y), weight) for total in (state.outputs, outputs))
    evaluated = losses.mean_loss(loss.samples(validated if validates else outputs, evaluation.y), evaluation.weight)
    added = Rounds(tree, features, evaluated, before, after, finite)
    return state._replace(outputs=outputs, validated=validated), added


def _leaf_of(tree: ObliqueTree, x: Array) -> Array:
    """Returns the leaf of each row, block by block: the weights along the paths of all rows are as large as x."""
    leaf_of = partial(ops.hard, tree.weights, tree.bias)
    is_long = len(x) > _FEW_ROWS and blocking.platform() == "cpu"
    return blocking.map_over_blocks(leaf_of, x, _BLOCK) if is_long else leaf_of(x)


def _leaves(run: Run, state: State, splits: ObliqueTree, leaf: Array, features: Array) -> Any:
    """Returns the leaves of a tree, times the learning rate: its contributions to the outputs."""
    recipe, batch, loss, count = run.recipe, run.batch, run.task.loss_function, len(splits.bias) + 1
    step, weight = weighted_steps(run.task, state.outputs, batch.y, run.weight)
    if recipe.base.tree_leaves(base_task(run.task)) == "linear":
        empty = kinds.Linear.empty(count, batch.x.shape[1], run.task.shape, batch.x.dtype)
        leaves = empty.refit(leaf, batch.x * features, step, weight)
        if not loss.is_smooth(run.task.shape):  # the steps are gradients, whose length says nothing
            direction = leaves.at(leaf, batch.x)
            factors = loss.factors(leaf, state.outputs, direction, batch.y, count, run.weight)
            leaves = _times(leaves, jnp.maximum(factors, 0))
    else:
        l2 = (_L2_OF_CLASSES if loss.choice else _L2) if recipe.l2 is None else recipe.l2
        leaves = kinds.Values(loss.steps(leaf, state.outputs, batch.y, count, run.weight, l2 * state.curvature))
    leaves = _halved(run, state, jax.tree.map(lambda a: recipe.learning_rate * a, leaves), leaf)
    # In the quadratic approximation of the loss, the weight of a leaf is the sum of the curvatures of its rows.
    weighted = run.replace(batch=batch._replace(weight=weight))
    return weighted.ordered(splits.replace(leaves=leaves), leaf).leaves


def _halved(run: Run, state: State, leaves: Any, leaf: Array) -> Any:
    """Returns leaves that do not raise the loss of their rows: a step that does is halved, at most ten times."""
    loss, y, weight, count = run.task.loss_function, run.batch.y, run.weight, len(jax.tree.leaves(leaves)[0])
    direction = leaves.at(leaf, run.batch.x)

    def losses_after(size: Array) -> Array:
        rows = loss.samples(state.outputs + segments.wide(size[leaf], direction) * direction, y)
        return segments.quick_sums(jnp.where(weight > 0, weight * rows, 0), leaf, count)

    def halve(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        size, raises, number = carry
        size = jnp.where(raises, jnp.where(number < _HALVINGS, size / 2, 0), size)
        return size, ~(losses_after(size) <= limit), number + 1

    whole_steps = jnp.ones(count, direction.dtype)
    before = losses_after(0 * whole_steps)
    limit = before + _ROUNDING * jnp.abs(before)
    carry = whole_steps, ~(losses_after(whole_steps) <= limit), jnp.zeros((), jnp.int32)
    size, *_ = jax.lax.while_loop(lambda carry: carry[1].any() & (carry[2] <= _HALVINGS), halve, carry)
    return _times(leaves, size)


def _times(leaves: Any, factors: Array) -> Any:
    """Returns leaves whose outputs are multiplied by factors of at least 0, ``(leaves,)`` or ``(leaves, *k)``."""
    multiplied = leaves.with_outputs(lambda a: segments.wide(factors, a) * a)
    if leaves.is_constant:
        return multiplied
    slopes = leaves.coefficients
    return multiplied.replace(coefficients=segments.wide(factors[:, None], slopes) * slopes)


# The state of a program of many rounds is a pair: the state of boosting, and an array for the rounds of a call.


@compilation.sums_in_order
def before_rounds(run: Run) -> tuple[State, Rounds]:
    """Returns the state before the first round, and zeros in place of the rounds. The base has an option ``depth``."""
    nodes, p, dtype = topology.num_nodes(run.recipe.base.depth), run.batch.x.shape[1], run.batch.x.dtype
    state, splits = initial_state(run), ObliqueTree(jnp.zeros((nodes, p), dtype), jnp.zeros(nodes, dtype), None)
    _, added = jax.eval_shape(lambda: added_to(run, state, splits, jnp.ones(p, dtype), jnp.bool_(True)))
    return state, jax.tree.map(lambda a: jnp.zeros((run.recipe.rounds_of_call, *a.shape), a.dtype), added)


@compilation.sums_in_order
def grown_rounds(
    run: Run, boosted: tuple[State, Rounds], draws: Draws, shared: Any, rows: Any, before: Array, count: Array
) -> tuple[tuple[State, Rounds], Array, bool]:
    """Returns the state after ``count`` more rounds, their training losses, and False: the rounds do not end early."""
    # `boosted` is the state of boosting, and the rounds of this call so far, `before` in number. `draws` are the draws
    # of the rounds of this call. `shared` and `rows` are arguments of `grow` of the base, `rows` for all rows.
    base = run.recipe.base

    def splits_of(number: Array, state: State, _: Rounds) -> tuple[ObliqueTree, Array, Array]:
        round_draws = jax.tree.map(lambda a: a[number], draws)
        batch = round_batch(run, state, round_draws)
        key = jax.random.wrap_key_data(round_draws.key, impl=jax.random.key_impl(run.key))
        base_run = Run(base, base_task(run.task), batch, batch, key, monotone=run.monotone)
        round_rows = jax.tree.map(lambda a: a[round_draws.rows], sharding.keep_rows(rows))
        splits, finite = base.grow(base_run, shared, round_rows, round_draws.tree)
        return splits, round_draws.features, finite

    return _with_rounds(run, boosted, splits_of, before, count)


@compilation.sums_in_order
def refitted_rounds(
    run: Run, refitted: tuple[State, Rounds], before: Array, count: Array
) -> tuple[tuple[State, Rounds], Array, bool]:
    """Returns the state after ``count`` more rounds, which keep their splits and get new leaves."""

    def splits_of(number: Array, _: State, rounds: Rounds) -> tuple[ObliqueTree, Array, Array]:
        return jax.tree.map(lambda a: a[number], (rounds.trees.replace(leaves=None), rounds.features, rounds.finite))

    return _with_rounds(run, refitted, splits_of, before, count)


def _with_rounds(
    run: Run, boosted: tuple[State, Rounds], splits_of: Callable[..., Any], before: Array, count: Array
) -> tuple[tuple[State, Rounds], Array, bool]:
    """Returns the state after ``count`` more rounds, with the splits of ``splits_of(number, state, rounds)``."""

    def add(i: Array, carry: tuple[State, Rounds, Array]) -> tuple[State, Rounds, Array]:
        state, rounds, history = carry
        state, added = added_to(run, state, *splits_of(before + i, state, rounds))
        rounds = jax.tree.map(lambda a, new: a.at[before + i].set(new), rounds, added)
        return state, rounds, history.at[i].set(added.before)

    history = jnp.full(MOST, NOT_TAKEN, boosted[1].before.dtype)
    state, rounds, history = jax.lax.fori_loop(0, count, add, (*boosted, history))
    return (state, rounds), history, False
