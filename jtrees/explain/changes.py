"""The smallest change of a sample that leads to another answer."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jtrees import exact
from jtrees.explain.explained import ExplainedColumns, as_rows, relative
from jtrees.explain.least_distance import least_distance_within, nearest_leaves
from jtrees.tables.model import features_of_rows, tree_of
from jtrees.text import number_text

_DIGITS = 5


class Change(NamedTuple):
    """The smallest change of a sample that leads to another answer.

    Attributes:
      x: the changed sample as features, ``(p,)``.
      distance: length of the change: the root of the sum of squared changes, in standard deviations.
      leaf: the leaf that the changed sample reaches.
      prediction: the prediction for the changed sample.
      changes: the new value of every column that changes, by name.
      previous: the value of the sample in each of these columns, by name.
    """

    x: np.ndarray
    distance: float
    leaf: int
    prediction: np.ndarray
    changes: dict[str, float]
    previous: dict[str, float]

    def __str__(self) -> str:
        """Returns the old and the new value of every column that changes, such as ``"age: 50 -> 61.5"``."""
        text = lambda value: number_text(value, _DIGITS)
        return ", ".join(f"{name}: {text(self.previous[name])} -> {text(new)}" for name, new in self.changes.items())


def nearest_change(
    model: Any,
    row: Any,
    x: Any,
    *,
    extrapolate: bool = False,
    feature_names: Sequence[str] | None = None,
) -> Change | None:
    """Returns the smallest change of a sample that leads to another answer.

    In classification the answer is the class, for a policy it is the action, and otherwise it is the leaf.

    The nearest point of a leaf solves a quadratic program with a constraint for each level. The solver is non-negative
    least squares (Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23). The nearest leaf is found
    exactly. The changed sample lies a millionth of a deviation beyond the splits that it crosses, and farther if
    float32 requires it. A column keeps to its range in ``x``, extended to the sample's own value.

    Args:
      model: a :class:`jtrees.ObliqueTree`, or a model of raw tables that is one.
      row: the sample: ``(p,)``, a Series of pandas, or a table of one row.
      x: samples, such as the training rows. Their standard deviations are the units of the change, and their ranges are
        its bounds. Missing values do not count. Constant columns and missing values do not change. In a raw table, only
        columns of numbers change.
      extrapolate: whether a column may leave its range in ``x``.
      feature_names: names of the columns of arrays, by default ``x0``, ``x1``, ...

    Returns:
      The change, or None if no change of the columns leads to another answer.

    Raises:
      ValueError: for a model other than a single tree, for rows that do not fit it, or without rows.

    Example:
      >>> leaves = jtrees.leaves.Values(jnp.array([0.0, 10.0]))
      >>> tree = jtrees.ObliqueTree(jnp.array([[1.0, 2.0]]), jnp.array([-1.0]), leaves)
      >>> x = np.array([[0.0, 0.0], [2.0, 1.0], [1.0, 0.0], [0.0, 2.0]])
      >>> change = jtrees.explain.nearest_change(tree, x[0], x)
      >>> print(change.leaf, change)  # onto the line x0 + 2 x1 = 1
      1 x0: 0 -> 0.2, x1: 0 -> 0.4
    """
    tree, described = tree_of(model), ExplainedColumns.from_model(model, feature_names)
    sample = described.row(row)
    background = np.ma.array(features_of_rows(model, x), mask=described.gaps(x))
    if not len(background):
        raise ValueError("x must have at least one row, got 0")
    free = described.free() & ~described.gaps(as_rows(row))[0]
    varies = (background.max(0) > background.min(0)).filled(False)  # the deviation of equal values may be rounding
    deviation = np.where(free & varies, background.std(0).filled(0), 0.0)
    low, high = np.full(len(free), -np.inf), np.full(len(free), np.inf)
    if not extrapolate:  # the ranges in the background and in the sample
        low = np.minimum(background.min(0).filled(sample[0]), sample[0])
        high = np.maximum(background.max(0).filled(sample[0]), sample[0])
    bounds = (np.stack([low, high]) - sample[0]) / np.where(deviation > 0, deviation, 1)
    weights, bias = np.asarray(tree.weights), np.asarray(tree.bias)
    leaf_at = lambda x: exact.row_leaf(exact.row_scores(weights, bias, relative(tree, x[None])[0]))
    margins = exact.row_scores(weights, bias, relative(tree, sample)[0])
    leaf = exact.row_leaf(margins)
    targets = np.arange(len(bias) + 1) != leaf
    if tree.classes is not None:
        answers = np.asarray(tree.leaves.values).argmax(-1)  # the class or action of each leaf
        targets = answers != answers[leaf]
    for step, (directions, distances) in nearest_leaves(weights, margins, deviation, targets, bounds):
        for extra in 10.0 ** np.arange(-6, 0):
            beyond = least_distance_within(directions, distances + extra, bounds)
            changed = sample[0] + deviation * (step if beyond is None else beyond)
            changed = changed.clip(low, high)  # corrects rounding errors
            if not targets[leaf := leaf_at(changed)]:
                continue
            moved = np.flatnonzero(sample[0] != changed)
            length = float(np.linalg.norm((changed - sample[0])[moved] / deviation[moved]))
            old, new = ({described.names[described.owner[i]]: float(x[i]) for i in moved} for x in (sample[0], changed))
            return Change(changed, length, leaf, np.asarray(tree.predict(changed[None]))[0], new, old)
    return None
