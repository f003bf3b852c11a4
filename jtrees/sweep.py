"""Many runs of a recipe, seeds and options, side by side in one compiled program for each structure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import itertools
import os
from typing import Any, Literal, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array
import numpy as np

from jtrees import sharding, validation as checks
from jtrees.options import check_options, checked_grid, groups_of, with_options
from jtrees.recipes import Fit, Found, Recipe, Rounds, Watch, described, memory_of_round, run_rounds, static
from jtrees.starts import map_starts
from jtrees.table import Scale, Table, losses_of
from jtrees.tasks import Classification

# Runs at once on a CPU, for each device: it works on one after the other, so that more only make rounds shorter.
_AT_ONCE_CPU = 16
_ROOM = 0.5  # part of the memory that runs at once may take


class SweepResult(NamedTuple):
    """What a sweep found: of C combinations of options, S seeds, and F folds (1 where there are none).

    Attributes:
      options: of each combination, by name.
      seeds: the seeds.
      fits: of each run, ``(C, S, F)``; None where nothing finite was found, or where the sweep was ended before.
      losses: what each run is judged by, ``(C, S, F)``: the mean loss (as that of a :class:`jtrees.Fit`) on rows that
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
    def fit(self) -> Fit:
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
    recipe: Any,
    x: ArrayLike,
    y: ArrayLike | None = None,
    *,
    key: Array,
    grid: Mapping[str, Sequence[Any]] | None = None,
    samples: Sequence[Mapping[str, Any]] | None = None,
    seeds: int | Sequence[int] = 1,
    folds: int | None = None,
    validation: tuple[ArrayLike, ArrayLike] | float | None = None,
    batch: int | Literal["auto"] = "auto",
    task: Literal["regression", "classification"] = "regression",
    sample_weight: ArrayLike | None = None,
    progress: bool = False,
) -> SweepResult:
    """Fits a recipe with many options, and many seeds each.

    Combinations that differ in numbers alone are one compiled program, whatever their number; each structure (depth,
    widths, epochs) is one more. Run (c, s) is ``jtrees.fit(recipe with options c, ..., key=fold_in(key, seed s))``.
    With folds, or a part to judge by, the rows left out keep their place in the program, with weight 0.

    On a CPU the runs of a program go one after the other on each device; ``jax_num_cpu_devices`` says how many devices
    there are. Elsewhere as many go side by side as the memory has room for. Ctrl-C ends the sweep after the runs that
    go, with what there is.

    Args:
      recipe: the recipe, with the options that are the same for all; of a method :class:`jtrees.Trained`.
      x: features, as for :func:`jtrees.fit`.
      y: targets.
      key: for everything random.
      grid: values by the name of the option, of which all combinations are fitted:
        ``{"depth": range(2, 7), "learning_rate": (0.01, 0.03)}``; those of a base as ``"base__depth"``.
      samples: or combinations themselves, such as a sampler draws: ``[{"learning_rate": 0.013}, ...]``.
      seeds: how many, 0, 1, ...; or which.
      folds: how many, each of which is left out once, and judges.
      validation: or a pair ``(x, y)``, by which every fit chooses its best epoch as well; or a part of the rows, drawn,
        which only judges. None: runs are judged by what they were trained on.
      batch: runs at once; ``"auto"`` asks the compiled program how much memory it takes.
      task: ``"regression"`` or ``"classification"``.
      sample_weight: as for :func:`jtrees.fit`.
      progress: whether to show a bar for each batch of runs.

    Raises:
      ValueError: for a grid that is empty or has unknown names, arrays where an option is structure, folds and
        validation together; and as :func:`jtrees.fit`.
      FloatingPointError: if no run found anything finite.
    """
    checks.check_key(key)
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe must be a recipe, such as jtrees.GET(depth=4), got {recipe!r}")
    if batch != "auto":
        checks.check_count("batch", batch)
    seeds = _seeds(seeds)
    table = recipe.table(x, y, sample_weight, task)
    judge = recipe.judge(validation, table) if isinstance(validation, (tuple, list)) else None
    left_out = _left_out(table, folds, validation, jax.random.fold_in(key, 2**31 - 1))
    combinations = _combinations(recipe, grid, samples)
    shape = len(combinations), len(seeds), len(left_out)
    fits, losses, sizes = np.full(shape, None, object), np.full(shape, np.inf), np.full(shape, np.nan)
    keys, watch = [jax.random.fold_in(key, seed) for seed in seeds], Watch(progress)
    with watch.listening():
        for group in groups_of(recipe, combinations, table):
            if fits.any() and not watch.goes_on():
                break
            recipes = [with_options(recipe, combinations[c]).checked(table) for c in group]
            cells = itertools.product(group, range(len(seeds)), range(len(left_out)))
            made = fits_of(recipes, keys, left_out, table, judge, watch, batch)
            for cell, (fit, scale) in zip(cells, made, strict=False):
                if fit is not None:
                    fits[cell], sizes[cell] = fit, fit.model.num_parameters
                    losses[cell] = _loss(recipe, fit, table, left_out[cell[2]], scale)
    mean, size = _mean_over_folds(losses, watch.ended), sizes.mean(2)
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


def _left_out(table: Table, folds: int | None, part: Any, key: Array) -> list[np.ndarray | None]:
    """The rows that each fold leaves out, None: none."""
    if folds is not None and part is not None:
        raise ValueError("folds and validation exclude each other, got both")
    if folds is None and (part is None or isinstance(part, (tuple, list))):
        return [None]
    order = np.asarray(jax.random.permutation(key, n := len(table.x)))
    if folds is not None:
        if not 2 <= checks.check_count("folds", folds) <= n:
            raise ValueError(f"folds must be at least 2 and at most {n}, a row each, got {folds}")
        return list(np.array_split(order, folds))
    if isinstance(part, bool) or not isinstance(part, (int, float, np.number)) or not 0 < part < 1:
        raise ValueError(f"validation must be a pair (x, y) or a part between 0 and 1, got {part!r}")
    return [order[: max(1, round(float(part) * n))]]


def _loss(recipe: Any, fit: Fit, table: Table, left_out: np.ndarray | None, scale: Scale) -> float:
    if left_out is None:
        return fit.loss
    rows = table.rows(left_out)
    return float(np.average(row_losses(recipe, fit.model, rows, scale), weights=rows.weight))


def row_losses(recipe: Any, model: Any, judge: Table, scale: Scale) -> np.ndarray:
    """What a model loses row by row; by a loss of one's own, on scaled targets, if the recipe has one in regression."""
    if getattr(recipe, "loss", None) is None or isinstance(judge.task, Classification):
        return losses_of(model, judge, scale)
    outputs, y = (jnp.asarray(scale.y(a)) for a in (np.asarray(model.predict(judge.x), np.float64), judge.y))
    return np.asarray(recipe.sample_loss(judge.task)(outputs, y), np.float64)


# --- Runs ------------------------------------------------------------------------------------------------------------


@struct.dataclass(kw_only=True)
class Stacked(Recipe):
    """Runs of recipes of one structure as one search.

    Attributes:
      recipes: their numbers stacked, ``(runs,)``.
      keys: data of the keys of the searches, ``(runs, ...)``.
      starts: what was prepared for them, stacked.
      start: which of these each run begins from, ``(runs,)``.
      weights: of the rows of a table, for each fold ``(folds, n)``; None: the table's own.
      fold: which of these each run has, ``(runs,)``.
      first: the first of the recipes.
      impl: of the keys.
    """

    recipes: Any
    keys: Any
    starts: Any
    start: Any
    weights: Any
    fold: Any
    first: Any
    impl: str = static()

    def rounds(self, shape: tuple[int, int], many: int = 1) -> Rounds:
        return self.first.rounds(shape, many * len(self.fold))

    def _table(self, table: Table, fold: Array) -> Table:
        return table if self.weights is None else table.replace(weight=self.weights[fold])

    def _each(self, run: Callable[..., Any], *of_runs: Any) -> Any:
        one_by_one = 1 if jax.default_backend() == "cpu" else None
        return map_starts(run, self.recipes, self.fold, *of_runs, batch_size=one_by_one)

    def begin(self, start: None, table: Table, *, key: None) -> Any:
        def one(recipe: Any, fold: Array, key: Array, start: Array) -> Any:
            begins = jax.tree.map(lambda a: a[start], self.starts)
            return recipe.begin(begins, self._table(table, fold), key=jax.random.wrap_key_data(key, impl=self.impl))

        return self._each(one, self.keys, self.start)

    def round(self, i: Array, state: Any, table: Table, judge: Table | None, rounds: Rounds) -> tuple[Any, Array]:
        one = lambda recipe, fold, state: recipe.round(i, state, self._table(table, fold), judge, rounds)
        return self._each(one, state)

    def end(self, state: Any, table: Table, judge: Table | None) -> Found:
        return self._each(lambda recipe, fold, state: recipe.end(state, self._table(table, fold), judge), state)


def fits_of(
    recipes: list[Any],
    keys: list[Array],
    left_out: list[np.ndarray | None],
    table: Table,
    judge: Table | None,
    watch: Watch,
    batch: int | Literal["auto"] = "auto",
) -> Iterator[tuple[Fit | None, Scale]]:
    """The fits of all recipes, which make one program, with all keys and all folds, in this order, None where nothing
    finite was found; and how the table was scaled. Ends early where there is no time for more.

    Args:
      recipes: checked.
      keys: as :func:`jtrees.fit` takes them.
      left_out: the rows that each fold leaves out, None: none.
      table: to train on, in the user's units.
      judge: what fits choose their best by, or None.
      watch: over it all.
      batch: runs at once.
    """
    first = recipes[0]
    scale = first.scale(table)
    unit, unit_judge = scale.unit(table), None if judge is None else scale.unit(judge)
    tables, weights = _folds(table, unit, left_out)
    begun = list(_begun(first, keys, unit, weights))
    unit, unit_judge = sharding.put_rows(unit), sharding.put_rows(unit_judge)
    runs = [(recipe, one) for recipe in recipes for one in begun]
    starts = jax.tree.map(_stack, *(one.start for one in begun))

    def stacked(low: int, count: int) -> Any:
        numbers = np.minimum(np.arange(low, low + count), len(runs) - 1)  # filled up: fewer would be another program
        some = [runs[i] for i in numbers]
        return Stacked(
            recipes=jax.tree.map(_stack, *(recipe for recipe, _ in some)),
            keys=_stack(*(jax.random.key_data(one.search_key) for _, one in some)),
            starts=starts,
            start=(numbers % len(begun)).astype(np.int32),
            weights=weights,
            fold=np.array([one.fold for _, one in some], np.int32),
            first=first,
            impl=str(jax.random.key_impl(keys[0])),
        )

    def searched(low: int, count: int) -> Iterator[tuple[Found, np.ndarray]]:
        if len(runs) == 1 and weights is None:  # the program of a fit
            yield run_rounds(first, begun[0].start, unit, unit_judge, begun[0].search_key, watch)
            return
        found, history = run_rounds(stacked(low, count), None, unit, unit_judge, None, watch)
        found = jax.device_get(found)
        for i in range(min(count, len(runs) - low)):
            yield jax.tree.map(lambda a, i=i: a[i], found), history[i]

    at_once = _at_once(lambda count: stacked(0, count), len(runs), batch, unit, unit_judge)
    for low in range(0, len(runs), at_once):
        if low and not watch.goes_on():
            return
        for (recipe, one), (found, history) in zip(runs[low:], searched(low, at_once), strict=False):
            of: Any = {"scale": scale, "key": one.finish_key, "watch": watch}
            try:
                fit = recipe.finish(found, one.start, tables[one.fold], judge, **of)
            except FloatingPointError:
                yield None, scale
                continue
            report = fit.report | {"recipe": described(recipe), "ended": watch.ended}
            yield fit.replace(history=history, report=report), scale


class _Begun(NamedTuple):
    """What runs with the same key and fold share, whatever their recipe."""

    start: Any
    fold: int
    search_key: Array
    finish_key: Array


def _begun(first: Any, keys: list[Array], unit: Table, weights: np.ndarray | None) -> Iterator[_Begun]:
    tables = [unit] if weights is None else [unit.replace(weight=weight) for weight in weights]
    for key in keys:
        prepare_key, search_key, finish_key = jax.random.split(key, 3)
        for fold, table in enumerate(tables):
            yield _Begun(first.prepare(table, key=prepare_key), fold, search_key, finish_key)


def _stack(*arrays: Any) -> np.ndarray:
    """On the host: nothing is compiled."""
    return np.stack([np.asarray(one) for one in arrays])


def _folds(table: Table, unit: Table, left_out: list[np.ndarray | None]) -> tuple[list[Table], np.ndarray | None]:
    """The table without the rows that each fold leaves out; and weights, 0 there, for the scaled and padded one."""
    if left_out[0] is None:
        return [table], None
    weights = np.tile(np.asarray(unit.weight), (len(left_out), 1))
    for weight, rows in zip(weights, left_out, strict=True):
        weight[rows] = 0
    return [table.rows(np.flatnonzero(weight[: len(table.x)] > 0)) for weight in weights], weights


def _at_once(
    stacked: Callable[[int], Stacked], count: int, batch: int | Literal["auto"], table: Table, judge: Table | None
) -> int:
    """How many of so many runs to work on at once, evenly shared out."""
    if batch == "auto":
        devices = jax.local_devices()
        most = min(count, _AT_ONCE_CPU * len(devices)) if devices[0].platform == "cpu" else count
        room = _ROOM * _memory(devices[0])
        while most > 1 and (needed := memory_of_round(stacked(most), table, judge)) > room:
            most = max(1, min(most - 1, int(most * room / needed)))
    else:
        most = min(batch, count)
    return -(-count // -(-count // most))


def _memory(device: Any) -> int:
    """Of a device, in bytes."""
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
