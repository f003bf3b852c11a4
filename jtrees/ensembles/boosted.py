"""Newton boosting of any recipe that ends in a tree.

A round fits the quadratic approximation of the loss at the current outputs F, with gradient g and curvature h:

    sum_i w_i (g_i f(x_i) + h_i f(x_i)^2 / 2) = sum_i w_i h_i / 2 (f(x_i) - t_i)^2 + a constant,   t_i = -g_i / h_i,

This is least squares with targets t and weights w h (Friedman, Hastie & Tibshirani 2000). If there are several outputs,
the weight of a row uses the mean of their curvatures. Leaf values are then the Newton steps of each output, -sum w g /
(sum w h + l2).
"""

from collections.abc import Callable
from dataclasses import dataclass
import time
from typing import Any, NamedTuple

import numpy as np

from jtrees import pytree
from jtrees.data.scaling import rows_for_slopes
from jtrees.ensembles.boosting_round import base_task
from jtrees.ensembles.boosting_sums import GrowingSum, Sum, begin, refitted, regrown, since_lowest
from jtrees.ensembles.wrapper import Wrapper
from jtrees.forest import Forest
from jtrees.methods.annealed.get import GET
from jtrees.search import Fitted, LeftOut, Problem, Recipe, Report, fold_rows, gather, option, options
from jtrees.search.recipe import check_keeps_splits
from jtrees.search.sample import most_rows, sampled
from jtrees.tasks import Policy, Task, check_log_loss
from jtrees.tree import ObliqueTree
from jtrees.validation import quoted

_CALLS, _MOST_ROUNDS = 10, 30  # fewest calls for all rounds, and the largest number of rounds of a call
_FEWEST_HELD_OUT = 10  # fewest held-out rows that can choose the number of rounds
# In a table of at most _FEW_ROWS rows, each fifth is held out once. The mean of five sums is more accurate than one sum
# of all rows, and takes two to three times as long.
_FEW_ROWS, _FOLDS = 4000, 5
_MANY_OF_SUM = 800  # if a sum has more training rows, its held-out rows alone can choose the kind of the trees
_MOST_ROWS = 200_000  # rows for the rounds; the leaves are then fitted to all rows
# A kind of trees ends if its loss is larger than the other's by this fraction, after the same number of rounds.
_FAR_BEHIND = 0.5
_LEAST_GAIN = 0.01  # oblique trees have a loss that is lower by this fraction than the loss of trees of CART
_FARTHEST = 1e18  # largest scaled feature of a refit: its square is finite in single precision
_MANY_ROWS = 100_000  # in longer tables, the reported training loss is the loss of the last round


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BoostedReport(Report):
    """The report of :class:`jtrees.Boosted`.

    Attributes:
      rounds: the number of rounds. A round adds one tree. If there are five sums, a round adds a tree to each sum. This
        is the case if :class:`jtrees.Boosted` holds out rows of a table of at most 4000 rows.
      dropped: the number of rounds without a finite tree. The outputs of a tree that is not finite are 0.
      losses: the loss after each round on the held-out rows or the validation set, on scaled targets, ``(rounds,)``. It
        is infinite for rounds not taken, and without ``patience``.
      rows: the number of rows that the splits of each round were fitted to, before the rounds on all rows.
      is_oblique: whether the splits may have several features. False: CART made the splits.
    """

    rounds: int
    dropped: int
    losses: np.ndarray
    rows: int | None = None
    is_oblique: bool = True


@pytree.dataclass(kw_only=True)
class Boosted(Wrapper):
    """Gradient boosting with Newton steps (Friedman 2001 and 2002; Friedman, Hastie & Tibshirani 2000).

    In each round, the base recipe finds the splits of a tree by weighted least squares on newly drawn rows. The targets
    are the negative gradients divided by the curvatures, and the weights are the curvatures. Constant leaves are then
    Newton steps on all rows, in which a tree has all outputs. More than five outputs are combined into five random
    targets for the splits (Iosipoi & Vakhrushev 2022). The outputs of the tree are multiplied by the learning rate and
    added to the sum. A step that raises the loss of the rows of its leaf is halved.

    Absolute, Huber and pinball losses, and many user-defined losses, have no curvature with a lower bound. The targets
    of the splits are then the negative gradients with equal weights, and a leaf is the best constant of its residuals
    (Friedman 2001). A linear leaf is a fit to the negative gradients, multiplied by the factor that minimises the loss
    of its rows.

    Boosting takes every loss of regression, and the log loss of classification. It takes neither a user-defined loss of
    classes nor a :class:`jtrees.Policy`. The model is a :class:`jtrees.Forest` of summed outputs with the task's link;
    ``tree`` is None.

    If ``patience`` is given, boosting stops after ``patience`` rounds without a lower loss on ``validation``. The model
    keeps the rounds up to the lowest loss. If there is no ``validation``, boosting holds out rows:

    - In a table of at most 4000 rows, boosting trains five sums, and each sum holds out a different fifth of the rows.
      The model is the mean of the sums (Krogh & Vedelsby 1995). The mean of their losses chooses the number of rounds.
      A deadline can prevent that in a table of more than 1000 rows.
    - In a larger table, boosting holds out a fifth of the rows to choose the number of rounds. The leaves of the first
      half of the trees are then fitted to all rows, in the order of the rounds. Further rounds on all rows replace the
      second half. A deadline can prevent that.

    The same losses choose between two kinds of trees, if the base starts from CART over bins, as :class:`jtrees.GET`
    does by default: the trained trees, whose splits are oblique, and CART, whose splits have a feature each. Oblique
    trees need a loss that is lower by 1 per cent. A kind ends early if its loss is larger than the other's by half. If
    there are five sums of more than 1000 rows, the losses of the first sum choose.

    Training clips outliers and codes of missing values, such as 999,999,999, and the model does not. If features are
    clipped, the leaves of all rounds are fitted again, to features that are not. A deadline can prevent that. Linear
    leaves disregard few outliers in a column, which would determine their slopes.

    The rounds of a table of more than 200,000 rows take a random sample of the rows, by class and weight. The leaves
    are then fitted to all rows.

    Tables with fewer than 10 rows and no ``validation`` need ``patience=None``.

    The report is a :class:`jtrees.ensembles.BoostedReport`. A fit to more than 100,000 rows reports the training loss
    of the last round, in single precision.

    Attributes:
      base: a recipe whose model is a tree, with constant or linear leaves. :class:`jtrees.GET` lists the defaults that
        suit a tree of a sum.
      rounds: largest number of rounds. If a fit takes all rounds, a larger number or a larger learning rate may help.
      learning_rate: factor of each tree's outputs.
      subsample: fraction of the rows that the splits of a tree are fitted to, above 0 and up to 1. Rows are drawn
        without replacement, and their number is at most the option ``rows`` of the base.
      columns: fraction of the features that each tree is fitted to, above 0 and up to 1. Features are drawn without
        replacement.
      l2: shrinkage of constant leaves. Each leaf is fitted with ``l2`` more samples, of zero gradient and of the mean
        curvature at the initial outputs. None: 10 for classes, else 1.
      patience: number of rounds without a lower loss before boosting stops. None: all rounds are taken, and the model
        keeps the rounds up to the lowest loss on ``validation``, or else on the training rows.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> base = jtrees.GET(depth=1, starts=1, epochs=10, cart="binned", halving=False)
      >>> recipe = jtrees.Boosted(base, rounds=5, learning_rate=0.5, patience=None)
      >>> fit = jtrees.fit(recipe, x, np.sign(x[:, 0]), key=jax.random.key(0))
      >>> print(len(fit.model), fit.predict(np.array([[-0.5], [0.5]])).round(1))
      5 [-1.  1.]
    """

    base: Recipe = pytree.field(kw_only=False, default=GET(depth=5), metadata=options.BASE)
    rounds: int = option(1000)
    learning_rate: float = option(0.1, above=0)
    subsample: float = option(0.8, above=0, most=1, traced=False)
    columns: float = option(1.0, above=0, most=1, traced=False)
    l2: float | None = option(None, least=0)
    patience: int | None = option(30)

    is_tree = False

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        if isinstance(task, Policy):
            raise ValueError("task must not be a Policy: a sum of trees plays no single action in a leaf")
        check_log_loss(task)
        super().check(base_task(task), shape)
        check_keeps_splits(self.base)
        if self.base.tree_leaves(base_task(task)) is None:
            raise ValueError(f"base must end in a single tree, got {quoted(self.base)}")

    def with_defaults(self) -> Any:
        return self.with_boosting_defaults()

    def keeps_monotone(self, task: Task) -> bool:
        return super().keeps_monotone(base_task(task))

    @property
    def rounds_of_call(self) -> int:
        """Largest number of rounds of a call. Progress is shown after each call."""
        return max(1, min(self.rounds // _CALLS, _MOST_ROUNDS))

    def rows_of_round(self, n: int) -> int:
        """Returns the number of rows that a round draws from n rows: at most the option ``rows`` of the base."""
        base: Any = self.base
        while not hasattr(base, "rows") and hasattr(base, "base"):
            base = base.base
        limit = most_rows(base) if hasattr(base, "rows") else None
        count = max(1, round(self.subsample * n))
        return count if limit is None else min(count, limit)

    async def search(self, problem: Problem) -> Fitted:
        boosting = await self.boosted(problem, _FOLDS if problem.count <= _FEW_ROWS else 1)
        fitted = boosting.fitted
        if (data := problem.data) is None:
            return fitted
        with problem.restoring():
            model = _forest(problem, *fitted.scaled)
            # Predicting all rows of a long table takes half the time of boosting.
            is_long = problem.count > _MANY_ROWS and not problem.has_validation_set
            loss = fitted.score * data.loss_unit if is_long else data.loss(model)
            score = loss / data.loss_unit
            return fitted._replace(model=model, score=score, loss=loss, left_out=boosting.left_out(problem))

    async def boosted(self, problem: Problem, folds: int = 1, *, is_start: bool = False) -> "Boosting":
        """Returns boosted sums. If there is no validation set, held-out rows choose the number of rounds.

        Args:
          problem: the problem.
          folds: number of sums. Each sum holds out a different fifth of the rows. The mean loss of the sums chooses the
            number of rounds, and the model is the mean of the sums. If there is one sum, it is then fitted to all rows.
          is_start: whether joint training follows. Its trees are oblique, and its model clips features. If not,
            held-out rows choose between oblique trees and those of CART, and the second half of the trees sees all
            rows. Rows with clipped features may reach other leaves of the model than in training, so all leaves are
            fitted again, to features that are not clipped.

        Raises:
          FloatingPointError: if the loss is not finite, or if no tree is.
        """
        table = problem.replace(data=None)
        sample = table if problem.rows is None else sampled(table, _MOST_ROWS)
        problems, masks, weights = [sample], [], [1.0]
        if self.patience is not None and not problem.has_validation_set:
            masks = fold_rows(sample, folds)
            if min(mask.sum() for mask in masks) * folds < _FEWEST_HELD_OUT:
                needed_rows = -(-_FEWEST_HELD_OUT // folds) * 5
                raise ValueError(f"patience must be None for fewer than {needed_rows} rows without a validation set")
            keyed = sample.repeat(folds) if folds > 1 else [sample]
            problems = [fold.holding_out(mask) for fold, mask in zip(keyed, masks, strict=True)]
            weights = [np.average(mask, weights=sample.batch.weight) for mask in masks]
        kind, is_oblique = await self._kind(problems, weights, not is_start and self.patience is not None)
        count = len(kind.sums)
        problems, masks, weights = problems[:count], masks[:count], weights[:count]
        sums = [growing.sum(len(kind.losses)) for growing in kind.sums]
        every_row = unclipped = table.holding_out(np.zeros(table.shape[0], bool)) if masks else table
        if not is_start and (limits := self._limits_of_refit(problem)) is not None:
            *problems, unclipped = _with_limits([*problems, every_row], problem.data, limits)
            pairs = zip(problems, sums, strict=True)
            refits = await gather(*(refitted(rows, boosted.rounds, len(boosted)) for rows, boosted in pairs))
            sums = refits if all(_unless_failed(refits)) else sums
        evaluated = final = Sum.mean(sums, weights)
        if len(sums) == 1 and (masks or sample is not table):
            rounds, count = sums[0].rounds, evaluated.best
            final = await refitted(unclipped, rounds, count) or evaluated
            # Trees of all rows are better, and half of them take half of the time. A rehearsal has run their program.
            if sample is table and not is_start and final is not evaluated and not problem.monitor.rehearses:
                last = await regrown(every_row, rounds, count, -1 if is_oblique else 0)
                if last is not None and unclipped is not every_row:
                    last = await refitted(unclipped, last.rounds, count)
                final = last or final
        problem.monitor.ended_at = f"{type(self).__name__}: {len(kind.losses)} of at most {self.rounds} rounds"
        if sample is not table:
            all_rows, sample_rows = np.asarray(problem.rows), np.asarray(sample.rows)
            masks = [np.isin(all_rows, sample_rows[mask]) for mask in masks]
        rounds, count, dropped = final.rounds, evaluated.best, int(sum(~final.rounds.finite))
        scores = rounds.losses if problem.has_validation_set else rounds.after
        if not np.isfinite(scores[count - 1]) or dropped == len(final):
            raise FloatingPointError("training became non-finite: try a smaller learning_rate")
        losses = np.full(self.rounds, np.inf, np.float32)
        if self.patience is not None:
            losses[: len(evaluated)] = evaluated.rounds.losses
        rows = self.rows_of_round(problems[0].count)
        report = BoostedReport(rounds=count, dropped=dropped, losses=losses, rows=rows, is_oblique=is_oblique)
        fitted = Fitted(final.first(count), float(scores[count - 1]), count, rounds.before, report=report)
        return Boosting(fitted, evaluated, sums, masks)

    async def _kind(self, problems: list[Problem], weights: list[Any], chooses: bool) -> tuple["_Kind", bool]:
        """Returns the sums of the problems, all of one kind of trees, and whether their splits may be oblique.

        With ``chooses``, the trees are of the kind with the lowest loss, else of the last kind. The loss is the mean
        over the problems, weighted by ``weights``. In a long table, the first problem chooses. The result then has only
        its sum if there is no time for the sums of the other problems.
        """
        sums_of_problems = _unless_failed(await gather(*(begin(problem) for problem in problems)))
        kinds = [_Kind(list(sums), weights) for sums in zip(*sums_of_problems, strict=True)]
        kinds = kinds if chooses else kinds[-1:]
        is_long = len(problems) > 1 and problems[0].count > _MANY_OF_SUM
        first = [kind.first() for kind in kinds] if is_long else kinds
        monitor, began = problems[0].monitor, time.monotonic()
        await self._grow(first, monitor)
        # Simpler trees need not be better.
        handicap = lambda kind: _LEAST_GAIN * abs(kind.lowest()) if kind is first[-1] else 0
        best = min(first, key=lambda kind: kind.lowest() + handicap(kind))
        is_oblique = best is first[-1]
        if is_long and monitor.may_be_late((len(problems) - 1) * (time.monotonic() - began)):
            kind = kinds[first.index(best)]
            await self._grow([kind], monitor)
            best = best if self._rounds_to_add(kind.losses) else kind
        return best, is_oblique

    async def _grow(self, kinds: list["_Kind"], monitor: Any) -> None:
        """Adds rounds to the sums of each kind, until early stopping ends it, or another kind is far better."""
        growing, done = kinds, 0
        with monitor.progress_of(self.rounds, type(self).__name__) as show:
            while growing and not monitor.is_rehearsed(done) and (not done or monitor.has_time()):
                _unless_failed(await gather(*(add for kind in growing for add in kind.add(self._rounds_to_add))))
                done = max(len(kind.losses) for kind in growing)
                show(done, [kind.losses[-1:] for kind in growing])
                rounds = min(len(kind.losses) for kind in growing)
                lowest = min(kind.lowest(rounds) for kind in growing)
                limit = lowest + _FAR_BEHIND * abs(lowest)
                growing = [
                    kind for kind in growing if kind.lowest(rounds) <= limit and self._rounds_to_add(kind.losses)
                ]

    def _limits_of_refit(self, problem: Problem) -> np.ndarray | None:
        """Returns the largest scaled features for a refit of the leaves, ``(p,)``; None if no refit is needed."""
        # A refit is needed if rows with clipped features may reach other leaves in the user's units than in training.
        # Linear leaves keep the limits of columns with few outliers, which would determine the slopes of their leaves.
        if problem.data is None or not (scaling := problem.data.scaling).has_clipped(problem.batch.x):
            return None
        if self.base.tree_leaves(base_task(problem.task)) != "linear":
            return np.full(problem.shape[1], _FARTHEST)
        has_codes = rows_for_slopes(problem.batch, scaling.x_most)[1].any(0)
        return np.where(has_codes, _FARTHEST, scaling.x_most) if has_codes.any() else None

    def _rounds_to_add(self, losses: np.ndarray) -> int:
        """Returns a number of rounds that boosting makes in any case; 0 at the end."""
        # Early stopping counts evaluations here too, one for each round. The host decides, and not the state of a run,
        # because the losses are means over several sums.
        left = min(self.rounds - len(losses), self.rounds_of_call)
        return left if self.patience is None else min(left, self.patience - since_lowest(losses))


class Boosting(NamedTuple):
    """The sums of a boosting."""

    fitted: Fitted  # the result on scaled data: the trees up to the lowest loss, and the initial outputs
    # The mean of `sums`, whose losses chose the number of rounds. `fitted` may then be fitted to all rows.
    evaluated: Sum
    sums: list[Sum]  # the sums
    held_out: list[np.ndarray]  # the rows that each sum held out, (n,) bool; empty if no rows were held out

    @property
    def has_losses(self) -> bool:
        """Whether there are losses of held-out rows."""
        return bool(self.held_out) and bool(np.isfinite(self.evaluated.rounds.losses).any())

    def left_out(self, problem: Problem) -> LeftOut | None:
        """Returns the losses of held-out rows by the sums that were not trained on them."""
        if not self.has_losses or problem.is_member:
            return None
        losses: list[np.ndarray] = []
        for boosted, held_out in zip(self.sums, self.held_out, strict=True):
            left_out = problem.left_out(_forest(problem, *boosted.first(self.evaluated.best)), held_out)
            if left_out is None:
                return None
            losses.append(left_out.losses)
        return LeftOut(np.fmin.reduce(losses), chose=True, several=len(losses) > 1)


class _Kind(NamedTuple):
    """The sums of a kind of trees, one for each problem of a boosting, and the weights of the problems."""

    sums: list[GrowingSum]
    weights: list[Any]

    @property
    def losses(self) -> np.ndarray:
        """The mean losses after each round, ``(rounds,)``."""
        losses = [growing.losses for growing in self.sums]
        return np.average([values[: min(map(len, losses))] for values in losses], axis=0, weights=self.weights)

    def first(self) -> "_Kind":
        """Returns the sum of the first problem alone."""
        return _Kind(self.sums[:1], self.weights[:1])

    def add(self, rounds_to_add: Callable[[np.ndarray], int]) -> list[Any]:
        """Returns procedures that add rounds to the sums; to the shorter sums only, if some are shorter."""
        count, longest = rounds_to_add(self.losses), max(len(growing.losses) for growing in self.sums)
        shorter = [growing for growing in self.sums if len(growing.losses) < longest]
        return [growing.add(min(count, longest - len(growing.losses) or count)) for growing in shorter or self.sums]

    def lowest(self, rounds: int | None = None) -> float:
        """Returns the lowest loss of the first rounds, or of all; infinite if no loss is a number."""
        return float(np.nan_to_num(self.losses[:rounds], nan=np.inf, posinf=np.inf).min())


def _with_limits(problems: list[Problem], data: Any, limits: np.ndarray) -> list[Problem]:
    """Returns the problems with features clipped at other limits, ``(p,)``. Padding has the features of other rows.

    Rows for evaluation are the rows of the validation set, or the training rows of other weights.
    """
    scaling = data.scaling.replace(x_most=limits)
    every_x, arrays = scaling.batch(data.table).x, {}
    validation_x = None if data.validation is None else scaling.batch(data.validation).x

    def with_limits(problem: Problem) -> Problem:
        if id(problem.batch.x) not in arrays:  # the problems of folds have the same rows
            arrays[id(problem.batch.x)] = every_x[problem.rows]
        x, evaluation = arrays[id(problem.batch.x)], problem.evaluation
        if evaluation is not None:
            evaluation_x = validation_x if problem.has_validation_set else x
            assert evaluation_x is not None and evaluation_x.shape == evaluation.x.shape
            evaluation = evaluation._replace(x=evaluation_x)
        return problem.replace(batch=problem.batch._replace(x=x), evaluation=evaluation)

    return [with_limits(problem) for problem in problems]


def _unless_failed(results: list[Any]) -> list[Any]:
    """Returns the results of procedures, or raises the first error among them."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def _forest(problem: Any, trees: ObliqueTree, initial: np.ndarray) -> Forest:
    """Returns a sum in the user's units. The initial outputs are part of the first tree."""
    leaves = trees.leaves.with_outputs(lambda a: np.concatenate([a[:1] + initial, a[1:]]))
    return Forest(trees.replace(leaves=leaves), "sum", problem.task.link_name).restored(problem.data.scaling)
