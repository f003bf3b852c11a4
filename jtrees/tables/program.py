"""Programs: how the values of a column become features. Predictions and exported files run the same programs.

The program of a column is a list of operations (:class:`Operation`). It is plain data, so a saved model contains it.
The number of its features depends only on the schema of the table and the number of outputs.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from jtrees import io
from jtrees.tables.cells import OFFSETS
from jtrees.tables.frame import ColumnSchema, RawColumn, level_codes
from jtrees.tables.means import Output, Targets, explains, level_means
from jtrees.tables.periods import PERIODS, periods

_MOST_MEANS = 6  # features of target means for a column or a period, however many outputs there are


@io.part
@dataclasses.dataclass(frozen=True)
class Lookup:
    """Features that are looked up by level.

    Attributes:
      levels: the levels.
      rows: the features of each level, then of any other level, then of a missing value, ``(levels + 2, k)``.
      names: names of the features.
      outputs: the outputs whose means the features are; empty for other features.
      by: the name of the column or the period whose levels have means.
    """

    levels: tuple[str, ...]
    rows: tuple[tuple[float, ...], ...]
    names: tuple[str, ...]
    outputs: tuple[Output, ...] = ()
    by: str = ""

    @classmethod
    def from_rows(cls, levels: tuple[str, ...], rows: np.ndarray, names: list[str]) -> "Lookup":
        """Returns the lookup of rows, ``(levels + 2, k)``."""
        return cls(levels, tuple(tuple(row) for row in rows.tolist()), tuple(names))

    def of_outputs(self, outputs: tuple[Output, ...], by: str) -> "Lookup":
        """Returns the lookup with the names of target means, such as ``[mean y by city]``."""
        names = tuple(f"[mean {output} by {by}]" for output in outputs)
        return dataclasses.replace(self, names=names, outputs=outputs, by=by)

    def with_class_names(self, class_names: Sequence[str]) -> "Lookup":
        """Returns the lookup with the user's names of classes in the names of target means."""
        outputs = tuple(output.with_class_names(class_names) for output in self.outputs)
        return self.of_outputs(outputs, self.by) if outputs else self

    def encode(self, raw: RawColumn, part: str = "level") -> np.ndarray:
        """Returns the features of values, ``(n, k)``. The part is ``"level"`` of text, or a period of dates."""
        return self.table[level_codes(self.levels, raw if part == "level" else periods(part, raw))]

    @functools.cached_property
    def table(self) -> np.ndarray:
        """The rows as an array, ``(levels + 2, k)``."""
        return np.array(self.rows, np.float64).reshape(len(self.rows), len(self.names))


class Operation(NamedTuple):
    """An operation that makes features of a value.

    Attributes:
      name: ``"difference"``: the value minus ``start``, or ``center`` if the value is missing. ``"missing"``: 1 for a
        missing value, else 0. ``"lookup"``: the row of a table.
      start: the number that is subtracted from values.
      center: the difference of a missing value. NaN: the model has no answer for a missing value.
      part: what has a row in the table: ``"level"`` of text, or a period of dates.
      table: the features of each level, then of any other level, then of a missing value, ``(levels + 2, k)``.
    """

    name: str
    start: float = 0.0
    center: float = 0.0
    part: str = ""
    table: np.ndarray = np.zeros((0, 1))

    @property
    def width(self) -> int:
        """Number of features."""
        return self.table.shape[1]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The operands besides the value."""
        arguments = {"difference": (self.start, self.center), "missing": (), "lookup": (self.part, self.table)}
        return arguments[self.name]


@io.part
@dataclasses.dataclass(frozen=True)
class Encoding:
    """The program of a column, fitted to training rows.

    Attributes:
      names: names of the features of numbers and dates: none, one or two.
      start: offset that is subtracted from numbers: the first day of the training rows for dates, else 0.
      center: the median of the features of the training rows.
      spread: the standard deviation of the training rows.
      lookups: lookups of ``"level"`` of text, and of periods of dates.
    """

    names: tuple[str, ...] = ()
    start: float = 0.0
    center: float = 0.0
    spread: float = 0.0
    lookups: dict[str, Lookup] = dataclasses.field(default_factory=dict)

    @property
    def feature_names(self) -> list[str]:
        """Names of the features."""
        return [*self.names, *(name for lookup in self.lookups.values() for name in lookup.names)]

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The operations, in the order of their features. If there are no targets, periods have no features."""
        numbers = (Operation("difference", self.start, self.center), Operation("missing"))[: len(self.names)]
        lookups = {part: lookup.table for part, lookup in self.lookups.items() if lookup.names}
        return *numbers, *(Operation("lookup", part=part, table=table) for part, table in lookups.items())

    def with_class_names(self, class_names: Sequence[str]) -> "Encoding":
        """Returns the encoding with the user's names of classes in the names of target means."""
        lookups = {part: lookup.with_class_names(class_names) for part, lookup in self.lookups.items()}
        return dataclasses.replace(self, lookups=lookups)

    def encode(self, raw: RawColumn) -> np.ndarray:
        """Returns the features of values in the kind of the schema, ``(n, k)``."""
        features = {
            "difference": lambda operation: np.where(raw.missing, operation.center, raw.values - operation.start),
            "missing": lambda _: raw.missing,
            "lookup": lambda operation: self.lookups[operation.part].encode(raw, operation.part),
        }
        return np.column_stack([features[operation.name](operation) for operation in self.operations])

    def described(self, column: ColumnSchema) -> str:
        """Returns a description of the encoding, with the schema of the column."""
        gaps = f", {column.missing} missing" if column.missing else ""
        if column.kind == "text":
            return f"text, {column.described_levels()}{gaps}"
        is_date = column.kind == "date"
        median = np.datetime64(int(self.start + self.center), "D") if is_date else f"{self.center:.6g}"
        kind = "durations in days" if column.durations else column.kind
        text = f"{kind}, median {median}, deviation {self.spread:.3g}{' days' if is_date else ''}{gaps}"
        helpful = " and ".join(part for part, lookup in self.lookups.items() if any(map(any, lookup.rows)))
        zone = "" if column.zone is None else f", local days{'' if column.zone == OFFSETS else f' of {column.zone}'}"
        return f"{text}{f', with {helpful}' if helpful else ''}{zone}"


def fit_encoding(name: str, column: ColumnSchema, raw: RawColumn, targets: Targets) -> tuple[Encoding, np.ndarray]:
    """Returns the encoding of a column that is fitted to training rows, and the features of these rows.

    The features of target means differ from the features of new rows (:func:`jtrees.tables.means.level_means`).
    """
    if column.kind == "text":
        levels = column.levels
        if column.by_mean and targets.outputs:
            lookup, features = _of_means(name, levels, raw, targets)
            return Encoding(lookups={"level": lookup}), features
        if column.by_mean:  # by the fraction of the training rows that have each level
            counts = np.bincount(level_codes(levels, raw), minlength=len(levels) + 2)
            lookup = Lookup.from_rows(levels, counts[:, None] / len(raw.values), [f"[frequency of {name}]"])
        else:  # a value without an indicator is 0 in all of them
            names = [*(f"[{name} = {level}]" for level in levels), f"[{name} other]", f"[{name} missing]"]
            numbers = list(column.indicators)
            lookup = Lookup.from_rows(levels, np.eye(len(levels) + 2)[:, numbers], [names[i] for i in numbers])
        encoding = Encoding(lookups={"level": lookup})
        return encoding, encoding.encode(raw)
    encoding = _of_numbers(name, column, raw)
    features, lookups = [encoding.encode(raw)], {}
    for part in column.parts:
        # Means that explain nothing would be noise. The features remain, so that all splits have as many.
        helps = explains(values := periods(part, raw), raw, targets)
        used = targets if helps else targets._replace(values=np.zeros_like(targets.values))
        lookups[part], encoded = _of_means(f"{name} {part}", PERIODS[part].levels, values, used)
        features.append(encoded)
    return dataclasses.replace(encoding, lookups=lookups), np.column_stack(features)


def _of_numbers(name: str, column: ColumnSchema, raw: RawColumn) -> Encoding:
    """Returns the encoding of numbers, booleans or days. If the training rows have no value, the median is 0."""
    present = raw.values[~raw.missing]
    present = present if len(present) else np.zeros(1)
    start = float(np.floor(present.min())) if column.kind == "date" else 0.0
    since = f" (days since {np.datetime64(int(start), 'D')})" if column.kind == "date" else ""
    names = (name + since, *([f"[{name} missing]"] if column.indicators else []))
    return Encoding(names, start, float(np.median(present) - start), float(present.std()))


def _of_means(name: str, levels: tuple[str, ...], raw: RawColumn, targets: Targets) -> tuple[Lookup, np.ndarray]:
    """Returns the lookup of target means, and the features of the training rows."""
    codes = level_codes(levels, raw)
    targets = targets.best_explained(codes, len(levels) + 2, _MOST_MEANS)
    rows, features = level_means(codes, len(levels) + 2, targets)
    return Lookup.from_rows(levels, rows, []).of_outputs(targets.outputs, name), features
