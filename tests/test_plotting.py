"""The drawing shows what the tree is: one box a node that splits or ends a branch."""

import jax.numpy as jnp
import matplotlib
import pytest

import jtrees
from jtrees.plotting import plot_tree

matplotlib.use("Agg")


def _tree():
    weights = jnp.array([[1.0, 0.0], [0.0, 0.0], [0.5, -2.0]])  # the left child does not split
    return jtrees.ObliqueTree(weights, jnp.array([-1.0, -1.0, 3.0]), jtrees.ConstantLeaves(jnp.arange(4.0)))


def _texts(ax):
    return [text.get_text() for text in ax.texts if text.get_text() not in ("yes", "no")]


def test_draws_splits_and_reachable_leaves():
    ax = plot_tree(_tree(), feature_names=["age", "bmi"])
    assert sorted(_texts(ax)) == sorted(["+1 age\n> 1", "+0.5 age\n-2 bmi\n> -3", "0", "2", "3"])
    matplotlib.pyplot.close(ax.figure)


def test_stops_at_max_depth():
    ax = plot_tree(_tree(), max_depth=1)
    assert sorted(_texts(ax)) == sorted(["+1 x0\n> 1", "0", "..."])
    matplotlib.pyplot.close(ax.figure)


def test_wrong_names():
    with pytest.raises(ValueError, match="feature_names must hold 2 names"):
        plot_tree(_tree(), feature_names=["age"])
