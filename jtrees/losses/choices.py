"""Losses of outputs whose softmax chooses: the log loss of classes, and minus the reward of actions."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int
import numpy as np
import optax

from jtrees import io, segments
from jtrees.losses.base import Link, Loss, check_number
from jtrees.segments import Array

_CERTAIN = 1e4  # an output whose softmax is exactly 1 beside outputs of 0


@io.part
@dataclasses.dataclass(frozen=True)
class LogLoss(Loss):
    """``-log p_y`` of the softmax p of the outputs; its best constants are logarithms of class frequencies.

    Args:
      smoothing: part of the label that is shared equally by all classes, at least 0 and below 1 (Szegedy et al. 2016).

    Raises:
      ValueError: for another smoothing.
    """

    smoothing: float = 0.0

    link: ClassVar[Link] = "softmax"

    def __post_init__(self) -> None:
        if self.smoothing != 0:
            check_number("smoothing", self.smoothing, 0, 1)

    def labels(self, y: Int[Array, " n"], like: Array) -> Float[Array, "n k"]:
        """Returns smoothed one-hot encoded classes."""
        one_hot = jax.nn.one_hot(y, like.shape[-1], dtype=like.dtype)
        return one_hot if self.smoothing == 0 else optax.smooth_labels(one_hot, self.smoothing)

    def samples(self, outputs: Array, y: Array) -> Array:
        if self.smoothing == 0:
            return optax.losses.softmax_cross_entropy_with_integer_labels(outputs, y)
        return optax.losses.softmax_cross_entropy(outputs, self.labels(y, outputs))

    def derivatives(self, outputs: Array, y: Array) -> tuple[Array, Array]:
        chance = jax.nn.softmax(outputs, axis=-1)
        return chance - self.labels(y, outputs), chance * (1 - chance)

    def initial(self, y: Array, weight: Array, classes: int) -> Array:
        """Returns the logarithms of the class frequencies, one sample more of each."""
        counts = 1 + segments.sums(weight, y, classes)
        frequencies = counts / counts.sum()
        return jnp.log((1 - self.smoothing) * frequencies + self.smoothing / classes)


@io.part
@dataclasses.dataclass(frozen=True)
class Rewards(Loss):
    """Minus the expected reward of an action drawn from the softmax of the outputs; the targets are the rewards of all
    actions, ``(n, actions)``, its best constant an action.
    """

    link: ClassVar[Link] = "softmax"

    def samples(self, outputs: Array, y: Array) -> Array:
        return -(jax.nn.softmax(outputs, axis=-1) * y).sum(-1)

    def of_predictions(self, predictions: Any, y: Any) -> Any:
        return -predictions * y

    def initial(self, y: Array, weight: Array, outputs: int) -> Array:
        return jnp.zeros(y.shape[1:], y.dtype)  # no preference, as a certain action has no gradient

    def derivatives(self, outputs: Array, y: Array) -> tuple[Array, Array]:
        played = jax.nn.softmax(outputs, axis=-1)
        gain = y - (played * y).sum(-1, keepdims=True)
        return -played * gain, played * (1 - played)

    def constants(self, leaf_index: Array, y: Array, num_leaves: int, weight: Array) -> Array:
        best = segments.means(leaf_index, y, num_leaves, weight).argmax(1)
        return _CERTAIN * (best[:, None] == np.arange(y.shape[1])).astype(y.dtype)
