"""A recipe in a module that postpones its annotations."""

from __future__ import annotations

from typing import Literal

from jtrees import pytree
from jtrees.search import Recipe, option


@pytree.dataclass(kw_only=True)
class Postponed(Recipe):
    """A recipe whose annotations are text."""

    rate: float = option(0.5, above=0)
    depth: int = option(2, most=16)
    mode: Literal["fast", "slow"] | None = option("fast")
