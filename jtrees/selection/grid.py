"""Options of recipes by name, and combinations of options: grids, lists, and draws from spaces."""

from collections.abc import Mapping, Sequence
import difflib
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jtrees.search import Recipe, options as kinds
from jtrees.selection.space import drawn
from jtrees.validation import check_count, quoted, quoted_list


def options_of(recipe: Any) -> dict[str, Any]:
    """Returns the options of a recipe or mapping by name, without the options of a base; empty for other objects."""
    if isinstance(recipe, Mapping):
        return dict(recipe)
    return dict(vars(recipe)) if isinstance(recipe, Recipe) else {}


def with_options(recipe: Any, options: dict[str, Any]) -> Any:
    """Returns the recipe with changed options, by name; an option of a base recipe is ``"base__depth"``.

    Raises:
      ValueError: if a name is unknown. The message lists the options.
    """
    for name, value in options.items():
        first, _, rest = name.partition("__")
        if first not in (known := options_of(recipe)):
            raise ValueError(_unknown(recipe, known, first))
        changed = {first: with_options(known[first], {rest: value}) if rest else value}
        kind: Any = type(recipe)
        recipe = kind({**recipe, **changed}) if isinstance(recipe, Mapping) else recipe.replace(**changed)
    return recipe


def _unknown(recipe: Any, known: Mapping[str, Any], name: str) -> str:
    """Returns the message for an unknown option; it includes the full name if a base or a mapping has the option."""
    listed = quoted_list(known) or "none"
    if isinstance(recipe, Mapping):
        return f"options by name are {listed}, got {quoted(name)}: only an option with a value can be varied"
    place = _place_of(recipe, name) or next(iter(difflib.get_close_matches(name, known, 1)), None)
    return f"options of {type(recipe).__name__} are {listed}, got {quoted(name)}" + (
        f": write {quoted(place)}" if place else ""
    )


def _place_of(recipe: Any, name: str) -> str | None:
    """Returns the full name of an option of a base or of a mapping, or None."""
    for first, value in options_of(recipe).items():
        inside = options_of(value)
        if rest := name if name in inside else _place_of(value, name):
            return f"{first}__{rest}"
    return None


def combinations_of(
    recipe: Recipe, key: Array, *, grid: Any = None, samples: Any = None, space: Any = None
) -> list[dict[str, Any]]:
    """Returns the combinations of a grid, of a list of samples, or of a number of samples of a space.

    Args:
      recipe: the recipe that has the options.
      key: random key of the draws from a space.
      grid: values by name; all combinations of the values are returned.
      samples: combinations, or the number of draws from the space.
      space: ranges or choices by name: see :func:`jtrees.selection.space.drawn`.

    Raises:
      ValueError: if the arguments are not exactly one of a grid, samples, and a space with a number of samples. Also if
        a name is unknown, or if a grid, samples or a space is invalid.
    """
    if grid is not None and samples is not None:
        raise ValueError("grid and samples exclude each other, got both")
    if grid is not None and space is not None:
        raise ValueError("grid and space exclude each other, got both")
    if space is not None:
        if samples is None or isinstance(samples, Sequence):
            raise ValueError(f"samples must be the number of draws from the space, got {quoted(samples)}")
        draws = drawn(space, check_count("samples", samples), key)
        _check_names("space", recipe, draws[0])
        return draws
    if samples is not None:
        return checked_samples(recipe, samples)
    if grid is None:
        raise ValueError("grid, samples or space must be given, got none")
    return checked_grid(recipe, grid)


def checked_grid(recipe: Recipe, grid: Any) -> list[dict[str, Any]]:
    """Returns all combinations of a grid.

    Raises:
      ValueError: if the grid is empty, or has names that are not options of the recipe.
    """
    message = f'grid must hold values by name, such as {{"depth": range(1, 9)}}, got {quoted(grid)}'
    try:
        grid = {str(name): list(values) for name, values in grid.items()}
    except (AttributeError, TypeError):
        raise ValueError(message) from None
    if not grid or not all(grid.values()):
        raise ValueError(message)
    _check_names("grid", recipe, {name: values[0] for name, values in grid.items()})
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def checked_samples(recipe: Recipe, samples: Any) -> list[dict[str, Any]]:
    """Returns a checked list of combinations.

    Raises:
      ValueError: if the list is empty, or has names that are not options of the recipe.
    """
    if not isinstance(samples, Sequence) or not samples or not all(isinstance(one, Mapping) for one in samples):
        expected = 'combinations, such as [{"depth": 3}], or with a space be a number of draws'
        raise ValueError(f"samples must hold {expected}, got {quoted(samples)}")
    for options in samples:
        _check_names("samples", recipe, options)
    return [dict(options) for options in samples]


def _check_names(what: str, recipe: Recipe, options: Any) -> None:
    """Raises ``ValueError`` for unknown options, and for options that must not be tuned."""
    if any(name.split("__")[-1] == "target_features" for name in options):
        raise ValueError(f"{what} must hold options that do not change the targets, got 'target_features'")
    try:
        with_options(recipe, options)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def groups_of(recipe: Any, combinations: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Returns groups of indices of combinations that share a compiled program: only their traced options differ."""
    groups: dict[Any, list[int]] = {}
    for i, options in enumerate(combinations):
        leaves, static = jax.tree.flatten(kinds.checked(with_options(recipe, options)))
        groups.setdefault((static, tuple(jnp.shape(leaf) for leaf in leaves)), []).append(i)
    return list(groups.values())
