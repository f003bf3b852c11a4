"""Soft labels: the loss of probabilities is the expectation of the loss of a label, and one-hot rows are labels."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.tree import DecisionTreeClassifier

import jtrees
from jtrees import Classification, losses, warmstart
from jtrees.search.sample import drawn_rows
from jtrees.tasks import fits
from jtrees.tasks.labels import shares

pytestmark = pytest.mark.usefixtures("standard_promotion")  # Adam; see the fixture

KEY = jax.random.key(0)
N, K = 60, 3
rng = np.random.default_rng(0)
X = rng.normal(size=(N, 2)).astype(np.float32)
SOFT = rng.dirichlet(np.ones(K), N)
SOFT[:9] = np.eye(K)[np.arange(9) % K]
WEIGHT = rng.uniform(0.5, 2, N)
TREE = jtrees.DGT(depth=1, epochs=4, batch_size=30, widths=(), cycles=1)


def labels(k):
    return np.full(N, k, np.int32)


def expectation(function):
    return sum(SOFT[:, k] * np.asarray(function(labels(k)), np.float64) for k in range(K))


def repeated(*arrays):
    row, label = np.nonzero(SOFT)
    return *(a[row] for a in arrays), label.astype(np.int32), SOFT[row, label]


@pytest.mark.parametrize(
    ("module", "dtype", "expected"), [(np, None, "float64"), (np, "float32", "float32"), (jnp, None, "float32")]
)
def test_labels_as_probabilities(module, dtype, expected):
    probabilities = shares(module.asarray([2, 0]), K, dtype)
    assert isinstance(probabilities, module.ndarray) and probabilities.dtype == expected
    np.testing.assert_array_equal(probabilities, [[0, 0, 1], [1, 0, 0]])


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_log_loss_is_the_expectation_of_that_of_a_label(smoothing):
    loss, outputs = losses.LogLoss(smoothing), jnp.asarray(rng.normal(size=(N, K)), jnp.float32)
    y, tolerance = jnp.asarray(SOFT, jnp.float32), {"rtol": 1e-5, "atol": 1e-6}
    samples, leaf_losses, derivatives = map(jax.jit, (loss.samples, loss.of_leaves, loss.derivatives))
    np.testing.assert_allclose(samples(outputs, y), expectation(lambda k: samples(outputs, k)), **tolerance)
    values = jnp.asarray(rng.normal(size=(4, K)), jnp.float32)
    leaf_rows = np.transpose([expectation(lambda k, i=i: leaf_losses(values, k)[i]) for i in range(4)])
    np.testing.assert_allclose(leaf_losses(values, y).T, leaf_rows, **tolerance)
    for i in range(2):
        result = derivatives(outputs, y)[i]
        class_rows = [[derivatives(outputs, labels(k))[i][:, j] for k in range(K)] for j in range(K)]
        expected = np.stack([(SOFT.T * np.asarray(each, np.float64)).sum(0) for each in class_rows], 1)
        np.testing.assert_allclose(result, expected, **tolerance)
    sample = lambda output, y: loss.samples(output[None], y[None])[0]
    automatic = jax.jit(lambda *rows: [jax.vmap(derivative(sample))(*rows) for derivative in (jax.grad, jax.hessian)])
    slope, bend = automatic(outputs, y)
    np.testing.assert_allclose(derivatives(outputs, y)[0], slope, **tolerance)
    bend = K / (K - 1) * jnp.diagonal(bend, axis1=1, axis2=2)  # a common shift of the outputs changes nothing
    np.testing.assert_allclose(derivatives(outputs, y)[1], bend, **tolerance)


@pytest.mark.parametrize("soft", [pytest.param(False, marks=pytest.mark.slow), True])
def test_smoothed_labels_are_those_of_criterion_held_out_loss_and_report(soft):
    y = SOFT if soft else SOFT.argmax(1)
    chances, task = rng.dirichlet(np.ones(K), N), Classification(K, losses.LogLoss(0.2))
    expected = -((0.8 * (SOFT if soft else np.eye(K)[y]) + 0.2 / K) * np.log(chances)).sum(1)
    tolerance, rows = {"rtol": 1e-5}, (jnp.asarray(chances, jnp.float32), jnp.asarray(y, jnp.float32 if soft else int))
    np.testing.assert_allclose(task.prediction_loss(chances, y), expected, rtol=1e-12)
    np.testing.assert_allclose(task.prediction_loss(*rows), expected, **tolerance)
    np.testing.assert_allclose(task.loss(jnp.log(rows[0]), rows[1]), expected, **tolerance)
    leaf, empty = jnp.arange(N) % 4, jtrees.leaves.Values(jnp.zeros((4, K)), losses.LogLoss(0.2))
    fitted, criterion = empty.refit_with_criterion(leaf, None, rows[1], None)
    assert criterion == pytest.approx(float(task.prediction_loss(fitted.at(leaf, None), rows[1]).mean()), rel=1e-5)
    fit = jtrees.fit(TREE, X, y, task=task, validation=(X, y), key=KEY)
    assert fit.loss == pytest.approx(task.prediction_loss(fit.predict(X), y).mean(), rel=1e-5)
    shares = SOFT if soft else np.eye(K)[y]
    best = 0.8 * shares.mean(0) + 0.2 / K
    assert fit.report.baselines["constant"] == pytest.approx(-(best * np.log(best)).sum(), abs=1e-3)


def test_leaves_count_expected_classes():
    leaf = rng.integers(0, 4, N)
    leaf_of, weight, label, chance = repeated(leaf, WEIGHT)
    result = fits.class_counts(leaf, SOFT, 4, K, sample_weight=WEIGHT)
    expected = fits.class_counts(leaf_of, label, 4, K, sample_weight=weight * chance)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    initial = losses.LogLoss().initial
    result = initial(jnp.asarray(SOFT, jnp.float32), jnp.asarray(WEIGHT, jnp.float32), K)
    expected = initial(jnp.asarray(label), jnp.asarray(weight * chance, jnp.float32), K)
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def own_loss(outputs, y):
    assert y.ndim == 1 and y.dtype == jnp.int32
    return jnp.square(jax.nn.softmax(outputs) - jax.nn.one_hot(y, K, dtype=outputs.dtype)).sum(1)


def test_a_loss_of_the_users_is_of_labels_and_its_expectation_is_taken():
    task, outputs = Classification(K, own_loss), jnp.asarray(rng.normal(size=(N, K)), jnp.float32)
    expected = expectation(lambda k: own_loss(outputs, jnp.asarray(k)))
    np.testing.assert_allclose(task.loss(outputs, jnp.asarray(SOFT, jnp.float32)), expected, rtol=1e-5)


def test_scores_are_expectations():
    chances = rng.dirichlet(np.ones(K), N)
    hits = expectation(lambda k: chances.argmax(1) == k)
    assert Classification(K).score(chances, SOFT, WEIGHT) == pytest.approx(np.average(hits, weights=WEIGHT))


def test_class_weights_are_factors_of_the_terms_of_the_loss():
    factors, chances = (1.0, 2.0, 5.0), rng.dirichlet(np.ones(K), N)
    task = Classification(K, class_weight=factors)
    y, weight = task.weighed(SOFT)
    expected = sum(factors[k] * SOFT[:, k] * task.prediction_loss(chances, labels(k)) for k in range(K))
    assert weight is not None
    np.testing.assert_allclose(weight * task.prediction_loss(chances, y), expected)


def test_samples_keep_the_share_of_each_most_probable_class():
    y = np.repeat([[0.9, 0.1], [0.2, 0.8]], [960, 40], axis=0)
    rows, weight = drawn_rows(y, None, 100, Classification(2), np.random.default_rng(0))
    assert weight.sum() == pytest.approx(1000) and weight[rows >= 960].sum() == pytest.approx(40)


def test_cart_minimises_the_expected_impurity():
    x, weight, label, chance = repeated(X, WEIGHT)
    tree = warmstart.cart(X, SOFT, 3, classifies=True, sample_weight=WEIGHT)
    rows = DecisionTreeClassifier(max_depth=3, random_state=0).fit(x, label, sample_weight=weight * chance)
    expected = warmstart.from_sklearn(rows, 3)
    np.testing.assert_array_equal(tree.weights, expected.weights)
    np.testing.assert_array_equal(tree.bias, expected.bias)
    np.testing.assert_allclose(tree.predict(X), expected.predict(X), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_fit_to_probabilities():
    tables = {"key": KEY, "task": "classification", "sample_weight": WEIGHT}
    # Probabilities of single precision are normalised, and a class may be certain to be absent.
    padded = np.insert(SOFT, 1, 0, axis=1).astype(np.float32)
    rounded = jtrees.fit(TREE, X, padded, key=KEY, task=Classification(K + 1), sample_weight=WEIGHT)
    np.testing.assert_allclose(rounded.predict(X).sum(1), 1, rtol=1e-5)
    # Labels to validate on, and the other way round.
    label = SOFT.argmax(1)
    mixed = jtrees.fit(TREE, X, SOFT, validation=(X, label), **tables)
    assert mixed.loss == pytest.approx(-np.log(mixed.predict(X)[np.arange(N), label]).mean(), rel=1e-5)
    mixed = jtrees.fit(TREE, X, label, validation=(X, SOFT), **tables)
    assert mixed.loss == pytest.approx(-(SOFT * np.log(mixed.predict(X))).sum(1).mean(), rel=1e-4)


def test_the_baselines_are_fitted_to_probabilities():
    x, soft = X, np.stack([(p := 1 / (1 + np.exp(-X[:, 0]))), 1 - p], 1)
    fit = jtrees.fit(TREE, x, soft, key=KEY, task="classification", validation=(x, soft))
    pair = np.concatenate([x, x]), np.repeat([0, 1], N)
    linear = LogisticRegression().fit(*pair, sample_weight=soft.T.ravel())
    expected = -(soft * linear.predict_log_proba(x)).sum(1).mean()
    assert fit.report.baselines["linear"] == pytest.approx(expected, rel=1e-2)
    constant = soft.mean(0)
    assert fit.report.baselines["constant"] == pytest.approx(-(constant * np.log(constant)).sum(), rel=1e-2)


@pytest.mark.parametrize(
    ("y", "task", "message"),
    [
        (np.insert(SOFT, 4, [0.5, 0.5, 0.2], axis=0)[:N], "classification", "got the sum 1.2 in row 4"),
        (np.insert(SOFT, 5, [1.1, -0.1, 0], axis=0)[:N], "classification", "at least 0, got -0.1 at (5, 1)"),
        (SOFT, Classification(4), "y must hold probabilities of 4 classes, (n, 4), got shape (60, 3)"),
        (SOFT[:, :1], "classification", "got shape (60, 1): use y[:, 0] for labels"),
    ],
)
def test_what_is_no_probability_is_refused(y, task, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        jtrees.fit(TREE, X, y, key=KEY, task=task)
