"""Soft routing against products over ancestors and sums over leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from jtrees.routing import expected_value, leaf_probabilities, reach_probabilities
from jtrees.routing.soft import leaf_weights


def draw(depth, trailing=(), seed=0):
    """Probabilities of going right (nodes, ...) and leaf values (leaves, ...), in float64."""
    rng = np.random.default_rng(seed)
    return rng.uniform(size=(2**depth - 1, *trailing)), rng.normal(size=(2**depth, *trailing))


def test_probabilities_are_products_over_ancestors(x64):
    drawn = [draw(depth, trailing) for depth, trailing in [(1, (5,)), (3, ()), (3, (2, 3))]]
    everything = lambda r, v: (
        leaf_probabilities(r),
        reach_probabilities(r),
        expected_value(r, v),
        leaf_weights(r, v[0]),
    )
    found = jax.tree.map(np.asarray, jax.jit(lambda drawn: [everything(*one) for one in drawn])(drawn))
    for (right, values), (leaves, reach, value, weights) in zip(drawn, found, strict=True):
        products, nodes = np.stack(oracles.leaf_probabilities(right)), len(right)
        np.testing.assert_allclose(leaves, products, rtol=1e-13)
        np.testing.assert_allclose(weights, values[0] * products, rtol=1e-13)
        np.testing.assert_allclose(reach[nodes:], products, rtol=1e-13)
        for node in range(nodes):  # what leaves a node has entered it
            np.testing.assert_allclose(reach[2 * node + 1] + reach[2 * node + 2], reach[node], rtol=1e-13)
        assert value.shape == right.shape[1:]
        np.testing.assert_allclose(value, oracles.expected_value(right, values), rtol=1e-12, atol=1e-14)


# Leaf values (leaves, ...) that broadcast against probabilities (7, 4) and (7, 2, 4).
BROADCAST = [((4,), (1,)), ((1,), (4,)), ((2, 4), (1, 4)), ((2, 4), (2, 1))]


def test_leaf_values_broadcast_and_so_do_their_gradients(x64):
    drawn = [(draw(3, right_axes)[0], draw(3, value_axes)[1]) for right_axes, value_axes in BROADCAST]
    squares = jax.value_and_grad(lambda r, v: jnp.square(expected_value(r, v)).sum(), (0, 1))
    both = jax.jit(lambda drawn: [(expected_value(*one), squares(*one)[1]) for one in drawn])
    for (right, values), (value, (by_right, by_value)) in zip(drawn, both(drawn), strict=True):
        np.testing.assert_allclose(value, oracles.expected_value(right, values), rtol=1e-12)
        squared = lambda r, v: (oracles.expected_value(r, v) ** 2).sum()
        exact = oracles.exact_gradient(lambda r: squared(r, values), right)  # noqa: B023
        np.testing.assert_allclose(by_right, exact, rtol=1e-10, atol=1e-13)
        exact = oracles.exact_gradient(lambda v: squared(right, v), values)  # noqa: B023
        np.testing.assert_allclose(by_value, exact, rtol=1e-10, atol=1e-13)


COTANGENT = np.array([1.0, -2, 0.5])
ours = lambda r, v: (COTANGENT * expected_value(r, v)).sum()
reverse, forward = (jax.jit(mode(ours, (0, 1))) for mode in (jax.grad, jax.jacfwd))
second = jax.jit(jax.hessian(lambda both: ours(both[:7], both[7:]) ** 2))


@pytest.mark.slow
@pytest.mark.parametrize("kinks", [False, True], ids=["inside", "zeros and ones"])
def test_the_derivative_rule_five_ways(x64, kinks):
    both = np.concatenate(draw(3, (3,)))
    if kinks:
        both[:7:2] = np.round(both[:7:2])
    plain = lambda both: (COTANGENT * oracles.expected_value(both[:7], both[7:])).sum()
    exact = oracles.exact_gradient(plain, both)
    for derivative in (reverse, forward):
        np.testing.assert_allclose(np.concatenate(derivative(both[:7], both[7:])), exact, rtol=1e-11, atol=1e-13)
    # The function is linear in every single entry.
    np.testing.assert_allclose(exact, oracles.numeric_gradient(plain, both), atol=1e-8)
    np.testing.assert_allclose(second(both).reshape(45, 45), oracles.hessian_of_square(plain, both), atol=1e-10)


def test_the_gradient_holds_nothing_larger_than_one_number_a_node_and_sample():
    depth, n = 5, 7
    right, values = (jnp.asarray(a, jnp.float32) for a in draw(depth, (n,)))
    gradient = jax.grad(lambda r, v: expected_value(r, v).sum(), (0, 1))
    sizes = list(oracles.sizes_in(jax.make_jaxpr(gradient)(right, values).jaxpr))
    nodes = 2**depth - 1
    assert nodes * n <= max(sizes) <= (2 * nodes + 1) * n
