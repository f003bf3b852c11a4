"""Plots of a model and its training: splits, leaves, importances, the learning curve, and regions."""

from collections.abc import Mapping, Sequence
from typing import Any

from jax.typing import ArrayLike
import numpy as np

from jtrees import validation
from jtrees.plotting._common import features_of, literal, new_axes
from jtrees.tables.model import tree_of
from jtrees.text import class_labels, largest_terms, measured
from jtrees.tree import ObliqueTree

_ROWS, _ACROSS = 3, 16  # height of a split's chart, and maximum width of all charts, in inches
_LINES = 20  # maximum number of runs in a learning curve
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


def plot_leaves(model: Any, x: Any, y: ArrayLike, ax: Any = None, *, class_names: Sequence[str] | None = None) -> Any:
    """Plots the targets in each leaf that a row reaches.

    A leaf shows a box plot in regression, the shares of the classes in classification, and the mean rewards of the
    actions for a policy.

    Args:
      model: a :class:`jtrees.ObliqueTree`, or a model of raw tables that is one.
      x: samples, ``(n, p)`` or a raw table.
      y: targets of the samples, ``(n,)``. For leaves of class frequencies, classes 0..K-1. For a policy, the rewards of
        the actions, ``(n, K)``.
      ax: matplotlib axes, by default new axes.
      class_names: names of the classes or actions.

    Returns:
      The axes.

    Raises:
      ImportError: without matplotlib.
      ValueError: for a model other than a single tree, or for rows that do not fit it.
    """
    tree, features, _ = features_of(model, x, None)
    measured(tree_of(tree), None, None, class_names, None)  # checks the names
    y = np.asarray(y)
    validation.check_rows(y, len(features))
    if y.ndim != 1 and not tree.is_policy:
        raise ValueError(f"y must have shape (n,), got {y.shape}")
    leaf = np.asarray(tree.leaf_index(features))
    reached = np.unique(leaf)
    rewards = tree.mean_rewards(leaf, y)[reached] if tree.is_policy else None
    ax = new_axes(ax, figsize=(max(5, 0.6 * len(reached) + 2), 4), layout="tight")
    labels = [f"{number}\n{np.mean(leaf == number):.0%}" for number in reached]
    names = list(map(literal, class_labels(tree, class_names)))
    if rewards is not None:
        places, width = np.arange(len(reached)), 0.8 / len(names)
        for k, name in enumerate(names):
            ax.bar(places + (k - (len(names) - 1) / 2) * width, rewards[:, k], width, label=name)
        ax.set_xticks(places, labels)
        ax.set_ylabel("mean reward")
    elif tree.classes is not None:
        shares = np.stack([np.bincount(y[leaf == number].astype(int), minlength=tree.classes) for number in reached])
        shares = shares / shares.sum(1, keepdims=True)
        for k, name in enumerate(names):
            ax.bar(labels, shares[:, k], bottom=shares[:, :k].sum(1), label=name)
        ax.set_ylabel("share of the rows")
    else:
        ax.boxplot([y[leaf == number] for number in reached], tick_labels=labels, showfliers=False)
        ax.set_ylabel("target")
    if names:
        ax.legend(fontsize=9)
    ax.set_xlabel("leaf, and its share of all rows")
    return ax


def plot_importances(falls: Mapping[str, Any], ax: Any = None, *, most: int = 15) -> Any:
    """Plots importances by column, largest first. Several values appear as their mean and standard deviation.

    Args:
      falls: result of :func:`jtrees.explain.permutation_importance`, or any numbers by column name.
      ax: matplotlib axes, by default new axes.
      most: maximum number of columns.

    Returns:
      The axes.

    Raises:
      ImportError: without matplotlib.
      ValueError: if there is no column.
    """
    validation.check_count("most", most)
    if not falls:
        raise ValueError("falls must hold numbers by column name, got none")
    mean = {name: float(np.mean(values)) for name, values in falls.items()}
    names = sorted(mean, key=lambda name: -mean[name])[:most]
    ax = new_axes(ax, figsize=(6, 0.35 * len(names) + 1), layout="tight")
    ax.barh(
        list(map(literal, names)),
        [mean[name] for name in names],
        xerr=[float(np.std(falls[name])) for name in names],
        color=_RIGHT,
    )
    ax.invert_yaxis()
    ax.axvline(0, color="0.3", lw=0.8)
    ax.set_xlabel("fall of the score without the column")
    return ax


def plot_learning_curve(fit: Any, ax: Any = None) -> Any:
    """Plots the training loss of a fit before each update, on scaled data. Up to 20 runs have a line each.

    Args:
      fit: a :class:`jtrees.FitResult`.
      ax: matplotlib axes, by default new axes.

    Returns:
      The axes.

    Raises:
      ImportError: without matplotlib.
      ValueError: for a fit without a finite loss.
    """
    history = np.asarray(fit.history, np.float64)
    lines = history.reshape(-1, history.shape[-1])
    lines = lines[np.isfinite(lines).any(1)]
    if not len(lines):
        raise ValueError("fit must have a history with finite losses, got none")
    ax = new_axes(ax, figsize=(6, 4), layout="tight")
    for line in lines[:_LINES]:
        ax.plot(np.flatnonzero(np.isfinite(line)), line[np.isfinite(line)], lw=0.8, alpha=0.7)
    if np.nanmin(lines) > 0:
        ax.set_yscale("log")
    ax.set_xlabel("update")
    ax.set_ylabel("training loss")
    return ax


def plot_regions(
    model: Any,
    x: Any,
    columns: tuple[str, str],
    ax: Any = None,
    *,
    feature_names: Sequence[str] | None = None,
    resolution: int = 200,
) -> Any:
    """Plots the predictions of a model over two features, and the samples.

    All other features have their median. The plot shows the most probable class in classification, and the action for a
    policy.

    Args:
      model: any fitted model with one output.
      x: samples, ``(n, p)`` or a raw table. The ranges and medians of the features are computed from them.
      columns: names of two features, the horizontal feature first.
      ax: matplotlib axes, by default new axes.
      feature_names: names of the columns of arrays, by default ``x0``, ``x1``, ...
      resolution: number of points on each side.

    Returns:
      The axes.

    Raises:
      ImportError: without matplotlib.
      ValueError: for unknown names, for several outputs, or for rows that do not fit the model.
    """
    validation.check_count("resolution", resolution, 2)
    inner, features, names = features_of(model, x, feature_names)
    chosen = [columns] if isinstance(columns, str) else list(columns)
    if len(chosen) != 2 or any(name not in names for name in chosen):
        named = validation.quoted_list(names)
        raise ValueError(f"columns must be two of {named}, got {validation.quoted(columns)}")
    across, down = (names.index(name) for name in chosen)
    ranges = [np.linspace(features[:, i].min(), features[:, i].max(), resolution) for i in (across, down)]
    grid = np.tile(np.median(features, axis=0), (resolution**2, 1))
    grid[:, across], grid[:, down] = (axis.ravel() for axis in np.meshgrid(*ranges))
    predicted = np.asarray(inner.predict(grid))
    classes = predicted.ndim == 2 and np.allclose(predicted.sum(1), 1, atol=1e-3)
    if predicted.ndim == 2 and not classes:
        raise ValueError(f"model must have one output, got {predicted.shape[1]}")
    predicted = predicted.argmax(1) if classes else predicted
    ax = new_axes(ax, figsize=(6, 4.5), layout="tight")
    shown = ax.pcolormesh(*ranges, predicted.reshape(resolution, resolution), shading="nearest", cmap="viridis")
    class_label = "action" if isinstance(inner, ObliqueTree) and inner.is_policy else "most probable class"
    ax.figure.colorbar(shown, ax=ax, label=class_label if classes else "prediction")
    ax.scatter(features[:, across], features[:, down], s=4, color="white", alpha=0.4, edgecolors="none")
    ax.set(xlabel=literal(chosen[0]), ylabel=literal(chosen[1]))
    return ax
