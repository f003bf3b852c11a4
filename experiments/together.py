"""What the processes of a run agree on: that one was asked to stop, that its data will not do, that time is up."""

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
    """Remembers SIGTERM and Ctrl-C until :meth:`check`: after whatever takes long, except rounds."""

    def __init__(self) -> None:
        """Installs the handlers; a second Ctrl-C raises KeyboardInterrupt."""
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGINT, self._ask)

    def _ask(self, *_: Any) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def check(self) -> None:
        """Waits for all processes, which must call this, and raises :class:`Stopped` if any was asked to stop."""
        asked = self.asked
        if jax.process_count() > 1:
            asked = multihost_utils.process_allgather(np.array(asked)).any()
        if asked:
            raise Stopped


class Agreement:
    """Flags of all processes, or-ed by their devices between two rounds, so that no host waits for the others.

    A process says what it knows before a round is dispatched, and hears what any said when it has fetched the rows of
    the next. All hear the same before the same round.
    """

    def __init__(self, mesh: Mesh):
        """For the devices of a mesh."""
        self._mesh, self._said = mesh, None
        self._any = jax.jit(lambda flags: flags.any(0), out_shardings=NamedSharding(mesh, PartitionSpec()))

    def say(self, *flags: bool) -> None:
        """Sends flags; all processes must call this before the same round."""
        if jax.process_count() > 1:
            with jax.set_mesh(self._mesh):
                self._said = self._any(sharding.join_rows(np.tile(flags, (jax.local_device_count(), 1))))

    def hear(self, *flags: bool) -> tuple[bool, ...]:
        """Returns which flags any process has sent last; of one process alone, those that are given now."""
        return flags if self._said is None else tuple(map(bool, np.asarray(self._said)))
