"""Routing by violation, against sums over the written-out path to each leaf."""

import itertools

import jax
import jax.numpy as jnp
from jax.test_util import check_grads
import numpy as np
import oracles
import pytest

from jtrees.routing import leaf_index, path_violations, violation


def draw(depth, shape=(), dtype=np.float64, seed=0):
    return np.random.default_rng(seed).normal(size=(2**depth - 1, *shape)).astype(dtype)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_textbook_definition(x64, depth, shape):
    scores = draw(depth, shape)
    paths = path_violations(jnp.asarray(scores))
    assert paths.shape == (2**depth, *shape)
    np.testing.assert_allclose(paths, oracles.path_violations(scores), rtol=1e-12, atol=1e-14)
    for scale in (0.3, 5.0):
        probabilities = violation(jnp.asarray(scores), scale)
        np.testing.assert_allclose(probabilities, oracles.violation(scores, scale), rtol=1e-11)
        np.testing.assert_allclose(probabilities.sum(0), 1, rtol=1e-12)
    np.testing.assert_allclose(violation(jnp.asarray(scores)), oracles.violation(scores, 1.0), rtol=1e-11)


def test_by_hand():
    # Root 2 (right), its left child -1 (left), its right child 0 (left, as any score that is not above 0).
    paths = path_violations(jnp.asarray([2.0, -1.0, 0.0]))
    assert paths.tolist() == [2, 3, 0, 0]


def test_only_the_hard_leaf_is_not_violated():
    scores = jnp.asarray(draw(4, (200,), np.float32))
    hard = np.asarray(leaf_index(scores))
    paths = np.asarray(path_violations(scores))
    assert np.array_equal((paths == 0).sum(0), np.ones(200))
    assert np.array_equal(np.argmin(paths, axis=0), hard)
    # Scores that are integers, some of them 0: other paths may be free too, the hard one always is.
    scores = jnp.asarray(np.random.default_rng(1).integers(-2, 3, (15, 200)), jnp.float32)
    hard = np.asarray(leaf_index(scores))
    assert not np.asarray(path_violations(scores))[hard, np.arange(200)].any()


def test_hard_as_the_scale_grows():
    scores = jnp.asarray(draw(4, (200,), np.float32))
    hard = np.asarray(leaf_index(scores))
    at_hard = [np.asarray(violation(scores, scale))[hard, np.arange(200)] for scale in (1.0, 10.0, 100.0, 1e4, 1e30)]
    assert all((b >= a - 1e-6).all() for a, b in itertools.pairwise(at_hard))
    assert at_hard[0].max() < 0.9
    np.testing.assert_allclose(at_hard[-1], 1, atol=1e-6)
    far = jax.grad(lambda scale: violation(scores, scale).max(0).sum())(jnp.float32(1e30))
    assert np.isfinite(far)


def test_a_scale_on_the_scores_is_the_same_thing(x64):
    scores = jnp.asarray(draw(3, (4,)))
    np.testing.assert_allclose(violation(scores, 7.0), violation(7 * scores), rtol=1e-10)
    per_sample = jnp.asarray([0.1, 1.0, 10.0, 50.0])
    np.testing.assert_allclose(violation(scores, per_sample), violation(per_sample * scores), rtol=1e-10)


def test_gradients(x64):
    scores = jnp.asarray(draw(3, (2,)))  # none so near 0 that a step would cross the kink
    assert float(jnp.abs(scores).min()) > 1e-3
    checked = jax.jit(lambda z, scale: violation(z, scale))
    check_grads(checked, (scores, jnp.float64(2.5)), order=1, modes=["fwd", "rev"])
    weights = np.random.default_rng(5).normal(size=(8, 2))
    gradient = jax.grad(lambda z: (weights * violation(z, 2.5)).sum())(scores)
    plain = lambda z: sum((w * p).sum() for w, p in zip(weights, oracles.violation(z, 2.5), strict=True))
    np.testing.assert_allclose(gradient, oracles.numeric_gradient(plain, scores), atol=1e-8)


def test_the_same_under_jit_and_vmap_and_in_its_dtype():
    scores = jnp.asarray(draw(3, (6,), np.float32))
    scales = jnp.asarray([0.5, 3.0], jnp.float32)
    together = jax.jit(jax.vmap(jax.vmap(violation, (1, None), 1), (None, 0)))(scores, scales)
    assert together.dtype == jnp.float32
    for one, scale in zip(together, scales, strict=True):
        np.testing.assert_allclose(one, violation(scores, scale), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(path_violations)(scores), path_violations(scores), rtol=1e-6)
