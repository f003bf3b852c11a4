"""Hard routing against a walk down the tree, one sample at a time.

Weights and features are small whole numbers, so scores are exact in float32 and many are exactly zero.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from jtrees import ops
from jtrees.routing import leaf_index

N, P = 40, 3
# Programs that tests share: most of the time here is compilation.
folded, by_path = jax.jit(leaf_index), jax.jit(ops.hard)
both = jax.jit(lambda weights, bias, x, scores: (ops.hard(weights, bias, x), leaf_index(scores)))


def draw(depth, seed=0, batch=()):
    rng = np.random.default_rng(seed)
    nodes = 2**depth - 1
    shapes = [(*batch, nodes, P), (*batch, nodes), (*batch, N, P)]
    return [rng.integers(-2, 3, shape).astype(np.float32) for shape in shapes]


def scores_of(weights, bias, x):
    return weights @ x.T + bias[:, None]


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "depth", [1, 2, 3, 5, 6, 7, 9, 12, *(pytest.param(depth, marks=slow) for depth in (4, 8, 10, 11))]
)
def test_both_ways_agree_with_the_walk(depth):
    weights, bias, x = draw(depth)
    scores = scores_of(weights, bias, x)
    assert (scores == 0).mean() > 0.05  # ties are part of this test
    expected = oracles.walk(weights, bias, x)
    for leaf in both(weights, bias, x, scores):
        assert leaf.dtype == jnp.int32
        assert np.array_equal(leaf, expected)


def test_any_number_of_folded_levels_gives_the_same_leaf():
    weights, bias, x = draw(5)
    expected, tried = oracles.walk(weights, bias, x), (1, 2, 3, 4, 5, 9)
    for leaf in jax.jit(lambda *tree: [ops.hard(*tree, folded_levels=levels) for levels in tried])(weights, bias, x):
        assert np.array_equal(leaf, expected)


@pytest.mark.parametrize("depth", [1, 7, 8, 9, 16])  # around the width of the small integers inside
def test_first_and_last_leaf(depth):
    ones = np.ones((2**depth - 1, 2), np.float32)
    assert folded(ones).tolist() == [2**depth - 1] * 2
    assert folded(-ones).tolist() == [0] * 2


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_ties_go_left_at_every_level(zero):
    nodes = 2**8 - 1
    assert folded(np.full((nodes, 2), zero, np.float32)).tolist() == [0] * 2
    leaf = by_path(np.full((nodes, P), zero, np.float32), np.full(nodes, zero, np.float32), np.ones((N, P), np.float32))
    assert leaf.tolist() == [0] * N


def test_trailing_axes():
    scores = np.random.default_rng(3).normal(size=(7, 2, 3)).astype(np.float32)
    expected = np.array([[oracles.walk_scores(scores[:, i, j]) for j in range(3)] for i in range(2)])
    assert np.array_equal(folded(scores), expected)
    assert folded(scores[:, 0, 0]) == expected[0, 0]


def test_vmap_over_trees():
    weights, bias, x = draw(7, seed=4, batch=(2,))
    expected = np.stack([oracles.walk(*one) for one in zip(weights, bias, x, strict=True)])
    assert np.array_equal(jax.jit(jax.vmap(ops.hard))(weights, bias, x), expected)
    scores = np.stack([scores_of(*one) for one in zip(weights, bias, x, strict=True)])
    assert np.array_equal(jax.jit(jax.vmap(leaf_index))(scores), expected)
