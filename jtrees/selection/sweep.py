"""Sweeps: many seeds and options of a recipe side by side, with a compiled program for each set of static options."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
import os
from typing import Any, Literal

import jax
from jax.typing import ArrayLike
from jaxtyping import Array
import numpy as np

from jtrees import compilation, distributed, processes, validation as checks
from jtrees.data.held_out import held_out_rows
from jtrees.data.scaling import losses_of
from jtrees.search import Recipe
from jtrees.search.fit import Fold, RunFit, check_recipes, dataset_of, fits_of, of_raw_table, validation_of
from jtrees.search.monitor import Monitor
from jtrees.selection.folder import RunFolder, RunResult, folder_of
from jtrees.selection.grid import combinations_of, groups_of, with_options
from jtrees.selection.result import SweepResult
from jtrees.selection.space import LogUniform, Uniform
from jtrees.tables import Dataset, Schema
from jtrees.tasks import Task


def sweep(
    recipe: Recipe,
    x: Any,
    y: ArrayLike | None = None,
    *,
    key: Array,
    grid: Mapping[str, Sequence[Any]] | None = None,
    samples: Sequence[Mapping[str, Any]] | int | None = None,
    space: Mapping[str, Uniform | LogUniform | Sequence[Any]] | None = None,
    seeds: int | Sequence[int] = 1,
    validation: tuple[Any, ...] | float | int | None = None,
    batch: int | Literal["auto"] = "auto",
    task: Literal["regression", "classification"] | Task = "regression",
    sample_weight: ArrayLike | None = None,
    monotone: Any = None,
    columns: Mapping[Any, str] | Schema | None = None,
    missing: Sequence[str | float] = (),
    progress: bool = False,
    folder: str | os.PathLike | None = None,
    share: tuple[int, int] = (0, 1),
) -> SweepResult:
    """Fits a recipe for many combinations of options and many seeds.

    Each combination of static options (depth, widths, epochs) is compiled once, for all values of numeric options. Run
    (c, s) is ``jtrees.fit(recipe with options c, ..., key=fold_in(key, seed s))`` on the training rows of a fold. The
    encoder of a raw table and the scaling are fitted to these rows. All folds share the compiled programs.
    Shorter folds are therefore padded. Their mini-batches may differ from those of ``jtrees.fit``.

    On CPUs, the number of fits that run at once is the number of processors, at most 8. Other devices stack many fits.
    Ctrl-C ends the training of the current runs and the sweep. The result has the state of each run.

    Args:
      recipe: the recipe, with the options that all runs share. For a method: :class:`jtrees.FromMethod`.
      x: features, as for :func:`jtrees.fit`.
      y: targets.
      key: random key.
      grid: values by the name of the option, such as ``{"depth": range(2, 7), "learning_rate": (0.01, 0.03)}``. All
        combinations of the values are fitted. An option of a base recipe is ``"base__depth"``.
      samples: combinations to fit instead of a grid: ``[{"learning_rate": 0.013}, ...]``; or the number of draws from a
        space.
      space: ranges or choices by the name of the option, such as
        ``{"learning_rate": jtrees.LogUniform(1e-3, 0.1), "depth": (3, 4, 5)}``. Combinations are the first points of a
        scrambled Sobol sequence. They depend on the key and the order of the names. A larger number of draws with the
        same key adds draws at the end. Use choices for static options, because each value compiles a program.
      seeds: the number of seeds 0, 1, ..., or the seeds.
      validation: the evaluation rows. A number of folds is for cross-validation. A fraction between 0 and 1 draws rows
        at random. ``(x, y)`` or ``(x, y, sample_weight)`` is a validation set, on which each fit also chooses its best
        epoch, so its losses are slightly optimistic. None: runs are evaluated on their training data.
      batch: number of concurrent runs. ``"auto"``: at most 16 for each CPU device, and at most 64 on other devices.
        Half as many are tried if a device has too little memory, and a warning names the number.
      task: as for :func:`jtrees.fit`.
      sample_weight: as for :func:`jtrees.fit`.
      monotone: as for :func:`jtrees.fit`.
      columns: as for :func:`jtrees.fit`. The schema comes from all rows.
      missing: as for :func:`jtrees.fit`.
      progress: whether to show the number of finished runs, and the time left.
      folder: a folder of the runs, on a disk or in a bucket (``gs://bucket/runs``). Each finished run is written as it
        comes: a JSON file of its numbers, and a file of its fit if :func:`jtrees.save` can save it. The same call,
        or one with other options or seeds, continues and repeats no finished run. The recipe, the loss and functions
        are compared by their code and all that they read. Those that cannot be compared need a version:
        ``losses.CustomLoss(loss, name="pinball 0.1")``, or an attribute ``version`` of another function or class.
      share: ``(k, n)`` makes the k-th of n shares of the runs, k = 0, ..., n - 1, for n hosts with a common folder. The
        result has the runs of this share, and the runs that the folder had when the sweep began. A last call without a
        share returns all runs.

    Warns:
      UserWarning: if Ctrl-C ended the sweep before all runs were finished.

    Raises:
      ValueError: if a grid, a list of samples or a space is invalid, or has unknown names. Also if the folder holds
        runs of another recipe, task, table, key, precision or version of jtrees; the message names what differs. Also
        if a recipe, a loss or a function for a folder reads what cannot be compared, and in the cases of
        :func:`jtrees.fit`.
      FloatingPointError: if no run was finite.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> recipe = jtrees.DGT(depth=1, epochs=20, widths=(), precondition=0)
      >>> jtrees.sweep(recipe, x, x[:, 0] > 0, grid={"learning_rate": (0.01, 0.03)}, seeds=2, key=jax.random.key(0))
      SweepResult(2 combinations x 2 seeds x 1 folds, best run: {'learning_rate': ...}, seed ..., loss ...)
    """
    processes.require_xla("jtrees.selection.sweep")
    checks.check_key(key)
    if batch != "auto":
        checks.check_count("batch", batch)
    seeds = _seeds(seeds)
    dataset = dataset_of(recipe, x, y, sample_weight, task, monotone, missing, columns)
    if dataset.schema is not None:
        dataset.schema.warn()
    if grid is None and samples is None and space is None:
        samples = [{}]
    with compilation.default_settings():
        splits = splits_of(recipe, dataset, validation, jax.random.fold_in(key, 2**31 - 1))
        combinations = combinations_of(recipe, key, grid=grid, samples=samples, space=space)
        check_recipes([with_options(recipe, options) for options in combinations], splits)
        files = folder_of(folder, share, recipe, key, splits, "fits", combinations)
        keys = {seed: jax.random.fold_in(key, seed) for seed in seeds}
    shape = len(combinations), len(seeds), len(splits)
    fits, states = np.full(shape, None, object), np.full(shape, "not started")
    losses, sizes, seconds = (np.full(shape, value) for value in (np.inf, np.nan, np.nan))
    result = SweepResult(combinations, seeds, fits, losses, sizes, seconds, states)
    monitor, finished = Monitor(progress), []
    with (
        compilation.default_settings(),
        distributed.together("jtrees.selection.sweep"),
        monitor.interruptible(),
        monitor.progress_of(result.losses.size, "runs") as show,
    ):
        for group in groups_of(recipe, combinations):
            if finished and not monitor.has_time():
                break
            group_options = [combinations[c] for c in group]
            for (i, seed, fold), run in runs_of(recipe, group_options, keys, splits, monitor, batch, files):
                cell = group[i], seeds.index(seed), fold
                result.fits[cell], result.losses[cell], result.states[cell] = run.fit, run.loss, run.state
                result.sizes[cell], result.seconds[cell] = run.size, run.seconds
                finished.append(np.array([run.loss]))
                show(len(finished), finished)
    if (result.states == "diverged").any() and not np.isfinite(result.losses).any():
        raise FloatingPointError("no run has a finite loss: try a smaller learning_rate")
    if monitor.ended == "interrupted":
        counts = ", ".join(f"{count} {state}" for state, count in Counter(result.states.ravel().tolist()).items())
        distributed.warn(f"the sweep was interrupted: of {result.states.size} runs, {counts}")
    return result


def _seeds(seeds: Any) -> tuple[int, ...]:
    if not isinstance(seeds, (Sequence, np.ndarray)):
        return tuple(range(checks.check_count("seeds", seeds)))
    if not len(seeds):
        raise ValueError("seeds must hold at least one seed, got none")
    return tuple(dict.fromkeys(checks.check_count("seeds", seed, least=0) for seed in seeds))


def splits_of(recipe: Recipe, dataset: Dataset, validation: Any, key: Array) -> list[Fold]:
    """Returns the split of each fold for a ``validation``: a pair, a fraction, a number of folds, or None."""
    if validation is None:
        return [Fold(dataset.table())]
    if isinstance(validation, (tuple, list)):
        pair = validation_of(recipe, validation, table := dataset.table())
        return [Fold(table, pair, pair)]
    n, folds = len(dataset), isinstance(validation, (int, np.integer))
    expected = ""
    if isinstance(validation, bool) or not isinstance(validation, (int, float, np.number)):
        expected = "a pair (x, y), a fraction or a number of folds"
    elif folds and not 2 <= validation <= n:
        expected = f"from 2 to {n} folds, at most one per row"
    elif not folds and not 0 < validation < 1:
        expected = "a fraction between 0 and 1, or a whole number of folds"
    if expected:
        raise ValueError(f"validation must be {expected}, got {checks.quoted(validation)}")
    order, splits = np.asarray(jax.random.permutation(key, n)), []
    for held_out in np.array_split(order, int(validation)) if folds else [held_out_rows(order, float(validation))]:
        training = dataset.without(held_out)
        if len(training) < 2 or not dataset.task.varies(training.y):
            rows = f"the {len(training)} rows drawn to train on"
            raise ValueError(f"y must vary in {rows}: give validation as a pair (x, y)")
        splits.append(Fold(table := training.table(), None, dataset.rows(held_out).evaluated_by(table)))
    return splits


def runs_of(
    recipe: Recipe,
    combinations: Sequence[Mapping[str, Any]],
    keys: Mapping[int, Array],
    splits: Sequence[Fold],
    monitor: Monitor,
    batch: int | Literal["auto"] = "auto",
    folder: RunFolder | None = None,
) -> Iterator[tuple[tuple[int, int, int], RunResult]]:
    """Yields the runs of combinations that share one program, first the runs in the folder of the runs on these splits.

    A run comes with the number of its combination, its seed and its fold. New runs are written to the folder. ``keys``
    has the key of each seed; ``batch`` is as for :func:`sweep`.
    """
    seeds = list(keys)
    cells = list(np.ndindex(len(combinations), len(seeds), len(splits)))
    names: dict[tuple[int, int, int], str] = {}
    if folder is not None:
        names = {(i, j, k): folder.run_name(combinations[i], seeds[j], k) for i, j, k in cells}
        finished = {cell: run for cell in cells if (run := folder.read(names[cell])) is not None}
        for (i, j, k), run in finished.items():
            yield (i, seeds[j], k), run
        cells = [cell for cell in cells if cell not in finished and folder.is_mine(names[cell])]
        if not cells:
            return
    recipes = [with_options(recipe, dict(options)) for options in combinations]
    fits = fits_of(recipes, list(keys.values()), splits, monitor, batch, cells)
    for fitted, (i, j, k) in zip(fits, cells, strict=False):  # all fits are taken, so the last fit ends its context
        run = _evaluated(fitted, splits[k])
        if folder is not None:
            folder.write(names[i, j, k], run, {"options": dict(combinations[i]), "seed": seeds[j], "fold": k})
        yield (i, seeds[j], k), run


def _evaluated(fitted: RunFit, split: Fold) -> RunResult:
    """Returns the run of a fit, evaluated on the held-out rows of its split."""
    result, held_out = fitted.result, split.evaluated
    if isinstance(result, FloatingPointError):
        row_losses = np.full(0 if held_out is None else len(held_out.x), np.inf)
        return RunResult(None, row_losses, np.inf, np.nan, "diverged", fitted.seconds)
    state = "finished" if result.report.ended == "finished" else "interrupted"
    row_losses, loss = np.zeros(0), result.loss
    if held_out is not None:
        row_losses = losses_of(result.model, held_out, fitted.data.scaling)
        loss = float(np.average(row_losses, weights=held_out.weight))
    fit = of_raw_table(result, split.table)
    return RunResult(fit, row_losses, loss, result.model.num_parameters, state, fitted.seconds)
