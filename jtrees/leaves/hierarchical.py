"""Hierarchical shrinkage draws the means in leaves towards the means of their ancestors.

The method is from Agarwal, Tan, Ronen, Singh and Yu, "Hierarchical Shrinkage", ICML 2022. Let m be the mean and N the
weight of the targets at a node. A leaf has the value

    m_root + sum over its path of (m_node - m_parent) / (1 + strength / N_parent).

A step down the tree therefore counts less if the parent has fewer samples. The values are linear in the targets. The
strength minimises generalised cross-validation, ``RSS / (1 - df / n)^2``.

The degrees of freedom df follow from the trace of this linear map. The trace is a sum: 1 for the mean, and
``N / (N + strength)`` for each split of N samples into two parts. df counts the mean twice, and each split ``cost``
times. The cost is at least 2, because the splits were fitted to the same targets. (In Friedman's MARS a degree of
freedom counts two to four times.)

Let W be the sum of the weights of a node, and S the sum of their squares. The node has ``N = W^2 / S`` samples (Kish).
The weighted mean of a node lowers the weighted sum of squares of its targets by ``q = S / W`` times their variance more
than on new targets. So ``q_left + q_right - q`` replaces the 1 of a split in df, q of the root replaces the 1 of the
mean, and W of the root replaces n. All of this depends on the ratios of the weights alone.
"""

from typing import Any

import jax
from jaxtyping import Float, Int, Num
import numpy as np

from jtrees import segments, topology
from jtrees.segments import Array, floating, module_of, ones_or

STRENGTHS = (0.0, *np.geomspace(0.1, 1e4, 16))
_COST = 2.0  # cost of the mean, and default cost of a split


def fit_hierarchical(
    leaf_index: Int[Array, " n"],
    y: Num[Array, "n *k"],
    num_leaves: int,
    *,
    sample_weight: Float[Array, " n"] | None = None,
    strength: Any = None,
    cost: Any = _COST,
) -> tuple[Float[Array, "leaves *k"], Float[Array, ""]]:
    """Returns the shrunk mean of the targets in each leaf, and the strength.

    An empty leaf has the value of its parent.

    Args:
      leaf_index: leaf of each sample.
      y: targets, ``(n,)`` or ``(n, k)``. All k targets share one strength.
      num_leaves: number of leaves, a power of 2.
      sample_weight: nonnegative weights, of which only the ratios matter. Uneven weights count as fewer samples.
      strength: strength of the shrinkage, in samples. If None, generalised cross-validation selects it among 17 values
        from 0 to 10 000.
      cost: factor of a split's degrees of freedom in this criterion. A number, or an array ``(leaves - 1,)`` with a
        number for each internal node.

    Example:
      >>> leaf = jnp.repeat(jnp.arange(3), 20)  # of 4 leaves, so the last one is empty
      >>> y = 4.0 * leaf + jnp.tile(jnp.array([0.0, 1.0]), 30)
      >>> values, strength = jtrees.leaves.fit_hierarchical(leaf, y, 4)
      >>> print(np.asarray(values).round(1))
      [0.5 4.5 8.5 8.5]
    """
    shape, y = (num_leaves, *y.shape[1:]), floating(y).reshape(y.shape[0], -1)
    weight = segments.mean_one(ones_or(sample_weight, y))
    xp = module_of(leaf_index, y, weight)
    mean = (segments.total(weight[:, None] * y) / segments.total(weight))[None]
    leaf_means = segments.means(leaf_index, y, num_leaves, weight)
    columns = weight[:, None] * xp.column_stack([xp.ones_like(weight), weight, y - mean])
    levels = [segments.sums(columns, leaf_index, num_leaves)]  # sums of weights, their squares, targets; leaves first
    while len(levels[-1]) > 1:
        levels.append(topology.pairs(levels[-1]).sum(1))
    count, total = levels[0][:, :1], segments.total(weight)
    inner_rss = segments.total(weight[:, None] * xp.square(y - leaf_means[leaf_index])).sum()
    per_weight = [_ratio(level[:, 1], level[:, 0]) for level in levels]
    costs = xp.broadcast_to(cost, num_leaves - 1)

    def fitted(strength: Array) -> tuple[Array, Array]:
        """Returns the values, relative to the mean, and their generalised cross-validation."""
        values, freedom = _shrunk(levels[::-1], per_weight[::-1], total, costs, strength)
        rss = inner_rss + xp.where(count > 0, count * xp.square(mean + values - leaf_means), 0).sum()
        free = 1 - freedom / total
        return values, xp.where(free > 0, rss / xp.square(xp.where(free > 0, free, 1)), xp.inf)

    if strength is not None:
        strength = xp.asarray(strength, y.dtype)
        values, _ = fitted(strength)
    else:
        strengths = xp.asarray(STRENGTHS, y.dtype)
        if xp is np:
            values, criterion = map(np.stack, zip(*map(fitted, strengths), strict=True))
        else:
            values, criterion = jax.lax.map(fitted, strengths)
        best = xp.argmin(criterion)
        values, strength = values[best], strengths[best]
    return xp.where((strength == 0) & (count > 0), leaf_means, mean + values).reshape(shape), strength


def _shrunk(
    levels: list[Array], per_weight: list[Array], total: Array, costs: Array, strength: Array
) -> tuple[Array, Array]:
    """Returns the shrunk means of the leaves, relative to the mean of all rows, and their degrees of freedom."""
    # `levels` are sums of weights, of their squares and of targets at the nodes of each level, from the root.
    # `per_weight` has the ratio q of each node.
    xp = module_of(*levels)
    means = lambda sums: _ratio(sums[:, 2:], sums[:, :1])
    values, freedom = levels[0][:, 2:] / total, _COST * per_weight[0].sum()
    for parents, children, parent_q, child_q in zip(levels, levels[1:], per_weight, per_weight[1:], strict=False):
        samples, is_reached = _ratio(parents[:, 0], parent_q), children[:, 0] > 0
        share = _ratio(samples, samples + strength)
        step = xp.repeat(share, 2)[:, None] * (means(children) - xp.repeat(means(parents), 2, axis=0))
        values = xp.repeat(values, 2, axis=0) + xp.where(is_reached[:, None], step, 0)
        split_costs = costs[len(parents) - 1 : 2 * len(parents) - 1]
        increase = topology.pairs(child_q).sum(1) - parent_q
        freedom += xp.where(topology.pairs(is_reached).all(1), share * split_costs * increase, 0).sum()
    return values, freedom


def _ratio(numerator: Array, denominator: Array) -> Array:
    """Returns the ratio, or the numerator where the denominator is 0. The numerator is then 0 too."""
    return numerator / module_of(denominator).where(denominator > 0, denominator, 1)
