"""The first and the second fit of every recipe in a fresh process: seconds, and the score on held-out rows.

python -m experiments.bench_fits [--recipes NAME ...] [--tables NAME ...] [--jobs 1] [--write]

A first fit includes the compilation of its programs. The second fit has another key and the same shapes. Processor
seconds are summed over all cores; imports are not included. On an accelerator, wall-clock seconds count, and several
simultaneous processes (``--jobs``) change them.
"""

from concurrent.futures import ThreadPoolExecutor
import sys
import time
from typing import Any

from experiments import benchmark

TABLES = ("diabetes", "breast cancer")
RECIPES: dict[str, Any] = {  # functions of the package, which only a child process imports; None: the estimator
    "CO2": lambda jtrees: jtrees.CO2(),
    "NonGreedy": lambda jtrees: jtrees.NonGreedy(),
    "GET": lambda jtrees: jtrees.GET(),
    "GET, linear leaves": lambda jtrees: jtrees.GET(leaves="linear"),
    "RADDT": lambda jtrees: jtrees.RADDT(),
    "DGT": lambda jtrees: jtrees.DGT(),
    "TEL": lambda jtrees: jtrees.TEL(),
    "LatentTree": lambda jtrees: jtrees.LatentTree(),
    "Bagged DGT": lambda jtrees: jtrees.Bagged(base=jtrees.DGT()),
    "Boosted, 60 rounds": lambda jtrees: jtrees.Boosted(rounds=60),
    "Polished CO2": lambda jtrees: jtrees.Polished(base=jtrees.CO2()),
    "BestOf": lambda jtrees: jtrees.BestOf(jtrees.CO2()),
    "estimator": None,
}


def fits(name: str, table: str) -> dict[str, Any]:
    """Fits one recipe twice; returns wall-clock and processor seconds, and the score of the first fit."""
    import jax
    from sklearn import datasets, metrics
    from sklearn.model_selection import train_test_split

    import jtrees
    from jtrees import estimators

    load = {"diabetes": datasets.load_diabetes, "breast cancer": datasets.load_breast_cancer}[table]
    split: Any = train_test_split(*load(return_X_y=True), random_state=0)
    x, x_test, y, y_test = split
    task = "classification" if table == "breast cancer" else "regression"
    classes, make = task == "classification", RECIPES[name]
    estimator = estimators.TreeClassifier if classes else estimators.TreeRegressor
    metric = metrics.accuracy_score if classes else metrics.r2_score

    def fit(seed: int) -> float:
        if make is None:
            return estimator(random_state=seed).fit(x, y).score(x_test, y_test)
        answers = jtrees.fit(make(jtrees), x, y, key=jax.random.key(seed), task=task).predict(x_test)
        return float(metric(y_test, answers.argmax(1) if classes else answers))

    times, scores = [], []
    for seed in (0, 1):
        wall, processor = time.perf_counter(), time.process_time()
        scores.append(fit(seed))
        times.append((time.perf_counter() - wall, time.process_time() - processor))
    return {"first": times[0], "second": times[1], "score": scores[0], "device": jax.devices()[0].device_kind}


def main() -> None:
    """Runs every recipe on every table, each in a process of its own."""
    recipes, tables = benchmark.several(RECIPES), benchmark.several(TABLES)
    options = benchmark.parse("bench_fits", __doc__, recipes=recipes, tables=tables, jobs=1)
    header = ["table", "recipe", "first fit, s", "processor s", "second fit, s", "processor s", "R² or accuracy"]
    table, devices = benchmark.Table(*header), set()

    def run(job: tuple[str, str]) -> None:
        try:
            fit = benchmark.isolated(fits, *job)
        except RuntimeError as error:  # a failed fit becomes a row without numbers, and the other fits go on
            table.add(*reversed(job), *["failed"] * 4, "-")
            print(error, file=sys.stderr)
            return
        devices.add(fit["device"])
        seconds = (f"{seconds:.2f}" for seconds in (*fit["first"], *fit["second"]))
        table.add(*reversed(job), *seconds, f"{fit['score']:.3f}")

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, [(name, rows) for rows in options.tables for name in options.recipes]))
    device = " and ".join(sorted(devices)) or "no device"
    notes = f"On {device}, {options.jobs} processes at once, default options, a quarter of the rows held out."
    benchmark.write(options, table, notes)


if __name__ == "__main__":
    main()
