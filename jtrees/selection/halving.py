"""Successive halving: combinations are compared on few rows, and the best part of them on more."""

import math

import numpy as np

from jtrees.search.sample import drawn_rows
from jtrees.selection.sweep import Split

_FEWEST = 200  # rows of the smallest budget; other numbers were not compared


def budgets(combinations: int, rows: int, factor: int) -> list[int]:
    """Returns the numbers of rows of the budgets before that of all rows, ascending.

    Each budget has ``factor`` times as many rows as the budget before, and each but the first has the best of every
    ``factor`` combinations before. At most ``factor`` combinations are left for all rows, unless a budget for that
    would have fewer than 200 rows.

    Example:
      >>> from jtrees.selection.halving import budgets
      >>> budgets(64, rows=8100, factor=3)
      [300, 900, 2700]
    """
    found = []
    while combinations > factor and rows // factor >= _FEWEST:
        combinations, rows = survivors(combinations, factor), rows // factor
        found.append(rows)
    return found[::-1]


def survivors(combinations: int, factor: int) -> int:
    """Returns the number of combinations that go on to the next budget."""
    return math.ceil(combinations / factor)


def of_rows(split: Split, rows: int, rng: np.random.Generator) -> Split | None:
    """Returns a split whose folds train on a random sample of about so many rows, and are evaluated on the same rows.

    The sample has every class, with weights that make up for how the rows were drawn. Returns None if the targets do
    not vary in the sample of some fold.
    """
    table = split.table
    chosen, weight = drawn_rows(table.y, table.weight, rows, table.task, rng)
    some = table.rows(chosen).replace(weight=None if np.all(weight == weight[0]) else weight.astype(np.float64))
    left_out = [None if out is None else np.flatnonzero(np.isin(chosen, out)) for out in split.left_out]
    for out in left_out:
        rest = some.y if out is None else np.delete(some.y, out, axis=0)
        if len(rest) < 2 or not table.task.varies(rest):
            return None
    return split._replace(table=some, left_out=left_out)
