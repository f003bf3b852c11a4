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
    out = benchmark.parser(__doc__)
    out.add_argument("--data-dir")
    out.add_argument("--datasets", nargs="+", default=keys.DATASETS, choices=keys.DATASETS)
    out.add_argument("--depths", nargs="+", type=int, default=[4, 6, 8])
    out.add_argument("--seeds", type=int, default=3)
    options = out.parse_args(arguments)
    columns = [(depth, epochs) for depth in options.depths for epochs in EPOCHS]
    means: list[list[float]] = []
    for name in options.datasets:
        means.append([])
        for depth, epochs in columns:
            recipe: Any = jtrees.GET(leaves="linear", depth=depth, epochs=epochs)
            split = lambda seed, name=name: defaults.rows(name, seed, options.data_dir)
            scores = [keys.fitted(recipe, split(seed), seed)[0] for seed in range(options.seeds)]
            means[-1].append(statistics.mean(scores))
        jax.clear_caches()
    shown = lambda cells: [f"{cell:.1f}" for cell in cells]
    rows = [[name, *shown(cells)] for name, cells in zip(options.datasets, means, strict=True)]
    rows.append(["**mean**", *shown(map(statistics.mean, zip(*means, strict=True)))])
    notes = f"Test R² in per cent, mean over the splits (--seeds {options.seeds}), up to 3000 training rows."
    header = ["set", *(f"depth {depth}, {epochs}" for depth, epochs in columns)]
    chosen = [*map(str, options.depths), "--datasets", *options.datasets]
    command = f"--data-dir DATA --seeds {options.seeds} --depths {' '.join(chosen)}"
    benchmark.write("epochs", command, header, rows, notes, committed=options.write)


if __name__ == "__main__":
    main()
