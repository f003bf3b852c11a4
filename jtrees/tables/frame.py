"""Reading of raw tables: DataFrames of pandas, polars and Arrow, and NumPy arrays with missing values.

A column of any library becomes one of four kinds: numbers, booleans, dates and text. Numbers, booleans and dates are
float64, and NaN is a missing value. Text is an array of objects, and None is a missing value. A column of mixed cells
is text whose cells keep their types until its kind is decided.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
import datetime
import functools
from numbers import Integral
from typing import Any, NamedTuple

import jax
import numpy as np

from jtrees import io, validation as checks
from jtrees.data.constraints import column_finder
from jtrees.tables.cells import MISSING, OFFSETS, PLAIN, Reading, mask_missing, missing_numbers, zone_name
from jtrees.tables.parse import DATES, DAY, LARGEST, WHOLE, is_missing, kind_of, level_of, plain_level, time_zone


class RawColumn(NamedTuple):
    """The values of a column.

    Attributes:
      kind: ``"number"``, ``"boolean"``, ``"date"`` (days since 1970, in local time) or ``"text"``.
      values: the values, ``(n,)``. Text is str, or cells of any type, and None is a missing value. All other kinds are
        float64, and NaN is a missing value.
      zone: time zone of dates: a name, or an offset such as ``"+02:00"``. ``"offsets"``: each date has its own offset.
        None: the dates have no time zone. For cells of any type, the time zone of the dates that have a time zone.
      source: ``"levels"`` for text that must not be read as numbers, such as categories. ``"durations"`` is for numbers
        of days.
      odd: the texts of cells that do not have the kind of the column, and are missing values.
    """

    kind: str
    values: np.ndarray
    zone: str | None = None
    source: str = "text"
    odd: tuple[str, ...] = ()

    @property
    def missing(self) -> np.ndarray:
        """Mask of missing values, ``(n,)`` bool."""
        if self.kind == "text":  # a cell that is an array would compare its elements
            return np.array([value is None for value in self.values], bool)
        return np.isnan(self.values)

    def masked(self, missing: Collection[str], *, numbers: bool = True) -> "RawColumn":
        """Returns the column, in which texts that mean a missing value are missing, and if ``numbers``, their numbers.

        Columns of booleans, dates and durations do not change.
        """
        if self.kind == "text" and missing:
            return self._replace(values=_objects(mask_missing(self.values.tolist(), missing, numbers=numbers)))
        listed = missing_numbers(frozenset(missing)) if numbers and self.source != "durations" else ()
        if self.kind == "number" and listed:
            return self._replace(values=np.where(np.isin(self.values, listed), np.nan, self.values))
        return self

    def in_kind(self, reading: Reading, zone: str | None = None) -> "RawColumn":
        """Returns the column in the kind of a reading. Cells that do not have it are missing, and listed as ``odd``.

        Numbers must be within the range of float32. ``zone`` is the time zone in which days are counted.
        """
        kind, came = reading.kind, self.source if self.source == "durations" else self.kind
        if came == kind or {came, kind} <= {"number", "boolean"}:
            values, other_clock = self.values, (self.zone is not None) != reading.zoned
            wrong = ~self.missing if other_clock else np.abs(values) > LARGEST
            if kind == "boolean":
                wrong = ~(self.missing | np.isin(values, (0, 1)))
            zone = self.zone
        else:
            values, wrong = reading.read(self.as_cells().values.tolist(), zone)
            zone = (zone or OFFSETS) if reading.zoned else None
        texts = map(str, self._replace(values=self.values[wrong]).as_levels().values)
        odd = (*dict.fromkeys((*self.odd, *texts)),)
        source, kind = ("durations", "number") if kind == "durations" else (self.source, kind)
        return RawColumn(kind, np.where(wrong, np.nan, values), zone, source, odd)

    def as_cells(self) -> "RawColumn":
        """Returns the column as text whose cells keep their types."""
        if self.kind == "text":
            return self
        values: Any = self.values
        if self.kind == "boolean":
            values = values == 1
        elif self.kind == "date" or self.source == "durations":
            unit = "datetime64[ms]" if self.kind == "date" else "timedelta64[ms]"
            values = np.round(np.where(self.missing, 0, values) * DAY).astype(np.int64).astype(unit)
        cells = [None if gap else value for value, gap in zip(values, self.missing, strict=True)]
        return RawColumn("text", _objects(cells))

    def as_levels(self) -> "RawColumn":
        """Returns the column as the canonical text of levels."""
        cells = self.as_cells()
        return cells._replace(values=_objects([level_of(value) for value in cells.values]))


@io.part
@dataclasses.dataclass(frozen=True)
class ColumnSchema:
    """What a column of a raw table holds.

    Attributes:
      kind: ``"number"``, ``"boolean"``, ``"date"``, ``"text"``, or ``"drop"`` for a column without features.
      durations: whether the numbers are durations in days.
      reading: how text is read as numbers or dates.
      zone: the time zone in which days are counted: a name, or an offset such as ``"+02:00"``. ``"offsets"``: each date
        has its own offset. None: the dates have no time zone.
      levels: the sorted levels of text. If the column has indicators, rare levels are not among them.
      rare: levels with fewer than five rows, if the column has indicators. They and new levels share a feature.
      indicators: the features of 0 and 1: the number of the level that each marks. The number after the levels stands
        for rare and new levels, and the next one for missing values. Text without indicators is encoded by target
        means.
      parts: the periods of dates that vary, ``"month"``, ``"weekday"``, ``"hour"`` and ``"minute"``.
      missing: number of missing values.
      odd: number of different cells that do not have the kind of the column, and are missing values.
      note: why the column is dropped, or another meaning that its cells may have.
      otherwise: the kind that keeps a dropped column, or that selects the other reading of the cells.
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
    odd: int = 0
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
        return self.reading or dataclasses.replace(PLAIN[self.value_kind], zoned=self.zone is not None)

    @property
    def value_kind(self) -> str:
        """The kind of the cells: ``"durations"`` for numbers that are durations, else the kind of the column."""
        return "durations" if self.durations else self.kind

    def convert(self, raw: RawColumn, missing: Collection[str]) -> RawColumn:
        """Returns a raw column in the kind of this column, in which the texts ``missing`` are missing values.

        The numbers of these texts are so among numbers. The levels of the column are no missing values.
        """
        if self.kind == "text":
            raw = raw.as_levels().masked(frozenset(missing).difference(self.training_levels))
            levels = self.levels_by_text
            texts = set(raw.values) - {None}
            matches = {text: levels.get(text) or levels.get(plain_level(text) or text, text) for text in texts}
            return raw._replace(values=_objects([matches.get(text) for text in raw.values]))
        raw = raw.masked(missing, numbers=self.kind != "boolean")  # 0 and 1 are false and true
        return raw.in_kind(self.text_reading, self.zone).masked(missing)

    @functools.cached_property
    def levels_by_text(self) -> dict[str, str]:
        """Returns the level of each text that names one: the level itself, and the plain form of its number or boolean.

        Files and frames spell numbers and booleans differently. A plain form of several levels names none of them.
        """
        levels = self.training_levels
        plain = [plain_level(level) for level in levels]
        counts = Counter(plain)
        forms = {text: level for text, level in zip(plain, levels, strict=True) if text and counts[text] == 1}
        return forms | dict(zip(levels, levels, strict=True))

    def level_numbers(self) -> dict[str, int]:
        """Returns the number of the level of each text that names one. All rare levels have the next number."""
        numbers = {level: i for i, level in enumerate(self.levels)}
        return {text: numbers.get(level, len(numbers)) for text, level in self.levels_by_text.items()}

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


def level_codes(levels: tuple[str, ...], raw: RawColumn) -> np.ndarray:
    """Returns the number of the level of each value, ``(n,)``. New levels come next, and missing values last."""
    places = _places(levels)
    return np.array([places.get(value, len(levels)) for value in raw.values], np.int64)


@functools.lru_cache(maxsize=32)  # predictions of single rows would otherwise cost as much as all levels
def _places(levels: tuple[str, ...]) -> dict[str | None, int]:
    return {level: i for i, level in enumerate(levels)} | {None: len(levels) + 1}


class Frame:
    """A raw table: columns by name, in order.

    Args:
      columns: the columns by name.
      named: whether the table has names of columns; if not, columns are identified by position.
      schema: the :class:`jtrees.tables.Schema` whose used columns these are, in the kinds of the schema. None: the
        columns are as they came.
    """

    def __init__(self, columns: dict[str, RawColumn], *, named: bool, schema: Any = None):
        self.columns, self.named, self.schema = columns, named, schema

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())).values)

    def __getitem__(self, rows: Any) -> "Frame":
        """Returns a subset of the rows."""
        chosen = {name: column._replace(values=column.values[rows]) for name, column in self.columns.items()}
        return Frame(chosen, named=self.named, schema=self.schema)


def read_frame(
    x: Any,
    schemas: Mapping[str, ColumnSchema] | None = None,
    missing: Collection[str] = (),
    requested: Any = None,
    rows: int = 1,
) -> Frame | None:
    """Returns the raw table of a DataFrame, or of an array with NaN; None for other arrays.

    Args:
      x: a DataFrame or table of pandas, polars, Arrow or another library that narwhals reads, or anything array-like.
      schemas: the columns of a DataFrame to read, and their kinds in training. Columns that do not exist are ignored.
        Dates are converted to the time zone of the training rows. Columns of another kind become text whose cells keep
        their types. None: all columns, without conversion.
      missing: texts that mean a missing value, besides ``MISSING``, among values of another type. Other texts remain.
      requested: kinds of training columns by name or number. The values of ``"drop"`` are not read.
      rows: least number of rows of a DataFrame, 0 or 1.

    Raises:
      ImportError: if x is a DataFrame and narwhals is not installed.
      ValueError: if a DataFrame has too few rows, and for infinite numbers in an array.
    """
    if isinstance(x, Frame):
        return x
    if hasattr(x, "columns") and not isinstance(x, np.ndarray):
        return _read_columns(_series(x, rows), _read_series, schemas, missing, requested)
    x = checks.as_numeric("x", x)
    if x.ndim != 2 or 0 in x.shape or isinstance(x, jax.core.Tracer) or x.dtype.kind in "biu":
        return None
    if not np.isnan(values := np.asarray(x)).any():
        return None
    values_by_column = np.array(values.T, np.float64, order="C")
    for j, column in enumerate(values_by_column):
        if np.isinf(column).any():
            raise ValueError(f"x must hold finite numbers, got inf in column 'x{j}', row {np.isinf(column).argmax()}")
    columns = {f"x{j}": RawColumn("number", column) for j, column in enumerate(values_by_column)}
    return Frame(columns, named=False)


def frame_of_objects(x: np.ndarray, names: Sequence[str], **how: Any) -> Frame:
    """Returns the raw table of an array of objects, ``(n, p)``, such as the cells of a DataFrame.

    ``names`` are the names of the columns. :func:`read_frame` describes the arguments ``how``.
    """
    return _read_columns(dict(zip(names, x.T, strict=True)), _read_objects, **how)


def _read_columns(
    series_by_name: Mapping[str, Any],
    read: Callable[[Any, ColumnSchema, Collection[str]], RawColumn],
    schemas: Mapping[str, ColumnSchema] | None = None,
    missing: Collection[str] = (),
    requested: Any = None,
    named: bool = True,
) -> Frame:
    """Returns the raw table whose columns ``read`` reads. :func:`read_frame` describes the other arguments.

    ``named`` is whether the columns have names of the user.
    """
    columns, requested = {}, requested_kinds(requested, list(series_by_name))
    for name, series in series_by_name.items():
        if requested.get(name) == "drop":  # the values are not read
            columns[name] = RawColumn("text", np.full(len(series), None))
        elif schemas is None or name in schemas:
            schema = ColumnSchema("text" if requested.get(name) == "text" else "unknown")
            columns[name] = read(series, (schemas or {}).get(name, schema), missing)
    return Frame(columns, named=named)


DECIMALS = {"decimal point": ".", "decimal comma": ","}
#: Kinds of columns that a user may request. A format of dates, such as ``"%d/%m/%Y"``, is a kind, too.
KINDS = ("number", *DECIMALS, "boolean", "date", *DATES, "text", "drop")
_SHOWN_KINDS = "'number', 'decimal comma', 'boolean', 'date', '%d/%m/%Y', 'text' or 'drop'"


def requested_kinds(columns: Any, names: Sequence[str]) -> dict[str, str]:
    """Returns the requested kinds by column.

    Raises ``ValueError`` for an unknown column or kind, or for two kinds of a column.
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


def in_memory(x: Any) -> Any:
    """Returns a DataFrame as one of narwhals. A DataFrame that is not in memory, or repeats a name, is an error."""
    try:
        import narwhals as nw
    except ImportError as error:
        raise ImportError('DataFrames need narwhals: pip install "jtrees[frames]"') from error
    names = [str(name) for name in (x.column_names if hasattr(x, "column_names") else x.columns)]
    if (repeated := checks.first_repeated(names)) is not None:
        raise ValueError(f"x must have columns of different names, got {checks.quoted(repeated)} twice")
    try:
        return nw.from_native(x, eager_only=True)
    except TypeError:
        raise ValueError(f"x must be an array or a DataFrame in memory, got {type(x).__name__}") from None


def _series(x: Any, rows: int) -> dict[str, Any]:
    """Returns the columns of a DataFrame by name. A DataFrame without columns, or with fewer rows, is an error."""
    frame = in_memory(x)
    if not frame.shape[1] or frame.shape[0] < rows:
        raise ValueError(f"x must have at least one row and one column, got shape {frame.shape}")
    return {str(name): frame.get_column(name) for name in frame.columns}


def _read_series(series: Any, schema: ColumnSchema, missing: Collection[str]) -> RawColumn:
    import narwhals as nw

    dtype = series.dtype
    dates = dtype in (nw.Date, nw.Datetime)
    came = "date" if dates else "durations" if dtype == nw.Duration else "boolean" if dtype == nw.Boolean else ""
    came = came or ("number" if dtype.is_numeric() else "")
    if not came:
        values = _values(series)
        if dtype in (nw.Categorical, nw.Enum, nw.String):
            return RawColumn("text", _objects(values), source="text" if dtype == nw.String else "levels")
        return _read_objects(values, schema, missing)
    kinds = {came, came if schema.kind == "unknown" else schema.value_kind}
    if len(kinds) > 1 and not kinds <= {"number", "boolean"}:
        return RawColumn("text", _objects(_values(series)))
    if came == "date":
        return _dates(series, schema)
    if came == "durations":
        return RawColumn("number", _numbers(series.dt.total_microseconds()) / (1000 * DAY), source=came)
    values = _numbers(series)
    is_large = schema.kind == "unknown" and dtype.is_integer() and bool((np.abs(values) >= WHOLE).any())
    if is_large and series.n_unique() > len(np.unique(values)):  # codes that double precision cannot distinguish
        return RawColumn("text", _objects(_values(series)))
    return RawColumn(came, values)


def _numbers(series: Any) -> np.ndarray:
    import narwhals as nw

    if series.dtype in (nw.Int128, nw.UInt128):  # no dtype of NumPy
        series = series.cast(nw.Float64)
    values = series.to_numpy()
    if values.dtype.kind not in "biuf":  # a cast within Arrow refuses whole numbers beyond 2**53
        values = series.cast(nw.Float64).to_numpy()
    return np.array(values, np.float64)


_NARROW = {"Float16": np.float16, "halffloat": np.float16, "Float32": np.float32, "float": np.float32}


def _values(series: Any) -> list[Any]:
    """Returns the values of a column, with floats in their own precision and None for missing values."""
    native = series.to_native()
    if hasattr(native, "cat") and hasattr(native.cat, "categories"):  # pandas: categories of any type
        categories = native.cat.categories
        # Floats keep their own precision. Dates have the same text in any unit.
        categories = list(map(level_of, categories.to_numpy() if categories.dtype.kind == "f" else categories))
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
    if schema.zone is not None and schema.zone[0] in "+-":  # polars has no zone of an offset
        offset: Any = time_zone(schema.zone).utcoffset(None)
        milliseconds = _numbers(series.dt.timestamp("ms")) + offset / datetime.timedelta(milliseconds=1)
        return RawColumn("date", milliseconds / DAY, schema.zone)
    if schema.zone not in (None, OFFSETS):
        series = series.dt.convert_time_zone(schema.zone)
    local = _numbers(series.dt.replace_time_zone(None).dt.timestamp("ms")) / DAY
    native = getattr(series.to_native(), "dt", None)
    return RawColumn("date", local, zone_name(getattr(native, "tz", None) or zone))


def _read_objects(values: Any, schema: ColumnSchema, missing: Collection[str]) -> RawColumn:
    """Returns a column of Python objects: in their kind if a training column has one, else as cells of any type."""
    values = [None if is_missing(value) else value for value in values]
    if schema.kind != "unknown":
        return RawColumn("text", _objects(values))
    kinds = {kind_of(value) for value in values if value is not None}
    if len(kinds - {"text"}) == 1:  # numbers and ``"?"``
        values = mask_missing(values, {*MISSING, *missing}, numbers=False)
        kinds = {kind_of(value) for value in values if value is not None}
    if not kinds:
        return RawColumn("number", np.full(len(values), np.nan))
    cells = RawColumn("text", _objects(values))
    if len(kinds) > 1 or not kinds <= PLAIN.keys() - {"text"}:
        return cells
    if kinds == {"number"}:
        whole = {int(value) for value in values if isinstance(value, Integral) and WHOLE <= abs(int(value)) <= LARGEST}
        if len({float(value) for value in whole}) < len(whole):
            return cells
    zones = [getattr(value, "tzinfo", None) for value in values if value is not None] if kinds == {"date"} else []
    names = {zone_name(zone) for zone in zones if zone is not None}
    zone = names.pop() if len(names) == 1 else OFFSETS if names else None
    if zone and None in zones:
        return cells._replace(zone=zone)
    return cells.in_kind(dataclasses.replace(PLAIN[kinds.pop()], zoned=zone is not None))._replace(zone=zone)


def _objects(values: list[Any]) -> np.ndarray:
    """Returns values as an array of objects, ``(n,)``."""
    array = np.empty(len(values), object)
    array[:] = values
    return array
