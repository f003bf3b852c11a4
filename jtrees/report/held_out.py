"""Models on held-out rows: scores, a verdict and importances (needs pandas and scikit-learn)."""

from collections.abc import Callable
import functools
import time
from typing import Any, Literal
import warnings

import numpy as np
import pandas as pd
from sklearn import metrics
from sklearn.base import is_classifier

from jtrees import explain, losses
from jtrees.data import held_out
from jtrees.description import kind_of, kind_of_forest
from jtrees.report.comparison import Comparison
from jtrees.report.rivals import rivals
from jtrees.tables import Frame, TableEncoder
from jtrees.tables.encoder import EncodedTable
from jtrees.tasks import Classification, Regression, Task
from jtrees.tasks.labels import coded_labels, label_array
from jtrees.text import number_text
from jtrees.validation import number_of, quoted

_SHUFFLED = 2000  # largest number of rows for permutation importances
_CART_DEPTH = 4  # depth of the CART rival if the model is not a tree; else it has the depth of the tree
_TOP = 3  # number of columns in the summary


class HeldOutRows:
    """Training rows and held-out rows of a split. Models are fitted to the training rows and scored on held-out rows.

    ``kind`` is "regression" or "classification", ``loss`` the loss of regression. ``frame`` has the columns of x in the
    kinds of a schema. Each class has the held-out share, if each class has two rows and the held-out rows are enough.

    Attributes:
      x_test, y_test, frame_test: the held-out rows as they came, their targets, and in the kinds of the schema.
      y_train, frame_train: the targets of the training rows, and the rows in the kinds of the schema.
      task, classes: what is predicted, and the labels as text; empty in regression.
      rows: the training rows with their features.
      features, features_test: both parts as features. Target means of training rows are means over other rows.
      predictions, seconds: by name of the model, its predictions or class probabilities for the held-out rows, and the
        seconds of its fit.
    """

    def __init__(self, x: Any, y: np.ndarray, kind: Any, loss: losses.Loss, *, frame: Frame, share: float, seed: int):
        strata: Any = None
        if kind == "classification":
            counts = np.unique(y, return_counts=True)[1]
            strata = y if counts.min() >= 2 and len(counts) <= round(share * len(y)) else None
        train, test = held_out.divided(len(y), share, seed, strata)
        self.x_test, self.y_train, self.y_test = x.iloc[test], y[train], y[test]
        self.frame_train, self.frame_test = frame[train], frame[test]
        self.rows = encoded(self.frame_train, self.y_train, kind)
        self._labels = coded_labels(label_array(self.y_train)[0])[0] if kind == "classification" else np.array([])
        if kind == "classification" and (lacking := set(self.y_test.tolist()) - set(self._labels.tolist())):
            raise ValueError(f"y must have more rows of every class, got too few of {quoted(min(lacking, key=str))}")
        self.classes = [str(label) for label in self._labels]
        self.task: Task = Classification(len(self.classes)) if self.classes else Regression(loss_function=loss)
        self.features, self.features_test = self.rows.features, self.rows.encoder.encode(self.frame_test)
        self.seconds, self.predictions = {}, {}

    def codes(self, y: np.ndarray) -> np.ndarray:
        """Returns labels as classes 0..K-1; in regression, the targets in float64."""
        return np.searchsorted(self._labels, y) if self.classes else y.astype(np.float64)

    def add(self, name: str, fit: Callable[[], Any], x: Any) -> Any:
        """Returns a fitted model, and keeps its time and its predictions for ``x``, the held-out rows."""
        started = time.perf_counter()
        model = fit()
        self.seconds[name] = time.perf_counter() - started
        self.predictions[name] = np.asarray(quiet(lambda: getattr(model, "predict_proba", model.predict)(x)))
        return model

    def add_rival(self, name: str, rival: Any) -> Any:
        """Returns a fitted model of features and codes, and keeps its time and its predictions."""
        fit = lambda: quiet(lambda: rival.fit(self.features, self.codes(self.y_train)))
        return self.add(name, fit, self.features_test)

    def table(self) -> pd.DataFrame:
        """Returns a DataFrame with the scores of each model and the seconds of its fit, one row for each model."""
        scores = pd.DataFrame({name: self.scores(name) for name in self.predictions}).T
        return scores.assign(seconds=pd.Series(self.seconds).round(2))

    def scores(self, name: str) -> dict[str, float]:
        """Returns the scores of a model on the held-out rows: see :meth:`scores_of`."""
        return self.scores_of(self.predictions[name], self.codes(self.y_test))

    def scores_of(self, predicted: np.ndarray, y: np.ndarray) -> dict[str, float]:
        """Returns scores of predictions by measure; for quantiles, there are no scores of means.

        The area under the curve (AUC) is left out if the rows lack a class.
        """
        loss = {self.task.loss_function.measure: float(self.row_losses(y, predicted).mean())}
        if self.classes:
            labels, chance = predicted.argmax(1), predicted[:, 1] if predicted.shape[1] == 2 else predicted
            scores = {
                "accuracy": float(metrics.accuracy_score(y, labels)),
                "balanced accuracy": float(quiet(lambda: metrics.balanced_accuracy_score(y, labels))),
            }
            if len(np.unique(y)) == predicted.shape[1]:
                scores["AUC"] = float(metrics.roc_auc_score(y, chance, multi_class="ovr"))
            return scores | loss
        if isinstance(self.task.loss_function, losses.Quantile):
            return loss | {"rows below the prediction": float(np.mean(y < predicted))}
        means = {
            "R²": metrics.r2_score,
            "RMSE": metrics.root_mean_squared_error,
            "mean absolute error": metrics.mean_absolute_error,
        }
        scores = {title: float(score(y, predicted)) for title, score in means.items()}
        return scores if isinstance(self.task.loss_function, losses.SquaredError) else loss | scores

    def row_losses(self, y: np.ndarray, predicted: np.ndarray) -> np.ndarray:
        """Returns the loss on each row; infinite if the loss has a log link and a prediction is not positive."""
        if self.task.link_name == "exp" and predicted.min() <= 0:
            return np.full(len(y), np.inf)
        return self.task.prediction_loss(predicted, y)

    def comparison(self, *names: str) -> Comparison:
        """Returns the mean losses of models on the held-out rows, by default of all; the first is compared."""
        y = self.codes(self.y_test)
        row_losses = {name: self.row_losses(y, self.predictions[name]) for name in names or self.predictions}
        where = number_of(len(y), "held-out row")
        return Comparison.from_losses(row_losses, None, self.task.loss_function.measure, where)


class HeldOut(HeldOutRows):
    """Two estimators and their rivals on held-out rows.

    ``model`` and ``other`` are estimators of jtrees with two recipes, before their fits; the other is one of the
    rivals. ``forests`` says whether ensembles are among the rivals. :class:`HeldOutRows` describes the other arguments.

    Attributes:
      name, other_name: names of the recipes of the two estimators, under which their predictions are.
      other_loss: names of the rivals that do not minimise the loss of the task.
    """

    def __init__(self, model: Any, other: Any, *, seed: int, forests: bool, **rows: Any):
        super().__init__(kind="classification" if is_classifier(model) else "regression", seed=seed, **rows)
        self.model, self.other, self.seed = model, other, seed
        self.name, self.other_name = (type(estimator._recipe()).__name__ for estimator in (model, other))
        for name, estimator in ((self.name, model), (self.other_name, other)):
            self.add(name, lambda estimator=estimator: estimator.fit(self.rows, self.y_train), self.frame_test)
        depth = _CART_DEPTH if model.tree_ is None else max(1, model.tree_.depth)
        models, self.other_loss = rivals(self.task, len(self.y_train), depth=depth, seed=seed, forests=forests)
        for name, rival in models.items():
            self.add_rival(name, rival)

    @property
    def tree_estimator(self) -> Any:
        """The estimator whose model is one tree: the estimator itself, or else the other estimator; or None."""
        return next((estimator for estimator in (self.model, self.other) if estimator.tree_ is not None), None)

    @functools.cached_property
    def importances(self) -> tuple[dict[str, np.ndarray], str]:
        """The fall of a score when a column is shuffled, by column, and the description of the fall."""
        rows, y = self.frame_test[:_SHUFFLED], self.codes(self.y_test)[:_SHUFFLED]
        score: Callable[..., float] = lambda y, predicted: -self.row_losses(y, np.asarray(predicted, np.float64)).mean()
        description = "the log likelihood falls" if self.classes else f"the {self.task.loss_function.measure} rises"
        if not self.classes and isinstance(self.task.loss_function, losses.SquaredError):
            score, description = metrics.r2_score, "R² falls"
        return quiet(lambda: explain.permutation_importance(self.model.model_, rows, y, score)), description

    def _scores_text(self, name: str) -> str:
        """Returns the scores of a model; the accuracy of the constant follows the accuracy."""
        texts = {title: f"{title} {number_text(score, 4)}" for title, score in self.scores(name).items()}
        if self.classes:
            texts["accuracy"] += f" ({self.scores('constant')['accuracy']:.4g} for a constant)"
        return ", ".join(texts.values())

    def summary(self, kind: str) -> list[str]:
        """Returns the verdict, the scores, the best rival, the kind of model and the top columns, as lines."""
        comparison = self.comparison()
        best = comparison.rivals[0]
        falls, fall_text = self.importances
        means = {name: float(np.mean(fall)) for name, fall in falls.items()}
        top = [name for name in sorted(means, key=means.__getitem__, reverse=True) if means[name] > 0][:_TOP]
        columns = ", ".join(f"{name} ({means[name]:.2g})" for name in top) or "no column helps on the held-out rows"
        return [
            comparison.verdict(self.name),
            f"{self.name}: {self._scores_text(self.name)}",
            f"best rival, {best}: {self._scores_text(best)}",
            f"kind of model: {kind}",
            f"top columns, by how much {fall_text} without them: {columns}",
        ]


def encoded(frame: Any, y: np.ndarray, task: Literal["regression", "classification"]) -> EncodedTable:
    """Returns training rows in the kinds of a schema, a :class:`jtrees.tables.Frame`, with their features."""
    codes = coded_labels(label_array(y)[0])[1] if task == "classification" else y.astype(np.float64)
    return EncodedTable(frame, *TableEncoder.fit(frame, codes, task=task))


def kind_of_model(model: Any) -> str:
    """Returns the kind of an estimator's model, and how it was found, as text."""
    if model.tree_ is not None:
        return kind_of(model.tree_, model.report_.chosen)
    return kind_of_forest(model.model_ if model.encoder_ is None else model.model_.model)


def quiet(function: Callable[[], Any]) -> Any:
    """Returns the result of a function without its warnings, such as warnings of missing values or convergence."""
    with warnings.catch_warnings(action="ignore"):
        return function()
