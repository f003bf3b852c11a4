"""A table of numbers on its way to a tree: checked, scaled for training; and the tree carried back to its units."""

from functools import partial
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from jtrees import topology, validation as checks
from jtrees.methods.answers import LINEAR, Answer
from jtrees.tree import ConstantLeaves, LinearLeaves, ObliqueTree


@struct.dataclass
class Table:
    """Features, targets (float32, or int32 classes) and weights to learn from."""

    x: np.ndarray
    y: np.ndarray
    weight: np.ndarray | None

    def rows(self, chosen: np.ndarray) -> "Table":
        """Some of the rows."""
        return Table(self.x[chosen], self.y[chosen], None if self.weight is None else _scaled(self.weight[chosen]))


def _scaled(weight: np.ndarray) -> np.ndarray:
    """Weights that sum to the number of equally weighted samples that would tell as much (Kish): whatever takes a
    weight for a number of samples, as cross-validation and smoothing do, then is not too sure.
    """
    weight = weight.astype(np.float64) / weight.max()
    return (weight * weight.sum() / np.square(weight).sum()).astype(np.float32)


def checked_table(
    x: Any, y: Any, sample_weight: Any, task: str, classes: int | None = None
) -> tuple[Table, int | None]:
    """A table fit to learn from, and its number of classes (None in regression); ``ValueError`` if it is not."""
    if task not in ("regression", "classification"):
        raise ValueError(f'task must be "regression" or "classification", got {task!r}')
    if task == "classification":
        x = checks.check_x(x)
        y, classes = checks.check_labels(y, classes)
    else:
        y = checks.as_numeric("y", y)
    x, y = checks.check_xy(x, y)
    weight = None
    if sample_weight is not None:
        weight = np.asarray(checks.check_weight(sample_weight, len(y)), np.float64)
        x, y, weight = np.asarray(x)[weight > 0], np.asarray(y)[weight > 0], _scaled(weight[weight > 0])
    x, y = np.asarray(x, np.float32), np.asarray(y, np.float32 if classes is None else np.int32)
    checks.check_xy(x, y)  # still finite and not constant, in the precision of the tree and among rows with weight
    return Table(x, y, weight), classes


def checked_validation(validation: Any, features: int, classes: int | None) -> Table:
    """A pair (x, y) to judge trees by as a table; ``ValueError`` if it is none, or of another width."""
    try:
        x, y = validation
    except (TypeError, ValueError):
        raise ValueError(f"validation must be a pair (x, y), got {type(validation).__name__}") from None
    try:
        x = np.asarray(checks.check_x(x, features=features), np.float32)
        y = np.asarray(checks.as_numeric("y", y) if classes is None else checks.check_labels(y, classes)[0])
        y = y.astype(np.float32 if classes is None else np.int32)
        checks.check_finite("y", y)
        if y.shape != (len(x),):
            raise ValueError(f"y must have shape ({len(x)},), got {y.shape}")
    except ValueError as error:
        raise ValueError(f"validation: {error}") from None
    return Table(x, y, None)


@struct.dataclass
class Scale:
    """The map of a table to numbers of size one, and of trees back.

    Features become their distance from the mean in units of so many standard deviations. Smallest and largest value,
    which GET's authors scale by, leave the bulk of a heavy-tailed column in a corner that no random hyperplane cuts.
    Targets are scaled to [0, 1], classes not at all.
    """

    x_center: np.ndarray
    x_unit: np.ndarray
    constant: np.ndarray
    y_min: Any
    y_range: Any

    @classmethod
    def of(cls, table: Table, deviations: float) -> "Scale":
        x = table.x.astype(np.float64)
        mean = np.average(x, axis=0, weights=table.weight)
        deviation = np.sqrt(np.average(np.square(x - mean), axis=0, weights=table.weight))
        constant = np.ptp(x, axis=0) == 0
        y_min, y_range = (None, None) if table.y.dtype == np.int32 else (table.y.min(), np.ptp(table.y))
        unit = np.where(constant, 1.0, deviations * deviation)
        return cls(np.where(constant, x[0], mean), unit, constant, y_min, y_range)

    @property
    def y_unit(self) -> float:
        """The user's units of y in one of ours."""
        return 1.0 if self.y_range is None else float(self.y_range)

    def x(self, x: np.ndarray) -> np.ndarray:
        # A column that is constant here teaches nothing: 0, whatever new samples hold there.
        return np.where(self.constant, 0, (x - self.x_center) / self.x_unit).astype(np.float32)

    def y(self, y: np.ndarray) -> np.ndarray:
        return y if self.y_range is None else (y - self.y_min) / self.y_range

    def splits_from_unit(self, tree: ObliqueTree) -> ObliqueTree:
        """The same splits on raw features; leaves as they are."""
        weights = np.asarray(tree.weights, np.float64) / self.x_unit
        weights[..., self.constant] = 0  # scaled, such a column is 0; raw, it might drown the others
        bias = np.asarray(tree.bias) - weights @ self.x_center
        return ObliqueTree(jnp.asarray(weights, jnp.float32), jnp.asarray(bias, jnp.float32), tree.leaves)

    def from_unit(self, tree: ObliqueTree) -> ObliqueTree:
        """A tree, or a batch of trees, with constant leaves, in the user's units."""
        tree = self.splits_from_unit(tree)
        if self.y_range is None:
            return tree
        values = self.y_min + self.y_range * np.asarray(tree.leaves.values, np.float64)
        return tree.replace(leaves=ConstantLeaves(jnp.asarray(values, jnp.float32)))

    def splits_to_unit(self, tree: ObliqueTree) -> ObliqueTree:
        """The same splits on scaled features; leaves as they are."""
        weights = np.asarray(tree.weights, np.float64)
        bias = np.asarray(tree.bias) + weights @ self.x_center
        weights = weights * self.x_unit
        return ObliqueTree(jnp.asarray(weights, jnp.float32), jnp.asarray(bias, jnp.float32), tree.leaves)

    def refitted(self, kind: Answer, tree: ObliqueTree, table: Table) -> ObliqueTree:
        """A tree on raw features with its leaves set from its routing, in the user's units."""
        num = topology.num_leaves(tree.depth)
        leaf = np.asarray(tree.leaf_index(table.x))
        if kind is not LINEAR:
            return tree.replace(leaves=_fit_leaves(leaf, table.x, table.y, table.weight, kind=kind, num=num))
        # Fitted on scaled data, where squares neither vanish nor overflow, and carried over.
        unit = _fit_leaves(leaf, self.x(table.x), self.y(table.y), table.weight, kind=kind, num=num)
        slopes, intercept, lower, upper = (
            np.asarray(a, np.float64) for a in (unit.coefficients, unit.intercept, unit.lower, unit.upper)
        )
        slopes = slopes * (self.y_unit / self.x_unit)
        raw = lambda value: self.y_min + self.y_unit * value
        moved = slopes, raw(intercept) - slopes @ self.x_center, raw(lower), raw(upper)
        return tree.replace(leaves=LinearLeaves(*(jnp.asarray(a, jnp.float32) for a in moved)))


def losses_of(tree: ObliqueTree, table: Table) -> np.ndarray:
    """Loss of a hard tree on each sample, in float64."""
    outputs = np.asarray(tree.predict(table.x), np.float64)
    if table.y.dtype == np.int32:
        return -np.log(outputs[np.arange(len(table.y)), table.y])
    return (outputs - table.y) ** 2


def mean_loss(tree: ObliqueTree, table: Table) -> float:
    """Mean loss of a hard tree, by weight."""
    return float(np.average(losses_of(tree, table), weights=table.weight))


@partial(jax.jit, static_argnames=("kind", "num"))
def _fit_leaves(leaf, x, y, weight, *, kind, num):
    return kind.fit(leaf, x, y, num, sample_weight=weight)
