"""DGT: dense gradients through hard trees (Karthikeyan et al., "Learning Accurate Decision Trees with Bandit Feedback
via Quantized Gradient Descent", TMLR 2022, Algorithms 2 and 3).

``dgt`` is the method for :func:`jtrees.train` and ``DGT`` the paper's recipe; ``pat`` and ``PAT`` are the product-form
baseline that the paper compares with.
"""

from collections.abc import Callable, Sequence
from functools import partial
import itertools
from typing import Any, Literal

from flax import struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np
import optax

from jtrees import leaves as kinds, losses, ops, routing, topology, training, validation as checks
from jtrees.methods.one_run import OneRun, fit_of_tree
from jtrees.recipes import Fit, Found, Watch, number, static
from jtrees.table import Scale, Table
from jtrees.tasks import Classification, Regression, Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree

_CYCLES = 3
_DECAY = 0.99  # of RMSprop's mean square, as the authors' optimiser has it
WINDOWS = ("mean", "unit")


@struct.dataclass
class ChainedTree:
    """A tree whose splits are a product of matrices, and are trained as its factors.

    ``W = factors[-1] @ ... @ factors[0]`` has shape ``(nodes, p + 1)`` and acts on ``[x; 1]``: linear
    over-parameterisation, which changes what gradient descent finds but not what can be found (paper, section 4).

    Attributes:
      factors: the first is ``(width, p + 1)``, the last ``(nodes, width)``; of one factor it is W itself.
      leaves: :class:`jtrees.leaves.Constant`, in classification :class:`jtrees.leaves.Logit`.
    """

    factors: tuple[Array, ...]
    leaves: Any

    def collapsed(self) -> Float[Array, "nodes p1"]:
        """The product, multiplied out in the cheapest order: nothing of it grows with the number of samples."""
        if len(self.factors) == 1:
            return self.factors[0]
        return jnp.linalg.multi_dot(self.factors[::-1], precision="highest")

    def tree(self) -> ObliqueTree:
        """The same tree with its splits multiplied out."""
        joined = self.collapsed()
        return ObliqueTree(joined[:, :-1], joined[:, -1], self.leaves)


# --- The methods -----------------------------------------------------------------------------------------------------


def dgt(
    depth: int,
    *,
    task: Task = Regression(),
    loss: losses.SampleLoss | None = None,
    widths: Sequence[int] = (),
    window: Literal["mean", "unit"] = "mean",
    refit: bool = False,
    l1: float | Array = 0.0,
    l2: float | Array = 0.0,
    implementation: str | None = None,
) -> training.Method:
    """DGT: train the hard tree itself, by the dense gradient of :func:`jtrees.routing.path_sum`.

    Parameters are a :class:`ChainedTree`. The loss is that of the hard tree, so the score is the loss without the
    penalty. Meant for features of mean 0 and deviation 1, and regression targets, ``(n,)`` or ``(n, k)``, in [0, 1].

    Args:
      depth: depth of the tree, 1 to 16 (the paper's height).
      task: what is predicted. In classification leaves hold logits.
      loss: ``(outputs, y) -> (n,)``, such as ``optax.losses.huber_loss``; by default squared error (of several targets
        the mean), or the log loss of logits in classification.
      widths: hidden widths of the over-parameterised splits: none for L = 1, two for the paper's L = 3.
      window: in which scores pass gradients: ``"unit"``, by the paper's straight-through rule ``1[|z| <= 1]``, which
        fails on heavy-tailed features, whose scores are seldom of size one; or ``"mean"``, the same in units of the
        mean of ``|z|`` over the batch and the nodes, so that neither the size of the features, nor that of the weights
        or of their updates can close the window.
      refit: whether hardening sets leaves to means of targets or to class frequencies, or keeps what was learnt.
      l1: strength of ``sum |w|`` over the split weights (multiplied out, biases left out).
      l2: strength of ``sum w^2`` over the same.
      implementation: XLA or a kernel for the outputs and their gradient: see :mod:`jtrees.ops`.

    Raises:
      ValueError: for a depth, a width or a penalty out of range, or an unknown option.
    """
    depth, widths = checks.check_depth(depth), _checked_widths(widths)
    checks.check_not_negative("l1", l1)
    checks.check_not_negative("l2", l2)
    checks.check_choice("window", window, WINDOWS)
    refit, loss_of = checks.check_flag("refit", refit), losses.sample_loss(loss, task)

    def total(params: ChainedTree, batch: Batch, *, key: Array, step: Array) -> tuple[Array, Array]:
        tree, (x, y, weight) = params.tree(), batch
        inside: Any = partial(routing.mean_size, weight=weight) if window == "mean" else 1.0
        splits, values = (tree.weights, tree.bias), tree.leaves.values
        outputs = ops.path_sum(*splits, values, x, inside, implementation=implementation)
        value = losses.weighted_mean(loss_of(outputs, y), weight)
        return value + l1 * jnp.abs(tree.weights).sum() + l2 * jnp.square(tree.weights).sum(), value

    harden = lambda params, batch: _hardened(params.tree(), batch, refit)
    return training.Method(_init(depth, task, widths), total, _predict, harden)


def pat(
    depth: int, slope: training.Number, *, task: Task = Regression(), loss: losses.SampleLoss | None = None
) -> training.Method:
    """The probabilistic annealed tree, the paper's baseline: product form, sigmoids of a slope that grows.

    The loss is that of the mean over leaves, by the product of sigmoids, of what leaves hold; the score is that of the
    hard tree. Parameters are a :class:`ChainedTree` of one factor; hardening keeps the leaves. The paper's schedules
    are ``optax.linear_schedule(low, high, steps)`` and, logarithmic, ``optax.exponential_decay(low, steps, high /
    low)``, low and high from 1..100 to 10..10000.

    Args:
      depth: depth of the tree, 1 to 16.
      slope: factor of the scores, above 0: a number, a traced number, or an optax schedule of the step.
      task: as for :func:`dgt`.
      loss: as for :func:`dgt`.

    Raises:
      ValueError: for a depth or a slope out of range.
    """
    depth = checks.check_depth(depth)
    checks.check_positive("slope", slope)
    loss_of = losses.sample_loss(loss, task)

    def total(params: ChainedTree, batch: Batch, *, key: Array, step: Array) -> tuple[Array, Array]:
        tree, (x, y, weight) = params.tree(), batch
        steepness = training.at_step(slope, step)
        outputs = ops.soft(steepness * tree.weights, steepness * tree.bias, tree.leaves.values, x)
        hard = tree.leaves.values[ops.hard(tree.weights, tree.bias, x)]
        return losses.weighted_mean(loss_of(outputs, y), weight), losses.weighted_mean(loss_of(hard, y), weight)

    harden = lambda params, batch: _hardened(params.tree(), batch, False)
    return training.Method(_init(depth, task, ()), total, _predict, harden)


def _init(depth: int, task: Task, widths: tuple[int, ...]) -> Any:
    def init(batch: Batch, *, key: Array) -> ChainedTree:
        task.check(batch.y)
        chain = random_chain(key, depth, batch.x.shape[1], widths, task.shape, batch.x.dtype)
        if isinstance(task, Classification):
            return chain.replace(leaves=kinds.Logit(chain.leaves.values - 0.5))
        return chain

    return init


def random_chain(
    key: Array, depth: int, p: int, widths: Sequence[int], outputs: tuple[int, ...], dtype: Any
) -> ChainedTree:
    """Factors from U(-1, 1) / sqrt(inputs), leaves of so many outputs from U(0, 1)."""
    sizes = [p + 1, *widths, topology.num_nodes(depth)]
    shapes = [*((rows, columns) for columns, rows in itertools.pairwise(sizes)), (topology.num_leaves(depth), *outputs)]
    ends = np.cumsum([np.prod(shape, dtype=int) for shape in shapes])
    drawn = jnp.split(jax.random.uniform(key, (ends[-1],), dtype), ends[:-1])  # at once: each draw costs compilation
    *uniform, values = (part.reshape(shape) for part, shape in zip(drawn, shapes, strict=True))
    factors = tuple((2 * part - 1) / np.sqrt(part.shape[1]).astype(dtype) for part in uniform)
    return ChainedTree(factors, kinds.Constant(values))


def _predict(params: ChainedTree, x: Array) -> Array:
    return params.tree().predict(x)


def _hardened(tree: ObliqueTree, batch: Batch, refit: bool) -> ObliqueTree:
    if refit:
        return tree.refit(*batch)
    return tree.replace(leaves=tree.leaves.frequencies()) if isinstance(tree.leaves, kinds.Logit) else tree


def _checked_widths(widths: Any) -> tuple[int, ...]:
    try:
        return tuple(checks.check_count("widths", width) for width in widths)
    except TypeError:
        raise ValueError(
            f"widths must be whole numbers, one a hidden layer, such as (240, 240), got {widths!r}"
        ) from None


def rmsprop(learning_rate: Any, momentum: Any = None, clip: Any = None) -> optax.GradientTransformation:
    """RMSprop with the authors' decay, after clipping by the norm of the whole gradient; momentum as optax has it, on
    updates that the learning rate has been applied to.
    """
    update = optax.rmsprop(learning_rate, decay=_DECAY, eps=1e-8, eps_in_sqrt=False, momentum=momentum)
    return update if clip is None else optax.chain(optax.clip_by_global_norm(clip), update)


def falling(steps: int, cycles: int) -> Callable[[Array | int], Array]:
    """The learning rate at a step as a part of its peak: a cosine from 1 to almost 0, exactly ``cycles`` times."""
    # No product of steps and cycles is taken where integers have 32 bits.
    first = jnp.asarray([-(-cycle * steps // cycles) for cycle in range(cycles + 1)], jnp.int32)

    def share(step: Array | int) -> Array:
        cycle = jnp.clip(jnp.searchsorted(first, step, side="right") - 1, 0, cycles - 1)
        phase = (step - first[cycle]).astype(jnp.float32) / (first[cycle + 1] - first[cycle]).astype(jnp.float32)
        return jnp.asarray(optax.cosine_decay_schedule(1.0, 1)(phase))

    return share


# --- The recipes -----------------------------------------------------------------------------------------------------


@struct.dataclass(kw_only=True)
class HardTree(OneRun):
    """What DGT and PAT share: the hard tree that training ends in, in the user's units.

    Features are scaled to mean 0 and deviation 1, targets to [0, 1]. The report has ``reached``, the number of internal
    nodes that at least one training sample reaches (paper, appendix C.2); the others can be pruned:
    ``tree.prune(x)``. Where ``loss`` is one of your own, the loss of the fit is that, on scaled targets.

    Attributes:
      depth: depth of the tree, 1 to 16.
      loss: ``(outputs, y) -> (n,)`` on scaled targets, or on logits; a function of a module compiles once. By default
        squared error, or log loss.
    """

    depth: int = static(default=4)
    loss: losses.SampleLoss | None = static(default=None)
    refit: bool = static(default=False)

    def ends_in_constants(self) -> bool:
        return True

    def checked(self, table: Table) -> Any:
        depth, recipe = checks.check_depth(self.depth), super().checked(table)
        self.sample_loss(table.task)  # refuses what is no function
        return recipe.replace(depth=depth, refit=checks.check_flag("refit", self.refit))

    def answers(self, params: ChainedTree, table: Table, x: Array) -> Array:
        tree = params.tree()
        leaves = _hardened(tree, table.batch, True).leaves.trainable() if self.refit else tree.leaves
        return leaves.values[ops.hard(tree.weights, tree.bias, x)]

    def end(self, state: training.TrainState, table: Table, judge: Table | None) -> Found:
        found = super().end(state, table, judge)
        return found._replace(model=_hardened(found.model.tree(), table.batch, self.refit))

    def finish(
        self, found: Found, start: Any, table: Table, judge: Table | None, *, scale: Scale, key: Array, watch: Watch
    ) -> Fit:
        loss = float(found.score) if self.loss is not None else None
        return fit_of_tree(found, table, judge, scale, loss=loss)


@struct.dataclass(kw_only=True)
class DGT(HardTree):
    """DGT's whole recipe (Algorithm 3).

    Mini-batches, RMSprop, a learning rate that falls by a cosine and starts again, gradients clipped by their norm. The
    tree is that of the last update, or, with ``validation``, the one that did best there. See :class:`OneRun` and
    :class:`HardTree` for the options that it shares with others.

    Attributes:
      widths: hidden widths of the over-parameterised splits; ``()`` for none. The paper has two that grow with depth,
        (1008, 1008) at depth 6.
      window: in which scores pass gradients, ``"mean"`` or ``"unit"``: see :func:`dgt`.
      refit: whether leaves are set to means of targets or to class frequencies at the end.
      momentum: of RMSprop, 0 up to but not including 1.
      cycles: how often the learning rate falls from its peak to zero, 3 times by default, or once in each update where
        there are fewer.
      clip: greatest norm of a gradient.
      l1: strength of the L1 penalty on split weights (of scaled data).
      l2: strength of the L2 penalty on the same.
      implementation: of the training step, None for what is fastest: see :mod:`jtrees.ops`.
    """

    widths: tuple[int, ...] = static(default=(240, 240))
    window: Literal["mean", "unit"] = static(default="mean")
    momentum: float | None = None
    cycles: int = static(default=_CYCLES)
    clip: float = 0.01
    l1: float = 0.0
    l2: float = 0.0
    implementation: str | None = static(default=None)

    def checked(self, table: Table) -> "DGT":
        recipe = super().checked(table)
        checks.check_choice("window", self.window, WINDOWS)
        widths = _checked_widths(self.widths)
        sizes = (table.x.shape[1] + 1, *widths, topology.num_nodes(recipe.depth))
        for width, neighbour in itertools.pairwise(sizes):
            if width * neighbour > checks.MAX_NUMBERS:
                most = f"{checks.MAX_NUMBERS} numbers between two layers"
                raise ValueError(f"widths must be at most such as make {most}, got {self.widths!r}")
        cycles, steps = checks.check_count("cycles", self.cycles), recipe.updates(len(table.x))
        if cycles > max(steps, _CYCLES):
            raise ValueError(f"cycles must be at most the number of updates, {steps}, got {cycles}")
        # Without momentum the optimiser keeps one copy of the parameters less.
        plain = not checks.is_traced(self.momentum) and not np.any(self.momentum)
        return recipe.replace(
            widths=widths,
            momentum=None if plain else number("momentum", self.momentum, checks.check_part),
            cycles=min(cycles, steps),
            clip=number("clip", self.clip, checks.check_number),
            l1=number("l1", self.l1, checks.check_not_negative),
            l2=number("l2", self.l2, checks.check_not_negative),
        )

    def work(self, p: int) -> int:
        sizes = (p + 1, *self.widths, topology.num_nodes(self.depth))
        chain = sum(a * b for a, b in itertools.pairwise(sizes))
        return 4 * topology.num_nodes(self.depth) + chain // 8

    def method(self, table: Table) -> training.Method:
        options: Any = {"task": table.task, "loss": self.loss, "refit": self.refit, "l1": self.l1, "l2": self.l2}
        return dgt(self.depth, widths=self.widths, window=self.window, implementation=self.implementation, **options)

    def optimizer(self, steps: int, an_epoch: int) -> optax.GradientTransformation:
        share = falling(steps, self.cycles)
        return rmsprop(lambda step: self.learning_rate * share(step), self.momentum, self.clip)


@struct.dataclass(kw_only=True)
class PAT(HardTree):
    """The probabilistic annealed tree as a recipe: mini-batches, RMSprop at a constant rate, sigmoids ever steeper.

    See :class:`OneRun` and :class:`HardTree` for the options that it shares with others.

    Attributes:
      slopes: of the sigmoids, at the start and at the end; between them their logarithm grows evenly.
    """

    slopes: Any = (1.0, 100.0)

    def checked(self, table: Table) -> "PAT":
        try:
            slopes = self.slopes if isinstance(self.slopes, jax.Array) else np.asarray(self.slopes, np.float32)
        except (TypeError, ValueError):
            slopes = np.zeros(0)
        if slopes.shape != (2,):
            raise ValueError(f"slopes must be two numbers, at the start and at the end, got {self.slopes!r}")
        checks.check_number("slopes", slopes)
        return super().checked(table).replace(slopes=jnp.asarray(slopes, jnp.float32))

    def work(self, p: int) -> int:
        return 4 * topology.num_nodes(self.depth)

    def method(self, table: Table) -> training.Method:
        steps, (low, high) = self.updates(table.x.shape[0]), self.slopes
        slope = lambda step: low * (high / low) ** (jnp.asarray(step, jnp.float32) / steps)
        return pat(self.depth, slope, task=table.task, loss=self.loss)

    def optimizer(self, steps: int, an_epoch: int) -> optax.GradientTransformation:
        return rmsprop(self.learning_rate)
