"""Parameters of which the quick tests use some, the slow ones others, and the wide ones the rest."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick(values: Iterable[Any], selected: Iterable[Any], rest: Any = pytest.mark.slow) -> list[Any]:
    """The values, those that are not among ``some`` marked as ``others``."""
    selected = list(selected)
    return [value if value in selected else pytest.param(value, marks=rest) for value in values]


def slow(values: Iterable[Any], selected: Iterable[Any]) -> list[Any]:
    """The values, those among ``some`` marked as slow, the others as wide."""
    selected = list(selected)
    mark = lambda value: pytest.mark.slow if value in selected else pytest.mark.wide
    return [pytest.param(value, marks=mark(value)) for value in values]
