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
from jtrees.methods.nongreedy_tree.greedy import GreedyState, standardised
from jtrees.methods.nongreedy_tree.surrogate import (
    INFERENCES,
    MAX_DEPTH,
    projection,
    split,
    surrogate_loss,
    surrogate_update,
    with_leaves,
)
from jtrees.search import Fitted, Problem, Run, option
from jtrees.search.engine import MOST
from jtrees.search.minibatch import Result, Schedule
from jtrees.tasks import Regression, Task
from jtrees.training import Batch, TrainState
from jtrees.tree import ObliqueTree

_JOINT = 1  # derives the key of the joint stage from the key of the run
_SETTLED = 0.01  # training has converged if an epoch lowers the mean surrogate loss by a smaller fraction


# --- The method ------------------------------------------------------------------------------------------------------


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

    Parameters are an :class:`ObliqueTree`. The loss is the log loss or the squared error (averaged over the targets, if
    there are several). The method assumes features and targets of mean 0 and deviation 1. Rows of splits, bias
    included, stay in the ball ``|w|^2 <= nu``. In the data, ``y`` may be a pair ``(y, assignment)``, with a leaf for
    each sample. The surrogate loss is then the loss of stable SGD (eq. 14), relative to the decisions that lead to the
    assigned leaf.

    Args:
      depth: depth of the tree, 1 to 20.
      nu: squared radius of the ball, above 0. Smaller values widen the margins and leave fewer leaves active.
      task: what is predicted. In classification, leaves hold logits.
      inference: ``"fast"``, over leaves one decision away, O(depth^2 p) per sample; or ``"exact"``, over all leaves.
      learning_rate: if given, the method takes the steps of ``lazy_momentum(learning_rate, momentum)``, which must be
        the optimiser. In deep trees, a step moves only the rows on the paths of samples. None: dense gradients.
      momentum: momentum of the steps, in [0, 1).
      monotone: the features in which predictions must not fall, ``(p,)`` bool, or None. Negative weights of these
        features are set to 0.

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
        tree = ObliqueTree(*in_bounds((rows[:, 1:], rows[:, 0])), None)
        return with_leaves(tree, ops.hard(tree.weights, tree.bias, batch.x), batch, task)

    def total(params: ObliqueTree, batch: Batch, *, key: Array, step: Array) -> tuple[Array, Array]:
        z = ops.scores(params.weights, params.bias, batch.x)
        surrogate = surrogate_loss(jax.lax.stop_gradient(params), batch, inference, task, jax.lax.stop_gradient(z))
        leaf_loss = task.loss(params.leaves.values[surrogate.leaf], split(batch.y)[0])
        value = leaf_loss + (surrogate.slopes * jnp.take_along_axis(z, surrogate.nodes, axis=0)).sum(0)
        return losses.weighted_mean(value, batch.weight), losses.weighted_mean(surrogate.reached, batch.weight)

    def project(params: ObliqueTree) -> ObliqueTree:
        weights, bias = in_bounds((params.weights, params.bias))
        return params.replace(weights=weights, bias=bias)

    in_bounds = projection(nu, monotone)
    harden = lambda params, batch: params.refit(batch.x, split(batch.y)[0], batch.weight)
    surrogate_of = lambda params, batch: surrogate_loss(params, batch, inference, task)
    update = surrogate_update(surrogate_of, learning_rate, momentum, in_bounds, task)
    return training.Method(init, total, harden, project, None if learning_rate is None else update)


# --- The recipe ------------------------------------------------------------------------------------------------------


class Joint(NamedTuple):
    """The state of the joint stage.

    Attributes:
      training: training state of the tree.
      place: the leaf that each sample is assigned to.
      surrogate: sum of the surrogate losses in the current epoch, and mean surrogate loss of the previous epoch.
    """

    training: TrainState
    place: Int[Array, " n"]
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
      inference: ``"fast"`` or ``"exact"``: see :func:`jtrees.methods.nongreedy`.
      stable: whether to use stable SGD. It freezes the assigned leaf of each sample in its surrogate loss. The leaves
        are assigned again after an epoch that lowers the mean surrogate loss by less than one percent.
      ridge: see :class:`jtrees.CO2`.
      shrink: see :class:`jtrees.CO2`.
      precondition: see :class:`jtrees.CO2`.
      rows: see :class:`jtrees.CO2`.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> recipe = jtrees.NonGreedy(depth=1, epochs=5, greedy_epochs=5, precondition=0)
      >>> jtrees.fit(recipe, x, np.sign(x[:, 0]), key=jax.random.key(0)).report.search.active_leaves
      2
    """

    epochs: int | None = option(100)
    greedy_epochs: int = option(10)
    inference: Literal["fast", "exact"] = option("fast")
    stable: bool = option(True)

    def level(self, n: int) -> Schedule:
        return Schedule.of(n, self.greedy_epochs, self.batch_size)

    def joint(self, n: int) -> Schedule:
        """Returns the schedule of the mini-batches of the joint stage, for n samples."""
        return Schedule.of(n, self.epochs, self.batch_size)

    async def trained(self, problem: Problem, trial: Fitted | None) -> Fitted:
        growing, losses = await grow_levels(problem)
        state, steps = await problem.map(_initial, growing), self.joint(problem.shape[0]).steps
        state, joint_losses = await problem.train(_advanced, state, steps, name="NonGreedy, all levels")
        result = (await problem.map(_result, state, strength_of(trial))).host
        fitted = result.fitted(np.concatenate([losses, joint_losses]))
        return fitted._replace(step=fitted.step + len(losses))


# --- Compiled functions of a run -------------------------------------------------------------------------------------


def _initial(run: Run, state: GreedyState) -> Joint:
    """Returns the initial state of the joint stage: CO2's tree is the best tree so far."""
    tree, place = greedy.finished_level(run, state)
    leaf = place - topology.num_nodes(run.recipe.depth)
    leaf = jnp.where(leaf < 0, ops.hard(tree.weights, tree.bias, run.batch.x), leaf)  # if the deadline cut levels off
    tree = with_leaves(tree, leaf, standardised(run), run.task)
    key, zero = jax.random.fold_in(run.key, _JOINT), jnp.zeros((), jnp.int32)
    joint = greedy.restarted(state.training, tree).replace(key=key, step=zero)
    if not run.has_validation_set:  # with a validation set, the first evaluation evaluates CO2's tree
        joint = joint.replace(best=training.Best(tree, _mean_surrogate(run, tree), zero))
    return Joint(joint, leaf, jnp.asarray([0, jnp.inf], run.batch.x.dtype))


def _method(run: Run, **options: Any) -> training.Method:
    return nongreedy(run.recipe.depth, run.recipe.nu, task=run.task, inference=run.recipe.inference, **options)


def _advanced(run: Run, state: Joint, before: Array, count: Array) -> tuple[Joint, Array, Array]:
    """Returns the state after ``count`` updates, their losses, and False."""
    recipe, data, schedule = run.recipe, standardised(run), run.recipe.joint(len(run.batch.x))
    rates, every = greedy.rate(run, schedule.steps), schedule.steps_per_epoch
    method = _method(run, learning_rate=rates, momentum=recipe.momentum, monotone=run.monotone)

    def update(j: Array, carry: tuple[Joint, Array]) -> tuple[Joint, Array]:
        (state, place, sums), losses = carry
        step = before + j
        if recipe.stable:
            # A branch keeps the routing in the loop: the compiler would move it out of a loop of at most one step.
            assign = lambda: _reassigned(state.params, place, sums, run.batch.x, every)
            place, sums = jax.lax.cond((step > 0) & (step % every == 0), assign, lambda: (place, sums))
        one_step = training.step.one_step(
            method,
            data._replace(y=(data.y, place)) if recipe.stable else data,
            training.lazy_momentum(rates, recipe.momentum),
            batch_size=schedule.batch_size,
            score_every=every if run.has_validation_set else 0,
            score=partial(greedy.evaluate, run),
        )
        state, (loss, _) = one_step(state, step)
        return Joint(state, place, sums.at[0].add(loss)), losses.at[j].set(loss)

    empty = jnp.full(MOST, training.state.NOT_TAKEN, data.x.dtype)
    state, losses = jax.lax.fori_loop(0, count, update, (state, empty))
    return state, losses, jnp.array(False)


def _reassigned(tree: ObliqueTree, place: Array, sums: Array, x: Array, steps_per_epoch: int) -> tuple[Array, Array]:
    """Returns the assignment after an epoch: the leaves that samples reach, if the surrogate loss has converged."""
    mean, previous = sums[0] / steps_per_epoch, sums[1]
    settled = mean > (1 - _SETTLED) * previous
    place = jax.lax.cond(settled, lambda: ops.hard(tree.weights, tree.bias, x), lambda: place)
    return place, jnp.stack([jnp.zeros_like(mean), jnp.where(settled, jnp.inf, mean)])


def _result(run: Run, joint: Joint, strength: Array) -> Result:
    """Returns the tree with the lowest validation loss, or else the tree with the lower surrogate loss."""
    score = partial(greedy.evaluate if run.has_validation_set else _mean_surrogate, run)
    best = training.best(_method(run), joint.training, standardised(run), score=score)
    state = joint.training.replace(finite=jnp.isfinite(best.score))
    result = greedy.result_of(run, state, best.params, best.step, strength)
    return result._replace(finite=joint.training.finite)


def _mean_surrogate(run: Run, tree: ObliqueTree) -> Array:
    """Returns the mean surrogate loss of a tree on the training rows, relative to the leaf that each sample reaches.

    Splits are scaled to the radius of the ball. A longer split is the same split with a tighter bound (Proposition 1).
    So the scaling makes the comparison of trees independent of the lengths of their splits.
    """
    recipe, data, weight = run.recipe, standardised(run), run.weight
    norm = jnp.sqrt(jnp.square(tree.weights).sum(1) + jnp.square(tree.bias))
    factor = jnp.where(norm > 0, jnp.sqrt(recipe.nu) / jnp.where(norm > 0, norm, 1), 1).astype(norm.dtype)
    tree = tree.replace(weights=factor[:, None] * tree.weights, bias=factor * tree.bias)

    def block_sum(weight: Array, x: Array, y: Array) -> tuple[Array, Array]:
        surrogate = surrogate_loss(tree, Batch(x, y), recipe.inference, run.task)
        value = run.task.loss(tree.leaves.values[surrogate.leaf], y) + (surrogate.slopes * surrogate.scores).sum(0)
        return (weight * value).sum(), value

    block = min(recipe.batch_size, len(weight))
    return blocking.sum_over_blocks(block_sum, weight, data.x, data.y, block=block)[0] / weight.sum()
