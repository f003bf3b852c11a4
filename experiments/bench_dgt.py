"""Speed of DGT: one update of the over-parameterised tree against its matrix products, and rounds per second of a
bandit stream.

python -m experiments.bench_dgt [--repeats 7] [--write]

An update cannot avoid these products: the chain multiplied in its cheaper order, the scores of the batch, and two
products for the gradient of each. An update also reads and writes every weight and its mean square at least once. A
column of the table has these bytes.
"""

from functools import partial
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import benchmark
import jtrees

CASES = ((6, 10, 1008), (8, 40, 1530))  # depth, features, hidden width (twice)
BATCH, STEPS, ROUNDS = 128, 50, 20_000
AUTHORS = {6: 11.0}  # ms per update of the authors' PyTorch code, 2 threads; reported to us, not measured in this run


def products(depth: int, p: int, width: int):
    """Returns a function that computes the products of STEPS updates, and the operations of one update."""
    nodes, rng = 2**depth - 1, np.random.default_rng(0)
    assert p + 1 < nodes  # then the chain is cheaper from the right
    shapes = [(nodes, width), (width, width), (width, p + 1)]
    chain = tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
    x = jnp.asarray(rng.normal(size=(BATCH, p + 1)), jnp.float32)
    unit = lambda a: a / jnp.abs(a).max()  # applied to small arrays only: avoids overflow and subnormal numbers

    def step(chain, _):
        third, second, first = chain
        a = unit(second @ first)
        scores = third @ a @ x.T
        d_w = unit(scores @ x)
        d_third, d_a = d_w @ a.T, unit(third.T @ d_w)
        # Each result is a factor of the next iteration, and therefore the compiler cannot remove a product.
        return (unit(d_third), d_a @ first.T, unit(second.T @ d_a)), None

    inner = width * width * (p + 1) + nodes * width * (p + 1)
    return jax.jit(lambda: jax.lax.scan(step, chain, length=STEPS)[0]), 2 * (3 * inner + 2 * nodes * BATCH * (p + 1))


def step_case(depth: int, p: int, width: int, repeats: int) -> list[Any]:
    """Returns one row: an update, the products, their ratio."""
    rng, n = np.random.default_rng(0), 16 * BATCH
    x, y = jnp.asarray(rng.normal(size=(n, p)), jnp.float32), jnp.asarray(rng.uniform(size=n), jnp.float32)
    method, optimizer = jtrees.methods.dgt(depth, widths=(width, width)), jtrees.training.rmsprop(0.01, clip=0.01)
    how = {"optimizer": optimizer, "steps": STEPS, "batch_size": BATCH}
    train = jax.jit(lambda key: jtrees.train(method, jtrees.Batch(x, y), key=key, **how).losses)

    floor, operations = products(depth, p, width)
    compile_seconds = benchmark.seconds(lambda: jax.block_until_ready(train(jax.random.key(0))), 1)[0]
    times = benchmark.in_turn({"ours": lambda: train(jax.random.key(0)), "floor": floor}, repeats)
    ours, floor = ([t / STEPS for t in times[name]] for name in ("ours", "floor"))
    weights = width * (p + 1) + width * width + (2**depth - 1) * width
    theirs = f"{AUTHORS[depth]:.0f} ({benchmark.ratio([AUTHORS[depth] / 1e3], ours, 1)} x)" if depth in AUTHORS else "-"
    sizes = [f"{operations / 1e6:.0f}", f"{4 * 4 * weights / 1e6:.0f}", f"{compile_seconds:.1f}"]
    return [depth, p, f"{width}, {width}", ours, floor, benchmark.ratio(ours, floor), *sizes, theirs]


def bandit(repeats: int) -> dict[str, list[float]]:
    """Returns rounds per second of the two kinds of learners on one core: batch size 1, depth 6 and 16 features."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {0})
    rng = np.random.default_rng(0)
    x, targets = jnp.asarray(rng.normal(size=(ROUNDS, 16)), jnp.float32), jnp.asarray(rng.integers(0, 10, ROUNDS))
    discrete = lambda i, a: (a != targets[i]).astype(jnp.float32)
    number = lambda i, a: jnp.square(a - targets[i] / 10)
    out = {}
    for label, learner, loss in [
        ("10 actions", jtrees.methods.bandit_classifier(6, 10), discrete),
        ("two points", jtrees.methods.bandit_regressor(6), number),
    ]:
        play = partial(jtrees.methods.run_bandit, learner, x, loss)
        run = jax.jit(lambda key, play=play: play(key=key).losses)
        times = benchmark.in_turn({label: lambda run=run: run(jax.random.key(1))}, repeats)[label]
        out[label] = [ROUNDS / seconds for seconds in times]
    return out


def main(arguments: list[str] | None = None) -> None:
    """Measures the updates in this process, and the streams in a process pinned to one core."""
    options = benchmark.parse("bench_dgt", __doc__, arguments, repeats=7)
    benchmark.use_all_cores()
    header = ["depth", "p", "widths", "update, ms", "products, ms", "ratio", "their Mflop", "optimiser's MB"]
    table = benchmark.Table(*header, "first call, s", "authors, ms")
    for case in CASES:
        table.add(*step_case(*case, options.repeats))
    streams = benchmark.isolated(bandit, options.repeats)
    rates = "; ".join(f"{label} {benchmark.spread(rates, 1e-3)} thousand" for label, rates in streams.items())
    notes = (
        f"Batch {BATCH}, float32, {STEPS} updates per call. Median ± half the middle half of {options.repeats} calls; "
        "calls of products and updates alternate. The optimiser's bytes: weights and mean squares, read and written "
        "once. The authors' figure was reported to us and measured on another day.\n\nBandit streams, depth 6, p = 16, "
        f"one round at a time, on one core, rounds per second: {rates}."
    )
    benchmark.write(options, table, notes)


if __name__ == "__main__":
    benchmark.compile_all_programs()
    main()
