"""Sweeps: many seeds and options of a recipe side by side, with a compiled program for each set of static options."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
import itertools
from typing import Any, Literal, NamedTuple

import jax
from jax.typing import ArrayLike
from jaxtyping import Array
import numpy as np

from jtrees import compilation, distributed, processes, validation as checks
from jtrees.data.scaling import losses_of
from jtrees.search import Recipe
from jtrees.search.fit import FitResult, Split, dataset_of, fits_of, of_raw_table, validation_of
from jtrees.search.monitor import Monitor
from jtrees.selection.grid import combinations_of, groups_of, with_options
from jtrees.selection.space import LogUniform, Uniform
from jtrees.tables import Dataset, Schema
from jtrees.tasks import Task


class SweepResult(NamedTuple):
    """The result of a sweep over C combinations of options, S seeds and F folds (F = 1 if there are no folds).

    Attributes:
      options: options of each combination, by name.
      seeds: the seeds.
      fits: fit of each run, ``(C, S, F)``; None if the run diverged or did not start.
      losses: mean loss of each run, ``(C, S, F)``, as in :class:`jtrees.FitResult`. The loss is on held-out rows if
        there are any, else on the training data. It is infinite if there is no fit.
      sizes: number of parameters of each model, ``(C, S, F)``; NaN if there is no fit.
      states: state of each run, ``(C, S, F)``. ``"finished"``; ``"interrupted"``: Ctrl-C ended its training early;
        ``"not started"``: Ctrl-C ended the sweep before it; ``"diverged"``: it became non-finite.
      best: indices of the combination and the seed with the lowest mean loss over the folds. If losses are equal, the
        smaller model is the best. Only runs that finished all folds are compared. If there are none, the runs with the
        most fits are compared, because folds differ.
    """

    options: list[dict[str, Any]]
    seeds: tuple[int, ...]
    fits: np.ndarray
    losses: np.ndarray
    sizes: np.ndarray
    states: np.ndarray
    best: tuple[int, int]

    @property
    def fit(self) -> FitResult:
        """The best fit; if there are several folds, the fit of the first fold that has a fit."""
        return next(fit for fit in self.fits[self.best] if fit is not None)

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each combination and seed.

        A row has the options, ``seed``, ``loss`` and ``size`` (means over folds), and ``state``. If the folds have
        different states, the state is ``"diverged"`` if a fold diverged, else ``"interrupted"``.
        """
        cells = itertools.product(range(len(self.options)), range(len(self.seeds)))
        return [
            self.options[c]
            | {"seed": self.seeds[s], "loss": float(self.losses[c, s].mean()), "size": float(self.sizes[c, s].mean())}
            | {"state": state_of_folds(self.states[c, s])}
            for c, s in cells
        ]

    def frame(self) -> Any:
        """Returns :meth:`rows` as a pandas DataFrame: finished rows from the best to the worst, then other rows.

        Raises:
          ImportError: if pandas is not installed.
        """
        import pandas as pd

        frame = pd.DataFrame(self.rows())
        order = np.lexsort((frame["size"], frame["loss"], frame["state"] != "finished"))
        return frame.iloc[order].reset_index(drop=True)

    def __repr__(self) -> str:
        combination, seed = self.best
        runs = f"{len(self.options)} combinations x {len(self.seeds)} seeds x {self.losses.shape[2]} folds"
        if is_interrupted(self.states):
            runs = f"{(self.states == 'finished').sum()} of {self.states.size} runs, interrupted: {runs}"
        loss = np.ma.masked_invalid(self.losses[self.best]).mean()
        return (
            f"SweepResult({runs}, best: {self.options[combination]}, seed {self.seeds[seed]}, loss {float(loss):.6g})"
        )


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
    validation: tuple[Any, ArrayLike] | float | int | None = None,
    batch: int | Literal["auto"] = "auto",
    task: Literal["regression", "classification"] | Task = "regression",
    sample_weight: ArrayLike | None = None,
    monotone: Any = None,
    columns: Mapping[Any, str] | Schema | None = None,
    missing: Sequence[str] = (),
    progress: bool = False,
) -> SweepResult:
    """Fits a recipe for many combinations of options and many seeds.

    Each combination of static options (depth, widths, epochs) is compiled once, for all values of numeric options. Run
    (c, s) is ``jtrees.fit(recipe with options c, ..., key=fold_in(key, seed s))`` on the training rows of a fold. The
    encoder of a raw table and the scaling are fitted to these rows. All folds share the compiled programs.

    On CPUs, as many fits run at once as there are processors. Other devices stack many fits.
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
        at random. A pair ``(x, y)`` is a validation set. Each fit also chooses its best epoch on the validation set, so
        the losses are slightly optimistic. None: runs are evaluated on their training data.
      batch: number of concurrent runs. ``"auto"``: at most 16 for each CPU device, and at most 64 on other devices.
      task: as for :func:`jtrees.fit`.
      sample_weight: as for :func:`jtrees.fit`.
      monotone: as for :func:`jtrees.fit`.
      columns: as for :func:`jtrees.fit`. The schema comes from all rows.
      missing: as for :func:`jtrees.fit`.
      progress: whether to show a bar for each batch of runs.

    Warns:
      UserWarning: if Ctrl-C ended the sweep before all runs were finished.

    Raises:
      ValueError: if a grid or a space is empty or has unknown names, or if a grid is combined with samples or a space.
        Also if a space has no number of samples, or if the bounds of a range are not ascending and finite. The bounds
        of ``LogUniform`` must be positive. Also in the cases of :func:`jtrees.fit`.
      FloatingPointError: if no run was finite.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> recipe = jtrees.DGT(depth=1, epochs=20, widths=(), precondition=0)
      >>> jtrees.sweep(recipe, x, x[:, 0] > 0, grid={"learning_rate": (0.01, 0.03)}, seeds=2, key=jax.random.key(0))
      SweepResult(2 combinations x 2 seeds x 1 folds, best: {'learning_rate': ...}, seed ..., loss ...)
    """
    processes.require_xla("jtrees.selection.sweep")
    checks.check_key(key)
    if batch != "auto":
        checks.check_count("batch", batch)
    seeds = _seeds(seeds)
    dataset = dataset_of(recipe, x, y, sample_weight, task, monotone, missing, columns)
    if dataset.schema is not None:
        dataset.schema.warn()
    splits = splits_of(recipe, dataset, validation, jax.random.fold_in(key, 2**31 - 1))
    if grid is None and samples is None and space is None:
        samples = [{}]
    combinations = combinations_of(recipe, key, grid=grid, samples=samples, space=space)
    shape = len(combinations), len(seeds), len(splits)
    fits, losses, sizes = np.full(shape, None, object), np.full(shape, np.inf), np.full(shape, np.nan)
    states = np.full(shape, "not started")
    keys, monitor = [jax.random.fold_in(key, seed) for seed in seeds], Monitor(progress)
    with compilation.promoting_ranks(), distributed.together("jtrees.selection.sweep"), monitor.listening():
        for group in groups_of(recipe, combinations):
            if fits.any() and not monitor.has_time():
                break
            recipes = [with_options(recipe, combinations[c]) for c in group]
            cells = itertools.product(group, range(len(seeds)), range(len(splits)))
            for cell, run in zip(cells, runs_of(recipes, keys, splits, monitor, batch), strict=False):
                fits[cell] = None if run.fit is None else of_raw_table(run.fit, splits[cell[2]].table)
                losses[cell], sizes[cell], states[cell] = run.loss, run.size, run.state
    best = _best(_mean_over_folds(losses, states), sizes.mean(2))
    if is_interrupted(states):
        counts = ", ".join(f"{count} {state}" for state, count in Counter(states.ravel().tolist()).items())
        distributed.warn(f"the sweep was interrupted: of {states.size} runs, {counts}")
    return SweepResult(combinations, seeds, fits, losses, sizes, states, best)


def is_interrupted(states: np.ndarray) -> bool:
    """Returns whether a run did not come to its end."""
    return bool(np.isin(states, ("interrupted", "not started")).any())


def state_of_folds(states: Iterable[str]) -> str:
    """Returns the common state of all folds; else ``"diverged"`` if a fold diverged, else ``"interrupted"``."""
    distinct = set(map(str, states))
    if len(distinct) == 1:
        return distinct.pop()
    return "diverged" if "diverged" in distinct else "interrupted"


def _best(mean: np.ndarray, size: np.ndarray) -> tuple[int, int]:
    """Returns the combination and the seed of the lowest mean loss; among equal losses, of the smallest model.

    Raises:
      FloatingPointError: if no loss is finite.
    """
    if not np.isfinite(mean).any():
        raise FloatingPointError("no run has a finite loss: try a smaller learning_rate")
    combination, seed = min(np.ndindex(*mean.shape), key=lambda cell: (mean[cell], size[cell]))
    return combination, seed


def _mean_over_folds(losses: np.ndarray, states: np.ndarray) -> np.ndarray:
    """Returns mean losses over folds, ``(C, S)``; infinite for runs that are not compared.

    Runs are compared if all folds are finished and finite. If there are none because the sweep was interrupted, the
    runs with the most finite folds are compared.
    """
    finite = np.isfinite(losses)
    count = finite.sum(2)
    compared = (finite & (states == "finished")).all(2)
    if not compared.any() and is_interrupted(states):
        compared = count == max(1, count.max())
    return np.where(compared, losses.sum(2, where=finite) / np.maximum(count, 1), np.inf)


def _seeds(seeds: Any) -> tuple[int, ...]:
    if not isinstance(seeds, (Sequence, np.ndarray)):
        return tuple(range(checks.check_count("seeds", seeds)))
    if not len(seeds):
        raise ValueError("seeds must hold at least one seed, got none")
    return tuple(checks.check_count("seeds", seed, minimum=0) for seed in seeds)


# --- Runs and their evaluation ---------------------------------------------------------------------------------------


def splits_of(recipe: Recipe, dataset: Dataset, validation: Any, key: Array) -> list[Split]:
    """Returns the split of each fold for a ``validation``: a pair, a fraction, a number of folds, or None.

    Raises:
      ValueError: for an invalid ``validation``.
    """
    if validation is None:
        return [Split(dataset.table())]
    if isinstance(validation, (tuple, list)):
        pair = validation_of(recipe, validation, table := dataset.table())
        return [Split(table, pair, pair)]
    if isinstance(validation, bool) or not isinstance(validation, (int, float, np.number)):
        raise ValueError(
            f"validation must be a pair (x, y), a fraction or a number of folds, got {checks.quoted(validation)}"
        )
    n, folds = len(dataset), isinstance(validation, (int, np.integer))
    order = np.asarray(jax.random.permutation(key, n))
    if folds:
        if not 2 <= validation <= n:
            raise ValueError(
                f"validation must be from 2 to {n} folds, at most one per row, got {checks.quoted(validation)}"
            )
        parts = np.array_split(order, int(validation))
    else:
        if not 0 < validation < 1:
            message = "validation must be a fraction between 0 and 1, or a whole number of folds"
            raise ValueError(f"{message}, got {checks.quoted(validation)}")
        parts = [order[: max(1, round(float(validation) * n))]]
    return [_split(dataset, part) for part in parts]


def _split(dataset: Dataset, held_out: np.ndarray) -> Split:
    """Returns the split that evaluates on held-out rows; raises ``ValueError`` if no others vary."""
    training = dataset.without(held_out)
    if len(training) < 2 or not dataset.task.varies(training.y):
        raise ValueError(f"y must vary in the {len(training)} rows drawn to train on: give validation as a pair (x, y)")
    table = training.table()
    return Split(table, None, dataset.rows(held_out).evaluated_by(table))


class Run(NamedTuple):
    """The result of a run.

    Attributes:
      fit: the fit; None if the run was not finite.
      rows: loss on each held-out row. It is infinite if there is no fit, and empty if there are no held-out rows.
      weights: weights of the held-out rows.
    """

    fit: FitResult | None
    rows: np.ndarray
    weights: np.ndarray

    @property
    def loss(self) -> float:
        """The mean loss on the held-out rows, else the loss of the fit; infinite if there is no fit."""
        if self.fit is None:
            return np.inf
        return float(np.average(self.rows, weights=self.weights)) if len(self.rows) else self.fit.loss

    @property
    def state(self) -> str:
        """``"finished"``, ``"interrupted"`` by Ctrl-C or a deadline, or ``"diverged"``."""
        if self.fit is None:
            return "diverged"
        return "finished" if self.fit.report.ended == "finished" else "interrupted"

    @property
    def size(self) -> float:
        """Number of parameters of the model; NaN if there is no fit."""
        return np.nan if self.fit is None else self.fit.model.num_parameters


def runs_of(
    recipes: list[Any],
    keys: list[Array],
    splits: Sequence[Split],
    monitor: Monitor,
    batch: int | Literal["auto"] = "auto",
) -> Iterator[Run]:
    """Yields the runs of recipes that share one program, for each recipe, key and fold, in this order."""
    fits = fits_of(recipes, keys, splits, monitor, batch)
    for fitted, split in zip(fits, itertools.cycle(splits), strict=False):
        fit, held_out = None if isinstance(fitted.result, FloatingPointError) else fitted.result, split.evaluated
        rows = weights = np.zeros(0)
        if held_out is not None:
            weights = np.ones(len(held_out.x)) if held_out.weight is None else held_out.weight
            rows = np.full(len(held_out.x), np.inf)
            if fit is not None:
                rows = losses_of(fit.model, held_out, fitted.data.scaling)
        yield Run(fit, rows, weights)
