"""JavaScript modules in Node.js: cells of every type, and errors. All models: ``test_export.py``."""

import json
import warnings

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from jtrees import ObliqueTree
from jtrees.leaves import Values
from jtrees.tables import ColumnsWarning
from jtrees.tables.parse import level_of
from tests.exported_models import as_json, expected_of, identity_model, node_result, raw_model
from tests.needs import needs_node

pytestmark = needs_node
MESSAGES = "rows.map((row) => { try { return leaf(row); } catch (error) { return error.message; } })"


def check(model, path, rows, table):
    """The module answers rows, which are a list or JavaScript, as the model answers a table."""
    leaf, predicted = node_result(model, rows, path)
    leaves, expected = expected_of(model, table)
    np.testing.assert_array_equal(np.reshape(leaf, leaves.shape), leaves)
    np.testing.assert_allclose(np.reshape(predicted, expected.shape), expected, rtol=1e-12, atol=1e-12)


def test_dates_of_javascript_are_dates(tmp_path):
    model, frame = raw_model()
    moments = "(row) => ({ ...row, sold: row.sold === null ? new Date(NaN) : new Date(row.sold + 'Z') })"
    check(model, tmp_path, f"{json.dumps(as_json(frame))}.map({moments})", frame)


@pytest.mark.parametrize("zone", ["Europe/Berlin", "offsets"])
def test_days_of_dates_with_a_zone(zone, tmp_path):
    """A day begins at midnight of the zone, also if its clock changes."""
    moments = pd.date_range("2023-12-31T20:00Z", periods=200, freq="47h13min")
    texts = [str(moment.tz_convert("America/New_York")) for moment in moments]
    frame = pd.DataFrame({"sold": moments.tz_convert("Europe/Berlin") if zone != "offsets" else texts})
    model = identity_model(frame, np.arange(200.0), **({} if zone != "offsets" else {"columns": {"sold": "date"}}))
    assert model.encoder.schema.columns["sold"].zone == zone
    rows = pd.DataFrame({"sold": pd.to_datetime(texts, utc=True)}) if zone != "offsets" else frame
    check(model, tmp_path, [{"sold": text} for text in texts], rows)
    if zone != "offsets":
        dates = ", ".join(f'{{ sold: new Date("{moment.isoformat()}") }}' for moment in moments)
        check(model, tmp_path, f"[{dates}]", rows)


def test_levels_have_the_text_of_python(tmp_path):
    values = [0, -0.0, 1, 1.5, 0.1, 1e-4, 1.25e-5, 1e-7, 12345678.9, 1e15, 1e16, 2.5e22, -3e-9, True, False, "1.0", "a"]
    values += [2.0**53 + 2, np.inf, -np.inf]
    frame = pd.DataFrame({"level": [level_of(value) for value in values for _ in range(20)]})
    model = identity_model(frame, np.arange(len(frame)), columns={"level": "text"})
    rows = [{"level": value} for value in [*values, None, "new", " NA "]]
    table = pd.DataFrame({"level": [level_of(value) for value in values] + [None, "new", " NA "]})
    check(model, tmp_path, rows, table)


def test_booleans_and_missing_numbers(tmp_path):
    frame = pd.DataFrame({"new": [True, False, None] * 10, "a": [1.0, np.nan, 3.0] * 10})
    model = identity_model(frame, np.arange(30.0))
    cells = '["true", " False ", 1, 0, true, null, "NA", NaN]'
    rows = f"{cells}.map((cell) => ({{ new: cell, a: cell === true ? 2 : undefined }}))"
    new = pd.Series([True, False, True, False, True, None, None, None], dtype="boolean")
    table = pd.DataFrame({"new": new, "a": [np.nan] * 4 + [2.0] + [np.nan] * 3})
    check(model, tmp_path, rows, table)


TEXTS = """large|7| 7 |-7|+7|(7)|\u22127|()|1e3|.5|5.|1e999|inf|Infinity|NaN|$1,200|$ 12|-$12|$-12|1,2|1,25|12,345.5|\
1.234,5|1.234,5 €|€|3 kg|1.2.3|true| False |1|1.0|yes|2024-02-29|2024-02-30|2024-02-29T24:00|2024-02-29 7:05|29.2.2024|\
31.4.2024|1.1.0001|Feb 3, 2024|March 3 2024|Smarch 3, 2024|03/04/2024|2024-02-29T23:59:59.5|2024-02-29T23:00Z|\
2024-02-29T23:00-0330|0001-06-01T00:00+05:00|0000-01-01|2024-02-29T10:00+24:00|2024-02-29T10:00+23:75|\
29.2.2024 12:05 AM|29.2.2024 12:05:30pm|29.2.2024 1:00 PM|29.2.2024 13:00 PM|29.2.2024 0:30AM|2024-02-29 3:00PM Z||?|\
2/29/24|2/29/00 7:05|2/29/69|1/31/68|2/29/99|Rs. 1,200|Rs 7|12 345,5|\
7:05| 14:35 |2:05 PM|12:30:15.25am|24:00|13:00 PM|7:60|7:05:60|16:9|7:05Z|\
N/A|gas|None"""


def test_a_module_reads_every_cell_as_the_model(tmp_path):
    """Also units, separators and formats of dates, and cells that do not have the kind of their column."""
    dates = pd.date_range("2024-01-03", periods=40, freq="9D")
    training = {
        "number": np.arange(40.0),
        "dollars": [f"${i},000.50" for i in range(1, 41)],
        "euros": [f"{i}.000,50 €" for i in range(1, 41)],
        "comma": [f"{i},25" for i in range(40)],
        "flag": [True, False] * 20,
        "iso": dates,
        "points": dates.strftime("%d.%m.%Y"),
        "short": dates.strftime("%m/%d/%y"),
        "rupees": [f"Rs. {i},000.50" for i in range(1, 41)],
        "french": [f"{i} 000,50" for i in range(1, 41)],
        "words": dates.strftime("%b %d, %Y"),
        "zone": dates.strftime("%Y-%m-%dT%H:%M+05:00"),
        "berlin": dates.tz_localize("Europe/Berlin"),
        "time": [f"{i % 24}:{i}" for i in range(10, 50)],
        "text": ["gas", "7", "2024-05-31", "True"] * 10,
    }
    model = identity_model(pd.DataFrame(training), np.arange(40.0))
    assert {column.kind for column in model.encoder.schema.columns.values()} == {"number", "boolean", "date", "text"}
    spaced = ["\ufeffgas", "\ufeff5", "\x1cgas\x85", "\x1f7\u3000", "\x852024-05-31\x1d"]  # the first two have no space
    cells = [*TEXTS.split("|"), *spaced, 7, -2.5, 0, 1, 3.5e38, True, False, None, [], {}, ["true"]]
    days = [cell if isinstance(cell, str) or (type(cell) in (int, float) and abs(cell) < 9) else None for cell in cells]
    times = [pd.Timedelta(day, "D") if isinstance(day, (int, float)) else day for day in days]
    objects = np.empty(len(cells), object)
    objects[:] = cells
    rows = [dict.fromkeys(training, cell) | {"time": day} for cell, day in zip(cells, days, strict=True)]
    table = pd.DataFrame(dict.fromkeys(training, objects)).assign(time=pd.Series(times, dtype=object))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ColumnsWarning)
        expected = model.predict(table)
    predicted = node_result(model, rows, tmp_path)[1]
    for name, column, actual in zip(model.encoder.feature_names, expected.T, np.transpose(predicted), strict=True):
        np.testing.assert_allclose(actual, column, rtol=1e-6, err_msg=name)


def test_what_a_module_refuses(tmp_path):
    frame = pd.DataFrame({"a": np.arange(30.0), "city": ["x", "y", None] * 10})
    rows = """[{ a: 1, city: "x" }, { a: 1 }, null]"""
    assert node_result(identity_model(frame, np.arange(30.0)), rows, tmp_path, MESSAGES) == [
        0,
        'row must have a column "city"',
        'row must have a column "a"',
    ]
    tree = ObliqueTree(jnp.eye(1, 2), -jnp.ones(1), Values(jnp.arange(2.0)))
    assert node_result(tree, '[[2, 0], [2], [null, 0], [NaN, 0], ["large", 0], {}]', tmp_path, MESSAGES) == [
        1,
        "row must be an array of 2 numbers, got 1",
        'row must have a number in column "x0", got null',
        'row must have a number in column "x0", got NaN',
        'row must have a number in column "x0", got "large"',
        "row must be an array of 2 numbers, got undefined",
    ]
