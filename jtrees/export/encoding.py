"""The encoding of a raw table's columns as plain arrays: the common part of all export formats with columns."""

from typing import NamedTuple

import numpy as np

from jtrees.tables import TableEncoder
from jtrees.tables.frame import ColumnSchema, Frame, RawColumn
from jtrees.tables.program import Operation
from jtrees.validation import quoted

MICROSECONDS = 86_400_000_000  # microseconds in a day; durations are whole microseconds


class Field(NamedTuple):
    """A column that the model uses.

    Attributes:
      name: name of the column.
      place: position of the column in the raw table.
      column: what the column holds.
      operations: the program of the column.
      missing: texts that mean a missing value.
    """

    name: str
    place: int
    column: ColumnSchema
    operations: tuple[Operation, ...]
    missing: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """``"number"``, ``"boolean"``, ``"date"`` (days since 1970) or ``"text"``."""
        return self.column.kind


def fields_of(encoder: TableEncoder) -> list[Field]:
    """Returns the columns that a model uses, in the order of their features.

    Raises ``ValueError`` for levels in an array, because files find the columns of arrays by position, as numbers.
    """
    schema, fields = encoder.schema, []
    if not schema.named and (text := [name for name, c in schema.used.items() if c.kind == "text"]):
        raise ValueError(f"levels must be in a table with names, such as a DataFrame, got the column {quoted(text[0])}")
    for place, (name, column) in enumerate(schema.columns.items()):
        if name in encoder.encodings:
            missing = tuple(text for text in schema.missing if text not in column.training_levels)
            fields.append(Field(name, place, column, encoder.encodings[name].operations, missing))
    return fields


def test_table(encoder: TableEncoder, rows: int) -> Frame:
    """Returns rows for the self-test of a file: numbers around their centres, all levels, and missing values."""
    rng = np.random.default_rng(0)
    sample = {}
    for name, column in encoder.schema.columns.items():
        missing = rng.random(rows) < 0.2
        if column.kind == "drop":
            sample[name] = RawColumn("number", np.zeros(rows))
        elif column.kind == "text":
            new_level = "\0" * (1 + max(map(len, column.training_levels), default=0))
            levels = np.array([*column.levels, new_level], object)
            sample[name] = RawColumn("text", levels[rng.integers(len(levels), size=rows)])
            sample[name].values[missing] = None
        else:
            encoding = encoder.encodings[name]
            values = encoding.start + encoding.center + encoding.spread * rng.normal(size=rows)
            values = (values > 0.5) * 1.0 if column.kind == "boolean" else values
            if column.kind == "date":  # whole minutes; with a zone noon, because an hour may be left out in spring
                values = np.floor(values * 1440) / 1440 if column.zone is None else np.floor(values) + 0.5
            values = np.round(values * MICROSECONDS) / MICROSECONDS if column.durations else values
            source = "durations" if column.durations else "text"
            sample[name] = RawColumn(column.kind, np.where(missing, np.nan, values), column.zone, source)
    return Frame(sample, named=encoder.schema.named)
