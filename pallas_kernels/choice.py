"""Chooses the implementation that runs a call.

``implementation`` always has one of these values:

- ``"xla"``: the plain definition.
- ``"mosaic_tpu"``, ``"triton"``, ``"interpret"`` or a :class:`pallas_kernels.Config`: a kernel. If the kernel cannot
  run the call, :class:`Unsupported` is raised.
- A tuple or list of such values: the first implementation that the platform and the sizes allow.
- None: what is faster on this kind of device, as ``default.py`` decides. On a CPU it is XLA.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from pallas_kernels.config import HEURISTIC, Config, Sizes
from pallas_kernels.default import default
from pallas_kernels.timing import Program
from pallas_kernels.unsupported import Unsupported, refuse

IMPLEMENTATIONS = ("xla", "mosaic_tpu", "triton", "interpret")


class Choice(NamedTuple):
    """The implementations that run a call.

    Attributes:
      configs: kernels for different platforms.
      plain: whether XLA runs on all other platforms.
    """

    configs: tuple[Config, ...]
    plain: bool


XLA = Choice((), True)
Implementation = str | Config | Sequence[str | Config] | Choice | None


def named(implementation: Any, name: str = "implementation") -> tuple[str | Config, ...] | None:
    """Returns the requested implementations in their order; None for the fastest implementation.

    Raises ``ValueError`` for an unknown implementation or an empty sequence.
    """
    if implementation is None:
        return None
    several = tuple(implementation) if isinstance(implementation, tuple | list) else (implementation,)
    if not several:
        raise ValueError(f"{name} must name at least one implementation, got an empty sequence")
    for entry in several:
        if not isinstance(entry, Config) and not (isinstance(entry, str) and entry in IMPLEMENTATIONS):
            names = ", ".join(map(repr, IMPLEMENTATIONS))
            raise ValueError(
                f"{name} must be one of {names}, a Config, a tuple of these, or None, got {_shown(entry):.80}"
            )
    return several


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # Python does not print integers of thousands of digits
        return type(value).__name__


def choose(program: Program, implementation: Implementation, sizes: Sizes, *, not_by: Sequence[str] = ()) -> Choice:
    """Chooses the implementations that run a call of the given sizes; ``not_by``: backends that can run it at no size.

    By default, a timing of the program may choose.

    Raises ``ValueError`` for an unknown implementation or an empty sequence, and :class:`Unsupported` if no requested
    implementation can run the call.
    """
    if isinstance(implementation, Choice):
        return implementation
    kernel, choices = program.kernel, named(implementation)
    if choices is None:
        fastest = default(program, sizes, lambda config: _check(kernel, config, sizes, not_by), not_by)
        return XLA if fastest is None else Choice((fastest,), True)
    configs: dict[str, Config] = {}
    reasons = []
    for entry in choices:
        if entry == "xla":
            return Choice(tuple(configs.values()), True)
        config = entry if isinstance(entry, Config) else HEURISTIC[entry]
        try:
            _check(kernel, config, sizes, not_by)
        except Unsupported as error:
            reasons.append(error)
            continue
        configs.setdefault("anywhere" if config.interpret else config.platform, config)
        if config.interpret:
            break
    if not configs:
        raise reasons[0]
    return Choice(tuple(configs.values()), False)


def run(choice: Choice, fused: Callable[..., Any], plain: Callable[..., Any], *arrays: Any) -> Any:
    """Calls ``fused(config, *arrays)`` or ``plain(*arrays)``, depending on the platform of the lowering."""
    branches = {config.platform: partial(fused, config) for config in choice.configs if not config.interpret}
    interpreted = (partial(fused, config) for config in choice.configs if config.interpret)
    anywhere = next(interpreted, plain if choice.plain else None)
    if not branches:
        return anywhere(*arrays)  # type: ignore[misc]
    default = anywhere or partial(refuse, tuple(branches), next(iter(branches.values())))
    return jax.lax.platform_dependent(*arrays, default=default, **branches)


def differentiable(choice: Choice, fused: Callable[..., Any], plain: Callable[..., Any], *arrays: Any) -> Any:
    """Calls :func:`run` for a single floating-point result, with reverse-mode differentiation.

    Each branch is differentiated separately. Otherwise, the residuals of a branch that is not taken would be kept as
    zeros. An unused gradient would be zeros on a platform that refuses the call.
    """
    if all(config.interpret for config in choice.configs):
        return run(choice, fused, plain, *arrays)
    call = jax.custom_vjp(lambda *arrays: run(choice, fused, plain, *arrays))

    def pull_back(fn: Callable[..., Any], cotangent: jax.Array, *arrays: jax.Array) -> Any:
        return jax.vjp(fn, *arrays)[1](cotangent)

    def backward(arrays: Any, cotangent: jax.Array) -> Any:
        pull_back_fused = lambda config, *operands: pull_back(partial(fused, config), *operands)
        return run(choice, pull_back_fused, partial(pull_back, plain), cotangent, *arrays)

    call.defvjp(lambda *arrays: (call(*arrays), arrays), backward)
    return call(*arrays)


def _check(kernel: str, config: Config, sizes: Sizes, not_by: Sequence[str]) -> None:
    if config.interpret:  # the interpreter has no memory limit
        return
    if config.backend in not_by:
        raise Unsupported(f"implementation '{config.backend}' does not run this {kernel}, 'xla' runs everywhere")
    from pallas_kernels.launch import SHELLS  # local, because Pallas takes a tenth of a second to import

    SHELLS[config.backend].check(kernel, config.layout(sizes))
