"""scikit-learn's trees as ObliqueTrees, bit for bit."""

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from jtrees import warmstart

N, P = 300, 4


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
    return np.random.default_rng(1).choice(near.astype(np.float32), (2000, P))


@pytest.mark.parametrize("kind", ["plain", "large", "rounded", "close"])
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


def test_classifiers_give_class_frequencies():
    x, y = table("plain")
    classes = np.digitize(y, [0, 1])
    model = DecisionTreeClassifier(max_depth=3, random_state=0).fit(x, classes)
    tree = warmstart.from_sklearn(model)
    assert tree.leaves.values.shape == (8, 3)
    np.testing.assert_allclose(tree.predict(x), model.predict_proba(x), rtol=1e-6)


def test_a_deeper_tree_holds_the_value_on_both_sides_of_what_cart_did_not_split():
    x, y = table("plain")
    model = DecisionTreeRegressor(max_depth=2, random_state=0).fit(x, y)
    tree = warmstart.from_sklearn(model, 4)
    assert tree.depth == 4
    assert np.array_equal(tree.predict(x), model.predict(x).astype(np.float32))
    values = np.asarray(tree.leaves.values).reshape(4, 4)  # the four leaves below each leaf of CART
    assert np.array_equal(values, np.repeat(values[:, :1], 4, axis=1))
    assert tree.splits.sum() == 3


def test_a_cart_of_one_leaf_becomes_a_tree_of_depth_one():
    x, _ = table("plain")
    tree = warmstart.from_sklearn(DecisionTreeRegressor().fit(x, np.full(N, 2.5)))
    assert tree.depth == 1
    assert not tree.splits.any()
    assert set(tree.predict(x)) == {np.float32(2.5)}


def test_cart_regressor_is_scikit_learns():
    x, y = table("plain")
    model = DecisionTreeRegressor(max_depth=4, random_state=3).fit(x, y)
    for features in (x, jnp.asarray(x), x.astype(np.float64)):
        tree = warmstart.cart_regressor(features, y, 4, seed=3)
        assert np.array_equal(tree.predict(x), model.predict(x).astype(np.float32))


def test_bad_arguments_are_refused():
    x, y = table("plain")
    model = DecisionTreeRegressor(max_depth=4, random_state=0).fit(x, y)
    with pytest.raises(ValueError, match="depth must be at least that of the model, 4, got 3"):
        warmstart.from_sklearn(model, 3)
    with pytest.raises(ValueError, match="depth must be from 1 to 16"):
        warmstart.cart_regressor(x, y, 0)
    with pytest.raises(ValueError, match="y must be finite"):
        warmstart.cart_regressor(x, np.where(y > 1, np.nan, y), 2)
