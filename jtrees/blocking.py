"""How many samples are worked on at once: the one place that decides it, and the loop that does it.

An array over nodes and samples is as large as the data times the tree. Working through the samples in blocks keeps
such arrays in the cache of a CPU, and bounds the memory of a run everywhere.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrees import sharding

# Elements of a (nodes, block) array. CPU: measured with experiments/bench_training.py on two cores at depth 4 to 10;
# 2 MB arrays leave their neighbours in cache and still amortise the cost of starting a loop. Elsewhere only memory
# matters, and many runs may be vmapped: 64 MB arrays a run (a guess until it is measured there).
_ELEMENTS_CPU = 2**19
_ELEMENTS_ACCELERATOR = 2**24
# Rows gathered by themselves, on a CPU: experiments/bench_isotonic.py is no faster with two or four times as many.
_GATHERED_CPU = 2**16


def block_size(nodes: int, n: int) -> int:
    """Samples in a block, so that ``n`` samples make the fewest blocks of equal size within the limit.

    Where rows are shared out among devices, each goes through its own in blocks of this size.
    """
    limit = _ELEMENTS_CPU if jax.default_backend() == "cpu" else _ELEMENTS_ACCELERATOR
    n //= sharding.parts(n)
    blocks = -(-n * nodes // limit)
    return -(-n // blocks)


def chunk_of_rows(rows: int, n: int) -> int:
    """Rows of ``n`` entries that are gathered at once out of ``rows``, when only some of them are needed."""
    limit = _GATHERED_CPU if jax.default_backend() == "cpu" else _ELEMENTS_ACCELERATOR
    return max(1, min(rows, limit // n))


def trees_at_once(trees: int, elements: int) -> int:
    """Trees of an ensemble in a group, when each works on an array of so many elements: groups are equally large."""
    limit = _ELEMENTS_CPU if jax.default_backend() == "cpu" else _ELEMENTS_ACCELERATOR
    groups = -(-trees // max(1, limit // elements))
    return -(-trees // groups)


def paths_at_once(paths: int) -> tuple[int, int]:
    """Of the paths of a frontier, how many are moved at once, and how many begin at once.

    Few of those that are moved begin another. CPU: tried by hand on two cores at depth 6 to 14, where half as many, or
    twice as many that begin, were about as fast. Elsewhere a guess.
    """
    many, few = (1024, 128) if jax.default_backend() == "cpu" else (2**18, 2**14)
    return min(many, paths), min(few, paths)


def samples_on_paths(trees: int) -> int:
    """Samples whose paths through so many trees are followed together: more than a batch, and bounded."""
    return max(1, 2**16 // trees)


def prediction_block(n: int) -> int:
    """Samples in a block when a model is evaluated on n samples.

    On a CPU always the same (measured on two cores with 10^6 x 21 rows: 256 to 1024 are equally fast): every call is
    cut into blocks of this size, the last one padded, so that a row is scored by the same program, in the same order of
    additions, however many come with it.
    """
    return 256 if jax.default_backend() == "cpu" else min(2**20, 1 << (n // sharding.parts(n) - 1).bit_length())


def steps_in_a_round(elements: int) -> int:
    """Training steps between two looks of the host, when a step works on an array of so many elements.

    About half a second of work on a CPU (where an element, a split's score of a sample, takes some ten operations),
    and never so few that handing over the state is felt.
    """
    rate = 2**26 if jax.default_backend() == "cpu" else 2**32  # elements a second
    return int(np.clip(rate // (2 * max(1, elements)), 2, 256))


def into_blocks(tree: Any, block: int, mode: str = "edge") -> Any:
    """Arrays ``(n, ...)`` -> ``(blocks, block, ...)``, the last block padded, by its last sample unless told."""

    def split(a: jax.Array) -> jax.Array:
        blocks = -(-a.shape[0] // block)
        padded = jnp.pad(a, [(0, blocks * block - a.shape[0])] + [(0, 0)] * (a.ndim - 1), mode=mode)
        return padded.reshape(blocks, block, *a.shape[1:])

    return jax.tree.map(split, tree)


def map_over_blocks(fn: Callable[[jax.Array], Any], x: jax.Array, block: int) -> Any:
    """``fn(x)``, with a row for each sample, a block at a time."""
    n, parts = len(x), sharding.parts(len(x))

    def in_blocks(x: jax.Array) -> Any:
        found = jax.lax.map(fn, into_blocks(x, block))
        return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[: len(x)], found)

    if parts == 1:
        return in_blocks(x)
    found = jax.vmap(in_blocks)(sharding.keep_rows(x.reshape(parts, n // parts, *x.shape[1:])))
    return jax.tree.map(lambda a: a.reshape(n, *a.shape[2:]), found)


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
    parts = sharding.parts(n)
    if block >= n // parts:
        return fn(weight, *arrays)
    if parts == 1:
        return _sum_over_blocks(fn, block, weight, *arrays)
    # Side by side a block of each part, so that no row leaves its device, and sums meet but once.
    split = [sharding.keep_rows(a.reshape(parts, n // parts, *a.shape[1:])) for a in (weight, *arrays)]
    totals, per_sample = jax.vmap(partial(_sum_over_blocks, fn, block))(*split)
    return jax.tree.map(lambda a: a.sum(0), totals), per_sample.reshape(n, *per_sample.shape[2:])


def _sum_over_blocks(fn: Any, block: int, weight: jax.Array, *arrays: jax.Array) -> tuple[Any, jax.Array]:
    blocks = (into_blocks(weight, block, "constant"), *into_blocks(arrays, block))
    sums = jax.eval_shape(lambda b: fn(*b)[0], jax.tree.map(lambda a: a[0], blocks))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sums)

    def body(total: Any, one: Any) -> tuple[Any, jax.Array]:
        part, per_sample = fn(*one)
        return jax.tree.map(jnp.add, total, part), per_sample

    total, per_sample = jax.lax.scan(body, zeros, blocks)
    return total, per_sample.reshape(-1, *per_sample.shape[2:])[: weight.shape[0]]
