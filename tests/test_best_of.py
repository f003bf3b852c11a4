"""The best of several runs of a recipe."""

import jax
import numpy as np
from polynomials import Polynomials
import pytest

import jtrees
from jtrees.data import Data, Scaling, checked_table, held_out_table
from jtrees.search import options
from jtrees.search.monitor import Monitor
from jtrees.search.run import run_rounds

KEY = jax.random.key(0)
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


def searched(recipe):
    """The table, its scaled batch, and the search of a recipe."""
    table = checked_table(X, Y, None, "regression")
    batch = Scaling.fit(table).batch(table)
    return table, batch, options.checked(recipe).search(table.task, batch.x.shape)


@pytest.fixture(scope="module")
def alone(validation):
    """The fits of the base with the keys of the runs."""
    table, batch, search = searched(BASE)
    held_out = None if validation is None else held_out_table(*validation, table)
    scaling = Scaling.fit(table)
    by = None if held_out is None else scaling.batch(held_out)
    _, search_key, finish_key = jax.random.split(KEY, 3)
    fits = []
    for key in jax.random.split(search_key, RUNS):
        result, history = run_rounds(options.checked(BASE), table.task, None, batch, by, key, Monitor())
        data = Data(table, held_out, scaling, batch)
        fits.append((result, search.finish(result, None, data, key=finish_key, monitor=Monitor()), history))
    return fits


@pytest.mark.slow
def test_the_model_is_that_of_the_lowest_score(fit, alone):
    scores = np.array([result.score for result, _, _ in alone])
    assert len(set(scores)) == RUNS and np.argmin(scores) > 0  # the first would also be what argmin of equals finds
    # Runs side by side may be rounded otherwise than one by itself.
    np.testing.assert_allclose(fit.report["run_scores"], scores, rtol=1e-4)
    assert fit.report["run"] == np.argmin(scores)
    result, chosen, _ = alone[fit.report["run"]]
    assert fit.step == result.step
    np.testing.assert_allclose(fit.predict(X), chosen.model.predict(X), rtol=1e-4, atol=1e-4)
    assert fit.loss == pytest.approx(chosen.loss, rel=1e-4)
    assert fit.report["reached"] == chosen.report["reached"]  # the base's own report is there, too
    assert fit.history.shape == (RUNS, 18)
    np.testing.assert_allclose(fit.history, [history for _, _, history in alone], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("base", [jtrees.GET(depth=2), jtrees.Bagged(BASE, trees=2)], ids=["CART", "bags"])
def test_runs_share_what_is_prepared_on_the_host(base):
    _, batch, search = searched(jtrees.BestOf(base, runs=2))
    _, _, search_of_base = searched(base)
    prepared = [jax.tree.leaves(one.prepare(batch, key=KEY)) for one in (search, search_of_base)]
    assert prepared[0] and len(prepared[0]) == len(prepared[1])
    jax.tree.map(np.testing.assert_array_equal, *prepared)


@pytest.mark.slow
def test_a_run_that_diverges_is_not_chosen():
    _, batch, search = searched(jtrees.BestOf(Polynomials(), runs=3))
    coefficients, *rest = search.init(None, batch, key=KEY)
    result = search.result((coefficients.at[0].set(np.nan), *rest), batch, None)
    _, run, scores = result.extra
    assert result.finite and np.isfinite(result.score)
    assert run == np.argmin(scores) > 0 and scores[0] == np.inf
    with pytest.raises(FloatingPointError, match="smaller learning_rate"):
        jtrees.fit(jtrees.BestOf(BASE.replace(learning_rate=1e30), runs=2), X, Y, key=KEY)


@pytest.mark.slow
def test_the_best_of_several_forests():
    """Also of one: which is a fit with another key."""
    for runs in (1, 2):
        fit = jtrees.fit(jtrees.BestOf(jtrees.Bagged(BASE, trees=3), runs=runs), X, Y, key=KEY)
        assert fit.report["run_scores"].shape == (runs,) and fit.report["in_bag"].shape == (3, 96)
        assert fit.loss == pytest.approx(np.mean((fit.predict(X) - Y) ** 2), rel=1e-6)
        assert fit.history.shape == (runs, 3, 18)


@pytest.mark.slow
def test_the_best_of_several_can_be_bagged():
    fit = jtrees.fit(jtrees.Bagged(jtrees.BestOf(BASE, runs=2), trees=3), X, Y, key=KEY)
    assert len(fit.model) == 3
    for report in fit.report["fits"]:
        assert report["run_scores"].shape == (2,) and report["run"] == np.argmin(report["run_scores"])
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
