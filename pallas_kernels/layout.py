"""The rows of a tree in kernels. Each level consists of whole blocks, so routing adds and multiplies blocks.

A kernel works on arrays ``(rows, tile)`` with a column for each sample. A block has R rows, 8 on a TPU. A level of at
least R nodes consists of whole blocks. A level of fewer nodes is repeated until it fills one block. Each copy receives
the gradient of its own leaves.

The nodes of a level are in the order of reversed bits: row j turned right at level i if bit i of j is set. The children
of a level are therefore two copies of its rows. All left children come first, then all right children.

A tree that is too deep for the registers of a program is cut into ``2**path`` equal subtrees. The rows of each subtree
begin with a block that holds the ancestors of its root. The subtrees are independent.
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
      block: number of rows of a block, a power of two.
      tile: number of samples of a tile, which are processed together.
      steps: number of tiles that one program of a gradient visits.
      features: number of features of one product.
      columns: number of features, padded for a product.
      outputs: number of outputs, padded for a product.
      joined: whether each level is a single array. If not, each block is an array.
      transposed: whether a kernel reads the samples as ``(p, n)``.
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
    transposed: bool = False

    @property
    def below(self) -> int:
        """Depth of a subtree."""
        return self.depth - self.path

    @property
    def subtrees(self) -> int:
        return 2**self.path

    @property
    def tiles(self) -> int:
        return -(-self.n // self.tile)

    @property
    def programs(self) -> int:
        """Number of programs of a gradient for each subtree."""
        return -(-self.tiles // self.steps)

    @property
    def sample_axis(self) -> int:
        """The axis of the samples in a block of features."""
        return 1 if self.transposed else 0

    @property
    def sizes(self) -> list[int]:
        """Number of rows of each level of a subtree."""
        return [max(self.block, 2**level) for level in range(self.below)]

    @property
    def rows(self) -> int:
        """Number of rows of a subtree's splits, including the rows of its path."""
        return sum(self.sizes) + (self.block if self.path else 0)

    @property
    def leaves(self) -> int:
        """Number of rows of a subtree's leaves."""
        return max(self.block, 2**self.below)

    @property
    def blocks_of_features(self) -> list[slice]:
        """Slices of the features, one for each product."""
        return [slice(i, min(i + self.features, self.columns)) for i in range(0, self.columns, self.features)]

    @property
    def blocks_of_splits(self) -> list[slice]:
        """Slices of the splits' rows, one for each array."""
        return [slice(0, self.rows)] if self.joined else self._blocks(self.rows)

    @property
    def blocks_of_leaves(self) -> list[slice]:
        """Slices of the leaves' rows, one for each array."""
        return [slice(0, self.leaves)] if self.joined else self._blocks(self.leaves)

    def _blocks(self, rows: int) -> list[slice]:
        return [slice(i, i + self.block) for i in range(0, rows, self.block)]

    def places(self, name: str) -> list[tuple[slice, slice]]:
        """Returns the rows and columns of the arrays that make up a sum of a gradient."""
        if name == "weights":
            return [(rows, f) for rows in self.blocks_of_splits for f in self.blocks_of_features]
        blocks = {"bias": self.blocks_of_splits, "leaves": self.blocks_of_leaves}.get(name, [slice(0, 1)])
        return [(rows, slice(None)) for rows in blocks]

    def cut(self, nodes: jax.Array) -> jax.Array:
        """Returns the rows of each subtree, ``(subtrees, rows, m)``, given nodes ``(nodes, m)``, breadth first."""
        m, parts = nodes.shape[1], []
        level = lambda i: nodes[2**i - 1 : 2 ** (i + 1) - 1]
        if self.path:
            ancestors = [jnp.repeat(level(i), 2 ** (self.path - i), axis=0)[:, None] for i in range(self.path)]
            unused = jnp.zeros((self.subtrees, self.block - self.path, m), nodes.dtype)
            parts = [*ancestors, unused]
        for i, rows in enumerate(self.sizes):
            subtree_level = level(self.path + i).reshape(self.subtrees, 2**i, m)[:, reversed_bits(i)]
            parts.append(jnp.tile(subtree_level, (1, rows // 2**i, 1)))
        return jnp.concatenate(parts, axis=1)

    def join(self, rows: jax.Array) -> jax.Array:
        """Applies the transpose of :meth:`cut`, which sums over the copies of a node."""
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
        """Returns leaves ``(leaves, k)`` as ``(subtrees, leaves of a subtree, outputs)``."""
        k = values.shape[1]
        values = values.reshape(self.subtrees, 2**self.below, k)[:, reversed_bits(self.below)]
        padding = self.leaves - 2**self.below, 0 if k == 1 else self.outputs - k
        return jnp.pad(values, ((0, 0), (0, padding[0]), (0, padding[1])))

    def join_leaves(self, values: jax.Array) -> jax.Array:
        """Applies the inverse of :meth:`cut_leaves`."""
        return values[:, reversed_bits(self.below), : self.k].reshape(-1, self.k)

    def columns_of(self, a: jax.Array) -> jax.Array:
        """Returns an array ``(n, k)`` as ``(outputs, n)``."""
        return jnp.pad(a.T, ((0, 0 if a.shape[1] == 1 else self.outputs - a.shape[1]), (0, 0)))


def reversed_bits(bits: int) -> np.ndarray:
    """Returns the numbers below ``2**bits`` with reversed bits. This permutation is its own inverse."""
    numbers = np.arange(2**bits)
    return np.sum([(numbers >> i & 1) << (bits - 1 - i) for i in range(bits)], axis=0, dtype=int) if bits else numbers
