"""Evaluation of models on NumPy arrays of any length, block by block, or within a traced program.

Rows are evaluated in blocks of one size, the last one padded, so predictions do not depend on the number of rows, and
memory is bounded. NumPy arrays are evaluated in chunks of _CHUNK rows, by one compiled program; the rest is padded to
the next power of two. Large arrays are not copied.
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
    """Returns predictions of a model in the user's units.

    Args:
      model: a pytree with a pure ``apply(x)``, its number of ``features`` and its ``scaling``. If that is not None, the
        model ``without_scaling()`` is evaluated on ``scaling.transform(x)``, and its predictions are mapped by
        ``scaling.inverse``, in the precision of x.
      x: samples, ``(n, p)``, a NumPy or JAX array; predictions are of the same type.

    Raises:
      ValueError: for another rank or width, or values that are not finite.
    """
    scaling, features = model.scaling, model.features
    predictions = evaluate(type(model).apply, model.without_scaling(), scaled(scaling, x, features), features=features)
    return predictions if scaling is None else scaling.inverse(predictions)


def scaled(scaling: Any, x: Any, features: int) -> Any:
    """Returns the scaled samples ``(n, features)`` for the model without scaling."""
    return x if scaling is None else scaling.transform(validation.check_x(x, features=features))


def evaluate(fn: Callable[[Any, jax.Array], jax.Array], model: Any, x: Any, *, features: int) -> Any:
    """Evaluates ``fn(model, x)``, a traceable function with one row of output per sample, compiled and block by block.

    Args:
      fn: a module-level function or a method (it is a static argument).
      model: a pytree.
      x: samples, ``(n, p)``, a NumPy or JAX array; outputs are of the same type.
      features: required number of columns.

    Raises:
      ValueError: for another rank or width, or values that are not finite.
    """
    # Finiteness is checked during the evaluation, as a separate check costs more than the tree.
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
            with np.errstate(over="ignore"):  # overflow is detected below
                x = np.ascontiguousarray(given, dtype)
        chunks = _chunks(x)
        parts = [_compiled(fn, model, _padded(chunk)) for chunk in chunks]
        out = [np.asarray(part)[: len(chunk)] for (part, _), chunk in zip(parts, chunks, strict=True)]
        out, finite = np.concatenate(out), all(np.asarray(ok) for _, ok in parts)
    if not finite:  # or a sum of finite numbers overflowed, which is harmless
        validation.check_finite("x", given)
        validation.check_finite(f"x, in {jnp.dtype(dtype).name},", x)
    return out


@partial(jax.jit, static_argnums=0)
def _compiled(fn: Any, model: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns ``fn(model, x)``, evaluated block by block, and whether all of x is finite."""
    out = blocking.map_over_blocks(partial(fn, model), x, blocking.prediction_block(x.shape[0]))
    # A sum is NaN or infinite if a summand is, so one dot product suffices.
    finite = jnp.isfinite(x @ jnp.ones(x.shape[1], x.dtype)).all()
    return out, finite


def _chunks(x: np.ndarray) -> list[np.ndarray]:
    """Returns the rows in chunks; a few leading rows are split off if that aligns the others to 64 bytes."""
    # Only aligned arrays are read without a copy, which saves a third of the time of a shallow tree.
    head = 0
    if len(x) > _CHUNK:
        head = next((rows for rows in range(64) if (x.ctypes.data + rows * x.strides[0]) % 64 == 0), 0)
    return ([x[:head]] if head else []) + [x[i : i + _CHUNK] for i in range(head, len(x), _CHUNK)]


def _padded(x: np.ndarray) -> np.ndarray:
    rows = max(1 << (len(x) - 1).bit_length(), blocking.prediction_block(len(x)))
    if rows == len(x):
        return x
    padded = np.zeros((rows, x.shape[1]), x.dtype)  # np.pad would take a third of the time of predicting one row
    padded[: len(x)] = x
    return padded
