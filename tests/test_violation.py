"""Routing by violation, against sums over the written-out path to each leaf."""

import itertools

import jax
import numpy as np
import oracles
import pytest

from jtrees.routing import leaf_index, path_violations, violation

# Programs that tests share: most of the time here is compilation.
hard, paths, soft = jax.jit(leaf_index), jax.jit(path_violations), jax.jit(violation)


def draw(depth, shape=(), dtype=np.float64, seed=0):
    return np.random.default_rng(seed).normal(size=(2**depth - 1, *shape)).astype(dtype)


def test_textbook_definition(x64):
    drawn = [draw(depth, shape) for depth, shape in [(1, (3,)), (2, (2, 3)), (4, (3,)), (4, (2, 3))]]
    scales = [0.3, 5.0, np.array([0.1, 1.0, 50.0])]  # the last one a sample
    everything = lambda scores, scales: (
        path_violations(scores),
        violation(scores),
        [violation(scores, scale) for scale in scales],
    )
    of_all = jax.jit(lambda drawn, scales: [everything(scores, scales) for scores in drawn])
    for scores, (found, plain, scaled) in zip(drawn, of_all(drawn, scales), strict=True):
        assert found.shape == (scores.shape[0] + 1, *scores.shape[1:])
        np.testing.assert_allclose(found, oracles.path_violations(scores), rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(plain, oracles.violation(scores, 1.0), rtol=1e-11)
        for scale, probabilities in zip(scales, scaled, strict=True):
            np.testing.assert_allclose(probabilities, oracles.violation(scores, scale), rtol=1e-11)


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
    assert {one.dtype for one in at_hard} == {np.dtype(np.float32)}
    assert all((b >= a - 1e-6).all() for a, b in itertools.pairwise(at_hard))
    assert at_hard[0].max() < 0.9
    np.testing.assert_allclose(at_hard[-1], 1, atol=1e-6)
    far = jax.jit(jax.grad(lambda scale: soft(scores, scale).max(0).sum()))(scales[-1])
    assert np.isfinite(far)


@pytest.mark.parametrize("mode", [jax.jacfwd, jax.jacrev])
def test_gradients(x64, mode):
    scores, scale = draw(3, (2,)), np.array(2.5)  # none so near 0 that a step would cross the kink
    assert np.abs(scores).min() > 1e-3
    weights = np.random.default_rng(5).normal(size=(8, 2))
    plain = lambda z, scale: sum((w * p).sum() for w, p in zip(weights, oracles.violation(z, scale), strict=True))
    by_scores, by_scale = jax.jit(mode(lambda z, scale: (weights * violation(z, scale)).sum(), (0, 1)))(scores, scale)
    np.testing.assert_allclose(by_scores, oracles.numeric_gradient(lambda z: plain(z, 2.5), scores), atol=1e-8)
    np.testing.assert_allclose(by_scale, oracles.numeric_gradient(lambda s: plain(scores, s), scale), atol=1e-8)
