"""Samples of the rows of long tables: splits are trained on a sample, leaves are fitted to all rows."""

import math
from typing import Any

import numpy as np

from jtrees.data.table import bucket
from jtrees.search.runs import Runs
from jtrees.tasks import Task

# ``rows="auto"``: so many rows, and at least so many for each leaf. Other numbers were not compared.
_ROWS, _OF_LEAF = 20_000, 16
_FEWEST = 2  # a class of which fewer rows would be drawn has all of its rows, and a larger one no fewer
_DRAWN = 7  # what random numbers are for: see ``Runs.rng``


def drawn_rows(
    y: np.ndarray, weight: np.ndarray | None, most: int, task: Task, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """A random sample of rows, and weights that make up for how they were drawn.

    The sample has the same part of every class, and more of rare ones; soft labels count as the most probable class.
    Rows of larger weight are drawn more often. It is a priority sample (Duffield, Lund & Thorup 2007), whose weights
    are then scaled to the sum of all weights. Sums over it are nearly unbiased estimates of sums over all rows. Equal
    weights stay equal.

    Args:
      y: targets of all rows.
      weight: their weights; rows of weight 0 are not drawn. None: equal weights.
      most: rows to draw, about. A class of which fewer than two rows would be drawn has all its rows.
      task: what is predicted.
      rng: random generator.

    Returns:
      The rows in ascending order, and their weights, of the same sum as all weights, float32.
    """
    weight = np.ones(len(y)) if weight is None else np.asarray(weight, np.float64)
    real = np.flatnonzero(weight > 0)
    share = most / max(1, len(real))
    if share >= 1:
        return real, weight[real].astype(np.float32)
    labels = task.strata(np.asarray(y)[real])
    parts, present = [], np.unique(labels)
    least = 0 if len(present) == 1 else min(math.ceil(_FEWEST / share), max(_FEWEST, most // len(present)))
    for label in present:
        rows = real[labels == label]
        count = max(round(share * len(rows)), min(len(rows), least))
        parts.append(_priority_sample(rows, weight[rows], count, rng))
    rows, weights = (np.concatenate(one) for one in zip(*parts, strict=True))
    order = np.argsort(rows)
    return rows[order], weights[order].astype(np.float32)


def _priority_sample(
    rows: np.ndarray, weight: np.ndarray, count: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """``count`` rows without replacement, and their weights, of the sum of all."""
    if count >= len(rows):
        return rows, weight
    if np.all(weight == weight[0]):
        chosen = rng.choice(len(rows), count, replace=False, shuffle=False)
        return rows[chosen], np.full(count, weight.sum() / count)
    priority = weight / (1 - rng.random(len(rows)))
    last = np.argpartition(priority, -count - 1)[-count - 1 :]  # the count highest, and the next one
    least = last[priority[last].argmin()]
    chosen = last[last != least]
    found = np.maximum(weight[chosen], priority[least])
    return rows[chosen], found * (weight.sum() / found.sum())


def sampled(runs: Runs, most: int | None, number: int = 0) -> Runs:
    """The runs on samples of their rows. The same runs without a limit, or if a sample would be padded as far.

    Args:
      runs: the runs.
      most: rows of a sample, about.
      number: of the sample; another number draws another sample.
    """
    if most is None or runs.shape[0] <= bucket(most):
        return runs
    # Runs of the same data and key share their arrays, and what is computed once for each of them.
    drawn = runs.each_once(lambda i: _sample(runs, i, most, number), keyed=True)
    length = bucket(max(len(rows) for rows, _ in drawn))
    padded = {id(one): _padded(one[0], one[1], length) for one in drawn}
    rows, weight = zip(*(padded[id(one)] for one in drawn), strict=True)
    return runs.on(rows=list(rows), weight=list(weight))


def _padded(rows: np.ndarray, weight: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows with -1, and weights of mean 1 with 0, up to a length."""
    more = 0, length - len(rows)
    scaled = weight * np.float32(length / weight.sum())
    return np.pad(rows.astype(np.int32), more, constant_values=-1), np.pad(scaled, more)


def _sample(runs: Runs, i: int, most: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    y, weight = runs.targets(i)
    return drawn_rows(y, weight, most, runs.task, runs.rng(i, _DRAWN + number))


def rows_used(recipe: Any, n: int) -> int:
    """The number of rows that a stage of a recipe is trained on, of n rows."""
    most = most_rows(recipe)
    return n if most is None else min(n, most)


def most_rows(recipe: Any) -> int | None:
    """The rows of a sample by the options ``rows`` and ``depth`` of a recipe; None: all rows.

    Raises:
      ValueError: if a sample has fewer rows than the tree has leaves.
    """
    leaves = 2**recipe.depth
    if recipe.rows == "auto":
        return max(_ROWS, _OF_LEAF * leaves)
    if recipe.rows is not None and recipe.rows < leaves:
        raise ValueError(f"rows must be at least the number of leaves, {leaves}, got {recipe.rows}")
    return recipe.rows
