"""A search of many starts, CART the first of them, each trained under ever sharper routings.

GET and RADDT are this search: a paper adds its soft routing (a :class:`jtrees.Method` of a sharpness) and its
sharpnesses. The best hard tree of all is returned, and CART itself where nothing beats it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np
import optax

from jtrees import leaves as kinds, losses, ops, topology, training, validation as checks, warmstart
from jtrees.data import Data, Scaling, Table, without_padding
from jtrees.search.recipe import Finished, Rounds, Search, SearchResult
from jtrees.tasks import Classification, Task
from jtrees.training import Batch, Best, TrainState, map_starts
from jtrees.tree import ObliqueTree

_WARM_UP = 10  # linear warm-up steps
_LAST_LEARNING_RATE = 1e-4  # of the peak: 1e-6 for the paper's 0.01
_WEIGHT_DECAY = 1e-2  # AdamW's usual decay, which the paper leaves as it is
# The unit of features: about the spread that uniform numbers have in [0, 1], for which the paper's learning rate,
# sharpness and random starts are meant.
DEVIATIONS = 3.0
# Slopes of linear leaves in the user's units: float32 holds them and their products with parts of a deviation.
_FLATTEST, _STEEPEST = 1e-37, 1e36
_DECOMPOSITION = 2  # of a matrix (p, p), in elements of a step for each of p**3
_NONE_EXPECTED = 1e30  # of targets in [0, 1]: what stands for an expected error that there is none of
_EVALUATIONS = 20  # of a score that costs more than a step, under each sharpness


# --- The method ------------------------------------------------------------------------------------------------------


def soft_method(
    depth: int,
    sharpness: training.Number,
    *,
    name: str,
    route: ops.Route | None,
    leaves: str,
    task: Task,
    l1: float | Array,
    implementation: str | None,
) -> training.Method:
    """A tree trained on the loss that a soft routing of sharpened scores expects.

    Arguments are those of :func:`jtrees.methods.get`, but for ``sharpness``, the factor of the scores; ``name``, what
    the method calls it; and ``route``, the soft routing as in :func:`jtrees.ops.expected_loss`.
    """
    depth, kind = checks.check_depth(depth), kinds.kind_of(leaves, task)
    checks.check_positive(name, sharpness)
    checks.check_not_negative("l1", l1)
    for which, value in ((name, sharpness), ("l1", l1)):
        if not callable(value) and np.ndim(value):
            raise ValueError(f"{which} must be one number, got shape {np.shape(value)}")

    def init(batch: Batch, *, key: Array) -> ObliqueTree:
        """Weights and biases from U(-1, 1), leaves as their kind starts."""
        task.check(batch.y)
        nodes, (_, p), dtype = topology.num_nodes(depth), batch.x.shape, batch.x.dtype
        weights_key, bias_key, leaves_key = jax.random.split(key, 3)
        weights = jax.random.uniform(weights_key, (nodes, p), dtype, -1, 1)
        bias = jax.random.uniform(bias_key, (nodes,), dtype, -1, 1)
        return ObliqueTree(weights, bias, kind.start(leaves_key, nodes + 1, batch.x, batch.y, task.shape))

    def loss(params: ObliqueTree, batch: Batch, *, key: Array, step: Array) -> tuple[Array, Array]:
        x, y, weight = batch
        factor = training.at_step(sharpness, step)
        w, b = factor * params.weights, factor * params.bias
        options = {"route": route, "implementation": implementation}
        loss, leaf = ops.expected_loss(w, b, params.leaves, x, y, weight=weight, **options)
        return loss + l1 * jnp.abs(params.weights).sum(), params.leaves.criterion(leaf, x, y, weight)

    return training.Method(init, loss, lambda params, batch: params.refit(*batch))


# --- The search ------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """A start on its way through its stages, one for each sharpness.

    Attributes:
      splits: those that the stage began with; after the last, those that it ended with (``leaves`` is None).
      training: the run of this stage.
      best: the best splits of the stages so far.
      sharpness: of each stage, ``(stages,)``.
      scores: the best score in each, infinite where there is none, ``(stages,)``.
      steps: the epoch at which it was seen, ``(stages,)``.
    """

    splits: ObliqueTree
    training: TrainState
    best: Best
    sharpness: Array
    scores: Array
    steps: Array


def restarts(
    task: Task,
    shape: tuple[int, int],
    *,
    method: Callable[[Any], training.Method],
    stages: int,
    sharpness: Callable[[Array], Array],
    depth: int,
    leaves: str,
    starts: int,
    epochs: int,
    learning_rate: Any,
    cart: bool,
    between: Callable[[ObliqueTree, Batch], ObliqueTree] | None = None,
) -> Search:
    """Many starts under ever sharper routings.

    Each start trains under each of its sharpnesses in turn, full batch, with AdamW (linear warm-up, then cosine), going
    on from the hard tree before. Hard trees are evaluated on the way and the best is kept (at every epoch for constant
    leaves and classes, 20 times or a few more in each stage where an evaluation costs more).

    The start of the search is None, or splits with a leading axis, ``(m, nodes, p)``: those of the first m starts.

    Args:
      task: what is predicted.
      shape: of the features.
      method: of a sharpness.
      stages: number of sharpnesses.
      sharpness: numbers drawn from U(0, 1), ``(starts, stages)`` -> the sharpness of each start in each stage.
      depth: of the tree.
      leaves: kind of leaves.
      starts: number of starts.
      epochs: updates in each stage.
      learning_rate: its peak.
      cart: whether start 0 is CART.
      between: what is done to the splits after each stage, given the batch; or None.

    Raises:
      ValueError: for linear leaves in classification, and for more starts than arrays of 32-bit sizes hold.
    """
    kind, (n, p), nodes, num_leaves = kinds.kind_of(leaves, task), shape, topology.num_nodes(depth), 2**depth
    checks.check_count("starts", starts, most=checks.MAX_NUMBERS // (nodes * (p + 1)))
    warm_up = min(_WARM_UP, epochs // 2)
    rate = optax.warmup_cosine_decay_schedule(1 / (warm_up + 1), 1.0, warm_up, epochs, _LAST_LEARNING_RATE)
    optimizer = optax.adamw(lambda step: learning_rate * rate(step), weight_decay=_WEIGHT_DECAY)

    def stage_of(params: ObliqueTree, sharpness: Array, batch: Batch) -> TrainState:
        """The run of a stage before its first step."""
        # Full batch, and nothing random in the loss.
        of_method: Any = {"key": jax.random.key(0), "optimizer": optimizer, "params": params}
        state = training.start(method(sharpness), batch, **of_method)
        return state.replace(order=state.order[:1])  # of the samples: there is but one batch

    def begin(splits: ObliqueTree, sharpness: Array, batch: Batch) -> Run:
        """A start before its first stage."""
        none = jnp.full(sharpness.shape, jnp.inf, batch.x.dtype)
        best = Best(splits, none[0], jnp.zeros((), jnp.int32))
        # The first round makes the run anew: here only its shapes count.
        params = splits.replace(leaves=kind.empty(num_leaves, p, task.shape, batch.x.dtype).trainable())
        state = stage_of(params, sharpness[0], batch)
        return Run(splits, state, best, sharpness, none, jnp.zeros(sharpness.shape, jnp.int32))

    def init(start: ObliqueTree | None, batch: Batch, *, key: Array) -> Run:
        # All in one draw: draws take longer to compile than all else here.
        drawn = jax.random.uniform(key, (starts, stages + nodes * (p + 1)), batch.x.dtype)
        splits = 2 * drawn[:, stages:].reshape(starts, nodes, p + 1) - 1
        weights, bias = splits[..., :-1], splits[..., -1]
        if start is not None:
            given = len(start.bias)
            weights, bias = weights.at[:given].set(start.weights), bias.at[:given].set(start.bias)
        one = lambda splits, sharpness: begin(splits, sharpness, batch)
        return jax.vmap(one)(ObliqueTree(weights, bias, None), sharpness(drawn[:, :stages]))

    def evaluate(params: ObliqueTree, batch: Batch, by: Batch) -> Array:
        """What the hard tree loses on other samples."""
        predictions, weight = params.refit(*batch).apply(by.x), training.normalised(by).weight
        return losses.weighted_mean(task.prediction_loss(predictions, by.y), weight)

    def advanced(i: Array, run: Run, batch: Batch, validation: Batch | None, rounds: Rounds) -> tuple[Run, Array]:
        """One start after round i, and the losses of its steps; i is one for all starts."""
        stage = i // rounds.rounds_per_stage
        first, last = i % rounds.rounds_per_stage == 0, (i + 1) % rounds.rounds_per_stage == 0
        score = None if validation is None else lambda params: evaluate(params, batch, validation)
        # The criterion of constant leaves falls out of a step; other scores cost as much as one, or many.
        free = validation is None and leaves == "constant"
        every = 1 if free else max(1, epochs // _EVALUATIONS)
        now = run.sharpness[stage]
        once = training.one_step(method(now), batch, optimizer, score_every=every, score=score, last=epochs)

        def fresh() -> TrainState:
            empty = kind.empty(num_leaves, p, task.shape, batch.x.dtype)
            hard = run.splits.replace(leaves=empty).refit(*batch)
            params = hard.replace(leaves=hard.leaves.trainable())
            return stage_of(params, now, batch).replace(finite=run.training.finite)

        state = jax.lax.cond(first, fresh, lambda: run.training)
        # After the last step of a stage one more, for what it sees: another evaluation would be as long a program again.
        steps = rounds.steps_in(i)
        count, step = steps + last.astype(jnp.int32), rounds.steps_before(i)
        state, history = training.advance_up_to(once, state, count, rounds.size + 1, step=step)
        lost = jnp.where(jnp.arange(rounds.size) < steps, history.losses[:-1], jnp.nan)

        def next_stage() -> Run:
            own, value = state.best.params.replace(leaves=None), state.best.score
            splits = own if between is None else between(own, batch)
            # What is done between is meant to leave training samples where they are, but not others.
            if score is not None and between is not None:
                leaves_of = splits.replace(leaves=state.best.params.leaves)
                value = jnp.where(jnp.isfinite(value), score(leaves_of), jnp.inf)
            value = jnp.where(state.finite, value, jnp.inf)
            better = Best(splits, value, state.best.step)
            best = jax.tree.map(lambda old, new: jnp.where(value < run.best.score, new, old), run.best, better)
            finite = jnp.isfinite(value)
            # What is kept of the run is only whether it was finite: its best has been seen to.
            spent = state.replace(best=state.best.replace(score=jnp.full_like(value, jnp.inf)), finite=finite)
            scores, steps = run.scores.at[stage].set(value), run.steps.at[stage].set(state.best.step)
            return Run(splits, spent, best, run.sharpness, scores, steps)

        run = jax.lax.cond(last, next_stage, lambda: run._replace(training=state))
        return run, lost

    def one_round(i: Array, state: Run, batch: Batch, validation: Batch | None, rounds: Rounds) -> tuple[Run, Array]:
        return map_starts(lambda run: advanced(i, run, batch, validation, rounds), state)

    def result(state: Run, batch: Batch, validation: Batch | None) -> SearchResult:
        best = jax.vmap(_best_so_far)(state)
        scores = jnp.where(state.training.finite, best.score, jnp.inf)
        index = jnp.argmin(scores)
        chosen = jax.tree.map(lambda a: a[index], best)
        extra = {"sharpness": state.sharpness, "losses": state.scores, "steps": state.steps, "start": index}
        extra["dropped"] = starts - state.training.finite.sum()
        return SearchResult(chosen.params, scores[index], state.training.finite.any(), chosen.step, extra)

    def prepare(batch: Batch, *, key: Array) -> ObliqueTree | None:
        if not cart:
            return None
        tree = grown_cart(without_padding(batch), task, depth, leaves)
        return jax.tree.map(lambda a: np.asarray(a)[None], tree)

    def scaling(table: Table) -> Scaling:
        fitted = Scaling.fit(table, DEVIATIONS)
        if leaves == "linear":
            _check_slopes(fitted)
        return fitted

    def finish(result: SearchResult, start: ObliqueTree | None, data: Data, **_: Any) -> Finished:
        if not result.finite and start is None:
            raise FloatingPointError(f"all {starts} starts became non-finite: try a smaller learning_rate")
        empty, loss_unit = kind.empty(num_leaves, p, task.shape), data.scaling.loss_unit

        def finished(splits: ObliqueTree) -> tuple[ObliqueTree, float]:
            """A tree in the user's units with leaves set there, and the loss it is chosen by."""
            tree, criterion = data.refit(splits, empty)
            loss = data.loss(tree)
            if data.validation is not None or leaves == "constant":
                return tree, loss
            # No less than the tree's own loss, which is the greater where outliers, clipped in the scaled data, are
            # predicted; and that alone where the weight is in so few rows that nothing is expected of new ones.
            return tree, max(criterion if criterion < _NONE_EXPECTED * loss_unit else 0.0, loss)

        tree, loss, chosen, cart_loss = None, np.inf, int(result.extra["start"]), float("nan")
        if result.finite:
            tree, loss = finished(data.scaling.restore_splits(result.model))
        if cart and start is not None:
            # CART's own tolerances are absolute, and its thresholds exact on raw features only; so the CART not to
            # fall behind is the better of the two, grown on scaled and (where float32 holds them) on raw features.
            carts = [data.scaling.restore_splits(jax.tree.map(lambda a: a[0], start))]
            if data.scaling.origin is None:
                table = data.table
                carts.append(grown_cart(Batch(table.x, table.y, table.weight), task, depth, leaves))  # type: ignore[arg-type]
            cart_tree, cart_loss = min(map(finished, carts), key=lambda both: both[1])
            if not loss < cart_loss:
                tree, loss, chosen = cart_tree, cart_loss, -1
        report = {name: np.asarray(result.extra[name]) for name in ("sharpness", "steps")}
        report["losses"] = np.asarray(result.extra["losses"], np.float64) * loss_unit
        report |= {"cart_loss": cart_loss, "chosen": chosen, "dropped": int(result.extra["dropped"])}
        assert tree is not None
        tree = tree.merged()
        return Finished(tree, tree, loss, report)

    elements = nodes * n
    if leaves == "linear":  # an evaluation decomposes a matrix (p, p) for each node of the whole tree
        elements += (2 * nodes + 1) * _DECOMPOSITION * p**3 * min(1, _EVALUATIONS / epochs)
    return Search(
        task=task,
        rounds=Rounds(epochs, starts * int(elements), stages),
        init=init,
        round=one_round,
        result=result,
        finish=finish,
        prepare=prepare,
        scaling=scaling,
        yields_constant_tree=leaves == "constant",
    )


def _best_so_far(run: Run) -> Best:
    """The best splits of a start, those of a stage that was broken off included."""
    now = run.training.best
    now = now.replace(params=now.params.replace(leaves=None))
    return jax.tree.map(lambda old, new: jnp.where(now.score < run.best.score, new, old), run.best, now)


def _check_slopes(scaling: Scaling) -> None:
    """Raises ``ValueError`` if targets per unit of a feature are numbers that float32 does not hold."""
    varying = np.flatnonzero(~scaling.constant)
    slopes = np.atleast_1d(scaling.y_unit)[:, None] / scaling.x_unit[varying]
    if len(bad := np.argwhere((slopes < _FLATTEST) | (slopes > _STEEPEST))):
        output, column = bad[0][0], varying[bad[0][1]]
        raise ValueError(
            f"x and y must be in units in which linear leaves have slopes that float32 holds, got a range of "
            f"{np.atleast_1d(scaling.y_unit)[output]:.3g} in y and a deviation of "
            f"{scaling.x_unit[column] / DEVIATIONS:.3g} in column {column} of x: multiply one of them"
        )


def grown_cart(rows: Batch, task: Task, depth: int, leaves: str = "constant") -> ObliqueTree:
    """The splits of CART of a depth; where leaves are linear, grown on what a linear regression leaves of the targets."""
    x, y, weight = rows
    if isinstance(task, Classification):
        return warmstart.cart_classifier(x, y, depth, sample_weight=weight).replace(leaves=None)
    if leaves == "linear":
        root = np.sqrt(np.ones(len(x)) if weight is None else weight)[:, None]
        with_one = np.column_stack([x - x.mean(0, dtype=np.float64), np.ones(len(x))])
        unit = np.maximum(np.abs(with_one).max(0), np.finfo(np.float32).tiny)
        with_one /= unit
        wide = y.reshape(len(x), -1)
        residual = (wide - with_one @ np.linalg.lstsq(root * with_one, root * wide, rcond=None)[0]).reshape(y.shape)
        y = residual if np.ptp(residual, axis=0).min() > 0 else y
    return warmstart.cart_regressor(x, y, depth, sample_weight=weight).replace(leaves=None)
