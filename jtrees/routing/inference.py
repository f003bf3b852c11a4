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
    """Returns the leaf with the largest ``loss - 2 violation``: exact inference, O(nodes) per sample.

    Args:
      scores: split scores.
      losses: loss of each leaf on each sample.

    Returns:
      Leaf indices from 0, int32. At ties, the first leaf is returned.

    Example:
      >>> from jtrees.routing import inference
      >>> losses = jnp.array([[1.0], [0.0]])  # the left leaf is worse
      >>> print(inference.augmented_leaf(jnp.array([[0.1]]), losses), "where the score is small")
      [0] where the score is small
      >>> print(inference.augmented_leaf(jnp.array([[2.0]]), losses), "where it is large")
      [1] where it is large
    """
    return jnp.argmax(losses - 2 * path_violations(scores), axis=0).astype(jnp.int32)


class Flips(NamedTuple):
    """The path of each sample, and the leaves that it would reach with one flipped decision on the path.

    The leaves form the Hamming ball of radius 1 around ``sgn z``. Fast inference maximises over this ball (the paper's
    eq. 13).

    Attributes:
      path: the splits on the path, root first, ``(depth, n)``.
      scores: scores at these splits, ``(depth, n)``.
      leaf: leaf indices. Row 0 is the leaf that the sample reaches. Row 1 + l is the leaf with decision l flipped.
    """

    path: Int[Array, "depth n"]
    scores: Float[Array, "depth n"]
    leaf: Int[Array, "leaves n"]

    def violations(self) -> Float[Array, "leaves n"]:
        """Returns the violations of the paths to these leaves: 0, or the absolute score of the flipped decision."""
        return jnp.concatenate([jnp.zeros_like(self.scores[:1]), jnp.abs(self.scores)])


class Scores(NamedTuple):
    """The scores of samples at the splits of a tree, of which inference needs only some.

    Attributes:
      weights: split weights, ``(nodes, p)``; right if ``weights x + bias > 0``, else left.
      bias: split biases, ``(nodes,)``.
      x: samples, ``(n, p)``.
      all: scores of all splits, ``(nodes, n)``. None: scores are computed where they are needed.
    """

    weights: Float[Array, "nodes p"]
    bias: Float[Array, " nodes"]
    x: Float[Array, "n p"]
    all: Any = None

    def at(self, nodes: Int[Array, "r n"]) -> Float[Array, "r n"]:
        """Returns the scores of each sample at r splits. Gathers the weights of the splits, or the scores.

        Example:
          >>> from jtrees.routing.inference import Scores
          >>> weights, bias = jnp.array([[1.0], [0.0], [2.0]]), jnp.array([0.0, -2.0, 0.5])
          >>> scores = Scores(weights, bias, jnp.array([[1.0], [3.0]]))
          >>> print(scores.at(jnp.array([[0, 2]])))  # the root, and its right child
          [[1.  6.5]]
        """
        if self.all is not None:
            return jnp.take_along_axis(self.all, nodes, axis=0)
        return jnp.einsum("rnp,np->rn", self.weights[nodes], self.x, precision="highest") + self.bias[nodes]

    def flips(self) -> Flips:
        """Returns the flips, from all scores, or from the scores on the ``depth + 1`` paths, O(depth^2 p) per sample.

        Example:
          >>> from jtrees.routing.inference import Scores
          >>> weights, bias = jnp.array([[1.0], [0.0], [0.0]]), jnp.array([0.0, -2.0, 0.5])
          >>> print(Scores(weights, bias, jnp.array([[1.0]])).flips().leaf.T)  # reached, root flipped, child flipped
          [[3 0 2]]
        """
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
    """Returns the flips, given the scores of all splits. Takes O(nodes) per sample, and gathers no weights.

    Example:
      >>> from jtrees.routing import inference
      >>> print(inference.flips_of(jnp.array([[1.0], [-2.0], [0.5]])).leaf.T)
      [[3 0 2]]
    """
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
