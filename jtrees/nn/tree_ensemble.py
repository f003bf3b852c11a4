"""TEL's tree ensemble as a layer (Hazimeh et al., "The Tree Ensemble Layer", ICML 2020)."""

from collections.abc import Callable
from typing import Any, Literal

from flax import nnx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrees import ops, routing, topology, validation
from jtrees.routing import conditional

COMBINATIONS = ("sum", "concatenate")
_START = 0.01  # splits and leaves begin uniform between this and its negative (paper, appendix)
Initializer = Callable[..., Array]
zeros = nnx.initializers.zeros_init()


def small_uniform(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    """U(-0.01, 0.01), the paper's start."""
    return jax.random.uniform(key, shape, dtype, -_START, _START)


class TreeEnsemble(nnx.Module):
    """Soft trees with smooth-step routing, ``(..., features) -> (..., out_features)``, in place of a dense layer.

    All trees are one computation, forwards and backwards, that visits only what samples reach where trees are deep
    (:func:`jtrees.routing.conditional_ensemble`). The paper puts ``nnx.BatchNorm`` before it: scores then begin near
    zero, where splits are uncertain and learn.

    Attributes:
      weights: of the splits, ``(num_trees, 2**depth - 1, features)``; right iff ``weights x + bias > 0``.
      bias: of the splits, ``(num_trees, 2**depth - 1)``.
      leaf_values: ``(num_trees, 2**depth, out_features)``.
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
        combine: Literal["sum", "concatenate"] = "sum",
        width: int | None = None,
        split_init: Initializer = small_uniform,
        bias_init: Initializer = zeros,
        leaf_init: Initializer = small_uniform,
        dtype: Any = jnp.float32,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        """A layer with random trees.

        Args:
          features: size of the last axis of what comes in.
          num_trees: how many trees.
          depth: of the trees, 1 to 16.
          out_features: outputs of each tree.
          gamma: above 0; the smaller, the fewer leaves a sample reaches.
          combine: ``"sum"`` of the trees, or ``"concatenate"``: their outputs side by side, ``num_trees out_features``.
          width: room for paths, as for :func:`jtrees.routing.conditional_ensemble`; None: what was measured.
          split_init: ``(key, shape, dtype) -> array`` for the weights.
          bias_init: for the biases.
          leaf_init: for the leaves.
          dtype: of the parameters.
          implementation: XLA or a kernel, None for what is fastest: see :mod:`jtrees.ops`.
          rngs: for the parameters.

        Raises:
          ValueError: for a count, a depth or gamma out of range, or an unknown combination.
        """
        features, trees = validation.check_count("features", features), validation.check_count("num_trees", num_trees)
        out_features, depth = validation.check_count("out_features", out_features), validation.check_depth(depth)
        validation.check_number("gamma", gamma)
        validation.check_choice("combine", combine, COMBINATIONS)
        conditional.checked_width(width, depth)
        nodes, leaves = topology.num_nodes(depth), topology.num_leaves(depth)
        self.weights = nnx.Param(split_init(rngs.params(), (trees, nodes, features), dtype))
        self.bias = nnx.Param(bias_init(rngs.params(), (trees, nodes), dtype))
        self.leaf_values = nnx.Param(leaf_init(rngs.params(), (trees, leaves, out_features), dtype))
        self.features, self.gamma, self.combine = features, gamma, combine
        self.width, self.implementation = width, implementation

    def __call__(self, x: Float[Array, "*n features"]) -> Float[Array, "*n out"]:
        """The sum of the trees, or their outputs side by side.

        Args:
          x: samples, any leading axes.

        Raises:
          ValueError: for another last axis than ``features``, or no samples.
        """
        flat = validation.flat_samples(x, self.features)
        trees = self.weights[...], self.bias[...], self.leaf_values[...]
        answers = lambda weights, bias, leaf_values: ops.ensemble(
            weights, bias, leaf_values, flat, self.gamma, width=self.width, implementation=self.implementation
        )
        if self.combine == "sum":
            out = answers(*trees)
        else:
            alone = jax.tree.map(lambda a: a[:, None], trees)  # ensembles of one tree
            each = jax.lax.map(lambda tree: answers(*tree), alone)
            out = jnp.moveaxis(each, 0, 1).reshape(len(flat), -1)
        return out.reshape(*x.shape[:-1], -1)

    def reachable_leaves(self, x: Float[Array, "*n features"]) -> tuple[Array, Array]:
        """How many leaves each sample reaches in each tree, ``(num_trees, *n)``; and whether there was no room."""
        weights, bias = self.weights[...], self.bias[...]
        count, overflow = routing.reachable_leaves(
            validation.flat_samples(x, self.features), weights, bias, self.gamma, width=self.width
        )
        return count.reshape(-1, *x.shape[:-1]), overflow
