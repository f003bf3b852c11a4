"""The best of several runs of a recipe."""

import jax
import numpy as np
import pytest

import jtrees
from jtrees.data import Data, Scaling, checked_table
from jtrees.data.table import held_out_table
from jtrees.methods.annealed import starts
from jtrees.search import Runs, options
from jtrees.search.monitor import Monitor
from jtrees.search.runs import derived

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
    """The fits of the base with the keys of the runs."""
    table, base = checked_table(X, Y, None, "regression"), options.checked(BASE)
    held_out = None if validation is None else held_out_table(*validation, table)
    scaling = Scaling.fit(table)
    batch, by = scaling.batch(table), None if held_out is None else scaling.batch(held_out)
    impl, fits = str(jax.random.key_impl(KEY)), []
    for i in range(RUNS):
        of_run = derived(np.asarray(jax.random.key_data(KEY)), i)
        task = table.task.scaled(scaling.y_unit)
        [result] = base.search(Runs([base], [of_run], task, batch, by, Monitor(), impl=impl))
        data = Data(table, held_out, scaling, batch)
        fits.append((result, base.finish(result, data, key=KEY, monitor=Monitor())))
    return fits


@pytest.mark.slow
def test_the_model_is_that_of_the_lowest_score(fit, alone):
    scores = np.array([result.score for result, _ in alone])
    assert len(set(scores)) == RUNS and np.argmin(scores) > 0  # the first would also be what argmin of equals finds
    np.testing.assert_allclose(fit.report.search.scores, scores, rtol=1e-4)
    assert fit.report.search.run == np.argmin(scores)
    result, chosen = alone[fit.report.search.run]
    assert fit.step == result.step
    np.testing.assert_allclose(fit.predict(X), chosen.model.predict(X), rtol=1e-4, atol=1e-4)
    assert fit.loss == pytest.approx(chosen.loss, rel=1e-4)
    assert fit.report.search.base.reached == chosen.report.reached  # the base's own report is there, too
    assert fit.history.shape == (RUNS, 18)
    np.testing.assert_allclose(fit.history, [result.history for result, _ in alone], rtol=1e-3, atol=1e-6)


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
    search = jtrees.DGT.search

    def diverged(self, runs):
        first, *others = search(self, runs)
        return [first._replace(score=np.nan, finite=False), *others]

    monkeypatch.setattr(jtrees.DGT, "search", diverged)
    fit = jtrees.fit(jtrees.BestOf(BASE, runs=3), X, Y, key=KEY)
    scores = fit.report.search.scores
    assert np.isfinite(fit.loss) and np.isfinite(fit.predict(X)).all()
    assert fit.report.search.run == np.argmin(scores) > 0 and scores[0] == np.inf
    with pytest.raises(FloatingPointError, match="smaller learning_rate"):
        jtrees.fit(jtrees.BestOf(BASE.replace(learning_rate=1e30), runs=2), X, Y, key=KEY)


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
