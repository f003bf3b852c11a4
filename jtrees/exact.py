"""Leaves decided in double precision, in which products of float32 numbers are exact.

In single precision, the sign of a score near zero can be wrong by rounding. The rounding error depends on the order of
additions, and so on the device and the compiler. In double precision the error is a billion times smaller, so a sample
reaches the same leaf wherever the tree is evaluated. Predictions for NumPy arrays are first computed in single
precision. This module recomputes the few samples whose leaf may depend on rounding
(:func:`jtrees.ops.hard_and_uncertain`).
"""

from typing import Any

import numpy as np

from jtrees import topology

_GATHERED = 2**18  # number of weights gathered at once


def unit_splits(weights: Any, bias: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the float32 weights ``(*trees, nodes, p)`` and biases of the same splits, times powers of two."""
    # `|bias|` and the norm of the weights are then below 2, and at least one of the two is at least 1/2. The function
    # runs on the host, which needs no compilation.
    weights, bias = np.asarray(weights), np.asarray(bias)
    with np.errstate(invalid="ignore"):  # splits that are not finite remain so
        largest = np.maximum(np.abs(weights).max(-1), np.abs(bias))
        exponent = -np.frexp(largest)[1]
        scaled = np.ldexp(weights, exponent[..., None])  # avoids overflow and needless underflow of the squares
        norm = np.sqrt(np.square(scaled).sum(-1))
        shift = np.where(norm > 1, -np.frexp(norm)[1] + 1, 0)
        # A split of zeros sends every sample left. A score of 0 would be uncertain, so its bias becomes -1.
        bias = np.where(largest > 0, np.ldexp(bias, exponent + shift), np.float32(-1)).astype(bias.dtype)
        return np.ldexp(scaled, shift[..., None]), bias


def balanced_splits(weights: Any, bias: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns :func:`unit_splits` of features times powers of two, and these powers, ``(p,)``; 0 for unused features.

    The weights of each feature then have about the sizes of the biases of their splits, by the median of the ratios.
    Features in small units have large weights, so the features of typical samples have sizes about 1. Otherwise the
    feature in the largest unit would determine the bound of rounding errors, and every sample would be uncertain.
    """
    weights, bias = unit_splits(weights, bias)
    columns, biases = weights.reshape(-1, weights.shape[-1]), bias.ravel()
    exponents, bias_exponents = np.frexp(columns)[1], np.frexp(biases)[1]
    powers, is_used = np.zeros(columns.shape[1], int), (columns != 0).any(0)
    for j in np.flatnonzero(is_used):
        has_both = (columns[:, j] != 0) & (biases != 0)
        powers[j] = np.median((exponents[:, j] - bias_exponents)[has_both]) if has_both.any() else 0
    largest = 100  # in single precision, larger powers could overflow
    powers = np.clip(powers, -largest, largest)
    with np.errstate(over="ignore", under="ignore"):
        unit = np.where(is_used, np.ldexp(np.float32(1), powers), np.float32(0))
        return *unit_splits(np.ldexp(weights, -powers), bias), unit


def scores(weights: np.ndarray, bias: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Returns the score of one split per sample, in double precision."""
    # The sum has four parts, which a processor can compute in parallel. Exported programs add in the same order.
    # Weights are (*trees, n, p) or (p,) and biases (*trees, n) or (), in float32 like x.
    sums = np.zeros((4, *np.shape(bias)[:-1], len(x)))
    sums[0] = bias
    for j, (w, column) in enumerate(zip(np.moveaxis(weights, -1, 0), x.T, strict=True)):
        sums[j % 4] += np.multiply(w, column, dtype=np.float64)
    return (sums[0] + sums[1]) + (sums[2] + sums[3])


def row_scores(weights: np.ndarray, bias: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Returns the scores of several splits for one sample, ``(nodes,)``, with the bits of :func:`scores`."""
    return scores(weights, bias, np.broadcast_to(row, weights.shape))


def row_leaf(scores: np.ndarray) -> int:
    """Returns the leaf of a sample from its scores at all splits, ``(nodes,)``."""
    node, right = 0, (scores > 0).tolist()
    while node < len(right):
        node = 2 * node + 1 + right[node]
    return node - len(right)


def leaf_index(weights: Any, bias: Any, x: np.ndarray) -> np.ndarray:
    """Returns the leaves by scores in double precision, int32, ``(*trees, n)``. The trees have equal depth."""
    # Weights are (*trees, nodes, p), and weights, biases and samples are in float32.
    weights, bias = np.asarray(weights), np.asarray(bias)
    *trees, nodes = bias.shape
    leaf = np.empty((*trees, len(x)), np.int32)
    size = max(1, _GATHERED // weights[..., 0, :].size)  # samples at once: each gathers a split of each tree
    for start in range(0, len(x), size):
        rows = x[start : start + size]
        node = np.zeros((*trees, len(rows)), np.int32)
        for _ in range(topology.depth_of(nodes)):
            splits = np.take_along_axis(weights, node[..., None], -2), np.take_along_axis(bias, node, -1)
            node = 2 * node + 1 + (scores(*splits, rows) > 0)
        leaf[..., start : start + size] = node - nodes
    return leaf


def decide(weights: Any, bias: Any, x: np.ndarray, leaf: np.ndarray) -> tuple[np.ndarray, bool]:
    """Returns the leaves in which double precision replaces the negative leaves, and whether their samples are finite.

    ``leaf`` is ``(n,)`` or ``(n, trees)``. A negative number marks a leaf that is not certain.
    """
    columns = leaf.reshape(len(leaf), -1)
    uncertain = np.flatnonzero((columns < 0).any(1))
    if not len(uncertain):
        return leaf, True
    if not np.isfinite(x[uncertain]).all():
        return np.zeros_like(leaf), False
    columns, bias = columns.copy(), np.asarray(bias).reshape(columns.shape[1], -1)
    weights = np.asarray(weights).reshape(*bias.shape, -1)
    is_uncertain = columns < 0  # few of many trees are uncertain about a sample
    for tree in np.flatnonzero(is_uncertain.any(0)):
        samples = np.flatnonzero(is_uncertain[:, tree])
        columns[samples, tree] = leaf_index(weights[tree], bias[tree], x[samples])
    return columns.reshape(leaf.shape), True
