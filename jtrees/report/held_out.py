"""Two fitted estimators and their rivals on held-out rows: scores, a verdict and importances (needs scikit-learn)."""

from collections.abc import Callable
import functools
import time
from typing import Any, Literal
import warnings

import numpy as np
from sklearn import metrics
from sklearn.base import is_classifier

from jtrees import explain, losses
from jtrees.data import held_out
from jtrees.description import kind_of, kind_of_forest
from jtrees.report.comparison import Comparison
from jtrees.report.rivals import rivals
from jtrees.tables import Frame
from jtrees.tables.encoder import EncodedTable
from jtrees.tables.inference import inferred
from jtrees.tasks import Classification, Regression, Task
from jtrees.tasks.labels import coded_labels, label_array
from jtrees.text import number_text

_SHUFFLED = 2000  # largest number of rows for permutation importances
_CART_DEPTH = 4  # depth of the CART rival if the model is not a tree; else it has the depth of the tree
_TOP = 3  # number of columns in the summary


class HeldOut:
    """An estimator, held-out rows, and the predictions of the estimator and its rivals for the held-out rows.

    Args:
      model: the estimator before its fit. It is fitted to the rows that are not held out.
      other: another estimator of jtrees with another recipe, before its fit, which is one of the rivals.
      loss: the loss of regression.
      x: the columns, a DataFrame of pandas.
      y: the targets, ``(n,)``.
      frame: the columns in the kinds of a schema. None: x is read, with a schema of the training rows if the estimator
        has none.
      share: fraction of the rows to hold out.
      seed: seed of the split and of the rivals.
      forests: whether ensembles are among the rivals.

    Attributes:
      name: name of the recipe of the estimator.
      other_name: name of the recipe of the other estimator.
      task: what is predicted.
      classes: the labels as text; empty in regression.
      x_test: the held-out rows as they came.
      frame_train: the training rows in the kinds of the schema.
      frame_test: the held-out rows in the kinds of the schema.
      y_train: the targets of the training rows.
      y_test: the targets of the held-out rows.
      features: the training rows as features, ``(n, p)``, as all models were trained on them. Target means are means
        over other rows.
      predictions: predictions, or class probabilities, by name of the model. The first model is the estimator.
      seconds: seconds to fit, by name of the model.
      other_loss: names of the rivals that do not minimise the loss of the task.
    """

    def __init__(
        self,
        model: Any,
        other: Any,
        loss: losses.Loss,
        x: Any,
        y: np.ndarray,
        *,
        frame: Frame | None = None,
        share: float,
        seed: int,
        forests: bool,
    ):
        kind: Any = "classification" if is_classifier(model) else "regression"
        train, test = divided(y, kind, share, seed)
        self.x_test, self.y_train, self.y_test = x.iloc[test], y[train], y[test]
        self.model, self.other, self.seed = model, other, seed
        self.name, self.other_name = (type(estimator._recipe()).__name__ for estimator in (model, other))
        if frame is None:
            schema, self.frame_train = inferred(x.iloc[train], columns=model.columns, missing=model.missing)
            self.frame_test = quiet(lambda: schema.read(self.x_test))
        else:
            self.frame_train, self.frame_test = frame[train], frame[test]
        rows, codes = encoded(self.frame_train, self.y_train, kind)
        self.features = rows.features
        self.seconds, self.predictions = {}, {}
        self._timed(self.name, lambda: model.fit(rows, self.y_train))
        self.classes = [str(label) for label in model.classes_] if kind == "classification" else []
        self.task: Task = Classification(len(self.classes)) if self.classes else Regression(loss_function=loss)
        self._timed(self.other_name, lambda: other.fit(rows, self.y_train))
        for name, estimator in ((self.name, model), (self.other_name, other)):
            self.predictions[name] = self._predicted(estimator, self.frame_test)
        features_test = rows.encoder.encode(self.frame_test)
        depth = _CART_DEPTH if model.tree_ is None else max(1, model.tree_.depth)
        listed, self.other_loss = rivals(self.task, len(train), depth=depth, seed=seed, forests=forests)
        for name, rival in listed.items():
            self._timed(name, lambda rival=rival: quiet(lambda: rival.fit(rows.features, codes)))
            self.predictions[name] = self._predicted(rival, features_test)

    @property
    def tree_estimator(self) -> Any:
        """The estimator whose model is one tree: the estimator itself, or else the other estimator; or None."""
        return next((estimator for estimator in (self.model, self.other) if estimator.tree_ is not None), None)

    def codes(self, y: np.ndarray) -> np.ndarray:
        """Returns labels as classes 0..K-1; in regression, the targets in float64."""
        return np.searchsorted(self.model.classes_, y) if self.classes else y.astype(np.float64)

    def _timed(self, name: str, fit: Callable[[], Any]) -> None:
        started = time.perf_counter()
        fit()
        self.seconds[name] = time.perf_counter() - started

    def _predicted(self, model: Any, x: Any) -> np.ndarray:
        """Returns predictions; in classification, the probabilities of all classes."""
        predicted = quiet(lambda: getattr(model, "predict_proba", model.predict)(x))
        if predicted.ndim == 1 or predicted.shape[1] == len(self.classes):
            return predicted
        all_classes = np.zeros((len(predicted), len(self.classes)))  # the training rows lack a class
        all_classes[:, model.classes_] = predicted
        return all_classes

    # --- Scores ------------------------------------------------------------------------------------------------------

    def scores(self, name: str) -> dict[str, float]:
        """Returns the scores of a model on the held-out rows, by measure; for quantiles, there are no scores of means.

        The area under the curve (AUC) is NaN if the held-out rows lack a class.
        """
        predicted, y = self.predictions[name], self.codes(self.y_test)
        loss = {self.task.loss_function.measure: float(self.row_losses(y, predicted).mean())}
        if self.classes:
            labels, chance = predicted.argmax(1), predicted[:, 1] if predicted.shape[1] == 2 else predicted
            every_class = len(np.unique(y)) == predicted.shape[1]
            return {
                "accuracy": float(metrics.accuracy_score(y, labels)),
                "balanced accuracy": float(quiet(lambda: metrics.balanced_accuracy_score(y, labels))),
                "AUC": float(metrics.roc_auc_score(y, chance, multi_class="ovr")) if every_class else np.nan,
            } | loss
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

    def comparison(self) -> Comparison:
        """Returns the mean losses of all models on the held-out rows."""
        y = self.codes(self.y_test)
        row_losses = {name: self.row_losses(y, predicted) for name, predicted in self.predictions.items()}
        where = f"{len(y)} held-out row{'' if len(y) == 1 else 's'}"
        return Comparison.from_losses(row_losses, None, self.task.loss_function.measure, where)

    # --- Summary -----------------------------------------------------------------------------------------------------

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


def encoded(
    frame: Frame, y: np.ndarray, task: Literal["regression", "classification"]
) -> tuple[EncodedTable, np.ndarray]:
    """Returns training rows in the kinds of a schema with their features, and the targets as numbers or codes."""
    codes = coded_labels(label_array(y)[0])[1] if task == "classification" else y.astype(np.float64)
    return EncodedTable.from_rows(frame, codes, task), codes


def divided(y: np.ndarray, task: str, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of the training rows and the held-out rows.

    The held-out fraction is the same for each class, if each class has two rows and the held-out rows are enough.
    """
    strata: Any = None
    if task == "classification":
        counts = np.unique(y, return_counts=True)[1]
        strata = y if counts.min() >= 2 and len(counts) <= round(share * len(y)) else None
    return held_out.divided(len(y), share, seed, strata)


def kind_of_model(model: Any) -> str:
    """Returns the kind of an estimator's model, and how it was found, as text."""
    if model.tree_ is not None:
        return kind_of(model.tree_, model.report_.chosen)
    return kind_of_forest(model.model_ if model.encoder_ is None else model.model_.model)


def quiet(function: Callable[[], Any]) -> Any:
    """Returns the result of a function without its warnings, such as warnings of missing values or convergence."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function()
