"""Tuning: the choice of a recipe's options by the held-out loss."""

from collections.abc import Mapping, Sequence
import itertools
import math
import os
import time
from typing import Any, Literal, NamedTuple

import jax
from jax.typing import ArrayLike
from jaxtyping import Array
import numpy as np

from jtrees import compilation, distributed, processes, segments, validation as checks, warmstart
from jtrees.search import Recipe, Trial, Tuning
from jtrees.search.fit import FitResult, Fold, check_recipes, dataset_of, fit_dataset
from jtrees.search.monitor import Monitor
from jtrees.selection.folder import RunFolder, RunResult, folder_of
from jtrees.selection.grid import combinations_of, groups_of, with_options
from jtrees.selection.halving import budgets, subsampled
from jtrees.selection.result import state_of_folds
from jtrees.selection.space import LogUniform, Uniform
from jtrees.selection.sweep import runs_of, splits_of
from jtrees.tables import Schema
from jtrees.tasks import Task

_PATIENCE = 2  # consecutive depths without improvement that end the trials of deeper trees
_KEPT = 0.25  # fraction of max_seconds for the fit to all rows


def tune(
    recipe: Recipe,
    x: Any,
    y: ArrayLike | None = None,
    *,
    key: Array,
    grid: Mapping[str, Sequence[Any]] | None = None,
    samples: Sequence[Mapping[str, Any]] | int | None = None,
    space: Mapping[str, Uniform | LogUniform | Sequence[Any]] | None = None,
    halving: int | None = None,
    validation: tuple[Any, ...] | float | int = 1 / 3,
    task: Literal["regression", "classification"] | Task = "regression",
    sample_weight: ArrayLike | None = None,
    monotone: Any = None,
    columns: Mapping[Any, str] | Schema | None = None,
    missing: Sequence[str | float] = (),
    progress: bool = False,
    max_seconds: float | None = None,
    folder: str | os.PathLike | None = None,
) -> FitResult:
    """Chooses options of a recipe by a :func:`jtrees.sweep`, and refits the recipe with these options to all rows.

    Each combination is fitted to the same training rows with the same key, and evaluated on the same held-out rows. If
    the combinations have ``depth``, they are tried by ascending depth. The sweep stops after two consecutive depths
    whose improvement on the best loss is within the standard error of the difference. The choice is the smallest model
    within one standard error of the best model (the one-standard-error rule).

    ``halving=3`` uses successive halving (Jamieson & Talwalkar 2016). All combinations, of every depth, are tried on a
    sample of the training rows. The best third is tried on a sample of three times this size, and so on. At most three
    combinations are tried on all training rows (more if a sample would have fewer than 200 rows). The choice is among
    these combinations. Each number of rows compiles another program, so a short table gains little. Few rows favour
    small trees and large penalties.

    Ctrl-C ends the trials and continues with the fit to all rows. An interrupted combination is chosen only if none is
    complete. If halving was interrupted, the choice is among the combinations with the largest number of rows.

    Args:
      recipe: the recipe, with the options that are not tuned.
      x: features, as for :func:`jtrees.fit`.
      y: targets.
      key: random key.
      grid: candidate values by the name of the option: ``{"depth": range(1, 9), "l1": (0, 1e-4)}``. An option of a
        base recipe is ``"base__depth"``.
      samples: combinations instead of a grid, or the number of draws from a space, as for :func:`jtrees.sweep`.
      space: ranges or choices by the name of the option, as for :func:`jtrees.sweep`.
      halving: factor of successive halving, a whole number of at least 2; None: all combinations are fitted to all
        training rows.
      validation: the evaluation rows, as for :func:`jtrees.sweep`: a fraction of the rows, a number of folds, or a
        validation set. The default is a third, as in the paper.
      task: as for :func:`jtrees.fit`.
      sample_weight: as for :func:`jtrees.fit`.
      monotone: as for :func:`jtrees.fit`.
      columns: as for :func:`jtrees.fit`. The schema comes from all rows.
      missing: as for :func:`jtrees.fit`.
      progress: as for :func:`jtrees.fit`.
      max_seconds: deadline for all fits, in seconds from now. The last quarter is reserved for the fit to all rows.
      folder: a folder of the runs, as for :func:`jtrees.sweep`: the same call continues after the process has ended.

    Returns:
      The fit to all rows with the chosen options. ``report.tuning`` is a :class:`jtrees.search.Tuning`.

    Warns:
      UserWarning: if Ctrl-C ended the trials.

    Raises:
      ValueError: in the cases of :func:`jtrees.sweep`, and without a grid, samples or a space.
      FloatingPointError: if no combination was finite.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> recipe = jtrees.DGT(depth=1, epochs=20, widths=(), precondition=0)
      >>> tuned = jtrees.tune(recipe, x, x[:, 0] > 0, grid={"learning_rate": (1e-5, 0.03)}, key=jax.random.key(0))
      >>> len(tuned.report.tuning.trials)
      2
    """
    processes.require_xla("jtrees.tune")
    checks.check_key(key)
    if max_seconds is not None:
        checks.check_number("max_seconds", max_seconds, above=0)
        warmstart.import_packages()
    started = time.monotonic()
    if halving is not None:
        checks.check_count("halving", halving, least=2)
    if validation is None:
        raise ValueError("validation must be a pair (x, y), a fraction or a number of folds, got None")
    dataset = dataset_of(recipe, x, y, sample_weight, task, monotone, missing, columns)
    with compilation.default_settings():
        combinations = combinations_of(recipe, key, grid=grid, samples=samples, space=space)
        split_key, search_key, fit_key = jax.random.split(key, 3)
        splits = splits_of(recipe, dataset, validation, split_key)
        check_recipes([with_options(recipe, options) for options in combinations], splits)
        files = folder_of(folder, (0, 1), recipe, key, splits, "row losses", combinations)
    monitor = Monitor(progress, None if max_seconds is None else started + (1 - _KEPT) * max_seconds)
    fits = _Fits(recipe, splits, search_key, monitor, files)
    with compilation.default_settings(), distributed.together("jtrees.tune"), monitor.interruptible():
        evaluated, left = (fits.trials(combinations), []) if halving is None else fits.halved(combinations, halving)
    if monitor.ended == "interrupted":
        compared = f"{len(evaluated)} of {len(combinations)} combinations"
        distributed.warn(f"the trials were interrupted: the choice is among {compared}")
    trials, chosen = _chosen(evaluated, left)
    began = time.monotonic()
    last = Monitor.of_fit(progress, began, max_seconds and max(1e-3, started + max_seconds - began))
    pair = validation if isinstance(validation, (tuple, list)) else None
    with last.interruptible():
        result = fit_dataset(with_options(recipe, chosen), dataset, fit_key, last, began, validation=pair)
    status = result.report.ended if monitor.ended == "finished" else monitor.ended
    tuning, seconds = Tuning(options=chosen, trials=trials), time.monotonic() - started
    return result.replace(report=result.report.replace(tuning=tuning, ended=status, seconds=seconds))


class _Candidate(NamedTuple):
    """A combination, its loss on each held-out row, its size, the number of rows of the comparison, and its state."""

    options: dict[str, Any]
    losses: np.ndarray
    size: float
    rows: int | None = None
    state: str = "finished"

    @property
    def loss(self) -> float:
        """The mean loss."""
        return float(self.losses.mean())

    def error(self, other: "_Candidate") -> float:
        """Returns the standard error of the paired difference of mean losses; 0 for one row or an infinite loss."""
        paired = len(self.losses) > 1 and np.isfinite(self.losses).all()
        return float(np.std(self.losses - other.losses, ddof=1) / np.sqrt(len(self.losses))) if paired else 0.0


class _Fits(NamedTuple):
    """The fits of a recipe with other options, and their losses on the held-out rows of the splits."""

    recipe: Recipe
    splits: list[Fold]
    key: Array
    monitor: Monitor
    folder: RunFolder | None

    def halved(self, combinations: list[dict[str, Any]], factor: int) -> tuple[list[_Candidate], list[_Candidate]]:
        """Evaluates the combinations on few rows, and the best combinations on more rows.

        Returns the trials on the largest number of rows, and the trials on fewer rows. Each combination has one trial,
        its last. After a deadline, interrupted combinations keep their trial on fewer rows.
        """
        rng = np.random.default_rng(np.asarray(jax.random.key_data(self.key)).ravel())
        last, left = [], []
        fewest = min(len(split.table.x) for split in self.splits)
        for rows in [*budgets(len(combinations), fewest, factor), None]:
            samples = self.splits if rows is None else subsampled(self.splits, rows, rng)
            if samples is None:
                continue
            if last:
                last.sort(key=lambda trial: trial.loss)
                combinations = [trial.options for trial in last[: math.ceil(len(last) / factor)]]
            folder = None if self.folder is None else self.folder.on(samples)
            fits = self._replace(splits=samples, folder=folder)
            trials = fits.trials(combinations, halving=True, has_trials=bool(last))
            if last and not any(np.isfinite(trial.loss) for trial in trials):
                break
            evaluated = {id(trial.options) for trial in trials}
            left += [trial for trial in last if id(trial.options) not in evaluated]
            last = trials
            if self.monitor.ended != "finished":
                break
        return last, left

    def trials(
        self, combinations: list[dict[str, Any]], *, halving: bool = False, has_trials: bool = False
    ) -> list[_Candidate]:
        """Evaluates the combinations by ascending depth, until deeper trees do not improve or the deadline has passed.

        In ``halving``, all combinations are evaluated, in the given order. Interrupted combinations are returned only
        if there are no finite finished trials. ``has_trials`` says that the caller has earlier trials.
        """
        common = [name for name in combinations[0] if all(name in options for options in combinations)]
        depth = next((name for name in common if name.split("__")[-1] == "depth" and not halving), "")
        groups = [[combinations[i] for i in group] for group in groups_of(self.recipe, combinations)]
        if depth:
            groups.sort(key=lambda group: group[0][depth])
        trials: list[_Candidate] = []
        best, since = None, 0
        for _, groups_of_depth in itertools.groupby(groups, key=lambda group: group[0].get(depth)):
            for group in groups_of_depth:
                if (trials or has_trials) and not self.monitor.has_time():
                    return trials
                trials += self._of_group(group)
                if self.monitor.ended != "finished":
                    complete = [trial for trial in trials if trial.state != "interrupted"]
                    return complete if has_trials or any(np.isfinite(trial.loss) for trial in complete) else trials
            current = min(trials, key=lambda trial: trial.loss)
            improved = best is None or not np.isfinite(best.loss) or best.loss - current.loss > best.error(current)
            best, since = (current, 0) if improved else (best, since + 1)
            if depth and since >= _PATIENCE:
                break
        return trials

    def _of_group(self, group: list[dict[str, Any]]) -> list[_Candidate]:
        """Evaluates combinations that share a program; after a deadline, keeps the combinations with the most folds."""
        fold_runs: list[dict[int, RunResult]] = [{} for _ in group]
        group_runs = runs_of(self.recipe, group, {0: self.key}, self.splits, self.monitor, folder=self.folder)
        for (i, _, fold), run in group_runs:
            fold_runs[i][fold] = run
        evaluations: list[Any] = [split.evaluated for split in self.splits]
        weights = [np.ones(len(rows.x)) if rows.weight is None else rows.weight for rows in evaluations]
        evaluated = []
        for options, runs in zip(group, fold_runs, strict=True):
            if runs and len(runs) == max(map(len, fold_runs)):
                runs = dict(sorted(runs.items()))
                # Weights are normalised over all folds together, so a row has the same influence in every fold.
                weight = segments.mean_one(np.concatenate([weights[fold] for fold in runs]))
                losses = weight * np.concatenate([run.row_losses for run in runs.values()])
                size = float(np.mean([run.size for run in runs.values()]))
                states = [run.state for run in runs.values()] + ["not started"] * (len(self.splits) - len(runs))
                rows = len(self.splits[0].table.x)
                evaluated.append(_Candidate(options, losses, size, rows, state_of_folds(states)))
        return evaluated


def _chosen(trials: list[_Candidate], left: Sequence[_Candidate] = ()) -> tuple[list[Trial], dict[str, Any]]:
    """Returns all trials, and the options of the smallest model of ``trials`` within one standard error of the best.

    ``left`` are trials on fewer rows, which are reported but not chosen.
    """
    best = min(trials, key=lambda trial: trial.loss)
    if not np.isfinite(best.losses).all():
        raise FloatingPointError("no combination has a finite loss: try a smaller learning_rate")
    summary = lambda trial: Trial(trial.options, trial.loss, trial.error(best), trial.size, trial.rows, trial.state)
    summaries = list(map(summary, [*trials, *left]))
    near = [trial for trial in summaries[: len(trials)] if trial.loss - best.loss <= trial.error]
    return summaries, min(near, key=lambda trial: (trial.size, trial.loss)).options
