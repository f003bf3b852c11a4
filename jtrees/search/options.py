"""Kinds of options: each kind declares a default, a check with a message, and whether the option is static or traced.

    depth: int = options.depth(4)
    learning_rate: float = options.positive(0.01)

Static options are part of the compiled program. Numeric options are arguments of the program: a new value does not
recompile it, and ``vmap`` maps over numeric options. :func:`checked` checks all options of a recipe.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import pytree, validation as checks
from jtrees.search.recipe import Recipe
import pallas_kernels

_LARGEST = checks.MAX_NUMBERS - 1  # an integer is below the largest value of a 32-bit counter
Check = Callable[[str, Any], Any]  # (name, value) -> the value to store; ValueError naming the option


def checked(recipe: Any) -> Any:
    """Returns the recipe with all options checked, numbers as float32 arrays, and values for options left at None.

    Raises:
      ValueError: if an option is invalid. The message names the option, what was expected, and the value.
    """
    return _checked(_checked(recipe).settled())  # the second check is for the values that ``settled`` sets


def _checked(recipe: Any) -> Any:
    values = {}
    for field in dataclasses.fields(recipe):
        if (check := field.metadata.get("check")) is not None:
            values[field.name] = check(field.name, getattr(recipe, field.name))
    return recipe.replace(**values)


def as_scalar(name: str, value: Any, check: Callable[[str, Any], None]) -> Array:
    """Returns a checked number as a float32 array; ``0`` and ``0.0`` would compile to two programs.

    Raises:
      ValueError: if the number is invalid. The message names the option.
    """
    if (array := _numeric(value)) is None:
        raise ValueError(f"{name} must be a number, got {checks.quoted(value)}")
    check(name, array)
    if array.ndim:
        raise ValueError(f"{name} must be one number, got shape {array.shape}: sweep or tune over several")
    return jnp.asarray(array, jnp.float32)


def _numeric(value: Any) -> Any:
    """Returns numbers as a float32 array in NumPy, JAX arrays unchanged, and None for any other value."""
    if isinstance(value, jax.Array):
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        return None
    real = array.dtype.kind in "biuf" or jnp.issubdtype(array.dtype, jnp.floating)
    return array.astype(np.float32) if real else None


def _or(check: Check, *words: str | None) -> Check:
    """Returns a check that also accepts these words, such as None."""
    alternatives = checks.listed(map(checks.quoted, words), " or ")

    def check_or_word(name: str, value: Any) -> Any:
        if (value is None or isinstance(value, str)) and value in words:
            return value
        try:
            return check(name, value)
        except ValueError as error:
            raise ValueError(f"{error}; it may be {alternatives}") from None

    return check_or_word


def static(default: Any, check: Check | None = None) -> Any:
    """A static option with any check."""
    return pytree.field(default=default, pytree_node=False, metadata={"check": check})


def traced(default: Any, check: Check) -> Any:
    """An option that may be traced, with any check."""
    return pytree.field(default=default, metadata={"check": check})


# --- Static options --------------------------------------------------------------------------------------------------


def depth(default: int, most: int = checks.MAX_DEPTH) -> Any:
    """Depth of a tree, 1 to ``most``."""
    return static(default, lambda name, value: checks.check_depth(value, most, name))


def count(default: int, minimum: int = 1, most: int | None = None) -> Any:
    """An integer of at least ``minimum``."""
    return static(default, partial(checks.check_count, minimum=minimum, most=most or _LARGEST))


def optional_count(default: int | None) -> Any:
    """An integer of at least 1, or None."""
    return static(default, _or(partial(checks.check_count, most=_LARGEST), None))


def rows() -> Any:
    """Rows that splits are trained on: an integer of at least 1, ``"auto"``, or None for all rows."""
    return static("auto", _or(partial(checks.check_count, most=_LARGEST), "auto", None))


def counts(*default: int) -> Any:
    """Integers of at least 1, such as widths of layers."""
    return static(default, checked_counts)


def checked_counts(name: str, value: Any) -> tuple[int, ...]:
    """Returns a checked tuple of integers of at least 1."""
    if not isinstance(value, Iterable):
        raise ValueError(f"{name} must be whole numbers, such as (240, 240), got {checks.quoted(value)}")
    return tuple(checks.check_count(name, number) for number in value)


def check_function(name: str, value: Any) -> Any:
    """Returns a checked function."""
    if not callable(value):
        raise ValueError(f"{name} must be a function, got {checks.quoted(value)}")
    return value


def flag(default: bool | None) -> Any:
    """True or False; None is allowed if it is the default."""
    return static(default, _or(checks.check_flag, None) if default is None else checks.check_flag)


def choice(default: Any, choices: Sequence[str], optional: bool = False) -> Any:
    """One of the names ``choices``; None is allowed if ``optional`` is True."""
    check = partial(checks.check_choice, choices=choices)
    return static(default, _or(check, None) if optional else check)


def implementation() -> Any:
    """An implementation of a step, or None for the fastest: see :mod:`jtrees.ops`."""

    def check(name: str, value: Any) -> Any:
        names = pallas_kernels.named(value, name)
        return names if isinstance(value, list) else value

    return static(None, check)


def _host_number(name: str, value: Any, check: Check) -> float:
    if checks.is_traced(value) or isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} must be a number, got {checks.quoted(value)}")
    check(name, value)
    return float(value)


def share(default: float) -> Any:
    """A static number above 0 and at most 1."""
    return static(default, partial(_host_number, check=checks.check_share))


def precondition(default: str | None = "auto") -> Any:
    """Strength of a preconditioner, in [0, 1), or ``"auto"``; None is allowed if it is the default."""
    words = ["auto"] if default is not None else ["auto", None]
    return static(default, _or(partial(_host_number, check=checks.check_part), *words))


# --- Numeric options -------------------------------------------------------------------------------------------------


def positive(default: float) -> Any:
    """A finite number above 0."""
    return traced(default, partial(as_scalar, check=checks.check_number))


def optional_positive() -> Any:
    """A finite number above 0, or None, the default."""
    return traced(None, _or(partial(as_scalar, check=checks.check_number), None))


def optional_not_negative() -> Any:
    """A finite number of at least 0, or None, the default."""
    return traced(None, _or(partial(as_scalar, check=checks.check_not_negative), None))


def not_negative(default: float) -> Any:
    """A finite number of at least 0."""
    return traced(default, partial(as_scalar, check=checks.check_not_negative))


def part(default: float) -> Any:
    """A number in [0, 1)."""
    return traced(default, partial(as_scalar, check=checks.check_part))


def ranges(*default: tuple[float, float]) -> Any:
    """At least one pair (low, high) of positive numbers; None is allowed if no default pairs are given."""
    return traced(default or None, _checked_ranges if default else _or(_checked_ranges, None))


def _checked_ranges(name: str, value: Any) -> Array:
    """Returns checked pairs as a float32 array ``(pairs, 2)``."""
    pairs = _numeric(value)
    if pairs is None or pairs.ndim != 2 or pairs.shape[1] != 2 or len(pairs) == 0:
        raise ValueError(f"{name} must be pairs (low, high), at least one, got {checks.quoted(value)}")
    checks.check_number(name, pairs)
    if not checks.is_traced(pairs) and np.any(np.asarray(pairs)[:, 0] > np.asarray(pairs)[:, 1]):
        raise ValueError(f"{name} must be pairs (low, high) with low <= high, got {checks.quoted(value)}")
    return jnp.asarray(pairs, jnp.float32)


# --- Other recipes ---------------------------------------------------------------------------------------------------


def checked_base(name: str, value: Any) -> Recipe:
    """Returns the recipe with its options checked."""
    if not isinstance(value, Recipe):
        raise ValueError(f"{name} must be a recipe, such as jtrees.DGT(), got {checks.quoted(value)}")
    return _checked(value)
