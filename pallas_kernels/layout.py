"""The memory layout of a tree and its samples for kernels: a top and equal subtrees, samples last, all padded.

A tree of depth D is split into a top of depth T and ``2**T`` subtrees of depth D - T, so that the memory of a kernel
grows with a subtree and not with the tree: the weight of a leaf is that of its subtree's root times that within the
subtree. Rows are padded to sizes of products; padded leaves have no weight, padded features and samples are zeros, and
are removed from results.
"""

from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Layout:
    """Static sizes of one call.

    Attributes:
      depth: depth of the tree, at least 1.
      top: depth of the top, 0 to ``depth - 1``.
      n: number of samples.
      p: number of features.
      k: number of outputs.
      tile: number of samples of a tile, which are processed at once.
      tiles: number of tiles that one program of a gradient loops over.
      rows: multiple that rows of a product are padded to, a power of two.
      features: number of features of one product.
      split: whether products of float32 numbers are products of their bfloat16 parts.
    """

    depth: int
    top: int
    n: int
    p: int
    k: int
    tile: int
    tiles: int
    rows: int
    features: int
    split: bool = False

    @property
    def sub(self) -> int:
        """Depth of a subtree."""
        return self.depth - self.top

    @property
    def subtrees(self) -> int:
        """Number of subtrees."""
        return 2**self.top

    @property
    def top_rows(self) -> int:
        """Rows of the top: its nodes, and its leaves, which are the subtrees."""
        return max(2**self.top, self.rows)

    @property
    def sub_rows(self) -> int:
        """Rows of a subtree."""
        return max(2**self.sub, self.rows)

    @property
    def p_rows(self) -> int:
        """Rows of the features."""
        return _up(self.p, self.features) if self.p > self.features else max(self.rows, _power(self.p))

    @property
    def k_rows(self) -> int:
        """Rows of the outputs; a single one needs no products."""
        return 1 if self.k == 1 else max(self.rows, _power(self.k))

    @property
    def chunk(self) -> int:
        """Number of samples of one program of a gradient."""
        return self.tile * self.tiles

    @property
    def chunks(self) -> int:
        """Number of programs of a gradient for each subtree."""
        return -(-self.n // self.chunk)

    @property
    def columns(self) -> int:
        """Padded number of samples."""
        return self.chunks * self.chunk

    @property
    def blocks_of_features(self) -> list[slice]:
        """The features in slices of one product."""
        width = min(self.features, self.p_rows)
        return [slice(i, i + width) for i in range(0, self.p_rows, width)]

    @cached_property
    def of_top(self) -> tuple[np.ndarray, np.ndarray]:
        """Path matrices of the top."""
        return path_matrices(self.top, self.top_rows)

    @cached_property
    def of_subtree(self) -> tuple[np.ndarray, np.ndarray]:
        """Path matrices of a subtree."""
        return path_matrices(self.sub, self.sub_rows)

    def samples(self, a: jax.Array, rows: int) -> jax.Array:
        """``(n, m)`` -> ``(rows, columns)``."""
        return jnp.pad(a.T, ((0, rows - a.shape[1]), (0, self.columns - self.n)))

    def answers(self, a: jax.Array) -> jax.Array:
        """The inverse for results: ``(rows, columns)`` -> ``(n, k)``."""
        return a[: self.k, : self.n].T

    def cut(self, per_node: jax.Array) -> tuple[jax.Array, jax.Array]:
        """``(nodes, m)`` -> the top ``(top_rows, m)`` and the subtrees ``(subtrees, sub_rows, m)``."""
        m = per_node.shape[1]
        levels = [
            per_node[2**i - 1 : 2 ** (i + 1) - 1].reshape(self.subtrees, -1, m) for i in range(self.top, self.depth)
        ]
        top, below = per_node[: self.subtrees - 1], jnp.concatenate(levels, axis=1)
        pad = lambda a, rows: jnp.pad(a, [*[(0, 0)] * (a.ndim - 2), (0, rows - a.shape[-2]), (0, 0)])
        return pad(top, self.top_rows), pad(below, self.sub_rows)

    def join(self, top: jax.Array, below: jax.Array) -> jax.Array:
        """The inverse of :meth:`cut`."""
        m, levels = top.shape[1], [top[: self.subtrees - 1]]
        for i in range(self.sub):
            levels.append(below[:, 2**i - 1 : 2 ** (i + 1) - 1].reshape(-1, m))
        return jnp.concatenate(levels)

    def leaves(self, values: jax.Array) -> jax.Array:
        """``(leaves, k)`` -> ``(subtrees, sub_rows, k_rows)``."""
        values = values.reshape(self.subtrees, 2**self.sub, self.k)
        return jnp.pad(values, ((0, 0), (0, self.sub_rows - values.shape[1]), (0, self.k_rows - self.k)))

    def join_leaves(self, values: jax.Array) -> jax.Array:
        """The inverse of :meth:`leaves`."""
        return values[:, : 2**self.sub, : self.k].reshape(-1, self.k)


def path_matrices(depth: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """0/1 matrices of whether a leaf is right, or left, of a node, float32, ``(leaves, nodes)`` padded to ``rows``."""
    right, left = (np.zeros((rows, rows), np.float32) for _ in range(2))
    for leaf in range(2**depth):
        node = 0
        for level in reversed(range(depth)):
            turn = leaf >> level & 1
            (right if turn else left)[leaf, node] = 1
            node = 2 * node + 1 + turn
    return right, left


def _power(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
