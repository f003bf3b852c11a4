"""The cost of streaming: train_large on shards, beside the same steps on rows in memory.

python -m experiments.bench_streaming [--write]

Each figure comes from its own process: DGT, depth 6, 64 features, mini-batches of 256 rows, one device. The run in
memory repeats sixteen rounds of rows that are on the device.
"""

import argparse
import json
import os
from pathlib import Path
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from experiments import benchmark

P, SHARDS, ROWS, MANY = 64, 4, 2**18, int(1e7)
KINDS = {"npy": [], "parquet": ["--target", "y"]}  # options of each kind of shards
EVERY = 1024  # steps between lines of metrics.jsonl
ROUNDS = 16
REPEATS = 5


def shards(folder: Path, kind: str) -> Path:
    """Writes a table as shards: a function with bends along two hyperplanes, plus noise. Returns their folder."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    planes = rng.standard_normal((P, 3), np.float32) / P**0.5
    for k in range(SHARDS):
        x = rng.standard_normal((ROWS // SHARDS, P), np.float32)
        a, b, c = (x @ planes).T
        y = (np.where(a > 0, np.abs(b), c) + 0.1 * rng.standard_normal(len(x))).astype(np.float32)
        if kind == "npy":
            np.save(folder / f"{k}.npy", np.column_stack([x, y]))
        else:
            columns = {f"x{i}": x[:, i] for i in range(P)} | {"y": y}
            pq.write_table(pa.table(columns), folder / f"{k}.parquet", row_group_size=4096)
    return folder


def in_memory(folder: str) -> list[float]:
    """Makes the same steps on rows in memory in this process, and returns the rows per second."""
    import jax

    from examples import train_large
    import jtrees

    chosen: Any = {"data": Path(folder), "target": None, "task": "regression", "method": "dgt", "set": ["depth=6"]}
    job = train_large.Job(argparse.Namespace(**train_large.COUNTS, **train_large.NUMBERS, **chosen))
    with jax.set_mesh(jtrees.sharding.mesh()):
        batches = [jtrees.sharding.join_rows(job.stream[k % job.rounds]) for k in range(ROUNDS)]
        state = jax.tree.map(jax.numpy.copy, jax.jit(job.begin)(*batches[0]))
        program = jax.jit(job.advance, donate_argnums=0).lower(state, *batches[0]).compile()
        speeds = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            for batch in batches:
                state, loss = program(state, *batch)
                loss.block_until_ready()
            speeds.append(ROUNDS * len(batches[0][0]) / (time.perf_counter() - start))
    return speeds


def run(out: Path, *arguments: Any) -> tuple[list[float], float]:
    """Runs the script; returns the rows per second of the lines after the first, and the peak memory in GB."""
    command = [sys.executable, "-W", "ignore", "-m", "examples.train_large", "--out", str(out), "--save-every", EVERY]
    process = subprocess.Popen(list(map(str, [*command, *arguments])), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"train_large ended with status {status}")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["rows_per_second"] for line in lines[1:]], usage.ru_maxrss / 1e6


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    options = benchmark.parse("bench_streaming", __doc__, arguments)
    table = benchmark.Table("data", "1000 rows/s", "of those in memory", "peak GB")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kinds = {kind: shards(folder / kind, kind) for kind in KINDS}
        memory = benchmark.isolated(in_memory, str(kinds["npy"]))
        table.add("rows in memory", benchmark.spread(memory, 1e-3), "1", "-")

        def add(label: str, kind: str, data: Path, *options: Any) -> None:
            speeds, peak = run(folder / f"run {label}", "--data", data, *KINDS[kind], *options)
            share = np.median(speeds) / np.median(memory)
            table.add(label, benchmark.spread(speeds, 1e-3), f"{share:.2f}", f"{peak:.2f}")

        for kind, data in kinds.items():
            add(f"{SHARDS} shards, {kind}", kind, data, "--epochs", 2 * REPEATS)
        (many := folder / "many").mkdir()
        for i in range(MANY * SHARDS // ROWS):  # names of the same shards, which take no room on the disk
            os.link(kinds["npy"] / f"{i % SHARDS}.npy", many / f"{i}.npy")
        add(f"{MANY:.0e} rows, npy", "npy", many)
    notes = (
        "rows/s: the median over the lines of metrics.jsonl without the first line of a run; evaluations and "
        f"checkpoints are not included. A pass moves {ROWS * P * 4 / 1e6:.0f} MB, for {MANY:.0e} rows "
        f"{MANY * P * 4 / 1e9:.2f} GB. The files of the {MANY:.0e} rows are links to the {SHARDS} shards."
    )
    benchmark.write(options, table, notes)


if __name__ == "__main__":
    main()
