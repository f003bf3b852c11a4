"""The search of :class:`jtrees.Boosted`."""

import dataclasses
from functools import partial
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import leaves as kinds, losses, ops, sharding
from jtrees.data import Data
from jtrees.forest import Forest
from jtrees.search import Finished, Round, Rounds, Search, SearchResult, check_finite
from jtrees.search._precondition import drawn_rows
from jtrees.search.monitor import Monitor
from jtrees.search.recipe import HeldOut, loss_of
from jtrees.tasks import Task
from jtrees.training import NOT_TAKEN, Batch
from jtrees.tree import ObliqueTree

_FEWEST_HELD_OUT = 10  # rows that the number of rounds is chosen by


# A round fits the quadratic approximation of the loss at the current outputs F, with gradient g and curvature h:
#
#     sum_i w_i (g_i f(x_i) + h_i f(x_i)^2 / 2) = sum_i w_i h_i / 2 (f(x_i) - t_i)^2 + a constant,   t_i = -g_i / h_i,
#
# least squares with targets t and weights w h (Friedman, Hastie & Tibshirani 2000). The base finds the splits that way;
# of several outputs it has one weight, the mean of their curvatures. Leaf values are then the Newton steps of each
# output, -sum w g / (sum w h + l2), or best constants of the residuals for losses without a curvature (Friedman 2001).


class Prepared(NamedTuple):
    """What ``prepare`` returns.

    Attributes:
      start: the base's ``prepare`` for the first round.
      held_out: rows that the number of rounds is chosen by, ``(n,)``; None: it is given, or there are too few.
    """

    start: Any
    held_out: Any


class Boosting(NamedTuple):
    """The state of the search. Outputs are those of scaled targets, before the link.

    Attributes:
      key: random key.
      start: as in :class:`Prepared`.
      held_out: as in :class:`Prepared`.
      initial: the outputs that boosting starts from, ``(*k,)``.
      outputs: current outputs of the training rows, ``(n, *k)``.
      trees: the trees so far, on scaled features, ``(rounds, ...)``; those to come are zero.
      count: their number.
      tried: the trees of the rows that were not held out, and their number, once all rows are trained on.
      target: the batch of the current round.
      features: the features of the current round, ``(p,)``, 1 or 0.
      run: the state of the base.
      losses: loss after each round on the rows that choose their number, infinite before, ``(rounds,)``.
      given: whether these are a validation set.
      dropped: number of rounds without a finite tree.
    """

    key: Array
    start: Any
    held_out: Any
    initial: Array
    outputs: Array
    trees: ObliqueTree
    count: Array
    tried: tuple[ObliqueTree, Array]
    target: Batch
    features: Array
    run: Any
    losses: Array
    given: Array
    dropped: Array

    @property
    def best(self) -> Array:
        """Number of rounds with the lowest loss; all without any loss."""
        chosen = 1 + jnp.argmin(self.losses)
        return jnp.where(jnp.isfinite(self.losses).any(), chosen, len(self.losses)).astype(jnp.int32)

    def outputs_at(self, x: Array) -> Array:
        """Returns the outputs of the trees so far for other rows."""

        def add(i: Array, outputs: Array) -> Array:
            tree = jax.tree.map(lambda a: a[i], self.trees)
            return outputs + tree.leaves.at(ops.hard(tree.weights, tree.bias, x), x)

        return jax.lax.fori_loop(0, self.count, add, jnp.broadcast_to(self.initial, (len(x), *self.initial.shape)))


@dataclasses.dataclass(frozen=True, eq=False)
class Booster:
    """The functions of the search, and their options: those of :class:`jtrees.Boosted`.

    Attributes:
      task: what is predicted.
      base: the search for a tree.
      kind: kind of the leaves of the trees.
      features: number of features.
    """

    task: Task
    base: Search
    kind: kinds.Kind
    features: int
    rounds: int
    learning_rate: Any
    subsample: float
    columns: float
    l2: Any
    patience: int | None

    def search(self) -> Search:
        """Returns the search."""
        lengths, trial = self.base.rounds.lengths * self.rounds, self.stages * self.rounds if self.chooses else 0
        return self.base._replace(
            task=self.task,
            rounds=Rounds(lengths * (2 if self.chooses else 1), self.base.rounds.elements, trial),
            init=self.init,
            round=self.round,
            result=self.result,
            finish=self.finish,
            prepare=self.prepare,
            tree_leaves=None,
            next=self.next,
            closing=None,
        )

    @property
    def stages(self) -> int:
        """Number of stages of the base."""
        return len(self.base.rounds.lengths)

    @property
    def chooses(self) -> bool:
        """Whether the number of rounds is chosen, by a first run: a trial."""
        return self.patience is not None

    # --- A round ---

    @property
    def _used(self) -> int:
        """Number of features of a round."""
        return max(1, round(self.columns * self.features))

    def _begun(self, state: Boosting, batch: Batch, number: Array) -> Boosting:
        """Returns the state at the beginning of a round."""
        again = number == self.rounds if self.chooses else jnp.array(False)
        reset = lambda new, old: jnp.where(again, new, old)
        outputs = reset(jnp.broadcast_to(state.initial, state.outputs.shape), state.outputs)
        trees = jax.tree.map(lambda a: reset(0, a), state.trees)
        tried = jax.tree.map(reset, (state.trees, jnp.minimum(state.best, state.count)), state.tried)
        key, run_key = jax.random.split(jax.random.fold_in(state.key, number))
        weight = weight_of(batch, self._left_out(state, number))
        target, features = _target(self.task, self.subsample, batch, outputs, weight, key, self._used)
        run = self.base.init(state.start, target, key=run_key)
        count, dropped = reset(0, state.count), reset(0, state.dropped)
        state = state._replace(outputs=outputs, trees=trees, count=count, tried=tried, dropped=dropped)
        return state._replace(target=target, features=features, run=run)

    def _left_out(self, state: Boosting, number: Array) -> Any:
        """Returns the rows that a round is not trained on."""
        in_trial = (number < self.rounds) & ~state.given
        return False if state.held_out is None else state.held_out & in_trial

    def _stalled(self, state: Boosting) -> Array:
        """Whether the last rounds had no lower loss, so that the others do not matter."""
        return (state.count > 0) & (state.count - 1 - jnp.argmin(state.losses) >= (self.patience or 0))

    def _ended(self, state: Boosting, batch: Batch, validation: Batch | None, number: Array) -> Boosting:
        """Returns the state with the tree of a round."""
        over = self._stalled(state)
        result, weight = (
            self.base.result(state.run, state.target, None),
            weight_of(batch, self._left_out(state, number)),
        )
        tree = result.model.replace(weights=result.model.weights * state.features, leaves=state.trees.leaves)
        leaf = ops.hard(tree.weights, tree.bias, batch.x)
        fitted = self._leaves(state, batch, leaf, len(tree.bias) + 1, weight)
        outputs = state.outputs + fitted.at(leaf, batch.x)
        finite = result.finite & jnp.isfinite(outputs).all()
        tree = jax.tree.map(lambda a: jnp.where(finite, a, 0), tree.replace(leaves=fitted))
        state = state._replace(
            outputs=jnp.where(finite, outputs, state.outputs),
            trees=jax.tree.map(lambda all_, one: all_.at[state.count].set(one), state.trees, tree),
            count=state.count + 1,
            dropped=state.dropped + (~finite).astype(state.dropped.dtype),
        )
        if not self.chooses:
            return state
        lost = jnp.where(over, jnp.inf, self._chosen_by(state, batch, validation))
        if validation is None:  # the last run keeps the losses of the trial
            lost = jnp.where(number < self.rounds, lost, state.losses[state.count - 1])
        return state._replace(losses=state.losses.at[state.count - 1].set(lost))

    def _leaves(self, state: Boosting, batch: Batch, leaf: Array, leaves: int, weight: Array) -> Any:
        """Returns what the leaves of a tree add to the outputs."""
        loss = self.task.loss_function
        if self.base.tree_leaves == "linear":
            step, share = _newton(loss, state.outputs, batch.y, weight)
            empty = self.kind.empty(leaves, self.features, self.task.shape, batch.x.dtype)
            fitted = empty.refit(leaf, batch.x * state.features, step, share)
        else:
            fitted = kinds.Constant(loss.steps(leaf, state.outputs, batch.y, leaves, weight, self.l2))
        return jax.tree.map(lambda a: self.learning_rate * a, fitted)

    def _chosen_by(self, state: Boosting, batch: Batch, validation: Batch | None) -> Array:
        """Returns the loss on the validation set, or on the rows held out."""
        loss = self.task.loss_function
        if validation is not None:
            return mean_loss(loss, state.outputs_at(validation.x), validation.y, validation.weight)
        return mean_loss(loss, state.outputs, batch.y, jnp.where(state.held_out, weight_of(batch), 0))

    # --- The functions of the search ---

    def prepare(self, batch: Batch, *, key: Array, monitor: Monitor | None = None) -> Prepared:
        held_out = drawn_rows(batch, key) if self.chooses else None
        if held_out is not None and held_out.sum() < _FEWEST_HELD_OUT:
            held_out = None
        first = jax.device_get(_first_target(self.task, self.subsample, batch, key))
        return Prepared(self.base.prepare(first, key=key, monitor=monitor), held_out)

    def init(self, prepared: Prepared, batch: Batch, *, key: Array) -> Boosting:
        prepared, weight = jax.tree.map(jnp.asarray, prepared), weight_of(batch)
        initial, outputs = _initial(self.task, batch, weight)
        target, features = _target(self.task, self.subsample, batch, outputs, weight, key, self._used)
        run = self.base.init(prepared.start, target, key=key)
        splits = jax.eval_shape(lambda: self.base.result(run, target, None).model.replace(leaves=None))
        leaves = self.kind.empty(len(splits.bias) + 1, self.features, self.task.shape, batch.x.dtype)
        if self.base.tree_leaves == "linear":
            leaves = leaves.replace(lower=leaves.intercept, upper=leaves.intercept)
        tree = splits.replace(leaves=leaves)
        trees = jax.tree.map(lambda a: jnp.zeros((self.rounds, *a.shape), a.dtype), tree)
        zero = jnp.zeros((), jnp.int32)
        lost = jnp.full(self.rounds, jnp.inf, batch.x.dtype)
        start = prepared.start, prepared.held_out
        before = outputs, trees, zero, (trees, zero)
        return Boosting(key, *start, initial, *before, target, features, run, lost, zero > 0, zero)

    def round(self, at: Round, state: Boosting, batch: Batch, validation: Batch | None) -> tuple[Boosting, Array]:
        if self.chooses and validation is None and state.held_out is None:
            least = 5 * _FEWEST_HELD_OUT
            raise ValueError(f"patience must be None for fewer than {least} rows without a validation set")
        number, stage = at.stage // self.stages, at.stage % self.stages

        def trained(state: Boosting) -> tuple[Boosting, Array]:
            first, last = (stage == 0) & (at.before == 0), (stage == self.stages - 1) & at.last
            state = jax.lax.cond(first, lambda: self._begun(state, batch, number), lambda: state)
            lost = mean_loss(self.task.loss_function, state.outputs, batch.y, weight_of(batch))
            run, _ = self.base.round(at._replace(stage=stage), state.run, state.target, None)
            state = state._replace(run=run)
            state = jax.lax.cond(last, lambda: self._ended(state, batch, validation, number), lambda: state)
            return state, lost

        if self.chooses and validation is not None:  # which takes the place of the rows held out
            state, none = state._replace(given=jnp.array(True)), jnp.full((), NOT_TAKEN, batch.x.dtype)
            state, lost = jax.lax.cond(number < self.rounds, lambda: (state, none), lambda: trained(state))
        else:
            state, lost = trained(state)
        return state, jnp.where(jnp.arange(at.most) < at.count, lost, NOT_TAKEN)

    def next(self, i: Array, state: Boosting, rounds: Rounds) -> Array:
        if not self.chooses:
            return i
        first = jnp.asarray(rounds.first[:: self.stages])
        number = jnp.searchsorted(first, i, side="right") - 1
        in_trial, boundary = number < self.rounds, i == first[number]
        over = self._stalled(state)
        done = jnp.where(state.given, over & (number > self.rounds), number - self.rounds >= state.best)
        return jnp.where(
            in_trial,
            jnp.where(state.given | (over & boundary), first[self.rounds], i),
            jnp.where(done & boundary, rounds.count, i),
        )

    def result(self, state: Boosting, batch: Batch, validation: Batch | None) -> SearchResult:
        count = jnp.minimum(state.best, state.count)
        # A run on all rows that was ended has fewer trees than the one before, on rows that were not held out.
        earlier = (state.tried[1] > 0) & (count < state.best)
        choose = lambda old, new: jnp.where(earlier, old, new)
        trees, count = jax.tree.map(choose, state.tried, (state.trees, count))
        kept = jnp.arange(self.rounds) < count
        trees = jax.tree.map(lambda a: jnp.where(kept.reshape(-1, *[1] * (a.ndim - 1)), a, 0), trees)
        state = state._replace(trees=trees, count=count)
        by = batch if validation is None else validation
        score = mean_loss(self.task.loss_function, state.outputs_at(by.x), by.y, by.weight)
        extra = {"count": count, "losses": state.losses, "dropped": state.dropped}
        finite = jnp.isfinite(score) & ((state.count == 0) | (state.count > state.dropped))
        step = count * sum(self.base.rounds.lengths)
        return SearchResult((trees, state.initial), score, finite, step, extra)

    def finish(self, result: SearchResult, start: Any, data: Data, **_: Any) -> Finished:
        check_finite(result)
        count, (trees, initial) = int(result.extra["count"]), jax.device_get(result.model)
        trees = jax.tree.map(lambda a: a[: max(1, count)], trees)
        # The initial outputs are part of the first tree.
        parts = ("values",) if self.base.tree_leaves == "constant" else ("intercept", "lower", "upper")
        added = lambda a: np.concatenate([a[:1] + initial, a[1:]])
        leaves = trees.leaves.replace(**{name: added(getattr(trees.leaves, name)) for name in parts})
        forest = Forest(trees.replace(leaves=leaves), "sum", self.task.link_name).restored(data.scaling)
        report: dict[str, Any] = {"rounds": count, "dropped": int(result.extra["dropped"])}
        report["losses"] = np.asarray(result.extra["losses"])
        lost = float(report["losses"].min()) * data.loss_unit
        held_out = None
        if data.validation is None and np.isfinite(lost) and start is not None and start.held_out is not None:
            held_out = HeldOut(lost, np.asarray(start.held_out))
        return Finished(forest, None, loss_of(result, forest, data, self.task), report, held_out)


def _initial(task: Task, batch: Batch, weight: Array) -> tuple[Array, Array]:
    """Returns the outputs that boosting starts from, ``(*k,)`` and ``(n, *k)``."""
    initial = task.loss_function.initial(batch.y, weight, math.prod(task.shape))
    return initial, jnp.broadcast_to(initial, (len(batch.x), *task.shape))


def _target(
    task: Task, subsample: float, batch: Batch, outputs: Array, weight: Array, key: Array, used: int
) -> tuple[Batch, Array]:
    """Returns the rows, targets and weights of a round, and its features, 1 or 0, of which so many are used."""
    row_key, column_key = jax.random.split(key)
    rows, (n, p) = (batch.x, batch.y, outputs, weight), batch.x.shape
    if (drawn := rows_of_round(n, subsample)) < n:  # rows of weight first, in random order
        order = jnp.argsort(jnp.where(weight > 0, jax.random.uniform(row_key, (n,)), 2))
        rows = jax.tree.map(lambda a: a[order[:drawn]], sharding.keep_rows(rows))
    features = jnp.ones(p, batch.x.dtype)
    if used < p:
        features = (jnp.argsort(jax.random.uniform(column_key, (p,))) < used).astype(batch.x.dtype)
    x, y, outputs, weight = rows
    step, share = _newton(task.loss_function, outputs, y, weight)
    inside = (weight > 0).reshape(-1, *[1] * len(task.shape))
    low = jnp.where(inside, step, jnp.inf).min(0)
    unit = jnp.where(inside, step, -jnp.inf).max(0) - low
    return Batch(x * features, (step - low) / jnp.where(unit > 0, unit, 1), share), features


@partial(jax.jit, static_argnums=(0, 1))
def _first_target(task: Task, subsample: float, batch: Batch, key: Array) -> Batch:
    """Returns the rows, targets and weights of the first round, with all features: one program, for the host."""
    weight = weight_of(batch)
    outputs = _initial(task, batch, weight)[1]
    return _target(task, subsample, batch, outputs, weight, key, batch.x.shape[1])[0]


def rows_of_round(n: int, subsample: float) -> int:
    """Returns the number of rows of a round, of n rows."""
    return max(1, round(subsample * n))


def weight_of(batch: Batch, held_out: Any = False) -> Array:
    """Returns the weights of the rows, 0 for those held out."""
    weight = jnp.ones(len(batch.x), batch.x.dtype) if batch.weight is None else batch.weight
    return jnp.where(held_out, 0, weight)


def _newton(loss: losses.Loss, outputs: Array, y: Array, weight: Array) -> tuple[Array, Array]:
    """Returns the Newton steps of the outputs, and weights of mean 1 with the curvatures as factors."""
    step, curvature = loss.newton(outputs, y)
    weight = weight * curvature.reshape(len(step), -1).mean(1)
    return step, weight / jnp.maximum(weight.mean(), jnp.finfo(weight.dtype).tiny)


def mean_loss(loss: losses.Loss, outputs: Array, y: Array, weight: Array | None) -> Array:
    """Returns the weighted mean loss of outputs."""
    each = loss.samples(outputs, y)
    return each.mean() if weight is None else (weight * each).sum() / weight.sum()
