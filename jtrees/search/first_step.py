"""Trees for any loss, by searches that minimise squared errors: a search fits the first Newton step.

The Newton step starts from the best constant output. Let g and h be the gradient and the curvature of the loss there.
The quadratic approximation of the loss of an output o is ``h (o - t)^2 / 2`` plus a constant, where ``t = -g / h``.
Minimising it is a least-squares problem with targets t and weights h, on training rows and evaluation rows alike.

For the Poisson loss, t is an affine function of the target, up to the longest step of a link, 4. For gamma and Tweedie
losses of power p it is not, because the curvature grows with the target: t is below ``1 / (p - 1)``. For losses
that are not smooth, t is the negative gradient. The leaves of the resulting tree are then fitted to the loss itself.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array

from jtrees.search.minibatch import Result, refitted
from jtrees.search.problem import Fitted, Problem
from jtrees.search.run import Run
from jtrees.segments import mean_one, ones_or, range_of
from jtrees.tasks import Classification, Regression, Task
from jtrees.training import Batch


def _is_direct(task: Task) -> bool:
    """Returns whether searches learn the task directly: a squared error or a classification."""
    return task.is_least_squares or isinstance(task, Classification)


async def newton_steps(problem: Problem) -> Problem:
    """Returns the problem of the Newton steps, or the same problem for a squared error and a classification."""
    # The new problem has no result in the user's units. Its recipe has the option `shrink=False`.
    task = problem.task
    if _is_direct(task):
        return problem
    (y, weight), (evaluation_y, evaluation_weight) = (await problem.map(_newton_steps)).host
    batch, evaluation = problem.batch._replace(y=y, weight=weight), problem.evaluation
    if evaluation is not None:
        evaluation = evaluation._replace(y=evaluation_y, weight=evaluation_weight)
    steps = {"task": Regression(task.shape[0] if task.shape else None), "batch": batch, "evaluation": evaluation}
    return problem.replace(recipe=problem.recipe.replace(shrink=False), data=None, **steps)


async def fitted_to_loss(problem: Problem, fitted: Fitted) -> Fitted:
    """Returns the result of a search for :func:`newton_steps` with leaves and a score of the loss itself."""
    if _is_direct(problem.task):
        return fitted
    tree, score = (await problem.map(refitted, fitted.scaled.replace(leaves=None))).host
    return Result(tree, score, fitted.step, fitted.report).fitted(fitted.history)  # type: ignore[arg-type]


def weighted_steps(task: Task, outputs: Array, y: Array, weight: Array) -> tuple[Array, Array]:
    """Returns the Newton steps of the outputs, and weights of mean 1 that are proportional to the curvatures."""
    step, curvature = task.loss_function.newton(outputs, y)
    return step, mean_one(weight * curvature.reshape(len(step), -1).mean(1))


def _newton_steps(run: Run) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Returns the Newton steps and their weights, of the training rows and of the evaluation rows."""
    # The steps are scaled: the scaled steps of the training rows are in [0, 1].
    task = run.task
    first = task.loss_function.initial(run.batch.y, run.weight, math.prod(task.shape))

    def targets(rows: Batch) -> tuple[Array, Array]:
        outputs = jnp.broadcast_to(first, (len(rows.x), *task.shape))
        return weighted_steps(task, outputs, rows.y, ones_or(rows.weight, rows.x))

    (step, weight), (evaluation_step, evaluation_weight) = targets(run.batch), targets(run.evaluation)
    low, high = range_of(step, run.weight > 0)
    scaled = lambda step: (step - low) / jnp.where(high - low > 0, high - low, 1)
    return (scaled(step), weight), (scaled(evaluation_step), evaluation_weight)
