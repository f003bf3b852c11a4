"""Progress, deadlines and Ctrl-C of a search."""

from collections.abc import Callable
import contextlib
import signal
import threading
import time
from typing import Any

import numpy as np

from jtrees import distributed

_CHUNK = 0.5  # seconds of a compiled call; the clock is read between two calls
_GROWTH = 8  # largest ratio of the steps of a call to the steps of the previous call
_LATE = 0.1  # fraction of the time limit by which the end of a fit may exceed the deadline
_REHEARSED = 2  # iterations of a loop in a rehearsal: the second iteration starts from the result of the first
_SAMPLE, _FEWEST = 2**18, 200  # entries, and least number of rows, of a sample to estimate the time for all rows


class Monitor:
    """Shows the progress of a search between rounds, and stops it at a deadline or on Ctrl-C.

    If there are several processes, only the first process shows the progress. All processes stop at the earliest
    deadline, and at a Ctrl-C in any process. The processes agree on each answer that depends on a clock or a signal.
    Therefore all processes must call the methods of the monitor in the same order.

    Attributes:
      ended: the reason for the end: ``"finished"``, ``"max_seconds"`` or ``"interrupted"``.
      ended_at: the last search and the number of its updates, in words.
      deadline: when training ends, in the time of ``time.monotonic``; None: no deadline.
      rehearses: whether the search is a rehearsal. A rehearsal runs each program of a search, but only a few times.
    """

    def __init__(
        self,
        progress: bool = False,
        deadline: float | None = None,
        seconds: float = 0.0,
        parent: "Monitor | None" = None,
        rehearses: bool = False,
    ):
        """``seconds`` is the time limit of the fit; ``parent`` is the monitor of the search around this search."""
        self.progress, self.deadline = progress and distributed.is_first(), deadline
        self.ended, self.ended_at = "finished", ""
        self.rehearses = rehearses or (parent is not None and parent.rehearses)
        self._latest = None if deadline is None else deadline + _LATE * seconds + _CHUNK / 2
        self._is_shown = self._was_asked = self._was_cut = False
        self._is_shared = distributed.is_shared()
        self._root = parent._root if parent is not None else self

    @classmethod
    def of_fit(cls, progress: bool, started: float, max_seconds: float | None) -> "Monitor":
        """Returns the monitor of a fit that began at ``started``, in the time of ``time.monotonic``."""
        return cls(progress) if max_seconds is None else cls(progress, started + max_seconds, max_seconds)

    @contextlib.contextmanager
    def interruptible(self) -> Any:
        """Context in which Ctrl-C stops the search, and a second Ctrl-C raises KeyboardInterrupt."""
        # Only Python's main thread receives signals. If the process ignores Ctrl-C, the context does not change that.
        handler = signal.getsignal(signal.SIGINT)
        if handler in (None, signal.SIG_IGN) or threading.current_thread() is not threading.main_thread():
            yield
            return
        signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)

    @contextlib.contextmanager
    def progress_of(self, total: int, name: str) -> Any:
        """Context that shows the progress of ``total`` updates or rounds; a nested context shows nothing."""
        # Yields `(done, losses) -> None`, which shows the number of finished updates or rounds and the lowest loss.
        # `losses` has an array for each run.
        if not self.progress or self._is_shown:
            yield lambda done, losses: None
            return
        self._is_shown = True
        try:
            with _bar(total, name) as bar:
                yield lambda done, losses: bar(done, _summary(losses))
        finally:
            self._is_shown = False

    def _interrupt(self, *_: Any) -> None:
        if self._was_asked:
            raise KeyboardInterrupt
        self._was_asked = True
        if not self._is_shared:  # several processes end together, after they have agreed
            self.ended = "interrupted"

    def left(self) -> float:
        """Returns the seconds before the deadline; infinite if there is no deadline."""
        return np.inf if self.deadline is None else distributed.minimum(self.deadline - time.monotonic())

    def has_time(self, seconds: float = 0.0) -> bool:
        """Returns whether ``seconds`` seconds remain; if not, the search is marked as ended."""
        if distributed.minimum(-self._root._was_asked):
            self._root.ended = "interrupted"
        if self._root.ended != "finished":
            self.ended = self._root.ended
        if self.ended == "finished" and self.left() < seconds:
            self.ended = "max_seconds"
        return self.ended == "finished"

    def is_rehearsed(self, turns: int) -> bool:
        """Returns whether a rehearsal ends a loop after ``turns`` iterations; all iterations run the same programs."""
        return self.rehearses and turns >= _REHEARSED

    def may_be_late(self, seconds: float = 0.0) -> bool:
        """Returns whether the end of a fit, which prepares its results, may take ``seconds`` seconds; else cuts."""
        in_time = self._latest is None or distributed.minimum(self._latest - time.monotonic() - seconds) > 0
        if not in_time:
            self.cut()
        return in_time

    def cut(self) -> None:
        """Records that the deadline has cut a part of the search, such as a start or a tree."""
        self._root._was_cut = True

    @property
    def reported_end(self) -> str:
        """The reason for the end for a report: ``"max_seconds"``, too, if the deadline has only cut a part."""
        return "max_seconds" if self.ended == "finished" and self._root._was_cut else self.ended

    def of_end(self) -> "Monitor":
        """Returns the monitor of the end of a fit, whose deadline is the latest time of :meth:`may_be_late`."""
        return Monitor(deadline=self._latest)

    def reserve(self, seconds: float) -> None:
        """Reserves ``seconds`` for the end of a fit: brings the deadline forward by at most half of the time left."""
        if self.deadline is not None:
            self.deadline -= max(0.0, min(seconds, self.left() / 2))

    @contextlib.contextmanager
    def fitting(self) -> Any:
        """Context of fits, which forgets earlier cuts. Its end undoes :meth:`reserve`."""
        deadline, self._root._was_cut = self.deadline, False
        try:
            yield
        finally:
            self.deadline = deadline

    def within(self, share: float) -> "Monitor":
        """Returns the monitor of work that may take the fraction ``share`` of the time left."""
        if self.deadline is None:
            return Monitor(parent=self)
        return Monitor(deadline=time.monotonic() + share * max(0.0, self.left()), parent=self)

    def on_rows(self, fn: Callable[[Any], Any], rows: Any, outputs: int = 1) -> Any:
        """Returns ``fn(rows)``, or ``fn`` of a random sample of the rows if there is no time for all rows."""
        # The time for all rows, about proportional to their number, is estimated from a small sample. If there are more
        # `outputs` than features, the small sample has fewer rows. `rows` is a batch of NumPy arrays.
        n, p = rows.x.shape
        sample_size = max(_FEWEST, _SAMPLE // max(p, outputs))
        if self.deadline is None or n <= sample_size:
            return fn(rows)
        order, began = np.random.default_rng(0).permutation(n), time.monotonic()
        sample_result = fn(_sampled_rows(rows, order[:sample_size]))
        in_time = distributed.minimum(sample_size * self.left() / (time.monotonic() - began))
        if in_time >= n:
            return fn(rows)
        return fn(_sampled_rows(rows, order[: int(in_time)])) if in_time >= 2 * sample_size else sample_result


class Pace:
    """Divides the steps of a search into compiled calls of about half a second, from the times of earlier calls."""

    def __init__(self, monitor: Monitor):
        self._monitor, self._most = monitor, 1
        self.step_seconds = 0.0  # seconds per step

    def steps(self, limit: int) -> int:
        """Returns the number of steps of the next call, from 1 to ``limit``."""
        if self._monitor.rehearses:
            return 1
        in_time = min(_CHUNK, self._monitor.left()) / max(self.step_seconds, 1e-9)
        return int(max(1, min(limit, self._most, in_time)))

    def took(self, steps: int, seconds: float, compiled: bool) -> None:
        """Records the seconds of a call; they are ignored if they include a compilation."""
        seconds, compiled = -distributed.minimum(-seconds), bool(distributed.minimum(-compiled))
        self._most = 1 if compiled else _GROWTH * steps
        self.step_seconds = 0.0 if compiled else seconds / steps


def _duration(seconds: float) -> str:
    """Returns a duration as text, such as ``"3 minutes"``."""
    for unit, length in (("hour", 3600), ("minute", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}s"
    return f"{seconds:.0f} s"


def _summary(losses: list[np.ndarray]) -> str:
    """Returns the lowest loss of all runs as text, and the number of finite runs if some are not finite."""
    lowest = [np.min(run_losses, where=np.isfinite(run_losses), initial=np.inf) for run_losses in losses]
    finite, low = sum(np.isfinite(loss) for loss in lowest), min(lowest, default=np.inf)
    text = f", {finite} of {len(losses)} runs" if finite < len(losses) else ""
    return f"loss {low if np.isfinite(low) else np.nan:.4g}{text}"


def _sampled_rows(rows: Any, numbers: np.ndarray) -> Any:
    """Returns the rows of a batch with the given numbers, in their original order."""
    numbers = np.sort(numbers)
    return rows._replace(**{name: a if a is None else np.asarray(a)[numbers] for name, a in rows._asdict().items()})


@contextlib.contextmanager
def _bar(total: int, name: str) -> Any:
    """Yields a function that updates a progress bar of rich, or prints ten lines if rich is missing or cannot draw."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    except ImportError:
        console = None
    else:
        console = Console()
    if console is None or not (console.is_terminal or console.is_jupyter):
        tenths, began = [0], time.monotonic()

        def line(done: int, text: str) -> None:
            if 10 * done // total > tenths[-1]:
                tenths.append(10 * done // total)
                left = (time.monotonic() - began) * (total - done) / done
                print(f"{name}: {done} of {total}, {text}, {_duration(left)} left", flush=True)

        yield line
        return
    text = TextColumn("{task.description}"), TextColumn("{task.fields[text]}")
    columns = (text[0], BarColumn(), text[1], TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(name, total=total, text="")
        yield lambda done, text: progress.update(task, completed=done, text=text)
