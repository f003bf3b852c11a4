"""Algorithm 1 of GET with successive halving: many starts under increasingly sharp routings, the first from CART.

:class:`jtrees.GET` and :class:`jtrees.RADDT` are recipes of this algorithm. Each recipe adds its soft routing and its
sharpnesses.

1. ``grown_carts`` and ``initial_starts`` (starts.py) grow CART, and draw the sharpnesses and the random splits (lines
   3-5).
2. ``train_stages`` (stages.py) trains a start under one sharpness after another (lines 7-15). Each stage refits the
   leaves by hard routing, takes the updates, and evaluates hard trees during training. It passes the best splits to the
   next stage.
3. :meth:`Annealed.search` calls ``train_stages`` twice with halving: briefly for all starts, then with all updates for
   the best starts.
4. At the end, the best tree is refitted in the user's units and compared with CART (lines 16-18).
"""

from dataclasses import dataclass
import itertools
from typing import Any

from jaxtyping import Array
import numpy as np

from jtrees import leaves as kinds, topology, training, validation as checks
from jtrees.data import Data, Scaling, Table
from jtrees.methods.annealed import context
from jtrees.methods.annealed.stages import Ended, held_out_loss, train_stages
from jtrees.methods.annealed.starts import (
    DEVIATIONS,
    Carts,
    Start,
    cart_of_table,
    composed,
    drawn_fold,
    grown_carts,
    initial_starts,
    strengths_of,
)
from jtrees.search import Fitted, Problem, Recipe, Report, Run, gather
from jtrees.search.precondition import WIDEST
from jtrees.search.sample import most_rows, rows_used, sampled
from jtrees.tasks import Task
from jtrees.tree import ObliqueTree

# Bounds of the slopes of linear leaves in the user's units. A slope within the bounds, times a fraction of a deviation,
# stays in float32's range.
_FLATTEST, _STEEPEST = 1e-37, 1e36
_NONE_EXPECTED = 1e30  # a criterion above it, for targets in [0, 1], means that no expected error is defined
# With halving, all starts first train for a tenth of the epochs. A fifth of the starts continues, and at least two.
_SHORT, _KEPT, _FEWEST_KEPT = 10, 5, 2


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

    def sharpness(self, uniform: np.ndarray) -> np.ndarray:
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

    @property
    def _continuing(self) -> int:
        """Number of starts that continue after the short stages."""
        return max(_FEWEST_KEPT, self.starts // _KEPT)

    @property
    def _halves(self) -> bool:
        """Whether there are short stages."""
        return self.halving and self.starts > self._continuing

    def between(self, run: Run, splits: ObliqueTree, score: Array) -> tuple[ObliqueTree, Array]:
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

    async def search(self, problem: Problem) -> Fitted:
        """Trains all starts for a tenth of the updates, then the best starts for all updates.

        The short stages hold out rows. The losses on the held-out rows compare the starts with each other and with
        CART. No rows are held out if there is a validation set. Linear leaves hold out no rows either: their criterion
        is an expected error on new data.
        """
        scaled = problem.replace(data=None)  # a training needs no table
        sample = sampled(scaled, most_rows(self))
        holds_out = self._halves and self.leaves == "constant" and not problem.validates
        fold = drawn_fold(self, sample) if holds_out else None
        carts = await grown_carts(self, sample, fold)
        starts = initial_starts(self, sample, carts)
        if not self._halves:
            stages = (train_stages(sample.times(s.matrix), s.splits, s.long, self.updates) for s in starts)
            return self._fitted(problem, starts, carts, [[result] for result in await gather(*stages)])

        folds = [sample] if fold is None else [sample.without(fold == number) for number in range(fold.max() + 1)]
        on_fold = [folds[k % len(folds)] for k in range(self.starts)]
        epochs = max(1, self.updates // _SHORT)
        stages = (
            train_stages(p.times(s.matrix), s.splits, s.short, epochs) for p, s in zip(on_fold, starts, strict=True)
        )
        short = await gather(*stages)
        scores, beaten_by = np.array([result.score for result in short]), -1
        if fold is not None:
            scores, beaten_by = await self._compared(on_fold, starts, short, carts, sample, fold)
        order = np.argsort(scores, kind="stable")[: self._continuing] if beaten_by < 0 else []
        chosen = [int(k) for k in order if np.isfinite(scores[k])]
        stages_of_start = [[result] for result in short]
        if chosen and (fold is not None or problem.monitor.has_time()):
            # If the scores of all stages are compared, all stages must train on one sample of the rows.
            fresh = sampled(scaled, most_rows(self), 0 if fold is None and not problem.validates else 1)
            if fold is not None:  # the program of the short stages serves the long stages too
                fresh = fresh.without(np.zeros(fresh.shape[0], bool))
            stages = (
                train_stages(fresh.times(starts[k].matrix), short[k].splits, starts[k].long, self.updates)
                for k in chosen
            )
            for k, result in zip(chosen, await gather(*stages), strict=True):
                stages_of_start[k].append(result)
        return self._fitted(problem, starts, carts, stages_of_start, beaten_by, skipped=0 if fold is None else 1)

    async def _compared(
        self,
        on_fold: list[Problem],
        starts: list[Start],
        short: list[Ended],
        carts: Carts,
        sample: Problem,
        fold: np.ndarray,
    ) -> tuple[np.ndarray, int]:
        """Returns the scores of all starts, and the CART tree that beats the starts, of :func:`beside_cart`."""
        judged = [(p, composed(s.splits, start.matrix)) for p, s, start in zip(on_fold, short, starts, strict=True)]
        judged += [(on_fold[number], tree) for number, trees in enumerate(carts.without) for tree in trees]
        values = await gather(*(problem.map(held_out_loss, splits) for problem, splits in judged))
        losses = np.array([value.host for value in values])
        scores = np.where([result.finite for result in short], losses[: len(starts)], np.inf)
        if not carts.trees:
            return scores, -1
        share = np.bincount(fold + 1, sample.batch.weight)[1:]
        return beside_cart(scores, losses[len(starts) :].reshape(len(share), -1), share, self._continuing)

    # --- The result ---

    def _fitted(
        self,
        problem: Problem,
        starts: list[Start],
        carts: Carts,
        stages: list[list[Ended]],
        beaten_by: int = -1,
        skipped: int = 0,
    ) -> Fitted:
        """Returns the result.

        Args:
          problem: the problem.
          starts: the starts.
          carts: CART's trees.
          stages: the short and long stages of each start.
          beaten_by: the number of the CART tree that beats all starts, or -1.
          skipped: 1 if the short stages held out rows. Then the tree of a short stage cannot be returned.
        """
        lowest = [min((result.score for result in start_stages[skipped:]), default=np.inf) for start_stages in stages]
        best = int(np.argmin(lowest))
        history = _table([[result.losses for result in start_stages] for start_stages in stages], np.nan)
        splits, step = None, 0
        if np.isfinite(lowest[best]):
            result = min(stages[best][skipped:], key=lambda result: result.score)
            splits, step = composed(result.splits, starts[best].matrix), result.step
        if splits is None and not carts.trees:
            raise FloatingPointError(f"all {self.starts} starts became non-finite: try a smaller learning_rate")
        fitted = Fitted(carts.trees[0] if splits is None else splits, lowest[best], step, history)
        if problem.data is None:
            return fitted
        with problem.finishing():
            return self._finished(problem, fitted, starts, carts, stages, None if splits is None else best, beaten_by)

    def _finished(
        self,
        problem: Problem,
        fitted: Fitted,
        starts: list[Start],
        carts: Carts,
        stages: list[list[Ended]],
        best: int | None,
        beaten_by: int,
    ) -> Fitted:
        """Returns the best tree in the user's units, of the best start and CART (GET, Algorithm 1, lines 16 to 18)."""
        data: Any = problem.data
        cart_splits = self._carts(carts.trees, problem)
        refitted_carts = [
            [(*self._refitted(splits, data), -1 - i) for splits in trees] for i, trees in enumerate(cart_splits)
        ]
        cart_losses = [min(loss for _, loss, _ in trees) for trees in refitted_carts]
        cart_loss, ridge_loss = (*cart_losses, np.nan, np.nan)[:2]
        candidates = refitted_carts[beaten_by] if beaten_by >= 0 else [*itertools.chain(*refitted_carts)]
        if best is not None and beaten_by < 0:
            candidates.append((*self._refitted(data.scaling.restore_splits(fitted.scaled), data), best))
        tree, loss, chosen = min(candidates, key=lambda candidate: candidate[1])  # CART wins a tie
        scores = _table([[result.scores for result in start_stages] for start_stages in stages], np.inf)
        sharpness = np.array([np.append(start.short, start.long) for start in starts])
        is_preconditioned = self.precondition != 0 and (self.precondition != "auto" or problem.shape[1] <= WIDEST)
        report = AnnealedReport(
            chosen=chosen,
            dropped=sum(not all(result.finite for result in start_stages) for start_stages in stages),
            cart_loss=float(cart_loss),
            ridge_loss=float(ridge_loss),
            sharpness=sharpness[:, 0 if self._halves else self.stages :][:, : scores.shape[1]],
            losses=scores.astype(np.float64) * data.loss_unit,
            steps=_table([[result.steps for result in start_stages] for start_stages in stages], 0),
            strengths=strengths_of(self, len(carts.trees) > 1) if is_preconditioned else None,
            rows=rows_used(self, len(data.table.x)),
        )
        if self.shrink and self.leaves == "constant":
            tree = data.refit(tree, "constant", shrink=True)[0]
            loss = data.loss(tree)
        tree = tree.merged()
        return fitted._replace(model=tree, tree=tree, loss=loss, report=report)

    def _refitted(self, splits: ObliqueTree, data: Data) -> tuple[ObliqueTree, float]:
        """Returns the tree refitted in the user's units, and the loss that decides between the trees."""
        tree, criterion = data.refit(splits, self.leaves)
        loss = data.loss(tree)
        if data.validation is not None or self.leaves == "constant":
            return tree, loss
        # The loss is at least the tree's training loss, which can exceed the criterion in rows with outliers.
        # If too few rows have weight for an expected error, the loss is the training loss alone.
        return tree, max(criterion if criterion < _NONE_EXPECTED * data.loss_unit else 0.0, loss)

    def _carts(self, trees: list[ObliqueTree], problem: Problem) -> list[list[ObliqueTree]]:
        """Returns the splits of CART's trees in the user's units: a list of candidates for each tree.

        CART's tolerances are absolute, and its thresholds are exact on raw features only. So CART is grown twice: on
        scaled features, and on raw features if float32 represents them.
        """
        data: Any = problem.data
        carts = [[data.scaling.restore_splits(tree)] for tree in trees]
        if carts and data.scaling.origin is None and problem.monitor.has_time():
            table = data.table
            options = table.task, table.monotone, self.depth, self.leaves, most_rows(self)
            arrays = table.x, table.y, table.weight
            carts[0].append(problem.host(cart_of_table, *arrays, *options, monitor=problem.monitor.part(0.5)))
        return carts


def beside_cart(
    losses: np.ndarray, cart_losses: np.ndarray, share: np.ndarray, continuing: int
) -> tuple[np.ndarray, int]:
    """Returns the scores of the starts of a run, and the number of the CART tree that beats all of them, or -1.

    CART is grown without the held-out rows. If CART predicts the held-out rows as well as the best start, no start
    continues: the splits of many features follow noise. If there are several folds, the starts that would continue must
    be better than CART on average. Folds differ in difficulty, so the score of a start is its loss minus CART's loss.
    The mean over several starts guards against a lucky loss.

    Args:
      losses: loss of each start on the rows that it holds out, infinite if it is not finite, ``(starts,)``.
      cart_losses: loss of each CART tree on each fold, ``(folds, trees)``.
      share: total weight of each fold, ``(folds,)``.
      continuing: number of starts that would continue.
    """
    best = int((share @ cart_losses).argmin())
    differences, several = losses - np.resize(cart_losses[:, best], len(losses)), len(cart_losses) > 1
    lowest = np.sort(differences)[: continuing if several else 1]
    lowest = lowest[np.isfinite(lowest)]
    is_better = len(lowest) > 0 and lowest.mean() < 0
    return differences if several else losses, -1 if is_better else best


def _table(rows: list[list[np.ndarray]], gap: float) -> np.ndarray:
    """Returns a table with the numbers of each start in a row; short rows are filled with ``gap``."""
    joined = [np.concatenate(parts) if parts else np.zeros(0) for parts in rows]
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
