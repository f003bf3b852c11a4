"""Tasks: what is predicted, and its scores. A task is a loss and a codec of targets.

A task checks targets, and has the loss, the link and the scores. A model computes ``outputs`` and returns
``predictions = link(outputs)``. In classification, outputs are logits and predictions are class probabilities. In
regression with squared error, predictions are the outputs.
"""

import dataclasses
import math
from typing import Any, Self

from jaxtyping import Array, Float, Num
import numpy as np

from jtrees.segments import ones_or
from jtrees.tasks.base import Link, Loss, linked
from jtrees.tasks.classes import Rewards


class Task:
    """The common base of tasks: what a task derives from its :class:`jtrees.losses.Loss`."""

    loss_function: Loss
    shape: Any  # shape of the outputs for one sample: () or (k,)
    is_least_squares: Any  # whether the loss is the squared error

    def check(self, y: Any) -> None:
        """Raises ``ValueError`` for training targets of a wrong shape or type. They may be traced."""
        raise NotImplementedError

    def targets(self, y: Any, n: int) -> np.ndarray:
        """Returns the checked training targets of n samples: labels in int32, all else in float64.

        Raises:
          ValueError: for a wrong shape, values that are not finite or that the task refuses, fewer than two samples, or
            targets without variation. Classes may be absent.
        """
        raise NotImplementedError

    def held_out_targets(self, y: Any, n: int) -> np.ndarray:
        """Returns the checked evaluation targets of n samples, as :meth:`targets` does, but they may be constant."""
        raise NotImplementedError

    def scaled(self, unit: Any) -> Self:
        """Returns the task for targets divided by ``unit``; the same task if targets are not scaled."""
        return self

    def varies(self, y: np.ndarray) -> bool:
        """Returns whether every column of numbers varies; True for choices."""
        return True

    def prediction_loss(self, predictions: Any, y: Any, unit: Any = 1.0) -> Any:
        """Returns the loss of each sample, by which models are compared. The precision of NumPy arrays is kept.

        A user-defined loss takes scaled predictions and targets; its logits are the logarithms of probabilities.
        If there are several targets, targets and predictions are divided by ``unit``, ``(k,)``, and the losses are
        averaged over the targets.
        """
        raise NotImplementedError

    def loss_unit(self, unit: Any) -> float:
        """Returns a scaled loss of 1 in the user's units, or 1 if losses remain scaled."""
        return 1.0

    def score(self, predictions: np.ndarray, y: np.ndarray, weight: np.ndarray | None) -> float:
        """Returns the score of predictions, of which larger values are better."""
        raise NotImplementedError

    def indicators(self, y: np.ndarray) -> np.ndarray:
        """Returns the targets of a linear model, ``(n, k)``: numbers, class probabilities or rewards."""
        raise NotImplementedError

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

    def initial(self, batch: Any) -> Float[Array, "*k"]:
        """Returns the best constant output for a :class:`jtrees.Batch`. A method that starts there learns sooner."""
        weight = ones_or(batch.weight, batch.x)
        return self.leaf_loss.initial(batch.y, weight, math.prod(self.shape))  # type: ignore[attr-defined]

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
        """Returns the stratum of each sample, ``(n,)``: the most probable class, or 0 if there are no classes."""
        return np.zeros(len(y), int)


class TaskOfChoices(Task):
    """The common base of tasks with an output for each class or action. Targets and losses are not scaled."""

    is_least_squares = False
    outputs: int

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.outputs,)
