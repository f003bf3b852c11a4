"""Class frequencies in each leaf, and the mean log loss of such leaves."""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jtrees import segments
from jtrees._classes import is_soft
from jtrees.segments import Array, module_of, ones_or


def class_counts(
    leaf_index: Int[Array, " n"],
    y: Int[Array, " n"] | Float[Array, "n k"],
    num_leaves: int,
    classes: int,
    *,
    sample_weight: Float[Array, " n"] | None = None,
) -> Float[Array, "leaves k"]:
    """Returns the total weight of each class in each leaf, or the expected weight for soft labels ``(n, classes)``.

    Example:
      >>> leaf, y = jnp.array([0, 0, 1, 1]), jnp.array([0, 0, 1, 0])
      >>> print(jtrees.losses.class_counts(leaf, y, 2, 2))
      [[2. 0.]
       [1. 1.]]
    """
    weight = ones_or(sample_weight, y, jnp.float32 if sample_weight is None else sample_weight.dtype)
    if is_soft(y):
        return segments.sums(weight[:, None] * y.astype(weight.dtype), leaf_index, num_leaves)
    return segments.sums(weight, leaf_index * classes + y, num_leaves * classes).reshape(num_leaves, classes)


def fit_frequencies(
    leaf_index: Int[Array, " n"],
    y: Int[Array, " n"] | Float[Array, "n k"],
    num_leaves: int,
    classes: int,
    *,
    smoothing: float | Array = 1.0,
    sample_weight: Float[Array, " n"] | None = None,
) -> Float[Array, "leaves k"]:
    """Returns class frequencies in each leaf with Laplace smoothing: ``(N_lk + s q_k) / (N_l + s)``.

    The prior ``q`` holds the class frequencies of all samples plus one sample of each class, so no frequency is 0.
    Empty leaves hold the prior. (Laplace's rule, ``q_k = 1 / k`` and ``s = k``, adds one sample of each class to each
    leaf. The added samples dominate small leaves if there are many classes.)

    Args:
      leaf_index: leaf of each sample.
      y: classes from 0 to ``classes - 1``, or their probabilities, ``(n, classes)``.
      num_leaves: number of leaves.
      classes: number of classes, k.
      smoothing: weight s of the prior q in samples, above 0.
      sample_weight: nonnegative weights. A weight of 2 counts as two samples.

    Returns:
      Frequencies ``(leaves, k)``. Each row sums to one.

    Example:
      >>> leaf, y = jnp.array([0, 0, 1, 1]), jnp.array([0, 0, 1, 0])
      >>> print(np.asarray(jtrees.losses.fit_frequencies(leaf, y, 2, 2)).round(2))
      [[0.89 0.11]
       [0.56 0.44]]
    """
    counts = class_counts(leaf_index, y, num_leaves, classes, sample_weight=sample_weight)
    return smoothed(counts, prior_of(counts), smoothing)


def prior_of(counts: Float[Array, "leaves k"]) -> Float[Array, " k"]:
    """Returns the class frequencies of all samples plus one sample of each class."""
    return (counts.sum(0) + 1) / (counts.sum() + counts.shape[1])


def smoothed(counts: Array, prior: Array, smoothing: float | Array = 1.0) -> Float[Array, "leaves k"]:
    """Returns class frequencies after adding ``smoothing`` samples with the prior's frequencies to the counts."""
    return (counts + smoothing * prior) / (counts.sum(1, keepdims=True) + smoothing)


def effective_counts(
    counts: Float[Array, "leaves k"], leaf_index: Int[Array, " n"], weight: Float[Array, " n"]
) -> tuple[Float[Array, "leaves k"], Float[Array, " k"]]:
    """Returns class counts that sum to the effective number of samples of each leaf, and the prior of the classes.

    Uneven weights w of a leaf count as ``(sum w)^2 / sum w^2`` samples (Kish). A heavy sample therefore makes its own
    leaf small, but no other leaf. The prior has the frequencies of the weighted classes.

    Args:
      counts: total weight of each class in each leaf.
      leaf_index: leaf of each sample.
      weight: nonnegative weights.
    """
    xp = module_of(counts, weight)
    squares = segments.sums(weight * weight, leaf_index, len(counts))
    factor = xp.where(squares > 0, counts.sum(1) / xp.where(squares > 0, squares, 1), 0)
    samples = factor[:, None] * counts
    return samples, prior_of(counts * (samples.sum() / counts.sum()))


def frequencies_error(counts: Float[Array, "leaves k"], frequencies: Float[Array, "leaves k"]) -> Float[Array, ""]:
    """Returns the mean log loss of the frequencies of each leaf, for the total weights of the classes in each leaf."""
    return -jax.scipy.special.xlogy(counts, frequencies).sum() / counts.sum()
