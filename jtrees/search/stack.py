"""Stack: calls that a single compiled call makes, on accelerators by ``vmap``."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrees import distributed
from jtrees.search.problem import Arrays, Call, DeviceValue
from jtrees.search.run import Form

# Updates times saved calls from which a smaller stack is compiled. A compilation takes seconds, and an update of a call
# at least a tenth of a millisecond.
_WORTH = 10_000


def size_of_survivors(calls: list[Call], size: int, shares: int) -> int:
    """Returns a smaller size of a stack for few calls, a multiple of ``shares``, if it pays for another compilation."""
    # The decision depends on numbers of updates and not on a clock, so it is the same in all processes and runs.
    small = 1 << (len(calls) - 1).bit_length()
    small += -small % shares
    steps = max(call.steps or 0 for call in calls)
    return small if 2 * small <= size and steps * (size - small) >= _WORTH else size


def stacked(*arrays: Any) -> Any:
    """Stacks arrays on the host, without compilation; random keys, of which no host has arrays, on the device."""
    return jnp.stack(arrays) if distributed.is_key(arrays[0]) else np.stack([np.asarray(a) for a in arrays])


class Stack:
    """Calls that a single compiled call makes.

    Attributes:
      form: the static part of the program.
      values: the state of a training, the run and the arguments, stacked or shared.
      axes: the axis of each leaf of ``values``: 0, or None for a shared array. None: a single call without a new axis.
      numbers: the numbers of the calls.
      state: the result so far.
      is_active: whether the training of a call continues.
    """

    def __init__(self, form: Form, values: Any, axes: tuple | None, numbers: list[int], trains: bool):
        self.form, self.values, self.axes, self.numbers = form, values, axes, numbers
        self.state = values[0][0] if trains else None
        self.is_active, self._finished = True, {}

    def take(self, losses: Any, has_ended: Any, all_losses: list, steps: np.ndarray, done: int, count: int) -> None:
        """Stores the losses of ``count`` updates, and the states of calls that have all of their updates."""
        over = np.atleast_1d(has_ended)[: len(self.numbers)] | (done >= steps[self.numbers])
        self.is_active = not over.all()
        for lane, number in enumerate(self.numbers):
            if done - count < steps[number]:
                all_losses[number].append((losses if self.axes is None else losses[lane])[:count])
        self.keep_finished(steps, done)

    def keep_finished(self, steps: np.ndarray, done: int) -> None:
        """Stores the states of calls that end after ``done`` updates while another call of the stack continues."""
        for lane, number in enumerate(self.numbers):
            if done == steps[number] and self.is_active:
                self._finished[lane] = jax.tree.map(lambda a, lane=lane: a[lane], self.state)

    def results(self) -> list[DeviceValue]:
        """Returns the result of each call."""
        arrays = Arrays(self.state)
        lanes = range(len(self.numbers))
        values = [DeviceValue(arrays, None if self.axes is None else lane) for lane in lanes]
        for lane, state in self._finished.items():
            values[lane] = DeviceValue(Arrays(state))
        return values
