"""Trees of CART on the outputs of a ridge regression, from which GET and RADDT have a start."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LinearRegression
from sklearn.tree import DecisionTreeRegressor

import jtrees
from jtrees import warmstart
from jtrees.search import cart
from jtrees.tasks import Classification, Policy, Regression
from jtrees.training import Batch

pytestmark = pytest.mark.usefixtures("standard_promotion")  # AdamW

KEY = jax.random.key(0)
GET = jtrees.GET(depth=2, starts=3, epochs=60)
UNIT = 1 / 3
STRENGTHS = 10.0 ** np.arange(5, -3.5, -0.5)


def table(n, p, seed=0, noise=0.5):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, p)) @ rng.normal(size=(p, p)) * 10.0 ** rng.integers(-3, 4, p)
    x[:, 1] = np.float32(0.1)  # whose mean rounds
    signal = (x - x.mean(0)) / np.where(x.std(0) > 0, x.std(0), 1) @ rng.normal(size=(p, 2))
    return x, signal / signal.std(0) + noise * rng.normal(size=(n, 2)), rng.integers(0, 4, n).astype(float)


directions = jax.jit(cart.ridge_directions, static_argnames="task")


def cosines(ours, theirs):
    unit = lambda a: a / np.linalg.norm(a, axis=0)
    return np.abs((unit(np.asarray(ours, np.float64)) * unit(theirs)).sum(0))


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize(("n", "p"), [(60, 5), (40, 60)], ids=["tall", "wide"])
def test_the_directions_in_a_program_are_those_of_the_least_cross_validated_error(n, p, outputs):
    """Against sums over the samples: the error divided by the square of the degrees of freedom left."""
    x, y, _ = table(n, p, seed=1, noise=1.5)
    x, y = np.float64(np.float32((x - x.mean(0)) / x.std(0).clip(1e-3))), y[:, :outputs]
    z, t, slopes, errors = x - x.mean(0), y - y.mean(0), [], []
    for strength in STRENGTHS:
        hat = np.linalg.solve(z.T @ z + strength * np.eye(p), z.T)
        free = 1 - (1 + np.trace(z @ hat)) / n
        slopes.append(hat @ t)
        errors.append(np.square(t - z @ slopes[-1]).sum() / free**2 if free > 0.1 else np.inf)
    best = int(np.argmin(errors))
    assert 0 < best < len(errors) - 1
    principal = np.linalg.svd(z @ slopes[best], full_matrices=False)[2].T[:, ::-1]  # ascending
    actual = directions(Batch(np.float32(x), np.float32(y), None), task=Regression(outputs))
    assert actual.shape == (p, outputs)
    np.testing.assert_allclose(np.linalg.norm(actual, axis=0), 1, rtol=1e-5)
    np.testing.assert_allclose(cosines(actual, slopes[best] @ principal), 1, atol=1e-4)  # float32


def test_the_directions_of_weights_are_those_of_repeated_samples_and_their_scale_does_not_matter():
    """Equal weights count as samples, others as fewer: scaled to their effective number."""
    x, y, weight = table(60, 5)
    x, y = np.float32((x - x.mean(0)) / x.std(0).clip(1e-3)), np.float32(y)
    actual = lambda x, y, weight: directions(Batch(x, y, weight), task=Regression(2))
    selected = np.float32(weight > 0)
    without = actual(x[weight > 0], y[weight > 0], None)
    np.testing.assert_allclose(actual(x, y, selected), without, atol=1e-4)
    np.testing.assert_allclose(actual(x, y, np.float32(1e-3 * weight)), actual(x, y, np.float32(weight)), atol=1e-4)
    assert np.abs(without - actual(x, y, np.float32(weight))).max() > 1e-2


def test_a_direction_of_little_variance_counts_in_a_long_table():
    z, e = np.random.default_rng(0).normal(size=(2, 20_000)).astype(np.float32)
    x = np.stack([z, z + np.float32(0.05) * e], 1)
    outputs = x @ np.asarray(directions(Batch(x, np.sign(e), None), Regression()))
    assert abs(np.corrcoef(outputs[:, 0], e)[0, 1]) > 0.99


def test_directions_of_classes_are_linear_discriminants():
    rng = np.random.default_rng(0)
    y = rng.choice(4, 5000, p=[0.6, 0.25, 0.1, 0.05])
    x = np.float32(rng.normal(size=(4, 5))[y] * [3, 1, 1, 1, 0] + rng.normal(size=(5000, 5)))
    x = (x - x.mean(0)) / x.std(0)
    actual = directions(Batch(x, y, None), task=Classification(4))
    theirs = LinearDiscriminantAnalysis(solver="eigen").fit(x, y).scalings_[:, :3]
    assert actual.shape == (5, 3)
    np.testing.assert_allclose(cosines(actual, theirs[:, ::-1]), 1, atol=1e-4)  # the strength, and float32


@pytest.mark.parametrize(
    ("task", "shape"), [(Classification(2), (4, 1)), (Classification(9), (4, 4)), (Regression(2), (4, 2))]
)
def test_as_many_directions_as_outputs_differ_and_none_of_rounding_errors(task, shape):
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=(30, 4)))
    is_classification = isinstance(task, Classification)
    y = rng.integers(0, task.classes, 30) if is_classification else np.float32(x[:, :1] + rng.normal(size=(30, 2)))
    actual = lambda x, y: np.asarray(directions(Batch(x, y, None), task=task))
    assert actual(x, y).shape == shape and actual(x, y).any(axis=0).all()
    constant = np.ones_like(y) if is_classification else np.full_like(y, 0.1)
    assert not actual(x, constant).any()
    assert not actual(np.zeros_like(x), y).any()
    if not is_classification:
        equal = actual(x, y[:, :1].repeat(2, axis=1))
        assert equal.any(axis=0).tolist() == [False, True]


def standardised(x):
    return np.float32((x - x.mean(0)) / x.std(0).clip(1e-3))


def test_weights_count_and_an_outlier_does_not():
    """Only their ratios matter; samples of weight 0 might as well not be there."""
    x, y, weight = table(80, 5)
    x, y = standardised(x), np.float32(y[:, 0])
    outlier = x.copy()
    outlier[0, 2], x[0, 2] = 100, 0
    grow = lambda *rows: np.asarray(cart.grown_on_ridge(Batch(*rows), Regression(), 1, UNIT).weights)[0]
    expected = grow(*(a[weight > 0] for a in (x, y, weight)))
    np.testing.assert_allclose(grow(x, y, 7 * weight), expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(grow(x, y, None), expected, rtol=1e-2)
    a, b = grow(outlier, y, None), grow(x, y, None)
    assert a @ b > 0.999 * np.linalg.norm(a) * np.linalg.norm(b)
    in_program = [directions(Batch(rows, y, None), task=Regression()) for rows in (x, outlier)]
    np.testing.assert_allclose(*in_program, atol=1e-6)


def test_each_target_has_a_strength_of_its_own():
    x, y, _ = table(60, 8)
    x, y = standardised(x), np.float32(y)
    y[:, 1] = np.random.default_rng(1).normal(size=60)  # noise: the strongest is best
    grow = lambda y: np.asarray(cart.grown_on_ridge(Batch(x, y, None), Regression(), 1, UNIT).weights)[0]
    alone, pair = grow(y[:, 0]), grow(y)
    np.testing.assert_allclose(pair, alone, rtol=1e-4, atol=1e-6 * np.abs(alone).max())


def test_splits_are_intervals_of_the_outputs():
    x, y, weight = table(400, 6)
    rows = Batch(np.float32((x - x.mean(0)) / x.std(0).clip(1)), np.float32(y[:, 0]), weight)
    tree = cart.grown_on_ridge(rows, Regression(), 3, UNIT)
    directions = np.asarray(tree.weights)[tree.splits]
    np.testing.assert_allclose(directions, directions[:1].repeat(len(directions), 0), rtol=1e-6)
    scores = rows.x @ directions[0]
    deviation = np.sqrt(np.average((scores - np.average(scores, weights=weight)) ** 2, weights=weight))
    assert deviation == pytest.approx(UNIT, rel=1e-4)
    minimum = 10 * (weight**2).sum() / weight.sum()  # effective samples
    model = DecisionTreeRegressor(max_depth=3, min_weight_fraction_leaf=0.999 * minimum / weight.sum())
    leaf = model.fit(scores[:, None], y[:, 0], sample_weight=weight).apply(scores[:, None])
    pairs = set(zip(leaf, np.asarray(tree.leaf_index(rows.x)), strict=True))
    assert len(pairs) == len(set(leaf)) == len({number for _, number in pairs}) >= 6


def test_actions_are_split_by_what_they_are_worth():
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=(300, 5)))
    direction = np.float32([1, 1, -1, 0, 0])
    best = x @ direction
    rewards = np.float32(np.stack([best, -best], axis=1) + 10 * rng.normal(size=(300, 1)))
    tree = cart.grown_on_ridge(Batch(x, rewards, None), Policy(2), 1, UNIT)
    actual = np.asarray(tree.weights)[0]
    assert abs(actual @ direction) > 0.999 * np.linalg.norm(actual) * np.linalg.norm(direction)


def noisy_plane(n=100, p=40, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2, n, p))
    y = x @ np.full(p, p**-0.5) + 0.1 * rng.normal(size=(2, n))
    return x, y


def test_cart_of_linear_leaves_divides_what_a_linear_model_leaves():
    x, y, weight = table(400, 5)
    residuals = y - LinearRegression().fit(x, y, sample_weight=weight).predict(x)
    tree = cart.grown_cart(Batch(x, y, weight), Regression(2), 2, "linear")
    expected = warmstart.cart(x, residuals, 2, sample_weight=weight)
    np.testing.assert_array_equal(tree.weights, expected.weights)
    np.testing.assert_allclose(tree.bias, expected.bias, rtol=1e-6)
    assert not np.array_equal(tree.weights, cart.grown_cart(Batch(x, y, weight), Regression(2), 2).weights)


@pytest.mark.parametrize("kind", ["one target", "two targets", "actions"])
def test_targets_that_are_constant_in_the_rows_left_are_not_split(kind):
    x = np.float32(np.random.default_rng(0).normal(size=(32, 2)))
    y = np.zeros(32, np.float32)
    y[3] = 1
    task: Any = Regression()
    if kind == "two targets":
        y, task = np.stack([y, x[:, 0]], axis=1), Regression(2)
    elif kind == "actions":
        y, task = np.stack([y, y], axis=1), Policy(2)
    rest = Batch(np.delete(x, 3, 0), np.delete(y, 3, 0), None)
    for grow in (partial(cart.grown_cart, rest, task, 2), partial(cart.grown_on_ridge, rest, task, 2, UNIT)):
        tree = grow()
        assert np.isfinite(tree.weights).all() and tree.splits.any() == (kind == "two targets")


@pytest.mark.parametrize(
    ("options", "shape", "present"),
    [
        ({"starts": 2}, (60, 3), True),
        ({"starts": 1}, (60, 3), False),
        ({"cart": False}, (60, 3), False),
        ({"ridge": False}, (60, 3), False),
        pytest.param({"leaves": "linear"}, (60, 3), False, marks=pytest.mark.slow),
        pytest.param({}, (50, 3000), True, marks=pytest.mark.wide),
        pytest.param({}, (3000, 50), True, marks=pytest.mark.slow),
    ],
)
def test_a_start_is_taken_for_it_only_beside_cart_and_constant_leaves(options, shape, present):
    x, y = noisy_plane(*shape)
    fit = jtrees.fit(GET.replace(**{"epochs": 1} | options), x[0], y[0], key=KEY)
    assert np.isfinite(fit.report.search.ridge_loss) == present
    assert np.isfinite(fit.report.search.cart_loss) == options.get("cart", True)
