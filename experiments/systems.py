"""All systems side by side: recipes with their defaults, or tuned by 20 draws, beside CART, a forest and boosting.

python -m experiments.systems --data-dir DATA --seeds 3 [--rows 1000] [--datasets churn ...] [--parts GRANDE ...]

The result of a (part, set, seed) is a row of --out. Training uses three quarters of the rows, at most --rows, and the
test at most --rows of the rest. Tuning draws the depth and the learning rate, and a held-out fifth of the training rows
chooses. Rivals that are not installed (``make peers``, ``make networks``) are left out.
"""

import argparse
from collections.abc import Iterable
import time
from typing import Any
import warnings

import jax
import numpy as np
from sklearn.metrics import f1_score

from experiments import benchmark, data, estimators, networks, packages, studies
from experiments.sizes import numbers_of
import jtrees

SETS = estimators.SETS
TASKS = estimators.TASKS
RECIPES: dict[str, Any] = {
    "GET": jtrees.GET(),
    "GET-Linear": jtrees.GET(leaves="linear"),
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
    "Boosted": jtrees.Boosted(),
    "Refined": jtrees.Refined(),
}
# A tree with linear logits, hard or soft, for classes.
_LINEAR = jtrees.Boosted(jtrees.GET(leaves="linear"), rounds=1, learning_rate=1.0)
LOGITS = {"linear logits": _LINEAR.replace(patience=None), "linear logits, soft": jtrees.Refined(_LINEAR)}
TUNED = {f"{name}, tuned": recipe for name, recipe in RECIPES.items()}
RECIPES |= LOGITS
LINEAR_LEAVES = ("GET-Linear", "GET-Linear, tuned")  # for numbers only
RIVALS = ("CART", "random forest", "XGBoost", "CatBoost", *networks.PREFIXES)
PARTS = (*RECIPES, *TUNED, *RIVALS)
ROWS = 1000  # default of the upper limit of the training rows, and of the test rows
DRAWS = 20
METRICS = {"score": "score, %", "log_loss": "log loss", "macro_f1": "macro F1, %"}
DIGITS = {"score": 2, "log_loss": 3, "macro_f1": 2}
COSTS = {"seconds": "seconds", "processor": "processor seconds", "numbers": "numbers"}


def space(recipe: Any) -> dict[str, Any]:
    """Returns the space of tuning: depth 4 or 6, and the learning rate within a factor of three of its default."""
    tree = {"Boosted": "base__", "Refined": "base__base__"}.get(type(recipe).__name__, "")
    rate = getattr(recipe, "learning_rate", None) or 0.01  # GET's default is 0.01
    return {"learning_rate": jtrees.LogUniform(rate / 3, 3 * rate), f"{tree}depth": (4, 6)}


def predictions(part: str, rival: Any, split: studies.Split, seed: int, task: str) -> tuple[Any, np.ndarray]:
    """Returns a fitted model, and its predictions of the test rows: numbers, or probabilities of the classes."""
    x, x_test, y, _ = split
    if rival is not None:
        model = rival.fit(x, y)
        return model, model.predict(x_test) if task == "regression" else model.predict_proba(x_test)
    codes = y if task == "regression" else np.unique(y, return_inverse=True)[1]
    options: Any = {"task": task, "key": jax.random.key(seed)}
    if part in RECIPES:
        fit = jtrees.fit(RECIPES[part], x, codes, **options)
    else:
        recipe = TUNED[part]
        fit = jtrees.tune(recipe, x, codes, space=space(recipe), samples=DRAWS, validation=0.2, **options)
    return fit.model, np.asarray(fit.predict(x_test), np.float64)


def settings(part: str, name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Returns the recipe as text, and a limit of the rows that is not the default; None if it has another task."""
    if part in {"regression": LOGITS, "classification": LINEAR_LEAVES}[TASKS[name]]:
        return None
    recipe = {**RECIPES, **TUNED}.get(part)
    rows = {} if options.rows == ROWS else {"rows": options.rows}
    return rows | ({} if recipe is None else {"recipe": studies.recipe_text(recipe)})


def measure(part: str, name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Fits a system, and returns its scores on the test rows, seconds with compilation, and stored numbers."""
    split, task = data.split_of(name, seed, options.data_dir, limit=options.rows), TASKS[name]
    rival = estimators.models(task, seed)[part]() if part in RIVALS else None
    start, processor = time.perf_counter(), time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some models are worse than a linear model
        model, predicted = predictions(part, rival, split, seed, task)
    value, y = {"seconds": time.perf_counter() - start}, split[3]
    value["processor"] = time.process_time() - processor + getattr(model, "processor_seconds", 0.0)
    inner = getattr(model, "best_estimator_", model)
    value["numbers"] = numbers_of(inner, split[0])
    if task == "regression":
        return value | {"score": studies.percent(predicted, y)}
    classes = np.unique(split[2])
    macro = 100 * float(f1_score(y, classes[predicted.argmax(1)], average="macro"))
    return value | studies.class_scores(predicted, y, classes) | {"macro_f1": macro}


def values_of(results: studies.Results, part: str, other: str, name: str) -> list[tuple[Any, Any]]:
    """Returns the values of two parts on a set, for the seeds that both have."""
    return [(values[part], values[other]) for values in results.common(name, part, other).values()]


def mean_over_sets(pairs: list[list[tuple[Any, Any]]], key: str, which: int = 0) -> float:
    """Returns the mean over the sets of the mean over the seeds of the first or the second value."""
    return float(np.mean([np.mean([pair[which][key] for pair in seeds]) for seeds in pairs]))


def difference(pairs: list[list[tuple[Any, Any]]], key: str = "score", digits: int = 2) -> str:
    """Returns the mean difference of first and second values, and its standard error over the sets."""
    gaps = [np.mean([first[key] - second[key] for first, second in seeds]) for seeds in pairs]
    error = f" ± {np.std(gaps, ddof=1) / np.sqrt(len(gaps)):.{digits}f}" if len(gaps) > 1 else ""
    return f"{np.mean(gaps):+.{digits}f}{error}"


def beside(results: studies.Results, task: str) -> str:
    """Returns the table of the systems and rivals that have all sets, with their defaults, beside CatBoost."""
    sets = {part: set(results.datasets(part)) & set(SETS[task]) for part in PARTS if part not in TUNED}
    all_sets = max(map(len, sets.values()))
    parts = [part for part in sets if 0 < len(sets[part]) == all_sets]
    rival = "CatBoost" if "CatBoost" in parts else ""  # it may not be installed
    values = lambda part, name: values_of(results, part, rival or part, name)
    names = [name for name in SETS[task] if all(values(part, name) for part in parts)]
    if not (parts and names):
        return ""
    columns = [key for key in METRICS if key == "score" or task == "classification"]
    costs = [key for key in COSTS if all(key in row.value for row in results.rows)]  # older rows lack processor seconds
    table = []
    for part in parts:
        pairs = [values(part, name) for name in names]
        median = lambda key, pairs=pairs: np.median([np.median([pair[0][key] for pair in seeds]) for seeds in pairs])
        cells = [f"{mean_over_sets(pairs, key):.{DIGITS[key]}f}" for key in columns]
        gap = difference(pairs) if rival not in ("", part) else ""
        table.append([part, *cells, gap, *(f"{median(key):,.{int(key != 'numbers')}f}" for key in costs)])
    head = [f"{len(names)} sets of {task}", *(METRICS[key] for key in columns), "score minus CatBoost's"]
    return benchmark.markdown([*head, *(COSTS[key] for key in costs)], table)


def tuning(results: studies.Results, task: str) -> str:
    """Returns the table of tuned systems beside their defaults, on the sets and seeds that both have."""
    key, table = "score" if task == "regression" else "log_loss", []
    for part in TUNED:
        pairs = [values_of(results, part, part.removesuffix(", tuned"), name) for name in SETS[task]]
        if pairs := [seeds for seeds in pairs if seeds]:
            cells = [f"{mean_over_sets(pairs, key, which):.{DIGITS[key]}f}" for which in (1, 0)]
            seconds = np.median([pair[0]["seconds"] for seeds in pairs for pair in seeds])
            gaps = [difference(pairs, name, DIGITS[name]) for name in dict.fromkeys(["score", key])]
            counts = [str(len(pairs)), str(max(map(len, pairs)))]
            table.append([part, *counts, *cells, *gaps, f"{seconds:.0f}"])
    changes = [f"change in {METRICS[name]}" for name in dict.fromkeys(["score", key])]
    metrics = [f"{METRICS[key]}, {options}" for options in ("defaults", "tuned")]
    head = [task, "sets", "splits", *metrics, *changes, "seconds of tuning"]
    return benchmark.markdown(head, table) if table else ""


def sets_table(results: studies.Results, parts: list[str], sets: Iterable[str], key: str, digits: int) -> str:
    """Returns a table of a number of every part on the measured sets among some sets; empty if there are none."""
    names = [name for name in sets if name in results.datasets()]
    cell = lambda part, name: studies.spread([value[key] for value in results.values(part, name)], digits)
    table = [[part, *(cell(part, name) for name in names)] for part in parts]
    return benchmark.markdown(["system", *names], table) if names else ""


def report(results: studies.Results, command: str) -> str:
    """Returns the systems beside CatBoost, the tuned systems beside their defaults, and the scores by set."""
    parts = [part for part in PARTS if results.datasets(part)]
    rows = results.rows[0].settings.get("rows", ROWS) if results.rows else ROWS
    about = (
        f"Made by `{command}` on {results.machines}. Scores are R² or accuracy in per cent, with at most {rows} "
        "training rows and as many test rows, as means over splits and then over sets. A system that lacks some sets "
        "is in the tables by set alone. CART's depth is tuned by cross-validation; the other systems have their "
        "defaults. The difference from CatBoost is a mean over the sets with its standard error. Seconds are medians "
        "of single fits on one or two busy cores, with compilation unless an earlier fit compiled the same program. "
        "Processor seconds add up all cores."
    )
    tuned = (
        f"A tuned system is the choice of `jtrees.tune` among {DRAWS} draws of the depth (4 or 6) and the learning "
        "rate, on a held-out fifth of the training rows. NonGreedy's default depth of 8 is not among the draws. The "
        "sets and splits are those that both have."
    )
    tables = [beside(results, task) for task in SETS]
    gains = [tuning(results, task) for task in SETS]
    gains = ["## Tuning", tuned, *gains] if any(gains) else []
    scores = sets_table(results, parts, TASKS, "score", 1)
    losses = sets_table(results, parts, SETS["classification"], "log_loss", 3)
    spread = "## By set\n\nMeans and standard deviations over the splits: scores, then log loss."
    return "\n\n".join(["# All systems", about, *filter(None, [*tables, *gains, spread, scores, losses])]) + "\n"


STUDY = studies.Study(
    *("systems", __doc__, PARTS, TASKS, 3, measure, report, settings),
    available=packages.available,
    closed=True,
    arguments=lambda parser: parser.add_argument("--rows", type=int, default=ROWS),
)

if __name__ == "__main__":
    studies.program(STUDY)
