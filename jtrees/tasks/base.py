"""The loss of a task: its link, checks of targets, derivatives, best constants and units.

A loss also defines how leaves of values are trained and fitted. A model computes ``outputs``, and ``link(outputs)`` are
its predictions. A loss compares outputs with scaled targets (see :meth:`Loss.units`).
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int
import numpy as np

from jtrees import segments
from jtrees.segments import Array, module_of, ones_or
from jtrees.tasks.fits import newton_constants

Link = Literal["identity", "softmax", "exp", "sorted"]
SampleLoss = Callable[[jax.Array, jax.Array], jax.Array]  # outputs (n,) or (n, k), targets -> (n,)
_LONGEST = 4.0  # longest Newton step under a link, as in LogitBoost (Friedman, Hastie & Tibshirani 2000)


def linked(link: Link, outputs: Any) -> Any:
    """Returns predictions: outputs unchanged, or their softmax, sorted values or exponentials."""
    # Softmax and sorting act on the last axis. The precision of NumPy arrays is kept.
    if link == "identity":
        return outputs
    xp = module_of(outputs)
    if link == "exp":
        return xp.exp(outputs)
    if link == "sorted":
        return xp.sort(outputs, axis=-1)
    if xp is jnp:
        return jax.nn.softmax(outputs, axis=-1)
    powers = np.exp(outputs - outputs.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


class Loss:
    """A loss of outputs and targets.

    The loss is elementwise and averaged over several outputs, unless a subclass overrides ``samples``. Subclasses are
    frozen dataclasses, because losses are static parts of compiled programs.

    Attributes:
      link: name of the link from outputs to predictions.
      smooth: whether the curvature has a lower bound above 0, at usual outputs. If so, a boosted leaf takes a Newton
        step (the curvature of rewards is a surrogate), otherwise the best constant of its residuals: see :meth:`steps`.
      in_units: whether the loss is also defined for predictions and targets in the user's units
        (:meth:`of_predictions`).
      measure: name of the mean loss, such as ``"mean squared error"``.
      choice: the type of choice that the largest prediction makes, ``"class"`` or ``"action"``. None for predictions of
        numbers.
    """

    link: ClassVar[Link] = "identity"
    smooth: ClassVar[bool] = True
    in_units: ClassVar[bool] = True
    measure: ClassVar[str] = "loss"
    choice: ClassVar[Literal["class", "action"] | None] = None

    @property
    def kernel(self) -> str | None:
        """Name of the loss in the kernel of :func:`jtrees.ops.expected_loss`; None if no kernel has the loss."""
        return None

    @property
    def outputs(self) -> int | None:
        """Number of outputs for one target. None: a single output without an output axis."""
        return None

    def check(self, y: np.ndarray) -> None:
        """Raises ``ValueError`` for targets that the loss does not accept. The message names the first of them."""

    def check_training(self, y: np.ndarray) -> None:
        """Raises ``ValueError`` for training targets that the loss cannot be fitted to."""
        self.check(y)

    def units(self, y: np.ndarray) -> tuple[Any, Any]:
        """Returns the offset and the unit of the targets.

        Scaled targets, ``(y - offset) / unit``, are in [0, 1], or have mean 1 under a log link.
        """
        return y.min(0), np.ptp(y, axis=0)

    def scaled(self, unit: Any) -> "Loss":
        """Returns the loss of targets divided by ``unit``."""
        return self

    def unit_exponent(self) -> float:
        """Returns the exponent k if the unit of the loss is the k-th power of the targets' unit."""
        return 1.0

    def samples(self, outputs: Float[Array, "n *k"], y: Float[Array, "n *k"]) -> Float[Array, " n"]:
        """Returns the loss of each sample."""
        targets = self.with_output_axis(y)
        if outputs.ndim != targets.ndim:  # they would be broadcast, to n losses of each sample
            raise ValueError(f"y must have {outputs.ndim} axes, as outputs, got shape {targets.shape}")
        values = self.elementwise(outputs, targets)
        return values if values.ndim == 1 else values.mean(axis=1)

    def with_output_axis(self, y: Any) -> Any:
        """Returns targets that broadcast against outputs."""
        return y if self.outputs is None else y[..., None]

    def elementwise(self, outputs: Array, y: Array) -> Array:
        """Returns the loss of each output."""
        return self.of_predictions(outputs, y)

    def of_predictions(self, predictions: Any, y: Any) -> Any:
        """Returns the loss of each prediction. The precision of NumPy arrays is kept."""
        raise NotImplementedError

    def derivatives(self, outputs: Float[Array, "n *k"], y: Float[Array, "n *k"]) -> tuple[Array, Array]:
        """Returns the gradient and the curvature of the loss for each output, in the shape of the outputs."""
        raise NotImplementedError

    def constants(
        self, leaf_index: Int[Array, " n"], y: Array, num_leaves: int, weight: Float[Array, " n"]
    ) -> Float[Array, "leaves *k"]:
        """Returns the constant output of each leaf that minimises the loss of its samples.

        A leaf without weight has the constant of all samples. NumPy arrays are fitted in double precision.
        """
        raise NotImplementedError

    def initial(self, y: Array, weight: Float[Array, " n"], outputs: int) -> Float[Array, "*k"]:
        """Returns the initial value of boosting, the best constant, as an array of ``outputs`` numbers."""
        return self.constants(jnp.zeros(len(y), jnp.int32), y, 1, weight)[0]

    def best(self, y: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
        """Returns the best constant prediction of targets in the user's units, ``(*k,)``."""
        one_leaf = np.zeros(len(y), np.int32)
        return np.asarray(linked(self.link, self.constants(one_leaf, y, 1, ones_or(weight, y))[0]))

    def is_smooth(self, shape: tuple[int, ...]) -> bool:
        """Returns ``smooth`` for outputs of a sample of this shape, ``()`` or ``(k,)``."""
        return self.smooth

    def newton(self, outputs: Array, y: Array) -> tuple[Array, Array]:
        """Returns the Newton step of each output, ``-gradient / curvature``, and the curvature.

        The curvature is the weight of the step in least squares. It is 1 if the loss is not smooth. Steps under a link
        are clipped to [-4, 4].
        """
        gradient, curvature = self.derivatives(outputs, y)
        if not self.is_smooth(outputs.shape[1:]):
            return -gradient, jnp.ones_like(gradient)
        curvature = jnp.maximum(curvature, jnp.finfo(curvature.dtype).eps)
        step = -gradient / curvature
        return step if self.link == "identity" else jnp.clip(step, -_LONGEST, _LONGEST), curvature

    def steps(
        self, leaf_index: Array, outputs: Array, y: Array, num_leaves: int, weight: Array, l2: Any
    ) -> Float[Array, "leaves *k"]:
        """Returns the step of each leaf in boosting, which is added to the outputs of the leaf's samples.

        If the loss is smooth, the step is a Newton step, ``-sum w g / (sum w h + l2)``. These are the squared error,
        the log loss, the Poisson, gamma and Tweedie deviances, and user-defined losses whose curvature has a lower
        bound. Otherwise, the step is the best constant of the residuals (:meth:`shifts`), multiplied by ``n / (n +
        l2)`` for a leaf of n samples. These are the absolute, Huber and pinball losses, and all other user-defined
        losses. A Newton step would be unbounded where the curvature is 0. The step of a leaf without weight is 0.

        Args:
          leaf_index: leaf of each sample.
          outputs: current outputs.
          y: targets.
          num_leaves: number of leaves.
          weight: nonnegative weights.
          l2: curvature added to each leaf, at least 0, a number or ``(*k,)``. If the loss is not smooth, l2 is a number
            of samples.
        """
        if not self.is_smooth(outputs.shape[1:]):
            count = segments.sums(weight, leaf_index, num_leaves)
            best = self.shifts(leaf_index, outputs, y, num_leaves, weight)
            count = segments.wide(count, best)
            return count / jnp.where(count > 0, count + l2, 1) * best
        gradient, curvature = self.derivatives(outputs, y)
        weighted = lambda a: segments.wide(weight, a) * a
        summed = lambda a: segments.quick_sums(a, leaf_index, num_leaves)
        total = summed(weighted(curvature)) + l2
        step = jnp.where(total > 0, -summed(weighted(gradient)) / jnp.where(total > 0, total, 1), 0)
        return step if self.link == "identity" else jnp.clip(step, -_LONGEST, _LONGEST)

    def shifts(
        self, leaf_index: Array, outputs: Array, y: Array, num_leaves: int, weight: Array
    ) -> Float[Array, "leaves *k"]:
        """Returns the number that, added to the outputs of a leaf's samples, minimises their loss.

        Here, the loss is a function of ``outputs - y``, so the number is the best constant of the residuals.
        """
        return self.constants(leaf_index, self.with_output_axis(y) - outputs, num_leaves, weight)

    def factors(
        self, leaf_index: Array, outputs: Array, direction: Array, y: Array, num_leaves: int, weight: Array
    ) -> Float[Array, "leaves *k"]:
        """Returns the factor of the direction, in the shape of the outputs, that minimises the loss of each leaf.

        The Newton steps (``newton_constants``) start from the best factor for the absolute error, which is a weighted
        median of ratios.
        """
        flat = lambda a: a.reshape(len(a), -1).T
        residuals = jnp.broadcast_to(self.with_output_axis(y) - outputs, outputs.shape)
        medians = []
        for residual, along in zip(flat(residuals), flat(direction), strict=True):
            ratio, length = residual / jnp.where(along == 0, 1, along), weight * jnp.abs(along)
            medians.append(segments.quantiles(leaf_index, ratio, num_leaves, (0.5,), length)[0][:, 0])
        start = jnp.stack(medians, axis=1).reshape(num_leaves, *outputs.shape[1:])
        arguments = self.samples, self.derivatives, start, leaf_index, y, weight
        return newton_constants(*arguments, origin=outputs, direction=direction)

    # --- Leaves that hold values (leaves, *k): see :class:`jtrees.leaves.Values` ---

    def start(self, key: Array, y: Array, shape: tuple[int, ...], dtype: Any) -> Float[Array, "leaves *k"]:
        """Returns random values of this shape, in [0, 1] if outputs are scaled targets, else in [-1, 1]."""
        values = jax.random.uniform(key, shape, dtype, -1, 1)
        return (values + 1) / 2 if self.link in ("identity", "sorted") else values

    def of_leaves(self, values: Float[Array, "leaves *k"], y: Array) -> Float[Array, "leaves n"]:
        """Returns the loss of every leaf's values on every sample."""
        return jax.vmap(self.samples, (0, None))(at_every_sample(values, len(y)), y)

    @property
    def hard_loss(self) -> "Loss":
        """The loss of fitted and hard leaves."""
        return self

    @property
    def trainable_loss(self) -> "Loss":
        """The loss of trainable leaves."""
        return self

    def fitted(
        self, values: Float[Array, "leaves *k"], leaf_index: Int[Array, " n"], y: Array, sample_weight: Array | None
    ) -> Float[Array, "leaves *k"]:
        """Returns values fitted to samples: best constants of ``hard_loss``.

        Args:
          values: the old values. Only their shape and dtype matter.
          leaf_index: leaf of each sample.
          y: targets.
          sample_weight: nonnegative weights, or None.
        """
        weight = ones_or(sample_weight, y, values.dtype)
        return self.constants(leaf_index, y, len(values), weight)

    def criterion(
        self, values: Float[Array, "leaves *k"], leaf_index: Int[Array, " n"], y: Array, sample_weight: Array | None
    ) -> Float[Array, ""]:
        """Returns the mean loss of the samples after :meth:`fitted`, which has the same arguments."""
        weight = ones_or(sample_weight, y, values.dtype)
        outputs = self.fitted(values, leaf_index, y, sample_weight)[leaf_index]
        return segments.total(weight * self.samples(outputs, y)) / segments.total(weight)

    def mean_terms(self, values: Float[Array, "leaves *k"], y: Array) -> Float[Array, "n *k"] | None:
        """Returns the numbers of the samples whose means are the fitted values; None if the values are not means."""
        return None

    def values_from_means(
        self, means: Float[Array, "leaves *k"], leaf_index: Array, y: Array, sample_weight: Array | None
    ) -> Float[Array, "leaves *k"]:
        """Returns the values of ``hard_loss`` for given leaf means of :meth:`mean_terms`."""
        return means

    def trainable(self, values: Float[Array, "leaves *k"]) -> Float[Array, "leaves *k"]:
        """Returns values of ``trainable_loss``, which have gradients."""
        return values

    def hardened(self, values: Float[Array, "leaves *k"]) -> Float[Array, "leaves *k"]:
        """Returns the values of ``hard_loss``, given trained values."""
        return values

    def rescaled(self, values: Any, zero: Any, unit: Any) -> np.ndarray:
        """Returns the values for predictions ``zero + unit * prediction``, in double precision.

        An exponential link uses only the unit. Probabilities have no units.
        """
        values = np.asarray(values, np.float64)
        if self.link == "exp":
            return values + np.log(unit)
        return values if self.link == "softmax" else np.asarray(zero + unit * values)


def at_every_sample(values: Float[Array, "leaves *k"], n: int) -> Float[Array, "leaves n *k"]:
    """Returns the values of every leaf, repeated for n samples."""
    # The transpose of a product with ones is a matrix product. The transpose of a broadcast would be a sum over
    # samples, which is several times slower on a CPU.
    values = jnp.asarray(values)
    flat = jnp.matmul(values.reshape(-1, 1), jnp.ones((1, n), values.dtype), precision="highest")
    return jnp.moveaxis(flat.reshape(*values.shape, -1), -1, 1)


def weighted_mean(sample_losses: Float[Array, " n"], weight: Float[Array, " n"] | None) -> Float[Array, ""]:
    """Returns the weighted mean of losses. Weights must have mean 1 over the data set.

    The sum is divided by the number of samples, not by the sum of weights. A sample's contribution therefore does not
    depend on its mini-batch. A sample of weight 0 does not count, even if its loss is infinite. (Its gradient must be
    finite: 0 times infinity is not a number.)
    """
    return sample_losses.mean() if weight is None else jnp.where(weight > 0, weight * sample_losses, 0).mean()


def mean_loss(sample_losses: Float[Array, " n"], weight: Float[Array, " n"] | None) -> Float[Array, ""]:
    """Returns the mean of losses for weights of any mean; weights None: equal weights."""
    return weighted_mean(sample_losses, weight if weight is None else weight / weight.mean())
