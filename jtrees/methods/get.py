"""GET: a scaled sigmoid, annealed; hard leaves; many starts (Mao & Cao, "Can a Single Tree Outperform an Entire
Forest?", 2024, Algorithm 1).

``get`` is the method for :func:`jtrees.train`; ``GET`` is the paper's recipe.
"""

from typing import Any, Literal

from flax import struct
import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import training, validation as checks
from jtrees.methods.annealing import Annealed, soft_method
from jtrees.table import Table
from jtrees.tasks import Regression, Task


def get(
    depth: int,
    alpha: training.Number,
    *,
    leaves: Literal["constant", "linear"] = "constant",
    task: Task = Regression(),
    l1: float | Array = 0.0,
    implementation: str | None = None,
) -> training.Method:
    """GET: minimise the loss that a tree of scaled sigmoids expects (eq. 7).

    Parameters are an :class:`ObliqueTree`; hardening sets its leaves from the hard routing, and ``score`` is what the
    hard tree is then judged by: mean squared error for constant leaves, that expected on new samples
    (:func:`jtrees.leaves.shrunk_fit_error`) for linear ones, log loss for classes. Meant for x and regression targets
    scaled to about [0, 1]; targets are ``(n,)`` or ``(n, k)``.

    Args:
      depth: depth of the tree, 1 to 16.
      alpha: scale of the sigmoid, above 0: a number, a traced number, or an optax schedule of the step.
      leaves: ``"constant"``, or ``"linear"`` for GET-Linear.
      task: what is predicted. In classification leaves hold logits while training, hardened class frequencies.
      l1: strength of an L1 penalty on the split weights, ``l1 * sum_j |w_j|_1``.
      implementation: XLA or a kernel for the loss and its gradient: see :mod:`jtrees.ops`.

    Raises:
      ValueError: for a depth or an alpha out of range, an unknown kind of leaves, or linear leaves in classification.
    """
    options = {"leaves": leaves, "task": task, "l1": l1, "implementation": implementation}
    return soft_method(depth, alpha, name="alpha", route=None, **options)


@struct.dataclass(kw_only=True)
class GET(Annealed):
    """GET's whole recipe (Algorithm 1): many starts under ever steeper sigmoids, CART the first of them.

    See :class:`jtrees.methods.annealing.Annealed` for what it does and for the options that it shares with RADDT.

    Attributes:
      alpha_ranges: ranges from which the scale factors of a start are drawn, in the order of use: pairs (low, high).
    """

    alpha_ranges: Any = ((5.0, 25.0), (50.0, 150.0))

    def checked(self, table: Table) -> "GET":
        return super().checked(table).replace(alpha_ranges=_checked_ranges(self.alpha_ranges))

    def method(self, scale: Any, task: Task) -> training.Method:
        how = {"leaves": self.leaves, "l1": self.l1, "implementation": self.implementation}
        return get(self.depth, scale, task=task, **how)

    def stages(self) -> int:
        return len(self.alpha_ranges)

    def scales(self, drawn: Array) -> Array:
        low, high = jnp.asarray(self.alpha_ranges, drawn.dtype).T
        return low + (high - low) * drawn


def _checked_ranges(alpha_ranges: Any) -> Array:
    ranges: Any = alpha_ranges
    try:
        if not isinstance(ranges, jax.Array):
            ranges = np.asarray(ranges)
            ranges = np.zeros(0) if ranges.dtype.kind == "c" else ranges.astype(np.float32)
    except (TypeError, ValueError):
        ranges = np.zeros(0)
    if ranges.ndim != 2 or ranges.shape[1] != 2 or len(ranges) == 0:
        raise ValueError(f"alpha_ranges must be pairs (low, high), at least one, got {alpha_ranges!r}")
    checks.check_number("alpha_ranges", ranges)
    if not checks.is_traced(ranges) and np.any(np.asarray(ranges)[:, 0] > np.asarray(ranges)[:, 1]):
        raise ValueError(f"alpha_ranges must be pairs (low, high) with low <= high, got {alpha_ranges!r}")
    return jnp.asarray(ranges, jnp.float32)
