"""Classification by GET and RADDT, and what the methods promise of any kind of leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.tree import DecisionTreeClassifier

import jtrees

pytestmark = pytest.mark.usefixtures("standard_promotion")

DEPTH = 2
OPTIONS = {"depth": DEPTH, "starts": 3, "epochs": 100}


def fit(x, y, *, seed=0, sample_weight=None, validation=None, **options):
    others = {"sample_weight": sample_weight, "validation": validation, "task": "classification"}
    return jtrees.fit(jtrees.GET(**{**OPTIONS, **options}), x, y, key=jax.random.key(seed), **others)


@pytest.fixture(scope="module")
def two_classes(cancer):
    with jax.numpy_dtype_promotion("standard"):  # as in every test of the module
        return fit(*cancer[:2])


@pytest.fixture(scope="module")
def cancer():
    """Two classes: train and test."""
    x, y = load_breast_cancer(return_X_y=True)
    return x[:400], y[:400], x[400:], y[400:]


def frequencies(leaf, y, leaves, classes, weight=None):
    """Of each class in each leaf, and one sample more from the frequencies among all (and one more of each class)."""
    weight = np.ones(len(y)) if weight is None else weight
    prior = np.array([weight[y == k].sum() + 1 for k in range(classes)]) / (weight.sum() + classes)
    counts = np.array([[weight[(leaf == at) & (y == k)].sum() for k in range(classes)] for at in range(leaves)])
    return (counts + prior) / (counts.sum(1, keepdims=True) + 1)


def log_loss(tree, x, y, weight=None):
    return np.average(-np.log(tree.predict(x)[np.arange(len(y)), y].astype(np.float64)), weights=weight)


# --- The recipe ------------------------------------------------------------------------------------------------------


def test_two_classes(cancer, two_classes):
    x, y, x_new, y_new = cancer
    tree, report = two_classes.tree, two_classes.report
    cart = DecisionTreeClassifier(max_depth=DEPTH, random_state=0).fit(x, y)
    assert np.mean(tree.predict(x_new).argmax(1) == y_new) > cart.score(x_new, y_new) + 0.02
    # As documented of the leaves, of what they answer, and of the report.
    leaf = tree.leaf_index(x)
    np.testing.assert_allclose(tree.leaves.values, frequencies(leaf, y, 4, 2), rtol=1e-5)
    answers = tree.predict(x_new)
    assert answers.shape == (len(x_new), 2)
    assert (answers > 0).all()
    np.testing.assert_allclose(answers.sum(1), 1, rtol=1e-6)
    assert two_classes.loss == pytest.approx(log_loss(tree, x, y), rel=1e-6)
    assert two_classes.loss < report["cart_loss"]
    # In the search x is scaled, and a sample beside a hyperplane may change side.
    assert two_classes.loss == pytest.approx(report["losses"].min(), rel=5e-2)
    smoothed = frequencies(cart.apply(x), y, cart.tree_.node_count, 2)
    assert report["cart_loss"] == pytest.approx(-np.log(smoothed[cart.apply(x), y]).mean(), rel=1e-5)


@pytest.mark.slow
def test_many_classes():
    x, y = load_digits(return_X_y=True)
    tree, report = (result := fit(x[:1000], y[:1000], depth=4, starts=2)).tree, result.report
    cart = DecisionTreeClassifier(max_depth=4, random_state=0).fit(x[:1000], y[:1000])
    assert np.mean(tree.predict(x[1000:]).argmax(1) == y[1000:]) > cart.score(x[1000:], y[1000:]) + 0.1
    assert tree.leaves.values.shape == (16, 10)
    np.testing.assert_allclose(
        tree.leaves.values, frequencies(tree.leaf_index(x[:1000]), y[:1000], 16, 10), rtol=1e-5, atol=1e-7
    )
    assert result.loss == pytest.approx(log_loss(tree, x[:1000], y[:1000]), rel=1e-5)
    assert result.loss < 0.8 * report["cart_loss"]


def test_three_classes(cancer, data):
    """The smaller sibling of the digits."""
    x, y = data[0], np.digitize(data[1], [-1.0, 1.0])
    result = fit(x, y)
    cart = DecisionTreeClassifier(max_depth=DEPTH, random_state=0).fit(x, y)
    assert np.mean(result.tree.predict(x).argmax(1) == y) > cart.score(x, y) + 0.02
    assert result.tree.leaves.values.shape == (4, 3)
    np.testing.assert_allclose(
        result.tree.leaves.values, frequencies(result.tree.leaf_index(x), y, 4, 3), rtol=1e-5, atol=1e-7
    )
    assert result.loss == pytest.approx(log_loss(result.tree, x, y), rel=1e-5)
    assert result.loss < 0.9 * result.report["cart_loss"]


def test_whole_numbers_of_any_dtype_are_classes(cancer, two_classes):
    x, y, *_ = cancer
    for labels in (y.astype(float), y.astype(np.uint8), y.astype(bool), y.tolist(), jnp.asarray(y)):
        assert fit(x, labels).loss == two_classes.loss


def test_other_names_for_the_classes_change_nothing_else(cancer, two_classes):
    x, y, *_ = cancer
    turned = fit(x, 1 - y)
    assert turned.report["cart_loss"] == pytest.approx(two_classes.report["cart_loss"], rel=1e-5)


def test_weights_and_validation_of_classes(cancer):
    x, y, x_new, y_new = cancer
    weight = np.where(y == 1, 3.0, 0.5)
    weight[::7] = 0
    result = fit(x, y, sample_weight=weight, validation=(x_new, y_new), starts=1)
    tree = result.tree
    # Weights count as the number of equal ones that would tell as much.
    counted = weight * weight.sum() / (weight**2).sum()
    expected = frequencies(tree.leaf_index(x), y, 4, 2, counted)
    np.testing.assert_allclose(tree.leaves.values, expected, rtol=1e-4)
    assert result.loss == pytest.approx(log_loss(tree, x_new, y_new), rel=1e-6)


X, Y = np.arange(12.0).reshape(6, 2), np.array([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize(
    "labels",
    [
        ["no", "yes"] * 3,
        Y + 0.5,
        Y + 1,
        Y - 1,
        [0, 2, 2, 0, 2, 0],
        [0, 1, 10**15, 0, 1, 1],
    ],
    ids=["text", "halves", "from one", "negative", "a class missing", "identity numbers"],
)
def test_bad_labels_are_refused_saying_how_to_encode_them(labels):
    for recipe in (jtrees.GET, jtrees.RADDT, jtrees.DGT, jtrees.LatentTree):
        with pytest.raises(ValueError, match=r"^y must .*return_inverse=True"):
            jtrees.fit(recipe(depth=1, epochs=1), X, labels, key=jax.random.key(0), task="classification")


@pytest.mark.parametrize(
    ("x", "labels", "message"),
    [
        (X, np.zeros(6), "y must hold at least two classes to learn from, got one"),
        (X, Y[:5], "x and y must have the same number of rows, got 6 and 5"),
        (X, np.eye(6, 2), r"y must have shape \(n,\)"),
        (X, [], "y must"),
        (X, [0, 1, np.nan, 0, 1, 1], "y must be finite"),
        (X, [0, 1, np.inf, 0, 1, 1], "y must be finite"),
        (np.where(X == 3, np.nan, X), Y, "x must be finite"),
    ],
)
def test_bad_tables_of_classes_are_refused(x, labels, message):
    with pytest.raises(ValueError, match=message):
        fit(x, labels)


@pytest.mark.parametrize("labels", [[0, 1, 2, 3, 0, 1], [-1, 0, 1, 2, 0, 1], [0.5] * 6, ["a"] * 6])
def test_unknown_classes_in_validation_are_refused(labels):
    with pytest.raises(ValueError, match=r"validation: y must hold .*return_inverse=True"):
        fit(X, Y, validation=(X, labels))


def test_linear_leaves_are_refused_for_classes():
    with pytest.raises(ValueError, match='leaves must be "constant" in classification'):
        fit(X, Y, leaves="linear")
    for method in (jtrees.get, jtrees.raddt):
        with pytest.raises(ValueError, match='leaves must be "constant" in classification'):
            method(2, 1.0, leaves="linear", classes=3)


# --- The methods -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def classes(data):
    """Three classes on the table of the suite."""
    x, y = map(jnp.asarray, data)
    return x, jnp.digitize(y, jnp.asarray([-1.0, 1.0])).astype(jnp.int32)


def test_loss_of_classes_is_the_expected_log_loss(classes):
    x, y = classes
    method = jtrees.get(DEPTH, 6.0, classes=3)
    batch = jtrees.Batch(x, y)
    params = method.init(batch, key=jax.random.key(3))
    weights, bias, logits = (np.asarray(a, np.float64) for a in jax.tree.leaves(params))
    right = oracles.sigmoid(6 * (weights @ np.asarray(x, np.float64).T + bias[:, None]))
    softmax = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = np.mean(oracles.expected_value(right, -np.log(softmax[:, np.asarray(y)])))
    loss, score = jax.jit(lambda p: method.loss(p, batch, key=None, step=0))(params)
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    leaf = np.asarray(params.leaf_index(x))
    smoothed = frequencies(leaf, np.asarray(y), 4, 3)
    assert float(score) == pytest.approx(-np.log(smoothed[leaf, np.asarray(y)]).mean(), rel=1e-4)
    # While training leaves hold logits, in the hard tree frequencies.
    np.testing.assert_allclose(method.predict(params, x), softmax[leaf], rtol=1e-5)
    hard = jax.jit(method.harden)(params, batch)
    assert np.array_equal(hard.weights, params.weights)
    np.testing.assert_allclose(hard.leaves.values, smoothed, rtol=1e-5)


@pytest.mark.parametrize("kind", [{}, {"classes": 3}], ids=["constant", "classes"])
def test_raddt_trains_and_its_score_is_that_of_the_hardened_tree(data, classes, kind):
    x, y = map(jnp.asarray, data) if "classes" not in kind else classes
    method, batch = jtrees.raddt(DEPTH, 10.0, **kind), jtrees.Batch(x, y)
    run = jax.jit(lambda key: jtrees.train(method, batch, key=key, optimizer=optax.adam(0.03), steps=60, score_every=1))
    result = run(jax.random.key(0))
    assert result.finite
    assert result.score < result.scores[0]
    assert result.losses[-1] < result.losses[0]
    hard = method.harden(result.params, batch)
    y = np.asarray(y)
    if "classes" in kind:
        assert log_loss(hard, np.asarray(x), y) == pytest.approx(float(result.score), rel=1e-4)
    else:
        assert np.mean((hard.predict(x) - y) ** 2) == pytest.approx(float(result.score), rel=1e-4)
