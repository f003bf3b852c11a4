"""Data by name: the embedded set, a folder of .npz files, scikit-learn's bundled sets, OpenML; or a user's own CSV."""

from dataclasses import dataclass, replace
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn.model_selection import train_test_split

from jtrees.cli.files import DataError as DataError, one_line
from jtrees.cli.tables import LabelledTable

# kin8nm: the distance of the end of a simulated robot arm from a target, by the angles of its eight joints. It has 8192
# rows, is strongly nonlinear and has some noise. It comes from the DELVE repository of the University of Toronto and is
# in the public domain; OpenML 189.
EMBEDDED = Path(__file__).parent / "embedded"
DEFAULT = "kin8nm"
COLUMNS = {DEFAULT: [f"theta{i}" for i in range(1, 9)]}
BUNDLED = ("breast_cancer", "diabetes", "digits", "iris", "wine")  # sets of scikit-learn
ON_OPENML = {"mnist": "mnist_784"}  # sets with another name on OpenML


@dataclass(frozen=True)
class Table:
    """A data set of numbers.

    Attributes:
      name: name of the set.
      x: features ``(n, p)``, float32.
      y: targets ``(n,)``, float32, or int32 in classification.
      feature_names: names of the features.
      split: published parts ``(n,)``, 0 for training, 1 for validation, 2 for test; None if there are none.
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
    """Returns a table of numbers by name; see :func:`load_frame`.

    Raises:
      DataError: the set does not exist (the message lists the existing sets), or columns are not numbers.
    """
    file = _file(name, data_dir)
    return _from_npz(file) if file is not None else _numbers(load_frame(name, data_dir=data_dir))


def load_frame(name: str = DEFAULT, *, data_dir: str | os.PathLike | None = None) -> LabelledTable:
    """Returns a data set by name.

    Args:
      name: a file ``<name>.npz`` of the folder, the embedded set, a set of scikit-learn, or the name of a set on
        OpenML, in this order.
      data_dir: a folder of ``.npz`` files with ``X`` and ``y``; by default the environment variable JTREES_DATA.

    Raises:
      DataError: the set does not exist (the message lists the existing sets).
    """
    if (file := _file(name, data_dir)) is not None:
        table = _from_npz(file)
        return LabelledTable(
            name, pd.DataFrame(table.x, columns=pd.Index(table.feature_names)), pd.Series(table.y, name="y")
        )
    return _from_sklearn(name) if name in BUNDLED else _from_openml(name, data_dir)


def load_as_published(name: str, data_dir: str | None) -> tuple[Table, np.ndarray | None]:
    """Returns a table as in the papers (connect-4 one-hot encoded), and a mask of its published test rows or None."""
    table = load(name, data_dir=data_dir)
    if name == "connect-4":
        table = replace(table, x=one_hot(table.x))
    test = None if table.split is None else table.split == 2
    return table, test if test is not None and test.any() else None


def one_hot(x: np.ndarray) -> np.ndarray:
    """Returns an indicator column per column and value, with the values of all columns: the papers' connect-4."""
    return np.concatenate([(x == value).astype(np.float32) for value in np.unique(x)], axis=1)


def split(x: np.ndarray, y: np.ndarray, seed: int, share: float = 0.75, limit: int | None = None) -> Any:
    """Returns training and test features, and training and test targets: a random split, stratified by class.

    Args:
      x: features ``(n, p)``.
      y: targets ``(n,)``; numbers are not stratified.
      seed: seed of the split.
      share: share of the training rows.
      limit: upper limit of the training rows, and of the test rows.
    """
    sizes: dict[str, Any] = {"train_size": share}
    if limit is not None:
        train = min(limit, int(share * len(y)))
        sizes = {"train_size": train, "test_size": min(limit, len(y) - train)}
    return train_test_split(x, y, **sizes, random_state=seed, stratify=None if y.dtype.kind == "f" else y)


def split_of(name: str, seed: int, data_dir: str | None, **options: Any) -> Any:
    """Returns :func:`split` of a set, by its name."""
    table = load(name, data_dir=data_dir)
    return split(table.x, table.y, seed, **options)


def folder_of(data_dir: str | os.PathLike | None) -> Path:
    """Returns the folder of ``.npz`` files, by default the environment variable JTREES_DATA.

    Raises:
      DataError: there is no such folder.
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
        wide = values.astype(np.float64)
        if len(far := wide[np.isfinite(wide) & (np.abs(wide) > np.finfo(np.float32).max)]):
            raise DataError(f"{name} of {file.name} must be within the range of float32, got {far[0]:.6g}")
    y = y.astype(np.float32 if y.dtype.kind == "f" else np.int32)
    names = COLUMNS.get(file.stem, [])
    names = names if len(names) == x.shape[1] else [f"x{i}" for i in range(x.shape[1])]
    return Table(file.stem, x.astype(np.float32), y, names, split)


def _from_sklearn(name: str) -> LabelledTable:
    from sklearn import datasets

    bunch = getattr(datasets, f"load_{name}")(as_frame=True)
    y = bunch.target
    if "target_names" in bunch:  # of classes
        y = pd.Series(pd.Categorical.from_codes(y, list(bunch.target_names)), name="target")
    return LabelledTable(name, bunch.data, y)


def _from_openml(name: str, data_dir: str | os.PathLike | None) -> LabelledTable:
    from sklearn.datasets import fetch_openml

    try:
        bunch = fetch_openml(name=ON_OPENML.get(name, name), as_frame=True, parser="auto")
    except Exception as error:  # many kinds: network, HTTP, parser, unknown name
        names = {file.stem for folder in _folders(data_dir) for file in folder.glob("*.npz")}
        listed = ", ".join(sorted(names | set(BUNDLED)))
        raise DataError(f"unknown data set {name!r}: here are {listed}; OpenML said: {one_line(error)}") from error
    if bunch.target is None:
        raise DataError(f"data set {name!r} on OpenML names no target column")
    return LabelledTable(name, bunch.data, bunch.target)


def _numbers(frame: LabelledTable) -> Table:
    """Returns the table as numbers; classes are numbered in the order of the categories."""
    y: Any = frame.y
    classes = isinstance(y.dtype, pd.CategoricalDtype)
    if classes:
        y = y.cat.codes.replace(-1, np.nan)
    columns = {f"column {column!r}": frame.x[column] for column in frame.x.columns}
    for label, values in [*columns.items(), ("the target", y)]:
        if not pd.api.types.is_numeric_dtype(values):
            raise DataError(f"{label} must be numeric, got values such as {values.iloc[0]!r}")
        if not np.isfinite(values.to_numpy(np.float64, na_value=np.nan)).all():
            raise DataError(f"{label} must have no missing or infinite values")
    names = [str(column) for column in frame.x.columns]
    return Table(frame.name, frame.x.to_numpy(np.float32), y.to_numpy(np.int32 if classes else np.float32), names)
