"""Data by name: the embedded set, a folder of .npz files, scikit-learn's bundled sets, OpenML; or a user's own CSV."""

from dataclasses import dataclass, replace
import os
from pathlib import Path
from typing import Any, Literal
import warnings

import numpy as np
import pandas as pd

# kin8nm: how far the end of a simulated robot arm of eight joints is from a target, from the angles of the joints; 8192
# rows, strongly nonlinear, with some noise. From the DELVE repository of the University of Toronto, in the public
# domain; OpenML 189.
EMBEDDED = Path(__file__).parent / "embedded"
DEFAULT = "kin8nm"
COLUMNS = {DEFAULT: [f"theta{i}" for i in range(1, 9)]}
BUNDLED = ("breast_cancer", "diabetes", "digits", "iris", "wine")  # scikit-learn's
ON_OPENML = {"mnist": "mnist_784"}  # where the name is another
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


@dataclass(frozen=True)
class Table:
    """A data set of numbers: ``x`` float32 ``(n, p)``, ``y`` ``(n,)`` float32 or, in classification, int32; the names
    of its columns; and where it has parts of its own, ``split`` ``(n,)``: 0 to train, 1 to validate, 2 to test.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    feature_names: list[str]
    split: np.ndarray | None = None

    @property
    def is_classification(self) -> bool:
        """Whether y holds classes."""
        return self.y.dtype.kind != "f"


def load(name: str = DEFAULT, *, data_dir: str | os.PathLike | None = None) -> Table:
    """A table of numbers by name: see :func:`load_frame`.

    Raises:
      DataError: for a set that does not exist (saying which do), and for columns that are not numbers.
    """
    file = _file(name, data_dir)
    return _from_npz(file) if file is not None else _numbers(load_frame(name, data_dir=data_dir))


def load_frame(name: str = DEFAULT, *, data_dir: str | os.PathLike | None = None) -> Frame:
    """A data set by name.

    Args:
      name: a file ``<name>.npz`` of the folder, the embedded set, one of scikit-learn's, or the name of a set on
        OpenML, in this order.
      data_dir: a folder of ``.npz`` files with ``X`` and ``y``; by default the environment variable JTREES_DATA.

    Raises:
      DataError: for a set that does not exist (saying which do).
    """
    if (file := _file(name, data_dir)) is not None:
        table = _from_npz(file)
        return Frame(name, pd.DataFrame(table.x, columns=pd.Index(table.feature_names)), pd.Series(table.y, name="y"))
    return _from_sklearn(name) if name in BUNDLED else _from_openml(name, data_dir)


def load_as_published(name: str, data_dir: str | None) -> tuple[Table, np.ndarray | None]:
    """A table as the papers have it, connect-4 one-hot encoded, and which rows are its own test part, if any."""
    table = load(name, data_dir=data_dir)
    if name == "connect-4":
        table = replace(table, x=one_hot(table.x))
    test = None if table.split is None else table.split == 2
    return table, test if test is not None and test.any() else None


def one_hot(x: np.ndarray) -> np.ndarray:
    """A column for each column and each value that any of them has, 1 where it has that: as papers take connect-4."""
    return np.concatenate([(x == value).astype(np.float32) for value in np.unique(x)], axis=1)


def read_csv(file: Path, target: str | None, separator: str = ",", decimal: str = ".") -> Frame:
    """A data set from a CSV file with a header.

    Args:
      file: the file; empty fields, ``NA``, ``?`` and the like are gaps, and dates are read if all of a column are of
        ISO 8601.
      target: the column to learn; all others are features.
      separator: what stands between two fields.
      decimal: what stands between the whole number and its decimals.

    Raises:
      DataError: for a file that cannot be read or has too few rows, and a column that there is not (saying which are).
    """
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
    if target is None or target not in names:
        came = "none was named" if target is None else f"got {target!r}"
        raise DataError(f"--target must be one of the columns {', '.join(names)}; {came}")
    if len(names) == 1:
        raise DataError(f"{file} must have at least one column besides the target")
    for name in names:
        if name != target and _are_dates(frame[name]):
            frame[name] = pd.to_datetime(frame[name], format="ISO8601")
    return Frame(file.stem, frame.drop(columns=target), frame[target])


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


def folder_of(data_dir: str | os.PathLike | None) -> Path:
    """The folder of ``.npz`` files, by default that of the environment variable JTREES_DATA.

    Raises:
      DataError: if there is none.
    """
    folder = data_dir or os.environ.get("JTREES_DATA")
    if not folder:
        raise DataError("a data folder must be named, or JTREES_DATA set")
    if not Path(folder).is_dir():
        raise DataError(f"data folder {folder} does not exist")
    return Path(folder)


def _folders(data_dir: str | os.PathLike | None) -> list[Path]:
    named = data_dir or os.environ.get("JTREES_DATA")
    return [*([folder_of(named)] if named else []), EMBEDDED]


def _file(name: str, data_dir: str | os.PathLike | None) -> Path | None:
    files = (folder / f"{name}.npz" for folder in _folders(data_dir))
    return next((file for file in files if file.is_file()), None)


def _from_npz(file: Path) -> Table:
    with np.load(file) as arrays:
        if not {"X", "y"} <= set(arrays.files):
            raise DataError(f"{file.name} must hold arrays X and y, got {sorted(arrays.files)}")
        x, y, split = arrays["X"], arrays["y"], arrays["split"] if "split" in arrays.files else None
    if x.ndim != 2 or y.shape != x.shape[:1] or x.dtype.kind not in "biuf":
        raise DataError(f"{file.name} must hold numbers X (n, p) and y (n,), got shapes {x.shape} and {y.shape}")
    for name, values in (("X", x), ("y", y)):
        if len(far := beyond_float32(values)):
            raise DataError(f"{name} of {file.name} must be within the range of float32, got {far[0]:.6g}")
    y = y.astype(np.float32 if y.dtype.kind == "f" else np.int32)
    names = COLUMNS.get(file.stem, [])
    names = names if len(names) == x.shape[1] else [f"x{i}" for i in range(x.shape[1])]
    return Table(file.stem, x.astype(np.float32), y, names, split)


def _from_sklearn(name: str) -> Frame:
    from sklearn import datasets

    bunch = getattr(datasets, f"load_{name}")(as_frame=True)
    y = bunch.target
    if "target_names" in bunch and name != "digits":  # classes by name
        y = pd.Series(np.asarray(bunch.target_names)[y], name="target")
    return Frame(name, bunch.data, y)


def _from_openml(name: str, data_dir: str | os.PathLike | None) -> Frame:
    from sklearn.datasets import fetch_openml

    try:
        bunch = fetch_openml(name=ON_OPENML.get(name, name), as_frame=True, parser="auto")
    except Exception as error:  # of many kinds: network, HTTP, parser, unknown name
        here = {file.stem for folder in _folders(data_dir) for file in folder.glob("*.npz")}
        known = ", ".join(sorted(here | set(BUNDLED)))
        raise DataError(f"unknown data set {name!r}: here are {known}; OpenML said: {one_line(error)}") from error
    if bunch.target is None:
        raise DataError(f"data set {name!r} on OpenML names no target column")
    return Frame(name, bunch.data, bunch.target)


def beyond_float32(values: np.ndarray) -> np.ndarray:
    """The finite values that float32 cannot hold."""
    if values.dtype.itemsize <= 4:
        return values.ravel()[:0]
    wide = values.astype(np.float64).ravel()
    return wide[np.isfinite(wide) & (np.abs(wide) > np.finfo(np.float32).max)]


def one_line(error: Exception) -> str:
    """The message of an error on one line, or its kind."""
    return " ".join(str(error).split()) or type(error).__name__


def _numbers(frame: Frame) -> Table:
    """The same as numbers, classes numbered in the order of the categories."""
    y: Any = frame.y
    classes = isinstance(y.dtype, pd.CategoricalDtype)
    if classes:
        y = y.cat.codes.replace(-1, np.nan)
    columns = {f"column {column!r}": frame.x[column] for column in frame.x.columns}
    for what, values in [*columns.items(), ("the target", y)]:
        if not pd.api.types.is_numeric_dtype(values):
            raise DataError(f"{what} must be numeric, got values such as {values.iloc[0]!r}")
        if not np.isfinite(values.to_numpy(np.float64, na_value=np.nan)).all():
            raise DataError(f"{what} must have no missing or infinite values")
    names = [str(column) for column in frame.x.columns]
    return Table(frame.name, frame.x.to_numpy(np.float32), y.to_numpy(np.int32 if classes else np.float32), names)
