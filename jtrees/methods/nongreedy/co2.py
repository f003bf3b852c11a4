"""CO2: oblique splits learnt greedily, level by level, by the bound of a tree of depth one (Norouzi, Collins, Fleet and
Kohli, "CO2 Forest", 2015): what non-greedy trees begin from (Norouzi et al., NeurIPS 2015).
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np
import optax

from jtrees import ops, routing, topology, training
from jtrees.data import Data, without_padding
from jtrees.methods.nongreedy import splitting
from jtrees.methods.nongreedy.splitting import Thresholds
from jtrees.methods.nongreedy.surrogate import MAX_DEPTH, Surrogate, flip_slope, surrogate_step, with_leaves
from jtrees.search import Finished, Recipe, Rounds, Schedule, Search, SearchResult, evaluated, finished_tree, options
from jtrees.tasks import Classification, Task
from jtrees.training import Batch, LazyMomentumState, TrainState
from jtrees.tree import ObliqueTree

# A split is pushed away from a sample that is on the side which suits it (the other leaf would lose it more) if that
# sample is near: ``2 |score| < loss there - loss here``. An axis-aligned split as long as the ball allows may have no
# sample so near, above all where features have few values, and would stay as it is for ever. So it begins at the length
# at which this part of its suited samples push it; of 0.1, 0.3 and 0.6, tried on four sets, none is the best on all.
_PUSHING = 0.3
# The learning rate, unless it is given: a step moves the score of a sample by the rate times its squared norm, which is
# the number of features, on average. Of rates tried on eight sets of 8 to 784 features these are the best or nearly so.
_RATE, _RATE_OF_SCORES = 0.5, 8.0


@struct.dataclass
class Growing:
    """The state of a greedy tree that grows level by level.

    Attributes:
      run: of the level that grows: the tree, its velocity, the order of samples.
      level: which that is.
      place: the node of that level where each sample is.
      axis: the axis-aligned splits that the nodes of the level began with, ``(leaves / 2,)``.
      length: the norms that these began with, bias included.
      edges: of the bins of each feature, ``(p, bins - 1)``.
    """

    run: TrainState
    level: Int[Array, ""]
    place: Int[Array, " n"]
    axis: Thresholds
    length: Float[Array, " half"]
    edges: Float[Array, "p bins"]


@dataclasses.dataclass(frozen=True)
class Greedy:
    """Greedy growth: pure functions for one task, with the options that they share.

    Attributes:
      depth: of the tree.
      task: what is predicted.
      nu: squared radius of the ball of a split.
      momentum: of the steps.
      learning_rate: at the start of each level; it falls to zero.
      level: the schedule of a level.
    """

    depth: int
    task: Task
    nu: Any
    momentum: Any
    learning_rate: Any
    level: Schedule

    @property
    def steps(self) -> int:
        """Steps on all levels."""
        return self.depth * self.level.steps

    def rate(self, steps: int) -> Callable[[Any], Any]:
        """The learning rate that falls to zero in so many steps."""
        share = optax.cosine_decay_schedule(1.0, steps)
        return lambda count: self.learning_rate * share(count)

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """Of a level."""
        return training.lazy_momentum(self.rate(self.level.steps), self.momentum)

    def standardised(self, batch: Batch) -> Batch:
        """Targets in units of their deviation, so that losses are as large for all data."""
        if isinstance(self.task, Classification):
            return batch
        weight = _weight(batch)
        mean = jnp.tensordot(weight, batch.y, 1, precision="highest") / weight.sum()
        variance = jnp.tensordot(weight, jnp.square(batch.y - mean), 1, precision="highest") / weight.sum()
        deviation = jnp.sqrt(jnp.maximum(variance, jnp.finfo(variance.dtype).tiny))
        return batch._replace(y=(batch.y - mean) / deviation)

    def init(self, edges: Array, batch: Batch, *, key: Array) -> Growing:
        """The first level, with its axis-aligned splits; ``edges`` are those of the bins."""
        n, p = batch.x.shape
        nodes, root = topology.num_nodes(self.depth), jnp.zeros(n, jnp.int32)
        splits = ObliqueTree(jnp.zeros((nodes, p), batch.x.dtype), jnp.full(nodes, -1, batch.x.dtype), None)
        data = self.standardised(batch)
        tree = with_leaves(splits, root, data, self.task)
        run = training.init_state(tree, data, key=key, optimizer=self.optimizer)
        return self._init_level(run, root[0], root, jnp.asarray(edges), batch)

    def step(self, state: Growing, step: Array, data: Batch, batch: Batch) -> tuple[Growing, Array]:
        """A step on the level, the first of a level after what begins it, and the surrogate loss before it.

        Args:
          state: of the growth.
          step: its number, over all levels.
          data: the batch, standardised.
          batch: scaled data.
        """
        n = len(batch.x)
        begins = (step > 0) & (step % self.level.steps == 0)
        state = training.apply_in_place_if(begins, lambda state: self._next_level(state, batch), state)
        data = data._replace(y=(data.y, state.place))
        of: Any = {"task": self.task, "momentum": self.momentum}
        update = stump_step(self.depth, state.level, self.nu, rate=self.rate(self.level.steps), **of)
        once = training.one_step(update, data, self.optimizer, batch_size=min(self.level.batch_size, n))
        run, (lost, _) = once(state.run.replace(step=jnp.asarray(step, jnp.int32)))
        return state.replace(run=run), lost

    def _next_level(self, state: Growing, batch: Batch) -> Growing:
        tree, place = self.finished_level(state, batch)
        return self._init_level(state.run.replace(params=tree), state.level + 1, place, state.edges, batch)

    def _init_level(self, run: TrainState, level: Array, place: Array, edges: Array, batch: Batch) -> Growing:
        """A level whose nodes have their axis-aligned splits, and two leaves each."""
        half, local = topology.num_leaves(self.depth) // 2, place - _first(level)
        statistics, impurity = self._statistics(batch)
        axis = splitting.best_thresholds(batch.x, edges, statistics, local, half, impurity)
        right = _goes_right(axis, batch.x, local)
        own, other = leaf_below(2 * place + 1 + jnp.stack([right, 1 - right]), level + 1, self.depth)
        data = self.standardised(batch)
        tree = with_leaves(run.params, own, data, self.task)
        lost = lambda leaf: self.task.loss(tree.leaves.values[leaf], data.y)
        length = _lengths(axis, batch.x, local, lost(other) - lost(own), _weight(batch))
        length = jnp.minimum(length, jnp.sqrt(self.nu))
        tree = _with_rows(tree, _rows(level, half), _axis_rows(axis, length, batch.x.shape[1]))
        return Growing(self.at_rest(run, tree), level, place, axis, length, edges)

    def at_rest(self, run: TrainState, tree: Any) -> TrainState:
        """The run with another tree, and no velocity."""
        return run.replace(params=tree, opt_state=self.optimizer.init(tree))

    def finished_level(self, state: Growing, batch: Batch) -> tuple[ObliqueTree, Array]:
        """The tree with the better of its two splits in each node of the level, and the nodes below where samples
        are.
        """
        tree, place = state.run.params, state.place
        half, local = topology.num_leaves(self.depth) // 2, place - _first(state.level)
        own = routing.scores_at(tree.weights, tree.bias, batch.x, place[None])[0]
        trained = (own > 0).astype(jnp.int32)
        began = _goes_right(state.axis, batch.x, local)
        statistics, impurity = self._statistics(batch)

        def left_over(right: Array) -> Array:
            held = jax.ops.segment_sum(statistics, 2 * local + right, 2 * half)
            return topology.pairs(impurity(held)).sum(1)

        better, rows = left_over(trained) < left_over(began), _rows(state.level, half)
        now = jax.tree.map(lambda a: a.at[rows].get(mode="fill", fill_value=0), (tree.weights, tree.bias))
        axis = _axis_rows(state.axis, state.length, batch.x.shape[1])
        kept = jnp.where(better[:, None], now[0], axis[0]), jnp.where(better, now[1], axis[1])
        below = 2 * place + 1 + jnp.where(better[local], trained, began)
        return _with_rows(tree, rows, kept), below

    def _statistics(self, batch: Batch) -> tuple[Array, splitting.Impurity]:
        if isinstance(self.task, Classification):
            return splitting.class_statistics(batch.y, _weight(batch), self.task.classes), splitting.entropy
        targets = self.standardised(batch).y
        return splitting.target_statistics(targets, _weight(batch)), splitting.squared_deviation

    # --- The result ---

    def evaluate(self, tree: ObliqueTree, batch: Batch, validation: Batch | None) -> Array:
        """The loss of the tree with leaves set from the batch, on a validation set or else on the batch."""
        tree = with_leaves(tree, ops.hard(tree.weights, tree.bias, batch.x), batch, self.task)
        by = batch if validation is None else validation
        return evaluated(self.task, tree.leaves.values[ops.hard(tree.weights, tree.bias, by.x)], by)

    def result(self, tree: ObliqueTree, run: TrainState, batch: Batch, validation: Batch | None) -> SearchResult:
        """The tree with its leaves refitted."""
        score = self.evaluate(tree, batch, validation)
        return SearchResult(tree.refit(*batch), score, run.finite & jnp.isfinite(score), run.step)

    def finish(self, result: SearchResult, start: Any, data: Data, **_: Any) -> Finished:
        """The tree in the user's units; the report has the number of leaves that training rows reach, too."""
        done = finished_tree(result, data, self.task)
        active = len(np.unique(done.model.leaf_index(data.table.x)))
        return done._replace(report=done.report | {"active_leaves": active})


def _weight(batch: Batch) -> Array:
    return jnp.ones(len(batch.x), batch.x.dtype) if batch.weight is None else batch.weight


def stepwise(step: Callable[..., tuple[Any, Array]], greedy: Greedy) -> Callable[..., tuple[Any, Array]]:
    """The ``round`` of a search from one step, ``(state, number, data, batch, validation) -> (state, loss)``."""

    def one_round(i: Array, state: Any, batch: Batch, validation: Batch | None, rounds: Rounds) -> tuple[Any, Array]:
        data = greedy.standardised(batch)

        def body(j: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
            state, history = carry
            state, lost = step(state, rounds.steps_before(i) + j, data, batch, validation)
            return state, history.at[j].set(lost)

        empty = jnp.full(rounds.size, jnp.nan, batch.x.dtype)
        return jax.lax.fori_loop(0, rounds.steps_in(i), body, (state, empty))

    return one_round


def rate_of(learning_rate: Any, p: int) -> Any:
    """The learning rate, by default the one for p features."""
    return min(_RATE, _RATE_OF_SCORES / p) if learning_rate is None else learning_rate


def edges(bins: int) -> Callable[..., np.ndarray]:
    """The ``prepare`` of a search: edges of so many bins of each feature."""
    return lambda batch, *, key: splitting.edges_of(np.asarray(without_padding(batch).x), bins)


@struct.dataclass(kw_only=True)
class CO2(Recipe):
    """CO2: a greedy oblique tree, all nodes of a level side by side.

    From the root down, each node begins with the axis-aligned split of the greatest information gain (of targets: the
    greatest fall of the squared deviation) on the samples that reach it. Then stochastic gradient descent on the
    surrogate loss of a tree of depth one, whose two leaves the node has to itself; rows of splits stay in the ball
    ``|w|^2 <= nu``, bias included. A split is kept if its gain is greater than that of the one it began with. The
    learning rate falls to zero on each level. At the end leaves get their means or smoothed class frequencies.

    Features and targets are scaled to mean 0 and deviation 1, so that nu means much the same for all data. The report
    has ``reached``, the number of internal nodes that at least one training sample reaches, and ``active_leaves``, that
    of leaves.

    Attributes:
      depth: depth of the tree, 1 to 20.
      epochs: passes over the data for each level; None: as many as make 2000 updates, and at least 12.
      batch_size: samples in a mini-batch; n if that is less. Those left over in a pass rest until the next.
      learning_rate: at the start; None: 0.5, or 8 over the number of features where that is less.
      nu: squared radius of the ball, above 0.
      momentum: of the steps, 0 up to but not including 1 (see :func:`jtrees.training.lazy_momentum`).
      bins: number of bins of a feature, between which axis-aligned splits are looked for.
    """

    depth: int = options.depth(8, MAX_DEPTH)
    epochs: int | None = options.optional_count(10)
    batch_size: int = options.count(128)
    learning_rate: float | None = options.optional_positive()
    nu: float = options.positive(100.0)
    momentum: float = options.part(0.9)
    bins: int = options.count(32, minimum=2)

    def search(self, task: Task, shape: tuple[int, int]) -> Search:
        level, rate = Schedule.of(shape[0], self.epochs, self.batch_size), rate_of(self.learning_rate, shape[1])
        greedy = Greedy(self.depth, task, self.nu, self.momentum, rate, level)

        def step(state: Growing, step: Array, data: Batch, batch: Batch, validation: Any) -> tuple[Growing, Array]:
            return greedy.step(state, step, data, batch)

        def result(state: Growing, batch: Batch, validation: Batch | None) -> SearchResult:
            return greedy.result(greedy.finished_level(state, batch)[0], state.run, batch, validation)

        return Search(
            task=task,
            rounds=Rounds(greedy.steps, level.batch_size * 2 * shape[1]),
            init=greedy.init,
            round=stepwise(step, greedy),
            result=result,
            finish=greedy.finish,
            prepare=edges(self.bins),
            yields_constant_tree=True,
        )


# --- Levels ----------------------------------------------------------------------------------------------------------


def leaf_below(node: Array, level: Array, depth: int) -> Array:
    """The leftmost leaf below nodes of a level: it stands for the leaf that they are while the tree ends there."""
    return (node - _first(level)) << (depth - level)


def _first(level: Array) -> Array:
    return (1 << level) - 1


def _rows(level: Array, half: int) -> Array:
    """The nodes of a level, of the deepest ``half``; those of levels that have fewer are filled up beyond all nodes."""
    local = jnp.arange(half)
    return jnp.where(local <= _first(level), _first(level) + local, 2 * half)


def _with_rows(tree: ObliqueTree, rows: Array, new: tuple[Array, Array]) -> ObliqueTree:
    weights, bias = (a.at[rows].set(b, mode="drop") for a, b in zip((tree.weights, tree.bias), new, strict=True))
    return tree.replace(weights=weights, bias=bias)


def _goes_right(axis: Thresholds, x: Array, local: Array) -> Array:
    """Whether each sample goes right at the split that its node begins with, 0 or 1."""
    own = jnp.take_along_axis(x, axis.feature[local][:, None], axis=1)[:, 0]
    return ((axis.gain[local] > 0) & (own > axis.threshold[local])).astype(jnp.int32)


def _lengths(axis: Thresholds, x: Array, local: Array, suits: Array, weight: Array) -> Float[Array, " half"]:
    """The norm, bias included, at which axis-aligned splits are pushed by a part of their samples; infinite where no
    sample is suited. ``suits`` says by how much the other leaf would lose each sample more.
    """
    threshold, total = axis.threshold[local], lambda of: jax.ops.segment_sum(of, local, len(axis.gain))
    own = jnp.take_along_axis(x, axis.feature[local][:, None], axis=1)[:, 0]
    # Score at length 1, of which up to ``suits / 2`` is near.
    score = jnp.abs(own - threshold) / jnp.sqrt(1 + jnp.square(threshold))
    suited = (suits > 0) & (weight > 0)
    longest = jnp.where(suited, suits / (2 * score), 0)
    # Node by node, in front the samples that push the longest splits; of the weight of a node's suited samples the part
    # lies in front of one, whose own is the length.
    order = jnp.lexsort((-longest, local))
    node, rows = local[order], total(jnp.ones_like(local))
    first, sums = rows.cumsum() - rows, jnp.where(suited, weight, 0)[order].cumsum()
    before = jnp.where(first > 0, sums[first - 1], 0)
    part = sums - before[node] <= _PUSHING * total(jnp.where(suited, weight, 0))[node]
    at = first + jax.ops.segment_sum(part.astype(first.dtype), node, len(first))
    # A little less than the length of that sample, at which rounding would decide whether it pushes.
    length = 0.999 * longest[order][jnp.minimum(at, len(x) - 1)]
    return jnp.where(total(suited.astype(jnp.int32)) > 0, length, jnp.inf)


def _axis_rows(axis: Thresholds, length: Array, p: int) -> tuple[Array, Array]:
    """Axis-aligned splits of these norms; one that divides nothing sends all to the left."""
    divides = axis.gain > 0
    threshold = jnp.where(divides, axis.threshold, 1)
    size = length / jnp.sqrt(jnp.where(divides, 1 + jnp.square(threshold), 1))
    weights = jnp.where(divides, size, 0)[:, None] * jax.nn.one_hot(axis.feature, p, dtype=threshold.dtype)
    return weights.astype(threshold.dtype), (-size * threshold).astype(threshold.dtype)


def stump_step(
    depth: int,
    level: Int[Array, ""],
    nu: Any,
    *,
    task: Task,
    rate: Callable[[Any], Any],
    momentum: Any,
) -> Callable[..., Any]:
    """The step (``update`` of a :class:`jtrees.Method`) for one level of a tree, each of its nodes a tree of depth one;
    ``y`` are targets and nodes.

    Args:
      depth: of the whole tree.
      level: which, traced.
      nu: squared radius of the ball.
      task: what is predicted.
      rate: learning rate at a step of the level.
      momentum: of the steps.
    """

    def surrogate(params: ObliqueTree, batch: Batch) -> Surrogate:
        y, node = batch.y
        own = routing.scores_at(params.weights, params.bias, batch.x, node[None])
        right = (own[0] > 0).astype(jnp.int32)
        here, there = leaf_below(2 * node + 1 + jnp.stack([right, 1 - right]), level + 1, depth)
        reached, flipped = (task.loss(params.leaves.values[leaf], y) for leaf in (here, there))
        turned = flipped - 2 * jnp.abs(own[0]) > reached
        slopes = jnp.where(turned, flip_slope(own), 0)
        return Surrogate(jnp.where(turned, there, here), node[None], own, slopes, reached)

    def update(
        params: ObliqueTree, state: LazyMomentumState, batch: Batch, *, key: Array, step: Array
    ) -> tuple[ObliqueTree, LazyMomentumState, tuple[Array, Array]]:
        found, batch = surrogate(params, batch), batch._replace(y=batch.y[0])
        of: Any = {"rate": rate(state.count), "decay": momentum, "nu": nu, "task": task}
        return surrogate_step(params, state, batch, found, **of)

    return update
