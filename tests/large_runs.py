"""Runs of examples.train_large, in this process and in others, and their shards."""

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
from unittest import mock

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from examples import train_large
import jtrees
from tests import ROOT, compiled

SMALL = ["--block", "500", "--blocks", "2", "--batch", "50", "--held-out", "4", "--epochs", "2"]
SMALL += ["--save-every", "100", "--set", "depth=3"]
STEPS = 720  # 36 blocks, twice, of 10 mini-batches


def table(rows, seed=0):
    """Rows of four features, with the target last."""
    x = np.random.default_rng(seed).standard_normal((rows, 4), np.float32)
    return np.column_stack([x, np.where(x[:, 0] > 0, np.abs(x[:, 1]), x[:, 2])])


def write(file, rows, **options):
    """Writes rows as a shard; in Parquet the target, "price", comes first."""
    if file.suffix == ".npy":
        np.save(aside := file.with_suffix(".new.npy"), rows)
        os.replace(aside, file)  # threads of an earlier run may still have the file mapped
        return
    columns = {"price": rows[:, -1]} | {f"x{i}": rows[:, i] for i in range(rows.shape[1] - 1)}
    pq.write_table(pa.table(columns), file, **options)


def shards(folder, kind="npy"):
    """Writes two shards of 20 blocks of 500 rows and 10 more rows each; returns the options that name them."""
    folder.mkdir()
    for k in range(2):
        write(folder / f"{k}.{kind}", table(10_010, k), **({} if kind == "npy" else {"row_group_size": 300}))
    return ["--data", str(folder), *([] if kind == "npy" else ["--target", "price"])]


def run_here(out, *arguments, status=0):
    """Returns what the example prints in this process: its errors if its status is 1."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)}
    printed, errors, result = io.StringIO(), io.StringIO(), 0
    try:
        with (
            jax.numpy_dtype_promotion("standard"),
            mock.patch("jtrees.distributed.initialize"),  # it must precede all computation
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(errors),
        ):
            train_large.main(["--out", str(out), *map(str, arguments)])
    except SystemExit as end:
        result = end.code
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert result == status, (printed.getvalue(), errors.getvalue())
    return printed.getvalue() if status in (0, os.EX_TEMPFAIL) else errors.getvalue()


def started(example, out, *arguments, devices=1, address=None, process=0):
    """Starts an example in its own process; with an address, it is one of two processes. All share programs.

    The shortest example must not warn.
    """
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment |= compiled.environment()
    if address is not None:
        environment |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(process)}
    flags = ["-W", "error"] if example == "pod" else []
    program = [sys.executable, *flags, "-m", f"examples.{example}", "--out", str(out), *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(program, **pipes, env=environment, cwd=out.parent)


def pair(example, out, *arguments):
    """Starts two processes of one run, with a device each."""
    address = free_address()
    return [started(example, out, *arguments, address=address, process=i) for i in range(2)]


def free_address():
    """Returns an address where the first of several processes can listen."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def output_of(process, status=0):
    """Waits for a process; returns what it printed, or its errors if its status is 1."""
    out, err = process.communicate(timeout=200)
    assert process.returncode == status, (out, err)
    return err if status == 1 else out


def round_of(out):
    """Returns the round of the newest complete checkpoint, or 0."""
    return max((int(path.name) for path in out.glob("checkpoints/*") if path.name.isdigit()), default=0)


def same_run(out, other):
    """Checks that two runs have the same rounds and the same model, bit for bit."""
    assert round_of(out) == round_of(other)
    same_model(out / "model.jtrees", other / "model.jtrees")


def same_model(file, other):
    """Checks that two files have the same model, bit for bit."""
    for a, b in zip(*map(jax.tree.leaves, (jtrees.load(file), jtrees.load(other))), strict=True):
        np.testing.assert_array_equal(a, b)
