"""From a table as it comes (text, gaps, labels) to numbers, by scikit-learn's encoders and imputers; and what was done,
in words.
"""

from typing import Any, Literal

import numpy as np
import pandas as pd
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder

from experiments.data import DataError, Frame, beyond_float32

Task = Literal["regression", "classification"]

_CATEGORIES = 20  # of a text that become a column of their own, the rarest together
_LABELS = 20  # whole numbers that are taken for classes
_MEMBERS = 5  # rows of a class, without which it cannot be learnt, chosen by and tested


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
      DataError: for a target that the task is not for, or that does not vary.
    """
    y: Any = frame.y
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
    text = [name for name in x.columns if not pd.api.types.is_numeric_dtype(x[name])]
    x[text] = x[text].map(str, na_action="ignore").astype(object)  # truth values with gaps are text here, too
    return Frame(frame.name, x, y[keep].reset_index(drop=True)), said


def columns(x: Any) -> tuple[ColumnTransformer, list[str]]:
    """What turns the columns of a table into numbers, to be fitted to the rows to train on, and what it does.

    Gaps in numbers become the median, and a column of 0 and 1 says where they were; text becomes a column of 0 and 1
    for each of its values, a gap being one of them. Text that is nearly everywhere another, and columns without any
    value are left out.

    Raises:
      DataError: naming all columns that are neither numbers nor text.
    """
    if bad := [what for name in x.columns if (what := _fault(x[name]))]:
        raise DataError(f"columns must hold numbers or text: {'; '.join(bad)}")
    empty = [name for name in x.columns if x[name].isna().all()]
    numbers = [name for name in x.columns if pd.api.types.is_numeric_dtype(x[name]) and name not in empty]
    text = [name for name in x.columns if name not in numbers and name not in empty]
    names = [name for name in text if x[name].nunique() > max(_CATEGORIES, len(x) / 2)]
    text = [name for name in text if name not in names]
    gaps = {name: count for name in numbers if (count := int(x[name].isna().sum()))}
    if not numbers and not text:
        raise DataError("there must be a column to learn from besides the target")
    one_hot: Any = OneHotEncoder(max_categories=_CATEGORIES, handle_unknown="infrequent_if_exist", sparse_output=False)
    impute = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True)
    whole = [name for name in numbers if name not in gaps]
    steps = [("numbers", "passthrough", whole), ("gaps", impute, list(gaps)), ("text", one_hot, text)]
    said = [
        ("text, a column of 0 and 1 for each value", [f"{name} ({_values(x[name])})" for name in text]),
        ("gaps filled by the median and marked", [f"{name} ({count})" for name, count in gaps.items()]),
        ("left out, nearly everywhere another text", names),
        ("left out, without a value", empty),
    ]
    transformer = ColumnTransformer([step for step in steps if step[2]], verbose_feature_names_out=False)
    return transformer, [f"{what}: {', '.join(map(str, which))}" for what, which in said if which]


def _values(text: Any) -> str:
    """How many values a text has, and what becomes of them where they are too many."""
    values = text.nunique(dropna=False)
    return f"{values}" if values <= _CATEGORIES else f"{values} values in {_CATEGORIES} columns, the rarest together"


def _fault(values: Any) -> str | None:
    """What is wrong with a column, if anything is."""
    if pd.api.types.is_numeric_dtype(values):
        infinite = int(np.isinf(values.to_numpy(np.float64, na_value=0.0)).sum())
        if infinite:
            return f"{values.name!r} has {infinite} infinite values"
        far = beyond_float32(values.to_numpy(np.float64, na_value=0.0))
        return f"{values.name!r} has values beyond the range of float32, such as {far[0]:.6g}" if len(far) else None
    text = values.dropna().astype(str)
    number = pd.to_numeric(text, errors="coerce").notna()
    if len(text) and 0.5 < number.mean() < 1:
        return f"{values.name!r} holds numbers and texts such as {text[~number].iloc[0]!r}"
    return f"{values.name!r} {comma}" if (comma := _decimal_comma(text)) else None


def _decimal_comma(text: pd.Series) -> str | None:
    """What to do about texts that are all numbers with a decimal comma, if they are."""
    comma = text.str.fullmatch(r"[-+]?\d+,\d+")
    return f"has a decimal comma, as in {text.iloc[0]!r}: try --decimal ," if len(text) and comma.all() else None
