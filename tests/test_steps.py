"""The four steps: values, derivatives, extremes, and which way zero goes."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from jtrees.routing import hard_step, scaled_sigmoid, smooth_step, straight_through_sign

T = np.linspace(-1.2, 1.2, 49)
SOFT = [(scaled_sigmoid, 3.0), (scaled_sigmoid, 40.0), (smooth_step, 2.0), (smooth_step, 0.3)]


def oracle(step, t, width):
    return oracles.sigmoid(width * t) if step is scaled_sigmoid else oracles.smooth_step(t, width)


def derivative(step, t, width):
    if step is scaled_sigmoid:
        s = oracles.sigmoid(width * t)
        return width * s * (1 - s)
    return np.where(np.abs(t) < width / 2, -6 * t**2 / width**3 + 1.5 / width, 0)


@pytest.mark.parametrize(("step", "width"), SOFT)
def test_values_and_derivatives_in_float64(x64, step, width):
    t = jnp.asarray(T)
    np.testing.assert_allclose(step(t, width), oracle(step, T, width), rtol=1e-13, atol=1e-15)
    slopes = jax.jit(jax.vmap(jax.grad(lambda t: step(t, width))))(t)
    np.testing.assert_allclose(slopes, derivative(step, T, width), rtol=1e-12, atol=1e-12)
    numeric = (np.asarray(step(t + 1e-6, width)) - np.asarray(step(t - 1e-6, width))) / 2e-6
    np.testing.assert_allclose(slopes, numeric, atol=1e-3 / width)  # the second derivative jumps at the ends


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 2e-2)])
@pytest.mark.parametrize(("step", "width"), SOFT)
def test_values_keep_the_dtype(step, width, dtype, tolerance):
    t = jnp.asarray(T, dtype)
    out = step(t, jnp.asarray(width, dtype))
    assert out.dtype == dtype
    exact = oracle(step, np.asarray(t, np.float64), float(jnp.asarray(width, dtype)))
    # bfloat16 has 8 bits: a rounding of 3/2 u before the cubic is felt in the second decimal.
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, atol=tolerance)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("step", "width"), [(scaled_sigmoid, 1e6), (scaled_sigmoid, 1.0), (smooth_step, 1e-6)])
def test_values_and_derivatives_are_finite_at_the_extremes(step, width, dtype):
    largest = float(jnp.finfo(dtype).max)
    sizes = np.array([0, 1e-30, 4e-7, 5e-7, 6e-7, 1e-3, 1, 1e6, 1e30, largest])
    t = jnp.concatenate([jnp.asarray(sizes, dtype), jnp.asarray(-sizes, dtype)])
    width = jnp.full_like(t, width)
    value = step(t, width)
    assert bool(((value >= 0) & (value <= 1)).all())
    for argument in (0, 1):
        slopes = jax.jit(jax.vmap(jax.grad(step, argnums=argument)))(t, width)
        assert bool(jnp.isfinite(slopes).all()), (argument, slopes)
    far = jnp.asarray([1e30, -1e30], dtype)
    assert step(far, width[0]).tolist() == [1, 0]
    assert jax.jit(jax.vmap(jax.grad(step), (0, None)))(far, width[0]).tolist() == [0, 0]


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zero_goes_left(zero):
    t = jnp.asarray([zero, 1e-30, -1e-30], jnp.float32)
    assert hard_step(t).tolist() == [False, True, False]
    assert straight_through_sign(t).tolist() == [-1, 1, -1]
    assert scaled_sigmoid(t, 1e3)[0] == 0.5
    assert smooth_step(t, 1e-3)[0] == 0.5


def test_smooth_step_is_exactly_hard_from_its_ends_on():
    t = jnp.asarray([-7.0, -0.15, 0.15, 7.0], jnp.float32)
    assert smooth_step(t, 0.3).tolist() == [0, 0, 1, 1]
    assert jax.jit(jax.vmap(jax.grad(lambda t: smooth_step(t, 0.3))))(t).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_straight_through_sign_passes_the_gradient_of_the_clipped_identity(dtype):
    t = jnp.asarray([-1.5, -1, -0.5, 0, 0.5, 1, 1.5], dtype)
    sign, tangent = jax.jvp(straight_through_sign, (t,), (jnp.full_like(t, 3),))
    assert sign.dtype == tangent.dtype == dtype
    assert sign.tolist() == [-1, -1, -1, -1, 1, 1, 1]
    assert tangent.tolist() == [0, 3, 3, 3, 3, 3, 0]
    assert jax.grad(lambda t: straight_through_sign(t).sum())(t).tolist() == [0, 1, 1, 1, 1, 1, 0]
