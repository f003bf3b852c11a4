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


def _boxes(ax):
    """The level and the extent of each box, as drawn."""
    ax.figure.canvas.draw()
    return [(text.get_position()[1], text.get_window_extent()) for text in ax.texts if text.get_bbox_patch()]


def _overlaps(ax):
    """Pairs of boxes on one level that lie on each other."""
    boxes = _boxes(ax)
    pairs = [(a, b) for i, (level, a) in enumerate(boxes) for other, b in boxes[:i] if level == other]
    return [(a, b) for a, b in pairs if a.x0 < b.x1 and b.x0 < a.x1]


def _levels_overlap(ax):
    """Whether a box reaches into the next level."""
    boxes = _boxes(ax)
    return any(low < high and below.y1 > above.y0 for low, below in boxes for high, above in boxes)


FAR = jtrees.Origin(np.float32([2000, 0]), np.float32(1e6))


@pytest.mark.parametrize(
    ("origin", "options", "texts"),
    [
        (None, {"feature_names": ["age", "bmi"]}, ["+1 age\n> 1", "+0.5 age\n-2 bmi\n> -3", "0", "2", "3"]),
        (None, {"max_depth": 1}, ["+1 x0\n> 1", "0", "..."]),
        (
            FAR,
            {"feature_names": ["year", "bmi"]},
            ["+1 (year - 2000)\n> 1", "+0.5 (year - 2000)\n-2 bmi\n> -3", "1000000", "1000002", "1000003"],
        ),
    ],
)
def test_draws_splits_and_reachable_leaves(origin, options, texts):
    assert sorted(_texts(plot_tree(_tree().replace(origin=origin), **options))) == sorted(texts)


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
    names = ["a_feature_of_a_long_name", *"abcde"]
    ax = plot_tree(_deep(5, leaves), feature_names=names)
    assert all(text.get_fontsize() >= 8 for text in ax.texts)
    ends = [text for text in _texts(ax) if ">" not in text]
    assert len(ends) == 16 and set(ends) == {"..."}  # of depth 5 four levels are drawn
    ax = plot_tree(_deep(3, jax.tree.map(lambda a: a[:8], leaves)), feature_names=names)
    ends = [text for text in _texts(ax) if ">" not in text]
    assert len(ends) == 8
    for text in ends:
        assert text.endswith(" …") and 1 < len(text.splitlines()) <= 4
        assert all(len(line) <= 18 for line in text.splitlines())
    assert not _overlaps(ax)


@pytest.mark.parametrize("max_terms", [1, 5])
@pytest.mark.parametrize("kind", ["classes", "linear"])
def test_new_axes_have_room_for_as_many_terms_as_are_shown(max_terms, kind):
    leaves = {
        "classes": Frequency(np.full((16, 9), 1 / 9)),
        "linear": Linear(np.full((16, 9), 0.123), np.full(16, -4.5), np.full(16, -100.5), np.full(16, 200.25)),
    }[kind]
    x = np.random.default_rng(0).normal(size=(500, 9))
    how = {"class_names": "abcdefghi", "y": np.arange(500) % 9} if kind == "classes" else {}
    ax = plot_tree(_deep(4, leaves, 9), x=x, max_terms=max_terms, **how)
    assert not _overlaps(ax) and not _levels_overlap(ax)


def test_linear_leaves_show_the_heaviest_features_first():
    linear = Linear(np.array([[0.5, -2], [0, 0], [1, 0], [3, 0.1]]), np.full(4, 7.0))
    tree = _tree(linear).replace(origin=jtrees.Origin(np.float32([0, 50]), np.float32(0)))
    ends = [text.replace("\n", " ") for text in _texts(plot_tree(tree)) if ">" not in text]
    assert ends == ["-2 (x1 - 50) + 0.5 x0 + 7", "x0 + 7", "3 x0 + 0.1 (x1 - 50) + 7"]


def test_several_outputs():
    ax = plot_tree(_tree(Constant(jnp.asarray([[1.0, 2], [3, 4], [5, 6], [7, 8]]))))
    assert {"1, 2", "5, 6", "7, 8"} < set(_texts(ax))


def test_the_terms_that_matter():
    """Weight times deviation is 1, 2, 30 and 4 in the root; without a table weights are all that there is."""
    tree = jtrees.ObliqueTree(np.float32([[1, 2, 0.3, -4]]), np.float32([-1]), Constant(np.arange(2.0)))
    x = np.float64([[1, 1, 100, 1], [-1, -1, -100, -1]])
    condition = lambda **how: _texts(plot_tree(tree, **how))[-1]
    assert condition(x=x) == "+0.3 x2\n-4 x3\n+ 2 smaller terms\n> 1"
    assert condition(x=x, max_terms=3) == "+2 x1\n+0.3 x2\n-4 x3\n+ 1 smaller term\n> 1"
    assert condition() == "+2 x1\n-4 x3\n+ 2 smaller terms\n> 1"
    assert condition(max_terms=None) == "+1 x0\n+2 x1\n+0.3 x2\n-4 x3\n> 1"


def test_linear_leaves_show_the_terms_that_matter():
    tree = _tree(Linear(np.tile(np.float32([[0.5, -2]]), (4, 1)), np.full(4, 7.0)))
    x = np.float64([[100, 1], [-100, -1]])
    ends = lambda **how: {text.replace("\n", " ") for text in _texts(plot_tree(tree, **how)) if ">" not in text}
    assert ends() == {"-2 x1 + 0.5 x0 + 7"}
    assert ends(max_terms=1) == {"-2 x1 + 1 smaller term + 7"}
    assert ends(max_terms=1, x=x) == {f"0.5 x0 + 1 smaller term + 7 {n}" for n in ("0 rows", "1 row")}


def test_classes_by_name_and_their_rows():
    tree = _tree(Frequency(np.float32([[0.25, 0.75]] * 4)))
    x, y = np.float64([[0, 0], [0, 0], [0, 1], [9, 0]]), np.array([1, 1, 0, 1])
    ends = [text for text in _texts(plot_tree(tree, x=x, y=y, class_names=["no", "yes"])) if ">" not in text]
    assert ends[0] == "yes: 0.75,\nno: 0.25\n3 rows\nyes: 2, no: 1"
    assert {text.split("\n", 2)[2] for text in ends[1:]} == {"0 rows", "1 row\nyes: 1"}


def test_wrong_names_and_batches_of_trees_are_refused():
    with pytest.raises(ValueError, match="feature_names must hold 2 names"):
        plot_tree(_tree(), feature_names=["age"])
    with pytest.raises(ValueError, match="the tree must be one tree, got a batch of shape"):
        plot_tree(jax.tree.map(lambda a: jnp.stack([a, a]), _tree()))
