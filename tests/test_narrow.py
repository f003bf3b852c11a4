"""Linear leaves of wide tables: a ridge regression of all samples, corrected along few features in each leaf."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import r2_score

import jtrees
from jtrees import leaves, ridge
from jtrees.leaves import narrow, shrunk
from tests import oracles, sweeps

WIDTH = narrow.WIDEST + 6  # of most tables here, which share programs
map_of = jax.jit(shrunk.fit_narrowing)


@jax.jit
def fit_with_error(leaf, x, y, sample_weight=None):
    return leaves.fit_shrunk(leaf, x, y, 4, sample_weight=sample_weight)


def draw(n, p=WIDTH, seed=0):
    """Leaves, features in several units, a target that depends on three features and on the leaf, and weights."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, p)) * rng.uniform(0.1, 10, p) + rng.normal(size=p)
    standard = (x - x.mean(0)) / x.std(0)
    leaf = 3 * (standard[:, 0] > 0)  # the first leaf or the last of four
    y = leaf - 2 * standard[:, 1] + (leaf - 1.5) * standard[:, 2] + 0.3 * rng.normal(size=n) + 5
    return leaf, x, y, rng.uniform(0.2, 3, n) * (np.arange(n) % 7 > 0)


def standardised(x, y, weight):
    centre = np.average(x, axis=0, weights=weight)
    deviation = np.sqrt(np.average((x - centre) ** 2, axis=0, weights=weight))
    counts = weight * weight.sum() / (weight @ weight)
    return (x - centre) / deviation, y - np.average(y, axis=0, weights=weight), counts


@pytest.mark.parametrize("n", sweeps.quick([160, 60], [60]))
def test_the_ridge_regression_has_the_strength_of_the_least_gcv(x64, n):
    """Whichever side of the table is shorter, and for each output alone."""
    _, x, y, weight = draw(n)
    noise = np.random.default_rng(1).normal(size=n)
    x, targets, counts = standardised(x, np.stack([y, noise], axis=1), weight)
    fitted = jax.jit(partial(ridge.ridge, strengths=(np.inf, *ridge.STRENGTHS)))(x, targets, counts)
    for j, target in enumerate(targets.T):
        slopes, df, left = oracles.best_ridge(x[weight > 0], target[weight > 0], counts[weight > 0])
        np.testing.assert_allclose(fitted.slopes[:, j], slopes, atol=1e-9)
        assert float(fitted.df[j]) == pytest.approx(df, rel=1e-9)
        assert float(fitted.noise_left[j]) == pytest.approx(left, rel=1e-6)


@pytest.mark.slow
def test_wide_leaves_correct_the_ridge_regression_along_few_features(x64):
    leaf, x, y, weight = draw(700)
    grouped = map_of(x, y, weight)
    matrix = np.asarray(grouped.matrix)
    # The last feature is the prediction of the ridge regression, and the other features are columns of x.
    assert matrix.shape == (WIDTH, narrow.WIDEST)
    assert ((matrix[:, :-1] == 1).sum(0) == 1).all() and np.count_nonzero(matrix[:, :-1]) == narrow.WIDEST - 1
    used = weight > 0
    features, target, counts = standardised(x, y, weight)
    slopes, df, left = oracles.best_ridge(features[used], target[used], counts[used])
    unit = np.sqrt(np.average((x - np.average(x, axis=0, weights=weight)) ** 2, axis=0, weights=weight))
    np.testing.assert_allclose(matrix @ grouped.slopes[:, 0], slopes / unit, atol=1e-9)
    assert float(grouped.df[0]) == pytest.approx(df)

    cost = 1 + left * (narrow.cost_of_selection(WIDTH) - 1)
    root = np.asarray(grouped.slopes[:, 0]), df, WIDTH, cost
    (coefficients, *rest), loss, chosen = oracles.shrunk_leaves(leaf, x @ matrix, y, 4, weight=weight, root=root)
    assert max(chosen[1:3]) > 0  # not the model of the root
    fitted, error = fit_with_error(leaf, x, y, sample_weight=weight)
    for ours, expected in zip(fitted, (coefficients @ matrix.T, *rest), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-7, atol=1e-7)
    assert float(error) == pytest.approx(loss)


@pytest.mark.parametrize("seed", range(2))
def test_the_selected_columns_have_the_largest_statistics(x64, seed):
    _, x, y, weight = draw(160, seed=seed)
    features, target, counts = standardised(x, y, weight)
    fitted = ridge.ridge(features, target[:, None], counts, (np.inf, *ridge.STRENGTHS))
    slopes, error = np.asarray(fitted.slopes)[:, 0], float(fitted.error[0])
    predicted = features @ slopes
    residual = counts * (target - predicted)
    statistic = lambda column, residual: (column @ residual) ** 2 / (column**2 @ residual**2)
    scores = [
        counts.sum() * slope**2 / error + statistic(column, residual * predicted) + statistic(column**2 - 1, residual)
        for column, slope in zip(features.T, slopes, strict=True)
    ]
    selected = np.flatnonzero((np.asarray(map_of(x, y, weight).matrix)[:, : narrow.WIDEST - 1] == 1).any(1))
    np.testing.assert_array_equal(selected, np.sort(np.argsort(scores)[1 - narrow.WIDEST :]))


@pytest.mark.parametrize("p", [narrow.WIDEST + 1, 200, 5000])
def test_the_cost_of_selection_is_the_mean_of_the_largest_squares(p):
    squares = np.square(stats.norm.ppf((np.arange(10**5) + 0.5) / 10**5))
    largest = np.sort(squares)[-(10**5 * narrow.WIDEST // p) :]
    assert narrow.cost_of_selection(p) == pytest.approx(largest.mean(), rel=2e-3)


def test_a_direction_along_a_single_feature_selects_this_feature():
    """The ridge regression of a table with a single feature that varies has such a direction, of either sign."""
    for slope in (0.5, -0.5):
        matrix = np.zeros((5, 3))
        matrix[[2, 4, 3], [0, 1, 2]] = 1, 1, slope
        assert narrow.selected(matrix).tolist() == [2, 3, 4]


def test_no_leaf_has_a_matrix_of_all_features():
    n, p, num_leaves = 300, 1000, 32
    shapes = jax.ShapeDtypeStruct((n,), jnp.int32), jax.ShapeDtypeStruct((n, p), jnp.float32)
    program = jax.make_jaxpr(lambda leaf, x, y: leaves.fit_shrunk(leaf, x, y, num_leaves))
    largest = max(oracles.sizes_in(program(*shapes, jax.ShapeDtypeStruct((n,), jnp.float32)).jaxpr))
    assert n * narrow.WIDEST <= largest <= 2 * p**2


@pytest.mark.parametrize("kind", ["constant", "one column", "constant y", "few rows", "equal columns", "outlier"])
def test_wide_leaves_are_always_finite(kind):
    leaf, x, y, weight = draw(160)
    match kind:
        case "constant":
            x[:] = 3
        case "one column":
            x[:, 1:] = 3
        case "constant y":
            y[:] = 0.1
        case "few rows":
            weight = (np.arange(160) < 5).astype(float)
        case "equal columns":
            x[:, 1:] = x[:, :1]
        case "outlier":
            x[0], y[0] = 1e6, 1e6
    table = leaf.astype(np.int32), *(a.astype(np.float32) for a in (x, y))
    fitted = leaves.Linear(*fit_with_error(*table, sample_weight=weight.astype(np.float32))[0])
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(fitted))
    predictions, used = np.asarray(jax.jit(leaves.Linear.at)(fitted, *table[:2])), weight > 0
    assert np.square(y - predictions)[used].mean() <= 1.1 * y[used].var() + 1e-6 * np.square(y[used]).max()


@pytest.mark.slow
def test_several_outputs_share_the_columns(x64):
    """With few outputs, the map holds the ridge regression of each; with many, their principal components."""
    leaf, x, y, weight = draw(160)
    rng = np.random.default_rng(2)
    for outputs in (3, narrow.WIDEST):
        targets = y[:, None] * rng.normal(size=outputs) + 0.1 * rng.normal(size=(160, outputs))
        features, centred, counts = standardised(x, targets, weight)
        exact = jax.jit(ridge.ridge)(features, centred, counts).slopes
        grouped = map_of(x, targets, weight)
        unit = np.sqrt(np.average((x - np.average(x, axis=0, weights=weight)) ** 2, axis=0, weights=weight))
        error = np.abs(unit[:, None] * (grouped.matrix @ grouped.slopes) - exact).max()
        assert grouped.matrix.shape == (WIDTH, narrow.WIDEST) and error <= (1e-9 if outputs == 3 else 0.05)
        (coefficients, intercept, *_), _ = fit_with_error(leaf, x, targets, sample_weight=weight)
        assert coefficients.shape == (4, WIDTH, outputs) and intercept.shape == (4, outputs)


RECIPE = jtrees.GET(depth=2, leaves="linear", starts=2, epochs=20, halving=False, precondition=0.0)


@pytest.mark.parametrize("kind", sweeps.quick(["near outlier", "far outlier", "codes"], ["codes"]))
def test_clipped_cells_of_a_wide_table_keep_the_slope_of_their_column(kind):
    """The ridge regression of all rows weighs outliers and codes as the leaves do."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(700, WIDTH))
    y = 2 * x[:, 0] + 3 * np.abs(x[:, 1]) + 3 * x[:, 2]
    is_clipped = np.arange(700) % 10 == 0 if kind == "codes" else np.arange(700) == 0
    x[is_clipped, 0] = {"near outlier": 1e3, "far outlier": 1e9, "codes": 999_999_999}[kind]
    y[is_clipped] = 8 if kind == "codes" else y[is_clipped]
    tree = jtrees.fit(RECIPE, x, y, key=jax.random.key(0)).tree
    assert tree is not None
    leaf = tree.leaf_index(x)
    slopes = np.asarray(tree.leaves.coefficients)
    without = np.setdiff1d(leaf, leaf[is_clipped] if kind == "codes" else [])
    assert len(without) and np.all(np.abs(slopes[without, 0] - 2) < 0.3)
    if kind == "codes":
        assert not slopes[np.unique(leaf[is_clipped]), 0].any()
    rest = ~is_clipped
    assert r2_score(y[rest], tree.predict(x)[rest]) > 0.75
