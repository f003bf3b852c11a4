"""A user-defined loss."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jtrees import io
from jtrees.losses.base import Loss, means
from jtrees.losses.newton import newton_constants
from jtrees.losses.samples import SampleLoss


@io.part
@dataclasses.dataclass(frozen=True)
class OwnLoss(Loss):
    """A user-defined loss, on scaled targets; its derivatives are found by automatic differentiation.

    Args:
      function: ``(outputs, y) -> (n,)``; a module-level function, to compile once.

    Raises:
      ValueError: where it is evaluated, unless it returns shape ``(n,)``.
    """

    function: SampleLoss

    in_units: ClassVar[bool] = False

    def samples(self, outputs: Array, y: Array) -> Array:
        values = jnp.asarray(self.function(outputs, y))
        if values.shape != y.shape[:1]:
            raise ValueError(f"loss must give one number a sample, of shape {y.shape[:1]}, got shape {values.shape}")
        return values

    def derivatives(self, outputs: Array, y: Array) -> tuple[Array, Array]:
        total = jax.grad(lambda outputs: self.samples(outputs, y).sum())
        along = lambda direction: jax.jvp(total, (outputs,), (jnp.broadcast_to(direction, outputs.shape),))
        if outputs.ndim == 1:
            return along(jnp.ones((), outputs.dtype))
        # The diagonal of the matrix of second derivatives of each sample.
        rows = [along(row) for row in jnp.eye(outputs.shape[1], dtype=outputs.dtype)]
        return rows[0][0], jnp.stack([curved[:, j] for j, (_, curved) in enumerate(rows)], axis=1)

    def constants(self, leaf_index: Array, y: Array, num_leaves: int, weight: Array) -> Array:
        start = means(leaf_index, y, num_leaves, weight)
        return newton_constants(self.samples, self.derivatives, start, leaf_index, y, weight)

    def __repr__(self) -> str:
        return f"OwnLoss({getattr(self.function, '__name__', self.function)})"
