"""NODE, GRANDE, DTSemNet and the soft decision tree beside the papers' definitions, written plainly in NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import logsumexp

import jtrees
from jtrees import Batch, Classification
from jtrees.methods import dtsemnet, grande, node, soft_decision_tree
from tests import sweeps

pytestmark = pytest.mark.usefixtures("standard_promotion")  # Adam; see the fixture

rng = np.random.default_rng(0)
N, P, DEPTH = 12, 3, 2
X, Y = rng.normal(size=(N, P)), rng.normal(size=N)
CLASSES = rng.integers(0, 3, N)
WEIGHT = rng.uniform(0.5, 2, N)
KEY = jax.random.key(0)


def batch(y):
    return Batch(jnp.asarray(X), jnp.asarray(y), jnp.asarray(WEIGHT / WEIGHT.mean()))


def initial(method, rows):
    """The parameters at the start, by one program."""
    return jax.jit(lambda rows: method.init(rows, key=KEY))(rows)


@jax.jit
def outputs_of(params, x):
    return params.outputs(x)


def numpy(params):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), params)


def entmax(logits):
    z = logits / 2
    t = brentq(lambda t: (np.maximum(z - t, 0) ** 2).sum() - 1, z.max() - 1, z.max(), xtol=1e-15)
    return np.maximum(z - t, 0) ** 2


def mean_loss(losses):
    return (WEIGHT * losses).mean() / WEIGHT.mean()


def check_loss(method, rows, plain, params, size=1e-5):
    """The loss of a method and its slopes along some directions are those of a plain definition."""
    loss = lambda params: method.loss(params, rows, key=KEY, step=0)[0]
    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    assert float(value) == pytest.approx(plain(numpy(params)), abs=1e-10)
    for seed in range(4):
        leaves, structure = jax.tree.flatten(params)
        draw = np.random.default_rng(seed)
        change = jax.tree.unflatten(structure, [draw.normal(size=np.shape(a)) for a in leaves])
        changes = (jax.tree.map(lambda d, step=step: step * d, change) for step in (size, -size))
        forward, behind = (numpy(jax.tree.map(jnp.add, params, move)) for move in changes)
        slope = (plain(forward) - plain(behind)) / (2 * size)
        products = jax.tree.map(lambda g, d: float((g * d).sum()), gradient, change)
        assert sum(jax.tree.leaves(products)) == pytest.approx(slope, rel=1e-6, abs=1e-8)


def plain_node(layers, x):
    """Equations 1 to 5 of the paper, sample by sample and tree by tree; a layer sees all outputs before it."""
    means = []
    for row in x:
        inputs, outputs = row, []
        for layer in layers:
            answers = []
            for logits, thresholds, scales, responses in zip(
                layer.logits, layer.threshold, np.exp(layer.log_scale), layer.responses, strict=True
            ):
                scores = (np.array([entmax(level) @ inputs for level in logits]) - thresholds) / scales
                right = np.array([entmax(np.array([score, 0]))[0] for score in scores])
                sides = np.array(list(itertools.product((0, 1), repeat=len(right))))
                answers.append(np.where(sides, right, 1 - right).prod(1) @ responses)
            outputs += answers
            inputs = np.concatenate([inputs, np.ravel(answers)])
        means.append(np.mean(outputs, axis=0))
    return np.array(means)


@pytest.mark.parametrize("layers", sweeps.quick([1, 3], [1]))
def test_node_is_the_papers(layers, x64):
    method = node(3, 2, layers)
    params = initial(method, batch(Y))
    np.testing.assert_allclose(outputs_of(params, X), plain_node(numpy(params).params, X), rtol=0, atol=1e-10)
    plain = lambda params: mean_loss((plain_node(params.params, X) - Y) ** 2)
    check_loss(method, batch(Y), plain, params)


def steps_of(features, layer):
    """The scaled features of a layer, and their steps."""
    t = (features - layer.threshold.T[..., None]) * jnp.exp(-layer.log_scale.T)[..., None]
    return t, jtrees.routing.entmax_step(t)


def test_node_starts_inside_all_steps():
    x = jax.random.normal(KEY, (200, 5))
    [layer] = initial(node(2, 4), Batch(x, x[:, 0])).params
    features, step = map(np.asarray, jax.jit(lambda layer, x: steps_of(layer.features(x), layer))(layer, x))
    assert np.abs(features).max() < 2 and ((step > 0) & (step < 1)).all()


@pytest.mark.parametrize("make", [node, grande])
def test_thresholds_start_at_rows_with_a_weight(make):
    x = jnp.where(jnp.arange(40)[:, None] < 10, 1e3, 0) + jax.random.normal(KEY, (40, 2))
    rows = Batch(x, x[:, 0], (jnp.arange(40) >= 10).astype(x.dtype))
    params = initial(make(3, 4), rows)
    thresholds = params.params[0].threshold if make is node else params.thresholds
    assert float(jnp.abs(thresholds).max()) < 10


def test_node_starts_with_equal_rows():
    rows = Batch(jnp.ones((20, 2)), jnp.ones(20))
    [layer] = initial(node(2, 3), rows).params
    np.testing.assert_allclose(jnp.exp(layer.log_scale), 1)


def soft_grande(hard, params, x):
    choice_offset, side_offset = hard
    choices = np.stack([[entmax(node) for node in tree] for tree in params.logits]) + choice_offset
    z = np.einsum("tjp,np->tjn", choices, x) - (choices * params.thresholds).sum(-1)[..., None]
    right = (z / (1 + np.abs(z)) + 1) / 2 + side_offset
    root, left, last = (right[:, j] for j in range(3))
    reach = np.stack([(1 - root) * (1 - left), (1 - root) * left, root * (1 - last), root * last], axis=1)
    logits, values = (np.einsum("tln,tl->tn", reach, a) for a in (params.leaf_weights, params.values))
    return (np.exp(logits) / np.exp(logits).sum(0) * values).sum(0)


def test_grande_is_the_papers(x64):
    method = grande(DEPTH, 3, selected=1.0)
    params = initial(method, batch(Y))
    plain = numpy(params)
    # Straight-through: the offsets from soft to hard are constants.
    soft = np.stack([[entmax(logits) for logits in tree] for tree in plain.logits])
    choices = np.eye(P)[plain.logits.argmax(-1)]
    z = np.einsum("tjp,np->tjn", choices, X) - (choices * plain.thresholds).sum(-1)[..., None]
    hard = choices - soft, (z > 0) - (z / (1 + np.abs(z)) + 1) / 2
    np.testing.assert_allclose(outputs_of(params, X), soft_grande(hard, plain, X), rtol=0, atol=1e-10)
    check_loss(method, batch(Y), lambda params: mean_loss((soft_grande(hard, params, X) - Y) ** 2), params)


def test_a_tree_of_grande_sees_some_features_only():
    x = jax.random.normal(KEY, (50, 10))
    method = grande(3, 6, selected=0.3)
    params = initial(method, Batch(x, x[:, 0]))
    loss = lambda params: method.loss(params, Batch(x, x[:, 0]), key=KEY, step=0)[0]
    gradient = jax.jit(jax.grad(loss))(params)
    inputs, moves = ((np.asarray(a) != 0).any(1) for a in (params.choices(), gradient.logits))
    assert (inputs.sum(1) <= 3).all() and moves.any() and (moves.sum(1) <= 3).all()


def test_dropout_leaves_trees_out():
    x = jax.random.normal(KEY, (50, 2))
    rows = Batch(x, x[:, 0])
    method = grande(1, 8, dropout=0.5)
    params = initial(method, rows)
    score = method.loss(params, rows, key=KEY, step=0)[1]
    assert score == grande(1, 8, dropout=0.0).loss(params, rows, key=KEY, step=0)[0]  # of the whole model
    slope = jax.jit(jax.grad(lambda params, key: method.loss(params, rows, key=key, step=0)[0]))
    remaining = [np.asarray(slope(params, jax.random.key(k)).values != 0).any(1) for k in (1, 2)]
    assert (remaining[0] != remaining[1]).any() and all(0 < trees.sum() < 8 for trees in remaining)


@pytest.mark.slow
def test_the_forest_of_grande_has_its_splits():
    x, y = rng.normal(size=(300, 4)), rng.normal(size=300)
    recipe = jtrees.GRANDE(depth=2, trees=3, epochs=4, batch_size=100, early_stopping=False)
    soft, hard = (jtrees.fit(recipe.replace(hard=flag), x, y, key=KEY).model for flag in (False, True))
    assert isinstance(hard, jtrees.Forest) and len(hard) == 3
    assert np.count_nonzero(np.asarray(hard.trees.weights), axis=-1).max() == 1
    chosen = np.asarray(hard.trees.weights).argmax(-1)
    np.testing.assert_array_equal(chosen, np.asarray(soft.network.logits).argmax(-1))


# The sides of the ancestors of each leaf: 1 for right, -1 for left, 0 for a split that is no ancestor.
SIDES = np.array([[-1, -1, 0], [-1, 1, 0], [1, 0, -1], [1, 0, 1]])


def network(params, x):
    """The outputs of the leaves of the paper's network: two ReLUs a split, and fixed weights of 0 and 1."""
    z = x @ params.weights.T + params.bias
    positive, negative = np.maximum(z, 0), np.maximum(-z, 0)
    return np.stack([positive @ (sides >= 0) + negative @ (sides <= 0) for sides in SIDES], axis=1)


@pytest.mark.parametrize("classes", sweeps.quick([3, 4], [3]))
@pytest.mark.parametrize("pooling", sweeps.quick(["max", "sum"], ["max"]))
def test_dtsemnet_is_the_papers_in_classification(pooling, classes, x64):
    method = dtsemnet(DEPTH, task=Classification(classes), pooling=pooling)
    params = initial(method, batch(CLASSES))

    def plain(params):
        leaves, pool = network(params, X), np.max if pooling == "max" else logsumexp
        pooled = [pool(leaves[:, k::classes], axis=1) for k in range(classes)]
        logits = np.stack(pooled, axis=1)
        return mean_loss(logsumexp(logits, 1) - logits[np.arange(N), CLASSES])

    check_loss(method, batch(CLASSES), plain, params)


@pytest.mark.parametrize("leaves", sweeps.quick(["constant", "linear"], ["linear"]))
def test_dtsemnet_is_the_papers_in_regression(leaves, x64):
    """The reached leaf, straight through a softmax over the two leaves with the top outputs."""
    method = dtsemnet(DEPTH, leaves=leaves)
    params = initial(method, batch(Y))
    if leaves == "linear":
        slopes = jnp.asarray(np.random.default_rng(5).normal(size=params.leaves.coefficients.shape))
        params = params.replace(leaves=params.leaves.replace(coefficients=slopes))

    def answers(leaves):  # of every leaf
        return leaves.values[None] if hasattr(leaves, "values") else X @ leaves.coefficients.T + leaves.intercept

    outputs = network(numpy(params), X)
    top = outputs >= np.sort(outputs, axis=1)[:, [-2]]
    share = lambda params: top * np.exp(network(params, X)) / (top * np.exp(network(params, X))).sum(1, keepdims=True)
    reached = np.eye(4)[outputs.argmax(1)]
    constant = answers(numpy(params).leaves)

    def plain(params):
        change = ((share(params) - share(start)) * constant).sum(1)
        return mean_loss(((reached * answers(params.leaves)).sum(1) + change - Y) ** 2)

    start = numpy(params)
    check_loss(method, batch(Y), plain, params)


def test_dtsemnet_hardens_to_fitted_leaves():
    rows = Batch(*(jnp.asarray(a, jnp.float32) for a in (X, Y)))
    params = initial(dtsemnet(1), rows)
    bound = float(jnp.abs(params.weights).max())
    assert 0.5 * P**-0.5 < bound <= P**-0.5
    tree = jax.jit(dtsemnet(1).harden)(params, rows)
    leaf = np.asarray(tree.leaf_index(X))
    np.testing.assert_allclose(tree.leaves.values, [Y[leaf == k].mean() for k in range(2)], rtol=1e-5)


@pytest.mark.slow
def test_the_recipe_of_dtsemnet():
    x = np.random.default_rng(0).normal(size=(300, 2)).astype(np.float32)
    y = np.where(x[:, 0] > 0, 2 + 3 * x[:, 1], -1 - x[:, 1])
    recipe = jtrees.DTSemNet(depth=1)
    constant, linear = (jtrees.fit(recipe.replace(leaves=kind), x, y, key=KEY) for kind in ("constant", "linear"))
    leaf = constant.tree.leaf_index(x)
    means = [y[leaf == k].mean(dtype=np.float64) for k in range(2)]
    np.testing.assert_allclose(constant.tree.leaves.values, means, rtol=1e-12)
    assert not linear.tree.leaves.is_constant and linear.loss < constant.loss / 2
    assert np.mean((linear.predict(x) - y) ** 2) == pytest.approx(linear.loss)
    classes: dict = {"key": KEY, "task": "classification"}
    recipe = jtrees.DTSemNet(depth=3, epochs=20)
    fits = [jtrees.fit(recipe.replace(pooling=pooling), x, y > 0, **classes) for pooling in ("max", "sum")]
    assert (np.asarray(fits[0].tree.weights) != np.asarray(fits[1].tree.weights)).any()


def test_bad_options_of_dtsemnet():
    x = np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32)
    linear = jtrees.DTSemNet(leaves="linear")
    with pytest.raises(ValueError, match='leaves must be "constant" in classification'):
        jtrees.fit(linear, x, x[:, 0] > 0, key=KEY, task="classification")
    with pytest.raises(ValueError, match="x and y must be in units in which linear leaves have slopes"):
        jtrees.fit(linear, 1e-20 * x, 1e20 * x[:, 0], key=KEY)
    with pytest.raises(ValueError, match="pooling must be one of 'max', 'sum', got 'mean'"):
        dtsemnet(1, pooling="mean")


def test_the_soft_decision_tree_is_the_papers(x64):
    """The expected loss over the leaves, and the penalty of each split: half for each level further down."""
    method = soft_decision_tree(DEPTH, balance=0.3)
    params = initial(method, batch(Y))
    params = params.replace(log_sharpness=jnp.asarray([0.3, -0.2, 0.5]))

    def plain(params):
        tree, beta = params.tree, np.exp(params.log_sharpness)
        right = 1 / (1 + np.exp(-beta * (X @ tree.weights.T + tree.bias)))
        reach = np.stack([np.ones(N), 1 - right[:, 0], right[:, 0]], axis=1)
        share = (WEIGHT[:, None] * reach * right).sum(0) / (WEIGHT[:, None] * reach).sum(0)
        penalty = -(np.log(share) + np.log(1 - share)) / 2
        sides = 1 - right[:, 1], right[:, 1], 1 - right[:, 2], right[:, 2]
        leaf = reach[:, [1, 1, 2, 2]] * np.stack(sides, axis=1)
        expected = (leaf * (tree.leaves.values - Y[:, None]) ** 2).sum(1)
        return mean_loss(expected) + 0.3 * (penalty * [1, 0.5, 0.5]).sum()

    check_loss(method, batch(Y), plain, params)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_penalty_is_finite_for_a_split_without_samples(depth):
    method, rows = soft_decision_tree(depth, balance=0.1), batch(Y.astype(np.float32))
    params = method.init(rows, key=KEY)
    params = params.replace(tree=params.tree.replace(bias=jnp.zeros(2**depth - 1).at[0].set(1e4)))  # all go right
    value, gradient = jax.jit(jax.value_and_grad(lambda p: method.loss(p, rows, key=KEY, step=0)[0]))(params)
    assert np.isfinite(value) and all(np.isfinite(a).all() for a in jax.tree.leaves(gradient))
