"""Comparison of a fitted estimator with models of scikit-learn on held-out rows: scores, a verdict and importances."""

from collections.abc import Callable
import time
from typing import Any
import warnings

import numpy as np
from sklearn.base import is_classifier
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.linear_model import (
    GammaRegressor,
    LogisticRegression,
    PoissonRegressor,
    QuantileRegressor,
    Ridge,
    TweedieRegressor,
)
from sklearn.metrics import (
    accuracy_score,
    balanced_accuracy_score,
    mean_absolute_error,
    r2_score,
    roc_auc_score,
    root_mean_squared_error,
)
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from jtrees import explain, losses
from jtrees.data.baselines import Comparison
from jtrees.description import kind_of
from jtrees.tables import TableEncoder
from jtrees.tasks import Classification, Regression

_SHUFFLED = 2000  # largest number of rows for permutation importances
_LINEAR_ROWS = 5000  # largest number of training rows for a linear program of quantiles
_CART_DEPTH = 4  # depth of the CART rival if the model is not a tree; else it has the depth of the tree
_TOP = 3  # number of columns in the summary


def divided(y: np.ndarray, task: str, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of the training rows and the held-out rows.

    The held-out fraction is the same for each class, if each class has two rows and the held-out rows are enough.
    """
    strata: Any = None
    if task == "classification":
        counts = np.unique(y, return_counts=True)[1]
        strata = y if counts.min() >= 2 and len(counts) <= round(share * len(y)) else None
    train, test = train_test_split(np.arange(len(y)), test_size=share, stratify=strata, random_state=seed)
    return np.asarray(train), np.asarray(test)


class HeldOut:
    """An estimator, held-out rows, and the predictions of the estimator and its rivals for the held-out rows.


    Attributes:
      model: the fitted estimator.
      loss: the loss of regression.
      classes: the labels as text; empty in regression.
      features: the training rows as features, ``(n, p)``, as all models were trained on them. Target means are means
        over other rows.
      predictions: predictions, or class probabilities, by name of the model. The first model is the estimator.
      seconds: seconds to fit, by name of the model.
    """

    def __init__(self, model: Any, loss: losses.Loss, x: Any, y: np.ndarray, *, share: float, seed: int, forests: bool):
        """Holds out a fraction ``share`` of the rows; ``forests`` adds ensembles to the rivals."""
        task: Any = "classification" if is_classifier(model) else "regression"
        train, test = divided(y, task, share, seed)
        self.x_train, self.y_train = x.iloc[train], y[train]
        self.x_test, self.y_test = x.iloc[test], y[test]
        started = time.perf_counter()
        model.fit(self.x_train, self.y_train)
        self.model, self.loss = model, loss
        self.name = type(model._recipe()).__name__
        self.seconds = {self.name: time.perf_counter() - started}
        self.classes = [str(label) for label in model.classes_] if task == "classification" else []
        self.predictions = {self.name: self.predicted(model, self.x_test)}
        codes = self.codes(self.y_train)
        encoder, self.features = TableEncoder.fit(self.x_train, codes, task=task, columns=model.columns)
        features_test = quiet(lambda: encoder.transform(self.x_test))
        depth = _CART_DEPTH if model.tree_ is None else max(1, model.tree_.depth)
        rivals = classifiers(depth, seed) if self.classes else regressors(loss, depth, seed, len(train))
        for name, rival in rivals.items():
            if name in FORESTS and not forests:
                continue
            started = time.perf_counter()
            quiet(lambda rival=rival: rival.fit(self.features, self.codes(self.y_train)))
            self.seconds[name] = time.perf_counter() - started
            self.predictions[name] = self.predicted(rival, features_test)

    def codes(self, y: np.ndarray) -> np.ndarray:
        """Returns labels as classes 0..K-1; in regression, the targets."""
        return np.searchsorted(self.model.classes_, y) if self.classes else y

    def predicted(self, model: Any, x: Any) -> np.ndarray:
        """Returns predictions; in classification, the probabilities of all classes."""
        if not self.classes:
            return quiet(lambda: model.predict(x))
        probabilities = quiet(lambda: model.predict_proba(x))
        if probabilities.shape[1] == len(self.classes):
            return probabilities / probabilities.sum(1, keepdims=True)
        all_classes = np.zeros((len(probabilities), len(self.classes)))  # the training rows lack a class
        all_classes[:, model.classes_] = probabilities
        return all_classes

    # --- Scores ------------------------------------------------------------------------------------------------------

    def scores(self, name: str) -> dict[str, float]:
        """Returns the scores of a model on the held-out rows, by measure; for quantiles, there are no scores of means.

        The area under the curve (AUC) is NaN if the held-out rows lack a class.
        """
        predicted, y = self.predictions[name], self.codes(self.y_test)
        loss = self.mean_loss(y, predicted)
        if self.classes:
            labels, chance = predicted.argmax(1), predicted[:, 1] if predicted.shape[1] == 2 else predicted
            every_class = len(np.unique(y)) == predicted.shape[1]
            return {
                "accuracy": float(accuracy_score(y, labels)),
                "balanced accuracy": float(quiet(lambda: balanced_accuracy_score(y, labels))),
                "AUC": float(roc_auc_score(y, chance, multi_class="ovr")) if every_class else np.nan,
                "log loss": loss,
            }
        if isinstance(self.loss, losses.Quantile):
            return {self.loss.measure: loss, "rows below the prediction": float(np.mean(y < predicted))}
        scores = {} if isinstance(self.loss, (losses.SquaredError, losses.AbsoluteError)) else {self.loss.measure: loss}
        means = {"R²": r2_score, "RMSE": root_mean_squared_error, "mean absolute error": mean_absolute_error}
        return scores | {title: float(score(y, predicted)) for title, score in means.items()}

    def losses_of(self, y: np.ndarray, predicted: np.ndarray) -> np.ndarray:
        """Returns the loss on each row; infinite if the loss has a log link and a prediction is not positive."""
        if self.classes:
            return Classification(len(self.classes)).host_losses(predicted, y, None)
        if self.loss.link == "exp" and predicted.min() <= 0:
            return np.full(len(y), np.inf)
        return Regression(loss_function=self.loss).host_losses(predicted, y.astype(np.float64), 1.0)

    def mean_loss(self, y: np.ndarray, predicted: np.ndarray) -> float:
        """Returns the mean of :meth:`losses_of`."""
        return float(self.losses_of(y, predicted).mean())

    def comparison(self) -> Comparison:
        """Returns the mean losses of all models on the held-out rows."""
        y = self.codes(self.y_test)
        row_losses = {name: self.losses_of(y, predicted) for name, predicted in self.predictions.items()}
        where = f"{len(y)} held-out row{'' if len(y) == 1 else 's'}"
        return Comparison.from_losses(row_losses, None, "log loss" if self.classes else self.loss.measure, where)

    # --- Summary -----------------------------------------------------------------------------------------------------

    def importances(self) -> tuple[dict[str, np.ndarray], str]:
        """Returns the fall of a score when a column is shuffled, by column, and the description of the fall."""
        rows, y = self.x_test.iloc[:_SHUFFLED], self.codes(self.y_test)[:_SHUFFLED]
        score: Callable[..., float] = lambda y, predicted: -self.mean_loss(y, np.asarray(predicted, np.float64))
        description = "the log likelihood falls" if self.classes else f"the {self.loss.measure} rises"
        if not self.classes and isinstance(self.loss, losses.SquaredError):
            score, description = r2_score, "R² falls"
        return quiet(lambda: explain.permutation_importance(self.model.model_, rows, y, score)), description

    def summary(self, kind: str) -> list[str]:
        """Returns the verdict, the scores, the best rival, the kind of model and the top columns, as lines."""
        comparison = self.comparison()
        rivals = list(comparison.losses)[1:]
        best = min(rivals, key=comparison.losses.__getitem__)
        show = lambda name: ", ".join(f"{title} {score:.4g}" for title, score in self.scores(name).items())
        falls, fall_text = self.importances()
        means = {name: float(np.mean(fall)) for name, fall in falls.items()}
        top = [name for name in sorted(means, key=means.__getitem__, reverse=True) if means[name] > 0][:_TOP]
        columns = ", ".join(f"{name} ({means[name]:.2g})" for name in top) or "no column helps on the held-out rows"
        return [
            comparison.verdict(self.name),
            f"{self.name}: {show(self.name)}",
            f"best rival, {best}: {show(best)}",
            f"kind of model: {kind}",
            f"top columns, by how much {fall_text} without them: {columns}",
        ]


# --- scikit-learn's models -------------------------------------------------------------------------------------------

FORESTS = ("random forest", "gradient boosting")


def classifiers(depth: int, seed: int) -> dict[str, Any]:
    """Returns scikit-learn's classifiers by name."""
    return {
        "constant": DummyClassifier(strategy="prior"),
        "linear model": make_pipeline(StandardScaler(), LogisticRegression()),
        f"CART, depth {depth}": DecisionTreeClassifier(max_depth=depth, random_state=seed),
        "random forest": RandomForestClassifier(random_state=seed, n_jobs=-1),
        "gradient boosting": HistGradientBoostingClassifier(random_state=seed),
    }


def regressors(loss: losses.Loss, depth: int, seed: int, rows: int) -> dict[str, Any]:
    """Returns scikit-learn's regressors by name, with the same loss if they support it, else with least squares."""
    constant, linear, split = DummyRegressor(), Ridge(), "squared_error"
    boosted: dict[str, Any] = {}
    if isinstance(loss, losses.AbsoluteError):
        constant, boosted = DummyRegressor(strategy="median"), {"loss": "absolute_error"}
    elif isinstance(loss, losses.Quantile):
        level: Any = loss.levels
        constant = DummyRegressor(strategy="quantile", quantile=level)
        linear = QuantileRegressor(quantile=level, alpha=0) if rows <= _LINEAR_ROWS else None
        boosted = {"loss": "quantile", "quantile": level}
    elif isinstance(loss, losses.Poisson):
        linear, split, boosted = PoissonRegressor(), "poisson", {"loss": "poisson"}
    elif isinstance(loss, losses.Gamma):
        linear, boosted = GammaRegressor(), {"loss": "gamma"}
    elif isinstance(loss, losses.Tweedie):
        linear, boosted = TweedieRegressor(power=loss.variance_power, link="log"), {"loss": "poisson"}
    kinds: dict[str, Any] = {
        "constant": constant,
        "linear model": None if linear is None else make_pipeline(StandardScaler(), linear),
        f"CART, depth {depth}": DecisionTreeRegressor(criterion=split, max_depth=depth, random_state=seed),
        "random forest": RandomForestRegressor(criterion=split, random_state=seed, n_jobs=-1),
        "gradient boosting": HistGradientBoostingRegressor(random_state=seed, **boosted),
    }
    return {name: kind for name, kind in kinds.items() if kind is not None}


def kind_of_model(model: Any) -> str:
    """Returns the kind of an estimator's model, and how it was found, as text."""
    return repr(model.model_) if model.tree_ is None else kind_of(model.tree_, model.report_.chosen)


def quiet(function: Callable[[], Any]) -> Any:
    """Returns the result of a function without its warnings, such as warnings of missing values or convergence."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function()
