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
_GROWTH = 8  # times as many steps in a call as in the call before, at most
_LATE = 0.1  # part of the seconds by which the end of a fit may be late
_REHEARSED = 2  # turns of a loop in a rehearsal: a second one starts from what the first one returned
_SAMPLE, _FEWEST = 2**18, 200  # numbers, and rows, of a sample that shows how long all rows take


class Monitor:
    """Shows the progress of a search between rounds, and stops it at a deadline or on Ctrl-C.

    Of several processes the first alone shows the progress. The earliest deadline stops all of them, as does a Ctrl-C
    of any. What depends on a clock or a signal is agreed on, so all processes must ask in the same order.

    Attributes:
      ended: the reason for the end: ``"finished"``, ``"max_seconds"`` or ``"interrupted"``.
      where: what ended, in words: the search, and the number of its updates.
      deadline: when training ends, in the time of ``time.monotonic``; None: never.
      rehearses: whether the search is a rehearsal, which runs every program of a search, each a few times only.
    """

    def __init__(
        self,
        progress: bool = False,
        deadline: float | None = None,
        seconds: float = 0.0,
        within: "Monitor | None" = None,
        rehearses: bool = False,
    ):
        """``seconds`` is the time before the deadline; ``within`` is the monitor of a search that this is part of."""
        self.progress, self.deadline = progress and distributed.is_first(), deadline
        self.ended, self.where = "finished", ""
        self.rehearses = rehearses or (within is not None and within.rehearses)
        self._latest = None if deadline is None else deadline + _LATE * seconds + _CHUNK / 2
        self._is_shown = self._was_asked = False
        self._is_shared = distributed.is_shared()
        self._whole = within._whole if within is not None else self

    @contextlib.contextmanager
    def listening(self) -> Any:
        """Context in which Ctrl-C stops the search, and a second one raises KeyboardInterrupt.

        Only Python's main thread receives signals. Where Ctrl-C is ignored, it stays ignored.
        """
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
    def over(self, total: int, name: str) -> Any:
        """Context of ``total`` updates or rounds, in which a part of the work has no display of its own.

        Yields ``(done, losses) -> None``, which shows how many are done, and the lowest of the losses, an array for
        each run.
        """
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
        if not self._is_shared:  # else all processes end together, when they have agreed
            self.ended = "interrupted"

    def left(self) -> float:
        """Returns the seconds before the deadline; infinite without one."""
        return np.inf if self.deadline is None else distributed.least(self.deadline - time.monotonic())

    def has_time(self, seconds: float = 0.0) -> bool:
        """Whether there is time for something that takes so many seconds; if there is not, the search has ended."""
        if distributed.least(-self._whole._was_asked):
            self._whole.ended = "interrupted"
        if self._whole.ended != "finished":
            self.ended = self._whole.ended
        if self.ended == "finished" and self.left() < seconds:
            self.ended = "max_seconds"
        return self.ended == "finished"

    def is_rehearsed(self, turns: int) -> bool:
        """Whether a rehearsal needs no further turn of a loop after so many, as all turns run the same programs."""
        return self.rehearses and turns >= _REHEARSED

    def may_be_late(self, seconds: float = 0.0) -> bool:
        """Whether the end of a fit, which brings results into their form, may take so many seconds more."""
        return self._latest is None or distributed.least(self._latest - time.monotonic() - seconds) > 0

    def keep(self, seconds: float) -> None:
        """Moves the deadline forward, by at most half of the time left, as the end of a fit takes some seconds."""
        if self.deadline is not None:
            self.deadline -= max(0.0, min(seconds, self.left() / 2))

    def part(self, share: float) -> "Monitor":
        """Returns the monitor of work that may take a part of the time left."""
        if self.deadline is None:
            return Monitor(within=self)
        return Monitor(deadline=time.monotonic() + share * max(0.0, self.left()), within=self)

    def on_rows(self, fn: Callable[[Any], Any], rows: Any) -> Any:
        """Returns ``fn(rows)``, or ``fn`` of a random sample of the rows if there is no time for all rows.

        A small sample shows how long all rows take. Without a deadline ``fn`` always takes all rows.

        Args:
          fn: what is computed, in a time about proportional to the rows.
          rows: a batch of NumPy arrays.
        """
        n, p = rows.x.shape
        few = max(_FEWEST, _SAMPLE // p)
        if self.deadline is None or n <= few:
            return fn(rows)
        order, began = np.random.default_rng(0).permutation(n), time.monotonic()
        found = fn(_some(rows, order[:few]))
        in_time = distributed.least(few * self.left() / (time.monotonic() - began))
        if in_time >= n:
            return fn(rows)
        return fn(_some(rows, order[: int(in_time)])) if in_time >= 2 * few else found


class Pace:
    """Divides the steps of a search into compiled calls of about half a second, by the time that earlier calls took.

    The first call has one step. A later call has at most eight times as many steps as the call before. A rehearsal has
    one step in every call.
    """

    def __init__(self, monitor: Monitor):
        self._monitor, self._most = monitor, 1
        self.one = 0.0  # seconds of a step

    def steps(self, most: int) -> int:
        """Returns the number of steps of the next call, from 1 to ``most``."""
        if self._monitor.rehearses:
            return 1
        in_time = min(_CHUNK, self._monitor.left()) / max(self.one, 1e-9)
        return int(max(1, min(most, self._most, in_time)))

    def took(self, steps: int, seconds: float, compiled: bool) -> None:
        """Notes the seconds of a call, which predict nothing if they include a compilation."""
        seconds, compiled = -distributed.least(-seconds), bool(distributed.least(-compiled))
        self._most = 1 if compiled else _GROWTH * steps
        self.one = 0.0 if compiled else seconds / steps


def _summary(losses: list[np.ndarray]) -> str:
    """Returns the lowest loss of all runs, and how many of them are finite unless all are."""
    lowest = [np.min(one, where=np.isfinite(one), initial=np.inf) for one in losses]
    finite, low = sum(np.isfinite(one) for one in lowest), min(lowest, default=np.inf)
    text = f", {finite} of {len(losses)} runs" if finite < len(losses) else ""
    return f"loss {low if np.isfinite(low) else np.nan:.4g}{text}"


def _some(rows: Any, numbers: np.ndarray) -> Any:
    """Returns some rows of a batch, in their order."""
    numbers = np.sort(numbers)
    return rows._replace(**{name: a if a is None else np.asarray(a)[numbers] for name, a in rows._asdict().items()})


@contextlib.contextmanager
def _bar(total: int, name: str) -> Any:
    """Yields a function that updates a bar of rich, or prints ten lines where rich is missing or cannot draw."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    except ImportError:
        console = None
    else:
        console = Console()
    if console is None or not (console.is_terminal or console.is_jupyter):
        tenths = [0]

        def line(done: int, text: str) -> None:
            if 10 * done // total > tenths[-1]:
                tenths.append(10 * done // total)
                print(f"{name}: {done} of {total}, {text}", flush=True)

        yield line
        return
    text = TextColumn("{task.description}"), TextColumn("{task.fields[text]}")
    columns = (text[0], BarColumn(), text[1], TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(name, total=total, text="")
        yield lambda done, text: progress.update(task, completed=done, text=text)
