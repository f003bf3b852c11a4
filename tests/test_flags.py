"""Flags of JAX that people set: every recipe and tool does under each what it does without; a process for each flag."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import jtrees
from jtrees.estimators import TreeClassifier
from tests import ROOT, compiled, recipes, sweeps
from tests.tables import BINARY, X, Y

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
KEY = jax.random.key(0)


def output(words, **flags):
    """The error that each case whose name holds the words ended with, by name."""
    environment = os.environ | compiled.environment() | {"JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0"} | flags
    command = [sys.executable, "-m", "tests.flag_cases", *words]
    process = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert process.returncode == 0, process.stderr[-2000:]
    return dict(map(json.loads, process.stdout.splitlines()))


@pytest.mark.wide
@pytest.mark.parametrize("flag", FLAGS)
def test_everything_runs_under_a_flag(flag):
    errors = output([], **{flag: FLAGS[flag]})
    assert len(errors) > 70
    assert not {name: error for name, error in errors.items() if error is not None}


SETTINGS = {
    "infinities": lambda: jax.debug_infs(True),
    "transfers": lambda: jax.transfer_guard("disallow"),
    "errors": lambda: np.errstate(all="raise"),
}


def results(name):
    recipe, x = recipes.RECIPES[name], X[:120]
    fit = jtrees.fit(recipe, x, Y[:120], key=KEY, held_out=0.2)
    swept = jtrees.sweep(recipe, x, Y[:120], key=KEY, seeds=2, validation=0.25)
    model = TreeClassifier(recipe, random_state=0).fit(x, BINARY[:120])
    return [fit.predict(x), swept.losses.ravel(), model.predict_proba(x).ravel(), model.feature_importances_]


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", ["GET", pytest.param("Boosted", marks=pytest.mark.slow)])
def test_settings_for_programs_of_the_user_change_no_fit(name):
    """The library computes as by default, also in its threads."""
    expected = results(name)
    for setting in SETTINGS.values():
        with setting():
            actual = results(name)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


# Half a minute for all at first: each compiles its programs.
@pytest.mark.parametrize("words", sweeps.slow([["CO2", "regression", "alone"], ["split"]], [["split"]]))
def test_clean_data_has_no_nan(words):
    errors = output(words, JAX_DEBUG_NANS="1")
    assert list(errors.values()) == [None], errors
