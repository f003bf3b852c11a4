"""Classification targets: integer labels ``(n,)``, or soft labels ``(n, k)``, which are class probabilities.

The number of axes distinguishes labels from soft labels, so each compiled program handles one of the two. The loss of a
soft label is the expected loss of a label drawn from its probabilities.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrees import validation as checks
from jtrees.segments import Array, module_of

_TOLERANCE = 1e-3  # on the sum of a row: probabilities may be rounded, or have a short dtype


def is_soft(y: Any) -> bool:
    """Returns whether classification targets are probabilities."""
    return y.ndim == 2


def checked_classes(y: Any, classes: int | None = None) -> tuple[np.ndarray, int]:
    """Returns checked labels in int32, or soft labels in float64 with rows that sum to 1; and the number of classes.

    Args:
      y: labels, or soft labels. The rows of soft labels must sum to 1 within a tolerance of 0.001.
      classes: number of classes; None: inferred.

    Raises:
      ValueError: for soft labels with the wrong number of classes, or with rows that hold negative numbers or do not
        sum to 1. Also in the cases of :func:`jtrees.validation.check_labels`.
    """
    checks.check_unmasked("y", y)
    if np.ndim(y) != 2:
        return checks.check_labels(y, classes)
    y = np.asarray(checks.as_numeric("y", y)).astype(np.float64, order="C")
    _check_width(y.shape, classes)
    checks.check_finite("y", y)
    if (y < 0).any():
        row, column = np.argwhere(y < 0)[0].tolist()
        raise ValueError(f"y must hold probabilities of at least 0, got {y[row, column]:.6g} at {(row, column)}")
    sums = y.sum(1, keepdims=True)
    wrong = np.abs(sums[:, 0] - 1) > _TOLERANCE
    if wrong.any():
        row = int(np.argmax(wrong))
        got = f"got the sum {sums[row, 0]:.6g} in row {row}"
        raise ValueError(f"y must hold probabilities of the classes in rows that sum to 1, {got}")
    return y / sums, y.shape[1]


def checked_weight(class_weight: Any, classes: int) -> tuple[float, ...]:
    """Returns the checked class weights.

    Raises:
      ValueError: if ``class_weight`` does not hold one number above 0 for each class.
    """
    weights = np.asarray(class_weight, np.float64)
    if weights.shape != (classes,) or not (np.isfinite(weights) & (weights > 0)).all():
        given = checks.quoted(class_weight)
        raise ValueError(f"class_weight must be {classes} numbers above 0, one a class, got {given}")
    return tuple(weights.tolist())


def check_traced(y: Any, classes: int) -> None:
    """Raises ``ValueError`` if the targets, which may be traced, are not labels or soft labels of these classes."""
    if is_soft(y) and jnp.issubdtype(y.dtype, jnp.floating):
        _check_width(y.shape, classes)
    else:
        checks.check_classes(y, classes)


def _check_width(shape: tuple[int, ...], classes: int | None) -> None:
    if shape[0] < 1 or shape[1] < 2:
        repair = ": use y[:, 0] for labels" if shape[1] == 1 else ""
        raise ValueError(f"y must hold labels, (n,), or probabilities of classes, (n, K), got shape {shape}{repair}")
    if classes is not None and shape[1] != classes:
        raise ValueError(f"y must hold probabilities of {classes} classes, (n, {classes}), got shape {shape}")


def shares(y: Any, classes: int, dtype: Any = None) -> Any:
    """Returns the class probabilities, ``(n, classes)``: soft labels unchanged, labels one-hot encoded.

    If ``dtype`` is None, NumPy arrays are in double precision.
    """
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


def weighed(y: np.ndarray, class_weight: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the targets and the factors of the row weights that apply the class weights.

    The factor of a soft label is the expected class weight. The soft label is reweighted by the class weights and
    normalised, so that the factor times the loss is ``sum_k class_weight_k y_k loss_k``.
    """
    each = np.asarray(class_weight) * shares(y, len(class_weight))
    factors = each.sum(1)
    return (each / factors[:, None] if is_soft(y) else y), factors


def share_of(y: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Returns the probability of ``label`` in each row, ``(n,)``. For hard labels this is 1 or 0."""
    return y[np.arange(len(y)), label] if is_soft(y) else (y == label).astype(np.float64)


def expected(y: Array, of_class: Any) -> Array:
    """Returns the expected loss under soft labels. ``of_class(label) -> (n,)`` is the loss of a label."""
    each = jax.vmap(of_class)(jnp.arange(y.shape[1], dtype=jnp.int32))
    return (y.T.astype(each.dtype) * each).sum(0)
