"""Splits of single features with the largest information gain, for all nodes of a level at once.

This is CART within a compiled program: features are binned, and thresholds are edges of bins. It gives initial splits
for CO2 (where outputs of a ridge regression are additional features), for GET with ``cart="binned"``, and for boosting.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer
import numpy as np

from jtrees import topology
from jtrees.segments import ones_or
from jtrees.tasks import Classification, Task
from jtrees.tasks.labels import shares

Impurity = Callable[[jax.Array], jax.Array]  # statistics of nodes (..., q) -> impurity (...)

_SMALLEST, _GROWTH = 8, 8  # padded sizes of a level, each with a branch: at most eight times the open nodes
_CELLS = 2**22  # numbers of the sums that are in memory together
_FEW_BINS = 64  # below this number, a value is compared with all edges at once
_DIGITS = 1e-6  # targets of a node are equal if their standard deviation is below this fraction of their mean
_ROWS_OF_COVARIANCE = 1000  # about the number of rows that choose columns
_GAIN = 1e-4  # smallest gain as a fraction of the node's impurity, above rounding errors of float32


class Thresholds(NamedTuple):
    """The best split of each node: right if ``x[:, feature] > threshold``, else left."""

    feature: Int[Array, " nodes"]  # index of the feature, (nodes,)
    threshold: Float[Array, " nodes"]  # threshold, midway between two bins
    gain: Float[Array, " nodes"]  # decrease of the impurity, or 0 if no split has a gain


def edges_of(x: Float[np.ndarray, "n p"], bins: int = 32, weight: Float[np.ndarray, " n"] | None = None) -> np.ndarray:
    """Returns edges of bins with about equal weights of samples, ``(p, bins - 1)``, midway between two values."""
    edges, after = np.full((x.shape[1], bins - 1), np.inf, np.float32), np.arange(1, bins) / bins
    varies = weight is not None and np.ptp(weight) > 0
    for row, column in zip(edges, x.T, strict=True):
        values = np.unique(column)
        low = values[:-1]
        if len(values) > bins:
            options: Any = {"weights": weight, "method": "inverted_cdf"} if varies else {"method": "lower"}
            low = np.unique(np.quantile(column, after, **options))
            low = low[low < values[-1]]
        row[: len(low)] = (low + values[np.searchsorted(values, low) + 1]) / 2
    return edges


def edges_within(x: Float[Array, "n p"], weight: Float[Array, " n"], bins: int) -> Float[Array, "p bins"]:
    """Returns edges of bins with about equal weights of samples, like :func:`edges_of`, in a program."""
    # An edge is repeated if a bin would be empty.
    after = jnp.arange(1, bins, dtype=weight.dtype)

    def edges(column: Array) -> Array:
        column = jnp.where(weight > 0, column, jnp.inf)
        order = jnp.argsort(column)
        cumulative = jnp.cumsum(weight[order])
        # Index of the last sample of each bin; a sample that two bins would share belongs to the second bin.
        last = jnp.searchsorted(cumulative, after * cumulative[-1] / bins, side="right", method="sort") - 1
        ordered = jnp.append(column[order], jnp.inf)
        low = ordered[jnp.maximum(last, 0)]
        following = ordered[jnp.searchsorted(ordered, low, side="right", method="sort")]  # the next larger value
        return (low + following) / 2

    return jax.vmap(edges)(x.T)


def statistics_of(task: Task, y: Array, weight: Float[Array, " n"]) -> tuple[Float[Array, "n q"], Impurity]:
    """Returns the contributions of samples to their node, and the impurity of their sum."""
    # A contribution is the weight times the probabilities of the classes, or times one, the centred targets, and their
    # squared norm.
    if isinstance(task, Classification):
        return weight[:, None] * shares(jnp.asarray(y), task.classes, weight.dtype), entropy
    y = y.reshape(len(y), -1)
    y = y - jnp.matmul(weight, y, precision="highest") / weight.sum()
    square = jnp.square(y).sum(1, keepdims=True)
    return weight[:, None] * jnp.concatenate([jnp.ones_like(square), y, square], axis=1), squared_deviation


def entropy(statistics: Float[Array, "*nodes k"]) -> Float[Array, "*nodes"]:
    """Returns the weight of the samples times the entropy of their classes, in nats."""
    xlogx = lambda a: a * jnp.log(jnp.maximum(a, jnp.finfo(a.dtype).tiny))
    return xlogx(statistics.sum(-1)) - xlogx(statistics).sum(-1)


def squared_deviation(statistics: Float[Array, "*nodes q"]) -> Float[Array, "*nodes"]:
    """Returns the weight of the samples times the variance of their targets, summed over targets."""
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
    *,
    codes: Integer[Array, "p n"] | None = None,
) -> Thresholds:
    """Returns the split with the largest gain in each node."""
    # `edges` come from `edges_of`, `statistics` the contribution of each sample to its node, and `impurity` is
    # `entropy` or `squared_deviation`. `codes` are the bins of `codes_of`, which several calls can share.
    codes = codes_of(x, edges) if codes is None else codes
    sums = jax.ops.segment_sum(statistics, node, nodes)
    rounding = _GAIN * jnp.abs(sums).sum(-1)  # impurity that rounding errors can cause
    if impurity is squared_deviation:
        rounding = (_DIGITS * jnp.abs(sums[:, 1:-1]).sum(-1)) ** 2 / jnp.maximum(sums[:, 0], 1)
        for _ in range(2):  # the second pass removes the rounding error of the first means
            statistics = _about_means(statistics, node, sums)
            sums = jax.ops.segment_sum(statistics, node, nodes)
    cost = impurity(sums)
    # Most nodes of a deep level are empty or pure. Only the other nodes (open nodes) are numbered and searched.
    open_ = cost > rounding
    if impurity is not squared_deviation:  # a single sample with a soft label has an impurity, too
        open_ &= jax.ops.segment_sum(jnp.ones_like(node), node, nodes) > 1
    label = jnp.cumsum(open_) - 1
    labels = jnp.where(open_, label, nodes)[node]  # out of range for closed nodes, which are therefore dropped
    max_open = min(nodes, len(x) // 2 + 1)  # an open node has at least two samples
    sizes = [min(_SMALLEST, max_open)]
    while sizes[-1] < max_open:
        sizes.append(min(sizes[-1] * _GROWTH, max_open))
    splits_of = lambda size: _best(codes, edges, statistics, labels, size, impurity)
    padded = lambda size: jax.tree.map(lambda a: jnp.pad(a, (0, sizes[-1] - size)), splits_of(size))
    branches = [partial(padded, size) for size in sizes]
    splits = jax.lax.switch(jnp.searchsorted(jnp.asarray(sizes), open_.sum()), branches)
    splits = jax.tree.map(lambda a: a[jnp.clip(label, 0)], splits)
    gain = jnp.where(open_ & (splits.gain > _GAIN * cost), splits.gain, 0)
    return splits._replace(gain=gain)


def _about_means(statistics: Float[Array, "n q"], node: Int[Array, " n"], sums: Float[Array, "m q"]) -> Array:
    """Returns statistics of targets that are centred by the mean of their node."""
    # The squares of targets far from the mean of all rows would lose the digits in which targets of a node differ.
    weight = statistics[:, :1]
    safe = lambda count: jnp.where(count > 0, count, 1)
    y = statistics[:, 1:-1] / safe(weight) - (sums[:, 1:-1] / safe(sums[:, :1]))[node]
    return weight * jnp.concatenate([jnp.ones_like(weight), y, jnp.square(y).sum(1, keepdims=True)], axis=1)


def binned_cart(
    batch: Any, edges: Float[Array, "p bins"], task: Task, depth: int, codes: Integer[Array, "n p"] | None = None
) -> tuple[Float[Array, "nodes p"], Float[Array, " nodes"]]:
    """Returns weights and biases of the splits of a tree that is grown level by level."""
    # A node without a gain does not split. `batch` is a `Batch`, and `edges` is as for `best_thresholds`. `codes` are
    # the bins of the values; None: computed here.
    x, edges, size = batch.x, jnp.asarray(edges), topology.num_nodes(depth)
    statistics, impurity = statistics_of(task, batch.y, ones_or(batch.weight, x))
    codes = codes_of(x, edges) if codes is None else codes.T

    def grow(nodes: int, level: Array | int, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Adds the splits of a level of at most ``nodes`` nodes."""
        node, weights, bias = carry
        best = best_thresholds(x, edges, statistics, node, nodes, impurity, codes=codes)
        divides = best.gain > 0
        directions = jnp.where(divides[:, None], jax.nn.one_hot(best.feature, x.shape[1], dtype=x.dtype), 0)
        # Splits of the next levels replace the splits beyond the level.
        place = 2**level - 1 + jnp.arange(nodes)
        weights = weights.at[place].set(directions, mode="drop")
        bias = bias.at[place].set(jnp.where(divides, -best.threshold, -1).astype(x.dtype), mode="drop")
        feature = jnp.take_along_axis(x, best.feature[node][:, None], axis=1)[:, 0]
        return 2 * node + (divides[node] & (feature > best.threshold[node])).astype(node.dtype), weights, bias

    # The first levels share one program, because each takes most of a second to compile.
    shared = min(depth, _SMALLEST.bit_length())
    carry: Any = jnp.zeros(len(x), jnp.int32), jnp.zeros((size, x.shape[1]), x.dtype), jnp.zeros(size, x.dtype)
    carry = jax.lax.fori_loop(0, shared, partial(grow, 2 ** (shared - 1)), carry)
    for level in range(shared, depth):
        carry = grow(2**level, level, carry)
    return carry[1], carry[2]


def columns_by_covariance(batch: Any, count: int, key: Array) -> Int[Array, " count"]:
    """Returns the columns whose values and squares vary most with the targets, in ascending order."""
    # Half of the columns, drawn at random, comes before the other half, so that trees of a sum differ. A column is
    # scored by its squared correlations with the targets, plus the squared correlations of its squared distance from
    # its mean.
    step = max(1, len(batch.x) // _ROWS_OF_COVARIANCE)
    share = ones_or(batch.weight, batch.x)[::step]
    share = share / share.sum()
    mean = lambda a: jnp.tensordot(share, a, 1, precision="highest")
    x, y = batch.x[::step], batch.y.reshape(len(batch.y), -1)[::step]
    x = x - mean(x)
    y = share[:, None] * (y - mean(y))

    def squared_correlations(values: Array) -> Array:
        variance = mean(jnp.square(values))
        covariance = jnp.matmul(values.T, y, precision="highest")
        return jnp.square(covariance).sum(1) / jnp.where(variance > 0, variance, jnp.inf)

    squares, varies = jnp.square(x), x.any(0)
    score = squared_correlations(x) + squared_correlations(squares - mean(squares))
    first_half = jax.random.bernoulli(key, shape=score.shape)
    score = jnp.where(varies, jnp.where(first_half, score, score - 2 * score.max()), -jnp.inf)
    return jnp.sort(jax.lax.top_k(score, count)[1])


def codes_of(x: Float[Array, "n p"], edges: Float[Array, "p bins"]) -> Int[Array, "p n"]:
    """Returns the bin of each value: the number of edges below it."""
    method = "compare_all" if edges.shape[1] < _FEW_BINS else "scan_unrolled"
    return jax.vmap(lambda edge, column: jnp.searchsorted(edge, column, method=method))(edges, x.T)


def _best(codes: Array, edges: Array, statistics: Array, node: Array, nodes: int, impurity: Impurity) -> Thresholds:
    """Implements :func:`best_thresholds` for open nodes."""
    (p, bins), q = edges.shape, statistics.shape[1]
    # Number of features whose sums and statistics are in memory together.
    width = max(1, min(p, _CELLS // (q * max((bins + 1) * nodes, len(statistics)))))
    codes = jnp.pad(codes, ((0, -p % width), (0, 0)))
    edges = jnp.pad(edges, ((0, -p % width), (0, 0)), constant_values=jnp.inf)
    cells = (bins + 1) * width * nodes

    def search(block: tuple[Array, Array]) -> Thresholds:
        """Returns the best split of each feature and node, ``(width, nodes)``."""
        codes, edges = block
        cell = (codes.astype(jnp.int32) * width + jnp.arange(width)[:, None]) * nodes + node
        cell = jnp.where(node < nodes, cell, cells)  # closed nodes are out of range, and dropped
        values = jnp.broadcast_to(statistics, (width, *statistics.shape))
        sums = jax.ops.segment_sum(values.reshape(-1, q), cell.ravel(), cells).reshape(bins + 1, width, nodes, q)
        total = sums.sum(0)
        parent = impurity(total)

        def add_bin(number: Array, carry: tuple[Array, Thresholds]) -> tuple[Array, Thresholds]:
            (left, best), edge = carry, edges[:, number, None]
            left = left + sums[number]
            gain = jnp.where(jnp.isfinite(edge), parent - impurity(left) - impurity(total - left), -jnp.inf)
            better = gain > best.gain
            threshold = jnp.where(better, edge, best.threshold)
            return left, best._replace(threshold=threshold, gain=jnp.where(better, gain, best.gain))

        zeros = jnp.zeros((width, nodes), statistics.dtype)
        none = Thresholds(jnp.zeros((width, nodes), jnp.int32), zeros.astype(edges.dtype), zeros)
        # Features of few values have few bins.
        used = jnp.isfinite(edges).any(0).sum() if bins >= _FEW_BINS else bins
        return jax.lax.fori_loop(0, used, add_bin, (jnp.zeros_like(total), none))[1]

    blocks = codes.reshape(-1, width, codes.shape[1]), edges.reshape(-1, width, bins)
    best = jax.tree.map(lambda a: a.reshape(-1, nodes), jax.lax.map(search, blocks))
    feature = best.gain.argmax(0)
    chosen = jax.tree.map(lambda a: jnp.take_along_axis(a, feature[None], 0)[0], best)
    return chosen._replace(feature=feature.astype(jnp.int32))
