"""Tasks: what is predicted, checked and scored."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import accuracy_score, r2_score

import jtrees
from jtrees.tasks import Classification, Regression, checked_targets

KEY = jax.random.key(0)


def test_names_stand_for_tasks_whose_outputs_are_counted_in_y():
    y = np.arange(6.0)
    assert checked_targets("regression", y, 6)[0] == Regression()
    assert checked_targets("regression", y.reshape(3, 2), 3)[0] == Regression(2)
    task, labels = checked_targets("classification", y % 3, 6)
    assert task == Classification(3) and labels.dtype == np.int32
    with pytest.raises(ValueError, match="task must be one of 'regression', 'classification', or a task such as"):
        checked_targets("ranking", y, 6)


def test_shapes_of_outputs():
    tasks = Regression(), Regression(1), Regression(3), Classification(3)
    assert [task.shape for task in tasks] == [(), (1,), (3,), (3,)]


@pytest.mark.slow
def test_a_task_may_have_classes_without_a_sample(standard_promotion):
    x, y = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32), np.arange(60) % 2
    recipe = jtrees.GET(depth=1, starts=1, epochs=5, cart=False)
    with pytest.raises(ValueError, match="got no sample of class 1"):
        jtrees.fit(recipe, x, 2 * y, key=KEY, task="classification")
    result = jtrees.fit(recipe, x, 2 * y, key=KEY, task=Classification(4))
    chances = result.predict(x)
    assert chances.shape == (60, 4) and (chances > 0).all()
    with pytest.raises(ValueError, match=r"y must hold classes 0\.\.3, got labels from 0 to 8"):
        jtrees.fit(recipe, x, 8 * y, key=KEY, task=Classification(4))


def test_bad_tasks_are_refused():
    for classes, message in [(1, "at least 2, got 1"), (0, "at least 2, got 0"), (2.5, "a whole number, got 2.5")]:
        with pytest.raises(ValueError, match=f"classes must be {message}"):
            Classification(classes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="outputs must be at least 1, got 0"):
        Regression(0)


@pytest.mark.parametrize(
    "make",
    [
        partial(jtrees.methods.get, 2, 1.0),
        partial(jtrees.methods.dgt, 2),
        partial(jtrees.methods.tel, 2),
        partial(jtrees.methods.latent, 1, 0.1),
        partial(jtrees.methods.nongreedy, 2),
    ],
    ids=lambda make: make.func.__name__,
)
def test_targets_of_another_shape_are_refused_by_methods(make):
    init = lambda columns, **task: jax.eval_shape(
        lambda: make(**task).init(jtrees.Batch(jnp.ones((6, 2)), jnp.ones((6, columns))), key=KEY)
    )
    with pytest.raises(ValueError, match=r"y must have shape \(n,\) for Regression\(\), got shape \(6, 2\)"):
        init(2)
    with pytest.raises(ValueError, match=r"y must have shape \(n, 3\) for .*use Regression\(outputs=2\)"):
        init(2, task=Regression(3))
    with pytest.raises(ValueError, match=r"y must have shape \(n, 2\) for .*use Regression\(outputs=1\)"):
        init(1, task=Regression(2))
    init(2, task=Regression(2))


def test_scores_are_those_of_sklearn():
    rng = np.random.default_rng(0)
    y, predictions, weight = rng.normal(size=(30, 2)), rng.normal(size=(30, 2)), rng.uniform(size=30)
    assert Regression(2).score(predictions, y, weight) == pytest.approx(r2_score(y, predictions, sample_weight=weight))
    assert Regression().score(predictions[:, 0], y[:, 0], None) == pytest.approx(r2_score(y[:, 0], predictions[:, 0]))
    assert np.isnan(Regression().score(predictions[:, 0], np.ones(30), None))
    labels, chances = rng.integers(0, 3, 30), rng.dirichlet(np.ones(3), 30)
    expected = accuracy_score(labels, chances.argmax(1), sample_weight=weight)
    assert Classification(3).score(chances, labels, weight) == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("task", [Regression(), Regression(2), Classification(3)])
def test_losses_of_outputs_of_predictions_and_in_double_precision_agree(task):
    rng = np.random.default_rng(1)
    outputs = jnp.asarray(rng.normal(size=(20, *task.shape)), jnp.float32)
    labels, targets = rng.integers(0, 3, 20).astype(np.int32), np.float32(rng.normal(size=(20, *task.shape)))
    y = jnp.asarray(labels if task == Classification(3) else targets)
    predictions = task.link(outputs)
    np.testing.assert_allclose(task.loss(outputs, y), task.prediction_loss(predictions, y), rtol=1e-5)
    np.testing.assert_allclose(
        task.host_losses(np.asarray(predictions, np.float64), np.asarray(y), 1.0), task.loss(outputs, y), rtol=1e-5
    )
