"""The smallest change of a sample that leads to another answer."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jtrees import exact
from jtrees.explain.explained import ExplainedColumns, relative, tree_of
from jtrees.explain.least_distance import least_distance_within, nearest_leaves
from jtrees.tree import ObliqueTree


class Change(NamedTuple):
    """The smallest change of a sample that leads to another answer.

    Attributes:
      x: the changed sample as features, ``(p,)``.
      distance: its length: the root of the sum of squared changes, each in standard deviations.
      leaf: the leaf that it reaches.
      prediction: the prediction there.
      changes: the new value of every column that changes, by name.
    """

    x: np.ndarray
    distance: float
    leaf: int
    prediction: np.ndarray
    changes: dict[str, float]


def nearest_change(
    model: Any,
    row: Any,
    x: Any,
    *,
    columns: Sequence[str] | None = None,
    target: int | None = None,
    extrapolate: bool = False,
    feature_names: Sequence[str] | None = None,
) -> Change | None:
    """Returns the smallest change of one sample that leads to another leaf, or to another class, or action of a policy.

    A leaf is the intersection of the half-spaces on its path, so the nearest point of each is a quadratic program with
    one constraint a level: least distance programming, solved by non-negative least squares (Lawson and Hanson, Solving
    Least Squares Problems, 1974, chapter 23). No leaf is nearer than the farthest of the half-spaces on its path, so
    leaves are solved in that order, up to the first that cannot be nearer than one that is solved. The nearest of all
    leaves is exact; it is moved over the splits that it touches by a millionth, and more where float32 asks for it.
    A column keeps to its range in ``x``, the sample's own value included: one constraint a bound.

    Args:
      model: a :class:`jtrees.ObliqueTree`, or a model of raw tables that is one.
      row: the sample, ``(p,)`` or a table of one row.
      x: samples whose standard deviations are the units of the change and whose ranges are its bounds, such as the
        training rows; columns that do not vary do not change.
      columns: names of the columns that may change; None: all, of raw tables all of numbers. A missing value does not
        change.
      target: the class to reach, in classification, or the action of a policy; None: any other than now.
      extrapolate: whether a column may leave its range in ``x``.
      feature_names: names of the columns of arrays, by default ``x0``, ``x1``, ...

    Returns:
      The change; None if no change of these columns leads to another answer.

    Raises:
      ValueError: for a model that is not one tree, for rows that do not fit it, and for columns that cannot change.

    Example:
      >>> leaves = jtrees.leaves.Values(jnp.array([0.0, 10.0]))
      >>> tree = jtrees.ObliqueTree(jnp.array([[1.0, 2.0]]), jnp.array([-1.0]), leaves)
      >>> x = np.array([[0.0, 0.0], [2.0, 1.0], [1.0, 0.0], [0.0, 2.0]])
      >>> change = jtrees.explain.nearest_change(tree, x[0], x)
      >>> print(change.x.round(2), change.leaf)  # onto the line x0 + 2 x1 = 1
      [0.2 0.4] 1
    """
    tree, described = tree_of(model), ExplainedColumns.of(model, feature_names)
    given = described.row("row", row)
    background = described.features(x)
    deviation = np.where(described.free(columns, row), background.std(0), 0.0)
    bounds = _bounds(given[0], background, deviation, extrapolate)
    weights, bias = np.asarray(tree.weights), np.asarray(tree.bias)
    leaf_at = lambda x: exact.row_leaf(exact.row_scores(weights, bias, relative(tree, x[None])[0]))
    margins = exact.row_scores(weights, bias, relative(tree, given)[0])
    now = exact.row_leaf(margins)
    others = _others(tree, now, target)
    if others[now]:
        return _changed(tree, described, given[0], given[0], now, deviation)
    for step, (directions, needed) in nearest_leaves(weights, margins, deviation, others, bounds):
        for more in 10.0 ** np.arange(-6, 0):
            beyond = least_distance_within(directions, needed + more, bounds)
            changed = given[0] + deviation * (step if beyond is None else beyond)
            if not extrapolate:  # but for rounding it is inside
                low, high = np.minimum(given[0], background.min(0)), np.maximum(given[0], background.max(0))
                changed = changed.clip(low, high)
            if others[leaf := leaf_at(changed)]:
                return _changed(tree, described, given[0], changed, leaf, deviation)
    return None


def _others(tree: ObliqueTree, now: int, target: int | None) -> np.ndarray:
    """Returns which leaves have the target, or without one another answer than the leaf ``now``, ``(leaves,)`` bool.

    Raises:
      ValueError: for a target that no leaf can have.
    """
    if target is not None:
        if tree.classes is None:
            raise ValueError("target must be None: the leaves of this tree hold no classes")
        if not 0 <= target < tree.classes:
            kind = "an action" if tree.is_policy else "a class"
            raise ValueError(f"target must be {kind} from 0 to {tree.classes - 1}, got {target}")
    if tree.classes is None:
        return np.arange(len(tree.bias) + 1) != now
    answers = np.asarray(tree.leaves.values).argmax(-1)  # the class or action of each leaf
    return answers != answers[now] if target is None else answers == target


def _changed(
    tree: ObliqueTree,
    columns: ExplainedColumns,
    before: np.ndarray,
    after: np.ndarray,
    leaf: int,
    deviation: np.ndarray,
) -> Change:
    moved = np.flatnonzero(before != after)
    length = float(np.linalg.norm((after - before)[moved] / deviation[moved]))
    values = {columns.names[columns.owner[i]]: float(after[i]) for i in moved}
    return Change(after, length, leaf, np.asarray(tree.predict(after[None]))[0], values)


def _bounds(given: np.ndarray, background: np.ndarray, deviation: np.ndarray, extrapolate: bool) -> np.ndarray:
    """Returns the lowest and the highest step of each feature within the range of its samples and of the given value,
    in deviations, ``(2, p)``.
    """
    if extrapolate:
        return np.stack([np.full(len(given), -np.inf), np.full(len(given), np.inf)])
    low, high = np.minimum(background.min(0), given) - given, np.maximum(background.max(0), given) - given
    return np.stack([low, high]) / np.where(deviation > 0, deviation, 1)
