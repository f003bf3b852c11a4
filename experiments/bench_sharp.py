"""Speed of GET's training step where routing is sharp: only the leaves that samples reach, against all leaves.

python -m experiments.bench_sharp [--data-dir FOLDER] [--depth 9 10 12 14] [--sharpness 15 100] [--write]

A step is a step of ``jtrees.train`` with hard evaluation, in runs of two starts, on cpu-act as in bench_training. Three
calls alternate: the step that the library chooses, the step over all leaves (not at depth 14), and the unavoidable work
of a step over all leaves. This work is two matrix products, and one sigmoid per node and sample.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import benchmark
from experiments.bench_training import table
import jtrees
from jtrees import topology
from jtrees.routing import frontier, sharp
from jtrees.routing.by_level import Operands

DEEPEST = 12  # depth limit of steps over all leaves
REPEATS = 7


def reached(tree: jtrees.ObliqueTree, x: jax.Array) -> tuple[float, float]:
    """Returns the mean number of leaves that a sample reaches, and the share of skipped splits."""
    inputs, depth = Operands(x, tree.weights[None], tree.bias[None], None, None), topology.depth_of(len(tree.bias))
    paths, fits = jax.jit(lambda: frontier.explore(inputs, 64, sharp.sigmoid()))()
    if not fits:
        return np.nan, np.nan
    counts = np.asarray(paths.counts) / len(x)
    return float(counts[-1]), float(1 - counts[:-1].sum() / (2**depth - 1))


def measured(depth: int, sharpness: float, x: jax.Array, y: jax.Array) -> dict[str, Any]:
    """Returns the seconds per step and start, and the reached leaves."""
    starts, steps = max(2, jax.device_count()), 40 if depth <= 8 else 15 if depth <= 10 else 5
    keys, method = jax.random.split(jax.random.key(0), starts), jtrees.methods.get(depth, sharpness)
    how: Any = {"optimizer": optax.adamw(0.01), "score_every": 1, "steps": steps}

    def train(x, y, keys):
        run = lambda key: jtrees.train(method, jtrees.Batch(x, y), key=key, **how)
        return jtrees.training.multi_start(run, keys).best

    def floor(x, weights):
        step = lambda w, _: (w - 1e-6 * (jax.nn.sigmoid(w @ x.T) @ x), None)
        return jax.lax.scan(step, weights, None, length=steps)[0]

    tree = method.init(jtrees.Batch(x, y), key=keys[0])
    chosen = jax.jit(train).lower(x, y, keys).compile()
    calls: dict[str, Any] = {"chosen": lambda: chosen(x, y, keys)}
    if depth <= DEEPEST:
        widths = dict(sharp.WIDTHS)
        sharp.WIDTHS.clear()
        all_leaves = jax.jit(lambda *a: train(*a)).lower(x, y, keys).compile()
        sharp.WIDTHS.update(widths)
        calls["all leaves"] = lambda: all_leaves(x, y, keys)
    bottom = jax.jit(floor).lower(x, tree.weights).compile()
    calls["floor"] = lambda: bottom(x, tree.weights)
    times = benchmark.in_turn(calls, REPEATS)
    scaled = {name: [t / steps / (1 if name == "floor" else starts) for t in calls] for name, calls in times.items()}
    scaled_tree = tree.replace(weights=sharpness * tree.weights, bias=sharpness * tree.bias)
    return {"times": scaled, "reached": reached(scaled_tree, x)}


def main() -> None:
    """Measures every depth and sharpness sequentially."""
    options = benchmark.parse("bench_sharp", __doc__, depth=(9, 10, 12, 14), sharpness=(15.0, 100.0), data_dir=None)
    benchmark.use_all_cores()
    name, x, y = table(options.data_dir)
    header = ["depth", "sharpness", "leaves a sample", "splits skipped, %", "step, ms", "of all leaves, ms"]
    results = benchmark.Table(*header, "floor, ms", "step / floor")
    for depth in options.depth:
        for sharpness in options.sharpness:
            case = measured(depth, sharpness, jnp.asarray(x), jnp.asarray(y))
            times, (leaves, skipped) = case["times"], case["reached"]
            ms = times["chosen"], times.get("all leaves", "-"), times["floor"]
            ratio = benchmark.ratio(times["chosen"], times["floor"])
            results.add(depth, f"{sharpness:g}", f"{leaves:.1f}", f"{100 * skipped:.1f}", *ms, ratio)
    notes = (
        f"Milliseconds per step and start on {len(x)} x {x.shape[1]} samples of {name}: median and half the "
        "interquartile range. Leaves a sample: leaves of the initial tree with a probability above about "
        f"{sharp.TOLERANCE:g} (nan: more than 64). Splits skipped: the share of all splits of all samples that the "
        "followed paths skip. If more leaves are reached than the program can follow, the step scores all leaves."
    )
    benchmark.write(options, results, notes)


if __name__ == "__main__":
    main()
