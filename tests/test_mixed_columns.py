"""Columns of mixed cells: one rule for numbers, dates and text, and no cell that ends a fit or a prediction."""

import datetime
from decimal import Decimal
import itertools
import runpy
import string
import time
import zoneinfo

from hypothesis import given, settings, strategies as st
import numpy as np
import pandas as pd
import pytest

import jtrees
from jtrees.tables import ColumnsWarning, TableEncoder, schema
from jtrees.tables.inference import read_as
from tests.exported_models import identity_model

EAST = datetime.timezone(datetime.timedelta(hours=5))
CELLS = st.one_of(
    st.sampled_from([None, np.nan, pd.NA, pd.NaT, True, np.False_, 10**400, 2**60, np.float32(0.1)]),
    st.sampled_from([Decimal("1.50"), Decimal("Infinity"), Decimal("NaN"), Decimal("sNaN")]),
    st.sampled_from(["", "?", "N/A", "-", "7", "1,5", "$1,200", "12%", "true", "07", "inf", "3+", "2100 - 2850"]),
    st.sampled_from(["2024-05-31", "31/05/2024", "03/04/2024", "2024-05-31T23:30Z", "May 31, 2024", "\0", "gas"]),
    st.sampled_from([b"bytes", [1, 2], {"a": 1}, (1, 2), {3}, 1j, np.array([1, 2]), pd.Period("2024-05"), object]),
    st.sampled_from([np.datetime64("2024-05-31"), np.timedelta64(3, "h"), pd.Timestamp("2024-05-31", tz=EAST), "7:05"]),
    *(st.integers(-9, 9), st.floats(), st.text(max_size=3), st.dates(), st.datetimes(), st.times(), st.timedeltas()),
    st.datetimes(timezones=st.just(EAST)),
)
COLUMNS = st.lists(CELLS, min_size=2, max_size=25)


def objects(cells):
    column = np.empty(len(cells), object)
    column[:] = cells
    return column


def frame(cells):
    """A table of a column of cells, and of a column of numbers, so that there is something to learn from."""
    return pd.DataFrame({"c": objects(cells), "size": np.arange(len(cells)) ** 2.0})


@given(COLUMNS, COLUMNS, st.sampled_from([None, "text", "drop"]))
@settings(max_examples=60, deadline=None)
@pytest.mark.filterwarnings("ignore::jtrees.tables.ColumnsWarning")
def test_no_mix_of_cells_ends_a_fit_or_a_prediction(training, new, kind):
    columns = {"c": kind} if kind else None
    encoder, features = TableEncoder.fit(frame(training), np.arange(len(training)) % 3, columns=columns)
    assert np.isfinite(features).all() and str(encoder) and str(encoder.schema)
    together = encoder.transform(frame(new))
    assert np.isfinite(together).all()
    alone = [encoder.transform(frame(new)[i : i + 1])[0] for i in range(len(new))]
    np.testing.assert_array_equal(together, alone)


@given(COLUMNS)
@settings(max_examples=30, deadline=None)
@pytest.mark.filterwarnings("ignore::jtrees.tables.ColumnsWarning")
def test_an_exported_file_reads_every_cell_as_the_model_does(tmp_path_factory, new):
    day = [datetime.date(2024, 1, 1 + i % 28) for i in range(40)]
    training = {
        "number": np.arange(40.0),
        "money": [f"${i},000" for i in range(1, 41)],
        "flag": [True, False] * 20,
        "day": day,
        "moment": [datetime.datetime(2024, 1, 1 + i % 28, tzinfo=EAST) for i in range(40)],
        "time": pd.to_timedelta(np.arange(40), "h"),
        "text": ["gas", "7", "2024-05-31", "True"] * 10,
    }
    model = identity_model(pd.DataFrame(training))
    file = tmp_path_factory.mktemp("model") / "model.py"
    jtrees.export.to_numpy(model, file)
    rows = pd.DataFrame({name: objects(new) for name in training})
    np.testing.assert_allclose(runpy.run_path(str(file))["predict"](rows), model.predict(rows), rtol=1e-12, atol=1e-9)


NUMBERS = [str(i) for i in range(38)]
HOURS = [datetime.timedelta(hours=i) for i in range(38)]


@pytest.mark.parametrize(
    ("cells", "kind", "note", "otherwise"),
    [
        ([*NUMBERS, "-", "n.a."], "number", "'-', 'n.a.' count as missing values", "text"),
        ([*NUMBERS, *"abcd"], "number", "'a', 'b', 'c' and 1 more count as missing values", "text"),
        ([*NUMBERS[:20], *["unknown"] * 80], "number", "'unknown' counts as a missing value", "text"),
        ([f"2024-01-{i % 28 + 1:02}" for i in range(38)] + ["soon"], "date", "'soon' counts as", "text"),
        ([f"2024-01-{i % 28 + 1:02}" for i in range(38)] + ["03/04/2024"], "date", "'03/04/2024' counts as", "text"),
        ([f"${i},000.50" for i in range(1, 39)] + ["secret"], "number", "'secret' counts as a missing value", "text"),
        ([f"{i},5" for i in range(40)], "number", "'0,5' is read as 0.5, with a decimal comma", "text"),
        ([f"{i},5" for i in range(40)] + ["-"], "number", "'-' counts as a missing value", "text"),
        (["0", "1", "2"] * 20 + ["3+"], "text", "mostly numbers, and '3+'", "number"),
        ([*map(str, range(70)), *(f"PC {i}" for i in range(30))], "drop", "numbers with and without 'PC'", "number"),
        (["01", "02", "2A"] * 10, "text", "", ""),
        (["gas", "oil", "3"] * 10, "text", "", ""),
        ([*range(38), "-"], "number", "'-' counts as a missing value", "text"),
        ([*map(Decimal, range(38)), *map(Decimal, ("NaN", "-NaN", "sNaN", "-sNaN"))], "number", "", ""),
        ([*np.arange(38.0), np.inf], "number", "'inf' counts as a missing value", ""),
        ([*np.arange(38.0), 1e39, 10**400], "number", "'1e+39', ", ""),
        ([datetime.date(2024, 1, 1 + i % 28) for i in range(38)] + ["soon"], "date", "'soon' counts as", "text"),
        ([*HOURS, "x"], "number", "'x' counts as a missing value", "text"),
        ([*HOURS, 5, "3 hours"], "number", "'5', '3 hours' count as missing values", "text"),
        ([*[np.timedelta64(i, "h") for i in range(38)], "x"], "number", "'x' counts as a missing value", "text"),
        ([*[datetime.time(i % 24, i) for i in range(38)], "x"], "number", "'x' counts as a missing value", "text"),
        ([*[f"{i % 24}:{i:02}" for i in range(38)], "-"], "number", "'-' counts as a missing value", "text"),
        ([datetime.time(7), "7:05:30", "2:05 PM"] * 10, "number", "", ""),
        (["16:9", "4:3", "16:10"] * 10, "text", "", ""),
        (["24:00", "13:00 PM", "7:60"] * 10, "text", "", ""),
        ([*HOURS[:3] * 9, "x"], "text", "mostly durations, and 'x'", "number"),
        ([*HOURS[:12], *range(12)] * 4, "text", "", ""),
        ([*range(6), *[datetime.date(2024, 1, 1 + i) for i in range(6)]] * 4, "text", "", ""),
    ],
)
def test_the_rule_of_mixed_cells(cells, kind, note, otherwise):
    actual = schema(frame(cells)).columns["c"]
    assert (actual.kind, actual.otherwise) == (kind, otherwise) and actual.note.startswith(note)
    assert bool(actual.note) == bool(note)
    assert not otherwise or schema(frame(cells), columns={"c": otherwise}).columns["c"].kind == otherwise


DAYS = [datetime.date(2024, 1, 1 + i % 28) for i in range(50)]
MOMENTS = [datetime.datetime(2024, 1, 1 + i % 28, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")) for i in range(50)]


@pytest.mark.parametrize(
    ("cells", "other", "zone"),
    [
        (DAYS, MOMENTS[0], None),
        ([np.datetime64(day) for day in DAYS], MOMENTS[0], None),
        ([moment.replace(tzinfo=None) for moment in MOMENTS], MOMENTS[0], None),
        (MOMENTS, DAYS[0], "Europe/Berlin"),
        (MOMENTS, np.datetime64("2024-01-01"), "Europe/Berlin"),
        (MOMENTS, MOMENTS[0].replace(tzinfo=None), "Europe/Berlin"),
    ],
)
def test_most_dates_decide_whether_a_column_has_a_time_zone(cells, other, zone):
    encoder, training = TableEncoder.fit(frame([*cells, other]))
    column = encoder.schema.columns["c"]
    assert (column.kind, column.zone, column.missing) == ("date", zone, 1)
    assert column.note.endswith("counts as a missing value")
    np.testing.assert_array_equal(training[:50, 0], [i % 28 for i in range(50)])
    utc = frame([cell.astimezone(datetime.UTC) if zone else cell for cell in cells])
    np.testing.assert_array_equal(encoder.transform(utc)[:, 0], training[:50, 0])


def test_a_column_of_many_units_is_read_in_a_time_that_grows_with_its_rows():
    def seconds(rows):
        letters = itertools.islice(itertools.product(string.ascii_lowercase, repeat=4), rows)
        streets = [f"{i} {''.join(name)}" for i, name in enumerate(letters)]
        start = time.process_time()
        assert read_as("street", streets, None).reading is None and read_as("street", streets, "number").reading
        return time.process_time() - start

    assert seconds(40_000) < 80 * min(seconds(1000) for _ in range(3))


@pytest.mark.parametrize(
    ("training", "new"),
    [
        (np.arange(40.0), ["large", "7", None]),
        (np.arange(40.0), pd.date_range("2024-01-01", periods=3)),
        (np.arange(40.0), pd.to_timedelta([1, 2, 3], "h")),
        (np.arange(40.0), [np.inf, -np.inf, 1e39]),
        ([True, False] * 20, [0, 2, 1]),
        (pd.date_range("2024-01-01", periods=40), [3, 4, 5]),
        (pd.date_range("2024-01-01", periods=40), pd.date_range("2024-01-01", periods=3, tz="UTC")),
        (pd.date_range("2024-01-01", periods=40, tz="UTC"), pd.date_range("2024-01-01", periods=3)),
        (pd.to_timedelta(np.arange(40), "h"), [1.0, 2.0, 3.0]),
        ([f"{i}%" for i in range(40)], ["5%", "$7", "none"]),
    ],
)
def test_an_unreadable_cell_of_new_rows_is_a_missing_value_with_a_warning(training, new):
    data = pd.DataFrame({"c": training})
    encoder = TableEncoder.fit(data)[0]
    with pytest.warns(ColumnsWarning) as warned:
        actual = encoder.transform(pd.DataFrame({"c": new}))
    assert any("x has cells that the model cannot read, and takes as missing: 'c' (" in str(w.message) for w in warned)
    with pytest.warns(ColumnsWarning):
        missing = encoder.transform(data[:1].assign(c=None))[0]
    assert (actual == missing).all(1).any() and np.isfinite(actual).all()
    gaps = encoder.gaps(pd.DataFrame({"c": new}))["c"]
    np.testing.assert_array_equal(actual[gaps], np.tile(missing, (gaps.sum(), 1)))


@pytest.mark.parametrize("cells", [HOURS, [np.timedelta64(i, "h") for i in range(38)], pd.to_timedelta(HOURS)])
@pytest.mark.parametrize("kind", [None, "number"])
def test_most_durations_are_days(cells, kind):
    columns = {"c": kind} if kind else None
    encoder, training = TableEncoder.fit(frame([*cells, "x"]), columns=columns)
    assert encoder.schema.columns["c"].durations and encoder.schema.columns["c"].missing == 1
    np.testing.assert_allclose(training[:38, 0], np.arange(38) / 24, rtol=1e-12)
    np.testing.assert_array_equal(encoder.transform(frame(HOURS)), training[:38])


SIZES = [*range(300, 3000, 45)]


@pytest.mark.parametrize("kind", ["number", "decimal point"])
@pytest.mark.parametrize(
    ("cell", "odd", "missing"),
    [("{:,}", "-", 6), ("{} %", "{}", 0), ("{}", "{} %", 0), ("{:,}", "{:,} *", 6), ("{} kg", "{} ft", 6)],
)
def test_a_requested_kind_reads_the_most_cells(cell, odd, missing, kind):
    cells = [(cell if i % 10 else odd).format(size) for i, size in enumerate(SIZES)]
    encoder, training = TableEncoder.fit(frame(cells), columns={"c": kind})
    assert encoder.schema.columns["c"].missing == missing
    expected = [float(size) if i % 10 or not missing else training[0, 0] for i, size in enumerate(SIZES)]
    assert training[:, 0].tolist() == expected


def test_most_dates_decide_a_requested_date():
    iso, open_dates = [f"2024-01-{i:02}" for i in range(1, 21)], [f"0{i}/02/2024" for i in range(1, 6)]
    assert schema(frame([*iso, "1 May"]), columns={"c": "date"}).columns["c"].missing == 1
    assert schema(frame([*open_dates, "13/02/2024", "1 May"]), columns={"c": "date"}).columns["c"].missing == 1
    with pytest.raises(ValueError, match=r"a format of dates for 'c', got .* '%d/%m/%Y' or '%m/%d/%Y'"):
        schema(frame([*iso, *open_dates, "1 May"]), columns={"c": "date"})


def test_a_requested_kind_reads_what_it_can():
    data = pd.DataFrame({"c": ["-", "$1", "$2", "$3", "4 kg"] * 4, "flag": [0, 1, 1, 2, 0] * 4})
    actual = schema(data, columns={"c": "number", "flag": "boolean"}).columns
    assert (actual["c"].kind, actual["c"].missing) == ("number", 8)
    assert actual["c"].note == "'-', '4 kg' count as missing values"
    assert (actual["flag"].kind, actual["flag"].missing) == ("boolean", 4)
    with pytest.raises(ValueError, match=r"x must hold values of the kind 'date' in column 'c', got '-', '.1'"):
        schema(data, columns={"c": "date"})
