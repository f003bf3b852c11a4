"""Parameters of which the quick tests use some, the slow ones others, and the wide ones the rest."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick(values: Iterable[Any], selected: Iterable[Any], then: Iterable[Any] | None = None) -> list[Any]:
    """Returns the values, those of ``then`` marked as slow, others but ``selected`` as wide. None: all are slow."""
    selected, then = list(selected), None if then is None else list(then)
    mark = lambda value: pytest.mark.slow if then is None or value in then else pytest.mark.wide
    return [value if value in selected else pytest.param(value, marks=mark(value)) for value in values]


def slow(values: Iterable[Any], selected: Iterable[Any]) -> list[Any]:
    """Returns the values, those of ``selected`` marked as slow, the rest as wide."""
    return quick(values, [], selected)
