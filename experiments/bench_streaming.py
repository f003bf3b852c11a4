"""The cost of streaming: train_large on data that are generated or read during training, beside data in memory.

python -m experiments.bench_streaming [--write]

Each figure comes from a process of its own: DGT, depth 6, 64 features, mini-batches of 256 rows, one device. The run in
memory makes the same steps. It repeats sixteen rounds of rows that lie on the device.
"""

import argparse
import json
import os
from pathlib import Path
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

from experiments import benchmark

P, SHARDS, ROWS, MANY = 64, 4, 2**18, int(1e7)
METHOD = ["--set", "depth=6", "widths=[]"]
EVERY = ["--evaluate-every", "1024", "--save-every", "4096"]  # steps; a round has 16 steps
ROUNDS = 16
REPEATS = 5
SECONDS = 40


def in_memory() -> None:
    """Makes the same steps on rows in memory in this process, and prints the rows per second."""
    import jax

    from experiments import rounds as job_of, train_large
    import jtrees

    options = train_large.parse(["--out", "-", "--synthetic", f"rows={ROWS},p={P}", "--blocks", "1", *METHOD])
    with jax.set_mesh(jtrees.sharding.mesh()):
        job = job_of.prepared(options, job_of.source(options))
        state, data = job_of.first_state(job, jax.random.key(0)), job_of.stream(job)
        rounds = [jtrees.sharding.join_rows(next(data)) for _ in range(ROUNDS)]
        program = job_of.round_of(job).lower(state, *rounds[0]).compile()
        speeds = []
        for i in range(REPEATS * 4 * ROUNDS):
            if i % (4 * ROUNDS) == 0:
                start = time.perf_counter()
            state, loss = program(state, *rounds[i % ROUNDS])
            loss.block_until_ready()
            if i % (4 * ROUNDS) == 4 * ROUNDS - 1:
                speeds.append(4 * ROUNDS * options.block / (time.perf_counter() - start))
    print(json.dumps({"speeds": speeds}))


def shards(folder: Path, kind: str) -> Path:
    """Writes the rows of the same table as shards; returns their folder."""
    from experiments.blocks import Synthetic

    folder.mkdir()
    made = Synthetic(ROWS, P, 4096)
    for k in range(SHARDS):
        x, y = (np.concatenate(a) for a in zip(*(made[i] for i in range(k, len(made), SHARDS)), strict=True))
        if kind == "npy":
            np.save(folder / f"{k}.npy", np.concatenate([x, y[:, None]], 1))
        else:
            import pyarrow as pa
            import pyarrow.parquet as pq

            columns = {f"x{i}": x[:, i] for i in range(P)} | {"y": y}
            pq.write_table(pa.table(columns), folder / f"{k}.parquet", row_group_size=4096)
    return folder


def run(out: Path, *more: Any) -> tuple[float, str, list[dict[str, Any]]]:
    """Runs the script; returns its seconds, its output and its metrics."""
    command = [sys.executable, "-W", "ignore", "-m", "experiments.train_large", "--out", str(out), *METHOD, *EVERY]
    start = time.perf_counter()
    done = subprocess.run([*command, *map(str, more)], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode not in (0, os.EX_TEMPFAIL):  # --max-seconds ends with EX_TEMPFAIL
        raise RuntimeError(done.stderr[-2000:])
    return seconds, done.stdout, [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    """Prints the table."""
    parser = benchmark.parser(__doc__)
    parser.add_argument("--child", choices=("in_memory",), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        in_memory()
        return
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        memory = benchmark.child("experiments.bench_streaming", "--child", "in_memory")["speeds"]
        rows.append(["rows in memory", benchmark.spread(memory, 1e-3), "1", "-", "-"])
        kinds: dict[str, list[Any]] = {"made as needed": ["--synthetic", f"rows={ROWS},p={P}"]}
        for kind, target in (("npy", []), ("parquet", ["--target", "y"])):
            kinds[f"{SHARDS} shards, {kind}"] = ["--data", shards(folder / kind, kind), *target]
        for what, source in kinds.items():
            _, _, lines = run(folder / f"run {what}", *source, "--epochs", 2 * REPEATS)
            rows.append([what, *_figures(lines, memory)])
        _, _, lines = run(folder / "many", "--synthetic", f"rows={MANY},p={P}", *EVERY[:1], "4096")
        rows.append([f"{MANY:.0e} rows, made", *_figures(lines, memory)])
        goes_on = []
        for i in range(REPEATS):
            _, said, _ = run(folder / "resumed", *kinds["made as needed"], "--max-steps", 160 * (i + 1))
            goes_on += [float(seconds) for seconds in re.findall(r"resumes at step \d+, ([\d.]+) s", said)]
        whole, said, _ = run(
            folder / "timed", "--synthetic", f"rows={MANY},p={P}", "--epochs", 9, "--max-seconds", SECONDS
        )
    notes = [
        f"Resuming takes {benchmark.spread(goes_on, 1)} s ({len(goes_on)} times), without the start of Python and its "
        "imports. The seconds include the first rows for moments, the checkpoint and the position.",
        f"`--max-seconds {SECONDS}`: {whole:.1f} s from the start of the process to its end, imports included.",
        "rows/s: the median over the lines of metrics.jsonl without the first line of a run; evaluations and "
        f"checkpoints are not included. A pass moves {ROWS * P * 4 / 1e6:.0f} MB, for {1e7:.0e} rows "
        f"{MANY * P * 4 / 1e9:.2f} GB.",
    ]
    header = ["data", "1000 rows/s", "of those in memory", "waiting for data", "peak GB"]
    benchmark.write("bench_streaming", "--write", header, rows, "\n\n".join(notes), committed=options.write)


def _figures(lines: list[dict[str, Any]], memory: list[float]) -> list[str]:
    later = [line for line in lines if line["rows"]][1:]
    speeds = [line["rows_per_second"] for line in later]
    waited = sum(line["waited"] for line in later) / sum(line["seconds"] for line in later)
    share = np.median(speeds) / np.median(memory)
    return [benchmark.spread(speeds, 1e-3), f"{share:.2f}", f"{waited:.0%}", f"{lines[-1]['peak_gb']:.2f}"]


if __name__ == "__main__":
    main()
