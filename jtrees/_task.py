"""What all tasks share."""

import dataclasses
from typing import Any

from jaxtyping import Array, Float, Num
import numpy as np

from jtrees import losses
from jtrees.losses.base import linked


class TaskOfLoss:
    """The common part of the tasks whose losses are a :class:`jtrees.losses.Loss`."""

    loss_function: losses.Loss

    def __repr__(self) -> str:
        # Fields that differ from their defaults, as messages name tasks.
        fields = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in fields)})"

    @property
    def link_name(self) -> losses.Link:
        """Name of the link, as in :class:`jtrees.Forest`."""
        return self.loss_function.link

    @property
    def leaf_loss(self) -> losses.Loss:
        """The loss of trainable leaves of values: see :class:`jtrees.leaves.Values`."""
        return self.loss_function

    @property
    def in_units(self) -> bool:
        """Whether the loss can be computed from predictions in the user's units."""
        return self.loss_function.in_units

    @property
    def of_models(self) -> Any:
        """The task as a fitted model holds it: a function of the user's, which no file can hold, is left out."""
        return self if self.in_units else dataclasses.replace(self, loss_function=type(self).loss_function)  # type: ignore[type-var]

    def loss(self, outputs: Float[Array, "n *k"], y: Num[Array, "n *k"]) -> Float[Array, " n"]:
        """Loss of each sample, of several outputs the mean."""
        return self.loss_function.samples(outputs, y)

    def link(self, outputs: Float[Array, "n *k"]) -> Float[Array, "n *k"]:
        """Predictions of outputs."""
        return linked(self.link_name, outputs)

    def units(self, y: np.ndarray) -> tuple[Any, Any]:
        """Returns offset and unit of the targets of a table: scaled targets are ``(y - offset) / unit``."""
        return self.loss_function.units(y)

    @property
    def has_baselines(self) -> bool:
        """Whether a constant has a loss to compare with: see :mod:`jtrees.data.baselines`."""
        return self.in_units and not isinstance(self.loss_function, losses.Rewards)

    def weighed(self, y: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns targets, and factors of the weights of samples, or None."""
        return y, None

    def strata(self, y: np.ndarray) -> np.ndarray:
        """Returns the group of each sample, ``(n,)``, whose share samples of the rows keep: here one group."""
        return np.zeros(len(y), int)
