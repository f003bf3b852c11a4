"""Hard routing: the leaf that each sample reaches, and its values.

A decision is a factor of 0 or 1, so hard routing is soft routing with different factors. All nodes are scored. For deep
trees, following the path (``jtrees.ops.hard``) takes fewer operations.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.choice import Implementation, choose, run
from pallas_kernels.config import Config
from pallas_kernels.operands import checked, scores
from pallas_kernels.routes import HARD
from pallas_kernels.routing import Tree, value
from pallas_kernels.timing import Program


def hard_routing(
    x: jax.Array,
    weights: jax.Array,
    bias: jax.Array,
    leaves: jax.Array | None = None,
    *,
    implementation: Implementation = "xla",
) -> Any:
    """Returns the leaf that each sample reaches, and its values. A sample goes right if ``w x + b`` is above 0.

    ``vmap`` (for a forest) adds an axis to the grid. No gradient flows through this function.

    Args:
      x: samples ``(n, p)``, float32 or bfloat16.
      weights: split weights ``(nodes, p)``, ``2**depth - 1`` nodes breadth first, depth 1 to 10.
      bias: split biases ``(nodes,)``.
      leaves: finite leaf values ``(leaves, k)``. If None, only leaf numbers are returned.
      implementation: see :mod:`pallas_kernels.choice`.

    Returns:
      Leaf numbers ``(n,)`` in int32. If ``leaves`` are given, also values ``(n, k)`` in float32.

    Raises:
      ValueError: for shapes or dtypes that do not fit, or an unknown implementation.
      Unsupported: if no requested implementation can run the call.
    """
    several = jnp.zeros((len(jnp.atleast_1d(weights)) + 1, 1)) if leaves is None else leaves
    tree = jax.lax.stop_gradient(checked(x, weights, bias, several))
    numbers = jnp.arange(len(tree.leaves), dtype=jnp.float32)[:, None]
    tree = tree._replace(leaves=numbers if leaves is None else jnp.concatenate([numbers, tree.leaves], axis=1))
    program = Program("hard_routing", "", lambda how, x, y, w, b, v: hard_routing(x, w, b, v, implementation=how))
    choice = choose(program, implementation, tree.sizes)
    columns = run(choice, of_leaf_reached, reference, *tree)
    leaf = columns[:, 0].astype(jnp.int32)
    return leaf if leaves is None else (leaf, columns[:, 1:])


def reference(x: jax.Array, weights: jax.Array, bias: jax.Array, leaves: jax.Array) -> jax.Array:
    """Computes the plain definition: the values of the reached leaf, node by node from the root."""
    return leaves[walk(x, weights, bias)]


def walk(x: jax.Array, weights: jax.Array, bias: jax.Array) -> jax.Array:
    """Returns the numbers of the reached leaves, node by node from the root."""
    right = scores(x, weights, bias) > 0
    node = jnp.zeros(x.shape[0], jnp.int32)
    for _ in range(weights.shape[0].bit_length()):
        node = 2 * node + 1 + jnp.take_along_axis(right, node[None], 0)[0].astype(jnp.int32)
    return node - weights.shape[0]


def of_leaf_reached(config: Config, *tree: Any) -> jax.Array:
    """Returns the values of the reached leaf, computed by a kernel."""
    return value(HARD, config, Tree(*tree))[0]
