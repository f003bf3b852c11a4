"""A sweep over processes: examples/sweep_pod.py resumes after the death of a process, and on hosts with shares."""

import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

import jtrees
from tests import ROOT, wait_until
from tests.large_runs import free_address, output_of

SIZE = ("--samples", 3, "--seeds", 2, "--epochs", 1)


def started(out, *arguments, address=None, process=0):
    """The example in its own process; with an address, it is a process of two."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    if address is not None:
        environment |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(process)}
    command = [sys.executable, str(ROOT / "examples" / "sweep_pod.py"), "--out", out, *SIZE, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(list(map(str, command)), **pipes, env=environment)


def finished(out):
    return {path.name: path.stat().st_mtime_ns for path in (out / "runs").glob("*.json")}


@pytest.mark.wide
def test_a_sweep_whose_process_is_killed_resumes_and_repeats_no_finished_run(tmp_path):
    out, address = tmp_path / "sweep", free_address()
    first, second = (started(out, address=address, process=i) for i in range(2))
    wait_until(lambda: len(finished(out)) >= 2 or first.poll() is not None)
    before = finished(out)
    second.kill()
    _, messages = first.communicate(timeout=200)
    second.communicate()
    assert first.returncode == os.EX_TEMPFAIL, messages
    assert messages.splitlines()[-1] == "another process has ended: the same command resumes the run"
    address = free_address()
    texts = [output_of(process) for process in [started(out, address=address, process=i) for i in range(2)]]
    assert "best of 6 runs: {" in texts[0] and "best" not in texts[1]
    assert before.items() <= finished(out).items()
    frame = pd.read_csv(out / "runs.csv")
    assert len(frame) == 3 and np.isfinite(frame.loss).all() and jtrees.load(out / "best.jtrees").tree is not None


@pytest.mark.wide
def test_hosts_with_shares_make_all_runs(tmp_path):
    for host in range(2):
        output_of(started(tmp_path, "--share", host, 2))
    runs = finished(tmp_path)
    assert "best of 6 runs: {" in output_of(started(tmp_path))
    assert finished(tmp_path) == runs
