"""Options of recipes and their defaults. The annotation says which values an option takes, and bounds say the range.

    depth: int = option(4, most=16)
    learning_rate: float = option(0.01, above=0)
    leaves: Literal["constant", "linear"] = option("constant")

Options that may be traced are arguments of the compiled program: a new value does not recompile it, and ``vmap`` maps
over them. These are numbers (``float``) and ranges, unless they may be a word or are declared ``traced=False``. All
other options are static: they are part of the program. :func:`checked` checks all options of a recipe.
"""

from collections.abc import Callable, Iterable
import dataclasses
import types
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import pytree, validation as checks
from jtrees.search.recipe import Recipe
import pallas_kernels
from pallas_kernels import Implementation

__all__ = ["Ranges", "checked", "checked_values", "option"]

Ranges = tuple[tuple[float, float], ...]  # pairs (low, high) of positive numbers
_KINDS = bool, int, float, Callable, tuple[int, ...], Ranges  # the kinds of values that an option can check
_BOUNDS = "least", "above", "below", "most"
_LARGEST = checks.MAX_NUMBERS - 1  # an integer is below the largest value of a 32-bit counter


class Option(NamedTuple):
    """What an option takes, beside its annotation."""

    bounds: dict[str, int | float]  # as keywords of `jtrees.validation.check_number`
    traced: bool | None = None  # None: if it is annotated as a number, or as `Ranges`
    check: Callable[[str, Any], Any] | None = None  # `(name, value) -> the value to store`, instead of the annotation

    def is_traced(self, annotation: Any) -> bool:
        """Returns whether the option is an argument of the program; raises ``TypeError`` for an unknown annotation."""
        if self.check is not None:
            return bool(self.traced)
        kinds, words = _alternatives(annotation)
        is_known = annotation == Implementation or (not kinds and words)
        is_known = is_known or (len(kinds) == 1 and (kinds[0] in _KINDS or get_origin(kinds[0]) is Callable))
        if not is_known or not all(word is None or isinstance(word, str) for word in words):
            raise TypeError(f"an option must be annotated by values that it can check, got {annotation}: give check=")
        possible = {float: _BOUNDS, int: ("least", "most")}.get(kinds[0] if kinds else None, ())
        if unused := set(self.bounds) - set(possible):
            raise TypeError(f"an option of {annotation} must have no bound {checks.quoted_list(sorted(unused))}")
        return kinds in ([float], [Ranges]) and not any(words) if self.traced is None else self.traced

    def checked(self, name: str, value: Any, annotation: Any) -> Any:
        """Returns the value to store. Numbers that may be traced become arrays, of NumPy if they are not of JAX."""
        if self.check is not None:
            return self.check(name, value)
        if annotation == Implementation:
            names = pallas_kernels.named(value, name)
            return names if isinstance(value, list) else value
        kinds, words = _alternatives(annotation)
        if (value is None or isinstance(value, str)) and value in words:
            return value
        if not kinds:
            return checks.check_choice(name, value, [word for word in words if word], "None" if None in words else "")
        try:
            return self._checked(name, value, kinds[0], self.is_traced(annotation))
        except ValueError as error:
            if not words:
                raise
            raise ValueError(f"{error}; it may be {checks.listed(map(checks.quoted, words), ' or ')}") from None

    def _checked(self, name: str, value: Any, kind: Any, traced: bool) -> Any:
        """Returns the checked value of a kind of values."""
        if kind is bool:
            return checks.check_flag(name, value)
        if kind is int:
            least = int(self.bounds.get("least", 1))
            if "most" in self.bounds:
                return checks.check_depth(value, int(self.bounds["most"]), name, least)
            return checks.check_count(name, value, least, _LARGEST)
        if kind is float:
            return _number(name, value, **self.bounds) if traced else checks.check_scalar(name, value, **self.bounds)
        if kind == tuple[int, ...]:
            if (
                isinstance(value, (str, bytes))
                or not isinstance(value, Iterable)
                or getattr(value, "shape", None) == ()
            ):
                raise ValueError(f"{name} must be whole numbers, such as (240, 240), got {checks.quoted(value)}")
            return tuple(checks.check_count(name, number) for number in value)
        if kind == Ranges:
            return _checked_ranges(name, value)
        if not callable(value):
            raise ValueError(f"{name} must be a function, got {checks.quoted(value)}")
        return value


def option(
    default: Any = dataclasses.MISSING,
    *,
    check: Callable[[str, Any], Any] | None = None,
    traced: bool | None = None,
    **bounds: int | float,
) -> Any:
    """Declares an option of a recipe.

    The annotation is ``bool``, ``int`` (by default at least 1), ``float``, ``tuple[int, ...]``, :data:`Ranges`, a
    function, :data:`pallas_kernels.Implementation`, or a ``Literal`` of words. It may be joined with words and None,
    such as ``int | Literal["auto"] | None``.

    Args:
      default: the default value; without it, the option must be given.
      check: ``(name, value) -> the value to store``, instead of the annotation and the bounds. It raises
        ``ValueError``.
      traced: whether the option may be traced. None: if it is annotated as a number, or as :data:`Ranges`.
      **bounds: bounds of the numbers: ``least``, ``above``, ``below`` or ``most``; of whole numbers: ``least`` or
        ``most``.

    Raises:
      TypeError: in the declaration of the recipe, for an annotation that says nothing about the values.
    """
    if unknown := set(bounds) - set(_BOUNDS):
        raise TypeError(f"bounds must be {checks.listed(_BOUNDS)}, got {checks.quoted_list(sorted(unknown))}")
    declared = Option(bounds, traced, check)
    return pytree.field(pytree_node=declared.is_traced, metadata={"option": declared}, default=default)  # type: ignore[arg-type]


def checked(recipe: Any) -> Any:
    """Returns the recipe with all options checked, numbers as float32 arrays, and values for options left at None.

    Raises:
      ValueError: if an option is invalid. The message names the option, what was expected, and the value.
    """
    return _checked(_checked(recipe).with_defaults())  # the second check is for the values that ``with_defaults`` sets


def _checked(recipe: Any) -> Any:
    declared = [field.name for field in dataclasses.fields(recipe) if "option" in field.metadata]
    values = checked_values(recipe, **{name: getattr(recipe, name) for name in declared})
    is_array = lambda value: isinstance(value, (np.ndarray, jax.Array))
    on_device = lambda value: jnp.asarray(value, jnp.float32) if is_array(value) else value
    return recipe.replace(**{name: on_device(value) for name, value in values.items()})


def checked_values(recipe: Any, **values: Any) -> dict[str, Any]:
    """Returns checked values of options of a recipe or of its class, by name. Numbers are not put on a device.

    Raises:
      ValueError: if a value is invalid. The message names the option, what was expected, and the value.
    """
    fields = {field.name: field for field in dataclasses.fields(recipe)}
    cls = recipe if isinstance(recipe, type) else type(recipe)

    def check(field: dataclasses.Field, value: Any) -> Any:
        return field.metadata["option"].checked(field.name, value, pytree.annotation_of(cls, field))

    return {name: check(fields[name], value) for name, value in values.items()}


def as_scalar(name: str, value: Any, **bounds: int | float) -> Array:
    """Returns a checked number as a float32 array; ``0`` and ``0.0`` would compile to two programs."""
    return jnp.asarray(_number(name, value, **bounds), jnp.float32)


def _number(name: str, value: Any, **bounds: int | float) -> Any:
    """Returns a checked number as a float32 array of NumPy, or as the given array of JAX."""
    if (array := _numeric(value)) is None:
        raise ValueError(f"{name} must be a number, got {checks.quoted(value)}")
    checks.check_number(name, array, **bounds)
    return array


def _numeric(value: Any) -> Any:
    """Returns numbers as a float32 array in NumPy, JAX arrays unchanged, and None for any other value."""
    if isinstance(value, jax.Array):
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        return None
    real = array.dtype.kind in "iuf" or jnp.issubdtype(array.dtype, jnp.floating)
    return array.astype(np.float32) if real else None


def _checked_ranges(name: str, value: Any) -> Any:
    """Returns checked pairs as a float32 array ``(pairs, 2)``, of NumPy if it is not of JAX."""
    pairs = _numeric(value)
    if pairs is None or pairs.ndim != 2 or pairs.shape[1] != 2 or len(pairs) == 0:
        raise ValueError(f"{name} must be pairs (low, high), at least one, got {checks.quoted(value)}")
    checks.check_numbers(name, pairs, above=0)
    if not checks.is_traced(pairs) and np.any(np.asarray(pairs)[:, 0] > np.asarray(pairs)[:, 1]):
        raise ValueError(f"{name} must be pairs (low, high) with low <= high, got {checks.quoted(value)}")
    return pairs


def _alternatives(annotation: Any) -> tuple[list[Any], list[Any]]:
    """Returns the kinds of values of an annotation, and its words, such as None and the words of a ``Literal``."""
    kinds, words = [], []
    for member in get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,):
        if member is types.NoneType or get_origin(member) is Literal:
            words += get_args(member) or [None]
        else:
            kinds.append(member)
    return kinds, words


def checked_base(name: str, value: Any) -> Recipe:
    """Returns the recipe with its options checked."""
    if not isinstance(value, Recipe):
        raise ValueError(f"{name} must be a recipe, such as jtrees.DGT(), got {checks.quoted(value)}")
    return _checked(value)


BASE = {"option": Option({}, True, checked_base)}  # metadata of a field that is a recipe
