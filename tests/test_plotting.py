"""The drawing shows what the tree is: one box a node that splits or ends a branch."""

import html
import io
import re

import jax
import jax.numpy as jnp
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

import jtrees
from jtrees import losses, plotting
from jtrees.leaves import Linear, Values
from jtrees.plotting import plot_tree

mpl.use("Agg")


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def _tree(leaves=None):
    weights = jnp.array([[1.0, 0.0], [0.0, 0.0], [0.5, -2.0]])  # the left child does not split
    return jtrees.ObliqueTree(weights, jnp.array([-1.0, -1.0, 3.0]), leaves or Values(jnp.arange(4.0)))


def _deep(depth, leaves, p=6):
    rng = np.random.default_rng(0)
    return jtrees.ObliqueTree(rng.normal(size=(2**depth - 1, p)), rng.normal(size=2**depth - 1), leaves)


def _texts(ax):
    return [text.get_text() for text in ax.texts if text.get_text() not in (">", "≤")]


def _boxes(ax):
    """The row and the extent of each box, as drawn."""
    ax.figure.canvas.draw()
    return [(text.get_position()[1], text.get_window_extent()) for text in ax.texts if text.get_bbox_patch()]


def _overlaps(ax):
    boxes = _boxes(ax)
    pairs = [(a, b) for i, (level, a) in enumerate(boxes) for other, b in boxes[:i] if level == other]
    return [(a, b) for a, b in pairs if a.x0 < b.x1 and b.x0 < a.x1]


def _rows_overlap(ax):
    boxes = _boxes(ax)
    return any(low < high and below.y1 > above.y0 for low, below in boxes for high, above in boxes)


@pytest.mark.parametrize(
    ("origin", "options", "texts"),
    [
        (None, {"max_depth": 1}, ["+1 x0\n> 1", "leaf 0:\n0", "..."]),
        (
            jtrees.Origin(np.float32([2000, 0]), np.float32(1e6)),
            {"feature_names": ["year", "bmi"]},
            ["+1 (year - 2000)\n> 1", "+0.5 (year - 2000)\n-2 bmi\n> -3"]
            + [f"leaf {i}:\n100000{i}" for i in (0, 2, 3)],
        ),
    ],
)
def test_draws_splits_and_reachable_leaves(origin, options, texts):
    _, axes = plt.subplots()
    assert plot_tree(_tree().replace(origin=origin), axes, **options) is axes
    assert sorted(_texts(axes)) == sorted(texts)


@pytest.mark.parametrize(
    "leaves",
    [
        Linear(np.full((32, 6), 0.123), np.full(32, -4.5), np.full(32, -100.5), np.full(32, 200.25)),
        Values(np.full((32, 16), 1 / 16), losses.Frequencies()),
    ],
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
        assert 2 < len(text.splitlines()) <= 5
        assert text.endswith(" …") == (not isinstance(leaves, Linear))
        assert all(len(line.removesuffix(" …")) <= 24 for line in text.splitlines())
        assert not re.search(r"\d\n\d|\w\n_", text)  # no number or name is broken
    assert not _overlaps(ax)


def test_new_axes_have_room_for_as_many_terms_as_are_shown():
    x = np.random.default_rng(0).normal(size=(500, 9))
    leaves = Values(np.full((16, 9), 1 / 9), losses.Frequencies())
    ax = plot_tree(_deep(4, leaves, 9), x=x, max_terms=5, class_names="abcdefghi", y=np.arange(500) % 9)
    assert not _overlaps(ax) and not _rows_overlap(ax)


def test_linear_leaves_show_the_heaviest_features_first():
    linear = Linear(np.array([[0.5, -2], [0, 0], [1, 0], [3, 0.1]]), np.full(4, 7.0))
    tree = _tree(linear).replace(origin=jtrees.Origin(np.float32([0, 50]), np.float32(0)))
    ends = lambda **how: [text.replace("\n", " ") for text in _texts(plot_tree(tree, **how)) if ">" not in text]
    assert ends() == ["leaf 3: 3 x0 + 0.1 (x1 - 50) + 7", "leaf 2: x0 + 7", "leaf 0: -2 (x1 - 50) + 0.5 x0 + 7"]
    assert ends(max_terms=1)[-1] == "leaf 0: -2 (x1 - 50) + 1 smaller term + 7"


def test_the_terms_that_matter():
    """Weight times deviation is 1, 2, 30 and 4."""
    tree = jtrees.ObliqueTree(np.float32([[1, 2, 0.3, -4]]), np.float32([-1]), Values(np.arange(2.0)))
    x = np.float64([[1, 1, 100, 1], [-1, -1, -100, -1]])
    condition = lambda **how: _texts(plot_tree(tree, **how))[-1]
    assert condition(x=x, max_terms=3) == "+2 x1\n+0.3 x2\n-4 x3\n+ 1 smaller term\n> 1"
    assert condition() == "+2 x1\n-4 x3\n+ 2 smaller terms\n> 1"


def test_classes_by_name_and_their_rows():
    tree = _tree(Values(np.float32([[0.25, 0.75]] * 4), losses.Frequencies()))
    x, y = np.float64([[0, 0], [0, 0], [0, 1], [9, 0], [9, 9]]), np.array([1, 1, 0, 1, 1])
    ends = [text for text in _texts(plot_tree(tree, x=x, y=y, class_names=["no", "yes"])) if ">" not in text]
    assert ends[-1] == "leaf 0:\nno: 0.25, yes: 0.75\n3 rows\nno: 1, yes: 2"
    assert {text.split("\n", 2)[2] for text in ends[:-1]} == {"1 row\nyes: 1"}


def test_branches_without_rows_are_left_out():
    tree = _tree(Values(np.float32([830, 1, 2, 12345])))
    x = np.float64([[0, 0], [9, 0]])
    assert _texts(plot_tree(tree, x=x)) == ["leaf 3:\n12345\n1 row", "leaf 0:\n830\n1 row", "+1 x0\n> 1"]
    assert _texts(plot_tree(tree, x=x[:1])) == ["leaf 0:\n830\n1 row"]


def test_splits_of_one_direction_show_their_terms_once():
    weights = np.float32([[1, 2], [-1, -2], [2, 4]])
    tree = jtrees.ObliqueTree(weights, np.float32([-1, -2, -8]), Values(np.arange(4.0)))
    texts = [text.get_text() for text in plot_tree(tree).texts if not text.get_text().startswith("leaf")]
    assert sorted(texts)[:3] == ["<", ">", ">"]
    assert [text for text in texts if len(text) > 1] == ["score > 4", "score < -2", "score =\n+1 x0\n+2 x1\nscore > 1"]


def test_drawn_root_is_at_the_top_on_the_left():
    ax = plot_tree(_deep(4, Values(np.arange(16.0))))
    boxes, places = _boxes(ax), [text.get_position() for text in ax.texts if text.get_bbox_patch()]
    root = places.index((min(x for x, _ in places), max(y for _, y in places)))
    assert ax.texts[-1].get_position() == places[root]
    assert boxes[root][1].x0 == min(box.x0 for _, box in boxes) >= 0 and boxes[root][1].y1 <= ax.figure.bbox.y1


def test_drawn_branch_labels_lie_in_no_box_and_name_no_class():
    tree = _tree(Values(np.float32([[0.25, 0.75]] * 4), losses.Frequencies()))
    ax = plot_tree(tree, class_names=["no", "yes"])
    ax.figure.canvas.draw()
    labels = [text for text in ax.texts if not text.get_bbox_patch()]
    assert sorted(label.get_text() for label in labels) == [">", ">", "≤", "≤"]
    for label in labels:
        extent = label.get_window_extent()
        assert not any(extent.overlaps(box) for _, box in _boxes(ax))


def test_thresholds_that_differ_are_drawn_and_printed_differently():
    """Two digits show 0.41 twice."""
    weights, thresholds = np.ones((3, 1)), np.array([0.4108, 0.4137, 0.52])
    tree = jtrees.ObliqueTree(weights, -thresholds, Values(np.arange(4.0)))
    assert sorted(text.split("> ")[1] for text in _texts(plot_tree(tree)) if ">" in text) == ["0.411", "0.414", "0.52"]
    close = tree.replace(bias=-np.array([0.4108, 0.41084, 0.52]))
    lines = [line.strip().split(" > ")[1] for line in close.to_text().splitlines() if " > " in line]
    assert lines == ["0.4108:", "0.52:", "0.41084:"]


def test_features_that_are_means_of_classes_have_the_names_of_the_classes():
    city = np.random.default_rng(0).choice([f"city {i}" for i in range(40)], 400)
    frame = pd.DataFrame({"city": city})
    encoder, _ = jtrees.tables.TableEncoder.fit(frame, np.char.str_len(city.astype(str)) == 6, task="classification")
    leaves = Values(np.float32([[0.9, 0.1], [0.1, 0.9]]), losses.Frequencies())
    model = jtrees.tables.FrameModel(jtrees.ObliqueTree(np.float32([[1]]), np.float32([-0.5]), leaves), encoder)
    names = {"class_names": ["no", "yes"]}
    [ax] = plotting.plot_splits(model, frame, **names)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["[mean yes by city]"]
    assert "[mean class 1 by city]" in model.to_text() and "yes: 0.9" in model.to_text(**names)
    for shown in (model.to_text(**names), " ".join(_texts(plot_tree(model, **names)))):
        assert "[mean yes by city]" in shown and "class 1" not in shown


def _raw():
    """A tree of a raw table: right iff area, in twenties, and gas add up to more than four."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"area": rng.uniform(0, 100, 200), "heating": rng.choice(["gas", "oil"], 200)})
    columns, x = jtrees.tables.TableEncoder.fit(frame)
    assert columns.feature_names == ["area", "[heating = gas]"]
    tree = jtrees.ObliqueTree(np.float32([[0.05, 1]]), np.float32([-4]), Values(np.arange(2.0)))
    return jtrees.tables.FrameModel(tree, columns), frame, x


def test_splits_as_bars():
    model, frame, x = _raw()
    [ax] = plotting.plot_splits(model, frame)
    size = np.array([0.05, 1]) * x[:, :2].std(0)
    np.testing.assert_allclose([bar.get_width() for bar in ax.patches], size / size.sum(), rtol=1e-6)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["area", "[heating = gas]"]
    share = (x @ [0.05, 1] > 4).mean()
    assert ax.get_title() == f"node 0: 100% of rows, {share:.0%} go right" and 0.1 < share < 0.9
    assert _texts(plot_tree(model, x=frame))[-1] == "+0.05 area\n+1 [heating = gas]\n> 4"
    axes = plotting.plot_splits(_deep(4, Values(np.zeros(16))), np.zeros((50, 6)) + np.arange(50)[:, None], max_terms=2)
    assert axes.shape == (8,) and all(len(ax.patches) == 2 for ax in axes) and len(axes[0].figure.axes) == 8
    assert axes[0].get_xlabel().startswith("left      share of the score, 4 smaller")


def test_leaves_of_several_outputs_quantiles_and_policies():
    model, frame, x = _raw()
    leaf = (x @ [0.05, 1] > 4).astype(int)
    replaced = lambda leaves: model.replace(model=model.model.replace(leaves=leaves))
    quantiles = replaced(Values(np.float32([[1, 3], [8, 6]]), losses.Quantile((0.1, 0.9))))
    assert _texts(plot_tree(quantiles))[:2] == ["leaf 1:\n6, 8", "leaf 0:\n1, 3"]
    policy = replaced(Values(np.float32([[1e4, 0], [0, 1e4]]), losses.Rewards()))
    rewards = np.stack([np.where(leaf, 1.0, 2), np.where(leaf, 5.0, -1)], 1)
    texts = _texts(plot_tree(policy, x=frame, y=rewards, class_names=["wait", "treat"]))
    assert [text.split("\n")[:2] for text in texts[:2]] == [["leaf 1:", "treat"], ["leaf 0:", "wait"]]
    with pytest.raises(ValueError, match="y must hold the rewards of 2 actions"):
        plot_tree(policy, x=frame, y=leaf)


def test_other_models_and_wrong_names_are_refused():
    batch = jax.tree.map(lambda a: jnp.stack([a, a]), _tree())
    for model, options, message in (
        (_tree(), {"feature_names": ["age"]}, "feature_names must hold 2 names"),
        (_tree(), {"x": np.zeros((3, 3))}, "x must have 2 columns, got 3"),
        (_raw()[0], {"feature_names": ["a", "b", "c"]}, "feature_names must be None: the columns of this model"),
        (batch, {}, "model must be a single tree, got a batch of shape"),
    ):
        with pytest.raises(ValueError, match=message):
            plot_tree(model, **options)
    unsplit = jtrees.ObliqueTree(np.zeros((1, 2)), np.ones(1), Values(np.zeros(2)))
    for model, message in ((jtrees.Forest(batch), "model must be a single tree"), (unsplit, "must have a split")):
        with pytest.raises(ValueError, match=message):
            plotting.plot_splits(model, np.zeros((3, 2)))


@pytest.mark.parametrize("name", ["$p_1$", "$x_{", r"\$y$"])
def test_dollar_signs_are_drawn_as_they_are(name):
    """Between two dollar signs, matplotlib would read mathematics, and fail where it is none."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({name: rng.normal(size=90), "level": rng.choice([name, "other"], 90)})
    columns, _ = jtrees.tables.TableEncoder.fit(frame)
    leaves = Values(np.float32([[0.9, 0.1], [0.1, 0.9]]), losses.Frequencies())
    model = jtrees.tables.FrameModel(jtrees.ObliqueTree(np.float32([[1, 1]]), np.float32([0]), leaves), columns)
    named = {"class_names": [name, "no"]}
    plots = plot_tree(model, x=frame, **named), plotting.plot_splits(model, frame, **named)[0]
    with mpl.rc_context({"svg.fonttype": "none"}):  # text remains text
        for ax in plots:
            file = io.StringIO()
            ax.figure.savefig(file, format="svg")
            assert name in html.unescape(re.sub("<!--.*?-->", "", file.getvalue()))
