"""Made (synthetic) rows: each mixes a row of a table with the columns of a similar row."""

from typing import Any, NamedTuple

import numpy as np

from jtrees import validation as checks
from jtrees.data.frame import read_frame

_CANDIDATES = 8  # number of random rows; the nearest of them is the second row
_SHARE = 0.5  # fraction of the columns that a made row takes from its second row
_BLOCK = 2**16  # number of made rows whose candidates are compared at once


class Rows:
    """The rows of a table in their original form: an array ``(n, p)`` or a DataFrame of any library."""

    def __init__(self, values: Any, frame: Any = None):
        """``values``: an array, or the DataFrame that the narwhals frame ``frame`` wraps."""
        self.values, self._frame = values, frame

    @classmethod
    def of(cls, x: Any) -> "Rows":
        """Returns the rows of a checked table.

        Raises:
          ValueError: if x has no rows, or if it is an array that is not numeric and two-dimensional.
          ImportError: if x is a DataFrame and narwhals is not installed.
        """
        if not hasattr(x, "columns") or isinstance(x, np.ndarray):
            return cls(np.asarray(checks.check_x(x, finite=False)))
        read_frame(x)  # checks it
        import narwhals as nw

        return cls._of_frame(nw.from_native(x, eager_only=True))

    @classmethod
    def _of_frame(cls, frame: Any) -> "Rows":
        import narwhals as nw

        frame = nw.maybe_reset_index(frame)
        return cls(frame.to_native(), frame)

    def __len__(self) -> int:
        return len(self.values) if self._frame is None else self._frame.shape[0]

    @property
    def width(self) -> int:
        """Number of columns."""
        return (self.values if self._frame is None else self._frame).shape[1]

    def __getitem__(self, rows: np.ndarray) -> "Rows":
        """Returns the rows with the given numbers."""
        return Rows(self.values[rows]) if self._frame is None else self._of_frame(self._frame[rows.tolist()])

    def followed_by(self, others: "Rows") -> "Rows":
        """Returns the rows followed by the rows ``others``."""
        if self._frame is None:
            return Rows(np.concatenate([self.values, others.values]))
        import narwhals as nw

        return self._of_frame(nw.concat([self._frame, others._frame], how="vertical"))

    # --- Made rows ---

    def mixed(self, count: int, rng: np.random.Generator) -> tuple["Rows", np.ndarray]:
        """Returns made rows, and the number of the first row of each made row.

        A made row is a copy of a first row. Each of its columns is replaced, with probability 1/2, by the column of a
        second row, the nearest of eight random rows. A replaced number is drawn between the numbers of the two rows. A
        replaced column of whole numbers, booleans, dates, text or missing values takes the value of the second row.

        Args:
          count: number of made rows. Every row is the first row about equally often.
          rng: random generator.
        """
        columns, n = self._columns(), len(self)
        if not count:
            return self[np.zeros(0, int)], np.zeros(0, int)
        first = np.concatenate([rng.permutation(n) for _ in range(-(-count // n))])[:count]
        blocks = np.array_split(first, -(-count // _BLOCK))
        second = np.concatenate([_nearest(columns, block, rng) for block in blocks])
        drawn = [column.drawn(first, second, rng) for column in columns]
        return (self._made_array(drawn) if self._frame is None else self._made_frame(drawn)), first

    def _made_array(self, drawn: list["_Drawn"]) -> "Rows":
        parts = [self.values[rows, j] if numbers is None else numbers for j, (rows, numbers) in enumerate(drawn)]
        return Rows(np.stack([part.astype(self.values.dtype) for part in parts], axis=1))

    def _made_frame(self, drawn: list["_Drawn"]) -> "Rows":
        import narwhals as nw

        frame: Any = self._frame
        parts = []
        for name, (rows, numbers) in zip(frame.columns, drawn, strict=True):
            if numbers is None:
                parts.append(nw.maybe_reset_index(frame.select(name)[rows.tolist()]))
            else:
                like: Any = {"dtype": frame.schema[name], "backend": frame.implementation}
                parts.append(nw.new_series(name, numbers, **like).to_frame())
        return self._of_frame(nw.concat(parts, how="horizontal"))

    def _columns(self) -> list["_Column"]:
        """Returns the columns as numbers."""
        if self._frame is None:
            return [_Column.of_numbers(column, self.values.dtype.kind == "f") for column in self.values.T]
        found, schema = [], self._frame.schema
        for (_, raw), dtype in zip(read_frame(self.values).columns.items(), schema.values(), strict=True):  # pyright: ignore[reportOptionalMemberAccess]
            if raw.kind == "text":
                codes = np.unique([str(value) for value in raw.values], return_inverse=True)[1]
                found.append(_Column(codes.astype(np.float64), False, True))
            else:
                found.append(_Column.of_numbers(raw.values, dtype.is_float()))
        return found


class _Column(NamedTuple):
    """A column as numbers: the values, whether it is continuous, and whether the values are codes of text."""

    values: np.ndarray
    between: bool
    codes: bool = False

    @classmethod
    def of_numbers(cls, values: np.ndarray, is_float: bool) -> "_Column":
        values = np.asarray(values, np.float64)
        return cls(values, bool(is_float and np.isfinite(values).all() and (values != np.round(values)).any()))

    def drawn(self, first: np.ndarray, second: np.ndarray, rng: np.random.Generator) -> "_Drawn":
        """Returns the column of made rows, each of which mixes a first and a second row."""
        takes, part = rng.random((2, len(first)))
        rows = np.where(takes < _SHARE, second, first)
        if not self.between:
            return _Drawn(rows, None)
        return _Drawn(rows, self.values[first] + part * (self.values[rows] - self.values[first]))

    def distances(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Returns the squared distances between rows.

        The distance is 1 between different codes, and between a missing value and a number.
        """
        a, b = self.values[one], self.values[other]
        if self.codes:
            return (a != b).astype(np.float64)
        deviation = np.nanstd(self.values) if np.isfinite(self.values).any() else 0.0
        away = np.square((a - b) / deviation) / 2 if deviation > 0 else np.zeros(np.broadcast_shapes(a.shape, b.shape))
        gaps = np.isnan(a) | np.isnan(b)
        return np.where(gaps, (np.isnan(a) != np.isnan(b)).astype(np.float64), away)


class _Drawn(NamedTuple):
    """A column of made rows: the rows to copy from, and for a continuous column the drawn values."""

    rows: np.ndarray
    numbers: np.ndarray | None


def _nearest(columns: list[_Column], rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns the second row of each made row: the nearest of eight random rows, except the first row itself."""
    n = len(columns[0].values)
    drawn = rng.integers(0, n, (_CANDIDATES, len(rows)))
    distance = sum(column.distances(rows[None], drawn) for column in columns) + np.where(drawn == rows, np.inf, 0)
    return drawn[distance.argmin(0), np.arange(len(rows))]
