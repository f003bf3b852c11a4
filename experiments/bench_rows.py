"""Seconds and scores by number of rows, beside boosting packages in the same run.

python -m experiments.bench_rows [--rows 1000 10000 100000 1000000] [--features 10] [--seconds 60] [--write]

The made table has a linear part, an interaction, a kink and noise. Each program is fitted once to a thousand rows as a
warm-up, then once to each number of rows. ``--seconds`` limits each of our fits. The score is R^2 on 100,000 test rows.
The rivals (scikit-learn, XGBoost, LightGBM) have their defaults; the report omits a rival that is not installed.
"""

import importlib
import time
from typing import Any

import jax
from matplotlib.figure import Figure
import numpy as np
from sklearn.metrics import r2_score

from experiments import benchmark
import jtrees

TEST = 100_000
BLOCK = 2**16  # rows per draw
OURS: dict[str, Any] = {"GET()": jtrees.GET(), "DGT()": jtrees.DGT(), "Boosted()": jtrees.Boosted()}
RIVALS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "linear regression": ("sklearn.linear_model", "LinearRegression", {}),
    "HistGradientBoosting": ("sklearn.ensemble", "HistGradientBoostingRegressor", {}),
    "XGBoost": ("xgboost", "XGBRegressor", {}),
    "LightGBM": ("lightgbm", "LGBMRegressor", {"verbosity": -1}),
}


def made_table(n: int, p: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns p >= 5 features and their targets. Noise is 1.6 % of the variance with 10 features."""
    rng = np.random.default_rng(seed)
    x = np.empty((n, p), np.float32)
    for first in range(0, n, BLOCK):  # small blocks: the fit must determine the memory peak
        x[first : first + BLOCK] = rng.normal(size=x[first : first + BLOCK].shape)
    linear = x @ np.random.default_rng(99).normal(size=p).astype(np.float32)
    bent = np.sin(2 * x[:, 0]) * x[:, 1] + 1.6 * np.abs(x[:, 2]) + 0.7 * x[:, 3] * x[:, 4]
    return x, (linear + bent + 0.5 * rng.normal(size=n)).astype(np.float32)


def fitted(name: str, x: np.ndarray, y: np.ndarray, seconds: float) -> Any:
    """Fits a program."""
    if name in OURS:
        return jtrees.fit(OURS[name], x, y, key=jax.random.key(0), max_seconds=seconds)
    module, regressor, options = RIVALS[name]
    return getattr(importlib.import_module(module), regressor)(**options).fit(x, y)


def draw(rows: list[int], curves: dict[str, list[tuple[float, float, bool]]], file: Any) -> None:
    """Plots seconds and scores against rows, a line for each program."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    for i, axis in enumerate(axes):
        for name, curve in curves.items():
            axis.plot(rows, [point[i] for point in curve], marker="o", label=name)
    axes[0].set(xscale="log", yscale="log", xlabel="rows", ylabel="seconds")
    axes[1].set(xscale="log", xlabel="rows", ylabel="R$^2$", ylim=(0.5, 1.0))
    axes[1].legend(fontsize="small")
    figure.savefig(file, dpi=110)


def main(arguments: list[str] | None = None) -> None:
    """Measures, and writes the table and the plot."""
    sizes = {"rows": (1000, 10_000, 100_000, 1_000_000), "features": 10, "seconds": 60.0}
    options = benchmark.parse("bench_rows", __doc__, arguments, **sizes)
    test_x, test_y = made_table(TEST, options.features, seed=1)
    names = [*OURS, *(name for name, rival in RIVALS.items() if benchmark.installed(rival[0].split(".")[0]))]
    curves: dict[str, list[tuple[float, float, bool]]] = {name: [] for name in names}  # seconds, score, ended early
    for name, curve in curves.items():
        fitted(name, *made_table(1000, options.features, seed=2), options.seconds)
        for rows in options.rows:
            x, y = made_table(rows, options.features, seed=0)
            start = time.perf_counter()
            model = fitted(name, x, y, options.seconds)
            seconds, score = time.perf_counter() - start, float(r2_score(test_y, np.asarray(model.predict(test_x))))
            curve.append((seconds, score, name in OURS and model.report.ended != "finished"))
            print(name, rows, *curve[-1], flush=True)
    table = benchmark.Table("rows", *curves)
    for i, rows in enumerate(options.rows):
        points = (curve[i] for curve in curves.values())
        table.add(f"{rows:,}", *(f"{score:.3f} in {seconds:.1f} s{'*' * early}" for seconds, score, early in points))
    notes = (
        f"R^2 on {TEST:,} test rows, and seconds of a fit, with {options.features} features; the seconds include "
        "compilation for the shape, except in the first row, whose shape the warm-up has. A star marks a fit that the "
        f"limit of {options.seconds:g} s ended.\n"
    )
    draw(options.rows, curves, benchmark.write(options, table, notes).with_suffix(".png"))


if __name__ == "__main__":
    main()
