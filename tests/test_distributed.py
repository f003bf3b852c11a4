"""Several processes: they find what one process with as many devices finds, stop together, and none waits for ever."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests import ROOT, compiled, sweeps
from tests.several import CASES

pytestmark = pytest.mark.slow

# Cases in which processes differ.
APART = ("without a seed", "alone", "warnings", "progress", "deadline", "folders", "missing")
APART += ("interruption", "interrupted sweep")
SOME = *(f"{name}, mesh of 2 x 2" for name in ("GET", "Boosted")), "sweep", "joined rows", "predictions"
OTHERS = tuple(case for case in CASES if case not in (*APART, *SOME))
SECONDS = 500


def started(count, folder, cases):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        where = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "tests.several", where, str(count)]
    pipes: dict = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    pipes |= {"env": os.environ | compiled.environment(), "cwd": ROOT}
    return [subprocess.Popen([*command, str(i), str(folder), *cases], **pipes) for i in range(count)]


def outputs_of(processes, seconds=SECONDS):
    """What each process printed: its lines, and the numbers of each case."""
    try:
        outputs = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [(out, numbers_of(out)) for out, _ in outputs]


def numbers_of(output):
    cases = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {name: numbers for case in cases for name, numbers in case.items()}


def compared(folder, cases):
    """The numbers of one process with four devices, and of two processes with two each."""
    [(_, single)] = outputs_of(started(1, folder, cases))
    return single, *(numbers for _, numbers in outputs_of(started(2, folder, cases)))


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    """A function of cases: the numbers of one process and of two."""
    return functools.cache(lambda cases: compared(tmp_path_factory.mktemp("several"), cases))


@pytest.mark.parametrize("case", sweeps.quick([*SOME, *OTHERS], SOME, []))
def test_two_processes_find_what_one_finds(numbers, case):
    single, *several = (result[case] for result in numbers(SOME if case in SOME else OTHERS))
    assert several[0] == several[1]
    np.testing.assert_allclose(several[0], single, rtol=1e-4, atol=1e-5)


@pytest.mark.wide
def test_a_process_alone_and_who_speaks(tmp_path):
    first, second = outputs_of(
        started(2, tmp_path, ["without a seed", "alone", "warnings", "progress", "folders", "missing"])
    )
    assert first[1]["without a seed"] == second[1]["without a seed"]
    assert not first[1]["alone"] and np.isfinite(second[1]["alone"]).all()
    assert first[1]["warnings"] == [1] and second[1]["warnings"] == [0]
    assert "loss" in first[0] and "loss" not in second[0]
    assert first[1]["folders"] == [0] and second[1]["folders"] == [1]
    assert first[1]["missing"] == [1]


@pytest.mark.wide
def test_the_earliest_deadline_ends_all(tmp_path):
    began = time.monotonic()
    first, second = outputs_of(started(2, tmp_path, ["deadline"]), 200)
    assert first[1] == second[1] and time.monotonic() - began < 150


@pytest.mark.wide
@pytest.mark.parametrize("case", ["interruption", "interrupted sweep"])
def test_ctrl_c_in_one_process_ends_all_with_one_result(tmp_path, case):
    processes = started(2, tmp_path, [case])
    assert "trains\n" in iter(processes[1].stdout.readline, "")
    processes[1].send_signal(signal.SIGINT)
    first, second = outputs_of(processes, 100)
    assert first[1] == second[1]
