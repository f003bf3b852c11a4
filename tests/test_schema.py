"""Schemas: the kinds of columns, requests for other kinds, and equal kinds in every fit and file."""

from functools import partial

import jax
import numpy as np
import pandas as pd
import polars as pl
import pytest

import jtrees
from jtrees.estimators import TreeClassifier, TreeRegressor
from jtrees.tables import ColumnsWarning, TableEncoder, schema
from tests import recipes
from tests.exported_models import identity_model
from tests.polynomials import Polynomials

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),  # fits with Adam
    pytest.mark.filterwarnings("ignore::jtrees.tables.ColumnsWarning"),
    pytest.mark.filterwarnings("ignore::jtrees.report.BehindBaselineWarning"),
]

KEY = jax.random.key(0)
RECIPE = recipes.CO2
CELLS = {
    "year": list(range(2000, 2040)),
    "code": ["01", "02"] * 20,
    "price": ["1.234", "5.678"] * 20,
    "when": ["03/04/2024", "05/06/2024"] * 20,
    "flag": [0, 1] * 20,
    "id": [f"row-{i}" for i in range(40)],
}
FRAME = pd.DataFrame(CELLS)
Y = np.arange(40.0) % 7
FITS = {
    "fit": partial(jtrees.fit, RECIPE, key=KEY),
    "tune": partial(jtrees.tune, RECIPE, key=KEY, grid={"depth": [1, 2]}, validation=2),
    "sweep": partial(jtrees.sweep, RECIPE, key=KEY, validation=2),
    "regressor": lambda x, y, **options: TreeRegressor(RECIPE, **options).fit(x, y),
    "classifier": lambda x, y, **options: TreeClassifier(RECIPE, **options).fit(x, y > 3),
}


@pytest.mark.parametrize(
    ("column", "kind", "expected"),
    [
        ("year", "text", "text"),
        ("code", "number", "number"),
        ("when", "%d/%m/%Y", "date"),
        ("flag", "boolean", "boolean"),
        ("id", "drop", "drop"),
    ],
)
@pytest.mark.parametrize("library", [pd.DataFrame, pl.DataFrame])
def test_a_column_is_read_as_requested(library, column, kind, expected):
    before, after = schema(library(CELLS)).columns, schema(library(CELLS), columns={column: kind}).columns
    assert before[column] != after[column] and after[column].kind == expected and not after[column].note
    assert after == before | {column: after[column]}


def test_values_of_requested_kinds():
    kinds = {"code": "number", "price": "decimal comma", "when": "%m/%d/%Y", "id": "drop", "year": "drop"}
    encoder, features = TableEncoder.fit(FRAME, columns=kinds)
    by_name = dict(zip(encoder.feature_names, features.T, strict=True))
    assert by_name["code"].tolist()[:2] == [1, 2] and by_name["price"].tolist()[:2] == [1234, 5678]
    assert by_name["when (days since 2024-03-04)"].tolist()[:2] == [0, 63]  # 4 March to 6 May
    points = TableEncoder.fit(FRAME[["price"]], columns={"price": "decimal point"})[1]
    assert points[:2, 0].tolist() == [1.234, 5.678]
    dates = TableEncoder.fit(FRAME[["when"]], columns={"when": "%d/%m/%Y"})[1]
    assert dates[:2, 0].tolist() == [0, 63]  # 3 April to 5 June
    booleans = TableEncoder.fit(pd.DataFrame({"c": [True, False] * 20}), columns={"c": "number"})
    assert booleans[1][:2, 0].tolist() == [1, 0] and booleans[0].schema.columns["c"].kind == "number"


def test_columns_go_by_number_where_they_have_no_names():
    x = np.column_stack([np.arange(40) % 3, np.arange(40), np.where(np.arange(40) == 3, np.nan, 1.0)])
    encoder, features = TableEncoder.fit(x, columns={0: "text", 2: "drop"})
    assert encoder.feature_names == ["[x0 = 0]", "[x0 = 1]", "[x0 = 2]", "x1"]
    np.testing.assert_array_equal(encoder.transform(x), features)
    assert TableEncoder.fit(x[:, :2], columns={0: "text"})[0].feature_names == encoder.feature_names  # without gaps
    frame = pd.DataFrame({"a": np.arange(40), "mixed": [1, "q"] * 20, "lists": [[1]] * 40})
    actual = schema(frame, columns={1: "text", 2: "drop"})  # requested before they are read
    assert [column.kind for column in actual.columns.values()] == ["number", "text", "drop"]
    with pytest.raises(ValueError, match="columns must have one kind for each column, got two for 'a'"):
        schema(frame, columns={"a": "text", 0: "drop", 2: "drop", 1: "text"})
    for name in ("Infinity", "nan", "1e3", "1_000"):  # no text of a number
        assert schema(frame.rename(columns={"a": name}), columns={1: "text", 2: "drop"}).columns["lists"].kind == "drop"
    model = identity_model(np.nan_to_num(x)[:, :2], columns={0: "text"})
    for write in (jtrees.export.to_numpy, jtrees.export.to_c, jtrees.export.to_onnx):
        with pytest.raises(ValueError, match=r"levels must be in a table with names, such as a DataFrame, got .* 'x0'"):
            write(model, "not written")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"zzz": "drop"}, "columns must name columns of x, 'year', .*, got 'zzz'"),
        ({"year": "float"}, "columns must have kinds such as 'number', .*, got 'float' for 'year'"),
        ({"year": ["text"]}, r"columns must have kinds .*, got \['text'\] for 'year'"),
        ("drop", "columns must be kinds by column, or a schema, got 'drop'"),
        ({"id": "number"}, "the kind 'number' in column 'id', got 'row-0', .* and 35 more"),
        ({"when": "date"}, r"a format of dates for 'when', got .* '%d/%m/%Y' or '%m/%d/%Y'"),
        ({"year": "date"}, "the kind 'date' in column 'year', got '2000', .* and 35 more"),
        (dict.fromkeys(CELLS, "drop"), "x must have a column to learn from, got only dropped columns"),
    ],
)
def test_wrong_requests_are_refused_by_every_fit(columns, message):
    for fit in FITS.values():
        with pytest.raises(ValueError, match=message):
            fit(FRAME, Y, columns=columns)


@pytest.mark.parametrize("name", FITS)
def test_missing_texts_are_refused_with_a_schema_by_every_fit(name):
    with pytest.raises(ValueError, match=r"missing must be empty with a schema, .*, got \('-',"):
        FITS[name](FRAME, Y, columns=schema(FRAME), missing=("-",))
    with pytest.raises(ValueError, match=r"missing must be texts or numbers, such as .*, got '-'"):
        FITS[name](FRAME, Y, missing="-")
    for wrong in (True, np.nan, np.inf, None, np.timedelta64(1, "D")):
        with pytest.raises(ValueError, match="missing must be texts or numbers, such as"):
            FITS[name](FRAME, Y, missing=("-", wrong))


def test_tuned_models_and_estimators_read_columns_as_requested():
    frame = FRAME.assign(price=["-"] * 5 + CELLS["price"][5:])
    options = {"columns": {"code": "number", "id": "drop", "when": "%d/%m/%Y"}, "missing": ("-",)}
    fit = jtrees.tune(Polynomials(), frame, Y, key=KEY, grid={"depth": [1]}, validation=2, **options)
    expected = TableEncoder.fit(frame, Y, **options)[0]
    assert fit.model.encoder == TreeRegressor(Polynomials(), **options).fit(frame, Y).encoder_ == expected
    assert "[price missing]" in expected.feature_names


def test_what_a_schema_warns_of_can_be_pasted():
    with pytest.warns(ColumnsWarning) as warned:
        schema(FRAME).warn()
    messages = [str(entry.message) for entry in warned]
    assert len(messages) == 2 and "'when' (text in which day and month could be exchanged" in messages[1]
    for message in messages:
        columns = eval(message.split("columns=")[1].removesuffix(" reads them otherwise"))
        otherwise = schema(FRAME, columns=columns)
        assert all(otherwise.columns[name] != schema(FRAME).columns[name] for name in columns)


def test_a_frame_is_found_by_name_where_an_array_had_a_dropped_column():
    x = np.random.default_rng(0).normal(size=(40, 3))
    model = identity_model(x, columns={1: "drop"})
    frame = pd.DataFrame(x, columns=["x0", "x1", "x2"])
    for names in (["x2", "x1", "x0"], ["x2", "x0"]):
        np.testing.assert_array_equal(model.predict(frame[names]), model.predict(x))


def test_training_rows_that_differ_from_their_schema_are_counted():
    other = FRAME.assign(code="03", year=[None] * 5 + [2000] * 35)
    with pytest.warns(ColumnsWarning) as warned:
        jtrees.fit(Polynomials(), other, Y, key=KEY, columns=schema(FRAME, columns={"id": "drop"}))
    texts = " ".join(str(entry.message) for entry in warned)
    assert "did not have: 'code' (40 rows)" in texts and "typical values: 'year' (5 rows)" in texts
