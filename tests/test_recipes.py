"""A fit from the arguments to the report: rounds, Ctrl-C, deadlines, progress, errors. The recipes: test_battery."""

import builtins
import contextlib
from functools import partial
import os
import signal
import threading

import jax
import numpy as np
import pytest

import jtrees
from jtrees.data import Scaling
from jtrees.search import monitor, result
from jtrees.search.monitor import Monitor
from jtrees.tables import checked_table
from tests.polynomials import Polynomials, initial, mse
from tests.problems import problem_of, run as results_of

KEY = jax.random.key(0)
ENDLESS = Polynomials(steps=10_000_000)


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (64, 2))  # 64: a bucket, so that nothing is padded
    return x, 3 + x[:, 0] - 2 * x[:, 0] ** 2


def fit(table, recipe=None, **options):
    return jtrees.fit(recipe or Polynomials(), *table, key=KEY, **options)


def test_a_fit_has_the_losses_before_its_updates(table):
    result = fit(table)
    assert result.step == 103 and result.report.ended == "finished"
    assert result.history.shape == (103,) and np.isfinite(result.history).all()  # no tail of NaN
    checked = checked_table(*table, None, "regression")
    batch = Scaling.fit(checked).batch(checked)
    problem = problem_of(Polynomials(), batch, key=KEY)

    async def coefficients():
        return (await problem.map(initial)).host[0]

    [first] = results_of(coefficients(), engine=problem.engine)
    np.testing.assert_allclose(result.history[0], mse(first, batch), rtol=1e-6)
    np.testing.assert_array_equal(result.predict(table[0]), result.model.predict(table[0]))
    assert result.loss == pytest.approx(np.mean((result.predict(table[0]) - table[1]) ** 2), rel=1e-12)


@contextlib.contextmanager
def handler_of_ours():
    got = []
    handler = lambda *_: got.append(1)
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield handler, got
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_a_fit_with_the_best_so_far(table, monkeypatch):
    took, trains = monitor.Pace.took, threading.Event()

    def announced(pace, steps, *times):
        took(pace, steps, *times)
        if steps >= 100:
            trains.set()

    monkeypatch.setattr(monitor.Pace, "took", announced)
    with handler_of_ours() as (ours, got):

        def press():
            assert trains.wait(60)
            os.kill(os.getpid(), signal.SIGINT)

        presses = threading.Thread(target=press)
        presses.start()
        result = fit(table, ENDLESS)
        presses.join()
        assert signal.getsignal(signal.SIGINT) is ours
        assert not got
    assert result.report.ended == "interrupted" and ", ended=interrupted, " in repr(result)
    assert 0 < result.step == len(result.history) < ENDLESS.steps
    assert np.isfinite(result.history).all()
    assert result.loss < 0.3 * np.var(table[1])  # after one round it is far below


def test_a_second_ctrl_c_raises_and_the_handler_is_restored(table):
    watched = Monitor()
    with handler_of_ours() as (ours, got):
        with pytest.raises(FloatingPointError):
            fit(table, Polynomials(learning_rate=1e30))
        assert signal.getsignal(signal.SIGINT) is ours
        with pytest.raises(KeyboardInterrupt), watched.interruptible():
            signal.raise_signal(signal.SIGINT)
            assert watched.ended == "interrupted" and not watched.has_time()
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is ours
        signal.raise_signal(signal.SIGINT)
        assert got == [1]


def test_fits_run_in_other_threads(table):
    before, results = signal.getsignal(signal.SIGINT), []
    threads = [threading.Thread(target=lambda: results.append(fit(table))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(results[0].history, results[1].history)
    assert results[0].report.ended == "finished"
    assert signal.getsignal(signal.SIGINT) is before


def test_progress_without_rich_is_some_lines(table, capsys, monkeypatch):
    fit(table)
    assert capsys.readouterr().out == ""  # nothing unless it is asked for
    real = builtins.__import__

    def without_rich(name, *args, **options):
        if name.startswith("rich"):
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    monkeypatch.setattr(monitor.Pace, "steps", lambda pace, limit: min(limit, 2))
    result = fit(table, progress=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[-1] == f"Polynomials: 103 of 103, loss {result.history[-1]:.4g}, 0 s left"
    jtrees.sweep(Polynomials(), *table, grid={"learning_rate": (0.1, 1e30)}, key=KEY, progress=True)
    assert capsys.readouterr().out.splitlines()[-1].endswith(", 1 of 2 runs, 0 s left")


GRID = {"depth": (1, 2)}
RUNS = {"fit": jtrees.fit, "tune": partial(jtrees.tune, grid=GRID), "sweep": partial(jtrees.sweep, grid=GRID)}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe": 3}, r"recipe must be a recipe, such as jtrees.GET\(depth=4\), got 3"),
        ({"key": 0}, r"key must be a random key, such as jax.random.key\(0\), got 0"),
        ({"key": jax.random.split(KEY, 2)}, r"key must be one random key, got keys of shape \(2,\)"),
        ({"y": None}, "y must hold the targets to learn, got None"),
        ({"sample_weight": np.ones(3)}, r"sample_weight must have shape \(64,\)"),
        ({"task": "ranking"}, "task must be one of 'regression', 'classification', or a task .*, got 'ranking'"),
        ({"validation": (np.ones((3, 2)),)}, r"validation must be \(x, y\) or \(x, y, sample_weight\), got tuple"),
        ({"validation": (np.ones((3, 9)), np.ones(3))}, "validation: x must have 2 columns, got 9"),
        ({"validation": (np.array([[1, "a"]], object), [1])}, r"validation: x must be numeric, .* 'a' at \(0, 1\): pa"),
    ],
)
def test_bad_arguments_are_refused_by_whatever_fits(table, run, change, message):
    arguments = {"recipe": Polynomials(), "x": table[0], "y": table[1], "key": KEY} | change
    with pytest.raises(ValueError, match=message):
        RUNS[run](**arguments)


@pytest.mark.parametrize("run", ["fit", "tune"])
def test_a_deadline_is_one_number(table, run):
    with pytest.raises(ValueError, match=r"max_seconds must be one number, got shape \(1,\)"):
        RUNS[run](Polynomials(), *table, key=KEY, max_seconds=[1.0])


def test_functions_are_described_by_their_names_and_arguments():
    described = partial(jtrees.methods.get, 3, task=jtrees.Classification(3), rule=mse)
    expected = "jtrees.methods.annealed.get.get(3, task=Classification(classes=3), rule=tests.polynomials.mse)"
    plain = result.plain({"make": described, "others": (mse, None)})
    assert plain == {"make": expected, "others": ["tests.polynomials.mse", None]}
