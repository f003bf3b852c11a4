"""Compiles programs for accelerators on a machine without one: kernels and sweeps for a chip, steps for TPU pods.

python -m experiments.accelerators [--write] [--only kernels pods sweeps]

``make accelerators`` installs the compilers beside the environment: libtpu for v5e and v6e, and a JAX plugin with ptxas
for an H100. The plugin needs wheels for this Python version. The compilers run on a CPU.

The exit status is 1 if a program does not compile, if registers are spilled, or if a kernel refuses a new size. It is
also 1 if a program needs over 5 % more temporary memory or moved bytes than the committed table says. A kernel that
raises ``Unsupported`` for a size is listed as refused.
"""

from collections.abc import Callable, Iterator
import contextlib
from dataclasses import replace
from functools import partial
import importlib.util
import json
import os
import sys
import time
from typing import Any, NamedTuple

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", TPU_MIN_LOG_LEVEL="4", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
import optax

from experiments import benchmark, programs
import jtrees
from jtrees import Batch, sharding, training
import pallas_kernels as kernels
from pallas_kernels import estimate
from pallas_kernels.config import HEURISTIC

TABLE = benchmark.RESULTS / "accelerators.json"
MORE = 1.05
SIZES = [(65_536, 32, 8, 1), (4096, 64, 8, 26), (4096, 784, 9, 10), (4096, 784, 10, 10), (4096, 2048, 10, 26)]
PODS = {"v5e:2x4": 8, "v5e:8x8": 64, "v5e:16x16": 256}
ROWS, FEATURES, MINI_BATCH = 4096, 64, 256  # rows per chip, features, rows of a mini-batch per chip
RUNS = (1, 64, 256, 1024)  # runs side by side
# Programs of XLA for a GPU may spill registers. The sizes of Triton products are chosen on a device, which is not here.
GPU_OPTIONS = {"xla_gpu_fail_ptx_compilation_on_register_spilling": False, "xla_gpu_enable_triton_gemm": False}


def methods() -> dict[str, tuple[jtrees.Method, int | None]]:
    """Returns the methods and the mini-batch rows per chip (None: all rows)."""
    return {
        "GET, depth 6": (jtrees.methods.get(6, 15.0), None),
        "RADDT, depth 6": (jtrees.methods.raddt(6, 15.0), None),
        "DGT, depth 10": (jtrees.methods.dgt(10), MINI_BATCH),
        "LatentTree, depth 6": (jtrees.methods.latent(6, 1e-3), MINI_BATCH),
        "TEL, 10 trees, depth 6": (jtrees.methods.tel(6, 10), MINI_BATCH),
        "NonGreedy, depth 6": (jtrees.methods.nongreedy(6), MINI_BATCH),
    }


class Chip(NamedTuple):
    """A chip to compile for: the kind of device, by which kernels are chosen, and the options of its topology."""

    kind: str
    options: dict[str, Any]

    @property
    def figures(self) -> estimate.Chip:
        """The maker's figures."""
        return estimate.CHIPS[self.kind]


# XLA's description of an H100 with 80 GB, as XLA prints it.
_H100 = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 patch: 0 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
CHIPS = {
    "v5e": Chip("TPU v5 lite", {"platform": "tpu", "topology_name": "v5e:2x2"}),
    "v6e": Chip("TPU v6 lite", {"platform": "tpu", "topology_name": "v6e:2x2"}),
    "H100": Chip(
        "NVIDIA H100",
        {"platform": "cuda", "topology_name": "h100", "topology": "1x1x1", "target_config": _H100},
    ),
}


def use_cuda_compiler() -> bool:
    """Registers the compiler for NVIDIA GPUs before XLA's first use; returns whether there is a compiler."""
    compiler = importlib.util.find_spec("nvidia.cuda_nvcc") if importlib.util.find_spec("nvidia") else None
    if compiler is None:
        return False
    folder = next(iter(compiler.submodule_search_locations or ()))
    flags = f"--xla_gpu_cuda_data_dir={folder} --xla_gpu_fail_ptx_compilation_on_register_spilling=true"
    os.environ["PATH"] = f"{folder}/bin:{os.environ['PATH']}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    return True


def kernel_programs(how: Any) -> dict[str, Callable[..., Any]]:
    """Returns the kernels, or XLA's equivalents, as functions of samples, targets and a tree."""
    soft = lambda x, *tree: kernels.soft_routing(x, *tree, implementation=how).sum()
    sums = lambda x, *tree: kernels.path_sum(x, *tree, implementation=how).sum()
    loss = lambda x, y, *tree: kernels.expected_loss(x, y, *tree, implementation=how)
    tree = (1, 2, 3)
    return {
        "hard_routing": lambda x, y, w, b, v: kernels.hard_routing(x, w, b, implementation=how),
        "soft_routing": lambda x, y, *tree: soft(x, *tree),
        "gradient of soft_routing": lambda x, y, *splits: jax.grad(soft, tree)(x, *splits),
        "gradient of path_sum": lambda x, y, *splits: jax.grad(sums, tree)(x, *splits),
        "step of expected_loss": jax.value_and_grad(loss, (2, 3, 4), has_aux=True),
    }


def kernel_compilations() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yields names and functions that compile the kernels and XLA's equivalents."""
    has_cuda = use_cuda_compiler()
    for chip, about in CHIPS.items():
        if about.figures.backend == "triton" and not has_cuda:
            print("No compiler for an H100 here.")
            continue
        device = topologies.get_topology_desc(**about.options).devices[0]
        array = lambda *shape, on=device: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=SingleDeviceSharding(on))
        for n, p, depth, k in SIZES:
            operands = array(n, p), array(n, k), array(2**depth - 1, p), array(2**depth - 1), array(2**depth, k)
            # The operations are counted in the interpreted kernel. The count does not depend on the platform.
            interpreted = kernel_programs(replace(HEURISTIC[about.figures.backend], interpret=True))
            for how in ("xla", about.figures.backend):
                for name, fn in kernel_programs(how).items():
                    size = f"{chip}, {name}, n = {n}, p = {p}, depth {depth}, k = {k}, {how}"
                    yield size, partial(kernel_costs, fn, interpreted[name] if how != "xla" else None, operands, about)


def for_gpu() -> Any:
    """Context in which programs lower for an H100. Newer versions of JAX need the kind of GPU to lower to Triton."""
    gpu = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=132, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=gpu))


def kernel_costs(
    fn: Callable[..., Any], interpreted: Callable[..., Any] | None, operands: tuple, chip: Chip
) -> dict[str, Any]:
    """Compiles a kernel and counts the operations of its interpreted version."""
    platform = chip.options["platform"]
    try:
        with for_gpu() if platform == "cuda" else contextlib.nullcontext():
            trace = jax.jit(fn).trace(*operands)
            costs = compiled(lambda: trace.lower(lowering_platforms=(platform,)))
    except kernels.Unsupported as error:
        return {"refused": str(error)}
    if interpreted is None:
        return costs
    matrix, vector = programs.operations(jax.jit(interpreted).trace(*operands))
    return costs | {"matrix": matrix, "vector": vector}


def sweep_compilations() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yields an update of many runs side by side, which share their rows, for each method and chip."""
    has_cuda = use_cuda_compiler()
    for chip in ("v5e", "H100") if has_cuda else ("v5e",):
        device = topologies.get_topology_desc(**CHIPS[chip].options).devices[0]
        for name in ("GET, depth 6", "DGT, depth 10", "TEL, 10 trees, depth 6"):
            for runs in RUNS:
                lower = partial(runs_side_by_side, device, CHIPS[chip], runs, *methods()[name])
                yield (
                    f"{chip}, {name}, runs = {runs}",
                    partial(compiled, lower, GPU_OPTIONS if chip == "H100" else None),
                )


def runs_side_by_side(device: Any, chip: Chip, runs: int, method: jtrees.Method, mini_batch: int | None) -> Any:
    """Lowers an update of many runs of a method on one chip."""
    placed = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=SingleDeviceSharding(device))
    array: Any = lambda *shape: placed(jax.ShapeDtypeStruct(shape, jnp.float32))
    optimizer, data = optax.adam(1e-2), Batch(array(ROWS, FEATURES), array(ROWS))
    begin = lambda key, data: training.start(method, data, key=key, optimizer=optimizer)
    options: Any = {"optimizer": optimizer, "steps": 1, "batch_size": mini_batch}
    update = lambda state, data: training.advance(method, state, data, **options)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), runs))
    states = jax.tree.map(placed, jax.eval_shape(jax.vmap(begin, (0, None)), keys, data))
    platform = chip.options["platform"]
    with for_gpu() if platform == "cuda" else contextlib.nullcontext():
        trace = jax.jit(jax.vmap(update, (0, None)), donate_argnums=0).trace(states, data)
        return trace.lower(lowering_platforms=(platform,))


def step_compilations() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yields a training step of each method on each pod."""
    for pod, chips in PODS.items():
        devices = topologies.get_topology_desc(pod, platform="tpu").devices
        for name, (method, mini_batch) in methods().items():
            lower = partial(step, sharding.of_devices(devices), chips, method, mini_batch)
            yield f"{pod}, {name}", partial(compiled, lower)


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


def compiled(lower: Callable[[], Any], options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Compiles a program; returns its temporary bytes, bytes read and written, and bytes exchanged between chips.

    Raises:
      Unsupported: a kernel refuses the size.
    """
    start = time.monotonic()
    try:
        program = lower().compile(options)
    except kernels.Unsupported:
        raise
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".replace("\n", " ")[:200]}
    try:
        text = program.as_text()
    except jax.errors.JaxRuntimeError:  # a few programs for a single chip cannot be printed
        text = ""
    kinds, exchanged = programs.collectives(text)
    moved = int((program.cost_analysis() or {}).get("bytes accessed", 0)) or programs.traffic(text)
    costs = {"temporary": program.memory_analysis().temp_size_in_bytes, "exchanged": exchanged, "collectives": kinds}
    return costs | {"moved": moved, "seconds": round(time.monotonic() - start, 1)}


def worse(costs: dict[str, Any], before: dict[str, Any] | None) -> str:
    """Returns a text on the excess over the committed table, or an empty text."""
    if "error" in costs:  # XLA's own programs for a GPU may spill
        return "" if before is not None and "error" in before else costs["error"]
    if before is None or "temporary" not in before:
        return ""
    if "refused" in costs:
        return costs["refused"]
    excess = [name for name in ("temporary", "exchanged", "moved") if costs[name] > MORE * before[name]]
    return ", ".join(f"{costs[name]} {name} bytes, {before[name]} before" for name in excess)


PARTS = {"kernels": kernel_compilations, "pods": step_compilations, "sweeps": sweep_compilations}


def main(arguments: list[str] | None = None) -> None:
    """Compiles all programs and writes the tables."""
    options = benchmark.parse("accelerators", __doc__, arguments, only=benchmark.several(tuple(PARTS)))
    before = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    everything = [compilation for part in options.only for compilation in PARTS[part]()]
    costs, failed = {}, []
    for name, compile_program in everything:
        costs[name] = compile_program()
        if excess := worse(costs[name], before.get(name)):
            failed.append(f"{name}: {excess}")
        print(name, costs[name], flush=True)
    if options.write:
        costs = {name: cost for name, cost in before.items() if part_of(name) not in options.only} | costs
        benchmark.write_whole(TABLE, json.dumps(costs, indent=1) + "\n")
        tables = {"kernels": (_kernels, ""), "pods": (_pods, "_pods"), "sweeps": (_sweeps, "_sweeps")}
        for part in options.only:
            report, suffix = tables[part]
            benchmark.write(options, *report(costs), to=f"accelerators{suffix}")
    elif failed:
        sys.exit("\n".join(failed))


def part_of(name: str) -> str:
    """Returns the part that compiles a program of this name."""
    return "kernels" if ", n = " in name else "sweeps" if ", runs = " in name else "pods"


def _sweeps(costs: dict[str, dict[str, Any]]) -> tuple[benchmark.Table, str]:
    """Returns the table of updates of many runs, by the number of runs."""
    table = benchmark.Table("update", "number for a run", *(f"{runs:,} runs" if runs > 1 else "1 run" for runs in RUNS))
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    for name, cost in costs.items():
        if part_of(name) == "sweeps":
            update, runs = name.split(", runs = ")
            rows.setdefault(update, {})[int(runs)] = cost
    for update, row in rows.items():
        for key, label in (("moved", "MB read and written"), ("temporary", "temporary MB")):
            cells = (row[runs] for runs in RUNS)
            per_run = [f"{cost[key] / runs / 1e6:.2f}" for runs, cost in zip(RUNS, cells, strict=True)]
            table.add(update, label, *per_run)
    notes = (
        "The compilers of the table of kernels compiled the updates on a CPU; nothing ran. An update is one step by "
        f"Adam of many runs of a method on the same {ROWS} rows of {FEATURES} features. Mini-batches have {MINI_BATCH} "
        "rows; GET takes all rows. The bytes are those of the whole program, divided by the number of runs.\n"
    )
    return table, notes


def _pods(costs: dict[str, dict[str, Any]]) -> tuple[benchmark.Table, str]:
    """Returns the table of training steps."""
    table = benchmark.Table("step", "temporary MB", "MB read and written", "MB exchanged", "collectives")
    for name, cost in costs.items():
        if part_of(name) == "pods":
            megabytes = (_megabytes(cost, key) for key in ("temporary", "moved", "exchanged"))
            table.add(name, *([cost["error"]] if "error" in cost else [*megabytes, cost.get("collectives", "")]))
    notes = (
        "libtpu compiled the steps on a CPU; nothing ran. The numbers are for one chip: temporary memory, bytes read "
        "and written (the compiler's estimate), and bytes exchanged with other chips. A step is one update by Adam on "
        f"{ROWS} rows of {FEATURES} features per chip. Mini-batches have {MINI_BATCH} rows per chip. GET and RADDT "
        "take all rows.\n"
    )
    return table, notes


def _kernels(costs: dict[str, dict[str, Any]]) -> tuple[benchmark.Table, str]:
    """Returns the table of kernels beside XLA's programs."""
    header = ["kernel", "XLA: MB moved", "temporary MB", "kernel: MB moved", "temporary MB"]
    table = benchmark.Table(*header, "products, kflop a row", "routing, kflop a row", "bound by; fewer bytes than XLA")
    for name, plain in costs.items():
        if not name.endswith(", xla"):
            continue
        chip = CHIPS[name.split(",")[0]].figures
        fused, cells = costs[name.replace(", xla", f", {chip.backend}")], [name.removesuffix(", xla")]
        cells += [_megabytes(plain, "moved"), _megabytes(plain, "temporary")]
        if "moved" not in fused:
            table.add(*cells, "refused" if "refused" in fused else fused["error"], "", "", "", "")
            continue
        n = int(name.split("n = ")[1].split(",")[0])
        # A float32 product takes six bfloat16 products. The counts of a GPU kernel already include this factor.
        passes = 6 if chip.backend == "mosaic_tpu" else 1
        seconds = {
            "products": passes * fused["matrix"] / chip.matrix,
            "routing": fused["vector"] / chip.vector,
            "memory": fused["moved"] / chip.memory,
        }
        bound = max(seconds, key=lambda name: seconds[name])
        per_row = [f"{fused[key] / n / 1e3:.1f}" for key in ("matrix", "vector")]
        fewer = "yes" if fused["moved"] < plain["moved"] else "no"
        table.add(*cells, _megabytes(fused, "moved"), _megabytes(fused, "temporary"), *per_row, f"{bound}, {fewer}")
    notes = (
        "libtpu compiled the programs for TPUs, and XLA, Triton and ptxas the programs for an H100, all on a CPU; "
        "nothing ran. The bytes on TPUs are the compiler's estimate, which pads rows to 128 features. The bytes on an "
        "H100 are the operands and results of all kernels of a program. Operations are counted in the body of the "
        "kernel. The bound of a kernel is an estimate from the makers' figures for the chip. XLA's program runs where "
        "a kernel refuses a size.\n"
    )
    return table, notes


def _megabytes(cost: dict[str, Any], name: str) -> str:
    return f"{cost[name] / 1e6:.2f}" if name in cost else "-"


if __name__ == "__main__":
    main()
