"""Tasks of choices: classification, and policies that choose an action."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num
import numpy as np

from jtrees import io, validation as checks
from jtrees.tasks import labels
from jtrees.tasks.base import Link, Loss
from jtrees.tasks.classes import LogLoss, Rewards, log_loss
from jtrees.tasks.custom import CustomLoss, named
from jtrees.tasks.task import Task, TaskOfChoices


@io.part
@dataclasses.dataclass(frozen=True, repr=False)
class Classification(TaskOfChoices):
    """Classification, by default with log loss.

    Args:
      classes: number of classes K. y holds classes 0..K-1, or soft labels ``(n, K)``, which are the class probabilities
        of each row. Outputs are logits ``(n, K)``, and predictions are probabilities.
      loss_function: :class:`jtrees.losses.LogLoss`. DGT, LatentTree, TEL, NODE, GRANDE and DTSemNet also
        accept a function ``(outputs, y) -> (n,)`` of logits and classes 0..K-1. The loss of a soft label is the
        expected loss of a class.
      class_weight: factor of the sample weights for each class, K numbers above 0. None: equal factors.

    Raises:
      ValueError: for fewer than two classes, an unsupported loss, or invalid class weights.
    """

    classes: int
    loss_function: Loss = LogLoss()
    class_weight: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        checks.check_count("classes", self.classes, least=2)
        object.__setattr__(self, "loss_function", named(self.loss_function))
        if not isinstance(self.loss_function, (LogLoss, CustomLoss)):
            raise ValueError(f"loss_function must be LogLoss or a function, got {checks.quoted(self.loss_function)}")
        if self.class_weight is not None:
            weights = np.asarray(self.class_weight, np.float64)
            if weights.shape != (self.classes,) or not (np.isfinite(weights) & (weights > 0)).all():
                got = checks.quoted(self.class_weight)
                raise ValueError(f"class_weight must be {self.classes} numbers above 0, one a class, got {got}")
            object.__setattr__(self, "class_weight", tuple(weights.tolist()))

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
        labels.check_traced(y, self.classes)

    def targets(self, y: Any, n: int) -> np.ndarray:
        y = labels.checked_classes(y, self.classes)
        checks.check_rows(y, n)
        return y

    def held_out_targets(self, y: Any, n: int) -> np.ndarray:
        y = labels.checked_classes(y, self.classes)
        if len(y) != n:
            raise ValueError(f"y must have shape {(n, *y.shape[1:])}, got {y.shape}")
        return y

    def weighed(self, y: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        if self.class_weight is None:
            return y, None
        # The factor of a soft label is the expected class weight. The soft label is reweighted by the class weights and
        # normalised, so that the factor times the loss is `sum_k class_weight_k y_k loss_k`.
        weighted = np.asarray(self.class_weight) * self.indicators(y)
        factors = weighted.sum(1)
        return (weighted / factors[:, None] if labels.is_soft(y) else y), factors

    def strata(self, y: np.ndarray) -> np.ndarray:
        return labels.most_probable(y)

    def loss(self, outputs: Float[Array, "n k"], y: Num[Array, "n *k"]) -> Float[Array, " n"]:
        """Returns the loss of each sample. For soft labels, this is the expected loss of a class."""
        if self.in_units or not labels.is_soft(y):
            return self.loss_function.samples(outputs, y)
        label_losses = lambda label: self.loss_function.samples(outputs, jnp.full(len(y), label))
        losses = jax.vmap(label_losses)(jnp.arange(y.shape[1], dtype=jnp.int32))
        return (y.T.astype(losses.dtype) * losses).sum(0)

    def prediction_loss(self, predictions: Any, y: Any, unit: Any = 1.0) -> Any:
        if not self.in_units:
            return self.loss(jnp.log(jnp.maximum(jnp.asarray(predictions), np.finfo(np.float32).tiny)), y)
        smooths = self.leaf_loss.smoothing > 0
        return log_loss(predictions, self.leaf_loss.labels(y, predictions) if smooths else y)

    def hits(self, predictions: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Returns 1 for each sample whose predicted class is right, else 0, ``(n,)``.

        For soft labels, returns the probability of the predicted class.
        """
        predicted = predictions.argmax(1)
        return y[np.arange(len(y)), predicted] if labels.is_soft(y) else (y == predicted).astype(np.float64)

    def score(self, predictions: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> float:
        """Returns the accuracy. For soft labels, this is the mean probability of the predicted class."""
        return float(np.average(self.hits(predictions, y), weights=weight))

    def indicators(self, y: np.ndarray) -> np.ndarray:
        return labels.shares(y, self.classes)


@io.part
@dataclasses.dataclass(frozen=True, repr=False)
class Policy(TaskOfChoices):
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
        checks.check_count("actions", self.actions, least=2)

    @property
    def outputs(self) -> int:
        """Number of outputs of a sample, one for each action."""
        return self.actions

    def units(self, y: np.ndarray) -> tuple[Any, Any]:
        """Returns 0 and 1, because rewards and probabilities of actions are not scaled."""
        return np.float64(0), np.float64(1)

    def check(self, y: Any) -> None:
        if y.shape[1:] != self.shape:
            raise ValueError(f"y must hold the rewards of {self.actions} actions, (n, {self.actions}), got {y.shape}")

    def targets(self, y: Any, n: int) -> np.ndarray:
        y = self.held_out_targets(y, n)
        checks.check_rows(y, n)
        if not (y != y[:, :1]).any():
            raise ValueError("y must hold rewards that differ between actions in some row")
        return y

    def held_out_targets(self, y: Any, n: int) -> np.ndarray:
        y = checks.as_finite("y", y)
        if y.shape != (n, self.actions):
            raise ValueError(f"y must hold the rewards of {self.actions} actions, {(n, self.actions)}, got {y.shape}")
        return y

    def prediction_loss(self, predictions: Any, y: Any, unit: Any = 1.0) -> Any:
        """Returns minus the expected reward of each sample."""
        return -(predictions * y).sum(-1)

    def score(self, predictions: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> float:
        """Returns the mean reward."""
        return float(np.average((predictions * y).sum(1), weights=weight))

    def indicators(self, y: np.ndarray) -> np.ndarray:
        return y


def check_log_loss(task: Task) -> None:
    """Raises ``ValueError`` for classification with a user-defined loss, which class frequencies do not minimise."""
    if isinstance(task, Classification) and not task.in_units:
        raise ValueError(
            f"loss_function must be LogLoss here, got {checks.quoted(task)}: DGT, LatentTree, TEL, NODE, GRANDE and "
            "DTSemNet take functions"
        )
