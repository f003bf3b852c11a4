"""The error of a kernel that cannot do what it was asked for, also where only lowering shows this."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir


class Unsupported(NotImplementedError):
    """An implementation cannot run this: the platform is another one, or the sizes are too large for it."""


# In a branch of jax.lax.platform_dependent only what is lowered counts: so refusing is something that is lowered.
_refuse = Primitive("not_on_this_platform")
_refuse.multiple_results = True


@_refuse.def_abstract_eval
def _(*, shapes: tuple, message: str) -> list[Any]:
    return [jax.core.ShapedArray(shape, dtype) for shape, dtype in shapes]


def _lower_refusal(ctx: Any, *, shapes: tuple, message: str) -> Any:
    raise Unsupported(message)


mlir.register_lowering(_refuse, _lower_refusal)
_refuse.def_impl(partial(_lower_refusal, None))  # outside of jit nothing is lowered


def refuse(platforms: tuple[str, ...], fn: Callable[..., Any], *arrays: Any) -> Any:
    """Stands for ``fn(*arrays)`` on other platforms than its own.

    Raises:
      Unsupported: when it is lowered.
    """
    runs = {"tpu": "'mosaic_tpu' runs on a TPU", "cuda": "'triton' runs on a CUDA GPU"}
    message = f"{' and '.join(runs[one] for one in platforms)} only; here there are 'xla' and 'interpret'"
    shapes, structure = jax.tree.flatten(jax.eval_shape(fn, *arrays))
    found = _refuse.bind(shapes=tuple((one.shape, one.dtype) for one in shapes), message=f"implementation: {message}")
    return jax.tree.unflatten(structure, found)
