"""Drawings of trees (needs ``pip install "jtrees[plots]"``)."""

from collections.abc import Sequence
import textwrap
from typing import Any

import numpy as np

from jtrees.leaves import Linear
from jtrees.tree import ObliqueTree

_POINTS = 10  # size of all text
_WIDTH, _LINES = 15, 4  # of the text of a leaf, in characters and in lines


def plot_tree(
    tree: ObliqueTree,
    ax: Any = None,
    *,
    feature_names: Sequence[str] | None = None,
    max_depth: int = 4,
    digits: int = 2,
) -> Any:
    """Draws the splits of a tree down to a depth: at each node the two largest weights, right where it holds.

    Args:
      tree: the tree; nodes that do not split are left out. Weights are compared as they stand: scale the features
        if they have different units.
      ax: matplotlib axes, by default new ones, as large as the text needs.
      feature_names: names of the columns, by default ``x0``, ``x1``, ...
      max_depth: splits below this many drawn levels are shown as an ellipsis.
      digits: significant digits.

    Returns:
      The axes.

    Raises:
      ImportError: without matplotlib.
      ValueError: for another number of names than columns, and for a batch of trees.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError('drawing a tree needs matplotlib: pip install "jtrees[plots]"') from error
    splits, names = tree.splits, tree.names(feature_names)
    if ax is None:
        width, height = 1.8 * min(tree.num_leaves, 2**max_depth), 1.2 * min(tree.depth + 1, max_depth + 1)
        ax = plt.subplots(figsize=(max(6, width), max(3, height)))[1]
    weights, bias, counted = np.asarray(tree.weights), np.asarray(tree.bias), tree.counted(names)
    next_x = iter(range(2 ** (max_depth + 1)))

    def draw(node: int, level: int) -> tuple[float, float]:
        while node < len(bias) and not splits[node]:
            node = 2 * node + 1 + int(bias[node] > 0)
        if node >= len(bias) or level == max_depth:
            here = (float(next(next_x)), float(-level))
            text = _leaf_text(tree, node - len(bias), names, digits) if node >= len(bias) else "..."
            _box(ax, here, textwrap.fill(text, _WIDTH, max_lines=_LINES, placeholder=" …"), "#e8f1e4")
            return here
        left, right = draw(2 * node + 1, level + 1), draw(2 * node + 2, level + 1)
        here = ((left[0] + right[0]) / 2, float(-level))
        for child, label in ((left, "no"), (right, "yes")):
            ax.plot(*zip(here, child, strict=True), color="0.6", lw=1, zorder=0)
            middle = np.add(here, child) / 2
            ax.text(*middle, label, fontsize=_POINTS, color="0.4", ha="center")
        heaviest = np.argsort(-np.abs(weights[node]))[:2]
        more = "\n+ ..." if np.count_nonzero(weights[node]) > 2 else ""
        parts = [f"{weights[node][i]:+.{digits}g} {counted[i]}" for i in sorted(heaviest) if weights[node][i] != 0]
        _box(ax, here, "\n".join(parts) + f"{more}\n> {0 - bias[node]:.{digits}g}", "#e4ecf5")
        return here

    draw(0, 0)
    ax.margins(0.08, 0.14)  # the boxes are larger than the points that matplotlib sees
    ax.axis("off")
    return ax


def _leaf_text(tree: ObliqueTree, leaf: int, names: list[str], digits: int) -> str:
    """What a leaf answers, the heaviest features first: what is cut off then matters least."""
    if isinstance(tree.leaves, Linear):
        slopes, origin = np.asarray(tree.leaves.coefficients), tree.origin
        order = np.argsort(-np.abs(slopes[leaf]).reshape(len(names), -1).max(1), kind="stable")
        origin = None if origin is None else origin.replace(x=np.asarray(origin.x)[order])
        tree = tree.replace(leaves=tree.leaves.replace(coefficients=slopes[:, order]), origin=origin)
        names = [names[i] for i in order]
    return tree.describe_leaf(leaf, names, digits)


def _box(ax: Any, at: tuple[float, float], text: str, colour: str) -> None:
    frame = {"boxstyle": "round", "fc": colour, "ec": "0.5"}
    ax.text(*at, text, ha="center", va="center", fontsize=_POINTS, bbox=frame)
