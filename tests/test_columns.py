"""Raw tables: what columns become, whatever library they come from, and what is refused."""

import datetime
from decimal import Decimal
import runpy
import warnings

from hypothesis import given, settings, strategies as st
import jax
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import jtrees
from jtrees.estimators import TreeClassifier, TreeRegressor
from jtrees.tables import ColumnsWarning, FrameModel, TableEncoder, read_frame

pytestmark = pytest.mark.usefixtures("standard_promotion")  # fits with Adam

KEY = jax.random.key(0)
N = 240
GET = jtrees.GET(depth=2, starts=2, epochs=30)


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
    "pandas": FRAME,
    "pandas, nullable": FRAME.convert_dtypes(),
    "pandas, Arrow": FRAME.convert_dtypes(dtype_backend="pyarrow"),
    "pandas, categories": FRAME.astype({"heating": "category", "city": "category", "sold": "datetime64[s]"}),
    "pandas, objects": FRAME.astype(object),
    "polars": pl.DataFrame(COLUMNS),
    "polars, categories": pl.DataFrame(COLUMNS).cast({"heating": pl.Categorical, "new": pl.Boolean}),
    "Arrow": pa.table(COLUMNS),
}


# --- What columns become ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_library_gives_the_same_features(library):
    expected, own = TableEncoder.fit(FRAME, Y)
    columns, features = TableEncoder.fit(LIBRARIES[library], Y)
    assert columns == expected
    np.testing.assert_array_equal(features, own)
    np.testing.assert_array_equal(expected.transform(LIBRARIES[library]), expected.transform(FRAME))


def test_features_are_what_their_names_say():
    columns, own = TableEncoder.fit(FRAME, Y)
    features = dict(zip(columns.feature_names, columns.transform(FRAME).T, strict=True))
    area, city = FRAME["area"], FRAME["city"]
    first = min(day for day in COLUMNS["sold"] if day)
    expected = {
        "area": area.fillna(area.median()),
        "[area missing]": area.isna(),
        "rooms": FRAME["rooms"],
        "[heating = gas]": FRAME["heating"] == "gas",
        "[heating = oil]": FRAME["heating"] == "oil",
        "[heating = wood]": FRAME["heating"] == "wood",
        "[heating missing]": FRAME["heating"].isna(),
        "[mean y by city]": None,  # below
        "[frequency of city]": city.map(city.value_counts() / N).fillna(city.isna().mean()),
        f"sold (days since {first})": None,
        "[sold missing]": FRAME["sold"].isna(),
        "[mean y by sold month]": 0 * FRAME["rooms"],  # the targets do not depend on it
        "[mean y by sold weekday]": 0 * FRAME["rooms"],
        "new": FRAME["new"].astype(float).fillna(0),  # most are not
        "[new missing]": FRAME["new"].isna(),
    }
    assert list(features) == list(expected)
    for name, values in expected.items():
        if values is not None:
            np.testing.assert_array_equal(features[name], values.astype(float), err_msg=name)
    days = [None if day is None else (day - first).days for day in COLUMNS["sold"]]
    there = [i for i, day in enumerate(days) if day is not None]
    np.testing.assert_array_equal(features[f"sold (days since {first})"][there], [days[i] for i in there])
    others = [i for i, name in enumerate(expected) if name != "[mean y by city]"]
    np.testing.assert_array_equal(own[:, others], columns.transform(FRAME)[:, others])


def shrunk_means(levels, y):
    """The definition, level by level: the posterior mean under variances by the method of moments."""
    n, groups = len(y), {level: [b for a, b in zip(levels, y, strict=True) if a == level] for level in set(levels)}
    mean = sum(y) / n
    within = sum((b - sum(g) / len(g)) ** 2 for g in groups.values() for b in g) / (n - len(groups))
    between = sum(len(g) * (sum(g) / len(g) - mean) ** 2 for g in groups.values()) / (len(groups) - 1)
    size = (n - sum(len(g) ** 2 for g in groups.values()) / n) / (len(groups) - 1)
    variance = max((between - within) / size, 0)
    if variance == 0:
        return dict.fromkeys(groups, mean)
    prior = within / variance
    return {level: (sum(g) + prior * mean) / (len(g) + prior) for level, g in groups.items()}


@given(st.integers(0, 2**32 - 1), st.integers(11, 40), st.floats(0, 3))
@settings(max_examples=25, deadline=None)
def test_target_means_are_posterior_means(seed, levels, spread):
    rng = np.random.default_rng(seed)
    code = np.append(np.repeat(np.arange(levels), 6), rng.integers(0, levels, 50))
    y = spread * rng.normal(size=levels)[code] + rng.normal(size=len(code))
    frame = pd.DataFrame({"level": [f"{c:02}" for c in code]})
    columns, _ = TableEncoder.fit(frame, y)
    expected = shrunk_means(list(frame["level"]), y.tolist())
    found = columns.transform(frame)[:, 0]
    np.testing.assert_allclose(found, [expected[level] for level in frame["level"]], rtol=1e-9, atol=1e-9)  # rounding


def test_no_row_sees_its_own_target():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"city": rng.permutation(np.repeat([f"c{i}" for i in range(12)], 20))})
    y = rng.normal(size=N)
    before = TableEncoder.fit(frame, y)[1][:, 0]
    for row in (0, 7, 100):
        other = y.copy()
        other[row] += 100
        after = TableEncoder.fit(frame, other)[1][:, 0]
        assert after[row] == before[row]
        same_city = frame["city"] == frame["city"][row]
        assert (after[same_city] != before[same_city]).sum() > 10  # the other folds see it


def test_means_of_classes_and_of_several_targets():
    labels = (Y.mean() < Y).astype(int) + (Y > 8)
    for y, task, names in (
        (labels % 2, "classification", ["class 1"]),
        (labels, "classification", ["class 0", "class 1", "class 2"]),
        (np.stack([Y, -2 * Y], 1), "regression", ["y0", "y1"]),
    ):
        columns, features = TableEncoder.fit(FRAME[["city"]], y, task=task)
        assert columns.feature_names == [*(f"[mean {name} by city]" for name in names), "[frequency of city]"]
        own = {"class 0": "unsold", "class 1": "sold", "class 2": "withdrawn"}
        named = columns.with_class_names(list(own.values())[: max(len(names), 2)])
        assert named.feature_names[:-1] == [f"[mean {own.get(name, name)} by city]" for name in names]
        np.testing.assert_array_equal(named.transform(FRAME), columns.transform(FRAME))
        if names[-1] == "class 2":
            np.testing.assert_allclose(features[:, :3].sum(1), 1, atol=0.2)  # each is shrunk by its own variances
        if names[-1] == "y1":
            np.testing.assert_allclose(features[:, 1], -2 * features[:, 0], rtol=1e-9)
    assert TableEncoder.fit(FRAME[["city"]])[0].feature_names == ["[frequency of city]"]


def test_rules_and_plots_speak_of_classes_by_their_names():
    plot_tree = pytest.importorskip("jtrees.plotting").plot_tree
    columns, features = TableEncoder.fit(FRAME[["city"]], Y.mean() < Y, task="classification")
    leaves = jtrees.leaves.Values(np.float32([[0.9, 0.1], [0.2, 0.8]]), jtrees.losses.Frequencies())
    model = FrameModel(jtrees.ObliqueTree(np.float32([[2, 0]]), np.float32([-1]), leaves), columns)
    assert features.shape[1] == 2 and "[mean class 1 by city]" in model.to_text()
    text = model.to_text(class_names=["unsold", "sold"])
    assert "[mean sold by city]" in text and "sold: 0.8" in text and "class 1" not in text
    shown = " ".join(text.get_text() for text in plot_tree(model, class_names=["unsold", "sold"]).texts)
    assert "[mean sold by city]" in shown and "class 1" not in shown
    with pytest.raises(ValueError, match="class_names must hold 2 names, one a class, got 1"):
        model.to_text(class_names=["sold"])
    columns, _ = TableEncoder.fit(FRAME[["city"]], np.stack([Y, -Y], 1), task=jtrees.Policy(2))
    plays = jtrees.leaves.Values(np.float32([[1e4, 0], [0, 1e4]]), jtrees.losses.Rewards())
    policy = FrameModel(jtrees.ObliqueTree(np.float32([[2, 0, 0]]), np.float32([-1]), plays), columns)
    assert policy.to_text(class_names=["wait", "treat"]) == (
        "if 2 [mean wait by city] > 1:\n|   -> leaf 1: treat\nelse:\n|   -> leaf 0: wait"
    )


def test_months_and_weekdays_where_they_help():
    days = pd.Series(pd.date_range("2019-01-01", periods=1200))
    rng = np.random.default_rng(0)
    y = 0.01 * np.arange(1200) + rng.normal(size=1200)
    frame = pd.DataFrame({"day": days})
    features = lambda y: TableEncoder.fit(frame, y)[0].transform(frame)
    encoder, own = TableEncoder.fit(frame, y)
    assert encoder.feature_names == ["day (days since 2019-01-01)", "[mean y by day month]", "[mean y by day weekday]"]
    assert not features(y)[:, 1:].any() and not own[:, 1:].any() and "month" not in str(encoder)
    of_classes = TableEncoder.fit(frame, days.dt.month == 3, task="classification")[0]
    assert of_classes.with_class_names(["no", "yes"]).feature_names[1] == "[mean yes by day month]"
    assert "with month" in str(of_classes)
    _, march, weekday = features(y + (days.dt.month == 3)).T
    assert len(np.unique(march)) == 12 and (days.dt.month[march == march.max()] == 3).all() and not weekday.any()
    _, month, sunday = features(y + 2 * (days.dt.day_of_week == 6)).T
    assert len(np.unique(sunday)) == 7 and not month.any()
    np.testing.assert_array_equal(sunday == sunday.max(), days.dt.day_of_week == 6)
    january = TableEncoder.fit(frame[:31], y[:31])[0]
    assert january.feature_names[1:] == ["[mean y by day weekday]"]  # its month does not vary


def test_rare_levels_are_one_and_new_levels_are_others():
    text = ["a"] * 10 + ["b"] * 10 + ["c"] * 2 + ["d"] * 3
    columns, features = TableEncoder.fit(pd.DataFrame({"level": text}))
    assert columns.feature_names == ["[level = a]", "[level = b]", "[level other]"]
    np.testing.assert_array_equal(features.sum(0), [10, 10, 5])
    new = pd.DataFrame({"level": ["a", "d", "z"]})
    with pytest.warns(ColumnsWarning, match=r"levels that the training rows did not have: 'level' \(1 row\)$"):
        np.testing.assert_array_equal(columns.transform(new), [[1, 0, 0], [0, 0, 1], [0, 0, 1]])
    whole, _ = TableEncoder.fit(pd.DataFrame({"level": text[:20]}))
    with pytest.warns(ColumnsWarning, match=r"'level' \(2 rows\)$"):
        np.testing.assert_array_equal(whole.transform(new), [[1, 0], [0, 0], [0, 0]])
    many, _ = TableEncoder.fit(FRAME[["city"]], Y)
    with pytest.warns(ColumnsWarning, match=r"'city' \(1 row\)$"):
        np.testing.assert_allclose(many.transform(pd.DataFrame({"city": ["nowhere"]})), [[Y.mean(), 0]])
    assert len(TableEncoder.fit(FRAME[["city"]], Y, max_levels=16)[0].feature_names) == 17  # and the missing values
    assert len(TableEncoder.fit(FRAME[["city"]], Y, max_levels=15)[0].feature_names) == 2  # mean and frequency


def test_numbers_stand_for_their_levels():
    """A gap makes whole numbers float, and a CSV file text."""
    columns, _ = TableEncoder.fit(pd.DataFrame({"code": pd.Categorical([1, 2, 3] * 10)}))
    expected = [[1, 0, 0], [0, 1, 0], [0, 0, 0]]
    for values in ([1, 2, 9], [1.0, 2.0, np.nan], ["1", "2", "9"], pd.Categorical([1, 2, None])):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ColumnsWarning)
            np.testing.assert_array_equal(columns.transform(pd.DataFrame({"code": values})), expected)


def test_a_gap_that_training_did_not_have_is_filled_with_a_warning():
    columns, _ = TableEncoder.fit(pd.DataFrame({"a": np.arange(30.0) ** 2, "b": ["u", "v"] * 15}))
    new = pd.DataFrame({"a": [np.nan, 2.0, np.nan], "b": ["u", None, "v"]})
    with pytest.warns(ColumnsWarning, match=r"none, replaced by typical values: 'a' \(2 rows\), 'b' \(1 row\)"):
        features = columns.transform(new)
    np.testing.assert_array_equal(features, [[210.5, 1, 0], [2, 0, 0], [210.5, 0, 1]])


@pytest.mark.slow
def test_columns_that_teach_nothing_are_left_out():
    frame = pd.DataFrame({"one": 1, "none": np.nan, "text": [f"row {i}" for i in range(60)]})
    with pytest.raises(ValueError, match=r"must have a column to learn from, got 'one' \(constant\), 'none' \(without"):
        TableEncoder.fit(frame)
    frame["size"] = np.random.default_rng(0).permutation(60) ** 2
    columns, features = TableEncoder.fit(frame)
    assert columns.feature_names == ["size"] and features.shape == (60, 1)
    np.testing.assert_array_equal(columns.transform(frame[["size"]]), features)  # the others need not be there
    other = frame.assign(text=[[i] for i in range(60)], more=np.inf)  # nor hold anything that can be read
    np.testing.assert_array_equal(columns.transform(other), features)
    with pytest.warns(ColumnsWarning) as warned:
        jtrees.fit(GET, frame, frame["size"] % 7, key=KEY)
    assert [str(one.message) for one in warned if one.category is ColumnsWarning] == [
        "columns of x are left out: 'one' (constant), 'none' (without values), 'text' (60 different texts in 60 rows): "
        "columns={'text': 'text'} reads them otherwise"
    ]
    kept = TableEncoder.fit(frame, columns={"text": "text"})[0]
    assert kept.feature_names == ["[frequency of text]", "size"]


def test_counters_are_numbers():
    """A trend of a series, with or without a gap in another column."""
    t = np.arange(60)
    for counter in (t, t[::-1], 1960 + t, 2 * t, np.random.default_rng(0).permutation(t)):
        np.testing.assert_array_equal(TableEncoder.fit(pd.DataFrame({"t": counter}))[1], counter[:, None])
    array = np.column_stack([t, np.where(t == 7, np.nan, t % 5)])
    assert TableEncoder.fit(array)[0].feature_names == ["x0", "x1", "[x1 missing]"]


def test_description():
    text = str(TableEncoder.fit(FRAME, Y)[0]).splitlines()
    assert text[2] == f"heating: text, levels 'gas', 'oil', 'wood', {FRAME['heating'].isna().sum()} missing"
    assert text[3].startswith("city: text, 16 levels by target mean and frequency, ")
    assert text[1] == "rooms: number, median 3, deviation 1.41"
    area = FRAME["area"]
    expected = f"number, median {area.median():.6g}, deviation {area.std(ddof=0):.3g}, {area.isna().sum()} missing"
    assert text[0] == f"area: {expected}"


# --- Refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, "a", 2], r"x must have columns of one type, got 1 in row 0 and 'a' in row 1 of 'c'"),
        ([None, "a", True], r"columns of one type, got 'a' in row 1 and True in row 2 of 'c'"),
        ([None, {}, {}], r"x must have columns of numbers, booleans, dates or text, got \{\} in row 1 of 'c'"),
        (pd.period_range("2020", periods=3), r"booleans, dates or text, got Period\(.* in row 0 of 'c'"),
        ([1.0, np.inf, 2], "x must hold finite numbers, got inf in column 'c', row 1"),
        ([1.0, 2, 1e39], "x must hold numbers within the range of float32, got 1e.39 in column 'c', row 2"),
    ],
)
def test_columns_that_cannot_be_read(values, message):
    with pytest.raises(ValueError, match=message):
        jtrees.fit(GET, pd.DataFrame({"c": values}), [1.0, 2, 3], key=KEY)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (FRAME.drop(columns="area"), "x must have the columns 'area', 'rooms', .*, got none called 'area'"),
        (FRAME.assign(area="large"), "x must hold numbers in column 'area', got 'large' in row 0"),
        (FRAME.assign(area=FRAME["sold"]), "x must hold numbers in column 'area', got dates"),
        (FRAME.assign(sold=3), "x must hold dates in column 'sold', got numbers"),
        (FRAME.assign(heating=FRAME["sold"]), "x must hold text in column 'heating', got dates"),
        (FRAME.assign(area=pd.Timedelta("1h")), "x must hold numbers in column 'area', got durations"),
        (FRAME.assign(heating=pd.Timedelta("1h")), "x must hold text in column 'heating', got durations"),
        (FRAME.assign(rooms=np.inf), "x must hold finite numbers, got inf in column 'rooms', row 0"),
        (np.zeros((3, 5)), "x must have 6 columns, got 5"),
        (pl.DataFrame(COLUMNS).lazy(), "x must be an array or a DataFrame in memory, got LazyFrame"),
        (pd.concat([FRAME, FRAME], axis=1), "x must have columns of different names, got 'area' twice"),
    ],
)
def test_other_tables_are_refused(x, message):
    columns, _ = TableEncoder.fit(FRAME, Y)
    with pytest.raises(ValueError, match=message), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of polars, of the names of a lazy table
        columns.transform(x)


# --- A column is at prediction what it was in training ---------------------------------------------------------------


def fitted(values, name="c"):
    """The columns of a table with one column, whose levels or numbers each have ten rows."""
    return TableEncoder.fit(pd.DataFrame({name: values}))[0]


def features(columns, values, name="c"):
    return columns.transform(pd.DataFrame({name: values})).tolist()


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
    columns = fitted(training)
    for values in same:
        assert features(columns, values) == [[1, 0], [0, 1]]
        for library in (pl.DataFrame, pa.table):
            if not isinstance(values, pd.Categorical):
                assert columns.transform(library({"c": list(values)})).tolist() == [[1, 0], [0, 1]]


def test_arrow_levels_of_single_precision_match_their_decimals():
    levels = pa.table({"c": pa.array(np.float32([0.1, 0.2] * 10)).dictionary_encode()})
    for training, new in (
        (levels, pd.DataFrame({"c": ["0.1", "0.2"]})),
        (pd.DataFrame({"c": pd.Categorical(["0.1", "0.2"] * 10)}), levels[:2]),
    ):
        assert TableEncoder.fit(training)[0].transform(new).tolist() == [[1, 0], [0, 1]]


def test_levels_of_mixed_types_match_cell_by_cell():
    columns = fitted(["1", "a", "True"] * 10)
    assert features(columns, np.array([1, "a", True], object)) == np.eye(3)[[0, 2, 1]].tolist()


def test_durations_are_days_and_nothing_else_is_a_duration():
    columns = fitted(pd.to_timedelta(np.arange(40) % 7, "h"))
    assert str(columns) == "c: durations in days, median 0.125, deviation 0.0819"
    hours = pd.to_timedelta([6, 12], "h")
    for values in (hours, np.array(hours.to_pytimedelta(), object), hours.to_numpy()):
        assert features(columns, values) == [[0.25], [0.5]]
    for values, found in (([1.0], "numbers"), (["1 days"], "text"), (pd.date_range("2024-01-01", periods=1), "dates")):
        with pytest.raises(ValueError, match=f"x must hold durations in column 'c', got {found}"):
            features(columns, values)


def test_times_of_day_are_durations_since_midnight():
    times = [datetime.time(6), datetime.time(12, 30), None] * 10
    arrow = pd.array(times, dtype=pd.ArrowDtype(pa.time64("us")))
    for table in (
        pd.DataFrame({"c": times}),
        pl.DataFrame({"c": times}),
        pa.table({"c": times}),
        pd.DataFrame({"c": arrow}),
    ):
        columns, found = TableEncoder.fit(table)
        assert found[:3].tolist() == [[0.25, 0], [12.5 / 24, 0], [18.5 / 48, 1]]
        np.testing.assert_array_equal(columns.transform(table), found)
    assert features(columns, pd.to_timedelta([6], "h")) == [[0.25, 0]]


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
    columns = fitted(training)
    for times in (1, 5, 100):
        rows = len(values) * times
        with pytest.warns(ColumnsWarning, match=rf"training rows did not have: 'c' \({rows} rows?\)$"):
            assert features(columns, np.tile(values, times)) == [[0, 0]] * rows


def test_unseen_levels_are_counted_in_one_warning():
    columns = TableEncoder.fit(FRAME, Y)[0]
    new = FRAME.head(6).assign(heating=["gas", "coal", None, "coal", "oil", "gas"], city=["city 1"] * 5 + ["nowhere"])
    new["area"] = 70.0
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        columns.transform(new)
    said = "x has levels that the training rows did not have: 'heating' (2 rows), 'city' (1 row)"
    assert [str(one.message) for one in warned] == [said]


def test_rare_levels_of_the_training_rows_are_known():
    training = pd.DataFrame({"c": ["a"] * 20 + ["b"] * 20 + ["c"] * 4})
    columns = TableEncoder.fit(training)[0]
    assert columns.transform(training[40:]).tolist() == [[0, 0, 1]] * 4  # without a warning


def test_levels_called_other_and_missing_have_names_of_their_own():
    values = ["other", "missing", None, "x"] * 10 + ["rare"]
    names = fitted(values).feature_names
    assert names == ["[c = missing]", "[c = other]", "[c = x]", "[c other]", "[c missing]"]


def test_whole_numbers_that_float64_merges_are_not_called_constant():
    ids = [10**18 + i for i in range(50)]
    with pytest.raises(ValueError, match=r"'c' \(whole numbers that double precision cannot distinguish\)"):
        fitted(ids)
    assert fitted([str(i) for i in ids] * 10).schema.columns["c"].training_levels[:2] == (str(10**18), str(10**18 + 1))


# --- Dates -----------------------------------------------------------------------------------------------------------

BERLIN = pd.date_range("2024-03-01", periods=60, tz="Europe/Berlin")


def test_aware_dates_count_local_days():
    naive = fitted(BERLIN.tz_localize(None))
    for values in (BERLIN, BERLIN.tz_convert("UTC"), BERLIN.to_pydatetime(), BERLIN.strftime("%Y-%m-%dT%H:%M%z")):
        columns = fitted(BERLIN)
        assert features(columns, values) == features(naive, BERLIN.tz_localize(None))
    saturday = BERLIN.day_of_week == 5
    columns, _ = TableEncoder.fit(pd.DataFrame({"c": BERLIN}), 1.0 * saturday + np.arange(60) / 1e3)
    by_weekday = columns.transform(pd.DataFrame({"c": BERLIN}))[:, columns.feature_names.index("[mean y by c weekday]")]
    np.testing.assert_array_equal(by_weekday == by_weekday.max(), saturday)


def test_aware_and_naive_dates_do_not_mix():
    naive, aware = BERLIN.tz_localize(None), BERLIN
    with pytest.raises(ValueError, match=r"dates with a time zone in column 'c', got dates without one"):
        features(fitted(aware), naive)
    with pytest.raises(ValueError, match=r"without a time zone in column 'c', got dates with one \(Europe/Berlin\)"):
        features(fitted(naive), aware)
    with pytest.raises(ValueError, match=r"dates without a time zone in column 'c', got '2024-03-01T00:00Z' in row 0"):
        features(fitted(naive), naive.strftime("%Y-%m-%dT%H:%MZ"))
    with pytest.raises(ValueError, match="dates that all have a time zone, or all have none"):
        fitted([*naive.to_pydatetime()[:3], *aware.to_pydatetime()[3:]])


@pytest.mark.parametrize(
    "text", ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%d %b %Y", "%Y/%m/%d"]
)
def test_dates_in_text_are_dates(text):
    days = BERLIN.tz_localize(None)
    assert features(fitted(days.strftime(text)), days.strftime(text)) == features(fitted(days), days)
    assert features(fitted(days.strftime(text)), days) == features(fitted(days), days.strftime("%Y-%m-%d"))


def test_dates_that_end_in_z_are_aware_dates():
    columns = fitted(BERLIN.tz_convert("UTC").strftime("%Y-%m-%dT%H:%MZ"))
    assert columns.schema.columns["c"].zone == "offsets" and "local days" in str(columns)


# --- Text that is a number -------------------------------------------------------------------------------------------


def test_money_and_percentages_in_text_are_numbers():
    frame = pd.DataFrame({"price": [f"${100 * i:,}" for i in range(40)], "part": [f"{i % 9}%" for i in range(40)]})
    columns, own = TableEncoder.fit(frame)
    np.testing.assert_array_equal(own, np.column_stack([100 * np.arange(40), np.arange(40) % 9]))
    assert "numbers in text such as '$0'" in str(columns) and "numbers in text such as '0%'" in str(columns)
    new = pd.DataFrame({"price": ["$1,234.50", None, "NA"], "part": ["12.5%", "3", "0%"]})
    with pytest.warns(ColumnsWarning, match=r"missing values .*'price' \(2 rows\)"):
        assert columns.transform(new)[:, 1].tolist() == [12.5, 3, 0]
    assert columns.transform(pd.DataFrame({"price": [7.5], "part": [2]})).tolist() == [[7.5, 2]]


def test_plain_numbers_in_text_are_numbers_as_in_a_file_and_warned_of():
    frame = pd.DataFrame({"age": ["34", "51", "?", "28", None, "N/A"] * 10, "zip": ["01067", "99084"] * 30})
    columns, features = TableEncoder.fit(frame)
    np.testing.assert_array_equal(features[:6, 0], [34, 51, 34, 28, 34, 34])
    assert columns.feature_names == ["age", "[age missing]", "[zip = 01067]", "[zip = 99084]"]
    with pytest.warns(ColumnsWarning) as warned:
        columns.schema.warn()
    assert [str(one.message) for one in warned] == [
        "columns of x may mean something else: 'age' (numbers in text): columns={'age': 'text'} reads them otherwise"
    ]
    levels = TableEncoder.fit(frame, columns={"age": "text"})[0]
    column = levels.schema.columns["age"]
    assert column.levels == ("28", "34", "51", "?", "N/A") and column.missing == 10
    for values in (["1", "2", "3"], ["1%", "2%", "3%"]):  # the way to keep text
        assert fitted(pd.Categorical(values * 10)).schema.columns["c"].kind == "text"


STRAYS = {
    "age": [*map(str, range(20, 58)), "-", "n.a."],
    "when": [f"2024-01-{i % 28 + 1:02}" for i in range(38)] + ["-", "soon"],
    "income": [f"${i},000" for i in range(1, 39)] + ["-", "secret"],
    "rate": [f"{i},5" for i in range(40)],
    "size": list(map(float, range(40))),
}


@pytest.mark.parametrize("library", [pd.DataFrame, pl.DataFrame, pa.table])
def test_texts_among_numbers_and_dates_are_refused_all_at_once(library):
    table = library(STRAYS)
    said = (
        r"got 'age' holds numbers or dates, and the texts '-', 'n.a.'; 'when' holds .* '-', 'soon'; 'income' holds .* "
        r"'-', 'secret'; 'rate' has a decimal comma, as in '0,5'\. Read such texts as missing values with missing="
    )
    with pytest.raises(ValueError, match=said):
        jtrees.fit(GET, table, np.arange(40.0), key=KEY)
    with pytest.raises(ValueError, match=r"missing must be texts, such as .*, got '-'"):
        jtrees.fit(GET, table, np.arange(40.0), key=KEY, missing="-")


@pytest.mark.parametrize("library", [pd.DataFrame, pl.DataFrame, pa.table])
def test_missing_says_which_texts_are_missing_values(library, tmp_path):
    names = ("age", "when", "income")
    table = library({name: STRAYS[name] for name in names} | {"kind": ["a", "b", "-", "?"] * 10})
    missing = ("-", "n.a.", "soon", "secret")
    columns, features = TableEncoder.fit(table, missing=missing)
    kinds = {name: column.kind for name, column in columns.schema.columns.items()}
    assert kinds == {"age": "number", "when": "date", "income": "number", "kind": "text"}
    kind = columns.schema.columns["kind"]
    assert kind.levels == ("?", "a", "b") and kind.missing == 10
    np.testing.assert_array_equal(columns.transform(table), features)
    new = pd.DataFrame({"age": [31, "-"], "when": ["2024-01-05", "soon"], "income": ["-", "$7"], "kind": ["-", "N/A"]})
    found = dict(zip(columns.feature_names, columns.transform(new).T, strict=True))
    assert found["[age missing]"].tolist() == [0, 1] == found["[when missing]"].tolist()
    assert found["[income missing]"].tolist() == [1, 0] and found["[kind missing]"].tolist() == [1, 1]
    tree = jtrees.ObliqueTree(
        np.eye(features.shape[1], dtype="f4")[-1:], np.float32([-0.5]), jtrees.leaves.Values(np.float32([1, 2]))
    )
    jtrees.export.to_numpy(FrameModel(tree, columns), tmp_path / "model.py")
    exported = runpy.run_path(str(tmp_path / "model.py"))
    np.testing.assert_array_equal(exported["predict"](new), FrameModel(tree, columns).predict(new))


@pytest.mark.slow
def test_missing_is_an_argument_of_every_fit():
    frame, y = pd.DataFrame({"age": STRAYS["age"]}), np.arange(40.0) % 11
    given = {"key": KEY, "missing": ("-", "n.a.")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ColumnsWarning)
        fits = [
            jtrees.fit(GET, frame, y, **given),
            jtrees.tune(GET, frame, y, grid={"depth": [1, 2]}, **given),
            *jtrees.sweep(GET, frame, y, **given).fits.ravel(),
        ]
        model = TreeRegressor(GET, random_state=0, missing=("-", "n.a.")).fit(frame, y)
    for columns in (*(fit.model.encoder for fit in fits), model.encoder_):
        assert columns.feature_names == ["age", "[age missing]"]


def test_objects_of_numbers_and_texts():
    """As Excel gives them."""
    values = np.array([34, "?", 51, None, 28.5] * 10, object)
    assert TableEncoder.fit(pd.DataFrame({"c": values}))[1][:5].tolist() == [
        [34, 0],
        [34, 1],
        [51, 0],
        [34, 1],
        [28.5, 0],
    ]
    values[[1, 6]] = "-", "n.a."
    with pytest.raises(ValueError, match=r"got 34 in row 0 and '-' in row 1 of 'c'; missing=\('-', 'n.a.'\) reads"):
        TableEncoder.fit(pd.DataFrame({"c": values}))
    columns, features = TableEncoder.fit(pd.DataFrame({"c": values}), missing=("-", "n.a."))
    assert columns.schema.columns["c"].missing == 20
    np.testing.assert_array_equal(columns.transform(pd.DataFrame({"c": values})), features)


def test_the_wrong_cell_is_blamed():
    columns = fitted(np.arange(200.0) ** 2)
    cells = [f"{i}.0" for i in range(200)]
    assert features(columns, cells) == [[float(i)] for i in range(200)]
    cells[150] = "forty"
    with pytest.raises(ValueError, match="x must hold numbers in column 'c', got 'forty' in row 150"):
        features(columns, cells)
    cells[150] = "1e999"
    with pytest.raises(ValueError, match="x must hold finite numbers, got inf in column 'c', row 150"):
        features(columns, cells)
    booleans = fitted([True, False] * 10)
    assert features(booleans, ["true", "FALSE", "1"]) == [[1], [0], [1]] and features(booleans, [1, 0]) == [[1], [0]]
    with pytest.raises(ValueError, match=r"x must hold booleans, or 0 and 1, in column 'c', got .*2.0.* in row 1"):
        features(booleans, [1, 2])


def test_a_date_whose_order_is_open_stays_text_and_is_warned_of():
    frame = pd.DataFrame({"when": ["03/04/2024", "05/06/2024"] * 20, "size": np.arange(40) % 7})
    with pytest.warns(ColumnsWarning, match="may mean something else: 'when' .*'03/04/2024', '%d/%m/%Y' or"):
        jtrees.fit(GET, frame, np.arange(40) % 3, key=KEY)


def test_reasons_for_leaving_a_column_out_are_true():
    texts = [f"text {i}" for i in range(70)] + ["text 0"] * 30
    columns = TableEncoder.fit(pd.DataFrame({"c": texts, "size": np.arange(100) % 7}))[0]
    assert str(columns).splitlines()[0] == "c: left out: 71 different texts in 100 rows".replace("71", "70")


# --- Every row by itself ---------------------------------------------------------------------------------------------


def test_no_rows_are_no_features():
    columns = TableEncoder.fit(FRAME, Y)[0]
    for table in (FRAME[:0], pl.DataFrame(COLUMNS)[:0], pa.table(COLUMNS)[:0]):
        assert columns.transform(table).shape == (0, len(columns.feature_names))


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_a_row_has_the_features_that_it_has_alone(data):
    columns = TableEncoder.fit(FRAME, Y)[0]
    drawn = data.draw(st.lists(st.integers(0, N - 1), min_size=1, max_size=6))
    library = data.draw(st.sampled_from(sorted(LIBRARIES)))
    rows = FRAME.iloc[drawn].reset_index(drop=True)
    if library.startswith("pandas"):
        rows = rows.convert_dtypes() if "nullable" in library else rows
        rows = rows.astype(object) if "objects" in library else rows
    elif library == "Arrow":
        rows = pa.table({name: [COLUMNS[name][i] for i in drawn] for name in COLUMNS})
    else:
        rows = pl.DataFrame({name: [COLUMNS[name][i] for i in drawn] for name in COLUMNS})
    np.testing.assert_array_equal(columns.transform(rows), columns.transform(FRAME)[drawn])


# --- Fits ------------------------------------------------------------------------------------------------------------


def test_a_fit_is_that_of_its_features_and_is_saved_with_its_columns(tmp_path):
    columns, features = TableEncoder.fit(FRAME, Y)
    fit, own = jtrees.fit(GET, FRAME, Y, key=KEY), jtrees.fit(GET, features, Y, key=KEY)
    assert isinstance(fit.model, FrameModel) and fit.model.encoder == columns and fit.loss == own.loss
    expected = own.predict(columns.transform(FRAME))
    np.testing.assert_array_equal(fit.predict(FRAME), expected)
    shuffled = pl.DataFrame(COLUMNS).select("new", "city", "sold", "heating", "rooms", "area")
    jtrees.save(fit, tmp_path / "fit.jtrees")
    loaded = jtrees.load(tmp_path / "fit.jtrees")
    assert loaded.model.encoder == columns
    np.testing.assert_array_equal(loaded.predict(shuffled), expected)
    np.testing.assert_array_equal(loaded.model.leaf_index(shuffled), own.tree.leaf_index(columns.transform(FRAME)))
    assert loaded.model.decision_path(shuffled).shape == (3, N)
    text = loaded.model.to_text(x=FRAME)
    assert text == own.tree.to_text(columns.feature_names, x=columns.transform(FRAME)) and "[heating = gas]" in text


@pytest.mark.wide
def test_a_validation_set_and_tuning():
    others, targets = table(100, seed=1)
    held_out = pd.DataFrame(others), targets
    fit = jtrees.fit(GET, FRAME, Y, key=KEY, validation=held_out)
    assert fit.loss == pytest.approx(np.mean((fit.predict(held_out[0]) - targets) ** 2), rel=1e-5)
    tuned = jtrees.tune(GET, FRAME, Y, key=KEY, grid={"depth": [1, 2]}, validation=0.3)
    assert isinstance(tuned.model, FrameModel) and tuned.predict(held_out[0]).shape == (100,)
    swept = jtrees.sweep(GET, FRAME, Y, key=KEY, seeds=2, validation=3)
    assert all(isinstance(one.model, FrameModel) for one in swept.fits.ravel())


@pytest.mark.slow
def test_rows_of_weight_zero_are_not_there():
    weight = np.random.default_rng(0).integers(0, 3, N).astype(float)
    fit = jtrees.fit(GET, FRAME, Y, key=KEY, sample_weight=weight)
    used = weight > 0
    alone = jtrees.fit(GET, FRAME[used], Y[used], key=KEY, sample_weight=weight[used])
    assert fit.model.encoder == alone.model.encoder
    np.testing.assert_array_equal(fit.predict(FRAME), alone.predict(FRAME))


@pytest.mark.slow
def test_arrays_with_gaps():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 3))
    y = np.where(x[:, 0] > 0, 1.0, -1.0) + x[:, 1]
    x[rng.random(N) < 0.2, 1] = np.nan
    fit = jtrees.fit(GET, x, y, key=KEY)
    assert fit.model.encoder.feature_names == ["x0", "x1", "[x1 missing]", "x2"]
    np.testing.assert_array_equal(fit.predict(x), fit.predict(pd.DataFrame(x, columns=["u", "v", "w"])))  # by place
    assert fit.predict(np.nan_to_num(x)).shape == (N,)
    with pytest.raises(ValueError, match="x must be finite, got"):
        jtrees.fit(GET, np.nan_to_num(x), y, key=KEY).predict(x)
    assert read_frame(np.nan_to_num(x)) is None


@pytest.mark.slow
def test_estimators_take_frames(tmp_path):
    labels = np.where(np.median(Y) < Y, "dear", "cheap")
    model = TreeClassifier(GET, random_state=0, validation_fraction=0.2).fit(FRAME, labels)
    assert model.score(FRAME, labels) > 0.8 and model.n_features_in_ == 6
    assert list(model.feature_names_in_) == list(FRAME.columns)
    assert list(model.get_feature_names_out()) == model.encoder_.feature_names
    assert model.get_depth() == 2 and model.apply(FRAME).shape == (N,)
    jtrees.save(model, tmp_path / "model.jtrees")
    np.testing.assert_array_equal(jtrees.load(tmp_path / "model.jtrees").predict(FRAME), model.predict(FRAME))
    with pytest.raises(ValueError, match="feature names"):
        model.predict(FRAME[["rooms", "area", "heating", "city", "sold", "new"]])  # as everywhere in scikit-learn
    regressor = TreeRegressor(GET, random_state=0).fit(pl.DataFrame(COLUMNS), Y, sample_weight=np.arange(N) % 3)
    assert regressor.score(pl.DataFrame(COLUMNS), Y) > 0.4
    constant = TreeRegressor(GET).fit(FRAME, np.ones(N))
    assert (constant.predict(FRAME) == 1).all() and constant.encoder_.feature_names
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        TreeRegressor(GET).fit(FRAME, Y[1:])


@pytest.mark.slow
def test_estimators_take_arrays_with_gaps():
    x = np.random.default_rng(0).normal(size=(N, 2))
    y = np.where(x[:, 0] > 0, 1.0, -1.0)
    x[::5, 0] = np.nan
    model = TreeRegressor(GET, random_state=0).fit(x, y)
    assert list(model.get_feature_names_out()) == ["x0", "[x0 missing]", "x1"]
    assert model.score(x, y) > 0.5
    x[3, 1] = np.nan
    with pytest.warns(ColumnsWarning, match=r"'x1' \(1 row\)"):
        model.predict(x)
    with pytest.raises(ValueError, match="Input X contains infinity"):
        model.predict(np.where(np.isnan(x), np.inf, x))


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [TreeRegressor, TreeClassifier])
def test_estimators_fill_gaps_that_the_training_array_did_not_have(estimator, tmp_path):
    """They say that they allow NaN."""
    x = np.random.default_rng(0).normal(size=(60, 3)) + np.array([0, 5, 0])
    y = (x[:, 0] > 0).astype(int)
    new = x.copy()
    new[[1, 4], 1], new[2, 2] = np.nan, np.nan
    filled = np.where(np.isnan(new), np.median(x, axis=0), new)
    for targets in (y, np.ones(60, int)):
        model = estimator(jtrees.CO2(depth=2, epochs=2), random_state=0).fit(x, targets)
        assert model.__sklearn_tags__().input_tags.allow_nan
        jtrees.save(model, tmp_path / "model")
        for fitted_model in (model, jtrees.load(tmp_path / "model")):
            with pytest.warns(ColumnsWarning, match=r"typical values: 'x1' \(2 rows\), 'x2' \(1 row\)"):
                found = fitted_model.predict(new)
            np.testing.assert_array_equal(found, model.predict(filled))
        with pytest.raises(ValueError, match="infinity"):
            model.predict(np.where(np.isnan(new), np.inf, new))


def test_numbers_of_many_kinds():
    frame = pd.DataFrame(
        {
            "money": [Decimal("1.5"), None, Decimal("2")],
            "time": pd.to_timedelta([36, 12, None], "h"),
            "zone": pd.to_datetime(["2020-01-01T01:00+02:00", None, "2020-01-02T12:00+02:00"]),
            "aware": [
                datetime.datetime(2020, 1, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=2))),
                None,
                None,
            ],
            "nat": [np.datetime64("NaT", "ms"), np.datetime64("2020-01-01"), None],
        }
    )
    columns = read_frame(frame).columns
    assert [column.kind for column in columns.values()] == ["number", "number", "date", "date", "date"]
    day = (datetime.date(2020, 1, 1) - datetime.date(1970, 1, 1)).days
    np.testing.assert_allclose(columns["money"].values, [1.5, np.nan, 2])
    np.testing.assert_allclose(columns["time"].values, [1.5, 0.5, np.nan])
    np.testing.assert_allclose(columns["zone"].values, [day + 1 / 24, np.nan, day + 1 + 12 / 24], rtol=1e-12)
    np.testing.assert_allclose(columns["aware"].values, [day + 1 / 24, np.nan, np.nan], rtol=1e-12)
    np.testing.assert_allclose(columns["nat"].values, [np.nan, day, np.nan])
