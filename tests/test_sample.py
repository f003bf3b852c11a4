"""Samples of rows: which are drawn, with which weights, and that recipes train on them and fit leaves to all rows."""

import jax
import numpy as np
import pytest

import jtrees
from jtrees.data.held_out import held_out_rows
from jtrees.search.sample import drawn_rows, rows_used
from tests import sweeps
from tests.recipes import RECIPES, STARTS, WEAK

N = 5000


def sampled(y=None, weight=None, limit=500, task=None, seed=0):
    y = np.zeros(N, np.float32) if y is None else y
    task = jtrees.Regression() if task is None else task
    return drawn_rows(y, weight, limit, task, np.random.default_rng(seed))


def test_rows_of_equal_weight():
    rows, weight = sampled()
    assert len(rows) == 500 == len(np.unique(rows)) and (np.diff(rows) > 0).all()
    np.testing.assert_allclose(weight, N / 500)
    everything, unit = sampled(limit=2 * N)
    np.testing.assert_array_equal(everything, np.arange(N))
    assert (unit == 1).all()


def test_rows_of_weight_0_are_not_drawn():
    weight = np.arange(N) % 2 * 3.0
    for limit in (500, N // 2, N):
        rows, factors = sampled(weight=weight, limit=limit)
        assert (rows % 2 == 1).all() and factors.sum() == pytest.approx(weight.sum(), rel=1e-5)


def test_sums_over_a_sample_are_unbiased_for_uneven_weights():
    """The mean of many weighted sums is that of all rows. A row that outweighs the others is always there."""
    rng = np.random.default_rng(1)
    weight, values = rng.exponential(size=N) ** 2, rng.normal(size=N)
    weight[7] = weight.sum()
    result = [sampled(weight=weight, seed=seed) for seed in range(200)]
    assert all(7 in rows for rows, _ in result)
    sums = [factors @ values[rows] for rows, factors in result]
    assert np.mean(sums) == pytest.approx(weight @ values, abs=4 * np.std(sums) / np.sqrt(200))
    # Most of the others stand for as much as each other, and none for less.
    factors = result[0][1]
    assert np.median(factors) == pytest.approx(factors.min(), rel=1e-6)


def test_classes_keep_their_shares_and_rare_ones_all_their_rows():
    y = np.repeat(np.arange(4), [3000, 1950, 40, 10]).astype(np.int32)
    rows, weight = sampled(y, task=jtrees.Classification(4))
    np.testing.assert_array_equal(np.bincount(y[rows]), [300, 195, 20, 10])  # of a larger class no fewer
    np.testing.assert_allclose(np.bincount(y[rows], weight), np.bincount(y))


@pytest.mark.parametrize(("rows", "n", "used"), [(400, 4000, 400), (400, 300, 300), (None, 4000, 4000)])
def test_rows_of_a_stage(rows, n, used):
    assert rows_used(STARTS.replace(rows=rows), n) == used


# --- Recipes ---------------------------------------------------------------------------------------------------------


def table(n, seed=0):
    x = np.random.default_rng(seed).normal(size=(n, 3)).astype(np.float32)
    return x, np.where(x[:, 0] + x[:, 1] > 0, 1 + (x[:, 2] > 0), -1.0).astype(np.float32)


SAMPLING = {name: RECIPES[name] for name in ("GET", "RADDT")}
SAMPLING |= {name: RECIPES[name].replace(precondition=0) for name in ("CO2", "NonGreedy")}
BASE = WEAK.replace(rows=200)


@pytest.mark.parametrize("name", sweeps.slow(SAMPLING, ["GET"]))
def test_splits_come_from_a_sample_and_leaves_from_all_rows(name):
    x, y = table(4000)
    recipe = SAMPLING[name].replace(rows=400)
    fit = jtrees.fit(recipe, x, y, key=jax.random.key(0))
    leaf, predicted = np.asarray(fit.tree.leaf_index(x)), np.asarray(fit.predict(x))
    for k in np.unique(leaf):  # drawn towards their ancestors a little
        np.testing.assert_allclose(predicted[leaf == k], y[leaf == k].mean(), atol=2e-2)
    assert fit.loss < 0.35 * y.var()
    assert fit.report.search.rows == 400
    other = jtrees.fit(recipe.replace(rows=None), x, y, key=jax.random.key(0))
    assert not np.array_equal(other.tree.weights, fit.tree.weights) and other.report.search.rows == 4000


@pytest.mark.slow
def test_rounds_of_boosting_draw_at_most_so_many():
    x, y = table(4100)  # a single sum
    fit = jtrees.fit(jtrees.Boosted(BASE, rounds=3), x, y, key=jax.random.key(0))
    assert len(fit.model) == 3 and fit.report.held_out_rows is not None and fit.report.search.rows == 200
    wrapped = jtrees.Boosted(jtrees.BestOf(BASE, runs=2), rounds=2)
    assert jtrees.fit(wrapped, x, y, key=jax.random.key(0)).report.search.rows == 200


@pytest.mark.slow
def test_short_folds_of_boosting_are_fitted_to_all_their_rows():
    """Padding and rows of other folds do not count as rows that the rounds could draw."""
    x, y = table(400)
    limited, unlimited = (
        jtrees.sweep(jtrees.Boosted(base, rounds=2), x, y, key=jax.random.key(0), validation=2).losses
        for base in (BASE, BASE.replace(rows=None))
    )
    np.testing.assert_allclose(limited, unlimited, rtol=1e-5)


@pytest.mark.parametrize("name", SAMPLING)
def test_fewer_rows_than_leaves_are_refused(name):
    with pytest.raises(ValueError, match="rows must be at least the number of leaves, 4, got 3"):
        jtrees.fit(SAMPLING[name].replace(rows=3), *table(100), key=jax.random.key(0))


@pytest.mark.parametrize("n", [1, 7, 40])
def test_a_share_of_the_rows_is_held_out(n):
    order = np.random.default_rng(0).permutation(n)
    rows = held_out_rows(order, 0.3)
    assert len(set(rows.tolist())) == len(rows) == max(1, round(0.3 * n))
    labels = np.arange(n) % 5 // 2  # two fifths, two fifths and a fifth
    rows = held_out_rows(order, 0.5, labels)
    np.testing.assert_array_equal(np.bincount(labels[rows], minlength=3), np.bincount(labels, minlength=3) // 2)
