"""Relations between fits, on tables that break things: units, dtypes, weights and the order of rows change nothing."""

from functools import cache
from typing import Any
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from jtrees import training
from jtrees.data import Scaling
from jtrees.tables import checked_table
from tests import nasty, recipes, sweeps
from tests.test_battery import CLASS, METHODS

pytestmark = pytest.mark.usefixtures("standard_promotion")  # Adam; see the fixture

KEY = jax.random.key(0)
EPS = float(np.finfo(np.float32).eps)
RECIPES = {name: recipe for name, recipe in recipes.RECIPES.items() if name != "Refined"}  # it needs rows held out
RECIPES |= {
    "Boosted": recipes.BOOSTED.replace(patience=None),  # likewise
    "GET, linear": recipes.LINEAR.replace(starts=2),
    "LatentTree, z": recipes.RECIPES["LatentTree"].replace(inputs="z"),
    "TEL, hard": recipes.TEL.replace(hard=True),
}
# Tables up to 32 rows are one shape, as they are padded: one program of a recipe for all of them.
TABLES: dict[str, Any] = {
    "regression": {},
    "classification": {"classes": 3},
    "wide": {"kinds": 8, "width": 250, "rows": (20, 31)},
    "many classes": {"classes": 50, "rows": (160,)},
    "two targets": {"outputs": 2},
    "one column": {"kinds": 1},
}
# A clustering predicts its first feature, which must vary; slopes of linear leaves must be float32 numbers.
ONLY: dict[str, Any] = {
    "LatentClustering": {"first": "normal"},
    "GET, linear": {"first": "outlier", "without": ("huge", "tiny"), "rows": (12, 20, 31)},
    "DGT": {"first": "offset"},
}


class Case:
    """A recipe, a table of a kind, and the fit to the table, which all relations share."""

    def __init__(self, name: str, kind: str, number: int):
        seed = zlib.crc32(name.encode()) % 1000 + number  # each recipe has tables of its own
        self.table = nasty.table(seed, **TABLES[kind] | ONLY.get(name, {}))
        self.name, self.recipe, self.clusters = name, RECIPES[name], name == "LatentClustering"
        self.targets = self.table.x[:, :1] if self.clusters else self.table.y
        self.base = self.fit()
        self.predictions = self.base.predict(self.table.x)

    def fit(self, **changes: Any) -> Any:
        """A fit to the table with another ``x``, ``y`` or ``weight``."""
        x, y, weight = (changes.get(name, getattr(self.table, name)) for name in ("x", "y", "weight"))
        return jtrees.fit(self.recipe, x, y, key=KEY, task=self.table.task, sample_weight=weight)


case = cache(Case)


def same(predictions: Any, expected: Any, label: str = "") -> None:
    """The same numbers, bit for bit."""
    np.testing.assert_array_equal(predictions, expected, err_msg=label)


def precision(case: Case) -> None:
    """The same values in another dtype are the same table."""
    t = case.table
    for dtype in (np.float32, np.int64):
        x = (np.clip(t.x, -(2**40), 2**40) if dtype == np.int64 else t.x).astype(dtype)
        x[0, 0] = x[-1, 0] + 1  # which may have become constant, as the target of a clustering must not
        y = t.y.astype(np.float32)
        y = t.y if t.task == "classification" or not np.ptp(y, axis=0).all() else y
        same(case.fit(x=x, y=y).predict(x), case.fit(x=wide(x), y=wide(y)).predict(wide(x)), str(dtype))


def reported_loss(case: Case) -> None:
    """The loss reported is that of the predictions; that of linear leaves, meant for new rows, is no lower."""
    t = case.table
    row_losses = losses_of(case.predictions, case.targets, slice(None) if t.weight is None else t.weight > 0)
    loss = np.average(row_losses, weights=t.weight)
    if case.name == "GET, linear":
        assert loss <= 1.001 * case.base.loss + (100 * EPS * np.abs(t.y).max()) ** 2
    else:
        np.testing.assert_allclose(case.base.loss, loss, rtol=1e-9)


def weights(case: Case) -> None:
    """Only the ratios of weights matter, equal weights are none, and a row of weight 0 is not there."""
    t = case.table
    same(case.fit(weight=np.full(len(t.x), 3.0)).predict(t.x), case.fit(weight=None).predict(t.x), "equal weights")
    if t.weight is not None:
        same(case.fit(weight=8 * t.weight).predict(t.x), case.predictions, "weights times eight")
        rows = t.weight > 0
        same(case.fit(x=t.x[rows], y=t.y[rows], weight=t.weight[rows]).predict(t.x), case.predictions, "weight 0")


def units(case: Case) -> None:
    """Powers of two as units of the features and of the targets change no other bit."""
    t, rng = case.table, np.random.default_rng(0)
    factor = np.full(t.x.shape[1], 4.0) if case.clusters else 2.0 ** rng.integers(-8, 9, t.x.shape[1])
    same(case.fit(x=factor * t.x).predict(factor * t.x), (4 if case.clusters else 1) * case.predictions, "units of x")
    if t.task == "regression" and not case.clusters:
        unit = 2.0 ** rng.integers(-8, 9, t.y.shape[1:])
        fit = case.fit(y=unit * t.y)
        same(fit.predict(t.x), unit * case.predictions, "units of y")
        # The loss of several targets is on scaled targets.
        np.testing.assert_allclose(fit.loss, (unit**2 if t.y.ndim == 1 else 1) * case.base.loss, rtol=1e-6)


RELATIONS = (precision, reported_loss, weights, units)


def cases() -> Any:
    """Each relation with each recipe: with tables of regression, of classes where it takes them, and another kind."""
    rest = ("wide", "two targets", "many classes", "one column")
    for i, name in enumerate(RECIPES):
        takes_classes = name not in ("LatentClustering", "GET, linear")
        other = rest[i % 4] if takes_classes else rest[i % 2]
        for relation in RELATIONS:
            for kind in ("regression", *["classification"] * takes_classes, other):
                is_slow = name in ("GET", "DGT") and kind in ("regression", "classification")
                yield pytest.param(relation, name, kind, marks=pytest.mark.slow if is_slow else pytest.mark.wide)


@pytest.mark.parametrize(
    ("relation", "name", "kind"), list(cases()), ids=lambda value: getattr(value, "__name__", value)
)
def test_relations(relation, name, kind):
    for number in range(2 if kind in ("regression", "classification") else 1):
        relation(case(name, kind, number))


def losses_of(predictions: np.ndarray, y: np.ndarray, rows: Any) -> np.ndarray:
    """Loss of each row; of several targets the mean, in units of their range in the rows trained on."""
    if y.dtype.kind == "i":
        return -np.log(np.maximum(np.float64(predictions[np.arange(len(y)), y]), np.finfo(np.float32).tiny))
    error = (np.float64(predictions) - y).reshape(len(y), -1)
    return np.square(error / (np.ptp(y[rows], axis=0) if error.shape[1] > 1 else 1)).mean(1)


def wide(a: Any) -> np.ndarray:
    """In float64."""
    return np.asarray(a, np.float64)


def scaled(seed: int, classes: int) -> training.Batch:
    """A table scaled and padded to 32 rows, the weights of mean 1."""
    t = nasty.table(seed, classes=classes)
    table = checked_table(t.x, t.y, t.weight, t.task)
    return training.state.normalised(jax.tree.map(jnp.asarray, Scaling.fit(table).batch(table)))


def otherwise(b: training.Batch) -> Any:
    """Pairs of batches of 32 rows that say the same: rows in another order; others of weight 0; and half of the rows
    twice, or with twice the weight.
    """
    subset = lambda rows: training.Batch(b.x[rows], b.y[rows], b.weight[rows])
    yield b, subset(np.random.default_rng(0).permutation(32))
    yield b, b._replace(x=jnp.where(b.weight[:, None] > 0, b.x, 9), y=jnp.where(b.weight > 0, b.y, b.y[0]))
    yield subset(np.arange(32) % 16), b._replace(weight=jnp.where(jnp.arange(32) < 16, 2 * b.weight, 0))


def near(a: Any, b: Any, tolerance: float) -> None:
    """Two pytrees, array by array, up to a part of the largest number."""
    for single, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(single, other, rtol=0, atol=tolerance * max(0.01, float(jnp.abs(single).max())))


@pytest.mark.parametrize("name", sweeps.quick(METHODS, ("dgt",), ("get, linear leaves", "tel", "nongreedy")))
def test_order_and_repetition_of_rows_change_no_method(name):
    make, numbers, y = METHODS[name]
    method, classes = make(numbers[0]), 3 if y is CLASS else 0
    init = jax.jit(lambda batch: method.project(method.init(batch, key=KEY)))
    loss = lambda params, batch: method.loss(params, batch, key=KEY, step=jnp.int32(0))
    evaluate = jax.jit(jax.value_and_grad(loss, has_aux=True))
    for seed in range(20):
        batch = scaled(seed, classes)
        params = init(batch)
        for i, pair in enumerate(otherwise(batch)):
            ((loss, score), slope), ((other_loss, other_score), other_slope) = (
                evaluate(params, single) for single in pair
            )
            near((loss, slope), (other_loss, other_slope), 1e-4)  # float32
            if i < 2 or name not in ("get, linear leaves", "get, classes"):  # whose score knows how many rows there are
                near(score, other_score, 1e-3)
