"""Evaluation of models on NumPy arrays of any length, block by block, or within a traced program.

Rows are evaluated in blocks of one size, with padding in the last block. Predictions therefore do not depend on the
number of rows, and memory is bounded. One compiled program evaluates chunks of _CHUNK rows of a NumPy array. The
remaining rows are padded to the next power of two. Large arrays are not copied. The blocks of a chunk are evaluated one
after another, so on a CPU each core evaluates its own chunks.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
import os
from typing import Any, NamedTuple
import weakref

import jax
import jax.numpy as jnp
import numpy as np

from jtrees import blocking, compilation, distributed, processes, sharding, validation

_CHUNK = 2**16


class Exactly(NamedTuple):
    """How to evaluate a model with hard splits so that no prediction depends on the rounding of a score.

    Attributes:
      prepare: ``splits -> prepared``, on the host, evaluated once for many blocks.
      fn: ``(prepared, x) -> leaves``, ``(n,)`` or ``(n, trees)``, traceable, in single precision. A leaf is negative if
        rounding may have decided a split, or if the sample is not finite. (For two separate results, the compiler would
        repeat much of the work.)
      again: ``(splits, x, leaves) -> leaves`` for samples with a negative leaf, on the host. Only negative leaves are
        computed, or all leaves if ``leaves`` is not given.
    """

    prepare: Callable[[Any], Any]
    fn: Callable[[Any, jax.Array], jax.Array]
    again: Callable[..., np.ndarray]


def predict(model: Any, x: Any) -> Any:
    """Returns predictions of a model in the user's units.

    Args:
      model: a pytree with a pure ``apply(x)``, its number of ``features`` and its ``scaling``. If there is a scaling,
        the model ``without_scaling()`` is evaluated on ``scaling.transform(x)``. ``scaling.inverse`` then maps its
        predictions, in the precision of x.
      x: samples, ``(n, p)``, a NumPy or JAX array. Predictions have the same type.

    Raises:
      ValueError: if x has a wrong rank or width, or values that are not finite.
    """
    model = processes.on_host(model) if processes.lost_xla() else model
    scaling, features = model.scaling, model.features
    predictions = evaluate(type(model).apply, model.without_scaling(), x, features=features, scaling=scaling)
    return predictions if scaling is None else scaling.inverse(predictions)


def is_on_device(model: Any, x: Any) -> bool:
    """Returns whether JAX computes predictions, because the rows are a JAX array or the model is traced."""
    return isinstance(x, jax.Array) or validation.is_traced(model)


def scaled(scaling: Any, x: Any, features: int) -> Any:
    """Returns the scaled samples, ``(n, features)``, for the model without its scaling."""
    return x if scaling is None else scaling.transform(validation.check_x(x, features=features, rows=0))


def evaluate(
    fn: Callable[[Any, jax.Array], Any],
    model: Any,
    x: Any,
    *,
    features: int,
    scaling: Any = None,
    exactly: Exactly | None = None,
    then: Callable[[np.ndarray, np.ndarray], np.ndarray] = lambda out, x: out,
) -> Any:
    """Evaluates ``fn(model, x)``, compiled and block by block. ``fn`` is traceable and has one output row per sample.

    Args:
      fn: a module-level function or a method (it is a static argument).
      model: a pytree.
      x: samples, ``(n, p)``, a NumPy or JAX array. Outputs have the same type.
      features: required number of columns.
      scaling: object with a method ``transform`` that scales the samples, or None. It scales NumPy arrays block by
        block.
      exactly: how to evaluate the splits of the model on a NumPy array in single precision.
      then: ``(out, x) -> out`` on the host for the rows of a chunk of a NumPy array, in single precision.

    Raises:
      ValueError: if x has a wrong rank or width, or values that are not finite.
    """
    # The evaluation also checks finiteness, because a separate check would cost more than the tree.
    if processes.lost_xla():
        return _without_xla(model, x, features, scaling, exactly, then)
    with compilation.promoting_ranks():
        return _with_xla(fn, model, x, features, scaling, exactly, then)


def _with_xla(fn: Any, model: Any, x: Any, features: int, scaling: Any, exactly: Exactly | None, then: Any) -> Any:
    """Implements :func:`evaluate` with XLA."""
    given = validation.check_x(x, features=features, finite=scaling is not None, rows=0)  # because scaling may clip
    transform = None if scaling is None else scaling.transform
    if not len(given):  # the empty case needs no program: one row determines the shape and the type
        one = (jnp if isinstance(given, jax.Array) else np).zeros((1, features), given.dtype)
        return _with_xla(fn, model, one, features, scaling, exactly, then)[:0]
    arrays = jax.tree.leaves(model)
    dtype = next((a.dtype for a in arrays if jnp.issubdtype(a.dtype, jnp.floating)), jnp.float32)
    if isinstance(given, jax.Array) or any(isinstance(a, jax.core.Tracer) for a in arrays):
        x = jnp.asarray(given if transform is None else transform(given), dtype)
        out, finite = _compiled(fn, model, x)
        if validation.is_traced(finite):
            return out
    else:
        with distributed.apart():
            out, finite = _on_host(fn, model, given, transform, dtype, exactly, then)
    if not finite:  # or a sum of finite numbers overflowed, which is harmless
        validation.check_finite("x", given)
        with np.errstate(over="ignore"):
            x = given if transform is None else transform(given)
            validation.check_finite(f"x, in {jnp.dtype(dtype).name},", x.astype(dtype))
    return out


def _on_host(
    fn: Any, model: Any, given: np.ndarray, transform: Any, dtype: Any, exactly: Exactly | None, then: Any
) -> tuple[Any, Any]:
    """Returns the outputs for a NumPy array, and whether all of its values are finite."""
    chunks, finite = _chunks(given, dtype), True
    if exactly is None or dtype != jnp.float32:
        ended = lambda part, chunk, x: (then(np.asarray(part[0])[: len(chunk)], x[: len(chunk)]), part[1])
        parts = _evaluated(_compiled, fn, model, chunks, transform, dtype, ended)
        out, finite = np.concatenate([part for part, _ in parts]), all(np.asarray(ok) for _, ok in parts)
    else:
        prepared = _prepared(exactly.prepare, model)

        def certain(part: Any, chunk: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, bool]:
            leaf, x = np.asarray(part)[: len(chunk)], x[: len(chunk)]
            uncertain = np.flatnonzero((leaf < 0).reshape(len(leaf), -1).any(1))
            finite = bool(np.isfinite(x[uncertain]).all())
            if len(uncertain):
                leaf = leaf.copy()
                leaf[uncertain] = exactly.again(model, x[uncertain], leaf[uncertain]) if finite else 0
            return then(leaf, x), finite

        parts = _evaluated(_compiled_exactly, exactly.fn, prepared, chunks, transform, dtype, certain)
        out, finite = np.concatenate([part for part, _ in parts]), all(ok for _, ok in parts)
    return out, finite


def _without_xla(model: Any, x: Any, features: int, scaling: Any, exactly: Exactly | None, then: Any) -> Any:
    """Implements :func:`evaluate` with NumPy, for a model with exact splits."""
    if isinstance(x, jax.Array):
        processes.require_xla("a prediction of a JAX array")
    if exactly is None:
        return processes.require_xla("a prediction of this model")
    model, given = processes.on_host(model), validation.check_x(x, features=features, rows=0)
    given = given if scaling is None else scaling.transform(given)
    dtype = next((a.dtype for a in jax.tree.leaves(model) if jnp.issubdtype(a.dtype, jnp.floating)), np.float32)
    with np.errstate(over="ignore"):
        validation.check_finite(f"x, in {dtype.name},", x := given.astype(dtype))
    return then(exactly.again(model, x), x)


@partial(jax.jit, static_argnums=0)
def _compiled(fn: Any, model: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns ``fn(model, x)``, evaluated block by block, and whether all of x is finite."""
    out = blocking.map_over_blocks(partial(fn, model), x, blocking.prediction_block(x.shape[0]))
    # A sum is NaN or infinite if a summand is, so one dot product in any precision suffices.
    finite = jnp.isfinite(jnp.matmul(x, jnp.ones(x.shape[1], x.dtype), precision="default")).all()
    return out, finite


@partial(jax.jit, static_argnums=0)
def _compiled_exactly(fn: Any, prepared: Any, x: jax.Array) -> jax.Array:
    """Returns ``fn(prepared, x)``, block by block."""
    return blocking.map_over_blocks(partial(fn, prepared), x, blocking.prediction_block(x.shape[0]))


class _Prepared(NamedTuple):
    """The prepared form of a model in memory.

    Attributes:
      arrays: references to the arrays of the model, which do not keep them alive.
      values: a copy of each NumPy array, because it may change; None for a JAX array.
      parts: arrays of the prepared form. A number is the index of an array of the model.
      structure: tree structure of the prepared form.
    """

    arrays: list[Any]
    values: list[np.ndarray | None]
    parts: list[Any]
    structure: Any

    def is_of(self, arrays: list[Any]) -> bool:
        """Returns whether this is the prepared form of a model with these arrays."""
        same = zip(self.arrays, self.values, arrays, strict=True)
        return all(ref() is array and (value is None or np.array_equal(value, array)) for ref, value, array in same)


# Preparing a forest takes longer than predicting one row. The entry of a model is written once, in one step, and is
# removed with the first of the model's arrays. Threads can therefore share it, and entries never outnumber models.
_PREPARED: dict[Any, _Prepared] = {}


def _prepared(prepare: Any, model: Any) -> Any:
    """Returns ``prepare(model)`` on the device. The result is cached until the arrays of the model change."""
    arrays, structure = jax.tree.flatten(model)
    if not all(isinstance(array, (jax.Array, np.ndarray)) for array in arrays):
        return prepare(model)
    key = prepare, structure, *map(id, arrays)
    found = _PREPARED.get(key)
    # The id of an array can be the id of an earlier array, whose entry is about to be removed.
    if found is not None and found.is_of(arrays):
        return jax.tree.unflatten(found.structure, [arrays[a] if isinstance(a, int) else a for a in found.parts])
    values = [array.copy() if isinstance(array, np.ndarray) else None for array in arrays]
    kept = [array if value is None else value for array, value in zip(arrays, values, strict=True)]
    prepared = prepare(jax.tree.unflatten(structure, kept))
    if all(value is not None or array.is_fully_addressable for array, value in zip(arrays, values, strict=True)):
        prepared = jax.tree.map(sharding.from_host, prepared)  # else the arrays span several processes

    def leave(reference: Any) -> None:
        entry = _PREPARED.get(key)
        if entry is not None and any(one is reference for one in entry.arrays):
            _PREPARED.pop(key, None)

    places = {id(array): i for i, array in enumerate(arrays)}
    parts, structure = jax.tree.flatten(prepared)
    parts = [places.get(id(part), part) for part in parts]
    _PREPARED[key] = _Prepared([weakref.ref(array, leave) for array in arrays], values, parts, structure)
    return prepared


def _evaluated(
    program: Any, fn: Any, model: Any, chunks: list[np.ndarray], transform: Any, dtype: Any, then: Any
) -> list[Any]:
    """Returns ``then(program(fn, model, x), chunk, x)`` for each chunk, where x is the scaled and padded chunk."""
    rows_of = lambda chunk: _padded(chunk, transform, dtype)
    if len(chunks) == 1 or (threads := _threads(model)) == 1:
        return [then(program(fn, model, x := rows_of(chunk)), chunk, x) for chunk in chunks]
    # All programs are compiled in this thread, because settings of JAX such as enable_x64 apply to one thread only.
    shapes = {jax.ShapeDtypeStruct((_padded_rows(len(chunk)), chunk.shape[1]), dtype) for chunk in chunks}
    programs = {of.shape: program.lower(fn, model, of).compile() for of in shapes}
    x64 = jax.config.jax_enable_x64

    def evaluated(chunk: np.ndarray) -> Any:
        x = rows_of(chunk)
        with jax.enable_x64(x64):
            return then(jax.block_until_ready(programs[x.shape](model, x)), chunk, x)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(evaluated, chunks))


def _threads(model: Any) -> int:
    """Returns the number of chunks to evaluate in parallel: one per core on a single CPU device, else 1."""
    devices = {device for a in jax.tree.leaves(model) if isinstance(a, jax.Array) for device in a.devices()}
    if jax.default_backend() != "cpu" or len(devices) > 1 or sharding.share_of_starts() is not None:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _chunks(x: np.ndarray, dtype: Any) -> list[np.ndarray]:
    """Returns the rows in chunks. A few leading rows are split off if this aligns the other rows to 64 bytes."""
    # Only aligned arrays are read without a copy. This saves a third of the time of a shallow tree.
    head = 0
    if len(x) > _CHUNK and x.dtype == dtype and x.flags.c_contiguous:
        head = next((rows for rows in range(64) if (x.ctypes.data + rows * x.strides[0]) % 64 == 0), 0)
    return ([x[:head]] if head else []) + [x[i : i + _CHUNK] for i in range(head, len(x), _CHUNK)]


def _padded(x: np.ndarray, transform: Any, dtype: Any) -> np.ndarray:
    """Returns the scaled rows in a dtype and in C order, padded to a length for which programs are compiled."""
    rows = _padded_rows(len(x))
    with np.errstate(over="ignore"):  # overflow is detected later
        if rows == len(x) and transform is None:
            return np.ascontiguousarray(x, dtype)
        padded = blocking.aligned((rows, x.shape[1]), dtype)  # np.pad would take a third of the time of one row
        for some in blocking.on_host(*x.shape):
            padded[some] = x[some] if transform is None else transform(x[some])
        padded[len(x) :] = 0
    return padded


def _padded_rows(n: int) -> int:
    return max(1 << (n - 1).bit_length(), blocking.prediction_block(n))
