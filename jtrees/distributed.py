"""Several processes (``jax.distributed``): what comes to each host, what they agree on, and who speaks.

All processes run the same Python on the same arguments. Compiled programs span the devices of all of them, and their
results come to every host by :func:`to_host`. Then every process decides from the same numbers. Numbers that differ,
such as those of a clock, are agreed on by :func:`least`. With one process these functions do nothing.
"""

from collections.abc import Iterator
import contextlib
import contextvars
import itertools
import os
import secrets
import time
from typing import Any
import warnings

import jax
from jax._src import distributed as coordinator
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from jtrees import sharding

__all__ = ["alone", "check_folder", "initialize", "to_host"]

_WAIT = 300  # seconds for which a process waits for the others to begin the same work
_MEETINGS = itertools.count()
_APART = contextvars.ContextVar("apart", default=False)  # whether a part of shared work is done by each process


def initialize(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None, **options: Any
) -> None:
    """Joins the other processes, if there are any; call it before anything else of JAX.

    JAX recognises TPU pods, Slurm and Open MPI by itself. Elsewhere the processes need an address, from the arguments
    or the environment. Without a cluster and an address this process is alone.

    Args:
      coordinator: host and port of the first process; None: ``JAX_COORDINATOR_ADDRESS``, or that of the cluster.
      processes: how many there are; None: ``JAX_NUM_PROCESSES``, or those of the cluster.
      process: number of this one, from 0; None: ``JAX_PROCESS_ID``, or that of the cluster.
      **options: others of ``jax.distributed.initialize``, such as ``heartbeat_timeout_seconds``.

    Raises:
      ValueError: for some of the three arguments without the others.
      RuntimeError: if JAX has begun to compute, or the other processes do not come within five minutes.
    """
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    address = coordinator, _number(processes, "JAX_NUM_PROCESSES"), _number(process, "JAX_PROCESS_ID")
    try:
        jax.distributed.initialize(*address, **options)
    except ValueError as error:  # also where JAX finds no cluster
        if address != (None, None, None):
            raise ValueError(f"coordinator, processes and process go together, got {address!s:.80}") from error


def _number(given: int | None, name: str) -> int | None:
    """Returns a number that is given, or that of an environment variable."""
    if given is not None or name not in os.environ:
        return given
    if not (text := os.environ[name]).isdecimal():
        raise ValueError(f"{name} must be a number, got {text!r:.80}")
    return int(text)


def check_folder(folder: Any, seconds: float = 30) -> None:
    """Makes a folder, and raises an error in all processes unless they all see the same one. All must call.

    Args:
      folder: a ``pathlib.Path``, or an ``etils.epath.Path`` for a bucket.
      seconds: how long a file of the first process may take to reach the others.

    Raises:
      OSError: if the folder cannot be written, or processes have folders of their own.
    """
    if jax.process_count() == 1:
        folder.mkdir(parents=True, exist_ok=True)
        return
    mine, wrong = secrets.randbits(31), None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            (folder / f".seen-{mine}").write_text("")
    except OSError as error:  # told below, as the others wait
        wrong = error
    # No process looks before the file is there: a network disk would remember for a while that it is not.
    file = folder / f".seen-{int(multihost_utils.broadcast_one_to_all(np.int32(mine)))}"
    end = time.monotonic() + seconds
    while wrong is None and not (found := file.exists()) and time.monotonic() < end:
        time.sleep(0.2)
    seen = multihost_utils.process_allgather(np.array(wrong is None and found)).ravel()
    if jax.process_index() == 0:
        with contextlib.suppress(OSError):
            file.unlink()
    if not seen.all():
        blind = ", ".join(map(str, np.flatnonzero(~seen)))
        said = f"folder must be one that all processes see, such as a shared disk or a bucket, got {folder}"
        why = f" ({wrong})" if wrong else ""
        raise OSError(f"{said}: a file of process 0 did not come to process {blind} in {seconds:g} s{why}") from wrong


def is_shared() -> bool:
    """Returns whether other processes take part in the work: there are some, and the mesh in context has their devices.

    Without a mesh in context they do. Within a traced function nothing is shared.
    """
    # Asked first, as to count the processes starts XLA, which must not be before jax.distributed.initialize().
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return False
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:
        return False
    return _APART.get() or mesh.empty or any(d.process_index != jax.process_index() for d in mesh.devices.flat)


def is_first() -> bool:
    """Returns whether this process shows progress, warns and writes, as the first one of those that share the work."""
    return not is_shared() or jax.process_index() == 0


def to_host(tree: Any) -> Any:
    """Returns a pytree in NumPy, also where its arrays are spread over processes; then all processes must call."""
    far = [a for a in jax.tree.leaves(tree) if _is_far(a)]
    if far:
        copies = iter(jax.jit(sharding.same, out_shardings=NamedSharding(far[0].sharding.mesh, PartitionSpec()))(far))
        tree = jax.tree.map(lambda a: next(copies) if _is_far(a) else a, tree)
    return jax.tree.map(np.asarray, jax.device_get(tree))


def _is_far(a: Any) -> bool:
    return isinstance(a, jax.Array) and not (a.is_fully_addressable or a.is_fully_replicated)


def spans(tree: Any) -> bool:
    """Returns whether an array of a pytree is spread over processes, so that none of them has all of it."""
    return any(map(_is_far, jax.tree.leaves(tree)))


def warn(message: str, category: type[Warning] = UserWarning, stacklevel: int = 2) -> None:
    """Warns, of several processes in the first alone; ``stacklevel`` is that of ``warnings.warn``."""
    if is_first():
        warnings.warn(message, category, stacklevel + 1)


def least(number: float) -> float:
    """Returns the least of the numbers of all processes that share the work, all of which must call."""
    if not is_shared():
        return number
    return float(np.min(multihost_utils.process_allgather(np.float32(number))))


def of_first(number: int) -> int:
    """Returns the number of the first process that shares the work; all must call."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(number))) if is_shared() else number


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Context in which this process works without the others, with rows sharded over its own devices.

    Example:
      >>> with jtrees.distributed.alone():
      ...     fit = jtrees.fit(jtrees.DGT(depth=1, epochs=1), np.eye(4), np.arange(4), key=jax.random.key(0))
    """
    if jax.process_count() == 1:
        yield
        return
    with jax.set_mesh(sharding.of_devices(jax.local_devices())):
        yield


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Context in which each of the processes that share the work computes the same on its own devices.

    A NumPy array is on every host, so no process needs the others to evaluate it.
    """
    if not is_shared() or sharding.share_of_starts() is None:
        yield
        return
    token = _APART.set(True)
    try:
        with alone():
            yield
    finally:
        _APART.reset(token)


@contextlib.contextmanager
def together(what: str) -> Iterator[None]:
    """Context of work that all processes share; without a mesh in context their devices share its runs.

    Raises:
      RuntimeError: if the others do not begin the same work within five minutes.
    """
    if not is_shared():
        yield
        return
    _meet(what)
    if sharding.share_of_starts() is not None:
        yield
        return
    with jax.set_mesh(sharding.mesh(jax.device_count())):
        yield


def _meet(what: str) -> None:
    """Waits until all processes come here."""
    client = coordinator.global_state.client  # JAX has no public function with a timeout
    if client is None:
        return
    try:
        client.wait_at_barrier(f"{what}, {next(_MEETINGS)}", 1000 * _WAIT)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        raise RuntimeError(
            f"{what} must be called by all {jax.process_count()} processes, got no call of one of them in {_WAIT} s; "
            "a process can work alone in the context jtrees.distributed.alone()"
        ) from error
