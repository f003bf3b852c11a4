"""The columns of a file whose cells are text."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jtrees.data.cells import OFFSETS, PLAIN, Reading, find_reading
from jtrees.data.frame import RawColumn


class FileColumns(NamedTuple):
    """The columns of a file of text.

    Attributes:
      columns: the columns, by name.
      readings: how the text of each column of numbers or dates is read.
      notes: the ambiguity of a column, and the option that resolves it.
    """

    columns: dict[str, RawColumn]
    readings: dict[str, Reading]
    notes: dict[str, str]


def read_cells(
    cells: Mapping[str, np.ndarray], *, decimal: str | None = None, order: str | None = None, text: Sequence[str] = ()
) -> FileColumns:
    """Returns the columns of a file whose cells are text; the kind of a column is inferred from all of its cells.

    Args:
      cells: the cells of each column, ``(n,)`` str, None if missing.
      decimal: the decimal separator, as for :func:`jtrees.data.cells.find_reading`.
      order: the order of day and month, ``"dmy"`` or ``"mdy"``, for columns of ambiguous dates.
      text: names of columns that are not converted.
    """
    result = FileColumns({}, {}, {})
    for name, values in cells.items():
        raw = RawColumn("text", values, source="levels" if name in text else "text")
        if raw.source == "text":
            reading, note = find_reading(values.tolist(), decimal=decimal, order=order)
            result.notes.update({name: note} if note else {})
            if reading is not None:
                numbers, _ = reading.read(values.tolist())
                raw = RawColumn(reading.kind, numbers, OFFSETS if reading.zoned else None)
                result.readings.update({} if reading == PLAIN[reading.kind] else {name: reading})
        result.columns[name] = raw
    return result
