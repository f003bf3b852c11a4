"""Numbers, booleans and instants are the same levels and days in every spelling, in frames, files and exports."""

import runpy

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import jtrees
from jtrees.tables import ColumnsWarning, TableEncoder
from tests.exported_models import as_json, identity_model, node_result
from tests.needs import NODE

SPELLINGS = [
    ([2.0, 2.5, 21000.0, 1.54, 0.0, -3.0], ["2.0", "2.50", "21e3", "1.54e+00", "-0.0", "-3."]),
    ([2, 20, 300], ["2.00", "+20", "3e2"]),
    ([True, False], ["TRUE", "false"]),
    (np.array([0.1, 1e-7, 1e16]), ["0.10", "1E-7", "1.0e16"]),
]


def table(cells):
    cells = pd.Series(cells, dtype=object).infer_objects()
    return pd.DataFrame({"code": np.tile(cells, 20), "size": np.arange(20.0 * len(cells))})


def check_exports(model, table, path):
    """The exported files answer as the model."""
    expected = model.predict(table)
    jtrees.export.to_numpy(model, path / "model.py")
    file = runpy.run_path(str(path / "model.py"), run_name="__main__")  # the file tests itself, too
    np.testing.assert_allclose(file["predict"](table), expected, rtol=1e-9)
    if NODE:
        np.testing.assert_allclose(node_result(model, as_json(table), path)[1], expected, rtol=1e-9)


@pytest.mark.parametrize(("typed", "texts"), SPELLINGS)
@pytest.mark.parametrize("is_typed", [True, False])
def test_a_number_is_one_level_in_frames_and_files(typed, texts, is_typed, tmp_path):
    training, new = (table(typed), table(texts))[:: 1 if is_typed else -1]
    model = identity_model(training, np.arange(len(training)), columns={"code": "text"})
    np.testing.assert_array_equal(model.predict(new), model.predict(training))
    check_exports(model, new, tmp_path)


def test_the_levels_of_categories_of_numbers(tmp_path):
    training = table([2.0, 2.5, 4.0]).astype({"code": "category"})
    model = identity_model(training, np.arange(60))
    new = table(["2.0", "2.50", "4"])
    np.testing.assert_array_equal(model.predict(new), model.predict(training))
    check_exports(model, new, tmp_path)


@pytest.mark.filterwarnings("ignore::jtrees.tables.ColumnsWarning")
@pytest.mark.parametrize("rare", [0, 3])
def test_a_spelling_of_several_levels_or_of_none_is_new(rare, tmp_path):
    """A level in its own spelling is that level; leading zeros are those of codes."""
    levels = ["2", "2.0", "1.0", "1.00", "07", "TRUE", "true", "x"] * 6 + ["5"] * 6 + ["5.0"] * (rare or 6)
    training = pd.DataFrame({"code": levels, "size": np.arange(float(len(levels)))})
    model = identity_model(training, np.arange(len(levels)), columns={"code": "text"})
    column = model.encoder.schema.columns["code"]
    assert column.rare == (("5.0",) if rare else ())
    texts = ["2", "2.0", "2.00", "1", "7", "007", "True", "5.0", "5.00", "inf", str(2**60), "z", None]
    expected = ["2", "2.0", "2", "z", "z", "z", "z", "5.0", "5", "z", "z", "z", None]
    new = pd.DataFrame({"code": pd.Series(texts, dtype=object), "size": 1.0})
    np.testing.assert_array_equal(model.predict(new), model.predict(new.assign(code=expected)))
    check_exports(model, new, tmp_path)


def test_large_whole_numbers_are_distinct_in_every_type():
    numbers = 2**60 + np.arange(100) * 7 % 5
    y = (numbers % 5) ** 2.0
    columns = {
        "int64": numbers,
        "uint64": numbers.astype(np.uint64),
        "nullable": pd.array(numbers, "Int64"),
        "objects": numbers.astype(object),
        "text": numbers.astype(str),
    }
    tables = [pd.DataFrame({"store": column}) for column in columns.values()]
    tables += [pl.DataFrame({"store": numbers})]
    encoder, training = TableEncoder.fit(tables[-2], y)
    assert encoder.schema.columns["store"].levels == tuple(str(2**60 + i) for i in range(5))
    for data in tables:
        same, features = TableEncoder.fit(data, y)
        assert same == encoder
        np.testing.assert_array_equal(features, training)
        np.testing.assert_array_equal(same.transform(tables[-2]), encoder.transform(data))


def instants(offset, zone="UTC"):
    moments = pd.date_range("2024-01-01T20:30Z", periods=60, freq="27h")
    return moments.tz_convert(zone), [moment.isoformat() for moment in moments.tz_convert(offset)]


@pytest.mark.parametrize("offset", ["+02:00", "-03:30", "UTC"])
def test_dates_with_a_common_offset_are_instants(offset, tmp_path):
    typed, texts = instants(offset)
    local = typed.tz_convert(offset).tz_localize(None)
    tables = [pd.DataFrame({"when": values}) for values in (texts, typed, typed.astype(object), local)]
    encoder, features = TableEncoder.fit(tables[0], np.arange(60) % 7)
    assert encoder.schema.columns["when"].zone == offset
    np.testing.assert_array_equal(features, TableEncoder.fit(tables[3], np.arange(60) % 7)[1])
    expected = encoder.transform(tables[0])
    new = [*tables[1:3], pl.DataFrame({"when": typed.to_list()}), tables[1].assign(when=typed.tz_convert("Asia/Tokyo"))]
    new.append(pd.DataFrame({"when": typed.tz_convert("+05:00").astype(str)}))
    for data in new:
        np.testing.assert_array_equal(encoder.transform(data), expected)
    typed_tables = [library({"when": typed.tz_convert(offset)}) for library in (pd.DataFrame, pa.table)]
    for training in (tables[0], *typed_tables):
        assert TableEncoder.fit(training)[0].schema.columns["when"].zone == offset
    model = identity_model(tables[0], np.arange(60.0))
    check_exports(model, tables[0], tmp_path)
    if NODE:
        dates = ", ".join(f'{{ when: new Date("{moment.isoformat()}") }}' for moment in typed)
        np.testing.assert_allclose(node_result(model, f"[{dates}]", tmp_path)[1], model.predict(tables[0]), rtol=1e-9)


def test_a_time_zone_in_a_column_of_several_offsets_warns():
    typed, texts = instants("Europe/Berlin")
    texts[-1] = texts[-1].replace("+01:00", "+02:00")
    data = pd.DataFrame({"when": texts})
    encoder = TableEncoder.fit(data)[0]
    assert encoder.schema.columns["when"].zone == "offsets"
    encoder.transform(data)
    encoder.transform(pd.DataFrame({"when": typed.tz_convert("+01:00")}))  # the clock of its own offset
    with pytest.warns(ColumnsWarning, match=r"the training rows had several offsets from UTC: 'when' \(UTC\)$"):
        encoder.transform(pd.DataFrame({"when": typed}))


STAMPS = ["2021-01-01 07:00:00+00", "2021-01-01 07:00:00 UTC", "2021-01-01 07:00:00.000456 UTC", "2021-01-01 07:00Z"]
STAMPS += ["2021-01-01 07:00:00 +0000", "2021-01-01 02:00:00-05", "2021-01-01 12:30 +05:30", "2021-01-01 07:00:00 Z"]


@pytest.mark.filterwarnings("ignore::jtrees.tables.ColumnsWarning")
def test_time_stamps_of_databases_are_dates(tmp_path):
    days = pd.date_range("2021-01-01", periods=40)
    model = identity_model(pd.DataFrame({"when": days.strftime("%Y-%m-%d 07:00:00+00")}), np.arange(40.0))
    column = model.encoder.schema.columns["when"]
    assert (column.kind, column.zone) == ("date", "UTC")
    for text in STAMPS:
        suffix = text[10:]
        column = jtrees.tables.schema(pd.DataFrame({"when": days.strftime("%Y-%m-%d") + suffix})).columns["when"]
        assert (column.kind, column.reading.zoned) == ("date", True), text
    expected = model.predict(pd.DataFrame({"when": pd.to_datetime(["2021-01-01T07:00Z"] * len(STAMPS))}))
    np.testing.assert_array_equal(model.predict(new := pd.DataFrame({"when": STAMPS})), expected)
    check_exports(model, new, tmp_path)
    odd = ["2021-01-01 -05", "2021-01-01 UTC", "2021-01-01 07:00 utc", "2021-01-01 07:00 - 08", "2021-01-01 07:00+5"]
    new = pd.DataFrame({"when": [*odd, "2021-01-01 07:00  Z", "2021-01-01 07:00-2021-01-02"]})
    assert len(np.unique(model.predict(new), axis=0)) == 1
    check_exports(model, new, tmp_path)
