"""TEL: lazy steps, hard trees, the recipe. Its routing: test_conditional; its search: test_minibatch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, Ridge

import jtrees
from jtrees import Batch, routing
from jtrees.methods.tree_ensemble.ensemble import Ensemble, hardened
from jtrees.segments import mean_one
from jtrees.tasks import Classification, Regression
from tests import sweeps

pytestmark = pytest.mark.usefixtures("standard_promotion")  # Adam; see the fixture

KEY = jax.random.key(0)
rng = np.random.default_rng(0)
X = rng.normal(size=(400, 4))
Y = np.sign(X[:, 0] * X[:, 1]) + X[:, 2]
CLASS = (X[:, 0] > 0).astype(int) + (X[:, 1] * X[:, 2] > 0.3)


def random_params(depth=3, trees=2, k=2, scale=1.0, dtype=np.float64):
    generator = np.random.default_rng(1)
    nodes = 2**depth - 1
    shapes = (trees, nodes, 4), (trees, nodes), (trees, nodes + 1, k)[: 3 if k else 2]
    weights, bias, leaf_values = (generator.normal(size=shape).astype(dtype) for shape in shapes)
    return Ensemble(*map(jnp.asarray, (scale * weights, scale * bias, leaf_values)))


def lazy_adam_plainly(params, moments, gradient, count, rate):
    """Adam by its definition (Kingma & Ba 2015, Algorithm 1), where the gradient is not zero."""

    def number(p, m, v, g):
        new_m, new_v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        step = rate * (new_m / (1 - 0.9**count)) / (np.sqrt(new_v / (1 - 0.999**count)) + 1e-8)
        met = g != 0
        return np.where(met, p - step, p), np.where(met, new_m, m), np.where(met, new_v, v)

    return [number(*parts) for parts in zip(params, *moments, gradient, strict=True)]


@pytest.mark.parametrize("width", sweeps.quick([None, 1, 8], [1], []))
@pytest.mark.parametrize("l2", sweeps.quick([0.0, 0.1], [0.1], []))
def test_steps_in_rows_are_lazy_adam(width, l2, x64):
    """However the gradient is computed: level by level, where a batch does not fit, or path by path."""
    gamma, rate = 0.7, 0.05
    method = jtrees.methods.tel(3, 2, gamma, task=Classification(3), l2=l2, learning_rate=rate, width=width)
    params = random_params(k=3)
    state = jtrees.training.lazy_adam(rate).init(params)
    current, moments = jax.tree.leaves(params), [[np.zeros_like(a) for a in jax.tree.leaves(params)] for _ in range(2)]
    plain = jtrees.methods.tel(3, 2, gamma, task=Classification(3))
    slope = jax.jit(jax.grad(lambda params, batch: plain.loss(params, batch, key=KEY, step=0)[0]))
    update = jax.jit(lambda params, state, batch: method.update(params, state, batch, key=KEY, step=0))
    rested = 0
    for i in range(4):
        rows = slice(8 * i, 8 * i + 8)
        batch = Batch(jnp.asarray(X[rows]), jnp.asarray(CLASS[rows], jnp.int32), jnp.linspace(0.5, 1.5, 8))
        gradient = [np.array(a) for a in jax.tree.leaves(slope(Ensemble(*map(jnp.asarray, current)), batch))]
        gradient[0] += np.where(gradient[0] != 0, 2 * l2 * current[0], 0)
        rested += (gradient[0] == 0).mean()
        current, *moments = zip(*lazy_adam_plainly(current, moments, gradient, i + 1, rate), strict=True)
        params, state, (loss, score) = update(params, state, batch)
        assert loss == score > 0
        arrays = jax.tree.leaves((params, state.mean, state.square))
        for array, expected in zip(arrays, [*current, *moments[0], *moments[1]], strict=True):
            np.testing.assert_allclose(array, expected, atol=1e-10)
        assert not any(np.any(a) for a in jax.tree.leaves(state.room)) and state.count == i + 1
    assert rested > 0.4


outputs_of = jax.jit(Ensemble.outputs, static_argnames="step")


def test_the_logistic_twin_is_a_sum_of_trees_of_sigmoids():
    params, x = random_params(dtype=np.float32), jnp.asarray(X[:20], jnp.float32)
    right = jax.nn.sigmoid(6 / 0.5 * (np.einsum("tjp,np->tjn", params.weights, x) + params.bias[:, :, None]))
    reach = jax.jit(jax.vmap(jtrees.routing.leaf_probabilities))(right)
    expected = np.einsum("tln,tlk->nk", reach, params.leaf_values)
    np.testing.assert_allclose(outputs_of(params, x, 0.5, step="logistic"), expected, atol=1e-5)
    assert 0.01 < np.abs(outputs_of(params, x, 0.5) - expected).mean() < 0.5  # alike, and not the same


def test_a_small_gamma_is_hard():
    params, x = random_params(dtype=np.float32), jnp.asarray(X, jnp.float32)
    leaf, values = np.asarray(jax.jit(Ensemble.hard_leaves)(params, x)), np.asarray(params.leaf_values)
    expected = sum(values[tree][leaf[tree]] for tree in range(2))
    np.testing.assert_allclose(outputs_of(params, x, 1e-6), expected, atol=1e-5)


def indicators(params, x):
    leaf, leaves = np.asarray(jax.jit(Ensemble.hard_leaves)(params, jnp.asarray(x))), params.leaf_values.shape[1]
    return np.concatenate([np.eye(leaves)[one] for one in leaf], axis=1)


@pytest.mark.parametrize("columns", [*sweeps.slow([0, 1], [1]), 2])  # 0: targets without an axis of their own
def test_leaves_are_refitted_by_one_ridge_regression(columns, x64):
    params, weight = random_params(depth=3, k=columns), np.linspace(0, 2, 400)
    y = np.stack([Y, X[:, 3]], 1)[:, :columns] if columns else Y
    forest = jax.jit(hardened, static_argnums=2)(params, Batch(X, y, weight), Regression())
    design, start = indicators(params, X), np.concatenate(params.leaf_values).reshape(16, -1)
    target = y.reshape(400, -1) - design @ start
    ridge = Ridge(alpha=1.0, fit_intercept=False, solver="cholesky")
    change = ridge.fit(design, target, sample_weight=np.asarray(mean_one(weight))).coef_
    values = np.concatenate(np.asarray(forest.trees.leaves.values)).reshape(start.shape)
    np.testing.assert_allclose(values, start + change.reshape(-1, 16).T, atol=1e-4)  # cg to 1e-5
    np.testing.assert_allclose(forest.apply(jnp.asarray(X)), (design @ values).reshape(y.shape), atol=1e-8)
    assert forest.combine == "sum" and forest.link == "identity"


@pytest.mark.slow
def test_leaves_are_refitted_by_one_logistic_regression(x64):
    params = random_params(depth=3, k=3, scale=1.0)
    zero = params.replace(leaf_values=np.zeros_like(params.leaf_values))
    forest = hardened(zero, Batch(X, CLASS, None), Classification(3))
    model = LogisticRegression(C=1.0, fit_intercept=False, tol=1e-8, max_iter=1000)
    chances = model.fit(indicators(params, X), CLASS).predict_proba(indicators(params, X))
    np.testing.assert_allclose(forest.apply(jnp.asarray(X)), chances, atol=1e-3)  # a hundred steps of L-BFGS
    assert forest.combine == "sum" and forest.link == "softmax"


def test_a_leaf_that_no_sample_reaches_keeps_its_values():
    params = random_params(k=0, dtype=np.float32)
    batch = Batch(X[:3].astype(np.float32), Y[:3].astype(np.float32))
    forest = jax.jit(hardened, static_argnums=2)(params, batch, Regression())
    reached = indicators(params, X[:3].astype(np.float32)).any(0).reshape(2, 8)
    changed = np.asarray(forest.trees.leaves.values) != params.leaf_values
    np.testing.assert_array_equal(changed, reached)


def reachable(fit, gamma):
    """The mean number of leaves that a training sample reaches in a tree, and whether the paths overflow."""
    params, x = fit.model.network.params, fit.model.scaling.transform(X)
    count, overflows = routing.reachable_leaves(jnp.asarray(x, jnp.float32), params.weights, params.bias, gamma)
    return count.mean(), overflows


SMALL = jtrees.TEL(depth=3, trees=5, epochs=60, batch_size=50, learning_rate=0.03)


@pytest.mark.parametrize("lazy", sweeps.slow([True, False], [True]))
def test_products_of_features_are_learnt(lazy):
    result = jtrees.fit(SMALL.replace(lazy=lazy), X, Y, key=KEY)
    predictions = result.predict(X)
    assert 1 - np.var(Y - predictions) / np.var(Y) > 0.9
    assert result.loss == pytest.approx(np.mean((Y - predictions) ** 2), rel=1e-5)
    fewer = jtrees.fit(SMALL.replace(lazy=lazy, gamma=0.01), X, Y, key=KEY)
    (many, overflows), (few, _) = map(reachable, (result, fewer), (SMALL.gamma, 0.01))
    assert 1 <= many < 8 and not overflows
    assert few < 1.2 < many and result.tree is None


@pytest.mark.parametrize("far", sweeps.quick([0.0, 1e6], [1e6]))
def test_hard_trees_predict_in_the_users_units(far):
    y = 1000 * Y + 100 * far
    result = jtrees.fit(SMALL.replace(hard=True), X + far, y, key=KEY)
    forest = result.model
    assert isinstance(forest, jtrees.Forest) and forest.combine == "sum" and len(forest) == 5
    predictions = forest.predict(X + far)
    assert result.loss == pytest.approx(np.mean((y - predictions) ** 2), rel=1e-4)
    assert 1 - np.var(y - predictions) / np.var(y) > 0.8


def test_bad_options_are_named():
    with pytest.raises(ValueError, match=r"trees must be at most \d+, .*, got 1073741824"):
        jtrees.fit(SMALL.replace(trees=2**30), X, Y, key=KEY)
    with pytest.raises(ValueError, match='learning_rate must be None with step="logistic"'):
        jtrees.methods.tel(2, step="logistic", learning_rate=0.1)


HARD = {
    "TEL": jtrees.TEL(depth=3, trees=8, hard=True, precondition=0.0, learning_rate=0.2, early_stopping=False),
    "GRANDE": jtrees.GRANDE(depth=4, trees=8, hard=True, learning_rate=0.5, early_stopping=False),
}


@pytest.mark.parametrize(("name", "seed", "epochs"), [("TEL", 0, (2, 5, 20)), ("GRANDE", 1, (20, 40))])
def test_hard_trees_are_chosen_by_their_own_loss(name, seed, epochs):
    """More epochs evaluate the same updates and further ones, so the lowest loss falls."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(228, 3))
    y = x[:, 0] * x[:, 1] + rng.normal(size=228)
    options = {"validation": (x[128:], y[128:]), "key": jax.random.key(seed)}
    losses = [jtrees.fit(HARD[name].replace(epochs=count), x[:128], y[:128], **options).loss for count in epochs]
    assert (np.diff(losses) <= 0).all()
