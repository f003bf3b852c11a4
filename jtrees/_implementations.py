"""The choice between XLA and a fused kernel (:mod:`pallas_kernels`), as :mod:`jtrees.ops` describes it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jtrees import sharding, topology, validation
import pallas_kernels as kernels


def choose(kernel: str, implementation: str | None, able: bool, x: jax.Array, weights: jax.Array, *others: Any) -> Any:
    """How a kernel is to be run: None for XLA, a name for one that was asked for, a ``Config`` for one that won.

    Raises:
      ValueError: if one was asked for that cannot do this.
    """
    depth, k = topology.depth_of(weights.shape[0]), max([a.shape[1] for a in others if a.ndim == 2], default=1)
    arrays = [a for a in (x, weights, *others) if jnp.issubdtype(a.dtype, jnp.floating)]
    able = able and depth <= kernels.DEEPEST and 0 not in x.shape and x.dtype in (jnp.float32, jnp.bfloat16)
    if implementation is None:
        # bfloat16 samples would meet weights in bfloat16, which is for the caller to decide.
        alike = able and all(a.dtype == jnp.float32 for a in arrays)
        return kernels.winner(kernel, depth=depth, n=x.shape[0], p=x.shape[1], k=k) if alike else None
    validation.check_choice("implementation", implementation, kernels.IMPLEMENTATIONS)
    if implementation != "xla" and not able:
        raise ValueError(
            f"implementation={implementation!r:.80}: the kernel {kernel} is for float32, depths to {kernels.DEEPEST}, "
            f"sigmoids, violations, values and logits; got {x.shape} in {x.dtype}, depth {depth}; "
            "None takes XLA wherever there is no kernel"
        )
    return None if implementation == "xla" else implementation


def branched(how: Any, fused: Callable[..., Any], plain: Callable[..., Any], *arrays: Any) -> Any:
    """What won runs where it won: lowered for another platform (a CPU beside the GPU), it is XLA's all the same."""
    if how is None:
        return plain(*arrays)
    if isinstance(how, str):
        return fused(how, *arrays)
    return jax.lax.platform_dependent(*arrays, default=plain, **{how.platform: partial(fused, how)})


def by_rows(fused: Callable[..., Any], rows: int) -> Callable[..., Any]:
    """A kernel on rows that may be shared out among devices, which the compiler does not know how to do."""
    one = lambda how, *arrays: sharding.each_part(lambda *mine: ((), fused(how, *mine)), *arrays, rows=(rows,))
    return lambda how, *arrays: one(how, *arrays)[1]


def on_platforms(how: Any, fused: Callable[..., Any], plain: Callable[..., Any], *arrays: Any, rows: int) -> Any:
    """:func:`branched`, differentiable; of the arrays that of number ``rows`` has these.

    Each branch is differentiated by itself: residuals of a branch that is not taken would be kept as zeros.
    """
    fused = by_rows(fused, rows)
    if how is None or isinstance(how, str):
        return branched(how, fused, plain, *arrays)
    call = jax.custom_vjp(lambda *arrays: branched(how, fused, plain, *arrays))

    def pull_back(fn: Callable[..., Any], cotangent: jax.Array, *arrays: jax.Array) -> Any:
        return jax.vjp(fn, *arrays)[1](cotangent)

    def backward(arrays: Any, cotangent: jax.Array) -> Any:
        of_fused = lambda how, *operands: pull_back(partial(fused, how), *operands)
        return branched(how, of_fused, partial(pull_back, plain), cotangent, *arrays)

    call.defvjp(lambda *arrays: (call(*arrays), arrays), backward)
    return call(*arrays)
