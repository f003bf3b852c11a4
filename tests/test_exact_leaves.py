"""Predictions of hard trees are values of the user's targets, in double precision, wherever a tree is evaluated."""

from functools import partial
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from jtrees import export
from jtrees.leaves import Linear, Values
from jtrees.tree import ObliqueTree, Origin
from tests import exported_models, needs, rules, sweeps, tables
from tests.recipes import GET, LINEAR, RECIPES

pytestmark = pytest.mark.usefixtures("standard_promotion")  # Adam; see the fixture
X = tables.X + np.eye(1, 4) * np.sign(tables.X)  # a gap at 0
N, P = X.shape
KEY = jax.random.key(0)


def two_values(low, high):
    """Targets of a tree of one split."""
    return np.where(X[:, 0] > 0, high, low)


def fit_to(y, recipe=GET, **options):
    return jtrees.fit(recipe, X, y, key=KEY, **options)


def power_loss(outputs, y):
    return jnp.abs(outputs - y) ** 1.5


NEAR, FAR = (0.1, 0.7), (1e8 + 0.1, 1e8 + 0.7)
FITS = {  # recipe, loss, pairs of values
    "GET": (GET, "squared_error", (NEAR, FAR, (1e-7, 3e-7))),
    "linear leaves": (LINEAR.replace(starts=2, epochs=60), "squared_error", (FAR,)),
    "Polished": (jtrees.Polished(GET, epochs=5), "squared_error", (FAR,)),
    "Sparse": (jtrees.Sparse(GET, terms=1, epochs=5), "squared_error", (FAR,)),
    "CO2": (RECIPES["CO2"].replace(precondition=0), "squared_error", (FAR,)),
    "absolute": (GET, "absolute_error", (FAR,)),
    "huber": (GET, "huber", (FAR,)),
    "quantile": (GET, "quantile", (FAR,)),
    "a function": (GET, power_loss, (NEAR,)),
}


@pytest.mark.parametrize("name", sweeps.quick(FITS, ["GET"], ["linear leaves", "CO2", "absolute"]))
def test_predictions_of_a_perfect_tree_are_the_targets(name):
    recipe, loss, pairs = FITS[name]
    for pair in pairs:
        y = two_values(*pair)
        fit = fit_to(y, recipe, task=jtrees.Regression(loss_function=loss))
        predictions = fit.predict(X)
        assert predictions.dtype == np.float64 and (predictions == y).all()
        if name == "GET":
            assert fit.loss <= 1e-11 * np.var(y)
            on_device = fit.tree.predict(jnp.asarray(X))  # JAX rows are predicted in single precision
            assert isinstance(on_device, jax.Array) and (on_device == y.astype(np.float32)).all()
            for shrink in (False, True):
                assert (fit.tree.refit(X, 3 * y, shrink=shrink).predict(X) == 3 * y).all()


@pytest.mark.parametrize("recipe", [GET, jtrees.Boosted(GET, rounds=3)], ids=["GET", "Boosted"])
def test_losses_of_a_function_are_those_of_scaled_targets(recipe):
    y = X[:, 0] + np.random.default_rng(5).normal(size=N)
    fits = [fit_to(unit * y, recipe, task=jtrees.Regression(loss_function=power_loss)) for unit in (1.0, 1024.0)]
    for fit, unit in zip(fits, (1.0, 1024.0), strict=True):
        expected = np.mean(np.abs((fit.predict(X) / unit - y) / np.ptp(y)) ** 1.5)
        assert fit.loss == pytest.approx(expected, rel=1e-4)
    np.testing.assert_allclose(*(fit.report.search.losses for fit in fits), rtol=1e-4)


@pytest.mark.parametrize("loss", sweeps.quick(["poisson", "gamma", "tweedie"], ["poisson"]))
def test_means_under_a_log_link_are_those_of_double_precision(loss):
    y = 1 + np.random.default_rng(3).poisson(np.exp(X[:, 0] / 2)).astype(float)
    fit = fit_to(y, task=jtrees.Regression(loss_function=loss))
    leaf = fit.tree.leaf_index(X)
    expected = np.bincount(leaf, y, minlength=4) / np.bincount(leaf, minlength=4)
    np.testing.assert_allclose(fit.predict(X), expected[leaf], rtol=1e-14)
    if loss == "poisson":  # leaves of zeros predict a little more
        y = two_values(0.0, 7.0)
        expected = np.where(y > 0, y, y.mean() / (np.sum(y == 0) + 1))
        predictions = fit_to(y, task=jtrees.Regression(loss_function=loss)).predict(X)
        np.testing.assert_allclose(predictions, expected, rtol=1e-14)


def test_class_frequencies_are_those_of_double_precision(fitted):
    y = (X[:, 0] + np.random.default_rng(4).normal(size=N) > 0).astype(int)
    fit = fit_to(y, GET.replace(shrink=False), task="classification")
    leaf = fit.tree.leaf_index(X)
    counts = np.bincount(2 * leaf + y, minlength=8).reshape(4, 2)
    prior = (counts.sum(0) + 1) / (N + 2)
    expected = (counts + prior) / (counts.sum(1, keepdims=True) + 1)
    np.testing.assert_allclose(fit.predict(X), expected[leaf], rtol=1e-15)


def from_text(tree, x, folder):
    columns = {f"x{j}": x[:, j].astype(np.float32).astype(float) for j in range(P)}
    leaf, answers = rules.leaves_and_answers(tree.to_text(digits=17), columns)
    return leaf, answers[:, 0]


FORMS = exported_models.FORMS | {"text": from_text, "C, float": partial(exported_models.in_c, precision="float")}
IN_C = pytest.param("C, float", marks=needs.needs_compiler)


@pytest.mark.parametrize("pair", [NEAR, FAR], ids=str)
@pytest.mark.parametrize("form", [*exported_models.forms(), "text", IN_C])
def test_files_predict_the_targets(form, pair, tmp_path):
    values, y = Values(np.array([pair[0], pair[0], pair[1], pair[1]])), two_values(*pair)
    tree = ObliqueTree(jnp.eye(3, P), jnp.zeros(3), values, Origin(np.zeros(P, np.float32), np.float64(0)))
    predictions = np.ravel(FORMS[form](tree, X, tmp_path)[1])
    assert (predictions == y.astype(predictions.dtype)).all()


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
