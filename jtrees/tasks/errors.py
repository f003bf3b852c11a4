"""Losses of errors with an identity link: squared, absolute and Huber losses, and pinball losses of quantiles."""

import dataclasses
import itertools
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from jtrees import io, segments
from jtrees.segments import Array, module_of
from jtrees.tasks.base import Link, Loss
from jtrees.tasks.fits import constant_fit_error, fit_constant, newton_constants, uniform_targets, weighted_quantiles
from jtrees.validation import check_scalar, quoted


@io.part
@dataclasses.dataclass(frozen=True)
class SquaredError(Loss):
    """Squared error ``(outputs - y)^2``. The best constant is the mean.

    Leaves hold means. As in GET, a leaf without samples holds the mid-range of the targets.
    """

    measure: ClassVar[str] = "mean squared error"
    kernel: ClassVar[str] = "squared"  # type: ignore[override]

    def unit_exponent(self) -> float:
        return 2.0

    def of_predictions(self, predictions: Any, y: Any) -> Any:
        error = predictions - y
        return error * error

    def derivatives(self, outputs: Array, y: Array) -> tuple[Array, Array]:
        return 2 * (outputs - y), jnp.full_like(outputs, 2)

    def constants(self, leaf_index: Array, y: Array, num_leaves: int, weight: Array) -> Array:
        return segments.means(leaf_index, y, num_leaves, weight)

    def start(self, key: Array, y: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        return uniform_targets(key, shape[0], y, dtype)

    def fitted(self, values: Array, leaf_index: Array, y: Array, sample_weight: Array | None) -> Array:
        return fit_constant(leaf_index, y, len(values), sample_weight=sample_weight)

    def criterion(self, values: Array, leaf_index: Array, y: Array, sample_weight: Array | None) -> Array:
        return constant_fit_error(leaf_index, y, len(values), sample_weight=sample_weight)

    def mean_terms(self, values: Array, y: Array) -> Array:
        return y


@io.part
@dataclasses.dataclass(frozen=True)
class AbsoluteError(Loss):
    """Absolute error ``|outputs - y|``. The best constant is the median."""

    measure: ClassVar[str] = "mean absolute error"
    smooth: ClassVar[bool] = False

    def of_predictions(self, predictions: Any, y: Any) -> Any:
        return abs(predictions - y)

    def derivatives(self, outputs: Array, y: Array) -> tuple[Array, Array]:
        return jnp.sign(outputs - y), jnp.ones_like(outputs)

    def constants(self, leaf_index: Array, y: Array, num_leaves: int, weight: Array) -> Array:
        return _quantile_columns(leaf_index, y, num_leaves, 0.5, weight)


def _quantile_columns(leaf_index: Array, y: Array, num_leaves: int, level: float, weight: Array) -> Array:
    """Returns a quantile of the targets in each leaf, and for ``(n, k)`` targets in each column."""
    quantile = lambda column: weighted_quantiles(leaf_index, column, num_leaves, (level,), sample_weight=weight)[:, 0]
    return quantile(y) if y.ndim == 1 else module_of(y).stack([quantile(column) for column in y.T], axis=1)


@io.part
@dataclasses.dataclass(frozen=True)
class Huber(Loss):
    """Huber loss: ``e^2 / 2`` if ``|e| <= delta``, else ``delta (|e| - delta / 2)``, for errors e (Huber 1964).

    Args:
      delta: a number above 0, in the units of the targets.

    Raises:
      ValueError: for a delta that is not above 0.
    """

    delta: float = 1.0

    measure: ClassVar[str] = "Huber loss"
    smooth: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "delta", check_scalar("delta", self.delta, above=0))

    def unit_exponent(self) -> float:
        return 2.0

    def scaled(self, unit: Any) -> "Huber":
        if np.size(unit) > 1:
            raise ValueError(
                f"loss must be of one target, because delta is in the units of the target, got {np.size(unit)} targets"
            )
        return Huber(float(self.delta / np.reshape(unit, ())))

    def of_predictions(self, predictions: Any, y: Any) -> Any:
        xp = module_of(predictions)
        error = abs(predictions - y)
        inside = xp.minimum(error, self.delta)
        return inside * inside / 2 + self.delta * (error - inside)

    def derivatives(self, outputs: Array, y: Array) -> tuple[Array, Array]:
        error = outputs - y
        return error.clip(-self.delta, self.delta), (abs(error) <= self.delta).astype(outputs.dtype)

    def constants(self, leaf_index: Array, y: Array, num_leaves: int, weight: Array) -> Array:
        start = _quantile_columns(leaf_index, y, num_leaves, 0.5, weight)
        values = newton_constants(self.samples, self.derivatives, start, leaf_index, y, weight)
        return values if module_of(start) is not np else segments.common(leaf_index, y, weight, values)


@io.part
@dataclasses.dataclass(frozen=True)
class Quantile(Loss):
    """Pinball losses ``max(level e, (level - 1) e)`` of errors ``e = y - outputs`` (Koenker & Bassett 1978).

    The best constants are quantiles. Predictions for several levels are ``(n, levels)`` and never cross. Predictions
    that could cross are sorted, and sorting does not raise the loss (Chernozhukov, Fernandez-Val & Galichon 2010).

    Args:
      levels: a number above 0 and below 1, or several increasing numbers.

    Raises:
      ValueError: for levels outside (0, 1), or levels that do not increase.

    Example:
      >>> loss, leaf, y = jtrees.losses.Quantile((0.1, 0.9)), jnp.zeros(5, int), jnp.array([1.0, 2.0, 3.0, 4.0, 9.0])
      >>> print(loss.constants(leaf, y, 1, jnp.ones(5)))
      [[1. 9.]]
    """

    levels: float | tuple[float, ...] = 0.5

    measure: ClassVar[str] = "pinball loss"
    smooth: ClassVar[bool] = False

    def __post_init__(self) -> None:
        levels: Any = self.levels
        several = np.ndim(levels) == 1
        if np.ndim(levels) > 1 or (several and len(levels) == 0):
            raise ValueError(f"levels must be a number, or several, got {quoted(levels)}")
        check = lambda level: check_scalar("levels", level, above=0, below=1)
        object.__setattr__(self, "levels", tuple(map(check, levels)) if several else check(levels))
        if several and any(b <= a for a, b in itertools.pairwise(levels)):
            raise ValueError(f"levels must increase, got {quoted(tuple(levels))}")

    @property
    def link(self) -> Link:  # type: ignore[override]
        """Name of the link: values of several levels are sorted."""
        return "identity" if self.outputs is None else "sorted"

    @property
    def outputs(self) -> int | None:
        """Number of levels; None for a single level."""
        return len(self.levels) if isinstance(self.levels, tuple) else None

    def of_predictions(self, predictions: Any, y: Any) -> Any:
        xp = module_of(predictions)
        error, level = y - predictions, self._levels(predictions)
        return xp.maximum(level * error, (level - 1) * error)

    def _levels(self, like: Any) -> Any:
        return module_of(like).asarray(self.levels, like.dtype)

    def derivatives(self, outputs: Array, y: Array) -> tuple[Array, Array]:
        gradient = (outputs >= self.with_output_axis(y)).astype(outputs.dtype) - self._levels(outputs)
        return gradient, jnp.ones_like(outputs)

    def constants(self, leaf_index: Array, y: Array, num_leaves: int, weight: Array) -> Array:
        if self.outputs is None:
            return _quantile_columns(leaf_index, y, num_leaves, self.levels, weight)  # type: ignore[arg-type]
        levels: Any = self.levels
        if y.ndim == 1:
            return weighted_quantiles(leaf_index, y, num_leaves, levels, sample_weight=weight)
        columns = zip(y.T, levels, strict=True)
        quantiles = [_quantile_columns(leaf_index, column, num_leaves, level, weight) for column, level in columns]
        return module_of(y).stack(quantiles, axis=1)
