"""Parameters of which the quick tests use some, the slow ones others, and the wide ones the rest."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick(values: Iterable[Any], some: Iterable[Any], others: Any = pytest.mark.slow) -> list[Any]:
    """The values, those that are not among ``some`` marked as ``others``."""
    some = list(some)
    return [value if value in some else pytest.param(value, marks=others) for value in values]


def slow(values: Iterable[Any], some: Iterable[Any]) -> list[Any]:
    """The values, those among ``some`` marked as slow, the others as wide."""
    some = list(some)
    mark = lambda value: pytest.mark.slow if value in some else pytest.mark.wide
    return [pytest.param(value, marks=mark(value)) for value in values]
