"""Columns: a fitted description of a raw table, which converts the rows of the table to numbers.

This module alone decides what a cell means, in training and for new rows, for DataFrames, arrays and files.
:mod:`jtrees.data.cells` reads text, :mod:`jtrees.data.frame` reads the columns of a library, and
:mod:`jtrees.data.kinds` has the kinds of columns.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, Literal
import warnings

from jax.typing import ArrayLike
import numpy as np

from jtrees import distributed, io, tasks, validation as checks
from jtrees.data.cells import MISSING, OFFSETS, PLAIN, Reading, find_reading, find_strays, has_comma
from jtrees.data.frame import Frame, RawColumn, check_numbers, read_frame
from jtrees.data.kinds import (
    Column,
    Date,
    LeftOut as LeftOut,
    Numeric as Numeric,
    OneHot as OneHot,
    TargetMeans as TargetMeans,
    fitted,
)
from jtrees.data.means import FOLDS, Targets
from jtrees.data.parse import level_of

MAX_LEVELS = 10


class ColumnsWarning(UserWarning):
    """Columns of a raw table are left out, are ambiguous, or have new missing values or levels."""


# --- The table -------------------------------------------------------------------------------------------------------


@io.part
@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns of a raw table.

    Attributes:
      columns: the description of each column by name, in the order of the table.
      named: whether columns are found by name. The columns of an array are found by position.
      readings: how text becomes numbers or dates, by column. A column without an entry reads plain numbers, ``true``
        and ``false``, and ISO 8601 dates.
      missing: texts that mean a missing value in files, in text that becomes numbers or dates, and in text of levels
        unless they are levels of the training rows.
      notes: the ambiguity of a column and how to resolve it, by column.
    """

    columns: dict[str, Column]
    named: bool
    readings: dict[str, Reading] = dataclasses.field(default_factory=dict)
    missing: tuple[str, ...] = MISSING
    notes: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def fit(
        cls,
        x: Any,
        y: ArrayLike | None = None,
        *,
        task: Literal["regression", "classification"] | tasks.Task = "regression",
        sample_weight: ArrayLike | None = None,
        max_levels: int = MAX_LEVELS,
        missing: Sequence[str] = (),
    ) -> tuple["Columns", np.ndarray]:
        """Returns the columns of a table, and the rows of the table as numbers.

        The numbers differ from ``transform(x)`` if a column has more than ``max_levels`` levels: see
        :class:`TargetMeans`.

        Args:
          x: a DataFrame of pandas, polars or Arrow, or an array ``(n, p)`` in which NaN is a missing value.
          y: targets, as for :func:`jtrees.fit`; None: levels are encoded by their frequencies alone.
          task: as for :func:`jtrees.fit`.
          sample_weight: weights of the rows in target means.
          max_levels: largest number of levels for which each level is a feature. All rare levels count as one level.
          missing: texts that mean a missing value in every column of text, such as ``("-", "unknown")``. In text of
            numbers and dates, texts such as ``"?"`` and ``"N/A"`` always do.

        Returns:
          The columns, and the features ``(n, p')`` in float64.

        Raises:
          ValueError: if the table cannot be read, or has no usable column. The message names the column and the row.
            Also if the text of a column is numbers or dates except for other texts, which the message lists.
          ImportError: if x is a DataFrame and narwhals is not installed.
        """
        frame = _read(x, missing=checked_missing(missing))
        checks.check_count("max_levels", max_levels)
        targets = _targets(y, len(frame), task, sample_weight)
        columns, encoded, readings, notes, doubts = {}, [], {}, {}, {}
        for name, raw in frame.columns.items():
            if raw.kind == "text" and raw.source == "text":
                cells = _with_gaps(raw, MISSING)
                reading, note = find_reading(cells.values.tolist())
                note = note or (_PLAIN_NOTE if reading == PLAIN["numeric"] else "")
                notes |= {name: note} if note else {}
                doubts |= {name: doubt} if reading is None and (doubt := doubt_of(cells.values.tolist())) else {}
                if reading is not None:
                    readings |= {} if reading == PLAIN[reading.kind] else {name: reading}
                    raw = _numbers(name, cells, reading)
            columns[name], features = fitted(raw, targets, max_levels)
            encoded.append(columns[name].encode(raw) if features is None else features)
        if doubts:
            listed = checks.listed((f"{checks.quoted(name)} {doubt}" for name, doubt in doubts.items()), "; ")
            raise ValueError(f"x must hold numbers, dates or text in each column, got {listed}. {_REMEDY}")
        described = cls(columns, frame.named, readings, (*dict.fromkeys((*MISSING, *missing)),), notes)
        if not any(features.shape[1] for features in encoded):
            raise ValueError(f"x must have a column to learn from, got {described._left_out()}")
        return described, np.column_stack(encoded)

    def transform(self, x: Any) -> np.ndarray:
        """Returns new rows as numbers, ``(n, p')`` in float64; the numbers of a row depend on that row alone.

        Args:
          x: a DataFrame of any library with at least the fitted columns, in any order. If all columns are numeric, x
            may be an array, whose columns are found by position. Text is read as in training if the column holds
            numbers or dates.

        Warns:
          ColumnsWarning: if a column has missing values and had none in the training rows. The values are filled.
            Also if a column has levels that the training rows did not have.

        Raises:
          ValueError: if a column is missing, or if values have the wrong kind. The message names the column, the
            expected kind, and the value or the kind found.
        """
        frame = self._frame(x)
        complete = {name: raw for name, raw in frame.columns.items() if not self.columns[name].missing}
        warn_of_gaps({name: int(raw.missing.sum()) for name, raw in complete.items()}, stacklevel=3)
        self._warn_of_levels(frame)
        return np.column_stack([self.columns[name].encode(raw) for name, raw in frame.columns.items()])

    def gaps(self, x: Any) -> dict[str, np.ndarray]:
        """Returns which values of new rows are missing, ``(n,)`` bool for each column that is not left out."""
        return {name: raw.missing for name, raw in self._frame(x).columns.items()}

    def _frame(self, x: Any) -> Frame:
        """Returns the used columns of new rows."""
        raw_kinds = {name: column.raw_kind for name, column in self._used.items()}
        return self._select(_read(x, raw_kinds if self.named else None, rows=0, missing=self.missing))

    def _select(self, frame: Frame) -> Frame:
        """Returns the used columns of a table, found by name or position, in the kinds of the training rows."""
        if not (self.named and frame.named):
            if len(frame.columns) != len(self.columns):
                raise ValueError(f"x must have {len(self.columns)} columns, got {len(frame.columns)}")
            frame = Frame(dict(zip(self.columns, frame.columns.values(), strict=True)), named=True)
        used = self._used
        if absent := [name for name in used if name not in frame.columns]:
            got = f"got none called {checks.quoted(absent[0])}"
            raise ValueError(f"x must have the columns {checks.quoted_list(used)}, {got}")
        return Frame({name: self._converted(name, frame.columns[name]) for name in used}, named=True)

    def _converted(self, name: str, raw: RawColumn) -> RawColumn:
        """Returns the raw column in the kind that it had in training.

        Raises:
          ValueError: if the values cannot be converted to that kind.
        """
        kind, zone, durations = self.columns[name].raw_kind
        if raw.missing.all():
            return RawColumn(kind, np.full(len(raw.values), None if kind == "text" else np.nan), zone)
        if kind == "text":
            return self._levels(name, raw)
        expected, came = "durations" if durations else _NAMES[kind], _name_of(raw)
        if durations != (came == "durations"):
            raise ValueError(f"x must hold {expected} in column {checks.quoted(name)}, got {came}")
        if raw.kind == "text":
            return _numbers(name, _with_gaps(raw, self.missing), self.text_reading(name), zone)
        if (raw.kind == "date") != (kind == "date"):
            raise ValueError(f"x must hold {expected} in column {checks.quoted(name)}, got {came}")
        if kind == "date" and (raw.zone is None) != (zone is None):
            which = "without" if zone is None else "with"
            came = "dates without one" if raw.zone is None else f"dates with one ({raw.zone})"
            raise ValueError(f"x must hold dates {which} a time zone in column {checks.quoted(name)}, got {came}")
        if kind == "boolean" and raw.kind == "numeric":
            wrong = ~(raw.missing | np.isin(raw.values, (0, 1)))
            _check(name, ~wrong, "booleans, or 0 and 1,", raw.values)
        return raw

    def _levels(self, name: str, raw: RawColumn) -> RawColumn:
        """Returns a column of levels as canonical text; a text that means a missing value may also be a level."""
        if (came := _name_of(raw)) in ("dates", "durations"):
            raise ValueError(f"x must hold text in column {checks.quoted(name)}, got {came}")
        if raw.kind == "text":
            levels = getattr(self.columns[name], "training_levels", ())
            return _with_gaps(raw, [text for text in self.missing if text not in levels])
        values, boolean = np.full(len(raw.values), None), raw.kind == "boolean"
        values[:] = [level_of(bool(value) if boolean and value == value else value) for value in raw.values.tolist()]
        return RawColumn("text", values, source=raw.kind)

    def text_reading(self, name: str) -> Reading:
        """Returns how the text of a column is read; the text of levels is not converted."""
        kind, zone, _ = self.columns[name].raw_kind
        return self.readings.get(name, dataclasses.replace(PLAIN[kind], zoned=zone is not None))

    def _warn_of_levels(self, frame: Frame) -> None:
        """Warns of levels that the training rows did not have."""
        counts = {}
        for name, raw in frame.columns.items():
            if isinstance(column := self.columns[name], (OneHot, TargetMeans)):
                levels = frozenset(column.training_levels)
                counts[name] = sum(level is not None and level not in levels for level in raw.values.tolist())
        if which := _counted(counts):
            warnings.warn(f"x has levels that the training rows did not have: {which}", ColumnsWarning, stacklevel=3)

    @property
    def _used(self) -> dict[str, Column]:
        return {name: column for name, column in self.columns.items() if not isinstance(column, LeftOut)}

    @property
    def feature_names(self) -> list[str]:
        """Names of the features, such as ``area``, ``[area missing]``, ``[heating = gas]``."""
        return [feature for name, column in self.columns.items() for feature in column.features(name)]

    def with_class_names(self, class_names: Sequence[str]) -> "Columns":
        """Returns the same columns with the user's names of classes in feature names: ``[mean sold by city]``.

        Args:
          class_names: names of the K classes, or of the actions of a policy, in the order of their numbers.
        """
        names = {f"{prefix} {i}": str(name) for i, name in enumerate(class_names) for prefix in ("class", "action")}

        def renamed(column: Any) -> Any:
            if isinstance(column, Date):
                return dataclasses.replace(column, parts={name: renamed(part) for name, part in column.parts.items()})
            if not isinstance(column, TargetMeans):
                return column
            return dataclasses.replace(column, outputs=tuple(names.get(output, output) for output in column.outputs))

        return dataclasses.replace(self, columns={name: renamed(column) for name, column in self.columns.items()})

    def with_readings(
        self, readings: Mapping[str, Reading], notes: Mapping[str, str], missing: Sequence[str]
    ) -> "Columns":
        """Returns the same columns, which read text in the same way as the source file.

        Args:
          readings: how text becomes numbers or dates, by column.
          notes: the ambiguity of a column, by column.
          missing: texts that mean a missing value.
        """
        present = lambda entries: {name: value for name, value in entries.items() if name in self.columns}
        zoned = lambda name, column: isinstance(column, Date) and name in readings and readings[name].zoned
        columns = {
            name: dataclasses.replace(column, zone=OFFSETS) if zoned(name, column) else column
            for name, column in self.columns.items()
        }
        updates: Any = {"readings": self.readings | present(readings), "notes": self.notes | present(notes)}
        return dataclasses.replace(self, columns=columns, missing=tuple(missing), **updates)

    def with_decimal(self, decimal: str) -> "Columns":
        """Returns the same columns with another decimal separator for numbers in text."""
        plain = {name: PLAIN["numeric"] for name, column in self._used.items() if column.raw_kind.kind == "numeric"}
        readings = plain | self.readings
        return dataclasses.replace(
            self, readings={name: reading.with_decimal(decimal) for name, reading in readings.items()}
        )

    def described(self) -> dict[str, str]:
        """Returns a description of each column by name: its kind, how its text is read, and any ambiguity."""
        parts = {name: [str(column)] for name, column in self.columns.items()}
        for name, column_parts in parts.items():
            if name in self.readings:
                column_parts.append(str(self.readings[name]))
            if name in self.notes:
                column_parts.append(self.notes[name])
        return {name: "; ".join(column_parts) for name, column_parts in parts.items()}

    def warn_left_out(self) -> None:
        """Warns with :class:`ColumnsWarning` of columns that are left out or ambiguous."""
        if left_out := self._left_out():
            distributed.warn(f"columns of x are left out: {left_out}", ColumnsWarning, stacklevel=3)
        notes = [f"{checks.quoted(name)} ({note})" for name, note in self.notes.items()]
        if notes:
            distributed.warn(
                f"columns of x may mean something else: {checks.listed(notes)}", ColumnsWarning, stacklevel=3
            )

    def _left_out(self) -> str:
        """Returns the names of the columns that are left out, with the reasons."""
        left_out = {name: column for name, column in self.columns.items() if isinstance(column, LeftOut)}
        return checks.listed(f"{checks.quoted(name)} ({column.why})" for name, column in left_out.items())

    def __hash__(self) -> int:
        return hash((self.named, tuple(self.columns)))

    def __str__(self) -> str:
        return "\n".join(f"{name}: {description}" for name, description in self.described().items())


def _read(x: Any, raw_kinds: Mapping[str, Any] | None = None, rows: int = 1, missing: Sequence[str] = ()) -> Frame:
    """Returns the raw table of a DataFrame or an array of numbers; an array must have at least ``rows`` rows."""
    frame = read_frame(x, raw_kinds, missing)
    if frame is not None:
        return frame
    values = np.asarray(checks.check_x(x, rows=rows), np.float64)
    return Frame({f"x{j}": RawColumn("numeric", column) for j, column in enumerate(values.T)}, named=False)


def warn_of_gaps(counts: Mapping[str, int], *, stacklevel: int) -> None:
    """Warns of missing values, counted by column, in columns that had none in the training rows."""
    if which := _counted(counts):
        message = f"x has missing values where the training rows had none, replaced by typical values: {which}"
        warnings.warn(message, ColumnsWarning, stacklevel=stacklevel)


def _counted(counts: Mapping[str, int]) -> str:
    """Returns the names of columns and their positive numbers of rows as text."""
    rows = lambda count: f"{count} row{'' if count == 1 else 's'}"
    return checks.listed(f"{checks.quoted(name)} ({rows(count)})" for name, count in counts.items() if count)


def _with_gaps(raw: RawColumn, missing: Sequence[str]) -> RawColumn:
    """Returns a column of text in which texts that mean a missing value are None."""
    gaps = np.array([cell is None or cell.strip() in missing for cell in raw.values.tolist()], bool)
    return raw._replace(values=np.where(gaps, np.array(None), raw.values)) if gaps.any() else raw


def checked_missing(missing: Any) -> tuple[str, ...]:
    """Returns texts that mean a missing value; raises ``ValueError`` if they are not a sequence of texts."""
    if isinstance(missing, str) or not all(isinstance(text, str) for text in missing):
        raise ValueError(f'missing must be texts, such as ("-", "unknown"), got {checks.quoted(missing)}')
    return tuple(missing)


_PLAIN_NOTE = "numbers in text; a column of categories keeps the text as levels"
_REMEDY = (
    'Read such texts as missing values with missing=("-",), convert the column to numbers or dates, or convert it to '
    "categories to keep its text"
)
_MOST_STRAYS = 20  # largest number of texts that a message lists


def doubt_of(cells: list[str | None], decimal: str | None = None, order: str | None = None) -> str:
    """Returns why text that looks like numbers or dates is not read as such; empty if it does not look so."""
    if strays := find_strays(cells, decimal=decimal, order=order):
        rest = f" and {len(strays) - _MOST_STRAYS} more" if len(strays) > _MOST_STRAYS else ""
        return f"holds numbers or dates, and the texts {', '.join(map(checks.quoted, strays[:_MOST_STRAYS]))}{rest}"
    texts = [cell for cell in cells if cell is not None]
    return f"has a decimal comma, as in {checks.quoted(texts[0])}" if has_comma(texts) else ""


_NAMES = {"numeric": "numbers", "boolean": "booleans", "date": "dates", "text": "text"}


def _name_of(raw: RawColumn) -> str:
    """Returns the word of messages for the values of a column."""
    return raw.source if raw.source == "durations" else _NAMES[raw.kind]


def _numbers(name: str, raw: RawColumn, reading: Reading, zone: str | None = None) -> RawColumn:
    """Returns a column of text as numbers or days.

    Raises:
      ValueError: if a cell cannot be read. The message names the column and the row.
    """
    values, wrong = reading.read(raw.values.tolist(), zone)
    expected = {"boolean": "true or false", "date": f"dates {'with' if reading.zoned else 'without'} a time zone"}
    example = f" such as {checks.quoted(reading.example)}" if reading.example else ""
    _check(name, ~wrong, expected.get(reading.kind, "numbers") + example, raw.values)
    check_numbers(name, values)
    return RawColumn(reading.kind, values, (zone or OFFSETS) if reading.zoned else None)


def _check(name: str, right: np.ndarray, expected: str, values: np.ndarray) -> None:
    """Raises ``ValueError`` for the first value that is not right."""
    if not right.all():
        row = int(np.argmin(right))
        value = values[row] if isinstance(values[row], str) else float(values[row])
        got = f"got {checks.quoted(value)} in row {row}"
        raise ValueError(f"x must hold {expected} in column {checks.quoted(name)}, {got}")


def _targets(y: Any, n: int, task: str | tasks.Task, sample_weight: Any) -> Targets:
    weight = np.ones(n) if sample_weight is None else checks.relative_weight(sample_weight, n)
    fold = np.random.default_rng(0).permutation(n) % FOLDS
    if y is None:
        return Targets((), np.zeros((n, 0)), weight / weight.mean(), fold)
    task, y = tasks.checked_targets(task, y, n)
    values = task.indicators(y).astype(np.float64)
    if isinstance(task, tasks.Classification):
        names = [f"class {i}" for i in range(task.classes)]
        values, names = (values[:, 1:], names[1:]) if task.classes == 2 else (values, names)
    else:
        prefix = (
            "action " if isinstance(task, tasks.Policy) else "y"
        )  # the mean of an action is the mean of its rewards
        names = ["y"] if task.outputs is None else [f"{prefix}{i}" for i in range(task.outputs)]
    return Targets(tuple(names), values, weight / weight.mean(), fold)
