"""Trees of any loss by recipes that know squared errors: they fit the first Newton step from the best constant.

With gradient g and curvature h of the loss at the best constant output, the quadratic approximation of the loss of an
output o is ``h (o - t)^2 / 2`` up to a constant, with ``t = -g / h``: least squares with targets t and weights h. For
Poisson, gamma and Tweedie losses t are the targets themselves up to their scale; for losses without a curvature they
are the signs of the residuals. The leaves of the tree found are then fitted to the loss itself.
"""

from collections.abc import Callable
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jtrees import leaves as kinds
from jtrees.search._minibatch import prediction_loss
from jtrees.search.monitor import Monitor
from jtrees.search.recipe import Round, Search, SearchResult
from jtrees.tasks import Classification, Regression, Task, check_log_loss
from jtrees.training import Batch


def by_first_step(search_of: Callable[[Task], Search], task: Task) -> Search:
    """Returns ``search_of(task)`` for squared error and classes, else a search of trees as above.

    Args:
      search_of: ``task -> Search``, of trees with constant leaves.
      task: what is predicted.

    Raises:
      ValueError: for a user-defined loss of classes.
    """
    check_log_loss(task)
    if task.is_least_squares or isinstance(task, Classification):
        return search_of(task)
    loss, kind = task.loss_function, kinds.kind_of("constant", task)
    base = search_of(Regression(task.shape[0] if task.shape else None))

    def stepped(batch: Batch, validation: Batch | None = None) -> tuple[Batch, Batch | None]:
        """Returns the batches with Newton steps for targets, scaled to [0, 1]."""
        weight = jnp.ones(len(batch.x), batch.x.dtype) if batch.weight is None else batch.weight
        initial = loss.initial(batch.y, weight, math.prod(task.shape))

        def targets(batch: Batch) -> tuple[Array, Array]:
            step, curvature = loss.newton(jnp.broadcast_to(initial, (len(batch.x), *task.shape)), batch.y)
            return step, curvature.reshape(len(batch.x), -1).mean(1)

        (step, curvature), shape = targets(batch), (-1, *[1] * len(task.shape))
        inside = (weight > 0).reshape(shape)
        low = jnp.where(inside, step, jnp.inf).min(0)
        unit = jnp.where(inside, step, -jnp.inf).max(0) - low
        scaled = lambda step: (step - low) / jnp.where(unit > 0, unit, 1)
        mapped = batch._replace(y=scaled(step), weight=weight * curvature)
        return mapped, None if validation is None else validation._replace(y=scaled(targets(validation)[0]))

    def init(start: Any, batch: Batch, *, key: Array) -> Any:
        return base.init(start, stepped(batch)[0], key=key)

    def one_round(at: Round, state: Any, batch: Batch, validation: Batch | None) -> tuple[Any, Array]:
        return base.round(at, state, *stepped(batch, validation))

    def result(state: Any, batch: Batch, validation: Batch | None) -> SearchResult:
        found = base.result(state, *stepped(batch, validation))
        empty = kind.empty(len(found.model.bias) + 1, batch.x.shape[1], task.shape, batch.x.dtype)
        tree = found.model.replace(leaves=empty).refit(*batch)
        score = prediction_loss(task, tree, batch if validation is None else validation)
        return found._replace(model=tree, score=score, finite=found.finite & jnp.isfinite(score))

    def prepare(batch: Batch, *, key: Array, monitor: Monitor | None = None) -> Any:
        mapped = jax.device_get(stepped(jax.tree.map(jnp.asarray, batch))[0])
        return base.prepare(mapped, key=key, monitor=monitor)

    return base._replace(task=task, init=init, round=one_round, result=result, prepare=prepare)
