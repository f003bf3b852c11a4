"""A search that is one training run on mini-batches."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
import optax

from jtrees import losses, training, validation as checks
from jtrees.data import Data
from jtrees.search.recipe import Finished, Round, Rounds, Search, SearchResult, finished_tree
from jtrees.tasks import Task
from jtrees.training import Batch

_UPDATES, _PASSES = 2000, 12  # at least, unless epochs are given


class Schedule(NamedTuple):
    """The number and size of the mini-batches of a run.

    Attributes:
      steps: total number of updates, in whole epochs.
      steps_per_epoch: updates of one pass over the samples.
      batch_size: samples in a mini-batch.
    """

    steps: int
    steps_per_epoch: int
    batch_size: int

    @classmethod
    def of(cls, n: int, epochs: int | None, batch_size: int, updates: int | None = None) -> "Schedule":
        """The schedule for n samples.

        Args:
          n: number of samples.
          epochs: passes over the data; None: enough for ``updates``, and at least 12.
          batch_size: samples in a mini-batch, at most n. The remainder of a pass is left out until the next shuffle.
          updates: see ``epochs``; None: 2000.

        Raises:
          ValueError: for more updates than a counter of 32 bits holds.
        """
        batch_size = min(batch_size, n)
        per_epoch = n // batch_size
        if epochs is None:
            epochs = max(_PASSES, -(-(updates or _UPDATES) // per_epoch))
        checks.check_count("epochs", epochs, most=checks.MAX_NUMBERS // per_epoch)
        return cls(epochs * per_epoch, per_epoch, batch_size)


def evaluated(task: Task, outputs: Array, by: Batch) -> Array:
    """Returns the mean loss of a model's outputs on a scaled batch."""
    return losses.weighted_mean(task.loss(outputs, by.y), training.normalised(by).weight)


def prediction_loss(task: Task, model: Any, by: Batch) -> Array:
    """Returns the mean squared error or log loss of a model's predictions on a scaled batch."""
    return losses.weighted_mean(task.prediction_loss(model.apply(by.x), by.y), training.normalised(by).weight)


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
    patience: int | None = None,
    vanished: Callable[[Any], tuple[Array, Array]] | None = None,
    **more: Any,
) -> Search:
    """Returns the search of one mini-batch run; a validation set, evaluated once an epoch, chooses the parameters.

    Args:
      task: what is predicted.
      method: the method to train.
      optimizer: its optimizer.
      schedule: number and size of the mini-batches.
      elements_per_sample: approximate size of a step's arrays, per sample.
      outputs: ``(params, batch, x) -> outputs`` at x of the model that ``model`` makes of the parameters and the batch;
        by default evaluations use the predictions of ``method.harden``.
      model: ``(params, batch) -> model`` of scaled data; by default ``method.harden``.
      extra: ``(params, batch) ->`` further values for ``finish``.
      score: ``(params, batch) -> scalar`` in place of the task's loss of the outputs.
      finish: as for :class:`Search`; the default expects the model to be a tree.
      patience: number of updates without a lower loss on the validation set after which the run ends; None: it does not
        end early by it.
      vanished: ``opt_state -> (whether updates have become zero for good, number of updates before)``, where the run
        ends; None: they do not.
      **more: other fields of the :class:`Search`.
    """

    def evaluate(params: Any, batch: Batch, by: Batch) -> Array:
        if score is not None:
            return score(params, training.normalised(by))
        if outputs is not None:
            return evaluated(task, outputs(params, batch, by.x), by)
        return prediction_loss(task, method.harden(params, batch), by)

    endless = patience is None and vanished is None

    def length(state: training.TrainState) -> Array:
        """Returns the number of updates of the run: all, unless it has ended early."""
        count = jnp.int32(schedule.steps)
        if patience is not None:
            over = training.is_over(state, patience)
            count = jnp.where(over, state.best.step + patience + 1, count)
        if vanished is not None:
            has_vanished, updates = vanished(state.opt_state)
            count = jnp.where(has_vanished, jnp.minimum(count, updates), count)
        return count

    def init(start: Any, batch: Batch, *, key: Array) -> training.TrainState:
        return training.start(method, batch, key=key, optimizer=optimizer)

    def one_round(
        at: Round, state: training.TrainState, batch: Batch, validation: Batch | None
    ) -> tuple[training.TrainState, Array]:
        once = training.one_step(
            method,
            batch,
            optimizer,
            batch_size=schedule.batch_size,
            score_every=0 if validation is None else schedule.steps_per_epoch,
            score=None if validation is None else lambda params: evaluate(params, batch, validation),
            patience=patience,
        )
        state, history = training.advance_up_to(once, state, at.count, at.most, step=at.before)
        # The rest of the round in which the run ended is as if it were not taken, however long rounds are.
        taken = at.before + jnp.arange(at.most) < length(state)
        return state, history.losses if endless else jnp.where(taken, history.losses, training.NOT_TAKEN)

    def following(i: Array, state: training.TrainState, rounds: Rounds) -> Array:
        return i if endless else jnp.where(length(state) <= state.step, rounds.count, i)

    def result(state: training.TrainState, batch: Batch, validation: Batch | None) -> SearchResult:
        by = batch if validation is None else validation
        if patience is not None:
            over, last = training.is_over(state, patience), state.params
            state = state.replace(params=jax.tree.map(partial(jnp.where, over), state.best.params, last))
        best = training.best(method, state, batch, score=lambda params: evaluate(params, batch, by))
        trained_model = (method.harden if model is None else model)(best.params, batch)
        step = jnp.minimum(best.step, length(state))
        return SearchResult(trained_model, best.score, jnp.isfinite(best.score), step, extra(best.params, batch))

    def finish_tree(result: SearchResult, start: Any, data: Data, **_: Any) -> Finished:
        return finished_tree(result, data, task)

    rounds = Rounds((schedule.steps,), schedule.batch_size * elements_per_sample)
    return Search(task, rounds, init, one_round, result, finish or finish_tree, next=following, **more)
