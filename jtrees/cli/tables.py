"""Tables from files with their targets: the usable rows and columns, and clear errors for unusable data."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
import shlex
from typing import Any, Literal

import numpy as np
import pandas as pd

from jtrees import validation as checks
from jtrees.cli.files import DataError, Rules, is_parquet, read_rows
from jtrees.tables import Frame, Schema
from jtrees.tables.cells import PLAIN, mask_missing, missing_mask
from jtrees.tables.frame import RawColumn
from jtrees.tables.inference import inferred, note_of_odd, read_as
from jtrees.tables.parse import LARGEST, level_of

_FEWEST = 20  # least number of rows to train, to validate and to test
_LABELS = 20  # largest number of different whole numbers that are read as classes
_MEMBERS = 5  # least number of rows of a class to train, to validate and to test

_TARGET_KINDS = ("number", "decimal point", "decimal comma", "text")

Task = Literal["regression", "classification"]


@dataclass(frozen=True)
class LabelledTable:
    """A raw data set: columns of any kind, which may have missing values, and a target of any kind.

    Attributes:
      name: name of the data set.
      x: the features.
      y: the target.
      changes: changes made while reading the file, one line for each change.
      reading: how the features are read: arguments of :func:`jtrees.tables.inference.inferred`.
      frame: the features of usable rows in the kinds of their schema; None: not read yet.
    """

    name: str
    x: pd.DataFrame
    y: pd.Series
    changes: tuple[str, ...] = ()
    reading: dict[str, Any] = field(default_factory=dict)
    frame: Frame | None = None

    @property
    def schema(self) -> Schema | None:
        """What the features of usable rows hold; None: not known yet."""
        return None if self.frame is None else self.frame.schema


def read_labelled(file: Path, target: str | None, rules: Rules | None = None) -> LabelledTable:
    """Returns the data set in a file; ``target`` is the column to predict, and every other column is a feature.

    The features of CSV are text. Its target is numbers, booleans or text. Raises ``DataError`` if the file cannot be
    read, or if a column does not exist. The message lists the columns.
    """
    rules = Rules() if rules is None else rules
    if target is not None and rules.columns.get(target, "number") not in _TARGET_KINDS:
        among = ", ".join(_TARGET_KINDS)
        raise DataError(f"--columns must give the target a kind among {among}; got {rules.columns[target]}")
    rows, changes = read_rows(file, rules)
    names = list(rows.columns)
    if target is None or target not in names:
        came = "none was named" if target is None else f"got {checks.quoted(target)}"
        raise DataError(f"--target must be one of the columns {checks.listed(name[:80] for name in names)}; {came}")
    if len(names) == 1:
        raise DataError(f"{file} must have at least one column besides the target")
    check_named(rules.columns, names)
    kinds = {name: kind for name, kind in rules.columns.items() if name != target}
    x, missing = rows.drop(columns=target), rules.missing
    y: Any = rows[target]
    if parquet := is_parquet(file):
        missing = rules.missing_labels
    if parquet and target not in rules.columns:
        if isinstance(y.dtype, pd.CategoricalDtype):
            y = y.astype(object).infer_objects()
        y = y.mask(np.array(missing_mask(y, missing), bool))
    else:
        y, how = _read_target(pd.Series(map(level_of, y), name=target, dtype=object) if parquet else y, rules)
        changes += [f"target {checks.quoted(target)}: {how}"] if how else []
    reading = {"columns": kinds, "missing": missing, "decimal": rules.decimal, "is_file": not parquet}
    return LabelledTable(file.stem, x, y, tuple(changes), reading)


def _read_target(cells: pd.Series, rules: Rules) -> tuple[pd.Series, str]:
    """Returns the target as numbers, booleans or text, and how text with a unit or a separator is read."""
    name, kind = str(cells.name), rules.columns.get(str(cells.name))
    texts = mask_missing(cells, rules.missing)
    reading, note, otherwise = None, "", ""
    if kind != "text":
        reading, note, otherwise = read_as(name, texts, kind, decimal=rules.decimal)
    if reading is None:  # among labels, a text such as "None" is a label
        return pd.Series(mask_missing(cells, rules.missing_labels), name=name, dtype=object), ""
    if reading.kind == "date":
        return pd.Series(texts, name=name, dtype=object), ""
    raw = RawColumn("text", np.array(texts, object)).in_kind(reading).masked(rules.missing)
    values = raw.values
    if reading.kind == "boolean":
        return pd.Series(pd.arrays.BooleanArray(values == 1, np.isnan(values)), name=name), ""
    texts = [None if gap else cell for cell, gap in zip(texts, raw.missing, strict=True)]
    digits = [None if cell is None else cell.lstrip("+-") for cell in texts]
    is_whole = not raw.odd and all(cell is None or (len(cell) < 18 and cell.isdecimal()) for cell in digits)
    numbers = pd.Series(values, name=name)
    if is_whole:  # exact, also beyond 2**53
        numbers = pd.Series([None if cell is None else int(cell) for cell in texts], name=name, dtype="Int64")
    note, otherwise = (note_of_odd(raw.odd), "text") if raw.odd else (note, otherwise)
    how = [] if reading == PLAIN["number"] else [str(reading)]
    how += [f"{note}: {as_options({name: otherwise})} reads it otherwise"] if note else []
    return numbers, "; ".join(how)


def as_options(kinds: Mapping[str, str]) -> str:
    """Returns the option of the command line that requests kinds of columns, given by name."""
    return shlex.join(["--columns", *(f"{name}={kind}" for name, kind in kinds.items())])


def check_named(columns: Mapping[str, str], names: list[str]) -> None:
    """Raises :class:`DataError` if a kind is requested for a column that does not exist."""
    if absent := [name for name in columns if name not in names]:
        among = checks.listed(name[:80] for name in names)
        raise DataError(f"--columns must name columns among {among}; got {checks.quoted(absent[0])}")


def _check_rows(frame: LabelledTable) -> None:
    """Raises :class:`DataError` if there are too few rows to train, choose and test."""
    if len(frame.x) < _FEWEST:
        rows = "a header and no rows" if len(frame.x) == 0 else checks.number_of(len(frame.x), "row")
        raise DataError(f"{frame.name} has {rows}: at least {_FEWEST} are needed to train, choose and test")


def guess(y: Any) -> tuple[Task, str]:
    """Returns the task that suits a target, and the reason."""
    kinds = y.nunique()
    if not pd.api.types.is_numeric_dtype(y) or pd.api.types.is_bool_dtype(y):
        return "classification", f"{y.name} holds {kinds} labels"
    if kinds <= _LABELS and (y.dropna() % 1 == 0).all():
        return "classification", f"{y.name} holds {kinds} different whole numbers"
    return "regression", f"{y.name} holds {kinds} different numbers"


def prepared(data: LabelledTable, task: Task | None, reason: str = "") -> tuple[LabelledTable, Task, list[str]]:
    """Returns the usable rows with their schema, the task, and lines about rows, columns, task and left-out rows.

    A task of None is chosen by the target. ``reason`` says why this is the task, or is "". Raises ``DataError`` if the
    data cannot be used for the task.
    """
    _check_rows(data)
    text = f"{task}, as {reason}" if reason else task
    if task is None:
        task, why = guess(data.y)
        text = f"{task}, as {why} (--task says otherwise)"
    frame, left_out = usable(data, task)
    _check_rows(frame)
    schema: Any = frame.schema
    count = sum(column.kind != "drop" or bool(column.note) for column in schema.columns.values())
    columns = checks.number_of(count, "column")
    return frame, task, [f"{frame.name}: {len(frame.x)} rows, {columns}; task: {text}", *left_out]


def usable(frame: LabelledTable, task: Task) -> tuple[LabelledTable, list[str]]:
    """Returns the usable rows and their schema, and a list of the dropped rows and classes as lines of text.

    Raises ``DataError`` if the target is constant or does not suit the task.
    """
    y: Any = frame.y
    changes, name = list(frame.changes), checks.quoted(y.name)
    keep = y.notna()
    if not keep.all():
        changes.append(f"{checks.number_of((~keep).sum(), 'row')} without {name} left out")
    if task == "regression":
        _check_numbers(y[keep])
    else:
        members = y.map(y.value_counts())
        rare = sorted({str(label) for label in y[keep & (members < _MEMBERS)]})
        if len(rare) > _LABELS:
            many = f"{len(rare)} labels of fewer than {_MEMBERS} rows: --task regression?"
            raise DataError(f"target {name} has {many}")
        if rare:
            changes.append(f"classes of fewer than {_MEMBERS} rows left out: {checks.listed(rare)}")
            keep &= members >= _MEMBERS
    if y[keep].nunique() < 2:
        got = checks.quoted_list(sorted(set(map(str, y[keep])))) or "none"
        gaps = f" in all rows but {(~keep).sum()}, which have no target: check --missing" if not keep.all() else ""
        raise DataError(f"target {name} must take at least two values, got {got}{gaps}")
    x: Any = frame.x[keep].reset_index(drop=True)
    rows = inferred(x, **frame.reading)[1]
    return replace(frame, x=x, y=y[keep].reset_index(drop=True), frame=rows), changes


def _check_numbers(y: Any) -> None:
    """Raises :class:`DataError` for a target that is not finite numbers."""
    name = checks.quoted(y.name)
    numeric: Any = pd.to_numeric(y, errors="coerce")
    numbers = numeric.to_numpy(np.float64, na_value=np.nan)
    finite = np.isfinite(numbers)
    if not pd.api.types.is_numeric_dtype(y) or not finite.all():
        row = int(np.argmin(finite))
        got = f"{checks.quoted(str(y.iloc[row]))} in row {y.index[row]}"
        raise DataError(f"target {name} must hold finite numbers for --task regression, got {got}")
    if len(far := numbers[np.abs(numbers) > LARGEST]):
        raise DataError(f"target {name} must be within the range of float32, got {far[0]:.6g}")


def targets_of(y: pd.Series) -> np.ndarray:
    """Returns targets as an array of numbers, booleans or text."""
    return y.to_numpy(str) if not pd.api.types.is_numeric_dtype(y) else y.to_numpy()
