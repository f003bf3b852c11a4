"""LatentTree's traversal: the reward of each sample at each node, and the sample's position in a pruned tree.

The equations are 1 to 5 of Zantedeschi et al. 2021. Arrays in this module cover the *whole* tree, leaves included:
``2**(depth + 1) - 1`` nodes, breadth first.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from jtrees import isotonic, topology
from jtrees.segments import at_least_float32

_MOST_SCORES = 2**23  # scores whose rewards are in memory together: 64 MB in single precision


def rewards(scores: Float[Array, "nodes *n"], root: Array | None = None) -> Float[Array, "all_nodes *n"]:
    """Returns the reward of each sample at each node: the smallest agreement of its scores along the node's path.

    The rewards are ``q_root = 1``, ``q_right = min(q_parent, score_parent)`` and
    ``q_left = min(q_parent, -score_parent)``. Only nodes on the path of hard routing have a positive q. The gradient
    flows to the score that attains the minimum (Danskin). At ties, the gradient flows to the score nearest to the root.

    Args:
      scores: split scores of the internal nodes; right if above 0, else left.
      root: q_root of each sample, if it is not 1 because the tree is a subtree, ``(...)``.

    Returns:
      q, ``(2**(depth + 1) - 1, ...)``.

    Example:
      >>> print(jtrees.routing.rewards(jnp.array([[1.0], [-2.0], [0.5]])).T)
      [[ 1.  -1.   1.  -1.  -2.  -0.5  0.5]]
    """
    q = [jnp.ones_like(scores[:1]) if root is None else root[None]]
    for score in topology.levels(scores):
        # jnp.minimum would split the gradient between equal arguments. NaN is propagated.
        minimum = lambda agreement: jnp.where((agreement >= q[-1]) | jnp.isnan(q[-1]), q[-1], agreement)
        q.append(topology.interleave(minimum(-score), minimum(score)))
    return jnp.concatenate(q)


def position(q: Float[Array, "all_nodes n"], active: Float[Array, " all_nodes"]) -> Float[Array, "all_nodes n"]:
    """Returns traversals ``z = clip(q + 1/2, 0, a)`` for a given activity (Proposition 1).

    Example:
      >>> q = jnp.array([[1.0, 1.0], [0.25, -2.0], [-0.25, 1.0]])
      >>> print(jtrees.routing.position(q, jnp.array([1.0, 0.5, 1.0])))
      [[1.   1.  ]
       [0.5  0.  ]
       [0.25 1.  ]]
    """
    raised = q + 0.5
    return jnp.where(raised > active[:, None], active[:, None], jnp.where(raised <= 0, 0, raised))


def activity(
    scores: Float[Array, "nodes n"], penalty: Any, weight: Float[Array, " n"] | None = None
) -> Float[Array, " all_nodes"]:
    """Returns the activity of the nodes on the samples. ``penalty`` is the penalty per sample.

    Example:
      >>> print(jtrees.routing.activity(jnp.array([[1.0, 2.0]]), 0.25))  # no sample goes left: pruned
      [1. 0. 1.]
    """
    # A sum over many samples would be infinite in float16.
    dtype, wide = scores.dtype, at_least_float32(scores)
    scores, weight = scores.astype(wide), None if weight is None else weight.astype(wide)
    samples = scores.shape[1] if weight is None else weight.sum()
    price = jnp.asarray(penalty, wide) * samples
    if weight is not None:  # a batch of zero weight still needs a positive penalty
        price = jnp.where(samples > 0, price, 1)
    depth = topology.depth_of(len(scores))
    if scores.size <= _MOST_SCORES or depth == 1:
        return isotonic.prune(rewards(scores), price, weight, nested=True).astype(dtype)
    # Rewards are nested, so the activity of a node is the smallest of the values on its path, each of which depends on
    # the rewards of its node alone. The lower levels are solved a subtree at a time, so that memory is bounded.
    upper, below = depth // 2, depth - depth // 2
    q = rewards(scores[: topology.num_nodes(upper)])
    above = isotonic.prune(q, price, weight, nested=True)
    level = topology.num_nodes(upper) + np.arange(2**upper)
    subtrees = np.concatenate([(level[:, None] + 1) * 2**k - 1 + np.arange(2**k) for k in range(below)], axis=1)

    def subtree(root: tuple[Array, Array, Array]) -> Array:
        nodes, reward, active = root
        return jnp.minimum(isotonic.prune(rewards(scores[nodes], reward), price, weight, nested=True), active)

    lower = jax.lax.map(subtree, (jnp.asarray(subtrees), q[len(level) - 1 :], above[len(level) - 1 :]))
    levels = [lower[:, 2**k - 1 : 2 ** (k + 1) - 1].ravel() for k in range(1, below + 1)]
    return jnp.concatenate([above, *levels]).astype(dtype)
