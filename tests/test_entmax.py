"""Entmax beside a root finder, its derivative beside finite differences, and the step of two classes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq

from jtrees.routing import entmax, entmax_step

rng = np.random.default_rng(0)
LOGITS = {
    "ties": np.zeros(4),
    "two of three": np.array([1.0, 1.0, -1.0]),
    "far apart": np.array([1e4, 0.0]),
    "single": np.array([3.0]),
    "many": 2 * rng.normal(size=50),
    "many close": 1e-3 * rng.normal(size=5000),
    "many ties and a larger": np.append(np.zeros(1000), 0.1),
}


def plain(logits):
    """The definition: the threshold is the root of a monotone function."""
    z = logits / 2
    total = lambda t: (np.maximum(z - t, 0) ** 2).sum() - 1
    t = brentq(total, z.max() - 1, z.max(), xtol=1e-15)
    return np.maximum(z - t, 0) ** 2


@pytest.mark.parametrize("name", LOGITS)
def test_values_are_those_of_a_root_finder(name, x64):
    logits, compiled = LOGITS[name], jax.jit(entmax)
    p = compiled(jnp.asarray(logits))
    np.testing.assert_allclose(p, plain(logits), rtol=0, atol=1e-10)
    assert p.sum() == pytest.approx(1, abs=1e-12)
    single = compiled(jnp.asarray(logits, jnp.float32))
    assert single.dtype == jnp.float32
    np.testing.assert_allclose(single, p, rtol=0, atol=1e-5)


def test_the_derivative_is_that_of_finite_differences(x64):
    logits = jnp.asarray(rng.normal(size=(3, 6)))
    jacobian, reverse = (jax.jit(jax.vmap(derivative(entmax)))(logits) for derivative in (jax.jacfwd, jax.jacrev))
    np.testing.assert_allclose(jacobian, reverse, rtol=0, atol=1e-12)
    values = jax.jit(entmax)
    for j, change in enumerate(1e-6 * np.eye(6)):
        slope = (values(logits + change) - values(logits - change)) / 2e-6
        np.testing.assert_allclose(jacobian[:, :, j], slope, rtol=0, atol=1e-7)
        of_rows = jax.jvp(entmax, (logits,), (jnp.broadcast_to(1e6 * change, logits.shape),))[1]
        np.testing.assert_allclose(of_rows, slope, rtol=0, atol=1e-7)


def test_the_second_derivative_is_finite_beside_zeros():
    hessian = jax.hessian(lambda logits: entmax(logits)[0])(jnp.array([1.0, 0.5, -9.0]))
    assert np.isfinite(hessian).all() and np.any(hessian) and not np.any(hessian[2])


def test_the_step_is_entmax_of_two_classes(x64):
    t = jnp.linspace(-3, 3, 61)
    pair = lambda t: entmax(jnp.stack([t, jnp.zeros_like(t)]))[0]
    both_ways = jax.jit(lambda t: [jax.vmap(jax.value_and_grad(step))(t) for step in (entmax_step, pair)])
    (steps, step_slopes), (pairs, pair_slopes) = both_ways(t)
    np.testing.assert_allclose(steps, pairs, rtol=0, atol=1e-12)
    inside = np.abs(np.asarray(t)) < 1.95  # the step has kinks at its ends
    np.testing.assert_allclose(step_slopes[inside], pair_slopes[inside], rtol=0, atol=1e-10)
    assert entmax_step(jnp.array([-2.0, 2.0])).tolist() == [0, 1]
