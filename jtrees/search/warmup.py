"""Compilation before the data are available: a rehearsal of a fit on a random table."""

import contextlib
import dataclasses
import time
from typing import Any
import warnings

import jax
import numpy as np

from jtrees import processes, validation as checks
from jtrees.search.fit import dataset_of, fit_dataset
from jtrees.search.monitor import Monitor
from jtrees.search.recipe import Recipe
from jtrees.tasks import Classification, Policy, Regression, Task


def warmup(
    recipe: Recipe,
    *,
    rows: int,
    columns: int,
    classes: int | None = None,
    outputs: int | None = None,
    task: Task | None = None,
    validation_rows: int = 0,
    held_out: float = 0.0,
    monotone: bool = False,
) -> float:
    """Compiles the programs of a fit for a table of this shape; a later :func:`jtrees.fit` in this process reuses them.

    The function fits the recipe to a random table. Each training makes only a few updates, and boosting only a few
    rounds. The later fit may have a different random key and different numeric options, but the same static options
    (depth, epochs, widths and so on). The number of rows is rounded up by at most a sixteenth, so similar tables share
    programs. The programs are kept in memory, and in the folder of :func:`jtrees.cache` for later processes.
    Predictions for the rows of the table are compiled, too.

    Some programs depend on the data. The fit itself compiles:

    - the predictions of :class:`jtrees.Boosted` and :class:`jtrees.Refined`, for the number of trees in the model;
    - the refit of the leaves of :class:`jtrees.Boosted` for a table with outliers or codes;
    - the programs of :class:`jtrees.Polished` that depend on the number of rows in a subtree;
    - all programs of a loss with a number in the units of the targets, such as :class:`jtrees.losses.Huber`;
    - the predictions for a table with a column whose mean is more than eight standard deviations from 0.

    Args:
      recipe: the recipe of the fit. For an estimator without a recipe: ``TreeRegressor.default_recipe``.
      rows: number of rows of the table, at least 2, without the rows of a validation set.
      columns: number of features. For a raw table, the number of features that its columns become
        (``len(fit.model.encoder.feature_names)``).
      classes: number of classes, for classification.
      outputs: number of targets, for targets ``(n, outputs)``.
      task: a task, for example with a loss; None: the task that ``classes`` or ``outputs`` describes, else regression
        of one target.
      validation_rows: number of rows of the validation set; 0: no validation set.
      held_out: fraction of held-out rows, as in :func:`jtrees.fit`.
      monotone: whether the fit has an argument ``monotone``; the signs do not matter.

    Returns:
      The duration in seconds.

    Raises:
      ValueError: if an argument is invalid. The message names the argument, what was expected, and the value.
      ImportError: if the recipe needs a missing package. The message names the extra that installs it.
      RuntimeError: in a process forked after JAX was used (:mod:`jtrees.processes`).

    Example:
      >>> recipe = jtrees.DGT(depth=1, epochs=20)
      >>> seconds = jtrees.warmup(recipe, rows=40, columns=1)
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> fit = jtrees.fit(recipe, x, np.sign(x[:, 0]), key=jax.random.key(0))  # compiles nothing
    """
    began = time.monotonic()
    processes.require_xla("jtrees.warmup")
    checks.check_count("rows", rows, least=2)
    checks.check_count("columns", columns)
    checks.check_count("validation_rows", validation_rows, least=0)
    recipe = _without_names(recipe)
    task, key, rng = _task_of(classes, outputs, task), jax.random.key(0), np.random.default_rng(0)
    random_sets = [
        (rng.standard_normal((n, columns), np.float32), _made_targets(task, n, rng)) for n in (rows, validation_rows)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warnings would be about the random table
        signs = [1] + [0] * (columns - 1) if checks.check_flag("monotone", monotone) else None
        dataset = dataset_of(recipe, *random_sets[0], None, task or "regression", signs)
        rows_of_fit: Any = {"validation": random_sets[1] if validation_rows else None, "held_out": held_out}
        with contextlib.suppress(FloatingPointError):  # a fit to random rows may diverge; its programs are compiled
            fit = fit_dataset(recipe, dataset, key, Monitor(rehearses=True), began, **rows_of_fit)
            fit.predict(random_sets[0][0])
    return time.monotonic() - began


def _task_of(classes: int | None, outputs: int | None, task: Task | None) -> Task | None:
    """Returns the task that the arguments describe; None: regression of the targets that the recipe returns."""
    arguments = {"classes": classes, "outputs": outputs, "task": task}
    named = [name for name, value in arguments.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"{named[0]} must be None with {named[1]}, got {checks.quoted(arguments[named[0]])}")
    if task is not None and not isinstance(task, Task):
        raise ValueError(f"task must be a task, such as jtrees.Classification(3), got {checks.quoted(task)}")
    if classes is not None:
        return Classification(classes)
    return Regression(outputs) if outputs is not None else task


def _without_names(recipe: Any) -> Any:
    """Returns the recipe without names of columns, because programs do not depend on names."""
    if not isinstance(recipe, Recipe) or not dataclasses.is_dataclass(recipe):
        return recipe  # a later check raises an error
    values = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    changed = {name: _without_names(value) for name, value in values.items() if isinstance(value, Recipe)}
    if values.get("interactions") is not None:
        changed["interactions"] = "none"
    return recipe.replace(**changed)


def _made_targets(task: Task | None, n: int, rng: np.random.Generator) -> Any:
    """Returns random targets of n rows for the task: labels, or numbers in [1, 2] ([0, 1] for a user-defined loss)."""
    if isinstance(task, Classification):
        return np.arange(n) % task.classes
    shape = () if task is None or task.outputs is None else (task.outputs,)
    y = rng.random((n, *shape))
    y[:2] = np.resize([[0.0], [1.0]], y[:2].shape) if shape else np.arange(2.0)[:n]
    return y if task is not None and not task.in_units and not isinstance(task, Policy) else 1 + y
