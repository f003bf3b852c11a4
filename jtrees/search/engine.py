"""The engine, which runs procedures side by side and makes their calls together.

The engine advances every procedure until it waits. Waiting calls of the same program go into one compiled call. If an
array is the same object in all calls, it is shared and not copied. On CPUs, each call runs in the program of a single
run, so the results have the bits of single runs. The number of calls that run at once is the number of processors, at
most 8. On other devices calls are stacked by ``vmap``. The order of the calls does not depend on a clock, so all
processes make the same calls.
"""

from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
import itertools
import time
from typing import Any
import weakref

import jax
import numpy as np

from jtrees import distributed, processes, sharding
from jtrees.compilation import default_settings
from jtrees.search.monitor import Monitor, Pace
from jtrees.search.problem import Call, Children, DeviceValue, OutOfTimeError, Trained, has_identity, identity_of
from jtrees.search.run import Form, argument_of_program, often_compiled, rarely_compiled
from jtrees.search.stack import Stack, size_of_survivors, stacked
from jtrees.training.loop import MOST
from jtrees.training.state import NOT_TAKEN

_MOST_THREADS = 8  # threads that make calls at once on CPUs; each needs memory
_PLACED = 2**12  # numbers from which an array of a problem is put on the device once, and not in each call


class Engine:
    """Runs procedures side by side.

    Args:
      monitor: the monitor, which shows progress and enforces the deadline.
      impl: implementation of the random keys.
      stack_size: largest number of calls in a stack, if calls are stacked by ``vmap``.
      side_by_side: whether calls are stacked by ``vmap``. None: unless the devices are CPUs.
    """

    def __init__(self, monitor: Monitor, impl: str, stack_size: int = 64, side_by_side: bool | None = None):
        self.monitor, self.impl = monitor, impl
        devices, shares = jax.local_devices(), sharding.share_of_starts()
        side_by_side = devices[0].platform != "cpu" if side_by_side is None else side_by_side
        # A program over several devices has other rounding errors than the program of a single device. So the threads
        # of a process run the same program. Several processes need a program over all of their devices.
        self._threads = 1 if side_by_side or shares is not None else min(_MOST_THREADS, processes.processors())
        self._shares = shares or (len(devices) if side_by_side else 1)
        self._devices = None if shares else tuple(devices)
        self._most = max(stack_size, self._shares) if side_by_side else self._shares
        self.stacks = self._most > 1 or shares is not None  # whether calls of several runs are one call
        self.seconds_of_results = 0.0  # seconds that all results of this run took to finish
        self._began = False  # whether the procedures have made an update
        self._has_compiled = False  # whether the last calls compiled a program for threads
        self._paces: dict[Hashable, Pace] = {}
        self._stacks: dict[Hashable, tuple[int, tuple]] = {}  # the size and the axes of the stacks of each program
        self._executables: dict[Hashable, Any] = {}  # the programs that threads run
        self._pool: Any = None  # the threads; a pool for each call would take the time of a short call
        self._placed: dict[int, tuple[Any, Any]] = {}
        self._row_counts: set[int] = set()  # lengths of the arrays that have rows
        self._computed: dict[Hashable, Any] = {}

    def computed_once(self, fn: Callable[..., Any], args: tuple, options: dict[str, Any]) -> Any:
        """Returns ``fn(*args, **options)``, which is computed once for the same ``args``."""
        key = fn, identity_of(args)
        if key not in self._computed:
            arrays = [leaf for leaf in jax.tree.leaves(args) if has_identity(leaf)]
            # The key has the identities of the arrays, so the value is dropped with the first of them.
            drop = [weakref.ref(array, lambda _: self._computed.pop(key, None)) for array in arrays]
            values = jax.tree.map(lambda leaf: leaf.host if isinstance(leaf, DeviceValue) else leaf, args)
            self._computed[key] = fn(*values, **options), drop
        return self._computed[key][0]

    def run(self, *procedures: Any) -> list[Any]:
        """Returns the results of the procedures; for a procedure that became non-finite, its ``FloatingPointError``."""
        root, self._began, self.seconds_of_results = _Progress(None, None, 0), False, 0.0
        ready, waiting = deque(root.begin(procedures, len(procedures))), []
        try:
            with ThreadPoolExecutor(self._threads) as self._pool, default_settings():
                while ready or waiting:
                    while ready:
                        self._advance(ready.popleft(), ready, waiting)
                    if waiting:
                        waiting = self._answer(waiting, ready)
        finally:
            self._computed.clear()
            self._placed.clear()
            root.close()  # only after an error are there procedures that have not ended
        return root.results

    def _answer(self, waiting: list, ready: deque) -> list:
        """Makes the waiting calls of the first program together, and returns the other calls."""
        program: Any = waiting[0][2]
        group = [entry for entry in waiting if entry[2] == program]
        answers = self._make([call for _, call, _ in group], program[0])
        for (progress, *_), progress.answer in zip(group, answers, strict=True):
            ready.append(progress)
        return [entry for entry in waiting if entry[2] != program]

    def _advance(self, progress: "_Progress", ready: deque, waiting: list) -> None:
        """Runs a procedure until it waits or ends."""
        result: Any
        answer, progress.answer = progress.answer, None
        try:
            request = progress.procedure.send(answer)
        except StopIteration as end:
            result = end.value
        except (FloatingPointError, OutOfTimeError) as error:
            result = error
        else:
            if isinstance(request, Children):
                ready.extend(progress.begin(*request))
            else:
                waiting.append((progress, request, self._program_of(request)))
            return
        parent: Any = progress.parent
        parent.results[progress.number], parent.missing = result, parent.missing - 1
        if parent.later:
            ready.append(parent.later.popleft())
        if not parent.missing and parent.procedure is not None:
            parent.answer, parent.results, parent.children = parent.results, [], []
            ready.append(parent)

    def _program_of(self, call: Call) -> Hashable:
        """Returns the program of a call, and a label; calls for which both are equal can be stacked."""
        leaves, structure = jax.tree.flatten(_values_of(call))
        batches = filter(None, (call.problem.batch, call.problem.evaluation))
        self._row_counts.update(len(batch.x) for batch in batches)
        shapes = tuple(_shape_of(leaf) for leaf in leaves)
        return (Form(call.fn, self.impl), call.steps is None, structure, shapes), (call.name, call.begins)

    def _make(self, calls: list[Call], program: Hashable) -> list[Any]:
        """Returns the results of calls of a single program, in smaller stacks if the device has too little memory."""
        while True:
            try:
                stacks = self._stacked(calls, program)
                if calls[0].steps is not None:
                    return self._train(calls, stacks, program)
                for stack, state in zip(stacks, self._compiled(stacks, (), calls[0].often, program), strict=True):
                    stack.state = state
                return list(itertools.chain(*(stack.results() for stack in stacks)))
            except jax.errors.JaxRuntimeError as error:
                # Other processes might have enough memory, and would wait for this process.
                if "RESOURCE_EXHAUSTED" not in str(error) or distributed.is_shared() or not self._halve(program):
                    raise

    def _halve(self, program: Hashable) -> bool:
        """Makes the next stacks half as large, and says so; returns False if a stack has the smallest size."""
        size, axes = self._stacks.get(program, (1, ()))
        if size <= self._shares:
            return False
        self._most = max(size // 2, self._shares)
        self._stacks[program] = self._most, axes
        distributed.warn(
            f"{size} runs at once need more memory than the device has: {self._most} run at once (batch={self._most})"
        )
        return True

    def _compiled(self, stacks: list[Stack], counts: tuple, often: bool, program: Hashable) -> list[Any]:
        call, form = often_compiled if often else rarely_compiled, stacks[0].form
        if stacks[0].axes is not None:
            form = form._replace(axes=stacks[0].axes, shares=self._shares, devices=self._devices)
        if self._threads == 1 or len(stacks) == 1:
            return [call(form, stack.values, counts) for stack in stacks]
        if (program, often) not in self._executables:
            self._executables[program, often] = call.compiled(form, stacks[0].values, counts)
            self._has_compiled = True
        compiled, x64 = self._executables[program, often], jax.config.jax_enable_x64

        def make(stack: Stack) -> Any:
            with default_settings(), jax.enable_x64(x64):  # a thread does not inherit the context of its parent
                return jax.block_until_ready(compiled(stack.values, counts))

        return list(self._pool.map(make, stacks))

    def _train(self, calls: list[Call], stacks: list[Stack], program: Hashable) -> list[Trained]:
        """Makes the updates of all calls side by side. After the deadline, the states do not change any more."""
        first, steps, monitor = calls[0], np.array([call.steps for call in calls]), self.monitor
        losses: list[list[np.ndarray]] = [[] for _ in calls]
        active, done, turns, longest = [stack for stack in stacks if steps[stack.numbers].max() > 0], 0, 0, steps.max()
        pace = self._paces.setdefault(program, Pace(monitor))
        for stack in active:
            stack.keep_finished(steps, done)
        total = int(max(first.total or 0, first.begins + longest))
        with monitor.progress_of(total, first.name) as show:
            while active:
                is_optional = self._began and done >= first.least
                if monitor.is_rehearsed(turns) or (is_optional and not monitor.has_time(pace.step_seconds)):
                    break
                count = pace.steps(min(MOST, int(steps[steps > done].min()) - done))
                began, programs, self._began = time.monotonic(), often_compiled.programs(), True
                self._has_compiled = False
                counts, outputs = (np.int32(first.begins + done), np.int32(count)), []
                results = self._compiled(active, counts, True, program)
                for stack, (state, *rest) in zip(active, results, strict=True):
                    stack.state, stack.values = state, ((state,), *stack.values[1:])
                    outputs.append(rest)
                outputs = distributed.to_host(outputs)
                pace.took(count, time.monotonic() - began, self._has_compiled or often_compiled.programs() > programs)
                done, turns = done + count, turns + 1
                for stack, (stack_losses, has_ended) in zip(active, outputs, strict=True):
                    stack.take(stack_losses, has_ended, losses, steps, done, count)
                active = [stack for stack in active if stack.is_active]
                show(first.begins + done, [run_losses[-1] for run_losses in losses if run_losses])
            monitor.ended_at = f"{first.name}: {first.begins + done} of at most {total} updates"
        states = itertools.chain(*(stack.results() for stack in stacks))
        return [Trained(state, _history(run_losses)) for state, run_losses in zip(states, losses, strict=True)]

    def _stacked(self, calls: list[Call], program: Hashable) -> list[Stack]:
        """Returns the calls in stacks of equal size; the last stack is padded with repeats."""
        form, trains = Form(calls[0].fn, self.impl), calls[0].steps is not None
        size, axes = self._stacks.get(program, (1, ()))
        if self._most == 1 or (len(calls) == 1 and size == 1):
            single = lambda call: jax.tree.map(self._alone, _values_of(call))
            return [Stack(form, single(call), None, [i], trains) for i, call in enumerate(calls)]
        size = max(size, -(-len(calls) // -(-len(calls) // self._most)))  # stacks of about equal size
        size += -size % self._shares
        largest, size = size, size_of_survivors(calls, size, self._shares)
        stacks = []
        values = [_values_of(call) for call in calls]
        same = _shared([jax.tree.leaves(value) for value in values], trains, values[0])
        # A stack of fewer runs may share more arrays, but it has the program of the first stack.
        axes = tuple(min(pair, key=lambda axis: axis is None) for pair in zip(same, axes or same, strict=True))
        self._stacks[program] = largest, axes
        for low in range(0, len(calls), size):
            numbers = [*range(low, min(low + size, len(calls)))]
            padded = [values[i] for i in numbers] + [values[numbers[-1]]] * (size - len(numbers))
            columns = zip(*(jax.tree.leaves(value) for value in padded), strict=True)
            arrays, leaf_axes = [], iter(axes)
            for column in columns:
                axis, *_ = [next(leaf_axes) for _ in jax.tree.leaves(_unwrapped(column[0]))]
                arrays.append(self._joined(column, axis, len(numbers)))
            structure = jax.tree.structure(padded[0])
            stack: Any = jax.tree.unflatten(structure, arrays)
            stack = stack if distributed.is_shared() else jax.device_put(stack)
            stacks.append(Stack(form, stack, axes, numbers, trains))
        return stacks

    def _joined(self, column: tuple, axis: int | None, count: int) -> Any:
        """Returns the values of a leaf of all calls of a stack, stacked or shared; ``count`` values are not padding."""
        first = column[0]
        if axis is None:
            return self._alone(first)
        if isinstance(first, DeviceValue):
            in_order = [value.index for value in column[:count]] == [*range(count)]
            if in_order and all(value.arrays is first.arrays for value in column):
                tree = first.arrays.tree
                if len(jax.tree.leaves(tree)[0]) == len(column):
                    return tree
            return jax.tree.map(stacked, *(value.host for value in column))
        return stacked(*column)

    def _alone(self, leaf: Any) -> Any:
        if not isinstance(leaf, DeviceValue):
            return self._on_device(leaf)
        return leaf.arrays.tree if leaf.index is None else leaf.host

    def _on_device(self, array: Any) -> Any:
        """Returns a large NumPy array on the device; it is copied once, while it is alive."""
        if not isinstance(array, np.ndarray) or array.size < _PLACED:
            return array
        number = id(array)
        if number not in self._placed:
            has_rows = len(array) in self._row_counts and sharding.parts(len(array)) > 1
            placed = sharding.put_rows(array) if has_rows else jax.device_put(array)
            self._placed[number] = placed, weakref.ref(array, lambda _: self._placed.pop(number, None))
        return self._placed[number][0]


class _Progress:
    """A procedure in progress, and the results of the procedures that it waits for."""

    def __init__(self, procedure: Any, parent: "_Progress | None", number: int):
        self.procedure, self.parent, self.number = procedure, parent, number
        self.answer: Any = None
        self.results: list[Any] = []
        self.children: list[_Progress] = []
        self.later: deque[_Progress] = deque()  # children that have not begun
        self.missing = 0

    def begin(self, procedures: Any, concurrent: int) -> list["_Progress"]:
        """Returns the progress of the first of the procedures that this procedure waits for."""
        self.results, self.missing = [None] * len(procedures), len(procedures)
        self.children = [_Progress(procedure, self, number) for number, procedure in enumerate(procedures)]
        self.later.extend(self.children[concurrent:])
        return self.children[:concurrent]

    def close(self) -> None:
        """Closes the procedure and the procedures that it waits for."""
        for child in self.children:
            child.close()
        self.children = []
        if self.procedure is not None:
            self.procedure.close()


def _history(losses: list[np.ndarray]) -> np.ndarray:
    """Returns the losses of all updates; NaN for updates that were not made."""
    history = np.concatenate(losses) if losses else np.zeros(0, np.float32)
    return np.where(history == NOT_TAKEN, np.nan, history)


def _values_of(call: Call) -> tuple:
    """Returns the arguments of a program: the state of a training, the run, and further arguments."""
    trains = call.steps is not None
    return call.args[:trains], argument_of_program(call.problem), call.args[trains:]


def _unwrapped(value: Any) -> Any:
    """Returns the arrays of a value on the device."""
    return value.arrays.tree if isinstance(value, DeviceValue) else value


def _shape_of(leaf: Any) -> Hashable:
    if isinstance(leaf, DeviceValue):
        tree, stacked = leaf.arrays.tree, leaf.index is not None
        leaves, structure = jax.tree.flatten(tree)
        return structure, tuple((np.shape(a)[stacked:], a.dtype) for a in leaves)
    return np.shape(leaf), getattr(leaf, "dtype", type(leaf))


def _shared(leaves: list[list[Any]], trains: bool, values: Any) -> tuple:
    """Returns the axis of each array: None if all calls have the same array object, else 0. States are never shared."""
    states = len(jax.tree.leaves(values[0])) if trains else 0
    axes: list[int | None] = []
    for i, column in enumerate(zip(*leaves, strict=True)):
        is_shared = i >= states and all(leaf is column[0] for leaf in column)
        axes += [None if is_shared else 0] * len(jax.tree.leaves(_unwrapped(column[0])))
    return tuple(axes) if 0 in axes else (0, *axes[1:])  # equal calls are a stack, too
