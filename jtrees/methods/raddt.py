"""RADDT: routing by how much a path is violated, ever harder (the system that GET's authors published next, NeurIPS
2025).

``raddt`` is the method for :func:`jtrees.train`; ``fit_raddt`` is the recipe from a table to a hard tree, GET's own but
for the routing, the scales, and thresholds that are centred between scales.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array
import numpy as np

from jtrees import routing, training, validation as checks
from jtrees.methods import annealing
from jtrees.methods.annealing import FitResult
from jtrees.tree import ObliqueTree

_SCALES = tuple(np.geomspace(2, 100, 5))
_SCALES_BELOW = (130.0, 170.0, 200.0)  # in addition, for trees deeper than 8
_DEEP = 8


def raddt(
    depth: int,
    scale: training.Number,
    *,
    leaves: Literal["constant", "linear"] = "constant",
    classes: int | None = None,
    l1: float | Array = 0.0,
) -> training.Method:
    """RADDT: minimise the loss that a tree expects which routes by ``softmin(scale * violations)`` of its paths.

    As :func:`jtrees.get`, but for the routing (:func:`jtrees.routing.violation`): probabilities are normalised once,
    over all paths, instead of at every split. At depth 1 both are the same.

    Args:
      depth: depth of the tree, 1 to 16.
      scale: factor of the violations, above 0: a number, a traced number, or an optax schedule of the step.
      leaves: ``"constant"`` or ``"linear"``.
      classes: number of classes, in classification.
      l1: strength of an L1 penalty on the split weights.

    Raises:
      ValueError: as :func:`jtrees.get`.
    """
    return annealing.soft_method(
        depth, scale, name="scale", route=routing.violation, leaves=leaves, classes=classes, l1=l1
    )


def fit_raddt(
    x: ArrayLike,
    y: ArrayLike,
    *,
    key: Array,
    depth: int | Literal["auto"],
    leaves: Literal["constant", "linear"] = "constant",
    task: Literal["regression", "classification"] = "regression",
    starts: int = 10,
    epochs: int = 1000,
    learning_rate: float = 0.01,
    l1: float | Sequence[float] = 0.0,
    cart: bool = True,
    sample_weight: ArrayLike | None = None,
    validation: tuple[ArrayLike, ArrayLike] | None = None,
) -> FitResult:
    """RADDT's recipe: as :func:`jtrees.fit_get`, under five scales from 2 to 100, evenly spaced in their logarithm.

    Trees deeper than 8 go on under 130, 170 and 200. Between scales every threshold is moved to the middle of the gap
    between the samples on its two sides (:func:`centre_thresholds`).

    Args and errors are those of :func:`jtrees.fit_get`; ``epochs`` are updates under each scale.
    """
    starts = checks.check_count("starts", starts)
    return annealing.fit(
        raddt,
        partial(_scales, starts=starts),
        x,
        y,
        key=key,
        depth=depth,
        leaves=leaves,
        task=task,
        epochs=epochs,
        learning_rate=learning_rate,
        l1=l1,
        cart=cart,
        sample_weight=sample_weight,
        validation=validation,
        between=centre_thresholds,
    )


def _scales(key: Array, depth: int, *, starts: int) -> Array:
    return jnp.tile(jnp.asarray(_SCALES + (_SCALES_BELOW if depth > _DEEP else ()), jnp.float32), (starts, 1))


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
    path = tree.decision_path(x)[:-1]
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
