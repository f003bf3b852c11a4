"""The error of a kernel that cannot run a call, even if this becomes known only at lowering."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir


class Unsupported(NotImplementedError):
    """An implementation cannot run a call: the platform is wrong, or the sizes are too large."""


# jax.lax.platform_dependent lowers only the branch of the platform. The refusal is therefore a primitive whose lowering
# raises the error.
_refuse = Primitive("not_on_this_platform")
_refuse.multiple_results = True


@_refuse.def_abstract_eval
def _(*, shapes: tuple, message: str) -> list[Any]:
    return [jax.core.ShapedArray(shape, dtype) for shape, dtype in shapes]


def _lower_refusal(ctx: Any, *, shapes: tuple, message: str) -> Any:
    raise Unsupported(message)


mlir.register_lowering(_refuse, _lower_refusal)
_refuse.def_impl(partial(_lower_refusal, None))  # nothing is lowered outside of jit


def refuse(platforms: tuple[str, ...], fn: Callable[..., Any], *arrays: Any) -> Any:
    """Replaces ``fn(*arrays)`` on platforms that cannot run it, and raises :class:`Unsupported` when it is lowered."""
    runs = {"tpu": "'mosaic_tpu' runs on a TPU", "cuda": "'triton' runs on a CUDA GPU"}
    message = f"{' and '.join(runs[platform] for platform in platforms)} only; here there are 'xla' and 'interpret'"
    shapes, structure = jax.tree.flatten(jax.eval_shape(fn, *arrays))
    avals = tuple((shape.shape, shape.dtype) for shape in shapes)
    results = _refuse.bind(shapes=avals, message=f"implementation: {message}")
    return jax.tree.unflatten(structure, results)
