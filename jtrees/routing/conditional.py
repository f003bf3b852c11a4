"""TEL's conditional computation: an ensemble under smooth-step routing that works only where samples go (Hazimeh et
al., "The Tree Ensemble Layer", ICML 2020, Algorithms 1 and 2), exact.

Two ways, one answer: :mod:`jtrees.routing.frontier` follows the paths that samples take, with room for a number of them
that is fixed beforehand; :mod:`jtrees.routing.by_level` scores all splits, and answers batches for which that is not
enough.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jtrees import blocking, sharding, topology, validation
from jtrees.routing import by_level, frontier as paths
from jtrees.routing.by_level import Asked

MAX_DEPTH = 20

# Depths from which paths are tried, with room for fewer paths than take as long as all splits do, as a batch that is
# tried in vain costs, too. experiments/bench_tel.py measures where both ways are equal: two CPU cores, 10 trees, batch
# 256, p = 20; depth 11 and 13 lie between or beyond what was measured.
_WIDTHS = {7: 2, 8: 2, 9: 4, 10: 5, 11: 12, 12: 24, 13: 40}


def default_width(depth: int) -> int | None:
    """The measured width for a depth: None where every split is scored whatever the routing."""
    return _WIDTHS.get(min(depth, max(_WIDTHS)))


# --- The public function ---------------------------------------------------------------------------------------------


def conditional_ensemble(
    x: Float[Array, "n p"],
    weights: Float[Array, "trees nodes p"],
    bias: Float[Array, "trees nodes"],
    leaf_values: Float[Array, "trees leaves k"],
    gamma: float | Float[Array, ""],
    *,
    width: int | None = None,
) -> Float[Array, "n k"]:
    """An ensemble of trees under smooth-step routing, the sum over trees, with work only where samples go (TEL).

    Differentiable by reverse mode in all arrays and in gamma. Equal to
    ``sum_t leaf_probabilities(smooth_step(weights_t x + bias_t, gamma)).T @ leaf_values_t`` but for rounding.

    Args:
      x: samples.
      weights: split weights, right iff ``weights x + bias > 0``; depth 1 to 20.
      bias: split biases.
      leaf_values: what the leaves hold.
      gamma: width of the uncertain region of a split's score, above 0. The smaller, the fewer leaves a sample reaches.
      width: room, in paths for each sample and tree on average over the samples (of some 6000 at a time, with ten
        trees); a batch that needs more is answered by scoring all splits. None: what was measured to be fastest for
        the depth. Under ``vmap`` both are computed.

    Raises:
      ValueError: for shapes that do not fit, a depth above 20, gamma <= 0, width < 1, or samples that are not finite.
    """
    asked = checked(x, weights, bias, leaf_values, gamma)
    width = checked_width(width, topology.depth_of(asked.bias.shape[1]))
    return _answers(width, asked)


def reachable_leaves(
    x: Float[Array, "n p"],
    weights: Float[Array, "trees nodes p"],
    bias: Float[Array, "trees nodes"],
    gamma: float | Float[Array, ""],
    *,
    width: int | None = None,
) -> tuple[Int[Array, "trees n"], Bool[Array, ""]]:
    """How many leaves each sample reaches in each tree; and whether that is more than a frontier has room for.

    Args:
      x: samples.
      weights: split weights.
      bias: split biases.
      gamma: width of the uncertain region.
      width: as for :func:`conditional_ensemble`; where the default is to score all splits, there is always room.

    Raises:
      ValueError: as :func:`conditional_ensemble`.
    """
    asked = checked(x, weights, bias, None, gamma)
    return _reachable(checked_width(width, topology.depth_of(asked.bias.shape[1])), asked)


# Compiled by themselves, so that calls from outside a program, of a layer that is looked at, compile once.
@partial(jax.jit, static_argnums=0)
def _answers(width: int | None, asked: Asked) -> Array:
    return _by_level(asked) if width is None else _in_blocks(partial(_conditional, width), asked)


@partial(jax.jit, static_argnums=0)
def _reachable(width: int | None, asked: Asked) -> tuple[Array, Array]:
    if width is None:
        return by_level.reachable(asked), jnp.zeros((), bool)

    def of_block(asked: Asked) -> tuple[Array, Array]:
        frontier, fits = paths.explore(asked, width)
        counted = lambda: paths.counted(frontier, len(asked.bias), len(asked.x))
        count = jax.lax.cond(fits, counted, lambda: by_level.reachable(asked))
        return count.T, jnp.broadcast_to(~fits, len(asked.x))

    count, overflow = _in_blocks(of_block, asked)
    return count.T, overflow.any()


def _in_blocks(fn: Any, asked: Asked) -> Any:
    """``fn(asked)``, of which samples come first, for not too many paths at once."""

    def here(x: Array, *trees: Array) -> tuple[tuple[()], Any]:
        block, of_block = blocking.samples_on_paths(len(trees[0])), lambda x: fn(Asked(x, *trees))
        return (), of_block(x) if len(x) <= block else blocking.map_over_blocks(of_block, x, block)

    # By itself on each device: paths of samples of all devices in one list would meet on one of them.
    return sharding.each_part(here, *asked, rows=(0,))[1]


def checked(x: Any, weights: Any, bias: Any, leaf_values: Any, gamma: Any) -> Asked:
    """The arguments as arrays of one dtype; ``leaf_values`` may be None.

    Raises:
      ValueError: for shapes that do not fit or have a zero, a depth above 20, gamma <= 0, or samples that are not
        finite.
    """
    x, weights, bias = jnp.asarray(x), jnp.asarray(weights), jnp.asarray(bias)
    if x.ndim != 2 or weights.ndim != 3 or x.shape[1] != weights.shape[2]:
        raise ValueError(f"x must be (n, p) and weights (trees, nodes, p), got {x.shape} and {weights.shape}")
    if 0 in x.shape:
        raise ValueError(f"x must have at least one row and one column, got shape {x.shape}")
    if not len(weights):
        raise ValueError(f"weights must hold at least one tree, got shape {weights.shape}")
    if bias.shape != weights.shape[:2]:
        raise ValueError(f"bias must have shape {weights.shape[:2]}, as weights have it, got {bias.shape}")
    if (depth := topology.depth_of(bias.shape[1])) > MAX_DEPTH:
        raise ValueError(f"weights must be of trees of depth 1 to {MAX_DEPTH}, got depth {depth}")
    arrays = [x, weights, bias]
    if leaf_values is not None:
        leaf_values = jnp.asarray(leaf_values)
        if leaf_values.ndim != 3 or leaf_values.shape[:2] != (len(weights), topology.num_leaves(depth)):
            expected = f"({len(weights)}, {topology.num_leaves(depth)}, k)"
            raise ValueError(f"leaf_values must have shape {expected}, got {leaf_values.shape}")
        if not leaf_values.shape[2]:
            raise ValueError(f"leaf_values must hold at least one output, got shape {leaf_values.shape}")
        arrays.append(leaf_values)
    validation.check_number("gamma", gamma)
    if jnp.ndim(gamma):
        raise ValueError(f"gamma must be one number, got shape {jnp.shape(gamma)}")
    if not validation.is_traced(x):
        validation.check_finite("x", x)
    cast = lambda a: None if a is None else a.astype(jnp.result_type(*arrays))
    return Asked(*map(cast, (x, weights, bias, leaf_values, jnp.asarray(gamma))))


def checked_width(width: Any, depth: int) -> int | None:
    """The width as an int, that of the depth for None; ``ValueError`` if it is less than 1."""
    return default_width(depth) if width is None else validation.check_count("width", width)


# --- Differentiation -------------------------------------------------------------------------------------------------


@jax.custom_vjp
def _by_level(asked: Asked) -> Array:
    return by_level.outputs(asked)


_by_level.defvjp(
    lambda asked: (by_level.outputs(asked), asked),
    lambda asked, cotangent: (by_level.gradient(asked, cotangent),),
)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _conditional(width: int, asked: Asked) -> Array:
    return _conditional_fwd(width, asked)[0]


def _conditional_fwd(width: int, asked: Asked) -> tuple[Array, Any]:
    frontier, fits = paths.explore(asked, width)
    out = jax.lax.cond(fits, lambda: paths.outputs(frontier, asked), lambda: by_level.outputs(asked))
    return out, (asked, frontier, fits)


def _conditional_bwd(width: int, saved: Any, cotangent: Array) -> tuple[Asked]:
    asked, frontier, fits = saved
    of_paths = lambda: paths.add_gradient(frontier, asked, cotangent, jax.tree.map(jnp.zeros_like, asked))
    return (jax.lax.cond(fits, of_paths, lambda: by_level.gradient(asked, cotangent)),)


_conditional.defvjp(_conditional_fwd, _conditional_bwd)
