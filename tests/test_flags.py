"""Flags of JAX that people set: every recipe and tool does under each what it does without; a process for each flag."""

import json
import os
from pathlib import Path
import subprocess
import sys

import compiled
import pytest

# A flag and its value in the environment. What is not here, docs/explanation/precision.md says why.
FLAGS = {
    "JAX_DEBUG_NANS": "1",
    "JAX_DEBUG_KEY_REUSE": "1",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_ENABLE_X64": "1",
    "JAX_DEFAULT_PRNG_IMPL": "rbg",
    "JAX_TRANSFER_GUARD": "log",
    "JAX_CHECK_TRACER_LEAKS": "1",
    "PYTHONWARNINGS": "error",
}
SECONDS = 900


def ended(words, **flags):
    """The error that each case whose name holds the words ended with, by name."""
    script = Path(__file__).parent / "flag_cases.py"
    environment = os.environ | compiled.environment() | {"JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0"} | flags
    command = [sys.executable, script, *words]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert made.returncode == 0, made.stderr[-2000:]
    return dict(map(json.loads, made.stdout.splitlines()))


@pytest.mark.wide
@pytest.mark.parametrize("flag", FLAGS)
def test_everything_runs_under_a_flag(flag):
    errors = ended([], **{flag: FLAGS[flag]})
    assert len(errors) > 70
    assert not {name: error for name, error in errors.items() if error is not None}


# Half a minute for all at first: each compiles its programs.
@pytest.mark.slow
@pytest.mark.parametrize("words", [["CO2", "regression", "alone"], ["TEL", "regression", "alone"], ["split"]])
def test_clean_data_has_no_nan(words):
    errors = ended(words, JAX_DEBUG_NANS="1")
    assert list(errors.values()) == [None], errors
