"""Bandit feedback: gradient estimates, streams, resuming, and errors."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jtrees
from jtrees.methods.dgt import random_chain
from jtrees.routing import path_sum
from jtrees.training import rmsprop
from tests import sweeps

P, K, N, EVERY = 4, 3, 25, 7
KEY = jax.random.key(0)


def classifier(**options):
    return jtrees.methods.bandit_classifier(2, K, **options)


def regressor(feedback="two-point", **options):
    return jtrees.methods.bandit_regressor(2, feedback=feedback, **options)


def learner_of(kind):
    if kind == "classifier":
        return classifier(optimizer=jtrees.methods.two_rates(0.001, 0.3))
    return regressor(kind, optimizer=rmsprop(0.001), delta=0.3)


def contexts(n=N, seed=0):
    return np.random.default_rng(seed).normal(size=(n, P)).astype(np.float32)


def targets(n=N, seed=1):
    return np.random.default_rng(seed).integers(0, K, n).astype(np.float32)


@partial(jax.jit, static_argnums=0)
def first_state(kind):
    kind = "two-point" if kind == "one-point" else kind
    return learner_of(kind).init(P, key=jax.random.split(KEY)[0])


def loss_of(kind, y, extra):
    y, extra = jnp.asarray(y), jnp.asarray(extra)
    if kind == "classifier":
        return lambda i, a: (a.astype(jnp.float32) != y[i]).astype(jnp.float32) + extra[i]
    return lambda i, a: jnp.abs(a - y[i]) + extra[i]


@partial(jax.jit, static_argnums=0)
def run_stream(kind, state, x, y, extra):
    return jtrees.methods.run_bandit(learner_of(kind), x, loss_of(kind, y, extra), key=KEY, state=state)


def stream(kind, x, y, state="first", extra=None):
    state = first_state(kind) if isinstance(state, str) else state
    return run_stream(kind, state, x, y, np.zeros(len(x), np.float32) if extra is None else extra)


@partial(jax.jit, static_argnums=(0, 1))
def one_round(learner, loss, state, x, key):
    action, propensity = learner.act(state, x, key=key)
    return action, propensity, learner.update(state, x, action, propensity, loss(action))


def answer(params, x):
    """Output of a tree for one context, with DGT's gradient: scores in units of their mean size."""
    scores = params.weights @ x + params.bias
    size = jax.lax.stop_gradient(jnp.abs(scores).mean())
    return path_sum((scores / size)[:, None], params.leaves.values)[0]


def close_to_mean(draws, mean):
    off = 4.5 * np.std(draws, axis=0) / np.sqrt(len(draws)) + 1e-6
    assert (np.abs(np.mean(draws, axis=0) - mean) <= off).all()


def test_play_is_epsilon_greedy_and_the_discrete_estimate_is_unbiased():
    learner, n = classifier(exploration=0.6, accumulate=10), 20_000
    state, x, losses = first_state("classifier"), contexts()[0], jnp.asarray([1.0, 0.0, 0.3])

    def squared_distance(params):  # of the sigmoid of each score to what the loss says it should be
        return jnp.square(jax.nn.sigmoid(answer(params, x)) - (1 - losses)).sum()

    @jax.jit
    def draws():
        draw = lambda k: one_round(learner, lambda a: losses[a], state, x, k)
        slope = jax.grad(squared_distance)(state.params)
        return *jax.vmap(draw)(jax.random.split(jax.random.key(1), n)), slope, answer(state.params, x).argmax()

    actions, propensities, after, slope, best = jax.tree.map(np.asarray, draws())
    assert best == np.argmax(learner.predict(state.params, contexts()[:1])[0])
    expected = np.full(K, 0.6 / K) + 0.4 * (np.arange(K) == best)
    np.testing.assert_allclose(propensities, expected[actions], rtol=1e-6)
    # Four standard deviations of a frequency over 20 000 draws are at most 0.015.
    np.testing.assert_allclose(np.bincount(actions, minlength=K) / n, expected, atol=0.015)
    jax.tree.map(close_to_mean, after.gradient, slope)
    assert np.abs(slope.weights).max() > 1e-3


def test_one_point_estimate_is_unbiased_on_a_quadratic():
    state, x, quadratic = first_state("one-point"), contexts()[0], lambda a: 2 * jnp.square(a - 0.2) + 0.1

    @jax.jit
    def draws(delta):
        learner = regressor("one-point", delta=delta, accumulate=10)
        played = jax.vmap(lambda k: one_round(learner, quadratic, state, x, k))(
            jax.random.split(jax.random.key(1), 20_000)
        )
        return *played, jax.grad(lambda params: quadratic(answer(params, x)))(state.params)

    prediction = learner_of("one-point").predict(state.params, contexts()[:1])[0]
    for delta in (0.1, 1.0):
        actions, propensities, after, slope = jax.tree.map(np.asarray, draws(delta))
        np.testing.assert_allclose(np.abs(actions - prediction), delta, rtol=1e-4)
        assert (propensities == 0.5).all() and abs(np.mean(actions > prediction) - 0.5) < 0.015  # four deviations
        jax.tree.map(close_to_mean, after.gradient, slope)


def paper_round(kind, answer, action, y, delta):
    """Propensity, loss and estimated slope of the loss of one round, by the formulas of the paper (eq. 7 to 10)."""
    if kind == "classifier":
        chance = (1 - delta) * (action == answer.argmax()) + delta / K
        loss, s = float(action != y), 1 / (1 + np.exp(-answer[action]))
        return chance, loss, 2 / chance * (loss - (1 - s)) * s * (1 - s) * np.eye(K)[action]
    losses = np.abs(action - y)
    if kind == "one-point":
        np.testing.assert_allclose(np.abs(action - answer), delta)
        return 0.5, losses, losses * np.sign(action - answer) / delta
    np.testing.assert_allclose(action, answer + delta * np.array([1, -1]))
    return 1.0, losses.mean(), (losses[:1] - losses[1:]) / (2 * delta)


@pytest.mark.parametrize("kind", sweeps.quick(["classifier", "one-point", "two-point"], ["two-point"]))
def test_a_stream_is_the_papers_algorithm(kind, x64):
    """With plain gradient descent, updates of three rounds each, and rounds without a loss."""
    rng = np.random.default_rng(5)
    x, y, best, delta, rate = rng.normal(size=(N, P)), rng.integers(0, K, N, np.int32), rng.uniform(size=N), 0.4, 0.05
    options = {"optimizer": optax.sgd(rate), "accumulate": 3}
    learner = classifier(exploration=delta, **options)
    if kind != "classifier":
        learner, y = regressor(kind, delta=delta, **options), rng.uniform(size=N)
    missing, state = np.isin(np.arange(N), [4, 5, 13]), learner.init(P, key=KEY)
    params = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape)), state.params)
    distance = lambda a, y: (a != y).astype(jnp.float64) if kind == "classifier" else jnp.abs(a - y)
    loss = lambda i, a: jnp.where(jnp.asarray(missing)[i], jnp.nan, distance(a, jnp.asarray(y)[i]))
    start, run = state.replace(params=params), jtrees.methods.run_bandit
    score = {"score": lambda params: learner.predict(params, x).sum(), "score_every": EVERY}
    run = jax.jit(lambda: run(learner, x, loss, key=KEY, state=start, best_losses=best, **score))()
    gradient = jax.jit(jax.grad(lambda params, x, slope: (answer(params, x) * slope).sum()))
    total, losses = jax.tree.map(jnp.zeros_like, params), []
    for i, action in enumerate(np.asarray(run.actions)):
        chance, losses_of_action, slope = paper_round(kind, np.asarray(answer(params, x[i])), action, y[i], delta)
        np.testing.assert_allclose(run.propensities[i], chance)
        losses.append(np.nan if missing[i] else np.mean(losses_of_action))
        if not missing[i]:
            total = jax.tree.map(jnp.add, total, gradient(params, x[i], slope))
            if np.isfinite(losses).sum() % 3 == 0:
                params = jax.tree.map(lambda a, g: a - rate * g / 3, params, total)
                total = jax.tree.map(jnp.zeros_like, params)
    np.testing.assert_allclose(run.losses, losses)
    np.testing.assert_allclose(run.cumulative_loss, np.nancumsum(losses))
    np.testing.assert_allclose(run.regret, np.nancumsum(np.array(losses) - best))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9), run.state.params, params)
    assert run.state.skipped == 3 and run.queries.tolist() == [7, 14, 21] and run.scores.shape == (3,)


def test_a_saved_state_is_continued_exactly(tmp_path):
    x, y = contexts(5 * N), targets(5 * N)
    expected = stream("classifier", x, y, state=None)
    empty, state, actions = first_state("classifier"), first_state("classifier"), []
    path = tmp_path / "state.jtrees"
    for part in range(5):  # 1, 2, 3 and no rounds wait for an update
        rows = slice(part * N, (part + 1) * N)
        jtrees.save(state, path)
        state = jtrees.load(path, like=empty)
        run = stream("classifier", x[rows], y[rows], state=state)
        actions, state = [*actions, run.actions], run.state
    np.testing.assert_array_equal(np.concatenate(actions), expected.actions)
    jax.tree.map(np.testing.assert_array_equal, state, expected.state)


@pytest.mark.parametrize("kind", sweeps.quick(["classifier", "two-point", "one-point"], ["classifier"]))
def test_rounds_without_a_finite_loss_are_skipped(kind):
    x, y, skip = contexts(), targets(), np.arange(N) % 3 == 1
    for bad in (np.nan, np.inf):
        run = stream(kind, x, y, extra=np.where(skip, bad, 0).astype(np.float32))
        assert (run.state.rounds, run.state.skipped) == (N, skip.sum())
        np.testing.assert_array_equal(run.skipped, skip)
        np.testing.assert_array_equal(np.isnan(run.losses), skip)
        assert all(np.isfinite(a).all() for a in jax.tree.leaves((run.state, run.cumulative_loss, run.regret)))
        # Where all are skipped, nothing changes but the counts.
        state = stream(kind, x, y, extra=np.full(N, bad, np.float32)).state
        for name in ("params", "opt_state", "gradient"):
            jax.tree.map(np.testing.assert_array_equal, getattr(state, name), getattr(first_state(kind), name))
        assert (state.rounds, state.skipped) == (N, N)


def test_a_traced_context_that_is_not_finite_is_skipped():
    x = contexts()
    x[5, 0] = np.nan
    run = stream("classifier", x, targets())
    assert np.flatnonzero(run.skipped).tolist() == [5]
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(run.state))


@pytest.mark.parametrize("kind", ["classifier", "two-point"])
def test_contexts_are_taken_in_the_dtype_of_the_learner(x64, kind):
    learner, zero = learner_of(kind), lambda a: jnp.zeros(a.shape)
    update = lambda x: one_round(learner, zero, learner.init(P, key=KEY), x, KEY)[2].params.weights
    assert all(jax.eval_shape(update, np.ones(P, dtype)).dtype == jnp.float64 for dtype in (np.float32, np.int32))


def test_two_rates_apply_to_the_leaves_of_other_trees():
    params, optimizer = random_chain(KEY, 2, P, (3,), (), jnp.float32), jtrees.methods.two_rates(0.001, 0.3)
    first = lambda params: optimizer.update(jax.tree.map(jnp.ones_like, params), optimizer.init(params), params)[0]
    updates = jax.jit(first)(params)
    # RMSprop's first step: the rate over the root of 1 - 0.99.
    np.testing.assert_allclose(updates.leaves.values, -3.0, rtol=1e-4)
    np.testing.assert_allclose(updates.factors[0], -0.01, rtol=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jtrees.methods.bandit_classifier(2, 1), "actions must be at least 2, got 1"),
        (lambda: classifier(exploration=0.0), "exploration must be a finite number above 0 and at most 1, got 0.0"),
        (lambda: classifier(optimizer=0.01), "optimizer must be an optax transformation, got 0.01"),
        (lambda: regressor(delta=0.0), "delta must be a finite number above 0 and at most 1, got 0.0"),
        (lambda: regressor("three-point"), "feedback must be one of 'one-point', 'two-point', got 'three-point'"),
        (lambda: classifier().init(P, key=0), "key must be a random key"),
    ],
)
def test_bad_learners_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_bad_rounds_are_refused():
    learner, x = classifier(), contexts()[0]
    state, number, first = first_state("classifier"), learner_of("two-point"), first_state("two-point")
    update, act = partial(learner.update, state), lambda x: learner.act(state, x, key=KEY)
    action, propensity = jax.jit(lambda: number.act(first, x, key=KEY))()
    play = lambda action, loss: number.update(first, x, action, propensity, loss)
    assert play(action, jnp.zeros(action.shape)).rounds == 1
    for call, message in [
        (lambda: act(x[:3]), r"x must be one context of shape \(4,\), got shape \(3,\)"),
        (lambda: act(np.full(P, np.nan)), "x must be finite"),
        (lambda: update(x, 3, 0.5, 1.0), "action must be a whole number from 0 to 2, got 3"),
        (lambda: update(x, 1, 0.0, 1.0), "propensity must be a finite number above 0 and at most 1, got 0.0"),
        (lambda: play(action + 0.1, action), "action must be the action that act returned for this state"),
        (lambda: learner.act(first, x, key=KEY), "state must be a state of this learner, with"),
        (lambda: play(action, jnp.zeros(3)), "loss must have shape"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def test_bad_streams_are_refused():
    learner, x = classifier(), contexts()
    loss, bad = lambda i, a: jnp.float32(0), contexts()
    bad[2, 1] = np.nan
    run = lambda learner, x, loss, **options: jtrees.methods.run_bandit(learner, x, loss, **({"key": KEY} | options))
    for args, options, message in [
        ((learner, bad, loss), {}, "contexts must be finite"),
        ((None, x, loss), {}, "learner must be a jtrees.methods.Bandit"),
        ((learner, x, lambda i, a: np.zeros(2)), {"state": first_state("classifier")}, "loss must have shape"),
        ((learner, x, loss), {"best_losses": jnp.zeros(3)}, r"best_losses must have shape \(25,\), got \(3,\)"),
        ((learner, x, loss), {"score_every": 0}, "score_every"),
        ((learner, x, loss), {"state": 0}, "state must be a BanditState"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(*args, **options)


def test_losses_have_the_precision_of_the_learner():
    loss = lambda i, action: 1e5 + action
    x = np.random.default_rng(0).normal(size=(20, 2)).astype(np.float16)
    learner = jtrees.methods.bandit_regressor(2)
    half, single = (jtrees.methods.run_bandit(learner, x, loss, key=KEY) for x in (x, x.astype(np.float32)))
    assert half.state.skipped == 0
    np.testing.assert_array_equal(half.losses, single.losses)
