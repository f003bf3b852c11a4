"""Draws a tree as boxes of text."""

from collections.abc import Iterator, Sequence
from functools import partial
import re
import textwrap
from typing import Any, NamedTuple

from jax.typing import ArrayLike
import numpy as np

from jtrees import text
from jtrees.plotting._common import features_of, literal, new_axes
from jtrees.tables.model import tree_of

_POINTS = 10  # font size
_WIDTH = 20  # width of the text of a leaf in characters
_LONGEST = 24  # maximum number of characters in a line of a sum
_CHARACTER, _LINE = 0.08, 0.19  # inches: upper bounds of the mean width of a character, and of the height of a line
_PAD, _BETWEEN, _GAP = 0.25, 0.15, 0.4  # inches within a box, between rows, and between columns


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
    """Plots the splits of a tree down to a depth. Each node shows the largest terms of its condition.

    The root is at the top left. The branch where the condition holds, ``>``, goes straight on. The opposite branch,
    ``≤``, goes down. The order of the leaves from top to bottom is the order of the rules. The numbers of the leaves
    are the numbers in the rules. If all splits divide the same score, only the first box shows its terms.

    Args:
      model: a :class:`jtrees.ObliqueTree`, or a model of raw tables that is one. Nodes that do not split are omitted.
      ax: matplotlib axes, by default new axes, sized to fit the text.
      feature_names: names of the columns of arrays, by default ``x0``, ``x1``, ...
      class_names: names of the K classes in classification, or of the actions of a policy. Each leaf then lists the
        most probable classes, or names the action that it plays.
      x: samples, ``(n, p)`` or a raw table, such as the training data. Each leaf shows its number of samples. A branch
        that no sample reaches is omitted.
      y: classes of the samples, 0..K-1, ``(n,)``, in classification. Each leaf shows the count of each class. For a
        policy, rewards of the actions, ``(n, K)``. Each leaf shows the mean rewards.
      max_terms: maximum number of terms of a condition. The terms with the largest |weight| times standard deviation in
        x are shown, and the number of omitted terms. If x is None, the terms with the largest |weight| are shown. None
        shows all terms. A leaf has up to two more lines, and shows no bounds.
      max_depth: maximum number of levels. An ellipsis replaces deeper splits.
      digits: number of significant digits. Thresholds that differ have more digits if the difference is not visible
        otherwise.

    Returns:
      The axes.

    Raises:
      ImportError: without matplotlib.
      ValueError: for a wrong number of column or class names, for x or y that do not fit the tree, or for a batch of
        trees.
    """
    tree, x, names = features_of(model, x, feature_names, class_names)
    splits = tree_of(tree).splits
    deviations, rows = text.measured(tree, x, y, class_names, max_terms)
    reached = np.arange(2 * len(splits) + 1) if x is None else np.unique(tree.decision_path(x))
    tree = text.with_short_origin(tree, deviations, digits)
    score = text.common_score(tree, names, digits)
    tree = tree if score is None else score.tree
    new = ax is None
    ax = new_axes(ax)
    weights, bias, counted = np.asarray(tree.weights), np.asarray(tree.bias), text.relative_names(tree, names)
    thresholds = text.threshold_texts(tree, digits)
    terms = partial(_terms_text, names=counted, digits=digits, max_terms=max_terms, deviations=deviations)

    def split_text(node: int, level: int) -> str:
        if score is None:
            return f"{terms(weights[node])}\n> {thresholds[node]}"
        definition = f"{score.name} =\n{terms(score.weights)}\n" if level == 0 else ""
        return f"{definition}{score.name} {'<' if score.opposite[node] else '>'} {thresholds[node]}"

    def leaf_text(leaf: int) -> str:
        shown = {"max_terms": max_terms, "deviations": deviations, "class_names": class_names}
        answer = text.leaf_text(tree, leaf, names, digits, short=True, **shown)
        answer = _filled(answer, max_terms) if tree.leaves.is_constant else _terms(answer, max_terms)
        return "\n".join([f"leaf {leaf}:", answer, *(_filled(text, max_terms) for text in rows[leaf])])

    def box_of(node: int, level: int, row: int) -> _Box:
        """Returns the box of a node and the boxes below it. ``row`` is the number of its first row."""
        node = _next_box(node, bias, splits, reached)
        if node >= len(bias):
            return _Box(leaf_text(node - len(bias)), level, row, row + 1)
        if level == max_depth:
            return _Box("...", level, row, row + 1)
        yes = box_of(2 * node + 2, level + 1, row)
        no = box_of(2 * node + 1, level + 1, yes.end)
        sides = ("<", "≥") if score is not None and score.opposite[node] else (">", "≤")
        return _Box(split_text(node, level), level, row, no.end, (yes, no), sides)

    _draw(ax, box_of(0, 0, 0))
    if new:
        ax.figure.set_size_inches(inches(ax))
        ax.set_position((0, 0, 1, 1))
    return ax


def _next_box(node: int, bias: np.ndarray, splits: np.ndarray, reached: np.ndarray) -> int:
    """Returns the first node from ``node`` down that is a leaf, or that has two reached branches."""
    while node < len(bias):
        children = [child for child in (2 * node + 2, 2 * node + 1) if child in reached]
        if splits[node] and len(children) != 1:
            break
        node = children[0] if splits[node] else 2 * node + 1 + int(bias[node] > 0)
    return node


class _Box(NamedTuple):
    """A box of the drawing.

    Attributes:
      text: text of the box.
      level: column of the box.
      row: row of the box, which is the row of its first leaf.
      end: row below the last leaf of the box.
      below: the boxes where the condition holds and where it does not hold. Empty for a leaf.
      sides: the labels of the two branches.
    """

    text: str
    level: int
    row: int
    end: int
    below: tuple["_Box", ...] = ()
    sides: tuple[str, str] = (">", "≤")

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches."""
        lines = self.text.splitlines()
        return _CHARACTER * max(map(len, lines)) + _PAD, _LINE * len(lines) + _PAD

    def all(self) -> Iterator["_Box"]:
        """Yields the boxes below, and then the box itself."""
        for box in self.below:
            yield from box.all()
        yield self


def _draw(ax: Any, root: _Box) -> None:
    """Draws boxes in a grid. The largest box of a column or row determines its width or height."""
    from matplotlib.patheffects import withStroke  # an optional package

    boxes = list(root.all())
    width, height = np.zeros(1 + max(box.level for box in boxes)), np.zeros(root.end)
    for box in boxes:
        width[box.level] = max(width[box.level], box.size[0])
        height[box.row] = max(height[box.row], box.size[1])
    left = np.cumsum(width + _GAP) - width - _GAP
    top = np.cumsum(height + _BETWEEN) - height - _BETWEEN
    y = -(top + height / 2)
    halo = withStroke(linewidth=6, foreground="white")  # hides a line behind a text
    for box in boxes:
        centre = left[box.level] + box.size[0] / 2, y[box.row]
        for child, label in zip(box.below, box.sides, strict=False):
            ends = left[box.level + 1] + _PAD, y[child.row]  # behind the box
            turn = left[box.level] + _PAD, y[child.row]
            line = np.array([centre, ends] if child.row == box.row else [(turn[0], centre[1]), turn, ends])
            ax.plot(*line.T, color="0.6", lw=1, zorder=0)
            label_place = left[box.level + 1] - _GAP / 2, ends[1]
            label = ax.text(*label_place, label, fontsize=_POINTS, color="0.3", ha="center", va="center")
            label.set_path_effects([halo])
        frame = {"boxstyle": "round", "fc": "#e4ecf5" if box.below else "#e8f1e4", "ec": "0.5"}
        ax.text(*centre, literal(box.text), ha="center", va="center", fontsize=_POINTS, bbox=frame)
    ax.set_xlim(-_BETWEEN, left[-1] + width[-1] + _BETWEEN)
    ax.set_ylim(-(top[-1] + height[-1]) - _BETWEEN, _BETWEEN)
    ax.axis("off")


def inches(ax: Any) -> tuple[float, float]:
    """Returns a width and a height in inches at which the boxes of :func:`plot_tree` do not overlap."""
    return float(np.ptp(ax.get_xlim())), float(np.ptp(ax.get_ylim()))


def _cut(line: str) -> str:
    """Returns a line of a condition. If the line is too long, the middle of the name is omitted."""
    if len(line) <= _LONGEST:
        return line
    return f"{line[: _LONGEST * 2 // 3]}…{line[1 - _LONGEST // 3 :]}"


def _terms_text(
    weights: np.ndarray, names: list[str], digits: int, max_terms: int | None, deviations: np.ndarray | None
) -> str:
    """Returns the largest terms of a sum, one term per line, and the number of smaller terms."""
    terms, left_out = text.largest_terms(weights, max_terms, deviations)
    numbers = [text.number_text(abs(float(weights[i])), digits) for i in terms]
    lines = [_cut(f"{'-' if weights[i] < 0 else '+'}{n} {names[i]}") for i, n in zip(terms, numbers, strict=True)]
    return "\n".join([*lines, *([text.smaller_terms(left_out)] if left_out else [])])


def _terms(text: str, max_terms: int | None) -> str:
    """Returns the first terms of a sum, one term per line."""
    lines = [_cut(line) for line in re.split(r"(?<=;) | (?=[-+] )(?![^(\[]*[)\]])", text)]
    if max_terms is None or len(lines) <= max_terms + 2:
        return "\n".join(lines)
    return "\n".join(lines[: max_terms + 2]) + " …"


def _filled(text: str, max_terms: int | None) -> str:
    """Returns the wrapped lines of a box, without breaks after signs or numbers, or within an item that fits a line."""
    lines = None if max_terms is None else max_terms + 2
    spaces = lambda item: r" " if len(item) <= _WIDTH else r"(?<=[-+\d]) (?![-+])"
    text = " ".join(re.sub(spaces(item), "\xa0", item) for item in re.split(r"(?<=[,;]) ", text))
    return textwrap.fill(text, _WIDTH, max_lines=lines, placeholder=" …").replace("\xa0", " ")
