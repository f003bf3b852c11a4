"""Backends and their block sizes."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from pallas_kernels.layout import Layout

DEEPEST = 10
# A TPU pads the last axis of an array to 128 numbers, and the axis before it to 8. So a kernel reads samples of at most
# this many features as (p, n), which is also the compiler's layout of such samples.
NARROW = 64
_PLATFORMS = {"mosaic_tpu": "tpu", "triton": "cuda"}


class Sizes(NamedTuple):
    """Number of samples, number of features, depth of the tree, and number of outputs."""

    n: int
    p: int
    depth: int
    k: int


@dataclass(frozen=True)
class Config:
    """A backend and its block sizes.

    Attributes:
      backend: ``"mosaic_tpu"`` or ``"triton"``.
      tile: maximum number of samples processed together. A power of two, and on a TPU a multiple of 128.
      block: minimum number of rows of a product: 8 on a TPU, 16 for Triton. A power of two.
      features: number of features of one product. A power of two for Triton.
      subtree: maximum depth of the subtrees, for Triton. On a TPU the whole tree is one subtree.
      steps: maximum number of tiles that one program of a gradient visits. More steps mean fewer programs and fewer
        partial sums.
      programs: minimum number of programs of a gradient for each subtree before a program visits two tiles.
      elements: maximum of ``leaves x tile``. A tile of 128 samples may exceed it.
      warps: number of warps of a Triton program.
      stages: number of pipeline stages of a Triton program.
      interpret: whether the kernel is interpreted, on any platform, or parameters of the TPU interpreter.
    """

    backend: str
    tile: int
    block: int
    features: int
    subtree: int = DEEPEST
    steps: int = 2**20
    programs: int = 2
    elements: int = 2**17
    warps: int = 4
    stages: int = 1
    interpret: Any = False

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for an invalid size. The message names the size, the expectation and the value."""
        if self.backend not in _PLATFORMS:
            raise ValueError(f"backend must be 'mosaic_tpu' or 'triton', got {self.backend!r:.80}")
        for name in ("tile", "block", "features", "subtree", "steps", "programs", "elements", "warps", "stages"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r:.80}")
        for name in ("tile", "block", *(("features",) if self.backend == "triton" else ())):
            if getattr(self, name) & (getattr(self, name) - 1):
                raise ValueError(f"{name} must be a power of two, got {getattr(self, name)}")
        try:
            hash(self.interpret)
        except TypeError:
            raise ValueError(f"interpret must be True, False or parameters, got {self.interpret!r:.80}") from None

    @property
    def platform(self) -> str:
        """Name of the backend's platform in JAX."""
        return _PLATFORMS[self.backend]

    def layout(self, sizes: Sizes) -> Layout:
        """Returns the layout of a call with these sizes."""
        n, p, depth, k = sizes
        padded = self.backend == "triton"  # sizes of Triton's arrays are powers of two
        below = min(depth, self.subtree) if padded else depth
        if depth - below > self.block:  # one block holds the ancestors of a subtree
            raise ValueError(f"subtree must be at least {depth - self.block} for depth {depth}, got {self.subtree}")
        leaves = max(self.block, 2**below)
        tile = min(self.tile, max(min(128, self.tile), _power(self.elements // leaves + 1) // 2))
        tiles = -(-n // tile)
        features = min(self.features, max(2 * self.block, _power(p))) if padded else self.features
        return Layout(
            depth=depth,
            path=depth - below,
            n=n,
            p=p,
            k=k,
            block=self.block,
            tile=tile,
            steps=max(1, min(self.steps, tiles // self.programs)),
            features=features,
            columns=-(-p // features) * features if padded else p,
            outputs=1 if k == 1 else max(self.block, _power(k)),
            joined=not padded,
            transposed=not padded and p <= NARROW,
        )


# These sizes are estimates, not measurements. On a TPU, the scores and the leaf weights of a tile take up to half a
# megabyte each. A product of 512 features takes a few megabytes. Triton holds everything in the registers of 8 warps.
# Subtrees of depth 5 and tiles of 64 samples fit into the registers without spills.
HEURISTIC = {
    "mosaic_tpu": Config("mosaic_tpu", tile=512, block=8, features=512),
    "triton": Config("triton", tile=64, block=16, features=64, subtree=5, steps=128, programs=64, warps=8),
    "interpret": Config("mosaic_tpu", tile=128, block=8, features=512, interpret=True),
}


def device_kind() -> str:
    """Returns the kind of the devices of the mesh in context, or of the local devices.

    The devices of a mesh may belong to another machine.
    """
    abstract_device = jax.sharding.get_abstract_mesh().abstract_device
    return (abstract_device or jax.devices()[0]).device_kind


def _power(value: int) -> int:
    return 1 << (value - 1).bit_length()
