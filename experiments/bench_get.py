"""Whole fits: seconds until the hard tree's training loss is as low as the loss of the authors' package.

python -m experiments.bench_get [--data-dir FOLDER] [--depth 4 6] [--peer 2 500] [--seeds 3] [--write]

The authors' package (get-oblique, ``make peers``) is fitted once per seed, with its own scaling, starts and polishing.
Our polished GET is then fitted with growing budgets, each from scratch, until its training loss is no higher. The
seconds of all these budgets are added up. Both packages see the same table in the same units. Compilation is reported
separately: every fit is made twice, and the second fit counts.
"""

import contextlib
import io
import time
from typing import Any

import numpy as np

from experiments import benchmark
from experiments.bench_training import PEER, table

BUDGETS = ((1, 50), (2, 100), (2, 300), (4, 500), (4, 1000), (10, 1000), (10, 3000))  # starts, epochs per scale factor


def peer(depth: int, starts: int, epochs: int, seed: int, data_dir: str | None) -> dict[str, Any]:
    """Returns seconds and training loss of a whole fit by the authors' package."""
    from GET import GETRegressor  # type: ignore[import-not-found]
    import torch  # type: ignore[import-not-found]

    torch.set_num_threads(2)
    torch.manual_seed(seed)
    np.random.seed(seed)
    _, x, y = table(data_dir)
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        model = GETRegressor(treeDepth=depth, epochNum=epochs, startNum=starts, device="cpu")
        model.fit(x, y)
    seconds = time.perf_counter() - start
    answer = np.asarray(model.predict(x), np.float64).reshape(-1)
    return {"seconds": seconds, "loss": float(np.mean((answer - y) ** 2))}


def ours(depth: int, target: float, seed: int, data_dir: str | None) -> dict[str, Any]:
    """Fits growing budgets until the target loss is reached; returns fitting and compilation seconds."""
    benchmark.use_all_cores()
    import jax

    import jtrees

    _, x, y = table(data_dir)
    spent, compiling = 0.0, 0.0

    def fit(starts: int, epochs: int) -> tuple[float, float]:
        start = time.perf_counter()
        base = jtrees.GET(depth=depth, starts=starts, epochs=epochs, ridge=False, halving=False)
        polished = jtrees.fit(jtrees.Polished(base=base, epochs=epochs, shrink=False), x, y, key=jax.random.key(seed))
        return polished.loss, time.perf_counter() - start

    for starts, epochs in BUDGETS:
        first = fit(starts, epochs)[1]  # compiles; the padding of subtrees depends on the tree
        loss, seconds = fit(starts, epochs)
        spent, compiling = spent + seconds, compiling + max(0.0, first - seconds)
        if loss <= target:
            break
    return {"seconds": spent, "compile": compiling, "loss": loss, "budget": (starts, epochs)}


def full(depth: int, seed: int, data_dir: str | None) -> dict[str, Any]:
    """Fits the paper's whole budget, 10 starts x 3000 epochs x 2 scale factors, on three quarters of the set."""
    benchmark.use_all_cores()
    import jax

    import jtrees

    _, x, y = table(data_dir, 0.75)
    start = time.perf_counter()
    recipe = jtrees.GET(depth=depth, ridge=False, precondition=0.0, shrink=False, halving=False)
    loss = jtrees.fit(recipe, x, y, key=jax.random.key(seed)).loss
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "rows": len(x), "r2": 100 * (1 - loss / float(np.var(y)))}


def compared(depth: int, budget: list[int], seed: int, data_dir: str | None) -> list[str]:
    """Returns a row of the table; each package runs in a process of its own."""
    variance = float(np.var(table(data_dir)[2]))
    percent = lambda fit: f"{100 * (1 - fit['loss'] / variance):.2f}"
    theirs = benchmark.isolated(peer, depth, *budget, seed, data_dir)
    mine = benchmark.isolated(ours, depth, theirs["loss"], seed, data_dir)
    row = [str(depth), str(seed), f"{theirs['seconds']:.1f}", percent(theirs), f"{mine['seconds']:.2f}"]
    row += [f"{mine['compile']:.1f}", percent(mine), "{} x {}".format(*mine["budget"])]
    return [*row, f"{theirs['seconds'] / mine['seconds']:.0f}" if mine["loss"] <= theirs["loss"] else "not reached"]


def main(arguments: list[str] | None = None) -> None:
    """Runs every depth and seed sequentially, each package in a process of its own."""
    budget = {"nargs": 2, "type": int, "default": [2, 500], "metavar": ("STARTS", "EPOCHS")}
    options = benchmark.parse("bench_get", __doc__, arguments, depth=(4, 6), seeds=3, peer=budget, data_dir=None)
    if not benchmark.installed(PEER):
        print("bench_get: get-oblique is not installed (make peers): nothing to compare with")
        return
    header = ["depth", "seed", "get-oblique, s", "its training R², %", "jtrees, s", "compilation, s"]
    results = benchmark.Table(*header, "its training R², %", "last budget", "get-oblique / jtrees")
    for depth in options.depth:
        for seed in range(options.seeds):
            results.add(*compared(depth, options.peer, seed, options.data_dir))
    fits = [benchmark.isolated(full, 6, seed, options.data_dir) for seed in range(options.seeds)]
    name, x, _ = table(options.data_dir)
    seconds = ", ".join(f"{fit['seconds']:.0f}" for fit in fits)
    scores = ", ".join(f"{fit['r2']:.2f}" for fit in fits)
    notes = (
        f"Whole fits to {len(x)} x {x.shape[1]} samples of {name}. get-oblique: {options.peer[0]} starts, "
        f"{options.peer[1]} epochs per scale factor. jtrees: `Polished(base=GET(...))` with growing budgets (starts x "
        f"epochs under each of two scale factors: {', '.join('{} x {}'.format(*b) for b in BUDGETS)}). Each budget "
        "starts from scratch, and the budgets end when the training loss is no higher than get-oblique's. The seconds "
        "are the sum over all these budgets.\n\n"
        "The whole budget of the paper, `GET` at depth 6 with 10 starts x 3000 epochs x 2 scale factors on "
        f"{fits[0]['rows']} rows, took {seconds} seconds (one fit per seed, compilation and CART included; training R² "
        f"{scores} %)."
    )
    benchmark.write(options, results, notes)


if __name__ == "__main__":
    main()
