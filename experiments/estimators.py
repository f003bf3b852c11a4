"""The estimators with their defaults, beside common alternatives with their defaults.

python -m experiments.estimators --data-dir DATA --seeds 3 [--datasets kin8nm ...] [--parts regression classification]

The results of a (part, set, seed) are a file under --out. By default these are the committed files. The report beside
that folder is made from the existing files. Three quarters of the rows are training rows, stratified by class. Scores
are R^2 or accuracy in per cent. The depth of CART is tuned. Rivals that are not installed (``make peers``) are left
out. The first split also has the seconds of a second fit in the same process.
"""

import argparse
from collections.abc import Callable, Iterator
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
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from experiments import benchmark, data, pieces, rivals
from experiments.outcome import size
from experiments.paper_get import PAPER
import jtrees
from jtrees.estimators import TreeClassifier, TreeRegressor

SETS = {
    "regression": tuple(PAPER),
    "classification": (
        *("heart-c", "breast-cancer-wisconsin", "diabetes", "glass", "ecoli", "vehicle", "segmentation", "dna"),
        *("churn", "spambase", "optdigits", "satimage", "ann-thyroid", "pendigits", "letter", "connect-4"),
    ),
}
DEPTHS = {"max_depth": range(1, 16)}
CALLS = 30  # number of single-row predictions
OURS = {"regression": ("TreeRegressor()", "Boosted()", "Refined()"), "classification": ("TreeClassifier()",)}
Make = Callable[[], Any]


def models(task: str, seed: int) -> dict[str, Make]:
    """Returns functions that make the models, by the heads of the columns."""
    numbers = task == "regression"
    cart, forest, bins = (
        (DecisionTreeRegressor, RandomForestRegressor, HistGradientBoostingRegressor)
        if numbers
        else (DecisionTreeClassifier, RandomForestClassifier, HistGradientBoostingClassifier)
    )
    tree: Any = TreeRegressor if numbers else TreeClassifier
    chance: dict[str, Any] = {"random_state": seed}
    found: dict[str, Make] = {f"{tree.__name__}()": lambda: tree(**chance)}
    if numbers:
        found["Boosted()"] = lambda: tree(jtrees.Boosted(), **chance)
        found["Refined()"] = lambda: tree(jtrees.Refined(), **chance)
    found["CART"] = lambda: GridSearchCV(cart(**chance), DEPTHS, cv=5)
    found["random forest"] = lambda: forest(100, n_jobs=-1, **chance)
    found["HistGradientBoosting"] = lambda: bins(**chance)
    for name, rival in rivals.RIVALS.items():
        if benchmark.installed(rival.package):
            found[name] = lambda rival=rival: rival.model(not numbers)(**rival.fixed(seed))
    return found


def recipes(part: str) -> list[str]:
    """Returns our recipes in a part, as text, in the order of their columns."""
    ours = (TreeRegressor.default_recipe, jtrees.Boosted(), jtrees.Refined())
    return [pieces.recipe_text(one) for one in (ours if part == "regression" else (TreeClassifier.default_recipe,))]


def measured(make: Make, again: bool, x: Any, x_test: Any, y: Any, y_test: Any) -> dict[str, Any]:
    """Returns scores and costs of a model: seconds, milliseconds of a single-row prediction, stored numbers."""
    begun = time.perf_counter()
    model = make().fit(x, y)
    found: dict[str, Any] = {"seconds": time.perf_counter() - begun}
    if again:
        begun = time.perf_counter()
        make().fit(x, y)
        found["again"] = time.perf_counter() - begun
    classifies = y.dtype.kind != "f"
    found["score"] = 100 * float(model.score(x_test, y_test))
    if classifies and hasattr(model, "predict_proba"):
        found["log_loss"] = float(log_loss(y_test, model.predict_proba(x_test), labels=model.classes_))
    rows = [x_test[i : i + 1] for i in range(min(CALLS, len(x_test)))]
    model.predict(rows[0])
    times = [benchmark.seconds(lambda row=row: model.predict(row), 1)[0] for row in rows]
    found["row"] = 1e3 * float(np.median(times))
    inner = getattr(model, "model_", getattr(model, "best_estimator_", model))
    found["numbers"] = numbers_of(inner, x)
    return found


def numbers_of(model: Any, x: np.ndarray) -> int:
    """Returns how many numbers a model stores."""
    if hasattr(model, "num_parameters"):  # models of jtrees
        return int(model.num_parameters)
    if hasattr(model, "_predictors"):  # HistGradientBoosting
        nodes = [tree.nodes for trees in model._predictors for tree in trees]
        leaves = sum(int(of["is_leaf"].sum()) for of in nodes)
        return 2 * (sum(map(len, nodes)) - leaves) + leaves
    return int(size(model, x)[1])


def pieces_of(part: str, name: str, options: argparse.Namespace) -> Iterator[pieces.Piece]:
    """Yields a piece per seed."""
    if name not in SETS[part]:
        return
    settings = {"recipes": recipes(part)}

    def make(seed: int) -> dict[str, Any]:
        table = data.load(name, data_dir=options.data_dir)
        by_class = table.y if part == "classification" else None
        split: Any = train_test_split(table.x, table.y, train_size=0.75, random_state=seed, stratify=by_class)
        found: dict[str, Any] = {"rows": len(split[0]), "features": table.x.shape[1]}
        return found | {method: measured(of, seed == 0, *split) for method, of in models(part, seed).items()}

    yield from pieces.for_seeds(part, name, make, settings, options.all_seeds)


class Results:
    """The results of a task."""

    def __init__(self, found: pieces.Found, task: str):
        self.task = task
        self.sets = [name for name in SETS[task] if name in found[task]]
        self.of = {name: list(pieces.of_seeds(found, task, name).values()) for name in self.sets}
        self.methods = [key for key, value in self.of[self.sets[0]][0].items() if isinstance(value, dict)]

    def values(self, name: str, method: str, what: str) -> list[float]:
        """Returns a number of a method on the splits of a set that have the number."""
        return [one[method][what] for one in self.of[name] if what in one.get(method, {})]

    def firsts(self, method: str, what: str) -> np.ndarray:
        """Returns a number of a method on the first split, by set; NaN for sets without the number."""
        return np.array([self.of[name][0].get(method, {}).get(what, np.nan) for name in self.sets])

    def means(self, method: str, what: str) -> np.ndarray:
        """Returns the means of a number of a method, by set; NaN for sets without the number."""
        each = [self.values(name, method, what) for name in self.sets]
        return np.array([np.mean(some) if some else np.nan for some in each])


def front(results: Results) -> str:
    """Returns a table of the mean score and the costs of each method."""
    classifies = results.task == "classification"
    rows = []
    for method in results.methods:
        median = lambda what, method=method: f"{np.nanmedian(results.firsts(method, what)):,.3g}"
        numbers = f"{np.nanmedian(results.firsts(method, 'numbers')):,.0f}"
        loss = [f"{np.nanmean(results.means(method, 'log_loss')):.3f}"] if classifies else []
        score = f"{results.means(method, 'score').mean():.2f}"
        rows.append([method, score, *loss, median("seconds"), median("again"), numbers, median("row")])
    score = ["accuracy, %", "log loss"] if classifies else ["R², %"]
    header = [f"mean of {len(results.sets)} sets", *score, "fit, s", "second fit, s", "numbers", "one row, ms"]
    return benchmark.markdown(header, rows)


def beside(results: Results) -> str:
    """Returns a line per rival that compares our models with the rival."""
    lines = []
    for ours in OURS[results.task]:
        for method in results.methods:
            if method in OURS[results.task]:
                continue
            ahead = results.means(ours, "score") - results.means(method, "score")
            line = f"- {ours} minus {method}: {ahead.mean():+.2f} points, ahead on {(ahead > 0).sum()} of {len(ahead)}"
            if results.task == "classification":
                lower = results.means(ours, "log_loss") < results.means(method, "log_loss")
                line += f"; lower log loss on {lower.sum()}"
            lines.append(line + ".")
    return "\n".join(lines) + "\n"


def each_set(results: Results, what: str, digits: int, splits: int | None = None) -> str:
    """Returns a table of a number of every method on every set, of the first ``splits`` splits or of all splits."""
    rows = []
    for name in results.sets:
        first = results.of[name][0]
        cells = [pieces.spread(results.values(name, method, what)[:splits], digits) for method in results.methods]
        rows.append([name, f"{first['rows']} x {first['features']}", *cells])
    return benchmark.markdown(["set", "rows x features", *results.methods], rows)


def of_task(found: pieces.Found, task: str) -> str:
    """Returns the tables of a task."""
    if not found.get(task):
        return ""
    results = Results(found, task)
    records = [one for by_seed in found[task].values() for one in by_seed.values()]
    texts = zip(OURS[task], records[0]["settings"]["recipes"], strict=True)
    listed = "\n".join(f"- `{name}`: `{text}`" for name, text in texts)
    parts = [f"## {task.capitalize()}", front(results), beside(results), listed]
    parts.append(each_set(results, "score", 2))
    if task == "classification":
        parts += ["Log loss:", each_set(results, "log_loss", 3)]
    parts += ["Seconds of a fit:", each_set(results, "seconds", 1, splits=1)]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def report(found: pieces.Found, command: str) -> str:
    """Returns the tables of both tasks."""
    head = (
        f"# The estimators with nothing but data\n\nMade by `{command}` on {pieces.machines(found)}. R² or accuracy in "
        "per cent on a quarter of the rows, mean and deviation over random splits. All programs have their defaults, "
        "except CART, whose depth of 1 to 15 is tuned by five folds. The forest has 100 trees. Seconds, numbers and "
        "milliseconds are medians over sets, of the first split. A fit of jtrees compiles for a new shape; a second "
        "fit does not.\n"
    )
    return "\n".join([head, *filter(None, (of_task(found, task) for task in SETS))])


NAMES = [name for names in SETS.values() for name in names]
SCRIPT = pieces.Script("estimators", __doc__, SETS, NAMES, 3, pieces_of, report)

if __name__ == "__main__":
    pieces.main(SCRIPT)  # on one device, without a cache of programs: as for users
