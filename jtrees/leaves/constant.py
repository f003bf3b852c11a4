"""Leaves that answer one thing whatever the sample: a number or several, logits, class frequencies."""

from collections.abc import Sequence
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num
import numpy as np

from jtrees import io

# --- Fitting: segment sums over the samples --------------------------------------------------------------------------


def mid_range(y: Float[Array, "n *k"]) -> Float[Array, "*k"]:
    """Half way between the smallest and the largest target: GET's value for a leaf that no sample reaches."""
    return (y.min(0) + y.max(0)) / 2


def floating(y: Array) -> Array:
    """Targets as floating numbers."""
    return y if jnp.issubdtype(y.dtype, jnp.floating) else y.astype(jnp.float32)


def ones_or(sample_weight: Array | None, n: int, dtype: Any) -> Float[Array, " n"]:
    """The weights given, or ones."""
    return jnp.ones(n, dtype) if sample_weight is None else jnp.asarray(sample_weight, dtype)


def effective(sample_weight: Array | None) -> Array | None:
    """Weights, of which only the ratios matter, as numbers of samples.

    They then sum to the number of equally weighted samples that would tell as much (Kish), so that whatever takes a
    weight for a number of samples, as cross-validation and smoothing do, is not too sure.
    """
    if sample_weight is None:
        return None
    weight = sample_weight / jnp.maximum(sample_weight.max(), jnp.finfo(sample_weight.dtype).tiny)
    return weight * weight.sum() / jnp.maximum(jnp.square(weight).sum(), jnp.finfo(weight.dtype).tiny)


def _expand(weight: Array, like: Array) -> Array:
    return weight.reshape(weight.shape + (1,) * (like.ndim - weight.ndim))


def fit_constant(
    leaf_index: Int[Array, " n"],
    y: Num[Array, "n *k"],
    num_leaves: int,
    *,
    default: float | Array | None = None,
    sample_weight: Float[Array, " n"] | None = None,
) -> Float[Array, "leaves *k"]:
    """The mean of the targets in each leaf (GET, Algorithm 1: deterministic leaves).

    Args:
      leaf_index: leaf of each sample.
      y: targets, ``(n,)`` or ``(n, k)``.
      num_leaves: number of leaves.
      default: value of a leaf without samples (or without weight); by default the mid-range of ``y``.
      sample_weight: nonnegative weights.

    Returns:
      Values of shape ``(leaves,)`` or ``(leaves, k)``.
    """
    y = floating(y)
    weight = ones_or(sample_weight, y.shape[0], y.dtype)
    default = jnp.asarray(mid_range(y) if default is None else default, y.dtype)
    # Sums of deviations from the default, not of y itself: what is summed is then no larger than the spread of y.
    total = jax.ops.segment_sum(_expand(weight, y) * (y - default), leaf_index, num_leaves)
    count = jax.ops.segment_sum(weight, leaf_index, num_leaves)
    return default + total / _expand(jnp.where(count > 0, count, 1), total)


def constant_fit_error(
    leaf_index: Int[Array, " n"],
    y: Num[Array, "n *k"],
    num_leaves: int,
    *,
    sample_weight: Float[Array, " n"] | None = None,
) -> Float[Array, ""]:
    """Mean squared error that :func:`fit_constant` would leave on the same samples, without a second look at them.

    ``(sum_i w_i y_i**2 - sum_l S_l**2 / N_l) / sum_i w_i`` with ``S_l`` and ``N_l`` weighted sum and total weight of
    the (centred) targets in a leaf; of several outputs the mean.
    """
    y = floating(y).reshape(y.shape[0], -1)
    weight = ones_or(sample_weight, y.shape[0], y.dtype)
    total = jnp.asarray(y.shape[0], y.dtype) if sample_weight is None else weight.sum()
    y = y - jnp.matmul(weight, y, precision="highest") / total
    # One scatter of rows costs less than one for the weights and one for each output.
    sums = jax.ops.segment_sum(
        weight[:, None] * jnp.pad(y, ((0, 0), (1, 0)), constant_values=1), leaf_index, num_leaves
    )
    explained = jnp.square(sums[:, 1:]) / jnp.where(sums[:, :1] > 0, sums[:, :1], 1)
    return ((weight[:, None] * jnp.square(y)).sum() - explained.sum()) / (total * y.shape[1])


def class_counts(
    leaf_index: Int[Array, " n"],
    y: Int[Array, " n"],
    num_leaves: int,
    classes: int,
    *,
    sample_weight: Float[Array, " n"] | None = None,
) -> Float[Array, "leaves k"]:
    """Weight of the samples of each class in each leaf."""
    dtype = jnp.float32 if sample_weight is None else sample_weight.dtype
    weight = ones_or(sample_weight, y.shape[0], dtype)
    return jax.ops.segment_sum(weight, leaf_index * classes + y, num_leaves * classes).reshape(num_leaves, classes)


def fit_frequencies(
    leaf_index: Int[Array, " n"],
    y: Int[Array, " n"],
    num_leaves: int,
    classes: int,
    *,
    smoothing: float | Array = 1.0,
    sample_weight: Float[Array, " n"] | None = None,
) -> Float[Array, "leaves k"]:
    """Class frequencies in each leaf, with Laplace smoothing: ``(N_lk + s q_k) / (N_l + s)``.

    ``q`` are the frequencies among all samples and one more of each class (so none is 0): ``smoothing`` is a number of
    samples drawn from them that is added to every leaf; a leaf without samples answers ``q``. (With ``q_k = 1 / k``
    and ``s = k`` this would be Laplace's rule of one more sample of each class, which drowns small leaves where there
    are many classes.)

    Args:
      leaf_index: leaf of each sample.
      y: classes from 0 to ``classes - 1``.
      num_leaves: number of leaves.
      classes: number of classes, k.
      smoothing: the number s of samples added to every leaf, above 0.
      sample_weight: nonnegative weights; a weight counts as that many samples.

    Returns:
      ``(leaves, k)``, each row summing to one.
    """
    return _smoothed(class_counts(leaf_index, y, num_leaves, classes, sample_weight=sample_weight), smoothing)


def _smoothed(counts: Array, smoothing: float | Array) -> Array:
    prior = (counts.sum(0) + 1) / (counts.sum() + counts.shape[1])
    return (counts + smoothing * prior) / (counts.sum(1, keepdims=True) + smoothing)


def frequencies_fit_error(
    leaf_index: Int[Array, " n"],
    y: Int[Array, " n"],
    num_leaves: int,
    classes: int,
    *,
    smoothing: float | Array = 1.0,
    sample_weight: Float[Array, " n"] | None = None,
) -> Float[Array, ""]:
    """Mean log loss that :func:`fit_frequencies` would leave on the same samples, without a second look at them."""
    counts = class_counts(leaf_index, y, num_leaves, classes, sample_weight=sample_weight)
    return -jax.scipy.special.xlogy(counts, _smoothed(counts, smoothing)).sum() / counts.sum()


# --- Kinds -----------------------------------------------------------------------------------------------------------


def uniform_targets(key: Array, num_leaves: int, y: Array, dtype: Any) -> Float[Array, "leaves *k"]:
    """U(min y, max y) of each output, as GET starts."""
    low, high = y.min(0).astype(dtype), y.max(0).astype(dtype)
    return low + (high - low) * jax.random.uniform(key, (num_leaves, *y.shape[1:]), dtype)


def squared_losses(outputs: Float[Array, "leaves n *k"], y: Num[Array, "n *k"]) -> Float[Array, "leaves n"]:
    """Squared error of every leaf's answer to every sample; of several outputs the mean."""
    error = jnp.square(outputs - y)
    return error if y.ndim == 1 else error.mean(-1)


def number_text(value: float, digits: int, zero: float = 0.0) -> str:
    """``zero + value``, the value rounded to so many significant digits; ``zero`` is never rounded."""
    rounded = f"{value:.{digits}g}"
    return exact_text(zero + float(rounded)) if zero else rounded


def exact_text(value: Any) -> str:
    """The shortest text that reads back as this number in float64. That of a float32 would name another number."""
    return np.format_float_positional(np.float64(value), trim="-")


def listed(classes: Sequence[str], most: int | None) -> str:
    """What there is to say of each class, of so many classes at most."""
    more = len(classes) - len(classes[:most])
    return ", ".join([*classes[:most], *([f"{more} more class{'' if more == 1 else 'es'}"] if more else [])])


class _Values:
    """What the kinds with one array of values share."""

    values: Any

    def count(self, reached: np.ndarray) -> int:
        """How many numbers the leaves that are reached, ``(leaves,)`` bool, hold."""
        return int(np.asarray(self.values)[reached].size)

    def describe(self, leaf: int, names: Sequence[str], digits: int, y_zero: Any = 0, **_: Any) -> str:
        """What a leaf answers, as text; ``y_zero`` is added to it. What there is to say of terms and classes concerns
        other kinds.
        """
        answer = np.reshape(np.asarray(self.values, np.float64)[leaf], -1)
        return ", ".join(number_text(v, digits, zero) for v, zero in zip(answer, y_zero + 0 * answer, strict=True))

    def trainable(self) -> Any:
        """Parameters to go on from."""
        return self

    def rescaled(self, x_zero: Any, x_unit: Any, y_zero: Any, y_unit: Any) -> Any:
        """The same leaves on ``x_zero + x_unit x``, answering ``y_zero + y_unit`` times what they do."""
        return self


@io.part
@struct.dataclass
class Constant(_Values):
    """One constant a leaf, or k of them.

    Attributes:
      values: ``(leaves,)``, or ``(leaves, k)`` for k outputs.
    """

    values: Float[Array, "leaves *k"]

    @classmethod
    def start(cls, key: Array, num_leaves: int, x: Array, y: Array, outputs: tuple[int, ...]) -> "Constant":
        """Random leaves to train from."""
        return cls(uniform_targets(key, num_leaves, y, x.dtype))

    @classmethod
    def empty(cls, num_leaves: int, features: int, outputs: tuple[int, ...], dtype: Any = jnp.float32) -> "Constant":
        """Leaves of this shape, to be refitted."""
        return cls(jnp.zeros((num_leaves, *outputs), dtype))

    def at(self, leaf_index: Int[Array, " n"], x: Float[Array, "n p"]) -> Float[Array, "n *k"]:
        """What the given leaf answers for each sample."""
        return self.values.at[leaf_index].get(mode="promise_in_bounds")

    def outputs(self, x: Float[Array, "n p"]) -> Float[Array, "leaves n *k"]:
        """What every leaf would answer for every sample."""
        # A product with a row of ones, not a broadcast: its transpose is then a matrix product too, several times
        # faster on a CPU than a sum over samples.
        ones = jnp.ones((1, x.shape[0]), self.values.dtype)
        flat = jnp.matmul(self.values.reshape(-1, 1), ones, precision="highest")
        return jnp.moveaxis(flat.reshape(*self.values.shape, -1), -1, 1)

    def losses(self, x: Float[Array, "n p"], y: Num[Array, "n *k"]) -> Float[Array, "leaves n"]:
        """What every leaf would lose on every sample: squared error, of several outputs the mean."""
        return squared_losses(self.outputs(x), y)

    def refit(self, leaf_index: Array, x: Array, y: Array, sample_weight: Array | None = None) -> "Constant":
        """Means of the targets in each leaf."""
        return Constant(fit_constant(leaf_index, y, len(self.values), sample_weight=sample_weight))

    def criterion(self, leaf_index: Array, x: Array, y: Array, sample_weight: Array | None = None) -> Array:
        """What hard trees are chosen by: the mean squared error that :meth:`refit` leaves."""
        return constant_fit_error(leaf_index, y, len(self.values), sample_weight=sample_weight)

    def rescaled(self, x_zero: Any, x_unit: Any, y_zero: Any, y_unit: Any) -> "Constant":
        """The same leaves, answering ``y_zero + y_unit`` times what they do."""
        return Constant(jnp.asarray(y_zero + y_unit * np.asarray(self.values, np.float64), jnp.float32))


@io.part
@struct.dataclass
class Logit(_Values):
    """The logits of k classes in each leaf, as they are trained; the answer is their softmax.

    Attributes:
      values: ``(leaves, k)``.
    """

    values: Float[Array, "leaves k"]

    @classmethod
    def start(cls, key: Array, num_leaves: int, x: Array, y: Array, outputs: tuple[int, ...]) -> "Logit":
        """Random leaves to train from."""
        return cls(jax.random.uniform(key, (num_leaves, *outputs), x.dtype, -1, 1))

    @classmethod
    def empty(cls, num_leaves: int, features: int, outputs: tuple[int, ...], dtype: Any = jnp.float32) -> "Logit":
        """Leaves of this shape, to be refitted."""
        return cls(jnp.zeros((num_leaves, *outputs), dtype))

    def at(self, leaf_index: Int[Array, " n"], x: Float[Array, "n p"]) -> Float[Array, "n k"]:
        """Class probabilities in the given leaf of each sample."""
        return self.frequencies().at(leaf_index, x)

    def outputs(self, x: Float[Array, "n p"]) -> Float[Array, "leaves n k"]:
        """Class probabilities in every leaf for every sample."""
        return self.frequencies().outputs(x)

    def losses(self, x: Float[Array, "n p"], y: Int[Array, " n"]) -> Float[Array, "leaves n"]:
        """Log loss of every leaf on every sample."""
        # A product with one-hot rows, not a gather: its transpose is then a product too, not a scatter.
        one_hot = jax.nn.one_hot(y, self.values.shape[1], axis=0, dtype=self.values.dtype)
        return -jnp.matmul(jax.nn.log_softmax(self.values, axis=1), one_hot, precision="highest")

    def describe(self, leaf: int, names: Sequence[str], digits: int, y_zero: Any = 0, **shown: Any) -> str:
        """What a leaf answers, as text: see :meth:`Frequency.describe`."""
        return self.frequencies().describe(leaf, names, digits, y_zero, **shown)

    def frequencies(self) -> "Frequency":
        """The probabilities that the logits stand for."""
        return Frequency(jax.nn.softmax(self.values, axis=1))

    def refit(self, leaf_index: Array, x: Array, y: Array, sample_weight: Array | None = None) -> "Frequency":
        """Smoothed class frequencies in each leaf, uneven weights counting as fewer samples."""
        weight = ones_or(effective(sample_weight), y.shape[0], self.values.dtype)
        return Frequency(fit_frequencies(leaf_index, y, *self.values.shape, sample_weight=weight))

    def criterion(self, leaf_index: Array, x: Array, y: Array, sample_weight: Array | None = None) -> Array:
        """What hard trees are chosen by: the mean log loss that :meth:`refit` leaves."""
        weight = ones_or(effective(sample_weight), y.shape[0], self.values.dtype)
        return frequencies_fit_error(leaf_index, y, *self.values.shape, sample_weight=weight)


@io.part
@struct.dataclass
class Frequency(_Values):
    """Class frequencies in each leaf: what hard trees answer in classification.

    Attributes:
      values: ``(leaves, k)``, each row summing to one.
    """

    values: Float[Array, "leaves k"]

    at, outputs = Constant.at, Constant.outputs

    def losses(self, x: Float[Array, "n p"], y: Int[Array, " n"]) -> Float[Array, "leaves n"]:
        """Log loss of every leaf on every sample."""
        return self.trainable().losses(x, y)

    def trainable(self) -> Logit:
        """The logits to go on from; a frequency of 0 is taken for the least normal number."""
        return Logit(jnp.log(jnp.maximum(self.values, jnp.finfo(self.values.dtype).tiny)))

    refit, criterion = Logit.refit, Logit.criterion

    def describe(
        self,
        leaf: int,
        names: Sequence[str],
        digits: int,
        y_zero: Any = 0,
        *,
        max_terms: int | None = None,
        deviations: np.ndarray | None = None,
        class_names: Sequence[str] | None = None,
    ) -> str:
        """The probabilities of a leaf as text: in order, or by name, the likeliest ``max_terms`` first."""
        if class_names is None:
            return super().describe(leaf, names, digits)
        chances = np.asarray(self.values)[leaf]
        parts = [f"{class_names[i]}: {number_text(chances[i], digits)}" for i in np.argsort(-chances, kind="stable")]
        return listed(parts, max_terms)
