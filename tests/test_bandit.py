"""Bandit feedback: estimators, streams, resuming, and the door."""

from functools import partial

from flax import serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jtrees
from jtrees.methods.dgt import in_units_of_their_size, random_chain
from jtrees.routing import path_sum

P, K = 4, 3


def key(seed=0):
    return jax.random.key(seed)


def classifier(**options):
    return jtrees.bandit_classifier(2, K, **options)


def regressor(feedback="two-point", **options):
    return jtrees.bandit_regressor(2, feedback=feedback, **options)


def contexts(n=200, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(n, P)), jnp.float32)


def answer(params, x):
    """What a tree answers for one context, with DGT's gradient."""
    scores = params.weights @ x + params.bias
    return path_sum(in_units_of_their_size(scores)[:, None], params.leaves.values)[0]


def gradient_of_one_round(learner, state, x, action, propensity, loss):
    return learner.update(state, x, action, propensity, loss).gradient


# --- Estimators ------------------------------------------------------------------------------------------------------


def test_play_is_epsilon_greedy():
    learner = classifier(exploration=0.6)
    state, x = learner.init(P, key=key()), contexts()[0]
    best = int(np.argmax(learner.predict(state.params, x[None])[0]))
    n = 20_000
    actions, propensities = jax.vmap(lambda k: learner.act(state, x, key=k))(jax.random.split(key(1), n))
    expected = np.full(K, 0.6 / K) + 0.4 * (np.arange(K) == best)
    np.testing.assert_allclose(propensities, expected[np.asarray(actions)], rtol=1e-6)
    # Four standard deviations of a frequency over 20 000 draws are at most 0.015.
    np.testing.assert_allclose(np.bincount(np.asarray(actions), minlength=K) / n, expected, atol=0.015)


def test_discrete_estimate_is_unbiased():
    learner = classifier(exploration=0.6, accumulate=10)
    state, x, losses = learner.init(P, key=key()), contexts()[0], jnp.asarray([1.0, 0.0, 0.3])

    def squared_distance(params):  # of the sigmoid of each score to what the loss says it should be
        return jnp.square(jax.nn.sigmoid(answer(params, x)) - (1 - losses)).sum()

    expected = jax.grad(squared_distance)(state.params)

    def one(k):
        action, propensity = learner.act(state, x, key=k)
        return gradient_of_one_round(learner, state, x, action, propensity, losses[action])

    drawn = jax.vmap(one)(jax.random.split(key(1), 20_000))

    def check(draws, mean):
        off = 4.5 * np.std(draws, axis=0) / np.sqrt(len(draws)) + 1e-6  # 4.5 standard errors over some 30 numbers
        assert (np.abs(np.mean(draws, axis=0) - mean) <= off).all()

    jax.tree.map(check, drawn, expected)
    assert np.abs(expected.weights).max() > 1e-3


@pytest.mark.parametrize("delta", [0.1, 0.5, 1.0])
def test_one_point_estimate_is_unbiased_on_a_quadratic(delta):
    learner = regressor("one-point", delta=delta, accumulate=10)
    state, x = learner.init(P, key=key()), contexts()[0]
    loss = lambda a: 2 * jnp.square(a - 0.2) + 0.1
    expected = jax.grad(lambda params: loss(answer(params, x)))(state.params)

    def one(k):
        action, propensity = learner.act(state, x, key=k)
        return action, propensity, gradient_of_one_round(learner, state, x, action, propensity, loss(action))

    actions, propensities, drawn = jax.vmap(one)(jax.random.split(key(1), 20_000))
    prediction = learner.predict(state.params, x[None])[0]
    np.testing.assert_allclose(np.abs(actions - prediction), delta, rtol=1e-4)
    assert (propensities == 0.5).all()
    assert abs(np.mean(actions > prediction) - 0.5) < 0.015  # four standard deviations

    def check(draws, mean):
        off = 4.5 * np.std(draws, axis=0) / np.sqrt(len(draws)) + 1e-6
        assert (np.abs(np.mean(draws, axis=0) - mean) <= off).all()

    jax.tree.map(check, drawn, expected)


@pytest.mark.parametrize("delta", [0.01, 0.5])
def test_two_points_are_exact_on_a_quadratic(x64, delta):
    learner = regressor(delta=delta, accumulate=10)
    state, x = learner.init(P, key=key()), jnp.asarray(contexts()[0], jnp.float64)
    loss = lambda a: 2 * jnp.square(a - 0.2) + 0.1
    expected = jax.grad(lambda params: loss(answer(params, x)))(state.params)
    action, propensity = learner.act(state, x, key=key(1))
    assert propensity == 1
    got = gradient_of_one_round(learner, state, x, action, propensity, loss(action))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-12), got, expected)


# --- The learner -----------------------------------------------------------------------------------------------------


def test_gradients_wait_for_four_rounds_and_are_averaged():
    learner = regressor(optimizer=optax.sgd(1.0))
    state = start = learner.init(P, key=key())
    total = jax.tree.map(jnp.zeros_like, state.params)
    for i, x in enumerate(contexts(4)):
        action, propensity = learner.act(state, x, key=key(i))
        loss = jnp.square(action - 0.3)
        slope = jax.grad(lambda params, x=x: jnp.square(answer(params, x) - 0.3))(start.params)
        total = jax.tree.map(jnp.add, total, slope)
        state = learner.update(state, x, action, propensity, loss)
        assert np.array_equal(state.params.weights, start.params.weights) == (i < 3)
    moved = jax.tree.map(lambda a, g: a - g / 4, start.params, total)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), state.params, moved)  # float32
    assert state.rounds == 4
    assert all((np.asarray(g) == 0).all() for g in jax.tree.leaves(state.gradient))


@pytest.mark.parametrize("kind", ["classifier", "one-point", "two-point", "linear"])
def test_a_stream_is_the_rounds_one_by_one(kind):
    learner = {"classifier": classifier(), "linear": jtrees.bandit_classifier(0, K)}.get(kind) or regressor(kind)
    x, targets = contexts(23), jnp.asarray(np.random.default_rng(1).integers(0, K, 23))
    discrete = kind in ("classifier", "linear")
    loss_fn = lambda i, a: (
        (a != targets[i]).astype(jnp.float32) if discrete else jnp.abs(a - targets[i].astype(jnp.float32))
    )
    run = jtrees.run_bandit(
        learner, x, loss_fn, key=key(), score=lambda params: learner.predict(params, x).sum(), score_every=5
    )
    init_key, play_key = jax.random.split(key())
    state, lost = learner.init(P, key=init_key), []
    act, update = jax.jit(lambda state, x, key: learner.act(state, x, key=key)), jax.jit(learner.update)
    for i in range(23):
        action, propensity = act(state, x[i], jax.random.fold_in(play_key, i))
        loss = jnp.asarray([loss_fn(i, a) for a in action]) if action.ndim else loss_fn(i, action)
        state = update(state, x[i], action, propensity, loss)
        np.testing.assert_allclose(run.actions[i], action, rtol=1e-4)
        np.testing.assert_allclose(run.propensities[i], propensity, rtol=1e-5)
        lost.append(float(jnp.mean(loss)))
        if i % 5 == 4:
            np.testing.assert_allclose(run.scores[i // 5], learner.predict(state.params, x).sum(), rtol=1e-3)
    # Compiled as a whole and round by round, float32 rounds differently, and 23 rounds carry it on.
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), run.state, state)
    np.testing.assert_allclose(run.losses, lost, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(run.cumulative_loss, np.cumsum(lost), rtol=1e-4)
    assert run.queries.tolist() == [5, 10, 15, 20]
    assert run.scores.shape == (4,)


def test_regret_is_against_the_best():
    x = contexts(10)
    best = jnp.linspace(0, 0.9, 10)
    run = jtrees.run_bandit(classifier(), x, lambda i, a: jnp.where(a == 1, best[i], 1.0), key=key(), best_losses=best)
    expected = np.cumsum(np.where(np.asarray(run.actions) == 1, 0, 1 - np.asarray(best)))
    np.testing.assert_allclose(run.regret, expected, atol=1e-5)
    assert run.queries.size == run.scores.size == 0


@pytest.mark.parametrize("cut", [1, 6, 8])
def test_goes_on_exactly_after_a_save_and_a_load(cut):
    learner, x = classifier(), contexts(20)
    targets = jnp.asarray(np.random.default_rng(1).integers(0, K, 20))
    loss_of = lambda y: lambda i, a: (a != y[i]).astype(jnp.float32)
    whole = jtrees.run_bandit(learner, x, loss_of(targets), key=key())
    first = jtrees.run_bandit(learner, x[:cut], loss_of(targets[:cut]), key=key())
    empty = learner.init(P, key=key(5))
    loaded = serialization.from_bytes(empty, serialization.to_bytes(first.state))
    second = jtrees.run_bandit(learner, x[cut:], loss_of(targets[cut:]), key=key(), state=loaded)
    np.testing.assert_array_equal(jnp.concatenate([first.actions, second.actions]), whole.actions)
    jax.tree.map(np.testing.assert_array_equal, second.state, whole.state)


def test_vmap_over_seeds_and_rates():
    x = contexts(40)
    targets = (x[:, 0] > 0).astype(jnp.int32)

    def run(seed, rate, exploration):
        learner = classifier(optimizer=jtrees.two_rates(rate, 10 * rate), exploration=exploration)
        return jtrees.run_bandit(
            learner, x, lambda i, a: (a != targets[i]).astype(jnp.float32), key=jax.random.key(seed)
        )

    seeds, rates, explorations = jnp.arange(3), jnp.asarray([0.001, 0.01, 0.1]), jnp.asarray([0.1, 0.5, 1.0])
    together = jax.jit(jax.vmap(run))(seeds, rates, explorations)
    assert together.cumulative_loss.shape == (3, 40)
    for i in range(3):
        alone = run(seeds[i], rates[i], explorations[i])
        np.testing.assert_allclose(together.propensities[i], alone.propensities, rtol=1e-5)
        np.testing.assert_allclose(together.cumulative_loss[i], alone.cumulative_loss, rtol=1e-5)


def test_learns_classes_better_than_a_linear_learner():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20_000, 2)).astype(np.float32)
    targets = jnp.asarray((x[:, 0] * x[:, 1] > 0).astype(np.int32))  # no line tells them apart
    loss = lambda i, a: (a != targets[i]).astype(jnp.float32)
    right = {}
    for depth in (0, 4):
        learner = jtrees.bandit_classifier(depth, 2)
        run = jtrees.run_bandit(learner, jnp.asarray(x), loss, key=key())
        right[depth] = np.mean(learner.predict(run.state.params, jnp.asarray(x)).argmax(1) == targets)
    assert right[4] > 0.85 > 0.65 > right[0]


@pytest.mark.parametrize("feedback", ["one-point", "two-point"])
def test_learns_a_step(feedback):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(20_000, 2)), jnp.float32)
    targets = jnp.where(x[:, 0] + x[:, 1] > 0, 0.9, 0.1)
    learner = jtrees.bandit_regressor(2, feedback=feedback)
    run = jtrees.run_bandit(learner, x, lambda i, a: jnp.square(a - targets[i]), key=key())
    off = np.mean((learner.predict(run.state.params, x) - targets) ** 2)
    assert off < 0.25 * np.var(targets)


# --- Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["classifier", "one-point", "two-point"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rounds_without_a_finite_loss_are_skipped(kind, bad):
    learner = classifier() if kind == "classifier" else regressor(kind)
    x, skip = contexts(40), jnp.arange(40) % 3 == 1
    loss = lambda i, a: jnp.where(skip[i], bad, jnp.float32(0.4))
    run = jtrees.run_bandit(learner, x, loss, key=key())
    assert run.state.skipped == 13
    assert run.state.rounds == 40
    np.testing.assert_array_equal(run.skipped, skip)
    np.testing.assert_array_equal(np.isnan(run.losses), skip)
    assert run.cumulative_loss[-1] == pytest.approx(0.4 * 27, rel=1e-5)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(run.state))
    state = learner.init(P, key=key())
    action, propensity = learner.act(state, x[0], key=key())
    after = learner.update(state, x[0], action, propensity, jnp.full(action.shape, bad))
    jax.tree.map(np.testing.assert_array_equal, after.gradient, state.gradient)
    assert after.skipped == 1


def test_a_skipped_round_moves_nothing_whatever_the_optimiser(standard_promotion):
    learner = classifier(optimizer=optax.adam(0.1), accumulate=1)
    state, x = learner.init(P, key=key()), contexts()[0]
    state = learner.update(state, x, 0, 0.5, 1.0)
    after = learner.update(state, x, 0, 0.5, np.nan)
    for name in ("params", "opt_state", "gradient"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(state, name))
    assert (after.rounds, after.skipped) == (2, 1)


def test_a_context_that_is_not_finite_is_skipped_where_it_cannot_be_looked_at():
    learner, x = classifier(), contexts(30).at[5, 0].set(jnp.nan)
    run = jax.jit(lambda x: jtrees.run_bandit(learner, x, lambda i, a: jnp.float32(0.5), key=key()))(x)
    assert np.flatnonzero(run.skipped).tolist() == [5]
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(run.state))


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_contexts_are_taken_in_the_dtype_of_the_learner(x64, dtype):
    for learner, shape in [(classifier(), ()), (regressor(), (2,))]:
        state, x = learner.init(P, key=key()), np.ones(P, dtype)
        action, propensity = learner.act(state, x, key=key())
        after = learner.update(state, x, action, propensity, np.zeros(shape))
        assert all(np.isfinite(a).all() for a in jax.tree.leaves(after))


def test_two_rates_know_the_leaves_of_other_trees():
    params = random_chain(key(), 2, P, (3,), None, jnp.float32)
    optimizer = jtrees.two_rates(0.001, 0.3)
    ones = jax.tree.map(jnp.ones_like, params)
    updates, _ = optimizer.update(ones, optimizer.init(params), params)
    # RMSprop's first step: the rate over the root of 1 - 0.99.
    np.testing.assert_allclose(updates.leaves.values, -3.0, rtol=1e-4)
    np.testing.assert_allclose(updates.factors[0], -0.01, rtol=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jtrees.bandit_classifier(2, 1), "actions must be at least 2, got 1"),
        (lambda: jtrees.bandit_classifier(17, 3), "depth"),
        (lambda: classifier(exploration=0.0), "exploration must be above 0 and at most 1, got 0.0"),
        (lambda: classifier(exploration=1.5), "exploration"),
        (lambda: classifier(accumulate=0), "accumulate"),
        (lambda: regressor(delta=0.0), "delta must be above 0 and at most 1, got 0.0"),
        (lambda: regressor(delta=2.0), "delta"),
        (lambda: regressor("three-point"), 'feedback must be "one-point" or "two-point"'),
        (lambda: classifier().init(0, key=key()), "p must"),
    ],
)
def test_bad_learners_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_bad_rounds_are_refused():
    learner, x = classifier(), contexts()[0]
    state = learner.init(P, key=key())
    update = partial(learner.update, state)
    for call, message in [
        (lambda: learner.act(state, x[:3], key=key()), r"x must be one context of shape \(4,\), got shape \(3,\)"),
        (lambda: learner.act(state, x.at[0].set(jnp.nan), key=key()), "x must be finite"),
        (lambda: update(x, 3, 0.5, 1.0), "action must be a whole number from 0 to 2, got 3"),
        (lambda: update(x, -1, 0.5, 1.0), "action"),
        (lambda: update(x, 0.5, 0.5, 1.0), "action"),
        (lambda: update(x, 1, 0.0, 1.0), "propensity must be above 0 and at most 1, got 0.0"),
        (lambda: update(x, 1, 1.1, 1.0), "propensity"),
        (lambda: update(x, 1, 0.5, jnp.zeros(1)), r"loss must have shape \(\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    for feedback, shape in [("one-point", ()), ("two-point", (2,))]:
        learner = regressor(feedback)
        state = learner.init(P, key=key())
        action, propensity = learner.act(state, x, key=key())
        learner.update(state, x, action, propensity, jnp.zeros(shape))
        with pytest.raises(ValueError, match="action must be what act gave for this state"):
            learner.update(state, x, action + 0.1, propensity, jnp.zeros(shape))
        with pytest.raises(ValueError, match="loss must have shape"):
            learner.update(state, x, action, propensity, jnp.zeros(3))


def test_bad_streams_are_refused():
    learner, x = classifier(), contexts(10)
    loss = lambda i, a: jnp.float32(0)
    for bad, options, message in [
        (x[0], {}, "contexts must be floating numbers"),
        (x[:0], {}, "contexts must hold at least one round"),
        (x.astype(jnp.int32), {}, "contexts must be floating numbers"),
        (x.at[2, 1].set(jnp.nan), {}, "contexts must be finite"),
        (x, {"best_losses": jnp.zeros(3)}, r"best_losses must have shape \(10,\), got \(3,\)"),
        (x, {"score_every": 0}, "score_every"),
        (x[:, :2], {"state": learner.init(P, key=key())}, "x must be one context of shape"),
    ]:
        with pytest.raises(ValueError, match=message):
            jtrees.run_bandit(learner, bad, loss, key=key(), **options)
