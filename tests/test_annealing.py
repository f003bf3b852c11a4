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
from jtrees.tasks import Classification

pytestmark = pytest.mark.usefixtures("standard_promotion")

DEPTH = 2
OPTIONS = {"depth": DEPTH, "starts": 2, "epochs": 100}


def fit(x, y, *, seed=0, sample_weight=None, validation=None, **options):
    others = {"sample_weight": sample_weight, "validation": validation, "task": "classification"}
    return jtrees.fit(jtrees.GET(**{**OPTIONS, **options}), x, y, key=jax.random.key(seed), **others)


def in_three(y):
    return np.digitize(y, [-1.0, 1.0])


@pytest.fixture(scope="module", params=["three classes", pytest.param("two classes", marks=pytest.mark.slow)])
def table(request, data):
    """Train and test."""
    if request.param == "two classes":
        x, y = load_breast_cancer(return_X_y=True)
        return x[:400], y[:400], x[400:], y[400:]
    rng = np.random.default_rng(1)
    x_new = rng.normal(size=(150, 3))
    y_new = np.where(x_new[:, 0] + x_new[:, 1] > 0, 2.0, -1.0) + x_new[:, 2] + 0.1 * rng.normal(size=150)
    return data[0], in_three(data[1]), x_new, in_three(y_new)


@pytest.fixture(scope="module")
def fitted(table):
    with jax.numpy_dtype_promotion("standard"):  # as in every test of the module
        return fit(*table[:2])


def frequencies(leaf, y, leaves, classes, weight=None):
    """Of each class in each leaf, and one sample more from the frequencies among all (and one more of each class)."""
    weight = np.ones(len(y)) if weight is None else weight
    prior = np.array([weight[y == k].sum() + 1 for k in range(classes)]) / (weight.sum() + classes)
    counts = np.array([[weight[(leaf == at) & (y == k)].sum() for k in range(classes)] for at in range(leaves)])
    return (counts + prior) / (counts.sum(1, keepdims=True) + 1)


def log_loss(tree, x, y, weight=None):
    return np.average(-np.log(tree.predict(x)[np.arange(len(y)), y].astype(np.float64)), weights=weight)


# --- The recipe ------------------------------------------------------------------------------------------------------


def test_a_tree_of_classes_and_its_report(table, fitted):
    x, y, x_new, y_new = table
    k = y.max() + 1
    tree, report = fitted.tree, fitted.report
    cart = DecisionTreeClassifier(max_depth=DEPTH, random_state=0).fit(x, y)
    assert np.mean(tree.predict(x_new).argmax(1) == y_new) > cart.score(x_new, y_new) + 0.02
    # As documented of the leaves, of what they answer, and of the report.
    leaf = tree.leaf_index(x)
    np.testing.assert_allclose(tree.leaves.values, frequencies(leaf, y, 4, k), rtol=1e-5)
    answers = tree.predict(x_new)
    assert answers.shape == (len(x_new), k)
    assert (answers > 0).all()
    np.testing.assert_allclose(answers.sum(1), 1, rtol=1e-6)
    assert fitted.loss == pytest.approx(log_loss(tree, x, y), rel=1e-6)
    assert fitted.loss < 0.95 * report["cart_loss"]
    # In the search x is scaled, and a sample beside a hyperplane may change side.
    assert fitted.loss == pytest.approx(report["losses"].min(), rel=5e-2)
    smoothed = frequencies(cart.apply(x), y, cart.tree_.node_count, k)
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


def test_whole_numbers_of_any_dtype_are_classes(table, fitted):
    x, y, *_ = table
    kinds = [y.astype(float), y.astype(np.uint8), y.tolist(), jnp.asarray(y)]
    for labels in [*kinds, y.astype(bool)] if y.max() == 1 else kinds:
        assert fit(x, labels).loss == fitted.loss


def test_other_names_for_the_classes_change_nothing_else(table, fitted):
    x, y, *_ = table
    turned = fit(x, y.max() - y)
    assert turned.report["cart_loss"] == pytest.approx(fitted.report["cart_loss"], rel=1e-5)
    # The same descent, its leaves in another order: sums of float32 in another order, through 200 updates.
    assert turned.loss == pytest.approx(fitted.loss, rel=5e-2)


def test_weights_and_validation_of_classes(table):
    x, y, x_new, y_new = table
    weight = np.where(y == 1, 3.0, 0.5)
    weight[::7] = 0
    result = fit(x, y, sample_weight=weight, validation=(x_new, y_new), starts=1)
    tree = result.tree
    # Weights count as the number of equal ones that would tell as much.
    counted = weight * weight.sum() / (weight**2).sum()
    leaf, k = tree.leaf_index(x), y.max() + 1
    np.testing.assert_allclose(tree.predict(x), frequencies(leaf, y, 4, k, counted)[leaf], rtol=1e-4)
    assert not np.allclose(tree.predict(x), frequencies(leaf, y, 4, k, weight)[leaf], rtol=1e-3)
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
            method(2, 1.0, leaves="linear", task=Classification(3))


# --- The methods -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def classes(data):
    """Three classes on the table of the suite."""
    x, y = map(jnp.asarray, data)
    return x, jnp.digitize(y, jnp.asarray([-1.0, 1.0])).astype(jnp.int32)


def test_loss_of_classes_is_the_expected_log_loss(classes):
    x, y = map(np.asarray, classes)
    method = jtrees.get(DEPTH, 6.0, task=Classification(3))

    @jax.jit
    def evaluated(batch):
        params = method.init(batch, key=jax.random.key(3))
        return params, method.loss(params, batch, key=None, step=0), method.harden(params, batch)

    params, (loss, score), hard = evaluated(jtrees.Batch(*classes))
    weights, bias, logits = (np.asarray(a, np.float64) for a in jax.tree.leaves(params))
    right = oracles.sigmoid(6 * (weights @ x.astype(np.float64).T + bias[:, None]))
    softmax = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = np.mean(oracles.expected_value(right, -np.log(softmax[:, y])))
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    leaf = params.leaf_index(x)
    smoothed = frequencies(leaf, y, 4, 3)
    assert float(score) == pytest.approx(-np.log(smoothed[leaf, y]).mean(), rel=1e-4)
    # While training leaves hold logits, in the hard tree frequencies.
    np.testing.assert_allclose(method.predict(params, x), softmax[leaf], rtol=1e-5)
    assert np.array_equal(hard.weights, params.weights)
    np.testing.assert_allclose(hard.leaves.values, smoothed, rtol=1e-5)


@pytest.mark.parametrize(
    "kind", [pytest.param({}, marks=pytest.mark.slow), {"task": Classification(3)}], ids=["constant", "classes"]
)
def test_raddt_trains_and_its_score_is_that_of_the_hardened_tree(data, classes, kind):
    x, y = map(jnp.asarray, data) if "task" not in kind else classes
    method, batch = jtrees.raddt(DEPTH, 10.0, **kind), jtrees.Batch(x, y)

    @jax.jit
    def run(key):
        result = jtrees.train(method, batch, key=key, optimizer=optax.adam(0.03), steps=60, score_every=1)
        return result, method.harden(result.params, batch)

    result, hard = run(jax.random.key(0))
    assert result.finite
    assert result.score < result.scores[0]
    assert result.losses[-1] < result.losses[0]
    x, y = np.asarray(x), np.asarray(y)
    if "task" in kind:
        assert log_loss(hard, x, y) == pytest.approx(float(result.score), rel=1e-4)
    else:
        assert np.mean((hard.predict(x) - y) ** 2) == pytest.approx(float(result.score), rel=1e-4)
