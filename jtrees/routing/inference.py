"""Loss-augmented inference: the leaf that attains the upper bound of a sample's loss.

The method is from Norouzi et al., "Efficient Non-greedy Optimization of Decision Trees", NeurIPS 2015, sections 5 and
6. Let z be the scores of a sample, ``h = sgn z`` its decisions, and ``f(g)`` the leaf that decisions g lead to. Then

    loss at f(h)  <=  max over g of (g . z + loss at f(g)) - h . z.

The best decisions that lead to leaf l differ from h only where the path to l requires it. Each difference costs
``2 |z_j|``. The total cost is twice the violation of the path (:func:`jtrees.routing.path_violations`). The bound is
therefore the maximum of ``loss at l - 2 v_l`` over the leaves.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrees import topology
from jtrees.routing.violation import path_violations


def augmented_leaf(scores: Float[Array, "nodes n"], losses: Float[Array, "leaves n"]) -> Int[Array, " n"]:
    """Returns the leaf with the largest ``loss - 2 violation``: exact inference, O(nodes) per sample."""
    # At ties, the first leaf is returned. `losses` has the loss of each leaf on each sample.
    return jnp.argmax(losses - 2 * path_violations(scores), axis=0).astype(jnp.int32)


class Flips(NamedTuple):
    """The path of each sample, and the leaves that it would reach with one flipped decision on the path."""

    # The leaves form the Hamming ball of radius 1 around `sgn z`. Fast inference maximises over this ball (the paper's
    # eq. 13).

    path: Int[Array, "depth n"]  # the splits on the path, root first, (depth, n)
    scores: Float[Array, "depth n"]  # scores at these splits, (depth, n)
    # Leaf indices. Row 0 is the leaf that the sample reaches. Row 1 + l is the leaf with decision l flipped.
    leaf: Int[Array, "leaves n"]

    def violations(self) -> Float[Array, "leaves n"]:
        """Returns the violations of the paths to these leaves: 0, or the absolute score of the flipped decision."""
        return jnp.concatenate([jnp.zeros_like(self.scores[:1]), jnp.abs(self.scores)])


class Scores(NamedTuple):
    """The scores of samples at the splits of a tree, of which inference needs only some."""

    weights: Float[Array, "nodes p"]  # split weights, (nodes, p); right if `weights x + bias > 0`, else left
    bias: Float[Array, " nodes"]  # split biases, (nodes,)
    x: Float[Array, "n p"]  # samples, (n, p)
    all: Any = None  # scores of all splits, (nodes, n). None: scores are computed where they are needed

    def at(self, nodes: Int[Array, "r n"]) -> Float[Array, "r n"]:
        """Returns the scores of each sample at r splits. Gathers the weights of the splits, or the scores."""
        if self.all is not None:
            return jnp.take_along_axis(self.all, nodes, axis=0)
        return jnp.einsum("rnp,np->rn", self.weights[nodes], self.x, precision="highest") + self.bias[nodes]

    def flips(self) -> Flips:
        """Returns the flips, from all scores, or from those on the ``depth + 1`` paths, O(depth^2 p) per sample."""
        if self.all is not None:
            return flips_of(self.all)
        # Row 0 is the path of the sample. Each level adds the path that leaves it at this level.
        node, path, scores = jnp.zeros((1, len(self.x)), jnp.int32), [], []
        for _ in range(topology.depth_of(len(self.bias))):
            z = self.at(node)
            path.append(node[0])
            scores.append(z[0])
            left, right = 2 * node + 1, 2 * node + 2
            on, off = jnp.where(z > 0, right, left), jnp.where(z[:1] > 0, left[:1], right[:1])
            node = jnp.concatenate([on, off])
        return Flips(jnp.stack(path), jnp.stack(scores), node - len(self.bias))


def flips_of(scores: Float[Array, "nodes n"]) -> Flips:
    """Returns the flips, given the scores of all splits. Takes O(nodes) per sample, and gathers no weights."""
    nodes, depth = len(scores), topology.depth_of(len(scores))
    # ends[level] holds the leaf that hard routing reaches from each node, computed from the leaves up.
    end = jnp.broadcast_to(jnp.arange(nodes + 1, dtype=jnp.int32)[:, None], (nodes + 1, scores.shape[1]))
    ends = [end]
    for right in reversed(topology.levels(scores > 0)):
        below = topology.pairs(ends[0])
        ends.insert(0, jnp.where(right, below[:, 1], below[:, 0]))
    path = topology.ancestors(ends[0][0], depth)
    path_scores = jnp.take_along_axis(scores, path, axis=0)
    sibling = 2 * path + jnp.where(path_scores > 0, 1, 2)
    flipped = jnp.take_along_axis(jnp.concatenate(ends), sibling, axis=0)
    return Flips(path, path_scores, jnp.concatenate([ends[0], flipped]))
