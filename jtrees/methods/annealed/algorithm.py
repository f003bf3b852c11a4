"""Algorithm 1 of GET with successive halving: many starts under increasingly sharp routings, the first from CART.

:class:`jtrees.GET` and :class:`jtrees.RADDT` are recipes of this algorithm. Each recipe adds its soft routing and its
sharpnesses.

1. ``initial_starts`` (starts.py) draws the sharpnesses and the random splits of all starts, and grows CART (lines 3-5).
2. ``train_stages`` (stages.py) trains all starts under one sharpness after another (lines 7-15). Each stage refits the
   leaves by hard routing, takes the updates, and evaluates hard trees during training. It passes the best splits to the
   next stage.
3. :meth:`Annealed.search` calls ``train_stages`` twice with halving: briefly for all starts, then with all updates for
   the best starts.
4. :meth:`Annealed.finish` refits the best tree in the user's units and compares it with CART (lines 16-18).

A run is a fit with its own recipe, key and rows. Start k of run i has the number ``i * starts + k``. A start has two
sharpnesses for each stage. The first half of its sharpnesses is for the short stages, and the second half for the long
stages.
"""

from dataclasses import dataclass
import itertools
from typing import Any, NamedTuple

from jaxtyping import Array
import numpy as np

from jtrees import leaves as kinds, topology, training, validation as checks
from jtrees.data import Data, Scaling, Table
from jtrees.methods.annealed import context
from jtrees.methods.annealed.stages import Ended, Start, held_out_loss, train_stages
from jtrees.methods.annealed.starts import (
    DEVIATIONS,
    Grown,
    composed,
    folds_of,
    grown_trees,
    held_out_rows,
    initial_starts,
    strengths_of,
)
from jtrees.search import Finished, Recipe, Report, Run, Runs, SearchResult
from jtrees.search.cart import grown_cart
from jtrees.search.monitor import Monitor
from jtrees.search.sample import drawn_rows, most_rows, rows_used, sampled
from jtrees.tasks import Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree

# Bounds of the slopes of linear leaves in the user's units. A slope within the bounds, times a fraction of a deviation,
# stays in float32's range.
_FLATTEST, _STEEPEST = 1e-37, 1e36
_NONE_EXPECTED = 1e30  # a criterion above it, for targets in [0, 1], means that no expected error is defined
# With halving, all starts first train for a tenth of the epochs. A fifth of the starts continues, and at least two: on
# one CPU, two starts take the time of one start.
_SHORT, _KEPT, _FEWEST_KEPT = 10, 5, 2


class _Found(NamedTuple):
    """The values that ``finish`` needs besides the best splits.

    Attributes:
      start: number of the best start.
      grown: CART's trees on all rows.
      beaten_by: number of the CART tree that predicts the held-out rows at least as well as every start, or -1.
      sharpness: sharpness of each start in each stage, ``(starts, stages)``.
      scores: score of each start in each stage, ``(starts, stages)``.
      steps: the update with that score, ``(starts, stages)``.
      strengths: strength of the preconditioner of each start, ``(starts,)``, or None.
      dropped: number of starts that became non-finite.
    """

    start: int
    grown: list[ObliqueTree]
    beaten_by: int
    sharpness: np.ndarray
    scores: np.ndarray
    steps: np.ndarray
    strengths: np.ndarray | None
    dropped: int


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class AnnealedReport(Report):
    """The report of :class:`jtrees.GET` and :class:`jtrees.RADDT`.

    The short stages of halving come first. In the long stages, the losses of the starts that did not continue are
    infinite, and their history is NaN.

    Attributes:
      chosen: the index of the best start. It is -1 if the tree is CART on the features, and -2 if the tree is CART on
        the outputs of the ridge regression.
      dropped: the number of starts that became non-finite.
      cart_loss: the loss of CART on the features, or NaN.
      ridge_loss: the loss of CART on the outputs of the ridge regression, or NaN.
      sharpness: the sharpness of each start in each stage, ``(starts, stages)``.
      losses: the loss of the best hard tree of each start in each stage, ``(starts, stages)``.
      steps: the epoch of that tree, ``(starts, stages)``.
      strengths: the strength of the preconditioner of each start, ``(starts,)``, or None without preconditioning.
      rows: the number of rows that each stage was trained on.
    """

    chosen: int
    dropped: int
    cart_loss: float
    ridge_loss: float
    sharpness: np.ndarray
    losses: np.ndarray
    steps: np.ndarray
    strengths: np.ndarray | None = None
    rows: int | None = None


class Annealed(Recipe):
    """A recipe of the annealed algorithm.

    A subclass has the options ``depth``, ``leaves``, ``starts``, ``learning_rate``, ``cart``, ``ridge``,
    ``precondition``, ``shrink``, ``halving`` and ``rows``.
    """

    depth: Any
    leaves: Any
    starts: Any
    cart: Any
    ridge: Any
    precondition: Any
    shrink: Any
    halving: Any
    rows: Any

    def method(self, sharpness: Array, task: Task, *, scored: bool) -> training.Method:
        """Returns the method under a sharpness. If ``scored``, its loss also returns the score of the hard tree."""
        raise NotImplementedError

    def sharpness(self, drawn: np.ndarray) -> np.ndarray:
        """Maps draws from U(0, 1), ``(starts, stages)``, to the sharpness of each start in each stage."""
        raise NotImplementedError

    @property
    def stages(self) -> int:
        """Number of sharpnesses."""
        raise NotImplementedError

    @property
    def updates(self) -> int:
        """Number of updates in each stage."""
        raise NotImplementedError

    def between(self, run: Run, splits: ObliqueTree, matrix: Array | None, score: Array) -> tuple[ObliqueTree, Array]:
        """Returns the initial splits of the next stage and their score."""
        return splits, score

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        kinds.kind_of(self.leaves, task)  # raises for linear leaves with a loss of classes
        numbers = topology.num_nodes(self.depth) * (shape[1] + 1)  # parameters of the splits of a start
        checks.check_count("starts", self.starts, most=checks.MAX_NUMBERS // numbers)
        most_rows(self)

    def tree_leaves(self, task: Task) -> str:
        return self.leaves

    def keeps_monotone(self, task: Task) -> bool:
        return self.leaves == "constant"

    def settled(self, weak: bool = False) -> Any:
        return context.settled(self, weak)

    def scaling(self, table: Table) -> Scaling:
        fitted = Scaling.fit(table, DEVIATIONS)
        if self.leaves == "linear":
            _check_slopes(fitted)
        return fitted

    # --- The procedure ---

    def search(self, runs: Runs) -> list[SearchResult]:
        """Trains all starts for a tenth of the updates, then the best starts for all updates; returns the best trees.

        The short stages hold out rows. The losses on the held-out rows compare the starts with each other and with
        CART. No rows are held out if there is a validation set. Linear leaves hold out no rows either: their criterion
        is an expected error on new data.
        """
        all_rows, runs = runs, sampled(runs, most_rows(self))
        kept = max(_FEWEST_KEPT, self.starts // _KEPT)
        halves = self.halving and self.starts > kept
        holds_out = halves and self.leaves == "constant" and runs.validation is None
        folds = folds_of(self, runs) if holds_out else None
        grown = grown_trees(self, runs, folds)
        starts, each = initial_starts(self, runs, grown), runs.repeat(self.starts, together=2)
        first, last = slice(0, self.stages), slice(self.stages, None)  # of the sharpnesses of a start
        if not halves:
            starts = [one.in_stages(last) for one in starts]
            ended = train_stages(each, starts, self.updates)
            return self._results(starts, grown, [], dict(enumerate(ended)), [-1] * len(runs))

        out = None if folds is None else [rows for fold in folds for rows in held_out_rows(fold, self.starts)]
        short = each.on(held_out=out)
        ended = train_stages(short, [one.in_stages(first) for one in starts], max(1, self.updates // _SHORT))
        scores, beaten_by = np.array([end.score for end in ended]), [-1] * len(runs)
        if folds is not None:
            scores, beaten_by = self._compared(short, starts, ended, grown, folds, kept)
        chosen = _lowest(scores.reshape(len(runs), -1), kept, beaten_by)
        going = [starts[k].in_stages(last)._replace(splits=ended[k].splits) for k in chosen]
        alike, longer = folds is None, []
        goes_on = chosen and (not alike or runs.monitor.has_time())
        if goes_on:
            # If the scores of all stages are compared, all stages must train on one sample of the rows.
            number = 0 if alike and runs.validation is None else 1
            anew = sampled(all_rows, most_rows(self), number).repeat(self.starts, together=2).select(chosen)
            # An empty mask instead of None: the program of the short stages serves the long stages too.
            none = None if out is None else [np.zeros(anew.shape[0], bool)] * len(chosen)
            longer = train_stages(anew.on(held_out=none), going, self.updates)
        of_chosen = dict(zip(chosen, longer, strict=True)) if goes_on else {}
        return self._results(starts, grown, ended, of_chosen, beaten_by, alike)

    def _compared(
        self,
        runs: Runs,
        starts: list[Start],
        ended: list[Ended],
        grown: list[Grown],
        folds: list[np.ndarray],
        kept: int,
    ) -> tuple[np.ndarray, list[int]]:
        """Returns the scores of all starts, and the CART tree that beats each run, of :func:`beside_cart`."""
        index = [*range(len(starts))]
        splits = [composed(end.splits, one.matrix) for one, end in zip(starts, ended, strict=True)]
        for i, of_run in enumerate(grown):
            for fold, trees in enumerate(of_run.without):
                index += [i * self.starts + fold] * len(trees)
                splits += trees
        judges = runs.select(index)
        losses = judges.fetch(judges.map(held_out_loss, splits))
        of_starts, of_grown = np.array(losses[: len(starts)]).reshape(len(grown), -1), iter(losses[len(starts) :])
        scores, beaten_by = np.where(np.reshape([end.finite for end in ended], of_starts.shape), of_starts, np.inf), []
        for i, (of_run, fold) in enumerate(zip(grown, folds, strict=True)):
            beaten_by.append(-1)
            if of_run.trees:
                lost = np.array([[next(of_grown) for _ in trees] for trees in of_run.without])
                weight = runs.on(held_out=None).rows(i * self.starts).weight
                share = np.bincount(fold + 1, weight)[1:]
                scores[i], beaten_by[i] = beside_cart(scores[i], lost, share, kept)
        return scores.ravel(), beaten_by

    def _results(
        self,
        starts: list[Start],
        grown: list[Grown],
        short: list[Ended],
        long: dict[int, Ended],
        beaten_by: list[int],
        alike: bool = False,
    ) -> list[SearchResult]:
        """Returns the result of each run.

        Args:
          starts: all starts of all runs.
          grown: CART's trees of each run.
          short: the short stages of all starts, or an empty list.
          long: the long stages of the starts that continued, by the number of the start.
          beaten_by: for each run, the number of the CART tree that beats all its starts, or -1.
          alike: whether the short stages held out no rows. Only then can the tree of a short stage be returned.
        """
        results = []
        for i, of_run in enumerate(grown):
            numbers = range(i * self.starts, (i + 1) * self.starts)
            stages = [[*short[k : k + 1], *([long[k]] if k in long else [])] for k in numbers]
            counted = [some if alike else some[bool(short) :] for some in stages]
            results.append(
                self._result(starts[numbers.start : numbers.stop], of_run.trees, stages, counted, beaten_by[i])
            )
        return results

    def _result(
        self,
        starts: list[Start],
        trees: list[ObliqueTree],
        stages: list[list[Ended]],
        counted: list[list[Ended]],
        beaten_by: int,
    ) -> SearchResult:
        """Returns the result of a run, from all stages of each start and from the stages whose trees compete."""
        lowest = [min((end.score for end in some), default=np.inf) for some in counted]
        start = int(np.argmin(lowest))
        scores = _table([[end.scores for end in some] for some in stages], np.inf)
        steps = _table([[end.steps for end in some] for some in stages], 0)
        history = _table([[end.losses for end in some] for some in stages], np.nan)
        dropped = sum(not all(end.finite for end in some) for some in stages)
        sharpness = np.array([one.sharpness for one in starts])[:, : scores.shape[1]]
        strengths = None if starts[0].matrix is None else strengths_of(self, len(trees) > 1)
        found = _Found(start, trees, beaten_by, sharpness, scores, steps, strengths, dropped)
        if not np.isfinite(lowest[start]):
            splits = trees[0] if trees else starts[0].splits
            return SearchResult(splits, np.inf, bool(trees), 0, found, history)
        best = min(counted[start], key=lambda end: end.score)
        splits = composed(best.splits, starts[start].matrix)
        return SearchResult(splits, best.score, True, best.step, found, history)

    # --- The result ---

    def finish(self, result: SearchResult, data: Data, *, key: Any = None, monitor: Monitor | None = None) -> Finished:
        found: _Found = result.report
        if not result.finite:
            raise FloatingPointError(f"all {self.starts} starts became non-finite: try a smaller learning_rate")
        carts = self._carts(found.grown, data, Monitor() if monitor is None else monitor)
        by_cart = [[(*self._refitted(splits, data), -1 - i) for splits in trees] for i, trees in enumerate(carts)]
        losses = [min(loss for _, loss, _ in one) for one in by_cart]
        cart_loss, ridge_loss = (*losses, np.nan, np.nan)[:2]
        candidates = by_cart[found.beaten_by] if found.beaten_by >= 0 else [*itertools.chain(*by_cart)]
        if np.isfinite(result.score) and found.beaten_by < 0:
            splits = data.scaling.restore_splits(result.model)
            candidates.append((*self._refitted(splits, data), found.start))
        tree, loss, chosen = min(candidates, key=lambda candidate: candidate[1])  # CART wins a tie
        report = AnnealedReport(
            chosen=chosen,
            dropped=found.dropped,
            cart_loss=float(cart_loss),
            ridge_loss=float(ridge_loss),
            sharpness=found.sharpness,
            losses=found.scores.astype(np.float64) * data.loss_unit,
            steps=found.steps,
            strengths=found.strengths,
            rows=rows_used(self, len(data.table.x)),
        )
        if self.shrink and self.leaves == "constant":
            tree = data.refit(tree, "constant", shrink=True)[0]
            loss = data.loss(tree)
        tree = tree.merged()
        return Finished(tree, tree, loss, report)

    def _refitted(self, splits: ObliqueTree, data: Data) -> tuple[ObliqueTree, float]:
        """Returns the tree refitted in the user's units, and the loss that decides between the trees."""
        tree, criterion = data.refit(splits, self.leaves)
        loss = data.loss(tree)
        if data.validation is not None or self.leaves == "constant":
            return tree, loss
        # The loss is at least the tree's training loss, which can exceed the criterion in rows with outliers.
        # If too few rows have weight for an expected error, the loss is the training loss alone.
        return tree, max(criterion if criterion < _NONE_EXPECTED * data.loss_unit else 0.0, loss)

    def _carts(self, grown: list[ObliqueTree], data: Data, monitor: Monitor) -> list[list[ObliqueTree]]:
        """Returns the splits of the grown trees in the user's units: a list of candidates for each grown tree.

        CART's tolerances are absolute, and its thresholds are exact on raw features only. So CART is grown twice: on
        scaled features, and on raw features if float32 represents them.
        """
        carts = [[data.scaling.restore_splits(tree)] for tree in grown]
        if carts and data.scaling.origin is None and monitor.has_time():
            table, task = data.table, data.table.task
            rows = Batch(table.x, table.y, table.weight)  # type: ignore[arg-type]
            most = most_rows(self)
            if most is not None and most < len(table.x):
                some, weight = drawn_rows(table.y, table.weight, most, task, np.random.default_rng(0))
                rows = Batch(table.x[some], table.y[some], weight)  # type: ignore[arg-type]
            # As in scaled data, a feature with a non-increasing effect changes its sign.
            monotone, signs = None, np.ones(table.x.shape[1], np.float32)
            if table.monotone is not None:
                monotone, signs = np.not_equal(table.monotone, 0), np.where(np.less(table.monotone, 0), -signs, signs)
                rows = rows._replace(x=rows.x * signs.astype(rows.x.dtype))
            of_cart = lambda rows: grown_cart(rows, task, self.depth, self.leaves, monotone=monotone)
            tree = monitor.part(0.5).on_rows(of_cart, rows)
            carts[0].append(tree.replace(weights=np.asarray(tree.weights) * signs))
        return carts


def beside_cart(own: np.ndarray, grown: np.ndarray, share: np.ndarray, kept: int) -> tuple[np.ndarray, int]:
    """Returns the scores of the starts of a run, and the number of the CART tree that beats all of them, or -1.

    CART is grown without the held-out rows. If CART predicts the held-out rows as well as the best start, no start
    continues: the splits of many features follow noise. If there are several folds, the starts that would continue must
    be better than CART on average. Folds differ in difficulty, so the score of a start is its loss minus CART's loss.
    The mean over several starts guards against a lucky loss.

    Args:
      own: loss of each start on the rows that it holds out, infinite if it is not finite, ``(starts,)``.
      grown: loss of each CART tree on each fold, ``(folds, trees)``.
      share: total weight of each fold, ``(folds,)``.
      kept: number of starts that would continue.
    """
    best = int((share @ grown).argmin())
    ahead, several = own - np.resize(grown[:, best], len(own)), len(grown) > 1
    lowest = np.sort(ahead)[: kept if several else 1]
    lowest = lowest[np.isfinite(lowest)]
    is_better = len(lowest) > 0 and lowest.mean() < 0
    return ahead if several else own, -1 if is_better else best


def _lowest(scores: np.ndarray, kept: int, beaten_by: list[int]) -> list[int]:
    """Returns the numbers of the starts that continue: the lowest scores of each run that CART does not beat."""
    chosen = []
    for i, (own, beaten) in enumerate(zip(scores, beaten_by, strict=True)):
        order = np.argsort(own, kind="stable")[:kept] if beaten < 0 else []
        chosen += [i * len(own) + k for k in order if np.isfinite(own[k])]
    return chosen


def _table(rows: list[list[np.ndarray]], gap: float) -> np.ndarray:
    """Returns a table with the numbers of each start in a row; short rows are filled with ``gap``."""
    joined = [np.concatenate(one) if one else np.zeros(0) for one in rows]
    table = np.full((len(joined), max(map(len, joined))), gap, joined[0].dtype)
    for row, numbers in zip(table, joined, strict=True):
        row[: len(numbers)] = numbers
    return table


def _check_slopes(scaling: Scaling) -> None:
    """Raises ``ValueError`` if slopes in the user's units are outside the range of float32."""
    if scaling.y_unit is None:  # the leaves do not hold values in the units of the targets
        return
    varying = np.flatnonzero(~scaling.constant)
    slopes = np.atleast_1d(scaling.y_unit)[:, None] / scaling.x_unit[varying]
    if len(bad := np.argwhere((slopes < _FLATTEST) | (slopes > _STEEPEST))):
        output, column = bad[0][0], varying[bad[0][1]]
        raise ValueError(
            f"x and y must be in units in which linear leaves have slopes that float32 holds, got a range of "
            f"{np.atleast_1d(scaling.y_unit)[output]:.3g} in y and a deviation of "
            f"{scaling.x_unit[column] / DEVIATIONS:.3g} in column {column} of x: multiply one of them"
        )
