"""Processor seconds to encode a raw table of 30 columns: 18 of numbers, ten of text, two of dates.

python -m experiments.bench_encoding [--rows 100000] [--repeats 5] [--write]
"""

from collections.abc import Callable
import time
from typing import Any

import numpy as np
import pandas as pd

from experiments import benchmark
from jtrees.tables import TableEncoder

LEVELS = (8, 40)  # of the columns of text, in turn: a feature for each level, and target means


def table(rows: int) -> tuple[pd.DataFrame, np.ndarray]:
    """Returns a made table of 30 columns, and targets ``(rows,)``."""
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {f"number {i}": rng.normal(size=rows) for i in range(18)}
    for i in range(10):
        names = np.array([f"level {level}" for level in range(LEVELS[i % 2])], object)
        columns[f"text {i}"] = names[rng.integers(len(names), size=rows)]
    for i in range(2):
        columns[f"date {i}"] = np.datetime64("2020-01-01") + rng.integers(0, 900, rows)
    return pd.DataFrame(columns), rng.normal(size=rows)


def processor_seconds(call: Callable[[], Any], repeats: int) -> list[float]:
    """Returns the processor seconds of each call."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return times


def main(arguments: list[str] | None = None) -> None:
    """Measures, and writes the table."""
    options = benchmark.parse("bench_encoding", __doc__, arguments, rows=100_000, repeats=5)
    x, y = table(options.rows)
    encoder, features = TableEncoder.fit(x, y)
    calls = {
        "fit, and the features of the training rows": lambda: TableEncoder.fit(x, y),
        "features of new rows": lambda: encoder.transform(x),
    }
    results = benchmark.Table("work", "processor seconds")
    for name, call in calls.items():
        results.add(name, benchmark.spread(processor_seconds(call, options.repeats), 1))
    notes = f"Median and half the interquartile range of {options.repeats} calls; {features.shape[1]} features.\n"
    benchmark.write(options, results, notes)


if __name__ == "__main__":
    main()
