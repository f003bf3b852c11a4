"""Means of targets at the levels of a column, shrunk towards the common mean."""

from typing import NamedTuple

import numpy as np

FOLDS = 5


class Targets(NamedTuple):
    """The targets whose means encode levels.

    Attributes:
      names: name of each output.
      values: targets, or class indicators, ``(n, k)``. Two classes have a single indicator.
      weight: weights of the rows, ``(n,)``.
      fold: fold of each row, ``(n,)``.
    """

    names: tuple[str, ...]
    values: np.ndarray
    weight: np.ndarray
    fold: np.ndarray


def shrunk_means(code: np.ndarray, levels: int, targets: Targets, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean of the targets over some rows, ``(k,)``, and the mean of each level shrunk towards it.

    Let s2 be the variance of the targets around the mean of their level. Let t2 be the variance of the level means
    around the common mean. The posterior mean of a level with n rows is (sum + m mean) / (n + m), where m = s2 / t2
    (empirical Bayes).
    """
    weight = targets.weight * rows
    count = np.bincount(code, weight, levels)
    mean = weight @ targets.values / weight.sum()
    means = np.empty((levels, len(mean)))
    for j, y in enumerate(targets.values.T):
        total = np.bincount(code, weight * y, levels)
        variance_within, variance_between, _ = variances(total, count, weight @ np.square(y))
        prior = variance_within / variance_between if variance_between > 0 else np.inf
        share = np.where(np.isinf(prior), 0, count / np.where(count + prior > 0, count + prior, 1))
        means[:, j] = mean[j] + share * (total / np.where(count > 0, count, 1) - mean[j])
    return mean, means


def variances(total: np.ndarray, count: np.ndarray, squares: float) -> tuple[float, float, float]:
    """Returns variances within and between levels by the method of moments (analysis of variance).

    Args:
      total: sum of the targets at each level.
      count: number of rows at each level.
      squares: sum of all squared targets.

    Returns:
      ``variance_within, variance_between, size``. The last is an effective number of rows of a level. The expected mean
      square between levels is ``variance_within + size * variance_between``.
    """
    total, count = total[count > 0], count[count > 0]
    n, levels = count.sum(), len(count)
    if levels < 2 or n <= levels:
        return 1.0, 0.0, 1.0
    explained = float(np.sum(np.square(total) / count))
    variance_within = max(squares - explained, 0.0) / (n - levels)
    variance_between = (explained - total.sum() ** 2 / n) / (levels - 1)
    size = (n - np.square(count).sum() / n) / (levels - 1)
    return variance_within, max((variance_between - variance_within) / size, 0.0), size
