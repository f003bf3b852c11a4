"""Sweeps a recipe over all hosts of a pod. If a process ends, the same command goes on and repeats no finished run.

python sweep_pod.py --out gs://bucket/sweep     # on every host of a TPU pod, with srun under Slurm, or on one machine
Elsewhere set JAX_COORDINATOR_ADDRESS=host:1234 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 for each process.

python sweep_pod.py --out DIR --share 0 4       # on host 0 of 4: hosts that do not wait for each other
python sweep_pod.py --out DIR                   # then, on any host: all runs

The first process writes runs.csv and best.jtrees.
"""

import argparse
import contextlib
import os

from etils import epath
import jax
import numpy as np

import jtrees

RECIPE = jtrees.DGT(widths=(), precondition=0)
SPACE = {"learning_rate": jtrees.LogUniform(1e-3, 0.1), "depth": (4, 6, 8)}
ROWS, FEATURES = 20_000, 32


def table():  # replace this by a reader of your table
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, FEATURES), np.float32)
    return x, np.where(x[:, 0] > x[:, 1], x[:, 2], np.abs(x[:, 3])) + 0.1 * rng.standard_normal(ROWS)


def sweep(out, samples, seeds, epochs, share):
    """Runs a sweep on all devices of all processes together, or a share of its runs on this host."""
    out = epath.Path(out if "://" in out else os.path.abspath(out))
    is_together, mesh = share == (0, 1), contextlib.nullcontext()
    if is_together:
        jtrees.distributed.initialize()
        jtrees.distributed.check_folder(out)
        mesh = jax.set_mesh(jtrees.sharding.mesh(starts=jax.device_count()))
    options = {"space": SPACE, "samples": samples, "seeds": seeds, "validation": 0.2, "key": jax.random.key(0)}
    recipe = RECIPE if epochs is None else RECIPE.replace(epochs=epochs)
    is_first = jax.process_index() == 0
    with jtrees.distributed.resumable(), mesh:
        result = jtrees.sweep(recipe, *table(), folder=out / "runs", share=share, progress=is_first, **options)
        if is_together and is_first:
            (out / "runs.csv").write_text(result.frame(by="mean").to_csv(index=False))
            print(f"best of {result.losses.size} runs: {result.best}", flush=True)
        if is_together:
            jtrees.save(result.fit, out / "best.jtrees")  # the first process writes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"out": "sweep", "samples": 64, "seeds": 3}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), metavar=("HOST", "HOSTS"))
    arguments = vars(parser.parse_args())
    sweep(**arguments | {"share": tuple(arguments["share"])})
