"""Epochs that trees with linear leaves need under each sharpness, by depth; they determine GET's default.

python -m experiments.epochs --data-dir DATA [--write] [--seeds 3] [--depths 4 6 8] [--datasets abalone ...]

Splits and scores are the same as in experiments.defaults: test R^2 in per cent.
"""

import statistics
from typing import Any

import jax

from experiments import benchmark, defaults, keys
import jtrees

EPOCHS = (1000, 500, 250)


def main(arguments: list[str] | None = None) -> None:
    """Makes the table."""
    datasets = benchmark.several(keys.DATASETS)
    options = benchmark.parse("epochs", __doc__, arguments, data_dir=None, datasets=datasets, depths=(4, 6, 8), seeds=3)
    columns = [(depth, epochs) for depth in options.depths for epochs in EPOCHS]
    table = benchmark.Table("set", *(f"depth {depth}, {epochs}" for depth, epochs in columns))
    shown = lambda cells: [f"{cell:.1f}" for cell in cells]
    means: list[list[float]] = []
    for name in options.datasets:
        means.append([])
        for depth, epochs in columns:
            recipe: Any = jtrees.GET(leaves="linear", depth=depth, epochs=epochs)
            split = lambda seed, name=name: defaults.rows(name, seed, options.data_dir)
            scores = [keys.fitted(recipe, split(seed), seed)[0] for seed in range(options.seeds)]
            means[-1].append(statistics.mean(scores))
        table.add(name, *shown(means[-1]))
        jax.clear_caches()
    table.add("**mean**", *shown(map(statistics.mean, zip(*means, strict=True))))
    notes = f"Test R² in per cent, mean over the splits (--seeds {options.seeds}), up to 3000 training rows."
    benchmark.write(options, table, notes)


if __name__ == "__main__":
    main()
