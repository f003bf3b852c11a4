"""Many runs of a recipe, seeds and options, side by side in one compiled program for each structure."""

from collections.abc import Iterator, Mapping, Sequence
import itertools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array
import numpy as np

from jtrees import validation as checks
from jtrees.data import Scaling, Table, losses_of
from jtrees.search import Recipe
from jtrees.search.monitor import Monitor
from jtrees.search.run import FitResult, check_recipe, fits_of, table_of, validation_of
from jtrees.selection.grid import check_options, checked_grid, groups_of, with_options
from jtrees.tasks import Classification, Task


class SweepResult(NamedTuple):
    """What a sweep found: of C combinations of options, S seeds, and F folds (1 where there are none).

    Attributes:
      options: of each combination, by name.
      seeds: the seeds.
      fits: of each run, ``(C, S, F)``; None where nothing finite was found, or where the sweep was ended before.
      losses: of each run, ``(C, S, F)``: the mean loss (as that of a :class:`jtrees.FitResult`) on rows that
        it was not trained on, where such were asked for, else on the training data; infinite where there is no fit.
      sizes: numbers that each model holds, ``(C, S, F)``; NaN where there is none.
      best: the combination and the seed with the lowest mean loss over the folds, of equal ones that of the smallest
        model.
    """

    options: list[dict[str, Any]]
    seeds: tuple[int, ...]
    fits: np.ndarray
    losses: np.ndarray
    sizes: np.ndarray
    best: tuple[int, int]

    @property
    def fit(self) -> FitResult:
        """The best fit; of several folds the first that there is."""
        return next(fit for fit in self.fits[self.best] if fit is not None)

    def rows(self) -> list[dict[str, Any]]:
        """One for each combination and seed: its options, ``seed``, ``loss`` and ``size`` (of several folds the mean),
        and ``finite``, whether all of its folds found something.
        """
        cells = itertools.product(range(len(self.options)), range(len(self.seeds)))
        return [
            self.options[c]
            | {"seed": self.seeds[s], "loss": float(self.losses[c, s].mean()), "size": float(self.sizes[c, s].mean())}
            | {"finite": bool(np.isfinite(self.losses[c, s]).all())}
            for c, s in cells
        ]

    def frame(self) -> Any:
        """The same as a table of pandas, the best first.

        Raises:
          ImportError: where pandas is not installed.
        """
        import pandas as pd

        return pd.DataFrame(self.rows()).sort_values(["loss", "size"], ignore_index=True)

    def __repr__(self) -> str:
        combination, seed = self.best
        return (
            f"SweepResult({len(self.options)} combinations x {len(self.seeds)} seeds x {self.losses.shape[2]} folds, "
            f"best: {self.options[combination]}, seed {self.seeds[seed]}, loss {self.losses[self.best].mean():.6g})"
        )


def sweep(
    recipe: Recipe,
    x: ArrayLike,
    y: ArrayLike | None = None,
    *,
    key: Array,
    grid: Mapping[str, Sequence[Any]] | None = None,
    samples: Sequence[Mapping[str, Any]] | None = None,
    seeds: int | Sequence[int] = 1,
    validation: tuple[ArrayLike, ArrayLike] | float | int | None = None,
    batch: int | Literal["auto"] = "auto",
    task: Literal["regression", "classification"] | Task = "regression",
    sample_weight: ArrayLike | None = None,
    progress: bool = False,
) -> SweepResult:
    """Fits a recipe with many options, and many seeds each.

    Combinations that differ in numbers alone are one compiled program, whatever their number; each combination of
    static options (depth, widths, epochs) is one more. Run (c, s) is ``jtrees.fit(recipe with options c, ...,
    key=fold_in(key, seed s))``. Of folds, the rows left out keep their place in the program, with weight 0.

    On a CPU the runs of a program go one after the other on each device; ``jax_num_cpu_devices`` says how many devices
    there are. Elsewhere as many go side by side as fit into memory. Ctrl-C ends the sweep after the current runs, with
    the results until then.

    Args:
      recipe: the recipe, with the options that are the same for all; of a method :class:`jtrees.FromMethod`.
      x: features, as for :func:`jtrees.fit`.
      y: targets.
      key: for everything random.
      grid: values by the name of the option, of which all combinations are fitted:
        ``{"depth": range(2, 7), "learning_rate": (0.01, 0.03)}``; those of a base as ``"base__depth"``.
      samples: or combinations themselves, such as a sampler draws: ``[{"learning_rate": 0.013}, ...]``.
      seeds: how many, 0, 1, ...; or which.
      validation: rows that runs are evaluated on: a number of folds, each of which is left out once; a part of the
        rows between 0 and 1, drawn; or a pair ``(x, y)``, by which every fit chooses its best epoch as well, so that
        losses on it are too good by a little. None: runs are evaluated on the rows that they were trained on.
      batch: runs at once; ``"auto"`` asks the compiled program how much memory it takes.
      task: as for :func:`jtrees.fit`.
      sample_weight: as for :func:`jtrees.fit`.
      progress: whether to show a bar for each batch of runs.

    Raises:
      ValueError: for a grid that is empty or has unknown names, arrays where an option is static; and as
        :func:`jtrees.fit`.
      FloatingPointError: if no run found anything finite.
    """
    checks.check_key(key)
    check_recipe(recipe)
    if batch != "auto":
        checks.check_count("batch", batch)
    seeds = _seeds(seeds)
    split = split_of(
        recipe, table_of(recipe, x, y, sample_weight, task), validation, jax.random.fold_in(key, 2**31 - 1)
    )
    combinations = _combinations(recipe, grid, samples)
    shape = len(combinations), len(seeds), len(split.left_out)
    fits, losses, sizes = np.full(shape, None, object), np.full(shape, np.inf), np.full(shape, np.nan)
    keys, monitor = [jax.random.fold_in(key, seed) for seed in seeds], Monitor(progress)
    with monitor.listening():
        for group in groups_of(recipe, combinations):
            if fits.any() and not monitor.has_time():
                break
            recipes = [with_options(recipe, combinations[c]) for c in group]
            cells = itertools.product(group, range(len(seeds)), range(len(split.left_out)))
            for cell, run in zip(cells, runs_of(recipes, keys, split, monitor, batch), strict=False):
                if run.fit is not None:
                    fits[cell], sizes[cell], losses[cell] = run.fit, run.fit.model.num_parameters, run.loss
    mean, size = _mean_over_folds(losses, monitor.ended), sizes.mean(2)
    if not np.isfinite(mean).any():
        raise FloatingPointError("no run found anything finite: try a smaller learning_rate")
    best = min(np.ndindex(*mean.shape), key=lambda cell: (mean[cell], size[cell]))
    return SweepResult(combinations, seeds, fits, losses, sizes, best)


def _mean_over_folds(losses: np.ndarray, ended: str) -> np.ndarray:
    """Mean losses ``(C, S)``, infinite where a fold has none; but where the sweep was ended before any combination had
    all of its folds, the means of those with the most.
    """
    mean, has = losses.mean(2), np.isfinite(losses)
    if ended == "finished" or np.isfinite(mean).any():
        return mean
    count = has.sum(2)
    return np.where(
        (count > 0) & (count == count.max()), np.where(has, losses, 0).sum(2) / np.maximum(count, 1), np.inf
    )


def _combinations(recipe: Any, grid: Any, samples: Any) -> list[dict[str, Any]]:
    if grid is not None and samples is not None:
        raise ValueError("grid and samples exclude each other, got both")
    if samples is None:
        return [{}] if grid is None else checked_grid(recipe, grid)
    if not isinstance(samples, Sequence) or not samples or not all(isinstance(one, Mapping) for one in samples):
        raise ValueError(f'samples must hold combinations, such as [{{"depth": 3}}], got {samples!r}')
    for options in samples:
        check_options("samples", recipe, options)
    return [dict(options) for options in samples]


def _seeds(seeds: Any) -> tuple[int, ...]:
    if not isinstance(seeds, (Sequence, range, np.ndarray)):
        return tuple(range(checks.check_count("seeds", seeds)))
    if not len(seeds):
        raise ValueError("seeds must hold at least one seed, got none")
    return tuple(checks.check_count("seeds", int(seed) if seed == int(seed) else seed, minimum=0) for seed in seeds)


# --- Runs and the rows that they are evaluated on --------------------------------------------------------------------


class Split(NamedTuple):
    """Rows to train on and rows to evaluate on.

    Attributes:
      table: the rows to train on, of all folds.
      validation: what every fit chooses its best epoch by, or None.
      left_out: numbers of the rows that each fold leaves out; None: none.
      held_out: the rows that each fold is evaluated on; None: those that it was trained on.
    """

    table: Table
    validation: Table | None
    left_out: list[np.ndarray | None]
    held_out: list[Table | None]


def split_of(recipe: Recipe, table: Table, validation: Any, key: Array) -> Split:
    """A table split as asked for by ``validation``: a pair, a part, a number of folds, or None.

    Raises:
      ValueError: for anything else.
    """
    if validation is None:
        return Split(table, None, [None], [None])
    if isinstance(validation, (tuple, list)):
        held_out = validation_of(recipe, validation, table)
        return Split(table, held_out, [None], [held_out])
    if isinstance(validation, bool) or not isinstance(validation, (int, float, np.number)):
        raise ValueError(f"validation must be a pair (x, y), a part or a number of folds, got {validation!r}")
    n, order = len(table.x), np.asarray(jax.random.permutation(key, len(table.x)))
    if isinstance(validation, (int, np.integer)):
        if not 2 <= validation <= n:
            raise ValueError(f"validation must be at least 2 folds and at most {n}, a row each, got {validation}")
        folds = np.array_split(order, int(validation))
        for fold in folds:
            _check_varies(table, np.setdiff1d(order, fold))
        return Split(table, None, list(folds), [table.rows(fold) for fold in folds])
    if not 0 < validation < 1:
        raise ValueError(f"validation must be a part between 0 and 1, or a whole number of folds, got {validation!r}")
    part = order[: max(1, round(float(validation) * n))]
    rest = np.setdiff1d(order, part)
    _check_varies(table, rest)
    return Split(table.rows(rest), None, [None], [table.rows(part)])


def _check_varies(table: Table, rest: np.ndarray) -> None:
    if len(rest) < 2 or not table.task.varies(table.y[rest]):
        raise ValueError(f"y must vary in the {len(rest)} rows drawn to train on: give validation as a pair (x, y)")


class Run(NamedTuple):
    """One run.

    Attributes:
      fit: None where nothing finite was found.
      rows: its loss on each row that it is evaluated on, infinite where nothing finite was found; none where it is
        evaluated on the rows that it was trained on.
      weights: of these rows.
    """

    fit: FitResult | None
    rows: np.ndarray
    weights: np.ndarray

    @property
    def loss(self) -> float:
        """Mean loss."""
        if len(self.rows):
            return float(np.average(self.rows, weights=self.weights))
        return np.inf if self.fit is None else self.fit.loss


def runs_of(
    recipes: list[Any], keys: list[Array], split: Split, monitor: Monitor, batch: int | Literal["auto"] = "auto"
) -> Iterator[Run]:
    """Runs of recipes that make one program, with all keys and all folds, in this order."""
    folds = itertools.cycle(split.held_out)
    fits = fits_of(recipes, keys, split.left_out, split.table, split.validation, monitor, batch)
    for (fit, data, search), held_out in zip(fits, folds, strict=False):
        rows = weights = np.zeros(0)
        if held_out is not None:
            weights = np.ones(len(held_out.x)) if held_out.weight is None else held_out.weight
            rows = np.full(len(held_out.x), np.inf)
        if isinstance(fit, FloatingPointError):
            yield Run(None, rows, weights)
        else:
            rows = rows if held_out is None else row_losses(search.task, fit.model, held_out, data.scaling)
            yield Run(fit, rows, weights)


def row_losses(task: Task, model: Any, rows: Table, scaling: Scaling) -> np.ndarray:
    """The loss of a model on each row; by a loss of the user's own, on scaled targets, if there is one in regression."""
    if task.own_loss is None or isinstance(task, Classification):
        return losses_of(model, rows, scaling)
    predictions = np.asarray(model.predict(rows.x), np.float64)
    outputs, y = (jnp.asarray(scaling.transform_y(a)) for a in (predictions, rows.y))
    return np.asarray(task.loss(outputs, y), np.float64)
