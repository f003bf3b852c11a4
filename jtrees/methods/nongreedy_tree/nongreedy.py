"""Non-greedy trees: stochastic gradient descent on a surrogate loss, an upper bound of the hard loss.

The source is Norouzi et al., "Efficient Non-greedy Optimization of Decision Trees", NeurIPS 2015. ``nongreedy`` is the
method for :func:`jtrees.train`. ``NonGreedy`` is the recipe, which trains the tree of :class:`jtrees.CO2` jointly.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

from jtrees import blocking, losses, ops, pytree, topology, training, validation as checks
from jtrees.methods.nongreedy_tree import greedy
from jtrees.methods.nongreedy_tree.co2 import CO2, grow_levels, strength_of
from jtrees.methods.nongreedy_tree.surrogate import (
    INFERENCES,
    MAX_DEPTH,
    into_ball,
    split,
    surrogate_loss,
    surrogate_update,
    with_leaves,
)
from jtrees.search import Fitted, Problem, Run, option
from jtrees.search.minibatch import Result, Schedule
from jtrees.tasks import Regression, Task
from jtrees.training import Batch, History, TrainState
from jtrees.tree import ObliqueTree

_JOINT = 1  # derives the key of the joint stage from the key of the run
_CONVERGED = 0.01  # training has converged if an epoch lowers the mean surrogate loss by a smaller fraction


def nongreedy(
    depth: int,
    nu: float | Array = 100.0,
    *,
    task: Task = Regression(),
    inference: Literal["fast", "exact"] = "fast",
    learning_rate: training.Number | None = None,
    momentum: float | Array = 0.9,
    monotone: Array | None = None,
) -> training.Method:
    """Returns the method of non-greedy trees: minimises a surrogate loss, an upper bound of the loss of a hard tree.

    Parameters are an :class:`ObliqueTree`. The loss is the log loss of logits or the squared error (averaged over the
    targets, if there are several). The method assumes features and targets of mean 0 and deviation 1. Rows of splits,
    bias included, stay in the ball ``|w|^2 <= nu``: smaller values widen the margins and leave fewer leaves active. In
    the data, ``y`` may be a pair ``(y, assignment)``, with a leaf for each sample. The surrogate loss is then the loss
    of stable SGD (eq. 14), relative to the decisions that lead to the assigned leaf.

    :class:`jtrees.NonGreedy` describes the arguments, except three. ``task`` is what is predicted. If there is a
    ``learning_rate``, the method takes the steps of ``lazy_momentum(learning_rate, momentum)``, which must be the
    optimiser. In deep trees, a step moves only the rows on the paths of samples. None: dense gradients. Negative
    weights of the features ``monotone``, ``(p,)`` bool, are set to 0.

    Raises:
      ValueError: for a number out of range, or an unknown option.
    """
    depth = checks.check_depth(depth, MAX_DEPTH)
    checks.check_number("nu", nu, above=0)
    checks.check_number("momentum", momentum, least=0, below=1)
    checks.check_choice("inference", inference, INFERENCES)

    def init(batch: Batch, *, key: Array) -> ObliqueTree:
        batch = batch._replace(y=split(batch.y)[0])
        task.check(batch.y)
        rows = jax.random.normal(key, (topology.num_nodes(depth), batch.x.shape[1] + 1), batch.x.dtype)
        tree = project(ObliqueTree(rows[:, 1:], rows[:, 0], None))
        return with_leaves(tree, ops.hard(tree.weights, tree.bias, batch.x), batch, task)

    def total(params: ObliqueTree, batch: Batch, *, key: Array, step: Array) -> tuple[Array, Array]:
        z = ops.scores(params.weights, params.bias, batch.x)  # the compiler computes equal scores once
        surrogate = surrogate_loss(jax.lax.stop_gradient(params), batch, inference, task)
        leaf_loss = task.loss(params.leaves.values[surrogate.leaf], split(batch.y)[0])
        value = leaf_loss + (surrogate.slopes * jnp.take_along_axis(z, surrogate.nodes, axis=0)).sum(0)
        return losses.weighted_mean(value, batch.weight), losses.weighted_mean(surrogate.reached, batch.weight)

    project = partial(into_ball, nu=nu, monotone=monotone)
    harden = lambda params, batch: params.refit(batch.x, split(batch.y)[0], batch.weight)
    method = training.Method(init, total, harden, project)
    if learning_rate is None:
        return method
    surrogate_of = lambda params, batch: surrogate_loss(params, batch, inference, task)
    lazy = training.lazy_momentum(learning_rate, momentum)
    return method._replace(update=surrogate_update(surrogate_of, lazy, project, task))


class StableState(NamedTuple):
    """The state of the optimiser in the joint stage."""

    momentum: Any  # state of the momentum
    leaf: Int[Array, " n"]  # the leaf that each sample is assigned to
    # Sum of the surrogate losses in the current epoch, and mean surrogate loss of the previous epoch
    surrogate: Float[Array, "2"]


@pytree.dataclass(kw_only=True)
class NonGreedy(CO2):
    """Recipe of non-greedy trees: CO2, then stochastic gradient descent on the surrogate loss of the whole tree.

    In the joint stage, the learning rate again decays to zero. The model is the tree after the last update, or CO2's
    tree if its surrogate loss on the training data is lower. This comparison scales the splits of both trees to the
    radius of the ball. If ``validation`` is given, the loss on it is evaluated once an epoch. The model is then the
    tree with the lowest validation loss, which may be CO2's tree. Features, targets and the report are the same as for
    :class:`jtrees.CO2`.

    Attributes:
      depth: depth of the tree, 1 to 20.
      epochs: number of passes over the data in the joint stage; None: as in :class:`jtrees.DGT`.
      greedy_epochs: number of passes over the data for each level of the greedy stage.
      batch_size: see :class:`jtrees.CO2`.
      learning_rate: initial learning rate of each level and of the joint stage; None: as in :class:`jtrees.CO2`.
      nu: see :class:`jtrees.CO2`.
      momentum: see :class:`jtrees.CO2`.
      bins: see :class:`jtrees.CO2`.
      inference: ``"fast"``, over leaves one decision away, O(depth^2 p) per sample; or ``"exact"``, over all leaves.
      stable: whether to use stable SGD. It freezes the assigned leaf of each sample in its surrogate loss. The leaves
        are assigned again after an epoch that lowers the mean surrogate loss by less than one percent.
      ridge: see :class:`jtrees.CO2`.
      shrink: see :class:`jtrees.CO2`.
      precondition: see :class:`jtrees.CO2`.
      rows: see :class:`jtrees.CO2`.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> recipe = jtrees.NonGreedy(depth=1, epochs=5, greedy_epochs=5, precondition=0)
      >>> jtrees.fit(recipe, x, np.sign(x[:, 0]), key=jax.random.key(0)).report.search.rows
      40
    """

    epochs: int | None = option(100)
    greedy_epochs: int = option(10)
    inference: Literal["fast", "exact"] = option("fast")
    stable: bool = option(True)

    def level(self, n: int) -> Schedule:
        return Schedule.for_rows(n, self.greedy_epochs, self.batch_size)

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        super().check(task, shape)
        self.joint(shape[0])  # raises for too many updates

    def joint(self, n: int) -> Schedule:
        """Returns the schedule of the mini-batches of the joint stage, for n samples."""
        return Schedule.for_rows(n, self.epochs, self.batch_size)

    async def trained(self, problem: Problem, trial: Fitted | None) -> Fitted:
        grown, losses = await grow_levels(problem)
        state, steps = await problem.map(_initial, grown), self.joint(problem.shape[0]).steps
        state, joint_losses = await problem.train(_updated, state, steps, name="NonGreedy, all levels")
        result = (await problem.map(_result, state, strength_of(trial))).host
        fitted = result.fitted(np.concatenate([losses, joint_losses]))
        return fitted._replace(step=fitted.step + len(losses))


# --- Compiled functions of a run -------------------------------------------------------------------------------------


def _initial(run: Run, grown: greedy.GreedyState) -> TrainState:
    """Returns the initial state of the joint stage: CO2's tree is the best tree so far."""
    state, leaf = grown.training, grown.node << (run.recipe.depth - grown.level)
    data, zero = greedy.standardised(run).batch, jnp.zeros((), jnp.int32)
    tree = with_leaves(state.params, leaf, data, run.task)
    at_rest = jax.tree.map(jnp.zeros_like, state.opt_state)
    stable = StableState(at_rest, leaf, jnp.asarray([0, jnp.inf], data.x.dtype))
    state = state.replace(params=tree, opt_state=stable, key=jax.random.fold_in(run.key, _JOINT), step=zero)
    if run.has_validation_set:  # the first evaluation evaluates CO2's tree
        return state
    return state.replace(best=training.Best(tree, _mean_surrogate(run, tree), zero))


def _updated(run: Run, state: TrainState, before: Array, count: Array) -> tuple[TrainState, Array, bool]:
    """Returns the state after ``count`` updates, their losses, and False."""
    recipe, data, schedule = run.recipe, greedy.standardised(run).batch, run.recipe.joint(len(run.batch.x))
    steps: Any = {"learning_rate": greedy.learning_rate(run, schedule), "momentum": recipe.momentum}
    common: Any = {"task": run.task, "inference": recipe.inference, "monotone": run.monotone}
    method, momentum = nongreedy(recipe.depth, recipe.nu, **common, **steps), greedy.optimizer(run, schedule)
    options: Any = {"batch_size": schedule.batch_size}
    if run.has_validation_set:
        options |= {"score_every": schedule.steps_per_epoch, "score": partial(greedy.evaluate, run)}

    def update(state: TrainState, step: Array) -> tuple[TrainState, History]:
        stable, batch = state.opt_state, data
        if recipe.stable:
            stable = _reassigned(stable, state.params, data.x, step, schedule.steps_per_epoch)
            batch = data._replace(y=(data.y, stable.leaf))
        one_step = training.step.one_step(method, batch, momentum, **options)
        state, history = one_step(state.replace(opt_state=stable.momentum), step)
        surrogate = stable.surrogate.at[0].add(history.losses)
        return state.replace(opt_state=StableState(state.opt_state, stable.leaf, surrogate)), history

    state, history = training.loop.advance_up_to(update, state, count, step=before)
    return state, history.losses, False


def _reassigned(stable: StableState, tree: ObliqueTree, x: Array, step: Array, steps_per_epoch: int) -> StableState:
    """Returns the state with the leaves that samples reach, if an epoch has ended, and the loss has converged in it."""

    def after_epoch() -> tuple[Array, Array]:
        mean, previous = stable.surrogate[0] / steps_per_epoch, stable.surrogate[1]
        has_converged = mean > (1 - _CONVERGED) * previous
        leaf = jax.lax.cond(has_converged, lambda: ops.hard(tree.weights, tree.bias, x), lambda: stable.leaf)
        return leaf, jnp.stack([jnp.zeros_like(mean), jnp.where(has_converged, jnp.inf, mean)])

    # A branch keeps the routing in the loop: the compiler would move it out of a loop of at most one step.
    ends_epoch = (step > 0) & (step % steps_per_epoch == 0)
    leaf, surrogate = jax.lax.cond(ends_epoch, after_epoch, lambda: (stable.leaf, stable.surrogate))
    return StableState(stable.momentum, leaf, surrogate)


def _result(run: Run, state: TrainState, strength: Array) -> Result:
    """Returns the tree with the lowest validation loss, or else the tree with the lower surrogate loss."""
    score = greedy.evaluate if run.has_validation_set else _mean_surrogate
    best = state.evaluated(jnp.where(state.finite, score(run, state.params), jnp.inf)).best
    result = greedy.result_of(run, best.params, best.step, best.finite, strength)
    return result._replace(finite=state.finite)


def _mean_surrogate(run: Run, tree: ObliqueTree) -> Array:
    """Returns the mean surrogate loss of a tree on the training rows, relative to the leaf that each sample reaches."""
    # Splits are scaled to the radius of the ball. A longer split is the same split with a tighter bound (Proposition
    # 1). So the scaling makes the comparison of trees independent of the lengths of their splits.
    recipe, data, weight = run.recipe, greedy.standardised(run).batch, run.weight
    norm = jnp.sqrt(jnp.square(tree.weights).sum(1) + jnp.square(tree.bias))
    factor = jnp.where(norm > 0, jnp.sqrt(recipe.nu) / jnp.where(norm > 0, norm, 1), 1).astype(norm.dtype)
    tree = tree.replace(weights=factor[:, None] * tree.weights, bias=factor * tree.bias)

    def block_sum(weight: Array, x: Array, y: Array) -> tuple[Array, Array]:
        surrogate = surrogate_loss(tree, Batch(x, y), recipe.inference, run.task)
        value = run.task.loss(tree.leaves.values[surrogate.leaf], y) + (surrogate.slopes * surrogate.scores).sum(0)
        return (weight * value).sum(), value

    block = min(recipe.batch_size, len(weight))
    return blocking.sum_over_blocks(block_sum, weight, data.x, data.y, block=block)[0] / weight.sum()
