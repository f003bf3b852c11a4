"""Baselines: errors of a constant and a linear model, and a warning for fits that are worse."""

from typing import Any
import warnings

import numpy as np

from jtrees.data.scaling import Scaling
from jtrees.data.table import Table

_ROWS = 10_000  # at most: least squares then takes less time than any search
_DECOMPOSED = 200  # rows or columns up to which a matrix is decomposed as it is
_RANK = 1e-6  # singular values below this part of the largest count as 0
_BEHIND = 0.02  # tolerance, as a part of the variance of the targets


class BehindBaselineWarning(UserWarning):
    """A fit explains less of the targets than a linear model, or than a constant."""


def baselines(model: Any, table: Table, validation: Table | None, scaling: Scaling) -> dict[str, float]:
    """Returns mean squared errors, relative to the variance of the targets, of a model, a linear model and a constant.

    Classes are scored by their indicators (the Brier score), several outputs by the mean. Errors are those on the
    validation set, or else on the training data; there the linear model is corrected for its degrees of freedom
    (generalised cross-validation) and the model is not, so that only underfitting counts. Large tables are subsampled.

    Args:
      model: the fitted model.
      table: the training data, in the user's units.
      validation: the validation set, or None.
      scaling: scaling of the features.

    Returns:
      ``model``, ``linear`` (least squares) and ``constant`` (the mean of the training targets).
    """
    evaluated = table if validation is None else validation
    evaluated = evaluated.rows(_some(len(evaluated.x)))
    outputs = np.asarray(model.predict(evaluated.x), np.float64).reshape(len(evaluated.x), -1)
    (x, y, weight), (x_eval, y_eval, weight_eval) = (_of_some_rows(each, scaling) for each in (table, evaluated))
    mean = np.average(y, axis=0, weights=weight)
    deviation = np.sqrt(np.average(np.square(y - mean), axis=0, weights=weight))
    unit = np.where(deviation > 0, deviation, 1)
    error = lambda outputs: float(np.average(np.square((outputs - y_eval) / unit).mean(1), weights=weight_eval))

    root = np.sqrt(weight / weight.sum())[:, None]
    slopes, rank = least_squares(root * x, root * (y - mean))
    linear = error(mean + x_eval @ slopes)
    if validation is None:
        degrees = 1 - rank / len(x)
        linear = linear / float(degrees) ** 2 if degrees > _RANK else np.inf
    return {"model": error(outputs), "linear": linear, "constant": error(mean)}


def least_squares(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns the shortest least-squares solution, and the rank of x.

    If x is long and wide, the products of its shorter side are inverted instead of a decomposition of x, with a ridge
    in place of the smallest singular value that counts: in a tenth of the time. The rank is then the number of degrees
    of freedom.
    """
    if min(x.shape) <= _DECOMPOSED:
        slopes, _, rank, _ = np.linalg.lstsq(x, y, rcond=_RANK)
        return slopes, float(rank)
    wide = x.shape[1] > len(x)
    products = x @ x.T if wide else x.T @ x
    ridge = _RANK**2 * np.trace(products)
    inverse = np.linalg.inv(products + ridge * np.eye(len(products)))
    slopes = x.T @ (inverse @ y) if wide else inverse @ (x.T @ y)
    return slopes, len(products) - ridge * float(np.trace(inverse))


def _some(n: int) -> slice:
    return slice(None, None, -(-n // _ROWS))


def _of_some_rows(table: Table, scaling: Scaling) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns scaled features with a column of ones, targets or class indicators ``(n, k)``, and weights."""
    table = table.rows(_some(len(table.x)))
    y = table.task.indicators(table.y)
    weight = np.ones(len(y)) if table.weight is None else table.weight
    x = np.asarray(scaling.transform(table.x), np.float64)
    return np.column_stack([x, np.ones(len(x))]), y.astype(np.float64), weight


def warn_if_behind(errors: dict[str, float], name: str, where: str) -> None:
    """Warns with :class:`BehindBaselineWarning` if the model of the recipe ``name`` is worse than its baselines."""
    best = "linear" if errors["linear"] < errors["constant"] else "constant"
    if errors["model"] > errors[best] + _BEHIND:
        share = lambda which: f"{100 * (1 - errors[which]):.1f} %"
        warnings.warn(
            f"{name} explains {share('model')} of the variance of y {where}, a {best} model {share(best)}: "
            "other options or another recipe may do better",
            BehindBaselineWarning,
            stacklevel=3,
        )
