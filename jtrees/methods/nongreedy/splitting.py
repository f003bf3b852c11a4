"""The split with the greatest information gain, for all nodes of a level at once: how greedy trees begin.

CART within a compiled program: samples lie in bins of each feature, and a node's thresholds are the edges of the bins.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

Impurity = Callable[[jax.Array], jax.Array]  # statistics of nodes (..., q) -> what it costs to be right about them

_SMALLEST, _GROWTH = 8, 8  # sizes of a level that make a program each: a level pays for at most eight times its nodes
_GAIN = 1e-4  # that a split must bring, of what its node costs: more than float32 makes of nothing


class Thresholds(NamedTuple):
    """The best split of each node: right iff ``x[:, feature] > threshold``.

    Attributes:
      feature: its number, ``(nodes,)``.
      threshold: half way between two bins.
      gain: by how much the impurity of the node falls; 0 where nothing divides it with a gain.
    """

    feature: Int[Array, " nodes"]
    threshold: Float[Array, " nodes"]
    gain: Float[Array, " nodes"]


def edges_of(x: Float[np.ndarray, "n p"], bins: int = 32) -> np.ndarray:
    """Edges of bins that hold about equally many samples, half way between two values; on the host.

    Returns:
      ``(p, bins - 1)``, ascending, infinite where a feature has fewer values.
    """
    edges = np.full((x.shape[1], bins - 1), np.inf, np.float32)
    for row, column in zip(edges, x.T, strict=True):
        values = np.unique(column)
        low = values[:-1]
        if len(values) > bins:
            low = np.unique(np.quantile(column, np.arange(1, bins) / bins, method="lower"))
            low = low[low < values[-1]]
        row[: len(low)] = (low + values[np.searchsorted(values, low) + 1]) / 2
    return edges


def class_statistics(y: Int[Array, " n"], weight: Float[Array, " n"], classes: int) -> Float[Array, "n k"]:
    """What a sample adds to its node: its weight, at its class."""
    return weight[:, None] * jax.nn.one_hot(y, classes, dtype=weight.dtype)


def entropy(statistics: Float[Array, "*nodes k"]) -> Float[Array, "*nodes"]:
    """Weight of the samples times the entropy of their classes, in nats."""
    xlogx = lambda a: a * jnp.log(jnp.maximum(a, jnp.finfo(a.dtype).tiny))
    return xlogx(statistics.sum(-1)) - xlogx(statistics).sum(-1)


def target_statistics(y: Float[Array, "n *k"], weight: Float[Array, " n"]) -> Float[Array, "n q"]:
    """What a sample adds to its node: its weight, its targets counted from their mean, and their square."""
    y = y.reshape(len(y), -1)
    y = y - weight @ y / weight.sum()
    square = jnp.square(y).sum(1, keepdims=True)
    return weight[:, None] * jnp.concatenate([jnp.ones_like(square), y, square], axis=1)


def squared_deviation(statistics: Float[Array, "*nodes q"]) -> Float[Array, "*nodes"]:
    """Weight of the samples times the variance of their targets, of several the sum."""
    count, sums, square = statistics[..., 0], statistics[..., 1:-1], statistics[..., -1]
    explained = jnp.square(sums).sum(-1) / jnp.where(count > 0, count, 1)
    return jnp.maximum(square - explained, 0)


def best_thresholds(
    x: Float[Array, "n p"],
    edges: Float[Array, "p bins"],
    statistics: Float[Array, "n q"],
    node: Int[Array, " n"],
    nodes: int,
    impurity: Impurity,
) -> Thresholds:
    """The threshold with the greatest gain in each of so many nodes.

    Args:
      x: features.
      edges: of their bins: see :func:`edges_of`.
      statistics: what each sample adds to its node.
      node: where each sample is, from 0.
      nodes: how many there are.
      impurity: :func:`entropy` or :func:`squared_deviation`.
    """
    held = jax.ops.segment_sum(statistics, node, nodes)
    cost = impurity(held)
    # Most nodes of a deep level are empty or pure: the others are numbered anew.
    open_ = cost > _GAIN * jnp.abs(held).sum(-1)
    label = jnp.cumsum(open_) - 1
    of_sample = jnp.where(open_, label, nodes)[node]  # those of closed nodes fall out of every sum
    most = min(nodes, len(x) // 2 + 1)  # open nodes hold two samples at least
    sizes = [_SMALLEST]
    while sizes[-1] < most:
        sizes.append(min(sizes[-1] * _GROWTH, most))
    of_size = [lambda size=size: _best(x, edges, statistics, of_sample, size, max(sizes), impurity) for size in sizes]
    found = jax.lax.switch(jnp.searchsorted(jnp.asarray(sizes), open_.sum()), of_size)
    found = jax.tree.map(lambda a: a[jnp.clip(label, 0)], found)
    gain = jnp.where(open_ & (found.gain > _GAIN * cost), found.gain, 0)
    return found._replace(gain=gain)


def _best(
    x: Array, edges: Array, statistics: Array, node: Array, nodes: int, room: int, impurity: Impurity
) -> Thresholds:
    """The same for nodes that are all worth it, in arrays with room for more."""
    bins = edges.shape[1] + 1

    def look(best: Thresholds, one: tuple[Array, Array, Array]) -> tuple[Thresholds, None]:
        column, edge, feature = one
        cell = node * bins + (column[:, None] > edge).sum(1)
        below = jax.ops.segment_sum(statistics, cell, nodes * bins).reshape(nodes, bins, -1).cumsum(1)
        all_, left = below[:, -1:], below[:, :-1]
        gain = impurity(all_) - impurity(left) - impurity(all_ - left)
        gain = jnp.where(jnp.isfinite(edge), gain, -jnp.inf)
        at = gain.argmax(1)
        now = Thresholds(jnp.full(nodes, feature), edge[at], jnp.take_along_axis(gain, at[:, None], 1)[:, 0])
        return jax.tree.map(lambda new, old: jnp.where(now.gain > best.gain, new, old), now, best), None

    none = Thresholds(jnp.zeros(nodes, jnp.int32), jnp.zeros(nodes, edges.dtype), jnp.zeros(nodes, statistics.dtype))
    best: Any = jax.lax.scan(look, none, (x.T, edges, jnp.arange(len(edges), dtype=jnp.int32)))[0]
    return jax.tree.map(lambda a: jnp.pad(a, (0, room - nodes)), best)
