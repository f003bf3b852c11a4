"""The starts of the annealed algorithm: CART trees, random splits, their preconditioners and held-out rows."""

from typing import Any, NamedTuple

from jaxtyping import Array
import numpy as np

from jtrees import splitting, topology
from jtrees.data.table import without_padding
from jtrees.monotone import without_negative
from jtrees.search import Problem, Run
from jtrees.search.cart import grown_cart, grown_in_bins, grown_on_ridge
from jtrees.search.monitor import Monitor
from jtrees.search.precondition import WIDEST, drawn_folds, matrix, spectrum
from jtrees.search.sample import drawn_rows
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
_DRAWN, _FOLD, _ORDERING = 2, 3, 1000  # purpose numbers of the random generators: see ``Problem.rng``
_PREPARATION = 0.4  # part of the time before a deadline that CART may take


class Start(NamedTuple):
    """A start: its initial splits and its hyperparameters, on the host.

    Attributes:
      splits: the initial splits, on preconditioned features, without leaves.
      short: sharpness of each short stage, ``(stages,)``.
      long: sharpness of each long stage, ``(stages,)``.
      matrix: the preconditioner, ``(p, p)``. None: the identity.
    """

    splits: ObliqueTree
    short: np.ndarray
    long: np.ndarray
    matrix: np.ndarray | None


class Carts(NamedTuple):
    """The CART trees of a problem: a tree of the features and, with ``ridge``, a tree of outputs of a ridge regression.

    Attributes:
      trees: the trees grown on all rows.
      without: for each fold, the trees grown without its rows. If there are no folds, the trees grown on all rows.
    """

    trees: list[ObliqueTree]
    without: list[list[ObliqueTree]]

    def of_start(self, k: int) -> list[ObliqueTree]:
        """Returns the trees grown without the rows that start k holds out."""
        return self.without[k % len(self.without)]


def drawn_fold(recipe: Any, problem: Problem) -> np.ndarray | None:
    """Returns the fold of each row, -1 for no fold; or None if there are too few rows to hold any out.

    Start k holds out fold k, and the folds repeat after the last fold.
    """
    count = min(_FOLDS, recipe.starts) if problem.count <= _FEW_ROWS and recipe.cart is True else 1
    fold = drawn_folds(problem.batch, problem.rng(_FOLD), count)
    return fold if (fold >= 0).any() else None


# --- CART ------------------------------------------------------------------------------------------------------------


async def grown_carts(recipe: Any, problem: Problem, fold: np.ndarray | None) -> Carts:
    """Returns the CART trees of a problem (GET, Algorithm 1, line 3)."""
    monitor = problem.monitor.part(_PREPARATION)
    if recipe.cart == "binned":
        source = problem.source or problem.batch
        edges = problem.host(_edges_of, source.x, source.weight, monitor=monitor)
        return Carts([], [[(await problem.map(_binned_cart, edges, often=True)).host]])
    if not recipe.cart:
        return Carts([], [[]])
    options = problem.task, problem.monotone, recipe.depth, recipe.leaves, has_ridge(recipe, problem.shape)
    trees = problem.host(_grown, problem.batch, *options, monitor=monitor.part(0.5))
    if fold is None:
        return Carts(trees, [trees])
    without, count = [], fold.max() + 1
    for number in range(count):
        arrays: Any = [np.asarray(array)[fold != number] for array in problem.batch]
        rows = Batch(*arrays)
        without.append(_grown(rows, *options, monitor=monitor.part(1 / (count - number))))
    return Carts(trees, without)


def _grown(
    rows: Batch, task: Task, monotone: np.ndarray | None, depth: int, leaves: str, ridge: bool, *, monitor: Monitor
) -> list[ObliqueTree]:
    """Returns CART of the features and, with ``ridge``, CART of the outputs of a ridge regression."""
    real = without_padding(rows)
    grow = lambda rows: grown_cart(rows, task, depth, leaves, monotone=monotone)
    trees = [monitor.part(0.5 if ridge else 1).on_rows(grow, real)]
    if ridge:
        trees.append(monitor.on_rows(lambda rows: grown_on_ridge(rows, task, depth, 1 / DEVIATIONS), real))
    signed = lambda tree: without_negative(np.asarray(tree.weights), monotone)
    return [ObliqueTree(signed(tree), np.asarray(tree.bias), None) for tree in trees]  # type: ignore[arg-type]


def cart_of_table(
    x: np.ndarray,
    y: np.ndarray,
    weight: np.ndarray | None,
    task: Task,
    signs: tuple[int, ...] | None,
    depth: int,
    leaves: str,
    most: int | None,
    *,
    monitor: Monitor,
) -> ObliqueTree:
    """Returns CART of a table in the user's units, grown on at most about ``most`` rows.

    ``signs`` has the sign of each monotone feature: see :class:`jtrees.data.Table`.
    """
    if most is not None and most < len(x):
        rows, weight = drawn_rows(y, weight, most, task, np.random.default_rng(0))
        x, y = x[rows], y[rows]
    # As in scaled data, a feature with a non-increasing effect changes its sign.
    monotone, factors = None, np.ones(x.shape[1], np.float32)
    if signs is not None:
        monotone, factors = np.not_equal(signs, 0), np.where(np.less(signs, 0), -factors, factors)
        x = x * factors.astype(x.dtype)
    grow = lambda rows: grown_cart(rows, task, depth, leaves, monotone=monotone)
    tree = monitor.on_rows(grow, Batch(x, y, weight))  # type: ignore[arg-type]
    return tree.replace(weights=np.asarray(tree.weights) * factors)


def has_ridge(recipe: Any, shape: tuple[int, ...]) -> bool:
    """Returns whether a start is CART on the outputs of a ridge regression."""
    several = recipe.cart is True and recipe.leaves == "constant" and recipe.starts > 1
    return recipe.ridge and several and min(shape) <= _WIDEST_RIDGE


def _edges_of(x: np.ndarray, weight: np.ndarray, *, monitor: Monitor) -> np.ndarray:
    rows: Any = without_padding(Batch(x, np.zeros(len(x)), weight))  # type: ignore[arg-type]
    return monitor.on_rows(_edges_of_rows, rows)


def _edges_of_rows(rows: Batch) -> np.ndarray:
    x = np.asarray(rows.x)
    if len(x) > _ROWS_OF_BINS:
        x = x[np.random.default_rng(0).choice(len(x), _ROWS_OF_BINS, replace=False, shuffle=False)]
    return splitting.edges_of(x, _BINS)


def _binned_cart(run: Run, edges: Array) -> ObliqueTree:
    return ObliqueTree(*grown_in_bins(run.batch, edges, run.task, run.recipe.depth), None)


# --- The starts ------------------------------------------------------------------------------------------------------


def initial_starts(recipe: Any, problem: Problem, carts: Carts) -> list[Start]:
    """Returns the starts: those from CART first, then the random starts (GET, Algorithm 1, lines 3 to 5)."""
    p, nodes, numbers = problem.shape[1], topology.num_nodes(recipe.depth), 2 * recipe.stages
    monotone, features = problem.monotone, None
    if recipe.precondition != 0 and (recipe.precondition != "auto" or p <= WIDEST):
        features = problem.host(spectrum, problem.batch, monotone)
    drawn = problem.rng(_DRAWN).random((recipe.starts, numbers + nodes * (p + 1)), np.float32)
    short, long = (problem.recipe.sharpness(part) for part in np.split(drawn[:, :numbers], 2, axis=1))
    random_splits = 2 * drawn[:, numbers:].reshape(-1, nodes, p + 1) - 1
    starts = []
    for k, strength in enumerate(strengths_of(recipe, has_ridge(recipe, problem.shape))):
        weights, is_mapped = random_splits[k, :, :-1], features is not None and strength > 0
        if monotone is not None:  # half of the splits ignores the monotone features, so it orders no leaves
            ordering = problem.rng(_ORDERING + k).random(nodes) < 0.5
            weights = np.where(monotone, np.where(ordering[:, None], np.abs(weights), 0), weights)
        splits = ObliqueTree(weights, random_splits[k, :, -1], None)  # type: ignore[arg-type]
        if k < len(trees := carts.of_start(k)):
            splits = composed(trees[k], matrix(features, strength, 0.5) if is_mapped else None)  # type: ignore[arg-type]
        by = problem.host(matrix, features, float(strength)) if is_mapped else None
        starts.append(Start(splits, short[k], long[k], by))
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
