"""Tasks: what is predicted and how it is scored. A task checks targets, and has the losses, the link and scores.

A model computes ``outputs`` and returns ``predictions = link(outputs)``: class probabilities for logits, the outputs
themselves in regression.
"""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float, Int, Num
import numpy as np
import optax

from jtrees import io, losses, validation as checks


@io.part
@dataclasses.dataclass(frozen=True)
class Regression:
    """Regression with squared error.

    Args:
      outputs: number of targets, for y of shape ``(n, outputs)``; None: one target, y is ``(n,)``.
      own_loss: user-defined loss ``(outputs, y) -> (n,)`` in place of squared error, on scaled targets.

    Raises:
      ValueError: unless ``outputs`` is None or an integer of at least 1.
    """

    outputs: int | None = None
    own_loss: losses.SampleLoss | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.outputs is not None:
            checks.check_count("outputs", self.outputs)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the outputs for one sample: ``()`` or ``(outputs,)``."""
        return () if self.outputs is None else (self.outputs,)

    def check(self, y: Any) -> None:
        """Raises ``ValueError`` for training targets, possibly traced, of another shape."""
        if y.shape[1:] != self.shape:
            columns = "(n,)" if self.outputs is None else f"(n, {self.outputs})"
            repair = f"Regression(outputs={y.shape[1]})" if y.ndim == 2 else "Regression()"
            raise ValueError(f"y must have shape {columns} for {self}, got shape {y.shape}: use {repair}")

    def targets(self, y: Any, n: int) -> np.ndarray:
        """Returns the checked training targets of n samples, in float64.

        Raises:
          ValueError: for another shape, values that are not finite, fewer than two samples, or constant targets.
        """
        y = np.asarray(checks.check_targets(y, n)).astype(np.float64, order="C")
        self.check(y)
        return y

    def held_out_targets(self, y: Any, n: int) -> np.ndarray:
        """Returns the checked evaluation targets of n samples: as :meth:`targets`, but they may be constant.

        Raises:
          ValueError: for another shape, or values that are not finite.
        """
        y = np.asarray(checks.as_numeric("y", y)).astype(np.float64, order="C")
        checks.check_finite("y", y)
        if y.shape != (n, *self.shape):
            raise ValueError(f"y must have shape {(n, *self.shape)}, got {y.shape}")
        return y

    def varies(self, y: np.ndarray) -> bool:
        """Whether no column of targets is constant."""
        return bool(np.ptp(y, axis=0).all())

    def loss(self, outputs: Float[Array, "n *k"], y: Num[Array, "n *k"]) -> Float[Array, " n"]:
        """Squared error of each sample, of several targets the mean; or the user-defined loss."""
        return losses.squared_error(outputs, y) if self.own_loss is None else losses.own_loss(self.own_loss, outputs, y)

    def prediction_loss(self, predictions: Float[Array, "n *k"], y: Num[Array, "n *k"]) -> Float[Array, " n"]:
        """Squared error of each sample; of several targets the mean."""
        return losses.squared_error(predictions, y)

    def link(self, outputs: Float[Array, "n *k"]) -> Float[Array, "n *k"]:
        """The identity."""
        return outputs

    def host_losses(self, predictions: np.ndarray, y: np.ndarray, unit: Any) -> np.ndarray:
        """Squared error of each sample in double precision; of several targets the mean, on targets divided by
        ``unit``.
        """
        error = np.square(predictions - y).reshape(len(y), -1)
        return (error if error.shape[1] == 1 else error / np.square(unit)).mean(1)

    def score(self, predictions: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> float:
        """R^2, of several targets the mean; NaN where y is constant."""
        if not self.varies(y):
            return float("nan")
        mean = lambda a: np.average(a, axis=0, weights=weight)
        return float(np.mean(1 - mean(np.square(y - predictions)) / mean(np.square(y - mean(y)))))

    def indicators(self, y: np.ndarray) -> np.ndarray:
        """Targets of a linear model: y as ``(n, k)``."""
        return y.reshape(len(y), -1)


@io.part
@dataclasses.dataclass(frozen=True)
class Classification:
    """Classification with log loss.

    Args:
      classes: number of classes K; y holds classes 0..K-1, outputs are logits ``(n, K)``, predictions probabilities.
      own_loss: user-defined loss ``(outputs, y) -> (n,)`` in place of log loss.

    Raises:
      ValueError: for fewer than two classes.
    """

    classes: int
    own_loss: losses.SampleLoss | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        checks.check_count("classes", self.classes, minimum=2)

    @property
    def outputs(self) -> int:
        """Number of outputs of a sample, one for each class."""
        return self.classes

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the outputs for one sample: ``(classes,)``."""
        return (self.classes,)

    def check(self, y: Any) -> None:
        """Raises ``ValueError`` for training labels, possibly traced, that are not integers 0..K-1."""
        checks.check_classes(y, self.classes)

    def targets(self, y: Any, n: int) -> np.ndarray:
        """Returns the checked training labels of n samples, in int32; classes may be absent.

        Raises:
          ValueError: for labels that are not 0..K-1, or another number of them.
        """
        y = checks.check_labels(y, self.classes)[0]
        checks.check_rows(y, n)
        return y

    def held_out_targets(self, y: Any, n: int) -> np.ndarray:
        """Returns the checked evaluation labels of n samples.

        Raises:
          ValueError: for labels that are not 0..K-1, or another number of them.
        """
        y = checks.check_labels(y, self.classes)[0]
        if y.shape != (n,):
            raise ValueError(f"y must have shape {(n,)}, got {y.shape}")
        return y

    def varies(self, y: np.ndarray) -> bool:
        """True, as class frequencies can be fitted to labels of a single class."""
        return True

    def loss(self, outputs: Float[Array, "n k"], y: Int[Array, " n"]) -> Float[Array, " n"]:
        """Log loss of logits on each sample; or the user-defined loss."""
        if self.own_loss is not None:
            return losses.own_loss(self.own_loss, outputs, y)
        return optax.losses.softmax_cross_entropy_with_integer_labels(outputs, y)

    def prediction_loss(self, predictions: Float[Array, "n k"], y: Int[Array, " n"]) -> Float[Array, " n"]:
        """Log loss of probabilities on each sample."""
        return losses.log_loss(predictions, y)

    def link(self, outputs: Float[Array, "n k"]) -> Float[Array, "n k"]:
        """Softmax of the logits."""
        return jax.nn.softmax(outputs, axis=1)

    def host_losses(self, predictions: np.ndarray, y: np.ndarray, unit: Any) -> np.ndarray:
        """Log loss of each sample in double precision; probabilities are at least float32's smallest normal number."""
        return -np.log(np.maximum(predictions[np.arange(len(y)), y], np.finfo(np.float32).tiny))

    def score(self, predictions: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> float:
        """Accuracy."""
        return float(np.average(predictions.argmax(1) == y, weights=weight))

    def indicators(self, y: np.ndarray) -> np.ndarray:
        """Targets of a linear model: one-hot encoded classes, ``(n, K)``."""
        return np.eye(self.classes)[y]


Task = Regression | Classification


def with_loss(task: Task, loss: losses.SampleLoss | None) -> Task:
    """Returns the task with a user-defined loss, ``(outputs, y) -> (n,)``; unchanged for None.

    Raises:
      ValueError: unless the loss is a function.
    """
    if loss is None:
        return task
    if not callable(loss):
        raise ValueError(f"loss must be a function (outputs, y) -> (n,), got {loss!r}")
    return dataclasses.replace(task, own_loss=loss)


def checked_targets(task: str | Task, y: Any, n: int) -> tuple[Task, np.ndarray]:
    """Returns the task, and the checked training targets of n samples.

    Args:
      task: a task; or ``"regression"`` or ``"classification"``, whose outputs or classes are inferred from y.
      y: targets.
      n: number of samples.

    Raises:
      ValueError: for an unknown task, or targets that do not fit it; for an absent class below the largest label,
        unless the task has the number of classes.
    """
    if isinstance(task, Task):
        return task, task.targets(y, n)
    checks.check_choice("task", task, ("regression", "classification"), "a task such as jtrees.Classification(3)")
    if task == "classification":
        task = Classification(checks.check_labels(y)[1])
    else:
        task = Regression(*checks.check_targets(y, n).shape[1:])
    return task, task.targets(y, n)
