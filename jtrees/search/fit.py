"""Fits of recipes: one run, or many side by side, from a table to models in the user's units."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import itertools
import time
from typing import Any, Literal, NamedTuple

import jax
from jax.typing import ArrayLike
from jaxtyping import Array
import numpy as np

from jtrees import compilation, distributed, processes, sharding, validation as checks, warmstart
from jtrees.data import Data, Table
from jtrees.data.table import bucket
from jtrees.report.comparison import HELD_OUT, VALIDATION, Comparison, compared
from jtrees.search import options
from jtrees.search.engine import Engine
from jtrees.search.monitor import Monitor
from jtrees.search.problem import Fitted, LeftOut, Problem
from jtrees.search.recipe import Recipe
from jtrees.search.report import FitReport
from jtrees.search.result import FitResult, described
from jtrees.search.run import Evaluation
from jtrees.tables import Dataset, FrameModel, Schema, checked_dataset
from jtrees.tables.dataset import held_out_table
from jtrees.tasks import Classification, Policy, Regression, Task
from jtrees.tasks.custom import check_without_link

# Concurrent runs per CPU device. Their calls take turns in a few threads, so a larger number would not save time.
_AT_ONCE_CPU = 16
_AT_ONCE = 64  # concurrent runs on other devices
_END = 2.0  # estimated time of the end of a fit, as a multiple of the time to scale the data


def fit(
    recipe: Recipe,
    x: Any,
    y: ArrayLike | None = None,
    *,
    key: Array,
    task: Literal["regression", "classification"] | Task = "regression",
    sample_weight: ArrayLike | None = None,
    validation: tuple[Any, ...] | None = None,
    held_out: float = 0.0,
    monotone: Any = None,
    columns: Mapping[Any, str] | Schema | None = None,
    missing: Sequence[str | float] = (),
    progress: bool = False,
    max_seconds: float | None = None,
) -> FitResult:
    """Fits a model to a table.

    The fit also compares the model with a linear model and a constant, and ``report.verdict`` says which is better. The
    comparison uses ``validation``, the rows that ``held_out`` sets aside, or the rows that the search itself held out,
    such as out-of-bag rows. The verdict says if the rows also chose the model, because their losses are then slightly
    too low. If there are no such rows, the comparison uses the training rows and charges each model for its parameters.

    The search runs in compiled calls of about half a second. Ctrl-C or ``max_seconds`` ends the search after the
    current call, with the best result so far. A second Ctrl-C raises KeyboardInterrupt. Compilation is not interrupted.
    If the deadline is near, CART, correlations and the comparison use samples of rows. GET and RADDT then have fewer
    starts, and may have constant leaves (with a warning). The fit then makes no refinements and no further trees of a
    bag. The fit always checks and scales the table, makes one update, and fits the leaves to all rows (in
    :class:`jtrees.Boosted`: to the rows that it trained on).

    Args:
      recipe: the recipe to fit, such as ``jtrees.GET(depth=4)``.
      x: features, either an array ``(n, p)``, in which NaN is a missing value, or a raw table. A raw table is a
        DataFrame of pandas, polars or Arrow with numbers, booleans, dates and text, which a
        :class:`jtrees.tables.TableEncoder` turns into features.
      y: targets, ``(n,)`` or ``(n, k)``, finite and not constant. In classification: integers 0..K-1 with every class
        present, or soft labels. Soft labels are class probabilities, ``(n, K)``, whose rows sum to 1.
      key: random key.
      task: ``"regression"`` or ``"classification"``, or a task. ``jtrees.Classification(3)`` allows classes that have
        no sample.
      sample_weight: nonnegative weights, ``(n,)``. Only the ratios of the weights matter, and rows of weight 0 are
        dropped, as are rows whose weight relative to the largest is too small for float32. When leaves are regularised
        or smoothed, uneven weights count as fewer samples (Kish's effective sample size of each node).
      validation: a validation set ``(x, y)`` or ``(x, y, sample_weight)``. Models are chosen by their loss on it, and
        are not trained on it. Class weights of the task are also factors of its weights.
      held_out: fraction of the rows that are used for the comparison only, at least 0 and below 1. The fraction is the
        same for every class. The default, 0, trains on all rows.
      monotone: signs of columns, such as ``{"age": 1, "price": -1}`` by name or number, or a sign for each column. A
        number is a position, or a name if columns are named by numbers. If only that column grows, predictions do not
        fall (sign 1) or do not rise (sign -1). Sign 0 is no constraint. For two classes, the prediction is the
        probability of class 1. The guarantee holds for the model and for files exported from it. GET, RADDT, CO2,
        NonGreedy and DGT with constant leaves support the guarantee. So do their sums, bags and best runs.
      columns: the kinds of columns of a raw table, by name or number, where their cells suggest another kind:
        ``{"year": "number", "code": "text", "id": "drop", "when": "%d/%m/%Y"}``. See :func:`jtrees.tables.schema`,
        whose result is also accepted.
      missing: texts and numbers that mean a missing value in a raw table, such as ``("-", "unknown", -999)``. A text
        does so in every column of text. A number, or a text that reads as one, does so in every column of numbers, too.
        In text of numbers and dates, texts such as ``"?"`` and ``"N/A"`` always do.
      progress: whether to show a bar with the loss and the remaining time.
      max_seconds: deadline, in seconds from now. The fit may exceed it by a tenth of ``max_seconds`` plus half a
        second, and by the time of a compilation and of the first import of scikit-learn.

    Warns:
      jtrees.tables.ColumnsWarning: if columns of a raw table are left out because they are constant or identify rows,
        or if their text may have another meaning.
      jtrees.report.BehindBaselineWarning: if a linear model or a constant is better.

    Raises:
      ValueError: if an argument is invalid. The message names the argument, what was expected, and the value.
      ImportError: if the recipe needs a missing package. The message names the extra that installs it.
      FloatingPointError: if the training became non-finite.
      RuntimeError: in a process forked after JAX was used (:mod:`jtrees.processes`).
    """
    processes.require_xla("jtrees.fit")
    checks.check_key(key)
    if max_seconds is not None:
        checks.check_number("max_seconds", max_seconds, above=0)
        warmstart.import_packages()
    started = time.monotonic()
    dataset = dataset_of(recipe, x, y, sample_weight, task, monotone, missing, columns)
    monitor = Monitor.of_fit(progress, started, max_seconds)
    with monitor.interruptible():
        return fit_dataset(recipe, dataset, key, monitor, started, validation=validation, held_out=held_out)


def fit_dataset(
    recipe: Recipe,
    dataset: Dataset,
    key: Array,
    monitor: Monitor,
    started: float,
    validation: tuple[Any, ...] | None = None,
    held_out: float = 0.0,
) -> FitResult:
    """Returns the fit to checked rows, with the comparison; ``started`` is when it began, by ``time.monotonic``."""
    share, out = checks.check_scalar("held_out", held_out, least=0, below=1), None
    if share and validation is not None:
        raise ValueError(f"held_out must be 0 with a validation set, got {checks.quoted(held_out)}")
    if share:
        with compilation.default_settings():
            dataset, out = dataset.divided(share, key)
    table = dataset.table()
    evaluated = None if out is None else out.evaluated_by(table)
    chosen_by = None if validation is None else validation_of(recipe, validation, table)
    check_recipes([recipe], folds := [Fold(table, chosen_by)])
    comparison = None
    with compilation.default_settings(), distributed.together("jtrees.fit"):
        [fitted] = fits_of([recipe], [key], folds, monitor)
    if isinstance(fitted.result, FloatingPointError):
        raise fitted.result
    if recipe.targets(table.x, table.y) is table.y and table.task.has_baselines:
        comparison = _comparison(fitted, evaluated, monitor)
    result = fitted.result
    report = result.report.replace(ended=monitor.reported_end)  # Ctrl-C may have come in the comparison
    if dataset.schema is not None:
        dataset.schema.warn()
    if comparison is not None:
        cause = {"max_seconds": "max_seconds", "interrupted": "Ctrl-C"}.get(monitor.ended)
        advice = _advice(result.tree, table.task) if cause is None else f"{cause} ended the training early"
        comparison.warn_if_behind(name := type(recipe).__name__, advice)
        report = report.replace(baselines=comparison.losses, verdict=comparison.verdict(name))
    return of_raw_table(result.replace(report=report.replace(seconds=time.monotonic() - started)), table)


def _advice(tree: Any, task: Task) -> str:
    """Returns what may do better than a model that is behind a simpler model: for one tree, a sum of trees."""
    kind = {Regression: "Regressor", Classification: "Classifier"}.get(type(task))
    if tree is None or kind is None:
        return "other options or another recipe may do better"
    return f"a sum of trees may do better: jtrees.estimators.Boosted{kind}()"


def _comparison(fitted: "RunFit", evaluated: Table | None, monitor: Monitor) -> Comparison:
    """Returns the comparison of a fit with a linear model and a constant."""
    # `evaluated` are rows that `held_out` sets aside. The linear model is fitted in the time that the end of a fit has.
    model, data = fitted.result.model, fitted.data  # pyright: ignore[reportAttributeAccessIssue]
    where = HELD_OUT if data.validation is None else VALIDATION
    held_out = data.validation if evaluated is None else evaluated
    rows: Any = {"held_out": held_out, "where": where, "left_out": fitted.left_out}
    rows["expected_loss"] = fitted.expected_loss
    return compared(model, data.table, data.scaling, monitor=monitor.of_end(), **rows)


def of_raw_table(result: FitResult, table: Table) -> FitResult:
    """Returns the fit with a model of the raw table if the table was raw, else the fit unchanged."""
    return result if table.encoder is None else result.replace(model=FrameModel(result.model, table.encoder))


def dataset_of(
    recipe: Recipe,
    x: Any,
    y: Any,
    sample_weight: Any,
    task: Literal["regression", "classification"] | Task,
    monotone: Any = None,
    missing: Sequence[str | float] = (),
    columns: Any = None,
) -> Dataset:
    """Returns the checked rows that a recipe is trained on; raises ``ValueError`` for an invalid argument."""
    if not isinstance(recipe, Recipe) or not dataclasses.is_dataclass(recipe):
        raise ValueError(f"recipe must be a recipe, such as jtrees.GET(depth=4), got {checks.quoted(recipe)}")
    return checked_dataset(x, y, sample_weight, task, recipe.targets, monotone, missing, columns)


def validation_of(recipe: Recipe, validation: Any, table: Table) -> Table:
    """Returns a validation set, checked against the training table; raises ``ValueError`` if it is invalid."""
    if not isinstance(validation, (tuple, list)) or len(validation) not in (2, 3):
        raise ValueError(f"validation must be (x, y) or (x, y, sample_weight), got {type(validation).__name__}")
    x, y, *weight = validation
    try:
        return held_out_table(x, y, table, recipe.targets, *weight)
    except ValueError as error:
        raise ValueError(f"validation: {error}") from None


class Fold(NamedTuple):
    """The tables of a fold, or of a fit that has no folds."""

    table: Table  # the training rows
    validation: Table | None = None  # the validation set on which the fit chooses, or None
    evaluated: Table | None = None  # the evaluation rows; None: the training rows. The fit does not use them


class RunFit(NamedTuple):
    """The fit of a run."""

    result: FitResult | FloatingPointError  # the fit, or the error of a search that became non-finite
    data: Data
    left_out: LeftOut | None = None  # losses of the rows that parts of the search were not trained on, or None
    seconds: float = 0.0  # seconds of the run; of concurrent runs, an equal share of their seconds
    expected_loss: float | None = None  # the loss that the search expects on new rows, or None


def fits_of(
    recipes: list[Any],
    keys: list[Array],
    splits: Sequence[Fold],
    monitor: Monitor,
    batch: int | Literal["auto"] = "auto",
    cells: Sequence[tuple[int, int, int]] | None = None,
) -> Iterator[RunFit]:
    """Yields the fits of checked recipes that share one program, for each recipe, key and split, in this order."""
    # The iteration ends early if the monitor stops it. `batch` is the number of concurrent runs. `cells` are the
    # numbers of the recipe, the key and the split of each run; None: all combinations. At the end, `monitor` has its
    # deadline again.
    began = time.monotonic()
    compilation.bound_memory()
    unchecked, recipes = recipes, [options.checked(recipe) for recipe in recipes]
    rows = _padded_rows(splits)
    impl = str(jax.random.key_impl(keys[0]))
    engine = Engine(monitor, impl, max(_AT_ONCE, sharding.share_of_starts() or 1) if batch == "auto" else batch)
    with monitor.fitting():
        before = time.monotonic()
        folds = [_problem(recipes[0], split, rows, engine) for split in splits]
        monitor.reserve(_END * (time.monotonic() - before) / len(folds))  # the time to evaluate results on all rows
        if cells is None:
            cells = list(itertools.product(range(len(recipes)), range(len(keys)), range(len(folds))))
        size = _concurrent_runs(len(cells), batch)
        for low in range(0, len(cells), size):
            if low and not monitor.has_time():
                return
            chunk, chunk_began = cells[low : low + size], time.monotonic()
            problems = [
                folds[k].replace(recipe=recipes[i], key=np.asarray(jax.random.key_data(keys[j]))) for i, j, k in chunk
            ]
            results = engine.run(*(problem.recipe.search(problem) for problem in problems))
            share = (time.monotonic() - chunk_began) / len(chunk)
            for (i, _, _), problem, result in zip(chunk, problems, results, strict=True):
                data: Any = problem.data
                if isinstance(result, FloatingPointError):
                    yield RunFit(result, data, seconds=share)
                    continue
                seconds = time.monotonic() - began
                fit_result = _fit_result(result, unchecked[i], data.table, monitor, seconds)
                yield RunFit(fit_result, data, result.left_out, share, result.expected_loss)


def check_recipes(recipes: Sequence[Any], splits: Sequence[Fold]) -> None:
    """Raises ``ValueError`` if a recipe does not suit the table of a split."""
    rows, kinds = _padded_rows(splits), {(split.table.task, split.table.x.shape[1]) for split in splits}
    for recipe in map(options.checked, recipes):
        for task, columns in kinds:
            recipe.check(task, (rows, columns))
        for split in splits:
            check_monotone(recipe, split.table)


def _padded_rows(splits: Sequence[Fold]) -> int:
    """Returns the number of rows to which the training rows of all splits are padded."""
    return bucket(max(len(split.table.x) for split in splits))


def _problem(recipe: Recipe, split: Fold, rows: int, engine: Engine) -> Problem:
    """Returns the problem of a split, padded to a number of rows, without a recipe and a key."""
    table, validation = split.table, split.validation
    as_given = np.all(table.y.min(0) == 0) and np.all(table.y.max(0) == 1)
    if isinstance(table.task, Regression) and not table.task.in_units and not as_given:
        check_without_link(table.task.loss, table.task.shape)
    scaling = recipe.scaling(table).oriented(table.monotone)
    scaled = scaling.batch(table, rows)
    return Problem(
        None,
        table.task.scaled(scaling.y_unit),
        scaled,
        None if validation is None else scaling.batch(validation),
        np.zeros(0, np.uint32),
        Evaluation.TRAINING if validation is None else Evaluation.VALIDATION,
        engine=engine,
        data=Data(table, validation, scaling, scaled),
        rows=np.append(np.arange(len(table.x)), np.full(rows - len(table.x), -1)),
        monotone=None if table.monotone is None else np.not_equal(table.monotone, 0),
        source=scaled,
    )


def _fit_result(fitted: Fitted, recipe: Recipe, table: Table, monitor: Monitor, seconds: float) -> FitResult:
    history, left_out = np.asarray(fitted.history), fitted.left_out
    is_update = np.isfinite(history)
    history = history[..., : 1 + np.flatnonzero(is_update.any(tuple(range(history.ndim - 1)))).max(initial=-1)]
    rows = np.zeros(0, int) if left_out is None else left_out.rows
    weight = None if table.weight is None else table.weight[rows]
    report = FitReport(
        ended=monitor.reported_end,
        ended_at=monitor.ended_at,
        seconds=seconds,
        updates=is_update.sum(-1),
        held_out_loss=float(np.average(left_out.losses[rows], weights=weight)) if left_out and len(rows) else None,
        held_out_rows=table.numbers_of(rows) if left_out and not left_out.several else None,
        recipe=described(recipe.with_defaults()),
        search=fitted.report,
    )
    model, tree = fitted.model, fitted.tree
    if hasattr(model, "with_medians"):  # the medians that fill missing values travel with the model
        model = model.with_medians(table.medians)
        if tree is not None:
            tree = model if tree is fitted.model else tree.with_medians(table.medians)
    return FitResult(model, tree, fitted.loss, int(fitted.step), history, report)


def check_monotone(recipe: Recipe, table: Table) -> None:
    """Raises ``ValueError`` for monotone features if the recipe or the task does not support them."""
    if table.monotone is None:
        return
    task = table.task
    if isinstance(task, Policy) or (isinstance(task, Classification) and task.classes != 2):
        raise ValueError(f"monotone must be for numbers or two classes, got {checks.quoted(task)}")
    if not recipe.keeps_monotone(task):
        which = "GET, RADDT, CO2, NonGreedy or DGT with constant leaves, or Boosted, Bagged or BestOf of one"
        raise ValueError(f"monotone needs a recipe that keeps it, {which}, got {checks.quoted(recipe)}")


def _concurrent_runs(count: int, batch: int | Literal["auto"]) -> int:
    """Returns the number of concurrent runs if ``count`` runs are divided into batches of about equal size."""
    devices, shares = jax.local_devices(), sharding.share_of_starts()
    cpu_runs = _AT_ONCE_CPU * (len(devices) if shares is None else shares)
    limit = batch if batch != "auto" else cpu_runs if devices[0].platform == "cpu" else max(_AT_ONCE, shares or 1)
    return -(-count // -(-count // min(limit, count)))
