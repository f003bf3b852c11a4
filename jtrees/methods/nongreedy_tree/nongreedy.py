"""Non-greedy trees: stochastic gradient descent on a surrogate loss, an upper bound of the hard loss.

The source is Norouzi et al., "Efficient Non-greedy Optimization of Decision Trees", NeurIPS 2015. ``nongreedy`` is the
method for :func:`jtrees.train`. ``NonGreedy`` is the recipe, which trains the tree of :class:`jtrees.CO2` jointly.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from jtrees import losses, ops, pytree, topology, training, validation as checks
from jtrees.methods.nongreedy_tree.greedy import Growing
from jtrees.methods.nongreedy_tree.greedy_recipe import GreedyRecipe, grow, strengths_of
from jtrees.methods.nongreedy_tree.surrogate import (
    INFERENCES,
    MAX_DEPTH,
    mean_surrogate,
    projection,
    scores_of,
    split,
    surrogate_loss,
    surrogate_step,
    with_leaves,
)
from jtrees.search import Run, Runs, SearchResult, options
from jtrees.search.minibatch import Schedule
from jtrees.search.runs import MOST
from jtrees.tasks import Regression, Task
from jtrees.training import Batch, LazyMomentumState
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
    checks.check_number("nu", nu)
    checks.check_part("momentum", momentum)
    checks.check_choice("inference", inference, INFERENCES)

    def init(batch: Batch, *, key: Array) -> ObliqueTree:
        batch = batch._replace(y=split(batch.y)[0])
        task.check(batch.y)
        drawn = jax.random.normal(key, (topology.num_nodes(depth), batch.x.shape[1] + 1), batch.x.dtype)
        tree = ObliqueTree(*in_bounds((drawn[:, 1:], drawn[:, 0])), None)
        return with_leaves(tree, ops.hard(tree.weights, tree.bias, batch.x), batch, task)

    def total(params: ObliqueTree, batch: Batch, *, key: Array, step: Array) -> tuple[Array, Array]:
        z = ops.scores(params.weights, params.bias, batch.x)
        found = surrogate_loss(jax.lax.stop_gradient(params), batch, jax.lax.stop_gradient(z), inference, task)
        lost = task.loss(params.leaves.values[found.leaf], split(batch.y)[0])
        value = lost + (found.slopes * jnp.take_along_axis(z, found.nodes, axis=0)).sum(0)
        return losses.weighted_mean(value, batch.weight), losses.weighted_mean(found.reached, batch.weight)

    def update(params: ObliqueTree, state: LazyMomentumState, batch: Batch, *, key: Array, step: Array) -> Any:
        z = scores_of(params, batch.x, inference)
        found, batch = surrogate_loss(params, batch, z, inference, task), batch._replace(y=split(batch.y)[0])
        options: Any = {"rate": training.at_step(rate, state.count), "decay": momentum, "task": task}
        return surrogate_step(params, state, batch, found, project=in_bounds, **options)

    def project(params: ObliqueTree) -> ObliqueTree:
        weights, bias = in_bounds((params.weights, params.bias))
        return params.replace(weights=weights, bias=bias)

    in_bounds = projection(nu, monotone)
    harden = lambda params, batch: params.refit(batch.x, split(batch.y)[0], batch.weight)
    rate: Any = learning_rate
    return training.Method(init, total, harden, project, None if rate is None else update)


# --- The recipe ------------------------------------------------------------------------------------------------------


class Joint(NamedTuple):
    """The state of the search of :class:`NonGreedy`.

    Attributes:
      growing: state of the greedy search. In the joint stage, its ``run`` trains the whole tree, and its ``place`` is
        the leaf that each sample is assigned to.
      surrogate: sum of the surrogate losses in the current epoch, and mean surrogate loss of the previous epoch.
    """

    growing: Growing
    surrogate: Float[Array, "2"]


@pytree.dataclass(kw_only=True)
class NonGreedy(GreedyRecipe):
    """Recipe of non-greedy trees: CO2, then stochastic gradient descent on the surrogate loss of the whole tree.

    In the joint stage, the learning rate again decays to zero. The model is the tree after the last update, or CO2's
    tree if its surrogate loss on the training data is lower. This comparison scales the splits of both trees to the
    radius of the ball. If ``validation`` is given, the loss on it is evaluated once an epoch. The model is then the
    tree with the lowest validation loss, which may be CO2's tree. Features, targets and the report are the same as for
    :class:`jtrees.CO2`.

    Attributes:
      depth: depth of the tree, 1 to 20.
      epochs: number of passes over the data in the joint stage. None: 100, with at least 300 and at most 7500 updates.
        Batches of fewer than 128 samples may take more updates, up to 960,000 samples in total.
      greedy_epochs: number of passes over the data for each level of the greedy stage.
      batch_size: samples in a mini-batch, at most n. The last samples of a pass that do not fill a mini-batch are
        skipped until the next shuffle.
      learning_rate: initial learning rate of each level and of the joint stage. None: 0.5, or 8 divided by the number
        of features if that is less.
      nu: squared radius of the ball of a split, above 0.
      momentum: momentum of the steps, in [0, 1) (see :func:`jtrees.training.lazy_momentum`).
      bins: number of bins of a feature. Their edges are the thresholds of initial splits.
      inference: ``"fast"`` or ``"exact"``: see :func:`jtrees.methods.nongreedy`.
      stable: whether to use stable SGD. It freezes the assigned leaf of each sample in its surrogate loss. The leaves
        are assigned again after an epoch that lowers the mean surrogate loss by less than one percent.
      ridge: whether initial splits may also use outputs of a ridge regression. For several targets these are the
        principal components of the outputs, for classes the linear discriminants. It has no effect in tables with more
        than 1024 features.
      shrink: whether constant leaves are shrunk towards their ancestors' means or class frequencies at the end
        (:func:`jtrees.leaves.fit_hierarchical`). It has an effect only for the squared error and the log loss. The
        strength has the lowest loss on the validation set. If there is no validation set, the held-out rows of the runs
        of ``precondition="auto"`` are used instead. If there are no such runs, generalised cross-validation chooses the
        strength.
      precondition: strength of the preconditioner, from 0 (none) to below 1. It helps gradient descent if features are
        correlated. ``"auto"``: the best of 0, 0.9 and 0.99 in runs on four fifths of the rows. It is 0 if the features
        are nearly uncorrelated, or if there are fewer than 500 rows or more than 512 features. If ``shrink`` is True, a
        table of 100 to 1024 rows and at most 512 features has at least one such run.
      rows: approximate number of rows that splits are trained on; a longer table is sampled. Leaves are fitted to all
        rows. ``"auto"``: 20,000, and at least 16 for each leaf. None: all rows.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> recipe = jtrees.NonGreedy(depth=1, epochs=5, greedy_epochs=5, precondition=0)
      >>> jtrees.fit(recipe, x, np.sign(x[:, 0]), key=jax.random.key(0)).report.search.active_leaves
      2
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
    ridge: bool = options.flag(True)
    shrink: bool = options.flag(True)
    precondition: float | Literal["auto"] = options.precondition()
    rows: int | Literal["auto"] | None = options.rows()

    @property
    def level_epochs(self) -> int:
        return self.greedy_epochs

    def trained(self, runs: Runs, trials: list[SearchResult | None]) -> list[SearchResult]:
        states, losses = grow(runs)
        steps = Schedule.of(runs.shape[0], self.epochs, self.batch_size).steps
        found = runs.train(_trained, runs.map(_begun, states), steps, name="NonGreedy, all levels")
        results = runs.fetch(runs.map(_result, found.states, strengths_of(runs, trials)))
        histories = [np.concatenate([*grown, lost]) for grown, lost in zip(losses, found.losses, strict=True)]
        before = [sum(map(len, grown)) for grown in losses]  # updates of the greedy levels
        each = zip(results, histories, before, strict=True)
        return [one._replace(history=lost, step=one.step + count) for one, lost, count in each]


# --- Compiled functions of a run -------------------------------------------------------------------------------------


def _begun(run: Run, state: Growing) -> Joint:
    """Returns the initial state of the joint stage: CO2's tree is the best tree so far."""
    greedy = run.recipe.greedy(run)
    tree, place = greedy.finished_level(state, run.batch)
    leaf = place - topology.num_nodes(greedy.depth)
    leaf = jnp.where(leaf < 0, ops.hard(tree.weights, tree.bias, run.batch.x), leaf)  # if the deadline cut levels off
    tree = with_leaves(tree, leaf, greedy.standardised(run.batch), run.task)
    key, zero = jax.random.fold_in(run.key, _JOINT), jnp.zeros((), jnp.int32)
    of_run = greedy.at_rest(state.run, tree).replace(key=key, step=zero)
    if not run.validates:  # with a validation set, the first evaluation evaluates CO2's tree
        of_run = of_run.replace(best=training.Best(tree, _mean(run, tree), of_run.step))
    return Joint(state.replace(run=of_run, place=leaf), jnp.asarray([0, jnp.inf], run.batch.x.dtype))


def _trained(run: Run, state: Joint, before: Array, count: Array, evaluates: Array) -> tuple[Joint, Array, Array]:
    """Returns the state after ``count`` updates, their losses, and False."""
    recipe, greedy, batch = run.recipe, run.recipe.greedy(run), run.batch
    data, last = greedy.standardised(batch), Schedule.of(len(batch.x), recipe.epochs, recipe.batch_size)
    rate: Any = greedy.rate(last.steps)
    options: Any = {"task": run.task, "inference": recipe.inference, "momentum": recipe.momentum}
    method = nongreedy(recipe.depth, recipe.nu, learning_rate=rate, monotone=run.monotone, **options)

    def once(j: Array, carry: tuple[Joint, Array]) -> tuple[Joint, Array]:
        state, losses = carry
        step = before + j
        if recipe.stable:
            ended = (step > 0) & (step % last.steps_per_epoch == 0)
            # A branch keeps the routing in the loop: the compiler would move it out of a loop of at most one step.
            tree, place, sums = state.growing.run.params, state.growing.place, state.surrogate
            assign = lambda: _reassigned(tree, place, sums, batch, last.steps_per_epoch)
            place, sums = jax.lax.cond(ended, assign, lambda: (place, sums))
            state = Joint(state.growing.replace(place=place), sums)
        growing = state.growing
        one_step = training.step.one_step(
            method,
            data._replace(y=(data.y, growing.place)) if recipe.stable else data,
            greedy.optimizer,
            batch_size=last.batch_size,
            score_every=last.steps_per_epoch if run.validates else 0,
            score=partial(greedy.evaluate, run),
        )
        of_run, (lost, _) = one_step(growing.run, step)
        joint = Joint(growing.replace(run=of_run), state.surrogate.at[0].add(lost))
        return joint, losses.at[j].set(lost)

    state, losses = jax.lax.fori_loop(0, count, once, (state, jnp.full(MOST, training.state.NOT_TAKEN, batch.x.dtype)))
    return state, losses, jnp.array(False)


def _result(run: Run, state: Joint, strength: Array) -> SearchResult:
    """Returns the tree with the lowest validation loss, or else the tree with the lower surrogate loss."""
    recipe, greedy, of_run = run.recipe, run.recipe.greedy(run), state.growing.run
    evaluate = partial(greedy.evaluate if run.validates else _mean, run)
    method = nongreedy(recipe.depth, recipe.nu, task=run.task, inference=recipe.inference)
    best = training.best(method, of_run, greedy.standardised(run.batch), score=evaluate)
    return greedy.result(best.params, best.step, of_run.finite & jnp.isfinite(best.score), run, strength)


def _mean(run: Run, tree: ObliqueTree) -> Array:
    """Returns the mean surrogate loss of a tree on the training rows."""
    recipe, batch = run.recipe, run.recipe.greedy(run).standardised(run.batch)
    block = min(recipe.batch_size, len(batch.x))
    return mean_surrogate(tree, batch, task=run.task, nu=recipe.nu, inference=recipe.inference, block=block)


def _reassigned(
    tree: ObliqueTree, place: Array, sums: Array, batch: Batch, steps_per_epoch: int
) -> tuple[Array, Array]:
    """Returns the assignment after an epoch: the leaves that samples reach, if the surrogate loss has converged."""
    mean, before = sums[0] / steps_per_epoch, sums[1]
    settled = mean > (1 - _SETTLED) * before
    place = jax.lax.cond(settled, lambda: ops.hard(tree.weights, tree.bias, batch.x), lambda: place)
    return place, jnp.stack([jnp.zeros_like(mean), jnp.where(settled, jnp.inf, mean)])
