"""The stages of a start: a tree trains under one sharpness after another, each time from the best tree so far."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np
import optax

from jtrees import ops, training
from jtrees.data.scaling import with_map
from jtrees.monotone import keeping_signs, ordered_leaves
from jtrees.search import Problem, Run
from jtrees.search.minibatch import prediction_loss
from jtrees.search.stage import train_stage
from jtrees.training import Best, TrainState
from jtrees.tree import ObliqueTree, with_empty_leaves

_WARM_UP = 10  # linear warm-up steps
_LAST_LEARNING_RATE = 1e-4  # relative to the peak: 1e-6 for 0.01, as in the authors' program
_WEIGHT_DECAY = 1e-2  # AdamW's default in PyTorch, which the authors' program keeps
_EVALUATIONS = 20  # number of evaluations in a stage, if an evaluation costs more than an update
_FEWEST_UPDATES = 10  # fewest updates between two evaluations
_FEW_ROWS = 1000  # rows of a short table
# With halving, a stage of linear leaves ends if _PATIENCE evaluations in a row do not lower the lowest score by this
# fraction. Stacked runs train all updates, because a stack takes the time of its longest run.
_PATIENCE, _LEAST_GAIN = 3, 0.003


class StartResult(NamedTuple):
    """The result of the stages of a start."""

    splits: ObliqueTree  # the best splits of all stages, on preconditioned features
    score: float  # the score of the best splits; infinite if a stage became non-finite
    step: int  # number of the update, within its stage, that gave the best splits
    scores: np.ndarray  # best score of each stage, (stages,)
    steps: np.ndarray  # number of the update with the best score of each stage, (stages,)
    losses: np.ndarray  # loss of each update, (updates,)
    matrix: np.ndarray | None  # the matrix that maps the features to the features of the splits, or None

    @property
    def finite(self) -> bool:
        """Whether all stages were finite."""
        return bool(np.isfinite(self.scores).all())

    @property
    def tree(self) -> ObliqueTree:
        """The best splits, on features that the matrix did not map."""
        return with_map(self.splits, self.matrix)


async def train_stages(
    problem: Problem, splits: ObliqueTree, sharpness: np.ndarray, epochs: int, matrix: np.ndarray | None = None
) -> StartResult:
    """Trains a start under one sharpness after another (GET, Algorithm 1, lines 7 to 14)."""
    # A stage starts with the hard tree of the splits of the previous stage. After the deadline, further stages keep the
    # splits unchanged. `epochs` is the number of updates in each stage. The `matrix` of a preconditioner, (p, p), is
    # the preconditioner of the features of the splits; None: the identity.
    problem, trees, histories = problem.preconditioned_by(matrix), [], []
    for stage, stage_sharpness in enumerate(sharpness):
        if stage and not problem.monitor.has_time():
            trees.append(trees[-1].replace(step=np.zeros_like(trees[-1].step)))
            continue
        name = f"{type(problem.recipe).__name__}, stage {stage + 1}"
        tree, losses = await _train_under(problem, splits, stage_sharpness, epochs, name)
        splits = tree.params
        trees.append(tree)
        histories.append(losses)
    best = min(trees, key=lambda tree: tree.score)
    scores = np.array([tree.score for tree in trees], np.float32)
    score = float(best.score) if np.isfinite(scores).all() else np.inf
    steps = np.array([tree.step for tree in trees])
    return StartResult(best.params, score, int(best.step), scores, steps, np.concatenate(histories), matrix)


async def _train_under(
    problem: Problem, splits: ObliqueTree, sharpness: np.ndarray, epochs: int, name: str
) -> tuple[Best, np.ndarray]:
    """Returns the best hard tree under one sharpness, and the losses of its updates."""
    # Hard trees are evaluated after every update if the update computes their score, else about 20 times.
    recipe, is_scored = problem.recipe, updates_are_scored(problem)
    often = recipe.cart == "binned"  # in the rounds of boosting
    # In a short table, the evaluations of a fit take less time than optimised compilation.
    evaluates_often = often or (not is_scored and problem.shape[0] > _FEW_ROWS)
    can_stop = recipe.halves and recipe.leaves == "linear" and not problem.engine.stacks
    patience, options = _PATIENCE if can_stop else None, {"often": evaluates_often}
    state = await problem.map(initial_state, splits, often=often)
    state = (await problem.map(evaluated, state, np.int32(_PATIENCE), **options)).element(0)
    stops, arguments = evaluation_steps(epochs, is_scored), (np.float32(sharpness), np.float32(epochs))
    stage = await train_stage(
        problem, advanced, evaluated, state, stops, *arguments, patience=patience, name=name, **options
    )
    return (await problem.map(best_of_stage, stage.state, often=often)).host, stage.losses


def updates_are_scored(run: Run) -> bool:
    """Returns whether an update also computes the score of the hard tree."""
    # It computes the criterion of leaves in any order, so monotone features need a separate evaluation.
    return not run.has_validation_set and run.recipe.leaves == "constant" and run.monotone is None


def evaluation_steps(epochs: int, is_scored: bool) -> list[int]:
    """Returns the numbers of updates after which the hard tree is evaluated separately; the first is 0."""
    parts = 1 if is_scored else max(1, min(_EVALUATIONS, epochs // _FEWEST_UPDATES))
    return [-(-epochs * part // parts) for part in range(parts + 1)]


# --- Compiled functions of a start -----------------------------------------------------------------------------------


def initial_state(run: Run, splits: ObliqueTree) -> TrainState:
    """Returns the initial training state of a stage; :func:`evaluated` fits its leaves."""
    params = _empty_tree(run, splits)
    params = params.replace(leaves=params.leaves.trainable())
    # The key has no effect: the batch is full, and the loss is not random.
    state = training.loop.init_state(params, run.batch, key=jax.random.key(0), optimizer=_optimizer(run, 1.0))
    return state.replace(order=state.order[:1])  # unused: there is only one batch


def advanced(
    run: Run, state: TrainState, sharpness: Array, steps: Array, before: Array, count: Array
) -> tuple[TrainState, Array, Array]:
    """Returns the state after ``count`` updates of a stage of ``steps``, their losses, and whether it is non-finite."""
    is_scored = updates_are_scored(run)
    plain = run.recipe.method(sharpness, run.task, scored=is_scored)
    loss = lambda params, *data, **options: plain.loss(_in_order(run, params), *data, **options)
    method = plain._replace(loss=loss)
    update = training.step.one_step(method, run.batch, _optimizer(run, steps), score_every=int(is_scored))
    state, history = training.loop.advance_up_to(update, state, count, step=before)
    return state, history.losses, ~state.finite


def evaluated(run: Run, state: TrainState, patience: Any) -> tuple[TrainState, Array, Array]:
    """Returns the state after an evaluation of the hard tree, its score, and whether early stopping ends the stage."""
    # At the beginning of a stage the state also takes the leaves of the hard tree. One program does both, because
    # fitting linear leaves takes long to compile.
    leaves, score = fitted_leaves(run, state.params)
    fitted = jax.tree.map(partial(jnp.where, state.step == 0), leaves.trainable(), state.params.leaves)
    state = state.replace(params=state.params.replace(leaves=fitted))
    score = jnp.where(state.finite, score, jnp.inf)
    state = state.evaluated(score, _LEAST_GAIN)
    return state, score, state.waited >= patience


def best_of_stage(run: Run, state: TrainState) -> Best:
    """Returns the best splits of a stage, with an infinite score if the stage became non-finite."""
    splits, score = run.recipe.between(run, state.best.params.replace(leaves=None), state.best.score)
    return Best(splits, jnp.where(state.finite, score, jnp.inf), state.best.step)


def fitted_leaves(run: Run, splits: ObliqueTree) -> tuple[Any, Array]:
    """Returns the fitted leaves of splits of the features, not yet in monotone order, and the score of the hard tree.

    The score is the loss on the validation set. If there is no validation set, it is the criterion of the leaves on the
    training rows.
    """
    tree = _empty_tree(run, splits)
    validates = run.has_validation_set
    if validates or run.monotone is not None:
        tree = tree.refit(*run.batch)
        ordered = run.ordered(tree, ops.hard(tree.weights, tree.bias, run.batch.x))
        return tree.leaves, prediction_loss(run.task, ordered, run.evaluation if validates else run.batch)
    return tree.leaves.refit_with_criterion(ops.hard(tree.weights, tree.bias, run.batch.x), *run.batch)


def _empty_tree(run: Run, splits: ObliqueTree) -> ObliqueTree:
    return with_empty_leaves(splits, run.recipe.leaves, run.task)


def _in_order(run: Run, params: ObliqueTree) -> ObliqueTree:
    """Returns parameters with leaves in monotone order, so that training adapts the splits to such leaves."""
    # All leaves have equal weight, because every row reaches every leaf of a soft routing.
    if run.monotone is None:
        return params
    return ordered_leaves(params, run.monotone, jnp.ones(len(params.bias) + 1, params.bias.dtype), run.task)


def _optimizer(run: Run, steps: Any) -> optax.GradientTransformation:
    """Returns the optimiser of a stage: AdamW with a linear warm-up, then cosine decay."""
    warm_up = jnp.minimum(_WARM_UP, steps // 2)

    def rate(step: Any) -> Any:
        rising = (1 + step) / (warm_up + 1)
        after = jnp.clip((step - warm_up) / jnp.maximum(steps - warm_up, 1), 0, 1)
        falling = _LAST_LEARNING_RATE + (1 - _LAST_LEARNING_RATE) * 0.5 * (1 + jnp.cos(jnp.pi * after))
        return run.recipe.learning_rate * jnp.where(step < warm_up, rising, falling)

    return keeping_signs(optax.adamw(rate, weight_decay=_WEIGHT_DECAY), run.monotone)
