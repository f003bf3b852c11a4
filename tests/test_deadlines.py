"""Deadlines: the clock divides training into short calls, and drops optional work when the time is up."""

import os
import signal
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest

import jtrees
from jtrees import warmstart
from jtrees.report.comparison import Comparison
from jtrees.search import monitor
from jtrees.search.monitor import Monitor, Pace
from jtrees.training import Batch
from tests import sweeps
from tests.recipes import DGT, GET, LINEAR, RECIPES
from tests.tables import X, Y

search_fit = sys.modules["jtrees.search.fit"]

KEY = jax.random.key(0)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless it is moved."""
    clock = types.SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(monitor, "time", clock)
    return clock


def test_calls_grow_up_to_half_a_second(clock):
    pace, steps = Pace(Monitor()), []
    for _ in range(6):
        steps.append(pace.steps(10_000))
        pace.took(steps[-1], steps[-1] / 1000, compiled=False)
    assert steps == [1, 8, 64, 500, 500, 500]


def test_a_compilation_predicts_nothing(clock):
    pace = Pace(Monitor(deadline=1.0))
    pace.took(pace.steps(100), 30.0, compiled=True)
    assert pace.steps(100) == 1
    pace.took(1, 0.01, compiled=False)
    assert pace.steps(100) == 8


def test_steps_end_before_the_deadline(clock):
    pace = Pace(Monitor(deadline=1.0))
    pace.took(1, 0.1, compiled=False)
    assert pace.steps(100) == 5
    clock.now = 0.75
    assert pace.steps(100) == 2
    pace = Pace(Monitor(deadline=1.0))
    pace.took(1, 0.1, compiled=False)
    clock.now = 0.95
    assert pace.steps(100) == 1  # one call may end late


def test_parts_of_the_time_end_alone_and_with_the_whole(clock):
    total = Monitor(deadline=10.0)
    part = total.within(0.5).within(0.5)
    clock.now = 3.0
    assert part.left() == -0.5 and not part.has_time() and total.has_time()
    other = total.within(0.5)
    total.ended = "interrupted"
    assert not other.has_time() and other.ended == "interrupted"
    endless = Monitor()
    part = endless.within(0.5)
    assert part.left() == np.inf and part.has_time()
    endless.ended = "interrupted"
    assert not part.has_time() and part.ended == "interrupted"


def test_the_end_of_a_fit_may_be_late_by_a_tenth(clock):
    late, capped = Monitor(deadline=10.0, seconds=10.0), Monitor(deadline=10.0, seconds=10.0)
    late.reserve(3.0)
    capped.reserve(100.0)
    assert late.left() == 7.0 and capped.left() == 5.0  # at most half of the time is kept
    brief = Monitor(deadline=10.0)
    brief.reserve(0.25)
    assert brief.left() == 9.75
    past = Monitor(deadline=-4.0)
    past.reserve(1.0)
    assert past.left() == -4.0  # a deadline that has passed stays
    clock.now = 11.0
    assert not late.has_time() and late.may_be_late()
    clock.now = 11.5
    assert not late.may_be_late() and Monitor().may_be_late()


LONGER = {"GET": {"starts": 6, "epochs": 60}, "DGT": {"epochs": 30, "precondition": 0.9}}


@pytest.mark.slow
@pytest.mark.parametrize("name", sweeps.slow(RECIPES, ["GET", "DGT", "Boosted"]))
@pytest.mark.usefixtures("standard_promotion")
def test_a_result_does_not_depend_on_how_the_clock_divides_updates(name, monkeypatch):
    fits = []
    for seed in range(3):
        draw = np.random.default_rng(seed)
        monkeypatch.setattr(Pace, "steps", lambda pace, limit, draw=draw: int(draw.integers(1, limit + 1)))
        fits.append(jtrees.fit(RECIPES[name].replace(**LONGER.get(name, {})), X, Y, key=KEY))
    for other in fits[1:]:
        np.testing.assert_array_equal(fits[0].history, other.history)
        np.testing.assert_array_equal(fits[0].predict(X), other.predict(X))
        assert fits[0].step == other.step and fits[0].report.ended_at == other.report.ended_at


LATE = {
    "GET": jtrees.GET(),
    "CO2": jtrees.CO2(),
    "LatentTree": jtrees.LatentTree(),
    "Bagged": jtrees.Bagged(jtrees.DGT(), trees=10),
    "Polished": jtrees.Polished(jtrees.GET()),
}


@pytest.mark.exact
@pytest.mark.skipif(bool(os.environ.get("XLA_FLAGS")), reason="in machine code as users get it")
@pytest.mark.parametrize(("rows", "columns"), [(100_000, 10), pytest.param(1_000, 2_000, marks=pytest.mark.wide)])
@pytest.mark.parametrize("name", sweeps.slow(LATE, ["GET", "Bagged"]))
@pytest.mark.filterwarnings("ignore")
def test_a_fit_ends_in_time(name, rows, columns, standard_promotion):
    """The last fit, which compiles nothing; two seconds more for a machine with other work."""
    # The deadline of a slow first fit leaves programs uncompiled.
    jtrees.warmup(LATE[name], rows=rows, columns=columns)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, columns)).astype(np.float32)
    y = np.sin(x[:, 0]) + x[:, 1] * x[:, 2]
    for _ in range(2):
        began = time.monotonic()
        fit = jtrees.fit(LATE[name], x, y, key=KEY, max_seconds=4)
        took = time.monotonic() - began
    assert took < 1.1 * 4 + 0.5 + 2.0
    assert fit.report.seconds <= took and fit.report.ended_at
    assert np.isfinite(fit.predict(x[:100])).all()


def test_more_classes_than_features_shorten_the_sample_that_is_timed(clock):
    batch, sizes = Batch(np.zeros((10_000, 4)), np.arange(10_000), None), []

    def work(rows):
        sizes.append(len(rows.y))
        clock.now += 1

    for outputs in (3, 1000):
        Monitor(deadline=0.0).on_rows(work, batch, outputs)
    assert sizes == [10_000, 262]
    narrow = Batch(np.zeros((200_000, 1)), np.arange(200_000), None)
    Monitor(deadline=0.0).on_rows(work, narrow)  # one feature and one output: the sample is longer than the table
    assert sizes[2:] == [200_000]


def test_work_takes_so_many_rows_as_there_is_time_for(clock):
    batch, sizes = Batch(np.arange(100_000.0)[:, None] * np.ones(64), np.arange(100_000), None), []

    def work(rows):
        np.testing.assert_array_equal(rows.x[:, 7], rows.y)
        sizes.append(len(rows.y))
        clock.now += len(rows.y) / 4096  # seconds

    for seconds in (1, 11, 100):  # the sample of 4096 rows takes the first second
        clock.now = 5.0
        Monitor(deadline=5.0 + seconds).on_rows(work, batch)
    Monitor().on_rows(work, batch)
    assert sizes == [4096, 4096, 40_960, 4096, 100_000, 100_000]


def test_imports_are_not_on_the_clock(clock, monkeypatch):
    """What ran before in a process would otherwise decide what a fit finds."""

    def import_packages():
        clock.now += 100

    monkeypatch.setattr(warmstart, "import_packages", import_packages)
    monkeypatch.setattr(search_fit, "time", clock)
    fit = jtrees.fit(DGT, X, Y, key=KEY, max_seconds=50)
    assert clock.now == 100 and fit.report.ended == "finished" and fit.report.seconds == 0


@pytest.mark.slow
def test_importing_the_packages_imports_scikit_learn():
    code = "import sys; from jtrees import warmstart; warmstart.import_packages(); print('sklearn.tree' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "True"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jtrees.report.BehindBaselineWarning")
def test_leaves_are_constant_if_the_time_is_too_short_for_linear_leaves():
    x = np.random.default_rng(0).normal(size=(30_000, 64))
    with pytest.warns(UserWarning, match="too short for linear leaves"):
        fit = jtrees.fit(LINEAR, x, x[:, 0], key=KEY, max_seconds=0.5)
    assert fit.tree.leaves.is_constant and np.isfinite(fit.loss)
    assert not jtrees.fit(LINEAR, X, Y, key=KEY, max_seconds=60).tree.leaves.is_constant


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_many_classes_have_no_start_from_a_ridge_regression():
    """CART on k outputs of k classes takes a time of k^2: minutes for a thousand classes."""
    x = np.random.default_rng(0).normal(size=(1000, 4))
    y = np.arange(1000) % 300
    fit = jtrees.fit(GET.replace(starts=2), x, y, key=KEY, task="classification")
    assert np.isnan(fit.report.search.ridge_loss) and np.isfinite(fit.loss)


def test_time_that_a_fit_reserves_is_not_lost_for_the_next_fit(clock):
    monitor = Monitor(deadline=75.0)
    for _ in range(8):
        with monitor.fitting():
            monitor.reserve(5.0)
            assert monitor.left() == 70.0
    assert monitor.left() == 75.0


def test_a_part_that_the_deadline_cuts_is_in_the_report(clock):
    monitor = Monitor(deadline=10.0)
    with monitor.fitting():
        assert monitor.may_be_late() and monitor.reported_end == "finished"
        assert not monitor.may_be_late(60.0)
        assert (monitor.ended, monitor.reported_end) == ("finished", "max_seconds") and monitor.has_time()
    with monitor.fitting():
        assert monitor.reported_end == "finished"


def test_ctrl_c_during_the_comparison_keeps_the_fit(monkeypatch):
    def slow(*_, **__):
        signal.raise_signal(signal.SIGINT)
        return Comparison(
            {"model": 1.0, "linear": 2.0, "constant": 3.0}, "loss", "rows", {"linear": 0.1, "constant": 0.1}
        )

    monkeypatch.setattr("jtrees.search.fit._comparison", slow)
    fit = jtrees.fit(jtrees.DGT(depth=1, epochs=2, widths=()), X, Y, key=jax.random.key(0))
    assert fit.step > 0 and fit.report.ended == "interrupted"
