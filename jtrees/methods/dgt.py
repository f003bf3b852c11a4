"""DGT: dense gradients through hard trees (Karthikeyan et al., "Learning Accurate Decision Trees with Bandit Feedback
via Quantized Gradient Descent", TMLR 2022, Algorithms 2 and 3).

``dgt`` is the method for :func:`jtrees.train`; ``fit_dgt`` is the paper's recipe from a table to a hard tree; ``pat``
is the product-form baseline that the paper compares with.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import chex
from flax import struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float
import numpy as np
import optax

from jtrees import leaves as fitting, routing, topology, training, validation as checks
from jtrees.losses import SampleLoss, sample_loss
from jtrees.methods.forest import Forest, bag_size, train_forest
from jtrees.methods.table import Scale, checked_table, checked_validation
from jtrees.tree import ConstantLeaves, ObliqueTree

_DECAY = 0.99  # of RMSprop's mean square, as the authors' optimiser has it


@struct.dataclass
class ChainedTree:
    """A tree whose splits are a product of matrices, and are trained as its factors.

    ``W = factors[-1] @ ... @ factors[0]`` has shape ``(nodes, p + 1)`` and acts on ``[x; 1]``: linear
    over-parameterisation, which changes what gradient descent finds but not what can be found (paper, section 4).

    Attributes:
      factors: the first is ``(width, p + 1)``, the last ``(nodes, width)``; of one factor it is W itself.
      leaves: :class:`ConstantLeaves`; in classification they hold logits.
    """

    factors: tuple[Array, ...]
    leaves: ConstantLeaves

    def collapsed(self) -> Float[Array, "nodes p1"]:
        """The product, multiplied out in the cheapest order: nothing of it grows with the number of samples."""
        if len(self.factors) == 1:
            return self.factors[0]
        return jnp.linalg.multi_dot(self.factors[::-1], precision="highest")

    def tree(self) -> ObliqueTree:
        """The same tree with its splits multiplied out."""
        joined = self.collapsed()
        return ObliqueTree(joined[:, :-1], joined[:, -1], self.leaves)


def dgt(
    depth: int,
    *,
    classes: int | None = None,
    loss: SampleLoss | None = None,
    widths: Sequence[int] = (),
    quantiser: Literal["sign", "scaled"] = "scaled",
    l1: float | Array = 0.0,
    l2: float | Array = 0.0,
    leaves: Literal["learnt", "refit"] = "learnt",
) -> training.Method:
    """DGT: train the hard tree itself, by the dense gradient of :func:`jtrees.routing.path_sum`.

    Parameters are a :class:`ChainedTree`. The loss is that of the hard tree, so the score is the loss without the
    penalty. Meant for features of mean 0 and deviation 1, regression targets in [0, 1], and weights of samples, where
    there are any, of mean 1.

    Args:
      depth: depth of the tree, 1 to 16 (the paper's height).
      classes: number of classes: y then holds classes 0..K-1 and leaves hold logits. None: regression.
      loss: ``(outputs, y) -> (n,)``, such as ``optax.losses.huber_loss``; by default squared error, or the log loss of
        logits in classification.
      widths: hidden widths of the over-parameterised splits: none for L = 1, two for the paper's L = 3.
      quantiser: how a score becomes a decision that passes gradients: ``"sign"``, by the straight-through rule
        ``1[|z| <= 1]``; or ``"scaled"``, the same in units of the mean of ``|z|`` over the batch and the nodes, so that
        neither the size of the weights nor that of the updates can close the window.
      l1: strength of ``sum |w|`` over the split weights (multiplied out, biases left out).
      l2: strength of ``sum w^2`` over the same.
      leaves: what hardening does with leaves: ``"learnt"`` keeps them, ``"refit"`` sets them to means of targets or to
        class frequencies.

    Raises:
      ValueError: for a depth, a width or a penalty out of range, fewer than two classes, or an unknown option.
    """
    depth, widths = checks.check_depth(depth), tuple(checks.check_count("widths", width) for width in widths)
    _check_classes(classes)
    checks.check_not_negative("l1", l1)
    checks.check_not_negative("l2", l2)
    checks.check_choice("quantiser", quantiser, ("sign", "scaled"))
    checks.check_choice("leaves", leaves, ("learnt", "refit"))
    loss_of = sample_loss(loss, classes)

    def init(x: Array, y: Array, *, key: Array) -> ChainedTree:
        return random_chain(key, depth, x.shape[1], widths, classes, x.dtype)

    def total(
        params: ChainedTree, x: Array, y: Array, *, key: Array, step: Array, sample_weight: Array | None = None
    ) -> tuple[Array, Array]:
        chex.assert_rank([x, y], [2, 1])
        tree = params.tree()
        scores = split_scores(tree, x)
        if quantiser == "scaled":
            scores = in_units_of_their_size(scores, sample_weight)
        outputs = routing.path_sum(scores, tree.leaves.values)
        value = _mean(loss_of(outputs, y), y, sample_weight)
        return value + l1 * jnp.abs(tree.weights).sum() + l2 * jnp.square(tree.weights).sum(), value

    return training.Method(
        init,
        total,
        lambda params, x: _answers(params.tree(), classes).predict(x),
        lambda params, x, y, *, sample_weight=None: _hardened(params.tree(), x, y, classes, leaves, sample_weight),
    )


def pat(
    depth: int, slope: training.Number, *, classes: int | None = None, loss: SampleLoss | None = None
) -> training.Method:
    """The probabilistic annealed tree, the paper's baseline: product form, sigmoids of a slope that grows.

    The loss is that of the mean over leaves, by the product of sigmoids, of what leaves hold; the score is that of the
    hard tree. Parameters are a :class:`ChainedTree` of one factor; hardening keeps the leaves. The paper's schedules
    are ``optax.linear_schedule(low, high, steps)`` and, logarithmic, ``optax.exponential_decay(low, steps, high /
    low)``, low and high from 1..100 to 10..10000.

    Args:
      depth: depth of the tree, 1 to 16.
      slope: factor of the scores, above 0: a number, a traced number, or an optax schedule of the step.
      classes: as for :func:`dgt`.
      loss: as for :func:`dgt`.

    Raises:
      ValueError: for a depth or a slope out of range, or fewer than two classes.
    """
    depth = checks.check_depth(depth)
    checks.check_positive("slope", slope)
    _check_classes(classes)
    loss_of = sample_loss(loss, classes)

    def init(x: Array, y: Array, *, key: Array) -> ChainedTree:
        return random_chain(key, depth, x.shape[1], (), classes, x.dtype)

    def total(
        params: ChainedTree, x: Array, y: Array, *, key: Array, step: Array, sample_weight: Array | None = None
    ) -> tuple[Array, Array]:
        tree = params.tree()
        scores = split_scores(tree, x)
        right = routing.scaled_sigmoid(scores, training.at_step(slope, step))
        outputs = jnp.tensordot(routing.leaf_probabilities(right), tree.leaves.values, ((0,), (0,)))
        hard = tree.leaves.at(routing.leaf_index(scores), x)
        return _mean(loss_of(outputs, y), y, sample_weight), _mean(loss_of(hard, y), y, sample_weight)

    return training.Method(
        init,
        total,
        lambda params, x: _answers(params.tree(), classes).predict(x),
        lambda params, x, y, *, sample_weight=None: _hardened(params.tree(), x, y, classes, "learnt", sample_weight),
    )


def split_scores(tree: ObliqueTree, x: Float[Array, "n p"]) -> Float[Array, "nodes n"]:
    """Scores of all splits, in full precision: a rounded score sends a sample the other way."""
    return jnp.matmul(tree.weights, x.T, precision="highest") + tree.bias[:, None]


def in_units_of_their_size(
    scores: Float[Array, "nodes *n"], weight: Float[Array, " n"] | None = None
) -> Float[Array, "nodes *n"]:
    """Scores divided by the mean of ``|scores|``, by weight; a number that gradients take for a constant."""
    size = jnp.abs(scores).mean() if weight is None else _average(jnp.abs(scores).mean(0), weight)
    return scores / jax.lax.stop_gradient(jnp.maximum(size, jnp.finfo(scores.dtype).tiny))


def random_chain(key: Array, depth: int, p: int, widths: Sequence[int], classes: int | None, dtype: Any) -> ChainedTree:
    """Factors from U(-1, 1) / sqrt(inputs), regression leaves from U(0, 1), logits from U(-1/2, 1/2)."""
    sizes = [p + 1, *widths, topology.num_nodes(depth)]
    *keys, leaf_key = jax.random.split(key, len(sizes))
    factors = tuple(
        jax.random.uniform(k, (rows, columns), dtype, -1, 1) / np.sqrt(columns).astype(dtype)
        for k, columns, rows in zip(keys, sizes[:-1], sizes[1:], strict=True)
    )
    num = topology.num_leaves(depth)
    values = jax.random.uniform(leaf_key, (num,) if classes is None else (num, classes), dtype)
    return ChainedTree(factors, ConstantLeaves(values if classes is None else values - 0.5))


def _answers(tree: ObliqueTree, classes: int | None) -> ObliqueTree:
    """The tree as it answers: class probabilities instead of logits."""
    return tree if classes is None else tree.replace(leaves=ConstantLeaves(jax.nn.softmax(tree.leaves.values, axis=1)))


def _hardened(tree: ObliqueTree, x: Any, y: Any, classes: int | None, leaves: str, weight: Any) -> ObliqueTree:
    if leaves == "learnt":
        return _answers(tree, classes)
    x, y, num = jnp.asarray(x), jnp.asarray(y), topology.num_leaves(tree.depth)
    leaf = tree.leaf_index(x)
    if classes is None:
        return tree.replace(leaves=fitting.fit_constant(leaf, y, num, sample_weight=weight))
    weight = jnp.ones(len(x), tree.weights.dtype) if weight is None else jnp.asarray(weight, tree.weights.dtype)
    return tree.replace(leaves=fitting.fit_frequencies(leaf, y, num, classes, sample_weight=weight))


def _mean(lost: Float[Array, " n"], y: Array, weight: Float[Array, " n"] | None) -> Float[Array, ""]:
    # Not divided by the weights of the batch: those of all samples have mean 1, and a heavy one is to count as much in
    # a light batch as in another.
    chex.assert_equal_shape([lost, y])
    return lost.mean() if weight is None else (weight * lost).mean()


def _average(values: Float[Array, " n"], weight: Float[Array, " n"]) -> Float[Array, ""]:
    return (weight * values).sum() / jnp.maximum(weight.sum(), jnp.finfo(weight.dtype).tiny)


def _check_classes(classes: int | None) -> None:
    if classes is not None and checks.check_count("classes", classes) < 2:
        raise ValueError(f"classes must be at least 2, got {classes}")


# --- The recipe ------------------------------------------------------------------------------------------------------


@struct.dataclass
class DGTResult:
    """A tree that DGT found, in the user's own units.

    Attributes:
      tree: takes raw x; answers raw y, or class probabilities ``(n, K)``.
      losses: training loss before each update, with the penalty, on scaled targets, ``(steps,)``.
      score: loss of the tree on ``validation`` where that was given, else on the training data; on scaled targets.
      step: number of updates that it had seen.
      reached: number of internal nodes that at least one training sample reaches (paper, appendix C.2). The others can
        be pruned: ``tree.prune(x)``.
    """

    tree: ObliqueTree
    losses: np.ndarray
    score: float
    step: int
    reached: int


@struct.dataclass
class DGTForestResult:
    """A forest that DGT found, in the user's own units.

    Attributes:
      forest: takes raw x; answers the mean of its trees in raw y, or the share of votes for each class, ``(n, K)``.
      in_bag: how often each tree's sample holds each row, ``(trees, n)``.
      out_of_bag: what the trees that did not see a row answer for it, ``(n,)`` or ``(n, K)``; NaN where all did.
      out_of_bag_score: R^2, or accuracy, of that, over the rows that some tree did not see.
    """

    forest: Forest
    in_bag: np.ndarray
    out_of_bag: np.ndarray
    out_of_bag_score: float


def fit_dgt(
    x: ArrayLike,
    y: ArrayLike,
    *,
    key: Array,
    depth: int,
    task: Literal["regression", "classification"] = "regression",
    loss: SampleLoss | None = None,
    widths: Sequence[int] = (240, 240),
    quantiser: Literal["sign", "scaled"] = "scaled",
    leaves: Literal["learnt", "refit"] = "learnt",
    epochs: int = 100,
    batch_size: int = 128,
    learning_rate: float = 0.01,
    momentum: float = 0.0,
    cycles: int = 3,
    clip: float = 0.01,
    l1: float = 0.0,
    l2: float = 0.0,
    sample_weight: ArrayLike | None = None,
    validation: tuple[ArrayLike, ArrayLike] | None = None,
) -> DGTResult:
    """DGT's whole recipe (Algorithm 3): from a table of numbers to one hard oblique tree.

    Mini-batches, RMSprop, a learning rate that falls by a cosine and starts again, gradients clipped by their norm.
    Features are scaled to mean 0 and deviation 1, targets to [0, 1]. The tree returned is that of the last update, or,
    with ``validation``, the one that did best there, looked at once an epoch.

    Args:
      x: features, ``(n, p)``, finite.
      y: targets, ``(n,)``, finite and not constant; in classification whole numbers 0..K-1, every class present.
      key: for everything random.
      depth: depth of the tree, 1 to 16.
      task: ``"regression"`` or ``"classification"``.
      loss: ``(outputs, y) -> (n,)`` on scaled targets, or on logits; a function of a module compiles once. By default
        squared error, or log loss.
      widths: hidden widths of the over-parameterised splits; ``()`` for none. The paper has two that grow with depth,
        (1008, 1008) at depth 6.
      quantiser: as for :func:`dgt`.
      leaves: ``"learnt"``, or ``"refit"`` to means of targets or class frequencies at the end.
      epochs: passes over the data.
      batch_size: samples in a mini-batch; n if that is less. Those left over in a pass rest until the next.
      learning_rate: at the start of each cycle.
      momentum: of RMSprop, 0 up to but not including 1.
      cycles: how often the learning rate falls from its peak to zero.
      clip: greatest norm of a gradient.
      l1: strength of the L1 penalty on split weights (of scaled data).
      l2: strength of the L2 penalty on the same.
      sample_weight: nonnegative weights, ``(n,)``; rows of weight 0 are left out.
      validation: ``(x, y)`` to choose the best epoch by; not trained on.

    Raises:
      ValueError: naming the argument, what was expected and what came.
      FloatingPointError: if training became non-finite.
    """
    table, classes = checked_table(x, y, sample_weight, task)
    held_out = None if validation is None else checked_validation(validation, table.x.shape[1], classes)
    recipe = _recipe(depth, classes, loss, widths, quantiser, leaves, epochs, batch_size, cycles, len(table.x))
    numbers = _numbers(learning_rate, momentum, clip, l1, l2)
    scale = Scale.of(table, 1.0)
    data = scale.x(table.x), scale.y(table.y), table.weight
    judge = None if held_out is None else (scale.x(held_out.x), scale.y(held_out.y))
    tree, result = _train_tree(*data, judge, key, numbers, recipe)
    if not result.finite:
        raise FloatingPointError("training became non-finite: try a smaller learning_rate")
    tree = scale.from_unit(tree)
    path = np.asarray(tree.decision_path(table.x))[:-1]
    return DGTResult(tree, np.asarray(result.losses), float(result.score), int(result.step), len(np.unique(path)))


def fit_dgt_forest(
    x: ArrayLike,
    y: ArrayLike,
    *,
    key: Array,
    depth: int,
    trees: int = 30,
    fraction: float = 1.0,
    task: Literal["regression", "classification"] = "regression",
    loss: SampleLoss | None = None,
    widths: Sequence[int] = (240, 240),
    quantiser: Literal["sign", "scaled"] = "scaled",
    leaves: Literal["learnt", "refit"] = "learnt",
    epochs: int = 100,
    batch_size: int = 128,
    learning_rate: float = 0.01,
    momentum: float = 0.0,
    cycles: int = 3,
    clip: float = 0.01,
    l1: float = 0.0,
    l2: float = 0.0,
) -> DGTForestResult:
    """DGT-Forest: many trees by the recipe of :func:`fit_dgt`, each on a bootstrap sample, in one compiled program.

    Args:
      x: as for :func:`fit_dgt`, like everything that is not said here.
      y: targets.
      key: for everything random.
      depth: depth of the trees.
      trees: number of trees.
      fraction: size of a bootstrap sample as a part of n.
      task: regression takes the mean of the trees, classification their votes.
      loss: see there.
      widths: see there.
      quantiser: see there.
      leaves: see there.
      epochs: passes over a bootstrap sample.
      batch_size: samples in a mini-batch, at most those of a bootstrap sample.
      learning_rate: at the start of each cycle.
      momentum: of RMSprop.
      cycles: how often the learning rate falls from its peak to zero.
      clip: greatest norm of a gradient.
      l1: strength of the L1 penalty on split weights.
      l2: strength of the L2 penalty on the same.

    Raises:
      ValueError: as :func:`fit_dgt` and :func:`jtrees.train_forest`.
      FloatingPointError: if the training of a tree became non-finite.
    """
    table, classes = checked_table(x, y, None, task)
    size = bag_size(len(table.x), fraction)
    recipe = _recipe(depth, classes, loss, widths, quantiser, leaves, epochs, batch_size, cycles, size)
    numbers = _numbers(learning_rate, momentum, clip, l1, l2)
    scale = Scale.of(table, 1.0)
    result = _train_trees(scale.x(table.x), scale.y(table.y), key, numbers, recipe, trees, fraction)
    if not result.finite.all():
        raise FloatingPointError("training became non-finite: try a smaller learning_rate")
    forest = result.forest.replace(trees=scale.from_unit(result.forest.trees))
    answer = np.asarray(result.out_of_bag, np.float64)
    answer = answer if classes is not None else scale.y_min + scale.y_unit * answer
    seen = np.isfinite(answer.reshape(len(answer), -1)[:, 0])
    if classes is None:
        left = np.square(table.y - answer)[seen].sum() / np.square(table.y[seen] - table.y[seen].mean()).sum()
        score = 1 - left
    else:
        score = np.mean(answer[seen].argmax(1) == table.y[seen])
    return DGTForestResult(forest, np.asarray(result.in_bag), answer, float(score))


class _Recipe(NamedTuple):
    """What a compiled program depends on."""

    depth: int
    classes: int | None
    loss: SampleLoss | None
    widths: tuple[int, ...]
    quantiser: str
    leaves: str
    batch_size: int
    steps: int
    cycles: int
    steps_an_epoch: int


def _recipe(
    depth: int,
    classes: int | None,
    loss: SampleLoss | None,
    widths: Sequence[int],
    quantiser: str,
    leaves: str,
    epochs: int,
    batch_size: int,
    cycles: int,
    n: int,
) -> _Recipe:
    epochs, cycles = checks.check_count("epochs", epochs), checks.check_count("cycles", cycles)
    batch_size = min(checks.check_count("batch_size", batch_size), n)
    steps_an_epoch = n // batch_size
    steps = epochs * steps_an_epoch
    if cycles > steps:
        raise ValueError(f"cycles must be at most the number of updates, {steps}, got {cycles}")
    dgt(depth, classes=classes, loss=loss, widths=widths, quantiser=quantiser, leaves=leaves)  # type: ignore[arg-type]
    return _Recipe(depth, classes, loss, tuple(widths), quantiser, leaves, batch_size, steps, cycles, steps_an_epoch)


def _numbers(learning_rate: float, momentum: float, clip: float, l1: float, l2: float) -> dict[str, float | None]:
    checks.check_positive("learning_rate", learning_rate)
    checks.check_positive("clip", clip)
    checks.check_not_negative("l1", l1)
    checks.check_not_negative("l2", l2)
    checks.check_part("momentum", momentum)
    # Without momentum the optimiser keeps one copy of the parameters less.
    return {"learning_rate": learning_rate, "momentum": momentum or None, "clip": clip, "l1": l1, "l2": l2}


def _method_and_optimizer(numbers: Any, recipe: _Recipe) -> tuple[training.Method, optax.GradientTransformation]:
    method = dgt(
        recipe.depth,
        classes=recipe.classes,
        loss=recipe.loss,
        widths=recipe.widths,
        quantiser=recipe.quantiser,  # type: ignore[arg-type]
        leaves=recipe.leaves,  # type: ignore[arg-type]
        l1=numbers["l1"],
        l2=numbers["l2"],
    )
    # From the peak to almost zero, and again, exactly ``cycles`` times.
    wave = optax.cosine_decay_schedule(1.0, 1)
    phase = lambda step: ((step * recipe.cycles) % recipe.steps).astype(jnp.float32) / recipe.steps
    optimizer = rmsprop(lambda step: numbers["learning_rate"] * wave(phase(step)), numbers["momentum"], numbers["clip"])
    return method, optimizer


def rmsprop(learning_rate: Any, momentum: Any = None, clip: Any = None) -> optax.GradientTransformation:
    """RMSprop with the authors' decay, after clipping by the norm of the whole gradient; momentum as optax has it, on
    updates that the learning rate has been applied to.
    """
    update = optax.rmsprop(learning_rate, decay=_DECAY, eps=1e-8, eps_in_sqrt=False, momentum=momentum)
    return update if clip is None else optax.chain(optax.clip_by_global_norm(clip), update)


@partial(jax.jit, static_argnames="recipe")
def _train_tree(x, y, weight, held_out, key, numbers, recipe):
    """The hard tree on scaled data, and how it was trained."""
    method, optimizer = _method_and_optimizer(numbers, recipe)
    loss_of = sample_loss(recipe.loss, recipe.classes)

    def judged(params: ChainedTree, x_new: Array, y_new: Array, weight_new: Array | None) -> Array:
        """What the tree that is answered with loses: its leaves refitted, if they are to be."""
        tree = method.harden(params, x, y, sample_weight=weight)
        outputs = tree.predict(x_new)  # type: ignore[union-attr]
        lost = loss_of(outputs if recipe.classes is None else jnp.log(outputs), y_new)
        return lost.mean() if weight_new is None else _average(lost, weight_new)

    held_out_score = lambda params: judged(params, held_out[0], held_out[1], None)
    result = training.train(
        method,
        x,
        y,
        key=key,
        optimizer=optimizer,
        steps=recipe.steps,
        batch_size=recipe.batch_size,
        score_every=0 if held_out is None else recipe.steps_an_epoch,
        score=None if held_out is None else held_out_score,
        sample_weight=None if weight is None else weight / weight.mean(),
    )
    score = result.score if held_out is not None else judged(result.params, x, y, weight)
    return method.harden(result.params, x, y, sample_weight=weight), result.replace(score=score)


@partial(jax.jit, static_argnames=("recipe", "trees", "fraction"))
def _train_trees(x, y, key, numbers, recipe, trees, fraction):
    method, optimizer = _method_and_optimizer(numbers, recipe)
    return train_forest(
        method,
        x,
        y,
        key=key,
        optimizer=optimizer,
        steps=recipe.steps,
        trees=trees,
        fraction=fraction,
        combine="mean" if recipe.classes is None else "vote",
        batch_size=recipe.batch_size,
    )
