"""Writes a model as a serialised StableHLO program."""

import os
from typing import Any

import jax
from jax import export
import jax.numpy as jnp
from jaxtyping import Array

from jtrees import io
from jtrees.export.program import Program, program_of
from jtrees.forest import Forest
from jtrees.prediction import fill_gaps
from jtrees.tables import FrameModel
from jtrees.tasks.base import linked
from jtrees.tree import ObliqueTree

_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def to_stablehlo(model: Any, path: str | os.PathLike) -> None:
    """Writes a model as a program that maps ``x (n, p)``, double, to ``(predictions, leaves)``, for any number of rows.

    For models other than trees and forests of trees, such as TEL or LatentTree, the program returns only
    ``predictions``.

    ``jax.export.deserialize(bytearray(open(path, "rb").read()))`` reads the file. The result's ``call(x)`` needs
    ``jax.enable_x64(True)``. Predictions are double, ``(n,)`` or ``(n, k)``. Trees are evaluated in double precision,
    and all other models in single precision. Leaves are int32, ``(n,)``, or ``(n, trees)`` for a forest. The program
    runs on CPU, CUDA, ROCm and TPU. NaN is a missing value if the model has ``medians``. This function needs the extra
    ``export``.

    Args:
      model: any fitted model of numbers.
      path: path of the file. The file is written completely or not at all.

    Raises:
      ImportError: without flatbuffers.
      ValueError: for a model of a raw table, or for an object that is not a model.
      OSError: if the file cannot be written.

    Example:
      >>> leaves = jtrees.leaves.Values(jnp.array([0.0, 10.0]))
      >>> tree = jtrees.ObliqueTree(jnp.array([[1.0, 2.0]]), jnp.array([-1.0]), leaves)
      >>> jtrees.export.to_stablehlo(tree, "tree.stablehlo")
      >>> program = jax.export.deserialize(bytearray(open("tree.stablehlo", "rb").read()))
      >>> with jax.enable_x64(True):
      ...     print(program.call(np.array([[2.0, 1.0]])))
      (Array([10.], dtype=float64), Array([1], dtype=int32))
    """
    if isinstance(model, FrameModel):
        raise ValueError(
            "model must be a model of numbers, because StableHLO has no text, got a model of a raw table: use to_c, "
            "to_numpy or to_onnx, or export its .model and encode rows with its .encoder"
        )
    if isinstance(model, ObliqueTree) or (isinstance(model, Forest) and isinstance(model.trees, ObliqueTree)):
        program = program_of(model)
        evaluate, features = (lambda x: _evaluate(program, x)), len(program.zero)
    elif hasattr(model, "apply") and hasattr(model, "features"):
        # The model is evaluated row by row, because evaluation in blocks needs a known number of rows.
        evaluate, features = jax.vmap(lambda row: model.apply(row[None])[0].astype(jnp.float64)), model.features
    else:
        raise ValueError(f"model must be a fitted model, got {type(model).__name__}")
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        (rows,) = export.symbolic_shape("n")
        x = jax.ShapeDtypeStruct((rows, features), jnp.float64)
        exported = export.export(jax.jit(evaluate), platforms=_PLATFORMS)(x)
    io.write_file(path, exported.serialize())


def _evaluate(program: Program, x: Array) -> tuple[Array, Array]:
    x = fill_gaps(x, program.medians)
    z = (x - program.zero).astype(jnp.float32).astype(jnp.float64)
    out, leaves = jnp.zeros((x.shape[0], len(program.offset))), []
    for tree in range(len(program.bias)):
        weights, bias = jnp.asarray(program.weights[tree]), jnp.asarray(program.bias[tree])

        def descend(_: Any, node: Array, weights: Array = weights, bias: Array = bias) -> Array:
            sums = [bias[node].astype(jnp.float64), *jnp.zeros((3, x.shape[0]))]
            for j in range(len(program.zero)):
                sums[j % 4] += weights[node, j] * z[:, j]
            return 2 * node + 1 + ((sums[0] + sums[1]) + (sums[2] + sums[3]) > 0).astype(node.dtype)

        leaf = jax.lax.fori_loop(0, program.depth, descend, jnp.zeros(x.shape[0], jnp.int32)) - len(bias)
        value = jnp.asarray(program.intercept[tree])[leaf]
        if program.coefficients is not None:
            value += jnp.einsum("nkp,np->nk", jnp.asarray(program.coefficients[tree])[leaf].astype(jnp.float64), z)
        if program.lower is not None and program.upper is not None:
            value = jnp.clip(value, jnp.asarray(program.lower[tree])[leaf], jnp.asarray(program.upper[tree])[leaf])
        out, leaves = out + value, [*leaves, leaf]
    out = linked(program.link, out / program.divisor + program.offset)
    return out[:, 0] if program.scalar else out, leaves[0] if program.single else jnp.stack(leaves, axis=1)
