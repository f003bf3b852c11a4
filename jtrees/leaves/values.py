"""Leaves of values: a leaf predicts the same for every sample. The loss defines the meaning of the values."""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Float, Int, Num
import numpy as np

from jtrees import io, pytree, validation
from jtrees.leaves.hierarchical import fit_hierarchical
from jtrees.segments import Array, common, module_of
from jtrees.tasks.base import Loss, at_every_sample, linked
from jtrees.tasks.errors import SquaredError
from jtrees.text import classes_text, number_text

_SQUARED = SquaredError()


@io.part
@pytree.dataclass
class Values:
    """Leaves that hold a value for each output.

    The loss defines the training, the fit and the predictions of values:

    - :class:`jtrees.losses.SquaredError`: values are means of the targets.
    - :class:`jtrees.losses.LogLoss`: values are logits of k classes. Predictions are the softmax of the logits.
    - :class:`jtrees.losses.Frequencies`: values are class frequencies, the form of fitted leaves of classifiers.
    - Any other loss: values are outputs, fitted as best constants. Predictions are the link of the outputs.

    Attributes:
      values: ``(leaves,)``, or ``(leaves, k)`` for k outputs.
      loss: the loss; static.
    """

    values: Float[Array, "leaves *k"]
    loss: Loss = pytree.field(pytree_node=False, default=_SQUARED)

    is_constant: ClassVar[bool] = True

    @classmethod
    def start(
        cls, key: Array, num_leaves: int, x: Array, y: Array, outputs: tuple[int, ...], *, loss: Loss = _SQUARED
    ) -> "Values":
        """Returns random initial leaves."""
        return cls(loss.start(key, y, (num_leaves, *outputs), x.dtype), loss)

    @classmethod
    def empty(
        cls,
        num_leaves: int,
        features: int,
        outputs: tuple[int, ...],
        dtype: Any = jnp.float32,
        *,
        loss: Loss = _SQUARED,
    ) -> "Values":
        """Returns zero leaves of this shape, to be refitted."""
        return cls(jnp.zeros((num_leaves, *outputs), dtype), loss)

    @property
    def name(self) -> str:
        """Name of these leaves, such as ``"Values(SquaredError)"``."""
        return f"Values({type(self.loss).__name__})"

    @property
    def choice(self) -> str | None:
        """The type of choice that leaves make, ``"class"`` or ``"action"``; None for numbers."""
        return self.loss.choice

    @property
    def classes(self) -> int | None:
        """Number of classes or actions that the leaves choose from; None for numbers."""
        return self.values.shape[-1] if self.choice else None

    @property
    def kernel(self) -> str | None:
        """Name of the loss in the kernel of :func:`jtrees.ops.expected_loss`; None if no kernel has the loss."""
        return self.loss.kernel

    def at(self, leaf_index: Int[Array, " n"], x: Float[Array, "n p"]) -> Float[Array, "n *k"]:
        """Returns the prediction of the given leaf for each sample, in double precision for NumPy arrays."""
        values = self.predictions()
        if module_of(leaf_index) is np and not validation.is_traced(values):
            return np.asarray(values, np.float64)[leaf_index]
        return jnp.asarray(values).at[leaf_index].get(mode="promise_in_bounds")

    def predictions(self) -> Float[Array, "leaves *k"]:
        """Returns the prediction of every leaf."""
        return linked(self.loss.link, self.values)

    def outputs(self, x: Float[Array, "n p"]) -> Float[Array, "leaves n *k"]:
        """Returns the prediction of every leaf for every sample."""
        return at_every_sample(self.predictions(), len(x))

    def losses(self, x: Float[Array, "n p"], y: Num[Array, "n *k"]) -> Float[Array, "leaves n"]:
        """Returns the loss of every leaf on every sample."""
        return self.loss.of_leaves(self.values, y)

    def refit(self, leaf_index: Array, x: Array, y: Array, sample_weight: Array | None = None) -> "Values":
        """Returns leaves fitted to samples: see :meth:`jtrees.losses.Loss.fitted`."""
        return Values(self.loss.fitted(self.values, leaf_index, y, sample_weight), self.loss.hard_loss)

    def refit_shrunk(
        self, leaf_index: Array, x: Array, y: Array, sample_weight: Array | None = None, **options: Any
    ) -> tuple["Values", Any]:
        """Returns leaves fitted to samples and shrunk towards their ancestors, and the strength of the shrinkage.

        Values that are neither means nor class frequencies are fitted without shrinkage, and their strength is 0.
        ``options`` are ``strength`` and ``cost`` of :func:`jtrees.leaves.fit_hierarchical`.
        """
        terms = self.loss.mean_terms(self.values, y)
        if terms is None:
            return self.refit(leaf_index, x, y, sample_weight), np.zeros((), np.float32)
        options["sample_weight"] = sample_weight
        means, strength = fit_hierarchical(leaf_index, terms, len(self.values), **options)
        return Values(self.loss.values_from_means(means, leaf_index, y, sample_weight), self.loss.hard_loss), strength

    def refit_with_criterion(
        self, leaf_index: Array, x: Array, y: Array, sample_weight: Array | None = None
    ) -> tuple["Values", Array]:
        """Returns the leaves of :meth:`refit` and their :meth:`criterion`."""
        fitted = self.refit(leaf_index, x, y, sample_weight)
        return fitted, fitted.criterion(leaf_index, x, y, sample_weight)

    def criterion(self, leaf_index: Array, x: Array, y: Array, sample_weight: Array | None = None) -> Array:
        """Returns the criterion of hard trees: the mean loss after :meth:`refit`."""
        return self.loss.criterion(self.values, leaf_index, y, sample_weight)

    def trainable(self) -> "Values":
        """Returns leaves with trainable parameters."""
        return Values(self.loss.trainable(self.values), self.loss.trainable_loss)

    def hardened(self) -> "Values":
        """Returns leaves for a hard tree: logits become class frequencies, other values do not change."""
        return Values(self.loss.hardened(self.values), self.loss.hard_loss)

    def moved(self, change: np.ndarray) -> "Values":
        """Returns the leaves unchanged, because values do not depend on the origin of the features."""
        return self

    def rescaled(self, x_zero: Any, x_unit: Any, y_zero: Any, y_unit: Any) -> "Values":
        """Returns the leaves for features ``x_zero + x_unit * x`` and predictions ``y_zero + y_unit * prediction``.

        The values are in double precision. The squared error replaces a loss that is defined for scaled targets only.
        """
        loss = self.loss.scaled(1 / np.asarray(y_unit)) if self.loss.in_units else _SQUARED
        return Values(self.loss.rescaled(self.values, y_zero, y_unit), loss)

    def with_outputs(self, fn: Any) -> "Values":
        """Returns the leaves with a function applied to their values."""
        return self.replace(values=fn(self.values))

    def with_common(self, leaf_index: np.ndarray, y: np.ndarray, weight: np.ndarray, rounding: Any) -> "Values":
        """Returns leaves whose value is exactly the common target, where all targets of a leaf are equal.

        A value changes only if it equals the common target up to ``rounding``.
        """
        values = np.asarray(self.values)
        exact = common(leaf_index, y, weight, values)
        return self.replace(values=np.where(np.abs(exact - values) <= rounding, exact, values))

    def count(self, reached: np.ndarray) -> int:
        """Returns the number of parameters of the reached leaves; ``reached`` is ``(leaves,)`` bool."""
        return int(np.asarray(self.values)[reached].size)

    def describe(
        self,
        leaf: int,
        names: Sequence[str],
        digits: int,
        y_zero: Any,
        *,
        max_terms: int | None = None,
        class_names: Sequence[str] | None = None,
        **_: Any,
    ) -> str:
        """Returns the prediction of a leaf plus ``y_zero`` as text.

        If ``class_names`` is given, the text lists the ``max_terms`` largest probabilities by name, in decreasing
        order. If a leaf plays a single action, the text is the name of the action.
        """
        predicted = np.asarray(self.predictions())[leaf]
        if class_names is None or self.choice is None:
            numbers = np.reshape(predicted, -1).astype(np.float64)
            zeros = np.broadcast_to(y_zero, numbers.shape)
            return ", ".join(number_text(number, digits, zero) for number, zero in zip(numbers, zeros, strict=True))
        if self.choice == "action" and predicted.max() == 1:
            return str(class_names[predicted.argmax()])
        pairs = zip(class_names, predicted, strict=True)
        texts = [f"{name}: {number_text(share, digits)}" for name, share in pairs]
        return classes_text(predicted, texts, max_terms)
