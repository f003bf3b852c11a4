"""Hard routing against a walk down the tree, one sample at a time.

Weights and features are small whole numbers, so scores are exact in float32 and many are exactly zero.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from jtrees.routing import leaf_index, leaf_index_by_path

N, P = 40, 3


def draw(depth, seed=0, batch=()):
    rng = np.random.default_rng(seed)
    nodes = 2**depth - 1
    shapes = [(*batch, nodes, P), (*batch, nodes), (*batch, N, P)]
    return [rng.integers(-2, 3, shape).astype(np.float32) for shape in shapes]


def scores_of(weights, bias, x):
    return weights @ x.T + bias[:, None]


@pytest.mark.parametrize("depth", range(1, 13))
def test_both_ways_agree_with_the_walk(depth):
    weights, bias, x = draw(depth)
    scores = scores_of(weights, bias, x)
    assert (scores == 0).mean() > 0.05  # ties are part of this test
    expected = oracles.walk(weights, bias, x)
    folded = jax.jit(leaf_index)(scores)
    by_path = jax.jit(leaf_index_by_path)(weights, bias, x)
    assert folded.dtype == by_path.dtype == jnp.int32
    assert np.array_equal(folded, expected)
    assert np.array_equal(by_path, expected)


@pytest.mark.parametrize("folded_levels", [1, 2, 3, 4, 5, 9])
def test_any_number_of_folded_levels_gives_the_same_leaf(folded_levels):
    weights, bias, x = draw(5)
    leaf = leaf_index_by_path(*map(jnp.asarray, (weights, bias, x)), folded_levels=folded_levels)
    assert np.array_equal(leaf, oracles.walk(weights, bias, x))


@pytest.mark.parametrize("depth", [1, 7, 8, 9, 16])  # around the width of the small integers inside
def test_first_and_last_leaf(depth):
    ones = jnp.ones((2**depth - 1, 2), jnp.float32)
    compiled = jax.jit(leaf_index)
    assert compiled(ones).tolist() == [2**depth - 1] * 2
    assert compiled(-ones).tolist() == [0] * 2


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_ties_go_left_at_every_level(zero):
    depth = 8
    nodes = 2**depth - 1
    assert jax.jit(leaf_index)(jnp.full((nodes, 3), zero)).tolist() == [0] * 3
    leaf = jax.jit(leaf_index_by_path)(jnp.full((nodes, P), zero), jnp.full(nodes, zero), jnp.ones((2, P)))
    assert leaf.tolist() == [0] * 2


def test_trailing_axes():
    scores = np.random.default_rng(3).normal(size=(7, 2, 3)).astype(np.float32)
    expected = np.array([[oracles.walk_scores(scores[:, i, j]) for j in range(3)] for i in range(2)])
    assert np.array_equal(leaf_index(jnp.asarray(scores)), expected)
    assert leaf_index(jnp.asarray(scores[:, 0, 0])) == expected[0, 0]


def test_jit_and_vmap_over_trees():
    weights, bias, x = draw(7, seed=4, batch=(2,))
    expected = np.stack([oracles.walk(*one) for one in zip(weights, bias, x, strict=True)])
    assert np.array_equal(jax.jit(jax.vmap(leaf_index_by_path))(weights, bias, x), expected)
    scores = jnp.asarray(np.stack([scores_of(*one) for one in zip(weights, bias, x, strict=True)]))
    assert np.array_equal(jax.jit(jax.vmap(leaf_index))(scores), expected)
