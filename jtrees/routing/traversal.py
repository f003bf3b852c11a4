"""LatentTree's traversal: how much each sample would gain at each node, and how far it gets in a pruned tree
(Zantedeschi et al. 2021, eq. 1 to 5).

Arrays here are over the *whole* tree, leaves included: ``2**(depth + 1) - 1`` nodes, breadth first.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrees import isotonic, topology


def rewards(scores: Float[Array, "nodes *n"]) -> Float[Array, "all_nodes *n"]:
    """What sending each sample to each node is worth: the least agreement of its scores along the path.

    ``q_root = 1``; ``q_right = min(q_parent, score_parent)`` and ``q_left = min(q_parent, -score_parent)``. Along the
    path that hard routing takes q is positive, elsewhere it is not. The gradient goes to the score that attains the
    minimum (Danskin); of equal ones, to that nearest to the root.

    Args:
      scores: split scores of the internal nodes, right iff above 0.

    Returns:
      q, ``(2**(depth + 1) - 1, ...)``.
    """
    q = [jnp.ones_like(scores[:1])]
    for score in topology.levels(scores):
        # Not jnp.minimum, which shares the gradient between equal arguments. A NaN goes through.
        least = lambda agreement: jnp.where(agreement >= q[-1], q[-1], agreement)
        q.append(topology.interleave(least(-score), least(score)))
    return jnp.concatenate(q)


def traverse(
    scores: Float[Array, "nodes n"], penalty: float | Array, weight: Float[Array, " n"] | None = None
) -> tuple[Float[Array, "all_nodes n"], Float[Array, " all_nodes"]]:
    """Soft traversals of a tree that is pruned at the same time (the paper's T, eq. 3).

    Args:
      scores: split scores of the internal nodes, right iff above 0.
      penalty: price of an active node, above 0.
      weight: of each sample, at least 0, by default 1 each. It bears on the pruning alone: a sample of weight 0 has its
        z, but no say in a.

    Returns:
      ``(z, a)``: z between 0 and a, how far each sample is at each node; a, how active each node is
      (:func:`jtrees.isotonic.prune`).

    Raises:
      ValueError: as :func:`jtrees.isotonic.prune`.
    """
    q = rewards(scores)
    active = isotonic.prune(q, penalty, weight)
    return position(q, active), active


def position(q: Float[Array, "all_nodes n"], active: Float[Array, " all_nodes"]) -> Float[Array, "all_nodes n"]:
    """``z = clip(q + 1/2, 0, a)`` (Proposition 1), of samples in a tree whose activity is known."""
    raised = q + 0.5
    return jnp.where(raised > active[:, None], active[:, None], jnp.where(raised <= 0, 0, raised))


def activity(
    scores: Float[Array, "nodes n"], penalty: Any, weight: Float[Array, " n"] | None = None
) -> Float[Array, " all_nodes"]:
    """The activity of the nodes on samples; ``penalty`` is that of one sample."""
    samples = scores.shape[1] if weight is None else weight.sum()
    price = jnp.asarray(penalty, scores.dtype) * samples
    if weight is not None:  # a batch without weight prunes nothing in particular, but must prune something
        price = jnp.maximum(price, jnp.finfo(scores.dtype).eps)
    return isotonic.prune(rewards(scores), price, weight)
