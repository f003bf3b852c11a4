"""Loss-augmented inference, against every vector of decisions there is."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from jtrees.routing.inference import augmented_leaf, flips, flips_of


def best_decisions(scores, losses, radius=None):
    """Of one sample: the greatest ``g . z + loss at f(g)`` and its leaf, over all g or those so many bits away."""
    best = -np.inf, None
    for g in itertools.product((-1, 1), repeat=len(scores)):
        if radius is None or np.sum(np.asarray(g) != np.where(scores > 0, 1, -1)) <= radius:
            leaf = oracles.walk_scores(np.asarray(g))
            best = max(best, (np.dot(g, scores) + losses[leaf], leaf))
    return best


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_best_of_all_decisions_and_of_those_one_bit_away(x64, depth):
    rng = np.random.default_rng(depth)
    scores, losses = rng.normal(size=(2**depth - 1, 20)), rng.exponential(size=(2**depth, 20))
    exact, found = np.asarray(jax.jit(augmented_leaf)(scores, losses)), jax.jit(flips_of)(scores)
    near = np.asarray(found.leaf)
    competing = np.take_along_axis(losses, near, axis=0) - 2 * np.asarray(found.violations())
    for i, (z, lost) in enumerate(zip(scores.T, losses.T, strict=True)):
        violated = np.array(oracles.path_violations(z))
        value, best = best_decisions(z, lost)
        assert exact[i] == best
        assert lost[best] - 2 * violated[best] == pytest.approx(value - np.abs(z).sum(), abs=1e-12)
        value, best = best_decisions(z, lost, radius=1)
        assert near[competing[:, i].argmax(), i] == best
        assert competing[:, i].max() == pytest.approx(value - np.abs(z).sum(), abs=1e-12)


@pytest.mark.parametrize("depth", [1, 2, 9])
def test_paths_are_followed_as_if_all_splits_were_scored(x64, depth):
    rng = np.random.default_rng(depth)
    weights, bias = rng.normal(size=(2**depth - 1, 4)), rng.normal(size=2**depth - 1)
    x = rng.normal(size=(50, 4))
    followed, scored = jax.jit(flips)(weights, bias, x), jax.jit(flips_of)(weights @ x.T + bias[:, None])
    assert followed.leaf.shape == (depth + 1, 50) and followed.leaf.dtype == jnp.int32
    for one, other in zip(followed, scored, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
    # By hand: what is turned over is one decision, and below it hard routing goes on.
    for i in range(0, 50, 7):
        z = weights @ x[i] + bias
        assert followed.leaf[0, i] == oracles.walk_scores(z)
        for level, node in enumerate(np.asarray(followed.path)[:, i]):
            assert followed.leaf[1 + level, i] == oracles.walk_scores(np.where(np.arange(len(z)) == node, -z, z))


def test_a_score_of_zero_goes_left_and_costs_nothing_to_turn():
    found = jax.jit(flips_of)(jnp.zeros((3, 1)))
    assert found.leaf[:, 0].tolist() == [0, 2, 1]
    assert found.path[:, 0].tolist() == [0, 1] and not np.any(found.violations())
