"""Trees whose splits have few terms, and optionally the columns of a single group. The printed tree is the model."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np
import optax

from jtrees import pytree, topology, training
from jtrees.data import Scaling, Table
from jtrees.data.constraints import checked_groups, column_of_features
from jtrees.ensembles.wrapper import Wrapper
from jtrees.methods.annealed.get import get
from jtrees.search import Fitted, Problem, Report, Run, option
from jtrees.search.minibatch import prediction_loss
from jtrees.tasks import Task
from jtrees.training import Batch, TrainState
from jtrees.tree import ObliqueTree, with_empty_leaves
from jtrees.validation import quoted

_KEPT = 0.85  # part of the terms that a step keeps
_SHARPNESS = 8.0, 60.0  # sharpness of the first and the last update of a step, for scores of deviation 1
_WEIGHT_DECAY = 1e-2  # the same as GET's
_EVALUATIONS = 20  # evaluations in a step, if an evaluation has the cost of an update


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SparseReport(Report):
    """The report of :class:`jtrees.Sparse`.

    Attributes:
      terms: the largest number of columns in a split, for each tree that was tried, ``(tries,)``.
      losses: the loss of each tree, on ``validation`` if given, else on the training data, ``(tries,)``.
      base: the report of the base recipe.
      groups: the largest number of groups in a split of each tree, ``(tries,)``, or None without groups.
    """

    terms: np.ndarray
    losses: np.ndarray
    base: Any
    groups: np.ndarray | None = None


def _checked_interactions(name: str, value: Any) -> Any:
    """Returns checked groups as tuples, or ``"none"`` or None."""
    if value is None or (isinstance(value, str) and value == "none"):
        return value
    groups = value if isinstance(value, (list, tuple)) else ()
    if not groups or not all(isinstance(group, (list, tuple)) and len(group) for group in groups):
        expected = f'{name} must be groups of columns, such as [["lat", "lon"], ["age"]], or "none"'
        raise ValueError(f"{expected}, got {quoted(value)}")
    return tuple(tuple(group) for group in groups)


@pytree.dataclass(kw_only=True)
class Sparse(Wrapper):
    """The tree of another recipe, with at most ``terms`` columns in a split, and optionally columns of a single group.

    Terms are removed step by step. A step removes about a seventh of the terms of each split, the smallest ones first.
    The size of a term is the deviation of its contribution to the score, on the rows that reach the split. Training
    then continues with the remaining terms, as in GET under increasing sharpness, and the best hard tree is kept.
    Leaves are refitted at the end. After a deadline or Ctrl-C, the terms that still exceed the limit are removed at
    once, without training.

    All features of a column of a raw table are one term here. Printed rules have a term for each feature. A category
    has a feature for each group of levels, a date has its periods, and a column with gaps has an indicator.

    If ``interactions`` is given, each split has columns of only one group, and at most ``terms`` of them. Groups are
    removed first, in the same steps, until each split has the columns of a single group. Each split can keep a
    different group.

    The report is a :class:`jtrees.ensembles.SparseReport`.

    Attributes:
      base: a recipe whose model is a tree.
      terms: largest number of columns in a split; rules may print a column as several terms.
      interactions: groups of columns that may meet in a split, by name or number: ``[["lat", "lon"], ["income",
        "age"]]``. The columns in no group form one more group. ``"none"``: each split has one column, as in CART, but
        all splits are trained jointly by gradients. None: all columns may be in the same split.
      epochs: number of updates after each step.
      learning_rate: initial learning rate of each step, with cosine decay.
      shrink: whether constant leaves are shrunk towards their ancestors' means or class frequencies at the end, as in
        :class:`jtrees.GET`.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> both = np.hstack([x, np.cos(9 * x)])
      >>> recipe = jtrees.Sparse(jtrees.GET(depth=1, starts=1, epochs=20), terms=1, epochs=5)
      >>> fit = jtrees.fit(recipe, both, np.sign(x[:, 0]), key=jax.random.key(0))
      >>> print((fit.tree.weights != 0).sum(1))
      [1]
    """

    terms: int = option(5)
    interactions: Any = option(None, check=_checked_interactions)
    epochs: int = option(300)
    learning_rate: float = option(0.01, above=0)
    shrink: bool = option(True)

    keeps_order = False

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        super().check(task, shape)
        if self.base.tree_leaves(task) is None:
            raise ValueError(f"base must end in a single tree, got {quoted(self.base)}")

    def scaling(self, table: Table) -> Scaling:
        checked_groups(self.interactions, table.columns, table.x.shape[1])  # raises before the search
        return super().scaling(table)

    @property
    def changes_splits_last(self) -> bool:
        return True

    async def search(self, problem: Problem) -> Fitted:
        base, data = await self.base.search(problem.replace(recipe=self.base)), problem.data
        assert base.tree is not None and data is not None
        table_shape = data.table.columns, data.table.x.shape[1]
        columns, groups = column_of_features(*table_shape), checked_groups(self.interactions, *table_shape)
        trees = await self._thinned(problem, base.tree, columns, groups)
        with problem.restoring():
            tree = trees[-1].merged()
            largest = lambda owner: np.array([_largest_count(np.asarray(tree.weights), owner) for tree in trees])
            losses = np.array([data.loss(tree) for tree in trees])
            most_groups = None if groups is None else largest(groups)
            report = SparseReport(terms=largest(columns), losses=losses, base=base.report, groups=most_groups)
            return base.replaced_by(tree, data, report)

    async def _thinned(
        self, problem: Problem, tree: ObliqueTree, columns: np.ndarray, groups: np.ndarray | None
    ) -> list[ObliqueTree]:
        """Returns the tree, followed by trees with decreasing numbers of groups and terms."""
        # `columns` and `groups` are the column and the group of each feature.
        data: Any = problem.data
        leaves, monitor = self.base.tree_leaves(data.table.task), problem.monitor
        splits = data.scaling.transform_splits(ObliqueTree(tree.weights, tree.bias, None, tree.origin))
        weights, bias = np.array(splits.weights, np.float64), np.array(splits.bias, np.float64)
        trees, limit = [tree], _largest_count(weights, columns)
        steps = [] if groups is None else [(groups, count) for count in _steps(_largest_count(weights, groups), 1)]
        if groups is not None:
            limit = min(limit, max(len(np.unique(columns[groups == group])) for group in np.unique(groups)))
        steps += [(columns, count) for count in _steps(limit, self.terms)]
        if monitor.rehearses and len(columns) > self.terms:  # the tree of different data may have more terms
            steps = steps or [(columns, self.terms)]
        for done, (owner, terms) in enumerate(steps):
            in_time = monitor.has_time() and not monitor.is_rehearsed(done)
            if not in_time and terms != (self.terms if owner is columns else 1):
                continue
            weights, bias = _without_least(weights, bias, owner, terms, problem.batch)
            thin = ObliqueTree(np.float32(weights), np.float32(bias), None)  # type: ignore[arg-type]
            if in_time:
                state, mask = await problem.map(_initial_state, thin), weights != 0
                name = f"{type(self).__name__}, {terms} {'terms' if owner is columns else 'groups'}"
                state, _ = await problem.train(_advanced, state, self.epochs, mask, name=name)
                thin = (await problem.map(_best_splits, state, thin, mask)).host
                weights, bias = np.array(thin.weights, np.float64), np.array(thin.bias, np.float64)
            with problem.restoring():
                restored = data.scaling.replace(origin=tree.origin).restore_splits(thin)
                trees.append(data.refit(restored, leaves, shrink=self.shrink and leaves == "constant")[0])
        return trees


def _steps(limit: int, target: int) -> list[int]:
    """Returns the numbers of terms after each step."""
    steps, terms = [], limit
    while terms > target:
        terms = max(target, int(_KEPT * terms))
        steps.append(terms)
    return steps


def _largest_count(weights: np.ndarray, owner: np.ndarray) -> int:
    """Returns the largest number of columns or groups in a split, at least 1."""
    return max(1, *(len(np.unique(owner[row != 0])) for row in weights))


def _without_least(
    weights: np.ndarray, bias: np.ndarray, owner: np.ndarray, terms: int, batch: Batch
) -> tuple[np.ndarray, np.ndarray]:
    """Returns splits with their largest terms only, and with scores of deviation 1."""
    # The size of a term is the deviation of its column's contribution to the score, on the rows that reach the split. A
    # removed term is replaced by its mean.
    x, weight = np.asarray(batch.x, np.float64), np.ones(len(batch.x))
    if batch.weight is not None:
        real = np.asarray(batch.weight) > 0
        x, weight = x[real], np.asarray(batch.weight, np.float64)[real]
    weights, bias, node = weights.copy(), bias.copy(), np.zeros(len(x), int)
    columns = np.unique(owner)
    for level in map(topology.level, range(topology.depth_of(len(bias)))):
        right = np.zeros(len(x), bool)
        for j in range(level.start, level.stop):
            reaching = node == j
            varied = reaching.any() and np.ptp(x[reaching], axis=0).any()
            rows, share = (x[reaching], weight[reaching]) if varied else (x, weight)
            share = share / share.sum()
            added = np.stack([rows[:, owner == c] @ weights[j, owner == c] for c in columns], axis=1)
            mean = share @ added
            smallest = np.argsort(-(share @ np.square(added - mean)), kind="stable")[terms:]
            bias[j] += mean[smallest].sum()
            weights[j, np.isin(owner, columns[smallest])] = 0
            score = np.delete(added - mean, smallest, axis=1).sum(1)
            deviation = np.sqrt(share @ np.square(score))
            if deviation > 0:
                weights[j] /= deviation
                bias[j] /= deviation
            right[reaching] = x[reaching] @ weights[j] + bias[j] > 0
        node = 2 * node + 1 + right
    return weights, bias


# --- Compiled functions of a step ------------------------------------------------------------------------------------


def _leaves(run: Run) -> str:
    return run.recipe.base.tree_leaves(run.task)


def _method(run: Run, mask: Array) -> training.Method:
    """Returns GET under increasing sharpness; terms that are not in ``mask`` have weight 0."""
    low, high = _SHARPNESS
    sharpness = lambda step: low * (high / low) ** (step / run.recipe.epochs)
    depth = topology.depth_of(len(mask))
    method = get(depth, sharpness, leaves=_leaves(run), task=run.task)  # type: ignore[arg-type]
    return method._replace(project=lambda tree: tree.replace(weights=jnp.where(mask, tree.weights, 0)))


def _optimizer(run: Run) -> optax.GradientTransformation:
    schedule = optax.cosine_decay_schedule(run.recipe.learning_rate, run.recipe.epochs)
    return optax.adamw(schedule, weight_decay=_WEIGHT_DECAY)


def _score(run: Run) -> Any:
    """Returns the loss on the validation set as a function of the parameters; None: the score of the method."""
    if not run.has_validation_set:
        return None
    return lambda params: prediction_loss(run.task, params.refit(*run.batch), run.evaluation)


def _initial_state(run: Run, splits: ObliqueTree) -> TrainState:
    hard = with_empty_leaves(splits, _leaves(run), run.task).refit(*run.batch)
    params = hard.replace(leaves=hard.leaves.trainable())
    # The key has no effect: the batch is full, and the loss is not random.
    return training.loop.init_state(params, run.batch, key=jax.random.key(0), optimizer=_optimizer(run))


def _advanced(run: Run, state: TrainState, mask: Array, before: Array, count: Array) -> tuple[TrainState, Array, Array]:
    """Returns the state after ``count`` updates, their losses, and whether it is non-finite."""
    score = _score(run)
    every = 1 if score is None and _leaves(run) == "constant" else max(1, run.recipe.epochs // _EVALUATIONS)
    options: Any = {"score_every": every, "score": score}
    update = training.step.one_step(_method(run, mask), run.batch, _optimizer(run), **options)
    state, history = training.loop.advance_up_to(update, state, count, step=before)
    return state, history.losses, ~state.finite


def _best_splits(run: Run, state: TrainState, splits: ObliqueTree, mask: Array) -> ObliqueTree:
    """Returns the splits of the best hard tree; the given splits if the training became non-finite."""
    best = training.best(_method(run, mask), state, run.batch, score=_score(run))
    return jax.tree.map(partial(jnp.where, jnp.isfinite(best.score)), best.params.replace(leaves=None), splits)
