"""The encoding of a raw table's columns as plain arrays: the common part of all export formats with columns."""

from typing import NamedTuple

import numpy as np

from jtrees.data.cells import Reading
from jtrees.data.columns import Columns
from jtrees.data.frame import Frame, RawColumn
from jtrees.data.kinds import MONTHS, WEEKDAYS, Date, LeftOut, Numeric, OneHot, TargetMeans

_NAMES = {"month": MONTHS, "weekday": WEEKDAYS}
MICROSECONDS = 86_400_000_000  # microseconds in a day; durations are whole microseconds


class Field(NamedTuple):
    """A column that the model uses.

    A number has the feature ``value - start``, or ``center`` if the number is missing. If ``masked``, a second feature
    is 1 for a missing number, else 0. The features of a level, a month or a weekday are a row of a table. The table has
    a row for each level, then a row for any other level, then a row for a missing value.

    Attributes:
      name: name of the column.
      place: position of the column in the raw table.
      kind: ``"numeric"``, ``"boolean"``, ``"date"`` (days since 1970) or ``"text"``.
      start: number that is subtracted from numbers and dates.
      center: feature of a missing number or date.
      masked: whether numbers and dates have a feature for missing values.
      levels: the levels of text.
      zone: time zone of dates, as in :class:`jtrees.data.columns.Date`.
      reading: format in which text is read as numbers or dates.
      durations: whether the numbers are durations in days.
      tables: rows ``(levels + 2, k)`` of ``"level"``, ``"month"`` or ``"weekday"``, in the order of the features.
    """

    name: str
    place: int
    kind: str
    start: float
    center: float
    masked: bool
    levels: tuple[str, ...]
    tables: dict[str, np.ndarray]
    zone: str | None
    reading: Reading
    durations: bool = False

    @property
    def numbers(self) -> int:
        """Number of features before the features of the tables."""
        return 0 if self.kind == "text" else 1 + self.masked


def fields_of(columns: Columns) -> list[Field]:
    """Returns the columns that a model uses, in the order of their features."""
    return [
        _field(name, place, column, columns.text_reading(name))
        for place, (name, column) in enumerate(columns.columns.items())
        if not isinstance(column, LeftOut)
    ]


def _field(name: str, place: int, column: Numeric | OneHot | TargetMeans | Date, reading: Reading) -> Field:
    if isinstance(column, (OneHot, TargetMeans)):
        tables = {"level": _table(column, column.levels)}
        return Field(name, place, "text", 0.0, 0.0, False, column.levels, tables, None, reading)
    number, parts = (column.days, column.parts) if isinstance(column, Date) else (column, {})
    tables = {part: _table(encoding, _NAMES[part]) for part, encoding in parts.items()}
    zone, masked = column.raw_kind.zone, bool(number.missing)
    numbers = number.kind, number.start, number.center
    return Field(name, place, *numbers, masked, (), tables, zone, reading, number.durations)


def _table(column: OneHot | TargetMeans, levels: tuple[str, ...]) -> np.ndarray:
    rows = np.array([*levels, new_level(column.training_levels), None], object)
    return column.encode(RawColumn("text", rows)).astype(np.float64)


def new_level(levels: tuple[str, ...]) -> str:
    """Returns a text that differs from all levels."""
    return "\0" * (1 + max(map(len, levels), default=0))


def test_table(columns: Columns, rows: int) -> Frame:
    """Returns rows for the self-test of a file: numbers around their centres, all levels, and missing values."""
    rng = np.random.default_rng(0)
    sample = {}
    for name, column in columns.columns.items():
        missing = rng.random(rows) < 0.2
        if isinstance(column, LeftOut):
            sample[name] = RawColumn("numeric", np.zeros(rows))
        elif isinstance(column, (OneHot, TargetMeans)):
            levels = np.array([*column.levels, new_level(column.training_levels)], object)
            sample[name] = RawColumn("text", levels[rng.integers(len(levels), size=rows)])
            sample[name].values[missing] = None
        else:
            number = column.days if isinstance(column, Date) else column
            values = number.start + number.center + number.spread * rng.normal(size=rows)
            values = (values > 0.5) * 1.0 if number.kind == "boolean" else values
            values = np.floor(values) if number.kind == "date" else values
            values = np.round(values * MICROSECONDS) / MICROSECONDS if number.durations else values
            source = "durations" if number.durations else "text"
            sample[name] = RawColumn(number.kind, np.where(missing, np.nan, values), column.raw_kind.zone, source)
    return Frame(sample, named=columns.named)


def codes_of(field: Field, raw: RawColumn) -> np.ndarray:
    """Returns the row of each level in the field's table, ``(n,)``."""
    places = {level: i for i, level in enumerate(field.levels)} | {None: len(field.levels) + 1}
    return np.array([places.get(value, len(field.levels)) for value in raw.values], np.int64)


def encoded(columns: Columns, table: Frame) -> np.ndarray:
    """Returns the features of a table, ``(n, p)``. Missing values cause no warning."""
    used = [(column, table.columns[name]) for name, column in columns.columns.items()]
    return np.column_stack([column.encode(raw) for column, raw in used if not isinstance(column, LeftOut)])
