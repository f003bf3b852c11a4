"""Speed and memory of non-greedy trees: a training step by depth, with fast, stable and exact inference (Figure 4).

python -m experiments.bench_nongreedy [--repeats 9] [--write]

Splits are random; batches are 256 of 2560 samples with ten classes. A step of fast inference reads the weight rows of
``depth (depth + 1) / 2`` splits per sample. The column "reading the rows" gathers the same number of rows, evenly drawn
from each level, and multiplies them with the samples. Its time is not a lower bound: the samples of a real step share
more rows, which then lie in the cache.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import benchmark
import jtrees
from jtrees import leaves as kinds

BATCH, ROWS, CLASSES = 256, 2560, 10
FEATURES, DEPTHS = (126, 784), (8, 10, 12, 14, 16, 18)  # the features of connect-4 and MNIST
FOLLOWS = 14  # the depth from which steps of such batches follow paths (surrogate._DENSE)
EXACT = 16  # the depth up to which exact inference tries all leaves
CONNECT_4 = 43_236  # training rows of connect-4, for seconds per epoch
STEPS = 5  # steps per timed call


def started(depth: int, p: int, inference: str, stable: bool) -> tuple[Any, jtrees.Batch, Any]:
    """Returns method, data and the initial state of a run."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(ROWS, p)), jnp.float32)
    y = jnp.asarray(rng.integers(0, CLASSES, ROWS), jnp.int32)
    assigned = jnp.asarray(rng.integers(0, 2**depth, ROWS), jnp.int32)
    data = jtrees.Batch(x, (y, assigned) if stable else y)
    options: Any = {"task": jtrees.Classification(CLASSES), "inference": inference, "learning_rate": 0.1}
    method = jtrees.methods.nongreedy(depth, 100.0, **options)
    optimizer = jtrees.training.lazy_momentum(0.1)

    @jax.jit
    def init(key: jax.Array) -> jtrees.training.TrainState:
        weights = jax.random.normal(key, (2**depth - 1, p)) / np.sqrt(p)
        leaves = kinds.Values(jnp.zeros((2**depth, CLASSES)), jtrees.losses.LogLoss())
        tree = jtrees.ObliqueTree(weights, jnp.zeros(len(weights)), leaves)
        return jtrees.training.loop.init_state(tree, data, key=key, optimizer=optimizer)

    return method, data, init(jax.random.key(0))


class Steps:
    """Runs several steps per call, in place."""

    def __init__(self, depth: int, p: int, inference: str, stable: bool):
        method, data, state = started(depth, p, inference, stable)
        # A full state also copies the best parameters of the run. This benchmark does not need the copy.
        self.state = state.params, state.opt_state

        def step(i: jax.Array, carry: Any) -> Any:
            batch = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, i * BATCH, BATCH), data)
            return method.update(*carry, batch, key=jax.random.key(0), step=i)[:2]

        several = jax.jit(lambda carry: jax.lax.fori_loop(0, STEPS, step, carry), donate_argnums=0)
        self.compiled = several.lower(self.state).compile()
        self()

    def __call__(self) -> None:
        self.state = jax.block_until_ready(self.compiled(self.state))

    def gigabytes(self) -> float:
        """Returns the memory of inputs, outputs and temporary arrays, as the compiler reports it."""
        memory: Any = self.compiled.memory_analysis()
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return (memory.argument_size_in_bytes + memory.temp_size_in_bytes + results) / 1e9


def reading(depth: int, p: int) -> Any:
    """Gathers the same number of rows and computes their products, level by level."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(BATCH, p)), jnp.float32)
    weights = jax.random.normal(jax.random.key(0), (2**depth - 1, p))
    nodes = [jnp.asarray(rng.integers(2**t - 1, 2 ** (t + 1) - 1, (t + 1, BATCH))) for t in range(depth)]
    read = jax.jit(lambda weights, nodes: [jnp.einsum("tnp,np->tn", weights[level], x) for level in nodes])
    return lambda: read(weights, nodes)


def add_depth(table: benchmark.Table, depth: int, p: int, repeats: int) -> float:
    """Adds the times of a depth, and returns the seconds of fast inference."""
    variants = {"stable": ("fast", True), "fast": ("fast", False)}
    if depth <= EXACT:
        variants["exact"] = ("exact", False)
    times, memory = {}, 0.0
    for kind, (inference, stable) in variants.items():  # one after the other: the memory holds only one deep tree
        steps = Steps(depth, p, inference, stable)
        times[kind] = [seconds / STEPS for seconds in benchmark.seconds(steps, repeats)]
        memory = steps.gigabytes() if kind == "fast" else memory
    read = benchmark.in_turn({"": reading(depth, p)}, repeats)[""]
    ratio = benchmark.ratio(times["exact"], times["fast"], 1) if "exact" in times else "-"
    fast = float(np.median(times["fast"]))
    ms = times["fast"], read, times["stable"], times.get("exact", "-")
    table.add(p, depth, *ms, ratio, f"{fast * CONNECT_4 / BATCH:.1f}", f"{memory:.2f}")
    return fast


def _exponent(times: dict[int, float]) -> float:
    return float(np.polyfit(np.log(list(times)), np.log(list(times.values())), 1)[0])


def main(arguments: list[str] | None = None) -> None:
    """Measures and writes the table."""
    options = benchmark.parse("bench_nongreedy", __doc__, arguments, repeats=9)
    header = ["p", "depth", "fast, ms a step", "reading the rows, ms", "stable, ms", "exact, ms", "exact / fast"]
    table, notes = benchmark.Table(*header, "connect-4, fast, s an epoch", "GB"), []
    for p in FEATURES:
        times = {depth: add_depth(table, depth, p, options.repeats) for depth in DEPTHS}
        parts = [f"{_exponent(times):.2f}"]
        if deep := {depth: fast for depth, fast in times.items() if depth >= FOLLOWS}:
            parts.append(f"from depth {FOLLOWS} on {_exponent(deep):.2f}")
        notes.append(f"{p} features: the time of a fast step grows as depth to the power of {', '.join(parts)}.")
    notes.append(
        f"Below depth {FOLLOWS}, a step multiplies all splits, which is faster than the paths; the first exponent is "
        "therefore higher."
    )
    text = " ".join(notes) + f" Batches of {BATCH}, {CLASSES} classes, momentum. GB: a fast step, by the compiler."
    benchmark.write(options, table, text)


if __name__ == "__main__":
    main()
