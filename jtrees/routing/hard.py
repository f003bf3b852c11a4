"""Hard routing: the leaf that a sample reaches, right iff a score is above 0."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Num

from jtrees import topology
from jtrees.routing.steps import hard_step


def leaf_index(scores: Num[Array, "nodes ..."]) -> Int[Array, "..."]:
    """The leaf reached, when the scores of all nodes are known.

    Args:
      scores: split scores, ``(nodes, ...)``.

    Returns:
      Leaf numbers from 0, int32, of the trailing shape of ``scores``.
    """
    # Comparison bits are folded from the bottom up: no gather. The smallest integer that can hold a leaf number: four
    # times as many fit in a vector register as of int32.
    leaves = scores.shape[0] + 1
    small = jnp.uint8 if leaves <= 2**8 else jnp.uint16 if leaves <= 2**16 else jnp.uint32
    index = jnp.arange(leaves, dtype=small).reshape(-1, *[1] * (scores.ndim - 1))
    for right in reversed(topology.levels(hard_step(scores))):
        below = topology.pairs(index)
        index = jnp.where(right, below[:, 1], below[:, 0])
    return index[0].astype(jnp.int32)
