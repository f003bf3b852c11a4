"""What few terms in a split cost: the test score of trees of depth 3 with all terms, with five, and as many as needed.

python -m experiments.sparse --data-dir DATA [--write] [--seeds 1] [--datasets abalone ...]

Splits and scores are those of experiments.defaults: test R^2 or accuracy in per cent.
"""

import statistics
import time
from typing import Any
import warnings

import jax
import numpy as np

from experiments import benchmark, defaults
import jtrees
from jtrees.cli import keep_programs

TERMS = 5
DATASETS = tuple(name for name in defaults.TASKS if name not in (*defaults.MADE, "mnist"))
BASES = {
    "constant": jtrees.GET(depth=3, starts=4, epochs=1000),
    "linear": jtrees.GET(depth=3, leaves="linear", starts=4, epochs=1000),
}
_VALIDATION = 0.25  # of the training rows, for terms="auto"


def fitted(recipe: Any, split: Any, seed: int, task: str, *, hold_out: bool = False) -> tuple[Any, float, float]:
    """The fit, its test score, and the seconds that it took."""
    x, y, key = split[0], split[2], jax.random.key(seed)
    options: Any = {"task": task}
    if hold_out:
        rest = np.random.default_rng(seed).permutation(len(x))
        count = int(_VALIDATION * len(x))
        options["validation"] = x[rest[:count]], y[rest[:count]]
        x, y = x[rest[count:]], y[rest[count:]]
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some fits are behind a linear model
        fit = jtrees.fit(recipe, x, y, key=key, **options)
    return fit, defaults.scores(fit.model, split)["test"], time.perf_counter() - start


def main(arguments: list[str] | None = None) -> None:
    """Makes the table."""
    out = benchmark.parser(__doc__)
    out.add_argument("--data-dir")
    out.add_argument("--datasets", nargs="+", default=DATASETS, choices=DATASETS)
    out.add_argument("--seeds", type=int, default=1)
    options = out.parse_args(arguments)
    rows, changes = [], {kind: [] for kind in BASES}
    for name in options.datasets:
        task = defaults.TASKS[name]
        for kind, base in BASES.items():
            if kind == "linear" and task == "classification":
                continue
            dense, sparse, auto, chosen, seconds = [], [], [], [], []
            for seed in range(options.seeds):
                split = defaults.rows(name, seed, options.data_dir)
                _, score, _ = fitted(base, split, seed, task)
                dense.append(score)
                _, score, _ = fitted(jtrees.Sparse(base, terms=TERMS), split, seed, task)
                sparse.append(score)
                by_rows = jtrees.Sparse(base, terms="auto")
                fit, score, took = fitted(by_rows, split, seed, task, hold_out=True)
                terms = max(int(count) for count in np.count_nonzero(np.asarray(fit.tree.weights), axis=1))
                auto.append(score)
                chosen.append(terms)
                seconds.append(took)
            changes[kind].append(statistics.mean(sparse) - statistics.mean(dense))
            mean = lambda values: f"{statistics.mean(values):.1f}"
            cells = [name, str(split[0].shape[1]), kind, mean(dense), mean(sparse), f"{changes[kind][-1]:+.1f}"]
            rows.append([*cells, mean(auto), mean(chosen), mean(seconds)])
            print(rows[-1], flush=True)
        jax.clear_caches()
    median = lambda kind: f"{statistics.median(changes[kind]):+.2f} on the median of {len(changes[kind])} sets"
    notes = (
        f"Test R² or accuracy in per cent, mean of {options.seeds} split(s), up to 3000 rows to train; depth 3, 4 "
        f"starts of 1000 epochs. With {TERMS} terms a split instead of all: "
        + "; ".join(f"{kind} leaves {median(kind)}" for kind in BASES if changes[kind])
        + '. auto: `terms="auto"`, chosen on a quarter of the training rows, which are not trained on; seconds with '
        "compilation."
    )
    header = ["set", "features", "leaves", "all terms", f"{TERMS} terms", "change", "auto", "its terms", "its seconds"]
    benchmark.write("sparse", f"--data-dir DATA --seeds {options.seeds}", header, rows, notes, committed=options.write)


if __name__ == "__main__":
    keep_programs()
    main()
