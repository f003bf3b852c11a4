"""Classification targets: integer labels ``(n,)``, or soft labels ``(n, k)``, which are class probabilities.

The number of axes distinguishes them. The loss of a soft label is the expected loss of a label drawn from it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrees import validation as checks
from jtrees.segments import module_of

# Kinds of labels of several types. A boolean is also a number in Python.
_KINDS: dict[str, Any] = {"number": (int, float, np.number, np.bool_), "text": str}
_BOOLEAN = (bool, np.bool_)
_TOLERANCE = 1e-3  # on the sum of a row: probabilities may be rounded, or have a short dtype


def is_soft(y: Any) -> bool:
    """Returns whether classification targets are probabilities."""
    return y.ndim == 2


def checked_classes(y: Any, classes: int | None = None) -> np.ndarray:
    """Returns checked labels in int32, or soft labels in float64 with rows that sum to 1 (within a tolerance of 0.001).

    The number of classes is inferred if it is None. Raises ``ValueError`` for other targets.
    """
    checks.check_unmasked("y", y)
    if np.ndim(y) != 2:
        return check_labels(y, classes)
    _check_width(np.shape(y), classes)
    y = checks.as_finite("y", y)
    if (y < 0).any():
        row, column = np.argwhere(y < 0)[0].tolist()
        raise ValueError(f"y must hold probabilities of at least 0, got {y[row, column]:.6g} at {(row, column)}")
    sums = y.sum(1, keepdims=True)
    wrong = np.abs(sums[:, 0] - 1) > _TOLERANCE
    if wrong.any():
        row = int(np.argmax(wrong))
        got = f"got the sum {sums[row, 0]:.6g} in row {row}"
        raise ValueError(f"y must hold probabilities of the classes in rows that sum to 1, {got}")
    return y / sums


def check_labels(y: Any, classes: int | None = None) -> np.ndarray:
    """Returns checked class labels 0..K-1, ``(n,)``, as int32; K is at least two."""
    # If the number of classes is None, it is inferred, and every class must be present.
    encode = "encode them, e.g. labels, y = np.unique(y, return_inverse=True)"
    if classes is not None:  # a validation set may lack classes, which would change the numbers
        encode = "encode them by the sorted labels of all classes, e.g. y = np.searchsorted(labels, y)"
    y, unclear = label_array(y)
    y = y if unclear or y.dtype != object else np.array(y.tolist())  # booleans and numbers
    if y.ndim != 1 or len(y) == 0:
        raise ValueError(f"y must have shape (n,) with n at least 1, got shape {y.shape}")
    if unclear:
        raise ValueError(f"y must hold whole numbers 0..K-1 in classification, got {unclear}")
    if y.dtype.kind == "f":
        checks.check_finite("y", y)
    odd = y if y.dtype.kind not in "biuf" else y[y != np.floor(y)] if y.dtype.kind == "f" else y[:0]
    if len(odd):
        raise ValueError(f"y must hold whole numbers 0..K-1 in classification, got {checks.quoted(odd[0])}: {encode}")
    present = np.unique(y)
    low, high = int(present[0]), int(present[-1])
    if low < 0 or (classes is not None and high >= classes):
        allowed = "0..K-1" if classes is None else f"0..{classes - 1}"
        raise ValueError(f"y must hold classes {allowed}, got labels from {low} to {high}: {encode}")
    if classes is None:
        absent = np.flatnonzero(present != np.arange(len(present)))
        if len(absent):
            raise ValueError(f"y must hold every class 0..{high}, got no sample of class {absent[0]}: {encode}")
        if high == 0:
            raise ValueError("y must hold at least two classes to learn from, got one")
    return y.astype(np.int32)


def label_array(y: Any) -> tuple[np.ndarray, str]:
    """Returns labels of any type as an array, and a description of missing labels or mixed types, or ``""``."""
    # The array is numeric if all labels are numbers, or all are booleans. It must have no masked values.
    checks.check_unmasked("y", y)
    labels = np.asarray(y)
    is_list = isinstance(y, (list, tuple)) and labels.ndim == 1
    has_booleans = is_list and labels.dtype.kind in "iuf" and any(isinstance(label, _BOOLEAN) for label in y)
    if has_booleans or (is_list and labels.dtype.kind in "SU"):  # NumPy converts mixed types, and cuts null characters
        labels = np.asarray(y, object)
    if labels.ndim != 1 or labels.dtype.kind not in "OmM" or not len(labels):
        return labels, ""
    gaps = np.isnat(labels) if labels.dtype.kind in "mM" else np.array([checks.is_missing(label) for label in labels])
    if gaps.any():
        row = int(gaps.argmax())
        return labels, f"{checks.quoted(labels[row])} in row {row}: leave rows without a label out"
    if labels.dtype.kind != "O":
        return labels, ""
    kind = _kind(labels[0])
    for i, label in enumerate(labels):
        is_named = isinstance(kind, str) or isinstance(_kind(label), str)
        is_related = isinstance(label, type(labels[0])) or isinstance(labels[0], type(label))
        if _kind(label) != kind and (is_named or not is_related):
            got = f"{checks.quoted(labels[0])} and {checks.quoted(label)} (in row {i})"
            return labels, f"{got}: make labels one type, then encode them"
    is_mixed = len({isinstance(label, _BOOLEAN) for label in labels}) > 1
    if (kind == "number" and not is_mixed) or (kind == "text" and is_list):
        plain = np.array(labels.tolist())
        return (plain if plain.tolist() == labels.tolist() else labels), ""
    return labels, ""


def _kind(label: Any) -> Any:
    """Returns the kind of a label: the name of a kind, or the type of the label."""
    return next((name for name, types in _KINDS.items() if isinstance(label, types)), type(label))


def coded_labels(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sorted distinct labels, and the number of each label among them, ``(n,)``."""
    # Labels without an order, such as those of an enumeration, are sorted by their text.
    if labels.dtype != object:
        return np.unique(labels, return_inverse=True)
    distinct: Any = dict.fromkeys(labels.tolist())
    try:
        distinct = sorted(distinct)
    except TypeError:
        distinct = sorted(distinct, key=str)
    places = {label: place for place, label in enumerate(distinct)}
    classes = np.empty(len(distinct), object)
    classes[:] = distinct
    return classes, np.array([places[label] for label in labels.tolist()], int)


def check_traced(y: Any, classes: int) -> None:
    """Raises ``ValueError`` if the targets, which may be traced, are not labels or soft labels of these classes."""
    if is_soft(y) and jnp.issubdtype(y.dtype, jnp.floating):
        _check_width(y.shape, classes)
        return
    if not jnp.issubdtype(y.dtype, jnp.integer):
        raise ValueError(f"y must hold whole numbers 0..{classes - 1} in classification, got {y.dtype}")
    if checks.is_traced(y) or not y.size:
        return
    y = np.asarray(y)  # NumPy operations are not traced
    if y.min() < 0 or y.max() >= classes:
        raise ValueError(f"y must hold classes 0..{classes - 1}, got labels from {y.min()} to {y.max()}")


def _check_width(shape: tuple[int, ...], classes: int | None) -> None:
    if shape[0] < 1 or shape[1] < 2:
        repair = ": use y[:, 0] for labels" if shape[1] == 1 else ""
        raise ValueError(f"y must hold labels, (n,), or probabilities of classes, (n, K), got shape {shape}{repair}")
    if classes is not None and shape[1] != classes:
        raise ValueError(f"y must hold probabilities of {classes} classes, (n, {classes}), got shape {shape}")


def shares(y: Any, classes: int, dtype: Any = None) -> Any:
    """Returns the class probabilities, ``(n, classes)``: soft labels unchanged, labels one-hot encoded."""
    # If `dtype` is None, NumPy arrays are in double precision.
    xp = module_of(y)
    dtype = xp.result_type(float) if dtype is None else dtype
    dtype = dtype if xp is np else jax.dtypes.canonicalize_dtype(dtype)
    if is_soft(y):
        return y.astype(dtype)
    if xp is np:
        return np.eye(classes, dtype=dtype)[y]
    return jax.nn.one_hot(y, classes, dtype=dtype)


def most_probable(y: Any) -> Any:
    """Returns labels unchanged, and the most probable class of each soft label, ``(n,)``."""
    return y.argmax(1) if is_soft(y) else y
