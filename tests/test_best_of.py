"""The best of several runs of a recipe."""

from typing import Any, ClassVar

import jax
import numpy as np
from problems import key_data, problem_of_table, search
import pytest

import jtrees
from jtrees import pytree
from jtrees.search import Fitted
from jtrees.search.monitor import Monitor
from jtrees.search.problem import OutOfTimeError, derived
from jtrees.tables import checked_table
from jtrees.tables.dataset import held_out_table

KEY = jax.random.key(1)
BASE = jtrees.DGT(depth=2, epochs=6, batch_size=32, widths=(), cycles=1, clip=1.0)
RUNS = 4
rng = np.random.default_rng(0)
X = rng.normal(size=(96, 3))
Y = np.where(X[:, 0] + X[:, 1] > 0, 2.0, -1.0) + X[:, 2]


@pytest.mark.slow
@pytest.mark.parametrize("validation", [None, (X[:32], -Y[:32])], ids=["training", "validation"])
def test_the_model_is_that_of_the_lowest_score(validation):
    fit = jtrees.fit(jtrees.BestOf(BASE, runs=RUNS), X, Y, key=KEY, validation=validation)
    table = checked_table(X, Y, None, "regression")
    held_out = None if validation is None else held_out_table(*validation, table)
    problem = problem_of_table(BASE, table, validation=held_out)
    alone = [search(problem.replace(key=derived(key_data(KEY), i))) for i in range(RUNS)]
    scores = np.array([result.score for result in alone])
    assert len(set(scores)) == RUNS and np.argmin(scores) > 0  # the first would also be what argmin of equals finds
    np.testing.assert_allclose(fit.report.search.scores, scores, rtol=1e-4)
    chosen = alone[np.argmin(scores)]
    assert (fit.report.search.run, fit.step) == (np.argmin(scores), chosen.step)
    assert fit.report.search.base.reached == chosen.report.reached
    np.testing.assert_allclose(fit.predict(X), chosen.model.predict(X), rtol=1e-4, atol=1e-4)
    assert fit.loss == pytest.approx(chosen.loss, rel=1e-4)
    np.testing.assert_allclose(fit.history, [result.history for result in alone], rtol=1e-3, atol=1e-6)


@pytree.dataclass
class Scored(jtrees.Recipe):
    """A recipe whose runs have the next of ``scores``, or raise it."""

    scores: ClassVar[Any] = iter(())

    async def search(self, problem):
        if isinstance(score := next(Scored.scores), Exception):
            raise score
        return Fitted(None, score, 0, np.zeros(2, np.float32), report=score)


@pytest.mark.parametrize(
    ("scores", "best"), [([3, 1, 2], 1), ([None, np.inf, 0.5], 2), ([None, np.inf, np.inf], 1), ([None] * 3, None)]
)
@pytest.mark.parametrize("error", [FloatingPointError("no result"), OutOfTimeError("no result")], ids=repr)
def test_the_best_is_a_run_with_a_result(scores, best, error):
    Scored.scores = iter([error if score is None else score for score in scores])
    problem = problem_of_table(jtrees.BestOf(Scored(), runs=3), checked_table(X, Y, None, "regression"), key=KEY)
    [result] = problem.engine.run(problem.recipe.search(problem))
    if best is None:
        assert result is error
    else:
        assert result.report.run == best and result.report.base == result.score == scores[best]
        np.testing.assert_array_equal(result.report.scores, [np.inf if score is None else score for score in scores])


def test_runs_that_could_not_be_finished_in_time_are_left_out(monkeypatch):
    monkeypatch.setattr(Monitor, "may_be_late", lambda monitor, seconds=0.0: False)
    fit = jtrees.fit(jtrees.BestOf(BASE, runs=3), X, Y, key=KEY, max_seconds=1e-6)
    assert fit.report.search.run == 0 and np.isfinite(fit.report.search.scores).tolist() == [True, False, False]
