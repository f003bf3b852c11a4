"""Writes numbers, arrays and templates as C source."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jtrees.export import template


class Source(NamedTuple):
    """Writes C source in which all names begin with a prefix.

    In templates, ``$`` stands for the prefix, and ``$$`` for the prefix in capitals.
    """

    prefix: str

    def fill(self, text: str, **parts: Any) -> str:
        """Returns a template with its parts, which may hold any text: see :func:`jtrees.export.template.fill`."""
        return template.fill(text.replace("$$", self.prefix.upper()).replace("$", self.prefix), **parts)

    def table(self, kind: str, name: str, values: Any, width: int | None = None) -> str:
        """Returns the definition of a constant array.

        ``width`` is the declared size of the last axis. Elements beyond the values are 0.
        """
        values = np.asarray(values)
        shape = "".join(f"[{n}]" for n in (*values.shape[:-1], width or values.shape[-1]))
        listed = template.array(values, partial(number, kind=kind), "{}")
        return f"static const {kind} {self.prefix}_{name}{shape} = {listed};"


def number(value: Any, kind: str) -> str:
    """Returns a number as the shortest text that reads back as itself."""
    if kind == "int":
        return str(int(value))
    return f"{np.float32(value)!s}f" if kind == "float" else str(np.float64(value))
