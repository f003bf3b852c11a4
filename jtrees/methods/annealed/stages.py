"""The stages of a start: a tree trains under one sharpness after another, each time from the best tree so far."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np
import optax

from jtrees import leaves as kinds, ops, training
from jtrees.monotone import keeping_signs, ordered_leaves
from jtrees.search import Run, Runs
from jtrees.search.minibatch import prediction_loss
from jtrees.search.runs import MOST
from jtrees.training import Best, TrainState
from jtrees.tree import ObliqueTree

_WARM_UP = 10  # linear warm-up steps
_LAST_LEARNING_RATE = 1e-4  # relative to the peak: 1e-6 for the paper's 0.01
_WEIGHT_DECAY = 1e-2  # AdamW's default in PyTorch, which the paper keeps
_EVALUATIONS = 20  # number of evaluations in a stage, if an evaluation costs more than an update
_FEWEST_UPDATES = 10  # fewest updates between two evaluations


class Start(NamedTuple):
    """A start: its initial splits and its hyperparameters, on the host.

    Attributes:
      splits: the initial splits, on preconditioned features, without leaves.
      sharpness: sharpness of each stage, ``(stages,)``.
      matrix: the preconditioner, ``(p, p)``, or None.
    """

    splits: ObliqueTree
    sharpness: np.ndarray
    matrix: np.ndarray | None

    def in_stages(self, some: slice) -> "Start":
        """Returns the start with only some of its stages."""
        return self._replace(sharpness=self.sharpness[some])


class Ended(NamedTuple):
    """The result of the stages of a start.

    Attributes:
      splits: the best splits of all stages, on preconditioned features.
      score: the score of the best splits; infinite if a stage became non-finite.
      step: number of the update, within its stage, that gave the best splits.
      scores: best score of each stage, ``(stages,)``.
      steps: number of the update with the best score of each stage, ``(stages,)``.
      losses: loss of each update, ``(updates,)``.
    """

    splits: ObliqueTree
    score: float
    step: int
    scores: np.ndarray
    steps: np.ndarray
    losses: np.ndarray

    @property
    def finite(self) -> bool:
        """Whether all stages were finite."""
        return bool(np.isfinite(self.scores).all())


def train_stages(runs: Runs, starts: list[Start], epochs: int) -> list[Ended]:
    """Trains every start under one sharpness after another.

    A stage starts with the hard tree of the splits of the previous stage. Hard trees are evaluated during training, and
    the best tree is kept. They are evaluated after every update if the evaluation is a by-product of the update, else
    about 20 times in a stage. After the deadline, further stages keep the splits unchanged.

    Args:
      runs: a run for each start, with a recipe of :class:`jtrees.methods.annealed.algorithm.Annealed`.
      starts: the starts.
      epochs: number of updates in each stage.
    """
    recipe: Any = runs.recipes[0]
    # An update computes the criterion of leaves in any order, so monotone features need a separate evaluation.
    free = runs.validation is None and recipe.leaves == "constant" and runs.monotone is None
    parts = 1 if free else max(1, min(_EVALUATIONS, epochs // _FEWEST_UPDATES))
    often = recipe.cart == "binned"  # in the rounds of boosting
    splits, matrices = [one.splits for one in starts], [one.matrix for one in starts]
    steps, best, stages = [np.float32(epochs)] * len(starts), [], []
    for stage, sharpness in enumerate(np.transpose([one.sharpness for one in starts])):
        if stages and not runs.monitor.has_time():
            left = [end.replace(step=np.zeros_like(end.step)) for end in stages[-1][0]]
            stages.append((left, [np.zeros(0, np.float32)] * len(starts)))
            continue
        states = runs.map(_begun, splits, often=often)
        keep = lambda states, done=0, begins=False: runs.map(
            _evaluated, states, matrices, [np.bool_(begins)] * len(starts), often=often or not free
        )
        states = keep(states, begins=True)
        name, between = f"{type(recipe).__name__}, stage {stage + 1}", None if free else keep
        found = runs.train(
            _advanced, states, epochs, list(sharpness), matrices, steps, name=name, parts=parts, between=between
        )
        states = keep(found.states) if free else found.states
        ends = runs.fetch(runs.map(_ended, states, matrices, often=often))
        splits = [end.params for end in ends]
        best = [now if not stage or now.score < old.score else old for old, now in zip(best or ends, ends, strict=True)]
        stages.append((ends, found.losses))
    scores = np.array([[end.score for end in ends] for ends, _ in stages], np.float32).T
    numbers = np.array([[end.step for end in ends] for ends, _ in stages]).T
    losses = [np.concatenate(one) for one in zip(*(lost for _, lost in stages), strict=True)]
    lowest = np.where(np.isfinite(scores).all(1), [one.score for one in best], np.inf)
    columns = zip(best, lowest, scores, numbers, losses, strict=True)
    return [Ended(one.params, float(low), int(one.step), *of_stages) for one, low, *of_stages in columns]


# --- Compiled functions of a start -----------------------------------------------------------------------------------


def _begun(run: Run, splits: ObliqueTree) -> TrainState:
    """Returns the initial training state of a stage; :func:`_evaluated` fits its leaves."""
    params = splits.replace(leaves=with_leaves(run, splits).leaves.trainable())
    # The key has no effect: the batch is full, and the loss is not random.
    state = training.loop.init_state(params, run.batch, key=jax.random.key(0), optimizer=_optimizer(run, 1.0))
    return state.replace(order=state.order[:1])  # unused: there is only one batch


def _advanced(
    run: Run,
    state: TrainState,
    sharpness: Array,
    matrix: Array | None,
    steps: Array,
    before: Array,
    count: Array,
    evaluates: Array,
) -> tuple[TrainState, Array, Array]:
    """Returns the state after ``count`` updates of a stage of ``steps``, their losses, and whether it is non-finite."""
    free = not run.validates and run.recipe.leaves == "constant" and run.monotone is None
    plain = run.recipe.method(sharpness, run.task, scored=free)
    loss = lambda params, *data, **options: plain.loss(_in_order(run, on_x(params, matrix)), *data, **options)
    method = plain._replace(loss=loss)
    once = training.step.one_step(method, run.batch, _optimizer(run, steps), score_every=int(free))
    state, history = training.loop.advance_up_to(once, state, count, MOST, step=before)
    return state, history.losses, ~state.finite


def _evaluated(run: Run, state: TrainState, matrix: Array | None, begins: Array) -> TrainState:
    """Returns the state, with the current parameters as the best if their hard tree has a lower score.

    At the beginning of a stage the state also takes the leaves of the hard tree. One program does both, because fitting
    linear leaves takes long to compile.
    """
    leaves, score = _scored(run, on_x(state.params.replace(leaves=None), matrix))
    fitted = jax.tree.map(partial(jnp.where, begins), leaves.trainable(), state.params.leaves)
    score = jnp.where(state.finite, score, jnp.inf).astype(state.best.score.dtype)
    now = Best(state.params.replace(leaves=fitted), score, state.step)
    state = state.replace(params=now.params)
    return state.replace(best=jax.tree.map(partial(jnp.where, score < state.best.score), now, state.best))


def _ended(run: Run, state: TrainState, matrix: Array | None) -> Best:
    """Returns the best splits of a stage, with an infinite score if the stage became non-finite."""
    splits, score = state.best.params.replace(leaves=None), state.best.score
    splits, score = run.recipe.between(run, splits, matrix, score)
    return Best(splits, jnp.where(state.finite, score, jnp.inf), state.best.step)


def score_of(run: Run, splits: ObliqueTree) -> Array:
    """Returns the score of the hard tree of splits of the features.

    The score is the loss on the validation set. If there is no validation set, it is the criterion of the leaves on the
    training rows.
    """
    return _scored(run, splits)[1]


def _scored(run: Run, splits: ObliqueTree) -> tuple[Any, Array]:
    """Returns the fitted leaves of splits of the features, not yet in order, and the score of the hard tree."""
    tree = with_leaves(run, splits)
    if run.validates or run.monotone is not None:
        tree = tree.refit(*run.batch)
        by = run.by if run.validates else run.batch
        return tree.leaves, prediction_loss(run.task, _hard_tree_in_order(run, tree), by)
    return tree.leaves.refit_with_criterion(ops.hard(tree.weights, tree.bias, run.batch.x), *run.batch)


def held_out_loss(run: Run, splits: ObliqueTree) -> Array:
    """Returns the mean loss of the hard tree of splits of the features, on the rows for evaluation."""
    return prediction_loss(run.task, _refitted(run, splits), run.by)


def _refitted(run: Run, splits: ObliqueTree) -> ObliqueTree:
    """Returns the hard tree of splits of the features."""
    return _hard_tree_in_order(run, with_leaves(run, splits).refit(*run.batch))


def _hard_tree_in_order(run: Run, tree: ObliqueTree) -> ObliqueTree:
    """Returns a hard tree with leaves in the order of the monotone features, if the run has any."""
    return tree if run.monotone is None else run.ordered(tree, ops.hard(tree.weights, tree.bias, run.batch.x))


def on_x(splits: ObliqueTree, matrix: Array | None) -> ObliqueTree:
    """Returns splits of preconditioned features as splits of the features."""
    return splits if matrix is None else splits.composed(matrix)


def with_leaves(run: Run, splits: ObliqueTree) -> ObliqueTree:
    """Returns the splits with leaves to be refitted."""
    kind, x = kinds.kind_of(run.recipe.leaves, run.task), run.batch.x
    return splits.replace(leaves=kind.empty(len(splits.bias) + 1, x.shape[1], run.task.shape, x.dtype))


def _in_order(run: Run, params: ObliqueTree) -> ObliqueTree:
    """Returns parameters with leaves in monotone order, so that training adapts the splits to such leaves.

    All leaves have equal weight, because every row reaches every leaf of a soft routing.
    """
    if run.monotone is None:
        return params
    return ordered_leaves(params, run.monotone, jnp.ones(len(params.bias) + 1, params.bias.dtype), run.task)


def _optimizer(run: Run, steps: Any) -> optax.GradientTransformation:
    """Returns the optimiser of a stage: AdamW with a linear warm-up, then cosine decay."""
    warm_up = jnp.minimum(_WARM_UP, steps // 2)

    def rate(step: Any) -> Any:
        rising = (1 + step * warm_up / jnp.maximum(warm_up, 1)) / (warm_up + 1)
        after = jnp.clip((step - warm_up) / jnp.maximum(steps - warm_up, 1), 0, 1)
        falling = _LAST_LEARNING_RATE + (1 - _LAST_LEARNING_RATE) * 0.5 * (1 + jnp.cos(jnp.pi * after))
        return run.recipe.learning_rate * jnp.where(step < warm_up, rising, falling)

    return keeping_signs(optax.adamw(rate, weight_decay=_WEIGHT_DECAY), run.monotone)
