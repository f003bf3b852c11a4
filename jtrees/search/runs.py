"""Runs side by side (seeds, hyperparameters, folds, starts, bags), and functions that apply to all runs.

A procedure is a Python function. It holds :class:`Runs`, calls ``runs.map(fn, ...)`` and ``runs.train(fn, ...)``,
fetches numbers and decides on them. ``fn`` is a module-level pure function of a :class:`Run`. It is compiled once for
each recipe structure, task and shape.
"""

from collections.abc import Callable, Sequence
import copy
import itertools
import time
from typing import Any, NamedTuple

import jax
from jaxtyping import Array
import numpy as np

from jtrees import distributed, sharding
from jtrees.search.monitor import Monitor, Pace
from jtrees.search.run import (
    Form,
    Own,
    Run as Run,
    Stacked as Stacked,
    often as often_compiled,
    rarely as rarely_compiled,
)
from jtrees.tasks import Task
from jtrees.training import Batch
from jtrees.training.state import NOT_TAKEN

MOST = 1024  # updates in one compiled call, and the length of the losses that it returns


class Trained(NamedTuple):
    """The result of :meth:`Runs.train`.

    Attributes:
      states: the states after training.
      losses: the losses of the updates of each run, a list of arrays ``(updates,)``.
    """

    states: Stacked
    losses: list[np.ndarray]


class _Clock:
    """State that all trainings of a search share.

    Attributes:
      began: whether an update has been made.
      paces: the pace of each training function and shape, which gives the number of updates in a call.
      found: values that :meth:`Runs.shared_once` computed, by name.
    """

    def __init__(self) -> None:
        self.began = False
        self.paces: dict[Any, Pace] = {}
        self.found: dict[str, Any] = {}


class Runs:
    """Runs of recipes with the same static options on one scaled batch.

    Between stages, small values (splits, scores, keys) are lists over the runs, on the host. Within a stage, values are
    :class:`Stacked` on the device, in groups of equal size. On CPUs a group has one run for each device. On other
    devices a group has many runs. The last group is padded with repeats. Selected runs keep the group size, so every
    function is compiled for one size.

    Attributes:
      recipes: the recipe of each run.
      task: what is predicted.
      monitor: the monitor, which shows progress and enforces the deadline.
    """

    def __init__(
        self,
        recipes: Sequence[Any],
        keys: Sequence[np.ndarray],
        task: Task,
        batch: Batch,
        validation: Batch | None,
        monitor: Monitor,
        *,
        impl: str,
        at_once: int = 64,
    ):
        """``batch`` and ``validation`` are scaled NumPy batches; ``keys`` are key data of the implementation ``impl``.

        ``at_once`` is the number of runs side by side on a device that is not a CPU.
        """
        self.recipes, self.task, self.monitor = list(recipes), task, monitor
        self._keys, self._host, self._host_validation = list(keys), batch, validation
        self._batch, self._validation = sharding.put_rows(batch), sharding.put_rows(validation)
        self._own, self._impl, self._clock, self._watching = Own(), impl, _Clock(), None
        devices, shares = jax.local_devices(), sharding.share_of_starts()
        on_cpu = devices[0].platform == "cpu"
        self._placed: dict[int, Any] = {}
        self._side_by_side = 1 if on_cpu else None
        self._most = 0 if on_cpu else at_once
        self._size = min(at_once, len(self)) if self._most else len(devices) if shares is None else shares

    def __len__(self) -> int:
        return len(self.recipes)

    # --- Other runs ---

    def _with(self, **changed: Any) -> "Runs":
        other = copy.copy(self)
        other._placed = {}
        for name, value in changed.items():
            setattr(other, name, value)
        return other

    def repeat(self, count: int, together: int = 1) -> "Runs":
        """Returns each run ``count`` times side by side, with a different key for each repeat.

        Args:
          count: number of repeats.
          together: number of runs that share one program on a single CPU, for steps that are too small to fill the CPU.
        """
        numbers = np.repeat(np.arange(len(self)), count)
        other = self.select(numbers)
        keys = [derived(self._keys[i], j % count) for j, i in enumerate(numbers)]
        side_by_side = together if self._side_by_side == 1 and self._size == 1 else self._side_by_side
        size = min(self._most, len(other)) if self._most else max(self._size, side_by_side or 1)
        return other._with(_keys=keys, _side_by_side=side_by_side, _size=size)

    def select(self, indices: Sequence[int] | np.ndarray) -> "Runs":
        """Returns the runs with the given indices."""
        lists = [None if values is None else self._listed(values) for values in self._own]
        own = Own(*(None if values is None else [values[i] for i in indices] for values in lists))
        return self._with(recipes=[self.recipes[i] for i in indices], _keys=[self._keys[i] for i in indices], _own=own)

    def afresh(self) -> "Runs":
        """Returns the runs as runs of a new search; the first training of a search always makes an update."""
        return self._with(_clock=_Clock())

    def using(self, recipes: Sequence[Any]) -> "Runs":
        """Returns the runs with other recipes."""
        return self._with(recipes=list(recipes))

    def keyed(self, number: int) -> "Runs":
        """Returns the runs with new keys, which are derived from the old keys and a number."""
        return self._with(_keys=[derived(key, number) for key in self._keys])

    def on(self, *, task: Task | None = None, rows: Any = None, validation: Any = ..., **own: Any) -> "Runs":
        """Returns the runs on new data: lists over the runs, or :class:`Stacked` values.

        Args:
          task: the new task; None: the same task.
          rows: indices into the rows of each run, ``(m,)``, -1 for padding of weight 0. ``y`` and ``weight``, if
            given, belong to the new rows.
          validation: the new validation set, in NumPy, or None for no validation set.
          **own: ``x``, ``y``, ``weight``, ``held_out``, ``matrix``, ``features``: see :class:`Own`.
        """
        of, old = self._own, self._own
        if rows is not None:
            pick = lambda values: [a[r] for a, r in zip(self._listed(values), rows, strict=True)]
            at = lambda values: None if values is None else pick(values)
            kept = {name: at(getattr(old, name)) for name in ("x", "y", "weight", "held_out") if name not in own}
            if old.rows is not None:
                before = self._listed(old.rows)
                rows = [np.where(r < 0, -1, b[r]).astype(np.int32) for b, r in zip(before, rows, strict=True)]
            of = of._replace(rows=rows, **kept)
        other = self._with(_own=of._replace(**own), task=self.task if task is None else task)
        if validation is not ...:
            other._host_validation, other._validation = validation, sharding.put_rows(validation)
        return other

    def each_once(self, fn: Callable[[int], Any], keyed: bool = False) -> list[Any]:
        """Returns ``fn(i)`` for each run, computed once for runs with the same data (and the same key if ``keyed``)."""
        found: dict[Any, Any] = {}
        lists = [self._listed(values) for values in self._own if values is not None]
        of_key = lambda i: self._keys[i].tobytes() if keyed else b""
        data = [(of_key(i), *(id(values[i]) for values in lists)) for i in range(len(self))]
        for i, same in enumerate(data):
            if same not in found:
                found[same] = fn(i)
        return [found[same] for same in data]

    def shared_once(self, name: str, fn: Callable[[Batch], Any]) -> Any:
        """Returns ``fn`` of the NumPy batch that all runs share; it is computed once in a search."""
        if name not in self._clock.found:
            self._clock.found[name] = fn(self._host)
        return self._clock.found[name]

    @property
    def monotone(self) -> np.ndarray | None:
        """The features in which predictions must not fall, ``(p,)`` bool, or None."""
        return None if self._own.monotone is None else self._listed(self._own.monotone)[0]

    def watching(self, evaluates: bool = True) -> "Runs":
        """Returns the runs with evaluation during training on or off; both settings share one program.

        The default evaluates on a validation set during training, and on held-out rows only at the end.
        """
        return self._with(_watching=evaluates)

    # --- Data of the runs on the host ---

    @property
    def watches(self) -> bool:
        """Whether training evaluates while it runs."""
        return self.validation is not None if self._watching is None else self._watching

    @property
    def validation(self) -> Batch | None:
        """The validation set in NumPy, or None."""
        return self._host_validation

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the features of a run."""
        p = self._host.x.shape[1]
        own = next((values for values in (self._own.x, self._own.rows) if values is not None), None)
        return len(self._host.x) if own is None else len(self._first(own)), p

    @property
    def count(self) -> int:
        """Number of rows of positive weight, the least of all runs. Thresholds on the number of rows compare it."""
        counts = self.each_once(lambda i: int(np.count_nonzero(self.weighed(i))))
        return min(counts)

    def rows(self, i: int) -> Batch:
        """Returns the rows of run i as a NumPy batch; held-out rows have weight 0."""
        own, x = self._own_of(i), self._host.x
        y, weight = self.targets(i)
        x = x if own.rows is None else x[own.rows]
        x = x if own.x is None else own.x
        x = x if own.features is None else x * own.features
        return Batch(x if own.matrix is None else x @ own.matrix, y, weight)  # type: ignore[arg-type]

    def targets(self, i: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Returns the targets and the weights of the rows of run i."""
        own, (_, y, weight) = self._own_of(i), self._host
        if own.rows is not None:
            y = y[own.rows]
            weight = np.ones(len(own.rows), np.float32) if weight is None else np.asarray(weight)[own.rows]
            weight = np.where(own.rows < 0, 0, weight).astype(np.float32)
        y = y if own.y is None else own.y
        weight = weight if own.weight is None else own.weight
        if own.held_out is not None and np.any(own.held_out):
            weight = np.where(own.held_out, 0, np.ones(len(y), np.float32) if weight is None else weight)
        return y, weight  # type: ignore[return-value]

    def weighed(self, i: int) -> np.ndarray:
        """Returns which rows of run i have a positive weight, ``(n,)`` bool."""
        weight = self.targets(i)[1]
        return np.ones(self.shape[0], bool) if weight is None else np.asarray(weight) > 0

    def of_table(self, i: int, mask: np.ndarray) -> np.ndarray:
        """Returns a mask over the rows of run i as a mask over the shared rows, ``(n,)`` bool."""
        rows = self._own_of(i).rows
        if rows is None:
            return mask
        whole = np.zeros(len(self._host.x), bool)
        whole[rows[mask & (rows >= 0)]] = True
        return whole

    def rng(self, i: int, purpose: int = 0) -> np.random.Generator:
        """Returns a random generator of run i; each purpose number has its own generator."""
        return np.random.default_rng([*self._keys[i].ravel().tolist(), purpose])

    def key(self, i: int) -> Array:
        """Returns the key of run i."""
        return jax.random.wrap_key_data(jax.device_put(self._keys[i]), impl=self._impl)

    def _own_of(self, i: int) -> Own:
        g, j = divmod(i, self._size)
        at = lambda values: values.groups[g][j] if isinstance(values, Stacked) else values[i]
        return distributed.to_host(Own(*(None if values is None else at(values) for values in self._own)))

    def _listed(self, values: Any) -> list[Any]:
        return self.fetch(values) if isinstance(values, Stacked) else values

    def _first(self, values: Any) -> Any:
        return jax.tree.map(lambda a: a[0], values.groups[0]) if isinstance(values, Stacked) else values[0]

    # --- Groups ---

    @property
    def _groups(self) -> np.ndarray:
        """Indices of the runs of each group, ``(groups, size)``; the last group is padded."""
        runs = np.arange(len(self))
        return np.append(runs, np.repeat(runs[-1:], -len(runs) % self._size)).reshape(-1, self._size)

    def stacked(self, values: Any) -> Stacked:
        """Returns a list over the runs as stacked values; stacked values are returned unchanged."""
        if isinstance(values, Stacked):
            return values
        return Stacked(tuple(_stack([values[i] for i in group]) for group in self._groups))

    def fetch(self, stacked: Stacked) -> list[Any]:
        """Returns stacked values as a list over the runs, on the host."""
        groups = distributed.to_host(stacked.groups)
        return [jax.tree.map(lambda a, j=j: a[j], group) for group in groups for j in range(self._size)][: len(self)]

    # --- Compiled calls ---

    def map(self, fn: Callable[..., Any], *args: Any, shared: tuple = (), often: bool = False) -> Stacked:
        """Returns ``fn(run, *args, *shared)`` for each run.

        Args:
          fn: a module-level pure function of a :class:`Run`.
          *args: lists over the runs, or stacked values.
          shared: arguments that are the same for all runs.
          often: whether ``fn`` is called many times in a fit. If so, it is compiled with more optimisation.
        """
        placed = [self.stacked(a) for a in args]
        return Stacked(tuple(self._call(fn, g, placed, shared, often) for g in range(len(self._groups))))

    def _call(self, fn: Any, g: int, args: Sequence[Stacked], shared: tuple, often: bool) -> Any:
        form = Form(fn, self.task, self._side_by_side, self._impl, self._watching is not None)
        recipes, keys, own = self._of_group(g)
        data = self._batch, self._validation, own
        program = often_compiled if often else rarely_compiled
        return program(form, recipes, keys, data, tuple(a.groups[g] for a in args), shared)

    def _of_group(self, g: int) -> tuple[Any, Any, Own]:
        """Returns the recipes, the keys and the own data of a group of runs, stacked on the device."""
        if g not in self._placed:
            at = lambda values: _stack([values[i] for i in self._groups[g]])
            of_lists = Own(*(None if v is None or isinstance(v, Stacked) else at(v) for v in self._own))
            recipes, keys, placed = jax.device_put((at(self.recipes), at(self._keys), of_lists))
            there = (v.groups[g] if isinstance(v, Stacked) else p for v, p in zip(self._own, placed, strict=True))
            self._placed[g] = recipes, keys, Own(*there)
        return self._placed[g]

    def train(
        self,
        fn: Callable[..., Any],
        states: Any,
        steps: int | Sequence[int],
        *args: Any,
        name: str,
        begins: int = 0,
        parts: int = 1,
        between: Callable[[Stacked, int], Stacked] | None = None,
    ) -> Trained:
        """Trains all runs side by side, in calls of about half a second; this is the only loop of updates.

        After a deadline or Ctrl-C the states do not change any more. The first training of a search always makes at
        least one call. The results do not depend on the division of the updates into calls.

        Args:
          fn: a module-level pure function ``fn(run, state, *args, before, count, evaluates)``. It returns the state
            after ``count`` more updates, the losses of the updates, and whether the run has ended. ``before`` is the
            number of updates so far and ``count`` is at most :data:`MOST`. The losses are ``(MOST,)``, with
            :data:`NOT_TAKEN` after the last update. ``evaluates`` says whether training evaluates while it runs.
          states: the initial states.
          steps: number of updates, as one number or one for each run.
          *args: further arguments of each run.
          name: name of the training, for the progress bar.
          begins: number of updates before this training, which is added to ``before``.
          parts: number of equal parts of the training. ``between`` is called after each part.
          between: ``(states, updates so far) -> states``, called after each part; None: no call.
        """
        each = np.broadcast_to(np.asarray(steps, int), len(self))
        placed, now = [self.stacked(a) for a in args], list(self.stacked(states).groups)
        course, done, calls, longest = _Course(self._groups, each), 0, 0, int(each.max(initial=0))
        stops = sorted({*each.tolist(), *(-(-longest * i // parts) for i in range(1, parts + 1))} - {0})
        pace = self._clock.paces.setdefault((fn, self.shape), Pace(self.monitor))
        with self.monitor.over(longest, name) as show:
            while course.active:
                if self.monitor.is_rehearsed(calls) or (self._clock.began and not self.monitor.has_time(pace.one)):
                    break
                count = pace.steps(min(MOST, min(stop for stop in stops if stop > done) - done))
                began, programs, self._clock.began = time.monotonic(), often_compiled.programs(), True
                shared, told = (np.int32(begins + done), np.int32(count), np.bool_(self.watches)), {}
                for g in course.active:
                    now[g], *told[g] = self._call(fn, g, [Stacked(tuple(now)), *placed], shared, True)
                told = distributed.to_host(told)
                pace.took(count, time.monotonic() - began, often_compiled.programs() > programs)
                done, calls = done + count, calls + 1
                course.take(told, now, done, count)
                if between is not None and (done in stops or self.monitor.rehearses):
                    now = list(between(Stacked(tuple(now)), done).groups)
                show(done, [one[-1] for one in course.losses if one])
            self.monitor.where = f"{name}: {done} of at most {longest} updates"
        return course.trained(now)


class _Course:
    """Results that the calls of a training have returned so far, on the host.

    Attributes:
      active: the groups whose training continues.
      losses: the losses of each run, an array for each call.
      ended: the last state of each run that ended before another run of its group.
    """

    def __init__(self, groups: np.ndarray, steps: np.ndarray):
        self.groups, self.steps = groups, steps
        self.active = [g for g, group in enumerate(groups) if steps[group].max() > 0]
        self.losses: list[list[np.ndarray]] = [[] for _ in steps]
        self.ended: dict[int, Any] = {}

    def take(self, told: dict[int, Any], now: Sequence[Any], done: int, count: int) -> None:
        """Stores the losses of a call of ``count`` updates, and drops groups whose runs have all ended."""
        still = [g for g in self.active if not np.all(told[g][1] | (done >= self.steps[self.groups[g]]))]
        size = len(self.groups[0])
        for g, j in itertools.product(self.active, range(size)):
            if (i := g * size + j) < len(self.steps) and done - count < self.steps[i]:
                self.losses[i].append(told[g][0][j][:count])
                if done == self.steps[i] and g in still:  # another run of the group continues
                    self.ended[i] = jax.tree.map(lambda a, j=j: a[j], now[g])
        self.active = still

    def trained(self, now: list[Any]) -> Trained:
        """Returns the last states and the losses of all runs."""
        for i, state in self.ended.items():
            g, j = divmod(i, len(self.groups[0]))
            now[g] = jax.tree.map(lambda a, b, j=j: a.at[j].set(b), now[g], state)
        history = [np.concatenate(one) if one else np.zeros(0, np.float32) for one in self.losses]
        return Trained(Stacked(tuple(now)), [np.where(a == NOT_TAKEN, np.nan, a) for a in history])


def _stack(values: Sequence[Any]) -> Any:
    """Stacks pytrees on the host, without compilation; random keys, of which no host has arrays, on the device."""
    on_host = lambda arrays: np.stack([np.asarray(a) for a in arrays])
    return jax.tree.map(lambda *a: jax.numpy.stack(a) if distributed.is_key(a[0]) else on_host(a), *values)


def derived(key: np.ndarray, number: int) -> np.ndarray:
    """Returns the data of a new key, derived from a key and a number; on the host, without compilation."""
    return np.random.SeedSequence([*key.ravel().tolist(), number]).generate_state(key.size).reshape(key.shape)
