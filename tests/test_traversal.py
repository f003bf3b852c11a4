"""LatentTree's traversal against the definition by paths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrees.isotonic import prune_pav
from jtrees.routing import position, rewards, traverse


def by_paths(scores: np.ndarray) -> np.ndarray:
    """q, node by node: the least agreement on the path, walked from the node up; 1 where that is more."""
    out = np.ones((2 * len(scores) + 1, scores.shape[1]))
    for node in range(1, len(out)):
        at = node
        while at > 0:
            above, right = (at - 1) // 2, at % 2 == 0
            out[node] = np.minimum(out[node], scores[above] if right else -scores[above])
            at = above
    return out


@pytest.mark.parametrize("depth", [1, 2, pytest.param(5, marks=pytest.mark.slow)])
def test_rewards_are_the_least_agreement_along_the_path(depth):
    scores = np.random.default_rng(depth).normal(size=(2**depth - 1, 9)).astype(np.float32)
    np.testing.assert_array_equal(rewards(jnp.asarray(scores)), by_paths(scores))
    np.testing.assert_array_equal(rewards(jnp.asarray(scores[:, 0])), by_paths(scores)[:, 0])


@pytest.mark.slow
@pytest.mark.parametrize("weight", [None, np.array([1.0, 0.0, 2.0, 0.5, 0.0, 1.0])], ids=["plain", "weighted"])
def test_traverse_is_the_papers_program(x64, weight):
    """Weights bear on the pruning alone."""
    scores = jnp.asarray(np.random.default_rng(5).normal(size=(7, 6)) / 2)
    z, a = jax.jit(traverse)(scores, 0.7, weight)
    q = by_paths(np.asarray(scores))
    np.testing.assert_allclose(a, prune_pav(q, 0.7, weight)[0], rtol=0, atol=1e-14)
    np.testing.assert_allclose(z, np.clip(q + 0.5, 0, np.asarray(a)[:, None]), rtol=0, atol=1e-14)
    np.testing.assert_array_equal(position(rewards(scores), a), z)
    gradient = jax.jit(jax.grad(lambda scores, weight: traverse(scores, 0.7, weight)[1].sum()))(scores, weight)
    assert gradient.any() and (weight is None or not gradient[:, weight == 0].any())


@pytest.mark.slow
def test_gradients_of_a_traversal(x64):
    # Away from ties: smooth there. The last number is the penalty.
    numbers = np.append(np.random.default_rng(6).normal(size=12) / 2, 2.5)
    both = lambda p: jnp.concatenate([jnp.ravel(part) for part in traverse(p[:12].reshape(3, 4), p[12])])
    values, backward = jax.jit(both), jax.jit(jax.jacrev(both))
    # Central differences with steps of 1e-6: what is left is rounding, 1e-16 / 1e-6.
    steps = 1e-6 * np.eye(13)
    slope = lambda fn: np.stack([np.asarray(fn(numbers + e)) - np.asarray(fn(numbers - e)) for e in steps], -1) / 2e-6
    for jacobian in (backward, jax.jit(jax.jacfwd(both))):
        np.testing.assert_allclose(jacobian(numbers), slope(values), rtol=0, atol=1e-8)
    for jacobian in (jax.jacfwd, jax.jacrev):
        np.testing.assert_allclose(jax.jit(jacobian(jax.jacrev(both)))(numbers), slope(backward), rtol=0, atol=1e-8)


@pytest.mark.slow
def test_ties_send_the_gradient_to_one_argument():
    # All scores 0: every q below the root is 0, and the score nearest to the root has the whole gradient.
    gradient = jax.jacrev(lambda s: rewards(s)[3:])(jnp.zeros(3))
    np.testing.assert_array_equal(gradient, [[-1, 0, 0], [-1, 0, 0], [1, 0, 0], [1, 0, 0]])


def test_nan_goes_through():
    scores = jnp.zeros((3, 2)).at[1, 0].set(jnp.nan)
    q = rewards(scores)
    assert np.isnan(q[3:5, 0]).all()
    assert np.isfinite(q[:, 1]).all()
    assert np.isnan(jax.jit(lambda s: traverse(s, 1.0)[0])(scores)).any()
