"""Joint training of all trees of a boosted sum, by gradients of soft routing."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np
import optax

from jtrees import losses, ops, pytree, training
from jtrees.data import Data, Scaling, Table
from jtrees.ensembles.boosted import Boosted, BoostedReport
from jtrees.ensembles.soft_forest import SoftForest, SoftTrees, expected
from jtrees.methods.annealed.get import GET
from jtrees.search import Finished, HeldOut, Recipe, Report, Run, Runs, SearchResult, Stacked, check_finite, options
from jtrees.search.minibatch import Schedule
from jtrees.search.recipe import loss_of, on_device
from jtrees.search.runs import MOST
from jtrees.tasks import Task
from jtrees.training import Batch, TrainState
from jtrees.tree import ObliqueTree
from jtrees.validation import quoted

_PART = 50  # updates from one evaluation to the next
_PASSES, _FEWEST = 12, 2000  # passes over the data, and fewest updates, if no epochs are given
_MARGIN = 0.1  # margin of the output bounds, as a part of the range of the outputs for the training rows
_HARD = 1e6  # sharpness at which soft trees equal hard trees in practice


# --- The recipe ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class RefinedReport(Report):
    """The report of :class:`jtrees.Refined`. Losses are on the held-out rows or the validation set, on scaled targets.

    Attributes:
      refined: whether the model consists of the jointly trained trees.
      boosted_loss: the loss of boosting.
      losses: the loss at every evaluation of the joint training, ``(evaluations,)``.
      base: the report of boosting.
    """

    refined: bool
    boosted_loss: float
    losses: np.ndarray
    base: BoostedReport


@pytree.dataclass(kw_only=True)
class Refined(Recipe):
    """Trains all trees of a boosted sum jointly. Boosting fits each tree only to the residuals of the earlier trees.

    Splits become soft: sigmoids of their scores times a sharpness, with split weights scaled to length 1. The sharpness
    rises geometrically from update to update. All splits and leaves are trained on mini-batches, on the loss of the
    whole sum. The optimiser is Adam, and the learning rate decays to 0 by a cosine schedule.

    Boosting chooses its number of rounds on held-out rows (a fifth of all rows), or on ``validation``. The same rows
    choose the number of updates: the multiple of about 50 with the lowest loss. Tables with fewer than 50 rows need
    ``validation``. If rows were held out, the last training starts from the boosted trees of all rows. It takes the
    chosen number of updates on all rows.

    The model consists of the boosted trees if joint training does not lower their loss, or if a deadline or Ctrl-C ends
    the last training. Boosting has one sum here, also in small tables.

    The model is a :class:`jtrees.SoftModel`; ``tree`` is None. The report is a :class:`jtrees.ensembles.RefinedReport`.

    Attributes:
      base: a :class:`jtrees.Boosted` with ``patience``. The default has up to 100 trees of depth 4 with linear leaves.
      epochs: number of passes over the data. None: 12, with at least 2000 and at most 7500 updates. Batches of fewer
        than 128 samples may take more updates, up to 960,000 samples in total.
      batch_size: samples in a mini-batch, at most n. The last samples of a pass that do not fill a mini-batch are
        skipped until the next shuffle.
      learning_rate: initial learning rate of Adam, for features of deviation 1/3 and outputs in units of the deviation
        of the boosted sum.
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
        kw_only=False,
        default=Boosted(GET(depth=4, leaves="linear"), rounds=100, subsample=0.5),
        metadata={"check": options.checked_base},
    )
    epochs: int | None = options.optional_count(None)
    batch_size: int = options.count(128)
    learning_rate: float = options.positive(0.001)
    first_sharpness: float = options.positive(10.0)
    last_sharpness: float = options.positive(100.0)

    def targets(self, x: Any, y: Any) -> Any:
        return options.checked_base("base", self.base).targets(x, y)

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        if not isinstance(self.base, Boosted) or self.base.patience is None:
            raise ValueError(
                f"base must be a jtrees.Boosted with patience, which holds rows out, got {quoted(self.base)}"
            )
        self.base.check(task, shape)
        self._schedule(shape[0])

    def _schedule(self, n: int) -> Schedule:
        return Schedule.of(n, self.epochs, self.batch_size, passes=_PASSES, fewest=_FEWEST)

    def scaling(self, table: Table) -> Scaling:
        return self.base.scaling(table)

    def tree_leaves(self, task: Task) -> None:
        return None

    # --- The procedure ---

    def search(self, runs: Runs) -> list[SearchResult]:
        """Boosts, then trains all trees jointly. If there is no validation set, a first training holds out rows."""
        base: Any = self.base
        boosting, validates = base.boosted(runs.using([one.base for one in runs.recipes])), runs.validation is not None
        first = [one.last if one.tried is None else one.tried for one in boosting]
        some = runs if validates else runs.on(held_out=[one.parts[0][1] for one in boosting]).watching()
        tried = self._together(some, first, [self._schedule(runs.shape[0]).steps] * len(runs))
        better = [i for i, (one, of) in enumerate(zip(tried, first, strict=True)) if one.loss < min(of.losses)]
        last = tried
        if not validates and better:
            none = [np.zeros(runs.shape[0], bool)] * len(better)
            on_all, sums = runs.select(better).on(held_out=none).watching(False), [boosting[i].last for i in better]
            counts = [first[i].best for i in better]
            found = self._together(on_all, sums, [tried[i].step for i in better], counts)
            last = [found[better.index(i)] if i in better else tried[i] for i in range(len(runs))]
        each = zip(boosting, first, tried, last, strict=True)
        return [self._result(*of_run, i in better, validates) for i, of_run in enumerate(each)]

    def _result(
        self, boosting: Any, first: Any, tried: "_Together", last: "_Together", is_better: bool, validates: bool
    ) -> SearchResult:
        """Returns the result of a run: the jointly trained trees, or the boosted trees."""
        base: Any = self.base
        result, refined = base.result(boosting, validates), is_better and (validates or last.complete)
        loss = float(min(first.losses))
        report = RefinedReport(refined=refined, boosted_loss=loss, losses=tried.losses, base=result.report)
        trials = [(trial and trial._replace(report=report), rows) for trial, rows in result.held_out]
        result = result._replace(report=report, held_out=tuple(HeldOut(*trial) for trial in trials))
        if is_better:
            result = result._replace(history=np.append(result.history, last.history))
        if not refined:
            return result
        trial = result._replace(model=tried.model, held_out=())
        held_out = tuple(HeldOut(trial, rows) for _, rows in boosting.parts)
        step = result.step + last.step
        return result._replace(model=last.model, score=last.score, step=step, held_out=held_out)

    def _together(
        self, runs: Runs, sums: list[Any], steps: list[int], counts: list[int] | None = None
    ) -> list["_Together"]:
        """Trains all trees of each sum jointly.

        Args:
          runs: the runs.
          sums: the boosted sum of each run.
          steps: the number of updates of each run.
          counts: the number of trees of each run. None: the number of rounds with the lowest loss.
        """
        base: Any = self.base
        counts = [one.best for one in sums] if counts is None else counts
        some = [one.trees[:count] for one, count in zip(sums, counts, strict=True)]
        stacked = [_padded(trees, base.rounds) for trees in some]
        states = runs.map(_begun, stacked, [one.initial for one in sums], [np.int32(len(trees)) for trees in some])
        losses = []

        def evaluated(states: Stacked, done: int) -> Stacked:
            found = runs.map(_evaluated, states, often=True)
            losses.append([float(one) for one in runs.fetch(found.map(lambda both: both[1]))])
            return found.map(lambda both: both[0])

        parts = max(1, self._schedule(runs.shape[0]).steps // _PART)
        options: Any = {"parts": parts, "between": evaluated} if runs.watches else {}
        found = runs.train(_advanced, states, steps, name=f"{type(self).__name__}, all trees", **options)
        ends = runs.fetch(runs.map(_model_of, found.states))
        of_each = np.array(losses or [[np.inf] * len(runs)]).T
        together = []
        for (model, score, step, finite), lost, history, wanted in zip(ends, of_each, found.losses, steps, strict=True):
            complete = bool(finite) and len(history) == wanted
            together.append(_Together(model, float(score), int(step), float(lost.min()), lost, history, complete))
        return together

    def finish(self, result: SearchResult, data: Data, **of_run: Any) -> Finished:
        model, report = result.model, result.report
        if not report.refined:
            trees, initial = model
            lower = np.full(initial.shape, -np.inf, initial.dtype)
            unit = _of_unit_length(jax.tree.map(np.asarray, trees))
            model = SoftTrees(unit, initial, np.asarray(_HARD, initial.dtype), lower, -lower)  # type: ignore[arg-type]
        check_finite(result)
        soft = data.scaling.restore(SoftForest(on_device(model), None, data.table.task.of_models))
        return Finished(soft, None, loss_of(result, soft, data, data.table.task), report)


class _Together(NamedTuple):
    """The result of joint training.

    Attributes:
      model: the :class:`SoftTrees` of the best evaluation, or of the last update if there was no evaluation.
      score: the loss of the model on the rows for evaluation.
      step: number of updates before the model.
      loss: the lowest loss of all evaluations.
      losses: the loss at each evaluation.
      history: loss of each update.
      complete: whether all updates were taken and were finite.
    """

    model: SoftTrees
    score: float
    step: int
    loss: float
    losses: np.ndarray
    history: np.ndarray
    complete: bool


def _padded(trees: list[ObliqueTree], count: int) -> ObliqueTree:
    """Returns stacked trees, padded with trees of zeros: one compiled program then serves all numbers of trees."""
    empty = jax.tree.map(np.zeros_like, trees[0])
    return jax.tree.map(lambda *a: np.concatenate(a), *trees, *[empty] * (count - len(trees)))


# --- Compiled functions of a run -------------------------------------------------------------------------------------


class _State(NamedTuple):
    """The state of joint training.

    Attributes:
      training: training state of the trees, with splits of unit length and outputs in units of ``unit``.
      initial: the initial outputs of the sum, ``(*k,)``.
      count: number of trees. The trees after them are padding and are not trained.
      unit: unit of the outputs of the trees, ``()``.
    """

    training: TrainState
    initial: Array
    count: Array
    unit: Array


def _begun(run: Run, trees: ObliqueTree, initial: Array, count: Array) -> _State:
    """Returns the state before the first update, from boosted trees."""
    some = jnp.arange(len(trees.bias)) < count

    def add(i: Array, outputs: Array) -> Array:
        tree = jax.tree.map(lambda a: a[i], trees)
        return outputs + tree.leaves.at(ops.hard(tree.weights, tree.bias, run.batch.x), run.batch.x)

    zero = jnp.zeros((len(run.batch.x), *initial.shape), run.batch.x.dtype)
    unit = _deviation(jax.lax.fori_loop(0, count, add, zero), run.batch.weight)
    scaled = lambda a: jnp.where(some.reshape(-1, *[1] * (a.ndim - 1)), a / unit, 0)
    params = _of_unit_length(trees).replace(leaves=jax.tree.map(scaled, trees.leaves.trainable()))
    state = training.loop.init_state(params, run.batch, key=run.key, optimizer=_optimizer(run))
    return _State(state, initial, count, unit)


def _optimizer(run: Run) -> optax.GradientTransformation:
    return optax.adam(optax.cosine_decay_schedule(run.recipe.learning_rate, _steps(run)))


def _steps(run: Run) -> int:
    return run.recipe._schedule(len(run.batch.x)).steps


def _sharpness(run: Run, step: Any) -> Array:
    """Returns the sharpness of an update."""
    first, last = run.recipe.first_sharpness, run.recipe.last_sharpness
    return first * (last / first) ** (jnp.asarray(step, jnp.float32) / _steps(run))


def _advanced(run: Run, state: _State, before: Array, count: Array, evaluates: Array) -> tuple[_State, Array, Array]:
    """Returns the state after ``count`` updates, their losses, and whether it is non-finite."""

    def loss(params: ObliqueTree, batch: Batch, *, key: Array, step: Array) -> tuple[Array, Array]:
        each = jax.vmap(lambda tree: expected(tree, batch.x, _sharpness(run, step)))(params)
        some = jnp.arange(len(each)) < state.count
        outputs = jnp.tensordot(state.unit * some.astype(each.dtype), each, 1, precision="highest")
        lost = run.task.loss_function.samples(state.initial + outputs, batch.y)
        value = losses.weighted_mean(lost, batch.weight)
        return value, value

    method = training.Method(lambda batch, *, key: None, loss, lambda params, batch: None)
    size = run.recipe._schedule(len(run.batch.x)).batch_size
    once = training.step.one_step(method, run.batch, _optimizer(run), batch_size=size)
    after, history = training.loop.advance_up_to(once, state.training, count, MOST, step=before)
    return state._replace(training=after), history.losses, ~after.finite


def _model(run: Run, state: _State, params: ObliqueTree, step: Array) -> SoftTrees:
    """Returns trees in training as a model, with output bounds from the training rows."""
    leaves = jax.tree.map(lambda a: state.unit * a, params.leaves)
    if not leaves.is_constant:
        endless = jnp.full(leaves.intercept.shape, jnp.inf, leaves.intercept.dtype)
        leaves = leaves.replace(lower=-endless, upper=endless)
    bound = jnp.full(state.initial.shape, jnp.inf, state.initial.dtype)
    model = SoftTrees(params.replace(leaves=leaves), state.initial, _sharpness(run, step), -bound, bound)
    outputs, weight = model.outputs(run.batch.x), run.batch.weight
    inside = jnp.ones(len(outputs), bool) if weight is None else weight > 0
    lower, upper = _widened(outputs, inside.reshape(-1, *[1] * (outputs.ndim - 1)), 0)
    return model.replace(lower=lower, upper=upper)


def _loss(run: Run, model: SoftTrees) -> Array:
    return losses.mean_loss(run.task.loss_function.samples(model.outputs(run.by.x), run.by.y), run.by.weight)


def _evaluated(run: Run, state: _State) -> tuple[_State, Array]:
    """Returns the state, with the current parameters as the best if their loss is lower, and their loss."""
    of = state.training
    lost = _loss(run, _model(run, state, of.params, of.step))
    lost = jnp.where(of.finite, lost, jnp.inf).astype(of.best.score.dtype)
    best = jax.tree.map(partial(jnp.where, lost < of.best.score), training.Best(of.params, lost, of.step), of.best)
    return state._replace(training=of.replace(best=best)), lost


def _model_of(run: Run, state: _State) -> tuple[SoftTrees, Array, Array, Array]:
    """Returns the best model (the last without evaluations), its loss, its step, and whether training was finite."""
    of = state.training
    evaluated = jnp.isfinite(of.best.score)
    params, step = jax.tree.map(partial(jnp.where, evaluated), (of.best.params, of.best.step), (of.params, of.step))
    model = _model(run, state, params, step)
    return model, _loss(run, model), step, of.finite


def _of_unit_length(trees: ObliqueTree) -> ObliqueTree:
    """Returns the same trees with split weights of length 1. A split without weights sends all rows to one side."""
    length = jnp.linalg.norm(trees.weights, axis=-1)
    some = length > 0
    length = jnp.where(some, length, 1)
    bias = jnp.where(some, trees.bias / length, jnp.where(trees.bias > 0, 1.0, -1.0).astype(trees.bias.dtype))
    return trees.replace(weights=trees.weights / length[..., None], bias=bias)


def _deviation(outputs: Array, weight: Array | None) -> Array:
    """Returns the standard deviation of outputs over rows (averaged over the outputs, if several), or 1 if it is 0."""
    outputs = outputs.reshape(len(outputs), -1)
    share = jnp.ones(len(outputs), outputs.dtype) if weight is None else weight
    mean = jnp.average(outputs, axis=0, weights=share)
    deviation = jnp.sqrt(jnp.average(jnp.square(outputs - mean), axis=0, weights=share)).mean()
    return jnp.where(deviation > 0, deviation, 1)


def _widened(outputs: Array, mask: Array, axis: int) -> tuple[Array, Array]:
    """Returns the range of masked outputs, extended on both sides; infinite if the mask is empty."""
    low = jnp.where(mask, outputs, jnp.inf).min(axis)
    high = jnp.where(mask, outputs, -jnp.inf).max(axis)
    margin = _MARGIN * (high - low)
    return low - margin, high + margin
