"""CO2: oblique splits learnt greedily, level by level, by the bound of a tree of depth one (Norouzi, Collins, Fleet and
Kohli, "CO2 Forest", 2015): what non-greedy trees begin from (Norouzi et al., NeurIPS 2015).
"""

from collections.abc import Callable
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np
import optax

from jtrees import ops, routing, splitting, topology, training, validation as checks
from jtrees.methods.bound import MAX_DEPTH, Bound, against, descended, with_leaves
from jtrees.methods.lazy_momentum import LazyMomentumState, lazy_momentum
from jtrees.methods.one_run import OneRun, fit_of_tree
from jtrees.recipes import Fit, Found, Rounds, Watch, number, static
from jtrees.splitting import Thresholds
from jtrees.table import Scale, Table
from jtrees.tasks import Classification, Task
from jtrees.training import Batch, TrainState
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
    """The state of a greedy search.

    Attributes:
      run: of the level that grows: the tree, its velocity, the order of samples.
      level: which that is.
      place: the node of that level where each sample is.
      begun: the axis-aligned splits that the nodes of the level began with, ``(leaves / 2,)``.
      length: the norms that these began with, bias included.
      edges: of the bins of each feature, ``(p, bins - 1)``.
    """

    run: TrainState
    level: Int[Array, ""]
    place: Int[Array, " n"]
    begun: Thresholds
    length: Float[Array, " half"]
    edges: Float[Array, "p bins"]


@struct.dataclass(kw_only=True)
class CO2(OneRun):
    """CO2: a greedy oblique tree, all nodes of a level side by side.

    From the root down, each node begins with the axis-aligned split of the greatest information gain (of targets: the
    greatest fall of the squared deviation) on the samples that reach it. Then stochastic gradient descent on the bound
    of a tree of depth one, whose two leaves the node has to itself; rows of splits stay in the ball ``|w|^2 <= nu``,
    bias included. A split is kept if its gain is greater than that of the one it began with. The learning rate falls to
    zero on each level. At the end leaves get their means or smoothed class frequencies.

    Features and targets are scaled to mean 0 and deviation 1, so that nu means much the same for all data.

    The report has ``reached``, the number of internal nodes that at least one training sample reaches, and
    ``active_leaves``, that of leaves. See :class:`OneRun` for the options that it shares with others.

    Attributes:
      depth: depth of the tree, 1 to 20.
      epochs: passes over the data for each level.
      learning_rate: at the start; None: 0.5, or 8 over the number of features where that is less.
      nu: squared radius of the ball, above 0.
      momentum: of the steps, 0 up to but not including 1 (see :func:`jtrees.lazy_momentum`).
      bins: number of bins of a feature, between which axis-aligned splits are looked for.
    """

    depth: int = static(default=8)
    epochs: int | None = static(default=10)
    learning_rate: float | None = None
    nu: float = 100.0
    momentum: float = 0.9
    bins: int = static(default=32)

    def ends_in_constants(self) -> bool:
        return True

    def checked(self, table: Table) -> Any:
        rate = min(_RATE, _RATE_OF_SCORES / table.x.shape[1]) if self.learning_rate is None else self.learning_rate
        recipe = super(CO2, self.replace(learning_rate=rate)).checked(table)
        return recipe.replace(
            depth=checks.check_depth(self.depth, MAX_DEPTH),
            nu=number("nu", self.nu, checks.check_number),
            momentum=number("momentum", self.momentum, checks.check_part),
            bins=checks.check_count("bins", self.bins, minimum=2),
        )

    def level_steps(self, n: int) -> int:
        """Steps on a level, for n samples."""
        return super().updates(n)

    def updates(self, n: int) -> int:
        return self.depth * self.level_steps(n)

    def prepare(self, table: Table, *, key: Array) -> np.ndarray:
        return splitting.edges_of(np.asarray(table.real().x), self.bins)

    def work(self, p: int) -> int:
        return 2 * p

    def steps_by(self, n: int) -> optax.GradientTransformation:
        """The optimiser of a level, for n samples."""
        return lazy_momentum(self.rate(self.level_steps(n)), self.momentum)

    def rate(self, steps: int) -> Callable[[Any], Any]:
        """The learning rate that falls to zero in so many steps."""
        first: Any = self.learning_rate  # a number once the recipe is checked
        share = optax.cosine_decay_schedule(1.0, steps)
        return lambda count: first * share(count)

    def batch(self, table: Table) -> Batch:
        """What is trained on: targets in units of their deviation, so that losses are as large for all data."""
        if isinstance(table.task, Classification):
            return table.batch
        weight = self._weight(table)
        mean = jnp.tensordot(weight, table.y, 1, precision="highest") / weight.sum()
        variance = jnp.tensordot(weight, jnp.square(table.y - mean), 1, precision="highest") / weight.sum()
        deviation = jnp.sqrt(jnp.maximum(variance, jnp.finfo(variance.dtype).tiny))
        return table.batch._replace(y=(table.y - mean) / deviation)

    def _weight(self, table: Table) -> Array:
        return jnp.ones(len(table.x), table.x.dtype) if table.weight is None else table.weight

    # --- The search ---

    def begin(self, start: Array, table: Table, *, key: Array) -> Any:
        n, p = table.x.shape
        nodes, root = topology.num_nodes(self.depth), jnp.zeros(n, jnp.int32)
        splits = ObliqueTree(jnp.zeros((nodes, p), table.x.dtype), jnp.full(nodes, -1, table.x.dtype), None)
        tree = with_leaves(splits, root, self.batch(table), table.task)
        run = training.begun(tree, self.batch(table), key=key, optimizer=self.steps_by(n))
        return self._level_begun(run, root[0], root, jnp.asarray(start), table)

    def round(self, i: Array, state: Any, table: Table, judge: Table | None, rounds: Rounds) -> tuple[Any, Array]:
        data = self.batch(table)

        def body(j: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
            state, history = carry
            state, lost = self.step(state, rounds.before(i) + j, data, table, judge)
            return state, history.at[j].set(lost)

        empty = jnp.full(rounds.size, jnp.nan, table.x.dtype)
        return jax.lax.fori_loop(0, rounds.within(i), body, (state, empty))

    def step(self, state: Any, step: Array, data: Batch, table: Table, judge: Table | None) -> tuple[Any, Array]:
        """The search after this step on data, made of the table, and the bound before it."""
        return self.greedy_step(state, step, data, table)

    def greedy_step(self, state: Growing, step: Array, data: Batch, table: Table) -> tuple[Growing, Array]:
        """A step on the level, the first of a level after what begins it."""
        n = len(table.x)
        begins = (step > 0) & (step % self.level_steps(n) == 0)
        state = training.only_if(begins, lambda state: self._next_level(state, table), state)
        data = data._replace(y=(data.y, state.place))
        of: Any = {"task": table.task, "momentum": self.momentum}
        method = stumps(self.depth, state.level, self.nu, rate=self.rate(self.level_steps(n)), **of)
        once = training.one_step(method, data, self.steps_by(n), batch_size=min(self.batch_size, n))
        run, (lost, _) = once(state.run.replace(step=jnp.asarray(step, jnp.int32)))
        return state.replace(run=run), lost

    def _next_level(self, state: Growing, table: Table) -> Growing:
        tree, place = self.level_ended(state, table)
        return self._level_begun(state.run.replace(params=tree), state.level + 1, place, state.edges, table)

    def _level_begun(self, run: TrainState, level: Array, place: Array, edges: Array, table: Table) -> Growing:
        """A level whose nodes have their axis-aligned splits, and two leaves each."""
        half, local = topology.num_leaves(self.depth) // 2, place - _first(level)
        begun = splitting.best_thresholds(table.x, edges, self._statistics(table), local, half, self._impurity(table))
        right = _goes_right(begun, table.x, local)
        here, there = leaf_below(2 * place + 1 + jnp.stack([right, 1 - right]), level + 1, self.depth)
        data = self.batch(table)
        tree = with_leaves(run.params, here, data, table.task)
        lost = lambda leaf: table.task.loss(tree.leaves.values[leaf], data.y)
        length = _lengths(begun, table.x, local, lost(there) - lost(here), self._weight(table))
        length = jnp.minimum(length, jnp.sqrt(self.nu))
        tree = _with_rows(tree, _rows(level, half), _axis_rows(begun, length, table.x.shape[1]))
        return Growing(self.at_rest(run, tree), level, place, begun, length, edges)

    def at_rest(self, run: TrainState, tree: Any) -> TrainState:
        """The run with another tree, and no velocity."""
        return run.replace(params=tree, opt_state=self.steps_by(len(run.order)).init(tree))

    def level_ended(self, state: Growing, table: Table) -> tuple[ObliqueTree, Array]:
        """The tree with the better of its two splits in each node of the level, and the nodes below where samples
        are.
        """
        tree, place = state.run.params, state.place
        half, local = topology.num_leaves(self.depth) // 2, place - _first(state.level)
        own = routing.scores_at(tree.weights, tree.bias, table.x, place[None])[0]
        trained = (own > 0).astype(jnp.int32)
        began = _goes_right(state.begun, table.x, local)
        statistics, impurity = self._statistics(table), self._impurity(table)

        def left_over(right: Array) -> Array:
            held = jax.ops.segment_sum(statistics, 2 * local + right, 2 * half)
            return topology.pairs(impurity(held)).sum(1)

        better, rows = left_over(trained) < left_over(began), _rows(state.level, half)
        now = jax.tree.map(lambda a: a.at[rows].get(mode="fill", fill_value=0), (tree.weights, tree.bias))
        axis = _axis_rows(state.begun, state.length, table.x.shape[1])
        kept = jnp.where(better[:, None], now[0], axis[0]), jnp.where(better, now[1], axis[1])
        below = 2 * place + 1 + jnp.where(better[local], trained, began)
        return _with_rows(tree, rows, kept), below

    def _statistics(self, table: Table) -> Array:
        if isinstance(table.task, Classification):
            return splitting.class_statistics(table.y, self._weight(table), table.task.classes)
        return splitting.target_statistics(self.batch(table).y, self._weight(table))

    def _impurity(self, table: Table) -> splitting.Impurity:
        return splitting.entropy if isinstance(table.task, Classification) else splitting.squared_deviation

    # --- What is found ---

    def answers(self, params: ObliqueTree, table: Table, x: Array) -> Array:
        tree = with_leaves(params, ops.hard(params.weights, params.bias, table.x), table.batch, table.task)
        return tree.leaves.values[ops.hard(tree.weights, tree.bias, x)]

    def end(self, state: Growing, table: Table, judge: Table | None) -> Found:
        tree, _ = self.level_ended(state, table)
        return self.found(tree, state.run, table, judge)

    def found(self, tree: ObliqueTree, run: TrainState, table: Table, judge: Table | None) -> Found:
        """What a search ends in, its leaves refitted."""
        score = self.judged(tree, table, judge)
        return Found(tree.refit(*table.batch), score, run.finite & jnp.isfinite(score), run.step)

    def finish(
        self, found: Found, start: Any, table: Table, judge: Table | None, *, scale: Scale, key: Array, watch: Watch
    ) -> Fit:
        fit = fit_of_tree(found, table, judge, scale)
        active = len(np.unique(fit.tree.leaf_index(table.x)))
        return fit.replace(report=fit.report | {"active_leaves": active})


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


def _goes_right(begun: Thresholds, x: Array, local: Array) -> Array:
    """Whether each sample goes right at the split that its node begins with, 0 or 1."""
    own = jnp.take_along_axis(x, begun.feature[local][:, None], axis=1)[:, 0]
    return ((begun.gain[local] > 0) & (own > begun.threshold[local])).astype(jnp.int32)


def _lengths(begun: Thresholds, x: Array, local: Array, suits: Array, weight: Array) -> Float[Array, " half"]:
    """The norm, bias included, at which axis-aligned splits are pushed by a part of their samples; infinite where no
    sample is suited. ``suits`` says by how much the other leaf would lose each sample more.
    """
    threshold, total = begun.threshold[local], lambda of: jax.ops.segment_sum(of, local, len(begun.gain))
    own = jnp.take_along_axis(x, begun.feature[local][:, None], axis=1)[:, 0]
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


def _axis_rows(begun: Thresholds, length: Array, p: int) -> tuple[Array, Array]:
    """Axis-aligned splits of these norms; one that divides nothing sends all to the left."""
    divides = begun.gain > 0
    threshold = jnp.where(divides, begun.threshold, 1)
    size = length / jnp.sqrt(jnp.where(divides, 1 + jnp.square(threshold), 1))
    weights = jnp.where(divides, size, 0)[:, None] * jax.nn.one_hot(begun.feature, p, dtype=threshold.dtype)
    return weights.astype(threshold.dtype), (-size * threshold).astype(threshold.dtype)


def stumps(
    depth: int,
    level: Int[Array, ""],
    nu: Any,
    *,
    task: Task,
    rate: Callable[[Any], Any],
    momentum: Any,
) -> training.Method:
    """The method for one level of a tree, each of its nodes a tree of depth one; ``y`` are targets and nodes.

    Args:
      depth: of the whole tree.
      level: which, traced.
      nu: squared radius of the ball.
      task: what is predicted.
      rate: learning rate at a step of the level.
      momentum: of the steps.
    """

    def bounded(params: ObliqueTree, batch: Batch) -> Bound:
        y, node = batch.y
        own = routing.scores_at(params.weights, params.bias, batch.x, node[None])
        right = (own[0] > 0).astype(jnp.int32)
        here, there = leaf_below(2 * node + 1 + jnp.stack([right, 1 - right]), level + 1, depth)
        reached, other = (task.loss(params.leaves.values[leaf], y) for leaf in (here, there))
        turned = other - 2 * jnp.abs(own[0]) > reached
        slopes = jnp.where(turned, against(own), 0)
        return Bound(jnp.where(turned, there, here), node[None], own, slopes, reached)

    def update(
        params: ObliqueTree, state: LazyMomentumState, batch: Batch, *, key: Array, step: Array
    ) -> tuple[ObliqueTree, LazyMomentumState, tuple[Array, Array]]:
        bound, batch = bounded(params, batch), batch._replace(y=batch.y[0])
        of: Any = {"rate": rate(state.count), "decay": momentum, "nu": nu, "task": task}
        return descended(params, state, batch, bound, **of)

    nothing: Any = None  # it is never asked for more than a step
    return training.Method(nothing, nothing, nothing, nothing, update=update)
