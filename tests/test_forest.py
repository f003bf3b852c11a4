"""Bagging: a forest is its trees."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jtrees

fit = partial(jtrees.fit_dgt_forest, depth=2, trees=5, epochs=20, batch_size=40, widths=(8,), key=jax.random.key(0))


def tree_of(forest, i):
    return jax.tree.map(lambda a: a[i], forest.trees)


def trained(data, method=None, **options):
    x, y = map(jnp.asarray, data)
    method = jtrees.dgt(2, widths=(4,)) if method is None else method
    options = {"trees": 3, "steps": 4, "batch_size": 20, "optimizer": optax.sgd(0.1)} | options
    return jtrees.train_forest(method, x, y, key=jax.random.key(0), **options)


def test_mean_of_its_trees(data):
    x, y = data
    forest = fit(x, y).forest
    assert forest.num_trees == 5
    alone = np.stack([tree_of(forest, i).predict(x) for i in range(5)])
    assert np.ptp(alone, axis=0).max() > 0
    np.testing.assert_allclose(forest.predict(x), alone.mean(0), rtol=1e-5)  # a float32 mean of five
    np.testing.assert_allclose(forest.predict(jnp.asarray(x)), forest.predict(x), rtol=1e-6)
    np.testing.assert_allclose(forest.predict(x[:7]), forest.predict(x)[:7], rtol=1e-6)


def test_votes_of_its_trees(data):
    x, y = data
    labels = np.digitize(y, [-1, 1])
    result = fit(x, labels, task="classification", epochs=5)
    alone = np.stack([tree_of(result.forest, i).predict(x).argmax(1) for i in range(5)])
    shares = np.stack([(alone == k).mean(0) for k in range(3)], axis=1)
    np.testing.assert_allclose(result.forest.predict(x), shares, atol=1e-6)
    assert result.forest.vote


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_out_of_bag_asks_only_trees_that_did_not_see_the_row(data, task):
    x, y = data
    y = y if task == "regression" else np.digitize(y, [0])
    result = fit(x, y, task=task, fraction=0.7)
    assert result.in_bag.shape == (5, 200)
    assert (result.in_bag.sum(1) == 140).all()
    outputs = np.stack([tree_of(result.forest, i).predict(x) for i in range(5)])
    if task == "classification":
        outputs = np.eye(2)[outputs.argmax(-1)]
    rows, off = [], []
    for i in range(200):
        unseen = [t for t in range(5) if result.in_bag[t, i] == 0]
        if unseen:
            mean = outputs[unseen, i].mean(0)
            np.testing.assert_allclose(result.out_of_bag[i], mean, rtol=1e-4, atol=1e-5)
            rows.append(i)
            off.append((mean - y[i]) ** 2 if task == "regression" else mean.argmax() == y[i])
        else:
            assert np.isnan(result.out_of_bag[i]).all()
    expected = 1 - np.mean(off) / np.var(y[rows]) if task == "regression" else np.mean(off)
    assert result.out_of_bag_score == pytest.approx(expected, rel=1e-4)


def test_better_than_its_trees_on_new_rows():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(1000, 3)).astype(np.float32)
    y = (np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.5 * rng.normal(size=1000)).astype(np.float32)
    forest = fit(x[:500], y[:500], depth=4, trees=10, epochs=40).forest
    off = lambda answers: np.mean((answers - y[500:]) ** 2)
    alone = [off(tree_of(forest, i).predict(x[500:])) for i in range(10)]
    assert off(forest.predict(x[500:])) < min(alone)


def test_each_tree_is_trained_on_its_sample(data):
    x, y = map(jnp.asarray, data)
    result = trained(data, fraction=0.5)
    tree_keys = jax.random.split(jax.random.key(0), 3)
    method = jtrees.dgt(2, widths=(4,))
    for i in range(3):
        draw, train_key = jax.random.split(tree_keys[i])
        drawn = jax.random.randint(draw, (100,), 0, 200)
        alone = jtrees.train(
            method, x[drawn], y[drawn], key=train_key, optimizer=optax.sgd(0.1), steps=4, batch_size=20
        )
        # Two trees side by side add in another order than one.
        np.testing.assert_allclose(result.losses[i], alone.losses, rtol=1e-4)
        np.testing.assert_array_equal(result.in_bag[i], np.bincount(np.asarray(drawn), minlength=200))
    assert result.finite.all()


def test_bags_other_methods(data, standard_promotion):
    result = trained(data, jtrees.get(2, 10.0), optimizer=optax.adam(0.05), batch_size=None, steps=30)
    off = jnp.mean(jnp.square(result.forest.predict(jnp.asarray(data[0])) - data[1]))
    assert off < 0.6 * np.var(data[1])


def test_same_key_same_forest_and_no_compilation(data, count_compilations):
    x, y = data
    first = fit(x, y)
    assert count_compilations(lambda: fit(x, y, learning_rate=0.02).forest) == 0
    assert np.array_equal(first.forest.trees.weights, fit(x, y).forest.trees.weights)
    assert not np.array_equal(first.forest.trees.weights[0], first.forest.trees.weights[1])


def test_bad_arguments_are_refused(data):
    for options, message in [
        ({"trees": 0}, "trees"),
        ({"fraction": 0.0}, "fraction must be above 0 and at most 1, got 0.0"),
        ({"fraction": 1.5}, "fraction"),
        ({"combine": "median"}, 'combine must be "mean" or "vote"'),
    ]:
        with pytest.raises(ValueError, match=message):
            trained(data, **options)
    with pytest.raises(ValueError, match='combine must be "mean" for trees that answer one number'):
        trained(data, combine="vote")
    with pytest.raises(ValueError, match=r"x must have shape \(n, p\) and y \(n, ...\)"):
        trained((data[0], data[1][:100]))
    with pytest.raises(ValueError, match="fraction"):
        fit(*data, fraction=-1.0)
    forest = fit(*data).forest
    with pytest.raises(ValueError, match="x must have 3 columns, got 2"):
        forest.predict(data[0][:, :2])
    bad = data[0].copy()
    bad[3, 1] = np.nan
    with pytest.raises(ValueError, match="x must be finite"):
        forest.predict(bad)
