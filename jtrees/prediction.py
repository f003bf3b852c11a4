"""Evaluation of models on NumPy arrays of any length, block by block, or within a traced program.

Rows are evaluated in blocks of equal size, with padding in the last block. Predictions therefore do not depend on the
number of rows, and memory is bounded. One compiled program evaluates chunks of _CHUNK rows of a NumPy array. The
remaining rows are padded to the next power of two. Large arrays are not copied. The blocks of a chunk are evaluated one
after another, so on a CPU each core evaluates its own chunks.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple
import weakref

import jax
import jax.numpy as jnp
import numpy as np

from jtrees import blocking, compilation, distributed, exact, ops, processes, sharding, validation

_CHUNK = 2**16
_FEW_ROWS = 16  # largest number of rows that many trees evaluate in NumPy


def predict(model: Any, x: Any) -> Any:
    """Returns predictions of a model in the user's units, of the array type of x.

    The model is a pytree with a pure ``apply(x)``, its number of ``features``, its ``medians`` and its ``scaling``. If
    there is a scaling, the model ``without_scaling()`` is evaluated on ``scaling.transform(x)``. ``scaling.inverse``
    then maps its predictions, in the precision of x.

    Raises:
      ValueError: if x has a wrong rank or width, or values that are not finite.
    """
    model = processes.on_host(model) if processes.lost_xla() else model
    scaling, options = model.scaling, {"features": model.features, "scaling": model.scaling, "medians": model.medians}
    predictions = evaluate(type(model).apply, model.without_scaling(), x, **options)
    return predictions if scaling is None else scaling.inverse(predictions)


def is_on_device(model: Any, x: Any) -> bool:
    """Returns whether JAX computes predictions, because the rows are a JAX array or the model is traced."""
    return isinstance(x, jax.Array) or validation.is_traced(model)


def scaled(scaling: Any, x: Any, features: int) -> Any:
    """Returns the scaled samples, ``(n, features)``, for the model without its scaling."""
    return x if scaling is None else scaling.transform(validation.check_x(x, features=features, rows=0))


def fill_gaps(x: Any, medians: Any) -> Any:
    """Returns samples in which missing values, NaN, are the medians of their columns; a pure function of arrays."""
    # NumPy arrays are filled in double precision, JAX arrays in their own. If the medians are None, x is unchanged.
    if medians is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    if isinstance(x, jax.Array) or validation.is_traced(medians):
        return jnp.where(jnp.isnan(x), jnp.asarray(medians, x.dtype), x)
    gaps = np.isnan(x)
    return np.where(gaps, np.asarray(medians, np.float64), x) if gaps.any() else x


def filled(x: Any, medians: Any, names: Sequence[str] | None = None) -> Any:
    """Returns :func:`fill_gaps`, the same object without gaps, and warns of the number of gaps in each column."""
    if medians is None or validation.is_traced(x, medians):
        return fill_gaps(x, medians)
    counts = np.asarray((jnp if isinstance(x, jax.Array) else np).isnan(x).sum(0)).tolist()
    if not any(counts):
        return x
    names = [f"x{j}" for j in range(x.shape[1])] if names is None else names
    validation.warn_of_gaps(dict(zip(names, counts, strict=True)))
    return fill_gaps(x, medians)


def evaluate(
    fn: Callable[[Any, jax.Array], Any], model: Any, x: Any, *, features: int, scaling: Any = None, medians: Any = None
) -> Any:
    """Evaluates ``fn(model, x)``, compiled and block by block. Outputs have the array type of x.

    Args:
      fn: a module-level function or a method (it is a static argument), with one output row per sample.
      model: a pytree.
      x: samples, ``(n, p)``, a NumPy or JAX array.
      features: required number of columns.
      scaling: object with a method ``transform`` that scales the samples, NumPy arrays block by block, or None.
      medians: medians that fill gaps before the samples are scaled, with a warning, ``(p,)``. None: gaps are not
        finite.

    Raises:
      ValueError: if x has a wrong rank or width, or values that are not finite.
    """
    return _evaluate(fn, model, x, features, scaling, medians, lambda outputs, x: outputs)


def evaluate_leaves(
    trees: Any, x: Any, *, scaling: Any, medians: Any = None, finish: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> Any:
    """Returns the leaf that each sample reaches in a hard tree, ``(n,)``, or in many hard trees, ``(n, trees)``."""
    # For a NumPy array and a model in single precision, the leaves do not depend on rounding (`exact`). Many trees have
    # a leading axis in every array. On the host, `finish(leaf, x) -> outputs` maps the leaves and the scaled rows of a
    # chunk of a NumPy array to the rows of the result. `evaluate` describes the other arguments.
    return _evaluate(_leaf_index, _Splits(trees.weights, trees.bias), x, trees.features, scaling, medians, finish)


def _evaluate(fn: Any, model: Any, x: Any, features: int, scaling: Any, medians: Any, finish: Any) -> Any:
    """Implements :func:`evaluate` and :func:`evaluate_leaves`."""
    if processes.lost_xla():
        return _without_xla(fn, model, x, features, scaling, medians, finish)
    samples = validation.check_x(x, features=features, finite=False, rows=0)
    if validation.is_traced(samples, model):
        samples = fill_gaps(samples, medians)
    if scaling is not None:  # which may clip infinite values
        validation.check_finite("x", samples := filled(samples, medians))
    if not len(samples):  # the empty case needs no program: one row determines the shape and the type
        row = (jnp if isinstance(samples, jax.Array) else np).zeros((1, features), samples.dtype)
        return _evaluate(fn, model, row, features, scaling, None, finish)[:0]
    dtype, transform = _dtype(model), None if scaling is None else scaling.transform
    with compilation.default_settings():
        if is_on_device(model, samples):
            x = jnp.asarray(samples if transform is None else transform(samples), dtype)
            outputs, finite = _compiled(fn, model, x)
            if validation.is_traced(finite):
                return outputs
        else:
            with distributed.apart():
                outputs, finite = _on_host(fn, model, samples, transform, dtype, finish)
    # The evaluation checks finiteness, because a separate check would cost more than the tree.
    if not finite:  # or a sum of finite numbers overflowed, which is harmless
        if (without_gaps := filled(samples, medians)) is not samples:
            return _evaluate(fn, model, without_gaps, features, scaling, None, finish)
        validation.check_finite("x", samples)
        with np.errstate(over="ignore"):
            x = samples if transform is None else transform(samples)
            validation.check_finite(f"x, in {dtype.name},", x.astype(dtype))
    return outputs


def _dtype(model: Any) -> np.dtype:
    """Returns the dtype of the first array of floating-point numbers of a model."""
    arrays = (a for a in jax.tree.leaves(model) if jnp.issubdtype(a.dtype, jnp.floating))
    return next((a.dtype for a in arrays), np.dtype(np.float32))


def _without_xla(fn: Any, model: Any, x: Any, features: int, scaling: Any, medians: Any, finish: Any) -> Any:
    """Implements :func:`evaluate_leaves` with NumPy."""
    if isinstance(x, jax.Array):
        processes.require_xla("a prediction of a JAX array")
    if fn is not _leaf_index:
        return processes.require_xla("a prediction of this model")
    model, samples = processes.on_host(model), validation.check_x(x, features=features, finite=False, rows=0)
    validation.check_finite("x", samples := filled(samples, medians))
    samples, dtype = samples if scaling is None else scaling.transform(samples), _dtype(model)
    with np.errstate(over="ignore"):
        validation.check_finite(f"x, in {dtype.name},", x := samples.astype(dtype))
    return finish(exact.leaf_index(model.weights, model.bias, x).T, x)


@partial(jax.jit, static_argnums=0)
def _compiled(fn: Any, model: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    """Returns ``fn(model, x)``, evaluated block by block, and whether all of x is finite."""
    outputs = blocking.map_over_blocks(partial(fn, model), x, blocking.prediction_block(x.shape[0]))
    if fn is _certain_leaf_index:  # which marks samples that are not finite
        return outputs, True
    # A sum is NaN or infinite if a summand is, so one dot product in any precision suffices.
    finite = jnp.isfinite(jnp.matmul(x, jnp.ones(x.shape[1], x.dtype), precision="default")).all()
    return outputs, finite


class _Splits(NamedTuple):
    """The splits of a tree, or of many trees with a leading axis; ``unit`` has factors of the features, or is None."""

    weights: Any
    bias: Any
    unit: Any = None


def _leaf_index(splits: _Splits, x: jax.Array) -> jax.Array:
    """Returns the leaf of each sample, ``(n,)`` or ``(n, trees)``."""
    hard = lambda weights, bias: ops.hard(weights, bias, x)
    return hard(*splits[:2]) if splits.bias.ndim == 1 else jax.vmap(hard)(*splits[:2]).T


def _certain_leaf_index(splits: _Splits, x: jax.Array) -> jax.Array:
    """Returns the leaf of each sample, negative if rounding may have decided it, or if the sample is not finite."""
    x = x * splits.unit

    # For two separate results, the compiler would repeat much of the work.
    def mark(weights: jax.Array, bias: jax.Array) -> jax.Array:
        leaf, uncertain = ops.hard_and_uncertain(weights, bias, x)
        return jnp.where(uncertain, -1, leaf)

    if splits.bias.ndim == 1:
        return mark(*splits[:2])
    small = jnp.int16 if splits.bias.shape[1] < 2**15 else jnp.int32  # there may be many trees
    return jax.vmap(mark)(*splits[:2]).astype(small).T


# Preparing a forest takes longer than predicting one row. An entry has weak references to the weights and biases of a
# model, copies of NumPy arrays, which may change, and the splits. The entry goes with the weights.
_UNIT_SPLITS: dict[int, tuple[list[weakref.ref], list[np.ndarray | None], _Splits]] = {}


def _unit_splits(splits: _Splits) -> _Splits:
    """Returns :func:`jtrees.exact.balanced_splits` on the device. They are cached until the arrays change."""
    key, arrays = id(splits.weights), splits[:2]
    if (entry := _UNIT_SPLITS.get(key)) is not None:
        parts = zip(arrays, *entry[:2], strict=True)
        if all(ref() is a and (copy is None or np.array_equal(copy, a)) for a, ref, copy in parts):
            return entry[2]
    copies = [None if isinstance(a, jax.Array) else a.copy() for a in arrays]
    splits = _Splits(*exact.balanced_splits(*arrays))
    if all(not isinstance(a, jax.Array) or a.is_fully_addressable for a in arrays):
        splits = jax.tree.map(sharding.from_host, splits)  # else the arrays span several processes
    forget = lambda _: _UNIT_SPLITS.pop(key, None)
    _UNIT_SPLITS[key] = [weakref.ref(arrays[0], forget), weakref.ref(arrays[1])], copies, splits
    return splits


def _on_host(fn: Any, model: Any, x: np.ndarray, transform: Any, dtype: Any, finish: Any) -> tuple[np.ndarray, bool]:
    """Returns the outputs for a NumPy array, and whether all of its values are finite."""
    exactly, operand = fn is _leaf_index and dtype == jnp.float32, model
    # A program pads few rows to a whole block. In many trees, that takes up to a hundred times as long as NumPy, which
    # takes a step for each feature.
    if exactly and len(x) <= _FEW_ROWS and model.bias.ndim > 1 and len(model.bias) > x.shape[1]:
        with np.errstate(over="ignore"):  # overflow is detected later
            rows = np.ascontiguousarray(x if transform is None else transform(x), dtype)
        if not np.isfinite(rows).all():
            return rows, False
        leaf = exact.leaf_index(model.weights, model.bias, rows).T
        return finish(np.ascontiguousarray(leaf), rows), True  # `finish` adds in the order of memory
    if exactly:
        fn, operand = _certain_leaf_index, _unit_splits(model)
    chunks, program, x64 = _chunks(x, dtype), partial(_compiled, fn), jax.config.jax_enable_x64
    threads = 1 if len(chunks) == 1 else _threads(operand)
    if threads > 1:
        # All programs are compiled in this thread, because settings of JAX such as enable_x64 apply to one thread only.
        shapes = {jax.ShapeDtypeStruct((_padded_rows(len(chunk)), x.shape[1]), dtype) for chunk in chunks}
        programs = {shape.shape: _compiled.lower(fn, operand, shape).compile() for shape in shapes}
        program = lambda operand, x: programs[x.shape](operand, x)

    def evaluate_chunk(chunk: np.ndarray) -> tuple[np.ndarray, bool]:
        padded = _padded(chunk, transform, dtype)
        with compilation.default_settings(), jax.enable_x64(x64):
            outputs, finite = program(operand, padded)
            outputs, rows = np.asarray(outputs)[: len(chunk)], padded[: len(chunk)]
            if exactly:
                outputs, finite = exact.decide(model.weights, model.bias, rows, outputs)
            return finish(outputs, rows), bool(finite)

    if threads == 1:
        results = [evaluate_chunk(chunk) for chunk in chunks]
    else:
        with ThreadPoolExecutor(threads) as pool:
            results = list(pool.map(evaluate_chunk, chunks))
    outputs, finite = zip(*results, strict=True)
    return np.concatenate(outputs), all(finite)


def _threads(model: Any) -> int:
    """Returns the number of chunks to evaluate in parallel: one per core on a single CPU device, else 1."""
    devices = {device for a in jax.tree.leaves(model) if isinstance(a, jax.Array) for device in a.devices()}
    if jax.default_backend() != "cpu" or len(devices) > 1 or sharding.share_of_starts() is not None:
        return 1
    return processes.processors()


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
        for rows_now in blocking.on_host(*x.shape):
            padded[rows_now] = x[rows_now] if transform is None else transform(x[rows_now])
        padded[len(x) :] = 0
    return padded


def _padded_rows(n: int) -> int:
    return max(1 << (n - 1).bit_length(), blocking.prediction_block(n))
