"""Defaults by context: a tree of a boosted sum needs fewer updates and starts than a tree on its own."""

from typing import Any

from jtrees import validation
from jtrees.search import options

_ALONE = {
    "starts": 10,
    "learning_rate": 0.01,
    "alpha_ranges": ((5.0, 25.0), (50.0, 150.0)),
    "cart": True,
    "ridge": True,
    "precondition": "auto",
    "shrink": True,
    "halving": True,
}
_IN_A_SUM = {
    "starts": 1,
    "epochs": 20,
    "learning_rate": 0.03,
    "alpha_ranges": ((20.0, 60.0),),
    "cart": "binned",
    "ridge": False,
    "precondition": 0.0,
    "shrink": False,
    "halving": False,
}  # chosen for GET, among the variants of experiments.boosting
_ROWS_IN_A_SUM, _OF_LEAF_IN_A_SUM = 4000, 60  # rows of a round, and the fewest rows of a round for each leaf


def settled(recipe: Any, weak: bool) -> Any:
    """Returns the recipe with a value for each option that is None, and for ``rows="auto"`` in a sum."""
    by_context: dict[str, Any] = _IN_A_SUM if weak else _ALONE
    values = {name: value for name, value in by_context.items() if getattr(recipe, name, value) is None}
    if weak and recipe.rows == "auto":
        values["rows"] = max(_ROWS_IN_A_SUM, _OF_LEAF_IN_A_SUM * 2**recipe.depth)
    return recipe.replace(**values)


def cart() -> Any:
    """The option ``cart``: True, False, ``"binned"``, or None for the default."""

    def check(name: str, value: Any) -> bool | str | None:
        if value is None or (isinstance(value, str) and value == "binned"):
            return value
        try:
            return validation.check_flag(name, value)
        except ValueError:
            raise ValueError(f'{name} must be True, False or "binned", got {validation.quoted(value)}') from None

    return options.static(None, check)
