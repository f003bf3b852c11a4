"""Trains on tables that do not fit in memory, on all devices of all processes, and resumes where it was stopped.

It runs from a checkout of the repository, whose folder ``experiments`` the wheel does not have, with the extra "large".

python -m experiments.train_large --out RUN --data FOLDER --target price          # shards, Parquet or .npy
python -m experiments.train_large --out RUN --synthetic rows=1e8,p=64 --method tel --set depth=4 trees=20
python -m experiments.train_large ... --coordinator host:1234 --processes 2 --process 0      # each of two processes

A round reads a block of rows for each device, in an order that depends on --seed, and trains on mini-batches of them.
Validation blocks, on which the hardened model is evaluated, are drawn by --seed from all parts of the table. RUN
receives config.json, metrics.jsonl, checkpoints and, at the end, model.jtrees (``jtrees.load``). SIGTERM and Ctrl-C
write a checkpoint; the same command resumes from the newest readable one, position in the data included, and ends with
the same bits. The learning rate is scheduled for --epochs passes; --max-steps and --max-seconds end the run earlier,
with a model.

GET and RADDT are not among the methods: each of their updates takes all rows, and so does the choice among their
starts. For one tree of constant leaves take dgt, or fit GET to a sample of rows that fits in memory.

No row is dropped at the end of a pass, which may lie within a round; rows at the end of a shard that fill no block are
not used, and the run says how many. Features and targets are standardised, in double precision, by the moments of the
first blocks.

Exit status: 0 when all steps are done that --epochs plans or --max-steps allows; 75 when --max-seconds, SIGTERM or
Ctrl-C ended the run before that, and the same command resumes; 1 when options, data, checkpoints or the disk do not
allow the run, which stderr explains; 2 when the command line cannot be parsed.
"""

import argparse
import datetime
import json
import os
from pathlib import Path
import signal
import sys
import time
from typing import Any
import zlib

import jax
from jax.experimental import multihost_utils
import numpy as np

from experiments import benchmark
from experiments.blocks import Blocks, DataError
from experiments.checkpoints import CheckpointError, Checkpoints
from experiments.rounds import METHODS, Evaluator, Job, first_state, prepared, round_of, source, stream
import jtrees
from jtrees import sharding, training

ENDING = 0.8  # seconds that a process takes to come to its end, measured
NAMES = {  # what is printed and written: the training loss, penalties included; the validation loss; a validation score
    "regression": (
        "training loss (scaled targets)",
        "validation mean squared error (target units squared)",
        "validation R2",
    ),
    "classification": ("training loss (nats)", "validation log loss (nats)", "validation accuracy"),
}
SETTINGS = ("method", "set", "task", "batch", "blocks", "epochs", "held_out", "seed")  # what a resumed run keeps


class Stopped(Exception):
    """SIGTERM came."""


class Stop:
    """Remembers SIGTERM and Ctrl-C until :meth:`check`: between rounds, and after whatever takes long."""

    def __init__(self) -> None:
        """Installs the handlers; a second Ctrl-C raises KeyboardInterrupt."""
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGINT, self._ask)

    def _ask(self, *_: Any) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def check(self) -> None:
        """Raises :class:`Stopped` if any process was asked to stop: all of them must call this."""
        if agreed(self.asked)[0]:
            raise Stopped


# --- The run ---------------------------------------------------------------------------------------------------------


class Run:
    """A run in this process: its state, its progress, and its files."""

    def __init__(self, options: argparse.Namespace, stop: Stop):
        """Starts, or resumes from the newest checkpoint that can be read.

        Raises:
          Stopped: if it was asked to meanwhile: nothing is lost.
          DataError, CheckpointError: for what is wrong with the data, the options or the disk.
        """
        self.began, loaded = time.monotonic() - _age(), time.monotonic()
        self.options, self.stop, self.out, self.lead = options, stop, options.out, jax.process_index() == 0
        blocks = source(options)
        config = _compared(self.out, options, blocks)
        self.job = prepared(options, blocks)
        _same_everywhere(options, config)
        if self.lead:
            benchmark.write_whole(self.out / "config.json", json.dumps(config, indent=1))
        for text in [*blocks.notes, *_notes(self.job)]:
            self.say(text)
        stop.check()
        self.mesh, self.program = sharding.mesh(), None
        self.fit: Any = None
        self.last = min(self.job.rounds, -(-(options.max_steps or sys.maxsize) // self.job.updates))
        with jax.set_mesh(self.mesh):
            self.state = first_state(self.job, jax.random.key(options.seed))
        self.mark = _mark(self.job)
        self.checkpoints, self.data = Checkpoints(self.out / "checkpoints"), stream(self.job)
        self.done, self.saved, self.position = 0, -1, self.data.get_state()
        found, before = self.checkpoints.newest(self.state), None
        if found is not None:
            before = self._go_on(*found)
            self.say(f"resumes at step {self.step}, {time.monotonic() - loaded:.1f} s after all was loaded")
        self.names, self.evaluator = NAMES[options.task], Evaluator(self.job)
        self.log = Log(self.out / "metrics.jsonl", self.step, self.lead, self.names, before)
        self.takes = {"save": 0.0, "evaluate": 0.0, "round": 0.0}  # seconds of the last of each
        stop.check()

    def _go_on(self, step: int, state: training.TrainState, told: dict[str, Any], wrong: list[str]) -> list[float]:
        """Takes over a checkpoint; returns the sums of rounds that no line of the log has yet."""
        if told.get("mark") != self.mark:
            raise DataError(
                f"the data are not those of the run in {self.out}: of the {len(self.job.sample.x)} rows that are read "
                "first, or of the validation set, some differ; restore the data, or give another --out"
            )
        self.state, self.position, self.done = state, told["data"], step // self.job.updates
        self.saved = self.done
        self.data.set_state(self.position)
        for text in wrong:
            self.say(f"{text}; going back to step {step}")
        if told["devices"] != (now := jax.device_count()):
            was = told["devices"]
            self.say(f"started on {was} devices, resumes on {now}: rows are shuffled differently from here on")
        return told["log"]

    @property
    def step(self) -> int:
        """Updates so far."""
        return self.done * self.job.updates

    def say(self, text: str) -> None:
        """Prints a line, once for all processes."""
        if self.lead:
            print(text, flush=True)

    def train(self) -> bool:
        """Trains until all steps are done, the time is up, or the run is stopped, which writes a checkpoint.

        Returns:
          Whether all steps are done that were planned, or allowed by --max-steps.
        """
        try:
            if not self.done or self.options.max_seconds is not None:
                self.evaluate()  # compiled, and timed, before time is short
                self.save()
                self.stop.check()
            self._rounds()
            self.save()
            self.evaluate()
        except Stopped:
            self.save()
            where = self.out / "checkpoints" / str(self.step)
            self.say(f"stopped at step {self.step}: the same command resumes from {where}")
            return False
        finally:
            self.checkpoints.close()
        file = self.out / "model.jtrees"
        if self.lead:
            jtrees.save(self.fit, file, feature_names=self.job.blocks.names)
        finished = self.done >= self.last
        limit = "--max-steps" if finished else "--max-seconds"
        ended = "all that was planned" if self.done == self.job.rounds else f"as far as {limit} allows"
        values = zip(self.names[1:], (self.fit.loss, self.log.score), strict=True)
        self.say(f"{self.step} steps, {ended}: {file}, {', '.join(f'{name} {value:.4g}' for name, value in values)}")
        if not self.fit.loss <= (loss := self.evaluator.constant_loss):
            self.say(
                f"the model is worse than a constant, with which {self.names[1]} is {loss:.4g}: "
                "try a smaller learning_rate or more steps"
            )
        return finished

    def _rounds(self) -> None:
        updates, options = self.job.updates, self.options
        a_save, an_evaluation = (max(1, every // updates) for every in (options.save_every, options.evaluate_every))
        began, lines, before = time.monotonic(), Lines(self), None  # the loss of the round before
        while self.done < self.last:
            start = time.monotonic()
            rows, error = self._next()
            waited = time.monotonic() - start
            wrong, asked, late = agreed(error is not None, self.stop.asked, self._is_late())
            if wrong:
                self.save()  # the same command resumes from here once the data are corrected
                raise error or DataError("another process cannot read its data")
            if asked:
                raise Stopped
            if late:
                break
            with jax.set_mesh(self.mesh):
                x, y = sharding.join_rows(rows)
                if self.program is None:
                    self.program = round_of(self.job).lower(self.state, x, y).compile()
                    self.stop.check()  # a barrier, too: collectives give up on a process that is still compiling
                    began, lines = time.monotonic() - waited, Lines(self)
                self.state, loss = self.program(self.state, x, y)
            self.done, self.position = self.done + 1, self.data.get_state()
            # The round before is waited for, and not this one, which computes while rows are fetched.
            waits = self.done % an_evaluation == 0 or self.done % a_save == 0 or self.done == self.last
            shown = loss if waits else before
            lines.show(None if shown is None else float(shown))
            before, now = loss, time.monotonic()
            self.takes["round"] = now - began
            self.log.round(loss, len(rows[0]) * jax.process_count(), now - began, waited)
            if self.done % an_evaluation == 0:
                self.evaluate()
            if self.done % a_save == 0:
                self.save()
            began = time.monotonic() if waits else now

    def _next(self) -> tuple[Any, DataError | None]:
        """The rows of the next round, or what is wrong with them."""
        try:
            return next(self.data), None
        except DataError as error:
            return None, error

    def _check_finite(self) -> None:
        if not bool(self.state.finite):
            said = f"training became non-finite before step {self.step}: try a smaller learning_rate in another --out"
            raise DataError(said)

    def save(self) -> None:
        """Writes a checkpoint, if there is none of this step.

        Raises:
          DataError: for a state that is not finite, which should not push out those that are.
        """
        if self.saved == self.done:
            return
        self._check_finite()
        start = time.monotonic()
        told = {"data": self.position, "devices": jax.device_count(), "mark": self.mark, "log": self.log.sums()}
        self.checkpoints.save(self.step, self.state, told)
        self.saved, self.takes["save"] = self.done, time.monotonic() - start

    def evaluate(self) -> None:
        """Evaluates the model on the validation set, if there was a round since the last evaluation."""
        if self.fit is not None and not self.log.pending:
            return
        self._check_finite()
        start = time.monotonic()
        self.fit = self.evaluator.fit(self.state)
        self.log.write(self.step, self.fit.loss, self.evaluator.score(self.fit))
        self.takes["evaluate"] = time.monotonic() - start

    def _is_late(self) -> bool:
        if self.options.max_seconds is None:
            return False
        left = self.options.max_seconds - (time.monotonic() - self.began)
        return left < self.takes["save"] + self.takes["evaluate"] + self.takes["round"] / 2 + ENDING


def agreed(*flags: bool) -> tuple[bool, ...]:
    """Which of them are set in any process: all of them must call this."""
    if jax.process_count() == 1:
        return flags
    return tuple(map(bool, multihost_utils.process_allgather(np.array(flags)).any(0)))


def _age() -> float:
    """Seconds since the process began, imports included, where the system tells."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0


def _compared(out: Path, options: argparse.Namespace, blocks: Blocks) -> dict[str, Any]:
    """What the run is, compared with what is there of it; blocks in a round are as many as they were.

    Raises:
      DataError: if it was another, saying in what; and for a file that cannot be read.
    """
    file, was = out / "config.json", {}
    try:
        out.mkdir(parents=True, exist_ok=True)
        if file.exists():
            was = json.loads(file.read_text())
            options.blocks = was["blocks"] if options.blocks is None else options.blocks
    except OSError as error:
        raise DataError(f"cannot write to {out}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"{file} is not what a run wrote: {error}") from error
    options.blocks = options.blocks or jax.device_count()
    config = {name: getattr(options, name) for name in SETTINGS} | {"table": blocks.described}
    config = json.loads(json.dumps(config))
    for name in was:
        if was[name] != config.get(name):
            said = f"{out} holds a run of another {name}: {was[name]}, not {config.get(name)}"
            if name == "table":
                said = f"{out} holds a run on other data: {_changed(was[name], config[name])}"
            raise DataError(f"{said}; give another --out")
    return config


def _changed(was: dict[str, Any], now: dict[str, Any]) -> str:
    """The first difference between two descriptions of a table."""
    rows, rows_now = was.get("shards", {}), now.get("shards", {})
    for file in sorted(rows.keys() | rows_now.keys()):
        if rows.get(file) != rows_now.get(file):
            return f"{file} had {rows.get(file, 'no')} rows, and has {rows_now.get(file, 'no')} rows now"
    name = next(name for name in [*was, *now] if was.get(name) != now.get(name))
    return f"{name} was {was.get(name)}, and is {now.get(name)} now"


def _notes(job: Job) -> list[str]:
    """What a user should know of the data."""
    notes = []
    if constant := [name for name, same in zip(job.blocks.names, job.scaling.constant, strict=True) if same]:
        some = ", ".join(constant[:3]) + (", ..." if len(constant) > 3 else "")
        notes.append(f"constant in the first {len(job.sample.x)} rows, and not used: {some} ({len(constant)} in all)")
    if not job.validation.task.varies(job.validation.y):
        notes.append(f"the target is {job.validation.y[0]:.6g} in all validation rows: validation R2 is not defined")
    return notes


def _mark(job: Job) -> int:
    """A number that tells these data from others: of the rows in memory."""
    mark = 0
    for rows in (part for a in (job.sample, job.validation) for b in (a.x, a.y) for part in np.array_split(b, 16)):
        mark = zlib.crc32(rows.astype(np.float64).tobytes(), mark)
    return mark


def _same_everywhere(options: argparse.Namespace, config: dict[str, Any]) -> None:
    """Raises :class:`DataError` unless all processes were started alike: they would wait for each other for ever."""
    told = {name: str(value) for name, value in vars(options).items() if name != "process"}
    mark = np.array(zlib.crc32(json.dumps([told, config], sort_keys=True).encode()), np.uint32)
    if jax.process_count() > 1 and len(set(multihost_utils.process_allgather(mark).ravel().tolist())) > 1:
        raise DataError("the processes must be started with the same options and see the same data")


class Log:
    """``metrics.jsonl``: a line for each evaluation, of the rounds since the last."""

    def __init__(
        self, file: Path, step: int, lead: bool, names: tuple[str, str, str], before: list[float] | None = None
    ):
        """Lines of steps beyond ``step``, which a resumed run makes again, are removed.

        Args:
          file: where lines go.
          step: that the run is at.
          lead: whether it is this process that writes.
          names: of the values, as in ``NAMES``.
          before: :meth:`sums` of the rounds that no line tells of.

        Raises:
          DataError: for a file of other lines.
        """
        self._file, self._lead, self._names, self._last, self._rounds = file, lead, names, -1, []
        self._before = np.zeros(5) if before is None else np.array(before)
        self.score = float("nan")  # of the last evaluation
        if lead and file.exists():
            whole = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
            try:
                steps = [json.loads(line)["step"] for line in whole]
            except (ValueError, LookupError, TypeError) as error:
                raise DataError(f"{file} is not what a run wrote: {error}") from error
            kept = [line for line, of in zip(whole, steps, strict=True) if of <= step]
            benchmark.write_whole(file, "".join(kept))
            self._last = max((of for of in steps if of <= step), default=-1)

    @property
    def pending(self) -> bool:
        """Whether there were rounds since the last line."""
        return bool(self._rounds)

    def round(self, *of_round: Any) -> None:
        """A round: its loss, which may be computed yet, rows, seconds, and seconds that it waited for data."""
        self._rounds.append((1, *of_round))

    def sums(self) -> list[float]:
        """Of the rounds since the last line: their number, losses, rows, seconds, and seconds spent waiting."""
        return (self._before + np.array(self._rounds, float).reshape(-1, 5).sum(0)).tolist()

    def write(self, step: int, loss: float, score: float) -> None:
        """A line, except where the last is of the same step."""
        training, *validation = self._names
        self.score = score
        if step == self._last:
            return
        rounds, losses, rows, seconds, waited = self.sums()
        line = {"step": step, "rows": int(rows), "seconds": seconds, "waited": waited}
        if rounds:
            line |= {training: losses / rounds, "rows_per_second": rows / seconds}
        values = loss, None if np.isnan(score) else score
        line |= dict(zip(validation, values, strict=True)) | {"peak_gb": benchmark.peak_memory()}
        if self._lead:
            with self._file.open("a") as file:
                file.write(json.dumps(line) + "\n")
        self._rounds, self._before, self._last = [], np.zeros(5), step


class Lines:
    """Lines on standard error that say how far training is: one a second, after an hour one a minute."""

    def __init__(self, run: Run):
        """Training starts now."""
        self._run, self._start, self._last = run, (time.monotonic(), run.done), (time.monotonic(), run.done)

    def show(self, loss: float | None) -> None:
        """Prints a line if it is time for one, or the last round is done.

        Args:
          loss: training loss of the latest round that is computed; None if there is none.
        """
        run, now, (start, first), (last, before) = self._run, time.monotonic(), self._start, self._last
        due = now - last > min(max(1.0, (now - start) / 60), 60.0) or run.done == run.last
        if not run.lead or loss is None or not due:
            return
        left = (run.last - run.done) * (now - start) / (run.done - first)
        if run.options.max_seconds is not None:
            left = min(left, run.began + run.options.max_seconds - now)
        rows = run.job.updates * run.options.batch  # in a round
        parts = [f"step {run.step} of {run.last * run.job.updates}", f"{run.done * rows} rows"]
        parts += [f"{run.names[0]} {loss:.4g}", f"{(run.done - before) * rows / (now - last):.0f} rows/s"]
        print(
            ", ".join([*parts, f"{datetime.timedelta(seconds=round(max(0, left)))} left"]), file=sys.stderr, flush=True
        )
        self._last = now, run.done


# --- The command line ------------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = out.add_argument
    add("--out", type=Path, required=True, help="Folder of the run. Required.")
    add("--data", type=Path, help="Folder of .parquet or .npy shards. Default: none; --synthetic is needed instead.")
    add("--target", help="Column of the Parquet shards to predict. Default: none; .npy shards have it last.")
    add("--synthetic", help="Table to generate instead of --data, such as rows=1e8,p=64,seed=1. Default: none.")
    add(
        "--task",
        choices=("regression", "classification"),
        default="regression",
        help="Whether targets are numbers or classes 0, 1, ... Default: %(default)s.",
    )
    add("--method", choices=list(METHODS), default="dgt", help="Method to train with. Default: %(default)s.")
    add(
        "--set",
        nargs="+",
        default=[],
        metavar="OPTION=VALUE",
        help="Options of the method, such as depth=6 widths=[]. Default: those of its recipe.",
    )
    add("--block", type=_positive, default=4096, metavar="ROWS", help="Rows in a block. Default: %(default)s.")
    add("--blocks", type=_positive, help="Blocks in a round, a multiple of the devices. Default: one for each device.")
    add("--batch", type=_positive, default=256, metavar="ROWS", help="Rows in a mini-batch. Default: %(default)s.")
    add("--epochs", type=_positive, default=1, help="Passes over the data. Default: %(default)s.")
    add(
        "--held-out",
        type=_positive,
        default=8,
        metavar="BLOCKS",
        help="Blocks of the validation set, drawn by --seed. Default: %(default)s.",
    )
    add("--seed", type=_natural, default=0, help="Seed of parameters and of the order of rows. Default: %(default)s.")
    a_while = "rounded down to whole rounds. Default: %(default)s."
    add("--save-every", type=_positive, default=2000, metavar="STEPS", help=f"Steps between checkpoints, {a_while}")
    add("--evaluate-every", type=_positive, default=2000, metavar="STEPS", help=f"Steps between evaluations, {a_while}")
    add(
        "--max-steps",
        type=_positive,
        metavar="STEPS",
        help="Steps after which the run ends, rounded up to whole rounds. Default: all of --epochs.",
    )
    add(
        "--max-seconds",
        type=_seconds,
        metavar="SECONDS",
        help="Seconds after which this command ends, compilation included. Default: no limit.",
    )
    add("--coordinator", metavar="HOST:PORT", help="Address of the first of several processes. Default: one process.")
    add("--processes", type=_positive, help="Number of processes. Default: one process.")
    add("--process", type=_natural, help="Number of this process, from 0. Default: one process.")
    options = out.parse_args(arguments)
    together = [options.coordinator, options.processes, options.process]
    if any(one is None for one in together) and together != [None] * 3:
        out.error("--coordinator, --processes and --process go together")
    if options.process is not None and options.process >= options.processes:
        out.error(f"--process must be from 0 to {options.processes - 1}, got {options.process}")
    return options


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = float("nan")
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"a number above 0 was expected, got {text!r}")
    return seconds


def _natural(text: str) -> int:
    if not text.isdigit() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"a whole number from 0 to 2^32 - 1 was expected, got {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 was expected, got {text!r}")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0, 1, or 75 (``EX_TEMPFAIL``) for a run that the same command resumes."""
    stop, options = Stop(), parse(arguments)
    try:
        if options.coordinator is not None:
            jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
            jax.distributed.initialize(options.coordinator, options.processes, options.process)
        return 0 if Run(options, stop).train() else os.EX_TEMPFAIL
    except Stopped:
        if jax.process_index() == 0:
            print("stopped before a step was made: nothing is lost", flush=True)
        return os.EX_TEMPFAIL
    except (DataError, CheckpointError, OSError, FloatingPointError) as error:
        print(f"train_large: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
