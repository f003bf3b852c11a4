"""Speed of GET training: seconds per epoch and start, hard evaluation of every epoch included.

python -m experiments.bench_training [--data-dir FOLDER] [--depth 2 4 6 8 10] [--write]

One run times three things: a step of ``jtrees.train``, the unavoidable part of a step, and a step of the authors'
package if ``make peers`` has installed it. Our step runs in ``jtrees.training.multi_start`` with one start per device,
but at least two starts. The unavoidable part is two matrix products, and one sigmoid per node and sample.
"""

import contextlib
import io
import time
from typing import Any

import numpy as np

from experiments import benchmark, data

PEER = "GET"  # the import name of get-oblique


def table(data_dir: str | None, part: float = 0.6) -> tuple[str, np.ndarray, np.ndarray]:
    """Returns the name, x and y in [0, 1] of a part of cpu-act, or of random numbers if cpu-act is not available."""
    rng = np.random.default_rng(0)
    try:
        loaded = data.load("cpu-act", data_dir=data_dir)
        name, x, y = loaded.name, loaded.x, loaded.y
    except data.DataError:
        name = "random numbers"
        x = rng.random((8192, 21), dtype=np.float32)
        y = (np.sin(5 * x[:, 0]) + x[:, 1] * x[:, 2]).astype(np.float32)
    chosen = rng.permutation(len(x))[: int(part * len(x))]
    x, y = x[chosen], y[chosen]
    return name, (x - x.min(0)) / np.ptp(x, axis=0), (y - y.min()) / np.ptp(y)


def ours(depth: int, data_dir: str | None) -> dict[str, Any]:
    """Returns the seconds of our step and of the floor; their calls alternate."""
    benchmark.use_all_cores()
    import jax
    import jax.numpy as jnp
    import optax

    import jtrees

    x, y = map(jnp.asarray, table(data_dir)[1:])
    steps, repeats = (200, 9) if depth <= 6 else (40, 9) if depth <= 8 else (15, 7)
    starts, method = max(2, jax.device_count()), jtrees.methods.get(depth, 100.0)
    keys, how = jax.random.split(jax.random.key(0), starts), {"optimizer": optax.adamw(0.01), "score_every": 1}

    @jax.jit
    def train(x, y, keys):
        run = lambda key: jtrees.train(method, jtrees.Batch(x, y), key=key, steps=steps, **how)
        return jtrees.training.multi_start(run, keys).best

    @jax.jit
    def floor(x, weights):
        step = lambda w, _: (w - 1e-6 * (jax.nn.sigmoid(w @ x.T) @ x), None)
        return jax.lax.scan(step, weights, None, length=steps)[0]

    compile_seconds = benchmark.seconds(lambda: train.lower(x, y, keys).compile(), 1)[0]
    weights = method.init(jtrees.Batch(x, y), key=keys[0]).weights
    times = benchmark.in_turn({"step": lambda: train(x, y, keys), "floor": lambda: floor(x, weights)}, repeats)
    step, bottom = [t / steps / starts for t in times["step"]], [t / steps for t in times["floor"]]
    costs = {"step": step, "floor": bottom, "compile": compile_seconds, "memory": benchmark.peak_memory()}
    return costs | {"starts": starts, "devices": jax.device_count()}


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


def main() -> None:
    """Runs every depth sequentially, each implementation in a process of its own."""
    options = benchmark.parse("bench_training", __doc__, depth=(2, 4, 6, 8, 10), data_dir=None)
    header = ["depth", "ours, ms", "floor, ms", "ours / floor", "compilation, s", "memory, GB"]
    results = benchmark.Table(*header, "get-oblique, ms", "get-oblique / ours", "its memory, GB")
    for depth in options.depth:
        mine = benchmark.isolated(ours, depth, options.data_dir)
        step, theirs = mine["step"], ["-"] * 3
        if benchmark.installed(PEER):
            other = benchmark.isolated(peer, depth, options.data_dir)
            theirs = [other["step"], benchmark.ratio(other["step"], step, 0), f"{other['memory']:.2f}"]
        costs = f"{mine['compile']:.1f}", f"{mine['memory']:.2f}"
        results.add(depth, step, mine["floor"], benchmark.ratio(step, mine["floor"]), *costs, *theirs)
    name, x, _ = table(options.data_dir)
    n, p = x.shape
    notes = (
        f"Milliseconds per epoch and start (one optimiser step on {n} x {p} samples of {name}, hard evaluation "
        f"included): median and half the interquartile range. Ours: {mine['starts']} starts on {mine['devices']} "
        "devices of jax, divided by their number; get-oblique: one start. The floor is for one start: two matrix "
        "products and one sigmoid per node and sample, 2 x 2 x nodes x n x p floating-point operations. Memory is the "
        "peak of the whole process."
    )
    benchmark.write(options, results, notes)


if __name__ == "__main__":
    main()
