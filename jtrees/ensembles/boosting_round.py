"""A round of boosting: the targets of its tree, the leaves of the tree, and the sum that the tree is added to."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import leaves as kinds, losses, ops, segments, sharding
from jtrees.monotone import ordered_leaves, signs_of
from jtrees.search import Run
from jtrees.tasks import Regression, Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree

_MOST_OUTPUTS = 5  # largest number of targets for the splits of a tree


class Sum(NamedTuple):
    """A sum of trees that grows by a tree in each round, on the host.

    Attributes:
      initial: the initial outputs, ``(*k,)``.
      trees: the trees of each round, stacked, with their outputs in the leaves. A round has one tree, or several trees
        in a mean of sums.
      losses: the loss after each round on the rows for evaluation.
      before: training loss before each round.
      after: training loss after each round.
      finite: whether each round had a finite tree. The outputs of a tree that is not finite are 0.
    """

    initial: np.ndarray
    trees: list[ObliqueTree]
    losses: list[float]
    before: list[float]
    after: list[float]
    finite: list[bool]

    def add(self, tree: ObliqueTree, loss: Any, before: Any, after: Any, finite: Any) -> None:
        """Adds the tree of a round."""
        self.trees.append(jax.tree.map(lambda a: a[None], tree))
        for numbers, number in zip(self[2:], (loss, before, after, finite), strict=True):
            numbers.append(number.item())

    @classmethod
    def mean(cls, sums: list["Sum"]) -> "Sum":
        """Returns the mean of sums with equal ``losses``."""
        share = lambda tree: tree.replace(leaves=jax.tree.map(lambda a: a / np.float32(len(sums)), tree.leaves))
        joined = lambda *trees: jax.tree.map(lambda *a: np.concatenate(a), *map(share, trees))
        trees = [joined(*trees) for trees in zip(*(part.trees for part in sums), strict=True)]
        numbers = lambda name: np.mean(np.array([getattr(part, name) for part in sums]), 0)
        initial, before, after = map(numbers, ("initial", "before", "after"))
        finite = [any(parts) for parts in zip(*(part.finite for part in sums), strict=True)]
        return cls(initial, trees, sums[0].losses, list(before), list(after), finite)

    def first(self, count: int) -> tuple[ObliqueTree, np.ndarray]:
        """Returns the trees of the first rounds, stacked, and the initial outputs."""
        return jax.tree.map(lambda *a: np.concatenate(a), *self.trees[:count]), self.initial

    @property
    def best(self) -> int:
        """Number of rounds with the lowest loss, or all rounds if no loss is finite."""
        return 1 + int(np.nanargmin(self.losses)) if np.isfinite(self.losses).any() else len(self.trees)

    @property
    def stalled(self) -> int:
        """Number of rounds since the lowest loss."""
        return len(self.losses) - 1 - int(np.argmin(np.nan_to_num(self.losses, nan=np.inf))) if self.losses else 0


def step_task(task: Task) -> Regression:
    """Returns the regression of the Newton steps of all outputs."""
    return Regression(task.shape[0] if task.shape else None)


def base_task(task: Task) -> Regression:
    """Returns the task of the base: least squares of the steps, or of a few combinations of many steps."""
    return Regression(min(task.shape[0], _MOST_OUTPUTS) if task.shape else None)


# --- Compiled functions of a run -------------------------------------------------------------------------------------


class State(NamedTuple):
    """The state of boosting. Outputs are for scaled targets, before the link.

    Attributes:
      initial: the initial outputs, ``(*k,)``.
      curvature: the mean curvature at the initial outputs, ``(*k,)``.
      outputs: the outputs for the training rows, ``(n, *k)``.
      validated: the outputs for the validation set, or None.
    """

    initial: Array
    curvature: Array
    outputs: Array
    validated: Any


def initial_state(run: Run) -> State:
    """Returns the state before the first round."""
    shape = run.task.shape
    initial = run.task.loss_function.initial(run.batch.y, run.weight, math.prod(shape))
    outputs_on = lambda rows: jnp.broadcast_to(initial, (len(rows.x), *shape))
    loss, outputs = run.task.loss_function, outputs_on(run.batch)
    curvature = loss.derivatives(outputs, run.batch.y)[1] if loss.smooth else jnp.ones_like(outputs)
    # The curvature at the current outputs would vanish as rows are fitted, and the shrinkage would vanish with it.
    curvature = jnp.einsum("n,n...->...", run.weight, curvature, precision="highest") / run.weight.sum()
    return State(initial, curvature, outputs, outputs_on(run.by) if run.validates else None)


def target(run: Run, state: State, rows: Array, features: Array, mixes: Array | None) -> Batch:
    """Returns the rows of a round, with their targets and weights.

    Args:
      run: the run.
      state: the state before the round.
      rows: numbers of the rows, ``(m,)``, -1 for padding.
      features: factors of the features, 1 or 0, ``(p,)``.
      mixes: combinations of the outputs, ``(outputs, targets)``, or None for all outputs.
    """
    every_row = sharding.keep_rows((run.batch.x, run.batch.y, state.outputs, run.weight))
    x, y, outputs, weight = jax.tree.map(lambda a: a[rows], every_row)
    step, share = _newton(run.task.loss_function, outputs, y, jnp.where(rows < 0, 0, weight))
    if run.monotone is not None:  # the base keeps all targets non-decreasing in the monotone features
        step = step * jnp.asarray(signs_of(run.task), step.dtype).reshape(run.task.shape)
    step = step if mixes is None else jnp.matmul(step, mixes, precision="highest")
    inside = (share > 0).reshape(-1, *[1] * len(run.task.shape))
    low = jnp.where(inside, step, jnp.inf).min(0)
    unit = jnp.where(inside, step, -jnp.inf).max(0) - low
    return Batch(x * features, (step - low) / jnp.where(unit > 0, unit, 1), share)


def added_to(run: Run, state: State, splits: ObliqueTree, features: Array, finite: Array) -> tuple[State, Any]:
    """Returns the state after a round, and the tree, its losses (see :class:`Sum`), and whether the tree is finite."""
    loss, batch, weight = run.task.loss_function, run.batch, run.weight
    tree = splits.replace(weights=splits.weights * features)
    leaf = ops.hard(tree.weights, tree.bias, batch.x)
    fitted = _leaves(run, state, tree, leaf, features)
    finite &= jnp.isfinite(state.outputs + fitted.at(leaf, batch.x)).all()
    tree = jax.tree.map(lambda a: jnp.where(finite, a, 0), tree.replace(leaves=fitted))
    outputs = state.outputs + tree.leaves.at(leaf, batch.x)
    validated = state.validated
    if run.validates:
        validated = validated + tree.leaves.at(ops.hard(tree.weights, tree.bias, run.by.x), run.by.x)
    before, after = (losses.mean_loss(loss.samples(total, batch.y), weight) for total in (state.outputs, outputs))
    evaluated = losses.mean_loss(loss.samples(validated if run.validates else outputs, run.by.y), run.by.weight)
    return state._replace(outputs=outputs, validated=validated), (tree, evaluated, before, after, finite)


def _leaves(run: Run, state: State, splits: ObliqueTree, leaf: Array, features: Array) -> Any:
    """Returns the leaves of a tree, times the learning rate: its contributions to the outputs."""
    recipe, steps, batch, weight = run.recipe, step_task(run.task), run.batch, run.weight
    leaves = len(splits.bias) + 1
    if recipe.base.tree_leaves(steps) == "linear":
        step, share = _newton(run.task.loss_function, state.outputs, batch.y, weight)
        empty = kinds.kind_of("linear", steps).empty(leaves, batch.x.shape[1], run.task.shape, batch.x.dtype)
        fitted = empty.refit(leaf, batch.x * features, step, share)
    else:
        newton = run.task.loss_function.steps
        fitted = kinds.Values(newton(leaf, state.outputs, batch.y, leaves, weight, recipe.l2 * state.curvature))
        if run.monotone is not None:
            fitted = _ordered(run, state, splits.replace(leaves=fitted), leaf).leaves
    return jax.tree.map(lambda a: recipe.learning_rate * a, fitted)


def _ordered(run: Run, state: State, tree: ObliqueTree, leaf: Array) -> ObliqueTree:
    """Returns the tree of a round with leaves in the order of the monotone features.

    In the quadratic approximation of the loss, the weight of a leaf is the sum of the curvatures of its rows.
    """
    assert run.monotone is not None
    _, share = _newton(run.task.loss_function, state.outputs, run.batch.y, run.weight)
    return ordered_leaves(tree, run.monotone, segments.sums(share, leaf, len(tree.bias) + 1), run.task)


def _newton(loss: losses.Loss, outputs: Array, y: Array, weight: Array) -> tuple[Array, Array]:
    """Returns the Newton steps of the outputs, and weights of mean 1 that are proportional to the curvatures."""
    step, curvature = loss.newton(outputs, y)
    return step, segments.mean_one(weight * curvature.reshape(len(step), -1).mean(1))
