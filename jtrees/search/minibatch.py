"""Training on mini-batches: the search of recipes that consist of a method, an optimiser and a number of updates."""

from collections.abc import Callable
from functools import partial
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
import optax

from jtrees import losses, training, validation as checks
from jtrees.search.recipe import SearchResult
from jtrees.search.runs import MOST, Run, Runs
from jtrees.tasks import Task
from jtrees.training import Batch, TrainState
from jtrees.training.state import NOT_TAKEN

# Used if ``epochs`` is None: passes over the data, and the least and the largest number of updates. DGT and LatentTree
# were less accurate on tables of some hundred rows if the least number was 2000 (experiments.defaults).
_PASSES, _FEWEST, _MOST = 100, 300, 7500
_USUAL = 128  # samples in a mini-batch; smaller batches may take more updates, for the same number of samples
_EVALUATIONS = 100  # number of evaluations of a training if ``epochs`` is None


class Schedule(NamedTuple):
    """The number and size of the mini-batches of a run.

    Attributes:
      steps: total number of updates.
      steps_per_epoch: updates of one pass over the samples.
      batch_size: samples in a mini-batch.
      every: updates between two evaluations: one pass, or a hundredth of all updates if ``epochs`` is None.
    """

    steps: int
    steps_per_epoch: int
    batch_size: int
    every: int

    @classmethod
    def of(
        cls, n: int, epochs: int | None, batch_size: int, passes: int = _PASSES, fewest: int = _FEWEST
    ) -> "Schedule":
        """Returns the schedule for n samples.

        Args:
          n: number of samples.
          epochs: number of passes over the data. None: ``passes``, with at least ``fewest`` and at most 7500 updates.
            Batches of fewer than 128 samples may take more updates, up to 960,000 samples in total.
          batch_size: samples in a mini-batch, at most n. The last samples of a pass that do not fill a mini-batch are
            skipped until the next shuffle.
          passes: number of passes if ``epochs`` is None.
          fewest: least number of updates if ``epochs`` is None.

        Raises:
          ValueError: if the number of updates exceeds a 32-bit counter.
        """
        batch_size = min(batch_size, n)
        per_epoch = n // batch_size
        if epochs is None:
            most = max(_MOST, _MOST * _USUAL // batch_size)
            steps = min(max(fewest, passes * per_epoch), most)
            return cls(steps, per_epoch, batch_size, -(-steps // _EVALUATIONS))
        checks.check_count("epochs", epochs, most=checks.MAX_NUMBERS // per_epoch)
        return cls(epochs * per_epoch, per_epoch, batch_size, per_epoch)


class Training(NamedTuple):
    """The training of one run, as pure functions and numbers: the result of ``recipe.training(run)``.

    Attributes:
      method: the method to train.
      optimizer: the optimiser.
      schedule: number and size of the mini-batches.
      loss: ``(params, batch, by) -> scalar``, the loss on ``by`` of the model built from ``params`` and ``batch``.
        None: the loss of the model that ``method.harden`` returns.
      model: ``(params, batch) -> model`` of scaled data; None: ``method.harden``.
      report: ``(params, batch) -> values`` for the report that the recipe's ``finish`` makes.
      patience: number of updates without a lower evaluation loss after which the run ends; None: no early stopping.
      vanished: ``opt_state -> (whether all further updates are zero, number of updates before)``. The run ends when
        its updates are zero. None: updates do not become zero.
    """

    method: training.Method
    optimizer: optax.GradientTransformation
    schedule: Schedule
    loss: Callable[[Any, Batch, Batch], Array] | None = None
    model: Callable[[Any, Batch], Any] | None = None
    report: Callable[[Any, Batch], Any] = lambda params, batch: None
    patience: int | None = None
    vanished: Callable[[Any], tuple[Array, Array]] | None = None

    def loss_on(self, run: Run, params: Any) -> Array:
        """Returns the loss of the parameters on the evaluation rows of a run."""
        if self.loss is not None:
            return self.loss(params, run.batch, run.by)
        return prediction_loss(run.task, self.method.harden(params, run.batch), run.by)

    def length(self, state: TrainState) -> Array:
        """Returns the number of updates of the run, which early stopping reduces."""
        count = jnp.int32(self.schedule.steps)
        if self.patience is not None:
            over = training.state.is_over(state, self.patience)
            count = jnp.where(over, state.best.step + self.patience + 1, count)
        if self.vanished is not None:
            has_vanished, updates = self.vanished(state.opt_state)
            count = jnp.where(has_vanished, jnp.minimum(count, updates), count)
        return count


def evaluated(task: Task, outputs: Array, by: Batch) -> Array:
    """Returns the mean loss of a model's outputs on a scaled batch."""
    return losses.mean_loss(task.loss(outputs, by.y), by.weight)


def prediction_loss(task: Task, model: Any, by: Batch) -> Array:
    """Returns the mean prediction loss of a model on a scaled batch, such as the mean squared error or log loss."""
    return losses.mean_loss(task.prediction_loss(model.apply(by.x), by.y), by.weight)


# --- Compiled functions of one run -----------------------------------------------------------------------------------


def initial(run: Run) -> TrainState:
    """Returns the initial state of a run."""
    of = run.recipe.training(run)
    return training.start(of.method, run.batch, key=run.key, optimizer=of.optimizer)


def advanced(
    run: Run, state: TrainState, before: Array, count: Array, evaluates: Array
) -> tuple[TrainState, Array, Array]:
    """Returns the state after ``count`` updates, the losses of the updates, and whether the run has ended.

    A run that evaluates during training is evaluated after each epoch, or 100 times in total if no epochs are given.
    """
    of = run.recipe.training(run)
    every = jnp.where(evaluates, of.schedule.every, 0) if run.evaluates else 0
    score = partial(of.loss_on, run) if run.evaluates else None
    options: Any = {"batch_size": of.schedule.batch_size, "patience": of.patience}
    once = training.step.one_step(of.method, run.batch, of.optimizer, score_every=every, score=score, **options)
    state, history = training.loop.advance_up_to(once, state, count, MOST, step=before)
    length = of.length(state)
    # Updates after the end of a run count as not made, so the history does not depend on the length of a call.
    lost = jnp.where(before + jnp.arange(MOST) < length, history.losses, NOT_TAKEN)
    return state, lost, length <= state.step


def result_of(run: Run, state: TrainState) -> SearchResult:
    """Returns the result of a run.

    The result has the parameters with the lowest loss of all evaluations, or the last parameters if there was no
    evaluation.
    """
    of = run.recipe.training(run)
    if of.patience is not None:
        over, last = training.state.is_over(state, of.patience), state.params
        state = state.replace(params=jax.tree.map(partial(jnp.where, over), state.best.params, last))
    best = training.best(of.method, state, run.batch, score=partial(of.loss_on, run))
    model = (of.method.harden if of.model is None else of.model)(best.params, run.batch)
    report, step = of.report(best.params, run.batch), jnp.minimum(best.step, of.length(state))
    return SearchResult(run.on_x(model), best.score, jnp.isfinite(best.score), step, report)


# --- The procedure ---------------------------------------------------------------------------------------------------


def trained(runs: Runs, part: float = 1.0, steps: list[int] | None = None) -> list[SearchResult]:
    """Trains each run once on mini-batches and returns the results.

    Args:
      runs: the runs; their recipes have a method ``training(run)``.
      part: fraction of the updates of the schedule to make.
      steps: number of updates of each run; None: ``part`` of the schedule.
    """
    recipe, (n, _) = runs.recipes[0], runs.shape
    if steps is None:
        steps = [math.ceil(part * Schedule.of(n, recipe.epochs, recipe.batch_size).steps)] * len(runs)
    found = runs.train(advanced, runs.map(initial), steps, name=type(recipe).__name__)
    results = runs.fetch(runs.map(result_of, found.states))
    return [result._replace(history=lost) for result, lost in zip(results, found.losses, strict=True)]
