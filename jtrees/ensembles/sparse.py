"""Trees whose splits have few terms, and optionally the columns of one group: the printed tree is the scored tree."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np
import optax

from jtrees import blocking, leaves as kinds, pytree, topology, training
from jtrees.data import Data, Scaling, Table
from jtrees.data.constraints import checked_groups, column_of_features
from jtrees.methods.annealed.get import get
from jtrees.search import Finished, Recipe, Report, Runs, SearchResult, options
from jtrees.search.minibatch import prediction_loss
from jtrees.search.monitor import Monitor
from jtrees.tasks import Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree
from jtrees.validation import quoted

_KEPT = 0.85  # part of the terms that a step keeps
_SHARPNESS = 8.0, 60.0  # sharpness of the first and the last update of a step, for scores of deviation 1
_WEIGHT_DECAY = 1e-2  # the same as GET's
_EVALUATIONS = 20  # evaluations in a step, if an evaluation has the cost of an update
_FEATURES_OF_AN_ELEMENT = 32  # number of features whose cost equals the remaining cost of a score in an update


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
class Sparse(Recipe):
    """The tree of another recipe, with at most ``terms`` columns in a split, and optionally columns of one group only.

    Terms are removed step by step. A step removes about a seventh of the terms of each split, the smallest ones first.
    The size of a term is the deviation of its contribution to the score, on the rows that reach the split. Training
    then continues with the remaining terms, as in GET under increasing sharpness, and the best hard tree is kept.
    Leaves are refitted at the end. After a deadline or Ctrl-C, the terms that still exceed the limit are removed at
    once, without training.

    All features of a column of a raw table are one term here. Printed rules have a term for each feature. A category
    has a feature for each group of levels, a date has month and weekday, and a column with gaps has an indicator.

    If ``interactions`` is given, each split has columns of only one group, and at most ``terms`` of them. Groups are
    removed first, in the same steps, until each split has the columns of one group. Each split can keep a different
    group.

    The report is a :class:`jtrees.ensembles.SparseReport`.

    Attributes:
      base: a recipe whose model is a tree.
      terms: largest number of columns in a split; rules may print a column as several terms.
      interactions: groups of columns that may meet in a split, by name or number: ``[["lat", "lon"], ["income",
        "age"]]``. The columns in no group form one more group. ``"none"``: each split has one column, as in CART, but
        all splits are trained jointly by gradients. None: all columns may meet.
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

    base: Recipe = pytree.field(kw_only=False, metadata={"check": options.checked_base})
    terms: int = options.count(5)
    interactions: Any = options.static(None, _checked_interactions)
    epochs: int = options.count(300)
    learning_rate: float = options.positive(0.01)
    shrink: bool = options.flag(True)

    def targets(self, x: Any, y: Any) -> Any:
        return options.checked_base("base", self.base).targets(x, y)

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        self.base.check(task, shape)
        if self.base.tree_leaves(task) is None:
            raise ValueError(f"base must end in a single tree, got {quoted(self.base)}")

    def scaling(self, table: Table) -> Scaling:
        checked_groups(self.interactions, table.columns, table.x.shape[1])  # raises before the search
        return self.base.scaling(table)

    @property
    def thins_splits(self) -> bool:
        return True

    def tree_leaves(self, task: Task) -> str | None:
        return self.base.tree_leaves(task)

    def search(self, runs: Runs) -> list[SearchResult]:
        results = self.base.search(runs.using([recipe.base for recipe in runs.recipes]))
        return [result._replace(held_out=()) for result in results]  # the removal of terms changes the model

    def finish(self, result: SearchResult, data: Data, *, key: Array, monitor: Monitor) -> Finished:
        finished = self.base.finish(result, data, key=key, monitor=monitor)
        leaves = self.base.tree_leaves(data.table.task)
        assert finished.tree is not None and leaves is not None
        of_table = data.table.columns, data.table.x.shape[1]
        columns, groups = column_of_features(*of_table), checked_groups(self.interactions, *of_table)
        trees = self._thinned(finished.tree, leaves, data, monitor, columns, groups)
        tree = trees[-1].merged()
        largest = lambda owner: np.array([_most(np.asarray(one.weights), owner) for one in trees])
        losses = np.array([data.loss(one) for one in trees])
        of_groups = None if groups is None else largest(groups)
        report = SparseReport(terms=largest(columns), losses=losses, base=finished.report, groups=of_groups)
        return Finished(tree, tree, data.loss(tree), report)

    def _thinned(
        self,
        tree: ObliqueTree,
        leaves: str,
        data: Data,
        monitor: Monitor,
        columns: np.ndarray,
        groups: np.ndarray | None,
    ) -> list[ObliqueTree]:
        """Returns the tree, followed by trees with decreasing numbers of groups and terms.

        Args:
          tree: the tree.
          leaves: the kind of its leaves.
          data: the data.
          monitor: the monitor.
          columns: the column of each feature.
          groups: the group of each feature, or None.
        """
        task, p = data.table.task, data.table.x.shape[1]
        splits = data.scaling.transform_splits(ObliqueTree(tree.weights, tree.bias, None, tree.origin))
        weights, bias = np.array(splits.weights, np.float64), np.array(splits.bias, np.float64)
        trees, most = [tree], _most(weights, columns)
        steps = [] if groups is None else [(groups, count) for count in _steps(_most(weights, groups), 1)]
        if groups is not None:
            most = min(most, max(len(np.unique(columns[groups == group])) for group in np.unique(groups)))
        steps += [(columns, count) for count in _steps(most, self.terms)]
        if monitor.rehearses and p > self.terms:  # the tree of different data may have more terms
            steps = steps or [(columns, self.terms)]
        validation = None if data.validation is None else data.scaling.batch(data.validation)
        elements = self.epochs * bias.size * len(data.batch.x) * max(1, p // _FEATURES_OF_AN_ELEMENT)
        with monitor.over(len(steps), type(self).__name__) as show:
            for done, (owner, terms) in enumerate(steps):
                in_time = monitor.has_time(blocking.seconds_of_step(elements)) and not monitor.is_rehearsed(done)
                if not in_time and terms != (self.terms if owner is columns else 1):
                    continue
                weights, bias = _without_least(weights, bias, owner, terms, data.batch)
                if in_time:
                    arguments = np.float32(weights), np.float32(bias), data.batch, validation, self.learning_rate
                    weights, bias, loss = _trained(*arguments, task=task, leaves=leaves, steps=self.epochs)
                    show(done + 1, [np.asarray(loss)[None]])
                    weights, bias = np.array(weights, np.float64), np.array(bias, np.float64)
                thin = ObliqueTree(jnp.asarray(weights, jnp.float32), jnp.asarray(bias, jnp.float32), None)
                restored = data.scaling.replace(origin=tree.origin).restore_splits(thin)
                trees.append(data.refit(restored, leaves, shrink=self.shrink and leaves == "constant")[0])
        return trees


def _steps(most: int, wanted: int) -> list[int]:
    """Returns the numbers of terms after each step."""
    steps, terms = [], most
    while terms > wanted:
        terms = max(wanted, int(_KEPT * terms))
        steps.append(terms)
    return steps


def _most(weights: np.ndarray, owner: np.ndarray) -> int:
    """Returns the largest number of columns or groups in a split, at least 1."""
    return max(1, *(len(np.unique(owner[row != 0])) for row in weights))


def _without_least(
    weights: np.ndarray, bias: np.ndarray, owner: np.ndarray, terms: int, batch: Batch
) -> tuple[np.ndarray, np.ndarray]:
    """Returns splits with their largest terms only, and with scores of deviation 1.

    The size of a term is the deviation of its column's contribution to the score, on the rows that reach the split. A
    removed term is replaced by its mean.
    """
    x, weight = np.asarray(batch.x, np.float64), np.ones(len(batch.x))
    if batch.weight is not None:
        real = np.asarray(batch.weight) > 0
        x, weight = x[real], np.asarray(batch.weight, np.float64)[real]
    weights, bias, node = weights.copy(), bias.copy(), np.zeros(len(x), int)
    columns = np.unique(owner)
    for level in map(topology.level, range(topology.depth_of(len(bias)))):
        right = np.zeros(len(x), bool)
        for j in range(level.start, level.stop):
            here = node == j
            varied = here.any() and np.ptp(x[here], axis=0).any()
            rows, share = (x[here], weight[here]) if varied else (x, weight)
            share = share / share.sum()
            added = np.stack([rows[:, owner == c] @ weights[j, owner == c] for c in columns], axis=1)
            mean = share @ added
            least = np.argsort(-(share @ np.square(added - mean)), kind="stable")[terms:]
            bias[j] += mean[least].sum()
            weights[j, np.isin(owner, columns[least])] = 0
            score = np.delete(added - mean, least, axis=1).sum(1)
            deviation = np.sqrt(share @ np.square(score))
            if deviation > 0:
                weights[j] /= deviation
                bias[j] /= deviation
            right[here] = x[here] @ weights[j] + bias[j] > 0
        node = 2 * node + 1 + right
    return weights, bias


@partial(jax.jit, static_argnames=("task", "leaves", "steps"))
def _trained(
    weights: Array,
    bias: Array,
    batch: Batch,
    validation: Batch | None,
    learning_rate: Array,
    *,
    task: Task,
    leaves: str,
    steps: int,
) -> tuple[Array, Array, Array]:
    """Returns trained splits and the score of their hard tree; terms of weight 0 are not trained."""
    low, high = _SHARPNESS
    sharpness = lambda step: low * (high / low) ** (step / steps)
    plain = get(topology.depth_of(len(bias)), sharpness, leaves=leaves, task=task)  # type: ignore[arg-type]
    there = weights != 0
    method = plain._replace(project=lambda tree: tree.replace(weights=jnp.where(there, tree.weights, 0)))
    empty = kinds.kind_of(leaves, task).empty(len(bias) + 1, weights.shape[1], task.shape, weights.dtype)
    batch, validation = jax.tree.map(jnp.asarray, (batch, validation))
    hard = ObliqueTree(weights, bias, empty).refit(*batch)
    optimizer = optax.adamw(optax.cosine_decay_schedule(learning_rate, steps), weight_decay=_WEIGHT_DECAY)
    params = hard.replace(leaves=hard.leaves.trainable())
    state = training.start(method, batch, key=jax.random.key(0), optimizer=optimizer, params=params)
    score = None
    if validation is not None:
        score = lambda params: prediction_loss(task, params.refit(*batch), validation)
    every = 1 if score is None and leaves == "constant" else max(1, steps // _EVALUATIONS)
    how: Any = {"optimizer": optimizer, "steps": steps, "score_every": every, "score": score}
    state, _ = training.advance(method, state, batch, **how)
    best = training.best(method, state, batch, score=score)
    finite = jnp.isfinite(best.score)  # otherwise the splits are unchanged
    of_best = best.params.weights, best.params.bias
    kept = jax.tree.map(partial(jnp.where, finite), of_best, (weights, bias))
    return *kept, best.score
