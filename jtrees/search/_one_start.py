"""One start of :func:`jtrees.search.restarts`: a tree that is trained in stages, one for each sharpness."""

from collections.abc import Callable
import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import optax

from jtrees import leaves as kinds, training
from jtrees.search._minibatch import prediction_loss
from jtrees.search.recipe import Round
from jtrees.tasks import Task
from jtrees.training import Batch, Best, TrainState
from jtrees.tree import ObliqueTree

_WARM_UP = 10  # linear warm-up steps
_LAST_LEARNING_RATE = 1e-4  # of the peak: 1e-6 for the paper's 0.01
_WEIGHT_DECAY = 1e-2  # AdamW's default in PyTorch, which the paper keeps
EVALUATIONS = 20  # evaluations of an expensive score, per sharpness

Score = Callable[[ObliqueTree], Array] | None  # loss of a hard tree, refitted to the batch, on a validation set


class Run(NamedTuple):
    """The state of a start, which trains in one stage for each sharpness. Splits are those of ``x @ matrix``.

    Attributes:
      number: number of the start.
      splits: the initial splits of the stage; after the last stage, its final ones (``leaves`` is None).
      training: the training state of the stage.
      best: the best splits of the stages so far.
      sharpness: sharpness of each stage, ``(stages,)``.
      scores: best score of each stage, infinite if not finite or not run, ``(stages,)``.
      steps: epoch of the best score, ``(stages,)``.
      matrix: the preconditioner, ``(p, p)``, or None.
    """

    number: Array
    splits: ObliqueTree
    training: TrainState
    best: Best
    sharpness: Array
    scores: Array
    steps: Array
    matrix: Array | None

    def on_x(self, splits: ObliqueTree) -> ObliqueTree:
        """Returns splits of preconditioned features as splits of the features."""
        return splits if self.matrix is None else splits.composed(self.matrix)

    def best_so_far(self) -> Best:
        """Returns the best splits of the start, including those of an interrupted stage."""
        current = self.training.best
        return _better(self.best, current.replace(params=current.params.replace(leaves=None)))


def _better(old: Best, new: Best) -> Best:
    return jax.tree.map(partial(jnp.where, new.score < old.score), new, old)


@dataclasses.dataclass(frozen=True, eq=False)
class Stages:
    """The training of a start: pure functions, and their options.

    Attributes:
      task: what is predicted.
      kind: kind of the leaves.
      method: ``sharpness -> Method``.
      lengths: updates in each stage, the short ones first.
      short: number of short stages, as many as sharpnesses, or 0.
      learning_rate: peak learning rate.
      between: ``(splits, batch) -> splits``, which may move their biases after each stage; or None.
    """

    task: Task
    kind: kinds.Kind
    method: Callable[[Any], training.Method]
    lengths: tuple[int, ...]
    short: int
    learning_rate: Any
    between: Callable[[ObliqueTree, Batch], ObliqueTree] | None

    def init(
        self,
        number: Array,
        splits: ObliqueTree,
        sharpness: Float[Array, " stages"],
        matrix: Float[Array, "p p"] | None,
        batch: Batch,
    ) -> Run:
        """Returns the initial state of a start."""
        infinite = jnp.full(sharpness.shape, jnp.inf, batch.x.dtype)
        best = Best(splits, infinite[0], jnp.zeros((), jnp.int32))
        # Only the shapes of this state matter: the first round replaces it.
        params = self.with_leaves(splits, batch)
        state = self._state(params.replace(leaves=params.leaves.trainable()), sharpness[0], batch)
        return Run(number, splits, state, best, sharpness, infinite, jnp.zeros(sharpness.shape, jnp.int32), matrix)

    def round(self, at: Round, run: Run, batch: Batch, validation: Batch | None) -> tuple[Run, Array]:
        """Returns a start after a round, and the losses of its steps."""
        first, steps, current = at.before == 0, jnp.asarray(self.lengths)[at.stage], run.sharpness[at.stage]
        score: Score = None
        if validation is not None:
            score = lambda params: prediction_loss(self.task, run.on_x(params).refit(*batch), validation)
        # The criterion of constant leaves is a by-product of a step; other scores cost as much as a step or more.
        free = validation is None and self.kind.of in (kinds.Constant, kinds.Logit)
        every = 1 if free else jnp.maximum(1, steps // EVALUATIONS)
        one_step = training.one_step(
            self._method_on(run, current), batch, self._optimizer(at.stage), score_every=every, score=score, last=steps
        )
        state = jax.lax.cond(first, lambda: self._first_state(run, current, batch), lambda: run.training)
        # One step more after the last of a stage, for its score: a separate evaluation would double the program.
        count = at.count + at.last.astype(jnp.int32)
        state, history = training.advance_up_to(one_step, state, count, at.most + 1, step=at.before)
        losses_of_steps = jnp.where(jnp.arange(at.most) < at.count, history.losses[:-1], training.NOT_TAKEN)
        run = jax.lax.cond(
            at.last,
            lambda: self._next_stage(run, state, at.stage, batch, score),
            lambda: run._replace(training=state),
        )
        return run, losses_of_steps

    def with_leaves(self, splits: ObliqueTree, batch: Batch) -> ObliqueTree:
        """Returns the splits with leaves to be refitted."""
        empty = self.kind.empty(len(splits.bias) + 1, batch.x.shape[1], self.task.shape, batch.x.dtype)
        return splits.replace(leaves=empty)

    def _optimizer(self, stage: Any) -> optax.GradientTransformation:
        """Returns the optimizer of a stage, whose learning rate falls over its epochs."""

        def rate(step: Any) -> Any:
            each = [_rate(steps)(step) for steps in (self.lengths[0], self.lengths[-1])]
            return self.learning_rate * jnp.where(stage < self.short, *each)

        return optax.adamw(rate, weight_decay=_WEIGHT_DECAY)

    def _method_on(self, run: Run, sharpness: Array) -> training.Method:
        """Returns the method on splits of preconditioned features."""
        plain = self.method(sharpness)
        return plain._replace(loss=lambda params, *data, **options: plain.loss(run.on_x(params), *data, **options))

    def _state(self, params: ObliqueTree, sharpness: Array, batch: Batch) -> TrainState:
        """Returns the initial training state of a stage."""
        # Any key: the batch is full, and the loss not random. The optimizers of all stages begin alike.
        arguments: Any = {"key": jax.random.key(0), "optimizer": self._optimizer(0), "params": params}
        state = training.start(self.method(sharpness), batch, **arguments)
        return state.replace(order=state.order[:1])  # unused, as there is one batch

    def _first_state(self, run: Run, sharpness: Array, batch: Batch) -> TrainState:
        """Returns the training state at the beginning of a stage, from the hard tree of the splits."""
        hard = self.with_leaves(run.on_x(run.splits), batch).refit(*batch)
        params = run.splits.replace(leaves=hard.leaves.trainable())
        return self._state(params, sharpness, batch).replace(finite=run.training.finite)

    def _next_stage(self, run: Run, state: TrainState, stage: Any, batch: Batch, score: Score) -> Run:
        """Returns the start after the last step of a stage, at ``state``."""
        splits, value = state.best.params.replace(leaves=None), state.best.score
        if self.between is not None:
            splits = splits.replace(bias=self.between(run.on_x(splits), batch).bias)
        # `between` may change the routing of other samples than the training samples.
        if score is not None and self.between is not None:
            hard_tree = splits.replace(leaves=state.best.params.leaves)
            value = jnp.where(jnp.isfinite(value), score(hard_tree), jnp.inf)
        value = jnp.where(state.finite, value, jnp.inf)
        best = _better(run.best, Best(splits, value, state.best.step))
        finite = jnp.isfinite(value)
        # Its best is in `best` already; of the finished stage only `finite` is still needed.
        spent = state.replace(best=state.best.replace(score=jnp.full_like(value, jnp.inf)), finite=finite)
        scores, steps = run.scores.at[stage].set(value), run.steps.at[stage].set(state.best.step)
        return run._replace(splits=splits, training=spent, best=best, scores=scores, steps=steps)


def _rate(epochs: int) -> optax.Schedule:
    """Returns the schedule of the learning rate of a stage, relative to its peak."""
    warm_up = min(_WARM_UP, epochs // 2)
    return optax.warmup_cosine_decay_schedule(1 / (warm_up + 1), 1.0, warm_up, epochs, _LAST_LEARNING_RATE)
