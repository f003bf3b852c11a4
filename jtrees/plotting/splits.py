"""Plots the splits of a tree as bars."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jtrees import validation
from jtrees.plotting._common import features_of, literal, new_axes
from jtrees.tables.model import tree_of
from jtrees.text import largest_terms

_ROWS, _ACROSS = 3, 16  # height of a split's chart, and maximum width of all charts, in inches
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
    longest = max(len(names[i]) for i in np.flatnonzero(weights[nodes].any(0)))
    width = max(4, 2.5 + 0.085 * longest)  # inches, including the names
    across = min(len(nodes), max(1, int(_ACROSS / width)))
    down = -(-len(nodes) // across)
    axes = new_axes(
        None, nrows=down, ncols=across, figsize=(width * across, _ROWS * down), squeeze=False, layout="tight"
    )
    for extra in axes.ravel()[len(nodes) :]:
        extra.remove()
    for node, ax in zip(nodes.tolist(), axes.ravel(), strict=False):
        reached = (path == node).any(0)
        right = (path == 2 * node + 2).any(0)
        size = weights[node] * deviations
        shown, left_out = largest_terms(weights[node], max_terms, deviations, largest_first=True)
        share = size[shown] / (np.abs(size).sum() or 1)
        ax.barh([literal(names[i]) for i in shown], share, color=np.where(share > 0, _RIGHT, _LEFT))
        ax.axvline(0, color="0.3", lw=0.8)
        ax.invert_yaxis()
        rest = f", {left_out} smaller" if left_out else ""
        ax.set_title(f"node {node}: {reached.mean():.0%} of rows, {right.mean():.0%} go right", fontsize=10)
        ax.set_xlabel(f"left      share of the score{rest}      right", fontsize=9)
    return axes.ravel()[: len(nodes)]
