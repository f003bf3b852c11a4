"""Tuning: options of a recipe chosen on held-out rows."""

from collections.abc import Sequence
import itertools
import time
from typing import Any, Literal, NamedTuple

import jax
from jax.typing import ArrayLike
from jaxtyping import Array
import numpy as np

from jtrees import compilation, distributed, processes, validation as checks
from jtrees.search import Recipe, Trial, Tuning
from jtrees.search.fit import FitResult, fit, table_of
from jtrees.search.monitor import Monitor
from jtrees.selection.grid import checked_grid, groups_of, with_options
from jtrees.selection.sweep import Split, runs_of, split_of
from jtrees.tasks import Task

_PATIENCE = 2  # consecutive depths without an improvement after which deeper trees are not tried
_KEPT = 0.25  # fraction of max_seconds for the fit to all rows


def tune(
    recipe: Recipe,
    x: Any,
    y: ArrayLike | None = None,
    *,
    key: Array,
    grid: dict[str, Sequence[Any]],
    validation: tuple[Any, ArrayLike] | float | int = 1 / 3,
    task: Literal["regression", "classification"] | Task = "regression",
    sample_weight: ArrayLike | None = None,
    monotone: Any = None,
    progress: bool = False,
    max_seconds: float | None = None,
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
      task: as for :func:`jtrees.fit`.
      sample_weight: as for :func:`jtrees.fit`.
      monotone: as for :func:`jtrees.fit`.
      progress: as for :func:`jtrees.fit`.
      max_seconds: deadline of all fits together; the last quarter is for the fit to all rows.

    Returns:
      The fit to all rows with the chosen options. ``report.tuning`` is a :class:`jtrees.search.Tuning`.

    Raises:
      ValueError: for a grid that is empty or has unknown names, and as :func:`jtrees.fit`.
      FloatingPointError: if no combination was finite.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> recipe = jtrees.DGT(depth=1, epochs=20, widths=(), precondition=0)
      >>> tuned = jtrees.tune(recipe, x, x[:, 0] > 0, grid={"learning_rate": (1e-5, 0.03)}, key=jax.random.key(0))
      >>> len(tuned.report.tuning.trials)
      2
    """
    started = time.monotonic()
    processes.require_xla("jtrees.tune")
    checks.check_key(key)
    if max_seconds is not None:
        checks.check_seconds(max_seconds)
    if validation is None:
        raise ValueError("validation must be a pair (x, y), a part or a number of folds, got None")
    table = table_of(recipe, x, y, sample_weight, task, monotone)
    combinations = checked_grid(recipe, grid)
    split_key, search_key, fit_key = jax.random.split(key, 3)
    split = split_of(recipe, table, validation, split_key)
    monitor = Monitor(progress, None if max_seconds is None else started + (1 - _KEPT) * max_seconds)
    with compilation.promoting_ranks(), distributed.together("jtrees.tune"), monitor.listening():
        evaluated = _evaluated(recipe, combinations, split, search_key, monitor)
    trials, chosen = _chosen(evaluated)
    options: Any = {"task": task, "sample_weight": sample_weight, "monotone": monotone, "progress": progress}
    if max_seconds is not None:
        options["max_seconds"] = max(1e-3, started + max_seconds - time.monotonic())
    if isinstance(validation, (tuple, list)):
        options["validation"] = validation
    result = fit(with_options(recipe, chosen), x, y, key=fit_key, **options)
    ended = result.report.ended if monitor.ended == "finished" else monitor.ended
    tuning, seconds = Tuning(options=chosen, trials=trials), time.monotonic() - started
    return result.replace(report=result.report.replace(tuning=tuning, ended=ended, seconds=seconds))


# --- The trials ------------------------------------------------------------------------------------------------------


class _Evaluated(NamedTuple):
    """A combination, its loss on each held-out row, and its size."""

    options: dict[str, Any]
    losses: np.ndarray
    size: float

    @property
    def loss(self) -> float:
        """The mean loss."""
        return float(self.losses.mean())

    def error(self, other: "_Evaluated") -> float:
        """Standard error of the difference of the mean losses, paired by rows; 0 for one row or an infinite loss."""
        paired = len(self.losses) > 1 and np.isfinite(self.losses).all()
        return float(np.std(self.losses - other.losses, ddof=1) / np.sqrt(len(self.losses))) if paired else 0.0


def _evaluated(
    recipe: Recipe, combinations: list[dict[str, Any]], split: Split, key: Array, monitor: Monitor
) -> list[_Evaluated]:
    """Evaluates the combinations by ascending depth, until deeper trees do not improve or the deadline has passed."""
    depth = next((name for name in combinations[0] if name.split("__")[-1] == "depth"), "")
    groups = [[combinations[i] for i in group] for group in groups_of(recipe, combinations)]
    if depth:
        groups.sort(key=lambda group: group[0][depth])
    trials: list[_Evaluated] = []
    best, since = None, 0
    for _, groups_of_depth in itertools.groupby(groups, key=lambda group: group[0].get(depth)):
        for group in groups_of_depth:
            if trials and not monitor.has_time():
                return trials
            of_group = _of_group(recipe, group, split, key, monitor)
            if trials and monitor.ended != "finished":
                return trials
            trials += of_group
        current = min(trials, key=lambda trial: trial.loss)
        improved = best is None or best.loss - current.loss > best.error(current)
        best, since = (current, 0) if improved else (best, since + 1)
        if depth and since >= _PATIENCE:
            break
    return trials


def _of_group(
    recipe: Recipe, group: list[dict[str, Any]], split: Split, key: Array, monitor: Monitor
) -> list[_Evaluated]:
    """Evaluates combinations that share one program; after a deadline, keeps those with the most folds."""
    recipes, folds = [with_options(recipe, options) for options in group], len(split.left_out)
    runs = list(runs_of(recipes, [key], split, monitor))
    weights = np.concatenate([run.weights for run in runs[:folds]])
    evaluated = []
    for i, options in enumerate(group):
        some = runs[i * folds : (i + 1) * folds]
        if len(some) == len(runs[:folds]):
            # Weighted not fold by fold: a row counts by its own weight in every fold.
            losses = weights * np.concatenate([run.rows for run in some]) / weights.mean()
            evaluated.append(_Evaluated(options, losses, float(np.mean([run.size for run in some]))))
    return evaluated


def _chosen(trials: list[_Evaluated]) -> tuple[list[Trial], dict[str, Any]]:
    """Returns all trials, and the options of the smallest model within one standard error of the best."""
    best = min(trials, key=lambda trial: trial.loss)
    if not np.isfinite(best.losses).all():
        raise FloatingPointError("no combination of the grid found anything finite: try a smaller learning_rate")
    summaries = [Trial(one.options, one.loss, one.error(best), one.size) for one in trials]
    near = [trial for trial in summaries if trial.loss - best.loss <= trial.error]
    return summaries, min(near, key=lambda trial: (trial.size, trial.loss)).options
