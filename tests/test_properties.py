"""Relations that hold on every table, for every recipe, both estimators and the training from shards.

A relation is a function of a :class:`Run`: a way to fit, and a table of ``nasty.py``. Where one fails, the message has
the call that makes it fail again.
"""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
import pickle
import re
import tempfile
from typing import Any, NamedTuple
import zlib

import jax
import jax.numpy as jnp
from large_runs import within
import nasty
import numpy as np
import pytest
import rules as reader
from sklearn.utils import check_random_state
import sweeps
from test_battery import CLASS, METHODS, RECIPES as BATTERY, with_number

import jtrees
from jtrees import leaves, training
from jtrees.data import Scaling, Table
from jtrees.estimators import TreeClassifier, TreeRegressor
from jtrees.search.fit import Split, dataset_of, fits_of
from jtrees.search.monitor import Monitor
from jtrees.tables import checked_table
from jtrees.text import names_of, split_text

pytestmark = pytest.mark.usefixtures("standard_promotion")  # Adam; see the fixture

KEY = jax.random.key(0)
EPS = float(np.finfo(np.float32).eps)
VARIANTS = {
    "GET, linear": BATTERY["GET"][0].replace(leaves="linear"),
    "LatentTree, z": BATTERY["LatentTree"][0].replace(inputs="z"),
    "TEL, hard": BATTERY["TEL"][0].replace(hard=True),
}
RECIPES = {name: recipe for name, (recipe, _, _) in BATTERY.items()} | VARIANTS
RECIPES["Boosted"] = RECIPES["Boosted"].replace(patience=None)  # as tables are small
del RECIPES["Refined"]  # likewise: it needs rows held out
WAYS = (*RECIPES, "estimator", "train_large")
HELD_OUT = 100  # rows by which train_large evaluates


class Fitted(NamedTuple):
    """What every way to fit ends in; ``predict`` gives class probabilities in classification."""

    predict: Any
    loss: float
    model: Any
    tree: Any
    made: Any

    @classmethod
    def of(cls, made: Any) -> "Fitted":
        """Of a fit or an estimator."""
        if isinstance(made, jtrees.FitResult):
            return cls(made.model.predict, made.loss, made.model, made.tree, made)
        predict = made.predict if isinstance(made, TreeRegressor) else made.predict_proba
        return cls(predict, made.loss_, made.model_, made.tree_, made)


@dataclass
class Run:
    """A way to fit, by name (a recipe's, ``"estimator"`` or ``"train_large"``, both of these with DGT), and a table."""

    way: str
    table: nasty.NastyTable

    def fit(self, **changes: Any) -> Fitted:
        """A fit to the table with another ``x``, ``y`` or ``weight``."""
        task = self.table.task
        x, y, weight = (changes.get(name, getattr(self.table, name)) for name in ("x", "y", "weight"))
        if self.way == "estimator":
            kind = TreeRegressor if task == "regression" else TreeClassifier
            return Fitted.of(kind(RECIPES["DGT"], random_state=0).fit(x, y, sample_weight=weight))
        if self.way == "train_large":
            return Fitted.of(from_shards(x, y, task))
        return Fitted.of(jtrees.fit(RECIPES[self.way], x, y, key=KEY, task=task, sample_weight=weight))

    @cached_property
    def base(self) -> Fitted:
        """The fit to the table as it is."""
        return self.fit()

    @cached_property
    def predictions(self) -> np.ndarray:
        """The predictions of that for the table."""
        return self.base.predict(self.table.x)

    @property
    def clusters(self) -> bool:
        """Whether the first feature takes the place of y."""
        return self.way == "LatentClustering"

    @property
    def targets(self) -> np.ndarray:
        """What is fitted: y, or for a clustering its first feature."""
        return self.table.x[:, :1] if self.clusters else self.table.y

    @property
    def trees(self) -> list[jtrees.ObliqueTree]:
        """The trees that the model consists of."""
        model = self.base.model
        if isinstance(model, jtrees.Forest) and isinstance(model.trees, jtrees.ObliqueTree):
            return [model[i] for i in range(len(model))]
        return [] if self.base.tree is None else [self.base.tree]


def from_shards(x: np.ndarray, y: np.ndarray, task: str) -> jtrees.FitResult:
    """A fit by experiments.train_large."""
    with tempfile.TemporaryDirectory() as folder:
        (data := Path(folder, "data")).mkdir()
        np.save(data / "rows.npy", np.column_stack([x, y]))
        options = (
            "--block 50 --batch 50 --held-out 2 --epochs 10 --method dgt --set depth=2 widths=[] learning_rate=0.03"
        )
        within(Path(folder, "run"), "--data", data, "--task", task, *options.split())
        return jtrees.load(Path(folder, "run", "model.jtrees"))


def same(predictions: Any, expected: Any, what: str = "") -> None:
    """The same numbers, bit for bit."""
    np.testing.assert_array_equal(predictions, expected, err_msg=what)


# --- Relations -------------------------------------------------------------------------------------------------------


def precision(run: Run) -> None:
    """The same values in another dtype are the same table."""
    t = run.table
    for dtype in (np.float32, np.int64):
        x = (np.clip(t.x, -(2**40), 2**40) if dtype == np.int64 else t.x).astype(dtype)
        x[0, 0] = x[-1, 0] + 1  # which may have become constant, as the target of a clustering must not
        y = t.y.astype(np.float32)
        y = t.y if t.task == "classification" or not np.ptp(y, axis=0).all() else y
        same(run.fit(x=x, y=y).predict(x), run.fit(x=wide(x), y=wide(y)).predict(wide(x)), str(dtype))


def one_row(run: Run) -> None:
    """The prediction for a row is the same alone, in any order, and beside any others."""
    x, order = run.table.x, np.random.default_rng(0).permutation(len(run.table.x))
    same(run.base.predict(x[order]), run.predictions[order], "in another order")
    same(run.base.predict(np.tile(x, (20, 1))), np.concatenate([run.predictions] * 20), "twenty times")
    for i in order[:3]:
        same(run.base.predict(x[i : i + 1])[0], run.predictions[i], f"row {i} alone")


def loss_recomputed(run: Run) -> None:
    """The loss reported is that of the predictions; that of linear leaves, meant for new rows, is no lower."""
    t, held = run.table, slice(-HELD_OUT if run.way == "train_large" else 0, None)
    each = losses_of(run.predictions, run.targets, slice(None) if t.weight is None else t.weight > 0)
    loss = np.average(each[held], weights=None if t.weight is None else t.weight[held])
    if run.way == "GET, linear":
        assert loss <= 1.001 * run.base.loss + (100 * EPS * np.abs(t.y).max()) ** 2, (loss, run.base.loss)
    else:  # estimators make float32 probabilities sum to one; shards may be of float32
        rtol = 1e-6 if run.way in ("estimator", "train_large") else 1e-9
        np.testing.assert_allclose(run.base.loss, loss, rtol=rtol)


def weights(run: Run) -> None:
    """Only the ratios of weights matter, equal weights are none, and a row of weight 0 is not there."""
    t = run.table
    same(run.fit(weight=np.full(len(t.x), 3.0)).predict(t.x), run.fit(weight=None).predict(t.x), "equal weights")
    if t.weight is not None:
        same(run.fit(weight=8 * t.weight).predict(t.x), run.predictions, "weights times eight")
        left = t.weight > 0
        same(run.fit(x=t.x[left], y=t.y[left], weight=t.weight[left]).predict(t.x), run.predictions, "without weight 0")


def units(run: Run) -> None:
    """Powers of two as units of the features and of the targets change no other bit."""
    t, rng = run.table, np.random.default_rng(0)
    factor = np.full(t.x.shape[1], 4.0) if run.clusters else 2.0 ** rng.integers(-8, 9, t.x.shape[1])
    same(run.fit(x=factor * t.x).predict(factor * t.x), (4 if run.clusters else 1) * run.predictions, "units of x")
    if t.task == "regression" and not run.clusters:
        unit = 2.0 ** rng.integers(-8, 9, t.y.shape[1:])
        fit = run.fit(y=unit * t.y)
        same(fit.predict(t.x), unit * run.predictions, "units of y")
        # Of several targets the loss is on scaled ones.
        np.testing.assert_allclose(fit.loss, (unit**2 if t.y.ndim == 1 else 1) * run.base.loss, rtol=1e-6)


def shifts(run: Run) -> None:
    """Where features and targets are counted from does not matter, up to 2**26 times their spread."""
    t = run.table
    x, *x_shifts = counted(t.x)
    y, *y_shifts = (t.y, 0, 0) if t.task == "classification" else counted(t.y)
    near = run.fit(x=x, y=y, weight=None).predict(x)  # under weights the spread is another
    spread = 1 if t.task == "classification" else np.ptp(x[:, 0] if run.clusters else y, axis=0)
    for x_shift, y_shift in list(zip(x_shifts, y_shifts, strict=True))[run.way == "train_large" :]:  # which takes long
        predictions = run.fit(x=x + x_shift, y=y + y_shift, weight=None).predict(x + x_shift)
        off = np.abs(predictions - (x_shift[0] if run.clusters else y_shift) - near) / spread
        # Columns far from zero may be scaled to another last bit. Training makes more of it, and a row that lies on a
        # threshold goes the other way.
        assert (off > 0.01).reshape(len(x), -1).any(1).mean() <= 0.25, off


def constant_column(run: Run) -> None:
    """A column that is constant in training takes no part, whatever it holds there and later."""
    x, predictions = run.table.x.copy(), []
    for value in (0.1, 1e30):
        x[:, -1] = value
        fit = run.fit(x=x)
        predictions += [fit.predict(np.column_stack([x[:, :-1], np.full(len(x), now)])) for now in (value, 0, -7e29)]
    for others in predictions:
        same(others, predictions[0])


def arrays(run: Run) -> None:
    """Weights, bias, leaves and origin, evaluated in NumPy, are the tree."""
    x = run.table.x
    for tree in run.trees:
        sure, leaf, predictions, size = by_hand(tree, x)
        assert (~sure).sum() <= 0.1 * len(x) + 2
        same(np.asarray(tree.leaf_index(x))[sure], leaf[sure])
        off = np.abs(tree.predict(x) - predictions)[sure]
        assert (off <= (x.shape[1] + 4) * EPS * size[sure] + 1e-37).all(), off


def rules(run: Run) -> None:
    """The text of a tree, evaluated in float64, is the tree."""
    x, columns = run.table.x, {f"x{i}": column for i, column in enumerate(run.table.x.T)}
    for tree in run.trees:
        sure, _, predictions, size = by_hand(tree, x)
        _, written = reader.leaves_and_answers(tree.to_text(digits=17), columns)
        off = np.abs(written.reshape(predictions.shape) - predictions)[sure]
        assert (off <= 1e-13 * size[sure]).all(), off
        score, size = scores(tree, x)
        for node in np.flatnonzero(tree.splits):
            terms, _, threshold = split_text(tree, node, names_of(tree, None), 17).partition(" > ")
            off = np.abs(reader.sum_of(terms, columns) - float(threshold) - score[:, node])
            assert (off <= 1e-13 * size[:, node]).all(), off


def saved(run: Run) -> None:
    """What is saved and loaded, or pickled, predicts the same; in the other byte order, too."""
    x, model = run.table.x, run.base.model
    same(Fitted.of(pickle.loads(pickle.dumps(run.base.made))).predict(x), run.predictions)
    swapped = jax.tree.map(lambda a: nasty.LAYOUTS["byte-swapped"](np.asarray(a)) if np.ndim(a) else a, model)
    with tempfile.TemporaryDirectory() as folder:
        for one in (model, swapped):
            jtrees.save(one, Path(folder, "model.jtrees"))
            same(jtrees.load(Path(folder, "model.jtrees")).predict(x), model.predict(x))


def swept(run: Run) -> None:
    """A sweep of one combination is the fit."""
    t = run.table
    options: Any = {"task": t.task, "sample_weight": t.weight}
    result = jtrees.sweep(RECIPES[run.way], t.x, t.y, key=KEY, seeds=(3,), **options)
    alone = jtrees.fit(RECIPES[run.way], t.x, t.y, key=jax.random.fold_in(KEY, 3), **options)
    same(result.fit.model.predict(t.x), alone.model.predict(t.x))
    assert result.losses.item() == result.fit.loss == alone.loss


def tuned(run: Run) -> None:
    """``tune`` fits the options chosen, and a trial's loss is the mean over the rows left out, by weight."""
    x, y, task = run.table.x, run.table.y, run.table.task
    _, name, values = BATTERY[run.way.partition(",")[0]]
    recipe, weight = RECIPES[run.way], 2.0 ** np.random.default_rng(0).integers(-3, 4, len(x))
    split_key, search_key, fit_key = jax.random.split(KEY, 3)
    folds = np.array_split(np.asarray(jax.random.permutation(split_key, len(x))), 2)
    trained_on = [run.targets[rows] for rows in reversed(folds)]
    if min(map(len, trained_on)) < 2 or (task == "regression" and not all(np.ptp(y, axis=0).all() for y in trained_on)):
        return  # too few rows
    options: Any = {"task": task, "sample_weight": weight}
    report = (result := jtrees.tune(recipe, x, y, key=KEY, grid={name: values}, validation=2, **options)).report
    chosen = with_number(recipe, name, report.tuning.options[name])
    same(result.model.predict(x), jtrees.fit(chosen, x, y, key=fit_key, **options).model.predict(x))
    recipes, dataset = [with_number(recipe, name, value) for value in values], dataset_of(recipe, x, y, weight, task)
    splits = [Split(dataset.without(rows).table()) for rows in folds]
    fits = fits_of(recipes, [search_key], splits, Monitor())
    for trial, value in zip(report.tuning.trials, values, strict=True):
        each = np.zeros(len(x))
        for rows in folds:
            each[rows] = losses_of(next(fits)[0].model.predict(x), run.targets, slice(None))[rows]
        assert trial.options == {name: value}
        np.testing.assert_allclose(trial.loss, np.average(each, weights=weight), rtol=1e-6)


def estimator_is_fit(run: Run) -> None:
    """An estimator is the fit, with the key of its seed, to the rows that have weight."""
    t, key = run.table, jax.random.key(int(check_random_state(0).randint(np.iinfo(np.int32).max)))
    left = np.full(len(t.x), True) if t.weight is None else t.weight > 0
    weight = None if t.weight is None else t.weight[left]
    fit = jtrees.fit(RECIPES["DGT"], t.x[left], t.y[left], key=key, task=t.task, sample_weight=weight)
    same(run.base.model.predict(t.x), fit.model.predict(t.x))
    np.testing.assert_allclose(
        run.predictions, fit.model.predict(t.x), rtol=1e-6
    )  # probabilities are made to sum to one
    assert run.base.loss == fit.loss


OF_SHARDS = [one_row, loss_recomputed, units, shifts, constant_column, arrays, rules, saved]
OF_ESTIMATORS = [precision, weights, *OF_SHARDS, estimator_is_fit]
OF_RECIPES = [precision, weights, *OF_SHARDS, swept, tuned]
OF_SEARCHES = (swept, tuned)  # several programs each, which look at no target: with tables of regression alone
EXCEPT = {(shifts, "NonGreedy"): "steps of size 1 on a piecewise constant loss make another tree of a last bit"}


# --- Oracles in NumPy float64 ----------------------------------------------------------------------------------------


def losses_of(predictions: np.ndarray, y: np.ndarray, rows: Any) -> np.ndarray:
    """Loss of each row; of several targets the mean, in units of their range in the rows trained on."""
    if y.dtype.kind == "i":
        return -np.log(np.maximum(np.float64(predictions[np.arange(len(y)), y]), np.finfo(np.float32).tiny))
    error = (np.float64(predictions) - y).reshape(len(y), -1)
    return np.square(error / (np.ptp(y[rows], axis=0) if error.shape[1] > 1 else 1)).mean(1)


def counted(a: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Columns counted from their least value, on a grid on which no shift is rounded; and two shifts, to where they
    were, and far away.
    """
    power = lambda size: np.exp2(np.ceil(np.log2(size)))
    ends, spread = np.ptp(a, axis=0), np.subtract(*np.quantile(a, (0.75, 0.25), axis=0))
    far = np.minimum(2.0**26 * power(np.where(spread > 0, spread, np.where(ends > 0, ends, 1))), 2.0**124)
    grid = power(np.abs(a).max(0) + far) * 2.0**-52
    a, low = (np.round(b / grid) * grid for b in (a, a.min(0)))
    assert all((a - low + shift - shift == a - low).all() for shift in (low, far))
    return a - low, low, far


def wide(a: Any) -> np.ndarray:
    """In float64."""
    return np.asarray(a, np.float64)


def scores(tree: jtrees.ObliqueTree, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scores of all splits, ``(n, nodes)``, and the size of the numbers that each is a sum of."""
    z = x if tree.origin is None else x - wide(tree.origin.x)
    weight, bias = wide(tree.weights), wide(tree.bias)
    return z @ weight.T + bias, np.abs(z) @ np.abs(weight).T + np.abs(bias)


def by_hand(tree: jtrees.ObliqueTree, x: np.ndarray) -> tuple[np.ndarray, ...]:
    """Of each row: whether rounding to float32 can change none of its turns; its leaf; what that predicts, and the size
    of the numbers that this is a sum of.
    """
    score, size = scores(tree, x)
    node, sure, rows = np.zeros(len(x), int), np.full(len(x), True), np.arange(len(x))
    for _ in range(tree.depth):
        sure &= (np.abs(score) > (x.shape[1] + 3) * EPS * size)[rows, node] | ~wide(tree.weights)[node].any(1)
        node = 2 * node + 1 + (score[rows, node] > 0)
    leaf = node - score.shape[1]
    zero = wide(0 if tree.origin is None or tree.origin.y is None else tree.origin.y)
    z = x if tree.origin is None else x - wide(tree.origin.x)
    if not isinstance(tree.leaves, leaves.Linear):
        values = wide(tree.leaves.values)[leaf]
        return sure, leaf, values + zero, np.abs(values) + np.abs(zero)
    names = ("coefficients", "intercept", "lower", "upper")
    slopes, at_0, low, high = (wide(getattr(tree.leaves, name))[leaf] for name in names)
    of = lambda slopes, z: np.einsum("np...,np->n...", slopes, z)
    size = of(np.abs(slopes), np.abs(z)) + np.abs(at_0) + np.abs(zero)
    return sure, leaf, np.clip(of(slopes, z) + at_0, low, high) + zero, size


# --- Tests -----------------------------------------------------------------------------------------------------------

# Tables up to 32 rows are one shape, as they are padded: one program of a recipe for all of them.
TABLES: dict[str, Any] = {
    "regression": {},
    "classification": {"classes": 3},
    "wide": {"kinds": 8, "width": 250, "rows": (20, 31)},
    "many classes": {"classes": 50, "rows": (160,)},
    "two targets": {"outputs": 2},
    "one column": {"kinds": 1},
    "long": {"rows": (600,)},
    "long, of classes": {"rows": (600,), "classes": 3},
}
# What a clustering predicts must vary, and slopes of linear leaves must be float32 numbers. Where rows are read in a
# wrong order, a first column of few values shows it; rounded origins, one far from zero.
ONLY: dict[str, Any] = {
    "LatentClustering": {"first": "normal"},
    "GET, linear": {"first": "outlier", "without": ("huge", "tiny"), "rows": (12, 20, 31)},
    "estimator": {"first": "booleans"},
    "DGT": {"first": "offset"},
}
WITHOUT_CLASSES = ("LatentClustering", "GET, linear")
LARGE = ("NonGreedy", "Polished", "GET, linear")  # programs that take long to compile: one shape less
QUICK = ("GET", "DGT", "LatentTree", "Bagged", "estimator")
SLOW = ("regression", "classification", "one column")  # of these ways; other kinds of tables are wide
DOWN = {  # what takes long, a tier lower
    (tuned, "GET"): pytest.mark.slow,
    (tuned, "LatentTree"): pytest.mark.wide,
    (precision, "LatentTree"): pytest.mark.wide,
    (precision, "Bagged"): pytest.mark.wide,
}


def kinds_of(way: str) -> list[str]:
    """Kinds of tables for a way: of regression, and one of the others, in turn; for the quick ones of classes, too."""
    others = ["wide", "two targets"] + ["one column"] * (way != "LatentClustering")  # which needs two
    others += ["many classes"] * (way not in WITHOUT_CLASSES)
    with_classes = way not in (*WITHOUT_CLASSES, *VARIANTS)
    if way in LARGE:
        return ["regression", *(["classification"] if with_classes else [])]
    turn = others[WAYS.index(way) % len(others)]
    with_classes &= turn != "many classes" and way in QUICK
    return ["regression", *(["classification"] if with_classes else []), turn]


def cases() -> Any:
    """Each relation with each way and kind of table; those that are not quick marked as slow or wide."""
    for way in WAYS[:-1]:
        for kind in kinds_of(way):
            others = pytest.mark.slow if way in QUICK and kind in SLOW else pytest.mark.wide
            of_classes = way in ("DGT", "estimator") and kind == "classification"
            quick = of_classes or (way in ("GET", "DGT", "estimator") and kind == "regression")
            for relation in OF_ESTIMATORS if way == "estimator" else OF_RECIPES:
                if (relation, way) not in EXCEPT and (kind == "regression" or relation not in OF_SEARCHES):
                    marks = DOWN.get((relation, way), () if quick else others)
                    yield pytest.param(relation, way, kind, marks=marks)
    for relation in OF_SHARDS:
        marks = pytest.mark.slow if relation is shifts else pytest.mark.wide
        yield pytest.param(relation, "train_large", "long", marks=marks)
    for relation in (loss_recomputed, arrays, rules):
        yield pytest.param(relation, "train_large", "long, of classes", marks=pytest.mark.wide)


@cache
def run_of(way: str, kind: str, number: int) -> Run:
    """A way and a table of a kind, whose fit all relations share; each way has tables of its own."""
    table = nasty.table(zlib.crc32(way.encode()) % 1000 + number, **TABLES[kind] | ONLY.get(way, {}))
    return Run(way, replace(table, weight=None) if way == "train_large" else table)


@pytest.mark.slow
@pytest.mark.parametrize(("relation", "way", "kind"), list(cases()), ids=lambda of: getattr(of, "__name__", of))
def test_relations(relation, way, kind):
    count = 2 if way in QUICK else 6 if way == "GET, linear" else 3  # that is the default of TreeRegressor
    count = count if kind in ("regression", "classification") else 1
    for number in range(count):
        run = run_of(way, kind, number)
        try:
            relation(run)
        except Exception as error:
            again = f"test_properties.{relation.__name__}(test_properties.run_of({way!r}, {kind!r}, {number}))"
            raise AssertionError(f"{relation.__doc__} {type(error).__name__} in {again}\n{run.table.about}") from error


def test_every_recipe_and_every_kind_is_here():
    """The battery's own table is complete by a test there."""
    assert set(BATTERY) - {"Refined"} <= set(WAYS)
    about = [run_of(way, "regression", number).table.about for way in QUICK for number in range(2)]
    for kind in (*nasty.COLUMNS, *nasty.TARGETS, *nasty.WEIGHTS):
        assert any(re.search(rf"\b{kind}(,|;|$)", one) for one in about), kind


# --- Methods and scalings: where training would make much of a last bit ----------------------------------------------


def scaled(seed: int, classes: int) -> training.Batch:
    """A table scaled and padded to 32 rows, the weights of mean 1."""
    t = nasty.table(seed, classes=classes)
    table = checked_table(t.x, t.y, t.weight, t.task)
    return training.state.normalised(jax.tree.map(jnp.asarray, Scaling.fit(table).batch(table)))


def otherwise(b: training.Batch) -> Any:
    """Pairs of batches of 32 rows that say the same: rows in another order; others of weight 0; and half of the rows
    twice, or with twice the weight.
    """
    of = lambda rows: training.Batch(b.x[rows], b.y[rows], b.weight[rows])
    yield b, of(np.random.default_rng(0).permutation(32))
    yield b, b._replace(x=jnp.where(b.weight[:, None] > 0, b.x, 9), y=jnp.where(b.weight > 0, b.y, b.y[0]))
    yield of(np.arange(32) % 16), b._replace(weight=jnp.where(jnp.arange(32) < 16, 2 * b.weight, 0))


def near(a: Any, b: Any, tolerance: float) -> None:
    """Two pytrees, array by array, up to a part of the largest number."""
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * max(0.01, float(jnp.abs(one).max())))


@pytest.mark.parametrize("name", sweeps.quick(METHODS, ("dgt",)))
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
            ((loss, score), slope), ((other_loss, other_score), other_slope) = (evaluate(params, one) for one in pair)
            near((loss, slope), (other_loss, other_slope), 1e-4)  # float32
            if i < 2 or name not in ("get, linear leaves", "get, classes"):  # whose score knows how many rows there are
                near(score, other_score, 1e-3)


def test_order_and_repetition_of_rows_change_no_scaling():
    for t in map(nasty.table, range(50)):
        table, rng = checked_table(t.x, t.y, t.weight, t.task), np.random.default_rng(0)
        count = rng.integers(1, 4, len(table.x))
        again = table.replace(weight=None).rows(np.repeat(np.arange(len(count)), count))
        same_rows(table, table.rows(rng.permutation(len(count))), far=np.inf)
        same_rows(table.replace(weight=count / 3), again, far=30)  # outliers are few rows, whatever their weight


def same_rows(one: Table, other: Table, far: float) -> None:
    """Two tables of one scaling, but for columns with values so many deviations away."""
    a, b = Scaling.fit(one), Scaling.fit(other)
    near = np.all([(np.abs(t.x - s.x_center) <= far * s.x_unit).all(0) for t, s in ((one, a), (other, b))], axis=0)
    np.testing.assert_allclose(a.x_unit[near], b.x_unit[near], rtol=1e-9)
    np.testing.assert_allclose(((a.x_center - b.x_center) / a.x_unit)[near], 0, atol=1e-6)
    same((*a.constant, a.y_low, a.y_unit), (*b.constant, b.y_low, b.y_unit))
