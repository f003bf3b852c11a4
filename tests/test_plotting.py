"""The drawing shows what the tree is: one box a node that splits or ends a branch."""

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest

import jtrees
from jtrees.leaves import Constant, Frequency, Linear
from jtrees.plotting import plot_tree

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def closed():
    yield
    matplotlib.pyplot.close("all")


def _tree(leaves=None):
    weights = jnp.array([[1.0, 0.0], [0.0, 0.0], [0.5, -2.0]])  # the left child does not split
    return jtrees.ObliqueTree(weights, jnp.array([-1.0, -1.0, 3.0]), leaves or Constant(jnp.arange(4.0)))


def _deep(depth, leaves, p=6):
    rng = np.random.default_rng(0)
    return jtrees.ObliqueTree(rng.normal(size=(2**depth - 1, p)), rng.normal(size=2**depth - 1), leaves)


def _texts(ax):
    return [text.get_text() for text in ax.texts if text.get_text() not in ("yes", "no")]


def _overlaps(ax):
    """Pairs of boxes on one level that lie on each other, as drawn."""
    ax.figure.canvas.draw()
    boxes = [(text.get_position()[1], text.get_window_extent()) for text in ax.texts if text.get_bbox_patch()]
    pairs = [(a, b) for i, (level, a) in enumerate(boxes) for other, b in boxes[:i] if level == other]
    return [(a, b) for a, b in pairs if a.x0 < b.x1 and b.x0 < a.x1]


def test_draws_splits_and_reachable_leaves():
    ax = plot_tree(_tree(), feature_names=["age", "bmi"])
    assert sorted(_texts(ax)) == sorted(["+1 age\n> 1", "+0.5 age\n-2 bmi\n> -3", "0", "2", "3"])


def test_stops_at_max_depth():
    ax = plot_tree(_tree(), max_depth=1)
    assert sorted(_texts(ax)) == sorted(["+1 x0\n> 1", "0", "..."])


def test_draws_on_axes_that_are_given():
    _, given = matplotlib.pyplot.subplots()
    assert plot_tree(_tree(), given) is given


@pytest.mark.parametrize(
    "leaves",
    [
        Linear(np.full((32, 6), 0.123), np.full(32, -4.5), np.full(32, -100.5), np.full(32, 200.25)),
        Linear(np.full((32, 6, 3), 0.123), np.full((32, 3), -4.5)),
        Frequency(np.full((32, 12), 1 / 12)),
    ],
    ids=["linear between bounds", "linear of three outputs", "twelve classes"],
)
def test_text_is_large_enough_to_read_and_long_ones_are_cut(leaves):
    ax = plot_tree(_deep(5, leaves), feature_names=["a_feature_of_a_long_name", *"abcde"])
    assert all(text.get_fontsize() >= 8 for text in ax.texts)
    ends = [text for text in _texts(ax) if ">" not in text]
    assert len(ends) == 16 and set(ends) == {"..."}  # of depth 5 four levels are drawn
    ax = plot_tree(
        _deep(3, jax.tree.map(lambda a: a[:8], leaves)), feature_names=["a_feature_of_a_long_name", *"abcde"]
    )
    ends = [text for text in _texts(ax) if ">" not in text]
    assert len(ends) == 8
    for text in ends:
        assert text.endswith(" …") and 1 < len(text.splitlines()) <= 4
        assert all(len(line) <= 18 for line in text.splitlines())
    assert not _overlaps(ax)


def test_boxes_of_the_deepest_drawn_level_do_not_overlap():
    assert not _overlaps(plot_tree(_deep(4, Constant(np.arange(16.0)))))


def test_linear_leaves_show_the_heaviest_features_first():
    linear = Linear(np.array([[0.5, -2], [0, 0], [1, 0], [3, 0.1]]), np.full(4, 7.0))
    tree = _tree(linear).replace(origin=jtrees.Origin(np.float32([0, 50]), np.float32(0)))
    ends = [text.replace("\n", " ") for text in _texts(plot_tree(tree)) if ">" not in text]
    assert ends == ["-2 (x1 - 50) + 0.5 x0 + 7", "x0 + 7", "3 x0 + 0.1 (x1 - 50) + 7"]


def test_several_outputs():
    ax = plot_tree(_tree(Constant(jnp.asarray([[1.0, 2], [3, 4], [5, 6], [7, 8]]))))
    assert {"1, 2", "5, 6", "7, 8"} < set(_texts(ax))


def test_features_and_answers_counted_from_an_origin():
    tree = _tree().replace(origin=jtrees.Origin(np.float32([2000, 0]), np.float32(1e6)))
    ax = plot_tree(tree, feature_names=["year", "bmi"])
    expected = ["+1 (year - 2000)\n> 1", "+0.5 (year - 2000)\n-2 bmi\n> -3", "1000000", "1000002", "1000003"]
    assert sorted(_texts(ax)) == sorted(expected)


def test_wrong_names():
    with pytest.raises(ValueError, match="feature_names must hold 2 names"):
        plot_tree(_tree(), feature_names=["age"])


def test_a_batch_of_trees():
    with pytest.raises(ValueError, match="the tree must be one tree, got a batch of shape"):
        plot_tree(jax.tree.map(lambda a: jnp.stack([a, a]), _tree()))
