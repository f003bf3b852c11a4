"""Boosted trees of GET by default beside XGBoost, on six tables that took no part in the choice of the defaults.

python -m experiments.boosting --data-dir DATA [--write] [--tables kin8nm ...] [--seconds 60]

XGBoost has early stopping on a validation set of a fifth of the rows, a learning rate of 0.05 and up to 2000 trees. Its
depth is the best of three on the validation set, and it is not refitted to all rows. The score is R^2 on test rows, in
points.
"""

from collections.abc import Iterator
import time
from typing import Any

import jax
import numpy as np
from sklearn.datasets import make_friedman2
from sklearn.metrics import r2_score
from sklearn.model_selection import train_test_split

from experiments import benchmark, data
import jtrees

TRAIN, TEST = 7500, 10_000  # rows of the made table
MADE = "Friedman 2"
TABLES = (MADE, "kin8nm", "cpu-act", "combined-cycle-power-plant", "ailerons", "elevators")


def tables(names: list[str], data_dir: Any) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Yields training and test features, and training and test targets, of each table."""
    for name in names:
        if name == MADE:
            x, y = make_friedman2(TRAIN + TEST, noise=125.0, random_state=0)
            yield name, [x[:TRAIN], x[TRAIN:], y[:TRAIN], y[TRAIN:]]
        else:
            table = data.load(name, data_dir=data_dir)
            yield name, data.split(table.x, table.y, seed=0)


def recipes() -> dict[str, Any]:
    """Returns the recipes that are compared with XGBoost."""
    return {
        "Boosted()": jtrees.Boosted(),
        "Boosted(GET(depth=4))": jtrees.Boosted(jtrees.GET(depth=4)),
        'Boosted(GET(depth=3, leaves="linear"))': jtrees.Boosted(jtrees.GET(depth=3, leaves="linear")),
    }


def fitted(recipe: Any, limit: float, x: Any, x_test: Any, y: Any, y_test: Any) -> tuple[float, str]:
    """Returns the score of a recipe, and its cell: score, seconds, trees; a star if the time limit ended the fit."""
    begun = time.perf_counter()
    fit = jtrees.fit(recipe, x, y, key=jax.random.key(0), max_seconds=limit)
    seconds, score = time.perf_counter() - begun, 100 * float(r2_score(y_test, fit.predict(x_test)))
    star = "" if fit.report.ended == "finished" else "*"
    return score, f"{score:.2f} ({seconds:.0f} s{star}, {fit.report.search.rounds})"


def xgboosted(x: Any, x_test: Any, y: Any, y_test: Any) -> tuple[float, str]:
    """Returns the score and the cell of XGBoost."""
    import xgboost  # pyright: ignore[reportMissingImports]

    begun, trials = time.perf_counter(), []
    a, b, y_a, y_b = train_test_split(x, y, test_size=0.2, random_state=0)
    for depth in (3, 5, 7):
        options: Any = {"n_estimators": 2000, "learning_rate": 0.05, "max_depth": depth, "subsample": 0.8}
        model = xgboost.XGBRegressor(early_stopping_rounds=50, n_jobs=2, random_state=0, **options)
        model.fit(a, y_a, eval_set=[(b, y_b)], verbose=False)
        score = 100 * float(r2_score(y_test, model.predict(x_test)))
        trials.append((model.best_score, score, model.best_iteration + 1))
    _, score, count = min(trials)
    return score, f"{score:.2f} ({time.perf_counter() - begun:.0f} s, {count})"


def main(arguments: list[str] | None = None) -> None:
    """Measures, and writes the table."""
    names = benchmark.several(TABLES)
    options = benchmark.parse("boosting", __doc__, arguments, data_dir=None, tables=names, seconds=60.0)
    programs: dict[str, Any] = {
        name: lambda *split, recipe=recipe: fitted(recipe, options.seconds, *split)
        for name, recipe in recipes().items()
    }
    if benchmark.installed("xgboost"):
        programs["XGBoost"] = xgboosted
    cells: dict[str, list[tuple[float, str]]] = {name: [] for name in programs}
    for table, split in tables(options.tables, options.data_dir):
        for name, program in programs.items():
            cells[name].append(program(*split))
            print(table, name, cells[name][-1][1], flush=True)
    last = next(reversed(cells))
    mean = lambda name: np.mean([score for score, _ in cells[name]])
    results = benchmark.Table("", *options.tables, f"mean beside {last}")
    for name, row in cells.items():
        results.add(name, *(text for _, text in row), f"{mean(name) - mean(last):+.2f}")
    notes = (
        "R^2 in points on test rows (seconds, compilation included; trees). A star marks a fit that the limit of "
        f"{options.seconds:g} s ended. One key and one split.\n"
    )
    benchmark.write(options, results, notes, to="boosting_held_out")


if __name__ == "__main__":
    main()
