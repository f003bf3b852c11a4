"""The simpler models that a model is compared with: a constant, a linear model, CART, forests and boosting.

All models have ``fit(x, y)`` and ``predict(x)``. Only CART, forests, boosting and the regression of quantiles need
scikit-learn.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import numpy as np

from jtrees import losses
from jtrees.ridge import RIDGE, least_squares
from jtrees.segments import ones_or
from jtrees.tasks import Classification, Task
from jtrees.tasks.base import linked
from jtrees.tasks.fits import class_counts

_LINEAR_PROGRAM = 5000  # largest number of training rows for a linear program of quantiles
ITERATIONS = 100  # largest number of steps of the descent
_WIDEST = 30.0  # largest absolute output under an exponential

# The losses that trees and boosting of scikit-learn minimise.
_SPLITS = {losses.SquaredError: "squared_error", losses.Poisson: "poisson", losses.LogLoss: "log_loss"}
_BOOSTING = _SPLITS | {losses.AbsoluteError: "absolute_error", losses.Quantile: "quantile", losses.Gamma: "gamma"}


class Constant:
    """The best constant prediction of a task.

    Attributes:
      value: the prediction, ``(*k,)``.
      count: number of free parameters.
    """

    def __init__(self, task: Task):
        self.task = task

    def fit(self, x: Any, y: np.ndarray, weight: np.ndarray | None = None) -> Self:
        """Fits the constant to targets of n rows, with weights ``(n,)`` of mean 1 or None; ``x`` is not used."""
        if isinstance(self.task, Classification):
            classes = self.task.classes
            counts = class_counts(np.zeros(len(y), int), y, 1, classes, sample_weight=weight)[0] + 1 / classes
            self.value, self.count = self.task.leaf_loss.smooth_labels(counts / counts.sum()), classes - 1
        else:
            self.value = self.task.loss_function.best(y, weight)
            self.count = self.value.size
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Returns the constant for each row, ``(n, *k)``."""
        return np.broadcast_to(self.value, (len(x), *self.value.shape))


class LinearModel:
    """A linear model of standardised features, after a function ``transform``, ``(n, p) -> (n, p)``.

    Logistic regression and regression with a log link minimise the loss, while ``has_time()`` allows further steps, or
    to the end if it is None. The targets under a log link are divided by their mean. For other losses, least squares
    give the slopes, and the best constant of the residuals is added. All slopes have a small ridge penalty.

    Attributes:
      slopes: slopes of the standardised features, and the intercepts in the last row, ``(p + 1, k)``.
      count: number of free parameters.
    """

    def __init__(
        self, task: Task, transform: Callable[[Any], Any] = np.asarray, has_time: Callable[[], bool] | None = None
    ):
        self.task, self.link, self.transform, self.has_time = task, task.link_name, transform, has_time

    def fit(self, x: Any, y: np.ndarray, weight: np.ndarray | None = None) -> Self:
        """Fits the model to features ``(n, p)`` and their targets, with weights ``(n,)`` of mean 1 or None."""
        x, loss = np.asarray(self.transform(x), np.float64), self.task.loss_function
        weights: Any = ones_or(weight, x)
        self._mean, deviation = np.average(x, axis=0, weights=weights), x.std(0)
        rounding = 16 * np.finfo(np.float64).eps * np.abs(self._mean)  # of a constant column
        self._deviation = np.where(deviation > rounding, deviation, 1)
        x, targets = self._with_ones(x), self.task.indicators(y).astype(np.float64)
        mean, free = np.average(targets, axis=0, weights=weights), targets.shape[1]
        if isinstance(loss, losses.LogLoss):
            labels = loss.smooth_labels(targets)
            self.slopes, free = _descended(x, labels, weights, _log_loss, self.has_time), free - 1
        elif self.link == "exp":
            self._scale = np.where(mean > 0, mean, 1)
            self.slopes = _descended(x, targets / self._scale, weights, partial(_deviance, loss), self.has_time)
        else:
            root = np.sqrt(weights)[:, None]
            self.slopes = np.vstack([least_squares(root * x[:, :-1], root * (targets - mean)), mean])
            residuals = (targets - x @ self.slopes).reshape(y.shape)
            self._constant = loss.best(residuals, weight) if np.ptp(residuals) > 0 else np.zeros(self.task.shape)
            free = self._constant.size
        self.count = free * len(self.slopes)
        return self

    def predict(self, x: Any) -> np.ndarray:
        """Returns the predictions for features ``(n, p)``, ``(n, *k)``."""
        outputs = self._with_ones(np.asarray(self.transform(x), np.float64)) @ self.slopes
        if self.link == "softmax":
            return linked(self.link, outputs)
        if self.link == "exp":
            outputs = self._scale * np.exp(outputs.clip(-_WIDEST, _WIDEST))
        outputs = outputs[:, 0] if self.task.outputs is None else outputs
        return outputs if self.link == "exp" else self.task.loss_function.with_output_axis(outputs) + self._constant

    def _with_ones(self, x: np.ndarray) -> np.ndarray:
        """Returns standardised features and a column of ones, ``(n, p + 1)``."""
        return np.column_stack([(x - self._mean) / self._deviation, np.ones(len(x))])


def _descended(
    x: np.ndarray,
    y: np.ndarray,
    weight: np.ndarray,
    loss: Callable[..., tuple[np.ndarray, np.ndarray]],
    has_time: Callable[[], bool] | None,
) -> np.ndarray:
    """Returns the slopes that minimise a loss with a ridge penalty, ``(p + 1, k)``.

    ``x`` has a column of ones, ``(n, p + 1)``; ``loss`` is ``(outputs, y) -> (losses, gradients)``, ``(n, k)`` each.
    The first step is made even if there is no time.
    """
    from scipy.optimize import minimize  # imported here because the import is slow

    total, shape = weight.sum(), (x.shape[1], y.shape[1])
    fractions = weight[:, None] / total

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        slopes = flat.reshape(shape)
        values, gradients = loss(x @ slopes, y)
        ridge = RIDGE / total * slopes
        ridge[-1] = 0  # the intercepts
        gradient = (x.T @ (fractions * gradients) + ridge).ravel()
        return (fractions * values).sum() + 0.5 * (ridge * slopes).sum(), gradient

    def stop_late(intermediate_result: Any) -> None:  # scipy passes the step under this name
        if has_time is not None and not has_time():
            raise StopIteration

    options: Any = {"jac": True, "method": "L-BFGS-B", "options": {"maxiter": ITERATIONS}, "callback": stop_late}
    return minimize(objective, np.zeros(shape).ravel(), **options).x.reshape(shape)


def _log_loss(outputs: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log loss of logits on each class, and its gradient, ``(n, k)`` each."""
    log = outputs - outputs.max(1, keepdims=True)
    log -= np.log(np.exp(log).sum(1, keepdims=True))
    return -y * log, np.exp(log) - y


def _deviance(loss: losses.Loss, outputs: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns half the deviance of logarithms of means, and its gradient, ``(n, k)`` each."""
    # Let d be half the deviance, of a variance m^p. Then dd/dm = (m - y) m^-p and dm/do = m. The power is 2 - p.
    mean = np.exp(outputs.clip(-_WIDEST, _WIDEST))
    return loss.of_predictions(mean, y) / 2, (mean - y) * mean ** (loss.unit_exponent() - 1)


def baselines(task: Task, *options: Any) -> dict[str, Constant | LinearModel]:
    """Returns the unfitted models by name that need no scikit-learn. Every fit is compared with them.

    ``options`` are further arguments of :class:`LinearModel`.
    """
    return {"constant": Constant(task), "linear model": LinearModel(task, *options)}


def rivals(task: Task, rows: int, *, depth: int, seed: int, forests: bool) -> tuple[dict[str, Any], list[str]]:
    """Returns the unfitted rivals of a model by name: the baselines, and models of scikit-learn.

    ``rows`` is the number of training rows, ``depth`` the depth of CART. ``forests`` says whether a random forest and
    boosting are among the rivals. Also returns the names of the rivals that minimise the squared error or the Poisson
    deviance instead of the loss of the task.
    """
    from sklearn import ensemble, linear_model, pipeline, preprocessing, tree  # imported here: an optional package

    models: dict[str, Any] = dict(baselines(task))
    loss: Any = task.loss_function
    level: Any = 0.5 if isinstance(loss, losses.AbsoluteError) else getattr(loss, "levels", None)
    if is_program := level is not None and rows <= _LINEAR_PROGRAM:
        linear: Any = linear_model.QuantileRegressor
        scaler = preprocessing.StandardScaler()
        models["linear model"] = pipeline.make_pipeline(scaler, linear(quantile=level, alpha=0))
    kind = "Classifier" if isinstance(task, Classification) else "Regressor"
    split, boosting = _SPLITS.get(type(loss)), _BOOSTING.get(type(loss))
    tree_options: dict[str, Any] = {"criterion": split or "squared_error", "random_state": seed}
    models[f"CART, depth {depth}"] = getattr(tree, f"DecisionTree{kind}")(max_depth=depth, **tree_options)
    if forests:
        models["random forest"] = getattr(ensemble, f"RandomForest{kind}")(n_jobs=-1, **tree_options)
        options = {"loss": boosting or ("poisson" if loss.link == "exp" else "squared_error"), "random_state": seed}
        options |= {"quantile": level} if boosting == "quantile" else {}
        models["gradient boosting"] = getattr(ensemble, f"HistGradientBoosting{kind}")(**options)
    smooth = loss.link in ("softmax", "exp") or isinstance(loss, losses.SquaredError)
    same = {"constant": True, "linear model": smooth or is_program, "gradient boosting": boosting is not None}
    return models, [name for name in models if not same.get(name, split is not None)]
