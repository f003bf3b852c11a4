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
from jtrees.methods.nongreedy.co2 import Greedy, Growing, edges, rate_of, stepwise
from jtrees.methods.nongreedy.surrogate import (
    MAX_DEPTH,
    Surrogate,
    flip_slope,
    into_ball,
    surrogate_step,
    with_leaves,
)
from jtrees.search import Recipe, Rounds, Schedule, Search, SearchResult, options
from jtrees.tasks import Regression, Task
from jtrees.training import Batch, LazyMomentumState
from jtrees.tree import ObliqueTree

INFERENCES = ("fast", "exact")

# Splits up to which fast inference scores all of them, for each feature and in all; measured as ``surrogate._MOVED_WHOLE``.
_SCORED_A_FEATURE, _SCORED = 16, 2**11
_SETTLED = 0.01  # a pass that lowers the mean surrogate loss by less has settled it


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
    """Non-greedy trees: minimise a surrogate, an upper bound of the loss of a hard tree. Parameters are an :class:`ObliqueTree`.

    The loss is log loss of the classes, or squared error (of several targets the mean); meant for features, and
    targets, of mean 0 and deviation 1. Rows of splits, bias included, stay in the ball ``|w|^2 <= nu``. Where ``y`` of
    the data is a pair ``(y, assignment)``, with a leaf for each sample, the surrogate is that of stable SGD (eq. 14): the
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
        found = surrogate_loss(jax.lax.stop_gradient(params), batch, jax.lax.stop_gradient(z), inference, task)
        lost = task.loss(params.leaves.values[found.leaf], split(batch.y)[0])
        value = lost + (found.slopes * jnp.take_along_axis(z, found.nodes, axis=0)).sum(0)
        return losses.weighted_mean(value, batch.weight), losses.weighted_mean(found.reached, batch.weight)

    def update(params: ObliqueTree, state: LazyMomentumState, batch: Batch, *, key: Array, step: Array) -> Any:
        z = _scores(params, batch.x, inference)
        found, batch = surrogate_loss(params, batch, z, inference, task), batch._replace(y=split(batch.y)[0])
        options: Any = {"rate": training.at_step(rate, state.count), "decay": momentum, "nu": nu, "task": task}
        return surrogate_step(params, state, batch, found, **options)

    def project(params: ObliqueTree) -> ObliqueTree:
        weights, bias = into_ball((params.weights, params.bias), nu)
        return params.replace(weights=weights, bias=bias)

    def harden(params: ObliqueTree, batch: Batch) -> ObliqueTree:
        return params.refit(batch.x, split(batch.y)[0], batch.weight)

    rate: Any = learning_rate
    return training.Method(init, total, harden, project, None if rate is None else update)


def _scores(params: ObliqueTree, x: Array, inference: str) -> Array | None:
    """Scores of all splits, or None where inference that computes those it needs is faster."""
    nodes, features = params.weights.shape
    scored = inference == "exact" or nodes <= min(_SCORED, _SCORED_A_FEATURE * features)
    return ops.scores(params.weights, params.bias, x) if scored else None


def split(y: Any) -> tuple[Array, Array | None]:
    """Targets, and the leaves that samples are assigned to, if they are."""
    return y if isinstance(y, tuple) else (y, None)


def surrogate_loss(
    params: ObliqueTree,
    batch: Batch,
    scores: Float[Array, "nodes n"] | None,
    inference: str,
    task: Task,
) -> Surrogate:
    """The surrogate loss of each sample.

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

    def against_path(leaf: Array) -> tuple[Array, Array, Array]:
        """Nodes on the way to a leaf, scores there, and slopes of twice the violation, negative."""
        nodes = topology.ancestors(leaf, params.depth)
        level = jnp.arange(params.depth - 1, -1, -1)[:, None]
        right, own = (leaf >> level) & 1 == 1, at(nodes)
        return nodes, own, jnp.where((own > 0) != right, flip_slope(own), 0)

    if inference == "exact":
        assert scores is not None
        leaf = routing.augmented_leaf(scores, params.leaves.losses(batch.x, y))
        nodes, own, slopes = against_path(leaf)
        reached = lost(routing.leaf_index(scores))
    else:
        found = routing.flips(*splits, batch.x) if scores is None else routing.flips_of(scores)
        of_leaves = jax.vmap(lost)(found.leaf)
        best = jnp.argmax(of_leaves - 2 * found.violations(), axis=0)[None]
        leaf, turned = _rows_of(found.leaf, best)[0], jnp.maximum(best - 1, 0)
        nodes, own = _rows_of(found.path, turned), _rows_of(found.scores, turned)
        slopes, reached = jnp.where(best > 0, flip_slope(own), 0), of_leaves[0]
    if assigned is not None:
        # What is subtracted is the most that decisions which lead to the assigned leaf agree with the scores by.
        more = against_path(assigned)
        nodes, own, slopes = (jnp.concatenate(pair) for pair in zip((nodes, own, slopes), more, strict=True))
        slopes = slopes.at[-params.depth :].multiply(-1)
    return Surrogate(leaf, nodes, own, slopes, reached)


def _rows_of(array: Array, rows: Array) -> Array:
    return jnp.take_along_axis(array, rows, axis=0)


# --- The recipe ------------------------------------------------------------------------------------------------------


class Joint(NamedTuple):
    """The state of the whole search.

    Attributes:
      growing: the greedy search; then its run is that of the whole tree, and ``place`` the leaf that each sample is
        assigned to.
      surrogate: the sum of the surrogate losses in this pass over the data, and their mean in the one before.
    """

    growing: Growing
    surrogate: Float[Array, "2"]


@struct.dataclass(kw_only=True)
class NonGreedy(Recipe):
    """Non-greedy trees: CO2, then stochastic gradient descent on the surrogate loss of the whole tree.

    The learning rate falls to zero once more. The tree is that of the last update, or CO2's where its surrogate loss is
    the lower one on the training data, the splits of both as long as the ball allows. With ``validation`` it is the
    tree with the lowest loss there, evaluated once a pass, CO2's among them. Features, targets and the report are as
    for :class:`jtrees.CO2`.

    Attributes:
      depth: depth of the tree, 1 to 20.
      epochs: passes over the data for the whole tree; None: as many as make 2000 updates, and at least 12.
      greedy_epochs: passes over the data for each level before.
      batch_size: samples in a mini-batch; n if that is less. Those left over in a pass rest until the next.
      learning_rate: at the start of each level, and of the joint stage; None: 0.5, or 8 over the number of features
        where that is less.
      nu: squared radius of the ball of a split, above 0.
      momentum: of the steps, 0 up to but not including 1 (see :func:`jtrees.training.lazy_momentum`).
      bins: number of bins of a feature, between which axis-aligned splits are looked for.
      inference: ``"fast"`` or ``"exact"``: see :func:`jtrees.methods.nongreedy`.
      stable: whether the leaf that the surrogate loss of a sample is counted from is frozen (stable SGD), until a pass
        over the data lowers the mean by less than one part in a hundred.
    """

    depth: int = options.depth(8, MAX_DEPTH)
    epochs: int | None = options.optional_count(100)
    greedy_epochs: int = options.count(10)
    batch_size: int = options.count(128)
    learning_rate: float | None = options.optional_positive()
    nu: float = options.positive(100.0)
    momentum: float = options.part(0.9)
    bins: int = options.count(32, minimum=2)
    inference: Literal["fast", "exact"] = options.choice("fast", INFERENCES)
    stable: bool = options.flag(True)

    def search(self, task: Task, shape: tuple[int, int]) -> Search:
        n, p = shape
        level, last = (Schedule.of(n, epochs, self.batch_size) for epochs in (self.greedy_epochs, self.epochs))
        greedy = Greedy(self.depth, task, self.nu, self.momentum, rate_of(self.learning_rate, p), level)
        of: Any = {"task": task, "inference": self.inference, "momentum": self.momentum}
        method = nongreedy(self.depth, self.nu, learning_rate=greedy.rate(last.steps), **of)
        mean = lambda tree, batch: mean_surrogate(tree, greedy, batch, self.inference)

        def step(state: Joint, step: Array, data: Batch, batch: Batch, validation: Batch | None) -> tuple[Joint, Array]:
            def grow(now: tuple[Joint, Array]) -> tuple[Joint, Array]:
                growing, lost = greedy.step(now[0].growing, step, data, batch)
                return now[0]._replace(growing=growing), lost

            def start_joint(now: tuple[Joint, Array]) -> tuple[Joint, Array]:
                state = now[0]
                tree, place = greedy.finished_level(state.growing, batch)
                leaf = place - topology.num_nodes(self.depth)
                tree = with_leaves(tree, leaf, data, task)
                run = greedy.at_rest(state.growing.run, tree)
                if validation is None:  # else the first evaluation is that of this tree
                    run = run.replace(best=training.Best(tree, mean(tree, batch), run.step))
                return state._replace(growing=state.growing.replace(run=run, place=leaf)), now[1]

            def joint(now: tuple[Joint, Array]) -> tuple[Joint, Array]:
                return joint_step(now[0], step, data, batch, validation)

            now = training.apply_in_place_if(step < greedy.steps, grow, (state, jnp.zeros((), batch.x.dtype)))
            now = training.apply_in_place_if(step == greedy.steps, start_joint, now)
            return training.apply_in_place_if(step >= greedy.steps, joint, now)

        def joint_step(
            state: Joint, step: Array, data: Batch, batch: Batch, validation: Batch | None
        ) -> tuple[Joint, Array]:
            if self.stable:
                passed = (step > greedy.steps) & (step % last.steps_per_epoch == 0)
                # A branch, not a loop of one step or none, out of which the compiler would take what routes all samples.
                tree, place, sums = state.growing.run.params, state.growing.place, state.surrogate
                assign = lambda: _reassigned(tree, place, sums, batch, last.steps_per_epoch)
                place, sums = jax.lax.cond(passed, assign, lambda: (place, sums))
                state = Joint(state.growing.replace(place=place), sums)
            growing = state.growing
            data = data._replace(y=(data.y, growing.place)) if self.stable else data
            once = training.one_step(
                method,
                data,
                greedy.optimizer,
                batch_size=last.batch_size,
                score_every=0 if validation is None else last.steps_per_epoch,
                score=lambda params: greedy.evaluate(params, batch, validation),
            )
            run, (lost, _) = once(growing.run.replace(step=jnp.asarray(step, jnp.int32)))
            return Joint(growing.replace(run=run), state.surrogate.at[0].add(lost)), lost

        def init(start: Array, batch: Batch, *, key: Array) -> Joint:
            return Joint(greedy.init(start, batch, key=key), jnp.asarray([0, jnp.inf], batch.x.dtype))

        def result(state: Joint, batch: Batch, validation: Batch | None) -> SearchResult:
            run, (grown, _) = state.growing.run, greedy.finished_level(state.growing, batch)
            score = lambda params: mean(params, batch)
            if validation is not None:
                score = lambda params: greedy.evaluate(params, batch, validation)
            best = training.best(method, run, greedy.standardised(batch), score=score)
            began = run.step > greedy.steps
            tree = jax.tree.map(lambda a, b: jnp.where(began, a, b), best.params, grown)
            run = run.replace(step=jnp.where(began, best.step, run.step))
            return greedy.result(tree, run, batch, validation)

        return Search(
            task=task,
            rounds=Rounds(greedy.steps + last.steps, last.batch_size * (self.depth * (self.depth + 1) // 2 * p // 4)),
            init=init,
            round=stepwise(step, greedy),
            result=result,
            finish=greedy.finish,
            prepare=edges(self.bins),
            yields_constant_tree=True,
        )


def mean_surrogate(tree: ObliqueTree, greedy: Greedy, batch: Batch, inference: str) -> Array:
    """The mean over a batch of the surrogate loss, from the leaf that each sample reaches.

    Splits are as long as the ball allows: a longer split is the same split with a tighter bound (Proposition 1), so
    that trees are compared and not lengths.
    """
    data, task = greedy.standardised(batch), greedy.task
    norm = jnp.sqrt(jnp.square(tree.weights).sum(1) + jnp.square(tree.bias))
    longest = jnp.where(norm > 0, jnp.sqrt(greedy.nu) / jnp.where(norm > 0, norm, 1), 1).astype(norm.dtype)
    tree = tree.replace(weights=longest[:, None] * tree.weights, bias=longest * tree.bias)

    def of_block(weight: Array, x: Array, y: Array) -> tuple[Array, Array]:
        found = surrogate_loss(tree, Batch(x, y), _scores(tree, x, inference), inference, task)
        value = task.loss(tree.leaves.values[found.leaf], y) + (found.slopes * found.scores).sum(0)
        return (weight * value).sum(), value

    weight = jnp.ones(len(data.x), data.x.dtype) if data.weight is None else data.weight
    block = min(greedy.level.batch_size, len(weight))
    total, _ = blocking.sum_over_blocks(of_block, weight, data.x, data.y, block=block)
    return total / weight.sum()


def _reassigned(
    tree: ObliqueTree, place: Array, sums: Array, batch: Batch, steps_per_epoch: int
) -> tuple[Array, Array]:
    """After a pass: samples are assigned to the leaves that they reach, if the surrogate loss fell too little."""
    mean, before = sums[0] / steps_per_epoch, sums[1]
    settled = mean > (1 - _SETTLED) * before
    place = jax.lax.cond(settled, lambda: ops.hard(tree.weights, tree.bias, batch.x), lambda: place)
    return place, jnp.stack([jnp.zeros_like(mean), jnp.where(settled, jnp.inf, mean)])
