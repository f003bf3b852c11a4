"""Two scikit-learn estimators, which take any recipe as an argument (``pip install "jtrees[sklearn]"``).

Shapes, labels and weights follow scikit-learn; everything else is as in :func:`jtrees.fit`.
"""

from typing import Any, Self
import warnings

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from jtrees import leaves, losses, processes, topology, validation as checks
from jtrees.data import Columns, Frame, FrameModel, read_frame
from jtrees.ensembles import Bagged
from jtrees.losses.names import named
from jtrees.methods import GET, LatentTree
from jtrees.search import FitReport, Recipe
from jtrees.search.fit import fit
from jtrees.selection.grid import options_of, with_options
from jtrees.tasks import Regression
from jtrees.tree import ObliqueTree

try:
    from scipy import sparse
    from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data
except ImportError as error:
    raise ImportError('estimators need scikit-learn: pip install "jtrees[sklearn]"') from error


class _Tree(BaseEstimator):
    """The common base of the two estimators."""

    default_recipe: Recipe
    _TASK: Any

    def __init__(
        self,
        recipe: Any = None,
        *,
        random_state: Any = None,
        validation_fraction: float | None = None,
        max_seconds: float | None = None,
        progress: bool = False,
    ):
        self.recipe = recipe
        self.random_state = random_state
        self.validation_fraction = validation_fraction
        self.max_seconds = max_seconds
        self.progress = progress

    # --- Parameters: those of the recipe are nested ------------------------------------------------------------------

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Returns parameters by name; if ``deep`` with options of the recipe, as ``recipe__depth``, and its bases."""
        return super().get_params(deep=False) | (_options("recipe", self._recipe()) if deep else {})

    def set_params(self, **params: Any) -> Self:
        """Sets parameters by name; options of the recipe as ``recipe__depth``.

        Raises:
          ValueError: for an unknown name.
        """
        options = {name: value for name, value in params.items() if name.startswith("recipe__")}
        super().set_params(**{name: value for name, value in params.items() if name not in options})
        if options:
            self.recipe = with_options(self._recipe(), {k.removeprefix("recipe__"): v for k, v in options.items()})
        return self

    def _recipe(self) -> Any:
        return self.default_recipe if self.recipe is None else self.recipe

    def _task(self, y: np.ndarray) -> Any:
        return self._TASK

    # --- Fitting -----------------------------------------------------------------------------------------------------

    def _learn(self, x: np.ndarray | Frame, y: np.ndarray, weight: np.ndarray) -> None:
        """Fits to classes 0..K-1, or to targets ``(n,)`` or ``(n, k)``, which must not be constant."""
        processes.require_xla("the fit of an estimator")
        recipe = self._recipe()
        numeric = np.zeros((2, len(x.columns))) if isinstance(x, Frame) else x
        if isinstance(recipe, Recipe) and recipe.targets(numeric, y) is not y:
            raise ValueError(f"recipe must learn from y, got {checks.quoted(recipe)}: give it to jtrees.fit")
        rng = check_random_state(self.random_state)
        options: Any = {"task": self._task(y), "max_seconds": self.max_seconds, "progress": self.progress}
        if self.validation_fraction is not None:
            from sklearn.model_selection import train_test_split  # here, as it takes long to import

            by_class = y if self._TASK == "classification" else None
            drawn: Any = {"test_size": self.validation_fraction, "random_state": rng, "stratify": by_class}
            training, held_out = train_test_split(np.arange(len(x)), **drawn)
            options["validation"] = x[held_out], y[held_out]
            x, y, weight = x[training], y[training], weight[training]
        if (weight != weight[0]).any():
            options["sample_weight"] = weight
        fitted = fit(recipe, x, y, key=jax.random.key(int(rng.randint(np.iinfo(np.int32).max))), **options)
        self.model_, self.tree_, self.loss_, self.report_ = fitted.model, fitted.tree, fitted.loss, fitted.report
        self.columns_ = fitted.model.columns if isinstance(fitted.model, FrameModel) else None
        if fitted.report.ended == "interrupted":
            warnings.warn("interrupted: the model is the best until then", ConvergenceWarning, stacklevel=3)

    def _learn_nothing(self, x: np.ndarray | Frame, of_leaf: Any) -> None:
        """Fits to constant targets a tree with a single leaf."""
        self.columns_ = Columns.fit(x)[0] if isinstance(x, Frame) else None
        features = x.shape[1] if isinstance(x, np.ndarray) else len(self.get_feature_names_out())
        self.model_ = self.tree_ = ObliqueTree(jnp.zeros((1, features)), -jnp.ones(1), of_leaf)
        if self.columns_ is not None:
            self.model_ = FrameModel(self.tree_, self.columns_)
        self.loss_, self.report_ = 0.0, FitReport()

    def _checked(self, X: Any, *y: Any, **options: Any) -> Any:
        """Returns X, or X and y, checked by scikit-learn; a DataFrame, or an array with NaN, as a raw table."""
        for name, array in zip("Xy", (X, *y), strict=False):
            checks.check_unmasked(name, array)
        raw = bool(y) or self.columns_ is not None  # else the model is of numbers alone
        # scikit-learn converts dates to numbers, and does not name an invalid column.
        if (hasattr(X, "columns") and not raw) or getattr(getattr(X, "dtype", None), "kind", None) in ("m", "M"):
            checks.as_numeric("X", X)
        if hasattr(X, "columns") and raw:
            frame, least = read_frame(X) if y else X, options.pop("ensure_min_samples", 1 if y else 0)
            targets = [validate_data(self, y=given, **options) for given in y]
            validate_data(self, X, skip_check_array=True, reset=bool(y))  # its columns
            check_consistent_length(frame, *targets)
            if len(X) < least:
                raise ValueError(f"X must have at least {least} rows, got {len(X)}")
            return (frame, *targets) if y else frame
        options |= {"dtype": (np.float64, np.float32), "ensure_all_finite": "allow-nan" if raw else True}
        if not y:
            return validate_data(self, X, reset=False, ensure_min_samples=0, **options)
        x, targets = validate_data(self, X, *y, **options)
        return read_frame(x) or x, targets

    def _features(self, X: Any) -> np.ndarray:
        """Returns the features of new rows, ``(n, p)``."""
        check_is_fitted(self)
        x = self._checked(X)
        return x if self.columns_ is None else self.columns_.transform(x)

    def _answers(self, X: Any) -> np.ndarray:
        x = self._features(X)
        model = self.model_ if self.columns_ is None else self.model_.model
        answers = np.asarray(model.predict(x), np.float64)
        return answers if answers.ndim == 2 else answers[:, None]

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """Returns the names of the features of the model: of a raw table, such as ``[heating = gas]``.

        Args:
          input_features: names of the columns of X, if it came without; else not used.
        """
        check_is_fitted(self, "n_features_in_")
        if self.columns_ is not None:
            return np.asarray(self.columns_.feature_names, object)
        names = getattr(self, "feature_names_in_", input_features)
        return np.asarray([f"x{j}" for j in range(self.n_features_in_)] if names is None else names, object)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    # --- The tree ----------------------------------------------------------------------------------------------------

    def _single(self) -> ObliqueTree:
        check_is_fitted(self)
        if self.tree_ is None:
            raise AttributeError(f"this needs a single tree; this model is a {self.model_}")
        return self.tree_

    def _path(self, X: Any) -> np.ndarray:
        """Returns the nodes on each sample's path, root first, ``(n, depth + 1)``."""
        tree = self._single()
        return np.asarray(tree.decision_path(self._features(X)), np.int64).T

    def apply(self, X: Any) -> np.ndarray:
        """Returns the leaf of each sample, ``(n,)``: breadth-first indices of nodes, with gaps, root 0.

        Raises:
          AttributeError: if the model is not one tree.
        """
        return self._path(X)[:, -1]

    def decision_path(self, X: Any) -> Any:
        """Returns the nodes on each sample's path: a sparse 0/1 matrix, samples by nodes, numbered as in :meth:`apply`.

        Raises:
          AttributeError: if the model is not one tree.
        """
        path = self._path(X)
        n, levels = path.shape
        ones, ends = np.ones(path.size, np.int64), np.arange(n + 1) * levels
        return sparse.csr_matrix((ones, path.ravel(), ends), shape=(n, topology.num_nodes(levels)))

    def get_depth(self) -> int:
        """Returns the largest number of splits on a path.

        Raises:
          AttributeError: if the model is not one tree.
        """
        splits = self._single().splits
        passed = np.zeros(2 * len(splits) + 1, int)
        for node in range(len(splits)):
            passed[2 * node + 1 : 2 * node + 3] = passed[node] + splits[node]
        return int(passed.max())

    def get_n_leaves(self) -> int:
        """Returns the number of reachable leaves.

        Raises:
          AttributeError: if the model is not one tree.
        """
        return self._single().num_leaves


class TreeRegressor(MultiOutputMixin, RegressorMixin, _Tree):
    """A scikit-learn regressor for any recipe.

    ``TreeRegressor(jtrees.GET(depth=3)).fit(X, y).predict(X)``. Predictions are float64, in the shape of the targets.
    X is an array, with NaN for missing values, or a DataFrame with numbers, booleans, dates and text, as
    :class:`jtrees.data.Columns` encodes them.

    The model is that of :func:`jtrees.fit` on the same rows. A row of weight 2 contributes as much to the training loss
    as two equal rows, but the models can differ, as they do for shuffled rows: mini-batches and bootstrap samples are
    drawn by row, and smoothed or shrunk leaves count uneven weights as fewer samples.

    Args:
      recipe: the recipe, such as ``jtrees.GET(depth=3)``, whose options are nested parameters: ``recipe__depth``, and
        of its base ``recipe__base__depth``. None: ``default_recipe``, in regression one tree of GET of depth 5 with
        linear leaves, on average over eight data sets better than a random forest (``experiments.estimators``).
      random_state: seed, generator, or None for another model at every fit.
      validation_fraction: fraction of the rows held out as a validation set, unweighted; None: none. See the recipe for
        its use.
      max_seconds: deadline of ``fit``, which then returns the best model so far.
      progress: whether ``fit`` shows a bar with the loss and the remaining time. The default recipe takes 10 to 60 s.
      loss: a loss of :mod:`jtrees.losses` or its name: ``"squared_error"``, ``"absolute_error"``, ``"huber"``,
        ``"quantile"``, ``"poisson"``, ``"gamma"``, ``"tweedie"``; or a function ``(outputs, y) -> (n,)`` of targets
        scaled to [0, 1]. For other losses than the squared error the default recipe has constant leaves.
      quantile: level of the quantile for ``loss="quantile"``, or several, which predict ``(n, levels)``.

    Attributes:
      model_: the model, such as a :class:`jtrees.ObliqueTree` or a :class:`jtrees.Forest`; of a raw table, a
        :class:`jtrees.data.FrameModel`.
      tree_: the model if it is a single tree, else None; of a raw table, the tree of its features.
      columns_: the :class:`jtrees.data.Columns` of a DataFrame or an array with NaN, else None.
      loss_: loss of the model, as in :class:`jtrees.FitResult`.
      report_: how the fit went, a :class:`jtrees.search.FitReport`.
      n_features_in_: number of features.
      feature_names_in_: their names, if X had any.

    In a grid search keep ``n_jobs=1``, as equal static options compile once and a fit uses several cores; or set
    ``n_jobs=2`` with ``joblib.parallel_config(backend="threading")``. Worker processes compile separately, which takes
    longer than they save.

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
    _TASK = "regression"

    def __init__(
        self,
        recipe: Any = None,
        *,
        random_state: Any = None,
        validation_fraction: float | None = None,
        max_seconds: float | None = None,
        progress: bool = False,
        loss: Any = "squared_error",
        quantile: float | tuple[float, ...] | None = None,
    ):
        common: Any = {"validation_fraction": validation_fraction, "max_seconds": max_seconds, "progress": progress}
        super().__init__(recipe, random_state=random_state, **common)
        self.loss = loss
        self.quantile = quantile

    def _recipe(self) -> Any:
        if self.recipe is None and self.loss != "squared_error":
            return self.default_recipe.replace(leaves="constant")
        return super()._recipe()

    def _task(self, y: np.ndarray) -> Regression:
        if self.quantile is not None and self.loss != "quantile":
            raise ValueError(f'quantile must be None unless loss is "quantile", got loss={checks.quoted(self.loss)}')
        loss: Any = losses.Quantile(self.quantile) if self.quantile is not None else named(self.loss)
        return Regression(y.shape[1] if y.ndim > 1 else None, loss)

    def fit(self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fits the recipe to a table.

        Args:
          X: features, ``(n, p)``: an array or a DataFrame.
          y: targets, ``(n,)`` or ``(n, k)``.
          sample_weight: nonnegative weights, ``(n,)``, as for :func:`jtrees.fit`.

        Raises:
          ValueError: naming the argument, what was expected and what came.
        """
        given = np.asarray(y)
        if given.ndim and given.dtype.kind in "OSUmM":  # scikit-learn does not locate invalid entries
            checks.as_numeric("y", y)
        options: Any = {"multi_output": True, "y_numeric": True, "ensure_min_samples": 2}
        x, targets = self._checked(X, y, **options)
        x, targets, weight = _weighed(x, targets.astype(np.float64), sample_weight)
        columns = targets.reshape(len(targets), -1)
        single = columns.shape[1] == 1
        task = self._task(columns[:, 0] if single else targets)
        loss = task.loss_function
        loss.check_training(targets)
        loss.scaled(np.ones(columns.shape[1]))  # refuses several targets, some of which may be constant
        self._shape = targets.shape[1:] if loss.outputs is None else task.shape
        self._first, self._varies = columns[0], (columns != columns[0]).any(0)
        varying = columns[:, self._varies]
        if varying.shape[1]:
            self._learn(x, varying if varying.shape[1] > 1 else varying[:, 0], weight)
        else:
            self._learn_nothing(x, leaves.Values(np.broadcast_to(columns[:1], (2, *(task.shape or (1,)))).copy()))
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Returns predictions in float64, in the shape of the targets, or for several quantiles ``(n, levels)``."""
        predictions = self._answers(X)
        if predictions.shape[1] < np.prod(self._shape, dtype=int):  # those of the targets that vary
            out = np.tile(self._first, (len(predictions), 1))
            out[:, self._varies] = predictions
            predictions = out
        return predictions.reshape(-1, *self._shape)


class TreeClassifier(ClassifierMixin, _Tree):
    """A scikit-learn classifier for any recipe.

    ``TreeClassifier(jtrees.GET(depth=3)).fit(X, y).predict_proba(X)``. Labels are of any type, X is as for
    :class:`TreeRegressor`. The model is that of :func:`jtrees.fit` on the same rows.

    Parameters and attributes are those of :class:`TreeRegressor`, and ``classes_``, the sorted labels. The default is
    eight bagged LatentTrees of depth 5, on average over sixteen data sets as good as a random forest
    (``experiments.estimators``); pass a recipe for a single, interpretable tree.

    Example:
      >>> from jtrees.estimators import TreeClassifier
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> labels = np.where(x[:, 0] > 0, "high", "low")
      >>> model = TreeClassifier(jtrees.GET(depth=1, starts=1, epochs=20), random_state=0).fit(x, labels)
      >>> print(model.predict([[-0.5], [0.5]]))
      ['low' 'high']
    """

    default_recipe = Bagged(
        LatentTree(depth=5, predictor="mlp", dropout=0.2, penalty=0.2, weight_decay=0.0, epochs=None, precondition=0.0),
        trees=8,
        combine="mean",
    )
    _TASK = "classification"

    def fit(self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Fits the recipe to a table.

        Args:
          X: features, ``(n, p)``: an array or a DataFrame.
          y: labels of any type, ``(n,)``.
          sample_weight: nonnegative weights, ``(n,)``, as for :func:`jtrees.fit`.

        Raises:
          ValueError: naming the argument, what was expected and what came.
        """
        if y is not None:
            labels, unclear = checks.label_array(y)
            if unclear:
                raise ValueError(f"y must hold labels of one type, got {unclear}")
            y = labels if labels.dtype.kind in "biuf" else y
        x, labels = self._checked(X, y, ensure_min_samples=2)
        check_classification_targets(labels)
        self.classes_, labels = np.unique(labels, return_inverse=True)
        _warn_of_spaces(self.classes_)
        x, labels, weight = _weighed(x, labels, sample_weight)
        self._present, labels = np.unique(labels, return_inverse=True)  # classes with rows of positive weight
        if len(self._present) > 1:
            self._learn(x, labels, weight)
            self._name_classes()
        else:
            self._learn_nothing(x, leaves.Values(np.ones((2, 1)), losses.Frequencies()))
        return self

    def _name_classes(self) -> None:
        """Names the features that are means of classes by the labels, not by their numbers."""
        if self.columns_ is not None:
            self.columns_ = self.columns_.with_class_names([str(label) for label in self.classes_[self._present]])
            self.model_ = self.model_.replace(columns=self.columns_)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Returns class probabilities in the order of ``classes_``, in float64, ``(n, K)``."""
        predictions = self._answers(X)
        out = np.zeros((len(predictions), len(self.classes_)))
        out[:, self._present] = predictions / predictions.sum(1, keepdims=True)
        return out

    def predict(self, X: Any) -> np.ndarray:
        """Returns the most probable label of each sample."""
        most_probable = self.predict_proba(X).argmax(1)
        return self.classes_[most_probable]


def _options(name: str, value: Any) -> dict[str, Any]:
    """Returns the options of a recipe and of its bases by name."""
    found = {}
    for option, setting in options_of(value).items():
        found |= {f"{name}__{option}": setting} | _options(f"{name}__{option}", setting)
    return found


def _warn_of_spaces(classes: np.ndarray) -> None:
    """Warns of labels that differ in spaces at their ends alone."""
    alike: dict[str, list[str]] = {}
    for label in classes.tolist():
        alike.setdefault(label.strip() if isinstance(label, str) else label, []).append(label)
    if pairs := [labels for labels in alike.values() if len(labels) > 1]:
        warnings.warn(f"y has labels that differ in spaces alone: {checks.quoted_list(pairs[0])}", stacklevel=3)


def _weighed(x: Any, y: np.ndarray, sample_weight: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    """Returns the rows of positive weight, and their weights."""
    if sample_weight is None:
        return x, y, np.ones(len(x))
    weight = np.asarray(checks.check_weight(sample_weight, len(x)), np.float64)
    return x[weight > 0], y[weight > 0], weight[weight > 0]
