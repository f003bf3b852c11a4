"""Splits of CART, which are initial values of searches.

scikit-learn grows the trees on the host. They split the features, or the outputs of a ridge regression. Greedy searches
use only the directions of the ridge regression.
"""

from functools import partial
import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import segments, splitting, topology, warmstart
from jtrees.data.table import Table, without_padding
from jtrees.monotone import without_negative
from jtrees.ridge import principal_components, ridge
from jtrees.search.monitor import Monitor
from jtrees.search.problem import Problem
from jtrees.search.sample import drawn_rows
from jtrees.segments import effective, ones_or
from jtrees.tasks import Classification, Policy, Regression, Task
from jtrees.tasks.labels import shares
from jtrees.training import Batch
from jtrees.tree import ObliqueTree

_LEAST_WEIGHT = 10.0  # least weight of a leaf of CART on ridge outputs, in samples: smaller leaves follow noise
_ROUNDED = 4.0  # rounding errors of a mean, in units of the last digit
# In deviations. Scaling clips features at 100 deviations. An outlier there would determine its feature's slope alone.
_FARTHEST = 99.0
_ROWS_OF_BIN = 1000  # largest mean number of rows of a bin for the edges of bins
_PART_OF_BINS = 0.4  # part of the time before a deadline for the edges of bins


def bin_edges(problem: Problem, bins: int) -> np.ndarray:
    """Returns the edges of the bins of each feature, ``(p, bins - 1)``."""
    # They are edges of the rows of the fit, which also serve its folds, so the trees of an ensemble share them. If a
    # preconditioner is compared or given, they are edges of the rows of the problem.
    x, _, weight = problem.source or problem.batch
    return problem.computed_once(_edges, x, weight, bins, monitor=problem.monitor.within(_PART_OF_BINS))


def _edges(x: np.ndarray, weight: np.ndarray, bins: int, *, monitor: Monitor) -> np.ndarray:
    def edges(rows: Any) -> np.ndarray:
        x, y, weight = rows
        if len(x) > (most_rows := _ROWS_OF_BIN * bins):
            chosen, weight = drawn_rows(y, weight, most_rows, Regression(), np.random.default_rng(0))
            x = x[chosen]
        return splitting.edges_of(x, bins, weight)

    return monitor.on_rows(edges, without_padding(Batch(x, np.zeros(len(x)), weight)))  # type: ignore[arg-type]


def grown_cart(
    rows: Batch,
    task: Task,
    depth: int,
    leaves: str = "constant",
    *,
    min_weight: float = 0.0,
    monotone: np.ndarray | None = None,
) -> ObliqueTree:
    """Returns the splits of a CART tree of the given depth."""
    # For linear leaves, CART is fitted to the residuals of a linear regression. For one target or two classes, the
    # predictions of CART do not fall in the features `monotone`, (p,) bool.
    x, y, weight = rows
    options: Any = {"sample_weight": weight, "min_weight": min_weight, "monotone": monotone if y.ndim == 1 else None}
    if isinstance(task, Classification):
        return warmstart.cart(x, y, depth, classifies=True, **options).replace(leaves=None)
    y = _targets(y, task).reshape(len(x), -1)
    varies = np.ptp(y, axis=0) > 0
    if not varies.any():  # possible in a part of the rows
        nodes = topology.num_nodes(depth)
        return ObliqueTree(jnp.zeros((nodes, x.shape[1]), jnp.float32), jnp.full(nodes, -1, jnp.float32), None)
    y = y[:, varies]
    if leaves == "linear":
        residuals = _residuals(x, y, weight)
        y = residuals if np.ptp(residuals, axis=0).min() > 0 else y
    return warmstart.cart(x, y, depth, **options).replace(leaves=None)


def _residuals(x: Any, y: np.ndarray, weight: Any) -> np.ndarray:
    """Returns the residuals of a linear regression of the targets ``(n, k)``."""
    root = 1.0 if weight is None else np.sqrt(weight)[:, None]
    columns = np.column_stack([x - x.mean(0, dtype=np.float64), np.ones(len(x))])
    columns /= np.maximum(np.abs(columns).max(0), np.finfo(np.float32).tiny)
    return y - columns @ np.linalg.lstsq(root * columns, root * y, rcond=None)[0]


def _targets(y: Any, task: Task) -> Any:
    """Returns the targets of a regression that stands for the task."""
    # In classification the targets are the class probabilities, which are 0 or 1 for labels. For two classes, the
    # probability of class 1 is sufficient. For rewards, the targets are the rewards minus their mean over the actions.
    if isinstance(task, Classification):
        return shares(y, task.classes)[:, task.classes == 2 :]
    if isinstance(task, Policy):
        return y - y.mean(1, keepdims=True)
    return y


def ridge_directions(batch: Batch, task: Task, monotone: Array | None = None) -> Array:
    """Returns the slopes of the outputs of a ridge regression as unit vectors, ``(p, d)``; it can be compiled.

    Several outputs are replaced by their principal components. Classes are regressed as indicators divided by the root
    of the class frequency, so the components are linear discriminants (Hastie, Tibshirani & Buja 1994). The plain
    indicators would only separate single classes from the rest.

    There are at most p directions, and at most K - 1 for K classes. A direction that would be a rounding error is zero.
    Negative slopes of the features ``monotone``, ``(p,)`` bool, become 0.
    """
    times: Any = partial(jnp.matmul, precision="highest")
    weight = effective(ones_or(batch.weight, batch.x))
    y = jnp.asarray(_targets(batch.y, task), batch.x.dtype).reshape(len(batch.x), -1)
    if isinstance(task, Classification):
        frequency = times(weight, y) / segments.total(weight)
        y = y / jnp.sqrt(jnp.where(frequency > 0, frequency, 1))
    x, y = _centred(batch.x, y, weight, 1.0)
    slopes = ridge(x, y, weight, shared=True).slopes
    if slopes.shape[1] > 1:
        components = principal_components(times(x, slopes), weight)
        first = 1 if isinstance(task, Classification) else 0  # indicators sum to 1, so one component is redundant
        slopes = times(slopes, components[:, first:][:, -x.shape[1] :])
    length = jnp.linalg.norm(slopes, axis=0)
    is_signal = length > x.shape[1] * jnp.finfo(x.dtype).eps * length.max()
    directions = jnp.where(is_signal, slopes / jnp.where(is_signal, length, 1), 0)
    if monotone is None:
        return directions
    positive = without_negative(directions.T, monotone).T
    length = jnp.linalg.norm(positive, axis=0)
    return positive / jnp.where(length > 0, length, 1)


def _centred(x: Array, y: Array, weight: Array, unit: float) -> tuple[Array, Array]:
    """Returns centred features in their unit, and centred targets ``(n, k)``, for a ridge regression."""
    # An outlier of a feature is replaced by its mean. A constant target is 0.
    xp, total = segments.module_of(x, y), segments.total(weight)
    near = xp.where(xp.abs(x) < _FARTHEST * unit, x / unit, 0)
    x, centred = (a - segments.total(weight[:, None] * a) / total for a in (near, y))
    # A smaller maximum means that the target is constant, and that all its values are rounding errors.
    varies = xp.abs(centred).max(0) > _ROUNDED * xp.finfo(y.dtype).eps * xp.abs(y).max(0)
    return x, xp.where(varies, centred, 0)


def cart_of_table(
    table: Table, depth: int, leaves: str, limit: int | None, columns: np.ndarray | None, *, monitor: Monitor
) -> ObliqueTree:
    """Returns CART of a table in the user's units, grown on at most about ``limit`` rows."""
    # CART splits only the features `columns`, by number; None: all features.
    x, y, weight = table.x, table.y, table.weight
    if limit is not None and limit < len(x):
        rows, weight = drawn_rows(y, weight, limit, table.task, np.random.default_rng(0))
        x, y = x[rows], y[rows]
    p = x.shape[1]
    x = x if columns is None else x[:, columns]
    # As in scaled data, a feature with a non-increasing effect changes its sign.
    monotone, factors = None, np.ones(x.shape[1], np.float32)
    if table.monotone is not None:
        monotone, factors = np.not_equal(table.monotone, 0), np.where(np.less(table.monotone, 0), -factors, factors)
        x = x * factors.astype(x.dtype)
    grow = lambda rows: grown_cart(rows, table.task, depth, leaves, monotone=monotone)
    tree = monitor.on_rows(grow, Batch(x, y, weight), math.prod(table.task.shape))  # type: ignore[arg-type]
    weights = np.zeros((len(tree.bias), p), np.float32)
    weights[:, slice(None) if columns is None else columns] = np.asarray(tree.weights) * factors
    return tree.replace(weights=weights)


def grown_on_ridge(rows: Batch, task: Task, depth: int, unit: float) -> ObliqueTree:
    """Returns the splits of CART on the outputs of a ridge regression instead of the features."""
    # The splits divide the outputs of a linear model into intervals, so the accuracy of the tree is near the accuracy
    # of the linear model. Each target has a ridge strength of its own. Classes, weights and outliers are treated as in
    # `ridge_directions`, except that the indicators of classes are not divided. `rows` are NumPy arrays, with features
    # of mean 0. `unit` is the standard deviation of the features, and of the outputs that CART splits.
    x, y = np.asarray(rows.x), _targets(np.asarray(rows.y), task).reshape(len(rows.x), -1).astype(np.float64)
    weight = effective(ones_or(rows.weight, x))
    wide: Any = x.astype(np.float64)
    slopes: Any = np.asarray(ridge(*_centred(wide, y, weight, unit), weight).slopes, np.float32)
    with np.errstate(invalid="ignore"):  # OpenBLAS may set this flag for finite numbers (numpy issue 24067)
        outputs = x @ slopes
    deviation = np.sqrt(np.cov(outputs.T, aweights=weight, ddof=0).reshape(len(slopes.T), -1).diagonal())
    scale = np.float32(unit / np.where(deviation > 0, deviation, 1))
    tree = grown_cart(Batch(outputs * scale, rows.y, weight), task, depth, min_weight=_LEAST_WEIGHT)  # type: ignore[arg-type]
    # The product is computed on the host, because JAX would compile it for each new shape.
    return tree.replace(weights=np.asarray(tree.weights) @ (slopes * scale).T)
