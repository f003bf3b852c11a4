"""Constant leaves: numbers, logits, class frequencies."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Num
import numpy as np

from jtrees import io, pytree, segments, validation
from jtrees.losses.base import linked
from jtrees.segments import Array, module_of

# --- Fitting ---------------------------------------------------------------------------------------------------------


def floating(y: Array) -> Array:
    """Returns targets in a floating dtype, NumPy arrays in double precision."""
    if isinstance(y, np.ndarray):
        return y.astype(np.float64)
    return y if jnp.issubdtype(y.dtype, jnp.floating) else y.astype(jnp.float32)


def ones_or(sample_weight: Array | None, y: Array, dtype: Any = None) -> Float[Array, " n"]:
    """Returns the weights, or ones for None, of the kind of array of the targets: see :mod:`jtrees.segments`.

    Args:
      sample_weight: weights, or None.
      y: targets.
      dtype: dtype of arrays of JAX; None: that of the targets.
    """
    xp = module_of(y) if sample_weight is None else module_of(y, sample_weight)
    dtype = np.float64 if xp is np else jax.dtypes.canonicalize_dtype(y.dtype if dtype is None else dtype)
    return xp.ones(len(y), dtype) if sample_weight is None else xp.asarray(sample_weight, dtype)


def effective(sample_weight: Array | None) -> Array | None:
    """Returns weights rescaled to effective numbers of samples; only their ratios matter.

    They sum to Kish's effective sample size, so that methods that treat a weight as a number of samples, such as
    cross-validation and smoothing, are not overconfident.
    """
    if sample_weight is None:
        return None
    xp, tiny = module_of(sample_weight), np.finfo(sample_weight.dtype).tiny
    weight = sample_weight / xp.maximum(sample_weight.max(), tiny)
    return weight * segments.total(weight) / xp.maximum(segments.total(weight * weight), tiny)


def fit_constant(
    leaf_index: Int[Array, " n"],
    y: Num[Array, "n *k"],
    num_leaves: int,
    *,
    default: float | Array | None = None,
    sample_weight: Float[Array, " n"] | None = None,
) -> Float[Array, "leaves *k"]:
    """Returns the mean of the targets in each leaf (GET, Algorithm 1: deterministic leaves).

    Args:
      leaf_index: leaf of each sample.
      y: targets, ``(n,)`` or ``(n, k)``.
      num_leaves: number of leaves.
      default: value of a leaf without samples (or weight); by default the mid-range of ``y``.
      sample_weight: nonnegative weights.

    Returns:
      Values of shape ``(leaves,)`` or ``(leaves, k)``.

    Example:
      >>> leaf, y = jnp.array([0, 0, 1, 1]), jnp.array([1.0, 3.0, 5.0, 7.0])
      >>> print(jtrees.leaves.fit_constant(leaf, y, 2))
      [2. 6.]
    """
    y = floating(y)
    # The mid-range is GET's value of an empty leaf.
    default = (y.min(0) + y.max(0)) / 2 if default is None else default
    default = module_of(y).asarray(default, y.dtype)
    return segments.means(leaf_index, y, num_leaves, ones_or(sample_weight, y), default=default)


def constant_fit_error(
    leaf_index: Int[Array, " n"],
    y: Num[Array, "n *k"],
    num_leaves: int,
    *,
    sample_weight: Float[Array, " n"] | None = None,
) -> Float[Array, ""]:
    """Returns the mean squared error of :func:`fit_constant` on the same samples, in one pass.

    ``(sum_i w_i y_i**2 - sum_l S_l**2 / N_l) / sum_i w_i`` with ``S_l`` and ``N_l`` weighted sum and total weight of
    the (centred) targets in a leaf; of several outputs the mean.

    Example:
      >>> leaf, y = jnp.array([0, 0, 1, 1]), jnp.array([1.0, 3.0, 5.0, 7.0])
      >>> print(jtrees.leaves.constant_fit_error(leaf, y, 2))
      1.0
    """
    y = floating(y).reshape(y.shape[0], -1)
    weight = ones_or(sample_weight, y)
    total = segments.total(weight)
    y = y - (segments.total(weight[:, None] * y) / total)[None]
    # One scatter of rows is cheaper than one for the weights and one for each output.
    columns = weight[:, None] * jnp.pad(y, ((0, 0), (1, 0)), constant_values=1)
    sums = segments.sums(columns, leaf_index, num_leaves)
    explained = jnp.square(sums[:, 1:]) / jnp.where(sums[:, :1] > 0, sums[:, :1], 1)
    return (segments.total(weight[:, None] * jnp.square(y)).sum() - explained.sum()) / (total * y.shape[1])


def class_counts(
    leaf_index: Int[Array, " n"],
    y: Int[Array, " n"],
    num_leaves: int,
    classes: int,
    *,
    sample_weight: Float[Array, " n"] | None = None,
) -> Float[Array, "leaves k"]:
    """Returns the total weight of each class in each leaf.

    Example:
      >>> leaf, y = jnp.array([0, 0, 1, 1]), jnp.array([0, 0, 1, 0])
      >>> print(jtrees.leaves.class_counts(leaf, y, 2, 2))
      [[2. 0.]
       [1. 1.]]
    """
    weight = ones_or(sample_weight, y, jnp.float32 if sample_weight is None else sample_weight.dtype)
    return segments.sums(weight, leaf_index * classes + y, num_leaves * classes).reshape(num_leaves, classes)


def fit_frequencies(
    leaf_index: Int[Array, " n"],
    y: Int[Array, " n"],
    num_leaves: int,
    classes: int,
    *,
    smoothing: float | Array = 1.0,
    sample_weight: Float[Array, " n"] | None = None,
) -> Float[Array, "leaves k"]:
    """Returns class frequencies in each leaf with Laplace smoothing: ``(N_lk + s q_k) / (N_l + s)``.

    ``q`` are the frequencies among all samples and one more of each class (so none is 0), to which empty leaves are
    set. (``q_k = 1 / k`` and ``s = k`` would be Laplace's rule of one more sample of each class, which dominates small
    leaves if there are many classes.)

    Args:
      leaf_index: leaf of each sample.
      y: classes from 0 to ``classes - 1``.
      num_leaves: number of leaves.
      classes: number of classes, k.
      smoothing: weight s of the prior q in samples, above 0.
      sample_weight: nonnegative weights; a weight counts as that many samples.

    Returns:
      ``(leaves, k)``, each row summing to one.

    Example:
      >>> leaf, y = jnp.array([0, 0, 1, 1]), jnp.array([0, 0, 1, 0])
      >>> print(np.asarray(jtrees.leaves.fit_frequencies(leaf, y, 2, 2)).round(2))
      [[0.89 0.11]
       [0.56 0.44]]
    """
    counts = class_counts(leaf_index, y, num_leaves, classes, sample_weight=sample_weight)
    return smoothed(counts, prior_of(counts), smoothing)


def prior_of(counts: Float[Array, "leaves k"]) -> Float[Array, " k"]:
    """Returns class frequencies among all samples and one more of each class."""
    return (counts.sum(0) + 1) / (counts.sum() + counts.shape[1])


def smoothed(counts: Array, prior: Array, smoothing: float | Array = 1.0) -> Float[Array, "leaves k"]:
    """Returns frequencies of counts to which ``smoothing`` samples of the prior are added."""
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
    """Returns the mean log loss of :func:`fit_frequencies` on the same samples, in one pass.

    Example:
      >>> leaf, y = jnp.array([0, 0, 1, 1]), jnp.array([0, 0, 1, 0])
      >>> print(np.asarray(jtrees.leaves.frequencies_fit_error(leaf, y, 2, 2)).round(3))
      0.409
    """
    counts = class_counts(leaf_index, y, num_leaves, classes, sample_weight=sample_weight)
    return -jax.scipy.special.xlogy(counts, smoothed(counts, prior_of(counts), smoothing)).sum() / counts.sum()


# --- Kinds -----------------------------------------------------------------------------------------------------------


def uniform_targets(key: Array, num_leaves: int, y: Array, dtype: Any) -> Float[Array, "leaves *k"]:
    """Returns draws from U(min y, max y) for each output, the initialisation of GET."""
    low, high = y.min(0).astype(dtype), y.max(0).astype(dtype)
    return low + (high - low) * jax.random.uniform(key, (num_leaves, *y.shape[1:]), dtype)


def squared_losses(outputs: Float[Array, "leaves n *k"], y: Num[Array, "n *k"]) -> Float[Array, "leaves n"]:
    """Returns the squared error of every leaf's output for every sample; of several outputs the mean."""
    error = jnp.square(outputs - y)
    return error if y.ndim == 1 else error.mean(-1)


def number_text(value: float, digits: int, zero: float = 0.0) -> str:
    """Returns ``zero + value`` as text, with the value rounded to significant digits, but not ``zero``."""
    rounded = f"{value:.{digits}g}"
    return exact_text(zero + float(rounded)) if zero else rounded


def exact_text(value: Any) -> str:
    """Returns the shortest text that parses as this number in float64 (that of a float32 is less precise)."""
    return np.format_float_positional(np.float64(value), trim="-")


def listed(classes: Sequence[str], most: int | None) -> str:
    """Returns the texts of up to ``most`` classes joined, and the number of others."""
    more = len(classes) - len(classes[:most])
    return ", ".join([*classes[:most], *([f"{more} more class{'' if more == 1 else 'es'}"] if more else [])])


@pytree.dataclass
class Values:
    """The common part of kinds with one array of values: those of constants, which others replace."""

    values: Any

    @classmethod
    def empty(cls, num_leaves: int, features: int, outputs: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
        """Returns zero leaves of this shape, to be refitted."""
        return cls(jnp.zeros((num_leaves, *outputs), dtype))

    def at(self, leaf_index: Int[Array, " n"], x: Float[Array, "n p"]) -> Float[Array, "n *k"]:
        """Returns the prediction of the given leaf for each sample; NumPy arrays in double precision."""
        values = self.predictions()
        if module_of(leaf_index) is np and not validation.is_traced(values):
            return np.asarray(values, np.float64)[leaf_index]
        return jnp.asarray(values).at[leaf_index].get(mode="promise_in_bounds")

    def predictions(self) -> Float[Array, "leaves *k"]:
        """Returns the prediction of every leaf."""
        return self.values

    def outputs(self, x: Float[Array, "n p"]) -> Float[Array, "leaves n *k"]:
        """Returns the output of every leaf for every sample."""
        # A product with ones, not a broadcast, so that its transpose is a matrix product, too, on a CPU several times
        # faster than a sum over samples.
        values = jnp.asarray(self.values)
        ones = jnp.ones((1, x.shape[0]), values.dtype)
        flat = jnp.matmul(values.reshape(-1, 1), ones, precision="highest")
        return jnp.moveaxis(flat.reshape(*self.values.shape, -1), -1, 1)

    def count(self, reached: np.ndarray) -> int:
        """Returns the number of parameters of the reached leaves, ``(leaves,)`` bool."""
        return int(np.asarray(self.values)[reached].size)

    def describe(self, leaf: int, names: Sequence[str], digits: int, y_zero: Any = 0, **_: Any) -> str:
        """Returns the value of a leaf plus ``y_zero`` as text; other options do not apply to constants."""
        values = np.reshape(np.asarray(self.values, np.float64)[leaf], -1)
        return ", ".join(number_text(v, digits, zero) for v, zero in zip(values, y_zero + 0 * values, strict=True))

    def trainable(self) -> Any:
        """Returns leaves with trainable parameters."""
        return self

    def rescaled(self, x_zero: Any, x_unit: Any, y_zero: Any, y_unit: Any) -> Any:
        """Returns the leaves for features ``x_zero + x_unit x`` and outputs ``y_zero + y_unit`` times the old ones."""
        return self


@io.part
@pytree.dataclass
class Constant(Values):
    """Leaves of one constant, or of k.

    Attributes:
      values: ``(leaves,)``, or ``(leaves, k)`` for k outputs.
    """

    values: Float[Array, "leaves *k"]

    @classmethod
    def start(cls, key: Array, num_leaves: int, x: Array, y: Array, outputs: tuple[int, ...]) -> "Constant":
        """Returns random initial leaves."""
        return cls(uniform_targets(key, num_leaves, y, x.dtype))

    def losses(self, x: Float[Array, "n p"], y: Num[Array, "n *k"]) -> Float[Array, "leaves n"]:
        """Returns the squared error of every leaf on every sample; of several outputs the mean."""
        return squared_losses(self.outputs(x), y)

    def refit(self, leaf_index: Array, x: Array, y: Array, sample_weight: Array | None = None) -> "Constant":
        """Returns leaves of the means of their targets."""
        return Constant(fit_constant(leaf_index, y, len(self.values), sample_weight=sample_weight))

    def criterion(self, leaf_index: Array, x: Array, y: Array, sample_weight: Array | None = None) -> Array:
        """Returns the criterion of hard trees: the mean squared error after :meth:`refit`."""
        return constant_fit_error(leaf_index, y, len(self.values), sample_weight=sample_weight)

    def rescaled(self, x_zero: Any, x_unit: Any, y_zero: Any, y_unit: Any) -> "Constant":
        """Returns the leaves for outputs ``y_zero + y_unit`` times the current ones, in double precision."""
        return Constant(np.asarray(y_zero + y_unit * np.asarray(self.values, np.float64)))


@io.part
@pytree.dataclass
class Logit(Values):
    """Trainable leaves of the logits of k classes, whose output is their softmax.

    Attributes:
      values: ``(leaves, k)``.
      smoothing: part of a label that is shared by all classes, as in :class:`jtrees.losses.LogLoss`.
    """

    values: Float[Array, "leaves k"]
    smoothing: float = pytree.field(pytree_node=False, default=0.0)

    @classmethod
    def start(
        cls, key: Array, num_leaves: int, x: Array, y: Array, outputs: tuple[int, ...], smoothing: float = 0.0
    ) -> "Logit":
        """Returns random initial leaves."""
        return cls(jax.random.uniform(key, (num_leaves, *outputs), x.dtype, -1, 1), smoothing)

    @classmethod
    def empty(
        cls,
        num_leaves: int,
        features: int,
        outputs: tuple[int, ...],
        dtype: Any = jnp.float32,
        *,
        smoothing: float = 0.0,
    ) -> "Logit":
        """Returns zero leaves of this shape, to be refitted."""
        return cls(jnp.zeros((num_leaves, *outputs), dtype), smoothing)

    def predictions(self) -> Float[Array, "leaves k"]:
        """Returns the class probabilities in every leaf."""
        return linked("softmax", self.values)

    def outputs(self, x: Float[Array, "n p"]) -> Float[Array, "leaves n k"]:
        """Returns class probabilities in every leaf for every sample."""
        return self.frequencies().outputs(x)

    def losses(self, x: Float[Array, "n p"], y: Int[Array, " n"]) -> Float[Array, "leaves n"]:
        """Returns the log loss of every leaf on every sample."""
        # A product with one-hot rows, not a gather, so that its transpose is not a scatter.
        one_hot = jax.nn.one_hot(y, self.values.shape[1], axis=0, dtype=self.values.dtype)
        if self.smoothing:
            one_hot = (1 - self.smoothing) * one_hot + self.smoothing / len(one_hot)
        return -jnp.matmul(jax.nn.log_softmax(self.values, axis=1), one_hot, precision="highest")

    def describe(self, leaf: int, names: Sequence[str], digits: int, y_zero: Any = 0, **shown: Any) -> str:
        """Returns the probabilities of a leaf as text: see :meth:`Frequency.describe`."""
        return self.frequencies().describe(leaf, names, digits, y_zero, **shown)

    def frequencies(self) -> "Frequency":
        """Returns leaves of the class probabilities."""
        return Frequency(self.predictions(), self.smoothing)

    def refit(self, leaf_index: Array, x: Array, y: Array, sample_weight: Array | None = None) -> "Frequency":
        """Returns leaves of smoothed class frequencies; uneven weights count as fewer samples."""
        weight = ones_or(effective(sample_weight), y, self.values.dtype)
        return self.of_frequencies(fit_frequencies(leaf_index, y, *self.values.shape, sample_weight=weight))

    def of_frequencies(self, frequencies: Float[Array, "leaves k"]) -> "Frequency":
        """Returns leaves of these frequencies of the labels, which are smoothed like them."""
        smoothing = self.smoothing
        if smoothing:
            frequencies = (1 - smoothing) * frequencies + smoothing / frequencies.shape[1]
        return Frequency(frequencies, smoothing)

    def criterion(self, leaf_index: Array, x: Array, y: Array, sample_weight: Array | None = None) -> Array:
        """Returns the criterion of hard trees: the mean log loss after :meth:`refit`."""
        weight = ones_or(effective(sample_weight), y, self.values.dtype)
        return frequencies_fit_error(leaf_index, y, *self.values.shape, sample_weight=weight)


@io.part
@pytree.dataclass
class Frequency(Values):
    """Leaves of class frequencies, those of hard trees in classification.

    Attributes:
      values: ``(leaves, k)``, each row summing to one.
      smoothing: as in :class:`Logit`.
    """

    values: Float[Array, "leaves k"]
    smoothing: float = pytree.field(pytree_node=False, default=0.0)

    def losses(self, x: Float[Array, "n p"], y: Int[Array, " n"]) -> Float[Array, "leaves n"]:
        """Returns the log loss of every leaf on every sample."""
        return self.trainable().losses(x, y)

    def trainable(self) -> Logit:
        """Returns leaves of logits; frequencies are at least the smallest normal number."""
        values = jnp.asarray(self.values)
        return Logit(jnp.log(jnp.maximum(values, jnp.finfo(values.dtype).tiny)), self.smoothing)

    refit, criterion, of_frequencies = Logit.refit, Logit.criterion, Logit.of_frequencies

    def describe(
        self,
        leaf: int,
        names: Sequence[str],
        digits: int,
        y_zero: Any = 0,
        *,
        max_terms: int | None = None,
        class_names: Sequence[str] | None = None,
        **_: Any,
    ) -> str:
        """Returns the probabilities of a leaf as text: in order, or by name, the ``max_terms`` most probable first."""
        if class_names is None:
            return super().describe(leaf, names, digits)
        chances = np.asarray(self.values)[leaf]
        parts = [f"{class_names[i]}: {number_text(chances[i], digits)}" for i in np.argsort(-chances, kind="stable")]
        return listed(parts, max_terms)
