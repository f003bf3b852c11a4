"""DGT's sum-form path function against Algorithm 2, written out."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from jtrees.routing import path_sum

pytestmark = pytest.mark.usefixtures("x64")


def algorithm_2(scores, values, gradient):
    """One sample: answer, and gradients in the scores and in the leaves; explicit softmax over leaves."""
    leaves = len(values)
    depth = leaves.bit_length() - 1
    agree = np.array(
        [
            sum((1 if scores[j] > 0 else -1) * (1 if right else -1) for j, right in oracles.path_to(leaf, depth))
            for leaf in range(leaves)
        ],
        np.float64,
    )
    softmax = np.exp(agree) / np.exp(agree).sum()
    reached = oracles.walk_scores(scores)
    assert agree[reached] == depth == agree.max()
    gain = values.reshape(leaves, -1) @ np.atleast_1d(gradient)
    d_agree = softmax * (gain - softmax @ gain)
    d_scores = np.zeros(leaves - 1)
    for leaf in range(leaves):
        for j, right in oracles.path_to(leaf, depth):
            d_scores[j] += d_agree[leaf] * (1 if right else -1) * (abs(scores[j]) <= 1)
    d_values = np.zeros_like(values)
    d_values[reached] = gradient
    return values[reached], d_scores, d_values


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("outputs", [(), (1,), (3,)])
def test_forward_is_the_hard_tree_and_backward_is_algorithm_2(depth, outputs):
    rng = np.random.default_rng(depth)
    n, leaves = 20, 2**depth
    scores, values = 1.5 * rng.normal(size=(leaves - 1, n)), rng.normal(size=(leaves, *outputs))
    scores[0, :3] = 0.0, 1.0, -1.0  # a tie goes left; at one the straight-through rule still passes
    gradient = rng.normal(size=(n, *outputs))
    answer, pull_back = jax.vjp(path_sum, jnp.asarray(scores), jnp.asarray(values))
    d_scores, d_values = pull_back(jnp.asarray(gradient))
    one_by_one = [algorithm_2(scores[:, i], values, gradient[i]) for i in range(n)]
    np.testing.assert_array_equal(answer, [one[0] for one in one_by_one])
    np.testing.assert_allclose(d_scores.T, [one[1] for one in one_by_one], atol=1e-12)  # float64 sums of order one
    np.testing.assert_allclose(d_values, sum(one[2] for one in one_by_one), atol=1e-12)


def test_dense_every_node_learns_from_every_sample():
    scores = jnp.full((15, 1), 0.5)
    d_scores = jax.grad(lambda z: path_sum(z, jnp.arange(16.0) ** 2).sum())(scores)
    assert (jnp.abs(d_scores) > 1e-6).all()


def test_jit_vmap_and_float32():
    rng = np.random.default_rng(0)
    scores = jnp.asarray(rng.normal(size=(5, 7, 11)), jnp.float32)
    values = jnp.asarray(rng.normal(size=(5, 8)), jnp.float32)
    gradient = jax.grad(lambda z, v: jnp.square(path_sum(z, v)).sum(), argnums=(0, 1))
    together = jax.jit(jax.vmap(gradient))(scores, values)
    for i in range(5):
        for one, other in zip(gradient(scores[i], values[i]), together, strict=True):
            assert other.dtype == jnp.float32
            np.testing.assert_allclose(other[i], one, rtol=1e-5, atol=1e-5)  # float32 sums in another order
