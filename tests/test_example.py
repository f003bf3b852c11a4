"""The recipe that the tutorial reads: everything that recipes can do, it can."""

import jax
import numpy as np
import pytest

import jtrees
from jtrees import SoftDecisionTree
from jtrees.search import Problem
from tests import ROOT, tables

pytestmark = pytest.mark.usefixtures("standard_promotion")

KEY = jax.random.key(0)
X = tables.X[:, :3]
Y = np.where(X @ [1, -1, 0.5] > 0, 1.0, -1.0) + 0.5 * np.where(X @ [1, 1, 0] > 0, 1.0, -1.0)


@pytest.mark.slow
def test_starts_that_are_chosen_on_rows_left_out_are_better_than_one():
    single, six = (SoftDecisionTree(depth=2, epochs=40, starts=starts) for starts in (1, 6))
    seed_losses = lambda recipe: jtrees.sweep(recipe, X, Y, key=KEY, seeds=6, validation=0.25).losses
    assert seed_losses(six).mean() < 0.9 * seed_losses(single).mean()


@pytest.fixture
def trainings(monkeypatch):
    """The problems that are trained, in this order."""
    problems, train = [], Problem.train
    recorded = lambda self, *args, **options: (problems.append(self), train(self, *args, **options))[1]
    monkeypatch.setattr(Problem, "train", recorded)
    return problems


@pytest.mark.slow
def test_starts_of_one_run_are_compared_on_the_same_rows(trainings):
    """The trials leave out the same rows; the last training has all rows again."""
    jtrees.fit(SoftDecisionTree(depth=1, epochs=10, starts=3), X, Y, key=KEY)
    *trials, last = trainings
    assert len(trials) == 3 and last.count == len(X) and any(last.key is trial.key for trial in trials)
    for trial in trials:
        np.testing.assert_array_equal(trial.weighed, trials[0].weighed)
        assert trial.count == (trial.evaluation.weight == 0).sum() - (last.batch.weight == 0).sum() == 4 * len(X) // 5


def test_the_best_trial_is_the_result_if_the_time_is_up(trainings):
    fit = jtrees.fit(SoftDecisionTree(depth=1, epochs=10, starts=3), X, Y, key=KEY, max_seconds=1e-6)
    assert len(trainings) == 3 and fit.report.ended == "max_seconds" and fit.step == 1
    np.testing.assert_allclose(fit.loss, np.mean((fit.predict(X) - Y) ** 2))


def test_starts_that_became_non_finite_are_an_error():
    with pytest.raises(FloatingPointError, match="smaller learning_rate"):
        jtrees.fit(SoftDecisionTree(depth=1, epochs=10, learning_rate=1e30), X, Y, key=KEY)


@pytest.mark.parametrize(("name", "limit"), [("pod", 100), ("sweep_pod", 100), ("train_large", 250)])
def test_examples_are_short_enough_to_be_copied(name, limit):
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) <= limit
