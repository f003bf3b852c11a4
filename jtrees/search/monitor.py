"""Progress, deadlines and Ctrl-C of a search."""

from collections.abc import Callable
import contextlib
import signal
import threading
import time
from typing import Any

import numpy as np

_CHUNK = 0.5  # seconds of a compiled call; the clock is read between two calls
_GROWTH = 8  # times as many steps in a call as in the call before, at most
_LATE = 0.1  # part of the seconds by which the end of a fit may be late
_SAMPLE, _FEWEST = 2**18, 200  # numbers, and rows, of a sample that shows how long all rows take


class Monitor:
    """Shows the progress of a search between rounds, and stops it at a deadline or on Ctrl-C.

    Attributes:
      ended: the reason for the end: ``"finished"``, ``"max_seconds"`` or ``"interrupted"``.
      where: what ended, in words: the search, and the number of its updates.
      deadline: when training ends, in the time of ``time.monotonic``; None: never.
    """

    def __init__(
        self,
        progress: bool = False,
        deadline: float | None = None,
        seconds: float = 0.0,
        within: "Monitor | None" = None,
    ):
        """``seconds`` is the time before the deadline; ``within`` is the monitor of a search that this is part of."""
        self.progress, self.deadline, self.ended, self.where = progress, deadline, "finished", ""
        self._latest = None if deadline is None else deadline + _LATE * seconds + _CHUNK / 2
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
    def over(self, rounds: int, name: str = "") -> Any:
        """Context of a search of ``rounds`` rounds by the recipe ``name``."""
        with _bar(rounds, name) if self.progress else contextlib.nullcontext(lambda done, text: None) as self._bar:
            self._rounds = rounds
            yield

    def _interrupt(self, *_: Any) -> None:
        if self.ended == "interrupted":
            raise KeyboardInterrupt
        self.ended = "interrupted"

    def left(self) -> float:
        """Returns the seconds before the deadline; infinite without one."""
        return np.inf if self.deadline is None else self.deadline - time.monotonic()

    def has_time(self, seconds: float = 0.0) -> bool:
        """Whether there is time for something that takes so many seconds; if there is not, the search has ended."""
        if self._whole.ended != "finished":
            self.ended = self._whole.ended
        if self.ended == "finished" and self.left() < seconds:
            self.ended = "max_seconds"
        return self.ended == "finished"

    def may_be_late(self, seconds: float = 0.0) -> bool:
        """Whether the end of a fit, which brings results into their form, may take so many seconds more."""
        return self._latest is None or time.monotonic() + seconds < self._latest

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
        in_time = few * self.left() / (time.monotonic() - began)
        if in_time >= n:
            return fn(rows)
        return fn(_some(rows, order[: int(in_time)])) if in_time >= 2 * few else found

    def should_stop(self, done: int, losses: np.ndarray) -> bool:
        """Whether to stop before round ``done``, the last round's losses being ``losses``, ``(..., steps)``."""
        finite = np.isfinite(losses)
        lowest, runs = np.min(losses, where=finite, initial=np.inf), finite.any(-1)
        dropped = f", {runs.sum()} of {runs.size} runs" if not runs.all() else ""
        self._bar(done, f"loss {lowest if finite.any() else np.nan:.4g}{dropped}")
        return done < self._rounds and not self.has_time()


class Pace:
    """Divides the steps of a search into compiled calls of about half a second, by the time that earlier calls took.

    The first call has one step. A later call has at most eight times as many steps as the call before.
    """

    def __init__(self, monitor: Monitor, seconds: float, optional: bool = False):
        """``seconds`` is an estimate for one step; ``optional`` says whether the search may do without any."""
        self._monitor, self._one, self._optional, self._most = monitor, seconds, optional, 1

    def steps(self, most: int, after: int = 0) -> int:
        """Returns the number of steps of the next call, up to ``most``; 0 if the search has to stop before it.

        ``after`` is the number of steps that must follow.
        """
        if not self._monitor.has_time((1 + after) * self._one) and self._optional:
            return 0
        self._optional = True
        in_time = min(_CHUNK, self._monitor.left() - after * self._one) / max(self._one, 1e-9)
        return int(max(1, min(most, self._most, in_time)))

    def took(self, steps: int, seconds: float, compiled: bool) -> None:
        """Notes the seconds of a call, which predict nothing if they include a compilation."""
        self._most = 1 if compiled else _GROWTH * steps
        self._one = 0.0 if compiled else seconds / steps


def _some(rows: Any, numbers: np.ndarray) -> Any:
    """Returns some rows of a batch, in their order."""
    numbers = np.sort(numbers)
    return rows._replace(**{name: a if a is None else np.asarray(a)[numbers] for name, a in rows._asdict().items()})


@contextlib.contextmanager
def _bar(rounds: int, name: str) -> Any:
    """Yields a function that updates a bar of rich, or prints ten lines where rich is missing or cannot draw."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    except ImportError:
        console = None
    else:
        console = Console()
    if console is None or not (console.is_terminal or console.is_jupyter):
        line = lambda done, text: print(f"{name}: round {done} of {rounds}, {text}", flush=True)
        yield lambda done, text: line(done, text) if 10 * done // rounds > 10 * (done - 1) // rounds else None
        return
    text = TextColumn("{task.description}"), TextColumn("{task.fields[text]}")
    columns = (text[0], BarColumn(), text[1], TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(name, total=rounds, text="")
        yield lambda done, text: progress.update(task, completed=done, text=text)
