"""Seconds of the first fit in a process: without cached programs, with cached programs, and after `warmup`.

python -m experiments.bench_first_call [--jobs regressor dgt ...] [--repeats 3] [--write]

Each number is measured in a process of its own. The first process fits with an empty folder of `jtrees.cache`. The
second process has the folder that the first process has filled. The third process has no folder and fits after
`jtrees.warmup`. Each process then fits once more, with another key.
"""

from collections.abc import Callable
import tempfile
import time
from typing import Any, NamedTuple

from experiments import benchmark


class Job(NamedTuple):
    """A fit: `fit(seed)`, its recipe, and the shape of its table as arguments of `warmup`."""

    fit: Callable[[int], Any]
    recipe: Any
    shape: dict[str, Any]


def _estimator(name: str) -> Job:
    from sklearn.datasets import load_breast_cancer, load_diabetes

    from jtrees import estimators

    make, classifies = getattr(estimators, name), name == "TreeClassifier"
    loaded: Any = (load_breast_cancer if classifies else load_diabetes)(return_X_y=True)
    x, y = loaded
    shape = {"rows": len(x), "columns": x.shape[1]} | ({"classes": 2} if classifies else {})
    return Job(lambda seed: make(random_state=seed).fit(x, y), make.default_recipe, shape)


def _recipe(recipe: Any) -> Job:
    import jax
    from sklearn.datasets import load_diabetes

    import jtrees

    loaded: Any = load_diabetes(return_X_y=True)
    x, y = loaded
    fit = lambda seed: jtrees.fit(recipe, x, y, key=jax.random.key(seed))
    return Job(fit, recipe, {"rows": len(x), "columns": x.shape[1]})


def regressor() -> Job:
    """`TreeRegressor()`, diabetes."""
    return _estimator("TreeRegressor")


def classifier() -> Job:
    """`TreeClassifier()`, breast cancer."""
    return _estimator("TreeClassifier")


def get() -> Job:
    """`GET(depth=4)`, diabetes."""
    import jtrees

    return _recipe(jtrees.GET(depth=4))


def dgt() -> Job:
    """`DGT()`, diabetes."""
    import jtrees

    return _recipe(jtrees.DGT())


JOBS = {job.__name__: job for job in (regressor, classifier, get, dgt)}


def fits(job: str, folder: str | None) -> dict[str, float]:
    """Returns the seconds of the first and the second fit of a process, imports (also of the data) not included.

    If ``folder`` is None, `warmup` runs before the fits, and its seconds are returned, too.
    """
    import jtrees

    fit, recipe, shape = JOBS[job]()
    seconds = {}
    if folder is None:
        seconds["warmup"] = jtrees.warmup(recipe, **shape)
    else:
        jtrees.cache(folder)
    for seed, name in enumerate(("first", "second")):
        began = time.perf_counter()
        fit(seed)
        seconds[name] = time.perf_counter() - began
    return seconds


def measured(job: str) -> dict[str, float]:
    """Returns the seconds of a job in its three processes."""
    with tempfile.TemporaryDirectory() as folder:
        cold, cached = (benchmark.isolated(fits, job, folder) for _ in range(2))
    warmed = benchmark.isolated(fits, job, None)
    again = {"cold": cold["first"], "cached": cached["first"], "warmup": warmed["warmup"], "warmed": warmed["first"]}
    return again | {"warm": cached["second"], "ratio": cached["first"] / cold["first"]}


def main() -> None:
    """Runs every job sequentially."""
    options = benchmark.parse("bench_first_call", __doc__, jobs=benchmark.several(JOBS), repeats=3)
    header = ["first fit of a process", "cold, s", "cached, s", "cached / cold", "`warmup`, s", "after it, s"]
    table = benchmark.Table(*header, "again, s")
    for job in options.jobs:
        repeats = [measured(job) for _ in range(options.repeats)]
        numbers = ("cold", "cached", "ratio", "warmup", "warmed", "warm")
        seconds = [benchmark.spread([repeat[name] for repeat in repeats], 1) for name in numbers]
        table.add((JOBS[job].__doc__ or "").rstrip("."), *seconds)
    notes = (
        f"Seconds of `fit` in {options.repeats} processes each, imports not included, median and half the "
        "interquartile range. Cold: the folder of `jtrees.cache` is empty, and is written to. Cached: a later process "
        "with this folder. After `warmup`: without a folder. Again: the second fit of the cached process, with another "
        "key."
    )
    to = "" if len(options.jobs) == len(JOBS) else f"bench_first_call_{'_'.join(options.jobs)}"
    benchmark.write(options, table, notes, to=to)


if __name__ == "__main__":
    main()
