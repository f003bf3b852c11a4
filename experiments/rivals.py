"""Tuned rivals with axis-parallel boosted trees: XGBoost, LightGBM (also with linear leaves) and CatBoost.

Needs their packages and optuna (``make peers``). Trials of Optuna's TPE choose seven options of each package from
ranges. A third of the training rows is the validation set, which compares the trials and stops each trial early. The
best trial is fitted again to all training rows, with its number of trees.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
import warnings

import numpy as np
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split

from experiments import benchmark, studies

TRIALS = 30
ROUNDS, PATIENCE = 1000, 30  # upper limit of the trees, and trees without gain before early stopping

Split = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # training and test features, training and test targets


class Rival(NamedTuple):
    """A package.

    Attributes:
      package: its import name.
      options: returns the options of a trial.
      model: returns the class of its models, for classification or regression.
      fixed: returns the other options for a seed.
      stopped: takes a class, options, training and validation data; returns a model and its number of trees.
    """

    package: str
    options: Callable[[Any], dict[str, Any]]
    model: Callable[[bool], Any]
    fixed: Callable[[int], dict[str, Any]]
    stopped: Callable[..., tuple[Any, int]]


def _xgboost_options(trial: Any) -> dict[str, Any]:
    return {
        "max_depth": trial.suggest_int("max_depth", 2, 10),
        "learning_rate": trial.suggest_float("learning_rate", 0.02, 0.3, log=True),
        "min_child_weight": trial.suggest_float("min_child_weight", 1, 30, log=True),
        "subsample": trial.suggest_float("subsample", 0.5, 1),
        "colsample_bytree": trial.suggest_float("colsample_bytree", 0.4, 1),
        "reg_lambda": trial.suggest_float("reg_lambda", 0.01, 10, log=True),
        "gamma": trial.suggest_float("gamma", 1e-4, 1, log=True),
    }


def _xgboost_model(classifies: bool) -> Any:
    import xgboost  # pyright: ignore[reportMissingImports]

    return xgboost.XGBClassifier if classifies else xgboost.XGBRegressor


def _xgboost_stopped(make: Any, options: dict[str, Any], a: Any, b: Any) -> tuple[Any, int]:
    model = make(n_estimators=ROUNDS, early_stopping_rounds=PATIENCE, **options)
    model.fit(*a, eval_set=[b], verbose=False)
    return model, model.best_iteration + 1


def _lightgbm_options(trial: Any) -> dict[str, Any]:
    return {
        "num_leaves": trial.suggest_int("num_leaves", 4, 256, log=True),
        "learning_rate": trial.suggest_float("learning_rate", 0.02, 0.3, log=True),
        "min_child_samples": trial.suggest_int("min_child_samples", 5, 50, log=True),
        "subsample": trial.suggest_float("subsample", 0.5, 1),
        "colsample_bytree": trial.suggest_float("colsample_bytree", 0.4, 1),
        "reg_lambda": trial.suggest_float("reg_lambda", 0.01, 10, log=True),
        "linear_tree": trial.suggest_categorical("linear_tree", [False, True]),
    }


def _lightgbm_model(classifies: bool) -> Any:
    import lightgbm  # pyright: ignore[reportMissingImports]

    return lightgbm.LGBMClassifier if classifies else lightgbm.LGBMRegressor


def _lightgbm_stopped(make: Any, options: dict[str, Any], a: Any, b: Any) -> tuple[Any, int]:
    import lightgbm  # pyright: ignore[reportMissingImports]

    model = make(n_estimators=ROUNDS, **options)
    model.fit(*a, eval_X=b[0], eval_y=b[1], callbacks=[lightgbm.early_stopping(PATIENCE, verbose=False)])
    return model, max(1, model.best_iteration_)


def _catboost_options(trial: Any) -> dict[str, Any]:
    return {
        "depth": trial.suggest_int("depth", 3, 10),
        "learning_rate": trial.suggest_float("learning_rate", 0.02, 0.3, log=True),
        "l2_leaf_reg": trial.suggest_float("l2_leaf_reg", 0.1, 10, log=True),
        "random_strength": trial.suggest_float("random_strength", 0.01, 10, log=True),
        "bagging_temperature": trial.suggest_float("bagging_temperature", 0, 1),
        "min_data_in_leaf": trial.suggest_int("min_data_in_leaf", 1, 50, log=True),
        "border_count": trial.suggest_int("border_count", 32, 254),
    }


def _catboost_model(classifies: bool) -> Any:
    import catboost  # pyright: ignore[reportMissingImports]

    # By default, CatBoost makes a folder for its own records.
    return partial(catboost.CatBoostClassifier if classifies else catboost.CatBoostRegressor, allow_writing_files=False)


def _catboost_stopped(make: Any, options: dict[str, Any], a: Any, b: Any) -> tuple[Any, int]:
    model = make(n_estimators=ROUNDS, early_stopping_rounds=PATIENCE, **options)
    model.fit(*a, eval_set=b, verbose=False)
    return model, model.tree_count_


RIVALS = {
    "XGBoost": Rival(
        "xgboost",
        _xgboost_options,
        _xgboost_model,
        lambda seed: {"tree_method": "hist", "random_state": seed, "n_jobs": -1},
        _xgboost_stopped,
    ),
    "LightGBM": Rival(
        "lightgbm",
        _lightgbm_options,
        _lightgbm_model,
        lambda seed: {"subsample_freq": 1, "random_state": seed, "verbose": -1, "n_jobs": 2},
        _lightgbm_stopped,
    ),
    "CatBoost": Rival(
        "catboost",
        _catboost_options,
        _catboost_model,
        lambda seed: {"random_seed": seed, "verbose": False, "thread_count": 2},
        _catboost_stopped,
    ),
}


def installed(name: str) -> bool:
    """Returns whether a rival can run here."""
    return benchmark.installed(RIVALS[name].package) and benchmark.installed("optuna")


def tuned(name: str, split: Split, seed: int) -> tuple[Any, dict[str, Any]]:
    """Returns a tuned model of a rival, fitted to the whole training part, with its number of trees and its options.

    Trials are compared by squared error in regression, and by log loss in classification.
    """
    rival, (x, _, y, _) = RIVALS[name], split
    classifies = y.dtype.kind != "f"
    make, fixed = rival.model(classifies), rival.fixed(seed)
    parts: Any = train_test_split(x, y, test_size=1 / 3, random_state=seed, stratify=y if classifies else None)
    a, b, ya, yb = parts

    def objective(trial: Any) -> float:
        model, trees = rival.stopped(make, fixed | rival.options(trial), (a, ya), (b, yb))
        trial.set_user_attr("trees", trees)
        if classifies:
            return float(log_loss(yb, model.predict_proba(b), labels=np.unique(y)))
        return float(np.mean(np.square(model.predict(b) - yb)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # arrays have no feature names
        best = studies.best_trial(objective, TRIALS, seed=seed)
        trees = best.user_attrs["trees"]
        model = make(n_estimators=trees, **fixed, **best.params).fit(x, y)
    return model, {"trees": trees, "options": best.params}
