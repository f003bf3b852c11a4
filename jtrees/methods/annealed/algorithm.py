"""Algorithm 1 of GET with successive halving: many starts under increasingly sharp routings, the first from CART.

:class:`jtrees.GET` and :class:`jtrees.RADDT` are this algorithm; each adds its soft routing and its sharpnesses.
"""

import itertools
from typing import Any, NamedTuple

from jaxtyping import Array
import numpy as np

from jtrees import leaves as kinds, splitting, topology, training, validation as checks
from jtrees.data import Data, Scaling, Table, without_padding
from jtrees.methods.annealed.stages import Ended, Start, held_out_loss, train_stages
from jtrees.search import Finished, Recipe, Run, Runs, SearchResult
from jtrees.search.cart import grown_cart, grown_in_bins, grown_on_ridge
from jtrees.search.monitor import Monitor
from jtrees.search.precondition import WIDEST, drawn_folds, matrix, spectrum
from jtrees.tasks import Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree

# Unit of the features, in standard deviations: about the range of a uniform variable. The paper's learning rate,
# sharpnesses and random initialisation assume features in [0, 1].
DEVIATIONS = 3.0
# Slopes of linear leaves in the user's units for which products with fractions of a deviation stay in float32's range.
_FLATTEST, _STEEPEST = 1e-37, 1e36
_NONE_EXPECTED = 1e30  # a criterion above it, for targets in [0, 1], means that no expected error is defined
# Strengths of the preconditioners of the random starts, in turn. Those from CART, which come first, have none: splits
# of single features ask for none, and those of a ridge regression know the correlations.
_STRENGTHS = (0.9, 0.0, 0.99, 0.0, 0.999, 0.0)
_BINS = 256  # of a feature, for CART within a compiled program
_WIDEST_RIDGE = 2048  # features and samples beyond which there is no ridge regression, which costs min(n, p)**3
# With halving, starts first have this part of the epochs, and this part of them goes on, but at least so many, which on
# one CPU take as long as one.
_SHORT, _KEPT, _FEWEST_KEPT = 10, 5, 2
# Short stages leave a fifth of the rows out. In tables of at most so many rows the starts leave out each fifth in turn,
# as one fifth says little of whether they are better than CART.
_FOLDS, _FEW_ROWS = 5, 1000
_DRAWN, _FOLD = 2, 3  # what random numbers are for: see ``Runs.rng``
_PREPARATION = 0.4  # part of the time before a deadline that CART may take


class _Grown(NamedTuple):
    """CART's trees of a run: of the features and, with ``ridge``, of the outputs of a ridge regression.

    Attributes:
      trees: the trees of all rows.
      without: the trees grown without each fold, a list for each fold; without folds those of all rows.
    """

    trees: list[ObliqueTree]
    without: list[list[ObliqueTree]]

    def of_start(self, k: int) -> list[ObliqueTree]:
        """Returns the trees that have not seen the rows that start k leaves out."""
        return self.without[k % len(self.without)]


class _Found(NamedTuple):
    """What ``finish`` needs besides the best splits.

    Attributes:
      start: number of the best start.
      grown: CART's trees of all rows.
      beaten_by: number of the one of these that no start is better than on held-out rows, or -1.
      losses: score of each start in each stage, ``(starts, stages)``.
      dropped: number of starts that became non-finite.
    """

    start: int
    grown: list[ObliqueTree]
    beaten_by: int
    losses: np.ndarray
    dropped: int


class Annealed(Recipe):
    """A recipe of this algorithm.

    It has the options ``depth``, ``leaves``, ``starts``, ``learning_rate``, ``cart``, ``ridge``, ``precondition``,
    ``shrink`` and ``halving``.
    """

    depth: Any
    leaves: Any
    starts: Any
    cart: Any
    ridge: Any
    precondition: Any
    shrink: Any
    halving: Any

    def method(self, sharpness: Array, task: Task) -> training.Method:
        """Returns the method under a sharpness."""
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
        """Returns the splits with which the next stage begins, and their score."""
        return splits, score

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        kinds.kind_of(self.leaves, task)  # raises for linear leaves of classes
        numbers = topology.num_nodes(self.depth) * (shape[1] + 1)  # of a start
        checks.check_count("starts", self.starts, most=checks.MAX_NUMBERS // numbers)

    def tree_leaves(self, task: Task) -> str:
        return self.leaves

    def scaling(self, table: Table) -> Scaling:
        fitted = Scaling.fit(table, DEVIATIONS)
        if self.leaves == "linear":
            _check_slopes(fitted)
        return fitted

    # --- The procedure ---

    def search(self, runs: Runs) -> list[SearchResult]:
        """Trains all starts for a tenth of the updates, then the best of them for all, and chooses the best tree.

        The short stages leave rows out, by which the starts are compared with each other and with CART. On a validation
        set, and with linear leaves, whose criterion is an expected error, no rows are left out.
        """
        kept = max(_FEWEST_KEPT, self.starts // _KEPT)
        halves = self.halving and self.starts > kept
        folds = self._drawn_folds(runs) if halves and self.leaves == "constant" and runs.validation is None else None
        starts, grown = self._initial(runs, folds)
        each, first, last = runs.repeat(self.starts, paired=True), slice(0, self.stages), slice(self.stages, None)
        if not halves:
            ended = train_stages(each, [one.in_stages(last) for one in starts], self.updates)
            return self._results(starts, grown, [], dict(enumerate(ended)), [-1] * len(runs))

        short = each if folds is None else each.on(held_out=[*itertools.chain(*map(self._left_out, folds))])
        ended = train_stages(short, [one.in_stages(first) for one in starts], max(1, self.updates // _SHORT))
        scores, beaten_by = np.array([end.score for end in ended]), [-1] * len(runs)
        if folds is not None:
            scores, beaten_by = self._compared(short, starts, ended, grown, folds, each, kept)
        chosen = _lowest(scores.reshape(len(runs), -1), kept, beaten_by)
        going = [starts[k].in_stages(last)._replace(splits=ended[k].splits) for k in chosen]
        long = each.select(chosen)
        if folds is not None:  # for the same programs
            long = long.on(held_out=[np.zeros(runs.shape[0], bool)] * len(chosen))
        longer = train_stages(long, going, self.updates) if chosen else []
        return self._results(starts, grown, ended, dict(zip(chosen, longer, strict=True)), beaten_by, folds is None)

    def _drawn_folds(self, runs: Runs) -> list[np.ndarray] | None:
        """Returns the fold of each row of each run, -1 for none; None if there are too few rows to leave any out."""
        batches = [runs.rows(i) for i in range(len(runs))]
        real = [len(rows.x) if rows.weight is None else np.count_nonzero(rows.weight) for rows in batches]
        count = min(_FOLDS, self.starts) if max(real) <= _FEW_ROWS and self.cart is True else 1
        folds = [drawn_folds(rows, runs.rng(i, _FOLD), count) for i, rows in enumerate(batches)]
        return folds if all((fold >= 0).any() for fold in folds) else None

    def _left_out(self, fold: np.ndarray) -> list[np.ndarray]:
        """Returns the rows that each start leaves out: fold i by start i, counted from 0 again after the last."""
        rows = [fold == number for number in range(fold.max() + 1)]
        return [rows[start % len(rows)] for start in range(self.starts)]

    def _initial(self, runs: Runs, folds: list[np.ndarray] | None) -> tuple[list[Start], list[_Grown]]:
        """Returns all starts of all runs, and CART's trees of each run."""
        (n, p), nodes, monitor = runs.shape, topology.num_nodes(self.depth), runs.monitor.part(_PREPARATION)
        grown = [_Grown([], [[]])] * len(runs)
        if self.cart == "binned":
            edges = runs.shared_once("edges", lambda rows: monitor.on_rows(_edges_of, without_padding(rows)))
            grown = [_Grown([], [[tree]]) for tree in runs.fetch(runs.map(_binned_cart, shared=(edges,), often=True))]
        elif self.cart:
            on_all = runs.each_once(lambda i: self._grown(runs.rows(i), runs.task, monitor.part(0.5)))
            some = [[trees] for trees in on_all]
            if folds is not None:
                of_folds = lambda i: self._grown_without(runs.rows(i), folds[i], runs.task, monitor)
                some = runs.each_once(of_folds, keyed=True)
            grown = [_Grown(*both) for both in zip(on_all, some, strict=True)]
        spectra, strengths = None, self._strengths(self._has_ridge(n, p))
        if self.precondition != 0 and (self.precondition != "auto" or p <= WIDEST):
            spectra = runs.each_once(lambda i: spectrum(runs.rows(i)))
        starts: list[Start] = []
        for i, of_run in enumerate(grown):
            drawn = runs.rng(i, _DRAWN).random((self.starts, 2 * self.stages + nodes * (p + 1)), np.float32)
            sharpness = [runs.recipes[i].sharpness(part) for part in np.split(drawn[:, : 2 * self.stages], 2, axis=1)]
            numbers = 2 * drawn[:, 2 * self.stages :].reshape(-1, nodes, p + 1) - 1
            matrices = {s: matrix(spectra[i], s) for s in set(strengths)} if spectra is not None else {}
            for k in range(self.starts):
                splits, trees = ObliqueTree(numbers[k, :, :-1], numbers[k, :, -1], None), of_run.of_start(k)
                if k < len(trees):
                    root = matrix(spectra[i], strengths[k], 0.5) if spectra is not None and strengths[k] else None
                    splits = _composed(trees[k], root)
                starts.append(Start(splits, np.append(sharpness[0][k], sharpness[1][k]), matrices.get(strengths[k])))
        return starts, grown

    def _strengths(self, has_ridge: bool) -> np.ndarray:
        """Returns the strength of the preconditioner of each start, ``(starts,)``."""
        if self.precondition != "auto":
            return np.full(self.starts, self.precondition, np.float32)
        drawn = np.append(np.zeros(1 + has_ridge), np.resize(_STRENGTHS, self.starts))
        return drawn[: self.starts].astype(np.float32)

    def _has_ridge(self, n: int, p: int) -> bool:
        several = self.cart is True and self.leaves == "constant" and self.starts > 1
        return self.ridge and several and min(n, p) <= _WIDEST_RIDGE

    def _grown(self, rows: Batch, task: Task, monitor: Monitor) -> list[ObliqueTree]:
        """Returns CART of the features and, with ``ridge``, of the outputs of a ridge regression."""
        real, has_ridge = without_padding(rows), self._has_ridge(*rows.x.shape)
        of_cart = lambda rows: grown_cart(rows, task, self.depth, self.leaves)
        trees = [monitor.part(0.5 if has_ridge else 1).on_rows(of_cart, real)]
        if has_ridge:
            trees.append(monitor.on_rows(lambda rows: grown_on_ridge(rows, task, self.depth, 1 / DEVIATIONS), real))
        return [ObliqueTree(np.asarray(one.weights), np.asarray(one.bias), None) for one in trees]

    def _grown_without(self, rows: Batch, fold: np.ndarray, task: Task, monitor: Monitor) -> list[list[ObliqueTree]]:
        """Returns the trees grown without each fold."""
        some: Any = lambda f: Batch(*(None if a is None else np.asarray(a)[fold != f] for a in rows))  # type: ignore[arg-type]
        count = fold.max() + 1
        return [self._grown(some(f), task, monitor.part(1 / (count - f))) for f in range(count)]

    def _compared(
        self,
        runs: Runs,
        starts: list[Start],
        ended: list[Ended],
        grown: list[_Grown],
        folds: list[np.ndarray],
        each: Runs,
        kept: int,
    ) -> tuple[np.ndarray, list[int]]:
        """Returns :func:`beside_cart` of all runs: the scores of all starts, and which tree of CART beats each run."""
        index = [*range(len(starts))]
        splits = [_composed(end.splits, one.matrix) for one, end in zip(starts, ended, strict=True)]
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
                weight = each.rows(i * self.starts).weight
                share = np.bincount(fold + 1, weight)[1:]
                scores[i], beaten_by[i] = beside_cart(scores[i], lost, share, kept)
        return scores.ravel(), beaten_by

    def _results(
        self,
        starts: list[Start],
        grown: list[_Grown],
        short: list[Ended],
        long: dict[int, Ended],
        beaten_by: list[int],
        alike: bool = False,
    ) -> list[SearchResult]:
        """Returns the result of each run.

        Args:
          starts: all starts of all runs.
          grown: CART's trees of each run.
          short: the short stages of all starts, or none.
          long: the other stages of those that went on, by number.
          beaten_by: which tree of CART beats all starts of a run, or -1.
          alike: whether the short stages were trained on the same rows, so that their trees count.
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
        """Returns the result of a run, from the stages of each start and those that count."""
        lowest = [min((end.score for end in some), default=np.inf) for some in counted]
        start = int(np.argmin(lowest))
        losses = _table([[end.scores for end in some] for some in stages], np.inf)
        steps = _table([[end.steps for end in some] for some in stages], 0)
        history = _table([[end.losses for end in some] for some in stages], np.nan)
        dropped = sum(not all(end.finite for end in some) for some in stages)
        report = {"sharpness": np.array([one.sharpness for one in starts])[:, -losses.shape[1] :], "steps": steps}
        if starts[0].matrix is not None:
            report["precondition"] = self._strengths(len(trees) > 1)
        found = _Found(start, trees, beaten_by, losses, dropped)
        if not np.isfinite(lowest[start]):
            splits = trees[0] if trees else starts[0].splits
            return SearchResult(splits, np.inf, bool(trees), 0, found, report, history)
        best = min(counted[start], key=lambda end: end.score)
        splits = _composed(best.splits, starts[start].matrix)
        return SearchResult(splits, best.score, True, best.step, found, report, history)

    # --- The result ---

    def finish(self, result: SearchResult, data: Data, *, key: Any = None, monitor: Monitor | None = None) -> Finished:
        found: _Found = result.extra
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
        tree, loss, chosen = min(candidates, key=lambda candidate: candidate[1])  # CART, if as good
        report = {"losses": found.losses.astype(np.float64) * data.loss_unit, "dropped": found.dropped}
        report |= {"cart_loss": float(cart_loss), "ridge_loss": float(ridge_loss), "chosen": chosen}
        if self.shrink and self.leaves == "constant":
            tree = data.refit(tree, "constant", shrink=True)[0]
            loss = data.loss(tree)
        tree = tree.merged()
        return Finished.of(result, data, tree, tree, loss, report)

    def _refitted(self, splits: ObliqueTree, data: Data) -> tuple[ObliqueTree, float]:
        """Returns the tree refitted in the user's units, and the loss it is chosen by."""
        tree, criterion = data.refit(splits, self.leaves)
        loss = data.loss(tree)
        if data.validation is not None or self.leaves == "constant":
            return tree, loss
        # At least the tree's training loss, which exceeds the criterion where outliers are clipped in scaled data; the
        # training loss alone where too few rows have weight for an expected error.
        return tree, max(criterion if criterion < _NONE_EXPECTED * data.loss_unit else 0.0, loss)

    def _carts(self, grown: list[ObliqueTree], data: Data, monitor: Monitor) -> list[list[ObliqueTree]]:
        """Returns, for each of the grown trees, its splits in the user's units.

        CART's tolerances are absolute and its thresholds exact on raw features only, so of it there are two, grown on
        scaled features and (where float32 represents them) on raw ones.
        """
        carts = [[data.scaling.restore_splits(tree)] for tree in grown]
        if carts and data.scaling.origin is None and monitor.has_time():
            table, task = data.table, data.table.task
            rows = Batch(table.x, table.y, table.weight)  # type: ignore[arg-type]
            of_cart = lambda rows: grown_cart(rows, task, self.depth, self.leaves)
            carts[0].append(monitor.part(0.5).on_rows(of_cart, rows))
        return carts


def beside_cart(own: np.ndarray, grown: np.ndarray, share: np.ndarray, kept: int) -> tuple[np.ndarray, int]:
    """Returns the scores of the starts of a run, and the number of the tree of CART that beats all of them, or -1.

    If CART, grown without the held-out rows, predicts them as well as the best start, no start goes on: splits of many
    features follow noise. With several folds the starts that would go on must be better on average. Folds differ in how
    hard they are to predict, so that a score is the loss beyond CART's; and the lowest of losses on different rows is
    lucky.

    Args:
      own: loss of each start on the rows that it leaves out, infinite if it is not finite, ``(starts,)``.
      grown: loss of each tree of CART on each fold, ``(folds, trees)``.
      share: total weight of each fold, ``(folds,)``.
      kept: number of starts that would go on.
    """
    best = int((share @ grown).argmin())
    ahead, several = own - np.resize(grown[:, best], len(own)), len(grown) > 1
    lowest = np.sort(ahead)[: kept if several else 1]
    lowest = lowest[np.isfinite(lowest)]
    is_better = len(lowest) > 0 and lowest.mean() < 0
    return ahead if several else own, -1 if is_better else best


def _lowest(scores: np.ndarray, kept: int, beaten_by: list[int]) -> list[int]:
    """Returns the numbers of the starts that go on: of each run that CART does not beat, those of the lowest scores."""
    chosen = []
    for i, (own, beaten) in enumerate(zip(scores, beaten_by, strict=True)):
        order = np.argsort(own, kind="stable")[:kept] if beaten < 0 else []
        chosen += [i * len(own) + k for k in order if np.isfinite(own[k])]
    return chosen


def _table(rows: list[list[np.ndarray]], gap: float) -> np.ndarray:
    """Returns the numbers of each start as a row of a table; rows that end early are filled up."""
    joined = [np.concatenate(one) if one else np.zeros(0) for one in rows]
    table = np.full((len(joined), max(map(len, joined))), gap, joined[0].dtype)
    for row, numbers in zip(table, joined, strict=True):
        row[: len(numbers)] = numbers
    return table


def _composed(splits: ObliqueTree, with_matrix: np.ndarray | None) -> ObliqueTree:
    """Returns splits of ``x @ matrix`` as splits of x, on the host."""
    weights, bias = np.asarray(splits.weights), np.asarray(splits.bias)
    return ObliqueTree(weights if with_matrix is None else weights @ with_matrix.T, bias, None)  # type: ignore[arg-type]


def _edges_of(rows: Batch) -> np.ndarray:
    return splitting.edges_of(np.asarray(rows.x), _BINS)


def _binned_cart(run: Run, edges: Array) -> ObliqueTree:
    return ObliqueTree(*grown_in_bins(run.batch, edges, run.task, run.recipe.depth), None)


def _check_slopes(scaling: Scaling) -> None:
    """Raises ``ValueError`` if slopes in the user's units are outside the range of float32."""
    if scaling.y_unit is None:  # outputs are not in the units of the targets
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
