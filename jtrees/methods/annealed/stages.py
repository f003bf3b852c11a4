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
from jtrees.search import MOST, Problem, Run
from jtrees.search.minibatch import prediction_loss
from jtrees.training import Best, TrainState
from jtrees.tree import ObliqueTree

_WARM_UP = 10  # linear warm-up steps
_LAST_LEARNING_RATE = 1e-4  # relative to the peak: 1e-6 for the paper's 0.01
_WEIGHT_DECAY = 1e-2  # AdamW's default in PyTorch, which the paper keeps
_EVALUATIONS = 20  # number of evaluations in a stage, if an evaluation costs more than an update
_FEWEST_UPDATES = 10  # fewest updates between two evaluations


class Ended(NamedTuple):
    """The result of the stages of a start.

    Attributes:
      splits: the best splits of all stages.
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


async def train_stages(problem: Problem, splits: ObliqueTree, sharpness: np.ndarray, epochs: int) -> Ended:
    """Trains a start under one sharpness after another (GET, Algorithm 1, lines 7 to 15).

    A stage starts with the hard tree of the splits of the previous stage. After the deadline, further stages keep the
    splits unchanged.

    Args:
      problem: a problem, with a recipe of :class:`jtrees.methods.annealed.algorithm.Annealed`.
      splits: the initial splits.
      sharpness: sharpness of each stage, ``(stages,)``.
      epochs: number of updates in each stage.
    """
    trees, histories = [], []
    for stage, stage_sharpness in enumerate(sharpness):
        if stage and not problem.monitor.has_time():
            trees.append(trees[-1].replace(step=np.zeros_like(trees[-1].step)))
            continue
        name = f"{type(problem.recipe).__name__}, stage {stage + 1}"
        tree, losses = await _train_stage(problem, splits, stage_sharpness, epochs, name)
        splits = tree.params
        trees.append(tree)
        histories += losses
    best = min(trees, key=lambda tree: tree.score)
    scores = np.array([tree.score for tree in trees], np.float32)
    score = float(best.score) if np.isfinite(scores).all() else np.inf
    steps = np.array([tree.step for tree in trees])
    return Ended(best.params, score, int(best.step), scores, steps, np.concatenate(histories))


async def _train_stage(
    problem: Problem, splits: ObliqueTree, sharpness: np.ndarray, epochs: int, name: str
) -> tuple[Best, list[np.ndarray]]:
    """Returns the best hard tree of a stage, and the losses of its updates.

    Hard trees are evaluated after every update if the evaluation is a by-product of the update, else about 20 times.
    """
    recipe = problem.recipe
    # An update computes the criterion of leaves in any order, so monotone features need a separate evaluation.
    by_product = not problem.validates and recipe.leaves == "constant" and problem.monotone is None
    parts = 1 if by_product else max(1, min(_EVALUATIONS, epochs // _FEWEST_UPDATES))
    often = recipe.cart == "binned"  # in the rounds of boosting
    state = await problem.map(_begun, splits, often=often)
    state = await problem.map(_evaluated, state, np.bool_(True), often=often or not by_product)
    ends, losses = [-(-epochs * part // parts) for part in range(parts + 1)], []
    for part in range(parts):
        steps = ends[part + 1] - ends[part]
        arguments = np.float32(sharpness), np.float32(epochs)
        state, part_losses = await problem.train(
            _advanced, state, steps, *arguments, name=name, begins=ends[part], total=epochs
        )
        losses.append(part_losses)
        state = await problem.map(_evaluated, state, np.bool_(False), often=often or not by_product)
        if len(part_losses) < steps or problem.monitor.is_rehearsed(part + 1):
            break
    return (await problem.map(_ended, state, often=often)).host, losses


# --- Compiled functions of a start -----------------------------------------------------------------------------------


def _begun(run: Run, splits: ObliqueTree) -> TrainState:
    """Returns the initial training state of a stage; :func:`_evaluated` fits its leaves."""
    params = splits.replace(leaves=with_leaves(run, splits).leaves.trainable())
    # The key has no effect: the batch is full, and the loss is not random.
    state = training.loop.init_state(params, run.batch, key=jax.random.key(0), optimizer=_optimizer(run, 1.0))
    return state.replace(order=state.order[:1])  # unused: there is only one batch


def _advanced(
    run: Run, state: TrainState, sharpness: Array, steps: Array, before: Array, count: Array
) -> tuple[TrainState, Array, Array]:
    """Returns the state after ``count`` updates of a stage of ``steps``, their losses, and whether it is non-finite."""
    by_product = not run.validates and run.recipe.leaves == "constant" and run.monotone is None
    plain = run.recipe.method(sharpness, run.task, scored=by_product)
    loss = lambda params, *data, **options: plain.loss(_in_order(run, params), *data, **options)
    method = plain._replace(loss=loss)
    update = training.step.one_step(method, run.batch, _optimizer(run, steps), score_every=int(by_product))
    state, history = training.loop.advance_up_to(update, state, count, MOST, step=before)
    return state, history.losses, ~state.finite


def _evaluated(run: Run, state: TrainState, begins: Array) -> TrainState:
    """Returns the state, with the current parameters as the best if their hard tree has a lower score.

    At the beginning of a stage the state also takes the leaves of the hard tree. One program does both, because fitting
    linear leaves takes long to compile.
    """
    leaves, score = _scored(run, state.params.replace(leaves=None))
    fitted = jax.tree.map(partial(jnp.where, begins), leaves.trainable(), state.params.leaves)
    score = jnp.where(state.finite, score, jnp.inf).astype(state.best.score.dtype)
    now = Best(state.params.replace(leaves=fitted), score, state.step)
    state = state.replace(params=now.params)
    return state.replace(best=jax.tree.map(partial(jnp.where, score < state.best.score), now, state.best))


def _ended(run: Run, state: TrainState) -> Best:
    """Returns the best splits of a stage, with an infinite score if the stage became non-finite."""
    splits, score = run.recipe.between(run, state.best.params.replace(leaves=None), state.best.score)
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
