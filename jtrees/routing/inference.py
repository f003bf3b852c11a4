"""Loss-augmented inference: the leaf that a sample would have to reach for the bound on its loss to be what it is
(Norouzi et al., "Efficient Non-greedy Optimization of Decision Trees", NeurIPS 2015, sections 5 and 6).

With ``h = sgn z`` the decisions of a sample whose scores are z, and ``f(g)`` the leaf that decisions g lead to,

    loss at f(h)  <=  max over g of (g . z + loss at f(g)) - h . z.

Of the decisions that lead to leaf l those are best that differ from h only where the way to l asks for it, and each
of these costs ``2 |z_j|``: twice what the sample violates the path to l by (:func:`jtrees.routing.path_violations`).
So the bound is the greatest ``loss at l - 2 v_l`` over the leaves.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrees import topology
from jtrees.routing.violation import path_violations


def augmented_leaf(scores: Float[Array, "nodes n"], losses: Float[Array, "leaves n"]) -> Int[Array, " n"]:
    """The leaf where ``loss - 2 violation`` is the greatest: exact inference, O(nodes) a sample.

    Args:
      scores: split scores.
      losses: what each leaf would lose on each sample.

    Returns:
      Leaf numbers from 0, of equal leaves the first, int32.
    """
    return jnp.argmax(losses - 2 * path_violations(scores), axis=0).astype(jnp.int32)


def scores_at(
    weights: Float[Array, "nodes p"], bias: Float[Array, " nodes"], x: Float[Array, "n p"], at: Int[Array, "r n"]
) -> Float[Array, "r n"]:
    """Scores of each sample at r splits of its own, whose rows are gathered.

    Args:
      weights: split weights.
      bias: split biases.
      x: samples.
      at: numbers of the splits.
    """
    return jnp.einsum("rnp,np->rn", weights[at], x, precision="highest") + bias[at]


class Flips(NamedTuple):
    """The way of each sample, and where it would end if one decision on it were turned over.

    These are the leaves within a Hamming ball of radius 1 around ``sgn z``, among which fast inference looks (the
    paper's eq. 13).

    Attributes:
      path: the splits that it passes, root first, ``(depth, n)``.
      scores: its scores there.
      leaf: row 0 the leaf that it reaches, row 1 + l the one that it would reach with decision l turned over.
    """

    path: Int[Array, "depth n"]
    scores: Float[Array, "depth n"]
    leaf: Int[Array, "leaves n"]

    def violations(self) -> Float[Array, "leaves n"]:
        """By how much each of these leaves violates the sample's scores: not at all, or by the decision turned over."""
        return jnp.concatenate([jnp.zeros_like(self.scores[:1]), jnp.abs(self.scores)])


def flips(weights: Float[Array, "nodes p"], bias: Float[Array, " nodes"], x: Float[Array, "n p"]) -> Flips:
    """Scores only the splits on the ``depth + 1`` ways: O(depth^2 p) a sample.

    Args:
      weights: split weights, right iff ``weights x + bias > 0``.
      bias: split biases.
      x: samples.
    """
    # Row 0 is the sample's own way; each level adds the one that leaves it there.
    at, path, scores = jnp.zeros((1, len(x)), jnp.int32), [], []
    for _ in range(topology.depth_of(len(bias))):
        z = scores_at(weights, bias, x, at)
        path.append(at[0])
        scores.append(z[0])
        left, right = 2 * at + 1, 2 * at + 2
        on, off = jnp.where(z > 0, right, left), jnp.where(z[:1] > 0, left[:1], right[:1])
        at = jnp.concatenate([on, off])
    return Flips(jnp.stack(path), jnp.stack(scores), at - len(bias))


def flips_of(scores: Float[Array, "nodes n"]) -> Flips:
    """The same from the scores of all splits: O(nodes) a sample, and no gather of weights."""
    nodes, depth = len(scores), topology.depth_of(len(scores))
    # The leaf that hard routing finds below each node, level by level from the leaves up.
    end = jnp.broadcast_to(jnp.arange(nodes + 1, dtype=jnp.int32)[:, None], (nodes + 1, scores.shape[1]))
    ends = [end]
    for right in reversed(topology.levels(scores > 0)):
        below = topology.pairs(ends[0])
        ends.insert(0, jnp.where(right, below[:, 1], below[:, 0]))
    path = topology.ancestors(ends[0][0], depth)
    own = jnp.take_along_axis(scores, path, axis=0)
    sibling = 2 * path + jnp.where(own > 0, 1, 2)
    turned = jnp.take_along_axis(jnp.concatenate(ends), sibling, axis=0)
    return Flips(path, own, jnp.concatenate([ends[0], turned]))
