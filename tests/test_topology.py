"""Index arithmetic against the rule "children of i are 2 i + 1 and 2 i + 2"."""

from hypothesis import given, strategies as st
import jax.numpy as jnp
import numpy as np
from oracles import path_to
import pytest

from jtrees import topology

depths = st.integers(1, 10)


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


@given(depths)
def test_levels_cut_the_node_axis_root_first(depth):
    per_node = np.arange(topology.num_nodes(depth))
    levels = [np.asarray(level) for level in topology.levels(jnp.asarray(per_node))]
    assert [len(level) for level in levels] == [2**i for i in range(depth)]
    assert np.array_equal(np.concatenate(levels), per_node)
    for i, level in enumerate(levels):
        assert np.array_equal(per_node[topology.level(i)], level)
        if i:
            assert set((level - 1) // 2) == set(levels[i - 1])  # the parents are the level above


@given(depths)
def test_ancestors_and_directions_are_the_path_to_the_leaf(depth):
    ancestors, directions = topology.ancestors(depth), topology.directions(depth)
    assert ancestors.shape == directions.shape == (2**depth, depth)
    assert directions.dtype == bool
    for leaf in {0, 2**depth // 3, 2**depth - 1}:
        assert list(zip(ancestors[leaf], directions[leaf], strict=True)) == path_to(leaf, depth)


@pytest.mark.parametrize("trailing", [(), (5,), (2, 3)])
def test_interleave_puts_children_in_order_and_pairs_undoes_it(trailing):
    rng = np.random.default_rng(0)
    left, right = (jnp.asarray(rng.normal(size=(4, *trailing)), jnp.float32) for _ in range(2))
    children = topology.interleave(left, right)
    for parent in range(4):
        assert np.array_equal(children[2 * parent], left[parent])
        assert np.array_equal(children[2 * parent + 1], right[parent])
    both = topology.pairs(children)
    assert both.shape == (4, 2, *trailing)
    assert np.array_equal(both[:, 0], left)
    assert np.array_equal(both[:, 1], right)
