"""Files of a run, on a disk or in a bucket. Only this module uses Orbax, for checkpoints."""

import os
from typing import Any

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jtrees import io

KEPT = 3


def place(text: str) -> epath.Path:
    """Returns the path of a folder: ``gs://bucket/...`` or an absolute path on a disk.

    ``pathlib`` would drop the double slash of a bucket. Orbax needs an absolute path. ``epath.Path.resolve`` would
    treat a bucket as a folder on a disk.
    """
    return epath.Path(text if "://" in text else os.path.abspath(text))


def write_whole(file: os.PathLike, text: str) -> None:
    """Writes a file atomically: an interrupted call leaves no partial file."""
    with io.written_whole(file) as out:
        out.write(text.encode())


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or no checkpoint can be read; the message names it and the reason."""


class Checkpoints:
    """The last checkpoints of a run in a folder. Writes are atomic."""

    def __init__(self, folder: epath.Path):
        """Makes the folder, which is an absolute path or a path of a bucket."""
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, cleanup_tmp_directories=True)
        self._folder = folder
        try:
            self._manager = ocp.CheckpointManager(folder, options=options)
        except OSError as error:
            raise CheckpointError(f"cannot write to {folder}: {error}") from error

    def save(self, step: int, tree: Any, told: dict[str, Any]) -> None:
        """Starts to write a pytree of arrays and keys, and plain data.

        The arrays may be donated when this method returns.

        Raises:
          CheckpointError: this checkpoint or the one before it cannot be written; earlier checkpoints are unchanged.
        """
        items = ocp.args.Composite(tree=ocp.args.StandardSave(_arrays(tree)), told=ocp.args.JsonSave(told))
        self._tried(f"the checkpoint of step {step}", lambda: self._manager.save(step, args=items, force=True))

    def wait(self) -> None:
        """Waits until the checkpoint is written.

        Raises:
          CheckpointError: it could not be written; earlier checkpoints are unchanged.
        """
        self._tried("a checkpoint", self._manager.wait_until_finished)

    def _tried(self, what: str, write: Any) -> None:
        try:
            write()
        except Exception as error:  # Orbax wraps errors of the system in errors of many kinds
            raise CheckpointError(f"cannot write {what} to {self._folder}: {_line(error)}") from error

    def newest(self, like: Any) -> tuple[int, Any, dict[str, Any], list[str]] | None:
        """Reads the newest readable checkpoint, and deletes unreadable newer ones.

        Returns:
          The step, a pytree like ``like``, the plain data, and messages on the unreadable newer checkpoints. None if
          there is no checkpoint.

        Raises:
          CheckpointError: there are checkpoints, but none can be read; or as in :meth:`wait`.
        """
        self.wait()
        wrong = []
        for step in sorted(self._manager.all_steps(), reverse=True):
            items = ocp.args.Composite(tree=ocp.args.StandardRestore(_arrays(like)), told=ocp.args.JsonRestore())
            try:
                checkpoint: Any = self._manager.restore(step, args=items)
                tree = _with_keys(checkpoint.tree, like)
            except Exception as error:  # an incomplete file leads to many kinds of errors
                wrong.append(f"the checkpoint of step {step} in {self._folder} cannot be read: {_line(error)}")
                continue
            for newer in [other for other in self._manager.all_steps() if other > step]:
                self._manager.delete(newer)
            return step, tree, checkpoint.told, wrong
        if wrong:
            raise CheckpointError("; ".join(wrong))
        return None

    def close(self) -> None:
        """Waits until the checkpoint is written; raises as :meth:`wait`."""
        self._tried("a checkpoint", self._manager.close)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _arrays(tree: Any) -> dict[str, Any]:
    """Returns the arrays of a pytree by their number; a key is replaced by its data."""
    return {f"{i}": jax.random.key_data(a) if _is_key(a) else a for i, a in enumerate(jax.tree.leaves(tree))}


def _with_keys(arrays: dict[str, Any], like: Any) -> Any:
    leaves, structure = jax.tree.flatten(like)
    values = [arrays[f"{i}"] for i in range(len(leaves))]
    key = lambda data, like: jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))
    for value, leaf in zip(values, leaves, strict=True):
        if np.shape(value) != np.shape(jax.random.key_data(leaf) if _is_key(leaf) else leaf):
            raise ValueError(f"shape {np.shape(value)} where {np.shape(leaf)} was expected")
    return jax.tree.unflatten(
        structure, [key(value, leaf) if _is_key(leaf) else value for value, leaf in zip(values, leaves, strict=True)]
    )
