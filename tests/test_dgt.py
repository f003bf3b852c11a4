"""DGT: the chain, the method and the recipe. Its search: test_minibatch."""

from functools import partial
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from jtrees import losses
from jtrees.leaves import Values
from jtrees.methods.dgt import ChainedTree, random_chain
from jtrees.routing import path_sum
from jtrees.tasks import Classification, Regression
from tests import oracles

KEY = jax.random.key(0)
RECIPE = jtrees.DGT(depth=3, epochs=30, batch_size=50, widths=(16, 16))


def fit(x, y, *, recipe=RECIPE, seed=0, task="regression", validation=None, **changed):
    return jtrees.fit(recipe.replace(**changed), x, y, key=jax.random.key(seed), task=task, validation=validation)


def chain(depth=3, p=4, widths=(7, 5), outputs=(), classes=None, seed=0):
    rng = np.random.default_rng(seed)
    sizes = [p + 1, *widths, 2**depth - 1]
    factors = tuple(rng.normal(size=(b, a)) / np.sqrt(a) for a, b in itertools.pairwise(sizes))
    values = rng.normal(size=(2**depth, *outputs) if classes is None else (2**depth, classes))
    return ChainedTree(factors, Values(values) if classes is None else Values(values, losses.LogLoss()))


def task_of(outputs=(), classes=None):
    return Classification(classes) if classes else Regression(*outputs)


def samples(n=30, p=4, outputs=(), classes=None, seed=1):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, p))
    return x, rng.normal(size=(n, *outputs)) if classes is None else rng.integers(0, classes, n).astype(np.int32)


@pytest.mark.parametrize("widths", [(), (6,), (7, 5)])
def test_splits_are_the_product_of_the_chain(x64, widths):
    params = chain(widths=widths)
    assert len(params.factors) == len(widths) + 1
    x = np.random.default_rng(0).normal(size=(20, 4))
    layer = np.column_stack([x, np.ones(20)]).T
    for factor in params.factors:
        layer = np.asarray(factor) @ layer
    tree = params.tree()
    scores = np.asarray(tree.weights) @ x.T + np.asarray(tree.bias)[:, None]
    np.testing.assert_allclose(scores, layer, atol=1e-12)  # float64, size one


def test_collapsing_in_either_order_has_the_gradient_of_the_layers(x64):
    inputs = np.concatenate([np.random.default_rng(0).normal(size=(4, 20)), np.ones((1, 20))])

    def by_layers(params):
        layer = jnp.asarray(inputs)
        for factor in params.factors:
            layer = factor @ layer
        return jnp.sin(layer).sum()

    def collapsed(params):
        return jnp.sin(params.collapsed() @ inputs).sum()

    gradients = jax.jit(lambda params: (jax.grad(by_layers)(params), jax.grad(collapsed)(params)))
    for widths in [(9, 2), (2, 9)]:  # cheapest from the right, cheapest from the left
        expected, got = gradients(chain(widths=widths))
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-10), got, expected)  # sums of 20 x 9 terms


def test_a_random_chain_is_uniform():
    params = jax.jit(lambda: random_chain(KEY, 6, 24, (100,), (5,), jnp.float32))()
    first, last = map(np.asarray, params.factors)
    assert (first.shape, last.shape, params.leaves.values.shape) == ((100, 25), (63, 100), (64, 5))
    for part, low, high in [(first, -1 / 5, 1 / 5), (last, -1 / 10, 1 / 10), (np.asarray(params.leaves.values), 0, 1)]:
        assert low <= part.min() and part.max() <= high
        quarters = np.histogram(part, bins=4, range=(low, high))[0] / part.size
        np.testing.assert_allclose(quarters, 0.25, atol=5 * np.sqrt(3 / 16 / part.size))  # five standard deviations


@pytest.mark.parametrize(("outputs", "classes"), [((), None), ((2,), None), ((), 3)])
def test_loss_is_that_of_the_hard_tree(x64, outputs, classes):
    (x, y), params = samples(outputs=outputs, classes=classes), chain(outputs=outputs, classes=classes)
    method = jtrees.methods.dgt(3, task=task_of(outputs, classes), l1=0.1, l2=0.01)
    batch = jtrees.Batch(jnp.asarray(x), jnp.asarray(y))
    loss, score = jax.jit(lambda params: method.loss(params, batch, key=KEY, step=jnp.int32(0)))(params)
    tree = params.tree()
    predictions = np.asarray(params.leaves.values)[oracles.walk(tree.weights, tree.bias, x)]
    if classes is None:
        expected = np.mean((predictions - y) ** 2)
    else:
        odds = np.exp(predictions)
        expected = -np.mean(np.log(odds[np.arange(30), y] / odds.sum(1)))
    assert score == pytest.approx(expected, rel=1e-12)
    w = np.asarray(tree.weights)
    assert float(loss - score) == pytest.approx(0.1 * np.abs(w).sum() + 0.01 * np.square(w).sum(), rel=1e-9)


@pytest.mark.parametrize("window", ["unit", "mean"])
def test_gradient_is_algorithm_2_through_the_loss(x64, window):
    (x, y), params = samples(seed=2), chain(widths=())
    loss = jtrees.methods.dgt(3, window=window).loss
    batch = jtrees.Batch(*map(jnp.asarray, (x, y, np.ones(30))))
    got = jax.jit(jax.grad(lambda params: loss(params, batch, key=KEY, step=jnp.int32(0))[0]))(params)
    inputs = np.column_stack([x, np.ones(30)])
    scores = params.factors[0] @ inputs.T
    size = np.abs(scores).mean() if window == "mean" else 1.0
    square = jax.jit(jax.grad(lambda z, v: jnp.square(path_sum(z, v, size) - y).mean(), argnums=(0, 1)))
    d_scores, d_values = square(scores, params.leaves.values)
    np.testing.assert_allclose(got.factors[0], np.asarray(d_scores) @ inputs, atol=1e-12)
    np.testing.assert_allclose(got.leaves.values, d_values, atol=1e-12)


@pytest.mark.parametrize("classes", [None, 2])
def test_leaves_are_refitted_or_kept(data, classes):
    x, y = data
    y = y if classes is None else (y > 0).astype(np.int32)
    params = jax.tree.map(np.float32, chain(2, 3, (4,), classes=classes))
    methods = [jtrees.methods.dgt(2, task=task_of((), classes), refit=refit) for refit in (False, True)]
    harden = jax.jit(lambda params, batch: [method.harden(params, batch) for method in methods])
    learnt, refit = harden(params, jtrees.Batch(x, y))
    np.testing.assert_array_equal(learnt.leaf_index(x), refit.leaf_index(x))
    leaf = np.asarray(learnt.leaf_index(x))
    if classes is None:
        np.testing.assert_array_equal(learnt.leaves.values, params.leaves.values)
        expected = oracles.leaf_means(leaf, y, 4, (y.min() + y.max()) / 2)
    else:
        odds = np.exp(params.leaves.values)
        np.testing.assert_allclose(learnt.leaves.values, odds / odds.sum(1, keepdims=True), rtol=1e-5)
        _, expected = oracles.class_frequencies(leaf, y, 4, classes, np.ones(len(y)))
    np.testing.assert_allclose(refit.leaves.values, expected, rtol=1e-5)


def test_heavy_tails_do_not_ruin_it(data):
    x, y = data
    tails = np.sign(x) * np.abs(x) ** 4
    assert np.mean((fit(tails, y).predict(tails) - y) ** 2) < 1.5  # a constant leaves 3.2


@pytest.mark.parametrize("validated", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_several_targets_with_momentum_in_one_batch(data, validated):
    """And leaves refitted, in a tree so deep that some nodes are never reached."""
    recipe = jtrees.DGT(depth=5, epochs=60, batch_size=1000, cycles=7, momentum=0.5, widths=(), refit=True)
    x, y = data[0], np.stack([data[1], 100 * data[0][:, 1] - 7], axis=1)
    result = fit(x, y, recipe=recipe, validation=(x[:50], -y[:50]) if validated else None)
    assert (np.isfinite(result.history).all() and len(result.history) == 60) or validated
    predictions, leaf = result.tree.predict(x), result.tree.leaf_index(x)
    np.testing.assert_allclose(predictions, oracles.leaf_means(leaf, y, 32, 0.0)[leaf], rtol=1e-4, atol=1e-3)
    off = ((predictions - y) ** 2).mean(0)
    assert (off < 0.4 * y.var(0)).all() or validated
    off = ((predictions + y)[:50] ** 2).mean(0) if validated else off
    assert result.loss == pytest.approx(np.mean(off / np.ptp(y, axis=0) ** 2), rel=1e-3)
    assert len(np.unique(result.tree.decision_path(x)[:-1])) < 31 or validated


@pytest.mark.slow
def test_a_run_of_fewer_updates_than_the_default_has_cycles(data):
    x, y = (a[:60] for a in data)
    result, once = (
        fit(x, y, recipe=jtrees.DGT(depth=2, widths=(), epochs=2), **cycles) for cycles in ({}, {"cycles": 2})
    )
    assert len(result.history) == 2
    np.testing.assert_array_equal(result.model.predict(x), once.model.predict(x))


def test_bad_options_are_refused(data):
    with pytest.raises(ValueError, match="cycles must be at most the number of updates, 120, got 1000"):
        fit(*data, cycles=1000)
    with pytest.raises(ValueError, match="widths must give at most"):
        fit(*data, widths=(2**30,))
    widest = (2**31 - 1) // 4  # of three features and the intercept
    jtrees.DGT(depth=1, widths=(widest,)).check(Regression(), data[0].shape)
    with pytest.raises(ValueError, match="widths must give at most"):
        jtrees.DGT(depth=1, widths=(widest + 1,)).check(Regression(), data[0].shape)


@pytest.mark.slow
def test_no_momentum_is_a_momentum_of_zero(data):
    without, zero = (fit(*data, momentum=momentum).tree for momentum in (None, 0))
    np.testing.assert_allclose(zero.weights, without.weights, rtol=1e-5, atol=1e-7)
    assert not np.allclose(fit(*data, momentum=0.5).tree.weights, without.weights, rtol=1e-3)


def test_a_tree_is_evaluated_with_the_leaves_that_it_will_have(data):
    """With ``refit``, an evaluation fits the leaves to the training rows, as the end of the fit does."""
    rows = jtrees.Batch(jnp.asarray(data[0]), jnp.asarray(data[1]))
    train, evaluated = (jax.tree.map(lambda a, part=part: a[part], rows) for part in (slice(150), slice(150, None)))
    recipe = RECIPE.replace(refit=True)
    run = jtrees.search.Run(recipe, jtrees.Regression(), train, evaluated, KEY)
    params = jax.jit(lambda: recipe.method(run).init(train, key=KEY))()
    outputs = jax.jit(lambda params: params.tree().refit(*train).apply(evaluated.x))(params)
    loss = jax.jit(lambda params: recipe.evaluate(run, params))(params)
    assert float(loss) == pytest.approx(float(jnp.square(outputs - evaluated.y).mean()), rel=1e-5)
