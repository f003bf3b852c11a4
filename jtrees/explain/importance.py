"""The importance of columns for a score."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.typing import ArrayLike
from jaxtyping import Array
import numpy as np

from jtrees import validation
from jtrees.explain.explained import ExplainedColumns
from jtrees.tables.model import FrameModel


def permutation_importance(
    model: Any,
    x: Any,
    y: ArrayLike,
    score: Callable[[Any, Any], float],
    *,
    repeats: int = 5,
    key: Array | None = None,
    feature_names: Sequence[str] | None = None,
) -> dict[str, np.ndarray]:
    """Returns the fall of a score when the values of a column are shuffled (Breiman, 2001).

    For estimators, scikit-learn has :func:`sklearn.inspection.permutation_importance`. This function computes the same
    importance for a model. It shuffles all features of a column together.

    Args:
      model: any fitted model.
      x: samples, ``(n, p)``, preferably samples that were not used in training.
      y: targets of the samples.
      score: ``(y, predictions) -> score``, such as :func:`sklearn.metrics.r2_score`. A greater score is better.
      repeats: number of shuffles.
      key: random key of the shuffles, by default ``jax.random.key(0)``.
      feature_names: names of the columns of arrays, by default ``x0``, ``x1``, ...

    Returns:
      The falls of the score by column name, ``(repeats,)`` each.

    Raises:
      ValueError: for rows that do not fit the model, or for ``repeats`` below 1.

    Example:
      >>> leaves = jtrees.leaves.Values(jnp.array([0.0, 10.0]))
      >>> tree = jtrees.ObliqueTree(jnp.array([[1.0, 2.0]]), jnp.array([-1.0]), leaves)
      >>> x = np.tile([[0.0, 7.0], [2.0, 7.0]], (5, 1))  # the second column is constant
      >>> score = lambda y, predictions: -np.square(y - predictions).mean()
      >>> falls = jtrees.explain.permutation_importance(tree, x, tree.predict(x), score)
      >>> {name: fall.shape for name, fall in falls.items()}, float(falls["x1"].max())
      ({'x0': (5,), 'x1': (5,)}, 0.0)
    """
    validation.check_count("repeats", repeats)
    rng = np.random.default_rng(np.asarray(jax.random.bits(jax.random.key(0) if key is None else key, (4,))))
    columns = ExplainedColumns.from_model(model, feature_names)
    inner, features, y = model.model if isinstance(model, FrameModel) else model, columns.features(x), np.asarray(y)
    validation.check_rows(y, len(features))
    baseline = float(score(y, inner.predict(features)))

    def fall(column: np.ndarray) -> float:
        shuffled = features.copy()
        shuffled[:, column] = features[rng.permutation(len(features))][:, column]
        return baseline - float(score(y, inner.predict(shuffled)))

    masks = {name: columns.owner == i for i, name in enumerate(columns.names)}
    return {name: np.array([fall(column) for _ in range(repeats)]) for name, column in masks.items()}
