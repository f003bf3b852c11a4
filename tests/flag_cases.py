"""Every recipe and tool on one small table, to be run under a flag of JAX: ``python tests/flag_cases.py [words ...]``.

Prints a line of JSON for each case whose name holds all of the words: its name, and the error it ended with, or null.
"""

from functools import partial
import json
from pathlib import Path
import sys
import tempfile
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import jtrees
from jtrees import explain, selection
from jtrees.report import BehindBaselineWarning
from tests import recipes
from tests.tables import CLASSES as CLASS, X, Y

new_key = partial(jax.random.key, 0)  # each case has a key of its own: jax_debug_key_reuse
TRAINING, HELD_OUT = slice(0, 60), slice(60, 90)
# So many steps, an odd number, that they take several calls of different lengths; and starts that do not go on.
LONG = {"GET": {"starts": 5, "epochs": 301}, "RADDT": {"starts": 5, "epochs": 301}}
STEPS = {"epochs": 101, "batch_size": 20}
LONG |= {name: STEPS for name in ("DGT", "TEL", "LatentTree", "NonGreedy", "FromMethod")}
RECIPES = {name: recipe.replace(**LONG.get(name, {})) for name, recipe in recipes.RECIPES.items()}
CLUSTERING = RECIPES.pop("LatentClustering").replace(**STEPS)
GET, DGT = RECIPES["GET"], RECIPES["DGT"]


def fitted(recipe, y, task, held_out):
    """A fit, and what its model predicts; a fit and its file predict the same."""
    validation = (X[HELD_OUT], y[HELD_OUT]) if held_out else None
    fit = jtrees.fit(recipe, X[TRAINING], y[TRAINING], key=new_key(), task=task, validation=validation)
    predicted = np.asarray(fit.predict(X[HELD_OUT]))
    assert np.isfinite(predicted).all() and np.isfinite(fit.loss)
    with tempfile.TemporaryDirectory() as folder:
        jtrees.save(fit, path := Path(folder) / "fit.jtrees")
        np.testing.assert_array_equal(jtrees.load(path).predict(X[HELD_OUT]), predicted)


def clustering():
    """Clusters, which need no targets."""
    assert jtrees.fit(CLUSTERING, X[TRAINING], key=new_key()).tree.leaf_index(X).max() < 4


def bandit(regression):
    """A learner of each kind, on a stream and one round at a time."""
    methods, x = jtrees.methods, X.astype(np.float32)
    learner = methods.bandit_regressor(2) if regression else methods.bandit_classifier(2, 3)
    y = jnp.asarray(Y, jnp.float32) if regression else jnp.asarray(CLASS)
    loss = lambda i, action: jnp.square(action - y[i]) if regression else (action != y[i]).astype(jnp.float32)
    state = jax.jit(lambda key: methods.run_bandit(learner, x, loss, key=key))(new_key()).state
    action, propensity = learner.act(state, x[0], key=new_key())
    learner.update(state, x[0], action, propensity, loss(0, action))
    assert np.isfinite(learner.predict(state.params, x)).all()


def loop():
    """The training loop, in which most scores are not evaluated, and two runs side by side."""
    batch = jtrees.Batch(jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32))
    method, optimizer = jtrees.methods.dgt(2, widths=()), jtrees.training.rmsprop(0.01)
    train = partial(jtrees.train, method, batch, optimizer=optimizer, steps=5)
    for every in (0, 2):
        assert np.isfinite(train(key=new_key(), score_every=every).score)
    assert jax.vmap(lambda key: train(key=key))(jax.random.split(new_key(), 2)).finite.all()


def sweep(task):
    """A sweep over options, seeds and folds, and tuning over depths."""
    x, y, grid = X[:90], (Y if task == "regression" else CLASS)[:90], {"learning_rate": [0.01, 0.02]}
    swept = selection.sweep(DGT, x, y, key=new_key(), grid=grid, seeds=2, validation=2, task=task)
    assert np.isfinite(swept.losses).all()
    selection.tune(DGT, x, y, grid={"depth": [1, 2]}, key=new_key(), task=task)


def estimator(name, raw, **options):
    """An estimator on numbers, or on a table with text and gaps; and constant targets."""
    import pandas as pd

    from jtrees import estimators

    frame = pd.DataFrame(X, columns=[*"abcd"])
    frame.loc[::7, "a"] = np.nan
    frame["text"] = np.where(X[:, 0] > 0, "yes", "no")
    x, y = frame if raw else X, Y if name.endswith("Regressor") else CLASS
    model = getattr(estimators, name)(GET, random_state=0, **options).fit(x, y)
    assert np.isfinite(np.asarray(model.predict(x), float)).all()
    model.apply(x)
    getattr(estimators, name)(GET, random_state=0).fit(x, 0 * y).predict(x)


def on_a_split():
    """A row for which rounding might decide, and whose leaf is found in double precision."""
    splits, leaves = jnp.ones((1, 3)), jtrees.leaves.Values(jnp.arange(2.0))
    tree, rows = jtrees.ObliqueTree(splits, jnp.zeros(1), leaves), np.array([[1.0, -1.0, 0.0], [1.0, 2.0, 3.0]])
    stacked = jtrees.Forest(jax.tree.map(lambda a: a[None], tree))
    assert tree.predict(rows).tolist() == stacked.predict(rows).tolist() == [0, 1]


def explained():
    fit = jtrees.fit(DGT, X, Y, key=new_key())
    explain.path(fit.tree, X[0])
    explain.shapley_values(fit.model, X[:2], X[:10])
    explain.permutation_importance(fit.model, X, Y, lambda y, result: -np.square(y - result).mean())
    explain.nearest_change(fit.tree, X[0], X)


def layers():
    from flax import nnx

    trees = jtrees.nn.TreeEnsemble(4, num_trees=2, depth=2, out_features=1, rngs=nnx.Rngs(0))
    total = nnx.value_and_grad(lambda layer, x: jax.tree.leaves(layer(x))[0].sum())
    for layer in (trees, jtrees.nn.LatentTree(4, 2, penalty=0.1, rngs=nnx.Rngs(0))):
        value, slope = total(layer, jnp.asarray(X, jnp.float32))
        assert all(np.isfinite(a).all() for a in jax.tree.leaves((value, slope)))


def cases():
    """Functions without arguments by name."""
    results = {}
    for name, recipe in RECIPES.items():
        for task, y in (("regression", Y), ("classification", CLASS)):
            for held_out in (False, True):
                title = f"{name} {task} {'validation' if held_out else 'alone'}"
                results[title] = partial(fitted, recipe, y, task, held_out)
    results["GET linear leaves"] = partial(fitted, GET.replace(leaves="linear"), Y, "regression", False)
    for task in ("regression", "classification"):
        results[f"bandit {task}"] = partial(bandit, task == "regression")
        results[f"sweep {task}"] = partial(sweep, task)
    for name in ("TreeRegressor", "TreeClassifier"):
        results[f"{name} numbers"] = partial(estimator, name, False)
        results[f"{name} table"] = partial(estimator, name, True, validation_fraction=0.3)
    for loss in (jtrees.losses.Quantile(0.5), jtrees.losses.Poisson(), jtrees.losses.Huber()):
        task = jtrees.Regression(None, loss)
        results[f"loss {type(loss).__name__}"] = partial(fitted, GET, 1 + Y - Y.min(), task, False)
    rest = {"LatentClustering": clustering, "loop": loop, "split": on_a_split, "explain": explained, "layers": layers}
    return results | rest


def error_of(case):
    """The error that a case ends with, in one line, or None."""
    try:
        case()
    except Exception as error:  # of any kind: the test shows it
        place, trace = None, error.__traceback__
        while trace is not None:
            file = trace.tb_frame.f_code.co_filename
            place = f"{Path(file).name}:{trace.tb_lineno}" if "/jtrees/" in file else place
            trace = trace.tb_next
        return f"{type(error).__name__}: {str(error)[:300]} ({place})"
    return None


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=BehindBaselineWarning)  # a few steps make no good trees
    for title, case in cases().items():
        if all(word in title.split() for word in sys.argv[1:]):
            print(json.dumps([title, error_of(case)]), flush=True)
