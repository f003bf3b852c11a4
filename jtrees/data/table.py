"""Checked tables in the user's units."""

import functools
import math
from typing import Any

import jax
import numpy as np

from jtrees import pytree, segments, sharding, tasks
from jtrees.data.constraints import Columns
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
      encoder: the :class:`jtrees.tables.TableEncoder` that made the features of a raw table, else None.
      monotone: the sign of each feature: 1 if predictions must not fall in it, -1 if they must not rise, else 0. None:
        all signs are 0.
      numbers: the numbers of the rows among the rows of the user, ``(n,)``. None: all rows.
    """

    x: np.ndarray
    y: np.ndarray
    weight: np.ndarray | None
    task: tasks.Task = pytree.field(pytree_node=False)
    encoder: Any = pytree.field(pytree_node=False, default=None)
    monotone: tuple[int, ...] | None = pytree.field(pytree_node=False, default=None)
    numbers: np.ndarray | None = None

    def rows(self, chosen: Any) -> "Table":
        """Returns a subset of the rows with their weights; :meth:`normalised` makes a training set of it."""
        weight = None if self.weight is None else self.weight[chosen]
        return self.replace(x=self.x[chosen], y=self.y[chosen], weight=weight, numbers=self.numbers_of(chosen))

    def numbers_of(self, chosen: Any) -> np.ndarray:
        """Returns the numbers of some rows among the rows of the user."""
        return (np.arange(len(self.x)) if self.numbers is None else self.numbers)[chosen]

    def normalised(self) -> "Table":
        """Returns the table with weights of mean 1."""
        return self if self.weight is None else self.replace(weight=segments.mean_one(self.weight))

    @functools.cached_property
    def medians(self) -> np.ndarray:
        """Medians of the features in double precision, ``(p,)``, which fill missing values of other rows."""
        return np.array([np.median(column.astype(np.float64)) for column in self.x.T])

    @property
    def columns(self) -> Columns:
        """The columns of a raw table, else None."""
        return None if self.encoder is None else self.encoder.named_columns


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


def check_range(name: str, values: np.ndarray) -> None:
    """Raises ``ValueError`` for values outside the range of float32, which is the precision of the trees."""
    if values.dtype.itemsize > 4 and (large := max(values.max(), -values.min())) > np.finfo(np.float32).max:
        raise ValueError(f"{name} must be within the range of float32, got {large:.3g}")
