"""scikit-learn's trees as ObliqueTrees, bit for bit."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from jtrees import losses, warmstart
from tests import oracles

N, P = 2000, 4  # as many rows everywhere: one program a depth


def table(kind, seed=0):
    """Features and targets, float32."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(N, P))
    match kind:
        case "large":
            x = 1e6 * x + 1e7
        case "rounded":  # many samples exactly on thresholds
            x = np.round(x, 1)
        case "close":  # neighbours one unit in the last place apart: their midpoint is no float32
            x = 1024 + rng.integers(0, 40, (N, P)) * 2.0**-13
    x = x.astype(np.float32)
    y = np.where(x[:, 0] > np.median(x[:, 0]), 1.0, 0.0) + rng.normal(size=N)
    return x, y.astype(np.float32)


def around_thresholds(model):
    """Samples on and next to every threshold, in every feature."""
    thresholds = model.tree_.threshold[model.tree_.feature >= 0].astype(np.float32)
    near = np.concatenate([thresholds, np.nextafter(thresholds, np.inf), np.nextafter(thresholds, -np.inf)])
    return np.random.default_rng(1).choice(near.astype(np.float32), (N, P))


@pytest.mark.parametrize("kind", ["large", "rounded", "close"])
@pytest.mark.parametrize("limits", [{"max_depth": 4}, {"max_leaf_nodes": 9}], ids=["depth 4", "unbalanced"])
def test_answers_what_scikit_learn_answers_on_thresholds_too(kind, limits):
    x, y = table(kind)
    model = DecisionTreeRegressor(**limits, random_state=0).fit(x, y)
    tree = warmstart.from_sklearn(model)
    assert tree.depth == model.get_depth()
    for samples in (x, around_thresholds(model)):
        assert np.array_equal(tree.predict(samples), model.predict(samples).astype(np.float32))
    assert tree.num_leaves == model.get_n_leaves()
    assert tree.splits.sum() == model.get_n_leaves() - 1


def test_several_targets_share_a_tree_and_one_column_stays_a_column():
    x, y = table("plain")
    # Three columns, as many as there are classes elsewhere here, on scales of their own.
    targets = np.stack([y, 10 * x[:, 1] + y, 5 + np.abs(x[:, 2])], axis=1).astype(np.float32)
    model = DecisionTreeRegressor(max_depth=4, random_state=0).fit(x, targets)
    for tree in (warmstart.from_sklearn(model), warmstart.cart(x, jnp.asarray(targets), 4)):
        assert tree.leaves.loss == losses.SquaredError()
        assert tree.leaves.values.shape == (16, 3)
        for samples in (x, around_thresholds(model)):
            assert np.array_equal(tree.predict(samples), model.predict(samples).astype(np.float32))
    column = warmstart.cart(x, y[:, None], 3)
    assert column.leaves.values.shape == (8, 1)
    assert np.array_equal(column.predict(x)[:, 0], warmstart.cart(x, y, 3).predict(x))


def test_a_deeper_tree_holds_the_value_on_both_sides_of_what_cart_did_not_split():
    x, y = table("plain")
    model = DecisionTreeRegressor(max_depth=2, random_state=0).fit(x, y)
    tree = warmstart.from_sklearn(model, 4)
    assert tree.depth == 4 and tree.splits.sum() == 3
    assert np.array_equal(tree.predict(x), model.predict(x).astype(np.float32))
    values = np.asarray(tree.leaves.values).reshape(4, 4)  # the four leaves below each leaf of CART
    assert np.array_equal(values, np.repeat(values[:, :1], 4, axis=1))
    tree = warmstart.from_sklearn(DecisionTreeRegressor().fit(x, np.full(N, 2.5)))
    assert tree.depth == 1 and not tree.splits.any() and set(tree.predict(x)) == {np.float32(2.5)}


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray, np.float64])
def test_cart_of_numbers_is_scikit_learns(convert):
    x, y = table("plain")
    integers = np.random.default_rng(0).integers(0, 4, N)
    for weight in (None, integers):
        model = DecisionTreeRegressor(max_depth=3, random_state=0).fit(x, y, sample_weight=weight)
        weights = None if weight is None else convert(weight)
        tree = warmstart.cart(convert(x), y, 3, sample_weight=weights)
        assert np.array_equal(tree.predict(x), model.predict(x).astype(np.float32))
    # A weight counts as that many samples: leaves hold the weighted means of what reaches them.
    leaf = tree.leaf_index(x)
    means = oracles.leaf_means(leaf, y, 8, 0, integers)
    reached = np.unique(leaf)
    np.testing.assert_allclose(tree.leaves.values[reached], means[reached], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("classifies", [False, True])
def test_leaves_have_the_least_weight(classifies):
    """Whatever the units of the weights."""
    x, y = table("rounded")
    cart_tree = partial(warmstart.cart, classifies=classifies)
    y = np.digitize(y, [-1, 0, 1]) if classifies else y
    weight = np.random.default_rng(0).integers(0, 4, N)
    minimum = lambda tree, weight: np.bincount(tree.leaf_index(x), weight)[np.unique(tree.leaf_index(x))].min()
    assert minimum(cart_tree(x, y, 6), np.ones(N)) < 50 <= minimum(cart_tree(x, y, 6, min_weight=50.0), np.ones(N)) < 70
    selected = cart_tree(x, y, 6, sample_weight=weight, min_weight=50.0)
    other = cart_tree(x, y, 6, sample_weight=weight / 7, min_weight=50 / 7)
    assert np.array_equal(other.leaf_index(x), selected.leaf_index(x))
    repeated = cart_tree(*(np.repeat(a, weight, axis=0) for a in (x, y)), 6, min_weight=50.0)
    assert np.array_equal(repeated.leaf_index(x), selected.leaf_index(x))
    distinct = np.arange(N, dtype=np.float32)[:, None]
    for minimum, leaves in ((N / 2, 2), (N / 2 + 1, 1)):
        assert len(np.unique(cart_tree(distinct, y, 6, min_weight=minimum).leaf_index(distinct))) == leaves


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, y: warmstart.from_sklearn(DecisionTreeRegressor(max_depth=4).fit(x, y), 3), "the model, 4, got 3"),
        (lambda x, y: warmstart.cart(x, y, 0), "depth must be from 1 to 16"),
        (lambda x, y: warmstart.cart(x, y, 2, min_weight=-1.0), "min_weight must be .*, got -1.0"),
        (lambda x, y: warmstart.cart(x[:, 0], y, 2), "x must have shape"),
        (lambda x, y: warmstart.cart(np.where(x > 2, np.nan, x), y > 0, 2, classifies=True), "x must be finite"),
        (lambda x, y: warmstart.cart(x, y[1:], 2), "same number of rows, got 2000 and 1999"),
        (lambda x, y: warmstart.cart(x, np.full(N, True), 2), "y must take at least two values"),
        (
            lambda x, y: warmstart.from_sklearn(DecisionTreeClassifier().fit(x, np.stack([y > 0, y > 1], 1))),
            "a classifier must have one output to become a tree, got one of 2",
        ),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(*table("plain"))


def test_cart_of_classes_gives_scikit_learns_probabilities():
    x, y = table("plain")
    classes = np.digitize(y, [0, 1])
    predictions = []
    for weight in (None, np.random.default_rng(0).uniform(0, 3, N)):
        model = DecisionTreeClassifier(max_depth=4, random_state=0).fit(x, classes, sample_weight=weight)
        tree = warmstart.cart(jnp.asarray(x), classes, 4, classifies=True, sample_weight=weight)
        assert tree.leaves.loss == losses.Frequencies() and tree.leaves.values.shape == (16, 3)
        np.testing.assert_allclose(tree.predict(x), model.predict_proba(x), rtol=1e-6)
        predictions.append(tree.predict(x))
    assert not np.allclose(*predictions)  # the weights count
