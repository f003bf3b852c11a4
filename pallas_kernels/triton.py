"""Triton for CUDA GPUs through Pallas. JAX 0.11 deprecates it: each lowering gives a DeprecationWarning.

All data of a tile and a subtree are in registers, in blocks of 16 rows. Reads and writes are masked, because blocks
beyond the end of an array are not cut. The matrix units do not multiply float32 numbers, so their parts are multiplied.
"""

from types import SimpleNamespace
from typing import Any

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels.layout import Layout
from pallas_kernels.products import parts
from pallas_kernels.unsupported import Unsupported

# Maximum number of features for one output and for several outputs, and maximum number of outputs. Up to these numbers
# nothing spills from the registers of sm_90a (experiments/accelerators.py).
_FEATURES, _WITH_OUTPUTS, _OUTPUTS = 64, 32, 16


def check(kernel: str, layout: Layout) -> None:
    """Raises :class:`Unsupported` for sizes that Triton or its registers cannot take, or without Pallas-Triton."""
    _triton()
    if layout.block < 16:
        raise Unsupported(f"implementation 'triton' of {kernel} needs blocks of 16 rows, got block={layout.block}")
    if layout.p > (_FEATURES if layout.k == 1 else _WITH_OUTPUTS) or layout.k > _OUTPUTS:
        raise Unsupported(
            f"implementation 'triton' of {kernel} takes up to {_FEATURES} features and one output, or {_WITH_OUTPUTS} "
            f"features and {_OUTPUTS} outputs (leaf numbers count as an output), got p = {layout.p}, k = {layout.k}"
        )


def _triton() -> Any:
    try:
        from jax.experimental.pallas import triton
    except ImportError as error:
        raise Unsupported("implementation 'triton': this jax has no Pallas-Triton, 'xla' runs everywhere") from error
    return triton


def grid(layout: Layout, *, sums: bool) -> tuple[int, ...]:
    """Returns the number of tiles, or the number of programs for each subtree and the number of subtrees."""
    return (layout.programs, layout.subtrees) if sums else (layout.tiles,)


def block(layout: Layout, kind: str, shape: tuple[int, ...], *, sums: bool, is_result: bool) -> pl.BlockSpec:
    """Returns the part of an operand or a result that a program sees: all samples, and the program's subtree."""
    if kind == "sums":
        return pl.BlockSpec((1, 1, *shape[2:]), lambda i, t: (i, t, 0, 0))
    if kind == "tree" and sums:
        return pl.BlockSpec((1, *shape[1:]), lambda i, t: (t, 0, 0))
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


def parameters(config: Any, layout: Layout, *, sums: bool) -> Any:
    return _triton().CompilerParams(num_warps=config.warps, num_stages=config.stages)


class Tile:
    """A tile of samples, with the methods of ``mosaic_tpu.Tile``."""

    def __init__(self, layout: Layout, refs: SimpleNamespace, index: Any) -> None:
        self._layout, self._refs, self._start = layout, refs, index * layout.tile

    def features(self) -> list[Any]:
        """Returns the parts of the samples in blocks of features, ``(tile, features)``."""
        return [
            parts(_triton().load(self._refs.x.at[self._features(f)], mask=self._mask(f), other=0.0))
            for f in self._layout.blocks_of_features
        ]

    def column(self, name: str) -> jax.Array:
        rows = getattr(self._refs, name).shape[0]
        return _triton().load(self._columns(name, rows), mask=self._inside(rows), other=0.0)

    def write(self, name: str, value: jax.Array, where: Any = True) -> None:
        """Writes a result of the tile for the samples that ``where`` selects."""
        rows = value.shape[0]
        _triton().store(self._columns(name, rows), value, mask=self._inside(rows) & where)

    def write_features(self, name: str, blocks: list[jax.Array]) -> None:
        for f, value in zip(self._layout.blocks_of_features, blocks, strict=True):
            _triton().store(getattr(self._refs, name).at[self._features(f)], value, mask=self._mask(f))

    def _inside(self, rows: int) -> jax.Array:
        shape = (rows, self._layout.tile)
        return jax.lax.broadcasted_iota(jnp.int32, shape, 1) + self._start < self._layout.n

    # No start is static. A static index beyond the end would be refused, although it is masked.
    def _columns(self, name: str, rows: int) -> Any:
        return getattr(self._refs, name).at[pl.ds(self._start * 0, rows), pl.ds(self._start, self._layout.tile)]

    def _features(self, f: slice) -> tuple[Any, Any]:
        return pl.ds(self._start, self._layout.tile), pl.ds(self._start * 0 + f.start, f.stop - f.start)

    def _mask(self, f: slice) -> jax.Array:
        shape = (self._layout.tile, f.stop - f.start)
        sample = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + self._start < self._layout.n
        return sample & (jax.lax.broadcasted_iota(jnp.int32, shape, 1) + f.start < self._layout.p)


def weights(ref: Any, *index: Any) -> Any:
    """Returns the parts of a block of split weights."""
    return parts(ref[index])


def sum_over_tiles(layout: Layout, refs: SimpleNamespace, names: list[str], visit: Any) -> None:
    """Writes the sums of ``visit(tile, subtree)`` over the tiles of this program to the results with these names."""
    i, t = pl.program_id(0), pl.program_id(1)

    def zeros(name: str) -> list[jax.Array]:
        width = getattr(refs, name).shape[3]
        return [jnp.zeros((r.stop - r.start, len(range(width)[f])), jnp.float32) for r, f in layout.places(name)]

    add = lambda j, sums: jax.tree.map(jnp.add, sums, visit(Tile(layout, refs, i * layout.steps + j), t))
    for name, sums in jax.lax.fori_loop(0, layout.steps, add, {name: zeros(name) for name in names}).items():
        for place, part in zip(layout.places(name), sums, strict=True):
            getattr(refs, name)[0, 0, *place] = part
