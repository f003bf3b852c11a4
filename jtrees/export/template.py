"""Text formats: templates, arrays of numbers, and the rules of escape of C and SQL.

A name or a level may hold any characters. The rule of a language writes it as a literal, a name or a comment. The rule
of Python is ``repr``, and the rule of JavaScript is ``json.dumps``.
"""

from collections.abc import Callable, Mapping
import re
from typing import Any

import numpy as np

from jtrees.tables.periods import level_number
from jtrees.validation import quoted


def fill(template: str, **parts: Any) -> str:
    """Returns a template with a part in the place of each ``@KEY@``. Parts may hold any text, such as ``@KEY@``."""
    return re.sub("@([A-Z_]+)@", lambda match: str(parts[match[1]]), template)


def array(values: np.ndarray, number: Callable[[Any], str] = str, brackets: str = "[]") -> str:
    """Returns an array as text. ``number`` writes an integer or a float; by default, so that it reads back exactly."""
    if values.ndim > 1:
        return brackets[0] + ",\n".join(array(row, number, brackets) for row in values) + brackets[1]
    return brackets[0] + ", ".join(map(number, values.tolist())) + brackets[1]


def period_code(name: str, steps: Mapping[str, str], *, day: str = "day", time: str = "time") -> str:
    """Returns code for the number of the level of a period of dates, from code of the day and the time.

    ``steps`` has the code of each operation of :class:`jtrees.tables.periods.Period`, in which ``{0}`` stands for a
    value, and ``{1}`` for a whole number. All but sums need no brackets, because they have equal precedence.
    """
    return level_number(name, {"day": day, "time": time}, {step: code.format for step, code in steps.items()})


def c_literal(text: str) -> str:
    """Returns a string literal in UTF-8. All bytes except letters, digits and spaces are escaped."""
    safe = lambda byte: chr(byte) if (chr(byte).isalnum() and byte < 128) or byte == 32 else f"\\{byte:03o}"
    return '"' + "".join(map(safe, text.encode())) + '"'


def c_comment(text: str) -> str:
    """Returns a text on a single line. It ends no comment, and it does not continue on the next line."""
    printable = "".join(c if c.isprintable() else " " for c in text)
    return printable.replace("*/", "* /").replace("/*", "/ *").replace("??/", "?? /")


def sql_name(text: str) -> str:
    """Returns the name of a column or a table.

    Raises ``ValueError`` for characters that a database does not preserve.
    """
    return _delimited(text, '"')


def sql_literal(text: str) -> str:
    """Returns a string literal. It raises the errors of :func:`sql_name`."""
    return _delimited(text, "'")


def _delimited(text: str, mark: str) -> str:
    if "\0" in text or "\r" in text:  # a file that is read as text has other ends of lines
        raise ValueError(f"names and levels must have no null character or carriage return in SQL, got {quoted(text)}")
    return mark + text.replace(mark, 2 * mark) + mark
