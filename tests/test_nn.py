"""Trees as layers."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.datasets import load_digits

from jtrees import isotonic, nn, routing

pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_a_layer_is_a_traversal_of_its_batch():
    layer = nn.LatentTree(3, 2, penalty=0.1, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (20, 3))
    scores = layer.split(x).T + layer.bias[...][:, None]
    z, active = routing.traverse(scores, 0.1 * 20)
    np.testing.assert_allclose(layer(x), z.T, atol=1e-6)
    # The running mean started at 1, and has moved a tenth of the way.
    np.testing.assert_allclose(layer.active[...], 0.9 + 0.1 * active, rtol=1e-6)
    np.testing.assert_allclose(layer(x.reshape(4, 5, 3)).reshape(20, 7), z.T, atol=1e-6)


def test_in_evaluation_rows_do_not_depend_on_each_other():
    layer = nn.LatentTree(3, 2, penalty=0.1, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (20, 3))
    layer(x)
    before = layer.active[...]
    layer.eval()
    np.testing.assert_allclose(layer(x)[:4], layer(x[:4]), atol=1e-6)
    np.testing.assert_array_equal(layer.active[...], before)
    expected = routing.position(routing.rewards(layer.split(x).T + layer.bias[...][:, None]), before)
    np.testing.assert_allclose(layer(x), expected.T, atol=1e-6)
    layer.train()
    assert np.abs(layer(x) - expected.T).max() > 1e-3


class Digits(nnx.Module):
    """A small convolution, a tree, a linear layer."""

    def __init__(self, rngs: nnx.Rngs):
        self.convolution = nnx.Conv(1, 8, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.BatchNorm(8 * 16, momentum=0.9, rngs=rngs)
        self.tree = nn.LatentTree(8 * 16, 5, penalty=0.05, rngs=rngs)
        self.out = nnx.Linear(63, 10, rngs=rngs)

    def __call__(self, images):
        features = nnx.relu(self.convolution(images))
        return self.out(self.tree(self.norm(features.reshape(len(images), -1))))


def test_trains_behind_a_convolution(count_compilations):
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(images))
    images, labels = images[order], labels[order]
    images = jnp.asarray(images.reshape(-1, 8, 8, 1) / 16, jnp.float32)
    labels = jnp.asarray(labels)
    model = Digits(nnx.Rngs(0))
    kernel = model.convolution.kernel[...]
    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, images, labels):
        def loss(model):
            return optax.losses.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

        value, gradient = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradient)
        return value

    rng, train = np.random.default_rng(0), 1300
    for i in range(300):
        rows = rng.integers(0, train, 128)
        value = step(model, optimizer, images[rows], labels[rows])
        if i == 0:
            first = value
            assert count_compilations(step, model, optimizer, images[rows], labels[rows]) == 0
    assert value < first / 5
    assert np.abs(model.convolution.kernel[...] - kernel).max() > 0.01  # gradients came through the tree
    model.eval()
    assert np.mean(model(images[train:]).argmax(1) == labels[train:]) > 0.9


@pytest.mark.parametrize("split", ["elu", "mlp"])
def test_kinds_of_splits(split):
    layer = nn.LatentTree(3, 3, penalty=0.1, split=split, hidden=4, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (20, 3))
    gradient = nnx.grad(lambda layer: (layer(x) ** 2).sum())(layer)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))
    assert np.abs(jax.tree.leaves(gradient["split"])[0]).max() > 0


def test_double_precision(x64):
    layer = nn.LatentTree(3, 2, penalty=0.1, dtype=jnp.float64, rngs=nnx.Rngs(0))
    assert layer(jnp.ones((4, 3), jnp.float64)).dtype == jnp.float64


def test_penalties_prune():
    """The activity falls with the penalty, as the closed form of a single node says."""
    x = jax.random.normal(jax.random.key(0), (64, 3))
    means = []
    for penalty in (0.01, 1.0, 100.0):
        layer = nn.LatentTree(3, 3, penalty=penalty, momentum=0.0, rngs=nnx.Rngs(0))
        layer(x)
        means.append(float(layer.active[...].mean()))
        np.testing.assert_allclose(layer.active[0], min(1, 1.5 / (1 + penalty)), rtol=1e-5)  # q = 1 in every sample
    assert means[0] > means[1] > means[2] > 0
    assert isotonic.prune(jnp.ones((1, 5)), 5.0)[0] == pytest.approx(0.75)


def test_bad_shapes():
    layer = nn.LatentTree(3, 2, penalty=0.1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"x must have 3 features on its last axis, got shape \(4, 2\)"):
        layer(jnp.zeros((4, 2)))
    narrow = lambda features, nodes, rngs: nnx.Linear(features, 1, rngs=rngs)
    layer = nn.LatentTree(3, 2, penalty=0.1, split=narrow, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"split must map x of shape \(4, 3\) to \(4, 3\), got \(4, 1\)"):
        layer(jnp.zeros((4, 3)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": 0}, "features must be at least 1"),
        ({"depth": 11}, "depth must be from 1 to 10"),
        ({"penalty": 0.0}, "penalty must be finite and above 0"),
        ({"momentum": 1.0}, "momentum must be a number from 0"),
        ({"split": "cubic"}, "split must be one of"),
    ],
)
def test_bad_options(change, message):
    options = {"features": 3, "depth": 2, "penalty": 0.1} | change
    with pytest.raises(ValueError, match=message):
        nn.LatentTree(**options, rngs=nnx.Rngs(0))
