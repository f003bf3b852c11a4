"""Hard routing: the leaf that a sample reaches if it goes right for a score above 0, else left."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Num

from jtrees import topology


def leaf_index(scores: Num[Array, "nodes ..."]) -> Int[Array, "..."]:
    """Returns the leaf that each sample reaches, given the scores of all nodes.

    Args:
      scores: split scores, ``(nodes, ...)``.

    Returns:
      Leaf indices from 0, int32, in the trailing shape of ``scores``.

    Example:
      >>> scores = jnp.array([[0.5, -0.5, 2.0], [1.0, 1.0, -1.0], [-1.0, 2.0, 0.25]])  # (nodes, n)
      >>> print(jtrees.routing.leaf_index(scores))
      [2 1 3]
    """
    # Comparisons are folded from the leaves up, without a gather. The smallest integer type for a leaf is used, because
    # a vector register holds four times more uint8 numbers than int32 numbers.
    leaves = scores.shape[0] + 1
    small = jnp.uint8 if leaves <= 2**8 else jnp.uint16 if leaves <= 2**16 else jnp.uint32
    index = jnp.arange(leaves, dtype=small).reshape(-1, *[1] * (scores.ndim - 1))
    for right in reversed(topology.levels(scores > 0)):
        below = topology.pairs(index)
        index = jnp.where(right, below[:, 1], below[:, 0])
    return index[0].astype(jnp.int32)
