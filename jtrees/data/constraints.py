"""Constraints by column: monotone predictions, and groups of columns that may share a split."""

from collections.abc import Callable, Mapping, Sequence
import numbers
from typing import Any, NamedTuple

import numpy as np

from jtrees import validation as checks


class NamedColumn(NamedTuple):
    """A column of a raw table.

    Attributes:
      name: its name.
      features: the number of features that the column becomes.
      kind: the kind of its values, or ``"constant"``. The first feature of numbers and booleans rises with the values.
    """

    name: str
    features: int
    kind: str


Columns = Sequence[NamedColumn] | None


def checked_signs(monotone: Any, columns: Columns, features: int) -> tuple[int, ...] | None:
    """Returns the sign of each of the ``features``, 1, -1 or 0; None if all signs are 0.

    ``monotone`` has signs by the name or number of the column, or a sign for each column; ``columns`` are the columns
    of a raw table. Raises ``ValueError`` for an unknown column, a column that is not numeric, or an invalid sign.
    """
    if monotone is None:
        return None
    names = _names(columns, features)
    if not isinstance(monotone, Mapping):
        is_list = isinstance(monotone, (Sequence, np.ndarray)) and not isinstance(monotone, str) and np.ndim(monotone)
        if not is_list or len(monotone) != len(names):
            raise ValueError(f"monotone must be signs by column, or {len(names)} signs, got {checks.quoted(monotone)}")
        named_signs = list(zip(names, monotone, strict=True))
    else:
        find = column_finder(names, "monotone")
        named_signs = [(find(column), sign) for column, sign in monotone.items()]
    signs, signed = [0] * features, set()
    first = dict(zip(names, np.searchsorted(column_of_features(columns, features), range(len(names))), strict=True))
    kinds = {column.name: column.kind for column in columns or ()}
    for name, sign in named_signs:
        if name in signed:
            raise ValueError(f"monotone must have one sign for each column, got two for {checks.quoted(name)}")
        signed.add(name)
        if isinstance(sign, (bool, np.bool_)) or sign not in (-1, 0, 1):
            raise ValueError(
                f"monotone must have the signs -1, 0 or 1, got {checks.quoted(sign)} for {checks.quoted(name)}"
            )
        kind = kinds.get(name, "number")
        if sign and kind not in ("number", "boolean", "constant"):
            raise ValueError(f"monotone must name columns of numbers, got {checks.quoted(name)}, of the kind {kind}")
        if sign and kind != "constant":  # the second feature of a column of numbers marks missing values
            signs[first[name]] = int(sign)
    return tuple(signs) if any(signs) else None


def checked_groups(interactions: Any, columns: Columns, features: int) -> np.ndarray | None:
    """Returns the number of the group of each feature, ``(features,)``; None if all features may share a split.

    ``interactions`` has groups of columns by name or number; all remaining columns form a further group. ``"none"``:
    each column is a group. Raises ``ValueError`` for an unknown column, and for groups that overlap.
    """
    if interactions is None:
        return None
    names = _names(columns, features)
    groups: Any = [[name] for name in names] if isinstance(interactions, str) else interactions
    group_numbers: dict[Any, int] = {}
    find = column_finder(names, "interactions")
    for number, group in enumerate(groups):
        for column in group:
            name = find(column)
            if name in group_numbers:
                raise ValueError(f"interactions must be groups that do not overlap, got {checks.quoted(name)} twice")
            group_numbers[name] = number
    return np.array([group_numbers.get(name, len(names)) for name in names])[column_of_features(columns, features)]


def column_of_features(columns: Columns, features: int) -> np.ndarray:
    """Returns the number of the column of each feature, ``(features,)``."""
    if columns is None:
        return np.arange(features)
    return np.repeat(np.arange(len(columns)), [column.features for column in columns])


def _names(columns: Columns, features: int) -> list[Any]:
    return list(range(features)) if columns is None else [column.name for column in columns]


def column_finder(names: list[Any], argument: str) -> Callable[[Any], Any]:
    """Returns a function that returns the name of a column given by name or by number.

    A number is a name if the table has columns that are named by numbers, else it is a position. Names of a table are
    text here, whatever type they have in the DataFrame. The function raises ``ValueError`` for an unknown column, and
    names the argument.
    """
    numbered: dict[Any, Any] = {number: name for name in names if (number := _number_of(name)) is not None}
    numbered = numbered or dict(enumerate(names))
    allowed = frozenset(names)

    def find(column: Any) -> Any:
        is_number = isinstance(column, numbers.Real) and not isinstance(column, (bool, np.bool_))
        name = numbered.get(column) if is_number and str(column) not in allowed else str(column)
        if name not in allowed:
            among = checks.quoted_list(names)
            raise ValueError(f"{argument} must name columns of x, {among}, got {checks.quoted(column)}")
        return name

    return find


def _number_of(name: Any) -> float | None:
    """Returns the number whose text is the name of a column, or None. The name ``1e3`` is no text of a number."""
    try:
        number = float(name)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if np.isfinite(number) and str(name) in (str(number), f"{number:.0f}") else None
