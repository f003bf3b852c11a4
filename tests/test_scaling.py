"""Scaling: how features and targets are scaled, and that models come back right in the user's units."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from jtrees import ObliqueTree, losses
from jtrees.data import Data, Scaling, Table
from jtrees.leaves import Linear, Values
from jtrees.tasks import Classification, Regression
from tests import oracles

N = 200
rng = np.random.default_rng(0)
X = rng.normal(size=(N, 3))
Y = np.where(X[:, 0] + X[:, 1] > 0, 2.0, -1.0) + X[:, 2] + 0.1 * rng.normal(size=N)
LABELS = (Y > 0).astype(np.int32)


def table(x=X, y=Y, weight=None, task=None):
    return Table(x, y, weight, task or (Classification(2) if y.dtype == np.int32 else Regression()))


def scaled(column, weight=None, deviations=1.0):
    """A column as training sees it."""
    x = np.asarray(column)[:, None]
    return Scaling.fit(table(x, np.arange(len(x), dtype=float), weight), deviations).transform(x)[:, 0]


@pytest.mark.parametrize("deviations", [1.0, 1 / 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_features_have_mean_zero_and_so_many_deviations(weighted, deviations):
    weight = np.random.default_rng(2).uniform(0, 1, N) if weighted else np.ones(N)
    for shift, size in ((0, 1), (1e6, 1), (-1e8, 1e-3), (1e37, 1e36), (0, 1e-20)):
        column = scaled(shift + size * X[:, 0], weight if weighted else None, deviations)
        mean = np.average(column, weights=weight)
        # A deviation of a thousandth at 1e8 has five digits in double precision.
        assert mean == pytest.approx(0, abs=1e-4)
        assert np.sqrt(np.average((column - mean) ** 2, weights=weight)) * deviations == pytest.approx(1, rel=1e-4)
        np.testing.assert_allclose(np.corrcoef(column, X[:, 0])[0, 1], 1, rtol=1e-6)


def test_columns_that_hardly_vary_are_constant():
    """Constant columns are zero whatever new samples hold, and columns too small to square are named."""
    for value in (0.0, 0.1, 1e30, -1e-40):
        scaling = Scaling.fit(table(np.full((N, 1), value)))
        assert scaling.constant.all() and not scaling.transform(np.array([[value], [3.0], [-1e30]])).any()
    outlier = np.where(np.arange(N) == 7, 1.0, 1e-35 * X[:, 1])
    x = np.column_stack([X[:, 0], np.full(N, 3.0), 1e-35 * X[:, 1], 1e-320 * X[:, 2], outlier, 1e-25 * X[:, 0]])
    with pytest.warns(UserWarning, match="x varies too little in columns 2, 3, 4, by less than 1e-30, .*: multiply it"):
        result = Scaling.fit(table(x)).transform(x)
    assert not result[:, 1:4].any()
    np.testing.assert_allclose(result[:, [0, 5]].std(0), 1, rtol=1e-5)
    for tiny in (1e-50, 1e-100):  # a row of hardly any weight may be all that varies
        weight, column = np.ones(N), np.full(N, 0.1)
        weight[7], column[7] = tiny, 3.1
        result = scaled(column, weight)
        assert np.isfinite(result).all() and np.abs(np.delete(result, 7)).max() < 1e-6


@pytest.mark.parametrize("value", [1.0, -3.0, 1e6])
def test_splits_keep_the_share_of_a_constant_column(value):
    """Among the rows of a subtree, a column such as an indicator is often constant."""
    x = np.column_stack([X[:, :2], np.full(N, value)])
    splits = ObliqueTree(jnp.asarray([[1.0, 0.5, 2.0 / value]]), jnp.asarray([-2.0]), Values(jnp.zeros(2)))
    scaling = Scaling.fit(table(x))
    scaled_splits = scaling.transform_splits(splits)
    np.testing.assert_array_equal(scaled_splits.leaf_index(scaling.transform(x)), X[:, 0] + 0.5 * X[:, 1] > 0)
    np.testing.assert_array_equal(scaling.restore_splits(scaled_splits).leaf_index(x), X[:, 0] + 0.5 * X[:, 1] > 0)
    assert scaling.origin is None  # a constant column alone needs no origin


@pytest.mark.parametrize("n", [12, 5000])
@pytest.mark.parametrize("outliers", [[-1e20], [1e12, 1e12], [1e12, -1.5e12], [1e15, 1e6], [1e20, -1e3]], ids=str)
def test_outliers_leave_the_others_their_resolution(n, outliers):
    column = np.random.default_rng(0).normal(size=n)
    plain = scaled(column)
    column[: len(outliers)] = outliers
    result = scaled(column)
    rest = slice(len(outliers), None)
    # As without them, but for how little their own two rows say of mean and deviation.
    slope, _ = np.polyfit(plain[rest], result[rest], 1)
    assert slope == pytest.approx(1, abs=0.4 if n < 100 else 0.02)
    assert len(np.unique(result[rest])) >= 0.999 * len(np.unique(plain[rest]))
    assert np.array_equal(result[: len(outliers)], 100 * np.sign(outliers).astype(np.float32))


def test_near_outliers_count_as_outliers_after_far_ones():
    column = np.random.default_rng(0).normal(size=50_000)
    plain = scaled(column)
    column[:12] = np.geomspace(150, 1e4, 12)  # no gap is wide enough for a code
    slope, _ = np.polyfit(plain[12:], scaled(column)[12:], 1)
    assert slope == pytest.approx(1, abs=0.01)


CODES = {
    "one": [999_999_999],
    "near": [99_999],
    "both sides": [-1e9, 1e9],
    "nan_to_num": np.finfo(np.float32).max * np.array([1.0, -1.0]),
    "three": [-9999, 999_999, 1e12],
}


def coded_column(plain, codes, part, seed=0):
    """A column with codes in a part of its rows, and which rows these are."""
    rng = np.random.default_rng(seed)
    coded = rng.random(len(plain)) < part
    return np.where(coded, rng.choice(codes, len(plain)), plain), coded


@pytest.mark.parametrize("part", [0.05, 0.3, 0.6])
@pytest.mark.parametrize("codes", CODES.values(), ids=CODES)
@pytest.mark.parametrize("values", ["normal", "binary", "mostly 0", "skewed"])
def test_codes_leave_the_others_their_resolution(values, codes, part):
    rng = np.random.default_rng(1)
    plain = {
        "normal": rng.normal(size=2000),
        "binary": rng.integers(0, 2, 2000),
        "mostly 0": rng.poisson(0.1, 2000),
        "skewed": np.exp(rng.normal(size=2000)),
    }[values]
    column, coded = coded_column(plain, codes, part)
    for near in (False, True):
        scaling = Scaling.fit(table(column[:, None], np.arange(2000.0)), near=near)
        result = scaling.transform(column[:, None])[:, 0]
        np.testing.assert_allclose(result[~coded], scaled(plain[~coded]), rtol=1e-6, atol=1e-6)
        # A code is beyond the others, on its side.
        farthest = np.abs(result[~coded]).max()
        expected = farthest + 1 if near else 100
        np.testing.assert_allclose(result[coded], expected * np.sign(column[coded]), rtol=1e-5)


def test_a_code_may_be_zero_or_the_most_frequent_value():
    times = 1.7e9 + np.random.default_rng(0).normal(size=1000)
    for part in (0.05, 0.7):
        column, coded = coded_column(times, [0], part)
        result = scaled(column)
        np.testing.assert_allclose(result[~coded], scaled(times[~coded]), atol=1e-4)
        assert (result[coded] == -100).all()


def test_columns_without_codes_are_scaled_as_a_whole():
    rng = np.random.default_rng(0)
    years = np.where(rng.random(2000) < 0.96, 0, rng.integers(1934, 2016, 2000))
    heavy = np.exp(2 * rng.normal(size=2000))
    columns = {
        "two values": rng.integers(0, 2, 2000) * 1e9,
        "rare value": (rng.random(2000) < 0.01) * 1e9,
        "levels": rng.choice([0, 10, 1000, 1e5], 2000),
        "years or 0": years,
        "means of folds": rng.choice([2e5, 1e5, 1.5e5], 2000, p=[0.6, 0.3, 0.1]) + 0.005 * rng.integers(0, 5, 2000),
        "counts": rng.poisson(np.exp(2 * rng.normal(size=2000))),
        "Pareto": rng.pareto(2.5, 2000),
        "heavy tail": heavy,
        "-999": np.where(rng.random(2000) < 0.05, -999, 30 * rng.normal(size=2000)),
    }
    for name, column in columns.items():
        scaling = Scaling.fit(table(column[:, None], np.arange(2000.0)), near=True)
        assert (scaling.x_most == 100).all(), name
        assert scaling.x_center[0] == pytest.approx(column.mean(), rel=1e-9), name
        assert scaling.x_unit[0] == pytest.approx(column.std(), rel=1e-9), name


def test_splits_of_huge_columns_are_finite_on_scaled_features():
    x = np.column_stack([np.where(np.arange(N) % 2, 1, -1) * np.finfo(np.float32).max, X[:, 0]])
    scaling = Scaling.fit(table(x), 1 / 3)
    for weights in ([[1.0, 0.0]], [[0.0, 1.0]], [[1.0, 1.0]]):
        raw = scaling.restore_splits(ObliqueTree(np.float32(weights), np.float32([0.1]), None))
        back = scaling.replace(x_unit=9 * scaling.x_unit).transform_splits(raw)
        for tree in (raw, back):
            assert np.isfinite(tree.weights).all() and np.isfinite(tree.bias).all()
        assert np.array_equal(
            raw.leaf_index(x), oracles.walk(np.float32(weights), np.float32([0.1]), scaling.transform(x))
        )


def test_jax_arrays_are_scaled_as_numpy_arrays_are():
    x = np.round(X * [1, 1000, 10]) + np.array([1e6, 0, 300])
    scaling = Scaling.fit(table(x))
    expected = scaling.transform(x)
    compiled = jax.jit(scaling.transform)
    for dtype in (jnp.float32, jnp.int32):
        np.testing.assert_allclose(compiled(jnp.asarray(x, dtype)), expected, rtol=1e-5, atol=1e-5)


def test_targets_are_scaled_each_by_itself():
    y = np.stack([Y, 1e8 + 5 * Y], axis=1)
    scaling = Scaling.fit(table(y=y))
    result = scaling.transform_y(y)
    assert result.dtype == np.float32
    np.testing.assert_allclose([result.min(0), result.max(0)], [[0, 0], [1, 1]], atol=1e-7)
    np.testing.assert_allclose(result[:, 0], result[:, 1], atol=1e-7)
    assert scaling.inverse(result).dtype == np.float64
    np.testing.assert_allclose(scaling.inverse(result), y, atol=1e-6)
    np.testing.assert_allclose(jax.jit(scaling.inverse)(result), y, rtol=1e-7, atol=1e-6)
    assert jtrees.Regression(2).loss_unit(scaling.y_unit) == 1  # units differ: losses stay scaled
    assert Regression().loss_unit(Scaling.fit(table(y=3 * Y)).y_unit) == pytest.approx(9 * np.ptp(Y) ** 2)
    assert Classification(3).loss_unit(Scaling.fit(table(y=LABELS)).y_unit) == 1


def random_tree(kind, seed=4):
    """A tree on scaled features, of depth 2."""
    rng = np.random.default_rng(seed)
    leaves = {
        "constant": Values(rng.uniform(size=4)),
        "two outputs": Values(rng.uniform(size=(4, 2))),
        "linear": Linear(rng.normal(size=(4, 3)), rng.normal(size=4), -np.ones(4), 2 * np.ones(4)),
        "frequency": Values(rng.dirichlet(np.ones(2), 4), losses.Frequencies()),
    }[kind]
    tree = ObliqueTree(rng.normal(size=(3, 3)), rng.normal(size=3), leaves)
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), tree)


def margin(tree, x):
    """How far each sample is from the nearest split."""
    weights, bias = (np.asarray(a, np.float64) for a in (tree.weights, tree.bias))
    return np.abs(weights @ x.T + bias[:, None]).min(0)


@pytest.mark.parametrize("kind", ["constant", "two outputs", "linear", "frequency"])
@pytest.mark.parametrize("shift", [[0, 0, 0], [1e6, -1e8, 0], [1e12, 0, -1e11]], ids=["near", "far", "farther"])
def test_a_tree_predicts_the_same_in_the_users_units(shift, kind):
    x = X * [1, 100, 1] + shift
    y = {"two outputs": np.stack([Y, 1e8 - Y], 1), "frequency": LABELS}.get(kind, Y + 1e9)
    scaling, tree = Scaling.fit(table(x, y), 1 / 3), random_tree(kind)
    raw = scaling.restore(tree)
    x_scaled = scaling.transform(x)
    closest = margin(tree, x_scaled)
    near = closest < 1e-3  # so near to a split that rounding may decide
    predictions = np.asarray(tree.predict(x_scaled), np.float64)
    expected = predictions if kind == "frequency" else scaling.y_low + scaling.y_unit * predictions
    # Scaled targets and leaves are float32. So is the origin: at 1e12 it is up to 32768 from the centre, and what is
    # counted from it is held to 0.004.
    tolerance = 1e-6 if kind == "frequency" else 1e-5 * np.max(scaling.y_unit) + 1e-6
    if shift[0] == 1e12:
        near, tolerance = closest < 0.01, 0.05 if kind == "linear" else tolerance
    assert near.mean() < 0.05
    np.testing.assert_allclose(raw.predict(x)[~near], expected[~near], rtol=1e-12, atol=tolerance)
    assert np.array_equal(raw.leaf_index(x)[~near], oracles.walk(tree.weights, tree.bias, x_scaled)[~near])
    # And back: the same splits on scaled features.
    again = scaling.transform_splits(raw)
    np.testing.assert_allclose(again.weights, tree.weights, rtol=1e-5)
    np.testing.assert_allclose(again.bias, tree.bias, rtol=1e-4, atol=1e-3 if shift[0] == 1e12 else 1e-4)
    # There is an origin only where it is needed, and equal leaves are merged.
    assert (raw.origin is None) == (kind == "frequency" and not any(shift))
    if kind == "constant":
        merged = scaling.restore(tree.replace(leaves=Values(jnp.asarray([0.5, 0.5, 0.1, 0.5]))))
        assert merged.splits.tolist() == [True, False, True]


def test_a_split_on_another_trees_origin_is_the_same_split():
    rows = table(X + np.array([1e6, 0, 0]))
    scaling, tree = Scaling.fit(rows), random_tree("constant")
    part = Scaling.fit(rows.rows(X[:, 0] > 0.5))  # another centre
    assert part.origin.x[0] != scaling.origin.x[0]
    raw = part.replace(origin=scaling.origin).restore_splits(tree)
    assert raw.origin is scaling.origin
    x_scaled = part.transform(rows.x)
    clear = margin(tree, x_scaled) > 1e-3
    assert np.array_equal(raw.leaf_index(rows.x)[clear], oracles.walk(tree.weights, tree.bias, x_scaled)[clear])


@pytest.mark.parametrize("weighted", [False, True])
def test_leaves_are_set_from_the_routing_of_raw_samples(weighted):
    x, y = X + np.array([1e6, 0, 0]), Y + 1e7
    weight = np.random.default_rng(2).uniform(0.1, 1, N) if weighted else None
    rows = table(x, y, weight)
    scaling = Scaling.fit(rows)
    data = Data(rows, None, scaling, scaling.batch(rows))
    splits = scaling.restore_splits(random_tree("constant"))
    tree, _ = data.refit(splits, "constant")
    leaf = splits.leaf_index(x)
    means = oracles.leaf_means(leaf, y, 4, np.nan, weight)
    np.testing.assert_allclose(tree.predict(x), means[leaf], rtol=1e-15)
    assert data.loss(tree) == pytest.approx(np.average((y - means[leaf]) ** 2, weights=weight), rel=1e-12)
    held_out = table(x[:20], y[:20] + 3)
    error = np.square(tree.predict(x[:20]) - held_out.y).mean()
    assert data._replace(validation=held_out).loss(tree) == pytest.approx(error, rel=1e-6)


@pytest.mark.parametrize(("far", "is_linear"), [(1e3, True), (1e3, False), (1e6, False), (1e8, False)])
def test_an_outlier_does_not_change_the_slopes_of_linear_leaves(far, is_linear):
    """Training clips features at 100 deviations, and a prediction does not. An outlier may follow the line, or not."""
    x = X.copy()
    x[0, 0] = far
    y = 3 * x[:, 0] + x[:, 1]
    y[0] = y[0] if is_linear else 1.0
    training = table(x, y)
    scaling = Scaling.fit(training)
    batch = scaling.batch(training)
    assert batch.x.max() == scaling.x_most
    splits = ObliqueTree(np.zeros((1, 3), np.float32), np.float32([-1]), None)
    tree, _ = Data(training, None, scaling, batch).refit(splits, "linear")
    rms = np.sqrt(np.mean((tree.predict(x) - y)[1:] ** 2))
    assert rms < 0.1
    if is_linear:  # the range of the targets includes that of the outlier
        assert tree.predict(x[:1])[0] == pytest.approx(y[0], rel=0.11)


def test_linear_leaves_have_no_slope_of_a_code():
    x, coded = X.copy(), np.arange(N) % 10 == 0
    x[coded, 0] = 999_999_999
    y = np.where(coded, 1.0, 3 * x[:, 0]) + x[:, 1]
    training = table(x, y)
    scaling = Scaling.fit(training)
    data = Data(training, None, scaling, scaling.batch(training))
    # Codes have a leaf, or they share a leaf.
    alone = ObliqueTree(np.float32([[1, 0, 0]]), np.float32([-1e6]), None)
    tree, _ = data.refit(alone, "linear")
    assert np.sqrt(np.mean((tree.predict(x) - y) ** 2)) < 0.1
    shared = ObliqueTree(np.zeros((1, 3), np.float32), np.float32([-1]), None)
    tree, _ = data.refit(shared, "linear")
    assert np.mean((tree.predict(x) - y) ** 2) < y.var() and np.asarray(tree.leaves.coefficients)[0, 0] == 0
