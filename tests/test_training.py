"""The training loop: what it computes, in which order it looks at samples, what it keeps, and what it compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest

import jtrees
from jtrees.training import Method

DEPTH = 2
GET = jtrees.get(DEPTH, 5.0)


@pytest.fixture(scope="module")
def xy(data):
    x, y = data
    scaled = lambda a: (a - a.min(0)) / np.ptp(a, axis=0)
    return jnp.asarray(scaled(x)), jnp.asarray(scaled(y))


def run(xy, *, method=GET, key=0, learning_rate=0.5, steps=6, **options):
    key = jax.random.key(key) if isinstance(key, int) else key
    return jtrees.train(method, *xy, key=key, optimizer=optax.sgd(learning_rate), steps=steps, **options)


def assert_same(a, b, tolerance=1e-5):
    """Equal up to the rounding of products that are batched otherwise."""
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def test_full_batch_is_gradient_descent_and_its_scores_are_those_of_the_hard_trees(xy):
    result = run(xy, score_every=1)
    params = GET.init(*xy, key=jax.random.split(jax.random.key(0), 3)[0])
    step = jax.jit(jax.value_and_grad(lambda p: GET.loss(p, *xy, key=None, step=0)[0]))
    losses, scores, seen = [], [], []
    for _ in range(7):
        leaf = oracles.walk(params.weights, params.bias, xy[0])
        means = oracles.leaf_means(leaf, xy[1], 4, 0)
        loss, gradient = step(params)
        losses.append(loss)
        scores.append(np.mean((np.asarray(xy[1]) - means[leaf]) ** 2))
        seen.append(params)
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, gradient)
    assert result.losses.shape == result.scores.shape == (6,)
    np.testing.assert_allclose(result.losses, losses[:6], rtol=1e-5)
    np.testing.assert_allclose(result.scores, scores[:6], rtol=1e-5)
    assert float(result.score) == pytest.approx(min(scores), rel=1e-5)
    assert int(result.step) == int(np.argmin(scores))
    assert_same(result.params, seen[int(np.argmin(scores))])
    assert bool(result.finite)

    last = run(xy)
    assert np.isnan(last.scores).all()
    assert int(last.step) == 6
    assert_same(last.params, seen[6])
    assert float(last.score) == pytest.approx(scores[6], rel=1e-5)
    assert np.isnan(np.asarray(run(xy, score_every=4).scores)).tolist() == [False, True, True, True, False, True]


@pytest.mark.parametrize("options", [{"score_every": 2}, {"batch_size": 64, "score_every": 2}], ids=["full", "batches"])
def test_the_best_parameters_have_the_best_score(xy, options):
    result = run(xy, learning_rate=20.0, steps=12, **options)  # a rate so large that the score goes up and down
    looked = np.asarray(result.scores)[::2]
    assert np.isfinite(looked).all()
    assert np.diff(looked).max() > 0  # otherwise the last would do
    assert float(result.score) <= looked.min()
    again = GET.loss(result.params, *xy, key=None, step=0)[1]
    assert float(again) == pytest.approx(float(result.score), rel=1e-5)
    if int(result.step) < 12:
        assert float(result.scores[result.step]) == float(result.score)


def test_a_score_of_ones_own_decides(xy):
    target = 0.3
    own = lambda params: jnp.square(params.bias[0] - target)
    history = [float(run(xy, steps=i).params.bias[0]) for i in (1, 2, 3)]
    history.insert(0, float(GET.init(*xy, key=jax.random.split(jax.random.key(0), 3)[0]).bias[0]))
    result = run(xy, steps=3, score_every=1, score=own)
    np.testing.assert_allclose(result.scores, np.square(np.asarray(history[:3]) - target), rtol=1e-4)
    assert int(result.step) == int(np.argmin(np.square(np.asarray(history) - target)))


def visits(n, batch_size, steps):
    """Which samples each step visits: the loss is the sum of 2**id over the batch."""
    ids = jnp.arange(n, dtype=jnp.float32)
    loss = lambda params, x, y, *, key, step: (jnp.exp2(x[:, 0]).sum() + 0 * params, jnp.float32(0))
    method = Method(lambda x, y, *, key: jnp.float32(0), loss, None, None)
    masks = run((ids[:, None], ids), method=method, batch_size=batch_size, steps=steps).losses
    return [[i for i in range(n) if int(mask) >> i & 1] for mask in masks]


@pytest.mark.parametrize(("n", "batch_size"), [(12, 4), (11, 4), (9, 1)])
def test_an_epoch_visits_each_sample_once_in_an_order_of_its_own(n, batch_size):
    per_epoch = n // batch_size
    batches = visits(n, batch_size, 3 * per_epoch)
    assert [len(batch) for batch in batches] == [batch_size] * len(batches)
    epochs = [batches[i : i + per_epoch] for i in range(0, len(batches), per_epoch)]
    for epoch in epochs:
        seen = [i for batch in epoch for i in batch]
        assert len(set(seen)) == len(seen) == per_epoch * batch_size
    assert epochs[0] != epochs[1] != epochs[2]


def test_x_and_y_stay_together_in_a_batch(xy):
    x = jnp.arange(10, dtype=jnp.float32)
    loss = lambda params, x, y, *, key, step: (jnp.abs(x[:, 0] - y).sum() + 0 * params, jnp.float32(0))
    method = Method(lambda x, y, *, key: jnp.float32(0), loss, None, None)
    assert not run((x[:, None], x), method=method, batch_size=3, steps=6).losses.any()


def test_pure_under_jit_and_vmap_over_key_alpha_and_learning_rate(xy):
    def one(key, alpha, learning_rate):
        method = jtrees.get(DEPTH, alpha)
        return run(xy, method=method, key=key, learning_rate=learning_rate, batch_size=64, score_every=2)

    sweep = jax.random.split(jax.random.key(1), 3), jnp.asarray([1.0, 5, 20]), jnp.asarray([0.1, 0.5, 0.2])
    together, alone = jax.jit(jax.vmap(one))(*sweep), jax.jit(one)
    for i in range(3):
        assert_same(jax.tree.map(lambda a, i=i: a[i], together), alone(*(a[i] for a in sweep)), 1e-4)
    assert len(np.unique(together.score)) == 3
    assert_same(one(*(a[0] for a in sweep)), alone(*(a[0] for a in sweep)))


def test_a_second_call_compiles_nothing(xy, count_compilations):
    compiled = jax.jit(lambda key, alpha: run(xy, method=jtrees.get(DEPTH, alpha), key=key, score_every=1))
    args = [(jax.random.key(seed), jnp.float32(seed + 1)) for seed in range(2)]
    assert count_compilations(compiled, *args[0]) == 1
    assert count_compilations(compiled, *args[1]) == 0


def test_project_is_applied_after_each_step(xy):
    clipped = GET._replace(project=lambda params: params.replace(bias=jnp.clip(params.bias, -0.01, 0.01)))
    result = run(xy, method=clipped, steps=3)
    assert float(jnp.abs(result.params.bias).max()) <= 0.01
    assert float(jnp.abs(run(xy, steps=3).params.bias).max()) > 0.01


def test_the_loss_gets_the_step_and_a_key_of_its_own():
    def loss(params, x, y, *, key, step):
        return jnp.asarray(step, jnp.float32) + jax.random.uniform(key) + 0 * params, jnp.float32(0)

    method = Method(lambda x, y, *, key: jnp.float32(0), loss, None, None)
    losses = np.asarray(run((jnp.ones((2, 1)), jnp.ones(2)), method=method, steps=4).losses)
    assert np.floor(losses).tolist() == [0, 1, 2, 3]
    assert len(set((losses % 1).tolist())) == 4


def test_a_schedule_meets_steps_as_arrays_only(xy):
    schedule = lambda step: 1.0 + step.astype(jnp.float32)
    result = run(xy, method=jtrees.get(DEPTH, schedule), score_every=4)
    assert np.isfinite(result.losses).all()


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_start_of_nan_is_dropped_and_touches_no_other(xy, batch_size):
    init = lambda seed: GET.init(*xy, key=jax.random.key(seed))
    starts = [init(0), jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), init(1)), init(2)]
    one = jax.jit(lambda params: run(xy, params=params, score_every=1))
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *starts)
    many = jax.jit(lambda s: jtrees.multi_start(lambda p: run(xy, params=p, score_every=1), s, batch_size=batch_size))
    found = many(stacked)
    assert int(found.dropped) == 1
    assert found.candidates.finite.tolist() == [True, False, True]
    assert np.isinf(found.candidates.score[1])
    alone = [one(start) for start in starts]
    for i in (0, 2):
        assert_same(jax.tree.map(lambda a, i=i: a[i], found.candidates), alone[i], 1e-4)
    best = min((0, 2), key=lambda i: float(alone[i].score))
    assert int(found.index) == best
    assert_same(found.best, alone[best], 1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be at least 1"),
        ({"steps": 2.5}, "steps must be a whole number"),
        ({"score_every": -1}, "score_every must be at least 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": 201}, "batch_size must be from 1 to .* 200"),
    ],
)
def test_bad_options_are_refused(xy, options, message):
    with pytest.raises(ValueError, match=message):
        run(xy, **options)


@pytest.mark.parametrize("shapes", [((5,), (5,)), ((5, 2), (4,)), ((5, 2, 1), (5,)), ((), (5,))])
def test_bad_shapes_are_refused(shapes):
    with pytest.raises(ValueError, match="x must have shape"):
        run(tuple(jnp.ones(shape) for shape in shapes))


def test_starts_of_different_lengths_are_refused():
    for starts in [(jnp.ones(2), jnp.ones(3)), (jnp.ones(0),), (jnp.float32(1),)]:
        with pytest.raises(ValueError, match="starts must share one leading axis"):
            jtrees.multi_start(lambda *start: start, *starts)


def test_numpy_data_train_like_jax_data_in_mini_batches(data, standard_promotion):
    method, key = jtrees.get(2, 5.0), jax.random.key(0)
    fit = lambda x, y: jtrees.train(method, x, y, key=key, optimizer=optax.sgd(0.1), steps=6, batch_size=32).losses
    x, y = data
    np.testing.assert_array_equal(fit(x, y), fit(jnp.asarray(x), jnp.asarray(y)))


def test_integer_features_are_refused():
    with pytest.raises(ValueError, match="x must be of a floating dtype, got int32"):
        jtrees.train(
            jtrees.get(2, 5.0),
            jnp.ones((8, 2), jnp.int32),
            jnp.arange(8.0),
            key=jax.random.key(0),
            optimizer=optax.sgd(0.1),
            steps=1,
        )


@pytest.mark.parametrize("batch_size", [None, 4])
def test_weights_reach_the_loss_and_stay_with_their_samples(batch_size):
    def loss(params, x, y, *, key, step, sample_weight):
        return (sample_weight * jnp.exp2(y)).sum() + 0 * params, (sample_weight * y).sum()

    ids = jnp.arange(11, dtype=jnp.float32)
    method = Method(lambda x, y, *, key: jnp.float32(0), loss, None, None)
    options = {"method": method, "batch_size": batch_size, "score_every": 2}
    fit = jax.jit(lambda weight: run((ids[:, None], ids), sample_weight=weight, **options))
    every = fit(jnp.ones(11))
    alone = [fit(jnp.where(ids == i, 1.0, 0.0)) for i in range(11)]
    # Either a sample is in the batch, with its own weight, or it is not.
    for i, result in enumerate(alone):
        assert set(np.asarray(result.losses).tolist()) <= {0.0, 2.0**i}
        assert float(result.score) == i  # the score is looked at on all samples
    np.testing.assert_array_equal(sum(result.losses for result in alone), every.losses)
    assert (every.losses == 2.0**11 - 1).all() == (batch_size is None)
    np.testing.assert_array_equal(np.asarray(every.scores)[::2], 55)


def test_samples_of_weight_zero_are_left_out(xy):
    x, y = map(np.asarray, xy)
    kept = np.arange(200) % 3 > 0
    weight, some = jnp.asarray(kept, jnp.float32), (jnp.asarray(x[kept]), jnp.asarray(y[kept]))
    options = {"score_every": 1, "params": GET.init(*xy, key=jax.random.key(5))}
    with_zeros = run(xy, sample_weight=weight, **options)
    assert_same(with_zeros, run(some, **options))
    assert not np.allclose(with_zeros.losses, run(xy, **options).losses, rtol=1e-3)
    harden = jax.jit(GET.harden)
    hard = harden(with_zeros.params, *xy, sample_weight=weight)
    leaf = np.unique(hard.leaf_index(x[kept]))  # leaves without any have the mid-range of all targets
    found, expected = hard.leaves.values, harden(with_zeros.params, *some).leaves.values
    np.testing.assert_allclose(found[leaf], expected[leaf], rtol=1e-5)


def test_only_the_ratios_of_weights_count(xy):
    weight = jnp.asarray(np.random.default_rng(0).uniform(0.1, 2, 200), jnp.float32)
    results = [run(xy, sample_weight=factor * weight, score_every=1, batch_size=50) for factor in (1, 7)]
    assert_same(*results)
    ones = [run(xy, sample_weight=given, score_every=1, batch_size=50) for given in (None, np.ones(200))]
    assert_same(*ones)
    assert not np.allclose(results[0].losses, ones[0].losses, rtol=1e-3)


@pytest.mark.parametrize("weight", [jnp.ones(199), jnp.ones((200, 1)), jnp.float32(1)])
def test_weights_of_a_wrong_shape_are_refused(xy, weight):
    with pytest.raises(ValueError, match=r"sample_weight must have shape \(200,\), got"):
        run(xy, sample_weight=weight)


def test_a_method_without_weights_works_without_and_says_so_with(xy):
    loss = lambda params, x, y, *, key, step: (jnp.square(params - y).mean(), jnp.float32(0))
    method = Method(lambda x, y, *, key: jnp.float32(0), loss, None, None)
    assert np.isfinite(run(xy, method=method).losses).all()
    with pytest.raises(TypeError, match="sample_weight"):
        run(xy, method=method, sample_weight=jnp.ones(200))


def test_a_batch_without_weight_changes_nothing(xy):
    weight = jnp.zeros(200).at[jnp.asarray([3, 50])].set(1.0)
    result = run(xy, sample_weight=weight, batch_size=20, steps=20)
    assert bool(result.finite)
    assert (np.asarray(result.losses) == 0).sum() >= 16  # 10 batches an epoch, 1 or 2 of them with a sample that counts
