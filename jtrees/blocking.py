"""Sizes of blocks of samples, and loops over blocks.

Arrays over nodes and samples are as large as the data times the tree. Blocks of samples keep such arrays in the cache
of a CPU, and bound the memory of a run on all devices.
"""

from collections.abc import Callable, Iterator
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrees import sharding

# Elements of a (nodes, block) array. CPU: measured with experiments/bench_training.py on two cores at depth 4 to 10;
# 2 MB arrays leave cache for others and amortise the overhead of a loop. Elsewhere 8 MB arrays: of the programs that
# compilers make of GET's step, the largest for which an H100 has all temporary arrays (36 MB) in its L2 cache (50 MB).
# A TPU has almost all of them in its fast memory. With 64 MB arrays both have 200 to 280 MB elsewhere. Not timed.
_ELEMENTS_CPU = 2**19
_ELEMENTS_ACCELERATOR = 2**21
# Elements gathered at once on a CPU: experiments/bench_isotonic.py is no faster with two or four times as many.
_GATHERED_CPU = 2**16
_ELEMENTS_HOST = 2**20  # of a block on the host: 8 MB in double precision
_ALIGNED = 64  # bytes, of arrays that JAX reads on a CPU without a copy


def platform() -> str:
    """Returns the platform that a program is compiled for: that of the mesh in context, else that of JAX here.

    So a program for the devices of another machine has the sizes of these devices.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def block_size(nodes: int, n: int) -> int:
    """Returns the samples in a block, for the fewest blocks of equal size within the limit.

    If rows are sharded over devices, each device loops over its own in blocks of this size.
    """
    limit = _ELEMENTS_CPU if platform() == "cpu" else _ELEMENTS_ACCELERATOR
    n //= sharding.parts(n)
    blocks = -(-n * nodes // limit)
    return -(-n // blocks)


def chunk_of_rows(rows: int, n: int) -> int:
    """Returns how many of ``rows`` rows of ``n`` entries to gather at once."""
    limit = _GATHERED_CPU if platform() == "cpu" else _ELEMENTS_ACCELERATOR
    return max(1, min(rows, limit // n))


def on_host(n: int, width: int) -> Iterator[slice]:
    """Yields the blocks of n rows of so many entries: work on the host in double precision then needs little memory."""
    block = max(1, _ELEMENTS_HOST // max(1, width))
    for start in range(0, n, block):
        yield slice(start, min(start + block, n))


def aligned(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """Returns a NumPy array, not initialised, that JAX shares on a CPU, where NumPy's own arrays are copied."""
    size = np.dtype(dtype).itemsize * math.prod(shape)
    memory = np.empty(size + _ALIGNED, np.uint8)
    first = -memory.ctypes.data % _ALIGNED
    return memory[first : first + size].view(dtype).reshape(shape)


def trees_at_once(trees: int, elements: int) -> int:
    """Returns the trees of an ensemble in each of equally large groups, for arrays of ``elements`` per tree."""
    limit = _ELEMENTS_CPU if platform() == "cpu" else _ELEMENTS_ACCELERATOR
    groups = -(-trees // max(1, limit // elements))
    return -(-trees // groups)


def paths_at_once(paths: int) -> tuple[int, int]:
    """Returns how many paths of a frontier to move at once, and how many to append at once.

    Few of the moved paths add another. CPU: tried on two cores at depth 6 to 14, where half as many, or twice as many
    appended, are about as fast. Elsewhere not measured.
    """
    many, few = (1024, 128) if platform() == "cpu" else (2**18, 2**14)
    return min(many, paths), min(few, paths)


def samples_on_paths(trees: int) -> int:
    """Returns how many samples have their paths through ``trees`` trees in one frontier: more than a mini-batch."""
    return max(1, 2**16 // trees)


def prediction_block(n: int) -> int:
    """Returns the samples in a block for the evaluation of a model on n samples.

    Constant on a CPU (measured on two cores with 10^6 x 21 rows: 256 to 1024 are equally fast): blocks of one size, the
    last padded, evaluate a row by the same program, in the same order of additions, for every n.
    """
    return 256 if platform() == "cpu" else min(2**20, 1 << (n // sharding.parts(n) - 1).bit_length())


def seconds_of_step(elements: int) -> float:
    """Returns the expected seconds of a training step that works on arrays of ``elements`` elements."""
    return elements / _rate()


def _rate() -> int:
    """Returns the elements of a step that are computed in a second."""
    return 2**26 if platform() == "cpu" else 2**32


def into_blocks(tree: Any, block: int, mode: str = "edge") -> Any:
    """Arrays ``(n, ...)`` -> ``(blocks, block, ...)``, the last block padded, by default with its last sample."""

    def split(a: jax.Array) -> jax.Array:
        blocks = -(-a.shape[0] // block)
        padded = jnp.pad(a, [(0, blocks * block - a.shape[0])] + [(0, 0)] * (a.ndim - 1), mode=mode)
        return padded.reshape(blocks, block, *a.shape[1:])

    return jax.tree.map(split, tree)


def map_over_blocks(fn: Callable[[jax.Array], Any], x: jax.Array, block: int) -> Any:
    """Returns ``fn(x)``, which has a row for each sample, computed block by block."""

    def in_blocks(x: jax.Array) -> tuple[tuple[()], Any]:
        out = jax.lax.map(fn, into_blocks(x, block))
        return (), jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[: len(x)], out)

    return _each_shard(in_blocks, x)[1]


def sum_over_blocks(
    fn: Callable[..., tuple[Any, Any]], weight: jax.Array, *arrays: jax.Array, block: int
) -> tuple[Any, Any]:
    """Returns ``fn(weight, *arrays)`` computed block by block: its first result summed, its second concatenated.

    ``fn`` must be additive over samples, and zero for samples of weight zero, such as the padding, which repeats the
    last sample.

    Args:
      fn: maps arrays ``(block, ...)`` to ``(sums, per_sample)`` with ``per_sample: (block, ...)``.
      weight: weights of the samples, ``(n,)``.
      *arrays: arrays ``(n, ...)``.
      block: samples in a block.
    """
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
            # With the rounding errors of the additions, thousands of blocks lose no digits.
            lost = lambda error, old, new, total: error + ((old - (total - (total - old))) + (new - (total - old)))
            return (total, jax.tree.map(lost, carry[1], carry[0], part, total)), per_sample

        (total, error), per_sample = jax.lax.scan(body, (zeros, zeros), blocks)
        total = jax.tree.map(jnp.add, total, error)
        return total, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[: weight.shape[0]], per_sample)

    return _each_shard(in_blocks, weight, *arrays)


def _each_shard(fn: Callable[..., tuple[Any, Any]], *arrays: jax.Array) -> tuple[Any, Any]:
    """Returns sums and rows of ``fn``, for one block of each shard side by side: no row leaves its device."""
    n = len(arrays[0])
    parts = sharding.parts(n)
    if parts == 1:
        return fn(*arrays)
    split = [sharding.keep_rows(a.reshape(parts, n // parts, *a.shape[1:])) for a in arrays]
    sums, by_row = jax.vmap(fn)(*split)
    whole = lambda a: a.reshape(n, *a.shape[2:])
    return jax.tree.map(lambda a: a.sum(0), sums), jax.tree.map(whole, by_row)
