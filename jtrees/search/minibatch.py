"""Training on mini-batches: the search of recipes that consist of a method, an optimiser and a number of updates."""

from collections.abc import Callable
from functools import partial
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np
import optax

from jtrees import blocking, distributed, losses, training, validation as checks
from jtrees.search.engine import MOST
from jtrees.search.fitted import Fitted
from jtrees.search.problem import Problem
from jtrees.search.run import Evaluation, Run
from jtrees.segments import ones_or
from jtrees.tasks import Task
from jtrees.training import Batch, TrainState

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

    @property
    def evaluations(self) -> int:
        """Number of evaluations of a run that evaluates: the last is after the last update."""
        return -(-self.steps // self.every)

    def is_due(self, made: Array) -> Array:
        """Returns whether a run that evaluates is evaluated after this number of updates, which is not 0."""
        return (made > 0) & ((made % self.every == 0) | (made == self.steps))

    def patience(self, part: float = 0.25) -> int:
        """Returns the patience of early stopping, which is at least 1: a part of all evaluations."""
        return max(1, int(part * self.evaluations))

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
            limit = max(_MOST, _MOST * _USUAL // batch_size)
            steps = min(max(fewest, passes * per_epoch), limit)
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
      report: ``(params, batch) -> values``, from which the recipe makes its report.
      patience: number of evaluations in a row without a lower loss after which the run ends; None: no early stopping.
      vanished: ``opt_state -> whether all further updates are zero``, which ends the run.
    """

    method: training.Method
    optimizer: optax.GradientTransformation
    schedule: Schedule
    loss: Callable[[Any, Batch, Batch], Array] | None = None
    model: Callable[[Any, Batch], Any] | None = None
    report: Callable[[Any, Batch], Any] = lambda params, batch: None
    patience: int | None = None
    vanished: Callable[[Any], Array] = lambda opt_state: jnp.zeros((), bool)

    def loss_on(self, run: Run, params: Any) -> Array:
        """Returns the loss of the parameters on the evaluation rows of a run."""
        if self.loss is not None:
            return self.loss(params, run.batch, run.evaluation)
        return prediction_loss(run.task, self.method.harden(params, run.batch), run.evaluation)

    def has_stopped(self, state: TrainState) -> Array:
        """Returns whether early stopping has ended the run. Its result is then the best state so far."""
        return jnp.zeros((), bool) if self.patience is None else state.waited >= self.patience

    def has_ended(self, state: TrainState) -> Array:
        """Returns whether the run has ended before the last update of its schedule."""
        return self.has_stopped(state) | self.vanished(state.opt_state)


def evaluated(task: Task, outputs: Array, by: Batch) -> Array:
    """Returns the mean loss of a model's outputs on a scaled batch."""
    return losses.mean_loss(task.loss(outputs, by.y), by.weight)


def output_loss(task: Task, outputs: Callable[[Any, Array], Array], model: Any, by: Batch) -> Array:
    """Returns the mean loss of ``outputs(model, x)`` on a scaled batch, in blocks of rows."""
    return _mean_over_blocks(task, lambda x, y: task.loss(outputs(model, x), y), model, by)


def prediction_loss(task: Task, model: Any, by: Batch) -> Array:
    """Returns the mean prediction loss of a model on a scaled batch, such as the mean squared error or log loss."""
    return _mean_over_blocks(task, lambda x, y: task.prediction_loss(model.apply(x), y), model, by)


def _mean_over_blocks(task: Task, row_losses: Callable[[Array, Array], Array], model: Any, by: Batch) -> Array:
    """Returns the mean of ``row_losses(x, y)``, in blocks of rows that the outputs of all trees of the model need."""
    # About the number of splits and leaves: a split has p numbers. A row has at least its features and its outputs.
    numbers = sum(np.size(leaf) for leaf in jax.tree.leaves(model)) // by.x.shape[1]
    block = blocking.evaluation_block(max(numbers, by.x.shape[1], math.prod(task.shape)), len(by.x))
    weight, in_block = ones_or(by.weight, by.x), lambda _, x, y: ((), row_losses(x, y))
    return losses.mean_loss(blocking.sum_over_blocks(in_block, weight, by.x, by.y, block=block)[1], by.weight)


# --- Compiled functions of one run -----------------------------------------------------------------------------------


def initial(run: Run) -> TrainState:
    """Returns the initial state of a run."""
    training_run = run.recipe.training(run)
    return training.start(training_run.method, run.batch, key=run.key, optimizer=training_run.optimizer)


def advanced(run: Run, state: TrainState, before: Array, count: Array) -> tuple[TrainState, Array, Array]:
    """Returns the state after ``count`` updates, the losses of the updates, and whether the run has ended.

    A run that evaluates during training is evaluated after each epoch, or 100 times in total if no epochs are given.
    The initial parameters are not evaluated, because they are random.
    """
    training_run = run.recipe.training(run)
    method, optimizer, schedule = training_run.method, training_run.optimizer, training_run.schedule
    update = training.step.one_step(method, run.batch, optimizer, batch_size=schedule.batch_size)
    evaluates, score = run.kind >= Evaluation.EARLY_STOPPING, None
    if evaluates is not False:
        score = partial(training_run.loss_on, run.replace(evaluation=run.rows_during_training))
    is_due = lambda made: evaluates & schedule.is_due(made)
    update = training.step.with_early_stopping(update, score, is_due, training_run.has_ended)
    state, history = training.loop.advance_up_to(update, state, count, MOST, step=before)
    return state, history.losses, training_run.has_ended(state)


class Result(NamedTuple):
    """The result of a training on scaled data.

    Attributes:
      model: the model.
      score: the loss of the model on the evaluation rows.
      step: number of updates before the model.
      report: values for the report.
      finite: whether all losses of the training were finite.
    """

    model: Any
    score: Array
    step: Array
    report: Any
    finite: Any = True

    def fitted(self, losses: np.ndarray) -> Fitted:
        """Returns the result on the host, with the losses of all updates as its history.

        It warns if the training became non-finite after the evaluation that gave the model.

        Raises:
          FloatingPointError: if the score is not finite.
        """
        if not np.isfinite(self.score):
            raise FloatingPointError("training became non-finite: try a smaller learning_rate")
        if not self.finite:
            what = f"the parameters after update {int(self.step)} are kept"
            distributed.warn(f"training became non-finite, so {what}: try a smaller learning_rate")
        return Fitted(self.model, float(self.score), int(self.step), losses, report=self.report)


def result_of(run: Run, state: TrainState) -> Result:
    """Returns the result of a run.

    The result has the parameters with the lowest loss of all evaluations, or the last parameters if there was no
    evaluation. The last parameters are evaluated here if they were not before, unless early stopping ended the run.
    """
    training_run = run.recipe.training(run)
    method, dtype = training_run.method, state.best.score.dtype
    last_loss = lambda params: training_run.loss_on(run, params).astype(dtype)
    evaluates = run.kind >= Evaluation.EARLY_STOPPING
    is_known = training_run.has_stopped(state) | (evaluates & training_run.schedule.is_due(state.step))
    score = lambda params: jax.lax.cond(is_known, lambda: jnp.full((), jnp.inf, dtype), lambda: last_loss(params))
    best = training.best(method, state, run.batch, score=score)
    model = (method.harden if training_run.model is None else training_run.model)(best.params, run.batch)
    report = training_run.report(best.params, run.batch)
    return Result(run.on_x(model), best.score, best.step, report, state.finite)


def trained_in_program(run: Run) -> Result:
    """Returns what :func:`trained` trains, within one program."""
    return result_of(run, in_parts(advanced, run, initial(run), run.recipe.training(run).schedule.steps))


def in_parts(advance: Callable[..., Any], run: Run, state: Any, steps: int, begins: Array | int = 0) -> Any:
    """Returns the state after ``steps`` updates, which :meth:`jtrees.search.Problem.train` makes, in a program."""

    def advance_part(part: Array, state: Any) -> Any:
        before = MOST * part
        return advance(run, state, begins + before, jnp.minimum(MOST, steps - before))[0]

    return jax.lax.fori_loop(0, -(-steps // MOST), advance_part, state)


# --- The procedure ---------------------------------------------------------------------------------------------------


async def trained(problem: Problem, part: float = 1.0, steps: int | None = None) -> Fitted:
    """Trains on mini-batches and returns the result on scaled data, with the values of ``Training.report``.

    Args:
      problem: the problem; its recipe has a method ``training(run)``.
      part: fraction of the updates of the schedule to make.
      steps: number of updates; None: ``part`` of the schedule.

    Raises:
      FloatingPointError: if the training became non-finite.
    """
    recipe = problem.recipe
    if steps is None:
        schedule = Schedule.of(problem.shape[0], recipe.epochs, recipe.batch_size, passes=recipe.passes)
        steps = math.ceil(part * schedule.steps)
    state = await problem.map(initial)
    state, losses = await problem.train(advanced, state, steps, name=type(recipe).__name__)
    return (await problem.map(result_of, state)).host.fitted(losses)
