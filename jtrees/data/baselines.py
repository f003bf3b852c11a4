"""Baselines: the comparison of a model with a linear model and a constant, and a verdict in one sentence.

The comparison uses the loss of the task, and held-out rows if there are any.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from jtrees import distributed, segments
from jtrees.data.scaling import Scaling, row_losses
from jtrees.data.table import Table
from jtrees.description import count_free
from jtrees.forest import Forest
from jtrees.segments import ones_or
from jtrees.tasks import Classification, Task
from jtrees.tasks.fits import class_counts
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
_SHOWN = 3  # least number of rivals whose losses a verdict states, the best first
_UNSURE = 0.25  # uncertain fraction of the charge for the parameters of a tree
_MARGIN = 0.002  # smallest difference that counts, as a fraction of the loss of a constant
_ERRORS = 2.0  # standard errors of a difference that may be due to chance

TRAINING = "the training rows"
CHARGED = "the training rows, with a penalty for each parameter"
LEFT_OUT = "rows left out in training"
HELD_OUT = "held-out rows"
CHOSE = ", which also chose the model"  # losses on such rows are slightly too low
VALIDATION = f"the validation set{CHOSE}"


class BehindBaselineWarning(UserWarning):
    """A model has a higher loss than a linear model or a constant."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The losses of a model and of simpler models on the same rows.

    Attributes:
      losses: mean losses by name. The first is the loss of the model.
      measure: name of the loss, such as ``"log loss"``.
      where: name of the rows, such as ``"the validation set"``.
      margins: by rival, the difference of losses that may be due to chance. It is the largest of 0.2 % of the
        constant's loss, two standard errors of the mean difference of the two models' losses on the same rows, and a
        quarter of a tree's charge.
    """

    losses: dict[str, float]
    measure: str
    where: str
    margins: dict[str, float]

    @classmethod
    def from_losses(
        cls,
        row_losses: dict[str, np.ndarray],
        weight: np.ndarray | None,
        measure: str,
        where: str,
        charged: dict[str, float] | None = None,
        doubt: float = 0.0,
    ) -> "Comparison":
        """Returns a comparison with its margins.

        Args:
          row_losses: the loss of each row by name, first of the model, ``(n,)`` each. One name is ``"constant"``.
          weight: weights of the rows, or None.
          measure: name of the loss.
          where: name of the rows.
          charged: mean losses that include a charge for parameters. None: the means of ``row_losses``.
          doubt: lower bound of the margins, such as a part of a tree's charge.
        """
        means = {name: float(np.average(losses, weights=weight)) for name, losses in row_losses.items()}
        losses = means if charged is None else charged
        name, *rivals = row_losses
        minimum = max(_MARGIN * losses["constant"], doubt)
        error = lambda rival: _standard_error(row_losses[name] - row_losses[rival], weight)
        return cls(losses, measure, where, {rival: max(minimum, _ERRORS * error(rival)) for rival in rivals})

    def _lead(self, rival: str) -> float:
        """Returns by how much the loss of a rival is lower than the loss of the model."""
        return self.losses[next(iter(self.losses))] - self.losses[rival]

    @property
    def better(self) -> list[str]:
        """Names of the simpler models that are better than the model, sorted from the best."""
        rivals = sorted(self.margins, key=self.losses.__getitem__)
        return [rival for rival in rivals if self._lead(rival) > self.margins[rival]]

    def verdict(self, name: str) -> str:
        """Returns a sentence that says which model is better; ``name`` is the name of the model."""
        rivals = sorted(self.margins, key=self.losses.__getitem__)
        similar = [rival for rival in rivals if abs(self._lead(rival)) <= self.margins[rival]]
        if better := self.better:
            verdict = f"{_listed(better)} {'is' if len(better) == 1 else 'are'} better than {name}"
        elif similar:
            verdict = f"{name} is about as good as {_listed(similar)}"
        elif self.where == TRAINING:
            verdict = f"whether {name} is better than {_listed(rivals)} needs held-out rows"
        else:
            verdict = f"{name} is better than {_listed(rivals)}"
        shown = rivals[: max(_SHOWN, len(better))]
        against = [f"{_short(self.losses[rival])} for {_phrase(rival)}" for rival in shown]
        model_loss = _short(self.losses[next(iter(self.losses))])
        verdict = f"{verdict}: {self.measure} {model_loss}, {_listed(against)}, on {self.where}"
        return verdict[0].upper() + verdict[1:]

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
    left_out: Any = None,
) -> Comparison:
    """Returns the losses of a model, of a linear model and of a constant.

    The losses are on ``held_out`` if it is given, else on the rows that the model's search left out. If there are no
    such rows, the losses are on the training rows, and each model is charged for its parameters. The charge follows
    generalised cross-validation, or Akaike's criterion for log loss. The parameters of a single tree are counted by
    :func:`jtrees.description.count_free`. A model that is not a single tree is not charged. Large tables are
    subsampled.

    Args:
      model: the fitted model of numeric features.
      table: the training rows, in the user's units.
      scaling: scaling of the features.
      held_out: rows that the model was not trained on, or None.
      where: name of the rows ``held_out``.
      left_out: losses of the rows that the search left out, a :class:`jtrees.search.LeftOut`, or None. If several
        models left out different rows, the simpler models are fitted to all rows, and are charged.

    Returns:
      The comparison of ``model``, ``linear`` and ``constant``. There is no linear model for a loss with a log link.
      Models that vote are compared by the error rate.
    """
    task, votes = table.task, isinstance(model, Forest) and model.combine == "vote"
    lose = lambda predictions, rows: _losses(task, predictions, rows.y, scaling, votes)
    trained, doubt = np.arange(len(table.x)), 0.0
    if held_out is None and left_out is not None and len(left_out.rows):
        rows = _evenly(left_out.rows, _ROWS)
        evaluated, model_losses = table.rows(rows), left_out.losses[rows]
        where, charges = LEFT_OUT + CHOSE * left_out.chose, left_out.several
        trained = trained if left_out.several else np.setdiff1d(trained, left_out.rows)
    else:
        evaluated, charges = _subsample(table if held_out is None else held_out), held_out is None
        model_losses = lose(np.asarray(model.predict(evaluated.x), np.float64), evaluated)
        where = TRAINING if held_out is None else where
    mean = lambda losses: float(np.average(losses, weights=evaluated.weight))
    charge = lambda loss, count: _charged(task, loss, count, len(table.x)) if charges and not votes else loss
    guesses = _guesses(table, trained, evaluated, scaling)
    rival_losses = {name: lose(predictions, evaluated) for name, (predictions, _) in guesses.items()}
    charged = {name: charge(mean(rival_losses[name]), count) for name, (_, count) in guesses.items()}
    model_loss = mean(model_losses)
    if where == TRAINING and isinstance(model, ObliqueTree):
        uncharged, where = model_loss, CHARGED
        model_loss = charge(model_loss, count_free(scaling.transform_splits(model)))
        doubt = _UNSURE * (model_loss - uncharged)
    measured = "error rate" if votes else task.loss_function.measure
    row_losses, charged = {"model": model_losses, **rival_losses}, {"model": model_loss, **charged}
    return Comparison.from_losses(row_losses, evaluated.weight, measured, where, charged, doubt)


def _standard_error(differences: np.ndarray, weight: np.ndarray | None) -> float:
    """Returns the standard error of the weighted mean of differences; 0 if a difference is not finite."""
    if not np.isfinite(differences).all():
        return 0.0
    share = np.ones(len(differences)) if weight is None else weight
    share = share / share.sum()
    return float(np.sqrt(np.square(share) @ np.square(differences - share @ differences)))


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
    weight = None if table.weight is None else segments.mean_one(table.weight[trained])
    if isinstance(table.task, Classification):
        none = np.zeros(len(y), int)
        share = class_counts(none, y, 1, table.task.classes, sample_weight=weight)[0] + 1 / table.task.classes
        constant, ends = share / share.sum(), table.task.classes
        limit = _WORK / 10 / (width * ends) if width else _ROWS
        sample = _subsample(table, trained, int(np.clip(limit / _ITERATIONS, _FEWEST_ROWS, _ROWS)))
        weights = ones_or(sample.weight, sample.x)
        linear = _logistic(*_features(sample, evaluated, scaling), table.task.indicators(sample.y), weights)
        free = ends - 1
    else:
        constant = table.task.loss_function.best(y, weight)
        sample = _subsample(table, trained, int(np.clip(_WORK / max(1, width) ** 2, _FEWEST_ROWS, _ROWS)))
        linear = _least_squares(*_features(sample, evaluated, scaling), sample, table.task)
        free = constant.size
    tiled = np.broadcast_to(constant, (len(evaluated.x), *np.shape(constant)))
    models = {"linear": (linear, free * (1 + width)), "constant": (tiled, free)}
    return {name: (predictions, count) for name, (predictions, count) in models.items() if predictions is not None}


def _least_squares(x: np.ndarray, x_new: np.ndarray, sample: Table, task: Any) -> np.ndarray | None:
    """Returns predictions of a least-squares fit, plus the best constant of the residuals; None for a log link."""
    loss = task.loss_function
    if loss.link == "exp":
        return None
    y, weight = sample.y.astype(np.float64), ones_or(sample.weight, sample.x)
    root = np.sqrt(weight / weight.sum()).reshape(-1, *[1] * (y.ndim - 1))
    mean = np.average(y, axis=0, weights=weight)
    slopes = least_squares(np.sqrt(weight / weight.sum())[:, None] * x, root * (y - mean))
    rest = loss.best(y - mean - x @ slopes, sample.weight) if np.ptp(y - mean - x @ slopes) > 0 else 0.0
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
        data_loss = -(weight * (shares * log).sum(1)).sum() / total
        return data_loss + 0.5 * (ridge * slopes[:-1]).sum(), gradient.ravel()

    start = np.zeros(x.shape[1] * classes)
    coefficients = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": _ITERATIONS}).x
    outputs = x_new @ coefficients.reshape(-1, classes)
    chances = np.exp(outputs - outputs.max(1, keepdims=True))
    return chances / chances.sum(1, keepdims=True)


def _features(sample: Table, evaluated: Table, scaling: Scaling) -> tuple[np.ndarray, np.ndarray]:
    """Returns standardised features of two tables, and a column of ones."""
    x, x_new = (np.asarray(scaling.transform(rows.x), np.float64) for rows in (sample, evaluated))
    mean, deviation = x.mean(0), x.std(0)
    unit = np.where(deviation > 0, deviation, 1)
    first, second = (np.column_stack([(rows - mean) / unit, np.ones(len(rows))]) for rows in (x, x_new))
    return first, second


def _subsample(table: Table, rows: np.ndarray | None = None, limit: int = _ROWS) -> Table:
    """Returns at most ``limit`` evenly spaced rows of a table, or of the rows with the given numbers."""
    return table.rows(_evenly(np.arange(len(table.x)) if rows is None else rows, limit)).normalised()


def _evenly(rows: np.ndarray, limit: int) -> np.ndarray:
    """Returns at most ``limit`` evenly spaced entries."""
    return rows[:: -(-len(rows) // limit)]


# --- Losses ----------------------------------------------------------------------------------------------------------


def _losses(task: Task, predictions: np.ndarray, y: np.ndarray, scaling: Scaling, votes: bool) -> np.ndarray:
    if votes:
        return 1 - task.hits(predictions, y)
    return row_losses(task, predictions, y, scaling)


def _charged(task: Task, loss: float, count: float, rows: int) -> float:
    """Returns the expected loss on new rows, from the loss on the training rows and the number of parameters."""
    if isinstance(task, Classification):
        return loss + count / rows  # Akaike
    left = 1 - count / rows
    power = 1.0 if task.loss_function.power() == 1 and task.loss_function.link != "exp" else 2.0
    return loss / left**power if left > 0 else np.inf


def _short(value: float) -> str:
    """Returns a number as text with four digits; a large number has no exponent."""
    return f"{value:.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}"


def _phrase(name: str) -> str:
    """Returns a name as it appears in a sentence: "CART, depth 4" becomes "CART"."""
    return _ARTICLES.get(name, name.partition(",")[0])


def _listed(names: Sequence[str]) -> str:
    """Returns names as text: "a linear model and a constant"."""
    named = list(map(_phrase, names))
    return " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)
