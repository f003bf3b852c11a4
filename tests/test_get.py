"""GET: the method, several targets and linear leaves. Its search: test_restarts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score
from sklearn.tree import DecisionTreeRegressor

import jtrees
from jtrees.search import options
from jtrees.tasks import Classification
from jtrees.training import Batch

pytestmark = pytest.mark.usefixtures("standard_promotion")  # the recipe trains with AdamW

DEPTH = 2
# One program for the fits of this file that share the options and the number of rows (193 to 200 are one bucket).
SMALL = {"depth": DEPTH, "starts": 2, "epochs": 60, "shrink": False, "halving": False}
LINEAR = {"leaves": "linear", "epochs": 40}
LEAVES_AND_FITS = [
    pytest.param("constant", "base", marks=pytest.mark.slow),
    pytest.param("linear", "planes", marks=pytest.mark.wide),
]


def fit(x, y, *, seed=0, **changed):
    return jtrees.fit(jtrees.GET(**{**SMALL, **changed}), x, y, key=jax.random.key(seed))


def same(a, b):
    return jax.tree.all(jax.tree.map(np.array_equal, a, b))


@pytest.fixture(scope="module")
def base(data):
    """What most tests compare with."""
    with jax.numpy_dtype_promotion("standard"):
        return fit(*data)


# --- The method ------------------------------------------------------------------------------------------------------


def random_params(leaves, k=(), depth=DEPTH):
    rng = np.random.default_rng(1)
    draw = lambda *shape: jax.device_put(rng.uniform(-1, 1, shape).astype(np.float32))
    n = 2**depth
    kinds = {"constant": lambda: jtrees.leaves.Values(draw(n, *k))}
    kinds["linear"] = lambda: jtrees.leaves.Linear(draw(n, 3, *k), draw(n, *k))
    return jtrees.ObliqueTree(draw(n - 1, 3), draw(n - 1), kinds[leaves]())


@partial(jax.jit, static_argnames=("leaves", "score"))
def evaluated(params, batch, alpha, l1, leaves="constant", score=True):
    """((loss, score), gradient) of the method, and its hard tree; what is not needed is not compiled."""
    task = jtrees.Regression(None if batch.y.ndim == 1 else batch.y.shape[1])
    method = jtrees.methods.get(DEPTH, alpha, leaves=leaves, l1=l1, task=task)
    (loss, value), gradient = jax.value_and_grad(method.loss, has_aux=True)(params, batch, key=None, step=jnp.int32(0))
    return (loss, value if score else None), gradient, method.harden(params, batch)


def test_loss_is_the_expected_squared_error_of_sharpened_sigmoids(data):
    x, y = data
    params = random_params("constant")
    weights, bias, values = (np.asarray(a, np.float64) for a in jax.tree.leaves(params))
    for alpha in (1.0, 30.0):
        (loss, score), gradient, _ = evaluated(params, Batch(*data), alpha, 0.0)
        outputs = values[:, None] + np.zeros(len(y))
        expected = oracles.expected_leaf_loss(alpha * weights, alpha * bias, outputs, x, y, np.ones(len(y)))
        assert float(loss) == pytest.approx(expected, rel=1e-4)
        leaf = oracles.walk(weights, bias, x)
        means = oracles.leaf_means(leaf, y, 4, 0)
        assert float(score) == pytest.approx(np.mean((y - means[leaf]) ** 2), rel=1e-4)
        penalised = evaluated(params, Batch(*data), alpha, 0.25)
        assert float(penalised[0][0] - loss) == pytest.approx(0.25 * np.abs(weights).sum(), rel=1e-4)
        assert penalised[0][1] == score  # hard trees are scored without the penalty
        steeper = penalised[1].weights - gradient.weights
        np.testing.assert_allclose(steeper, 0.25 * np.sign(weights), rtol=1e-4, atol=1e-5)


def test_loss_of_classes_is_the_expected_log_loss(data):
    x, y = data[0], np.digitize(data[1], [-1.0, 1.0])
    method, batch = jtrees.methods.get(DEPTH, 6.0, task=Classification(3)), Batch(jnp.asarray(x), jnp.asarray(y))

    @jax.jit
    def evaluated(batch):
        params = method.init(batch, key=jax.random.key(3))
        return params, method.loss(params, batch, key=None, step=0), method.harden(params, batch)

    params, (loss, score), hard = evaluated(batch)
    weights, bias, logits = (np.asarray(a, np.float64) for a in jax.tree.leaves(params))
    right = oracles.sigmoid(6 * (weights @ x.astype(np.float64).T + bias[:, None]))
    softmax = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = np.mean(oracles.expected_value(right, -np.log(softmax[:, y])))
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    leaf = params.leaf_index(x)
    smoothed = oracles.class_frequencies(leaf, y, 4, 3, 1.0, np.ones(len(y)))[1]
    assert float(score) == pytest.approx(-np.log(smoothed[leaf, y]).mean(), rel=1e-4)
    # While training leaves hold logits, in the hard tree frequencies.
    np.testing.assert_allclose(params.predict(x), softmax[leaf], rtol=1e-5)
    assert np.array_equal(hard.weights, params.weights)
    np.testing.assert_allclose(hard.leaves.values, smoothed, rtol=1e-5)


def test_start_and_hardening(data):
    x, y = data
    init = jax.jit(lambda batch: jtrees.methods.get(DEPTH, 1.0).init(batch, key=jax.random.key(0)))
    params = jax.tree.map(np.asarray, init(Batch(x, y)))
    assert params.weights.shape == (3, 3)
    assert np.abs(params.weights).max() <= 1
    assert np.abs(params.bias).max() <= 1
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


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("depth", [0, 17, 2.5, "2"]),
        ("alpha", [0.0, -1.0, np.nan, np.inf, "steep", None, [1.0, 2.0]]),
        ("l1", [-0.1, np.nan, "much", None, [0.1, 0.2], lambda step: 0.1]),
        ("leaves", ["quadratic", None]),
    ],
)
def test_bad_arguments_are_refused_by_the_method(name, values):
    for value in values:
        with pytest.raises(ValueError, match=f"{name} must be"):
            jtrees.methods.get(**{"depth": 2, "alpha": 1.0, name: value})


def test_other_kinds_of_cart_are_refused():
    for cart in ("False", 2, 1):
        with pytest.raises(ValueError, match=r'^cart must be True, False or "binned", got '):
            options.checked(jtrees.GET(cart=cart))


@pytest.mark.parametrize("leaves", ["constant", "linear"])
def test_batches_of_an_epoch_sum_to_what_all_samples_give(data, leaves):
    """A heavy sample counts as much in a light batch as in another, as weights are normalised once."""
    rng = np.random.default_rng(0)
    weight = np.where(np.arange(200) % 50 == 3, 30.0, rng.uniform(0, 1, 200)).astype(np.float32)
    weight /= weight.mean()
    params, method = random_params(leaves), jtrees.methods.get(DEPTH, 7.0, leaves=leaves)
    loss = jax.jit(jax.value_and_grad(lambda p, batch: method.loss(p, batch, key=None, step=0)[0]))
    expected = loss(params, Batch(*data, weight))
    parts = [loss(params, jax.tree.map(lambda a, i=i: a[i : i + 40], Batch(*data, weight))) for i in range(0, 200, 40)]
    for value, *batch_values in zip(*(jax.tree.leaves(result) for result in (expected, *parts)), strict=True):
        np.testing.assert_allclose(np.mean(batch_values, axis=0), value, rtol=1e-4, atol=1e-4)


# --- The recipe ------------------------------------------------------------------------------------------------------


def test_each_start_has_sharpnesses_of_its_own_drawn_from_the_ranges(data, base):
    sharpness = base.report.search.sharpness
    assert sharpness.shape == (2, 2)
    assert (sharpness[:, 0] >= 5).all() and (sharpness[:, 0] <= 25).all()
    assert (sharpness[:, 1] >= 50).all() and (sharpness[:, 1] <= 150).all()
    assert len(np.unique(sharpness)) == 4
    assert not np.array_equal(sharpness, fit(*data, seed=1).report.search.sharpness)


# --- Several targets -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(data):
    """A second target that another border divides."""
    x, y = data
    other = np.where(x[:, 1] - x[:, 2] > 0, 5.0, 3.0) + 0.1 * x[:, 0]
    return x, np.column_stack([y, other]).astype(np.float32)


@pytest.mark.parametrize(("leaves", "fitted_alone"), LEAVES_AND_FITS)
def test_one_column_is_one_target_and_two_alike_are_learnt_like_one(request, leaves, fitted_alone):
    """In whatever units, as each target is scaled by itself."""
    x, y = request.getfixturevalue("data" if leaves == "constant" else "pieces")[:2]
    alone, options = request.getfixturevalue(fitted_alone), {} if leaves == "constant" else {"seed": 1, **LINEAR}
    for factors in ([1.0], [1.0, 4.0]) if leaves == "constant" else ([1.0, 4.0],):  # linear ones compile long
        result = fit(x, y[:, None] * np.float32(factors), **options)
        unit = 1 if len(factors) == 1 else np.ptp(y) ** 2  # the loss of several targets is of targets in [0, 1]
        np.testing.assert_allclose(result.report.search.losses * unit, alone.report.search.losses, rtol=1e-3)
        assert result.loss * unit == pytest.approx(alone.loss, rel=1e-3)
        predictions = result.predict(x) / factors
        assert predictions.shape == (200, len(factors))
        expected = np.broadcast_to(alone.predict(x)[:, None], predictions.shape)
        np.testing.assert_allclose(predictions, expected, rtol=1e-3, atol=1e-3)


def test_several_targets_are_means_in_one_tree(pair):
    x, y = pair
    result = fit(x, y)
    leaf, predictions = result.tree.leaf_index(x), result.predict(x)
    means = oracles.leaf_means(leaf, y, 4, 0)
    np.testing.assert_allclose(predictions, means[leaf], rtol=1e-5)
    # The loss is the mean over targets scaled to [0, 1].
    scaled = lambda a: (a - y) / np.ptp(y, axis=0)
    assert result.loss == pytest.approx(np.mean(scaled(predictions) ** 2), rel=1e-5)
    cart = DecisionTreeRegressor(max_depth=DEPTH, random_state=0).fit(x, y / np.ptp(y, axis=0))
    cart_loss = np.mean((cart.predict(x) - y / np.ptp(y, axis=0)) ** 2)
    assert result.report.search.cart_loss == pytest.approx(cart_loss, rel=1e-4)
    assert result.loss < 0.9 * cart_loss


@pytest.mark.parametrize("leaves", ["constant", "linear"])
def test_the_loss_of_several_targets_is_the_mean_of_theirs(pair, leaves):
    x, y = pair
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
        for values, target in zip(
            jax.tree.leaves(target_leaves(hard, j)), jax.tree.leaves(alone[j][2].leaves), strict=True
        ):
            np.testing.assert_allclose(values, target, rtol=1e-4, atol=1e-4)


# --- Linear leaves ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pieces(data):
    """Two planes that an oblique border divides, and samples not trained on."""
    rng = np.random.default_rng(5)

    def targets(x):
        y = np.where(x[:, 0] + x[:, 1] > 0, 1 + 2 * x[:, 2], -1 - 3 * x[:, 0])
        return (y + 0.1 * rng.normal(size=len(x))).astype(np.float32)

    new = rng.normal(size=(500, 3)).astype(np.float32)
    return data[0], targets(data[0]), new, targets(new)


@pytest.fixture(scope="module")
def planes(pieces):
    """What most tests of linear leaves compare with."""
    with jax.numpy_dtype_promotion("standard"):
        return fit(*pieces[:2], seed=1, **LINEAR)


@pytest.mark.slow
def test_linear_leaves_beat_constants_on_planes(pieces, planes):
    x, y, x_new, y_new = pieces
    tree, report = planes.tree, planes.report
    constant = fit(x, y).tree
    assert isinstance(tree.leaves, jtrees.leaves.Linear)
    assert np.mean((tree.predict(x_new) - y_new) ** 2) < 0.5 * np.mean((constant.predict(x_new) - y_new) ** 2)
    assert planes.loss <= report.search.cart_loss
    if report.search.chosen >= 0:
        assert planes.loss < report.search.cart_loss
        assert planes.loss == pytest.approx(report.search.losses.min(), rel=1e-3)  # as in the search, but for raw x
    # Evaluated 20 times under each sharpness: every second of 40 epochs, and after the last.
    assert (report.search.steps % 2 == 0).all()
    # Trees are chosen by an estimate of the loss on new samples: of the right size, and above the training loss.
    assert np.mean((tree.predict(x) - y) ** 2) < planes.loss < 2 * np.mean((tree.predict(x_new) - y_new) ** 2)


@pytest.mark.slow
def test_predictions_of_linear_leaves_stay_in_bounds_that_come_from_targets(pieces, planes):
    x, y, x_new, _ = pieces
    tree = planes.tree
    lower, upper = np.asarray(tree.leaves.lower), np.asarray(tree.leaves.upper)
    for far in (x, x_new, 100 * x_new):
        leaf, predictions = tree.leaf_index(far), tree.predict(far)
        assert (lower[leaf] <= predictions).all() and (predictions <= upper[leaf]).all()
    # Those of a leaf are the targets' range in it or in one of its ancestors, a tenth wider on both sides.
    leaf = tree.leaf_index(x)
    for k in range(4):
        ranges = [y[leaf >> up == k >> up] for up in range(DEPTH + 1)]
        allowed = [(a.min() - 0.1 * np.ptp(a), a.max() + 0.1 * np.ptp(a)) for a in ranges if len(a)]
        assert any(np.allclose((lower[k], upper[k]), pair, rtol=1e-5, atol=1e-5) for pair in allowed)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [2.0**13, 2.0**-10, 2.0**-30, 2.0**40, 2.0**66])
@pytest.mark.parametrize("which", ["x", "y"])
def test_units_do_not_matter_to_linear_leaves(pieces, planes, which, factor):
    x, y, x_new, _ = pieces
    a, b = (np.float32(factor if which == name else 1) for name in "xy")
    moved = fit(x * a, y * b, seed=1, **LINEAR)
    unit = float(b) ** 2
    assert moved.report.search.cart_loss / unit == pytest.approx(planes.report.search.cart_loss, rel=1e-6)
    assert moved.loss / unit == pytest.approx(planes.loss, rel=1e-6)
    np.testing.assert_allclose(moved.report.search.losses / unit, planes.report.search.losses, rtol=1e-5)
    # Sums of four float32 terms of the size of y, some of which cancel.
    np.testing.assert_allclose(moved.predict(x_new * a) / b, planes.predict(x_new), rtol=1e-5, atol=1e-5)


def noisy_plane(seed, n):
    rng = np.random.default_rng(seed)
    x, x_new = (rng.normal(size=(size, 3)).astype(np.float32) for size in (n, 4000))
    y, y_new = (a @ [1.0, -2.0, 0.5] + 2 * rng.normal(size=len(a)) for a in (x, x_new))
    plane = LinearRegression().fit(x, y).score(x_new, y_new)
    assert 0.5 < plane < 0.6  # the rest is noise, which many leaves could follow at will
    return x, y, x_new, y_new, plane


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "depth"),
    [pytest.param(2000, 1, marks=pytest.mark.wide), pytest.param(2000, 7, marks=pytest.mark.wide), (200, 4)],
)
def test_linear_leaves_hardly_fall_behind_a_linear_regression(n, depth):
    for seed in range(2):
        x, y, x_new, y_new, plane = noisy_plane(seed, n)
        tree = fit(x, y, depth=depth, leaves="linear", starts=1, epochs=20).tree
        assert r2_score(y_new, tree.predict(x_new)) > plane - 0.01


@pytest.mark.slow
def test_linear_leaves_of_a_plane_are_one_leaf(planes):
    """Splits below which all leaves are equal are merged before anything is counted or shown."""
    for seed in range(4):
        x, y, x_new, y_new, plane = noisy_plane(seed, 200)
        tree = fit(x, y, **LINEAR).tree
        assert r2_score(y_new, tree.predict(x_new)) > plane - 0.01
        distinct = np.unique(np.asarray(tree.leaves.coefficients)[np.unique(tree.leaf_index(x))], axis=0)
        assert tree.num_leaves == len(distinct) < 4
    x, y = x, x @ np.float32([1.0, -2.0, 0.5])
    exact = fit(x, y, **LINEAR).tree
    assert exact.num_leaves == 1 and not exact.splits.any()
    assert exact.num_parameters == 3 + 1 + 2
    # Of an exact fit the criterion is rounding, which chooses a ridge of at most 0.1 of the 200 samples.
    np.testing.assert_allclose(exact.predict(x), y, rtol=5e-4, atol=1e-3)


@pytest.mark.wide
def test_linear_leaves_of_three_starts(pieces):
    """The last batch of starts is padded: two decompositions of a program would wait for each other."""
    assert fit(*pieces[:2], **LINEAR, starts=3).report.search.losses.shape == (3, 2)


def test_loss_of_linear_leaves_is_the_expected_squared_error(data):
    x, y = data
    params = random_params("linear")
    weights, bias, slopes, intercept = (np.asarray(a, np.float64) for a in jax.tree.leaves(params))
    outputs = slopes @ x.T + intercept[:, None]
    expected = oracles.expected_leaf_loss(7 * weights, 7 * bias, outputs, x, y, np.ones(len(y)))
    evaluate = partial(evaluated, leaves="linear", score=False)  # a program of several targets
    (plain, _), gradient, hard = evaluate(params, Batch(x, y), alpha=7.0, l1=0.0)
    (penalised, _), steeper, same_hard = evaluate(params, Batch(x, y), alpha=7.0, l1=0.25)
    assert float(plain) == pytest.approx(expected, rel=1e-4)
    assert float(penalised) == pytest.approx(expected + 0.25 * np.abs(weights).sum(), rel=1e-4)
    assert same(hard, same_hard)  # hard trees have no penalty
    np.testing.assert_allclose(steeper.weights - gradient.weights, 0.25 * np.sign(weights), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_score_of_linear_leaves_is_their_criterion(data):
    params, batch = random_params("linear"), Batch(*map(jnp.asarray, data))
    score, penalised = (float(evaluated(params, batch, 7.0, l1, leaves="linear")[0][1]) for l1 in (0.0, 0.25))
    leaf = jnp.asarray(oracles.walk(params.weights, params.bias, batch.x))
    assert score == pytest.approx(float(params.leaves.criterion(leaf, *batch)), rel=1e-5)
    assert score == penalised  # hard trees are scored without the penalty


@pytest.mark.parametrize("method", [jtrees.methods.get, jtrees.methods.raddt])
def test_without_a_score_the_loss_is_the_same_and_the_score(data, method):
    params, batch = random_params("linear"), Batch(*map(jnp.asarray, data))
    unscored = method(3, 7.0, leaves="linear", l1=0.25, scored=False).loss
    loss, score = jax.jit(lambda params: unscored(params, batch, key=None, step=0))(params)
    scored = method(3, 7.0, leaves="linear", l1=0.25).loss
    assert float(loss) == float(jax.jit(lambda params: scored(params, batch, key=None, step=0)[0])(params))
    assert float(score) == pytest.approx(float(loss) - 0.25 * float(jnp.abs(params.weights).sum()), rel=1e-5)


@pytest.mark.parametrize(
    "leaves, depth, epochs", [("constant", 4, 3000), ("constant", 8, 3000), ("linear", 6, 1000), ("linear", 7, 250)]
)
def test_epochs_under_each_sharpness_unless_they_are_given(leaves, depth, epochs):
    recipe = jtrees.GET(leaves=leaves, depth=depth)
    assert recipe.updates == epochs
    assert recipe.replace(epochs=500).updates == 500
