"""Newton boosting of any recipe that ends in a tree.

A round fits the quadratic approximation of the loss at the current outputs F, with gradient g and curvature h:

    sum_i w_i (g_i f(x_i) + h_i f(x_i)^2 / 2) = sum_i w_i h_i / 2 (f(x_i) - t_i)^2 + a constant,   t_i = -g_i / h_i,

This is least squares with targets t and weights w h (Friedman, Hastie & Tibshirani 2000). The base recipe solves it to
find the splits. If there are several outputs, the weight of a row uses the mean of their curvatures. More than five
outputs are combined into five random targets, which are drawn anew in each round (Iosipoi & Vakhrushev 2022). Leaf
values are then the Newton steps of each output, -sum w g / (sum w h + l2). For losses whose curvature has no lower
bound, they are the best constants of the residuals (Friedman 2001).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jtrees import pytree
from jtrees.data import Data
from jtrees.ensembles.boosting_round import base_task
from jtrees.ensembles.boosting_sums import Sum, begin, refitted, rounds_of_call, since_lowest
from jtrees.ensembles.wrapper import Wrapper
from jtrees.forest import Forest
from jtrees.methods.annealed.get import GET
from jtrees.search import Fitted, LeftOut, Problem, Recipe, Report, fold_rows, gather, option, options
from jtrees.search.recipe import check_keeps_splits, loss_of
from jtrees.search.sample import most_rows, sampled
from jtrees.tasks import Policy, Task, check_log_loss
from jtrees.tree import ObliqueTree
from jtrees.validation import quoted

_FEWEST_HELD_OUT = 10  # fewest held-out rows that can choose the number of rounds
# In a table of at most _FEW_ROWS rows, each fifth is held out once: one fifth alone is too small for this choice.
_FEW_ROWS, _FOLDS = 1000, 5
_MOST_ROWS = 200_000  # rows for the rounds; the leaves are then fitted to all rows
# A kind of trees ends if its loss is larger than the other's by this fraction, after equally many rounds.
_FAR_BEHIND = 0.5
_LEAST_GAIN = 0.01  # oblique trees have a loss that is lower by this fraction than the loss of trees of CART
_MANY_ROWS = 100_000  # in longer tables, the reported training loss is the loss of the last round


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BoostedReport(Report):
    """The report of :class:`jtrees.Boosted`.

    Attributes:
      rounds: the number of rounds. A round adds one tree. If there are five sums, a round adds a tree to each sum. This
        is the case if :class:`jtrees.Boosted` holds out rows of a table of at most 1000 rows.
      dropped: the number of rounds without a finite tree. The outputs of a tree that is not finite are 0.
      losses: the loss after each round on the held-out rows or the validation set, on scaled targets, ``(rounds,)``. It
        is infinite for rounds not taken, and without ``patience``.
      rows: the number of rows that the splits of each round were fitted to.
      is_oblique: whether the splits may have several features. False: the splits are those of CART.
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
    Newton steps on all rows; Friedman (2002) uses the drawn rows for the leaves too. A tree has all outputs in its
    leaves; Friedman grows a tree for each class. More than five outputs are combined into five random targets for the
    splits (Iosipoi & Vakhrushev 2022). The curvature has a lower bound, and a Newton step has an upper bound
    (``jtrees/tasks/base.py``). The outputs of the tree are multiplied by the learning rate and added to the sum. A step
    that raises the loss of the rows of its leaf is halved.

    Absolute, Huber and pinball losses have no curvature, or one without a lower bound. Neither have many user-defined
    losses: their curvature is looked up at targets and outputs in [0, 1]. For these losses, the targets of the splits
    are the negative gradients with equal weights, and a leaf is the best constant of its residuals (Friedman 2001). A
    linear leaf is a fit to the negative gradients, multiplied by the factor that minimises the loss of its rows.

    Boosting takes every loss of regression, and the log loss of classification. It takes neither a user-defined loss of
    classification nor a :class:`jtrees.Policy`. The model is a :class:`jtrees.Forest` of summed outputs with the task's
    link; ``tree`` is None.

    If ``patience`` is given, boosting stops after ``patience`` rounds without a lower loss on ``validation``. The model
    keeps the rounds up to the lowest loss. If there is no ``validation``, boosting holds out rows:

    - In a table of at most 1000 rows, boosting trains five sums, and each sum holds out a different fifth of the rows.
      The model is the mean of the sums (Krogh & Vedelsby 1995). The mean of their losses chooses the number of rounds.
    - In a larger table, boosting holds out a fifth of the rows to find the number of rounds. The leaves of all trees
      are then fitted to all rows, in the order of the rounds. A deadline can prevent that.

    The same losses choose between two kinds of trees, if the base starts from CART over bins, as :class:`jtrees.GET`
    does by default: the trained trees, whose splits are oblique, and CART, whose splits have a feature each. Oblique
    trees need a loss that is lower by 1 per cent. A kind ends early if its loss is larger than the other's by half.

    The rounds of a table of more than 200,000 rows take a random sample of the rows, by class and weight. The leaves
    are then fitted to all rows.

    Tables with fewer than 10 rows and no ``validation`` need ``patience=None``.

    The report is a :class:`jtrees.ensembles.BoostedReport`. A fit to more than 100,000 rows reports the training loss
    of the last round, in single precision.

    Attributes:
      base: a recipe whose model is a tree, with constant or linear leaves. :class:`jtrees.GET` lists the defaults that
        suit a tree of a sum.
      rounds: largest number of rounds. If a fit takes all of them, as long tables of classes can, more may help.
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
    rounds: int = option(300)
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

    # --- The procedure ---

    async def search(self, problem: Problem) -> Fitted:
        boosting = await self.boosted(problem, _FOLDS if problem.count <= _FEW_ROWS else 1)

        def restore(fitted: Fitted, data: Data) -> Fitted:
            model = _forest(data, *fitted.scaled)
            # Predicting all rows of a long table takes half the time of boosting.
            is_long = problem.count > _MANY_ROWS and not problem.has_validation_set
            loss = fitted.score * data.loss_unit if is_long else loss_of(fitted, model, data)
            return fitted._replace(model=model, loss=loss, left_out=_left_out(problem, boosting, model))

        return problem.restored(self.scaled(problem, boosting), restore)

    async def boosted(self, problem: Problem, folds: int = 1, chooses: bool = True) -> "Boosting":
        """Returns boosted sums. If there is no validation set, held-out rows choose the number of rounds.

        Args:
          problem: the problem.
          folds: number of sums. Each sum holds out a different fifth of the rows. The mean loss of the sums chooses the
            number of rounds, and the model is the mean of the sums. If there is one sum, the leaves of its trees are
            then fitted to all rows.
          chooses: whether held-out rows choose between oblique trees and those of CART. If not, trees are oblique.
        """
        scaled = problem.replace(data=None)
        sample = scaled if problem.rows is None else sampled(scaled, _MOST_ROWS)
        parts, masks, shares = [sample], [], None
        if self.patience is not None and not problem.has_validation_set:
            masks = fold_rows(sample, folds)
            if min(mask.sum() for mask in masks) * folds < _FEWEST_HELD_OUT:
                needed_rows = -(-_FEWEST_HELD_OUT // folds) * 5
                raise ValueError(f"patience must be None for fewer than {needed_rows} rows without a validation set")
            parts = sample.repeat(folds) if folds > 1 else [sample]
            parts = [part.holding_out(mask) for part, mask in zip(parts, masks, strict=True)]
            shares = [np.average(mask, weights=sample.batch.weight) for mask in masks]
        rounds, sums, is_oblique = await self._sums(parts, shares, chooses and self.patience is not None)
        evaluated = sums[0] if len(sums) == 1 else Sum.mean(sums)
        if sample is not scaled:
            all_rows, sample_rows = np.asarray(problem.rows), np.asarray(sample.rows)
            masks = [np.isin(all_rows, sample_rows[mask]) for mask in masks]
        held_out, count = list(zip(sums, masks, strict=True)) if masks else [], int(parts[0].count)
        if len(sums) > 1 or (sample is scaled and not masks):
            return Boosting(evaluated, evaluated, held_out, count, is_oblique)
        table = scaled.holding_out(np.zeros(scaled.shape[0], bool)) if masks else scaled
        final = await refitted(table, rounds[0].rounds, evaluated.best) or evaluated
        return Boosting(final, evaluated, held_out, count, is_oblique)

    async def _sums(
        self, problems: list[Problem], shares: list[float] | None, chooses: bool
    ) -> tuple[list[Any], list[Sum], bool]:
        """Returns the rounds and the sum of each problem, and whether their splits may be oblique.

        The loss is the mean over the problems, weighted by ``shares``. With ``chooses``, the rounds are of the kind of
        trees with the lowest loss, else of the last kind.

        The rounds are a :class:`jtrees.ensembles.boosting_sums.CompiledRounds` or ``SearchedRounds``.
        """
        by_problem = _unless_failed(await gather(*(begin(problem) for problem in problems)))
        kinds = [_Kind(list(parts), np.zeros(0)) for parts in zip(*by_problem, strict=True)]
        growing, complete = kinds if chooses else kinds[-1:], []
        oblique, name, monitor = kinds[-1].rounds, type(self).__name__, problems[0].monitor
        with monitor.progress_of(self.rounds, name) as show:
            while growing:
                done = len(growing[0].losses)
                if monitor.is_rehearsed(done) or (done and not monitor.has_time()):
                    break
                results = await gather(*(kind.add(self._rounds_to_add(kind.losses), shares) for kind in growing))
                growing = [result for result in results if isinstance(result, _Kind)]
                if not growing:
                    if not complete:
                        _unless_failed(results)
                    break
                show(max(len(kind.losses) for kind in growing), [kind.losses[-1:] for kind in growing])
                goes_on = [not behind and self._rounds_to_add(kind.losses) for kind, behind in _far_behind(growing)]
                complete += [kind for kind, goes in zip(growing, goes_on, strict=True) if not goes]
                growing = [kind for kind, goes in zip(growing, goes_on, strict=True) if goes]
        # Simpler trees need not be better.
        handicap = lambda kind: _LEAST_GAIN * abs(kind.lowest()) if kind.rounds is oblique else 0
        parts, losses = min(complete + growing, key=lambda kind: kind.lowest() + handicap(kind))
        monitor.where = f"{name}: {len(losses)} of at most {self.rounds} rounds"
        return parts, [part.sum(losses) for part in parts], parts is oblique

    def _rounds_to_add(self, losses: np.ndarray) -> int:
        """Returns a number of rounds that boosting makes in any case, at most a tenth of all; 0 at the end.

        Early stopping counts evaluations here too, one for each round. The host decides, and not the state of a run,
        because the losses are means over several sums.
        """
        left = min(self.rounds - len(losses), rounds_of_call(self))
        if self.patience is None or not len(losses):
            return left if self.patience is None else min(left, self.patience)
        return max(0, min(left, self.patience - since_lowest(losses)))

    def rows_of_round(self, n: int) -> int:
        """Returns the number of rows that a round draws from n rows: at most the option ``rows`` of the base."""
        count = max(1, round(self.subsample * n))
        return count if self._most_rows is None else min(count, self._most_rows)

    @property
    def _most_rows(self) -> int | None:
        """The limit of rows for the splits of the base, or of the recipe within it; None for no limit."""
        base: Any = self.base
        while not hasattr(base, "rows") and hasattr(base, "base"):
            base = base.base
        return most_rows(base) if hasattr(base, "rows") else None

    # --- The result ---

    def scaled(self, problem: Problem, boosting: "Boosting") -> Fitted:
        """Returns the result on scaled data: the trees up to the lowest loss, and the initial outputs.

        Raises:
          FloatingPointError: if the loss is not finite, or if no tree is.
        """
        final, evaluated, count = boosting.final, boosting.evaluated, boosting.evaluated.best
        losses = np.full(self.rounds, np.inf, np.float32)
        if self.patience is not None:
            losses[: len(evaluated)] = evaluated.rounds.losses
        rounds, dropped = final.rounds, sum(~final.rounds.finite)
        scores = rounds.losses if problem.has_validation_set else rounds.after
        if not np.isfinite(scores[count - 1]) or dropped == len(final):
            raise FloatingPointError("training became non-finite: try a smaller learning_rate")
        rows = self.rows_of_round(boosting.count)
        report = BoostedReport(
            rounds=count, dropped=int(dropped), losses=losses, rows=rows, is_oblique=boosting.is_oblique
        )
        return Fitted(final.first(count), float(scores[count - 1]), count, final.rounds.before, report=report)


class Boosting(NamedTuple):
    """The sums of a boosting.

    Attributes:
      final: the sum of the model.
      evaluated: the sum whose losses chose the number of rounds: ``final``, or ``final`` before its leaves were fitted
        to all rows.
      held_out_sums: the sums that held out rows, with these rows, ``(n,)`` bool. If there are several, ``final`` is
        their mean.
      count: number of rows from which a round draws.
      is_oblique: whether the splits of the trees may have several features.
    """

    final: Sum
    evaluated: Sum
    held_out_sums: list[tuple[Sum, np.ndarray]]
    count: int
    is_oblique: bool

    @property
    def is_mean(self) -> bool:
        """Whether the model is the mean of several sums."""
        return len(self.held_out_sums) > 1

    @property
    def has_losses(self) -> bool:
        """Whether there are losses of held-out rows."""
        return bool(self.held_out_sums) and bool(np.isfinite(self.evaluated.rounds.losses).any())


class _Kind(NamedTuple):
    """The rounds of a kind of trees for each problem of a boosting, and their mean losses, ``(rounds,)``."""

    rounds: list[Any]
    losses: np.ndarray

    async def add(self, count: int, shares: list[float] | None) -> "_Kind":
        """Returns the kind after ``count`` more rounds, or after fewer."""
        _unless_failed(await gather(*(part.add(count) for part in self.rounds)))
        length = min(part.length for part in self.rounds)
        return _Kind(self.rounds, np.average([part.losses[:length] for part in self.rounds], axis=0, weights=shares))

    def lowest(self, rounds: int | None = None) -> float:
        """Returns the lowest loss of the first rounds, or of all; infinite if no loss is a number."""
        return float(np.nan_to_num(self.losses[:rounds], nan=np.inf, posinf=np.inf).min())


def _far_behind(kinds: list[_Kind]) -> list[tuple[_Kind, bool]]:
    """Returns each kind, and whether its loss is far above the lowest loss of all kinds after equally many rounds."""
    rounds = min(len(kind.losses) for kind in kinds)
    lowest = min(kind.lowest(rounds) for kind in kinds)
    return [(kind, kind.lowest(rounds) > lowest + _FAR_BEHIND * abs(lowest)) for kind in kinds]


def _unless_failed(results: list[Any]) -> list[Any]:
    """Returns the results of procedures, or raises the first error among them."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def _forest(data: Data, trees: ObliqueTree, initial: np.ndarray) -> Forest:
    """Returns a sum in the user's units. The initial outputs are part of the first tree."""
    leaves = trees.leaves.with_outputs(lambda a: np.concatenate([a[:1] + initial, a[1:]]))
    return Forest(trees.replace(leaves=leaves), "sum", data.table.task.link_name).restored(data.scaling)


def _left_out(problem: Problem, boosting: Boosting, model: Forest) -> LeftOut | None:
    """Returns the losses of held-out rows by the sums that were not trained on them."""
    if not boosting.has_losses or problem.is_member:
        return None
    data: Any = problem.data
    final, evaluated, parts, losses = boosting.final, boosting.evaluated, boosting.held_out_sums, []
    for number, (part, held_out) in enumerate(parts):
        trees, initial = part.first(evaluated.best)
        if boosting.is_mean:
            trees = _part_of_mean(final.first(evaluated.best)[0], len(parts), number)
        without = model if final is part else _forest(data, trees, initial)
        left_out = problem.left_out(without, held_out)
        if left_out is None:
            return None
        losses.append(left_out.losses)
    return LeftOut(np.fmin.reduce(losses), chose=True, several=boosting.is_mean)


def _part_of_mean(trees: ObliqueTree, parts: int, number: int) -> ObliqueTree:
    """Returns the trees of the mean of sums, with leaves of 0 in the trees of all sums but one.

    This sum has the shape of the mean, so both predict with one program.
    """
    mask = np.arange(len(trees.bias)) % parts == number
    scaled = lambda a: np.where(mask.reshape(-1, *[1] * (a.ndim - 1)), np.float32(parts) * a, 0)
    return trees.replace(leaves=jax.tree.map(scaled, trees.leaves))
