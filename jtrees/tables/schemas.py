"""The schema of a raw table: what each column holds, and how the cells of later tables are read.

A schema comes from all rows of a table, without the targets. The number of features of a table depends only on its
schema and on the number of outputs. :mod:`jtrees.tables.inference` makes schemas, and :mod:`jtrees.tables.encoder`
makes features.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from jtrees import distributed, io, validation as checks
from jtrees.tables.cells import MISSING, OFFSETS
from jtrees.tables.frame import ColumnSchema, Frame, RawColumn, read_frame
from jtrees.validation import ColumnsWarning


@io.part
@dataclasses.dataclass(frozen=True)
class Schema:
    """What the columns of a raw table hold. Printed, it is a table with a line for each column.

    Attributes:
      columns: the description of each column by name, in the order of the table.
      named: whether columns are identified by name. The columns of an array are identified by position.
      missing: texts that mean a missing value in a column of text, unless they are levels of the column. In a column
        of numbers, so do the numbers of these texts.
    """

    columns: dict[str, ColumnSchema]
    named: bool
    missing: tuple[str, ...] = MISSING

    @property
    def used(self) -> dict[str, ColumnSchema]:
        """The columns that have features."""
        return {name: column for name, column in self.columns.items() if column.kind != "drop"}

    def read(self, x: Any) -> Frame:
        """Returns the used columns of new rows, in the kinds of the schema. Rows in these kinds are returned unchanged.

        Args:
          x: a DataFrame of any library with at least the used columns, in any order. If all columns are numbers, x may
            be an array, whose columns are identified by position. Text is read as in the table of the schema if the
            column holds numbers or dates. Cells that do not have the kind of their column are missing values.

        Raises:
          ValueError: if a column is missing. The message names the column.
        """
        if isinstance(x, Frame) and x.schema == self:
            return x
        frame = rows_of(x, rows=0, schemas=self.used if self.named else None, missing=self.missing)
        names = set(frame.columns)
        has_names = frame.named and (self.named or set(self.used) <= names <= set(self.columns))
        if not has_names:
            if len(frame.columns) != len(self.columns):
                raise ValueError(f"x must have {len(self.columns)} columns, got {len(frame.columns)}")
            frame = Frame(dict(zip(self.columns, frame.columns.values(), strict=True)), named=True)
        used = self.used
        if absent := [name for name in used if name not in frame.columns]:
            got = f"got none called {checks.quoted(absent[0])}"
            raise ValueError(f"x must have the columns {checks.quoted_list(used)}, {got}")
        columns = {name: column.convert(frame.columns[name], self.missing) for name, column in used.items()}
        return Frame(columns, named=True, schema=self)

    def warn_of_news(self, frame: Frame) -> None:
        """Warns of unreadable cells and of missing values where the table of the schema had none, and of new levels.

        Also of dates in a zone with a name in a column of several offsets, because their clocks may differ.

        ``frame`` has rows as :meth:`read` returns them.
        """
        odd, gaps, levels, zones = {}, {}, {}, {}
        for name, raw in frame.columns.items():
            column = self.columns[name]
            odd[name] = () if column.odd else raw.odd
            gaps[name] = 0 if column.missing else int(raw.missing.sum())
            if column.zone == OFFSETS and raw.zone not in (None, OFFSETS) and raw.zone[0] not in "+-":
                zones[name] = raw.zone
            if column.kind == "text":
                known = column.levels_by_text
                levels[name] = sum(level is not None and level not in known for level in raw.values.tolist())
        warn_of_odd_cells(odd)
        checks.warn_of_gaps(gaps)
        if zones:
            which = checks.listed(f"{checks.quoted(name)} ({zone})" for name, zone in zones.items())
            message = f"x has dates of one time zone, where the training rows had several offsets from UTC: {which}"
            checks.warn(message, ColumnsWarning)
        if which := checks.counted(levels):
            message = f"x has levels that the training rows did not have: {which}"
            checks.warn(message, ColumnsWarning)

    def messages(self, remedy: Callable[[Mapping[str, str]], str] | None = None) -> list[str]:
        """Returns a message on the dropped columns and a message on the ambiguous columns, if there are any.

        ``remedy`` returns how to request kinds of columns, given by name, as text; None: as an argument in Python.
        """
        pairs = lambda kinds: checks.listed(": ".join(map(checks.quoted, item)) for item in kinds.items())
        remedy = remedy or (lambda kinds: f"columns={{{pairs(kinds)}}}")
        dropped = {name: column for name, column in self.columns.items() if column.kind == "drop"}
        subjects = {"columns of x are left out": dropped, "columns of x may mean something else": self.used}
        return [f"{subject}: {text}" for subject, columns in subjects.items() if (text := _noted(columns, remedy))]

    def warn(self) -> None:
        """Warns with :class:`ColumnsWarning` of columns that are dropped or ambiguous, and names the remedy."""
        for message in self.messages():
            distributed.warn(message, ColumnsWarning)

    def __hash__(self) -> int:
        return hash((self.named, tuple(self.columns)))

    def __str__(self) -> str:
        rows = [("column", "kind", "missing", "cells")]
        for name, column in self.columns.items():
            rows.append((checks.quoted(name), column.kind, str(column.missing or ""), str(column)))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = ("  ".join([*(f"{row[i]:<{widths[i]}}" for i in range(3)), row[3]]) for row in rows)
        return "\n".join(line.rstrip() for line in lines)


def _noted(columns: Mapping[str, ColumnSchema], remedy: Callable[[Mapping[str, str]], str]) -> str:
    """Returns the names of the columns that have notes, with the notes and the remedy, as text."""
    notes = checks.listed(f"{checks.quoted(name)} ({column.note})" for name, column in columns.items() if column.note)
    kinds = {name: column.otherwise for name, column in columns.items() if column.otherwise}
    return f"{notes}: {remedy(kinds)} reads them otherwise" if kinds else notes


def rows_of(x: Any, *, rows: int = 1, **how: Any) -> Frame:
    """Returns the raw table of a DataFrame or an array of numbers; it has at least ``rows`` rows.

    :func:`jtrees.tables.frame.read_frame` describes the other arguments.
    """
    frame = read_frame(x, rows=rows, **how)
    if frame is not None:
        return frame
    values = np.asarray(checks.check_x(x, rows=rows), np.float64)
    return Frame({f"x{j}": RawColumn("number", column) for j, column in enumerate(values.T)}, named=False)


def warn_of_odd_cells(odd: Mapping[str, Sequence[str]]) -> None:
    """Warns of cells of new rows, by column, that do not have the kind of their column."""
    if texts := [f"{checks.quoted(name)} ({cells_text(cells)})" for name, cells in odd.items() if cells]:
        message = f"x has cells that the model cannot read, and takes as missing: {checks.listed(texts)}"
        checks.warn(message, ColumnsWarning)


def cells_text(cells: Sequence[str]) -> str:
    """Returns up to three cells, and the number of further cells, as text."""
    return checks.listed([*map(checks.quoted, cells[:3]), *cells[3:]], most=3)  # there may be a million
