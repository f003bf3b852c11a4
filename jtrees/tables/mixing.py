"""Made (synthetic) rows: each mixes a row of a table with the columns of a similar row."""

from typing import Any, NamedTuple

import numpy as np

from jtrees import validation as checks
from jtrees.tables.frame import read_frame

_CANDIDATES = 8  # number of random rows; the nearest of them is the second row
_SHARE = 0.5  # fraction of the columns that a synthetic row takes from its second row
_BLOCK = 2**16  # number of synthetic rows whose candidates are compared at once
_Draws = tuple[np.ndarray, np.ndarray | None]  # the rows to copy from, and for a continuous column the drawn values


class OriginalRows:
    """The rows of a table in their original form: an array ``(n, p)`` or a DataFrame of any library."""

    def __init__(self, values: Any, frame: Any = None):
        """``values``: an array, or the DataFrame that the narwhals frame ``frame`` wraps."""
        self.values, self._frame = values, frame

    @classmethod
    def from_table(cls, x: Any) -> "OriginalRows":
        """Returns the rows of a checked table.

        Raises ``ValueError`` if there are no rows, or if the array is not a numeric matrix.
        """
        if not hasattr(x, "columns") or isinstance(x, np.ndarray):
            return cls(np.asarray(checks.check_x(x, finite=False)))
        read_frame(x)  # checks it
        import narwhals as nw

        return cls._from_frame(nw.from_native(x, eager_only=True))

    @classmethod
    def _from_frame(cls, frame: Any) -> "OriginalRows":
        import narwhals as nw

        frame = nw.maybe_reset_index(frame)
        return cls(frame.to_native(), frame)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: np.ndarray) -> "OriginalRows":
        return OriginalRows(self.values[rows]) if self._frame is None else self._from_frame(self._frame[rows.tolist()])

    def followed_by(self, further: "OriginalRows") -> "OriginalRows":
        if self._frame is None:
            return OriginalRows(np.concatenate([self.values, further.values]))
        import narwhals as nw

        return self._from_frame(nw.concat([self._frame, further._frame], how="vertical"))

    def make_rows(self, count: int, rng: np.random.Generator) -> tuple["OriginalRows", np.ndarray]:
        """Returns synthetic rows, as :func:`jtrees.distill` describes them, and the number of the first row of each.

        Every row is the first row about equally often.
        """
        columns, n = self._columns(), len(self)
        if not count:
            return self[np.zeros(0, int)], np.zeros(0, int)
        first = np.concatenate([rng.permutation(n) for _ in range(-(-count // n))])[:count]
        blocks = np.array_split(first, -(-count // _BLOCK))
        second = np.concatenate([_nearest(columns, block, rng) for block in blocks])
        return self._from_draws([column.draws(first, second, rng) for column in columns]), first

    def _from_draws(self, draws: list[_Draws]) -> "OriginalRows":
        if self._frame is None:
            parts = [self.values[rows, j] if numbers is None else numbers for j, (rows, numbers) in enumerate(draws)]
            return OriginalRows(np.stack([part.astype(self.values.dtype) for part in parts], axis=1))
        import narwhals as nw

        frame: Any = self._frame
        parts = []
        for name, (rows, numbers) in zip(frame.columns, draws, strict=True):
            if numbers is None:
                parts.append(nw.maybe_reset_index(frame.select(name)[rows.tolist()]))
            else:
                like: Any = {"dtype": frame.schema[name], "backend": frame.implementation}
                parts.append(nw.new_series(name, numbers, **like).to_frame())
        return self._from_frame(nw.concat(parts, how="horizontal"))

    def _columns(self) -> list["_Column"]:
        if self._frame is None:
            return [_Column.from_numbers(column, self.values.dtype.kind == "f") for column in self.values.T]
        columns, schema = [], self._frame.schema
        for (_, raw), dtype in zip(read_frame(self.values).columns.items(), schema.values(), strict=True):  # pyright: ignore[reportOptionalMemberAccess]
            if raw.kind == "text":
                numbers: dict[str, int] = {}  # text of one width would take the memory of the longest text in each row
                codes = [numbers.setdefault(str(value), len(numbers)) for value in raw.values]
                columns.append(_Column(np.array(codes, np.float64), False, True))
            else:
                columns.append(_Column.from_numbers(raw.values, dtype.is_float()))
        return columns


class _Column(NamedTuple):
    """A column as numbers: the values, whether it is continuous, and whether the values are codes of text."""

    values: np.ndarray
    is_continuous: bool
    codes: bool = False

    @classmethod
    def from_numbers(cls, values: np.ndarray, is_float: bool) -> "_Column":
        values = np.where(np.isinf(values), np.nan, np.asarray(values, np.float64))
        return cls(values, bool(is_float and np.isfinite(values).all() and (values != np.round(values)).any()))

    def draws(self, first: np.ndarray, second: np.ndarray, rng: np.random.Generator) -> _Draws:
        """Returns the column of synthetic rows, each of which mixes a first and a second row."""
        takes, part = rng.random((2, len(first)))
        rows = np.where(takes < _SHARE, second, first)
        if not self.is_continuous:
            return rows, None
        return rows, self.values[first] + part * (self.values[rows] - self.values[first])

    def distances(self, rows: np.ndarray, other_rows: np.ndarray) -> np.ndarray:
        """Returns the squared distances between rows.

        The distance is 1 between different codes, and between a missing value and a number.
        """
        a, b = self.values[rows], self.values[other_rows]
        if self.codes:
            return (a != b).astype(np.float64)
        deviation = np.nanstd(self.values) if np.isfinite(self.values).any() else 0.0
        away = np.square((a - b) / deviation) / 2 if deviation > 0 else np.zeros(np.broadcast_shapes(a.shape, b.shape))
        gaps = np.isnan(a) | np.isnan(b)
        return np.where(gaps, (np.isnan(a) != np.isnan(b)).astype(np.float64), away)


def _nearest(columns: list[_Column], rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns the second row of each synthetic row: the nearest of eight random rows, except the first row itself."""
    n = len(columns[0].values)
    candidates = rng.integers(0, n, (_CANDIDATES, len(rows)))
    distance = sum(column.distances(rows[None], candidates) for column in columns)
    distance = distance + np.where(candidates == rows, np.inf, 0)
    return candidates[distance.argmin(0), np.arange(len(rows))]
