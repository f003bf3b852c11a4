"""Leaves fitted from a hard routing, against a loop over leaves."""

from hypothesis import given, strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from jtrees import blocking, leaves

N, P, LEAVES = 60, 3, 5


def draw(seed=0, dtype=np.float32, outputs=()):
    """Leaves 0 to 3 have samples, leaf 4 has none."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(N, P)), rng.normal(size=(N, *outputs))
    return rng.integers(0, 4, N), x.astype(dtype), y.astype(dtype)


@pytest.mark.parametrize("outputs", [(), (2,)])
@pytest.mark.parametrize("weighted", [False, True])
def test_constants_are_weighted_means(x64, weighted, outputs):
    leaf, _, y = draw(dtype=np.float64, outputs=outputs)
    weight = np.random.default_rng(1).integers(0, 3, N).astype(float) if weighted else None
    if weighted:
        weight[leaf == 2] = 0  # a leaf without weight is as good as empty
    mid_range = (y.min(0) + y.max(0)) / 2
    passed = None if weight is None else jnp.asarray(weight)
    for default, expected in [(None, mid_range), (7.0, 7.0)]:
        fitted = leaves.fit_constant(jnp.asarray(leaf), jnp.asarray(y), LEAVES, default=default, sample_weight=passed)
        means = oracles.leaf_means(leaf, y, LEAVES, expected, weight)
        np.testing.assert_allclose(fitted.values, means, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(fitted.values[4], expected, rtol=1e-14)


def test_constants_keep_their_digits_far_from_zero():
    leaf, _, y = draw()
    far = y + np.float32(4096)
    fitted = leaves.fit_constant(jnp.asarray(leaf), jnp.asarray(far), LEAVES)
    # One unit in the last place at 4096 is 5e-4: means are right to that, sums of y would not be.
    np.testing.assert_allclose(fitted.values, oracles.leaf_means(leaf, far, LEAVES, fitted.values[4]), atol=5e-4)


@pytest.mark.parametrize("shift", [0, 1000])
def test_constant_fit_error_is_the_error_of_the_fitted_constants(shift):
    leaf, _, y = draw()
    y = y + np.float32(shift)
    error = leaves.constant_fit_error(jnp.asarray(leaf), jnp.asarray(y), LEAVES)
    means = oracles.leaf_means(leaf, y, LEAVES, 0)
    assert float(error) == pytest.approx(np.mean((y - means[leaf]) ** 2), rel=1e-4)


@pytest.mark.parametrize("block", [None, 7])
def test_linear_leaves_are_ridge_regressions(x64, block, monkeypatch):
    if block:
        monkeypatch.setattr(blocking, "block_size", lambda nodes, n: block)
    leaf, x, y = draw(dtype=np.float64)
    x = x * [1, 10, 0.1] + [5, 0, -3]
    for ridge in (1e-4, 0.3):
        fitted = leaves.fit_linear(*map(jnp.asarray, (leaf, x, y)), LEAVES, ridge=ridge)
        coefficients, intercepts = oracles.leaf_ridge(leaf, x, y, LEAVES, ridge, (y.min() + y.max()) / 2)
        np.testing.assert_allclose(fitted.coefficients, coefficients, rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(fitted.intercept, intercepts, rtol=1e-7, atol=1e-9)


def test_weights_of_linear_leaves_count_as_repetitions(x64):
    leaf, x, y = draw(dtype=np.float64)
    times = np.random.default_rng(2).integers(0, 3, N)
    weighted = leaves.fit_linear(*map(jnp.asarray, (leaf, x, y)), LEAVES, sample_weight=jnp.asarray(times, float))
    repeated = leaves.fit_linear(*(jnp.asarray(np.repeat(a, times, axis=0)) for a in (leaf, x, y)), LEAVES)
    np.testing.assert_allclose(weighted.coefficients[:4], repeated.coefficients[:4], rtol=1e-8)
    np.testing.assert_allclose(weighted.intercept[:4], repeated.intercept[:4], rtol=1e-8)


fit_linear = jax.jit(leaves.fit_linear, static_argnames="num_leaves")


@given(
    st.integers(0, 10**6),
    st.sampled_from(["plain", "duplicated", "constant", "shifted", "binary", "one row a leaf"]),
    st.integers(1, 12),
)
def test_linear_leaves_are_never_worse_than_constants(seed, kind, rows):
    """Few samples for the features (the leaf of ``rows`` samples among others), and columns that say nothing."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(24, 6)).astype(np.float32), rng.normal(size=24).astype(np.float32)
    leaf = np.where(np.arange(24) < rows, 0, 1 + np.arange(24) % 2)
    match kind:
        case "duplicated":
            x[:, 3:] = x[:, :3]
        case "constant":
            x[:, 1:] = 3
        case "shifted":
            x += 1000
        case "binary":
            x = (x > 0).astype(np.float32)
        case "one row a leaf":
            leaf = np.arange(24)
    linear = fit_linear(jnp.asarray(leaf), jnp.asarray(x), jnp.asarray(y), num_leaves=24)
    assert all(np.isfinite(a).all() for a in (linear.coefficients, linear.intercept))
    constants = oracles.leaf_means(leaf, y, 24, 0)
    errors = (y - np.asarray(linear.at(jnp.asarray(leaf), jnp.asarray(x)), np.float64)) ** 2
    # Equal where the fit falls back to the constant, but for rounding: 1e-6 relative, times the 1000 of the shift.
    assert errors.mean() <= np.mean((y - constants[leaf]) ** 2) + (1e-3 if kind == "shifted" else 1e-6)


def test_integer_targets_are_averaged_as_numbers():
    leaf, y = jnp.array([0, 0, 1]), jnp.array([1, 2, 5])
    half = jnp.array([0.5, 0.5, 0.5])
    values = leaves.fit_constant(leaf, y, 3, sample_weight=half).values
    np.testing.assert_allclose(values, [1.5, 5.0, 3.0])  # the empty leaf has the mid-range


@pytest.mark.parametrize("shift", [0, 100])
def test_constant_fit_error_with_weights(x64, shift):
    leaf, _, y = draw(dtype=np.float64)
    y, weight = y + shift, np.random.default_rng(1).uniform(0, 3, N)
    weight[leaf == 2] = 0
    error = leaves.constant_fit_error(*map(jnp.asarray, (leaf, y)), LEAVES, sample_weight=jnp.asarray(weight))
    assert float(error) == pytest.approx(oracles.constant_loss(leaf, y, LEAVES, weight), rel=1e-11)
    whole = leaves.constant_fit_error(jnp.zeros(N, int), jnp.asarray(y), LEAVES, sample_weight=jnp.asarray(weight))
    assert float(whole) == pytest.approx(np.cov(y, aweights=weight, ddof=0), rel=1e-11)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [1.0, 0.3, 20.0])
def test_class_frequencies_and_their_log_loss(x64, weighted, smoothing):
    leaf, _, _ = draw()
    classes, rng = 4, np.random.default_rng(3)
    y, weight = rng.integers(0, 3, N), rng.uniform(0, 3, N) if weighted else np.ones(N)  # class 3 does not occur
    y[leaf == 1] = 2
    arrays, sizes = (jnp.asarray(leaf), jnp.asarray(y)), (LEAVES, classes)
    passed = jnp.asarray(weight) if weighted else None
    counts, expected = oracles.class_frequencies(leaf, y, LEAVES, classes, smoothing, weight)
    tolerance = 1e-12 if weighted else 1e-6  # counts are float32 without weights
    np.testing.assert_allclose(leaves.class_counts(*arrays, *sizes, sample_weight=passed), counts, rtol=1e-12)

    values = leaves.fit_frequencies(*arrays, *sizes, smoothing=smoothing, sample_weight=passed).values
    np.testing.assert_allclose(values, expected, rtol=tolerance)
    np.testing.assert_allclose(values.sum(1), 1, rtol=tolerance)
    everywhere = np.array([weight[y == k].sum() + 1 for k in range(classes)])
    np.testing.assert_allclose(values[4], everywhere / everywhere.sum(), rtol=tolerance)  # no samples
    assert (values > 0).all()

    loss = leaves.frequencies_fit_error(*arrays, *sizes, smoothing=smoothing, sample_weight=passed)
    plain = np.average(-np.log(expected[leaf, y]), weights=weight)
    assert float(loss) == pytest.approx(plain, rel=tolerance)


def test_frequencies_are_smoothed_by_one_sample_unless_told():
    leaf, y = jnp.asarray([0, 0, 0, 1]), jnp.asarray([0, 0, 1, 1])  # overall one half each
    half = jnp.asarray([0.5, 0.5, 0.5, 0.5])
    fitted = leaves.fit_frequencies(leaf, y, 3, 2).values
    np.testing.assert_allclose(fitted, [[2.5 / 4, 1.5 / 4], [0.5 / 2, 1.5 / 2], [0.5, 0.5]], rtol=1e-6)
    halved = leaves.fit_frequencies(leaf, y, 3, 2, sample_weight=half).values
    np.testing.assert_allclose(halved[0], [1.5 / 2.5, 1 / 2.5], rtol=1e-6)
    loss = leaves.frequencies_fit_error(leaf, y, 3, 2)
    assert float(loss) == pytest.approx(-np.log([0.625, 0.625, 0.375, 0.75]).mean(), rel=1e-6)
