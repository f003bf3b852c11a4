"""Options of a recipe chosen by rows that were not trained on."""

from collections.abc import Iterator, Sequence
import dataclasses
import itertools
import time
from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array
import numpy as np

from jtrees import validation as checks
from jtrees.recipes import Fit, Found, Recipe, Rounds, Watch, fit, run_rounds
from jtrees.table import Table, checked_judge, checked_table, losses_of

_PATIENCE = 2  # values of depth in a row that bring nothing before deeper ones are given up


class Trial(NamedTuple):
    """One combination of options.

    Attributes:
      options: by name.
      loss: mean loss on the rows that it was not trained on (as that of a :class:`jtrees.Fit`).
      error: standard error of the difference between its losses and those of the best, row by row.
      size: numbers that its models hold (of several folds the mean).
    """

    options: dict[str, Any]
    loss: float
    error: float
    size: float


def tune(
    recipe: Any,
    x: ArrayLike,
    y: ArrayLike | None = None,
    *,
    key: Array,
    grid: dict[str, Sequence[Any]],
    validation: tuple[ArrayLike, ArrayLike] | float | int = 1 / 3,
    **options: Any,
) -> Fit:
    """Chooses options of a recipe, and fits it with them.

    Every combination of the grid is fitted to a part of the rows and judged by the others. Options that are structure
    (depth, kinds) compile once each; for each of them all numbers run in one compiled program. Where the grid has
    ``depth``, deeper trees are given up after two depths in a row that bring nothing. Of those combinations that do
    worse than the best by no more than the standard error of the difference, the one with the smallest model is chosen.

    Args:
      recipe: the recipe, with the options that are not to be chosen.
      x: features, as for :func:`jtrees.fit`.
      y: targets.
      key: for everything random.
      grid: values to choose from, by the name of the option: ``{"depth": range(1, 9), "l1": (0, 1e-4)}``; those of a
        base as ``"base__depth"``.
      validation: what to judge by: a pair ``(x, y)``; a part of the rows, drawn (the paper's third by default); or a
        whole number of folds, each of which is left out once.
      **options: of :func:`jtrees.fit`: ``task``, ``sample_weight``, ``progress``, ``max_seconds`` (for all fits together).

    Returns:
      The fit to all rows with the options chosen. Its report has ``tuning``, a list of :class:`Trial`, and ``chosen``,
      the options.

    Raises:
      ValueError: for a grid that is empty or has unknown names, and as :func:`jtrees.fit`.
    """
    began = time.monotonic()
    groups = _groups(recipe, grid)
    task, weight = options.get("task", "regression"), options.get("sample_weight")
    table = checked_table(x, recipe.targets(x, y), weight, task)
    split_key, search_key, fit_key = jax.random.split(key, 3)
    parts = list(_parts(recipe, table, validation, split_key))
    seconds = options.get("max_seconds")
    watch = Watch(options.get("progress", False), None if seconds is None else began + seconds)
    trials: list[tuple[dict[str, Any], np.ndarray, float]] = []
    best, since = np.inf, 0
    for depth, some in itertools.groupby(groups, key=lambda group: _depth_of(group[0])):
        before = best
        for fixed, numbers in some:
            if watch.ended == "finished":
                trials += _tried(recipe, fixed, numbers, parts, search_key, watch)
        best = min((lost.mean() for _, lost, _ in trials), default=np.inf)
        since = 0 if best < before else since + 1
        if depth is not None and since >= _PATIENCE:
            break
    if not trials:
        raise ValueError("max_seconds must leave time for at least one combination of the grid")
    found, chosen = _chosen(trials)
    if seconds is not None:
        options["max_seconds"] = max(1e-3, began + seconds - time.monotonic())
    judge = {"validation": validation} if isinstance(validation, tuple) else {}
    result = fit(_with(recipe, chosen), x, y, key=fit_key, **judge, **options)
    return result.replace(report=result.report | {"tuning": found, "chosen": chosen})


# --- The grid --------------------------------------------------------------------------------------------------------


def _owner(recipe: Any, name: str) -> tuple[Any, dataclasses.Field]:
    """The recipe that has an option, perhaps a base, and the option.

    Raises:
      ValueError: if there is none.
    """
    *way, last = name.split("__")
    for step in way:
        recipe = getattr(recipe, step, None)
    if not isinstance(recipe, Recipe):
        raise ValueError(f"grid must name options of the recipe, got {name!r}")
    fields = {field.name: field for field in dataclasses.fields(recipe)}  # type: ignore[arg-type]
    if last not in fields:
        raise ValueError(f"grid must name options of the recipe, of {', '.join(fields)}, got {name!r}")
    return recipe, fields[last]


def _with(recipe: Any, options: dict[str, Any]) -> Any:
    """The recipe with these options."""
    for name, value in options.items():
        first, _, rest = name.partition("__")
        recipe = recipe.replace(**{first: _with(getattr(recipe, first), {rest: value}) if rest else value})
    return recipe


def _groups(recipe: Any, grid: Any) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The combinations of the grid, those that differ in numbers alone together: ``(structure, numbers)``."""
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe must be a recipe, such as jtrees.GET(depth=4), got {recipe!r}")
    if not isinstance(grid, dict) or not grid or any(not len(list(values)) for values in grid.values()):
        raise ValueError(f'grid must hold values by name, such as {{"depth": range(1, 9)}}, got {grid!r}')
    is_number = {name: _owner(recipe, name)[1].metadata.get("pytree_node", True) for name in grid}
    product = lambda names: [
        dict(zip(names, values, strict=True)) for values in itertools.product(*(list(grid[name]) for name in names))
    ]
    numbers = product([name for name in grid if is_number[name]])
    # By depth first, so that deeper trees can be given up.
    fixed = [name for name in grid if not is_number[name]]
    structures = product(sorted(fixed, key=lambda name: name.split("__")[-1] != "depth"))
    return [(structure, numbers) for structure in structures]


def _depth_of(structure: dict[str, Any]) -> Any:
    return next((value for name, value in structure.items() if name.split("__")[-1] == "depth"), None)


# --- The trials ------------------------------------------------------------------------------------------------------


def _parts(recipe: Any, table: Table, validation: Any, key: Array) -> Iterator[tuple[Table, Table, Table | None]]:
    """Rows to train on, rows to judge by, and rows to choose epochs by (those that the user has set aside)."""
    if isinstance(validation, tuple):
        judge = checked_judge((validation[0], recipe.targets(*validation)), table)
        yield table, judge, judge
        return
    n, order = len(table.x), np.asarray(jax.random.permutation(key, len(table.x)))
    if checks.is_traced(validation) or isinstance(validation, bool) or not np.isscalar(validation):
        raise ValueError(f"validation must be a pair (x, y), a part or a number of folds, got {validation!r}")
    if isinstance(validation, (int, np.integer)):
        if not 2 <= validation <= n:
            raise ValueError(f"validation must be at least 2 folds and at most {n}, a row each, got {validation}")
        folds = np.array_split(order, int(validation))
    elif 0 < validation < 1:  # type: ignore[operator]
        folds = [order[: max(1, round(float(validation) * n))]]  # type: ignore[arg-type]
    else:
        raise ValueError(f"validation must be a part between 0 and 1, or a whole number of folds, got {validation!r}")
    for fold in folds:
        rest = np.setdiff1d(order, fold)
        part = table.rows(rest)
        if len(rest) < 2 or (table.classes is None and not np.ptp(part.y, axis=0).all()):
            raise ValueError(f"y must vary in the {len(rest)} rows drawn to tune by: give validation as a pair (x, y)")
        yield part, table.rows(fold), None


def _tried(recipe: Any, fixed: Any, numbers: list[Any], parts: Any, key: Array, watch: Watch) -> list[Any]:
    """Options, losses row by row, and size, of each combination of numbers with one structure."""
    lost: list[list[np.ndarray]] = [[] for _ in numbers]
    sizes: list[list[float]] = [[] for _ in numbers]
    for part, judge, chooser in parts:
        for i, found in enumerate(_fits(recipe, fixed, numbers, part, chooser, key, watch)):
            weight = np.ones(len(judge.x)) if judge.weight is None else judge.weight / judge.weight.mean()
            lost[i].append(weight * losses_of(found.model, judge, recipe.scale(part)))
            sizes[i].append(found.model.num_parameters)
    each = zip(numbers, lost, sizes, strict=True)
    return [(fixed | number, np.concatenate(losses), float(np.mean(size))) for number, losses, size in each]


def _fits(recipe: Any, fixed: Any, numbers: list[Any], part: Table, chooser: Table | None, key: Array, watch: Watch):
    """The fits of all combinations of numbers with one structure, found in one program."""
    prepare_key, search_key, finish_key = jax.random.split(key, 3)
    several = [_with(recipe, fixed | number).checked(part) for number in numbers]
    first = several[0]
    scale = first.scale(part)
    unit, unit_judge = scale.unit(part), None if chooser is None else scale.unit(chooser)
    start = first.prepare(unit, key=prepare_key)
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *several)
    found, _ = run_rounds(_Several(recipes=stacked, first=first), start, unit, unit_judge, search_key, watch)
    for i, one in enumerate(several):
        of = jax.tree.map(lambda a, i=i: a[i], found)
        yield one.finish(of, start, part, chooser, scale=scale, key=finish_key, watch=Watch())


@struct.dataclass(kw_only=True)
class _Several(Recipe):
    """Recipes of one structure, their numbers stacked, as one search; on a CPU one after the other in each round."""

    recipes: Any
    first: Any

    def _map(self, run: Any, *args: Any) -> Any:
        count = jax.tree.leaves(self.recipes)[0].shape[0]
        side_by_side = None if jax.default_backend() == "cpu" else count
        return jax.lax.map(lambda all_: run(*all_), (self.recipes, *args), batch_size=side_by_side)

    def rounds(self, shape: tuple[int, int], many: int = 1) -> Rounds:
        return self.first.rounds(shape, many * jax.tree.leaves(self.recipes)[0].shape[0])

    def begin(self, start: Any, table: Table, *, key: Array) -> Any:
        return self._map(lambda recipe: recipe.begin(start, table, key=key))

    def round(self, i: Array, state: Any, table: Table, judge: Table | None, rounds: Rounds) -> tuple[Any, Array]:
        return self._map(lambda recipe, state: recipe.round(i, state, table, judge, rounds), state)

    def end(self, state: Any, table: Table, judge: Table | None) -> Found:
        return self._map(lambda recipe, state: recipe.end(state, table, judge), state)


def _chosen(trials: list[tuple[dict[str, Any], np.ndarray, float]]) -> tuple[list[Trial], dict[str, Any]]:
    """All trials, and the options of the smallest model within the error of the best."""
    best = min((lost for _, lost, _ in trials), key=np.mean)
    found = []
    for options, lost, size in trials:
        difference = lost - best
        error = float(np.std(difference, ddof=1) / np.sqrt(len(lost))) if len(lost) > 1 else 0.0
        found.append(Trial(options, float(lost.mean()), error, size))
    near = [trial for trial in found if trial.loss - float(best.mean()) <= trial.error]
    return found, min(near, key=lambda trial: (trial.size, trial.loss)).options
