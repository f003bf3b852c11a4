"""Launches a kernel from its body. Operands and results have names, and the backend defines their blocks."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import jax
from jax.experimental import pallas as pl

from pallas_kernels import mosaic_tpu, triton
from pallas_kernels.config import Config
from pallas_kernels.layout import Layout
from pallas_kernels.unsupported import Unsupported

Kind = Literal["samples", "columns", "tree", "scalar", "sums"]
SHELLS = {"mosaic_tpu": mosaic_tpu, "triton": triton}  # the modules with which backends read, write and sum


class Operand(NamedTuple):
    """An operand or a result.

    Attributes:
      kind: ``"samples"`` is ``(n, p)``. ``"columns"`` is ``(rows, n)``. ``"tree"`` is ``(subtrees, rows, m)``.
        ``"scalar"`` is ``(1, 1)``. ``"sums"`` is ``(programs, subtrees, rows, m)``, a result that is summed over tiles.
      array: the array, or the shape and dtype of a result.
    """

    kind: Kind
    array: Any


def result(kind: Kind, dtype: Any, *shape: int) -> Operand:
    """Returns a result of a kernel."""
    return Operand(kind, jax.ShapeDtypeStruct(shape, dtype))


def launch(
    name: str,
    body: Callable[[SimpleNamespace], None],
    config: Config,
    layout: Layout,
    ins: Mapping[str, Operand],
    outs: Mapping[str, Operand],
    *,
    sums: bool,
) -> dict[str, jax.Array]:
    """Runs ``body`` for every tile, on references by name.

    If the kernel ``sums`` over tiles, a program visits several tiles.
    """
    shell = SHELLS[config.backend]
    spec = lambda operand, is_result: shell.block(
        layout, operand.kind, operand.array.shape, sums=sums, is_result=is_result
    )
    call = pl.pallas_call(
        lambda *refs: body(SimpleNamespace(**dict(zip((*ins, *outs), refs, strict=True)))),
        grid=shell.grid(layout, sums=sums),
        in_specs=[spec(operand, False) for operand in ins.values()],
        out_specs=[spec(result, True) for result in outs.values()],
        out_shape=[result.array for result in outs.values()],
        name=name,
        interpret=config.interpret,
        compiler_params=None if config.interpret is True else shell.parameters(config, layout, sums=sums),
    )

    @jax.custom_jvp
    def once(*arrays: jax.Array) -> Any:
        with jax.enable_x64(False):  # TPUs cannot lower a loop with a 64-bit counter
            return call(*arrays)

    @once.defjvp
    def _(*_: Any) -> Any:
        raise Unsupported(f"{name} has only first-order reverse-mode derivatives, 'xla' has all derivatives")

    return dict(zip(outs, once(*(operand.array for operand in ins.values())), strict=True))
