"""Many runs at once: the best of them, what diverged, and how they are shared out among devices."""

from functools import partial
from pathlib import Path
import subprocess
import sys
from typing import NamedTuple

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
    return jtrees.train(PLANE, data, key=key, optimizer=optax.sgd(learning_rate), steps=4, score_every=1)


def assert_same(a, b, tolerance=1e-5):
    """Equal up to the rounding of products that are batched otherwise."""
    for leaf, expected in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=tolerance, atol=tolerance)


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
        assert_same(row(result.candidates, i), alone[i], 1e-4)
    best = min((0, 2), key=lambda i: float(alone[i].score))
    assert int(result.index) == best
    assert_same(result.best, alone[best], 1e-4)


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


@pytest.mark.parametrize(
    "result",
    [
        lambda x: x,
        lambda x: {"score": x},
        lambda x: Score(jnp.stack([x, x]), x),
    ],
)
def test_a_run_without_a_single_score_is_refused(result):
    with pytest.raises(ValueError, match="run must return a result with a scalar score, got"):
        jax.eval_shape(partial(jtrees.training.multi_start, result), jnp.ones(3))


# --- Devices ---------------------------------------------------------------------------------------------------------


def table():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 2)).astype(np.float32)
    return x, np.where(x[:, 0] + x[:, 1] > 0, 2.0, -1.0) + x[:, 1]


def starts():
    """What sharing out the starts could change, by name: in this process, or in one of two devices."""
    x = table()[0]
    choose = jax.jit(partial(jtrees.training.multi_start, lambda x: Score(x.sum(), x)))
    chosen = choose(jnp.asarray([3.0, np.nan, 1.0, np.inf, 2.0]))
    pairs = jtrees.training.map_starts(lambda a, b: {"a": a @ b["b"]}, x[:3], {"b": x[3:6]}, batch_size=2)
    results = {
        "devices": jax.device_count(),
        "pairs": pairs["a"],
        "index": chosen.index,
        "dropped": chosen.dropped,
    }
    return results | chosen.candidates._asdict()


def fit():
    """The same of a whole fit."""
    fit = jtrees.fit(jtrees.GET(depth=1, starts=3, epochs=12, cart=False), *table(), key=jax.random.key(0))
    assert (fit.report.search.steps > 0).any()  # the trees have been trained
    results = {"devices": jax.device_count(), "history": fit.history, "loss": fit.loss}
    results |= {name: getattr(fit.report.search, name) for name in ("sharpness", "losses", "steps", "chosen")}
    return results | {"weights": fit.tree.weights, "bias": fit.tree.bias, "leaves": fit.tree.leaves.values}


def linear():
    """Starts whose scores take decompositions of many matrices."""
    x = np.random.default_rng(0).normal(size=(500, 21)).astype(np.float32)
    recipe = jtrees.GET(depth=2, leaves="linear", starts=4, epochs=5, halving=False, precondition=0.0)
    return {"loss": jtrees.fit(recipe, x, np.abs(x[:, 0]) + x[:, 1], key=jax.random.key(0)).loss}


def nested():
    """Runs within runs, which the devices share; and rounds of boosting, after which all trees are trained."""
    x = np.random.default_rng(0).normal(size=(120, 3)).astype(np.float32)
    y, weak = np.abs(x[:, 0]) + x[:, 1], jtrees.GET(depth=1, starts=1, epochs=4, cart="binned", halving=False)
    forest = jtrees.Bagged(jtrees.BestOf(jtrees.GET(depth=1, epochs=5), runs=2), trees=3)
    trees = jtrees.Refined(jtrees.Boosted(weak, rounds=3), epochs=5, learning_rate=0.01)
    fits = [jtrees.fit(recipe, x, y, key=jax.random.key(0)) for recipe in (forest, trees)]
    results = {"forest": fits[0].predict(x), "boosted": fits[1].report.search.losses}
    return results | {"devices": jax.device_count(), "refined": fits[1].report.search.losses}


TWO_DEVICES = """
import sys
import warnings

import jax
import numpy as np

from jtrees.report import BehindBaselineWarning

warnings.filterwarnings("ignore", category=BehindBaselineWarning)  # a few steps make no good trees
jax.config.update("jax_num_cpu_devices", 2)
import test_parallel

for name in ("starts", "fit", "linear", "nested"):
    np.savez(f"{sys.argv[1]}/{name}.npz", **getattr(test_parallel, name)())
"""


@pytest.fixture(scope="module")
def two_devices(tmp_path_factory):
    """A folder of what a process of two devices finds."""
    folder = tmp_path_factory.mktemp("two")
    command = [sys.executable, "-c", TWO_DEVICES, str(folder)]
    how = {"timeout": 300, "check": True, "cwd": Path(__file__).parent, "capture_output": True, "text": True}
    assert subprocess.run(command, **how).stderr == ""
    return folder


@pytest.mark.wide
@pytest.mark.usefixtures("standard_promotion")  # AdamW's
@pytest.mark.parametrize("results_on_devices", [starts, fit, nested])
def test_two_devices_find_what_one_finds(two_devices, results_on_devices):
    """Of three or of five starts, a share is padded, too."""
    single, double = results_on_devices(), dict(np.load(two_devices / f"{results_on_devices.__name__}.npz"))
    assert single.pop("devices") == 1 and double.pop("devices") == 2
    if results_on_devices is starts:
        assert single["index"] == 2 and single["dropped"] == 2
    assert single.keys() == double.keys()
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if results_on_devices is starts else {"rtol": 0}
    for name in single:
        np.testing.assert_allclose(double[name], single[name], **tolerance, err_msg=name)


@pytest.mark.wide
def test_decompositions_on_two_devices_do_not_wait_for_each_other(two_devices):
    """They did, for ever, when those of a device were one batch."""
    assert np.isfinite(np.load(two_devices / "linear.npz")["loss"])
