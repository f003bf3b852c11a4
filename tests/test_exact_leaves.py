"""Predictions of hard trees are values of the user's targets, in double precision, wherever a tree is evaluated."""

import ctypes
from functools import partial
import os
import runpy
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest
import rules

import jtrees
from jtrees import export, losses
from jtrees.leaves import Linear
from jtrees.tree import ObliqueTree, Origin

COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
N, P = 200, 3
KEY = jax.random.key(0)
_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(N, P))
X[:, 0] += np.sign(X[:, 0])  # a gap at 0
_GET = jtrees.GET(depth=2, starts=1, epochs=10, halving=False)
PAIRS = [(0.1, 0.7), (1e8 + 0.1, 1e8 + 0.7), (1e-7, 3e-7)]
RECIPES = {
    "GET": _GET,
    "linear leaves": _GET.replace(starts=2, epochs=60, leaves="linear"),
    "RADDT": jtrees.RADDT(depth=2, starts=1, epochs=10, halving=False),
    "CO2": jtrees.CO2(depth=2, epochs=3, precondition=0),
    "Polished": jtrees.Polished(_GET, epochs=5),
    "Sparse": jtrees.Sparse(_GET, terms=1, epochs=5),
    "BestOf": jtrees.BestOf(_GET, runs=2),
}


def two_values(low, high):
    return np.where(X[:, 0] > 0, high, low)


def fitted(y, recipe=_GET, x=X, **options):
    return jtrees.fit(recipe, x, y, key=KEY, **options)


QUICK_CASES = [(name, PAIRS[1]) for name in RECIPES]
SLOW_CASES = [(name, pair) for name in RECIPES for pair in (PAIRS[0], PAIRS[2])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pair"), [*QUICK_CASES, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW_CASES)]
)
def test_predictions_of_a_perfect_tree_are_the_targets(standard_promotion, name, pair):
    y = two_values(*pair)
    fit = fitted(y, RECIPES[name])
    found = fit.predict(X)
    assert found.dtype == np.float64
    assert (found == y).all()
    assert fit.loss <= 1e-12 * np.var(y)


METHODS = {
    "DGT": jtrees.DGT(depth=2, epochs=20, refit=True, widths=()),
    "NonGreedy": jtrees.NonGreedy(depth=2, epochs=3, greedy_epochs=3, precondition=0, shrink=False),
    "a method": jtrees.FromMethod(make=partial(jtrees.methods.get, 2), options={"alpha": 4.0}, epochs=20),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_fitted_leaves_hold_means_of_double_precision(standard_promotion, name):
    y = 1e8 + np.random.default_rng(7).normal(size=N)
    fit = fitted(y, METHODS[name])
    leaf = fit.tree.leaf_index(X)
    means = np.array([(y[leaf == one] - 1e8).mean() if (leaf == one).any() else 0 for one in range(4)])
    np.testing.assert_allclose(fit.predict(X) - 1e8, means[leaf], atol=1e-7)
    assert fit.loss == pytest.approx(np.square(fit.predict(X) - y).mean(), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["absolute_error", "huber", "quantile", "squared_error"])
def test_losses_of_errors_predict_the_one_target_of_a_leaf(standard_promotion, loss):
    y = two_values(1e8 + 0.1, 1e8 + 0.7)
    fit = fitted(y, task=jtrees.Regression(loss_function=loss))
    assert (fit.predict(X) == y).all()


def test_an_own_loss_predicts_the_one_target_of_a_leaf(standard_promotion):
    y = two_values(0.1, 0.7)
    fit = fitted(y, task=jtrees.Regression(loss_function=own_loss))
    assert (fit.predict(X) == y).all()


def own_loss(outputs, y):
    return jnp.abs(outputs - y) ** 1.5


def test_several_targets_are_predicted_exactly(standard_promotion):
    y = np.column_stack([two_values(0.1, 0.7), two_values(1e8 + 0.1, 1e8 - 0.3)])
    assert (fitted(y).predict(X) == y).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "targets", ["counts", "prices", "ratings", pytest.param("thousandths", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("levels", [0.9, 0.5, (0.1, 0.5, 0.9)])
def test_quantiles_of_tied_targets_cover_their_level(standard_promotion, targets, levels):
    rng = np.random.default_rng(1)
    mean = 3 + X[:, 0]
    y = {
        "counts": lambda: rng.poisson(np.abs(mean)).astype(float),
        "prices": lambda: np.round(rng.gamma(2, 3 + np.abs(mean)), 2),
        "ratings": lambda: np.clip(np.round(mean + rng.normal(size=N)), 1, 5),
        "thousandths": lambda: 0.001 * rng.integers(0, 25, N),
    }[targets]()
    fit = fitted(y, task=jtrees.Regression(loss_function=losses.Quantile(levels)))
    leaf, found = fit.tree.leaf_index(X), fit.predict(X).reshape(N, -1)
    for one in np.unique(leaf):
        inside = leaf == one
        for j, level in enumerate(np.atleast_1d(levels)):
            assert np.mean(y[inside] <= found[inside, j]) >= level
            expected = np.quantile(y[inside], level, method="averaged_inverted_cdf")
            assert found[inside, j] == pytest.approx(expected, rel=1e-15)
            assert found[inside][0, j] in y or expected not in y


def test_weighted_quantiles_of_a_fit_are_targets(standard_promotion):
    rng = np.random.default_rng(2)
    y, weight = 0.01 * rng.integers(0, 100, N), 10 ** rng.uniform(-4, 4, N)
    task = jtrees.Regression(loss_function=losses.Quantile(0.9))
    fit = fitted(y, task=task, sample_weight=weight)
    leaf, found = fit.tree.leaf_index(X), fit.predict(X)
    assert np.isin(found, y).all()
    for one in np.unique(leaf):
        inside = leaf == one
        below = y[inside] <= found[inside]
        assert weight[inside][below].sum() >= 0.9 * weight[inside].sum() * (1 - 1e-12)
        below = y[inside] < found[inside]
        assert weight[inside][below].sum() <= 0.9 * weight[inside].sum() * (1 + 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["poisson", "gamma", losses.Tweedie(1.5)])
def test_means_under_a_log_link_are_those_of_double_precision(standard_promotion, loss):
    y = 1 + np.random.default_rng(3).poisson(np.exp(X[:, 0] / 2)).astype(float)
    fit = fitted(y, task=jtrees.Regression(loss_function=loss))
    leaf = fit.tree.leaf_index(X)
    expected = np.bincount(leaf, y, minlength=4) / np.bincount(leaf, minlength=4)
    np.testing.assert_allclose(fit.predict(X), expected[leaf], rtol=1e-14)


@pytest.mark.parametrize("values", [(3.0, 7.0), (0.0, 7.0)])
def test_leaves_of_equal_counts_predict_them_and_leaves_of_zeros_a_little_more(standard_promotion, values):
    y = two_values(*values)
    found = fitted(y, task=jtrees.Regression(loss_function="poisson")).predict(X)
    expected = np.where(y > 0, y, y.mean() / (np.sum(y == 0) + 1))
    np.testing.assert_allclose(found, expected, rtol=1e-14)


def test_class_frequencies_are_those_of_double_precision(standard_promotion):
    y = (X[:, 0] + np.random.default_rng(4).normal(size=N) > 0).astype(int)
    fit = fitted(y, _GET.replace(shrink=False), task="classification")
    leaf = fit.tree.leaf_index(X)
    counts = np.bincount(2 * leaf + y, minlength=8).reshape(4, 2)
    prior = (counts.sum(0) + 1) / (N + 2)
    expected = (counts + prior) / (counts.sum(1, keepdims=True) + 1)
    np.testing.assert_allclose(fit.predict(X), expected[leaf], rtol=1e-15)


def test_a_boosted_sum_is_added_in_double_precision(standard_promotion):
    y = two_values(1.0, 2.0) + 0.1 * X[:, 1]
    base = _GET.replace(cart="binned", ridge=False, precondition=0.0, shrink=False)
    forest = fitted(y, jtrees.Boosted(base, rounds=3, patience=None)).model
    found = forest.predict(X)
    assert found.dtype == np.float64
    each = np.stack([forest[i].predict(X) for i in range(len(forest))])
    np.testing.assert_allclose(found, each.sum(0), rtol=1e-15)


def test_jax_rows_are_predicted_in_single_precision(standard_promotion):
    y = two_values(0.1, 0.7)
    found = fitted(y).tree.predict(jnp.asarray(X))
    assert isinstance(found, jax.Array) and found.dtype == np.float32
    np.testing.assert_array_equal(found, y.astype(np.float32))


# --- Refitting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shrink", [False, True])
def test_refit_to_numpy_arrays_is_exact(standard_promotion, shrink):
    y = two_values(0.1, 0.7)
    tree = fitted(y).tree
    assert (tree.refit(X, 3 * y, shrink=shrink).predict(X) == 3 * y).all()


def test_strength_zero_is_the_mean(standard_promotion):
    leaf, y = np.repeat(np.arange(3), 5), np.repeat([0.1, 0.7, 1e8 + 0.1], 5)
    values, strength = jtrees.leaves.fit_hierarchical(leaf, y, 4, strength=0.0)
    assert strength == 0 and values.tolist() == [0.1, 0.7, 1e8 + 0.1, 1e8 + 0.1]
    rng = np.random.default_rng(5)
    leaf, y = rng.integers(0, 4, 100), rng.normal(size=100)
    values, _ = jtrees.leaves.fit_hierarchical(leaf, y, 4, strength=0.0)
    np.testing.assert_allclose(values, [y[leaf == one].mean() for one in range(4)], rtol=1e-14)


# --- Files -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=PAIRS[:2])
def exact(request):
    with jax.numpy_dtype_promotion("standard"):
        y = two_values(*request.param)
        return fitted(y).tree, y


def test_loaded_tree_predicts_the_targets(standard_promotion, exact, tmp_path):
    tree, y = exact
    jtrees.save(tree, tmp_path / "tree.jtrees")
    loaded = jtrees.load(tmp_path / "tree.jtrees")
    assert (loaded.predict(X) == y).all()


def test_numpy_file_predicts_the_targets(exact, tmp_path):
    tree, y = exact
    export.to_numpy(tree, tmp_path / "tree.py")
    assert (runpy.run_path(str(tmp_path / "tree.py"))["predict"](X) == y).all()


def test_onnx_file_predicts_the_targets(exact, tmp_path):
    tree, y = exact
    export.to_onnx(tree, tmp_path / "tree.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "tree.onnx", providers=["CPUExecutionProvider"])
    assert (session.run(["prediction"], {"x": X})[0] == y).all()


def test_stablehlo_file_predicts_the_targets(standard_promotion, exact, tmp_path):
    tree, y = exact
    export.to_stablehlo(tree, tmp_path / "tree.stablehlo")
    program = jax.export.deserialize(bytearray((tmp_path / "tree.stablehlo").read_bytes()))
    with jax.enable_x64(True):
        assert (np.asarray(program.call(X)[0]) == y).all()


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize("precision", ["double", "float"])
def test_c_header_predicts_the_targets(exact, tmp_path, precision):
    tree, y = exact
    export.to_c(tree, tmp_path / "tree.h", precision=precision)
    source = f'#include "tree.h"\nvoid rows(const {precision} *x, long n, {precision} *out)'
    (tmp_path / "tree.c").write_text(source + " { jtrees_predict_rows(x, n, out); }\n")
    command = [COMPILER, "-O2", "-std=c99", "-shared", "-fPIC", "tree.c", "-o", "tree.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
    real = np.float64 if precision == "double" else np.float32
    x, out = np.ascontiguousarray(X, real), np.empty(N, real)
    pointer = lambda a: a.ctypes.data_as(ctypes.c_void_p)
    ctypes.CDLL(str(tmp_path / "tree.so")).rows(pointer(x), ctypes.c_long(N), pointer(out))
    assert (out == y.astype(real)).all()


def test_rules_predict_the_targets(exact):
    tree, y = exact
    columns = {f"x{j}": X[:, j].astype(np.float32).astype(float) for j in range(P)}
    _, answers = rules.leaves_and_answers(tree.to_text(digits=17), columns)
    assert (answers[:, 0] == y).all()


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
