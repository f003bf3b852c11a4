"""Progress, deadlines and Ctrl-C of a search."""

import contextlib
import signal
import threading
import time
from typing import Any

import numpy as np


class Monitor:
    """Shows the progress of a search between rounds, and stops it at a deadline or on Ctrl-C.

    ``ended`` is the reason for the end: ``"finished"``, ``"max_seconds"`` or ``"interrupted"``.
    """

    def __init__(self, progress: bool = False, deadline: float | None = None):
        """``deadline`` is in the time of ``time.monotonic``."""
        self.progress, self.deadline, self.ended = progress, deadline, "finished"

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
            self._last, self._rounds = None, rounds
            yield

    def _interrupt(self, *_: Any) -> None:
        if self.ended == "interrupted":
            raise KeyboardInterrupt
        self.ended = "interrupted"

    def has_time(self) -> bool:
        """Whether another search may start."""
        if self.ended == "finished" and self.deadline is not None and time.monotonic() > self.deadline:
            self.ended = "max_seconds"
        return self.ended == "finished"

    def should_stop(self, done: int, losses: np.ndarray) -> bool:
        """Whether to stop before round ``done``, the last round's losses being ``losses``, ``(..., steps)``."""
        finite = np.isfinite(losses)
        lowest, runs = np.min(losses, where=finite, initial=np.inf), finite.any(-1)
        dropped = f", {runs.sum()} of {runs.size} runs" if not runs.all() else ""
        self._bar(done, f"loss {lowest if finite.any() else np.nan:.4g}{dropped}")
        now = time.monotonic()
        # The first round includes compilation, so its time does not predict the next.
        seconds, self._last = 0.0 if self._last is None else now - self._last, now
        late = self.deadline is not None and now + seconds / 2 > self.deadline and done < self._rounds
        if self.ended == "finished" and late:
            self.ended = "max_seconds"
        return self.ended != "finished"


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
