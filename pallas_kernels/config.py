"""Implementations, the sizes of their blocks, and which one runs a call.

``implementation`` is, everywhere, one of these:

- ``"xla"``: the plain definition.
- ``"mosaic_tpu"``, ``"triton"``, ``"interpret"`` or a :class:`Config`: a kernel, or the error :class:`Unsupported`.
- A sequence of these: the first one that the platform and the sizes allow.
- None: the kernel that a benchmark found faster on this kind of device (``winners.json``), else XLA.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax

from pallas_kernels.layout import Layout
from pallas_kernels.unsupported import Unsupported, refuse

IMPLEMENTATIONS = ("xla", "mosaic_tpu", "triton", "interpret")
DEEPEST = 10
_PLATFORMS = {"mosaic_tpu": "tpu", "triton": "cuda"}
_HELD = 2**19  # numbers of the samples that a program of a gradient reads at least, where that many are there: 2 MB


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
      tile: samples worked on at once, at most. A multiple of 128 on a TPU, a power of two for Triton.
      block: rows that a product works on at least: 8 on a TPU, 16 for Triton.
      features: features of one product.
      subtree: depth of the subtrees at most, 10 on a TPU.
      steps: tiles that one program of a gradient visits at most: more mean fewer partial sums, and fewer programs.
      programs: programs of a gradient for each subtree, before they visit more than one tile.
      elements: numbers ``leaves x tile`` at most, where a tile of 128 samples does not exceed them.
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

    @property
    def platform(self) -> str:
        """What JAX calls the platform that runs it."""
        return _PLATFORMS[self.backend]

    def layout(self, sizes: Sizes) -> Layout:
        """The sizes of a call."""
        n, p, depth, k = sizes
        padded = self.backend == "triton"  # whose arrays have powers of two as sizes
        below = min(depth, self.subtree)
        leaves = max(self.block, 2**below)
        tile = min(self.tile, max(min(128, self.tile), self.elements // leaves))
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


# These are reasons, not results. On a TPU the scores and the leaf weights of a tile take up to half a megabyte each,
# and a product of 512 features a few. Triton holds everything in the registers of 8 warps. There subtrees of depth 5
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


class Choice(NamedTuple):
    """How a call runs.

    Attributes:
      configs: kernels, of different platforms.
      plain: whether XLA runs everywhere else.
    """

    configs: tuple[Config, ...]
    plain: bool


XLA = Choice((), True)
Implementation = str | Config | Sequence[str | Config] | Choice | None


def choose(kernel: str, implementation: Implementation, sizes: Sizes, *, not_by: Sequence[str] = ()) -> Choice:
    """Decides how a call of these sizes runs.

    Args:
      kernel: its name.
      implementation: see :mod:`pallas_kernels.config`.
      sizes: of the call.
      not_by: backends that cannot run it at any size.

    Raises:
      ValueError: for an unknown implementation, or an empty sequence.
      Unsupported: where no implementation that was asked for can do it.
    """
    if isinstance(implementation, Choice):
        return implementation
    found = _measured(kernel)
    if implementation is None:
        won = found is not None and found.holds(sizes)
        return Choice((found.config,), True) if won else XLA  # type: ignore[union-attr]
    wanted = (implementation,) if isinstance(implementation, str | Config) else tuple(implementation)
    configs: dict[str, Config] = {}
    reasons = []
    for one in wanted:
        if isinstance(one, str) and one == "xla":
            return Choice(tuple(configs.values()), True)
        config = _config_of(one, found)
        try:
            if config.backend in not_by and not config.interpret:
                raise Unsupported(
                    f"implementation '{config.backend}' does not run this {kernel}, 'xla' runs everywhere"
                )
            _check(kernel, config, config.layout(sizes))
        except Unsupported as error:
            reasons.append(str(error))
            continue
        configs.setdefault("anywhere" if config.interpret else config.platform, config)
        if config.interpret:
            break
    if not wanted:
        raise ValueError("implementation must name at least one, got an empty sequence")
    if not configs:
        raise Unsupported(reasons[0])
    return Choice(tuple(configs.values()), False)


def run(choice: Choice, fused: Callable[..., Any], plain: Callable[..., Any], *arrays: Any) -> Any:
    """Calls ``fused(config, *arrays)`` or ``plain(*arrays)``, by the platform that the call is lowered for."""
    by_platform = {one.platform: partial(fused, one) for one in choice.configs if not one.interpret}
    anywhere = next((partial(fused, one) for one in choice.configs if one.interpret), plain if choice.plain else None)
    if not by_platform:
        return anywhere(*arrays)  # type: ignore[misc]
    default = anywhere or partial(refuse, tuple(by_platform), next(iter(by_platform.values())))
    return jax.lax.platform_dependent(*arrays, default=default, **by_platform)


def differentiable(choice: Choice, fused: Callable[..., Any], plain: Callable[..., Any], *arrays: Any) -> Any:
    """:func:`run`, for one floating-point result that is differentiated by reverse mode.

    Each branch is differentiated by itself: residuals of a branch that is not taken would be kept as zeros.
    """
    if len(choice.configs) + choice.plain == 1:
        return run(choice, fused, plain, *arrays)
    call = jax.custom_vjp(lambda *arrays: run(choice, fused, plain, *arrays))

    def pull_back(fn: Callable[..., Any], cotangent: jax.Array, *arrays: jax.Array) -> Any:
        return jax.vjp(fn, *arrays)[1](cotangent)

    def backward(arrays: Any, cotangent: jax.Array) -> Any:
        of_fused = lambda config, *operands: pull_back(partial(fused, config), *operands)
        return run(choice, of_fused, partial(pull_back, plain), cotangent, *arrays)

    call.defvjp(lambda *arrays: (call(*arrays), arrays), backward)
    return call(*arrays)


def _config_of(implementation: Any, found: Winner | None) -> Config:
    if isinstance(implementation, Config):
        return implementation
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be one of {_names()}, a sequence of them, or None, got {implementation!r:.80}"
        )
    if found is not None and found.config.backend == implementation:
        return found.config
    return HEURISTIC[implementation]


def _check(kernel: str, config: Config, layout: Layout) -> None:
    if config.interpret:  # in any memory
        return
    from pallas_kernels.launch import shell_of  # imports Pallas: a tenth of a second, so with the first kernel

    shell_of(config).check(kernel, layout)


def _measured(kernel: str) -> Winner | None:
    return found.get((device_kind(), kernel)) if (found := winners()) else None


def device_kind() -> str:
    """The kind of the devices of the mesh in context, which may be those of another machine; else of the one here."""
    of_mesh = jax.sharding.get_abstract_mesh().abstract_device
    return (of_mesh or jax.devices()[0]).device_kind


def _names() -> str:
    return ", ".join(map(repr, IMPLEMENTATIONS))


def _power(value: int) -> int:
    return 1 << (value - 1).bit_length()
