"""Numbers and classes as text."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def number_text(value: float, digits: int, zero: float = 0.0) -> str:
    """Returns ``zero + value`` as text, with the value rounded to significant digits, but not ``zero``."""
    rounded = f"{value:.{digits}g}"
    return exact_text(zero + float(rounded)) if zero else rounded


def exact_text(value: Any) -> str:
    """Returns the shortest text that parses as this number in float64 (that of a float32 is less precise)."""
    return np.format_float_positional(np.float64(value), trim="-")


def listed(classes: Sequence[str], most: int | None) -> str:
    """Returns the texts of up to ``most`` classes joined, and the number of others."""
    more = len(classes) - len(classes[:most])
    return ", ".join([*classes[:most], *([f"{more} more class{'' if more == 1 else 'es'}"] if more else [])])
