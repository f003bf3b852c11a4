"""The importance of columns, for a score and for the prediction."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.typing import ArrayLike
from jaxtyping import Array
import numpy as np

from jtrees import validation
from jtrees.explain.explained import ExplainedColumns
from jtrees.tables.model import FrameModel, features_of_rows

_ENTRIES = 2**22  # largest number of entries of the shuffled rows of a call


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
    rng, columns = rng_of(key), ExplainedColumns.from_model(model, feature_names)
    features, y = features_of_rows(model, x), np.asarray(y)
    validation.check_rows(y, len(features))
    predict = model.model.predict if isinstance(model, FrameModel) else model.predict
    baseline = float(score(y, predict(features)))
    fall = lambda column: baseline - float(score(y, predict(shuffled(features, column, rng))))
    masks = {name: columns.owner == i for i, name in enumerate(columns.names)}
    return {name: np.array([fall(column) for _ in range(repeats)]) for name, column in masks.items()}


def mean_changes(
    predict: Callable[[Any], Any], features: np.ndarray, owner: np.ndarray, columns: int, rng: np.random.Generator
) -> np.ndarray:
    """Returns how much the prediction depends on each column, as fractions of the sum over all columns, ``(columns,)``.

    The importance of a column is the mean absolute change of the prediction when the values of the column are shuffled.
    Several outputs are averaged. Targets are not needed, so the importance says what the model uses, not what helps it.
    ``owner`` is the column of each feature, ``(p,)``. All features of a column are shuffled together.
    """
    before, size = np.asarray(predict(features), np.float64), max(1, _ENTRIES // features.size)
    changes = np.zeros(columns)
    for first in range(0, columns, size):  # a call takes longer than its rows
        block = range(first, min(columns, first + size))
        shuffles = np.concatenate([shuffled(features, owner == column, rng) for column in block])
        after = np.asarray(predict(shuffles)).reshape(len(block), *before.shape)
        changes[first : first + len(block)] = np.abs(after - before).reshape(len(block), -1).mean(1)
    return changes / total if (total := changes.sum()) > 0 else changes


def shuffled(features: np.ndarray, column: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns the features, of which those in ``column``, ``(p,)`` bool, are shuffled together."""
    result = features.copy()
    result[:, column] = features[rng.permutation(len(features))][:, column]
    return result


def rng_of(key: Array | None) -> np.random.Generator:
    """Returns the generator of NumPy for a random key; None: ``jax.random.key(0)``."""
    return np.random.default_rng(np.asarray(jax.random.bits(jax.random.key(0) if key is None else key, (4,))))
