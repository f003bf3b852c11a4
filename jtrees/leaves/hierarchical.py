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
    n = segments.total(weight)
    mean = (segments.total(weight[:, None] * y) / n)[None]
    own = segments.means(leaf_index, y, num_leaves, weight)
    columns = weight[:, None] * xp.column_stack([xp.ones_like(weight), weight, y - mean])
    levels = [segments.sums(columns, leaf_index, num_leaves)]  # sums of weights, their squares, targets; leaves first
    while len(levels[-1]) > 1:
        levels.append(topology.pairs(levels[-1]).sum(1))
    per_weight = [level[:, 1] / xp.where(level[:, 0] > 0, level[:, 0], 1) for level in levels]
    within = segments.total(weight[:, None] * xp.square(y - own[leaf_index])).sum()
    costs = xp.broadcast_to(cost, num_leaves - 1)

    def fitted(strength: Array) -> tuple[Array, Array]:
        """Returns the values, relative to the mean, and their generalised cross-validation."""
        values, freedom = levels[-1][:, 2:] / n, _COST * per_weight[-1].sum()
        pairs = zip(levels[:0:-1], levels[-2::-1], per_weight[:0:-1], per_weight[-2::-1], strict=True)
        for parents, children, of_parents, of_children in pairs:
            some, first = children[:, 0] > 0, len(parents) - 1
            samples = xp.where(of_parents > 0, parents[:, 0] / xp.where(of_parents > 0, of_parents, 1), 0)
            total = samples + strength  # 0 at an empty node if the strength is 0
            share = samples / xp.where(total > 0, total, 1)
            safe = lambda of: of[:, 2:] / xp.where(of[:, 0] > 0, of[:, 0], 1)[:, None]
            step = xp.repeat(share, 2)[:, None] * (safe(children) - xp.repeat(safe(parents), 2, axis=0))
            values = xp.repeat(values, 2, axis=0) + xp.where(some[:, None], step, 0)
            divided, of_level = topology.pairs(some).all(1), costs[first : first + len(parents)]
            more = topology.pairs(of_children).sum(1) - of_parents
            freedom += xp.where(divided, share * of_level * more, 0).sum()
        count = levels[0][:, :1]
        rss = within + xp.where(count > 0, count * xp.square(mean + values - own), 0).sum()
        left = 1 - freedom / n
        return values, xp.where(left > 0, rss / xp.square(xp.where(left > 0, left, 1)), xp.inf)

    if strength is None:
        strengths = xp.asarray(STRENGTHS, y.dtype)
        if xp is np:
            values, criterion = (np.stack(each) for each in zip(*map(fitted, strengths), strict=True))
        else:
            values, criterion = jax.lax.map(fitted, strengths)
        best = xp.argmin(criterion)
        values, strength = values[best], strengths[best]
    else:
        strength = xp.asarray(strength, y.dtype)
        values, _ = fitted(strength)
    kept = (strength == 0) & (levels[0][:, :1] > 0)
    return xp.where(kept, own, mean + values).reshape(shape), strength


def refit_hierarchical(
    leaves: Any, leaf_index: Array, x: Array, y: Array, sample_weight: Array | None = None, **options: Any
) -> Any:
    """Returns leaves refitted to samples, with shrinkage of target means and class frequencies.

    Only means and frequencies are shrunk. Values of other losses are refitted without shrinkage. Linear leaves are
    refitted with their own shrinkage.

    Uneven weights count as fewer samples (Kish's effective sample size of each node). Class frequencies are smoothed as
    in :func:`jtrees.losses.fit_frequencies`. ``options`` are ``strength`` and ``cost`` of
    :func:`jtrees.leaves.fit_hierarchical`.

    Example:
      >>> leaf = jnp.repeat(jnp.arange(3), 20)  # of 4 leaves, so the last one is empty
      >>> y = 4.0 * leaf + jnp.tile(jnp.array([0.0, 1.0]), 30)
      >>> zero = jtrees.leaves.Values(jnp.zeros(4))
      >>> print(np.asarray(jtrees.leaves.refit_hierarchical(zero, leaf, y[:, None], y).values).round(1))
      [0.5 4.5 8.5 8.5]
    """
    return leaves.refit_shrunk(leaf_index, x, y, sample_weight, **options)[0]
