"""Splits of CART, from which searches start: of scikit-learn, or over bins within a compiled program; on the features,
or on the outputs of a ridge regression.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import splitting, topology, warmstart
from jtrees.tasks import Classification, Policy, Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree

_RIDGES = 10.0 ** np.arange(5, -3.5, -0.5)  # strengths of a ridge regression to choose from, in samples
_LEAST_FREE = 0.1  # part of the samples: with fewer residual degrees of freedom the criterion approaches 0 / 0
_LEAST_WEIGHT = 10.0  # in samples, of a leaf of CART on the outputs of a ridge regression: fewer follow noise
_FARTHEST = 99.0  # deviations; an outlier, which scaling clips at 100, would have the slope of its feature to itself
_BLOCK = 1 << 16  # rows that are in double precision at once


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
    varies = np.ptp(y, axis=0) > 0
    if not np.any(varies):  # as may be of the rows that are not left out
        nodes = topology.num_nodes(depth)
        return ObliqueTree(jnp.zeros((nodes, x.shape[1]), jnp.float32), jnp.full(nodes, -1, jnp.float32), None)
    y = y if y.ndim == 1 else y[:, varies]
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
        return y - y.mean(1, keepdims=True)
    return y


def grown_on_ridge(rows: Batch, task: Task, depth: int, unit: float) -> ObliqueTree:
    """Returns the splits of CART on the outputs of a ridge regression, in place of features.

    They divide a linear model's outputs into intervals, so the tree is nearly as accurate as that model. Classes are
    regressed as indicators, whose outputs are linear discriminants but for their scale (Hastie, Tibshirani & Buja
    1994). Uneven weights count as fewer samples; an outlier of a feature counts as its mean.

    Args:
      rows: the samples, NumPy arrays; features have mean 0.
      task: what is predicted.
      depth: depth of the tree.
      unit: deviation of the features, and of the outputs that are split.
    """
    weight = np.ones(len(rows.x)) if rows.weight is None else np.asarray(rows.weight, np.float64)
    weight = weight * (weight.sum() / (weight**2).sum())
    y = _targets(np.asarray(rows.y), task).reshape(len(weight), -1).astype(np.float64)
    x = np.asarray(rows.x)
    slopes = _ridge(np.where(np.abs(x) < _FARTHEST * unit, x, 0), y, weight)
    outputs = x @ slopes.astype(np.float32)
    mean = np.average(outputs, axis=0, weights=weight)
    deviation = np.sqrt(np.average((outputs - mean) ** 2, axis=0, weights=weight))
    scale = (unit * _inverse(deviation, mean)).astype(np.float32)
    of_outputs = Batch(outputs * scale, rows.y, weight)  # type: ignore[arg-type]
    tree = grown_cart(of_outputs, task, depth, min_weight=_LEAST_WEIGHT)
    return tree.composed(jnp.asarray(slopes.astype(np.float32) * scale))


def _ridge(x: np.ndarray, y: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Returns the slopes ``(p, k)`` of a ridge regression of each target by generalised cross-validation.

    The criterion is that of the root in :mod:`jtrees.leaves.shrunk`. The matrix that is decomposed is that of the
    features or, if there are fewer, of the samples.

    Args:
      x: features, ``(n, p)``.
      y: targets, ``(n, k)``.
      weight: numbers of samples, ``(n,)``.
    """
    (n, p), count = x.shape, weight.sum()
    blocks = [slice(i, i + _BLOCK) for i in range(0, n, _BLOCK)]
    mean = sum(weight[b] @ x[b] for b in blocks) / count
    root = np.sqrt(weight / count)[:, None]
    deviation = np.sqrt(sum(((root[b] * (x[b] - mean)) ** 2).sum(0) for b in blocks))
    of_unit, y = _inverse(deviation, mean), root * (y - weight @ y / count)
    standardised = lambda b: root[b] * (x[b] - mean) * of_unit
    if p <= n:
        moments = np.zeros((p, p + y.shape[1]))
        for b in blocks:
            z = standardised(b)
            moments += z.T @ np.column_stack([z, y[b]])
        values, vectors = np.linalg.eigh(moments[:, :p])
        values, cross = np.maximum(values, 0), moments[:, p:]
    else:
        z = standardised(slice(n))
        values, vectors = np.linalg.eigh(z @ z.T)
        positive = values > n * np.finfo(values.dtype).eps * values[-1]
        values, vectors = values[positive], z.T @ (vectors[:, positive] / np.sqrt(values[positive]))
        cross = z.T @ y
    along = vectors.T @ cross
    strengths = _RIDGES[:, None] / count
    shrunk = 1 / (values + strengths)  # (strengths, directions)
    rss = (y**2).sum(0) - ((values + 2 * strengths) * shrunk**2) @ along**2
    free = 1 - 1 / count - (values * shrunk).sum(1, keepdims=True) / count
    enough = free >= _LEAST_FREE
    loss = np.where(enough, np.maximum(rss, 0) / np.where(enough, free, 1) ** 2, np.inf)
    best = shrunk[np.argmin(loss, axis=0)]  # (targets, directions)
    return of_unit[:, None] * (vectors @ (best.T * along))


def _inverse(deviation: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Returns ``1 / deviation``, and 0 for a column that is constant but for the rounding of its mean."""
    varies = deviation > 16 * np.finfo(deviation.dtype).eps * np.abs(mean)
    return np.divide(1, deviation, out=np.zeros_like(deviation), where=varies)
