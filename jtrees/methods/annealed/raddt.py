"""RADDT: annealed routing by the violation of paths, the later system of GET's authors (see CITATION.cff).

``raddt`` is the method for :func:`jtrees.train`. ``RADDT`` is the recipe. It differs from GET's recipe in the routing,
the sharpnesses, and the centring of thresholds between stages.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import ops, pytree, topology, training
from jtrees.methods.annealed.algorithm import Annealed, Default
from jtrees.methods.annealed.get import soft_method
from jtrees.methods.annealed.stages import fitted_leaves
from jtrees.search import Run
from jtrees.tasks import Regression, Task
from jtrees.tree import ObliqueTree
from pallas_kernels import Implementation

_SHARPNESS = tuple(np.geomspace(2, 100, 5))
_SHARPNESS_DEEP = (130.0, 170.0, 200.0)  # further sharpnesses of trees deeper than 8
_EPOCHS = 1000  # updates under each sharpness
_DEEP = 8


def raddt(
    depth: int,
    sharpness: training.Number,
    *,
    leaves: Literal["constant", "linear"] = "constant",
    task: Task = Regression(),
    l1: float | Array = 0.0,
    implementation: Implementation = None,
    scored: bool = True,
) -> training.Method:
    """Returns the RADDT method: minimises the expected loss of routing by ``softmin(sharpness * violations)`` of paths.

    Everything except the routing (:func:`jtrees.routing.violation`) is as in :func:`jtrees.methods.get`, also the
    arguments and the errors, with the factor ``sharpness`` of the violations in place of ``alpha``. Probabilities are
    normalised once over all paths instead of at every split. At depth 1 both routings are the same.
    """
    options: Any = {"leaves": leaves, "task": task, "l1": l1, "implementation": implementation, "scored": scored}
    return soft_method(depth, sharpness, name="sharpness", route="violation", **options)


@pytree.dataclass(kw_only=True)
class RADDT(Annealed):
    """RADDT's recipe: many starts under five logarithmically spaced sharpnesses from 2 to 100.

    Trees deeper than 8 continue under 130, 170 and 200. After each stage, every threshold moves to the middle of the
    gap between the samples on its two sides (:func:`centre_thresholds`). Everything else is as in :class:`jtrees.GET`,
    including the report and the defaults that the paper does not have.

    Attributes:
      depth: depth of the tree, 1 to 16.
      epochs: updates under each sharpness (in the long stages, if halving is used). None: 1000, or 20 in a boosted sum.
      leaves: see :class:`jtrees.GET`.
      starts: see :class:`jtrees.GET`.
      learning_rate: see :class:`jtrees.GET`.
      l1: see :class:`jtrees.GET`.
      cart: see :class:`jtrees.GET`.
      ridge: see :class:`jtrees.GET`.
      precondition: see :class:`jtrees.GET`.
      shrink: see :class:`jtrees.GET`.
      halving: see :class:`jtrees.GET`.
      rows: see :class:`jtrees.GET`.
      implementation: see :class:`jtrees.GET`.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> fit = jtrees.fit(jtrees.RADDT(depth=1, starts=1, epochs=20), x, np.sign(x[:, 0]), key=jax.random.key(0))
      >>> print(fit.predict([[-0.5], [0.5]]))
      [-1.  1.]
    """

    soft = staticmethod(raddt)
    defaults = Annealed.defaults | {"epochs": Default(_EPOCHS, boosted=20)}

    @property
    def sharpness_ranges(self) -> np.ndarray:
        levels = _SHARPNESS + (_SHARPNESS_DEEP if self.depth > _DEEP else ())
        return np.column_stack([levels, levels]).astype(np.float32)

    def between(self, run: Run, splits: ObliqueTree, score: Array) -> tuple[ObliqueTree, Array]:
        splits = splits.replace(bias=centre_thresholds(splits, run.batch.x, run.batch.weight).bias)
        if not run.has_validation_set:
            return splits, score
        # The moved thresholds can change the leaf of a validation row, so the score is computed again.
        return splits, jnp.where(jnp.isfinite(score), fitted_leaves(run, splits)[1], jnp.inf)


def centre_thresholds(tree: ObliqueTree, x: Array, sample_weight: Array | None = None) -> ObliqueTree:
    """Returns the tree with each threshold in the middle of the gap between the samples on its two sides."""
    # No sample of `x` changes its leaf (except for gaps within rounding error). The threshold of a node does not change
    # if all samples that reach the node lie on one side. Samples of weight 0 are ignored.
    nodes = tree.weights.shape[0]
    path = topology.ancestors(ops.hard(tree.weights, tree.bias, x), tree.depth)
    node_scores = lambda node: jnp.einsum("np,np->n", tree.weights[node], x, precision="highest") + tree.bias[node]
    # Level by level: the scores of all nodes of a deep tree do not fit into memory.
    scores = jax.lax.map(node_scores, path)
    counted = True if sample_weight is None else sample_weight > 0
    right = jax.ops.segment_min(jnp.where(counted & (scores > 0), scores, jnp.inf).ravel(), path.ravel(), nodes)
    left = jax.ops.segment_max(jnp.where(counted & (scores <= 0), scores, -jnp.inf).ravel(), path.ravel(), nodes)
    divides = jnp.isfinite(right) & jnp.isfinite(left)
    middle = jnp.where(divides, (jnp.where(divides, right, 0) + jnp.where(divides, left, 0)) / 2, 0)
    return tree.replace(bias=tree.bias - middle)
