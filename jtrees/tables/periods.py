"""Periods of dates: months and weekdays as levels."""

import numpy as np

from jtrees.tables.frame import RawColumn

MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
#: The levels of each period.
PERIODS = {"month": MONTHS, "weekday": WEEKDAYS}


def periods(name: str, raw: RawColumn) -> RawColumn:
    """Returns the months (Jan to Dec) or weekdays (Mon to Sun) of days since 1970 as text."""
    values = np.array(PERIODS[name], object)[_numbers(name, np.where(raw.missing, 0, raw.values))]
    values[raw.missing] = None
    return RawColumn("text", values)


def varying_periods(days: np.ndarray) -> tuple[str, ...]:
    """Returns the periods that take several values in days since 1970, ``(n,)`` without missing values."""
    return tuple(name for name in PERIODS if len(days) and np.ptp(_numbers(name, days)) > 0)


def _numbers(name: str, days: np.ndarray) -> np.ndarray:
    """Returns the number of the month, 0 to 11, or of the weekday, 0 to 6 from Monday."""
    whole = np.floor(days).astype(np.int64)
    if name == "month":
        return whole.astype("datetime64[D]").astype("datetime64[M]").astype(np.int64) % 12
    return (whole + 3) % 7  # the first day of 1970 was a Thursday
