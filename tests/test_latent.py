"""LatentTree as a method, as a recipe, and what it hardens to."""

from functools import partial
import importlib
import os
from pathlib import Path
import subprocess
import sys

from flax import nnx, serialization
import jax
from jax.extend.core import jaxprs_in_params
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.metrics import r2_score

import jtrees
from jtrees import Architecture, Batch, LatentTree, isotonic, prediction, routing
from jtrees.recipes import Watch
from jtrees.tasks import Classification, Regression

pytestmark = pytest.mark.usefixtures("standard_promotion")  # Adam; see the fixture

KEY = jax.random.key(0)
latent = importlib.import_module("jtrees.methods.latent")


@pytest.fixture(scope="module")
def table():
    """A sign times a sign, of which a linear regression makes nothing."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(600, 4)).astype(np.float32)
    y = np.where(x[:, 0] + x[:, 1] > 0, 2.0, -1.0) * np.where(x[:, 2] > 0, 1.0, -1.0) + 5
    return x, (y + 0.1 * rng.normal(size=600)).astype(np.float32)


def unit(table, n=600):
    x, y = table
    return Batch(jnp.asarray(x[:n]), jnp.asarray((y[:n] - y.min()) / np.ptp(y)))


# --- The method ------------------------------------------------------------------------------------------------------

SEEN = Architecture(3)  # a linear predictor that sees x and z


@partial(jax.jit, static_argnums=0)
def init(of, batch, key):
    return jtrees.latent(of, 0.1).init(batch, key=key)


def some_params(of, features, dtype=np.float32, task=Regression()):
    """Random parameters, without a compilation."""
    network = nnx.eval_shape(lambda: latent.Network(features, of, task, dtype=dtype, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    shapes = nnx.to_pure_dict(nnx.state(network, nnx.Param))
    return jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape) / np.sqrt(features), dtype), shapes)


@partial(jax.jit, static_argnums=0)
def step(of, params, batch, key, penalty, rate):
    """Loss and score, and parameters after a step of gradient descent."""
    method = jtrees.latent(of, penalty)
    loss = lambda p: method.loss(p, batch, key=key, step=0)
    (value, score), slope = jax.value_and_grad(loss, has_aux=True)(params)
    return value, score, jax.tree.map(lambda p, g: p - rate * g, params, slope)


def test_the_loss_is_that_of_the_papers_program(table):
    """Written out: scores, q, a, z, a linear predictor on [x ; z]."""
    batch, params = unit(table, 64), some_params(SEEN, 4)
    x, y = np.asarray(batch.x), np.asarray(batch.y)
    q = np.asarray(routing.rewards((x @ params["split"]["kernel"]).T + params["bias"][:, None]))
    a = isotonic.prune_pav(q, 0.2 * len(x))[0]
    z = np.clip(q.T + 0.5, 0, a)
    layer = params["layers"][0]
    expected = np.concatenate([x, z], axis=1) @ layer["kernel"] + layer["bias"]
    predictions = jax.jit(jtrees.latent(SEEN, 0.2).predict)(params, batch.x)
    np.testing.assert_allclose(predictions, expected[:, 0], atol=1e-5)  # float32
    loss, score, _ = step(SEEN, params, batch, KEY, 0.2, 0.0)
    np.testing.assert_allclose(loss, np.mean((expected[:, 0] - y) ** 2), rtol=1e-5)
    assert loss == score


def test_rows_of_weight_zero_change_nothing(table):
    """Neither the loss nor the pruning; and a weight of two is two rows."""
    some = unit(table, 48)
    rows = np.concatenate([np.arange(48), np.arange(16)])
    listed = Batch(some.x[rows], some.y[rows])  # 64 rows
    weight = np.concatenate([2 * np.ones(16), np.ones(32), np.zeros(4)])
    weight = jnp.asarray(weight / weight.mean(), jnp.float32)  # as in training
    junk = 7 * jnp.ones((4, 4))
    padded = Batch(jnp.concatenate([some.x, junk]), jnp.concatenate([some.y, jnp.ones(4)]), weight)
    params = some_params(SEEN, 4)
    loss, _, after = step(SEEN, params, listed, KEY, 0.2, 1.0)
    other, _, other_after = step(SEEN, params, padded, KEY, 0.2, 1.0)
    np.testing.assert_allclose(loss, other, rtol=1e-5)  # float32: sums over 64 rows and over 52
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), after, other_after)
    # A batch of nothing but padding is no harm.
    none, _, still = step(SEEN, params, padded._replace(weight=jnp.zeros(52)), KEY, 0.2, 1.0)
    assert none == 0
    jax.tree.map(np.testing.assert_array_equal, still, params)


def test_splits_start_at_the_mean_of_the_samples_that_reach_them(table):
    """By weight: of 64 samples the last 14 are not there."""
    batch = unit(table, 64)._replace(weight=(jnp.arange(64) < 50).astype(jnp.float32))
    params = init(SEEN, batch, KEY)
    x, kernel, bias = np.asarray(batch.x), np.asarray(params["split"]["kernel"], np.float64), params["bias"]
    inside = {0: np.arange(50)}
    for node in range(7):
        mean = x[inside[node]].mean(0)
        np.testing.assert_allclose(bias[node], -mean @ kernel[:, node], atol=1e-5)
        right = x[inside[node]] @ kernel[:, node] + bias[node] > 0
        inside[2 * node + 1], inside[2 * node + 2] = inside[node][~right], inside[node][right]


def own_split(features: int, nodes: int, rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Sequential(nnx.Linear(features, 5, rngs=rngs), jnp.sin, nnx.Linear(5, nodes, rngs=rngs))


def test_parts_of_ones_own_and_hidden_layers_learn_and_compile_once(table, count_compilations):
    of, batch = Architecture(1, own_split, "mlp", "z", 8, 0.1), unit(table, 64)
    batch = batch._replace(y=batch.x[:, 0] / 3)
    params, losses = some_params(of, 4), []
    for i in range(100):
        loss, _, params = step(of, params, batch, jax.random.fold_in(KEY, i), 0.1, 0.1)
        losses.append(float(loss))
    assert np.mean(losses[-20:]) < 0.8 * np.mean(losses[:5])
    assert count_compilations(step, of, params, batch, KEY, 0.3, 0.2) == 0


@partial(jax.jit, static_argnums=0)
def trained(of, batch, key, penalty):
    method = jtrees.latent(of, penalty)
    return jtrees.train(method, batch, key=key, optimizer=optax.adam(0.02), steps=150, batch_size=100).losses


@pytest.mark.slow  # wide: eight programs; one in the test above
@pytest.mark.parametrize("split", ["linear", "elu", "mlp", own_split])
@pytest.mark.parametrize("predictor", ["linear", "mlp"])
def test_every_kind_trains_and_compiles_once(split, predictor, table, count_compilations):
    of = Architecture(2, split, predictor, "z", 8, 0.1)
    losses = trained(of, unit(table), KEY, 0.1)
    assert losses[-20:].mean() < 0.8 * losses[:5].mean()
    assert count_compilations(trained, of, unit(table), jax.random.key(1), 0.3) == 0


@pytest.mark.slow  # wide: the battery sweeps over whole searches by the recipe
def test_sweeps_over_keys_and_penalties(table):
    batch = unit(table)

    def run(key, penalty):
        method = jtrees.latent(2, penalty)
        return jtrees.train(method, batch, key=key, optimizer=optax.adam(0.02), steps=5).losses

    keys, penalties = jax.random.split(KEY, 3), jnp.array([0.01, 0.1, 1.0])
    together = jax.jit(jax.vmap(run))(keys, penalties)
    alone = jax.jit(run)
    for row, key, penalty in zip(together, keys, penalties, strict=True):
        np.testing.assert_allclose(row, alone(key, penalty), rtol=1e-4)  # float32, five updates


@pytest.mark.parametrize("mode", ["rev", pytest.param("fwd", marks=pytest.mark.slow)])
def test_gradients_in_double_precision(mode, table, x64):
    x, y = (jnp.asarray(np.asarray(a)[:20], jnp.float64) for a in unit(table)[:2])
    of = Architecture(2, inputs="z")
    flat, unravel = jax.flatten_util.ravel_pytree(some_params(of, 4, np.float64))
    assert flat.dtype == jnp.float64
    method = jtrees.latent(of, 0.3)
    loss = lambda flat: method.loss(unravel(flat), Batch(x, y), key=KEY, step=0)[0]
    along = jax.jit(lambda flat, way: (loss(flat), jax.vjp(loss, flat)[1](jnp.ones(()))[0] @ way))
    if mode == "fwd":
        along = jax.jit(lambda flat, way: jax.jvp(loss, (flat,), (way,)))
    for way in np.random.default_rng(0).normal(size=(3, len(flat))):
        differences = (along(flat + 1e-6 * way, way)[0] - along(flat - 1e-6 * way, way)[0]) / 2e-6
        np.testing.assert_allclose(along(flat, way)[1], differences, atol=1e-6)


def test_parameters_have_the_dtype_of_x(x64):
    batch = Batch(jnp.ones((4, 3), jnp.float64), jnp.ones(4, jnp.float64))
    shapes = jax.eval_shape(lambda: jtrees.latent(2, 0.1).init(batch, key=KEY))
    assert all(a.dtype == jnp.float64 for a in jax.tree.leaves(shapes))


def test_inactive_nodes_do_not_split():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(50, 2)), jnp.float32)
    of = Architecture(2, inputs="z")
    params = some_params(of, 2)
    # A root that sends everything far to the left: q <= -1/2 on the right, where nothing is active.
    params["split"]["kernel"] = jnp.zeros((2, 3)).at[0, 1].set(1.0)
    params["bias"] = jnp.asarray([-3.0, 0.0, 0.0])
    q = np.asarray(routing.rewards((x @ params["split"]["kernel"]).T + params["bias"][:, None]))
    active = isotonic.prune_pav(q, 50.0)[0]
    assert (active[[2, 5, 6]] == 0).all() and (active[[0, 1, 3, 4]] > 0).all()
    tree = jax.jit(jtrees.latent(of, 1.0).harden)(params, Batch(x, x[:, 0]))
    np.testing.assert_array_equal(tree.weights[2], 0)
    np.testing.assert_array_equal(np.asarray(tree.leaf_index(x)), np.asarray(x[:, 0] > 0))
    assert jtrees.latent(2, 1.0).harden(params, Batch(x, x[:, 0])) is None  # the predictor sees x


def absolute(outputs, y):
    return jnp.abs(outputs - y).sum(1)


@pytest.mark.slow  # the small siblings: clustering has several targets, and classes below a loss of one's own
def test_several_targets_and_a_loss_of_ones_own():
    x = jax.random.normal(KEY, (100, 3))
    y = jnp.stack([x[:, 0], (x[:, 1] > 0) * 1.0], axis=1)
    method = jtrees.latent(2, 0.1, task=Regression(2), loss=absolute)
    train = lambda key: jtrees.train(method, Batch(x, y), key=key, optimizer=optax.adam(0.05), steps=200)
    result = jax.jit(train)(jax.random.key(1))
    assert method.predict(result.params, x).shape == (100, 2)
    assert result.score < 0.3 * result.losses[0]


def test_plateau_schedules_see_the_loss():
    square = lambda params, batch, *, key, step: 2 * (((batch.x @ params - batch.y) ** 2).mean(),)
    method = jtrees.Method(lambda batch, *, key: jnp.ones(2), square, lambda params, x: x @ params, None)
    # Never an improvement: at once to a stop.
    stuck = optax.contrib.reduce_on_plateau(factor=1e-9, patience=1, atol=1e9)
    optimizer = optax.chain(optax.sgd(0.1), stuck)
    batch = Batch(jnp.eye(2), jnp.zeros(2))
    losses = jtrees.train(method, batch, key=KEY, optimizer=optimizer, steps=20).losses
    assert losses[1] != losses[0]
    np.testing.assert_allclose(losses[-1], losses[-2], rtol=1e-6)


# --- The recipe ------------------------------------------------------------------------------------------------------

HELD_OUT = slice(400, 600)
RECIPE = LatentTree(depth=3, batch_size=50)


def fit(table, recipe=RECIPE, *, seed=0, **options):
    """On 400 rows, judged by the others."""
    x, y = table
    options = {"validation": (x[HELD_OUT], y[HELD_OUT])} | options
    return jtrees.fit(recipe, x[:400], y[:400], key=jax.random.key(seed), **options)


@pytest.fixture(scope="module")
def seen(table):
    """A fit whose predictor sees x."""
    with jax.numpy_dtype_promotion("standard"):
        return fit(table)


def test_learns_what_a_linear_model_cannot(table, seen):
    x, y = table
    assert r2_score(y[HELD_OUT], seen.model.predict(x[HELD_OUT])) > 0.8  # linear regression has about 0
    assert seen.tree is None  # the predictor sees x
    assert seen.history.shape == (800,)
    assert np.isfinite(seen.history).all()
    assert seen.report["ended"] == "finished"
    z = seen.model.traverse(x)
    assert z.shape == (15, 600)
    assert (z >= 0).all() and (z <= np.asarray(seen.model.active)[:, None]).all()
    np.testing.assert_array_equal(seen.report["active"], seen.model.active)


def test_the_best_epoch_by_validation_is_kept(table, seen, monkeypatch):
    """Of a run that is broken off after each of its four rounds the loss found never rises."""
    x, y = table
    mse = lambda model: np.mean((model.predict(x[HELD_OUT]) - y[HELD_OUT].astype(np.float64)) ** 2)
    losses = []
    for rounds in range(1, 5):
        monkeypatch.setattr(Watch, "seen", lambda watch, i, losses, last=rounds: i + 1 == last)
        found = fit(table)
        assert found.step % 8 == 0 and found.step <= 200 * rounds == len(found.history)
        assert found.loss == pytest.approx(mse(found.model), rel=1e-6)
        np.testing.assert_array_equal(found.history, seen.history[: 200 * rounds])
        losses.append(found.loss)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == seen.loss < losses[0]


def test_the_activity_is_that_on_the_training_data(table, seen):
    """Also where the model is chosen by other rows: a row's answer never depends on who is asked with it."""
    x = table[0][:400]
    params = seen.model.params
    scores = (seen.model.scale.enter(x) @ params["split"]["kernel"]).T + params["bias"][:, None]
    q = np.asarray(routing.rewards(scores))
    active = isotonic.prune_pav(q, float(RECIPE.penalty) * 400)[0]
    np.testing.assert_allclose(seen.model.active, active, atol=1e-5)  # float32


def test_a_row_is_answered_alike_in_any_company(table, seen):
    x, _ = table
    np.testing.assert_array_equal(seen.model.predict(x[:7]), seen.model.predict(x)[:7])
    np.testing.assert_array_equal(seen.model.predict(x[3:4]), seen.model.predict(x)[3:4])


def test_answers_stay_near_the_training_targets(table, seen):
    x, y = table
    far = seen.model.predict(1e6 * x)
    tenth = 0.1 * np.ptp(y[:400])
    assert far.min() >= y[:400].min() - 1.0001 * tenth and far.max() <= y[:400].max() + 1.0001 * tenth
    assert np.isclose([far.min(), far.max()], [y[:400].min() - tenth, y[:400].max() + tenth], rtol=1e-5).any()


def test_one_outlier_harms_no_other_row(table):
    """A value of 1e12 among others of size one: they keep their scale, and it is taken for far away."""
    x, y = table
    spoilt = x.copy()
    spoilt[7, 0] = 1e12
    model = fit((spoilt, y)).model
    assert r2_score(y[HELD_OUT], model.predict(x[HELD_OUT])) > 0.8
    assert np.isfinite(model.predict(spoilt)).all()


def test_a_learning_rate_that_is_too_large_is_said_to_be(table):
    with pytest.raises(FloatingPointError, match="smaller learning_rate"):
        fit(table, RECIPE.replace(learning_rate=1e30))


def test_a_model_is_written_and_read(seen, table):
    """Parameters and model by flax, which a network's state of its own kind defeats."""
    for whole in (seen.model, seen.model.params):
        empty = jax.tree.map(jnp.zeros_like, whole)
        again = serialization.from_bytes(empty, serialization.to_bytes(whole))
        jax.tree.map(np.testing.assert_array_equal, again, whole)
    other = serialization.from_bytes(jax.tree.map(np.zeros_like, seen.model), serialization.to_bytes(seen.model))
    np.testing.assert_array_equal(other.predict(table[0]), seen.model.predict(table[0]))


def splits_are_those_learnt(result, x):
    """On raw features."""
    scores = np.asarray(result.tree.weights) @ x.T + np.asarray(result.tree.bias)[:, None]
    z = result.model.traverse(x)
    clear = np.abs(scores[0]) > 1e-3
    assert clear.any()
    np.testing.assert_array_equal((scores[0] > 0)[clear], (z[2] > z[1])[clear])


ALONE = LatentTree(depth=3, batch_size=50, inputs="z")


@pytest.mark.slow  # the small siblings: hardening above, and the tree of clustering
def test_the_tree_alone_where_the_predictor_sees_only_it(table):
    x, y = table
    result = fit(table, ALONE, seed=1, validation=None)
    tree = result.tree
    x, y = x[:400], y[:400]
    assert isinstance(tree, jtrees.ObliqueTree)
    assert result.step == 800  # the last update
    assert result.loss == pytest.approx(np.mean((result.model.predict(x) - y.astype(np.float64)) ** 2), rel=1e-6)
    leaf = tree.leaf_index(x)
    for one in np.unique(leaf):
        np.testing.assert_allclose(tree.leaves.values[one], y[leaf == one].mean(), rtol=1e-4)
    splits_are_those_learnt(result, x)
    assert r2_score(y, tree.predict(x)) > 0.7


def smoothed(logits, y):
    """Cross-entropy with a tenth of the weight on every class alike."""
    targets = 0.9 * jax.nn.one_hot(y, 3) + 0.1 / 3
    return optax.losses.softmax_cross_entropy(logits, targets)


def test_the_loss_of_logits_and_their_softmax(table):
    """Of a method with classes, and a loss of one's own."""
    batch = unit(table, 64)
    params, y = some_params(SEEN, 4, task=Classification(3)), np.arange(64) % 3
    batch = batch._replace(y=jnp.asarray(y, jnp.int32))

    @jax.jit
    def both(params, batch):
        method = jtrees.latent(SEEN, 0.2, task=Classification(3), loss=smoothed)
        return method.loss(params, batch, key=KEY, step=0)[0], method.predict(params, batch.x)

    loss, answers = both(params, batch)
    np.testing.assert_allclose(answers.sum(1), 1, rtol=1e-5)
    np.testing.assert_allclose(loss, smoothed(np.log(answers), y).mean(), rtol=1e-5)


@pytest.mark.slow  # a fit: the method is looked at above, in one program
def test_classes_by_a_loss_of_ones_own(table):
    """Models are judged by it, on what they answer; the tree has class frequencies."""
    x = table[0]
    y = (x[:, 0] > 0).astype(int) + (x[:, 1] > 0.5)
    result = fit((x, y), ALONE.replace(depth=2, loss=smoothed), task="classification", validation=None)
    answers = result.model.predict(x[:400])
    np.testing.assert_allclose(answers.sum(1), 1, rtol=1e-5)
    assert result.loss == pytest.approx(float(smoothed(np.log(answers), y[:400]).mean()), rel=1e-4)
    np.testing.assert_allclose(result.loss, result.history[-50:].mean(), rtol=0.2)
    assert np.mean(answers.argmax(1) == y[:400]) > 0.9
    leaf = result.tree.leaf_index(x[:400])
    values = np.asarray(result.tree.leaves.values)
    np.testing.assert_allclose(values.sum(1), 1, rtol=1e-5)
    for one in np.unique(leaf):
        parts = np.bincount(y[:400][leaf == one], minlength=3) / (leaf == one).sum()
        np.testing.assert_allclose(values[one], parts, atol=0.05)  # smoothed
    splits_are_those_learnt(result, x[:400])


def sigmoid_loss(outputs, y):
    return optax.losses.sigmoid_binary_cross_entropy(outputs, y)


@pytest.mark.slow  # its sibling has classes
def test_a_loss_of_ones_own_is_what_models_are_judged_by(table):
    x, y = table
    y = (y > 5).astype(np.float32)
    result = jtrees.fit(LatentTree(depth=2, loss=sigmoid_loss, batch_size=50), x, y, key=KEY)
    logits = result.model.predict(x).astype(np.float32)
    assert logits.min() < -0.5 and logits.max() > 1.5  # logits, not means of targets: without bounds
    np.testing.assert_allclose(result.loss, sigmoid_loss(logits, y).mean(), rtol=1e-4)
    np.testing.assert_allclose(result.loss, result.history[-50:].mean(), rtol=0.2)


@pytest.mark.slow  # statistical
@pytest.mark.parametrize("load", [load_breast_cancer, load_digits])
def test_classification(load):
    x, y = load(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(x))
    train, test = rows[: 3 * len(x) // 4], rows[3 * len(x) // 4 :]
    options = {"depth": 4, "epochs": 60, "batch_size": 64}
    learn = lambda **more: jtrees.fit(LatentTree(**options, **more), x[train], y[train], key=KEY, task="classification")
    answers = learn().model.predict(x[test])
    np.testing.assert_allclose(answers.sum(1), 1, rtol=1e-5)
    assert np.mean(answers.argmax(1) == y[test]) > 0.93  # CART: 0.92 and 0.85
    assert learn(inputs="z").tree.predict(x[test]).shape == (len(test), y.max() + 1)


@pytest.mark.slow  # its sibling compares gradients
@pytest.mark.parametrize("n", [64, 67])  # 67 are padded to 68
def test_a_padded_fit_is_the_search_on_what_is_there(n, table):
    """All samples in a batch, so that padding moves nobody to another."""
    x, y = table[0][:n], table[1][:n]
    recipe = LatentTree(depth=2, epochs=30, batch_size=1000)
    result = jtrees.fit(recipe, x, y, key=KEY)
    whole = recipe.table(x, y, None, "regression")
    scale = recipe.scale(whole)
    bare = jtrees.recipes.Table(jnp.asarray(scale.enter(whole.x)), jnp.asarray(scale.y(whole.y)), None, Regression())
    search = jax.jit(lambda recipe, table, key: recipe.search(None, table, None, key=key))
    found = search(recipe.checked(whole), bare, jax.random.split(KEY, 3)[1])
    # float32, thirty updates
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), result.model.params, found.model)
    np.testing.assert_allclose(result.model.active, found.extra["active"], atol=1e-4)
    np.testing.assert_allclose(result.loss / scale.loss_unit, found.score, rtol=1e-3)


# --- Many rows -------------------------------------------------------------------------------------------------------


def deep_model():
    """A model of depth 10: 2047 nodes, 8 kB a row in float32."""
    of = Architecture(10)
    return jtrees.LatentModel(some_params(of, 21), np.ones(2047, np.float32), None, of, 21, Regression(), False)


def largest(jaxpr) -> int:
    """Elements of the largest array that a program makes on its way."""
    inner = [sub for eqn in jaxpr.eqns for sub in jaxprs_in_params(eqn.params)]
    here = [int(np.prod(v.aval.shape)) for eqn in jaxpr.eqns for v in eqn.outvars]
    return max(here + [largest(sub) for sub in inner])


def test_rows_are_answered_block_by_block(count_compilations):
    """One program for all numbers of rows up to a power of two, and none makes the traversals of more than a block."""
    model = deep_model()
    x = np.random.default_rng(0).normal(size=(1000, 21)).astype(np.float32)
    whole = model.predict(x)
    assert count_compilations(model.predict, x[:600]) == 0
    np.testing.assert_array_equal(model.predict(x[:600]), whole[:600])
    many = jnp.zeros((2**16, 21))
    program = jax.make_jaxpr(partial(prediction._compiled, jtrees.LatentModel.apply))(model, many)
    assert largest(program.jaxpr) < 2**16 * 2047 / 10


@pytest.mark.slow  # wide: a million rows
def test_a_million_rows_fit_into_memory():
    program = """
import resource, numpy as np, test_latent
model = test_latent.deep_model()
x = np.random.default_rng(0).normal(size=(10**6, 21)).astype(np.float32)
model.predict(x[:1000])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert np.isfinite(model.predict(x)).all()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    here = Path(__file__).parent
    environment = os.environ | {"XLA_FLAGS": ""}  # in machine code that is worth its compilation
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=here, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 500e6  # traversals of all rows at once: 8.2 GB


# --- What is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(10, 1), (10, 3)])
def test_targets_of_another_shape_are_refused(shape):
    batch = Batch(jnp.ones((10, 2)), jnp.ones(shape))
    with pytest.raises(ValueError, match=r"y must have shape \(n,\) for Regression.*, got shape \(10, "):
        jtrees.train(jtrees.latent(1, 0.1), batch, key=KEY, optimizer=optax.sgd(0.1), steps=1)
    with pytest.raises(ValueError, match=r"y must have shape \(n, 2\) for Regression.*, got shape \(10, "):
        jtrees.latent(1, 0.1, task=Regression(2)).init(batch, key=KEY)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda outputs, y: jnp.abs(outputs - y).mean(), r"got shape \(\)"),
        (lambda outputs, y: jnp.abs(outputs[:, None] - y), r"got shape \(64, 64\)"),
        (lambda outputs, y: jnp.abs(outputs - y)[:, None], r"got shape \(64, 1\)"),
    ],
)
def test_losses_of_another_shape_are_refused(loss, message, table):
    """A scalar, or a row too many, would be averaged without a word."""
    batch, params = unit(table, 64), some_params(SEEN, 4)
    with pytest.raises(ValueError, match=r"loss must give one number a sample, of shape \(64,\), " + message):
        jax.eval_shape(lambda: jtrees.latent(SEEN, 0.1, loss=loss).loss(params, batch, key=KEY, step=0))
    recipe = RECIPE.replace(loss=loss)
    with pytest.raises(ValueError, match="loss must give one number a sample"):
        jtrees.fit(recipe, *table, key=KEY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 11}, "depth must be from 1 to 10, got 11"),
        ({"depth": 0}, "depth must be from 1"),
        ({"penalty": 0.0}, "penalty must be finite and above 0"),
        ({"penalty": -1}, "penalty must be finite and above 0"),
        ({"penalty": optax.constant_schedule(1.0)}, "penalty must be a number"),
        ({"split": "cubic"}, "split must be one of 'linear', 'elu', 'mlp', or a function"),
        ({"predictor": "forest"}, "predictor must be one of 'linear', 'mlp', got 'forest'"),
        ({"inputs": "x"}, "inputs must be one of 'z', 'xz', got 'x'"),
        ({"hidden": 0}, "hidden must be at least 1"),
        ({"hidden": 2**40}, "hidden must be at most"),
        ({"dropout": 1.0}, "dropout must be a number from 0"),
        ({"loss": "mse"}, "loss must be a function"),
    ],
)
def test_bad_options(change, message, table):
    options = {"depth": 2, "penalty": 0.1, "loss": None} | change
    rest = {name: options[name] for name in ("penalty", "loss")}
    of = Architecture(**{name: value for name, value in options.items() if name not in rest})
    with pytest.raises(ValueError, match=message):
        jtrees.latent(of, **rest)
    with pytest.raises(ValueError, match=message):
        jtrees.fit(LatentTree(**options), *table, key=KEY)


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (2.5, "depth must be a whole number"),
        ("2", "depth must be a whole number"),
    ],
)
def test_bad_options_of_the_method(of, message):
    with pytest.raises(ValueError, match=message):
        jtrees.latent(of, 0.1)


def stateful_split(features: int, nodes: int, rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Sequential(nnx.Linear(features, nodes, rngs=rngs), nnx.BatchNorm(nodes, rngs=rngs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"learning_rate": 0.0}, "learning_rate must be finite and above 0"),
        ({"patience": 0}, "patience must be at least 1"),
        ({"split": stateful_split}, "split must have parameters as its only state"),
        ({"split": lambda p, nodes, rngs: nnx.Linear(p, 1, rngs=rngs)}, r"split must map x of shape \(400, 4\)"),
    ],
)
def test_bad_options_of_the_recipe(change, message, table):
    with pytest.raises(ValueError, match=message):
        fit(table, RECIPE.replace(**change))


def test_bad_arguments_of_the_fit(table):
    with pytest.raises(ValueError, match="task must be"):
        fit(table, task="ranking")
    with pytest.raises(ValueError, match="validation: x must have 4 columns, got 9"):
        fit(table, validation=(np.zeros((3, 9)), np.zeros(3)))


def test_bad_data(table, seen):
    x, _ = table
    with pytest.raises(ValueError, match="x must have 4 columns, got 3"):
        seen.model.predict(x[:, :3])
    with pytest.raises(ValueError, match="x must be finite"):
        seen.model.traverse(np.full((2, 4), np.nan))
