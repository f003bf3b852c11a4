"""Parameters of which the quick tests use some, and the slow ones all."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick(values: Iterable[Any], some: Iterable[Any]) -> list[Any]:
    """The values, those that are not among some marked as slow."""
    some = list(some)
    return [value if value in some else pytest.param(value, marks=pytest.mark.slow) for value in values]
