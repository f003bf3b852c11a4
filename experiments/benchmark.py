"""Shared parts of the benchmarks: options, times, tables with medians and spread, and their files.

A benchmark parses its options, adds a row for each case to a :class:`Table`, and writes the table::

    options = benchmark.parse("bench_x", __doc__, repeats=7)
    table = benchmark.Table("case", "ours, ms", "floor, ms", "ratio")
    for case, calls in cases.items():
        times = benchmark.in_turn(calls, options.repeats)
        table.add(case, times["ours"], times["floor"], benchmark.ratio(times["ours"], times["floor"]))
    benchmark.write(options, table, "Notes.")
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
import contextlib
import importlib.util
import json
import os
from pathlib import Path
import platform
import resource
import shlex
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"


def use_all_cores() -> None:
    """Makes jax use one CPU device per core, for :func:`map_over_devices`.

    Call it before any computation. The environment variable JAX_NUM_CPU_DEVICES takes precedence.
    """
    import jax

    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)


def map_over_devices(run: Callable[..., Any], *starts: Any, batch_size: int | None = None) -> Any:
    """Returns ``run(*start)`` for every start, stacked. Each device has its share of the starts.

    ``batch_size`` is the number of starts side by side on a device; without it they follow each other.
    """
    import jax
    import jax.numpy as jnp

    total, devices = len(jax.tree.leaves(starts)[0]), jax.device_count()
    padding = -total % devices
    padded = jax.tree.map(lambda a: jnp.concatenate([a, jnp.repeat(a[-1:], padding, axis=0)]), starts)
    share = lambda share: jax.lax.map(lambda start: run(*start), share, batch_size=batch_size)
    mesh, split = jax.sharding.Mesh(jax.devices(), ("starts",)), jax.P("starts")
    results = jax.shard_map(share, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)(padded)
    return jax.tree.map(lambda a: a[:total], results)


def compile_all_programs() -> None:
    """Makes jax compile every program in this process, although an earlier process may have kept it in a folder.

    Call it before any computation.
    """
    import jax

    jax.config.update("jax_enable_compilation_cache", False)


def parse(name: str, doc: str | None, arguments: list[str] | None = None, **options: Any) -> argparse.Namespace:
    """Parses the command line of a benchmark.

    The default of an option gives its type; a sequence takes several values, and a boolean none. A dictionary has the
    arguments of ``add_argument``. The result also has ``write``, whether to write to the committed results, and
    ``command``, which repeats the run. It leaves out defaults, and shows a folder ``x_dir`` as ``X``.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write to the committed experiments/results")
    for option, default in options.items():
        how: dict[str, Any] = {"default": default, "type": str if default is None else type(default)}
        if isinstance(default, dict):
            how = default
        elif isinstance(default, bool):
            how = {"action": "store_true"}
        elif isinstance(default, (list, tuple)):
            how = {"default": list(default), "type": type(default[0]), "nargs": "+"}
        parser.add_argument(f"--{option.replace('_', '-')}", **how)
    parsed = parser.parse_args(arguments)
    words = (option_text(option, getattr(parsed, option), parser.get_default(option)) for option in options)
    parsed.name, parsed.command = name, " ".join([f"python -m experiments.{name}", *filter(None, words)])
    return parsed


def option_text(option: str, value: Any, default: Any) -> str:
    """Returns an option of a command; empty for its default. A folder ``x_dir`` is shown as ``X``."""
    flag = f"--{option.replace('_', '-')}"
    if option.endswith("_dir"):
        return f"{flag} {option.removesuffix('_dir').upper()}"
    values = [] if value is True else value if isinstance(value, list) else [value]
    return "" if value == default else shlex.join([flag, *map(str, values)])


def several(choices: Iterable[str]) -> dict[str, Any]:
    """Returns an option of :func:`parse` that takes some of the choices; all of them by default."""
    return {"nargs": "+", "choices": list(choices), "default": list(choices)}


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


def ratio(times: list[float], reference: list[float], digits: int = 2) -> str:
    """Returns the median divided by the median of a reference in the same run."""
    return f"{np.median(times) / np.median(reference):.{digits}f}"


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


def isolated(function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None) -> Any:
    """Returns the result of a function of a module in a process of its own, which isolates memory and threads.

    By default the process compiles all of its programs. Arguments and result must be JSON. The function may print
    before it returns.

    Raises:
      RuntimeError: the process failed; the message has the end of its errors.
    """
    spec = sys.modules[function.__module__].__spec__  # it has the name of a module that runs as a program, too
    assert spec is not None
    code = f"import json, sys; from {spec.name} import {function.__name__} as function; "
    code += "print(json.dumps(function(*json.loads(sys.argv[1]))))"
    command = [sys.executable, "-W", "ignore", "-c", code, json.dumps(arguments)]
    variables = {**os.environ, "JTREES_CACHE": "0", **(environment or {})}
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    if process.returncode:
        raise RuntimeError(f"{function.__name__} of {spec.name} failed:\n{process.stderr[-2000:]}")
    return json.loads(process.stdout.splitlines()[-1])


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


class Table:
    """A table of a benchmark. Each row is printed when it is added.

    Attributes:
      header: heads of the columns.
      rows: rows of cells.
    """

    def __init__(self, *header: str):
        self.header = list(header)
        self.rows: list[list[str]] = []

    def add(self, *cells: Any) -> None:
        """Adds a row; a list of seconds becomes its median and spread in milliseconds."""
        self.rows.append([spread(cell) if isinstance(cell, list) else str(cell) for cell in cells])
        print(*self.rows[-1], file=sys.stderr, flush=True)

    def __str__(self) -> str:
        return markdown(self.header, self.rows)


def write(options: argparse.Namespace, table: Table, notes: str, *, to: str = "") -> Path:
    """Prints a table with its command and notes, and writes it to ``experiments/results`` or, by default, ``results``.

    ``to`` is the name of the file without ending; by default, it is the name of the benchmark. Returns the file.
    """
    text = f"# {Path(to or options.name).name}\n\nMade by `{options.command}` on {machine()}.\n\n{table}\n{notes}\n"
    print(text)
    file = (RESULTS if options.write else Path("results")) / f"{to or options.name}.md"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file
