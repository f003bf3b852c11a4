"""Distillation: rows that are made, teachers of all kinds, and what the result says."""

import datetime
import re

import jax
import narwhals as nw
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from sklearn.compose import make_column_transformer
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import accuracy_score, r2_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder

import jtrees
from jtrees.tables.mixing import OriginalRows

pytestmark = pytest.mark.usefixtures("standard_promotion")  # Adam; see the fixture

KEY = jax.random.key(0)
rng = np.random.default_rng(0)
X = rng.normal(size=(60, 2)).astype(np.float32)
X_OUT = rng.normal(size=(20, 2)).astype(np.float32)
Y = X[:, 0] - X[:, 1] + 0.1 * rng.normal(size=60)
LABEL = np.array(["low", "middle", "top"])[np.digitize(Y, (-1, 1))]
RECIPE = jtrees.DGT(depth=1, epochs=4, batch_size=30, widths=(), cycles=1)
NUMBERS, CLASSES = LinearRegression().fit(X, Y), LogisticRegression().fit(X, LABEL)


def made_of(x, count, seed=0):
    rows, source = OriginalRows.from_table(x).make_rows(count, np.random.default_rng(seed))
    return rows.values, source


def test_made_rows_are_mixtures_of_two_near_rows():
    x = np.column_stack([X, rng.integers(0, 3, 60), np.where(rng.random(60) < 0.3, np.nan, X[:, 0])]).astype(np.float32)
    rows_x, source = made_of(x, 240)
    assert rows_x.shape == (240, 4) and rows_x.dtype == np.float32
    assert (np.bincount(source, minlength=60) == 4).all()
    unchanged = np.isclose(rows_x, x[source], equal_nan=True)
    assert 0.4 < unchanged.mean() < 0.75  # half of the columns, and whole numbers that are equal
    for j in (2, 3):  # whole numbers, and a column with gaps
        assert np.isin(rows_x[:, j], x[:, j]).all() or set(rows_x[:, j][~np.isnan(rows_x[:, j])]) <= set(x[:, j])
    # What is not the row's own lies between its number and that of one and the same other row.
    for row, a in zip(rows_x[:, :2], x[source, :2], strict=True):
        low, high = np.minimum(a, x[:, :2]), np.maximum(a, x[:, :2])
        assert ((low <= row) & (row <= high)).all(1).any()
    again, _ = made_of(x, 240)
    np.testing.assert_array_equal(rows_x, again)
    assert not np.array_equal(rows_x, made_of(x, 240, seed=1)[0], equal_nan=True)
    rows_x, source = made_of(np.concatenate([X, 100 + X]), 400)
    assert ((rows_x[:, 0] > 50) == (source >= 60)).mean() > 0.98  # else all of eight random rows are far


N12 = np.arange(12)
COLUMNS = {
    "town": np.array(["a", "b", "c"])[N12 % 3].tolist(),
    "size": (N12 / 8).tolist(),
    "sold": (N12 % 2 == 0).tolist(),
    "day": [datetime.date(2024, 1, 1 + int(i)) for i in N12],
    "gaps": [None if i % 4 == 0 else i / 8 for i in N12.tolist()],
}
FRAMES = {
    "pandas": lambda: pd.DataFrame(COLUMNS, index=N12[::-1]).astype({"town": "category"}),
    "polars": lambda: pl.DataFrame(COLUMNS).with_columns(pl.col("town").cast(pl.Categorical)),
    "Arrow": lambda: pa.table(COLUMNS),
}


@pytest.mark.parametrize("library", FRAMES)
def test_made_rows_of_a_data_frame_have_its_columns(library):
    rows = OriginalRows.from_table(frame := FRAMES[library]())
    mixed, source = rows.make_rows(30, np.random.default_rng(0))
    assert type(mixed.values) is type(frame) and len(mixed) == len(source) == 30
    pair = [nw.from_native(table, eager_only=True) for table in (frame, mixed.values)]
    assert pair[0].schema == pair[1].schema
    for name in pair[0].columns:
        old, new = (table[name].to_list() for table in pair)
        if name == "size":
            assert not set(new) <= set(old) and min(old) <= min(new) <= max(new) <= max(old)
        else:
            assert set(map(str, new)) <= set(map(str, old))
    none, _ = rows.make_rows(0, np.random.default_rng(0))
    assert len(none) == 0 and len(rows.followed_by(none)) == 12
    assert len(rows.followed_by(mixed)) == 42 and len(rows[np.array([3, 1])]) == 2


def test_without_made_rows_it_is_a_fit_to_the_predictions():
    expected = jtrees.fit(RECIPE, X, NUMBERS.predict(X), key=KEY)
    teachers = NUMBERS, NUMBERS.predict, jtrees.fit(RECIPE, X, Y, key=KEY)
    actual = [
        jtrees.distill(candidate, RECIPE, X, key=KEY, synthetic=0, held_out=(X_OUT, None)) for candidate in teachers
    ]
    for candidate in actual[:2]:
        np.testing.assert_array_equal(candidate.predict(X_OUT), expected.predict(X_OUT))
        assert (candidate.rows, candidate.synthetic, candidate.held_out, candidate.score) == (60, 0, 20, None)
        assert candidate.fidelity == pytest.approx(r2_score(NUMBERS.predict(X_OUT), expected.predict(X_OUT)))
    assert actual[2].fidelity == pytest.approx(r2_score(teachers[2].predict(X_OUT), actual[2].predict(X_OUT)))


def test_the_scores_are_those_of_the_held_out_rows():
    y_out = X_OUT[:, 0] - X_OUT[:, 1]
    assert (
        jtrees.distill(NUMBERS, RECIPE, X, key=KEY, held_out=(X_OUT, y_out)).synthetic == 600
    )  # by default, of few rows
    result = jtrees.distill(NUMBERS, RECIPE, X, key=KEY, synthetic=1, held_out=(X_OUT, y_out))
    assert result.rows == 120 and result.synthetic == 60
    assert result.score == pytest.approx(r2_score(y_out, result.predict(X_OUT)))
    assert result.teacher_score == pytest.approx(r2_score(y_out, NUMBERS.predict(X_OUT)))
    part = jtrees.distill(
        NUMBERS, RECIPE, X, Y, key=KEY, synthetic=1, held_out=0.25, sample_weight=np.linspace(0.01, 1, 60)
    )
    assert (part.rows, part.synthetic, part.held_out) == (90, 45, 15)
    assert part.teacher_score is not None and part.teacher_score > 0.9


def test_rows_without_weight_make_no_rows():
    weight = np.where(np.arange(60) < 20, 0.0, 1.0)
    corrupt = np.where(weight[:, None] > 0, X, 1e9)
    options = {"key": KEY, "synthetic": 2, "held_out": (X_OUT, None)}
    result = jtrees.distill(NUMBERS, RECIPE, corrupt, sample_weight=weight, **options)
    assert (result.rows, result.synthetic) == (120, 80)
    expected = jtrees.distill(NUMBERS, RECIPE, X[20:], sample_weight=np.ones(40), **options)
    np.testing.assert_array_equal(result.predict(X_OUT), expected.predict(X_OUT))


@pytest.mark.slow
def test_classes_are_learnt_from_probabilities_and_named_by_the_teacher():
    y_out = np.array(["low", "middle", "top"])[np.digitize(X_OUT[:, 0] - X_OUT[:, 1], (-1, 1))]
    result = jtrees.distill(CLASSES, RECIPE, X, key=KEY, synthetic=0, held_out=(X_OUT, y_out))
    chances = CLASSES.predict_proba(X)
    expected = jtrees.fit(RECIPE, X, chances, key=KEY, task="classification")
    np.testing.assert_array_equal(result.predict(X_OUT), expected.predict(X_OUT))
    answers = CLASSES.classes_[result.predict(X_OUT).argmax(1)]
    assert result.fidelity == pytest.approx(accuracy_score(CLASSES.predict(X_OUT), answers))
    assert result.score == pytest.approx(accuracy_score(y_out, answers))
    assert result.teacher_score == pytest.approx(accuracy_score(y_out, CLASSES.predict(X_OUT)))


def test_raw_tables():
    frame = pd.DataFrame({"town": np.array(["a", "b", "c"])[np.arange(60) % 3], "size": X[:, 0]})
    y = X[:, 0] + np.arange(60) % 3
    encoded = make_column_transformer((OneHotEncoder(), ["town"]), remainder="passthrough")
    teacher = make_pipeline(encoded, LinearRegression()).fit(frame, y)
    result = jtrees.distill(teacher, RECIPE, frame, y, key=KEY, synthetic=1)
    assert isinstance(result.model, jtrees.tables.FrameModel) and result.predict(frame).shape == (60,)
    assert result.rows == 96 and result.teacher_score == pytest.approx(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"teacher": 3}, "teacher must have predict_proba or predict, or be a function of rows, got 3"),
        ({"recipe": jtrees.LatentClustering(depth=2)}, "recipe must learn the targets, got LatentClustering("),
        ({"held_out": 1.0}, "held_out must be a fraction of the rows, above 0 and below 1, or a pair (x, y), got 1.0"),
        ({"held_out": (X_OUT, Y)}, "held_out must hold 20 targets, one a row, got targets of shape (60,)"),
        ({"held_out": (X_OUT, None), "y": Y}, "y must be None if held_out is a pair (x, y)"),
        ({"held_out": 0.99}, "held_out must leave at least 2 rows to train on, got 0.99 of 60"),
        ({"teacher": lambda x: x[:3, 0]}, "teacher must return (48,) or (48, k) predictions, got (3,)"),
        ({"teacher": CLASSES, "y": np.full(60, "none")}, "y must hold the teacher's classes, 'low', 'middle', 'top'"),
    ],
)
def test_what_cannot_be_distilled_is_refused(arguments, message):
    settings = {"teacher": NUMBERS, "recipe": RECIPE, "x": X, "synthetic": 0, "key": KEY} | arguments
    with pytest.raises(ValueError, match=re.escape(message)):
        jtrees.distill(settings.pop("teacher"), settings.pop("recipe"), settings.pop("x"), **settings)


def test_several_quantiles_are_distilled_and_scored():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 2))
    task = jtrees.Regression(loss_function=jtrees.losses.Quantile((0.1, 0.9)))
    recipe = jtrees.DGT(depth=1, epochs=5, precondition=0)
    options = {"key": jax.random.key(0), "synthetic": 0, "task": task}
    result = jtrees.distill(lambda x: x[:, 0], recipe, x, x[:, 0] + rng.normal(size=100), **options)
    assert np.isfinite([result.score, result.teacher_score]).all()


def test_targets_are_checked_before_the_fit(monkeypatch):
    monkeypatch.setattr("jtrees.distillation.fit", None)
    x = np.random.default_rng(0).normal(size=(100, 2))
    with pytest.raises(ValueError, match="y must have shape"):
        jtrees.distill(lambda x: x[:, 0], jtrees.DGT(depth=1), x, x[:, :1], key=jax.random.key(0))
