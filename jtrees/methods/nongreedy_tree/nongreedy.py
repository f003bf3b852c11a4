"""Non-greedy trees: stochastic gradient descent on a surrogate loss, an upper bound of the hard loss (Norouzi et al.,
"Efficient Non-greedy Optimization of Decision Trees", NeurIPS 2015).

``nongreedy`` is the method for :func:`jtrees.train`; ``NonGreedy`` the recipe: a :class:`jtrees.CO2`, trained jointly.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrees import losses, ops, pytree, topology, training, validation as checks
from jtrees.methods.nongreedy_tree.greedy import Greedy, Growing, edges, rate_of, stepwise
from jtrees.methods.nongreedy_tree.surrogate import (
    INFERENCES,
    MAX_DEPTH,
    into_ball,
    mean_surrogate,
    scores_of,
    split,
    surrogate_loss,
    surrogate_step,
    with_leaves,
)
from jtrees.search import Recipe, Rounds, Schedule, Search, SearchResult, by_first_step, options, preconditioned
from jtrees.tasks import Regression, Task
from jtrees.training import Batch, LazyMomentumState
from jtrees.tree import ObliqueTree

_SETTLED = 0.01  # an epoch that lowers the mean surrogate loss by a smaller fraction has converged


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
    """Returns the method of non-greedy trees: minimises a surrogate loss, an upper bound of the loss of a hard tree.

    Parameters are an :class:`ObliqueTree`. The loss is log loss, or squared error (of several targets the mean).
    Assumes features and targets of mean 0 and deviation 1. Rows of splits, bias included, stay in the ball
    ``|w|^2 <= nu``. If ``y`` of the data is a pair ``(y, assignment)``, with a leaf for each sample, the surrogate loss
    is that of stable SGD (eq. 14), relative to the decisions that lead to the assigned leaf.

    Args:
      depth: depth of the tree, 1 to 20.
      nu: squared radius of the ball, above 0; smaller values widen the margins and leave fewer leaves active.
      task: what is predicted. In classification leaves hold logits.
      inference: ``"fast"``, over leaves one decision away, O(depth^2 p) per sample; or ``"exact"``, over all.
      learning_rate: if given, steps are those of ``lazy_momentum(learning_rate, momentum)``, which must be the
        optimiser, but in deep trees only for the rows on the paths of samples. None: dense gradients.
      momentum: momentum of these steps, in [0, 1).

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
        tree = ObliqueTree(*into_ball((drawn[:, 1:], drawn[:, 0]), nu), None)
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
        options: Any = {"rate": training.at_step(rate, state.count), "decay": momentum, "nu": nu, "task": task}
        return surrogate_step(params, state, batch, found, **options)

    def project(params: ObliqueTree) -> ObliqueTree:
        weights, bias = into_ball((params.weights, params.bias), nu)
        return params.replace(weights=weights, bias=bias)

    harden = lambda params, batch: params.refit(batch.x, split(batch.y)[0], batch.weight)
    rate: Any = learning_rate
    return training.Method(init, total, harden, project, None if rate is None else update)


# --- The recipe ------------------------------------------------------------------------------------------------------


class Joint(NamedTuple):
    """The state of the search of :class:`NonGreedy`.

    Attributes:
      growing: state of the greedy search; in the joint stage its ``run`` trains the whole tree, and ``place`` is the
        leaf that each sample is assigned to.
      surrogate: sum of the surrogate losses in the current epoch, and their mean in the previous one.
    """

    growing: Growing
    surrogate: Float[Array, "2"]


@pytree.dataclass(kw_only=True)
class NonGreedy(Recipe):
    """Recipe of non-greedy trees: CO2, then stochastic gradient descent on the surrogate loss of the whole tree.

    The joint stage has its own decay of the learning rate to zero. The tree is that of the last update, or CO2's if its
    surrogate loss on the training data is lower, with the splits of both scaled to the radius of the ball. With
    ``validation`` it is the tree with the lowest loss there, evaluated once an epoch, CO2's included. Features, targets
    and the report are as for :class:`jtrees.CO2`.

    Attributes:
      depth: depth of the tree, 1 to 20.
      epochs: passes over the data in the joint stage; None: enough for 2000 updates, and at least 12.
      greedy_epochs: passes over the data for each level of the greedy stage.
      batch_size: samples in a mini-batch, at most n. The remainder of a pass is left out until the next shuffle.
      learning_rate: initial learning rate of each level and of the joint stage; None: 0.5, or 8 divided by the number
        of features if that is less.
      nu: squared radius of the ball of a split, above 0.
      momentum: momentum of the steps, in [0, 1) (see :func:`jtrees.training.lazy_momentum`).
      bins: number of bins of a feature, whose edges are the thresholds of initial splits.
      inference: ``"fast"`` or ``"exact"``: see :func:`jtrees.methods.nongreedy`.
      stable: whether the assigned leaf of a sample in its surrogate loss is frozen (stable SGD) until an epoch lowers
        the mean by less than one percent.
      ridge: whether initial splits may also be of the output of a ridge regression, of several outputs of their
        principal components, of classes of linear discriminants; but only in tables of at most 1024 features.
      shrink: whether leaves are drawn towards their ancestors' means or class frequencies
        (:func:`jtrees.leaves.fit_hierarchical`): by as much as is best for the validation set; without one, for the
        rows that the runs of ``precondition="auto"`` leave out; without such runs, by generalised cross-validation.
      precondition: strength of the preconditioner, from 0 (none) to below 1, for gradient descent where features are
        correlated; ``"auto"``: the best of 0, 0.9 and 0.99 in runs on four fifths of the rows, but 0 for features that
        are as good as uncorrelated, fewer than 500 rows or more than 512 features. With ``shrink``, a table of 100 to
        1024 rows and at most 512 features has at least one such run. (Rows are counted after padding.)

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> recipe = jtrees.NonGreedy(depth=1, epochs=5, greedy_epochs=5, precondition=0)
      >>> jtrees.fit(recipe, x, np.sign(x[:, 0]), key=jax.random.key(0)).report["active_leaves"]
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

    def search(self, task: Task, shape: tuple[int, int]) -> Search:
        return by_first_step(lambda one: self._search(one, shape, self.shrink and one is task), task)

    def _search(self, task: Task, shape: tuple[int, int], shrink: bool) -> Search:
        n, p = shape
        level, last = (Schedule.of(n, epochs, self.batch_size) for epochs in (self.greedy_epochs, self.epochs))
        greedy = Greedy(
            self.depth, task, self.nu, self.momentum, rate_of(self.learning_rate, p), level, self.ridge, shrink
        )
        options: Any = {"task": task, "inference": self.inference, "momentum": self.momentum}
        method = nongreedy(self.depth, self.nu, learning_rate=greedy.rate(last.steps), **options)
        compared: Any = {"task": task, "nu": self.nu, "inference": self.inference, "block": level.batch_size}
        mean = lambda tree, batch: mean_surrogate(tree, greedy.standardised(batch), **compared)

        def step(state: Joint, step: Array, data: Batch, batch: Batch, validation: Batch | None) -> tuple[Joint, Array]:
            def grow(carry: tuple[Joint, Array]) -> tuple[Joint, Array]:
                growing, lost = greedy.step(carry[0].growing, step, data, batch)
                return carry[0]._replace(growing=growing), lost

            def start_joint(carry: tuple[Joint, Array]) -> tuple[Joint, Array]:
                state, (tree, place) = carry[0], greedy.finished_level(carry[0].growing, batch)
                leaf = place - topology.num_nodes(self.depth)
                tree = with_leaves(tree, leaf, data, task)
                run = greedy.at_rest(state.growing.run, tree)
                if validation is None:  # else the first evaluation evaluates this tree
                    run = run.replace(best=training.Best(tree, mean(tree, batch), run.step))
                return state._replace(growing=state.growing.replace(run=run, place=leaf)), carry[1]

            joint = lambda carry: joint_step(carry[0], step, data, batch, validation)
            carry = training.apply_in_place_if(step < greedy.steps, grow, (state, jnp.zeros((), batch.x.dtype)))
            carry = training.apply_in_place_if(step == greedy.steps, start_joint, carry)
            return training.apply_in_place_if(step >= greedy.steps, joint, carry)

        def joint_step(state: Joint, step: Array, data: Batch, batch: Batch, validation: Any) -> tuple[Joint, Array]:
            if self.stable:
                epoch_ended = (step > greedy.steps) & (step % last.steps_per_epoch == 0)
                # A branch, as the compiler would move the routing out of a loop of at most one step.
                tree, place, sums = state.growing.run.params, state.growing.place, state.surrogate
                assign = lambda: _reassigned(tree, place, sums, batch, last.steps_per_epoch)
                place, sums = jax.lax.cond(epoch_ended, assign, lambda: (place, sums))
                state = Joint(state.growing.replace(place=place), sums)
            growing = state.growing
            data = data._replace(y=(data.y, growing.place)) if self.stable else data
            one_step = training.one_step(
                method,
                data,
                greedy.optimizer,
                batch_size=last.batch_size,
                score_every=0 if validation is None else last.steps_per_epoch,
                score=lambda params: greedy.evaluate(params, batch, validation),
            )
            run, (lost, _) = one_step(growing.run, step)
            return Joint(growing.replace(run=run), state.surrogate.at[0].add(lost)), lost

        def init(start: Array, batch: Batch, *, key: Array) -> Joint:
            return Joint(greedy.init(start, batch, key=key), jnp.asarray([0, jnp.inf], batch.x.dtype))

        def result(state: Joint, batch: Batch, validation: Batch | None) -> SearchResult:
            run, (grown, _) = state.growing.run, greedy.finished_level(state.growing, batch)
            evaluate = lambda params: greedy.evaluate(params, batch, validation)
            score = evaluate if validation is not None else lambda params: mean(params, batch)
            best = training.best(method, run, greedy.standardised(batch), score=score)
            joint_started = run.step > greedy.steps
            tree = jax.tree.map(lambda a, b: jnp.where(joint_started, a, b), best.params, grown)
            run = run.replace(step=jnp.where(joint_started, best.step, run.step))
            return greedy.result(tree, state.growing.replace(run=run), batch, validation)

        elements = self.depth * (self.depth + 1) // 2 * p // 4  # of a step, per sample
        base = Search(
            task=task,
            rounds=Rounds((greedy.steps + last.steps,), last.batch_size * elements),
            init=init,
            round=stepwise(step, greedy),
            result=result,
            finish=greedy.finish,
            prepare=edges(self.bins),
            tree_leaves="constant",
        )

        def with_shrinkage(state: Joint, strength: Array) -> Joint:
            return state._replace(growing=state.growing.replace(shrinkage=strength))

        return preconditioned(base, self.precondition, shape, hand_over=with_shrinkage if shrink else None)


def _reassigned(
    tree: ObliqueTree, place: Array, sums: Array, batch: Batch, steps_per_epoch: int
) -> tuple[Array, Array]:
    """Returns the assignment after an epoch: to the leaves reached, if the surrogate loss has converged."""
    mean, before = sums[0] / steps_per_epoch, sums[1]
    settled = mean > (1 - _SETTLED) * before
    place = jax.lax.cond(settled, lambda: ops.hard(tree.weights, tree.bias, batch.x), lambda: place)
    return place, jnp.stack([jnp.zeros_like(mean), jnp.where(settled, jnp.inf, mean)])
