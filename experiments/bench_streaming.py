"""The cost of streaming: train_large on data that are generated or read during training, beside data in memory.

python -m experiments.bench_streaming [--write]

Each figure comes from a process of its own: DGT, depth 6, 64 features, mini-batches of 256 rows, one device. The run in
memory makes the same steps. It repeats sixteen rounds of rows that lie on the device.
"""

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


def in_memory() -> list[float]:
    """Makes the same steps on rows in memory in this process, and returns the rows per second."""
    import jax

    from examples.train_large import command, rounds
    import jtrees

    options = command.parse(["--out", "-", "--synthetic", f"rows={ROWS},p={P}", "--blocks", "1", *METHOD])
    with jax.set_mesh(jtrees.sharding.mesh()):
        job = rounds.prepared(options, rounds.source(options))
        state, data = rounds.first_state(job, jax.random.key(0)), rounds.stream(job)
        batches = [jtrees.sharding.join_rows(next(data)) for _ in range(ROUNDS)]
        program = rounds.round_of(job).lower(state, *batches[0]).compile()
        speeds = []
        for i in range(REPEATS * 4 * ROUNDS):
            if i % (4 * ROUNDS) == 0:
                start = time.perf_counter()
            state, loss = program(state, *batches[i % ROUNDS])
            loss.block_until_ready()
            if i % (4 * ROUNDS) == 4 * ROUNDS - 1:
                speeds.append(4 * ROUNDS * options.block / (time.perf_counter() - start))
    return speeds


def shards(folder: Path, kind: str) -> Path:
    """Writes the rows of the same table as shards; returns their folder."""
    from examples.train_large.blocks import Synthetic

    folder.mkdir()
    blocks = Synthetic(ROWS, P, 4096)
    for k in range(SHARDS):
        x, y = (np.concatenate(a) for a in zip(*(blocks[i] for i in range(k, len(blocks), SHARDS)), strict=True))
        if kind == "npy":
            np.save(folder / f"{k}.npy", np.concatenate([x, y[:, None]], 1))
        else:
            import pyarrow as pa
            import pyarrow.parquet as pq

            columns = {f"x{i}": x[:, i] for i in range(P)} | {"y": y}
            pq.write_table(pa.table(columns), folder / f"{k}.parquet", row_group_size=4096)
    return folder


def run(out: Path, *arguments: Any) -> tuple[float, str, list[dict[str, Any]]]:
    """Runs the script; returns its seconds, its output and its metrics."""
    command = [sys.executable, "-W", "ignore", "-m", "examples.train_large", "--out", str(out), *METHOD, *EVERY]
    start = time.perf_counter()
    process = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if process.returncode not in (0, os.EX_TEMPFAIL):  # --max-seconds ends with EX_TEMPFAIL
        raise RuntimeError(process.stderr[-2000:])
    return seconds, process.stdout, [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    options = benchmark.parse("bench_streaming", __doc__, arguments)
    table = benchmark.Table("data", "1000 rows/s", "of those in memory", "waiting for data", "peak GB")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        memory = benchmark.isolated(in_memory)
        table.add("rows in memory", benchmark.spread(memory, 1e-3), "1", "-", "-")
        kinds: dict[str, list[Any]] = {"made as needed": ["--synthetic", f"rows={ROWS},p={P}"]}
        for kind, target in (("npy", []), ("parquet", ["--target", "y"])):
            kinds[f"{SHARDS} shards, {kind}"] = ["--data", shards(folder / kind, kind), *target]
        for kind, source in kinds.items():
            _, _, lines = run(folder / f"run {kind}", *source, "--epochs", 2 * REPEATS)
            table.add(kind, *_figures(lines, memory))
        _, _, lines = run(folder / "many", "--synthetic", f"rows={MANY},p={P}", *EVERY[:1], "4096")
        table.add(f"{MANY:.0e} rows, made", *_figures(lines, memory))
        resumed = []
        for i in range(REPEATS):
            _, output, _ = run(folder / "resumed", *kinds["made as needed"], "--max-steps", 160 * (i + 1))
            resumed += [float(seconds) for seconds in re.findall(r"resumes at step \d+, ([\d.]+) s", output)]
        limited = ["--synthetic", f"rows={MANY},p={P}", "--epochs", 9, "--max-seconds", SECONDS]
        total, _, _ = run(folder / "timed", *limited)
    notes = [
        f"Resuming takes {benchmark.spread(resumed, 1)} s ({len(resumed)} times), without the start of Python and its "
        "imports. The seconds include the first rows for moments, the checkpoint and the position.",
        f"`--max-seconds {SECONDS}`: {total:.1f} s from the start of the process to its end, imports included.",
        "rows/s: the median over the lines of metrics.jsonl without the first line of a run; evaluations and "
        f"checkpoints are not included. A pass moves {ROWS * P * 4 / 1e6:.0f} MB, for {1e7:.0e} rows "
        f"{MANY * P * 4 / 1e9:.2f} GB.",
    ]
    benchmark.write(options, table, "\n\n".join(notes))


def _figures(lines: list[dict[str, Any]], memory: list[float]) -> list[str]:
    later = [line for line in lines if line["rows"]][1:]
    speeds = [line["rows_per_second"] for line in later]
    waited = sum(line["waited"] for line in later) / sum(line["seconds"] for line in later)
    share = np.median(speeds) / np.median(memory)
    return [benchmark.spread(speeds, 1e-3), f"{share:.2f}", f"{waited:.0%}", f"{lines[-1]['peak_gb']:.2f}"]


if __name__ == "__main__":
    main()
