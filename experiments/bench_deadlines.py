"""Deadlines: the seconds that a fit takes beyond `max_seconds`, on a long and on a wide table.

python -m experiments.bench_deadlines [--shapes long wide] [--recipes GET Bagged ...] [--write]

Each recipe fits the same table twice. The second fit compiles nothing; it is late if it exceeds the deadline by more
than 10 % plus half a second.
"""

import time
import warnings

import jax
import numpy as np

from experiments import benchmark
import jtrees

SHAPES = {"long": (1_000_000, 10, 15.0), "wide": (1_000, 5_000, 3.0)}
RECIPES = {
    "GET": jtrees.GET(),
    "RADDT": jtrees.RADDT(),
    "DGT": jtrees.DGT(),
    "TEL": jtrees.TEL(),
    "LatentTree": jtrees.LatentTree(),
    "CO2": jtrees.CO2(),
    "NonGreedy": jtrees.NonGreedy(),
    "Bagged": jtrees.Bagged(jtrees.DGT(), trees=10),
    "BestOf": jtrees.BestOf(jtrees.DGT()),
    "Boosted": jtrees.Boosted(),
    "Polished": jtrees.Polished(jtrees.GET()),
    "Sparse": jtrees.Sparse(jtrees.GET()),
}


def late(recipe: jtrees.Recipe, rows: int, columns: int, seconds: float) -> tuple[float, float]:
    """Returns the seconds that the first and the second fit take beyond the deadline."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, columns)).astype(np.float32)
    y = np.sin(x[:, 0]) + x[:, 1] * x[:, 2]
    times = []
    for i in range(2):
        began = time.monotonic()
        jtrees.fit(recipe, x, y, key=jax.random.key(i), max_seconds=seconds)
        times.append(time.monotonic() - began - seconds)
    return times[0], times[1]


def main() -> None:
    options = benchmark.parser(__doc__)
    options.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    options.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    options = options.parse_args()
    warnings.simplefilter("ignore")
    rows: list[list[str]] = []
    for name in options.recipes:
        row = [name]
        for shape in options.shapes:
            first, second = late(RECIPES[name], *SHAPES[shape])
            allowed = 0.1 * SHAPES[shape][2] + 0.5
            row += [f"{first:+.1f}", f"{second:+.1f}{' (late)' if second > allowed else ''}"]
        rows.append(row)
        print(*row, flush=True)
    header = ["recipe", *[f"{shape}, {fit} fit" for shape in options.shapes for fit in ("first", "second")]]
    sizes = "; ".join(f"{name}: {n} x {p}, {s:g} s" for name, (n, p, s) in SHAPES.items())
    notes = f"Seconds beyond the deadline. {sizes}. First fits include compilation."
    asked = [(name, getattr(options, name)) for name in ("shapes", "recipes")]
    every = {"shapes": list(SHAPES), "recipes": list(RECIPES)}
    arguments = " ".join(f"--{name} {' '.join(some)}" for name, some in asked if some != every[name])
    benchmark.write("bench_deadlines", arguments, header, rows, notes, committed=options.write)


if __name__ == "__main__":
    main()
