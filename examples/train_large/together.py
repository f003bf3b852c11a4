"""Agreement of the processes of a run: on a request to stop, on unusable data, and on the end of the time."""

import signal
from typing import Any

import jax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from jtrees import sharding


class Stopped(Exception):
    """SIGTERM came."""


class Stop:
    """Remembers SIGTERM and Ctrl-C until :meth:`check`, which is called after every long task except rounds."""

    def __init__(self) -> None:
        """Installs the handlers; a second Ctrl-C raises KeyboardInterrupt."""
        self.requested = False
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGINT, self._ask)

    def _ask(self, *_: Any) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def check(self) -> None:
        """Raises :class:`Stopped` if any process was asked to stop. All processes must call this; it is a barrier."""
        requested = self.requested
        if jax.process_count() > 1:
            requested = multihost_utils.process_allgather(np.array(requested)).any()
        if requested:
            raise Stopped


class Agreement:
    """Flags of all processes, combined by their devices (or) between two rounds; no host waits for another host.

    A process sends its flags before it dispatches a round. It reads the combined flags after it has fetched the rows of
    the next round. All processes read the same flags before the same round.
    """

    def __init__(self, mesh: Mesh):
        """Compiles the combination for the devices of a mesh."""
        self._mesh, self._flags = mesh, None
        self._any = jax.jit(lambda flags: flags.any(0), out_shardings=NamedSharding(mesh, PartitionSpec()))

    def say(self, *flags: bool) -> None:
        """Sends flags; all processes must call this before the same round."""
        if jax.process_count() > 1:
            with jax.set_mesh(self._mesh):
                self._flags = self._any(sharding.join_rows(np.tile(flags, (jax.local_device_count(), 1))))

    def hear(self, *flags: bool) -> tuple[bool, ...]:
        """Returns the flags that any process sent last; a single process gets the flags that it passes."""
        return flags if self._flags is None else tuple(map(bool, np.asarray(self._flags)))
