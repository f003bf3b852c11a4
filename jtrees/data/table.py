"""Checked tables in the user's units."""

from collections.abc import Callable, Sequence
import math
from typing import Any, Literal

import jax
from jaxtyping import Array
import numpy as np

from jtrees import pytree, segments, sharding, tasks, validation as checks
from jtrees.data.columns import Columns, checked_missing
from jtrees.data.constraints import checked_signs
from jtrees.data.frame import read_frame
from jtrees.training import Batch


@pytree.dataclass
class Table:
    """Checked rows in the user's units, on the host: a training or a validation set.

    Attributes:
      x: features, ``(n, p)``.
      y: targets, ``(n,)`` or ``(n, k)``. In classification, int32 labels, or soft labels ``(n, k)``.
      weight: weights above 0, ``(n,)``. They have mean 1 over the training rows, so they count samples. None: equal
        weights.
      task: what is predicted.
      columns: the columns if x was a raw table, else None.
      monotone: the sign of each feature: 1 if predictions must not fall in it, -1 if they must not rise, else 0. None:
        all signs are 0.
    """

    x: np.ndarray
    y: np.ndarray
    weight: np.ndarray | None
    task: tasks.Task = pytree.field(pytree_node=False)
    columns: Columns | None = pytree.field(pytree_node=False, default=None)
    monotone: tuple[int, ...] | None = pytree.field(pytree_node=False, default=None)

    def rows(self, chosen: Any) -> "Table":
        """Returns a subset of the rows with their weights; :meth:`normalised` makes a training set of it."""
        weight = None if self.weight is None else self.weight[chosen]
        return self.replace(x=self.x[chosen], y=self.y[chosen], weight=weight)

    def normalised(self) -> "Table":
        """Returns the table with weights of mean 1."""
        return self if self.weight is None else self.replace(weight=segments.mean_one(self.weight))

    def divided(self, share: float, key: Array) -> tuple["Table", "Table"]:
        """Returns the training rows, and a random fraction ``share`` of the rows that is held out.

        The fraction is the same for every class. A soft label counts as its most probable class.

        Raises:
          ValueError: if no rows are held out, or if the targets of the training rows do not vary.
        """
        rng = np.random.default_rng(np.asarray(jax.random.bits(key, (4,))))
        labels = self.task.strata(self.y)
        order = rng.permutation(len(labels))
        groups = [order[labels[order] == label] for label in np.unique(labels)]
        out = np.sort(np.concatenate([group[: int(share * len(group))] for group in groups]))
        training = self.rows(np.setdiff1d(np.arange(len(labels)), out)).normalised()
        if not len(out) or not self.task.varies(training.y):
            raise ValueError(
                f"held_out must leave rows to train on and rows to compare on, got {share:g} of {len(labels)}"
            )
        return training, self.rows(out)


def without_padding(batch: Batch) -> Batch:
    """Returns the rows of positive weight, in NumPy."""
    batch = jax.tree.map(np.asarray, batch)
    if batch.weight is None:
        return batch
    real: Any = batch.weight > 0
    count = np.count_nonzero(real)
    if real[:count].all():  # padding is at the end, so a slice without a copy is sufficient
        real = slice(count)
    return jax.tree.map(lambda a: a[real], batch)


def bucket(n: int) -> int:
    """Returns the number of rows after padding n rows: at most a sixteenth more, and at least 32.

    Tables of similar length, such as the folds of a cross-validation, then share a compiled program. The number is a
    multiple of the number of devices over which rows are sharded.
    """
    step = math.lcm(max(1, 2 ** (n.bit_length() - 5)), sharding.parts())
    return -(-max(32, n) // step) * step


def checked_table(
    x: Any,
    y: Any,
    sample_weight: Any,
    task: Literal["regression", "classification"] | tasks.Task,
    targets: Callable[[Any, Any], Any] = lambda x, y: y,
    monotone: Any = None,
    missing: Sequence[str] = (),
) -> Table:
    """Returns the checked training data, without rows of weight 0, and with weights of mean 1.

    ``targets(x, y)`` returns the targets, which a recipe may derive from the features. ``monotone`` and ``missing`` are
    the arguments of :func:`jtrees.fit`.

    Raises:
      ValueError: if an argument is invalid. The message names the argument, what was expected, and the value.
    """
    columns, frame = None, read_frame(x, missing=checked_missing(missing))
    if frame is not None:
        if sample_weight is not None:  # rows of weight 0 must not affect medians and levels
            weight = checks.relative_weight(sample_weight, len(frame))
            if y is not None:
                checks.check_rows(y := np.asarray(y), len(frame))
                y = y[weight > 0]
            frame, sample_weight = frame[weight > 0], weight[weight > 0]
        columns, x = Columns.fit(frame, y, task=task, sample_weight=sample_weight, missing=missing)
    x = _rows(checks.check_x(x))
    y = targets(x, y)
    if y is None:
        raise ValueError("y must hold the targets to learn, got None")
    task, y = tasks.checked_targets(task, y, len(x))
    table = Table(x, y, None, task, columns, checked_signs(monotone, columns, x.shape[1]))
    if sample_weight is not None:
        table = _weighted(table, sample_weight)
        if not task.varies(table.y):
            checks.check_targets(table.y, len(table.x))  # names the constant column
    y, factors = task.weighed(table.y)
    if factors is not None:
        weight = factors if table.weight is None else table.weight * factors
        table = _weighted(table.replace(y=y), weight)
    _check_range(table)
    return table


def _weighted(table: Table, sample_weight: Any) -> Table:
    """Returns the rows of positive weight. A weight that is too small for float32 counts as 0."""
    weight = checks.relative_weight(sample_weight, len(table.x))
    return table.replace(weight=weight).rows(weight > 0).normalised()


def held_out_table(x: Any, y: Any, table: Table, targets: Callable[[Any, Any], Any] = lambda x, y: y) -> Table:
    """Returns a checked validation set for the training table; ``targets`` is as for :func:`checked_table`.

    Raises:
      ValueError: if the number of features or the kind of targets differs from the training table.
    """
    x = x if table.columns is None else table.columns.transform(x)
    x = _rows(checks.check_x(x, features=table.x.shape[1]))
    y = targets(x, y)
    if y is None:
        raise ValueError("y must hold the targets to evaluate on, got None")
    held_out = Table(x, table.task.held_out_targets(y, len(x)), None, table.task, table.columns)
    _check_range(held_out)
    return held_out


def _rows(x: Any) -> np.ndarray:
    """Returns features in C order and native byte order; sums then round equally for any memory layout."""
    x = np.asarray(x)
    return np.ascontiguousarray(x, x.dtype.newbyteorder("=") if x.dtype.kind == "f" else np.float64)


def _check_range(table: Table) -> None:
    """Raises ``ValueError`` for values outside the range of float32, which is the precision of the trees."""
    for name, values in (("x", table.x), ("y", table.y)):
        if values.dtype.itemsize <= 4:
            continue
        if (large := max(values.max(), -values.min())) > np.finfo(np.float32).max:
            raise ValueError(f"{name} must be within the range of float32, got {large:.3g}")
