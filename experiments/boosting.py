"""Boosted trees of GET by default beside XGBoost, on six tables that took no part in the choice of the defaults.

python -m experiments.boosting --data-dir DATA [--write] [--tables kin8nm ...] [--seconds 60]

XGBoost has early stopping on a validation set of a fifth of the rows, a learning rate of 0.05 and up to 2000 trees. Its
depth is the best of three on the validation set, and it is not refitted to all rows. The score is R^2 on test rows, in
points.
"""

import time
from typing import Any

import numpy as np
from sklearn.datasets import make_friedman2
from sklearn.model_selection import train_test_split

from experiments import benchmark, data, studies
from experiments.studies import Split, percent
import jtrees

TRAIN, TEST = 7500, 10_000  # rows of the made table
MADE = "Friedman 2"
TABLES = (MADE, "kin8nm", "cpu-act", "combined-cycle-power-plant", "ailerons", "elevators")
RECIPES: dict[str, Any] = {
    "Boosted()": jtrees.Boosted(),
    "Boosted(GET(depth=4))": jtrees.Boosted(jtrees.GET(depth=4)),
    'Boosted(GET(depth=3, leaves="linear"))': jtrees.Boosted(jtrees.GET(depth=3, leaves="linear")),
}


def split_of(name: str, data_dir: str | None) -> Split:
    """Returns training and test features, and training and test targets, of a table."""
    if name != MADE:
        return data.split_of(name, 0, data_dir)
    x, y = make_friedman2(TRAIN + TEST, noise=125.0, random_state=0)
    return x[:TRAIN], x[TRAIN:], y[:TRAIN], y[TRAIN:]


def fitted(program: str, limit: float, split: Split) -> tuple[float, str]:
    """Returns the score of a recipe or of XGBoost, and its cell: score, seconds, trees; a star for the time limit."""
    start, star = time.perf_counter(), ""
    if program in RECIPES:
        fit = studies.fit(RECIPES[program], split, 0, max_seconds=limit)
        score, count = percent(fit.predict(split[1]), split[3]), fit.report.search.rounds
        star = "" if fit.report.ended == "finished" else "*"
    else:
        import xgboost  # pyright: ignore[reportMissingImports]

        trials, (x, _, y, _) = [], split
        a, b, y_a, y_b = train_test_split(x, y, test_size=0.2, random_state=0)
        for depth in (3, 5, 7):
            options: Any = {"n_estimators": 2000, "learning_rate": 0.05, "max_depth": depth, "subsample": 0.8}
            model = xgboost.XGBRegressor(early_stopping_rounds=50, n_jobs=2, random_state=0, **options)
            model.fit(a, y_a, eval_set=[(b, y_b)], verbose=False)
            trials.append((model.best_score, percent(model.predict(split[1]), split[3]), model.best_iteration + 1))
        _, score, count = min(trials)
    return score, f"{score:.2f} ({time.perf_counter() - start:.0f} s{star}, {count})"


def main(arguments: list[str] | None = None) -> None:
    """Measures, and writes the table."""
    names = benchmark.several(TABLES)
    options = benchmark.parse("boosting", __doc__, arguments, data_dir=None, tables=names, seconds=60.0)
    programs = [*RECIPES, *(["XGBoost"] if benchmark.installed("xgboost") else [])]
    splits = [split_of(name, options.data_dir) for name in options.tables]
    cells = {name: [fitted(name, options.seconds, split) for split in splits] for name in programs}
    means = {name: np.mean([score for score, _ in row]) for name, row in cells.items()}
    results = benchmark.Table("", *options.tables, f"mean beside {programs[-1]}")
    for name, row in cells.items():
        results.add(name, *(text for _, text in row), f"{means[name] - means[programs[-1]]:+.2f}")
    notes = (
        "R^2 in points on test rows (seconds, compilation included; trees). A star marks a fit that the limit of "
        f"{options.seconds:g} s ended. One key and one split.\n"
    )
    benchmark.write(options, results, notes, to="boosting_held_out")


if __name__ == "__main__":
    benchmark.compile_all_programs()
    main()
