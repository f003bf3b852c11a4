"""GET: the method, several targets and linear leaves. Its search: test_annealed."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.tree import DecisionTreeRegressor

import jtrees
from jtrees.tasks import Classification
from jtrees.training import Batch
from tests import oracles

pytestmark = pytest.mark.usefixtures("standard_promotion")  # the recipe trains with AdamW

DEPTH = 2
SMALL = {"depth": DEPTH, "starts": 2, "epochs": 60, "shrink": False, "halving": False}


def fit(x, y, *, seed=0, **changed):
    return jtrees.fit(jtrees.GET(**SMALL | changed), x, y, key=jax.random.key(seed))


def random_params(leaves, k=(), depth=DEPTH):
    rng = np.random.default_rng(1)
    draw = lambda *shape: jax.device_put(rng.uniform(-1, 1, shape).astype(np.float32))
    n = 2**depth
    kinds = {"constant": lambda: jtrees.leaves.Values(draw(n, *k))}
    kinds["linear"] = lambda: jtrees.leaves.Linear(draw(n, 3, *k), draw(n, *k))
    return jtrees.ObliqueTree(draw(n - 1, 3), draw(n - 1), kinds[leaves]())


@partial(jax.jit, static_argnames=("leaves", "score", "task"))
def evaluated(params, batch, alpha, l1, leaves="constant", score=True, task=None):
    """((loss, score), gradient) of the method, and its hard tree; what is not needed is not compiled."""
    task = task or jtrees.Regression(None if batch.y.ndim == 1 else batch.y.shape[1])
    method = jtrees.methods.get(DEPTH, alpha, leaves=leaves, l1=l1, task=task)
    (loss, value), gradient = jax.value_and_grad(method.loss, has_aux=True)(params, batch, key=None, step=jnp.int32(0))
    return (loss, value if score else None), gradient, method.harden(params, batch)


@pytest.mark.parametrize("leaves", ["constant", pytest.param("linear", marks=pytest.mark.slow)])
def test_loss_is_the_expected_squared_error_of_sharpened_sigmoids(data, leaves):
    x, y = data
    params = random_params(leaves)
    weights, bias, *values = (np.asarray(a, np.float64) for a in jax.tree.leaves(params))
    for alpha in (1.0, 30.0):
        (loss, score), gradient, _ = evaluated(params, Batch(*data), alpha, 0.0, leaves=leaves)
        outputs = values[-1][:, None] + (np.zeros(len(y)) if leaves == "constant" else values[0] @ x.T)
        expected = oracles.expected_leaf_loss(alpha * weights, alpha * bias, outputs, x, y, np.ones(len(y)))
        assert float(loss) == pytest.approx(expected, rel=1e-4)
        leaf = oracles.walk(weights, bias, x)
        if leaves == "constant":
            means = oracles.leaf_means(leaf, y, 4, 0)
            assert float(score) == pytest.approx(np.mean((y - means[leaf]) ** 2), rel=1e-4)
        else:
            criterion = params.leaves.criterion(*map(jnp.asarray, (leaf, x, y)))
            assert float(score) == pytest.approx(float(criterion), rel=1e-5)
        penalised = evaluated(params, Batch(*data), alpha, 0.25, leaves=leaves)
        assert float(penalised[0][0] - loss) == pytest.approx(0.25 * np.abs(weights).sum(), rel=1e-4)
        assert penalised[0][1] == score  # hard trees are scored without the penalty
        steeper = penalised[1].weights - gradient.weights
        np.testing.assert_allclose(steeper, 0.25 * np.sign(weights), rtol=1e-4, atol=1e-5)


def test_loss_of_classes_is_the_expected_log_loss(data):
    x, y = data[0], np.digitize(data[1], [-1.0, 1.0])
    task, batch = Classification(3), Batch(jnp.asarray(x), jnp.asarray(y))
    params = jax.jit(partial(jtrees.methods.get(DEPTH, 6.0, task=task).init, key=jax.random.key(3)))(batch)
    (loss, score), _, hard = evaluated(params, batch, 6.0, 0.0, task=task)
    weights, bias, logits = (np.asarray(a, np.float64) for a in jax.tree.leaves(params))
    right = oracles.sigmoid(6 * (weights @ x.astype(np.float64).T + bias[:, None]))
    softmax = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = np.mean(oracles.expected_value(right, -np.log(softmax[:, y])))
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    leaf = params.leaf_index(x)
    smoothed = oracles.class_frequencies(leaf, y, 4, 3, np.ones(len(y)))[1]
    assert float(score) == pytest.approx(-np.log(smoothed[leaf, y]).mean(), rel=1e-4)
    # While training leaves hold logits, in the hard tree frequencies.
    np.testing.assert_allclose(params.predict(x), softmax[leaf], rtol=1e-5)
    assert np.array_equal(hard.weights, params.weights)
    np.testing.assert_allclose(hard.leaves.values, smoothed, rtol=1e-5)


def test_start_and_hardening(data):
    x, y = data
    init = jax.jit(lambda batch: jtrees.methods.get(DEPTH, 1.0).init(batch, key=jax.random.key(0)))
    params = jax.tree.map(np.asarray, init(Batch(x, y)))
    assert params.weights.shape == (3, 3) and np.abs(params.weights).max() <= 1 and np.abs(params.bias).max() <= 1
    assert y.min() <= np.min(params.leaves.values) <= np.max(params.leaves.values) <= y.max()
    # A node that sends all one way leaves a leaf empty: it predicts the middle of the targets' range.
    params = params.replace(bias=np.append(params.bias[:2], np.float32(100)))
    hard = evaluated(params, Batch(x, y), 7.0, 0.0)[2]
    assert np.array_equal(hard.weights, params.weights)
    leaf = oracles.walk(params.weights, params.bias, x)
    assert 2 not in leaf and 3 in leaf
    means = oracles.leaf_means(leaf, y, 4, (y.min() + y.max()) / 2)
    np.testing.assert_allclose(hard.leaves.values, means, rtol=1e-5)


def test_alpha_may_be_a_schedule(data):
    batch, params = Batch(*map(jnp.asarray, data)), random_params("constant")
    schedule = optax.linear_schedule(5.0, 100.0, 10)
    annealed = jax.jit(lambda step: jtrees.methods.get(DEPTH, schedule).loss(params, batch, key=None, step=step)[0])
    for step, alpha in [(0, 5.0), (4, 43.0), (20, 100.0)]:
        fixed = evaluated(params, batch, alpha, 0.0)[0][0]
        assert float(annealed(jnp.int32(step))) == pytest.approx(float(fixed), rel=1e-5)


BAD = [("depth", 17), *(("alpha", value) for value in (0.0, np.nan, None, [1.0, 2.0])), ("leaves", "quadratic")]


@pytest.mark.parametrize(("name", "value"), [*BAD, *(("l1", value) for value in (-0.1, [0.1, 0.2], lambda step: 0.1))])
def test_bad_arguments_are_refused_by_the_method(name, value):
    with pytest.raises(ValueError, match=f"{name} must be"):
        jtrees.methods.get(**{"depth": 2, "alpha": 1.0, name: value})


def two_targets(data):
    x, y = data
    other = np.where(x[:, 1] - x[:, 2] > 0, 5.0, 3.0) + 0.1 * x[:, 0]
    return x, np.column_stack([y, other]).astype(np.float32)


def test_several_targets_are_means_in_one_tree(data):
    x, y = two_targets(data)
    result = fit(x, y)
    predictions, report = result.predict(x), result.report.search
    leaf = result.tree.leaf_index(x)
    np.testing.assert_allclose(predictions, oracles.leaf_means(leaf, y, 4, 0)[leaf], rtol=1e-5)
    unit = np.ptp(y, axis=0)  # the loss is the mean over targets scaled to [0, 1]
    assert result.loss == pytest.approx(np.mean(((predictions - y) / unit) ** 2), rel=1e-5)
    cart = DecisionTreeRegressor(max_depth=DEPTH, random_state=0).fit(x, y / unit)
    assert report.cart_loss == pytest.approx(np.mean((cart.predict(x) - y / unit) ** 2), rel=1e-4)
    assert result.loss < 0.9 * report.cart_loss
    low, high = report.sharpness.min(0), report.sharpness.max(0)  # a start has its own, drawn from the ranges
    assert (low >= [5, 50]).all() and (high <= [25, 150]).all() and len(np.unique(report.sharpness)) == 4
    assert not np.array_equal(report.sharpness, fit(x, y, seed=1).report.search.sharpness)


@pytest.mark.parametrize("leaves", ["constant", "linear"])
def test_the_loss_of_several_targets_is_the_mean_of_theirs(data, leaves):
    x, y = two_targets(data)
    params = random_params(leaves, (2,))
    evaluate = partial(evaluated, alpha=7.0, l1=0.0, leaves=leaves, score=leaves == "constant")
    (loss, score), gradient, hard = evaluate(params, Batch(x, y))
    target_leaves = lambda tree, j: jax.tree.map(lambda a: np.asarray(a)[..., j], tree.leaves)
    alone = [evaluate(params.replace(leaves=target_leaves(params, j)), Batch(x, y[:, j])) for j in range(2)]
    assert float(loss) == pytest.approx(np.mean([target[0][0] for target in alone]), rel=1e-5)
    if score is not None:  # of linear leaves it takes as long to compile as all else: see the slow tests
        assert float(score) == pytest.approx(np.mean([target[0][1] for target in alone]), rel=1e-4)
    slopes = np.mean([target[1].weights for target in alone], axis=0)
    np.testing.assert_allclose(gradient.weights, slopes, rtol=1e-3, atol=1e-5)
    for j in range(2):
        close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
        jax.tree.map(close, target_leaves(hard, j), alone[j][2].leaves)


@pytest.mark.slow
def test_linear_leaves_of_two_planes(data):
    """They beat constants, are chosen by an estimate of their loss on new samples, and stay near the targets."""
    rng = np.random.default_rng(5)
    x, x_new = data[0], rng.normal(size=(500, 3)).astype(np.float32)
    y, y_new = (np.where(a[:, 0] + a[:, 1] > 0, 1 + 2 * a[:, 2], -1 - 3 * a[:, 0]) for a in (x, x_new))
    y, y_new = (a + 0.1 * rng.normal(size=len(a)) for a in (y, y_new))
    result, constant = fit(x, y, seed=1, leaves="linear", epochs=40), fit(x, y)
    report = result.report.search
    error = lambda fit, x, y: np.mean((fit.predict(x) - y) ** 2)
    assert error(result, x_new, y_new) < 0.5 * error(constant, x_new, y_new)
    assert error(result, x, y) < result.loss < 2 * error(result, x_new, y_new)
    assert result.loss <= report.cart_loss and (report.steps % 2 == 0).all()  # 20 evaluations
    assert result.loss == pytest.approx(report.losses.min(), rel=1e-3)
    far, margin = result.predict(100 * x_new), 0.1 * np.ptp(y)
    assert (far <= y.max() + 1.001 * margin).all() and (far >= y.min() - 1.001 * margin).all()


@pytest.mark.slow
def test_linear_leaves_of_a_plane_are_one_leaf():
    """Splits below which all leaves are equal are merged."""
    x = np.random.default_rng(3).normal(size=(200, 3)).astype(np.float32)
    y = x @ np.float32([1.0, -2.0, 0.5])
    exact = fit(x, y, leaves="linear", epochs=40).tree
    assert exact.num_leaves == 1 and not exact.splits.any() and exact.num_parameters == 3 + 1 + 2
    # Of an exact fit the criterion is rounding, which chooses a ridge of at most 0.1 of the 200 samples.
    np.testing.assert_allclose(exact.predict(x), y, rtol=5e-4, atol=1e-3)


@pytest.mark.parametrize("method", [jtrees.methods.get, jtrees.methods.raddt])
def test_without_a_score_the_loss_is_the_same_and_the_score(data, method):
    params, batch = random_params("linear"), Batch(*map(jnp.asarray, data))
    unscored = method(3, 7.0, leaves="linear", l1=0.25, scored=False).loss
    loss, score = jax.jit(lambda params: unscored(params, batch, key=None, step=0))(params)
    scored = method(3, 7.0, leaves="linear", l1=0.25).loss
    assert float(loss) == float(jax.jit(lambda params: scored(params, batch, key=None, step=0)[0])(params))
    assert float(score) == pytest.approx(float(loss) - 0.25 * float(jnp.abs(params.weights).sum()), rel=1e-5)


def test_epochs_under_each_sharpness_unless_they_are_given():
    for leaves, depth, epochs in [("constant", 8, 3000), ("linear", 6, 1000), ("linear", 7, 250)]:
        recipe = jtrees.GET(leaves=leaves, depth=depth)
        assert (recipe.updates, recipe.replace(epochs=500).updates) == (epochs, 500)
