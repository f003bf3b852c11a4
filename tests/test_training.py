"""The training loop: what it computes, in which order it visits samples, what it keeps, and what it compiles."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jtrees
from jtrees import training
from jtrees.training import Batch, Method
from tests import sweeps

DEPTH = 2
GET = jtrees.methods.get(DEPTH, 5.0)
KEY = jax.random.key(0)


def plane_loss(params, batch, *, key, step):
    """Squared error of a plane, and a score that is something else: how far the plane is from the first axis."""
    errors = jnp.square(batch.x @ params - batch.y)
    step.astype(jnp.float32)  # an array, everywhere
    value = errors.mean() if batch.weight is None else (batch.weight * errors).mean()
    return value, jnp.square(params - jnp.eye(1, 2, dtype=params.dtype)[0]).sum()


def nothing(loss):
    """A method that learns nothing: for what a loss sees."""
    return Method(lambda batch, *, key: jnp.float32(0), loss, lambda params, batch: None)


PLANE = Method(
    lambda batch, *, key: jax.random.normal(key, batch.x.shape[1:], batch.x.dtype),
    plane_loss,
    lambda params, batch: None,
)
BATCHES = {"batch_size": 4, "score_every": 2}


@pytest.fixture(scope="module")
def plane():
    """Eleven samples, so that an epoch of batches of 4 leaves some over."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(11, 2))
    x, y = (jnp.asarray(a, jnp.float32) for a in (x, x @ [2.0, -1.0] + 0.1 * rng.normal(size=11)))
    return Batch(x, y, jnp.ones(11))


def run(data, key=KEY, learning_rate=0.1, *, method=PLANE, steps=6, **options):
    options = {"optimizer": optax.sgd(learning_rate)} | options
    return jtrees.train(method, data, key=key, steps=steps, **options)


_run = jax.jit(run, static_argnames=("method", "steps", "batch_size", "score_every", "score"))


def compiled(data, key=KEY, learning_rate=0.1, **options):
    """One program for equal options, shapes and method: a default would be another."""
    return _run(data, key, learning_rate, **options)


@jax.jit
def first_params(data):
    """Where the runs of this file start."""
    return PLANE.init(data, key=jax.random.split(KEY, 3)[0])


def descent(data, learning_rate=0.1, steps=6):
    """Gradient descent on the plane in NumPy: parameters before each update and after the last, losses before each."""
    x, y, weight = (np.asarray(a, np.float64) for a in data)
    params, visited, losses = np.asarray(first_params(data), np.float64), [], []
    for _ in range(steps):
        residual = x @ params - y
        visited.append(params)
        losses.append(np.average(residual**2, weights=weight))
        params = params - learning_rate * 2 * x.T @ (weight * residual) / weight.sum()
    return np.array([*visited, params]), np.array(losses)


def far(params):
    """The score of a plane."""
    return np.square(np.asarray(params) - [1, 0]).sum(-1)


# Equal up to the rounding of products that are batched otherwise.
assert_same = partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-5)


def assert_equal(a, b):
    """Bit for bit; a run has a key, too."""
    bits = lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    chex.assert_trees_all_equal(jax.tree.map(bits, a), jax.tree.map(bits, b))


@pytest.mark.parametrize("weight", [np.ones(11), np.arange(11) % 3 > 0], ids=["ones", "ones and zeros"])
def test_without_scores_the_last_parameters_are_the_result(plane, weight):
    """Samples of weight 0 are left out."""
    counted = weight > 0
    visited, losses = descent(Batch(*(a[counted] for a in plane)))
    last = compiled(plane._replace(weight=jnp.asarray(weight, jnp.float32)))
    np.testing.assert_allclose(last.losses, losses, rtol=1e-5)
    assert np.isposinf(last.scores).all()
    assert int(last.step) == 6
    assert_same(last.params, visited[6])
    assert float(last.score) == pytest.approx(far(visited[6]), rel=1e-5)
    assert bool(last.finite)


@pytest.mark.parametrize("batch_size", [None, 4], ids=["full", "batches"])
def test_the_best_parameters_have_the_best_score(plane, batch_size):
    result = compiled(plane, learning_rate=1.0, batch_size=batch_size, score_every=2)
    assert np.isfinite(np.asarray(result.scores)).tolist() == [True, False] * 3
    scores = np.asarray(result.scores)[::2]
    assert np.diff(scores).max() > 0  # a rate so large that the score goes up and down: otherwise the last would do
    assert float(result.score) <= scores.min()
    assert far(result.params) == pytest.approx(float(result.score), rel=1e-5)
    if batch_size is None:
        scores = far(descent(plane, learning_rate=1.0)[0])
        assert int(result.step) == [0, 2, 4, 6][int(np.argmin(scores[::2]))]
    equal = compiled(plane, score_every=1, score=lambda params: jnp.float32(0))
    assert int(equal.step) == 0  # of equal scores the first is kept


@pytest.mark.parametrize(("least_gain", "waited"), [(0.0, [0, 0, 1, 0, 1, 2]), (0.5, [0, 0, 1, 2, 3, 4])])
def test_early_stopping_counts_evaluations_since_the_last_lower_score(plane, least_gain, waited):
    state = training.start(PLANE, plane, key=KEY, optimizer=optax.sgd(0.1))
    scores, states = [np.inf, 4.0, np.nan, 3.0, 3.0, 9.0], []
    for number, score in enumerate(scores):
        state = state.replace(params=jnp.float32([number, 0]), step=jnp.int32(number))
        states.append(state := state.evaluated(jnp.float32(score), least_gain))
    assert [int(state.waited) for state in states] == waited
    assert (int(state.best.step), float(state.best.score), float(state.best.params[0])) == (3, 3.0, 3.0)


def test_the_end_of_a_run_fixes_its_result(plane):
    optimizer = optax.sgd(0.5)
    once = training.step.one_step(PLANE, plane, optimizer)
    score = lambda params: jnp.square(params[0] - 0.3)
    is_over = lambda state: state.waited >= 2
    step = jax.jit(training.step.with_early_stopping(once, score, lambda made: made % 3 == 0, is_over))
    state, losses, ends = training.start(PLANE, plane, key=KEY, optimizer=optimizer), [], []
    for _ in range(40):
        state, entry = step(state)
        losses.append(float(entry.losses))
        ends.append((int(state.step), int(state.best.step), float(state.best.score)))
    length = int(state.step)
    assert length < 30 and length % 3 == 0 and length == int(state.best.step) + 6
    assert len(set(ends[length - 1 :])) == 1
    assert np.isfinite(losses[:length]).all() and np.isneginf(losses[length:]).all()


def test_a_score_of_the_users_own_decides(plane):
    user_score = lambda params: jnp.square(params[0] - 1.5)
    visited, _ = descent(plane)
    expected = np.square(visited[:, 0] - 1.5)
    result = compiled(plane, score_every=1, score=user_score)
    np.testing.assert_allclose(result.scores, expected[:6], rtol=1e-4, atol=1e-6)
    assert int(result.step) == int(np.argmin(expected)) != int(np.argmin(far(visited)))
    assert_same(result.params, visited[int(np.argmin(expected))])


@pytest.mark.exact
def test_a_step_of_the_users_own_takes_the_place_of_the_optimisers(plane):
    def update(params, opt_state, batch, *, key, step):
        out, gradient = jax.value_and_grad(partial(plane_loss, batch=batch, key=key, step=step), has_aux=True)(params)
        return params - 0.1 * gradient, opt_state, out

    updating = PLANE._replace(update=update)
    mine, theirs = (compiled(plane, method=method, score_every=1) for method in (updating, PLANE))
    assert_equal(mine, theirs)
    assert len(np.unique(mine.losses)) == 6
    # The optimiser moves nothing: it only makes the state that the method's own step is given.
    assert_equal(mine, compiled(plane, learning_rate=7.0, method=updating, score_every=1))


def test_project_is_applied_at_the_start_and_after_each_step(plane):
    clipped = PLANE._replace(project=lambda params: jnp.clip(params, -0.01, 0.01))
    result = compiled(plane, method=clipped, score_every=1)
    first = np.clip(first_params(plane), -0.01, 0.01)
    assert float(result.scores[0]) == pytest.approx(far(first), rel=1e-5)
    assert (np.asarray(result.scores) >= 0.99**2 - 1e-6).all()
    assert float(jnp.abs(result.params).max()) <= 0.01
    assert np.abs(descent(plane)[0]).min() > 0.01


def test_the_loss_gets_the_step_and_a_key_of_its_own():
    loss = lambda params, batch, *, key, step: (
        step.astype(jnp.float32) + jax.random.uniform(key) + 0 * params,
        jnp.float32(0),
    )
    losses = np.asarray(compiled(Batch(jnp.ones((2, 1)), jnp.ones(2)), method=nothing(loss), steps=4).losses)
    assert np.floor(losses).tolist() == [0, 1, 2, 3]
    assert len(set((losses % 1).tolist())) == 4
    expected = jax.random.key_data(jax.random.split(KEY))
    np.testing.assert_array_equal(jax.random.key_data(jnp.stack(training.step.keys_of(KEY))), expected)
    schedule = lambda step: 2 * step  # of a number, which is evaluated
    assert (training.state.at_step(schedule, 7), training.state.at_step(0.5, 7)) == (14, 0.5)


def test_a_run_that_diverges_is_not_finite_and_scores_nothing(plane):
    """Choices among runs rely on this score. Parameters that were evaluated before remain the result."""
    watched, last = (compiled(plane, learning_rate=1e30, **options) for options in ({"score_every": 1}, {}))
    assert not last.finite and np.isposinf(last.score)
    assert watched.finite and float(watched.score) == pytest.approx(far(first_params(plane)), rel=1e-5)
    assert int(watched.step) == 0
    assert_same(watched.params, first_params(plane))
    # A loss that is not finite once counts, even where the parameters are well.
    once = lambda params, batch, *, key, step: (jnp.where(step == 2, jnp.nan, 1.0) + 0 * params, jnp.float32(1))
    result = compiled(plane, learning_rate=0.0, method=nothing(once)._replace(project=lambda params: jnp.float32(3)))
    assert result.params == 3 and not result.finite and np.isposinf(result.score)


K = 3


def decaying(rate):
    """A schedule, and a rule that depends on the loss."""
    schedule = lambda step: rate / (1 + step.astype(jnp.float32))
    return optax.chain(optax.sgd(schedule), optax.contrib.reduce_on_plateau(factor=0.5, patience=0, rtol=0.5))


@pytest.mark.exact
@pytest.mark.usefixtures("standard_promotion")  # reduce_on_plateau mixes dtypes
@pytest.mark.parametrize("vmapped", sweeps.quick([False, True], [False]), ids=["full batch, jit", "batches, vmap"])
def test_two_advances_are_one_of_twice_the_steps(plane, vmapped):
    """With keep-best, a schedule and a plateau rule; batches cross the border of an epoch."""
    optimizer, options = decaying(0.3), BATCHES if vmapped else {"score_every": 1}

    def advance(state, steps):
        return training.advance(PLANE, state, plane, optimizer=optimizer, steps=steps, **options)

    def advance_up_to(state, count):
        once = training.step.one_step(PLANE, plane, optimizer, **options)
        return training.loop.advance_up_to(once, state, count, length=2 * K + 2)

    initialised = lambda key: training.start(PLANE, plane, key=key, optimizer=optimizer)
    axes = jax.tree.map(lambda _: 0, jax.eval_shape(initialised, KEY)).replace(step=None)  # one step for all
    states = jax.jit(jax.vmap(initialised, out_axes=axes))(jax.random.split(KEY, 2)) if vmapped else initialised(KEY)

    def wrap(fn, *rest):
        return jax.jit(jax.vmap(fn, (axes, *rest), (axes, 0)) if vmapped else fn)

    by, up_to = {steps: wrap(partial(advance, steps=steps)) for steps in (K, 2 * K)}, wrap(advance_up_to, None)
    half, first = by[K](states)
    twice, second = by[K](half)
    long_run, history = by[2 * K](states)
    assert_equal(twice, long_run)
    assert_equal(jax.tree.map(lambda *a: np.concatenate(a, axis=-1), first, second), history)
    # Something happens that would not from a newly initialised state.
    assert (np.asarray(half.step), np.asarray(long_run.step)) == (K, 2 * K)
    assert len(np.unique(history.losses)) == history.losses.size
    assert not np.array_equal(np.asarray(by[K](half.replace(opt_state=states.opt_state))[0].params), twice.params)
    assert not vmapped or not np.array_equal(half.order, long_run.order)

    counted, padded = up_to(states, jnp.int32(2 * K))
    assert_equal(counted, long_run)
    assert_equal(jax.tree.map(lambda a: a[..., : 2 * K], padded), history)
    assert (padded.losses[..., 2 * K :] == training.state.NOT_TAKEN).all()
    assert np.isposinf(padded.scores[..., 2 * K :]).all()
    if not vmapped:
        trained = jax.jit(partial(jtrees.train, PLANE, plane, optimizer=optimizer, steps=2 * K, **options))(key=KEY)
        best_of_run = jax.jit(partial(training.best, PLANE))(long_run, plane)
        assert_equal(trained, best_of_run.replace(losses=history.losses, scores=history.scores))


def ids_loss(params, batch, *, key, step):
    """The sum of 2**id over the batch, by weight; no whole number if samples fell apart. And the sum of ids."""
    ids, y = batch.x[:, 0], batch.y
    apart = jnp.abs(ids - y["a"]) + jnp.abs(y["b"][:, 1] - 2 * ids)
    return (batch.weight * jnp.exp2(ids) + apart / 3).sum() + 0 * params, (batch.weight * ids).sum()


IDS = nothing(ids_loss)


def by_id(n, *, weight=None, **options):
    """The losses of each step where samples are known by their numbers."""
    ids = jnp.arange(n, dtype=jnp.float32)
    y = {"a": ids, "b": jnp.stack([ids, 2 * ids], axis=1)}  # targets may be any pytree over the samples
    weight = jnp.ones(n) if weight is None else jnp.asarray(weight, jnp.float32)
    return compiled(Batch(ids[:, None], y, weight), method=IDS, score_every=2, **options)


@pytest.mark.parametrize(("n", "batch_size"), [(11, 4), (9, 1)])
def test_an_epoch_visits_each_sample_once_in_an_order_of_its_own(n, batch_size):
    per_epoch = n // batch_size
    masks = np.asarray(by_id(n, batch_size=batch_size, steps=3 * per_epoch).losses)
    assert (masks == masks.astype(int)).all()  # x and y stay together
    epochs = [[[i for i in range(n) if int(mask) >> i & 1] for mask in epoch] for epoch in np.split(masks, 3)]
    for epoch in epochs:
        visited = [i for batch in epoch for i in batch]
        assert len(set(visited)) == len(visited) == per_epoch * batch_size
        assert {len(batch) for batch in epoch} == {batch_size}
    assert epochs[0] != epochs[1] != epochs[2]


def test_numpy_data_train_like_jax_data_and_not_compiled_as_compiled(plane):
    """In mini-batches, which NumPy cannot be indexed by inside of a program."""
    assert_same(run(Batch(*map(np.asarray, plane)), **BATCHES), compiled(plane, **BATCHES))


@pytest.mark.parametrize("batch_size", [None, 4])
def test_weights_reach_the_loss_and_stay_with_their_samples(batch_size):
    fit = lambda weight: by_id(11, weight=weight, batch_size=batch_size, steps=6)
    every = fit(np.ones(11))
    alone = [fit(np.eye(11)[i]) for i in range(11)]
    # Of one sample with weight, a batch has as many copies as it has samples: of weight 1, and of all samples 11.
    for i, result in enumerate(alone):
        np.testing.assert_array_equal(result.losses, (11 if batch_size is None else 4) * 2.0**i)
        assert float(result.score) == 11 * i  # the score is that on all samples
    assert (every.losses == 2.0**11 - 1).all() == (batch_size is None)
    np.testing.assert_array_equal(np.asarray(every.scores)[::2], 55)


def test_a_heavy_sample_counts_as_much_in_a_light_batch_as_in_another():
    """Weights are normalised once, over all samples: alone in its batch, a sample has the weight that it has.

    The place of the sample without weight goes to another one, so all others count less.
    """
    weight = np.array([9.0, 0, 0.5, 0.25, 3, 0.5, 2, 1, 0.125])
    losses = by_id(9, weight=weight, batch_size=1, steps=27).losses
    expected = np.sort((8 / 9 * weight / weight.mean() * 2.0 ** np.arange(9))[weight > 0])
    for epoch in np.split(np.asarray(losses), 3):
        np.testing.assert_allclose(np.unique(epoch.round(4)), np.unique(expected.round(4)), rtol=1e-4)


def test_without_weights_the_method_sees_none(plane):
    weights = []

    def loss(params, batch, *, key, step):
        weights.append(batch.weight)
        return plane_loss(params, batch, key=key, step=step)

    jax.eval_shape(lambda: run(plane._replace(weight=None), method=PLANE._replace(loss=loss), **BATCHES))
    assert weights and all(weight is None for weight in weights)
    weights.clear()
    jax.eval_shape(lambda: run(plane, method=PLANE._replace(loss=loss), **BATCHES))
    assert {weight.shape for weight in weights} == {(4,), (11,)}


def with_loss(loss):
    return {"method": PLANE._replace(loss=loss)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"score_every": -1}, "score_every must be at least 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": 12}, "batch_size must be from 1 to .* 11"),
        ({"key": 0}, "key must be a random key, .*got 0"),
        ({"method": plane_loss}, "method must be a jtrees.Method, got function"),
        ({"optimizer": 0.01}, "optimizer must be an optax transformation, .*got 0.01"),
        ({"score": lambda params: params, "score_every": 1}, r"score must return one number, got shape \(2,\)"),
        ({"x": jnp.ones(11)}, r"x must have shape \(n, p\)"),
        ({"x": jnp.ones((11, 2), jnp.int32)}, "x must have .* a floating dtype, got int32"),
        *(({"y": jnp.ones(shape)}, r"y must have shape \(n, \.\.\.\)") for shape in ((4,), ())),
        *(({"weight": jnp.ones(shape)}, r"weight must have shape \(11,\)") for shape in ((10,), (11, 1))),
        ({"data": (jnp.ones((11, 2)), jnp.ones(11))}, r"data must be a jtrees.Batch\(x, y, weight\), got tuple"),
        (with_loss(lambda params, batch, *, key, step: params.sum()), "method.loss must return a pair of scalars"),
        (with_loss(lambda params, batch, *, key, step: (params, 0)), "method.loss must return a pair of scalars"),
        (with_loss(lambda params, batch, *, key: 0), r"method.loss must take \(params, batch, .*'step'"),
        (with_loss(lambda params, x, y, *, key, step: 0), r"method.loss must take \(params, batch, .*'y'"),
    ],
)
def test_bad_options_and_data_are_refused_before_anything_is_compiled(plane, options, message):
    changed = {name: value for name, value in options.items() if name in Batch._fields}
    options = {"data": plane._replace(**changed)} | {k: v for k, v in options.items() if k not in changed}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: run(**options))


def test_parameters_of_another_model_and_batches_of_other_rows_are_refused(plane):
    optimizer = optax.sgd(0.1)
    tree = jax.eval_shape(partial(GET.init, key=KEY), plane)
    params = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)
    rest = [jtrees.methods.get(3, 5.0), jtrees.methods.get(DEPTH, 5.0, leaves="linear"), jtrees.methods.dgt(DEPTH)]
    for method, batch in [*((method, plane) for method in rest), (GET, Batch(jnp.ones((5, 4)), jnp.ones(5)))]:
        with pytest.raises(ValueError, match=r"params must be like those of the method, .*got ObliqueTree"):
            training.start(method, batch, key=KEY, optimizer=optimizer, params=params)
    # The order would point beyond fewer rows, and jax answers that with the last row.
    state, fewer = training.start(PLANE, plane, key=KEY, optimizer=optimizer), Batch(plane.x[:5], plane.y[:5])
    with pytest.raises(ValueError, match="data must have the 11 rows that the run began with, got 5"):
        training.advance(PLANE, state, fewer, optimizer=optimizer, steps=1, batch_size=2)


@pytest.mark.slow
def test_a_gradient_through_training_is_the_slope_of_a_soft_loss_and_the_score_has_none(plane, x64):
    method, data = jtrees.methods.get(DEPTH, 5.0), jax.tree.map(jnp.float64, plane)

    def losses(log_rate):
        best = jtrees.train(method, data, key=KEY, optimizer=optax.sgd(jnp.exp(log_rate)), steps=8)
        tree = best.params
        soft, _ = jtrees.ops.expected_loss(5 * tree.weights, 5 * tree.bias, tree.leaves, data.x, data.y)
        return soft, best.score

    slope, score_slope = jax.jit(jax.jacrev(losses))(-2.0)
    (above, _), (below, _) = map(jax.jit(losses), (-2 + 1e-4, -2 - 1e-4))
    assert score_slope == 0 and abs(slope) > 1e-3
    np.testing.assert_allclose(slope, (above - below) / 2e-4, rtol=1e-3)


@pytest.mark.parametrize("make", [jtrees.methods.soft_decision_tree, jtrees.methods.tel, jtrees.methods.latent])
def test_targets_take_the_precision_of_the_features(make, x64):
    """NumPy's targets have double precision."""
    x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    data = jtrees.Batch(x, np.sign(x[:, 0]).astype(np.float64), np.ones(64))
    method = make(2, 0.1) if make is jtrees.methods.latent else make(2)
    result = jtrees.train(method, data, key=jax.random.key(0), optimizer=optax.adam(0.01), steps=3)
    assert jnp.isfinite(result.losses).all()
    method.harden(result.params, data)
