"""A sweep over processes: examples/sweep_pod.py resumes after the death of a process, and on hosts with shares."""

import os

import numpy as np
import pandas as pd
import pytest

import jtrees
from tests import wait_until
from tests.large_runs import output_of, pair, started

SIZE = ("--samples", 3, "--seeds", 2, "--epochs", 1)


def finished(out):
    return {path.name: path.stat().st_mtime_ns for path in (out / "runs").glob("*.json")}


@pytest.mark.wide
def test_a_sweep_whose_process_is_killed_resumes_and_repeats_no_finished_run(tmp_path):
    first, second = pair("sweep_pod", out := tmp_path / "sweep", *SIZE)
    wait_until(lambda: len(finished(out)) >= 2 or first.poll() is not None)
    before = finished(out)
    second.kill()
    _, messages = first.communicate(timeout=200)
    second.communicate()
    assert first.returncode == os.EX_TEMPFAIL, messages
    assert messages.splitlines()[-1] == "another process has ended: the same command resumes the run"
    texts = [output_of(process) for process in pair("sweep_pod", out, *SIZE)]
    assert "best of 6 runs: {" in texts[0] and "best" not in texts[1]
    assert before.items() <= finished(out).items()
    frame = pd.read_csv(out / "runs.csv")
    assert len(frame) == 3 and np.isfinite(frame.loss).all() and jtrees.load(out / "best.jtrees").tree is not None


@pytest.mark.wide
def test_hosts_with_shares_make_all_runs(tmp_path):
    for host in range(2):
        output_of(started("sweep_pod", tmp_path, *SIZE, "--share", host, 2))
    runs = finished(tmp_path)
    assert "best of 6 runs: {" in output_of(started("sweep_pod", tmp_path, *SIZE))
    assert finished(tmp_path) == runs
