"""Mosaic for TPUs: processes one tile of samples after another in fast memory, and loads the next tile meanwhile.

Fast memory holds the splits of the whole tree. It also holds the sums of a gradient, in the block of their result.
"""

from types import SimpleNamespace
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from pallas_kernels.config import device_kind
from pallas_kernels.layout import Layout
from pallas_kernels.unsupported import Unsupported

# Maximum fast memory of a kernel, on new and on older chips. A core has 64 MB on v5p and v7x, 128 MB on v5e and v6e,
# and 16 MB on older chips. The compiler may take up to twice the memory that is counted here.
_FAST, _FAST_BEFORE = 56 * 2**20, 14 * 2**20
_BEFORE = ("TPU v2", "TPU v3", "TPU v4")
_DEFAULT, _MOST = 16 * 2**20, 60 * 2**20  # default memory of a kernel, and maximum request


def check(kernel: str, layout: Layout) -> None:
    """Raises :class:`Unsupported` for sizes that Mosaic or fast memory cannot take. The message names the sizes."""
    if layout.tile % 128 or layout.block % 8:
        got = f"got tile={layout.tile}, block={layout.block}"
        raise Unsupported(f"implementation 'mosaic_tpu' of {kernel} needs tiles of 128 and blocks of 8 rows, {got}")
    limit = _FAST_BEFORE if device_kind() in _BEFORE else _FAST
    if (memory := _bytes(layout)) > limit:
        sizes = f"p = {layout.p}, depth = {layout.depth}, k = {layout.k}"
        raise Unsupported(
            f"implementation 'mosaic_tpu' of {kernel} needs {memory >> 20} MB of fast memory for {sizes}, "
            f"it may take {limit >> 20} MB"
        )


def _bytes(layout: Layout) -> int:
    """Returns the fast memory of a gradient: splits, their sums, products, samples twice, and intermediate arrays."""
    lanes = lambda m: -(-m // 128) * 128
    splits = 2 * layout.rows * (lanes(layout.p) + 128)
    leaves = 4 * layout.leaves * lanes(layout.outputs)
    samples = layout.tile * (3 * lanes(layout.p) + 2 * layout.outputs)
    product = (layout.rows + layout.tile) * min(layout.features, lanes(layout.p))
    return 4 * (splits + leaves + samples + product + 12 * layout.rows * layout.tile)


def grid(layout: Layout, *, sums: bool) -> tuple[int, ...]:
    """Returns the number of tiles, or the number of programs and the number of tiles of each program."""
    return (layout.programs, layout.steps) if sums else (layout.tiles,)


def block(layout: Layout, kind: str, shape: tuple[int, ...], *, sums: bool, is_result: bool) -> pl.BlockSpec:
    """Returns the part of an operand or a result that a program sees."""

    def tile(*ids: Any) -> Any:
        index = ids[0] * layout.steps + ids[1] if sums else ids[0]
        # The last program may visit tiles beyond the end. Operands are masked there. Results have space for the tiles.
        return index if is_result or not sums else jnp.minimum(index, layout.tiles - 1)

    if kind == "samples":
        return pl.BlockSpec((layout.tile, shape[1]), lambda *ids: (tile(*ids), 0))
    if kind == "columns":
        return pl.BlockSpec((shape[0], layout.tile), lambda *ids: (0, tile(*ids)))
    if kind == "sums":
        return pl.BlockSpec((1, *shape[1:]), lambda i, _: (i, 0, 0, 0))
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape), pipeline_mode=pl.Buffered(1))


def parameters(config: Any, layout: Layout, *, sums: bool) -> Any:
    """Returns compiler parameters. Programs are independent. The tiles of a program are sequential."""
    semantics = ("parallel", "arbitrary") if sums else ("parallel",)
    limit = max(_DEFAULT, min(2 * _bytes(layout), _MOST))
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=limit)


class Tile:
    """A tile of samples. Samples beyond the end are zeros."""

    def __init__(self, layout: Layout, refs: SimpleNamespace, index: Any) -> None:
        self._layout, self._refs, self._left = layout, refs, layout.n - index * layout.tile

    def features(self) -> list[Any]:
        """Returns the samples in blocks of features, ``(tile, features)``; ``(features, tile)`` if transposed."""
        if self._layout.transposed:
            x = self.column("x")
            return [x[f] for f in self._layout.blocks_of_features]
        inside = jax.lax.broadcasted_iota(jnp.int32, (self._layout.tile, 1), 0) < self._left
        return [jnp.where(inside, self._refs.x[:, f], 0) for f in self._layout.blocks_of_features]

    def column(self, name: str) -> jax.Array:
        """Returns an operand, ``(rows, tile)``."""
        inside = jax.lax.broadcasted_iota(jnp.int32, (1, self._layout.tile), 1) < self._left
        return jnp.where(inside, getattr(self._refs, name)[...], 0)

    def write(self, name: str, value: jax.Array, _: Any = None) -> None:
        """Writes a result of the tile."""
        getattr(self._refs, name)[...] = value

    def write_features(self, name: str, blocks: list[jax.Array]) -> None:
        """Writes a result ``(tile, features)``, given in blocks."""
        for f, value in zip(self._layout.blocks_of_features, blocks, strict=True):
            getattr(self._refs, name)[:, f] = value


def weights(ref: Any, *index: Any) -> Any:
    return ref[index]


def sum_over_tiles(layout: Layout, refs: SimpleNamespace, names: list[str], visit: Any) -> None:
    """Adds the sums of ``visit(tile, subtree)`` to the results with these names. Sums are blocks by name."""
    i, j = pl.program_id(0), pl.program_id(1)

    @pl.when(j == 0)
    def _() -> None:
        for name in names:
            ref = getattr(refs, name)
            ref[...] = jnp.zeros(ref.shape, ref.dtype)

    for name, parts in visit(Tile(layout, refs, i * layout.steps + j), 0).items():
        for place, part in zip(layout.places(name), parts, strict=True):
            getattr(refs, name)[0, 0, *place] += part
