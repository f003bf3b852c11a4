"""Routing by violations. A violation measures how far a sample's decisions contradict the path to a leaf."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrees import topology


def path_violations(scores: Float[Array, "nodes ..."]) -> Float[Array, "leaves ..."]:
    """Returns the violation of the path to each leaf: ``v_l = sum_j relu(-S(j, l) z_j)``.

    The sum is over the ancestors j of leaf l. A path that turns right at j (S = 1) adds ``relu(-z_j)``. A path that
    turns left (S = -1) adds ``relu(z_j)``. The leaf of hard routing has violation 0 (RADDT, NeurIPS 2025).

    Args:
      scores: split scores, ``(nodes, ...)``.

    Example:
      >>> print(jtrees.routing.path_violations(jnp.array([1.0, -2.0, 0.5])))  # hard routing reaches the last leaf
      [1.  3.  0.5 0. ]
    """
    v = jnp.zeros_like(scores[:1])
    for z in topology.levels(scores):
        v = topology.interleave(v + jax.nn.relu(z), v + jax.nn.relu(-z))
    return v


def violation(scores: Float[Array, "nodes ..."], scale: float | Array = 1.0) -> Float[Array, "leaves ..."]:
    """Returns leaf probabilities ``softmin(scale * v)`` of path violations v. They become hard as ``scale`` grows.

    Args:
      scores: split scores, ``(nodes, ...)``.
      scale: sharpness, above 0. It is equivalent to a factor of the scores.

    Example:
      >>> print(np.asarray(jtrees.routing.violation(jnp.array([1.0, -2.0, 0.5]), 5.0)).round(3))
      [0.006 0.    0.075 0.918]
    """
    return jax.nn.softmax(-scale * path_violations(scores), axis=0)
