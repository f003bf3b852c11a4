"""Fits of recipes: one run, or many side by side, from a table to models in the user's units."""

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import itertools
import time
from typing import Any, Literal

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
from jtrees.search.monitor import Monitor
from jtrees.search.recipe import Finished, Recipe, SearchResult
from jtrees.search.report import FitReport
from jtrees.search.runs import Runs
from jtrees.tasks import Classification, Policy, Regression, Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree

# Concurrent runs per CPU device, which runs them one after the other: more would only shorten the rounds.
_AT_ONCE_CPU = 16
_AT_ONCE = 64  # likewise elsewhere
_FINISH = 2**30  # makes the key of ``finish`` from that of the fit
_END = 2.0  # time that the end of a fit takes, as a multiple of the time in which its data were scaled


@io.model
@pytree.dataclass
class FitResult:
    """What :func:`fit` returns, in the user's units.

    Attributes:
      model: ``model.predict(x)`` maps x to y, or to class probabilities ``(n, K)``. Of a raw table (a DataFrame, or an
        array with NaN), a :class:`jtrees.data.FrameModel`.
      tree: the model if it is a :class:`jtrees.ObliqueTree`, else None; of a raw table, the tree of its features.
      loss: the loss the model was chosen by: the task's mean loss, such as the mean squared error (of several targets
        on targets scaled to [0, 1]) or log loss, on ``validation`` if given, else on the training data; recipes
        document exceptions.
      step: number of updates before the model was evaluated.
      history: training loss before each update, on scaled data, steps last, up to the last that any run took; NaN
        where a run did not take it.
      report: how the fit went; ``report.search`` is the report of the recipe.
    """

    model: Any
    tree: ObliqueTree | None
    loss: float
    step: int
    history: np.ndarray
    report: FitReport = pytree.field(pytree_node=False)

    def predict(self, x: Any) -> Any:
        """Predictions of the model: short for ``fit.model.predict(x)``."""
        return self.model.predict(x)

    def to_text(self, *args: Any, **shown: Any) -> str:
        """Returns what kind of tree the model is, on a line that begins with ``#``, and its rules.

        The arguments are those of :meth:`jtrees.ObliqueTree.to_text`; for the rules alone see ``fit.model.to_text``.

        Raises:
          ValueError: for a model that is not one tree, and as :meth:`jtrees.ObliqueTree.to_text`.
        """
        if self.tree is None:
            raise ValueError(f"model must be a single tree to have rules, got {checks.quoted(self.model)}")
        return f"# {self.kind}\n{self.model.to_text(*args, **shown)}"

    @property
    def kind(self) -> str:
        """What kind of tree the model is, and how it was found, as text; of another model, its own description."""
        if self.tree is None:
            return repr(self.model)
        return kind_of(self.tree, self.report.chosen)

    def to_save(self) -> "FitResult":
        """Returns the fit with its tuned options in a form that can be saved: functions by their names."""
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
        return f"loss={self.loss}, step={self.step}, report: {', '.join(self.report.names())}"


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
    progress: bool = False,
    max_seconds: float | None = None,
) -> FitResult:
    """Fits a model to a table.

    The model is compared with a linear model and a constant: on ``validation``, on the rows that ``held_out`` sets
    aside, or on the rows that the search itself left out (those out of bag, or those that chose the number of rounds or
    of updates). Without such rows the comparison is on the training rows, where each model is charged for its
    parameters; it then says so, and is less sure. ``report.verdict`` says which model is better.

    The search runs in compiled calls of about half a second. Ctrl-C, or ``max_seconds``, ends it after the current call
    (in the short stages of GET and RADDT, after one more) with the best result so far. A second Ctrl-C raises
    KeyboardInterrupt. Compilation is not interrupted. Before a deadline, CART is grown on a sample of the rows where
    all rows would take too long. When the time is up, refinements and further trees of a bag are left out. Checks,
    scaling, one update and the leaves of all rows are not.

    Args:
      recipe: what to fit, such as ``jtrees.GET(depth=4)``.
      x: features: an array ``(n, p)``, in which NaN is a missing value; or a raw table, a DataFrame of pandas, polars
        or Arrow with numbers, booleans, dates and text, which :class:`jtrees.data.Columns` describes and encodes.
      y: targets, ``(n,)`` or ``(n, k)``, finite and not constant; in classification integers 0..K-1, every class
        present, or soft labels: the probabilities of the classes, ``(n, K)``, whose rows sum to 1.
      key: random key.
      task: ``"regression"`` or ``"classification"``, or a task: ``jtrees.Classification(3)`` allows classes without a
        sample.
      sample_weight: nonnegative weights, ``(n,)``; only their ratios matter, rows of weight 0 are left out. Uneven
        weights count as fewer samples (Kish's effective sample size) where leaves are regularised or smoothed.
      validation: a validation set ``(x, y)``, which is not trained on: models are chosen by their loss there.
      held_out: part of the rows, at least 0 and below 1, that neither train nor choose the model, and on which it is
        compared; the same part of every class. The default, 0, trains on all rows.
      monotone: in which columns predictions must not fall, 1, or must not rise, -1, as any one of them grows alone:
        ``{"age": 1, "price": -1}`` by name or number, or a sign or 0 for each column. Of two classes this is the
        probability of class 1. The guarantee holds for the model, and for files exported from it. GET, RADDT, CO2,
        NonGreedy and DGT with constant leaves keep it, and their sums, bags and best runs.
      progress: whether to show a bar with the loss and the remaining time.
      max_seconds: deadline, in seconds from now. It may be exceeded by a tenth and half a second, and by compilation.

    Warns:
      jtrees.data.ColumnsWarning: of columns of a raw table that are left out, as constant or as naming rows.
      jtrees.data.baselines.BehindBaselineWarning: if a linear model or a constant is better.

    Raises:
      ValueError: naming the argument, what was expected and what came.
      ImportError: if the recipe needs a package that is missing, saying which extra has it.
      FloatingPointError: if the search was not finite.
      RuntimeError: in a process forked after JAX was used (:mod:`jtrees.processes`).
    """
    started = time.monotonic()
    processes.require_xla("jtrees.fit")
    checks.check_key(key)
    if max_seconds is not None:
        checks.check_seconds(max_seconds)
    table = table_of(recipe, x, y, sample_weight, task, monotone)
    evaluated, chosen_by = None, None if validation is None else validation_of(recipe, validation, table)
    if checked_share(held_out):
        if chosen_by is not None:
            raise ValueError(f"held_out must be 0 with a validation set, got {checks.quoted(held_out)}")
        table, evaluated = table.divided(held_out, key)
    monitor = Monitor(progress) if max_seconds is None else Monitor(progress, started + max_seconds, max_seconds)
    with compilation.promoting_ranks(), distributed.together("jtrees.fit"), monitor.listening():
        [(result, data, scaled_task)] = fits_of([recipe], [key], [None], table, chosen_by, monitor)
    if isinstance(result, FloatingPointError):
        raise result
    if table.columns is not None:
        table.columns.warn_left_out()
    if recipe.targets(table.x, y) is y and scaled_task.has_baselines:
        found = comparison_of(result, data, evaluated)
        found.warn_if_behind(name := type(recipe).__name__)
        result = result.replace(report=result.report.replace(baselines=found.losses, verdict=found.verdict(name)))
    result = result.replace(report=result.report.replace(seconds=time.monotonic() - started))
    return of_raw_table(result, table)


def comparison_of(result: FitResult, data: Data, evaluated: Table | None) -> Comparison:
    """Returns the comparison of a fit with a linear model and a constant.

    The comparison is on ``data.validation``, on other rows ``evaluated``, on the rows that the search left out, or
    else on the training rows.
    """
    where, left_out = HELD_OUT if data.validation is None else VALIDATION, None
    if result.report.held_out_loss is not None:
        left_out = result.report.held_out_loss, result.report.held_out_rows
    held_out = data.validation if evaluated is None else evaluated
    return compared(result.model, data.table, data.scaling, held_out=held_out, where=where, left_out=left_out)


def checked_share(held_out: Any) -> float:
    """Returns the part of the rows to hold out; raises ``ValueError`` unless it is at least 0 and below 1."""
    number = isinstance(held_out, (int, float, np.floating)) and not isinstance(held_out, bool)
    if not number or not 0 <= held_out < 1:
        raise ValueError(f"held_out must be a number of at least 0 and below 1, got {checks.quoted(held_out)}")
    return float(held_out)


def of_raw_table(result: FitResult, table: Table) -> FitResult:
    """Returns the fit with a model of the raw table, if the table was one."""
    return result if table.columns is None else result.replace(model=FrameModel(result.model, table.columns))


def table_of(
    recipe: Recipe,
    x: Any,
    y: Any,
    sample_weight: Any,
    task: Literal["regression", "classification"] | Task,
    monotone: Any = None,
) -> Table:
    """Returns the checked table that a recipe is trained on.

    Raises:
      ValueError: naming the argument, what was expected and what came.
    """
    if not isinstance(recipe, Recipe) or not dataclasses.is_dataclass(recipe):
        raise ValueError(f"recipe must be a recipe, such as jtrees.GET(depth=4), got {checks.quoted(recipe)}")
    return checked_table(x, y, sample_weight, task, recipe.targets, monotone)


def validation_of(recipe: Recipe, validation: Any, table: Table) -> Table:
    """Returns a validation set ``(x, y)``, checked against the table that is trained on.

    Raises:
      ValueError: naming the argument, what was expected and what came.
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
    """Returns a value as plain data: a recipe by its name and options, a function by its name."""
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


def fits_of(
    recipes: list[Any],
    keys: list[Array],
    left_out: list[np.ndarray | None],
    table: Table,
    validation: Table | None,
    monitor: Monitor,
    batch: int | Literal["auto"] = "auto",
) -> Iterator[tuple[FitResult | FloatingPointError, Data, Task]]:
    """Yields the fits of recipes that share one program, for each recipe, key and fold, in this order.

    A search that was not finite yields its error instead. Ends early if the monitor stops it.

    Args:
      recipes: recipes with the same static options.
      keys: keys as for :func:`fit`.
      left_out: the rows that each fold leaves out; None: none.
      table: the rows to train on.
      validation: the validation set of all fits, or None.
      monitor: the monitor of all runs.
      batch: number of concurrent runs.

    Yields:
      The fit, the data it was fitted to, and the task of scaled data.
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
    monitor.keep(_END * (time.monotonic() - before))  # as results are evaluated on all rows
    tables, weights = _folds(table, scaled, left_out)
    data = [Data(fold, validation, scaling, scaled if weights is None else scaling.batch(fold)) for fold in tables]
    cells = list(itertools.product(range(len(recipes)), range(len(keys)), range(len(tables))))
    searched = Runs(
        [recipes[i] for i, _, _ in cells],
        [np.asarray(jax.random.key_data(keys[k])) for _, k, _ in cells],
        task,
        scaled,
        None if validation is None else scaling.batch(validation),
        monitor,
        impl=str(jax.random.key_impl(keys[0])),
        at_once=max(_AT_ONCE, sharding.share_of_starts() or 1) if batch == "auto" else batch,
    )
    if weights is not None:
        of_folds = list(weights)
        searched = searched.on(weight=[of_folds[fold] for _, _, fold in cells])
    if table.monotone is not None:
        searched = searched.on(monotone=[np.not_equal(table.monotone, 0)] * len(cells))
    at_once = _at_once(len(cells), batch)
    for low in range(0, len(cells), at_once):
        if low and not monitor.has_time():
            return
        some = range(low, min(low + at_once, len(cells)))
        results = first.search(searched.select(some).afresh())
        for n, ((i, _, fold), result) in enumerate(zip(cells[low:], results, strict=False)):
            own: Any = {"key": searched.keyed(_FINISH).key(low + n), "monitor": monitor}
            try:
                with distributed.apart():
                    finished = recipes[i].finish(result, data[fold], **own)
            except FloatingPointError as error:
                yield error, data[fold], task
                continue
            rows = len(table.x) if weights is None else None
            fitted = _fitted(finished, result, unchecked[i], monitor, rows, seconds=time.monotonic() - began)
            yield fitted, data[fold], task


def _fitted(
    finished: Finished, result: SearchResult, recipe: Recipe, monitor: Monitor, rows: int | None, *, seconds: float
) -> FitResult:
    """Returns the fit of a finished search; its report names the rows held out of the ``rows`` of a table, if any."""
    history = np.asarray(result.history)
    taken = np.isfinite(history)
    history = history[..., : 1 + np.flatnonzero(taken.any(tuple(range(taken.ndim - 1)))).max(initial=-1)]
    loss, held_out = (None, None) if finished.held_out is None else finished.held_out
    report = FitReport(
        ended=monitor.ended,
        ended_at=monitor.where,
        seconds=seconds,
        updates=taken.sum(-1),
        held_out_loss=loss,
        held_out_rows=None if held_out is None or rows is None else np.flatnonzero(held_out[:rows]),
        recipe=described(recipe.settled()),
        search=finished.report,
    )
    return FitResult(finished.model, finished.tree, finished.loss, int(result.step), history, report)


def check_link(task: Task, table: Table) -> None:
    """Raises ``ValueError`` for a user-defined loss with a link, unless targets range from exactly 0 to 1."""
    as_given = np.all(table.y.min(0) == 0) and np.all(table.y.max(0) == 1)
    if isinstance(task, Regression) and not task.in_units and not as_given:
        check_without_link(task.loss, task.shape)


def check_monotone(recipe: Recipe, table: Table) -> None:
    """Raises ``ValueError`` for monotone features that a recipe or a task cannot have."""
    if table.monotone is None:
        return
    task = table.task
    if isinstance(task, Policy) or (isinstance(task, Classification) and task.classes != 2):
        raise ValueError(f"monotone must be for numbers or two classes, got {checks.quoted(task)}")
    if not recipe.keeps_monotone(task):
        which = "GET, RADDT, CO2, NonGreedy or DGT with constant leaves, or Boosted, Bagged or BestOf of one"
        raise ValueError(f"monotone needs a recipe that keeps it, {which}, got {checks.quoted(recipe)}")


def _folds(table: Table, scaled: Batch, left_out: list[np.ndarray | None]) -> tuple[list[Table], np.ndarray | None]:
    """Returns each fold's table, and the weights ``(folds, n)`` of the padded batch, 0 for rows left out."""
    if left_out[0] is None:
        return [table], None
    weights = np.tile(np.asarray(scaled.weight), (len(left_out), 1))
    for weight, rows in zip(weights, left_out, strict=True):
        weight[rows] = 0
    return [table.rows(np.flatnonzero(weight[: len(table.x)] > 0)) for weight in weights], weights


def _at_once(count: int, batch: int | Literal["auto"]) -> int:
    """Returns the number of concurrent runs of ``count``, in batches of equal size."""
    devices, shares = jax.local_devices(), sharding.share_of_starts()
    of_cpus = _AT_ONCE_CPU * (len(devices) if shares is None else shares)
    most = batch if batch != "auto" else of_cpus if devices[0].platform == "cpu" else max(_AT_ONCE, shares or 1)
    return -(-count // -(-count // min(most, count)))
