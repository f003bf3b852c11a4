"""The schema of a raw table, found from its rows, with the kinds of columns that the user requests."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
import dataclasses
import itertools
from typing import Any

import numpy as np

from jtrees import validation as checks
from jtrees.tables.cells import MISSING, PLAIN, Interpretation, find_reading, readable_groups
from jtrees.tables.frame import DECIMALS, ColumnSchema, Frame, RawColumn, requested_kinds
from jtrees.tables.indicators import FEW_LEVELS, RARE, with_indicators
from jtrees.tables.parse import DATES, ISO, is_missing, kind_of, level_of, value_of
from jtrees.tables.periods import varying_periods
from jtrees.tables.schemas import Schema, cells_text, rows_of

# A column identifies rows if its number of distinct texts is above this number, and above half of the number of rows.
_IDENTIFIES = 20


def schema(x: Any, *, columns: Mapping[Any, str] | None = None, missing: Sequence[str | float] = ()) -> Schema:
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
      missing: texts and numbers that mean a missing value, such as ``("-", "unknown", -999)``. A text does so in every
        column of text. A number, or a text that reads as one, does so in every column of numbers, too. In text of
        numbers and dates, texts such as ``"?"`` and ``"N/A"`` always do.

    Raises:
      ValueError: if the table cannot be read, or has no usable column. Also if no cell of a column has the requested
        kind; a single cell that does not have it is a missing value.
      ImportError: if x is a DataFrame and narwhals is not installed.

    Example:
      >>> import pandas as pd
      >>> table = pd.DataFrame({"code": ["01", "02"] * 10, "rent": ["$980", "$950"] * 10})
      >>> print(jtrees.tables.schema(table, columns={"code": "number"}))
      column  kind    missing  cells
      'code'  number
      'rent'  number           numbers in text such as '$980'
    """
    return inferred(x, columns=columns, missing=missing)[0]


def inferred(
    x: Any,
    *,
    columns: Any = None,
    missing: Sequence[str | float] = (),
    decimal: str | None = None,
    is_file: bool = False,
) -> tuple[Schema, Frame]:
    """Returns the schema of a table, and the rows in the kinds of the schema.

    :func:`schema` describes the arguments and the errors. ``columns`` may be a schema, which is returned unchanged.
    ``decimal`` is the decimal separator of numbers in text; None: as the cells of each column say. ``is_file`` says
    that x is the text of a file, whose plain numbers are unambiguous.
    """
    missing = checked_missing(missing)
    if columns is None and isinstance(x, Frame):
        columns = x.schema
    if isinstance(columns, Schema):
        if missing:
            raise ValueError(f"missing must be empty with a schema, which has its own, got {checks.quoted(missing)}")
        return columns, columns.read(x)
    frame = rows_of(x, missing=missing, requested=columns)
    kinds = requested_kinds(columns, list(frame.columns))
    described, read = {}, {}
    for name, raw in frame.columns.items():
        described[name], read[name] = _described(name, raw, kinds.get(name), missing, decimal, is_file)
    result = Schema(with_indicators(described, read), frame.named, (*dict.fromkeys((*MISSING, *missing)),))
    if not result.used:
        got = "".join(result.messages()).partition(": ")[2] or "only dropped columns"
        raise ValueError(f"x must have a column to learn from, got {got}")
    return result, Frame({name: read[name] for name in result.used}, named=True, schema=result)


def checked_missing(missing: Any) -> tuple[str, ...]:
    """Returns texts that mean a missing value, with the texts of numbers among them.

    Raises ``ValueError`` if ``missing`` is no sequence of texts and finite numbers.
    """
    is_several = isinstance(missing, Iterable) and not isinstance(missing, (str, Mapping, Set))
    is_finite = lambda value: not is_missing(value) and kind_of(value) == "number" and abs(value) < float("inf")
    if not is_several or not all(isinstance(value, str) or is_finite(value) for value in missing):
        raise ValueError(f'missing must be texts or numbers, such as ("-", -999), got {checks.quoted(missing)}')
    return tuple(level_of(value) or "" for value in missing)


def _described(
    name: str, raw: RawColumn, kind: str | None, missing: Sequence[str], decimal: str | None, is_file: bool
) -> tuple[ColumnSchema, RawColumn]:
    """Returns the schema of a column, and the column in the kind of the schema; see :func:`inferred`."""
    if kind == "drop":
        return ColumnSchema("drop"), raw
    if kind == "text":
        return _of_levels(raw.as_levels().masked(missing), kind)
    came, raw = raw, raw.masked(missing, numbers=kind != "boolean")
    reading, note, otherwise = None, "", ""
    was_text, cells = raw.kind == "text", raw.masked(MISSING)
    if was_text and (raw.source == "text" or kind is not None):
        reading, note, otherwise = read_as(name, cells.values.tolist(), kind, decimal=decimal)
    elif not was_text:
        expected = _kind_of_values(kind or raw.kind)
        expected = raw.source if (raw.source, expected) == ("durations", "number") else expected
        reading = dataclasses.replace(PLAIN[expected], zoned=raw.zone is not None)
    if reading is None:
        column, raw = _of_levels(came.as_levels().masked(missing), kind)
        return (dataclasses.replace(column, note=note, otherwise=otherwise) if note else column), raw
    zone = cells.zone or (reading.common_zone(cells.values.tolist()) if cells.kind == "text" else None)
    raw = cells.in_kind(reading, zone).masked(missing)
    if kind is not None and raw.missing.all() and raw.odd:
        got = f"got {checks.quoted_list(raw.odd)}"
        raise ValueError(f"x must hold values of the kind {checks.quoted(kind)} in column {checks.quoted(name)}, {got}")
    # Times of day in text are not plain, because a database does not read them.
    example = reading.example if reading.kind == "durations" else ""
    is_plain = not was_text or dataclasses.replace(reading, example=example) == PLAIN[reading.kind]
    if raw.odd:
        note = "; ".join([note_of_odd(raw.odd), *([note] if note else [])])
        otherwise = otherwise or ("text" if was_text and kind is None else "")
    elif is_plain and reading.kind == "number" and kind is None and not is_file and _has_text(cells):
        note, otherwise = "numbers in text", "text"
    reading = None if is_plain else reading
    gaps = raw.missing
    durations, count = raw.source == "durations", int(gaps.sum())
    present = raw.values[~gaps]
    if kind is None and (why := _useless(present, count)):
        return ColumnSchema("drop", missing=count, note=why), raw
    parts = varying_periods(present) if raw.kind == "date" else ()
    about = {"parts": parts, "missing": count, "odd": len(raw.odd), "note": note, "otherwise": otherwise}
    return ColumnSchema(raw.kind, durations, reading, raw.zone, **about), raw


def note_of_odd(cells: Sequence[str]) -> str:
    """Returns the note of a column of which some cells do not have its kind."""
    return f"{cells_text(cells)} {'count as missing values' if len(cells) > 1 else 'counts as a missing value'}"


def _has_text(raw: RawColumn) -> bool:
    return raw.kind == "text" and any(isinstance(cell, str) for cell in raw.values)


def _useless(present: np.ndarray, missing: int) -> str:
    """Returns why numbers or dates have no features, or an empty text."""
    if not len(present):
        return "without values"
    return "" if missing >= RARE or not (present == present[0]).all() else "constant"


def _of_levels(raw: RawColumn, kind: str | None) -> tuple[ColumnSchema, RawColumn]:
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
    return "number" if kind in DECIMALS else "date" if kind in DATES else kind


_MOSTLY = 0.9  # least fraction of the cells of mostly numbers or dates


def read_as(name: str, cells: list[Any], kind: str | None, *, decimal: str | None = None) -> Interpretation:
    """Returns how a column of text, or of cells of several types, is read. Frames and files have the same rule.

    - If all cells are numbers in one form, or dates in one format, the column holds numbers, or dates.
    - The column is mostly numbers if at least 90 % of the cells are numbers, or at least 90 % of the different cells.
      So a text that stands for many missing values is a single cell. If more than ten cells are different, the column
      holds numbers, and the other cells are missing values. The same goes for dates, and for cells that are durations
      or times of day.
    - Every other column is text. That includes few different cells, such as 0, 1, 2 and "3+", which are levels.

    If a kind is requested, the reading of this kind that reads the most cells decides. ``ValueError`` is raised if
    these are dates whose day and month may be exchanged. ``decimal`` counts if the kind does not say it; None: as the
    cells say.
    """
    how: Any = {"decimal": DECIMALS.get(kind or "", decimal), "style": kind if kind in DATES else None}
    how["requested"] = kind is not None
    texts = [level_of(cell) for cell in cells]
    is_duration = lambda cell: not isinstance(cell, str) and kind_of(cell) == "durations"
    durations = {text for cell, text in zip(cells, texts, strict=True) if text is not None and is_duration(cell)}
    counts = Counter(text for text in texts if text is not None)
    durations |= {text for text in counts if value_of(text, "durations") is not None}
    times = (cell for cell, text in zip(cells, texts, strict=True) if isinstance(cell, str) and text in durations)
    of_durations = Interpretation(dataclasses.replace(PLAIN["durations"], example=next(times, "")))
    result = Interpretation(None) if durations else find_reading(texts, **how)
    if len(durations) == len(counts) > 0:
        result = of_durations
    expected = None if kind is None else _kind_of_values(kind)
    read_kind = lambda reading: "number" if reading.kind == "durations" else reading.kind
    if result.reading is not None and expected in (None, read_kind(result.reading)):
        return result if kind is None else Interpretation(result.reading)
    total, possible = counts.total(), []
    groups = readable_groups(text for text in counts if text not in durations)
    for group in itertools.chain(groups, [durations] if durations else []):
        share = max(sum(counts[text] for text in group) / total, len(group) / len(counts))
        if expected is None and (share < _MOSTLY or len(group) == len(counts)):
            continue
        meaning = of_durations if group is durations else find_reading(group, **how)
        kind_read = read_kind(meaning.reading) if meaning.reading is not None else ""
        is_open = expected == "date" and meaning.otherwise in DATES
        if is_open or (expected is not None and kind_read == expected):
            read: Iterable[str] = group
            if meaning.reading is not None and group is not durations:  # it may read cells of other groups, too
                parser = meaning.reading.parser()
                read = (text for text in counts if parser(text) is not None)
            possible.append((sum(counts[text] for text in read), meaning))
        if expected is None and any(meaning[:2]):
            if meaning.reading is None or len(counts) > FEW_LEVELS:
                return meaning
            kinds = f"{meaning.reading.kind.removesuffix('s')}s"
            odd = [text for text in counts if text not in group]
            return Interpretation(
                None, f"mostly {kinds}, and {cells_text(odd)}; few levels, and therefore text", kind_read
            )
    if expected is None:
        return result
    if possible:
        _, meaning = max(possible, key=lambda option: option[0])
        if meaning.reading is None:
            raise ValueError(f"columns must have a format of dates for {checks.quoted(name)}, got {meaning.note}")
        return Interpretation(meaning.reading)
    about = {"example": next(iter(counts), ""), "decimal": how["decimal"] or ".", "style": how["style"] or ISO}
    return Interpretation(dataclasses.replace(PLAIN[expected], **about))
