"""Data sets: the checked rows of a user, before a raw table is encoded."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, Literal

import jax
from jaxtyping import Array
import numpy as np

from jtrees import prediction, segments, tasks, validation as checks
from jtrees.data.constraints import checked_signs
from jtrees.data.held_out import held_out_rows
from jtrees.data.table import Table, check_range
from jtrees.tables.cells import missing_numbers
from jtrees.tables.encoder import EncodedTable, TableEncoder
from jtrees.tables.frame import Frame, read_frame
from jtrees.tables.inference import checked_missing, inferred
from jtrees.tables.schemas import Schema, rows_of

_Targets = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Checked rows with targets. The encoder of a raw table is fitted when a part of the rows becomes a table.

    Attributes:
      x: features, ``(n, p)``, or the rows of a raw table in the kinds of ``schema``.
      y: targets, as in :class:`jtrees.data.Table`.
      weight: weights above 0, ``(n,)``, of mean 1 over the rows of the user. None: equal weights.
      task: what is predicted.
      schema: what the columns of a raw table hold, or None.
      encoder: the encoder of a raw table that made ``x``, if ``x`` is features. None: the encoder is not fitted yet.
      monotone: signs of columns, as for :func:`jtrees.fit`.
      numbers: the numbers of the rows among the rows of the user, ``(n,)``. None: all rows.
    """

    x: np.ndarray | Frame
    y: np.ndarray
    weight: np.ndarray | None
    task: tasks.Task
    schema: Schema | None = None
    encoder: TableEncoder | None = None
    monotone: Any = None
    numbers: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.y)

    def rows(self, chosen: Any) -> "Dataset":
        """Returns a subset of the rows with their weights."""
        weight = None if self.weight is None else self.weight[chosen]
        numbers = (np.arange(len(self)) if self.numbers is None else self.numbers)[chosen]
        return dataclasses.replace(self, x=self.x[chosen], y=self.y[chosen], weight=weight, numbers=numbers)

    def without(self, rows: np.ndarray) -> "Dataset":
        """Returns all other rows."""
        return self.rows(np.setdiff1d(np.arange(len(self)), rows))

    def divided(self, share: float, key: Array) -> tuple["Dataset", "Dataset"]:
        """Returns the training rows, and a random fraction ``share`` of the rows that is held out.

        The fraction is the same for every class. A soft label counts as its most probable class. Raises ``ValueError``
        if no rows are held out, or if the targets of the training rows do not vary.
        """
        rng = np.random.default_rng(np.asarray(jax.random.bits(key, (4,))))
        out = held_out_rows(rng.permutation(len(self)), share, self.task.strata(self.y))
        training = self.without(out)
        if not len(out) or not self.task.varies(training.y):
            raise ValueError(
                f"held_out must leave rows to train on and rows to compare on, got {share:g} of {len(self)}"
            )
        return training, self.rows(np.sort(out))

    def table(self) -> Table:
        """Returns the rows as a training table, with weights of mean 1; the encoder is fitted to these rows."""
        x, encoder = self.x, self.encoder
        if isinstance(x, Frame):
            assert self.schema is not None
            encoder, x = TableEncoder.of_rows(self.schema, x, self.task, self.y, self.weight)
        table = Table(x, self.y, self.weight, self.task, encoder, numbers=self.numbers)
        return table.replace(monotone=checked_signs(self.monotone, table.columns, x.shape[1])).normalised()

    def evaluated_by(self, training: Table) -> Table:
        """Returns the rows as evaluation rows, with features of the encoder of a training table."""
        x = training.encoder.encode(self.x) if isinstance(self.x, Frame) else self.x
        return Table(x, self.y, self.weight, self.task, training.encoder)

    def with_weights(self, sample_weight: Any) -> "Dataset":
        """Returns the rows of positive weight, with weights of mean 1; weights too small for float32 count as 0.

        The weights are the user's weights (None: equal weights), times the class weights of the task.
        """
        dataset = self if sample_weight is None else self._by_weight(checks.relative_weight(sample_weight, len(self)))
        y, factors = self.task.weighed(dataset.y)
        if factors is None:
            return dataset
        weight = factors if dataset.weight is None else dataset.weight * factors
        return dataclasses.replace(dataset, y=y)._by_weight(checks.relative_weight(weight, len(dataset)))

    def _by_weight(self, weight: np.ndarray) -> "Dataset":
        return dataclasses.replace(self.rows(weight > 0), weight=segments.mean_one(weight[weight > 0]))


def checked_dataset(
    x: Any,
    y: Any,
    sample_weight: Any,
    task: Literal["regression", "classification"] | tasks.Task,
    targets: _Targets = lambda x, y: y,
    monotone: Any = None,
    missing: Sequence[str | float] = (),
    columns: Any = None,
) -> Dataset:
    """Returns the checked training data, without rows of weight 0.

    ``targets(x, y)`` returns the targets, which a recipe may derive from the features. ``monotone``, ``missing`` and
    ``columns`` are the arguments of :func:`jtrees.fit`.

    Raises:
      ValueError: if an argument is invalid. The message names the argument, what was expected, and the value.
    """
    schema = encoder = numbers = None
    if isinstance(x, EncodedTable):
        schema, encoder, x = x.encoder.schema, x.encoder, x.features
    elif (raw := raw_rows(x, missing, columns)) is not None:
        if sample_weight is not None:  # rows of weight 0 must not affect levels
            weight = checks.relative_weight(sample_weight, len(raw))
            if y is not None:
                y = np.asarray(y)
                if y.ndim == 0:
                    raise ValueError(f"y must hold a target for each row, got {checks.quoted(y)}")
                checks.check_rows(y, len(raw))
                y = y[weight > 0]
            raw, sample_weight, numbers = raw[weight > 0], weight[weight > 0], np.flatnonzero(weight > 0)
        schema, x = inferred(raw, columns=columns, missing=missing)
        if isinstance(columns, Schema):
            schema.warn_of_news(x)
        if targets(np.zeros((2, len(x.columns))), y) is not y:
            encoder, x = TableEncoder.of_rows(schema, x, task, None, None)
    if not isinstance(x, Frame):
        x = _features(checks.check_x(x))
        y = targets(x, y)
    if y is None:
        raise ValueError("y must hold the targets to learn, got None")
    task, y = tasks.checked_targets(task, y, len(x))
    dataset = Dataset(x, y, None, task, schema, encoder, monotone, numbers).with_weights(sample_weight)
    if sample_weight is not None and not task.varies(dataset.y):
        checks.check_targets(dataset.y, len(dataset))  # names the constant column
    if not isinstance(dataset.x, Frame):  # the numbers of a raw table are checked when it is read
        check_range("x", dataset.x)
    check_range("y", dataset.y)
    return dataset


def raw_rows(x: Any, missing: Sequence[str | float], columns: Any) -> Frame | None:
    """Returns the rows of a raw table, in the kinds of a schema if ``columns`` is one; None for an array of numbers.

    An array without missing values is a raw table if kinds of its columns are requested, or if numbers mean a missing
    value.
    """
    if isinstance(columns, Schema):
        return inferred(x, columns=columns, missing=missing)[1]
    missing = checked_missing(missing)
    frame = read_frame(x, missing=missing, requested=columns)
    return rows_of(x) if frame is None and (columns is not None or missing_numbers(missing)) else frame


def checked_table(x: Any, y: Any, sample_weight: Any, task: Any, *how: Any, **options: Any) -> Table:
    """Returns all rows of :func:`checked_dataset` as a training table."""
    return checked_dataset(x, y, sample_weight, task, *how, **options).table()


def held_out_table(
    x: Any, y: Any, table: Table, targets: _Targets = lambda x, y: y, sample_weight: Any = None
) -> Table:
    """Returns a checked validation set for the training table, without rows of weight 0.

    The weights are the weights of training rows. :func:`checked_dataset` describes the other arguments and the errors.
    """
    x = x if table.encoder is None else table.encoder.transform(x)
    x = checks.check_x(x, features=table.x.shape[1], finite=False)
    x = _features(checks.check_x(prediction.filled(x, table.medians if np.isnan(x).any() else None)))
    y = targets(x, y)
    if y is None:
        raise ValueError("y must hold the targets to evaluate on, got None")
    y = table.task.held_out_targets(y, len(x))
    held_out = Dataset(x, y, None, table.task).with_weights(sample_weight).evaluated_by(table)
    check_range("x", held_out.x)
    check_range("y", held_out.y)
    return held_out


def _features(x: Any) -> np.ndarray:
    """Returns features in C order and native byte order; sums then round equally for any memory layout."""
    x = np.asarray(x)
    return np.ascontiguousarray(x, x.dtype.newbyteorder("=") if x.dtype.kind == "f" else np.float64)
