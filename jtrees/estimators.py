"""Two scikit-learn estimators for all recipes, as Gaussian processes take kernels (``pip install "jtrees[sklearn]"``).

Shapes, labels and weights are scikit-learn's here; all else is :func:`jtrees.fit`'s.
"""

from typing import Any, Self
import warnings

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
import numpy as np

from jtrees import leaves, topology, validation as checks
from jtrees.ensembles import Bagged
from jtrees.methods import GET, LatentTree
from jtrees.search import Recipe
from jtrees.search.run import fit
from jtrees.selection.grid import options_of, with_options
from jtrees.tree import ObliqueTree

try:
    from scipy import sparse
    from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.model_selection import train_test_split
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ImportError('estimators need scikit-learn: pip install "jtrees[sklearn]"') from error


class _Tree(BaseEstimator):
    """What the two estimators share."""

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
        """Parameters by name; ``deep``: with the options of the recipe, as ``recipe__depth``, and of its bases."""
        return super().get_params(deep=False) | (_options("recipe", self._recipe()) if deep else {})

    def set_params(self, **params: Any) -> Self:
        """Sets parameters by name, options of the recipe as ``recipe__depth``.

        Raises:
          ValueError: for a name that there is not.
        """
        options = {name: value for name, value in params.items() if name.startswith("recipe__")}
        super().set_params(**{name: value for name, value in params.items() if name not in options})
        if options:
            self.recipe = with_options(self._recipe(), {k.removeprefix("recipe__"): v for k, v in options.items()})
        return self

    def _recipe(self) -> Any:
        return self.default_recipe if self.recipe is None else self.recipe

    # --- Learning ----------------------------------------------------------------------------------------------------

    def _learn(self, x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> None:
        """Learns classes 0..K-1, or targets ``(n,)`` or ``(n, k)``, that vary."""
        recipe = self._recipe()
        if isinstance(recipe, Recipe) and recipe.targets(x, y) is not y:
            raise ValueError(f"recipe must learn from y, got {recipe!r}: give it to jtrees.fit")
        rng = check_random_state(self.random_state)
        validation = None
        if self.validation_fraction is not None:
            by_class = y if self._TASK == "classification" else None
            options: Any = {"test_size": self.validation_fraction, "random_state": rng, "stratify": by_class}
            rest, held = train_test_split(np.arange(len(x)), **options)
            x, y, weight, validation = x[rest], y[rest], weight[rest], (x[held], y[held])
        key = jax.random.key(int(rng.randint(np.iinfo(np.int32).max)))
        options = {"task": self._TASK, "validation": validation}
        options |= {"max_seconds": self.max_seconds, "progress": self.progress}
        if (weight != weight[0]).any():
            options["sample_weight"] = weight
        found = fit(recipe, x, y, key=key, **options)
        self.model_, self.tree_, self.loss_, self.report_ = found.model, found.tree, found.loss, found.report
        if found.report["ended"] == "interrupted":
            warnings.warn("interrupted: the model is the best until then", ConvergenceWarning, stacklevel=3)

    def _learn_nothing(self, features: int, of_leaf: Any) -> None:
        """Constant targets: a tree with a single leaf."""
        self.model_ = self.tree_ = ObliqueTree(jnp.zeros((1, features)), -jnp.ones(1), of_leaf)
        self.loss_, self.report_ = 0.0, {}

    def _checked(self, X: Any, *y: Any, **options: Any) -> Any:
        """X, or X and y, as scikit-learn checks them."""
        for name, array in zip("Xy", (X, *y), strict=False):
            checks.check_unmasked(name, array)
        # It takes dates for numbers, and does not say which column it could not read.
        if hasattr(X, "columns") or getattr(getattr(X, "dtype", None), "kind", None) in ("m", "M"):
            checks.as_numeric("X", X)
        return validate_data(self, X, *y, dtype=(np.float64, np.float32), **options)

    def _answers(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        x = self._checked(X, reset=False)
        return np.asarray(self.model_.predict(x), np.float64).reshape(len(x), -1)

    # --- The tree ----------------------------------------------------------------------------------------------------

    def _single(self) -> ObliqueTree:
        check_is_fitted(self)
        if self.tree_ is None:
            raise AttributeError(f"this needs a single tree; this model is a {self.model_}")
        return self.tree_

    def apply(self, X: ArrayLike) -> np.ndarray:
        """The leaf that each sample ends in, ``(n,)``: numbers of nodes, breadth first, with gaps, root 0.

        Raises:
          AttributeError: if the model is not one tree.
        """
        tree = self._single()
        x = self._checked(X, reset=False)
        return np.asarray(tree.leaf_index(x), np.int64) + topology.num_nodes(tree.depth)

    def decision_path(self, X: ArrayLike) -> Any:
        """Which nodes each sample passes: a sparse matrix of 0 and 1, samples by nodes, numbered as by :meth:`apply`.

        Raises:
          AttributeError: if the model is not one tree.
        """
        tree = self._single()
        x = self._checked(X, reset=False)
        path = np.asarray(tree.decision_path(x)).T
        ends, nodes = np.arange(len(path) + 1) * path.shape[1], 2 * topology.num_nodes(tree.depth) + 1
        return sparse.csr_matrix((np.ones(path.size, np.int64), path.ravel(), ends), shape=(len(path), nodes))

    def get_depth(self) -> int:
        """The most splits that a sample can pass.

        Raises:
          AttributeError: if the model is not one tree.
        """
        splits = self._single().splits
        passed = np.zeros(2 * len(splits) + 1, int)
        for node in range(len(splits)):
            passed[2 * node + 1 : 2 * node + 3] = passed[node] + splits[node]
        return int(passed.max())

    def get_n_leaves(self) -> int:
        """How many leaves some sample could reach.

        Raises:
          AttributeError: if the model is not one tree.
        """
        return self._single().num_leaves


class TreeRegressor(MultiOutputMixin, RegressorMixin, _Tree):
    """A tree learnt by gradients for regression: any recipe as a scikit-learn estimator.

    ``TreeRegressor(jtrees.GET(depth=3)).fit(X, y).predict(X)``. Answers are float64, of the shape of the targets; text
    and gaps are for a pipeline's encoders and imputers.

    The model is that of :func:`jtrees.fit` on the same rows. A row of weight 2 adds to the training loss what two equal
    rows add. The two models can differ all the same, as they do after the rows were shuffled: mini-batches and
    bootstrap samples are drawn from the rows as they come, and smoothed or shrunk leaves count uneven weights as fewer
    samples.

    Args:
      recipe: what to do, such as ``jtrees.GET(depth=3)``, whose options are parameters, too: ``recipe__depth``, and of
        its base ``recipe__base__depth``. None: ``default_recipe``, in regression one tree of GET of depth 5 with linear
        leaves, over eight sets ahead of a random forest on average (``experiments.estimators``).
      random_state: seed, generator, or None for another model at every fit.
      validation_fraction: part of the rows that models are judged by and not trained on; None: none. Rows count alike
        there, whatever their weights. The recipe says what it does with them.
      max_seconds: when ``fit`` is to end, with the best until then.
      progress: whether ``fit`` shows a bar with the loss and the time left. Without a recipe it takes 10 to 45 s.

    Attributes:
      model_: what answers, such as a :class:`jtrees.ObliqueTree` or a :class:`jtrees.Forest`.
      tree_: the one tree that it is, or None.
      loss_: what it was chosen by, as in :class:`jtrees.Fit`.
      report_: what else there is to say, likewise.
      n_features_in_: number of features.
      feature_names_in_: their names, where X had some.

    Many fits: leave ``n_jobs=1`` in a grid search, where equal structures compile once and a fit uses more than one
    core; or set ``n_jobs=2`` with ``joblib.parallel_config(backend="threading")``. Processes compile each for
    themselves, which takes longer than they save.

    Ctrl-C ends ``fit`` with the best until then and a ``ConvergenceWarning``. :func:`jtrees.save` and
    :func:`jtrees.load` keep a fitted estimator in one file.
    """

    default_recipe = GET(depth=5, leaves="linear", starts=4, epochs=1000)
    _TASK = "regression"

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Learns from a table.

        Args:
          X: features, ``(n, p)``.
          y: targets, ``(n,)`` or ``(n, k)``.
          sample_weight: nonnegative weights, ``(n,)``, as for :func:`jtrees.fit`.

        Raises:
          ValueError: naming the argument, what was expected and what came.
        """
        given = np.asarray(y)
        if given.ndim and given.dtype.kind in "OSUmM":  # of text, too, scikit-learn does not say where it is
            checks.as_numeric("y", y)
        options: Any = {"multi_output": True, "y_numeric": True, "ensure_min_samples": 2}
        x, targets = self._checked(X, y, **options)
        x, targets, weight = _weighed(x, targets.astype(np.float64), sample_weight)
        columns = targets.reshape(len(targets), -1)
        self._shape, self._first, self._varies = targets.shape[1:], columns[0], (columns != columns[0]).any(0)
        if self._varies.any():
            several = self._varies.sum() > 1
            self._learn(x, columns[:, self._varies] if several else columns[:, self._varies][:, 0], weight)
        else:
            value = jnp.asarray(columns[0] if self._shape else columns[0, 0], jnp.float32)
            self._learn_nothing(x.shape[1], leaves.Constant(jnp.stack([value, value])))
        return self

    def predict(self, X: ArrayLike) -> np.ndarray:
        """What the model answers, in float64, of the shape of the targets."""
        answers = self._answers(X)
        out = np.tile(self._first, (len(answers), 1))
        if self._varies.any():
            out[:, self._varies] = answers
        return out.reshape(-1, *self._shape)


class TreeClassifier(ClassifierMixin, _Tree):
    """Trees learnt by gradients for classification: any recipe as a scikit-learn estimator.

    ``TreeClassifier(jtrees.GET(depth=3)).fit(X, y).predict_proba(X)``. Labels are of any kind; text and gaps are for a
    pipeline's encoders and imputers. The model is that of :func:`jtrees.fit` on the same rows.

    Parameters and attributes are those of :class:`TreeRegressor`, and ``classes_``, the labels in order. The default is
    eight LatentTrees of depth 5 from bootstrap samples, over sixteen sets level with a random forest on average
    (``experiments.estimators``); for one tree that can be read, name a recipe.
    """

    default_recipe = Bagged(
        LatentTree(depth=5, predictor="mlp", dropout=0.2, penalty=0.2, epochs=None), trees=8, combine="mean"
    )
    _TASK = "classification"

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Learns from a table.

        Args:
          X: features, ``(n, p)``.
          y: labels of any kind, ``(n,)``.
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
        x, labels, weight = _weighed(x, labels, sample_weight)
        self._present, labels = np.unique(labels, return_inverse=True)  # classes whose rows have weight
        if len(self._present) > 1:
            self._learn(x, labels, weight)
        else:
            self._learn_nothing(x.shape[1], leaves.Frequency(jnp.ones((2, 1))))
        return self

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Probabilities of the classes in the order of ``classes_``, in float64, ``(n, K)``."""
        answers = self._answers(X)
        out = np.zeros((len(answers), len(self.classes_)))
        out[:, self._present] = answers / answers.sum(1, keepdims=True)
        return out

    def predict(self, X: ArrayLike) -> np.ndarray:
        """The most probable label of each sample."""
        most_probable = self.predict_proba(X).argmax(1)
        return self.classes_[most_probable]


def _options(name: str, value: Any) -> dict[str, Any]:
    """The options of a recipe and of its bases by name."""
    own = {f"{name}__{option}": of for option, of in options_of(value).items()}
    return {k: v for option, of in own.items() for k, v in {option: of, **_options(option, of)}.items()}


def _weighed(x: np.ndarray, y: np.ndarray, sample_weight: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows that have weight, and that."""
    if sample_weight is None:
        return x, y, np.ones(len(x))
    weight = np.asarray(checks.check_weight(sample_weight, len(x)), np.float64)
    return x[weight > 0], y[weight > 0], weight[weight > 0]
