"""Tasks: what is predicted, and its scores. A task is a loss and a codec of targets.

A task checks targets, and has the loss, the link and the scores. A model computes ``outputs`` and returns
``predictions = link(outputs)``. In classification, outputs are logits and predictions are class probabilities. In
regression with squared error, predictions are the outputs.
"""

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
from jaxtyping import Array, Float, Num
import numpy as np

from jtrees import io, validation as checks
from jtrees.tasks import labels
from jtrees.tasks.base import Link, Loss, linked
from jtrees.tasks.classes import LogLoss, Rewards, log_loss
from jtrees.tasks.custom import CustomLoss, named
from jtrees.tasks.errors import SquaredError


class Task:
    """The common base of tasks: what a task derives from its :class:`jtrees.losses.Loss`."""

    loss_function: Loss

    def __repr__(self) -> str:
        # Messages name tasks, so only fields that differ from their defaults are shown.
        fields = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in fields)})"

    @property
    def link_name(self) -> Link:
        """Name of the link, as in :class:`jtrees.Forest`."""
        return self.loss_function.link

    @property
    def leaf_loss(self) -> Loss:
        """The loss of trainable leaf values: see :class:`jtrees.leaves.Values`."""
        return self.loss_function

    @property
    def in_units(self) -> bool:
        """Whether the loss can be computed from predictions in the user's units."""
        return self.loss_function.in_units

    @property
    def of_models(self) -> Any:
        """The task as a fitted model holds it. A loss function of the user is left out, as no file can hold it."""
        return self if self.in_units else dataclasses.replace(self, loss_function=type(self).loss_function)  # type: ignore[type-var]

    def loss(self, outputs: Float[Array, "n *k"], y: Num[Array, "n *k"]) -> Float[Array, " n"]:
        """Returns the loss of each sample, averaged over several outputs."""
        return self.loss_function.samples(outputs, y)

    def link(self, outputs: Float[Array, "n *k"]) -> Float[Array, "n *k"]:
        """Returns the predictions for outputs of the model."""
        return linked(self.link_name, outputs)

    def units(self, y: np.ndarray) -> tuple[Any, Any]:
        """Returns the offset and the unit of a table's targets: scaled targets are ``(y - offset) / unit``."""
        return self.loss_function.units(y)

    @property
    def has_baselines(self) -> bool:
        """Whether a constant prediction has a loss to compare with: see :func:`jtrees.fit`."""
        return self.in_units and not isinstance(self.loss_function, Rewards)

    def weighed(self, y: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the targets, and factors of the sample weights or None."""
        return y, None

    def strata(self, y: np.ndarray) -> np.ndarray:
        """Returns the stratum of each sample, ``(n,)``: here 0. Samples of rows are drawn by stratum."""
        return np.zeros(len(y), int)


class _Choices(Task):
    """The common base of tasks with an output for each class or action. Targets and losses are not scaled."""

    is_least_squares = False
    outputs: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the outputs for one sample: ``(outputs,)``."""
        return (self.outputs,)

    def scaled(self, unit: Any) -> Self:
        """Returns the task itself."""
        return self

    def loss_unit(self, unit: Any) -> float:
        """Returns 1."""
        return 1.0

    def varies(self, y: np.ndarray) -> bool:
        """Returns True, because a single class or action can be fitted."""
        return True


@io.part
@dataclasses.dataclass(frozen=True, repr=False)
class Regression(Task):
    """Regression, by default with squared error.

    Args:
      outputs: number of targets, for y of shape ``(n, outputs)``. None: one target, and y is ``(n,)``.
      loss_function: a loss of :mod:`jtrees.losses`, its name, such as ``"poisson"``, or a function ``(outputs, y) ->
        (n,)`` of scaled targets. :class:`jtrees.losses.Quantile` with several levels predicts ``(n, levels)``.

    Raises:
      ValueError: if ``outputs`` is neither None nor an integer of at least 1, if the loss is unknown, or if there are
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
        """Returns the task for targets divided by ``unit``."""
        return dataclasses.replace(self, loss_function=self.loss_function.scaled(unit))

    def check(self, y: Any) -> None:
        """Raises ``ValueError`` for training targets of a wrong shape. The targets may be traced."""
        shape = () if self.outputs is None else (self.outputs,)
        if y.shape[1:] != shape:
            columns = "(n,)" if self.outputs is None else f"(n, {self.outputs})"
            repair = f"Regression(outputs={y.shape[1]})" if y.ndim == 2 else "Regression()"
            raise ValueError(f"y must have shape {columns} for {self}, got shape {y.shape}: use {repair}")

    def targets(self, y: Any, n: int) -> np.ndarray:
        """Returns the checked training targets of n samples, in float64.

        Raises:
          ValueError: for a wrong shape, values that are not finite or that the loss refuses, fewer than two samples, or
            constant targets.
        """
        y = np.asarray(checks.check_targets(y, n)).astype(np.float64, order="C")
        self.check(y)
        self.loss_function.check_training(y)
        return y

    def held_out_targets(self, y: Any, n: int) -> np.ndarray:
        """Returns the checked evaluation targets of n samples, as :meth:`targets` does, but they may be constant.

        Raises:
          ValueError: for a wrong shape, or values that are not finite or that the loss refuses.
        """
        y, shape = checks.as_finite("y", y), (n,) if self.outputs is None else (n, self.outputs)
        if y.shape != shape:
            raise ValueError(f"y must have shape {shape}, got {y.shape}")
        self.loss_function.check(y)
        return y

    def varies(self, y: np.ndarray) -> bool:
        """Returns whether every column of targets varies."""
        return bool(np.ptp(y, axis=0).all())

    def prediction_loss(self, predictions: Float[Array, "n *k"], y: Num[Array, "n *k"]) -> Float[Array, " n"]:
        """Returns the loss of each prediction of scaled targets, or the squared error if the loss is user-defined."""
        loss = self.loss_function if self.in_units else SquaredError()
        values = loss.of_predictions(predictions, loss.aligned(y))
        return values if values.ndim == 1 else values.mean(axis=1)

    def loss_unit(self, unit: Any) -> float:
        """Returns a scaled loss of 1 in the user's units, or 1 for several targets, whose losses remain scaled."""
        return 1.0 if np.size(unit) > 1 else float(np.sum(unit)) ** self.loss_function.power()

    def host_losses(self, predictions: np.ndarray, y: np.ndarray, unit: Any) -> np.ndarray:
        """Returns the loss of each sample in double precision, or the squared error if the loss is user-defined.

        If there are several targets, targets and predictions are divided by ``unit``, and the losses are averaged over
        the targets.
        """
        loss = self.loss_function if self.in_units else SquaredError()
        values = loss.of_predictions(predictions, loss.aligned(y)).reshape(len(y), -1)
        return (values if np.size(unit) == 1 else values / np.power(unit, loss.power())).mean(1)

    def score(self, predictions: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> float:
        """Returns 1 minus the ratio of the loss to the loss of the best constant, averaged over targets.

        This is R^2 for the squared error and for a user-defined loss. NaN if a column of y is constant.
        """
        if not self.varies(y):
            return float("nan")
        loss = self.loss_function if self.in_units else SquaredError()
        mean = lambda predictions: np.average(loss.of_predictions(predictions, loss.aligned(y)), axis=0, weights=weight)
        return float(np.mean(1 - mean(predictions) / mean(loss.best(y, weight))))

    def indicators(self, y: np.ndarray) -> np.ndarray:
        """Returns the targets of a linear model: y as ``(n, k)``."""
        return y.reshape(len(y), -1)


@io.part
@dataclasses.dataclass(frozen=True, repr=False)
class Classification(_Choices):
    """Classification, by default with log loss.

    Args:
      classes: number of classes K. y holds classes 0..K-1, or soft labels ``(n, K)``, which are the class probabilities
        of each row. Outputs are logits ``(n, K)``, and predictions are probabilities.
      loss_function: :class:`jtrees.losses.LogLoss`. DGT, LatentTree and TEL also accept a function
        ``(outputs, y) -> (n,)`` of logits and classes 0..K-1. The loss of a soft label is the expected loss of a class.
      class_weight: factor of the sample weights for each class, K numbers above 0. None: equal factors.

    Raises:
      ValueError: for fewer than two classes, an unsupported loss, or invalid class weights.
    """

    classes: int
    loss_function: Loss = LogLoss()
    class_weight: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        checks.check_count("classes", self.classes, minimum=2)
        object.__setattr__(self, "loss_function", named(self.loss_function))
        if not isinstance(self.loss_function, (LogLoss, CustomLoss)):
            raise ValueError(f"loss_function must be LogLoss or a function, got {checks.quoted(self.loss_function)}")
        if self.class_weight is not None:
            object.__setattr__(self, "class_weight", labels.checked_weight(self.class_weight, self.classes))

    @property
    def outputs(self) -> int:
        """Number of outputs of a sample, one for each class."""
        return self.classes

    @property
    def link_name(self) -> Link:
        """The softmax of the outputs. A user-defined loss also takes logits."""
        return "softmax"

    @property
    def leaf_loss(self) -> LogLoss:
        """The loss of trainable leaves of logits. It is the log loss, even for a user-defined loss."""
        return self.loss_function if isinstance(self.loss_function, LogLoss) else LogLoss()

    def units(self, y: np.ndarray) -> tuple[Any, Any]:
        """Returns None, because classes are not scaled."""
        return None, None

    def check(self, y: Any) -> None:
        """Raises ``ValueError`` if training targets are not integers 0..K-1 or soft labels. They may be traced."""
        labels.check_traced(y, self.classes)

    def targets(self, y: Any, n: int) -> np.ndarray:
        """Returns the checked training labels of n samples in int32, or soft labels in float64. Classes may be absent.

        Raises:
          ValueError: for labels that are not 0..K-1, invalid soft labels, or a wrong number of rows.
        """
        y = labels.checked_classes(y, self.classes)[0]
        checks.check_rows(y, n)
        return y

    def held_out_targets(self, y: Any, n: int) -> np.ndarray:
        """Returns the checked evaluation labels, or soft labels, of n samples.

        Raises:
          ValueError: for labels that are not 0..K-1, invalid soft labels, or a wrong number of rows.
        """
        y = labels.checked_classes(y, self.classes)[0]
        if len(y) != n:
            raise ValueError(f"y must have shape {(n, *y.shape[1:])}, got {y.shape}")
        return y

    def weighed(self, y: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the targets, and factors of the sample weights or None."""
        return (y, None) if self.class_weight is None else labels.weighed(y, self.class_weight)

    def strata(self, y: np.ndarray) -> np.ndarray:
        """Returns the stratum of each sample, ``(n,)``: the most probable class.

        Samples of rows are drawn by stratum.
        """
        return labels.most_probable(y)

    def loss(self, outputs: Float[Array, "n k"], y: Num[Array, "n *k"]) -> Float[Array, " n"]:
        """Returns the loss of each sample. For soft labels, this is the expected loss of a class."""
        if self.in_units or not labels.is_soft(y):
            return self.loss_function.samples(outputs, y)
        return labels.expected(y, lambda label: self.loss_function.samples(outputs, jnp.full(len(y), label)))

    def prediction_loss(self, predictions: Float[Array, "n k"], y: Num[Array, "n *k"]) -> Float[Array, " n"]:
        """Returns the log loss of probabilities for each sample, without smoothing."""
        return log_loss(predictions, y)

    def host_losses(self, predictions: np.ndarray, y: np.ndarray, unit: Any) -> np.ndarray:
        """Returns the log loss of each sample, in double precision.

        Probabilities are clipped at the smallest normal number of float32.
        """
        tiny = np.finfo(np.float32).tiny
        if labels.is_soft(y):
            return -(y * np.log(np.maximum(predictions, tiny))).sum(1)
        return -np.log(np.maximum(predictions[np.arange(len(y)), y], tiny))

    def hits(self, predictions: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Returns 1 for each sample whose predicted class is right, else 0, ``(n,)``.

        For soft labels, returns the probability of the predicted class.
        """
        return labels.share_of(y, predictions.argmax(1))

    def score(self, predictions: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> float:
        """Returns the accuracy. For soft labels, this is the mean probability of the predicted class."""
        return float(np.average(self.hits(predictions, y), weights=weight))

    def indicators(self, y: np.ndarray) -> np.ndarray:
        """Returns the targets of a linear model: class probabilities or one-hot encoded labels, ``(n, K)``."""
        return labels.shares(y, self.classes)


@io.part
@dataclasses.dataclass(frozen=True, repr=False)
class Policy(_Choices):
    """Choice of an action for each sample, such that the mean reward is maximised.

    The targets are the rewards of all actions, ``(n, actions)``. If only the rewards of the chosen actions are known,
    use doubly robust scores (Athey & Wager, "Policy Learning with Observational Data", 2021). Rewards are not scaled,
    so they should be of order 1. Predictions are the probabilities of the actions. In a hard tree they are 0 and 1, as
    each leaf plays one action. The loss is minus the mean reward.

    Args:
      actions: number of actions, at least 2.

    Raises:
      ValueError: for fewer than two actions.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> rewards = np.hstack([x, np.zeros((40, 1))])  # the first action pays where x is above 0
      >>> recipe = jtrees.GET(depth=1, starts=2, epochs=40)
      >>> fit = jtrees.fit(recipe, x, rewards, task=jtrees.Policy(2), key=jax.random.key(0))
      >>> print(fit.predict(np.array([[-0.5], [0.5]])).argmax(1))
      [1 0]
    """

    actions: int

    loss_function = Rewards()

    def __post_init__(self) -> None:
        checks.check_count("actions", self.actions, minimum=2)

    @property
    def outputs(self) -> int:
        """Number of outputs of a sample, one for each action."""
        return self.actions

    def units(self, y: np.ndarray) -> tuple[Any, Any]:
        """Returns 0 and 1, because rewards and probabilities of actions are not scaled."""
        return np.float64(0), np.float64(1)

    def check(self, y: Any) -> None:
        """Raises ``ValueError`` for rewards of a wrong shape. The rewards may be traced."""
        if y.shape[1:] != self.shape:
            raise ValueError(f"y must hold the rewards of {self.actions} actions, (n, {self.actions}), got {y.shape}")

    def targets(self, y: Any, n: int) -> np.ndarray:
        """Returns the checked rewards of n samples, in float64.

        Raises:
          ValueError: for a wrong shape, values that are not finite, fewer than two samples, or only equal rewards.
        """
        y = self.held_out_targets(y, n)
        checks.check_rows(y, n)
        if not (y != y[:, :1]).any():
            raise ValueError("y must hold rewards that differ between actions in some row")
        return y

    def held_out_targets(self, y: Any, n: int) -> np.ndarray:
        """Returns the checked rewards of n samples.

        Raises:
          ValueError: for a wrong shape, or values that are not finite.
        """
        y = checks.as_finite("y", y)
        if y.shape != (n, self.actions):
            raise ValueError(f"y must hold the rewards of {self.actions} actions, {(n, self.actions)}, got {y.shape}")
        return y

    def prediction_loss(self, predictions: Float[Array, "n k"], y: Num[Array, "n k"]) -> Float[Array, " n"]:
        """Returns minus the expected reward of each sample."""
        return -(predictions * y).sum(-1)

    def host_losses(self, predictions: np.ndarray, y: np.ndarray, unit: Any) -> np.ndarray:
        """Returns minus the expected reward of each sample, in the user's units."""
        return -(predictions * y).sum(-1)

    def score(self, predictions: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> float:
        """Returns the mean reward."""
        return float(np.average((predictions * y).sum(1), weights=weight))

    def indicators(self, y: np.ndarray) -> np.ndarray:
        """Returns the targets of a linear model: the rewards."""
        return y


def check_log_loss(task: Task) -> None:
    """Raises ``ValueError`` for classification with a user-defined loss, which class frequencies do not minimise."""
    if isinstance(task, Classification) and not task.in_units:
        raise ValueError(
            f"loss_function must be LogLoss here, got {checks.quoted(task)}: DGT, LatentTree and TEL take functions"
        )


def checked_targets(task: str | Task, y: Any, n: int) -> tuple[Task, np.ndarray]:
    """Returns the task, and the checked training targets of n samples.

    Args:
      task: a task, or ``"regression"`` or ``"classification"``. If a name is given, the number of outputs or classes is
        inferred from y.
      y: targets.
      n: number of samples.

    Raises:
      ValueError: for an unknown task, or for targets that do not fit the task. If the number of classes is inferred,
        every class up to the largest label must be present.
    """
    if isinstance(task, Task):
        return task, task.targets(y, n)
    checks.check_choice("task", task, ("regression", "classification"), "a task such as jtrees.Classification(3)")
    if task == "classification":
        task = Classification(labels.checked_classes(y)[1])
    else:
        task = Regression(*checks.check_targets(y, n).shape[1:])
    return task, task.targets(y, n)
