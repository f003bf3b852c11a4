"""Whole fits: seconds until the hard tree's training loss is as low as the loss of the authors' package.

python -m experiments.bench_get [--data-dir FOLDER] [--depth 4 6] [--peer 2 500] [--seeds 3] [--write]

The authors' package (get-oblique, ``make peers``) is fitted once per seed, with its own scaling, starts and polishing.
Our polished GET is then fitted with growing budgets, each from scratch, until its training loss is no higher. The
seconds of all these budgets are added up. Both packages see the same table in the same units. Compilation is reported
separately: every fit is made twice, and the second fit counts.
"""

import argparse
import contextlib
import io
import json
import sys
import time
from typing import Any

import numpy as np

from experiments import benchmark
from experiments.bench_training import PEER, table

BUDGETS = ((1, 50), (2, 100), (2, 300), (4, 500), (4, 1000), (10, 1000), (10, 3000))  # starts, epochs per scale factor


def peer(options: argparse.Namespace) -> dict[str, Any]:
    """Returns seconds and training loss of a whole fit by the authors' package."""
    from GET import GETRegressor  # type: ignore[import-not-found]
    import torch  # type: ignore[import-not-found]

    torch.set_num_threads(2)
    torch.manual_seed(options.seed)
    np.random.seed(options.seed)
    _, x, y = table(options.data_dir)
    starts, epochs = options.peer
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        model = GETRegressor(treeDepth=options.depth[0], epochNum=epochs, startNum=starts, device="cpu")
        model.fit(x, y)
    seconds = time.perf_counter() - start
    answer = np.asarray(model.predict(x), np.float64).reshape(-1)
    return {"seconds": seconds, "loss": float(np.mean((answer - y) ** 2))}


def ours(options: argparse.Namespace) -> dict[str, Any]:
    """Fits growing budgets until the target loss is reached; returns fitting and compilation seconds."""
    benchmark.use_all_cores()
    import jax

    import jtrees

    _, x, y = table(options.data_dir)
    spent, compiling = 0.0, 0.0

    def fit(seed: int, starts: int, epochs: int) -> tuple[float, float]:
        start = time.perf_counter()
        base = jtrees.GET(depth=options.depth[0], starts=starts, epochs=epochs, ridge=False, halving=False)
        found = jtrees.fit(jtrees.Polished(base=base, epochs=epochs, shrink=False), x, y, key=jax.random.key(seed))
        return found.loss, time.perf_counter() - start

    for starts, epochs in BUDGETS:
        first = fit(options.seed, starts, epochs)[1]  # compiles; the padding of subtrees depends on the tree
        loss, seconds = fit(options.seed, starts, epochs)
        spent, compiling = spent + seconds, compiling + max(0.0, first - seconds)
        if loss <= options.loss:
            break
    return {"seconds": spent, "compile": compiling, "loss": loss, "budget": (starts, epochs)}


def full(options: argparse.Namespace) -> dict[str, Any]:
    """Fits the paper's whole budget, 10 starts x 3000 epochs x 2 scale factors, on three quarters of the set."""
    benchmark.use_all_cores()
    import jax

    import jtrees

    _, x, y = table(options.data_dir, 0.75)
    start = time.perf_counter()
    recipe = jtrees.GET(depth=options.depth[0], ridge=False, precondition=0.0, shrink=False, halving=False)
    found = jtrees.fit(recipe, x, y, key=jax.random.key(options.seed))
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "rows": len(x), "r2": 100 * (1 - found.loss / float(np.var(y)))}


def compared(options: argparse.Namespace, depth: int, seed: int, folder: list[str]) -> list[str]:
    """Returns a row of the table; each package runs in a process of its own."""
    common = ["--depth", depth, "--seed", seed, "--peer", *options.peer, *folder]
    variance = float(np.var(table(options.data_dir)[2]))
    percent = lambda one: f"{100 * (1 - one['loss'] / variance):.2f}"
    theirs = benchmark.child("experiments.bench_get", "--only", "peer", *common)
    mine = benchmark.child("experiments.bench_get", "--only", "ours", "--loss", theirs["loss"], *common)
    row = [str(depth), str(seed), f"{theirs['seconds']:.1f}", percent(theirs), f"{mine['seconds']:.2f}"]
    row += [f"{mine['compile']:.1f}", percent(mine), "{} x {}".format(*mine["budget"])]
    row.append(f"{theirs['seconds'] / mine['seconds']:.0f}" if mine["loss"] <= theirs["loss"] else "not reached")
    print(" ".join(row), file=sys.stderr, flush=True)
    return row


def main() -> None:
    """Runs every depth and seed sequentially, each package in a process of its own."""
    parser = benchmark.parser(__doc__)
    parser.add_argument("--depth", nargs="+", type=int, default=[4, 6])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--peer", nargs=2, type=int, default=[2, 500], metavar=("STARTS", "EPOCHS"))
    parser.add_argument("--data-dir")
    parser.add_argument("--only", choices=["ours", "peer", "full"], help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--loss", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps({"ours": ours, "peer": peer, "full": full}[options.only](options)))
        return
    if not benchmark.installed(PEER):
        print("bench_get: get-oblique is not installed (make peers): nothing to compare with")
        return
    folder, seeds = ["--data-dir", options.data_dir] if options.data_dir else [], range(options.seeds)
    rows = [compared(options, depth, seed, folder) for depth in options.depth for seed in seeds]
    header = ["depth", "seed", "get-oblique, s", "its training R², %", "jtrees, s", "compilation, s"]
    header += ["its training R², %", "last budget", "get-oblique / jtrees"]
    whole = ["--only", "full", "--depth", 6, *folder, "--seed"]
    fits = [benchmark.child("experiments.bench_get", *whole, seed) for seed in seeds]
    name, x, _ = table(options.data_dir)
    took, fitted = (
        ", ".join(one) for one in zip(*((f"{f['seconds']:.0f}", f"{f['r2']:.2f}") for f in fits), strict=True)
    )
    notes = (
        f"Whole fits to {len(x)} x {x.shape[1]} samples of {name}. get-oblique: {options.peer[0]} starts, "
        f"{options.peer[1]} epochs per scale factor. jtrees: `Polished(base=GET(...))` with growing budgets (starts x "
        f"epochs under each of two scale factors: {', '.join('{} x {}'.format(*b) for b in BUDGETS)}). Each budget "
        "starts from scratch, and the budgets end when the training loss is no higher than get-oblique's. The seconds "
        "are the sum over all these budgets.\n\n"
        "The whole budget of the paper, `GET` at depth 6 with 10 starts x 3000 epochs x 2 scale factors on "
        f"{fits[0]['rows']} rows, took {took} seconds (one fit per seed, compilation and CART included; training R² "
        f"{fitted} %)."
    )
    arguments = f"--data-dir DATA --seeds {options.seeds}"
    benchmark.write("bench_get", arguments, header, rows, notes, committed=options.write)


if __name__ == "__main__":
    main()
