"""Progress of a run of train_large: ``metrics.jsonl``, and lines on standard error. The first process writes."""

import datetime
import json
import resource
import sys
import time
from typing import Any

import numpy as np

from examples.train_large.blocks import DataError
from examples.train_large.checkpoints import write_whole

NAMES = {  # names in the output: the training loss, penalties included; the validation loss; a validation score
    "regression": (
        "training loss (scaled targets)",
        "validation mean squared error (target units squared)",
        "validation R2",
    ),
    "classification": ("training loss (nats)", "validation log loss (nats)", "validation accuracy"),
}


class Log:
    """``metrics.jsonl``: a line for each evaluation, on the rounds since the previous evaluation."""

    def __init__(
        self, file: Any, step: int, lead: bool, names: tuple[str, str, str], before: list[float] | None = None
    ):
        """Removes the lines of steps after ``step``, which a resumed run repeats.

        Args:
          file: path of the file, on a disk or in a bucket.
          step: current step of the run.
          lead: whether this process writes.
          names: names of the values, as in ``NAMES``.
          before: :meth:`sums` of the rounds that have no line yet.

        Raises:
          DataError: the file has other lines.
        """
        self._file, self._lead, self._names, self._last, self._rounds = file, lead, names, -1, []
        self._lines: list[str] = []
        self._before = np.zeros(5) if before is None else np.array(before)
        self.score = float("nan")  # score of the last evaluation
        if lead and file.exists():
            whole = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
            try:
                steps = [json.loads(line)["step"] for line in whole]
            except (ValueError, LookupError, TypeError) as error:
                raise DataError(f"{file} is not what a run wrote: {error}") from error
            self._lines = [line for line, of in zip(whole, steps, strict=True) if of <= step]
            write_whole(file, "".join(self._lines))
            self._last = max((of for of in steps if of <= step), default=-1)

    @property
    def pending(self) -> bool:
        """Whether there were rounds since the last line."""
        return bool(self._rounds)

    def round(self, *of_round: Any) -> None:
        """Adds a round: its loss, which may still be computing, rows, seconds, and seconds of waiting for data."""
        self._rounds.append((1, *of_round))

    def sums(self) -> list[float]:
        """Returns the sums over the rounds since the last line: count, losses, rows, seconds, seconds of waiting."""
        return (self._before + np.array(self._rounds, float).reshape(-1, 5).sum(0)).tolist()

    def write(self, step: int, loss: float, score: float) -> None:
        """Writes a line, unless the last line has the same step."""
        training, *validation = self._names
        self.score = score
        if step == self._last:
            return
        rounds, losses, rows, seconds, waited = self.sums()
        line = {"step": step, "rows": int(rows), "seconds": seconds, "waited": waited}
        if rounds:
            line |= {training: losses / rounds, "rows_per_second": rows / seconds}
        values = loss, None if np.isnan(score) else score
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        line |= dict(zip(validation, values, strict=True)) | {"peak_gb": peak}
        if self._lead:  # writes the whole file, because a file in a bucket cannot be appended to
            self._lines.append(json.dumps(line) + "\n")
            write_whole(self._file, "".join(self._lines))
        self._rounds, self._before, self._last = [], np.zeros(5), step


class Lines:
    """Lines on standard error with the progress of training: one per second, after an hour one per minute."""

    def __init__(self, run: Any):
        """Starts the clock of training."""
        self._run, self._start, self._last = run, (time.monotonic(), run.done), (time.monotonic(), run.done)

    def show(self, loss: float | None) -> None:
        """Prints a line if it is due, or if the last round is done.

        Args:
          loss: training loss of the latest computed round; None if there is none.
        """
        run, now, (start, first), (last, before) = self._run, time.monotonic(), self._start, self._last
        due = now - last > min(max(1.0, (now - start) / 60), 60.0) or run.done == run.last
        if not run.lead or loss is None or not due:
            return
        left = (run.last - run.done) * (now - start) / (run.done - first)
        if run.options.max_seconds is not None:
            left = min(left, run.began + run.options.max_seconds - now)
        rows = run.job.updates * run.options.batch  # rows of a round
        parts = [f"step {run.step} of {run.last * run.job.updates}", f"{run.done * rows} rows"]
        parts += [f"{run.names[0]} {loss:.4g}", f"{(run.done - before) * rows / (now - last):.0f} rows/s"]
        print(
            ", ".join([*parts, f"{datetime.timedelta(seconds=round(max(0, left)))} left"]), file=sys.stderr, flush=True
        )
        self._last = now, run.done
