"""What is predicted and how it is scored: a task checks targets, and gives losses, the link and scores.

``outputs`` are what a model computes, ``predictions`` what it returns, ``link(outputs)``: class probabilities for
logits, the same numbers in regression.
"""

import dataclasses
from typing import Any, ClassVar

import jax
from jaxtyping import Array, Float, Int, Num
import numpy as np
import optax

from jtrees import io, losses, validation as checks


@io.part
@dataclasses.dataclass(frozen=True)
class Regression:
    """Predict numbers, by squared error.

    Args:
      outputs: number of targets of a sample, y is ``(n, outputs)``; None: one, y is ``(n,)``.
      own_loss: ``(outputs, y) -> (n,)`` in place of squared error, on scaled targets.

    Raises:
      ValueError: for an ``outputs`` that is neither None nor a whole number of at least 1.
    """

    outputs: int | None = None
    own_loss: losses.SampleLoss | None = dataclasses.field(default=None, repr=False)
    name: ClassVar[str] = "regression"

    def __post_init__(self) -> None:
        if self.outputs is not None:
            checks.check_count("outputs", self.outputs)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the outputs for one sample: ``()`` or ``(outputs,)``."""
        return () if self.outputs is None else (self.outputs,)

    def check(self, y: Any) -> None:
        """Raises ``ValueError`` for targets to train on, possibly traced, of another shape."""
        if y.shape[1:] != self.shape:
            columns = "(n,)" if self.outputs is None else f"(n, {self.outputs})"
            repair = f"Regression(outputs={y.shape[1]})" if y.ndim == 2 else "Regression()"
            raise ValueError(f"y must have shape {columns} for {self}, got shape {y.shape}: use {repair}")

    def targets(self, y: Any, n: int) -> np.ndarray:
        """Targets of n samples to train on, in float64.

        Raises:
          ValueError: for another shape, values that are not finite numbers, fewer than two samples, or a constant.
        """
        y = np.asarray(checks.check_targets(y, n)).astype(np.float64, order="C")
        self.check(y)
        return y

    def held_out_targets(self, y: Any, n: int) -> np.ndarray:
        """Targets of n samples to evaluate on: as :meth:`targets`, but they may be constant.

        Raises:
          ValueError: for another shape, or values that are not finite numbers.
        """
        y = np.asarray(checks.as_numeric("y", y)).astype(np.float64, order="C")
        checks.check_finite("y", y)
        if y.shape != (n, *self.shape):
            raise ValueError(f"y must have shape {(n, *self.shape)}, got {y.shape}")
        return y

    def varies(self, y: np.ndarray) -> bool:
        """Whether each column of targets takes two values at least, so that there is something to learn."""
        return bool(np.ptp(y, axis=0).all())

    def loss(self, outputs: Float[Array, "n *k"], y: Num[Array, "n *k"]) -> Float[Array, " n"]:
        """Squared error of each sample, of several targets the mean; or the user's own loss."""
        return losses.squared_error(outputs, y) if self.own_loss is None else losses.own_loss(self.own_loss, outputs, y)

    def prediction_loss(self, predictions: Float[Array, "n *k"], y: Num[Array, "n *k"]) -> Float[Array, " n"]:
        """Squared error of each sample; of several targets the mean."""
        return losses.squared_error(predictions, y)

    def link(self, outputs: Float[Array, "n *k"]) -> Float[Array, "n *k"]:
        """The outputs as they are."""
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
        """What a linear model is fitted to: the targets, ``(n, k)``."""
        return y.reshape(len(y), -1)


@io.part
@dataclasses.dataclass(frozen=True)
class Classification:
    """Predict classes, by log loss.

    Args:
      classes: number of classes K; y holds classes 0..K-1, outputs are logits ``(n, K)``, predictions probabilities.
      own_loss: ``(outputs, y) -> (n,)`` in place of log loss.

    Raises:
      ValueError: for fewer than two classes.
    """

    classes: int
    own_loss: losses.SampleLoss | None = dataclasses.field(default=None, repr=False)
    name: ClassVar[str] = "classification"

    def __post_init__(self) -> None:
        checks.check_count("classes", self.classes, minimum=2)

    @property
    def outputs(self) -> int:
        """Number of outputs of a sample: the classes."""
        return self.classes

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the outputs for one sample: ``(classes,)``."""
        return (self.classes,)

    def check(self, y: Any) -> None:
        """Raises ``ValueError`` for labels to train on, possibly traced, that are not whole numbers 0..K-1."""
        checks.check_classes(y, self.classes)

    def targets(self, y: Any, n: int) -> np.ndarray:
        """Labels of n samples to train on, in int32; not every class need occur.

        Raises:
          ValueError: for labels that are not 0..K-1, or another number of them.
        """
        y = checks.check_labels(y, self.classes)[0]
        checks.check_rows(y, n)
        return y

    def held_out_targets(self, y: Any, n: int) -> np.ndarray:
        """Labels of n samples to evaluate on.

        Raises:
          ValueError: for labels that are not 0..K-1, or another number of them.
        """
        y = checks.check_labels(y, self.classes)[0]
        if y.shape != (n,):
            raise ValueError(f"y must have shape {(n,)}, got {y.shape}")
        return y

    def varies(self, y: np.ndarray) -> bool:
        """True: class frequencies can be fitted to labels of one class, too."""
        return True

    def loss(self, outputs: Float[Array, "n k"], y: Int[Array, " n"]) -> Float[Array, " n"]:
        """Log loss of logits on each sample; or the user's own loss."""
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
        """Log loss of each sample in double precision; a probability of 0 is taken for float32's least normal one."""
        return -np.log(np.maximum(predictions[np.arange(len(y)), y], np.finfo(np.float32).tiny))

    def score(self, predictions: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> float:
        """Accuracy."""
        return float(np.average(predictions.argmax(1) == y, weights=weight))

    def indicators(self, y: np.ndarray) -> np.ndarray:
        """What a linear model is fitted to: 1 for the class of a sample and 0 for the others, ``(n, K)``."""
        return np.eye(self.classes)[y]


Task = Regression | Classification


def with_loss(task: Task, loss: losses.SampleLoss | None) -> Task:
    """The task with a loss of the user's own, ``(outputs, y) -> (n,)``; with None as it is.

    Raises:
      ValueError: for a loss that is no function.
    """
    if loss is None:
        return task
    if not callable(loss):
        raise ValueError(f"loss must be a function (outputs, y) -> (n,), got {loss!r}")
    return dataclasses.replace(task, own_loss=loss)


def checked_targets(task: str | Task, y: Any, n: int) -> tuple[Task, np.ndarray]:
    """The task, and the targets of n samples to train on.

    Args:
      task: a task; or ``"regression"`` or ``"classification"``, whose outputs or classes are counted in y.
      y: targets.
      n: number of samples.

    Raises:
      ValueError: for another task, and for targets that do not fit it; where a class between 0 and the largest label
        does not occur, unless the task says how many there are.
    """
    if isinstance(task, Task):
        return task, task.targets(y, n)
    checks.check_choice("task", task, ("regression", "classification"), "a task such as jtrees.Classification(3)")
    if task == "classification":
        y, classes = checks.check_labels(y)
        checks.check_rows(y, n)
        return Classification(classes), y
    y = checks.check_targets(y, n)
    task = Regression(None if y.ndim == 1 else y.shape[1])
    return task, task.targets(y, n)
