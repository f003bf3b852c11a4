"""Losses of samples, by formula, and what is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jtrees
from jtrees import Classification, Regression, losses
from jtrees.tasks.custom import check_without_link


@pytest.mark.parametrize("outputs", [(), (3,)])
def test_squared_error_is_the_mean_over_outputs(outputs):
    rng = np.random.default_rng(0)
    predictions, y = rng.normal(size=(2, 20, *outputs)).astype(np.float32)
    expected = (predictions - y) ** 2
    found = jax.jit(losses.SquaredError().samples)(predictions, y)
    np.testing.assert_allclose(found, expected.mean(1) if outputs else expected, rtol=1e-6)


def test_log_loss_is_of_the_class_and_finite_where_its_probability_is_zero():
    probabilities = np.array([[0.25, 0.75], [1, 0], [0, 1]], np.float32)
    found = jax.jit(losses.log_loss)(probabilities, np.array([1, 1, 1], np.int32))
    np.testing.assert_allclose(found, [-np.log(0.75), -np.log(np.finfo(np.float32).tiny), 0], rtol=1e-6)


def test_log_loss_of_logits():
    logits, y = np.array([[0.5, -1, 2], [400, 0, 0]], np.float32), np.array([2, 1], np.int32)
    powers = np.exp(logits.astype(float) - logits.max(1, keepdims=True))
    expected = -np.log((powers / powers.sum(1, keepdims=True))[[0, 1], y])
    found = jax.jit(Classification(3).loss)(logits, y)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("task", [Regression, partial(Classification, 3)], ids=["regression", "classification"])
def test_a_loss_of_the_users_own(task):
    absolute = task(loss_function=lambda outputs, y: jnp.abs(outputs - y)).loss
    outputs, y = jnp.asarray([1.0, 2, 3]), jnp.asarray([3.0, 2, 0])
    assert jax.jit(absolute)(outputs, y).tolist() == [2, 0, 3]
    wrong = {
        "a scalar": (lambda outputs, y: jnp.square(outputs - y).mean(), "()"),
        "a matrix": (lambda outputs, y: outputs[:, None] - y, "(3, 3)"),
        "a column": (lambda outputs, y: (outputs - y)[:, None], "(3, 1)"),
    }
    for loss, shape in wrong.values():
        with pytest.raises(ValueError) as error:
            task(loss_function=loss).loss(outputs, y)
        assert str(error.value) == f"loss must give one number a sample, of shape (3,), got shape {shape}"
    with pytest.raises(ValueError, match=r"loss must be a function \(outputs, y\) -> \(n,\), got 3"):
        task(loss_function=3)


def test_the_verdict_names_a_loss_by_its_measure():
    class Deviation(losses.SquaredError):
        measure = "mean squared deviation"

    x = np.linspace(-1, 1, 60)[:, None]
    recipe = jtrees.DGT(depth=1, epochs=2, widths=(), precondition=0)
    with pytest.warns(jtrees.report.BehindBaselineWarning):
        fit = jtrees.fit(recipe, x, x[:, 0], key=jax.random.key(0), task=Regression(loss_function=Deviation()))
    assert ": mean squared deviation " in fit.report.verdict


def test_fitted_models_hold_the_task_without_a_function():
    own = lambda outputs, y: jnp.abs(outputs - y)
    assert Regression(2, own).of_models == Regression(2)
    weighed = Classification(3, own, class_weight=(1, 2, 4))
    assert weighed.of_models == Classification(3, class_weight=(1, 2, 4))
    assert weighed.link_name == "softmax"  # logits, whatever their loss
    for task in (Regression(None, "poisson"), Classification(3, losses.LogLoss(0.1))):
        assert task.of_models is task


def test_means_are_not_divided_by_the_weights():
    lost, weight = jnp.asarray([1.0, 2, 6]), jnp.asarray([2.0, 0.5, 0])
    mean = jax.jit(losses.weighted_mean)
    assert float(mean(lost, None)) == 3
    assert float(mean(lost, weight)) == 1


def poisson(outputs, y):
    return jnp.exp(outputs) - y * outputs


def pinball(outputs, y):
    return jnp.maximum(0.9 * (y - outputs), -0.1 * (y - outputs))


@pytest.mark.slow
@pytest.mark.parametrize("columns", [(), (3,)])
def test_losses_of_outputs_in_the_units_of_targets_pass(columns):
    of_rows = lambda fn: lambda outputs, y: fn(outputs, y).reshape(len(y), -1).mean(1)
    wide = lambda outputs, y: jnp.maximum(jnp.abs(outputs - y) - 0.2, 0)
    for loss in (losses.SquaredError().samples, of_rows(optax.losses.huber_loss), of_rows(pinball), of_rows(wide)):
        check_without_link(loss, columns)


def test_losses_with_a_link_are_refused():
    """A tree would predict negative counts: targets are scaled, and outputs are logarithms."""
    with pytest.raises(
        ValueError, match=r"loss must be smallest where outputs equal targets, .* the target 0 it is 1 "
    ):
        check_without_link(poisson)
    x = np.linspace(-1, 1, 64)[:, None]
    y = np.random.default_rng(0).poisson(np.exp(1 + x[:, 0])).astype(float)
    for recipe in (jtrees.TEL(), jtrees.LatentTree(), jtrees.DGT()):
        with pytest.raises(ValueError, match="a loss with a link needs targets that range from exactly 0 to 1"):
            jtrees.fit(recipe, x, y, key=jax.random.key(0), task=Regression(loss_function=poisson))
