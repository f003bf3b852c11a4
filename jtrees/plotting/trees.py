"""A tree as boxes of text."""

from collections.abc import Sequence
import re
import textwrap
from typing import Any

from jax.typing import ArrayLike
import numpy as np

from jtrees.leaves.linear import largest_terms, smaller_terms
from jtrees.plotting._common import features_of, new_axes, tree_of

_POINTS = 10  # font size
_WIDTH = 18  # width of the text of a leaf in characters


def plot_tree(
    model: Any,
    ax: Any = None,
    *,
    feature_names: Sequence[str] | None = None,
    class_names: Sequence[str] | None = None,
    x: Any = None,
    y: ArrayLike | None = None,
    max_terms: int | None = 2,
    max_depth: int = 4,
    digits: int = 2,
) -> Any:
    """Plots the splits of a tree to a depth: the condition at each node by its largest terms, right if it holds.

    Args:
      model: a :class:`jtrees.ObliqueTree`, or a model of raw tables that is one; nodes that do not split are omitted.
      ax: matplotlib axes, by default new ones, sized to fit the text.
      feature_names: names of the columns of arrays, by default ``x0``, ``x1``, ...
      class_names: names of the K classes, in classification, or of the actions of a policy; each leaf then lists the
        most probable first, or names the one action that it plays.
      x: samples, ``(n, p)`` or a raw table, such as the training data, to count at each leaf.
      y: their classes 0..K-1, ``(n,)``, in classification, to count by class at each leaf; of a policy the rewards of
        the actions, ``(n, K)``, of which each leaf has the means.
      max_terms: maximum number of terms of a condition: those of the largest |weight| times standard deviation in x
        (without x, |weight|), and the number of others. None: all. A leaf has up to two lines more, and no bounds.
      max_depth: maximum number of levels; splits below them are an ellipsis.
      digits: significant digits.

    Returns:
      The axes.

    Raises:
      ImportError: without matplotlib.
      ValueError: for another number of names than columns or classes, for x or y that do not fit the tree, and for a
        batch of trees.
    """
    tree, x, names = features_of(model, x, feature_names, class_names)
    splits = tree_of(tree).splits
    deviations, rows = tree.measured(x, y, class_names, max_terms)
    tree = tree.with_short_origin(deviations, digits)
    new = ax is None
    ax = new_axes(ax)
    weights, bias, counted = np.asarray(tree.weights), np.asarray(tree.bias), tree.counted(names)
    next_x = iter(range(2 ** (max_depth + 1)))

    def draw(node: int, level: int) -> tuple[float, float]:
        while node < len(bias) and not splits[node]:
            node = 2 * node + 1 + int(bias[node] > 0)
        if node >= len(bias) or level == max_depth:
            position = (float(next(next_x)), float(-level))
            _box(ax, position, leaf_text(node - len(bias)) if node >= len(bias) else "...", "#e8f1e4")
            return position
        left, right = draw(2 * node + 1, level + 1), draw(2 * node + 2, level + 1)
        position = ((left[0] + right[0]) / 2, float(-level))
        for child, label in ((left, "no"), (right, "yes")):
            ax.plot(*zip(position, child, strict=True), color="0.6", lw=1, zorder=0)
            middle = np.add(position, child) / 2
            ax.text(*middle, label, fontsize=_POINTS, color="0.4", ha="center")
        terms, left_out = largest_terms(weights[node], max_terms, deviations)
        parts = [f"{weights[node][i]:+.{digits}g} {counted[i]}" for i in terms]
        parts += [smaller_terms(left_out)] if left_out else []
        _box(ax, position, "\n".join([*parts, f"> {0 - bias[node]:.{digits}g}"]), "#e4ecf5")
        return position

    def leaf_text(leaf: int) -> str:
        shown = {"max_terms": max_terms, "deviations": deviations, "class_names": class_names}
        answer = tree.describe_leaf(leaf, names, digits, short=True, **shown)
        return "\n".join(_filled(text, max_terms) for text in [answer, *rows[leaf]])

    draw(0, 0)
    # Matplotlib's limits ignore the size of the boxes.
    ax.margins(x=0.08)
    ax.set_ylim(min(text.get_position()[1] for text in ax.texts) - 0.5, 0.5)
    ax.axis("off")
    if new:
        ax.figure.set_size_inches(inches(ax))
    return ax


def inches(ax: Any) -> tuple[float, float]:
    """Returns a width and height in inches for which the boxes of :func:`plot_tree` do not overlap."""
    boxes = [text for text in ax.texts if text.get_bbox_patch()]
    ends = 1 + max(text.get_position()[0] for text in boxes)
    levels = 1 - min(text.get_position()[1] for text in boxes)
    lines = max(len(text.get_text().splitlines()) for text in boxes)
    return max(6, 2 * ends), max(3, levels * (0.6 + 0.18 * lines))


def _filled(text: str, max_terms: int | None) -> str:
    """Returns the wrapped lines of a box, without breaks after signs or numbers."""
    lines = None if max_terms is None else max_terms + 2
    text = re.sub(r"(?<=[-+:\d]) (?![-+])", "\xa0", text)
    return textwrap.fill(text, _WIDTH, max_lines=lines, placeholder=" …").replace("\xa0", " ")


def _box(ax: Any, at: tuple[float, float], text: str, colour: str) -> None:
    frame = {"boxstyle": "round", "fc": colour, "ec": "0.5"}
    ax.text(*at, text, ha="center", va="center", fontsize=_POINTS, bbox=frame)
