"""Losses other than the squared error: boosted trees and one tree of GET beside scikit-learn's histogram boosting.

python -m experiments.losses --data-dir DATA [--write] [--seeds 3] [--datasets abalone rentals ...] [--rows 3000]

The table has test losses, and lower is better: mean deviance for counts and costs, mean pinball loss of the quantiles
0.1, 0.5 and 0.9, and mean absolute error. ``rentals`` and ``claims`` are made: see :func:`rentals` and :func:`claims`.
"""

import statistics
from typing import Any

import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor

from experiments import benchmark, data, studies
import jtrees
from jtrees import losses

LEVELS = (0.1, 0.5, 0.9)
OURS: dict[str, Any] = {"boosted": jtrees.Boosted(), "tree": jtrees.GET(depth=4)}
# Set, loss, and the loss of scikit-learn's boosting, which has no Tweedie loss.
SETS: dict[str, tuple[str, losses.Loss, str]] = {
    "abalone, counts": ("abalone", losses.Poisson(), "poisson"),
    "rentals, counts": ("rentals", losses.Poisson(), "poisson"),
    "claims, Tweedie": ("claims", losses.Tweedie(1.5), "poisson"),
    "power plant, gamma": ("combined-cycle-power-plant", losses.Gamma(), "gamma"),
    "abalone, quantiles": ("abalone", losses.Quantile(LEVELS), "quantile"),
    "rentals, quantiles": ("rentals", losses.Quantile(LEVELS), "quantile"),
    "kin8nm, quantiles": ("kin8nm", losses.Quantile(LEVELS), "quantile"),
    "cpu-act, absolute": ("cpu-act", losses.AbsoluteError(), "absolute_error"),
}


def rentals(seed: int, n: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    """Returns features and made counts of bicycles rented in an hour.

    The counts have a Poisson distribution. Its mean depends on hour, temperature, rain, kind of day and a trend over
    the year, times a factor from a gamma distribution.
    """
    rng = np.random.default_rng(seed)
    hour, working, day = rng.integers(0, 24, n), rng.random(n) < 5 / 7, rng.uniform(0, 365, n)
    daily = 4 * np.sin((hour - 8) / 24 * 2 * np.pi) + rng.normal(0, 3, n)
    temperature, rain = 12 - 10 * np.cos(2 * np.pi * day / 365) + daily, rng.random(n) < 0.2
    commuting = np.exp(-((hour - 8) ** 2) / 3) + np.exp(-((hour - 17.5) ** 2) / 5)
    leisure = np.exp(-((hour - 14) ** 2) / 20)
    rate = 1.0 + 2.2 * np.where(working, commuting, leisure) + 0.06 * np.minimum(temperature, 25) - 0.9 * rain
    y = rng.poisson(np.exp(rate + 0.001 * day) * rng.gamma(8.0, 1 / 8, n))
    return np.column_stack([hour, working, day, temperature, rain]).astype(float), y.astype(float)


def claims(seed: int, n: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    """Returns made yearly costs: a Poisson number of claims, each from a gamma distribution; most costs are 0."""
    rng = np.random.default_rng(seed)
    age, power, city = rng.uniform(18, 80, n), rng.integers(4, 13, n), rng.random(n) < 0.4
    often = np.exp(-1.2 + 0.8 * (age < 26) + 0.3 * city + 0.1 * (power - 8) - 0.4 * ((age > 40) & (age < 65)))
    size, number = 500 * np.exp(0.1 * (power - 8) + 0.3 * (age < 26)), rng.poisson(often)
    y = np.where(number > 0, rng.gamma(np.maximum(number, 1) * 1.5, size / 1.5), 0)
    return np.column_stack([age, power, city]).astype(float), y


def theirs(split: studies.Split, loss: str, seed: int) -> np.ndarray:
    """Returns predictions of scikit-learn's histogram boosting with early stopping, with a model per quantile."""
    x, x_test, y, _ = split
    fixed: Any = {"max_iter": 1000, "early_stopping": True, "random_state": seed, "loss": loss}
    predicted = lambda **options: HistGradientBoostingRegressor(**fixed, **options).fit(x, y).predict(x_test)
    return np.stack([predicted(quantile=q) for q in LEVELS], axis=1) if loss == "quantile" else predicted()


def test_losses(name: str, seed: int, rows: int, data_dir: str | None) -> dict[str, float]:
    """Returns the test losses of each model and of the best constant."""
    source, loss, name_of_theirs = SETS[name]
    makers = {"rentals": rentals, "claims": claims}
    loaded = None if source in makers else data.load(source, data_dir=data_dir)
    x, y = makers[source](seed) if loaded is None else (loaded.x, loaded.y.astype(np.float64))
    split = data.split(x, y, seed, share=min(rows, int(0.75 * len(y))))
    task = jtrees.Regression(loss_function=loss)
    score = lambda outputs: float(loss.of_predictions(outputs, loss.with_output_axis(split[3])).mean())
    fits = {label: studies.fit(recipe, split, seed, task=task) for label, recipe in OURS.items()}
    ours = {label: score(np.asarray(fit.predict(split[1]), np.float64)) for label, fit in fits.items()}
    constant = np.broadcast_to(loss.best(split[2], None), (len(split[3]), *task.shape))
    return {
        "boosted": ours["boosted"],
        "theirs": score(theirs(split, name_of_theirs, seed)),
        "tree": ours["tree"],
        "constant": score(constant),
    }


def main(arguments: list[str] | None = None) -> None:
    """Makes the table."""
    datasets = benchmark.several(SETS)
    options = benchmark.parse("losses", __doc__, arguments, data_dir=None, datasets=datasets, seeds=3, rows=3000)
    table, wins = benchmark.Table("set, loss", "Boosted", "scikit-learn", "one tree", "constant", "difference"), 0
    for name in options.datasets:
        splits = [test_losses(name, seed, options.rows, options.data_dir) for seed in range(options.seeds)]
        model_losses = {model: [split[model] for split in splits] for model in splits[0]}
        means = {model: statistics.mean(values) for model, values in model_losses.items()}
        wins += means["boosted"] < means["theirs"]
        spreads = [f"{means[model]:.4g} ± {statistics.pstdev(values):.2g}" for model, values in model_losses.items()]
        table.add(name, *spreads, f"{100 * (means['boosted'] / means['theirs'] - 1):+.1f} %")
    notes = (
        f"Mean test loss and standard deviation over {options.seeds} split(s), at most {options.rows} training rows. "
        f"Boosted: `Boosted()` with default options; tree: GET of depth {OURS['tree'].depth}; scikit-learn: "
        "`HistGradientBoostingRegressor` with early stopping, a model for each quantile, and the Poisson loss for "
        f"claims. The last column is the loss of Boosted relative to scikit-learn's: lower on {wins} of "
        f"{len(table.rows)}."
    )
    benchmark.write(options, table, notes)


if __name__ == "__main__":
    main()
