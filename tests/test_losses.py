"""The expected loss over leaves and its fused gradient, against sums over leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest

from jtrees import ConstantLeaves, LinearLeaves, ObliqueTree, blocking, routing
from jtrees.losses import expected_leaf_loss, log_loss, squared_error

DEPTH, N, P = 3, 50, 3
NODES = 2**DEPTH - 1


def draw(linear=False, seed=0):
    """A tree, samples, targets and weights (some zero), NumPy float64."""
    rng = np.random.default_rng(seed)
    leaves = LinearLeaves if linear else ConstantLeaves
    arrays = (rng.normal(size=(NODES + 1, P)), rng.normal(size=NODES + 1)) if linear else (rng.normal(size=NODES + 1),)
    tree = ObliqueTree(rng.normal(size=(NODES, P)), rng.normal(size=NODES), leaves(*arrays))
    weight = rng.uniform(size=N)
    weight[::4] = 0
    return tree, rng.normal(size=(N, P)), rng.normal(size=N), weight


def outputs(tree, x):
    """What each leaf answers, (leaves, n)."""
    if isinstance(tree.leaves, LinearLeaves):
        return tree.leaves.coefficients @ x.T + tree.leaves.intercept[:, None]
    return tree.leaves.values[:, None] + 0 * x[:, 0]


def ours(tree, x, y, weight=None):
    return expected_leaf_loss(tree.weights, tree.bias, tree.leaves, x, y, sample_weight=weight)


def plain(tree, x, y, weight, sigmoid=jax.nn.sigmoid):
    return oracles.expected_leaf_loss(tree.weights, tree.bias, outputs(tree, x), x, y, weight, sigmoid)


def assert_trees_close(a, b, **tolerance):
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(one, other, **tolerance)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_value_leaf_and_gradient(x64, linear, weighted):
    tree, x, y, weight = draw(linear)
    passed = weight if weighted else None
    weight = weight if weighted else np.ones(N)

    (loss, leaf), gradient = jax.jit(jax.value_and_grad(ours, has_aux=True))(tree, x, y, passed)
    assert float(loss) == pytest.approx(plain(tree, x, y, weight, oracles.sigmoid), rel=1e-12)
    assert leaf.dtype == jnp.int32
    assert np.array_equal(leaf, oracles.walk(tree.weights, tree.bias, x))
    assert_trees_close(gradient, jax.jit(jax.grad(plain))(tree, x, y, weight), rtol=1e-10, atol=1e-13)

    parts, structure = jax.tree.flatten(tree)
    for i, part in enumerate(parts):
        along = lambda a, i=i: plain(
            structure.unflatten([*parts[:i], a, *parts[i + 1 :]]), x, y, weight, oracles.sigmoid
        )
        np.testing.assert_allclose(jax.tree.leaves(gradient)[i], oracles.numeric_gradient(along, part), atol=1e-8)


def test_the_value_alone_is_the_value_with_gradient():
    tree, x, y, weight = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), draw())
    loss, leaf = jax.jit(ours)(tree, x, y, weight)
    (with_gradient, same_leaf), _ = jax.jit(jax.value_and_grad(ours, has_aux=True))(tree, x, y, weight)
    assert float(loss) == pytest.approx(float(with_gradient), rel=1e-6)
    assert np.array_equal(leaf, same_leaf)


def test_samples_of_weight_zero_do_not_count():
    tree, x, y, weight = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), draw())
    value = jax.jit(jax.value_and_grad(lambda tree, y: ours(tree, x, y, weight)[0]))
    assert_trees_close(value(tree, y), value(tree, jnp.where(weight == 0, 1e3, y)), rtol=0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_blocks_change_nothing(x64, monkeypatch, dtype):
    tree, x, y, weight = jax.tree.map(lambda a: jnp.asarray(a, dtype), draw())
    trees = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), tree)
    fresh = lambda: jax.jit(jax.vmap(lambda t: jax.value_and_grad(ours, has_aux=True)(t, x, y, weight)))
    (loss, leaf), gradient = fresh()(trees)
    tolerance = 1e-5 if dtype == np.float32 else 1e-13  # sums in another order
    for block in (1, 7, 49):  # 50 samples: padding of 0, 6 and 48
        monkeypatch.setattr(blocking, "block_size", lambda nodes, n, block=block: block)
        (blocked_loss, blocked_leaf), blocked_gradient = fresh()(trees)
        assert blocked_loss.dtype == dtype
        assert np.array_equal(blocked_leaf, leaf)
        assert_trees_close((blocked_loss, blocked_gradient), (loss, gradient), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("linear", [False, True])
def test_squared_error_of_every_leaf(x64, linear):
    tree, x, y, _ = draw(linear)
    leaves = jax.tree.map(jnp.asarray, tree.leaves)
    expected = (y - outputs(tree, x)) ** 2
    np.testing.assert_allclose(squared_error(leaves, jnp.asarray(x), jnp.asarray(y)), expected, rtol=1e-11, atol=1e-13)


def test_any_loss_of_leaves_and_its_traced_parameters(x64):
    tree, x, y, _ = jax.tree.map(jnp.asarray, draw())

    def loss(delta, tree, expectation):
        huber = lambda leaves, x, y: optax.losses.huber_loss(leaves.outputs(x) - y[None], delta=delta)
        return expectation(tree, huber)

    fused = lambda tree, huber: expected_leaf_loss(tree.weights, tree.bias, tree.leaves, x, y, leaf_losses=huber)[0]

    def summed(tree, huber):
        right = jax.nn.sigmoid(tree.weights @ x.T + tree.bias[:, None])
        return oracles.expected_value(right, huber(tree.leaves, x, y)).mean()

    deltas = jnp.asarray([0.1, 1.0])
    value = lambda expectation: jax.jit(
        jax.vmap(jax.value_and_grad(loss, argnums=1), (0, None, None)), static_argnums=2
    )(deltas, tree, expectation)
    assert_trees_close(value(fused), value(summed), rtol=1e-10, atol=1e-13)


def test_far_scores_give_the_hard_loss_and_no_nan():
    tree, x, y, _ = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), draw())
    far = tree.replace(weights=tree.weights * 1e6, bias=tree.bias * 1e6)
    (loss, leaf), gradient = jax.jit(jax.value_and_grad(ours, has_aux=True))(far, x, y)
    hard = np.mean((np.asarray(y) - np.asarray(tree.leaves.values)[np.asarray(leaf)]) ** 2)
    assert float(loss) == pytest.approx(hard, rel=1e-5)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(gradient))


def test_padding_asks_nothing_about_samples_that_could_not_be(monkeypatch):
    # A loss without a value at y = 0, and a last block that must be filled up.
    monkeypatch.setattr(blocking, "block_size", lambda nodes, n: 4)
    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.normal(size=(5, 2)), jnp.float32), jnp.asarray(rng.uniform(1, 2, 5), jnp.float32)
    weights, bias = jnp.asarray(rng.normal(size=(3, 2)), jnp.float32), jnp.zeros(3)
    relative = lambda leaves, x, y: jnp.square(leaves.outputs(x) / y - 1)

    def loss(values):
        leaves = ConstantLeaves(values)
        return expected_leaf_loss(weights, bias, leaves, x, y, leaf_losses=relative)[0]

    value, gradient = jax.value_and_grad(loss)(jnp.arange(4.0))
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_log_loss_of_every_leaf(x64):
    rng = np.random.default_rng(0)
    logits, y = rng.normal(size=(5, 3)) * 4, rng.integers(0, 3, N)
    found = log_loss(ConstantLeaves(jnp.asarray(logits)), jnp.zeros((N, P)), jnp.asarray(y))
    powers = np.exp(logits)
    expected = [[-np.log(row[label] / row.sum()) for label in y] for row in powers]
    np.testing.assert_allclose(found, expected, rtol=1e-11)


def test_log_loss_of_far_logits_is_finite():
    logits = jnp.asarray([[1e30, 0, -1e30], [-200, 300, 0]], jnp.float32)
    value = lambda logits: log_loss(ConstantLeaves(logits), jnp.zeros((3, P)), jnp.arange(3))
    np.testing.assert_allclose(value(logits), [[0, 1e30, 2e30], [500, 0, 300]], rtol=1e-6)
    assert np.isfinite(jax.grad(lambda logits: value(logits).sum())(logits)).all()


def test_expected_log_loss_and_its_gradient(x64):
    tree, x, _, weight = draw()
    rng = np.random.default_rng(1)
    tree, y = tree.replace(leaves=ConstantLeaves(rng.normal(size=(NODES + 1, 3)))), rng.integers(0, 3, N)

    def plain(tree):
        values = tree.leaves.values
        losses = [[-(row - jnp.log(jnp.exp(row).sum()))[k] for k in range(3)] for row in values]
        losses = [sum(jnp.where(y == k, loss, 0) for k, loss in enumerate(row)) for row in losses]
        probabilities = oracles.leaf_probabilities(jax.nn.sigmoid(tree.weights @ x.T + tree.bias[:, None]))
        return (weight * sum(p * loss for p, loss in zip(probabilities, losses, strict=True))).sum() / weight.sum()

    ours = lambda tree: expected_leaf_loss(
        tree.weights, tree.bias, tree.leaves, x, y, leaf_losses=log_loss, sample_weight=weight
    )[0]
    tree, x, y, weight = jax.tree.map(jnp.asarray, (tree, x, y, weight))
    found, expected = (jax.jit(jax.value_and_grad(f))(tree) for f in (ours, plain))
    assert_trees_close(found, expected, rtol=1e-10, atol=1e-13)


by_products = lambda scores: routing.leaf_probabilities(jax.nn.sigmoid(scores))
by_violation = lambda scores: routing.violation(scores, 3.0)


def routed(tree, x, y, weight, route):
    return expected_leaf_loss(tree.weights, tree.bias, tree.leaves, x, y, sample_weight=weight, route=route)


@pytest.mark.parametrize(("linear", "weighted", "block"), [(False, False, None), (True, True, 7), (True, False, 49)])
def test_other_routes(x64, monkeypatch, linear, weighted, block):
    """Products of sigmoids given as a route are the default; violation is its plain definition, differentiated."""
    if block:
        monkeypatch.setattr(blocking, "block_size", lambda nodes, n: block)
    tree, x, y, weight = draw(linear)
    leaf_of_walk = oracles.walk(tree.weights, tree.bias, x)
    tree, x, y, weight = jax.tree.map(jnp.asarray, (tree, x, y, weight))
    passed, weight = (weight, weight) if weighted else (None, jnp.ones(N))
    value = lambda route: jax.jit(jax.value_and_grad(lambda tree: routed(tree, x, y, passed, route), has_aux=True))(
        tree
    )
    (default, leaf), default_gradient = value(None)
    (same, same_leaf), same_gradient = value(by_products)
    assert_trees_close((same, same_gradient), (default, default_gradient), rtol=1e-11, atol=1e-14)
    assert np.array_equal(leaf, same_leaf)

    (loss, leaf), gradient = value(by_violation)
    assert leaf.dtype == jnp.int32
    assert np.array_equal(leaf, leaf_of_walk)
    assert abs(float(loss) - float(default)) > 1e-3  # it is another routing

    def plain(tree):
        route = lambda scores: oracles.violation(scores, 3.0)
        return oracles.expected_leaf_loss(tree.weights, tree.bias, outputs(tree, x), x, y, weight, route=route)

    assert_trees_close((loss, gradient), jax.jit(jax.value_and_grad(plain))(tree), rtol=1e-10, atol=1e-13)


def test_a_route_under_vmap():
    tree, x, y, weight = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), draw())
    one = jax.value_and_grad(lambda tree: routed(tree, x, y, weight, routing.violation)[0])
    trees = [tree, jax.tree.map(lambda a: 2 * a, tree)]
    together = jax.jit(jax.vmap(one))(jax.tree.map(lambda *a: jnp.stack(a), *trees))
    alone = jax.tree.map(lambda *a: jnp.stack(a), *map(jax.jit(one), trees))
    assert_trees_close(together, alone, rtol=1e-5, atol=1e-6)
