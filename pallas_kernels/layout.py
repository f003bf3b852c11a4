"""Rows of a tree for kernels. Levels are whole blocks, so that routing is additions and products of blocks.

A kernel works on arrays ``(rows, tile)`` with a column for each sample. Blocks have R rows, 8 on a TPU. A level of at
least R nodes is whole blocks. A level of fewer nodes is repeated until it fills one block, and each copy receives the
gradient of its own leaves.

Within a level the nodes stand in the order of reversed bits: row j has turned right at level i where bit i of j is set.
So the children of the rows of a level are two copies of these rows: first all left children, then all right ones.

A tree that is too deep for the registers of a program is cut into ``2**path`` equal subtrees. The rows of each subtree
begin with a block that holds the ancestors of its root. No subtree needs another one.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Layout:
    """Static sizes of one call.

    Attributes:
      depth: depth of the tree, at least 1.
      path: levels above the subtrees.
      n: number of samples.
      p: number of features.
      k: number of outputs.
      block: rows of a block, a power of two.
      tile: samples of a tile, which are processed at once.
      steps: tiles that one program of a gradient visits.
      features: features of one product.
      columns: features, padded to what a product needs.
      outputs: outputs, likewise.
      joined: whether each level is one array, not one array for each block.
    """

    depth: int
    path: int
    n: int
    p: int
    k: int
    block: int
    tile: int
    steps: int
    features: int
    columns: int
    outputs: int
    joined: bool

    @property
    def below(self) -> int:
        """Depth of a subtree."""
        return self.depth - self.path

    @property
    def subtrees(self) -> int:
        """Number of subtrees."""
        return 2**self.path

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return -(-self.n // self.tile)

    @property
    def programs(self) -> int:
        """Number of programs of a gradient for each subtree."""
        return -(-self.tiles // self.steps)

    @property
    def sizes(self) -> list[int]:
        """Rows of each level of a subtree."""
        return [max(self.block, 2**level) for level in range(self.below)]

    @property
    def rows(self) -> int:
        """Rows of the splits of a subtree, with those of its path."""
        return sum(self.sizes) + (self.block if self.path else 0)

    @property
    def leaves(self) -> int:
        """Rows of the leaves of a subtree."""
        return max(self.block, 2**self.below)

    @property
    def blocks_of_features(self) -> list[slice]:
        """The features in slices of one product."""
        return [slice(i, min(i + self.features, self.columns)) for i in range(0, self.columns, self.features)]

    @property
    def blocks_of_splits(self) -> list[slice]:
        """The rows of the splits in slices of one array each."""
        return [slice(0, self.rows)] if self.joined else self._blocks(self.rows)

    @property
    def blocks_of_leaves(self) -> list[slice]:
        """The rows of the leaves, likewise."""
        return [slice(0, self.leaves)] if self.joined else self._blocks(self.leaves)

    def _blocks(self, rows: int) -> list[slice]:
        return [slice(i, i + self.block) for i in range(0, rows, self.block)]

    def places(self, name: str) -> list[tuple[slice, slice]]:
        """Rows and columns of the arrays that make up a sum of a gradient."""
        whole = slice(None)
        if name == "weights":
            return [(rows, f) for rows in self.blocks_of_splits for f in self.blocks_of_features]
        blocks = {"bias": self.blocks_of_splits, "leaves": self.blocks_of_leaves}.get(name, [slice(0, 1)])
        return [(rows, whole) for rows in blocks]

    def cut(self, nodes: jax.Array) -> jax.Array:
        """``(nodes, m)``, breadth first -> the rows of each subtree, ``(subtrees, rows, m)``."""
        m, parts = nodes.shape[1], []
        level = lambda i: nodes[2**i - 1 : 2 ** (i + 1) - 1]
        if self.path:
            ancestors = [jnp.repeat(level(i), 2 ** (self.path - i), axis=0)[:, None] for i in range(self.path)]
            unused = jnp.zeros((self.subtrees, self.block - self.path, m), nodes.dtype)
            parts = [*ancestors, unused]
        for i, rows in enumerate(self.sizes):
            of_subtree = level(self.path + i).reshape(self.subtrees, 2**i, m)[:, reversed_bits(i)]
            parts.append(jnp.tile(of_subtree, (1, rows // 2**i, 1)))
        return jnp.concatenate(parts, axis=1)

    def join(self, rows: jax.Array) -> jax.Array:
        """The transpose of :meth:`cut`: sums over the copies of a node."""
        m, levels = rows.shape[-1], []
        for i in range(self.path):
            levels.append(rows[:, i].reshape(2**i, -1, m).sum(1))
        start = self.block if self.path else 0
        for i, size in enumerate(self.sizes):
            copies = rows[:, start : start + size].reshape(self.subtrees, size // 2**i, 2**i, m)
            levels.append(copies.sum(1)[:, reversed_bits(i)].reshape(-1, m))
            start += size
        return jnp.concatenate(levels)

    def cut_leaves(self, values: jax.Array) -> jax.Array:
        """``(leaves, k)`` -> ``(subtrees, leaves of a subtree, outputs)``."""
        k = values.shape[1]
        values = values.reshape(self.subtrees, 2**self.below, k)[:, reversed_bits(self.below)]
        padding = self.leaves - 2**self.below, 0 if k == 1 else self.outputs - k
        return jnp.pad(values, ((0, 0), (0, padding[0]), (0, padding[1])))

    def join_leaves(self, values: jax.Array) -> jax.Array:
        """The inverse of :meth:`cut_leaves`."""
        return values[:, reversed_bits(self.below), : self.k].reshape(-1, self.k)

    def columns_of(self, a: jax.Array) -> jax.Array:
        """``(n, k)`` -> ``(outputs, n)``."""
        return jnp.pad(a.T, ((0, 0 if a.shape[1] == 1 else self.outputs - a.shape[1]), (0, 0)))


def reversed_bits(bits: int) -> np.ndarray:
    """Numbers below ``2**bits`` with their bits in reversed order; a permutation that is its own inverse."""
    numbers = np.arange(2**bits)
    return np.sum([(numbers >> i & 1) << (bits - 1 - i) for i in range(bits)], axis=0, dtype=int) if bits else numbers
