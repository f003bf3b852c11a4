"""Tables from files with their targets: the usable rows and columns, and clear errors for unusable data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from jtrees import validation as checks
from jtrees.cli.files import PLAIN_RULES, DataError, Rules, read_table
from jtrees.tables import Schema
from jtrees.tables.inference import doubt_of

_FEWEST = 20  # least number of rows to train, to validate and to test
_LABELS = 20  # largest number of different whole numbers that are read as classes
_MEMBERS = 5  # least number of rows of a class to train, to validate and to test

_TARGET_KINDS = ("number", "decimal point", "decimal comma")

Task = Literal["regression", "classification"]


@dataclass(frozen=True)
class Frame:
    """A raw data set: columns of any kind, which may have missing values, and a target of any kind.

    Attributes:
      name: name of the data set.
      x: the features.
      y: the target.
      changes: changes made while reading the file, one line for each change.
      settled: whether text must remain text, because all cells of a file have been read.
      decimal: the decimal separator of the file, or None.
      kinds: requested kinds of features, by name.
      remember: ``schema -> schema``, which makes the schema of a model read text like this file.
    """

    name: str
    x: pd.DataFrame
    y: pd.Series
    changes: tuple[str, ...] = ()
    settled: bool = False
    decimal: str | None = None
    kinds: dict[str, str] = field(default_factory=dict)
    remember: Callable[[Schema], Schema] = lambda schema: schema


def read_labelled(file: Path, target: str | None, rules: Rules = PLAIN_RULES) -> Frame:
    """Returns the data set in a file; ``target`` is the column to predict, and every other column is a feature.

    Raises:
      DataError: if the file cannot be read, or if a column does not exist. The message lists the columns.
    """
    if target is not None and rules.columns.get(target, "number") not in _TARGET_KINDS:
        among = ", ".join(_TARGET_KINDS)
        raise DataError(f"--columns must give the target a kind among {among}; got {rules.columns[target]}")
    frame, read, changes = read_table(file, rules, keep=target)
    names = list(frame.columns)
    if target is None or target not in names:
        came = "none was named" if target is None else f"got {checks.quoted(target)}"
        raise DataError(f"--target must be one of the columns {_listed(names)}; {came}")
    if len(names) == 1:
        raise DataError(f"{file} must have at least one column besides the target")
    check_named(rules.columns, names)
    kinds = {name: kind for name, kind in rules.columns.items() if name != target}
    y: Any = frame[target]
    if (reading := read.readings.get(target)) is not None and reading.kind == "number":
        note = read.notes.get(target)
        changes.append(f"target {checks.quoted(target)}: {reading}{f'; {note}' if note else ''}")

    def remember(schema: Schema) -> Schema:
        return schema.with_readings(read.readings, read.notes, rules.missing)

    settled = file.suffix != ".parquet"
    return Frame(file.stem, frame.drop(columns=target), y, tuple(changes), settled, rules.decimal, kinds, remember)


def _listed(names: list[str]) -> str:
    """Returns up to five names, each of at most 80 characters, and the number of further names, as text."""
    return checks.listed(name[:80] for name in names)


def check_named(columns: Mapping[str, str], names: list[str]) -> None:
    """Raises :class:`DataError` if a kind is requested for a column that does not exist."""
    if absent := [name for name in columns if name not in names]:
        raise DataError(f"--columns must name columns among {_listed(names)}; got {checks.quoted(absent[0])}")


def check_rows(frame: Frame) -> None:
    """Raises :class:`DataError` if there are too few rows to train, choose and test."""
    if len(frame.x) < _FEWEST:
        rows = "a header and no rows" if len(frame.x) == 0 else f"{len(frame.x)} rows"
        raise DataError(f"{frame.name} has {rows}: at least {_FEWEST} are needed to train, choose and test")


def guess(y: Any) -> tuple[Task, str]:
    """Returns the task that suits a target, and the reason."""
    kinds = y.nunique()
    if not pd.api.types.is_numeric_dtype(y) or pd.api.types.is_bool_dtype(y):
        return "classification", f"{y.name} holds {kinds} labels"
    if kinds <= _LABELS and (y.dropna() % 1 == 0).all():
        return "classification", f"{y.name} holds {kinds} different whole numbers"
    return "regression", f"{y.name} holds {kinds} different numbers"


def usable(frame: Frame, task: Task) -> tuple[Frame, list[str]]:
    """Returns the usable rows, and a list of the dropped rows and classes as lines of text.

    Raises:
      DataError: if the target is constant or does not suit the task. Also for columns of infinite values, and for
        columns of text that look like numbers. The message names all such columns.
    """
    y: Any = frame.y
    if all(frame.kinds.get(name) == "drop" for name in frame.x.columns):
        raise DataError("there must be a column to learn from besides the target")
    changes, name = list(frame.changes), checks.quoted(y.name)
    keep = y.notna()
    if not keep.all():
        changes.append(f"{(~keep).sum()} rows without {name} left out")
    doubt = None if pd.api.types.is_numeric_dtype(y) else _doubt(y[keep], frame.decimal)
    if task == "regression" and doubt and "decimal comma" in doubt:
        raise DataError(f"target {name} {doubt}")
    if task == "regression" and (not pd.api.types.is_numeric_dtype(y) or not np.isfinite(y[keep].astype(float)).all()):
        number = pd.to_numeric(y[keep], errors="coerce").astype(float)
        row = int(np.argmax(~np.isfinite(number)))
        got = f"{checks.quoted(str(y[keep].iloc[row]))} in row {y[keep].index[row]}"
        every = f"; it {doubt}" if doubt else ""
        raise DataError(f"target {name} must hold finite numbers for --task regression, got {got}{every}")
    if task == "regression" and len(far := beyond_float32(y[keep].to_numpy(np.float64))):
        raise DataError(f"target {name} must be within the range of float32, got {far[0]:.6g}")
    if task == "classification":
        members = y.map(y.value_counts())
        rare = sorted({str(label) for label in y[keep & (members < _MEMBERS)]})
        if len(rare) > _LABELS:
            many = f"has {len(rare)} labels of fewer than {_MEMBERS} rows: --task regression?"
            raise DataError(f"target {name} {doubt or many}")
        if rare:
            changes.append(f"classes of fewer than {_MEMBERS} rows left out: {_listed(rare)}")
            keep &= members >= _MEMBERS
    if y[keep].nunique() < 2:
        got = checks.quoted_list(sorted(set(map(str, y[keep])))) or "none"
        gaps = f" in all rows but {(~keep).sum()}, which have no target: check --missing" if not keep.all() else ""
        got = f"{got}{gaps}"
        raise DataError(f"target {name} must take at least two values, got {got}")
    x: Any = frame.x[keep].reset_index(drop=True)
    used = [name for name in x.columns if frame.kinds.get(name) != "drop"]
    if bad := [fault for name in used if (fault := _fault(x[name], frame.decimal))]:
        raise DataError(f"columns must hold numbers or text: {checks.listed(bad, '; ')}")
    if frame.settled:
        text = [name for name in x.columns if x[name].dtype == object]
        x = x.assign(**{name: pd.Categorical(x[name]) for name in text})
    return replace(frame, x=x, y=y[keep].reset_index(drop=True)), changes


def targets_of(y: pd.Series) -> np.ndarray:
    """Returns targets as an array of numbers, booleans or text."""
    return y.to_numpy(str) if not pd.api.types.is_numeric_dtype(y) else y.to_numpy()


def set_schema(model: Any, schema: Schema) -> None:
    """Sets the schema with which a fitted estimator reads tables."""
    model.encoder_ = replace(model.encoder_, schema=schema)
    model.model_ = model.model_.replace(encoder=model.encoder_)


def _fault(values: Any, decimal: str | None) -> str | None:
    """Returns the fault of a column as text, or None; ``decimal`` is the decimal separator of the file."""
    name = checks.quoted(values.name)
    if pd.api.types.is_numeric_dtype(values):
        infinite = int(np.isinf(values.to_numpy(np.float64, na_value=0.0)).sum())
        if infinite:
            return f"{name} has {infinite} infinite values"
        far = beyond_float32(values.to_numpy(np.float64, na_value=0.0))
        return f"{name} has values beyond the range of float32, such as {far[0]:.6g}" if len(far) else None
    if pd.api.types.is_datetime64_any_dtype(values) or isinstance(values.dtype, pd.CategoricalDtype):
        return None
    doubt = _doubt(values, decimal)
    return f"{name} {doubt}" if doubt else None


def _doubt(values: pd.Series, decimal: str | None) -> str | None:
    """Returns why text that looks like numbers or dates is not read as such, and the remedy; None for other text."""
    doubt = doubt_of(values.dropna().astype(str).tolist(), decimal)
    remedy = (
        "try --decimal ," if "decimal comma" in doubt else "use --columns COLUMN=text, or --missing for missing values"
    )
    return f"{doubt}: {remedy}" if doubt else None


def beyond_float32(values: np.ndarray) -> np.ndarray:
    """Returns the finite values beyond the range of float32."""
    if values.dtype.itemsize <= 4:
        return values.ravel()[:0]
    wide = values.astype(np.float64).ravel()
    return wide[np.isfinite(wide) & (np.abs(wide) > np.finfo(np.float32).max)]
