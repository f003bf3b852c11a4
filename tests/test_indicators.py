"""Features of levels: which columns of text have indicators or means, within the budget of a table."""

import numpy as np
import pandas as pd
import pytest

from jtrees.tables import TableEncoder

RNG = np.random.default_rng(0)
N = 400


def levels(count, n=N):
    """A column of ``count`` levels, the first of which is the most common."""
    weights = np.arange(count, 0, -1.0)
    return RNG.choice([f"level {i}" for i in range(count)], n, p=weights / weights.sum())


def names(columns, y=None):
    return TableEncoder.fit(pd.DataFrame(columns), y)[0].feature_names


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["a"] * 60 + ["b"] * 40, ["[c = b]"]),
        (["a"] * 40 + ["b"] * 60, ["[c = a]"]),
        (["a"] * 50 + ["b"] * 50, ["[c = b]"]),
        (["a"] * 97 + [None] * 3, ["[c missing]"]),
        (["a"] * 3 + [None] * 97, ["[c = a]"]),
        (["a"] * 97 + ["b", "d", "e"], ["[c other]"]),
        (["a"] * 60 + ["b"] * 38 + [None] * 2, ["[c = b]"]),
        (["a"] * 60 + ["b"] * 35 + [None] * 5, ["[c = a]", "[c = b]", "[c missing]"]),
        (["a"] * 60 + ["b"] * 35 + [None] * 3 + ["d", "e"], ["[c = b]"]),
        (["a"] * 60 + ["b"] * 30 + ["d", "e"] * 3 + [None] * 4, ["[c = a]", "[c = b]", "[c other]"]),
    ],
)
def test_indicators_of_a_column(cells, expected):
    encoder, training = TableEncoder.fit(pd.DataFrame({"c": cells}))
    assert encoder.feature_names == expected
    text = pd.Series(cells)
    rows = text.isna() if expected == ["[c missing]"] else text == expected[0][5:-1]
    rows = ~text.isin(["a"]) if expected == ["[c other]"] else rows
    np.testing.assert_array_equal(training[:, 0], rows)
    np.testing.assert_array_equal(encoder.transform(pd.DataFrame({"c": cells})), training)


def test_few_missing_numbers_are_filled_without_an_indicator():
    rare, gaps = (np.where(np.arange(60) < count, np.nan, np.arange(60.0)) for count in (4, 5))
    assert names({"rare": rare, "gaps": gaps}) == ["rare", "gaps", "[gaps missing]"]


def test_an_indicator_that_equals_an_earlier_one_or_its_complement_is_left_out():
    size = np.where(np.arange(N) % 4 == 0, np.nan, np.arange(N))
    missing = np.isnan(size)
    kind = np.where(missing, None, levels(3))
    columns = {
        "size": size,
        "age": np.where(missing, np.nan, 1.0 * (np.arange(N) % 7)),
        "kind": kind,
        "has": np.where(missing, "no", "yes"),
        "again": np.where(missing, "no", kind),
    }
    actual = names(columns)
    assert actual == [
        "size",
        "[size missing]",
        "age",
        *(f"[kind = level {i}]" for i in range(3)),
        "[has = no]",  # a column has a feature in any case
        "[again = level 0]",
    ]


@pytest.mark.parametrize("columns", [1, 3, 20, 60])
def test_a_table_keeps_within_its_budget_and_the_smallest_columns_have_indicators(columns):
    sizes = [2 + i % 14 for i in range(columns)]
    table = {"x": np.arange(float(N)), **{f"c{i}": levels(size) for i, size in enumerate(sizes)}}
    encoder = TableEncoder.fit(pd.DataFrame(table), np.arange(N) % 5)[0]
    assert len(encoder.feature_names) <= max(2 * len(table), 16)
    schemas = [encoder.schema.columns[f"c{i}"] for i in range(columns)]
    largest = max((size for size, column in zip(sizes, schemas, strict=True) if not column.by_mean), default=0)
    assert largest <= 10 and all(not c.by_mean for size, c in zip(sizes, schemas, strict=True) if size < largest)
    full = len(encoder.feature_names) + largest + 1 - 2 > max(2 * len(table), 16)
    assert full or all(column.by_mean == (size > 10) for size, column in zip(sizes, schemas, strict=True))


def marked(rows, sizes):
    """Returns the numbers of levels of the columns that have indicators, in a table without numbers."""
    cells = {str(size): np.resize([f"level {k:02}" for k in range(size)], rows) for size in sizes}
    columns = TableEncoder.fit(pd.DataFrame(cells), np.arange(rows) % 7)[0].schema.columns
    return [size for size in sizes if columns[str(size)].indicators]


def test_a_long_table_has_indicators_of_up_to_32_levels_of_thirty_rows():
    """Target means hide a level whose effect depends on another column."""
    assert [marked(rows, [20]) for rows in (599, 600)] == [[], [20]]
    assert [marked(rows, [32]) for rows in (959, 960)] == [[], [32]] and marked(5000, [33]) == []


def test_a_long_table_has_up_to_64_features_of_thirty_rows():
    sizes = [11, 13, 17, 19, 23]
    assert [len(marked(rows, sizes)) for rows in (320, 850, 1300, 50_000)] == [0, 2, 3, 4]


@pytest.mark.parametrize(("rare", "missing", "indicators"), [(4, 0, 6), (5, 0, 0), (3, 5, 7), (4, 5, 0), (4, 3, 0)])
def test_rare_levels_count_and_missing_values_count_as_a_level(rare, missing, indicators):
    cells = [f"level {i}" for i in range(6) for _ in range(20)] + [f"rare {i}" for i in range(rare)] + [None] * missing
    actual = names({"c": cells}, np.arange(len(cells)))
    assert len(actual) == (indicators or 1) and (actual[0] == "[mean y by c]") == (not indicators)


def test_means_of_residuals_compare_levels_at_equal_numbers():
    """As the clarity of diamonds, whose large ones are rarely clear: the better the level, the lower its mean."""
    rng = np.random.default_rng(0)
    quality = rng.integers(0, 40, 8000)
    size = 20 - 0.3 * quality + 3 * rng.normal(size=8000)
    y = 10 * size + quality + rng.normal(size=8000)
    table = pd.DataFrame({"size": size, "quality": [f"q{i:02}" for i in quality]})
    encoder, training = TableEncoder.fit(table, y)
    assert encoder.feature_names == ["size", "[mean y by quality]", "[mean residual of y by quality]"]
    _, means, residuals = encoder.transform(table).T
    assert np.corrcoef(quality, means)[0, 1] < -0.99 and np.corrcoef(quality, residuals)[0, 1] > 0.99
    expected = y - np.polyval(np.polyfit(size, y, 1), size)
    level_means = pd.Series(expected).groupby(quality).transform("mean")
    np.testing.assert_allclose(residuals, level_means, atol=0.1)
    assert np.corrcoef(training[:, 2], residuals)[0, 1] > 0.99


def test_means_of_residuals_need_a_column_of_numbers_and_ignore_weights_of_zero():
    y, cells = np.arange(N) % 7, levels(15)
    assert names({"c": cells}, y) == ["[mean y by c]"]
    table, heavy = pd.DataFrame({"x": RNG.normal(size=N), "c": cells}), np.arange(N) % 2 + 0.0
    weights = np.where(heavy, 1.0, 1e-30)
    means = TableEncoder.fit(table, y, sample_weight=weights)[0].encodings["c"].lookups["level"].table
    other = TableEncoder.fit(table, np.where(heavy, y, 1e3), sample_weight=weights)[0].encodings["c"]
    np.testing.assert_allclose(other.lookups["level"].table, means, atol=1e-6)


@pytest.mark.parametrize("classes", [3, 8, 40])
def test_columns_have_at_most_six_means_of_classes_those_that_the_levels_explain(classes):
    rng = np.random.default_rng(0)
    city = rng.integers(0, 40, 8000)
    y = np.where(city == 3, 1, np.where(city == 4, 2, rng.integers(0, classes, 8000)))
    table = pd.DataFrame({"x": rng.normal(size=8000), "city": [f"city {i:02}" for i in city]})
    encoder, training = TableEncoder.fit(table, y, task="classification")
    assert training.shape[1] == len(encoder.feature_names) == 7
    actual = dict(zip(encoder.feature_names, encoder.transform(table).T, strict=True))
    assert {"[mean class 1 by city]", "[mean residual of class 2 by city]"} <= set(actual)
    means = actual["[mean class 1 by city]"]
    np.testing.assert_array_equal(means == means.max(), city == 3)
    assert means.max() > 0.95
    labels = encoder.with_class_names([f"label {i}" for i in range(classes)]).feature_names
    assert {"[mean label 1 by city]", "[mean residual of label 2 by city]"} <= set(labels)


def test_residuals_of_many_rows_and_columns_take_bounded_time():
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(300, 2000)), columns=[f"x{j}" for j in range(2000)])
    table["c"] = levels(12, 300)
    table.insert(0, "constant but once", np.arange(300) == 0)
    encoder, training = TableEncoder.fit(table, table["x1999"] + 0.1 * rng.normal(size=300))
    assert np.isfinite(training).all() and encoder.feature_names[-1] == "[mean residual of y by c]"
