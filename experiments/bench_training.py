"""Speed of GET training: seconds per epoch and start, hard evaluation of every epoch included.

python -m experiments.bench_training [--data-dir FOLDER] [--depth 2 4 6 8 10] [--write]
python -m experiments.bench_training --sharp [--depth 9 10 12 14] [--sharpness 15 100] [--write]

One run times three things: a step of ``jtrees.train``, the unavoidable part of a step, and a step of the authors'
package if ``make peers`` has installed it. Our step runs with one start per device,
but at least two starts. The unavoidable part is two matrix products, and one sigmoid per node and sample.

``--sharp`` compares the step that the library chooses where routing is sharp, over the leaves that samples reach, with
the step over all leaves (not at depth 14).
"""

import contextlib
import io
import time
from typing import Any

import numpy as np

from experiments import benchmark, data

PEER = "GET"  # the import name of get-oblique
DEEPEST = 12  # depth limit of steps over all leaves


def table(data_dir: str | None) -> tuple[str, np.ndarray, np.ndarray]:
    """Returns the name, x and y in [0, 1] of three fifths of cpu-act, or of random numbers if cpu-act is missing."""
    rng = np.random.default_rng(0)
    try:
        loaded = data.load("cpu-act", data_dir=data_dir)
        name, x, y = loaded.name, loaded.x, loaded.y
    except data.DataError:
        name = "random numbers"
        x = rng.random((8192, 21), dtype=np.float32)
        y = (np.sin(5 * x[:, 0]) + x[:, 1] * x[:, 2]).astype(np.float32)
    chosen = rng.permutation(len(x))[: int(0.6 * len(x))]
    x, y = x[chosen], y[chosen]
    return name, (x - x.min(0)) / np.ptp(x, axis=0), (y - y.min()) / np.ptp(y)


def ours(depth: int, sharpness: float, sharp: bool, data_dir: str | None) -> dict[str, Any]:
    """Returns the seconds of our step and of the floor, whose calls alternate; with ``sharp`` also over all leaves."""
    benchmark.use_all_cores()
    import jax
    import jax.numpy as jnp
    import optax

    import jtrees
    from jtrees.routing import frontier, sharp as sharp_routing
    from jtrees.routing.by_level import Operands

    x, y = map(jnp.asarray, table(data_dir)[1:])
    steps, repeats = (200, 9) if depth <= 6 else (40, 9) if depth <= 8 else (15, 7) if depth <= 10 else (5, 7)
    starts, method = max(2, jax.device_count()), jtrees.methods.get(depth, sharpness)
    keys, how = jax.random.split(jax.random.key(0), starts), {"optimizer": optax.adamw(0.01), "score_every": 1}
    tree = method.init(jtrees.Batch(x, y), key=keys[0])

    def train(x, y, keys):
        run = lambda key: jtrees.train(method, jtrees.Batch(x, y), key=key, steps=steps, **how)
        runs = benchmark.map_over_devices(run, keys)
        return jax.tree.map(lambda a: a[runs.score.argmin()], runs)

    @jax.jit
    def floor(x, weights):
        step = lambda w, _: (w - 1e-6 * (jax.nn.sigmoid(w @ x.T) @ x), None)
        return jax.lax.scan(step, weights, None, length=steps)[0]

    def compiled():
        return jax.jit(lambda *arrays: train(*arrays)).lower(x, y, keys).compile()

    start = time.perf_counter()
    programs, compile_seconds = {"step": compiled()}, time.perf_counter() - start
    if sharp and depth <= DEEPEST:
        widths = dict(sharp_routing.WIDTHS)
        sharp_routing.WIDTHS.clear()
        programs["all leaves"] = compiled()
        sharp_routing.WIDTHS.update(widths)
    calls: dict[str, Any] = {name: lambda program=program: program(x, y, keys) for name, program in programs.items()}
    times = benchmark.in_turn(calls | {"floor": lambda: floor(x, tree.weights)}, repeats)
    costs = {name: [t / steps / (1 if name == "floor" else starts) for t in call] for name, call in times.items()}
    costs |= {"compile": compile_seconds, "memory": benchmark.peak_memory(), "starts": starts, "leaves": None}
    inputs = Operands(x, sharpness * tree.weights[None], sharpness * tree.bias[None], None, None)
    if sharp:
        paths, fits = jax.jit(lambda: frontier.explore(inputs, 64, sharp_routing.sigmoid()))()
        counts = np.asarray(paths.counts) / len(x)
        costs["leaves"] = [float(counts[-1]), float(1 - counts[:-1].sum() / (2**depth - 1))] if fits else [np.nan] * 2
    return costs | {"devices": jax.device_count()}


def peer(depth: int, data_dir: str | None) -> dict[str, Any]:
    """Returns the authors' seconds per step: the difference of a long and a short fit over the steps between them."""
    from GET import GETRegressor  # type: ignore[import-not-found]
    import torch  # type: ignore[import-not-found]
    from torch.optim.optimizer import register_optimizer_step_post_hook  # type: ignore[import-not-found]

    torch.set_num_threads(2)
    _, x, y = table(data_dir)
    count = [0]
    register_optimizer_step_post_hook(lambda *_: count.__setitem__(0, count[0] + 1))

    def fit(epochs: int) -> tuple[float, int]:
        count[0] = 0
        start = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            GETRegressor(treeDepth=depth, epochNum=epochs, startNum=1, device="cpu").fit(x, y)
        return time.perf_counter() - start, count[0]

    short, long, repeats = (21, 81, 5) if depth <= 6 else (21, 41, 3) if depth <= 8 else (21, 26, 2)
    fit(short)  # warms up
    step = []
    for _ in range(repeats):
        (a, steps_a), (b, steps_b) = fit(short), fit(long)
        step.append((b - a) / (steps_b - steps_a))
    return {"step": step, "memory": benchmark.peak_memory()}


def main(arguments: list[str] | None = None) -> None:
    """Runs every depth sequentially, each implementation in a process of its own."""
    plain: dict[str, Any] = {"depth": {"nargs": "+", "type": int}, "sharpness": (15.0, 100.0), "sharp": False}
    options = benchmark.parse("bench_training", __doc__, arguments, **plain, data_dir=None)
    name, x, _ = table(options.data_dir)
    (n, p), spread = x.shape, "median and half the interquartile range"
    if options.sharp:
        header = ["depth", "sharpness", "leaves a sample", "splits skipped, %", "step, ms", "of all leaves, ms"]
        results = benchmark.Table(*header, "floor, ms", "step / floor")
        for depth in options.depth or (9, 10, 12, 14):
            for sharpness in options.sharpness:
                mine = benchmark.isolated(ours, depth, sharpness, True, options.data_dir)
                (leaves, skipped), step = mine["leaves"], mine["step"]
                ms = step, mine.get("all leaves", "-"), mine["floor"], benchmark.ratio(step, mine["floor"])
                results.add(depth, f"{sharpness:g}", f"{leaves:.1f}", f"{100 * skipped:.1f}", *ms)
        notes = (
            f"Milliseconds per step and start on {n} x {p} samples of {name}: {spread}. Leaves a sample: leaves of the "
            "initial tree with a probability that counts (nan: more than 64). Splits skipped: the share of all splits "
            "of all samples that the followed paths skip. If more leaves are reached than the program can follow, the "
            "step scores all leaves."
        )
        benchmark.write(options, results, notes, to="bench_sharp")
        return
    header = ["depth", "ours, ms", "floor, ms", "ours / floor", "compilation, s", "memory, GB"]
    results = benchmark.Table(*header, "get-oblique, ms", "get-oblique / ours", "its memory, GB")
    for depth in options.depth or (2, 4, 6, 8, 10):
        mine = benchmark.isolated(ours, depth, 100.0, False, options.data_dir)
        step, theirs = mine["step"], ["-"] * 3
        if benchmark.installed(PEER):
            other = benchmark.isolated(peer, depth, options.data_dir)
            theirs = [other["step"], benchmark.ratio(other["step"], step, 0), f"{other['memory']:.2f}"]
        costs = f"{mine['compile']:.1f}", f"{mine['memory']:.2f}"
        results.add(depth, step, mine["floor"], benchmark.ratio(step, mine["floor"]), *costs, *theirs)
    notes = (
        f"Milliseconds per epoch and start (one optimiser step on {n} x {p} samples of {name}, hard evaluation "
        f"included): {spread}. Ours: {mine['starts']} starts on {mine['devices']} devices of jax, divided by their "
        "number; get-oblique: one start. The floor is for one start: two matrix products and one sigmoid per node and "
        "sample, 2 x 2 x nodes x n x p floating-point operations. Memory is the peak of the whole process."
    )
    benchmark.write(options, results, notes)


if __name__ == "__main__":
    main()
