"""Seconds of the first fit in a process: without cached programs, with cached programs, and after `warmup`.

python -m experiments.bench_first_call [--jobs get dgt ...] [--repeats 3] [--write]

Each number is measured in a process of its own. The first process fits with an empty folder of `jtrees.cache`. The
second process has the folder that the first process has filled. The third process has no folder and fits after
`jtrees.warmup`. Each process then fits once more, with another key.
"""

import tempfile
import time
from typing import Any

from experiments import benchmark

JOBS = {  # title of each fit, and its recipe from the package, which only a child process imports; None: the estimator
    "regressor": ("`TreeRegressor()`, diabetes", None),
    "classifier": ("`BoostedClassifier()`, breast cancer", None),
    "get": ("`GET(depth=4)`, diabetes", lambda jtrees: jtrees.GET(depth=4)),
    "dgt": ("`DGT()`, diabetes", lambda jtrees: jtrees.DGT()),
}


def fits(job: str, folder: str | None) -> dict[str, float]:
    """Returns the seconds of the first and the second fit of a process, imports (also of the data) not included.

    If ``folder`` is None, `warmup` runs before the fits, and its seconds are returned, too.
    """
    import jax
    from sklearn.datasets import load_breast_cancer, load_diabetes

    import jtrees
    from jtrees.estimators import BoostedClassifier, TreeRegressor

    classifies, make = job == "classifier", JOBS[job][1]
    table: Any = (load_breast_cancer if classifies else load_diabetes)()
    x, y = table.data, table.target
    estimator = BoostedClassifier if classifies else TreeRegressor
    recipe = estimator.default_recipe if make is None else make(jtrees)
    seconds = {}
    if folder is None:
        classes: Any = {"classes": 2} if classifies else {}
        seconds["warmup"] = jtrees.warmup(recipe, rows=len(x), columns=x.shape[1], **classes)
    else:
        jtrees.cache(folder)
    for seed, name in enumerate(("first", "second")):
        began = time.perf_counter()
        if make is None:
            estimator(random_state=seed).fit(x, y)
        else:
            jtrees.fit(recipe, x, y, key=jax.random.key(seed))
        seconds[name] = time.perf_counter() - began
    return seconds


def measured(job: str) -> list[float]:
    """Returns the numbers of a job in its three processes, in the order of the columns."""
    with tempfile.TemporaryDirectory() as folder:
        cold, cached = (benchmark.isolated(fits, job, folder) for _ in range(2))
    warmed, ratio = benchmark.isolated(fits, job, None), cached["first"] / cold["first"]
    return [cold["first"], cached["first"], ratio, warmed["warmup"], warmed["first"], cached["second"]]


def main(arguments: list[str] | None = None) -> None:
    """Runs every job sequentially."""
    options = benchmark.parse("bench_first_call", __doc__, arguments, jobs=benchmark.several(JOBS), repeats=3)
    header = ["first fit of a process", "cold, s", "cached, s", "cached / cold", "`warmup`, s", "after it, s"]
    table = benchmark.Table(*header, "again, s")
    for job in options.jobs:
        columns = zip(*(measured(job) for _ in range(options.repeats)), strict=True)
        table.add(JOBS[job][0], *(benchmark.spread(list(column), 1) for column in columns))
    notes = (
        f"Seconds of `fit` in {options.repeats} processes each, imports not included, median and half the "
        "interquartile range. Cold: the folder of `jtrees.cache` is empty, and is written to. Cached: a later process "
        "with this folder. After `warmup`: without a folder. Again: the second fit of the cached process, with another "
        "key."
    )
    benchmark.write(options, table, notes)


if __name__ == "__main__":
    main()
