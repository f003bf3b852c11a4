"""Speed of prediction from a NumPy array: rows per second of one oblique tree, beside scikit-learn and XGBoost.

python -m experiments.bench_prediction [--rows 1000000] [--write]
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from sklearn.ensemble import RandomForestRegressor
from sklearn.tree import DecisionTreeRegressor

from experiments import benchmark
import jtrees

FEATURES = 21


def oblique(depth: int, rng: np.random.Generator) -> jtrees.ObliqueTree:
    """Returns a random tree whose splits pass near the middle of the unit cube."""
    weights = rng.uniform(-1, 1, (2**depth - 1, FEATURES)).astype(np.float32)
    values = jtrees.leaves.Values(jnp.asarray(rng.random(2**depth, dtype=np.float32)))
    return jtrees.ObliqueTree(jnp.asarray(weights), jnp.asarray(-weights.sum(1) / 2), values)


def main(arguments: list[str] | None = None) -> None:
    """Times each model sequentially on the same array."""
    options = benchmark.parse("bench_prediction", __doc__, arguments, rows=1_000_000)
    rng = np.random.default_rng(0)
    x = rng.random((options.rows, FEATURES), dtype=np.float32)
    y = np.sin(5 * x[:20_000, 0]) + x[:20_000, 1] * x[:20_000, 2]

    models: dict[str, Callable[..., Any]] = {
        f"jtrees, one tree, depth {depth}": oblique(depth, rng).predict for depth in (4, 6, 8, 10, 12)
    }
    for depth in (8, 12):
        models[f"scikit-learn, CART, depth {depth}"] = DecisionTreeRegressor(max_depth=depth).fit(x[:20_000], y).predict
    forest = RandomForestRegressor(100, max_depth=8, n_jobs=-1, random_state=0).fit(x[:20_000], y)
    models["scikit-learn, forest of 100, depth 8"] = forest.predict
    if benchmark.installed("xgboost"):
        import xgboost  # type: ignore[import-not-found]

        models["XGBoost, 100 trees, depth 6"] = xgboost.XGBRegressor(n_estimators=100).fit(x[:20_000], y).predict
    table = benchmark.Table("model", "million rows/s", "one row, µs", "first call, s", "first call with another n, s")
    for name, predict in models.items():
        rates, single = [], []
        first = benchmark.seconds(lambda p=predict: p(x[: options.rows - 1]), 1)[0]
        predict(x[:1])
        for _ in range(9 if first < 1 else 3):
            rates.append(options.rows / benchmark.seconds(lambda p=predict: p(x), 1)[0])
            single += benchmark.seconds(lambda p=predict: p(x[:1]), 50)
        new = benchmark.seconds(lambda p=predict: p(x[: options.rows - 4321]), 1)[0]
        table.add(name, benchmark.spread(rates, 1e-6), benchmark.spread(single, 1e6), f"{first:.2f}", f"{new:.2f}")
    notes = (
        f"{options.rows} rows of {FEATURES} float32 features in a NumPy array; the output is a NumPy array. Another n "
        "compiles at most a program for the size of the last, padded chunk. Median and half the interquartile range. A "
        f"row must be read once ({4 * FEATURES} bytes). A tree of depth D that scores all its nodes does 2 x "
        f"{FEATURES} x (2^D - 1) floating-point operations per row; a tree that follows the path does 2 x {FEATURES} x "
        "D."
    )
    benchmark.write(options, table, notes)


if __name__ == "__main__":
    benchmark.use_all_cores()
    benchmark.compile_all_programs()
    main()
