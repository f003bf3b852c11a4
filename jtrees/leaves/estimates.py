"""Constant leaves of any loss: outputs whose link is the prediction, fitted as the best constants of the loss."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Num
import numpy as np

from jtrees import io, losses, pytree, segments
from jtrees.leaves.constant import Constant, Values, effective, number_text, ones_or
from jtrees.losses.base import linked
from jtrees.segments import Array

_TRAINABLE = 1.0  # output of the chosen action in leaves that are to be trained further


@io.part
@pytree.dataclass
class Estimates(Values):
    """Leaves of one output, or of k, of a loss other than squared error and log loss.

    Attributes:
      values: outputs before the link, ``(leaves,)`` or ``(leaves, k)``.
      loss: the loss.
    """

    values: Float[Array, "leaves *k"]
    loss: losses.Loss = pytree.field(pytree_node=False)

    @classmethod
    def start(
        cls, key: Array, num_leaves: int, x: Array, y: Array, outputs: tuple[int, ...], loss: losses.Loss
    ) -> "Estimates":
        """Returns random initial leaves: of scaled targets with an identity link in [0, 1], else outputs in [-1, 1]."""
        drawn = jax.random.uniform(key, (num_leaves, *outputs), x.dtype, -1, 1)
        return cls((drawn + 1) / 2 if loss.link in ("identity", "sorted") else drawn, loss)

    @classmethod
    def empty(
        cls,
        num_leaves: int,
        features: int,
        outputs: tuple[int, ...],
        dtype: Any = jnp.float32,
        *,
        loss: losses.Loss = losses.SquaredError(),
    ) -> "Estimates":
        """Returns zero leaves of this shape, to be refitted."""
        return cls(jnp.zeros((num_leaves, *outputs), dtype), loss)

    def predictions(self) -> Float[Array, "leaves *k"]:
        """Returns the prediction of every leaf."""
        return linked(self.loss.link, self.values)

    def losses(self, x: Float[Array, "n p"], y: Num[Array, "n *k"]) -> Float[Array, "leaves n"]:
        """Returns the loss of every leaf on every sample."""
        return jax.vmap(self.loss.samples, (0, None))(self.outputs(x), y)

    def refit(self, leaf_index: Array, x: Array, y: Array, sample_weight: Array | None = None) -> "Estimates":
        """Returns leaves of the best constants of the loss; uneven weights count as fewer samples."""
        weight = ones_or(effective(sample_weight), y, self.values.dtype)
        return self.replace(values=self.loss.constants(leaf_index, y, len(self.values), weight))

    def criterion(self, leaf_index: Array, x: Array, y: Array, sample_weight: Array | None = None) -> Array:
        """Returns the criterion of hard trees: the mean loss after :meth:`refit`."""
        weight = ones_or(sample_weight, y, self.values.dtype)
        outputs = self.refit(leaf_index, x, y, sample_weight).values[leaf_index]
        return segments.total(weight * self.loss.samples(outputs, y)) / segments.total(weight)

    def trainable(self) -> "Estimates":
        """Returns leaves with gradients: an action is preferred, but not certain."""
        if self.loss.link != "softmax":
            return self
        return self.replace(values=jnp.clip(self.values, -_TRAINABLE, _TRAINABLE))

    def rescaled(self, x_zero: Any, x_unit: Any, y_zero: Any, y_unit: Any) -> "Estimates | Constant":
        """Returns the leaves for predictions ``y_zero + y_unit`` times the current ones, in double precision."""
        values = np.asarray(self.values, np.float64)
        if self.loss.link == "exp":
            values = values + np.log(y_unit)
        elif self.loss.link != "softmax":
            values = y_zero + y_unit * values
        if not self.loss.in_units:  # a function of the user's, on scaled targets
            return Constant(values)
        return Estimates(values, self.loss.scaled(1 / np.asarray(y_unit)))

    def describe(self, leaf: int, names: Sequence[str], digits: int, y_zero: Any = 0, **_: Any) -> str:
        """Returns the prediction of a leaf plus ``y_zero`` as text."""
        values = np.reshape(np.asarray(linked(self.loss.link, self.values), np.float64)[leaf], -1)
        return ", ".join(number_text(v, digits, zero) for v, zero in zip(values, y_zero + 0 * values, strict=True))
