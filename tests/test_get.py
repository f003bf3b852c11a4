"""GET: the method, and the recipe from a table to a hard tree."""

from functools import partial

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
from jtrees import recipes
from jtrees.training import Batch

pytestmark = pytest.mark.usefixtures("standard_promotion")  # the recipe trains with AdamW

DEPTH = 2
# One program for the fits of this file that share the options and the number of rows (193 to 200 are one bucket).
SMALL = {"depth": DEPTH, "starts": 2, "epochs": 60}
LINEAR = {"leaves": "linear", "epochs": 40}
FIT = ("task", "sample_weight", "validation")


def fit(x, y, *, seed=0, **options):
    given = {name: options.pop(name) for name in FIT if name in options}
    return jtrees.fit(jtrees.GET(**{**SMALL, **options}), x, y, key=jax.random.key(seed), **given)


def mse(tree, x, y):
    """Mean squared error of a tree on its own walk, in float64."""
    x = np.asarray(x, np.float32) - (0 if tree.origin is None else np.asarray(tree.origin.x, np.float64))
    leaf = oracles.walk(tree.weights, tree.bias, x)
    zero = 0 if tree.origin is None else tree.origin.y
    return np.mean((np.asarray(y, np.float64) - np.asarray(tree.leaves.values, np.float64)[leaf] - zero) ** 2)


def cart_mse(x, y, depth):
    return np.mean((DecisionTreeRegressor(max_depth=depth, random_state=0).fit(x, y).predict(x) - y) ** 2)


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
    draw = lambda *shape: jnp.asarray(rng.uniform(-1, 1, shape), jnp.float32)
    n = 2**depth
    kinds = {"constant": lambda: jtrees.leaves.Constant(draw(n, *k))}
    kinds["linear"] = lambda: jtrees.leaves.Linear(draw(n, 3, *k), draw(n, *k))
    return jtrees.ObliqueTree(draw(n - 1, 3), draw(n - 1), kinds[leaves]())


@partial(jax.jit, static_argnames=("leaves", "score"))
def evaluated(params, batch, alpha, l1, leaves="constant", score=True):
    """((loss, score), gradient) of the method, and its hard tree; what nobody asks for is not compiled."""
    method = jtrees.get(DEPTH, alpha, leaves=leaves, l1=l1)
    (loss, value), gradient = jax.value_and_grad(method.loss, has_aux=True)(params, batch, key=None, step=jnp.int32(0))
    return (loss, value if score else None), gradient, method.harden(params, batch)


@jax.jit
def two_starts(batch):
    return jax.vmap(lambda key: jtrees.get(DEPTH, 1.0).init(batch, key=key))(jax.random.split(jax.random.key(0)))


def test_loss_is_the_expected_squared_error_of_scaled_sigmoids(data):
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
        assert penalised[0][1] == score  # hard trees are judged without the penalty
        steeper = penalised[1].weights - gradient.weights
        np.testing.assert_allclose(steeper, 0.25 * np.sign(weights), rtol=1e-4, atol=1e-5)


def test_start_and_hardening(data):
    x, y = data
    method = jtrees.get(DEPTH, 10.0)
    params = jax.tree.map(lambda a: np.asarray(a)[0], two_starts(Batch(x, y)))
    assert params.weights.shape == (3, 3)
    assert np.abs(params.weights).max() <= 1
    assert np.abs(params.bias).max() <= 1
    assert y.min() <= np.min(params.leaves.values) <= np.max(params.leaves.values) <= y.max()
    # A node that sends all one way leaves a leaf empty: it answers the middle of the targets' range.
    params = params.replace(bias=np.append(params.bias[:2], np.float32(100)))
    hard = evaluated(params, Batch(x, y), 7.0, 0.0)[2]
    assert np.array_equal(hard.weights, params.weights)
    leaf = oracles.walk(params.weights, params.bias, x)
    assert 2 not in leaf and 3 in leaf
    means = oracles.leaf_means(leaf, y, 4, (y.min() + y.max()) / 2)
    np.testing.assert_allclose(hard.leaves.values, means, rtol=1e-5)
    assert np.array_equal(method.predict(hard, x), hard.predict(x))


def test_jit_vmap_and_grad_over_starts_and_alphas(data):
    batch, alphas = Batch(*map(jnp.asarray, data)), np.float32([2, 9])
    params = two_starts(batch)
    assert not np.allclose(params.weights[0], params.weights[1])

    def value(params, alpha):
        loss = lambda params: jtrees.get(DEPTH, alpha).loss(params, batch, key=None, step=0)
        return jax.value_and_grad(loss, has_aux=True)(params)

    together = jax.jit(jax.vmap(value))(params, alphas)
    for i in range(2):
        alone = evaluated(jax.tree.map(lambda a, i=i: a[i], params), batch, float(alphas[i]), 0.0)[:2]
        for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(one[i], other, rtol=1e-4, atol=1e-5)


def test_alpha_may_be_a_schedule(data):
    batch, params = Batch(*map(jnp.asarray, data)), random_params("constant")
    schedule = optax.linear_schedule(5.0, 100.0, 10)
    annealed = jax.jit(lambda step: jtrees.get(DEPTH, schedule).loss(params, batch, key=None, step=step)[0])
    for step, alpha in [(0, 5.0), (4, 43.0), (20, 100.0)]:
        fixed = evaluated(params, batch, alpha, 0.0)[0][0]
        assert float(annealed(jnp.int32(step))) == pytest.approx(float(fixed), rel=1e-5)


@pytest.mark.parametrize("arguments", [(0, 1.0), (17, 1.0), (2.5, 1.0), ("2", 1.0)])
def test_bad_depths_are_refused_by_the_method(arguments):
    with pytest.raises(ValueError, match="depth must be"):
        jtrees.get(*arguments)


@pytest.mark.parametrize("alpha", [0.0, -1.0, np.nan, np.inf, "steep", None, [1.0, 2.0]])
def test_bad_alphas_are_refused_by_the_method(alpha):
    with pytest.raises(ValueError, match="alpha must be"):
        jtrees.get(2, alpha)


@pytest.mark.parametrize("l1", [-0.1, np.nan, "much", None, [0.1, 0.2], lambda step: 0.1])
def test_bad_penalties_are_refused_by_the_method(l1):
    with pytest.raises(ValueError, match="l1 must be"):
        jtrees.get(2, 1.0, l1=l1)


@pytest.mark.parametrize("leaves", ["constant", "linear"])
def test_batches_of_an_epoch_sum_to_what_all_samples_give(data, leaves):
    """A heavy sample counts as much in a light batch as in another, as weights are normalised once."""
    rng = np.random.default_rng(0)
    weight = np.where(np.arange(200) % 50 == 3, 30.0, rng.uniform(0, 1, 200)).astype(np.float32)
    weight /= weight.mean()
    params, method = random_params(leaves), jtrees.get(DEPTH, 7.0, leaves=leaves)
    loss = jax.jit(jax.value_and_grad(lambda p, batch: method.loss(p, batch, key=None, step=0)[0]))
    whole = loss(params, Batch(*data, weight))
    parts = [loss(params, jax.tree.map(lambda a, i=i: a[i : i + 40], Batch(*data, weight))) for i in range(0, 200, 40)]
    for all_, *some in zip(*(jax.tree.leaves(found) for found in (whole, *parts)), strict=True):
        np.testing.assert_allclose(np.mean(some, axis=0), all_, rtol=1e-4, atol=1e-4)


# --- The recipe ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("depth", [DEPTH, pytest.param(4, marks=pytest.mark.slow)])
def test_never_worse_than_cart_and_reported_as_it_is(data, depth, seed):
    rng = np.random.default_rng(seed)
    x, y = data[0], (data[1] + seed * rng.normal(size=len(data[1]))).astype(np.float32)
    result = fit(x, y, depth=depth, seed=seed)
    tree, report = result.tree, result.report
    assert result.loss <= report["cart_loss"]
    assert report["cart_loss"] == pytest.approx(cart_mse(x, y, depth), rel=1e-5)
    # float64 scores of the walk may send a sample that lies on a hyperplane the other way: no more than one does.
    assert result.loss == pytest.approx(np.mean((y - tree.predict(x)) ** 2, dtype=np.float64), rel=1e-5)
    assert result.loss == pytest.approx(mse(tree, x, y), rel=2e-2)
    scales, losses, steps = (report[name] for name in ("scales", "losses", "steps"))
    assert scales.shape == losses.shape == steps.shape == (2, 2)
    assert (scales[:, 0] >= 5).all() and (scales[:, 0] <= 25).all()
    assert (scales[:, 1] >= 50).all() and (scales[:, 1] <= 150).all()
    assert len(np.unique(scales)) == 4
    assert (steps >= 0).all() and (steps <= 60).all()
    assert report["dropped"] == 0 and report["ended"] == "finished"
    if report["chosen"] >= 0:
        assert report["chosen"] == int(np.argmin(losses.min(1)))
        assert result.loss == pytest.approx(losses.min(), rel=1e-3)  # scored on scaled data, in float32
        assert result.loss < report["cart_loss"]
        assert result.step in steps[report["chosen"]]
    else:
        assert result.loss == report["cart_loss"]
    # Of each start the losses of two scales, one after the other, of scaled sigmoids on scaled targets.
    assert result.history.shape == (2, 120)
    assert (result.history > 0).all() and (result.history < 1).all()


def test_same_key_same_tree_other_key_other_tree(data, base):
    assert same(base.tree, fit(*data).tree)
    assert not np.array_equal(base.report["scales"], fit(*data, seed=1).report["scales"])


def test_a_second_fit_of_the_same_structure_compiles_nothing(data, base, count_compilations):
    x, y = data
    numbers = {"learning_rate": 0.02, "l1": 1e-3, "alpha_ranges": ((3.0, 4.0), (5.0, 6.0))}
    assert count_compilations(lambda: fit(x, y)) == 0
    assert count_compilations(lambda: fit(x[::-1] + 1, 2 * y, seed=1, **numbers)) == 0
    assert count_compilations(lambda: fit(x[:193], y[:193], l1=0, learning_rate=1)) == 0
    assert count_compilations(lambda: fit(x, y, depth=np.int64(DEPTH), starts=np.int32(2), epochs=np.int64(60))) == 0
    assert count_compilations(lambda: fit(x, y, depth=jnp.int32(DEPTH))) == 0


def test_two_samples_are_enough_and_another_depth_is_one_more_program(base):
    programs = recipes._begin, recipes._round, recipes._end
    before = [program._cache_size() for program in programs]
    for rate in (0.01, 0.02):
        result = fit([[0.0], [1.0]], [3.0, 5.0], depth=1, starts=1, epochs=5, learning_rate=rate)
        assert result.tree.predict([[0.0], [1.0]]).tolist() == [3, 5]
        assert [program._cache_size() for program in programs] == [size + 1 for size in before]


# Powers of two change no digit of a float32: the same table in other units must give the same tree in other units.
FACTORS = [2.0**13, 2.0**-10, 2.0**-30, 2.0**40, 2.0**66]


@pytest.mark.parametrize("factor", FACTORS)
def test_units_of_x_do_not_matter(data, base, factor):
    x, y = data
    moved = fit(x * np.float32(factor), y)
    assert moved.report["cart_loss"] == pytest.approx(base.report["cart_loss"], rel=1e-6)
    assert moved.loss == pytest.approx(base.loss, rel=1e-6)
    np.testing.assert_allclose(moved.tree.predict(x * np.float32(factor)), base.tree.predict(x), rtol=1e-6)


@pytest.mark.parametrize("factor", FACTORS)
def test_units_of_y_do_not_matter(data, base, factor):
    x, y = data
    moved = fit(x, y * np.float32(factor))
    assert moved.report["cart_loss"] / factor**2 == pytest.approx(base.report["cart_loss"], rel=1e-6)
    assert moved.loss / factor**2 == pytest.approx(base.loss, rel=1e-6)
    np.testing.assert_allclose(moved.report["losses"] / factor**2, base.report["losses"], rtol=1e-5)
    np.testing.assert_allclose(moved.tree.predict(x), base.tree.predict(x) * np.float32(factor), rtol=1e-5)


@pytest.mark.parametrize(("factor", "shift"), [(1.0, 100.0), (1e6, 1e7), (1e-3, 5.0), (1.0, 1e6), (1.0, 1e8)])
@pytest.mark.parametrize("which", ["x", "y"])
def test_the_tree_returned_is_as_good_in_raw_units(data, which, factor, shift):
    moved = dict(zip("xy", (a.astype(np.float64) for a in data), strict=True))
    moved[which] = moved[which] * factor + shift
    x, y = moved["x"], moved["y"]
    result = fit(x, y)
    assert result.report["chosen"] >= 0
    # Far from zero features are rounded otherwise, so a sample beside a hyperplane may change side.
    assert result.loss == pytest.approx(result.report["losses"].min(), rel=5e-2)
    answers = result.tree.predict(x)
    assert np.mean((answers - y) ** 2) == pytest.approx(result.loss, rel=1e-4)
    # However many rows come at once.
    np.testing.assert_array_equal(
        np.concatenate([result.tree.predict(x[i : i + 7]) for i in range(0, 200, 7)]), answers
    )
    answers = result.tree.predict(x.max() + 10 * (x - x.mean()))  # wherever samples may lie
    rounding = np.spacing(np.float32(np.abs(y).max()))
    assert y.min() - rounding <= answers.min() <= answers.max() <= y.max() + rounding


def test_targets_far_from_zero_are_learnt_like_others(data, base):
    """In float32 they would all be one number."""
    x, y = data
    far = fit(x, 1e9 + y.astype(np.float64))
    assert far.loss == pytest.approx(base.loss, rel=1e-3)
    np.testing.assert_allclose(far.tree.predict(x) - 1e9, base.tree.predict(x), atol=1e-3)


@pytest.mark.parametrize("constant", [0.0, 7.0, 1e6, 1e8])
def test_a_constant_column_does_no_harm(data, constant):
    x, y = data
    x = np.column_stack([x[:, :2], np.full(len(y), constant, np.float32)])
    result = fit(x, y)
    assert result.report["chosen"] >= 0
    # The tree returned takes raw x, and must be as good there as it was on the scaled data.
    assert result.loss == pytest.approx(result.report["losses"].min(), rel=1e-2)
    assert result.loss == pytest.approx(np.mean((result.tree.predict(x) - y) ** 2), rel=1e-4)


def test_an_outlier_does_no_harm(data, base):
    """Scaled by it, the others of its column would be one number, and CART the best that is left."""
    x = data[0].copy()
    x[7, 0] = 1e12
    result = fit(x, data[1])
    assert result.report["chosen"] >= 0
    assert result.loss < 1.2 * base.loss < result.report["cart_loss"]


def test_tables_of_other_kinds(data, base):
    x, y = data
    assert fit(x.astype(np.float64), y.astype(np.float64)).loss == base.loss
    assert fit(jnp.asarray(x), jnp.asarray(y)).loss == base.loss
    assert fit(x.tolist(), y.tolist()).loss == base.loss
    whole = fit(np.round(10 * x).astype(int), np.round(10 * y).astype(int))
    assert whole.loss <= whole.report["cart_loss"]
    yes = fit(x, y > 0)
    assert yes.loss <= yes.report["cart_loss"] < 0.25
    assert yes.loss == fit(x, (y > 0).astype(float)).loss
    twice = fit(np.repeat(x[:100], 2, axis=0), np.repeat(y[:100], 2))
    assert twice.loss <= twice.report["cart_loss"]
    assert twice.loss < np.var(y[:100])


def test_beats_cart_clearly_on_an_oblique_signal(base):
    assert base.loss < 0.85 * base.report["cart_loss"]


@pytest.mark.slow
def test_beats_cart_clearly_on_diabetes():
    x, y = load_diabetes(return_X_y=True)
    result = fit(x, y, depth=3, starts=4, epochs=300)
    assert result.report["cart_loss"] == pytest.approx(cart_mse(x.astype(np.float32), y, 3), rel=1e-5)
    assert result.loss < 0.8 * result.report["cart_loss"]
    assert mse(result.tree, x, y) < 0.8 * result.report["cart_loss"]


@pytest.mark.slow
def test_beats_cart_clearly_on_kin8nm(data_dir):
    table = np.load(data_dir / "kin8nm.npz")
    x, y = table["X"][:1500], table["y"][:1500]
    result = fit(x, y, depth=4, starts=2, epochs=200)
    assert result.loss < 0.7 * cart_mse(x, y, 4)
    assert mse(result.tree, x, y) == pytest.approx(result.loss, rel=1e-2)


def test_never_worse_than_cart_with_a_large_offset():
    # Years, ids and timestamps: scaled thresholds mapped back would move samples across the splits.
    rng = np.random.default_rng(0)
    x = (1.7e6 + rng.integers(0, 2000, size=(200, 3))).astype(np.float32)
    y = np.sin(x[:, 0] / 100) + 0.1 * rng.normal(size=200)
    result = fit(x, y, learning_rate=1e-8)  # so small that CART is all there is
    # In float32 a mean of 200 squares is exact to a few units in the last place.
    cart = cart_mse(x, y, DEPTH)
    np.testing.assert_allclose(result.report["cart_loss"], cart, rtol=1e-5)
    assert result.loss <= cart * (1 + 1e-5)


# --- Round by round --------------------------------------------------------------------------------------------------


def rounds_by_hand(data, spoil=lambda state: state, rounds=None):
    """The search of :data:`SMALL` round by round, its state changed before it begins: the recipe, its table, and after
    each round the state and the losses.
    """
    recipe = jtrees.GET(**SMALL)
    table = recipes.checked_table(*data, None, "regression")
    recipe = recipe.checked(table)
    unit = recipe.scale(table).unit(table)
    prepare_key, key, _ = jax.random.split(jax.random.key(0), 3)  # as fit does it
    state = spoil(recipes._begin(recipe, recipe.prepare(unit, key=prepare_key), unit, key))
    rounds, after = rounds or recipe.rounds(unit.x.shape), []
    for i in range(rounds.count):
        state, lost = recipes._round(recipe, jnp.int32(i), state, unit, None, rounds)
        after.append((state, np.asarray(lost)))
    return recipe, unit, after


def found_by_hand(*args):
    recipe, unit, after = rounds_by_hand(*args)
    return recipe, unit, after[-1][0], recipes._end(recipe, after[-1][0], unit, None)


def test_a_start_that_diverges_is_dropped_and_touches_no_other(data, base):
    spoilt = lambda state: state._replace(splits=state.splits.replace(bias=state.splits.bias.at[1].set(jnp.nan)))
    *_, sound = found_by_hand(data)
    *_, found = found_by_hand(data, spoilt)
    assert int(found.extra["start"]) == 0 and int(found.extra["dropped"]) == 1
    assert np.isinf(found.extra["losses"][1]).all()
    np.testing.assert_array_equal(found.extra["losses"][0], sound.extra["losses"][0])
    assert found.score == found.extra["losses"][0].min()
    assert bool(found.finite) and np.isfinite(found.model.bias).all()


def test_what_a_start_had_found_before_it_diverged_does_not_count(data, base):
    """Whatever its score: that it is not finite is said in one place, and minded in the end."""
    recipe, unit, state, found = found_by_hand(data)
    best = int(found.extra["start"])
    finite = state.training.finite.at[best].set(False)
    other = recipes._end(recipe, state._replace(training=state.training.replace(finite=finite)), unit, None)
    assert int(other.extra["start"]) == 1 - best and int(other.extra["dropped"]) == 1
    assert other.score == state.best.score[1 - best] > found.score
    none = recipes._end(recipe, state._replace(training=state.training.replace(finite=finite & False)), unit, None)
    assert not none.finite and np.isinf(none.score) and int(none.extra["dropped"]) == 2


def test_a_run_that_was_not_finite_under_one_scale_stays_so(data, base):
    lost = lambda state: state._replace(training=state.training.replace(finite=jnp.asarray([True, False])))
    *_, found = found_by_hand(data, lost)
    assert int(found.extra["dropped"]) == 1 and int(found.extra["start"]) == 0
    assert np.isinf(found.extra["losses"][1]).all()


def test_rounds_of_any_size_find_the_same(data, base):
    """Rounds of 25 steps, the last of each scale of 10; and after each there is something found."""
    recipe, unit, after = rounds_by_hand(data, rounds=recipes.Rounds(60, 25, 2))
    lost = [losses for _, losses in after]
    assert [np.isfinite(losses).sum(-1).tolist() for losses in lost] == [[25, 25], [25, 25], [10, 10]] * 2
    history = np.concatenate(lost, axis=-1)
    np.testing.assert_allclose(history[np.isfinite(history)].reshape(2, -1), base.history, rtol=1e-4)
    found = [recipes._end(recipe, state, unit, None) for state, _ in after]
    for name in ("losses", "steps"):
        expected = base.report[name] if name == "steps" else base.report[name] / np.ptp(data[1]) ** 2
        np.testing.assert_allclose(found[-1].extra[name], expected, rtol=1e-4)
    scores = np.array([one.score for one in found])
    assert np.isfinite(scores).all() and (np.diff(scores) <= 0).all() and scores[-1] < scores[0]
    assert scores[-1] == np.min(found[-1].extra["losses"])
    # Broken off under its second scale, a start has what it found under the first.
    assert np.isinf(found[3].extra["losses"][:, 1]).all() and scores[3] <= found[3].extra["losses"][:, 0].min()
    assert all(np.isfinite(one.model.bias).all() and bool(one.finite) for one in found)


def test_where_all_diverge_cart_is_the_answer(data, base):
    result = fit(*data, learning_rate=1e30)
    assert result.report["chosen"] == -1 and result.report["dropped"] == 2
    assert result.loss == result.report["cart_loss"] == base.report["cart_loss"]
    assert not np.isfinite(result.report["losses"]).any()


def test_without_cart_nothing_is_said_of_it(data, base):
    """``cart=False`` is another program; the end of it is this."""
    recipe, _, _, found = found_by_hand(data)
    table = recipes.checked_table(*data, None, "regression")
    finish = partial(recipe.finish, scale=recipe.scale(table), key=jax.random.key(0), watch=recipes.Watch())
    result = finish(found, None, table, None)
    assert np.isnan(result.report["cart_loss"]) and result.report["chosen"] == int(found.extra["start"])
    assert result.loss == pytest.approx(result.report["losses"].min(), rel=1e-3)
    with pytest.raises(FloatingPointError, match="all 2 starts became non-finite: try a smaller learning_rate"):
        finish(found._replace(finite=np.bool_(False)), None, table, None)


@pytest.mark.slow
def test_without_cart(data):
    result = fit(*data, cart=False)
    assert np.isnan(result.report["cart_loss"]) and result.report["chosen"] >= 0
    assert result.loss == pytest.approx(result.report["losses"].min(), rel=1e-3)
    with pytest.raises(FloatingPointError, match="all 2 starts became non-finite: try a smaller learning_rate"):
        fit(*data, cart=False, learning_rate=1e30)


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
        (X, Y[:, None, None], "y must have shape"),
        (X, 1.0, "y must have shape"),
        (X, None, "y must hold the targets"),
        (X, Y[:5], "x and y must have the same number of rows, got 6 and 5"),
        (X[:0], Y[:0], "x must have at least one row"),
        (X[:, :0], Y, "x must have at least one row and one column"),
        (X[:1], Y[:1], "x and y must hold at least two samples"),
        (spoilt(X, np.nan), Y, "x must be finite"),
        (spoilt(X, np.inf), Y, "x must be finite"),
        (X, spoilt(Y, np.nan), "y must be finite"),
        (X, spoilt(Y, -np.inf), "y must be finite"),
        (X, np.full(6, 2.0), "y must take at least two values"),
        (X, np.column_stack([Y, np.full(6, 2.0)]), "y must take at least two values"),
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
        ({"depth": "auto"}, "depth must be a whole number"),
        ({"depth": None}, "depth must be a whole number"),
        ({"starts": 0}, "starts must be at least 1"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"epochs": 1.5}, "epochs must be a whole number"),
        ({"learning_rate": 0.0}, "learning_rate must be"),
        ({"learning_rate": np.nan}, "learning_rate must be"),
        ({"learning_rate": lambda step: 0.1}, "learning_rate must be"),
        ({"learning_rate": [0.1, 0.2]}, "learning_rate must be one number"),
        ({"learning_rate": None}, "learning_rate must be"),
        ({"l1": [0.0, 0.1]}, r"l1 must be one number, got shape \(2,\)"),
        ({"l1": []}, "l1 must be one number"),
        ({"l1": -0.1}, "l1 must be finite and not negative"),
        ({"l1": np.nan}, "l1 must be finite and not negative"),
        ({"l1": [0.0, -1.0]}, "l1 must be finite and not negative"),
        ({"l1": "much"}, "l1 must be a number"),
        ({"alpha_ranges": ((0.0, 5.0),)}, "alpha_ranges must be"),
        ({"alpha_ranges": (5.0, 25.0)}, "alpha_ranges must be pairs"),
        ({"alpha_ranges": ((25.0, 5.0),)}, "alpha_ranges must be pairs .* with low <= high"),
        ({"alpha_ranges": ()}, "alpha_ranges must be pairs"),
        ({"alpha_ranges": None}, "alpha_ranges must be"),
        ({"alpha_ranges": {}}, r"alpha_ranges must be pairs \(low, high\), at least one, got \{\}"),
        ({"alpha_ranges": ((1j, 2.0),)}, r"alpha_ranges must be pairs \(low, high\), at least one, got \(\(1j"),
        ({"alpha_ranges": np.array([[1j, 2.0]])}, "alpha_ranges must be pairs"),
        ({"alpha_ranges": lambda step: 1.0}, r"alpha_ranges must be pairs \(low, high\), at least one, got <function"),
        ({"alpha_ranges": "steep"}, "alpha_ranges must be pairs .* got 'steep'"),
        ({"alpha_ranges": ((5, 25), (50,))}, "alpha_ranges must be pairs"),
        ({"cart": "False"}, "cart must be True or False, got 'False'"),
        ({"cart": None}, "cart must be True or False, got None"),
        ({"starts": 2**40}, r"starts must be at most \d+, .*, got 1099511627776"),
        ({"epochs": 2**40}, "epochs must be at most"),
        ({"leaves": "quadratic"}, "leaves must be one of 'constant', 'linear', got 'quadratic'"),
        ({"leaves": None}, "leaves must be one of 'constant', 'linear', got None"),
        (
            {"task": "ranking"},
            "task must be one of 'regression', 'classification', or a task such as .*, got 'ranking'",
        ),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fit(X, Y, **options)


def test_unknown_leaves_are_refused_by_the_method():
    for leaves in ("quadratic", None):
        with pytest.raises(ValueError, match="leaves must be one of 'constant', 'linear', got"):
            jtrees.get(2, 1.0, leaves=leaves)


# --- Several targets -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(data):
    """A second target that another border divides."""
    x, y = data
    other = np.where(x[:, 1] - x[:, 2] > 0, 5.0, 3.0) + 0.1 * x[:, 0]
    return x, np.column_stack([y, other]).astype(np.float32)


def test_a_target_said_twice_is_learnt_like_one(data, base):
    """In whatever units, as each target is scaled by itself."""
    x, y = data
    twice = fit(x, np.column_stack([y, 4 * y]))
    np.testing.assert_allclose(twice.report["losses"] * np.ptp(y) ** 2, base.report["losses"], rtol=1e-3)
    answers = twice.tree.predict(x)
    assert answers.shape == (200, 2)
    np.testing.assert_allclose(answers[:, 0], base.tree.predict(x), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(answers[:, 1], 4 * answers[:, 0], rtol=1e-5)


def test_several_targets_are_means_in_one_tree(pair):
    x, y = pair
    result = fit(x, y)
    leaf, answers = result.tree.leaf_index(x), result.tree.predict(x)
    means = oracles.leaf_means(leaf, y, 4, 0)
    np.testing.assert_allclose(answers, means[leaf], rtol=1e-5)
    # The loss is the mean over targets scaled to [0, 1].
    scaled = lambda a: (a - y) / np.ptp(y, axis=0)
    assert result.loss == pytest.approx(np.mean(scaled(answers) ** 2), rel=1e-5)
    cart = DecisionTreeRegressor(max_depth=DEPTH, random_state=0).fit(x, y / np.ptp(y, axis=0))
    cart_loss = np.mean((cart.predict(x) - y / np.ptp(y, axis=0)) ** 2)
    assert result.report["cart_loss"] == pytest.approx(cart_loss, rel=1e-4)
    assert result.loss < 0.9 * cart_loss
    turned = fit(x, y[:, ::-1])
    np.testing.assert_allclose(turned.report["losses"], result.report["losses"], rtol=1e-4)
    np.testing.assert_allclose(turned.tree.predict(x)[:, ::-1], answers, rtol=1e-4, atol=1e-4)


def assert_one_column_is_one_target(x, y, alone, column):
    assert column.tree.predict(x).shape == (len(x), 1)
    np.testing.assert_allclose(column.report["losses"], alone.report["losses"], rtol=1e-3)
    assert column.loss == pytest.approx(alone.loss, rel=1e-3)
    np.testing.assert_allclose(column.tree.predict(x)[:, 0], alone.tree.predict(x), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_one_column_is_one_target(data, base):
    assert_one_column_is_one_target(*data, base, fit(data[0], data[1][:, None]))


@pytest.mark.slow
def test_several_targets_of_linear_leaves(pieces):
    x, y, *_ = pieces
    alone, column = fit(x, y, **LINEAR), fit(x, y[:, None], **LINEAR)
    assert_one_column_is_one_target(x, y, alone, column)
    twice = fit(x, np.column_stack([y, 4 * y]), **LINEAR)
    np.testing.assert_allclose(twice.tree.predict(x), alone.tree.predict(x)[:, None] * [1, 4], rtol=1e-3, atol=1e-2)
    other = x @ [0.3, 1.0, -2.0] + np.where(x[:, 2] > 0, 4, 0)
    result, turned = (fit(x, np.column_stack(both).astype(np.float32), **LINEAR) for both in ((y, other), (other, y)))
    np.testing.assert_allclose(turned.tree.predict(x)[:, ::-1], result.tree.predict(x), rtol=1e-3, atol=1e-2)
    assert result.loss <= result.report["cart_loss"]


@pytest.mark.parametrize("leaves", ["constant", "linear"])
def test_the_loss_of_several_targets_is_the_mean_of_theirs(pair, leaves):
    x, y = pair
    params = random_params(leaves, (2,))
    evaluate = partial(evaluated, alpha=7.0, l1=0.0, leaves=leaves, score=leaves == "constant")
    (loss, score), gradient, hard = evaluate(params, Batch(x, y))
    of = lambda tree, j: jax.tree.map(lambda a: np.asarray(a)[..., j], tree.leaves)
    alone = [evaluate(params.replace(leaves=of(params, j)), Batch(x, y[:, j])) for j in range(2)]
    assert float(loss) == pytest.approx(np.mean([one[0][0] for one in alone]), rel=1e-5)
    if score is not None:  # of linear leaves it takes as long to compile as all else: see the slow tests
        assert float(score) == pytest.approx(np.mean([one[0][1] for one in alone]), rel=1e-4)
    slopes = np.mean([one[1].weights for one in alone], axis=0)
    np.testing.assert_allclose(gradient.weights, slopes, rtol=1e-3, atol=1e-5)
    for j in range(2):
        for several, one in zip(jax.tree.leaves(of(hard, j)), jax.tree.leaves(alone[j][2].leaves), strict=True):
            np.testing.assert_allclose(several, one, rtol=1e-4, atol=1e-4)


# --- Linear leaves ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pieces(data):
    """Two planes that an oblique border divides, and samples not trained on."""
    rng = np.random.default_rng(5)

    def answers(x):
        y = np.where(x[:, 0] + x[:, 1] > 0, 1 + 2 * x[:, 2], -1 - 3 * x[:, 0])
        return (y + 0.1 * rng.normal(size=len(x))).astype(np.float32)

    new = rng.normal(size=(500, 3)).astype(np.float32)
    return data[0], answers(data[0]), new, answers(new)


@pytest.fixture(scope="module")
def planes(pieces):
    """What most tests of linear leaves compare with."""
    with jax.numpy_dtype_promotion("standard"):
        return fit(*pieces[:2], **LINEAR)


def test_linear_leaves_beat_constants_on_planes(pieces, planes):
    x, y, x_new, y_new = pieces
    tree, report = planes.tree, planes.report
    constant = fit(x, y).tree
    assert isinstance(tree.leaves, jtrees.leaves.Linear)
    assert np.mean((tree.predict(x_new) - y_new) ** 2) < 0.5 * np.mean((constant.predict(x_new) - y_new) ** 2)
    assert planes.loss <= report["cart_loss"]
    if report["chosen"] >= 0:
        assert planes.loss < report["cart_loss"]
        assert planes.loss == pytest.approx(report["losses"].min(), rel=1e-3)  # as in the search, but for raw x
    # Looked at 20 times under each scale: every second of 40 epochs, and after the last.
    assert (report["steps"] % 2 == 0).all()
    # What the trees are chosen by is an estimate for new samples: of the right size, and above the training loss.
    assert np.mean((tree.predict(x) - y) ** 2) < planes.loss < 2 * np.mean((tree.predict(x_new) - y_new) ** 2)


def test_linear_answers_stay_in_bounds_that_come_from_targets(pieces, planes):
    x, y, x_new, _ = pieces
    tree = planes.tree
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
def test_units_do_not_matter_to_linear_leaves(pieces, planes, which, factor):
    x, y, x_new, _ = pieces
    a, b = (np.float32(factor if which == name else 1) for name in "xy")
    moved = fit(x * a, y * b, **LINEAR)
    unit = float(b) ** 2
    assert moved.report["cart_loss"] / unit == pytest.approx(planes.report["cart_loss"], rel=1e-6)
    assert moved.loss / unit == pytest.approx(planes.loss, rel=1e-6)
    np.testing.assert_allclose(moved.report["losses"] / unit, planes.report["losses"], rtol=1e-5)
    # Sums of four float32 terms of the size of y, some of which cancel.
    np.testing.assert_allclose(moved.tree.predict(x_new * a) / b, planes.tree.predict(x_new), rtol=1e-5, atol=1e-5)


def test_linear_leaves_of_huge_features(pieces, planes):
    """Squares of them are beyond float32."""
    x, y, x_new, _ = pieces
    moved = fit(x * np.float32(1e37), y, **LINEAR)
    assert moved.loss == pytest.approx(planes.loss, rel=0.2)
    assert np.isfinite(moved.tree.predict(x_new * np.float32(1e37))).all()


def test_linear_leaves_are_as_good_in_raw_units(pieces, planes):
    x, y, x_new, _ = pieces
    answers = planes.tree.predict(x_new)
    moved = fit(1e3 * x + 5e3, 1e-3 * y + 7, **LINEAR).tree.predict(1e3 * x_new + 5e3)
    # Rounding x at a distance of five units from zero loses three bits, and may move a sample beside a hyperplane.
    assert np.mean((answers - 1e3 * (moved.astype(np.float64) - 7)) ** 2) < 1e-2 * np.var(answers)


def noisy_plane(seed, n):
    rng = np.random.default_rng(seed)
    x, x_new = (rng.normal(size=(size, 3)).astype(np.float32) for size in (n, 4000))
    y, y_new = (a @ [1.0, -2.0, 0.5] + 2 * rng.normal(size=len(a)) for a in (x, x_new))
    plane = LinearRegression().fit(x, y).score(x_new, y_new)
    assert 0.5 < plane < 0.6  # the rest is noise, which many leaves could follow at will
    return x, y, x_new, y_new, plane


@pytest.mark.slow
@pytest.mark.parametrize(("n", "depth"), [(2000, 1), (2000, 8), (200, 4)])
def test_linear_leaves_hardly_fall_behind_a_linear_regression(n, depth):
    for seed in range(4):
        x, y, x_new, y_new, plane = noisy_plane(seed, n)
        tree = fit(x, y, depth=depth, leaves="linear", starts=1, epochs=20).tree
        assert r2_score(y_new, tree.predict(x_new)) > plane - 0.01


def test_linear_leaves_of_a_plane_are_one_leaf(planes):
    """Splits below which all leaves answer alike are merged before anything is counted or shown."""
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
    np.testing.assert_allclose(exact.predict(x), y, atol=1e-3)  # a ridge, if a small one


@pytest.mark.parametrize("starts", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_linear_leaves_same_key_same_tree_and_no_compilation(pieces, planes, count_compilations, starts):
    """Of three starts the last batch is filled up: two decompositions of a program would wait for each other."""
    x, y, *_ = pieces
    options = {**LINEAR, "starts": starts}
    first = fit(x, y, **options)
    assert first.report["losses"].shape == (starts, 2)
    assert count_compilations(lambda: fit(x, y, **options)) == 0
    assert same(first.tree, fit(x, y, **options).tree)
    assert count_compilations(lambda: fit(x, 2 * y, **options, seed=1, l1=1e-3)) == 0


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
    assert same(hard, same_hard)  # hard trees know of no penalty
    np.testing.assert_allclose(steeper.weights - gradient.weights, 0.25 * np.sign(weights), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_score_of_linear_leaves_is_their_criterion(data):
    params, batch = random_params("linear"), Batch(*map(jnp.asarray, data))
    score, more = (float(evaluated(params, batch, 7.0, l1, leaves="linear")[0][1]) for l1 in (0.0, 0.25))
    leaf = jnp.asarray(oracles.walk(params.weights, params.bias, batch.x))
    assert score == pytest.approx(float(params.leaves.criterion(leaf, *batch)), rel=1e-5)
    assert score == more  # hard trees are judged without the penalty


def test_l1_penalty_drives_weights_down(data):
    params = random_params("linear")
    for _ in range(150):
        gradient = evaluated(params, Batch(*data), alpha=7.0, l1=100.0, leaves="linear", score=False)[1]
        weights = np.asarray(params.weights) - np.float32(1e-4) * np.asarray(gradient.weights)
        params = params.replace(weights=weights)
    # Steps of 0.01 towards 0, and no further than about one step beyond; the data pull a hundred times less.
    assert np.abs(params.weights).max() < 0.02


# --- Weights of samples ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weight(data):
    """Weights 0, 1 and 8 that sum to the number of samples; a sample at an end of any column has weight 1.

    Few of them are not 1, so that the samples that count, and samples repeated, share the program of all; but the
    heavy one is that which CART answers worst.
    """
    x, y = data
    table = np.column_stack([x, y])
    inner = np.flatnonzero(((table > table.min(0)) & (table < table.max(0))).all(1))
    lost = np.abs(DecisionTreeRegressor(max_depth=DEPTH, random_state=0).fit(x, y).predict(x) - y)[inner]
    weight = np.ones(len(y))
    order = inner[np.argsort(lost)]
    weight[order[-1]], weight[order[-9:-2]] = 8, 0
    return weight


def test_whole_weights_are_repeated_samples(data, base, weight):
    x, y = data
    weighted = fit(x, y, sample_weight=weight)
    repeated = fit(*(np.repeat(a, weight.astype(int), axis=0) for a in data))
    assert weighted.report["cart_loss"] == pytest.approx(repeated.report["cart_loss"], rel=1e-5)
    assert weighted.report["cart_loss"] != pytest.approx(base.report["cart_loss"], rel=1e-2)
    # The same descent, but sums are taken in another order, and hundreds of updates add to what that changes.
    np.testing.assert_allclose(weighted.report["losses"], repeated.report["losses"], rtol=2e-2)
    assert not np.allclose(weighted.report["losses"], base.report["losses"], rtol=2e-2)
    assert weighted.loss <= weighted.report["cart_loss"]
    found = np.average((weighted.tree.predict(x) - y) ** 2, weights=weight)
    assert weighted.loss == pytest.approx(found, rel=1e-5)


@pytest.mark.parametrize("options", [{}, LINEAR], ids=["constant", "linear"])
def test_samples_of_weight_zero_do_not_count(data, weight, options):
    x, y = data
    out = weight == 0
    others = np.where(out[:, None], x[::-1], x), np.where(out, y.mean(), y)  # inside the ranges that data are scaled by
    first, moved = (fit(*table, sample_weight=weight, **options) for table in (data, others))
    assert moved.loss == pytest.approx(first.loss, rel=1e-6)
    np.testing.assert_allclose(moved.report["losses"], first.report["losses"], rtol=1e-6)
    # The residuals that CART splits for linear leaves are rounded otherwise, and so where a split brings nothing it
    # may be another: what counts is answered alike.
    np.testing.assert_allclose(moved.tree.predict(x[~out]), first.tree.predict(x[~out]), rtol=1e-4, atol=1e-4)
    assert first.loss != pytest.approx(fit(*others, **options).loss, rel=1e-2)


@pytest.mark.parametrize("which", ["x", "y"])
def test_a_sample_of_weight_zero_may_lie_anywhere(data, weight, which):
    first = fit(*data, sample_weight=weight)
    moved = dict(zip("xy", (a.copy() for a in data), strict=True))
    moved[which][np.flatnonzero(weight == 0)[0]] = 1e6
    far = fit(**moved, sample_weight=weight)
    assert far.report["cart_loss"] == pytest.approx(first.report["cart_loss"], rel=1e-3)
    assert far.loss == pytest.approx(first.loss, rel=1e-2)


def test_a_weight_of_nearly_nothing_may_be_all_that_varies(data):
    """In float32 it is nothing: the column is then a constant."""
    x, y = data[0].copy(), data[1]
    x[:, 2] = 1
    x[5, 2] = 2
    weight = np.ones(200)
    weight[5] = 1e-50
    result = fit(x, y, sample_weight=weight)
    assert result.loss <= result.report["cart_loss"]
    assert np.isfinite(result.tree.predict(x)).all()


def test_leaves_are_weighted_means(data, weight):
    x, y = data
    tree = fit(x, y, sample_weight=weight).tree
    leaf = tree.leaf_index(x)
    means = oracles.leaf_means(leaf, y, 4, np.nan, weight)
    np.testing.assert_allclose(tree.predict(x)[weight > 0], means[leaf][weight > 0], rtol=1e-5)


@pytest.mark.parametrize("factor", [8.0, 1e-3, 1e20, 1e60, 1e-60])
def test_only_ratios_of_weights_matter(data, weight, factor):
    first, moved = fit(*data, sample_weight=weight), fit(*data, sample_weight=factor * weight)
    assert moved.report["cart_loss"] == pytest.approx(first.report["cart_loss"], rel=1e-6)
    assert moved.loss == pytest.approx(first.loss, rel=2e-2)  # rounding of 120 updates
    if factor == 8:
        assert same(first.tree, moved.tree)


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
    for recipe in (jtrees.GET(depth=1), jtrees.RADDT(depth=1)):
        with pytest.raises(ValueError, match=message):
            jtrees.fit(recipe, X, Y, key=jax.random.key(0), sample_weight=weight)


# --- Validation ------------------------------------------------------------------------------------------------------

ONE = {"starts": 1, "epochs": 20}  # with the tables of `steps`: one program


@pytest.fixture(scope="module")
def steps(data):
    """A step and much noise, so that one split is all there is to learn; and as many samples again."""
    rng = np.random.default_rng(1)
    x, new = data[0], rng.normal(size=(200, 3)).astype(np.float32)
    step = lambda x: np.where(x[:, 0] - x[:, 1] > 0, 1.0, -1.0) + rng.normal(size=200)
    return x, step(x).astype(np.float32), new, step(new).astype(np.float32)


def test_trees_are_judged_by_validation(steps):
    x, y, x_new, y_new = steps
    result = fit(x, y, validation=(x_new, y_new), **ONE)
    tree, report = result.tree, result.report
    assert result.loss == pytest.approx(np.mean((tree.predict(x_new) - y_new) ** 2, dtype=np.float64), rel=1e-5)
    cart = DecisionTreeRegressor(max_depth=DEPTH, random_state=0).fit(x, y)
    assert report["cart_loss"] == pytest.approx(np.mean((cart.predict(x_new) - y_new) ** 2), rel=1e-5)
    assert result.loss < report["cart_loss"]  # the border is oblique
    assert result.loss == pytest.approx(report["losses"].min(), rel=1e-3)
    # Not trained on: leaves are the means of the training samples alone, whatever the targets there.
    leaf = tree.leaf_index(x)
    means = oracles.leaf_means(leaf, y, 4, (y.min() + y.max()) / 2)
    np.testing.assert_allclose(tree.predict(x), means[leaf], rtol=1e-4)


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
    for recipe in (jtrees.GET(depth=1), jtrees.RADDT(depth=1)):
        with pytest.raises(ValueError, match=message):
            jtrees.fit(recipe, X, Y, key=jax.random.key(0), validation=validation)


# --- Depth and penalty by validation ---------------------------------------------------------------------------------


def tuned(x, y, grid, **options):
    return jtrees.tune(jtrees.GET(depth=1, **ONE), x, y, key=jax.random.key(0), grid=grid, **options)


@pytest.mark.slow
def test_depth_and_penalty_are_those_that_validate_best(steps):
    x, y, x_new, y_new = steps
    grid, options = {"depth": range(1, 13), "l1": [0.0, 0.01]}, {"validation": (x_new, y_new)}
    result = tuned(x, y, grid, **options)
    trials, chosen = result.report["tuning"], result.report["chosen"]
    depths = sorted({trial.options["depth"] for trial in trials})
    assert depths == list(range(1, len(depths) + 1))
    assert [(trial.options["depth"], trial.options["l1"]) for trial in trials] == [
        (depth, l1) for depth in depths for l1 in grid["l1"]
    ]
    best = min(trials, key=lambda trial: trial.loss)
    # The smallest model within the error of the best, where one split is all there is to learn.
    near = [trial for trial in trials if trial.loss - best.loss <= trial.error]
    assert chosen in [trial.options for trial in near]
    assert chosen["depth"] == result.tree.depth == min(trial.options["depth"] for trial in near)
    assert len(depths) < 12  # depths that bring nothing end the search
    # What was validated is fitted again with the same table, and judged by the same samples.
    assert result.loss == pytest.approx(np.mean((result.tree.predict(x_new) - y_new) ** 2, dtype=np.float64), rel=1e-5)
    again = tuned(x, y, grid, **options)
    assert again.report["tuning"] == trials
    assert same(again.tree, result.tree)


@pytest.mark.slow
def test_depth_found_on_a_third_of_the_data_and_fitted_to_all(steps):
    x, y, *_ = steps
    result = tuned(x, y, {"depth": range(1, 13)})
    trials, tree = result.report["tuning"], result.tree
    assert tree.depth == result.report["chosen"]["depth"]
    # All samples are in the tree returned, whose leaves are their means.
    leaf = tree.leaf_index(x)
    means = oracles.leaf_means(leaf, y, 2**tree.depth, (y.min() + y.max()) / 2)
    np.testing.assert_allclose(tree.predict(x), means[leaf], rtol=1e-4)
    assert result.loss == pytest.approx(np.mean((tree.predict(x) - y) ** 2, dtype=np.float64), rel=1e-5)
    # A part that one split cannot halve is judged like the noise that it is, not like what was trained on.
    assert min(trial.loss for trial in trials) > 0.7


@pytest.mark.parametrize(("of_x", "of_y"), [(1, 1e-33), (1, 1e34), (1e10, 1e-20), (1e-20, 1e10)])
def test_linear_leaves_answer_in_units_far_from_one(of_x, of_y):
    x, y = plane_and_steps()
    alone, far = (jtrees.fit(IN_UNITS, a * x, b * y, key=jax.random.key(0)) for a, b in ((1, 1), (of_x, of_y)))
    np.testing.assert_allclose(far.model.predict(of_x * x) / of_y, alone.model.predict(x), rtol=1e-3, atol=1e-4)
    assert far.loss / of_y**2 == pytest.approx(alone.loss, rel=1e-3)


@pytest.mark.parametrize(("of_x", "of_y"), [(1, 1e-38), (1e20, 1e-20), (1e-20, 1e20)])
def test_slopes_that_float32_does_not_hold_are_refused(of_x, of_y):
    """They would be 0, and the loss reported that of a model with slopes."""
    x, y = plane_and_steps()
    with pytest.raises(ValueError, match="units in which linear leaves have slopes that float32 holds, got a range of"):
        jtrees.fit(IN_UNITS, of_x * x, of_y * y, key=jax.random.key(0))


IN_UNITS = jtrees.GET(depth=1, starts=1, epochs=20, leaves="linear")


def plane_and_steps():
    x = np.random.default_rng(0).normal(size=(100, 3))
    return x, np.where(x[:, 0] > 0, 2 * x[:, 1], -1)


def test_rounds_count_what_linear_leaves_cost():
    """An evaluation of wide tables takes longer than all steps of a round otherwise."""
    recipe = jtrees.GET(depth=4, leaves="linear", epochs=1000)
    assert recipe.rounds((3000, 784)).size == 2
    assert recipe.rounds((3000, 5)).size == recipe.replace(leaves="constant").rounds((3000, 5)).size
