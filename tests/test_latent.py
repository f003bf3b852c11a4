"""LatentTree as a method, as a recipe, and what it hardens to."""

from functools import partial

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.metrics import r2_score

import jtrees
from jtrees import isotonic, routing
from jtrees.methods import latent

pytestmark = pytest.mark.usefixtures("standard_promotion")  # Adam; see the fixture


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(600, 4)).astype(np.float32)
    y = np.where(x[:, 0] + x[:, 1] > 0, 2.0, -1.0) * np.where(x[:, 2] > 0, 1.0, -1.0) + 5
    return x, (y + 0.1 * rng.normal(size=600)).astype(np.float32)


def unit(table):
    x, y = table
    return jnp.asarray(x), jnp.asarray((y - y.min()) / np.ptp(y))


def test_the_loss_is_that_of_the_papers_program(table):
    """Written out: scores, q, a, z, a linear predictor on [x ; z]."""
    x, y = unit(table)
    method = jtrees.latent(3, 0.2)
    params = method.init(x, y, key=jax.random.key(0))
    kernel, bias = params["split"]["kernel"][...], params["bias"][...]
    q = routing.rewards((x @ kernel).T + bias[:, None])
    a = isotonic.prune_pav(np.asarray(q), 0.2 * len(x))[0]
    z = np.clip(np.asarray(q).T + 0.5, 0, a)
    layer = params["layers"][0]
    expected = np.concatenate([x, z], axis=1) @ layer["kernel"][...] + layer["bias"][...]
    np.testing.assert_allclose(method.predict(params, x), expected[:, 0], atol=1e-5)  # float32
    loss, score = method.loss(params, x, y, key=jax.random.key(1), step=0)
    np.testing.assert_allclose(loss, np.mean((expected[:, 0] - y) ** 2), rtol=1e-5)
    assert loss == score


def test_splits_start_at_the_mean_of_the_samples_that_reach_them(table):
    x, y = unit(table)
    params = jtrees.latent(3, 0.2).init(x, y, key=jax.random.key(0))
    kernel, bias = np.asarray(params["split"]["kernel"][...], np.float64), np.asarray(params["bias"][...])
    inside = {0: np.arange(len(x))}
    for node in range(7):
        mean = np.asarray(x)[inside[node]].mean(0)
        np.testing.assert_allclose(bias[node], -mean @ kernel[:, node], atol=1e-5)
        right = np.asarray(x)[inside[node]] @ kernel[:, node] + bias[node] > 0
        inside[2 * node + 1], inside[2 * node + 2] = inside[node][~right], inside[node][right]


def own_split(features: int, nodes: int, rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Sequential(nnx.Linear(features, 5, rngs=rngs), jnp.sin, nnx.Linear(5, nodes, rngs=rngs))


@pytest.mark.parametrize("split", ["linear", "elu", "mlp", own_split])
@pytest.mark.parametrize("predictor", ["linear", "mlp"])
def test_every_kind_trains_and_compiles_once(split, predictor, table, count_compilations):
    x, y = unit(table)
    options = {"split": split, "predictor": predictor, "hidden": 8, "dropout": 0.1, "inputs": "z"}

    @jax.jit
    def run(key, penalty):
        method = jtrees.latent(2, penalty, **options)
        return jtrees.train(method, x, y, key=key, optimizer=optax.adam(0.02), steps=150, batch_size=100).losses

    losses = run(jax.random.key(0), jnp.float32(0.1))
    assert losses[-20:].mean() < 0.8 * losses[:5].mean()
    assert count_compilations(run, jax.random.key(1), jnp.float32(0.3)) == 0


def test_sweeps_over_keys_and_penalties(table):
    x, y = unit(table)

    def run(key, penalty):
        method = jtrees.latent(2, penalty)
        return jtrees.train(method, x, y, key=key, optimizer=optax.adam(0.02), steps=5).losses

    keys, penalties = jax.random.split(jax.random.key(0), 3), jnp.array([0.01, 0.1, 1.0])
    together = jax.jit(jax.vmap(run))(keys, penalties)
    alone = jax.jit(run)
    for row, key, penalty in zip(together, keys, penalties, strict=True):
        np.testing.assert_allclose(row, alone(key, penalty), rtol=1e-4)  # float32, five updates


def test_gradients_in_double_precision(table, x64):
    x, y = (a.astype(jnp.float64)[:20] for a in unit(table))
    method = jtrees.latent(2, 0.3, inputs="z")
    params = method.init(x, y, key=jax.random.key(0))
    assert all(a.dtype == jnp.float64 for a in jax.tree.leaves(params))
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    loss = jax.jit(lambda flat: method.loss(unravel(flat), x, y, key=jax.random.key(0), step=0)[0])
    jax.test_util.check_grads(loss, (flat,), order=1, eps=1e-6, atol=1e-6)


def test_fit_latent_learns_what_a_linear_model_cannot(table):
    x, y = table
    result = jtrees.fit_latent(x[:400], y[:400], key=jax.random.key(0), depth=3, batch_size=50)
    assert r2_score(y[400:], result.model.predict(x[400:])) > 0.8  # a sign times a sign: linear regression has about 0
    assert result.tree is None  # the predictor sees x
    assert result.losses.shape == (800,)
    assert result.step == 800
    z = result.model.traverse(x)
    assert z.shape == (15, 600)
    assert (z >= 0).all() and (z <= np.asarray(result.model.active)[:, None]).all()


def test_a_row_is_answered_alike_in_any_company(table):
    x, y = table
    model = jtrees.fit_latent(x, y, key=jax.random.key(0), depth=2, epochs=3).model
    np.testing.assert_allclose(model.predict(x[:7]), model.predict(x)[:7], rtol=1e-5)


def test_answers_stay_near_the_training_targets(table):
    x, y = table
    model = jtrees.fit_latent(x, y, key=jax.random.key(0), depth=2, epochs=3).model
    far = model.predict(1e6 * x)
    tenth = 0.1 * np.ptp(y)
    np.testing.assert_allclose([far.min(), far.max()], [y.min() - tenth, y.max() + tenth], rtol=1e-5)


def test_the_best_epoch_by_validation_is_kept(table):
    x, y = table
    held_out = x[400:], y[400:]
    fit = partial(jtrees.fit_latent, x[:400], y[:400], key=jax.random.key(0), depth=2, epochs=20, learning_rate=0.1)
    best, last = fit(validation=held_out), fit()
    assert best.step % 3 == 0 and best.step <= 60
    mse = lambda model: np.mean((model.predict(held_out[0]) - held_out[1]) ** 2)
    np.testing.assert_allclose(best.score * np.ptp(y[:400]) ** 2, mse(best.model), rtol=1e-4)
    assert mse(best.model) <= mse(last.model) + 1e-6


def test_the_tree_alone_where_the_predictor_sees_only_it(table):
    x, y = table
    options = {"depth": 3, "batch_size": 50, "inputs": "z"}
    result = jtrees.fit_latent(x, y, key=jax.random.key(1), **options)
    tree = result.tree
    assert isinstance(tree, jtrees.ObliqueTree)
    leaf = tree.leaf_index(x)
    for one in np.unique(leaf):
        np.testing.assert_allclose(tree.leaves.values[one], y[leaf == one].mean(), rtol=1e-4)
    # Splits are those that were learnt, on raw features.
    scores = np.asarray(tree.weights) @ x.T + np.asarray(tree.bias)[:, None]
    z = result.model.traverse(x)
    clear = np.abs(scores[0]) > 1e-3
    np.testing.assert_array_equal((scores[0] > 0)[clear], (z[2] > z[1])[clear])
    assert r2_score(y, tree.predict(x)) > 0.7


def test_inactive_nodes_do_not_split():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(50, 2)), jnp.float32)
    method = jtrees.latent(2, 1.0, inputs="z")
    params = method.init(x, x[:, 0], key=jax.random.key(0))
    # A root that sends everything far to the left: q <= -1/2 on the right, where nothing is active.
    params["split"]["kernel"][...] = jnp.zeros((2, 3)).at[0, 1].set(1.0)
    params["bias"][...] = jnp.asarray([-3.0, 0.0, 0.0])
    active = np.asarray(isotonic.prune(routing.rewards(latent.scores_of(params, x, ARCHITECTURE)), 50.0))
    assert (active[[2, 5, 6]] == 0).all() and (active[[0, 1, 3, 4]] > 0).all()
    tree = jax.jit(method.harden)(params, x, x[:, 0])
    np.testing.assert_array_equal(tree.weights[2], 0)
    np.testing.assert_array_equal(np.asarray(tree.leaf_index(x)), np.asarray(x[:, 0] > 0))


ARCHITECTURE = latent.architecture(2, None, None, "linear", "linear", "z", 64, 0.0)


@pytest.mark.parametrize("load", [load_breast_cancer, load_digits])
def test_classification(load):
    x, y = load(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(x))
    train, test = rows[: 3 * len(x) // 4], rows[3 * len(x) // 4 :]
    options = {"task": "classification", "depth": 4, "epochs": 60, "batch_size": 64}
    model = jtrees.fit_latent(x[train], y[train], key=jax.random.key(0), **options).model
    answers = model.predict(x[test])
    np.testing.assert_allclose(answers.sum(1), 1, rtol=1e-5)
    assert np.mean(answers.argmax(1) == y[test]) > 0.93  # CART: 0.92 and 0.85
    alone = jtrees.fit_latent(x[train], y[train], key=jax.random.key(0), inputs="z", **options).tree
    assert alone.predict(x[test]).shape == (len(test), y.max() + 1)


def test_several_targets_and_a_loss_of_ones_own():
    x = jax.random.normal(jax.random.key(0), (100, 3))
    y = jnp.stack([x[:, 0], (x[:, 1] > 0) * 1.0], axis=1)
    method = jtrees.latent(2, 0.1, targets=2, loss=lambda outputs, y: jnp.abs(outputs - y).sum(1))
    train = lambda key: jtrees.train(method, x, y, key=key, optimizer=optax.adam(0.05), steps=200)
    result = jax.jit(train)(jax.random.key(1))
    assert method.predict(result.params, x).shape == (100, 2)
    assert result.score < 0.3 * result.losses[0]


def test_plateau_schedules_see_the_loss(table):
    x, y = unit(table)
    method = jtrees.latent(1, 0.1)
    stuck = optax.contrib.reduce_on_plateau(
        factor=1e-9, patience=1, atol=1e9
    )  # never an improvement: at once to a stop
    optimizer = optax.chain(optax.sgd(0.1), stuck)
    losses = jtrees.train(method, x, y, key=jax.random.key(0), optimizer=optimizer, steps=20).losses
    assert losses[1] != losses[0]
    np.testing.assert_allclose(losses[-1], losses[-2], rtol=1e-6)


def sigmoid_loss(outputs, y):
    return optax.losses.sigmoid_binary_cross_entropy(outputs, y)


def test_a_loss_of_ones_own_is_what_models_are_judged_by(table):
    x, y = table
    y = (y > 5).astype(np.float32)
    result = jtrees.fit_latent(x, y, key=jax.random.key(0), depth=2, loss=sigmoid_loss, batch_size=50)
    logits = result.model.predict(x).astype(np.float32)
    assert logits.min() < -0.5 and logits.max() > 1.5  # logits, not means of targets: without bounds
    np.testing.assert_allclose(result.score, sigmoid_loss(logits, y).mean(), rtol=1e-4)
    np.testing.assert_allclose(result.score, result.losses[-50:].mean(), rtol=0.2)


@pytest.mark.parametrize("shape", [(10, 1), (10, 3)])
def test_targets_of_another_shape_are_refused(shape):
    x = jnp.ones((10, 2))
    with pytest.raises(ValueError, match=r"y must have shape \(10,\), got \(10, "):
        jtrees.train(
            jtrees.latent(1, 0.1), x, jnp.ones(shape), key=jax.random.key(0), optimizer=optax.sgd(0.1), steps=1
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 11}, "depth must be from 1 to 10, got 11"),
        ({"depth": 0}, "depth must be from 1"),
        ({"penalty": 0.0}, "penalty must be finite and above 0"),
        ({"penalty": -1}, "penalty must be finite and above 0"),
        ({"penalty": optax.constant_schedule(1.0)}, "penalty must be a number above 0"),
        ({"split": "cubic"}, "split must be one of 'linear', 'elu', 'mlp', or a function"),
        ({"predictor": "forest"}, "predictor must be one of 'linear', 'mlp', got 'forest'"),
        ({"inputs": "x"}, "inputs must be one of 'z', 'xz', got 'x'"),
        ({"hidden": 0}, "hidden must be at least 1"),
        ({"dropout": 1.0}, "dropout must be a number from 0"),
        ({"loss": "mse"}, "loss must be a function"),
    ],
)
def test_bad_options(change, message, table):
    options = {"depth": 2, "penalty": 0.1} | change
    with pytest.raises(ValueError, match=message):
        jtrees.latent(**options)
    with pytest.raises(ValueError, match=message):
        jtrees.fit_latent(*table, key=jax.random.key(0), **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes": 1}, "classes must be at least 2, got 1"),
        ({"targets": 0}, "targets must be at least 1"),
        ({"targets": 2, "classes": 3}, "targets is for regression"),
    ],
)
def test_bad_options_of_the_method(change, message):
    with pytest.raises(ValueError, match=message):
        jtrees.latent(2, 0.1, **change)


def stateful_split(features: int, nodes: int, rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Sequential(nnx.Linear(features, nodes, rngs=rngs), nnx.BatchNorm(nodes, rngs=rngs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"learning_rate": 0.0}, "learning_rate must be finite and above 0"),
        ({"patience": 0}, "patience must be at least 1"),
        ({"task": "ranking"}, "task must be"),
        ({"validation": (np.zeros((3, 9)), np.zeros(3))}, "validation: x must have 4 columns, got 9"),
        ({"split": stateful_split}, "split must have parameters as its only state"),
    ],
)
def test_bad_options_of_the_recipe(change, message, table):
    with pytest.raises(ValueError, match=message):
        jtrees.fit_latent(*table, key=jax.random.key(0), **change)


def test_bad_data(table):
    x, y = table
    model = jtrees.fit_latent(x, y, key=jax.random.key(0), depth=1, epochs=1).model
    with pytest.raises(ValueError, match="x must have 4 columns, got 3"):
        model.predict(x[:, :3])
    with pytest.raises(ValueError, match="x must be finite"):
        model.traverse(np.full((2, 4), np.nan))
    with pytest.raises(FloatingPointError, match="smaller learning_rate"):
        jtrees.fit_latent(x, y, key=jax.random.key(0), depth=1, epochs=3, learning_rate=1e30)
