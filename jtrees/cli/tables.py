"""Tables from files, CSV and Parquet, and their target: what can be learnt from, and clear errors for the rest."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
import warnings

import numpy as np
import pandas as pd

_FEWEST = 20  # rows to train, to validate and to test
_LABELS = 20  # whole numbers that are taken for classes
_MEMBERS = 5  # rows of a class, without which it cannot be learnt, chosen by and tested

Task = Literal["regression", "classification"]


class DataError(ValueError):
    """The data asked for cannot be had; the message says why and what there is."""


@dataclass(frozen=True)
class Frame:
    """A data set as it comes: columns of any kind, perhaps with gaps, and a target of any kind."""

    name: str
    x: pd.DataFrame
    y: pd.Series


def read_table(file: Path, separator: str = ",", decimal: str = ".", *, keep: str | None = None) -> pd.DataFrame:
    """Returns the table in a file: Parquet, if it ends in ``.parquet``, else CSV with a header.

    Args:
      file: the file; in CSV empty fields, ``NA``, ``?`` and the like are gaps, and dates are read if all of a column
        are of ISO 8601.
      separator: what separates two fields of CSV.
      decimal: what separates the whole number and its decimals in CSV.
      keep: name of a column in which dates stay text, or None.

    Raises:
      DataError: for a file that cannot be read.
      ImportError: for Parquet without pyarrow.
    """
    if file.suffix == ".parquet":
        return _read_parquet(file)
    # Unless told that there is no index, pandas takes the first column for one where rows end in a separator.
    options: Any = {
        "sep": separator,
        "decimal": decimal,
        "na_values": ["?"],
        "skipinitialspace": True,
        "index_col": False,
    }
    names: list[str] = []
    try:
        # The header by itself: with a wrong separator rows may be ragged.
        names += [str(column) for column in pd.read_csv(file, nrows=0, **options).columns]
        other = next((c for c in (";", "\t", "|", ",") if c != separator and c in names[0]), None)
        wrong = len(names) == 1 and other is not None
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Length of header", pd.errors.ParserWarning)
            frame: Any = pd.read_csv(file, nrows=0 if wrong else None, **options)
    except pd.errors.ParserWarning as error:
        raise DataError(f"{file}: rows have more fields than the header, which names {', '.join(names)}") from error
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror or one_line(error)}") from error
    except ValueError as error:
        raise DataError(f"cannot read {file}: {one_line(error)}") from error
    if wrong:
        raise DataError(f"{file} has one column, {names[0]!r}: try --separator {other!r}")
    frame.columns = pd.Index(names)
    for name in names:
        if name != keep and _are_dates(frame[name]):
            frame[name] = pd.to_datetime(frame[name], format="ISO8601")
    return frame


def _read_parquet(file: Path) -> pd.DataFrame:
    try:
        frame = pd.read_parquet(file)
    except ImportError as error:
        raise ImportError('Parquet needs pyarrow: pip install "jtrees[cli]"') from error
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror or one_line(error)}") from error
    except ValueError as error:  # pyarrow's own errors are some
        raise DataError(f"cannot read {file}: {one_line(error)}") from error
    frame.columns = pd.Index([str(name) for name in frame.columns])
    return frame


def read_labelled(file: Path, target: str | None, separator: str = ",", decimal: str = ".") -> Frame:
    """Returns the data set in a file, as :func:`read_table`; ``target`` is the column to learn, others are features.

    Raises:
      DataError: for a file that cannot be read, and a column that there is not (saying which are).
    """
    frame = read_table(file, separator, decimal, keep=target)
    names = list(frame.columns)
    if target is None or target not in names:
        came = "none was named" if target is None else f"got {target!r}"
        raise DataError(f"--target must be one of the columns {', '.join(names)}; {came}")
    if len(names) == 1:
        raise DataError(f"{file} must have at least one column besides the target")
    y: Any = frame[target]
    return Frame(file.stem, frame.drop(columns=target), y)


def _are_dates(values: pd.Series) -> bool:
    """Whether all values that a column of text has are dates as of ISO 8601, such as 2024-05-31 or 2024-05-31 12:00."""
    if pd.api.types.is_numeric_dtype(values) or values.isna().all():
        return False
    text = values.dropna().astype(str)
    return bool(text.str.fullmatch(r"\d{4}-\d{2}-\d{2}([ T]\d{2}:\d{2}(:\d{2}(\.\d+)?)?)?").all())


def drop(frame: Frame, names: list[str]) -> Frame:
    """The data set without some of its features.

    Raises:
      DataError: for a feature that there is not (saying which are).
    """
    there = [str(name) for name in frame.x.columns]
    for name in names:
        if name not in there:
            raise DataError(f"--drop must name features among {', '.join(there)}; got {name!r}")
    keep = [name not in names for name in there]
    return Frame(frame.name, frame.x.loc[:, keep], frame.y)


def check_rows(frame: Frame) -> None:
    """Raises :class:`DataError` if there are too few rows to train, choose and test."""
    if len(frame.x) < _FEWEST:
        rows = "a header and no rows" if len(frame.x) == 0 else f"{len(frame.x)} rows"
        raise DataError(f"{frame.name} has {rows}: at least {_FEWEST} are needed to train, choose and test")


def guess(y: Any) -> tuple[Task, str]:
    """The task that a target is for, and why."""
    kinds = y.nunique()
    if not pd.api.types.is_numeric_dtype(y) or pd.api.types.is_bool_dtype(y):
        return "classification", f"{y.name} holds {kinds} labels"
    if kinds <= _LABELS and (y.dropna() % 1 == 0).all():
        return "classification", f"{y.name} holds {kinds} different whole numbers"
    return "regression", f"{y.name} holds {kinds} different numbers"


def usable(frame: Frame, task: Task) -> tuple[Frame, list[str]]:
    """The rows that can be learnt from, and what was left out.

    Raises:
      DataError: for a target that the task is not for, or that does not vary, and for columns that look like numbers
        but are text, all of them.
    """
    y: Any = frame.y
    if not len(frame.x.columns):
        raise DataError("there must be a column to learn from besides the target")
    said: list[str] = []
    keep = y.notna()
    if not keep.all():
        said.append(f"{(~keep).sum()} rows without {y.name} left out")
    comma = None if pd.api.types.is_numeric_dtype(y) else _decimal_comma(y[keep].astype(str))
    if task == "regression" and comma:
        raise DataError(f"target {y.name!r} {comma}")
    if task == "regression" and (not pd.api.types.is_numeric_dtype(y) or not np.isfinite(y[keep].astype(float)).all()):
        raise DataError(f"target {y.name!r} must hold finite numbers for --task regression, got {y[keep].iloc[0]!r}")
    if task == "regression" and len(far := beyond_float32(y[keep].to_numpy(np.float64))):
        raise DataError(f"target {y.name!r} must be within the range of float32, got {far[0]:.6g}")
    if task == "classification":
        members = y.map(y.value_counts())
        rare = sorted({str(label) for label in y[keep & (members < _MEMBERS)]})
        if len(rare) > _LABELS:
            many = f"has {len(rare)} labels of fewer than {_MEMBERS} rows: --task regression?"
            raise DataError(f"target {y.name!r} {comma or many}")
        if rare:
            said.append(f"classes of fewer than {_MEMBERS} rows left out: {', '.join(rare)}")
            keep &= members >= _MEMBERS
    if y[keep].nunique() < 2:
        raise DataError(f"target {y.name!r} must take at least two values, got {sorted(set(map(str, y[keep])))}")
    x: Any = frame.x[keep].reset_index(drop=True)
    if bad := [what for name in x.columns if (what := _fault(x[name]))]:
        raise DataError(f"columns must hold numbers or text: {'; '.join(bad)}")
    return Frame(frame.name, x, y[keep].reset_index(drop=True)), said


def targets_of(y: pd.Series) -> np.ndarray:
    """Returns targets as an array of numbers, booleans or text."""
    return y.to_numpy(str) if not pd.api.types.is_numeric_dtype(y) else y.to_numpy()


def _fault(values: Any) -> str | None:
    """What is wrong with a column, if anything is."""
    if pd.api.types.is_numeric_dtype(values):
        infinite = int(np.isinf(values.to_numpy(np.float64, na_value=0.0)).sum())
        if infinite:
            return f"{values.name!r} has {infinite} infinite values"
        far = beyond_float32(values.to_numpy(np.float64, na_value=0.0))
        return f"{values.name!r} has values beyond the range of float32, such as {far[0]:.6g}" if len(far) else None
    if pd.api.types.is_datetime64_any_dtype(values):
        return None
    text = values.dropna().astype(str)
    number = pd.to_numeric(text, errors="coerce").notna()
    if len(text) and 0.5 < number.mean() < 1:
        return f"{values.name!r} holds numbers and texts such as {text[~number].iloc[0]!r}"
    return f"{values.name!r} {comma}" if (comma := _decimal_comma(text)) else None


def _decimal_comma(text: pd.Series) -> str | None:
    """What to do about texts that are all numbers with a decimal comma, if they are."""
    comma = text.str.fullmatch(r"[-+]?\d+,\d+")
    return f"has a decimal comma, as in {text.iloc[0]!r}: try --decimal ," if len(text) and comma.all() else None


def beyond_float32(values: np.ndarray) -> np.ndarray:
    """The finite values that float32 cannot hold."""
    if values.dtype.itemsize <= 4:
        return values.ravel()[:0]
    wide = values.astype(np.float64).ravel()
    return wide[np.isfinite(wide) & (np.abs(wide) > np.finfo(np.float32).max)]


def one_line(error: Exception) -> str:
    """The message of an error on one line, or its kind."""
    return " ".join(str(error).split()) or type(error).__name__
