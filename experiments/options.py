"""Effects of options of recipes, a table for each: the key, terms of splits, epochs, preconditioners, learning rates.

python -m experiments.options --data-dir DATA [--tables keys sparse ...] [--datasets abalone ...] [--write]

Splits and scores are the same as in experiments.systems: test R^2 or accuracy in per cent, up to 3000 training rows.

- keys: GET with its default options and eight keys, on the same split.
- sparse: trees of depth 3 with all terms in a split and with five.
- epochs: epochs that trees with linear leaves need under each sharpness, by depth; they determine GET's default.
- ridge: recipes with and without a start from splits of a ridge regression.
- preconditioning: fixed strengths of the preconditioner beside "auto", with more and less correlated features.
- rates: Boosted with its default learning rate and larger ones, on all rows.
"""

from collections.abc import Callable
import statistics
import time
from typing import Any

import jax
import numpy as np

from experiments import benchmark, data, studies
from experiments.estimators import TASKS
from experiments.relaxations import COLLINEAR, arrays_of
import jtrees
from jtrees.data import Scaling
from jtrees.search.precondition import spectrum
from jtrees.tables import checked_table

GETS = {"GET": jtrees.GET(), "GET-Linear": jtrees.GET(leaves="linear")}
KEYS = 8
TERMS = 5
BASES = {
    "constant": jtrees.GET(depth=3, starts=4, epochs=1000),
    "linear": jtrees.GET(depth=3, leaves="linear", starts=4, epochs=1000),
}
DEPTHS, EPOCHS = (4, 6, 8), (1000, 500, 250)
STRENGTHS: tuple[float | str, ...] = (0.0, 0.9, 0.99, "auto")
RECIPES: dict[str, Any] = {
    "GET, 300 epochs": jtrees.GET(epochs=300, ridge=False, halving=False),
    "DGT": jtrees.DGT(),
    "LatentTree": jtrees.LatentTree(weight_decay=0.0),
    "TEL": jtrees.TEL(),
    "CO2": jtrees.CO2(ridge=False),
}
ROWS = 3000  # upper limit of the training rows, and of the test rows
RIDGE: dict[str, Any] = {"GET": jtrees.GET(), "CO2": jtrees.CO2(), "NonGreedy": jtrees.NonGreedy()}
BOOSTED, RATES = jtrees.Boosted(), (0.1, 0.2, 0.3)
REAL = list(TASKS)
NUMBERS = [name for name in REAL if TASKS[name] == "regression"]
Splits = Callable[..., studies.Split]  # of a seed, and of an upper limit of the rows


def score(recipe: Any, split: studies.Split, seed: int) -> float:
    """Returns the test score of a fit."""
    task: Any = "regression" if split[2].dtype.kind == "f" else "classification"
    return studies.scores(studies.fit(recipe, split, seed, task=task).model, split)["test"]


def key_cells(name: str, split: Splits, seeds: int, depths: list[int]) -> list[list[Any]]:
    """Returns median, worst and best score, and seconds, of several keys."""
    cells = [name]
    for recipe in GETS.values():
        scores, seconds = [], []
        for key in [0, *range(KEYS)]:  # the first fit compiles
            start = time.perf_counter()
            scores.append(score(recipe, split(0), key))
            seconds.append(time.perf_counter() - start)
        median = statistics.median(scores[1:])
        cells += [f"{median:.1f}", f"{min(scores) - median:.1f}", f"{max(scores) - median:+.1f}"]
        cells.append(f"{statistics.median(seconds[1:]):.1f} ({seconds[0]:.0f})")
    return [cells]


def sparse_cells(name: str, split: Splits, seeds: int, depths: list[int]) -> list[list[Any]]:
    """Returns a row for each kind of leaves; linear leaves are for regression."""
    rows = []
    for kind, base in BASES.items():
        if kind == "constant" or TASKS[name] == "regression":
            recipes = base, jtrees.Sparse(base, terms=TERMS)
            dense, sparse = (statistics.mean(score(r, split(seed), seed) for seed in range(seeds)) for r in recipes)
            cells = f"{dense:.1f}", f"{sparse:.1f}", f"{sparse - dense:+.1f}"
            rows.append([name, split(0)[0].shape[1], kind, *cells])
    return rows


def epoch_cells(name: str, split: Splits, seeds: int, depths: list[int]) -> list[list[Any]]:
    """Returns the mean scores by depth and epochs."""
    recipes = [jtrees.GET(leaves="linear", depth=depth, epochs=epochs) for depth in depths for epochs in EPOCHS]
    means = (statistics.mean(score(recipe, split(seed), seed) for seed in range(seeds)) for recipe in recipes)
    return [[name, *(f"{mean:.1f}" for mean in means)]]


def strength_cells(name: str, split: Splits, seeds: int, depths: list[int]) -> list[list[Any]]:
    """Returns the smallest eigenvalue of the correlations of the training features, and the scores by strength."""
    table = checked_table(split(0)[0], split(0)[2], None, "regression")
    cells = [name, f"{float(spectrum(Scaling.fit(table).batch(table)).values[0]):.1g}"]
    for recipe in RECIPES.values():
        scores = (score(recipe.replace(precondition=strength), split(0), 0) for strength in STRENGTHS)
        cells.append(" / ".join(f"{value:.1f}" for value in scores))
    return [cells]


def ridge_cells(name: str, split: Splits, seeds: int, depths: list[int]) -> list[list[Any]]:
    """Returns the mean scores of each recipe without and with the ridge regression, and their difference."""
    cells = [name]
    for recipe in RIDGE.values():
        recipes = recipe.replace(ridge=False), recipe
        plain, ridge = (statistics.mean(score(r, split(seed), seed) for seed in range(seeds)) for r in recipes)
        cells += [f"{plain:.1f}", f"{ridge:.1f}", f"{ridge - plain:+.1f}"]
    return [cells]


def rate_cells(name: str, split: Splits, seeds: int, depths: list[int]) -> list[list[Any]]:
    """Returns R^2 or the log loss of Boosted, its rounds and processor seconds, by learning rate."""
    x, x_test, y, y_test = split(0, limit=None)
    classes, codes = np.unique(y, return_inverse=True) if TASKS[name] == "classification" else (None, y)
    cells = [name, len(x)]
    for rate in RATES:
        start = time.process_time()
        fit = studies.fit(BOOSTED.replace(learning_rate=rate), (x, x_test, codes, y_test), 0, task=TASKS[name])
        seconds, predicted = time.process_time() - start, np.asarray(fit.predict(x_test), np.float64)
        if classes is None:
            text = f"{studies.percent(predicted, y_test):.1f}"
        else:
            text = f"{studies.class_scores(predicted, y_test, classes)['log_loss']:.3f}"
        cells.append(f"{text} ({fit.report.search.rounds}; {seconds:.0f})")
    return [cells]


# The head of each table, its function of a set, its default sets, and its default number of splits.
TABLES: dict[str, tuple[list[str], Callable[..., list[list[Any]]], list[str], int]] = {
    "keys": (
        ["set", *(f"{recipe}, {column}" for recipe in GETS for column in ("median", "worst", "best", "seconds"))],
        *(key_cells, NUMBERS, 1),
    ),
    "sparse": (["set", "features", "leaves", "all terms", f"{TERMS} terms", "change"], sparse_cells, REAL, 1),
    "epochs": (["set"], epoch_cells, NUMBERS, 3),
    "ridge": (
        ["set", *(f"{name}, {column}" for name in RIDGE for column in ("`ridge=False`", "ridge", "gain"))],
        *(ridge_cells, [*REAL, COLLINEAR], 1),
    ),
    "preconditioning": (
        ["set", "smallest eigenvalue", *RECIPES],
        *(strength_cells, [COLLINEAR, "abalone", "ailerons", "cpu-act", "kin8nm"], 1),
    ),
    "rates": (["set", "rows", *map(str, RATES)], rate_cells, ["kin8nm", "elevators", "letter", "connect-4"], 1),
}
NOTES = {
    "keys": f"Test R² in per cent of {KEYS} keys: the median, and the worst and the best score minus the median. "
    "Up to 3000 training rows. `seconds` is the median of a fit and, in brackets, the first fit with compilation. "
    "On a busy machine the seconds are upper bounds.",
    "sparse": "Test R² or accuracy in per cent, mean of {seeds} split(s), up to 3000 training rows; depth 3, 4 "
    f"starts of 1000 epochs. Median change from all terms to {TERMS} terms per split: ",
    "epochs": "Test R² in per cent, mean over the splits (--seeds {seeds}), up to 3000 training rows.",
    "ridge": "Test R² or accuracy in per cent, mean of {seeds} split(s), up to 3000 training rows. The default of all "
    "three recipes is the ridge regression.",
    "preconditioning": f"Test R² in per cent with `precondition` {' / '.join(map(str, STRENGTHS))}; up to 3000 "
    "training rows. In all columns GET and CO2 have `ridge=False`, and TEL stops early. The second column is the "
    "smallest eigenvalue of the features' correlations: 1 if uncorrelated, 0 if one feature is a linear function of "
    "the others.",
    "rates": "Test R² in per cent, or log loss, of `Boosted` by `learning_rate`, on all rows of one split. Brackets "
    "have the rounds of the model, at most 1000, and processor seconds. The first column has compilation in them.",
}


def main(arguments: list[str] | None = None) -> None:
    """Makes the tables."""
    sets: dict[str, Any] = {"data_dir": None, "datasets": {"nargs": "+", "choices": [*TASKS, COLLINEAR]}}
    sets |= {"tables": benchmark.several(TABLES), "seeds": {"type": int}, "depths": DEPTHS}
    options = benchmark.parse("options", __doc__, arguments, **sets)
    for title in options.tables:
        header, cells, names, default = TABLES[title]
        header = header + [f"depth {d}, {e}" for d in options.depths for e in EPOCHS if title == "epochs"]
        table, seeds = benchmark.Table(*header), options.seeds or default
        for name in options.datasets or names:
            x, y = arrays_of(name, options.data_dir)
            split = lambda seed, limit=ROWS, x=x, y=y: data.split(x, y, seed, limit=limit)
            for row in cells(name, split, seeds, options.depths):
                table.add(*row)
            jax.clear_caches()
        notes = NOTES[title].format(seeds=seeds)
        if title in ("epochs", "ridge"):
            columns = list(zip(*table.rows, strict=True))[1:]
            means = (statistics.mean(map(float, column)) for column in columns)
            signs = ("+" if name.endswith("gain") else "" for name in header[1:])
            table.add("**mean**", *(f"{mean:{sign}.1f}" for mean, sign in zip(means, signs, strict=True)))
        if title == "sparse":
            changes = {kind: [float(row[-1]) for row in table.rows if row[2] == kind] for kind in BASES}
            texts = (f"{kind} leaves {statistics.median(c):+.1f} ({len(c)} sets)" for kind, c in changes.items() if c)
            notes += f"{'; '.join(texts)}."
        benchmark.write(options, table, notes, to=title)


if __name__ == "__main__":
    benchmark.compile_all_programs()
    main()
