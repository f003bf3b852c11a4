"""Hard routing against a walk down the tree, one sample at a time.

Weights and features are small whole numbers, so scores are exact in float32 and many are exactly zero.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import sweeps

from jtrees import ops
from jtrees.routing import leaf_index

N, P = 40, 3
# Programs that tests share: most of the time here is compilation.
folded = jax.jit(leaf_index)
both = jax.jit(lambda weights, bias, x, scores: (ops.hard(weights, bias, x), leaf_index(scores)))


def draw(depth, seed=0, batch=()):
    """Splits, samples and their scores."""
    rng = np.random.default_rng(seed)
    nodes = 2**depth - 1
    shapes = [(*batch, nodes, P), (*batch, nodes), (*batch, N, P)]
    weights, bias, x = (rng.integers(-2, 3, shape).astype(np.float32) for shape in shapes)
    return weights, bias, x, weights @ np.swapaxes(x, -1, -2) + bias[..., None]


@pytest.mark.parametrize("depth", sweeps.quick(range(1, 13), (1, 2, 5, 6, 7, 9, 12)))
def test_both_ways_agree_with_the_walk(depth):
    weights, bias, x, scores = draw(depth)
    assert (scores == 0).mean() > 0.05  # ties are part of this test
    expected = oracles.walk(weights, bias, x)
    for leaf in both(weights, bias, x, scores):
        assert leaf.dtype == jnp.int32
        assert np.array_equal(leaf, expected)


def test_any_number_of_folded_levels_gives_the_same_leaf(monkeypatch):
    weights, bias, x, _ = draw(5)

    def with_levels(levels, *tree):
        monkeypatch.setattr(ops, "FOLDED_LEVELS", levels)
        return ops.hard(*tree)

    tried = jax.jit(lambda *tree: [with_levels(levels, *tree) for levels in (1, 2, 3, 4, 5, 9)])
    for leaf in tried(weights, bias, x):
        assert np.array_equal(leaf, oracles.walk(weights, bias, x))


@pytest.mark.parametrize("depth", [1, 8, 9, 16])  # around the width of the small integers inside
def test_first_and_last_leaf_and_ties_which_go_left(depth):
    scores = np.float32([1, -1, 0, -0.0]) * np.ones((2**depth - 1, 1), np.float32)
    assert folded(scores).tolist() == [2**depth - 1, 0, 0, 0]


def test_trailing_axes():
    scores = np.random.default_rng(3).normal(size=(7, 2, 3)).astype(np.float32)
    expected = np.array([[oracles.walk_scores(scores[:, i, j]) for j in range(3)] for i in range(2)])
    assert np.array_equal(folded(scores), expected)
    assert folded(scores[:, 0, 0]) == expected[0, 0]


def test_vmap_over_trees():
    weights, bias, x, scores = draw(7, seed=4, batch=(2,))
    expected = np.stack([oracles.walk(*one) for one in zip(weights, bias, x, strict=True)])
    for leaf in jax.jit(jax.vmap(both))(weights, bias, x, scores):
        assert np.array_equal(leaf, expected)
