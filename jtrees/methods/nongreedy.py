"""Non-greedy trees: stochastic gradient descent on an upper bound of the loss of the hard tree (Norouzi et al.,
"Efficient Non-greedy Optimization of Decision Trees", NeurIPS 2015).

``nongreedy`` is the method for :func:`jtrees.train`; ``NonGreedy`` is the recipe: a greedy tree (:class:`jtrees.CO2`),
then all of its splits and leaves together.
"""

from typing import Any, Literal, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrees import blocking, losses, ops, routing, topology, training, validation as checks
from jtrees.methods.bound import MAX_DEPTH, Bound, against, descended, into_ball, with_leaves
from jtrees.methods.co2 import CO2, Growing
from jtrees.methods.lazy_momentum import LazyMomentumState
from jtrees.methods.one_run import OneRun
from jtrees.recipes import Found, static
from jtrees.table import Table
from jtrees.tasks import Regression, Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree

INFERENCES = ("fast", "exact")

# Splits up to which fast inference scores all of them, for each feature and in all; measured as ``bound._MOVED_WHOLE``.
_SCORED_A_FEATURE, _SCORED = 16, 2**11
_SETTLED = 0.01  # a pass that lowers the mean bound by less has settled it


# --- The method ------------------------------------------------------------------------------------------------------


def nongreedy(
    depth: int,
    nu: float | Array = 100.0,
    *,
    task: Task = Regression(),
    inference: Literal["fast", "exact"] = "fast",
    learning_rate: training.Number | None = None,
    momentum: float | Array = 0.9,
) -> training.Method:
    """Non-greedy trees: minimise the bound on the loss of a hard tree. Parameters are an :class:`ObliqueTree`.

    The loss is log loss of the classes, or squared error (of several targets the mean); meant for features, and
    targets, of mean 0 and deviation 1. Rows of splits, bias included, stay in the ball ``|w|^2 <= nu``. Where ``y`` of
    the data is a pair ``(y, assignment)``, with a leaf for each sample, the bound is that of stable SGD (eq. 14): the
    decisions that it is counted from lead to that leaf.

    Args:
      depth: depth of the tree, 1 to 20.
      nu: squared radius of the ball, above 0: the smaller, the wider the margins and the fewer leaves stay in use.
      task: what is predicted. In classification leaves hold logits.
      inference: ``"fast"``, among the leaves one decision away, O(depth^2 p) a sample; or ``"exact"``, among all.
      learning_rate: where given, the method takes steps of its own, those of ``lazy_momentum(learning_rate,
        momentum)``, which must be the optimiser: in deep trees they touch only the rows on the ways of the samples.
        None: gradients of everything, for any optimiser.
      momentum: for these steps, 0 to less than 1.

    Raises:
      ValueError: for a number out of range, or an unknown option.
    """
    depth = checks.check_depth(depth, MAX_DEPTH)
    checks.check_number("nu", nu)
    checks.check_part("momentum", momentum)
    checks.check_choice("inference", inference, INFERENCES)

    def init(batch: Batch, *, key: Array) -> ObliqueTree:
        batch = batch._replace(y=split(batch.y)[0])
        task.check(batch.y)
        drawn = jax.random.normal(key, (topology.num_nodes(depth), batch.x.shape[1] + 1), batch.x.dtype)
        weights, bias = into_ball((drawn[:, 1:], drawn[:, 0]), nu)
        tree = ObliqueTree(weights, bias, None)
        return with_leaves(tree, ops.hard(weights, bias, batch.x), batch, task)

    def total(params: ObliqueTree, batch: Batch, *, key: Array, step: Array) -> tuple[Array, Array]:
        z = ops.scores(params.weights, params.bias, batch.x)
        found = bounded(jax.lax.stop_gradient(params), batch, jax.lax.stop_gradient(z), inference, task)
        lost = task.loss(params.leaves.values[found.leaf], split(batch.y)[0])
        value = lost + (found.slopes * jnp.take_along_axis(z, found.nodes, axis=0)).sum(0)
        return losses.weighted_mean(value, batch.weight), losses.weighted_mean(found.reached, batch.weight)

    def update(params: ObliqueTree, state: LazyMomentumState, batch: Batch, *, key: Array, step: Array) -> Any:
        z = _scores(params, batch.x, inference)
        found, batch = bounded(params, batch, z, inference, task), batch._replace(y=split(batch.y)[0])
        options: Any = {"rate": training.at_step(rate, state.count), "decay": momentum, "nu": nu, "task": task}
        return descended(params, state, batch, found, **options)

    def project(params: ObliqueTree) -> ObliqueTree:
        weights, bias = into_ball((params.weights, params.bias), nu)
        return params.replace(weights=weights, bias=bias)

    def predict(params: ObliqueTree, x: Array) -> Array:
        return params.leaves.at(ops.hard(params.weights, params.bias, x), x)

    def harden(params: ObliqueTree, batch: Batch) -> ObliqueTree:
        return params.refit(batch.x, split(batch.y)[0], batch.weight)

    rate: Any = learning_rate
    return training.Method(init, total, predict, harden, project, None if rate is None else update)


def _scores(params: ObliqueTree, x: Array, inference: str) -> Array | None:
    """Scores of all splits, or None where inference that computes those it needs is faster."""
    nodes, features = params.weights.shape
    scored = inference == "exact" or nodes <= min(_SCORED, _SCORED_A_FEATURE * features)
    return ops.scores(params.weights, params.bias, x) if scored else None


def split(y: Any) -> tuple[Array, Array | None]:
    """Targets, and the leaves that samples are assigned to, if they are."""
    return y if isinstance(y, tuple) else (y, None)


def bounded(
    params: ObliqueTree,
    batch: Batch,
    scores: Float[Array, "nodes n"] | None,
    inference: str,
    task: Task,
) -> Bound:
    """The bound of each sample.

    Args:
      params: the tree.
      batch: samples, with targets, or with targets and the leaf that each is assigned to.
      scores: of all splits; None: only those are computed that are needed, by fast inference.
      inference: ``"fast"`` or ``"exact"``.
      task: what is predicted.
    """
    (y, assigned), values = split(batch.y), params.leaves.values
    lost = lambda leaf: task.loss(values[leaf], y)
    splits = params.weights, params.bias
    at = lambda nodes: routing.scores_at(*splits, batch.x, nodes) if scores is None else _rows_of(scores, nodes)

    def against_way(leaf: Array) -> tuple[Array, Array, Array]:
        """Nodes on the way to a leaf, scores there, and slopes of twice the violation, negative."""
        nodes = topology.ancestors(leaf, params.depth)
        level = jnp.arange(params.depth - 1, -1, -1)[:, None]
        right, own = (leaf >> level) & 1 == 1, at(nodes)
        return nodes, own, jnp.where((own > 0) != right, against(own), 0)

    if inference == "exact":
        assert scores is not None
        leaf = routing.augmented_leaf(scores, params.leaves.losses(batch.x, y))
        nodes, own, slopes = against_way(leaf)
        reached = lost(routing.leaf_index(scores))
    else:
        found = routing.flips(*splits, batch.x) if scores is None else routing.flips_of(scores)
        of_leaves = jax.vmap(lost)(found.leaf)
        best = jnp.argmax(of_leaves - 2 * found.violations(), axis=0)[None]
        leaf, turned = _rows_of(found.leaf, best)[0], jnp.maximum(best - 1, 0)
        nodes, own = _rows_of(found.path, turned), _rows_of(found.scores, turned)
        slopes, reached = jnp.where(best > 0, against(own), 0), of_leaves[0]
    if assigned is not None:
        # What is subtracted is the most that decisions which lead to the assigned leaf agree with the scores by.
        more = against_way(assigned)
        nodes, own, slopes = (jnp.concatenate(pair) for pair in zip((nodes, own, slopes), more, strict=True))
        slopes = slopes.at[-params.depth :].multiply(-1)
    return Bound(leaf, nodes, own, slopes, reached)


def _rows_of(array: Array, rows: Array) -> Array:
    return jnp.take_along_axis(array, rows, axis=0)


# --- The recipe ------------------------------------------------------------------------------------------------------


class Joint(NamedTuple):
    """The state of the whole search.

    Attributes:
      growing: the greedy search; then its run is that of the whole tree, and ``place`` the leaf that each sample is
        assigned to.
      bounds: the sum of the bounds in this pass over the data, and their mean in the one before.
    """

    growing: Growing
    bounds: Float[Array, "2"]


@struct.dataclass(kw_only=True)
class NonGreedy(CO2):
    """Non-greedy trees: CO2, then stochastic gradient descent on the bound of the whole tree.

    The learning rate falls to zero once more. The tree is that of the last update, or CO2's where the bound of that is
    the lower one on the training data, the splits of both as long as the ball allows. With ``validation`` it is the
    tree with the lowest loss there, evaluated once a pass, CO2's among them. See :class:`jtrees.CO2` for the report and
    the other options, which hold for both parts.

    Attributes:
      epochs: passes over the data for the whole tree; None: as many as make 2000 updates, and at least 12.
      greedy_epochs: passes for each level before.
      inference: ``"fast"`` or ``"exact"``: see :func:`nongreedy`.
      stable: whether the leaf that the bound of a sample is counted from is frozen (stable SGD), until a pass over the
        data lowers the mean bound by less than one part in a hundred.
    """

    epochs: int | None = static(default=100)
    greedy_epochs: int = static(default=10)
    inference: Literal["fast", "exact"] = static(default="fast")
    stable: bool = static(default=True)

    def checked(self, table: Table) -> Any:
        recipe = super().checked(table)
        checks.check_choice("inference", self.inference, INFERENCES)
        stable = checks.check_flag("stable", self.stable)
        return recipe.replace(greedy_epochs=checks.check_count("greedy_epochs", self.greedy_epochs), stable=stable)

    def level_steps(self, n: int) -> int:
        return self.an_epoch(n) * self.greedy_epochs

    def greedy_steps(self, n: int) -> int:
        """Steps before the whole tree is trained."""
        return self.depth * self.level_steps(n)

    def updates(self, n: int) -> int:
        return self.greedy_steps(n) + OneRun.updates(self, n)

    def work(self, p: int) -> int:
        return self.depth * (self.depth + 1) // 2 * p // 4

    def method(self, table: Table) -> training.Method:
        steps = OneRun.updates(self, len(table.x))
        options: Any = {"task": table.task, "inference": self.inference}
        return nongreedy(self.depth, self.nu, learning_rate=self.rate(steps), momentum=self.momentum, **options)

    def begin(self, start: Array, table: Table, *, key: Array) -> Joint:
        return Joint(super().begin(start, table, key=key), jnp.asarray([0, jnp.inf], table.x.dtype))

    def step(self, state: Joint, step: Array, data: Batch, table: Table, judge: Table | None) -> tuple[Joint, Array]:
        first, nothing = self.greedy_steps(len(table.x)), jnp.zeros((), table.x.dtype)

        def greedy(now: tuple[Joint, Array]) -> tuple[Joint, Array]:
            growing, lost = self.greedy_step(now[0].growing, step, data, table)
            return now[0]._replace(growing=growing), lost

        def joint(now: tuple[Joint, Array]) -> tuple[Joint, Array]:
            return self._joint_step(now[0], step, data, table, judge)

        now = training.only_if(step < first, greedy, (state, nothing))
        now = training.only_if(step == first, lambda now: (self._joint_begun(now[0], table, judge), now[1]), now)
        return training.only_if(step >= first, joint, now)

    def _joint_begun(self, state: Joint, table: Table, judge: Table | None) -> Joint:
        tree, place = self.level_ended(state.growing, table)
        leaf = place - topology.num_nodes(self.depth)
        tree = with_leaves(tree, leaf, self.batch(table), table.task)
        run = self.at_rest(state.growing.run, tree)
        if judge is None:  # else the first evaluation is that of this tree
            run = run.replace(best=training.Best(tree, self.mean_bound(tree, table), run.step))
        return state._replace(growing=state.growing.replace(run=run, place=leaf))

    def _joint_step(
        self, state: Joint, step: Array, data: Batch, table: Table, judge: Table | None
    ) -> tuple[Joint, Array]:
        n = len(table.x)
        an_epoch = self.an_epoch(n)
        if self.stable:
            passed = (step > self.greedy_steps(n)) & (step % an_epoch == 0)
            # A branch, not a loop of one step or none, out of which the compiler would take what routes all samples.
            tree, place, bounds = state.growing.run.params, state.growing.place, state.bounds
            anew = lambda: self._assigned_anew(tree, place, bounds, table, an_epoch)
            place, bounds = jax.lax.cond(passed, anew, lambda: (place, bounds))
            state = Joint(state.growing.replace(place=place), bounds)
        growing = state.growing
        data = data._replace(y=(data.y, growing.place)) if self.stable else data
        watch: Any = {"score_every": 0 if judge is None else an_epoch, "batch_size": min(self.batch_size, n)}
        watch |= {"score": lambda params: self.judged(params, table, judge)}
        once = training.one_step(self.method(table), data, self.steps_by(n), **watch)
        run, (lost, _) = once(growing.run.replace(step=jnp.asarray(step, jnp.int32)))
        return Joint(growing.replace(run=run), state.bounds.at[0].add(lost)), lost

    def mean_bound(self, tree: ObliqueTree, table: Table) -> Array:
        """The mean over the table of the bound, from the leaf that each sample reaches.

        Splits are as long as the ball allows: a longer split is the same split with a tighter bound (Proposition 1), so
        that trees are compared and not lengths.
        """
        data = self.batch(table)
        norm = jnp.sqrt(jnp.square(tree.weights).sum(1) + jnp.square(tree.bias))
        longest = jnp.where(norm > 0, jnp.sqrt(self.nu) / jnp.where(norm > 0, norm, 1), 1).astype(norm.dtype)
        tree = tree.replace(weights=longest[:, None] * tree.weights, bias=longest * tree.bias)

        def of_block(weight: Array, x: Array, y: Array) -> tuple[Array, Array]:
            found = bounded(tree, Batch(x, y), _scores(tree, x, self.inference), self.inference, table.task)
            value = table.task.loss(tree.leaves.values[found.leaf], y) + (found.slopes * found.scores).sum(0)
            return (weight * value).sum(), value

        weight = self._weight(table)
        block = min(self.batch_size, len(weight))
        total, _ = blocking.sum_over_blocks(of_block, weight, data.x, data.y, block=block)
        return total / weight.sum()

    def _assigned_anew(
        self, tree: ObliqueTree, place: Array, bounds: Array, table: Table, an_epoch: int
    ) -> tuple[Array, Array]:
        """After a pass: samples are assigned to the leaves that they reach, if the bound fell too little."""
        mean, before = bounds[0] / an_epoch, bounds[1]
        settled = mean > (1 - _SETTLED) * before
        place = jax.lax.cond(settled, lambda: ops.hard(tree.weights, tree.bias, table.x), lambda: place)
        return place, jnp.stack([jnp.zeros_like(mean), jnp.where(settled, jnp.inf, mean)])

    def end(self, state: Joint, table: Table, judge: Table | None) -> Found:
        run = state.growing.run
        greedy, _ = self.level_ended(state.growing, table)
        watch: Any = {"score": lambda params: self.mean_bound(params, table)}
        if judge is not None:
            watch = {"score": lambda params: self.judged(params, table, judge)}
        best = training.best(self.method(table), run, self.batch(table), **watch)
        begun = run.step > self.greedy_steps(len(table.x))
        tree = jax.tree.map(lambda a, b: jnp.where(begun, a, b), best.params, greedy)
        return self.found(tree, run.replace(step=jnp.where(begun, best.step, run.step)), table, judge)
