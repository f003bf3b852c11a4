"""The hard tree: evaluation, inspection, pruning, pytrees, and its door."""

from hypothesis import given, strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from jtrees import ConstantLeaves, LinearLeaves, ObliqueTree, blocking

DEPTH, P = 3, 3
BLOCK = blocking.prediction_block(DEPTH)


def draw(seed=0, outputs=(), linear=False):
    """A tree of small whole numbers, whose scores are exact in float32 and sometimes zero."""
    rng = np.random.default_rng(seed)
    whole = lambda *shape: jnp.asarray(rng.integers(-3, 4, shape), jnp.float32)
    leaves = LinearLeaves(whole(8, P), whole(8)) if linear else ConstantLeaves(whole(8, *outputs))
    return ObliqueTree(whole(7, P), whole(7), leaves)


def samples(n, seed=1):
    """As many rows as asked for, repeating 257 different ones, so that the walk is short."""
    return np.random.default_rng(seed).integers(-4, 5, (257, P)).astype(np.float32)[np.arange(n) % 257]


def walk(tree, x):
    return oracles.walk(tree.weights, tree.bias, x[:257])[np.arange(len(x)) % 257]


@pytest.fixture
def small_tree():
    """The root splits on two features; its left child sends all left; its right child splits on one feature."""
    weights = jnp.asarray([[1.0, -2.5, 0], [0, 0, 0], [0, 0, -1]])
    values = jnp.asarray([0.5, 9, -1.25, 1e-4])
    return ObliqueTree(weights, jnp.asarray([-3.0, -1, 0.5]), ConstantLeaves(values))


@pytest.mark.parametrize("n", [1, 2, 257, BLOCK - 1, BLOCK, BLOCK + 1, 2**16 + 3])
def test_leaf_index_is_the_walk_for_every_number_of_rows(n):
    tree, x = draw(), samples(n)
    leaf = tree.leaf_index(x)
    assert isinstance(leaf, np.ndarray)
    assert leaf.dtype == np.int32
    assert np.array_equal(leaf, walk(tree, x))
    on_device = tree.leaf_index(jnp.asarray(x))
    assert isinstance(on_device, jax.Array)
    assert np.array_equal(on_device, leaf)


@pytest.mark.parametrize("skipped", [1, 5])
def test_rows_that_start_anywhere_in_memory(skipped):
    tree, x = draw(), samples(2**16 + 300)
    assert np.array_equal(tree.leaf_index(x[skipped:]), walk(tree, x)[skipped:])
    assert np.array_equal(tree.leaf_index(x[::-1]), walk(tree, x)[::-1])
    assert np.array_equal(tree.leaf_index(np.asfortranarray(x)[skipped:]), walk(tree, x)[skipped:])


@pytest.mark.parametrize(
    "kind", [{}, {"outputs": (2,)}, {"linear": True}], ids=["constant", "two outputs", "linear leaves"]
)
def test_predict_answers_with_the_model_of_the_leaf(kind):
    tree, x = draw(**kind), samples(300)
    leaf = walk(tree, x)
    if "linear" in kind:
        expected = (np.asarray(tree.leaves.coefficients)[leaf] * x).sum(1) + np.asarray(tree.leaves.intercept)[leaf]
    else:
        expected = np.asarray(tree.leaves.values)[leaf]
    assert np.array_equal(tree.predict(x), expected)
    assert isinstance(tree.predict(x), np.ndarray)
    assert isinstance(tree.predict(jnp.asarray(x)), jax.Array)
    assert np.array_equal(tree.predict(x.astype(int).tolist()), expected)  # anything array-like
    assert np.array_equal(tree.predict(jnp.asarray(x, jnp.int32)), expected)
    if "linear" not in kind:
        return
    everywhere = np.asarray(tree.leaves.outputs(jnp.asarray(x)))
    assert everywhere.shape == (8, 300)
    assert np.array_equal(everywhere[leaf, np.arange(300)], expected)


def test_decision_path_follows_parents_from_root_to_leaf():
    tree, x = draw(), samples(40)
    path = tree.decision_path(x)
    assert path.shape == (DEPTH + 1, 40)
    assert path.dtype == np.int32
    assert np.array_equal(path[0], np.zeros(40))
    assert np.array_equal(path[-1], walk(tree, x) + 7)
    assert np.array_equal((path[1:] - 1) // 2, path[:-1])
    assert np.array_equal(tree.decision_path(jnp.asarray(x)), path)


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
    again = pruned.prune(x)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(pruned), strict=True))


def test_sizes_by_hand(small_tree):
    assert small_tree.depth == 2
    assert small_tree.splits.tolist() == [True, False, True]
    assert small_tree.num_leaves == 3
    assert small_tree.num_parameters == (2 + 1) + (1 + 1) + 3
    two_outputs = small_tree.replace(leaves=ConstantLeaves(jnp.ones((4, 2))))
    assert two_outputs.num_parameters == 5 + 6
    linear = LinearLeaves(jnp.asarray([[1.0, 2, 0], [5, 5, 5], [0, 0, 0], [0, 3, 0]]), jnp.ones(4))
    assert small_tree.replace(leaves=linear).num_parameters == 5 + (2 + 0 + 1) + 3
    assert draw().num_leaves == 8  # no node of this tree is all zero


def test_text_of_a_small_tree(small_tree):
    lines = [
        "if age - 2.5 bmi > 3:",
        "|   if -bp > -0.5:",
        "|   |   -> 0.0001",
        "|   else:",
        "|   |   -> -1.25",
        "else:",
        "|   -> 0.5",
    ]
    assert small_tree.to_text(["age", "bmi", "bp"]) == "\n".join(lines)
    assert small_tree.to_text().startswith("if x0 - 2.5 x1 > 3:\n|   if -x2 > -0.5:")
    linear = LinearLeaves(jnp.asarray([[0, 1.0, -0.125]] * 4), jnp.asarray([-2.0] * 4))
    assert "-> x1 - 0.125 x2 - 2" in small_tree.replace(leaves=linear).to_text()
    with pytest.raises(ValueError, match="feature_names must hold 3"):
        small_tree.to_text(["age"])


def test_text_of_a_threshold_of_zero(small_tree):
    tree = small_tree.replace(bias=jnp.zeros(3))
    assert tree.to_text().startswith("if x0 - 2.5 x1 > 0:")


def test_repr(small_tree):
    expected = "ObliqueTree(depth=2, features=3, splits=2, leaves=3, parameters=8, ConstantLeaves)"
    assert repr(small_tree) == expected
    assert repr(jax.tree.map(lambda a: jnp.stack([a, a]), small_tree)).startswith("ObliqueTree(batch=(2,), features=3")
    seen = []
    jax.eval_shape(lambda tree: seen.append(repr(tree)), small_tree)
    assert seen[0].startswith("ObliqueTree(weights=")


def test_passes_through_jit_vmap_and_grad():
    x = jnp.asarray(samples(50))
    trees = [draw(seed) for seed in (5, 6)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *trees)
    together = jax.jit(jax.vmap(lambda tree: tree.predict(x)))(stacked)
    for one, tree in zip(together, trees, strict=True):
        assert np.array_equal(one, tree.predict(x))
    gradient = jax.jit(jax.grad(lambda tree: tree.predict(x).sum()))(trees[0])
    assert np.array_equal(gradient.leaves.values, np.bincount(walk(trees[0], np.asarray(x)), minlength=8))
    assert not gradient.weights.any()


def test_no_compilation_for_each_number_of_rows(count_compilations):
    tree, x = draw(), samples(1024)
    assert count_compilations(lambda: [tree.predict(x[: 2**i]) for i in range(11)]) <= 11
    assert count_compilations(lambda: [tree.predict(x[:n]) for n in range(1, 1025, 11)]) == 0


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros(P), "shape .n, p."),
        (np.zeros((2, P, 1)), "shape .n, p."),
        (np.zeros((0, P)), "at least one row"),
        (np.zeros((2, P + 1)), "3 columns, got 4"),
        ([["a", "b", "c"]], "numeric"),
        ([[1.0, np.nan, 0]], "finite, got 1 "),
        ([[1.0, np.inf, 0], [-np.inf, 0, 0]], "finite, got 2 "),
    ],
    ids=["1d", "3d", "empty", "wide", "strings", "nan", "infinite"],
)
@pytest.mark.parametrize("method", ["predict", "leaf_index", "decision_path", "prune"])
def test_bad_x_is_refused(method, x, message):
    with pytest.raises(ValueError, match=f"x must .*{message}"):
        getattr(draw(), method)(x)


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("row", [0, BLOCK + 2, 2**16 + 2])
def test_not_finite_anywhere_is_noticed_even_where_the_root_does_not_split(convert, row):
    tree, x = draw(), samples(2**16 + 3)
    tree = tree.replace(weights=tree.weights.at[0].set(0))
    x[row, 1] = np.nan
    with pytest.raises(ValueError, match=f"x must be finite, .*({row}, 1)"):
        tree.predict(convert(x))


def test_numpy_samples_meet_a_traced_tree(small_tree):
    x = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    batch = jax.tree.map(lambda a: jnp.stack([a, -a]), small_tree)
    answers = jax.vmap(lambda tree: tree.predict(x))(batch)
    np.testing.assert_array_equal(answers[0], small_tree.predict(x))
    with pytest.raises(ValueError, match="got a batch of shape"):
        batch.predict(x)


@pytest.fixture
def bounded(small_tree):
    """The small tree with linear leaves between bounds; leaf 1 cannot be reached, leaf 3 is a constant."""
    coefficients = jnp.asarray([[1.0, 0, -2], [5, 5, 5], [0, 0.5, 0], [0, 0, 0]])
    lower, upper = jnp.asarray([-1.0, 0, -10, 2]), jnp.asarray([2.0, 0, 0.25, 9])
    return small_tree.replace(leaves=LinearLeaves(coefficients, jnp.asarray([-2.0, 1, 0, 4.5]), lower, upper))


def unbounded(tree):
    return tree.replace(leaves=LinearLeaves(tree.leaves.coefficients, tree.leaves.intercept))


def test_linear_leaves_answer_between_their_bounds(bounded):
    x, leaves = samples(257), jax.tree.map(np.asarray, bounded.leaves)
    leaf = walk(bounded, x)
    assert set(leaf.tolist()) == {0, 2, 3}
    free = (leaves.coefficients[leaf] * x).sum(1) + leaves.intercept[leaf]
    expected = np.minimum(np.maximum(free, leaves.lower[leaf]), leaves.upper[leaf])
    assert (expected == leaves.lower[leaf]).any() and (expected == leaves.upper[leaf]).any()
    assert (expected == free).any()
    assert np.array_equal(bounded.predict(x), expected)
    assert np.array_equal(bounded.predict(jnp.asarray(x)), expected)
    assert np.array_equal(unbounded(bounded).predict(x), free)

    everywhere = leaves.coefficients @ x.T + leaves.intercept[:, None]
    clamped = np.minimum(np.maximum(everywhere, leaves.lower[:, None]), leaves.upper[:, None])
    assert np.array_equal(bounded.leaves.outputs(jnp.asarray(x)), clamped)
    assert np.array_equal(unbounded(bounded).leaves.outputs(jnp.asarray(x)), everywhere)


def test_bounds_are_parameters(bounded):
    # 5 of the splits, 3 slopes in the leaves that can be reached, 3 intercepts, 3 pairs of bounds.
    assert bounded.num_parameters == 5 + 3 + 3 * 3
    assert unbounded(bounded).num_parameters == 5 + 3 + 3
    assert repr(bounded).endswith("parameters=17, LinearLeaves)")


def test_text_of_bounds(bounded):
    names = ["age", "bmi", "bp"]
    assert bounded.describe_leaf(0, names) == "age - 2 bp - 2, from -1 to 2"
    assert bounded.describe_leaf(2, names) == "0.5 bmi + 0, from -10 to 0.25"
    assert bounded.describe_leaf(3, names) == "4.5"  # a constant needs none
    assert unbounded(bounded).describe_leaf(0, names) == "age - 2 bp - 2"
    lines = [
        "if age - 2.5 bmi > 3:",
        "|   if -bp > -0.5:",
        "|   |   -> 4.5",
        "|   else:",
        "|   |   -> 0.5 bmi + 0, from -10 to 0.25",
        "else:",
        "|   -> age - 2 bp - 2, from -1 to 2",
    ]
    assert bounded.to_text(names) == "\n".join(lines)
    assert bounded.leaves.lower[3] <= 4.5 <= bounded.leaves.upper[3]
    exact = bounded.replace(leaves=bounded.leaves.replace(lower=bounded.leaves.lower - 1 / 3))
    assert exact.describe_leaf(0, names, digits=5).endswith("from -1.3333 to 2")


def test_trees_with_bounds_pass_through_jit_and_vmap(bounded):
    x = jnp.asarray(samples(20))
    batch = jax.tree.map(lambda a: jnp.stack([a, a / 2]), bounded)
    together = jax.jit(jax.vmap(lambda tree: tree.predict(x)))(batch)
    assert np.array_equal(together[0], bounded.predict(x))
    assert np.array_equal(together[1], jax.tree.map(lambda a: a / 2, bounded).predict(x))
    assert len(jax.tree.leaves(bounded)) == len(jax.tree.leaves(unbounded(bounded))) + 2
