"""Tables in the user's units: what is refused, how rows are kept, and to how many they are padded."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from jtrees.data import Scaling, Table
from jtrees.data.table import bucket, without_padding
from jtrees.tables import checked_table
from jtrees.tables.dataset import held_out_table
from jtrees.tasks import Classification, Regression

N = 200
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(N, 3)), rng.normal(size=N)
TWO = np.stack([Y, -Y], axis=1)


def table(x=X, y=Y, weight=None, task="regression"):
    return checked_table(x, y, weight, task)


# --- Tables to train on ----------------------------------------------------------------------------------------------


def test_a_table_to_train_on():
    checked = table(X.astype(np.float32), Y.tolist())
    assert (checked.x.dtype, checked.y.dtype) == (np.float32, np.float64)
    assert (checked.weight, checked.task) == (None, Regression())
    assert np.array_equal(checked.x, X.astype(np.float32)) and np.array_equal(checked.y, Y)
    assert table(y=Y[:, None]).task == Regression(1)
    assert table(y=TWO).task == Regression(2)
    assert table((X > 0).tolist()).x.dtype == np.float64
    assert set(table(y=Y > 0).y) == {0.0, 1.0}
    classes = table(jnp.asarray(X), np.arange(N) % 3.0, task="classification")
    assert (classes.y.dtype, classes.task) == (np.int32, Classification(3))
    assert isinstance(classes.x, np.ndarray)


def test_rows_of_weight_zero_are_left_out_and_only_ratios_matter():
    weight = np.arange(N) % 3 * 100.0
    checked, rounded = table(weight=weight), table(weight=weight.astype(int))
    assert np.array_equal(checked.x, X[weight > 0]) and np.array_equal(checked.y, Y[weight > 0])
    assert set(checked.weight / checked.weight.max()) == {0.5, 1.0}
    assert checked.weight.mean() == pytest.approx(1)
    assert np.array_equal(rounded.weight, checked.weight)
    for factor in (1e-60, 1e-3, 1e60):
        np.testing.assert_allclose(table(weight=factor * weight).weight, checked.weight, rtol=1e-15)
    part = checked.rows(slice(0, 5))
    assert len(part.x) == len(part.y) == len(part.weight) == 5


# What is refused of each argument by itself: test_validation.
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "ranking"}, "task must be one of 'regression', 'classification', or a task"),
        ({"y": None}, "y must hold the targets to learn, got None"),
        ({"weight": (Y[3] == Y) * 1.0}, "x and y must hold at least 2 samples, got 1"),
        ({"y": Y.round(), "weight": (Y.round() == 1) * 1.0}, "y must take at least two values to learn from, got 1.0"),
        ({"y": np.arange(199) % 2, "task": "classification"}, "x and y must have the same number of rows"),
        ({"x": np.where(X > 2, 1e39, X)}, "x must be within the range of float32, got 1e+39"),
        ({"y": np.where(Y > 2, -1e300, Y)}, "y must be within the range of float32, got 1e+300"),
        ({"x": X.astype(np.longdouble) * np.longdouble(1e300)}, "x must be within the range of float32"),
    ],
)
def test_bad_tables_are_refused(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        table(**change)


# --- Validation sets -------------------------------------------------------------------------------------------------


def test_a_validation_set():
    trained = table()
    with pytest.warns(jtrees.tables.ColumnsWarning, match=r"typical values: 'x1' \(1 row\)"):
        gaps = held_out_table([[1.0, np.nan, 2.0]], [0.0], trained)
    assert gaps.x.tolist() == [[1, np.median(X[:, 1]), 2]]
    held_out = held_out_table(X[:5].tolist(), Y[:5] > 0, trained)
    assert held_out.x.dtype == held_out.y.dtype == np.float64
    assert (held_out.weight, held_out.task) == (None, Regression())
    assert len(held_out_table(X[:1], Y[:1], trained).x) == 1  # one row is enough, and so is one value
    assert held_out_table(X, TWO, table(y=TWO)).y.shape == (N, 2)
    classes = table(y=np.arange(N) % 3, task="classification")
    assert held_out_table(X[:2], [0, 1], classes).task == Classification(3)  # not every class need be there


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X[:, :2], Y, "x must have 3 columns, got 2"),
        (X, None, "y must hold the targets to evaluate on, got None"),
        (X, Y[1:], "y must have shape (200,), got (199,)"),
        (X, Y[:, None], "y must have shape (200,), got (200, 1)"),
        # Finite in double precision, infinite in that of the trees: it would choose the epoch.
        (np.where(X > 2, 1e39, X), Y, "x must be within the range of float32, got 1e+39"),
        (X, np.where(Y > 2, 1e39, Y), "y must be within the range of float32, got 1e+39"),
    ],
)
def test_bad_validation_sets_are_refused(x, y, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        held_out_table(x, y, table())


@pytest.mark.parametrize("labels", [[0, 1, 2], [-1, 0, 1], [0.5] * 3, ["a"] * 3])
def test_unknown_classes_in_a_validation_set_are_refused(labels):
    trained = table(y=np.arange(N) % 2, task="classification")
    with pytest.raises(ValueError, match=r"^y must hold .*np.searchsorted"):
        held_out_table(X[:3], labels, trained)


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
def test_a_batch_is_padded_by_rows_of_weight_zero(weighted):
    weight = np.linspace(0.5, 1, 197) if weighted else None
    rows = Table(X[:197], Y[:197], weight, Regression())
    batch = Scaling.fit(rows).batch(rows)
    assert len(batch.x) == len(batch.y) == len(batch.weight) == bucket(197) > 197
    assert {batch.x.dtype, batch.y.dtype, batch.weight.dtype} == {np.dtype(np.float32)}
    np.testing.assert_allclose(batch.weight[:197], 1 if weight is None else weight, rtol=1e-6)
    assert not batch.weight[197:].any()
    assert np.array_equal(batch.x[197:], np.repeat(batch.x[196:197], len(batch.x) - 197, axis=0))
    assert all(np.array_equal(a, b[:197]) for a, b in zip(without_padding(batch), batch, strict=True))
    classes = Table(X[:197], (Y[:197] > 0).astype(np.int32), weight, Classification(2))
    batch = Scaling.fit(classes).batch(classes)
    assert batch.y.dtype == np.int32
    assert np.array_equal(batch.y[:197], classes.y)
