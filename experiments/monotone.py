"""Monotone trees: violations in Python, C and ONNX; the cost of the constraint in score, on real and made sets; time.

python -m experiments.monotone --data-dir DATA [--write] [--datasets kin8nm ...] [--seeds 3]

The two features with the largest rank correlation with the target are constrained to its sign. For more than two
classes, the most frequent class is separated from the rest. Up to 2000 rows are training rows, and up to 5000 other
rows are test rows.
"""

import argparse
from functools import partial
from pathlib import Path
import tempfile
import time
from typing import Any

import jax
import numpy as np
import onnxruntime  # type: ignore[import-untyped]
from scipy.stats import spearmanr

from experiments import benchmark, data, studies
from experiments.bench_export import in_c
from experiments.estimators import SETS
import jtrees

RECIPES = {"GET": jtrees.GET(depth=4, epochs=600), "Boosted": jtrees.Boosted(rounds=60)}
DATASETS = [*SETS["regression"], *SETS["classification"][:6], "churn", "spambase"]
TRAIN, TEST, PAIRS = 2000, 5000, 10_000
FORMS: tuple[str, ...] = ("Python", "C", "ONNX")
MADE = 20  # number of made tables; the noise differs between them


def rows(name: str, seed: int, data_dir: Any) -> tuple[studies.Split, Any, dict[int, int]]:
    """Returns training and test parts, the task, and the signs of two features."""
    table, rng = data.load(name, data_dir=data_dir), np.random.default_rng(seed)
    y, task = table.y, "regression"
    if name in SETS["classification"]:
        y, task = (y == np.bincount(y).argmax()).astype(np.int32), "classification"
    order = rng.permutation(len(y))
    train = order[: min(TRAIN, 3 * len(y) // 4)]
    test = order[len(train) :][:TEST]
    ranks = np.array([spearmanr(column, y[train]).statistic if np.ptp(column) else 0 for column in table.x[train].T])
    signs = {int(j): int(np.sign(ranks[j])) for j in np.argsort(-np.abs(ranks))[:2] if ranks[j]}
    return (table.x[train], table.x[test], y[train], y[test]), task, signs


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
        run = lambda x: session.run(["prediction"], {"x": x})[0]
        forms = dict(zip(FORMS, (model.predict, compiled, run), strict=True))
        counts = dict.fromkeys(FORMS, 0)
        for feature, sign in signs.items():
            low, high = pairs(x, feature, sign, np.random.default_rng(feature))
            for form, predict in forms.items():
                counts[form] += int((shaped(predict(high)) < shaped(predict(low))).sum())
    return counts


def set_row(name: str, recipe: str, options: argparse.Namespace) -> list[str]:
    """Returns the row of a data set and a recipe."""
    scores: dict[bool, list[float]] = {False: [], True: []}
    times: dict[bool, list[float]] = {False: [], True: []}
    falls = dict.fromkeys(FORMS, 0)
    for seed in range(options.seeds):
        split, task, signs = rows(name, seed, options.data_dir)
        for constrained in (False, True):
            fit = partial(studies.fit, RECIPES[recipe], split, seed, task=task, monotone=signs if constrained else None)
            fit()  # compiles
            began = time.process_time()
            model = fit().model
            times[constrained].append(time.process_time() - began)
            scores[constrained].append(studies.scores(model, split)["test"])
        falls = {form: falls[form] + count for form, count in violations(model, split[1], signs).items()}
    free, bound = (np.mean(scores[constrained]) for constrained in (False, True))
    cells = [name, f"{len(split[0])} x {split[0].shape[1]}", recipe, *map(str, falls.values()), f"{free:.2f}"]
    return [*cells, f"{bound:.2f}", f"{bound - free:+.2f}", benchmark.ratio(times[True], times[False])]


def table_of_made_sets() -> benchmark.Table:
    """Returns a table of made sets on which the constraint holds: error on new rows, variance over draws of noise."""
    truth = lambda x: np.tanh(2 * x[:, 0]) + np.maximum(x[:, 1], 0) + np.sin(2 * x[:, 2]) / 2
    table = benchmark.Table("recipe", "error, free", "error, monotone", "variance, free", "variance, monotone")
    x, new = np.random.default_rng(1000).normal(size=(300, 5)), np.random.default_rng(2000).normal(size=(2000, 5))
    for name, recipe in RECIPES.items():
        cells = {}
        for constrained in (False, True):
            predictions = []
            for seed in range(MADE):
                split = x, new, truth(x) + np.random.default_rng(seed).normal(size=300), truth(new)
                fit = studies.fit(recipe, split, seed, monotone={0: 1, 1: 1} if constrained else None)
                predictions.append(fit.predict(new))
            cells[constrained] = np.mean((predictions - truth(new)) ** 2), np.var(predictions, axis=0).mean()
        table.add(name, *(f"{cells[constrained][i]:.3f}" for i in (0, 1) for constrained in (False, True)))
    return table


def main(arguments: list[str] | None = None) -> None:
    """Makes the table."""
    datasets = benchmark.several(DATASETS)
    options = benchmark.parse("monotone", __doc__, arguments, data_dir=None, datasets=datasets, seeds=1)
    header = ["set", "rows x features", "recipe", *(f"violations, {form}" for form in FORMS), "score, free"]
    table = benchmark.Table(*header, "score, monotone", "change", "time")
    for name in options.datasets:
        for recipe in RECIPES:
            table.add(*set_row(name, recipe, options))
        jax.clear_caches()
    column = lambda recipe, i: [float(row[i]) for row in table.rows if row[2] == recipe]
    summary = "; ".join(
        f"{name}: {np.mean(column(name, 8)):+.2f} points on average, {np.median(column(name, 9)):.2f} times the time"
        for name in RECIPES
    )
    notes = (
        f"Violations: pairs of {PAIRS} for each of two features whose prediction falls, in a prediction of jtrees, of "
        "the C header and of the ONNX file. Score: R² or accuracy in per cent on new rows without and with the "
        f"constraint, mean of {options.seeds} split(s). Time: processor seconds of a compiled fit with the constraint "
        f"over those without, in turn. {summary}.\n\nMade sets in which the constraint is true, 300 rows of 5 "
        f"features, noise of variance 1, {MADE} draws of the noise: squared error on 2000 new rows, and variance of "
        f"the predictions over the draws.\n\n{table_of_made_sets()}"
    )
    benchmark.write(options, table, notes)


if __name__ == "__main__":
    main()
