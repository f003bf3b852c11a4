"""Options of recipes by name, and combinations of options: grids, lists, and draws from spaces."""

from collections.abc import Mapping, Sequence
import difflib
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jtrees.search import Recipe, options as kinds
from jtrees.selection.space import draw
from jtrees.validation import check_count, quoted, quoted_list


def options_of(recipe: Any) -> dict[str, Any]:
    """Returns the options of a recipe or mapping by name, without the options of a base; empty for other objects."""
    if isinstance(recipe, Mapping):
        return dict(recipe)
    return dict(vars(recipe)) if isinstance(recipe, Recipe) else {}


def all_options(recipe: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the options of a recipe or mapping and of its bases, by full name such as ``"base__depth"``."""
    options = {}
    for name, value in options_of(recipe).items():
        options |= {f"{prefix}{name}": value} | all_options(value, f"{prefix}{name}__")
    return options


def with_options(recipe: Any, options: dict[str, Any]) -> Any:
    """Returns the recipe with changed options, by name; an option of a base recipe is ``"base__depth"``.

    Raises ``ValueError`` if a name is unknown. The message lists the options.
    """
    for name, value in sorted(options.items(), key=lambda option: option[0].count("__")):  # a base before its options
        first, _, rest = name.partition("__")
        if first not in (available := options_of(recipe)):
            raise ValueError(_unknown(recipe, available, first))
        changed = {first: with_options(available[first], {rest: value}) if rest else value}
        kind: Any = type(recipe)
        recipe = kind({**recipe, **changed}) if isinstance(recipe, Mapping) else recipe.replace(**changed)
    return recipe


def _unknown(recipe: Any, available: Mapping[str, Any], name: str) -> str:
    """Returns the message for an unknown option; it includes the full name if a base or a mapping has the option."""
    listed = quoted_list(available) or "none"
    if isinstance(recipe, Mapping):
        return f"options by name are {listed}, got {quoted(name)}: only an option with a value can be varied"
    places = [full for full in all_options(recipe) if full.endswith(f"__{name}")]
    places.sort(key=lambda full: full.count("__"))  # the nearest base first
    places += difflib.get_close_matches(name, available, 1)
    remedy = f": write {quoted(places[0])}" if places else ""
    return f"options of {type(recipe).__name__} are {listed}, got {quoted(name)}{remedy}"


def combinations_of(
    recipe: Recipe, key: Array, *, grid: Any = None, samples: Any = None, space: Any = None
) -> list[dict[str, Any]]:
    """Returns the combinations of options for the arguments of :func:`jtrees.sweep`, and raises its errors."""
    for name, value in (("samples", samples), ("space", space)):
        if grid is not None and value is not None:
            raise ValueError(f"grid and {name} exclude each other, got both")
    if grid is not None:
        argument, combinations = "grid", _products(grid)
    elif space is not None:
        if samples is None or isinstance(samples, Sequence):
            raise ValueError(f"samples must be the number of draws from the space, got {quoted(samples)}")
        argument, combinations = "space", draw(space, check_count("samples", samples), key)
    elif samples is not None:
        if not isinstance(samples, Sequence) or not samples or not all(isinstance(row, Mapping) for row in samples):
            expected = 'combinations, such as [{"depth": 3}], or with a space be a number of draws'
            raise ValueError(f"samples must hold {expected}, got {quoted(samples)}")
        argument, combinations = "samples", list(map(dict, samples))
    else:
        raise ValueError("grid, samples or space must be given, got none")
    # The combinations of a grid or a space have the same names.
    for options in combinations if argument == "samples" else combinations[:1]:
        if any(name.split("__")[-1] == "target_features" for name in options):
            raise ValueError(f"{argument} must hold options that do not change the targets, got 'target_features'")
        try:
            with_options(recipe, options)
        except ValueError as error:
            raise ValueError(f"{argument}: {error}") from None
    return combinations


def _products(grid: Any) -> list[dict[str, Any]]:
    """Returns all combinations of the values of a grid.

    Raises ``ValueError`` if it is empty or not a mapping to values.
    """
    message = f'grid must hold values by name, such as {{"depth": range(1, 9)}}, got {quoted(grid)}'
    try:
        lists = {str(name): list(values) for name, values in grid.items() if not isinstance(values, str)}
    except (AttributeError, TypeError):
        raise ValueError(message) from None
    if not lists or len(lists) < len(grid) or not all(lists.values()):
        raise ValueError(message)
    return [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]


def groups_of(recipe: Any, combinations: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Returns groups of indices of combinations that share a compiled program: only their traced options differ."""
    groups: dict[Any, list[int]] = {}
    for i, options in enumerate(combinations):
        leaves, static = jax.tree.flatten(kinds.checked(with_options(recipe, options)))
        groups.setdefault((static, tuple(jnp.shape(leaf) for leaf in leaves)), []).append(i)
    return list(groups.values())
