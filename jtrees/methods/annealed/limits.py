"""What a near deadline or a wide table changes: fewer starts, constant leaves, or trees of few features."""

from typing import Any

import numpy as np

from jtrees import blocking, distributed, topology
from jtrees.data.scaling import rows_for_slopes
from jtrees.leaves import narrow
from jtrees.leaves.shrunk import fit_narrowing
from jtrees.search import Problem, Run
from jtrees.search.precondition import WIDEST
from jtrees.search.sample import most_rows

# Estimates of time on one core. Products of a fit of linear leaves in a second: from two timings, with
# 100 and 400 features. Refits of the results. Products of updates in a second, and products of each split for a start.
# The last two were not measured. They were chosen so that GET at 20,000 x 500 has fewer starts under two seconds.
_PRODUCTS_OF_FIT, _REFITS = 1e9, 4
_PRODUCTS, _PASSES_OF_START = 2e10, 6
_LATE = 0.25  # seconds that all starts may take in any case
_FEWEST_STARTS = 3  # of constant leaves: with two, there would be no halving


def limited_by_deadline(recipe: Any, problem: Problem) -> Any:
    """Returns the recipe with fewer starts, or with constant leaves, if the deadline is too near for its options."""
    # The clock is not read within an evaluation, an update or a product with a preconditioner. Every start needs them
    # at least once. Linear leaves are fitted at least twice for a start, and refitted for the result and CART.
    monitor, (n, p), nodes = problem.monitor, problem.shape, topology.num_nodes(recipe.depth)
    if monitor.left() == np.inf or blocking.platform() != "cpu":
        return recipe
    rows = n if (limit := most_rows(recipe)) is None else min(n, limit)
    if recipe.leaves == "constant":
        seconds = rows * p * (min(p, WIDEST) + _PASSES_OF_START * nodes) / _PRODUCTS
        most_starts = int(problem.computed_once(_times_left, seconds, monitor=monitor) / 2)
        starts = min(recipe.starts, max(_FEWEST_STARTS, most_starts))
        return _with_starts(recipe, starts, monitor)
    width = min(p, narrow.WIDEST)
    seconds = (rows * (width + 1) ** 2 + 2 * nodes * width**3) / _PRODUCTS_OF_FIT
    narrowing = n * p * min(n, p) / _PRODUCTS if width < p else 0.0  # seconds of the map to few features
    fits = problem.computed_once(_times_left, seconds, monitor=monitor) - narrowing / seconds
    starts = min(recipe.starts, int((fits - _REFITS) / 2))
    if starts < 1:
        monitor.cut()
        distributed.warn("max_seconds is too short for linear leaves of so many features: leaves are constant")
        return limited_by_deadline(recipe.replace(leaves="constant"), problem)
    if problem.data is not None and not problem.is_optional:
        problem.computed_once(_reserve, (starts + _REFITS) * seconds, monitor=monitor)
    return _with_starts(recipe, starts, monitor)


def _with_starts(recipe: Any, starts: int, monitor: Any) -> Any:
    if starts == recipe.starts:
        return recipe
    monitor.cut()
    return recipe.replace(starts=starts)


async def narrowed(problem: Problem) -> tuple[Problem, narrow.Narrowing | None]:
    """Returns the problem of the training, which has no table, and the map to few features if leaves need one."""
    training = problem.replace(data=None)
    if problem.recipe.leaves != "linear" or problem.shape[1] <= narrow.WIDEST:
        return training, None
    rows = problem.batch
    if problem.data is not None:  # the leaves are refitted to the same rows
        rows, _ = problem.computed_once(rows_for_slopes, rows, problem.data.scaling.x_most)
    narrowing = (await training.replace(batch=rows).map(_narrowing)).host
    return training.preconditioned_by(narrowing.matrix), narrowing


def _narrowing(run: Run) -> narrow.Narrowing:
    return fit_narrowing(*run.batch)


def _times_left(seconds: float, *, monitor: Any) -> float:
    """Returns how many times ``seconds`` remain. It is computed once for the trees of a bag, so their kind is equal."""
    return max(monitor.left(), _LATE) / seconds


def _reserve(seconds: float, *, monitor: Any) -> None:
    """Reserves time for the refits of the result, once for all runs side by side."""
    monitor.reserve(seconds)
