"""Scikit-learn estimators of one tree and of sums of trees (``pip install "jtrees[sklearn]"``).

Shapes, labels and weights follow scikit-learn. Otherwise, the estimators behave like :func:`jtrees.fit`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from jax.typing import ArrayLike
import numpy as np

from jtrees import distributed, io, leaves, losses, validation as checks
from jtrees.ensembles import Boosted
from jtrees.methods import GET, NonGreedy
from jtrees.tasks import Regression
from jtrees.tasks.custom import named
from jtrees.tasks.labels import coded_labels, label_array

try:
    from sklearn.base import ClassifierMixin, MultiOutputMixin, RegressorMixin
    from sklearn.utils.class_weight import compute_sample_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted

    from jtrees._estimator import TreeEstimator, positive_rows, unchanged_by_errors
except ImportError as error:
    raise ImportError('estimators need scikit-learn: pip install "jtrees[sklearn]"') from error

__all__ = ["BoostedClassifier", "BoostedRegressor", "TreeClassifier", "TreeRegressor"]


class _Regressor(MultiOutputMixin, RegressorMixin, TreeEstimator):
    def __init__(
        self,
        recipe: Any = None,
        *,
        random_state: Any = None,
        validation_fraction: float | None = None,
        monotonic_cst: Any = None,
        columns: Any = None,
        missing: Sequence[str | float] = (),
        max_seconds: float | None = None,
        progress: bool = False,
        loss: Any = "squared_error",
        quantile: float | tuple[float, ...] | None = None,
    ):
        self._store(locals())

    def _default(self, rows: int | None) -> Any:
        recipe, is_linear = super()._default(rows), self.loss == "squared_error" and self.monotonic_cst is None
        return recipe if is_linear or not isinstance(recipe, GET) else recipe.replace(leaves="constant")

    def _task(self, y: np.ndarray) -> Regression:
        if self.quantile is not None and self.loss != "quantile":
            raise ValueError(f'quantile must be None unless loss is "quantile", got loss={checks.quoted(self.loss)}')
        loss: Any = losses.Quantile(self.quantile) if self.quantile is not None else named(self.loss)
        return Regression(y.shape[1] if y.ndim > 1 else None, loss)

    @unchanged_by_errors
    def fit(self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fits the recipe to a table.

        Args:
          X: features, ``(n, p)``: an array or a DataFrame.
          y: targets, ``(n,)`` or ``(n, k)``.
          sample_weight: nonnegative weights, ``(n,)``, as for :func:`jtrees.fit`.

        Raises:
          ValueError: if an argument is invalid. The message names the argument, what was expected, and the value.
        """
        raw = np.asarray(y)
        if raw.ndim and raw.dtype.kind in "OSUmM":  # scikit-learn does not locate invalid entries
            checks.as_numeric("y", y)
        x, targets = self._checked(X, y, multi_output=True, y_numeric=True)
        x, targets, weight = positive_rows(x, targets.astype(np.float64), sample_weight)
        columns = targets.reshape(len(targets), -1)
        single = columns.shape[1] == 1
        task = self._task(columns[:, 0] if single else targets)
        loss = task.loss_function
        loss.check_training(targets)
        loss.scaled(np.ones(columns.shape[1]))  # refuses several targets if the loss does, even if some are constant
        self._shape = targets.shape[1:] if loss.outputs is None else task.shape
        self._first, self._varies = columns[0], (columns != columns[0]).any(0)
        varying = columns[:, self._varies]
        if varying.shape[1]:
            self._learn(x, varying if varying.shape[1] > 1 else varying[:, 0], weight)
        else:
            self._learn_constant(x, leaves.Values(np.broadcast_to(columns[:1], (2, *(task.shape or (1,)))).copy()))
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Returns predictions in float64, in the shape of the targets. Several quantiles give ``(n, levels)``."""
        predictions = self._answers(X)
        if predictions.shape[1] < np.prod(self._shape, dtype=int):  # the model predicts only targets that vary
            out = np.tile(self._first, (len(predictions), 1))
            out[:, self._varies] = predictions
            predictions = out
        return predictions.reshape(-1, *self._shape)


class _Classifier(ClassifierMixin, TreeEstimator):
    def __init__(
        self,
        recipe: Any = None,
        *,
        random_state: Any = None,
        validation_fraction: float | None = None,
        monotonic_cst: Any = None,
        columns: Any = None,
        missing: Sequence[str | float] = (),
        max_seconds: float | None = None,
        progress: bool = False,
        class_weight: Any = None,
    ):
        self._store(locals())

    @unchanged_by_errors
    def fit(self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fits the recipe to a table.

        Args:
          X: features, ``(n, p)``: an array or a DataFrame.
          y: labels of any type, ``(n,)``.
          sample_weight: nonnegative weights, ``(n,)``, as for :func:`jtrees.fit`.

        Raises:
          ValueError: if an argument is invalid. The message names the argument, what was expected, and the value.
        """
        classes = None
        if y is not None:
            labels, unclear = label_array(y)
            if unclear:
                raise ValueError(f"y must hold labels of one type, got {unclear}")
            y = labels if labels.dtype.kind in "biuf" else y
            if labels.ndim == 1 and labels.dtype.kind in "OS":  # scikit-learn takes few types of labels
                classes, y = coded_labels(labels)
        x, labels = self._checked(X, y)
        check_classification_targets(labels)
        self.classes_, labels = coded_labels(labels) if classes is None else (classes, labels)
        _warn_of_spaces(self.classes_)
        x, labels, weight = positive_rows(x, labels, self._class_weighted(labels, sample_weight))
        self._present, labels = np.unique(labels, return_inverse=True)  # classes with rows of positive weight
        if len(self._present) > 1:
            names = [str(label) for label in self.classes_[self._present]]
            self._learn(x, labels, weight, names)
            if self.encoder_ is not None:  # names of features that are means of classes have labels instead of numbers
                self.encoder_ = self.encoder_.with_class_names(names)
                self.model_ = self.model_.replace(encoder=self.encoder_)
        else:
            self._learn_constant(x, leaves.Values(np.ones((2, 1)), losses.Frequencies()))
        return self

    def _class_weighted(self, labels: np.ndarray, sample_weight: Any) -> Any:
        """Returns the sample weights times the class weights of the labels 0..K-1."""
        if self.class_weight is None:
            return sample_weight
        weights, classes = self.class_weight, self.classes_
        if classes.dtype == object:  # scikit-learn takes few types of labels
            places, classes = {label: place for place, label in enumerate(classes)}, np.arange(len(classes))
            if isinstance(weights, Mapping):
                weights = {places.get(label, (label,)): weight for label, weight in weights.items()}
        factors = compute_sample_weight(weights, classes[labels])
        if not (np.isfinite(factors) & (factors >= 0)).all() or not factors.any():
            got = checks.quoted(self.class_weight)
            raise ValueError(f"class_weight must hold finite numbers of at least 0 by label, not all 0, got {got}")
        return factors if sample_weight is None else factors * checks.relative_weight(sample_weight, len(labels))

    def _task(self, y: np.ndarray) -> str:
        return "classification"

    def predict_proba(self, X: Any) -> np.ndarray:
        """Returns class probabilities in the order of ``classes_``, in float64, ``(n, K)``."""
        predictions = self._answers(X)
        out = np.zeros((len(predictions), len(self.classes_)))
        out[:, self._present] = predictions / predictions.sum(1, keepdims=True)
        return out

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Returns the logarithms of :meth:`predict_proba`, ``(n, K)``: minus infinity for a probability of 0."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))

    def predict(self, X: Any) -> np.ndarray:
        """Returns the most probable label of each sample."""
        most_probable = self.predict_proba(X).argmax(1)  # raises before `classes_` if there was no fit
        return self.classes_[most_probable]

    def score(self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Returns the accuracy, the weighted share of the rows whose label is predicted."""
        check_is_fitted(self)
        labels, unclear = label_array(y)
        if unclear:
            raise ValueError(f"y must hold labels of one type, got {unclear}")
        if labels.ndim != 1 or self.classes_.dtype.kind not in "OS":
            return super().score(X, y, sample_weight)
        predicted = self.predict(X)
        checks.check_rows(labels, len(predicted))
        weights = None if sample_weight is None else checks.check_weight(sample_weight, len(labels))
        return float(np.average(predicted == labels, weights=weights))


@io.estimator
class TreeRegressor(_Regressor):
    """A scikit-learn regressor: one tree by default, or the model of any recipe.

    ``TreeRegressor().fit(X, y).predict(X)``. The tree can be read: ``print(model.model_.to_text())``. On most tables,
    the sum of trees of :class:`BoostedRegressor` is more accurate. Predictions are float64, in the shape of the
    targets. X is an array, with NaN for missing values, or a DataFrame with numbers, booleans, dates and text. A
    :class:`jtrees.tables.TableEncoder` encodes them. An array of objects with text is read like a DataFrame, by the
    positions of its columns.

    :func:`jtrees.fit` gives the same model for the same rows. A row of weight 2 contributes to the training loss like
    two equal rows. The models can still differ, as they do for shuffled rows, because mini-batches and bootstrap
    samples are drawn by row. They also differ if leaves are smoothed or shrunk, because uneven weights then count as
    fewer samples.

    Args:
      recipe: the recipe, such as ``jtrees.GET(depth=3)``. Its options are nested parameters: ``recipe__depth``, and
        ``recipe__base__depth`` for its base. None: ``default_recipe``. A mapping has other options of the default
        recipe by name, ``{"depth": 3}``, as ``set_params(recipe__depth=3)`` sets them. The default is one tree of
        GET of depth 5 with linear leaves. On average over eight data sets, it is better than a random forest
        (``experiments.estimators``).
      random_state: seed or generator, a ``RandomState`` or a ``Generator``. None: every fit gives another model.
      validation_fraction: fraction of the rows that are held out as a validation set, with their weights. None: no
        validation set. The recipe determines its use.
      monotonic_cst: columns in which predictions must not fall or must not rise. Like ``monotone`` of
        :func:`jtrees.fit`, it holds signs by name, or a sign for each column. The default recipe then has constant
        leaves.
      columns: what columns of a raw table hold, ``{"year": "number", "id": "drop"}``, as for :func:`jtrees.fit`.
      missing: texts and numbers that mean a missing value, such as ``("-", -999)``, as for :func:`jtrees.fit`.
      max_seconds: deadline of ``fit``, which then returns the best model so far.
      progress: whether ``fit`` shows a bar with the loss and the remaining time. The default recipe takes seconds.
      loss: a loss of :mod:`jtrees.losses` or its name: ``"squared_error"``, ``"absolute_error"``, ``"huber"``,
        ``"quantile"``, ``"poisson"``, ``"gamma"``, ``"tweedie"``; or a function ``(outputs, y) -> (n,)`` of targets
        scaled to [0, 1]. The default recipe has constant leaves for every loss except the squared error.
      quantile: level of the quantile for ``loss="quantile"``, or several levels, which predict ``(n, levels)``.

    Attributes:
      model_: the model, such as a :class:`jtrees.ObliqueTree` or a :class:`jtrees.Forest`. For a raw table, a
        :class:`jtrees.tables.FrameModel`. Its arrays are NumPy arrays.
      tree_: the model if it is a single tree, else None. For a raw table, the tree over the encoded features.
      encoder_: the :class:`jtrees.tables.TableEncoder` of a DataFrame or of an array with NaN, else None.
      loss_: loss of the model, as in :class:`jtrees.FitResult`.
      report_: report of the fit, a :class:`jtrees.search.FitReport`.
      feature_importances_: how much the prediction depends on each column of X.
      n_features_in_: number of columns of X.
      feature_names_in_: names of the columns of X, if it has names.

    In a grid search, keep ``n_jobs=1``: equal static options compile once, and a fit uses several cores. An alternative
    is ``n_jobs=2`` with ``joblib.parallel_config(backend="threading")``. Worker processes compile separately, which
    takes longer than they save.

    Ctrl-C ends ``fit`` with the best model so far and a ``ConvergenceWarning``. :func:`jtrees.save` and
    :func:`jtrees.load` store a fitted estimator in one file.

    Example:
      >>> from jtrees.estimators import TreeRegressor
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> model = TreeRegressor(jtrees.GET(depth=1, starts=1, epochs=20), random_state=0).fit(x, np.sign(x[:, 0]))
      >>> print(model.predict([[-0.5], [0.5]]))
      [-1.  1.]
    """

    default_recipe = GET(depth=5, leaves="linear", starts=4, epochs=1000, precondition=0.0, shrink=False)


@io.estimator
class BoostedRegressor(_Regressor):
    """A scikit-learn regressor: a sum of boosted trees by default, or the model of any recipe.

    ``BoostedRegressor().fit(X, y).predict(X)``. Parameters and attributes are as in :class:`TreeRegressor`. Only the
    default recipe differs. It is :class:`jtrees.Boosted`: trees of depth 5 are added one by one. Held-out rows choose
    their number, and whether their splits are oblique. ``BoostedRegressor({"rounds": 100})`` changes options of this
    recipe. A recipe replaces it, such as ``jtrees.Boosted(jtrees.GET(depth=3))``. For fewer than 10 rows, the default
    recipe has ten rounds. ``experiments.estimators`` compares the four estimators with other software.

    Example:
      >>> from jtrees.estimators import BoostedRegressor
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> model = BoostedRegressor({"rounds": 50, "base__epochs": 5}, random_state=0).fit(x, np.sign(x[:, 0]))
      >>> print(model.predict([[-0.5], [0.5]]).round())
      [-1.  1.]
    """

    default_recipe = Boosted()


@io.estimator
class TreeClassifier(_Classifier):
    """A scikit-learn classifier: one tree by default, or the model of any recipe.

    ``TreeClassifier().fit(X, y).predict_proba(X)``. The tree can be read: ``print(model.model_.to_text())``. On most
    tables, the sum of trees of :class:`BoostedClassifier` is more accurate. Labels can have any type. X is as for
    :class:`TreeRegressor`. :func:`jtrees.fit` gives the same model for the same rows.

    Parameters and attributes are as in :class:`TreeRegressor`, except ``loss`` and ``quantile``. As in scikit-learn,
    ``class_weight`` is ``"balanced"`` or a factor of the sample weights for each label, ``{"yes": 2.0}``. The attribute
    ``classes_`` holds the sorted labels. The default recipe is :class:`jtrees.NonGreedy` of depth 6. Of all single hard
    trees, :class:`jtrees.NonGreedy` of depth 8 has the lowest log loss (``experiments.systems``).

    Example:
      >>> from jtrees.estimators import TreeClassifier
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> labels = np.where(x[:, 0] > 0, "high", "low")
      >>> model = TreeClassifier(jtrees.GET(depth=1, starts=1, epochs=20), random_state=0).fit(x, labels)
      >>> print(model.predict([[-0.5], [0.5]]))
      ['low' 'high']
    """

    default_recipe = NonGreedy(depth=6)


@io.estimator
class BoostedClassifier(_Classifier):
    """A scikit-learn classifier: a sum of boosted trees by default, or the model of any recipe.

    ``BoostedClassifier().fit(X, y).predict_proba(X)``. Parameters and attributes are as in :class:`TreeClassifier`.
    Only the default recipe differs. It is :class:`jtrees.Boosted`, as in :class:`BoostedRegressor`.

    Example:
      >>> from jtrees.estimators import BoostedClassifier
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> labels = np.where(x[:, 0] > 0, "high", "low")
      >>> model = BoostedClassifier({"rounds": 50, "base__epochs": 5}, random_state=0).fit(x, labels)
      >>> print(model.predict([[-0.5], [0.5]]))
      ['low' 'high']
    """

    default_recipe = Boosted()


def _warn_of_spaces(classes: np.ndarray) -> None:
    """Warns of labels that differ only in spaces at their ends."""
    stripped: dict[str, list[str]] = {}
    for label in classes.tolist():
        stripped.setdefault(label.strip() if isinstance(label, str) else label, []).append(label)
    if pairs := [labels for labels in stripped.values() if len(labels) > 1]:
        distributed.warn(f"y has labels that differ only in spaces: {checks.quoted_list(pairs[0])}")
