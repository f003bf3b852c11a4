"""The result of the annealed algorithm: the best tree of the starts and CART, in the user's units (line 15)."""

from dataclasses import dataclass
import itertools
import math
from typing import Any

import numpy as np

from jtrees.data import Data
from jtrees.data.scaling import with_map
from jtrees.leaves.narrow import Narrowing, selected
from jtrees.methods.annealed.stages import StartResult
from jtrees.methods.annealed.starts import Carts, Start
from jtrees.search import Fitted, Problem, Report
from jtrees.search.cart import cart_of_table
from jtrees.search.sample import most_rows, rows_used
from jtrees.tree import ObliqueTree

_OF_SHRINKAGE = 2.5e-7  # seconds of the shrinkage of leaves for each row and output: from one profile, of 5,000 classes
_NONE_EXPECTED = 1e30  # a criterion above it, for targets in [0, 1], means that no expected error is defined


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
      rows: the number of rows of the long stages. With constant leaves and without a validation set, short stages hold
        out a fifth of them.
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


def best_tree(
    problem: Problem,
    starts: list[Start],
    carts: Carts,
    results: list[list[StartResult]],
    best_cart: int = -1,
    narrowing: Narrowing | None = None,
) -> Fitted:
    """Returns the best tree of the starts and CART, in the user's units (GET, Algorithm 1, line 15)."""
    # `results` are the results of the short and the long stages of each start. `best_cart` is the number of the CART
    # tree that beats all starts, or -1. `narrowing` is the map to the few features that the trees split, or None.
    recipe = problem.recipe
    pairs = [(k, result) for k, start_results in enumerate(results) for result in start_results]
    best, result = min(pairs, key=lambda pair: pair[1].score)
    is_finite = np.isfinite(result.score)
    if not is_finite and not carts.trees:
        raise FloatingPointError(f"all {recipe.starts} starts became non-finite: try a smaller learning_rate")
    history = _table([[result.losses for result in start_results] for start_results in results], np.nan)
    splits, step = (result.tree, result.step) if is_finite else (carts.trees[max(best_cart, 0)], 0)
    splits, cart_trees = with_map((splits, carts.trees), None if narrowing is None else narrowing.matrix)
    fitted = Fitted(splits, result.score, step, history)
    if (data := problem.data) is None:
        return fitted
    with problem.restoring():
        refitted = [
            [(*_refitted(recipe, tree, data, narrowing), -1 - number) for tree in trees]
            for number, trees in enumerate(_cart_splits(recipe, problem, cart_trees, narrowing))
        ]
        candidates = refitted[best_cart] if best_cart >= 0 else [*itertools.chain(*refitted)]
        if is_finite:
            candidates.append((*_refitted(recipe, data.scaling.restore_splits(splits), data, narrowing), best))
        tree, loss, chosen = min(candidates, key=lambda candidate: candidate[1])  # CART wins a tie
        score, update = loss / data.loss_unit, step if chosen >= 0 else 0
        cart_losses = [min(loss for _, loss, _ in trees) for trees in refitted]
        report = _report(recipe, data, starts, results, chosen, cart_losses)
        is_shrunk = recipe.shrink and recipe.leaves == "constant"
        seconds = _OF_SHRINKAGE * len(data.table.x) * math.prod(data.table.task.shape)
        if is_shrunk and problem.monitor.may_be_late(seconds):
            tree = data.refit(tree, "constant", shrink=True)[0]
            loss = data.loss(tree)
        tree = tree.merged()
        is_expected = recipe.leaves == "linear" and data.validation is None and result.score < _NONE_EXPECTED
        expected_loss = loss if is_expected else None
        fitted = fitted._replace(score=score, step=update, expected_loss=expected_loss)
        return fitted._replace(model=tree, tree=tree, loss=loss, report=report)


def _report(
    recipe: Any,
    data: Data,
    starts: list[Start],
    results: list[list[StartResult]],
    chosen: int,
    cart_losses: list[float],
) -> AnnealedReport:
    """Returns the report; ``cart_losses`` are the losses of CART's trees in the user's units."""
    cart_loss, ridge_loss = (*cart_losses, np.nan, np.nan)[:2]
    scores = _table([[result.scores for result in start_results] for start_results in results], np.inf)
    sharpness = np.array([np.append(start.short, start.long) if recipe.halves else start.long for start in starts])
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
        rows=rows_used(recipe, len(data.table.x)),
    )


def _refitted(recipe: Any, splits: ObliqueTree, data: Data, narrowing: Narrowing | None) -> tuple[ObliqueTree, float]:
    """Returns the tree refitted in the user's units, and the loss that decides between the trees."""
    tree, criterion = data.refit(splits, recipe.leaves, narrowing=narrowing)
    loss = data.loss(tree)
    if data.validation is not None or recipe.leaves == "constant":
        return tree, loss
    # The loss is at least the tree's training loss, which can exceed the criterion in rows with outliers.
    # If too few rows have weight for an expected error, the loss is the training loss alone.
    return tree, max(criterion if criterion < _NONE_EXPECTED * data.loss_unit else 0.0, loss)


def _cart_splits(
    recipe: Any, problem: Problem, trees: list[ObliqueTree], narrowing: Narrowing | None
) -> list[list[ObliqueTree]]:
    """Returns the splits of CART's trees in the user's units: a list of candidates for each tree.

    CART's tolerances are absolute, and its thresholds are exact on raw features only. So CART is grown twice: on
    scaled features, and on raw features if float32 represents them. If there is a ``narrowing``, the second tree splits
    the features that it selects.

    On the training rows of 16 tables that float32 represents, the losses were equal at depths 3 and 6. On ailerons,
    whose targets are tiny, the loss of linear leaves was 4 to 7 % higher for the second tree. In lognormal columns of
    deviation 5, the loss of the first tree was 2.3 times the loss of the second tree. It was 81 times this loss where
    scaling clipped outliers that matter (depth 6).
    """
    data: Any = problem.data
    splits = [[data.scaling.restore_splits(tree)] for tree in trees]
    if trees and data.scaling.origin is None and problem.monitor.has_time():
        table, monitor = data.table.replace(encoder=None), problem.monitor.within(0.5)
        options = recipe.depth, recipe.leaves, most_rows(recipe)
        columns = None if narrowing is None else selected(np.asarray(narrowing.matrix))
        splits[0].append(problem.computed_once(cart_of_table, table, *options, columns, monitor=monitor))
    return splits


def _table(rows: list[list[np.ndarray]], gap: float) -> np.ndarray:
    """Returns a table with the numbers of each start in a row; short rows are filled with ``gap``."""
    joined = [np.concatenate(parts) if parts else np.zeros(0) for parts in rows]
    table = np.full((len(joined), max(map(len, joined))), gap, joined[0].dtype)
    for row, numbers in zip(table, joined, strict=True):
        row[: len(numbers)] = numbers
    return table
