"""Cells of text: which are numbers, dates and levels, and which stay text."""

import datetime
from decimal import Decimal

from hypothesis import given, strategies as st
import numpy as np
import pandas as pd
import pytest

from jtrees.tables.cells import PLAIN, Reading, find_reading, readable_groups
from jtrees.tables.parse import level_of, number_of


def values(cells, **how):
    """The numbers that the cells are found to be, or None for text."""
    reading = find_reading(cells, **how).reading
    if reading is None:
        return None
    numbers, wrong = reading.read(cells)
    assert not wrong.any()
    return numbers.tolist()


def day(year, month, day):
    return (datetime.date(year, month, day) - datetime.date(1970, 1, 1)).days


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["$1,200", "$900.50", "-$3"], [1200, 900.5, -3]),
        (["1.983 €", "955 €", "12.050 €"], [1983, 955, 12050]),
        (["1.983,50 €", "955 €"], [1983.5, 955]),
        (["1,50 €", "955 €"], [1.5, 955]),
        (["0.755 kg", "1.250 kg"], [0.755, 1.25]),
        (["12%", "12.5 %"], [12, 12.5]),
        (["3kg", "10kg"], [3, 10]),
        (["1", "\N{MINUS SIGN}2.5", "\N{MINUS SIGN}30"], [1, -2.5, -30]),
        (["1,234.5", "(1,234)", "(0.5)"], [1234.5, -1234, -0.5]),
        (["$5", "($1,200)", "\N{MINUS SIGN}$3"], [5, -1200, -3]),
        (["2 bedrooms", "3 bedrooms"], [2, 3]),
        (["1 200 €", "12 345 678 €"], [1200, 12345678]),
        (["1'200", "999"], [1200, 999]),
        (["3 380,3", "2 612,1", "955,0"], [3380.3, 2612.1, 955]),
        (["3 380.5", "12"], [3380.5, 12]),
        (["Rs. 3,380", "Rs. 955"], [3380, 955]),
        (["kr 955", "-kr 12"], [955, -12]),
        (["AED 3,380", "AED -955"], [3380, -955]),
        (["approx. 3.5 kg", "approx. 12 kg"], [3.5, 12]),
        (["2612 kg", "955 kg", "3380"], [2612, 955, 3380]),
        (["1", "2.5", "-3e2", "+.5", "0", "-0"], [1, 2.5, -300, 0.5, 0, 0]),
        (["TRUE", "false"], [1, 0]),
        (["2024-05-31", "1969-12-31"], [day(2024, 5, 31), -1]),
        (["2024-05-31 12:00", "2024-05-31T18:00:00.000"], [day(2024, 5, 31) + 0.5, day(2024, 5, 31) + 0.75]),
        (["31/05/2024", "01/06/2024"], [day(2024, 5, 31), day(2024, 6, 1)]),
        (["05/31/2024", "06/01/2024"], [day(2024, 5, 31), day(2024, 6, 1)]),
        (["5/31/19", "06/01/68 6:00 PM"], [day(2019, 5, 31), day(2068, 6, 1) + 0.75]),
        (["31/05/69", "01/06/00"], [day(1969, 5, 31), day(2000, 6, 1)]),
        (["31.05.19", "1.6.99"], [day(2019, 5, 31), day(1999, 6, 1)]),
        (["2024-05-31", "1.6.2024"], [day(2024, 5, 31), day(2024, 6, 1)]),
        (["31.5.2024", "2024-06-01"], [day(2024, 5, 31), day(2024, 6, 1)]),
        (["31.5.2024", "1.6.2024"], [day(2024, 5, 31), day(2024, 6, 1)]),
        (["5/31/2024 12:30 AM", "6/1/2024 6:00:00PM"], [day(2024, 5, 31) + 0.5 / 24, day(2024, 6, 1) + 0.75]),
        (["31 May 2024", "1 June 2024"], [day(2024, 5, 31), day(2024, 6, 1)]),
        (["May 31, 2024", "Jun 1, 2024"], [day(2024, 5, 31), day(2024, 6, 1)]),
        (["2024-05-31T23:30Z", "2024-06-01T00:30+02:00"], [day(2024, 5, 31) + 23.5 / 24, day(2024, 6, 1) + 0.5 / 24]),
    ],
)
def test_numbers_with_a_unit_and_dates_are_read_in_files_and_frames(cells, expected):
    assert values(cells) == expected


@pytest.mark.parametrize(
    "cells",
    [
        *("12%,3 kg", "$3,3", "A1,A2", "12A,13A", "$01,$02", "1 Main St,2 Oak St", "100 101,200 201", "1 A,5 A"),
        *(
            "3 Marble 2024,1 May 2024",
            "2024-02-30,2024-01-01",
            "2024-01-01,2024-01-01T00:00Z",
            "31/05/24,01/06/2024",
            "03/04/19,05/06/19",
            "31/05/2024 13:00 PM",
        ),
        *("city 1,city 2", "PC 1,2,3", "kr 1,AED 2", "16:9,4:3"),
        *("(1),(2)", "1,(a)", "((1)),2", "gas,oil", ", ", "01,02,13", "-007,1", "00.5,1", "1,2A", "1_000,2", "0x1,2"),
    ],
)
def test_other_text_and_codes_stay_text(cells):
    assert values(cells.split(",")) is None


def test_comma_numbers_have_a_decimal_comma_and_a_note():
    assert values(["1,20", "3,40"]) == values(["1,2000", "3,400"]) == [1.2, 3.4]
    _, note, otherwise = find_reading(["1,20", "3"])
    assert note == "'1,20' is read as 1.2, with a decimal comma" and otherwise == "text"
    assert values(["1,20", "3,40"], decimal=".") is None


def test_whole_numbers_that_double_precision_merges_stay_text():
    ids = [str(10**18 + i) for i in range(50)]
    assert values(ids) is None
    assert "double precision" in find_reading(ids).note
    assert values([str(1000 * i + 10**18) for i in range(50)]) == [1000.0 * i + 10**18 for i in range(50)]


def test_a_decimal_comma():
    assert values(["1,5", "2"], decimal=",") == [1.5, 2]
    assert values(["1.200,50 €", "3 €"], decimal=",") == [1200.5, 3]
    assert values(["1.5", "2"], decimal=",") is None
    swapped = Reading("number", "1,200.5", thousands=",").with_decimal(",")
    assert swapped.read(["1.200,5"])[0].tolist() == [1200.5]


@pytest.mark.parametrize("year", ["%Y", "%y"])
def test_an_open_reading_names_the_option_that_decides(year):
    dates = [datetime.date(2024, 4, 3), datetime.date(2024, 6, 5)]
    cells = [date.strftime(f"%d/%m/{year}") for date in dates]
    result = find_reading(["2024-01-31", *cells])
    assert result.reading is None and result.otherwise == f"%d/%m/{year}"
    assert f"{cells[0]!r}, '%d/%m/{year}' or '%m/%d/{year}'" in result.note
    assert values(cells, style=f"%d/%m/{year}") == [day(2024, 4, 3), day(2024, 6, 5)]
    assert values(cells, style=f"%m/%d/{year}") == [day(2024, 3, 4), day(2024, 5, 6)]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [(["3 380", "100 101"], [3380, 100101]), (["Store 1", "Store 2"], [1, 2]), (["PC 1", "2", "3"], [1, 2, 3])],
)
def test_whole_numbers_that_may_be_codes_are_numbers_on_request(cells, expected):
    assert values(cells) is None and values(cells, requested=True) == expected


def test_numbers_with_and_without_a_unit_have_a_note():
    note = "numbers with and without 'kg'"
    assert find_reading(["2612 kg", "955 kg", "3380"])[1:] == (note, "text")
    assert find_reading(["2612", "955", "3380 kg"])[1:] == (f"{note}, and therefore text", "number")


@pytest.mark.parametrize(
    ("cells", "number", "decimal", "otherwise"),
    [
        (["1,200", "3,400"], "1200", ",", "1.2"),
        (["1.983 €", "955 €"], "1983", ".", "1.983"),
        (["1,983 €", "955 €"], "1983", ",", "1.983"),
        (["1.250 kg", "2.500 kg"], "1.25", ",", "1250"),  # all numbers have three decimals
        (["1.983", "955"], "1.983", ",", "1983"),
    ],
)
def test_an_open_decimal_separator_is_named_with_the_option(cells, number, decimal, otherwise):
    reading, note, kind = find_reading(cells)
    assert note == f"{cells[0]!r} is read as {number}, and may mean {otherwise}"
    assert kind == {",": "decimal comma", ".": "decimal point"}[decimal]
    assert reading.read(cells)[0][0] == float(number)
    decided, no_note, _ = find_reading(cells, decimal=decimal)
    assert decided.read(cells)[0][0] == float(otherwise) and not no_note


@pytest.mark.parametrize(
    "cells", ["1,200 3,400.5", "1,200,000 3,400.5", "1.20€ 3.200€", "0.755kg 1.250kg", "1.983 2.500", "0.123 5"]
)
def test_a_plain_decimal_separator_has_no_note(cells):
    assert not find_reading(cells.split()).note


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["34", "51", "-", "n.a."], [(34, 2)]),
        (["1,5", "2,25", "-"], [(1.5, 2)]),
        (["$5", "$1,200", "6", "-"], [(6, 1), (5, 3), (5, 2), (6, 1)]),  # plain numbers, then by unit
        (["5", "(7)", "\N{MINUS SIGN}6", "(n.a.)"], [(5, 3), (5, 3)]),
        (["2024-05-31", "2024-06-01Z", "31.5.2024"], [(day(2024, 5, 31), 1)]),
        (["gas", "oil"], []),
    ],
)
def test_a_part_of_the_cells_is_read_in_each_form(cells, expected):
    groups = [(find_reading(group).reading, group) for group in readable_groups(cells)]
    actual = [(reading.read(group)[0][0], len(group)) for reading, group in groups if reading]
    assert actual[: len(expected)] == expected and bool(actual) == bool(expected)


def test_a_cell_that_cannot_be_read_is_marked():
    numbers, wrong = PLAIN["number"].read(["1", "forty", None, "3"])
    assert wrong.tolist() == [False, True, False, False] and numbers[[0, 3]].tolist() == [1, 3] and np.isnan(numbers[2])
    percent = find_reading(["12%", "13%"]).reading
    assert percent.read(["12.5%", "12.5", "$12"])[1].tolist() == [False, False, True]  # the unit may be missing
    assert PLAIN["date"].read(["2024-01-01Z", "2024-01-01 24:00", "2024-13-01"])[1].all()


def test_dates_with_an_offset_count_days_in_the_zone_of_the_training_rows():
    reading = find_reading(["2024-05-31T23:30Z", "2024-06-01T00:30Z"]).reading
    assert reading.read(["2024-05-31T23:30Z"], "Europe/Berlin")[0] == [day(2024, 6, 1) + 1.5 / 24]
    assert reading.read(["2024-05-31T23:30-05:00"], "offsets")[0] == [day(2024, 5, 31) + 23.5 / 24]


@pytest.mark.parametrize("zone", [None, "Asia/Tokyo", "America/New_York"])
def test_the_first_and_the_last_day_of_the_calendar_have_a_number(zone):
    cells = ["0001-01-01T00:00:00+05:00", "9999-12-31T23:59:59-05:00", "2024-05-31T23:30Z"]
    reading = find_reading(cells).reading
    numbers, wrong = reading.read(cells, zone)
    assert not wrong.any() and numbers[0] == day(1, 1, 1) and np.floor(numbers[1]) == day(9999, 12, 31)
    assert reading.read(["2024-01-01T00:00+99:00"], zone)[1].all()  # no zone is so far from UTC


@given(
    st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["", "$", "€"]), st.sampled_from(["", "%", "kg"])
)
def test_a_printed_number_is_read_back_exactly(number, before, after):
    assert number_of(f"{before}{number!r}{after}", before, after) == number
    assert number_of(f"{number!r}".replace(".", ","), point=",") == number


@given(st.integers(-(2**63), 2**63 - 1))
def test_equal_whole_numbers_have_equal_levels_in_every_type(number):
    assert level_of(number) == level_of(np.int64(number)) == str(number)
    if abs(number) < 2**53:
        assert level_of(float(number)) == level_of(Decimal(number)) == str(number)
    else:
        assert level_of(float(number)) != str(number)  # it may be another number
    assert level_of(Decimal(number)) == level_of(Decimal(10 * number).scaleb(-1)) == str(number)
    assert level_of(Decimal(10 * number)) == str(10 * number)


def test_levels_are_exact_in_their_own_precision():
    assert level_of(np.float32(0.1)) == level_of(0.1) == level_of(Decimal("0.10")) == "0.1"
    assert level_of(np.float64(0.1) + 1e-18) == "0.1" and level_of(0.1 + 2e-17) == "0.10000000000000002"
    assert level_of(np.True_) == level_of(True) == "True" and level_of(1) == "1"
    assert level_of(Decimal("1e-10")) == level_of(1e-10) and level_of(Decimal("1e18")) == "1" + 18 * "0"
    assert level_of(" a b\t") == level_of(np.str_("a b")) == "a b"
    midnight, noon = (datetime.datetime(2024, 5, 1, hour) for hour in (0, 12))
    dates = midnight, midnight.date(), np.datetime64("2024-05-01"), pd.Timestamp(midnight)
    assert {*map(level_of, dates)} == {"2024-05-01"} and level_of(noon) == "2024-05-01 12:00:00"
    for missing in (None, np.nan, np.float32("nan"), pd.NA, pd.NaT, np.datetime64("NaT", "ms")):
        assert level_of(missing) is None
