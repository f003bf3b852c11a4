"""The algorithm of GET and RADDT: many starts under increasingly sharp routings, CART the first of them."""

import jax
import numpy as np
import pytest
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

import jtrees
from jtrees.data import Scaling
from jtrees.methods.annealed import starts
from jtrees.methods.annealed.algorithm import beside_cart
from jtrees.methods.annealed.stages import train_stages
from jtrees.tables import checked_table
from tests import oracles, sweeps
from tests.problems import problem_of, search

pytestmark = pytest.mark.usefixtures("standard_promotion")  # the recipes train with AdamW

DEPTH = 2
# One program for the fits of this file that share the options and the number of rows (193 to 200 are one bucket).
GET = jtrees.GET(depth=DEPTH, starts=2, epochs=60, shrink=False, halving=False)
RADDT = jtrees.RADDT(depth=DEPTH, starts=2, epochs=30, shrink=False, halving=False)
LINEAR = jtrees.GET(depth=1, starts=1, epochs=20, leaves="linear")


def fit(x, y, *, seed=0, recipe=GET, sample_weight=None, validation=None, task="regression", **changed):
    options = {"sample_weight": sample_weight, "validation": validation, "task": task}
    return jtrees.fit(recipe.replace(**changed), x, y, key=jax.random.key(seed), **options)


def cart_mse(x, y):
    return np.mean((DecisionTreeRegressor(max_depth=DEPTH, random_state=0).fit(x, y).predict(x) - y) ** 2)


def test_never_worse_than_cart_with_a_large_offset():
    # Years, ids and timestamps: scaled thresholds mapped back would move samples across the splits.
    rng = np.random.default_rng(0)
    x = (1.7e6 + rng.integers(0, 2000, size=(200, 3))).astype(np.float32)
    y = np.sin(x[:, 0] / 100) + 0.1 * rng.normal(size=200)
    result = fit(x, y, learning_rate=1e-8)  # so small that CART is all there is
    # In float32 a mean of 200 squares is exact to a few units in the last place.
    cart = cart_mse(x, y)
    np.testing.assert_allclose(result.report.search.cart_loss, cart, rtol=1e-5)
    assert result.loss <= cart * (1 + 1e-5)


@pytest.mark.parametrize(
    ("recipe", "stages"), [(GET, 2), pytest.param(RADDT, 5, marks=pytest.mark.wide)], ids=["GET", "RADDT"]
)
@pytest.mark.parametrize("validates", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_all_starts_train_shortly_and_the_best_of_them_go_on(data, recipe, stages, validates):
    x, y = data
    recipe = recipe.replace(starts=10, epochs=300, halving=True)
    result = fit(x, y, recipe=recipe, validation=(x[::3], y[::3]) if validates else None)
    losses, steps, history = result.report.search.losses, result.report.search.steps, result.history
    assert losses.shape == (10, 2 * stages) and np.isfinite(losses[:, :stages]).all()
    best = np.flatnonzero(np.isfinite(losses[:, stages:]).all(1))
    if validates:
        assert set(best) == set(np.argsort(losses[:, :stages].min(1))[:2])
    assert len(best) == 2 and np.isinf(np.delete(losses[:, stages:], best, axis=0)).all()
    assert (steps[:, :stages] <= 30).all() and (steps <= 300).all() and steps[best, stages:].max() > 30
    assert history.shape == (10, 330 * stages) and np.isfinite(history[:, : 30 * stages]).all()
    assert (result.report.updates == np.where(np.isin(np.arange(10), best), 330, 30) * stages).all()
    losses = losses[:, stages:]  # the others are of fewer rows
    assert result.report.search.chosen == losses.min(1).argmin()
    assert result.loss == pytest.approx(losses.min(), rel=1e-3)


def problem(x, y, recipe=GET):
    """A problem of scaled rows that has no table."""
    table = checked_table(x, y, None, "regression")
    scaling = Scaling.fit(table, starts.DEVIATIONS)
    return problem_of(recipe, scaling.batch(table), task=table.task.scaled(scaling.y_unit))


@pytest.mark.parametrize(("rows", "cart", "folds"), [(995, True, 5), (1001, True, 1), (995, "binned", 1)])
def test_starts_leave_out_each_fold_in_turn_in_small_tables(rows, cart, folds):
    """Other targets in a fold change nothing that the short stages of its starts learn."""
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
    recipe = GET.replace(starts=6, epochs=10, halving=True, cart=cart, ridge=False, precondition=0.0)
    folded = problem(x, x[:, 0] + x[:, 1], recipe)
    masks, short = starts.held_out_rows(folded), lambda problem: search(problem).history[:, :2]
    assert len(masks) == folds and (np.sum(masks, axis=1) == rows // 5).all() and (np.sum(masks, axis=0) <= 1).all()
    batch, y = folded.batch, folded.batch.y.copy()
    y[masks[-1]] = y[masks[-1]][::-1]  # the range, of which empty leaves have the middle, stays
    same = (short(folded) == short(folded.replace(batch=batch._replace(y=y)))).all(1)
    np.testing.assert_array_equal(same, np.arange(6) % folds == folds - 1)


def test_starts_are_compared_with_cart_by_losses_on_the_same_rows():

    def comparison(losses, folds=2):
        cart_losses = np.array([[9.0, 1.0], [9.0, 1.0]])[:folds]
        scores, beaten_by = beside_cart(np.array(losses), cart_losses, np.array([2.0, 10.0])[:folds], 2)
        return pytest.approx(scores.tolist(), abs=1e-6), beaten_by

    assert comparison([0.5, 0.9, 1.5, 1.1]) == ([-0.5, -0.1, 0.5, 0.1], -1)
    assert comparison([0.95, 1.1, 1.5, 1.2]) == ([-0.05, 0.1, 0.5, 0.2], 1)  # one is better, two are not
    assert comparison([0.95, np.inf, np.inf, np.inf])[1] == -1  # one is left, and it is better
    assert comparison([np.inf] * 4)[1] == 1
    # With one fold the lowest decides, and scores are losses.
    assert comparison([0.9, 3.0, 4.0, 5.0], folds=1) == ([0.9, 3.0, 4.0, 5.0], -1)
    assert comparison([1.0, 3.0, 4.0, 5.0], folds=1)[1] == 1  # as good is enough


@pytest.mark.parametrize(
    "noise", sweeps.quick([0, 60], [60])
)  # features that carry nothing, which oblique splits learn by heart
def test_no_start_goes_on_where_cart_is_as_good_on_held_out_rows(data, noise):
    rng = np.random.default_rng(0)
    x = np.column_stack([data[0], rng.normal(size=(200, noise))]).astype(np.float32)
    y = np.where(x[:, 0] > 0, 1.0, np.where(x[:, 1] > 0, 2.0, 3.0)) if noise else data[1]
    y = (y + 0.5 * rng.normal(size=200)).astype(np.float32)
    recipe = GET.replace(depth=2, starts=6, epochs=300, halving=True, ridge=False)
    result = jtrees.fit(recipe, x, y, key=jax.random.key(0))
    went_on = np.isfinite(result.report.search.losses[:, 2:]).any()
    assert went_on == (result.report.search.chosen >= 0) == (not noise)
    if noise:
        assert result.loss == pytest.approx(result.report.search.cart_loss, rel=0.02)  # its leaves are shrunk


def test_the_cart_tree_that_beats_the_starts_is_the_result_in_a_larger_model():
    """The targets are a sum of all features, so CART on the ridge regression is better."""
    x = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    recipe = GET.replace(depth=2, starts=6, epochs=10, learning_rate=1e-8, halving=True, precondition=0.0)
    splits = search(problem(x, x.sum(1), recipe)).scaled
    assert (splits.weights[0] != 0).all()


# Constant leaves have short stages.
@pytest.mark.parametrize(("leaves", "stages"), [("constant", 4), pytest.param("linear", 2, marks=pytest.mark.slow)])
def test_after_a_deadline_further_stages_leave_the_splits_as_they_are(data, leaves, stages):
    recipe = jtrees.GET(depth=2, starts=6, epochs=3000, leaves=leaves, cart=False)
    fit = jtrees.fit(recipe, *data, key=jax.random.key(0), max_seconds=1e-3)
    search = fit.report.search
    assert fit.report.ended == "max_seconds" and np.nanmax(fit.report.updates) <= 2
    assert search.losses.shape == search.sharpness.shape == search.steps.shape == (6, stages)
    np.testing.assert_array_equal(search.losses[:, 1], search.losses[:, 0])
    assert np.all(search.steps[:, 0] <= 1) and np.all(search.steps[:, 1:] == 0)


def test_a_start_that_is_not_finite_leaves_the_others_alone(data):
    rng = np.random.default_rng(0)
    splits = jtrees.ObliqueTree(rng.normal(size=(3, 3)).astype(np.float32), np.zeros(3, np.float32), None)
    spoilt = splits.replace(bias=np.full(3, np.nan, np.float32))
    sound, ends_at_once = (np.array(sharpness, np.float32) for sharpness in ([10, 100], [10, np.nan]))
    three = problem(*data, GET.replace(starts=3, cart=False))
    run = lambda *cases: three.engine.run(*(train_stages(three, *case, 20) for case in cases))
    [alone], [first, never, later] = run((splits, sound)), run((splits, sound), (spoilt, sound), (splits, ends_at_once))
    assert np.isinf(never.score) and np.isinf(never.scores).all() and not never.finite
    assert np.isfinite(later.scores[0]) and np.isinf(later.scores[1]) and np.isinf(later.score)
    np.testing.assert_array_equal(first.scores, alone.scores)
    np.testing.assert_array_equal(first.losses, alone.losses)


def test_without_cart_nothing_is_reported_of_it(data):
    result = fit(*data, cart=False)
    assert np.isnan(result.report.search.cart_loss) and result.report.search.chosen >= 0
    assert result.loss == pytest.approx(result.report.search.losses.min(), rel=1e-3)
    with pytest.raises(FloatingPointError, match="all 2 starts became non-finite: try a smaller learning_rate"):
        fit(*data, cart=False, learning_rate=1e30)


def test_where_all_starts_diverge_the_result_is_cart(data):
    result = fit(*data, learning_rate=1e30)
    report = result.report
    assert report.search.chosen == -2 and report.search.dropped == 2
    assert result.loss == report.search.ridge_loss < report.search.cart_loss
    assert report.search.cart_loss == pytest.approx(cart_mse(*data), rel=1e-5)
    assert not np.isfinite(result.report.search.losses).any()


def test_trees_of_classes_have_weights_and_a_validation_loss(data):
    rng = np.random.default_rng(1)
    x, y, x_new = data[0], np.digitize(data[1], [-1, 1]), rng.normal(size=(150, 3))
    y_new = np.digitize(np.where(x_new[:, 0] + x_new[:, 1] > 0, 2.0, -1.0) + x_new[:, 2], [-1, 1])
    log_loss = lambda tree: np.mean(-np.log(tree.predict(x_new)[np.arange(150), y_new].astype(np.float64)))
    weight = np.where(np.arange(200) % 7 == 0, 0, np.where(y == 1, 3.0, 0.5))
    data = {"task": "classification", "validation": (x_new, y_new)}
    for weights, w in ((None, np.ones(200)), (weight, weight)):
        result = fit(x, y, epochs=100, sample_weight=weights, **data)
        tree, report = result.tree, result.report.search
        leaf = np.asarray(tree.leaf_index(x))
        np.testing.assert_allclose(tree.predict(x), oracles.weighted_frequencies(leaf, y, 4, 3, w)[leaf], rtol=1e-4)
        assert result.loss == pytest.approx(log_loss(tree), rel=1e-6) and result.loss < 0.95 * report.cart_loss
        # In the search x is scaled, and a sample beside a hyperplane may change side.
        assert result.loss == pytest.approx(report.losses.min(), rel=5e-2)
    cart = DecisionTreeClassifier(max_depth=DEPTH, random_state=0).fit(x, y, w)
    assert np.mean(tree.predict(x_new).argmax(1) == y_new) > cart.score(x_new, y_new)


@pytest.mark.slow
def test_a_stage_of_linear_leaves_ends_when_its_criterion_stalls():
    x = np.random.default_rng(0).uniform(-1, 1, size=(200, 2))
    y = np.sign(x[:, 0]) + x[:, 1]
    updates = lambda **options: np.isfinite(fit(x, y, recipe=LINEAR, epochs=200, starts=3, **options).history).sum()
    assert updates(halving=False) == 3 * 2 * 200
    assert 2 * 2 * 40 <= updates(halving=True) - 3 * 2 * 20 < 2 * 2 * 200


@pytest.mark.parametrize("validates", [False, True])
def test_the_best_run_may_be_cart(validates):
    """Trees of few rows lose to CART of all rows, which differs between runs because they hold out other rows."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(600, 3))
    y = np.sin(2 * x[:, 0]) + 0.3 * rng.normal(size=600)
    recipe = jtrees.GET(depth=2, starts=2, epochs=10, rows=64, ridge=False)
    options = {"validation": (x[:200], y[:200])} if validates else {}
    fit = jtrees.fit(jtrees.BestOf(recipe, runs=4), x[200:], y[200:], key=jax.random.key(2), **options)
    report = fit.report.search
    assert np.isfinite(report.scores).all() and report.run == report.scores.argmin()
    assert report.scores[report.run] * np.ptp(y[200:]) ** 2 == pytest.approx(fit.loss, rel=0.02)
    assert report.base.chosen >= 0 or fit.step == 0


def test_a_loss_of_classes_is_refused_before_the_search():
    with pytest.raises(ValueError, match="loss_function must be LogLoss here"):
        jtrees.GET(depth=1).check(jtrees.Classification(2, lambda outputs, labels: outputs[:, 0]), (10, 2))
