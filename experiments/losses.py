"""Losses other than the squared error: boosted trees and one tree of GET beside scikit-learn's histogram boosting.

python -m experiments.losses --data-dir DATA [--write] [--seeds 3] [--datasets abalone rentals ...] [--rows 3000]

The table has test losses, and lower is better: mean deviance for counts and costs, mean pinball loss of the quantiles
0.1, 0.5 and 0.9, and mean absolute error. ``rentals`` and ``claims`` are made: see :func:`rentals` and :func:`claims`.
"""

from collections.abc import Callable
import statistics
from typing import Any
import warnings

import jax
import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.model_selection import train_test_split

from experiments import benchmark, data
import jtrees
from jtrees import losses
from jtrees.cli import keep_programs

LEVELS = (0.1, 0.5, 0.9)
BOOSTED = jtrees.Boosted()
TREE = jtrees.GET(depth=4)
Table = tuple[np.ndarray, np.ndarray]


def rentals(seed: int, n: int = 4000) -> Table:
    """Returns features and made counts of bicycles rented in an hour.

    The counts have a Poisson distribution. Its mean depends on hour, temperature, rain, kind of day and a trend over
    the year, times a factor from a gamma distribution.
    """
    rng = np.random.default_rng(seed)
    hour, working, day = rng.integers(0, 24, n), rng.random(n) < 5 / 7, rng.uniform(0, 365, n)
    temperature = (
        12 - 10 * np.cos(2 * np.pi * day / 365) + 4 * np.sin((hour - 8) / 24 * 2 * np.pi) + rng.normal(0, 3, n)
    )
    rain = rng.random(n) < 0.2
    commuting = np.exp(-((hour - 8) ** 2) / 3) + np.exp(-((hour - 17.5) ** 2) / 5)
    leisure = np.exp(-((hour - 14) ** 2) / 20)
    rate = 1.0 + 2.2 * np.where(working, commuting, leisure) + 0.06 * np.minimum(temperature, 25) - 0.9 * rain
    y = rng.poisson(np.exp(rate + 0.001 * day) * rng.gamma(8.0, 1 / 8, n))
    return np.column_stack([hour, working, day, temperature, rain]).astype(float), y.astype(float)


def claims(seed: int, n: int = 4000) -> Table:
    """Returns made yearly costs: a Poisson number of claims, each from a gamma distribution; most costs are 0."""
    rng = np.random.default_rng(seed)
    age, power, city = rng.uniform(18, 80, n), rng.integers(4, 13, n), rng.random(n) < 0.4
    often = np.exp(-1.2 + 0.8 * (age < 26) + 0.3 * city + 0.1 * (power - 8) - 0.4 * ((age > 40) & (age < 65)))
    size = 500 * np.exp(0.1 * (power - 8) + 0.3 * (age < 26))
    number = rng.poisson(often)
    y = np.where(number > 0, rng.gamma(np.maximum(number, 1) * 1.5, size / 1.5), 0)
    return np.column_stack([age, power, city]).astype(float), y


def _real(name: str) -> Callable[[int], Table]:
    return lambda seed: (lambda table: (table.x, table.y.astype(np.float64)))(data.load(name, data_dir=_FOLDER[0]))


_FOLDER: list[Any] = [None]
# A table, the loss, and options of scikit-learn's boosting for this loss.
SETS: dict[str, tuple[Callable[[int], Table], losses.Loss, dict[str, Any]]] = {
    "abalone, counts": (_real("abalone"), losses.Poisson(), {"loss": "poisson"}),
    "rentals, counts": (rentals, losses.Poisson(), {"loss": "poisson"}),
    "claims, Tweedie": (claims, losses.Tweedie(1.5), {"loss": "poisson"}),  # scikit-learn has no Tweedie loss
    "power plant, gamma": (_real("combined-cycle-power-plant"), losses.Gamma(), {"loss": "gamma"}),
    "abalone, quantiles": (_real("abalone"), losses.Quantile(LEVELS), {"loss": "quantile"}),
    "rentals, quantiles": (rentals, losses.Quantile(LEVELS), {"loss": "quantile"}),
    "kin8nm, quantiles": (_real("kin8nm"), losses.Quantile(LEVELS), {"loss": "quantile"}),
    "cpu-act, absolute": (_real("cpu-act"), losses.AbsoluteError(), {"loss": "absolute_error"}),
}


def theirs(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, options: dict[str, Any], seed: int) -> np.ndarray:
    """Returns predictions of scikit-learn's histogram boosting with early stopping, with a model per quantile."""
    fixed: Any = {"max_iter": 1000, "early_stopping": True, "random_state": seed}
    fitted = lambda **more: HistGradientBoostingRegressor(**fixed, **options, **more).fit(x, y)
    if options["loss"] != "quantile":
        return fitted().predict(x_test)
    return np.stack([fitted(quantile=level).predict(x_test) for level in LEVELS], axis=1)


def test_losses(name: str, seed: int, rows: int) -> dict[str, float]:
    """Returns the test losses of each model and of the best constant."""
    make, loss, options = SETS[name]
    x, y = make(seed)
    parts: Any = train_test_split(x, y, train_size=min(rows, int(0.75 * len(y))), random_state=seed)
    x, x_test, y, y_test = parts
    task, key = jtrees.Regression(loss_function=loss), jax.random.key(seed)
    score = lambda predictions: float(loss.of_predictions(predictions, loss.aligned(y_test)).mean())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        fits = [jtrees.fit(recipe, x, y, key=key, task=task) for recipe in (BOOSTED, TREE)]
    ours, tree = (score(np.asarray(fit.predict(x_test), np.float64)) for fit in fits)
    constant = score(np.broadcast_to(loss.best(y, None), (len(y_test), *task.shape)))
    return {"boosted": ours, "theirs": score(theirs(x, y, x_test, options, seed)), "tree": tree, "constant": constant}


def main(arguments: list[str] | None = None) -> None:
    """Makes the table."""
    datasets = benchmark.several(SETS)
    options = benchmark.parse("losses", __doc__, arguments, data_dir=None, datasets=datasets, seeds=3, rows=3000)
    _FOLDER[0] = options.data_dir
    table = benchmark.Table("set, loss", "Boosted", "scikit-learn", "one tree", "constant", "Boosted beside it")
    ahead = 0
    for name in options.datasets:
        splits = [test_losses(name, seed, options.rows) for seed in range(options.seeds)]
        by_model = {model: [split[model] for split in splits] for model in splits[0]}
        means = {model: statistics.mean(values) for model, values in by_model.items()}
        ahead += means["boosted"] < means["theirs"]
        spreads = [f"{means[model]:.4g} ± {statistics.pstdev(values):.2g}" for model, values in by_model.items()]
        table.add(name, *spreads, f"{100 * (means['boosted'] / means['theirs'] - 1):+.1f} %")
    notes = (
        f"Mean test loss and standard deviation over {options.seeds} split(s), at most {options.rows} training rows. "
        f"Boosted: `Boosted()` with default options; tree: GET of depth {TREE.depth}; scikit-learn: "
        "`HistGradientBoostingRegressor` with early stopping, a model for each quantile, and the Poisson loss for "
        f"claims. The last column is the loss of Boosted relative to scikit-learn's: lower on {ahead} of "
        f"{len(table.rows)}."
    )
    benchmark.write(options, table, notes)


if __name__ == "__main__":
    keep_programs()
    main()
