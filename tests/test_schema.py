"""Schemas: how columns are read, in other ways on request, and the same in every room."""

import runpy
import warnings

import jax
import numpy as np
import pandas as pd
import polars as pl
import pytest

import jtrees
from jtrees.estimators import TreeClassifier, TreeRegressor
from jtrees.tables import Schema, TableEncoder, schema

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),  # fits with Adam
    pytest.mark.filterwarnings("ignore::jtrees.tables.ColumnsWarning"),
    pytest.mark.filterwarnings("ignore::jtrees.report.BehindBaselineWarning"),
]

KEY = jax.random.key(0)
RECIPE = jtrees.CO2(depth=2, epochs=2)
CELLS = {
    "year": list(range(2000, 2040)),
    "code": ["01", "02"] * 20,
    "price": ["1.234", "5.678"] * 20,
    "when": ["03/04/2024", "05/06/2024"] * 20,
    "flag": [0, 1] * 20,
    "id": [f"row {i}" for i in range(40)],
}
FRAME = pd.DataFrame(CELLS)
Y = np.arange(40.0) % 7


@pytest.mark.parametrize(
    ("column", "kind", "expected"),
    [
        ("year", "text", "text"),
        ("code", "number", "number"),
        ("price", "text", "text"),
        ("when", "%d/%m/%Y", "date"),
        ("flag", "boolean", "boolean"),
        ("flag", "text", "text"),
        ("id", "text", "text"),
        ("id", "drop", "drop"),
    ],
)
@pytest.mark.parametrize("library", [pd.DataFrame, pl.DataFrame])
def test_a_column_is_read_as_requested(library, column, kind, expected):
    table = library(CELLS)
    before = schema(table).columns[column]
    after = schema(table, columns={column: kind}).columns[column]
    assert before.kind != expected or before != after or (column == "price" and before.kind == "number")
    assert after.kind == expected and not after.note
    others = schema(table, columns={column: kind}).columns
    assert {name: others[name] for name in CELLS if name != column} == {
        name: found for name, found in schema(table).columns.items() if name != column
    }


def test_values_of_requested_kinds():
    kinds = {
        "code": "number",
        "price": "decimal comma",
        "when": "%m/%d/%Y",
        "id": "drop",
        "year": "drop",
        "flag": "boolean",
    }
    encoder, features = TableEncoder.fit(FRAME, columns=kinds)
    by_name = dict(zip(encoder.feature_names, features.T, strict=True))
    assert by_name["code"].tolist()[:2] == [1, 2] and by_name["price"].tolist()[:2] == [1234, 5678]
    assert by_name["when (days since 2024-03-04)"].tolist()[:2] == [0, 63]  # 4 March to 6 May
    points = TableEncoder.fit(FRAME[["price"]], columns={"price": "decimal point"})[1]
    assert points[:2, 0].tolist() == [1.234, 5.678]
    dates = TableEncoder.fit(FRAME[["when"]], columns={"when": "%d/%m/%Y"})[1]
    assert dates[:2, 0].tolist() == [0, 63]  # 3 April to 5 June


def test_a_decimal_separator_holds_for_all_columns_without_a_kind():
    cells = pd.DataFrame({"a": ["1,5", "2,5"] * 20, "b": ["1.500 €", "22 €"] * 20, "c": ["1.500 €", "22 €"] * 20})
    found = schema(cells, decimal=",", columns={"c": "decimal point"})
    assert not any(column.note for name, column in found.columns.items() if name != "a")
    values = [column.values[0] for column in found.read(cells).columns.values()]
    assert values == [1.5, 1500, 1.5]
    with pytest.raises(ValueError, match="decimal must be a point or a comma, got ';'"):
        schema(cells, decimal=";")


@pytest.mark.slow
def test_columns_of_arrays_go_by_number():
    x = np.column_stack([np.arange(40) % 3, np.arange(40), np.where(np.arange(40) == 3, np.nan, 1.0)])
    encoder, features = TableEncoder.fit(x, columns={0: "text", 2: "drop"})
    assert encoder.feature_names == ["[x0 = 0]", "[x0 = 1]", "[x0 = 2]", "x1"]
    np.testing.assert_array_equal(encoder.transform(x), features)
    complete = jtrees.fit(RECIPE, x[:, :2], Y, key=KEY, columns={0: "text"})  # without missing values
    assert complete.model.encoder.feature_names == encoder.feature_names


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"zzz": "drop"}, "columns must name columns of x, 'year', .*, got 'zzz'"),
        ({"year": "float"}, "columns must have kinds such as 'number', .*, got 'float' for 'year'"),
        ({"year": 3}, "columns must have kinds such as .*, got 3 for 'year'"),
        ({"year": ["text"]}, r"columns must have kinds such as .*, got \['text'\] for 'year'"),
        ("drop", "columns must be kinds by column, or a schema, got 'drop'"),
        (
            {"id": "number"},
            "must hold values of the kind 'number' in column 'id', got the texts 'row 0', .* and 35 more",
        ),
        ({"when": "%Y-%m-%d"}, "the kind '%Y-%m-%d' in column 'when', got the texts '03/04/2024', '05/06/2024'"),
        ({"year": "date"}, "columns must have the kinds that the cells have, got numbers in column 'year', not date"),
        ({"year": "boolean"}, "got numbers in column 'year', not boolean"),
        (dict.fromkeys(CELLS, "drop"), "x must have a column to learn from, got only dropped columns"),
    ],
)
def test_wrong_requests_are_refused(columns, message):
    with pytest.raises(ValueError, match=message):
        jtrees.fit(RECIPE, FRAME, Y, key=KEY, columns=columns)
    with pytest.raises(ValueError, match=message):
        TreeRegressor(RECIPE, columns=columns).fit(FRAME, Y)


@pytest.mark.slow
def test_every_fit_takes_kinds_and_schemas():
    kinds = {"code": "number", "id": "drop", "when": "%d/%m/%Y"}
    expected = TableEncoder.fit(FRAME, Y, columns=kinds)[0].feature_names
    validation = FRAME[:10], Y[:10]
    for columns in (kinds, schema(FRAME, columns=kinds)):
        arguments = {"key": KEY, "columns": columns}
        fits = [
            jtrees.fit(RECIPE, FRAME, Y, **arguments),
            jtrees.fit(RECIPE, FRAME, Y, validation=validation, **arguments),
            jtrees.fit(RECIPE, FRAME, Y, held_out=0.25, **arguments),
            jtrees.tune(RECIPE, FRAME, Y, grid={"depth": [1, 2]}, validation=2, **arguments),
            *jtrees.sweep(RECIPE, FRAME, Y, validation=2, **arguments).fits.ravel(),
        ]
        models = [fit.model for fit in fits]
        models += [TreeRegressor(RECIPE, columns=columns, random_state=0).fit(FRAME, Y).model_]
        models += [TreeClassifier(RECIPE, columns=columns, random_state=0).fit(FRAME, Y > 3).model_]
        for model in models:
            names = [name.replace("class 1", "y").replace("True", "y") for name in model.encoder.feature_names]
            assert names == expected
            assert np.isfinite(model.predict(FRAME.drop(columns="id"))).all()
        with pytest.raises(ValueError, match=r"missing must be empty with a schema, .*, got \('-',\)"):
            jtrees.fit(RECIPE, FRAME, Y, key=KEY, columns=schema(FRAME), missing=("-",))


def test_a_schema_of_a_larger_table_knows_its_levels():
    larger = pd.concat([FRAME, FRAME.assign(code="03", year=1990)])
    fit = jtrees.fit(RECIPE, FRAME, Y, key=KEY, columns=schema(larger))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit.predict(larger)
    assert "[code = 03]" in fit.model.encoder.feature_names


@pytest.mark.slow
def test_a_schema_is_saved_and_printed(tmp_path):
    found = schema(FRAME, columns={"id": "drop"})
    assert str(found).splitlines()[:3] == [
        "column   kind    missing  cells",
        "'year'   number",
        "'code'   text             levels '01', '02'",
    ]
    fit = jtrees.fit(RECIPE, FRAME, Y, key=KEY, columns=found)
    jtrees.save(fit, tmp_path / "fit")
    loaded = jtrees.load(tmp_path / "fit").model.encoder.schema
    assert isinstance(loaded, Schema) and loaded == found and str(loaded) == str(found)


def test_what_a_fit_says_can_be_pasted():
    with pytest.warns(jtrees.tables.ColumnsWarning) as warned:
        jtrees.fit(RECIPE, FRAME, Y, key=KEY)
    messages = [str(entry.message) for entry in warned if entry.category is jtrees.tables.ColumnsWarning]
    assert len(messages) == 2  # what is left out, and what may mean something else
    for message in messages:
        columns = eval(message.split("columns=")[1].removesuffix(" reads them otherwise"))
        otherwise = schema(FRAME, columns=columns)
        assert all(otherwise.columns[name] != schema(FRAME).columns[name] for name in columns)


# --- What an attack found --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_levels_of_an_array_are_not_exported(tmp_path):
    x = np.column_stack([np.arange(40) % 4, np.arange(40)])
    model = jtrees.fit(RECIPE, x, Y, key=KEY, columns={0: "text"}).model
    for write, name in (
        (jtrees.export.to_numpy, "m.py"),
        (jtrees.export.to_c, "m.h"),
        (jtrees.export.to_onnx, "m.onnx"),
    ):
        with pytest.raises(ValueError, match=r"levels must be in a table with names, such as a DataFrame, got .* 'x0'"):
            write(model, tmp_path / name)


def test_a_rare_level_that_means_a_gap_elsewhere_is_a_level_in_a_file(tmp_path):
    frame = pd.DataFrame({"level": [None, *["a"] * 40, *["b"] * 17, *["NA"] * 3], "size": np.arange(61.0)})
    model = jtrees.fit(RECIPE, frame, 5.0 * (frame["level"] == "NA"), key=KEY).model
    jtrees.export.to_numpy(model, tmp_path / "m.py")
    exported = runpy.run_path(str(tmp_path / "m.py"))
    np.testing.assert_array_equal(exported["predict"](frame), model.predict(frame))


@pytest.mark.slow
def test_a_frame_is_found_by_name_where_an_array_had_a_dropped_column():
    x = np.random.default_rng(0).normal(size=(40, 3))
    model = jtrees.fit(RECIPE, x, Y, key=KEY, columns={1: "drop"}).model
    frame = pd.DataFrame(x, columns=["x0", "x1", "x2"])
    for names in (["x2", "x1", "x0"], ["x2", "x0"]):
        np.testing.assert_array_equal(model.predict(frame[names]), model.predict(x))


def test_training_rows_that_differ_from_their_schema_are_counted():
    other = FRAME.assign(code="03", year=[None] * 5 + [2000] * 35)
    with pytest.warns(jtrees.tables.ColumnsWarning) as warned:
        jtrees.fit(RECIPE, other, Y, key=KEY, columns=schema(FRAME, columns={"id": "drop"}))
    texts = " ".join(str(entry.message) for entry in warned)
    assert "did not have: 'code' (40 rows)" in texts and "typical values: 'year' (5 rows)" in texts


def test_columns_by_number_are_requested_before_they_are_read():
    frame = pd.DataFrame({"a": np.arange(40), "mixed": [1, "q"] * 20, "lists": [[1]] * 40})
    found = schema(frame, columns={1: "text", 2: "drop"})
    assert [column.kind for column in found.columns.values()] == ["number", "text", "drop"]
    cells = frame.assign(lists="x").to_numpy(object)
    model = TreeRegressor(RECIPE, columns={1: "text", 2: "drop"}).fit(cells, Y)
    assert model.encoder_.feature_names == ["x0", "[x1 = 1]", "[x1 = q]"] and len(model.predict(cells)) == 40
    with pytest.raises(ValueError, match="columns must have one kind for each column, got two for 'a'"):
        schema(frame, columns={"a": "text", 0: "drop", 2: "drop", 1: "text"})


def test_an_estimator_of_a_schema_takes_its_columns_by_position():
    found = schema(FRAME, columns={"id": "drop"})
    names = [name for name in CELLS if name != "id"]
    model = TreeRegressor(RECIPE, columns=found).fit(FRAME[names], Y)
    cells = FRAME[names].astype(object)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # X does not have valid feature names
        np.testing.assert_array_equal(model.predict(cells.to_numpy()), model.predict(FRAME[names]))
    with pytest.raises(ValueError, match="missing must be empty with a schema"):
        TreeRegressor(RECIPE, columns=found, missing=("-",)).fit(FRAME, Y)


def test_messages_name_what_is_wrong():
    with pytest.raises(ValueError, match=r"missing must be texts, such as .*, got None"):
        schema(FRAME, missing=None)
    with pytest.raises(ValueError, match="y must hold a target for each row, got 3"):
        jtrees.fit(RECIPE, FRAME, 3.0, key=KEY, sample_weight=np.ones(40))
    money = pd.DataFrame({"c": ["-", "$1", "$2", "$3", "$4"] * 8})
    with pytest.raises(ValueError, match=r"in column 'c', got the texts '-': with missing"):
        schema(money, columns={"c": "number"})
    with pytest.raises(ValueError, match=r"must have a format of dates for 'when', got .* '%d/%m/%Y' or '%m/%d/%Y'"):
        schema(FRAME, columns={"when": "date"})
