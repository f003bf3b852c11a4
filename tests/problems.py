"""Problems for the tests of procedures, and their results."""

from typing import Any

import jax
import numpy as np

import jtrees
from jtrees.data import Data, Scaling, Table
from jtrees.search import Engine, Evaluation, Problem, options
from jtrees.search.monitor import Monitor


def key_data(key: Any = 0) -> np.ndarray:
    """The data of a random key, or of the key of a seed."""
    return np.asarray(jax.random.key_data(jax.random.key(key) if isinstance(key, int) else key))


def problem_of(
    recipe: Any, batch: jtrees.Batch, *, task: Any = None, key: Any = 0, validation: Any = None, **attributes: Any
) -> Problem:
    """A problem of scaled rows. ``attributes`` are further attributes of the problem."""
    kind = Evaluation.TRAINING if validation is None else Evaluation.VALIDATION
    attributes = {"engine": Engine(Monitor(), "threefry2x32"), "kind": kind} | attributes
    recipe, task = options.checked(recipe), jtrees.Regression() if task is None else task
    return Problem(recipe, task, batch, validation, key_data(key), **attributes)


def problem_of_table(recipe: Any, table: Table, *, validation: Table | None = None, **attributes: Any) -> Problem:
    """A problem of a table, scaled as the recipe scales it, as a fit makes it."""
    scaling: Scaling = recipe.scaling(table).oriented(table.monotone)
    batch = scaling.batch(table)
    data = Data(table, validation, scaling, batch)
    rows = np.append(np.arange(len(table.x)), np.full(len(batch.x) - len(table.x), -1))
    evaluation, task = None if validation is None else scaling.batch(validation), table.task.scaled(scaling.y_unit)
    attributes = {"task": task, "validation": evaluation, "data": data, "rows": rows} | attributes
    return problem_of(recipe, batch, **attributes)


def run(*procedures: Any, engine: Engine) -> list[Any]:
    """The results of procedures; raises the first error among them."""
    results = engine.run(*procedures)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def search(problem: Problem) -> Any:
    """The result of the search of a problem."""
    return run(problem.recipe.search(problem), engine=problem.engine)[0]
