"""GET: the method, and the recipe from a table to a hard tree."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from sklearn.datasets import load_diabetes
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score
from sklearn.tree import DecisionTreeRegressor

import jtrees

pytestmark = pytest.mark.usefixtures("standard_promotion")  # fit_get trains with AdamW

DEPTH = 2
SMALL = {"depth": DEPTH, "starts": 3, "epochs": 60}  # one compilation for the fits of this file that share it


def fit(x, y, *, seed=0, **options):
    return jtrees.fit_get(x, y, key=jax.random.key(seed), **{**SMALL, **options})


def mse(tree, x, y):
    """Mean squared error of a tree on its own walk, in float64."""
    x = np.asarray(x, np.float32)
    leaf = oracles.walk(tree.weights, tree.bias, x)
    return np.mean((np.asarray(y, np.float64) - np.asarray(tree.leaves.values, np.float64)[leaf]) ** 2)


def cart_mse(x, y, depth):
    return np.mean((DecisionTreeRegressor(max_depth=depth, random_state=0).fit(x, y).predict(x) - y) ** 2)


# --- The method ------------------------------------------------------------------------------------------------------


def test_loss_is_the_expected_squared_error_of_scaled_sigmoids(data):
    x, y = data
    params = jtrees.get(DEPTH, 1.0).init(*map(jnp.asarray, data), key=jax.random.key(1))
    weights, bias, values = (np.asarray(a, np.float64) for a in jax.tree.leaves(params))
    for alpha in (1.0, 30.0):
        loss, score = jtrees.get(DEPTH, alpha).loss(params, *map(jnp.asarray, data), key=None, step=0)
        outputs = values[:, None] + np.zeros(len(y))
        expected = oracles.expected_leaf_loss(alpha * weights, alpha * bias, outputs, x, y, np.ones(len(y)))
        assert float(loss) == pytest.approx(expected, rel=1e-4)
        leaf = oracles.walk(weights, bias, x)
        means = oracles.leaf_means(leaf, y, 4, 0)
        assert float(score) == pytest.approx(np.mean((y - means[leaf]) ** 2), rel=1e-4)


def test_start_and_hardening(data):
    x, y = map(jnp.asarray, data)
    method = jtrees.get(DEPTH, 10.0)
    params = method.init(x, y, key=jax.random.key(0))
    assert params.weights.shape == (3, 3)
    assert float(jnp.abs(params.weights).max()) <= 1
    assert float(jnp.abs(params.bias).max()) <= 1
    assert y.min() <= params.leaves.values.min() <= params.leaves.values.max() <= y.max()
    hard = jax.jit(method.harden)(params, x, y)
    assert np.array_equal(hard.weights, params.weights)
    means = oracles.leaf_means(oracles.walk(params.weights, params.bias, x), y, 4, (y.min() + y.max()) / 2)
    np.testing.assert_allclose(hard.leaves.values, means, rtol=1e-5)
    assert np.array_equal(method.predict(hard, x), hard.predict(x))


def test_jit_vmap_and_grad_over_keys_and_alphas(data):
    x, y = map(jnp.asarray, data)

    def value(key, alpha):
        method = jtrees.get(DEPTH, alpha)
        params = method.init(x, y, key=key)
        return jax.value_and_grad(lambda p: method.loss(p, x, y, key=key, step=0), has_aux=True)(params)

    keys, alphas = jax.random.split(jax.random.key(0), 2), jnp.asarray([2.0, 9.0])
    together = jax.jit(jax.vmap(value))(keys, alphas)
    for i in range(2):
        for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(value(keys[i], alphas[i])), strict=True):
            np.testing.assert_allclose(one[i], other, rtol=1e-4, atol=1e-5)


def test_alpha_may_be_a_schedule(data):
    x, y = map(jnp.asarray, data)
    schedule = optax.linear_schedule(5.0, 100.0, 10)
    params = jtrees.get(DEPTH, 1.0).init(x, y, key=jax.random.key(0))
    for step, alpha in [(0, 5.0), (4, 43.0), (20, 100.0)]:
        annealed = jtrees.get(DEPTH, schedule).loss(params, x, y, key=None, step=jnp.int32(step))[0]
        fixed = jtrees.get(DEPTH, alpha).loss(params, x, y, key=None, step=0)[0]
        assert float(annealed) == pytest.approx(float(fixed), rel=1e-5)


@pytest.mark.parametrize("arguments", [(0, 1.0), (17, 1.0), (2.5, 1.0), ("2", 1.0)])
def test_bad_depths_are_refused_by_the_method(arguments):
    with pytest.raises(ValueError, match="depth must be"):
        jtrees.get(*arguments)


@pytest.mark.parametrize("alpha", [0.0, -1.0, np.nan, np.inf])
def test_bad_alphas_are_refused_by_the_method(alpha):
    with pytest.raises(ValueError, match="alpha must be"):
        jtrees.get(2, alpha)


# --- The recipe ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("depth", [DEPTH, 4])
def test_never_worse_than_cart_and_reported_as_it_is(data, depth, seed):
    rng = np.random.default_rng(seed)
    x, y = data[0], (data[1] + seed * rng.normal(size=len(data[1]))).astype(np.float32)
    tree, report = (result := fit(x, y, depth=depth, seed=seed)).tree, result.report
    assert report.loss <= report.cart_loss
    assert report.cart_loss == pytest.approx(cart_mse(x, y, depth), rel=1e-5)
    # float64 scores of the walk may send a sample that lies on a hyperplane the other way: no more than one does.
    assert report.loss == pytest.approx(np.mean((y - tree.predict(x)) ** 2, dtype=np.float64), rel=1e-5)
    assert report.loss == pytest.approx(mse(tree, x, y), rel=2e-2)
    assert report.scales.shape == report.losses.shape == report.steps.shape == (3, 2)
    assert (report.scales[:, 0] >= 5).all() and (report.scales[:, 0] <= 25).all()
    assert (report.scales[:, 1] >= 50).all() and (report.scales[:, 1] <= 150).all()
    assert (report.steps >= 0).all() and (report.steps <= 60).all()
    assert report.dropped == 0
    if report.chosen >= 0:
        assert report.chosen == int(np.argmin(report.losses.min(1)))
        assert report.loss == pytest.approx(report.losses.min(), rel=1e-3)  # scored on scaled data, in float32
        assert report.loss < report.cart_loss
    else:
        assert report.loss == report.cart_loss


def test_same_key_same_tree_other_key_other_tree_and_no_compilation(data, count_compilations):
    first = fit(*data)
    assert count_compilations(lambda: fit(*data)) == 0
    assert jax.tree.all(jax.tree.map(np.array_equal, first.tree, fit(*data).tree))
    assert not np.array_equal(first.report.scales, fit(*data, seed=1).report.scales)


# Powers of two change no digit of a float32: the same table in other units must give the same tree in other units.
FACTORS = [2.0**13, 2.0**-10, 2.0**-30, 2.0**40, 2.0**66]


@pytest.mark.parametrize("factor", FACTORS)
def test_units_of_x_do_not_matter(data, factor):
    x, y = data
    base, moved = fit(x, y), fit(x * np.float32(factor), y)
    assert moved.report.cart_loss == pytest.approx(base.report.cart_loss, rel=1e-6)
    assert moved.report.loss == pytest.approx(base.report.loss, rel=1e-6)
    np.testing.assert_allclose(moved.tree.predict(x * np.float32(factor)), base.tree.predict(x), rtol=1e-6)


@pytest.mark.parametrize("factor", FACTORS)
def test_units_of_y_do_not_matter(data, factor):
    x, y = data
    base, moved = fit(x, y), fit(x, y * np.float32(factor))
    assert moved.report.cart_loss / factor**2 == pytest.approx(base.report.cart_loss, rel=1e-6)
    assert moved.report.loss / factor**2 == pytest.approx(base.report.loss, rel=1e-6)
    np.testing.assert_allclose(moved.report.losses / factor**2, base.report.losses, rtol=1e-5)
    np.testing.assert_allclose(moved.tree.predict(x), base.tree.predict(x) * np.float32(factor), rtol=1e-5)


@pytest.mark.parametrize(("factor", "shift"), [(1.0, 100.0), (1e6, 1e7), (1e-3, 5.0)])
@pytest.mark.parametrize("which", ["x", "y"])
def test_the_tree_returned_is_as_good_in_raw_units(data, which, factor, shift):
    moved = dict(zip("xy", (a.astype(np.float64) for a in data), strict=True))
    moved[which] = moved[which] * factor + shift
    x, y = moved["x"], moved["y"]
    tree, report = (result := fit(x, y, cart=False)).tree, result.report
    # Features far from zero lose digits in float32, so a sample beside a hyperplane may change side.
    assert report.loss == pytest.approx(report.losses.min(), rel=5e-2)
    answers = tree.predict(x.max() + 10 * (x - x.mean()))  # wherever samples may lie
    assert np.float32(y.min()) <= answers.min() <= answers.max() <= np.float32(y.max())


def test_y_without_a_difference_in_float32_is_refused(data):
    x, y = data
    with pytest.raises(ValueError, match="y must"):
        fit(x, 1e9 + y.astype(np.float64) / 10)


@pytest.mark.parametrize("constant", [0.0, 7.0, 1e6, 1e8])
def test_a_constant_column_does_no_harm(data, constant):
    x, y = data
    result = fit(np.column_stack([x, np.full(len(y), constant, np.float32)]), y, cart=False)
    assert np.isnan(result.report.cart_loss)
    # The tree returned takes raw x, and must be as good there as it was on the scaled data.
    assert result.report.loss == pytest.approx(result.report.losses.min(), rel=1e-2)


def test_tables_of_other_kinds(data):
    x, y = data
    reference = fit(x, y)
    assert fit(x.astype(np.float64), y.astype(np.float64)).report.loss == reference.report.loss
    assert fit(jnp.asarray(x), jnp.asarray(y)).report.loss == reference.report.loss
    assert fit(x.tolist(), y.tolist()).report.loss == reference.report.loss
    whole = fit(np.round(10 * x).astype(int), np.round(10 * y).astype(int))
    assert whole.report.loss <= whole.report.cart_loss
    twice = fit(np.repeat(x[:100], 2, axis=0), np.repeat(y[:100], 2))
    assert twice.report.loss <= twice.report.cart_loss
    assert twice.report.loss < np.var(y[:100])


def test_two_samples_are_enough():
    result = jtrees.fit_get([[0.0], [1.0]], [3.0, 5.0], key=jax.random.key(0), depth=1, starts=1, epochs=5)
    assert result.tree.predict([[0.0], [1.0]]).tolist() == [3, 5]


def test_beats_cart_clearly_on_diabetes():
    x, y = load_diabetes(return_X_y=True)
    result = fit(x, y, depth=3, starts=4, epochs=300)
    assert result.report.cart_loss == pytest.approx(cart_mse(x.astype(np.float32), y, 3), rel=1e-5)
    assert result.report.loss < 0.8 * result.report.cart_loss
    assert mse(result.tree, x, y) < 0.8 * result.report.cart_loss


def test_beats_cart_clearly_on_kin8nm(data_dir):
    table = np.load(data_dir / "kin8nm.npz")
    x, y = table["X"][:1500], table["y"][:1500]
    result = fit(x, y, depth=4, starts=2, epochs=200)
    assert result.report.loss < 0.7 * cart_mse(x, y, 4)
    assert mse(result.tree, x, y) == pytest.approx(result.report.loss, rel=1e-2)


# --- The door --------------------------------------------------------------------------------------------------------

X, Y = np.arange(12.0).reshape(6, 2), np.arange(6.0)


def spoilt(array, value):
    array = array.copy()
    array[1] = value
    return array


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (X[:, 0], Y, "x must have shape"),
        (X[None], Y, "x must have shape"),
        (X, Y[:, None], "y must have shape"),
        (X, 1.0, "y must have shape"),
        (X, Y[:5], "x and y must have the same number of rows, got 6 and 5"),
        (X[:0], Y[:0], "x must have at least one row"),
        (X[:, :0], Y, "x must have at least one row and one column"),
        (X[:1], Y[:1], "x and y must hold at least two samples"),
        (spoilt(X, np.nan), Y, "x must be finite"),
        (spoilt(X, np.inf), Y, "x must be finite"),
        (X, spoilt(Y, np.nan), "y must be finite"),
        (X, spoilt(Y, -np.inf), "y must be finite"),
        (X, np.full(6, 2.0), "y must take at least two values"),
        ([["a", "b"]] * 6, Y, "x must be numeric"),
        (X, ["low", "high"] * 3, "y must be numeric"),
    ],
)
def test_bad_tables_are_refused(x, y, message):
    with pytest.raises(ValueError, match=message):
        fit(x, y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 0}, "depth must be from 1 to 16, got 0"),
        ({"depth": 17}, "depth must be from 1 to 16, got 17"),
        ({"depth": 2.5}, "depth must be a whole number"),
        ({"depth": "3"}, "depth must be a whole number"),
        ({"depth": None}, "depth must be a whole number"),
        ({"starts": 0}, "starts must be at least 1"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"epochs": 1.5}, "epochs must be a whole number"),
        ({"learning_rate": 0.0}, "learning_rate must be"),
        ({"learning_rate": np.nan}, "learning_rate must be"),
        ({"alpha_ranges": ((0.0, 5.0),)}, "alpha_ranges must be"),
        ({"alpha_ranges": (5.0, 25.0)}, "alpha_ranges must be"),
        ({"alpha_ranges": ()}, "alpha_ranges must be"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fit(X, Y, **options)


def test_never_worse_than_cart_with_a_large_offset():
    # Years, ids and timestamps: scaled thresholds mapped back would move samples across the splits.
    rng = np.random.default_rng(0)
    x = (1.7e6 + rng.integers(0, 2000, size=(300, 2))).astype(np.float32)
    y = np.sin(x[:, 0] / 100) + 0.1 * rng.normal(size=300)
    fit = jtrees.fit_get(x, y, key=jax.random.key(0), depth=4, starts=1, epochs=5)
    model = DecisionTreeRegressor(max_depth=4, random_state=0).fit(x, y)
    cart = np.mean((model.predict(x) - y) ** 2)
    # In float32 a mean of 300 squares is exact to a few units in the last place.
    np.testing.assert_allclose(fit.report.cart_loss, cart, rtol=1e-5)
    assert fit.report.loss <= cart * (1 + 1e-5)


# --- Linear leaves ---------------------------------------------------------------------------------------------------

LINEAR = {"leaves": "linear", "epochs": 40}  # with DEPTH and three starts: one compilation


@pytest.fixture(scope="module")
def pieces(data):
    """Two planes that an oblique border divides, and samples not trained on."""
    rng = np.random.default_rng(5)

    def answers(x):
        y = np.where(x[:, 0] + x[:, 1] > 0, 1 + 2 * x[:, 2], -1 - 3 * x[:, 0])
        return (y + 0.1 * rng.normal(size=len(x))).astype(np.float32)

    new = rng.normal(size=(500, 3)).astype(np.float32)
    return data[0], answers(data[0]), new, answers(new)


def test_linear_leaves_beat_constants_on_planes(pieces):
    x, y, x_new, y_new = pieces
    tree, report = (result := fit(x, y, **LINEAR)).tree, result.report
    constant = fit(x, y).tree
    assert isinstance(tree.leaves, jtrees.LinearLeaves)
    assert np.mean((tree.predict(x_new) - y_new) ** 2) < 0.5 * np.mean((constant.predict(x_new) - y_new) ** 2)
    assert report.loss <= report.cart_loss
    if report.chosen >= 0:
        assert report.loss < report.cart_loss
        assert report.loss == pytest.approx(report.losses.min(), rel=1e-3)  # as in the search, but for routing raw x
    # Looked at 20 times under each scale: every second of 40 epochs, and after the last.
    assert (report.steps % 2 == 0).all()
    # What the trees are chosen by is an estimate for new samples: of the right size, and above the training loss.
    assert np.mean((tree.predict(x) - y) ** 2) < report.loss < 2 * np.mean((tree.predict(x_new) - y_new) ** 2)


def test_linear_answers_stay_in_bounds_that_come_from_targets(pieces):
    x, y, x_new, _ = pieces
    tree = fit(x, y, **LINEAR).tree
    lower, upper = np.asarray(tree.leaves.lower), np.asarray(tree.leaves.upper)
    for far in (x, x_new, 100 * x_new):
        leaf, answers = tree.leaf_index(far), tree.predict(far)
        assert (lower[leaf] <= answers).all() and (answers <= upper[leaf]).all()
    # Those of a leaf are the targets' range in it or in one of its ancestors, a tenth wider on both sides.
    leaf = tree.leaf_index(x)
    for k in range(4):
        ranges = [y[leaf >> up == k >> up] for up in range(DEPTH + 1)]
        allowed = [(a.min() - 0.1 * np.ptp(a), a.max() + 0.1 * np.ptp(a)) for a in ranges if len(a)]
        assert any(np.allclose((lower[k], upper[k]), pair, rtol=1e-5, atol=1e-5) for pair in allowed)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("which", ["x", "y"])
def test_units_do_not_matter_to_linear_leaves(pieces, which, factor):
    x, y, x_new, _ = pieces
    a, b = (np.float32(factor if which == name else 1) for name in "xy")
    base, moved = fit(x, y, **LINEAR), fit(x * a, y * b, **LINEAR)
    unit = float(b) ** 2
    assert moved.report.cart_loss / unit == pytest.approx(base.report.cart_loss, rel=1e-6)
    assert moved.report.loss / unit == pytest.approx(base.report.loss, rel=1e-6)
    np.testing.assert_allclose(moved.report.losses / unit, base.report.losses, rtol=1e-5)
    # Sums of four float32 terms of the size of y, some of which cancel.
    np.testing.assert_allclose(moved.tree.predict(x_new * a) / b, base.tree.predict(x_new), rtol=1e-5, atol=1e-5)


def test_linear_leaves_are_as_good_in_raw_units(pieces):
    x, y, x_new, _ = pieces
    base = fit(x, y, **LINEAR).tree.predict(x_new)
    moved = fit(1e3 * x + 5e3, 1e-3 * y + 7, **LINEAR).tree.predict(1e3 * x_new + 5e3)
    # Rounding x at a distance of five units from zero loses three bits, and may move a sample beside a hyperplane.
    assert np.mean((base - 1e3 * (moved.astype(np.float64) - 7)) ** 2) < 1e-2 * np.var(base)


@pytest.mark.parametrize(("n", "depth"), [(2000, 1), (2000, 8), (200, 4)])
def test_linear_leaves_hardly_fall_behind_a_linear_regression(n, depth):
    for seed in range(4):
        rng = np.random.default_rng(seed)
        x, x_new = (rng.normal(size=(size, 3)).astype(np.float32) for size in (n, 4000))
        y, y_new = (a @ [1.0, -2.0, 0.5] + 2 * rng.normal(size=len(a)) for a in (x, x_new))
        tree = fit(x, y, depth=depth, leaves="linear", starts=1, epochs=20).tree
        plane = LinearRegression().fit(x, y).score(x_new, y_new)
        assert 0.5 < plane < 0.6  # the rest is noise, which many leaves could follow at will
        assert r2_score(y_new, tree.predict(x_new)) > plane - 0.01


@pytest.mark.parametrize("starts", [2, 3])
def test_linear_leaves_same_key_same_tree_and_no_compilation(pieces, count_compilations, starts):
    x, y, *_ = pieces
    first = fit(x, y, **LINEAR, starts=starts)
    assert first.report.losses.shape == (starts, 2)
    assert count_compilations(lambda: fit(x, y, **LINEAR, starts=starts)) == 0
    assert jax.tree.all(jax.tree.map(np.array_equal, first.tree, fit(x, y, **LINEAR, starts=starts).tree))
    assert count_compilations(lambda: fit(x, 2 * y, **LINEAR, starts=starts, seed=1, l1=1e-3)) == 0


@jax.jit
def linear_loss(params, x, y, l1):
    """((loss, score), gradient) of GET-Linear."""
    method = jtrees.get(DEPTH, 7.0, leaves="linear", l1=l1)
    return jax.value_and_grad(method.loss, has_aux=True)(params, x, y, key=None, step=0)


def linear_params(x):
    rng = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(rng.uniform(-1, 1, shape), jnp.float32)
    return jtrees.ObliqueTree(draw(3, x.shape[1]), draw(3), jtrees.LinearLeaves(draw(4, x.shape[1]), draw(4)))


def test_loss_of_linear_leaves_is_the_expected_squared_error(data):
    x, y = data
    params = linear_params(x)
    weights, bias, slopes, intercept = (np.asarray(a, np.float64) for a in jax.tree.leaves(params))
    outputs = slopes @ x.T + intercept[:, None]
    expected = oracles.expected_leaf_loss(7 * weights, 7 * bias, outputs, x, y, np.ones(len(y)))
    (plain, score), gradient = linear_loss(params, x, y, 0.0)
    (penalised, same_score), steeper = linear_loss(params, x, y, 0.25)
    assert float(plain) == pytest.approx(expected, rel=1e-4)
    assert float(penalised) == pytest.approx(expected + 0.25 * np.abs(weights).sum(), rel=1e-4)
    assert score == same_score  # hard trees are judged without the penalty
    np.testing.assert_allclose(steeper.weights - gradient.weights, 0.25 * np.sign(weights), rtol=1e-4, atol=1e-5)


def test_l1_penalty_drives_weights_down(data):
    params = linear_params(data[0])
    for _ in range(150):
        gradient = linear_loss(params, *data, 100.0)[1]
        params = params.replace(weights=params.weights - 1e-4 * gradient.weights)
    # Steps of 0.01 towards 0, and no further than about one step beyond; the data pull a hundred times less.
    assert jnp.abs(params.weights).max() < 0.02


def test_unknown_leaves_and_tasks_are_refused():
    for leaves in ("quadratic", None):
        with pytest.raises(ValueError, match='leaves must be "constant" or "linear"'):
            fit(X, Y, leaves=leaves)
        with pytest.raises(ValueError, match='leaves must be "constant" or "linear"'):
            jtrees.get(2, 1.0, leaves=leaves)
    with pytest.raises(ValueError, match='task must be "regression" or "classification"'):
        fit(X, Y, task="ranking")


# --- Weights of samples ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weight(data):
    """Weights 0, 1, 2 that sum to the number of samples; a sample at an end of any column has weight 1."""
    x, y = data
    table = np.column_stack([x, y])
    inner = np.flatnonzero(((table > table.min(0)) & (table < table.max(0))).all(1))
    weight = np.ones(len(y))
    weight[inner[:60]], weight[inner[60:120]] = 0, 2
    return weight


def test_whole_weights_are_repeated_samples(data, weight):
    x, y = data
    weighted = fit(x, y, sample_weight=weight)
    repeated = fit(*(np.repeat(a, weight.astype(int), axis=0) for a in data))
    assert weighted.report.cart_loss == pytest.approx(repeated.report.cart_loss, rel=1e-5)
    assert weighted.report.cart_loss != pytest.approx(fit(x, y).report.cart_loss, rel=1e-2)
    # The same descent, but sums are taken in another order, and hundreds of updates add to what that changes.
    np.testing.assert_allclose(weighted.report.losses, repeated.report.losses, rtol=2e-2)
    assert weighted.report.loss <= weighted.report.cart_loss
    found = np.average((weighted.tree.predict(x) - y) ** 2, weights=weight)
    assert weighted.report.loss == pytest.approx(found, rel=1e-5)


@pytest.mark.parametrize("options", [{}, LINEAR], ids=["constant", "linear"])
def test_samples_of_weight_zero_do_not_count(data, weight, options):
    x, y = data
    out = weight == 0
    others = np.where(out[:, None], x[::-1], x), np.where(out, y.mean(), y)  # inside the ranges that data are scaled by
    base, moved = (fit(*table, sample_weight=weight, **options) for table in (data, others))
    assert moved.report.loss == pytest.approx(base.report.loss, rel=1e-6)
    np.testing.assert_allclose(moved.report.losses, base.report.losses, rtol=1e-6)
    # The residuals that CART splits for linear leaves are rounded otherwise, and so where a split brings nothing it
    # may be another: what counts is answered alike.
    np.testing.assert_allclose(moved.tree.predict(x[~out]), base.tree.predict(x[~out]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("which", ["x", "y"])
def test_a_sample_of_weight_zero_may_lie_anywhere(data, weight, which):
    base = fit(*data, sample_weight=weight).report
    moved = dict(zip("xy", (a.copy() for a in data), strict=True))
    moved[which][np.flatnonzero(weight == 0)[0]] = 1e6
    report = fit(**moved, sample_weight=weight).report
    assert report.cart_loss == pytest.approx(base.cart_loss, rel=1e-3)
    assert report.loss == pytest.approx(base.loss, rel=1e-2)


def test_leaves_are_weighted_means(data, weight):
    x, y = data
    tree = fit(x, y, sample_weight=weight).tree
    means = oracles.leaf_means(tree.leaf_index(x), y, 4, (y.min() + y.max()) / 2, weight)
    np.testing.assert_allclose(tree.leaves.values, means, rtol=1e-5)


@pytest.mark.parametrize("factor", [8.0, 1e-3, 1e20, 1e60, 1e-60])
def test_only_ratios_of_weights_matter(data, weight, factor):
    base, moved = fit(*data, sample_weight=weight), fit(*data, sample_weight=factor * weight)
    assert moved.report.cart_loss == pytest.approx(base.report.cart_loss, rel=1e-6)
    assert moved.report.loss == pytest.approx(base.report.loss, rel=2e-2)  # rounding of 120 updates
    if factor == 8:
        assert jax.tree.all(jax.tree.map(np.array_equal, base.tree, moved.tree))


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ([1, 1, -1, 1, 1, 1], "sample_weight must not be negative"),
        (np.zeros(6), "sample_weight must not be zero everywhere"),
        ([1, 1, np.nan, 1, 1, 1], "sample_weight must be finite"),
        ([1, 1, np.inf, 1, 1, 1], "sample_weight must be finite"),
        (np.ones(5), r"sample_weight must have shape \(6,\)"),
        (np.ones((6, 1)), r"sample_weight must have shape \(6,\)"),
        (1.0, r"sample_weight must have shape \(6,\)"),
        (["a"] * 6, "sample_weight must be numeric"),
    ],
)
def test_bad_weights_are_refused(weight, message):
    for recipe in (jtrees.fit_get, jtrees.fit_raddt):
        with pytest.raises(ValueError, match=message):
            recipe(X, Y, key=jax.random.key(0), depth=1, starts=1, epochs=1, sample_weight=weight)


# --- Validation ------------------------------------------------------------------------------------------------------

ONE = {"starts": 1, "epochs": 20}  # with the tables of `steps` and each depth: one compilation


@pytest.fixture(scope="module")
def steps(data):
    """A step and much noise, so that one split is all there is to learn; and as many samples again."""
    rng = np.random.default_rng(1)
    x, new = data[0], rng.normal(size=(200, 3)).astype(np.float32)
    step = lambda x: np.where(x[:, 0] - x[:, 1] > 0, 1.0, -1.0) + rng.normal(size=200)
    return x, step(x).astype(np.float32), new, step(new).astype(np.float32)


def test_trees_are_judged_by_validation(steps):
    x, y, x_new, y_new = steps
    tree, report = (result := fit(x, y, validation=(x_new, y_new), **ONE)).tree, result.report
    assert report.loss == pytest.approx(np.mean((tree.predict(x_new) - y_new) ** 2, dtype=np.float64), rel=1e-5)
    cart = DecisionTreeRegressor(max_depth=DEPTH, random_state=0).fit(x, y)
    assert report.cart_loss == pytest.approx(np.mean((cart.predict(x_new) - y_new) ** 2), rel=1e-5)
    assert report.loss < report.cart_loss  # the border is oblique
    assert report.loss == pytest.approx(report.losses.min(), rel=1e-3)
    # Not trained on: leaves are the means of the training samples alone, whatever the targets there.
    means = oracles.leaf_means(tree.leaf_index(x), y, 4, (y.min() + y.max()) / 2)
    np.testing.assert_allclose(tree.leaves.values, means, rtol=1e-4)


def test_among_equal_starts_validation_decides(steps):
    # Against targets turned round the best tree is the one that says least.
    x, y, *_ = steps
    fair, turned = (fit(x, y, validation=(x, target), **ONE) for target in (y, -y))
    error = lambda result, target: np.mean((result.tree.predict(x) - target) ** 2)
    assert error(fair, y) < error(turned, y)
    assert error(turned, -y) < error(fair, -y)


@pytest.mark.parametrize(
    ("validation", "message"),
    [
        ((X[:, :1], Y), "validation: x must have 2 columns, got 1"),
        ((X, Y[:5]), r"validation: y must have shape \(6,\), got \(5,\)"),
        ((X, Y[:, None]), "validation: y must"),
        ((spoilt(X, np.nan), Y), "validation: x must be finite"),
        ((X, spoilt(Y, np.nan)), "validation: y must be finite"),
        ((X[:0], Y[:0]), "validation: x must have at least one row"),
        ((X, ["low", "high"] * 3), "validation: "),
        ((X, None), "validation: "),
        (X, "validation must be a pair"),
        ((X, Y, Y), "validation must be a pair"),
        ((X,), "validation must be a pair"),
        (0.3, "validation must be a pair"),
    ],
)
def test_bad_validation_is_refused(validation, message):
    for recipe in (jtrees.fit_get, jtrees.fit_raddt):
        with pytest.raises(ValueError, match=message):
            recipe(X, Y, key=jax.random.key(0), depth=1, starts=1, epochs=1, validation=validation)


# --- Depth by validation ---------------------------------------------------------------------------------------------


def test_depth_and_penalty_are_those_that_validate_best(steps):
    x, y, x_new, y_new = steps
    options = {"depth": "auto", "l1": [0.0, 0.01], "validation": (x_new, y_new), **ONE}
    tree, report = (result := fit(x, y, **options)).tree, result.report
    depths = sorted(set(report.tuning[:, 0]))
    assert report.tuning.shape == (2 * len(depths), 3)
    assert depths == list(range(1, len(depths) + 1))
    assert report.tuning[:, 1] == pytest.approx(np.tile([0.0, 0.01], len(depths)))
    best = report.tuning[report.tuning[:, 2].argmin()]
    assert tree.depth == best[0]
    assert len(depths) == best[0] + 2  # two depths that brought nothing end the search
    # No fit to anything else follows: what was validated is returned.
    assert report.loss == best[2]
    assert best[2] == pytest.approx(np.mean((tree.predict(x_new) - y_new) ** 2, dtype=np.float64), rel=1e-5)
    again = fit(x, y, **options)
    assert np.array_equal(again.report.tuning, report.tuning)
    assert jax.tree.all(jax.tree.map(np.array_equal, again.tree, tree))


def test_depth_found_on_a_third_of_the_data_and_fitted_to_all(steps):
    x, y, *_ = steps
    tree, report = (result := fit(x, y, depth="auto", **ONE)).tree, result.report
    assert tree.depth == report.tuning[report.tuning[:, 2].argmin(), 0]
    assert len(report.tuning) == tree.depth + 2
    # All samples are in the tree returned, whose leaves are their means.
    means = oracles.leaf_means(tree.leaf_index(x), y, 2**tree.depth, (y.min() + y.max()) / 2)
    np.testing.assert_allclose(tree.leaves.values, means, rtol=1e-4)
    assert report.loss == pytest.approx(np.mean((tree.predict(x) - y) ** 2, dtype=np.float64), rel=1e-5)
    # A part that one split cannot halve is judged like the noise that it is, not like what was trained on.
    assert report.tuning[:, 2].min() > 0.7


def test_several_penalties_only_where_one_is_chosen():
    with pytest.raises(ValueError, match='l1 must be one number unless depth is "auto"'):
        fit(X, Y, l1=[0.0, 0.1])
    for l1, message in [(-0.1, "finite"), (np.nan, "finite"), ([0.0, -1.0], "not negative"), ([], "numbers to choose")]:
        with pytest.raises(ValueError, match=f"l1 must be .*{message}"):
            fit(X, Y, depth="auto", l1=l1)
    with pytest.raises(ValueError, match="at least three samples"):
        fit(X[:2], Y[:2], depth="auto")
