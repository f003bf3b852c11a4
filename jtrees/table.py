"""A table of numbers on its way to a model: checked, scaled and padded for training; and trees carried back."""

import math
from typing import Any
import warnings

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from jtrees import sharding, tasks, validation as checks
from jtrees.training import Batch
from jtrees.tree import ObliqueTree, Origin, counted_from

# Deviations from zero, beyond which a column is counted from its mean: float32 would lose three bits and more.
_FAR = 8.0
# Deviations from the mean, beyond which a value tells nothing of the others and is taken for this far away. Of 24 real
# sets one has such a value, one of them; at 30 deviations the tails of several are cut off, and with them what they
# tell.
_OUTLIER = 100.0
_RARE = 1e-3  # part of a column that outliers can be at once, or two values
_TINY = 1e-30  # a deviation that squares and quotients in float32 could not bear


@struct.dataclass
class Table:
    """Samples to learn from or to judge by.

    Attributes:
      x: features, ``(n, p)``.
      y: targets, ``(n,)`` or ``(n, k)``, or classes in int32.
      weight: nonnegative weights, ``(n,)``, of which only the ratios matter; None: all alike. Rows of weight 0 are
        padding.
      task: what is predicted.
    """

    x: Any
    y: Any
    weight: Any
    task: tasks.Task = struct.field(pytree_node=False)

    @property
    def batch(self) -> Batch:
        """As training takes it."""
        return Batch(self.x, self.y, self.weight)

    def rows(self, chosen: Any) -> "Table":
        """Some of the rows."""
        return Table(self.x[chosen], self.y[chosen], None if self.weight is None else self.weight[chosen], self.task)

    def real(self) -> "Table":
        """The table in NumPy without padding."""
        table = Table(np.asarray(self.x), np.asarray(self.y), self.weight, self.task)
        return table if self.weight is None else table.rows(np.asarray(self.weight) > 0)


def bucket(n: int) -> int:
    """The number of rows that n are padded to: at most a sixteenth more, and at least 32.

    So that tables of nearly the same length, the folds of a cross-validation above all, share one compiled program; and
    a multiple of the parts in which devices share rows, if they do.
    """
    step = math.lcm(max(1, 2 ** (n.bit_length() - 5)), sharding.parts())
    return -(-max(32, n) // step) * step


def checked_table(x: Any, y: Any, sample_weight: Any, task: str | tasks.Task) -> Table:
    """A table fit to learn from; rows of weight 0 are left out.

    Raises:
      ValueError: if it is not, naming the argument, what was expected and what came.
    """
    x = _rows(checks.check_x(x))
    if y is None:
        raise ValueError("y must hold the targets to learn, got None")
    task, y = tasks.checked_targets(task, y, len(x))
    weight = None
    if sample_weight is not None:
        weight = np.asarray(checks.check_weight(sample_weight, len(x)), np.float64)
        x, y, weight = x[weight > 0], y[weight > 0], weight[weight > 0] / weight.max()
        if not task.varies(y):
            checks.check_targets(y, len(x))  # says which column is constant
    table = Table(x, y, weight, task)
    _check_range(table)
    return table


def checked_judge(validation: Any, table: Table) -> Table:
    """A pair (x, y) to judge by, as a table like the one that is learnt from.

    Raises:
      ValueError: if it is none, or of another width.
    """
    try:
        x, y = validation
    except (TypeError, ValueError):
        raise ValueError(f"validation must be a pair (x, y), got {type(validation).__name__}") from None
    try:
        x = _rows(checks.check_x(x, features=table.x.shape[1]))
        judge = Table(x, table.task.held_out_targets(y, len(x)), None, table.task)
        _check_range(judge)
        return judge
    except ValueError as error:
        raise ValueError(f"validation: {error}") from None


def _rows(x: Any) -> np.ndarray:
    """Features row by row, as numbers of this machine: sums round alike, however x lay in memory."""
    x = np.asarray(x)
    return np.ascontiguousarray(x, x.dtype.newbyteorder("=") if x.dtype.kind == "f" else np.float64)


def _check_range(table: Table) -> None:
    """Finite in the precision of the trees, too."""
    for name, values in (("x", table.x), ("y", table.y)):
        if values.dtype.itemsize > 4 and (large := np.abs(values).max()) > np.finfo(np.float32).max:
            raise ValueError(f"{name} must be within the range of float32, got {large:.3g}")


# --- Units -----------------------------------------------------------------------------------------------------------


@struct.dataclass
class Scale:
    """The map of a table to numbers of size one, and of trees back.

    Features become their distance from the mean in units of so many standard deviations. Smallest and largest value,
    which GET's authors scale by, leave the bulk of a heavy-tailed column in a corner that no random hyperplane cuts.
    Targets are scaled to [0, 1], each column by itself, classes not at all. What is subtracted is subtracted in double
    precision.

    Attributes:
      x_center: ``(p,)``.
      x_unit: ``(p,)``.
      x_most: how far from 0 a scaled feature can be; those beyond are taken for so far.
      constant: columns that teach nothing, ``(p,)`` bool.
      y_low: least target, ``()`` or ``(k,)``; None for classes.
      y_unit: range of the targets, likewise.
      origin: where trees count from, or None.
    """

    x_center: np.ndarray
    x_unit: np.ndarray
    x_most: float
    constant: np.ndarray
    y_low: Any
    y_unit: Any
    origin: Origin | None

    @classmethod
    def of(cls, table: Table, deviations: float) -> "Scale":
        """The scale of a table, its features in units of so many standard deviations."""
        table = table.real()
        share = np.ones(len(table.x)) if table.weight is None else table.weight
        mean, deviation = np.transpose([_mean_and_deviation(column, share) for column in table.x.T])
        _warn_of_tiny(table.x, np.flatnonzero(deviation < _TINY))
        low, unit, y_mean = (None,) * 3
        if isinstance(table.task, tasks.Regression):
            low, unit, y_mean = table.y.min(0), np.ptp(table.y, axis=0), table.y.mean(0)
        return cls.by(mean, deviation, deviations, low, unit, y_mean)

    @classmethod
    def by(cls, mean: Any, deviation: Any, deviations: float, y_low: Any, y_unit: Any, y_mean: Any) -> "Scale":
        """The scale with this mean and deviation of features, and this least value, unit and mean of targets."""
        constant = deviation < _TINY
        center, unit = np.where(constant, 0, mean), np.where(constant, 1, deviations * deviation)
        x_zero: Any = np.where(np.abs(center) > _FAR * deviation, center, 0).astype(np.float32)
        y_zero: Any = None if y_mean is None else np.where(np.abs(y_mean) > _FAR * y_unit, y_mean, 0).astype(np.float32)
        origin = Origin(x_zero, y_zero) if x_zero.any() or (y_zero is not None and y_zero.any()) else None
        return cls(center, unit, _OUTLIER / deviations, constant, y_low, y_unit, origin)

    def enter(self, x: Any) -> Any:
        """Features of size one, in float32; JAX arrays in the precision that they come in."""
        zero = np.float32(0) if self.origin is None else self.origin.x
        x = counted_from(zero, x)
        xp: Any = jnp if isinstance(x, jax.Array) else np
        center, unit = (xp.asarray(a, x.dtype) for a in (self.x_center - zero, self.x_unit))
        # A column that is constant here teaches nothing: 0, whatever new samples hold there.
        scaled = xp.where(self.constant, 0, (x - center) / unit)
        return xp.clip(scaled, -self.x_most, self.x_most).astype(np.float32)

    def y(self, y: Any) -> np.ndarray:
        """Targets in [0, 1], in float32, or classes as they are."""
        return y if self.y_low is None else ((y - self.y_low) / self.y_unit).astype(np.float32)

    def leave(self, outputs: Any) -> Any:
        """What a model answers on scaled targets, in the user's units."""
        if self.y_low is None:
            return outputs
        xp, dtype = (jnp, outputs.dtype) if isinstance(outputs, jax.Array) else (np, np.float64)
        low, unit = (xp.asarray(a, dtype) for a in (self.y_low, self.y_unit))
        return low + unit * xp.asarray(outputs, dtype)

    @property
    def loss_unit(self) -> float:
        """The user's units of loss in one of ours; for several targets, whose units differ, losses stay scaled."""
        return 1.0 if self.y_low is None or np.size(self.y_unit) > 1 else float(np.sum(self.y_unit)) ** 2

    def unit(self, table: Table) -> Table:
        """The table scaled, and padded by its last row with weight 0."""
        n = len(table.x)
        pad = lambda a: np.pad(a, [(0, bucket(n) - n)] + [(0, 0)] * (a.ndim - 1), mode="edge")
        weight = np.ones(n) if table.weight is None else table.weight
        weight = np.pad(weight.astype(np.float32), (0, bucket(n) - n))
        return Table(pad(self.enter(table.x)), pad(self.y(table.y)), weight, table.task)

    def splits_from_unit(self, tree: ObliqueTree, origin: Any = "own") -> ObliqueTree:
        """The same splits on raw features, counted from the scale's origin or from another; leaves as they are."""
        origin = self.origin if isinstance(origin, str) else origin
        # Scaled, a constant column is 0; raw, it might drown the others.
        weights = np.where(self.constant, 0, np.asarray(tree.weights, np.float64) / self.x_unit)
        zero = 0 if origin is None else np.asarray(origin.x, np.float64)
        bias = np.asarray(tree.bias, np.float64) - weights @ (self.x_center - zero)
        size = np.abs(weights).max(-1)
        # A split is the same in any unit: one that float32 holds.
        unit = np.where((size > 0) & ((size > 1 / _TINY) | (size < _TINY)), size, 1)
        weights, bias = (jnp.asarray(a, jnp.float32) for a in (weights / unit[..., None], bias / unit))
        return ObliqueTree(weights, bias, tree.leaves, origin)

    def splits_to_unit(self, tree: ObliqueTree) -> ObliqueTree:
        """The same splits on scaled features; leaves as they are."""
        weights = np.asarray(tree.weights, np.float64)
        zero = 0 if tree.origin is None else np.asarray(tree.origin.x, np.float64)
        bias = np.asarray(tree.bias, np.float64) + weights @ (self.x_center - zero)
        weights = np.where(self.constant, 0, weights * self.x_unit)
        return ObliqueTree(jnp.asarray(weights, jnp.float32), jnp.asarray(bias, jnp.float32), tree.leaves)

    def leaves_from_unit(self, leaves: Any) -> Any:
        """The same leaves on raw features, answering in the user's units, both counted from the origin."""
        if self.y_low is None:  # classes
            return leaves
        x_zero, y_zero = (0, 0) if self.origin is None else (self.origin.x, self.origin.y)
        return leaves.rescaled(self.x_center - x_zero, self.x_unit, self.y_low - y_zero, self.y_unit)

    def from_unit(self, tree: ObliqueTree) -> ObliqueTree:
        """A tree in the user's units; splits whose leaves are equal are merged."""
        return self.splits_from_unit(tree).replace(leaves=self.leaves_from_unit(tree.leaves)).merged()

    def refitted(self, splits: ObliqueTree, leaves: Any, table: Table) -> tuple[ObliqueTree, float]:
        """A tree on raw features with its leaves set from its own routing of a table, and what they are chosen by.

        Args:
          splits: the tree, on raw features; its leaves are not looked at.
          leaves: of the kind to set.
          table: in the user's units.

        Returns:
          The tree in the user's units, and the criterion of its leaves in the user's units of loss.
        """
        unit = self.unit(table)
        leaf = np.pad(np.asarray(splits.leaf_index(table.x)), (0, len(unit.x) - len(table.x)), mode="edge")
        fitted, criterion = _refit(leaves, leaf, unit.batch)
        return splits.replace(leaves=self.leaves_from_unit(fitted)), float(criterion) * self.loss_unit


@jax.jit
def _refit(leaves: Any, leaf: jax.Array, batch: Batch) -> tuple[Any, jax.Array]:
    return leaves.refit(leaf, *batch), leaves.criterion(leaf, *batch)


def losses_of(model: Any, table: Table, scale: Scale) -> np.ndarray:
    """Loss of a model on each sample, in double precision: squared error (of several targets the mean, on targets
    scaled to [0, 1]), or log loss.
    """
    outputs = np.asarray(model.predict(table.x), np.float64)
    return table.task.host_losses(outputs, table.y, scale.y_unit)


def mean_loss(model: Any, table: Table, scale: Scale) -> float:
    """Mean loss of a model, by weight."""
    return float(np.average(losses_of(model, table, scale), weights=table.weight))


def _warn_of_tiny(x: np.ndarray, constant: np.ndarray) -> None:
    """Of columns, by number, that are taken for constant although they vary, and not in rows of hardly any weight."""
    even = np.ones(len(x))
    tiny = [str(j) for j in constant if np.ptp(x[:, j]) > 0 and _mean_and_deviation(x[:, j], even)[1] < _TINY]
    if tiny:
        which = f"column{'s' if len(tiny) > 1 else ''} {', '.join(tiny)}"
        message = (
            f"x varies too little in {which}, by less than {_TINY:g}, and is taken for constant there: multiply it"
        )
        warnings.warn(message, stacklevel=3)


def _mean_and_deviation(x: np.ndarray, share: np.ndarray) -> tuple[float, float]:
    """Of a column ``(n,)`` by weight, without its outliers, unless they are all that varies in it."""
    x = x.astype(np.float64)
    middle = np.median(x)
    x -= middle  # what most rows hold alike is now exactly 0

    def moments(of: np.ndarray | bool) -> tuple[float, float]:
        part = share * of
        part /= part.sum()
        mean = part @ x
        return mean, np.sqrt(part @ np.square(x - mean))

    # Whether a value is an outlier is asked of the others: one of few makes nearly all of the deviation. A far one
    # hides nearer ones, so again and again.
    distance, rare = np.abs(x), max(2, int(_RARE * len(x)))
    inside, left = np.ones(len(x), bool), distance
    while len(left) > 2 * rare:
        mean, deviation = moments(inside & (distance <= np.partition(left, -1 - rare)[-1 - rare]))
        far = inside & (np.abs(x - mean) > _OUTLIER * deviation)
        if deviation == 0 or not far.any():
            break
        inside &= ~far
        left = distance[inside]
    mean, deviation = moments(inside)
    mean, deviation = (mean, deviation) if deviation > 0 else moments(True)
    return middle + mean, deviation
