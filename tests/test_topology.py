"""Index arithmetic against the rule "children of i are 2 i + 1 and 2 i + 2"."""

from hypothesis import given, strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from oracles import path_to
import pytest

from jtrees import topology


def children_and_pairs(left, right):
    children = topology.interleave(left, right)
    return children, topology.pairs(children)


@pytest.mark.parametrize(("depth", "nodes", "leaves"), [(1, 1, 2), (2, 3, 4), (5, 31, 32), (16, 65535, 65536)])
def test_sizes(depth, nodes, leaves):
    assert topology.num_nodes(depth) == nodes
    assert topology.num_leaves(depth) == leaves
    assert topology.depth_of(nodes) == depth


@given(st.integers(-5, 5000))
def test_depth_of_accepts_only_perfect_trees(nodes):
    if nodes in {1, 3, 7, 15, 31, 63, 127, 255, 511, 1023, 2047, 4095}:
        assert 2 ** topology.depth_of(nodes) - 1 == nodes
    else:
        with pytest.raises(ValueError, match=f"got {nodes}"):
            topology.depth_of(nodes)


@pytest.mark.parametrize("depth", range(1, 11))
def test_levels_cut_the_node_axis_root_first(depth):
    per_node = np.arange(topology.num_nodes(depth), dtype=np.int32)
    levels = [np.asarray(level) for level in jax.jit(topology.levels)(per_node)]
    assert [len(level) for level in levels] == [2**i for i in range(depth)]
    assert np.array_equal(np.concatenate(levels), per_node)
    for i, level in enumerate(levels):
        assert np.array_equal(per_node[topology.level(i)], level)
        if i:
            assert set((level - 1) // 2) == set(levels[i - 1])  # the parents are the level above


def test_children_interleaved_level_by_level_are_the_paths_to_the_leaves():
    """The numbering is that of the oracle: left and right of each node, told by bits, root first."""
    depth = 4

    @jax.jit
    def turns():
        found = jnp.zeros((1, 0), jnp.int32)
        for _ in range(depth):
            left, right = (jnp.pad(found, ((0, 0), (0, 1)), constant_values=way) for way in (0, 1))
            found = topology.interleave(left, right)
        return found

    for leaf, ways in enumerate(turns()):
        assert ways.astype(bool).tolist() == [right for _, right in path_to(leaf, depth)]


@pytest.mark.parametrize("trailing", [(), (5,), (2, 3)])
def test_interleave_puts_children_in_order_and_pairs_undoes_it(trailing):
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(2, 4, *trailing)).astype(np.float32)
    children, both = jax.jit(children_and_pairs)(left, right)
    for parent in range(4):
        assert np.array_equal(children[2 * parent], left[parent])
        assert np.array_equal(children[2 * parent + 1], right[parent])
    assert both.shape == (4, 2, *trailing)
    assert np.array_equal(both[:, 0], left)
    assert np.array_equal(both[:, 1], right)
