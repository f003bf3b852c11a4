"""Numbers of fits and sweeps, to compare processes of one and of two devices. Run by test_engine.py.

python two_devices.py FILE DEVICES NAME...: writes the numbers of the recipes to a file.
"""

from functools import partial
import itertools
import sys
import warnings

import jax
import numpy as np

import jtrees

RNG = np.random.default_rng(0)
X = RNG.normal(size=(150, 3)).astype(np.float32)
Y = np.where(X[:, 0] + X[:, 1] > 0, 2.0, -1.0) + X[:, 2]
DGT = jtrees.DGT(depth=2, epochs=6, batch_size=32, widths=(8,), cycles=1, precondition=0.9)
RECIPES = {
    "DGT": DGT,
    "Bagged": jtrees.Bagged(DGT, trees=3),
    "FromMethod": jtrees.FromMethod(make=partial(jtrees.methods.get, 2), options={"alpha": 15.0}, epochs=6),
    "GET": jtrees.GET(depth=2, starts=2, epochs=12),
    "RADDT": jtrees.RADDT(depth=2, starts=2, epochs=10),
    "BestOf": jtrees.BestOf(DGT, runs=3),
    "LatentTree": jtrees.LatentTree(depth=2, epochs=6, batch_size=32),
    "TEL": jtrees.TEL(depth=2, trees=3, epochs=6, batch_size=32),
    "CO2": jtrees.CO2(depth=2, epochs=5),
    "NonGreedy": jtrees.NonGreedy(depth=2, greedy_epochs=5, epochs=5),
    "Polished": jtrees.Polished(DGT, epochs=5),
    "Sparse": jtrees.Sparse(DGT, terms=1, epochs=5),
    "Boosted": jtrees.Boosted(
        jtrees.GET(depth=1, starts=1, epochs=4, cart="binned", halving=False, precondition=0, shrink=False), rounds=3
    ),
}
RATES = {"learning_rate": (0.01, 0.02, 0.03, 0.04, 0.05)}  # five runs, so that the last stack of two is padded


def numbers(fit):
    """Numbers of a fit: its loss, its step, its losses of updates, and its predictions."""
    return [np.ravel(part) for part in (fit.loss, fit.step, np.nan_to_num(fit.history, nan=-1), fit.predict(X))]


def results(name):
    """Numbers of a fit, and of five runs of a sweep in three folds."""
    recipe, prefix = RECIPES[name], "base__" if hasattr(RECIPES[name], "base") else ""
    grid = {prefix + option: values for option, values in RATES.items()}
    fit, sweep = partial(jtrees.fit, key=jax.random.key(0)), partial(jtrees.sweep, key=jax.random.key(0))
    swept = sweep(recipe, X, Y, grid=grid, validation=3)
    fits = [fit(recipe, X, Y), *swept.fits.ravel()]
    return np.concatenate([swept.losses.ravel(), swept.best_run, *itertools.chain(*map(numbers, fits))])


def compilations(name):
    """The number of compilations of a second fit."""
    events = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: events.append(event))
    jtrees.fit(RECIPES[name], X, Y, key=jax.random.key(1))
    return sum(event.endswith("backend_compile_duration") for event in events)


if __name__ == "__main__":
    file, devices, *names = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", int(devices))
    warnings.filterwarnings("ignore", ".* better than")
    assert jax.device_count() == int(devices)
    np.savez(file, **{name: results(name) for name in names}, compilations=[compilations(name) for name in names])
