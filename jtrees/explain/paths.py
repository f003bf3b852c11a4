"""The path of a sample through a tree, and the contribution of each column to the scores on the path."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from jtrees import exact
from jtrees.explain.explained import ExplainedColumns, relative
from jtrees.tables.model import tree_of
from jtrees.text import number_text

_DIGITS = 4


@dataclasses.dataclass(frozen=True)
class Split:
    """A split on the path of a sample.

    Attributes:
      node: number of the node, breadth first.
      margin: the score, ``weights @ x + bias``. The sample goes right if the score is positive, else left.
      reference: the score at zero in the model's own coordinates (``tree.origin``).
      parts: contribution of each column. Up to rounding, ``margin = reference + sum(parts.values())``.
    """

    node: int
    margin: float
    reference: float
    parts: dict[str, float]

    def __str__(self) -> str:
        side = "right" if self.margin > 0 else "left"
        margin, reference = (number_text(score, _DIGITS) for score in (self.margin, self.reference))
        terms = " ".join(filter(None, (reference, _parts_text(self.parts))))
        return f"node {self.node}: {margin} = {terms}, {side}"


@dataclasses.dataclass(frozen=True)
class Path:
    """The path of a sample through a tree, and the prediction at its end.

    Attributes:
      splits: the splits, root first. Nodes that do not split are omitted.
      leaf: number of the leaf.
      prediction: the prediction, ``()``, or ``(k,)`` for k outputs or classes.
      parts: for linear leaves, the contribution of each column to the output, relative to the intercept of the leaf. A
        contribution is ``(k,)`` for k outputs, and ignores the bounds of the leaf. None for other leaves.
    """

    splits: list[Split]
    leaf: int
    prediction: np.ndarray
    parts: dict[str, Any] | None

    def __str__(self) -> str:
        """Returns a line for each split and a line for the leaf. The largest parts come first."""
        answer = np.array2string(self.prediction, precision=4, separator=", ")
        last = f"leaf {self.leaf}: {answer}"
        if self.parts is not None and self.prediction.ndim == 0 and (parts := _parts_text(self.parts)):
            last += f" with {parts}"
        return "\n".join([*map(str, self.splits), last])


def path(model: Any, row: Any, *, feature_names: Sequence[str] | None = None) -> Path:
    """Returns the path of a sample through a tree, and the contribution of each column to every score on the path.

    Args:
      model: a :class:`jtrees.ObliqueTree`, or a model of raw tables that is one.
      row: the sample: ``(p,)``, a Series of pandas, or a table of one row.
      feature_names: names of the columns of arrays, by default ``x0``, ``x1``, ...

    Raises:
      ValueError: for a model other than a single tree, for rows that do not fit it, or for several rows.

    Example:
      >>> leaves = jtrees.leaves.Values(jnp.array([0.0, 10.0]))
      >>> tree = jtrees.ObliqueTree(jnp.array([[1.0, 2.0]]), jnp.array([-1.0]), leaves)
      >>> print(jtrees.explain.path(tree, np.array([2.0, 1.0])))
      node 0: 3 = -1 + 2 (x0) + 2 (x1), right
      leaf 1: 10.
    """
    tree, columns = tree_of(model), ExplainedColumns.from_model(model, feature_names)
    x = columns.row(row)
    z = relative(tree, x)[0]
    weights, bias = np.asarray(tree.weights), np.asarray(tree.bias)
    place, nodes, margins = 0, [], []
    while place < len(bias):
        margin = float(exact.row_scores(weights[place, None], bias[place, None], z)[0])
        if weights[place].any():
            nodes.append(place)
            margins.append(margin)
        place = 2 * place + 1 + (margin > 0)
    leaf = place - len(bias)
    column_terms = columns.summed((weights[nodes] * z.astype(np.float64)).T).T.tolist()
    splits = [
        Split(node, margin, float(bias[node]), dict(zip(columns.names, terms, strict=True)))
        for node, margin, terms in zip(nodes, margins, column_terms, strict=True)
    ]
    parts = None
    if not tree.leaves.is_constant:
        slopes = np.asarray(tree.leaves.coefficients, np.float64)[leaf]
        terms = columns.summed((slopes.T * z.astype(np.float64)).T)
        parts = dict(zip(columns.names, terms.tolist() if terms.ndim == 1 else list(terms), strict=True))
    return Path(splits, leaf, np.asarray(tree.predict(x))[0], parts)


def _parts_text(parts: dict[str, float]) -> str:
    order = sorted((name for name in parts if parts[name]), key=lambda name: -abs(parts[name]))
    return " ".join(
        f"{'-' if parts[name] < 0 else '+'} {number_text(abs(parts[name]), _DIGITS)} ({name})" for name in order
    )
