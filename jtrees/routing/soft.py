"""Soft routing: probabilities of nodes, and expected leaf values, in O(nodes) per sample."""

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrees import topology


def reach_probabilities(right: Float[Array, "nodes ..."]) -> Float[Array, "all_nodes ..."]:
    """Returns the probability that a sample reaches each node of the whole tree, breadth first.

    Args:
      right: probability of going right at each internal node, ``(nodes, ...)``.

    Returns:
      Probabilities ``(2 nodes + 1, ...)``, internal nodes first, then leaves. The root has probability 1. Each level
      sums to one.

    Example:
      >>> print(jtrees.routing.reach_probabilities(jnp.array([[0.5], [0.25], [1.0]])).T)
      [[1.    0.5   0.5   0.375 0.125 0.    0.5  ]]
    """
    return jnp.concatenate(_reach(right, jnp.ones_like(right[0])))


def leaf_probabilities(right: Float[Array, "nodes ..."]) -> Float[Array, "leaves ..."]:
    """Returns the probability of each leaf: the product over its ancestors of ``right`` or ``1 - right``.

    Args:
      right: probability of going right at each internal node, ``(nodes, ...)``.

    Returns:
      Probabilities ``(leaves, ...)``. They sum to one over the leaves.

    Example:
      >>> right = jnp.array([[0.5], [0.25], [1.0]])  # of the root and its two children, for one sample
      >>> print(jtrees.routing.leaf_probabilities(right).T)
      [[0.375 0.125 0.    0.5  ]]
    """
    return leaf_weights(right, jnp.ones_like(right[0]))


def leaf_weights(right: Float[Array, "nodes ..."], weight: Float[Array, "..."]) -> Float[Array, "leaves ..."]:
    """Distributes the weight of each sample to the leaves: ``weight * leaf_probabilities(right)``, in one pass."""
    return _reach(right, weight)[-1]


def _reach(right: Array, weight: Array) -> list[Array]:
    """Returns the weight that reaches each node, level by level, leaves last."""
    reach = [weight[None]]
    for s in topology.levels(right):
        reach.append(topology.interleave(reach[-1] * (1 - s), reach[-1] * s))
    return reach


@jax.custom_jvp
def expected_value(right: Float[Array, "nodes ..."], leaf_values: Float[Array, "leaves ..."]) -> Float[Array, "..."]:
    """Returns the expected leaf value, ``sum_l P_l value_l``, folded from the leaves up.

    Args:
      right: probability of going right at each internal node, ``(nodes, ...)``.
      leaf_values: values ``(leaves, ...)`` with the same number of axes as ``right``. All axes except the first
        broadcast. Values that are the same for all samples have shape ``(leaves, 1)``.

    Returns:
      Expected values in the broadcast trailing shape of both arguments.

    Example:
      >>> right, values = jnp.array([[0.5], [0.25], [1.0]]), jnp.array([[0.0], [8.0], [3.0], [4.0]])
      >>> print(jtrees.routing.expected_value(right, values))
      [3.]
    """
    chex.assert_equal_rank([right, leaf_values])
    return _folded(right, leaf_values)[0]


def _folded(right: Array, value: Array) -> tuple[Array, list[Array]]:
    """Returns the value of the root, and level by level the right child's value minus the left child's."""
    slopes = []
    for s in reversed(topology.levels(right)):
        below = topology.pairs(value)
        slopes.append(below[:, 1] - below[:, 0])
        value = below[:, 0] + s * slopes[-1]
    return value[0], slopes[::-1]


# Let P_j be the reach of node j, and V the folded values. V_root depends on s_j only through V_j = V_left + s_j
# (V_right - V_left). V_j has weight P_j in V_root. So
#     dV_root = sum_j P_j (V_right - V_left)_j ds_j + sum_l P_l dvalue_l,
# which is linear in the tangents. Reverse mode and second derivatives follow. No array is larger than the whole tree.
@expected_value.defjvp
def _expected_value_jvp(primals, tangents):
    (right, leaf_values), (d_right, d_leaf_values) = primals, tangents
    shape = jnp.broadcast_shapes(right.shape[1:], leaf_values.shape[1:])
    value, slopes = _folded(right, jnp.broadcast_to(leaf_values, (len(leaf_values), *shape)))
    reach, nodes = reach_probabilities(right), len(right)
    tangent = (reach[:nodes] * jnp.concatenate(slopes) * d_right).sum(0)
    return value, tangent + (reach[nodes:] * d_leaf_values).sum(0)
