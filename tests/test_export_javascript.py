"""JavaScript modules against the model, in Node.js: the same leaf for every row, and the same predictions."""

import json
import shutil
import subprocess

from exported_models import FITTED, fitted, of_frame, predictions
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import sweeps
from test_export import FEW, MODELS, expected_of, raw_model

from jtrees import ObliqueTree, export
from jtrees.export.program import program_of
from jtrees.leaves import Values
from jtrees.tables.parse import level_of

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="no Node.js")
ALL = "[rows.map(leaf), rows.map(predict)]"
MESSAGES = "rows.map((row) => { try { return leaf(row); } catch (error) { return error.message; } })"


def in_node(model, path, rows, result=ALL):
    """The value of an expression of ``rows``, ``leaf`` and ``predict``. ``rows`` are a list, or JavaScript."""
    export.to_javascript(model, path / "model.mjs")
    rows = rows if isinstance(rows, str) else json.dumps(rows)
    (path / "main.mjs").write_text(f"""import {{ leaf, predict }} from "./model.mjs";
    const rows = {rows};
    console.log(JSON.stringify({result}));""")
    done = subprocess.run([NODE, path / "main.mjs"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(found, leaves, expected, tolerance=1e-12):
    np.testing.assert_array_equal(np.reshape(found[0], leaves.shape), leaves)
    np.testing.assert_allclose(np.reshape(found[1], expected.shape), expected, rtol=tolerance, atol=1e-12)


@pytest.mark.parametrize("name", sweeps.quick(MODELS, FEW))
def test_leaves_and_predictions(name, tmp_path):
    model, x = MODELS[name]()
    program = program_of(model)
    check(in_node(model, tmp_path, x.tolist()), program.leaf(x), program.predict(x))


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", FITTED)
def test_a_thousand_rows(name, tmp_path):
    model, rows = fitted(name)
    if isinstance(rows, pd.DataFrame):  # the same numbers as in JSON
        listed = [{k: None if pd.isna(v) else v for k, v in row.items()} for row in rows.to_dict("records")]
    else:
        listed = rows.tolist()
    check(in_node(model, tmp_path, listed), *predictions(model, rows), tolerance=1e-9)


def test_a_raw_table_with_dates(tmp_path):
    model, frame = raw_model()
    listed = [{k: None if pd.isna(v) else v for k, v in row.items()} for row in frame.to_dict("records")]
    for row in listed:
        row["sold"] = row["sold"] and row["sold"].isoformat()
    leaves, expected = expected_of(model, frame)
    check(in_node(model, tmp_path, listed), leaves, expected)
    moments = "rows.map((row) => ({ ...row, sold: row.sold === null ? new Date(NaN) : new Date(row.sold + 'Z') }))"
    found = in_node(model, tmp_path, f"{json.dumps(listed)}.map((row) => row)", ALL.replace("rows.", f"{moments}."))
    check(found, leaves, expected)


@pytest.mark.parametrize("zone", ["Europe/Berlin", "offsets"])
def test_days_of_dates_with_a_zone(zone, tmp_path):
    """A day begins at midnight of the zone, also if its clock changes."""
    moments = pd.date_range("2023-12-31T20:00Z", periods=200, freq="47h13min")
    texts = [str(moment.tz_convert("America/New_York")) for moment in moments]
    frame = pd.DataFrame({"sold": moments.tz_convert("Europe/Berlin") if zone != "offsets" else texts})
    model = of_frame(frame, np.arange(200.0), **({} if zone != "offsets" else {"columns": {"sold": "date"}}))
    assert model.encoder.schema.columns["sold"].zone == zone
    rows = pd.DataFrame({"sold": pd.to_datetime(texts, utc=True)}) if zone != "offsets" else frame
    check(in_node(model, tmp_path, [{"sold": text} for text in texts]), *predictions(model, rows))
    if zone != "offsets":
        dates = ", ".join(f'{{ sold: new Date("{moment.isoformat()}") }}' for moment in moments)
        check(in_node(model, tmp_path, f"[{dates}]"), *predictions(model, rows))


def test_levels_have_the_text_of_python(tmp_path):
    values = [0, -0.0, 1, 1.5, 0.1, 1e-4, 1.25e-5, 1e-7, 12345678.9, 1e15, 1e16, 2.5e22, -3e-9, True, False, "1.0", "a"]
    frame = pd.DataFrame({"level": [level_of(value) for value in values for _ in range(3)]})
    model = of_frame(frame, np.arange(len(frame)), columns={"level": "text"})
    rows = [{"level": value} for value in [*values, None, "new", " NA "]]
    table = pd.DataFrame({"level": [level_of(value) for value in values] + [None, "new", " NA "]})
    check(in_node(model, tmp_path, rows), *predictions(model, table))


def test_booleans_and_missing_numbers(tmp_path):
    frame = pd.DataFrame({"new": [True, False, None] * 10, "a": [1.0, np.nan, 3.0] * 10})
    model = of_frame(frame, np.arange(30.0))
    cells = '["true", " False ", 1, 0, true, null, "NA", NaN]'
    rows = f"{cells}.map((cell) => ({{ new: cell, a: cell === true ? 2 : undefined }}))"
    new = pd.Series([True, False, True, False, True, None, None, None], dtype="boolean")
    table = pd.DataFrame({"new": new, "a": [np.nan] * 4 + [2.0] + [np.nan] * 3})
    check(in_node(model, tmp_path, rows), *predictions(model, table))


def test_what_a_module_refuses(tmp_path):
    frame = pd.DataFrame(
        {"a": np.arange(30.0), "city": ["x", "y", None] * 10, "sold": pd.date_range("2024", periods=30)}
    )
    model = of_frame(frame, np.arange(30.0))
    rows = """[
      ...[{}, { sold: "2024-02-30" }, { sold: "2024-02-01T00:00Z" }, { sold: 3 }, { a: "1" }, { a: Infinity },
      { city: {} }].map((other) => ({ a: 1, city: "x", sold: "2024-02-29T23:59:59.5", ...other })), { a: 1 }, null]"""
    assert in_node(model, tmp_path, rows, MESSAGES) == [
        0,
        'row must have a date in column "sold", got 2024-02-30',
        'row must have a date in column "sold", got 2024-02-01T00:00Z',
        'row must have a date in column "sold", got 3',
        'row must have a number in column "a", got 1',
        'row must have a number in column "a", got Infinity',
        'row must have a text in column "city", got [object Object]',
        'row must have a column "city"',
        'row must have a column "a"',
    ]
    tree = ObliqueTree(jnp.eye(1, 2), -jnp.ones(1), Values(jnp.arange(2.0)))
    assert in_node(tree, tmp_path, "[[2, 0], [2], [null, 0], [NaN, 0], {}]", MESSAGES) == [
        1,
        "row must be an array of 2 numbers, got 1",
        'row must have a number in column "x0", got null',
        'row must have a number in column "x0", got NaN',
        "row must be an array of 2 numbers, got undefined",
    ]
    with pytest.raises(ValueError, match="model must be an ObliqueTree or a Forest of them"):
        export.to_javascript(3, tmp_path / "model.js")
    assert not (tmp_path / "model.js").exists()
