"""Linear leaves that shrink towards their ancestors, against hat matrices and residuals written out node by node."""

import itertools

import jax
import numpy as np
import pytest

from jtrees import blocking, leaves
from jtrees.leaves import Linear
from tests import oracles, sweeps

# It takes two seconds to compile, so tests share shapes: 200 x 4 and three targets in float64, worked on in blocks.
fit_linear = lambda *data, **options: Linear(*leaves.fit_shrunk(*data, **options)[0])
fit = jax.jit(fit_linear, static_argnames="num_leaves")
error = jax.jit(lambda *data, **options: leaves.fit_shrunk(*data, **options)[1], static_argnames="num_leaves")
answer = jax.jit(Linear.at)


@pytest.fixture
def in_blocks(x64, monkeypatch):
    """Double precision, and no block of more than 64 samples."""
    monkeypatch.setattr(blocking, "block_size", lambda nodes, n: min(n, 64))


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
    if kind == "units":
        return leaf, x * [1e3, 1e-3, 7, -0.5][:p] + [1, 0, -50, 3][:p], 30 * y - 700
    return leaf, x, 5 * y + 40


def three_targets(kind="plain", seed=0):
    """Leaves, samples, and targets of three kinds on scales of their own, ``(200, 3)``."""
    leaf, x, y = draw(200, 4, 3, kind, seed)
    noise = np.random.default_rng(seed).normal(size=200)
    return leaf, x, np.stack([y, 1e3 * noise, np.abs(x[:, 2]) + leaf % 4], axis=1)


def column(fitted, j):
    """The model of one output."""
    return [np.asarray(part)[..., j] for part in jax.tree.leaves(fitted)]


def assert_equal_leaves(ours, expected, tolerance=1e-8):
    names = ("coefficients", "intercept", "lower", "upper")
    for name, a, b in zip(names, jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=name)


KINDS = ["plain", "empty", "single", "constant", "duplicated", "units"]


def weightings(n):
    return np.ones(n), np.random.default_rng(9).uniform(0.1, 3, n) * (np.arange(n) % 5 > 0)


@pytest.mark.parametrize("kind", sweeps.quick(KINDS, ["empty", "duplicated"]))
def test_every_node_takes_the_best_correction_of_its_parents_model(in_blocks, kind):
    """Uneven weights count as fewer samples, whatever their unit."""
    for seed, weight in enumerate(weightings(200)):
        leaf, x, targets = three_targets(kind, seed)
        expected = [oracles.shrunk_leaves(leaf, x, y, 8, weight=weight) for y in targets.T]
        loss = np.mean([loss for _, loss, _ in expected])
        start = Linear(np.zeros((8, 4, 3)), np.zeros((8, 3)))
        for unit in (1, 1000):
            options = {"num_leaves": 8, "sample_weight": unit * weight}
            fitted = fit(leaf, x, targets, **options)
            assert [part.shape for part in jax.tree.leaves(fitted)] == [(8, 4, 3), (8, 3), (8, 3), (8, 3)]
            for j, (parts, _, _) in enumerate(expected):
                assert_equal_leaves(column(fitted, j), parts)
            assert float(error(leaf, x, targets, **options)) == pytest.approx(loss, rel=1e-9)
        if kind == "empty":
            assert_equal_leaves(jax.jit(Linear.refit)(start, leaf, x, targets, weight), fitted)
            assert float(jax.jit(Linear.criterion)(start, leaf, x, targets, weight)) == pytest.approx(loss, rel=1e-9)


def nasty(kind, seed=3):
    """Few samples for the features, and columns that say nothing; float32."""
    rng = np.random.default_rng(seed)
    leaf, x, y = rng.integers(0, 4, 12), rng.normal(size=(12, 6)), rng.normal(size=12)
    match kind:
        case "offset":
            x += 1e6
        case "offset of y":
            y += 1e6
        case "collinear":
            x[:, 1:] = x[:, :1] * np.arange(1, 6)
        case "duplicated":
            x[:, 3:] = x[:, :3]
        case "constant":
            x[:, :] = 0.1
        case "constant but one":
            x[:, 1:] = 3
        case "constant y":
            y[:] = 0.1
        case "binary":
            x = x > 0
        case "units":
            x *= [1e-12, 1e-6, 1, 1e6, 1e12, 1e15]
        case "one leaf":
            leaf[:] = 3
        case "one row in a leaf":
            leaf = np.where(np.arange(12) < 1, 0, 1 + np.arange(12) % 2)
    return leaf.astype(np.int32), x.astype(np.float32), y.astype(np.float32)


NASTY = ["few", "offset", "offset of y", "collinear", "duplicated", "constant", "constant but one", "constant y"]
NASTY += ["binary", "units", "one leaf", "one row in a leaf"]


@pytest.mark.parametrize("kind", NASTY)
def test_always_finite_and_never_far_from_the_targets(kind):
    equal_weight = np.ones(12, np.float32)
    for seed in range(4):
        leaf, x, y = nasty(kind, seed)
        fitted = fit(leaf, x, y, num_leaves=4, sample_weight=equal_weight)
        assert all(np.isfinite(a).all() for a in jax.tree.leaves(fitted))
        assert np.isfinite(error(leaf, x, y, num_leaves=4, sample_weight=equal_weight))
        answers = np.asarray(answer(fitted, leaf, x), np.float64)
        low, high = float(y.min()), float(y.max())
        slack = 0.1 * (high - low) + 1e-6 * abs(low) + 1e-6
        assert ((answers >= low - slack) & (answers <= high + slack)).all()
        # The best constant is among the candidates at the root, and no node takes what it would lose more by; the
        # slack is for what cross-validation may misjudge.
        assert np.square(y - answers).mean() <= 1.1 * np.var(y, dtype=np.float64) + 1e-6 * np.square(y).max()


def test_side_by_side_as_alone():
    tables = [nasty("few"), nasty("one leaf")]
    together = jax.jit(jax.vmap(lambda *table: fit_linear(*table, 4)))(*map(np.stack, zip(*tables, strict=True)))
    for i, (leaf, x, y) in enumerate(tables):
        result = jax.tree.map(lambda a, i=i: a[i], together)
        expected = Linear(*oracles.shrunk_leaves(leaf, x, y, 4)[0])
        answers = (expected.coefficients[leaf] * x).sum(1) + expected.intercept[leaf]
        answers = np.clip(answers, expected.lower[leaf], expected.upper[leaf])
        np.testing.assert_allclose(answer(result, leaf, x), answers, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [7.0, 0.1])
def test_a_constant_column_gets_no_slope(value):
    for kind, seed in itertools.product(("few", "one leaf"), range(2)):
        leaf, x, y = nasty(kind, seed)
        x[:, 1] = value
        uneven = np.random.default_rng(seed).uniform(0.1, 3, 12).astype(np.float32)
        for weight in (np.ones(12, np.float32), uneven):
            fitted = fit(leaf, x, y + 3 * x[:, 0], num_leaves=4, sample_weight=weight)
            assert not fitted.coefficients[:, 1].any() and fitted.coefficients[:, 0].any()


def test_a_leaf_of_hardly_any_weight_costs_hardly_anything():
    """And is not 0 / 0, as squares of its weight would be."""
    leaf, x, y = np.repeat([0, 3], 6).astype(np.int32), *nasty("few")[1:]
    y = x[:, 0] + np.float32(0.1) * y
    cost = lambda weight: error(
        leaf, x, y, num_leaves=4, sample_weight=np.where(leaf == 0, 1, weight).astype(np.float32)
    )
    for small in (1e-10, 1e-20, 1e-30, 1e-37):
        np.testing.assert_allclose(cost(small), cost(0), rtol=1e-4)
