"""A forest answers what its trees do, together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from jtrees import losses
from jtrees.leaves import Values
from jtrees.tree import Origin

TREES, N = 5, 200


def forest_of(outputs=(), combine="mean", link="identity", origin=None):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(TREES, *shape)), jnp.float32)
    leaves = Values(draw(4, *outputs))
    if combine == "vote":
        leaves = Values(jax.nn.softmax(leaves.values, axis=-1), losses.Frequencies())
    if origin is not None:
        x, y = np.float32(origin)
        origin = jtrees.Origin(jnp.full((TREES, 3), x), jnp.full((TREES, *outputs), y))
    return jtrees.Forest(jtrees.ObliqueTree(draw(3, 3), draw(3), leaves, origin), combine, link)


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(1).normal(size=(N, 3)).astype(np.float32)


def answers_of(forest, x):
    return np.stack([forest[i].predict(x) for i in range(len(forest))])


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


OPTIONS = [{}, {"combine": "vote"}, {"combine": "sum", "link": "softmax"}, {"origin": (2.0, 3.0)}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_apply_is_what_it_predicts_and_vmaps(x, options):
    forest = forest_of((3,), **options)
    answers = forest.predict(x)
    assert answers.shape == (N, 3) and np.ptp(answers, axis=0).min() > 0
    several = jax.tree.map(lambda a: jnp.stack([a, 2 * a]), forest)
    pair = jax.jit(jax.vmap(lambda forest: forest.apply(jnp.asarray(x))))(several)
    for actual in (pair[0], forest.predict(jnp.asarray(x))):
        np.testing.assert_allclose(actual, answers, rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("offset", [0.0, 1e8 + 3, 1.7e9])
def test_padded_sums_are_the_same_also_beside_longer_sums(x, offset):
    """Offsets are single numbers of 24 bits, and each tree predicts an equal share."""
    short, long = forest_of(combine="sum", origin=(0, offset / 13)), np.float32(offset / 20)
    padded = short.padded(7, long)
    assert len(padded) == 7 and (np.asarray(padded.trees.origin.y) == long).all()
    rest = TREES * np.float64(np.float32(offset / 13)) - 7 * np.float64(long)
    tolerance = 1e-6 * max(1.0, abs(rest))  # the rest is in leaves of single precision
    np.testing.assert_allclose(padded.predict(np.float64(x)), short.predict(np.float64(x)), rtol=0, atol=tolerance)


def test_bad_arguments_are_refused(x):
    forest = forest_of()
    with pytest.raises(ValueError, match="x must have 3 columns, got 2"):
        forest.predict(x[:, :2])
    with pytest.raises(ValueError, match='combine must be "mean" or "sum" for trees that predict one number'):
        forest.replace(combine="vote").predict(x)
    for combine in ("median", None):
        with pytest.raises(ValueError, match="combine must be one of 'mean', 'sum', 'vote', got"):
            forest.replace(combine=combine).predict(x)
    with pytest.raises(ValueError, match="link must be one of 'identity', 'softmax', 'exp', 'sorted', got 'log'"):
        forest.replace(link="log").predict(x)
    with pytest.raises(
        ValueError, match="trees must have no origin of predictions with link='exp', combine='sum', got"
    ):
        forest_of(combine="sum", link="exp", origin=(0, 5)).predict(x)


def test_a_vote_has_no_origin_of_predictions(x):
    tree = jtrees.ObliqueTree(np.ones((1, 1, 3), np.float32), np.zeros((1, 1), np.float32), Values(np.ones((1, 2, 2))))
    forest = jtrees.Forest(tree.replace(origin=Origin(np.zeros((1, 3)), np.array([[0.0, 10.0]]))), "vote")
    with pytest.raises(ValueError, match="no origin of predictions with link='identity', combine='vote'"):
        forest.predict(x)
