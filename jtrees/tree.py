"""The hard oblique tree that every method ends in, and its leaves."""

from collections.abc import Sequence
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int
import numpy as np

from jtrees import blocking, topology, validation
from jtrees.routing.hard import leaf_index_by_path


@struct.dataclass
class ConstantLeaves:
    """One constant a leaf.

    Attributes:
      values: ``(leaves,)``, or ``(leaves, k)`` for k outputs.
    """

    values: Float[Array, "leaves *k"]

    def outputs(self, x: Float[Array, "n p"]) -> Float[Array, "leaves n"]:
        """What every leaf would answer for every sample (one output only)."""
        # A product with a row of ones, not a broadcast: its transpose is then a matrix product too, several times
        # faster on a CPU than a sum over samples.
        return jnp.matmul(self.values[:, None], jnp.ones((1, x.shape[0]), self.values.dtype), precision="highest")

    def at(self, leaf_index: Int[Array, " n"], x: Float[Array, "n p"]) -> Float[Array, "n *k"]:
        """What the given leaf answers for each sample."""
        return self.values.at[leaf_index].get(mode="promise_in_bounds")


@struct.dataclass
class LinearLeaves:
    """One linear model a leaf, ``coefficients @ x + intercept``, kept between bounds where it has them.

    Attributes:
      coefficients: ``(leaves, p)``.
      intercept: ``(leaves,)``.
      lower: the least that a leaf answers, ``(leaves,)``, or None: no bounds.
      upper: the most that a leaf answers, likewise.
    """

    coefficients: Float[Array, "leaves p"]
    intercept: Float[Array, " leaves"]
    lower: Float[Array, " leaves"] | None = None
    upper: Float[Array, " leaves"] | None = None

    def outputs(self, x: Float[Array, "n p"]) -> Float[Array, "leaves n"]:
        """What every leaf would answer for every sample."""
        answer = jnp.matmul(self.coefficients, x.T, precision="highest") + self.intercept[:, None]
        return (
            answer
            if self.lower is None or self.upper is None
            else jnp.clip(answer, self.lower[:, None], self.upper[:, None])
        )

    def at(self, leaf_index: Int[Array, " n"], x: Float[Array, "n p"]) -> Float[Array, " n"]:
        """What the given leaf answers for each sample."""
        answer = jnp.einsum("np,np->n", self.coefficients[leaf_index], x, precision="highest")
        answer += self.intercept[leaf_index]
        return (
            answer
            if self.lower is None or self.upper is None
            else jnp.clip(answer, self.lower[leaf_index], self.upper[leaf_index])
        )


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
      leaves: :class:`ConstantLeaves` or :class:`LinearLeaves`.
    """

    weights: Float[Array, "nodes p"]
    bias: Float[Array, " nodes"]
    leaves: Any

    @property
    def depth(self) -> int:
        """Depth of the perfect tree (a static int)."""
        return topology.depth_of(self.weights.shape[-2])

    def leaf_index(self, x: ArrayLike) -> Any:
        """The leaf that each sample reaches.

        Args:
          x: samples, ``(n, p)``: NumPy (answered in NumPy, any n without a new compilation for each) or JAX.

        Returns:
          Leaf numbers from 0, int32, ``(n,)``.

        Raises:
          ValueError: for another rank or width, or values that are not finite.
        """
        return evaluate(_leaf_index, _single(self), x)

    def predict(self, x: ArrayLike) -> Any:
        """What the tree answers: the model of the leaf that each sample reaches.

        Args:
          x: samples, ``(n, p)``: NumPy (answered in NumPy, any n without a new compilation for each) or JAX.

        Returns:
          ``(n,)``, or ``(n, k)`` for leaves with k outputs.

        Raises:
          ValueError: for another rank or width, or values that are not finite.
        """
        return evaluate(_predict, _single(self), x)

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
        return self._reachable()[: len(self.bias)] & np.any(np.asarray(self.weights) != 0, axis=1)

    @property
    def num_leaves(self) -> int:
        """Number of leaves that some sample could reach (host only)."""
        return int(self._reachable()[len(self.bias) :].sum())

    @property
    def num_parameters(self) -> int:
        """Numbers that the tree needs (host only).

        Non-zero weights and one threshold for each split that can be reached, plus what its reachable leaves hold
        (for linear leaves the non-zero coefficients, the intercept and the bounds).
        """
        weights, leaves = np.asarray(self.weights)[self.splits], self._reachable()[len(self.bias) :]
        count = np.count_nonzero(weights) + len(weights)
        if isinstance(self.leaves, LinearLeaves):
            numbers = sum(a is not None for a in (self.leaves.intercept, self.leaves.lower, self.leaves.upper))
            return int(count + np.count_nonzero(np.asarray(self.leaves.coefficients)[leaves]) + numbers * leaves.sum())
        return int(count + np.asarray(self.leaves.values)[leaves].size)

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
        left, right = reached[1::2], reached[2::2]
        divides = (left & right)[:, None]
        one_way = np.where(right, 1.0, -1.0).astype(np.asarray(self.bias).dtype)
        weights = jnp.where(divides, self.weights, 0)
        return self.replace(weights=weights, bias=jnp.where(divides[:, 0], self.bias, one_way))

    def to_text(self, feature_names: Sequence[str] | None = None, digits: int = 3) -> str:
        """The rules of the tree as indented text, without nodes that do not split.

        Args:
          feature_names: names of the p columns, by default ``x0``, ``x1``, ...
          digits: significant digits.

        Raises:
          ValueError: for another number of names than columns.
        """
        p = self.weights.shape[1]
        names = [f"x{i}" for i in range(p)] if feature_names is None else [str(name) for name in feature_names]
        if len(names) != p:
            raise ValueError(f"feature_names must hold {p} names, one a column, got {len(names)}")
        lines: list[str] = []
        self._render(0, "", names, digits, lines)
        return "\n".join(lines)

    def _render(self, node: int, indent: str, names: list[str], digits: int, lines: list[str]) -> None:
        if node >= len(self.bias):
            lines.append(f"{indent}-> {self.describe_leaf(node - len(self.bias), names, digits)}")
        elif not np.any(np.asarray(self.weights[node])):
            self._render(2 * node + 1 + int(self.bias[node] > 0), indent, names, digits, lines)
        else:
            lines.append(f"{indent}if {self.describe_split(node, names, digits)}:")
            self._render(2 * node + 2, indent + "|   ", names, digits, lines)
            lines.append(f"{indent}else:")
            self._render(2 * node + 1, indent + "|   ", names, digits, lines)

    def describe_split(self, node: int, names: Sequence[str], digits: int = 3) -> str:
        """The condition for going right at a node, as ``"1.2 age - 0.5 bmi > 3"``."""
        weights, bias = np.asarray(self.weights[node], float), float(self.bias[node])
        return f"{_linear_text(weights, names, digits)} > {0 - bias:.{digits}g}"

    def describe_leaf(self, leaf: int, names: Sequence[str], digits: int = 3) -> str:
        """What a leaf answers, as text."""
        if isinstance(self.leaves, LinearLeaves):
            terms = _linear_text(np.asarray(self.leaves.coefficients[leaf], float), names, digits)
            intercept = float(self.leaves.intercept[leaf])
            text = f"{intercept:.{digits}g}" if terms == "0" else f"{terms} {_signed(intercept, digits)}"
            if self.leaves.lower is None or self.leaves.upper is None or terms == "0":
                return text
            bounds = float(self.leaves.lower[leaf]), float(self.leaves.upper[leaf])
            return f"{text}, from {bounds[0]:.{digits}g} to {bounds[1]:.{digits}g}"
        return ", ".join(f"{v:.{digits}g}" for v in np.asarray(self.leaves.values[leaf], float).reshape(-1))

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


def _signed(value: float, digits: int) -> str:
    return f"{'-' if value < 0 else '+'} {abs(value):.{digits}g}"


def _linear_text(weights: np.ndarray, names: Sequence[str], digits: int) -> str:
    terms = [(w, name) for w, name in zip(weights, names, strict=True) if w != 0]
    if not terms:
        return "0"
    parts = [name if abs(w) == 1 else f"{abs(w):.{digits}g} {name}" for w, name in terms]
    text = parts[0] if terms[0][0] > 0 else f"-{parts[0]}"
    return text + "".join(f" {'-' if w < 0 else '+'} {part}" for (w, _), part in zip(terms[1:], parts[1:], strict=True))


# --- Evaluation ------------------------------------------------------------------------------------------------------
#
# A NumPy array is answered chunk by chunk. A chunk of _CHUNK rows is always the same compiled program; what is left
# over is padded to the next power of two. So a program compiles 17 small functions at the most, whatever the numbers
# of rows it meets, and large arrays are read where they lie instead of being copied to a padded one.

_CHUNK = 2**16


def _leaf_index(tree: ObliqueTree, x: jax.Array) -> jax.Array:
    return leaf_index_by_path(tree.weights, tree.bias, x)


def _predict(tree: ObliqueTree, x: jax.Array) -> jax.Array:
    return tree.leaves.at(_leaf_index(tree, x), x)


def _in_blocks(fn: Any, tree: ObliqueTree, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``fn(tree, x)`` block by block, and whether all of x is finite; traceable."""

    def one(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        # The root's score is NaN or infinite wherever a feature is (0 x inf is NaN too), so one dot product tells.
        root = tree.weights.reshape(-1, x.shape[1])[0]
        return fn(tree, x), jnp.isfinite(x @ root).all()

    block = blocking.prediction_block(tree.depth)
    if x.shape[0] <= block:
        return one(x)
    out, finite = jax.lax.map(one, blocking.into_blocks(x, block))
    return out.reshape(-1, *out.shape[2:])[: x.shape[0]], finite.all()


_compiled = jax.jit(_in_blocks, static_argnums=0)


def _single(tree: ObliqueTree) -> ObliqueTree:
    if tree.weights.ndim != 2:
        raise ValueError(f"the tree must be one tree, got a batch of shape {tree.weights.shape[:-2]}: index or vmap it")
    return tree


def evaluate(fn: Any, tree: ObliqueTree, x: Any) -> Any:
    """``fn(tree, x)``, a traceable function with one row of output a sample, compiled and block by block.

    Args:
      fn: a function of a module (it is a static argument).
      tree: one tree, or a batch of trees that ``fn`` knows what to do with.
      x: samples, ``(n, p)``, NumPy (answered in NumPy) or JAX.

    Raises:
      ValueError: for another rank or width, or values that are not finite.
    """
    # Shapes and dtype at the door; finiteness is found out on the way, because looking first costs more than the tree.
    x = validation.check_x(x, features=tree.weights.shape[-1], finite=False)
    if isinstance(x, jax.Array) or validation.is_traced(tree):
        out, finite = _compiled(fn, tree, jnp.asarray(x, tree.weights.dtype))
        if validation.is_traced(finite):
            return out
    else:
        x = np.ascontiguousarray(x, tree.weights.dtype)
        chunks = _chunks(x)
        parts = jax.block_until_ready([_compiled(fn, tree, _padded(chunk)) for chunk in chunks])
        out = np.concatenate([np.asarray(part)[: len(chunk)] for (part, _), chunk in zip(parts, chunks, strict=True)])
        finite = all(bool(ok) for _, ok in parts)
    if not finite:
        validation.check_finite("x", x)
    return out


def _chunks(x: np.ndarray) -> list[np.ndarray]:
    """The rows in chunks; a few go first by themselves if the others then lie on a 64-byte boundary."""
    # Only what is so aligned is read in place, which is worth a third of the time of a shallow tree.
    head = 0
    if len(x) > _CHUNK:
        head = next((rows for rows in range(64) if (x.ctypes.data + rows * x.strides[0]) % 64 == 0), 0)
    return ([x[:head]] if head else []) + [x[i : i + _CHUNK] for i in range(head, len(x), _CHUNK)]


def _padded(x: np.ndarray) -> np.ndarray:
    rows = 1 << (len(x) - 1).bit_length()
    return x if rows == len(x) else np.pad(x, [(0, rows - len(x)), (0, 0)])
