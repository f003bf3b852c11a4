"""Waiting time and memory of users: default fits in a fresh process and again, cross-validation, tuning, bagging.

python -m experiments.bench_time [--data-dir FOLDER] [--repeats 3] [--jobs regressor classifier ...] [--write]

Each job runs in a process of its own, several times. The first time counts from the start of the process; it includes
the import of the library and compilation. No program is cached on disk. The memory is the peak of the process up to the
end of the first fit, data included.
"""

import argparse
from collections.abc import Callable
import json
import sys
import time
from typing import Any

from experiments import benchmark

FORESTS = 100  # trees of the random forests
Score = tuple[float, float]  # our score, the rival's score


def _estimator(classifies: bool) -> Callable[[], Score]:
    from sklearn.datasets import load_breast_cancer, load_diabetes
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
    from sklearn.model_selection import train_test_split

    from jtrees.estimators import TreeClassifier, TreeRegressor

    loaded: Any = (load_breast_cancer if classifies else load_diabetes)(return_X_y=True)
    parts: Any = train_test_split(*loaded, train_size=0.75, random_state=0)
    x, x_test, y, y_test = parts

    def fit() -> Score:
        model = (TreeClassifier if classifies else TreeRegressor)(random_state=0).fit(x, y)
        score = model.score(x_test, y_test)
        ended()
        peer = (RandomForestClassifier if classifies else RandomForestRegressor)(FORESTS, random_state=0)
        return score, peer.fit(x, y).score(x_test, y_test)

    return fit


def regressor(data_dir: str | None) -> Callable[[], Score]:
    """`TreeRegressor()` on diabetes."""
    return _estimator(False)


def classifier(data_dir: str | None) -> Callable[[], Score]:
    """`TreeClassifier()` on breast cancer."""
    return _estimator(True)


def cross_validation(data_dir: str | None) -> Callable[[], Score]:
    """Five-fold `cross_val_score` of `TreeRegressor()` on abalone."""
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.model_selection import cross_val_score

    from experiments import data
    from jtrees.estimators import TreeRegressor

    table = data.load("abalone", data_dir=data_dir)

    def fit() -> Score:
        ours = cross_val_score(TreeRegressor(random_state=0), table.x, table.y, cv=5).mean()
        ended()
        return ours, cross_val_score(RandomForestRegressor(FORESTS, random_state=0), table.x, table.y, cv=5).mean()

    return fit


def _recipe(make: Callable[[Any], Any], name: str, data_dir: str | None) -> Callable[[], Score]:
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.metrics import r2_score
    from sklearn.model_selection import train_test_split

    from experiments import data

    table = data.load(name, data_dir=data_dir)
    x, x_test, y, y_test = train_test_split(table.x, table.y, train_size=0.75, random_state=0)

    def fit() -> Score:
        found = make((x, y))
        outputs = found.predict(x_test)
        ended()
        return r2_score(y_test, outputs), RandomForestRegressor(FORESTS, random_state=0).fit(x, y).score(x_test, y_test)

    return fit


def tuning(data_dir: str | None) -> Callable[[], Score]:
    """`tune(GET(leaves="linear"))` over depth 1 to 8 on kin8nm."""
    import jax

    import jtrees

    make = lambda xy: jtrees.tune(
        jtrees.GET(leaves="linear"), *xy, key=jax.random.key(0), grid={"depth": range(1, 9)}, validation=0.2
    )
    return _recipe(make, "kin8nm", data_dir)


def bagging(data_dir: str | None) -> Callable[[], Score]:
    """30 bagged trees of `GET(leaves="linear")`, one start of 500 epochs, on kin8nm."""
    import jax

    import jtrees

    base = jtrees.GET(leaves="linear", starts=1, epochs=500)
    make = lambda xy: jtrees.fit(jtrees.Bagged(base=base, trees=30), *xy, key=jax.random.key(0)).model
    return _recipe(make, "kin8nm", data_dir)


def _long(recipe: Callable[[], Any]) -> Callable[[], Score]:
    import jax
    import numpy as np
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.metrics import r2_score

    from experiments.bench_rows import made
    import jtrees

    (x, y), (x_test, y_test) = made(1_000_000, 50, seed=0), made(100_000, 50, seed=1)

    def fit() -> Score:
        outputs = jtrees.fit(recipe(), x, y, key=jax.random.key(0), max_seconds=60).predict(x_test)
        ended()
        peer = HistGradientBoostingRegressor(random_state=0).fit(x[:100_000], y[:100_000])
        return r2_score(y_test, np.asarray(outputs)), r2_score(y_test, peer.predict(x_test))

    return fit


def long(data_dir: str | None) -> Callable[[], Score]:
    """`GET()`, at most 60 s, on 1 000 000 x 50 made rows, of 200 MB (beside histogram boosting on 100 000 of them)."""
    import jtrees

    return _long(jtrees.GET)


def long_boosted(data_dir: str | None) -> Callable[[], Score]:
    """`Boosted()`, at most 60 s, on the same rows."""
    import jtrees

    return _long(jtrees.Boosted)


JOBS = {one.__name__: one for one in (regressor, classifier, cross_validation, tuning, bagging, long, long_boosted)}
ends: list[tuple[float, float]] = []  # for each fit, the time when our part was done, and the peak memory in GB


def ended() -> None:
    """Records the end of our part of a fit."""
    ends.append((time.time(), benchmark.peak_memory()))


def one(job: str, data_dir: str | None, began: float) -> dict[str, Any]:
    """Returns the seconds from ``began``, the start of the process, to the end of the first fit, and other figures."""
    fit = JOBS[job](data_dir)
    scores = fit()
    start = time.time()
    fit()
    (first, memory), (second, _) = ends
    return {"first": first - began, "second": second - start, "memory": memory, "scores": scores}


def main() -> None:
    """Runs every job sequentially."""
    parser = benchmark.parser(__doc__)
    parser.add_argument("--jobs", nargs="+", default=[*JOBS], choices=[*JOBS])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data-dir")
    parser.add_argument("--only", choices=[*JOBS], help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(one(options.only, options.data_dir, options.began)))
        return
    folder = ["--data-dir", options.data_dir] if options.data_dir else []
    rows = []
    for job in options.jobs:
        child = lambda job=job: benchmark.child(
            "experiments.bench_time", "--only", job, "--began", time.time(), *folder
        )
        found = [child() for _ in range(options.repeats)]
        times = [benchmark.spread([each[name] for each in found], 1) for name in ("first", "second")]
        ours, peer = (f"{100 * score:.2f}" for score in found[0]["scores"])
        memory = f"{max(each['memory'] for each in found):.2f}"
        rows.append([(JOBS[job].__doc__ or "").rstrip("."), *times, memory, ours, peer])
        print(*rows[-1], file=sys.stderr, flush=True)
    header = ["what", "first, s", "again, s", "memory, GB", "score, %", "random forest, %"]
    notes = (
        f"Seconds in {options.repeats} processes, median and half the interquartile range. First: from the start of a "
        "process, with imports, compilation and prediction. Again: in the same process. Memory: the peak of the "
        "process up to the end of the first fit, data included. Scores on a quarter of the rows, or of "
        f"cross-validation: R², or accuracy of classes. The forest has {FORESTS} trees."
    )
    jobs = "" if len(options.jobs) == len(JOBS) else f"--jobs {' '.join(options.jobs)} "
    arguments = f"--data-dir DATA {jobs}--repeats {options.repeats}"
    to = f"bench_time_{'_'.join(options.jobs)}" if jobs else ""
    benchmark.write("bench_time", arguments, header, rows, notes, committed=options.write, to=to)


if __name__ == "__main__":
    main()
