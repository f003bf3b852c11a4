"""Options of a recipe chosen by rows that were not trained on."""

from collections.abc import Iterator, Sequence
import itertools
import time
from typing import Any, NamedTuple

import jax
from jax.typing import ArrayLike
from jaxtyping import Array
import numpy as np

from jtrees import validation as checks
from jtrees.options import checked_grid, groups_of, with_options
from jtrees.recipes import Fit, Recipe, Watch, fit
from jtrees.sweep import fits_of, row_losses
from jtrees.table import Table

_PATIENCE = 2  # depths in a row that bring nothing before deeper trees are given up
_KEPT = 0.25  # of max_seconds, for the fit to all rows
_OF_FIT = ("task", "sample_weight", "progress", "max_seconds")


class Trial(NamedTuple):
    """One combination of options.

    Attributes:
      options: by name.
      loss: mean loss on the rows that it was not trained on (as that of a :class:`jtrees.Fit`); infinite if the search
        was not finite.
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

    Every combination of the grid is fitted to a part of the rows and judged by the others; all of them by the same rows
    and with the same key, so that what differs is the options. Options that are structure (depth, kinds) compile once
    each; for each of them all numbers run in one compiled program. Where the grid has ``depth``, deeper trees are given
    up after two depths in a row that better the best before by no more than the standard error of the difference. Of
    those combinations that do worse than the best by no more than that error, the one with the smallest model is
    chosen.

    Ctrl-C ends the trials, and the fit to all rows follows. Of combinations that were broken off none is chosen, but
    where they are all there is.

    Args:
      recipe: the recipe, with the options that are not to be chosen.
      x: features, as for :func:`jtrees.fit`.
      y: targets.
      key: for everything random.
      grid: values to choose from, by the name of the option: ``{"depth": range(1, 9), "l1": (0, 1e-4)}``; those of a
        base as ``"base__depth"``.
      validation: what to judge by: a part of the rows, drawn (the paper's third by default); a whole number of folds,
        each of which is left out once; or a pair ``(x, y)``. A pair is what every fit chooses its best epoch by as
        well, so that losses on it are too good by a little; measure the fit on other rows.
      **options: of :func:`jtrees.fit`: ``task``, ``sample_weight``, ``progress``, ``max_seconds`` (for all fits
        together, the last quarter for the fit to all rows).

    Returns:
      The fit to all rows with the options chosen. Its report has ``tuning``, a list of :class:`Trial`, and ``chosen``,
      the options.

    Raises:
      ValueError: for a grid that is empty or has unknown names, and as :func:`jtrees.fit`.
      FloatingPointError: if no combination found anything finite.
    """
    began = time.monotonic()
    checks.check_key(key)
    _check_options(recipe, options)
    table = recipe.table(x, y, options.get("sample_weight"), options.get("task", "regression"))
    groups = _groups(recipe, grid, table)
    split_key, search_key, fit_key = jax.random.split(key, 3)
    parts = list(_parts(recipe, table, validation, split_key))
    seconds = options.get("max_seconds")
    watch = Watch(options.get("progress", False), None if seconds is None else began + (1 - _KEPT) * seconds)
    with watch.listening():
        trials = _all_tried(recipe, groups, parts, search_key, watch)
    found, chosen = _chosen(trials)
    if seconds is not None:
        options["max_seconds"] = max(1e-3, began + seconds - time.monotonic())
    judge = {"validation": validation} if isinstance(validation, (tuple, list)) else {}
    result = fit(with_options(recipe, chosen), x, y, key=fit_key, **judge, **options)
    ended = result.report["ended"] if watch.ended == "finished" else watch.ended
    return result.replace(report=result.report | {"tuning": found, "chosen": chosen, "ended": ended})


def _check_options(recipe: Any, options: dict[str, Any]) -> None:
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe must be a recipe, such as jtrees.GET(depth=4), got {recipe!r}")
    if unknown := set(options) - set(_OF_FIT):
        raise TypeError(f"options must be of {', '.join(_OF_FIT)}, got {min(unknown)!r}")
    if options.get("max_seconds") is not None:
        checks.check_seconds(options["max_seconds"])


# --- The grid --------------------------------------------------------------------------------------------------------


class _Group(NamedTuple):
    """Combinations that differ in numbers alone: one program."""

    depth: Any
    options: list[dict[str, Any]]


def _groups(recipe: Any, grid: Any, table: Table) -> list[_Group]:
    """The combinations of the grid, by depth, those that make one program together."""
    combinations = checked_grid(recipe, grid)
    depth = [name for name in combinations[0] if name.split("__")[-1] == "depth"]
    some = [[combinations[i] for i in group] for group in groups_of(recipe, combinations, table)]
    groups = [_Group(options[0][depth[0]] if depth else None, options) for options in some]
    return sorted(groups, key=lambda group: group.depth) if depth else groups


# --- The trials ------------------------------------------------------------------------------------------------------


class _Tried(NamedTuple):
    """What a combination lost, row by row, and its size."""

    options: dict[str, Any]
    lost: np.ndarray
    size: float


class _Part(NamedTuple):
    """Rows to train on, rows to judge by, and rows to choose epochs by (those that the user has set aside)."""

    rows: Table
    judge: Table
    chooser: Table | None


def _parts(recipe: Any, table: Table, validation: Any, key: Array) -> Iterator[_Part]:
    if isinstance(validation, (tuple, list)):
        judge = recipe.judge(validation, table)
        yield _Part(table, judge, judge)
        return
    n, order = len(table.x), np.asarray(jax.random.permutation(key, len(table.x)))
    if isinstance(validation, bool) or not isinstance(validation, (int, float, np.number)):
        raise ValueError(f"validation must be a pair (x, y), a part or a number of folds, got {validation!r}")
    if isinstance(validation, (int, np.integer)):
        if not 2 <= validation <= n:
            raise ValueError(f"validation must be at least 2 folds and at most {n}, a row each, got {validation}")
        folds = np.array_split(order, int(validation))
    elif 0 < validation < 1:
        folds = [order[: max(1, round(float(validation) * n))]]
    else:
        raise ValueError(f"validation must be a part between 0 and 1, or a whole number of folds, got {validation!r}")
    for fold in folds:
        rest = np.setdiff1d(order, fold)
        part = table.rows(rest)
        if len(rest) < 2 or not part.task.varies(part.y):
            raise ValueError(f"y must vary in the {len(rest)} rows drawn to tune by: give validation as a pair (x, y)")
        yield _Part(part, table.rows(fold), None)


def _all_tried(recipe: Any, groups: list[_Group], parts: list[_Part], key: Array, watch: Watch) -> list[_Tried]:
    """The trials of all groups, shallow trees first, until deeper ones bring nothing or the time is up."""
    trials: list[_Tried] = []
    best, since = None, 0
    for depth, some in itertools.groupby(groups, key=lambda group: group.depth):
        for group in some:
            if trials and not watch.goes_on():
                return trials
            tried = _tried(recipe, group.options, parts, key, watch)
            if trials and watch.ended != "finished":
                return trials
            trials += tried
        now = min(trials, key=lambda trial: trial.lost.mean())
        brought = best is None or _difference(best.lost, now.lost) > _error(best.lost, now.lost)
        best, since = (now, 0) if brought else (best, since + 1)
        if depth is not None and since >= _PATIENCE:
            break
    return trials


def _tried(recipe: Any, several: list[dict[str, Any]], parts: list[_Part], key: Array, watch: Watch) -> list[_Tried]:
    """The trials of combinations that make one program."""
    lost: list[list[np.ndarray]] = [[] for _ in several]
    sizes: list[list[float]] = [[] for _ in several]
    weights: list[np.ndarray] = []
    for fold, part in enumerate(parts):
        if fold and not watch.goes_on():
            break
        weights.append(weight := np.ones(len(part.judge.x)) if part.judge.weight is None else part.judge.weight)
        recipes = [with_options(recipe, options).checked(part.rows) for options in several]
        fits = fits_of(recipes, [jax.random.fold_in(key, fold)], [None], part.rows, part.chooser, watch)
        for i, (one, scale) in enumerate(fits):
            of_row = np.full(len(weight), np.inf) if one is None else row_losses(recipe, one.model, part.judge, scale)
            lost[i].append(weight * of_row)
            sizes[i].append(np.nan if one is None else one.model.num_parameters)
    folds = max(map(len, lost))  # where time ended, some combinations have fewer: they are no trials
    mean = np.concatenate(weights[:folds]).mean()  # a heavy row counts as much in a light fold as in another
    return [
        _Tried(options, np.concatenate(losses) / mean, float(np.mean(size)))
        for options, losses, size in zip(several, lost, sizes, strict=True)
        if len(losses) == folds
    ]


# --- The choice ------------------------------------------------------------------------------------------------------


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    """By how much a lost more than b."""
    return float(a.mean()) - float(b.mean())


def _error(a: np.ndarray, b: np.ndarray) -> float:
    """Standard error of that, from the rows' differences; 0 where there is but one, or a is infinite."""
    return float(np.std(a - b, ddof=1) / np.sqrt(len(a))) if len(a) > 1 and np.isfinite(a).all() else 0.0


def _chosen(trials: list[_Tried]) -> tuple[list[Trial], dict[str, Any]]:
    """All trials, and the options of the smallest model within the error of the best."""
    best = min((trial.lost for trial in trials), key=np.mean)
    if not np.isfinite(best).all():
        raise FloatingPointError("no combination of the grid found anything finite: try a smaller learning_rate")
    found = [Trial(one.options, float(one.lost.mean()), _error(one.lost, best), one.size) for one in trials]
    near = [trial for trial in found if trial.loss - float(best.mean()) <= trial.error]
    return found, min(near, key=lambda trial: (trial.size, trial.loss)).options
