"""Axis-aligned splits of a level at once, against scikit-learn's CART and against sums over every threshold."""

from functools import partial

import jax
import numpy as np
import pytest
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from jtrees import Classification, Regression, splitting
from jtrees.training import Batch


@partial(jax.jit, static_argnames=("nodes", "classes"))
def best(x, edges, y, weight, node, nodes, classes=None):
    task = Regression() if classes is None else Classification(classes)
    statistics, impurity = splitting.statistics_of(task, y, weight)
    return splitting.best_thresholds(x, edges, statistics, node, nodes, impurity)


def data(n=300, values=20, seed=0):
    """Features with few values, so that every threshold is the edge of a bin; classes, targets, nodes."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, values, (n, 4)).astype(np.float32)
    score = x[:, 0] + 0.5 * x[:, 1] + rng.normal(size=n)
    return x, (score > 9).astype(int) + (score > 15), score.astype(np.float32), rng.integers(0, 5, n)


def search(x, y, node, nodes, classes=None, weight=None, bins=32):
    weight = np.ones(len(x), np.float32) if weight is None else weight
    return best(x, splitting.edges_of(x, bins), y, weight, node, nodes=nodes, classes=classes)


@pytest.mark.parametrize(("classes", "nodes"), [(3, 5), (3, 40), (None, 5)])  # of 40 nodes 35 are empty
def test_gains_are_those_of_cart(classes, nodes):
    x, labels, targets, node = data()
    y, cart, unit = targets, DecisionTreeRegressor(max_depth=1), 1
    if classes:
        y, cart = labels, DecisionTreeClassifier(criterion="entropy", max_depth=1)
        unit = np.log(2)  # theirs are bits
    weight = np.random.default_rng(1).integers(1, 4, len(x)).astype(np.float32)
    split = search(x, y, node, nodes, classes, weight)
    for i in range(5):
        members = node == i
        stump = cart.fit(x[members], y[members], weight[members]).tree_
        before, left, right = stump.impurity * stump.weighted_n_node_samples
        assert float(split.gain[i]) == pytest.approx(unit * (before - left - right), rel=1e-4)
        assert int(split.feature[i]) == stump.feature[0]
        ours, theirs = (x[members][:, stump.feature[0]] > t for t in (float(split.threshold[i]), stump.threshold[0]))
        np.testing.assert_array_equal(ours, theirs)
    assert not np.any(split.gain[5:])


@pytest.mark.parametrize("far", [1, 1000])
def test_targets_of_other_nodes_do_not_hide_a_split(far):
    x = np.random.default_rng(0).normal(size=(400, 2)).astype(np.float32)
    node = (x[:, 0] > 0).astype(int)
    y = np.float32(far * node + 0.01 * (x[:, 1] > 0))
    split = search(x, y, node, 2)
    np.testing.assert_array_equal(split.feature, [1, 1])
    assert np.all(split.gain > 0)
    np.testing.assert_array_equal(search(x, np.float32(far * (node + 1.3)), node, 2).gain, 0)


def test_pure_nodes_and_nodes_that_nothing_divides_gain_nothing():
    x = np.float32([[0], [1], [2], [5], [5], [5]])
    y, node = np.array([1, 1, 1, 0, 1, 0]), np.array([0, 0, 0, 1, 1, 1])
    split = search(x, y, node, 2, 2)
    assert split.gain.tolist() == [0, 0]


def test_samples_without_weight_do_not_count():
    x, y, _, node = data()
    weight = np.random.default_rng(0).integers(0, 2, len(x)).astype(np.float32)
    edges, positive = splitting.edges_of(x), weight > 0
    run = lambda *arrays: best(arrays[0], edges, *arrays[1:], nodes=5, classes=3)
    among, alone = run(x, y, weight, node), run(*(a[positive] for a in (x, y, weight, node)))
    jax.tree.map(np.testing.assert_array_equal, among, alone)


def test_edges_lie_half_way_between_values_and_in_even_parts():
    x = np.stack([np.arange(1000) % 3, np.arange(1000) ** 2, np.full(1000, 7)], 1).astype(np.float32)
    edges = splitting.edges_of(x, 8)
    assert edges.shape == (3, 7)
    assert edges[0].tolist() == [0.5, 1.5, *[np.inf] * 5]
    assert np.isinf(edges[2]).all()
    shares = np.diff(np.searchsorted(x[:, 1], edges[1]), prepend=0, append=1000)
    assert shares.min() >= 120 and shares.max() <= 130
    assert not np.isin(edges[1], x[:, 1]).any()


@pytest.mark.parametrize("values", [None, 3, 1])
def test_edges_within_a_program_divide_the_samples_inside_equally(values):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(203, 3)).astype(np.float32)
    x = x if values is None else np.round(x).clip(0, values - 1)
    inside = rng.random(203) < 0.7
    edges_within = jax.jit(splitting.edges_within, static_argnames="bins")
    assert np.isinf(edges_within(x, np.zeros(203, np.float32), bins=8)).all()
    edges = np.asarray(edges_within(x, inside.astype(np.float32), bins=8))
    assert edges.shape == (3, 7) and (edges[:, 1:] >= edges[:, :-1]).all()
    for column, column_edges in zip(x[inside].T, edges, strict=True):
        finite = column_edges[np.isfinite(column_edges)]
        assert not np.isin(finite, column).any()
        counts = np.histogram(column, [-np.inf, *finite, np.inf])[0]
        if values is None:
            assert len(finite) == 7 and set(counts) <= {inside.sum() // 8, inside.sum() // 8 + 1}
        else:
            np.testing.assert_array_equal(np.unique(finite), [0.5, 1.5][: values - 1])


@pytest.mark.parametrize("in_program", [False, True])
def test_bins_have_equal_weights(in_program):
    """A whole weight is a number of equal samples."""
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(300, 2)).astype(np.float32), rng.integers(0, 9, 300)
    weight[x[:, 0] > 1] *= 20
    x, weight = x[weight > 0], weight[weight > 0]
    within = jax.jit(splitting.edges_within, static_argnames="bins")
    find = within if in_program else lambda x, weight, bins: splitting.edges_of(x, bins, weight)
    edges = np.asarray(find(x, weight.astype(np.float32), bins=8))
    for column, column_edges in zip(x.T, edges, strict=True):
        bins = np.bincount(np.searchsorted(column_edges, column), weight, 8)
        assert np.abs(np.cumsum(bins) - weight.sum() * np.arange(1, 9) / 8).max() <= weight.max()
    each = np.repeat(x, weight, axis=0)
    equal = np.asarray(find(each, np.ones(len(each), np.float32), bins=8))
    assert np.abs(equal - edges).max() < 0.2


def test_columns_by_covariance_are_those_of_the_definition():
    rng = np.random.default_rng(0)
    x, y, weight = rng.normal(size=(400, 30)), rng.normal(size=(400, 2)), rng.integers(0, 3, 400).astype(float)
    y += x[:, :1] + np.square(x[:, 1:2])
    key, share = jax.random.key(3), weight / weight.sum()
    centred = lambda a: a - share @ a
    squares = centred(np.square(centred(x)))
    correlations = [
        np.square((share[:, None] * a).T @ centred(y)).sum(1) / (share @ np.square(a)) for a in (centred(x), squares)
    ]
    score, first_half = sum(correlations), np.asarray(jax.random.bernoulli(key, shape=(30,)))
    order = sorted(range(30), key=lambda column: (not first_half[column], -score[column]))
    arrays = [np.float32(a) for a in (x, y, weight)]
    actual = splitting.columns_by_covariance(Batch(*arrays), 20, key)
    assert actual.tolist() == sorted(order[:20])


def test_constant_columns_come_last():
    x = np.random.default_rng(0).normal(size=(300, 100)).astype(np.float32)
    x[:, 30:] = 0
    batch = Batch(x, x[:, 0] + x[:, 1], np.ones(300, np.float32))
    assert set(range(30)) <= set(splitting.columns_by_covariance(batch, 40, jax.random.key(0)).tolist())
