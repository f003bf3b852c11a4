"""All systems side by side: recipes with their defaults, or tuned by 20 draws, beside CART, a forest and boosting.

python -m experiments.systems --data-dir DATA --seeds 3 [--datasets churn ...] [--parts GRANDE "GRANDE, tuned" ...]

The result of a (part, set, seed) is a row of --out. Training uses three quarters of the rows, at most 1000, and the
test at most 1000 of the rest. Tuning draws the depth and the learning rate, and a held-out fifth of the training rows
chooses. Rivals that are not installed (``make peers``) are left out.
"""

import argparse
import time
from typing import Any
import warnings

import jax
import numpy as np
from sklearn.metrics import f1_score, log_loss, r2_score

from experiments import benchmark, data, defaults, estimators, studies
import jtrees

SETS = {
    "regression": (
        *("airfoil-self-noise", "abalone", "cpu-act", "kin8nm"),
        *("combined-cycle-power-plant", "elevators", "ailerons", "space-ga"),
    ),
    "classification": (
        *("heart-c", "breast-cancer-wisconsin", "diabetes", "churn"),
        *("spambase", "vehicle", "segmentation", "satimage"),
    ),
}
TASKS = {name: task for task, names in SETS.items() for name in names}
NAMES = ("GET", "RADDT", "DGT", "LatentTree", "TEL", "NODE", "GRANDE", "DTSemNet", "SoftDecisionTree", "NonGreedy")
RECIPES: dict[str, Any] = {name: defaults.RECIPES[name] for name in NAMES}
# A tree with linear logits, hard or soft, for classes.
_LINEAR = jtrees.Boosted(jtrees.GET(leaves="linear"), rounds=1, learning_rate=1.0)
LOGITS = {"linear logits": _LINEAR.replace(patience=None), "linear logits, soft": jtrees.Refined(_LINEAR)}
RECIPES |= {"Boosted": jtrees.Boosted(), "Refined": jtrees.Refined()}
TUNED = {f"{name}, tuned": recipe for name, recipe in RECIPES.items()}
RECIPES |= LOGITS
RIVALS = ("CART", "random forest", "XGBoost", "CatBoost")
PARTS = (*RECIPES, *TUNED, *RIVALS)
ROWS = 1000  # upper limit of the training rows, and of the test rows
DRAWS = 20
METRICS = {"score": "score, %", "log_loss": "log loss", "macro_f1": "macro F1, %"}


def space(recipe: Any) -> dict[str, Any]:
    """Returns the space of tuning: depth 4 or 6, and the learning rate within a factor of three of its default."""
    tree = {"Boosted": "base__", "Refined": "base__base__"}.get(type(recipe).__name__, "")
    rate = getattr(recipe, "learning_rate", None) or 0.01  # GET's default is 0.01
    return {"learning_rate": jtrees.LogUniform(rate / 3, 3 * rate), f"{tree}depth": (4, 6)}


def predictions(part: str, split: studies.Split, seed: int, task: str) -> tuple[Any, np.ndarray]:
    """Returns a fitted model, and its predictions of the test rows: numbers, or probabilities of the classes."""
    x, x_test, y, _ = split
    if part in RIVALS:
        model = estimators.models(task, seed)[part]().fit(x, y)
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
    """Returns the recipe as text; None if the part is for classes only."""
    if TASKS.get(name) == "regression" and part in ("DTSemNet", "DTSemNet, tuned", *LOGITS):
        return None
    recipe = {**RECIPES, **TUNED}.get(part)
    return {} if recipe is None else {"recipe": studies.recipe_text(recipe)}


def measure(part: str, name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Fits a system, and returns its scores on the test rows, seconds with compilation, and stored numbers."""
    split, task = data.split_of(name, seed, options.data_dir, most=ROWS), TASKS[name]
    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some models are worse than a linear model
        model, predicted = predictions(part, split, seed, task)
    value, y = {"seconds": time.perf_counter() - begun}, split[3]
    inner = getattr(model, "best_estimator_", model)
    value["numbers"] = estimators.numbers_of(inner, split[0])
    if task == "regression":
        return value | {"score": 100 * float(r2_score(y, predicted))}
    classes = np.unique(split[2])
    labels = classes[predicted.argmax(1)]
    predicted = predicted / predicted.sum(1, keepdims=True)  # sums of float32 are not exactly 1
    value |= {"score": 100 * float(np.mean(labels == y)), "log_loss": float(log_loss(y, predicted, labels=classes))}
    return value | {"macro_f1": 100 * float(f1_score(y, labels, average="macro"))}


def means(results: studies.Results, task: str) -> str:
    """Returns the table of means over the sets that all parts have, and differences from CatBoost."""
    parts = [part for part in PARTS if set(results.datasets(part)) & set(SETS[task])]
    names = [name for name in SETS[task] if all(results.values(part, name) for part in parts)]
    columns = [key for key in METRICS if key == "score" or task == "classification"]
    table = []
    for part in parts:
        mean = lambda key, part=part: np.mean([np.mean(results.values(part, name, key)) for name in names])
        median = lambda key, part=part: np.median([np.median(results.values(part, name, key)) for name in names])
        cells = [f"{mean(key):.{3 if key == 'log_loss' else 2}f}" for key in columns]
        table.append(
            [part, *cells, difference(results, part, names), f"{median('seconds'):.1f}", f"{median('numbers'):,.0f}"]
        )
    head = [f"{len(names)} sets of {task}", *(METRICS[key] for key in columns)]
    return benchmark.markdown([*head, "score minus CatBoost's", "seconds", "numbers"], table) if names else ""


def difference(results: studies.Results, part: str, names: list[str]) -> str:
    """Returns the mean difference of the scores from CatBoost's, and its standard error over the sets."""
    gaps = []
    for name in names:
        ours, rival = results.by_seed(part, name), results.by_seed("CatBoost", name)
        gaps.append([ours[seed]["score"] - rival[seed]["score"] for seed in ours.keys() & rival.keys()])
    if part == "CatBoost" or len(names) < 2 or not all(gaps):
        return ""
    means = [np.mean(values) for values in gaps]
    return f"{np.mean(means):+.2f} ± {np.std(means, ddof=1) / np.sqrt(len(means)):.2f}"


def report(results: studies.Results, command: str) -> str:
    """Returns the means of both tasks, and the scores by set."""
    about = (
        f"Made by `{command}` on {results.machines}. Scores are R² or accuracy in per cent, with at most {ROWS} "
        "training rows and as many test rows, mean and standard deviation over the splits. A tuned recipe is the "
        f"choice of `jtrees.tune` among {DRAWS} draws, on a held-out fifth. CART's depth is tuned by "
        "cross-validation; the other rivals have their defaults. The difference from CatBoost is a mean over the sets "
        "with its standard error. Seconds are of the first fit, with compilation and tuning."
    )
    cell = lambda part, name: studies.spread(values, 1) if (values := results.values(part, name, "score")) else "-"
    rows = [[part, *(cell(part, name) for name in TASKS)] for part in PARTS if results.datasets(part)]
    tables = [means(results, task) for task in SETS]
    by_set = benchmark.markdown(["system", *TASKS], rows)
    return "\n\n".join(["# All systems", about, *filter(None, tables), by_set]) + "\n"


PACKAGES = {"XGBoost": "xgboost", "CatBoost": "catboost"}
STUDY = studies.Study("systems", __doc__, PARTS, TASKS, 3, measure, report, settings, packages=PACKAGES)

if __name__ == "__main__":
    studies.program(STUDY)
