"""Joint training of all trees of a boosted sum, by gradients of soft routing."""

from dataclasses import dataclass
from functools import partial
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np
import optax

from jtrees import io, losses, ops, pytree, routing, segments, topology, training
from jtrees.ensembles.boosted import Boosted, BoostedReport
from jtrees.ensembles.boosting_sums import padded_to
from jtrees.ensembles.wrapper import Wrapper
from jtrees.methods.annealed.get import GET
from jtrees.search import Evaluation, Fitted, Problem, Recipe, Report, Run, option, options
from jtrees.search.minibatch import Schedule
from jtrees.search.recipe import on_device
from jtrees.search.stage import train_stage
from jtrees.soft_model import SoftModel
from jtrees.tasks import Task
from jtrees.training import Batch, TrainState
from jtrees.tree import ObliqueTree
from jtrees.validation import quoted

_PART = 50  # fewest updates from one evaluation to the next
_EVALUATIONS = 40  # largest number of evaluations: in a long table, an evaluation takes longer than 50 updates
_PATIENCE = 0.2  # patience of joint training, as a part of all evaluations
_PASSES, _FEWEST = 12, 2000  # passes over the data, and fewest updates, if no epochs are given
_MARGIN = 0.1  # margin of the output bounds, as a part of the range of the outputs for the training rows
_HARD_SHARPNESS = 1e6  # sharpness at which soft trees equal hard trees in practice


@io.part
@pytree.dataclass
class SoftTrees:
    """A sum of soft trees on scaled data. Outputs are clipped to slightly more than their range on training rows."""

    trees: ObliqueTree  # splits of unit length, and leaves with the trees' outputs. The leading axis is over the trees
    initial: Array  # the initial outputs of the sum, (*k,)
    sharpness: Array  # factor of the scores. The sigmoid of the product is the probability of going right
    lower: Array  # lower bound of the outputs, (*k,)
    upper: Array  # upper bound of the outputs, (*k,)

    @property
    def params(self) -> ObliqueTree:
        """The trained parameters."""
        return self.trees.replace(leaves=self.trees.leaves.trainable())

    @property
    def features(self) -> int:
        return self.trees.weights.shape[-1]

    def outputs(self, x: Float[Array, "n p"]) -> Float[Array, "n *k"]:
        """Returns the sum of the trees' expected outputs, within the bounds."""
        add = lambda total, tree: (total + expected(tree, x, self.sharpness), None)
        start = jnp.broadcast_to(self.initial, (len(x), *self.initial.shape))
        return jnp.clip(jax.lax.scan(add, start, self.trees)[0], self.lower, self.upper)

    def __str__(self) -> str:
        trees, nodes = self.trees.bias.shape
        return f"trees={trees}, depth={topology.depth_of(nodes)}, features={self.features}"


def expected(tree: ObliqueTree, x: Array, sharpness: Any) -> Array:
    """Returns the expected output of a soft tree for each row, ``(n, *k)``."""
    right = jax.nn.sigmoid(sharpness * ops.scores(tree.weights, tree.bias, x))
    outputs = tree.leaves.outputs(x)
    return routing.expected_value(right.reshape(*right.shape, *[1] * (outputs.ndim - 2)), outputs)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class RefinedReport(Report):
    """The report of :class:`jtrees.Refined`. Losses are on the held-out rows or the validation set, on scaled targets.

    Attributes:
      refined: whether the model consists of the jointly trained trees.
      boosted_loss: the loss of boosting.
      losses: the loss at each evaluation of the joint training, ``(evaluations,)``.
      base: the report of boosting.
    """

    refined: bool
    boosted_loss: float
    losses: np.ndarray
    base: BoostedReport


@pytree.dataclass(kw_only=True)
class Refined(Wrapper):
    """Trains all trees of a boosted sum jointly. Boosting fits each tree only to the residuals of the earlier trees.

    Splits become soft: sigmoids of their scores times a sharpness, with split weights scaled to length 1. The sharpness
    rises geometrically from update to update. Adam trains all splits and the constants of all leaves on mini-batches,
    on the loss of the whole sum. The constants decay, and the slopes of linear leaves do not change. The learning rate
    falls to 0 by a cosine schedule.

    Boosting, with one sum, chooses its number of rounds on held-out rows (a fifth of all rows), or on ``validation``.
    The same rows choose the number of updates. Joint training ends if a fifth of the planned evaluations in a row do
    not lower the loss. Tables with fewer than 50 rows need ``validation``. If rows were held out, the last training
    starts from the boosted trees of all rows, and takes the chosen number of updates on all rows. The model consists of
    the boosted trees if joint training does not lower their loss, or if a deadline or Ctrl-C ends the last training.

    The model is a :class:`jtrees.SoftModel`; ``tree`` is None. The report is a :class:`jtrees.ensembles.RefinedReport`.

    Attributes:
      base: a :class:`jtrees.Boosted` with ``patience``. The default has up to 100 trees of depth 4 with linear leaves.
      epochs: number of passes over the data; None: as in :class:`jtrees.DGT`, but 12 passes, at least 2000 updates.
      batch_size: samples in a mini-batch, as in :class:`jtrees.DGT`.
      learning_rate: initial learning rate of Adam, for features of deviation 1/3 and outputs in units of the deviation
        of the boosted sum.
      weight_decay: strength of AdamW's decay of the constants of leaves, relative to the learning rate, for each of the
        base's ``rounds``: the more trees share the outputs, the smaller are their constants. At most
        ``1 / (learning_rate * base.rounds)``.
      first_sharpness: sharpness of the first update.
      last_sharpness: sharpness of the last update.

    Example:
      >>> x = np.linspace(-1, 1, 60)[:, None]
      >>> base = jtrees.GET(depth=1, starts=1, epochs=10, cart="binned", halving=False)
      >>> recipe = jtrees.Refined(jtrees.Boosted(base, rounds=5, patience=5), epochs=100)
      >>> fit = jtrees.fit(recipe, x, np.sin(3 * x[:, 0]), key=jax.random.key(0))
      >>> fit.model.predict(x).shape, bool(fit.report.search.losses.min() < fit.report.search.boosted_loss)
      ((60,), True)
    """

    base: Recipe = pytree.field(
        kw_only=False, default=Boosted(GET(depth=4, leaves="linear"), rounds=100, subsample=0.5), metadata=options.BASE
    )
    epochs: int | None = option(None)
    batch_size: int = option(128)
    learning_rate: float = option(0.003, above=0)
    weight_decay: float = option(0.1, least=0)
    first_sharpness: float = option(5.0, above=0)
    last_sharpness: float = option(50.0, above=0)

    is_tree = keeps_order = False

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        if not isinstance(self.base, Boosted) or self.base.patience is None:
            raise ValueError(
                f"base must be a jtrees.Boosted with patience, which holds rows out, got {quoted(self.base)}"
            )
        super().check(task, shape)
        self._schedule(shape[0])
        largest = 1 / (self.learning_rate * self.base.rounds)  # a larger decay changes the sign of the constants
        if self.weight_decay > largest:
            expected = f"at most 1 / (learning_rate * base.rounds) = {largest:.3g}"
            raise ValueError(f"weight_decay must be {expected}, got {float(self.weight_decay):g}")

    def _schedule(self, n: int) -> Schedule:
        return Schedule.for_rows(n, self.epochs, self.batch_size, passes=_PASSES, fewest=_FEWEST)

    async def search(self, problem: Problem) -> Fitted:
        """Boosts, then trains all trees jointly. If there is no validation set, a first training holds out rows."""
        base: Any = self.base
        # Joint training trains all splits anyway, and a choice between kinds of trees takes twice the time.
        boosting = await base.boosted(problem.replace(recipe=problem.recipe.base), is_start=True)
        fitted, report, scaled, without = boosting.fitted, boosting.fitted.report, problem.replace(data=None), None
        if boosting.held_out:
            without = scaled.holding_out(boosting.held_out[0], Evaluation.EARLY_STOPPING)
        trees, initial = boosting.evaluated.first(report.rounds)
        last = first = await self._together(without or scaled, trees, initial, self._schedule(problem.shape[0]).steps)
        is_better = bool(first.losses.min() < report.losses.min())
        if is_better and boosting.held_out:
            on_all = scaled.holding_out(np.zeros(problem.shape[0], bool))
            last = await self._together(on_all, *fitted.scaled, steps=first.step)
        refined = is_better and (problem.has_validation_set or last.is_complete)
        boosted_loss = float(report.losses.min())
        report = RefinedReport(refined=refined, boosted_loss=boosted_loss, losses=first.losses, base=report)
        history = np.append(fitted.history, last.history) if is_better else fitted.history
        fitted = fitted._replace(scaled=_hard(*fitted.scaled), history=history, report=report)
        if refined:
            fitted = fitted._replace(scaled=last.model, score=last.score, step=fitted.step + last.step)
        trial = first.model if refined else _hard(trees, initial)  # not trained on held-out rows
        if (data := problem.data) is None:
            return fitted
        with problem.restoring():
            restore = lambda trees: data.scaling.restore(SoftModel(on_device(trees), None, data.table.task.of_models))
            model, left_out = restore(fitted.scaled), None
            if boosting.has_losses and not problem.is_member:
                left_out = problem.left_out(restore(trial), boosting.held_out[0])
            return fitted._replace(model=model, loss=data.loss(model), left_out=left_out)

    async def _together(self, problem: Problem, trees: ObliqueTree, initial: np.ndarray, steps: int) -> "_Together":
        """Trains the trees of a boosted sum jointly, with ``steps`` updates."""
        base: Any = self.base
        name, monitor = f"{type(self).__name__}, all trees", problem.monitor
        # Trees of zeros pad the trees, so that one program serves all numbers of trees.
        padded = jax.tree.map(lambda a: padded_to(a, base.rounds), trees)
        state = await problem.map(_initial_state, padded, initial, np.int32(len(trees.bias)))
        if problem.evaluates:
            parts = max(1, min(steps // _PART, _EVALUATIONS))
            stops = [-(-steps * part // parts) for part in range(parts + 1)]
            patience = math.ceil(_PATIENCE * parts)
            stage = await train_stage(problem, _advanced, _evaluated, state, stops, patience=patience, name=name)
            state, updates, losses = stage
        else:
            (state, updates), losses = await problem.train(_advanced, state, steps, name=name), np.array([np.inf])
        monitor.ended_at = f"{name}: {len(updates)} of at most {steps} updates"
        model, score, step, finite = (await problem.map(_model_of, state)).host
        is_complete = bool(finite) and len(updates) == steps
        return _Together(model, float(score), int(step), losses, updates, is_complete)


class _Together(NamedTuple):
    model: SoftTrees  # the SoftTrees of the best evaluation, or of the last update if there was no evaluation
    score: float  # the loss of the model on the rows for evaluation
    step: int  # number of updates before the model
    losses: np.ndarray  # the loss at each evaluation; infinite without evaluations
    history: np.ndarray  # loss of each update
    is_complete: bool  # whether all updates were taken and were finite


def _hard(trees: ObliqueTree, initial: np.ndarray) -> SoftTrees:
    """Returns the boosted trees as soft trees that are as sharp as hard trees."""
    endless = np.full(initial.shape, np.inf, initial.dtype)
    unit = _of_unit_length(jax.tree.map(np.asarray, trees))
    return SoftTrees(unit, initial, np.asarray(_HARD_SHARPNESS, initial.dtype), -endless, endless)  # type: ignore[arg-type]


# --- Compiled functions of a run -------------------------------------------------------------------------------------


class _State(NamedTuple):
    training: TrainState  # training state of the trees, with splits of unit length and outputs in units of `unit`
    initial: Array  # the initial outputs of the sum, (*k,)
    count: Array  # number of trees. The trees after them are padding and are not trained
    unit: Array  # unit of the outputs of the trees, ()


def _initial_state(run: Run, trees: ObliqueTree, initial: Array, count: Array) -> _State:
    """Returns the state before the first update, from boosted trees."""
    mask = jnp.arange(len(trees.bias)) < count

    def add(i: Array, outputs: Array) -> Array:
        tree = jax.tree.map(lambda a: a[i], trees)
        return outputs + tree.leaves.at(ops.hard(tree.weights, tree.bias, run.batch.x), run.batch.x)

    zero = jnp.zeros((len(run.batch.x), *initial.shape), run.batch.x.dtype)
    unit = _deviation(jax.lax.fori_loop(0, count, add, zero), run.weight)
    scaled = lambda a: jnp.where(mask.reshape(-1, *[1] * (a.ndim - 1)), a / unit, 0)
    params = _of_unit_length(trees).replace(leaves=jax.tree.map(scaled, trees.leaves.trainable()))
    state = training.loop.init_state(params, run.batch, key=run.key, optimizer=_optimizer(run))
    return _State(state, initial, count, unit)


def _optimizer(run: Run) -> optax.GradientTransformation:
    rate = optax.cosine_decay_schedule(run.recipe.learning_rate, _steps(run))
    values = optax.adamw(rate, weight_decay=run.recipe.weight_decay * run.recipe.base.rounds)
    # Trained slopes overfit.
    return optax.partition({"splits": optax.adam(rate), "values": values, "slopes": optax.set_to_zero()}, _labels)


def _labels(params: ObliqueTree) -> ObliqueTree:
    """Returns the name of the optimiser of each array."""
    leaves = jax.tree.map(lambda _: "values", params.leaves)
    if not params.leaves.is_constant:
        leaves = leaves.replace(coefficients="slopes")
    return params.replace(weights="splits", bias="splits", leaves=leaves)


def _steps(run: Run) -> int:
    return run.recipe._schedule(len(run.batch.x)).steps


def _sharpness(run: Run, step: Any) -> Array:
    first, last = run.recipe.first_sharpness, run.recipe.last_sharpness
    return first * (last / first) ** (jnp.asarray(step, jnp.float32) / _steps(run))


def _advanced(run: Run, state: _State, before: Array, count: Array) -> tuple[_State, Array, Array]:
    """Returns the state after ``count`` updates, their losses, and whether it is non-finite."""

    def loss(params: ObliqueTree, batch: Batch, *, key: Array, step: Array) -> tuple[Array, Array]:
        tree_outputs = jax.vmap(lambda tree: expected(tree, batch.x, _sharpness(run, step)))(params)
        mask = jnp.arange(len(tree_outputs)) < state.count
        outputs = jnp.tensordot(state.unit * mask.astype(tree_outputs.dtype), tree_outputs, 1, precision="highest")
        row_losses = run.task.loss_function.samples(state.initial + outputs, batch.y)
        value = losses.weighted_mean(row_losses, batch.weight)
        return value, value

    method = training.Method(lambda batch, *, key: None, loss, lambda params, batch: None)
    size = run.recipe._schedule(len(run.batch.x)).batch_size
    once = training.step.one_step(method, run.batch, _optimizer(run), batch_size=size)
    trained, history = training.loop.advance_up_to(once, state.training, count, step=before)
    return state._replace(training=trained), history.losses, ~trained.finite


def _model(run: Run, state: _State, params: ObliqueTree, step: Array) -> SoftTrees:
    """Returns trees in training as a model, with output bounds from the training rows."""
    leaves = jax.tree.map(lambda a: state.unit * a, params.leaves)
    if not leaves.is_constant:
        endless = jnp.full(leaves.intercept.shape, jnp.inf, leaves.intercept.dtype)
        leaves = leaves.replace(lower=-endless, upper=endless)
    bound = jnp.full(state.initial.shape, jnp.inf, state.initial.dtype)
    model = SoftTrees(params.replace(leaves=leaves), state.initial, _sharpness(run, step), -bound, bound)
    outputs = model.outputs(run.batch.x)
    low, high = segments.range_of(outputs, run.weight > 0)
    margin = _MARGIN * (high - low)
    return model.replace(lower=low - margin, upper=high + margin)


def _loss(run: Run, model: SoftTrees, rows: Batch) -> Array:
    return losses.mean_loss(run.task.loss_function.samples(model.outputs(rows.x), rows.y), rows.weight)


def _evaluated(run: Run, state: _State, patience: Any) -> tuple[_State, Array, Array]:
    """Returns the state after an evaluation, its loss, and whether early stopping ends the training."""
    trained = state.training
    loss = _loss(run, _model(run, state, trained.params, trained.step), run.rows_during_training)
    loss = jnp.where(trained.finite & jnp.isfinite(loss), loss, jnp.inf)
    trained = trained.evaluated(loss)
    return state._replace(training=trained), loss, trained.waited >= patience


def _model_of(run: Run, state: _State) -> tuple[SoftTrees, Array, Array, Array]:
    """Returns the best model (the last without evaluations), its loss, its step, and whether training was finite."""
    trained, best = state.training, state.training.best
    was_evaluated = jnp.isfinite(best.score)
    pairs = (best.params, best.step), (trained.params, trained.step)
    params, step = jax.tree.map(partial(jnp.where, was_evaluated), *pairs)
    model = _model(run, state, params, step)
    last_loss = lambda: _loss(run, model, run.evaluation).astype(best.score.dtype)
    loss = jax.lax.cond(was_evaluated, lambda: best.score, last_loss)
    return model, loss, step, trained.finite


def _of_unit_length(trees: ObliqueTree) -> ObliqueTree:
    """Returns the same trees with split weights of length 1. A split without weights sends all rows to one side."""
    length = jnp.linalg.norm(trees.weights, axis=-1)
    has_weights = length > 0
    length = jnp.where(has_weights, length, 1)
    bias = jnp.where(has_weights, trees.bias / length, jnp.where(trees.bias > 0, 1.0, -1.0).astype(trees.bias.dtype))
    return trees.replace(weights=trees.weights / length[..., None], bias=bias)


def _deviation(outputs: Array, weight: Array) -> Array:
    """Returns the standard deviation of outputs over rows (averaged over the outputs, if several), or 1 if it is 0."""
    outputs = outputs.reshape(len(outputs), -1)
    mean = jnp.average(outputs, axis=0, weights=weight)
    deviation = jnp.sqrt(jnp.average(jnp.square(outputs - mean), axis=0, weights=weight)).mean()
    return jnp.where(deviation > 0, deviation, 1)
