"""Periods of dates as levels: months, weekdays, hours and minutes."""

import numpy as np

from jtrees.tables.frame import RawColumn
from jtrees.tables.parse import DAY

MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
#: The levels of each period.
PERIODS = {
    "month": MONTHS,
    "weekday": WEEKDAYS,
    "hour": tuple(f"{hour} h" for hour in range(24)),
    "minute": tuple(f"{minute} min" for minute in range(60)),
}
_LENGTHS = {"hour": 3_600_000, "minute": 60_000}  # in milliseconds


def periods(name: str, raw: RawColumn) -> RawColumn:
    """Returns the months (Jan to Dec), weekdays (Mon to Sun), hours or minutes of days since 1970 as text."""
    values = np.array(PERIODS[name], object)[_numbers(name, np.where(raw.missing, 0, raw.values))]
    values[raw.missing] = None
    return RawColumn("text", values)


def varying_periods(days: np.ndarray) -> tuple[str, ...]:
    """Returns the periods that take several values in days since 1970, ``(n,)`` without missing values."""
    return tuple(name for name in PERIODS if len(days) and np.ptp(_numbers(name, days)) > 0)


def _numbers(name: str, days: np.ndarray) -> np.ndarray:
    """Returns the number of the level of a period: the weekdays begin with Monday.

    Times are rounded to milliseconds, because a time is not exact in days.
    """
    whole = np.floor(days).astype(np.int64)
    if name in _LENGTHS:
        milliseconds = np.floor((days - whole) * DAY + 0.5).astype(np.int64)
        return milliseconds // _LENGTHS[name] % len(PERIODS[name])
    if name == "month":
        return whole.astype("datetime64[D]").astype("datetime64[M]").astype(np.int64) % 12
    return (whole + 3) % 7  # the first day of 1970 was a Thursday
