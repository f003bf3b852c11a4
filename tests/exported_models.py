"""A small fitted model of each task, for a raw table with gaps and text, and a thousand other rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from test_export import expected_of, raw_table

import jtrees
from jtrees import ObliqueTree, losses
from jtrees.export.program import program_of
from jtrees.leaves import Linear

_TREE = jtrees.GET(depth=3, starts=1, epochs=5)
_BOOSTED = jtrees.Boosted(_TREE.replace(depth=2), rounds=4, patience=None)
_CLASS = {"task": "classification"}
_QUANTILES = {"task": jtrees.Regression(loss_function=losses.Quantile((0.1, 0.5, 0.9)))}
_CLASSES = lambda count: lambda y, noise: np.digitize(y, np.quantile(y, np.arange(1, count) / count))
_SAME = lambda y, noise: y
# The recipe, the options of fit, and the targets from a signal and a generator.
FITTED = {
    "regression": (_TREE.replace(leaves="constant"), {}, _SAME),
    "linear leaves": (_TREE.replace(leaves="linear"), {}, _SAME),
    "boosted": (_BOOSTED, {}, _SAME),
    "two classes": (_TREE, _CLASS, _CLASSES(2)),
    "three classes": (_BOOSTED, _CLASS, _CLASSES(3)),
    "quantiles": (_BOOSTED, _QUANTILES, lambda y, noise: 1e4 + y + noise.normal(size=len(y))),
    "counts": (
        _BOOSTED,
        {"task": jtrees.Regression(loss_function="poisson")},
        lambda y, noise: noise.poisson(np.exp(y)),
    ),
    "array": (_TREE, {}, _SAME),
}


@functools.cache
def fitted(name):
    """A model, and rows with gaps and levels that it does not know."""
    recipe, options, targets = FITTED[name]
    frame, y = raw_table()
    rows, _ = raw_table(1000, seed=1, other=True)
    if name == "array":
        numbers = ["living area", "int"]
        x, rows = frame[numbers].fillna(50).to_numpy(), rows[numbers].fillna(50).to_numpy()
    else:
        x, rows = (table.drop(columns=["sold", "same"]) for table in (frame, rows))
    y = targets(np.asarray(y, float), np.random.default_rng(0))
    return jtrees.fit(recipe, x, y, key=jax.random.key(0), **options).model, rows


def frame_of(rows):
    """Rows as a DataFrame, under the names that exports give the columns of an array."""
    return (
        rows if isinstance(rows, pd.DataFrame) else pd.DataFrame(rows, columns=[f"x{j}" for j in range(rows.shape[1])])
    )


def predictions(model, rows):
    """The leaf of each row in each tree, ``(n, trees)``, and predictions in double precision, ``(n, k)``."""
    if isinstance(model, jtrees.tables.FrameModel):
        return expected_of(model, rows)
    program = program_of(model)
    return program.leaf(rows), program.predict(rows)


def of_frame(frame, y, **options):
    """A model with the features of a table as predictions, rounded to single precision."""
    encoder, features = jtrees.tables.TableEncoder.fit(frame, y, **options)
    p = features.shape[1]
    leaves = Linear(jnp.stack([jnp.eye(p)] * 2), jnp.zeros((2, p)))
    return jtrees.tables.FrameModel(ObliqueTree(jnp.zeros((1, p)), -jnp.ones(1), leaves), encoder)
