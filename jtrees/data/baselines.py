"""Whether a model does better than a constant and a linear model: a fit that does not says so."""

from typing import Any
import warnings

import numpy as np

from jtrees.data.scaling import Scaling
from jtrees.data.table import Table

_ROWS = 10_000  # at most, of which a linear model takes less time than any search
_BEHIND = 0.02  # of the variance of the targets


class BehindBaselineWarning(UserWarning):
    """A fit explains less of the targets than a linear model, or than a constant."""


def baselines(model: Any, table: Table, validation: Table | None, scaling: Scaling) -> dict[str, float]:
    """Mean squared errors in units of the variance of the targets, of classes those of their indicators (the Brier
    score); of several outputs the mean.

    On the validation set, or else on the training data. There the linear model is charged for its degrees of freedom
    (generalised cross-validation), the model is not: it is behind only if it underfits. Of large tables some rows are
    taken, evenly.

    Args:
      model: what was fitted.
      table: to train on, in the user's units.
      validation: or None.
      scaling: of the features.

    Returns:
      ``model``, ``linear`` (least squares) and ``constant`` (the mean of the training targets).
    """
    by = table if validation is None else validation
    outputs = np.asarray(model.predict(by.x), np.float64).reshape(len(by.x), -1)[_some(len(by.x))]
    (x, y, weight), (x_by, y_by, weight_by) = (_of_some_rows(each, scaling) for each in (table, by))
    mean = np.average(y, axis=0, weights=weight)
    deviation = np.sqrt(np.average(np.square(y - mean), axis=0, weights=weight))
    unit = np.where(deviation > 0, deviation, 1)
    error = lambda outputs: float(np.average(np.square((outputs - y_by) / unit).mean(1), weights=weight_by))

    root = np.sqrt(weight / weight.sum())[:, None]
    slopes, _, rank, _ = np.linalg.lstsq(root * x, root * (y - mean), rcond=1e-6)
    linear = error(mean + x_by @ slopes)
    if validation is None:
        left = 1 - rank / len(x)
        linear = linear / float(left) ** 2 if left > 0 else np.inf
    return {"model": error(outputs), "linear": linear, "constant": error(mean)}


def _some(n: int) -> slice:
    return slice(None, None, -(-n // _ROWS))


def _of_some_rows(table: Table, scaling: Scaling) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scaled features and a column of ones, targets or indicators of classes ``(n, k)``, weights."""
    table = table.rows(_some(len(table.x)))
    y = table.task.indicators(table.y)
    weight = np.ones(len(y)) if table.weight is None else table.weight
    x = np.asarray(scaling.transform(table.x), np.float64)
    return np.column_stack([x, np.ones(len(x))]), y.astype(np.float64), weight


def warn_if_behind(errors: dict[str, float], name: str, where: str) -> None:
    """Warns with :class:`BehindBaselineWarning` if a model of this recipe is behind its baselines on these rows."""
    best = "linear" if errors["linear"] < errors["constant"] else "constant"
    if errors["model"] > errors[best] + _BEHIND:
        share = lambda which: f"{100 * (1 - errors[which]):.1f} %"
        warnings.warn(
            f"{name} explains {share('model')} of the variance of y {where}, a {best} model {share(best)}: "
            "other options or another recipe may do better",
            BehindBaselineWarning,
            stacklevel=3,
        )
