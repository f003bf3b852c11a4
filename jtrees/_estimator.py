"""The common base of the scikit-learn estimators (needs scikit-learn)."""

from collections.abc import Callable, Mapping, Sequence
from datetime import date, timedelta
import functools
from numbers import Real
from typing import Any, Self

import jax
import numpy as np
from scipy import sparse
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state, check_scalar
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data

from jtrees import compilation, distributed, prediction, processes, topology, validation as checks
from jtrees.data.held_out import divided
from jtrees.ensembles import Boosted
from jtrees.explain.importance import mean_changes
from jtrees.search import FitReport, Recipe
from jtrees.search.fit import fit
from jtrees.selection.grid import all_options, with_options
from jtrees.tables import Frame, FrameModel, Schema, TableEncoder
from jtrees.tables.dataset import raw_rows
from jtrees.tables.encoder import EncodedTable
from jtrees.tables.frame import frame_of_objects, in_memory
from jtrees.tables.inference import checked_missing, inferred
from jtrees.tree import ObliqueTree

_Rows = np.ndarray | Frame | EncodedTable  # training rows
_CELLS = (str, date, timedelta, np.datetime64, np.timedelta64)  # cells of an array of objects that are no numbers
_IMPORTANCE_ENTRIES = 200_000  # entries of the training rows that are kept for importances, within these limits of rows
_FEWEST_IMPORTANCE_ROWS, _MOST_IMPORTANCE_ROWS = 100, 1000
_FEWEST_FOR_ROUNDS, _FEW_ROUNDS = 10, 10  # fewest rows for a choice of the number of rounds; rounds for fewer rows


def unchanged_by_errors(fit_method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method ``fit``, which leaves the estimator as it was if it raises an error."""

    @functools.wraps(fit_method)
    def fit(self: Any, *args: Any, **options: Any) -> Any:
        before = dict(vars(self))
        try:
            return fit_method(self, *args, **options)
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise

    return fit


def _with_cells(X: Any) -> Any:
    """Returns an array of objects for lists of rows, or an array, that hold text; other X unchanged.

    Raises ``ValueError`` for cells by name outside of a DataFrame, and if such an array is not ``(n, p)``.
    """
    rows = X if isinstance(X, (list, tuple)) else ()
    by_name = isinstance(X, Mapping) or any(isinstance(row, Mapping) for row in rows)
    if any(isinstance(cell, str) for row in rows if isinstance(row, (list, tuple)) for cell in row):
        X = np.array(X, object)
    kind = getattr(getattr(X, "dtype", None), "kind", None)
    if by_name or (kind == "O" and getattr(X, "ndim", 2) == 1):
        got = f"got {checks.quoted(X)}: for a row, use pd.DataFrame([row])"
        raise ValueError(f"X must be a DataFrame or an array (n, p), {got}")
    return np.asarray(X).astype(object) if kind == "U" else X


class TreeEstimator(BaseEstimator):
    default_recipe: Recipe

    def _store(self, parameters: Mapping[str, Any]) -> None:
        """Sets the parameters of ``__init__``, whose names scikit-learn reads from the signature of the estimator."""
        vars(self).update({name: value for name, value in parameters.items() if name != "self"})

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Returns parameters by name. If ``deep``, includes options of the recipe and its bases (``recipe__depth``)."""
        return super().get_params(deep=False) | (all_options(self._recipe(), "recipe__") if deep else {})

    def set_params(self, **params: Any) -> Self:
        """Sets parameters by name; options of the recipe are named like ``recipe__depth``.

        Raises:
          ValueError: for an unknown name.
        """
        options = {name: value for name, value in params.items() if name.startswith("recipe__")}
        super().set_params(**{name: value for name, value in params.items() if name not in options})
        if options:
            options = {name.removeprefix("recipe__"): value for name, value in options.items()}
            recipe = with_options(self._recipe(), options)
            # The default recipe depends on the other parameters, which may be set later.
            if self._is_default():
                has_new_base = lambda name: any(name.startswith(f"{changed}__") for changed in options)
                earlier = {name: value for name, value in (self.recipe or {}).items() if not has_new_base(name)}
                recipe = {**earlier, **options}
            self.recipe = recipe
        return self

    def _is_default(self) -> bool:
        """Returns whether the recipe is the default recipe, possibly with other options."""
        return self.recipe is None or isinstance(self.recipe, Mapping)

    def _default(self, rows: int | None) -> Any:
        """Returns the default recipe for a number of rows; None: not known yet."""
        recipe = self.default_recipe
        if isinstance(recipe, Boosted) and rows is not None and rows < _FEWEST_FOR_ROUNDS:
            return recipe.replace(patience=None, rounds=_FEW_ROUNDS)
        return recipe

    def _recipe(self, rows: int | None = None) -> Any:
        return with_options(self._default(rows), dict(self.recipe or {})) if self._is_default() else self.recipe

    def _learn(self, x: _Rows, y: np.ndarray, weight: np.ndarray, class_names: Sequence[str] | None = None) -> None:
        """Fits to classes 0..K-1 with names, or to targets ``(n,)`` or ``(n, k)``, which must not be constant."""
        processes.require_xla("the fit of an estimator")
        recipe = self._recipe(len(x))
        numeric = x if isinstance(x, np.ndarray) else np.zeros((2, self.n_features_in_))
        if isinstance(recipe, Recipe) and recipe.targets(numeric, y) is not y:
            raise ValueError(f"recipe must learn from y, got {checks.quoted(recipe)}: give it to jtrees.fit")
        state = self.random_state
        if isinstance(state, np.random.Generator):  # scikit-learn takes generators of the older kind
            state = int(state.integers(np.iinfo(np.int32).max))
        rng = check_random_state(state)
        if self.random_state is None and distributed.is_shared():  # each process has its own generator
            rng = check_random_state(distributed.of_first(rng.randint(np.iinfo(np.int32).max)))
        options: Any = {"task": self._task(y), "max_seconds": self.max_seconds, "progress": self.progress}
        options["monotone"] = self.monotonic_cst
        if self.validation_fraction is not None:
            between: Any = {"min_val": 0, "max_val": 1, "include_boundaries": "neither"}
            check_scalar(self.validation_fraction, "validation_fraction", Real, **between)
            strata = None if class_names is None else np.array(class_names)[y]  # names, because errors quote them
            training, held_out = divided(len(y), self.validation_fraction, rng, strata, name="validation_fraction")
            options["validation"] = x[held_out], y[held_out], weight[held_out]
            x, y, weight = x[training], y[training], weight[training]
        if (weight != weight[0]).any():
            options["sample_weight"] = weight
        if isinstance(x, Frame):
            options["columns"], x = inferred(x, columns=self.columns, missing=self.missing)
        with compilation.default_settings():
            key = jax.random.key(int(rng.randint(np.iinfo(np.int32).max)))
        try:
            fitted = fit(recipe, x, y, key=key, **options)
        except ValueError as error:
            if not (text := str(error)).startswith("monotone "):
                raise
            raise ValueError(text.replace("monotone", "monotonic_cst", 1)) from None
        # NumPy arrays, because pickles of JAX arrays depend on the version of JAX, and skops cannot store them.
        self._keep(distributed.to_host(fitted.model), x)
        self.loss_, self.report_ = fitted.loss, fitted.report
        if fitted.report.ended == "interrupted":
            distributed.warn("interrupted: the model is the best one so far", ConvergenceWarning)

    def _learn_constant(self, x: _Rows, constant_leaves: Any) -> None:
        encoder: Any = x.encoder if isinstance(x, EncodedTable) else None
        if isinstance(x, Frame):
            schema, x = inferred(x, columns=self.columns, missing=self.missing)
            encoder = TableEncoder.of_rows(schema, x, None, None, None)[0]
        features = x.shape[1] if isinstance(x, np.ndarray) else len(encoder.feature_names)
        tree = ObliqueTree(np.zeros((1, features), np.float32), -np.ones(1, np.float32), constant_leaves)
        tree = tree.with_medians(np.median(x, axis=0)) if isinstance(x, np.ndarray) else FrameModel(tree, encoder)
        self._keep(tree, x)
        self.loss_, self.report_ = 0.0, FitReport()

    def _keep(self, model: Any, x: _Rows) -> None:
        """Sets the attributes that hold the model, and features of evenly spaced training rows, for importances."""
        self.model_, self.encoder_, inner = model, None, model
        if isinstance(model, FrameModel):
            self.encoder_, inner = model.encoder, model.model
        self.tree_ = inner if isinstance(inner, ObliqueTree) else None
        count = int(np.clip(_IMPORTANCE_ENTRIES // len(self._owner), _FEWEST_IMPORTANCE_ROWS, _MOST_IMPORTANCE_ROWS))
        sample: Any = x[np.unique(np.linspace(0, len(x) - 1, count).astype(int))]
        self._sample = sample if self.encoder_ is None else self.encoder_.encode(sample)
        self._importances = None

    @property
    def _owner(self) -> np.ndarray:
        """The number of the column of X that each feature belongs to."""
        if self.encoder_ is None:
            return np.arange(self.n_features_in_)
        names = list(self.encoder_.schema.columns)
        columns: list[Any] = list(getattr(self, "feature_names_in_", ()))
        columns = columns if set(names) <= set(columns) else names  # else the columns are identified by position
        named = [(columns.index(column.name), column.features) for column in self.encoder_.named_columns]
        return np.repeat(*map(np.array, zip(*named, strict=True)))

    @property
    def feature_importances_(self) -> np.ndarray:
        """How much the prediction depends on each column of X, ``(n_features_in_,)``, with the sum 1.

        The importance of a column is the mean absolute change of the prediction when its values are shuffled, on at
        most 1000 training rows. The rows are in memory, but not in files and pickles, which hold the importances.
        scikit-learn's :func:`~sklearn.inspection.permutation_importance` computes the importance for a score.
        """
        check_is_fitted(self)
        if self._importances is None:
            model, rng = self.model_ if self.encoder_ is None else self.model_.model, np.random.default_rng(0)
            self._importances = mean_changes(model.predict, self._sample, self._owner, self.n_features_in_, rng)
        return self._importances.copy()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes, with the importances instead of the training rows that they are computed from."""
        state: Any = super().__getstate__()
        if getattr(self, "_sample", None) is None:
            return state
        return {**state, "_importances": self.feature_importances_, "_sample": None}

    def _checked(self, X: Any, *y: Any, **options: Any) -> Any:
        """Returns X, or X and y, checked by scikit-learn. A DataFrame or an array with NaN becomes a raw table.

        X may also be a raw table in the kinds of a schema, or, with y, an encoded table. With y, two rows are needed.
        """
        for name, array in zip("Xy", (X, *y), strict=False):
            checks.check_unmasked(name, array)
        X = _with_cells(X)
        raw = bool(y) or self.encoder_ is not None  # else the model takes numbers only
        # scikit-learn converts dates to numbers, and its errors do not name an invalid column.
        if (hasattr(X, "columns") and not raw) or getattr(getattr(X, "dtype", None), "kind", None) in ("m", "M"):
            checks.as_numeric("X", X)
        if raw and (isinstance(X, EncodedTable) or hasattr(X, "columns") or self._is_raw(X, training=bool(y))):
            frame = self._raw_table(X, training=True) if y else None
            targets = [validate_data(self, y=target, **options) for target in y]
            table: Any = X.frame if isinstance(X, EncodedTable) else X
            if not isinstance(table, Frame):
                if hasattr(table, "columns"):
                    in_memory(table)  # scikit-learn would find no features in a lazy table
                validate_data(self, table, skip_check_array=True, reset=bool(y))
            elif y:  # the columns of a raw table are checked when its schema reads it
                names = list(table.schema.columns)
                self.n_features_in_, self.feature_names_in_ = len(names), np.asarray(names, object)
            frame = self._raw_table(X, training=False) if frame is None else frame
            check_consistent_length(frame, *targets)
            if y and len(X) < 2:
                raise ValueError(f"X must have at least 2 rows, got {len(X)}")
            return (frame, *targets) if y else frame
        options |= {"dtype": (np.float64, np.float32), "ensure_all_finite": "allow-nan"}
        if not y:
            return validate_data(self, X, reset=False, ensure_min_samples=0, **options)
        x, targets = validate_data(self, X, *y, ensure_min_samples=2, **options)
        return raw_rows(x, self.missing, self.columns) or x, targets

    def _is_raw(self, X: Any, *, training: bool) -> bool:
        """Returns whether X is an array of objects ``(n, p)`` that is a raw table, such as the cells of a DataFrame."""
        # A prediction must not depend on the cells of other rows.
        if not (isinstance(X, np.ndarray) and X.dtype == object and X.ndim == 2):
            return False
        return not training or any(isinstance(cell, _CELLS) or type(cell).__name__ == "NAType" for cell in X.flat)

    def _raw_table(self, X: Any, *, training: bool) -> Any:
        """Returns the raw table of a DataFrame, or of an array of objects, whose columns are identified by position.

        A DataFrame for a prediction, and a raw table, are returned unchanged.
        """
        if isinstance(X, (Frame, EncodedTable)):
            return X
        if hasattr(X, "columns"):
            return raw_rows(X, self.missing, self.columns) if training else X
        encoder: Any = None if training else self.encoder_
        schema = self.columns if training else encoder.schema
        if not isinstance(schema, Schema):
            names, missing = [f"x{j}" for j in range(X.shape[1])], checked_missing(self.missing)
            return frame_of_objects(X, names, missing=missing, requested=self.columns, named=False)
        names = list(schema.columns) if training else list(getattr(self, "feature_names_in_", schema.columns))
        if X.shape[1] != len(names):
            raise ValueError(f"X must have {len(names)} columns, got {X.shape[1]}")
        schemas = schema.used if schema.named else None
        return frame_of_objects(X, names, schemas=schemas, missing=schema.missing)

    def _features(self, X: Any) -> np.ndarray:
        """Returns the features of new rows, ``(n, p)``."""
        check_is_fitted(self)
        x = self._checked(X)
        if self.encoder_ is not None:
            return self.encoder_.transform(x)
        return prediction.filled(x, getattr(self.model_, "medians", None), getattr(self, "feature_names_in_", None))

    def _answers(self, X: Any) -> np.ndarray:
        x = self._features(X)
        model = self.model_ if self.encoder_ is None else self.model_.model
        answers = np.asarray(model.predict(x), np.float64)
        return answers if answers.ndim == 2 else answers[:, None]

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """Returns the names of the model's features. A feature of a raw table can be ``[heating = gas]``.

        Args:
          input_features: names of the columns of X, used if X had no names of its own.
        """
        check_is_fitted(self, "n_features_in_")
        if self.encoder_ is not None:
            return np.asarray(self.encoder_.feature_names, object)
        names = getattr(self, "feature_names_in_", input_features)
        return np.asarray([f"x{j}" for j in range(self.n_features_in_)] if names is None else names, object)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def _single(self) -> ObliqueTree:
        check_is_fitted(self)
        if self.tree_ is None:
            raise AttributeError(f"this needs a single tree; this model is a {self.model_}")
        return self.tree_

    def _path(self, X: Any) -> np.ndarray:
        """Returns the nodes on the path of each sample, root first, ``(n, depth + 1)``."""
        tree = self._single()
        return np.asarray(tree.decision_path(self._features(X)), np.int64).T

    def apply(self, X: Any) -> np.ndarray:
        """Returns the leaf of each sample, ``(n,)``, as the breadth-first index of its node.

        The root is 0. The indices of the leaves have gaps.

        Raises:
          AttributeError: if the model is not one tree.
        """
        return self._path(X)[:, -1]

    def decision_path(self, X: Any) -> Any:
        """Returns a sparse 0/1 matrix, samples by nodes, of the nodes on each path, numbered as in :meth:`apply`.

        Raises:
          AttributeError: if the model is not one tree.
        """
        path = self._path(X)
        n, levels = path.shape
        values, ends = np.ones(path.size, np.int64), np.arange(n + 1) * levels
        return sparse.csr_matrix((values, path.ravel(), ends), shape=(n, topology.num_nodes(levels)))

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


def positive_rows(x: Any, y: np.ndarray, sample_weight: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    """Returns the rows of positive weight, their targets and their weights; raises an error for invalid weights."""
    if sample_weight is None:
        return x, y, np.ones(len(x))
    weight = checks.relative_weight(sample_weight, len(x))
    used = weight > 0
    return x[used], y[used], weight[used]
