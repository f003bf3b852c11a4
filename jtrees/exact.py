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


def unit_splits(tree: Any) -> Any:
    """Returns a tree, or many trees, with the same splits, where each split is multiplied by a power of two.

    ``|bias|`` and the norm of the weights are then below 2, and at least one of the two is at least 1/2. The function
    runs on the host, which needs no compilation.
    """
    weights, bias = np.asarray(tree.weights), np.asarray(tree.bias)
    with np.errstate(invalid="ignore"):  # splits that are not finite remain so
        largest = np.maximum(np.abs(weights).max(-1), np.abs(bias))
        exponent = -np.frexp(largest)[1]
        one = np.ldexp(weights, exponent[..., None])  # avoids overflow and needless underflow of the squares
        norm = np.sqrt(np.square(one).sum(-1))
        more = np.where(norm > 1, -np.frexp(norm)[1] + 1, 0)
        # A split of zeros sends every sample left. A score of 0 would be uncertain, so its bias becomes -1.
        bias = np.where(largest > 0, np.ldexp(bias, exponent + more), np.float32(-1)).astype(bias.dtype)
        return tree.replace(weights=np.ldexp(one, more[..., None]), bias=bias)


def scores(weights: np.ndarray, bias: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Returns the score of one split per sample, in double precision.

    The sum has four parts, which a processor can compute in parallel. Exported programs add in the same order.

    Args:
      weights: weights of each sample's split, ``(*trees, n, p)`` or ``(p,)``, in float32.
      bias: bias of each sample's split, ``(*trees, n)`` or ``()``, in float32.
      x: samples in float32, ``(n, p)``.
    """
    sums = np.zeros((4, *np.shape(bias)[:-1], len(x)))
    sums[0] = bias
    for j, (w, column) in enumerate(zip(np.moveaxis(weights, -1, 0), x.T, strict=True)):
        sums[j % 4] += np.multiply(w, column, dtype=np.float64)
    return (sums[0] + sums[1]) + (sums[2] + sums[3])


def row_scores(weights: np.ndarray, bias: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Returns the scores of several splits for one sample, ``(nodes,)``.

    The result is bitwise equal to :func:`scores`, in fewer calls.

    Args:
      weights: weights of the splits, ``(nodes, p)``, in float32.
      bias: biases of the splits, ``(nodes,)``, in float32.
      row: the sample in float32, ``(p,)``.
    """
    terms = np.multiply(weights, row, dtype=np.float64)
    sums = np.zeros((len(bias), 4))
    sums[:, 0] = bias
    for start in range(0, len(row), 4):
        part = terms[:, start : start + 4]
        sums[:, : part.shape[1]] += part
    return (sums[:, 0] + sums[:, 1]) + (sums[:, 2] + sums[:, 3])


def row_leaf(scores: np.ndarray) -> int:
    """Returns the leaf of a sample from its scores at all splits, ``(nodes,)``."""
    node, right = 0, (scores > 0).tolist()
    while node < len(right):
        node = 2 * node + 1 + right[node]
    return node - len(right)


def leaf_index(weights: Any, bias: Any, x: np.ndarray) -> np.ndarray:
    """Returns the leaves by scores in double precision, for one tree or many trees of one depth. Runs on the host.

    Args:
      weights: split weights in float32, ``(*trees, nodes, p)``.
      bias: split biases in float32, ``(*trees, nodes)``.
      x: samples in float32, ``(n, p)``.

    Returns:
      Leaf numbers from 0, int32, ``(*trees, n)``.
    """
    weights, bias = np.asarray(weights), np.asarray(bias)
    *trees, nodes = bias.shape
    node = np.zeros((*trees, len(x)), np.int32)
    for _ in range(topology.depth_of(nodes)):
        of_node = np.take_along_axis(weights, node[..., None], -2), np.take_along_axis(bias, node, -1)
        node = 2 * node + 1 + (scores(*of_node, x) > 0)
    return (node - nodes).astype(np.int32)
