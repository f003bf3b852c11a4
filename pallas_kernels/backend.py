"""Which implementations there are, how large their blocks are, and how a kernel is started on each.

All kernels are one body in the subset that every backend of Pallas has: products, elementwise work, sums, loops. What
differs, the compiler's parameters and the sizes, is here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.layout import Layout

IMPLEMENTATIONS = ("xla", "tpu", "triton", "interpret")
_HELD = 2**19  # numbers of the samples that a program of a gradient may hold: 2 MB
_PLATFORMS = {"tpu": "tpu", "triton": "cuda", "interpret": "cpu"}  # the interpreter: as far as it is chosen by itself


@dataclass(frozen=True)
class Config:
    """Sizes of blocks.

    Attributes:
      implementation: what they are for.
      tile: samples worked on at once; on a TPU a multiple of 128, for Triton a power of two.
      tiles: tiles that one program of a gradient visits at most: more are fewer partial sums, and fewer programs.
      subtree: depth of the subtrees at most.
      rows: what the rows of a product are padded to: 8 on a TPU, 16 for Triton.
      features: features of a product at once.
      warps: of a Triton program.
      stages: of its pipeline.
      programs: of a gradient for a subtree, before they visit more than one tile.
      split: whether a product of float32 numbers is six products of their bfloat16 parts: the matrix units of a GPU do
        not multiply float32 numbers. A TPU's compiler does this by itself.
    """

    implementation: str
    tile: int
    tiles: int
    subtree: int
    rows: int
    features: int
    warps: int = 4
    stages: int = 2
    programs: int = 256
    split: bool = False

    @property
    def platform(self) -> str:
        """What jax calls the platform that runs it."""
        return _PLATFORMS[self.implementation]

    def layout(self, x: jax.Array, leaves: jax.Array) -> Layout:
        """The sizes of a call."""
        depth, (n, p) = len(leaves).bit_length() - 1, x.shape
        tiles = min(self.tiles, n // (self.tile * self.programs), _HELD // (self.tile * max(p, self.rows)))
        sizes = self.tile, max(1, tiles), self.rows, self.features
        return Layout(depth, max(0, depth - self.subtree), n, p, leaves.shape[1], *sizes, self.split)


# For a TPU these are reasons, not results. It multiplies 128 x 128 at once, which are subtrees of depth 7; scores and
# leaf weights of a subtree and a tile of 512 samples then take about 2 MB of its fast memory. Triton holds everything
# in the registers of a few warps, where subtrees of depth 5 and tiles of 64 samples fit: of the sizes that
# experiments/bench_kernels.py tries on an H200, no other is faster for all kernels. Both want some ten thousand samples
# a program of a gradient, or the partial sums are as large as the data.
HEURISTIC = {
    "tpu": Config("tpu", tile=512, tiles=16, subtree=7, rows=8, features=1024, programs=2),
    "triton": Config("triton", tile=64, tiles=128, subtree=5, rows=16, features=128, stages=1, split=True),
    "interpret": Config("interpret", tile=128, tiles=1, subtree=4, rows=8, features=1024),
}


class Winner(NamedTuple):
    """Sizes that won on a kind of device, and how far that was measured.

    Attributes:
      config: the sizes.
      depth: for trees up to this depth,
      p: so many features at most,
      k: so many outputs at most,
      n: and so many samples at least.
    """

    config: Config
    depth: int
    p: int
    k: int
    n: int


# By device kind and kernel, as experiments/bench_kernels.py prints it. Where there is no entry XLA is the default.
# Depth 8 with p = 32 and depth 6 with p = 21 were measured: 1.44 and 1.07 times as fast as XLA
# (experiments/results/kernels/nvidia-h200.md). What that file marks with # did not win; soft_routing wins with a
# gradient, and loses by more without.
MEASURED: dict[str, dict[str, Winner]] = {
    "NVIDIA H200": {
        "expected_loss": Winner(
            Config("triton", tile=32, tiles=128, subtree=5, rows=16, features=128, warps=2, stages=1, split=True),
            depth=8,
            p=32,
            k=1,
            n=100_000,
        )
    }
}


def winner(kernel: str, *, depth: int, n: int, p: int, k: int) -> Config | None:
    """What won for a kernel at such a size, on the devices of the mesh in context, else on the one that jax works on;
    None where nothing was measured.
    """
    found = _measured(kernel)
    if found is None or depth > found.depth or p > found.p or k > found.k or n < found.n:
        return None
    return found.config


def _measured(kernel: str) -> Winner | None:
    if not MEASURED:
        return None
    of_mesh = jax.sharding.get_abstract_mesh().abstract_device  # may be a device of another machine
    return MEASURED.get((of_mesh or jax.devices()[0]).device_kind, {}).get(kernel)


def config_of(kernel: str, implementation: str | Config | None) -> Config | None:
    """Sizes for an implementation: those that won on the device here, else by the heuristic; None for XLA.

    Raises:
      ValueError: for an unknown implementation.
    """
    if implementation is None or isinstance(implementation, Config):
        return implementation
    if implementation not in IMPLEMENTATIONS:
        names = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(f"implementation must be one of {names}, or None, got {implementation!r:.80}")
    found = _measured(kernel)
    if found is not None and found.config.implementation == implementation:
        return found.config
    return HEURISTIC.get(implementation)


class In(NamedTuple):
    """An operand: its array, the shape of a program's block of it, and program ids -> which block."""

    array: Any
    block: tuple[int, ...]
    index: Callable[..., tuple[Any, ...]]


class Out(NamedTuple):
    """A result, likewise."""

    shape: tuple[int, ...]
    dtype: Any
    block: tuple[int, ...]
    index: Callable[..., tuple[Any, ...]]


def whole(array: Any) -> In:
    """An operand that every program sees whole."""
    return In(array, array.shape, lambda *_: (0,) * array.ndim)


def launch(
    name: str, body: Callable[[SimpleNamespace], None], config: Config, grid: tuple[int, ...], ins: dict, outs: dict
) -> dict[str, jax.Array]:
    """Runs ``body`` for every program of the grid, on references by the names of its operands and results.

    Raises:
      NotImplementedError: when it is lowered for a platform that cannot run it.
    """
    from jax.experimental import pallas as pl  # a tenth of a second, so with the first kernel

    from pallas_kernels.refusal import refused

    kernel = lambda *refs: body(SimpleNamespace(**dict(zip((*ins, *outs), refs, strict=True))))
    spec = lambda one: pl.BlockSpec(one.block, one.index)
    call = pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[spec(one) for one in ins.values()],
        out_specs=[spec(one) for one in outs.values()],
        out_shape=[jax.ShapeDtypeStruct(one.shape, one.dtype) for one in outs.values()],
        name=name,
        **_parameters(config, len(grid)),
    )

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        with jax.enable_x64(False):  # a loop that counts in 64 bits is not lowered for TPUs
            return tuple(call(*arrays))

    arrays = [one.array for one in ins.values()]
    if config.implementation == "interpret":
        found = run(*arrays)
    else:
        default = partial(refused, [(one.shape, one.dtype) for one in outs.values()], config.implementation)
        found = jax.lax.platform_dependent(*arrays, default=default, **{config.platform: run})
    return dict(zip(outs, found, strict=True))


def _parameters(config: Config, dimensions: int) -> dict[str, Any]:
    if config.implementation == "interpret":
        return {"interpret": True}
    if config.implementation == "tpu":
        from jax.experimental.pallas import tpu as pltpu

        # A leaf's number is written by the last dimension's programs in turn, the others are independent.
        semantics = ("parallel",) * (dimensions - 1) + ("arbitrary",)
        return {"compiler_params": pltpu.CompilerParams(dimension_semantics=semantics)}
    return {"compiler_params": triton().CompilerParams(num_warps=config.warps, num_stages=config.stages)}


def triton() -> Any:
    """Pallas's Triton, while jax has it: from 0.11 on each lowering gives a DeprecationWarning.

    Raises:
      NotImplementedError: if it is gone.
    """
    try:
        from jax.experimental.pallas import triton
    except ImportError as error:
        raise NotImplementedError("this jax has no Pallas-Triton: implementation='xla' runs everywhere") from error
    return triton


def store_where(config: Config, ref: Any, samples: Any, value: jax.Array, mask: jax.Array) -> None:
    """Writes a row where the mask is set, and leaves what other programs write.

    Programs of a TPU come one after the other, and what one has written the next one sees.
    """
    if config.implementation == "triton":
        triton().store(ref.at[:, samples], value, mask=mask)
    else:
        ref[:, samples] = jnp.where(mask, value, ref[:, samples])
