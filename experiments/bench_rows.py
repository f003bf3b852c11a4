"""Seconds and scores by number of rows, beside boosting packages in the same run.

python -m experiments.bench_rows [--rows 1000 10000 100000 1000000] [--features 10] [--seconds 60] [--write]

The made table has a linear part, an interaction, a kink and noise. Each program is fitted once to a thousand rows as a
warm-up, then once to each number of rows. ``--seconds`` limits each of our fits. The score is R^2 on 100,000 test rows.
The rivals (scikit-learn, XGBoost, LightGBM) have their defaults; the report omits a rival that is not installed.
"""

from collections.abc import Callable
import importlib
import time
from typing import Any

import jax
import numpy as np
from sklearn.metrics import r2_score

from experiments import benchmark
import jtrees

TEST = 100_000
_BLOCK = 2**16  # rows per draw


def made(n: int, p: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns p >= 5 features and their targets. Noise is 1.6 % of the variance with 10 features."""
    rng = np.random.default_rng(seed)
    x = np.empty((n, p), np.float32)
    for first in range(0, n, _BLOCK):  # small blocks: the fit must determine the memory peak
        x[first : first + _BLOCK] = rng.normal(size=x[first : first + _BLOCK].shape)
    linear = x @ np.random.default_rng(99).normal(size=p).astype(np.float32)
    bent = np.sin(2 * x[:, 0]) * x[:, 1] + 1.6 * np.abs(x[:, 2]) + 0.7 * x[:, 3] * x[:, 4]
    return x, (linear + bent + 0.5 * rng.normal(size=n)).astype(np.float32)


def ours(recipe: Any, seconds: float) -> Callable[..., Any]:
    """Returns a function that fits a recipe to a table and returns the model."""
    return lambda x, y: jtrees.fit(recipe, x, y, key=jax.random.key(0), max_seconds=seconds)


def programs(seconds: float) -> dict[str, Callable[..., Any]]:
    """Returns all programs by name."""
    fits: dict[str, Callable[..., Any]] = {
        "GET()": ours(jtrees.GET(), seconds),
        "DGT()": ours(jtrees.DGT(), seconds),
        "Boosted()": ours(jtrees.Boosted(), seconds),
    }

    def fitted(name: str, regressor: str, **options: Any) -> Callable[..., Any]:
        module = importlib.import_module(name)
        return lambda x, y: getattr(module, regressor)(**options).fit(x, y)

    fits["linear regression"] = fitted("sklearn.linear_model", "LinearRegression")
    fits["HistGradientBoosting"] = fitted("sklearn.ensemble", "HistGradientBoostingRegressor")
    if benchmark.installed("xgboost"):
        fits["XGBoost"] = fitted("xgboost", "XGBRegressor")
    if benchmark.installed("lightgbm"):
        fits["LightGBM"] = fitted("lightgbm", "LGBMRegressor", verbosity=-1)
    return fits


def draw(records: list[dict[str, Any]], file: Any) -> None:
    """Plots seconds and scores against rows, a line for each program."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for name in dict.fromkeys(record["name"] for record in records):
        curve = [record for record in records if record["name"] == name]
        for axis, key in zip(axes, ("seconds", "score"), strict=True):
            axis.plot([record["rows"] for record in curve], [record[key] for record in curve], marker="o", label=name)
    axes[0].set(xscale="log", yscale="log", xlabel="rows", ylabel="seconds")
    axes[1].set(xscale="log", xlabel="rows", ylabel="R$^2$", ylim=(0.5, 1.0))
    axes[1].legend(fontsize="small")
    figure.savefig(file, dpi=110)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Measures, and writes the table and the plot."""
    options = benchmark.parse(
        "bench_rows", __doc__, arguments, rows=(1000, 10_000, 100_000, 1_000_000), features=10, seconds=60.0
    )
    test_x, test_y = made(TEST, options.features, seed=1)
    records: list[dict[str, Any]] = []
    for name, fit in programs(options.seconds).items():
        fit(*made(1000, options.features, seed=2))
        for rows in options.rows:
            x, y = made(rows, options.features, seed=0)
            begun = time.perf_counter()
            model = fit(x, y)
            seconds = time.perf_counter() - begun
            score = float(r2_score(test_y, np.asarray(model.predict(test_x))))
            ended = getattr(getattr(model, "report", None), "ended", "finished")
            records.append({"name": name, "rows": rows, "seconds": seconds, "score": score, "ended": ended})
            print(records[-1], flush=True)
    table = benchmark.Table("rows", *dict.fromkeys(record["name"] for record in records))
    for rows in dict.fromkeys(options.rows):
        cells = [
            f"{record['score']:.3f} in {record['seconds']:.1f} s" + ("*" if record["ended"] != "finished" else "")
            for record in records
            if record["rows"] == rows
        ]
        table.add(f"{rows:,}", *cells)
    notes = (
        f"R^2 on {TEST:,} test rows, and seconds of a fit, with {options.features} features; the seconds include "
        f"compilation for the shape. A star marks a fit that the limit of {options.seconds:g} s ended.\n"
    )
    file = benchmark.write(options, table, notes)
    draw(records, file.with_suffix(".png"))


if __name__ == "__main__":
    main()
