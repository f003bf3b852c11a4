"""Forked processes: the threads of XLA do not survive a fork, so a child of a process that has used JAX has no XLA.

A program would wait there for ever. Trees and forests predict by NumPy in such a child, everything else raises. A child
forked before its parent used JAX starts an XLA of its own, as does every process that is spawned.
"""

import os
from typing import Any

import jax
from jax._src import xla_bridge
import numpy as np

_used_at_fork = False  # whether JAX was in use in the process that forks
_lost = False


def lost_xla() -> bool:
    """Returns whether this process was forked from one that had used JAX."""
    return _lost


def require_xla(what: str) -> None:
    """Raises ``RuntimeError`` in a process without XLA; ``what`` needs it."""
    if _lost:
        raise RuntimeError(
            f"{what} must run in a process with threads of XLA, got one forked from a process that had used JAX: start "
            'workers by multiprocessing.get_context("spawn") or "forkserver", or fork before JAX is used or a model is '
            "loaded"
        )


def on_host(tree: Any) -> Any:
    """Returns a pytree with NumPy arrays for those of JAX, read without XLA.

    Raises:
      RuntimeError: for an array of a GPU or TPU, or one that was not computed before the fork.
    """

    def read(array: Any) -> np.ndarray:
        if isinstance(array, jax.Array) and _lost:
            if any(device.platform != "cpu" for device in array.devices()):
                require_xla("a model on an accelerator")
            if not array.is_ready():
                raise RuntimeError(
                    "a model must be computed before its process forks, got one under way: call "
                    "jax.block_until_ready(model) first"
                )
        return np.asarray(array)

    return jax.tree.map(read, tree)


def _before_fork() -> None:
    global _used_at_fork
    _used_at_fork = _backend_is_initialized()


def _in_child() -> None:
    global _lost
    _lost = _lost or _used_at_fork


def _backend_is_initialized() -> bool:
    # JAX has no public function for this.
    known = getattr(xla_bridge, "backends_are_initialized", None)
    return True if known is None else known()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)
