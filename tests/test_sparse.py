"""Splits of few terms: what is removed, that the rest is trained, and how the number of terms is chosen."""

import jax
import numpy as np
import pandas as pd
import pytest

import jtrees
from jtrees.data.constraints import checked_groups, column_finder
from jtrees.ensembles import sparse
from tests import sweeps

pytestmark = pytest.mark.usefixtures("standard_promotion")

KEY = jax.random.key(0)
GET = jtrees.GET(depth=2, starts=2, epochs=60, precondition=0.0)


def plane(n=600, p=12, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, p))
    y = 2.0 * (x[:, 0] + 2 * x[:, 1] > 0) + (x[:, 2] - x[:, 3] > 0.5) + 0.05 * rng.normal(size=n)
    return x, y


def columns_of(tree):
    return np.count_nonzero(np.asarray(tree.weights), axis=1)


def test_the_least_terms_on_the_rows_of_a_split_are_replaced_by_their_means():
    """With an update of no size: term by deviation, and the mean of what is removed in the threshold."""
    rng = np.random.default_rng(0)
    x, weight = (
        rng.normal(size=(300, 6)) * [1, 2, 3, 1, 1, 1] + 1,
        rng.uniform(size=300) * (rng.uniform(size=300) > 0.2),
    )
    y = x @ rng.normal(size=6)
    options = {"key": KEY, "sample_weight": weight}
    base = jtrees.DGT(depth=2, epochs=5, widths=(), precondition=0.0)
    dense = jtrees.fit(base, x, y, **options).tree
    recipe = jtrees.Sparse(base, terms=5, epochs=1, learning_rate=1e-9)  # one step, from six terms to five
    thin = jtrees.fit(recipe, x, y, **options).tree
    rows = {0: np.flatnonzero(weight)}
    for j in range(3):
        score, part = (x @ np.float64(t.weights[j]) + np.float64(t.bias[j]) for t in (dense, thin))
        features, share = x[rows[j]], weight[rows[j]]
        added = features * np.float64(dense.weights[j])
        weakest = np.cov(added.T, aweights=share, ddof=0).diagonal().argmin()
        score = score[rows[j]] - added[:, weakest] + np.average(added[:, weakest], weights=share)
        ratio = part[rows[j]] / score
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-3)
        assert ratio[0] > 0 and np.flatnonzero(thin.weights[j] == 0).tolist() == [weakest]
        rows |= {2 * j + 1: rows[j][score <= 0], 2 * j + 2: rows[j][score > 0]}


@pytest.mark.parametrize("leaves", sweeps.slow(["constant", "linear"], ["constant"]))
def test_what_matters_is_kept(leaves):
    x, y = plane()
    base = GET.replace(leaves=leaves, epochs=200)
    dense = jtrees.fit(base, x, y, key=KEY)
    fit = jtrees.fit(jtrees.Sparse(base, terms=2, epochs=100), x, y, key=KEY)
    untrained = jtrees.fit(jtrees.Sparse(base, terms=2, epochs=1), x, y, key=KEY)
    assert columns_of(dense.tree).max() == 12 and columns_of(fit.tree).max() == 2 and fit.loss < 0.75 * untrained.loss
    x_test, y_test = plane(seed=1)
    error = lambda fit: np.mean((fit.predict(x_test) - y_test) ** 2)
    assert error(fit) < error(dense) + 0.02
    assert list(fit.report.search.terms) == [12, 10, 8, 6, 5, 4, 3, 2] and fit.report.search.losses.shape == (8,)
    if leaves == "constant":  # else the loss is an expected error
        np.testing.assert_allclose(fit.report.search.losses[[0, -1]], [dense.loss, fit.loss], rtol=1e-5)
    assert fit.report.search.base.cart_loss == dense.report.search.cart_loss


@pytest.mark.slow
def test_sharpness_grows_from_its_lowest_to_its_highest_value_within_the_epochs(monkeypatch):
    schedules, get = [], sparse.get

    def recorded(depth, sharpness, **options):
        schedules.append(sharpness)
        return get(depth, sharpness, **options)

    monkeypatch.setattr(sparse, "get", recorded)
    x, y = plane(n=60, p=4)
    jtrees.fit(jtrees.Sparse(GET, terms=2, epochs=7), x, y, key=KEY)
    assert schedules
    for schedule in schedules:
        assert (schedule(0), schedule(7)) == pytest.approx((8.0, 60.0))


@pytest.mark.parametrize("groups", sweeps.quick([[[0, 1], [2, 3]], [[0, 2], [1, 3]]], [[[0, 1], [2, 3]]]))
def test_a_split_has_the_columns_of_one_group(groups):
    x, y = plane(p=6)
    recipe = jtrees.Sparse(jtrees.GET(depth=2, starts=2, epochs=60), interactions=groups, epochs=60)
    fit = jtrees.fit(recipe, x, y, key=KEY)
    owner = [next((number for number, group in enumerate(groups) if j in group), 2) for j in range(6)]
    assert all(len(set(np.asarray(owner)[row != 0])) <= 1 for row in np.asarray(fit.tree.weights))
    report = fit.report.search
    assert report.groups[0] == 3 and report.groups[-1] == 1 and len(report.groups) == len(report.losses)
    true_groups = groups == [[0, 1], [2, 3]]
    assert (fit.loss < 0.2) == true_groups  # the targets step along columns 0 and 1, and along 2 and 3


def test_groups_by_names_that_are_numbers():
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(90, 3)), columns=[2, 0, 1])
    columns_of_frame = lambda frame: jtrees.tables.TableEncoder.fit(frame)[0].named_columns
    np.testing.assert_array_equal(checked_groups([[0, 1]], columns_of_frame(frame), 3), [3, 0, 0])
    np.testing.assert_array_equal(checked_groups([[0, 1]], None, 3), [0, 0, 3])
    np.testing.assert_array_equal(checked_groups("none", None, 3), [0, 1, 2])
    gaps = columns_of_frame(frame.mask(np.arange(90)[:, None] % 9 == [0, 1, 2]))  # columns with indicators
    np.testing.assert_array_equal(checked_groups([[0, 1]], gaps, 6), [3, 3, 0, 0, 0, 0])
    constant = columns_of_frame(pd.concat([frame[[2]], frame[[0]] * 0, frame[[1]]], axis=1))  # which has no feature
    np.testing.assert_array_equal(checked_groups([[1, 2]], constant, 2), [0, 0])


@pytest.mark.parametrize(
    ("names", "number", "name"),
    [(["1e3", "Infinity"], 1, "Infinity"), (["2", "0", "1.0"], 1, "1.0"), (["2", "0"], 0, "0"), (["2", "a"], 2.0, "2")],
)
def test_a_number_is_a_name_only_if_a_column_has_it(names, number, name):
    assert column_finder(names, "columns")(number) == name


@pytest.mark.parametrize("around", [lambda base: jtrees.Boosted(base), jtrees.Polished])
def test_a_recipe_that_would_lose_the_last_change_of_the_splits_refuses_its_base(around):
    x, y = plane(p=4)
    for base in (jtrees.Sparse(GET), jtrees.Polished(GET), jtrees.BestOf(jtrees.Sparse(GET), runs=2)):
        message = "base must not change its splits at the end, as Polished and Sparse do, got"
        with pytest.raises(ValueError, match=message):
            jtrees.fit(around(base), x, y, key=KEY)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([["lat"], ["lon", "lat"]], "interactions must be groups that do not overlap, got 'lat' twice"),
        ([["lat", "height"]], r"interactions must name columns of x, .*'lat'.*, got 'height'"),
        (["lat", "lon"], "interactions must be groups of columns, such as .*, got"),
        ("all", "interactions must be groups of columns, .*, got 'all'"),
    ],
)
def test_bad_groups(groups, message):
    x, y = plane(p=4)
    frame = pd.DataFrame(x, columns=["lat", "lon", "income", "age"])
    with pytest.raises(ValueError, match=message):
        jtrees.fit(jtrees.Sparse(GET, interactions=groups), frame, y, key=KEY)


def test_the_verdict_charges_the_thin_tree_and_not_its_base():
    """The loss that linear leaves of all columns expect says nothing about leaves after the removal of terms."""
    x, y = plane(n=200)
    base = GET.replace(leaves="linear", epochs=20)
    dense, thin = (jtrees.fit(recipe, x, y, key=KEY) for recipe in (base, jtrees.Sparse(base, terms=1, epochs=5)))
    assert thin.loss < thin.report.baselines["model"] != dense.report.baselines["model"]
