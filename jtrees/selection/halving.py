"""Successive halving: combinations are compared on few rows, and the best combinations on more rows."""

from collections.abc import Sequence
import math

import numpy as np

from jtrees import segments
from jtrees.search.fit import Fold
from jtrees.search.sample import drawn_rows

_FEWEST = 200  # rows of the smallest budget; no alternatives were compared


def budgets(combinations: int, rows: int, factor: int) -> list[int]:
    """Returns the numbers of rows of all budgets below the number of all rows, ascending.

    Each budget multiplies the number of rows by ``factor``, and divides the number of combinations by ``factor``. The
    last step evaluates at most ``factor`` combinations on all rows. There can be more combinations if a budget would
    otherwise have fewer than 200 rows.

    Example:
      >>> from jtrees.selection.halving import budgets
      >>> budgets(64, rows=8100, factor=3)
      [300, 900, 2700]
    """
    sizes = []
    while combinations > factor and rows // factor >= _FEWEST:
        combinations, rows = math.ceil(combinations / factor), rows // factor
        sizes.append(rows)
    return sizes[::-1]


def subsampled(splits: Sequence[Fold], rows: int, rng: np.random.Generator) -> list[Fold] | None:
    """Returns splits that train on a random sample of about ``rows`` rows each; the evaluation rows do not change.

    The sample has every class, and weights that correct for the sampling. The encoder of a raw table remains that of
    all training rows. Returns None if the targets do not vary in the sample of a fold.
    """
    samples = []
    for split in splits:
        table = split.table
        chosen, weight = drawn_rows(table.y, table.weight, rows, table.task, rng)
        weight = None if np.all(weight == weight[0]) else segments.mean_one(weight.astype(np.float64))
        sample = table.rows(chosen).replace(weight=weight)
        if len(sample.x) < 2 or not table.task.varies(sample.y):
            return None
        samples.append(split._replace(table=sample))
    return samples
