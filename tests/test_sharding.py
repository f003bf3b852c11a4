"""Many devices and processes have the result of one."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import jtrees
from jtrees import sharding
from tests import ROOT, sweeps


@pytest.mark.parametrize("which", sweeps.slow(["not wide", "wide"], ["not wide"]))
def test_eight_devices(which):
    """The tests of eight_devices.py, in a process that has so many."""
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-m", which, "tests/eight_devices.py"]
    many = os.environ | {"JAX_NUM_CPU_DEVICES": "8"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=many)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_a_mesh_of_one_device(data):
    """Results are those without a mesh."""
    recipe = jtrees.DGT(depth=2, epochs=5)
    alone = jtrees.fit(recipe, *data, key=jax.random.key(0))
    with jax.set_mesh(sharding.mesh()):
        assert sharding.parts() == sharding.share_of_starts() == 1
        sharded = jtrees.fit(recipe, *data, key=jax.random.key(0))
        batch = sharding.put_rows(jtrees.Batch(*data))
        assert batch.x.sharding.spec == jax.P("data")
        np.testing.assert_allclose(sharded.tree.predict(batch.x), alone.tree.predict(data[0]), rtol=1e-6)  # of float32
    np.testing.assert_array_equal(sharded.tree.predict(data[0]), alone.tree.predict(data[0]))
    np.testing.assert_array_equal(sharded.history, alone.history)


def test_meshes_that_do_not_fit(data):
    count = jax.device_count()
    with pytest.raises(ValueError, match=f"starts x data must be the number of devices, {count}, got starts=2, data="):
        sharding.mesh(2, count)
    with pytest.raises(ValueError, match=rf"^starts must divide the number of devices, {count}, got {count + 1}$"):
        sharding.mesh(starts=count + 1)
    for starts, rest, message in (
        (0, None, "starts must be at least 1, got 0"),
        (1, "all", "data must be a whole number"),
    ):
        with pytest.raises(ValueError, match=message):
            sharding.mesh(starts, rest)
    with pytest.raises(ValueError, match="a mesh with the axis data must be in context"):
        sharding.join_rows(data)
    with (
        jax.set_mesh(sharding.mesh()),
        pytest.raises(ValueError, match=r"arrays must have one row for each sample, got lengths 199, 200"),
    ):
        sharding.put_rows((data[0], data[1][:199]))
