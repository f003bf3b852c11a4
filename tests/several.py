"""One of several processes with four devices among them: what each case finds, as lines of JSON.

python several.py WHERE COUNT I FOLDER CASE...: process I of COUNT, WHERE is the first one's address and port. Run by
test_distributed.py.
"""

import json
from pathlib import Path
import sys
import warnings

import jax
from jax.experimental import multihost_utils
import numpy as np
import optax

import jtrees
from jtrees import distributed, sharding
from jtrees.search import monitor
from tests import wait_until
from tests.recipes import DGT, LINEAR, RECIPES as ALL, STARTS, WEAK
from tests.tables import X, Y

X, Y = X.astype(np.float32), Y.astype(np.float32)
CLASSES = np.digitize(Y, (-1.0, 2.0)).astype(np.int32)
GET, LONG = STARTS, STARTS.replace(depth=4, epochs=10**6, halving=False, cart=False, ridge=False, precondition=0)
BASE = WEAK.replace(depth=1)
RECIPES = ALL | {
    "GET, linear leaves": LINEAR.replace(starts=4),
    "LatentClustering": ALL["LatentClustering"].replace(target_features=(2,)),
    "Boosted": jtrees.Boosted(BASE, rounds=3, patience=None),
    "Polished": jtrees.Polished(GET.replace(starts=1), epochs=5),
    "Refined": jtrees.Refined(jtrees.Boosted(BASE, rounds=3, patience=2), epochs=4),
}


def key():
    return jax.random.key(0)


mesh = lambda starts: jax.set_mesh(sharding.mesh(starts))


def numbers(fit):
    """What a fit found: its loss, its step, its losses of updates, and predictions of its model."""
    history = np.asarray(fit.history, float)
    return [float(fit.loss), int(fit.step), float(np.nansum(history)), *np.ravel(fit.predict(X[:4])).tolist()]


def fitted(recipe, y=Y, **options):
    return numbers(jtrees.fit(recipe, X, y, key=key(), **options))


def of_mesh(starts, recipe, **options):
    with mesh(starts):
        return fitted(recipe, **options)


def sweep():
    grid = {"learning_rate": (0.01, 0.1)}
    result = jtrees.selection.sweep(DGT, X, Y, key=key(), grid=grid, seeds=2)
    return [*np.ravel(result.losses).tolist(), *result.best_run]


def tune():
    with mesh(2):
        fit = jtrees.tune(DGT, X, Y, key=key(), grid={"depth": (1, 2)}, validation=2)
    return [*numbers(fit), *(float(trial.loss) for trial in fit.report.tuning.trials)]


def saved_model():
    """Every process saves the model that it has, and loads it."""
    with mesh(2):
        fit = jtrees.fit(DGT, X, Y, key=key())
    jtrees.save(fit, path := folder / f"fit-{count}-{i}.jtrees")
    return numbers(jtrees.load(path))


def saved_state():
    """The first process alone writes a state that no process has as a whole."""
    method = jtrees.methods.dgt(2)
    path = folder / f"state-{count}.jtrees"
    with mesh(1):
        data = sharding.put_rows(jtrees.Batch(X, Y))
        begin = jax.jit(lambda data, key: jtrees.training.start(method, data, key=key, optimizer=optax.sgd(0.1)))
        state = begin(data, key())
        state = state.replace(params=jax.tree.map(lambda a: a + 1, state.params))
        spread = {"rows": data.x, "order": state.order}
        jtrees.save(state, path)
    rows = distributed.to_host(spread)["rows"]
    if count > 1:
        multihost_utils.sync_global_devices("saved")
    again = jtrees.load(path, like=state)
    return [float(rows.sum()), float(np.sum(jax.tree.leaves(again.params)[0])), len(list(folder.glob(path.name)))]


def joined_rows():
    """Rows of each process, over meshes whose ``starts`` are within a process and over several."""
    mine = slice(i * len(X) // count, (i + 1) * len(X) // count)
    values = []
    for starts in (1, 2, 4):
        with mesh(starts):
            rows = sharding.join_rows({"x": X[mine], "y": Y[mine]})
            assert rows["x"].shape == X.shape and rows["x"].sharding.spec == jax.sharding.PartitionSpec("data")
            rows = distributed.to_host(rows)
        values += [float(np.abs(rows["x"] - X).max()), float(np.abs(rows["y"] - Y).max())]
    return values


def predictions():
    """Predictions of an array that is sharded over all processes, and of one that each of them has."""
    tree = jtrees.fit(DGT, X, Y, key=key()).tree
    with mesh(1):
        spread = tree.predict(sharding.put_rows(X))
        values = distributed.to_host(spread)
        np.testing.assert_allclose(values, tree.predict(X), rtol=1e-6)
    return np.ravel(values[:4]).tolist()


def without_a_seed():
    """An estimator without a seed has the same one in all processes."""
    from jtrees.estimators import TreeRegressor

    fitted = TreeRegressor(DGT, validation_fraction=0.2).fit(X, Y)
    return fitted.predict(X[:4]).tolist()


def starts():
    """Many starts in a program of the user's own, on all rows and on mini-batches."""
    method, keys = jtrees.methods.get(depth=2, alpha=15.0), jax.random.split(key(), 4)
    share = lambda keys: jax.lax.with_sharding_constraint(keys, jax.P("starts"))
    values = []
    for batch_size, meshes in ((None, (1, 2, 4)), (64, (1,))):
        options = {"optimizer": optax.adam(0.02), "steps": 20, "score_every": 1, "batch_size": batch_size}
        run = lambda data, options=options: lambda key: jtrees.train(method, data, key=key, **options)
        many = lambda data, run=run: jax.vmap(run(data), spmd_axis_name="starts")
        scores = jax.jit(lambda data, keys, many=many: many(data)(share(keys)).score)
        for starts in meshes:
            with mesh(starts):
                values += distributed.to_host(scores(sharding.put_rows(jtrees.Batch(X, Y)), keys)).tolist()
    return values


def alone():
    """The second process fits by itself, as the first one does something else."""
    with distributed.alone():
        return fitted(GET) if i == count - 1 else []


def warned():
    """Which processes warn of a model that is behind a linear model."""
    with warnings.catch_warnings(record=True) as caught, mesh(2):
        warnings.simplefilter("always")
        jtrees.fit(DGT, X, X.sum(1), key=key(), held_out=0.5)
    return [sum("better than DGT" in str(warning.message) for warning in caught)]


def progress():
    """Which processes show progress."""
    with mesh(2):
        jtrees.fit(DGT, X, Y, key=key(), progress=True)
    return []


def deadline():
    """The processes have different deadlines."""
    with mesh(2):
        fit = jtrees.fit(LONG, X, Y, key=key(), max_seconds=600 if i else 6)
    assert fit.report.ended == "max_seconds", fit.report.ended
    return numbers(fit)


def announce_training():
    """Prints a line after the first compiled call of several steps. Then the search has compiled, and trains."""
    took, printed = monitor.Pace.took, []

    def announced(pace, steps, seconds, compiled):
        took(pace, steps, seconds, compiled)
        if steps > 1 and not printed:
            printed.append(print("trains", flush=True))

    monitor.Pace.took = announced


def interruption():
    """The last process alone has a Ctrl-C, or is killed, while it trains."""
    announce_training()
    with mesh(2):
        fit = jtrees.fit(LONG, X, Y, key=key())
    assert fit.report.ended == "interrupted", fit.report.ended
    return numbers(fit)


def interrupted_sweep():
    """The last process alone has a Ctrl-C: all have the same states, and the first warns."""
    announce_training()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = jtrees.selection.sweep(LONG, X, Y, key=key(), grid={"l1": (0.0, 1e-3, 1e-2)}, batch=1)
    assert result.states.ravel().tolist() == ["interrupted", "not started", "not started"], result.states
    assert sum("the sweep was interrupted" in str(warning.message) for warning in caught) == (i == 0)
    return [float(result.losses[0, 0, 0]), *result.best_run]


def folders():
    """Which process is told of folders that are not one; of one folder nothing is left."""
    distributed.check_folder(shared := folder / f"shared-{count}" / "run", seconds=20)
    multihost_utils.sync_global_devices("looked")
    assert not list(shared.iterdir())
    try:
        distributed.check_folder(folder / f"own-{i}", seconds=1)
    except OSError as error:
        assert "a file of process 0 did not come to process 1 in 1 s" in str(error), error
        return [i]
    return []


def missing():
    """The last process does not take part."""
    distributed.WAIT_SECONDS = 3
    if i < count - 1:
        try:
            jtrees.fit(DGT, X, Y, key=key())
        except RuntimeError as error:
            assert "jtrees.fit must be called by all" in str(error), error
            return [1]
        finally:
            (folder / f"missed-{i}").touch()
    else:
        wait_until(lambda: all((folder / f"missed-{other}").exists() for other in range(i)))
    return [0]


CASES = {
    **{f"{name}, mesh of 2 x 2": lambda recipe=recipe: of_mesh(2, recipe) for name, recipe in RECIPES.items()},
    "classes": lambda: of_mesh(2, GET, y=CLASSES, task="classification"),
    "GET, rows alone are shared": lambda: of_mesh(1, GET),
    "DGT, starts alone are shared": lambda: of_mesh(4, DGT),
    "GET without a mesh": lambda: fitted(GET),
    "DGT with a validation set": lambda: of_mesh(2, DGT, validation=(X[:64], Y[:64])),
    "warnings": warned,
}
_CASES = (sweep, tune, saved_model, saved_state, joined_rows, predictions, starts, without_a_seed, alone, progress)
_CASES += (deadline, interruption, interrupted_sweep, folders, missing)
CASES |= {case.__name__.replace("_", " "): case for case in _CASES}


def begin():
    """Starts JAX in one of several processes with four devices among them."""
    jax.config.update("jax_num_cpu_devices", 4 // count)
    if count > 1:
        jax.distributed.initialize(where, count, i, heartbeat_timeout_seconds=10, shutdown_timeout_seconds=20)


if __name__ == "__main__":
    where, count, i, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    begin()
    warnings.filterwarnings("ignore", ".* better than")
    for case in sys.argv[5:] or CASES:
        print(json.dumps({case: CASES[case]()}), flush=True)
