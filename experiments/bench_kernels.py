"""Speed of the fused kernels beside XLA on this device: time, share of the roofline, correctness.

python -m experiments.bench_kernels [--minutes 8] [--tune] [--write]

On a GPU or a TPU, ``--tune`` first tunes each kernel on one case and checks it against XLA. Then each kernel is timed
beside XLA over sizes, depths and numbers of trees. A CPU has no kernel: only XLA is timed, at small sizes. The report
names the fastest sizes of blocks, and the cases that the time did not allow.

Operations and bytes are counted by hand. Operations are the products with the weights: one for the scores, two with
gradients, because no gradient of the samples is computed. Bytes are one read of the samples and targets and one write
of the outputs. The roofline is the larger of two times: operations over the rate of a large float32 product, and bytes
over the rate of a copy. Both rates are measured in the same run.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
import itertools
import json
import os
from pathlib import Path
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import benchmark
from jtrees import ops
from jtrees.leaves import Values
from pallas_kernels import Config
from pallas_kernels.config import HEURISTIC

IMPLEMENTATION = {"gpu": "triton", "tpu": "mosaic_tpu"}
TOLERANCE = 1e-4  # relative to the largest number: sums over many samples have another order


@dataclass(frozen=True)
class Case:
    """A size: samples, features, depth, outputs, trees that run together."""

    n: int
    p: int
    depth: int
    k: int = 1
    trees: int = 1

    @property
    def nodes(self) -> int:
        """Number of splits of a tree."""
        return 2**self.depth - 1


@dataclass(frozen=True)
class Kernel:
    """A timed function ``(implementation, x, y, weights, bias, leaves) -> arrays`` of one tree.

    Attributes:
      name: name of the kernel.
      run: the function.
      products: number of products of all weights with all samples. The scores are one product, the weights' gradient
        is another.
      hard: whether the function returns leaf numbers, which need only the splits on a sample's path.
    """

    name: str
    run: Callable[..., Any]
    products: int
    hard: bool = False

    def work(self, case: Case) -> tuple[float, float]:
        """Returns the floating-point operations and bytes that are unavoidable."""
        met = case.depth if self.hard else self.products * case.nodes
        operations = 2.0 * met * case.trees * case.p * case.n
        read = case.n * (case.p + (case.k if self.products > 1 else 0))
        numbers = self.hard or self.name == "expected_loss"
        written = case.n * case.trees * (1 if numbers else case.k if self.products == 1 else 0)
        return operations, 4.0 * (read + written)


def _soft_gradient(how: str, x: Any, y: Any, *tree: Any) -> Any:
    loss = lambda w, b, v: (ops.soft(w, b, v, x, implementation=how) * y).sum()
    return jax.grad(loss, argnums=(0, 1, 2))(*tree)


def _step(how: str, x: Any, y: Any, w: Any, b: Any, v: Any) -> Any:
    loss = lambda w, b, v: ops.expected_loss(w, b, Values(v), x, y, implementation=how)
    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(w, b, v)


def _path_sum(how: str, x: Any, y: Any, *tree: Any) -> Any:
    # The window is so wide that no score lies at its edge, where the order of additions would decide.
    loss = lambda w, b, v: (ops.path_sum(w, b, v, x, 1e3, implementation=how) * y).sum()
    return jax.grad(loss, argnums=(0, 1, 2))(*tree)


KERNELS = {
    "soft_routing": Kernel("soft_routing", lambda how, x, y, w, b, v: ops.soft(w, b, v, x, implementation=how), 1),
    "soft_routing, gradient": Kernel("soft_routing", _soft_gradient, 2),
    "expected_loss, step": Kernel("expected_loss", _step, 2),
    "path_sum, gradient": Kernel("path_sum", _path_sum, 2),
    "hard_routing": Kernel(
        "hard_routing", lambda how, x, y, w, b, v: ops.hard(w, b, x, implementation=how), 1, hard=True
    ),
}


TUNED = Case(10**6, 32, 8)


def cases(platform: str) -> list[Case]:
    """Returns the sizes, the most important first."""
    if platform == "cpu":
        return [Case(20_000, p, depth, k) for p, depth, k in ((21, 4, 1), (21, 8, 1), (128, 6, 10))]
    wide = [Case(10**7, 32, 8), Case(10**6, 21, 6, trees=16), Case(10**5, 21, 6, trees=256), Case(10**6, 21, 8)]
    wide += [Case(10**6, p, depth, k) for p, depth, k in itertools.product((21, 128), (4, 6, 8, 10), (1, 10))]
    return list(dict.fromkeys(wide))


def operands(case: Case, seed: int = 0) -> tuple[jax.Array, ...]:
    """Returns ``x, y, weights, bias, leaves``; the arrays of several trees have a leading axis of trees.

    Samples and splits are whole numbers over powers of 2. The scores are then exact in every order of additions, and no
    sample lies between two leaves.
    """
    keys = jax.random.split(jax.random.key(seed), 5)
    trees = (case.trees,) if case.trees > 1 else ()
    shapes = [(case.n, case.p), (case.n, case.k), (*trees, case.nodes, case.p), (*trees, case.nodes)]
    x, y, w, b, v = map(jax.random.normal, keys, [*shapes, (*trees, case.nodes + 1, case.k)])
    rounded = lambda a, steps: jnp.round(a * steps) / np.float32(steps)
    return rounded(x, 32), y, rounded(w / np.float32(np.sqrt(case.p)), 256), rounded(b, 2**14) + 2.0**-14, v


def program(kernel: Kernel, how: str | Config, case: Case) -> Callable[..., Any]:
    """Returns the compiled function."""
    run = lambda x, y, *tree: kernel.run(how, x, y, *tree)
    return jax.jit(jax.vmap(run, (None, None, 0, 0, 0)) if case.trees > 1 else run)


def compiled(calls: Sequence[tuple[Any, Sequence[Any]]]) -> list[tuple[Any, float]]:
    """Compiles functions for arrays of some shapes, one per processor at a time.

    Returns:
      The program or the error of each function, and the seconds of its compilation.
    """

    def build(lowered: Any) -> tuple[Any, float]:
        start = time.perf_counter()
        try:
            built = lowered if isinstance(lowered, Exception) else lowered.compile()
        except Exception as error:  # sizes that do not fit the device
            built = error
        return built, time.perf_counter() - start

    programs = []
    for call, shapes in calls:
        try:
            programs.append(call.lower(*shapes))
        except Exception as error:  # the kernel refuses the shapes
            programs.append(error)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(build, programs))


def timed(call: Callable[..., Any], arrays: tuple, seconds: float = 0.5) -> list[float]:
    """Returns the seconds of each of several calls, after two warm-up calls."""
    run = lambda: jax.block_until_ready(call(*arrays))
    run()
    once = benchmark.seconds(run, 1)[0]
    return benchmark.seconds(run, int(np.clip(seconds / once, 3, 50)))


def rates(platform: str) -> tuple[float, float]:
    """Returns floating-point operations and bytes per second of this device: a large float32 product, and a copy."""
    size, length = (1024, 2**22) if platform == "cpu" else (8192, 2**28)
    a, long = jnp.ones((size, size)), jnp.ones(length)
    product, copy = jax.jit(lambda a: jnp.matmul(a, a, precision="highest")), jax.jit(lambda a: a + 1)
    return 2 * size**3 / min(timed(product, (a,))), 8 * length / min(timed(copy, (long,)))


def agree(result: Any, expected: Any) -> bool:
    """Returns whether two results agree within ``TOLERANCE``, which allows for another order of sums.

    A few leaf numbers may differ, because a score of almost 0 may fall on either side.
    """

    def same(a: jax.Array, b: jax.Array) -> bool:
        if not jnp.issubdtype(a.dtype, jnp.floating):
            return float((a != b).mean()) < 1e-4
        finite = bool(jnp.isfinite(a).all() & jnp.isfinite(b).all())
        return finite and float(jnp.abs(a - b).max()) <= TOLERANCE * float(jnp.abs(b).max()) + 1e-6

    return all(same(a, b) for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True))


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"


def candidates(implementation: str) -> Iterator[Config]:
    """Yields the sizes to try, the heuristic's sizes first."""
    start = HEURISTIC[implementation]
    changes: list[dict[str, Any]] = [{"tile": 256}, {"tile": 1024}, {"elements": 2**16}, {"elements": 2**18}]
    if implementation == "triton":
        changes = [{"tile": 32}, {"warps": 4}, {"subtree": 4}, {"stages": 2}, {"programs": 128}]
        changes += [{"tile": 32, "warps": 4}, {"tile": 128, "warps": 8}, {"tile": 32, "subtree": 4, "warps": 4}]
    yield from (replace(start, **change) for change in [{}, *changes])


def tune(implementation: str, until: float) -> dict[str, tuple[Config, float]]:
    """Returns the fastest sizes of each kernel on one case, and their speed relative to XLA."""
    best: dict[str, tuple[Config, float]] = {}
    arrays = operands(TUNED)
    named_kernels = {
        kernel.name: kernel for kernel in KERNELS.values()
    }  # of two with one name, the last: with gradients
    for name, kernel in named_kernels.items():
        if time.monotonic() > until:
            print(f"{name}: not tuned, because the time is over", flush=True)
            continue
        configs = list(candidates(implementation))
        calls = [(program(kernel, how, TUNED), arrays) for how in ("xla", *configs)]
        (plain, _), *programs = compiled(calls)
        expected, plain_seconds = plain(*arrays), float(np.median(timed(plain, arrays, 0.1)))
        for config, (call, _) in zip(configs, programs, strict=True):
            if isinstance(call, Exception):
                print(f"{name}: {config}: {_error_text(call)}", flush=True)
                continue
            seconds, right = float(np.median(timed(call, arrays, 0.1))), agree(call(*arrays), expected)
            print(f"{name}: {config}: {1e3 * seconds:.3f} ms{'' if right else ', WRONG'}", flush=True)
            if right and (name not in best or plain_seconds / seconds > best[name][1]):
                best[name] = config, plain_seconds / seconds
    return best


def compare(jobs: Sequence[tuple[Case, str]], fused: dict[str, Any], rate: tuple[float, float]) -> Iterator[dict]:
    """Compiles XLA's program and the kernel of some cases together, and times them sequentially.

    ``fused`` maps each kernel to its implementation; it is empty on a device without kernels.
    """
    ways = ("xla", "fused") if fused else ("xla",)
    how = lambda way, name: fused[KERNELS[name].name] if way == "fused" else way
    calls = [
        (program(KERNELS[name], how(way, name), case), jax.eval_shape(partial(operands, case)))
        for case, name in jobs
        for way in ways
    ]
    programs = iter(compiled(calls))
    for case, name in jobs:
        operations, moved = KERNELS[name].work(case)
        floor = max(operations / rate[0], moved / rate[1])
        record = {"kernel": name, **asdict(case), "operations": operations, "bytes": moved, "floor": floor}
        arrays, answers = operands(case), []
        for label in ways:
            call, record[f"{label}_compile"] = next(programs)
            try:
                if isinstance(call, Exception):
                    raise call
                record[label] = timed(call, arrays)
                answers.append(call(*arrays))
            except Exception as error:  # the program exceeds the memory or was refused
                record[f"{label}_error"] = _error_text(error)
        if len(answers) == 2:
            record["agree"] = agree(answers[1], answers[0])
        yield record


def row(record: dict[str, Any]) -> list[Any]:
    """Returns a line of the table."""
    n = record["n"] * record["trees"]
    line = [record["kernel"], *(f"{record[key]:,}" for key in ("n", "p", "depth", "k", "trees"))]
    median = {label: float(np.median(record[label])) for label in ("xla", "fused") if label in record}
    for label in ("xla", "fused"):
        if label in median:
            line += [record[label], f"{record['floor'] / median[label]:.0%}", f"{record[f'{label}_compile']:.1f}"]
        else:
            line += [record.get(f"{label}_error", "-").split(":")[0], "-", "-"]
    line.append(f"{median['xla'] / median['fused']:.2f}" if len(median) == 2 else "-")
    line.append(f"{n / median['fused']:.2e}" if "fused" in median else "-")
    return [*line, {True: "yes", False: "NO"}.get(record.get("agree", ""), "-")]


HEADER = ["", "n", "p", "depth", "k", "trees", "XLA, ms", "of the roofline", "compilation, s"]
HEADER += ["kernel, ms", "of the roofline", "compilation, s", "XLA / kernel", "samples x trees a second", "agrees"]


def main(arguments: list[str] | None = None) -> None:
    """Tunes, compares, and writes the tables."""
    options = benchmark.parse("bench_kernels", __doc__, arguments, minutes=8.0, tune=False)
    start, platform = time.monotonic(), jax.default_backend()
    end, implementation = start + 60 * options.minutes, IMPLEMENTATION.get(platform)
    device = jax.devices()[0].device_kind
    rate = rates(platform)
    best = tune(implementation, start + 30 * options.minutes) if implementation and options.tune else {}
    names = {kernel.name for kernel in KERNELS.values()} if implementation else ()
    fused = {name: best[name][0] if name in best else implementation for name in names}
    file = (benchmark.RESULTS if options.write else Path("results")) / f"kernels/{device.lower().replace(' ', '-')}"
    file.parent.mkdir(parents=True, exist_ok=True)
    records, left, table = [], [], benchmark.Table(*HEADER)
    for case in cases(platform):
        if time.monotonic() > end - 30:
            left.append(str(case))
            continue
        for record in compare([(case, name) for name in KERNELS], fused, rate):
            records.append(record)
            table.add(*row(record))
            text = json.dumps({"device": device, "rates": rate, "cases": records}, indent=1)
            file.with_suffix(".json").write_text(text + "\n")
    notes = (
        f"{device}: {rate[0] / 1e12:.2f} x 10^12 floating-point operations per second in a large product, "
        f"{rate[1] / 1e9:.0f} GB per second in a copy. Medians and half the interquartile range. Compilation is "
        f"separate, of up to {os.cpu_count()} programs at once. Samples x trees per second count every tree.\n"
    )
    if best:
        size = f"depth {TUNED.depth}, p {TUNED.p}, n {TUNED.n:,}"
        notes += f"\nThe fastest sizes at {size}:\n\n"
        notes += "".join(
            f"- {name}: `{config}`, {factor:.2f} times as fast as XLA\n" for name, (config, factor) in best.items()
        )
    if implementation is None:
        notes += "\nThere is no kernel for this device: only XLA was timed.\n"
    if left:
        notes += f"\nThe time did not allow {len(left)} cases, from {left[0]} on.\n"
    benchmark.write(options, table, notes, to=f"kernels/{file.name}")


if __name__ == "__main__":
    benchmark.compile_all_programs()
    main()
