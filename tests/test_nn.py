"""Trees as layers."""

from functools import partial

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrees import nn, routing
from tests import oracles

pytestmark = pytest.mark.usefixtures("standard_promotion")

call = nnx.jit(lambda layer, x: layer(x))


@pytest.fixture
def layer():
    return nn.LatentTree(3, 2, penalty=0.1, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(0), (20, 3))


def rewards(layer, x):
    kernel = np.asarray(layer.split.kernel[...])
    return np.asarray(routing.rewards((x @ kernel).T + layer.bias[...][:, None]))


def position(q, active):
    return np.clip(q + 0.5, 0, np.asarray(active)[:, None]).T


def test_a_layer_is_a_traversal_of_its_batch_and_in_evaluation_of_its_running_mean(layer, x):
    q = rewards(layer, x)
    active = oracles.prune_pav(q, 0.1 * 20)[0]
    np.testing.assert_allclose(call(layer, x), position(q, active), atol=1e-6)
    mean = layer.active[...]
    np.testing.assert_allclose(mean, 0.9 + 0.1 * active, rtol=1e-6)  # it started at 1
    layer.eval()
    for rows in (x, x[:4], x.reshape(4, 5, 3)):  # rows do not depend on each other
        answers = call(layer, rows).reshape(-1, 7)
        np.testing.assert_allclose(answers, position(q, mean)[: len(answers)], atol=1e-6)
    np.testing.assert_array_equal(layer.active[...], mean)
    layer.train()
    assert np.abs(call(layer, x) - position(q, mean)).max() > 1e-3


def test_double_precision(x64):
    x = jnp.ones((4, 3), jnp.float64)
    layer = partial(nn.LatentTree, 3, 2, penalty=0.1, dtype=jnp.float64)
    for average in (True, False):
        shape = jax.eval_shape(lambda x, average=average: layer(rngs=nnx.Rngs(0), use_running_average=average)(x), x)
        assert shape.dtype == jnp.float64


def test_a_split_of_another_shape_is_refused():
    narrow = lambda features, nodes, rngs: nnx.Linear(features, 1, rngs=rngs)
    layer = nn.LatentTree(3, 2, penalty=0.1, split=narrow, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"split must map x of shape \(4, 3\) to \(4, 3\), got \(4, 1\)"):
        layer(jnp.zeros((4, 3)))


def ensemble(**options):
    options = {"num_trees": 3, "depth": 2, "out_features": 2, "gamma": 2.0} | options
    layer = nn.TreeEnsemble(3, **options, rngs=nnx.Rngs(0))
    for seed, parameter in enumerate((layer.weights, layer.bias, layer.leaf_values)):
        parameter[...] = jax.random.normal(jax.random.key(seed), parameter.shape)
    return layer


def trees_one_by_one(layer, x):
    weights, bias, leaf_values = (np.asarray(a[...]) for a in (layer.weights, layer.bias, layer.leaf_values))
    right = routing.smooth_step(jnp.asarray(np.einsum("tjp,np->tjn", weights, x) + bias[:, :, None]), layer.gamma)
    reach = np.asarray(jax.vmap(routing.leaf_probabilities)(right))
    return np.einsum("tln,tlk->ntk", reach, leaf_values)


def test_an_ensemble_sums_its_trees(x):
    layer = ensemble()
    expected = trees_one_by_one(layer, np.asarray(x))
    np.testing.assert_allclose(call(layer, x), expected.sum(1), atol=1e-5)
    np.testing.assert_allclose(call(layer, x.reshape(4, 5, 3)), expected.sum(1).reshape(4, 5, 2), atol=1e-5)
    np.testing.assert_allclose(call(layer, x[0]), expected.sum(1)[0], atol=1e-5)


@pytest.mark.parametrize("kind", ["tree", "ensemble"])
def test_gradients_of_layers_are_finite_differences_and_compile_once(x64, kind, x, count_compilations):
    options = {"dtype": jnp.float64, "rngs": nnx.Rngs(0)}
    trees = nn.TreeEnsemble(3, num_trees=2, depth=2, out_features=2, gamma=8.0, **options)
    layer = trees if kind == "ensemble" else nn.LatentTree(3, 2, penalty=0.1, **options)
    definition, params, rest = nnx.split(layer, nnx.Param, ...)
    flat, unravel = jax.flatten_util.ravel_pytree(params)
    loss = lambda flat: jnp.sin(nnx.merge(definition, unravel(flat), rest, copy=True)(x.astype(jnp.float64))).sum()
    run = jax.jit(jax.value_and_grad(loss))
    flat = flat + jax.random.normal(jax.random.key(1), flat.shape)
    gradient = run(flat)[1]
    assert (gradient != 0).all() and count_compilations(run, 2 * flat) == 0
    for way in np.random.default_rng(0).normal(size=(3, len(flat))):
        difference = (run(flat + 1e-6 * way)[0] - run(flat - 1e-6 * way)[0]) / 2e-6
        np.testing.assert_allclose(gradient @ way, difference, rtol=1e-6, atol=1e-7)


def small_tree(**options):
    return nn.LatentTree(**{"features": 3, "depth": 2, "penalty": 0.1} | options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (small_tree, {"features": 0}, "features must be at least 1"),
        (small_tree, {"depth": 11}, "depth must be from 1 to 10"),
        (small_tree, {"penalty": 0.0}, "penalty must be a finite number above 0"),
        (small_tree, {"momentum": 1.0}, "momentum must be a finite number of at least 0"),
        (small_tree, {"split": "cubic"}, "split must be one of"),
        (small_tree, {"split": "mlp", "hidden": 0}, "hidden must be at least 1, got 0"),
        (ensemble, {"num_trees": 0}, "num_trees must be at least 1"),
        (ensemble, {"out_features": 1.5}, "out_features must be a whole number"),
        (ensemble, {"gamma": 0.0}, "gamma must be a finite number above 0"),
        (ensemble, {"width": 0}, "width must be at least 1"),
    ],
)
def test_bad_options_are_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_bad_inputs_are_refused(layer):
    trees = ensemble()
    for call in (layer, partial(layer, use_running_average=True), trees):
        with pytest.raises(ValueError, match=r"x must have 3 features on its last axis, got shape \(4, 2\)"):
            call(jnp.zeros((4, 2)))
        with pytest.raises(ValueError, match=r"x must hold at least one sample, got shape \(4, 0, 3\)"):
            call(jnp.zeros((4, 0, 3)))


@pytest.mark.slow
def test_the_running_mean_of_a_layer_in_half_precision():
    """Steps of a thousandth of it are below the rounding of bfloat16."""
    layer = nn.LatentTree(4, 2, penalty=0.3, momentum=0.999, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    for _ in range(40):
        assert call(layer, jnp.ones((32, 4), jnp.bfloat16)).dtype == jnp.bfloat16
    assert layer.active[...].dtype == jnp.float32 and 0.9 < layer.active[...].min() < 0.99
