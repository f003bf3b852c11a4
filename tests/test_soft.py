"""Soft routing against products over ancestors and sums over leaves."""

from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from jtrees.routing import expected_value, leaf_index, leaf_probabilities, reach_probabilities, scaled_sigmoid


def draw(depth, trailing=(), seed=0):
    """Probabilities of going right (nodes, ...) and leaf values (leaves, ...), in float64."""
    rng = np.random.default_rng(seed)
    return rng.uniform(size=(2**depth - 1, *trailing)), rng.normal(size=(2**depth, *trailing))


@pytest.mark.parametrize("trailing", [(), (5,), (2, 3)])
@pytest.mark.parametrize("depth", [1, 3])
def test_probabilities_are_products_over_ancestors(x64, depth, trailing):
    right, values = draw(depth, trailing)
    products = np.stack(oracles.leaf_probabilities(right))
    np.testing.assert_allclose(leaf_probabilities(jnp.asarray(right)), products, rtol=1e-13)
    reach = np.asarray(reach_probabilities(jnp.asarray(right)))
    np.testing.assert_allclose(reach[2**depth - 1 :], products, rtol=1e-13)
    for node in range(2**depth - 1):  # what leaves a node has entered it
        np.testing.assert_allclose(reach[2 * node + 1] + reach[2 * node + 2], reach[node], rtol=1e-13)
    value = expected_value(jnp.asarray(right), jnp.asarray(values))
    assert value.shape == trailing
    np.testing.assert_allclose(value, oracles.expected_value(right, values), rtol=1e-12, atol=1e-14)


probabilities = arrays.arrays(np.float32, (7, 2), elements=st.floats(0, 1, width=32))


@given(probabilities)
def test_probabilities_sum_to_one_and_values_stay_in_range(right):
    leaves = np.asarray(leaf_probabilities(jnp.asarray(right)))
    assert leaves.min() >= 0
    np.testing.assert_allclose(leaves.sum(0), 1, atol=1e-6)
    value = np.asarray(expected_value(jnp.asarray(right), jnp.asarray([[3.0], [-1], [0], [2], [5], [5], [1], [0]])))
    assert value.min() >= -1 - 1e-5
    assert value.max() <= 5 + 1e-5


def test_the_worked_example_of_tel():
    # Fig. C.1: 0.8 (0.3 x 1.5 + 0.7 x -2.0) + 0.2 x 2.1, where the figures are probabilities of left.
    right = jnp.asarray([0.2, 0.7, 0.5], jnp.float32)
    leaves = jnp.asarray([1.5, -2.0, 2.1, 2.1], jnp.float32)
    assert float(expected_value(right, leaves)) == pytest.approx(-0.34, abs=1e-6)


# Leaf values (leaves, ...) that broadcast against probabilities (7, 4) and (7, 2, 4).
BROADCAST = [((4,), (1,)), ((1,), (4,)), ((2, 4), (1, 4)), ((2, 4), (2, 1))]


@pytest.mark.parametrize(("right_axes", "value_axes"), BROADCAST)
def test_leaf_values_broadcast(x64, right_axes, value_axes):
    right, values = draw(3, right_axes)[0], draw(3, value_axes)[1]
    expected = oracles.expected_value(right, values)
    np.testing.assert_allclose(expected_value(jnp.asarray(right), jnp.asarray(values)), expected, rtol=1e-12)


@pytest.mark.parametrize(("right_axes", "value_axes"), BROADCAST)
def test_gradients_of_broadcast_leaf_values(x64, right_axes, value_axes):
    right, values = draw(3, right_axes)[0], draw(3, value_axes)[1]
    gradient = lambda f: jax.jit(jax.grad(lambda r, v: jnp.square(f(r, v)).sum(), (0, 1)))(right, values)
    for a, b in zip(gradient(expected_value), gradient(oracles.expected_value), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kinks", [False, True], ids=["inside", "zeros and ones"])
def test_the_derivative_rule_five_ways(x64, kinks):
    right, values = draw(3, (3,))
    if kinks:
        right[::2] = np.round(right[::2])
    cotangent = np.array([1.0, -2, 0.5])
    ours = lambda r, v: (cotangent * expected_value(r, v)).sum()
    plain = lambda r, v: (cotangent * oracles.expected_value(r, v)).sum()

    exact = jax.jit(jax.grad(plain, (0, 1)))(right, values)
    reverse = jax.jit(jax.grad(ours, (0, 1)))(right, values)
    forward = jax.jit(jax.jacfwd(ours, (0, 1)))(right, values)
    moved = (
        oracles.numeric_gradient(lambda r: plain(r, values), right),
        oracles.numeric_gradient(lambda v: plain(right, v), values),
    )
    for i in range(2):
        np.testing.assert_allclose(reverse[i], exact[i], rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(forward[i], exact[i], rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(reverse[i], moved[i], atol=1e-8)  # the function is linear in every single entry

    second = [jax.jit(jax.hessian(lambda r, v, f=f: f(r, v) ** 2))(right, values) for f in (ours, plain)]
    np.testing.assert_allclose(second[0], second[1], atol=1e-10)


def sizes_in(jaxpr):
    """Sizes of all arrays that a jaxpr makes, those of inner jaxprs included."""
    for equation in jaxpr.eqns:
        yield from (v.aval.size for v in equation.outvars)
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from sizes_in(inner)


def test_the_gradient_holds_nothing_larger_than_one_number_a_node_and_sample():
    depth, n = 5, 7
    right, values = (jnp.asarray(a, jnp.float32) for a in draw(depth, (n,)))
    gradient = jax.grad(lambda r, v: expected_value(r, v).sum(), (0, 1))
    sizes = list(sizes_in(jax.make_jaxpr(gradient)(right, values).jaxpr))
    nodes = 2**depth - 1
    assert nodes * n <= max(sizes) <= (2 * nodes + 1) * n


def test_soft_becomes_hard_as_alpha_grows():
    scores = jnp.asarray(np.random.default_rng(1).normal(size=(15, 40)), jnp.float32)
    leaf = np.array([oracles.walk_scores(s) for s in np.asarray(scores).T])
    distance = []
    for alpha in (1.0, 10.0, 100.0, 1e6):  # the smallest |score| here is above 1e-3, so the last is saturated
        soft = leaf_probabilities(scaled_sigmoid(scores, alpha))
        distance.append(float(1 - soft[leaf, np.arange(40)].mean()))
    assert distance == sorted(distance, reverse=True)
    assert distance[0] > 0.5
    assert distance[-1] < 1e-6
    assert np.array_equal(leaf_index(scores), leaf)
