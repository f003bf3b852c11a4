"""Sizes of blocks of samples, and loops over blocks.

An array over nodes and samples is as large as the data times the tree. Blocks of samples keep such arrays in the cache
of a CPU, and limit the memory use on every device.
"""

from collections.abc import Callable, Iterator
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrees import sharding

# Elements of a (nodes, block) array. CPU: measured with experiments/bench_training.py on two cores at depths 4 to 10;
# 2 MB arrays leave cache for other arrays and amortise the overhead of a loop. Accelerators: 8 MB arrays, derived from
# the compiled programs of GET's training step, but not timed. This size is the largest for which an H100 keeps all
# temporary arrays (36 MB) in its L2 cache (50 MB). A TPU keeps almost all of them in its fast memory. For 64 MB
# arrays, 200 to 280 MB are in slower memory on both.
_ELEMENTS_CPU = 2**19
_ELEMENTS_ACCELERATOR = 2**21
# Elements gathered at once on a CPU: experiments/bench_isotonic.py is no faster with two or four times this number.
_GATHERED_CPU = 2**16
_FEWEST = 256  # samples in a block of a prediction or an evaluation on a CPU
_ELEMENTS_HOST = 2**20  # in a block on the host: 8 MB in double precision
_ALIGNED = 64  # bytes: the alignment of arrays that JAX reads on a CPU without a copy


def platform() -> str:
    """Returns the platform of the compiled program: the platform of the mesh in context, else JAX's default here."""
    # A program for the devices of another machine therefore gets block sizes for these devices.
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def block_size(nodes: int, n: int) -> int:
    """Returns the number of samples in a block, for the fewest equal blocks within the limit."""
    # If rows are sharded over devices, each device loops over its own rows in blocks of this size.
    limit = _ELEMENTS_CPU if platform() == "cpu" else _ELEMENTS_ACCELERATOR
    n //= sharding.parts(n)
    blocks = -(-n * nodes // limit)
    return -(-n // blocks)


def chunk_of_rows(rows: int, n: int) -> int:
    """Returns the number of rows to gather at once, among ``rows`` rows of ``n`` entries."""
    limit = _GATHERED_CPU if platform() == "cpu" else _ELEMENTS_ACCELERATOR
    return max(1, min(rows, limit // n))


def on_host(n: int, width: int) -> Iterator[slice]:
    """Yields blocks of n rows with ``width`` entries, so that double-precision work on the host needs little memory."""
    block = max(1, _ELEMENTS_HOST // max(1, width))
    for start in range(0, n, block):
        yield slice(start, min(start + block, n))


def aligned(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """Returns an uninitialised NumPy array that JAX shares on a CPU. JAX copies arrays that NumPy allocates."""
    size = np.dtype(dtype).itemsize * math.prod(shape)
    memory = np.empty(size + _ALIGNED, np.uint8)
    first = -memory.ctypes.data % _ALIGNED
    return memory[first : first + size].view(dtype).reshape(shape)


def trees_at_once(trees: int, elements: int) -> int:
    """Returns the number of trees in each of several equal groups, for arrays of ``elements`` per tree."""
    limit = _ELEMENTS_CPU if platform() == "cpu" else _ELEMENTS_ACCELERATOR
    groups = -(-trees // max(1, limit // elements))
    return -(-trees // groups)


def paths_at_once(paths: int) -> tuple[int, int]:
    """Returns the number of paths in a frontier to move at once, and the number to append at once."""
    # Only a few of the moved paths append another path. CPU: measured on two cores at depths 6 to 14. Half of the first
    # number, or twice the second number, is about equally fast. Accelerators: not measured.
    moved, appended = (1024, 128) if platform() == "cpu" else (2**18, 2**14)
    return min(moved, paths), min(appended, paths)


def samples_on_paths(trees: int) -> int:
    """Returns the number of samples whose paths through ``trees`` trees share a frontier: more than a mini-batch."""
    return max(1, 2**16 // trees)


def prediction_block(n: int) -> int:
    """Returns the number of samples in a block when a model is evaluated on n samples."""
    # The block size is constant on a CPU (256 to 1024 are equally fast, measured on two cores with 10^6 x 21 rows). All
    # blocks have one size, with padding in the last. The same program then evaluates a row for every n, with the same
    # order of additions.
    return _FEWEST if platform() == "cpu" else min(2**20, 1 << (n // sharding.parts(n) - 1).bit_length())


def evaluation_block(numbers: int, n: int) -> int:
    """Returns the number of samples in a block when a loss is evaluated whose arrays have ``numbers`` numbers a sample.

    It is a power of two, at least the block of a prediction on a CPU, so that it divides a padded number of samples
    (:func:`jtrees.data.table.bucket`), which is then not padded again. Few samples are one block.
    """
    limit = _ELEMENTS_CPU if platform() == "cpu" else _ELEMENTS_ACCELERATOR
    block = max(_FEWEST, 1 << (max(1, limit // numbers).bit_length() - 1))
    return min(n, block)


def into_blocks(tree: Any, block: int, mode: str = "edge") -> Any:
    """Returns arrays ``(n, ...)`` as ``(blocks, block, ...)``. Padding by default repeats the last sample."""

    def split(a: jax.Array) -> jax.Array:
        blocks = -(-a.shape[0] // block)
        padded = jnp.pad(a, [(0, blocks * block - a.shape[0])] + [(0, 0)] * (a.ndim - 1), mode=mode)
        return padded.reshape(blocks, block, *a.shape[1:])

    return jax.tree.map(split, tree)


def map_over_blocks(fn: Callable[[jax.Array], Any], x: jax.Array, block: int) -> Any:
    """Returns ``fn(x)`` computed block by block. The result of ``fn`` has one row for each sample."""

    def in_blocks(x: jax.Array) -> tuple[tuple[()], Any]:
        out = jax.lax.map(fn, into_blocks(x, block))
        return (), jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[: len(x)], out)

    return _each_shard(in_blocks, x)[1]


def sum_over_blocks(
    fn: Callable[..., tuple[Any, Any]], weight: jax.Array, *arrays: jax.Array, block: int
) -> tuple[Any, Any]:
    """Returns ``fn(weight, *arrays)`` computed block by block: its first result summed, its second concatenated."""
    # `fn` maps arrays (block, ...) to (sums, per_sample) with `per_sample: (block, ...)`. It must be additive over
    # samples, and must return zero sums for samples of weight zero. Padding has weight zero and repeats the last
    # sample.
    n = weight.shape[0]
    if block >= n // sharding.parts(n):
        return fn(weight, *arrays)

    def in_blocks(weight: jax.Array, *arrays: jax.Array) -> tuple[Any, Any]:
        blocks = (into_blocks(weight, block, "constant"), *into_blocks(arrays, block))
        sums = jax.eval_shape(lambda b: fn(*b)[0], jax.tree.map(lambda a: a[0], blocks))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sums)

        def body(carry: Any, arrays_of_block: Any) -> tuple[Any, Any]:
            part, per_sample = fn(*arrays_of_block)
            total = jax.tree.map(jnp.add, carry[0], part)
            # Adding up the rounding errors as well keeps all digits in a sum over thousands of blocks.
            add = lambda error, old, new, total: error + ((old - (total - (total - old))) + (new - (total - old)))
            return (total, jax.tree.map(add, carry[1], carry[0], part, total)), per_sample

        (total, error), per_sample = jax.lax.scan(body, (zeros, zeros), blocks)
        total = jax.tree.map(jnp.add, total, error)
        return total, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[: weight.shape[0]], per_sample)

    return _each_shard(in_blocks, weight, *arrays)


def _each_shard(fn: Callable[..., tuple[Any, Any]], *arrays: jax.Array) -> tuple[Any, Any]:
    """Returns sums and rows of ``fn`` over the blocks of all shards, in parallel. All rows remain on their devices."""
    n = len(arrays[0])
    parts = sharding.parts(n)
    if parts == 1:
        return fn(*arrays)
    split = [sharding.keep_rows(a.reshape(parts, n // parts, *a.shape[1:])) for a in arrays]
    sums, rows = jax.vmap(fn)(*split)
    joined = lambda a: a.reshape(n, *a.shape[2:])
    return jax.tree.map(lambda a: a.sum(0), sums), jax.tree.map(joined, rows)
