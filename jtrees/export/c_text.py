"""Writes numbers, strings and arrays as C source."""

from typing import Any

import numpy as np

_SPECIAL = {"$": "\1", "@": "\2"}  # characters that have a meaning in templates


def escaped(text: str) -> str:
    """Returns a text in which stand-ins replace the characters that have a meaning in templates."""
    return text.translate(str.maketrans(_SPECIAL))


def unescaped(text: str) -> str:
    """Returns a text in which the characters that :func:`held` replaced are restored."""
    return text.translate(str.maketrans({stand_in: character for character, stand_in in _SPECIAL.items()}))


def table(kind: str, name: str, values: Any, width: int | None = None) -> str:
    """Returns the definition of a constant array.

    ``width`` is the declared size of the last axis. Elements beyond the values are 0.
    """
    values = np.asarray(values)
    shape = "".join(f"[{n}]" for n in (*values.shape[:-1], width or values.shape[-1]))
    return f"static const {kind} $_{name}{shape} = {_listed(values, kind)};"


def _listed(values: np.ndarray, kind: str) -> str:
    if values.ndim > 1:
        return "{" + ",\n".join(_listed(row, kind) for row in values) + "}"
    return "{" + ", ".join(number(value, kind) for value in values) + "}"


def number(value: Any, kind: str) -> str:
    """Returns a number as the shortest text that reads back as itself."""
    if kind == "int":
        return str(int(value))
    text = str(np.float32(value) if kind == "float" else np.float64(value))
    return text + "f" if kind == "float" else text


def string(text: str) -> str:
    """Returns a string literal in UTF-8. All bytes except letters, digits and spaces are escaped."""
    safe = lambda byte: chr(byte) if (chr(byte).isalnum() and byte < 128) or byte == 32 else f"\\{byte:03o}"
    return '"' + "".join(map(safe, text.encode())) + '"'
