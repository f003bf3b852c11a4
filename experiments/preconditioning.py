"""Recipes with fixed strengths of the preconditioner beside "auto", on tables with more and less correlated features.

python -m experiments.preconditioning --data-dir DATA [--write] [--datasets made-collinear ...] [--recipes DGT ...]

Splits and scores are the same as in experiments.defaults: test R^2 in per cent, one seed.
"""

from functools import partial
from typing import Any
import warnings

import jax

from experiments import benchmark, defaults
import jtrees
from jtrees.data import Scaling
from jtrees.search.precondition import spectrum
from jtrees.tables import checked_table

DATASETS = ("made-collinear", "abalone", "ailerons", "cpu-act", "kin8nm")
STRENGTHS: tuple[float | str, ...] = (0.0, 0.9, 0.99, "auto")
RECIPES: dict[str, Any] = {
    "GET, 300 epochs": jtrees.GET(epochs=300, ridge=False, halving=False),
    "DGT": jtrees.DGT(),
    "LatentTree": jtrees.LatentTree(weight_decay=0.0),
    "TEL": jtrees.TEL(),
    "CO2": jtrees.CO2(ridge=False),
}


def smallest_eigenvalue(split: Any) -> float:
    """Returns the smallest eigenvalue of the correlations of the training features."""
    table = checked_table(split[0], split[2], None, "regression")
    return float(spectrum(Scaling.fit(table).batch(table)).values[0])


def score(recipe: Any, split: Any, seed: int, strength: float | str) -> float:
    """Returns test R^2 in per cent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some fits are worse than a linear model; the table shows it
        fit = jtrees.fit(recipe.replace(precondition=strength), split[0], split[2], key=jax.random.key(seed))
    return defaults.scores(fit.model, split)["test"]


def main(arguments: list[str] | None = None) -> None:
    """Makes the table."""
    datasets, recipes = benchmark.several(defaults.SETS["regression"], DATASETS), benchmark.several(RECIPES)
    sets: dict[str, Any] = {"data_dir": None, "datasets": datasets, "recipes": recipes}
    options = benchmark.parse("preconditioning", __doc__, arguments, **sets, seed=0)
    table = benchmark.Table("set", "smallest eigenvalue", *options.recipes)
    for name in options.datasets:
        split = defaults.rows(name, options.seed, options.data_dir)
        cells = [name, f"{smallest_eigenvalue(split):.1g}"]
        for recipe in options.recipes:
            scored = partial(score, RECIPES[recipe], split, options.seed)
            cells.append(" / ".join(f"{scored(strength):.1f}" for strength in STRENGTHS))
        table.add(*cells)
        jax.clear_caches()
    texts = " / ".join(map(str, STRENGTHS))
    notes = (
        f"Test R² in per cent with `precondition` {texts}; up to 3000 training rows. In all columns GET and CO2 have "
        "`ridge=False`, and TEL stops early. The second column is the smallest eigenvalue of the features' "
        "correlations: 1 if uncorrelated, 0 if one feature is a linear function of the others."
    )
    benchmark.write(options, table, notes)


if __name__ == "__main__":
    main()
