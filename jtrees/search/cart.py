"""Splits of CART, from which searches start: of scikit-learn, or over bins within a compiled program; on the features,
or on the outputs of a ridge regression, of which greedy searches need the directions alone.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import segments, splitting, topology, warmstart
from jtrees._classes import shares
from jtrees.leaves.shrunk import LEAST_FREE, decomposed
from jtrees.segments import effective, ones_or
from jtrees.tasks import Classification, Policy, Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree

_RIDGES = 10.0 ** np.arange(5, -3.5, -0.5)  # strengths of a ridge regression to choose from, in samples
_LEAST_WEIGHT = 10.0  # in samples, of a leaf of CART on the outputs of a ridge regression: fewer follow noise
_ROUNDED = 4.0  # rounding errors of a mean, in units of the last digit
_FARTHEST = 99.0  # deviations; an outlier, which scaling clips at 100, would have the slope of its feature to itself


def grown_in_bins(batch: Batch, edges: Array, task: Task, depth: int) -> tuple[Array, Array]:
    """Returns weights and biases of the splits of CART over bins of the features, in a compiled program."""
    weight = ones_or(batch.weight, batch.x)
    if isinstance(task, Classification):
        statistics, impurity = splitting.class_statistics(batch.y, weight, task.classes), splitting.entropy
    else:
        statistics, impurity = splitting.target_statistics(batch.y, weight), splitting.squared_deviation
    return splitting.binned_cart(batch.x, jnp.asarray(edges), statistics, depth, impurity)


def grown_cart(
    rows: Batch,
    task: Task,
    depth: int,
    leaves: str = "constant",
    *,
    min_weight: float = 0.0,
    monotone: np.ndarray | None = None,
) -> ObliqueTree:
    """Returns the splits of CART of a depth; with linear leaves, CART of the residuals of a linear regression.

    CART of one target or of two classes keeps predictions from falling in the features ``monotone``, ``(p,)`` bool.
    """
    x, y, weight = rows
    options: Any = {"sample_weight": weight, "min_weight": min_weight}
    if monotone is not None and np.ndim(y) == 1:
        options["monotone"] = monotone
    if isinstance(task, Classification):
        return warmstart.cart_classifier(x, y, depth, **options).replace(leaves=None)
    y = _targets(y, task)
    varies = np.ptp(y, axis=0) > 0
    if not np.any(varies):  # as may be of the rows that are not left out
        nodes = topology.num_nodes(depth)
        return ObliqueTree(jnp.zeros((nodes, x.shape[1]), jnp.float32), jnp.full(nodes, -1, jnp.float32), None)
    y = y if y.ndim == 1 else y[:, varies]
    if leaves == "linear":
        root = 1.0 if weight is None else np.sqrt(weight)[:, None]
        with_one = np.column_stack([x - x.mean(0, dtype=np.float64), np.ones(len(x))])
        unit = np.maximum(np.abs(with_one).max(0), np.finfo(np.float32).tiny)
        with_one /= unit
        wide = y.reshape(len(x), -1)
        residual = (wide - with_one @ np.linalg.lstsq(root * with_one, root * wide, rcond=None)[0]).reshape(y.shape)
        y = residual if np.ptp(residual, axis=0).min() > 0 else y
    return warmstart.cart_regressor(x, y, depth, **options).replace(leaves=None)


def _targets(y: Any, task: Task) -> Any:
    """Returns the targets of a regression: probabilities of classes, for labels 0 or 1; of rewards what an action is
    worth beside the others.

    Of two classes one probability says all.
    """
    if isinstance(task, Classification):
        return shares(y, task.classes)[:, task.classes == 2 :]
    if isinstance(task, Policy):
        return y - y.mean(1, keepdims=True)
    return y


def ridge_directions(batch: Batch, task: Task) -> Array:
    """Returns the slopes of the outputs of a ridge regression as unit vectors, ``(p, d)``, in a compiled program.

    Of several outputs these are their principal components. Classes are regressed as indicators over the root of their
    frequency, whose components are linear discriminants (Hastie, Tibshirani & Buja 1994): unlike indicators, they do
    not divide one class from all others.

    With ``C = sum w x x'`` of centred features, ``C = Q diag(s) Q'`` and ``g = Q' sum w x y``, strength t gives slopes
    ``Q g / (s + t)``, lowers the sum of squares by ``sum g**2 (s + 2 t) / (s + t)**2`` and has ``sum s / (s + t)``
    degrees of freedom. It is chosen by generalised cross-validation. Uneven weights count as fewer samples; an outlier
    of a feature counts as its mean.

    Args:
      batch: the samples; features and targets have mean about 0 and deviation about 1.
      task: what is predicted.

    Returns:
      At most p directions, and K - 1 of K classes; zeros in place of those that would be rounding errors.
    """
    times: Any = partial(jnp.matmul, precision="highest")
    weight: Any = effective(ones_or(batch.weight, batch.x))
    total = segments.total(weight)
    y = jnp.asarray(_targets(batch.y, task), batch.x.dtype).reshape(len(batch.x), -1)
    if isinstance(task, Classification):
        frequency = times(weight, y) / total
        y = y / jnp.sqrt(jnp.where(frequency > 0, frequency, 1))
    x, size = jnp.where(jnp.abs(batch.x) < _FARTHEST, batch.x, 0), jnp.abs(y).max(0)
    x, y = (a - times(weight, a) / total for a in (x, y))
    y = jnp.where(jnp.abs(y).max(0) > _ROUNDED * jnp.finfo(y.dtype).eps * size, y, 0)  # else all are rounding errors
    weighted, rounding = (weight[:, None] * x).T, x.shape[1] * jnp.finfo(x.dtype).eps
    values, vectors = (a[0] for a in decomposed(times(weighted, x)[None]))
    values = jnp.maximum(values, 0)[:, None]
    along = jnp.where(values > rounding * values.max(), times(vectors.T, times(weighted, y)), 0)
    sum_of_squares = times(weight, jnp.square(y)).sum()

    def error(strength: Array) -> Array:
        shrunk = values + strength
        lost = sum_of_squares - (jnp.square(along / shrunk) * (shrunk + strength)).sum()
        free = 1 - (1 + (values / shrunk).sum()) / total
        return jnp.where(free > LEAST_FREE, lost / jnp.square(free), jnp.inf)

    strengths = jnp.asarray(_RIDGES, values.dtype)
    slopes = along / (values + strengths[jax.lax.map(error, strengths).argmin()])
    if slopes.shape[1] > 1:
        components = decomposed(times((values * slopes).T, slopes)[None])[1][0]  # in ascending order
        first = 1 if isinstance(task, Classification) else 0  # as indicators sum to 1
        slopes = times(slopes, components[:, first:][:, -x.shape[1] :])
    length = jnp.linalg.norm(slopes, axis=0)
    is_signal = length > rounding * length.max()
    return times(vectors, jnp.where(is_signal, slopes / jnp.where(is_signal, length, 1), 0))


def grown_on_ridge(rows: Batch, task: Task, depth: int, unit: float) -> ObliqueTree:
    """Returns the splits of CART on the outputs of a ridge regression, in place of features.

    They divide a linear model's outputs into intervals, so the tree is nearly as accurate as that model. The strength
    is chosen by leave-one-out cross-validation, for each target. Classes are regressed as indicators, whose outputs are
    linear discriminants but for their scale (Hastie, Tibshirani & Buja 1994). Uneven weights count as fewer samples; an
    outlier of a feature counts as its mean.

    Args:
      rows: the samples, NumPy arrays, ``(n, p)``, ``(n,)`` or ``(n, k)``, and ``(n,)``; features have mean 0.
      task: what is predicted.
      depth: depth of the tree.
      unit: deviation of the features, and of the outputs that are split.
    """
    from sklearn.linear_model import RidgeCV
    from sklearn.preprocessing import StandardScaler

    x, y = np.asarray(rows.x), _targets(np.asarray(rows.y), task).reshape(len(rows.x), -1).astype(np.float64)
    weight = ones_or(rows.weight, x)
    weight = weight * (weight.sum() / (weight**2).sum())
    some = weight > 0
    near = np.where(np.abs(x[some]) < _FARTHEST * unit, x[some], 0).astype(np.float64)
    scaler: Any = StandardScaler().fit(near, sample_weight=weight[some])
    model: Any = RidgeCV(_RIDGES, alpha_per_target=True)
    with np.errstate(divide="ignore", invalid="ignore"):  # of a sample that decides its own output
        model.fit(scaler.transform(near), y[some], sample_weight=weight[some])
    slopes = (model.coef_.reshape(y.shape[1], -1) / scaler.scale_).T.astype(np.float32)
    outputs = x @ slopes
    scaler.fit(outputs.astype(np.float64), sample_weight=weight)
    scale = (unit / scaler.scale_).astype(np.float32)
    of_outputs = Batch(outputs * scale, rows.y, weight)  # type: ignore[arg-type]
    tree = grown_cart(of_outputs, task, depth, min_weight=_LEAST_WEIGHT)
    # On the host, as the array would be compiled for each new shape.
    return tree.replace(weights=np.asarray(tree.weights) @ (slopes * scale).T)
