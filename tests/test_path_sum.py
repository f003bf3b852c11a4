"""DGT's sum-form path function against Algorithm 2, written out."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from jtrees.routing import mean_size, path_sum

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


@pytest.mark.parametrize(("depth", "outputs", "window"), [(1, (), 1.0), (2, (1,), 0.25), (4, (), 1.0), (4, (3,), 3.0)])
def test_forward_is_the_hard_tree_and_backward_is_algorithm_2(depth, outputs, window):
    """On scores divided by the window, through which no gradient flows."""
    rng = np.random.default_rng(depth)
    n, leaves = 20, 2**depth
    scores, values = 1.5 * rng.normal(size=(leaves - 1, n)), rng.normal(size=(leaves, *outputs))
    scores[0, :3] = 0, window, -window  # a tie goes left; at its edge the window still passes
    gradient = rng.normal(size=(n, *outputs))
    answer, pull_back = jax.vjp(jax.jit(path_sum), scores, values, window)
    d_scores, d_values, d_window = map(np.asarray, pull_back(gradient))
    one_by_one = [algorithm_2(scores[:, i] / window, values, gradient[i]) for i in range(n)]
    np.testing.assert_array_equal(answer, [one[0] for one in one_by_one])
    # Float64 sums of order one.
    np.testing.assert_allclose(d_scores.T * window, [one[1] for one in one_by_one], atol=1e-12)
    np.testing.assert_allclose(d_values, sum(one[2] for one in one_by_one), atol=1e-12)
    assert ((d_scores != 0) == (np.abs(scores) <= window)).all()  # every node learns from every sample within
    assert d_window == 0


def test_mean_size_is_the_weighted_mean_and_never_zero():
    rng = np.random.default_rng(0)
    scores, weight = rng.normal(size=(7, 30)), rng.uniform(size=30)
    both = jax.jit(lambda scores, weight: (mean_size(scores), mean_size(scores, weight)))
    plain, weighted = map(float, both(scores, weight))
    assert plain == pytest.approx(np.abs(scores).mean(), rel=1e-12)
    assert weighted == pytest.approx(np.average(np.abs(scores).mean(0), weights=weight), rel=1e-12)
    # Where all scores are 0, or nothing weighs, the window is a number to divide by all the same.
    for size in (both(0 * scores, weight)[0], both(scores, 0 * weight)[1]):
        assert 0 < float(size) < 1e-300


def test_vmap_in_single_precision():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(5, 7, 11)).astype(np.float32)
    values, windows = rng.normal(size=(5, 8)).astype(np.float32), np.linspace(0.5, 2, 5, dtype=np.float32)
    gradient = jax.grad(lambda z, v, w: jnp.square(path_sum(z, v, w)).sum(), argnums=(0, 1))
    together, alone = jax.jit(jax.vmap(gradient))(scores, values, windows), jax.jit(gradient)
    for i in range(5):
        for one, other in zip(alone(scores[i], values[i], windows[i]), together, strict=True):
            assert other.dtype == jnp.float32
            np.testing.assert_allclose(other[i], one, rtol=1e-5, atol=1e-5)  # float32 sums in another order
