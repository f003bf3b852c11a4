"""GET: the method, and the recipe from a table to a hard tree."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from sklearn.datasets import load_diabetes
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
