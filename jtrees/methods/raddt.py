"""RADDT: routing by how much a path is violated, ever harder (the system that GET's authors published next: see
CITATION.cff).

``raddt`` is the method for :func:`jtrees.train`; ``RADDT`` is the recipe, GET's own but for the routing, the scales,
and thresholds that are centred between scales.
"""

from typing import Any, Literal

from flax import struct
import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import ops, routing, topology, training
from jtrees.methods.annealing import Annealed, soft_method
from jtrees.recipes import static
from jtrees.tasks import Regression, Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree

_SCALES = tuple(np.geomspace(2, 100, 5))
_SCALES_BELOW = (130.0, 170.0, 200.0)  # in addition, for trees deeper than 8
_DEEP = 8


def raddt(
    depth: int,
    scale: training.Number,
    *,
    leaves: Literal["constant", "linear"] = "constant",
    task: Task = Regression(),
    l1: float | Array = 0.0,
    implementation: str | None = None,
) -> training.Method:
    """RADDT: minimise the loss that a tree expects which routes by ``softmin(scale * violations)`` of its paths.

    As :func:`jtrees.get`, but for the routing (:func:`jtrees.routing.violation`): probabilities are normalised once,
    over all paths, instead of at every split. At depth 1 both are the same.

    Args:
      depth: depth of the tree, 1 to 16.
      scale: factor of the violations, above 0: a number, a traced number, or an optax schedule of the step.
      leaves: ``"constant"`` or ``"linear"``.
      task: what is predicted.
      l1: strength of an L1 penalty on the split weights.
      implementation: XLA or a kernel for the loss and its gradient: see :mod:`jtrees.ops`.

    Raises:
      ValueError: as :func:`jtrees.get`.
    """
    options = {"leaves": leaves, "task": task, "l1": l1, "implementation": implementation}
    return soft_method(depth, scale, name="scale", route=routing.violation, **options)


@struct.dataclass(kw_only=True)
class RADDT(Annealed):
    """RADDT's recipe: many starts under five scales from 2 to 100, evenly spaced in their logarithm.

    Trees deeper than 8 go on under 130, 170 and 200. Between scales every threshold is moved to the middle of the gap
    between the samples on its two sides (:func:`centre_thresholds`). See
    :class:`jtrees.methods.annealing.Annealed` for the rest and for the options.
    """

    epochs: int = static(default=1000)

    def method(self, scale: Any, task: Task) -> training.Method:
        how = {"leaves": self.leaves, "l1": self.l1, "implementation": self.implementation}
        return raddt(self.depth, scale, task=task, **how)

    def stages(self) -> int:
        return len(self._own())

    def scales(self, drawn: Array) -> Array:
        return jnp.broadcast_to(jnp.asarray(self._own(), drawn.dtype), drawn.shape)

    def _own(self) -> tuple[float, ...]:
        return _SCALES + (_SCALES_BELOW if self.depth > _DEEP else ())

    def between(self, splits: ObliqueTree, batch: Batch) -> ObliqueTree:
        return centre_thresholds(splits, batch.x, batch.weight)


def centre_thresholds(tree: ObliqueTree, x: Array, sample_weight: Array | None = None) -> ObliqueTree:
    """Moves each threshold to the middle of the gap between the samples that it sends left and right.

    No sample of ``x`` changes its leaf (but for gaps as narrow as rounding). A node that does not divide the samples
    it sees stays as it is.

    Args:
      tree: the tree; its leaves are not looked at.
      x: samples, ``(n, p)``.
      sample_weight: samples of weight 0 do not count.
    """
    nodes = tree.weights.shape[0]
    path = topology.ancestors(ops.hard(tree.weights, tree.bias, x), tree.depth)
    score = lambda node: jnp.einsum("np,np->n", tree.weights[node], x, precision="highest") + tree.bias[node]
    own = jax.lax.map(score, path)  # level by level: the scores of all nodes would not fit for deep trees
    if sample_weight is not None:
        own = jnp.where(sample_weight > 0, own, jnp.nan)
    # Comparisons with NaN are false: those samples are on neither side.
    right = jax.ops.segment_min(jnp.where(own > 0, own, jnp.inf).ravel(), path.ravel(), nodes)
    left = jax.ops.segment_max(jnp.where(own <= 0, own, -jnp.inf).ravel(), path.ravel(), nodes)
    divides = jnp.isfinite(right) & jnp.isfinite(left)
    middle = jnp.where(divides, (jnp.where(divides, right, 0) + jnp.where(divides, left, 0)) / 2, 0)
    return tree.replace(bias=tree.bias - middle)
