"""Forked processes. XLA's threads do not survive a fork, so the child of a process that used JAX lacks XLA.

A program would wait forever in such a child. Trees and forests predict by NumPy there, and all other functions raise an
error. A child that is forked before its parent uses JAX starts its own XLA, and so does every spawned process.
"""

import os
from typing import Any

import jax
from jax._src import xla_bridge
import numpy as np

_used_at_fork = False  # whether JAX was in use in the parent at the fork
_lacks_xla = False


def processors() -> int:
    """Returns the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def lost_xla() -> bool:
    """Returns whether this process was forked after its parent had used JAX."""
    return _lacks_xla


def require_xla(operation: str) -> None:
    """Raises ``RuntimeError`` in a process without XLA. ``operation`` names the operation that needs XLA."""
    if _lacks_xla:
        raise RuntimeError(
            f"{operation} must run in a process with threads of XLA, got a process forked after its parent used JAX: "
            'start workers by multiprocessing.get_context("spawn") or "forkserver", or fork before JAX is used or a '
            "model is loaded"
        )


def on_host(tree: Any) -> Any:
    """Returns a pytree in which NumPy arrays replace JAX arrays, read without XLA.

    Raises:
      RuntimeError: for an array on a GPU or TPU, or an array whose computation did not end before the fork.
    """

    def read(array: Any) -> np.ndarray:
        if isinstance(array, jax.Array) and _lacks_xla:
            if any(device.platform != "cpu" for device in array.devices()):
                require_xla("a model on an accelerator")
            if not array.is_ready():
                raise RuntimeError(
                    "a model must be computed before its process forks, got a model still being computed: call "
                    "jax.block_until_ready(model) first"
                )
        return np.asarray(array)

    return jax.tree.map(read, tree)


def _before_fork() -> None:
    global _used_at_fork  # JAX has no public function for this
    _used_at_fork = getattr(xla_bridge, "backends_are_initialized", lambda: True)()


def _in_child() -> None:
    global _lacks_xla
    _lacks_xla = _lacks_xla or _used_at_fork


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)
