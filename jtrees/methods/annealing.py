"""What GET and RADDT share, from a scaled table to one hard tree.

Many starts, CART the first of them; each trained under ever harder routings, its leaves set anew from the hard routing
after each; the best hard tree of all returned in the user's units, and CART itself where nothing beats it. A paper adds
its soft routing (a :class:`jtrees.Method` of a scale) and its scales.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np
import optax

from jtrees import leaves as kinds, losses, ops, topology, training, validation as checks, warmstart
from jtrees.recipes import Fit, Found, Recipe, Rounds, Watch, number, static
from jtrees.starts import map_starts
from jtrees.table import Scale, Table, mean_loss
from jtrees.tasks import Classification, Task
from jtrees.training import Batch, Best, TrainState
from jtrees.tree import ObliqueTree

_WARM_UP = 10  # linear warm-up steps
_LAST_LEARNING_RATE = 1e-4  # of the peak: 1e-6 for the paper's 0.01
_WEIGHT_DECAY = 1e-2  # AdamW's usual decay, which the paper leaves as it is
# The unit of features: about the spread that uniform numbers have in [0, 1], for which the paper's learning rate, scale
# factors and random starts are meant.
DEVIATIONS = 3.0
# Slopes of linear leaves in the user's units: float32 holds them and their products with parts of a deviation.
_FLATTEST, _STEEPEST = 1e-37, 1e36
_DECOMPOSITION = 2  # of a matrix (p, p), in elements of a step for each of p**3
_NONE_EXPECTED = 1e30  # of targets in [0, 1]: what stands for an expected error that there is none of
_LOOKS = 20  # at a score that costs more than a step, under each scale


# --- The method ------------------------------------------------------------------------------------------------------


def soft_method(
    depth: int,
    scale: training.Number,
    *,
    name: str,
    route: ops.Route | None,
    leaves: str,
    task: Task,
    l1: float | Array,
    implementation: str | None,
) -> training.Method:
    """A tree trained on the loss that a soft routing of scaled scores expects.

    Arguments are those of :func:`jtrees.get`, but for ``scale``, the factor of the scores; ``name``, what the method
    calls it; and ``route``, the soft routing as in :func:`jtrees.ops.expected_loss`.
    """
    depth, kind = checks.check_depth(depth), kinds.kind_of(leaves, task)
    checks.check_positive(name, scale)
    checks.check_not_negative("l1", l1)
    for which, value in ((name, scale), ("l1", l1)):
        if not callable(value) and np.ndim(value):
            raise ValueError(f"{which} must be one number, got shape {np.shape(value)}")

    def init(batch: Batch, *, key: Array) -> ObliqueTree:
        task.check(batch.y)
        return random_tree(key, depth, kind, batch, task)

    def loss(params: ObliqueTree, batch: Batch, *, key: Array, step: Array) -> tuple[Array, Array]:
        x, y, weight = batch
        factor = training.at_step(scale, step)
        w, b = factor * params.weights, factor * params.bias
        how = {"route": route, "implementation": implementation}
        loss, leaf = ops.expected_loss(w, b, params.leaves, x, y, weight=weight, **how)
        return loss + l1 * jnp.abs(params.weights).sum(), params.leaves.criterion(leaf, x, y, weight)

    return training.Method(init, loss, lambda params, x: params.predict(x), lambda params, batch: params.refit(*batch))


def random_tree(key: Array, depth: int, kind: Any, batch: Batch, task: Task) -> ObliqueTree:
    """Weights and biases from U(-1, 1), leaves as their kind starts."""
    nodes, (_, p), dtype = topology.num_nodes(depth), batch.x.shape, batch.x.dtype
    k_weights, k_bias, k_leaves = jax.random.split(key, 3)
    weights = jax.random.uniform(k_weights, (nodes, p), dtype, -1, 1)
    bias = jax.random.uniform(k_bias, (nodes,), dtype, -1, 1)
    return ObliqueTree(weights, bias, kind.start(k_leaves, nodes + 1, batch.x, batch.y, task.shape))


# --- The search ------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """A start on its way under its scales.

    Attributes:
      splits: where the scale began; after the last, the splits that it ended with (``leaves`` is None).
      training: the run under the scale.
      best: the best splits of the scales so far.
      scales: the scale factors, ``(scales,)``.
      scores: the best score under each, infinite where there is none, ``(scales,)``.
      steps: the epoch at which it was seen, ``(scales,)``.
    """

    splits: ObliqueTree
    training: TrainState
    best: Best
    scales: Array
    scores: Array
    steps: Array


@struct.dataclass(kw_only=True)
class Annealed(Recipe):
    """Many starts under ever harder routings.

    Each start trains under each of its scale factors in turn, full batch, with AdamW (linear warm-up, then cosine),
    going on from the hard tree before. Hard trees are looked at on the way and the best is kept (at every epoch for
    constant leaves and classes, 20 times or a few more under each scale factor where a look costs more), judged by

    - the mean squared error on the training data, for constant leaves;
    - the mean squared error expected on new data by generalised cross-validation, for linear leaves, which shrink by
      as much as that finds best (:func:`jtrees.leaves.fit_shrunk`; the paper has least squares in each leaf by itself,
      and the training error); what is reported is no less than the mean squared error on the training data;
    - the mean log loss on the training data, for classes;
    - the mean squared error or log loss on ``validation``, where that is given.

    Start 0 is a CART tree of the same depth (for linear leaves, of what a linear regression leaves); if nothing beats
    CART, CART is returned. Features are scaled to mean 0 and deviation 1/3, where the paper has the range [0, 1].

    The report has ``scales`` and ``losses`` and ``steps``: of each start the scale factors, the loss of the best hard
    tree under each and the epoch at which it was seen, ``(starts, scales)``; ``cart_loss``, that of CART, or NaN;
    ``chosen``, the start that the tree came from, -1 if CART was not beaten; ``dropped``, the number of starts that
    became non-finite.

    Attributes:
      depth: depth of the tree, 1 to 16.
      leaves: ``"constant"``, or ``"linear"`` (regression only).
      starts: number of starts, the CART start included.
      epochs: updates under each scale factor.
      learning_rate: peak learning rate.
      l1: strength of the L1 penalty on split weights (of scaled data).
      cart: whether start 0 is CART (needs scikit-learn); without it nothing is promised about CART.
      implementation: of the training step, None for what is fastest: see :mod:`jtrees.ops`.
    """

    depth: int = static(default=4)
    leaves: Literal["constant", "linear"] = static(default="constant")
    starts: int = static(default=10)
    epochs: int = static(default=3000)
    learning_rate: float = 0.01
    l1: float = 0.0
    cart: bool = static(default=True)
    implementation: str | None = static(default=None)

    def method(self, scale: Any, task: Task) -> training.Method:
        """The paper's method under one scale."""
        raise NotImplementedError

    def stages(self) -> int:
        """The number of scales."""
        raise NotImplementedError

    def scales(self, drawn: Array) -> Array:
        """The scale factors of starts, in the order of use, from numbers drawn from U(0, 1): ``(starts, stages)``."""
        raise NotImplementedError

    def between(self, splits: ObliqueTree, batch: Batch) -> ObliqueTree:
        """What is done to the splits after each scale."""
        return splits

    def ends_in_constants(self) -> bool:
        return self.leaves == "constant"

    def checked(self, table: Table) -> "Annealed":
        kinds.kind_of(self.leaves, table.task)  # refuses unknown kinds
        depth = checks.check_depth(self.depth)
        a_start = topology.num_nodes(depth) * (table.x.shape[1] + 1)
        return self.replace(
            depth=depth,
            starts=checks.check_count("starts", self.starts, most=checks.MAX_NUMBERS // a_start),
            epochs=checks.check_count("epochs", self.epochs, most=checks.MAX_NUMBERS - 1),
            learning_rate=number("learning_rate", self.learning_rate, checks.check_number),
            l1=number("l1", self.l1, checks.check_not_negative),
            cart=checks.check_flag("cart", self.cart),
        )

    def scale(self, table: Table) -> Scale:
        scale = Scale.of(table, DEVIATIONS)
        if self.leaves == "linear":
            _check_slopes(scale)
        return scale

    def prepare(self, table: Table, *, key: Array) -> ObliqueTree | None:
        return grown_cart(self, table.real()) if self.cart else None

    def rounds(self, shape: tuple[int, int], many: int = 1) -> Rounds:
        nodes, (n, p) = topology.num_nodes(self.depth), shape
        elements = nodes * n
        if self.leaves == "linear":  # an evaluation decomposes a matrix (p, p) for each node of the whole tree
            elements += (2 * nodes + 1) * _DECOMPOSITION * p**3 * min(1, _LOOKS / self.epochs)
        return Rounds.of(self.epochs, many * self.starts * int(elements), self.stages())

    def begin(self, start: ObliqueTree | None, table: Table, *, key: Array) -> Run:
        nodes, p, stages = topology.num_nodes(self.depth), table.x.shape[1], self.stages()
        # All in one draw: draws take longer to compile than all else here.
        drawn = jax.random.uniform(key, (self.starts, stages + nodes * (p + 1)), table.x.dtype)
        splits = 2 * drawn[:, stages:].reshape(self.starts, nodes, p + 1) - 1
        weights, bias = splits[..., :-1], splits[..., -1]
        if start is not None:
            weights, bias = weights.at[0].set(start.weights), bias.at[0].set(start.bias)
        one = lambda splits, scales: begun(self, splits, scales, table)
        return jax.vmap(one)(ObliqueTree(weights, bias, None), self.scales(drawn[:, :stages]))

    def round(self, i: Array, state: Run, table: Table, judge: Table | None, rounds: Rounds) -> tuple[Run, Array]:
        return map_starts(lambda run: advanced(self, i, run, table, judge, rounds), state)

    def end(self, state: Run, table: Table, judge: Table | None) -> Found:
        best = jax.vmap(best_so_far)(state)
        scores = jnp.where(state.training.finite, best.score, jnp.inf)
        index = jnp.argmin(scores)
        chosen = jax.tree.map(lambda a: a[index], best)
        extra = {"scales": state.scales, "losses": state.scores, "steps": state.steps, "start": index}
        extra["dropped"] = self.starts - state.training.finite.sum()
        return Found(chosen.params, scores[index], state.training.finite.any(), chosen.step, extra)

    def finish(
        self, found: Found, start: Any, table: Table, judge: Table | None, *, scale: Scale, key: Array, watch: Watch
    ) -> Fit:
        if not found.finite and start is None:
            raise FloatingPointError(f"all {self.starts} starts became non-finite: try a smaller learning_rate")
        leaves = leaves_like(self, table)

        def finished(splits: ObliqueTree) -> tuple[ObliqueTree, float]:
            """A tree on raw features with leaves set there, and the loss it is chosen by."""
            tree, criterion = scale.refitted(splits, leaves, table)
            loss = mean_loss(tree, table if judge is None else judge, scale)
            if judge is not None or self.leaves == "constant":
                return tree, loss
            # No less than the tree's own loss, which is the greater where outliers, cut off in the scaled data, are
            # answered; and that alone where the weight is in so few rows that nothing is expected of new ones.
            expected = criterion if criterion < _NONE_EXPECTED * scale.loss_unit else 0.0
            return tree, max(expected, loss)

        tree, loss, chosen, cart_loss = None, np.inf, int(found.extra["start"]), float("nan")
        if found.finite:
            tree, loss = finished(scale.splits_from_unit(found.model))
        if start is not None:
            # CART's own tolerances are absolute, and its thresholds exact on raw features only; so the CART not to
            # fall behind is the better of the two, grown on scaled and (where float32 holds them) on raw features.
            carts = [scale.splits_from_unit(start), *([grown_cart(self, table)] if scale.origin is None else [])]
            cart_tree, cart_loss = min(map(finished, carts), key=lambda both: both[1])
            if not loss < cart_loss:
                tree, loss, chosen = cart_tree, cart_loss, -1
        report = {name: np.asarray(found.extra[name]) for name in ("scales", "steps")}
        report["losses"] = np.asarray(found.extra["losses"], np.float64) * scale.loss_unit
        report |= {"cart_loss": cart_loss, "chosen": chosen, "dropped": int(found.extra["dropped"])}
        assert tree is not None
        tree = tree.merged()
        return Fit(tree, tree, loss, int(found.step), np.zeros(0), report)


def _check_slopes(scale: Scale) -> None:
    """Raises ``ValueError`` if targets per unit of a feature are numbers that float32 does not hold."""
    varying = np.flatnonzero(~scale.constant)
    slopes = np.atleast_1d(scale.y_unit)[:, None] / scale.x_unit[varying]
    if len(bad := np.argwhere((slopes < _FLATTEST) | (slopes > _STEEPEST))):
        output, column = bad[0][0], varying[bad[0][1]]
        raise ValueError(
            f"x and y must be in units in which linear leaves have slopes that float32 holds, got a range of "
            f"{np.atleast_1d(scale.y_unit)[output]:.3g} in y and a deviation of "
            f"{scale.x_unit[column] / DEVIATIONS:.3g} in column {column} of x: multiply one of them"
        )


def begun(recipe: Annealed, first: ObliqueTree, scales: Array, table: Table) -> Run:
    """A start before its first scale: only the splits of ``first`` count. Traceable."""
    splits = first.replace(leaves=None)
    none = jnp.full(scales.shape, jnp.inf, table.x.dtype)
    best = training.Best(splits, none[0], jnp.zeros((), jnp.int32))
    # The first round makes the run anew: here only its shapes count.
    params = splits.replace(leaves=leaves_like(recipe, table, table.x.dtype).trainable())
    empty = _under(recipe, params, scales[0], table)
    return Run(splits, empty, best, scales, none, jnp.zeros(scales.shape, jnp.int32))


def _optimizer(recipe: Annealed) -> optax.GradientTransformation:
    warm_up = min(_WARM_UP, recipe.epochs // 2)
    shape = optax.warmup_cosine_decay_schedule(1 / (warm_up + 1), 1.0, warm_up, recipe.epochs, _LAST_LEARNING_RATE)
    return optax.adamw(lambda step: recipe.learning_rate * shape(step), weight_decay=_WEIGHT_DECAY)


def _fresh(recipe: Annealed, splits: ObliqueTree, scale: Array, table: Table) -> training.TrainState:
    """A run under a scale, from the hard tree with these splits."""
    hard = splits.replace(leaves=leaves_like(recipe, table, table.x.dtype)).refit(*table.batch)
    return _under(recipe, hard.replace(leaves=hard.leaves.trainable()), scale, table)


def _under(recipe: Annealed, params: ObliqueTree, scale: Array, table: Table) -> training.TrainState:
    """A run under a scale, from these parameters."""
    state = training.start(
        recipe.method(scale, table.task),
        table.batch,
        key=jax.random.key(0),  # full batch, and nothing random in the loss
        optimizer=_optimizer(recipe),
        params=params,
    )
    return state.replace(order=state.order[:1])  # of the samples: there is but one batch


def advanced(
    recipe: Annealed, i: Array, run: Run, table: Table, judge: Table | None, rounds: Rounds
) -> tuple[Run, Array]:
    """One start of Algorithm 1 after round i, and the losses of its steps. Traceable; i is one for all starts."""
    batch = table.batch
    stage, first, last = i // rounds.a_stage, i % rounds.a_stage == 0, (i + 1) % rounds.a_stage == 0
    method, optimizer = recipe.method(run.scales[stage], table.task), _optimizer(recipe)
    score = None if judge is None else partial(_judged, table=table, judge=judge)
    # The criterion of constant leaves falls out of a step; other scores cost as much as one, or many.
    free = judge is None and recipe.leaves == "constant"
    every = 1 if free else max(1, recipe.epochs // _LOOKS)
    once = training.one_step(method, batch, optimizer, score_every=every, score=score, last=recipe.epochs)
    fresh = lambda: _fresh(recipe, run.splits, run.scales[stage], table).replace(finite=run.training.finite)
    state = jax.lax.cond(first, fresh, lambda: run.training)
    state = state.replace(step=jnp.asarray(rounds.before(i), jnp.int32))
    # After the last step of a scale one more, for what it sees: another look would be as long a program again.
    steps = rounds.within(i)
    state, history = training.advance_up_to(once, state, steps + last.astype(jnp.int32), rounds.size + 1)
    lost = jnp.where(jnp.arange(rounds.size) < steps, history.losses[:-1], jnp.nan)

    def next_scale() -> Run:
        found = state.best
        own, value = found.params.replace(leaves=None), found.score
        splits = recipe.between(own, batch)
        # What is done between is meant to leave training samples where they are, but not others.
        if score is not None and splits is not own:
            value = jnp.where(jnp.isfinite(value), score(splits.replace(leaves=found.params.leaves)), jnp.inf)
        value = jnp.where(state.finite, value, jnp.inf)
        better = training.Best(splits, value, found.step)
        best = jax.tree.map(lambda old, new: jnp.where(value < run.best.score, new, old), run.best, better)
        finite = jnp.isfinite(value)
        # What is kept of the run is only whether it was finite: its best has been seen to.
        spent = state.replace(best=state.best.replace(score=jnp.full_like(value, jnp.inf)), finite=finite)
        scores, steps = run.scores.at[stage].set(value), run.steps.at[stage].set(found.step)
        return Run(splits, spent, best, run.scales, scores, steps)

    run = jax.lax.cond(last, next_scale, lambda: run._replace(training=state))
    return run, lost


def best_so_far(run: Run) -> training.Best:
    """The best splits of a start, those under a scale that was broken off included."""
    now = run.training.best
    now = now.replace(params=now.params.replace(leaves=None))
    return jax.tree.map(lambda old, new: jnp.where(now.score < run.best.score, new, old), run.best, now)


def _judged(params: ObliqueTree, *, table: Table, judge: Table) -> Array:
    """What the hard tree loses on the samples to judge by."""
    predictions, weight = params.refit(*table.batch).apply(judge.x), training.normalised(judge.batch).weight
    return losses.weighted_mean(table.task.prediction_loss(predictions, judge.y), weight)


def leaves_like(recipe: Annealed, table: Table, dtype: Any = jnp.float32) -> Any:
    """Leaves of the recipe's kind and of the right shape, to be refitted."""
    kind = kinds.kind_of(recipe.leaves, table.task)
    return kind.empty(topology.num_leaves(recipe.depth), table.x.shape[1], table.task.shape, dtype)


def grown_cart(recipe: Annealed, table: Table) -> ObliqueTree:
    """The splits of CART of the same depth; where leaves are linear, grown on what a linear regression leaves of the
    targets.
    """
    x, y, weight = table.x, table.y, table.weight
    if isinstance(table.task, Classification):
        return warmstart.cart_classifier(x, y, recipe.depth, sample_weight=weight).replace(leaves=None)
    if recipe.leaves == "linear":
        root = np.sqrt(np.ones(len(x)) if weight is None else weight)[:, None]
        with_one = np.column_stack([x - x.mean(0, dtype=np.float64), np.ones(len(x))])
        unit = np.maximum(np.abs(with_one).max(0), np.finfo(np.float32).tiny)
        with_one /= unit
        wide = y.reshape(len(x), -1)
        residual = (wide - with_one @ np.linalg.lstsq(root * with_one, root * wide, rcond=None)[0]).reshape(y.shape)
        y = residual if np.ptp(residual, axis=0).min() > 0 else y
    return warmstart.cart_regressor(x, y, recipe.depth, sample_weight=weight).replace(leaves=None)
