"""Index arithmetic against the rule "children of i are 2 i + 1 and 2 i + 2"."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrees import topology
from tests.oracles import path_to


def test_sizes_are_those_of_perfect_trees():
    for depth in range(1, 17):
        assert topology.num_nodes(depth) + 1 == topology.num_leaves(depth) == 2**depth
        assert topology.depth_of(topology.num_nodes(depth)) == depth
    for nodes in {*range(-5, 300), 4094, 4096, 65536} - {2**depth - 1 for depth in range(1, 9)}:
        with pytest.raises(ValueError, match=f"got {nodes}"):
            topology.depth_of(nodes)


def test_levels_cut_the_node_axis_root_first():
    per_node = np.arange(topology.num_nodes(10), dtype=np.int32)
    levels = [np.asarray(level) for level in jax.jit(topology.levels)(per_node)]
    assert [len(level) for level in levels] == [2**i for i in range(10)]
    assert np.array_equal(np.concatenate(levels), per_node)
    for i, level in enumerate(levels):
        assert np.array_equal(per_node[topology.level(i)], level)
        assert i == 0 or set((level - 1) // 2) == set(levels[i - 1])  # the parents are the level above


def test_paths_to_the_leaves_are_those_of_the_oracle():
    """Nodes above each leaf; and left and right of each node, by children interleaved level by level."""
    depth = 4

    @jax.jit
    def turns():
        result = jnp.zeros((1, 0), jnp.int32)
        for _ in range(depth):
            left, right = (jnp.pad(result, ((0, 0), (0, 1)), constant_values=way) for way in (0, 1))
            result = topology.interleave(left, right)
        return result, topology.ancestors(jnp.arange(2**depth), depth)

    for leaf, (ways, nodes) in enumerate(zip(turns()[0], turns()[1].T, strict=True)):
        assert list(zip(nodes.tolist(), ways.astype(bool).tolist(), strict=True)) == path_to(leaf, depth)


def test_interleave_puts_children_in_order_and_pairs_undoes_it():
    left, right = np.random.default_rng(0).normal(size=(2, 4, 2, 3)).astype(np.float32)
    children = topology.interleave(jnp.asarray(left), jnp.asarray(right))
    assert np.array_equal(children[::2], left) and np.array_equal(children[1::2], right)
    assert np.array_equal(topology.pairs(children), np.stack([left, right], axis=1))
