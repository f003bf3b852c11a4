"""Checked tables in the user's units."""

import math
from typing import Any

import jax
import numpy as np

from jtrees import pytree, sharding, tasks, validation as checks
from jtrees.training import Batch


@pytree.dataclass
class Table:
    """Checked rows in the user's units, on the host: a training or a validation set.

    Attributes:
      x: features, ``(n, p)``.
      y: targets, ``(n,)`` or ``(n, k)``, or classes in int32.
      weight: weights above 0, ``(n,)``, of which only the ratios matter; None: equal weights.
      task: what is predicted.
    """

    x: np.ndarray
    y: np.ndarray
    weight: np.ndarray | None
    task: tasks.Task = pytree.field(pytree_node=False)

    def rows(self, chosen: Any) -> "Table":
        """Returns a subset of the rows."""
        return Table(self.x[chosen], self.y[chosen], None if self.weight is None else self.weight[chosen], self.task)


def without_padding(batch: Batch) -> Batch:
    """Returns the rows of positive weight, in NumPy."""
    batch = jax.tree.map(np.asarray, batch)
    if batch.weight is None:
        return batch
    real = batch.weight > 0
    return jax.tree.map(lambda a: a[real], batch)


def bucket(n: int) -> int:
    """Returns the number of rows that n rows are padded to: at most a sixteenth more, and at least 32.

    Tables of similar length, such as the folds of a cross-validation, then share one compiled program. The number is a
    multiple of the number of devices that rows are sharded over.
    """
    step = math.lcm(max(1, 2 ** (n.bit_length() - 5)), sharding.parts())
    return -(-max(32, n) // step) * step


def checked_table(x: Any, y: Any, sample_weight: Any, task: str | tasks.Task) -> Table:
    """Returns the checked training data, without rows of weight 0.

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
            checks.check_targets(y, len(x))  # names the constant column
    table = Table(x, y, weight, task)
    _check_range(table)
    return table


def held_out_table(x: Any, y: Any, table: Table) -> Table:
    """Returns a checked validation set for the table that is trained on.

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
    """Returns features in C order and native byte order, so that sums round alike for any memory layout."""
    x = np.asarray(x)
    return np.ascontiguousarray(x, x.dtype.newbyteorder("=") if x.dtype.kind == "f" else np.float64)


def _check_range(table: Table) -> None:
    """Raises ``ValueError`` for values outside the range of float32, the precision of the trees."""
    for name, values in (("x", table.x), ("y", table.y)):
        if values.dtype.itemsize > 4 and (large := np.abs(values).max()) > np.finfo(np.float32).max:
            raise ValueError(f"{name} must be within the range of float32, got {large:.3g}")
