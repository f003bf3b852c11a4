"""Periods of dates: months and weekdays as levels."""

import numpy as np

from jtrees.tables.frame import RawColumn

MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
#: The levels of each period.
PERIODS = {"month": MONTHS, "weekday": WEEKDAYS}


def periods(name: str, raw: RawColumn) -> RawColumn:
    """Returns the months (Jan to Dec) or weekdays (Mon to Sun) of days since 1970 as text."""
    days = np.floor(np.where(raw.missing, 0, raw.values)).astype(np.int64)
    if name == "month":
        number = days.astype("datetime64[D]").astype("datetime64[M]").astype(np.int64) % 12
    else:
        number = (days + 3) % 7  # the first day of 1970 was a Thursday
    values = np.array(PERIODS[name], object)[number]
    values[raw.missing] = None
    return RawColumn("text", values)
