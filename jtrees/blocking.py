"""How many samples are worked on at once: the one place that decides it, and the loop that does it.

An array over nodes and samples is as large as the data times the tree. Working through the samples in blocks keeps
such arrays in the cache of a CPU, and bounds the memory of a run everywhere.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Elements of a (nodes, block) array. CPU: measured with experiments/bench_training.py on two cores at depth 4 to 10;
# 2 MB arrays leave their neighbours in cache and still amortise the cost of starting a loop. Elsewhere only memory
# matters, and many runs may be vmapped: 64 MB arrays a run (a guess until it is measured there).
_ELEMENTS_CPU = 2**19
_ELEMENTS_ACCELERATOR = 2**24
# Rows gathered by themselves, on a CPU: experiments/bench_isotonic.py is no faster with two or four times as many.
_GATHERED_CPU = 2**16


def block_size(nodes: int, n: int) -> int:
    """Samples in a block, so that ``n`` samples make the fewest blocks of equal size within the limit."""
    limit = _ELEMENTS_CPU if jax.default_backend() == "cpu" else _ELEMENTS_ACCELERATOR
    blocks = -(-n * nodes // limit)
    return -(-n // blocks)


def chunk_of_rows(rows: int, n: int) -> int:
    """Rows of ``n`` entries that are gathered at once out of ``rows``, when only some of them are needed."""
    limit = _GATHERED_CPU if jax.default_backend() == "cpu" else _ELEMENTS_ACCELERATOR
    return max(1, min(rows, limit // n))


def prediction_block(depth: int) -> int:
    """Samples in a block when a hard tree is evaluated (measured on two CPU cores with 10^6 x 21 rows)."""
    if jax.default_backend() != "cpu":
        return 2**20
    return 2048 if depth <= 5 else 1024


def into_blocks(tree: Any, block: int, mode: str = "edge") -> Any:
    """Arrays ``(n, ...)`` -> ``(blocks, block, ...)``, the last block padded, by its last sample unless told."""

    def split(a: jax.Array) -> jax.Array:
        blocks = -(-a.shape[0] // block)
        padded = jnp.pad(a, [(0, blocks * block - a.shape[0])] + [(0, 0)] * (a.ndim - 1), mode=mode)
        return padded.reshape(blocks, block, *a.shape[1:])

    return jax.tree.map(split, tree)


def sum_over_blocks(
    fn: Callable[..., tuple[Any, jax.Array]], weight: jax.Array, *arrays: jax.Array, block: int
) -> tuple[Any, jax.Array]:
    """``fn(weight, *arrays)`` a block at a time: its first result summed over blocks, its second joined.

    ``fn`` must be additive over samples, and must give zero for samples of weight zero: the padding repeats the last
    sample with that weight, so that nothing is asked about samples that could not be.

    Args:
      fn: maps arrays ``(block, ...)`` to ``(sums, per_sample)`` with ``per_sample: (block, ...)``.
      weight: weights of the samples, ``(n,)``.
      *arrays: arrays ``(n, ...)``.
      block: samples in a block.
    """
    n = weight.shape[0]
    if block >= n:
        return fn(weight, *arrays)
    blocks = (into_blocks(weight, block, "constant"), *into_blocks(arrays, block))
    sums = jax.eval_shape(lambda b: fn(*b)[0], jax.tree.map(lambda a: a[0], blocks))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sums)

    def body(total: Any, one: Any) -> tuple[Any, jax.Array]:
        part, per_sample = fn(*one)
        return jax.tree.map(jnp.add, total, part), per_sample

    total, per_sample = jax.lax.scan(body, zeros, blocks)
    return total, per_sample.reshape(-1, *per_sample.shape[2:])[:n]
