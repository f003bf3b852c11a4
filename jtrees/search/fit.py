"""Fits of recipes: one run, or many side by side, from a table to models in the user's units."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import time
from typing import Any, Literal, NamedTuple

import jax
from jax.typing import ArrayLike
from jaxtyping import Array
import numpy as np

from jtrees import compilation, distributed, io, processes, pytree, sharding, validation as checks
from jtrees.data import Data, FrameModel, Table, checked_table
from jtrees.data.baselines import HELD_OUT, VALIDATION, Comparison, compared
from jtrees.data.table import bucket, held_out_table
from jtrees.description import kind_of
from jtrees.losses.samples import check_without_link
from jtrees.search import options
from jtrees.search.engine import Engine
from jtrees.search.fitted import Fitted, LeftOut
from jtrees.search.monitor import Monitor
from jtrees.search.problem import Problem
from jtrees.search.recipe import Recipe
from jtrees.search.report import FitReport
from jtrees.tasks import Classification, Policy, Regression, Task
from jtrees.tree import ObliqueTree

# Concurrent runs per CPU device. The device runs them one after another, so a larger number would not save time.
_AT_ONCE_CPU = 16
_AT_ONCE = 64  # concurrent runs on other devices
_END = 2.0  # estimated time of the end of a fit, as a multiple of the time to scale the data


@io.model
@pytree.dataclass
class FitResult:
    """The result of :func:`fit`, in the user's units.

    Attributes:
      model: the fitted model. ``model.predict(x)`` returns predictions of y, or class probabilities ``(n, K)``. For a
        raw table (a DataFrame, or an array with NaN), the model is a :class:`jtrees.data.FrameModel`.
      tree: the model if it is a :class:`jtrees.ObliqueTree`, else None. For a raw table, the tree of the features
        that its columns become.
      loss: the mean loss of the task by which the model was chosen, such as the mean squared error or the log loss.
        For several targets, the mean squared error is computed on targets scaled to [0, 1]. The loss is on
        ``validation`` if given, else on the training data. Recipes document exceptions.
      step: number of updates before the model was evaluated.
      history: training loss before each update, on scaled data. The last axis counts updates, up to the longest run.
        An entry is NaN if the run did not make the update.
      report: how the fit went; ``report.search`` is the report of the recipe.
    """

    model: Any
    tree: ObliqueTree | None
    loss: float
    step: int
    history: np.ndarray
    report: FitReport = pytree.field(pytree_node=False)

    def predict(self, x: Any) -> Any:
        """Returns the predictions of the model: short for ``fit.model.predict(x)``."""
        return self.model.predict(x)

    def to_text(self, *args: Any, **shown: Any) -> str:
        """Returns the kind of the tree, on a line that begins with ``#``, and the rules of the tree.

        The arguments are passed to :meth:`jtrees.ObliqueTree.to_text`. ``fit.model.to_text`` returns the rules without
        the kind.

        Raises:
          ValueError: if the model is not a single tree. Also in the cases of :meth:`jtrees.ObliqueTree.to_text`.
        """
        if self.tree is None:
            raise ValueError(f"model must be a single tree to have rules, got {checks.quoted(self.model)}")
        return f"# {self.kind}\n{self.model.to_text(*args, **shown)}"

    @property
    def kind(self) -> str:
        """Description of the tree and of the search for it; for a model that is not a tree, its ``repr``."""
        if self.tree is None:
            return repr(self.model)
        return kind_of(self.tree, self.report.chosen)

    def to_save(self) -> "FitResult":
        """Returns the fit with tuned options in a form that can be saved: a function becomes its name."""
        if (tuning := self.report.tuning) is None:
            return self
        trials = [trial._replace(options=_plain_options(trial.options)) for trial in tuning.trials]
        tuning = tuning.replace(options=_plain_options(tuning.options), trials=trials)
        return self.replace(report=self.report.replace(tuning=tuning))

    def __str__(self) -> str:
        lines = [f"model: {self.model!r}", f"tree: {self.kind}" if self.tree is not None else None]
        lines += [self.report.verdict, self._numbers()]
        return "\n".join(line for line in lines if line is not None)

    def __repr__(self) -> str:
        return f"FitResult(model={self.model!r}, {self._numbers()})"

    def _numbers(self) -> str:
        ended = "" if self.report.ended == "finished" else f"ended={self.report.ended}, "
        return f"loss={self.loss}, step={self.step}, {ended}report: {', '.join(self.report.names())}"


def _plain_options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value if io.is_data(value) else plain(value) for name, value in options.items()}


# --- Fit -------------------------------------------------------------------------------------------------------------


def fit(
    recipe: Recipe,
    x: Any,
    y: ArrayLike | None = None,
    *,
    key: Array,
    task: Literal["regression", "classification"] | Task = "regression",
    sample_weight: ArrayLike | None = None,
    validation: tuple[Any, ArrayLike] | None = None,
    held_out: float = 0.0,
    monotone: Any = None,
    missing: Sequence[str] = (),
    progress: bool = False,
    max_seconds: float | None = None,
) -> FitResult:
    """Fits a model to a table.

    The fit also compares the model with a linear model and a constant, and ``report.verdict`` says which is better. The
    comparison uses ``validation``, the rows that ``held_out`` sets aside, or the rows that the search itself held out.
    The held-out rows of a search are out-of-bag rows, or rows that choose the number of rounds or updates. The verdict
    says if the rows also chose the model, because their losses are then slightly too low. If there are no such rows,
    the comparison uses the training rows and charges each model for its parameters. The verdict then says so, because
    the comparison is less certain.

    The search runs in compiled calls of about half a second. Ctrl-C or ``max_seconds`` ends the search after the
    current call, with the best result so far. In the short stages of GET and RADDT, one more call follows. A second
    Ctrl-C raises KeyboardInterrupt. Compilation is not interrupted.

    If CART on all rows would exceed the deadline, CART is grown on a sample of the rows. After the deadline, the fit
    skips refinements and further trees of a bag. The fit always checks and scales the table, makes one update, and fits
    the leaves to all rows.

    Args:
      recipe: the recipe to fit, such as ``jtrees.GET(depth=4)``.
      x: features, either an array ``(n, p)``, in which NaN is a missing value, or a raw table. A raw table is a
        DataFrame of pandas, polars or Arrow with numbers, booleans, dates and text, which
        :class:`jtrees.data.Columns` describes and encodes.
      y: targets, ``(n,)`` or ``(n, k)``, finite and not constant. In classification: integers 0..K-1 with every class
        present, or soft labels. Soft labels are class probabilities, ``(n, K)``, whose rows sum to 1.
      key: random key.
      task: ``"regression"`` or ``"classification"``, or a task. ``jtrees.Classification(3)`` allows classes that have
        no sample.
      sample_weight: nonnegative weights, ``(n,)``. Only the ratios of the weights matter, and rows of weight 0 are
        dropped, as are rows whose weight relative to the largest is too small for float32. When leaves are regularised
        or smoothed, uneven weights count as fewer samples (Kish's effective sample size of each node).
      validation: a validation set ``(x, y)``. Models are chosen by their loss on it and are not trained on it.
      held_out: fraction of the rows that are used for the comparison only, at least 0 and below 1. The fraction is the
        same for every class. The default, 0, trains on all rows.
      monotone: signs of columns, such as ``{"age": 1, "price": -1}`` by name or number, or a sign for each column. A
        number is a position, or a name if columns are named by numbers. If only that column grows, predictions do not
        fall (sign 1) or do not rise (sign -1). Sign 0 is no constraint. For two classes, the prediction is the
        probability of class 1. The guarantee holds for the model and for files exported from it. GET, RADDT, CO2,
        NonGreedy and DGT with constant leaves support it, and so do their sums, bags and best runs.
      missing: texts that mean a missing value in every column of text of a raw table, such as ``("-", "unknown")``. In
        text of numbers and dates, texts such as ``"?"`` and ``"N/A"`` always do.
      progress: whether to show a bar with the loss and the remaining time.
      max_seconds: deadline, in seconds from now. The fit may exceed it by a tenth of ``max_seconds`` plus half a
        second, and by the time of a compilation.

    Warns:
      jtrees.data.ColumnsWarning: if columns of a raw table are left out because they are constant or identify rows, or
        if their text may have another meaning.
      jtrees.data.baselines.BehindBaselineWarning: if a linear model or a constant is better.

    Raises:
      ValueError: if an argument is invalid. The message names the argument, what was expected, and the value.
      ImportError: if the recipe needs a missing package. The message names the extra that installs it.
      FloatingPointError: if the training became non-finite.
      RuntimeError: in a process forked after JAX was used (:mod:`jtrees.processes`).
    """
    started = time.monotonic()
    processes.require_xla("jtrees.fit")
    checks.check_key(key)
    if max_seconds is not None:
        checks.check_seconds(max_seconds)
    table = table_of(recipe, x, y, sample_weight, task, monotone, missing)
    evaluated, chosen_by = None, None if validation is None else validation_of(recipe, validation, table)
    if checked_share(held_out):
        if chosen_by is not None:
            raise ValueError(f"held_out must be 0 with a validation set, got {checks.quoted(held_out)}")
        table, evaluated = table.divided(held_out, key)
    monitor = Monitor(progress) if max_seconds is None else Monitor(progress, started + max_seconds, max_seconds)
    with compilation.promoting_ranks(), distributed.together("jtrees.fit"), monitor.listening():
        [fitted] = fits_of([recipe], [key], [None], table, chosen_by, monitor)
    if isinstance(fitted.result, FloatingPointError):
        raise fitted.result
    result = fitted.result
    if table.columns is not None:
        table.columns.warn_left_out()
    if recipe.targets(table.x, y) is y and fitted.task.has_baselines:
        found = comparison_of(fitted, evaluated)
        cause = {"max_seconds": "max_seconds", "interrupted": "Ctrl-C"}.get(result.report.ended)
        stopped = None if cause is None else f"{cause} ended the training early"
        found.warn_if_behind(name := type(recipe).__name__, stopped)
        result = result.replace(report=result.report.replace(baselines=found.losses, verdict=found.verdict(name)))
    result = result.replace(report=result.report.replace(seconds=time.monotonic() - started))
    return of_raw_table(result, table)


def comparison_of(fitted: "RunFit", evaluated: Table | None) -> Comparison:
    """Returns the comparison of a fit with a linear model and a constant.

    The comparison uses the rows ``evaluated``, else the validation set, else the rows that the search left out. If
    there are none, it uses the training rows.
    """
    model, data = fitted.result.model, fitted.data  # pyright: ignore[reportAttributeAccessIssue]
    where = HELD_OUT if data.validation is None else VALIDATION
    held_out = data.validation if evaluated is None else evaluated
    return compared(model, data.table, data.scaling, held_out=held_out, where=where, left_out=fitted.left_out)


def checked_share(held_out: Any) -> float:
    """Returns the fraction of rows to hold out; raises ``ValueError`` if it is not in [0, 1)."""
    number = isinstance(held_out, (int, float, np.floating)) and not isinstance(held_out, bool)
    if not number or not 0 <= held_out < 1:
        raise ValueError(f"held_out must be a number of at least 0 and below 1, got {checks.quoted(held_out)}")
    return float(held_out)


def of_raw_table(result: FitResult, table: Table) -> FitResult:
    """Returns the fit with a model of the raw table if the table was raw, else the fit unchanged."""
    return result if table.columns is None else result.replace(model=FrameModel(result.model, table.columns))


def table_of(
    recipe: Recipe,
    x: Any,
    y: Any,
    sample_weight: Any,
    task: Literal["regression", "classification"] | Task,
    monotone: Any = None,
    missing: Sequence[str] = (),
) -> Table:
    """Returns the checked table that a recipe is trained on.

    Raises:
      ValueError: if an argument is invalid. The message names the argument, what was expected, and the value.
    """
    if not isinstance(recipe, Recipe) or not dataclasses.is_dataclass(recipe):
        raise ValueError(f"recipe must be a recipe, such as jtrees.GET(depth=4), got {checks.quoted(recipe)}")
    return checked_table(x, y, sample_weight, task, recipe.targets, monotone, missing)


def validation_of(recipe: Recipe, validation: Any, table: Table) -> Table:
    """Returns a validation set ``(x, y)``, checked against the training table.

    Raises:
      ValueError: if the pair is invalid. The message names the argument, what was expected, and the value.
    """
    if not isinstance(validation, (tuple, list)) or len(validation) != 2:
        raise ValueError(f"validation must be a pair (x, y), got {type(validation).__name__}")
    x, y = validation
    try:
        return held_out_table(x, y, table, recipe.targets)
    except ValueError as error:
        raise ValueError(f"validation: {error}") from None


def described(recipe: Recipe) -> dict[str, Any]:
    """Returns the name and options of a recipe as plain data."""
    fields = dataclasses.fields(recipe)  # pyright: ignore[reportArgumentType]
    return {"name": type(recipe).__name__} | {field.name: plain(getattr(recipe, field.name)) for field in fields}


def plain(value: Any) -> Any:
    """Returns a value as plain data: a recipe becomes its name and options, a function becomes its name."""
    if isinstance(value, Recipe):
        return described(value)
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if isinstance(value, functools.partial):
        arguments = [str(plain(item)) for item in value.args]
        arguments += [f"{name}={plain(item)}" for name, item in value.keywords.items()]
        return f"{plain(value.func)}({', '.join(arguments)})"
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else repr(value)


# --- Many searches ---------------------------------------------------------------------------------------------------


class RunFit(NamedTuple):
    """The fit of a run.

    Attributes:
      result: the fit, or the error of a search that became non-finite.
      data: its data.
      task: the task of the scaled data.
      left_out: losses of the rows that parts of the search were not trained on, or None.
    """

    result: FitResult | FloatingPointError
    data: Data
    task: Task
    left_out: LeftOut | None = None


def fits_of(
    recipes: list[Any],
    keys: list[Array],
    left_out: list[np.ndarray | None],
    table: Table,
    validation: Table | None,
    monitor: Monitor,
    batch: int | Literal["auto"] = "auto",
) -> Iterator[RunFit]:
    """Yields the fits of recipes that share one program, for each recipe, key and fold, in this order.

    The iteration ends early if the monitor stops it.

    Args:
      recipes: recipes with the same static options.
      keys: keys as for :func:`fit`.
      left_out: the held-out rows of each fold; None: the fold trains on all rows.
      table: the rows to train on.
      validation: the validation set of all fits, or None.
      monitor: the monitor of all runs.
      batch: number of concurrent runs.
    """
    began = time.monotonic()
    compilation.bound_memory()
    unchecked, recipes = recipes, [options.checked(recipe) for recipe in recipes]
    first, task = recipes[0], table.task
    first.check(task, (bucket(len(table.x)), table.x.shape[1]))
    check_link(task, table)
    check_monotone(first, table)
    before = time.monotonic()
    scaling = first.scaling(table).oriented(table.monotone)
    task = task.scaled(scaling.y_unit)
    scaled = scaling.batch(table)
    monitor.keep(_END * (time.monotonic() - before))  # reserves the time to evaluate results on all rows
    impl = str(jax.random.key_impl(keys[0]))
    engine = Engine(monitor, impl, max(_AT_ONCE, sharding.share_of_starts() or 1) if batch == "auto" else batch)
    whole = Problem(
        None,
        task,
        scaled,
        None if validation is None else scaling.batch(validation),
        np.zeros(0, np.uint32),
        engine,
        data=Data(table, validation, scaling, scaled),
        rows=np.append(np.arange(len(table.x)), np.full(len(scaled.x) - len(table.x), -1)),
        monotone=None if table.monotone is None else np.not_equal(table.monotone, 0),
        validates=validation is not None,
        evaluates=validation is not None,
        separate=validation is not None,
        source=scaled,
    )
    folds = [whole if rows is None else _fold(whole, rows) for rows in left_out]
    cells = list(itertools.product(range(len(recipes)), range(len(keys)), range(len(folds))))
    at_once = _at_once(len(cells), batch)
    for low in range(0, len(cells), at_once):
        if low and not monitor.has_time():
            return
        some = cells[low : low + at_once]
        problems = [
            folds[k].replace(recipe=recipes[i], key=np.asarray(jax.random.key_data(keys[j]))) for i, j, k in some
        ]
        results = engine.run(*(problem.recipe.search(problem) for problem in problems))
        for (i, _, _), problem, result in zip(some, problems, results, strict=True):
            data: Any = problem.data
            if isinstance(result, FloatingPointError):
                yield RunFit(result, data, task)
                continue
            seconds = time.monotonic() - began
            yield RunFit(_fit_result(result, unchecked[i], data.table, monitor, seconds), data, task, result.left_out)


def _fold(problem: Problem, held_out: np.ndarray) -> Problem:
    """Returns the problem without the rows of the table that a fold holds out. It has no evaluation rows."""
    rows: Any = problem.rows
    fold, data = problem.without(np.isin(rows, held_out)), problem.data
    assert fold.data is not None and data is not None
    table = fold.data.table
    changes: Any = {"data": Data(table, data.validation, data.scaling, data.scaling.batch(table))}
    if not problem.validates:
        changes |= {"evaluation": None, "separate": False}
    return fold.replace(**changes)


def _fit_result(fitted: Fitted, recipe: Recipe, table: Table, monitor: Monitor, seconds: float) -> FitResult:
    """Returns the fit of a finished search."""
    history, left_out = np.asarray(fitted.history), fitted.left_out
    taken = np.isfinite(history)
    history = history[..., : 1 + np.flatnonzero(taken.any(tuple(range(taken.ndim - 1)))).max(initial=-1)]
    rows = np.zeros(0, int) if left_out is None else left_out.rows
    weight = None if table.weight is None else table.weight[rows]
    report = FitReport(
        ended=monitor.ended,
        ended_at=monitor.where,
        seconds=seconds,
        updates=taken.sum(-1),
        held_out_loss=float(np.average(left_out.losses[rows], weights=weight)) if left_out and len(rows) else None,
        held_out_rows=rows if left_out and not left_out.several else None,
        recipe=described(recipe.settled()),
        search=fitted.report,
    )
    return FitResult(fitted.model, fitted.tree, fitted.loss, int(fitted.step), history, report)


def check_link(task: Task, table: Table) -> None:
    """Raises ``ValueError`` for a user-defined loss with a link if the targets do not range from exactly 0 to 1."""
    as_given = np.all(table.y.min(0) == 0) and np.all(table.y.max(0) == 1)
    if isinstance(task, Regression) and not task.in_units and not as_given:
        check_without_link(task.loss, task.shape)


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


def _at_once(count: int, batch: int | Literal["auto"]) -> int:
    """Returns the number of concurrent runs if ``count`` runs are divided into batches of about equal size."""
    devices, shares = jax.local_devices(), sharding.share_of_starts()
    of_cpus = _AT_ONCE_CPU * (len(devices) if shares is None else shares)
    most = batch if batch != "auto" else of_cpus if devices[0].platform == "cpu" else max(_AT_ONCE, shares or 1)
    return -(-count // -(-count // min(most, count)))
