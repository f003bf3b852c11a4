"""A forest answers what its trees do, together."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import jtrees
from jtrees.leaves import Constant, Frequency

TREES, N = 5, 200


def forest_of(outputs=(), combine="mean", link="identity", origin=None):
    """Random trees of depth 2 on 3 features, with leaves of one kind and shape."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(TREES, *shape)), jnp.float32)
    leaves = Constant(draw(4, *outputs))
    if combine == "vote":
        leaves = Frequency(jax.nn.softmax(leaves.values, axis=-1))
    if origin is not None:
        x, y = np.float32(origin)
        origin = jtrees.Origin(jnp.full((TREES, 3), x), jnp.full((TREES, *outputs), y))
    return jtrees.Forest(jtrees.ObliqueTree(draw(3, 3), draw(3), leaves, origin), combine, link)


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(1).normal(size=(N, 3)).astype(np.float32)


def answers_of(forest, x):
    return np.stack([forest[i].predict(x) for i in range(len(forest))])


def by_hand(forest, x):
    trees = forest.trees
    leaves = [oracles.walk(w, b, x) for w, b in zip(trees.weights, trees.bias, strict=True)]
    return np.stack([np.asarray(values)[leaf] for values, leaf in zip(trees.leaves.values, leaves, strict=True)])


@pytest.mark.parametrize("outputs", [(), (3,)])
def test_mean_of_its_trees(x, outputs):
    forest = forest_of(outputs)
    alone = answers_of(forest, x)
    np.testing.assert_array_equal(alone, by_hand(forest, x))
    assert np.ptp(alone, axis=0).max() > 0
    np.testing.assert_allclose(forest.predict(x), alone.mean(0), rtol=1e-5, atol=1e-6)  # a float32 mean of five
    np.testing.assert_allclose(forest.predict(jnp.asarray(x)), forest.predict(x), rtol=1e-6)
    np.testing.assert_allclose(forest.predict(x[:7]), forest.predict(x)[:7], rtol=1e-6)
    assert forest.predict(x).shape == (N, *outputs)


def test_votes_of_its_trees(x):
    forest = forest_of((3,), "vote")
    alone = by_hand(forest, x).argmax(2)
    shares = np.stack([(alone == k).mean(0) for k in range(3)], axis=1)
    np.testing.assert_allclose(forest.predict(x), shares, atol=1e-6)
    assert forest.combine == "vote"


def test_sum_of_its_trees_and_its_softmax(x):
    total = by_hand(forest_of((3,)), x).sum(0)
    np.testing.assert_allclose(forest_of((3,), "sum").predict(x), total, rtol=1e-5, atol=1e-5)
    odds = np.exp(total - total.max(1, keepdims=True))
    expected = odds / odds.sum(1, keepdims=True)
    np.testing.assert_allclose(forest_of((3,), "sum", "softmax").predict(x), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("combine", ["mean", "sum"])
def test_counts_from_the_origin_of_its_trees(x, combine):
    """Far from zero a sample keeps what float32 would lose, and a sum has the origin of every tree."""
    near, far = forest_of(combine=combine), forest_of(combine=combine, origin=(1e8, 1e6))
    expected = near.predict(x) + 1e6 * (TREES if combine == "sum" else 1)
    answers = far.predict(x.astype(np.float64) + 1e8)
    assert answers.dtype == np.float64
    np.testing.assert_allclose(answers, expected, atol=1e-4)  # size one beside 1e6: float32 has 0.06 there
    alone = answers_of(far, x.astype(np.float64) + 1e8)
    np.testing.assert_allclose(answers, alone.mean(0) if combine == "mean" else alone.sum(0), rtol=1e-9)


def test_apply_is_what_it_predicts_and_vmaps(x):
    forest = forest_of(origin=(2.0, 3.0))
    np.testing.assert_allclose(jax.jit(type(forest).apply)(forest, x), forest.predict(x), rtol=1e-5, atol=1e-5)
    several = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), forest)
    both = jax.jit(jax.vmap(lambda forest: forest.apply(x)))(several)
    np.testing.assert_allclose(both[0], forest.predict(x), rtol=1e-5, atol=1e-5)


def test_is_a_sequence_of_trees(x):
    forest = forest_of()
    assert len(forest) == len(list(forest)) == TREES
    assert forest.features == 3
    np.testing.assert_array_equal(forest[-1].predict(x), forest[TREES - 1].predict(x))
    for i, tree in enumerate(forest):
        np.testing.assert_array_equal(tree.weights, forest.trees.weights[i])
    for i in (TREES, -TREES - 1):
        with pytest.raises(IndexError, match=f"the forest has 5 trees, got index {i}"):
            forest[i]
    assert forest.num_parameters == sum(tree.num_parameters for tree in forest) == TREES * (3 * 4 + 4)
    assert repr(forest) == "Forest(5 x ObliqueTree, depth=2, features=3, combine='mean', link='identity')"


def test_bad_arguments_are_refused(x):
    forest = forest_of()
    with pytest.raises(ValueError, match="x must have 3 columns, got 2"):
        forest.predict(x[:, :2])
    with pytest.raises(ValueError, match=r"x must have shape \(n, p\)"):
        forest.predict(None)
    bad = x.copy()
    bad[3, 1] = np.nan
    with pytest.raises(ValueError, match="x must be finite"):
        forest.predict(bad)
    with pytest.raises(ValueError, match='combine must be "mean" or "sum" for trees that answer one number'):
        forest.replace(combine="vote").predict(x)
    for combine in ("median", None):
        with pytest.raises(ValueError, match="combine must be one of 'mean', 'sum', 'vote', got"):
            forest.replace(combine=combine).predict(x)
    with pytest.raises(ValueError, match="link must be one of 'identity', 'softmax', got 'exp'"):
        forest.replace(link="exp").predict(x)
