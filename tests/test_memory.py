"""The memory of fits and predictions of long tables, in a process of its own."""

import json
import os
from pathlib import Path
import subprocess
import sys

import pytest

from tests import needs

STATUS = Path("/proc/self/status")
pytestmark = [pytest.mark.wide, needs.mark(STATUS.exists(), "Linux")]

ROWS, WIDTH = 300_000, 50
FEW = 30_000  # rows of a first fit, which imports what is needed, and compiles the programs of a sample
MOST = 4.0  # times the bytes of the features: a scaled copy, blocks of rows, targets, and programs of that length
# The allocator returns arrays at once, so that the memory is that of arrays in use.
TOLD = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}

CODE = """
import json, warnings
import jax
import numpy as np
import jtrees

def peak():
    with open({status!r}) as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))

def made(n):  # in blocks, so that the data are not the peak
    rng, x = np.random.default_rng(0), np.empty((n, {width}), np.float32)
    for block in np.split(x, range(10_000, n, 10_000)):
        block[:] = {far} + rng.standard_normal(block.shape, np.float32)
    return x, x[:, :4].sum(1) + np.abs(x[:, 4] - {far})

def fitted(x, y):
    jtrees.fit({recipe}, x, y, key=jax.random.key(0)).predict(x)

warnings.simplefilter("ignore", UserWarning)
x, y = made({rows})
fitted(x[:{few}], y[:{few}])
before = peak()
fitted(x, y)
print(json.dumps((peak() - before) / x.nbytes))
"""


@pytest.mark.parametrize(
    ("recipe", "far"),
    [
        ("jtrees.GET(depth=2, starts=1, epochs=20)", 100),  # far from zero, so that the tree has an origin
        ("jtrees.DGT(depth=2, epochs=1)", 0),
        ("jtrees.Boosted(rounds=3)", 0),
    ],
)
def test_a_fit_needs_little_more_than_a_scaled_copy_of_the_features(recipe: str, far: int) -> None:
    code = CODE.format(recipe=recipe, far=far, rows=ROWS, few=FEW, width=WIDTH, status=str(STATUS))
    command, environment = [sys.executable, "-c", code], os.environ | TOLD
    assert json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout) < MOST
