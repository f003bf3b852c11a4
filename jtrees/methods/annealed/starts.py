"""The starts of the annealed algorithm: CART trees, random splits, their preconditioners and held-out rows."""

import math
from typing import Any, NamedTuple

from jaxtyping import Array
import numpy as np

from jtrees import splitting, topology
from jtrees.data.scaling import with_map
from jtrees.data.table import without_padding
from jtrees.monotone import without_negative
from jtrees.search import Problem, Run
from jtrees.search.cart import bin_edges, grown_cart, grown_on_ridge
from jtrees.search.monitor import Monitor
from jtrees.search.precondition import WIDEST, matrix, spectrum_of_rows
from jtrees.search.sample import fold_rows
from jtrees.tasks import Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree

# Unit of the features, in standard deviations: about the range of a uniform variable. The paper's learning rate,
# sharpnesses and random initialisation assume features in [0, 1].
DEVIATIONS = 3.0
# Strengths of the preconditioners of the random starts, in their order. The starts from CART have no preconditioner:
# CART splits single features, and the ridge regression accounts for correlations.
_STRENGTHS = (0.9, 0.0, 0.99, 0.0, 0.999, 0.0)
BINS = 256  # bins of a feature in compiled CART
_WIDEST_RIDGE = 2048  # largest min(n, p) for a ridge regression, which costs min(n, p)**3
_MOST_OUTPUTS = 256  # most outputs or classes of a ridge regression: CART on k outputs of k classes costs n k**2
# Short stages hold out a fifth of the rows. In tables with at most _FEW_ROWS rows, different starts hold out different
# fifths: a single fifth is too small to compare the starts with CART.
_FOLDS, _FEW_ROWS = 5, 1000
_PREPARATION = 0.4  # part of the time before a deadline that CART may take


class Start(NamedTuple):
    """A start: its initial splits and its hyperparameters, on the host."""

    splits: ObliqueTree  # the initial splits, on preconditioned features, without leaves
    short: np.ndarray  # sharpness of each short stage, (stages,)
    long: np.ndarray  # sharpness of each long stage, (stages,)
    strength: np.float32 | None  # strength of the preconditioner. None: no start has a preconditioner
    matrix: np.ndarray | None  # the preconditioner, (p, p). None: the identity


class Carts(NamedTuple):
    """The CART trees of a problem: of the features and, with ``ridge``, of the outputs of a ridge regression."""

    trees: list[ObliqueTree]  # the trees grown on all rows. They are candidates for the result
    # For each fold, the trees grown without its rows. If there are no folds, the trees grown on all rows.
    fold_trees: list[list[ObliqueTree]]


def held_out_rows(problem: Problem) -> list[np.ndarray]:
    """Returns the rows that short stages hold out, ``(n,)`` bool for each fold; no fold if there are too few rows."""
    # Start k holds out fold k, and the folds repeat after the last fold.
    recipe = problem.recipe
    count = min(_FOLDS, recipe.starts) if problem.count <= _FEW_ROWS and recipe.cart is True else 1
    folds = fold_rows(problem, count, "folds of starts")
    return folds if folds[0].any() else []


async def grow_carts(problem: Problem, folds: list[np.ndarray]) -> Carts:
    """Returns the CART trees of a problem, as in the authors' program; ``folds`` are of :func:`held_out_rows`."""
    recipe, monitor = problem.recipe, problem.monitor.within(_PREPARATION)
    if recipe.cart == "binned":
        edges = bin_edges(problem, BINS)
        parts = [problem.holding_out(fold) for fold in folds] or [problem]
        return Carts([], [[(await part.map(binned_cart, edges, often=True)).host] for part in parts])
    if not recipe.cart:
        return Carts([], [[]])
    arguments = problem.task, problem.monotone, recipe.depth, recipe.leaves, _has_ridge(problem)
    trees = problem.computed_once(_grow, problem.batch, *arguments, monitor=monitor.within(0.5))
    fold_trees = []
    for number, fold in enumerate(folds):
        arrays: Any = [np.asarray(array)[~fold] for array in problem.batch]
        fold_trees.append(_grow(Batch(*arrays), *arguments, monitor=monitor.within(1 / (len(folds) - number))))
    return Carts(trees, fold_trees or [trees])


def _has_ridge(problem: Problem) -> bool:
    """Returns whether a start is CART on the outputs of a ridge regression."""
    recipe = problem.recipe
    can_follow = recipe.cart is True and recipe.leaves == "constant" and recipe.starts > 1
    is_narrow = min(problem.shape) <= _WIDEST_RIDGE and math.prod(problem.task.shape) <= _MOST_OUTPUTS
    return recipe.ridge and can_follow and is_narrow


def _grow(
    rows: Batch, task: Task, monotone: np.ndarray | None, depth: int, leaves: str, ridge: bool, *, monitor: Monitor
) -> list[ObliqueTree]:
    """Returns CART of the features and, with ``ridge``, CART of the outputs of a ridge regression."""
    real, outputs = without_padding(rows), math.prod(task.shape)
    grow = lambda rows: grown_cart(rows, task, depth, leaves, monotone=monotone)
    trees = [monitor.within(0.5 if ridge else 1).on_rows(grow, real, outputs)]
    if ridge:
        grow = lambda rows: grown_on_ridge(rows, task, depth, 1 / DEVIATIONS)
        trees.append(monitor.on_rows(grow, real, outputs))
    signed = lambda tree: without_negative(np.asarray(tree.weights), monotone)
    return [ObliqueTree(signed(tree), np.asarray(tree.bias), None) for tree in trees]  # type: ignore[arg-type]


def binned_cart(run: Run, edges: Array, codes: Array | None = None) -> ObliqueTree:
    """Returns the splits of CART over bins of the features; ``codes`` are the bins of all values, if known."""
    return ObliqueTree(*splitting.binned_cart(run.batch, edges, run.task, run.recipe.depth, codes), None)


def initial_starts(problem: Problem, carts: Carts) -> list[Start]:
    """Returns the starts: those from CART first, then the random starts (GET, Algorithm 1, lines 4 to 6)."""
    recipe, monotone, p = problem.recipe, problem.monotone, problem.shape[1]
    nodes, numbers, (low, high) = topology.num_nodes(recipe.depth), 2 * recipe.stages, recipe.sharpness_ranges.T
    uniform = problem.rng("starts").random((recipe.starts, numbers + nodes * (p + 1)), np.float32)
    short, long = (low + (high - low) * part for part in np.split(uniform[:, :numbers], 2, axis=1))
    random_splits = 2 * uniform[:, numbers:].reshape(-1, nodes, p + 1) - 1
    strengths = _strengths(problem)
    features = None if strengths is None else spectrum_of_rows(problem)
    starts = []
    for k in range(recipe.starts):
        strength, weights = None if strengths is None else strengths[k], random_splits[k, :, :-1]
        if monotone is not None:  # half of the splits ignores the monotone features, so it orders no leaves
            ordering = problem.rng("monotone splits", k).random(nodes) < 0.5
            weights = np.where(monotone, np.where(ordering[:, None], np.abs(weights), 0), weights)
        splits = ObliqueTree(weights, random_splits[k, :, -1], None)  # type: ignore[arg-type]
        cart_trees = carts.fold_trees[k % len(carts.fold_trees)]
        if k < len(cart_trees):
            splits = cart_trees[k]
            if strength:
                splits = with_map(splits, matrix(features, strength, 0.5))  # type: ignore[arg-type]
        preconditioner = problem.computed_once(matrix, features, float(strength)) if strength else None
        starts.append(Start(splits, short[k], long[k], strength, preconditioner))
    return starts


def _strengths(problem: Problem) -> np.ndarray | None:
    """Returns the strength of the preconditioner of each start, ``(starts,)``, or None without preconditioners."""
    recipe = problem.recipe
    if recipe.precondition == 0 or (recipe.precondition == "auto" and problem.shape[1] > WIDEST):
        return None
    if recipe.precondition != "auto":
        return np.full(recipe.starts, recipe.precondition, np.float32)
    strengths = np.append(np.zeros(1 + _has_ridge(problem)), np.resize(_STRENGTHS, recipe.starts))
    return strengths[: recipe.starts].astype(np.float32)
