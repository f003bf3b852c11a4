"""The estimators with their defaults, beside common alternatives with their defaults.

python -m experiments.estimators --data-dir DATA --seeds 3 [--datasets kin8nm ...] [--parts regression classification]

The result of a (part, set, seed) is a row of --out. Three quarters of the rows are training rows, stratified by class.
Scores are R^2 or accuracy in per cent. The depth of CART is tuned. Rivals that are not installed (``make peers``,
``make networks``) are left out. The first split also has the seconds of a second fit in the same process.
"""

import argparse
from collections.abc import Callable
import time
from typing import Any

import numpy as np
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from experiments import benchmark, data, networks, packages, studies
from experiments.paper_get import PAPER
from experiments.sizes import numbers_of
import jtrees
from jtrees.estimators import BoostedClassifier, BoostedRegressor, TreeClassifier, TreeRegressor

SETS = {
    "regression": tuple(PAPER),
    "classification": (
        *("heart-c", "breast-cancer-wisconsin", "diabetes", "glass", "ecoli", "vehicle", "segmentation", "dna"),
        *("churn", "spambase", "optdigits", "satimage", "ann-thyroid", "pendigits", "letter", "connect-4"),
    ),
}
TASKS: dict[str, Any] = {name: task for task, names in SETS.items() for name in names}
DEPTHS = {"max_depth": range(1, 16)}
CALLS = 30  # number of single-row predictions
OURS = {
    "regression": ("BoostedRegressor()", "TreeRegressor()", "Refined()"),
    "classification": ("BoostedClassifier()", "TreeClassifier()"),
}
OTHERS = ("CART", "random forest", "HistGradientBoosting", *packages.PACKAGES, *networks.PREFIXES)
KINDS: dict[str, tuple[Any, ...]] = {
    "regression": (DecisionTreeRegressor, RandomForestRegressor, HistGradientBoostingRegressor),
    "classification": (DecisionTreeClassifier, RandomForestClassifier, HistGradientBoostingClassifier),
}
ESTIMATORS: dict[str, tuple[Any, ...]] = {
    "regression": (BoostedRegressor, TreeRegressor),
    "classification": (BoostedClassifier, TreeClassifier),
}
Make = Callable[[], Any]


def models(task: str, seed: int) -> dict[str, Make]:
    """Returns functions that make the models, by the heads of the columns."""
    numbers = task == "regression"
    cart, forest, bins = KINDS[task]
    chance: dict[str, Any] = {"random_state": seed}
    make: dict[str, Make] = {f"{kind.__name__}()": lambda kind=kind: kind(**chance) for kind in ESTIMATORS[task]}
    if numbers:
        make["Refined()"] = lambda: TreeRegressor(jtrees.Refined(), **chance)
    make["CART"] = lambda: GridSearchCV(cart(**chance), DEPTHS, cv=5)
    make["random forest"] = lambda: forest(100, n_jobs=-1, **chance)
    make["HistGradientBoosting"] = lambda: bins(**chance)
    make |= {name: lambda name=name: packages.default(name, not numbers, seed) for name in packages.PACKAGES}
    make |= {name: lambda name=name: networks.Network(name, not numbers, seed) for name in networks.PREFIXES}
    return {name: model for name, model in make.items() if packages.available(name)}


def measured(make: Make, repeat: bool, x: Any, x_test: Any, y: Any, y_test: Any) -> dict[str, Any]:
    """Returns scores and costs of a model: seconds, milliseconds of a single-row prediction, stored numbers."""
    model, start = make(), time.perf_counter()
    model.fit(x, y)
    value: dict[str, Any] = {"seconds": time.perf_counter() - start}
    if repeat:
        start = time.perf_counter()
        make().fit(x, y)
        value["again"] = time.perf_counter() - start
    classifies = y.dtype.kind != "f"
    value["score"] = 100 * float(model.score(x_test, y_test))
    if classifies and hasattr(model, "predict_proba"):
        value["log_loss"] = float(log_loss(y_test, model.predict_proba(x_test), labels=model.classes_))
    rows = [x_test[i : i + 1] for i in range(min(CALLS, len(x_test)))]
    model.predict(rows[0])
    times = [benchmark.seconds(lambda row=row: model.predict(row), 1)[0] for row in rows]
    value["row"] = 1e3 * float(np.median(times))
    inner = getattr(model, "model_", getattr(model, "best_estimator_", model))
    value["numbers"] = numbers_of(inner, x)
    return value


def settings(part: str, name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Returns our recipes in a part, as text, by the heads of their columns; None if the set has another task."""
    recipes = [kind.default_recipe for kind in ESTIMATORS[part]] + [jtrees.Refined()] * (part == "regression")
    texts = dict(zip(OURS[part], map(studies.recipe_text, recipes), strict=True))
    return {"recipes": texts} if name in SETS[part] else None


def measure(part: str, name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Fits all models to a split."""
    split = data.split_of(name, seed, options.data_dir)
    value: dict[str, Any] = {"rows": len(split[0]), "features": split[0].shape[1]}
    return value | {method: measured(make, seed == 0, *split) for method, make in models(part, seed).items()}


class Scores:
    """The values of a task: on all splits of each set, by method."""

    def __init__(self, results: studies.Results, task: str):
        self.task = task
        self.splits = {name: results.values(task, name) for name in results.datasets(task)}
        first = next(iter(self.splits.values()))[0]
        self.methods = [method for method in (*OURS[task], *OTHERS) if method in first]

    def values(self, name: str, method: str, key: str, count: int | None = None) -> list[float]:
        """Returns a number of a method on the first ``count`` splits of a set, or on all, that have the number."""
        return [split[method][key] for split in self.splits[name][:count] if key in split.get(method, {})]

    def means(self, method: str, key: str, count: int | None = None) -> np.ndarray:
        """Returns the means of :meth:`values`, by set; NaN for sets without the number."""
        set_values = [self.values(name, method, key, count) for name in self.splits]
        return np.array([np.mean(values) if values else np.nan for values in set_values])


def costs_table(scores: Scores) -> str:
    """Returns a table of the mean score and the costs of each method."""
    classifies = scores.task == "classification"
    rows = []
    for method in scores.methods:
        median = lambda key, method=method: f"{np.nanmedian(scores.means(method, key, 1)):,.3g}"
        numbers = f"{np.nanmedian(scores.means(method, 'numbers', 1)):,.0f}"
        loss = [f"{np.nanmean(scores.means(method, 'log_loss')):.3f}"] if classifies else []
        score = f"{scores.means(method, 'score').mean():.2f}"
        rows.append([method, score, *loss, median("seconds"), median("again"), numbers, median("row")])
    heads = ["accuracy, %", "log loss"] if classifies else ["R², %"]
    header = [f"mean of {len(scores.splits)} sets", *heads, "fit, s", "second fit, s", "numbers", "one row, ms"]
    return benchmark.markdown(header, rows)


def differences(scores: Scores) -> str:
    """Returns a line per rival that compares our models with the rival."""
    lines = []
    for ours in filter(OURS[scores.task].__contains__, scores.methods):
        for method in scores.methods:
            if method in OURS[scores.task]:
                continue
            leads = scores.means(ours, "score") - scores.means(method, "score")
            line = f"- {ours} minus {method}: {leads.mean():+.2f} points, ahead on {(leads > 0).sum()} of {len(leads)}"
            if scores.task == "classification":
                lower = scores.means(ours, "log_loss") < scores.means(method, "log_loss")
                line += f"; lower log loss on {lower.sum()}"
            lines.append(line + ".")
    return "\n".join(lines) + "\n"


def sets_table(scores: Scores, key: str, digits: int, count: int | None = None) -> str:
    """Returns a table of a number of every method on every set, of the first ``count`` splits or of all splits."""
    rows = []
    for name, splits in scores.splits.items():
        cells = [studies.spread(scores.values(name, method, key, count), digits) for method in scores.methods]
        rows.append([name, f"{splits[0]['rows']} x {splits[0]['features']}", *cells])
    return benchmark.markdown(["set", "rows x features", *scores.methods], rows)


def task_report(results: studies.Results, task: str) -> str:
    """Returns the tables of a task."""
    if not (rows := results.select(task).rows):
        return ""
    scores = Scores(results, task)
    texts = rows[0].settings["recipes"]
    recipes = "\n".join(f"- `{name}`: `{texts[name]}`" for name in OURS[task] if name in texts)
    parts = [f"## {task.capitalize()}", costs_table(scores), differences(scores), recipes]
    parts.append(sets_table(scores, "score", 2))
    if task == "classification":
        parts += ["Log loss:", sets_table(scores, "log_loss", 3)]
    parts += ["Seconds of a fit:", sets_table(scores, "seconds", 1, count=1)]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def report(results: studies.Results, command: str) -> str:
    """Returns the tables of both tasks."""
    head = (
        f"# The estimators with nothing but data\n\nMade by `{command}` on {results.machines}. R² or accuracy in "
        "per cent on a quarter of the rows, mean and deviation over random splits. All programs have their defaults, "
        "except CART, whose depth of 1 to 15 is tuned by five folds. The forest has 100 trees. Seconds, numbers and "
        "milliseconds are medians over sets, of the first split. A fit of jtrees compiles for a new shape; a second "
        "fit does not.\n"
    )
    return "\n".join([head, *filter(None, (task_report(results, task) for task in SETS))])


NAMES = [*SETS["regression"], *SETS["classification"]]
STUDY = studies.Study("estimators", __doc__, SETS, NAMES, 3, measure, report, settings, closed=True)

if __name__ == "__main__":
    benchmark.compile_all_programs()  # as in the first fit of a user
    studies.main(STUDY)  # on one device, as for users
