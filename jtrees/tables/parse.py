"""Cells as numbers, days and levels. Exported Python files contain a copy, so this file imports no other of jtrees."""

import contextlib
import datetime
import decimal
import functools
import numbers
import re
import zoneinfo

import numpy as np

NUMBER = re.compile(r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|inf|infinity)", re.IGNORECASE | re.ASCII)
LEADING_ZERO = re.compile(r"[+-]?0\d")
BOOLEANS = {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0, "1.0": 1.0, "0.0": 0.0}
MONTHS = ("january", "february", "march", "april", "may", "june")
MONTHS += ("july", "august", "september", "october", "november", "december")
CLOCK = r"(?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<second>\d{2})(?:\.(?P<part>\d+))?)?(?: ?(?P<half>[AaPp])[Mm])?"
TIME = rf"(?:[T ]{CLOCK}(?P<zone> ?(?:Z|UTC|[+-]\d{{2}}(?::?\d{{2}})?))?)?"
ISO = "%Y-%m-%d"
# Formats of dates and their patterns. Day and month may be ambiguous if two formats have the same separators.
DATES = {
    ISO: r"(?P<year>\d{4})-(?P<month>\d{2})-(?P<day>\d{2})",
    "%Y/%m/%d": r"(?P<year>\d{4})/(?P<month>\d{1,2})/(?P<day>\d{1,2})",
    "%Y.%m.%d": r"(?P<year>\d{4})\.(?P<month>\d{1,2})\.(?P<day>\d{1,2})",
    "%d.%m.%Y": r"(?P<day>\d{1,2})\.(?P<month>\d{1,2})\.(?P<year>\d{4})",
    "%d/%m/%Y": r"(?P<day>\d{1,2})/(?P<month>\d{1,2})/(?P<year>\d{4})",
    "%m/%d/%Y": r"(?P<month>\d{1,2})/(?P<day>\d{1,2})/(?P<year>\d{4})",
    "%d.%m.%y": r"(?P<day>\d{1,2})\.(?P<month>\d{1,2})\.(?P<year>\d{2})",
    "%d/%m/%y": r"(?P<day>\d{1,2})/(?P<month>\d{1,2})/(?P<year>\d{2})",
    "%m/%d/%y": r"(?P<month>\d{1,2})/(?P<day>\d{1,2})/(?P<year>\d{2})",
    "%d-%m-%Y": r"(?P<day>\d{1,2})-(?P<month>\d{1,2})-(?P<year>\d{4})",
    "%m-%d-%Y": r"(?P<month>\d{1,2})-(?P<day>\d{1,2})-(?P<year>\d{4})",
    "%d %b %Y": r"(?P<day>\d{1,2})[ -](?P<name>[A-Za-z]{3,9})\.?[ -](?P<year>\d{4})",
    "%b %d, %Y": r"(?P<name>[A-Za-z]{3,9})\.? (?P<day>\d{1,2}),? (?P<year>\d{4})",
}
DAY = 86_400_000  # milliseconds
WHOLE = 2**53  # float64 represents all whole numbers up to this number
LARGEST = float(np.finfo(np.float32).max)  # models are in single precision
# Types of cells by kind. NumPy registers its durations as numbers, and Python its booleans.
TYPES = {
    "text": (str,),
    "boolean": (bool, np.bool_),
    "date": (datetime.date, np.datetime64),
    "durations": (datetime.timedelta, np.timedelta64, datetime.time),
    "number": (numbers.Real, decimal.Decimal),
}


def kind_of(cell):
    """Returns the kind of a cell that is not missing: a key of ``TYPES``, or ``"other"``."""
    return next((kind for kind, types in TYPES.items() if isinstance(cell, types)), "other")


def value_of(cell, kind, *form):
    """Returns the number of a cell of any type; None if the cell does not hold a value of the kind.

    Args:
      cell: a cell that is not missing.
      kind: the kind of the column. Numbers may be booleans, and booleans may be 0 and 1.
      form: the form of text: the arguments of ``number_of`` or ``days_of`` after the text.
    """
    came = kind_of(cell)
    if came == "other":  # such as a period, which is read by its text
        cell, came = level_of(cell), "text"
    try:
        if came == "text":
            readers = {"number": number_of, "date": days_of, "durations": time_of, "boolean": boolean_of}
            number = readers[kind](cell, *form) if kind in readers else None
        elif {came, kind} <= {"number", "boolean"}:
            number = float(cell)
        elif came != kind:
            return None
        elif kind == "durations":
            if isinstance(cell, datetime.time):  # the duration since midnight
                cell = datetime.datetime.combine(datetime.date.min, cell.replace(tzinfo=None)) - datetime.datetime.min
            number = cell / (np.timedelta64(1, "D") if isinstance(cell, np.timedelta64) else datetime.timedelta(days=1))
        else:
            number = days_since_1970(cell, *form[1:])
    except (ArithmeticError, TypeError, ValueError):  # for example for 10**400
        return None
    is_valid = number is not None and abs(number) <= LARGEST and (kind != "boolean" or number in (0, 1))
    return number if is_valid else None


def boolean_of(text):
    """Returns 1 for a text that means true, 0 for a text that means false, and None for other text."""
    return BOOLEANS.get(text.strip().lower())


def number_of(text, before="", after="", thousands="", point="."):
    """Returns the number in a text, with or without a currency before it and a unit after it; None for other text."""
    text = signed(text)
    if point == "." and not thousands and NUMBER.fullmatch(text):
        return float(text)
    sign = text[:1] if text[:1] in ("+", "-") else ""
    text = text.removeprefix(sign).strip().removeprefix(before).strip().removesuffix(after).strip()
    if not sign and text[:1] in ("+", "-"):
        sign, text = text[0], text[1:]
    integer_part, mark, part = text.partition(point)
    if thousands:
        first, *groups = integer_part.split(thousands)
        if groups and (not 1 <= len(first) <= 3 or any(len(group) != 3 for group in groups)):
            return None
        integer_part = "".join([first, *groups])
    if point != "." and "." in integer_part + part:
        return None
    text = integer_part + mark.replace(point, ".") + part
    return float(sign + text) if NUMBER.fullmatch(text) and text[:1] not in ("+", "-") else None


def signed(text):
    """Returns the text of a number with the sign of Python, for the minus sign of print and for ``(5)`` of accounts."""
    text = text.strip().replace("\N{MINUS SIGN}", "-")
    return f"-{text[1:-1]}" if text[:1] == "(" and text[-1:] == ")" and text[1:2] not in ("+", "-", "(") else text


def days_of(text, style, zoned, zone):
    """Returns the days since 1970 of a date in a given format or in ISO 8601; None if the text is not such a date.

    Args:
      text: the text.
      style: the format.
      zoned: whether the date has an offset from UTC.
      zone: the time zone in which days are counted; None: the local time of the date itself.
    """
    patterns = (DATES[style] + TIME, DATES[ISO] + TIME)
    match = re.fullmatch(patterns[0], text.strip(), re.ASCII) or re.fullmatch(patterns[1], text.strip(), re.ASCII)
    if match is None or bool(match["zone"]) != zoned:
        return None
    parts = match.groupdict()
    try:
        month = month_of(parts["name"].lower()) if "name" in parts else int(parts["month"])
        year = int(parts["year"])
        if len(parts["year"]) == 2:  # of the century of strptime
            year += 1900 if year >= 69 else 2000
        moment = datetime.datetime.combine(datetime.date(year, month, int(parts["day"])), clock_of(parts))
        if zoned:
            moment = moment.replace(tzinfo=time_zone(parts["zone"]))
    except ValueError:
        return None
    return since_1970(local_time(moment, zone))


def time_of(text):
    """Returns the days since midnight of a time of day; None for other text, and ``ValueError`` for no such time."""
    match = re.fullmatch(CLOCK, text.strip(), re.ASCII)
    return since_1970(datetime.datetime.combine(datetime.date(1970, 1, 1), clock_of(match))) if match else None


def clock_of(parts):
    """Returns the time of day of the parts of ``CLOCK``; ``ValueError`` if no day has such a time."""
    hour, minute, second = (int(parts[name] or 0) for name in ("hour", "minute", "second"))
    if parts["half"]:  # half of a day: 12:30 AM is half past midnight
        if not 1 <= hour <= 12:
            raise ValueError(f"no hour of half a day: {hour}")
        hour = hour % 12 + 12 * (parts["half"] in "Pp")
    return datetime.time(hour, minute, second, 1000 * int((parts["part"] or "").ljust(3, "0")[:3]))


def days_since_1970(date, zoned, zone):
    """Returns the days since 1970 of a date; None if it has a time zone and should not, or the reverse.

    ``days_of`` describes the other arguments.
    """
    aware = getattr(date, "tzinfo", None) is not None
    if aware != zoned:
        return None
    return since_1970(local_time(date, zone)) if aware else np.datetime64(date, "ms").astype(np.int64) / DAY


def month_of(name):
    """Returns the number of a month from its name or the first three letters of its name; 0 for an unknown name."""
    names = [name in (month, month[:3]) for month in MONTHS]
    return names.index(True) + 1 if any(names) else 0


@functools.cache
def time_zone(name):
    """Returns the time zone of a name, or of an offset such as ``+02:00`` or ``Z``; ``ValueError`` for no offset."""
    offset = re.fullmatch(r" ?(?:Z|UTC|([+-])(\d{2})(?::?([0-5]\d))?)", name, re.ASCII)
    if offset is None and name.strip()[:1] not in ("+", "-"):
        return zoneinfo.ZoneInfo(name)
    if offset is None:
        raise ValueError(f"no offset from UTC: {name}")
    minutes = int(f"{offset[1] or '+'}1") * (60 * int(offset[2] or 0) + int(offset[3] or 0))
    return datetime.timezone(datetime.timedelta(minutes=minutes))


def local_time(moment, zone):
    """Returns a moment as local time in a time zone.

    The moment's own local time remains if the zone is None, or if the calendar from year 1 to 9999 has no other.
    """
    with contextlib.suppress(OverflowError):
        moment = moment if zone is None else moment.astimezone(time_zone(zone))
    return moment.replace(tzinfo=None)


def since_1970(moment):
    """Returns the days since 1970 of a moment in its own local time, to whole milliseconds."""
    return (moment - datetime.datetime(1970, 1, 1)) // datetime.timedelta(milliseconds=1) / DAY


def is_missing(value):
    """Returns whether a value is None, NaN, or NA or NaT of pandas."""
    if type(value).__name__ in ("NoneType", "NAType", "NaTType"):
        return True
    if isinstance(value, decimal.Decimal):  # a signaling NaN refuses comparisons
        return value.is_nan()
    different = value != value  # an array returns an array here
    return type(different).__name__ in ("bool", "bool_") and bool(different)


def level_of(value):
    """Returns the canonical text of a level, and None for a missing value; equal values have equal texts.

    Text has no spaces at its ends. Whole numbers have no decimals. Every other float is the shortest text that reads
    back as the same float in its own precision. Booleans are True and False. Floats beyond 2**53 keep an exponent,
    because they do not represent all whole numbers. Dates are ISO 8601, without the time at midnight.
    """
    if isinstance(value, str):
        return value.strip()
    if is_missing(value):
        return None
    if isinstance(value, float) or type(value).__name__ in ("float16", "float32"):
        number = float(value)
        return str(int(number)) if number.is_integer() and abs(number) < WHOLE else str(value)
    if isinstance(value, decimal.Decimal):
        whole, _, decimals = f"{value:f}".partition(".")
        if not decimals.strip("0"):
            return whole if value else "0"
        return level_of(float(value)) if decimal.Decimal(repr(float(value))) == value else f"{value:f}".rstrip("0")
    if kind_of(value) == "date":
        return re.sub(r" 00:00:00(\.0*)?$", "", str(value).replace("T", " "))
    if isinstance(value, datetime.timedelta):
        return str(datetime.timedelta(seconds=value.total_seconds()))
    return str(value)


def plain_level(text):
    """Returns the level of the number or the boolean in a text: ``2`` of ``2.0``, ``True`` of ``TRUE``.

    None for other text. Leading zeros are those of codes. Whole numbers above 2**53 are exact only as text.
    """
    if text.lower() in ("true", "false"):
        return text.capitalize()
    if not NUMBER.fullmatch(text) or LEADING_ZERO.match(text):
        return None
    number = float(text)
    is_exact = abs(number) < WHOLE or not text.lstrip("+-").isdigit()
    return level_of(number) if is_exact and abs(number) < float("inf") else None
