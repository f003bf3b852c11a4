"""Scores, routing and leaves in one call: the expected loss and its fused gradient, against sums over leaves."""

from functools import partial
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jtrees
from jtrees import ObliqueTree, blocking, losses, ops, pytree, routing, training
from jtrees.leaves import Linear, Values
from pallas_kernels import Unsupported
from tests import oracles, sweeps

DEPTH, N, P = 3, 50, 3
NODES = 2**DEPTH - 1


def draw(linear=False, seed=0, dtype=np.float64):
    """A tree, samples, targets and weights of mean 1 (some zero), NumPy."""
    rng = np.random.default_rng(seed)
    kind = Linear if linear else Values
    arrays = (rng.normal(size=(NODES + 1, P)), rng.normal(size=NODES + 1)) if linear else (rng.normal(size=NODES + 1),)
    tree = ObliqueTree(rng.normal(size=(NODES, P)), rng.normal(size=NODES), kind(*arrays))
    weight = rng.uniform(size=N)
    weight[::4] = 0
    drawn = tree, rng.normal(size=(N, P)), rng.normal(size=N), weight / weight.mean()
    return jax.tree.map(lambda a: a.astype(dtype), drawn)


def outputs(tree, x):
    if isinstance(tree.leaves, Linear):
        return tree.leaves.coefficients @ x.T + tree.leaves.intercept[:, None]
    return tree.leaves.values[:, None] + 0 * x[:, 0]


def ours(tree, x, y, weight=None, **options):
    return ops.expected_loss(tree.weights, tree.bias, tree.leaves, x, y, weight=weight, **options)


def plain(tree, x, y, weight, sigmoid=oracles.sigmoid, route=None):
    return oracles.expected_leaf_loss(tree.weights, tree.bias, outputs(tree, x), x, y, weight, sigmoid, route)


def gradient_of(value, tree, by=oracles.exact_gradient):
    """Gradient of a function of trees, tree-shaped: by complex steps, or by ``oracles.numeric_gradient``."""
    parts, structure = jax.tree.flatten(tree)
    along = lambda i: lambda a: value(structure.unflatten([*parts[:i], a, *parts[i + 1 :]]))
    return structure.unflatten([by(along(i), part) for i, part in enumerate(parts)])


def assert_trees_close(a, b, **tolerance):
    for single, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(single, other, **tolerance)


def sigmoid_of_complex(t):
    return 1 / (1 + np.exp(-t))


products = lambda scores: routing.leaf_probabilities(jax.nn.sigmoid(scores))
violations = lambda scores: routing.violation(scores, 3.0)
CASES = {  # linear leaves, weighted, the route, and its plain definition
    "sigmoid": (False, False, "sigmoid", None),
    "sigmoid, linear, weighted": (True, True, "sigmoid", None),
    "products": (True, True, products, None),
    "violation": (True, True, violations, lambda scores: oracles.violation(scores, 3.0)),
    "logits": (False, True, "sigmoid", None),
}


def log_losses(values, y):
    """The loss of each leaf, ``(leaves, n)``, of complex logits too."""
    return (np.log(np.exp(values).sum(1, keepdims=True)) - values)[:, y]


@pytest.mark.parametrize("name", CASES)
def test_value_leaf_and_gradient(x64, name):
    """The loss is not divided by the sum of the weights."""
    linear, weighted, route, plain_route = CASES[name]
    tree, x, y, weight = draw(linear)
    if name == "logits":
        rng = np.random.default_rng(1)
        tree, y = tree.replace(leaves=Values(rng.normal(size=(NODES + 1, 3)), losses.LogLoss())), rng.integers(0, 3, N)
    passed, weight = (1.5 * weight, 1.5 * weight) if weighted else (None, np.ones(N))

    def expected(tree, sigmoid=sigmoid_of_complex):
        if name != "logits":
            return weight.mean() * plain(tree, x, y, weight, sigmoid, plain_route)
        probabilities = oracles.leaf_probabilities(sigmoid(tree.weights @ x.T + tree.bias[:, None]))
        each = zip(probabilities, log_losses(tree.leaves.values, y), strict=True)
        return (weight * sum(p * loss for p, loss in each)).mean()

    pair = jax.jit(jax.value_and_grad(partial(ours, route=route), has_aux=True))
    (loss, leaf), gradient = pair(tree, x, y, passed)
    assert float(loss) == pytest.approx(expected(tree), rel=1e-10)
    assert leaf.dtype == jnp.int32 and np.array_equal(leaf, oracles.walk(tree.weights, tree.bias, x))
    value, value_leaf = jax.jit(partial(ours, route=route))(tree, x, y, passed)  # without a gradient
    assert float(value) == pytest.approx(float(loss), rel=1e-6) and np.array_equal(leaf, value_leaf)
    if name != "violation":
        assert_trees_close(gradient, gradient_of(expected, tree), rtol=1e-10, atol=1e-13)
    if name in ("violation", "sigmoid"):
        assert_trees_close(gradient, gradient_of(expected, tree, oracles.numeric_gradient), atol=1e-8)


DATA = {  # kind of leaves, route, implementation
    "constants": ("values", "sigmoid", None),
    "in blocks": ("values", "sigmoid", "xla"),
    "linear": ("linear", "sigmoid", None),
    "violation": ("values", "violation", None),
    "a function": ("values", routing.violation, None),
    "kernel": ("values", "sigmoid", "interpret"),
    "logits, kernel": ("logits", "violation", "interpret"),
    "logits": ("logits", "sigmoid", None),
}


@pytest.mark.parametrize("name", sweeps.slow(DATA, ["kernel", "in blocks", "linear"]))
def test_gradient_of_the_data(name, monkeypatch):
    """That of x, of the targets and of the weights, each alone and together, is that of the plain definition."""
    kind, route, implementation = DATA[name]
    dtype = np.float32 if implementation == "interpret" else np.float64
    with jax.enable_x64(dtype == np.float64):
        tree, x, y, weight = draw(kind == "linear", dtype=dtype)
        given = {"route": route, "implementation": implementation}
        if kind == "logits":
            logits = np.stack([tree.leaves.values, np.zeros(NODES + 1, dtype)], axis=1)
            tree = tree.replace(leaves=Values(logits, losses.LogLoss()))
            y = (y > 0).astype(np.int32)
        if name == "in blocks":
            monkeypatch.setattr(blocking, "block_size", lambda nodes, n: 7)

        def textbook(tree, x, y, weight):
            z = tree.weights @ x.T + tree.bias[:, None]
            reach = routing.violation(z) if route != "sigmoid" else routing.leaf_probabilities(jax.nn.sigmoid(z))
            return (weight * (reach * tree.leaves.losses(x, y)).sum(0)).mean()

        selected = (0, 1, 3) if kind == "logits" else (0, 1, 2, 3)  # classes have no gradient
        fused = lambda tree, x, y, weight: ours(tree, x, y, weight, **given)[0]
        drawn = jax.tree.map(jnp.asarray, (tree, x, y, weight))
        expected = dict(zip(selected, jax.jit(jax.grad(textbook, selected))(*drawn), strict=True))
        tolerance = {"rtol": 1e-4, "atol": 1e-6} if dtype == np.float32 else {"rtol": 1e-10, "atol": 1e-12}
        for places in [selected, *((single,) for single in selected)]:
            result = jax.jit(jax.grad(fused, places))(*drawn)
            assert_trees_close(result, [expected[place] for place in places], **tolerance)
        if dtype == np.float64:
            value = jax.jit(fused)
            numeric = oracles.numeric_gradient(lambda x: float(value(drawn[0], jnp.asarray(x), *drawn[2:])), x)
            np.testing.assert_allclose(expected[1], numeric, atol=1e-8)


def test_training_does_not_compute_the_gradient_of_the_data():
    """The program is the same whether the data are constants or arguments, and smaller than with their gradient."""
    drawn = draw(dtype=np.float32)
    flops = lambda fn: jax.jit(fn).lower(*drawn).compile().cost_analysis()["flops"]
    gradient = lambda *places: jax.grad(lambda *drawn: ours(*drawn)[0], places)
    stopped = lambda tree, *data: ours(tree, *jax.lax.stop_gradient(data))[0]
    assert flops(gradient(0)) == flops(jax.grad(stopped)) < flops(gradient(0, 1))


BLOCKS = [*itertools.product(["sigmoid"], [1, 7, 49], [np.float32, np.float64]), (routing.violation, 7, np.float32)]


@pytest.mark.parametrize("case", sweeps.quick(BLOCKS, [("sigmoid", 7, np.float32)]))
def test_blocks_and_vmap_change_nothing(x64, monkeypatch, case):
    """50 samples: padding of 0, 6 and 48."""
    route, block, dtype = case
    tree, *data = draw(dtype=dtype)
    trees = jax.tree.map(lambda a: np.stack([a, 2 * a]), tree)
    single = jax.value_and_grad(partial(ours, route=route), has_aux=True)
    alone = jax.jit(single)
    expected = [alone(jax.tree.map(lambda a: a[i], trees), *data) for i in range(2)]  # noqa: B023
    monkeypatch.setattr(blocking, "block_size", lambda nodes, n: block)
    (loss, leaf), gradient = jax.jit(lambda *args: jax.vmap(single, (0, None, None, None))(*args))(trees, *data)
    assert loss.dtype == dtype
    tolerance = 1e-5 if dtype == np.float32 else 1e-13  # sums in another order
    for i, ((full, whole_leaf), whole_gradient) in enumerate(expected):
        assert np.array_equal(leaf[i], whole_leaf)
        mine = loss[i], jax.tree.map(lambda a: a[i], gradient)  # noqa: B023
        assert_trees_close(mine, (full, whole_gradient), rtol=tolerance, atol=tolerance)


def test_padding_asks_nothing_about_samples_that_could_not_be(monkeypatch):
    # A loss without a value at y = 0, and a last block that must be filled up.
    monkeypatch.setattr(blocking, "block_size", lambda nodes, n: 4)
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(a, jnp.float32) for a in (rng.normal(size=(5, 2)), rng.uniform(1, 2, 5)))
    weights, bias = jnp.asarray(rng.normal(size=(3, 2)), jnp.float32), jnp.zeros(3)

    loss = lambda values: ops.expected_loss(weights, bias, Values(values, losses.Gamma()), x, y)[0]
    value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.arange(4.0))
    assert np.isfinite(value) and np.isfinite(gradient).all()


@pytest.mark.usefixtures("standard_promotion")
def test_the_mean_of_samples_of_few_bits_has_their_number():
    tree, x, y, _ = jax.tree.map(jnp.asarray, draw(dtype=np.float32))
    x = x.astype(jnp.bfloat16)  # which holds 1 / 50 to two digits
    loss_of = jax.jit(lambda weight: ours(tree, x, y, weight)[0])
    np.testing.assert_allclose(loss_of(None), loss_of(jnp.ones(len(y))), rtol=1e-6)


def test_no_kernel_smooths_labels():
    """A kernel would ignore the smoothing, so that XLA computes the loss."""
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3)), jnp.float32)
    leaves, splits = Values(logits, losses.LogLoss(0.2)), (jnp.ones((3, 2)), jnp.zeros(3))
    with pytest.raises(Unsupported, match="implementation='interpret'"):
        ops.expected_loss(*splits, leaves, jnp.ones((4, 2)), jnp.zeros(4, int), implementation="interpret")


@pytest.mark.parametrize("route", [jax.nn.sigmoid, lambda z: z.sum(0)])
def test_a_route_that_returns_no_probabilities_of_leaves_is_refused(route):
    leaves, x = Values(jnp.zeros(8)), jnp.ones((5, 2))
    message = r"route must return the probabilities of the leaves, \(8, 5\), got shape"
    with pytest.raises(ValueError, match=message):
        ops.expected_loss(jnp.ones((7, 2)), jnp.zeros(7), leaves, x, jnp.ones(5), route=route)
    with pytest.raises(ValueError, match=message):
        jax.jit(partial(ops.soft, route=route))(jnp.ones((7, 2)), jnp.zeros(7), leaves.values, x)


def test_scores_and_what_soft_and_path_sum_routings_answer():
    """The calls that join scores, routing and leaves, for one output and for two."""
    tree, x, *_ = draw(dtype=np.float32)
    values = tree.leaves.values, np.random.default_rng(2).normal(size=(NODES + 1, 2)).astype(np.float32)

    def everything(tree, x, values):
        splits = tree.weights, tree.bias
        slope = lambda window: jax.grad(lambda w: ops.path_sum(w, tree.bias, values[0], x, window).sum())(tree.weights)
        return (
            ops.scores(*splits, x),
            [ops.soft(*splits, value, x, products) for value in values],
            [ops.path_sum(*splits, value, x) for value in values],
            [slope(window) for window in (2.0, routing.mean_size)],
            ops.hard(*splits, x),
        )

    scores, soft, sums, slopes, leaf = jax.jit(everything)(tree, x, values)
    exact = tree.weights.astype(float) @ x.T + tree.bias[:, None]
    np.testing.assert_allclose(scores, exact, rtol=1e-5, atol=1e-6)
    assert np.array_equal(leaf, oracles.walk(tree.weights, tree.bias, x))
    probabilities = np.stack(oracles.leaf_probabilities(oracles.sigmoid(exact)))
    for value, answer, leaf_answer in zip(values, soft, sums, strict=True):
        assert answer.shape == leaf_answer.shape == (N, *value.shape[1:])
        np.testing.assert_allclose(answer, np.tensordot(probabilities, value, ((0,), (0,))), rtol=1e-5, atol=1e-6)
        assert np.array_equal(leaf_answer, value[np.asarray(leaf)])
    # A function of the scores as a window is the window that it gives: gradients pass within it alone.
    mean = np.abs(exact).mean()
    assert 0.5 < mean < 1.9 and not np.allclose(*slopes)
    windowed = jax.jit(jax.grad(lambda z, window: routing.path_sum(z, jnp.asarray(values[0]), window).sum()))
    for slope, window in zip(slopes, (2.0, mean), strict=True):
        np.testing.assert_allclose(slope, np.asarray(windowed(scores, window)) @ x, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("standard_promotion")
def test_deep_trees_take_samples_of_another_precision():
    w, b, leaves = jnp.ones((511, 2)), jnp.zeros(511), Values(jnp.zeros(512))
    loss, _ = ops.expected_loss(w, b, leaves, jnp.ones((4, 2), jnp.bfloat16), jnp.ones(4))
    assert loss == pytest.approx(1, rel=1e-5)


@pytest.mark.usefixtures("standard_promotion")
def test_a_kernel_and_xla_have_one_dtype():
    x, *tree = (jnp.ones(shape, jnp.bfloat16) for shape in ((4, 2), (1, 2), (1,), (2, 1)))
    out = jax.jit(lambda *tree: ops.soft(*tree, x, implementation=("mosaic_tpu", "xla")))(*tree)
    assert out.dtype == jnp.float32 and (out == 1).all()


def test_no_samples():
    tree, x = (jnp.ones((1, 2)), jnp.zeros(1)), jnp.zeros((0, 2))
    with pytest.raises(ValueError, match=r"x must hold at least one sample, got shape \(0, 2\)"):
        ops.expected_loss(*tree, Values(jnp.zeros(2)), x, jnp.zeros(0))
    gradient = jax.grad(lambda values: ops.path_sum(*tree, values, x).sum())(jnp.zeros((2, 1)))
    np.testing.assert_array_equal(gradient, 0)


@pytree.dataclass
class ScaledLeaves:
    """Leaves of a user: all leaves share the scales of the outputs."""

    values: jax.Array
    scale: jax.Array
    kernel = None

    def losses(self, x, y):
        return (((self.values[:, None] - y) * self.scale) ** 2).mean(-1)


@pytest.mark.parametrize("scale", [[1.0, 10.0], 3.0])
def test_leaves_of_a_user_may_share_numbers_in_deep_trees(scale):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    weights, bias, x, y = 2000 * draw(511, 3), draw(511), draw(50, 3), draw(50, 2)
    leaves = ScaledLeaves(draw(512, 2), jnp.asarray(scale))
    chances = routing.leaf_probabilities(jax.nn.sigmoid(ops.scores(weights, bias, x)))
    expected = (chances * leaves.losses(x, y)).sum(0).mean()
    np.testing.assert_allclose(ops.expected_loss(weights, bias, leaves, x, y)[0], expected, rtol=1e-5)


def test_targets_of_linear_leaves_have_the_axes_of_their_outputs():
    x, leaves = jnp.ones((5, 2)), jtrees.leaves.Linear(jnp.ones((2, 2)), jnp.zeros(2))
    with pytest.raises(ValueError, match=r"y must have 1 axes, as outputs, got shape \(5, 1\)"):
        ops.expected_loss(jnp.ones((1, 2)), jnp.zeros(1), leaves, x, x[:, :1])


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("weighted", [False, True])
def test_samples_of_few_bits_train_a_tree(weighted):
    x = jax.random.normal(jax.random.key(0), (400, 3)).astype(jnp.bfloat16)
    y, weight = (x[:, 0] > 0).astype(jnp.float32), jnp.ones(400) if weighted else None
    method = jtrees.methods.get(1, 5.0)
    batch = jtrees.Batch(x, y, weight)
    best = jtrees.train(method, batch, key=jax.random.key(0), optimizer=optax.adam(0.02), steps=40)
    assert best.score < 0.1 and best.params.weights.dtype == jnp.bfloat16


def test_weights_of_many_samples_of_half_precision_are_numbers():
    data = jtrees.Batch(jnp.ones((70_000, 1), jnp.float16), jnp.ones(70_000), jnp.ones(70_000))
    np.testing.assert_array_equal(training.state.normalised(data).weight, 1)
