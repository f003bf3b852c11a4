"""Training options of boosted trees: variants on seven tables, and the defaults beside XGBoost on six other tables.

python -m experiments.boosting --part choice|held-out --data-dir DATA [--write] [--tables made ...] [--seconds 60]

``choice`` changes one option of a tree at a time, on three real tables and four made tables. The defaults were chosen
among such variants, on these tables. ``held-out`` has six tables that took no part in the choice. XGBoost has early
stopping on a validation set of a fifth of the rows, a learning rate of 0.05 and up to 2000 trees. Its depth is the best
of three on the validation set, and it is not refitted to all rows. The score is R^2 on test rows, in points.
"""

from collections.abc import Callable, Iterator
import time
from typing import Any

import jax
import numpy as np
from sklearn.datasets import make_friedman1, make_friedman2
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.metrics import r2_score
from sklearn.model_selection import train_test_split

from experiments import benchmark, data
from experiments.bench_rows import made
import jtrees

TRAIN, TEST = 7500, 10_000  # rows of a made table
REAL = {
    "choice": ("abalone", "space-ga", "airfoil-self-noise"),
    "held-out": ("kin8nm", "cpu-act", "combined-cycle-power-plant", "ailerons", "elevators"),
}
Table = tuple[np.ndarray, np.ndarray]


def network(n: int) -> Table:
    """Returns a made table: a network with one layer of 16 random units on 12 features, plus noise."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(n, 12))
    hidden = np.tanh(x @ rng.normal(size=(12, 16)) / 1.5)
    return x, hidden @ rng.normal(size=16) + 0.3 * rng.normal(size=n)


def trees(n: int) -> Table:
    """Returns a made table: a sum of 15 trees of depth 7 with random leaves on 8 features, plus noise."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(n, 8)).astype(np.float32)
    y = ExtraTreesRegressor(15, max_depth=7, random_state=0).fit(x[:2000], rng.normal(size=2000)).predict(x)
    return x, y / y.std() + 0.3 * rng.normal(size=n)


MADE: dict[str, dict[str, Callable[[int], Any]]] = {
    "choice": {
        "made": lambda n: made(n, 10, seed=0),
        "Friedman 1": lambda n: make_friedman1(n, noise=1.0, random_state=0),
        "network": network,
        "trees": trees,
    },
    "held-out": {"Friedman 2": lambda n: make_friedman2(n, noise=125.0, random_state=0)},
}


def tables(part: str, data_dir: Any) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Yields the tables of a part: training and test features, training and test targets."""
    for name, make in MADE[part].items():
        x, y = make(TRAIN + TEST)
        yield name, [x[:TRAIN], x[TRAIN:], y[:TRAIN], y[TRAIN:]]
    for name in REAL[part]:
        table = data.load(name, data_dir=data_dir)
        split: Any = train_test_split(table.x, table.y, train_size=0.75, random_state=0)
        yield name, split


def variants() -> dict[str, Any]:
    """Returns the variants by name; each changes one option."""

    def of(**tree: Any) -> Any:
        options: Any = {"depth": 5} | tree
        return jtrees.Boosted(jtrees.GET(**options))

    steep: Any = {"alpha_ranges": ((50.0, 100.0),)}
    return {
        "default": jtrees.Boosted(),
        "no update": of(epochs=1, learning_rate=1e-6),
        "2000 rows": of(rows=2000),
        "8000 rows": of(rows=8000),
        "depth 4": of(depth=4),
        "depth 6": of(depth=6),
        "10 updates": of(epochs=10),
        "40 updates": of(epochs=40),
        "learning rate of a tree 0.01": of(learning_rate=0.01),
        "learning rate of a tree 0.1": of(learning_rate=0.1),
        "sharpness 50 to 100": of(**steep),
        "two stages": of(alpha_ranges=((5.0, 25.0), (50.0, 150.0))),
        "learning rate 0.2": jtrees.Boosted(learning_rate=0.2),
        "learning rate 0.05": jtrees.Boosted(learning_rate=0.05),
        "70 % of the columns": jtrees.Boosted(columns=0.7),
        "l2 = 0.1": jtrees.Boosted(l2=0.1),
        "linear leaves, depth 3": of(depth=3, leaves="linear"),
    }


def held_out() -> dict[str, Any]:
    """Returns the recipes that are compared with XGBoost."""
    return {
        "Boosted()": jtrees.Boosted(),
        "Boosted(GET(depth=4))": jtrees.Boosted(jtrees.GET(depth=4)),
        'Boosted(GET(depth=3, leaves="linear"))': jtrees.Boosted(jtrees.GET(depth=3, leaves="linear")),
    }


def of_ours(recipe: Any, limit: float, x: Any, x_test: Any, y: Any, y_test: Any) -> tuple[float, str]:
    """Returns the score of a recipe, and its cell: score, seconds, trees; a star if the time limit ended the fit."""
    begun = time.perf_counter()
    fit = jtrees.fit(recipe, x, y, key=jax.random.key(0), max_seconds=limit)
    seconds, score = time.perf_counter() - begun, 100 * float(r2_score(y_test, fit.predict(x_test)))
    star = "" if fit.report.ended == "finished" else "*"
    return score, f"{score:.2f} ({seconds:.0f} s{star}, {fit.report.search.rounds})"


def of_xgboost(x: Any, x_test: Any, y: Any, y_test: Any) -> tuple[float, str]:
    """Returns the score and the cell of XGBoost."""
    import xgboost  # pyright: ignore[reportMissingImports]

    begun, found = time.perf_counter(), []
    a, b, of_a, of_b = train_test_split(x, y, test_size=0.2, random_state=0)
    for depth in (3, 5, 7):
        options: Any = {"n_estimators": 2000, "learning_rate": 0.05, "max_depth": depth, "subsample": 0.8}
        model = xgboost.XGBRegressor(early_stopping_rounds=50, n_jobs=2, random_state=0, **options)
        model.fit(a, of_a, eval_set=[(b, of_b)], verbose=False)
        score = 100 * float(r2_score(y_test, model.predict(x_test)))
        found.append((model.best_score, score, model.best_iteration + 1))
    _, score, count = min(found)
    return score, f"{score:.2f} ({time.perf_counter() - begun:.0f} s, {count})"


def main(arguments: list[str] | None = None) -> None:
    """Measures, and writes the table."""
    parser = benchmark.parser(__doc__)
    parser.add_argument("--part", choices=tuple(MADE), required=True)
    parser.add_argument("--data-dir")
    parser.add_argument("--tables", nargs="+", help="some of the tables")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of each of our fits")
    options = parser.parse_args(arguments)
    recipes = variants() if options.part == "choice" else held_out()
    scores: dict[str, dict[str, float]] = {}
    shown: dict[str, dict[str, str]] = {}
    for table, split in tables(options.part, options.data_dir):
        if options.tables and table not in options.tables:
            continue
        programs: dict[str, Any] = {
            name: (lambda *a, r=r: of_ours(r, options.seconds, *a)) for name, r in recipes.items()
        }
        if benchmark.installed("xgboost"):
            programs["XGBoost"] = of_xgboost
        for name, program in programs.items():
            score, text = program(*split)
            scores.setdefault(name, {})[table], shown.setdefault(name, {})[table] = score, text
            print(table, name, text, flush=True)
    first = next(iter(scores)) if options.part == "choice" else next(reversed(scores))
    beside = {name: np.mean([of[t] - scores[first][t] for t in of]) for name, of in scores.items()}
    header = ["", *next(iter(shown.values())), f"mean beside {first}"]
    rows = [[name, *of.values(), f"{beside[name]:+.2f}"] for name, of in shown.items()]
    notes = (
        "R^2 in points on test rows (seconds, compilation included; trees). A star marks a fit that the limit of "
        f"{options.seconds:g} s ended. One key and one split.\n"
    )
    command = f"--part {options.part} --data-dir DATA --seconds {options.seconds:g}"
    to = f"boosting_{options.part.replace('-', '_')}"
    benchmark.write("boosting", command, header, rows, notes, committed=options.write, to=to)


if __name__ == "__main__":
    main()
