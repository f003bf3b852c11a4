"""Shared parts of the benchmarks: medians with spread, the description of the machine, and the files of the tables."""

import argparse
from collections.abc import Callable, Iterator, Mapping
import contextlib
import importlib.util
import json
import os
from pathlib import Path
import platform
import resource
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"


def use_all_cores() -> None:
    """Makes jax use one CPU device per core; starts are spread over the devices.

    Call it before any computation. The environment variable JAX_NUM_CPU_DEVICES takes precedence.
    """
    import jax

    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns a command line with the options of all benchmarks."""
    out = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--write", action="store_true", help="write to the committed experiments/results")
    return out


def seconds(fn: Callable[[], Any], repeats: int) -> list[float]:
    """Returns the wall-clock seconds of each of several calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return times


def in_turn(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Returns the seconds of compiled calls that alternate, after one warm-up call each.

    Alternation spreads other load of the machine over all calls.
    """
    import jax

    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    for _ in range(repeats):
        for name, call in calls.items():
            times[name] += seconds(lambda call=call: jax.block_until_ready(call()), 1)
    return times


def spread(times: list[float], scale: float = 1e3) -> str:
    """Returns the median and half the interquartile range, scaled (milliseconds by default)."""
    low, middle, high = np.percentile(np.asarray(times) * scale, [25, 50, 75])
    return f"{middle:.3g} ± {(high - low) / 2:.1g}"


def peak_memory() -> float:
    """Returns the peak resident memory of this process so far, GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def installed(package: str) -> bool:
    """Returns whether a package could be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def machine() -> str:
    """Returns one line on the machine and the versions."""
    import jax

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}, jax {jax.__version__}"


def child(module: str, *arguments: Any) -> dict[str, Any]:
    """Runs a module in a process of its own, which isolates memory and threads; returns the JSON it prints last."""
    command = [sys.executable, "-W", "ignore", "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[3:])} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Context of a measurement. If Ctrl-C came, it raises KeyboardInterrupt at its end.

    A fit listens for Ctrl-C, and returns the best result so far. Such a result must not be kept as a measurement.
    """
    out, into = os.pipe()
    for end in (out, into):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(into)  # receives the number of each signal, whatever the handler
    try:
        yield
        with contextlib.suppress(BlockingIOError):
            if signal.SIGINT in os.read(out, 4096):
                raise KeyboardInterrupt
    finally:
        signal.set_wakeup_fd(before)
        os.close(out)
        os.close(into)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """Returns a table in Markdown."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *rows]) + "\n"


def write_whole(file: Path, text: str) -> None:
    """Writes a temporary file and renames it: an interrupted call leaves no partial file."""
    aside = file.with_suffix(".unfinished")
    aside.write_text(text)
    os.replace(aside, file)


def write(
    name: str, arguments: str, header: list[str], rows: list[list[str]], notes: str, *, committed: bool, to: str = ""
) -> Path:
    """Prints a table with its command, and writes it to ``experiments/results`` or, by default, to ``results``.

    Args:
      name: name of the benchmark.
      arguments: arguments of the command that makes the table.
      header: heads of the columns.
      rows: rows of cells.
      notes: text below the table.
      committed: whether to write to ``experiments/results``, which is committed.
      to: name of the file without ending; the name of the benchmark by default.

    Returns:
      The file.
    """
    command = f"python -m experiments.{name} {arguments}".strip()
    text = f"# {name}\n\nMade by `{command}` on {machine()}.\n\n{markdown(header, rows)}\n{notes}\n"
    print(text)
    file = (RESULTS if committed else Path("results")) / f"{to or name}.md"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file
