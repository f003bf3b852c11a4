"""Tables on their way to a model: what is refused, how they are scaled and padded, and that trees come back right."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import jtrees
from jtrees import ObliqueTree
from jtrees.leaves import Constant, Frequency, Linear
from jtrees.table import Scale, Table, bucket, checked_judge, checked_table, losses_of, mean_loss
from jtrees.tasks import Classification, Regression

N = 200


def columns(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(N, 3))
    return x, np.where(x[:, 0] + x[:, 1] > 0, 2.0, -1.0) + x[:, 2] + 0.1 * rng.normal(size=N)


def scaled(column, weight=None, deviations=1.0):
    """A column as training sees it."""
    x = np.asarray(column)[:, None]
    scale = Scale.of(Table(x, np.arange(len(x), dtype=float), weight, Regression()), deviations)
    return scale.enter(x)[:, 0]


# --- The door --------------------------------------------------------------------------------------------------------


def test_a_table_to_learn_from():
    x, y = columns()
    table = checked_table(x.astype(np.float32), y.tolist(), None, "regression")
    assert (table.x.dtype, table.y.dtype, table.weight, table.task) == (np.float32, np.float64, None, Regression())
    assert np.array_equal(table.x, x.astype(np.float32)) and np.array_equal(table.y, y)
    assert checked_table(x, y[:, None], None, "regression").task == Regression(1)
    assert checked_table(x, np.stack([y, -y], axis=1), None, "regression").task == Regression(2)
    assert checked_table((x > 0).tolist(), y, None, "regression").x.dtype == np.float64
    truth = checked_table(x, y > 0, None, "regression")
    assert set(truth.y) == {0.0, 1.0}
    table = checked_table(jnp.asarray(x), np.arange(N) % 3.0, None, "classification")
    assert (table.y.dtype, table.task) == (np.int32, Classification(3))
    assert isinstance(table.x, np.ndarray)


@pytest.mark.parametrize("lies", [np.asfortranarray, lambda a: a[::-1], lambda a: a.astype(">f8")])
def test_rows_lie_one_behind_the_other(lies):
    """Sums of other orders round otherwise."""
    x, y = columns()
    y = np.stack([y, -y], axis=1)
    table = checked_table(lies(x), lies(y), None, "regression")
    for one in (table, checked_judge((lies(x), lies(y)), table)):
        assert all(a.flags.c_contiguous and a.dtype.isnative for a in (one.x, one.y))
        assert np.array_equal(one.x, lies(x)) and np.array_equal(one.y, lies(y))


def test_whole_numbers_keep_all_of_their_digits():
    y = 1_700_000_000_000 + np.arange(N)  # milliseconds: beyond float32 by far
    table = checked_table(y[:, None], y, None, "regression")
    assert np.array_equal(table.x[:, 0], y) and np.array_equal(table.y, y)
    assert table.x.dtype == table.y.dtype == np.float64


def test_rows_of_weight_zero_are_left_out_and_only_ratios_matter():
    x, y = columns()
    weight = np.arange(N) % 3 * 100.0
    table, whole = checked_table(x, y, weight, "regression"), checked_table(x, y, weight.astype(int), "regression")
    assert np.array_equal(table.x, x[weight > 0]) and np.array_equal(table.y, y[weight > 0])
    assert set(table.weight) == {0.5, 1.0}
    assert np.array_equal(whole.weight, table.weight)
    part = table.rows(slice(0, 5))
    assert len(part.x) == len(part.y) == len(part.weight) == 5
    padding = Table(x, y, weight, Regression()).real()
    assert np.array_equal(padding.x, table.x)


X, Y = columns()


@pytest.mark.parametrize(
    ("x", "y", "weight", "task", "message"),
    [
        (
            X,
            Y,
            None,
            "ranking",
            "task must be one of 'regression', 'classification', or a task such as "
            "jtrees.Classification(3), got 'ranking'",
        ),
        (X, None, None, "regression", "y must hold the targets to learn, got None"),
        (X[:, 0], Y, None, "regression", "x must have shape (n, p), got shape (200,): use x[:, None]"),
        (X, Y[1:], None, "regression", "x and y must have the same number of rows, got 200 and 199"),
        (X[:1], Y[:1], None, "regression", "x and y must hold at least two samples, got 1"),
        (X, Y[:, None, None], None, "regression", "y must have shape (n,) or (n, k), got shape (200, 1, 1)"),
        (X, 0 * Y + 0.5, None, "regression", "y must take at least two values to learn from, got 0.5 in every row"),
        (
            X,
            np.stack([Y, np.zeros(N)], 1),
            None,
            "regression",
            "at least two values to learn from, got 0.0 in every row in column 1",
        ),
        (X, Y, (Y[3] == Y) * 1.0, "regression", "x and y must hold at least two samples, got 1"),
        (X, Y.round(), (Y.round() == 1) * 1.0, "regression", "y must take at least two values to learn from, got 1.0"),
        (X, Y, Y, "regression", "sample_weight must not be negative"),
        (X, Y, Y[1:], "regression", "sample_weight must have shape (200,), one a row of x, got shape (199,)"),
        (X, Y, None, "classification", "y must hold whole numbers 0..K-1 in classification"),
        (X, np.arange(199) % 2, None, "classification", "x and y must have the same number of rows, got 200 and 199"),
        (
            jnp.ones((5, 2), jnp.complex64),
            np.arange(5),
            None,
            "regression",
            "x must be numeric, got values of type complex64",
        ),
        (np.ones((5, 2)), 1j * np.arange(5), None, "regression", "y must be numeric, got values of type complex128"),
        (np.where(X > 2, np.nan, X), Y, None, "regression", "x must be finite"),
        (np.where(X > 2, 1e39, X), Y, None, "regression", "x must be within the range of float32, got 1e+39"),
        (X, np.where(Y > 2, -1e300, Y), None, "regression", "y must be within the range of float32, got 1e+300"),
        (
            X.astype(np.longdouble) * np.longdouble(1e300),
            Y,
            None,
            "regression",
            "x must be within the range of float32",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_cannot_be_learnt_from_is_refused(x, y, weight, task, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        checked_table(x, y, weight, task)


def test_samples_to_judge_by():
    table = checked_table(X, Y, None, "regression")
    judge = checked_judge((X[:5].tolist(), Y[:5] > 0), table)
    assert (judge.x.dtype, judge.y.dtype, judge.weight, judge.task) == (np.float64, np.float64, None, Regression())
    assert len(checked_judge([X[:1], Y[:1]], table).x) == 1  # one is enough, and so is one value
    several = checked_table(X, np.stack([Y, -Y], 1), None, "regression")
    assert checked_judge((X, np.stack([Y, Y], 1)), several).y.shape == (N, 2)
    classes = checked_table(X, np.arange(N) % 3, None, "classification")
    assert checked_judge((X[:2], [0, 1]), classes).task == Classification(3)  # not every class need be there


@pytest.mark.parametrize(
    ("validation", "message"),
    [
        (0.3, "validation must be a pair (x, y), got float"),
        ((X,), "validation must be a pair (x, y), got tuple"),
        ((X, Y, Y), "validation must be a pair (x, y), got tuple"),
        ((X[:, :2], Y), "validation: x must have 3 columns, got 2"),
        ((X, Y[1:]), "validation: y must have shape (200,), got (199,)"),
        ((X, Y[:, None]), "validation: y must have shape (200,), got (200, 1)"),
        ((X, np.full(N, np.nan)), "validation: y must be finite"),
        ((np.where(X > 2, np.inf, X), Y), "validation: x must be finite"),
        # Finite in double precision, infinite in that of the trees: it would choose the epoch.
        ((np.where(X > 2, 1e39, X), Y), "validation: x must be within the range of float32, got 1e+39"),
        ((X, np.where(Y > 2, 1e39, Y)), "validation: y must be within the range of float32, got 1e+39"),
        ((X, np.full(N, "a")), "validation: y must be numeric"),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else "",
)
def test_what_cannot_be_judged_by_is_refused(validation, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        checked_judge(validation, checked_table(X, Y, None, "regression"))


def test_classes_to_judge_by_that_were_not_learnt_are_refused():
    table = checked_table(X, np.arange(N) % 2, None, "classification")
    with pytest.raises(ValueError, match=r"validation: y must hold classes 0\.\.1, got labels from 0 to 2"):
        checked_judge((X[:3], [0, 1, 2]), table)


# --- Padding ---------------------------------------------------------------------------------------------------------


def test_buckets_hold_a_sixteenth_more_at_the_most_and_neighbours_share_them():
    sizes = np.arange(2, 5000)
    buckets = np.array([bucket(int(n)) for n in sizes])
    assert (buckets >= sizes).all() and (buckets <= np.maximum(sizes * 17 / 16, 32)).all()
    assert (np.diff(buckets) >= 0).all()
    assert all(bucket(int(b)) == b for b in set(buckets))
    large = sizes[:-1] >= 64
    assert np.mean(buckets[:-1][large] == buckets[1:][large]) > 0.9
    # Training parts of a cross-validation differ by a row: they nearly always share a program.
    assert len({bucket(n - n // 5 - extra) for n in (1000,) for extra in (0, 1)}) == 1
    assert bucket(10**7 + 1) - 10**7 <= 10**7 / 16


@pytest.mark.parametrize("weighted", [False, True])
def test_a_scaled_table_is_padded_by_rows_of_weight_zero(weighted):
    weight = np.linspace(0.5, 1, 197) if weighted else None
    table = Table(X[:197], Y[:197], weight, Regression())
    unit = Scale.of(table, 1.0).unit(table)
    assert len(unit.x) == len(unit.y) == len(unit.weight) == bucket(197) > 197
    assert {unit.x.dtype, unit.y.dtype, unit.weight.dtype} == {np.dtype(np.float32)}
    np.testing.assert_allclose(unit.weight[:197], 1 if weight is None else weight, rtol=1e-6)
    assert not unit.weight[197:].any()
    assert np.array_equal(unit.x[197:], np.repeat(unit.x[196:197], len(unit.x) - 197, axis=0))
    assert len(unit.real().x) == 197
    classes = Table(X[:197], (Y[:197] > 0).astype(np.int32), weight, Classification(2))
    unit = Scale.of(classes, 1.0).unit(classes)
    assert unit.y.dtype == np.int32
    assert np.array_equal(unit.y[:197], classes.y)


# --- Scaling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deviations", [1.0, 1 / 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_features_have_mean_zero_and_so_many_deviations(weighted, deviations):
    weight = np.random.default_rng(2).uniform(0, 1, N) if weighted else np.ones(N)
    for shift, size in ((0, 1), (1e6, 1), (-1e8, 1e-3), (1e37, 1e36), (0, 1e-20)):
        unit = scaled(shift + size * X[:, 0], weight if weighted else None, deviations)
        mean = np.average(unit, weights=weight)
        # A deviation of a thousandth at 1e8 has five digits in double precision.
        assert mean == pytest.approx(0, abs=1e-4)
        assert np.sqrt(np.average((unit - mean) ** 2, weights=weight)) * deviations == pytest.approx(1, rel=1e-4)
        np.testing.assert_allclose(np.corrcoef(unit, X[:, 0])[0, 1], 1, rtol=1e-6)


@pytest.mark.parametrize("value", [0.0, 7.0, 0.1, 1e30, -1e-40])
def test_constant_columns_are_zero_whatever_new_samples_hold(value):
    x = np.full((N, 1), value)
    scale = Scale.of(Table(x, Y, None, Regression()), 1.0)
    assert scale.constant.all()
    assert not scale.enter(np.array([[value], [3.0], [-1e30]])).any()


def test_columns_too_small_to_square_are_constant():
    with pytest.warns(UserWarning, match="x varies too little in column 0, by less than 1e-30, .*: multiply it"):
        assert not scaled(1e-40 * X[:, 0]).any()
    assert scaled(1e-25 * X[:, 0]).std() == pytest.approx(1, rel=1e-5)


def test_a_column_that_varies_too_little_is_named():
    outlier = np.where(np.arange(N) == 7, 1.0, 1e-35 * X[:, 1])
    x = np.column_stack([X[:, 0], np.full(N, 3.0), 1e-35 * X[:, 1], 1e-320 * X[:, 2], outlier])
    with pytest.warns(UserWarning, match=r"x varies too little in columns 2, 3, 4, by less than 1e-30"):
        jtrees.fit(jtrees.DGT(depth=2, epochs=4, widths=()), x, Y, key=jax.random.key(0))


@pytest.mark.parametrize("n", [12, N, 5000])
@pytest.mark.parametrize(
    "outliers",
    [[1e12], [-1e20], [1e12, 1e12], [1e12, -1.5e12], [1e15, 1e6], [1e20, -1e3]],
    ids=["one", "one below", "two", "two like ones", "a far one and a near one", "a near one below"],
)
def test_outliers_leave_the_others_their_resolution(n, outliers):
    column = np.random.default_rng(0).normal(size=n)
    plain = scaled(column)
    column[: len(outliers)] = outliers
    unit = scaled(column)
    rest = slice(len(outliers), None)
    # As without them, but for how little their own two rows say of mean and deviation.
    slope, _ = np.polyfit(plain[rest], unit[rest], 1)
    assert slope == pytest.approx(1, abs=0.4 if n < 100 else 0.02)
    assert len(np.unique(unit[rest])) >= 0.999 * len(np.unique(plain[rest]))
    assert np.array_equal(unit[: len(outliers)], 100 * np.sign(outliers).astype(np.float32))


def test_no_outliers_where_they_are_all_that_varies():
    for n in (12, N, 5000):
        rare = np.zeros(n)
        rare[3] = 1
        unit = scaled(rare)
        assert len(np.unique(unit)) == 2
        assert unit[3] == pytest.approx(min(np.sqrt(n - 1), 100), rel=1e-5)  # its distance in deviations
        few = np.zeros(n)
        few[:4] = [1, 2, 3, 4]
        assert len(np.unique(scaled(few))) >= 4


def test_heavy_tails_are_no_outliers_of_many_samples():
    column = np.exp(np.random.default_rng(0).normal(size=5000))
    unit = scaled(column)
    assert unit.std() == pytest.approx(1, rel=1e-4)
    assert np.array_equal(np.argsort(unit, kind="stable"), np.argsort(column, kind="stable"))


@pytest.mark.parametrize("tiny", [1e-50, 1e-100])
@pytest.mark.parametrize("value", [0.1, 0.0, 1e6])
def test_a_row_of_hardly_any_weight_may_be_all_that_varies(tiny, value):
    weight, column = np.ones(N), np.full(N, value)
    weight[7], column[7] = tiny, value + 3
    unit = scaled(column, weight)
    assert np.isfinite(unit).all()
    assert np.abs(np.delete(unit, 7)).max() < 1e-6


def test_jax_arrays_are_scaled_as_numpy_arrays_are():
    x = np.round(X * [1, 1000, 10]) + np.array([1e6, 0, 300])
    scale = Scale.of(Table(x, Y, None, Regression()), 1.0)
    expected = scale.enter(x)
    compiled = jax.jit(scale.enter)
    for dtype in (jnp.float32, jnp.int32):
        np.testing.assert_allclose(compiled(jnp.asarray(x, dtype)), expected, rtol=1e-5, atol=1e-5)


def test_targets_are_scaled_each_by_itself():
    y = np.stack([Y, 1e8 + 5 * Y], axis=1)
    scale = Scale.of(Table(X, y, None, Regression()), 1.0)
    unit = scale.y(y)
    assert unit.dtype == np.float32
    np.testing.assert_allclose([unit.min(0), unit.max(0)], [[0, 0], [1, 1]], atol=1e-7)
    np.testing.assert_allclose(unit[:, 0], unit[:, 1], atol=1e-7)
    assert scale.leave(unit).dtype == np.float64
    np.testing.assert_allclose(scale.leave(unit), y, atol=1e-6)
    np.testing.assert_allclose(jax.jit(scale.leave)(unit), y, rtol=1e-7, atol=1e-6)
    assert scale.loss_unit == 1  # units differ: losses stay scaled
    alone = Scale.of(Table(X, 3 * Y, None, Regression()), 1.0)
    assert alone.loss_unit == pytest.approx(9 * np.ptp(Y) ** 2)
    assert Scale.of(Table(X, (Y > 0).astype(np.int32), None, Classification(2)), 1.0).loss_unit == 1


# --- Trees carried back ----------------------------------------------------------------------------------------------

SHIFTS = {"near": [0, 0, 0], "far": [1e6, -1e8, 0], "farther": [1e12, 0, -1e11]}


def drawn_tree(kind, seed=4):
    """A tree on scaled features, of depth 2."""
    rng = np.random.default_rng(seed)
    leaves = {
        "constant": Constant(rng.uniform(size=4)),
        "two outputs": Constant(rng.uniform(size=(4, 2))),
        "linear": Linear(rng.normal(size=(4, 3)), rng.normal(size=4), -np.ones(4), 2 * np.ones(4)),
        "frequency": Frequency(rng.dirichlet(np.ones(2), 4)),
    }[kind]
    tree = ObliqueTree(rng.normal(size=(3, 3)), rng.normal(size=3), leaves)
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), tree)


@pytest.mark.parametrize("kind", ["constant", "two outputs", "linear", "frequency"])
@pytest.mark.parametrize("shift", SHIFTS)
def test_a_tree_answers_the_same_in_the_users_units(shift, kind):
    x = X * [1, 100, 1] + SHIFTS[shift]
    y = {"two outputs": np.stack([Y, 1e8 - Y], 1), "frequency": (Y > 0).astype(np.int32)}.get(kind, Y + 1e9)
    table = Table(x, y, None, Classification(2) if kind == "frequency" else Regression())
    scale, tree = Scale.of(table, 1 / 3), drawn_tree(kind)
    raw = scale.from_unit(tree)
    unit = scale.enter(x)
    closest = np.abs(np.asarray(tree.weights) @ unit.T + np.asarray(tree.bias)[:, None]).min(0)
    near = closest < 1e-3  # so near to a split that rounding may decide
    inside = np.asarray(tree.predict(unit), np.float64)
    expected = inside if kind == "frequency" else scale.y_low + scale.y_unit * inside
    # Scaled targets and leaves are float32. So is the origin: at 1e12 it is up to 32768 from the centre, and what is
    # counted from it is held to 0.004.
    tolerance = 1e-6 if kind == "frequency" else 1e-5 * np.max(scale.y_unit) + 1e-6
    if shift == "farther":
        near, tolerance = closest < 0.01, 0.05 if kind == "linear" else tolerance
    assert near.mean() < 0.05
    np.testing.assert_allclose(raw.predict(x)[~near], expected[~near], rtol=1e-12, atol=tolerance)
    assert np.array_equal(raw.leaf_index(x)[~near], oracles.walk(tree.weights, tree.bias, unit)[~near])
    # And back: the same splits on scaled features.
    again = scale.splits_to_unit(raw)
    np.testing.assert_allclose(again.weights, tree.weights, rtol=1e-5)
    np.testing.assert_allclose(again.bias, tree.bias, rtol=1e-4, atol=1e-3 if shift == "farther" else 1e-4)


def test_there_is_an_origin_only_where_it_is_needed():
    scale = Scale.of(Table(X, Y, None, Regression()), 1.0)
    assert scale.origin is None
    assert scale.from_unit(drawn_tree("constant")).origin is None
    origin = Scale.of(Table(X + np.array([0, 100, 0]), Y, None, Regression()), 1.0).origin
    assert origin.x[1] == pytest.approx(100, abs=0.5) and not origin.x[[0, 2]].any()
    assert origin.y == 0
    assert Scale.of(Table(X + 100, (Y > 0).astype(np.int32), None, Classification(2)), 1.0).origin.y is None


def test_a_split_on_another_trees_origin_is_the_same_split():
    table = Table(X + np.array([1e6, 0, 0]), Y, None, Regression())
    scale, tree = Scale.of(table, 1.0), drawn_tree("constant")
    part = Scale.of(table.rows(X[:, 0] > 0.5), 1.0)  # another centre
    assert part.origin.x[0] != scale.origin.x[0]
    raw = part.splits_from_unit(tree, scale.origin)
    assert raw.origin is scale.origin
    unit = part.enter(table.x)
    clear = np.abs(np.asarray(tree.weights) @ unit.T + np.asarray(tree.bias)[:, None]).min(0) > 1e-3
    assert np.array_equal(raw.leaf_index(table.x)[clear], oracles.walk(tree.weights, tree.bias, unit)[clear])


@pytest.mark.parametrize("size", [1e37, 1e-28])
def test_splits_on_features_of_any_size_are_finite(size):
    scale = Scale.of(Table(size * X / 10, Y, None, Regression()), 1 / 3)
    raw = scale.from_unit(drawn_tree("linear"))
    assert all(np.isfinite(a).all() for a in (raw.weights, raw.bias))
    clear = np.abs(np.asarray(raw.weights, float) @ (size * X.T / 10) + np.asarray(raw.bias, float)[:, None]).min(0) > 0
    expected = oracles.walk(drawn_tree("linear").weights, drawn_tree("linear").bias, scale.enter(size * X / 10))
    assert np.mean(raw.leaf_index(size * X / 10)[clear] == expected[clear]) > 0.99


def test_merged_on_the_way_back():
    tree = drawn_tree("constant").replace(leaves=Constant(jnp.asarray([0.5, 0.5, 0.1, 0.5])))
    raw = Scale.of(Table(X, Y, None, Regression()), 1.0).from_unit(tree)
    assert raw.splits.tolist() == [True, False, True]


@pytest.mark.parametrize("weighted", [False, True])
def test_leaves_are_set_from_the_routing_of_raw_samples(weighted):
    x, y = X + np.array([1e6, 0, 0]), Y + 1e7
    weight = np.random.default_rng(2).uniform(0.1, 1, N) if weighted else None
    table = Table(x, y, weight, Regression())
    scale = Scale.of(table, 1.0)
    splits = scale.splits_from_unit(drawn_tree("constant"))
    tree, criterion = scale.refitted(splits, Constant(jnp.zeros(4)), table)
    leaf = splits.leaf_index(x)
    means = oracles.leaf_means(leaf, y, 4, np.nan, weight)
    np.testing.assert_allclose(tree.predict(x), means[leaf], rtol=0, atol=1e-5)
    assert criterion == pytest.approx(np.average((y - means[leaf]) ** 2, weights=weight), rel=1e-5)
    assert mean_loss(tree, table, scale) == pytest.approx(criterion, rel=1e-5)


def test_losses_of_a_model_on_each_sample():
    class Model:
        def __init__(self, answers):
            self.predict = lambda x: answers

    rng = np.random.default_rng(0)
    scale = Scale.of(Table(X, Y, None, Regression()), 1.0)
    np.testing.assert_allclose(losses_of(Model(Y + 2), Table(X, Y, None, Regression()), scale), 4.0)
    y = np.stack([Y, 10 * Y], 1)
    several = Table(X, y, None, Regression())
    found = losses_of(Model(y + np.array([1, 10])), several, Scale.of(several, 1.0))
    np.testing.assert_allclose(found, 1 / np.ptp(Y) ** 2)
    labels, frequencies = rng.integers(0, 3, N), rng.dirichlet(np.ones(3), N)
    labels[0], frequencies[0] = 0, [0, 0.5, 0.5]
    expected = -np.log(np.maximum(frequencies[np.arange(N), labels], np.finfo(np.float32).tiny))
    np.testing.assert_allclose(
        losses_of(Model(frequencies), Table(X, labels, None, Classification(3)), scale), expected
    )
    weight = rng.uniform(size=N)
    weighted = mean_loss(Model(frequencies), Table(X, labels, weight, Classification(3)), scale)
    assert weighted == pytest.approx(np.average(expected, weights=weight))


# --- Whole fits ------------------------------------------------------------------------------------------------------

RECIPE = jtrees.GET(depth=2, starts=2, epochs=100)  # one program for all of these: shapes are equal


@pytest.fixture(scope="module")
def plain_fit():
    with jax.numpy_dtype_promotion("standard"):
        return jtrees.fit(RECIPE, X, Y, key=jax.random.key(0))


TIME = 1_700_000_000_000_000_000  # nanoseconds


@pytest.mark.parametrize(
    ("x", "y", "unit"),
    [
        (X + 1e6, Y, 1),
        (X + 1e8, Y, 1),
        (X * [1, 1e3, 1e-3] + [1e8, -1e6, 5], Y - 1e8, 1),
        (X, Y + 1e8, 1),
        (X, TIME + (1e9 * Y).astype(np.int64), 1e9),
        (X, TIME // 10**9 + (100 * Y).astype(np.int64), 100),
        ((TIME + 1e9 * X).astype(np.int64), Y, 1),
        (1e36 * X, Y, 1),
    ],
    ids=["x + 1e6", "x + 1e8", "all far", "y + 1e8", "y in ns", "y in s", "x in ns", "x of 1e36"],
)
def test_a_fit_is_as_good_wherever_the_data_lie(standard_promotion, plain_fit, x, y, unit):
    fit = jtrees.fit(RECIPE, x, y, key=jax.random.key(0))
    # Where digits of x or y itself are rounded away (times in 256 ns), another start may win; losses stay alike.
    assert fit.loss / unit**2 == pytest.approx(plain_fit.loss, rel=1e-2)
    zero = y.mean() if y.dtype.kind == "f" else y.min()  # differences in whole numbers are exact
    answers, targets = fit.model.predict(x).astype(np.longdouble) - zero, (y - zero).astype(np.longdouble)
    assert float(np.mean((answers - targets) ** 2)) == pytest.approx(fit.loss, rel=1e-3)


def test_an_outlier_in_a_column_costs_a_fit_hardly_anything(standard_promotion, plain_fit):
    x = X.copy()
    x[0, 2], x[1, 0] = 1e12, -1e9
    fit = jtrees.fit(RECIPE, x, Y, key=jax.random.key(0))
    assert fit.loss <= 1.1 * plain_fit.loss
    assert plain_fit.report["chosen"] >= 0 and fit.report["chosen"] >= 0  # no falling back to CART


def test_a_row_of_hardly_any_weight_is_no_reason_to_fail(standard_promotion, plain_fit):
    x, weight = X.copy(), np.ones(N)
    x[:, 1], weight[5] = 0, 1e-50
    x[5, 1] = 2
    without = jtrees.fit(RECIPE, x, Y, sample_weight=weight, key=jax.random.key(0))
    assert np.isfinite(without.loss)
    assert np.isfinite(without.model.predict(x)).all()


def test_truth_values_are_targets_too(standard_promotion):
    fit = jtrees.fit(RECIPE, X, Y > 0, key=jax.random.key(0))
    assert fit.loss < 0.5 * np.var(Y > 0)
