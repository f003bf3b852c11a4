"""The recipe, the options and the loss that the arguments of a command describe."""

import argparse
import ast
import contextlib
import re
import sys
from typing import Any

import jtrees
from jtrees import losses, validation
from jtrees.cli.files import DataError
from jtrees.cli.parser import LOSSES
from jtrees.cli.tables import Task
from jtrees.estimators import BoostedClassifier, BoostedRegressor, TreeClassifier, TreeRegressor
from jtrees.selection.grid import with_options
from jtrees.tables import Schema
from jtrees.tasks.custom import named

# The estimators of a sum of trees, and of one tree or any other recipe.
_ESTIMATORS: dict[Task, Any] = {
    "regression": {True: BoostedRegressor, False: TreeRegressor},
    "classification": {True: BoostedClassifier, False: TreeClassifier},
}


def estimator_of(
    options: argparse.Namespace,
    recipe: jtrees.Recipe,
    task: Task,
    max_seconds: float | None = None,
    schema: Schema | None = None,
) -> Any:
    """Returns the estimator of a recipe that the arguments describe; ``schema`` says what the columns hold."""
    common: Any = {"random_state": options.seed, "max_seconds": max_seconds, "progress": sys.stdout.isatty()}
    kind = _ESTIMATORS[task][isinstance(recipe, jtrees.Boosted)]
    return kind(recipe, columns=schema, **common, **_parameters_of(options, task))


def default_recipe(options: argparse.Namespace, task: Task, *, boosted: bool) -> jtrees.Recipe:
    """Returns the default recipe of a sum of trees, or of one tree."""
    return _ESTIMATORS[task][boosted](**_parameters_of(options, task))._recipe()


def _parameters_of(options: argparse.Namespace, task: Task) -> dict[str, Any]:
    """Returns the parameters of an estimator on which its default recipe can depend."""
    parameters: dict[str, Any] = {"monotonic_cst": signs_of(options)}
    if task == "regression":
        parameters |= {"loss": options.loss or LOSSES[0], "quantile": options.quantile}
    return parameters


def loss_of(options: argparse.Namespace) -> losses.Loss:
    """Returns the loss of regression.

    Raises ``DataError`` if it is unknown, or for an invalid or unused quantile level.
    """
    if options.loss is not None and options.loss not in LOSSES:
        raise DataError(f"--loss must be one of {', '.join(LOSSES)}, got {validation.quoted(options.loss)}")
    if options.loss is not None and options.task == "classification":
        raise DataError("--loss is for regression, and --task is classification")
    if options.quantile is None:
        return named(options.loss or LOSSES[0])
    if options.loss != "quantile":
        raise DataError("--quantile goes with --loss quantile")
    if not 0 < options.quantile < 1:
        raise DataError(f"--quantile must be above 0 and below 1, got {options.quantile:g}")
    return losses.Quantile(options.quantile)


def recipe_of(options: argparse.Namespace, task: Task) -> jtrees.Recipe:
    """Returns the recipe that the arguments describe.

    Raises ``DataError`` for an unknown name and for options that are not ``name=value``, ``ValueError`` for unknown
    ones.
    """
    default = default_recipe(options, task, boosted=not options.tree)
    recipe = default if options.recipe is None else recipe_named(options.recipe)
    for option in options.set:
        name, equals, value = option.partition("=")
        if not name or not equals:
            raise DataError(f"--set must be OPTION=VALUE, such as depth=3, got {validation.quoted(option)}")
        with contextlib.suppress(ValueError, SyntaxError):  # a word remains text
            value = ast.literal_eval(value)
        recipe = with_options(recipe, {name.replace(".", "__"): value})
    return recipe


def signs_of(options: argparse.Namespace) -> dict[str, int] | None:
    """Returns the signs of the monotone columns by name, or None.

    Raises ``DataError`` if they are not ``COLUMN=SIGN``.
    """
    signs = {}
    for option in options.monotone:
        name, _, sign = option.rpartition("=")
        if not name or sign not in ("1", "+1", "-1"):
            raise DataError(f"--monotone must be COLUMN=1 or COLUMN=-1, got {validation.quoted(option)}")
        if signs.setdefault(name, int(sign)) != int(sign):
            raise DataError(f"--monotone must have one sign for each column, got two for {validation.quoted(name)}")
    return signs or None


def recipe_named(text: str) -> jtrees.Recipe:
    """Returns the recipe ``Name`` or ``Name(Base)``."""
    match = re.fullmatch(r"(\w+)(?:\((.+)\))?", text.strip())
    names: Any = jtrees.__all__
    kinds = {name: kind for name in names if isinstance(kind := getattr(jtrees, name), type)}
    recipes = {name: kind for name, kind in kinds.items() if issubclass(kind, jtrees.Recipe)}
    for name in ("Recipe", "LatentClustering", "FromMethod"):  # they need arguments
        del recipes[name]
    if match is None or match[1] not in recipes:
        among = f"{', '.join(recipes)}, such as Bagged(LatentTree)"
        raise DataError(f"--recipe must be one of {among}, got {validation.quoted(text)}")
    base = [] if match[2] is None else [recipe_named(match[2])]
    try:
        return recipes[match[1]](*base)
    except TypeError:
        takes = "needs a base, such as Bagged(LatentTree)" if not base else "takes no base"
        raise DataError(f"--recipe: {match[1]} {takes}") from None
