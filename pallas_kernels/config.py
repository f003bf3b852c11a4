"""Backends and the sizes of their blocks: for a first try, and those that won a benchmark."""

from dataclasses import dataclass
from functools import cache
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax

from pallas_kernels.layout import Layout

DEEPEST = 10
_PLATFORMS = {"mosaic_tpu": "tpu", "triton": "cuda"}


class Sizes(NamedTuple):
    """Samples, features, depth of the tree, outputs."""

    n: int
    p: int
    depth: int
    k: int


@dataclass(frozen=True)
class Config:
    """A backend and its sizes of blocks.

    Attributes:
      backend: ``"mosaic_tpu"`` or ``"triton"``.
      tile: samples worked on at once, at most. A power of two; on a TPU a multiple of 128.
      block: rows that a product works on at least: 8 on a TPU, 16 for Triton. A power of two.
      features: features of one product. A power of two for Triton.
      subtree: depth of the subtrees at most, for Triton. On a TPU the whole tree is one.
      steps: tiles that one program of a gradient visits at most. More steps mean fewer programs and partial sums.
      programs: programs of a gradient for each subtree, before any visits two tiles.
      elements: numbers ``leaves x tile`` at most, unless 128 samples need more.
      warps: of a Triton program.
      stages: of its pipeline.
      interpret: whether it is interpreted, on any platform; or parameters of TPU's interpreter.
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
        """Checks the sizes.

        Raises:
          ValueError: naming the size, what was expected and what came.
        """
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
        """What JAX calls the platform that runs it."""
        return _PLATFORMS[self.backend]

    def layout(self, sizes: Sizes) -> Layout:
        """The sizes of a call."""
        n, p, depth, k = sizes
        padded = self.backend == "triton"  # whose arrays have powers of two as sizes
        below = min(depth, self.subtree) if padded else depth
        if depth - below > self.block:  # the ancestors of a subtree fill one block
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
        )


# These are reasons, not results. On a TPU the scores of a tile take up to half a megabyte, and so do the leaf weights.
# A product of 512 features takes a few. Triton holds everything in the registers of 8 warps. There subtrees of depth 5
# and tiles of 64 samples fit without spills.
HEURISTIC = {
    "mosaic_tpu": Config("mosaic_tpu", tile=512, block=8, features=512),
    "triton": Config("triton", tile=64, block=16, features=64, subtree=5, steps=128, programs=64, warps=8),
    "interpret": Config("mosaic_tpu", tile=128, block=8, features=512, interpret=True),
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

    def holds(self, sizes: Sizes) -> bool:
        """Whether a call is within what was measured."""
        n, p, depth, k = sizes
        return depth <= self.depth and p <= self.p and k <= self.k and n >= self.n


@cache
def winners() -> dict[tuple[str, str], Winner]:
    """What won, by the kind of the device and the kernel, as ``experiments/bench_kernels.py`` writes it."""
    found = json.loads(Path(__file__).with_name("winners.json").read_text())
    return {(one.pop("device"), one.pop("kernel")): Winner(Config(**one.pop("config")), **one) for one in found}


def measured(kernel: str) -> Winner | None:
    """What won for a kernel on the devices of the mesh in context, which may be those of another machine, or here."""
    return found.get((device_kind(), kernel)) if (found := winners()) else None


def device_kind() -> str:
    """The kind of these devices."""
    of_mesh = jax.sharding.get_abstract_mesh().abstract_device
    return (of_mesh or jax.devices()[0]).device_kind


def _power(value: int) -> int:
    return 1 << (value - 1).bit_length()
