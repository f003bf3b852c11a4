"""The recipe that GET and RADDT share, from a table of numbers to one hard tree.

Many starts, CART the first of them; each trained under ever harder routings, its leaves set anew from the hard routing
after each; the best hard tree of all returned in the user's units, and CART itself where nothing beats it. A method
adds its soft routing (a function that makes a :class:`jtrees.Method` of a depth and a scale) and its scales.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import chex
from flax import struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array
import numpy as np
import optax

from jtrees import losses, topology, training, validation as checks, warmstart
from jtrees.methods.answers import LINEAR, Answer, answer
from jtrees.methods.table import Scale, Table, checked_table, checked_validation, mean_loss
from jtrees.tree import ObliqueTree

_WARM_UP = 10  # linear warm-up steps
_LAST_LEARNING_RATE = 1e-4  # of the peak: 1e-6 for the paper's 0.01
_WEIGHT_DECAY = 1e-2  # AdamW's usual decay, which the paper leaves as it is
# The unit of features: about the spread that uniform numbers have in [0, 1], for which the paper's learning rate, scale
# factors and random starts are meant.
DEVIATIONS = 3.0
_LOOKS = 20  # at a score that costs more than a step, under each scale
_DEPTHS = range(1, 13)  # the paper's, for depth="auto"
_PATIENCE = 2  # depths in a row that bring nothing before deeper ones are given up

MakeMethod = Callable[..., training.Method]  # (depth, scale, *, leaves, classes, l1) -> Method
Between = Callable[[ObliqueTree, Array, Array | None], ObliqueTree]  # (tree, x, sample_weight) -> tree


@struct.dataclass
class FitReport:
    """How a tree was found. Losses are those that trees were chosen by: see :func:`jtrees.fit_get`.

    Attributes:
      scales: the scale factors, in the order of use, ``(starts, scales)``.
      losses: loss of the best hard tree under each of them, ``(starts, scales)``; infinite where the start was dropped.
      steps: the epoch at which it was seen, ``(starts, scales)``.
      cart_loss: that of the CART tree of the same depth (NaN without the CART start).
      loss: that of the tree returned.
      chosen: the start that it came from; -1 if CART itself was not beaten.
      dropped: number of starts that became non-finite.
      tuning: for ``depth="auto"``, what each depth and L1 penalty lost on the validation part: rows
        ``(depth, l1, loss)``; else None.
    """

    scales: np.ndarray
    losses: np.ndarray
    steps: np.ndarray
    cart_loss: float
    loss: float
    chosen: int
    dropped: int
    tuning: np.ndarray | None = None


@struct.dataclass
class FitResult:
    """A fitted tree, in the user's own units, and how it was found."""

    tree: ObliqueTree
    report: FitReport


def soft_method(
    depth: int,
    scale: training.Number,
    *,
    name: str,
    route: losses.Route | None,
    leaves: str,
    classes: int | None,
    l1: float | Array,
) -> training.Method:
    """A tree trained on the loss that a soft routing of scaled scores expects.

    Arguments are those of :func:`jtrees.get`, but for ``scale``, the factor of the scores; ``name``, what the method
    calls it; and ``route``, the soft routing as in :func:`jtrees.losses.expected_leaf_loss`.
    """
    depth, kind = checks.check_depth(depth), answer(leaves, classes)
    checks.check_positive(name, scale)
    checks.check_not_negative("l1", l1)
    num = topology.num_leaves(depth)

    def init(x: Array, y: Array, *, key: Array) -> ObliqueTree:
        return random_tree(key, depth, x, y, kind)

    def loss(
        params: ObliqueTree, x: Array, y: Array, *, key: Array, step: Array, sample_weight: Array | None = None
    ) -> tuple[Array, Array]:
        chex.assert_rank([x, y], [2, 1])
        factor = training.at_step(scale, step)
        loss, leaf = losses.expected_leaf_loss(
            factor * params.weights,
            factor * params.bias,
            params.leaves,
            x,
            y,
            leaf_losses=kind.losses,
            sample_weight=sample_weight,
            route=route,
        )
        penalty = l1 * jnp.abs(params.weights).sum()
        return loss + penalty, kind.criterion(leaf, x, y, num, sample_weight=sample_weight)

    predict = ObliqueTree.predict if classes is None else _probabilities
    return training.Method(init, loss, predict, partial(harden, kind=kind))


def _probabilities(params: ObliqueTree, x: Array) -> Array:
    """Class probabilities of a tree whose leaves hold logits."""
    return jax.nn.softmax(params.predict(x), axis=1)


def random_tree(key: Array, depth: int, x: Array, y: Array, kind: Answer) -> ObliqueTree:
    """Weights and biases from U(-1, 1), leaves as their kind starts."""
    nodes, p = topology.num_nodes(depth), x.shape[1]
    k_weights, k_bias, k_leaves = jax.random.split(key, 3)
    weights = jax.random.uniform(k_weights, (nodes, p), x.dtype, -1, 1)
    bias = jax.random.uniform(k_bias, (nodes,), x.dtype, -1, 1)
    return ObliqueTree(weights, bias, kind.start(k_leaves, nodes + 1, p, y, x.dtype))


def harden(params: ObliqueTree, x: Array, y: Array, *, kind: Answer, sample_weight: Array | None = None) -> ObliqueTree:
    """The hard tree with leaves set from its own routing (GET, Algorithm 1: deterministic leaves)."""
    y = jnp.asarray(y)
    leaf = params.leaf_index(x)
    return params.replace(leaves=kind.fit(leaf, x, y, topology.num_leaves(params.depth), sample_weight=sample_weight))


@struct.dataclass
class Candidate:
    """The best splits of a start over its scale factors (``leaves`` is None), and the best score under each."""

    params: ObliqueTree
    score: jax.Array
    finite: jax.Array
    scores: jax.Array
    steps: jax.Array


def one_start(
    first: ObliqueTree,
    scales: Array,
    x: Array,
    y: Array,
    sample_weight: Array | None,
    held_out: tuple[Array, Array] | None,
    learning_rate: Array,
    l1: float | Array,
    *,
    make: MakeMethod,
    leaves: str,
    classes: int | None,
    epochs: int,
    between: Between | None = None,
) -> Candidate:
    """One start of Algorithm 1: trained under each scale in turn, going on from the hard tree before. Traceable.

    Only the splits of ``first`` count: leaves are set from its hard routing. ``between`` is done to the splits after
    each scale.
    """
    kind, depth = answer(leaves, classes), first.depth
    warm_up = min(_WARM_UP, epochs // 2)
    shape = optax.warmup_cosine_decay_schedule(1 / (warm_up + 1), 1.0, warm_up, epochs, _LAST_LEARNING_RATE)
    optimizer = optax.adamw(lambda step: learning_rate * shape(step), weight_decay=_WEIGHT_DECAY)
    unused_key = jax.random.key(0)  # full batch, and nothing random in the loss
    hardened = lambda params: harden(params, x, y, kind=kind, sample_weight=sample_weight)

    def held_out_score(params: ObliqueTree) -> Array:
        x_new, y_new = held_out  # type: ignore[misc]
        return kind.loss(hardened(params).predict(x_new), y_new).mean()

    # The criterion of constant leaves falls out of a step; other scores cost as much as one, or many.
    free = held_out is None and kind is not LINEAR

    def one_scale(params: ObliqueTree, scale: Array) -> tuple[ObliqueTree, Any]:
        run = training.train(
            make(depth, scale, leaves=leaves, classes=classes, l1=l1),
            x,
            y,
            key=unused_key,
            optimizer=optimizer,
            steps=epochs,
            score_every=1 if free else max(1, epochs // _LOOKS),
            score=None if held_out is None else held_out_score,
            params=params.replace(leaves=kind.trainable(hardened(params).leaves)),
            sample_weight=sample_weight,
        )
        splits = run.params.replace(leaves=None)
        score = run.score
        if between is not None:
            splits = between(splits, x, sample_weight)
            # Meant to leave training samples where they are, but not others.
            score = score if held_out is None else jnp.where(run.finite, held_out_score(splits), jnp.inf)
        return splits, (splits, score, run.finite, run.step)

    _, (trees, scores, finite, steps) = jax.lax.scan(one_scale, first.replace(leaves=None), scales)
    best, finite = jnp.argmin(scores), finite.all()
    scores = jnp.where(finite, scores, jnp.inf)
    return Candidate(jax.tree.map(lambda a: a[best], trees), scores[best], finite, scores, steps)


@partial(jax.jit, static_argnames=("make", "leaves", "classes", "depth", "epochs", "between"))
def _search(
    x, y, weight, held_out, key, scales, learning_rate, l1, warm, *, make, leaves, classes, depth, epochs, between
):
    """All starts in one compiled program."""
    kind, starts = answer(leaves, classes), len(scales)
    first = jax.vmap(lambda k: random_tree(k, depth, x, y, kind))(jax.random.split(key, starts))
    if warm is not None:
        weights, bias = warm
        first = first.replace(weights=first.weights.at[0].set(weights), bias=first.bias.at[0].set(bias))

    def run(first, scales):
        options = {"make": make, "leaves": leaves, "classes": classes, "epochs": epochs, "between": between}
        return one_start(first, scales, x, y, weight, held_out, learning_rate, l1, **options)

    return training.multi_start(run, first, scales)


def fit(
    make: MakeMethod,
    draw_scales: Callable[[Array, int], Array],
    x: ArrayLike,
    y: ArrayLike,
    *,
    key: Array,
    depth: int | Literal["auto"],
    leaves: str,
    task: str,
    epochs: int,
    learning_rate: float,
    l1: float | Sequence[float],
    cart: bool,
    sample_weight: ArrayLike | None,
    validation: tuple[ArrayLike, ArrayLike] | None,
    between: Between | None = None,
) -> FitResult:
    """The whole recipe.

    Arguments are those of :func:`jtrees.fit_get`, but for ``make``, a function of a module (it is a static argument)
    ``(depth, scale, *, leaves, classes, l1) -> Method``, and ``draw_scales``, ``(key, depth) -> (starts, scales)``: the
    scales of each start, in the order of use; ``between`` as in :func:`one_start`.
    """
    epochs = checks.check_count("epochs", epochs)
    if callable(learning_rate):
        raise ValueError("learning_rate must be a number: the schedule (warm-up, cosine) is the recipe's own")
    checks.check_positive("learning_rate", learning_rate)
    checks.check_not_negative("l1", l1)
    penalties = np.atleast_1d(np.asarray(l1, np.float64)).tolist()
    if np.ndim(l1) > 1 or not penalties:
        raise ValueError(f"l1 must be a number, or numbers to choose from, got {l1!r}")
    if isinstance(depth, str) and depth != "auto":
        raise ValueError(f'depth must be a whole number from 1 to {checks.MAX_DEPTH} or "auto", got {depth!r}')
    table, classes = checked_table(x, y, sample_weight, task)
    held_out = None if validation is None else checked_validation(validation, table.x.shape[1], classes)
    answer(leaves, classes)  # refuses unknown kinds
    options = {"make": make, "draw_scales": draw_scales, "leaves": leaves, "classes": classes}
    options |= {"epochs": epochs, "learning_rate": learning_rate, "cart": cart, "between": between}
    if depth != "auto":
        if len(penalties) > 1:
            raise ValueError(f'l1 must be one number unless depth is "auto", got {l1!r}')
        return _fit(table, held_out, key, checks.check_depth(depth), penalties[0], **options)
    return _fit_auto(table, held_out, key, penalties, **options)


def _fit_auto(table: Table, held_out: Table | None, key: Array, penalties: list[float], **options: Any) -> FitResult:
    """Depth and L1 by a validation part (the paper's 2:1 where none is given), then a fit to all."""
    split_key, key = jax.random.split(key)
    part, judge = table, held_out
    if held_out is None:
        order = np.asarray(jax.random.permutation(split_key, len(table.x)))
        cut = max(2, round(2 * len(order) / 3))
        if len(order) - cut < 1:
            raise ValueError(f'x and y must hold at least three samples for depth="auto", got {len(order)}')
        part, judge = table.rows(order[:cut]), table.rows(order[cut:])
        if np.ptp(part.y) == 0:
            raise ValueError(
                'y must vary in the part drawn to choose the depth by, with depth="auto", and there it is '
                f"{float(part.y[0])!r} in every row: give a depth, or a validation set"
            )
    assert judge is not None
    tuning, best, best_result, since = [], (np.inf, 1, penalties[0]), None, 0
    for depth in _DEPTHS:
        since += 1
        for l1 in penalties:
            result = _fit(part, held_out, key, depth, l1, **options)
            loss = mean_loss(result.tree, judge)
            tuning.append((depth, l1, loss))
            if loss < best[0]:
                best, best_result, since = (loss, depth, l1), result, 0
        if since >= _PATIENCE:
            break
    _, depth, l1 = best
    if held_out is None or best_result is None:
        best_result = _fit(table, held_out, key, depth, l1, **options)
    return best_result.replace(report=best_result.report.replace(tuning=np.array(tuning)))


def _fit(
    table: Table,
    held_out: Table | None,
    key: Array,
    depth: int,
    l1: float,
    *,
    make: MakeMethod,
    draw_scales: Callable[[Array, int], Array],
    leaves: str,
    classes: int | None,
    epochs: int,
    learning_rate: float,
    cart: bool,
    between: Between | None,
) -> FitResult:
    """One depth, one penalty."""
    kind = answer(leaves, classes)
    x, y, weight = table.x, table.y, table.weight
    scale = Scale.of(table, DEVIATIONS)
    unit_x, unit_y = scale.x(x), scale.y(y)
    # The CART to start from is grown on scaled data, where its weights are of size one. CART's own tolerances are
    # absolute, and its thresholds exact on raw features only; so the CART not to fall behind is the better of both.
    grow = partial(_cart, depth=depth, leaves=leaves, classes=classes, sample_weight=weight)
    warm = grow(unit_x, unit_y) if cart else None
    tree_key, scale_key = jax.random.split(key)
    scales = jnp.asarray(draw_scales(scale_key, depth), jnp.float32)
    found = _search(
        unit_x,
        unit_y,
        weight,
        None if held_out is None else (scale.x(held_out.x), scale.y(held_out.y)),
        tree_key,
        scales,
        learning_rate,
        l1,
        None if warm is None else (warm.weights, warm.bias),
        make=make,
        leaves=leaves,
        classes=classes,
        depth=depth,
        epochs=epochs,
        between=between,
    )
    diverged = int(found.dropped) == len(scales)
    if not cart and diverged:
        raise FloatingPointError(f"all {len(scales)} starts became non-finite: try a smaller learning_rate")

    def finished(splits: ObliqueTree) -> tuple[ObliqueTree, float]:
        """A tree on raw features with leaves set there, and the loss it is chosen by."""
        tree = scale.refitted(kind, splits, table)
        if held_out is not None:
            return tree, mean_loss(tree, held_out)
        if kind is LINEAR:
            leaf = np.asarray(tree.leaf_index(x))
            expected = _criterion(leaf, unit_x, unit_y, weight, kind=kind, num=topology.num_leaves(depth))
            return tree, float(expected) * scale.y_unit**2
        return tree, mean_loss(tree, table)

    candidates = jax.tree.map(np.asarray, found.candidates)
    tree, loss, chosen, cart_loss = None, np.inf, int(found.index), float("nan")
    if not diverged:
        tree, loss = finished(scale.splits_from_unit(found.best.params))
    if warm is not None:
        carts = scale.splits_from_unit(warm), grow(x, unit_y)
        cart_tree, cart_loss = min(map(finished, carts), key=lambda found: found[1])
        if not loss < cart_loss:
            tree, loss, chosen = cart_tree, cart_loss, -1
    assert tree is not None
    report = FitReport(
        scales=np.asarray(scales),
        losses=candidates.scores.astype(np.float64) * scale.y_unit**2,
        steps=candidates.steps,
        cart_loss=cart_loss,
        loss=loss,
        chosen=chosen,
        dropped=int(found.dropped),
    )
    return FitResult(tree, report)


def _cart(x, y, *, depth, leaves, classes, sample_weight) -> ObliqueTree:
    """CART of the same depth; where leaves are linear, grown on what a linear regression leaves of the targets."""
    if classes is not None:
        return warmstart.cart_classifier(x, y, depth, sample_weight=sample_weight)
    if leaves == "linear":
        root = np.sqrt(np.ones(len(x)) if sample_weight is None else sample_weight)[:, None]
        with_one = np.column_stack([x - x.mean(0), np.ones(len(x))]).astype(np.float64)
        unit = np.maximum(np.abs(with_one).max(0), np.finfo(np.float32).tiny)
        with_one /= unit
        residual = y - with_one @ np.linalg.lstsq(root * with_one, root[:, 0] * y, rcond=None)[0]
        y = residual if np.ptp(residual) > 0 else y
    return warmstart.cart_regressor(x, y, depth, sample_weight=sample_weight)


@partial(jax.jit, static_argnames=("kind", "num"))
def _criterion(leaf, x, y, weight, *, kind, num):
    return kind.criterion(leaf, x, y, num, sample_weight=weight)
