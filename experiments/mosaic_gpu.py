"""A trial of Mosaic GPU, the successor of Pallas-Triton: hard routing, compiled for an H100 on a machine without one.

python -m experiments.mosaic_gpu [--write]

``make accelerators`` installs the compilers. The table has the registers of a thread and the spilled bytes, as ptxas
prints them. Nothing runs.
"""

from functools import partial
import os
from pathlib import Path
import re
import tempfile
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from jax.experimental import pallas as pl, topologies
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from experiments import accelerators, benchmark

SAMPLES, TILE = 4096, 128  # a group of 128 threads has a tile of samples
SIZES = (("unrolled", 16, 5), ("unrolled", 16, 8), ("loop", 16, 8), ("loop", 64, 8))  # nodes, features, depth


def score(j: Any, features: list[jax.Array], weights: Any, bias: Any) -> jax.Array:
    """Returns the score of node j for the samples of a tile, ``(TILE,)``."""
    total = jnp.full((TILE,), 0.0, jnp.float32)
    for f, feature in enumerate(features):
        total += feature * weights[j, f]
    return total + bias[j]


def unrolled(features: list[jax.Array], weights: Any, bias: Any, depth: int) -> jax.Array:
    """Returns the leaves of a tile, ``(TILE,)``, from all scores, folded from the lowest level up."""
    right = [score(j, features, weights, bias) > 0 for j in range(2**depth - 1)]
    leaf: list[Any] = [0] * 2**depth
    for level in reversed(range(depth)):
        half = 2 ** (depth - 1 - level)
        sides = right[2**level - 1 : 2 ** (level + 1) - 1]
        leaf = [jnp.where(side, leaf[2 * k + 1] + half, leaf[2 * k]) for k, side in enumerate(sides)]
    return leaf[0]


def looped(features: list[jax.Array], weights: Any, bias: Any, depth: int) -> jax.Array:
    """Returns the leaves of a tile, ``(TILE,)``, by a loop over the nodes of each level."""
    layout = plgpu.Layout.WG_STRIDED((TILE,), vec_size=1)
    node = jnp.full((TILE,), 0, jnp.int32)
    for level in range(depth):

        def step(k: Any, right: jax.Array, node: Any = node, first: int = 2**level - 1) -> jax.Array:
            is_reached = node == first + k
            goes_right = score(first + k, features, weights, bias) > 0
            return jnp.where(is_reached & goes_right, jnp.float32(1), right)  # the loop does not take an integer here

        start = plgpu.layout_cast(jnp.full((TILE,), 0, jnp.float32), layout)
        node = 2 * node + 1 + jax.lax.fori_loop(0, 2**level, step, start).astype(jnp.int32)
    return node - (2**depth - 1)


def body(x: Any, weights: Any, bias: Any, leaf: Any, *, nodes: str, depth: int) -> None:
    """Writes the leaves of a tile; ``x`` is ``(features, samples)``."""
    rows, layout = pl.ds(jax.lax.axis_index("tile") * TILE, TILE), plgpu.Layout.WG_STRIDED((TILE,), vec_size=1)
    load = lambda f: plgpu.load(x.at[f, rows], (), layout=layout, optimized=False)
    route = {"unrolled": unrolled, "loop": looped}[nodes]
    leaf[rows] = route([load(f) for f in range(x.shape[0])], weights, bias, depth)


def registers(nodes: str, features: int, depth: int) -> tuple[int, int]:
    """Returns the registers of a thread and the bytes of spilled stores."""
    about, splits = accelerators.CHIPS["H100"].options, 2**depth - 1
    device = topologies.get_topology_desc(**about).devices[0]
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=SingleDeviceSharding(device))
    result = jax.ShapeDtypeStruct((SAMPLES,), jnp.int32)
    kernel = plgpu.kernel(
        partial(body, nodes=nodes, depth=depth), out_type=result, grid=(SAMPLES // TILE,), grid_names=("tile",)
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTXAS": "1"}
        with accelerators.for_gpu():
            trace = jax.jit(kernel).trace(array(features, SAMPLES), array(splits, features), array(splits))
            trace.lower(lowering_platforms=("cuda",)).compile()
        text = "".join(file.read_text() for file in Path(folder).rglob("*.ptxas"))
    used, spilled = re.search(r"Used (\d+) registers", text), re.search(r"(\d+) bytes spill stores", text)
    assert used is not None and spilled is not None, "ptxas printed no registers"
    return int(used[1]), int(spilled[1])


def main(arguments: list[str] | None = None) -> None:
    """Compiles each size and writes the table."""
    options = benchmark.parse("mosaic_gpu", __doc__, arguments)
    if not accelerators.use_cuda_compiler():
        raise SystemExit("No compiler for an H100 here: make accelerators installs it.")
    table = benchmark.Table("nodes", "features", "depth", "registers of a thread", "spilled bytes")
    for nodes, features, depth in SIZES:
        table.add(nodes, features, depth, *registers(nodes, features, depth))
    notes = "ptxas compiled the kernels for an H100 on a CPU; nothing ran."
    benchmark.write(options, table, notes)


if __name__ == "__main__":
    main()
