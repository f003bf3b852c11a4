"""Compilation of programs that run once in a fit, where making machine code takes longer than running it."""

from collections.abc import Callable
import functools
from typing import Any

import jax
import numpy as np

# Code for a CPU that is not optimised, from XLA's older emitters. Of the programs around the rounds of GET and
# LatentTree, 0.15 to 1.7 s of compilation became 0.1 to 0.5 s; they run up to ten times as long, in milliseconds.
# (XLA refuses a program with options that it does not know, which a later one may not.)
_QUICK = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 12):
    _QUICK["xla_cpu_use_fusion_emitters"] = False
_SMALL = 2**19  # numbers in the arguments, up to which slower code costs less than a tenth of a second


def once(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Returns a decorator: ``jax.jit`` with these options, for a function that a fit calls once, not while tracing.

    With small arguments on a CPU, the program is compiled quickly rather than well; results differ by rounding.
    """

    def compiled(fn: Callable[..., Any]) -> Any:
        well, quickly = jax.jit(fn, **options), jax.jit(fn, compiler_options=_QUICK, **options)

        @functools.wraps(fn)
        def call(*args: Any) -> Any:
            small = sum(np.size(a) for a in jax.tree.leaves(args)) <= _SMALL
            return (quickly if small and jax.default_backend() == "cpu" else well)(*args)

        return call

    return compiled
