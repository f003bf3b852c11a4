"""What is lowered for a platform that cannot run a kernel."""

from functools import partial
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir
import jax.numpy as jnp

# In a branch of jax.lax.platform_dependent only what is lowered counts: so refusing is something that is lowered.
_refuse = Primitive("not_on_this_platform")
_refuse.multiple_results = True


@_refuse.def_abstract_eval
def _(*, shapes: tuple, message: str) -> list[Any]:
    return [jax.core.ShapedArray(shape, dtype) for shape, dtype in shapes]


def _lower_refusal(ctx: Any, *, shapes: tuple, message: str) -> Any:
    raise NotImplementedError(message)


mlir.register_lowering(_refuse, _lower_refusal)
_refuse.def_impl(partial(_lower_refusal, None))  # outside of jit nothing is lowered


def refused(shapes: list[Any], implementation: str, *_: Any) -> tuple[jax.Array, ...]:
    """Stands for a kernel on another platform than its own.

    Raises:
      NotImplementedError: when it is lowered.
    """
    runs = "a TPU" if implementation == "tpu" else "a CUDA GPU"
    message = f"implementation={implementation!r:.80} runs on {runs} only; here there are 'xla' and 'interpret'"
    shapes = [(tuple(shape), jnp.dtype(dtype)) for shape, dtype in shapes]
    return tuple(_refuse.bind(shapes=tuple(shapes), message=message))
