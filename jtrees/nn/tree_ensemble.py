"""TEL's tree ensemble as a layer (Hazimeh et al., "The Tree Ensemble Layer", ICML 2020)."""

from typing import Any

from flax import nnx
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrees import ops, topology, validation
from jtrees.methods.tree_ensemble.ensemble import small_uniform
from jtrees.routing import conditional
from pallas_kernels import Implementation


class TreeEnsemble(nnx.Module):
    """A layer of soft trees with smooth-step routing, ``(..., features) -> (..., out_features)``.

    All trees are one computation. For deep trees, the forward and backward passes evaluate only the nodes that samples
    reach (:func:`jtrees.routing.conditional_ensemble`). The paper places ``nnx.BatchNorm`` before the layer. Initial
    scores are then near zero, where splits have gradients. Only reverse mode is supported: ``jax.jvp`` raises a
    ``TypeError``.

    Attributes:
      weights: weights of the splits, ``(num_trees, 2**depth - 1, features)``; right if ``weights x + bias > 0``, else
        left.
      bias: biases of the splits, ``(num_trees, 2**depth - 1)``.
      leaf_values: values of the leaves, ``(num_trees, 2**depth, out_features)``.
      gamma: width of the uncertain region of a split's score.
    """

    def __init__(
        self,
        features: int,
        *,
        num_trees: int,
        depth: int,
        out_features: int,
        gamma: float = 1.0,
        width: int | None = None,
        dtype: Any = jnp.float32,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
    ):
        """Initialises a layer with random trees.

        Args:
          features: size of the last axis of the input.
          num_trees: number of trees.
          depth: depth of the trees, 1 to 16.
          out_features: number of outputs of each tree.
          gamma: width of the uncertain region of a split's score, above 0. A sample reaches fewer leaves if gamma is
            smaller.
          width: capacity of the frontier of paths, as in :func:`jtrees.routing.conditional_ensemble`. None: a measured
            default for the depth; all splits are scored if the trees have fewer than 7 levels.
          dtype: dtype of the parameters.
          implementation: XLA or a kernel (see :mod:`jtrees.ops`). None selects the fastest implementation.
          rngs: random streams for the parameters.

        Raises:
          ValueError: for a count, a depth or gamma out of range.
        """
        features, trees = validation.check_count("features", features), validation.check_count("num_trees", num_trees)
        out_features, depth = validation.check_count("out_features", out_features), validation.check_depth(depth)
        validation.check_number("gamma", gamma, above=0)
        conditional.checked_width(width, depth)
        nodes, leaves = topology.num_nodes(depth), topology.num_leaves(depth)
        keys = rngs.params(), rngs.params(), rngs.params()  # the key of the biases is not used
        self.weights = nnx.Param(small_uniform(keys[0], (trees, nodes, features), dtype))
        self.bias = nnx.Param(jnp.zeros((trees, nodes), dtype))
        self.leaf_values = nnx.Param(small_uniform(keys[2], (trees, leaves, out_features), dtype))
        self.features, self.gamma, self.width, self.implementation = features, gamma, width, implementation

    def __call__(self, x: Float[Array, "*n features"]) -> Float[Array, "*n out"]:
        """Returns the sum of the trees.

        Args:
          x: samples, any leading axes.

        Raises:
          ValueError: if the size of the last axis differs from ``features``, or if there are no samples.
        """
        flat = validation.flat_samples(x, self.features)
        trees = self.weights[...], self.bias[...], self.leaf_values[...]
        options: Any = {"width": self.width, "implementation": self.implementation}
        return ops.ensemble(*trees, flat, self.gamma, **options).reshape(*x.shape[:-1], -1)
