"""The errors that a fit is compared with, by scikit-learn's linear model; and the warning of a fit that is behind."""

import warnings

import jax
import numpy as np
import pytest
from sklearn.linear_model import LinearRegression

import jtrees
from jtrees.data import Scaling, checked_table, held_out_table
from jtrees.data.baselines import BehindBaselineWarning, baselines, least_squares

pytestmark = pytest.mark.usefixtures("standard_promotion")

KEY = jax.random.key(0)
rng = np.random.default_rng(0)
X = rng.normal(size=(200, 6)) * [1, 10, 1e-3, 1, 1, 0] + [0, 1e4, 0, 0, 0, 5]
Y = X[:, 0] + (X[:, 1] - 1e4) / 5 - 500 * X[:, 2] + 0.3 * rng.normal(size=200)
CLASS = np.digitize(Y, [-1, 1])
STUMP = jtrees.GET(depth=1, starts=1, epochs=5, cart=False)


class Zero:
    """A model that predicts 0."""

    def __init__(self, *columns):
        self.columns = columns

    def predict(self, x):
        return np.zeros((len(x), *self.columns))


def errors_of(x, y, *, validation=None, weight=None, task="regression", model=None):
    table = checked_table(x, y, weight, task)
    held_out = None if validation is None else held_out_table(*validation, table)
    return baselines(model or Zero(*y.shape[1:]), table, held_out, Scaling.fit(table))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_errors_on_a_validation_set_are_those_of_scikit_learn(weighted, several):
    y = np.stack([Y, X[:, 3] ** 2], 1) if several else Y
    weight = rng.uniform(0.1, 2, 150) if weighted else None
    errors = errors_of(X[:150], y[:150], weight=weight, validation=(X[150:], y[150:]))
    linear = LinearRegression().fit(X[:150], y[:150], weight).predict(X[150:])
    mean = np.average(y[:150], axis=0, weights=weight)
    variance = np.average((y[:150] - mean) ** 2, axis=0, weights=weight)
    for name, predictions in {"model": 0, "constant": mean, "linear": linear}.items():
        assert errors[name] == pytest.approx(np.mean((predictions - y[150:]) ** 2 / variance), rel=1e-6), name


def test_on_training_data_the_linear_model_is_charged_for_its_parameters():
    errors = errors_of(X, Y)
    residual = Y - LinearRegression().fit(X, Y).predict(X)
    assert errors["linear"] == pytest.approx(np.mean(residual**2) / Y.var() / (1 - 6 / 200) ** 2, rel=1e-5)
    assert errors["constant"] == pytest.approx(1)
    assert errors_of(X[:6], Y[:6])["linear"] == np.inf  # as many parameters as samples
    many = errors_of(np.tile(X, (120, 1)), np.tile(Y, 120))  # of which some are taken, evenly
    assert many["constant"] == pytest.approx(1) and many["linear"] == pytest.approx(errors["linear"], rel=0.1)


def test_classes_by_their_indicators():
    errors = errors_of(X, CLASS, task="classification", model=Zero(3))
    indicators = np.eye(3)[CLASS]
    assert errors["model"] == pytest.approx(np.mean(indicators.mean(0) / indicators.var(0)))
    residual = indicators - LinearRegression().fit(X, indicators).predict(X)
    share = (residual.var(0) / indicators.var(0)).mean()
    assert errors["linear"] == pytest.approx(share / (1 - 6 / 200) ** 2, rel=1e-5)


@pytest.mark.parametrize(
    ("task", "y", "validated"),
    [("regression", Y, False), pytest.param("classification", CLASS, True, marks=pytest.mark.slow)],
)
def test_a_fit_that_is_behind_warns(task, y, validated):
    """A random stump of five steps on a linear function."""
    where = "in the validation set" if validated else "in the training data"
    with pytest.warns(BehindBaselineWarning, match=rf"GET explains .* of y {where}, a linear model \d\d\.\d %"):
        fit = jtrees.fit(STUMP, X, y, key=KEY, task=task, validation=(X, y) if validated else None)
    errors = fit.report["baselines"]
    assert errors["linear"] < errors["model"] - 0.02
    truth = y if task == "regression" else np.eye(3)[y]
    lost = ((fit.model.predict(X) - truth) ** 2).mean(0) / truth.var(0)
    assert errors["model"] == pytest.approx(lost.mean(), rel=1e-5)


@pytest.mark.slow
def test_a_fit_that_is_ahead_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = jtrees.fit(jtrees.GET(depth=2, starts=1, epochs=5), X, np.abs(Y), key=KEY)
    assert fit.report["baselines"]["model"] < fit.report["baselines"]["linear"]


@pytest.mark.slow
def test_a_loss_of_the_users_own_is_compared_with_nothing():
    absolute = lambda outputs, y: abs(outputs - y)
    recipe, task = jtrees.DGT(depth=1, widths=(), epochs=6), jtrees.Regression(loss_function=absolute)
    for each in (recipe, jtrees.Bagged(recipe, trees=2)):
        assert "baselines" not in jtrees.fit(each, X, Y, key=KEY, task=task).report


@pytest.mark.parametrize("shape", [(300, 900), (900, 300), (300, 50)])
def test_least_squares_of_long_and_wide_tables_are_those_of_a_decomposition(shape):
    """Some columns are sums of others, so that the rank is lower."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape)
    x[:, 1] = x[:, 0] + x[:, 2]
    y = np.stack([x[:, :9].sum(1) + rng.normal(size=len(x)), rng.normal(size=len(x))], axis=1)
    slopes, rank = least_squares(x, y)
    expected, _, expected_rank, _ = np.linalg.lstsq(x, y, rcond=1e-6)
    np.testing.assert_allclose(x @ slopes, x @ expected, atol=1e-4)
    np.testing.assert_allclose(slopes, expected, atol=1e-4)
    assert rank == pytest.approx(expected_rank, abs=0.01)
