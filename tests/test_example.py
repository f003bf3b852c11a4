"""The recipe that the tutorial reads: everything that recipes can do, it can."""

from functools import partial
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from jtrees.search import Problem

pytestmark = pytest.mark.usefixtures("standard_promotion")

KEY = jax.random.key(0)
rng = np.random.default_rng(0)
X = rng.normal(size=(400, 3))
Y = np.where(X @ [1, -1, 0.5] > 0, 1.0, -1.0) + 0.5 * np.where(X @ [1, 1, 0] > 0, 1.0, -1.0)


@pytest.fixture(scope="module")
def example():
    """The module of the recipe. The function of the method has the name of the module."""
    return importlib.import_module("jtrees.methods.soft_decision_tree")


def test_it_learns_and_is_saved(example, tmp_path):
    recipe = example.SoftDecisionTree(depth=2, epochs=150, learning_rate=0.03)
    result = jtrees.fit(recipe, X, Y, key=KEY)
    assert isinstance(result.tree, jtrees.ObliqueTree)
    assert result.loss < 0.15 * Y.var()
    jtrees.save(result, path := tmp_path / "tree.jtrees")
    np.testing.assert_array_equal(jtrees.load(path).predict(X), result.predict(X))


@pytest.mark.slow
def test_classes_bags_and_sweeps(example):
    recipe = example.SoftDecisionTree(depth=2, epochs=30)
    forest = jtrees.fit(jtrees.Bagged(recipe, trees=2), X, Y > 0, key=KEY, task="classification")
    assert (forest.predict(X).argmax(1) == (Y > 0)).mean() > 0.9
    found = jtrees.sweep(recipe, X, Y, key=KEY, grid={"balance": (0.0, 0.1)}, validation=0.25)
    assert np.isfinite(found.losses).all()
    with pytest.raises(ValueError, match="balance must be finite and not negative"):
        jtrees.fit(recipe.replace(balance=-1.0), X, Y, key=KEY)


@pytest.mark.slow
def test_starts_that_are_chosen_on_rows_left_out_are_better_than_one(example):
    one, six = (example.SoftDecisionTree(depth=2, epochs=40, starts=starts) for starts in (1, 6))
    of_seeds = lambda recipe: jtrees.sweep(recipe, X, Y, key=KEY, seeds=6, validation=0.25).losses
    assert of_seeds(six).mean() < 0.9 * of_seeds(one).mean()


@pytest.fixture
def trainings(monkeypatch):
    """The problems that are trained, in this order."""
    problems, train = [], Problem.train

    async def recorded(self, *args, **options):
        problems.append(self)
        return await train(self, *args, **options)

    monkeypatch.setattr(Problem, "train", recorded)
    return problems


@pytest.mark.slow
def test_starts_of_one_run_are_compared_on_the_same_rows(example, trainings):
    """The trials leave out the same rows; the last training has all rows again."""
    jtrees.fit(example.SoftDecisionTree(depth=1, epochs=10, starts=3), X, Y, key=KEY)
    *trials, last = trainings
    assert len(trials) == 3 and last.count == len(X) and any(last.key is trial.key for trial in trials)
    for trial in trials:
        np.testing.assert_array_equal(trial.weighed, trials[0].weighed)
        assert trial.count == (trial.evaluation.weight == 0).sum() - (last.batch.weight == 0).sum() == 4 * len(X) // 5


def test_the_best_trial_is_the_result_if_the_time_is_up(example, trainings):
    fit = jtrees.fit(example.SoftDecisionTree(depth=1, epochs=10, starts=3), X, Y, key=KEY, max_seconds=1e-6)
    assert len(trainings) == 3 and fit.report.ended == "max_seconds" and fit.step == 1
    np.testing.assert_allclose(fit.loss, np.mean((fit.predict(X) - Y) ** 2))


def test_starts_that_became_non_finite_are_an_error(example):
    with pytest.raises(FloatingPointError, match="smaller learning_rate"):
        jtrees.fit(example.SoftDecisionTree(depth=1, epochs=10, learning_rate=1e30), X, Y, key=KEY)


def test_its_loss_is_the_papers(example):
    """Written out in NumPy: the expected squared error and the cross entropy of the shares with one half."""
    task = jtrees.Regression()
    method = example.soft_decision_tree(2, task=task, balance=0.3)
    batch = jtrees.Batch(jnp.asarray(X, jnp.float32), jnp.asarray(Y, jnp.float32))
    params = jax.jit(method.init)(batch, key=KEY)
    params = params.replace(log_sharpness=jnp.asarray([0.5, -0.2, 0.1]))
    found, _ = jax.jit(partial(method.loss, key=KEY, step=0))(params, batch)
    weights, bias, values = (np.asarray(a, np.float64) for a in jax.tree.leaves(params.tree))
    right = 1 / (1 + np.exp(-np.exp([0.5, -0.2, 0.1])[:, None] * (weights @ X.T + bias[:, None])))
    reach = np.stack([np.ones(len(X)), 1 - right[0], right[0]])
    leaf = np.stack([reach[1] * (1 - right[1]), reach[1] * right[1], reach[2] * (1 - right[2]), reach[2] * right[2]])
    expected = (leaf * np.square(values[:, None] - Y)).sum(0).mean()
    share = (reach * right).sum(1) / reach.sum(1)
    penalty = -0.5 * (np.log(share) + np.log(1 - share))
    expected += (np.array([0.3, 0.15, 0.15]) * penalty).sum()
    np.testing.assert_allclose(found, expected, rtol=1e-4)  # float32
