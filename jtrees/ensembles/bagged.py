"""Bagging of any recipe: models of bootstrap samples, trained side by side."""

from dataclasses import dataclass
import math
from typing import Any, Literal

import jax
import numpy as np

from jtrees import distributed, pytree, sharding, validation as checks
from jtrees.data import Data, Table
from jtrees.data.scaling import row_losses
from jtrees.ensembles.wrapper import Wrapper
from jtrees.forest import Forest, votes
from jtrees.search import Fitted, LeftOut, OutOfTimeError, Problem, Report, gather, option
from jtrees.tasks import Classification, Task

# The samples of the trees that are trained at a time take at most about this number of bytes. A sample has its features
# in float32, on the device too, and in the user's units in double precision.
_MEMORY, _COPIES = 2**30, 4


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BaggedReport(Report):
    """The report of :class:`jtrees.Bagged`, for the n rows of positive weight.

    Attributes:
      out_of_bag_score: weighted score of ``out_of_bag``: accuracy, R^2 (averaged over the targets, if there are
        several), 1 minus a ratio of losses, or the mean reward. NaN for fewer than two rows or constant targets.
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
class Bagged(Wrapper):
    """Bagging (Breiman 1996): many models of a recipe. Each model is fitted to a bootstrap sample, as in DGT-Forest.

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

    trees: int = option(30)
    fraction: float = option(1.0, above=0, most=1, traced=False)
    combine: Literal["mean", "vote"] | None = option(None)

    is_tree = False

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        if self.combine == "vote" and not isinstance(task, Classification):
            raise ValueError('combine must be "mean" in regression, got "vote"')
        checks.check_size("trees", self.trees, self._size(shape[0]))
        self.base.check(task, (self._size(shape[0]), shape[1]))

    def _size(self, n: int) -> int:
        """Returns the number of rows in a bootstrap sample of n rows."""
        return max(1, round(self.fraction * n))

    async def search(self, problem: Problem) -> Fitted:
        member = problem.replace(recipe=problem.recipe.base, is_member=True)
        bags, trees = self._bags(problem), member.repeat(self.trees)
        trees[1:] = [tree.replace(is_optional=True) for tree in trees[1:]]
        concurrent = max(1, _MEMORY // (_COPIES * 4 * math.prod(problem.shape)))
        samples = zip(trees, bags, np.arange(self.trees) >= concurrent, strict=True)
        results = await gather(*(self._tree(*sample) for sample in samples), concurrent=concurrent)
        finished = [(tree, rows) for tree, rows in zip(results, bags, strict=True) if isinstance(tree, Fitted)]
        failed = [error for error in results if isinstance(error, FloatingPointError)]
        if not finished:
            raise (failed or results)[0]
        if failed:
            distributed.warn(
                f"{len(failed)} of {self.trees} trees became non-finite and are left out: try a smaller learning_rate"
            )
        with problem.restoring():
            return self._forest(problem, *zip(*finished, strict=True))

    async def _tree(self, problem: Problem, rows: np.ndarray, begins_late: bool) -> Fitted:
        """Returns the result on a bootstrap sample, whose arrays are in memory while the search runs.

        Raises:
          OutOfTimeError: if the search would begin after the deadline.
        """
        if begins_late and not problem.monitor.has_time():
            raise OutOfTimeError("the deadline passed before the search of the tree began")
        return await self.base.search(problem.bootstrap(rows))

    def _bags(self, problem: Problem) -> np.ndarray:
        """Returns the rows of each bag, ``(trees, m)``, -1 for padding."""
        real, size = np.flatnonzero(problem.weighed), self._size(problem.shape[0])
        bags = problem.rng("bags").choice(real, (self.trees, size)).astype(np.int32)
        bags[:, self._size(len(real)) :] = -1  # a bag of a padded batch has the same fraction of padding
        return bags

    def _forest(self, problem: Problem, trees: tuple[Fitted, ...], bags: tuple[np.ndarray, ...]) -> Fitted:
        data: Any = problem.data
        combine: Any = self.combine or ("vote" if isinstance(data.table.task, Classification) else "mean")
        models = [tree.model for tree in trees]
        if isinstance(models[0], Forest):  # the held-out rows of each bag choose its number of trees
            longest: Any = max(models, key=len)
            if min(map(len, models)) < len(longest):
                origin = getattr(longest.trees, "origin", None)
                share = None if origin is None or origin.y is None else np.asarray(origin.y)[0]
                models = [model.padded(len(longest), share) for model in models]
        forest = Forest(jax.tree.map(_stacked, *models), combine)
        numbers: Any = problem.rows
        in_bag = np.stack([np.bincount(numbers[rows[rows >= 0]], minlength=len(data.table.x)) for rows in bags])
        predictions = np.stack([model.predict(data.table.x) for model in models]).astype(np.float64)
        predictions = votes(predictions) if combine == "vote" else predictions
        out_of_bag = _out_of_bag(predictions, in_bag)
        report = BaggedReport(
            out_of_bag_score=_score(out_of_bag, data.table),
            out_of_bag=out_of_bag,
            in_bag=in_bag,
            losses=np.array([tree.loss for tree in trees]),
            bases=[tree.report for tree in trees],
        )
        losses, loss = _out_of_bag_losses(predictions, out_of_bag, in_bag, data, combine == "vote"), data.loss(forest)
        return Fitted(
            scaled=None,
            score=loss / data.loss_unit,
            step=max(tree.step for tree in trees),
            history=joined([tree.history for tree in trees]),
            model=forest,
            loss=loss,
            report=report,
            left_out=LeftOut(losses, chose=False, several=True),
        )


def joined(histories: list[np.ndarray]) -> np.ndarray:
    """Returns the histories of runs, ``(..., updates)``, as one array; shorter histories are padded with NaN."""
    length = max(history.shape[-1] for history in histories)
    pad = lambda a: np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, length - a.shape[-1])], constant_values=np.nan)
    return np.stack([pad(np.asarray(history)) for history in histories])


def _stacked(*arrays: Any) -> Any:
    """Stacks arrays. NumPy arrays, which may be in double precision, remain NumPy arrays."""
    stacked = np.stack(arrays)
    return sharding.from_host(stacked) if isinstance(arrays[0], jax.Array) else stacked


def _out_of_bag(predictions: np.ndarray, in_bag: np.ndarray) -> np.ndarray:
    """Returns the mean prediction for each row, over the trees that were not trained on it."""
    left_out = (in_bag == 0).reshape(*in_bag.shape, *[1] * (predictions.ndim - 2))
    count = left_out.sum(0)
    return np.where(count > 0, np.where(left_out, predictions, 0).sum(0) / np.maximum(count, 1), np.nan)


def _out_of_bag_losses(
    predictions: np.ndarray, out_of_bag: np.ndarray, in_bag: np.ndarray, data: Data, votes: bool
) -> np.ndarray:
    """Returns losses of rows by trees that were not trained on them, ``(n,)``; their mean is expected of all trees."""
    # A row without such a tree has the loss NaN. For votes, the loss is 1 for a wrong class and 0 for the right class.
    # Otherwise, the out-of-bag prediction for a row uses only a few trees. The loss of the mean of k trees is about `a
    # + b / k` (exactly so for squared errors, in expectation). The losses of single trees and of the out-of-bag means
    # determine a and b. All losses are lowered by the same number, so that their mean is the loss of the mean of all
    # trees.
    table, out = data.table, in_bag == 0
    count = out.sum(0)
    losses, rows = np.full(len(count), np.nan), count > 0
    if not rows.any():
        return losses
    if votes:
        losses[rows] = 1 - table.task.hits(out_of_bag[rows], table.y[rows])
        return losses
    losses_at = lambda answers, rows: row_losses(table.task, answers[rows], table.y[rows], data.scaling)
    losses[rows] = losses_at(out_of_bag, rows)
    mean = lambda values: float(np.average(values[rows], weights=None if table.weight is None else table.weight[rows]))
    safe = np.maximum(count, 1)
    inverse = mean(1 / safe)
    if inverse < 1:
        single = np.zeros(len(rows))
        for answers, left_out in zip(predictions, out, strict=True):
            single[left_out] += losses_at(answers, left_out)
        slope = (mean(single / safe) - mean(losses)) / (1 - inverse)
        losses -= slope * (inverse - 1 / len(predictions)) if np.isfinite(slope) else 0.0
    return losses


def _score(predictions: np.ndarray, table: Table) -> float:
    """Returns R^2 or accuracy over the rows with out-of-bag predictions."""
    finite = np.isfinite(predictions.reshape(len(predictions), -1)[:, 0])
    y, weight = table.y[finite], None if table.weight is None else table.weight[finite]
    return float("nan") if len(y) < 2 else table.task.score(predictions[finite], y, weight)
