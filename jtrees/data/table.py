"""A table in the user's units, checked."""

import math
from typing import Any

from flax import struct
import numpy as np

from jtrees import sharding, tasks, validation as checks
from jtrees.training import Batch


@struct.dataclass
class Table:
    """Rows in the user's units, on the host, checked: to train on, or to evaluate on.

    Attributes:
      x: features, ``(n, p)``.
      y: targets, ``(n,)`` or ``(n, k)``, or classes in int32.
      weight: weights above 0, ``(n,)``, of which only the ratios matter; None: all alike.
      task: what is predicted.
    """

    x: np.ndarray
    y: np.ndarray
    weight: np.ndarray | None
    task: tasks.Task = struct.field(pytree_node=False)

    def rows(self, chosen: Any) -> "Table":
        """Some of the rows."""
        return Table(self.x[chosen], self.y[chosen], None if self.weight is None else self.weight[chosen], self.task)


def without_padding(batch: Batch) -> Batch:
    """The rows that have weight, in NumPy."""
    x, y, weight = (None if a is None else np.asarray(a) for a in batch)
    if x is None or y is None or weight is None:
        return Batch(x, y, weight)  # type: ignore[arg-type]
    return Batch(x[weight > 0], y[weight > 0], weight[weight > 0])  # type: ignore[arg-type]


def bucket(n: int) -> int:
    """The number of rows that n are padded to: at most a sixteenth more, and at least 32.

    So that tables of nearly the same length, the folds of a cross-validation above all, share one compiled program; and
    a multiple of the parts in which devices share rows, if they do.
    """
    step = math.lcm(max(1, 2 ** (n.bit_length() - 5)), sharding.parts())
    return -(-max(32, n) // step) * step


def checked_table(x: Any, y: Any, sample_weight: Any, task: str | tasks.Task) -> Table:
    """The rows to train on; those of weight 0 are left out.

    Raises:
      ValueError: naming the argument, what was expected and what came.
    """
    x = _rows(checks.check_x(x))
    if y is None:
        raise ValueError("y must hold the targets to learn, got None")
    task, y = tasks.checked_targets(task, y, len(x))
    weight = None
    if sample_weight is not None:
        weight = np.asarray(checks.check_weight(sample_weight, len(x)), np.float64)
        x, y, weight = x[weight > 0], y[weight > 0], weight[weight > 0] / weight.max()
        if not task.varies(y):
            checks.check_targets(y, len(x))  # says which column is constant
    table = Table(x, y, weight, task)
    _check_range(table)
    return table


def held_out_table(x: Any, y: Any, table: Table) -> Table:
    """Rows to evaluate on, like those that are trained on.

    Raises:
      ValueError: for rows of another width, or targets of another kind.
    """
    if y is None:
        raise ValueError("y must hold the targets to evaluate on, got None")
    x = _rows(checks.check_x(x, features=table.x.shape[1]))
    held_out = Table(x, table.task.held_out_targets(y, len(x)), None, table.task)
    _check_range(held_out)
    return held_out


def _rows(x: Any) -> np.ndarray:
    """Features row by row, as numbers of this machine: sums round alike, however x lay in memory."""
    x = np.asarray(x)
    return np.ascontiguousarray(x, x.dtype.newbyteorder("=") if x.dtype.kind == "f" else np.float64)


def _check_range(table: Table) -> None:
    """Finite in the precision of the trees, too."""
    for name, values in (("x", table.x), ("y", table.y)):
        if values.dtype.itemsize > 4 and (large := np.abs(values).max()) > np.finfo(np.float32).max:
            raise ValueError(f"{name} must be within the range of float32, got {large:.3g}")
