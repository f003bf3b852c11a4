"""The cost of few terms in a split: the test score of trees of depth 3 with all terms and with five.

python -m experiments.sparse --data-dir DATA [--write] [--seeds 1] [--datasets abalone ...]

Splits and scores are the same as in experiments.defaults: test R^2 or accuracy in per cent.
"""

import statistics
from typing import Any
import warnings

import jax

from experiments import benchmark, defaults
import jtrees
from jtrees.cli import keep_programs

TERMS = 5
DATASETS = tuple(name for name in defaults.TASKS if name not in (*defaults.MADE, "mnist"))
BASES = {
    "constant": jtrees.GET(depth=3, starts=4, epochs=1000),
    "linear": jtrees.GET(depth=3, leaves="linear", starts=4, epochs=1000),
}


def score(recipe: Any, split: Any, seed: int, task: str) -> float:
    """Returns the test score of a fit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some fits are worse than a linear model
        fit = jtrees.fit(recipe, split[0], split[2], key=jax.random.key(seed), task=task)  # type: ignore[arg-type]
    return defaults.scores(fit.model, split)["test"]


def main(arguments: list[str] | None = None) -> None:
    """Makes the table."""
    datasets = benchmark.several(DATASETS)
    options = benchmark.parse("sparse", __doc__, arguments, data_dir=None, datasets=datasets, seeds=1)
    table = benchmark.Table("set", "features", "leaves", "all terms", f"{TERMS} terms", "change")
    changes = {kind: [] for kind in BASES}
    for name in options.datasets:
        task = defaults.TASKS[name]
        for kind, base in BASES.items():
            if kind == "linear" and task == "classification":
                continue
            dense, sparse = [], []
            for seed in range(options.seeds):
                split = defaults.rows(name, seed, options.data_dir)
                dense.append(score(base, split, seed, task))
                sparse.append(score(jtrees.Sparse(base, terms=TERMS), split, seed, task))
            changes[kind].append(statistics.mean(sparse) - statistics.mean(dense))
            mean = lambda values: f"{statistics.mean(values):.1f}"
            table.add(name, split[0].shape[1], kind, mean(dense), mean(sparse), f"{changes[kind][-1]:+.1f}")
        jax.clear_caches()
    median = lambda kind: f"{statistics.median(changes[kind]):+.2f} on the median of {len(changes[kind])} sets"
    notes = (
        f"Test R² or accuracy in per cent, mean of {options.seeds} split(s), up to 3000 training rows; depth 3, 4 "
        f"starts of 1000 epochs. Change from all terms to {TERMS} terms per split: "
        + "; ".join(f"{kind} leaves {median(kind)}" for kind in BASES if changes[kind])
        + "."
    )
    benchmark.write(options, table, notes)


if __name__ == "__main__":
    keep_programs()
    main()
