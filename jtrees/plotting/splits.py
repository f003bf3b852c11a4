"""Plots the splits of a tree as bars."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jtrees import validation
from jtrees.plotting._common import features_of, new_axes, wrapped
from jtrees.tables.model import tree_of
from jtrees.text import largest_terms

_HEIGHT, _LINE = 3, 0.18  # least height of a chart, and height of a line of a label, in inches
_ACROSS = 16  # maximum width of all charts in inches
_LEFT, _RIGHT = "#c0504d", "#4472a8"


def plot_splits(
    model: Any,
    x: Any,
    *,
    feature_names: Sequence[str] | None = None,
    class_names: Sequence[str] | None = None,
    max_terms: int = 6,
    max_splits: int = 8,
) -> np.ndarray:
    """Plots the splits of a tree as bars: the terms with the largest variation, and the shares of rows.

    A bar is a weight times the standard deviation of its feature, divided by the sum of the absolute values of all such
    products. A bar to the right means that large values of the feature send a sample right.

    Args:
      model: a :class:`jtrees.ObliqueTree`, or a model of raw tables that is one.
      x: samples, such as the training data, from which deviations and shares are computed.
      feature_names: names of the columns of arrays, by default ``x0``, ``x1``, ...
      class_names: names of the classes or actions, used in features that are target means.
      max_terms: maximum number of bars of a split.
      max_splits: maximum number of splits, breadth first.

    Returns:
      The axes, one for each split, ``(splits,)``.

    Raises:
      ImportError: without matplotlib.
      ValueError: for a model other than a single tree, or for rows that do not fit it.
    """
    validation.check_count("max_terms", max_terms)
    validation.check_count("max_splits", max_splits)
    tree, features, names = features_of(model, x, feature_names, class_names)
    path = np.asarray(tree_of(tree).decision_path(features))
    weights, deviations = np.asarray(tree.weights, np.float64), features.std(0)
    nodes = np.flatnonzero(tree.splits)[:max_splits]
    if not len(nodes):
        raise ValueError("model must have a split to plot, got a tree of a single leaf")
    labels = list(map(wrapped, names))
    shown = [largest_terms(weights[node], max_terms, deviations, largest_first=True) for node in nodes]
    lines = [[labels[i].split("\n") for i in terms] for terms, _ in shown]
    longest = max(len(line) for labels in lines for label in labels for line in label)
    width = max(4, 2.5 + 0.085 * longest)  # inches, including the names
    height = max(_HEIGHT, 1.2 + _LINE * max(sum(map(len, labels)) for labels in lines))
    across = min(len(nodes), max(1, int(_ACROSS / width)))
    down = -(-len(nodes) // across)
    axes = new_axes(
        None, nrows=down, ncols=across, figsize=(width * across, height * down), squeeze=False, layout="tight"
    )
    for extra in axes.ravel()[len(nodes) :]:
        extra.remove()
    for node, (terms, left_out), ax in zip(nodes.tolist(), shown, axes.ravel(), strict=False):
        reached = (path == node).any(0)
        right = (path == 2 * node + 2).any(0)
        size = weights[node] * deviations
        share = size[terms] / (np.abs(size).sum() or 1)
        ax.barh(
            range(len(terms)), share, tick_label=[labels[i] for i in terms], color=np.where(share > 0, _RIGHT, _LEFT)
        )
        ax.axvline(0, color="0.3", lw=0.8)
        ax.invert_yaxis()
        rest = f", {left_out} smaller" if left_out else ""
        ax.set_title(f"node {node}: {reached.mean():.0%} of rows, {right.mean():.0%} go right", fontsize=10)
        ax.set_xlabel(f"left      share of the score{rest}      right", fontsize=9)
    return axes.ravel()[: len(nodes)]
