"""Cells of text: which cells are missing, and how text is read as numbers, booleans or days.

A :class:`Reading` is found once, on the training rows (:func:`find_reading`), and kept with the columns of the model.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
import dataclasses
import datetime
import functools
import itertools
import re
from typing import Any, NamedTuple
import zoneinfo

import numpy as np

from jtrees import io, validation as checks
from jtrees.tables.parse import (
    DATES,
    ISO,
    LARGEST,
    LEADING_ZERO,
    TIME,
    WHOLE,
    days_of,
    kind_of,
    level_of,
    number_of,
    signed,
    time_zone,
    value_of,
)

#: Texts that mean a missing value among numbers and dates.
MISSING = ("", *["?", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "-NaN", "-nan", "NaT", "NULL", "null", "None"])


@functools.lru_cache
def missing_numbers(missing: Collection[str]) -> tuple[float, ...]:
    """Returns the numbers of the texts that mean a missing value, in order. ``missing`` is hashable.

    A text with leading zeros is a code, and no number. Each number is also there as single precision rounds it.
    """
    read = (number_of(text) for text in missing if not LEADING_ZERO.match(text))
    numbers = {number for number in read if number is not None and abs(number) < float("inf")}
    return tuple(sorted(numbers | {float(np.float32(number)) for number in numbers if abs(number) <= LARGEST}))


def missing_mask(values: Iterable[Any], missing: Collection[str], *, numbers: bool = True) -> list[bool]:
    """Returns which values of a column mean a missing value.

    These are the texts, compared as levels are, and if ``numbers``, cells that are their numbers.
    """
    texts = frozenset(missing)
    listed = frozenset(missing_numbers(texts) if numbers else ())
    is_number = lambda value: bool(listed) and kind_of(value) == "number" and value in listed
    return [level_of(value) in texts if isinstance(value, str) else is_number(value) for value in values]


def mask_missing(values: Iterable[Any], missing: Collection[str], *, numbers: bool = True) -> list[Any]:
    """Returns the values of a column, in which those of :func:`missing_mask` are None."""
    values = list(values)
    gaps = missing_mask(values, missing, numbers=numbers)
    return [None if gap else value for value, gap in zip(values, gaps, strict=True)]


OFFSETS = "offsets"  # the zone of a column in which each date has its own offset
_SPACES = " \u00a0\u202f"  # the common, the no-break and the narrow no-break space

_CURRENCY = (
    r"(?:[A-Z]{0,3}[$€£¥₹₽₩₪₺₴฿]|USD|EUR|GBP|CHF|JPY|CNY|INR|AUD|CAD|NZD|SEK|NOK|DKK|PLN|CZK|HUF|BRL|ZAR|MXN|KRW|TRY"
    r"|AED|SAR|HKD|SGD|Rs\.?|kr\.?)"
)
_UNITS = (
    "kg g mg t lb lbs oz km m cm mm mi ft in yd l L ml mL dl cl gal h hr hrs min s sec ms yr yrs W kW MW kWh MWh mA "
    "Hz kHz MHz GHz KB MB GB TB px pt pcs rpm mph kmh km/h m/s m2 m² m3 m³ sqft ha bar Pa hPa kPa psi cal kcal kJ "
    "ppm bps mmHg mg/dl mmol/l °C °F °"
)
_SHORT = "|".join(map(re.escape, sorted(_UNITS.split(), key=len, reverse=True)))  # units that need no space before
_WITH_UNIT = re.compile(
    rf"(?P<sign>[+-]?)(?:(?P<before>{_CURRENCY}?)[{_SPACES}]?|(?P<word>[^\W\d_]{{2,15}}\.?)[{_SPACES}])(?P<inner>[+-]?)"
    rf"(?P<body>(?:\d|[.,](?=\d))(?:[\d.,'’{_SPACES}]*\d)?)"
    rf"(?P<after>(?:[{_SPACES}]?(?:{_CURRENCY}|[%‰]|{_SHORT}))|(?:[{_SPACES}][^\W\d_]{{2}}[^\d]{{0,13}}))?"
)
_UNITS_TRIED = 3  # in a column of streets with numbers, each cell has its own unit
_IN_THOUSANDS = re.compile(r"[-+]?(?:0|[1-9]\d{0,2}(?:\.\d{3})*)", re.ASCII)


@io.part
@dataclasses.dataclass(frozen=True)
class Reading:
    """How the cells of a column become numbers.

    Attributes:
      kind: ``"number"``, ``"boolean"`` (true and false, in any case), ``"date"``, ``"durations"`` or ``"text"``, which
        is not converted.
      example: a cell of the training rows; of durations, a time of day in text, or ``""`` if no cell is text.
      before: the currency or another unit before each number, such as ``"$"``. A cell may omit it.
      after: the unit after each number, such as ``"%"``. A cell may omit it.
      thousands: the thousands separator, or ``""``.
      decimal: the decimal separator.
      style: the ``strptime`` format of dates, without the time of day.
      zoned: whether each date has an offset from UTC.
    """

    kind: str
    example: str = ""
    before: str = ""
    after: str = ""
    thousands: str = ""
    decimal: str = "."
    style: str = ISO
    zoned: bool = False

    def form(self, zone: str | None = None) -> tuple[Any, ...]:
        """Returns the form of text as arguments of :func:`~jtrees.tables.parse.value_of`, with days as in ``zone``."""
        if self.kind == "date":
            return self.style, self.zoned, None if zone == OFFSETS else zone
        return (self.before, self.after, self.thousands, self.decimal) if self.kind == "number" else ()

    def parser(self, zone: str | None = None) -> Callable[[Any], float | None]:
        """Returns the function from a cell of any type to a number; it returns None for a cell that it cannot read."""
        form = self.form(zone)
        return lambda cell: value_of(cell, self.kind, *form)

    def with_decimal(self, decimal: str) -> "Reading":
        """Returns the reading with another decimal separator; an equal thousands separator becomes the old one."""
        thousands = self.decimal if self.thousands == decimal else self.thousands
        return dataclasses.replace(self, decimal=decimal, thousands=thousands)

    def read(self, cells: Iterable[Any], zone: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns numbers, ``(n,)`` float64, and a mask of unreadable cells, ``(n,)`` bool; these and None are NaN."""
        cells, parser = list(cells), self.parser(zone)
        texts = {text: parser(text) for text in {cell for cell in cells if isinstance(cell, str)}}
        parsed = [None if cell is None else texts[cell] if isinstance(cell, str) else parser(cell) for cell in cells]
        wrong = [number is None and cell is not None for cell, number in zip(cells, parsed, strict=True)]
        return np.array(parsed, np.float64), np.array(wrong, bool)  # None becomes NaN

    def common_zone(self, cells: Iterable[Any]) -> str | None:
        """Returns the offset from UTC of all dates with an offset; ``"offsets"`` if they differ; None for others."""
        if self.kind != "date" or not self.zoned:
            return None
        days = self.read(cells)[0] - self.read(cells, "UTC")[0]
        offsets = {round(1440 * offset, 3) for offset in days.tolist() if offset == offset}
        return offset_name(offsets.pop()) if len(offsets) == 1 else OFFSETS

    def __str__(self) -> str:
        kinds = {"number": "numbers", "boolean": "true and false", "durations": "times of day"}
        kinds["date"] = f"dates {self.style}"
        return f"{kinds[self.kind]} in text such as {checks.quoted(self.example)}"


PLAIN = {kind: Reading(kind) for kind in ("text", "number", "boolean", "date", "durations")}


def zone_name(zone: Any) -> str:
    """Returns the name of a time zone of zoneinfo, pytz or dateutil, or ``"offsets"`` if it has no name.

    The zone may be a name, too. A fixed offset may have the name of a zone, but its name is such as ``+02:00``.
    """
    zone = time_zone(zone) if isinstance(zone, str) and zone[:1] in ("+", "-") else zone  # Arrow has such names
    name = getattr(zone, "key", None) or getattr(zone, "zone", None)
    offset = zone.utcoffset(None) if isinstance(zone, datetime.tzinfo) and not name else None
    if offset is not None:
        return offset_name(offset / datetime.timedelta(minutes=1))
    name = str(name or zone)
    try:
        return zoneinfo.ZoneInfo(name.split("zoneinfo/")[-1].rstrip("')")).key or OFFSETS
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        return OFFSETS


def offset_name(minutes: float) -> str:
    """Returns the name of an offset from UTC: ``UTC``, or such as ``+02:00``; ``"offsets"`` for parts of minutes."""
    sign, minutes = "-" if minutes < 0 else "+", abs(minutes)
    return OFFSETS if minutes % 1 else f"{sign}{minutes // 60:02.0f}:{minutes % 60:02.0f}" if minutes else "UTC"


class Interpretation(NamedTuple):
    """The result of :func:`find_reading` for a column of text.

    Attributes:
      reading: how the cells are read as numbers; None: the cells are text.
      note: a description of an ambiguity; empty if there is no ambiguity.
      otherwise: the kind of :data:`jtrees.tables.frame.KINDS` that selects the other reading of the cells.
    """

    reading: Reading | None
    note: str = ""
    otherwise: str = ""


def find_reading(
    cells: Iterable[str | None], *, decimal: str | None = None, style: str | None = None, requested: bool = False
) -> Interpretation:
    """Returns how all cells of a column are read as numbers or dates, if all cells are numbers or dates.

    Numbers have a common unit or none. Dates have a common format, and only one format may be possible. A column with
    leading zeros is text. A missing cell is None. ``decimal`` None: a point, or a comma if a point cannot be. ``style``
    None: every format; dates that have several possible formats remain text. ``requested`` says that the column holds
    numbers or dates, which decides texts that may be names or codes, such as ``Store 12`` and ``100 101``.
    """
    distinct = [cell.strip() for cell in dict.fromkeys(cells) if cell is not None]
    if not distinct:
        return Interpretation(None)
    if all(cell.lower() in ("true", "false") for cell in distinct):
        return Interpretation(PLAIN["boolean"])
    # If all cells are in parentheses, these are no signs.
    numbers = [] if all(cell.startswith("(") for cell in distinct) else [signed(cell) for cell in distinct]
    if numbers and (result := _plain_numbers(numbers, decimal)) is not None:
        return result
    if (result := _dates(distinct, style)) is not None:
        return result
    result = _numbers_with_unit(numbers, decimal, requested) if numbers else None
    return Interpretation(None) if result is None else result


def readable_groups(cells: Iterable[str | None]) -> Iterator[list[str]]:
    """Yields groups of different cells that may have a reading (:func:`find_reading`) if the whole column has none.

    The groups are plain numbers, numbers with a unit, and dates of one format. Each of the most common units has two
    groups, with and without the numbers that omit the unit. Each format has its own group.
    """
    distinct = [cell.strip() for cell in dict.fromkeys(cells) if cell is not None]
    dates = [cell for cell in distinct if _DATE.fullmatch(cell)]
    units: dict[Any, list[str]] = {}
    for cell in distinct:
        if part := _WITH_UNIT.fullmatch(signed(cell)):
            units.setdefault(_unit_of(part), []).append(cell)
    groups = [[cell for cell in distinct if value_of(cell, "number") is not None]]
    bare = units.pop(("", ""), [])
    for cells_of_unit in sorted(units.values(), key=len, reverse=True)[:_UNITS_TRIED]:
        groups += [[*cells_of_unit, *bare], cells_of_unit] if bare else [cells_of_unit]
    groups.append(bare)
    for style, zoned in itertools.product(DATES if dates else (), (False, True)):
        groups.append([cell for cell in dates if days_of(cell, style, zoned, None) is not None])
    yield from filter(None, groups)


def _unit_of(part: re.Match) -> tuple[str, str]:
    """Returns what is before and after the number of a match of ``_WITH_UNIT``."""
    return part["word"] or part["before"] or "", (part["after"] or "").strip()


_UNNAMED = [re.sub(r"\(\?P<\w+>", "(?:", pattern + TIME) for pattern in DATES.values()]  # a name may occur once only
_DATE = re.compile("|".join(_UNNAMED), re.ASCII)


def _plain_numbers(cells: list[str], decimal: str | None) -> Interpretation | None:
    point = decimal or "."
    reading = Reading("number", "" if point == "." else cells[0], decimal=point)
    numbers, parser = [], reading.parser()
    for cell in cells:
        if LEADING_ZERO.match(cell) or (number := parser(cell)) is None:
            return None
        numbers.append(number)
    if max(map(abs, numbers)) > WHOLE and len(set(numbers)) < len(cells):
        integers = [cell.lstrip("+") for cell in cells if cell.lstrip("+-").isdigit()]
        if len({float(cell) for cell in integers}) < len(set(integers)):
            note = "whole numbers that double precision cannot distinguish, and therefore text"
            return Interpretation(None, note, "number")
    marked = [cell for cell in cells if "." in cell]
    if decimal is None and 0 < len(marked) < len(cells) and all(map(_IN_THOUSANDS.fullmatch, cells)):
        return _open(marked[0], reading, Reading("number", thousands=".", decimal=","))
    return Interpretation(reading)


def _dates(cells: list[str], style: str | None) -> Interpretation | None:
    if not _DATE.fullmatch(cells[0]):
        return None
    possible = []
    for name in DATES if style is None else (style,):
        # The first cells may be in ISO 8601, which every format reads.
        first = next(filter(None, (re.fullmatch(DATES[name] + TIME, cell, re.ASCII) for cell in cells)), None)
        reading = Reading("date", first[0] if first else "", style=name, zoned=bool(first and first["zone"]))
        if first and all(days_of(cell, name, reading.zoned, None) is not None for cell in cells):
            possible.append(reading)
    if len(possible) > 1:
        styles = " or ".join(checks.quoted(reading.style) for reading in possible)
        note = f"text in which day and month could be exchanged, such as {checks.quoted(possible[0].example)}, {styles}"
        return Interpretation(None, note, possible[0].style)
    return Interpretation(possible[0]) if possible else None


def _numbers_with_unit(cells: list[str], decimal: str | None, requested: bool) -> Interpretation | None:
    parts = []
    for cell in cells:
        part = _WITH_UNIT.fullmatch(cell)
        if part is None or (part["sign"] and part["inner"]) or LEADING_ZERO.match(part["body"]):
            return None
        parts.append(part)
    units, bodies = Counter(map(_unit_of, parts)), [part["body"] for part in parts]
    bare = units.pop(("", ""), 0) if len(units) > 1 else 0
    if len(units) > 1:
        return None
    unit, marked = units.popitem()
    note = f"numbers with and without {checks.quoted(''.join(unit))}" if bare else ""
    if bare >= marked and not requested:
        return Interpretation(None, f"{note}, and therefore text", "number")
    # Whole numbers may be those of names, such as "Store 12", or two codes, such as "100 101".
    is_amount = requested or any(set(body) & set(".,'’") for body in bodies)
    if not is_amount and any(part["word"] for part in parts):
        return None
    points = (".", ",") if decimal is None else (decimal,)
    options = (_with_point(cells, bodies, unit, point) for point in points)
    is_open = lambda option: option.thousands == " " and unit == ("", "") and not (is_amount or decimal)
    possible = [option for option in options if option is not None and not is_open(option)]
    # Points in all numbers are decimal points of numbers with a fixed number of decimals, such as 7.250%.
    fixed = all("." in body for body in bodies) and not re.fullmatch(_CURRENCY, "".join(unit))
    if not possible:
        return None
    has_groups = lambda option: option.thousands and not (fixed and option.thousands == ".")
    reading = next(filter(has_groups, possible), possible[0])
    if not (reading.thousands or any(unit)):
        note = f"{checks.quoted(cells[0])} is read as {reading.parser()(cells[0]):.12g}, with a decimal comma"
        return Interpretation(reading, note, "text") if reading.decimal == "," else None
    for other in possible:
        first, second = reading.parser(), other.parser()
        if different := [cell for cell in cells if first(cell) != second(cell)]:
            return _open(different[0], reading, other)
    return Interpretation(reading, note, "text" if note else "")


def _with_point(cells: list[str], bodies: list[str], unit: tuple[str, str], point: str) -> Reading | None:
    """Returns the reading of numbers with a given decimal separator, or None if they cannot be read with it."""
    separators = {c for body in bodies for c in body.partition(point)[0] if not c.isdigit()}
    if len(separators) > 1:
        return None
    thousands = separators.pop() if separators else ""
    if thousands == "." and any(body.startswith("0.") for body in bodies):  # 0.755 kg
        return None
    reading = Reading("number", cells[0], *unit, thousands, point)
    parser = reading.parser()
    return None if any(parser(cell) is None for cell in cells) else reading


def _open(cell: str, reading: Reading, other: Reading) -> Interpretation:
    """Returns a reading with a note of the two numbers that a cell may mean."""
    number, otherwise = (f"{option.parser()(cell):.12g}" for option in (reading, other))
    note = f"{checks.quoted(cell)} is read as {number}, and may mean {otherwise}"
    return Interpretation(reading, note, f"decimal {'comma' if other.decimal == ',' else 'point'}")
