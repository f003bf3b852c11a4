"""Sums, means and quantiles within leaves, against NumPy in double precision."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from jtrees import segments
from jtrees.losses import Huber, Poisson
from jtrees.tasks.fits import weighted_quantiles
from tests import sweeps

SIZES = sweeps.quick([(70_000, 3), (70_000, 14_000), (1_000_000, 200_000)], [(70_000, 3)], [(70_000, 14_000)])
SIZES.append(pytest.param((4_000_000, 2), marks=pytest.mark.wide))


def random_rows(size, decades=4):
    """Leaves of equally many rows in random order, values, and weights over twice so many decades."""
    n, leaves = size
    rng = np.random.default_rng(0)
    leaf = rng.permutation(np.arange(n, dtype=np.int32) % leaves)
    y = rng.normal(size=n).astype(np.float32)
    return leaf, y, (10 ** rng.uniform(-decades, decades, n)).astype(np.float32)


def compiled(fn, num_leaves, **options):
    return jax.jit(lambda leaf, *arrays: fn(leaf, *arrays, num_leaves=num_leaves, **options))


def of_sums(leaf, values, num_leaves):
    return segments.sums(values, leaf, num_leaves)


@pytest.mark.parametrize("size", SIZES)
def test_sums_have_the_digits_of_float32_within_each_leaf(size):
    """Whatever the order of the rows."""
    leaf, y, weight = random_rows(size)
    leaves = size[1]
    heavy = np.where(leaf == 0, np.float32(1e30), 1)  # in one leaf
    values = np.stack([weight * y * heavy, np.float32(0.1) + 0 * y], axis=1)
    run = compiled(of_sums, leaves)
    result = np.asarray(run(leaf, values), np.float64)
    for j in range(2):
        exact = np.bincount(leaf, values[:, j].astype(float), leaves)
        size_of = np.bincount(leaf, np.abs(values[:, j]).astype(float), leaves)
        assert (np.abs(result[:, j] - exact) <= 2e-7 * size_of).all()
    order = np.random.default_rng(1).permutation(len(y))
    assert np.array_equal(run(leaf[order], values[order]), result)
    for bad in (np.nan, -np.inf):  # not finite in one leaf alone
        values[np.flatnonzero(leaf == 1)[5 if leaves == 3 else 0], 0] = bad
        broken = np.asarray(run(leaf, values))[:, 0]
        assert not np.isfinite(broken[1]) and np.isfinite(np.delete(broken, 1)).all()


@pytest.mark.parametrize("n", [10, 2**16, 2**16 + 1, 80_000])
def test_sums_of_any_length_are_those_of_numpy(n):
    leaf, y, _ = random_rows((n, 3))
    values = y * np.where(leaf == 1, 1e-30, 1).astype(np.float32)
    result = compiled(of_sums, 4)(leaf, values)
    exact, size = (np.bincount(leaf, a.astype(float), 4) for a in (values, np.abs(values)))
    assert (np.abs(result - exact) <= (1e-5 if n <= 2**16 else 2e-7) * size).all() and result[3] == 0


@pytest.mark.parametrize("size", SIZES)
def test_means_are_not_spoilt_by_other_leaves(size):
    leaf, y, weight = random_rows(size)
    shift = np.where(leaf == 0, 1e10, 5).astype(np.float32)
    y = (y + shift).astype(np.float32)
    result = np.asarray(
        compiled(lambda leaf, y, w, num_leaves: segments.means(leaf, y, num_leaves, w), size[1])(leaf, y, weight)
    )
    total = np.bincount(leaf, weight.astype(float) * y, size[1])
    np.testing.assert_allclose(result, total / np.bincount(leaf, weight.astype(float), size[1]), rtol=3e-7)


def plain_quantiles(leaf, y, num_leaves, levels, weight):
    """Leaf by leaf, in double precision."""
    order = np.lexsort((y, leaf))
    y, weight, ends = y[order], weight[order].astype(float), np.searchsorted(leaf[order], np.arange(num_leaves + 1))
    out = np.empty((num_leaves, len(levels)))
    for i, (start, end) in enumerate(itertools.pairwise(ends)):
        part = np.cumsum(weight[start:end])
        for j, level in enumerate(levels):
            target = level * part[-1]
            low = y[start + np.searchsorted(part, target * (1 - 1e-14))]
            high = y[start + min(np.searchsorted(part, target * (1 + 1e-14), side="right"), end - start - 1)]
            out[i, j] = (float(low) + float(high)) / 2
    return out


@pytest.mark.parametrize("size", SIZES)
def test_weighted_quantiles_are_those_of_double_precision_in_every_leaf(size):
    leaf, y, weight = random_rows(size)
    weight[leaf == 0] *= 1e20  # rows that come before those of all other leaves
    levels = (0.1, 0.5, 0.9)
    run = compiled(
        lambda leaf, y, w, **options: weighted_quantiles(leaf, y, sample_weight=w, **options), size[1], levels=levels
    )
    expected = plain_quantiles(leaf, y, size[1], levels, weight)
    assert np.array_equal(run(leaf, y, weight), expected.astype(np.float32))
    on_host = weighted_quantiles(leaf, y, size[1], levels, sample_weight=weight.astype(float))
    np.testing.assert_array_equal(on_host, expected)


def test_ties_of_equal_weights_are_mid_points():
    n, levels = 10, (0.1, 0.3, 0.5, 0.7, 0.9)
    arrays = np.zeros(n, np.int32), np.arange(n, dtype=np.float32), np.full(n, 0.1, np.float32)
    in_program = jax.jit(weighted_quantiles, static_argnums=(2, 3))
    for compute, (leaf, y, weight) in ((weighted_quantiles, arrays), (in_program, arrays)):
        quantiles = compute(leaf, y, 1, levels, sample_weight=weight)[0]
        assert quantiles.tolist() == [round(level * n) - 0.5 for level in levels]


@pytest.mark.parametrize("n", [20_000, pytest.param(4_000_000, marks=pytest.mark.wide)])
def test_fits_of_leaves_are_those_of_double_precision(n):
    leaf, y, weight = random_rows((n, 4), decades=1)
    y = (y + 3).astype(np.float32)
    wide = leaf, y.astype(float), weight.astype(float)
    count, total = np.bincount(leaf, wide[2]), np.bincount(leaf, wide[2] * wide[1])
    means = total / count
    error = np.average(np.square(wide[1] - means[leaf]), weights=wide[2])
    result = jax.jit(lambda *a: jtrees.tasks.fits.constant_fit_error(*a[:2], 4, sample_weight=a[2]))(leaf, y, weight)
    plain = n <= 2**16  # sums of fewer rows are plain, and their error depends on the width of the vector unit
    assert result == pytest.approx(error, rel=1e-5 if plain else 2e-6)
    values, _ = jax.jit(lambda *a: jtrees.leaves.fit_hierarchical(*a[:2], 4, sample_weight=a[2], strength=0.0))(
        leaf, y, weight
    )
    np.testing.assert_allclose(values, means, rtol=3e-7)
    step = jax.jit(lambda *a: Poisson().steps(a[0], jnp.zeros(n), a[1], 4, a[2], 0.0))(leaf, np.abs(y), weight)
    exact = np.bincount(leaf, wide[2] * (np.abs(wide[1]) - 1)) / count
    np.testing.assert_allclose(step, exact, rtol=1e-6)
    if not plain:  # counts exceed the integers of float32
        zeros = jnp.zeros(n := 2**24 + 2**20, jnp.int32)
        assert jtrees.tasks.fits.class_counts(zeros, zeros, 1, 2)[0].tolist() == [n, 0]


def test_huber_constants_on_the_host_are_those_in_a_program():
    leaf, y, weight = random_rows((2_000, 4), decades=1)
    loss = Huber(0.3)
    result = loss.constants(leaf, y.astype(float), 4, weight.astype(float))
    in_program = jax.jit(lambda *a: loss.constants(a[0], a[1], 4, a[2]))(leaf, y, weight)
    np.testing.assert_allclose(result, in_program, atol=2e-3)
    errors = result[leaf] - y
    slopes = np.bincount(leaf, weight.astype(float) * np.clip(errors, -0.3, 0.3))
    np.testing.assert_allclose(slopes, 0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 70_000, 1_000_003])
def test_quick_sums_are_those_of_double_precision_but_for_a_few_digits(n):
    leaf, y, _ = random_rows((n, 7))
    leaf[: n // 2] = 3  # half of the rows in one leaf
    result = segments.quick_sums(jnp.asarray(y), jnp.asarray(leaf), 7)
    size = np.maximum(np.bincount(leaf, np.abs(y.astype(np.float64)), 7), 1e-9)
    np.testing.assert_allclose(result / size, np.bincount(leaf, y.astype(np.float64), 7) / size, rtol=0, atol=3e-6)
    tenths = segments.quick_sums(jnp.full(2**21, 0.1), jnp.zeros(2**21, jnp.int32), 1)
    np.testing.assert_allclose(tenths, 2**21 * 0.1, rtol=1e-5)
