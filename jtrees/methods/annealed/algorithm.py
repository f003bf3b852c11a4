"""Algorithm 1 of GET with successive halving: many starts under increasingly sharp routings, the first from CART.

:class:`jtrees.GET` and :class:`jtrees.RADDT` are recipes of this algorithm. Each recipe adds its soft routing and its
sharpnesses.

1. ``grow_carts`` and ``initial_starts`` (starts.py) grow CART, which is from the authors' program, and draw the
   sharpnesses and the random splits (lines 4-6).
2. ``train_stages`` (stages.py) trains a start under one sharpness after another (lines 7-14).
3. :meth:`Annealed.search` calls ``train_stages`` twice with halving: briefly for all starts, then with all updates for
   the best starts.
4. At the end, the best tree is refitted in the user's units and compared with CART (line 15).

Not in the paper: trees of a boosted sum (boosted_tree.py), linear leaves of wide tables (wide.py), and fewer starts
before a near deadline (deadline.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
import itertools
from typing import Any, ClassVar, NamedTuple

from jaxtyping import Array
import numpy as np

from jtrees import leaves as kinds, topology, training, validation as checks
from jtrees.data import Data, Scaling, Table
from jtrees.data.scaling import check_slopes, with_map
from jtrees.leaves.narrow import Narrowing, selected
from jtrees.methods.annealed import boosted_tree
from jtrees.methods.annealed.deadline import in_time, seconds_of_shrinkage
from jtrees.methods.annealed.stages import StartResult, held_out_loss, train_stages
from jtrees.methods.annealed.starts import (
    DEVIATIONS,
    Carts,
    Start,
    cart_of_table,
    grow_carts,
    held_out_rows,
    initial_starts,
)
from jtrees.methods.annealed.wide import narrowed
from jtrees.search import Fitted, Problem, Recipe, Report, Run, gather
from jtrees.search.recipe import GrowArguments
from jtrees.search.sample import most_rows, rows_used, sampled
from jtrees.tasks import Task
from jtrees.tree import ObliqueTree

_NONE_EXPECTED = 1e30  # a criterion above it, for targets in [0, 1], means that no expected error is defined
# With halving, all starts first train for a tenth of the epochs. A fifth of the starts continues, and at least two.
_SHORT, _KEPT, _FEWEST_KEPT = 10, 5, 2
_WEAK_ROWS, _WEAK_ROWS_OF_LEAF = 4000, 60  # rows of a round of boosting, and fewest rows of a round for each leaf


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


class Default(NamedTuple):
    """The value of an option that is None: for a single tree, and for a tree of a boosted sum."""

    single: Any
    boosted: Any


class Annealed(Recipe):
    """A recipe of the annealed algorithm.

    A subclass has the options below, and the options in ``defaults``.

    Attributes:
      soft: the function that returns the method, with the arguments of :func:`jtrees.methods.get`.
      defaults: the values of the options that are None.
    """

    soft: ClassVar[Callable[..., training.Method]]

    # The values for a boosted sum were chosen for GET, by its losses on held-out rows.
    defaults: ClassVar[dict[str, Default]] = {
        "starts": Default(10, boosted=1),
        "epochs": Default(None, boosted=20),
        "learning_rate": Default(0.01, boosted=0.03),
        "cart": Default(True, boosted="binned"),
        "ridge": Default(True, boosted=False),
        "precondition": Default("auto", boosted=0.0),
        "shrink": Default(True, boosted=False),
        "halving": Default(True, boosted=False),
    }

    depth: Any
    leaves: Any
    starts: Any
    epochs: Any
    l1: Any
    implementation: Any
    precondition: Any
    shrink: Any
    halving: Any
    rows: Any

    def method(self, sharpness: Array, task: Task, *, scored: bool) -> training.Method:
        """Returns the method under a sharpness. If ``scored``, its loss also returns the score of the hard tree."""
        options: Any = {"leaves": self.leaves, "l1": self.l1, "implementation": self.implementation}
        return self.soft(self.depth, sharpness, task=task, scored=scored, **options)

    @property
    def sharpness_ranges(self) -> np.ndarray:
        """Lowest and highest sharpness of each stage, ``(stages, 2)``. Each start draws its sharpnesses from them."""
        raise NotImplementedError

    @property
    def stages(self) -> int:
        """Number of sharpnesses."""
        return len(self.sharpness_ranges)

    @property
    def updates(self) -> int:
        """Number of updates in each stage."""
        return self.epochs

    @property
    def _continuing(self) -> int:
        """Number of starts that continue after the short stages."""
        return max(_FEWEST_KEPT, self.starts // _KEPT)

    @property
    def halves(self) -> bool:
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

    def with_defaults(self) -> Any:
        return self._filled("single")

    def with_boosting_defaults(self) -> Any:
        rows = max(_WEAK_ROWS, _WEAK_ROWS_OF_LEAF * 2**self.depth) if self.rows == "auto" else self.rows
        return self._filled("boosted").replace(rows=rows)

    def _filled(self, tree: str) -> Any:
        """Returns the recipe with the values for a single tree or a tree of a sum in the options that are None."""
        missing = [name for name in self.defaults if getattr(self, name) is None]
        return self.replace(**{name: getattr(self.defaults[name], tree) for name in missing})

    def scaling(self, table: Table) -> Scaling:
        fitted = Scaling.fit(table, DEVIATIONS)
        if self.leaves == "linear":
            check_slopes(fitted, DEVIATIONS)
        return fitted

    # --- A tree of a boosted sum ---

    async def grow_arguments(self, problem: Problem, trees: int) -> GrowArguments | None:
        # A subclass with another ``search`` finds other trees than ``grow``.
        return boosted_tree.grow_arguments(self, problem, trees) if type(self).search is Annealed.search else None

    def grow(self, run: Run, edges: Array, codes: Array, drawn: tuple[Array, Array]) -> tuple[ObliqueTree, Array]:
        """Returns the splits of the single start from CART over bins: see ``boosted_tree.grow``."""
        return boosted_tree.grow(run, edges, codes, drawn)

    # --- The procedure ---

    async def search(self, problem: Problem) -> Fitted:
        """Trains all starts for a tenth of the updates, then the best starts for all updates.

        The short stages hold out rows. The losses on the held-out rows compare the starts with each other and with
        CART. No rows are held out if there is a validation set. Linear leaves hold out no rows either: their criterion
        is an expected error on new data.
        """
        recipe = in_time(self, problem)
        return await recipe._search(problem.replace(recipe=recipe))

    async def _search(self, problem: Problem) -> Fitted:
        """Returns the result of :meth:`search`, with all starts."""
        all_rows, narrowing = await narrowed(problem)
        sample = sampled(all_rows, most_rows(self))
        validates = problem.has_validation_set
        holds_out = self.halves and self.leaves == "constant" and not validates
        masks = held_out_rows(sample) if holds_out else []
        carts = await grow_carts(sample, masks)
        starts = initial_starts(sample, carts)
        if not self.halves:
            full = await gather(*(train_stages(sample, s.splits, s.long, self.updates, s.matrix) for s in starts))
            return self._fitted(problem, starts, carts, [[result] for result in full], narrowing=narrowing)

        folds, epochs = [sample.holding_out(mask) for mask in masks] or [sample], max(1, self.updates // _SHORT)
        stages = (
            train_stages(folds[k % len(folds)], start.splits, start.short, epochs, start.matrix)
            for k, start in enumerate(starts)
        )
        short = await gather(*stages)
        scores, best_cart = np.array([result.score for result in short]), -1
        if masks:
            scores, best_cart = await self._compared(folds, short, carts)
            # A tree that was trained without some rows is not the result.
            short = [result._replace(score=np.inf) for result in short]
        order = np.argsort(scores, kind="stable")[: self._continuing] if best_cart < 0 else []
        chosen = [int(k) for k in order if np.isfinite(scores[k])]
        results = [[result] for result in short]
        if chosen and (masks or problem.monitor.has_time()):
            # If the scores of all stages are compared, all stages must train on one sample of the rows.
            fresh = sampled(all_rows, most_rows(self), 1 if masks or validates else 0)
            if masks:  # the program of the short stages serves the long stages too
                fresh = fresh.holding_out(np.zeros(fresh.shape[0], bool))
            stages = (
                train_stages(fresh, short[k].splits, starts[k].long, self.updates, starts[k].matrix) for k in chosen
            )
            for k, result in zip(chosen, await gather(*stages), strict=True):
                results[k].append(result)
        return self._fitted(problem, starts, carts, results, best_cart, narrowing)

    async def _compared(self, folds: list[Problem], short: list[StartResult], carts: Carts) -> tuple[np.ndarray, int]:
        """Returns the scores of all starts, and the CART tree that beats the starts, of :func:`beside_cart`."""
        trees = [(folds[k % len(folds)], result.tree) for k, result in enumerate(short)]
        trees += [(fold, tree) for fold, fold_trees in zip(folds, carts.fold_trees, strict=True) for tree in fold_trees]
        values = await gather(*(fold.map(held_out_loss, tree) for fold, tree in trees))
        losses = np.array([value.host for value in values])
        scores = np.where([result.finite for result in short], losses[: len(short)], np.inf)
        if not carts.trees:
            return scores, -1
        evaluations: Any = [fold.evaluation for fold in folds]
        share = np.array([np.sum(rows.weight, dtype=np.float64) for rows in evaluations])
        return beside_cart(scores, losses[len(short) :].reshape(len(folds), -1), share, self._continuing)

    # --- The result ---

    def _fitted(
        self,
        problem: Problem,
        starts: list[Start],
        carts: Carts,
        results: list[list[StartResult]],
        best_cart: int = -1,
        narrowing: Narrowing | None = None,
    ) -> Fitted:
        """Returns the best tree of the starts and CART, in the user's units (GET, Algorithm 1, line 15).

        Args:
          problem: the problem.
          starts: the starts.
          carts: CART's trees.
          results: the results of the short and the long stages of each start.
          best_cart: the number of the CART tree that beats all starts, or -1.
          narrowing: the map to the few features that the trees split, or None.
        """
        pairs = [(k, result) for k, start_results in enumerate(results) for result in start_results]
        best, result = min(pairs, key=lambda pair: pair[1].score)
        is_finite = np.isfinite(result.score)
        if not is_finite and not carts.trees:
            raise FloatingPointError(f"all {self.starts} starts became non-finite: try a smaller learning_rate")
        history = _table([[result.losses for result in start_results] for start_results in results], np.nan)
        splits, step = (result.tree, result.step) if is_finite else (carts.trees[max(best_cart, 0)], 0)
        splits, cart_trees = with_map((splits, carts.trees), None if narrowing is None else narrowing.matrix)

        def restore(fitted: Fitted, data: Data) -> Fitted:
            refitted = [
                [(*self._refitted(tree, data, narrowing), -1 - number) for tree in trees]
                for number, trees in enumerate(self._cart_splits(problem, cart_trees, narrowing))
            ]
            candidates = refitted[best_cart] if best_cart >= 0 else [*itertools.chain(*refitted)]
            if is_finite:
                candidates.append((*self._refitted(data.scaling.restore_splits(splits), data, narrowing), best))
            tree, loss, chosen = min(candidates, key=lambda candidate: candidate[1])  # CART wins a tie
            cart_losses = [min(loss for _, loss, _ in trees) for trees in refitted]
            report = self._report(data, starts, results, chosen, cart_losses)
            is_shrunk = self.shrink and self.leaves == "constant"
            if is_shrunk and problem.monitor.may_be_late(seconds_of_shrinkage(data.table)):
                tree = data.refit(tree, "constant", shrink=True)[0]
                loss = data.loss(tree)
            tree = tree.merged()
            is_expected = self.leaves == "linear" and data.validation is None and result.score < _NONE_EXPECTED
            expected_loss = loss if is_expected else None
            return fitted._replace(model=tree, tree=tree, loss=loss, report=report, expected_loss=expected_loss)

        return problem.restored(Fitted(splits, result.score, step, history), restore)

    def _report(
        self,
        data: Data,
        starts: list[Start],
        results: list[list[StartResult]],
        chosen: int,
        cart_losses: list[float],
    ) -> AnnealedReport:
        """Returns the report; ``cart_losses`` are the losses of CART's trees in the user's units."""
        cart_loss, ridge_loss = (*cart_losses, np.nan, np.nan)[:2]
        scores = _table([[result.scores for result in start_results] for start_results in results], np.inf)
        sharpness = np.array([np.append(start.short, start.long) if self.halves else start.long for start in starts])
        strengths = None if starts[0].strength is None else np.array([start.strength for start in starts])
        return AnnealedReport(
            chosen=chosen,
            dropped=sum(not all(result.finite for result in start_results) for start_results in results),
            cart_loss=float(cart_loss),
            ridge_loss=float(ridge_loss),
            sharpness=sharpness[:, : scores.shape[1]],
            losses=scores.astype(np.float64) * data.loss_unit,
            steps=_table([[result.steps for result in start_results] for start_results in results], 0),
            strengths=strengths,
            rows=rows_used(self, len(data.table.x)),
        )

    def _refitted(self, splits: ObliqueTree, data: Data, narrowing: Narrowing | None) -> tuple[ObliqueTree, float]:
        """Returns the tree refitted in the user's units, and the loss that decides between the trees."""
        tree, criterion = data.refit(splits, self.leaves, narrowing=narrowing)
        loss = data.loss(tree)
        if data.validation is not None or self.leaves == "constant":
            return tree, loss
        # The loss is at least the tree's training loss, which can exceed the criterion in rows with outliers.
        # If too few rows have weight for an expected error, the loss is the training loss alone.
        return tree, max(criterion if criterion < _NONE_EXPECTED * data.loss_unit else 0.0, loss)

    def _cart_splits(
        self, problem: Problem, trees: list[ObliqueTree], narrowing: Narrowing | None
    ) -> list[list[ObliqueTree]]:
        """Returns the splits of CART's trees in the user's units: a list of candidates for each tree.

        CART's tolerances are absolute, and its thresholds are exact on raw features only. So CART is grown twice: on
        scaled features, and on raw features if float32 represents them. With a ``narrowing``, the second tree splits
        the features that it selects.

        On the training rows of 16 tables that float32 represents, the losses were equal at depths 3 and 6. On ailerons,
        whose targets are tiny, linear leaves of the second tree lost 4 to 7 % more. The first tree lost 2.3 times as
        much as the second in lognormal columns of deviation 5. It lost 81 times as much where scaling clipped outliers
        that matter (depth 6).
        """
        data: Any = problem.data
        splits = [[data.scaling.restore_splits(tree)] for tree in trees]
        if trees and data.scaling.origin is None and problem.monitor.has_time():
            table, monitor = data.table.replace(encoder=None), problem.monitor.within(0.5)
            options = self.depth, self.leaves, most_rows(self)
            columns = None if narrowing is None else selected(np.asarray(narrowing.matrix))
            splits[0].append(problem.computed_once(cart_of_table, table, *options, columns, monitor=monitor))
        return splits


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
