"""Random rows: samples of long tables, whose splits are trained on a sample, and folds that searches hold out."""

import math
from typing import Any

import numpy as np

from jtrees import segments
from jtrees.data.table import bucket
from jtrees.search.problem import Problem, generator
from jtrees.search.run import FOLDS
from jtrees.tasks import Task

# ``rows="auto"``: number of rows, and least number of rows per leaf. No alternatives were compared.
_ROWS, _OF_LEAF = 20_000, 16
_FEWEST = 2  # a class of which fewer rows would be drawn keeps all of its rows, up to a limit


def random_rows(rows: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Returns ``count`` of the rows in ascending order, drawn without replacement."""
    return np.sort(rng.choice(rows, count, replace=False, shuffle=False))


def fold_rows(problem: Problem, folds: int = 1, purpose: str = "folds") -> list[np.ndarray]:
    """Returns the rows of at most five folds, each ``(n,)`` bool: fifths of the rows of positive weight.

    Rows repeat in a bootstrap sample, so training may include copies of held-out rows. Trees of a bag are therefore
    regularised less than single trees, which suits the average of the trees. When equal rows were put in one fold,
    bagged CO2 trees had a lower R^2 on all of four data sets.
    """
    rows = np.flatnonzero(problem.weighed)
    order = problem.rng(purpose).permutation(rows)[: len(rows) // FOLDS * FOLDS]
    masks = np.zeros((folds, problem.shape[0]), bool)
    for mask, held_out in zip(masks, np.array_split(order, FOLDS), strict=False):
        mask[held_out] = True
    return list(masks)


def drawn_rows(
    y: np.ndarray, weight: np.ndarray | None, limit: int, task: Task, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a random sample of about ``limit`` rows, and weights that correct for the sampling.

    The sample contains the same fraction of every class, and more of rare classes: a class of which fewer than two rows
    would be drawn keeps all of its rows, up to an equal share of ``limit``. A soft label counts as its most probable
    class. Rows of larger weight are drawn more often, and rows of weight 0 are not drawn. The sample of a class is a
    priority sample (Duffield, Lund & Thorup 2007), with weights scaled to the sum of the weights of the class. So sums
    over the sample are nearly unbiased estimates of sums over all rows. Equal weights within a class remain equal.

    Returns:
      The numbers of the rows in ascending order, and their weights, float32.
    """
    weight = np.ones(len(y)) if weight is None else np.asarray(weight, np.float64)
    real = np.flatnonzero(weight > 0)
    share = limit / max(1, len(real))
    if share >= 1:
        return real, weight[real].astype(np.float32)
    labels = task.strata(np.asarray(y)[real])
    parts, present = [], np.unique(labels)
    smallest = 0 if len(present) == 1 else min(math.ceil(_FEWEST / share), max(_FEWEST, limit // len(present)))
    for label in present:
        rows = real[labels == label]
        count = max(round(share * len(rows)), min(len(rows), smallest))
        parts.append(_priority_sample(rows, weight[rows], count, rng))
    rows, weights = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    order = np.argsort(rows)
    return rows[order], weights[order].astype(np.float32)


def _priority_sample(
    rows: np.ndarray, weight: np.ndarray, count: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ``count`` rows drawn without replacement, and weights with the sum of all weights."""
    if count >= len(rows):
        return rows, weight
    if np.all(weight == weight[0]):
        return random_rows(rows, count, rng), np.full(count, weight.sum() / count)
    priority = weight / (1 - rng.random(len(rows)))
    last = np.argpartition(priority, -count - 1)[-count - 1 :]  # the rows of the count + 1 highest priorities
    threshold = last[priority[last].argmin()]
    chosen = last[last != threshold]
    estimates = np.maximum(weight[chosen], priority[threshold])
    return rows[chosen], estimates * (weight.sum() / estimates.sum())


def sampled(problem: Problem, limit: int | None, number: int = 0) -> Problem:
    """Returns the problem on a sample of about ``limit`` rows, or the same problem if it would not be smaller."""
    # Each `number` draws another sample. Problems with the same rows and the same key share the arrays of the sample.
    if limit is None or problem.shape[0] <= bucket(limit):
        return problem
    _, y, weight = problem.batch
    rows, weight = problem.computed_once(_sample, y, weight, limit, problem.task, problem.key.tobytes(), number)
    return problem.sample(rows, weight)


def _sample(
    y: np.ndarray, weight: np.ndarray, limit: int, task: Task, key: bytes, number: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of a sample, -1 for padding, and their weights, 0 for padding."""
    rng = generator(np.frombuffer(key, np.uint32), "sample", number)
    rows, weight = drawn_rows(y, weight, limit, task, rng)
    padding = 0, bucket(len(rows)) - len(rows)
    return np.pad(rows.astype(np.int32), padding, constant_values=-1), np.pad(segments.mean_one(weight), padding)


def rows_used(recipe: Any, n: int) -> int:
    """Returns the number of rows that a stage of a recipe is trained on if the table has n rows."""
    limit = most_rows(recipe)
    return n if limit is None or bucket(n) <= bucket(limit) else limit


def most_rows(recipe: Any) -> int | None:
    """Returns the number of rows of a sample, from the options ``rows`` and ``depth`` of a recipe; None: all rows."""
    leaves = 2**recipe.depth
    if recipe.rows == "auto":
        return max(_ROWS, _OF_LEAF * leaves)
    if recipe.rows is not None and recipe.rows < leaves:
        raise ValueError(f"rows must be at least the number of leaves, {leaves}, got {recipe.rows}")
    return recipe.rows
