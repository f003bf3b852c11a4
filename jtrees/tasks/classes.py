"""Losses of outputs that choose a class or an action: the log loss, and the negative reward."""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int
import numpy as np
import optax

from jtrees import io, segments
from jtrees.segments import Array, mean_one, module_of, ones_or
from jtrees.tasks.base import Link, Loss, linked
from jtrees.tasks.fits import class_counts, effective_counts, samples_of_leaves, smoothed
from jtrees.tasks.labels import is_soft, shares
from jtrees.validation import check_scalar

_CERTAIN = 1e4  # an output with a softmax of exactly 1 if all other outputs are 0
_TRAINABLE = 1.0  # output of the chosen action in leaves for further training


def log_loss(probabilities: Float[Array, "n k"], y: Int[Array, " n"] | Float[Array, "n k"]) -> Float[Array, " n"]:
    """Returns ``-log p_y`` of each sample, or for soft labels ``(n, k)`` the cross-entropy ``-sum_k y_k log p_k``.

    Probabilities below the smallest normal number of float32 are raised to it. The precision of NumPy arrays is kept.
    """
    xp = module_of(probabilities)
    tiny = max(float(xp.finfo(probabilities.dtype).tiny), float(xp.finfo(xp.float32).tiny))
    if is_soft(y):
        return -(y.astype(probabilities.dtype) * xp.log(xp.maximum(probabilities, tiny))).sum(1)
    chosen = xp.take_along_axis(probabilities, y[:, None], axis=1)[:, 0]
    return -xp.log(xp.maximum(chosen, tiny))


@io.part
@dataclasses.dataclass(frozen=True)
class LogLoss(Loss):
    """Log loss ``-log p_y`` of the softmax p of the outputs. Best constants are logarithms of class frequencies.

    For soft labels, the probabilities ``(n, k)`` of the classes, the loss is the cross-entropy ``-sum_k y_k log p_k``.

    Trainable leaves hold logits. Fitted leaves hold :class:`Frequencies`: smoothed class frequencies, where uneven
    weights count as fewer samples (Kish's effective sample size of each leaf).

    Smoothing changes the labels, so only the smoothed loss is used. Training, the choice between trees, held-out losses
    and reports use it. The simpler models of a verdict minimise it. It is never below the entropy of a smoothed label,
    so the loss of perfect predictions is not 0.

    Args:
      smoothing: part of the label that all classes share equally, at least 0 and below 1 (Szegedy et al. 2016).

    Raises:
      ValueError: for a smoothing outside [0, 1).
    """

    smoothing: float = 0.0

    link: ClassVar[Link] = "softmax"
    measure: ClassVar[str] = "log loss"
    choice: ClassVar[Literal["class", "action"] | None] = "class"

    def __post_init__(self) -> None:
        object.__setattr__(self, "smoothing", check_scalar("smoothing", self.smoothing, least=0, below=1))

    @property
    def kernel(self) -> str | None:
        """Name of the loss in the kernel of :func:`jtrees.ops.expected_loss`; None with smoothing."""
        return None if self.smoothing else "log"

    def smooth_labels(self, amounts: Float[Array, "*n k"]) -> Float[Array, "*n k"]:
        """Returns amounts of the classes, such as their probabilities, of smoothed labels."""
        if self.smoothing == 0:
            return amounts
        return (1 - self.smoothing) * amounts + self.smoothing / amounts.shape[-1] * amounts.sum(-1, keepdims=True)

    def labels(self, y: Int[Array, " n"] | Float[Array, "n k"], like: Array) -> Float[Array, "n k"]:
        """Returns smoothed probabilities of the classes. Integer labels are one-hot encoded."""
        return self.smooth_labels(shares(y if module_of(like) is np else jnp.asarray(y), like.shape[-1], like.dtype))

    def samples(self, outputs: Array, y: Array) -> Array:
        if self.smoothing == 0 and not is_soft(y):
            return optax.losses.softmax_cross_entropy_with_integer_labels(outputs, y)
        return optax.losses.softmax_cross_entropy(outputs, self.labels(y, outputs))

    def derivatives(self, outputs: Array, y: Array) -> tuple[Array, Array]:
        """Returns the gradient, and the curvature of each output times K / (K - 1).

        All K outputs step at once, and a common shift of them changes nothing. If the factor were missing, the steps
        would be too long, for two classes by a factor of 2 (Friedman 2001, Algorithm 6).
        """
        chance, classes = jax.nn.softmax(outputs, axis=-1), outputs.shape[-1]
        return chance - self.labels(y, outputs), classes / max(classes - 1, 1) * chance * (1 - chance)

    def initial(self, y: Array, weight: Array, classes: int) -> Array:
        """Returns the logarithms of the class frequencies, after adding one sample of each class."""
        none = jnp.zeros(len(y), jnp.int32)
        counts = 1 + class_counts(none, y, 1, classes, sample_weight=weight)[0]
        return jnp.log(self.smooth_labels(counts / counts.sum()))

    def of_leaves(self, values: Array, y: Array) -> Array:
        # A product with one-hot rows replaces a gather, because the transpose of a gather is a scatter.
        classes = values.shape[1]
        chances = y.T.astype(values.dtype) if is_soft(y) else jax.nn.one_hot(y, classes, axis=0, dtype=values.dtype)
        if self.smoothing:
            chances = (1 - self.smoothing) * chances + self.smoothing / classes
        return -jnp.matmul(jax.nn.log_softmax(values, axis=1), chances, precision="highest")

    @property
    def hard_loss(self) -> "Frequencies":
        """The loss of class frequencies."""
        return Frequencies(self.smoothing)

    def fitted(self, values: Array, leaf_index: Array, y: Array, sample_weight: Array | None) -> Array:
        _, samples, prior = _counts(values, leaf_index, y, sample_weight)
        return self.smooth_labels(smoothed(samples, prior))

    def criterion(self, values: Array, leaf_index: Array, y: Array, sample_weight: Array | None) -> Array:
        counts, samples, prior = _counts(values, leaf_index, y, sample_weight)
        counts, frequencies = self.smooth_labels(counts), self.smooth_labels(smoothed(samples, prior))
        return -jax.scipy.special.xlogy(counts, frequencies).sum() / counts.sum()

    def mean_terms(self, values: Array, y: Array) -> Array:
        return shares(y, values.shape[1], None if module_of(y) is np else values.dtype)

    def values_from_means(self, means: Array, leaf_index: Array, y: Array, sample_weight: Array | None) -> Array:
        weight = mean_one(ones_or(sample_weight, y, means.dtype))
        prior = _counts(means, leaf_index, y, sample_weight)[2]
        samples = samples_of_leaves(leaf_index, weight, len(means))
        shrunk = module_of(leaf_index, y).maximum(means, 0) * samples[:, None]
        return self.smooth_labels(smoothed(shrunk, prior))

    def hardened(self, values: Array) -> Array:
        return linked("softmax", values)


def _counts(values: Array, leaf_index: Array, y: Array, sample_weight: Array | None) -> tuple[Array, Array, Array]:
    """Returns the class weights of each leaf, its effective class counts, and the prior of the classes."""
    weight = mean_one(ones_or(sample_weight, y, values.dtype))
    counts = class_counts(leaf_index, y, *values.shape, sample_weight=weight)
    return counts, *effective_counts(counts, leaf_index, weight)


@io.part
@dataclasses.dataclass(frozen=True)
class Frequencies(LogLoss):
    """Log loss of class frequencies (not logits), for the leaves of hard trees.

    Frequencies below the smallest normal number are raised to it.

    Args:
      smoothing: as in :class:`LogLoss`. Fitted frequencies are the frequencies of smoothed labels.

    Raises:
      ValueError: for a smoothing outside [0, 1).
    """

    link: ClassVar[Link] = "identity"
    kernel: ClassVar[None] = None  # type: ignore[override]

    @property
    def trainable_loss(self) -> LogLoss:
        """The loss of logits."""
        return LogLoss(self.smoothing)

    def samples(self, outputs: Array, y: Array) -> Array:
        return super().samples(self.trainable(outputs), y)

    def of_leaves(self, values: Array, y: Array) -> Array:
        return super().of_leaves(self.trainable(values), y)

    def trainable(self, values: Array) -> Array:
        values = jnp.asarray(values)
        return jnp.log(jnp.maximum(values, jnp.finfo(values.dtype).tiny))

    def hardened(self, values: Array) -> Array:
        return values


@io.part
@dataclasses.dataclass(frozen=True)
class Rewards(Loss):
    """Negative expected reward of an action that is drawn from the softmax of the outputs.

    The targets are the rewards of all actions, ``(n, actions)``. The best constant is an action.
    """

    link: ClassVar[Link] = "softmax"
    choice: ClassVar[Literal["class", "action"] | None] = "action"

    def samples(self, outputs: Array, y: Array) -> Array:
        return -(jax.nn.softmax(outputs, axis=-1) * y).sum(-1)

    def initial(self, y: Array, weight: Array, outputs: int) -> Array:
        return jnp.zeros(y.shape[1:], y.dtype)  # no preference, because a certain action has no gradient

    def derivatives(self, outputs: Array, y: Array) -> tuple[Array, Array]:
        played = jax.nn.softmax(outputs, axis=-1)
        gain = y - (played * y).sum(-1, keepdims=True)
        return -played * gain, played * (1 - played)

    def constants(self, leaf_index: Array, y: Array, num_leaves: int, weight: Array) -> Array:
        best = segments.means(leaf_index, y, num_leaves, weight).argmax(1)
        return _CERTAIN * (best[:, None] == np.arange(y.shape[1])).astype(y.dtype)

    def trainable(self, values: Array) -> Array:
        return jnp.clip(values, -_TRAINABLE, _TRAINABLE)  # an action is preferred, but not certain
