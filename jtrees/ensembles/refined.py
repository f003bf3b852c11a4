"""All trees of a boosted sum trained together, by gradients of soft routing."""

from collections.abc import Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np
import optax

from jtrees import io, leaves as kinds, losses, ops, pytree, routing, topology, training
from jtrees.data import Data
from jtrees.ensembles._boosting import Boosting, mean_loss, weight_of
from jtrees.ensembles.boosted import Boosted
from jtrees.search import Finished, Recipe, Round, Rounds, Schedule, Search, SearchResult, options
from jtrees.search.recipe import loss_of
from jtrees.soft_model import SoftModel
from jtrees.tasks import Task
from jtrees.training import Batch, TrainState
from jtrees.tree import ObliqueTree

_PART = 50  # updates from one evaluation to the next
_UPDATES = 2000  # at least, unless epochs are given
_MARGIN = 0.1  # of bounds: part of the range of the outputs for the training rows by which they are beyond it
_HARD = 1e6  # sharpness under which soft trees are as good as hard ones


# --- The model -------------------------------------------------------------------------------------------------------


@io.part
@pytree.dataclass
class SoftTrees:
    """A sum of soft trees on scaled data, clipped to little more than the range of its outputs for the training rows.

    Attributes:
      trees: splits of unit length and the trees' outputs in their leaves, with a leading axis over the trees.
      initial: what the sum starts from, ``(*k,)``.
      sharpness: factor of the scores, whose sigmoid is the probability of going right.
      lower: lower bound of the outputs, ``(*k,)``.
      upper: upper bound, likewise.
    """

    trees: ObliqueTree
    initial: Array
    sharpness: Array
    lower: Array
    upper: Array

    @property
    def params(self) -> ObliqueTree:
        """What is trained."""
        return self.trees.replace(leaves=self.trees.leaves.trainable())

    @property
    def features(self) -> int:
        """Number of features, p."""
        return self.trees.weights.shape[-1]

    def outputs(self, x: Float[Array, "n p"]) -> Float[Array, "n *k"]:
        """Returns the sum of the trees' expected outputs, within the bounds."""
        add = lambda total, tree: (total + _expected(tree, x, self.sharpness), None)
        start = jnp.broadcast_to(self.initial, (len(x), *self.initial.shape))
        return jnp.clip(jax.lax.scan(add, start, self.trees)[0], self.lower, self.upper)

    def __str__(self) -> str:
        trees, nodes = self.trees.bias.shape
        return f"trees={trees}, depth={topology.depth_of(nodes)}, features={self.features}"


@io.model
@pytree.dataclass(repr=False)
class SoftForest(SoftModel):
    """Fitted soft trees whose outputs add up, with constant or linear leaves: its network is :class:`SoftTrees`."""


def _expected(tree: ObliqueTree, x: Array, sharpness: Any) -> Array:
    """Returns the expected output of a soft tree for each row, ``(n, *k)``."""
    right = jax.nn.sigmoid(sharpness * ops.scores(tree.weights, tree.bias, x))
    outputs = tree.leaves.outputs(x)
    return routing.expected_value(right.reshape(*right.shape, *[1] * (outputs.ndim - 2)), outputs)


# --- The recipe ------------------------------------------------------------------------------------------------------


@pytree.dataclass(kw_only=True)
class Refined(Recipe):
    """Trains all trees of a boosted sum together, where boosting fitted each to what the others had left.

    Splits become soft, the sigmoids of scores (the split weights scaled to length 1) times a sharpness that rises
    geometrically from update to update. All splits and leaves are trained on mini-batches, on the loss of the whole
    sum, with Adam under a cosine decay to 0. The rows that :class:`jtrees.Boosted` chooses its number of rounds by, a
    fifth of them or ``validation``, choose the number of updates, too: that with the lowest loss of all multiples of
    50. They also choose among several learning rates or sharpnesses, each of which begins with the trees of boosting.
    Where a fifth was held out, the trees of all rows are then trained on all rows in the chosen way, up to there. The
    trees are those of boosting if that loss is not below theirs, or if a deadline or Ctrl-C ends the last training.

    The model is a :class:`jtrees.SoftModel`, or with ``hard`` a :class:`jtrees.Forest`; ``tree`` is None. The report is
    the base's, with ``refined``, whether training together lowered the loss; ``boosted_loss``, the loss of boosting on
    the rows that choose; ``refined_losses``, that of every way (row) and evaluation (column), on scaled targets;
    ``refined_candidate``, the number of the way (the row) that was chosen.

    Attributes:
      base: a :class:`jtrees.Boosted` with ``patience``, by default of 100 trees of depth 4 with linear leaves.
      epochs: passes over the data; None: enough for 2000 updates, and at least 12.
      batch_size: samples in a mini-batch, at most n.
      learning_rate: initial learning rate of Adam, or several to choose from. Features have deviation 1/3, outputs of
        the trees are in units of the deviation of the boosted sum.
      first_sharpness: sharpness of the first update; several belong to as many learning rates, or to one.
      last_sharpness: sharpness of the last update, likewise.
      hard: whether the model is the forest of hard trees; else it is the sum of soft trees of the best evaluation.

    Example:
      >>> x = np.linspace(-1, 1, 60)[:, None]
      >>> base = jtrees.GET(depth=1, starts=1, epochs=10, cart="binned", halving=False)
      >>> recipe = jtrees.Refined(jtrees.Boosted(base, rounds=5, patience=5), epochs=100)
      >>> fit = jtrees.fit(recipe, x, np.sin(3 * x[:, 0]), key=jax.random.key(0))
      >>> fit.model.predict(x).shape, bool(fit.report["refined_losses"].min() < fit.report["boosted_loss"])
      ((60,), True)
    """

    base: Recipe = pytree.field(
        kw_only=False,
        default=Boosted(Boosted().base.replace(depth=4, leaves="linear"), rounds=100, subsample=0.5),
        metadata={"check": options.checked_base},
    )
    epochs: int | None = options.optional_count(None)
    batch_size: int = options.count(128)
    learning_rate: float | Sequence[float] = options.positives(0.001)
    first_sharpness: float | Sequence[float] = options.positives(10.0)
    last_sharpness: float | Sequence[float] = options.positives(100.0)
    hard: bool = options.flag(False)

    def targets(self, x: Any, y: Any) -> Any:
        return options.checked_base("base", self.base).targets(x, y)

    def search(self, task: Task, shape: tuple[int, int]) -> Search:
        if not isinstance(self.base, Boosted) or self.base.patience is None:
            raise ValueError(f"base must be a jtrees.Boosted with patience, which holds rows out, got {self.base!r}")
        base = self.base.search(task, shape)
        schedule = Schedule.of(shape[0], self.epochs, self.batch_size, updates=_UPDATES)
        ways = Ways.of(self.learning_rate, self.first_sharpness, self.last_sharpness)
        return _Refiner(task, base, schedule, ways, self.hard).search()


# --- The search ------------------------------------------------------------------------------------------------------


class Ways(NamedTuple):
    """Ways to train all trees together, of which the best is chosen: numbers, with a leading axis over the ways.

    Attributes:
      learning_rate: initial learning rate.
      first: sharpness of the first update.
      last: sharpness of the last update.
    """

    learning_rate: Array
    first: Array
    last: Array

    @classmethod
    def of(cls, learning_rate: Any, first: Any, last: Any) -> "Ways":
        """Returns ways of numbers or of equally many.

        Raises:
          ValueError: naming an option of another length.
        """
        several = {"learning_rate": learning_rate, "first_sharpness": first, "last_sharpness": last}
        lengths = {name: len(a) for name, a in several.items() if jnp.ndim(a) and len(a) > 1}
        if len(set(lengths.values())) > 1:
            said = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise ValueError(f"learning_rate and sharpnesses must be one number each, or equally many, got {said}")
        return cls(*(jnp.broadcast_to(a, max(lengths.values(), default=1)) for a in several.values()))

    def sharpness(self, step: Any, steps: int) -> Array:
        """Returns the sharpness of an update of one way, whose numbers these are."""
        return self.first * (self.last / self.first) ** (jnp.asarray(step, jnp.float32) / steps)


class Refining(NamedTuple):
    """The state of the search.

    Attributes:
      boosting: the state of the base.
      runs: the training of all trees in each way, on the rows that were not held out or on a whole batch; then on all
        rows in the way that is chosen.
      best: the best parameters on the rows that choose, their loss and step.
      chosen: number of the way of the best parameters.
      lost: loss of boosting on these rows.
      losses: loss there of each way at each evaluation, ``(ways, evaluations)``, infinite before.
      count: number of trees; those to come are not trained.
      unit: unit of the outputs of the trees in training.
      complete: whether the last training took all its updates.
    """

    boosting: Boosting
    runs: TrainState
    best: training.Best
    chosen: Array
    lost: Array
    losses: Array
    count: Array
    unit: Array
    complete: Array


@dataclasses.dataclass(frozen=True, eq=False)
class _Refiner:
    """The functions of the search, and their options.

    Attributes:
      task: what is predicted.
      base: the search of boosting.
      schedule: number and size of the mini-batches.
      ways: how all trees are trained together.
      hard: whether the model is the forest of hard trees.
    """

    task: Task
    base: Search
    schedule: Schedule
    ways: Ways
    hard: bool

    def search(self) -> Search:
        """Returns the search."""
        rounds = self.base.rounds._replace(lengths=self.base.rounds.lengths + self.lengths * 2)
        return self.base._replace(
            rounds=rounds, init=self.init, round=self.round, result=self.result, finish=self.finish, next=self.next
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Updates of each part of a training: at most those of the longest stage of boosting, whose rounds stay."""
        part = min(_PART, max(self.base.rounds.lengths))
        whole, rest = divmod(self.schedule.steps, part)
        return (part,) * whole + ((rest,) if rest else ())

    @property
    def _count(self) -> int:
        """Number of ways."""
        return len(self.ways.first)

    def _optimizer(self, way: Ways) -> optax.GradientTransformation:
        return optax.adam(optax.cosine_decay_schedule(way.learning_rate, self.schedule.steps))  # type: ignore[arg-type]

    def _method(self, state: Refining, way: Ways) -> training.Method:
        """Returns the method, whose parameters are the trees, their leaves in the state's unit."""

        def loss(params: ObliqueTree, batch: Batch, *, key: Array, step: Array) -> tuple[Array, Array]:
            sharpness = way.sharpness(step, self.schedule.steps)
            each = jax.vmap(lambda tree: _expected(tree, batch.x, sharpness))(params)
            some = jnp.arange(len(each)) < state.count
            outputs = state.boosting.initial + jnp.tensordot(
                state.unit * some.astype(each.dtype), each, 1, precision="highest"
            )
            each = self.task.loss_function.samples(outputs, batch.y)
            value = losses.weighted_mean(each, batch.weight)
            return value, value

        return training.Method(lambda batch, *, key: None, loss, lambda params, batch: None)

    # --- The functions of the search ---

    def _runs(self, trees: ObliqueTree, batch: Batch, key: Array) -> TrainState:
        """Returns the beginning of a training, the same for each way."""
        one = training.init_state(trees, batch, key=key, optimizer=self._optimizer(_one(self.ways, 0)))
        return jax.tree.map(lambda a: jnp.broadcast_to(a, (self._count, *a.shape)), one)

    def init(self, start: Any, batch: Batch, *, key: Array) -> Refining:
        boosting = self.base.init(start, batch, key=key)
        runs = self._runs(boosting.trees.replace(leaves=boosting.trees.leaves.trainable()), batch, key)
        infinite = jnp.full((self._count, len(self.lengths)), jnp.inf, batch.x.dtype)
        one, zero = jnp.ones((), batch.x.dtype), jnp.zeros((), jnp.int32)
        best = _one(runs.best, 0)
        return Refining(boosting, runs, best, zero, infinite[0, 0], infinite, boosting.count, one, jnp.array(False))

    def round(self, at: Round, state: Refining, batch: Batch, validation: Batch | None) -> tuple[Refining, Array]:
        boosted, parts = len(self.base.rounds.lengths), len(self.lengths)

        def boost() -> tuple[Refining, Array]:
            boosting, lost = self.base.round(at, state.boosting, batch, validation)
            return state._replace(boosting=boosting), lost

        def refine() -> tuple[Refining, Array]:
            again, part = (at.stage - boosted) // parts > 0, (at.stage - boosted) % parts
            begins = (part == 0) & (at.before == 0)
            begun = jax.lax.cond(begins, lambda: self._begun(state, batch, validation, again), lambda: state)
            return self._advanced(at, begun, batch, validation, again, part)

        return jax.lax.cond(at.stage < boosted, boost, refine)

    def _begun(self, state: Refining, batch: Batch, validation: Batch | None, again: Array) -> Refining:
        """Returns the state at the beginning of a training."""
        boosting = state.boosting
        boosted = self.base.result(boosting, batch, validation)
        trees, count = boosted.model[0], boosted.extra["count"]
        if validation is None:  # the first training is of the trees of the rows that were not held out
            trees = jax.tree.map(lambda a, b: jnp.where(again, a, b), trees, boosting.tried[0])
            count = jnp.where(again, count, boosting.tried[1])
        unit = _deviation(boosting.outputs, batch.weight)
        some = jnp.arange(len(trees.bias)) < count
        scaled = lambda a: jnp.where(some.reshape(-1, *[1] * (a.ndim - 1)), a / unit, 0)
        leaves = jax.tree.map(scaled, trees.leaves.trainable())
        params = _of_unit_length(trees).replace(leaves=leaves)
        runs = self._runs(params, batch, boosting.key)
        state = state._replace(runs=runs, count=count, unit=unit, lost=boosting.losses.min(), complete=jnp.array(False))
        if validation is not None:
            return state
        best = jax.tree.map(lambda a, b: jnp.where(again, a, b), state.best, _one(runs.best, 0))
        return state._replace(best=best)

    def _advanced(
        self, at: Round, state: Refining, batch: Batch, validation: Batch | None, again: Array, part: Array
    ) -> tuple[Refining, Array]:
        """Returns the state after some updates, and their losses."""
        out, weight = state.boosting.held_out, weight_of(batch)
        rows = batch._replace(weight=weight_of(batch, out & ~again)) if validation is None else batch
        before = jnp.asarray(np.cumsum((0, *self.lengths)))[part] + at.before

        def trained(of_way: tuple[TrainState, Ways, Array]) -> tuple[TrainState, Array]:
            run, way, number = of_way
            once = training.one_step(
                self._method(state, way), rows, self._optimizer(way), batch_size=self.schedule.batch_size
            )
            # The last training is in the way that is chosen, and ends with the best evaluation.
            over = again & ((number != state.chosen) | (before >= state.best.step))
            run, history = training.advance_up_to(once, run, jnp.where(over, 0, at.count), at.most, step=before)
            return run, history.losses

        # One after the other: to share ways out among devices of a CPU ended, at times, in devices that wait for each
        # other, as they take up the results of several ways in different orders.
        numbers = jnp.arange(self._count, dtype=jnp.int32)
        runs, history = jax.lax.map(trained, (state.runs, self.ways, numbers))
        state = state._replace(runs=runs)

        def evaluated() -> Refining:
            by = validation if validation is not None else batch._replace(weight=jnp.where(out, weight, 0))

            def lost(of_way: tuple[TrainState, Ways]) -> Array:
                run, way = of_way
                loss = self._loss(self._model(run.params, state, run.step, way, batch), by)
                return jnp.where(run.finite, loss, jnp.inf)

            of_ways = jax.lax.map(lost, (runs, self.ways))
            first = jnp.argmin(of_ways).astype(jnp.int32)
            run, better = _one(runs, first), of_ways[first] < state.best.score
            now = training.Best(run.params, of_ways[first], run.step), first
            best, chosen = jax.tree.map(lambda a, b: jnp.where(better, b, a), (state.best, state.chosen), now)
            return state._replace(best=best, chosen=chosen, losses=state.losses.at[:, part].set(of_ways))

        chooses = at.last & ~again
        state = jax.lax.cond(chooses, evaluated, lambda: state)
        run = _one(runs, state.chosen)
        complete = again & run.finite & (run.step >= state.best.step)
        of_history = again | (validation is not None)
        return state._replace(complete=complete), jnp.where(of_history, history[state.chosen], training.NOT_TAKEN)

    def _loss(self, model: SoftTrees, by: Batch) -> Array:
        """Returns the loss of a model on a batch."""
        return mean_loss(self.task.loss_function, model.outputs(by.x), by.y, by.weight)

    def _is_better(self, state: Refining) -> Array:
        """Whether training together has lowered the loss."""
        return state.best.score < state.lost

    def next(self, i: Array, state: Refining, rounds: Rounds) -> Array:
        boosted, parts = len(self.base.rounds.lengths), len(self.lengths)
        first = jnp.asarray(rounds.first)
        of_base = self.base.next(i, state.boosting, rounds._replace(lengths=self.base.rounds.lengths))
        # The second training has as many updates as the best evaluation of the first was after, if there is one.
        again = i >= first[boosted + parts]
        over = again & (~self._is_better(state) | state.boosting.given | state.complete)
        return jnp.where(i < first[boosted], of_base, jnp.where(over, rounds.count, i))

    def _model(self, params: ObliqueTree, state: Refining, step: Array, way: Ways, batch: Batch) -> SoftTrees:
        """Returns trees in training as a model: hard ones with bounds of each leaf, soft ones of the sum."""
        trees = params.replace(leaves=jax.tree.map(lambda a: state.unit * a, params.leaves))
        trees = trees.replace(leaves=_bounded(trees, batch) if self.hard else _unbounded(trees.leaves))
        sharpness = jnp.asarray(_HARD if self.hard else way.sharpness(step, self.schedule.steps), batch.x.dtype)
        model = _endless(trees, state.boosting.initial, sharpness)
        if self.hard:
            return model
        outputs = model.outputs(batch.x)
        lower, upper = _widened(outputs, (weight_of(batch) > 0).reshape(-1, *[1] * (outputs.ndim - 1)), 0)
        return model.replace(lower=lower, upper=upper)

    def result(self, state: Refining, batch: Batch, validation: Batch | None) -> SearchResult:
        boosted, refined = self.base.result(state.boosting, batch, validation), self._is_better(state)
        run, way = _one((state.runs, self.ways), state.chosen)
        params, step = state.best.params, state.best.step
        if validation is None:
            params, refined = run.params, refined & state.complete
        trees, initial = boosted.model
        of_boosting = _endless(_of_unit_length(trees), initial, jnp.asarray(_HARD, batch.x.dtype))
        together = self._model(params, state, step, way, batch)
        model = jax.tree.map(lambda a, b: jnp.where(refined, a, b), together, of_boosting)
        by = batch if validation is None else validation
        score = self._loss(model, by)
        extra = {"boosted": boosted.extra, "refined": refined, "lost": state.lost, "losses": state.losses}
        extra["chosen"] = state.chosen
        return SearchResult(model, score, boosted.finite & jnp.isfinite(score), boosted.step + run.step, extra)

    def finish(self, result: SearchResult, start: Any, data: Data, **of_run: Any) -> Finished:
        extra, model = result.extra, result.model
        boosted = result._replace(model=(model.trees, model.initial), extra=extra["boosted"])
        finished = self.base.finish(boosted, start, data, **of_run)
        report = {"refined": bool(extra["refined"]), "boosted_loss": float(extra["lost"])}
        report |= {"refined_losses": np.asarray(extra["losses"]), "refined_candidate": int(extra["chosen"])}
        report = finished.report | report
        lost = float(report["refined_losses"].min()) * data.loss_unit
        held_out = finished.held_out
        if held_out is not None and report["refined"]:
            held_out = held_out._replace(loss=lost)
        if self.hard:
            return finished._replace(report=report, held_out=held_out)
        count = max(1, finished.report["rounds"])
        network = model.replace(trees=jax.tree.map(lambda a: a[:count], model.trees))
        soft = data.scaling.restore(SoftForest(network, None, data.table.task.of_models))
        return Finished(soft, None, loss_of(result, soft, data, self.task), report, held_out)


def _one(stacked: Any, i: Any) -> Any:
    """Returns the entry of number i of every array."""
    return jax.tree.map(lambda a: a[i], stacked)


def _of_unit_length(trees: ObliqueTree) -> ObliqueTree:
    """Returns the same trees with split weights of length 1; a split without weights sends all rows to one side."""
    length = jnp.linalg.norm(trees.weights, axis=-1)
    some = length > 0
    length = jnp.where(some, length, 1)
    bias = jnp.where(some, trees.bias / length, jnp.where(trees.bias > 0, 1.0, -1.0).astype(trees.bias.dtype))
    return trees.replace(weights=trees.weights / length[..., None], bias=bias)


def _deviation(outputs: Array, weight: Array | None) -> Array:
    """Returns the standard deviation of outputs over the rows, of several the mean; 1 if it is 0."""
    outputs = outputs.reshape(len(outputs), -1)
    share = jnp.ones(len(outputs), outputs.dtype) if weight is None else weight
    mean = jnp.average(outputs, axis=0, weights=share)
    deviation = jnp.sqrt(jnp.average(jnp.square(outputs - mean), axis=0, weights=share)).mean()
    return jnp.where(deviation > 0, deviation, 1)


def _endless(trees: ObliqueTree, initial: Array, sharpness: Array) -> SoftTrees:
    """Returns soft trees without bounds of their sum."""
    endless = lambda bound: jnp.full(initial.shape, bound, initial.dtype)
    return SoftTrees(trees, initial, sharpness, endless(-jnp.inf), endless(jnp.inf))


def _widened(outputs: Array, mask: Array, axis: int) -> tuple[Array, Array]:
    """Returns the range of masked outputs, extended on both sides; infinite where the mask is empty."""
    low = jnp.where(mask, outputs, jnp.inf).min(axis)
    high = jnp.where(mask, outputs, -jnp.inf).max(axis)
    margin = _MARGIN * (high - low)
    return low - margin, high + margin


def _unbounded(leaves: Any) -> Any:
    """Returns leaves of the structure of bounded ones."""
    if not isinstance(leaves, kinds.Linear):
        return leaves
    endless = lambda bound: jnp.full(leaves.intercept.shape, bound, leaves.intercept.dtype)
    return leaves.replace(lower=endless(-jnp.inf), upper=endless(jnp.inf))


def _bounded(trees: ObliqueTree, batch: Batch) -> Any:
    """Returns the leaves of hard trees, linear ones bounded by what they give for the rows that reach them; those that
    no row reaches by their intercepts.
    """
    if not isinstance(trees.leaves, kinds.Linear):
        return trees.leaves
    real = weight_of(batch) > 0

    def one(tree: ObliqueTree) -> Any:
        leaf, leaves = ops.hard(tree.weights, tree.bias, batch.x), tree.leaves
        inside = (leaf == jnp.arange(len(leaves.intercept))[:, None]) & real
        outputs = leaves.outputs(batch.x)
        lower, upper = _widened(outputs, inside.reshape(*inside.shape, *[1] * (outputs.ndim - 2)), 1)
        bound = lambda value: jnp.where(jnp.isfinite(value), value, leaves.intercept)
        return leaves.replace(lower=bound(lower), upper=bound(upper))

    return jax.lax.map(one, trees)
