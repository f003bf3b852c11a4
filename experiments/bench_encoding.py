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
    parser = benchmark.parser(__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    x, y = table(options.rows)
    encoder, features = TableEncoder.fit(x, y)
    calls = {
        "fit, and the features of the training rows": lambda: TableEncoder.fit(x, y),
        "features of new rows": lambda: encoder.transform(x),
    }
    rows = [[name, benchmark.spread(processor_seconds(call, options.repeats), 1)] for name, call in calls.items()]
    notes = f"Median and half the interquartile range of {options.repeats} calls; {features.shape[1]} features.\n"
    command = f"--rows {options.rows} --repeats {options.repeats}"
    benchmark.write("bench_encoding", command, ["work", "processor seconds"], rows, notes, committed=options.write)


if __name__ == "__main__":
    main()
