"""DGT's sum-form path function against Algorithm 2, written out."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from jtrees import ops
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


@jax.jit
def _compiled(scores, values, gradient, window):
    answer, pull_back = jax.vjp(lambda z, v: path_sum(z, v, window), scores, values)
    return answer, *pull_back(gradient)


def answers_and_gradients(*args):
    return map(np.asarray, _compiled(*args))


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("outputs", [(), (1,), (3,)])
def test_forward_is_the_hard_tree_and_backward_is_algorithm_2(depth, outputs):
    rng = np.random.default_rng(depth)
    n, leaves = 20, 2**depth
    scores, values = 1.5 * rng.normal(size=(leaves - 1, n)), rng.normal(size=(leaves, *outputs))
    scores[0, :3] = 0.0, 1.0, -1.0  # a tie goes left; at one the straight-through rule still passes
    gradient = rng.normal(size=(n, *outputs))
    answer, d_scores, d_values = answers_and_gradients(scores, values, gradient, 1.0)
    one_by_one = [algorithm_2(scores[:, i], values, gradient[i]) for i in range(n)]
    np.testing.assert_array_equal(answer, [one[0] for one in one_by_one])
    np.testing.assert_allclose(d_scores.T, [one[1] for one in one_by_one], atol=1e-12)  # float64 sums of order one
    np.testing.assert_allclose(d_values, sum(one[2] for one in one_by_one), atol=1e-12)


def test_a_window_is_algorithm_2_on_scores_divided_by_it():
    rng = np.random.default_rng(0)
    scores, values, gradient = rng.normal(size=(15, 20)), rng.normal(size=(16, 3)), rng.normal(size=(20, 3))
    for window in (0.25, 1.0, 3.0):
        scores[0, :2] = window, -window  # at its edge the window still passes
        answer, d_scores, d_values = answers_and_gradients(scores, values, gradient, window)
        one_by_one = [algorithm_2(scores[:, i] / window, values, gradient[i]) for i in range(20)]
        np.testing.assert_array_equal(answer, [one[0] for one in one_by_one])
        np.testing.assert_allclose(d_scores.T * window, [one[1] for one in one_by_one], atol=1e-12)
        np.testing.assert_allclose(d_values, sum(one[2] for one in one_by_one), atol=1e-12)
        outside = np.abs(scores) > window
        assert outside.any() and (d_scores[outside] == 0).all() and (d_scores[~outside] != 0).all()


def test_no_gradient_flows_to_the_window():
    rng = np.random.default_rng(0)
    scores, values = jnp.asarray(rng.normal(size=(3, 20))), jnp.asarray(rng.normal(size=4))
    assert jax.jit(jax.grad(lambda window: path_sum(scores, values, window).sum()))(0.7) == 0


def test_the_window_of_an_op_is_a_number_or_a_function_of_the_scores():
    rng = np.random.default_rng(0)
    x, weights, bias, values = map(jnp.asarray, map(rng.normal, (0,) * 4, (1,) * 4, ((20, 4), (7, 4), (7,), (8,))))
    scores = np.asarray(weights @ x.T + bias[:, None])
    of = lambda window: jax.grad(lambda w: jnp.square(ops.path_sum(w, bias, values, x, window)).sum())
    by_hand = jax.grad(lambda w, size: jnp.square(path_sum(w @ x.T + bias[:, None], values, size)).sum())
    size = np.abs(scores).mean()
    both = jax.jit(lambda w, size: (of(mean_size)(w), of(size)(w), of(1.0)(w), by_hand(w, size), by_hand(w, 1.0)))
    called, traced, unit, expected, expected_unit = map(np.asarray, both(weights, size))
    np.testing.assert_allclose(called, expected, atol=1e-12)  # the mean is a constant for gradients
    np.testing.assert_allclose(traced, expected, atol=1e-12)
    np.testing.assert_allclose(unit, expected_unit, atol=1e-12)
    assert np.abs(expected - expected_unit).max() > 0.1


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


def test_dense_every_node_learns_from_every_sample():
    _, d_scores, _ = answers_and_gradients(np.full((15, 20), 0.5), np.arange(16.0) ** 2, np.ones(20), 1.0)
    assert (np.abs(d_scores) > 1e-6).all()


def test_jit_vmap_and_float32():
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(5, 7, 11)).astype(np.float32)
    values, windows = rng.normal(size=(5, 8)).astype(np.float32), np.linspace(0.5, 2, 5, dtype=np.float32)
    gradient = lambda z, v, w: jax.grad(lambda z, v: jnp.square(path_sum(z, v, w)).sum(), argnums=(0, 1))(z, v)
    together, alone = jax.jit(jax.vmap(gradient))(scores, values, windows), jax.jit(gradient)
    for i in range(5):
        for one, other in zip(alone(scores[i], values[i], windows[i]), together, strict=True):
            assert other.dtype == jnp.float32
            np.testing.assert_allclose(other[i], one, rtol=1e-5, atol=1e-5)  # float32 sums in another order
