"""ObliqueTree, the hard tree of all methods."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Float
import numpy as np

from jtrees import io, ops, prediction, processes, pytree, sharding, topology, validation
from jtrees.leaves import kind_of
from jtrees.segments import Array
from jtrees.tasks import Task
from jtrees.text import tree_text


@io.part
@pytree.dataclass
class Origin:
    """The origin of a tree's features and predictions, for tables whose values are large relative to their spread.

    The origin is subtracted before rounding to float32, in which ``1e8 + 1`` and ``1e8 + 2`` are equal. The values of
    the origin are exact in float32.

    Attributes:
      x: values that are subtracted from the features, ``(p,)``.
      y: values that are added to the predictions, ``()`` or ``(k,)``; None for class frequencies.
    """

    x: Float[Array, " p"]
    y: Float[Array, "*k"] | None

    def transform(self, x: Any) -> Any:
        """Returns samples relative to the origin. NumPy arrays are in double precision."""
        return counted_from(self.x, x)

    def inverse(self, answers: Any) -> Any:
        """Returns predictions relative to zero. NumPy arrays are in double precision."""
        if self.y is None:
            return answers
        if isinstance(answers, jax.Array):
            return answers + jnp.asarray(self.y, answers.dtype)
        return answers + np.asarray(self.y, np.float64)


@io.model
@pytree.dataclass
class ObliqueTree:
    """A perfect binary tree of linear splits: a sample goes right at node ``j`` if ``weights[j] @ x + bias[j] > 0``.

    Otherwise the sample goes left. A node whose weights are all zero does not split: the sign of its bias decides for
    every sample. Such nodes represent missing nodes of CART and pruned nodes, so that shapes depend only on the depth.
    Nodes are numbered breadth first, leaves from left to right. The tree is a pytree for ``jit``, ``vmap`` and
    ``grad``.

    Attributes:
      weights: ``(nodes, p)``.
      bias: ``(nodes,)``.
      leaves: a leaf type of :mod:`jtrees.leaves`.
      origin: origin of the predictions and of the features of splits and leaves, or None for zero.
      medians: medians of the features of the training rows, ``(p,)``, with which every method and every exported file
        fills missing values (NaN). None: missing values are refused.
    """

    weights: Float[Array, "nodes p"]
    bias: Float[Array, " nodes"]
    leaves: Any
    origin: Origin | None = None
    medians: Float[Array, " p"] | None = None

    def with_medians(self, medians: Any) -> "ObliqueTree":
        """Returns the tree, or stacked trees, with the medians that fill missing values, ``(p,)``."""
        return self.replace(medians=np.broadcast_to(medians, (*self.bias.shape[:-1], len(medians))))

    def refit(self, x: Any, y: Any, sample_weight: Any = None, *, shrink: bool = False) -> "ObliqueTree":
        """Returns the tree with leaves fitted to samples by hard routing (GET, Algorithm 1: deterministic leaves).

        The function is pure. The type of the leaves determines the fit: means of the targets, smoothed class
        frequencies (also for logits), or shrunk linear models. The current leaf values are ignored. For NumPy arrays,
        constants and frequencies are fitted in double precision, on the host: the mean of equal targets is exactly this
        number.

        Args:
          x: samples, ``(n, p)``.
          y: targets, ``(n,)`` or ``(n, k)``, or classes.
          sample_weight: nonnegative weights, ``(n,)``.
          shrink: whether constants and frequencies are shrunk towards the values of their ancestors. Generalised
            cross-validation chooses the shrinkage (:func:`jtrees.leaves.fit_hierarchical`).
        """
        arrays = [array for array in (x, y, sample_weight) if array is not None]
        refit = (lambda *rows: self.leaves.refit_shrunk(*rows)[0]) if shrink else self.leaves.refit
        x = prediction.fill_gaps(x, self.medians)
        on_host = all(isinstance(array, np.ndarray) for array in arrays) and not validation.is_traced(self)
        if on_host and self.leaves.is_constant:
            weight = None if sample_weight is None else sample_weight.astype(np.float64)
            return self.with_absolute(refit(self.leaf_index(x), x, y, weight))
        if self.origin is not None:
            x, y = self.origin.transform(x), y if self.origin.y is None else counted_from(self.origin.y, y)
        x, y, weight = jax.tree.map(jnp.asarray, (x, y, sample_weight))
        leaf_index = ops.hard(self.weights, self.bias, x)
        return self.replace(leaves=refit(leaf_index, x, y, weight))

    def with_absolute(self, leaves: Any) -> "ObliqueTree":
        """Returns the tree with new constant leaves, whose values are not relative to its origin."""
        if self.origin is None or self.origin.y is None:
            return self.replace(leaves=leaves)
        # An origin is close to all values, so differences are exact.
        return self.replace(leaves=leaves.rescaled(0, 1, -np.asarray(self.origin.y, np.float64), 1))

    @property
    def depth(self) -> int:
        """Depth of the perfect tree (a static int)."""
        return topology.depth_of(self.weights.shape[-2])

    @property
    def features(self) -> int:
        """Number of features, p."""
        return self.weights.shape[-1]

    def apply(self, x: Float[Array, "n p"]) -> Float[Array, "n *k"]:
        """Returns the predictions of the leaf that each sample reaches, as a pure function of arrays."""
        x = prediction.fill_gaps(x, self.medians)
        x = x if self.origin is None else self.origin.transform(x)
        predictions = self.leaves.at(ops.hard(self.weights, self.bias, x), x)
        return predictions if self.origin is None else self.origin.inverse(predictions)

    def predict(self, x: ArrayLike) -> Any:
        """Returns predictions. Checks x, and runs compiled code block by block.

        Args:
          x: samples, ``(n, p)``, a NumPy array (not recompiled for each n) or a JAX array.

        Returns:
          Predictions of the same array type, ``(n,)``, or ``(n, k)`` for leaves with k outputs. For a JAX array, they
          are the result of :meth:`apply`. For a NumPy array, they are the leaf values in double precision.

        Warns:
          jtrees.tables.ColumnsWarning: if missing values are filled with ``medians``.

        Raises:
          ValueError: if x has a wrong rank or width, or values that are not finite.
        """
        if prediction.is_on_device(self._single(), x):
            return prediction.predict(self, x)
        tree = processes.on_host(self) if processes.lost_xla() else self
        options: Any = {"scaling": tree.origin, "medians": tree.medians}
        outputs = prediction.evaluate_leaves(tree, x, finish=tree.leaves.at, **options)
        return outputs if self.origin is None else self.origin.inverse(outputs)

    def leaf_index(self, x: ArrayLike) -> Any:
        """Returns the leaf that each sample reaches.

        Args:
          x: samples, ``(n, p)``, a NumPy array (not recompiled for each n) or a JAX array.

        Returns:
          Leaf indices from 0, int32, ``(n,)``.

        Raises:
          ValueError: if x has a wrong rank or width, or values that are not finite.
        """
        options: Any = {"scaling": self.origin, "medians": self.medians}
        return prediction.evaluate_leaves(self._single(), x, finish=lambda leaf, x: leaf, **options)

    @property
    def scaling(self) -> Origin | None:
        """The transform of samples and predictions: see ``jtrees.prediction.predict``."""
        return self.origin

    def without_scaling(self) -> "ObliqueTree":
        """Returns the tree without an origin and medians, which are in the user's units."""
        return self.replace(origin=None, medians=None)

    def _single(self) -> "ObliqueTree":
        if self.weights.ndim != 2:
            batch = self.weights.shape[:-2]
            raise ValueError(f"the tree must be one tree, got a batch of shape {batch}: index or vmap it")
        return self

    def decision_path(self, x: ArrayLike) -> Any:
        """Returns the nodes on the path of each sample, from the root to the leaf, numbered breadth first.

        Returns:
          ``(depth + 1, n)``, int32: level by level, samples last.
        """
        node = self.leaf_index(x) + topology.num_leaves(self.depth)  # in numbers from 1, n // 2 is the parent
        up = np.arange(self.depth, -1, -1, dtype=np.int32)[:, None]
        return (node[None] >> up) - 1

    @property
    def splits(self) -> np.ndarray:
        """Whether each internal node is reachable and splits: ``(nodes,)`` bool (host only)."""
        return self._reachable()[: len(self.bias)] & np.any(np.asarray(self.weights) != 0, axis=1)

    @property
    def num_leaves(self) -> int:
        """Number of reachable leaves (host only)."""
        return int(self._reachable()[len(self.bias) :].sum())

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the tree (host only).

        Counts non-zero weights and one threshold per reachable split, and the parameters of reachable leaves.
        """
        weights = np.asarray(self.weights)[self.splits]
        return int(np.count_nonzero(weights) + len(weights)) + self.leaves.count(self._reachable()[len(self.bias) :])

    def _reachable(self) -> np.ndarray:
        """Returns whether each node and leaf is reachable, ``(2 nodes + 1,)``. Nodes of zero weights block one side."""
        weights, bias = np.asarray(self._single().weights), np.asarray(self.bias)
        split = np.any(weights != 0, axis=1)
        reachable = np.ones(2 * len(bias) + 1, dtype=bool)
        for level in map(topology.level, range(self.depth)):
            parent, right = reachable[level], bias[level] > 0
            below = np.stack([parent & (split[level] | ~right), parent & (split[level] | right)], axis=1)
            reachable[2 * level.start + 1 : 2 * level.stop + 1] = below.ravel()
        return reachable

    @property
    def classes(self) -> int | None:
        """Number of classes, or of actions of a policy, that the leaves choose from; None for leaves of numbers."""
        return self.leaves.classes

    @property
    def is_policy(self) -> bool:
        """Whether leaves choose an action, as in :class:`jtrees.Policy`."""
        return self.leaves.choice == "action"

    def prune(self, x: ArrayLike) -> "ObliqueTree":
        """Returns the tree without splits that do not divide ``x``. These splits become nodes of zero weights.

        Predictions on ``x`` do not change. Other samples may reach another leaf.

        Args:
          x: samples, ``(n, p)``.

        Raises:
          ValueError: in the cases of :meth:`predict`.
        """
        path = np.asarray(self.decision_path(x))
        reached = np.zeros(2 * len(self.bias) + 1, dtype=bool)
        reached[path.ravel()] = True
        return self._one_way(~(reached[1::2] & reached[2::2]), right=reached[2::2])

    def merged(self) -> "ObliqueTree":
        """Returns the tree, or stacked trees, without splits whose reachable leaves are all equal, bit for bit.

        Predictions do not change.
        """
        split, goes_right = np.any(np.asarray(self.weights) != 0, axis=-1), np.asarray(self.bias) > 0
        shape = *split.shape[:-1], split.shape[-1] + 1
        rows = [np.ascontiguousarray(a).reshape(*shape, -1).view(np.uint8) for a in jax.tree.leaves(self.leaves)]
        values = np.concatenate(rows, axis=-1)
        leaf_bits = lambda leaf: np.take_along_axis(values, leaf[..., None], axis=-2)
        chosen, leaf = np.zeros(split.shape, bool), np.broadcast_to(np.arange(shape[-1]), shape)
        for level in map(topology.level, reversed(range(self.depth))):
            left, right = leaf[..., ::2], leaf[..., 1::2]  # a leaf with the value below each node, or -1
            equal = (left >= 0) & (right >= 0) & (leaf_bits(left) == leaf_bits(right)).all(axis=-1)
            is_split, is_right = split[..., level], goes_right[..., level]
            leaf = np.where(is_split, np.where(equal, left, -1), np.where(is_right, right, left))
            chosen[..., level] = leaf >= 0
        return self._one_way(chosen, right=goes_right & ~split)

    def _one_way(self, chosen: np.ndarray, *, right: np.ndarray) -> "ObliqueTree":
        """Returns the tree in which the chosen nodes send all samples to one side."""
        weights, bias = np.asarray(self.weights), np.asarray(self.bias)  # on the host: no compilation
        bias = np.where(chosen, np.where(right, 1.0, -1.0).astype(bias.dtype), bias)
        weights = np.where(chosen[..., None], 0, weights)
        return self.replace(weights=sharding.from_host(weights), bias=sharding.from_host(bias))

    def to_text(
        self,
        feature_names: Sequence[str] | None = None,
        digits: int = 3,
        *,
        class_names: Sequence[str] | None = None,
        x: ArrayLike | None = None,
        y: ArrayLike | None = None,
        max_terms: int | None = None,
    ) -> str:
        """Returns the rules of the tree as indented text, without nodes that do not split.

        The number of a leaf is that of :meth:`leaf_index`. If all splits divide the same score, its terms are written
        once, in the first line. For ``digits=17``, the rules, evaluated in float64, equal the tree up to its own
        rounding in float32.

        Args:
          feature_names: names of the p columns, by default ``x0``, ``x1``, ...
          digits: significant digits of weights, thresholds and leaves. The origin is always exact. Different thresholds
            get more digits, up to eight, if they would look equal.
          class_names: names of the K classes in classification, or of the actions of a policy. Each leaf then lists the
            most probable classes in the order of the names, or names the action that it plays.
          x: samples, ``(n, p)``, such as the training data, which are counted at each leaf.
          y: classes 0..K-1 of x, ``(n,)``, in classification, which are counted by class at each leaf. For a policy,
            the rewards of the actions, ``(n, K)``: each leaf lists the mean rewards, the largest first.
          max_terms: maximum number of terms of a condition or a linear leaf, and of classes of a leaf. The terms with
            the largest |weight| times standard deviation in x (|weight| if there is no x) are shown, with the number of
            omitted terms. None: all terms.

        Raises:
          ValueError: for a wrong number of names of columns or classes, and for x or y that do not fit the tree.
        """
        return tree_text(self._single(), feature_names, digits, class_names, x, y, max_terms)

    def __repr__(self) -> str:
        kind = getattr(self.leaves, "name", type(self.leaves).__name__)
        if validation.is_traced(self) or not isinstance(self.weights, (jax.Array, np.ndarray)):
            return f"ObliqueTree(weights={self.weights!r}, bias={self.bias!r}, leaves={self.leaves!r})"
        if self.weights.ndim != 2:
            return f"ObliqueTree(batch={self.weights.shape[:-2]}, features={self.weights.shape[-1]}, {kind})"
        return (
            f"ObliqueTree(depth={self.depth}, features={self.weights.shape[1]}, splits={int(self.splits.sum())}, "
            f"leaves={self.num_leaves}, parameters={self.num_parameters}, {kind})"
        )


def counted_from(zero: Any, x: Any) -> Any:
    """Returns ``x - zero``, with rounding only in the difference. NumPy arrays are in double precision."""
    if not isinstance(x, jax.Array) and not validation.is_traced(zero):
        return x - np.asarray(zero, np.float64)
    x = jnp.asarray(x)
    integer, short = not jnp.issubdtype(x.dtype, jnp.floating), x.dtype.itemsize < 4
    dtype = jnp.float32 if integer or short else x.dtype
    if not integer:
        return x.astype(dtype) - jnp.asarray(zero, dtype)
    # Integers beyond 2**24 may be inexact in float32, but their two parts are exact.
    x = x.astype(jnp.int32) if short else x
    low = x % 4096
    return ((x - low).astype(dtype) - jnp.asarray(zero, dtype)) + low.astype(dtype)


def with_empty_leaves(splits: ObliqueTree, leaves: str, task: Task) -> ObliqueTree:
    """Returns the tree of splits with leaves of zeros, which can be refitted, ``"constant"`` or ``"linear"``."""
    nodes, features = splits.weights.shape
    return splits.replace(leaves=kind_of(leaves, task).empty(nodes + 1, features, task.shape, splits.bias.dtype))
