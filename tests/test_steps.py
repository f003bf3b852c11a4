"""The smooth step: values, derivatives, extremes, and which way zero goes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrees.routing import smooth_step
from tests import oracles

# Programs that tests share, of scores and widths of one shape: most of the time here is compilation.
VALUE = jax.jit(smooth_step)
SLOPES = jax.jit(jax.vmap(jax.grad(smooth_step, (0, 1))))


def pairs(t, width, dtype):
    """Every score with every width, flat, made in NumPy: XLA takes subnormal numbers for zero on a CPU."""
    t, width = np.meshgrid(t, width)
    return t.ravel().astype(dtype), width.ravel().astype(dtype)


def derivatives(t, width):
    """By score and by width; the step depends on the ratio of the two alone."""
    slope_t = np.where(np.abs(t) < width / 2, (1.5 - 6 * (t / width) ** 2) / width, 0)
    return slope_t, -t / width * slope_t


def second_derivatives(t, width):
    """By score twice, by both, by width twice."""
    slope_both = -1.5 / width**2 + 18 * t**2 / width**4
    second = np.array([-12 * t / width**3, slope_both, 3 * t / width**3 - 24 * t**3 / width**5])
    return np.where(np.abs(t) < width / 2, second, 0)


def test_values_and_derivatives_in_float64(x64):
    # From the middle of the cubic to where its value rounds to 0 or 1, and beyond its ends.
    near = 0.5 - np.array([0.5, 0.48, 0.3, 0.1, 1e-3, 1e-6, 1e-9, -1e-9, -0.1, -5])
    t, width = pairs(np.concatenate([near, -near]), [0.3, 1.0, 7.0], np.float64)
    t = t * width
    np.testing.assert_allclose(VALUE(t, width), oracles.smooth_step(t, width), rtol=1e-12, atol=1e-15)
    first, second = derivatives(t, width), second_derivatives(t, width)
    forward = jax.jit(jax.vmap(jax.jacfwd(smooth_step, (0, 1))))(t, width)
    for slopes in (SLOPES(t, width), forward):
        np.testing.assert_allclose(slopes, first, rtol=1e-6, atol=1e-14)  # the closed form loses digits near the ends
    value, h = (lambda t, width: np.asarray(VALUE(t, width))), 1e-6
    slope_t = (value(t + h, width) - value(t - h, width)) / (2 * h)
    slope_width = (value(t, width + h) - value(t, width - h)) / (2 * h)
    np.testing.assert_allclose([slope_t, slope_width], first, atol=1e-4)  # the second derivative of the cubic jumps
    reverse = jax.jacrev(jax.grad(smooth_step, (0, 1)), (0, 1))
    for twice in (jax.hessian(smooth_step, (0, 1)), reverse):
        (tt, tw), (wt, ww) = jax.jit(jax.vmap(twice))(t, width)
        np.testing.assert_allclose([tt, tw, ww], second, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(wt, tw, rtol=1e-9, atol=1e-9)


def test_widths_broadcast_and_get_gradients_of_their_own_shape(x64):
    rng = np.random.default_rng(0)
    t = rng.normal(size=(3, 4))
    axes = {(): (0, 1), (1,): (0, 1), (4,): 0, (3, 1): 1, (3, 4): ()}  # of the scores, those that share a width
    widths = [rng.uniform(1, 4, shape) for shape in axes]

    def pair(t, width):
        value, pull = jax.vjp(smooth_step, t, width)
        return value, *pull(jnp.ones_like(value))

    result = jax.jit(lambda t, widths: [pair(t, width) for width in widths])(t, widths)
    for (shape, shared), width, (value, slope_t, slope_width) in zip(axes.items(), widths, result, strict=True):
        np.testing.assert_allclose(value, oracles.smooth_step(t, width), rtol=1e-12, atol=1e-15)
        first = derivatives(t, width)
        np.testing.assert_allclose(slope_t, first[0], rtol=1e-10, atol=1e-12)
        assert slope_width.shape == shape
        np.testing.assert_allclose(slope_width, first[1].sum(shared).reshape(shape), rtol=1e-10, atol=1e-12)


def decades(info):
    """Sizes in every decade from the smallest subnormal number to the largest of all."""
    sizes = np.ldexp(1.5, np.arange(info.minexp - info.nmant, info.maxexp, max(1, info.maxexp // 40)))
    return np.concatenate([sizes, [float(info.max), float(info.tiny)]])


def test_values_and_derivatives_over_the_whole_range_of_float32():
    # Every decade against every decade of normal numbers.
    info = jnp.finfo(jnp.float32)
    tiny, largest = float(info.tiny), float(info.max)
    sizes = np.concatenate([3 * 10.0 ** np.arange(-37, 38), 1.7 * 10.0 ** np.arange(-37, 38)])
    t, width = pairs(np.concatenate([-sizes, [0], sizes]), sizes[sizes >= 4 * tiny], np.float32)
    value, (slope_t, slope_width) = VALUE(t, width), SLOPES(t, width)
    t, width = t.astype(np.float64), width.astype(np.float64)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(value, oracles.smooth_step(t, width), rtol=0, atol=1e-6)
        first = derivatives(t, width)[0]
    # A derivative that is a subnormal number may be taken for zero, and so may what it is a product of.
    first = np.minimum(first, largest)
    np.testing.assert_allclose(slope_t, first, rtol=1e-5, atol=1e-37)
    np.testing.assert_allclose(slope_width, -t / width * first, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_subnormal_scores_and_widths_are_answered_as_they_are_or_as_zero(x64, dtype):
    """The narrowest smooth step is as wide as four of the least normal number."""
    info = jnp.finfo(dtype)
    sizes, tiny = decades(info), float(info.tiny)
    t, width = pairs(np.concatenate([-sizes, [0], sizes]), sizes, dtype)
    assert VALUE(t, width).dtype == dtype
    value, slopes = np.asarray(VALUE(t, width), np.float64), np.asarray(SLOPES(t, width), np.float64)
    assert np.isfinite(slopes).all()
    assert ((value >= 0) & (value <= 1)).all()
    t, width = t.astype(np.float64), width.astype(np.float64)
    flushed = np.where(np.abs(t) < tiny, 0, t)
    narrowest = np.maximum(width, 4 * tiny)
    tolerance = 4 * float(info.eps) + 1e-15

    # The cube of a width may be too large a number.
    exact = lambda t, width: oracles.smooth_step(np.clip(t / width, -0.5, 0.5), 1.0)
    with np.errstate(over="ignore"):
        allowed = [exact(score, wide) for score in (t, flushed) for wide in (width, narrowest)]
    assert (np.abs(np.array(allowed) - value).min(0) <= tolerance).all()
    # Which way a sample goes is not lost, or it is in the middle.
    assert (value[t > 0] >= 0.5).all() and (value[t < 0] <= 0.5).all()
    far = (width >= 1) & (np.abs(t) / 1e6 >= width)
    assert np.array_equal(value[far], t[far] > 0) and not slopes[0, far].any()


def test_smooth_step_at_its_ends():
    """It rises as the cubic does where its value rounds to one, and is exactly hard and flat from its ends on."""
    t, gamma = pairs([-0.49995, 0.49995], [1.0], jnp.float32)
    assert VALUE(t, gamma)[1] == 1
    exact = derivatives(np.asarray(t, np.float64), 1.0)
    np.testing.assert_allclose(SLOPES(t, gamma), exact, rtol=1e-6)
    t, gamma = pairs([-7.0, -0.15, 0.15, 7.0], [0.3], jnp.float32)
    assert VALUE(t, gamma).tolist() == [0, 0, 1, 1]
    assert not np.any(SLOPES(t, gamma))
    # The second derivative jumps there, between -12 u / gamma^2 and 0.
    _, low, high, _ = jax.jit(jax.vmap(jax.grad(jax.grad(smooth_step))))(t, gamma).tolist()
    assert 0 <= low <= 6 / 0.3**2 and -6 / 0.3**2 <= high <= 0
