"""Several processes (``jax.distributed``): results for every host, agreement on numbers, and the process that writes.

All processes run the same Python code with the same arguments. Compiled programs span the devices of all processes, and
:func:`to_host` copies their results to every host. Every process then makes its decisions from the same numbers. For
numbers that differ between processes, such as clock times, the processes agree on the least (:func:`minimum`). In a
single process these functions do nothing.
"""

from collections.abc import Iterator
import contextlib
import contextvars
import itertools
import os
import re
import secrets
import sys
import time
from typing import Any

import jax
from jax._src import distributed as coordinator
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from jtrees import sharding, validation

__all__ = ["alone", "check_folder", "initialize", "resumable", "to_host"]

# Errors of collectives and of JAX's coordination service if another process has ended. They begin with a status. JAX
# raises them as JaxRuntimeError, or as ValueError if a call fails before its result is awaited.
_ENDED = re.compile(r"UNAVAILABLE: |[A-Z_]+: (?s:.)*(?i:gloo|nccl|barrier|heartbeat|connection (reset|closed))")
WAIT_SECONDS = 300  # seconds for which a process waits until all processes start the same work
_MEETINGS = itertools.count()
_APART = contextvars.ContextVar("apart", default=False)  # whether each process does a part of shared work alone


def initialize(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None, **options: Any
) -> None:
    """Joins the other processes, if there are any. Call it before any other function of JAX.

    JAX detects TPU pods, Slurm and Open MPI. Elsewhere the processes need an address, from the arguments or the
    environment. If both the cluster and the address are missing, this process works alone.

    Args:
      coordinator: host and port of the first process. None: ``JAX_COORDINATOR_ADDRESS``, or the cluster's address.
      processes: number of processes. None: ``JAX_NUM_PROCESSES``, or the cluster's number.
      process: index of this process, from 0. None: ``JAX_PROCESS_ID``, or the cluster's index.
      **options: further options of ``jax.distributed.initialize``, such as ``heartbeat_timeout_seconds``.

    Raises:
      ValueError: if only some of the three arguments are given.
      RuntimeError: if JAX has already started to compute, or the other processes do not join within five minutes.
    """
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    address = coordinator, _number(processes, "JAX_NUM_PROCESSES"), _number(process, "JAX_PROCESS_ID")
    try:
        jax.distributed.initialize(*address, **options)
    except ValueError as error:  # JAX also raises it if it finds no cluster
        if None not in address:
            raise
        if address != (None, None, None):
            raise ValueError(
                f"coordinator, processes and process must be given together, got {address!s:.80}"
            ) from error


def _number(argument: int | None, name: str) -> int | None:
    """Returns the given number, or else the number in an environment variable."""
    if argument is not None or name not in os.environ:
        return argument
    if not (text := os.environ[name]).isdecimal():
        raise ValueError(f"{name} must be a number, got {text!r:.80}")
    return int(text)


def check_folder(folder: Any, seconds: float = 30) -> None:
    """Creates a folder, and raises an error in all processes if they do not share it. All processes must call it.

    Args:
      folder: a ``pathlib.Path``, or an ``etils.epath.Path`` for a bucket.
      seconds: seconds within which a file of the first process must appear in all processes.

    Raises:
      OSError: if the folder cannot be written, or the processes do not see the same folder.
    """
    if jax.process_count() == 1:
        folder.mkdir(parents=True, exist_ok=True)
        return
    mine, wrong = secrets.randbits(31), None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            (folder / f".seen-{mine}").write_text("")
    except OSError as error:  # raised below, because the other processes wait there
        wrong = error
    # No process looks for the file before it exists, because a network disk would cache its absence for a while.
    file = folder / f".seen-{int(multihost_utils.broadcast_one_to_all(np.int32(mine)))}"
    end = time.monotonic() + seconds
    while wrong is None and not (exists := file.exists()) and time.monotonic() < end:
        time.sleep(0.2)
    visible = multihost_utils.process_allgather(np.array(wrong is None and exists)).ravel()
    if jax.process_index() == 0:
        with contextlib.suppress(OSError):
            file.unlink()
    if not visible.all():
        blind = ", ".join(map(str, np.flatnonzero(~visible)))
        message = f"folder must be one that all processes see, such as a shared disk or a bucket, got {folder}"
        why = f" ({wrong})" if wrong else ""
        message += f": a file of process 0 did not come to process {blind} in {seconds:g} s{why}"
        raise OSError(message) from wrong


@contextlib.contextmanager
def resumable() -> Iterator[None]:
    """Context of a run that the same command resumes: the process ends with status 75 if another process has ended.

    The status is ``os.EX_TEMPFAIL``, and the process prints one line. If this context is missing, the end of Python
    waits for the other process. JAX then aborts this process, with messages of C++. JAX also aborts the other processes
    if the first process ends, and a process that waits on a device, after ``heartbeat_timeout_seconds``.
    """
    try:
        yield
    except Exception as error:
        messages = map(str, (error, error.__cause__, error.__context__))
        if jax.process_count() > 1 and any(map(_ENDED.match, messages)):
            print("another process has ended: the same command resumes the run", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(os.EX_TEMPFAIL)
        raise


def is_shared() -> bool:
    """Returns whether other processes take part in the work."""
    # They do if no mesh is in context, or if the mesh has devices of other processes. Inside a traced function, work is
    # never shared.
    # This check comes first: jax.process_count() starts XLA, which must not precede jax.distributed.initialize().
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return False
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:
        return False
    return _APART.get() or mesh.empty or any(d.process_index != jax.process_index() for d in mesh.devices.flat)


def is_first() -> bool:
    """Returns whether this process shows progress, warns and writes, as the first process that shares the work."""
    return not is_shared() or jax.process_index() == 0


def to_host(tree: Any) -> Any:
    """Returns a pytree of NumPy arrays, in which random keys stay arrays of JAX.

    If arrays are spread over processes, all processes must call the function.
    """
    far = [a for a in jax.tree.leaves(tree) if _is_far(a)]
    if far:
        copies = iter(jax.jit(sharding.same, out_shardings=NamedSharding(far[0].sharding.mesh, PartitionSpec()))(far))
        tree = jax.tree.map(lambda a: next(copies) if _is_far(a) else a, tree)
    return jax.tree.map(lambda a: a if is_key(a) else np.asarray(a), jax.device_get(tree))


def is_key(a: Any) -> bool:
    """Returns whether a value is an array of random keys, of which NumPy has no arrays."""
    return isinstance(a, jax.Array) and jax.numpy.issubdtype(a.dtype, jax.dtypes.prng_key)


def _is_far(a: Any) -> bool:
    return isinstance(a, jax.Array) and not (a.is_fully_addressable or a.is_fully_replicated)


def spans(tree: Any) -> bool:
    """Returns whether an array of a pytree is spread over processes, so that no process has all of it."""
    return any(map(_is_far, jax.tree.leaves(tree)))


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line that called the library, in the first process only."""
    if is_first():
        validation.warn(message, category)


def minimum(number: float) -> float:
    """Returns the least number among all processes that share the work. All of them must call it."""
    if not is_shared():
        return number
    return float(np.min(multihost_utils.process_allgather(np.float32(number))))


def of_first(number: int) -> int:
    """Returns the number of the first process that shares the work. All processes must call it."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(number))) if is_shared() else number


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Context in which this process works alone, with rows sharded over its own devices.

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
    """Context in which each process that shares the work computes the same result on its own devices."""
    # Every host has a copy of a NumPy array, so each process can evaluate it alone.
    if not is_shared() or sharding.share_of_starts() is None:
        yield
        return
    token = _APART.set(True)
    try:
        with alone():
            yield
    finally:
        _APART.reset(token)


def together(operation: str) -> Any:
    """Context of work that all processes share. If no mesh is in context, the runs are divided among all devices."""
    if is_shared():
        _meet(operation)
        if sharding.share_of_starts() is None:
            return jax.set_mesh(sharding.mesh(jax.device_count()))
    return contextlib.nullcontext()


def _meet(operation: str) -> None:
    """Waits until all processes have called it."""
    client = coordinator.global_state.client  # JAX has no public function with a timeout
    if client is None:
        return
    try:
        client.wait_at_barrier(f"{operation}, {next(_MEETINGS)}", 1000 * WAIT_SECONDS)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        raise RuntimeError(
            f"{operation} must be called by all {jax.process_count()} processes, got a process without a call in "
            f"{WAIT_SECONDS} s; a process can work alone in the context jtrees.distributed.alone()"
        ) from error
