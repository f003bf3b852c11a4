"""LatentTree: the method, the recipe, and what it hardens to. Its search: test_minibatch."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.metrics import r2_score

import jtrees
from jtrees import Batch, LatentTree, routing
from jtrees.data.scaling import with_map
from jtrees.methods.latent_tree import modules
from jtrees.methods.latent_tree.architecture import Architecture
from jtrees.methods.latent_tree.modules import Network
from jtrees.methods.latent_tree.network import active_on, centered
from jtrees.tasks import Regression
from tests import oracles, sweeps

pytestmark = pytest.mark.usefixtures("standard_promotion")  # Adam; see the fixture

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def table():
    """A sign times a sign, which no linear regression can fit."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(600, 4)).astype(np.float32)
    y = np.where(x[:, 0] + x[:, 1] > 0, 2.0, -1.0) * np.where(x[:, 2] > 0, 1.0, -1.0) + 5
    return x, (y + 0.1 * rng.normal(size=600)).astype(np.float32)


def scaled(table, n=600):
    x, y = table
    return Batch(jnp.asarray(x[:n]), jnp.asarray((y[:n] - y.min()) / np.ptp(y)))


OF_XZ = Architecture(3)  # a linear predictor that sees x and z


def random_params(of, features, dtype=np.float32, task=Regression()):
    network = nnx.eval_shape(lambda: Network(features, of, task, dtype=dtype, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    shapes = nnx.to_pure_dict(nnx.state(network, nnx.Param))
    return jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape) / np.sqrt(features), dtype), shapes)


def test_the_loss_is_that_of_the_papers_program(table):
    """Written out: scores, q, a, z, a linear predictor on [x ; z]."""
    batch, params = scaled(table, 64), random_params(OF_XZ, 4)
    x, y = np.asarray(batch.x), np.asarray(batch.y)
    q = np.asarray(routing.rewards((x @ params["split"]["kernel"]).T + params["bias"][:, None]))
    a = oracles.prune_pav(q, 0.2 * len(x))[0]
    z = np.clip(q.T + 0.5, 0, a)
    layer = params["layers"][0]
    expected = np.concatenate([x, z], axis=1) @ layer["kernel"] + layer["bias"]
    outputs = jax.jit(lambda params, batch: active_on(batch, params, OF_XZ, Regression(), 0.2).outputs(batch.x))
    np.testing.assert_allclose(outputs(params, batch), expected[:, 0], atol=1e-5)  # float32
    loss, score = jax.jit(lambda p: jtrees.methods.latent(OF_XZ, 0.2).loss(p, batch, key=KEY, step=0))(params)
    np.testing.assert_allclose(loss, np.mean((expected[:, 0] - y) ** 2), rtol=1e-5)
    assert loss == score


def test_splits_start_at_the_mean_of_the_samples_that_reach_them(table):
    """By weight: of 64 samples the last 14 have none."""
    batch = scaled(table, 64)._replace(weight=(jnp.arange(64) < 50).astype(jnp.float32))
    params = jax.jit(lambda batch: jtrees.methods.latent(OF_XZ, 0.1).init(batch, key=KEY))(batch)
    x, kernel, bias = np.asarray(batch.x), np.asarray(params["split"]["kernel"], np.float64), params["bias"]
    inside = {0: np.arange(50)}
    for node in range(7):
        mean = x[inside[node]].mean(0)
        np.testing.assert_allclose(bias[node], -mean @ kernel[:, node], atol=1e-5)
        right = x[inside[node]] @ kernel[:, node] + bias[node] > 0
        inside[2 * node + 1], inside[2 * node + 2] = inside[node][~right], inside[node][right]


def own_split(features: int, nodes: int, rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Sequential(nnx.Linear(features, 5, rngs=rngs), jnp.sin, nnx.Linear(5, nodes, rngs=rngs))


KINDS = {"linear": "mlp", "elu": "linear", "mlp": "mlp", "function": "linear"}  # of splits, of predictors


@pytest.mark.parametrize("split", sweeps.quick(KINDS, ["function"]))
def test_every_kind_trains(split, table):
    kind = own_split if split == "function" else split, KINDS[split]
    method, adam = jtrees.methods.latent(Architecture(2, *kind, "z", 8, 0.1), 0.1), optax.adam(0.02)
    train = lambda batch: jtrees.train(method, batch, key=KEY, optimizer=adam, steps=150, batch_size=100).losses
    losses = jax.jit(train)(scaled(table))
    assert losses[-20:].mean() < 0.8 * losses[:5].mean()


@pytest.mark.parametrize("mode", ["rev", pytest.param("fwd", marks=pytest.mark.slow)])
def test_gradients_in_double_precision(mode, table, x64):
    x, y = (jnp.asarray(np.asarray(a)[:20], jnp.float64) for a in scaled(table)[:2])
    of = Architecture(2, inputs="z")
    flat, unravel = jax.flatten_util.ravel_pytree(random_params(of, 4, np.float64))
    assert flat.dtype == jnp.float64
    method = jtrees.methods.latent(of, 0.3)
    loss = lambda flat: method.loss(unravel(flat), Batch(x, y), key=KEY, step=0)[0]
    along = jax.jit(lambda flat, way: (loss(flat), jax.vjp(loss, flat)[1](jnp.ones(()))[0] @ way))
    if mode == "fwd":
        along = jax.jit(lambda flat, way: jax.jvp(loss, (flat,), (way,)))
    for way in np.random.default_rng(0).normal(size=(3, len(flat))):
        differences = (along(flat + 1e-6 * way, way)[0] - along(flat - 1e-6 * way, way)[0]) / 2e-6
        np.testing.assert_allclose(along(flat, way)[1], differences, atol=1e-6)


def test_inactive_nodes_do_not_split():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(50, 2)), jnp.float32)
    of = Architecture(2, inputs="z")
    params = random_params(of, 2)
    # A root that sends everything far to the left: q <= -1/2 on the right, where nothing is active.
    params["split"]["kernel"] = jnp.zeros((2, 3)).at[0, 1].set(1.0).at[1, 2].set(1.0)
    params["bias"] = jnp.asarray([-3.0, 0.0, 0.0])
    q = np.asarray(routing.rewards((x @ params["split"]["kernel"]).T + params["bias"][:, None]))
    active = oracles.prune_pav(q, 50.0)[0]
    assert (active[[2, 5, 6]] == 0).all() and (active[[0, 1, 3, 4]] > 0).all()
    tree = jax.jit(jtrees.methods.latent(of, 1.0).harden)(params, Batch(x, x[:, 0]))
    np.testing.assert_array_equal(tree.weights[2], 0)
    np.testing.assert_array_equal(np.asarray(tree.leaf_index(x)), np.asarray(x[:, 0] > 0))
    assert jtrees.methods.latent(2, 1.0).harden(params, Batch(x, x[:, 0])) is None  # the predictor sees x


RECIPE = LatentTree(depth=3, batch_size=50, weight_decay=0.0)


@pytest.fixture(scope="module")
def xz_fit(table):
    x, y = table
    with jax.numpy_dtype_promotion("standard"):
        return jtrees.fit(RECIPE, x[:400], y[:400], key=KEY, validation=(x[400:], y[400:]))


def test_the_activity_is_that_on_the_training_data(table, xz_fit):
    """Also where the model is chosen by other rows: a prediction never depends on the rows that come with it."""
    x = table[0][:400]
    params = xz_fit.model.network.params
    scores = (xz_fit.model.scaling.transform(x) @ params["split"]["kernel"]).T + params["bias"][:, None]
    q = np.asarray(routing.rewards(scores))
    active = oracles.prune_pav(q, float(RECIPE.penalty) * 400)[0]
    np.testing.assert_allclose(xz_fit.model.network.active, active, atol=1e-5)  # float32
    np.testing.assert_array_equal(xz_fit.model.predict(x[:7]), xz_fit.model.predict(x)[:7])
    np.testing.assert_array_equal(xz_fit.model.predict(x[3:4]), xz_fit.model.predict(x)[3:4])


def test_predictions_stay_near_the_training_targets(table, xz_fit):
    x, y = table
    assert xz_fit.tree is None and r2_score(y[400:], xz_fit.model.predict(x[400:])) > 0.8  # a linear model has about 0
    far = xz_fit.model.predict(1e6 * x)
    tenth = 0.1 * np.ptp(y[:400])
    assert far.min() >= y[:400].min() - 1.0001 * tenth and far.max() <= y[:400].max() + 1.0001 * tenth
    assert np.isclose([far.min(), far.max()], [y[:400].min() - tenth, y[:400].max() + tenth], rtol=1e-5).any()


@pytest.mark.slow
def test_the_tree_where_the_predictor_sees_z_alone(table):
    x, y = table[0][:400], table[1][:400]
    result = jtrees.fit(LatentTree(depth=3, batch_size=50, inputs="z"), x, y, key=jax.random.key(1))
    tree = result.tree
    assert result.step == 800  # the last update
    assert result.loss == pytest.approx(np.mean((result.model.predict(x) - y.astype(np.float64)) ** 2), rel=1e-6)
    leaf = tree.leaf_index(x)
    for number in np.unique(leaf):
        np.testing.assert_allclose(tree.leaves.values[number], y[leaf == number].mean(), rtol=1e-4)
    root, z = x @ np.asarray(tree.weights)[0] + np.asarray(tree.bias)[0], result.model.traverse(x)
    clear = np.abs(root) > 1e-3
    np.testing.assert_array_equal((root > 0)[clear], (z[2] > z[1])[clear])
    assert r2_score(y, tree.predict(x)) > 0.7


def test_bad_options():
    with pytest.raises(ValueError, match="split must be a function, got 'cubic'; it may be 'linear'"):
        jtrees.methods.latent(Architecture(2, "cubic"), 0.1)
    with pytest.raises(ValueError, match="hidden must be from 1 to 32768, got"):
        jtrees.methods.latent(Architecture(2, hidden=2**40), 0.1)
    with pytest.raises(ValueError, match="penalty must be a finite number"):
        jtrees.methods.latent(2, optax.constant_schedule(1.0))


def stateful_split(features: int, nodes: int, rngs: nnx.Rngs) -> nnx.Module:
    return nnx.Sequential(nnx.Linear(features, nodes, rngs=rngs), nnx.BatchNorm(nodes, rngs=rngs))


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (stateful_split, "split must have parameters as its only state"),
        (lambda p, nodes, rngs: nnx.Linear(p, 1, rngs=rngs), r"split must map x of shape \(400, 4\)"),
    ],
)
def test_bad_splits(split, message, table):
    with pytest.raises(ValueError, match=message):
        jtrees.fit(RECIPE.replace(split=split), table[0][:400], table[1][:400], key=KEY)


@pytest.mark.parametrize("split", sweeps.quick(["linear", "elu", "mlp"], ["mlp"]))
@pytest.mark.parametrize("inputs", sweeps.quick(["z", "xz"], ["xz"]))
def test_a_network_of_mapped_features_is_a_network_of_the_features(split, inputs):
    rng = np.random.default_rng(0)
    x, matrix = (rng.normal(size=shape).astype(np.float32) for shape in ((20, 3), (3, 3)))
    task, architecture = Regression(), Architecture(2, split, "mlp", inputs, hidden=4)
    params = modules.initial(KEY, jnp.asarray(x), architecture, task, centered, jnp.zeros(()))
    network = active_on(Batch(jnp.asarray(x @ matrix), jnp.zeros(20)), params, architecture, task, 0.01)
    expected = network.outputs(jnp.asarray(x @ matrix))
    np.testing.assert_allclose(with_map(network, matrix).outputs(jnp.asarray(x)), expected, atol=1e-5)
    assert np.ptp(expected) > 0.01


def test_leaves_of_the_tree_are_fitted_to_rows_with_codes_where_they_are():
    """Splits are trained on features in which a code is clipped."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 2))
    y = 3.0 * (x[:, 1] > 0) + x[:, 0]
    x[:80, 0] = 999_999.0
    fit = jtrees.fit(jtrees.LatentTree(depth=2, inputs="z", predictor="linear", epochs=20), x, y, key=KEY)
    leaf = fit.tree.leaf_index(x)
    for reached in np.unique(leaf):
        assert fit.tree.leaves.values[reached] == pytest.approx(y[leaf == reached].mean(), rel=1e-12)
