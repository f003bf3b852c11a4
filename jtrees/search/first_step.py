"""Trees for any loss, by searches that minimise squared errors: a search fits the first Newton step.

The Newton step starts from the best constant output. Let g and h be the gradient and the curvature of the loss there.
The quadratic approximation of the loss of an output o is ``h (o - t)^2 / 2`` plus a constant, where ``t = -g / h``.
Minimising it is a least-squares problem with targets t and weights h.

For Poisson, gamma and Tweedie losses, t equals the original targets up to an affine scaling. For losses without a
curvature, t is the sign of the residual. The leaves of the resulting tree are then fitted to the loss itself.
"""

from collections.abc import Callable
import math

import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import leaves as kinds
from jtrees.search.minibatch import prediction_loss
from jtrees.search.recipe import SearchResult
from jtrees.search.runs import Run, Runs
from jtrees.tasks import Classification, Regression, Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree


def is_direct(task: Task) -> bool:
    """Returns whether searches learn the task directly: a squared error or a classification."""
    return task.is_least_squares or isinstance(task, Classification)


def by_first_step(runs: Runs, search: Callable[[Runs], list[SearchResult]]) -> list[SearchResult]:
    """Returns ``search(runs)`` for squared errors and classes, else the results of a search on Newton steps.

    Args:
      runs: the runs.
      search: a search for trees with constant leaves.
    """
    task = runs.task
    if is_direct(task):
        return search(runs)
    y, weight, of_validation = zip(*runs.fetch(runs.map(_stepped)), strict=True)
    steps = Regression(task.shape[0] if task.shape else None)
    on_steps = runs.on(task=steps, y=y, weight=weight, validation_y=None if runs.validation is None else of_validation)
    results = search(on_steps)
    some = runs.select(range(len(results)))
    splits = [ObliqueTree(one.model.weights, one.model.bias, None) for one in results]
    refitted = some.fetch(some.map(_refitted, splits))
    return [
        result._replace(model=tree, score=score, finite=result.finite & np.isfinite(score))
        for result, (tree, score) in zip(results, refitted, strict=True)
    ]


def _stepped(run: Run) -> tuple[Array, Array, Array]:
    """Returns the Newton steps scaled to [0, 1], their weights, and the steps of the evaluation rows."""
    batch, weight, loss, task = run.batch, run.weight, run.task.loss_function, run.task
    first = loss.initial(batch.y, weight, math.prod(task.shape))

    def targets(rows: Batch) -> tuple[Array, Array]:
        step, curvature = loss.newton(jnp.broadcast_to(first, (len(rows.x), *task.shape)), rows.y)
        return step, curvature.reshape(len(rows.x), -1).mean(1)

    (step, curvature), shape = targets(batch), (-1, *[1] * len(task.shape))
    inside = (weight > 0).reshape(shape)
    low = jnp.where(inside, step, jnp.inf).min(0)
    unit = jnp.where(inside, step, -jnp.inf).max(0) - low
    scaled = lambda step: (step - low) / jnp.where(unit > 0, unit, 1)
    return scaled(step), weight * curvature, scaled(targets(run.by)[0])


def _refitted(run: Run, splits: ObliqueTree) -> tuple[ObliqueTree, Array]:
    """Returns the tree with leaves fitted to the loss itself, and the loss of the tree."""
    batch, kind = run.batch, kinds.kind_of("constant", run.task)
    empty = kind.empty(len(splits.bias) + 1, batch.x.shape[1], run.task.shape, batch.x.dtype)
    tree = splits.replace(leaves=empty).refit(*batch)
    return tree, prediction_loss(run.task, tree, run.by)
