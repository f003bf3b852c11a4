"""Fused hard routing: the leaf that each sample reaches, and its values.

Products are of full float32 precision: a rounded score would flip decisions of samples near a split. Decisions and leaf
indices are small integers, exact in products. All nodes are scored, as matrix backends cannot follow a path; for deep
trees following it (``jtrees.ops.hard``) is cheaper.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tiles
from pallas_kernels.backend import Config, config_of, launch
from pallas_kernels.layout import Layout
from pallas_kernels.operands import checked, scores

NAME = "hard_routing"


def hard_routing(
    x: jax.Array,
    weights: jax.Array,
    bias: jax.Array,
    leaves: jax.Array | None = None,
    *,
    implementation: str | Config | None = None,
) -> Any:
    """Returns the leaf that each sample reaches, right iff the score ``w x + b`` is above 0, and its values.

    Batched by ``vmap`` (a forest), which adds an axis to the grid. Not differentiable.

    Args:
      x: samples ``(n, p)``, float32 or bfloat16.
      weights: split weights ``(nodes, p)``, nodes breadth first; ``2**depth - 1`` of them, depth 1 to 10.
      bias: ``(nodes,)``.
      leaves: ``(leaves, k)``, finite; by default only leaf indices are returned.
      implementation: as for :func:`pallas_kernels.soft_routing`.

    Returns:
      Leaf indices ``(n,)`` in int32; and values ``(n, k)``, float32, if ``leaves`` are given.

    Raises:
      ValueError: for shapes or dtypes that do not fit, or an unknown implementation.
      NotImplementedError: for an implementation that does not exist, or that the platform cannot run.
    """
    values = jnp.zeros((weights.shape[0] + 1, 1)) if leaves is None else leaves
    x, weights, bias, values = checked(x, weights, bias, values)
    if (config := config_of(NAME, implementation)) is None:
        results = reference(x, weights, bias, values)
    else:
        results = route_hard(config, x, weights, bias, values, numbers_only=leaves is None)
    return results[0] if leaves is None else results


def reference(x: jax.Array, weights: jax.Array, bias: jax.Array, leaves: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The plain definition, node by node from the root."""
    right = scores(x, weights, bias) > 0
    node = jnp.zeros(x.shape[0], jnp.int32)
    for _ in range(weights.shape[0].bit_length()):
        node = 2 * node + 1 + jnp.take_along_axis(right, node[None], 0)[0].astype(jnp.int32)
    leaf = node - weights.shape[0]
    return leaf, leaves[leaf]


def route_hard(
    config: Config, x: Any, weights: Any, bias: Any, leaves: Any, *, numbers_only: bool = False
) -> tuple[jax.Array, jax.Array | None]:
    """Runs the kernel; without values if ``numbers_only``."""
    layout = config.layout(x, leaves)
    ins = tiles.samples(layout, layout.tile, x=x) | tiles.splits(layout, x, weights, bias)
    if not numbers_only:
        ins["values"] = tiles.whole(layout.leaves(leaves))
    outs = {"leaf": tiles.answers(layout, 1, jnp.int32)}
    if not numbers_only:
        outs["out"] = tiles.answers(layout, layout.k_rows)
    results = launch(NAME, partial(_tile, layout), config, (layout.columns // layout.tile,), ins, outs)
    return results["leaf"][0, : layout.n], None if numbers_only else layout.answers(results["out"])


def _tile(layout: Layout, refs: SimpleNamespace) -> None:
    xs = tiles.features(layout, refs.x, slice(None))
    right, left = refs.right[...], refs.left[...]
    if layout.top:
        z = tiles.scores(layout, refs, "top_w", bias=refs.top_b[...], xs=xs)
        top = tiles.reached(z, refs.top_right[...], refs.top_left[...], layout.top)

    def visit(t: Any, sums: dict) -> dict:
        z = tiles.scores(layout, refs, "w", t, bias=refs.b[t], xs=xs)
        at = tiles.reached(z, right, left, layout.sub)
        if layout.top:
            at = at * tiles.row(top, t)
        new = {"leaf": tiles.number(layout, at, t)}
        if hasattr(refs, "out"):
            new["out"] = tiles.of_leaves(refs.values[t], at)
        return jax.tree.map(jnp.add, sums, new)

    zeros = {name: jnp.zeros(ref.shape, ref.dtype) for name, ref in vars(refs).items() if name in ("leaf", "out")}
    for name, total in jax.lax.fori_loop(0, layout.subtrees, visit, zeros).items():
        getattr(refs, name)[...] = total
