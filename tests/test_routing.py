"""Routing against textbook definitions: walks, products over ancestors, sums over paths, all vectors of decisions."""

from functools import partial
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrees import ops, topology
from jtrees.routing import (
    activity,
    expected_value,
    leaf_index,
    leaf_probabilities,
    mean_size,
    path_sum,
    path_violations,
    reach_probabilities,
    rewards,
    traversal,
    violation,
)
from jtrees.routing.inference import Scores, augmented_leaf, flips_of
from jtrees.routing.soft import leaf_weights
from tests import oracles, sweeps


def test_sizes_are_those_of_perfect_trees():
    for depth in range(1, 17):
        assert topology.num_nodes(depth) + 1 == topology.num_leaves(depth) == 2**depth
        assert topology.depth_of(topology.num_nodes(depth)) == depth
    for nodes in {*range(-5, 300), 4094, 4096, 65536} - {2**depth - 1 for depth in range(1, 9)}:
        with pytest.raises(ValueError, match=f"got {nodes}"):
            topology.depth_of(nodes)


def draw_soft(depth, trailing=(), seed=0):
    """Probabilities of going right (nodes, ...) and leaf values (leaves, ...), in float64."""
    rng = np.random.default_rng(seed)
    return rng.uniform(size=(2**depth - 1, *trailing)), rng.normal(size=(2**depth, *trailing))


def test_probabilities_are_products_over_ancestors(x64):
    cases = [draw_soft(depth, trailing) for depth, trailing in [(1, (5,)), (3, ()), (3, (2, 3))]]
    everything = lambda r, v: (
        leaf_probabilities(r),
        reach_probabilities(r),
        expected_value(r, v),
        leaf_weights(r, v[0]),
    )
    result = jax.tree.map(np.asarray, jax.jit(lambda cases: [everything(*case) for case in cases])(cases))
    for (right, values), (leaves, reach, value, weights) in zip(cases, result, strict=True):
        products, nodes = np.stack(oracles.leaf_probabilities(right)), len(right)
        np.testing.assert_allclose(leaves, products, rtol=1e-13)
        np.testing.assert_allclose(weights, values[0] * products, rtol=1e-13)
        np.testing.assert_allclose(reach[nodes:], products, rtol=1e-13)
        for node in range(nodes):  # what leaves a node has entered it
            np.testing.assert_allclose(reach[2 * node + 1] + reach[2 * node + 2], reach[node], rtol=1e-13)
        assert value.shape == right.shape[1:]
        np.testing.assert_allclose(value, oracles.expected_value(right, values), rtol=1e-12, atol=1e-14)


def test_the_gradient_holds_nothing_larger_than_one_number_a_node_and_sample():
    depth, n = 5, 7
    right, values = (jnp.asarray(a, jnp.float32) for a in draw_soft(depth, (n,)))
    gradient = jax.grad(lambda r, v: expected_value(r, v).sum(), (0, 1))
    sizes = list(oracles.sizes_in(jax.make_jaxpr(gradient)(right, values).jaxpr))
    nodes = 2**depth - 1
    assert nodes * n <= max(sizes) <= (2 * nodes + 1) * n


N, P = 40, 3
# Programs that tests share: most of the time here is compilation.
both_ways = jax.jit(lambda weights, bias, x, scores: (ops.hard(weights, bias, x), leaf_index(scores)))


@pytest.mark.parametrize("depth", sweeps.quick([*range(1, 13), 16], (1, 2, 5, 6, 7, 9, 16)))
def test_both_ways_agree_with_the_walk(depth):
    rng, nodes = np.random.default_rng(0), 2**depth - 1
    weights, bias, x = (rng.integers(-2, 3, shape).astype(np.float32) for shape in [(nodes, P), nodes, (N, P)])
    scores = weights @ x.T + bias[:, None]
    assert (scores == 0).mean() > 0.05  # ties are part of this test
    expected = oracles.walk(weights, bias, x)
    for leaf in both_ways(weights, bias, x, scores):
        assert leaf.dtype == jnp.int32
        assert np.array_equal(leaf, expected)


@pytest.mark.parametrize(("right_axes", "value_axes"), [((4,), (1,)), ((2, 4), (2, 1)), ((3,), (3,))])
def test_leaf_values_broadcast_and_so_do_their_derivatives(x64, right_axes, value_axes):
    """Forwards, backwards and twice; also where probabilities are 0 and 1."""
    right, values = draw_soft(3, right_axes)[0], draw_soft(3, value_axes)[1]
    right[::2] = np.round(right[::2]) if right_axes == (3,) else right[::2]
    cotangent = np.random.default_rng(0).normal(size=np.broadcast_shapes(right_axes, value_axes))

    def projected(value, pair):
        return (
            cotangent * value(pair[: right.size].reshape(right.shape), pair[right.size :].reshape(values.shape))
        ).sum()

    ours, plain = partial(projected, expected_value), partial(projected, oracles.expected_value)
    pair = np.concatenate([right.ravel(), values.ravel()])
    exact = oracles.exact_gradient(plain, pair)
    for derivative in (jax.grad, jax.jacfwd):
        np.testing.assert_allclose(jax.jit(derivative(ours))(pair), exact, rtol=1e-10, atol=1e-13)
    # The function is linear in every single entry.
    np.testing.assert_allclose(exact, oracles.numeric_gradient(plain, pair), atol=1e-8)
    if right_axes == (3,):
        second = jax.jit(jax.hessian(lambda pair: ours(pair) ** 2))(pair)
        np.testing.assert_allclose(second, oracles.hessian_of_square(plain, pair), atol=1e-10)


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
def test_forward_is_the_hard_tree_and_backward_is_algorithm_2(depth, outputs, window, x64):
    """On scores divided by the window, through which no gradient flows."""
    rng = np.random.default_rng(depth)
    n, leaves = 20, 2**depth
    scores, values = 1.5 * rng.normal(size=(leaves - 1, n)), rng.normal(size=(leaves, *outputs))
    scores[0, :3] = 0, window, -window  # a tie goes left; at its edge the window still passes
    gradient = rng.normal(size=(n, *outputs))
    answer, pull_back = jax.vjp(jax.jit(path_sum), scores, values, window)
    d_scores, d_values, d_window = map(np.asarray, pull_back(gradient))
    one_by_one = [algorithm_2(scores[:, i] / window, values, gradient[i]) for i in range(n)]
    np.testing.assert_array_equal(answer, [case[0] for case in one_by_one])
    # Float64 sums of order one.
    np.testing.assert_allclose(d_scores.T * window, [case[1] for case in one_by_one], atol=1e-12)
    np.testing.assert_allclose(d_values, sum(case[2] for case in one_by_one), atol=1e-12)
    assert ((d_scores != 0) == (np.abs(scores) <= window)).all()  # every node learns from every sample within
    assert d_window == 0


def test_mean_size_is_the_weighted_mean_and_never_zero(x64):
    rng = np.random.default_rng(0)
    scores, weight = rng.normal(size=(7, 30)), rng.uniform(size=30)
    pair = jax.jit(lambda scores, weight: (mean_size(scores), mean_size(scores, weight)))
    plain, weighted = map(float, pair(scores, weight))
    assert plain == pytest.approx(np.abs(scores).mean(), rel=1e-12)
    assert weighted == pytest.approx(np.average(np.abs(scores).mean(0), weights=weight), rel=1e-12)
    # Where all scores are 0, or nothing weighs, the window is a number to divide by all the same.
    for size in (pair(0 * scores, weight)[0], pair(scores, 0 * weight)[1]):
        assert 0 < float(size) < 1e-300


# Programs that tests share: most of the time here is compilation.
hard_leaf, violations, softmin = jax.jit(leaf_index), jax.jit(path_violations), jax.jit(violation)


def draw_scores(depth, shape=(), dtype=np.float64, seed=0):
    return np.random.default_rng(seed).normal(size=(2**depth - 1, *shape)).astype(dtype)


def test_violation_is_its_textbook_definition(x64):
    cases = [draw_scores(depth, shape) for depth, shape in [(1, (3,)), (2, (2, 3)), (4, (3,)), (4, (2, 3))]]
    scales = [0.3, 5.0, np.array([0.1, 1.0, 50.0])]  # the last one a sample
    everything = lambda scores, scales: (
        path_violations(scores),
        violation(scores),
        [violation(scores, scale) for scale in scales],
    )
    evaluate_all = jax.jit(lambda cases, scales: [everything(scores, scales) for scores in cases])
    for scores, (result, plain, scaled) in zip(cases, evaluate_all(cases, scales), strict=True):
        assert result.shape == (scores.shape[0] + 1, *scores.shape[1:])
        np.testing.assert_allclose(result, oracles.path_violations(scores), rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(plain, oracles.violation(scores, 1.0), rtol=1e-11)
        for scale, probabilities in zip(scales, scaled, strict=True):
            np.testing.assert_allclose(probabilities, oracles.violation(scores, scale), rtol=1e-11)


def test_only_the_hard_leaf_is_not_violated():
    """Probabilities become hard as the scale grows."""
    scores = draw_scores(4, (200,), np.float32)
    leaf, violated = np.asarray(hard_leaf(scores)), np.asarray(violations(scores))
    assert np.array_equal((violated == 0).sum(0), np.ones(200))
    assert np.array_equal(np.argmin(violated, axis=0), leaf)
    scales = np.array([1.0, 10.0, 100.0, 1e4, 1e30], np.float32)
    chance = [np.asarray(softmin(scores, scale))[leaf, np.arange(200)] for scale in scales]
    assert {rows.dtype for rows in chance} == {np.dtype(np.float32)}
    assert all((b >= a - 1e-6).all() for a, b in itertools.pairwise(chance)) and chance[0].max() < 0.9
    np.testing.assert_allclose(chance[-1], 1, atol=1e-6)
    assert np.isfinite(jax.jit(jax.grad(lambda scale: softmin(scores, scale).max(0).sum()))(scales[-1]))
    # Scores that are integers, some of them 0: other violations may be free too, the hard one always is.
    scores = np.random.default_rng(1).integers(-2, 3, (15, 200)).astype(np.float32)
    assert not np.asarray(violations(scores))[hard_leaf(scores), np.arange(200)].any()


@pytest.mark.parametrize("mode", [jax.jacfwd, jax.jacrev])
def test_gradients_of_violation(x64, mode):
    scores, scale = draw_scores(3, (2,)), np.array(2.5)  # none so near 0 that a step would cross the kink
    assert np.abs(scores).min() > 1e-3
    weights = np.random.default_rng(5).normal(size=(8, 2))
    plain = lambda z, scale: sum((w * p).sum() for w, p in zip(weights, oracles.violation(z, scale), strict=True))
    slope_z, slope_c = jax.jit(mode(lambda z, scale: (weights * violation(z, scale)).sum(), (0, 1)))(scores, scale)
    np.testing.assert_allclose(slope_z, oracles.numeric_gradient(lambda z: plain(z, 2.5), scores), atol=1e-8)
    np.testing.assert_allclose(slope_c, oracles.numeric_gradient(lambda s: plain(scores, s), scale), atol=1e-8)


def by_paths(scores: np.ndarray) -> np.ndarray:
    """q, node by node: the least agreement on the path, walked from the node up; 1 where that is more."""
    out = np.ones((2 * len(scores) + 1, scores.shape[1]))
    for node in range(1, len(out)):
        current = node
        while current > 0:
            above, right = (current - 1) // 2, current % 2 == 0
            out[node] = np.minimum(out[node], scores[above] if right else -scores[above])
            current = above
    return out


def test_rewards_are_the_least_agreement_along_the_path():
    scores = np.random.default_rng(2).normal(size=(7, 9)).astype(np.float32)
    np.testing.assert_array_equal(rewards(jnp.asarray(scores)), by_paths(scores))
    np.testing.assert_array_equal(rewards(jnp.asarray(scores[:, 0])), by_paths(scores)[:, 0])
    # All scores 0: every q below the root is 0, and the score nearest to the root has the whole gradient.
    gradient = jax.jacrev(lambda s: rewards(s)[3:])(jnp.zeros(3))
    np.testing.assert_array_equal(gradient, [[-1, 0, 0], [-1, 0, 0], [1, 0, 0], [1, 0, 0]])
    q = rewards(jnp.zeros((3, 2)).at[1, 0].set(jnp.nan))
    assert np.isnan(q[3:5, 0]).all() and np.isfinite(q[:, 1]).all()


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
    exact, result = np.asarray(jax.jit(augmented_leaf)(scores, losses)), jax.jit(flips_of)(scores)
    near = np.asarray(result.leaf)
    competing = np.take_along_axis(losses, near, axis=0) - 2 * np.asarray(result.violations())
    for i, (z, leaf_losses) in enumerate(zip(scores.T, losses.T, strict=True)):
        violated = np.array(oracles.path_violations(z))
        value, best = best_decisions(z, leaf_losses)
        assert exact[i] == best
        assert leaf_losses[best] - 2 * violated[best] == pytest.approx(value - np.abs(z).sum(), abs=1e-12)
        value, best = best_decisions(z, leaf_losses, radius=1)
        assert near[competing[:, i].argmax(), i] == best
        assert competing[:, i].max() == pytest.approx(value - np.abs(z).sum(), abs=1e-12)


@pytest.mark.parametrize("depth", [1, 9])
def test_paths_are_followed_as_if_all_splits_were_scored(x64, depth):
    rng = np.random.default_rng(depth)
    weights, bias = rng.normal(size=(2**depth - 1, 4)), rng.normal(size=2**depth - 1)
    x = rng.normal(size=(50, 4))
    followed, scored = jax.jit(Scores.flips)(Scores(weights, bias, x)), jax.jit(flips_of)(weights @ x.T + bias[:, None])
    assert followed.leaf.shape == (depth + 1, 50) and followed.leaf.dtype == jnp.int32
    for a, b in zip(followed, scored, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    # By hand: what is turned over is one decision, and below it hard routing goes on.
    for i in range(0, 50, 7):
        z = weights @ x[i] + bias
        assert followed.leaf[0, i] == oracles.walk_scores(z)
        for level, node in enumerate(np.asarray(followed.path)[:, i]):
            assert followed.leaf[1 + level, i] == oracles.walk_scores(np.where(np.arange(len(z)) == node, -z, z))
    zero = jax.jit(flips_of)(jnp.zeros((3, 1)))  # goes left, and costs nothing to turn
    assert zero.leaf[:, 0].tolist() == [0, 2, 1] and not np.any(zero.violations())


def test_only_ratios_of_weights_change_the_activity():
    scores, weight = jnp.array([[1.0, 2.0, -0.2]]), jnp.array([1.0, 2.0, 0.5])
    for factor in (1e-8, 1e8):
        np.testing.assert_allclose(activity(scores, 0.6, factor * weight), activity(scores, 0.6, weight), rtol=1e-5)
    assert np.isfinite(activity(scores, 0.6, 0 * weight)).all()


@pytest.mark.parametrize("depth", sweeps.quick([1, 2, 5], [2]))
def test_the_activity_of_many_samples_is_solved_by_subtrees(depth, monkeypatch):
    rng = np.random.default_rng(depth)
    scores = jnp.asarray(rng.normal(size=(2**depth - 1, 30)), jnp.float32)
    weight = jnp.asarray(rng.uniform(size=30), jnp.float32)
    total = lambda scores: (jnp.square(values := activity(scores, 0.1, weight)).sum(), values)
    gradient, expected = jax.jit(jax.grad(total, has_aux=True))(scores)
    monkeypatch.setattr(traversal, "_MOST_SCORES", 0)
    slopes, values = jax.jit(lambda scores: jax.grad(total, has_aux=True)(scores))(scores)
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    np.testing.assert_allclose(slopes, gradient, rtol=1e-5, atol=1e-7)


def test_rewards_below_a_node_without_a_score_are_not_numbers():
    q = np.asarray(rewards(jnp.zeros((7, 1)).at[1].set(jnp.nan)))[:, 0]
    assert np.flatnonzero(np.isnan(q)).tolist() == [3, 4, 7, 8, 9, 10]


@pytest.mark.parametrize("weighted", [False, True])
def test_the_activity_of_many_samples_is_finite_in_half_precision(weighted):
    scores = np.random.default_rng(0).normal(size=(3, 70_000)).astype(np.float16)
    weight = jnp.ones(70_000, jnp.float16) if weighted else None
    half = activity(jnp.asarray(scores), 0.01, weight)
    np.testing.assert_allclose(half, activity(jnp.float32(scores), 0.01), atol=1e-2)
