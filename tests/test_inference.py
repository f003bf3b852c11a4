"""Loss-augmented inference, against every vector of decisions there is."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from jtrees.routing import Flips, augmented_leaf, flips, flips_of, leaf_index

exact, near, all_scored = jax.jit(augmented_leaf), jax.jit(flips), jax.jit(flips_of)


def draw(depth, n=20, seed=0, dtype=np.float64):
    """Scores, and what each leaf loses."""
    rng = np.random.default_rng([depth, seed])
    scores = rng.normal(size=(2**depth - 1, n)).astype(dtype)
    return scores, rng.exponential(size=(2**depth, n)).astype(dtype)


def best_decisions(scores, losses, radius=None):
    """Of one sample: the greatest ``g . z + loss at f(g)`` and its leaf, over all g or those so many bits away."""
    best = -np.inf, None
    for g in itertools.product((-1, 1), repeat=len(scores)):
        if radius is None or np.sum(np.asarray(g) != np.where(scores > 0, 1, -1)) <= radius:
            leaf = oracles.walk_scores(np.asarray(g))
            best = max(best, (np.dot(g, scores) + losses[leaf], leaf))
    return best


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_exact_inference_is_the_best_of_all_decisions(x64, depth):
    scores, losses = draw(depth)
    leaf = np.asarray(exact(scores, losses))
    violated = np.array([oracles.path_violations(z) for z in scores.T])
    for i, (z, lost) in enumerate(zip(scores.T, losses.T, strict=True)):
        value, best = best_decisions(z, lost)
        assert leaf[i] == best
        assert lost[leaf[i]] - 2 * violated[i, leaf[i]] == pytest.approx(value - np.abs(z).sum(), abs=1e-12)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_flips_are_the_decisions_one_bit_away(x64, depth):
    scores, losses = draw(depth)
    found = all_scored(scores)
    competing = np.take_along_axis(losses, np.asarray(found.leaf), axis=0) - 2 * np.asarray(found.violations())
    for i, (z, lost) in enumerate(zip(scores.T, losses.T, strict=True)):
        value, best = best_decisions(z, lost, radius=1)
        assert found.leaf[competing[:, i].argmax(), i] == best
        assert competing[:, i].max() == pytest.approx(value - np.abs(z).sum(), abs=1e-12)


def test_at_depth_one_both_are_the_same():
    scores, losses = draw(1, 500, dtype=np.float32)
    found = all_scored(scores)
    competing = np.take_along_axis(losses, np.asarray(found.leaf), axis=0) - 2 * np.asarray(found.violations())
    chosen = np.take_along_axis(np.asarray(found.leaf), competing.argmax(0)[None], axis=0)[0]
    np.testing.assert_array_equal(chosen, exact(scores, losses))
    turned = chosen != np.asarray(leaf_index(jnp.asarray(scores)))
    assert 50 < np.count_nonzero(turned) < 450


@pytest.mark.parametrize("depth", [1, 2, 5, 9])
def test_ways_are_followed_as_if_all_splits_were_scored(x64, depth):
    rng = np.random.default_rng(depth)
    weights, bias = rng.normal(size=(2**depth - 1, 4)), rng.normal(size=2**depth - 1)
    x = rng.normal(size=(50, 4))
    followed, scored = near(weights, bias, x), all_scored(weights @ x.T + bias[:, None])
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
    found: Flips = all_scored(jnp.zeros((3, 1)))
    assert found.leaf[:, 0].tolist() == [0, 2, 1]
    assert found.path[:, 0].tolist() == [0, 1] and not np.any(found.violations())
