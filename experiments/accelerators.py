"""Programs compiled for TPUs on a machine without one: kernels for a chip, a training step of each method for pods.

python -m experiments.accelerators [--write] [--only kernels pods]

Needs ``pip install libtpu``, whose compilers run on a CPU. An exit status of 1 says that a program does not compile,
or that it needs more temporary memory or moves more bytes between chips than the committed table has, by 5 %.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
import json
import math
import os
from pathlib import Path
import re
import sys
import time
from typing import Any

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_MIN_LOG_LEVEL="4", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
import optax

from experiments import benchmark
import jtrees
from jtrees import Batch, sharding, training
import pallas_kernels as kernels

TABLE = benchmark.RESULTS / "accelerators.json"
MORE = 1.05
CHIPS = ("v5e:2x2", "v6e:2x2")
SIZES = [(65_536, 32, 8, 1), (4096, 64, 8, 26), (4096, 784, 9, 10), (4096, 784, 10, 10)]  # n, p, depth, outputs
PODS = {"v5e:2x4": 8, "v5e:8x8": 64, "v5e:16x16": 256}
ROWS, FEATURES, MINI_BATCH = 4096, 64, 256  # rows of a chip, and those of them in a mini-batch
METHODS = {
    "GET, depth 6": (jtrees.methods.get(6, 15.0), None),
    "RADDT, depth 6": (jtrees.methods.raddt(6, 15.0), None),
    "DGT, depth 10": (jtrees.methods.dgt(10), MINI_BATCH),
    "LatentTree, depth 6": (jtrees.methods.latent(6, 1e-3), MINI_BATCH),
    "TEL, 10 trees, depth 6": (jtrees.methods.tel(6, 10), MINI_BATCH),
    "NonGreedy, depth 6": (jtrees.methods.nongreedy(6), MINI_BATCH),
}
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "s64": 8, "u64": 8, "f64": 8}


def collectives(text: str) -> tuple[str, int]:
    """The kinds of collectives in a compiled program, and the bytes of their results."""
    found = re.findall(
        r"= (.*?) (all-(?:reduce|gather|to-all)|collective-\w+|reduce-scatter|ragged-all-to-all)(?:-start)?\(", text
    )
    shapes = [shape for out, _ in found for shape in re.findall(r"(\w+)\[([\d,]*)\]", out)]
    size = sum(BYTES.get(kind, 0) * math.prod(map(int, dims.split(","))) if dims else 0 for kind, dims in shapes)
    return ", ".join(sorted({kind for _, kind in found})), size


def of_kernels() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The kernels and XLA's programs in their place, by names, with functions that lower them."""
    soft = lambda how, x, w, b, v: kernels.soft_routing(x, w, b, v, implementation=how).sum()
    sums = lambda how, x, w, b, v: kernels.path_sum(x, w, b, v, implementation=how).sum()
    slope = lambda fn: lambda how: jax.grad(partial(fn, how), (0, 1, 2, 3))
    programs = {
        "hard_routing": lambda how: lambda x, w, b, v: kernels.hard_routing(x, w, b, implementation=how),
        "soft_routing": lambda how: partial(soft, how),
        "gradient of soft_routing": slope(soft),
        "gradient of path_sum": slope(sums),
    }
    for chip in CHIPS:
        device = topologies.get_topology_desc(chip, platform="tpu").devices[0]
        array = lambda *shape, on=device: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=SingleDeviceSharding(on))
        for n, p, depth, k in SIZES:
            tree = array(n, p), array(2**depth - 1, p), array(2**depth - 1), array(2**depth, k)
            for name, make in programs.items():
                for how in ("xla", "tpu"):
                    size = f"{chip}, {name}, n = {n}, p = {p}, depth {depth}, k = {k}, {how}"
                    yield size, lambda make=make, how=how, tree=tree: jax.jit(make(how)).lower(*tree)


def of_pods() -> Iterator[tuple[str, Callable[[], Any]]]:
    """A training step of each method on each pod."""
    for pod, chips in PODS.items():
        devices = topologies.get_topology_desc(pod, platform="tpu").devices
        for name, (method, mini_batch) in METHODS.items():
            yield f"{pod}, {name}", partial(step, sharding.of_devices(devices), chips, method, mini_batch)


def step(mesh: jax.sharding.Mesh, chips: int, method: jtrees.Method, mini_batch: int | None) -> Any:
    """Lowers an update of a method on rows that are sharded over all chips of a mesh."""
    rows, optimizer = chips * ROWS, optax.adam(1e-2)
    spec = lambda a: PartitionSpec(sharding.DATA) if a.shape[:1] == (rows,) else PartitionSpec()
    placed = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec(a)))
    array: Any = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        data = jax.tree.map(placed, Batch(array(rows, FEATURES), array(rows)))
        key = placed(jax.eval_shape(lambda: jax.random.key(0)))
        begin = lambda data, key: training.start(method, data, key=key, optimizer=optimizer)
        state = jax.tree.map(placed, jax.eval_shape(begin, data, key))
        options: Any = {"steps": 1, "batch_size": None if mini_batch is None else chips * mini_batch}
        update = lambda state, data: training.advance(method, state, data, optimizer=optimizer, **options)
        return jax.jit(update, donate_argnums=0).lower(state, data)


def compiled(lower: Callable[[], Any]) -> dict[str, Any]:
    """What a compiled program needs: temporary bytes, those that it reads and writes, those that chips exchange."""
    begun = time.monotonic()
    try:
        program = lower().compile()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".replace("\n", " ")[:200]}
    try:
        kinds, exchanged = collectives(program.as_text())
    except jax.errors.JaxRuntimeError:  # a few programs for a single chip cannot be printed
        kinds, exchanged = "", 0
    found = {"temporary": program.memory_analysis().temp_size_in_bytes, "exchanged": exchanged, "collectives": kinds}
    moved = int(program.cost_analysis().get("bytes accessed", 0))
    return found | {"moved": moved, "seconds": round(time.monotonic() - begun, 1)}


def worse(found: dict[str, Any], before: dict[str, Any] | None) -> str:
    """What a program needs more of than the committed table has, if anything."""
    if "error" in found:
        return "" if before is not None and "error" in before else found["error"]
    if before is None or "error" in before:
        return ""
    more = [name for name in ("temporary", "exchanged") if found[name] > MORE * before[name]]
    return ", ".join(f"{found[name]} {name} bytes, {before[name]} before" for name in more)


def main(arguments: list[str] | None = None) -> None:
    """Compiles everything, and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("kernels", "pods"), default=["kernels", "pods"])
    parser.add_argument("--write", action="store_true", help="make this the committed table")
    options = parser.parse_args(arguments)
    before = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    programs = [*(of_kernels() if "kernels" in options.only else ()), *(of_pods() if "pods" in options.only else ())]
    found, failed = {}, []
    for name, lower in programs:
        found[name] = compiled(lower)
        if said := worse(found[name], before.get(name)):
            failed.append(f"{name}: {said}")
        print(name, found[name], flush=True)
    if options.write:
        _write(before | found)
    elif failed:
        sys.exit("\n".join(failed))


def _write(found: dict[str, dict[str, Any]]) -> None:
    benchmark.write_whole(Path(TABLE), json.dumps(found, indent=1) + "\n")
    megabytes = lambda one, name: f"{one[name] / 1e6:.2f}" if name in one else "-"
    said = lambda one: one.get("collectives") or one.get("error", "")
    row = lambda name, one: [name, *(megabytes(one, of) for of in ("temporary", "moved", "exchanged")), said(one)]
    rows = [row(name, one) for name, one in found.items()]
    header = ["program", "temporary MB", "MB read and written", "MB exchanged", "collectives, or the error"]
    notes = (
        "Compiled by libtpu on a CPU; nothing ran. Numbers are those of one chip. Bytes read and written are the "
        f"compiler's estimate. Of pods: one update, {ROWS} rows of {FEATURES} features a chip, by Adam; mini-batches "
        f"of {MINI_BATCH} rows a chip, GET and RADDT take all rows.\n"
    )
    benchmark.write("accelerators", "--write", header, rows, notes, committed=True)


if __name__ == "__main__":
    main()
