"""Baselines: the comparison of a model with a linear model and a constant, and a verdict in one sentence.

The comparison uses the loss of the task, and held-out rows if there are any.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from jtrees import distributed
from jtrees.data.scaling import Scaling
from jtrees.data.table import Table
from jtrees.description import count_free
from jtrees.forest import Forest
from jtrees.losses.frequencies import class_counts
from jtrees.losses.names import measure
from jtrees.tasks import Classification, Task
from jtrees.tree import ObliqueTree

_ROWS = 10_000  # largest number of rows; a linear model then takes less time than any search
_WORK = 4e9  # largest product of rows and squared columns of a linear model; a tenth of it for classes
_FEWEST_ROWS = 1000
_DECOMPOSED = 200  # a matrix with more rows and more columns is not decomposed
_RANK = 1e-6  # singular values below this fraction of the largest singular value count as 0
_RIDGE = 1.0  # ridge penalty of the logistic regression, the default of scikit-learn
_ITERATIONS = 100
_ARTICLES = {
    "linear": "a linear model",
    "linear model": "a linear model",
    "constant": "a constant",
    "random forest": "a random forest",
}
_SAID = 3  # number of best rivals whose losses a verdict states
_UNSURE = 0.25  # uncertain fraction of the charge for the parameters of a tree
_MARGIN = 0.02  # smallest difference that counts, as a fraction of the loss of a constant

TRAINING = "the training rows"
CHARGED = "the training rows, with a penalty for each parameter"
LEFT_OUT = "rows left out in training"
HELD_OUT = "held-out rows"
VALIDATION = "the validation set"


class BehindBaselineWarning(UserWarning):
    """A model has a higher loss than a linear model or a constant."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The losses of a model and of simpler models on the same rows.

    Attributes:
      losses: mean losses by name. The first is the loss of the model.
      measure: name of the loss, such as ``"log loss"``.
      where: name of the rows, such as ``"the validation set"``.
      margin: difference of losses that may be due to chance. It is the largest of 2 % of the constant's loss, the
        standard error of the difference to the best rival, and a quarter of a tree's charge.
    """

    losses: dict[str, float]
    measure: str
    where: str
    margin: float

    @classmethod
    def of(
        cls,
        losses: dict[str, float],
        measure: str,
        where: str,
        constant: float,
        difference: np.ndarray,
        more: float = 0,
    ) -> "Comparison":
        """Returns a comparison with its margin.

        Args:
          losses: mean losses by name, first of the model.
          measure: name of the loss.
          where: name of the rows.
          constant: the loss of the constant.
          difference: difference of the loss to the best rival on each row, ``(n,)``.
          more: lower bound of the margin, such as a part of a tree's charge.
        """
        finite = difference if np.isfinite(difference).all() else np.zeros(1)
        error = float(finite.std() / np.sqrt(len(finite)))
        return cls(losses, measure, where, max(_MARGIN * constant, error, more))

    @property
    def better(self) -> list[str]:
        """Names of the simpler models that are better than the model, sorted from the best."""
        own, *others = sorted(self.losses, key=lambda name: (name != next(iter(self.losses)), self.losses[name]))
        return [name for name in others if self.losses[name] < self.losses[own] - self.margin]

    def verdict(self, name: str) -> str:
        """Returns a sentence that says which model is better; ``name`` is the name of the model."""
        own, *rest = self.losses
        others = sorted(rest, key=self.losses.__getitem__)
        alike = [other for other in others if abs(self.losses[other] - self.losses[own]) <= self.margin]
        if better := self.better:
            said = f"{_listed(better)} {'is' if len(better) == 1 else 'are'} better than {name}"
        elif alike:
            said = f"{name} is about as good as {_listed(alike)}"
        elif self.where == TRAINING:
            said = f"whether {name} is better than {_listed(others)} needs held-out rows"
        else:
            said = f"{name} is better than {_listed(others)}"
        against = [f"{_short(self.losses[other])} for {_said(other)}" for other in others[:_SAID]]
        said = f"{said}: {self.measure} {_short(self.losses[own])}, {_listed(against)}, on {self.where}"
        return said[0].upper() + said[1:]

    def warn_if_behind(self, name: str, cause: str | None = None, stacklevel: int = 3) -> None:
        """Warns with :class:`BehindBaselineWarning` if a simpler model is better. ``cause``: the known cause."""
        if self.better:
            advice = cause or "other options or another recipe may do better"
            distributed.warn(f"{self.verdict(name)}: {advice}", BehindBaselineWarning, stacklevel=stacklevel)


def compared(
    model: Any,
    table: Table,
    scaling: Scaling,
    *,
    held_out: Table | None,
    where: str = HELD_OUT,
    left_out: tuple[float, Any] | None = None,
) -> Comparison:
    """Returns the losses of a model, of a linear model and of a constant.

    The losses are on ``held_out`` if it is given, else on the rows that the model's search held out. If there are no
    held-out rows, the losses are on the training rows, and each model is charged for its parameters. The charge follows
    generalised cross-validation, or Akaike's criterion for log loss. The parameters of a single tree are counted by
    :func:`jtrees.description.count_free`. A model that is not a single tree is not charged. Large tables are
    subsampled.

    Args:
      model: the fitted model of numeric features.
      table: the training rows, in the user's units.
      scaling: scaling of the features.
      held_out: rows that the model was not trained on, or None.
      where: name of the rows ``held_out``.
      left_out: the model's loss on the rows that its search held out, and the numbers of the rows; None if there are no
        such rows. The numbers are None if they are all rows.

    Returns:
      The comparison of ``model``, ``linear`` and ``constant``. There is no linear model for a loss with a log link.
      Models that vote are compared by the error rate.
    """
    task, votes = table.task, isinstance(model, Forest) and model.combine == "vote"
    own, trained = None, np.arange(len(table.x))
    if held_out is None and left_out is not None:
        (own, rows), where = left_out, LEFT_OUT
        if rows is not None:
            held_out, trained = _some(table, rows), np.setdiff1d(trained, rows)
    evaluated = _some(table if held_out is None else held_out)
    lose = lambda predictions: _losses(task, predictions, evaluated.y, scaling, votes)
    mean = lambda lost: float(np.average(lost, weights=evaluated.weight))
    charge = lambda lost, count: lost if votes or held_out is not None else _charged(task, lost, count, len(table.x))
    guesses = _guesses(table, trained, evaluated, scaling)
    lost = {name: lose(predictions) for name, (predictions, _) in guesses.items()}
    found = {name: charge(mean(lost[name]), count) for name, (_, count) in guesses.items()}
    best, doubt = min(found, key=found.__getitem__), 0.0
    if own is None:
        own_lost = lose(np.asarray(model.predict(evaluated.x), np.float64))
        own, difference = mean(own_lost), own_lost - lost[best]
        if held_out is None:
            where = TRAINING
            if isinstance(model, ObliqueTree):
                uncharged, where = own, CHARGED
                own = charge(own, count_free(scaling.transform_splits(model)))
                doubt = _UNSURE * (own - uncharged)
    else:  # the losses of single rows are unknown: the difference of linear model and constant varies about as much
        difference = lost["constant"] - lost.get("linear", lost["constant"])
    said = "error rate" if votes else _measure(task)
    return Comparison.of({"model": own, **found}, said, where, found["constant"], difference, doubt)


# --- The simpler models ----------------------------------------------------------------------------------------------


def _guesses(
    table: Table, trained: np.ndarray, evaluated: Table, scaling: Scaling
) -> dict[str, tuple[np.ndarray, float]]:
    """Returns the predictions and the numbers of parameters of the linear model and the constant.

    Args:
      table: a table.
      trained: the numbers of the training rows in the table.
      evaluated: the rows to predict.
      scaling: scaling of the features.
    """
    width, y = table.x.shape[1], table.y[trained]
    weight = None if table.weight is None else table.weight[trained]
    if isinstance(table.task, Classification):
        none = np.zeros(len(y), int)
        share = class_counts(none, y, 1, table.task.classes, sample_weight=weight)[0] + 1 / table.task.classes
        constant, ends = share / share.sum(), table.task.classes
        limit = _WORK / 10 / (width * ends) if width else _ROWS
        some = _some(table, trained, int(np.clip(limit / _ITERATIONS, _FEWEST_ROWS, _ROWS)))
        linear = _logistic(*_features(some, evaluated, scaling), table.task.indicators(some.y), _weights(some))
        free = ends - 1
    else:
        constant = table.task.loss_function.best(y, weight)
        some = _some(table, trained, int(np.clip(_WORK / max(1, width) ** 2, _FEWEST_ROWS, _ROWS)))
        linear = _least_squares(*_features(some, evaluated, scaling), some, table.task)
        free = constant.size
    tiled = np.broadcast_to(constant, (len(evaluated.x), *np.shape(constant)))
    found: dict[str, tuple[np.ndarray, float]] = {} if linear is None else {"linear": (linear, free * (1 + width))}
    return found | {"constant": (tiled, free)}


def _least_squares(x: np.ndarray, x_new: np.ndarray, some: Table, task: Any) -> np.ndarray | None:
    """Returns predictions of a least-squares fit, plus the best constant of the residuals; None for a log link."""
    loss = task.loss_function
    if loss.link == "exp":
        return None
    y, weight = some.y.astype(np.float64), _weights(some)
    root = np.sqrt(weight / weight.sum()).reshape(-1, *[1] * (y.ndim - 1))
    mean = np.average(y, axis=0, weights=weight)
    slopes = least_squares(np.sqrt(weight / weight.sum())[:, None] * x, root * (y - mean))
    rest = loss.best(y - mean - x @ slopes, some.weight) if np.ptp(y - mean - x @ slopes) > 0 else 0.0
    return loss.aligned(mean + x_new @ slopes) + rest


def least_squares(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns the least-squares solution of minimum norm.

    If x has many rows and many columns, x is not decomposed. Instead, the matrix of the products of the shorter side is
    inverted, which takes a tenth of the time. A ridge then replaces the cut-off of small singular values.
    """
    if min(x.shape) <= _DECOMPOSED:
        return np.linalg.lstsq(x, y, rcond=_RANK)[0]
    wide = x.shape[1] > len(x)
    products = x @ x.T if wide else x.T @ x
    inverse = np.linalg.inv(products + _RANK**2 * np.trace(products) * np.eye(len(products)))
    return x.T @ (inverse @ y) if wide else inverse @ (x.T @ y)


def _logistic(x: np.ndarray, x_new: np.ndarray, shares: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Returns the probabilities of a logistic regression with a ridge penalty on the slopes, ``(n, classes)``.

    The regression is fitted to the class probabilities ``shares``.
    """
    from scipy.optimize import minimize  # imported late: jax installs SciPy, but this module is slow to import

    total, classes = weight.sum(), shares.shape[1]

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        slopes = flat.reshape(-1, classes)
        log = x @ slopes
        log -= log.max(1, keepdims=True)
        log -= np.log(np.exp(log).sum(1, keepdims=True))
        ridge = _RIDGE * slopes[:-1] / total  # the last row has the intercepts
        gradient = x.T @ (weight[:, None] / total * (np.exp(log) - shares))
        gradient[:-1] += ridge
        lost = -(weight * (shares * log).sum(1)).sum() / total
        return lost + 0.5 * (ridge * slopes[:-1]).sum(), gradient.ravel()

    start = np.zeros(x.shape[1] * classes)
    found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": _ITERATIONS}).x
    outputs = x_new @ found.reshape(-1, classes)
    chances = np.exp(outputs - outputs.max(1, keepdims=True))
    return chances / chances.sum(1, keepdims=True)


def _features(some: Table, evaluated: Table, scaling: Scaling) -> tuple[np.ndarray, np.ndarray]:
    """Returns standardised features of two tables, and a column of ones."""
    x, x_new = (np.asarray(scaling.transform(each.x), np.float64) for each in (some, evaluated))
    mean, deviation = x.mean(0), x.std(0)
    unit = np.where(deviation > 0, deviation, 1)
    first, second = (np.column_stack([(each - mean) / unit, np.ones(len(each))]) for each in (x, x_new))
    return first, second


def _weights(table: Table) -> np.ndarray:
    return np.ones(len(table.x)) if table.weight is None else table.weight


def _some(table: Table, rows: np.ndarray | None = None, most: int = _ROWS) -> Table:
    """Returns at most ``most`` evenly spaced rows of a table, or of the rows with the given numbers."""
    count = len(table.x) if rows is None else len(rows)
    few = slice(None, None, -(-count // most))
    return table.rows(few if rows is None else rows[few])


# --- Losses ----------------------------------------------------------------------------------------------------------


def _losses(task: Task, predictions: np.ndarray, y: np.ndarray, scaling: Scaling, votes: bool) -> np.ndarray:
    if votes:
        return 1 - task.hits(predictions, y)
    return task.host_losses(predictions, y, scaling.y_unit)


def _measure(task: Task) -> str:
    return "log loss" if isinstance(task, Classification) else measure(task.loss_function)


def _charged(task: Task, lost: float, count: float, rows: int) -> float:
    """Returns the expected loss on new rows, from the loss on the training rows and the number of parameters."""
    if isinstance(task, Classification):
        return lost + count / rows  # Akaike
    left = 1 - count / rows
    power = 1.0 if task.loss_function.power() == 1 and task.loss_function.link != "exp" else 2.0
    return lost / left**power if left > 0 else np.inf


def _short(value: float) -> str:
    """Returns a number as text with four digits; a large number has no exponent."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}"


def _said(name: str) -> str:
    """Returns a name as it appears in a sentence: "CART, depth 4" becomes "CART"."""
    return _ARTICLES.get(name, name.partition(",")[0])


def _listed(names: Sequence[str]) -> str:
    """Returns names as text: "a linear model and a constant"."""
    named = list(map(_said, names))
    return " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)
