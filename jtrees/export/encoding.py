"""The encoding of a raw table's columns as plain arrays: the common part of all export formats with columns."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jtrees.tables import TableEncoder
from jtrees.tables.cells import PLAIN, Reading
from jtrees.tables.frame import ColumnSchema, Frame, RawColumn
from jtrees.tables.program import Encoding, Lookup
from jtrees.validation import quoted

MICROSECONDS = 86_400_000_000  # microseconds in a day; durations are whole microseconds


class Field(NamedTuple):
    """A column that the model uses.

    A number has the feature ``value - start``, or ``center`` if the number is missing. If ``masked``, a second feature
    is 1 for a missing number, else 0. The features of a level or of a period of dates are a row of a table. The table
    has a row for each level, then a row for any other level, then a row for a missing value.

    Attributes:
      name: name of the column.
      place: position of the column in the raw table.
      kind: ``"number"``, ``"boolean"``, ``"date"`` (days since 1970) or ``"text"``.
      start: number that is subtracted from numbers and dates.
      center: feature of a missing number or date.
      masked: whether numbers and dates have a feature for missing values.
      levels: the levels of text that have a row in the tables.
      missing: texts that mean a missing value.
      zone: time zone of dates, as in :class:`jtrees.tables.ColumnSchema`.
      reading: format in which text is read as numbers or dates.
      durations: whether the numbers are durations in days.
      tables: rows ``(levels + 2, k)`` of ``"level"`` or of a period of dates, in the order of the features.
    """

    name: str
    place: int
    kind: str
    start: float
    center: float
    masked: bool
    levels: tuple[str, ...]
    missing: tuple[str, ...]
    tables: dict[str, np.ndarray]
    zone: str | None
    reading: Reading
    durations: bool = False

    @property
    def numbers(self) -> int:
        """Number of features before the features of the tables."""
        return 0 if self.kind == "text" else 1 + self.masked


def fields_of(encoder: TableEncoder) -> list[Field]:
    """Returns the columns that a model uses, in the order of their features.

    Raises:
      ValueError: for levels in an array, because files find the columns of arrays by position, as numbers.
    """
    if not encoder.schema.named and (text := [name for name, c in encoder.schema.used.items() if c.kind == "text"]):
        raise ValueError(f"levels must be in a table with names, such as a DataFrame, got the column {quoted(text[0])}")
    return [
        _field(name, place, column, encoder.encodings[name], encoder.schema.missing)
        for place, (name, column) in enumerate(encoder.schema.columns.items())
        if name in encoder.encodings
    ]


def number_fields(names: Sequence[str], medians: np.ndarray | None) -> list[Field]:
    """Returns the columns of an array. Without medians, the feature of a missing number is NaN."""
    reading, centers = PLAIN["number"], np.full(len(names), np.nan) if medians is None else medians
    return [
        Field(name, j, "number", 0.0, float(center), False, (), (), {}, None, reading)
        for j, (name, center) in enumerate(zip(names, centers, strict=True))
    ]


def _field(name: str, place: int, column: ColumnSchema, encoding: Encoding, missing: tuple[str, ...]) -> Field:
    tables = {part: lookup.table for part, lookup in encoding.lookups.items()}
    numbers = column.kind, encoding.start, encoding.center, len(encoding.names) == 2
    levels = column.levels, tuple(text for text in missing if text not in column.training_levels)
    return Field(name, place, *numbers, *levels, tables, column.zone, column.text_reading, column.durations)


def new_level(levels: tuple[str, ...]) -> str:
    """Returns a text that differs from all levels."""
    return "\0" * (1 + max(map(len, levels), default=0))


def test_table(encoder: TableEncoder, rows: int) -> Frame:
    """Returns rows for the self-test of a file: numbers around their centres, all levels, and missing values."""
    rng = np.random.default_rng(0)
    sample = {}
    for name, column in encoder.schema.columns.items():
        missing = rng.random(rows) < 0.2
        if column.kind == "drop":
            sample[name] = RawColumn("number", np.zeros(rows))
        elif column.kind == "text":
            levels = np.array([*column.levels, new_level(column.training_levels)], object)
            sample[name] = RawColumn("text", levels[rng.integers(len(levels), size=rows)])
            sample[name].values[missing] = None
        else:
            encoding = encoder.encodings[name]
            values = encoding.start + encoding.center + encoding.spread * rng.normal(size=rows)
            values = (values > 0.5) * 1.0 if column.kind == "boolean" else values
            if column.kind == "date" and column.zone is not None:  # noon, because an hour may be left out in spring
                values = np.floor(values) + 0.5
            elif column.kind == "date":  # whole days, or whole minutes if the time of the day counts
                step = 1440 if {"hour", "minute"} & set(column.parts) else 1
                values = np.floor(values * step) / step
            values = np.round(values * MICROSECONDS) / MICROSECONDS if column.durations else values
            source = "durations" if column.durations else "text"
            sample[name] = RawColumn(column.kind, np.where(missing, np.nan, values), column.zone, source)
    return Frame(sample, named=encoder.schema.named)


def codes_of(field: Field, raw: RawColumn) -> np.ndarray:
    """Returns the row of each level in the field's table, ``(n,)``."""
    return Lookup(field.levels, (), ()).codes(raw)
