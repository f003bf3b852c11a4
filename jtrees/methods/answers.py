"""What the leaves of a tree answer (a constant, a linear model, class frequencies), as GET and its kin train them.

For each kind: how leaves start, what they lose while the routing is soft, how they are set once it is hard, and what
the hard tree is then judged by.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jtrees import leaves, losses
from jtrees.tree import ConstantLeaves, LinearLeaves


class Answer(NamedTuple):
    """One kind of leaves, in pure functions.

    Attributes:
      start: ``(key, num_leaves, p, y, dtype) -> leaves`` at random.
      trainable: fitted leaves as parameters to go on from.
      losses: ``(leaves, x, y) -> (leaves, n)``: what soft training expects over.
      fit: ``(leaf_index, x, y, num_leaves, *, sample_weight) -> leaves``: the leaves of the hard tree.
      criterion: ``(leaf_index, x, y, num_leaves, *, sample_weight) -> scalar``: what hard trees are chosen by.
      loss: ``(outputs, y) -> (n,)``: what a hard tree's outputs lose on samples that it has not seen.
    """

    start: Callable[..., Any]
    trainable: Callable[[Any], Any]
    losses: losses.LeafLosses
    fit: Callable[..., Any]
    criterion: Callable[..., Array]
    loss: Callable[[Array, Array], Array]


def _uniform(key: Array, num_leaves: int, p: int, y: Array, dtype: Any) -> ConstantLeaves:
    """U(min y, max y), as GET starts."""
    low, high = y.min().astype(dtype), y.max().astype(dtype)
    return ConstantLeaves(low + (high - low) * jax.random.uniform(key, (num_leaves,), dtype))


def _squared(outputs: Array, y: Array) -> Array:
    return jnp.square(outputs - y)


CONSTANT = Answer(
    start=_uniform,
    trainable=lambda fitted: fitted,
    losses=losses.squared_error,
    fit=lambda leaf, x, y, num, *, sample_weight=None: leaves.fit_constant(leaf, y, num, sample_weight=sample_weight),
    criterion=lambda leaf, x, y, num, *, sample_weight=None: leaves.constant_fit_error(
        leaf, y, num, sample_weight=sample_weight
    ),
    loss=_squared,
)


def _linear_start(key: Array, num_leaves: int, p: int, y: Array, dtype: Any) -> LinearLeaves:
    return LinearLeaves(jnp.zeros((num_leaves, p), dtype), _uniform(key, num_leaves, p, y, dtype).values)


def _unbounded(fitted: Any) -> LinearLeaves:
    """Without bounds: beyond them there would be no gradient."""
    return LinearLeaves(fitted.coefficients, fitted.intercept)


LINEAR = Answer(
    start=_linear_start,
    trainable=_unbounded,
    losses=losses.squared_error,
    fit=leaves.fit_shrunk,
    criterion=leaves.shrunk_fit_error,
    loss=_squared,
)


@lru_cache
def frequencies(classes: int) -> Answer:
    """Softmax leaves while the routing is soft, class frequencies (smoothed) once it is hard; log loss."""

    def start(key: Array, num_leaves: int, p: int, y: Array, dtype: Any) -> ConstantLeaves:
        return ConstantLeaves(jax.random.uniform(key, (num_leaves, classes), dtype, -1, 1))

    # Counts are of the dtype of their weights.
    weights = lambda x, given: jnp.ones(x.shape[0], x.dtype) if given is None else given

    def fit(leaf, x, y, num, *, sample_weight=None):
        return leaves.fit_frequencies(leaf, y, num, classes, sample_weight=weights(x, sample_weight))

    def criterion(leaf, x, y, num, *, sample_weight=None):
        sample_weight = weights(x, sample_weight)
        return leaves.frequencies_fit_error(leaf, y, num, classes, sample_weight=sample_weight)

    return Answer(
        start=start,
        trainable=lambda fitted: ConstantLeaves(jnp.log(fitted.values)),
        losses=losses.log_loss,
        fit=fit,
        criterion=criterion,
        loss=lambda outputs, y: -jnp.log(jnp.take_along_axis(outputs, y[:, None], axis=1)[:, 0]),
    )


def answer(kind: str, classes: int | None) -> Answer:
    """The kind of leaves by name.

    Args:
      kind: ``"constant"`` or ``"linear"``.
      classes: number of classes, for classification; None for regression.

    Raises:
      ValueError: for another kind, and for linear leaves in classification.
    """
    if kind not in ("constant", "linear"):
        raise ValueError(f'leaves must be "constant" or "linear", got {kind!r}')
    if classes is None:
        return CONSTANT if kind == "constant" else LINEAR
    if kind == "linear":
        raise ValueError('leaves must be "constant" in classification: leaves hold class frequencies')
    return frequencies(classes)
