"""How programs are compiled: quickly where compilation takes longer than the run."""

from collections.abc import Callable, Iterable
import contextlib
import functools
import itertools
import os
from typing import Any, TypeVar

import jax
import numpy as np

from jtrees import caching

# Optimisation levels on a CPU. Level 1 with XLA's older emitters, where they exist, compiles in two thirds of the
# default time, and its code runs equally fast. Level 0 compiles in a third to a half of the default time, but its code
# can take eight times as long. For arguments of at most this many numbers, the difference is some milliseconds.
SMALL_SIZE = 2**16
_LEVEL = "xla_backend_optimization_level"
# XLA divides the sums of this library among its threads, so rounding errors depend on the number of processors. It does
# not divide products of matrices. Sums in order took GET of depth 8 1.4 times the time, and compilation 1.1 to 1.4
# times. So these options are only for functions that ask for them.
_SUMS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_DOT"}
# Number of programs kept between fits, of about 4 MB each. A fit of new shapes or options compiles three to nine.
KEPT_PROGRAMS = 128
_OURS: list[list[Any]] = []  # the functions that are compiled here, which hold their programs
_AHEAD: set[Any] = set()  # the programs that ``compiled`` returned; the functions hold them, but do not count them


def _options(level: int, often: bool) -> dict[str, Any]:
    """Returns XLA's options for this level of optimisation."""
    # XLA refuses unknown options, and later versions may have no older emitters.
    if often:
        return {} if _LEVEL in os.environ.get("XLA_FLAGS", "") else {_LEVEL: level}
    older_emitters = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 12) else {}
    return {_LEVEL: level} | older_emitters


_Function = TypeVar("_Function", bound=Callable[..., Any])


def sums_in_order(fn: _Function) -> _Function:
    """Decorator of a function of a run whose sums must not depend on the number of processors."""
    # It is for functions whose results decide much by little, such as rounds of boosting.
    fn.sums_in_order = True  # type: ignore[attr-defined]
    return fn


@functools.cache
def _options_of_sums() -> dict[str, Any]:
    """Returns XLA's options for sums whose order does not depend on the number of threads, if XLA knows them."""
    try:
        jax.jit(lambda: 0, compiler_options=_SUMS).lower().compile()
    except jax.errors.JaxRuntimeError:
        return {}
    return _SUMS


def default_settings() -> contextlib.ExitStack:
    """Context in which the library computes as by default, whatever the user has set for programs of his own."""
    # Programs of the library combine arrays of different ranks, as the node axis comes first. They take arrays of
    # NumPy, and infinite losses are numbers. An error that NumPy would raise looks like a search that diverges. A
    # thread needs a context of its own.
    stack, config = contextlib.ExitStack(), jax.config
    if config.jax_numpy_rank_promotion != "allow":
        stack.enter_context(jax.numpy_rank_promotion("allow"))
    if config.jax_debug_infs:
        stack.enter_context(jax.debug_infs(False))
    if {config.jax_transfer_guard_host_to_device, config.jax_transfer_guard_device_to_host} - {None, "allow"}:
        stack.enter_context(jax.transfer_guard("allow"))
    defaults: dict[str, Any] = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
    if raised := {kind: defaults[kind] for kind, action in np.geterr().items() if action in ("raise", "call")}:
        stack.enter_context(np.errstate(**raised))
    return stack


def jit(
    *, often: bool, has_order: Callable[[Any], bool] = lambda static: False, **options: Any
) -> Callable[[Callable[..., Any]], Any]:
    """Returns a decorator: ``jax.jit`` with these options, for a function that is called outside of tracing.

    The decorated function has ``compiled(*args)``, which returns the compiled program for such arguments, without the
    static argument, which is the first. It also has ``programs()``, the number of programs compiled so far.

    Args:
      often: whether a fit calls the function many times. On a CPU, the program is then compiled at level 1, which takes
        two thirds of the default time. Its code runs equally fast. A level in ``XLA_FLAGS`` takes precedence. If not,
        the program is compiled with little optimisation, and with less for smaller arguments. Results differ by
        rounding errors.
      has_order: says, for the first argument, whether sums must not depend on the number of processors.
      **options: options of ``jax.jit``.
    """

    def compiled(fn: Callable[..., Any]) -> Any:
        functions = [as_usual := jax.jit(fn, **options)]
        _OURS.append(functions)

        @functools.cache
        def on_cpu(level: int, in_order: bool) -> Any:  # XLA is asked for its options only here
            xla_options = _options(level, often) | (_options_of_sums() if in_order else {})
            functions.append(function := jax.jit(fn, compiler_options=xla_options, **options))
            return function

        def program(args: tuple) -> Any:
            if jax.default_backend() != "cpu":
                return as_usual
            is_small = not often and sum(np.size(a) for a in jax.tree.leaves(args)) <= SMALL_SIZE
            return on_cpu(0 if is_small else 1, has_order(args[0]))

        @functools.wraps(fn)
        def call(*args: Any) -> Any:
            return program(args)(*args)

        def compiled_program(*args: Any) -> Any:
            leaves, structure = jax.tree.flatten(args[1:])
            _AHEAD.add((fn, args[0], structure, tuple((np.shape(a), getattr(a, "dtype", None)) for a in leaves)))
            return program(args).lower(*args).compile()

        # If ``XLA_FLAGS`` has a level, the first function shares the programs of the second function.
        programs = lambda: _count(functions[1:] or functions)
        call.compiled, call.programs = compiled_program, programs  # type: ignore[attr-defined]
        return call

    return compiled


def bound_memory() -> None:
    """Drops all programs of this module's functions if there are more than 128. Called before a fit."""
    # Otherwise, fits of many different shapes would fill the memory. A dropped program is compiled again when needed.
    ours = [*itertools.chain(*_OURS)]
    if _count(ours) + len(_AHEAD) > KEPT_PROGRAMS:
        _AHEAD.clear()
        for function in ours:
            if hasattr(function, "clear_cache"):
                function.clear_cache()


def _count(functions: Iterable[Any]) -> int:
    return sum(function._cache_size() for function in functions if hasattr(function, "_cache_size"))


caching.keep_by_default()
