"""TEL's exact conditional computation: smooth-step routing that evaluates only the nodes that samples reach.

The method is from Hazimeh et al., "The Tree Ensemble Layer", ICML 2020, Algorithms 1 and 2. There are two equivalent
implementations. :mod:`jtrees.routing.frontier` follows the paths of samples, up to a static capacity.
:mod:`jtrees.routing.by_level` scores all splits, and is the fallback for batches that exceed the capacity.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jtrees import blocking, sharding, topology, validation
from jtrees.routing import by_level, frontier as paths
from jtrees.routing.by_level import Operands

MAX_DEPTH = 20

# Default widths by depth. They are below the break-even, where paths take the same time as all splits, because an
# overflow costs both. experiments/bench_tel.py measures the break-even on two CPU cores with 10 trees, batch 256 and
# p = 20. The widths of depths 11 and 13 are interpolated or extrapolated.
_WIDTHS = {7: 2, 8: 2, 9: 4, 10: 5, 11: 12, 12: 24, 13: 40}


def conditional_ensemble(
    x: Float[Array, "n p"],
    weights: Float[Array, "trees nodes p"],
    bias: Float[Array, "trees nodes"],
    leaf_values: Float[Array, "trees leaves k"],
    gamma: float | Float[Array, ""],
    *,
    width: int | None = None,
) -> Float[Array, "n k"]:
    """Returns the sum over trees under smooth-step routing. Evaluates only nodes that samples reach (TEL).

    Reverse mode differentiates all arrays and gamma, and forward mode raises a ``TypeError``. Up to rounding, the
    result equals ``sum_t leaf_probabilities(smooth_step(weights_t x + bias_t, gamma)).T @ leaf_values_t``.

    Args:
      x: samples.
      weights: split weights; right if ``weights x + bias > 0``, else left. The depth is 1 to 20.
      bias: split biases.
      leaf_values: values of the leaves.
      gamma: width of the uncertain region of a split's score, above 0; in a program at least 1e-28, else slopes may be
        infinite. A sample reaches fewer leaves if gamma is smaller.
      width: capacity in paths per sample and tree, on average over a block of samples (about 6000 samples for ten
        trees). If a block exceeds the capacity, all splits are scored. None: the fastest measured width for the depth;
        all splits are scored if the trees have fewer than 7 levels. ``vmap`` computes both implementations.

    Raises:
      ValueError: for shapes that do not fit, a depth above 20, gamma <= 0, width < 1, or samples that are not finite.

    Example:
      >>> weights, bias, values = jnp.ones((2, 1, 1)), jnp.zeros((2, 1)), jnp.array([[[0.0], [1.0]], [[0.0], [10.0]]])
      >>> x = jnp.array([[-3.0], [0.0], [3.0]])
      >>> print(jtrees.routing.conditional_ensemble(x, weights, bias, values, 1.0).T)  # two trees of one split
      [[ 0.   5.5 11. ]]
    """
    operands = checked(x, weights, bias, leaf_values, gamma)
    width = checked_width(width, topology.depth_of(operands.bias.shape[1]))
    return _outputs(width, operands)


def reachable_leaves(
    x: Float[Array, "n p"],
    weights: Float[Array, "trees nodes p"],
    bias: Float[Array, "trees nodes"],
    gamma: float | Float[Array, ""],
    *,
    width: int | None = None,
) -> tuple[Int[Array, "trees n"], Bool[Array, ""]]:
    """Returns the number of leaves that each sample reaches in each tree, and whether the frontier overflows.

    :func:`conditional_ensemble` describes the arguments and the errors. There is no overflow if the default for the
    depth is to score all splits.

    Example:
      >>> x = jnp.array([[-3.0], [0.0], [3.0]])
      >>> count, overflows = jtrees.routing.reachable_leaves(x, jnp.ones((1, 1, 1)), jnp.zeros((1, 1)), 1.0)
      >>> print(count, overflows)
      [[1 2 1]] False
    """
    operands = checked(x, weights, bias, None, gamma)
    return _reachable(checked_width(width, topology.depth_of(operands.bias.shape[1])), operands)


# jit compiles repeated calls outside of a program only once.
@partial(jax.jit, static_argnums=0)
def _outputs(width: int | None, operands: Operands) -> Array:
    return _conditional(None, operands) if width is None else _in_blocks(partial(_conditional, width), operands)


@partial(jax.jit, static_argnums=0)
def _reachable(width: int | None, operands: Operands) -> tuple[Array, Array]:
    if width is None:
        return by_level.reachable(operands), jnp.zeros((), bool)

    def count_block(operands: Operands) -> tuple[Array, Array]:
        frontier, fits = paths.explore(operands, width, paths.smooth_step(operands.gamma))
        counted = lambda: paths.counted(frontier, len(operands.bias), len(operands.x))
        count = jax.lax.cond(fits, counted, lambda: by_level.reachable(operands))
        return count.T, jnp.broadcast_to(~fits, len(operands.x))

    count, overflow = _in_blocks(count_block, operands)
    return count.T, overflow.any()


def _in_blocks(fn: Any, operands: Operands) -> Any:
    """Returns ``fn(operands)``, in blocks of samples, which bound the number of paths. Results have samples first."""

    def by_device(x: Array, *trees: Array) -> tuple[tuple[()], Any]:
        block, evaluate = blocking.samples_on_paths(len(trees[0])), lambda x: fn(Operands(x, *trees))
        return (), evaluate(x) if len(x) <= block else blocking.map_over_blocks(evaluate, x, block)

    # Each device has its own list of paths. A common list would be on a single device.
    return sharding.each_part(by_device, *operands, rows=(0,))[1]


def checked(x: Any, weights: Any, bias: Any, leaf_values: Any, gamma: Any) -> Operands:
    """Returns the checked arguments as arrays of one dtype; ``leaf_values`` may be None."""
    x, weights, bias = jnp.asarray(x), jnp.asarray(weights), jnp.asarray(bias)
    if x.ndim != 2 or weights.ndim != 3 or x.shape[1] != weights.shape[2]:
        raise ValueError(f"x must be (n, p) and weights (trees, nodes, p), got {x.shape} and {weights.shape}")
    if bias.shape != weights.shape[:2]:
        raise ValueError(f"bias must have shape {weights.shape[:2]} to match weights, got {bias.shape}")
    if (depth := topology.depth_of(bias.shape[1])) > MAX_DEPTH:
        raise ValueError(f"weights must be of trees of depth 1 to {MAX_DEPTH}, got depth {depth}")
    arrays = {"x": x, "weights": weights, "bias": bias}
    if leaf_values is not None:
        arrays["leaf_values"] = leaf_values = jnp.asarray(leaf_values)
        if leaf_values.ndim != 3 or leaf_values.shape[:2] != (len(weights), topology.num_leaves(depth)):
            expected = f"({len(weights)}, {topology.num_leaves(depth)}, k)"
            raise ValueError(f"leaf_values must have shape {expected}, got {leaf_values.shape}")
    for name, array in arrays.items():
        if 0 in array.shape:
            raise ValueError(f"{name} must have no axis of length 0, got shape {array.shape}")
    validation.check_number("gamma", gamma, above=0)
    validation.check_finite("x", x)
    dtype = jnp.result_type(*arrays.values())
    dtype = dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.float32
    # Slopes of smaller widths are not finite. A maximum in a program would cost a third of the time of TEL's training.
    if not validation.is_traced(gamma):
        gamma = max(float(gamma), float(jnp.finfo(dtype).tiny) ** 0.75)
    cast = lambda a: None if a is None else a.astype(dtype)
    return Operands(*map(cast, (x, weights, bias, leaf_values, jnp.asarray(gamma))))


def checked_width(width: Any, depth: int) -> int | None:
    """Returns the width, by default the measured width for the depth; None if all splits are scored."""
    return _WIDTHS.get(min(depth, max(_WIDTHS))) if width is None else validation.check_count("width", width)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _conditional(width: int | None, operands: Operands) -> Array:
    return _conditional_fwd(width, operands)[0]


def _conditional_fwd(width: int | None, operands: Operands) -> tuple[Array, Any]:
    if width is None:
        return by_level.outputs(operands), (operands, None, None)
    frontier, fits = paths.explore(operands, width, paths.smooth_step(operands.gamma))
    out = jax.lax.cond(fits, lambda: paths.outputs(frontier, operands), lambda: by_level.outputs(operands))
    return out, (operands, frontier, fits)


def _conditional_bwd(width: int | None, saved: Any, cotangent: Array) -> tuple[Operands]:
    operands, frontier, fits = saved
    if width is None:
        return (by_level.gradient(operands, cotangent),)
    path_gradient = lambda: paths.add_gradient(frontier, operands, cotangent, jax.tree.map(jnp.zeros_like, operands))
    return (jax.lax.cond(fits, path_gradient, lambda: by_level.gradient(operands, cotangent)),)


_conditional.defvjp(_conditional_fwd, _conditional_bwd)
