"""Bagging of any recipe: models of bootstrap samples, trained side by side."""

from dataclasses import dataclass
import time
from typing import Any, Literal, NamedTuple

import jax
from jaxtyping import Array
import numpy as np

from jtrees import pytree, sharding, validation as checks
from jtrees.data import Data, Scaling, Table
from jtrees.data.scaling import row_losses
from jtrees.forest import Forest, votes
from jtrees.search import Finished, LeftOut, Recipe, Report, Runs, SearchResult, options
from jtrees.search.monitor import Monitor
from jtrees.tasks import Classification, Task

_DRAWN = 4  # purpose number of the random generator: see ``Runs.rng``


class Bag(NamedTuple):
    """The tree of a bootstrap sample.

    Attributes:
      result: the result of the base recipe.
      rows: the rows of the sample, numbered among the rows of positive weight.
    """

    result: SearchResult
    rows: np.ndarray


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BaggedReport(Report):
    """The report of :class:`jtrees.Bagged`, for the n rows of positive weight.

    Attributes:
      out_of_bag_score: weighted R^2 (averaged over the targets, if there are several) or accuracy of ``out_of_bag``;
        NaN for fewer than two rows or constant targets.
      out_of_bag: the prediction for each row by the trees that were not trained on it, ``(n,)`` or ``(n, k)``; NaN if
        there is no such tree.
      in_bag: the number of times that each tree's sample contains each row, ``(trees, n)``.
      losses: the base recipe's loss of each tree, ``(trees,)``.
      bases: the report of each tree.
    """

    out_of_bag_score: float
    out_of_bag: np.ndarray
    in_bag: np.ndarray
    losses: np.ndarray
    bases: list[Any]


@pytree.dataclass(kw_only=True)
class Bagged(Recipe):
    """Bagging (Breiman 1996): many models of one recipe, each fitted to a bootstrap sample, as in DGT-Forest.

    Rows are drawn uniformly, and keep their weights. The model is a :class:`jtrees.Forest`; ``tree`` is None. The
    report is a :class:`jtrees.ensembles.BaggedReport`. After a deadline, the forest has only the trees that could be
    finished in time.

    Attributes:
      base: any recipe.
      trees: number of trees.
      fraction: size of a bootstrap sample as a fraction of n, above 0 and up to 1. Its rows are drawn with replacement.
      combine: ``"mean"`` of predictions, or ``"vote"`` of the trees' most probable classes. None: votes in
        classification, as in the paper, and the mean in regression.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> recipe = jtrees.Bagged(jtrees.DGT(depth=1, epochs=20, widths=()), trees=3)
      >>> fit = jtrees.fit(recipe, x, np.sign(x[:, 0]), key=jax.random.key(0))
      >>> len(fit.model), fit.report.search.out_of_bag.shape
      (3, (40,))
    """

    base: Recipe = pytree.field(kw_only=False, metadata={"check": options.checked_base})
    trees: int = options.count(30)
    fraction: float = options.share(1.0)
    combine: Literal["mean", "vote"] | None = options.choice(None, ("mean", "vote"), optional=True)

    def targets(self, x: Any, y: Any) -> Any:
        return options.checked_base("base", self.base).targets(x, y)

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        if self.combine == "vote" and not isinstance(task, Classification):
            raise ValueError('combine must be "mean" in regression, got "vote"')
        checks.check_count("trees", self.trees, most=checks.MAX_NUMBERS // self._size(shape[0]))
        self.base.check(task, (self._size(shape[0]), shape[1]))

    def scaling(self, table: Table) -> Scaling:
        return self.base.scaling(table)

    def keeps_monotone(self, task: Task) -> bool:
        return self.base.keeps_monotone(task)

    def tree_leaves(self, task: Task) -> None:
        return None

    def _size(self, n: int) -> int:
        """Returns the number of rows in a bootstrap sample of n rows."""
        return max(1, round(self.fraction * n))

    def search(self, runs: Runs) -> list[SearchResult]:
        bags = [numbers for i in range(len(runs)) for numbers in self._drawn(runs, i)]
        each = runs.using([recipe.base for recipe in runs.recipes]).repeat(self.trees)
        results = self.base.search(each.on(rows=[rows for rows, _ in bags]))
        forests = []
        for first in range(0, len(results), self.trees):
            some = results[first : first + self.trees]
            numbers = [own[own >= 0] for _, own in bags[first : first + len(some)]]
            model = [Bag(*of_tree) for of_tree in zip(some, numbers, strict=True)]
            score, finite = np.mean([one.score for one in some]), all(one.finite for one in some)
            history = joined([one.history for one in some])
            step = max(int(one.step) for one in some)
            forests.append(SearchResult(model, score, finite, step, history=history))
        return forests

    def _drawn(self, runs: Runs, i: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the rows of each bag of a run, -1 for padding, also as numbers among the rows of positive weight."""
        weight = runs.targets(i)[1]
        real = np.arange(runs.shape[0]) if weight is None else np.flatnonzero(np.asarray(weight) > 0)
        drawn = runs.rng(i, _DRAWN).choice(real, (self.trees, self._size(runs.shape[0]))).astype(np.int32)
        drawn[:, self._size(len(real)) :] = -1  # a bag of a padded batch has the same fraction of padding
        return [(rows, np.where(rows < 0, -1, np.searchsorted(real, rows))) for rows in drawn]

    def finish(self, result: SearchResult, data: Data, *, key: Array, monitor: Monitor) -> Finished:
        combine: Any = self.combine or ("vote" if isinstance(data.table.task, Classification) else "mean")
        fitted, bags, began = [], [], time.monotonic()
        for i, (of_tree, rows) in enumerate(result.model):
            if i and not monitor.may_be_late(time.monotonic() - began):  # the remaining work takes about the same time
                break
            bags.append(rows)
            table = data.table.rows(rows).normalised()
            bag = data._replace(table=table, batch=data.scaling.batch(table))
            fitted.append(self.base.finish(of_tree, bag, key=jax.random.fold_in(key, i), monitor=monitor))
        models = [one.model for one in fitted]
        if isinstance(models[0], Forest):  # the held-out rows of each bag choose its number of trees
            longest = max(map(len, models))
            models = [one.padded(longest) if len(one) < longest else one for one in models]
        forest = Forest(jax.tree.map(_stacked, *models), combine)
        in_bag = np.stack([np.bincount(rows, minlength=len(data.table.x)) for rows in bags])
        predictions = _predictions(models, combine, data.table)
        out_of_bag = _out_of_bag(predictions, in_bag)
        report = BaggedReport(
            out_of_bag_score=_score(out_of_bag, data.table),
            out_of_bag=out_of_bag,
            in_bag=in_bag,
            losses=np.array([one.loss for one in fitted]),
            bases=[one.report for one in fitted],
        )
        lost = _out_of_bag_losses(predictions, out_of_bag, in_bag, data, combine == "vote")
        return Finished(forest, None, data.loss(forest), report, LeftOut(lost, chose=False, several=True))


def joined(histories: list[np.ndarray]) -> np.ndarray:
    """Returns the histories of runs, ``(..., updates)``, as one array; shorter histories are padded with NaN."""
    length = max(history.shape[-1] for history in histories)
    pad = lambda a: np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, length - a.shape[-1])], constant_values=np.nan)
    return np.stack([pad(np.asarray(history)) for history in histories])


def _stacked(*arrays: Any) -> Any:
    """Stacks arrays. NumPy arrays, which may be in double precision, remain NumPy arrays."""
    stacked = np.stack(arrays)
    return sharding.from_host(stacked) if isinstance(arrays[0], jax.Array) else stacked


def _predictions(models: list[Any], combine: str, table: Table) -> np.ndarray:
    """Returns the predictions or votes of each tree for each row, ``(trees, n, *k)``."""
    predictions = np.stack([model.predict(table.x) for model in models]).astype(np.float64)
    return votes(predictions) if combine == "vote" else predictions


def _out_of_bag(predictions: np.ndarray, in_bag: np.ndarray) -> np.ndarray:
    """Returns the mean prediction for each row, over the trees that were not trained on it."""
    left_out = (in_bag == 0).reshape(*in_bag.shape, *[1] * (predictions.ndim - 2))
    count = left_out.sum(0)
    return np.where(count > 0, np.where(left_out, predictions, 0).sum(0) / np.maximum(count, 1), np.nan)


def _out_of_bag_losses(
    predictions: np.ndarray, out_of_bag: np.ndarray, in_bag: np.ndarray, data: Data, votes: bool
) -> np.ndarray:
    """Returns losses of rows by trees that were not trained on them, ``(n,)``; their mean is expected of all trees.

    A row without such a tree has the loss NaN. For votes, the loss is 1 for a wrong class and 0 for the right class.
    Otherwise, the out-of-bag prediction for a row uses only a few trees. The loss of the mean of k trees is about ``a +
    b / k`` (exactly so for squared errors, in expectation). The losses of single trees and of the out-of-bag means
    determine a and b. All losses are lowered by the same number, so that their mean is the loss of the mean of all
    trees.
    """
    table, out = data.table, in_bag == 0
    count = out.sum(0)
    losses, rows = np.full(len(count), np.nan), count > 0
    if not rows.any():
        return losses
    if votes:
        losses[rows] = 1 - table.task.hits(out_of_bag[rows], table.y[rows])
        return losses
    of_rows = lambda answers, rows: row_losses(table.task, answers[rows], table.y[rows], data.scaling)
    losses[rows] = np.nan_to_num(of_rows(out_of_bag, rows), nan=np.inf, posinf=np.inf)
    mean = lambda values: float(np.average(values[rows], weights=None if table.weight is None else table.weight[rows]))
    safe = np.maximum(count, 1)
    inverse = mean(1 / safe)
    if inverse < 1:
        single = np.zeros(len(rows))
        for answers, left_out in zip(predictions, out, strict=True):
            single[left_out] += of_rows(answers, left_out)
        slope = (mean(single / safe) - mean(losses)) / (1 - inverse)
        losses -= slope * (inverse - 1 / len(predictions)) if np.isfinite(slope) else 0.0
    return losses


def _score(predictions: np.ndarray, table: Table) -> float:
    """Returns R^2 or accuracy over the rows with out-of-bag predictions."""
    finite = np.isfinite(predictions.reshape(len(predictions), -1)[:, 0])
    y, weight = table.y[finite], None if table.weight is None else table.weight[finite]
    return float("nan") if len(y) < 2 else table.task.score(predictions[finite], y, weight)
