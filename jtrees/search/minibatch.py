"""Training on mini-batches: the search of recipes that consist of a method, an optimiser and a number of updates."""

from collections.abc import Callable
from functools import partial
import math
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np
import optax

from jtrees import blocking, distributed, losses, ops, pytree, training, validation as checks
from jtrees.search.options import option
from jtrees.search.precondition import preconditioned
from jtrees.search.problem import Fitted, Problem
from jtrees.search.recipe import Recipe, fitted_network, fitted_tree
from jtrees.search.report import Preconditioning, TrainingReport
from jtrees.search.run import Run
from jtrees.segments import ones_or
from jtrees.soft_model import SoftModel
from jtrees.tasks import Task
from jtrees.training import Batch, TrainState
from jtrees.tree import ObliqueTree, with_empty_leaves

# Used if ``epochs`` is None: passes over the data, and the least and the largest number of updates. DGT and LatentTree
# were less accurate on tables of some hundred rows if the least number was 2000.
_PASSES, _FEWEST, _MOST = 100, 300, 7500
_USUAL = 128  # samples in a mini-batch; smaller batches may take more updates, for the same number of samples
_TRIAL = 1 / 6  # part of the updates that a trial of a preconditioner has
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

    def is_due(self, updates: Array) -> Array:
        """Returns whether a run that evaluates is evaluated after this number of updates, which is not 0."""
        return (updates > 0) & ((updates % self.every == 0) | (updates == self.steps))

    def patience(self, part: float) -> int:
        """Returns the patience of early stopping, which is at least 1: a part of all evaluations."""
        return max(1, int(part * self.evaluations))

    @classmethod
    def for_rows(
        cls, n: int, epochs: int | None, batch_size: int, passes: int = _PASSES, fewest: int = _FEWEST
    ) -> "Schedule":
        """Returns the schedule for n samples: see ``epochs`` and ``batch_size`` of :class:`MiniBatchRecipe`.

        If ``epochs`` is None, there are about ``passes`` passes over the data, and at least ``fewest`` updates. Raises
        ``ValueError`` if the number of updates exceeds a 32-bit counter.
        """
        batch_size = min(batch_size, n)
        per_epoch = n // batch_size
        if epochs is None:
            limit = max(_MOST, _MOST * _USUAL // batch_size)
            steps = min(max(fewest, passes * per_epoch), limit)
            return cls(steps, per_epoch, batch_size, -(-steps // _EVALUATIONS))
        checks.check_count("epochs", epochs, most=checks.MAX_NUMBERS // per_epoch)
        return cls(epochs * per_epoch, per_epoch, batch_size, per_epoch)


@pytree.dataclass(kw_only=True)
class MiniBatchRecipe(Recipe):
    """A recipe that is a method, an optimiser and a schedule of mini-batches.

    A subclass defines :meth:`method` and :meth:`optimizer`. Compiled functions call them, :meth:`model`,
    :meth:`evaluate` and :meth:`has_vanished` with the run; the host calls the other methods. The search trains on
    mini-batches. The model has the parameters after the last update. If ``validation`` is given, it has the parameters
    with the lowest validation loss.

    Attributes:
      epochs: number of passes over the data. None: ``passes``, with at least 300 and at most 7500 updates. Batches of
        fewer than 128 samples may take more updates, up to 960,000 samples in total.
      batch_size: samples in a mini-batch, at most n. The last samples of a pass that do not fill a mini-batch are
        skipped until the next shuffle.
      learning_rate: initial learning rate.
      early_stopping: whether a run ends if a part of all evaluations, ``patience_part``, does not lower the loss. A run
        is evaluated on the validation set, or on held-out rows if the recipe ``chooses_updates``. A subclass may
        declare this option.
      precondition: strength of the preconditioner. A subclass may declare this option.
      refit: whether the leaves are fitted to the rows at the end, as in :func:`jtrees.search.fitted_tree`. A subclass
        may declare this option.
      passes: number of passes if ``epochs`` is None.
      chooses_updates: whether early stopping chooses the number of updates if there is no validation set. A trial on
        four fifths of the rows is then evaluated on the other rows, and the last training takes the updates of the
        lowest loss. Trials of preconditioners have all updates, else a sixth of them.
    """

    epochs: int | None = option(None)
    batch_size: int = option(128)
    learning_rate: float = option(0.01, above=0)

    early_stopping = False
    precondition = 0.0
    patience_part = 0.25
    refit = None
    passes = _PASSES
    chooses_updates = False

    def method(self, run: Run) -> training.Method:
        """Returns the method to train."""
        raise NotImplementedError

    def optimizer(self, run: Run) -> optax.GradientTransformation:
        """Returns the optimiser."""
        raise NotImplementedError

    def model(self, run: Run, params: Any) -> Any:
        """Returns the model of scaled data."""
        return self.method(run).harden(params, run.batch)

    def evaluate(self, run: Run, params: Any) -> Array:
        """Returns the loss of the parameters on the evaluation rows of a run."""
        return prediction_loss(run.task, self.method(run).harden(params, run.batch), run.evaluation)

    def has_vanished(self, opt_state: Any) -> Array:
        """Returns whether all further updates are zero, which ends a run."""
        return jnp.zeros((), bool)

    @property
    def strength(self) -> float | str:
        """Strength of the preconditioner of the search, or ``"auto"``."""
        return self.precondition

    def schedule(self, n: int) -> Schedule:
        """Returns the number and size of the mini-batches of n samples."""
        return Schedule.for_rows(n, self.epochs, self.batch_size, passes=self.passes)

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        self.schedule(shape[0])

    def grow(self, run: Run, *_: Any) -> tuple[Any, Array]:
        """Returns the splits after the last update, and whether they are finite, within one program."""
        result = result_of(run, in_parts(advanced, run, initial(run), self.schedule(len(run.batch.x)).steps))
        return result.model.replace(leaves=None), jnp.isfinite(result.score)

    async def search(self, problem: Problem) -> Fitted:
        """Trains with the best strength of the preconditioner and, if it is chosen, the best number of updates."""
        chooses = self.chooses_updates and self.early_stopping
        last = lambda problem, trial: trained(problem, steps=trial.step if chooses and trial is not None else None)
        short = None if self.chooses_updates else lambda problem, _: trained(problem, _TRIAL)
        result = await preconditioned(problem, self.strength, last, trial=short, always_tries=chooses)
        return result.finished(problem, problem, self.finish)

    def finish(self, problem: Problem, fitted: Fitted, preconditioning: Preconditioning | None = None) -> Fitted:
        """Returns the result of a training in the user's units; ``preconditioning`` is for the report."""
        return fitted_tree(problem, fitted, refit=self.refit, report=TrainingReport(preconditioning=preconditioning))


class NetworkRecipe(MiniBatchRecipe):
    """A recipe of mini-batches that ends in a network: a pytree of parameters with ``outputs(x)``.

    The optimiser is Adam with a constant learning rate, unless a subclass overrides ``optimizer``.

    Attributes:
      model_type: the class of the model that holds the trained network, :class:`jtrees.SoftModel` or a subclass.
      hard: whether the model is the hardened network, which is then evaluated, too. A subclass may declare this option.
    """

    model_type: ClassVar[Any] = SoftModel
    hard = False

    def tree_leaves(self, task: Task) -> str | None:
        return None

    def is_bounded(self, task: Task) -> bool:
        """Returns whether predictions are clipped to values near the training targets."""
        return False

    def optimizer(self, run: Run) -> optax.GradientTransformation:
        return optax.adam(self.learning_rate)

    def model(self, run: Run, params: Any) -> Any:
        return params

    def evaluate(self, run: Run, params: Any) -> Array:
        if self.hard:
            return super().evaluate(run, params)
        return output_loss(run.task, lambda network, x: network.outputs(x), params, run.evaluation)

    def finish(self, problem: Problem, fitted: Fitted, preconditioning: Preconditioning | None = None) -> Fitted:
        report = TrainingReport(preconditioning=preconditioning)
        return fitted_network(problem, fitted, self.model_type, report, self.is_bounded(problem.task))


def output_loss(task: Task, outputs: Callable[[Any, Array], Array], model: Any, rows: Batch) -> Array:
    """Returns the mean loss of ``outputs(model, x)`` on a scaled batch, in blocks of rows."""
    return _mean_over_blocks(task, lambda x, y: task.loss(outputs(model, x), y), model, rows)


def prediction_loss(task: Task, model: Any, rows: Batch) -> Array:
    """Returns the mean prediction loss of a model on a scaled batch, such as the mean squared error or log loss."""
    return _mean_over_blocks(task, lambda x, y: task.prediction_loss(model.apply(x), y), model, rows)


def refitted(run: Run, splits: ObliqueTree) -> tuple[ObliqueTree, Array]:
    """Returns the tree of splits with constant leaves of the training rows, and its loss on the evaluation rows."""
    tree = with_empty_leaves(splits, "constant", run.task)
    leaf = ops.hard(tree.weights, tree.bias, run.batch.x)
    tree = run.ordered(tree.replace(leaves=tree.leaves.refit(leaf, *run.batch)), leaf)
    return tree, prediction_loss(run.task, tree, run.evaluation)


def _mean_over_blocks(task: Task, row_losses: Callable[[Array, Array], Array], model: Any, rows: Batch) -> Array:
    """Returns the mean of ``row_losses(x, y)``, in blocks of rows that the outputs of all trees of the model need."""
    # About the number of splits and leaves: a split has p numbers. A row has at least its features and its outputs.
    numbers = sum(np.size(leaf) for leaf in jax.tree.leaves(model)) // rows.x.shape[1]
    block = blocking.evaluation_block(max(numbers, rows.x.shape[1], math.prod(task.shape)), len(rows.x))
    weight, in_block = ones_or(rows.weight, rows.x), lambda _, x, y: ((), row_losses(x, y))
    return losses.mean_loss(blocking.sum_over_blocks(in_block, weight, rows.x, rows.y, block=block)[1], rows.weight)


# --- Compiled functions of one run -----------------------------------------------------------------------------------


def initial(run: Run) -> TrainState:
    """Returns the initial state of a run."""
    recipe = run.recipe
    return training.start(recipe.method(run), run.batch, key=run.key, optimizer=recipe.optimizer(run))


def has_stopped(run: Run, state: TrainState) -> Array:
    """Returns whether early stopping has ended the run. Its result is then the best state so far."""
    recipe = run.recipe
    if not recipe.early_stopping:
        return jnp.zeros((), bool)
    return state.waited >= recipe.schedule(len(run.batch.x)).patience(recipe.patience_part)


def has_ended(run: Run, state: TrainState) -> Array:
    """Returns whether the run has ended before the last update of its schedule."""
    return has_stopped(run, state) | run.recipe.has_vanished(state.opt_state)


def advanced(run: Run, state: TrainState, before: Array, count: Array) -> tuple[TrainState, Array, Array]:
    """Returns the state after ``count`` updates, the losses of the updates, and whether the run has ended."""
    # The initial parameters are not evaluated, because they are random.
    recipe, schedule = run.recipe, run.recipe.schedule(len(run.batch.x))
    method, optimizer = recipe.method(run), recipe.optimizer(run)
    update = training.step.one_step(method, run.batch, optimizer, batch_size=schedule.batch_size)
    evaluates, score = run.evaluates, None
    if evaluates is not False:
        score = partial(recipe.evaluate, run.replace(evaluation=run.rows_during_training))
    is_due = lambda updates: evaluates & schedule.is_due(updates)
    update = training.step.with_early_stopping(update, score, is_due, partial(has_ended, run))
    state, history = training.loop.advance_up_to(update, state, count, step=before)
    return state, history.losses, has_ended(run, state)


class Result(NamedTuple):
    """The result of a training on scaled data."""

    model: Any
    score: Array  # the loss of the model on the evaluation rows
    step: Array  # number of updates before the model
    report: Any = None  # what the recipe reports of the training
    finite: Any = True  # whether all losses of the training were finite

    def fitted(self, losses: np.ndarray) -> Fitted:
        """Returns the result on the host; raises ``FloatingPointError`` if the score is not finite, and may warn."""
        if not np.isfinite(self.score):
            raise FloatingPointError("training became non-finite: try a smaller learning_rate")
        if not self.finite:
            result = f"the parameters after update {int(self.step)} are kept"
            distributed.warn(f"training became non-finite, so {result}: try a smaller learning_rate")
        return Fitted(self.model, float(self.score), int(self.step), losses, report=self.report)


def result_of(run: Run, state: TrainState) -> Result:
    """Returns the result of a run."""
    # The last parameters are evaluated here if they were not before, unless early stopping ended the run.
    recipe, dtype = run.recipe, state.best.score.dtype
    last_loss = lambda params: recipe.evaluate(run, params).astype(dtype)
    evaluates = run.evaluates
    is_known = has_stopped(run, state) | (evaluates & recipe.schedule(len(run.batch.x)).is_due(state.step))
    score = lambda params: jax.lax.cond(is_known, lambda: jnp.full((), jnp.inf, dtype), lambda: last_loss(params))
    best = training.best(recipe.method(run), state, run.batch, score=score)
    return Result(recipe.model(run, best.params), best.score, best.step, finite=state.finite)


def in_parts(advance: Callable[..., Any], run: Run, state: Any, steps: int, begins: Array | int = 0) -> Any:
    """Returns the state after ``steps`` updates, which :meth:`jtrees.search.Problem.train` makes, in a program."""

    def advance_part(part: Array, state: Any) -> Any:
        before = training.loop.MOST * part
        return advance(run, state, begins + before, jnp.minimum(training.loop.MOST, steps - before))[0]

    return jax.lax.fori_loop(0, -(-steps // training.loop.MOST), advance_part, state)


async def trained(problem: Problem, part: float = 1.0, steps: int | None = None) -> Fitted:
    """Trains on mini-batches and returns the result on scaled data.

    Args:
      problem: the problem; its recipe is a :class:`MiniBatchRecipe`.
      part: fraction of the updates of the schedule to make.
      steps: number of updates; None: ``part`` of the schedule.

    Raises:
      FloatingPointError: if the training became non-finite.
    """
    recipe = problem.recipe
    if steps is None:
        steps = math.ceil(part * recipe.schedule(problem.shape[0]).steps)
    state = await problem.map(initial)
    state, losses = await problem.train(advanced, state, steps, name=type(recipe).__name__)
    return (await problem.map(result_of, state)).host.fitted(losses)
