"""Models evaluated: on NumPy arrays of any length, block by block, or within a larger traced program.

Rows are worked on in blocks of one size, the last one padded. So an answer never depends on how many rows come with it,
memory is bounded, and what is compiled does not depend on their number: a NumPy array is answered chunk by chunk, a
chunk of _CHUNK rows is always the same program, and what is left over is padded to the next power of two. Large arrays
are read where they lie.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrees import blocking, validation

_CHUNK = 2**16


def predict(model: Any, x: Any) -> Any:
    """What a model answers in the user's units.

    Args:
      model: a pytree with a pure ``apply(x)`` and the number of its ``features``. Where its ``scaling`` is not None,
        samples go through ``scaling.transform`` and predictions through ``scaling.inverse`` in the precision that they
        came in; in between is the model ``without_scaling()``.
      x: samples, ``(n, p)``: NumPy (answered in NumPy) or JAX.

    Raises:
      ValueError: for another rank or width, or values that are not finite.
    """
    scaling, features = model.scaling, model.features
    answers = evaluate(type(model).apply, model.without_scaling(), scaled(scaling, x, features), features=features)
    return answers if scaling is None else scaling.inverse(answers)


def scaled(scaling: Any, x: Any, features: int) -> Any:
    """Samples ``(n, features)`` as a model without scaling takes them."""
    return x if scaling is None else scaling.transform(validation.check_x(x, features=features))


def evaluate(fn: Callable[[Any, jax.Array], jax.Array], model: Any, x: Any, *, features: int) -> Any:
    """``fn(model, x)``, a traceable function with one row of output a sample, compiled and block by block.

    Args:
      fn: a function of a module, or of a class (it is a static argument).
      model: a pytree.
      x: samples, ``(n, p)``: NumPy (answered in NumPy) or JAX.
      features: how many columns there must be.

    Raises:
      ValueError: for another rank or width, or values that are not finite.
    """
    # Shapes and dtype at the door; finiteness is found out on the way, because looking first costs more than the tree.
    given = validation.check_x(x, features=features, finite=False)
    arrays = jax.tree.leaves(model)
    dtype = next((a.dtype for a in arrays if jnp.issubdtype(a.dtype, jnp.floating)), jnp.float32)
    if isinstance(given, jax.Array) or any(isinstance(a, jax.core.Tracer) for a in arrays):
        x = jnp.asarray(given, dtype)
        out, finite = _compiled(fn, model, x)
        if validation.is_traced(finite):
            return out
    else:
        x = given
        if x.dtype != dtype or not x.flags.c_contiguous:
            with np.errstate(over="ignore"):  # what becomes infinite is found below
                x = np.ascontiguousarray(given, dtype)
        chunks = _chunks(x)
        parts = [_compiled(fn, model, _padded(chunk)) for chunk in chunks]
        out = [np.asarray(part)[: len(chunk)] for (part, _), chunk in zip(parts, chunks, strict=True)]
        out, finite = np.concatenate(out), all(np.asarray(ok) for _, ok in parts)
    if not finite:  # or a sum of finite numbers overflowed, which harms nobody
        validation.check_finite("x", given)
        validation.check_finite(f"x, in {jnp.dtype(dtype).name},", x)
    return out


@partial(jax.jit, static_argnums=0)
def _compiled(fn: Any, model: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``fn(model, x)`` block by block, and whether all of x is finite."""
    out = blocking.map_over_blocks(partial(fn, model), x, blocking.prediction_block(x.shape[0]))
    # A sum is NaN or infinite wherever a summand is, so one dot product tells.
    finite = jnp.isfinite(x @ jnp.ones(x.shape[1], x.dtype)).all()
    return out, finite


def _chunks(x: np.ndarray) -> list[np.ndarray]:
    """The rows in chunks; a few go first by themselves if the others then lie on a 64-byte boundary."""
    # Only what is so aligned is read in place, which is worth a third of the time of a shallow tree.
    head = 0
    if len(x) > _CHUNK:
        head = next((rows for rows in range(64) if (x.ctypes.data + rows * x.strides[0]) % 64 == 0), 0)
    return ([x[:head]] if head else []) + [x[i : i + _CHUNK] for i in range(head, len(x), _CHUNK)]


def _padded(x: np.ndarray) -> np.ndarray:
    rows = max(1 << (len(x) - 1).bit_length(), blocking.prediction_block(len(x)))
    if rows == len(x):
        return x
    padded = np.zeros((rows, x.shape[1]), x.dtype)  # np.pad alone would cost a third of what one row does
    padded[: len(x)] = x
    return padded
