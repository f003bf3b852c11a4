"""A run of train_large in this process: from the data to the saved model."""

import argparse
import json
import os
from pathlib import Path
import sys
import time
from typing import Any

import jax
import numpy as np

from examples.train_large.blocks import DataError
from examples.train_large.checkpoints import Checkpoints, write_whole
from examples.train_large.identity import Consumed, begun
from examples.train_large.logs import NAMES, Lines, Log
from examples.train_large.rounds import Evaluator, Job, first_state, round_of, share_of, stream
from examples.train_large.together import Agreement, Stop, Stopped
import jtrees
from jtrees import distributed, sharding, training

ENDING = 0.8  # measured seconds of the end of a process


class Run:
    """A run in this process: its state, its progress, and its files."""

    def __init__(self, options: argparse.Namespace, stop: Stop):
        """Starts, or resumes from the newest readable checkpoint.

        Raises:
          Stopped: a signal asked to stop before the first step.
          DataError, CheckpointError: the data, the options or the disk do not allow the run.
        """
        self.began, loaded = time.monotonic() - _age(), time.monotonic()
        self.options, self.stop, self.out, self.lead = options, stop, options.out, jax.process_index() == 0
        distributed.check_folder(self.out)
        config, self.job = begun(options)
        if self.lead:
            write_whole(self.out / "config.json", json.dumps(config, indent=1))
        for text in [*self.job.blocks.table.notes, *notes(self.job)]:
            self.say(text)
        stop.check()
        self.mesh, self.program = sharding.mesh(), None
        self.fit: Any = None
        self.last = min(self.job.rounds, -(-(options.max_steps or sys.maxsize) // self.job.updates))
        with jax.set_mesh(self.mesh):
            self.state = first_state(self.job, jax.random.key(options.seed))
        self.consumed = Consumed(self.job)
        self.checkpoints, self.data = Checkpoints(self.out / "checkpoints"), stream(self.job)
        self.done, self.saved, self.position = 0, -1, self.data.get_state()
        none = np.zeros(len(self.job.blocks), np.uint32)
        checkpoint, before = self.checkpoints.newest((self.state, none)), None
        if checkpoint is not None:
            before = self._go_on(*checkpoint)
            self.say(f"resumes at step {self.step}, {time.monotonic() - loaded:.1f} s after all was loaded")
        self.names, self.evaluator = NAMES[options.task], Evaluator(self.job)
        self.log = Log(self.out / "metrics.jsonl", self.step, self.lead, self.names, before)
        self.takes = {"save": 0.0, "evaluate": 0.0, "round": 0.0}  # seconds of the last call of each
        stop.check()

    def _go_on(
        self, step: int, tree: tuple[training.TrainState, Any], told: dict[str, Any], wrong: list[str]
    ) -> list[float]:
        """Continues from a checkpoint; returns the sums of the rounds that have no line in the log yet."""
        self.state, checksums = tree
        for text in self.consumed.compare(checksums, told["stamps"]):
            self.say(text)
        self.position, self.done = told["data"], step // self.job.updates
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
        """Number of updates so far."""
        return self.done * self.job.updates

    def say(self, text: str) -> None:
        """Prints a line, once for all processes."""
        if self.lead:
            print(text, flush=True)

    def train(self) -> bool:
        """Trains until all steps are done, the time is up, or the run is stopped; a stopped run writes a checkpoint.

        Returns:
          Whether all steps are done that were planned, or that --max-steps allows.
        """
        try:
            with distributed.resumable():  # ends before the checkpoints are closed, which waits for the other process
                if not self.done or self.options.max_seconds is not None:
                    self.evaluate()  # compiles and times the evaluation at the start, while there is time
                    self.save(wait=True)
                    self.stop.check()
                self._rounds()
                self.save()
                self.evaluate()
        except Stopped:
            self.save(wait=True)
            where = self.out / "checkpoints" / str(self.step)
            self.say(f"stopped at step {self.step}: the same command resumes from {where}")
            return False
        finally:
            self.checkpoints.close()
        file = self.out / "model.jtrees"
        if self.lead:
            jtrees.save(self.fit, file, feature_names=self.job.blocks.table.names)
        finished = self.done >= self.last
        limit = "--max-steps" if finished else "--max-seconds"
        ended = "all that was planned" if self.done == self.job.rounds else f"as far as {limit} allows"
        values = zip(self.names[1:], (self.fit.loss, self.log.score), strict=True)
        self.say(f"{self.step} steps, {ended}: {file}, {', '.join(f'{name} {value:.4g}' for name, value in values)}")
        if not self.fit.loss <= (loss := self.evaluator.constant_loss):
            self.say(
                f"the model is worse than a constant, whose {self.names[1]} is {loss:.4g}: "
                "try a smaller learning_rate or more steps"
            )
        return finished

    def _rounds(self) -> None:
        updates, options = self.job.updates, self.options
        a_save, an_evaluation = (max(1, every // updates) for every in (options.save_every, options.evaluate_every))
        agreement, following = Agreement(self.mesh), self._next(self.done)
        agreement.say(*self._flags(following))
        began, lines, before = time.monotonic(), Lines(self), None  # before: the loss of the previous round
        while self.done < self.last:
            wrong, requested, late = agreement.hear(*self._flags(following))
            (rows, error, position), start = following, time.monotonic()
            if wrong:
                self.save(wait=True)  # after a correction of the data, the same command resumes from here
                raise error or DataError("another process cannot read its data")
            if requested:
                raise Stopped
            if late:
                break
            following = self._next(self.done + 1)
            waited = time.monotonic() - start
            agreement.say(*self._flags(following))
            with jax.set_mesh(self.mesh):
                x, y = sharding.join_rows(rows)
                if self.program is None:
                    self.program = round_of(self.job).lower(self.state, x, y).compile()
                    self.stop.check()  # this is also a barrier: collectives time out if a process is still compiling
                    began, lines = time.monotonic() - waited, Lines(self)
                self.state, loss = self.program(self.state, x, y)
            self.consumed.used[share_of(self.job, self.done)] = True
            self.done, self.position = self.done + 1, position
            # Wait for the previous round only. The current round computes while the next rows are fetched.
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

    def _next(self, number: int) -> tuple[Any, DataError | None, Any]:
        """Returns the rows of a round or None, the error of reading them or None, and the position after them."""
        if number >= self.last:
            return None, None, None
        try:
            return next(self.data), None, self.data.get_state()
        except DataError as error:
            return None, error, None

    def _flags(self, following: tuple[Any, DataError | None, Any]) -> tuple[bool, bool, bool]:
        """Returns whether this process has unusable rows, has a signal to stop, has no time for another round."""
        return following[1] is not None, self.stop.requested, self._is_late()

    def _check_finite(self) -> None:
        if not bool(self.state.finite):
            problem = f"training became non-finite before step {self.step}"
            raise DataError(f"{problem}: try a smaller learning_rate in another --out")

    def save(self, wait: bool = False) -> None:
        """Starts to write a checkpoint if this step has none; with ``wait``, waits until it is written.

        Raises:
          DataError: the state is not finite; its checkpoint would displace a finite checkpoint.
          CheckpointError: a checkpoint cannot be written, or a write has failed since the last call.
        """
        start = time.monotonic()
        if self.saved != self.done:
            self._check_finite()
            told = {"data": self.position, "devices": jax.device_count(), "log": self.log.sums()}
            told["stamps"] = self.job.blocks.table.stamps
            self.checkpoints.save(self.step, (self.state, self.consumed.checksums()), told)
            self.saved = self.done
        if wait:
            self.checkpoints.wait()
            self.takes["save"] = time.monotonic() - start

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
        rounds = 0.5 if jax.process_count() == 1 else 1.5  # several processes agree a round later
        return left < self.takes["save"] + self.takes["evaluate"] + self.takes["round"] * rounds + ENDING


def _age() -> float:
    """Returns the seconds since the start of the process, imports included, or 0 if the system does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0


def notes(job: Job) -> list[str]:
    """Returns notes on the data for the user."""
    texts = []
    if constant := [name for name, same in zip(job.blocks.table.names, job.scaling.constant, strict=True) if same]:
        some = ", ".join(constant[:3]) + (", ..." if len(constant) > 3 else "")
        first = f"the first {len(job.sample.x)} rows of the shuffled order"
        texts.append(f"constant in {first}, and not used: {some} ({len(constant)} in all)")
    if not job.validation.task.varies(job.validation.y):
        texts.append(f"the target is {job.validation.y[0]:.6g} in all validation rows: validation R2 is not defined")
    return texts
