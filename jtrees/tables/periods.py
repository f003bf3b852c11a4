"""The calendar: periods of dates as levels. Predictions and exported files compute periods by the same steps."""

from collections.abc import Callable, Mapping
import operator
from typing import Any, NamedTuple

import numpy as np

from jtrees.tables.frame import RawColumn
from jtrees.tables.parse import DAY


class Period(NamedTuple):
    """A period of dates.

    Attributes:
      levels: the levels of the period, in order.
      unit: what the steps begin with: the ``"day"``, in days since 1970, or the ``"time"`` in milliseconds since
        midnight. Both are rounded down, and times to milliseconds first, because a time is not exact in days.
      steps: operations with a whole number, one after the other, whose result is the number of the level. ``"//"`` and
        ``"%"`` round down. The other operations are ``"+"`` and ``"*"``.
    """

    levels: tuple[str, ...]
    unit: str
    steps: tuple[tuple[str, int], ...]


_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
# The calendar repeats after 146097 days. A century and a year begin in March, so that a leap day is the last day. From
# C. Neri and L. Schneider, "Euclidean affine functions and their application to calendar algorithms", 2022.
_MONTH = (
    *(("+", 719468), ("*", 4), ("+", 3), ("%", 146097), ("//", 4)),  # the day of the century
    *(("*", 4), ("+", 3), ("%", 1461), ("//", 4)),  # the day of the year
    *(("*", 5), ("+", 2), ("//", 153), ("+", 2), ("%", 12)),
)
#: The periods of dates. The weekdays begin with Monday, and the first day of 1970 was a Thursday.
PERIODS = {
    "month": Period(_MONTHS, "day", _MONTH),
    "weekday": Period(("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"), "day", (("+", 3), ("%", 7))),
    "hour": Period(tuple(f"{hour} h" for hour in range(24)), "time", (("//", 3_600_000), ("%", 24))),
    "minute": Period(tuple(f"{minute} min" for minute in range(60)), "time", (("//", 60_000), ("%", 60))),
}
_OPERATIONS = {"+": operator.add, "*": operator.mul, "//": operator.floordiv, "%": operator.mod}


def level_number(name: str, units: Mapping[str, Any], operations: Mapping[str, Callable[[Any, int], Any]]) -> Any:
    """Returns the number of the level of a period, from the day and the time as numbers or code.

    For each operation of :class:`Period`, ``operations`` has a function that computes with numbers or writes code.
    """
    period = PERIODS[name]
    value = units[period.unit]
    for operation, number in period.steps:
        value = operations[operation](value, number)
    return value


def periods(name: str, raw: RawColumn) -> RawColumn:
    """Returns the months (Jan to Dec), weekdays (Mon to Sun), hours or minutes of days since 1970 as text."""
    values = np.array(PERIODS[name].levels, object)[_numbers(name, np.where(raw.missing, 0, raw.values))]
    values[raw.missing] = None
    return RawColumn("text", values)


def varying_periods(days: np.ndarray) -> tuple[str, ...]:
    """Returns the periods that take several values in days since 1970, ``(n,)`` without missing values."""
    return tuple(name for name in PERIODS if len(days) and np.ptp(_numbers(name, days)) > 0)


def _numbers(name: str, days: np.ndarray) -> np.ndarray:
    """Returns the number of the level of a period."""
    day = np.floor(days).astype(np.int64)
    time = np.floor((days - day) * DAY + 0.5).astype(np.int64)
    return level_number(name, {"day": day, "time": time}, _OPERATIONS)
