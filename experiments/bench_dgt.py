"""Speed of DGT: one update of the over-parameterised tree against the matrix products that it cannot avoid, and rounds
of a bandit stream a second.

python -m experiments.bench_dgt [--repeats 7] [--write]

The products: the chain multiplied out in its cheaper order, the scores of the batch, and for each product the two that
its gradient takes. An update further reads and writes every weight and its mean square at least once; those bytes are
printed beside.
"""

import argparse
from functools import partial
import json
import os

import jax
import jax.numpy as jnp
import numpy as np

from experiments import benchmark
import jtrees

CASES = ((6, 10, 1008), (8, 40, 1530))  # depth, features, hidden width (twice)
BATCH, STEPS, ROUNDS = 128, 50, 20_000
AUTHORS = {6: 11.0}  # ms an update of the authors' PyTorch code, 2 threads, as reported to us; not measured in this run


def products(depth: int, p: int, width: int):
    """STEPS times the matrix products of one update and nothing else, and the floating operations of one."""
    nodes, rng = 2**depth - 1, np.random.default_rng(0)
    assert p + 1 < nodes  # so that the chain is cheaper from the right
    shapes = [(nodes, width), (width, width), (width, p + 1)]
    chain = tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in shapes)
    x = jnp.asarray(rng.normal(size=(BATCH, p + 1)), jnp.float32)
    unit = lambda a: a / jnp.abs(a).max()  # of the small arrays, to stay among ordinary numbers

    def one(chain, _):
        third, second, first = chain
        a = unit(second @ first)
        scores = third @ a @ x.T
        d_w = unit(scores @ x)
        d_third, d_a = d_w @ a.T, unit(third.T @ d_w)
        # Each result is a factor of the next round, so that none can be left out.
        return (unit(d_third), d_a @ first.T, unit(second.T @ d_a)), None

    inner = width * width * (p + 1) + nodes * width * (p + 1)
    return jax.jit(lambda: jax.lax.scan(one, chain, length=STEPS)[0]), 2 * (3 * inner + 2 * nodes * BATCH * (p + 1))


def step_case(depth: int, p: int, width: int, repeats: int) -> list[str]:
    """One row: an update, the products, their ratio."""
    rng, n = np.random.default_rng(0), 16 * BATCH
    x, y = jnp.asarray(rng.normal(size=(n, p)), jnp.float32), jnp.asarray(rng.uniform(size=n), jnp.float32)
    method, optimizer = jtrees.methods.dgt(depth, widths=(width, width)), jtrees.training.rmsprop(0.01, clip=0.01)
    how = {"optimizer": optimizer, "steps": STEPS, "batch_size": BATCH}
    train = jax.jit(lambda key: jtrees.train(method, jtrees.Batch(x, y), key=key, **how).losses)

    floor, operations = products(depth, p, width)
    compile_seconds = benchmark.seconds(lambda: jax.block_until_ready(train(jax.random.key(0))), 1)[0]
    times = benchmark.in_turn({"ours": lambda: train(jax.random.key(0)), "floor": floor}, repeats)
    ours, least = ([t / STEPS for t in times[name]] for name in ("ours", "floor"))
    weights = width * (p + 1) + width * width + (2**depth - 1) * width
    ratio = np.median(ours) / np.median(least)
    theirs = f"{AUTHORS[depth]:.0f} ({AUTHORS[depth] / np.median(ours) / 1e3:.1f} x)" if depth in AUTHORS else "-"
    return [str(depth), str(p), f"{width}, {width}", benchmark.spread(ours), benchmark.spread(least), f"{ratio:.2f}",
            f"{operations / 1e6:.0f}", f"{4 * 4 * weights / 1e6:.0f}", f"{compile_seconds:.1f}", theirs]  # fmt: skip


def bandit(repeats: int) -> dict[str, list[float]]:
    """Rounds a second of the two kinds of learners, batch of one, depth 6, 16 features."""
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
        jax.block_until_ready(run(jax.random.key(0)))
        times = benchmark.seconds(lambda run=run: jax.block_until_ready(run(jax.random.key(1))), repeats)
        out[label] = [ROUNDS / t for t in times]
    return out


def main() -> None:
    """The table of updates here, the streams in a process that is kept on one core."""
    parser = benchmark.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", choices=["bandit"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {0})
        print(json.dumps(bandit(options.repeats)))
        return
    benchmark.use_all_cores()
    rows = [step_case(*case, options.repeats) for case in CASES]
    header = ["depth", "p", "widths", "update, ms", "products, ms", "ratio", "their Mflop", "optimiser's MB"]
    header += ["first call, s", "authors, ms"]
    streams = benchmark.child("experiments.bench_dgt", "--only", "bandit", "--repeats", options.repeats)
    rates = "; ".join(f"{label} {benchmark.spread(rates, 1e-3)} thousand" for label, rates in streams.items())
    notes = (
        f"Batch {BATCH}, float32, {STEPS} updates a call; median ± half the middle half of {options.repeats} calls, "
        "products and updates in turn. The optimiser's bytes: weights and mean squares read and written once. The "
        "authors' figure is as it was reported to us, on another day.\n\nBandit streams, depth 6, p = 16, one round at "
        f"a time, on one core, rounds a second: {rates}."
    )
    benchmark.write("bench_dgt", f"--repeats {options.repeats}", header, rows, notes, committed=options.write)


if __name__ == "__main__":
    main()
