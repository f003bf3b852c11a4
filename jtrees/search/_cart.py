"""Splits of CART, from which searches start: of scikit-learn, or over bins within a compiled program; on the features,
or on the outputs of a ridge regression.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import splitting, warmstart
from jtrees.tasks import Classification, Policy, Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree

_STRENGTHS = 10.0 ** np.arange(5, -3.5, -0.5)  # of a ridge regression to choose from, in samples
_LEAST_FREE = 0.1  # part of the samples: with fewer residual degrees of freedom the criterion approaches 0 / 0
_FEWEST = 10.0  # samples in a leaf of CART on the outputs of a ridge regression: intervals of fewer follow noise


def grown_in_bins(batch: Batch, edges: Array, task: Task, depth: int) -> tuple[Array, Array]:
    """Returns weights and biases of the splits of CART over bins of the features, in a compiled program."""
    weight = jnp.ones(len(batch.x), batch.x.dtype) if batch.weight is None else batch.weight
    if isinstance(task, Classification):
        statistics, impurity = splitting.class_statistics(batch.y, weight, task.classes), splitting.entropy
    else:
        statistics, impurity = splitting.target_statistics(batch.y, weight), splitting.squared_deviation
    return splitting.binned_cart(batch.x, jnp.asarray(edges), statistics, depth, impurity)


def grown_cart(
    rows: Batch, task: Task, depth: int, leaves: str = "constant", *, min_weight: float = 0.0
) -> ObliqueTree:
    """Returns the splits of CART of a depth; with linear leaves, CART of the residuals of a linear regression."""
    x, y, weight = rows
    options: Any = {"sample_weight": weight, "min_weight": min_weight}
    if isinstance(task, Classification):
        return warmstart.cart_classifier(x, y, depth, **options).replace(leaves=None)
    y = _targets(y, task)
    if leaves == "linear":
        root = np.sqrt(np.ones(len(x)) if weight is None else weight)[:, None]
        with_one = np.column_stack([x - x.mean(0, dtype=np.float64), np.ones(len(x))])
        unit = np.maximum(np.abs(with_one).max(0), np.finfo(np.float32).tiny)
        with_one /= unit
        wide = y.reshape(len(x), -1)
        residual = (wide - with_one @ np.linalg.lstsq(root * with_one, root * wide, rcond=None)[0]).reshape(y.shape)
        y = residual if np.ptp(residual, axis=0).min() > 0 else y
    return warmstart.cart_regressor(x, y, depth, **options).replace(leaves=None)


def _targets(y: np.ndarray, task: Task) -> np.ndarray:
    """Returns what a regression is of: indicators of classes, and of rewards what an action is worth beside the others.

    Of two classes one indicator says all.
    """
    if isinstance(task, Classification):
        return (y[:, None] == np.arange(task.classes))[:, task.classes == 2 :]
    if isinstance(task, Policy):
        y = y - y.mean(1, keepdims=True)
        return y[:, np.ptp(y, axis=0) > 0]
    return y


def grown_on_ridge(rows: Batch, task: Task, depth: int, unit: float) -> ObliqueTree:
    """Returns the splits of CART on the outputs of a ridge regression, in place of features.

    They divide a linear model's outputs into intervals, so the tree is nearly as accurate. Classes are regressed as
    indicators, which are linear discriminants but for their scale (Hastie, Tibshirani & Buja 1994).

    Args:
      rows: the samples, NumPy arrays.
      task: what is predicted.
      depth: depth of the tree.
      unit: deviation of the outputs that are split, that of the features.
    """
    x, y = np.asarray(rows.x, np.float64), _targets(np.asarray(rows.y), task)
    weight = np.ones(len(x)) if rows.weight is None else np.asarray(rows.weight, np.float64)
    weight *= weight.sum() / (weight**2).sum()  # uneven weights count as fewer samples, as for leaves
    slopes = _ridge(x, y.reshape(len(x), -1).astype(np.float64), weight)
    slopes = slopes * (unit * _inverse(_deviation(x @ slopes, weight)))
    of_outputs = Batch((x @ slopes).astype(np.float32), rows.y, weight)  # type: ignore[arg-type]
    tree = grown_cart(of_outputs, task, depth, min_weight=_FEWEST)
    return tree.composed(jnp.asarray(slopes, jnp.float32))


def _ridge(x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Returns the slopes of a ridge regression of each output, ``(p, k)``, by generalised cross-validation.

    The criterion is that of the root in :mod:`jtrees.leaves.shrunk`. The matrix that is decomposed is that of the
    features or, if there are fewer, of the samples.
    """
    count, of_unit = weight.sum(), _inverse(_deviation(x, weight))
    z, y = (np.sqrt(weight / count)[:, None] * (a - np.average(a, axis=0, weights=weight)) for a in (x * of_unit, y))
    if z.shape[1] <= len(z):
        values, vectors = np.linalg.eigh(z.T @ z)
        values = np.maximum(values, 0)
    else:
        values, vectors = np.linalg.eigh(z @ z.T)
        positive = values > len(z) * np.finfo(values.dtype).eps * values[-1]
        values, vectors = values[positive], z.T @ (vectors[:, positive] / np.sqrt(values[positive]))
    along = vectors.T @ (z.T @ y)
    strengths = _STRENGTHS[:, None] / count
    shrunk = 1 / (values + strengths)  # (strengths, directions)
    rss = (y**2).sum(0) - ((values + 2 * strengths) * shrunk**2) @ along**2
    free = 1 - 1 / count - (values * shrunk).sum(1, keepdims=True) / count
    enough = free >= _LEAST_FREE
    loss = np.where(enough, np.maximum(rss, 0) / np.where(enough, free, 1) ** 2, np.inf)
    best = shrunk[np.argmin(loss, axis=0)]  # (outputs, directions)
    return of_unit[:, None] * (vectors @ (best.T * along))


def _deviation(a: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Returns the deviation of each column."""
    return np.sqrt(np.average((a - np.average(a, axis=0, weights=weight)) ** 2, axis=0, weights=weight))


def _inverse(a: np.ndarray) -> np.ndarray:
    """Returns ``1 / a``, and 0 for 0."""
    return np.divide(1, a, out=np.zeros_like(a), where=a > 0)
