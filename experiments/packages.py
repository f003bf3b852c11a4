"""Packages of boosted trees, by default or tuned: XGBoost, LightGBM (also with linear leaves) and CatBoost.

Needs their packages and optuna (``make peers``). Trials of Optuna's TPE choose seven options of each package from
ranges. A third of the training rows is the validation set, which compares the trials and stops each trial early. The
best trial is fitted again to all training rows, with its number of trees.
"""

from collections.abc import Mapping
from functools import partial
import importlib
from typing import Any, NamedTuple
import warnings

import numpy as np
import pandas as pd
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split

from experiments import benchmark, networks, studies
from experiments.studies import Split

TRIALS = 30
ROUNDS, PATIENCE = 1000, 30  # upper limit of the trees, and trees without gain before early stopping


class Package(NamedTuple):
    """A package.

    Attributes:
      package: its import name.
      prefix: prefix of the names of its classes.
      seed: name of the option for the seed.
      fixed: options that are not tuned.
      ranges: ``(low, high, kind)`` of each tuned option; the kind is int, float, or either with "log".
    """

    package: str
    prefix: str
    seed: str
    fixed: dict[str, Any]
    ranges: Mapping[str, tuple[float, float, str]]

    def model(self, classifies: bool) -> Any:
        """Returns the class of its models."""
        model = getattr(
            importlib.import_module(self.package), self.prefix + ("Classifier" if classifies else "Regressor")
        )
        return partial(model, **self.fixed)

    def options(self, trial: Any) -> dict[str, Any]:
        """Returns the options of a trial."""
        out: dict[str, Any] = {}
        for name, (low, high, kind) in self.ranges.items():
            suggest = trial.suggest_int if kind.startswith("int") else trial.suggest_float
            out[name] = suggest(name, low, high, log=kind.endswith("log"))
        return out | (
            {"linear_tree": trial.suggest_categorical("linear_tree", [False, True])} if self.prefix == "LGBM" else {}
        )

    def stopped(self, options: dict[str, Any], a: Any, b: Any) -> tuple[Any, int]:
        """Returns a model whose number of trees validation data choose, and this number."""
        classifies = a[1].dtype.kind != "f"
        stops: dict[str, Any] = {} if self.prefix == "LGBM" else {"early_stopping_rounds": PATIENCE}
        model = self.model(classifies)(n_estimators=ROUNDS, **options, **stops)
        if self.prefix != "LGBM":
            model.fit(*a, eval_set=[b], verbose=False)
            return model, model.best_iteration + 1 if self.prefix == "XGB" else model.tree_count_
        import lightgbm  # pyright: ignore[reportMissingImports]

        model.fit(*a, eval_X=b[0], eval_y=b[1], callbacks=[lightgbm.early_stopping(PATIENCE, verbose=False)])
        return model, max(1, model.best_iteration_)


RATE = {"learning_rate": (0.02, 0.3, "float log")}
SHARES = {"subsample": (0.5, 1, "float"), "colsample_bytree": (0.4, 1, "float"), "reg_lambda": (0.01, 10, "float log")}
PACKAGES = {
    "XGBoost": Package(
        *("xgboost", "XGB", "random_state", {"tree_method": "hist", "n_jobs": -1}),
        {"max_depth": (2, 10, "int"), **RATE, "min_child_weight": (1, 30, "float log"), **SHARES}
        | {"gamma": (1e-4, 1, "float log")},
    ),
    "LightGBM": Package(
        *("lightgbm", "LGBM", "random_state", {"subsample_freq": 1, "verbose": -1, "n_jobs": 2}),
        {"num_leaves": (4, 256, "int log"), **RATE, "min_child_samples": (5, 50, "int log"), **SHARES},
    ),
    "CatBoost": Package(
        # By default, CatBoost makes a folder for its own records.
        *("catboost", "CatBoost", "random_seed", {"verbose": False, "thread_count": 2, "allow_writing_files": False}),
        {"depth": (3, 10, "int"), **RATE, "l2_leaf_reg": (0.1, 10, "float log")}
        | {"random_strength": (0.01, 10, "float log"), "bagging_temperature": (0, 1, "float")}
        | {"min_data_in_leaf": (1, 50, "int log"), "border_count": (32, 254, "int")},
    ),
}

# The option of each package that makes it take categories, and its value; None stands for the names of the columns.
CATEGORIES: dict[str, tuple[str, Any]] = {"XGBoost": ("enable_categorical", True), "CatBoost": ("cat_features", None)}
LEVELS = 200  # largest number of levels of a category; HistGradientBoosting takes 255


def installed(name: str) -> bool:
    """Returns whether a package can be tuned here."""
    return benchmark.installed(PACKAGES[name].package) and benchmark.installed("optuna")


def available(name: str) -> bool:
    """Returns whether a model can be fitted here; models that are no rivals always can."""
    if name in networks.PREFIXES:
        return networks.installed()
    return name not in PACKAGES or benchmark.installed(PACKAGES[name].package)


def default(name: str, classifies: bool, seed: int, x: Any = None) -> Any:
    """Returns a package's model with its defaults; ``x`` may be a frame of :func:`with_categories`."""
    categories: dict[str, Any] = {}
    if isinstance(x, pd.DataFrame) and name in CATEGORIES:
        option, value = CATEGORIES[name]
        categories = {option: text_columns(x) if value is None else value}
    return PACKAGES[name].model(classifies)(**{PACKAGES[name].seed: seed}, **categories)


def text_columns(x: pd.DataFrame) -> list[str]:
    """Returns the names of the columns that are not numbers."""
    return [name for name in x if not pd.api.types.is_numeric_dtype(x[name])]


def with_categories(name: str, x: pd.DataFrame, x_test: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns training and test rows with text as categories.

    CatBoost takes text, where a missing value is a level of its own. The other packages take a categorical column with
    the most frequent levels of the training rows; other levels are missing. Columns have numbers as names, because
    LightGBM and XGBoost refuse some characters.
    """
    frames = [frame.set_axis([f"column_{i}" for i in range(frame.shape[1])], axis=1) for frame in (x, x_test)]
    for column in text_columns(frames[0]):
        if name == "CatBoost":
            for frame in frames:
                frame[column] = frame[column].astype(object).where(frame[column].notna(), "missing").astype(str)
            continue
        levels = frames[0][column].value_counts().index[:LEVELS]
        for frame in frames:
            frame[column] = pd.Categorical(frame[column], categories=levels)
    return frames[0], frames[1]


def tuned(name: str, split: Split, seed: int) -> tuple[Any, dict[str, Any]]:
    """Returns a tuned model of a package, fitted to the whole training part, with its number of trees and its options.

    Trials are compared by squared error in regression, and by log loss in classification.
    """
    package, (x, _, y, _), fixed = PACKAGES[name], split, {PACKAGES[name].seed: seed}
    classifies = y.dtype.kind != "f"
    parts: Any = train_test_split(x, y, test_size=1 / 3, random_state=seed, stratify=y if classifies else None)
    a, b, ya, yb = parts

    def objective(trial: Any) -> float:
        model, trees = package.stopped(fixed | package.options(trial), (a, ya), (b, yb))
        trial.set_user_attr("trees", trees)
        if classifies:
            return float(log_loss(yb, model.predict_proba(b), labels=np.unique(y)))
        return float(np.mean(np.square(model.predict(b) - yb)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # arrays have no feature names
        best = studies.best_trial(objective, TRIALS, seed=seed)
        trees = best.user_attrs["trees"]
        model = package.model(classifies)(n_estimators=trees, **fixed, **best.params).fit(x, y)
    return model, {"trees": trees, "options": best.params}
