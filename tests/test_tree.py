"""The hard tree: evaluation, inspection, pruning, merging, texts, pytrees, and what is refused."""

import re

from hypothesis import given, strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrees import ObliqueTree, Origin, losses
from jtrees.leaves import Linear, Values
from jtrees.text import with_short_origin
from tests import oracles, rules

DEPTH, P = 3, 3
ROWS = 256  # a block: whatever fewer rows compile is compiled once


def draw(seed=0, outputs=(), linear=False):
    """A tree of small whole numbers, whose scores are exact in float32 and sometimes zero."""
    rng = np.random.default_rng(seed)
    ints = lambda *shape: jnp.asarray(rng.integers(-3, 4, shape), jnp.float32)
    leaves = Linear(ints(8, P), ints(8), -(ints(8) ** 2), ints(8) ** 2) if linear else Values(ints(8, *outputs))
    return ObliqueTree(ints(7, P), ints(7), leaves)


def samples(n=ROWS, seed=1):
    return np.random.default_rng(seed).integers(-4, 5, (n, P)).astype(np.float32)


def walk(tree, x):
    return oracles.walk(tree.weights, tree.bias, x)


@pytest.fixture
def small_tree():
    """The root splits on two features; its left child sends all left; its right child splits on one feature."""
    weights = jnp.asarray([[1.0, -2.5, 0], [0, 0, 0], [0, 0, -1]])
    values = jnp.asarray([0.5, 9, -1.25, 1e-4])
    return ObliqueTree(weights, jnp.asarray([-3.0, -1, 0.5]), Values(values))


@pytest.fixture
def far():
    return Origin(np.array([2000, 0, -1e8], np.float32), np.float32(1e6))


@pytest.mark.parametrize("kind", [{}, {"outputs": (2,)}, {"linear": True}])
def test_predict_answers_with_the_model_of_the_leaf(kind):
    tree, x = draw(**kind), samples()
    leaf, leaves = walk(tree, x), jax.tree.map(np.asarray, tree.leaves)
    if "linear" in kind:
        free = (leaves.coefficients[leaf] * x).sum(1) + leaves.intercept[leaf]
        expected = np.clip(free, leaves.lower[leaf], leaves.upper[leaf])
        assert (expected == free).any() and (expected > free).any() and (expected < free).any()
    else:
        expected = leaves.values[leaf]
    assert isinstance(tree.predict(x), np.ndarray) and isinstance(tree.predict(jnp.asarray(x)), jax.Array)
    for rows in (x, x.astype(int).tolist(), jnp.asarray(x, jnp.int32)):  # anything array-like
        assert np.array_equal(tree.predict(rows), expected)


@given(st.integers(0, 10**6), st.integers(1, 6))
def test_prune_keeps_every_prediction_and_every_useful_split(seed, different):
    tree = draw(seed)
    x = samples(8, seed)[np.arange(8) % different]
    pruned = tree.prune(x)
    assert np.array_equal(pruned.predict(x), tree.predict(x))
    assert np.array_equal(pruned.leaf_index(x), walk(tree, x))
    # A tree that divides this data everywhere has as many leaves as the data reach.
    assert pruned.num_leaves == len(set(walk(tree, x).tolist()))
    assert pruned.splits.sum() == pruned.num_leaves - 1 <= tree.splits.sum()
    assert jax.tree.all(jax.tree.map(np.array_equal, pruned.prune(x), pruned))


def reachable_answers(tree, node):
    """The rows of the leaves that can be reached below a node, as sets of bytes, one leaf at a time."""
    nodes = len(tree.bias)
    if node >= nodes:
        return {b"".join(np.asarray(a)[node - nodes].tobytes() for a in jax.tree.leaves(tree.leaves))}
    if np.any(np.asarray(tree.weights[node])):
        return reachable_answers(tree, 2 * node + 1) | reachable_answers(tree, 2 * node + 2)
    return reachable_answers(tree, 2 * node + 1 + int(tree.bias[node] > 0))


@pytest.mark.slow
@given(st.integers(0, 10**6), st.sampled_from(["constant", "two outputs", "linear", "bounded"]), st.integers(2, 4))
def test_merging_keeps_every_prediction_and_leaves_no_split_of_equal_leaves(seed, kind, different):
    rng = np.random.default_rng(seed)
    which = rng.integers(0, different, 8)  # few different leaves, some of them side by side
    leaves = {
        "constant": Values(rng.normal(size=8)[which]),
        "two outputs": Values(np.stack([np.zeros(8), rng.normal(size=8)[which]], axis=1)),
        "linear": Linear(rng.normal(size=(8, P))[which], rng.normal(size=8)[which]),
        "bounded": Linear(np.zeros((8, P)), np.zeros(8), -np.ones(8), rng.uniform(size=8)[which]),
    }[kind]
    tree = draw(seed).replace(leaves=jax.tree.map(lambda a: a.astype(np.float32), leaves))
    stump = (rng.uniform(size=7) < 0.5)[:, None]
    tree = tree.replace(weights=jnp.where(stump, 0, tree.weights))
    merged, x = tree.merged(), samples()
    assert merged.predict(x).tobytes() == tree.predict(x).tobytes()
    assert reachable_answers(merged, 0) == reachable_answers(tree, 0)
    assert all(len(reachable_answers(merged, node)) > 1 for node in np.flatnonzero(merged.splits))
    # What had to stay has stayed as it was, and the leaves are untouched.
    stay = [node for node in np.flatnonzero(tree.splits) if len(reachable_answers(tree, node)) > 1]
    assert np.array_equal(merged.weights[stay, :], tree.weights[stay, :])
    assert np.array_equal(merged.bias[stay,], tree.bias[stay,])
    assert merged.leaves is tree.leaves
    assert jax.tree.all(jax.tree.map(np.array_equal, merged.merged(), merged))
    stacked = jax.tree.map(lambda *a: np.stack(a), tree, draw(seed + 1).replace(leaves=tree.leaves)).merged()
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a[0], b), stacked, merged))


def test_leaves_that_differ_in_one_bit_are_not_merged():
    values = np.full(8, 0.1, np.float32)
    values[3] = np.nextafter(values[3], np.float32(1))
    tree = draw().replace(leaves=Values(values)).merged()
    assert tree.splits.tolist() == [True, True, False, False, True, False, False]
    assert tree.num_leaves == 4
    values[3], values[:3] = 0.0, -0.0  # equal numbers, other bits: 1 / x tells them apart
    assert draw().replace(leaves=Values(values)).merged().splits[4]


def test_sizes_by_hand(small_tree):
    assert (small_tree.depth, small_tree.features, small_tree.num_leaves) == (2, 3, 3)
    assert small_tree.splits.tolist() == [True, False, True]
    assert small_tree.num_parameters == (2 + 1) + (1 + 1) + 3
    linear = Linear(jnp.asarray([[1.0, 2, 0], [5, 5, 5], [0, 0, 0], [0, 3, 0]]), jnp.ones(4))
    assert small_tree.replace(leaves=linear).num_parameters == 5 + (2 + 0 + 1) + 3
    assert draw().num_leaves == 8  # no node of this tree is all zero


def test_text_of_the_terms_that_matter(small_tree):
    """By weight times deviation: 1 * 10 for age, 2.5 * 2 for bmi."""
    x = np.float64([[0, 0, 0], [20, 4, 0]])
    assert small_tree.to_text(["age", "bmi", "bp"], x=x, max_terms=1).startswith("if age + 1 smaller term > 3:")
    assert small_tree.to_text(["age", "bmi", "bp"], max_terms=1).startswith("if -2.5 bmi + 1 smaller term > 3:")
    moved = small_tree.replace(origin=Origin(np.float32([0, 1e8, 0]), None))
    assert moved.to_text(x=x + np.float64([0, 1e8, 0]), max_terms=1).startswith("if x0 + 1 smaller term > 3:")


def test_text_of_classes_and_their_rows(small_tree):
    leaves = Values(np.float32([[0.25, 0.75], [0, 1], [1, 0], [0.5, 0.5]]), losses.Frequencies())
    tree = small_tree.replace(leaves=leaves)
    x, y = np.float64([[9, 0, 0]] * 3 + [[0, 0, 0]] * 5), np.array([0, 0, 1, 1, 1, 1, 1, 0])
    text = tree.to_text(["age", "bmi", "bp"], class_names=["no", "yes"], x=x, y=y)
    lines = [
        "if age - 2.5 bmi > 3:",
        "|   if -bp > -0.5:",
        "|   |   -> leaf 3: no: 0.5, yes: 0.5 (3 rows; no: 2, yes: 1)",
        "|   else:",
        "|   |   -> leaf 2: no: 1, yes: 0 (0 rows)",
        "else:",
        "|   -> leaf 0: no: 0.25, yes: 0.75 (5 rows; no: 1, yes: 4)",
    ]
    assert text == "\n".join(lines)
    assert tree.to_text(class_names=["no", "yes"], x=x).endswith("-> leaf 0: no: 0.25, yes: 0.75 (5 rows)")
    assert tree.to_text(x=x, y=y).endswith("-> leaf 0: 0.25, 0.75 (5 rows; class 0: 1, class 1: 4)")
    assert tree.to_text(x=x[-1:], y=y[-1:]).endswith("-> leaf 0: 0.25, 0.75 (1 row; class 0: 1)")
    assert tree.to_text().endswith("-> leaf 0: 0.25, 0.75")


def test_text_of_a_policy_and_of_its_rewards(small_tree):
    tree = small_tree.replace(leaves=Values(jnp.array([[1e4, 0], [0, 1e4], [0, 1e4], [0, 0]]), losses.Rewards()))
    ends = lambda **options: re.findall("-> leaf [0-3]: (.*)", tree.to_text(**options))
    assert ends() == ["0.5, 0.5", "0, 1", "1, 0"] and (tree.classes, tree.is_policy) == (2, True)
    names = {"class_names": ["wait", "treat"]}
    assert ends(**names) == ["wait: 0.5, treat: 0.5", "treat", "wait"]
    x, rewards = np.array([[9.0, 0, 9], [9.0, 0, 9], [0, 0, 0]]), np.array([[1, 0.5], [0, 1], [3, -2]])
    assert ends(x=x, y=rewards, **names)[1] == "treat (2 rows; mean reward of treat: 0.75, wait: 0.5)"
    with pytest.raises(ValueError, match=r"y must hold the rewards of 2 actions, \(3, 2\), got \(3,\)"):
        tree.to_text(x=x, y=np.zeros(3))


def test_splits_of_one_direction_divide_a_score_that_is_written_once():
    weights = np.float32([[2, -1, 0], [-4, 2, 0], [3, -1.5, 0]])  # the second has the opposite direction
    tree = ObliqueTree(weights, np.float32([-1, -2, -900]), Values(np.arange(4.0)))
    assert tree.to_text(["a", "b", "score"]).startswith("score of the tree = 2 a - b\n")
    text = tree.to_text()
    assert text.splitlines()[:3] == ["score = 2 x0 - x1", "if score > 1:", "|   if score > 600:"]
    assert text.count("x0") == 1 and "if score < -1:" in text
    x = np.random.default_rng(0).normal(size=(ROWS, 3)) * np.where(np.arange(ROWS) < 128, 400, 1)[:, None]
    leaf, answers = rules.leaves_and_answers(text, dict(zip(("x0", "x1", "x2"), x.astype(np.float32).T, strict=True)))
    np.testing.assert_array_equal(leaf, tree.leaf_index(x))
    np.testing.assert_array_equal(answers[:, 0], tree.predict(x))
    assert set(leaf.tolist()) == {0, 1, 2, 3}
    bent = weights + np.float32([[0, 0, 0], [0, 0.01, 0], [0, 0, 0]])
    assert "score" not in tree.replace(weights=bent).to_text() + tree.to_text(digits=17)


def test_what_a_text_is_made_of_is_checked(small_tree):
    classes = small_tree.replace(leaves=Values(np.full((4, 2), 0.5, np.float32), losses.Frequencies()))
    x = np.zeros((2, 3))
    for tree, arguments, message in [
        (classes, {"class_names": ["no"]}, "class_names must hold 2 names, one a class, got 1"),
        (classes, {"feature_names": ["age"]}, "feature_names must hold 3"),
        (small_tree, {"class_names": ["no", "yes"]}, "class_names must be None: the leaves of this tree hold no class"),
        (small_tree, {"x": x, "y": [0, 1]}, "y must be None: the leaves of this tree hold no class"),
        (classes, {"x": x, "y": [0, 2]}, "y must hold classes 0..1, got labels from 0 to 2"),
        (classes, {"x": x, "y": [0]}, "x and y must have the same number of rows, got 2 and 1"),
    ]:
        with pytest.raises(ValueError) as error:
            tree.to_text(**arguments)
        assert message in str(error.value)


FAR = np.float32([123456792, 0, -1e8])  # 123456790 reads back as the same float32
KINDS = ["two outputs", "bounded", "linear, two outputs"]


def far_tree(kind, draw_numbers):
    """A tree for a table far from zero, and its origin; ``draw_numbers(*shape)`` draws weights and leaves."""
    bound = lambda side: side * np.abs(draw_numbers(8))
    leaves = {
        "two outputs": lambda: Values(draw_numbers(8, 2)),
        "bounded": lambda: Linear(draw_numbers(8, P), draw_numbers(8), bound(-1), bound(1)),
        "linear, two outputs": lambda: Linear(draw_numbers(8, P, 2), draw_numbers(8, 2)),
    }[kind]()
    y_zero = np.float32([123456792, -16777217])[: 2 if "two" in kind else 1]
    origin = Origin(FAR, y_zero if "two" in kind else y_zero[0])
    return ObliqueTree(draw_numbers(7, P), draw_numbers(7), leaves, origin)


def read(tree, x, digits):
    """Numbers of the leaves and answers of the rules of a tree, computed in float64."""
    columns = {f"x{j}": column for j, column in enumerate(np.asarray(x, np.float64).T)}
    return rules.leaves_and_answers(tree.to_text(digits=digits), columns)


@given(st.integers(0, 10**6), st.sampled_from(KINDS))
def test_rules_with_all_digits_are_the_tree(seed, kind):
    """Any numbers: only rows that float32 cannot tell from the threshold may differ."""
    rng = np.random.default_rng(seed)
    tree = far_tree(kind, lambda *shape: rng.normal(size=shape).astype(np.float32))
    x = FAR + rng.normal(size=(ROWS, P)) * 10.0
    scores = (x - FAR.astype(np.float64)) @ np.float64(tree.weights).T + np.float64(tree.bias)
    x = x[(np.abs(scores) > 1e-4).all(1)]
    leaf, answers = read(tree, x, 17)
    assert np.array_equal(leaf, tree.leaf_index(x)) and len(x) > ROWS / 2
    np.testing.assert_allclose(answers, np.reshape(tree.predict(x), (len(x), -1)), rtol=0, atol=1e-4)


def test_repr(small_tree):
    assert repr(small_tree).startswith("ObliqueTree(depth=2, features=3, splits=2, leaves=3, ")
    texts = []
    jax.eval_shape(lambda tree: texts.append(repr(tree)), small_tree)
    assert texts[0].startswith("ObliqueTree(weights=")


def test_numpy_samples_meet_a_traced_tree(small_tree, far):
    x = samples()
    for tree, shift in ((small_tree, 0), (small_tree.replace(origin=far), far.x)):
        # Leaves of small whole numbers, so that in float32, too, the origin of the targets rounds nothing away.
        tree = tree.replace(leaves=Values(jnp.arange(4.0)))
        batch = jax.tree.map(lambda a: jnp.stack([jnp.asarray(a), -jnp.asarray(a)]), tree)
        answers = jax.jit(jax.vmap(lambda tree: tree.predict(x + shift)))(batch)  # noqa: B023
        assert np.array_equal(answers[0], tree.predict(x + shift))


def test_batches_of_trees_are_refused(small_tree):
    batch, x = jax.tree.map(lambda a: jnp.stack([a, -a]), small_tree), samples(5)
    for name in ("predict", "leaf_index", "decision_path", "prune", "to_text", "splits", "num_leaves"):
        with pytest.raises(ValueError, match=r"the tree must be one tree, got a batch of shape \(2,\)"):
            getattr(batch, name)(*[x] * (name != "to_text"))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros(P), "shape .n, p."),
        (np.zeros((2, P + 1)), "3 columns, got 4"),
        ([["a", "b", "c"]], "numeric"),
        ([[1.0, np.inf, 0], [np.nan, 0, 0]], "finite, got 2 "),
    ],
    ids=["1d", "wide", "strings", "infinite"],
)
def test_bad_x_is_refused(x, message, far):
    tree = draw().replace(origin=far)
    for method in (tree.predict, tree.leaf_index, tree.decision_path, tree.prune):
        with pytest.raises(ValueError, match=f"x must .*{message}"):
            method(x)


def test_origins_in_rules_have_few_digits():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3)) * [30, 0.02, 1] + [1967.6204, 100.123456, 0]
    origin = Origin(np.float32([1967.6204, 100.12345, 0]), np.float32(50.5))
    leaves = Linear(np.float32(rng.normal(size=(4, 3))), np.float32(rng.normal(size=4)))
    weights = np.float32(rng.normal(size=(3, 3)))
    tree = ObliqueTree(weights, np.float32(rng.normal(size=3)), leaves, origin)
    short = with_short_origin(tree, x.std(0), 3)
    np.testing.assert_allclose(short.origin.x, [1970, 100.12, 0], rtol=1e-12)
    score = lambda tree: (x - np.float64(tree.origin.x)) @ np.float64(tree.weights).T + np.float64(tree.bias)
    np.testing.assert_allclose(score(short), score(tree), atol=1e-9)
    text = tree.to_text(["built", "warm", "other"], x=x)
    assert "(built - 1970)" in text and "(warm - 100.12)" in text and "1967" not in text
    assert "(built - 1967.620361328125)" in tree.to_text(["built", "warm", "other"], x=x, digits=17)
