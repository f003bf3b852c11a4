"""The schema of a raw table, found from its rows, with the kinds of columns that the user requests."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from jtrees import validation as checks
from jtrees.tables.cells import MISSING, PLAIN, Interpretation, find_reading, find_strays, has_comma
from jtrees.tables.frame import DECIMALS, ColumnSchema, Frame, RawColumn, requested_kinds
from jtrees.tables.indicators import with_indicators
from jtrees.tables.parse import DATES, ISO, level_of
from jtrees.tables.periods import varying_periods
from jtrees.tables.schemas import Schema, in_words, numbers_of, rows_of

MAX_LEVELS = 10
# A column identifies rows if it has more distinct texts than this number, and more than half as many as rows.
_IDENTIFIES = 20


def schema(
    x: Any, *, columns: Mapping[Any, str] | None = None, missing: Sequence[str] = (), decimal: str | None = None
) -> Schema:
    """Returns what the columns of a raw table hold. Printed, it is a table with a line for each column.

    The schema depends on all rows, and not on the targets. :func:`jtrees.fit` makes the schema of its rows of positive
    weight, or takes one as its argument ``columns``.

    Args:
      x: a DataFrame of pandas, polars or Arrow, or an array ``(n, p)`` in which NaN is a missing value.
      columns: kinds of columns by name, for columns that would be read differently. Of an array, by number.

        - ``"number"``; ``"decimal point"`` and ``"decimal comma"`` say which separator numbers in text have;
        - ``"boolean"``: true and false, or 1 and 0;
        - ``"date"``, or a format that says the order of day and month: ``"%d/%m/%Y"``, ``"%m/%d/%Y"``;
        - ``"text"``: each distinct value is a level;
        - ``"drop"``: the column has no features.
      missing: texts that mean a missing value in every column of text, such as ``("-", "unknown")``. In text of numbers
        and dates, texts such as ``"?"`` and ``"N/A"`` always do.
      decimal: the decimal separator of numbers in text, ``"."`` or ``","``. None: as the cells of each column say.

    Raises:
      ValueError: if the table cannot be read, or has no usable column, or if a column is not of the requested kind.
        Also if the text of a column is numbers or dates except for other texts, which the message lists.
      ImportError: if x is a DataFrame and narwhals is not installed.

    Example:
      >>> import pandas as pd
      >>> table = pd.DataFrame({"code": ["01", "02"] * 10, "rent": ["$980", "$950"] * 10})
      >>> print(jtrees.tables.schema(table, columns={"code": "number"}))
      column  kind    missing  cells
      'code'  number
      'rent'  number           numbers in text such as '$980'
    """
    return inferred(x, columns=columns, missing=missing, decimal=decimal)[0]


def inferred(
    x: Any,
    *,
    columns: Any = None,
    missing: Sequence[str] = (),
    decimal: str | None = None,
    max_levels: int = MAX_LEVELS,
    is_file: bool = False,
) -> tuple[Schema, Frame]:
    """Returns the schema of a table, and the rows in the kinds of the schema.

    Args:
      x: the table, as for :func:`schema`.
      columns: kinds of columns as for :func:`schema`, or a schema, which is returned unchanged.
      missing: as for :func:`schema`.
      decimal: as for :func:`schema`.
      max_levels: largest number of levels of a column with indicators (:func:`with_indicators`).
      is_file: whether x is the text of a file. Its plain numbers are then unambiguous.

    Raises:
      DoubtError: for columns of text that look like numbers or dates.
      ValueError, ImportError: in the other cases of :func:`schema`.
    """
    checks.check_count("max_levels", max_levels)
    if decimal not in (None, *DECIMALS.values()):
        raise ValueError(f"decimal must be a point or a comma, got {checks.quoted(decimal)}")
    missing = checked_missing(missing)
    if isinstance(columns, Schema):
        if missing:
            raise ValueError(f"missing must be empty with a schema, which has its own, got {checks.quoted(missing)}")
        return columns, columns.read(x)
    frame = rows_of(x, missing=missing, requested=columns)
    kinds = requested_kinds(columns, list(frame.columns))
    described, read, doubts = {}, {}, {}
    rules: Any = {"max_levels": max_levels, "missing": missing, "decimal": decimal, "is_file": is_file}
    for name, raw in frame.columns.items():
        try:
            described[name], read[name] = _described(name, raw, kinds.get(name), **rules)
        except DoubtError as error:
            doubts |= error.doubts
    if doubts:
        raise DoubtError(doubts)
    result = Schema(with_indicators(described, read, max_levels), frame.named, (*dict.fromkeys((*MISSING, *missing)),))
    if not result.used:
        got = "".join(result.messages()).partition(": ")[2] or "only dropped columns"
        raise ValueError(f"x must have a column to learn from, got {got}")
    return result, Frame({name: read[name] for name in result.used}, named=True)


def checked_missing(missing: Any) -> tuple[str, ...]:
    """Returns texts that mean a missing value; raises ``ValueError`` if they are not a sequence of texts."""
    is_several = isinstance(missing, Iterable) and not isinstance(missing, str)
    if not is_several or not all(isinstance(text, str) for text in missing):
        raise ValueError(f'missing must be texts, such as ("-", "unknown"), got {checks.quoted(missing)}')
    return tuple(level_of(text) or "" for text in missing)


# --- A column --------------------------------------------------------------------------------------------------------


class DoubtError(ValueError):
    """Text looks like numbers or dates, and other texts keep it from being read as such."""

    def __init__(self, doubts: Mapping[str, str]):
        """``doubts``: why the text of a column is not read as numbers or dates, by name of the column."""
        self.doubts = dict(doubts)
        super().__init__(
            f"x must hold numbers, dates or text in each column, got {self.listed()}. Read such texts as missing "
            'values with missing=("-",), or say what the column holds with columns={"name": "text"}'
        )

    def listed(self) -> str:
        """Returns the columns and the doubts as text."""
        return checks.listed((f"{checks.quoted(name)} {doubt}" for name, doubt in self.doubts.items()), "; ")


def _described(
    name: str,
    raw: RawColumn,
    kind: str | None,
    *,
    max_levels: int,
    missing: Sequence[str],
    decimal: str | None,
    is_file: bool,
) -> tuple[ColumnSchema, RawColumn]:
    """Returns the schema of a column, and the column in the kind of the schema; see :func:`inferred`."""
    if kind == "drop":
        return ColumnSchema("drop"), raw
    if kind == "text":
        if (came := in_words(raw)) in ("dates", "durations") and not raw.missing.all():
            raise ValueError(f"columns must not make text of the {came} in column {checks.quoted(name)}")
        return _of_levels(raw.as_levels().masked(missing), kind, max_levels)
    raw, reading, note, otherwise = raw.masked(missing), None, "", ""
    if raw.kind == "text" and (raw.source == "text" or kind is not None):
        cells = raw.masked(MISSING)
        reading, note, otherwise = read_as(name, cells.values.tolist(), kind, decimal=decimal)
        if reading is not None:
            raw = numbers_of(name, cells, reading)
            if dataclasses.replace(reading, example="") == PLAIN[reading.kind]:
                if kind is None and reading.kind == "number" and not is_file:
                    note, otherwise = "numbers in text", "text"
                reading = None
    if kind is not None:
        raw = _requested(name, raw, kind)
    if raw.kind == "text":
        column, raw = _of_levels(raw, kind, max_levels)
        return (dataclasses.replace(column, note=note, otherwise=otherwise) if note else column), raw
    gaps = raw.missing
    durations, count = raw.source == "durations", int(gaps.sum())
    present = raw.values[~gaps]
    if kind is None and (why := _useless(raw, present, count)):
        return ColumnSchema("drop", missing=count, note=why), raw
    parts = varying_periods(present) if raw.kind == "date" else ()
    about = {"parts": parts, "missing": count, "note": note, "otherwise": otherwise}
    return ColumnSchema(raw.kind, durations, reading, raw.zone, **about), raw


def _useless(raw: RawColumn, present: np.ndarray, missing: int) -> str:
    """Returns why numbers or dates have no features, or an empty text."""
    if not len(present):
        return "without values"
    if missing or not (present == present[0]).all():
        return ""
    return "whole numbers that double precision cannot distinguish" if raw.merged else "constant"


def _of_levels(raw: RawColumn, kind: str | None, max_levels: int) -> tuple[ColumnSchema, RawColumn]:
    """Returns the schema of a column of levels."""
    gaps = raw.missing
    levels = np.unique(raw.values[~gaps])
    missing, rows = int(gaps.sum()), int((~gaps).sum())
    drop = lambda why, otherwise="": (ColumnSchema("drop", missing=missing, note=why, otherwise=otherwise), raw)
    if not rows:
        return drop("without values")
    if kind is None and len(levels) > max(_IDENTIFIES, rows / 2):
        return drop(f"{len(levels)} different texts in {rows} rows", "text")
    if kind is None and len(levels) == 1 and not missing:
        return drop("constant")
    return ColumnSchema("text", levels=tuple(levels), missing=missing), raw


def _kind_of_values(kind: str) -> str:
    """Returns the kind of the values of a requested kind."""
    return "number" if kind in DECIMALS else "date" if kind in DATES else kind


def _requested(name: str, raw: RawColumn, kind: str) -> RawColumn:
    """Returns a column in the requested kind; raises ``ValueError`` if its values have another kind."""
    kind = _kind_of_values(kind)
    if raw.missing.all() and raw.kind != kind:
        return RawColumn(kind, np.full(len(raw.values), np.nan))
    if kind == "number" and raw.kind == "boolean":
        return raw._replace(kind="number")
    if kind == "boolean" and raw.kind == "number" and np.isin(raw.values[~raw.missing], (0, 1)).all():
        return raw._replace(kind="boolean")
    if raw.kind != kind:
        got = f"got {in_words(raw)} in column {checks.quoted(name)}"
        raise ValueError(f"columns must have the kinds that the cells have, {got}, not {kind}")
    return raw


def read_as(name: str, cells: list[str | None], kind: str | None, *, decimal: str | None = None) -> Interpretation:
    """Returns how the text of a column is read in a requested kind; None: as the cells say.

    Args:
      name: name of the column.
      cells: the cells, None if missing.
      kind: the kind, or None.
      decimal: the decimal separator if the kind does not say it; None: as the cells say.

    Raises:
      ValueError: if the text cannot be read in the requested kind. The message lists the texts.
    """
    decimal = DECIMALS.get(kind or "", decimal)
    found = find_reading(cells, decimal=decimal, style=kind if kind in DATES else None)
    if kind is None:
        if found.reading is None and (doubt := doubt_of(cells, decimal)):
            raise DoubtError({name: doubt})
        return found
    reading, expected = found.reading, _kind_of_values(kind)
    if reading is None or reading.kind != expected:
        style = kind if kind in DATES else ISO
        example = next((cell.strip() for cell in cells if cell is not None), "")
        reading = dataclasses.replace(PLAIN[expected], example=example, decimal=decimal or ".", style=style)
    _, wrong = reading.read(cells)
    if wrong.any() and kind == "date" and found.otherwise in DATES:
        raise ValueError(f"columns must have a format of dates for {checks.quoted(name)}, got {found.note}")
    if wrong.any():
        unreadable = dict.fromkeys(cell for cell, bad in zip(cells, wrong, strict=True) if bad)
        got = f"got the texts {checks.quoted_list(find_strays(cells, decimal=decimal) or unreadable)}"
        raise ValueError(
            f"x must hold values of the kind {checks.quoted(kind)} in column {checks.quoted(name)}, {got}: with "
            'missing=("-",), such texts are missing values'
        )
    return Interpretation(reading)


_MOST_STRAYS = 20  # largest number of texts that a message lists


def doubt_of(cells: list[str | None], decimal: str | None = None) -> str:
    """Returns why text that looks like numbers or dates is not read as such; empty if it does not look so."""
    if strays := find_strays(cells, decimal=decimal):
        rest = f" and {len(strays) - _MOST_STRAYS} more" if len(strays) > _MOST_STRAYS else ""
        return f"holds numbers or dates, and the texts {', '.join(map(checks.quoted, strays[:_MOST_STRAYS]))}{rest}"
    texts = [cell for cell in cells if cell is not None]
    return f"has a decimal comma, as in {checks.quoted(texts[0])}" if has_comma(texts) else ""
