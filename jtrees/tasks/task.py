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
        return self.loss_function.initial(batch.y, weight, math.prod(self.shape))  # type: ignore[attr-defined]

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


class TaskOfChoices(Task):
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
