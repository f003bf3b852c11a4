"""Data by name: a folder of .npz files, scikit-learn's bundled sets, OpenML; or a user's own CSV."""

from dataclasses import dataclass
import os
from pathlib import Path

import numpy as np

BUNDLED = ("diabetes",)
ON_OPENML = {"mnist": "mnist_784"}  # where the name is another


class DataError(ValueError):
    """The data asked for cannot be had; the message says why and what there is."""


@dataclass(frozen=True)
class Table:
    """A data set: ``x`` float32 ``(n, p)``, ``y`` ``(n,)`` float32 or, in classification, int32; the names of its
    columns; and where it has parts of its own, ``split`` ``(n,)``: 0 to train, 1 to validate, 2 to test.
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


def load(
    name: str | None = None,
    *,
    data_dir: str | os.PathLike | None = None,
    csv: str | os.PathLike | None = None,
    target: str | None = None,
) -> Table:
    """A table by name, or from a file.

    Args:
      name: a file ``<name>.npz`` of the folder, a bundled set, or the name of a set on OpenML, in this order; by
        default the bundled ``diabetes``.
      data_dir: a folder of ``.npz`` files with ``X`` and ``y``; by default the environment variable JTREES_DATA.
      csv: a CSV file with a header, instead of a name.
      target: the column of the CSV to learn; all others are features.

    Raises:
      DataError: for a set or column that does not exist (saying which do), and for columns that are not numbers.
    """
    if csv is not None:
        return _from_csv(Path(csv), target)
    if name is None:
        return _from_sklearn(BUNDLED[0])
    folder = data_dir or os.environ.get("JTREES_DATA")
    there = sorted(file.stem for file in folder_of(folder).glob("*.npz")) if folder is not None else []
    if name in there:
        return _from_npz(folder_of(folder) / f"{name}.npz")
    if name in BUNDLED:
        return _from_sklearn(name)
    return _from_openml(name, there)


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


def _from_npz(file: Path) -> Table:
    with np.load(file) as arrays:
        if not {"X", "y"} <= set(arrays.files):
            raise DataError(f"{file.name} must hold arrays X and y, got {sorted(arrays.files)}")
        x, y, split = arrays["X"], arrays["y"], arrays["split"] if "split" in arrays.files else None
    if x.ndim != 2 or y.shape != x.shape[:1] or x.dtype.kind not in "biuf":
        raise DataError(f"{file.name} must hold numbers X (n, p) and y (n,), got shapes {x.shape} and {y.shape}")
    y = y.astype(np.float32 if y.dtype.kind == "f" else np.int32)
    return Table(file.stem, x.astype(np.float32), y, [f"x{i}" for i in range(x.shape[1])], split)


def _from_sklearn(name: str) -> Table:
    from sklearn import datasets

    bunch = getattr(datasets, f"load_{name}")()
    return Table(name, bunch.data.astype(np.float32), bunch.target.astype(np.float32), list(bunch.feature_names))


def _from_csv(file: Path, target: str | None) -> Table:
    import pandas as pd

    try:
        frame = pd.read_csv(file)
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {file}: {error}") from error
    if target is None or target not in frame.columns:
        came = "none was named" if target is None else f"got {target!r}"
        raise DataError(f"target must be one of the columns {', '.join(map(str, frame.columns))}; {came}")
    return _from_frame(file.stem, frame.drop(columns=target), frame[target])


def _from_openml(name: str, there: list[str]) -> Table:
    from sklearn.datasets import fetch_openml

    try:
        bunch = fetch_openml(name=ON_OPENML.get(name, name), as_frame=True, parser="auto")
    except Exception as error:  # of many kinds: network, HTTP, parser, unknown name
        known = ", ".join([*there, *(b for b in BUNDLED if b not in there)])
        raise DataError(f"unknown data set {name!r}: here are {known}; OpenML said: {_one_line(error)}") from error
    if bunch.target is None:
        raise DataError(f"data set {name!r} on OpenML names no target column")
    return _from_frame(name, bunch.data, bunch.target)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _from_frame(name: str, features, target) -> Table:
    import pandas as pd

    classes = isinstance(target.dtype, pd.CategoricalDtype)
    if classes:  # numbered in the order of the categories
        target = target.cat.codes.replace(-1, np.nan)
    for column in [*features.columns, None]:
        values = target if column is None else features[column]
        what = "the target" if column is None else f"column {column!r}"
        if not pd.api.types.is_numeric_dtype(values):
            raise DataError(f"{what} must be numeric, got values such as {values.iloc[0]!r}: encode it first")
        if not np.isfinite(values.to_numpy(np.float64, na_value=np.nan)).all():
            raise DataError(f"{what} must have no missing or infinite values")
    if features.shape[1] == 0:
        raise DataError("there must be at least one column besides the target")
    y = target.to_numpy(np.int32 if classes else np.float32)
    return Table(name, features.to_numpy(np.float32), y, [str(column) for column in features.columns])
