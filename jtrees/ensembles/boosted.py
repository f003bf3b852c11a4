"""Newton boosting of any recipe that ends in a tree.

A round fits the quadratic approximation of the loss at the current outputs F, with gradient g and curvature h:

    sum_i w_i (g_i f(x_i) + h_i f(x_i)^2 / 2) = sum_i w_i h_i / 2 (f(x_i) - t_i)^2 + a constant,   t_i = -g_i / h_i,

This is least squares with targets t and weights w h (Friedman, Hastie & Tibshirani 2000). The base recipe solves it to
find the splits. If there are several outputs, the weight of a row uses the mean of their curvatures. More than five
outputs are combined into five random targets, which are drawn anew in each round (Iosipoi & Vakhrushev 2022). Leaf
values are then the Newton steps of each output, -sum w g / (sum w h + l2). For losses without a curvature, they are the
best constants of the residuals (Friedman 2001).
"""

from dataclasses import dataclass
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from jtrees import pytree
from jtrees.data import Data, Scaling, Table
from jtrees.ensembles.boosting_round import Sum, added_to, begun, of_base, target
from jtrees.forest import Forest
from jtrees.methods.annealed.get import GET
from jtrees.search import Finished, HeldOut, Recipe, Report, Runs, SearchResult, Stacked, check_finite, options
from jtrees.search.precondition import fold_rows
from jtrees.search.recipe import check_keeps_splits, loss_of
from jtrees.search.sample import most_rows
from jtrees.tasks import Policy, Task, check_log_loss
from jtrees.tree import ObliqueTree
from jtrees.validation import quoted

_FEWEST_HELD_OUT = 10  # fewest held-out rows that can choose the number of rounds
# In a table of at most _FEW_ROWS rows, each fifth is held out once: one fifth alone is too small for this choice.
_FEW_ROWS, _FOLDS = 1000, 5
_MANY_ROWS = 100_000  # in longer tables, the reported training loss is the loss of the last round
_DRAWN = 1000  # this plus the round is the purpose number of the random generator of a round: see ``Runs.rng``


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
    """

    rounds: int
    dropped: int
    losses: np.ndarray
    rows: int | None = None


@pytree.dataclass(kw_only=True)
class Boosted(Recipe):
    """Gradient boosting with Newton steps (Friedman 2001 and 2002; Friedman, Hastie & Tibshirani 2000).

    In each round, the base recipe finds the splits of a tree by weighted least squares on newly drawn rows. The targets
    are the negative gradients divided by the curvatures, and the weights are the curvatures. Constant leaves are then
    Newton steps on all rows; Friedman (2002) uses the drawn rows for the leaves too. A tree has all outputs in its
    leaves; Friedman grows a tree for each class. More than five outputs are combined into five random targets for the
    splits (Iosipoi & Vakhrushev 2022). The curvature has a lower bound, and a Newton step has an upper bound
    (``jtrees/losses/base.py``). A loss without curvature has curvature 1. The outputs of the tree are multiplied by the
    learning rate and added to the sum.

    Boosting takes every loss of regression, and the log loss of classification. It takes neither a user-defined loss of
    classification nor a :class:`jtrees.Policy`. The model is a :class:`jtrees.Forest` of summed outputs with the task's
    link; ``tree`` is None.

    If ``patience`` is given, boosting stops after ``patience`` rounds without a lower loss on ``validation``. The model
    keeps the rounds up to the lowest loss. If there is no ``validation``, boosting holds out rows:

    - In a table of at most 1000 rows, boosting trains five sums, and each sum holds out a different fifth of the rows.
      The model is the mean of the sums (Krogh & Vedelsby 1995). The mean of their losses chooses the number of rounds.
    - In a larger table, a first fit holds out a fifth of the rows to find the number of rounds. A second fit then takes
      this number of rounds on all rows. If the second fit is interrupted, the first model is returned.
    - There is no second fit if four fifths of the rows are enough to draw ``base.rows`` rows in each round. The leaves
      of the model are then fitted to four fifths of the rows.

    Tables with fewer than 10 rows and no ``validation`` need ``patience=None``.

    The report is a :class:`jtrees.ensembles.BoostedReport`. A fit to more than 100,000 rows reports the training loss
    of the last round, in single precision.

    Attributes:
      base: a recipe whose model is a tree, with constant or linear leaves. Options that are None get values that suit a
        tree of a sum. For :class:`jtrees.GET`, the values are one start from CART over bins and 20 updates.
        ``rows="auto"`` is then 4000, and at least 60 for each leaf.
      rounds: largest number of rounds.
      learning_rate: factor of each tree's outputs.
      subsample: fraction of the rows that the splits of a tree are fitted to, above 0 and up to 1. Rows are drawn
        without replacement, and their number is at most the option ``rows`` of the base.
      columns: fraction of the features that each tree is fitted to, above 0 and up to 1. Features are drawn without
        replacement.
      l2: shrinkage of constant leaves. Each leaf is fitted with ``l2`` more samples, of zero gradient and of the mean
        curvature at the initial outputs.
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

    base: Recipe = pytree.field(kw_only=False, default=GET(depth=5), metadata={"check": options.checked_base})
    rounds: int = options.count(300)
    learning_rate: float = options.positive(0.1)
    subsample: float = options.share(0.8)
    columns: float = options.share(1.0)
    l2: float = options.not_negative(1.0)
    patience: int | None = options.optional_count(30)

    def targets(self, x: Any, y: Any) -> Any:
        return options.checked_base("base", self.base).targets(x, y)

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        if isinstance(task, Policy):
            raise ValueError("task must not be a Policy: a sum of trees plays no single action in a leaf")
        check_log_loss(task)
        self.base.check(of_base(task), shape)
        check_keeps_splits(self.base)
        if self.base.tree_leaves(of_base(task)) is None:
            raise ValueError(f"base must end in a single tree, got {quoted(self.base)}")

    def settled(self, weak: bool = False) -> Any:
        return self.replace(base=self.base.settled(weak=True))

    def scaling(self, table: Table) -> Scaling:
        return self.base.scaling(table)

    def keeps_monotone(self, task: Task) -> bool:
        return self.base.keeps_monotone(of_base(task))

    def tree_leaves(self, task: Task) -> None:
        return None

    # --- The procedure ---

    def search(self, runs: Runs) -> list[SearchResult]:
        folds = _FOLDS if runs.count <= _FEW_ROWS else 1
        return [self.result(one, runs.validation is not None) for one in self.boosted(runs, folds)]

    def boosted(self, runs: Runs, folds: int = 1) -> list["Boosting"]:
        """Boosts every run. If there is no validation set, a first fit on four fifths of the rows finds the rounds.

        Args:
          runs: the runs.
          folds: number of sums of each run. Each sum holds out a different fifth of the rows. The mean loss of the sums
            chooses the number of rounds, and the result is the mean of the sums.
        """
        all_rounds = [self.rounds] * len(runs)
        if self.patience is None or runs.validation is not None:
            return [Boosting(one, None, ()) for one in self._sums(runs, all_rounds, self.patience)]
        of_folds = [rows for i in range(len(runs)) for rows in fold_rows(runs, i, folds)]
        if min(rows.sum() for rows in of_folds) * folds < _FEWEST_HELD_OUT:
            least = -(-_FEWEST_HELD_OUT // folds) * 5
            raise ValueError(f"patience must be None for fewer than {least} rows without a validation set")
        each = runs if folds == 1 else runs.repeat(folds, together=folds)
        share = [np.average(rows, weights=runs.targets(k // folds)[1]) for k, rows in enumerate(of_folds)]
        tried = self._sums(each.on(held_out=of_folds), all_rounds * folds, self.patience, folds, share)
        if folds > 1:
            parts = list(zip(tried, of_folds, strict=True))
            by_run = [tuple(parts[first : first + folds]) for first in range(0, len(parts), folds)]
            means = [Sum.mean([part for part, _ in parts]) for parts in by_run]
            return [Boosting(mean, mean, parts) for mean, parts in zip(means, by_run, strict=True)]
        kept = min(np.count_nonzero(~rows & runs.weighed(i)) for i, rows in enumerate(of_folds))
        parts = [((part, rows),) for part, rows in zip(tried, of_folds, strict=True)]
        if self._most_rows is not None and self._most_rows <= self.subsample * kept:
            # A second fit would draw the same number of rows for its splits.
            return [Boosting(part, part, of_run) for part, of_run in zip(tried, parts, strict=True)]
        none = [np.zeros_like(rows) for rows in of_folds]
        sums = self._sums(runs.on(held_out=none), [one.best for one in tried], None)
        return [Boosting(*of_run) for of_run in zip(sums, tried, parts, strict=True)]

    def _sums(
        self, runs: Runs, rounds: list[int], patience: int | None, folds: int = 1, share: Any = None
    ) -> list["Sum"]:
        """Adds trees to every run, up to its number of rounds, or until ``patience`` rounds did not lower the loss.

        The loss is the mean over each group of ``folds`` successive runs, weighted by the ``share`` of the rows of each
        run.
        """
        name, states = type(self).__name__, runs.map(begun)
        sums = [Sum(one, [], [], [], [], []) for one in runs.fetch(states.map(lambda state: state.initial))]
        going = list(range(len(runs)))
        with runs.monitor.over(max(rounds), name) as show:
            for number in range(max(rounds)):
                still = [i for i in going if number < rounds[i] and (patience is None or sums[i].stalled < patience)]
                if not still or runs.monitor.is_rehearsed(number) or (number and not runs.monitor.has_time()):
                    break
                if still != going:
                    listed = dict(zip(going, runs.select(going).fetch(states), strict=True))
                    going, states = still, [listed[i] for i in still]
                states, added = self._round(runs.select(going), states, number)
                losses_of = np.reshape([one[1] for one in added], (-1, folds))
                shares = None if share is None else np.reshape([share[i] for i in going], (-1, folds))
                means = np.average(losses_of, 1, shares).repeat(folds)
                for i, mean, (tree, _, *others) in zip(going, means, added, strict=True):
                    sums[i].add(tree, mean, *others)
                show(number + 1, [np.array(one.before[-1:]) for one in sums])
            runs.monitor.where = f"{name}: {max(len(one.trees) for one in sums)} of at most {max(rounds)} rounds"
        return sums

    def _round(self, runs: Runs, states: Any, number: int) -> tuple[Stacked, list[Any]]:
        """Fits a tree of the base to the Newton steps of every run; returns the results of :func:`added_to`."""
        drawn = [self._drawn(runs, i, number) for i in range(len(runs))]
        rows, features, mixes = ([one[k] for one in drawn] for k in (0, 1, 2))
        targets = runs.map(target, states, rows, mixes, often=True)
        y, weight = (targets.map(lambda both, k=k: both[k]) for k in (0, 1))
        # Only the splits of the base are used: boosting replaces its leaves. So the base does not choose a shrinkage.
        bases = [recipe.base for recipe in runs.recipes]
        bases = [base.replace(shrink=False) if hasattr(base, "shrink") else base for base in bases]
        of_round: Any = {"task": of_base(runs.task), "rows": rows, "y": y, "weight": weight, "features": features}
        on_steps = runs.on(**of_round, held_out=None, validation=None).keyed(number).using(bases)
        found = bases[0].search(on_steps)
        splits = [ObliqueTree(np.asarray(one.model.weights), np.asarray(one.model.bias), None) for one in found]
        finite = [np.bool_(one.finite) for one in found]
        added = runs.map(added_to, states, splits, features, finite, often=True)
        return added.map(lambda both: both[0]), runs.fetch(added.map(lambda both: both[1]))

    def _drawn(self, runs: Runs, i: int, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Returns the rows of a round, the factors of its features, and its combinations of outputs.

        Rows are -1 for padding, and factors are 1 or 0. The combinations are ``(outputs, targets)``, or None for all
        outputs.
        """
        (n, p), rng, real = runs.shape, runs.rng(i, _DRAWN + number), np.flatnonzero(runs.weighed(i))
        rows = np.full(rows_of_round(n, self.subsample, self._most_rows), -1, np.int32)
        count = rows_of_round(len(real), self.subsample, self._most_rows)
        some = np.sort(rng.choice(real, count, replace=False, shuffle=False))
        rows[: len(some)] = some
        features = np.zeros(p, np.float32)
        features[rng.permutation(p)[: max(1, round(self.columns * p))]] = 1
        outputs, few = math.prod(runs.task.shape), math.prod(of_base(runs.task).shape)
        if few == outputs:
            return rows, features, None
        mixes = rng.normal(size=(outputs, few)).astype(np.float32)
        # Nonnegative combinations keep the order of the outputs.
        return rows, features, mixes if runs.monotone is None else np.abs(mixes)

    @property
    def _most_rows(self) -> int | None:
        """The limit of rows for the splits of the base, or of the recipe within it; None for no limit."""
        base: Any = self.base
        while not hasattr(base, "rows") and hasattr(base, "base"):
            base = base.base
        return most_rows(base) if hasattr(base, "rows") else None

    # --- The result ---

    def result(self, boosting: "Boosting", validates: bool) -> SearchResult:
        """Returns the rounds up to the lowest loss, from the first fit if the last fit was interrupted."""
        tried, last = boosting.tried, boosting.last
        chosen = last if tried is None or len(last.trees) >= tried.best else tried
        count = last.best if tried is None else min(tried.best, len(chosen.trees))
        judged = last if tried is None else tried
        lost = np.full(self.rounds, np.inf, np.float32)
        if self.patience is not None:
            lost[: len(judged.losses)] = judged.losses
        dropped = sum(not ok for ok in chosen.finite)
        score = float((chosen.losses if validates else chosen.after)[count - 1])
        finite = np.isfinite(score) and dropped < len(chosen.trees)
        report = BoostedReport(rounds=count, dropped=dropped, losses=lost)
        result = SearchResult(chosen.first(count), score, finite, count, report, np.array(chosen.before))
        if tried is None or not np.isfinite(lost).any():
            return result
        if boosting.last is tried and len(boosting.parts) == 1:
            return result._replace(held_out=(HeldOut(None, boosting.parts[0][1]),))
        held_out, count = [], len(boosting.parts)
        for number, (part, rows) in enumerate(boosting.parts):
            model = part.first(tried.best)
            if count > 1:
                model = _part_of_mean(chosen.first(tried.best)[0], count, number), part.initial
            held_out.append(HeldOut(result._replace(model=model, finite=True), rows))
        return result._replace(held_out=tuple(held_out))

    def finish(self, result: SearchResult, data: Data, **of_run: Any) -> Finished:
        check_finite(result)
        trees, initial = result.model
        task = data.table.task
        # The initial outputs are part of the first tree.
        leaves = trees.leaves.with_outputs(lambda a: np.concatenate([a[:1] + initial, a[1:]]))
        forest = Forest(trees.replace(leaves=leaves), "sum", task.link_name).restored(data.scaling)
        rows = len(data.table.x)
        kept = rows - rows // _FOLDS if len(result.held_out) > 1 else rows
        rows = rows_of_round(kept, self.subsample, self._most_rows)
        report = result.report.replace(rows=rows)
        # Predicting all rows of a long table takes half the time of boosting.
        known = len(data.table.x) > _MANY_ROWS and data.validation is None
        loss = float(result.score) * data.loss_unit if known else loss_of(result, forest, data, task)
        return Finished(forest, None, loss, report)


class Boosting(NamedTuple):
    """The boosting of a run.

    Attributes:
      last: the sum fitted to all rows, or ``tried`` if there is no second fit.
      tried: the sum fitted without the held-out rows, or None. If there are several folds, the mean of their sums.
      parts: the sums that held out rows, with these rows, ``(n,)`` bool: ``tried``, or the sums of the folds.
    """

    last: Sum
    tried: Sum | None
    parts: tuple[tuple[Sum, np.ndarray], ...]


def rows_of_round(n: int, subsample: float, most: int | None = None) -> int:
    """Returns the number of rows that a round draws from n rows, at most ``most``."""
    count = max(1, round(subsample * n))
    return count if most is None else min(count, most)


def _part_of_mean(trees: ObliqueTree, parts: int, number: int) -> ObliqueTree:
    """Returns the trees of the mean of sums, with leaves of 0 in the trees of all sums but one.

    This sum has the shape of the mean, so both predict with one program.
    """
    mask = np.arange(len(trees.bias)) % parts == number
    scaled = lambda a: np.where(mask.reshape(-1, *[1] * (a.ndim - 1)), np.float32(parts) * a, 0)
    return trees.replace(leaves=jax.tree.map(scaled, trees.leaves))
