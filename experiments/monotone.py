"""Monotone trees: violations in Python, C and ONNX; the cost of the constraint in score, on real and made sets; time.

python -m experiments.monotone --data-dir DATA [--write] [--datasets kin8nm ...] [--seeds 3]

The two features with the largest rank correlation with the target are constrained to its sign. For more than two
classes, the most frequent class is separated from the rest. Up to 2000 rows are training rows, and up to 5000 other
rows are test rows.
"""

import argparse
from pathlib import Path
import tempfile
import time
from typing import Any
import warnings

import jax
import numpy as np
import onnxruntime  # type: ignore[import-untyped]
from scipy.stats import spearmanr

from experiments import benchmark, data, studies
from experiments.bench_export import in_c
from experiments.estimators import SETS
import jtrees
from jtrees.cli import keep_programs

RECIPES = {"GET": jtrees.GET(depth=4, epochs=600), "Boosted": jtrees.Boosted(rounds=60)}
DATASETS = [*SETS["regression"], *SETS["classification"][:6], "churn", "spambase"]
TRAIN, TEST, PAIRS = 2000, 5000, 10_000
MADE = 20  # number of made tables; the noise differs between them


def rows(name: str, seed: int, data_dir: Any) -> tuple[Any, ...]:
    """Returns training and test features and targets, the task, and the signs of two features."""
    table, rng = data.load(name, data_dir=data_dir), np.random.default_rng(seed)
    y, task = table.y, "regression"
    if name in SETS["classification"]:
        y, task = (y == np.bincount(y).argmax()).astype(np.int32), "classification"
    order = rng.permutation(len(y))
    train = order[: min(TRAIN, 3 * len(y) // 4)]
    test = order[len(train) :][:TEST]
    ranks = np.array([spearmanr(column, y[train]).statistic if np.ptp(column) else 0 for column in table.x[train].T])
    most = np.argsort(-np.abs(ranks))[:2]
    signs = {int(j): int(np.sign(ranks[j])) for j in most if ranks[j]}
    return table.x[train], y[train], table.x[test], y[test], task, signs


def fitted(recipe: Any, x: Any, y: Any, task: Any, signs: Any, seed: int = 0) -> tuple[Any, float]:
    """Returns a fit, and its processor seconds."""
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some fits are worse than a linear model
        fit = jtrees.fit(recipe, x, y, key=jax.random.key(seed), task=task, monotone=signs)
    return fit, time.process_time() - began


def score(model: Any, x: Any, y: Any) -> float:
    """Returns R^2 or accuracy in per cent."""
    return studies.percent(np.asarray(model.predict(x)), y)


def pairs(x: np.ndarray, feature: int, sign: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns pairs of rows that differ in a feature, in the direction in which predictions must not fall."""
    low = x[rng.integers(len(x), size=PAIRS)].astype(np.float64)
    low += rng.normal(size=low.shape) * x.std(0)
    high = low.copy()
    high[:, feature] += sign * rng.exponential(size=PAIRS) * x[:, feature].std()
    return low, high


def violations(model: Any, x: np.ndarray, signs: dict[int, int]) -> dict[str, int]:
    """Returns the number of pairs whose prediction falls, in each form of the model."""
    outputs = 2 if np.ndim(model.predict(x[:2].astype(np.float64))) == 2 else 1
    shaped = lambda predictions: np.asarray(predictions).reshape(-1, outputs)[:, -1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jtrees.export.to_c(model, folder / "model.h")
        jtrees.export.to_onnx(model, folder / "model.onnx")
        compiled = in_c(folder, "-O2", "double", outputs)["many"]
        session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
        forms = {"Python": model.predict, "C": compiled, "ONNX": lambda x: session.run(["prediction"], {"x": x})[0]}
        counts = dict.fromkeys(forms, 0)
        for feature, sign in signs.items():
            low, high = pairs(x, feature, sign, np.random.default_rng(feature))
            for form, predict in forms.items():
                counts[form] += int((shaped(predict(high)) < shaped(predict(low))).sum())
    return counts


def set_row(name: str, recipe: str, options: argparse.Namespace) -> list[str]:
    """Returns the row of a data set and a recipe."""
    scores: dict[bool, list[float]] = {False: [], True: []}
    times: dict[bool, list[float]] = {False: [], True: []}
    falls = {"Python": 0, "C": 0, "ONNX": 0}
    for seed in range(options.seeds):
        x, y, x_test, y_test, task, signs = rows(name, seed, options.data_dir)
        for constrained in (False, True):
            inputs = RECIPES[recipe], x, y, task, signs if constrained else None, seed
            fitted(*inputs)  # compiles
            fit, seconds = fitted(*inputs)
            times[constrained].append(seconds)
            scores[constrained].append(score(fit.model, x_test, y_test))
        for form, count in violations(fit.model, x_test, signs).items():
            falls[form] += count
    free, bound = (np.mean(scores[constrained]) for constrained in (False, True))
    cells = [name, f"{len(x)} x {x.shape[1]}", recipe, *map(str, falls.values()), f"{free:.2f}", f"{bound:.2f}"]
    return [*cells, f"{bound - free:+.2f}", benchmark.ratio(times[True], times[False])]


def made() -> benchmark.Table:
    """Returns a table of made sets on which the constraint holds: error on new rows, variance over draws of noise."""
    truth = lambda x: np.tanh(2 * x[:, 0]) + np.maximum(x[:, 1], 0) + np.sin(2 * x[:, 2]) / 2
    table = benchmark.Table("recipe", "error, free", "error, monotone", "variance, free", "variance, monotone")
    for name, recipe in RECIPES.items():
        cells = {}
        for constrained in (False, True):
            predictions = []
            for seed in range(MADE):
                rng = np.random.default_rng(seed)
                x = np.random.default_rng(1000).normal(size=(300, 5))
                y = truth(x) + rng.normal(size=300)
                fit, _ = fitted(recipe, x, y, "regression", {0: 1, 1: 1} if constrained else None, seed)
                predictions.append(fit.predict(np.random.default_rng(2000).normal(size=(2000, 5))))
            new = truth(np.random.default_rng(2000).normal(size=(2000, 5)))
            cells[constrained] = np.mean((predictions - new) ** 2), np.var(predictions, axis=0).mean()
        table.add(name, *(f"{cells[constrained][i]:.3f}" for i in (0, 1) for constrained in (False, True)))
    return table


def main(arguments: list[str] | None = None) -> None:
    """Makes the table."""
    datasets = benchmark.several(DATASETS)
    options = benchmark.parse("monotone", __doc__, arguments, data_dir=None, datasets=datasets, seeds=1)
    forms = [f"violations, {form}" for form in ("Python", "C", "ONNX")]
    header = ["set", "rows x features", "recipe", *forms, "score, free", "score, monotone", "change", "time"]
    table = benchmark.Table(*header)
    for name in options.datasets:
        for recipe in RECIPES:
            table.add(*set_row(name, recipe, options))
        jax.clear_caches()
    changes = {recipe: [float(row[8]) for row in table.rows if row[2] == recipe] for recipe in RECIPES}
    ratios = {recipe: [float(row[9]) for row in table.rows if row[2] == recipe] for recipe in RECIPES}
    summary = "; ".join(
        f"{recipe}: {np.mean(changes[recipe]):+.2f} points on average, {np.median(ratios[recipe]):.2f} times the time"
        for recipe in RECIPES
    )
    notes = (
        f"Violations: pairs of {PAIRS} for each of two features whose prediction falls, in a prediction of jtrees, of "
        "the C header and of the ONNX file. Score: R² or accuracy in per cent on new rows without and with the "
        f"constraint, mean of {options.seeds} split(s). Time: processor seconds of a compiled fit with the constraint "
        f"over those without, in turn. {summary}.\n\nMade sets in which the constraint is true, 300 rows of 5 "
        f"features, noise of variance 1, {MADE} draws of the noise: squared error on 2000 new rows, and variance of "
        f"the predictions over the draws.\n\n{made()}"
    )
    benchmark.write(options, table, notes)


if __name__ == "__main__":
    keep_programs()
    main()
