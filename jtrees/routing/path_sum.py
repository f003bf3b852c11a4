"""DGT's sum-form path function: the hard tree in the forward pass, a dense gradient in the backward pass.

The method is Algorithm 2 of Karthikeyan et al. 2022.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrees import topology
from jtrees.routing.hard import leaf_index
from jtrees.routing.soft import leaf_weights


def path_sum(
    scores: Float[Array, "nodes n"], values: Float[Array, "leaves *k"], window: float | Float[Array, ""] = 1.0
) -> Float[Array, "n *k"]:
    """Returns the value of the leaf that hard routing reaches, with DGT's gradient.

    The gradient is the gradient of ``sum_l softmax(q)_l values_l``. ``q_l`` is the number of decisions on the path to
    leaf l that agree with the sample's decisions, minus the number that disagree. The derivative of a sign is the
    straight-through derivative ``1[|z| <= window] / window``. Every node receives a gradient from every sample, in
    O(nodes) per sample. Leaves receive the gradient of the hard tree. Only reverse mode is available. No gradient flows
    to the window.

    Args:
      scores: split scores.
      values: values of the leaves, ``(leaves,)`` or ``(leaves, k)``.
      window: half-width of the window in which a score passes gradients, above 0. The paper uses 1.

    Returns:
      ``(n,)`` or ``(n, k)``.

    Example:
      >>> scores, values = jnp.array([[0.5], [-2.0], [0.3]]), jnp.array([0.0, 1.0, 2.0, 3.0])
      >>> print(jtrees.routing.path_sum(scores, values))
      [3.]
      >>> slopes = jax.grad(lambda scores: jtrees.routing.path_sum(scores, values)[0])(scores)
      >>> print(np.asarray(slopes).round(2).T)  # the left child is not on the path; its score is outside the window
      [[0.58 0.   0.41]]
    """
    return _path_sum(scores, values, jnp.asarray(window, scores.dtype))


@jax.custom_vjp
def _path_sum(scores: Array, values: Array, window: Array) -> Array:
    return values[leaf_index(scores)]


# The gradient: let s_j = +-1 be the decision at node j, and S(j, l) = +-1 the side of l. The weight of leaf l is prod_j
# exp(s_j S(j, l)) over its ancestors. Below a node, each pair (e, 1/e) sums to e + 1/e for both values of s_j. The
# normaliser therefore factors, and
#     softmax(q)_l = prod_j sigmoid(2 s_j S(j, l)).
# This is soft routing with the fixed probabilities sigmoid(+-2), 0.88 to the sample's side. Let a_l = <dL/df, value_l>,
# a the mean of a_l under the softmax, and m_l = softmax(q)_l (a_l - a). Then
#     dL/dz_j = 1[|z_j| <= window] / window (sum of m over leaves right of j - sum over leaves left of j),
# and the sums fold from the leaves up.
def _path_sum_fwd(scores, values, window):
    leaf = leaf_index(scores)
    return values[leaf], (scores, values, window, leaf)


def _path_sum_bwd(saved, gradient):
    scores, values, window, leaf = saved
    n = scores.shape[1]
    gain = jnp.matmul(values.reshape(len(values), -1), gradient.reshape(n, values[0].size).T, precision="highest")
    right = jnp.where(scores > 0, jax.nn.sigmoid(2.0), jax.nn.sigmoid(-2.0)).astype(scores.dtype)
    reach = leaf_weights(right, jnp.ones_like(right[0]))
    mass, slopes = reach * (gain - (reach * gain).sum(0, keepdims=True)), []
    for _ in range(topology.depth_of(scores.shape[0])):
        below = topology.pairs(mass)
        slopes.append(below[:, 1] - below[:, 0])
        mass = below.sum(1)
    d_scores = jnp.where(jnp.abs(scores) <= window, jnp.concatenate(slopes[::-1]) / window, 0)
    return d_scores, jax.ops.segment_sum(gradient, leaf, len(values)), jnp.zeros_like(window)


_path_sum.defvjp(_path_sum_fwd, _path_sum_bwd)


def mean_size(scores: Float[Array, "nodes n"], weight: Float[Array, " n"] | None = None) -> Float[Array, ""]:
    """Returns the weighted mean of ``|scores|`` over nodes and samples, for use as a window.

    This window grows with the scores. Large weights or large updates therefore cannot move all scores out of the
    window. No gradient flows through the mean.

    Example:
      >>> print(jtrees.routing.mean_size(jnp.array([[1.0, -3.0]])))
      2.0
    """
    size = jnp.abs(jax.lax.stop_gradient(scores)).mean(0)
    tiny = jnp.finfo(scores.dtype).tiny
    mean = size.mean() if weight is None else (weight * size).sum() / jnp.maximum(weight.sum(), tiny)
    return jnp.maximum(mean, tiny)
