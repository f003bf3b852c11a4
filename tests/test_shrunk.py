"""Linear leaves that shrink towards their ancestors, against hat matrices and residuals written out node by node."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from jtrees import blocking, leaves, routing

# One program each: two eigendecompositions in one might hang (see the comments in jtrees/leaves.py).
fit = jax.jit(leaves.fit_shrunk, static_argnames=["num_leaves", "margin"])
error = jax.jit(leaves.shrunk_fit_error, static_argnames="num_leaves")


def draw(n, p, depth, kind="plain", seed=0):
    """Leaves, samples, targets: a plane, other planes in some leaves, noise."""
    rng = np.random.default_rng(seed)
    leaf, x = rng.integers(0, 2**depth, n), rng.normal(size=(n, p)) * [3, 0.1, 1, 20][:p] + [1, -5, 0, 100][:p]
    match kind:
        case "empty":  # a leaf, and where there are enough a whole subtree
            leaf[leaf == 1] = 0
            leaf[leaf >= max(2, 2**depth - 2)] = 2 if depth > 1 else 0
        case "single":
            leaf = np.where(np.arange(n) == 3, 1, np.where(leaf == 1, 0, leaf))
        case "constant":
            x[:, -1] = 7
        case "duplicated":
            x[:, -1] = x[:, 0]
    slopes = rng.normal(size=(2**depth, p)) * (np.arange(2**depth) % 3 == 0)[:, None] + rng.normal(size=p)
    y = ((x - x.mean(0)) * slopes[leaf] / [3, 0.1, 1, 20][:p]).sum(1) + leaf % 2 + 0.3 * rng.normal(size=n)
    return leaf, x, 5 * y + 40


def split(fitted):
    return fitted.coefficients, fitted.intercept, fitted.lower, fitted.upper


def assert_equal_leaves(ours, expected, tolerance=1e-8):
    for name, a, b in zip(("coefficients", "intercept", "lower", "upper"), ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=name)


CASES = [(10, 1, 1), (60, 2, 3), (200, 4, 3)]
KINDS = ["plain", "empty", "single", "constant", "duplicated"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "p", "depth"), CASES)
def test_every_node_takes_the_best_correction_of_its_parents_model(x64, n, p, depth, kind):
    for seed in range(3):
        leaf, x, y = draw(n, p, depth, kind, seed)
        for weight in (np.ones(n), np.random.default_rng(9).uniform(0.1, 3, n) * (np.arange(n) % 5 > 0)):
            arrays = tuple(map(jnp.asarray, (leaf, x, y)))
            options = {"num_leaves": 2**depth, "sample_weight": jnp.asarray(weight)}
            expected, lost, _ = oracles.shrunk_leaves(leaf, x, y, 2**depth, weight=weight)
            assert_equal_leaves(split(fit(*arrays, **options)), expected)
            assert float(error(*arrays, **options)) == pytest.approx(lost, rel=1e-9)


def test_the_cases_above_choose_among_all_kinds_of_candidates():
    chosen = set()
    for case in CASES:
        for kind in KINDS:
            for seed in range(3):
                chosen |= set(oracles.shrunk_leaves(*draw(*case, kind, seed), 2 ** case[2])[2])
    levels = len(oracles.LEVEL_STRENGTHS)
    own_mean = levels * len(oracles.SLOPE_STRENGTHS)
    assert {-1, 0, own_mean} < chosen
    assert any(0 < c < levels for c in chosen)  # a level alone
    assert any(levels < c < own_mean and c % levels for c in chosen)  # slopes and a level
    assert len({c // levels for c in chosen if 0 < c < own_mean}) > 4


def test_weights_count_as_repetitions(x64):
    leaf, x, y = draw(60, 2, 3)
    times = np.random.default_rng(2).integers(0, 4, 60)
    arrays = tuple(map(jnp.asarray, (leaf, x, y)))
    repeated = tuple(jnp.asarray(np.repeat(a, times, axis=0)) for a in (leaf, x, y))
    options = {"num_leaves": 8, "sample_weight": jnp.asarray(times, float)}
    assert_equal_leaves(split(fit(*arrays, **options)), split(fit(*repeated, num_leaves=8)))
    assert float(error(*arrays, **options)) == pytest.approx(float(error(*repeated, num_leaves=8)), rel=1e-9)


def test_units_do_not_matter(x64):
    leaf, x, y = draw(200, 4, 3)
    unit, offset = np.array([1e3, 1e-3, 7, -0.5]), np.array([1, 0, -50, 3])
    options = {"num_leaves": 8, "sample_weight": jnp.ones(200)}
    one = fit(*map(jnp.asarray, (leaf, x, y)), **options)
    other = fit(*map(jnp.asarray, (leaf, x * unit + offset, 30 * y - 700)), **options)
    at = np.asarray(other.intercept) + np.asarray(other.coefficients) @ offset
    back = (np.asarray(other.coefficients) * unit / 30, (at + 700) / 30)
    bounds = ((np.asarray(bound) + 700) / 30 for bound in (other.lower, other.upper))
    assert_equal_leaves((*back, *bounds), split(one), 1e-7)
    errors = [
        float(error(*map(jnp.asarray, data), **options)) for data in ((leaf, x, y), (leaf, x * unit, 30 * y - 700))
    ]
    assert errors[1] == pytest.approx(900 * errors[0], rel=1e-9)


def test_a_leaf_without_samples_answers_as_its_parent(x64):
    leaf, x, y = draw(200, 4, 3)
    leaf[leaf == 5] = 4
    leaf[(leaf == 2) | (leaf == 3)] = 0  # and the node above them is empty too
    fitted = fit(*map(jnp.asarray, (leaf, x, y)), num_leaves=8, sample_weight=jnp.ones(200))
    above = fit(*map(jnp.asarray, (leaf // 2, x, y)), num_leaves=4, sample_weight=jnp.ones(200))
    for one, other in zip(split(fitted), split(above), strict=True):
        np.testing.assert_allclose(one[jnp.asarray([2, 3, 5])], other[jnp.asarray([1, 1, 2])], rtol=1e-10)
    distinct = lambda fitted: len(np.unique(np.asarray(fitted.coefficients)[:, 0].round(6)))
    assert distinct(above) > 1
    assert distinct(fitted) > distinct(above)


def test_answers_stay_within_the_targets_of_an_ancestor_and_the_margin():
    leaf, x, y = (a.astype(t) for a, t in zip(draw(60, 2, 3), (np.int32, np.float32, np.float32), strict=True))
    fitted = fit(*map(jnp.asarray, (leaf, x, y)), num_leaves=8, margin=0.5, sample_weight=jnp.ones(60))
    bounds = np.stack([fitted.lower, fitted.upper])
    for k in range(8):
        ranges = []
        for up in range(4):
            there = y[leaf >> up == k >> up]
            ranges.append([there.min(), there.max()] + 0.5 * np.ptp(there) * np.array([-1, 1]))
        assert np.isclose(ranges, bounds[:, k], rtol=1e-5).all(axis=1).any()  # a few units in the last place at 40
    far = fitted.outputs(jnp.asarray(1e3 * x))
    assert (far >= fitted.lower[:, None]).all() and (far <= fitted.upper[:, None]).all()
    assert len(np.unique(far)) < far.size / 2  # the bounds were needed


def nasty(kind):
    rng = np.random.default_rng(3)
    leaf, x, y = rng.integers(0, 4, 12), rng.normal(size=(12, 6)), rng.normal(size=12)
    match kind:
        case "offset":
            x += 1e6
        case "offset of y":
            y += 1e6
        case "collinear":
            x[:, 1:] = x[:, :1] * np.arange(1, 6)
        case "constant":
            x[:, :] = 0.1
        case "constant y":
            y[:] = 0.1
        case "units":
            x *= [1e-12, 1e-6, 1, 1e6, 1e12, 1e15]
        case "one leaf":
            leaf[:] = 3
    return tuple(jnp.asarray(a, t) for a, t in zip((leaf, x, y), (jnp.int32, jnp.float32, jnp.float32), strict=True))


NASTY = ["few", "offset", "offset of y", "collinear", "constant", "constant y", "units", "one leaf"]


@pytest.mark.parametrize("kind", NASTY)
def test_always_finite_and_never_far_from_the_targets(kind):
    leaf, x, y = nasty(kind)
    fitted = fit(leaf, x, y, num_leaves=4)
    assert all(np.isfinite(a).all() for a in split(fitted))
    assert np.isfinite(error(leaf, x, y, num_leaves=4))
    answers = fitted.at(leaf, x)
    low, high = float(y.min()), float(y.max())
    slack = 0.1 * (high - low) + 1e-6 * abs(low) + 1e-6
    assert ((answers >= low - slack) & (answers <= high + slack)).all()
    # The best constant is among the candidates at the root; the slack is for what cross-validation may misjudge.
    assert jnp.square(y - answers).mean() <= 1.1 * y.var() + 1e-6 * jnp.square(y).max()


@pytest.mark.parametrize("value", [7.0, 0.1, 1e3 / 3])
def test_a_constant_column_gets_no_slope(value):
    leaf, x, y = draw(60, 2, 3)
    x[:, 1] = value
    for seed in range(5):
        weight = np.random.default_rng(seed).uniform(0.1, 3, 60)
        x, y, weight = (jnp.asarray(a, jnp.float32) for a in (x, y, weight))
        fitted = fit(jnp.asarray(leaf, jnp.int32), x, y, num_leaves=8, margin=0.5, sample_weight=weight)
        assert not fitted.coefficients[:, 1].any()


def test_the_same_under_vmap_and_in_blocks(monkeypatch):
    arrays = [nasty(kind) for kind in ("few", "one leaf", "offset")]
    alone = [fit(*data, num_leaves=4) for data in arrays]
    monkeypatch.setattr(blocking, "block_size", lambda nodes, n: 5)
    stacked = (jnp.stack(parts) for parts in zip(*arrays, strict=True))
    together = jax.jit(jax.vmap(lambda *data: leaves.fit_shrunk(*data, 4)))(*stacked)
    for i, one in enumerate(alone):
        leaf, x, _ = arrays[i]
        own = jax.tree.map(lambda a, i=i: a[i], together)
        # Sums in another order; features of unit variance at 1e6 have two digits left.
        np.testing.assert_allclose(own.at(leaf, x), one.at(leaf, x), rtol=1e-4, atol=0.3 if i == 2 else 1e-4)
        np.testing.assert_allclose([own.lower, own.upper], [one.lower, one.upper], rtol=1e-4)


def at_depth_8(x, seed):
    """Leaves of samples under a random tree."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(255, x.shape[1])) @ x.T + 0.5 * rng.normal(size=(255, 1))
    return routing.leaf_index(jnp.asarray(scores, jnp.float32))


def test_noise_is_not_followed_at_depth_8():
    n = 1000
    for seed in range(3):
        rng = np.random.default_rng(seed)
        x, y = rng.normal(size=(2 * n, 3)).astype(np.float32), rng.normal(size=2 * n).astype(np.float32)
        leaf = at_depth_8(x, seed)
        fitted = fit(leaf[:n], jnp.asarray(x[:n]), jnp.asarray(y[:n]), num_leaves=256)
        answers = np.asarray(fitted.at(leaf[n:], jnp.asarray(x[n:])))
        # Means of the leaves lose 3 to 13 per cent more than the mean of all.
        assert np.mean((y[n:] - answers) ** 2) <= 1.02 * np.mean((y[n:] - y[:n].mean()) ** 2)


@pytest.mark.parametrize("count", [1, 256])
def test_a_plane_is_found_at_any_depth(count):
    x = np.random.default_rng(0).normal(size=(1000, 3)).astype(np.float32)
    leaf = at_depth_8(x, 0) % count
    y = x @ np.array([1, -2, 0.5], np.float32) + 3
    fitted = fit(leaf, jnp.asarray(x), jnp.asarray(y), num_leaves=count)
    # The weakest ridge, a hundredth of a sample in 1000, moves slopes by 1e-5 of their size at the root; one stronger
    # may be taken where rounding hides the difference, here and in leaves of 4 samples.
    np.testing.assert_allclose(fitted.coefficients, np.tile([1, -2, 0.5], (count, 1)), atol=2e-3)
    np.testing.assert_allclose(fitted.intercept, 3, atol=2e-3)
