"""Reading of raw tables: DataFrames of pandas, polars and Arrow, and NumPy arrays with missing values.

A column of any library becomes one of four kinds: numbers, booleans, dates and text. Numbers, booleans and dates are
float64, and NaN is a missing value. Text is an array of objects, and None is a missing value.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
import datetime
import decimal
import numbers
from typing import Any, NamedTuple

import jax
import numpy as np

from jtrees import io, validation as checks
from jtrees.data.constraints import column_finder
from jtrees.tables.cells import MISSING, OFFSETS, PLAIN, Reading, find_reading, mask_missing, zone_name
from jtrees.tables.parse import DATES, DAY, WHOLE, is_missing, level_of, local_time, since_1970, since_midnight


class RawColumn(NamedTuple):
    """The values of a column.

    Attributes:
      kind: ``"number"``, ``"boolean"``, ``"date"`` (days since 1970, in local time) or ``"text"``.
      values: the values, ``(n,)``. Text is str, and None is a missing value. All other kinds are float64, and NaN is a
        missing value.
      zone: time zone of dates, or ``"offsets"`` if each date has its own offset. None: the dates have no time zone.
      source: kind of the original values of a text column, because numbers and booleans may name levels. ``"levels"``
        is for values that must not be read as numbers, such as categories. ``"durations"`` is for numbers of days.
      merged: whether different whole numbers of the column are equal in float64.
    """

    kind: str
    values: np.ndarray
    zone: str | None = None
    source: str = "text"
    merged: bool = False

    @property
    def missing(self) -> np.ndarray:
        """Mask of missing values, ``(n,)`` bool."""
        return self.values == np.array(None) if self.kind == "text" else np.isnan(self.values)

    def masked(self, missing: Collection[str]) -> "RawColumn":
        """Returns the column, in which texts that mean a missing value are None. Only text changes."""
        if self.kind != "text" or not missing:
            return self
        return self._replace(values=_objects(mask_missing(self.values.tolist(), missing)))

    def as_levels(self) -> "RawColumn":
        """Returns numbers, booleans or text as the canonical text of levels."""
        if self.kind == "text":
            return self
        boolean = self.kind == "boolean"
        values = [level_of(bool(value) if boolean and value == value else value) for value in self.values.tolist()]
        return RawColumn("text", _objects(values), source=self.kind)


@io.part
@dataclasses.dataclass(frozen=True)
class ColumnSchema:
    """What a column of a raw table holds.

    Attributes:
      kind: ``"number"``, ``"boolean"``, ``"date"``, ``"text"``, or ``"drop"`` for a column without features.
      durations: whether the numbers are durations in days.
      reading: how text is read as numbers or dates.
      zone: the time zone in which days are counted. ``"offsets"``: each date has its own offset. None: the dates have
        no time zone.
      levels: the sorted levels of text. If the column has indicators, rare levels are not among them.
      rare: levels with fewer than five rows, if the column has indicators. They and new levels share a feature.
      indicators: the features of 0 and 1: the number of the level that each marks. The number after the levels stands
        for rare and new levels, and the next one for missing values. Text without indicators is encoded by target
        means.
      parts: the periods of dates that vary, ``"month"``, ``"weekday"``, ``"hour"`` and ``"minute"``.
      missing: number of missing values.
      note: why the column is dropped, or what else its cells may mean.
      otherwise: the kind that keeps a dropped column, or reads the cells in the other way.
    """

    kind: str
    durations: bool = False
    reading: Reading | None = None
    zone: str | None = None
    levels: tuple[str, ...] = ()
    rare: tuple[str, ...] = ()
    indicators: tuple[int, ...] = ()
    parts: tuple[str, ...] = ()
    missing: int = 0
    note: str = ""
    otherwise: str = ""

    @property
    def by_mean(self) -> bool:
        """Whether levels are encoded by target means."""
        return self.kind == "text" and not self.indicators

    @property
    def training_levels(self) -> tuple[str, ...]:
        """All levels of the table."""
        return self.levels + self.rare

    @property
    def text_reading(self) -> Reading:
        """How text is read as numbers or dates; the text of levels is not converted."""
        return self.reading or dataclasses.replace(PLAIN[self.kind], zoned=self.zone is not None)

    def described_levels(self) -> str:
        """Returns the levels as text."""
        if self.by_mean:
            return f"{len(self.levels)} levels by target mean"
        rare = f", {len(self.rare)} rare levels together" if self.rare else ""
        return f"levels {checks.quoted_list(self.levels)}{rare}"

    def __str__(self) -> str:
        parts = ["durations in days"] * self.durations
        parts += [self.described_levels()] if self.kind == "text" else []
        parts += [str(self.reading)] if self.reading is not None else []
        parts += [f"with {' and '.join(self.parts)}"] if self.parts else []
        if self.zone is not None:
            parts.append(f"local days{'' if self.zone == OFFSETS else f' of {self.zone}'}")
        return "; ".join([*parts, *([self.note] if self.note else [])])


def level_codes(levels: Sequence[str], raw: RawColumn) -> np.ndarray:
    """Returns the number of the level of each value, ``(n,)``. New levels come next, and missing values last."""
    places = {level: i for i, level in enumerate(levels)} | {None: len(levels) + 1}
    return np.array([places.get(value, len(levels)) for value in raw.values], np.int64)


class Frame:
    """A raw table: columns by name, in order."""

    def __init__(self, columns: dict[str, RawColumn], *, named: bool):
        """``named``: whether the table has names of columns; if not, columns are identified by position."""
        self.columns, self.named = columns, named

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())).values)

    def __getitem__(self, rows: Any) -> "Frame":
        """Returns a subset of the rows."""
        chosen = {name: column._replace(values=column.values[rows]) for name, column in self.columns.items()}
        return Frame(chosen, named=self.named)


def read_frame(
    x: Any,
    schemas: Mapping[str, ColumnSchema] | None = None,
    missing: Collection[str] = (),
    requested: Any = None,
) -> Frame | None:
    """Returns the raw table of a DataFrame, or of an array with NaN; None for other arrays.

    Args:
      x: a DataFrame or table of pandas, polars, Arrow or another library that narwhals reads, or anything array-like.
      schemas: the columns of a DataFrame to read, and their kinds in training. Columns that do not exist are ignored.
        If the kind is text, numbers and booleans become canonical text. Dates are converted to the time zone of the
        training rows. None: all columns, without conversion.
      missing: texts that mean a missing value, besides ``MISSING``, among values of another type. Other texts remain.
      requested: kinds of training columns by name or number. The values of ``"drop"`` are not read. The values of
        ``"text"`` may have several types.

    Raises:
      ImportError: if x is a DataFrame and narwhals is not installed.
      ValueError: if a training table has no rows. Also if a column has mixed types, or a type that is not numeric,
        boolean, date or text. Also for infinite values. The message names the column and the row.
    """
    if isinstance(x, Frame):
        return x
    if hasattr(x, "columns") and not isinstance(x, np.ndarray):
        return _read_columns(_series(x, schemas is None), _read_series, schemas, missing, requested)
    x = checks.as_numeric("x", x)
    if x.ndim != 2 or 0 in x.shape or isinstance(x, jax.core.Tracer) or x.dtype.kind in "biu":
        return None
    if not np.isnan(values := np.asarray(x)).any():
        return None
    values_by_column = np.array(values.T, np.float64, order="C")
    columns = {f"x{j}": RawColumn("number", column) for j, column in enumerate(values_by_column)}
    return _checked(Frame(columns, named=False))


def frame_of_objects(
    x: np.ndarray,
    names: Sequence[str],
    schemas: Mapping[str, ColumnSchema] | None = None,
    missing: Collection[str] = (),
    requested: Any = None,
) -> Frame:
    """Returns the raw table of an array of objects, ``(n, p)``, such as the cells of a DataFrame.

    ``names`` are the names of the columns. All else is as for :func:`read_frame`.
    """
    return _read_columns(dict(zip(names, x.T, strict=True)), _read_objects, schemas, missing, requested)


def _read_columns(
    series_by_name: Mapping[str, Any],
    read: Callable[[str, Any, ColumnSchema, Collection[str]], RawColumn],
    schemas: Mapping[str, ColumnSchema] | None,
    missing: Collection[str],
    requested: Any,
) -> Frame:
    """Returns the raw table whose columns ``read`` reads; the other arguments are those of :func:`read_frame`."""
    columns, requested = {}, requested_kinds(requested, list(series_by_name))
    for name, series in series_by_name.items():
        if requested.get(name) == "drop":  # the values are not read
            columns[name] = RawColumn("text", np.full(len(series), None))
        elif schemas is None or name in schemas:
            schema = ColumnSchema("text" if requested.get(name) == "text" else "unknown")
            columns[name] = read(name, series, (schemas or {}).get(name, schema), missing)
    return _checked(Frame(columns, named=True))


DECIMALS = {"decimal point": ".", "decimal comma": ","}
#: Kinds of columns that a user may request. A format of dates, such as ``"%d/%m/%Y"``, is a kind, too.
KINDS = ("number", *DECIMALS, "boolean", "date", *DATES, "text", "drop")
_SHOWN_KINDS = "'number', 'decimal comma', 'boolean', 'date', '%d/%m/%Y', 'text' or 'drop'"


def requested_kinds(columns: Any, names: Sequence[str]) -> dict[str, str]:
    """Returns the requested kinds by the name of the column.

    Raises:
      ValueError: for an unknown column or kind, or for two kinds of a column.
    """
    if not isinstance(columns, Mapping | None):
        raise ValueError(f"columns must be kinds by column, or a schema, got {checks.quoted(columns)}")
    kinds, find = {}, column_finder(list(names), "columns")
    for column, kind in (columns or {}).items():
        if not isinstance(kind, str) or kind not in KINDS:
            got = f"got {checks.quoted(kind)} for {checks.quoted(column)}"
            raise ValueError(f"columns must have kinds such as {_SHOWN_KINDS}, {got}")
        if (name := find(column)) in kinds:
            raise ValueError(f"columns must have one kind for each column, got two for {checks.quoted(name)}")
        kinds[name] = kind
    return kinds


def _series(x: Any, training: bool) -> dict[str, Any]:
    """Returns the columns of a DataFrame by name."""
    try:
        import narwhals as nw
    except ImportError as error:
        raise ImportError('DataFrames need narwhals: pip install "jtrees[frames]"') from error
    names = [str(name) for name in (x.column_names if hasattr(x, "column_names") else x.columns)]
    if (repeated := checks.first_repeated(names)) is not None:
        raise ValueError(f"x must have columns of different names, got {checks.quoted(repeated)} twice")
    try:
        frame = nw.from_native(x, eager_only=True)
    except TypeError:
        raise ValueError(f"x must be an array or a DataFrame in memory, got {type(x).__name__}") from None
    if not frame.shape[1] or (training and not frame.shape[0]):
        raise ValueError(f"x must have at least one row and one column, got shape {frame.shape}")
    return {name: frame.get_column(original) for name, original in zip(names, frame.columns, strict=True)}


def _read_series(name: str, series: Any, schema: ColumnSchema, missing: Collection[str]) -> RawColumn:
    import narwhals as nw

    dtype = series.dtype
    if schema.kind == "text" and (dtype.is_numeric() or dtype == nw.Boolean):
        return RawColumn("text", _texts(_values(series)), source="boolean" if dtype == nw.Boolean else "number")
    if dtype.is_numeric():
        values = _numbers(series)
        return RawColumn("number", values, merged=dtype.is_integer() and _merged(series, values))
    if dtype == nw.Boolean:
        return RawColumn("boolean", _numbers(series))
    if dtype in (nw.Date, nw.Datetime):
        return _dates(series, schema)
    if dtype == nw.Duration:
        return RawColumn("number", _numbers(series.dt.total_microseconds()) / (1000 * DAY), source="durations")
    values = _values(series)
    if dtype in (nw.Categorical, nw.Enum, nw.String):
        return RawColumn("text", _texts(values), source="text" if dtype == nw.String else "levels")
    return _read_objects(name, values, schema, missing)


def _numbers(series: Any) -> np.ndarray:
    import narwhals as nw

    values = series.to_numpy()
    if values.dtype.kind not in "biuf":  # a cast within Arrow refuses whole numbers beyond 2**53
        values = series.cast(nw.Float64).to_numpy()
    return np.array(values, np.float64)


def _merged(series: Any, values: np.ndarray) -> bool:
    """Returns whether different whole numbers of a column are equal in float64."""
    if not len(values) or not np.nanmax(np.abs(values), initial=0.0) > WHOLE:
        return False
    return len(np.unique(values[~np.isnan(values)])) < len({value for value in series.to_list() if value is not None})


_NARROW = {"Float16": np.float16, "halffloat": np.float16, "Float32": np.float32, "float": np.float32}


def _values(series: Any) -> list[Any]:
    """Returns the values of a column, with floats in their own precision and None for missing values."""
    native = series.to_native()
    if hasattr(native, "cat") and hasattr(native.cat, "categories"):  # pandas: categories of any type
        categories = native.cat.categories
        # Floats keep their own precision. Dates have the same text in any unit.
        categories = [
            level_of(value) for value in (categories.to_numpy() if categories.dtype.kind == "f" else categories)
        ]
        return [None if code < 0 else categories[code] for code in native.cat.codes.tolist()]
    values = series.to_list()
    level_type = getattr(getattr(native, "type", None), "value_type", series.dtype)  # Arrow: levels of any type
    if (narrow := _NARROW.get(str(level_type))) is not None:
        values = [value if is_missing(value) else narrow(value) for value in values]
    return [None if is_missing(value) else value for value in values]


def _dates(series: Any, schema: ColumnSchema) -> RawColumn:
    """Returns days in local time; the time zone is the training rows' zone if it has a name, else the column's own."""
    zone = getattr(series.dtype, "time_zone", None)
    if zone is None:
        return RawColumn("date", _numbers(series.dt.timestamp("ms")) / DAY)
    if schema.zone not in (None, OFFSETS):
        series = series.dt.convert_time_zone(schema.zone)
    local = _numbers(series.dt.replace_time_zone(None).dt.timestamp("ms")) / DAY
    native = getattr(series.to_native(), "dt", None)
    return RawColumn("date", local, zone_name(getattr(native, "tz", None) or zone))


_TYPES: dict[str, Any] = {
    "text": str,
    "boolean": (bool, np.bool_),
    "date": (datetime.date, np.datetime64),
    "number": (numbers.Real, decimal.Decimal),
    "durations": (datetime.timedelta, np.timedelta64, datetime.time),
}


def _read_objects(name: str, values: Any, schema: ColumnSchema, missing: Collection[str]) -> RawColumn:
    """Returns a column of Python objects, which must all have the same kind."""
    values = [None if is_missing(value) else value for value in values]
    kinds = [None if value is None else _kind(value) for value in values]
    if len({*kinds} - {None, "text"}) == 1 and schema.kind != "text":  # numbers and ``"?"``
        values = mask_missing(values, {*MISSING, *missing})
        if "number" in kinds:
            values = _with_numbers(values, schema)
        kinds = [None if value is None else _kind(value) for value in values]
    present = [(row, kind) for row, kind in enumerate(kinds) if kind is not None]
    if not present:
        return RawColumn("number", np.full(len(values), np.nan))
    first, kind = present[0]
    column, got = checks.quoted(name), lambda row: f"{checks.quoted(values[row])} in row {row}"
    if kind == "other":
        raise ValueError(f"x must have columns of numbers, booleans, dates or text, got {got(first)} of {column}")
    named = {"text", "boolean", "number"}  # kinds of values that may name levels
    if schema.kind == "text" and {kind for _, kind in present} <= named:
        return RawColumn("text", _texts(values), source=kind if all(other == kind for _, other in present) else "text")
    if other := next((row for row, other in present if other != kind), None):
        texts = tuple(dict.fromkeys(value for value in values if isinstance(value, str)))
        hint = f"; missing={checks.quoted(texts)} reads its texts as missing values" if texts else ""
        raise ValueError(f"x must have columns of one type, got {got(first)} and {got(other)} of {column}{hint}")
    if kind == "text":
        return RawColumn("text", _texts(values), source=kind)
    if kind == "durations":
        day = np.timedelta64(1, "D")
        days = [np.nan if value is None else np.timedelta64(since_midnight(value)) / day for value in values]
        return RawColumn("number", np.array(days), source=kind)
    if kind != "date":
        return RawColumn(kind, np.array([np.nan if value is None else _float(value) for value in values]))
    aware = {isinstance(value, datetime.datetime) and value.tzinfo is not None for value in values if value is not None}
    if len(aware) > 1:
        raise ValueError(f"x must have dates that all have a time zone, or all have none, in column {column}")
    zone = None if schema.zone == OFFSETS else schema.zone
    days = np.array([np.nan if value is None else _days(value, zone) for value in values])
    if aware != {True}:
        return RawColumn(kind, days)
    zones = {zone_name(value.tzinfo) for value in values if value is not None}
    return RawColumn(kind, days, zones.pop() if len(zones) == 1 else OFFSETS)


def _with_numbers(values: list[Any], schema: ColumnSchema) -> list[Any]:
    """Returns the values of a column of numbers, in which texts are numbers if all texts are numbers."""
    texts = [value for value in values if isinstance(value, str)]
    reading = schema.reading or (PLAIN["number"] if schema.kind == "number" else find_reading(texts).reading)
    if reading is None or reading.kind != "number" or reading.read(texts)[1].any():
        return values
    parse = reading.parser()
    return [parse(value) if isinstance(value, str) else value for value in values]


def _float(value: Any) -> float:
    """Returns a number as a float, or infinity if it is too large."""
    try:
        return float(value)
    except OverflowError:
        return np.inf


def _kind(value: Any) -> str:
    return next((kind for kind, types in _TYPES.items() if isinstance(value, types)), "other")


def _days(value: Any, zone: str | None) -> float:
    """Returns a date as days since 1970, in the local time of ``zone`` if it is given, else of the date itself."""
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return since_1970(local_time(value, zone))
    return float(np.datetime64(value, "ms").astype(np.int64)) / DAY


def _texts(values: list[Any]) -> np.ndarray:
    """Returns the canonical texts of levels, and None for missing values."""
    return _objects([level_of(value) for value in values])


def _objects(values: list[Any]) -> np.ndarray:
    """Returns values as an array of objects, ``(n,)``."""
    array = np.empty(len(values), object)
    array[:] = values
    return array


def _checked(frame: Frame) -> Frame:
    """Returns the table; raises ``ValueError`` for infinite values and values beyond the range of float32."""
    for name, raw in frame.columns.items():
        if raw.kind != "text":
            check_numbers(name, raw.values)
    return frame


def check_numbers(name: str, values: np.ndarray) -> None:
    """Raises ``ValueError`` for infinite numbers and numbers beyond the range of float32, naming column and row."""
    for bad, expected in (
        (np.isinf(values), "finite numbers"),
        (np.abs(values) > np.finfo(np.float32).max, "numbers within the range of float32"),
    ):
        if bad.any():
            row = int(np.argmax(bad))
            got = f"got {values[row]:.6g} in column {checks.quoted(name)}, row {row}"
            raise ValueError(f"x must hold {expected}, {got}")
