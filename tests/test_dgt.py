"""DGT: the chain, the method, the recipe and its door; PAT."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest

import jtrees
from jtrees.methods.dgt import in_units_of_their_size, random_chain
from jtrees.routing import path_sum

fit = partial(jtrees.fit_dgt, depth=3, epochs=30, batch_size=50, widths=(16, 16))


def key(seed=0):
    return jax.random.key(seed)


def chain(depth=3, p=4, widths=(7, 5), classes=None, seed=0):
    return random_chain(key(seed), depth, p, widths, classes, jnp.result_type(float))


# --- The chain -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("widths", [(), (6,), (7, 5)])
def test_splits_are_the_product_of_the_chain(x64, widths):
    params = chain(widths=widths)
    assert len(params.factors) == len(widths) + 1
    x = np.random.default_rng(0).normal(size=(20, 4))
    layer = np.column_stack([x, np.ones(20)]).T
    for factor in params.factors:
        layer = np.asarray(factor) @ layer
    tree = params.tree()
    np.testing.assert_allclose(tree.weights @ x.T + tree.bias[:, None], layer, atol=1e-12)  # float64, size one


def test_collapsing_in_either_order_has_the_gradient_of_the_layers(x64):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 20)))

    def by_layers(params):
        layer = jnp.concatenate([x, jnp.ones((1, 20))])
        for factor in params.factors:
            layer = factor @ layer
        return jnp.sin(layer).sum()

    def collapsed(params):
        return jnp.sin(params.collapsed() @ jnp.concatenate([x, jnp.ones((1, 20))])).sum()

    for widths in [(9, 2), (2, 9)]:  # cheapest from the right, cheapest from the left
        params = chain(widths=widths)
        expected, got = jax.grad(by_layers)(params), jax.grad(collapsed)(params)
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-10), got, expected)  # sums of 20 x 9 terms


# --- The method ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [None, 3])
def test_loss_is_that_of_the_hard_tree(x64, classes):
    rng = np.random.default_rng(1)
    x, params = jnp.asarray(rng.normal(size=(30, 4))), chain(classes=classes)
    y = jnp.asarray(rng.normal(size=30) if classes is None else rng.integers(0, 3, 30))
    method = jtrees.dgt(3, classes=classes, l1=0.1, l2=0.01)
    loss, score = method.loss(params, x, y, key=key(), step=jnp.int32(0))
    tree = params.tree()
    leaf = oracles.walk(np.asarray(tree.weights), np.asarray(tree.bias), np.asarray(x))
    answers = np.asarray(tree.leaves.values)[leaf]
    if classes is None:
        expected = np.mean((answers - np.asarray(y)) ** 2)
    else:
        odds = np.exp(answers)
        expected = -np.mean(np.log(odds[np.arange(30), np.asarray(y)] / odds.sum(1)))
        np.testing.assert_allclose(method.predict(params, x), odds / odds.sum(1, keepdims=True), rtol=1e-12)
    assert score == pytest.approx(expected, rel=1e-12)
    w = np.asarray(tree.weights)
    assert loss - score == pytest.approx(0.1 * np.abs(w).sum() + 0.01 * np.square(w).sum(), rel=1e-9)


def test_gradient_is_algorithm_2_through_the_loss(x64):
    rng = np.random.default_rng(2)
    x, y, params = jnp.asarray(rng.normal(size=(30, 4))), jnp.asarray(rng.normal(size=30)), chain(widths=())
    loss = jtrees.dgt(3, quantiser="sign").loss
    got = jax.grad(lambda params: loss(params, x, y, key=key(), step=jnp.int32(0))[0])(params)
    tree, with_one = params.tree(), jnp.column_stack([x, jnp.ones(30)])
    answers, pull_back = jax.vjp(path_sum, params.factors[0] @ with_one.T, tree.leaves.values)
    d_scores, d_values = pull_back(2 * (answers - y) / 30)
    np.testing.assert_allclose(got.factors[0], d_scores @ with_one, atol=1e-12)
    np.testing.assert_allclose(got.leaves.values, d_values, atol=1e-12)


def test_scaled_quantiser_does_not_mind_the_size_of_the_weights(x64):
    rng = np.random.default_rng(3)
    scores, values = jnp.asarray(rng.normal(size=(7, 30))), jnp.asarray(rng.normal(size=8))
    slope = jax.grad(lambda z: path_sum(in_units_of_their_size(z), values).sum())
    np.testing.assert_allclose(100 * slope(100 * scores), slope(scores), atol=1e-12)
    assert np.count_nonzero(slope(100 * scores)) > 0
    unscaled = jax.grad(lambda z: path_sum(z, values).sum())
    assert np.count_nonzero(unscaled(100 * scores)) < np.count_nonzero(slope(100 * scores)) / 5
    assert np.isfinite(slope(jnp.zeros((7, 30)))).all()


@pytest.mark.parametrize("name", ["huber", "absolute"])
def test_other_losses(x64, name):
    loss = {
        "huber": partial(optax.losses.huber_loss, delta=0.5),
        "absolute": lambda outputs, y: jnp.abs(outputs - y),
    }[name]
    rng = np.random.default_rng(4)
    x, y, params = jnp.asarray(rng.normal(size=(30, 4))), jnp.asarray(rng.normal(size=30)), chain()
    off = np.abs(np.asarray(params.tree().predict(x) - y))
    expected = {"absolute": off, "huber": np.where(off <= 0.5, off**2 / 2, 0.5 * (off - 0.25))}[name].mean()
    got = jtrees.dgt(3, loss=loss).loss(params, x, y, key=key(), step=jnp.int32(0))[1]
    assert got == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("quantiser", ["sign", "scaled"])
def test_weights_count_as_repetitions(x64, quantiser):
    rng = np.random.default_rng(5)
    x, y, params = jnp.asarray(rng.normal(size=(30, 4))), jnp.asarray(rng.normal(size=30)), chain()
    times = rng.integers(0, 4, 30)
    loss = jtrees.dgt(3, quantiser=quantiser).loss
    run = jax.value_and_grad(lambda p, x, y, **k: loss(p, x, y, key=key(), step=jnp.int32(0), **k)[0])
    value, gradient = run(params, x, y, sample_weight=jnp.asarray(times / times.mean()))
    repeated, same = run(params, jnp.repeat(x, times, axis=0), jnp.repeat(y, times))
    assert value == pytest.approx(float(repeated), rel=1e-12)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-12), gradient, same)


def test_trains_under_vmap_over_penalties(data):
    x, y = map(jnp.asarray, data)

    def run(seed, l2):
        method = jtrees.dgt(2, widths=(4,), l2=l2)
        return jtrees.train(method, x, y, key=jax.random.key(seed), optimizer=optax.sgd(0.05), steps=5, batch_size=20)

    seeds, penalties = jnp.arange(3), jnp.asarray([0.0, 0.1, 1.0])
    together = jax.vmap(run)(seeds, penalties)
    for i in range(3):
        alone = run(seeds[i], penalties[i])
        # float32: the order of sums differs, and five steps carry it on.
        np.testing.assert_allclose(together.losses[i], alone.losses, rtol=1e-4)


@pytest.mark.parametrize("classes", [None, 2])
def test_leaves_refitted_or_as_learnt(data, classes):
    x, y = data
    y = y if classes is None else (y > 0).astype(np.int32)
    params = random_chain(key(), 2, 3, (4,), classes, jnp.float32)
    learnt = jtrees.dgt(2, classes=classes).harden(params, x, y)
    refit = jtrees.dgt(2, classes=classes, leaves="refit").harden(params, x, y)
    np.testing.assert_array_equal(learnt.leaf_index(x), refit.leaf_index(x))
    leaf = np.asarray(learnt.leaf_index(x))
    if classes is None:
        np.testing.assert_array_equal(learnt.leaves.values, params.leaves.values)
    else:
        np.testing.assert_allclose(learnt.leaves.values, jax.nn.softmax(params.leaves.values, axis=1))
    if classes is None:
        expected = oracles.leaf_means(leaf, y, 4, (y.min() + y.max()) / 2)
    else:
        _, expected = oracles.class_frequencies(leaf, y, 4, classes, 1.0, np.ones(len(y)))
    np.testing.assert_allclose(refit.leaves.values, expected, rtol=1e-5)


# --- The recipe ------------------------------------------------------------------------------------------------------


def test_learns_better_than_chance_and_than_its_start(data):
    x, y = data
    result = fit(x, y, key=key())
    assert result.losses.shape == (30 * 4,)
    assert result.losses[-20:].mean() < result.losses[:20].mean() / 3
    # Four sign patterns of the signal and a linear third feature: a constant leaves 3.2, the best split 1.
    assert np.mean((result.tree.predict(x) - y) ** 2) < 0.7
    assert result.score == pytest.approx(np.mean((result.tree.predict(x) - y) ** 2) / np.ptp(y) ** 2, rel=1e-3)


def test_same_key_same_tree_and_no_compilation(data, count_compilations):
    x, y = data
    first = fit(x, y, key=key())
    assert count_compilations(lambda: fit(x, y, key=key(1), learning_rate=0.02, l1=1e-3).tree) == 0
    again, other = fit(x, y, key=key()), fit(x, y, key=key(1))
    assert np.array_equal(first.tree.weights, again.tree.weights)
    assert not np.array_equal(first.tree.weights, other.tree.weights)


def test_units_of_the_table_do_not_matter(data):
    x, y = data  # powers of two change no digit of a float32
    base, moved = fit(x, y, key=key()), fit(4 * x, 8 * y, key=key())
    np.testing.assert_array_equal(base.tree.leaf_index(x), moved.tree.leaf_index(4 * x))
    np.testing.assert_allclose(8 * base.tree.predict(x), moved.tree.predict(4 * x), rtol=1e-6)


def test_reached_nodes_are_counted_and_the_others_pruned(data):
    x, y = data
    result = fit(x, y, key=key(), depth=5)
    w, b = np.asarray(result.tree.weights), np.asarray(result.tree.bias)
    passed = set()
    for one in x:
        node = 0
        while node < len(b):
            passed.add(node)
            node = 2 * node + 1 + int(w[node] @ one + b[node] > 0)
    assert result.reached == len(passed) < 31
    pruned = result.tree.prune(x)
    assert pruned.splits.sum() <= result.reached
    np.testing.assert_array_equal(pruned.predict(x), result.tree.predict(x))


def test_validation_keeps_the_best_epoch(data):
    x, y = data
    held_out = x[150:], y[150:]
    result = fit(x[:150], y[:150], key=key(), validation=held_out)
    assert result.step % 3 == 0  # three mini-batches of 50 an epoch
    off = np.mean((result.tree.predict(held_out[0]) - held_out[1]) ** 2) / np.ptp(y[:150]) ** 2
    assert result.score == pytest.approx(off, rel=1e-3)  # scaled in float32, and back
    assert off <= np.mean((fit(x[:150], y[:150], key=key()).tree.predict(held_out[0]) - held_out[1]) ** 2) / np.ptp(
        y[:150]
    ) ** 2 * (1 + 1e-3)


def test_a_heavy_sample_counts_in_batches_of_one(x64):
    x, y, params = jnp.ones((1, 4)), jnp.ones(1), chain()
    loss = lambda weight: jtrees.dgt(3).loss(
        params, x, y, key=key(), step=jnp.int32(0), sample_weight=jnp.asarray([weight])
    )[0]
    assert loss(3.0) == pytest.approx(3 * float(loss(1.0)), rel=1e-12)


@pytest.mark.parametrize("task", ["regression", "classification"])
@pytest.mark.parametrize("validated", [False, True])
def test_score_is_that_of_the_refitted_tree(data, task, validated):
    x, y = data
    y = y if task == "regression" else np.digitize(y, [-1, 1])
    judge = (x[150:], y[150:]) if validated else (x[:150], y[:150])
    options = {"validation": judge} if validated else {}
    result = fit(x[:150], y[:150], key=key(), leaves="refit", task=task, epochs=10, **options)
    answers = result.tree.predict(judge[0])
    if task == "regression":
        expected = np.mean((answers - judge[1]) ** 2) / np.ptp(y[:150]) ** 2
    else:
        expected = -np.mean(np.log(answers[np.arange(len(answers)), judge[1]]))
    assert result.score == pytest.approx(expected, rel=1e-3)  # scaled in float32, and back


@pytest.mark.parametrize("cycles", [1, 3, 7])
def test_the_rate_falls_as_often_as_asked(data, cycles):
    x, y = data
    # With a single update a cycle the rate never falls: training goes on; and momentum and large batches work.
    result = fit(x, y, key=key(), epochs=7, batch_size=1000, cycles=cycles, momentum=0.5)
    assert result.losses.shape == (7,)
    assert np.isfinite(result.losses).all()


def test_rows_of_weight_zero_do_not_count(data):
    x, y = data
    weight = np.ones(200)
    weight[::4] = 0
    left_out = fit(x, y, key=key(), sample_weight=weight)
    without = fit(x[weight > 0], y[weight > 0], key=key(), sample_weight=np.ones(150))
    np.testing.assert_array_equal(left_out.tree.weights, without.tree.weights)


def test_digits():
    sklearn_data = pytest.importorskip("sklearn.datasets")
    x, y = sklearn_data.load_digits(return_X_y=True)
    train, test = slice(0, 1300), slice(1300, None)
    result = jtrees.fit_dgt(x[train], y[train], key=key(), depth=6, task="classification", epochs=40)
    answers = result.tree.predict(x[test].astype(np.float32))
    np.testing.assert_allclose(answers.sum(1), 1, rtol=1e-5)
    # A CART of any depth reaches 0.79 on these rows, a forest 0.92; this tree 0.90 with three keys, give or take 0.015.
    assert np.mean(answers.argmax(1) == y[test]) > 0.85


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 0}, "depth"),
        ({"widths": (0,)}, "widths"),
        ({"quantiser": "round"}, "quantiser must be one of 'sign', 'scaled', got 'round'"),
        ({"leaves": "mean"}, "leaves must be one of"),
        ({"epochs": 0}, "epochs"),
        ({"batch_size": 0}, "batch_size"),
        ({"cycles": 1000}, "cycles must be at most the number of updates, 120, got 1000"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"momentum": 1.0}, "momentum must be a number from 0 up to but not including 1, got 1.0"),
        ({"clip": -1.0}, "clip"),
        ({"l1": -1.0}, "l1"),
        ({"l2": -1.0}, "l2"),
        ({"loss": "squared"}, "loss must be a function"),
        ({"task": "ranking"}, "task"),
        ({"sample_weight": -np.ones(200)}, "sample_weight"),
        ({"validation": (np.zeros((5, 2), np.float32), np.zeros(5))}, "validation: x must have 3 columns"),
    ],
)
def test_bad_arguments_are_refused(data, options, message):
    with pytest.raises(ValueError, match=message):
        fit(*data, key=key(), **options)


def test_bad_labels_are_refused(data):
    x, y = data
    one_class, gap = np.zeros(200, int), np.where(y > 0, 2, 0)
    for labels, message in [(one_class, "at least two classes"), (gap, "no sample of class 1"), (y, "whole numbers")]:
        with pytest.raises(ValueError, match=message):
            fit(x, labels, key=key(), task="classification")
    with pytest.raises(ValueError, match="classes must be at least 2, got 1"):
        jtrees.dgt(2, classes=1)


def test_a_run_that_explodes_says_so(data):
    with pytest.raises(FloatingPointError, match="smaller learning_rate"):
        fit(*data, key=key(), learning_rate=1e30)


# --- PAT -------------------------------------------------------------------------------------------------------------


def test_pat_is_the_product_form(x64):
    rng = np.random.default_rng(6)
    x, y, params = rng.normal(size=(20, 4)), rng.normal(size=20), chain(widths=())
    method = jtrees.pat(3, 2.0)
    loss, score = method.loss(params, jnp.asarray(x), jnp.asarray(y), key=key(), step=jnp.int32(0))
    tree = params.tree()
    z = np.asarray(tree.weights) @ x.T + np.asarray(tree.bias)[:, None]
    reach = oracles.leaf_probabilities(oracles.sigmoid(2 * z))
    assert loss == pytest.approx(np.mean((np.asarray(tree.leaves.values) @ reach - y) ** 2), rel=1e-10)
    assert score == pytest.approx(np.mean((np.asarray(tree.predict(jnp.asarray(x))) - y) ** 2), rel=1e-10)


def test_pat_anneals_to_the_hard_tree(data):
    x, y = jnp.asarray(data[0]), jnp.asarray(data[1])
    method = jtrees.pat(2, optax.exponential_decay(1.0, 100, 1e4))  # a hundredfold every 50 steps
    params = random_chain(key(), 2, 3, (), None, jnp.float32)
    at = lambda step: method.loss(params, x, y, key=key(), step=jnp.int32(step))
    gap = [abs(float(at(step)[0] - at(step)[1])) for step in (0, 50, 100)]
    assert gap[0] > gap[1] > gap[2]
    assert gap[2] < 1e-2 * float(at(0)[1])


def test_pat_in_classification(data):
    x, y = jnp.asarray(data[0]), jnp.asarray((data[1] > 0).astype(np.int32))
    method = jtrees.pat(2, 5.0, classes=2)
    result = jtrees.train(method, x, y, key=key(), optimizer=optax.sgd(1.0), steps=100)
    assert result.losses[-1] < 0.7 * result.losses[0]
    tree = method.harden(result.params, x, y)
    assert jnp.mean(tree.predict(x).argmax(1) == y) > 0.85
    with pytest.raises(ValueError, match="slope"):
        jtrees.pat(2, 0.0)
