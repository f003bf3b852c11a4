"""Three ways to use all rows in boosting, on the tables of experiments.estimators with more than 1000 training rows.

python -m experiments.last_pass --data-dir DATA --seeds 3 [--datasets kin8nm ...] [--write]

- Last pass: a fifth of the rows chooses the number of rounds. Then the leaves are fitted to all rows. This is the way
  of the library.
- A tenth: a tenth of the rows chooses the number of rounds, and takes no other part in training.
- Second fit: a fifth of the rows chooses the number of rounds. Then all rounds are boosted again on all rows.

The score is R^2 in points, or the log loss. Seconds are those of compiled programs, on the first split.
"""

from collections.abc import Callable
from functools import partial
import time
from typing import Any

import jax
import numpy as np
from sklearn.metrics import log_loss, r2_score
from sklearn.model_selection import train_test_split

from experiments import benchmark, data, estimators
import jtrees

FEWEST = 1335  # three quarters of so many rows are more than 1000


def last_pass(fit: Callable[..., Any], x: Any, y: Any, strata: Any) -> Any:
    """Returns a fit with default options."""
    return fit(jtrees.Boosted(), x, y)


def a_tenth(fit: Callable[..., Any], x: Any, y: Any, strata: Any) -> Any:
    """Returns a fit whose number of rounds a tenth of the rows chooses."""
    x, x_out, y, y_out = train_test_split(x, y, test_size=0.1, random_state=0, stratify=strata)
    return fit(jtrees.Boosted(), x, y, validation=(x_out, y_out))


def second_fit(fit: Callable[..., Any], x: Any, y: Any, strata: Any) -> Any:
    """Returns a fit to all rows, with the number of rounds of a first fit."""
    rounds = fit(jtrees.Boosted(), x, y).report.search.rounds
    return fit(jtrees.Boosted(rounds=rounds, patience=None), x, y)


WAYS = {"last pass": last_pass, "a tenth": a_tenth, "second fit": second_fit}


def measured(way: Callable[..., Any], task: Any, x: Any, y: Any, seed: int) -> tuple[float, float]:
    """Returns the score on a quarter of the rows, and the seconds of a fit with compiled programs."""
    x, x_test, y, y_test = data.split(x, y, seed)
    strata = y if task == "classification" else None
    fit = partial(jtrees.fit, task=task, key=jax.random.key(seed))
    if seed == 0:
        way(fit, x, y, strata)
    start = time.perf_counter()
    result = way(fit, x, y, strata)
    seconds, outputs = time.perf_counter() - start, result.predict(x_test)
    score = 100 * r2_score(y_test, outputs) if strata is None else log_loss(y_test, outputs, labels=np.unique(y))
    return float(score), seconds


def main(arguments: list[str] | None = None) -> None:
    """Measures, and writes the table."""
    datasets = benchmark.several(estimators.NAMES)
    options = benchmark.parse("last_pass", __doc__, arguments, data_dir=None, seeds=3, datasets=datasets)
    results, ratios = benchmark.Table("set", *WAYS), []
    for task, names in estimators.SETS.items():
        for name in names:
            if name not in options.datasets:
                continue
            table = data.load(name, data_dir=options.data_dir)
            if len(table.y) < FEWEST:
                continue
            by_way = {
                way: [measured(fit, task, table.x, table.y, seed) for seed in range(options.seeds)]
                for way, fit in WAYS.items()
            }
            scores = {way: np.mean([score for score, _ in pairs]) for way, pairs in by_way.items()}
            seconds = {way: pairs[0][1] for way, pairs in by_way.items()}
            digits = 2 if task == "regression" else 4
            results.add(name, *(f"{scores[way]:.{digits}f} ({seconds[way]:.1f} s)" for way in WAYS))
            ratios.append([seconds[way] / seconds["second fit"] for way in WAYS])
    mean_ratios = np.exp(np.log(ratios).mean(0))
    results.add("seconds beside a second fit, geometric mean", *(f"{ratio:.2f}" for ratio in mean_ratios))
    notes = "R^2 in points or log loss, means over the splits (seconds of the first split).\n"
    benchmark.write(options, results, notes)


if __name__ == "__main__":
    main()
