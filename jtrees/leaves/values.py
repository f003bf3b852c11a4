"""Leaves of values: each leaf predicts the same for every sample. Their loss says what the values are."""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Float, Int, Num
import numpy as np

from jtrees import io, pytree, validation
from jtrees.leaves.hierarchical import fit_hierarchical
from jtrees.losses.base import Loss, at_every_sample, linked
from jtrees.losses.errors import SquaredError
from jtrees.segments import Array, common, effective, module_of
from jtrees.text import numbers_text, shares_text

_SQUARED = SquaredError()


@io.part
@pytree.dataclass
class Values:
    """Leaves of one value, or of k.

    The loss says how values are trained and fitted, and what they predict:

    - :class:`jtrees.losses.SquaredError`: means of the targets;
    - :class:`jtrees.losses.LogLoss`: logits of k classes, which predict their softmax;
    - :class:`jtrees.losses.Frequencies`: class frequencies, as fitted leaves of classes hold them;
    - another loss: its outputs, fitted as its best constants, which predict their link.

    Attributes:
      values: ``(leaves,)``, or ``(leaves, k)`` for k outputs.
      loss: the loss; static.
    """

    values: Float[Array, "leaves *k"]
    loss: Loss = pytree.field(pytree_node=False, default=_SQUARED)

    is_constant: ClassVar[bool] = True

    @classmethod
    def start(
        cls,
        key: Array,
        num_leaves: int,
        x: Array,
        y: Array,
        outputs: tuple[int, ...],
        *,
        loss: Loss = _SQUARED,
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
        """What the leaves are called, such as ``"Values(SquaredError)"``."""
        return f"Values({type(self.loss).__name__})"

    @property
    def choice(self) -> str | None:
        """What the leaves choose, ``"class"`` or ``"action"``; None for numbers."""
        return self.loss.choice

    @property
    def classes(self) -> int | None:
        """Number of classes or actions that the leaves choose from; None for numbers."""
        return self.values.shape[-1] if self.choice else None

    @property
    def kernel(self) -> str | None:
        """Name of their loss in the kernel of :func:`jtrees.ops.expected_loss`; None: no kernel has it."""
        return self.loss.kernel

    def at(self, leaf_index: Int[Array, " n"], x: Float[Array, "n p"]) -> Float[Array, "n *k"]:
        """Returns the prediction of the given leaf for each sample; NumPy arrays in double precision."""
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
        return Values(*self.loss.fitted(self.values, leaf_index, y, sample_weight))

    def refit_shrunk(
        self, leaf_index: Array, x: Array, y: Array, sample_weight: Array | None = None, **options: Any
    ) -> tuple["Values", Any]:
        """Returns leaves fitted to samples and drawn towards their ancestors, and the strength of the shrinkage.

        Values that are no means are fitted only; their strength is 0. ``options`` are ``strength`` and ``cost`` of
        :func:`jtrees.leaves.fit_hierarchical`.
        """
        averaged = self.loss.averaged(self.values, y)
        if averaged is None:
            return self.refit(leaf_index, x, y, sample_weight), np.zeros((), np.float32)
        weight = effective(sample_weight)
        means, strength = fit_hierarchical(leaf_index, averaged, len(self.values), sample_weight=weight, **options)
        return Values(*self.loss.of_means(means, leaf_index, y, weight)), strength

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
        return Values(*self.loss.trainable(self.values))

    def hardened(self) -> "Values":
        """Returns leaves for a hard tree: class frequencies for logits, others as they are."""
        return Values(*self.loss.hardened(self.values))

    def moved(self, change: np.ndarray) -> "Values":
        """Returns the leaves for features of another origin: the same."""
        return self

    def rescaled(self, x_zero: Any, x_unit: Any, y_zero: Any, y_unit: Any) -> "Values":
        """Returns the leaves for features ``x_zero + x_unit x`` and predictions ``y_zero + y_unit`` times the current
        ones, in double precision; a loss of scaled targets alone is left out.
        """
        values, loss = self.loss.rescaled(self.values, y_zero, y_unit)
        return Values(values, loss if loss.in_units else _SQUARED)

    def with_outputs(self, fn: Any) -> "Values":
        """Returns the leaves with a function applied to their values."""
        return self.replace(values=fn(self.values))

    def with_common(self, leaf_index: np.ndarray, y: np.ndarray, weight: np.ndarray, rounding: Any) -> "Values":
        """Returns the leaves with exactly the value that all targets of a leaf have, where theirs is this value up to
        rounding.
        """
        values = np.asarray(self.values)
        exact = common(leaf_index, y, len(values), weight, values)
        return self.replace(values=np.where(np.abs(exact - values) <= rounding, exact, values))

    def count(self, reached: np.ndarray) -> int:
        """Returns the number of parameters of the reached leaves, ``(leaves,)`` bool."""
        return int(np.asarray(self.values)[reached].size)

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
        """Returns the prediction of a leaf plus ``y_zero`` as text.

        With ``class_names`` it lists probabilities by name, the ``max_terms`` most probable first, or names the one
        action that the leaf plays.
        """
        predicted = np.asarray(self.predictions())[leaf]
        if class_names is None or self.choice is None:
            return numbers_text(predicted, digits, y_zero)
        if self.choice == "action" and predicted.max() == 1:
            return str(class_names[predicted.argmax()])
        return shares_text(predicted, digits, class_names, max_terms)
