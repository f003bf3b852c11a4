"""The hard oblique tree that every method ends in."""

from collections.abc import Sequence
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float
import numpy as np

from jtrees import io, ops, prediction, topology, validation
from jtrees.leaves.constant import Frequency, Logit, exact_text, listed
from jtrees.leaves.linear import linear_text


@io.part
@struct.dataclass
class Origin:
    """Where a tree counts features and answers from, for tables whose values are large against their spread.

    Differences from it are taken before anything is rounded: ``1e8 + 1`` and ``1e8 + 2`` are one number in float32.
    Its own numbers are exact in float32.

    Attributes:
      x: subtracted from the features, ``(p,)``.
      y: added to the answers, ``()`` or ``(k,)``; None where leaves hold class frequencies.
    """

    x: Float[Array, " p"]
    y: Float[Array, "*k"] | None

    def transform(self, x: Any) -> Any:
        """Samples counted from here, NumPy arrays in double precision."""
        return counted_from(self.x, x)

    def inverse(self, answers: Any) -> Any:
        """Answers counted from zero again, those in NumPy in double precision."""
        if self.y is None:
            return answers
        if isinstance(answers, jax.Array):
            return answers + jnp.asarray(self.y, answers.dtype)
        return answers + np.asarray(self.y, np.float64)


@io.model
@struct.dataclass
class ObliqueTree:
    """A perfect binary tree of linear splits: a sample goes right at node ``j`` iff ``weights[j] @ x + bias[j] > 0``.

    A node whose weights are all zero does not split: every sample goes the one way that the sign of its bias says.
    That is how CART's missing nodes and pruned nodes are written, so that shapes depend on the depth alone. Nodes are
    numbered breadth first, leaves from left to right. The tree is a pytree: it passes through ``jit``, ``vmap`` and
    ``grad``, and is also what GET trains.

    Attributes:
      weights: ``(nodes, p)``.
      bias: ``(nodes,)``.
      leaves: a kind of :mod:`jtrees.leaves`.
      origin: where features and answers are counted from, if not from zero; leaves see features counted from it too.
    """

    weights: Float[Array, "nodes p"]
    bias: Float[Array, " nodes"]
    leaves: Any
    origin: Origin | None = None

    def refit(self, x: Any, y: Any, sample_weight: Any = None) -> "ObliqueTree":
        """The tree with leaves set from its own hard routing of samples (GET, Algorithm 1: deterministic leaves).

        Pure: means of the targets in each leaf, smoothed class frequencies (of logits, too), or shrunk linear models,
        by the kind of the leaves, whose values do not matter.

        Args:
          x: samples counted from the tree's origin, ``(n, p)``.
          y: targets, ``(n,)`` or ``(n, k)``, or classes.
          sample_weight: nonnegative weights, ``(n,)``.
        """
        x, y, weight = jax.tree.map(jnp.asarray, (x, y, sample_weight))
        return self.replace(leaves=self.leaves.refit(ops.hard(self.weights, self.bias, x), x, y, weight))

    @property
    def depth(self) -> int:
        """Depth of the perfect tree (a static int)."""
        return topology.depth_of(self.weights.shape[-2])

    @property
    def features(self) -> int:
        """Number of features, p."""
        return self.weights.shape[-1]

    def apply(self, x: Float[Array, "n p"]) -> Float[Array, "n *k"]:
        """What the tree answers, as a pure function of arrays: the model of the leaf that each sample reaches."""
        x = x if self.origin is None else self.origin.transform(x)
        answers = self.leaves.at(ops.hard(self.weights, self.bias, x), x)
        return answers if self.origin is None else self.origin.inverse(answers)

    def predict(self, x: ArrayLike) -> Any:
        """What the tree answers: :meth:`apply`, checked, compiled and block by block.

        Args:
          x: samples, ``(n, p)``: NumPy (answered in NumPy, any n without a new compilation for each) or JAX.

        Returns:
          ``(n,)``, or ``(n, k)`` for leaves with k outputs.

        Raises:
          ValueError: for another rank or width, or values that are not finite.
        """
        return prediction.predict(self._single(), x)

    def leaf_index(self, x: ArrayLike) -> Any:
        """The leaf that each sample reaches.

        Args:
          x: samples, ``(n, p)``: NumPy (answered in NumPy, any n without a new compilation for each) or JAX.

        Returns:
          Leaf numbers from 0, int32, ``(n,)``.

        Raises:
          ValueError: for another rank or width, or values that are not finite.
        """
        x = prediction.scaled(self._single().origin, x, self.features)
        return prediction.evaluate(_leaf_index, self.without_scaling(), x, features=self.features)

    @property
    def scaling(self) -> Origin | None:
        """What samples go through before, and answers after: see :func:`jtrees.prediction.predict`."""
        return self.origin

    def without_scaling(self) -> "ObliqueTree":
        """The tree that counts from zero."""
        return self if self.origin is None else self.replace(origin=None)

    def _single(self) -> "ObliqueTree":
        if self.weights.ndim != 2:
            batch = self.weights.shape[:-2]
            raise ValueError(f"the tree must be one tree, got a batch of shape {batch}: index or vmap it")
        return self

    def decision_path(self, x: ArrayLike) -> Any:
        """The nodes that each sample passes, root first, leaf last, in the numbering of the whole tree.

        Returns:
          ``(depth + 1, n)``, int32: level by level, samples last.
        """
        node = self.leaf_index(x) + topology.num_leaves(self.depth)  # the root is 1 here: halving is going up
        up = np.arange(self.depth, -1, -1, dtype=np.int32)[:, None]
        return (node[None] >> up) - 1

    @property
    def splits(self) -> np.ndarray:
        """Which internal nodes can be reached and do split: ``(nodes,)`` bool (host only)."""
        self._single()
        return self._reachable()[: len(self.bias)] & np.any(np.asarray(self.weights) != 0, axis=1)

    @property
    def num_leaves(self) -> int:
        """Number of leaves that some sample could reach (host only)."""
        self._single()
        return int(self._reachable()[len(self.bias) :].sum())

    @property
    def num_parameters(self) -> int:
        """Numbers that the tree needs (host only).

        Non-zero weights and one threshold for each split that can be reached, plus what its reachable leaves hold.
        """
        weights = np.asarray(self.weights)[self.splits]
        return int(np.count_nonzero(weights) + len(weights)) + self.leaves.count(self._reachable()[len(self.bias) :])

    def _reachable(self) -> np.ndarray:
        """Nodes of the whole tree that lie on no blocked side of a node that does not split: ``(2 nodes + 1,)``."""
        weights, bias = np.asarray(self.weights), np.asarray(self.bias)
        split = np.any(weights != 0, axis=1)
        reachable = np.ones(2 * len(bias) + 1, dtype=bool)
        for level in map(topology.level, range(self.depth)):
            here, right = reachable[level], bias[level] > 0
            below = np.stack([here & (split[level] | ~right), here & (split[level] | right)], axis=1)
            reachable[2 * level.start + 1 : 2 * level.stop + 1] = below.ravel()
        return reachable

    def prune(self, x: ArrayLike) -> "ObliqueTree":
        """The same tree without the splits that do not divide ``x``: each becomes a node that sends all one way.

        No prediction on ``x`` changes. Samples unlike any in ``x`` may be answered by another leaf.

        Args:
          x: samples, ``(n, p)``.

        Raises:
          ValueError: as :meth:`predict`.
        """
        path = np.asarray(self.decision_path(x))
        reached = np.zeros(2 * len(self.bias) + 1, dtype=bool)
        reached[path.ravel()] = True
        return self._one_way(~(reached[1::2] & reached[2::2]), right=reached[2::2])

    def merged(self) -> "ObliqueTree":
        """The same tree without the splits below which all leaves that can be reached are equal, bit for bit.

        No prediction changes.
        """
        self._single()
        rows = [np.asarray(a).reshape(len(self.bias) + 1, -1).view(np.uint8) for a in jax.tree.leaves(self.leaves)]
        held = np.concatenate(rows, axis=1)
        split, goes_right = np.any(np.asarray(self.weights) != 0, axis=1), np.asarray(self.bias) > 0
        chosen, only = np.zeros(len(self.bias), bool), np.arange(len(held))  # the one leaf below each node, or -1
        for level in map(topology.level, reversed(range(self.depth))):
            left, right = only[::2], only[1::2]
            alike = (left >= 0) & (right >= 0) & (held[left] == held[right]).all(axis=1)
            only = np.where(split[level], np.where(alike, left, -1), np.where(goes_right[level], right, left))
            chosen[level] = only >= 0
        return self._one_way(chosen, right=goes_right & ~split)

    def _one_way(self, chosen: np.ndarray, *, right: np.ndarray) -> "ObliqueTree":
        """The tree in which the chosen nodes send every sample one way."""
        bias = np.where(right, 1.0, -1.0).astype(np.asarray(self.bias).dtype)
        weights = jnp.where(chosen[:, None], 0, self.weights)
        return self.replace(weights=weights, bias=jnp.where(chosen, bias, self.bias))

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
        """The rules of the tree as indented text, without nodes that do not split.

        Computed in float64, the rules with ``digits=17`` are the tree, up to what float32 rounds in the tree itself.

        Args:
          feature_names: names of the p columns, by default ``x0``, ``x1``, ...
          digits: significant digits of weights, thresholds and leaves; the origin is always written exactly.
          class_names: names of the K classes, in classification; each leaf then names the likeliest class first.
          x: samples, ``(n, p)``, such as those of the training: each leaf says how many reach it.
          y: their classes 0..K-1, ``(n,)``, in classification: each leaf says how many of each class reach it.
          max_terms: terms of a condition or of a linear leaf, and classes of a leaf, at most: those of the largest
            |weight| times standard deviation in x (without x, |weight|), and how many others there are. None: all.

        Raises:
          ValueError: for another number of names than columns or classes, and for x or y that do not fit the tree.
        """
        self._single()
        names = self.names(feature_names)
        deviations, rows = self.measured(x, y, class_names, max_terms)
        shown: Any = {"max_terms": max_terms, "deviations": deviations}
        lines: list[str] = []

        def render(node: int, indent: str) -> None:
            if (leaf := node - len(self.bias)) >= 0:
                reached = f" ({'; '.join(rows[leaf])})" if rows[leaf] else ""
                answer = self.describe_leaf(leaf, names, digits, class_names=class_names, **shown)
                lines.append(f"{indent}-> {answer}{reached}")
            elif not np.any(np.asarray(self.weights[node])):
                render(2 * node + 1 + int(self.bias[node] > 0), indent)
            else:
                lines.append(f"{indent}if {self.describe_split(node, names, digits, **shown)}:")
                render(2 * node + 2, indent + "|   ")
                lines.append(f"{indent}else:")
                render(2 * node + 1, indent + "|   ")

        render(0, "")
        return "\n".join(lines)

    def names(self, feature_names: Sequence[str] | None) -> list[str]:
        """Names of the features, by default ``x0``, ``x1``, ...

        Raises:
          ValueError: for another number of names than columns.
        """
        if feature_names is None:
            return [f"x{i}" for i in range(self.features)]
        names = [str(name) for name in feature_names]
        if len(names) != self.features:
            raise ValueError(f"feature_names must hold {self.features} names, one a column, got {len(names)}")
        return names

    def measured(
        self, x: Any, y: Any, class_names: Sequence[str] | None, max_terms: int | None
    ) -> tuple[np.ndarray | None, list[list[str]]]:
        """What rules tell of a table: see :meth:`to_text`.

        Returns:
          The standard deviation of each feature, None without a table; and for each leaf the number of rows that reach
          it, as ``["41 rows"]``, or by class, as ``["41 rows", "sold: 38, not yet: 3"]``, or nothing without a table.

        Raises:
          ValueError: as :meth:`to_text`.
        """
        classes = self.leaves.values.shape[-1] if isinstance(self.leaves, (Frequency, Logit)) else None
        if max_terms is not None:
            validation.check_count("max_terms", max_terms)
        for name, given in (("class_names", class_names), ("y", y)):
            if given is not None and classes is None:
                raise ValueError(f"{name} must be None: the leaves of this tree hold no classes")
        if class_names is not None and len(class_names) != classes:
            raise ValueError(f"class_names must hold {classes} names, one a class, got {len(class_names)}")
        if x is None and y is not None:
            raise ValueError("y goes with x: the classes of its rows")
        if x is None:
            return None, [[] for _ in range(len(self.bias) + 1)]
        leaf, deviations = np.asarray(self.leaf_index(x)), np.asarray(x, np.float64).std(0)
        rows = [[f"{n} row{'' if n == 1 else 's'}"] for n in np.bincount(leaf, minlength=len(self.bias) + 1)]
        if y is None:
            return deviations, rows
        y, classes = validation.check_labels(y, classes)
        validation.check_rows(y, len(leaf))
        called = [f"class {i}" for i in range(classes)] if class_names is None else class_names
        by_class = np.bincount(leaf * classes + y, minlength=len(rows) * classes).reshape(-1, classes)
        for counts, texts in zip(by_class, rows, strict=True):
            there = [f"{called[i]}: {counts[i]}" for i in np.argsort(-counts, kind="stable") if counts[i]]
            texts += [listed(there, max_terms)] if there else []
        return deviations, rows

    def describe_split(
        self,
        node: int,
        names: Sequence[str],
        digits: int = 3,
        *,
        max_terms: int | None = None,
        deviations: np.ndarray | None = None,
    ) -> str:
        """The condition for going right at a node, as ``"1.2 age - 0.5 bmi > 3"``.

        Of more than ``max_terms`` terms it has those of the largest weight times deviation of the feature, and says how
        many others there are.
        """
        weights, bias = np.asarray(self.weights[node], np.float64), float(self.bias[node])
        return f"{linear_text(weights, self.counted(names), digits, max_terms, deviations)} > {0 - bias:.{digits}g}"

    def describe_leaf(
        self,
        leaf: int,
        names: Sequence[str],
        digits: int = 3,
        *,
        max_terms: int | None = None,
        deviations: np.ndarray | None = None,
        class_names: Sequence[str] | None = None,
    ) -> str:
        """What a leaf answers, as text; terms are chosen as by :meth:`describe_split`."""
        y_zero = 0.0 if self.origin is None or self.origin.y is None else np.asarray(self.origin.y, np.float64)
        shown: Any = {"max_terms": max_terms, "deviations": deviations, "class_names": class_names}
        return self.leaves.describe(leaf, self.counted(names), digits, y_zero, **shown)

    def counted(self, names: Sequence[str]) -> list[str]:
        """Names of the features as the tree takes them: ``"(year - 2000)"`` where they are counted from an origin."""
        if self.origin is None:
            return list(names)
        counted = []
        for name, zero in zip(names, np.asarray(self.origin.x), strict=True):
            counted.append(f"({name} {'+' if zero < 0 else '-'} {exact_text(abs(zero))})" if zero else name)
        return counted

    def __repr__(self) -> str:
        kind = type(self.leaves).__name__
        if validation.is_traced(self) or not isinstance(self.weights, (jax.Array, np.ndarray)):
            return f"ObliqueTree(weights={self.weights!r}, bias={self.bias!r}, leaves={self.leaves!r})"
        if self.weights.ndim != 2:
            return f"ObliqueTree(batch={self.weights.shape[:-2]}, features={self.weights.shape[-1]}, {kind})"
        return (
            f"ObliqueTree(depth={self.depth}, features={self.weights.shape[1]}, splits={int(self.splits.sum())}, "
            f"leaves={self.num_leaves}, parameters={self.num_parameters}, {kind})"
        )


def counted_from(zero: Any, x: Any) -> Any:
    """``x - zero``, of which no more is rounded than the difference: NumPy arrays in double precision."""
    if not isinstance(x, jax.Array) and not validation.is_traced(zero):
        return x - np.asarray(zero, np.float64)
    x = jnp.asarray(x)
    whole, short = not jnp.issubdtype(x.dtype, jnp.floating), x.dtype.itemsize < 4
    dtype = jnp.float32 if whole or short else x.dtype
    if not whole:
        return x.astype(dtype) - jnp.asarray(zero, dtype)
    # Whole numbers beyond 2**24 may be more than float32 holds; their two parts are not.
    x = x.astype(jnp.int32) if short else x
    low = x % 4096
    return ((x - low).astype(dtype) - jnp.asarray(zero, dtype)) + low.astype(dtype)


def _leaf_index(tree: ObliqueTree, x: jax.Array) -> jax.Array:
    return ops.hard(tree.weights, tree.bias, x)
