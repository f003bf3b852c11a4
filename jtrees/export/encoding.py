"""How the columns of a raw table become features, as plain arrays: the common part of all formats that hold columns."""

from typing import NamedTuple

import numpy as np

from jtrees.data.cells import Reading
from jtrees.data.columns import Columns
from jtrees.data.frame import Frame, RawColumn
from jtrees.data.kinds import MONTHS, WEEKDAYS, Date, LeftOut, Numeric, OneHot, TargetMeans

_NAMES = {"month": MONTHS, "weekday": WEEKDAYS}
MICROSECONDS = 86_400_000_000  # of a day, as durations are counted in whole ones


class Field(NamedTuple):
    """A column that the model uses.

    A number gives ``value - start``, or ``center`` if it is missing, then 1 or 0 for missing if ``masked``. A level,
    and the month and the weekday of a date, give a row of a table: those of the levels, then that of any other, then
    that of a missing one.

    Attributes:
      name: its name.
      place: its place in the table.
      kind: ``"numeric"``, ``"boolean"``, ``"date"`` (days since 1970) or ``"text"``.
      start: of numbers and dates.
      center: likewise.
      masked: likewise.
      levels: the levels of text.
      zone: of dates the time zone, as in :class:`jtrees.data.columns.Date`.
      reading: how text becomes numbers or dates.
      durations: whether the numbers are days of durations.
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
        """Number of features before those of the tables."""
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
    zone, masked = column.wanted.zone, bool(number.missing)
    numbers = number.kind, number.start, number.center
    return Field(name, place, *numbers, masked, (), tables, zone, reading, number.durations)


def _table(column: OneHot | TargetMeans, levels: tuple[str, ...]) -> np.ndarray:
    rows = np.array([*levels, new_level(column.known), None], object)
    return column.encode(RawColumn("text", rows)).astype(np.float64)


def new_level(levels: tuple[str, ...]) -> str:
    """Returns a text that is none of the levels."""
    return "\0" * (1 + max(map(len, levels), default=0))


def test_table(columns: Columns, rows: int) -> Frame:
    """Returns rows for the self-test of a file: numbers about their centres, all levels, and missing values."""
    rng = np.random.default_rng(0)
    drawn = {}
    for name, column in columns.columns.items():
        missing = rng.random(rows) < 0.2
        if isinstance(column, LeftOut):
            drawn[name] = RawColumn("numeric", np.zeros(rows))
        elif isinstance(column, (OneHot, TargetMeans)):
            levels = np.array([*column.levels, new_level(column.known)], object)
            drawn[name] = RawColumn("text", levels[rng.integers(len(levels), size=rows)])
            drawn[name].values[missing] = None
        else:
            number = column.days if isinstance(column, Date) else column
            values = number.start + number.center + number.spread * rng.normal(size=rows)
            values = (values > 0.5) * 1.0 if number.kind == "boolean" else values
            values = np.floor(values) if number.kind == "date" else values
            values = np.round(values * MICROSECONDS) / MICROSECONDS if number.durations else values
            of = "durations" if number.durations else "text"
            drawn[name] = RawColumn(number.kind, np.where(missing, np.nan, values), column.wanted.zone, of)
    return Frame(drawn, named=columns.named)


def codes_of(field: Field, raw: RawColumn) -> np.ndarray:
    """Returns the places of levels in their table, ``(n,)``."""
    places = {level: i for i, level in enumerate(field.levels)} | {None: len(field.levels) + 1}
    return np.array([places.get(value, len(field.levels)) for value in raw.values], np.int64)


def encoded(columns: Columns, table: Frame) -> np.ndarray:
    """Returns the features of a table, ``(n, p)``, without a warning of missing values."""
    used = [(column, table.columns[name]) for name, column in columns.columns.items()]
    return np.column_stack([column.encode(raw) for column, raw in used if not isinstance(column, LeftOut)])
