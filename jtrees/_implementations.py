"""The choice between XLA and a fused kernel (:mod:`pallas_kernels`). :mod:`jtrees.ops` describes this choice."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jtrees import sharding, topology
import pallas_kernels as kernels
from pallas_kernels import Choice, Unsupported
from pallas_kernels.choice import XLA


def choose(
    kernel: str,
    implementation: Any,
    able: bool,
    x: jax.Array,
    weights: jax.Array,
    *operands: Any,
    not_by: tuple[str, ...] = (),
) -> Choice:
    """Returns how to run a call: by XLA or by the kernels of some platforms.

    Args:
      kernel: name of the kernel.
      implementation: see ``pallas_kernels.choice``.
      able: whether a kernel exists for this kind of call.
      x: samples.
      weights: split weights.
      *operands: further operands. The width of each matrix among them is a number of outputs.
      not_by: backends that cannot run the kernel at any size.
    """
    requested = kernels.named(implementation)
    depth, k = topology.depth_of(weights.shape[0]), max([a.shape[1] for a in operands if a.ndim == 2], default=1)
    arrays = [a for a in (x, weights, *operands) if jnp.issubdtype(a.dtype, jnp.floating)]
    able = able and depth <= kernels.DEEPEST and 0 not in x.shape and x.dtype in (jnp.float32, jnp.bfloat16)
    # Kernels with bfloat16 samples convert the weights to bfloat16. Only the caller can choose this loss of precision.
    if requested is None and not (able and all(a.dtype == jnp.float32 for a in arrays)):
        return XLA
    if not able:
        if "xla" in (requested or ()):
            return XLA
        raise Unsupported(
            f"implementation={implementation!r:.80}: the kernel {kernel} is for float32 or bfloat16, depths to "
            f"{kernels.DEEPEST}, sigmoids, violations, values and logits; got {x.shape} in {x.dtype}, depth {depth}; "
            "None takes XLA wherever there is no kernel"
        )
    return kernels.choose(kernel, requested, kernels.Sizes(x.shape[0], x.shape[1], depth, k), not_by=not_by)


def by_rows(fused: Callable[..., Any], rows: int) -> Callable[..., Any]:
    """Wraps a kernel so that its rows may be sharded over devices, which the compiler cannot do for a kernel."""
    run = lambda how, *arrays: sharding.each_part(lambda *mine: ((), fused(how, *mine)), *arrays, rows=(rows,))
    return lambda how, *arrays: run(how, *arrays)[1]
