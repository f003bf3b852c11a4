"""Non-greedy trees: the surrogate loss and its gradient, steps in the rows that are touched, CO2 and the recipe."""

from functools import cache, partial
from typing import Any

from hypothesis import given, strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.tree import DecisionTreeClassifier

import jtrees
from jtrees import Batch, leaves as kinds, losses
from jtrees.methods.nongreedy_tree.greedy import PUSHING, pushing_lengths
from jtrees.search.first_step import newton_steps
from jtrees.tables import checked_table
from jtrees.tasks import Classification, Regression
from tests import oracles, recipes, sweeps, tables
from tests.problems import problem_of, problem_of_table, run

pytestmark = pytest.mark.usefixtures("standard_promotion")

N, P, K = 60, 3, 3


def samples(seed=0, classes=True, dtype=np.float32):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(N, P)).astype(dtype)
    y = np.digitize(x[:, 0] + x[:, 1] * x[:, 2], [-0.5, 0.5]) if classes else (x[:, 0] * x[:, 1]).astype(dtype)
    return Batch(jnp.asarray(x), jnp.asarray(y, jnp.int32 if classes else dtype))


def tree(depth, seed=0, classes=True, dtype=np.float32, size=1.0):
    rng = np.random.default_rng([depth, seed])
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    leaves = kinds.Values(draw(2**depth, K), losses.LogLoss()) if classes else kinds.Values(draw(2**depth))
    return jtrees.ObliqueTree(size * draw(2**depth - 1, P), size * draw(2**depth - 1), leaves)


def method_of(depth, inference, classes, nu=1e6, **changed):
    task = Classification(K) if classes else Regression()
    return jtrees.methods.nongreedy(depth, nu, task=task, inference=inference, **changed)


@cache
def losses_of(depth, inference, classes=True):
    method = method_of(depth, inference, classes)
    return jax.jit(lambda params, batch: method.loss(params, batch, key=None, step=0))


@given(seed=st.integers(0, 10**6), size=st.floats(0.01, 30))
@pytest.mark.parametrize("classes", sweeps.quick([True, False], [True]))
def test_exact_surrogate_is_above_fast_one_is_above_loss(classes, seed, size):
    params, batch = tree(3, seed, classes, size=size), samples(seed, classes)
    exact, loss = losses_of(3, "exact", classes)(params, batch)
    fast, also = losses_of(3, "fast", classes)(params, batch)
    leaf = oracles.walk(params.weights, params.bias, batch.x)
    each = np.asarray(params.leaves.losses(None, batch.y), np.float64)[leaf, np.arange(N)]
    np.testing.assert_allclose((loss, also), each.mean(), rtol=1e-4)
    slack = 1e-5 * float(exact)  # float32
    assert exact >= fast - slack and fast >= loss - slack
    assigned = batch._replace(y=(batch.y, jnp.asarray(np.random.default_rng(seed).integers(0, 8, N), jnp.int32)))
    for kind, plain in (("exact", exact), ("fast", fast)):
        assert losses_of(3, kind, classes)(params, assigned)[0] >= plain - slack
        reached = batch._replace(y=(batch.y, jnp.asarray(leaf, jnp.int32)))  # the leaves that they reach
        np.testing.assert_allclose(losses_of(3, kind, classes)(params, reached), (plain, loss), rtol=1e-5)


@pytest.mark.parametrize("kind", ["exact", "fast"])
@pytest.mark.parametrize("classes", [True, False])
@pytest.mark.parametrize("stable", [True, False])
def test_gradients_are_finite_differences(x64, kind, classes, stable):
    params, batch = tree(3, 1, classes, np.float64), samples(1, classes, np.float64)
    batch = batch._replace(weight=jnp.asarray(np.linspace(0.5, 1.5, N)))
    if stable:
        batch = batch._replace(y=(batch.y, jnp.asarray(np.arange(N) % 8)))
    method = method_of(3, kind, classes)
    pair = jax.jit(jax.value_and_grad(lambda params: method.loss(params, batch, key=None, step=0)[0]))
    slopes, step = pair(params)[1], 1e-6
    for get, put in [
        (lambda t: t.weights, lambda t, a: t.replace(weights=a)),
        (lambda t: t.bias, lambda t, a: t.replace(bias=a)),
        (lambda t: t.leaves.values, lambda t, a: t.replace(leaves=t.leaves.replace(values=a))),
    ]:
        direction = jnp.asarray(np.random.default_rng(2).normal(size=get(params).shape))
        up, down = (pair(put(params, get(params) + sign * step * direction))[0] for sign in (1, -1))
        # The surrogate is piecewise linear in the splits: no sample changes its piece within so small a step.
        assert float((up - down) / (2 * step)) == pytest.approx(float((get(slopes) * direction).sum()), rel=1e-5)


def test_the_gradient_is_g_minus_h_times_x(x64):
    params, batch = tree(2, 3, dtype=np.float64), samples(3, dtype=np.float64)
    method = method_of(2, "exact", True)
    slopes = jax.jit(jax.grad(lambda params: method.loss(params, batch, key=None, step=0)[0]))(params)
    expected = np.zeros((3, P))
    for x, y in zip(np.asarray(batch.x), np.asarray(batch.y), strict=True):
        z = np.asarray(params.weights) @ x + np.asarray(params.bias)
        losses = -np.asarray(jax.nn.log_softmax(params.leaves.values))[:, y]
        values = [losses[leaf] - 2 * v for leaf, v in enumerate(oracles.path_violations(z))]
        for node, right in oracles.path_to(int(np.argmax(values)), 2):
            expected[node] += ((1 if right else -1) - (1 if z[node] > 0 else -1)) * x / N
    np.testing.assert_allclose(slopes.weights, expected, atol=1e-12)


@pytest.mark.parametrize("depth", sweeps.quick([3, 7], [7]))  # steps in everything, and in rows that few samples touch
@pytest.mark.parametrize(("inference", "classes", "stable"), [("fast", True, True), ("exact", False, False)])
def test_steps_are_those_of_automatic_differentiation(x64, depth, inference, classes, stable):
    nu, rate, momentum = 0.7, 0.5, 0.8
    data, params = samples(0, classes, np.float64), tree(depth, 0, classes, np.float64, size=0.3)
    data = data._replace(weight=jnp.asarray(np.linspace(0, 2, N)))
    if stable:
        data = data._replace(y=(data.y, jnp.asarray(np.arange(N) % 2**depth, jnp.int32)))
    optimizer = jtrees.training.lazy_momentum(rate, momentum)
    options: Any = {"data": data, "optimizer": optimizer, "steps": 10, "batch_size": 5}
    trained = []
    for steps in ({}, {"learning_rate": rate, "momentum": momentum}):
        method = method_of(depth, inference, classes, nu, **steps)
        run = jtrees.training.start(method, data, params=params, key=jax.random.key(0), optimizer=optimizer)
        run, history = jax.jit(partial(jtrees.training.advance, method, **options))(run)
        trained.append((run.params, history.losses))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), *trained)
    norms = np.square(trained[0][0].weights).sum(1) + np.square(trained[0][0].bias)
    assert norms.max() <= nu * (1 + 1e-9) and np.sum(norms > 0.99 * nu) > 0


@pytest.mark.slow
def test_steps_of_a_deep_tree_copy_nothing_of_its_size():
    p, data = 60, Batch(jnp.zeros((64, 60)), jnp.zeros(64, jnp.int32))
    method = jtrees.methods.nongreedy(14, task=Classification(2), learning_rate=0.1)
    optimizer = jtrees.training.lazy_momentum(0.1)
    total = lambda params: params.weights.sum() + params.bias.sum()
    settings = {"score_every": 5, "score": total, "batch_size": 16}
    run = lambda state: jtrees.training.advance(method, state, data, optimizer=optimizer, steps=10, **settings)[0]
    state = jax.eval_shape(lambda: jtrees.training.start(method, data, key=jax.random.key(0), optimizer=optimizer))
    memory = jax.jit(run, donate_argnums=0).lower(state).compile().memory_analysis()
    splits = 4 * p * 2**14
    assert memory.alias_size_in_bytes > 3 * splits  # parameters, velocity, the best
    assert memory.temp_size_in_bytes < 0.1 * splits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 21}, "depth must be from 1 to 20, got 21"),
        ({"momentum": 1.0}, "momentum must be a finite number of at least 0"),
        ({"inference": "slow"}, "inference must be"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        jtrees.methods.nongreedy(**{"depth": 3, **options})


SMALL = {"depth": 3, "batch_size": 100, "precondition": 0.0}  # trials of strengths: test_precondition
GREEDY = jtrees.CO2(**SMALL, epochs=10)
JOINT = jtrees.NonGreedy(**SMALL, greedy_epochs=10, epochs=30)


@cache
def table(seed=0, n=1000):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 4)).astype(np.float32)
    return x, (x[:, 0] + x[:, 1] > 0).astype(int) + ((x[:, 2] - x[:, 1] > 0.5) & (x[:, 0] + x[:, 1] > 0))


def fit(recipe, x, y, *, seed=0, task="classification", **options):
    return jtrees.fit(recipe, x, y, key=jax.random.key(seed), task=task, **options)


def accuracy(model, x, y):
    return np.mean(model.predict(x).argmax(1) == y)


@pytest.mark.wide
def test_greedy_and_joint_trees_find_oblique_splits():
    (x, y), test = table(), table(1)
    cart = DecisionTreeClassifier(max_depth=3, criterion="entropy", random_state=0).fit(x, y).score(*test)
    greedy, joint = (fit(recipe, x, y) for recipe in (GREEDY, JOINT))
    assert accuracy(greedy.model, *test) > cart + 0.03 and accuracy(joint.model, *test) > cart + 0.05
    np.testing.assert_array_equal(joint.history[: len(greedy.history)], greedy.history)  # which it starts with
    assert joint.step == len(joint.history) == len(greedy.history) + 300
    trees = (fit(JOINT.replace(depth=5, stable=False, nu=nu), x, y).tree for nu in (0.01, 100.0))
    small, large = (len(np.unique(tree.leaf_index(x))) for tree in trees)
    assert small < large  # a small ball prunes


@pytest.mark.slow
@pytest.mark.parametrize("learning_rate", [1e-6, 1e4])  # splits that hardly move, and useless splits
def test_a_level_keeps_its_axis_aligned_splits_unless_it_betters_them(learning_rate):
    x = np.round(2 * table()[0]) / 2  # few values: every threshold is the edge of a bin
    y = (x[:, 0] > 0.5).astype(int) + (x[:, 1] > 0) * (x[:, 0] <= 0.5)
    cart = DecisionTreeClassifier(max_depth=2, criterion="entropy", random_state=0).fit(x, y)
    result = fit(GREEDY.replace(depth=2, learning_rate=learning_rate, nu=1.0), x, y)
    assert accuracy(result.model, x, y) == cart.score(x, y) == 1.0
    splits = result.tree.weights[result.tree.splits]
    assert np.abs(splits).max(1).tolist() == pytest.approx(np.abs(splits).sum(1).tolist(), rel=1e-2)


@pytest.mark.slow
def test_validation_chooses_among_the_passes_and_the_greedy_tree():
    """With steps so large that the greedy tree is the best on the training rows."""
    x, y = table()
    x_new, y_new = table(2, 300)
    steep = {"learning_rate": 300.0, "momentum": 0.0, "ridge": False}
    wild, greedy = JOINT.replace(**steep), fit(GREEDY.replace(**steep), x, y)
    result, last = fit(wild, x, y, validation=(x_new, y_new)), fit(wild, x, y)
    assert last.loss == pytest.approx(greedy.loss, rel=1e-6) and last.step == len(greedy.history)
    np.testing.assert_array_equal(last.model.predict(x), greedy.model.predict(x))
    log_loss = lambda fit: -np.log(fit.model.predict(x_new)[np.arange(300), y_new]).mean()
    assert result.loss == pytest.approx(log_loss(result), rel=1e-5) and result.loss <= log_loss(last) + 1e-6
    assert result.step >= 300 and (result.step - 300) % 10 == 0


@pytest.mark.parametrize("loss", [losses.Poisson(), losses.Gamma(), losses.Tweedie(1.5)], ids=str)
def test_first_newton_steps_of_validation_rows_are_those_of_training_rows(loss):
    y = np.exp(tables.X[:, 0] / 8)
    table = checked_table(tables.X, y, tables.WEIGHTS, Regression(loss_function=loss))
    problem = problem_of_table(recipes.CO2, table, validation=table)
    steps = run(newton_steps(problem), engine=problem.engine)[0]
    jax.tree.map(np.testing.assert_array_equal, steps.evaluation, steps.batch)
    assert (steps.batch.y.min(), steps.batch.y.max()) == (0, 1)
    assert np.ptp(steps.batch.weight[:400] / tables.WEIGHTS) > 0.1 or isinstance(loss, losses.Poisson)


def test_levels_count_the_updates_of_earlier_levels(capsys):
    jtrees.fit(recipes.CO2.replace(precondition=0), tables.X, tables.Y, key=jax.random.key(0), progress=True)
    shown = capsys.readouterr().out
    assert "CO2, level 0: 16 of 16" in shown and "CO2, level 1: 32 of 32" in shown  # 4 epochs of 4 mini-batches


@pytest.mark.parametrize("outputs", [None, 2])
def test_newton_steps_of_equal_targets_are_0(outputs):
    """As they may be in a bootstrap sample."""
    task = Regression(outputs, losses.Poisson())
    rows = Batch(jnp.asarray(tables.X, jnp.float32), jnp.full((400, *task.shape), 3.0), jnp.ones(400))
    problem = problem_of(recipes.CO2, rows, task=task)
    steps = run(newton_steps(problem), engine=problem.engine)[0]
    np.testing.assert_array_equal(steps.batch.y, np.zeros((400, *task.shape)))
    assert steps.task == Regression(outputs)


@pytest.mark.parametrize("task", sweeps.quick(["regression", "classification"], ["regression"]))
def test_initial_splits_are_also_of_a_ridge_regression_and_of_discriminants(task):
    """Steps too small to move them. Two features are nearly equal, and their difference decides."""
    x, _ = table()
    x = np.column_stack([x[:, 0], x[:, 0] + 0.01 * x[:, 1]])
    fixed = GREEDY.replace(learning_rate=1e-9, depth=1)
    difference = x[:, 0] - x[:, 1]
    y = difference if task == "regression" else np.digitize(difference, [-0.005, 0.005])
    ridge_fit, axis_aligned = (fit(fixed.replace(ridge=ridge), x, y, task=task) for ridge in (True, False))
    weights = np.asarray(ridge_fit.model.weights)[0]
    assert weights[0] == pytest.approx(-weights[1], rel=0.02)
    assert np.count_nonzero(axis_aligned.model.weights) == 1
    assert ridge_fit.loss < 0.8 * axis_aligned.loss


@pytest.mark.parametrize("weighted", [False, True])
def test_splits_start_at_the_length_at_which_a_part_of_their_samples_push(weighted):
    rng = np.random.default_rng(0)
    score, node = np.abs(rng.normal(size=60)), rng.integers(0, 4, 60)
    node[node == 3] = 2  # node 3 has no samples
    suits, weight = rng.normal(size=60), rng.integers(0, 3, 60) if weighted else np.ones(60, int)
    suits[node == 1] = -1  # and node 1 none that is suited
    lengths = jax.jit(pushing_lengths, static_argnums=4)(score, suits, weight * 1.0, node, 4)
    for split in (0, 2):
        rows = np.repeat(np.arange(60), weight)  # a weight is a repetition
        rows = rows[(node[rows] == split) & (suits[rows] > 0)]
        pushing = lambda length, rows=rows: np.mean(2 * length * score[rows] < suits[rows])
        longest = lengths[split] / 0.999  # at which the last of them would push
        assert pushing(longest * 1.0001) <= PUSHING < pushing(longest * 0.9999) + 1 / len(rows) + 1e-9
    assert np.isinf(lengths[1]) and np.isinf(lengths[3])


@pytest.mark.slow
def test_a_split_of_features_of_two_values_gets_away_from_the_axis():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 2000)
    x = np.where(rng.random((2000, 15)) < 0.7, y[:, None], 1 - y[:, None]).astype(np.float32)
    fit = jtrees.fit(jtrees.CO2(depth=1), x, y, key=jax.random.key(0), task="classification")
    single, all_ = x[:, 0] == y, (x.mean(1) > 0.5) == y
    right = np.mean(fit.model.predict(x).argmax(1) == y)
    assert single.mean() < 0.75 and right > all_.mean() - 0.03  # the best that a split can do, but for sampling
