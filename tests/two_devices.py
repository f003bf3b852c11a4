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
from jtrees import compilation
from tests.recipes import DGT, LINEAR, RECIPES as ALL
from tests.tables import X, Y

RECIPES = {name: recipe for name, recipe in ALL.items() if name != "LatentClustering"}
RECIPES |= {"DGT": DGT.replace(precondition=0.9), "GET, linear": LINEAR.replace(starts=4)}
# Runs within runs, which the devices share. Decompositions of several runs once waited for each other for ever.
RECIPES |= {"bag of bests": jtrees.Bagged(jtrees.BestOf(LINEAR, runs=2), trees=3)}
RATES = {"learning_rate": (0.01, 0.02, 0.03, 0.04, 0.05)}  # five runs, so that the last stack of two is padded


def numbers(fit):
    """Numbers of a fit: its loss, its step, its losses of updates, and its predictions."""
    return [np.ravel(part) for part in (fit.loss, fit.step, np.nan_to_num(fit.history, nan=-1), fit.predict(X))]


def results(name):
    """Numbers of a fit, and of five runs of a sweep in three folds."""
    recipe, base = RECIPES[name], getattr(RECIPES[name], "base", None)
    prefix = "" if base is None else "base__base__" if hasattr(base, "base") else "base__"
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
    compilation.KEPT_PROGRAMS = 10_000  # those of all names, as the second fits come last
    numbers_by_name = {name: results(name) for name in names}
    np.savez(file, **numbers_by_name, compilations=[compilations(name) for name in names if name in RECIPES])
