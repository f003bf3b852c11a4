"""Index arithmetic of the perfect binary tree.

A tree of depth ``D`` has ``2**D - 1`` internal nodes (splits) and ``2**D`` leaves. Internal nodes are numbered
breadth first from the root 0. The children of node ``i`` are ``2 i + 1`` (left) and ``2 i + 2`` (right). Level ``l`` is
the contiguous slice ``[2**l - 1, 2**(l + 1) - 1)``. In the numbering of the *whole* tree, leaf ``k`` is node
``2**D - 1 + k``. Arrays over nodes or leaves have this axis first.
"""

from typing import Any

from jax import Array
import jax.numpy as jnp


def num_nodes(depth: int) -> int:
    """Returns the number of internal nodes, ``2**depth - 1``."""
    return 2**depth - 1


def num_leaves(depth: int) -> int:
    """Returns the number of leaves, ``2**depth``."""
    return 2**depth


def depth_of(nodes: int) -> int:
    """Returns the depth of the tree with this number of internal nodes.

    Raises:
      ValueError: if ``nodes`` is not ``2**depth - 1`` for a depth of at least 1.
    """
    depth = (nodes + 1).bit_length() - 1
    if nodes < 1 or num_nodes(depth) != nodes:
        raise ValueError(f"the node axis must have 2**depth - 1 entries with depth >= 1, got {nodes}")
    return depth


def level(depth_of_level: int) -> slice:
    """Returns the slice of the node axis for one level."""
    return slice(2**depth_of_level - 1, 2 ** (depth_of_level + 1) - 1)


def levels(per_node: Array) -> list[Array]:
    """Splits an array ``(nodes, ...)`` into its levels ``(1, ...), (2, ...), (4, ...), ...``, root first."""
    return [per_node[level(i)] for i in range(depth_of(per_node.shape[0]))]


def ancestors(leaf_index: Array, depth: int) -> Array:
    """Returns the internal nodes on the paths to leaves ``(n,)``, root first, ``(depth, n)``."""
    node = leaf_index + num_leaves(depth)  # in numbers from 1, n // 2 is the parent
    return (node[None] >> jnp.arange(depth, 0, -1, dtype=node.dtype)[:, None]) - 1


def interleave(left: Array, right: Array) -> Array:
    """Joins two arrays ``(m, ...)`` over the parents of a level into ``(2 m, ...)`` over their children, in order."""
    return jnp.stack([left, right], axis=1).reshape(2 * left.shape[0], *left.shape[1:])


def pairs(children: Any) -> Any:
    """Returns ``(2 m, ...)`` over the nodes of a level as ``(m, 2, ...)``: left and right child of each parent."""
    return children.reshape(children.shape[0] // 2, 2, *children.shape[1:])
