"""Leaves decided in double precision, against scores as fractions."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrees import exact, ops
from tests import nasty


def walked(tree, x):
    """The leaf of each sample by exact arithmetic."""
    exactly = np.vectorize(Fraction, otypes=[object])
    weights, bias, leaves = exactly(np.float64(tree.weights)), exactly(np.float64(tree.bias)), []
    for row in exactly(np.float64(x)):
        node = 0
        while node < len(bias):
            node = 2 * node + 1 + int(weights[node] @ row + bias[node] > 0)
        leaves.append(node - len(bias))
    return np.array(leaves)


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "p"), [(1, 2), (3, 5), (8, 3), pytest.param(7, 40, marks=pytest.mark.wide)])
def test_samples_on_a_split_reach_the_leaf_of_exact_scores(depth, p):
    tree, x = nasty.near_ties(depth, p)
    expected = walked(tree, x)
    leaf = tree.leaf_index(x)
    assert leaf.dtype == np.int32
    np.testing.assert_array_equal(leaf, expected)
    np.testing.assert_array_equal(exact.leaf_index(tree.weights, tree.bias, x), expected)
    np.testing.assert_array_equal(tree.predict(x), np.asarray(tree.leaves.values)[expected])
    rounded = np.asarray(jax.jit(ops.hard)(tree.weights, tree.bias, jnp.asarray(x)))
    assert (rounded != expected).mean() > 0.005  # what single precision makes of them


@pytest.mark.parametrize(("depth", "p"), [(1, 2), (3, 5), (2, 40)])
def test_scores_of_one_sample_have_the_same_bits(depth, p):
    tree, x = nasty.near_ties(depth, p, n=50)
    weights, bias = np.asarray(tree.weights), np.asarray(tree.bias)
    each = np.stack([exact.scores(w, b, x) for w, b in zip(weights, bias, strict=True)], axis=1)
    for row, expected, leaf in zip(x, each, exact.leaf_index(weights, bias, x), strict=True):
        scores = exact.row_scores(weights, bias, row)
        np.testing.assert_array_equal(scores, expected)
        assert exact.row_leaf(scores) == leaf


def test_unit_splits_are_the_same_splits():
    weights = np.array([[1e30, -1e20], [0, 0], [0, 0], [3e-30, 0], [5, 12], [0, 1], [0, 0]], np.float32)
    bias = np.array([1, 1, -1, 0, 13, 1e20, 0], np.float32)
    unit_weights, unit_bias = exact.unit_splits(weights, bias)
    assert unit_weights.dtype == unit_bias.dtype == jnp.float32
    norm = np.linalg.norm(np.float64(unit_weights), axis=1)
    size = np.maximum(norm, np.abs(unit_bias))
    assert (size >= 0.5).all() and (size < 2).all()
    x = np.random.default_rng(0).normal(size=(500, 2)).astype(np.float32)
    np.testing.assert_array_equal(exact.leaf_index(unit_weights, unit_bias, x), exact.leaf_index(weights, bias, x))


def test_many_trees_are_decided_at_once_as_each_alone():
    rng = np.random.default_rng(0)
    weights, bias = rng.normal(size=(6, 7, 3)).astype(np.float32), rng.normal(size=(6, 7)).astype(np.float32)
    x = rng.normal(size=(20, 3)).astype(np.float32)
    each = [exact.leaf_index(*split, x) for split in zip(weights, bias, strict=True)]
    together = exact.leaf_index(weights, bias, x)
    assert together.dtype == np.int32
    np.testing.assert_array_equal(together, each)


def test_few_samples_are_uncertain_if_features_have_very_different_units():
    """Splits of standardised features, in the units of the features: the largest does not hide the others."""
    rng = np.random.default_rng(0)
    size = np.float32([1e3, 1, 1e-4, 1e-7])
    x = (rng.normal(size=(5000, 4)) * size).astype(np.float32)
    weights = (rng.normal(size=(9, 15, 4)) / size).astype(np.float32)
    weights[..., 1] = 0
    bias = rng.normal(size=(9, 15)).astype(np.float32)
    *splits, unit = exact.balanced_splits(weights, bias)
    assert unit[1] == 0 and (np.frexp(unit)[0][unit > 0] == 0.5).all()  # powers of two
    follow = jax.jit(jax.vmap(ops.hard_and_uncertain, (0, 0, None)))
    leaf, uncertain = follow(*map(jnp.asarray, (*splits, x * unit)))
    assert np.mean(uncertain) < 1e-3
    elsewhere = np.asarray(leaf) != exact.leaf_index(weights, bias, x)
    assert not (elsewhere & ~np.asarray(uncertain)).any()


def test_few_samples_are_uncertain_if_splits_of_one_column_have_very_different_units():
    """A threshold has the unit of its column, so the biases of the splits differ as much as the columns do."""
    rng = np.random.default_rng(0)
    size = np.float32([1e9, 1, 1e-9])
    x = (rng.normal(size=(5000, 3)) * size).astype(np.float32)
    column = rng.integers(0, 3, (9, 15))
    weights = np.eye(3, dtype=np.float32)[column]
    bias = (rng.normal(size=(9, 15)) * size[column]).astype(np.float32)
    *splits, unit = exact.balanced_splits(weights, bias)
    leaf, uncertain = jax.jit(jax.vmap(ops.hard_and_uncertain, (0, 0, None)))(*map(jnp.asarray, (*splits, x * unit)))
    assert np.mean(uncertain) < 1e-3
    elsewhere = np.asarray(leaf) != exact.leaf_index(weights, bias, x)
    assert not (elsewhere & ~np.asarray(uncertain)).any()
