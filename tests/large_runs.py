"""Runs of examples.train_large, in this process and in others, and what is left of them."""

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp

from examples.train_large import command
from examples.train_large.blocks import Synthetic
import jtrees
from tests import ROOT, compiled

SMALL = ["--synthetic", "rows=20000,p=4", "--block", "500", "--batch", "50", "--held-out", "4", "--epochs", "2"]
SMALL += ["--evaluate-every", "100", "--save-every", "100", "--set", "depth=3", "widths=[]"]
STEPS = 720  # 36 blocks, twice, of 10 mini-batches


def within(out, *more, status=0):
    """What the script says in this process, from its beginning to its end."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    said, wrong = io.StringIO(), io.StringIO()
    try:
        with (
            jax.numpy_dtype_promotion("standard"),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(wrong),
        ):
            ended_with = command.main(["--out", str(out), *map(str, more)])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    sys.stderr.write(wrong.getvalue())
    assert ended_with == status, (said.getvalue(), wrong.getvalue())
    return wrong.getvalue() if status == 1 else said.getvalue()


def script(out, *more, devices=1):
    """The script in a process of its own, which has begun; all of them share compiled programs."""
    told = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    told |= compiled.environment()
    program = [sys.executable, "-m", "examples.train_large", "--out", str(out), *map(str, more)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(program, **pipes, env=told, cwd=out.parent)


def free_address():
    """Where the first of several processes can listen."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def ended(process, status=0):
    """What it said."""
    out, err = process.communicate(timeout=200)
    assert process.returncode == status, (out, err)
    return err if status == 1 else out


def parameters(out):
    """The last checkpoint: all of its arrays, bit for bit."""
    step = max(int(path.name) for path in (out / "checkpoints").iterdir() if path.name.isdigit())
    with ocp.StandardCheckpointer() as reader:
        file = out / "checkpoints" / str(step) / "tree"
        shapes = reader.metadata(file).item_metadata
        tree = reader.restore(file, {name: np.zeros(a.shape, a.dtype) for name, a in shapes.items()})
    assert len(tree) > 10
    return step, tree


def same_run(one, other, steps=STEPS, features=4):
    """Bit-identical parameters, and the same model."""
    (step, a), (other_step, b) = parameters(one), parameters(other)
    assert step == other_step == steps and a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    x, _ = Synthetic(rows=100, p=features, block=100, seed=1)[0]
    answers = [jtrees.load(out / "model.jtrees").model.predict(x) for out in (one, other)]
    np.testing.assert_array_equal(*answers)


def steps_of(out):
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
