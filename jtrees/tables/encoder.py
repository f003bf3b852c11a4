"""The encoder of a raw table: features of its rows, fitted to training rows."""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, Literal

from jax.typing import ArrayLike
import numpy as np

from jtrees import io, segments, tasks, validation as checks
from jtrees.data.constraints import NamedColumn
from jtrees.tables.frame import Frame
from jtrees.tables.inference import inferred
from jtrees.tables.means import FOLDS, Output, Targets
from jtrees.tables.program import Encoding, fit_encoding
from jtrees.tables.schemas import Schema

_MOST_CLASSES = 16  # the most frequent classes, whose indicators may have means


@io.part
@dataclasses.dataclass(frozen=True)
class TableEncoder:
    """The map from the rows of a raw table to features.

    Target means, medians, deviations and first dates come from training rows. All else comes from the schema.

    Attributes:
      schema: what the columns hold.
      encodings: the encoding of each column that has features, by name.
    """

    schema: Schema
    encodings: dict[str, Encoding]

    @classmethod
    def fit(
        cls,
        x: Any,
        y: ArrayLike | None = None,
        *,
        task: Literal["regression", "classification"] | tasks.Task = "regression",
        sample_weight: ArrayLike | None = None,
        columns: Mapping[Any, str] | Schema | None = None,
        missing: Sequence[str | float] = (),
    ) -> tuple["TableEncoder", np.ndarray]:
        """Returns the encoder of a table, and the features of its rows.

        The features of target means differ from ``transform(x)``: a training row has means over other rows. A column of
        dates has target means if its periods help. Columns of text have indicators in the order of their numbers of
        levels, while the table has at most two features for each column, or 16 features. All other columns of text have
        target means. Dates may exceed this budget, and with several outputs, so may columns with target means.

        Args:
          x: a DataFrame of pandas, polars or Arrow, or an array ``(n, p)`` in which NaN is a missing value.
          y: targets, as for :func:`jtrees.fit`; None: levels are encoded by their frequencies alone.
          task: as for :func:`jtrees.fit`.
          sample_weight: weights of the rows in target means.
          columns: kinds of columns by name, or a schema, as for :func:`jtrees.fit`.
          missing: as for :func:`jtrees.tables.schema`.

        Returns:
          The encoder, and the features ``(n, p')`` in float64.

        Raises:
          ValueError, ImportError: in the cases of :func:`jtrees.tables.schema`.
        """
        schema, frame = inferred(x, columns=columns, missing=missing)
        if y is not None:
            task, y = tasks.checked_targets(task, y, len(frame))
        weight = None if sample_weight is None else checks.relative_weight(sample_weight, len(frame))
        return cls.of_rows(schema, frame, task, y, weight)

    @classmethod
    def of_rows(
        cls, schema: Schema, frame: Frame, task: Any, y: np.ndarray | None, weight: np.ndarray | None
    ) -> tuple["TableEncoder", np.ndarray]:
        """Returns the encoder that is fitted to rows in the kinds of a schema, and the features of the rows.

        ``frame`` has the rows as :meth:`Schema.read` returns them, ``y`` checked targets or None, and ``weight``
        weights above 0 or None.
        """
        targets = _targets(y, len(frame), task, weight)
        columns = {name: (schema.columns[name], raw) for name, raw in frame.columns.items()}
        results = {
            name: fit_encoding(name, *column, targets) for name, column in columns.items() if column[0].kind != "text"
        }
        if results and any(column.by_mean for column, _ in columns.values()):
            targets = targets.with_residuals([features[:, 0] for _, features in results.values()])
        results = {name: results.get(name) or fit_encoding(name, *column, targets) for name, column in columns.items()}
        encoder = cls(schema, {name: encoding for name, (encoding, _) in results.items()})
        return encoder, np.column_stack([features for _, features in results.values()])

    def transform(self, x: Any) -> np.ndarray:
        """Returns the features of new rows, ``(n, p')`` in float64; the features of a row depend on that row alone.

        Args:
          x: rows, as for :meth:`Schema.read`.

        Warns:
          ColumnsWarning: if a column has missing values and had none in the table of the schema. The values are filled.
            Also if cells do not have the kind of their column, which are missing values, too; and for levels that the
            schema does not have.

        Raises:
          ValueError: in the cases of :meth:`Schema.read`.
        """
        frame = self.schema.read(x)
        self.schema.warn_of_news(frame)
        return self.encode(frame)

    def encode(self, frame: Frame) -> np.ndarray:
        """Returns the features of rows in the kinds of the schema, ``(n, p')``. No warnings are given."""
        return np.column_stack([encoding.encode(frame.columns[name]) for name, encoding in self.encodings.items()])

    def gaps(self, x: Any) -> dict[str, np.ndarray]:
        """Returns which values of new rows are missing, ``(n,)`` bool for each column that has features."""
        return {name: raw.missing for name, raw in self.schema.read(x).columns.items()}

    @property
    def feature_names(self) -> list[str]:
        """Names of the features, such as ``area``, ``[area missing]``, ``[heating = gas]``."""
        return [feature for encoding in self.encodings.values() for feature in encoding.feature_names]

    @property
    def named_columns(self) -> tuple[NamedColumn, ...]:
        """Name, number of features and kind of each column of the table."""
        sizes = {name: len(encoding.feature_names) for name, encoding in self.encodings.items()}
        columns = self.schema.columns.items()
        kind = lambda column: "constant" if column.note == "constant" else column.kind
        return tuple(NamedColumn(name, sizes.get(name, 0), kind(column)) for name, column in columns)

    def with_class_names(self, class_names: Sequence[str]) -> "TableEncoder":
        """Returns the same encoder with the user's names of classes in feature names: ``[mean sold by city]``.

        The names are the names of the K classes, or of the actions of a policy, in the order of their numbers.
        """
        encodings = {name: encoding.with_class_names(class_names) for name, encoding in self.encodings.items()}
        return dataclasses.replace(self, encodings=encodings)

    def described(self) -> dict[str, str]:
        """Returns a description of each column by name: its encoding, how its text is read, and any ambiguity."""
        descriptions = {}
        for name, column in self.schema.columns.items():
            if name not in self.encodings:
                descriptions[name] = f"left out: {column.note or 'as requested'}"
                continue
            reading = "" if column.reading is None else str(column.reading)
            encoding = self.encodings[name].described(column)
            descriptions[name] = "; ".join(filter(None, (encoding, reading, column.note)))
        return descriptions

    def __hash__(self) -> int:
        return hash(self.schema)

    def __str__(self) -> str:
        return "\n".join(f"{name}: {description}" for name, description in self.described().items())


@dataclasses.dataclass(frozen=True)
class EncodedTable:
    """The training rows of a raw table with their features, for several fits to the same rows and targets.

    Attributes:
      frame: the rows in the kinds of the schema of the encoder.
      encoder: the encoder that is fitted to the rows.
      features: the features of the training rows, ``(n, p)``.
    """

    frame: Frame
    encoder: TableEncoder
    features: np.ndarray

    def __len__(self) -> int:
        return len(self.frame)

    def __getitem__(self, rows: Any) -> Frame:
        """Returns a subset of the rows without their features, because the features depend on all training rows."""
        return self.frame[rows]


def _targets(y: np.ndarray | None, n: int, task: Any, weight: np.ndarray | None) -> Targets:
    counts: Any = np.ones(n) if weight is None else segments.mean_one(weight)
    fold = np.random.default_rng(0).permutation(n) % FOLDS
    if y is None:
        return Targets((), np.zeros((n, 0)), counts, fold)
    values = task.indicators(y).astype(np.float64)
    if isinstance(task, tasks.Classification):
        classes = np.arange(task.classes)[1:] if task.classes == 2 else np.argsort(-(counts @ values), kind="stable")
        classes = np.sort(classes[:_MOST_CLASSES])
        values, outputs = values[:, classes], [Output(f"class {i}", i) for i in classes.tolist()]
    elif isinstance(task, tasks.Policy):  # the mean of an action is the mean of its rewards
        outputs = [Output(f"action {i}", i) for i in range(values.shape[1])]
    else:
        outputs = [Output("y")] if task.outputs is None else [Output(f"y{i}") for i in range(task.outputs)]
    return Targets(tuple(outputs), values, counts, fold)
