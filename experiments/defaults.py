"""Every recipe with its default options on every data set, beside CART of the same depth and a linear model.

python -m experiments.defaults --data-dir DATA --seeds 3 [--recipes baselines TEL ...] [--datasets abalone ...]

The result of a (recipe, set, seed), and of the baselines of a (set, seed), is a row of --out. Training uses three
quarters of the rows, at most 3000. The test uses at most 3000 of the remaining rows. Splits are stratified by class.
Scores are R^2 or accuracy in per cent.
"""

import argparse
from collections import Counter
from collections.abc import Callable
from functools import partial
import time
from typing import Any, NamedTuple
import warnings

import jax
import numpy as np
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from experiments import benchmark, data, estimators, studies
import jtrees

MADE = ("made-wide", "made-collinear")
SETS = {
    "regression": (*estimators.SETS["regression"], *MADE),
    "classification": (*estimators.SETS["classification"], "mnist"),
}
TASKS: dict[str, Any] = {name: task for task, names in SETS.items() for name in names}
RECIPES: dict[str, Any] = {
    "GET": jtrees.GET(),
    "GET-linear": jtrees.GET(leaves="linear"),  # regression only
    "RADDT": jtrees.RADDT(),
    "DGT": jtrees.DGT(),
    "LatentTree": jtrees.LatentTree(),
    "TEL": jtrees.TEL(),
    "NODE": jtrees.NODE(),
    "GRANDE": jtrees.GRANDE(),
    "DTSemNet": jtrees.DTSemNet(),
    "SoftDecisionTree": jtrees.SoftDecisionTree(),
    "CO2": jtrees.CO2(),
    "NonGreedy": jtrees.NonGreedy(),
    "Bagged-DGT": jtrees.Bagged(jtrees.DGT()),
    "Polished-GET": jtrees.Polished(jtrees.GET()),
    "BestOf-DGT": jtrees.BestOf(jtrees.DGT()),
}
# LatentClustering predicts features from other features, without y. FromMethod has no default method. Sparse is
# measured in experiments.options, and Boosted and Refined in paper_forest.
LEFT_OUT = (jtrees.LatentClustering, jtrees.FromMethod, jtrees.Sparse, jtrees.Boosted, jtrees.Refined)
# Recipes without splits of a ridge regression.
WITHOUT = {f"{name}-no-ridge": RECIPES[name].replace(ridge=False) for name in ("GET", "CO2", "NonGreedy")}
PARTS = ("baselines", *RECIPES, *WITHOUT)
ROWS = 3000  # upper limit of the training rows, and of the test rows
BEHIND = 2  # points


def made_table(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns features and target of a made regression table with 6000 rows, always the same.

    ``made-wide`` has 784 independent normal features. The target depends on 20 of them: a step along each of two
    oblique directions, and a sine along a third. Noise is a tenth of the variance.

    ``made-collinear`` has 20 features of variance 1. The product of four hidden factors and a random matrix gives ten
    columns. Each column appears twice, with noise of standard deviation 0.01: features 2 i and 2 i + 1 are nearly
    equal. The target depends on the differences of two such pairs: linearly on one, by a step on the other. Noise is a
    twentieth of the variance. A linear model explains about 72 % of the variance. The relevant directions have very
    small variance.
    """
    rng = np.random.default_rng(0)
    if name == "made-wide":
        x, columns = rng.normal(size=(2 * ROWS, 784)), rng.choice(784, 20, replace=False)
        directions = rng.normal(size=(20, 3))
        z = x[:, columns] @ (directions / np.linalg.norm(directions, axis=0))
        signal, noise = np.sign(z[:, 0]) + np.sign(z[:, 1] - 0.5) + np.sin(z[:, 2]), 0.1
    else:
        matrix = rng.normal(size=(4, 10))
        exact = rng.normal(size=(2 * ROWS, 4)) @ (matrix / np.linalg.norm(matrix, axis=0))
        x = np.repeat(exact, 2, axis=1) + 0.01 * rng.normal(size=(2 * ROWS, 20))
        differences = (x[:, [0, 2]] - x[:, [1, 3]]) / (0.01 * np.sqrt(2))
        signal, noise = 0.7 * differences[:, 0] + np.sign(differences[:, 1]), 0.05
    y = np.sqrt(1 - noise) * signal / signal.std() + np.sqrt(noise) * rng.normal(size=len(x))
    return x.astype(np.float32), y.astype(np.float32)


def table(name: str, data_dir: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns features and targets of a set, made or by name."""
    if name in MADE:
        return made_table(name)
    loaded = data.load(name, data_dir=data_dir)
    return loaded.x, loaded.y


def rows(name: str, seed: int, data_dir: str | None) -> studies.Split:
    """Returns training and test features, training and test targets, shuffled by the seed."""
    return data.split(*table(name, data_dir), seed, limit=ROWS)


def depth_of(recipe: Any) -> int:
    """Returns the depth of the trees of a recipe, or of its base; 4 if the model is no single tree."""
    if recipe.tree_leaves(jtrees.Regression()) is None:
        return 4
    return recipe.depth if hasattr(recipe, "depth") else depth_of(recipe.base)


# The depths of the recipes, which are also the depths of CART.
DEPTHS = sorted({depth_of(recipe) for recipe in RECIPES.values()})


# --- What is measured ------------------------------------------------------------------------------------------------


def watched(fit: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Returns a fit, its seconds and its user warnings."""
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = fit()
    texts = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    return model, {"seconds": time.perf_counter() - start, "warnings": texts}


def measure(part: str, name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Fits the baselines, or a recipe; returns scores, how the fit ended, and the size of the model."""
    x, x_test, y, y_test = split = rows(name, seed, options.data_dir)
    value: dict[str, Any] = {"rows": len(x), "test_rows": len(x_test), "features": x.shape[1]}
    if part != "baselines":
        how: Any = {"task": TASKS[name], "max_seconds": options.max_seconds}
        recipe = (RECIPES | WITHOUT)[part]
        fit, details = watched(partial(jtrees.fit, recipe, x, y, key=jax.random.key(seed), **how))
        size = {"parameters": int(fit.model.num_parameters)}
        return value | studies.scores(fit.model, split) | details | {"ended": fit.report.ended} | size
    classes = TASKS[name] == "classification"
    cart = DecisionTreeClassifier if classes else DecisionTreeRegressor
    models: dict[str, Any] = {f"CART {depth}": cart(max_depth=depth, random_state=seed) for depth in DEPTHS}
    linear = LogisticRegression(max_iter=1000) if classes else LinearRegression()
    models["linear"] = make_pipeline(StandardScaler(), linear)
    # Double precision keeps nearly collinear features distinct.
    x, x_test = x.astype(np.float64), x_test.astype(np.float64)
    for baseline, model in models.items():
        fitted, details = watched(partial(model.fit, x, y))
        scored = {"train": 100 * fitted.score(x, y), "test": 100 * fitted.score(x_test, y_test)}
        value[baseline] = scored | details
    return value


def settings(part: str, name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Returns the depths of the baselines or a recipe; None for linear leaves with classes."""
    if part == "GET-linear" and TASKS[name] == "classification":
        return None
    if part == "baselines":
        return {"depths": DEPTHS, "rows": ROWS}
    recipe = studies.recipe_text((RECIPES | WITHOUT)[part])
    return {"recipe": recipe, "max_seconds": options.max_seconds, "rows": ROWS}


# --- The report ------------------------------------------------------------------------------------------------------


class Compared(NamedTuple):
    """A recipe on a set beside the better of CART of its depth and the linear model, on the seeds that both have.

    Attributes:
      test: mean test score of the recipe.
      train: mean training score of the recipe.
      baseline: name of the better baseline; empty if there is none yet.
      score: mean test score of that baseline.
    """

    test: float
    train: float
    baseline: str
    score: float

    def is_behind(self) -> bool:
        """Whether the recipe is more than two points behind."""
        return self.baseline != "" and self.score - self.test > BEHIND


def mean(values: list[dict[str, Any]], key: str) -> float:
    """Returns the mean over seeds."""
    return float(np.mean([value[key] for value in values]))


def compared(results: studies.Results, part: str, name: str) -> Compared | None:
    """Compares a recipe on a set with the baselines; returns None if the recipe was not fitted to the set."""
    fits, baselines = results.seed_values(part, name), results.seed_values("baselines", name)
    if not fits:
        return None
    seeds = sorted(fits.keys() & baselines.keys()) or sorted(fits)
    values = [fits[seed] for seed in seeds]
    baseline_means = {
        baseline: mean([baselines[seed][baseline] for seed in seeds], "test")
        for baseline in (f"CART {depth_of(RECIPES[part])}", "linear")
        if baselines.keys() >= set(seeds)
    }
    best = max(baseline_means, key=lambda baseline: baseline_means[baseline], default="")
    return Compared(mean(values, "test"), mean(values, "train"), best, baseline_means.get(best, np.nan))


def task_report(results: studies.Results, task: str) -> str:
    """Returns the table of a task, and the list of the recipes that are behind."""
    names = [name for name in SETS[task] if name in results.datasets()]
    if not names:
        return ""
    methods = [part for part in RECIPES if any(results.values(part, name) for name in names)]
    lines, entries, fewer = [], [], []
    for name in names:
        splits = {method: len(results.values(method, name)) for method in methods}
        counts = [f"{method} {count}" for method, count in splits.items() if 0 < count < max(splits.values())]
        fewer += [f"{name} ({', '.join(counts)})"] if counts else []
        first = next(value for part in PARTS for value in results.values(part, name))
        cells = [name, f"{first['rows']} + {first['test_rows']} x {first['features']}"]
        for method in methods:
            cell = compared(results, method, name)
            cells.append("-" if cell is None else f"**{cell.test:.1f}**" if cell.is_behind() else f"{cell.test:.1f}")
            entries += [(name, method, cell)] if cell is not None and cell.baseline else []
        score = lambda key, tests: f"{np.mean(tests(key)):.1f}" if tests(key) else "-"
        score = partial(score, tests=lambda key, name=name: results.values("baselines", name, key, "test"))
        lines.append([*cells, " / ".join(score(f"CART {depth}") for depth in DEPTHS), score("linear")])
    seconds = [[s for name in names for s in results.values(method, name, "seconds")] for method in methods]
    lines.append(["longest fit, seconds", "", *(f"{max(method_seconds):.0f}" for method_seconds in seconds), "", ""])
    header = ["set", "rows x features", *methods, f"CART {' / '.join(map(str, DEPTHS))}", "linear"]
    text = benchmark.markdown(header, lines)
    if fewer:
        text += f"\nCells with fewer splits than the rest of their row, with their splits: {'; '.join(fewer)}.\n"
    return f"## {task.capitalize()}\n\n{text}\n{behind_list(entries)}\n"


def behind_list(entries: list[tuple[str, str, Compared]]) -> str:
    """Returns the list of the recipes that are behind."""
    behind = [entry for entry in entries if entry[2].is_behind()]
    counts = ", ".join(f"{method} {count}" for method, count in Counter(name for _, name, _ in behind).most_common())
    lines = [
        f"- {name}, {method}: {cell.test:.1f}, {cell.baseline} {cell.score:.1f}; training score {cell.train:.1f}."
        for name, method, cell in behind
    ]
    title = f"### More than two points behind: {len(behind)} of the {len(entries)} cells that have baselines"
    return "\n".join([title, *(["", f"By recipe: {counts}.", ""] if behind else []), *lines])


def ridge_report(results: studies.Results) -> str:
    """Returns tables of recipes with and without splits of a ridge regression, on the splits that all have."""
    tables = []
    for part, without in WITHOUT.items():
        name, cart, lines, differences = part.removesuffix("-no-ridge"), f"CART {depth_of(without)}", [], []
        for dataset in TASKS:
            if seeds := list(results.common(dataset, name, part, "baselines").values()):
                test = lambda method, seeds=seeds: mean([values[method] for values in seeds], "test")
                baseline = lambda key, seeds=seeds: mean([values["baselines"][key] for values in seeds], "test")
                differences.append(test(name) - test(part))
                scores = test(name), test(part), differences[-1], baseline(cart), baseline("linear")
                cells = (f"{round(score, 1) + 0:{'+' if i == 2 else ''}.1f}" for i, score in enumerate(scores))
                lines.append([dataset, str(len(seeds)), *cells])
        if lines:
            lines.append(["**mean**", "", "", "", f"{np.mean(differences):+.1f}", "", ""])
            header = ["set", "splits", name, "`ridge=False`", "difference", cart, "linear"]
            tables.append(f"### {name}\n\n{benchmark.markdown(header, lines)}")
    return "\n".join(["## What a ridge regression brings\n", *tables]) if tables else ""


def report(results: studies.Results, command: str) -> str:
    """Returns a table and a list per task, and tables of the recipes without splits of a ridge regression."""
    limits = {row.settings["max_seconds"] for row in results.rows if row.part in RECIPES}
    seconds = " or ".join(f"{limit:g}" for limit in sorted(limits))
    head = (
        f"# Every recipe with its default options\n\nMade by `{command}` on {results.machines}. Scores are test "
        "R² or accuracy in per cent, means over the random splits of a set. The second column has training + test "
        "rows. A bold score is more than two points below the better baseline on the splits that both have. The "
        "baselines are CART of the recipe's own depth "
        f"({', '.join(f'{part} {depth_of(recipe)}' for part, recipe in RECIPES.items())}) and a linear model (least "
        f"squares or logistic regression on standardised features). Each fit has `max_seconds={seconds or '-'}`, "
        "compilation included; a round or a compilation that is running at the limit is finished.\n"
    )
    return "\n".join([head, *filter(None, (*(task_report(results, task) for task in SETS), ridge_report(results)))])


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this script."""
    parser.add_argument("--recipes", dest="parts", nargs="+", choices=PARTS, help="the same as --parts")
    parser.add_argument("--max-seconds", type=float, default=20.0, help="limit of each fit, compilation included")


STUDY = studies.Study(
    *("defaults", __doc__, PARTS, list(TASKS), 3, measure, report, settings), closed=True, arguments=arguments
)

if __name__ == "__main__":
    studies.main(STUDY)  # on one device, without a cache of programs: as for users, and equal for all seeds
