"""Fused soft routing: the expected leaf values of samples, and their gradient.

No array of size nodes x n is in the device's memory. The backward pass recomputes scores; sums over samples are written
by chunk and added outside of the kernel, so that they are deterministic.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tiles
from pallas_kernels.backend import Config, Out, config_of, launch, store_where
from pallas_kernels.layout import Layout
from pallas_kernels.operands import checked, scores
from pallas_kernels.routes import NOTHING, ROUTES, Route, cubic

NAME = "soft_routing"


def soft_routing(
    x: jax.Array,
    weights: jax.Array,
    bias: jax.Array,
    leaves: jax.Array,
    *,
    route: str = "sigmoid",
    scale: float | jax.Array = 1.0,
    implementation: str | Config | None = None,
) -> jax.Array:
    """Returns ``sum_l P_l(x) leaves_l``, the expected leaf values under a soft routing.

    Differentiable by reverse mode in all arrays and in the scale; batched by ``vmap``, which adds an axis to the grid.

    Args:
      x: samples ``(n, p)``, float32 or bfloat16.
      weights: split weights ``(nodes, p)``, nodes breadth first; ``2**depth - 1`` of them, depth 1 to 10.
      bias: ``(nodes,)``.
      leaves: ``(leaves, k)``.
      route: ``"sigmoid"``: right with probability ``sigmoid(scale z)`` at a node of score ``z = w x + b``;
        ``"smooth_step"``: TEL's cubic step of width ``1 / scale``; ``"violation"``: RADDT's softmin over the leaves of
        ``scale`` times the violation of their paths.
      scale: sharpness, above 0.
      implementation: ``"tpu"``, ``"triton"``, ``"interpret"`` (slow, on any platform) or a :class:`Config`: the kernel;
        ``"xla"`` or None: the plain definition (``jtrees.ops`` chooses by measurements).

    Returns:
      ``(n, k)``, float32.

    Raises:
      ValueError: for shapes or dtypes that do not fit, an unknown route or implementation.
      NotImplementedError: for an implementation that does not exist, or that the platform cannot run.
    """
    x, weights, bias, leaves = checked(x, weights, bias, leaves)
    if route not in ROUTES:
        raise ValueError(f"route must be one of {', '.join(map(repr, ROUTES))}, got {route!r:.80}")
    weights, bias = scale * weights, scale * bias
    if (config := config_of(NAME, implementation)) is None:
        return reference(x, weights, bias, leaves, route)
    if config.implementation == "triton" and route == "smooth_step":
        # Seen on an H200 with jax 0.11.2 at depth 8, where other routes and losses of smooth steps ran: an illegal
        # memory access, with and without pipelining and subtrees that are left out.
        raise NotImplementedError("implementation='triton' has no smooth steps: implementation='xla' runs everywhere")
    return _soft_routing(route, config, x, weights, bias, leaves)


def reference(x: jax.Array, weights: jax.Array, bias: jax.Array, leaves: jax.Array, route: str) -> jax.Array:
    """The plain definition."""
    weight = leaf_weights(scores(x, weights, bias), route)
    return jnp.matmul(weight.T, leaves, precision="highest")


def leaf_weights(z: jax.Array, route: str) -> jax.Array:
    """Returns the probabilities of the leaves ``(leaves, n)`` from scores ``(nodes, n)``, by textbook formulas."""
    depth, weight = z.shape[0].bit_length(), jnp.zeros_like(z[:1])
    if route == "violation":
        join = lambda total, z: (total + jax.nn.relu(z), total + jax.nn.relu(-z))
    else:
        right = jax.nn.sigmoid(z) if route == "sigmoid" else cubic(jnp.clip(0.5 + z, 0, 1))
        z, weight = right, weight + 1
        join = lambda total, right: (total * (1 - right), total * right)
    for level in range(depth):
        left, right = join(weight, z[2**level - 1 : 2 ** (level + 1) - 1])
        weight = jnp.stack([left, right], 1).reshape(-1, z.shape[1])
    return jax.nn.softmax(-weight, axis=0) if route == "violation" else weight


# --- The derivative --------------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _soft_routing(route: str, config: Config, *operands: Any) -> jax.Array:
    return _forward(route, config, *operands)[0]


def _forward(route: str, config: Config, x: Any, weights: Any, bias: Any, leaves: Any) -> tuple[jax.Array, Any]:
    out, log_total = value(ROUTES[route], config, x, weights, bias, leaves)
    return out, (x, weights, bias, leaves, out, log_total)


def _backward(route: str, config: Config, saved: Any, cotangent: jax.Array) -> tuple[jax.Array, ...]:
    x, weights, bias, leaves, out, log_total = saved
    soft_route = ROUTES[route]
    mean = (cotangent * out).sum(1, keepdims=True) if soft_route.centred else None
    sums = gradient(soft_route, config, x, weights, bias, leaves, cotangent, mean=mean, log_total=log_total)
    d_x = gradient_of_samples(soft_route, config, x, weights, bias, leaves, cotangent, mean=mean, log_total=log_total)
    return d_x.astype(x.dtype), sums["weights"], sums["bias"], sums["leaves"]


_soft_routing.defvjp(_forward, _backward)


# --- Forward ---------------------------------------------------------------------------------------------------------


def value(
    route: Route, config: Config, x: Any, weights: Any, bias: Any, leaves: Any, *, loss: Any = None, **of_samples: Any
) -> tuple[jax.Array, jax.Array | None]:
    """Returns expected leaf values ``(n, k)``, or expected losses ``(n, 1)``; and the logarithms of the sums of leaf
    weights ``(n, 1)``, None if they sum to 1.
    """
    layout = config.layout(x, leaves)
    ins = tiles.samples(layout, layout.tile, x=x, **of_samples) | tiles.splits(layout, x, weights, bias)
    ins["values"] = tiles.whole(layout.leaves(leaves))
    outs = {"out": tiles.answers(layout, layout.k_rows if loss is None else 1)}
    if not route.normalised:
        outs["log_total"] = tiles.answers(layout, 1)
    body = partial(_value_of_a_tile, layout, route, loss)
    results = launch(f"{NAME}_value", body, config, (layout.columns // layout.tile,), ins, outs)
    out = layout.answers(results["out"])
    return out, None if route.normalised else results["log_total"][:, : layout.n].T


def _value_of_a_tile(layout: Layout, route: Route, loss: Any, refs: SimpleNamespace) -> None:
    samples = slice(None)
    xs = tiles.features(layout, refs.x, samples)
    right, left = refs.right[...], refs.left[...]
    log_top = _log_top(layout, route, refs, xs)[1]

    def visit(t: Any, sums: tuple) -> tuple:
        z = tiles.scores(layout, refs, "w", t, bias=refs.b[t], xs=xs)
        weight = jnp.exp(_log(layout, route, z, right, left, log_top, t))
        values = refs.values[t]
        if loss is None:
            part = tiles.of_leaves(values, weight)
        else:
            part = (weight * tiles.losses(loss, refs, values, samples)).sum(0, keepdims=True)
        return sums[0] + part, sums[1] + weight.sum(0, keepdims=True)

    zeros = jnp.zeros(refs.out.shape, jnp.float32), jnp.zeros((1, layout.tile), jnp.float32)
    out, total = jax.lax.fori_loop(0, layout.subtrees, _where_reached(route, log_top, visit), zeros)
    if route.normalised:
        refs.out[...] = out
    else:
        refs.out[...] = out / total
        refs.log_total[...] = jnp.log(total)


def _where_reached(route: Route, log_top: Any, visit: Any) -> Any:
    """Wraps ``visit(t, sums)`` to return the sums unchanged for subtrees that no sample of the tile reaches."""
    if log_top is None or not route.skips:
        return visit

    def visit_or_not(t: Any, sums: Any) -> Any:
        reached = jnp.max(tiles.row(log_top, t)) > NOTHING / 2
        return jax.lax.cond(reached, lambda: visit(t, sums), lambda: sums)

    return visit_or_not


def _log_top(layout: Layout, route: Route, refs: SimpleNamespace, xs: list) -> tuple[Any, Any]:
    """Returns the scores of the top, and the logarithms of the weights of the subtrees; None and None without a top."""
    if not layout.top:
        return None, None
    z = tiles.scores(layout, refs, "top_w", bias=refs.top_b[...], xs=xs)
    return z, tiles.log_weights(route, z, refs.top_right[...], refs.top_left[...], layout.subtrees)


def _log(layout: Layout, route: Route, z: Any, right: Any, left: Any, log_top: Any, t: Any) -> jax.Array:
    """Returns the logarithms of the weights of the leaves of subtree t."""
    log = tiles.log_weights(route, z, right, left, 2**layout.sub)
    return log if log_top is None else log + tiles.row(log_top, t)


# --- Backward --------------------------------------------------------------------------------------------------------


def gradient(
    route: Route,
    config: Config,
    x: Any,
    weights: Any,
    bias: Any,
    leaves: Any,
    y: Any,
    *,
    loss: tiles.Loss = "linear",
    numbered: bool = False,
    **of_samples: Any,
) -> dict[str, jax.Array]:
    """Returns the loss ``sum_i sum_l P_il loss_l(i)`` and its gradients, in one pass.

    Args:
      route: the routing.
      config: sizes of blocks.
      x: samples.
      weights: split weights.
      bias: split biases.
      leaves: values of the leaves.
      y: targets or cotangents of the losses, ``(n, k)``.
      loss: ``"linear"``: ``leaves_l . y_i``; ``"squared"``: ``share_i |leaves_l - y_i|^2``.
      numbered: whether to return the leaf that each sample reaches.
      **of_samples: further arrays ``(n, 1)``: ``share``; ``mean``, the mean of the losses, for a centred route;
        ``log_total`` as of :func:`value`; ``window``, the unit of scores for slopes. None is ignored.

    Returns:
      ``loss ()``, ``weights (nodes, p)``, ``bias (nodes,)``, ``leaves (leaves, k)``, and ``leaf (n,)`` if ``numbered``.
    """
    layout = config.layout(x, leaves)
    ins = tiles.samples(layout, layout.chunk, x=x, y=y, **of_samples)
    ins |= tiles.splits(layout, x, weights, bias, each=True)
    ins["values"] = tiles.one_subtree(layout.leaves(leaves))
    part = lambda *shape: Out(
        (layout.chunks, layout.subtrees, *shape), jnp.float32, (1, 1, *shape), lambda i, t: (i, t, 0, 0)
    )
    outs = {"d_w": part(layout.sub_rows, layout.p_rows), "d_b": part(layout.sub_rows, 1)}
    outs |= {"d_values": part(layout.sub_rows, layout.k_rows), "loss": part(1, 1)}
    if layout.top:
        outs |= {"d_top_w": part(layout.top_rows, layout.p_rows), "d_top_b": part(layout.top_rows, 1)}
    if numbered:
        outs["leaf"] = Out((1, layout.columns), jnp.int32, (1, layout.chunk), lambda i, t: (0, i))
    body = partial(_gradient_of_a_chunk, layout, config, route, loss)
    results = launch(f"{NAME}_gradient", body, config, (layout.chunks, layout.subtrees), ins, outs)
    top = lambda name, width: (
        results[name].sum((0, 1)) if layout.top else jnp.zeros((layout.top_rows, width), jnp.float32)
    )
    joined = {
        "weights": layout.join(top("d_top_w", layout.p_rows), results["d_w"].sum(0))[:, : layout.p],
        "bias": layout.join(top("d_top_b", 1), results["d_b"].sum(0))[:, 0],
        "leaves": layout.join_leaves(results["d_values"].sum(0)),
        "loss": results["loss"].sum(),
    }
    return joined | ({"leaf": results["leaf"][0, : layout.n]} if numbered else {})


def _gradient_of_a_chunk(layout: Layout, config: Config, route: Route, loss: tiles.Loss, refs: SimpleNamespace) -> None:
    from jax.experimental import pallas as pl  # see backend.launch

    t = pl.program_id(1)
    right, left, bias, values = refs.right[...], refs.left[...], refs.b[0], refs.values[0]
    blocks = layout.blocks_of_features
    if layout.top:
        # In the top only the ancestors of this subtree receive a gradient from it: a row of the path matrices.
        to_right, to_left = tiles.row_as_column(refs.top_right[...], t), tiles.row_as_column(refs.top_left[...], t)

    def visit(i: Any, sums: Any) -> Any:
        samples = pl.ds(pl.multiple_of(i * layout.tile, layout.tile), layout.tile)
        xs = tiles.features(layout, refs.x, samples)
        z_top, log_top = _log_top(layout, route, refs, xs)
        add = lambda t, sums: add_to(t, sums, samples, xs, z_top, log_top)
        return add(t, sums) if hasattr(refs, "leaf") else _where_reached(route, log_top, add)(t, sums)

    def add_to(t: Any, sums: Any, samples: Any, xs: list, z_top: Any, log_top: Any) -> Any:
        z = tiles.scores(layout, refs, "w", 0, bias=bias, xs=xs)
        log = _log(layout, route, z, right, left, log_top, t)
        weight = jnp.exp(log if route.normalised else log - refs.log_total[:, samples])
        leaf_losses = tiles.losses(loss, refs, values, samples)
        total = (weight * leaf_losses).sum(1, keepdims=True).sum(0, keepdims=True)
        change = weight * (leaf_losses - refs.mean[:, samples] if route.centred else leaf_losses)
        d_z = tiles.score_gradient(right, left, change, tiles.slopes(route, z, refs, samples))
        takes = weight  # the share of each sample in the gradient of each leaf
        if route.hard_leaves or hasattr(refs, "leaf"):
            at = tiles.reached(z, right, left, layout.sub)
            if layout.top:
                subtrees = tiles.reached(z_top, refs.top_right[...], refs.top_left[...], layout.top)
                at = at * tiles.row(subtrees, t)
            takes = at if route.hard_leaves else weight
            if hasattr(refs, "leaf"):
                store_where(config, refs.leaf, samples, tiles.number(layout, at, t), at.sum(0, keepdims=True) > 0)
        new = {
            "d_w": [tiles.product(d_z, x, (1, 1)) for x in xs],
            "d_b": d_z.sum(1, keepdims=True),
            "d_values": tiles.pull(loss, refs, values, takes, samples),
            "loss": total,
        }
        if layout.top:
            slope_right, slope_left = tiles.slopes(route, z_top, refs, samples)
            d_top = change.sum(0, keepdims=True) * (to_right * slope_right + to_left * slope_left)
            new["d_top_w"] = [tiles.product(d_top, x, (1, 1)) for x in xs]
            new["d_top_b"] = d_top.sum(1, keepdims=True)
        return jax.tree.map(jnp.add, sums, new)

    def zeros(name: str) -> Any:
        rows, width = getattr(refs, name).shape[2:]
        by_block = [jnp.zeros((rows, f.stop - f.start), jnp.float32) for f in blocks]
        return by_block if name.endswith("w") else jnp.zeros((rows, width), jnp.float32)

    names = [name for name in vars(refs) if name.startswith("d_") or name == "loss"]
    sums = jax.lax.fori_loop(0, layout.tiles, visit, {name: zeros(name) for name in names})
    for name, total in sums.items():
        ref = getattr(refs, name)
        for f, part in zip(blocks, total, strict=True) if isinstance(total, list) else [(slice(None), total)]:
            ref[0, 0, :, f] = part


def gradient_of_samples(
    route: Route, config: Config, x: Any, weights: Any, bias: Any, leaves: Any, y: Any, **of_samples: Any
) -> jax.Array:
    """Returns the gradient for the samples ``(n, p)``, for linear losses; arguments as for :func:`gradient`."""
    layout = config.layout(x, leaves)
    ins = tiles.samples(layout, layout.tile, x=x, y=y, **of_samples) | tiles.splits(layout, x, weights, bias)
    ins["values"] = tiles.whole(layout.leaves(leaves))
    outs = {"d_x": tiles.answers(layout, layout.p_rows)}
    body = partial(_samples_of_a_tile, layout, route)
    results = launch(f"{NAME}_samples", body, config, (layout.columns // layout.tile,), ins, outs)
    return results["d_x"][: layout.p, : layout.n].T


def _samples_of_a_tile(layout: Layout, route: Route, refs: SimpleNamespace) -> None:
    xs = tiles.features(layout, refs.x, slice(None))
    right, left = refs.right[...], refs.left[...]
    z_top, log_top = _log_top(layout, route, refs, xs)

    def visit(t: Any, sums: tuple) -> tuple:
        d_xs, through = sums
        z = tiles.scores(layout, refs, "w", t, bias=refs.b[t], xs=xs)
        log = _log(layout, route, z, right, left, log_top, t)
        weight = jnp.exp(log if route.normalised else log - refs.log_total[...])
        leaf_losses = tiles.losses("linear", refs, refs.values[t], slice(None))
        change = weight * (leaf_losses - refs.mean[...] if route.centred else leaf_losses)
        d_z = tiles.score_gradient(right, left, change, tiles.slopes(route, z, refs, slice(None)))
        d_xs = _add_back(layout, d_xs, refs, "w", t, d_z=d_z)
        return d_xs, tiles.with_row(through, t, change.sum(0, keepdims=True))

    zeros = [jnp.zeros((f.stop - f.start, layout.tile), jnp.float32) for f in layout.blocks_of_features]
    through = jnp.zeros((layout.top_rows, layout.tile), jnp.float32)
    visit = _where_reached(route, log_top, visit)
    d_xs, through = jax.lax.fori_loop(0, layout.subtrees, visit, (zeros, through))
    if layout.top:
        top_slopes = tiles.slopes(route, z_top, refs, slice(None))
        d_z = tiles.score_gradient(refs.top_right[...], refs.top_left[...], through, top_slopes)
        d_xs = _add_back(layout, d_xs, refs, "top_w", d_z=d_z)
    for f, d_x in zip(layout.blocks_of_features, d_xs, strict=True):
        refs.d_x[f, :] = d_x


def _add_back(
    layout: Layout, d_xs: list, refs: SimpleNamespace, name: str, *index: Any, d_z: jax.Array
) -> list[jax.Array]:
    return [
        d_x + tiles.product(tiles.weights(refs, name, *index, slice(None), f), d_z, (0, 0))
        for f, d_x in zip(layout.blocks_of_features, d_xs, strict=True)
    ]
