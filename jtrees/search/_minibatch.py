"""A search that is one training run on mini-batches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array
import optax

from jtrees import losses, training, validation as checks
from jtrees.data import Data
from jtrees.search.recipe import Finished, Rounds, Search, SearchResult, check_finite, finished_tree, loss_of
from jtrees.tasks import Task
from jtrees.training import Batch

_UPDATES, _PASSES = 2000, 12  # at least, unless epochs are given


class Schedule(NamedTuple):
    """How a run goes through its samples.

    Attributes:
      steps: updates in all, whole epochs.
      steps_per_epoch: updates in a pass over the samples.
      batch_size: samples in a mini-batch.
    """

    steps: int
    steps_per_epoch: int
    batch_size: int

    @classmethod
    def of(cls, n: int, epochs: int | None, batch_size: int) -> "Schedule":
        """The schedule for n samples.

        Args:
          n: number of samples.
          epochs: passes over the data; None: as many as make 2000 updates, and at least 12.
          batch_size: samples in a mini-batch; n if that is less. Those left over in a pass rest until the next.

        Raises:
          ValueError: for more updates than a counter of 32 bits holds.
        """
        batch_size = min(batch_size, n)
        per_epoch = n // batch_size
        if epochs is None:
            epochs = max(_PASSES, -(-_UPDATES // per_epoch))
        checks.check_count("epochs", epochs, most=checks.MAX_NUMBERS // per_epoch)
        return cls(epochs * per_epoch, per_epoch, batch_size)


def evaluated(task: Task, outputs: Array, by: Batch) -> Array:
    """The mean loss of a model's outputs on a scaled batch."""
    return losses.weighted_mean(task.loss(outputs, by.y), training.normalised(by).weight)


def minibatch(
    task: Task,
    method: training.Method,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    *,
    elements_per_sample: int,
    outputs: Callable[[Any, Batch, Array], Array] | None = None,
    model: Callable[[Any, Batch], Any] | None = None,
    extra: Callable[[Any, Batch], Any] = lambda params, batch: None,
    score: Callable[[Any, Batch], Array] | None = None,
    finish: Callable[..., Finished] | None = None,
    **more: Any,
) -> Search:
    """A run on mini-batches; with a validation set the parameters with the lowest loss there, evaluated once an epoch.

    Args:
      task: what is predicted.
      method: what is trained.
      optimizer: what by.
      schedule: for how long.
      elements_per_sample: about how many numbers a step works on, for each sample.
      outputs: ``(params, batch, x) -> outputs`` on x of the model that the parameters become after training on batch.
      model: ``(params, batch) -> model`` of scaled data; by default ``method.harden``.
      extra: ``(params, batch) ->`` what else ``finish`` needs.
      score: ``(params, batch) -> scalar`` in place of the task's loss of the outputs.
      finish: as for :class:`Search`; by default for a model that is a tree.
      **more: other fields of the :class:`Search`.
    """

    def evaluate(params: Any, batch: Batch, by: Batch) -> Array:
        if score is not None:
            return score(params, training.normalised(by))
        assert outputs is not None
        return evaluated(task, outputs(params, batch, by.x), by)

    def init(start: Any, batch: Batch, *, key: Array) -> training.TrainState:
        return training.start(method, batch, key=key, optimizer=optimizer)

    def one_round(
        i: Array, state: training.TrainState, batch: Batch, validation: Batch | None, rounds: Rounds
    ) -> tuple[training.TrainState, Array]:
        once = training.one_step(
            method,
            batch,
            optimizer,
            batch_size=schedule.batch_size,
            score_every=0 if validation is None else schedule.steps_per_epoch,
            score=None if validation is None else lambda params: evaluate(params, batch, validation),
        )
        count, step = rounds.steps_in(i), rounds.steps_before(i)
        state, history = training.advance_up_to(once, state, count, rounds.size, step=step)
        return state, history.losses

    def result(state: training.TrainState, batch: Batch, validation: Batch | None) -> SearchResult:
        by = batch if validation is None else validation
        best = training.best(method, state, batch, score=lambda params: evaluate(params, batch, by))
        found = (method.harden if model is None else model)(best.params, batch)
        return SearchResult(found, best.score, jnp.isfinite(best.score), best.step, extra(best.params, batch))

    def finish_tree(result: SearchResult, start: Any, data: Data, **_: Any) -> Finished:
        return finished_tree(result, data, task)

    rounds = Rounds(schedule.steps, schedule.batch_size * elements_per_sample)
    return Search(task, rounds, init, one_round, result, finish or finish_tree, **more)


def finish_soft_model(result: SearchResult, data: Data, task: Task) -> Finished:
    """A model that is no tree, in the user's units."""
    check_finite(result)
    model = data.scaling.restore(result.model)
    return Finished(model, None, loss_of(result, model, data, task), {})
