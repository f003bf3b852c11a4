"""The identity of a run: compared with the contents of its folder, and between its processes."""

import argparse
import json
from typing import Any
import zlib

from etils import epath
import jax
from jax.experimental import multihost_utils
import numpy as np

from examples.train_large.blocks import Blocks, DataError
from examples.train_large.rounds import Job, prepared, source

SETTINGS = ("method", "set", "task", "batch", "blocks", "epochs", "held_out", "seed")  # a resumed run keeps them
OWN = ("out", "process")  # options that may differ between processes: hosts may mount the same folder elsewhere


def begun(options: argparse.Namespace) -> tuple[dict[str, Any], Job]:
    """Returns the configuration of the run and its job, after all processes have found the same configuration.

    Raises:
      DataError, OSError, ImportError: a process cannot start, or was started with other options. All processes raise,
        because the remaining processes would wait for ever.
    """
    result: Any = None
    wrong = None
    try:
        blocks = source(options)
        config = _compared(options.out, options, blocks)
        result = config, prepared(options, blocks)
    except (DataError, OSError, ImportError) as error:  # raised after the exchange with the other processes
        wrong = error
    texts = {name: str(value) for name, value in vars(options).items() if name not in OWN}
    mark = zlib.crc32(json.dumps([texts, result and result[0]], sort_keys=True).encode())
    same = jax.process_count() == 1 or np.ptp(multihost_utils.process_allgather(np.uint32(mark))) == 0
    if wrong is not None:
        raise wrong
    if not same:
        raise DataError("the processes must be started with the same options and see the same data")
    return result


def _compared(out: epath.Path, options: argparse.Namespace, blocks: Blocks) -> dict[str, Any]:
    """Returns the configuration of the run after comparing it with the folder; keeps the folder's blocks per round.

    Raises:
      DataError: the folder holds another run (the message names the difference), or a file cannot be read.
    """
    file, was = out / "config.json", {}
    try:
        if file.exists():
            was = json.loads(file.read_text())
            options.blocks = was["blocks"] if options.blocks is None else options.blocks
    except OSError as error:
        raise DataError(f"cannot read {file}: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"{file} is not what a run wrote: {error}") from error
    options.blocks = options.blocks or jax.device_count()
    config = {name: getattr(options, name) for name in SETTINGS} | {"table": blocks.described}
    config = json.loads(json.dumps(config))
    for name in was:
        if was[name] != config.get(name):
            message = f"{out} holds a run of another {name}: {was[name]}, not {config.get(name)}"
            if name == "table":
                message = f"{out} holds a run on other data: {_changed(was[name], config[name])}"
            raise DataError(f"{message}; give another --out")
    return config


def _changed(was: dict[str, Any], now: dict[str, Any]) -> str:
    """Returns the first difference between two descriptions of a table."""
    rows, rows_now = was.get("shards", {}), now.get("shards", {})
    for file in sorted(rows.keys() | rows_now.keys()):
        if rows.get(file) != rows_now.get(file):
            return f"{file} had {rows.get(file, 'no')} rows, and has {rows_now.get(file, 'no')} rows now"
    name = next(name for name in [*was, *now] if was.get(name) != now.get(name))
    return f"{name} was {was.get(name)}, and is {now.get(name)} now"


class Consumed:
    """The blocks that a run has used, with their checksums and the state of their files.

    Attributes:
      used: mask of the blocks that this process has used, or that a checkpoint knows, ``(blocks,)``.
    """

    def __init__(self, job: Job):
        """Begins with the blocks that every process has read, for the moments and the validation set."""
        self._blocks = job.blocks
        self.used = job.blocks.checksums != 0

    def checksums(self) -> np.ndarray:
        """Returns the checksum of each block that any process has used, else 0. All processes must call it."""
        own = np.where(self.used, self._blocks.checksums, 0).astype(np.uint32)
        return own if jax.process_count() == 1 else multihost_utils.process_allgather(own).max(0)

    def compare(self, checksums: np.ndarray, stamps: dict[str, list[int]]) -> list[str]:
        """Compares the data with a checkpoint; blocks that change from now on are an error where they are read.

        Blocks that are in memory are compared. Other blocks are read again only if the size or the time of modification
        of their file has changed.

        Args:
          checksums: checksums of the checkpoint.
          stamps: stamps of the checkpoint.

        Returns:
          Notes on changed files, whose used blocks are the same.

        Raises:
          DataError: a used block has changed. The message names it.
        """
        before, now = np.asarray(checksums, np.uint32), self._blocks.checksums
        for i in np.flatnonzero((before != 0) & (now != 0) & (before != now)):
            raise self._blocks.changed(int(i))
        now[:] = np.maximum(now, before)
        self.used |= before != 0
        changed = [file for file, stamp in self._blocks.table.stamps.items() if stamps.get(file) != stamp]
        count = dict.fromkeys(changed, 0)
        for i in np.flatnonzero(before) if changed else ():
            if (file := self._blocks.table.file(int(i))) in count:
                self._blocks[int(i)]  # raises an error if it has changed
                count[file] += 1
        return [
            f"{file} was written again: its {number} blocks that the run has used are the same, its others may differ"
            for file, number in count.items()
        ]
