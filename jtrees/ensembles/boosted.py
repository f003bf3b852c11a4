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
from jtrees.data import Data
from jtrees.ensembles.boosting_round import Sum, added_to, base_task, initial_state, target
from jtrees.ensembles.wrapper import Wrapper
from jtrees.forest import Forest
from jtrees.methods.annealed.get import GET
from jtrees.search import Fitted, LeftOut, Problem, Recipe, Report, fold_rows, gather, options
from jtrees.search.recipe import check_keeps_splits, loss_of
from jtrees.search.sample import most_rows
from jtrees.tasks import Policy, Task, check_log_loss
from jtrees.training import Batch
from jtrees.tree import ObliqueTree
from jtrees.validation import quoted

_FEWEST_HELD_OUT = 10  # fewest held-out rows that can choose the number of rounds
# In a table of at most _FEW_ROWS rows, each fifth is held out once: one fifth alone is too small for this choice.
_FEW_ROWS, _FOLDS = 1000, 5
_MANY_ROWS = 100_000  # in longer tables, the reported training loss is the loss of the last round
_DRAWN = 1000  # this plus the round is the purpose number of the random generator of a round: see ``Problem.rng``


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
class Boosted(Wrapper):
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

    is_tree = False

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        if isinstance(task, Policy):
            raise ValueError("task must not be a Policy: a sum of trees plays no single action in a leaf")
        check_log_loss(task)
        super().check(base_task(task), shape)
        check_keeps_splits(self.base)
        if self.base.tree_leaves(base_task(task)) is None:
            raise ValueError(f"base must end in a single tree, got {quoted(self.base)}")

    def settled(self, weak: bool = False) -> Any:
        return self.replace(base=self.base.settled(weak=True))

    def keeps_monotone(self, task: Task) -> bool:
        return super().keeps_monotone(base_task(task))

    # --- The procedure ---

    async def search(self, problem: Problem) -> Fitted:
        boosting = await self.boosted(problem, _FOLDS if problem.count <= _FEW_ROWS else 1)
        fitted, data = self.scaled(problem, boosting), problem.data
        if data is None:
            return fitted
        with problem.finishing():
            model = _forest(data, *fitted.scaled)
            # Predicting all rows of a long table takes half the time of boosting.
            is_long = problem.count > _MANY_ROWS and not problem.validates
            loss = fitted.score * data.loss_unit if is_long else loss_of(fitted, model, data)
            return fitted._replace(model=model, loss=loss, left_out=_left_out(problem, boosting, model))

    async def boosted(self, problem: Problem, folds: int = 1) -> "Boosting":
        """Returns boosted sums. If there is no validation set, a fit on four fifths of the rows finds the rounds.

        Args:
          problem: the problem.
          folds: number of sums. Each sum holds out a different fifth of the rows. The mean loss of the sums chooses the
            number of rounds, and the model is the mean of the sums.
        """
        scaled = problem.replace(data=None)
        if self.patience is None or problem.validates:
            [only] = await self._sums([scaled], self.rounds, self.patience)
            return Boosting(only, only, [])
        masks = fold_rows(problem, folds)
        if min(mask.sum() for mask in masks) * folds < _FEWEST_HELD_OUT:
            needed_rows = -(-_FEWEST_HELD_OUT // folds) * 5
            raise ValueError(f"patience must be None for fewer than {needed_rows} rows without a validation set")
        parts = scaled.repeat(folds) if folds > 1 else [scaled]
        parts = [part.without(mask) for part, mask in zip(parts, masks, strict=True)]
        shares = [np.average(mask, weights=problem.batch.weight) for mask in masks]
        sums = await self._sums(parts, self.rounds, self.patience, shares)
        judged = sums[0] if folds == 1 else Sum.mean(sums)
        held_out = list(zip(sums, masks, strict=True))
        limit, rows = self._most_rows, np.count_nonzero(problem.weighed & ~masks[0])
        if folds > 1 or (limit is not None and limit <= self.subsample * rows):
            # A second fit would draw the same number of rows for its splits.
            return Boosting(judged, judged, held_out)
        [last] = await self._sums([scaled.without(np.zeros_like(masks[0]))], judged.best, None)
        return Boosting(last if len(last.trees) >= judged.best else judged, judged, held_out)

    async def _sums(
        self, problems: list[Problem], rounds: int, patience: int | None, shares: list[float] | None = None
    ) -> list[Sum]:
        """Returns sums of trees, with a tree for each round, until ``patience`` rounds did not lower the loss.

        The loss is the mean over the problems, weighted by ``shares``.
        """
        name, monitor = type(self).__name__, problems[0].monitor
        states = await gather(*(problem.map(initial_state) for problem in problems))
        sums = [Sum(state.part(0).host, [], [], [], [], []) for state in states]
        with monitor.over(rounds, name) as show:
            for number in range(rounds):
                is_over = patience is not None and sums[0].stalled >= patience
                if is_over or monitor.is_rehearsed(number) or (number and not monitor.has_time()):
                    break
                pairs = zip(problems, states, strict=True)
                added = await gather(*(self._round(problem, state, number) for problem, state in pairs))
                states, results = [value.part(0) for value in added], [value.part(1).host for value in added]
                loss = np.average([result[1] for result in results], weights=shares)
                for total, (tree, _, *numbers) in zip(sums, results, strict=True):
                    total.add(tree, loss, *numbers)
                show(number + 1, [np.array(total.before[-1:]) for total in sums])
            monitor.where = f"{name}: {len(sums[0].trees)} of at most {rounds} rounds"
        return _of_equal_size(sums)

    async def _round(self, problem: Problem, state: Any, number: int) -> Any:
        """Returns the result of :func:`added_to` for a tree of the base, fitted to the Newton steps."""
        rows, features, mixes = self._draw(problem, number)
        batch = await problem.map(target, state, rows, features, mixes, often=True)
        # Only the splits of the base are used: boosting replaces its leaves. So the base does not choose a shrinkage.
        base = problem.recipe.base
        base = base.replace(shrink=False) if hasattr(base, "shrink") else base
        steps: Any = [batch.part(number) for number in range(3)]
        on_steps: Any = {"task": base_task(problem.task), "batch": Batch(*steps), "rows": None}
        on_steps |= {"evaluation": None, "validates": False, "evaluates": False, "separate": False}
        try:
            tree, finite = (await base.search(problem.keyed(number).replace(recipe=base, **on_steps))).scaled, True
        except FloatingPointError:
            weights: Any = np.zeros((1, problem.shape[1]), np.float32)
            tree, finite = ObliqueTree(weights, weights[:, 0], None), False
        splits = ObliqueTree(np.asarray(tree.weights), np.asarray(tree.bias), None)  # type: ignore[arg-type]
        return await problem.map(added_to, state, splits, features, np.bool_(finite), often=True)

    def _draw(self, problem: Problem, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Returns the rows of a round, the factors of its features, and its combinations of outputs.

        Rows are -1 for padding, and factors are 1 or 0. The combinations are ``(outputs, targets)``, or None for all
        outputs.
        """
        (n, p), rng, real = problem.shape, problem.rng(_DRAWN + number), np.flatnonzero(problem.weighed)
        rows = np.full(rows_of_round(n, self.subsample, self._most_rows), -1, np.int32)
        count = rows_of_round(len(real), self.subsample, self._most_rows)
        rows[:count] = np.sort(rng.choice(real, count, replace=False, shuffle=False))
        features = np.zeros(p, np.float32)
        features[rng.permutation(p)[: max(1, round(self.columns * p))]] = 1
        outputs, targets = (math.prod(task.shape) for task in (problem.task, base_task(problem.task)))
        if targets == outputs:
            return rows, features, None
        mixes = rng.normal(size=(outputs, targets)).astype(np.float32)
        # Nonnegative combinations keep the order of the outputs.
        return rows, features, mixes if problem.monotone is None else np.abs(mixes)

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
        chosen, judged, count, rows = boosting.chosen, boosting.judged, boosting.judged.best, problem.count
        losses = np.full(self.rounds, np.inf, np.float32)
        if self.patience is not None:
            losses[: len(judged.losses)] = judged.losses
        score, dropped = (chosen.losses if problem.validates else chosen.after)[count - 1], chosen.finite.count(False)
        if not np.isfinite(score) or dropped == len(chosen.trees):
            raise FloatingPointError("training became non-finite: try a smaller learning_rate")
        rows = rows_of_round(rows - rows // _FOLDS if boosting.is_mean else rows, self.subsample, self._most_rows)
        report = BoostedReport(rounds=count, dropped=dropped, losses=losses, rows=rows)
        return Fitted(chosen.first(count), score, count, np.array(chosen.before), report=report)


class Boosting(NamedTuple):
    """The sums of a boosting.

    Attributes:
      chosen: the sum of the model.
      judged: the sum whose losses chose the number of rounds: ``chosen``, or the sum of a first fit.
      parts: the sums that held out rows, with these rows, ``(n,)`` bool. If there are several, ``chosen`` is their
        mean.
    """

    chosen: Sum
    judged: Sum
    parts: list[tuple[Sum, np.ndarray]]

    @property
    def is_mean(self) -> bool:
        """Whether the model is the mean of several sums."""
        return len(self.parts) > 1

    @property
    def has_losses(self) -> bool:
        """Whether there are losses of held-out rows."""
        return bool(self.parts) and bool(np.isfinite(self.judged.losses).any())


def rows_of_round(n: int, subsample: float, limit: int | None = None) -> int:
    """Returns the number of rows that a round draws from n rows, at most ``limit``."""
    count = max(1, round(subsample * n))
    return count if limit is None else min(count, limit)


def _of_equal_size(sums: list[Sum]) -> list[Sum]:
    """Returns the sums with trees of one size. A smaller tree, whose outputs are 0, stands for a base that failed."""
    largest = max((tree for total in sums for tree in total.trees), key=lambda tree: tree.bias.size)
    empty = jax.tree.map(np.zeros_like, largest)
    resized = lambda tree: tree if tree.bias.size == empty.bias.size else empty
    return [total._replace(trees=[*map(resized, total.trees)]) for total in sums]


def _forest(data: Data, trees: ObliqueTree, initial: np.ndarray) -> Forest:
    """Returns a sum in the user's units. The initial outputs are part of the first tree."""
    leaves = trees.leaves.with_outputs(lambda a: np.concatenate([a[:1] + initial, a[1:]]))
    return Forest(trees.replace(leaves=leaves), "sum", data.table.task.link_name).restored(data.scaling)


def _left_out(problem: Problem, boosting: Boosting, model: Forest) -> LeftOut | None:
    """Returns the losses of held-out rows by the sums that were not trained on them."""
    if not boosting.has_losses:
        return None
    data: Any = problem.data
    (chosen, judged, parts), losses = boosting, []
    for number, (part, held_out) in enumerate(parts):
        trees, initial = part.first(judged.best)
        if boosting.is_mean:
            trees = _part_of_mean(chosen.first(judged.best)[0], len(parts), number)
        without = model if chosen is part else _forest(data, trees, initial)
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
