"""Predictions of hard trees are values of the user's targets, in double precision, wherever a tree is evaluated."""

import ctypes
import os
import runpy
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest
from recipes import BOOSTED, DGT, GET, LINEAR, RECIPES
import rules
import tables

import jtrees
from jtrees import export, losses
from jtrees.leaves import Linear, Values
from jtrees.tree import ObliqueTree, Origin

pytestmark = pytest.mark.usefixtures("standard_promotion")  # Adam; see the fixture
COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
X = tables.X + np.eye(1, 4) * np.sign(tables.X)  # a gap at 0
N, P = X.shape
KEY = jax.random.key(0)
PAIRS = [(0.1, 0.7), (1e8 + 0.1, 1e8 + 0.7), (1e-7, 3e-7)]


def two_values(low, high):
    """Targets of a tree of one split."""
    return np.where(X[:, 0] > 0, high, low)


def fit_to(y, recipe=GET, **options):
    return jtrees.fit(recipe, X, y, key=KEY, **options)


PERFECT = {name: RECIPES[name] for name in ("GET", "RADDT")}
PERFECT |= {"linear leaves": LINEAR.replace(starts=2, epochs=60), "Polished": jtrees.Polished(GET, epochs=5)}
PERFECT |= {"Sparse": jtrees.Sparse(GET, terms=1, epochs=5), "BestOf": jtrees.BestOf(GET, runs=2)}
PERFECT |= {"CO2": RECIPES["CO2"].replace(precondition=0)}


@pytest.mark.slow
@pytest.mark.parametrize("name", PERFECT)
@pytest.mark.parametrize("pair", [PAIRS[1], *(pytest.param(pair, marks=pytest.mark.wide) for pair in PAIRS[::2])])
def test_predictions_of_a_perfect_tree_are_the_targets(name, pair):
    y = two_values(*pair)
    fit = fit_to(y, PERFECT[name])
    predictions = fit.predict(X)
    assert predictions.dtype == np.float64
    assert (predictions == y).all()
    assert fit.loss <= 1e-11 * np.var(y)


METHODS = {
    "DGT": DGT.replace(refit=True),
    "NonGreedy": RECIPES["NonGreedy"].replace(precondition=0, shrink=False),
    "a method": RECIPES["FromMethod"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_fitted_leaves_hold_means_of_double_precision(name):
    y = 1e8 + np.random.default_rng(7).normal(size=N)
    fit = fit_to(y, METHODS[name])
    leaf = fit.tree.leaf_index(X)
    means = np.array([(y[leaf == k] - 1e8).mean() if (leaf == k).any() else 0 for k in range(4)])
    np.testing.assert_allclose(fit.predict(X) - 1e8, means[leaf], atol=1e-7)
    assert fit.loss == pytest.approx(np.square(fit.predict(X) - y).mean(), rel=1e-12)


def power_loss(outputs, y):
    return jnp.abs(outputs - y) ** 1.5


LOSSES = ["absolute_error", "huber", "quantile", "squared_error", power_loss]


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_errors_predict_the_one_target_of_a_leaf(loss):
    y = two_values(0.1, 0.7) if loss is power_loss else two_values(1e8 + 0.1, 1e8 + 0.7)
    assert (fit_to(y, task=jtrees.Regression(loss_function=loss)).predict(X) == y).all()


def test_several_targets_are_predicted_exactly():
    y = np.column_stack([two_values(0.1, 0.7), two_values(1e8 + 0.1, 1e8 - 0.3)])
    assert (fit_to(y).predict(X) == y).all()


@pytest.mark.slow
@pytest.mark.parametrize("targets", ["counts", "prices", "ratings", "thousandths"])
@pytest.mark.parametrize("levels", [0.9, 0.5, (0.1, 0.5, 0.9)])
def test_quantiles_of_tied_targets_cover_their_level(targets, levels):
    rng = np.random.default_rng(1)
    mean = 3 + X[:, 0]
    y = {
        "counts": lambda: rng.poisson(np.abs(mean)).astype(float),
        "prices": lambda: np.round(rng.gamma(2, 3 + np.abs(mean)), 2),
        "ratings": lambda: np.clip(np.round(mean + rng.normal(size=N)), 1, 5),
        "thousandths": lambda: 0.001 * rng.integers(0, 25, N),
    }[targets]()
    fit = fit_to(y, task=jtrees.Regression(loss_function=losses.Quantile(levels)))
    leaf, predictions = fit.tree.leaf_index(X), fit.predict(X).reshape(N, -1)
    for k in np.unique(leaf):
        inside = leaf == k
        for j, level in enumerate(np.atleast_1d(levels)):
            assert np.mean(y[inside] <= predictions[inside, j]) >= level
            expected = np.quantile(y[inside], level, method="averaged_inverted_cdf")
            assert predictions[inside, j] == pytest.approx(expected, rel=1e-15)
            assert predictions[inside][0, j] in y or expected not in y


@pytest.mark.slow
def test_weighted_quantiles_of_a_fit_are_targets():
    rng = np.random.default_rng(2)
    y, weight = 0.01 * rng.integers(0, 100, N), 10 ** rng.uniform(-4, 4, N)
    task = jtrees.Regression(loss_function=losses.Quantile(0.9))
    fit = fit_to(y, task=task, sample_weight=weight)
    leaf, predictions = fit.tree.leaf_index(X), fit.predict(X)
    assert np.isin(predictions, y).all()
    for k in np.unique(leaf):
        inside = leaf == k
        below = y[inside] <= predictions[inside]
        assert weight[inside][below].sum() >= 0.9 * weight[inside].sum() * (1 - 1e-12)
        below = y[inside] < predictions[inside]
        assert weight[inside][below].sum() <= 0.9 * weight[inside].sum() * (1 + 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["poisson", "gamma", losses.Tweedie(1.5)])
def test_means_under_a_log_link_are_those_of_double_precision(loss):
    y = 1 + np.random.default_rng(3).poisson(np.exp(X[:, 0] / 2)).astype(float)
    fit = fit_to(y, task=jtrees.Regression(loss_function=loss))
    leaf = fit.tree.leaf_index(X)
    expected = np.bincount(leaf, y, minlength=4) / np.bincount(leaf, minlength=4)
    np.testing.assert_allclose(fit.predict(X), expected[leaf], rtol=1e-14)


@pytest.mark.parametrize("values", [(3.0, 7.0), (0.0, 7.0)])
def test_leaves_of_equal_counts_predict_them_and_leaves_of_zeros_a_little_more(values):
    y = two_values(*values)
    predictions = fit_to(y, task=jtrees.Regression(loss_function="poisson")).predict(X)
    expected = np.where(y > 0, y, y.mean() / (np.sum(y == 0) + 1))
    np.testing.assert_allclose(predictions, expected, rtol=1e-14)


def test_class_frequencies_are_those_of_double_precision():
    y = (X[:, 0] + np.random.default_rng(4).normal(size=N) > 0).astype(int)
    fit = fit_to(y, GET.replace(shrink=False), task="classification")
    leaf = fit.tree.leaf_index(X)
    counts = np.bincount(2 * leaf + y, minlength=8).reshape(4, 2)
    prior = (counts.sum(0) + 1) / (N + 2)
    expected = (counts + prior) / (counts.sum(1, keepdims=True) + 1)
    np.testing.assert_allclose(fit.predict(X), expected[leaf], rtol=1e-15)


def test_a_boosted_sum_is_added_in_double_precision(fitted):
    forest = fitted(BOOSTED).model
    predictions = forest.predict(tables.X)
    assert predictions.dtype == np.float64
    trees = np.stack([forest[i].predict(tables.X) for i in range(len(forest))])
    np.testing.assert_allclose(predictions, trees.sum(0), rtol=1e-15)


def test_jax_rows_are_predicted_in_single_precision():
    y = two_values(0.1, 0.7)
    predictions = fit_to(y).tree.predict(jnp.asarray(X))
    assert isinstance(predictions, jax.Array) and predictions.dtype == np.float32
    np.testing.assert_array_equal(predictions, y.astype(np.float32))


# --- Refitting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shrink", [False, True])
def test_refit_to_numpy_arrays_is_exact(shrink):
    y = two_values(0.1, 0.7)
    tree = fit_to(y).tree
    assert (tree.refit(X, 3 * y, shrink=shrink).predict(X) == 3 * y).all()


def test_strength_zero_is_the_mean():
    leaf, y = np.repeat(np.arange(3), 5), np.repeat([0.1, 0.7, 1e8 + 0.1], 5)
    values, strength = jtrees.leaves.fit_hierarchical(leaf, y, 4, strength=0.0)
    assert strength == 0 and values.tolist() == [0.1, 0.7, 1e8 + 0.1, 1e8 + 0.1]
    rng = np.random.default_rng(5)
    leaf, y = rng.integers(0, 4, 100), rng.normal(size=100)
    values, _ = jtrees.leaves.fit_hierarchical(leaf, y, 4, strength=0.0)
    np.testing.assert_allclose(values, [y[leaf == k].mean() for k in range(4)], rtol=1e-14)


# --- Files -----------------------------------------------------------------------------------------------------------


def numpy_file(tree, folder):
    export.to_numpy(tree, folder / "tree.py")
    return runpy.run_path(str(folder / "tree.py"))["predict"](X)


def loaded_file(tree, folder):
    jtrees.save(tree, folder / "tree.jtrees")
    return jtrees.load(folder / "tree.jtrees").predict(X)


def onnx_file(tree, folder):
    export.to_onnx(tree, folder / "tree.onnx")
    session = onnxruntime.InferenceSession(folder / "tree.onnx", providers=["CPUExecutionProvider"])
    return session.run(["prediction"], {"x": X})[0]


def stablehlo_file(tree, folder):
    export.to_stablehlo(tree, folder / "tree.stablehlo")
    program = jax.export.deserialize(bytearray((folder / "tree.stablehlo").read_bytes()))
    with jax.enable_x64(True):
        return np.asarray(program.call(X)[0])


def c_header(tree, folder, precision="double"):
    export.to_c(tree, folder / "tree.h", precision=precision)
    source = f'#include "tree.h"\nvoid rows(const {precision} *x, long n, {precision} *out)'
    (folder / "tree.c").write_text(source + " { jtrees_predict_rows(x, n, out); }\n")
    command = [COMPILER, "-O2", "-std=c99", "-shared", "-fPIC", "tree.c", "-o", "tree.so"]
    subprocess.run(command, cwd=folder, check=True)
    real = np.float64 if precision == "double" else np.float32
    x, out = np.ascontiguousarray(X, real), np.empty(N, real)
    pointer = lambda a: a.ctypes.data_as(ctypes.c_void_p)
    ctypes.CDLL(str(folder / "tree.so")).rows(pointer(x), ctypes.c_long(N), pointer(out))
    return out


def float_header(tree, folder):
    return c_header(tree, folder, "float")


def text(tree, folder):
    columns = {f"x{j}": X[:, j].astype(np.float32).astype(float) for j in range(P)}
    return rules.leaves_and_answers(tree.to_text(digits=17), columns)[1][:, 0]


NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="no C compiler")
FILES = [numpy_file, loaded_file, onnx_file, stablehlo_file, text]
FILES += [pytest.param(fn, marks=NEEDS_COMPILER) for fn in (c_header, float_header)]


@pytest.mark.parametrize("pair", PAIRS[:2], ids=str)
@pytest.mark.parametrize("predictions_of", FILES)
def test_files_predict_the_targets(predictions_of, pair, tmp_path):
    values, y = Values(np.array([pair[0], pair[0], pair[1], pair[1]])), two_values(*pair)
    tree = ObliqueTree(jnp.eye(3, P), jnp.zeros(3), values, Origin(np.zeros(P, np.float32), np.float64(0)))
    predictions = predictions_of(tree, tmp_path)
    assert (predictions == y.astype(predictions.dtype)).all()


# --- Linear leaves of large features ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("bounds", [True, False])
def test_linear_leaves_of_products_beyond_float32_reach_the_right_bound(tmp_path, sign, bounds):
    # 1e20 * 1e20 - 2e20 * 1e20: the terms overflow in float32, and their difference is no number.
    coefficients = jnp.asarray(sign * np.array([[1e20, -2e20], [1e20, 0.0]]), jnp.float32)
    limits = (-jnp.ones(2), jnp.ones(2)) if bounds else ()
    leaves = Linear(coefficients, jnp.zeros(2), *limits)
    tree = ObliqueTree(jnp.array([[0.0, 1.0]]), jnp.array([-1.0]), leaves)
    x = np.array([[1e20, 0.5], [1e20, 1e20], [1e-3, 0.0], [-1e20, 0.0]])
    expected = np.asarray(coefficients, float)[tree.leaf_index(x)] * x.astype(np.float32)
    expected = expected.sum(1).clip(*((-1, 1) if bounds else (None, None)))
    np.testing.assert_allclose(tree.predict(x), expected, rtol=1e-6)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(tree.predict(jnp.asarray(x, jnp.float32)), expected.astype(np.float32), rtol=1e-5)
    export.to_numpy(tree, tmp_path / "tree.py")
    np.testing.assert_allclose(runpy.run_path(str(tmp_path / "tree.py"))["predict"](x), expected, rtol=1e-12)


def test_a_linear_row_has_the_same_bits_in_any_company():
    rng = np.random.default_rng(6)
    leaves = Linear(rng.normal(size=(4, 5)).astype(np.float32), rng.normal(size=4))
    tree = ObliqueTree(
        jnp.asarray(rng.normal(size=(3, 5)), jnp.float32), jnp.zeros(3), leaves, Origin(np.ones(5, np.float32), None)
    )
    x = rng.normal(size=(5000, 5))
    whole = tree.predict(x)
    for rows in (slice(0, 1), slice(4095, 4097), slice(17, 1234)):
        assert (tree.predict(x[rows]) == whole[rows]).all()
