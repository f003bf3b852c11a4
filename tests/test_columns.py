"""Raw tables: what columns become, whatever library they come from, and the same at prediction; what is refused."""

import dataclasses
import datetime
from decimal import Decimal
import time

from hypothesis import given, settings, strategies as st
import jax
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import jtrees
from jtrees.tables import ColumnsWarning, FrameModel, TableEncoder, read_frame
from jtrees.tables.frame import RawColumn, requested_kinds
from jtrees.tables.periods import periods, varying_periods
from tests import recipes

KEY = jax.random.key(0)
N = 240


def table(n=N, seed=0):
    """Columns of all kinds as lists, missing values as None, and targets."""
    rng = np.random.default_rng(seed)
    gap = lambda values, share: [None if rng.random() < share else value for value in values]
    area = rng.normal(70, 20, n)
    heating = rng.choice(["gas", "oil", "wood"], n, p=[0.6, 0.3, 0.1]).tolist()
    city = [f"city {i}" for i in rng.integers(0, 16, n)]
    sold = [datetime.date(2020, 1, 1) + datetime.timedelta(int(day)) for day in rng.integers(0, 900, n)]
    y = area / 20 + 2 * (np.array(heating) == "gas") + np.array([int(c[5:]) for c in city]) / 8
    columns = {
        "area": gap(area.tolist(), 0.1),
        "rooms": rng.integers(1, 6, n).tolist(),
        "heating": gap(heating, 0.1),
        "city": gap(city, 0.05),
        "sold": gap(sold, 0.05),
        "new": gap((rng.random(n) < 0.3).tolist(), 0.1),
    }
    return columns, y


COLUMNS, Y = table()
FRAME = pd.DataFrame(COLUMNS)
LIBRARIES = {
    "pandas": pd.DataFrame,
    "pandas, nullable": lambda columns: pd.DataFrame(columns).convert_dtypes(),
    "pandas, Arrow": lambda columns: pd.DataFrame(columns).convert_dtypes(dtype_backend="pyarrow"),
    "pandas, categories": lambda columns: pd.DataFrame(columns).astype({"city": "category", "sold": "datetime64[s]"}),
    "pandas, objects": lambda columns: pd.DataFrame(columns).astype(object),
    "polars, categories": lambda columns: pl.DataFrame(columns).cast({"heating": pl.Categorical}),
    "Arrow": pa.table,
}


def encoder_of(values, **options):
    """The encoder of a table with one column, c."""
    return TableEncoder.fit(pd.DataFrame({"c": values}), **options)[0]


def features(encoder, values):
    return encoder.transform(pd.DataFrame({"c": values})).tolist()


@pytest.fixture(scope="module")
def encoder():
    return TableEncoder.fit(FRAME, Y)[0]


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_library_gives_the_same_features(library, encoder):
    other, training = TableEncoder.fit(LIBRARIES[library](COLUMNS), Y)
    assert other == encoder
    np.testing.assert_array_equal(training, TableEncoder.fit(FRAME, Y)[1])
    np.testing.assert_array_equal(encoder.transform(LIBRARIES[library](COLUMNS)), encoder.transform(FRAME))


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_a_row_has_the_features_that_it_has_alone(encoder, data):
    """An empty table has no features."""
    rows = data.draw(st.lists(st.integers(0, N - 1), max_size=6))
    library = LIBRARIES[data.draw(st.sampled_from(["pandas", "pandas, nullable", "pandas, objects", "Arrow"]))]
    cells = library({name: [values[i] for i in rows] for name, values in COLUMNS.items()}) if rows else FRAME[:0]
    np.testing.assert_array_equal(encoder.transform(cells), encoder.transform(FRAME)[rows])


def test_features_are_what_their_names_say():
    encoder, training = TableEncoder.fit(FRAME, Y)
    actual = dict(zip(encoder.feature_names, encoder.transform(FRAME).T, strict=True))
    area = FRAME["area"]
    first = min(day for day in COLUMNS["sold"] if day)
    days = pd.Series([None if day is None else (day - first).days for day in COLUMNS["sold"]], dtype=float)
    expected = {
        "area": area.fillna(area.median()),
        "[area missing]": area.isna(),
        "rooms": FRAME["rooms"],
        **{f"[heating = {level}]": FRAME["heating"] == level for level in ("gas", "oil", "wood")},
        "[heating missing]": FRAME["heating"].isna(),
        "[mean y by city]": None,  # test_target_means_are_posterior_means
        "[mean residual of y by city]": None,  # test_means_of_residuals_compare_levels_at_equal_numbers
        f"sold (days since {first})": days.fillna(actual[f"sold (days since {first})"][days.isna()].max()),
        "[sold missing]": FRAME["sold"].isna(),
        "[mean y by sold month]": 0 * FRAME["rooms"],  # the targets do not depend on it
        "[mean y by sold weekday]": 0 * FRAME["rooms"],
        "new": FRAME["new"].astype(float).fillna(0),  # most are not
        "[new missing]": FRAME["new"].isna(),
    }
    assert list(actual) == list(expected)
    for place, (name, values) in enumerate(expected.items()):
        if values is not None:
            np.testing.assert_array_equal(actual[name], values.astype(float), err_msg=name)
            np.testing.assert_array_equal(training[:, place], actual[name])
    assert "heating: text, levels 'gas', 'oil', 'wood', " in str(encoder)


def shrunk_means(levels, y):
    """The definition, level by level: the posterior mean under variances by the method of moments."""
    n, groups = len(y), {level: [b for a, b in zip(levels, y, strict=True) if a == level] for level in set(levels)}
    mean = sum(y) / n
    variance_within = sum((b - sum(g) / len(g)) ** 2 for g in groups.values() for b in g) / (n - len(groups))
    between = sum(len(g) * (sum(g) / len(g) - mean) ** 2 for g in groups.values()) / (len(groups) - 1)
    size = (n - sum(len(g) ** 2 for g in groups.values()) / n) / (len(groups) - 1)
    variance = max((between - variance_within) / size, 0)
    if variance == 0:
        return dict.fromkeys(groups, mean)
    prior = variance_within / variance
    return {level: (sum(g) + prior * mean) / (len(g) + prior) for level, g in groups.items()}


@given(st.integers(0, 2**32 - 1), st.integers(11, 40), st.floats(0, 3))
@settings(max_examples=25, deadline=None)
def test_target_means_are_posterior_means(seed, levels, spread):
    rng = np.random.default_rng(seed)
    code = np.append(np.repeat(np.arange(levels), 6), rng.integers(0, levels, 50))
    y = spread * rng.normal(size=levels)[code] + rng.normal(size=len(code))
    texts = [f"{c:02}" for c in code]
    expected = shrunk_means(texts, y.tolist())
    means = np.array(features(encoder_of(texts, y=y), texts))[:, 0]
    np.testing.assert_allclose(means, [expected[level] for level in texts], rtol=1e-9, atol=1e-9)  # rounding


def test_no_row_sees_its_own_target():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"city": rng.permutation(np.repeat([f"c{i}" for i in range(12)], 20))})
    y = rng.normal(size=N)
    before = TableEncoder.fit(frame, y)[1][:, 0]
    for row in (0, 7, 100):
        after = TableEncoder.fit(frame, y + 100 * (np.arange(N) == row))[1][:, 0]
        assert after[row] == before[row]
        same_city = frame["city"] == frame["city"][row]
        assert (after[same_city] != before[same_city]).sum() > 10  # the other folds see it


CLASSES = (Y.mean() < Y).astype(int) + (Y > 8)


def test_means_of_classes_and_of_several_targets():
    fit = lambda y, task: TableEncoder.fit(FRAME[["city"]], y, task=task)
    assert fit(CLASSES % 2, "classification")[0].feature_names == ["[mean class 1 by city]"]
    city, training = fit(CLASSES, "classification")
    assert city.with_class_names(["unsold", "sold", "withdrawn"]).feature_names[1] == "[mean sold by city]"
    np.testing.assert_allclose(training[:, :3].sum(1), 1, atol=0.2)  # each is shrunk by its own variances
    city, training = fit(np.stack([Y, -2 * Y], 1), "regression")
    assert city.feature_names[:2] == ["[mean y0 by city]", "[mean y1 by city]"]
    np.testing.assert_allclose(training[:, 1], -2 * training[:, 0], rtol=1e-9)


def test_periods_are_those_of_the_calendar():
    first, last = datetime.datetime(1, 1, 1), datetime.datetime(9999, 12, 31)
    milliseconds = np.random.default_rng(0).integers(0, (last - first).days * 86_400_000, 2000).tolist()
    moments = [first + datetime.timedelta(milliseconds=count) for count in milliseconds]
    moments += [datetime.datetime(year, 2, 28) + datetime.timedelta(days=1) for year in (1900, 2000, 2023, 2024)]
    days = np.array([(moment - datetime.datetime(1970, 1, 1)) / datetime.timedelta(days=1) for moment in moments])
    expected = {
        "month": [f"{moment:%b}" for moment in moments],
        "weekday": [f"{moment:%a}" for moment in moments],
        "hour": [f"{moment.hour} h" for moment in moments],
        "minute": [f"{moment.minute} min" for moment in moments],
    }
    for name, levels in expected.items():
        assert periods(name, RawColumn("date", np.append(days, np.nan))).values.tolist() == [*levels, None]
    assert varying_periods(days) == tuple(expected) and varying_periods(np.floor(days)) == ("month", "weekday")
    assert varying_periods(days[:1]) == varying_periods(days[:0]) == ()


def test_periods_of_pandas_are_dates_and_large_whole_numbers_of_polars_are_numbers():
    for frequency in "Dh":
        period = pd.period_range("2020-01-01", periods=60, freq=frequency)
        of_periods, of_dates = encoder_of(period), encoder_of(date := period.to_timestamp())
        assert of_periods.schema.columns["c"].kind == "date"
        assert features(of_periods, period) == features(of_dates, period) == features(of_dates, date)
    huge = pl.DataFrame({"c": [2**70, *range(59)]})
    np.testing.assert_array_equal(TableEncoder.fit(huge)[1][:, 0], [2.0**70, *range(59)])


def test_columns_that_teach_nothing_are_left_out():
    frame = pd.DataFrame({"one": 1, "none": np.nan, "text": [f"row {i}" for i in range(60)]})
    frame.loc[[3, 5], "one"] = np.nan  # too few for an indicator
    with pytest.raises(ValueError, match=r"must have a column to learn from, got 'one' \(constant\), 'none' \(without"):
        TableEncoder.fit(frame)
    frame["size"] = np.random.default_rng(0).permutation(60) ** 2
    encoder, training = TableEncoder.fit(frame)
    assert encoder.feature_names == ["size"] and training.shape == (60, 1)
    other = frame.assign(text=[[i] for i in range(60)], extended=np.inf)  # left-out columns may hold unreadable cells
    for table in (frame[["size"]], other):
        np.testing.assert_array_equal(encoder.transform(table), training)
    with pytest.warns(ColumnsWarning, match=r"'text' \(60 different .*\): columns=\{'text': 'text'\} reads"):
        encoder.schema.warn()
    remaining = TableEncoder.fit(frame, columns={"text": "text"})[0]
    assert remaining.feature_names == ["[frequency of text]", "size"]


def test_counters_are_numbers():
    t = np.arange(60)
    for counter in (t, t[::-1], 1960 + t, 2 * t, np.random.default_rng(0).permutation(t)):
        np.testing.assert_array_equal(TableEncoder.fit(pd.DataFrame({"t": counter}))[1], counter[:, None])
    array = np.column_stack([t, np.where(t % 9 == 7, np.nan, t % 5)])
    assert TableEncoder.fit(array)[0].feature_names == ["x0", "x1", "[x1 missing]"]
    assert read_frame(np.nan_to_num(array)) is None  # an array of numbers is no raw table


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (FRAME.drop(columns="area"), "have the columns 'area', 'rooms', .*, got none called 'area'"),
        (np.array([[np.nan] * 5 + [np.inf]]), "hold finite numbers, got inf in column 'x5', row 0"),
        (np.zeros((3, 5)), "have 6 columns, got 5"),
        (pl.DataFrame(COLUMNS).lazy(), "be an array or a DataFrame in memory, got LazyFrame"),
        (pd.concat([FRAME, FRAME], axis=1), "have columns of different names, got 'area' twice"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of polars, of the names of a lazy table
def test_other_tables_are_refused(x, message, encoder):
    with pytest.raises(ValueError, match=f"x must {message}"):
        encoder.transform(x)


def test_booleans_are_also_0_and_1():
    booleans = encoder_of([True, False] * 10)
    assert features(booleans, ["true", "FALSE", "1"]) == [[1], [0], [1]] and features(booleans, [1, 0]) == [[1], [0]]


EXACT = {
    "whole numbers": (pd.Categorical([1, 2] * 10), [[1, 2], [1.0, 2.0], np.array([1, 2], np.int8), ["1", "2"]]),
    "decimals": (
        pd.Categorical([0.1, 0.2] * 10),
        [np.float32([0.1, 0.2]), np.float64([0.1, 0.2]), [Decimal("0.1"), Decimal("0.20")], ["0.1", "0.2"]],
    ),
    "booleans": (pd.Categorical([False, True] * 10), [[False, True], np.array([False, True], object)]),
    "ids": (pd.Categorical([2**60, 2**60 + 1] * 10), [[2**60, 2**60 + 1], [str(2**60), str(2**60 + 1)]]),
    "text": (["01", "02"] * 10, [["01", "02"], pd.Categorical(["01", "02"])]),
}


@pytest.mark.parametrize("kind", EXACT)
def test_equal_levels_match_in_any_type(kind):
    training, same = EXACT[kind]
    encoder = encoder_of(training)
    for values in same:
        assert features(encoder, values) == [[0], [1]]
        for library in () if isinstance(values, pd.Categorical) else (pl.DataFrame, pa.table):
            assert encoder.transform(library({"c": list(values)})).tolist() == [[0], [1]]


@pytest.mark.parametrize(
    ("training", "values"),
    [
        (["01", "02"] * 10, [1]),
        (["01", "02"] * 10, [True]),
        (pd.Categorical([False, True] * 10), [0, 1]),
        (pd.Categorical([2**60, 2**60 + 1] * 10), np.float64([2**60])),
        (["gas", "oil"] * 10, ["GAS"]),
    ],
)
def test_unseen_levels_are_counted_for_any_number_of_rows(training, values):
    encoder = encoder_of(training)
    for times in (1, 100):
        rows = len(values) * times
        with pytest.warns(ColumnsWarning, match=rf"training rows did not have: 'c' \({rows} rows?\)$"):
            assert features(encoder, np.tile(values, times)) == [[0]] * rows


@pytest.mark.parametrize("many", [False, True])
def test_a_level_of_the_training_rows_is_a_level_everywhere(many):
    """Also if it looks like a missing value. Spaces around it do not count."""
    levels = ["a", " ", " ?", "None", "nan ", " NA", None, *(f"c{i}" for i in range(10 * many))]
    cells = levels * 6
    x, y = pd.DataFrame({"c": cells}), np.arange(len(cells)) % len(levels)
    encoder, training = TableEncoder.fit(x, y)
    actual = encoder.transform(x)  # without a warning
    assert len(np.unique(actual.round(6), axis=0)) == len(levels)
    np.testing.assert_allclose(actual, training, rtol=1e-12)
    spaced = pd.DataFrame({"c": [None if cell is None else f" {cell.strip()}  " for cell in cells]})
    np.testing.assert_array_equal(encoder.transform(spaced), actual)
    with pytest.warns(ColumnsWarning, match=r"'c' \(1 row\)$"):
        assert features(encoder, ["N/A", "new", None])[::2] == [actual[6].tolist()] * 2


@pytest.mark.parametrize(("offset", "unit"), [(1e6, 1), (1e9, 1), (1e12, 1), (0, 1e-12), (0, 1e12), (1e12, 1e6)])
def test_target_means_know_neither_offset_nor_unit(offset, unit):
    rng = np.random.default_rng(0)
    city, when = rng.integers(0, 20, N), pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 700, N), "D")
    y = rng.normal(size=20)[city] + 3 * (when.month > 6) + 0.1 * rng.normal(size=N)
    x = pd.DataFrame({"city": [f"city {i}" for i in city], "when": when})
    places = [name.startswith("[mean y") for name in TableEncoder.fit(x, y)[0].feature_names]
    expected, actual = (TableEncoder.fit(x, targets)[1][:, places] for targets in (y, offset + unit * y))
    assert expected.std(0).min() == 0 < expected.std(0).max()  # weekdays explain nothing
    helpful = expected.std(0) > 0
    np.testing.assert_allclose((actual[:, helpful] - offset) / unit, expected[:, helpful], atol=1e-3)  # 1e12 has digits


def test_the_first_and_last_days_of_the_calendar_are_read_alike():
    encoder, east = encoder_of(BERLIN), datetime.timezone(datetime.timedelta(hours=5))
    west = datetime.timezone(datetime.timedelta(hours=-5))
    dates = [datetime.datetime(1, 1, 1, tzinfo=east), datetime.datetime(9999, 12, 31, 23, tzinfo=west)]
    actual = features(encoder, pd.Series(dates, dtype=object))
    assert actual == features(encoder, [date.isoformat() for date in dates])
    assert actual[0] < features(encoder, BERLIN)[0] < actual[1]


def test_rare_levels_are_one_and_new_levels_are_others():
    text = ["a"] * 10 + ["b"] * 10 + ["c"] * 2 + ["d"] * 3
    encoder = encoder_of(text)
    assert encoder.feature_names == ["[c = a]", "[c = b]", "[c other]"]
    assert np.sum(features(encoder, text), axis=0).tolist() == [10, 10, 5]  # without a warning
    with pytest.warns(ColumnsWarning, match=r"'c' \(1 row\)$"):
        assert features(encoder, ["a", "d", "z"]) == [[1, 0, 0], [0, 0, 1], [0, 0, 1]]
    with pytest.warns(ColumnsWarning, match=r"'c' \(2 rows\)$"):
        assert features(encoder_of(text[:20]), ["b", "d", "z"]) == [[1], [0], [0]]
    assert TableEncoder.fit(FRAME[["city"]], Y)[0].feature_names == ["[mean y by city]"]  # of 16 levels
    names = encoder_of(["other", "missing", None, "x"] * 10 + ["rare", "too"] * 3).feature_names
    assert names == ["[c = missing]", "[c = other]", "[c = x]", "[c other]", "[c missing]"]


def test_numbers_of_many_kinds():
    zone = datetime.timezone(datetime.timedelta(hours=2))
    day = (datetime.date(2020, 1, 1) - datetime.date(1970, 1, 1)).days
    for kind, values, expected in (
        ("number", [Decimal("1.5"), None, Decimal("2")], [1.5, np.nan, 2]),
        ("number", pd.to_timedelta([36, 12, None], "h"), [1.5, 0.5, np.nan]),
        ("date", pd.to_datetime(["2020-01-01T01:00+02:00", None]), [day + 1 / 24, np.nan]),
        ("date", [datetime.datetime(2020, 1, 1, 1, tzinfo=zone), None], [day + 1 / 24, np.nan]),
        ("date", [np.datetime64("NaT", "ms"), np.datetime64("2020-01-01"), None], [np.nan, day, np.nan]),
    ):
        column = read_frame(pd.DataFrame({"c": values})).columns["c"]
        assert column.kind == kind
        np.testing.assert_allclose(column.values, expected, rtol=1e-12)


def test_times_of_day_are_durations_since_midnight():
    times = [datetime.time(6), datetime.time(12, 30), None] * 10
    arrow = pd.DataFrame({"c": pd.array(times, dtype=pd.ArrowDtype(pa.time64("us")))})
    for table in (pd.DataFrame({"c": times}), pl.DataFrame({"c": times}), pa.table({"c": times}), arrow):
        encoder, training = TableEncoder.fit(table)
        assert training[:3].tolist() == [[0.25, 0], [12.5 / 24, 0], [18.5 / 48, 1]]
        np.testing.assert_array_equal(encoder.transform(table), training)
    assert features(encoder, pd.to_timedelta([6], "h")) == [[0.25, 0]]
    texts = pd.DataFrame({"c": ["06:00", "12:30:00 PM", None] * 10})
    of_texts = TableEncoder.fit(texts)[0].schema.columns["c"]
    assert str(of_texts) == "durations in days; times of day in text such as '06:00'"
    assert encoder.schema.columns["c"] == dataclasses.replace(of_texts, reading=None)
    np.testing.assert_array_equal(TableEncoder.fit(texts)[1], training)
    np.testing.assert_array_equal(encoder.transform(texts), training)
    assert TableEncoder.fit(texts, columns={"c": "number"})[0].schema.columns["c"].durations


BERLIN = pd.date_range("2024-03-01", periods=60, tz="Europe/Berlin")
NAIVE = BERLIN.tz_localize(None)


def test_aware_dates_count_local_days():
    aware = encoder_of(BERLIN)
    for values in (BERLIN, BERLIN.tz_convert("UTC"), BERLIN.to_pydatetime(), BERLIN.strftime("%Y-%m-%dT%H:%M%z")):
        assert features(aware, values) == features(encoder_of(NAIVE), NAIVE)
    saturday = BERLIN.day_of_week == 5
    weekly = encoder_of(BERLIN, y=1.0 * saturday + np.arange(60) / 1e3)
    means = np.array(features(weekly, BERLIN))[:, weekly.feature_names.index("[mean y by c weekday]")]
    np.testing.assert_array_equal(means == means.max(), saturday)
    text = encoder_of(BERLIN.tz_convert("UTC").strftime("%Y-%m-%dT%H:%MZ"))
    assert text.schema.columns["c"].zone == "UTC" and "local days of UTC" in str(text)
    east = datetime.timezone(datetime.timedelta(hours=-4), "EST")  # a fixed offset is no zone, whatever its name
    fixed = [datetime.datetime(2024, 3, 1 + i % 9, 12, tzinfo=east) for i in range(40)]
    assert encoder_of(fixed).schema.columns["c"].zone == "-04:00"
    assert features(encoder_of(fixed), fixed)[:2] == [[0.5], [1.5]]


@pytest.mark.parametrize("library", [pd.DataFrame, pl.DataFrame, pa.table])
def test_missing_texts_are_missing_values_in_every_column(library):
    cells = {
        "age": [*map(str, range(20, 75)), *["-"] * 4, "n.a."],
        "when": ["-"] * 4 + ["soon"] + [f"2024-01-{i % 28 + 1:02}" for i in range(55)],
        "income": ["$1,000", "-", "-", "-", "-", "secret"] + [f"${i},000" for i in range(2, 56)],
        "kind": ["a", "b", "-", "?"] * 15,
    }
    encoder, training = TableEncoder.fit(table := library(cells), missing=("-", "n.a.", "soon", "secret"))
    kinds = {name: column.kind for name, column in encoder.schema.columns.items()}
    assert kinds == {"age": "number", "when": "date", "income": "number", "kind": "text"}
    kind = encoder.schema.columns["kind"]
    assert kind.levels == ("?", "a", "b") and kind.missing == 15
    np.testing.assert_array_equal(encoder.transform(table), training)
    new = pd.DataFrame({"age": [31, "-"], "when": ["2024-01-05", "soon"], "income": ["-", "$7"], "kind": ["-", "N/A"]})
    actual = dict(zip(encoder.feature_names, encoder.transform(new).T, strict=True))
    assert actual["[age missing]"].tolist() == [0, 1] == actual["[when missing]"].tolist()
    assert actual["[income missing]"].tolist() == [1, 0] and actual["[kind missing]"].tolist() == [1, 1]


CODES = np.tile([1.0, 2.0, np.nan, 4.5, 5.0, 6.0, 7.0, 8.0, 9.0, 0.0, 11.0, 12.0], 5)


def coded(code, convert=float, dtype=None):
    """The numbers, in which a code stands for missing values, of any type."""
    return pd.Series([code if np.isnan(value) else convert(value) for value in CODES], dtype=dtype)


@pytest.mark.parametrize("missing", [("-999",), (-999,), ["-", np.float32(-999)], ("-999.0", "n.a.")])
def test_numbers_that_mean_a_missing_value(missing):
    """A column has the same features, whatever the type of its cells, and its model reads cells of all types."""
    gaps = pd.DataFrame({"c": CODES})
    expected = TableEncoder.fit(gaps)[1]
    new = pd.DataFrame({"c": [-999, 3]})
    tables = [
        gaps,
        *(pd.DataFrame({"c": coded(code)}) for code in (-999, -999.0, Decimal("-999"))),
        pd.DataFrame({"c": coded(-999, dtype=np.float32)}),
        pd.DataFrame({"c": coded(-999, str)}),
        pd.DataFrame({"c": coded("-999.0", str)}),
        pd.DataFrame({"c": coded(-999, dtype=object)}),
        pd.DataFrame({"c": coded("-999", dtype=object)}),
        pl.DataFrame({"c": coded(-999.0).tolist()}),
        pa.table({"c": coded(-999.0).tolist()}),
    ]
    for training in tables:
        encoder, features_of_rows = TableEncoder.fit(training, missing=missing)
        assert encoder.schema.columns["c"].missing == 5 and not encoder.schema.columns["c"].odd
        np.testing.assert_array_equal(features_of_rows, expected)
        for table in tables:
            np.testing.assert_array_equal(encoder.transform(table), expected)
        assert encoder.transform(new).tolist() == [[6, 1], [3, 0]]
    array = gaps.fillna(-999).to_numpy()
    encoder, features_of_rows = TableEncoder.fit(array, missing=missing)
    np.testing.assert_array_equal(features_of_rows, expected)
    np.testing.assert_array_equal(encoder.transform(array), expected)


def test_numbers_that_mean_a_missing_value_may_be_far_or_have_decimals():
    """Also beyond single precision. A column in single precision holds another number than its text names."""
    for code in (-99.9, 1e20, -1.7976931348623157e308):
        for cells in (coded(code), coded(str(code)), coded(code, str)):
            column = TableEncoder.fit(pd.DataFrame({"c": cells}), missing=(code,))[0].schema.columns["c"]
            assert (column.kind, column.missing, column.odd) == ("number", 5, 0)
    single = pd.DataFrame({"c": coded(-99.9, dtype=np.float32)})
    np.testing.assert_array_equal(TableEncoder.fit(single, missing=("-99.9",))[1][:, 1], np.isnan(CODES))


def test_a_number_means_a_missing_value_only_among_numbers_and_levels():
    table = {
        "flag": [True, False] * 20,
        "bit": [0, 1] * 20,
        "date": pd.date_range("1970-01-01", periods=40),
        "time": pd.to_timedelta(np.arange(40) % 7, "D"),
        "zero": np.arange(40) % 4,
        "level": np.array([0, "0", "a", 2] * 10, object),
    }
    frame = pd.DataFrame(table)
    options = {"missing": (0, "01"), "columns": {"bit": "boolean"}}
    encoder, training = TableEncoder.fit(frame, **options)
    counts = {name: column.missing for name, column in encoder.schema.columns.items()}
    assert counts == {"flag": 0, "bit": 0, "date": 0, "time": 0, "zero": 10, "level": 20}
    assert encoder.schema.columns["level"].levels == ("2", "a")
    np.testing.assert_array_equal(encoder.transform(frame), training)
    codes = pd.DataFrame({"a": np.arange(40) % 4, "b": ["01", "1"] * 20})
    counts = {
        name: column.missing for name, column in TableEncoder.fit(codes, missing=("01",))[0].schema.columns.items()
    }
    assert counts == {"a": 0, "b": 20}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("as_array", [False, True])
def test_a_fit_learns_and_predicts_with_numbers_that_mean_a_missing_value(as_array):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 50, (N, 2))
    y = x[:, 0] + 30.0 * (x[:, 1] > 25)
    x[rng.random(x.shape) < 0.1] = -999
    ints = x if as_array else pd.DataFrame(x, columns=["a", "b"])
    gaps = pd.DataFrame(x, columns=["a", "b"]).where(x != -999)
    fit = jtrees.fit(recipes.GET, ints, y, key=KEY, missing=("-999",))
    expected = jtrees.fit(recipes.GET, gaps, y, key=KEY).predict(gaps)
    for rows in [ints, gaps.to_numpy()] + ([] if as_array else [gaps, ints.astype(str), ints.astype(float)]):
        np.testing.assert_array_equal(fit.predict(rows), expected)


def test_texts_of_numbers_among_numbers_are_numbers():
    values = np.array([5, "7", None, "?", 2.5, "1e3"] * 5, object)
    encoder = encoder_of(values)
    assert features(encoder, values)[:6] == [[5, 0], [7, 0], [6, 1], [6, 1], [2.5, 0], [1000, 0]]
    assert encoder_of(np.array([5, "07"] * 5, object)).schema.columns["c"].kind == "text"  # a code


@pytest.mark.parametrize("library", ["Arrow", "pandas", "pandas, nullable", "pandas, Arrow", "polars"])
@pytest.mark.parametrize("gap", [False, True])
def test_whole_numbers_of_any_size_are_numbers(library, gap):
    library = (LIBRARIES | {"polars": pl.DataFrame})[library]
    values = [None if gap and i == 0 else 2**60 + 1000 * i for i in range(40)]
    encoder, training = TableEncoder.fit(library({"c": values}))
    np.testing.assert_array_equal(training[1:, 0], np.array(values[1:], np.float64))
    np.testing.assert_array_equal(encoder.transform(library({"c": values})), training)


def test_a_wide_table_is_read_in_a_time_that_grows_with_its_width():
    wide = lambda p: pd.DataFrame(np.arange(2.0 * p).reshape(2, p), columns=[f"column {j}" for j in range(p)])
    names = list(wide(20_000).columns)
    start = time.process_time()
    with pytest.raises(ValueError, match="columns of different names, got 'column 7' twice"):
        read_frame(pd.DataFrame(np.zeros((1, 20_001)), columns=[*names, "column 7"]))
    assert list(requested_kinds(dict.fromkeys(names, "drop"), names)) == names
    assert time.process_time() - start < 2


@pytest.mark.usefixtures("standard_promotion")
def test_a_fit_is_that_of_its_features_and_is_saved_with_its_columns(tmp_path, encoder):
    _, training = TableEncoder.fit(FRAME, Y)
    fit, array_fit = (jtrees.fit(recipes.GET, x, Y, key=KEY) for x in (FRAME, training))
    assert isinstance(fit.model, FrameModel) and fit.model.encoder == encoder and fit.loss == array_fit.loss
    x = encoder.transform(FRAME)
    expected = array_fit.predict(x)
    np.testing.assert_array_equal(fit.predict(FRAME), expected)
    shuffled = pl.DataFrame(COLUMNS).select("new", "city", "sold", "heating", "rooms", "area")
    jtrees.save(fit, tmp_path / "fit.jtrees")
    loaded = jtrees.load(tmp_path / "fit.jtrees")
    assert loaded.model.encoder == encoder
    np.testing.assert_array_equal(loaded.predict(shuffled), expected)
    np.testing.assert_array_equal(loaded.model.leaf_index(shuffled), array_fit.tree.leaf_index(x))
    assert loaded.model.decision_path(shuffled).shape == (3, N)
    text = loaded.model.to_text(x=FRAME)
    assert text == array_fit.tree.to_text(encoder.feature_names, x=x) and "[heating = gas]" in text
