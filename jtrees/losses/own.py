"""A user-defined loss."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jtrees import io, segments
from jtrees.losses.base import Loss
from jtrees.losses.newton import newton_constants
from jtrees.losses.samples import SampleLoss
from jtrees.segments import Array


@io.part
@dataclasses.dataclass(frozen=True)
class OwnLoss(Loss):
    """A user-defined loss of scaled targets. Automatic differentiation computes its derivatives.

    Args:
      function: ``(outputs, y) -> (n,)``. A module-level function is compiled once.

    Raises:
      ValueError: on evaluation, if the function does not return shape ``(n,)``.
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
        # The curvature is the diagonal of each sample's matrix of second derivatives.
        rows = [along(row) for row in jnp.eye(outputs.shape[1], dtype=outputs.dtype)]
        return rows[0][0], jnp.stack([curved[:, j] for j, (_, curved) in enumerate(rows)], axis=1)

    def constants(self, leaf_index: Array, y: Array, num_leaves: int, weight: Array) -> Array:
        if segments.module_of(leaf_index, y, weight) is not np:
            return _constants(self, leaf_index, y, weight, num_leaves)
        pad = (1 << (len(y) - 1).bit_length()) - len(y)  # rows of weight 0; a power of two limits recompilation
        padded = [np.pad(a, [(0, pad)] + [(0, 0)] * (a.ndim - 1)) for a in (leaf_index, np.float64(y), weight)]
        with jax.enable_x64(True):  # the function uses JAX
            return np.asarray(_compiled_constants(self, *padded, num_leaves))

    def __repr__(self) -> str:
        return f"OwnLoss({getattr(self.function, '__name__', self.function)})"


def _constants(loss: OwnLoss, leaf_index: Array, y: Array, weight: Array, num_leaves: int) -> Array:
    start = segments.means(leaf_index, y, num_leaves, weight)
    return newton_constants(loss.samples, loss.derivatives, start, leaf_index, y, weight)


_compiled_constants = jax.jit(_constants, static_argnums=(0, 4))
