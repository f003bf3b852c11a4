"""Fitted models that are not hard trees: a network on scaled data, together with its scaling."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float
import numpy as np

from jtrees import io, prediction, pytree
from jtrees.tasks import Task

_MARGIN = 0.1  # relative to the range of the training targets, as for linear leaves


@io.model
@pytree.dataclass(repr=False)
class SoftModel:
    """A network on scaled data, and the scaling from the user's units.

    Attributes:
      network: a pytree with ``outputs(x)``, a pure function of scaled features, the number of its ``features``, and its
        parameters ``params``.
      scaling: the :class:`jtrees.data.Scaling` of the training data. None: x and predictions are scaled.
      task: the task of the model.
      bounded: whether predictions are clipped to the range of the training targets, extended by a tenth. A network on x
        is unbounded for outliers.
    """

    network: Any
    scaling: Any
    task: Task = pytree.field(pytree_node=False)
    bounded: bool = pytree.field(pytree_node=False, default=False)

    def apply(self, x: Float[Array, "n p"]) -> Float[Array, "n *k"]:
        """Returns predictions, as a pure function of arrays."""
        x = prediction.fill_gaps(x, self.medians)
        outputs = self.network.outputs(x if self.scaling is None else self.scaling.transform(x))
        predictions = self.task.link(near_targets(outputs) if self.bounded else outputs)
        return predictions if self.scaling is None else self.scaling.inverse(predictions)

    def predict(self, x: ArrayLike) -> Any:
        """Returns predictions, ``(n,)`` or ``(n, k)``, or class probabilities, ``(n, K)``.

        Raises:
          ValueError: if x has a wrong rank or width, or values that are not finite.
        """
        return prediction.predict(self, x)

    @property
    def medians(self) -> Any:
        """The medians that fill missing values, ``(p,)``, or None: see :class:`jtrees.ObliqueTree`."""
        return None if self.scaling is None else self.scaling.medians

    def with_medians(self, medians: Any) -> "SoftModel":
        """Returns the model with the medians that fill missing values, ``(p,)``."""
        if self.scaling is None:
            return self
        medians = np.broadcast_to(medians, np.shape(self.scaling.x_center))
        return self.replace(scaling=self.scaling.replace(medians=medians))

    @property
    def features(self) -> int:
        """Number of features, p."""
        return self.network.features

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the network."""
        return sum(np.size(a) for a in jax.tree.leaves(self.network.params))

    def without_scaling(self) -> "SoftModel":
        """Returns the model of scaled data."""
        return self.replace(scaling=None)

    def restored(self, scaling: Any) -> "SoftModel":
        """Returns the model of scaled data in the user's units."""
        return self.replace(scaling=scaling)

    def __repr__(self) -> str:
        network = f"{type(self.network).__name__}({self.network})"
        return f"{type(self).__name__}({network}, {self.task}, parameters={self.num_parameters})"


def near_targets(outputs: Array) -> Array:
    """Returns outputs clipped to the range of the training targets, [0, 1], extended by a tenth."""
    return jnp.clip(outputs, -_MARGIN, 1 + _MARGIN)
