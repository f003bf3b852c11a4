"""The two kernels behind all kernels: the expected value of the leaves, and the gradient of a loss of leaves.

Both kernels route a tile of samples down the tree (fold.py). The device memory holds no array of size nodes x n. Each
program writes its sums over samples. The sums are added outside of the kernel, so they are the same in every run.
"""

from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import fold
from pallas_kernels.config import Config, Sizes
from pallas_kernels.layout import Layout
from pallas_kernels.losses import Loss, expected, losses, pull
from pallas_kernels.products import product
from pallas_kernels.routes import HARD, Route


class Tree(NamedTuple):
    """Checked operands: samples ``(n, p)``, splits ``(nodes, p)`` and ``(nodes,)``, and leaves ``(leaves, k)``."""

    x: jax.Array
    weights: jax.Array
    bias: jax.Array
    leaves: jax.Array

    @property
    def sizes(self) -> Sizes:
        """Number of samples, number of features, depth, and number of outputs."""
        (n, p), (leaves, k) = self.x.shape, self.leaves.shape
        return Sizes(n, p, leaves.bit_length() - 1, k)


def _operands(layout: Layout, tree: Tree, columns: dict[str, Any]) -> dict[str, Any]:
    from pallas_kernels.launch import Operand  # local, because Pallas takes a tenth of a second to import

    padded = jnp.pad(tree.weights, ((0, 0), (0, layout.columns - layout.p)))
    operands = {
        "x": Operand("columns", tree.x.T) if layout.transposed else Operand("samples", tree.x),
        "w": Operand("tree", layout.cut(padded)),
        "b": Operand("tree", layout.cut(tree.bias[:, None])),
        "values": Operand("tree", layout.cut_leaves(tree.leaves)),
    }
    column = lambda name, a: Operand("scalar", a) if name == "window" else Operand("columns", layout.columns_of(a))
    return operands | {name: column(name, a) for name, a in columns.items()}


def _column(refs: SimpleNamespace, tile: Any, name: str) -> Any:
    """Returns a column operand of a tile, ``(rows, tile)``; None if the kernel has no operand of this name."""
    return tile.column(name) if hasattr(refs, name) else None


def _over_subtrees(layout: Layout, visit: Any, sums: Any) -> Any:
    """Calls ``visit(subtree, sums)`` for all subtrees in sequence, without a loop for a single subtree."""
    return visit(0, sums) if layout.subtrees == 1 else jax.lax.fori_loop(0, layout.subtrees, visit, sums)


def value(
    route: Route, config: Config, tree: Tree, *, loss: Loss | None = None, **columns: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns expected leaf values ``(n, k)`` or expected losses ``(n, 1)``, and the sums of leaf weights ``(n, 1)``.

    ``loss`` is as for :func:`gradient`, with the columns ``y (n, k)`` and ``share (n, 1)``, or None for values.
    """
    from pallas_kernels.launch import SHELLS, launch, result

    layout = config.layout(tree.sizes)
    rows = 1 if loss is not None else layout.outputs
    outs = {"out": result("columns", jnp.float32, rows, layout.n), "total": result("columns", jnp.float32, 1, layout.n)}
    body = partial(_value_of_a_tile, layout, route, loss, SHELLS[config.backend])
    results = launch("routing_value", body, config, layout, _operands(layout, tree, columns), outs, sums=False)
    return results["out"][: 1 if loss is not None else layout.k].T, results["total"].T


def _value_of_a_tile(layout: Layout, route: Route, loss: Loss | None, shell: ModuleType, refs: SimpleNamespace) -> None:
    from jax.experimental import pallas as pl

    tile = shell.Tile(layout, refs, pl.program_id(0))
    routed = partial(_Routed, layout, route, shell, refs, tile.features())
    y, share = (_column(refs, tile, name) for name in ("y", "share"))

    def visit(t: Any, sums: Any) -> Any:
        subtree = routed(t, place=t)
        if loss is None:
            part = expected(subtree.values, subtree.weight)
        else:
            leaf_losses = fold.map_arrays(partial(losses, loss, y=y, share=share), subtree.values)
            part = fold.total(fold.map_arrays(jnp.multiply, subtree.weight, leaf_losses))
        return sums[0] + part, sums[1] + fold.total(subtree.weight)

    zeros = jnp.zeros((refs.out.shape[0], layout.tile), jnp.float32), jnp.zeros((1, layout.tile), jnp.float32)
    out, total = _over_subtrees(layout, visit, zeros)
    tile.write("out", out if route.normalised else out / total)
    tile.write("total", total)


class _Routed:
    """Scores, factors and leaf weights of one subtree, for a tile of samples."""

    def __init__(
        self, layout: Layout, route: Route, shell: ModuleType, refs: SimpleNamespace, xs: list[Any], t: Any, place: Any
    ) -> None:
        """Routes samples down subtree ``t``. Its operands are at index ``place``."""
        self.layout, self.route, self.t, self.refs, self.place = layout, route, t, refs, place
        block = lambda rows, f: shell.weights(refs.w, place, rows, f)
        self.above, self.levels = fold.scores(layout, block, lambda rows: refs.b[place, rows], xs)
        self.factors = fold.factors(route, self.levels)
        self.weight = self._weight(route, self.factors)
        self.values = self.of_leaves("values")

    def _weight(self, route: Route, factors: fold.Factors) -> fold.Level:
        start = None
        if self.above is not None:
            start = fold.path_weight(self.layout, route.factors(self.above[0]), self.t)
        return fold.leaf_weights(self.layout, factors, start)

    def of_leaves(self, name: str) -> fold.Level:
        """Returns an operand of the leaves as the arrays of a level."""
        return tuple(getattr(self.refs, name)[self.place, rows] for rows in self.layout.blocks_of_leaves)

    def reached(self) -> fold.Level:
        """Returns 1 for the leaf of hard routing, else 0."""
        return self._weight(HARD, fold.factors(HARD, self.levels))

    def score_gradients(self, change: fold.Level) -> list[jax.Array]:
        """Returns the gradient with respect to the scores, by blocks of splits."""
        window = self.refs.window[...] if hasattr(self.refs, "window") else None
        slope = lambda z, right, left: self.route.slopes(z if window is None else z / window, (right, left))
        slopes = [
            tuple(zip(*map(slope, z, *factors), strict=True))
            for z, factors in zip(self.levels, self.factors, strict=True)
        ]
        levels = fold.score_gradients(self.layout, slopes, change)  # type: ignore[arg-type]
        if self.above is not None:
            z = self.above[0]
            path_slopes = slope(z, *self.route.factors(z))
            levels = [(fold.path_gradient(self.layout, path_slopes, fold.total(change), self.t),), *levels]
        blocks = [a for level in levels for a in level]
        return [jnp.concatenate(blocks)] if self.layout.joined and len(blocks) > 1 else blocks


class _LeafLosses(NamedTuple):
    """Leaf weights that sum to 1, leaf losses, and the gradient with respect to relative changes of the weights."""

    weight: fold.Level
    losses: fold.Level
    change: fold.Level


def _leaf_losses(routed: _Routed, loss: Loss, tile: Any) -> _LeafLosses:
    refs, route = routed.refs, routed.route
    y, share, total, mean = (_column(refs, tile, name) for name in ("y", "share", "total", "mean"))
    weight = routed.weight
    if not route.normalised:
        total = fold.total(weight) if total is None else jnp.maximum(total, 1)
        weight = fold.map_arrays(lambda a: a / total, weight)
    row_losses = fold.map_arrays(lambda v: losses(loss, v, y, share), routed.values)
    if not route.centred:
        return _LeafLosses(weight, row_losses, fold.map_arrays(jnp.multiply, weight, row_losses))
    mean = fold.total(fold.map_arrays(jnp.multiply, weight, row_losses)) if mean is None else mean
    return _LeafLosses(weight, row_losses, fold.map_arrays(lambda w, a: w * (a - mean), weight, row_losses))


def gradient(
    route: Route,
    config: Config,
    tree: Tree,
    y: jax.Array,
    *,
    loss: Loss = "linear",
    numbered: bool = False,
    samples: bool = False,
    **columns: jax.Array,
) -> dict[str, jax.Array]:
    """Returns the loss ``sum_i sum_l P_il loss_l(i)`` and its gradients, in one visit of the samples.

    The ``"linear"`` loss is ``leaves_l . y_i``, and the ``"squared"`` one is ``share_i |leaves_l - y_i|^2``. y holds
    targets, or cotangents of the losses, ``(n, k)``. The columns are ``share (n, 1)``, and ``window (1, 1)``, the unit
    of scores for slopes. The result has ``loss ()``, ``weights (nodes, p)``, ``bias (nodes,)`` and ``leaves (leaves,
    k)``; if ``numbered`` also the leaf that each sample reaches, ``leaf (n,)``; if ``samples`` only ``x (n, p)``.
    """
    from pallas_kernels.launch import SHELLS, Operand, launch, result

    layout = config.layout(tree.sizes)
    columns |= {"y": y}
    if layout.path and (route.centred or not route.normalised):  # sums over all subtrees need a separate visit
        targets = {name: columns[name] for name in ("y", "share") if name in columns}
        mean, total = value(route, config, tree, loss=loss, **targets)
        columns |= {"mean": mean, "total": total}
    ins, shell = _operands(layout, tree, columns), SHELLS[config.backend]
    if samples:
        outs = {"d_x": result("samples", jnp.float32, layout.n, layout.p)}
        body = partial(_samples_of_a_tile, layout, route, shell)
        return {"x": launch("routing_samples", body, config, layout, ins, outs, sums=False)["d_x"]}
    part = lambda *shape: result("sums", jnp.float32, layout.programs, layout.subtrees, *shape)
    outs = {"weights": part(layout.rows, layout.columns), "bias": part(layout.rows, 1)}
    outs |= {"leaves": part(layout.leaves, layout.outputs), "loss": part(1, 1)}
    summed, visit = list(outs), partial(_sums_of_a_tile, layout, route, loss, shell)
    if numbered:
        ins["numbers"] = Operand("tree", layout.cut_leaves(jnp.arange(2.0**layout.depth, dtype=jnp.float32)[:, None]))
        room = layout.programs * layout.steps * layout.tile
        outs["leaf"] = result("columns", jnp.int32, 1, room)
    body = lambda refs: shell.sum_over_tiles(layout, refs, summed, partial(visit, refs))
    results = launch("routing_gradient", body, config, layout, ins, outs, sums=True)
    sums = {name: results[name].sum(0) for name in summed}
    joined = {
        "weights": layout.join(sums["weights"])[:, : layout.p],
        "bias": layout.join(sums["bias"])[:, 0],
        "leaves": layout.join_leaves(sums["leaves"]),
        "loss": sums["loss"].sum(),
    }
    return joined | ({"leaf": results["leaf"][0, : layout.n]} if numbered else {})


def _sums_of_a_tile(
    layout: Layout, route: Route, loss: Loss, shell: ModuleType, refs: SimpleNamespace, tile: Any, t: Any
) -> dict[str, list[jax.Array]]:
    """Returns the sums of a tile for a subtree, in the arrays of ``layout.places``."""
    xs = tile.features()
    routed = _Routed(layout, route, shell, refs, xs, t, place=0)  # a program sees the operands of its subtree
    leaf_losses = _leaf_losses(routed, loss, tile)
    d_z = routed.score_gradients(leaf_losses.change)
    takes = leaf_losses.weight  # the share of each sample in the gradient of each leaf
    if route.hard_leaves or hasattr(refs, "leaf"):
        reached = routed.reached()
        takes = reached if route.hard_leaves else takes
        if hasattr(refs, "leaf"):
            number = fold.total(fold.map_arrays(jnp.multiply, reached, routed.of_leaves("numbers")))
            tile.write("leaf", number.astype(jnp.int32), fold.total(reached) > 0)
    y, share = (_column(refs, tile, name) for name in ("y", "share"))
    total = fold.total(fold.map_arrays(jnp.multiply, leaf_losses.weight, leaf_losses.losses))
    return {
        "weights": [product(d, x, (1, layout.sample_axis)) for d in d_z for x in xs],
        "bias": [d.sum(1, keepdims=True) for d in d_z],
        "leaves": [pull(loss, v, y, share, w) for v, w in zip(routed.values, takes, strict=True)],
        "loss": [total.sum(1, keepdims=True)],
    }


def _samples_of_a_tile(layout: Layout, route: Route, shell: ModuleType, refs: SimpleNamespace) -> None:
    from jax.experimental import pallas as pl

    tile = shell.Tile(layout, refs, pl.program_id(0))
    xs, blocks = tile.features(), layout.blocks_of_features

    def visit(t: Any, sums: list[jax.Array]) -> list[jax.Array]:
        routed = _Routed(layout, route, shell, refs, xs, t, place=t)
        gradients = routed.score_gradients(_leaf_losses(routed, "linear", tile).change)
        d_z = list(zip(layout.blocks_of_splits, gradients, strict=True))
        block_sum = lambda f: sum(product(d, shell.weights(refs.w, t, rows, f), (0, 0)) for rows, d in d_z)
        return [total + block_sum(f) for total, f in zip(sums, blocks, strict=True)]

    zeros = [jnp.zeros((layout.tile, f.stop - f.start), jnp.float32) for f in blocks]
    tile.write_features("d_x", _over_subtrees(layout, visit, zeros))
