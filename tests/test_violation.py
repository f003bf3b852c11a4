"""Routing by violation, against sums over the written-out path to each leaf."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from jtrees.routing import leaf_index, path_violations, violation

# Programs that tests share: most of the time here is compilation.
hard, paths, soft = jax.jit(leaf_index), jax.jit(path_violations), jax.jit(violation)


def draw(depth, shape=(), dtype=np.float64, seed=0):
    return np.random.default_rng(seed).normal(size=(2**depth - 1, *shape)).astype(dtype)


def test_textbook_definition(x64):
    drawn = [draw(depth, shape) for depth, shape in [(1, (5,)), (2, (2, 3)), (4, ()), (4, (2, 3))]]
    everything = lambda scores, scale: (path_violations(scores), violation(scores, scale), violation(scores))
    of_all = jax.jit(lambda drawn, scale: [everything(scores, scale) for scores in drawn])
    for scale in (0.3, 5.0):
        for scores, (found, scaled, plain) in zip(drawn, of_all(drawn, scale), strict=True):
            assert found.shape == (scores.shape[0] + 1, *scores.shape[1:])
            np.testing.assert_allclose(found, oracles.path_violations(scores), rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(scaled, oracles.violation(scores, scale), rtol=1e-11)
            np.testing.assert_allclose(scaled.sum(0), 1, rtol=1e-12)
            np.testing.assert_allclose(plain, oracles.violation(scores, 1.0), rtol=1e-11)


def test_by_hand():
    # Root 2 (right), its left child -1 (left), its right child 0 (left, as any score that is not above 0).
    assert paths(jnp.asarray([2.0, -1.0, 0.0])).tolist() == [2, 3, 0, 0]


def test_only_the_hard_leaf_is_not_violated():
    scores = draw(4, (200,), np.float32)
    leaf, violated = np.asarray(hard(scores)), np.asarray(paths(scores))
    assert np.array_equal((violated == 0).sum(0), np.ones(200))
    assert np.array_equal(np.argmin(violated, axis=0), leaf)
    # Scores that are integers, some of them 0: other paths may be free too, the hard one always is.
    scores = np.random.default_rng(1).integers(-2, 3, (15, 200)).astype(np.float32)
    assert not np.asarray(paths(scores))[hard(scores), np.arange(200)].any()


def test_hard_as_the_scale_grows():
    scores = draw(4, (200,), np.float32)
    leaf = np.asarray(hard(scores))
    scales = np.array([1.0, 10.0, 100.0, 1e4, 1e30], np.float32)
    at_hard = [np.asarray(soft(scores, scale))[leaf, np.arange(200)] for scale in scales]
    assert all((b >= a - 1e-6).all() for a, b in itertools.pairwise(at_hard))
    assert at_hard[0].max() < 0.9
    np.testing.assert_allclose(at_hard[-1], 1, atol=1e-6)
    far = jax.jit(jax.grad(lambda scale: soft(scores, scale).max(0).sum()))(scales[-1])
    assert np.isfinite(far)


def test_a_scale_on_the_scores_is_the_same_thing(x64):
    scores = draw(3, (4,))
    np.testing.assert_allclose(soft(scores, 7.0), soft(7 * scores, 1.0), rtol=1e-10)
    per_sample = np.array([0.1, 1.0, 10.0, 50.0])
    np.testing.assert_allclose(soft(scores, per_sample), soft(per_sample * scores, 1.0), rtol=1e-10)


@pytest.mark.parametrize("mode", [jax.jacfwd, jax.jacrev])
def test_gradients(x64, mode):
    scores, scale = draw(3, (2,)), np.array(2.5)  # none so near 0 that a step would cross the kink
    assert np.abs(scores).min() > 1e-3
    weights = np.random.default_rng(5).normal(size=(8, 2))
    plain = lambda z, scale: sum((w * p).sum() for w, p in zip(weights, oracles.violation(z, scale), strict=True))
    by_scores, by_scale = jax.jit(mode(lambda z, scale: (weights * violation(z, scale)).sum(), (0, 1)))(scores, scale)
    np.testing.assert_allclose(by_scores, oracles.numeric_gradient(lambda z: plain(z, 2.5), scores), atol=1e-8)
    np.testing.assert_allclose(by_scale, oracles.numeric_gradient(lambda s: plain(scores, s), scale), atol=1e-8)


def test_the_same_under_vmap_and_in_its_dtype():
    scores, scales = draw(3, (6,), np.float32), np.array([0.5, 3.0], np.float32)
    together = jax.jit(jax.vmap(jax.vmap(violation, (1, None), 1), (None, 0)))(scores, scales)
    assert together.dtype == jnp.float32
    for one, scale in zip(together, scales, strict=True):
        np.testing.assert_allclose(one, soft(scores, scale), rtol=1e-6)
    one_by_one = jax.jit(jax.vmap(path_violations, 1, 1))(scores)
    np.testing.assert_allclose(paths(scores), one_by_one, rtol=1e-6)
