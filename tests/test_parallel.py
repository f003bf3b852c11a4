"""Many runs at once: the best of them, and what diverged. Over devices: test_engine, eight_devices."""

from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jtrees
from jtrees.training import Batch, Method


class Score(NamedTuple):
    """The least that a run must return, and something else."""

    score: jax.Array
    start: jax.Array


def plane_loss(params, batch, *, key, step):
    loss = jnp.square(batch.x @ params - batch.y).mean()
    return loss, loss


PLANE = Method(lambda batch, *, key: jax.random.normal(key, (2,)), plane_loss, lambda *_: None)


@pytest.fixture(scope="module")
def plane():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(11, 2))
    return Batch(*(jnp.asarray(a, jnp.float32) for a in (x, x @ [2.0, -1.0] + 0.1 * rng.normal(size=11))))


def run(data, key, learning_rate):
    return jtrees.train(PLANE, data, key=key, optimizer=optax.sgd(learning_rate), steps=4)


# Equal up to the rounding of products that are batched otherwise.
assert_same = partial(chex.assert_trees_all_close, rtol=1e-4, atol=1e-4)


def row(tree, i):
    return jax.tree.map(lambda a: a[i], tree)


@pytest.mark.parametrize("batch_size", [None, 3])
def test_a_start_that_diverges_is_dropped_and_changes_no_other(plane, batch_size):
    """Three starts, by default two of them side by side: the last batch is padded."""
    starts = jax.random.split(jax.random.key(3), 3), jnp.asarray([0.01, 1e30, 0.05])
    run_start = jax.jit(partial(run, plane))
    result = jax.jit(lambda *s: jtrees.training.multi_start(partial(run, plane), *s, batch_size=batch_size))(*starts)
    assert int(result.dropped) == 1
    assert result.candidates.finite.tolist() == [True, False, True]
    assert np.isinf(result.candidates.score[1])
    alone = [run_start(*row(starts, i)) for i in range(3)]
    for i in (0, 2):
        assert_same(row(result.candidates, i), alone[i])
    best = min((0, 2), key=lambda i: float(alone[i].score))
    assert int(result.index) == best
    assert_same(result.best, alone[best])


@pytest.mark.parametrize(
    ("scores", "index"),
    [
        ([3.0, 1.0, 2.0], 1),
        ([np.nan, 4.0, np.inf], 1),
        ([np.inf, np.nan, 5.0], 2),
        ([2.0, 1.0, 1.0], 1),  # the first of equals
        ([-np.inf, np.nan, -1.0], 0),
        ([np.nan, np.inf, np.nan], 0),  # there must be one
    ],
)
def test_the_lowest_score_is_picked(scores, index):
    scores = jnp.asarray(scores)
    result = jtrees.training.multi_start(lambda score: Score(score, score), scores)
    assert int(result.index) == index
    np.testing.assert_array_equal(result.best.start, scores[index])
    np.testing.assert_array_equal(result.candidates.score, scores)
    assert int(result.dropped) == int((~np.isfinite(scores)).sum())


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("batch_size", [None, 1, 2, 7])
def test_results_are_stacked_in_order(count, batch_size):
    starts = np.arange(count, dtype=np.float32), {"a": np.arange(2.0 * count, dtype=np.float32).reshape(count, 2)}
    result = jtrees.training.map_starts(lambda x, y: (2 * x, y["a"].sum()), *starts, batch_size=batch_size)
    np.testing.assert_array_equal(result[0], 2 * starts[0])
    np.testing.assert_array_equal(result[1], starts[1]["a"].sum(1))


@pytest.mark.parametrize("many", [jtrees.training.multi_start, jtrees.training.map_starts])
def test_bad_starts_and_batch_sizes_are_refused(many):
    for starts in [(jnp.ones(2), jnp.ones(3)), (jnp.ones(0),), (jnp.float32(1),), ([1.0, 2.0],), ()]:
        with pytest.raises(ValueError, match="starts must be arrays that share one leading axis of at least 1, got"):
            many(lambda *start: start, *starts)
    for batch_size, message in [(0, "at least 1, got 0"), (1.5, "a whole number, got 1.5")]:
        with pytest.raises(ValueError, match=f"batch_size must be {message}"):
            many(lambda start: start, jnp.ones(3), batch_size=batch_size)


@pytest.mark.parametrize("result", [lambda x: x, lambda x: {"score": x}, lambda x: Score(jnp.stack([x, x]), x)])
def test_a_run_without_a_single_score_is_refused(result):
    with pytest.raises(ValueError, match="run must return a result with a scalar score, got"):
        jax.eval_shape(partial(jtrees.training.multi_start, result), jnp.ones(3))
