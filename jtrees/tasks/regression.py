"""Regression: one target or several, with any loss of numbers."""

import dataclasses
from typing import Any

import numpy as np

from jtrees import io, validation as checks
from jtrees.tasks.base import Loss
from jtrees.tasks.custom import named
from jtrees.tasks.errors import SquaredError
from jtrees.tasks.task import Task


@io.part
@dataclasses.dataclass(frozen=True, repr=False)
class Regression(Task):
    """Regression, by default with squared error.

    Args:
      outputs: number of targets, for y of shape ``(n, outputs)``. None: one target, and y is ``(n,)``.
      loss_function: a loss of :mod:`jtrees.losses`, its name, such as ``"poisson"``, or a function ``(outputs, y) ->
        (n,)`` of scaled targets. :class:`jtrees.losses.Quantile` with several levels predicts ``(n, levels)``.

    Raises:
      ValueError: if ``outputs`` is not None or an integer of at least 1, if the loss is unknown, or if there are
        several levels and several targets.
    """

    outputs: int | None = None
    loss_function: Loss = SquaredError()

    def __post_init__(self) -> None:
        if self.outputs is not None:
            checks.check_count("outputs", self.outputs)
        object.__setattr__(self, "loss_function", named(self.loss_function))
        if self.outputs is not None and self.loss_function.outputs is not None:
            raise ValueError(f"outputs must be None for {self.loss_function}, got {checks.quoted(self.outputs)}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the outputs for one sample: ``()`` or ``(outputs,)``."""
        count = self.loss_function.outputs if self.outputs is None else self.outputs
        return () if count is None else (count,)

    @property
    def is_least_squares(self) -> bool:
        """Whether the loss is the squared error."""
        return isinstance(self.loss_function, SquaredError)

    def scaled(self, unit: Any) -> "Regression":
        return dataclasses.replace(self, loss_function=self.loss_function.scaled(unit))

    def check(self, y: Any) -> None:
        shape = () if self.outputs is None else (self.outputs,)
        if y.shape[1:] != shape:
            columns = "(n,)" if self.outputs is None else f"(n, {self.outputs})"
            repair = f"Regression(outputs={y.shape[1]})" if y.ndim == 2 else "Regression()"
            raise ValueError(f"y must have shape {columns} for {self}, got shape {y.shape}: use {repair}")

    def targets(self, y: Any, n: int) -> np.ndarray:
        y = np.asarray(checks.check_targets(y, n)).astype(np.float64, order="C")
        self.check(y)
        self.loss_function.check_training(y)
        return y

    def held_out_targets(self, y: Any, n: int) -> np.ndarray:
        y, shape = checks.as_finite("y", y), (n,) if self.outputs is None else (n, self.outputs)
        if y.shape != shape:
            raise ValueError(f"y must have shape {shape}, got {y.shape}")
        self.loss_function.check(y)
        return y

    def varies(self, y: np.ndarray) -> bool:
        return bool(np.ptp(y, axis=0).all())

    def prediction_loss(self, predictions: Any, y: Any, unit: Any = 1.0) -> Any:
        if not self.in_units:
            return self.loss(predictions, y)
        loss = self.loss_function
        values = loss.of_predictions(predictions, loss.with_output_axis(y)).reshape(len(y), -1)
        return (values if np.size(unit) == 1 else values / np.power(unit, loss.unit_exponent())).mean(1)

    def loss_unit(self, unit: Any) -> float:
        if np.size(unit) > 1 or not self.in_units:
            return 1.0
        return float(np.sum(unit)) ** self.loss_function.unit_exponent()

    def score(self, predictions: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> float:
        """Returns 1 minus the ratio of the loss to the loss of the best constant, averaged over targets.

        This is R^2 for the squared error and for a user-defined loss. NaN if a column of y is constant.
        """
        if weight is not None:
            predictions, y, weight = (a[weight > 0] for a in (predictions, y, weight))
        if not self.varies(y):
            return float("nan")
        loss = self.loss_function if self.in_units else SquaredError()
        mean = lambda predictions: np.average(
            loss.of_predictions(predictions, loss.with_output_axis(y)), axis=0, weights=weight
        )
        return float(np.mean(1 - mean(predictions) / mean(loss.best(y, weight))))

    def indicators(self, y: np.ndarray) -> np.ndarray:
        return y.reshape(len(y), -1)
