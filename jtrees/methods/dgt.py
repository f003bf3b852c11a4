"""DGT: dense gradients through hard trees.

The source is Karthikeyan et al., "Learning Accurate Decision Trees with Bandit Feedback via Quantized Gradient
Descent", TMLR 2022, Algorithms 2 and 3. ``dgt`` is the method for :func:`jtrees.train`, and ``DGT`` is the paper's
recipe.
"""

from collections.abc import Sequence
from functools import partial
import itertools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np
import optax

from jtrees import io, leaves as kinds, losses, ops, pytree, routing, topology, training, validation as checks
from jtrees.monotone import ascending, without_negative
from jtrees.search import MiniBatchRecipe, Run, checked_values, option
from jtrees.search.minibatch import output_loss
from jtrees.tasks import Regression, Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree
from pallas_kernels import Implementation

_CYCLES = 3
_PATIENCE = 1.1  # cycles without a lower validation loss before a run ends; the loss is lowest at the end of a cycle


@io.model
@pytree.dataclass
class ChainedTree:
    """A tree whose splits are parametrised as a product of matrices.

    ``W = factors[-1] @ ... @ factors[0]`` has shape ``(nodes, p + 1)`` and acts on ``[x; 1]``. This linear
    over-parameterisation changes the optimisation, but not the set of trees (paper, section 3.2).

    Attributes:
      factors: the first factor is ``(width, p + 1)``, the last factor ``(nodes, width)``. A single factor is W itself.
      leaves: :class:`jtrees.leaves.Values`.
    """

    factors: tuple[Array, ...]
    leaves: Any

    def collapsed(self) -> Float[Array, "nodes p1"]:
        """Returns the product W, multiplied in the cheapest order, at a cost independent of the number of samples."""
        if len(self.factors) == 1:
            return self.factors[0]
        return jnp.linalg.multi_dot(self.factors[::-1], precision="highest")

    def tree(self) -> ObliqueTree:
        """Returns the same tree with collapsed splits."""
        joined = self.collapsed()
        return ObliqueTree(joined[:, :-1], joined[:, -1], self.leaves)


def dgt(
    depth: int,
    *,
    task: Task = Regression(),
    widths: Sequence[int] = (),
    window: Literal["mean", "unit"] = "mean",
    refit: bool = False,
    l1: float | Array = 0.0,
    l2: float | Array = 0.0,
    monotone: Array | None = None,
    implementation: Implementation = None,
) -> training.Method:
    """Returns the DGT method, which trains the hard tree by the dense gradient of :func:`jtrees.routing.path_sum`.

    A sample has the value of the leaf that it reaches. Let ``q_l`` be the number of decisions on the path to leaf l
    that agree with the decisions of the sample, minus the number that disagree. The gradient is the gradient of ``sum_l
    softmax(q)_l values_l``, with a straight-through derivative of the decisions (Algorithm 2).

    Parameters are a :class:`ChainedTree`. The loss is the hard tree's loss plus the penalties, and the score is the
    loss without the penalties. The method assumes features of mean 0 and deviation 1, and regression targets, ``(n,)``
    or ``(n, k)``, in [0, 1]. In classification, leaves hold logits.

    :class:`jtrees.DGT` describes the arguments, except two. ``task`` is what is predicted, and by which loss.
    ``monotone`` are the features in which predictions must not fall, ``(p,)`` bool, or None. Negative weights of these
    features count as 0, and initial leaves rise from left to right.

    Raises:
      ValueError: for a depth, a width or a penalty out of range, or an unknown option.
    """
    checked = checked_values(DGT, depth=depth, widths=widths, window=window, refit=refit, l1=l1, l2=l2)
    depth, widths = checked["depth"], checked["widths"]

    def init(batch: Batch, *, key: Array) -> ChainedTree:
        task.check(batch.y)
        chain = random_chain(key, depth, batch.x.shape[1], widths, task.shape, batch.x.dtype)
        if monotone is not None:
            chain = chain.replace(leaves=chain.leaves.with_outputs(partial(ascending, task=task)))
        if task.is_least_squares:
            return chain
        values = chain.leaves.values - (0 if task.link_name in ("identity", "sorted") else 0.5)
        return chain.replace(leaves=kinds.kind_of("constant", task).empty(1, 1, task.shape).replace(values=values))

    def total(params: ChainedTree, batch: Batch, *, key: Array, step: Array) -> tuple[Array, Array]:
        tree, (x, y, weight) = signed_tree(params, monotone), batch
        inside: Any = partial(routing.mean_size, weight=weight) if window == "mean" else 1.0
        splits, values = (tree.weights, tree.bias), tree.leaves.values
        outputs = ops.path_sum(*splits, values, x, inside, implementation=implementation)
        value = losses.weighted_mean(task.loss(outputs, y), weight)
        return value + l1 * jnp.abs(tree.weights).sum() + l2 * jnp.square(tree.weights).sum(), value

    def harden(params: ChainedTree, batch: Batch) -> ObliqueTree:
        tree = signed_tree(params, monotone)
        return tree.refit(*batch) if refit else tree.replace(leaves=tree.leaves.hardened())

    return training.Method(init, total, harden)


def signed_tree(params: ChainedTree, monotone: Array | None) -> ObliqueTree:
    """Returns the tree of a chain, in which negative weights of monotone features count as 0."""
    # The gradient passes unchanged, so negative weights can become positive. If `monotone` is None, no weight changes.
    tree = params.tree()
    if monotone is None:
        return tree
    weights = without_negative(tree.weights, monotone)
    pass_gradient = tree.weights - jax.lax.stop_gradient(tree.weights)
    return tree.replace(weights=jax.lax.stop_gradient(weights) + pass_gradient)


def random_chain(
    key: Array, depth: int, p: int, widths: Sequence[int], outputs: tuple[int, ...], dtype: Any
) -> ChainedTree:
    """Returns random factors from U(-1, 1) / sqrt(inputs), and leaves ``(leaves, *outputs)`` from U(0, 1)."""
    sizes = [p + 1, *widths, topology.num_nodes(depth)]
    shapes = [*((rows, columns) for columns, rows in itertools.pairwise(sizes)), (topology.num_leaves(depth), *outputs)]
    ends = np.cumsum([np.prod(shape, dtype=int) for shape in shapes])
    # There is a single draw, because each draw costs compile time.
    arrays = jnp.split(jax.random.uniform(key, (ends[-1],), dtype), ends[:-1])
    *uniform, values = (part.reshape(shape) for part, shape in zip(arrays, shapes, strict=True))
    factors = tuple((2 * part - 1) / np.sqrt(part.shape[1]).astype(dtype) for part in uniform)
    return ChainedTree(factors, kinds.Values(values))


@pytree.dataclass(kw_only=True)
class DGT(MiniBatchRecipe):
    """DGT's recipe (Algorithm 3, with the optimiser of the paper's appendix).

    The search trains on mini-batches with RMSprop, cosine decay with warm restarts, and gradients clipped by norm. The
    model is the tree after the last update. If ``validation`` is given, the model is the evaluated tree with the lowest
    validation loss. Features are scaled to mean 0 and deviation 1, targets to [0, 1]. A user-defined loss of the task,
    on scaled targets or on logits, is also the loss of the fit.

    The report is a :class:`jtrees.search.TrainingReport`.

    Attributes:
      depth: depth of the tree, 1 to 16.
      epochs: number of passes over the data. None: 100, with at least 300 and at most 7500 updates. Batches of fewer
        than 128 samples may take more updates, up to 960,000 samples in total.
      batch_size: samples in a mini-batch, at most n. The last samples of a pass that do not fill a mini-batch are
        skipped until the next shuffle.
      learning_rate: peak learning rate.
      widths: hidden widths of the over-parameterised splits; ``()`` for no hidden layer. The paper has two widths that
        grow with depth, such as (1008, 1008) at depth 6.
      window: scores that pass gradients. ``"unit"`` is the paper's straight-through rule ``1[|z| <= 1]``. It fails on
        heavy-tailed features, whose scores are rarely near 1. ``"mean"`` measures z in units of the mean of ``|z|``
        over the batch and the nodes. So the scale of features, weights or updates cannot close the window.
      refit: whether the leaves are refitted at the end, to means of targets or class frequencies.
      momentum: momentum of RMSprop, in [0, 1), or None for no momentum.
      cycles: number of decays of the learning rate from its peak to zero, at most the number of updates.
      clip: maximum norm of the gradient.
      l1: strength of the penalty ``sum |w|`` of split weights (of scaled data), without biases.
      l2: strength of the penalty ``sum w^2`` of the same weights.
      implementation: implementation of the training step, None for the fastest: see :mod:`jtrees.ops`.
      early_stopping: whether training ends after 1.1 cycles without a lower loss on ``validation``.
      precondition: strength of the preconditioner, from 0 (none) to below 1. It helps gradient descent if features are
        correlated. ``"auto"``: the best of 0, 0.9 and 0.99 in short runs on four fifths of the rows. It is 0 if the
        features are nearly uncorrelated, if there are fewer than 500 rows or more than 512 features, or in a tree of a
        boosted sum.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> fit = jtrees.fit(jtrees.DGT(depth=1, epochs=60, refit=True), x, np.sign(x[:, 0]), key=jax.random.key(0))
      >>> fit.tree
      ObliqueTree(depth=1, features=1, splits=1, leaves=2, parameters=4, Values(SquaredError))
    """

    depth: int = option(4, most=16)
    widths: tuple[int, ...] = option((240, 240))
    window: Literal["mean", "unit"] = option("mean")
    refit: bool = option(False)
    momentum: float | None = option(None, least=0, below=1)
    cycles: int = option(_CYCLES)
    clip: float = option(0.01, above=0)
    l1: float = option(0.0, least=0)
    l2: float = option(0.0, least=0)
    implementation: Implementation = option(None)
    early_stopping: bool = option(True)
    precondition: float | Literal["auto"] = option("auto", least=0, below=1)

    def keeps_monotone(self, task: Task) -> bool:
        return True

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        n, p = shape
        steps, sizes = self.schedule(n).steps, self._sizes(p)
        if self.cycles > max(steps, _CYCLES):
            raise ValueError(f"cycles must be at most the number of updates, {steps}, got {self.cycles}")
        if max(a * b for a, b in itertools.pairwise(sizes)) > checks.MAX_NUMBERS:
            raise ValueError(
                f"widths must give at most {checks.MAX_NUMBERS} numbers between two layers, "
                f"got {checks.quoted(self.widths)}"
            )

    def _sizes(self, p: int) -> tuple[int, ...]:
        """Returns the widths of all layers, for p features."""
        return p + 1, *self.widths, topology.num_nodes(self.depth)

    def products(self, n: int, p: int) -> int:
        schedule = self.schedule(n)
        return schedule.steps * schedule.batch_size * sum(a * b for a, b in itertools.pairwise(self._sizes(p)))

    def method(self, run: Run) -> training.Method:
        options: Any = {"widths": self.widths, "window": self.window, "refit": self.refit, "l1": self.l1, "l2": self.l2}
        return dgt(self.depth, task=run.task, monotone=run.monotone, implementation=self.implementation, **options)

    def optimizer(self, run: Run) -> optax.GradientTransformation:
        steps = self.schedule(len(run.batch.x)).steps
        rate = training.cosine_cycles(steps, min(self.cycles, steps))
        return training.rmsprop(lambda step: self.learning_rate * rate(step), self.momentum, self.clip)

    def evaluate(self, run: Run, params: ChainedTree) -> Array:
        tree = signed_tree(params, run.monotone)
        if self.refit:
            tree = tree.replace(leaves=tree.refit(*run.batch).leaves.trainable())
        tree = run.ordered(tree, ops.hard(tree.weights, tree.bias, run.batch.x))
        outputs = lambda tree, x: tree.leaves.values[ops.hard(tree.weights, tree.bias, x)]
        return output_loss(run.task, outputs, tree, run.evaluation)

    @property
    def patience_part(self) -> float:
        return _PATIENCE / self.cycles
