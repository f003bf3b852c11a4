"""Tuning: options of a recipe chosen on held-out rows."""

from collections.abc import Sequence
import itertools
import time
from typing import Any, NamedTuple

import jax
from jax.typing import ArrayLike
from jaxtyping import Array
import numpy as np

from jtrees import io, validation as checks
from jtrees.search import Recipe
from jtrees.search.monitor import Monitor
from jtrees.search.run import FitResult, fit, table_of
from jtrees.selection.grid import checked_grid, groups_of, with_options
from jtrees.selection.sweep import Run, Split, runs_of, split_of

_PATIENCE = 2  # consecutive depths without an improvement after which deeper trees are not tried
_KEPT = 0.25  # fraction of max_seconds for the fit to all rows
_OF_FIT = ("task", "sample_weight", "progress", "max_seconds")


@io.part
class Trial(NamedTuple):
    """One combination of options.

    Attributes:
      options: the options by name.
      loss: mean loss on held-out rows (as in :class:`jtrees.FitResult`); infinite if the search was not finite.
      error: standard error of the paired difference between its losses and those of the best.
      size: number of parameters of its models (mean over folds).
    """

    options: dict[str, Any]
    loss: float
    error: float
    size: float


def tune(
    recipe: Recipe,
    x: ArrayLike,
    y: ArrayLike | None = None,
    *,
    key: Array,
    grid: dict[str, Sequence[Any]],
    validation: tuple[ArrayLike, ArrayLike] | float | int = 1 / 3,
    **options: Any,
) -> FitResult:
    """Chooses options of a recipe by a :func:`jtrees.sweep`, and refits the recipe with them to all rows.

    Every combination of the grid is fitted to the same training rows with the same key, and evaluated on the same
    held-out rows. If the grid has ``depth``, the sweep stops after two consecutive depths that improve on the best by
    no more than the standard error of the difference. Of the combinations within one standard error of the best, the
    one with the smallest model is chosen (the one-standard-error rule).

    Ctrl-C ends the trials and continues with the fit to all rows. An interrupted combination is chosen only if there is
    no other.

    Args:
      recipe: the recipe, with the options that are not tuned.
      x: features, as for :func:`jtrees.fit`.
      y: targets.
      key: random key.
      grid: values to choose from, by the name of the option: ``{"depth": range(1, 9), "l1": (0, 1e-4)}``; those of a
        base as ``"base__depth"``.
      validation: rows to evaluate on, as for :func:`jtrees.sweep`: a fraction (by default a third, as in the paper), a
        number of folds, or a pair ``(x, y)``.
      **options: arguments of :func:`jtrees.fit`: ``task``, ``sample_weight``, ``progress``, ``max_seconds`` (for all
        fits together, the last quarter for the fit to all rows).

    Returns:
      The fit to all rows with the chosen options. Its report has ``tuning``, a list of :class:`Trial`, and ``chosen``,
      the chosen options.

    Raises:
      ValueError: for a grid that is empty or has unknown names, and as :func:`jtrees.fit`.
      FloatingPointError: if no combination was finite.
    """
    started = time.monotonic()
    checks.check_key(key)
    if unknown := set(options) - set(_OF_FIT):
        raise TypeError(f"options must be of {', '.join(_OF_FIT)}, got {min(unknown)!r}")
    if (seconds := options.get("max_seconds")) is not None:
        checks.check_seconds(seconds)
    if validation is None:
        raise ValueError("validation must be a pair (x, y), a part or a number of folds, got None")
    table = table_of(recipe, x, y, options.get("sample_weight"), options.get("task", "regression"))
    combinations = checked_grid(recipe, grid)
    split_key, search_key, fit_key = jax.random.split(key, 3)
    split = split_of(recipe, table, validation, split_key)
    monitor = Monitor(options.get("progress", False), None if seconds is None else started + (1 - _KEPT) * seconds)
    with monitor.listening():
        evaluated = _evaluated(recipe, combinations, split, search_key, monitor)
    trials, chosen = _chosen(evaluated)
    if seconds is not None:
        options["max_seconds"] = max(1e-3, started + seconds - time.monotonic())
    pair = {"validation": validation} if isinstance(validation, (tuple, list)) else {}
    result = fit(with_options(recipe, chosen), x, y, key=fit_key, **pair, **options)
    ended = result.report["ended"] if monitor.ended == "finished" else monitor.ended
    return result.replace(report=result.report | {"tuning": trials, "chosen": chosen, "ended": ended})


# --- The trials ------------------------------------------------------------------------------------------------------


class _Evaluated(NamedTuple):
    """A combination, its loss on each held-out row, and its size."""

    options: dict[str, Any]
    losses: np.ndarray
    size: float


def _evaluated(
    recipe: Recipe, combinations: list[dict[str, Any]], split: Split, key: Array, monitor: Monitor
) -> list[_Evaluated]:
    """Evaluates the combinations by ascending depth, until deeper trees do not improve or the deadline has passed."""
    names = [name for name in combinations[0] if name.split("__")[-1] == "depth"]
    depth_of: Any = lambda options: options[names[0]] if names else None
    groups = [[combinations[i] for i in group] for group in groups_of(recipe, combinations)]
    groups = sorted(groups, key=lambda group: depth_of(group[0])) if names else groups
    trials: list[_Evaluated] = []
    best, since = None, 0
    for depth, some in itertools.groupby(groups, key=lambda group: depth_of(group[0])):
        for group in some:
            if trials and not monitor.has_time():
                return trials
            of_group = _of_group(recipe, group, split, key, monitor)
            if trials and monitor.ended != "finished":
                return trials
            trials += of_group
        current = min(trials, key=lambda trial: trial.losses.mean())
        improved = best is None or _difference(best.losses, current.losses) > _error(best.losses, current.losses)
        best, since = (current, 0) if improved else (best, since + 1)
        if depth is not None and since >= _PATIENCE:
            break
    return trials


def _of_group(
    recipe: Recipe, group: list[dict[str, Any]], split: Split, key: Array, monitor: Monitor
) -> list[_Evaluated]:
    """Evaluates combinations that share one program; after a deadline, keeps those with the most folds."""
    folds = len(split.left_out)
    runs: list[list[Run]] = [[] for _ in group]
    for i, run in enumerate(runs_of([with_options(recipe, one) for one in group], [key], split, monitor)):
        runs[i // folds].append(run)
    most = max(map(len, runs))
    weights = [run.weights for run in runs[0][:most]]
    mean = np.concatenate(weights).mean()  # not by fold: a row counts by its own weight in every fold
    evaluated = []
    for options, some in zip(group, runs, strict=True):
        if len(some) == most:
            losses = [weight * run.rows for weight, run in zip(weights, some, strict=True)]
            size = np.mean([np.nan if run.fit is None else run.fit.model.num_parameters for run in some])
            evaluated.append(_Evaluated(options, np.concatenate(losses) / mean, float(size)))
    return evaluated


# --- The choice ------------------------------------------------------------------------------------------------------


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the mean difference of the losses a and b."""
    return float(a.mean()) - float(b.mean())


def _error(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the standard error of that difference, paired by rows; 0 for a single row or infinite a."""
    return float(np.std(a - b, ddof=1) / np.sqrt(len(a))) if len(a) > 1 and np.isfinite(a).all() else 0.0


def _chosen(trials: list[_Evaluated]) -> tuple[list[Trial], dict[str, Any]]:
    """Returns all trials, and the options of the smallest model within one standard error of the best."""
    best = min((trial.losses for trial in trials), key=np.mean)
    if not np.isfinite(best).all():
        raise FloatingPointError("no combination of the grid found anything finite: try a smaller learning_rate")
    summaries = [Trial(one.options, float(one.losses.mean()), _error(one.losses, best), one.size) for one in trials]
    near = [trial for trial in summaries if trial.loss - float(best.mean()) <= trial.error]
    return summaries, min(near, key=lambda trial: (trial.size, trial.loss)).options
