"""Reading of raw tables: DataFrames of pandas, polars and Arrow, and NumPy arrays with gaps.

Every column becomes one of four kinds, whatever library it comes from: numbers, booleans and dates in float64, NaN
where a value is missing, or text as objects, None where a value is missing.
"""

from collections.abc import Collection
import datetime
import decimal
import numbers
from typing import Any, NamedTuple

import jax
import numpy as np

from jtrees import validation as checks

_DAY = 86_400_000  # in milliseconds


class RawColumn(NamedTuple):
    """The values of a column.

    Attributes:
      kind: ``"numeric"``, ``"boolean"``, ``"date"`` (days since 1970, UTC) or ``"text"``.
      values: ``(n,)``: float64, NaN where missing; of text str, None where missing.
    """

    kind: str
    values: np.ndarray

    @property
    def missing(self) -> np.ndarray:
        """Where values are missing, ``(n,)`` bool."""
        return self.values == np.array(None) if self.kind == "text" else np.isnan(self.values)


class Frame:
    """A raw table: columns by name, in order."""

    def __init__(self, columns: dict[str, RawColumn], *, named: bool):
        """``named``: whether the table came with names, which then identify columns; else their places do."""
        self.columns, self.named = columns, named

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())).values)

    def __getitem__(self, rows: Any) -> "Frame":
        """Returns a subset of the rows."""
        chosen = {name: column._replace(values=column.values[rows]) for name, column in self.columns.items()}
        return Frame(chosen, named=self.named)


def read_frame(x: Any, only: Collection[str] | None = None) -> Frame | None:
    """Returns the raw table of a DataFrame, or of an array with NaN; None for other arrays.

    Args:
      x: a DataFrame or table of pandas, polars, Arrow or another library that narwhals reads, or anything array-like.
      only: names of the columns of a DataFrame to read, where they exist; None: all.

    Raises:
      ImportError: for a DataFrame without narwhals.
      ValueError: for a column without values, of mixed types, or of a type that is not numeric, boolean, date or text,
        and for infinite values, naming the column and the row.
    """
    if isinstance(x, Frame):
        return x
    if hasattr(x, "columns") and not isinstance(x, np.ndarray):
        series = {name: one for name, one in _series(x).items() if only is None or name in only}
        return _checked(Frame({name: _of_series(name, one) for name, one in series.items()}, named=True))
    x = checks.as_numeric("x", x)
    if x.ndim != 2 or 0 in x.shape or isinstance(x, jax.core.Tracer) or x.dtype.kind in "biu":
        return None
    if not np.isnan(values := np.asarray(x)).any():
        return None
    by_column = np.array(values.T, np.float64, order="C")
    columns = {f"x{j}": RawColumn("numeric", column) for j, column in enumerate(by_column)}
    return _checked(Frame(columns, named=False))


def _series(x: Any) -> dict[str, Any]:
    """Returns the columns of a DataFrame by name."""
    try:
        import narwhals as nw
    except ImportError as error:
        raise ImportError('DataFrames need narwhals: pip install "jtrees[frames]"') from error
    names = [str(name) for name in (x.column_names if hasattr(x, "column_names") else x.columns)]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"x must have columns of different names, got {repeated[0]!r} twice")
    try:
        frame = nw.from_native(x, eager_only=True)
    except TypeError:
        raise ValueError(f"x must be an array or a DataFrame in memory, got {type(x).__name__}") from None
    if 0 in frame.shape:
        raise ValueError(f"x must have at least one row and one column, got shape {frame.shape}")
    return {name: frame.get_column(own) for name, own in zip(names, frame.columns, strict=True)}


def _of_series(name: str, series: Any) -> RawColumn:
    import narwhals as nw

    dtype = series.dtype
    numbers_of = lambda series: np.array(series.cast(nw.Float64).to_numpy(), np.float64)
    if dtype.is_numeric():
        return RawColumn("numeric", numbers_of(series))
    if dtype == nw.Boolean:
        return RawColumn("boolean", numbers_of(series))
    if dtype in (nw.Date, nw.Datetime):
        return RawColumn("date", numbers_of(series.dt.timestamp("ms")) / _DAY)
    if dtype == nw.Duration:
        return RawColumn("numeric", numbers_of(series.dt.total_milliseconds()) / _DAY)
    values = [None if checks.is_missing(value) else value for value in series.to_list()]
    if dtype in (nw.Categorical, nw.Enum, nw.String):
        return RawColumn("text", _texts(values))
    return _of_objects(name, values)


_TYPES: dict[str, Any] = {
    "text": str,
    "boolean": (bool, np.bool_),
    "date": (datetime.date, np.datetime64),
    "numeric": (numbers.Real, decimal.Decimal),
}


def _of_objects(name: str, values: list[Any]) -> RawColumn:
    """Returns a column of Python objects, which must be of one kind."""
    kinds = [None if value is None else _kind(value) for value in values]
    there = [(row, kind) for row, kind in enumerate(kinds) if kind is not None]
    if not there:
        return RawColumn("numeric", np.full(len(values), np.nan))
    first, kind = there[0]
    got = lambda row: f"{values[row]!r} in row {row}"
    if kind == "other":
        raise ValueError(f"x must have columns of numbers, booleans, dates or text, got {got(first)} of {name!r}")
    if other := next((row for row, other in there if other != kind), None):
        raise ValueError(f"x must have columns of one type, got {got(first)} and {got(other)} of {name!r}")
    if kind == "text":
        return RawColumn(kind, _texts(values))
    number = _days if kind == "date" else float
    return RawColumn(kind, np.array([np.nan if value is None else number(value) for value in values]))


def _kind(value: Any) -> str:
    return next((kind for kind, types in _TYPES.items() if isinstance(value, types)), "other")


def _days(value: Any) -> float:
    """Returns a date as days since 1970, in UTC."""
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        value = value.astimezone(datetime.UTC).replace(tzinfo=None)
    return float(np.datetime64(value, "ms").astype(np.int64)) / _DAY


def _texts(values: list[Any]) -> np.ndarray:
    """Returns levels as text; whole numbers alike, whether a gap made them float or not."""
    texts = np.empty(len(values), object)
    whole = lambda value: isinstance(value, float) and value.is_integer()
    texts[:] = [None if v is None else v if type(v) is str else str(int(v) if whole(v) else v) for v in values]
    return texts


def _checked(frame: Frame) -> Frame:
    """Returns the table; raises ``ValueError`` for infinite values and those beyond float32, by column and row."""
    for name, (kind, values) in frame.columns.items():
        if kind == "text":
            continue
        for bad, expected in (
            (np.isinf(values), "finite numbers"),
            (np.abs(values) > np.finfo(np.float32).max, "numbers within the range of float32"),
        ):
            if bad.any():
                row = int(np.argmax(bad))
                raise ValueError(f"x must hold {expected}, got {values[row]:.6g} in column {name!r}, row {row}")
    return frame
