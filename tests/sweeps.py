"""Parameters of which the quick tests use some, and the slow or wide ones all."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick(values: Iterable[Any], some: Iterable[Any], others: Any = pytest.mark.slow) -> list[Any]:
    """The values, those that are not among ``some`` marked as ``others``."""
    some = list(some)
    return [value if value in some else pytest.param(value, marks=others) for value in values]
