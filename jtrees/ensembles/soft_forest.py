"""A sum of soft trees: the model of :class:`jtrees.Refined`."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrees import io, ops, pytree, routing, topology
from jtrees.soft_model import SoftModel
from jtrees.tree import ObliqueTree


@io.part
@pytree.dataclass
class SoftTrees:
    """A sum of soft trees on scaled data. Outputs are clipped to slightly more than their range on training rows."""

    trees: ObliqueTree  # splits of unit length, and leaves with the trees' outputs. The leading axis is over the trees
    initial: Array  # the initial outputs of the sum, (*k,)
    sharpness: Array  # factor of the scores. The sigmoid of the product is the probability of going right
    lower: Array  # lower bound of the outputs, (*k,)
    upper: Array  # upper bound of the outputs, (*k,)

    @property
    def params(self) -> ObliqueTree:
        """The trained parameters."""
        return self.trees.replace(leaves=self.trees.leaves.trainable())

    @property
    def features(self) -> int:
        """Number of features, p."""
        return self.trees.weights.shape[-1]

    def outputs(self, x: Float[Array, "n p"]) -> Float[Array, "n *k"]:
        """Returns the sum of the trees' expected outputs, within the bounds."""
        add = lambda total, tree: (total + expected(tree, x, self.sharpness), None)
        start = jnp.broadcast_to(self.initial, (len(x), *self.initial.shape))
        return jnp.clip(jax.lax.scan(add, start, self.trees)[0], self.lower, self.upper)

    def __str__(self) -> str:
        trees, nodes = self.trees.bias.shape
        return f"trees={trees}, depth={topology.depth_of(nodes)}, features={self.features}"


@io.model
@pytree.dataclass(repr=False)
class SoftForest(SoftModel):
    """Fitted soft trees whose outputs add up, with constant or linear leaves; the network is :class:`SoftTrees`."""


def expected(tree: ObliqueTree, x: Array, sharpness: Any) -> Array:
    """Returns the expected output of a soft tree for each row, ``(n, *k)``."""
    right = jax.nn.sigmoid(sharpness * ops.scores(tree.weights, tree.bias, x))
    outputs = tree.leaves.outputs(x)
    return routing.expected_value(right.reshape(*right.shape, *[1] * (outputs.ndim - 2)), outputs)
