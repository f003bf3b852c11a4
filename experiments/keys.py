"""The effect of the key of a fit: GET with its default options and eight keys, on every regression set.

python -m experiments.keys --data-dir DATA [--write] [--keys 8] [--datasets abalone ...]

Splits and scores are the same as in experiments.defaults: test R^2 in per cent. All keys have the same split.
"""

import statistics
import time
from typing import Any
import warnings

import jax

from experiments import benchmark, defaults
import jtrees

RECIPES = {"GET": jtrees.GET(), "GET-Linear": jtrees.GET(leaves="linear")}
DATASETS = tuple(name for name in defaults.SETS["regression"] if name not in defaults.MADE)


def fitted(recipe: Any, split: Any, key: int) -> tuple[float, float]:
    """Returns the test score and the seconds of a fit."""
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some fits are worse than a linear model
        model = jtrees.fit(recipe, split[0], split[2], key=jax.random.key(key)).model
    seconds = time.perf_counter() - start
    return defaults.scores(model, split)["test"], seconds


def main(arguments: list[str] | None = None) -> None:
    """Makes the table."""
    datasets = benchmark.several(DATASETS)
    options = benchmark.parse("keys", __doc__, arguments, data_dir=None, datasets=datasets, keys=8)
    columns = ("median", "worst", "best", "seconds")
    table = benchmark.Table("set", *(f"{recipe}, {column}" for recipe in RECIPES for column in columns))
    for name in options.datasets:
        split = defaults.rows(name, 0, options.data_dir)
        cells = [name]
        for recipe in RECIPES.values():
            first = fitted(recipe, split, 0)[1]
            scores, seconds = zip(*(fitted(recipe, split, key) for key in range(options.keys)), strict=True)
            median = statistics.median(scores)
            cells += [f"{median:.1f}", f"{min(scores) - median:.1f}", f"{max(scores) - median:+.1f}"]
            cells += [f"{statistics.median(seconds):.1f} ({first:.0f})"]
        table.add(*cells)
        jax.clear_caches()
    notes = (
        f"Test R² in per cent of {options.keys} keys: the median, and the worst and the best score minus the median. "
        "Up to 3000 training rows. `seconds` is the median of a fit and, in brackets, the first fit with compilation. "
        "On a busy machine the seconds are upper bounds."
    )
    benchmark.write(options, table, notes)


if __name__ == "__main__":
    main()
