"""The best of several runs of a recipe."""

import jax
import numpy as np
from problems import key_data, problem_of_table, search
import pytest

import jtrees
from jtrees.methods.annealed import starts
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
HELD_OUT = (X[:32], -Y[:32])


@pytest.fixture(
    scope="module", params=[None, pytest.param(HELD_OUT, marks=pytest.mark.slow)], ids=["training", "validation"]
)
def validation(request):
    """What runs are chosen by."""
    return request.param


@pytest.fixture(scope="module")
def fit(validation):
    return jtrees.fit(jtrees.BestOf(BASE, runs=RUNS), X, Y, key=KEY, validation=validation)


@pytest.fixture(scope="module")
def alone(validation):
    """The results of the base with the keys of the runs."""
    table = checked_table(X, Y, None, "regression")
    held_out = None if validation is None else held_out_table(*validation, table)
    problem = problem_of_table(BASE, table, validation=held_out)
    return [search(problem.replace(key=derived(key_data(KEY), i))) for i in range(RUNS)]


@pytest.mark.slow
def test_the_model_is_that_of_the_lowest_score(fit, alone):
    scores = np.array([result.score for result in alone])
    assert len(set(scores)) == RUNS and np.argmin(scores) > 0  # the first would also be what argmin of equals finds
    np.testing.assert_allclose(fit.report.search.scores, scores, rtol=1e-4)
    assert fit.report.search.run == np.argmin(scores)
    chosen = alone[fit.report.search.run]
    assert fit.step == chosen.step
    np.testing.assert_allclose(fit.predict(X), chosen.model.predict(X), rtol=1e-4, atol=1e-4)
    assert fit.loss == pytest.approx(chosen.loss, rel=1e-4)
    assert fit.report.search.base.reached == chosen.report.reached  # the base's own report is there, too
    assert fit.history.shape == (RUNS, 18)
    np.testing.assert_allclose(fit.history, [result.history for result in alone], rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_runs_share_the_tree_of_cart(monkeypatch):
    """CART grows on all rows once, however many runs there are."""
    rows, grown_cart = [], starts.grown_cart
    counted = lambda batch, *args, **options: rows.append(len(batch.x)) or grown_cart(batch, *args, **options)
    monkeypatch.setattr(starts, "grown_cart", counted)
    base, counts = jtrees.GET(depth=2, starts=1, epochs=5), []
    for recipe in (base, jtrees.BestOf(base, runs=2)):
        jtrees.fit(recipe, X, Y, key=KEY)
        counts.append(rows.count(len(X)))
        rows.clear()
    assert counts[0] == counts[1] > 0


@pytest.mark.slow
def test_a_run_that_diverges_is_not_chosen(monkeypatch):
    """The first run becomes non-finite."""
    search = jtrees.DGT.search

    async def diverged(self, problem):
        result = await search(self, problem)
        if np.array_equal(problem.key, derived(key_data(KEY), 0)):
            raise FloatingPointError
        return result

    monkeypatch.setattr(jtrees.DGT, "search", diverged)
    fit = jtrees.fit(jtrees.BestOf(BASE, runs=3), X, Y, key=KEY)
    scores = fit.report.search.scores
    assert np.isfinite(fit.loss) and np.isfinite(fit.predict(X)).all()
    assert fit.report.search.run == np.argmin(scores) > 0 and scores[0] == np.inf
    with pytest.raises(FloatingPointError, match="smaller learning_rate"):
        jtrees.fit(jtrees.BestOf(BASE.replace(learning_rate=1e30), runs=2), X, Y, key=KEY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scores", "best"), [([None, np.inf, 0.5], 2), ([None, np.inf, np.inf], 1), ([None, None, None], None)]
)
@pytest.mark.parametrize("error", [FloatingPointError, OutOfTimeError])
def test_the_best_is_a_run_with_a_result(scores, best, error, monkeypatch):
    """A run without a result is not chosen, also if no other run has a finite score."""
    search, number = jtrees.DGT.search, iter(range(3))

    async def scored(self, problem):
        result, score = await search(self, problem), scores[next(number)]
        if score is None:
            raise error("no result")
        return result._replace(score=score)

    monkeypatch.setattr(jtrees.DGT, "search", scored)
    problem = problem_of_table(jtrees.BestOf(BASE, runs=3), checked_table(X, Y, None, "regression"), key=KEY)
    [result] = problem.engine.run(problem.recipe.search(problem))
    if best is None:
        assert isinstance(result, error)
    else:
        assert result.report.run == best and result.score == scores[best]
        np.testing.assert_array_equal(result.report.scores, [np.inf, *scores[1:]])


def test_runs_that_could_not_be_finished_in_time_are_left_out(monkeypatch):
    """The first is finished in any case."""
    monkeypatch.setattr(Monitor, "may_be_late", lambda monitor, seconds=0.0: False)
    fit = jtrees.fit(jtrees.BestOf(BASE, runs=3), X, Y, key=KEY, max_seconds=1e-6)
    assert fit.report.search.run == 0 and np.isfinite(fit.report.search.scores).tolist() == [True, False, False]


def test_a_second_fit_with_another_key_compiles_nothing(count_compilations):
    fit = lambda seed: jtrees.fit(jtrees.BestOf(BASE, runs=RUNS), X, Y, key=jax.random.key(seed)).history
    fit(0)
    assert count_compilations(fit, 1) == 0


@pytest.mark.slow
def test_the_best_of_several_forests():
    """Also of one: which is a fit with another key."""
    for runs in (1, 2):
        fit = jtrees.fit(jtrees.BestOf(jtrees.Bagged(BASE, trees=3), runs=runs), X, Y, key=KEY)
        assert fit.report.search.scores.shape == (runs,) and fit.report.search.base.in_bag.shape == (3, 96)
        assert fit.loss == pytest.approx(np.mean((fit.predict(X) - Y) ** 2), rel=1e-6)
        assert fit.history.shape == (runs, 3, 18)


@pytest.mark.slow
def test_the_best_of_several_can_be_bagged():
    fit = jtrees.fit(jtrees.Bagged(jtrees.BestOf(BASE, runs=2), trees=3), X, Y, key=KEY)
    assert len(fit.model) == 3
    for report in fit.report.search.bases:
        assert report.scores.shape == (2,) and report.run == np.argmin(report.scores)
    assert fit.history.shape == (3, 2, 18)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (jtrees.BestOf(BASE, runs=0), "runs must be at least 1, got 0"),
        (jtrees.BestOf(BASE.replace(depth=0)), "depth must be from 1 to 16, got 0"),
    ],
)
def test_bad_options_are_refused(recipe, message):
    with pytest.raises(ValueError, match=message):
        jtrees.fit(recipe, X, Y, key=KEY)
