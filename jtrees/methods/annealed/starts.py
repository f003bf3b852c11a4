"""The starts of the annealed algorithm: CART trees, random splits, their preconditioners and held-out rows."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jaxtyping import Array
import numpy as np

from jtrees import splitting, topology
from jtrees.data.table import without_padding
from jtrees.methods.annealed.stages import Start
from jtrees.monotone import without_negative
from jtrees.search import Run, Runs
from jtrees.search.cart import grown_cart, grown_in_bins, grown_on_ridge
from jtrees.search.monitor import Monitor
from jtrees.search.precondition import WIDEST, drawn_folds, matrix, spectrum
from jtrees.tasks import Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree

# Unit of the features, in standard deviations: about the range of a uniform variable. The paper's learning rate,
# sharpnesses and random initialisation assume features in [0, 1].
DEVIATIONS = 3.0
# Strengths of the preconditioners of the random starts, in their order. The starts from CART have no preconditioner:
# CART splits single features, and the ridge regression accounts for correlations.
_STRENGTHS = (0.9, 0.0, 0.99, 0.0, 0.999, 0.0)
_BINS, _ROWS_OF_BINS = 256, 200_000  # bins of a feature in compiled CART, and largest number of rows for their edges
_WIDEST_RIDGE = 2048  # largest min(n, p) for a ridge regression, which costs min(n, p)**3
# Short stages hold out a fifth of the rows. In tables with at most _FEW_ROWS rows, different starts hold out different
# fifths: a single fifth is too small to compare the starts with CART.
_FOLDS, _FEW_ROWS = 5, 1000
_DRAWN, _FOLD, _ORDERING = 2, 3, 1000  # purpose numbers of the random generators: see ``Runs.rng``
_PREPARATION = 0.4  # part of the time before a deadline that CART may take


# --- Held-out rows ---------------------------------------------------------------------------------------------------


def folds_of(recipe: Any, runs: Runs) -> list[np.ndarray] | None:
    """Returns the fold of each row of each run, -1 for no fold; or None if there are too few rows to hold any out."""
    batches = [runs.rows(i) for i in range(len(runs))]
    count = min(_FOLDS, recipe.starts) if runs.count <= _FEW_ROWS and recipe.cart is True else 1
    folds = [drawn_folds(rows, runs.rng(i, _FOLD), count) for i, rows in enumerate(batches)]
    return folds if all((fold >= 0).any() for fold in folds) else None


def held_out_rows(fold: np.ndarray, starts: int) -> list[np.ndarray]:
    """Returns the held-out rows of each start: start i holds out fold i, and the folds repeat after the last fold."""
    rows = [fold == number for number in range(fold.max() + 1)]
    return [rows[start % len(rows)] for start in range(starts)]


# --- CART ------------------------------------------------------------------------------------------------------------


class Grown(NamedTuple):
    """The CART trees of a run: a tree of the features and, with ``ridge``, a tree of the outputs of a ridge regression.

    Attributes:
      trees: the trees grown on all rows.
      without: for each fold, the trees grown without its rows. If there are no folds, the trees grown on all rows.
    """

    trees: list[ObliqueTree]
    without: list[list[ObliqueTree]]

    def of_start(self, k: int) -> list[ObliqueTree]:
        """Returns the trees grown without the rows that start k holds out."""
        return self.without[k % len(self.without)]


def grown_trees(recipe: Any, runs: Runs, folds: list[np.ndarray] | None) -> list[Grown]:
    """Returns the CART trees of each run."""
    monitor = runs.monitor.part(_PREPARATION)
    grown = partial(_grown, recipe, task=runs.task, monotone=runs.monotone)
    if recipe.cart == "binned":
        edges = runs.shared_once("edges", lambda rows: monitor.on_rows(_edges_of, without_padding(rows)))
        return [Grown([], [[tree]]) for tree in runs.fetch(runs.map(_binned_cart, shared=(edges,), often=True))]
    if not recipe.cart:
        return [Grown([], [[]])] * len(runs)
    on_all = runs.each_once(lambda i: grown(runs.rows(i), monitor=monitor.part(0.5)))
    if folds is None:
        return [Grown(trees, [trees]) for trees in on_all]
    without = runs.each_once(lambda i: _without_folds(grown, runs.rows(i), folds[i], monitor), keyed=True)
    return [Grown(*both) for both in zip(on_all, without, strict=True)]


def _grown(recipe: Any, rows: Batch, *, task: Task, monotone: np.ndarray | None, monitor: Monitor) -> list[ObliqueTree]:
    """Returns CART of the features and, with ``ridge``, CART of the outputs of a ridge regression."""
    real, ridge = without_padding(rows), _has_ridge(recipe, rows.x.shape)
    of_cart = lambda rows: grown_cart(rows, task, recipe.depth, recipe.leaves, monotone=monotone)
    trees = [monitor.part(0.5 if ridge else 1).on_rows(of_cart, real)]
    if ridge:
        trees.append(monitor.on_rows(lambda rows: grown_on_ridge(rows, task, recipe.depth, 1 / DEVIATIONS), real))
    signed = lambda tree: without_negative(np.asarray(tree.weights), monotone)
    return [ObliqueTree(signed(one), np.asarray(one.bias), None) for one in trees]  # type: ignore[arg-type]


def _without_folds(
    grown: Callable[..., list[ObliqueTree]], rows: Batch, fold: np.ndarray, monitor: Monitor
) -> list[list[ObliqueTree]]:
    """Returns the trees grown without each fold."""
    some: Any = lambda f: Batch(*(None if a is None else np.asarray(a)[fold != f] for a in rows))  # type: ignore[arg-type]
    count = fold.max() + 1
    return [grown(some(f), monitor=monitor.part(1 / (count - f))) for f in range(count)]


def _has_ridge(recipe: Any, shape: tuple[int, ...]) -> bool:
    several = recipe.cart is True and recipe.leaves == "constant" and recipe.starts > 1
    return recipe.ridge and several and min(shape) <= _WIDEST_RIDGE


def _edges_of(rows: Batch) -> np.ndarray:
    x = np.asarray(rows.x)
    if len(x) > _ROWS_OF_BINS:
        x = x[np.random.default_rng(0).choice(len(x), _ROWS_OF_BINS, replace=False, shuffle=False)]
    return splitting.edges_of(x, _BINS)


def _binned_cart(run: Run, edges: Array) -> ObliqueTree:
    return ObliqueTree(*grown_in_bins(run.batch, edges, run.task, run.recipe.depth), None)


# --- The starts ------------------------------------------------------------------------------------------------------


def initial_starts(recipe: Any, runs: Runs, grown: list[Grown]) -> list[Start]:
    """Returns all starts of all runs: the starts from CART first, then the random starts.

    The first half of the sharpnesses of a start is for its short stages.
    """
    p, nodes, numbers = runs.shape[1], topology.num_nodes(recipe.depth), 2 * recipe.stages
    monotone = runs.monotone
    spectra: list[Any] = [None] * len(runs)
    if recipe.precondition != 0 and (recipe.precondition != "auto" or p <= WIDEST):
        spectra = runs.each_once(lambda i: spectrum(runs.rows(i), monotone))
    strengths = strengths_of(recipe, _has_ridge(recipe, runs.shape))
    starts: list[Start] = []
    for i, (trees, of) in enumerate(zip(grown, spectra, strict=True)):
        drawn = runs.rng(i, _DRAWN).random((recipe.starts, numbers + nodes * (p + 1)), np.float32)
        sharpness = [runs.recipes[i].sharpness(part) for part in np.split(drawn[:, :numbers], 2, axis=1)]
        splits = 2 * drawn[:, numbers:].reshape(-1, nodes, p + 1) - 1
        matrices = {} if of is None else {strength: matrix(of, strength) for strength in set(strengths)}
        for k, strength in enumerate(strengths):
            weights = splits[k, :, :-1]
            if monotone is not None:  # half of the splits ignores the monotone features, so it orders no leaves
                ordering = runs.rng(i, _ORDERING + k).random(nodes) < 0.5
                weights = np.where(monotone, np.where(ordering[:, None], np.abs(weights), 0), weights)
            first = ObliqueTree(weights, splits[k, :, -1], None)  # type: ignore[arg-type]
            if k < len(given := trees.of_start(k)):
                first = composed(given[k], matrix(of, strength, 0.5) if of is not None and strength else None)
            starts.append(Start(first, np.append(sharpness[0][k], sharpness[1][k]), matrices.get(strength)))
    return starts


def strengths_of(recipe: Any, has_ridge: bool) -> np.ndarray:
    """Returns the strength of the preconditioner of each start, ``(starts,)``."""
    if recipe.precondition != "auto":
        return np.full(recipe.starts, recipe.precondition, np.float32)
    drawn = np.append(np.zeros(1 + has_ridge), np.resize(_STRENGTHS, recipe.starts))
    return drawn[: recipe.starts].astype(np.float32)


def composed(splits: ObliqueTree, with_matrix: np.ndarray | None) -> ObliqueTree:
    """Returns splits of ``x @ matrix`` as splits of x, on the host."""
    weights, bias = np.asarray(splits.weights), np.asarray(splits.bias)
    return ObliqueTree(weights if with_matrix is None else weights @ with_matrix.T, bias, None)  # type: ignore[arg-type]
