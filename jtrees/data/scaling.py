"""Scaling: the map from the user's units to the scaled data of searches, and of models back to the user's units."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrees import blocking, compilation, distributed, io, pytree, segments, sharding, tasks
from jtrees.data.table import Table, bucket
from jtrees.leaves import kind_of
from jtrees.leaves.narrow import Narrowing
from jtrees.monotone import ordered_leaves
from jtrees.segments import ones_or
from jtrees.tasks.labels import is_soft
from jtrees.training import Batch
from jtrees.tree import ObliqueTree, Origin, counted_from
from jtrees.validation import is_traced, quoted_list

# Bounds of the slopes of linear leaves in the user's units. A slope within the bounds, times a fraction of a deviation,
# stays in float32's range.
_FLATTEST, _STEEPEST = 1e-37, 1e36
# The mean of a column is subtracted if it is more than this number of deviations from 0. Float32 would lose three bits
# or more otherwise.
_FAR = 8.0
# Values are clipped at this number of deviations from the mean. In 24 real data sets, a single value is clipped. At 30
# deviations, informative tails of several data sets would be clipped.
_OUTLIER = 100.0
_CLIPPED = 1e-6  # factor of the weight of a row with a clipped feature, where slopes of leaves are fitted
_GAP = 100.0  # smallest gap before codes, in ranges of the other values
_BINS_OF_GAP = 8  # bins of a histogram in the smallest gap before codes
_MOST_CODES = 8  # a gap is at least this part of the range, so this number of codes on both sides is found
_FEW_CODES = 3  # number of codes that any column can have; more need eight other values for each code
_RARE = 1e-3  # largest fraction of a column that can be outliers; two values are always allowed
_ROUNDING = 1e-5  # rounding error of float32 in predictions of scaled targets
_TINY = 1e-30  # the square of a smaller deviation underflows in float32, and a quotient by it overflows


@io.part
@pytree.dataclass
class Scaling:
    """The map from the user's units to scaled data, and of models back to the user's units.

    Features are standardised, in units of a given number of standard deviations. GET's authors scale by the minimum and
    maximum instead. The bulk of a heavy-tailed column is then in a corner that random hyperplanes do not cut.

    Each target is scaled to [0, 1], or to mean 1 for a log link. Classes are not scaled. Centres are subtracted in
    double precision.

    Attributes:
      x_center: centre that is subtracted from the features, ``(p,)``; the value of a constant column.
      x_unit: unit that divides the centred features, ``(p,)``. It is negative if predictions must not rise.
      x_most: absolute value at which scaled features are clipped, ``()`` or ``(p,)``.
      constant: columns that are treated as constant and scaled to 0, ``(p,)`` bool.
      y_low: offset of the targets, ``()`` or ``(k,)``, such as their minimum; None in classification.
      y_unit: unit of the targets, such as their range; None in classification.
      origin: origin of trees in the user's units, or None.
      medians: medians with which models fill missing values, ``(p,)``; None: models refuse them.
    """

    x_center: np.ndarray
    x_unit: np.ndarray
    x_most: Any
    constant: np.ndarray
    y_low: Any
    y_unit: Any
    origin: Origin | None
    medians: np.ndarray | None = None

    @classmethod
    def fit(cls, table: Table, deviations: float = 1.0, *, near: bool = False) -> "Scaling":
        """Returns the scaling of a table; the unit of a feature is ``deviations`` standard deviations.

        Codes such as 999,999,999 do not count in means and deviations. A linear split sees a code as it is, so codes
        are clipped far from the other values, like outliers. If codes are ``near``, they are clipped one deviation from
        the other values: gradients of weights then do not depend on the codes alone.
        """
        share = ones_or(table.weight, table.x)
        columns = zip(table.x.T, table.medians, strict=True)
        mean, deviation, farthest = np.transpose([_moments(x, share, median) for x, median in columns])
        _warn_of_tiny(table.x, np.flatnonzero(deviation < _TINY))
        (low, unit), y_mean = table.task.units(table.y), None
        if isinstance(table.task, tasks.Regression):
            y_mean = table.y.mean(0)
        scaling = cls.from_moments(mean, deviation, deviations, low, unit, y_mean)
        return scaling.replace(x_most=np.minimum(scaling.x_most, (farthest + 1) / deviations)) if near else scaling

    @classmethod
    def from_moments(
        cls, mean: Any, deviation: Any, deviations: float, y_low: Any, y_unit: Any, y_mean: Any
    ) -> "Scaling":
        """Returns the scaling for the moments of the features, and the offset, unit and mean of the targets."""
        constant = deviation < _TINY
        unit = np.where(constant, 1, deviations * deviation)
        x_zero: Any = np.where(~constant & (np.abs(mean) > _FAR * deviation), mean, 0).astype(np.float32)
        y_zero: Any = None if y_mean is None else np.where(np.abs(y_mean) > _FAR * y_unit, y_mean, 0).astype(np.float32)
        origin = Origin(x_zero, y_zero) if x_zero.any() or (y_zero is not None and y_zero.any()) else None
        return cls(mean, unit, _OUTLIER / deviations, constant, y_low, y_unit, origin)

    def oriented(self, signs: tuple[int, ...] | None) -> "Scaling":
        """Returns a scaling that also negates features whose sign is -1; signs None: the same scaling."""
        return self if signs is None else self.replace(x_unit=np.where(np.less(signs, 0), -self.x_unit, self.x_unit))

    def transform(self, x: Any) -> Any:
        """Returns scaled features in float32, computed in double precision; traced arrays in their own precision."""
        zero = np.float32(0) if self.origin is None else self.origin.x
        if isinstance(x, jax.Array) and not is_traced(x, self.x_center):
            with jax.enable_x64(True):  # so that a hard split decides as for a NumPy array
                return self._in_units(x.astype(jnp.float64) - jnp.asarray(zero, jnp.float64), zero)
        return self._in_units(counted_from(zero, x), zero)

    def _in_units(self, x: Any, zero: Any) -> Any:
        """Returns scaled features in float32, from features relative to ``zero``."""
        xp: Any = jnp if isinstance(x, jax.Array) else np
        center, unit, limit = (xp.asarray(a, x.dtype) for a in (self.x_center - zero, self.x_unit, self.x_most))
        # A constant column is also 0 in new samples.
        scaled = xp.where(self.constant, 0, (x - center) / unit)
        return xp.clip(scaled, -limit, limit).astype(np.float32)

    def has_clipped(self, x: Any) -> bool:
        """Returns whether scaled features ``(n, p)`` are clipped in any row."""
        return bool(_clipped(x, self.x_most).any())

    def transform_y(self, y: Any) -> np.ndarray:
        """Returns scaled targets in float32; labels are returned unchanged."""
        if self.y_low is None:
            return y.astype(np.float32) if is_soft(y) else y
        return ((y - self.y_low) / self.y_unit).astype(np.float32)

    def inverse(self, outputs: Any) -> Any:
        """Returns predictions of scaled targets in the user's units; class probabilities are returned unchanged."""
        if self.y_low is None:
            return outputs
        xp, dtype = (jnp, outputs.dtype) if isinstance(outputs, jax.Array) else (np, np.float64)
        low, unit = (xp.asarray(a, dtype) for a in (self.y_low, self.y_unit))
        return low + unit * xp.asarray(outputs, dtype)

    def batch(self, table: Table, rows: int | None = None) -> Batch:
        """Returns the scaled table in NumPy, padded with copies of the last row that have weight 0.

        ``rows`` is the number of rows with padding; None: slightly more than the rows of the table.
        """
        (n, p), y = table.x.shape, self.transform_y(table.y)
        padding = (rows or bucket(n)) - n
        x = blocking.aligned((n + padding, p))
        for block in blocking.on_host(n, p):
            x[block] = self.transform(table.x[block])
        x[n:] = x[n - 1]
        weight = np.pad(ones_or(table.weight, table.x).astype(np.float32), (0, padding))
        arrays: Any = x, np.pad(y, [(0, padding)] + [(0, 0)] * (y.ndim - 1), mode="edge"), weight
        return Batch(*arrays)

    def restore_splits(self, tree: ObliqueTree) -> ObliqueTree:
        """Returns the splits in the user's units, relative to the origin; the leaves are not changed."""
        # A column that is 0 in scaled data might dominate the score in the user's units.
        weights = np.where(self.constant, 0, np.asarray(tree.weights, np.float64) / self.x_unit)
        zero = 0 if self.origin is None else np.asarray(self.origin.x, np.float64)
        bias = np.asarray(tree.bias, np.float64) - weights @ (self.x_center - zero)
        return ObliqueTree(*_in_float32(weights, bias), tree.leaves, self.origin)

    def transform_splits(self, tree: ObliqueTree) -> ObliqueTree:
        """Returns the same splits on scaled features; the leaves are not changed."""
        weights = np.asarray(tree.weights, np.float64)
        zero = 0 if tree.origin is None else np.asarray(tree.origin.x, np.float64)
        bias = np.asarray(tree.bias, np.float64) + weights @ (self.x_center - zero)
        weights = np.where(self.constant, 0, weights * self.x_unit)
        return ObliqueTree(*_in_float32(weights, bias), tree.leaves)

    def restore_leaves(self, leaves: Any) -> Any:
        """Returns the same leaves in the user's units, relative to the origin."""
        if self.y_low is None:  # classes
            return leaves
        x_zero, y_zero = (0, None) if self.origin is None else (self.origin.x, self.origin.y)
        y_zero = 0 if y_zero is None else y_zero
        return leaves.rescaled(self.x_center - x_zero, self.x_unit, self.y_low - y_zero, self.y_unit)

    def restore(self, model: Any) -> Any:
        """Returns a model of scaled data in the user's units; in a tree, splits between equal leaves are merged."""
        if not isinstance(model, ObliqueTree):
            return model.restored(self)
        return self.restore_splits(model).replace(leaves=self.restore_leaves(model.leaves)).merged()


def with_map(model: Any, matrix: Any) -> Any:
    """Returns models of features x from models of ``x @ matrix``, on the host: the matrix is folded into the weights.

    ``model`` is a pytree of models of scaled data: trees, ensembles of trees, and networks. None is returned, and a
    matrix of None is the identity. Raises ``TypeError`` if there is no model that takes features.
    """
    if matrix is None or model is None:
        return model
    is_model = lambda value: hasattr(value, "weights") or hasattr(value, "with_kernels")

    def folded(value: Any) -> Any:
        if hasattr(value, "with_kernels"):
            return value.with_kernels(lambda kernel: np.matmul(matrix, kernel))
        if not hasattr(value, "weights"):
            return value
        leaves = getattr(value, "leaves", None)
        if leaves is not None and not leaves.is_constant:
            axis = np.ndim(value.bias)  # of the features; stacked trees have one axis more
            slopes = np.moveaxis(np.tensordot(matrix, leaves.coefficients, (1, axis)), 0, axis)
            value = value.replace(leaves=leaves.replace(coefficients=slopes))
        return value.replace(weights=np.matmul(value.weights, matrix.T))

    if not any(map(is_model, jax.tree.leaves(model, is_leaf=is_model))):
        raise TypeError(f"a model must have weights or with_kernels to take other features, got {type(model).__name__}")
    return jax.tree.map(folded, model, is_leaf=is_model)


def rows_for_slopes(batch: Batch, limit: Any) -> tuple[Batch, np.ndarray]:
    """Returns the rows that slopes of linear leaves are fitted to, and which of their cells are codes, ``(n, p)`` bool.

    A prediction does not clip features, so slopes must not be fitted to clipped values. If more values of a column are
    clipped than can be outliers, they are codes, and are 0 in the returned rows. A row with an outlier has hardly any
    weight. Its target still extends the range of the outputs. ``batch`` has scaled rows, in NumPy; rows of weight 0
    have no codes or outliers. Features are clipped at the absolute value ``limit``, ``()`` or ``(p,)``.
    """
    weight = ones_or(batch.weight, batch.x)
    used = weight > 0
    clipped = _clipped(batch.x, limit) & used[:, None]
    codes = clipped & (clipped.sum(0) > _rare(int(used.sum())))
    if codes.any():
        batch = batch._replace(x=np.where(codes, 0, batch.x))
    if (outlier := (clipped & ~codes).any(1)).any():
        batch = batch._replace(weight=np.where(outlier, _CLIPPED * weight, weight).astype(np.float32))
    return batch, codes


def _clipped(x: Any, limit: Any) -> np.ndarray:
    """Returns which scaled features are clipped, ``(n, p)`` bool."""
    return (x >= np.float32(limit)) | (x <= -np.float32(limit))


def losses_of(model: Any, table: Table, scaling: Scaling) -> np.ndarray:
    """Returns the loss of a model on each row in double precision, such as squared error or log loss.

    For several targets, the squared error is the mean over targets scaled to [0, 1].
    """
    losses, rows_and_outputs = np.zeros(len(table.x)), (len(table.x), math.prod(table.task.shape))
    for rows in blocking.on_host(*rows_and_outputs):
        predictions = np.asarray(model.predict(table.x[rows]), np.float64)
        losses[rows] = row_losses(table.task, predictions, table.y[rows], scaling)
    return losses


def row_losses(task: tasks.Task, predictions: np.ndarray, y: np.ndarray, scaling: Scaling) -> np.ndarray:
    """Returns the loss of each prediction in the user's units, ``(n,)``. Reports, verdicts and sweeps use no other.

    A user-defined loss is computed on scaled targets. A loss that is not a number is infinite: it is as bad as any.
    """
    if task.in_units:
        losses = task.prediction_loss(predictions, y, scaling.y_unit)
    else:
        scaled = [jnp.asarray(scaling.transform_y(a)) for a in (predictions, y)]
        losses = np.asarray(task.prediction_loss(*scaled), np.float64)
    return np.where(np.isnan(losses), np.inf, losses)


def mean_loss(model: Any, table: Table, scaling: Scaling) -> float:
    """Returns the weighted mean loss of a model."""
    return float(np.average(losses_of(model, table, scaling), weights=table.weight))


class Data(NamedTuple):
    """The data of a search, and the conversion of its result to the user's units.

    Attributes:
      table: the training data, in the user's units.
      validation: the validation set, or None.
      scaling: the scaling fitted on the table.
      batch: the scaled table, in NumPy; None: it is made if linear leaves need it.
    """

    table: Table
    validation: Table | None
    scaling: Scaling
    batch: Any

    @property
    def loss_unit(self) -> float:
        """A scaled loss of 1 in the user's units; 1 for several targets and custom losses, which remain scaled."""
        return self.table.task.loss_unit(self.scaling.y_unit)

    def loss(self, model: Any) -> float:
        """Returns the mean loss of a model in the user's units on ``validation``, else on the training rows."""
        return mean_loss(model, self.table if self.validation is None else self.validation, self.scaling)

    def holding_out(self, rows: np.ndarray) -> "Data":
        """Returns the data without the rows with the given numbers, which are the validation set; ``batch`` is None."""
        training = self.table.rows(np.setdiff1d(np.arange(len(self.table.x)), rows)).normalised()
        return Data(training, self.table.rows(rows), self.scaling, None)

    def refit(
        self,
        splits: ObliqueTree,
        leaves: str,
        *,
        shrink: bool = False,
        strength: float | None = None,
        narrowing: Narrowing | None = None,
    ) -> tuple[ObliqueTree, float]:
        """Returns a tree with leaves fitted to the table, in the user's units, and the criterion of linear leaves.

        Constants and class frequencies are fitted in double precision to the targets in the user's units; their
        criterion is NaN. The leaves of ``splits``, a tree in the user's units, are ignored. ``shrink`` is as for
        :meth:`jtrees.ObliqueTree.refit`, with a ``strength`` or the best by generalised cross-validation. ``narrowing``
        maps to few features for linear leaves, computed from ``rows_for_slopes``; None: it is not known.
        """
        (x, y, weight), task = (self.table.x, self.table.y, self.table.weight), self.table.task
        leaf = np.asarray(splits.leaf_index(x))
        empty = kind_of(leaves, task).empty(len(splits.bias) + 1, x.shape[1], task.shape)
        if not empty.is_constant:
            batch = self.scaling.batch(self.table) if self.batch is None else self.batch
            rows = np.pad(leaf, (0, len(batch.x) - len(x)), mode="edge")
            batch, codes = rows_for_slopes(batch, self.scaling.x_most)
            # A leaf with codes has no slope of their column.
            coded = np.zeros((len(splits.bias) + 1, x.shape[1]), bool)
            if codes.any():
                row, column = np.nonzero(codes)
                coded[rows[row], column] = True
                batch = batch._replace(x=np.where(coded[rows], 0, batch.x))
            fitted, criterion = _refit(empty, rows, batch, narrowing)
            if coded.any():  # a code would multiply rounding errors
                slopes = np.asarray(fitted.coefficients)
                hidden = coded.reshape(*coded.shape, *[1] * (slopes.ndim - 2))
                fitted = fitted.replace(coefficients=np.where(hidden, 0, slopes))
            restored = splits.replace(leaves=self.scaling.restore_leaves(fitted))
            return self.with_common(restored, leaf), float(criterion) * self.loss_unit
        fit = (lambda *rows: empty.refit_shrunk(*rows, strength=strength)[0]) if shrink else empty.refit
        if task.in_units or self.scaling.y_low is None:
            return self.ordered(splits.with_absolute(fit(leaf, x, y, weight)), leaf), np.nan
        scaled = (y - self.scaling.y_low) / self.scaling.y_unit
        restored = splits.replace(leaves=self.scaling.restore_leaves(fit(leaf, x, scaled, weight)))
        return self.ordered(self.with_common(restored, leaf), leaf), np.nan

    def ordered(self, tree: ObliqueTree, leaf: np.ndarray | None = None) -> ObliqueTree:
        """Returns the tree with leaves that satisfy the monotone constraints; ``leaf`` is the leaf of each row."""
        if self.table.monotone is None:
            return tree
        leaf = np.asarray(tree.leaf_index(self.table.x)) if leaf is None else leaf
        weight = segments.sums(ones_or(self.table.weight, self.table.x), leaf, len(tree.bias) + 1)
        on_host = tree.replace(weights=np.asarray(tree.weights), bias=np.asarray(tree.bias))
        on_host = on_host.replace(leaves=tree.leaves.with_outputs(np.asarray))
        monotone = np.not_equal(self.table.monotone, 0)
        return tree.replace(leaves=ordered_leaves(on_host, monotone, weight, self.table.task).leaves)

    def with_common(self, tree: ObliqueTree, leaf: np.ndarray) -> ObliqueTree:
        """Returns a tree of numbers, in the user's units, in which leaves of equal targets predict exactly this target.

        A leaf is changed if all of its targets are equal and its predictions equal the target up to rounding. ``leaf``
        is the leaf of each row of the table.
        """
        y, weight = self.table.y, ones_or(self.table.weight, self.table.y)
        y = y if tree.origin is None or tree.origin.y is None else y - np.asarray(tree.origin.y, np.float64)
        return tree.replace(leaves=tree.leaves.with_common(leaf, y, weight, _ROUNDING * self.scaling.y_unit))

    def moves_clipped(self, scaled: ObliqueTree, tree: ObliqueTree) -> bool:
        """Returns whether a row with a clipped feature reaches another leaf of ``tree`` than in training."""
        x = (self.scaling.batch(self.table) if self.batch is None else self.batch).x[: len(self.table.x)]
        rows = np.flatnonzero(_clipped(x, self.scaling.x_most).any(1))
        if not len(rows):  # which would compile a program
            return False
        return bool(np.any(scaled.leaf_index(x[rows]) != tree.leaf_index(self.table.x[rows])))

    def with_fitted(self, tree: ObliqueTree) -> ObliqueTree:
        """Returns the tree in which leaves that equal the leaves of :meth:`refit` up to rounding are replaced by them.

        Use this method if it is not known whether the leaves were fitted or learnt.
        """
        if not tree.leaves.is_constant:
            return self.with_common(tree, np.asarray(tree.leaf_index(self.table.x)))
        fitted = self.refit(tree, "constant")[0]
        if fitted.leaves.name != tree.leaves.name:
            return tree
        unit = self.scaling.y_unit
        unit = unit if tree.leaves.loss.link in ("identity", "sorted") and unit is not None else 1.0
        old, new = (np.asarray(model.leaves.values, np.float64) for model in (tree, fitted))
        equal = (np.abs(old - new) <= _ROUNDING * unit).reshape(len(old), -1).all(1)
        values = np.where(equal.reshape(-1, *[1] * (old.ndim - 1)), new, old)
        return tree.replace(leaves=fitted.leaves.replace(values=values))


@compilation.jit(often=False)
def _refit(leaves: Any, leaf: jax.Array, batch: Batch, narrowing: Narrowing | None) -> tuple[Any, jax.Array]:
    return leaves.refit_with_criterion(leaf, *batch, narrowing)


def _warn_of_tiny(x: np.ndarray, constant: np.ndarray) -> None:
    """Warns of columns that are treated as constant although they vary in rows of considerable weight."""
    even = np.ones(len(x))
    tiny = [j for j in map(int, constant) if np.ptp(x[:, j]) > 0 and _moments(x[:, j], even, 0.0)[1] < _TINY]
    if tiny:
        which = f"column{'s' if len(tiny) > 1 else ''} {quoted_list(tiny)}"
        message = (
            f"x varies too little in {which}, by less than {_TINY:g}, and is treated as constant there: multiply it"
        )
        distributed.warn(message)


def check_slopes(scaling: Scaling, deviations: float) -> None:
    """Raises ``ValueError`` if slopes of linear leaves in the user's units are outside the range of float32.

    ``deviations`` is the number of deviations in a unit of the scaled features.
    """
    if scaling.y_unit is None:  # the leaves do not hold values in the units of the targets
        return
    varying = np.flatnonzero(~scaling.constant)
    slopes = np.atleast_1d(scaling.y_unit)[:, None] / scaling.x_unit[varying]
    if len(bad := np.argwhere((slopes < _FLATTEST) | (slopes > _STEEPEST))):
        output, column = bad[0][0], varying[bad[0][1]]
        raise ValueError(
            f"x and y must be in units in which linear leaves have slopes that float32 holds, got a range of "
            f"{np.atleast_1d(scaling.y_unit)[output]:.3g} in y and a deviation of "
            f"{scaling.x_unit[column] / deviations:.3g} in column {column} of x: multiply one of them"
        )


def _in_float32(weights: np.ndarray, bias: np.ndarray) -> tuple[Any, Any]:
    """Returns splits in float32. The scale of a split is free: it is chosen within the range of float32."""
    size = np.abs(weights).max(-1)
    unit = np.where((size > 0) & ((size > 1 / _TINY) | (size < _TINY)), size, 1)
    return sharding.from_host(weights / unit[..., None], np.float32), sharding.from_host(bias / unit, np.float32)


def _rare(rows: int) -> int:
    """Returns the largest number of outliers in a column with this number of rows; more values are codes."""
    return max(2, int(_RARE * rows))


def _moments(x: np.ndarray, share: np.ndarray, median: float) -> tuple[float, float, float]:
    """Returns the weighted mean and deviation of a column ``(n,)`` without codes and outliers, and the farthest value.

    Outliers are included if the column is otherwise constant. The farthest value is the largest distance from the mean
    in deviations without codes and outliers. It is infinite if there are no codes.
    """
    x = x.astype(np.float64)
    low, high = _without_codes(x)
    inside = (low <= x) & (x <= high)
    has_codes = not inside.all()
    middle = np.median(x[inside]) if has_codes else median
    x -= middle  # if most rows have the same value, the value is now exactly 0

    def moments(mask: np.ndarray | bool) -> tuple[float, float]:
        part = share * mask
        part /= part.sum()
        mean = part @ x
        return mean, np.sqrt(part @ np.square(x - mean))

    # Outliers are detected by moments without the rare extremes, which would dominate the deviation. The detection is
    # repeated, because a far outlier hides nearer outliers.
    distance, rare = np.abs(x), _rare(len(x))
    remaining = distance[inside]
    while len(remaining) > 2 * rare:
        mean, deviation = moments(inside & (distance <= np.partition(remaining, -1 - rare)[-1 - rare]))
        far = inside & (np.abs(x - mean) > _OUTLIER * deviation)
        if deviation == 0 or not far.any():
            break
        inside &= ~far
        remaining = distance[inside]
    mean, deviation = moments(inside)
    mean, deviation = (mean, deviation) if deviation > 0 else moments(True)
    farthest = np.abs(x[inside] - mean).max() / deviation if has_codes and deviation > 0 else np.inf
    return middle + mean, deviation, farthest


def _may_have_gap(x: np.ndarray, low: float, high: float) -> bool:
    """Returns whether a gap may be an eighth of the range. A histogram takes a tenth of the time of sorting."""
    bins = _BINS_OF_GAP * _MOST_CODES
    width = (high - low) / bins
    if not 0 < width < np.inf:
        return True
    is_used = np.zeros(bins + 1, bool)
    is_used[((x - low) / width).astype(np.int32)] = True
    return bool(np.diff(np.flatnonzero(is_used)).max() > _BINS_OF_GAP - 2)  # two fewer, because of rounding


def _without_codes(x: np.ndarray) -> tuple[float, float]:
    """Returns the smallest and the largest value of a column ``(n,)`` that are not codes, such as 999,999,999.

    Codes may have a large share of the rows, so moments do not show them. They are beyond a gap of more than ``_GAP``
    times the range of the other values. A gap separates two sets of values. The set remains whose values differ more
    often from their most frequent value. There are at most three codes, or one for each eight other values. Means of
    targets, for example, lie close together for each level, and far apart for different levels.
    """
    low, high = x.min(), x.max()
    if not _may_have_gap(x, low, high):
        return low, high
    values, counts = np.unique(x, return_counts=True)
    first, last, inside = 0, len(values) - 1, (0, len(values) - 1)
    while last - first > 1:
        gaps = np.diff(values[first : last + 1])
        after = first + 1 + int(gaps.argmax())
        if gaps[after - first - 1] * _MOST_CODES < values[last] - values[first]:
            break
        varying = [part.sum() - part.max() for part in (counts[first:after], counts[after : last + 1])]
        first, last = (first, after - 1) if varying[0] >= varying[1] else (after, last)
        distance = np.diff(values[max(first - 1, 0) : first + 1]), np.diff(values[last : last + 2])
        codes = len(values) - 1 - (last - first)
        is_far = min(map(np.min, filter(len, distance))) > _GAP * (values[last] - values[first]) > 0
        if is_far and codes <= max(_FEW_CODES, (last - first + 1) // _MOST_CODES):
            inside = first, last
    return values[inside[0]], values[inside[1]]
