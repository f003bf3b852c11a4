"""Trains on tables that do not fit in memory, on all devices of all processes, and resumes a stopped run.

It runs from a checkout of the repository with the extra "large". The wheel does not have the folder ``examples``.

python -m examples.train_large --out RUN --data FOLDER --target price          # shards, Parquet or .npy
python -m examples.train_large --out RUN --synthetic rows=1e8,p=64 --method tel --set depth=4 trees=20
python -m examples.train_large --out gs://bucket/run ...             # on every host of a TPU pod; or srun, Slurm
python -m examples.train_large ... --coordinator host:1234 --processes 2 --process 0          # elsewhere, each

A round reads a block of rows for each device, in an order that depends on --seed, and trains on mini-batches of the
rows. The hardened model is evaluated on validation blocks, which --seed draws from all parts of the table. RUN receives
config.json, metrics.jsonl, checkpoints and, at the end, model.jtrees (``jtrees.load``). SIGTERM and Ctrl-C write a
checkpoint. The same command resumes from the newest readable checkpoint, with the position in the data, and ends with
the same bits. The learning rate is scheduled for --epochs passes. --max-steps and --max-seconds end the run earlier,
with a model.

GET and RADDT are not available: each of their updates, and the choice among their starts, needs all rows. For one tree
with constant leaves, use dgt, or fit GET to a sample of rows that fits in memory.

All blocks are used, and a pass may end within a round. Rows at the end of a shard that do not fill a block are not
used; the run prints their number. Features and targets are standardised, in double precision, by the moments of the
first blocks of the shuffled order. A run does not resume if rows that it has used have changed.

Exit status: 0 if all steps are done that --epochs plans or --max-steps allows. 75 if --max-seconds, SIGTERM or Ctrl-C
ended the run earlier, or if another process ended; the same command resumes it. 1 if options, data, checkpoints or the
disk do not allow the run; stderr explains the reason. 2 if the command line cannot be parsed.
"""

import argparse
import os
import sys

from etils import epath
import jax

from examples.train_large.blocks import DataError
from examples.train_large.checkpoints import CheckpointError, place
from examples.train_large.rounds import METHODS
from examples.train_large.run import Run
from examples.train_large.together import Stop, Stopped
from jtrees import distributed


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = out.add_argument
    add("--out", type=place, required=True, help="Folder of the run, on a disk or gs://bucket/folder. Required.")
    add(
        "--data",
        type=epath.Path,
        help="Folder of .parquet shards, also gs://, or of .npy shards. Default: none; then --synthetic is needed.",
    )
    add("--target", help="Column of the Parquet shards to predict. Default: none; .npy shards have it last.")
    add("--synthetic", help="Table to generate instead of --data, such as rows=1e8,p=64,seed=1. Default: none.")
    add(
        "--task",
        choices=("regression", "classification"),
        default="regression",
        help="Whether targets are numbers or classes 0, 1, ... Default: %(default)s.",
    )
    add("--method", choices=list(METHODS), default="dgt", help="Method to train with. Default: %(default)s.")
    add(
        "--set",
        nargs="+",
        default=[],
        metavar="OPTION=VALUE",
        help="Options of the method, such as depth=6 widths=[]. Default: the defaults of its recipe.",
    )
    add("--block", type=_positive, default=4096, metavar="ROWS", help="Rows in a block. Default: %(default)s.")
    add("--blocks", type=_positive, help="Blocks in a round, a multiple of the devices. Default: one for each device.")
    add("--batch", type=_positive, default=256, metavar="ROWS", help="Rows in a mini-batch. Default: %(default)s.")
    add("--epochs", type=_positive, default=1, help="Passes over the data. Default: %(default)s.")
    add(
        "--held-out",
        type=_positive,
        default=8,
        metavar="BLOCKS",
        help="Blocks of the validation set, drawn by --seed. Default: %(default)s.",
    )
    add("--seed", type=_natural, default=0, help="Seed of parameters and of the order of rows. Default: %(default)s.")
    a_while = "rounded down to whole rounds. Default: %(default)s."
    add("--save-every", type=_positive, default=2000, metavar="STEPS", help=f"Steps between checkpoints, {a_while}")
    add("--evaluate-every", type=_positive, default=2000, metavar="STEPS", help=f"Steps between evaluations, {a_while}")
    add(
        "--max-steps",
        type=_positive,
        metavar="STEPS",
        help="Steps after which the run ends, rounded up to whole rounds. Default: all of --epochs.",
    )
    add(
        "--max-seconds",
        type=_seconds,
        metavar="SECONDS",
        help="Seconds after which this command ends, compilation included. Default: no limit.",
    )
    default = "Default: from a TPU pod, from Slurm or from JAX_COORDINATOR_ADDRESS; or a single process."
    add("--coordinator", metavar="HOST:PORT", help=f"Address of the first of several processes. {default}")
    add("--processes", type=_positive, help="Number of processes. Default: as for --coordinator.")
    add("--process", type=_natural, help="Number of this process, from 0. Default: as for --coordinator.")
    options = out.parse_args(arguments)
    together = [options.coordinator, options.processes, options.process]
    if None in together and together != [None] * 3:
        out.error("--coordinator, --processes and --process go together")
    if options.process is not None and options.process >= options.processes:
        out.error(f"--process must be from 0 to {options.processes - 1}, got {options.process}")
    return options


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = float("nan")
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"a number above 0 was expected, got {text!r}")
    return seconds


def _natural(text: str) -> int:
    if not text.isdigit() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"a whole number from 0 to 2^32 - 1 was expected, got {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 was expected, got {text!r}")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1, or 75 (``EX_TEMPFAIL``) for a run that the same command resumes."""
    stop, options = Stop(), parse(arguments)
    try:
        if arguments is None:  # otherwise the caller has initialised JAX
            jax.config.update("jax_enable_preemption_service", False)  # the service would intercept SIGTERM
            distributed.initialize(options.coordinator, options.processes, options.process)
        with distributed.resumable():
            return 0 if Run(options, stop).train() else os.EX_TEMPFAIL
    except Stopped:
        if jax.process_index() == 0:
            print("stopped before the first step: nothing is lost", flush=True)
        return os.EX_TEMPFAIL
    except Exception as error:
        if not isinstance(error, (DataError, CheckpointError, OSError, ImportError, FloatingPointError)):
            raise
        print(f"train_large: {error}", file=sys.stderr)
        return 1
