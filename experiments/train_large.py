"""Trains on tables that no memory holds, on all devices of all processes, and goes on where it was stopped.

python -m experiments.train_large --out RUN --data FOLDER --target price          # shards, Parquet or .npy
python -m experiments.train_large --out RUN --synthetic rows=1e8,p=64 --method tel --set depth=4 trees=20
python -m experiments.train_large ... --coordinator host:1234 --processes 2 --process 0      # each of two processes

A round takes a block of rows for each device, drawn in an order that the seed says, and makes mini-batches of them. The
last blocks are held out: the hardened model is judged on them. RUN receives config.json, metrics.jsonl, checkpoints
and, at the end, model.jtrees (``jtrees.load``). The same command goes on from the newest checkpoint that is whole,
position in the data included, and ends with the same bits; SIGTERM writes one first. The schedule of the learning rate
is made for --epochs passes; --max-steps and --max-seconds end earlier, with a model.

No row is dropped at the end of a pass, which may lie within a round; rows at the end of a shard that fill no block are
not used, and the run says how many. Features and targets are standardised by the moments of the first blocks.
"""

import argparse
from collections.abc import Iterable
from functools import reduce
import json
import os
from pathlib import Path
import signal
import sys
import time
from typing import Any, NamedTuple

import grain
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
from rich.console import Console
from rich.progress import Progress

from experiments import benchmark
from experiments.blocks import Block, Blocks, Shards, Synthetic
from experiments.checkpoints import CheckpointError, Checkpoints
from experiments.data import DataError
import jtrees
from jtrees import sharding, training
from jtrees.leaves import moments
from jtrees.methods.one_run import OneRun
from jtrees.options import with_options
from jtrees.recipes import Watch
from jtrees.table import Scale, Table

METHODS = {"dgt": jtrees.DGT, "pat": jtrees.PAT, "latent": jtrees.LatentTree, "tel": jtrees.TEL}
SAMPLE = 2**16  # rows in memory: for moments, for the first parameters, for the leaves that a tree ends in
ENDING = 0.8  # seconds that a process takes to come to its end, measured
SETTINGS = ("method", "set", "task", "batch", "blocks", "epochs", "held_out", "seed")  # what a run that goes on keeps


class Stopped(Exception):
    """SIGTERM came."""


class Stop:
    """Remembers SIGTERM and Ctrl-C, and says so when it is asked: between rounds, and after whatever takes long."""

    def __init__(self) -> None:
        """From here on; pressed a second time Ctrl-C is what it ever was."""
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)
        signal.signal(signal.SIGINT, self._ask)

    def _ask(self, *_: Any) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def look(self) -> None:
        """Raises :class:`Stopped` if any process was asked to stop: all of them must look."""
        if agreed(self.asked):
            raise Stopped


class Job(NamedTuple):
    """What is trained on what.

    Attributes:
      blocks: the table.
      order: of its blocks, of which the last are held out, pass after pass.
      a_round: blocks in a round, of all processes.
      rounds: how many are planned.
      updates: steps in a round.
      recipe: checked.
      scale: of the data.
      sample: rows in memory, in the user's units.
      judge: those held out.
    """

    blocks: Blocks
    order: Any
    a_round: int
    rounds: int
    updates: int
    recipe: Any
    scale: Scale
    sample: Table
    judge: Table


# --- The job ---------------------------------------------------------------------------------------------------------


def source(options: argparse.Namespace) -> Blocks:
    """The table."""
    classes = options.task == "classification"
    if (options.data is None) == (options.synthetic is None):
        raise DataError("give either --data FOLDER or --synthetic rows=N,p=P")
    if options.data is not None:
        return Shards(options.data, options.block, options.target, classes)
    try:
        numbers = {name: int(float(value)) for name, value in (one.split("=") for one in options.synthetic.split(","))}
        made = Synthetic(block=options.block, classes=classes, **numbers)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"--synthetic must be like rows=1e8,p=64 or rows=1e8,p=64,seed=1, got {options.synthetic!r}"
        ) from error
    return made


def recipe_of(options: argparse.Namespace) -> OneRun:
    """The recipe with its options."""
    pairs = [one.partition("=") for one in options.set]
    try:
        chosen = with_options(METHODS[options.method](), {name: _value(text) for name, _, text in pairs})
    except ValueError as error:
        raise DataError(f"--set: {error}") from error
    return chosen.replace(batch_size=options.batch, epochs=options.epochs)


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    return tuple(value) if isinstance(value, list) else value


def prepared(options: argparse.Namespace, blocks: Blocks) -> Job:
    """All that a run needs to know before its first step, found again from the same data whenever it goes on.

    Raises:
      DataError: for too few rows, blocks that the devices cannot share, batches that the rounds cannot.
    """
    devices = jax.device_count()
    a_round = options.blocks
    if a_round % devices:
        raise DataError(f"--blocks must be a multiple of the {devices} devices, got {a_round}")
    if options.batch > a_round * options.block or options.batch % devices:
        most = a_round * options.block
        raise DataError(
            f"--batch must be at most {most}, the rows of a round, and a multiple of {devices}, got {options.batch}"
        )
    count = len(blocks) - options.held_out
    few = max(a_round, -(-SAMPLE // options.block))
    if count < a_round:
        raise DataError(
            f"{len(blocks)} blocks of {options.block} rows are too few: {options.held_out} held out, {a_round} a round"
        )
    order: Any = grain.MapDataset.range(count).shuffle(seed=options.seed).repeat()
    seen = [blocks[order[i]] for i in range(min(few, count))]
    classes = _classes(seen) if options.task == "classification" else None
    judge = _table([blocks[count + i] for i in range(options.held_out)], classes)
    sample = _table(seen, classes)
    updates = a_round * options.block // options.batch
    rounds = max(1, -(-options.epochs * count // a_round))
    try:
        recipe = recipe_of(options).checked(sample)
    except ValueError as error:
        raise DataError(f"--set: {error}") from error
    return Job(blocks, order, a_round, rounds, updates, recipe, scale_of(seen, classes), sample, judge)


def _classes(seen: list[Block]) -> int:
    return int(max(y.max() for _, y in seen)) + 1


def _table(parts: list[Block], classes: int | None) -> Table:
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    if classes is not None and y.max() >= classes:
        raise DataError(f"classes must be among the {classes} of the first blocks, got {y.max()}")
    return Table(x, y if classes is not None else y.astype(np.float64), None, classes)


def scale_of(parts: Iterable[Block], classes: int | None) -> Scale:
    """The scale of a table by the moments of its parts, one after the other."""
    total = reduce(_merged, (_moments(x, y) for x, y in parts))
    p = total.mean.shape[1] - 1
    mean = np.asarray(total.mean[0], np.float64)
    deviation = np.sqrt(np.asarray(jnp.diagonal(total.second[0]), np.float64) / float(total.count[0]))
    low, high = float(total.low[0, 0]), float(total.high[0, 0])
    targets = (None, None, None) if classes is not None else (low, high - low, mean[p])
    return Scale.by(mean[:p], deviation[:p], 1.0, *targets)


@jax.jit
def _moments(x: Any, y: Any) -> moments.Moments:
    rows, n = jnp.concatenate([x, y[:, None].astype(x.dtype)], 1), len(x)
    return moments.of_leaves(rows, x.shape[1], jnp.ones(n), jnp.zeros(n, jnp.int32), 1)


@jax.jit
def _merged(a: moments.Moments, b: moments.Moments) -> moments.Moments:
    return moments.merge(jax.tree.map(lambda *both: jnp.stack(both, 1), a, b))


def stream(job: Job) -> Any:
    """The rounds of this process as an iterator of Grain: ``(x, y)``, its share of the blocks of each round."""
    share = job.a_round // jax.process_count()
    first = jax.process_index() * share

    def read(k: int) -> Block:
        mine = [job.blocks[job.order[k * job.a_round + first + j]] for j in range(share)]
        x, y = zip(*mine, strict=True)
        return mine[0] if share == 1 else (np.concatenate(x), np.concatenate(y))

    rounds = grain.MapDataset.range(job.rounds).map(read)
    threads = max(1, (os.cpu_count() or 1) // 2)  # the others compute
    return iter(rounds.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)))


# --- The programs ----------------------------------------------------------------------------------------------------


def first_state(job: Job, key: jax.Array) -> training.TrainState:
    """The state of a run that has not begun, the same on every device."""
    rows = job.a_round * len(job.blocks[0][0])
    unit = job.scale.unit(job.sample)
    data = jax.tree.map(lambda a: np.resize(a, (rows, *a.shape[1:])), training.Batch(unit.x, unit.y))
    method, optimizer = job.recipe.method(unit), optimizer_of(job)

    def start(data: training.Batch, key: jax.Array) -> training.TrainState:
        return training.start(method, data, key=key, optimizer=optimizer)

    state = jax.jit(start)(data, key)
    # Rounds take the place of the state before, in which nothing may be held twice.
    return jax.device_put(jax.tree.map(jnp.copy, state), _everywhere())


def _everywhere() -> NamedSharding:
    return NamedSharding(jax.sharding.get_mesh(), PartitionSpec())


def optimizer_of(job: Job) -> Any:
    """The recipe's, for all steps that are planned."""
    return job.recipe.optimizer(job.rounds * job.updates, max(1, job.rounds * job.updates // job.recipe.epochs))


def round_of(job: Job) -> Any:
    """``(state, x, y) -> (state, mean loss)``, to be compiled: a round of mini-batches on rows in the user's units."""
    method, optimizer = job.recipe.method(job.scale.unit(job.sample)), optimizer_of(job)

    def run(state: training.TrainState, x: jax.Array, y: jax.Array) -> tuple[training.TrainState, jax.Array]:
        data = training.Batch(job.scale.enter(x), job.scale.y(y))
        many: Any = {"steps": job.updates, "batch_size": job.recipe.batch_size}
        state, history = training.advance(method, state, data, optimizer=optimizer, **many)
        return state, history.losses.mean()

    return jax.jit(run, donate_argnums=0, out_shardings=_everywhere())


class Judge:
    """Hardens a state and judges the model on the rows held out; compiled once."""

    def __init__(self, job: Job):
        """For a job."""
        self._job, self._tables = job, tuple(job.scale.unit(table) for table in (job.sample, job.judge))
        self._end = jax.jit(lambda state, table, judge: job.recipe.end(state, table, judge))

    def fit(self, state: training.TrainState) -> jtrees.Fit:
        """The model, in the user's units.

        Raises:
          FloatingPointError: if the state is not finite.
        """
        job, key = self._job, state.key
        held = jax.device_get(state.replace(key=jax.random.key_data(key)))
        held = held.replace(key=jax.random.wrap_key_data(jnp.asarray(held.key), impl=jax.random.key_impl(key)))
        found = self._end(held, *self._tables)
        of: Any = {"scale": job.scale, "key": jax.random.key(0), "watch": Watch()}
        return job.recipe.finish(jax.device_get(found), None, job.sample, job.judge, **of)

    def score(self, fit: jtrees.Fit) -> float:
        """Accuracy, or R^2, on the rows held out."""
        y, answers = self._job.judge.y, np.asarray(fit.model.predict(self._job.judge.x))
        if self._job.judge.classes is not None:
            return float((answers.argmax(1) == y).mean())
        return float(1 - np.square(answers - y).sum() / np.square(y - y.mean()).sum())


# --- The run ---------------------------------------------------------------------------------------------------------


class Run:
    """A run as this process has it: its state, how far it is, and what is kept of it."""

    def __init__(self, options: argparse.Namespace, stop: Stop):
        """Begins, or goes on from the newest checkpoint that can be read.

        Raises:
          Stopped: if it was asked to meanwhile: nothing is lost.
          DataError, CheckpointError: for what is wrong with the data, the options or the disk.
        """
        self.began, loaded = time.monotonic() - _age(), time.monotonic()
        self.options, self.stop, self.out, self.lead = options, stop, options.out, jax.process_index() == 0
        blocks = source(options)
        _keep_config(self.out, options, blocks, self.lead)
        self.job = prepared(options, blocks)
        if blocks.left_out:
            self.say(
                f"{blocks.left_out} rows at the ends of shards fill no block of {options.block}: they are not used"
            )
        stop.look()
        self.mesh, self.program, self.fit = sharding.mesh(), None, None
        with jax.set_mesh(self.mesh):
            self.state = first_state(self.job, jax.random.key(options.seed))
        self.checkpoints, self.data = Checkpoints(self.out / "checkpoints"), stream(self.job)
        self.done, self.saved, self.position = 0, -1, self.data.get_state()
        if (found := self.checkpoints.newest(self.state)) is not None:
            self._go_on(*found)
            self.say(f"goes on at step {self.step}, {time.monotonic() - loaded:.1f} s after all was loaded")
        self.judge, self.log = Judge(self.job), Log(self.out / "metrics.jsonl", self.step, self.lead)
        self.takes = {"save": 0.0, "evaluate": 0.0, "round": 0.0}  # seconds of the last of each
        stop.look()

    def _go_on(self, step: int, state: training.TrainState, told: dict[str, Any], wrong: list[str]) -> None:
        self.state, self.position, self.done = state, told["data"], step // self.job.updates
        self.saved = self.done
        self.data.set_state(self.position)
        for text in wrong:
            self.say(f"{text}; going back to step {step}")
        if told["devices"] != (now := jax.device_count()):
            was = told["devices"]
            self.say(f"begun on {was} devices, goes on with {now}: rows are shuffled otherwise from here on")

    @property
    def step(self) -> int:
        """Updates so far."""
        return self.done * self.job.updates

    def say(self, text: str) -> None:
        """Says something, once for all processes."""
        if self.lead:
            print(text, flush=True)

    def train(self) -> None:
        """Until the plan, the steps or the time are at their end; or until it is stopped, which writes a checkpoint."""
        try:
            if not self.done or self.options.max_seconds is not None:
                self.evaluate()  # compiled, and timed, before time is short
                self.save()
                self.stop.look()
            self._rounds()
            self.save()
            self.evaluate()
        except Stopped:
            self.save()
            where = self.out / "checkpoints" / str(self.step)
            self.say(f"stopped at step {self.step}: the same command goes on from {where}")
            return
        finally:
            self.checkpoints.close()
        file = self.out / "model.jtrees"
        if self.lead:
            jtrees.save(self.fit, file, feature_names=self.job.blocks.names)
        ended = "all that was planned" if self.done == self.job.rounds else "as far as it was allowed to"
        self.say(f"{self.step} steps, {ended}: {file}, score {self.log.score:.4f} on rows held out")

    def _rounds(self) -> None:
        updates, options = self.job.updates, self.options
        last = min(self.job.rounds, -(-(options.max_steps or sys.maxsize) // updates))
        a_save, an_evaluation = (max(1, every // updates) for every in (options.save_every, options.evaluate_every))
        before: Any = np.nan  # the loss of the round before
        with _bar(self.job.rounds if self.lead else None, self.done) as moved:
            while self.done < last and not agreed(self._is_late()):
                start = time.monotonic()
                rows = next(self.data)
                waited = time.monotonic() - start
                with jax.set_mesh(self.mesh):
                    x, y = sharding.join_rows(rows)
                    if self.program is None:
                        self.program = round_of(self.job).lower(self.state, x, y).compile()
                        self.stop.look()  # a barrier, too: collectives give up on a process that is still compiling
                        start = time.monotonic() - waited
                    self.state, loss = self.program(self.state, x, y)
                self.done, self.position = self.done + 1, self.data.get_state()
                # The round before is waited for, and not this one, which computes while rows are fetched.
                moved(self.done, float(before))
                before, self.takes["round"] = loss, time.monotonic() - start
                self.log.round(loss, len(rows[0]) * jax.process_count(), self.takes["round"], waited)
                self.stop.look()
                if self.done % an_evaluation == 0:
                    self.evaluate()
                    self.stop.look()
                if self.done % a_save == 0:
                    self.save()
                    self.stop.look()

    def save(self) -> None:
        """Writes a checkpoint, if there is none of this step."""
        if self.saved == self.done:
            return
        start = time.monotonic()
        self.checkpoints.save(self.step, self.state, {"data": self.position, "devices": jax.device_count()})
        self.saved, self.takes["save"] = self.done, time.monotonic() - start

    def evaluate(self) -> None:
        """Hardens the model and judges it, if there was a round since that was done."""
        if self.fit is not None and not self.log.unsaid:
            return
        start = time.monotonic()
        if not bool(self.state.finite):
            raise DataError(f"training became non-finite before step {self.step}: try a smaller learning_rate")
        self.fit = self.judge.fit(self.state)
        self.log.write(self.step, self.fit.loss, self.judge.score(self.fit))
        self.takes["evaluate"] = time.monotonic() - start

    def _is_late(self) -> bool:
        if self.options.max_seconds is None:
            return False
        left = self.options.max_seconds - (time.monotonic() - self.began)
        return left < self.takes["save"] + self.takes["evaluate"] + self.takes["round"] / 2 + ENDING


def agreed(flag: bool) -> bool:
    """Whether it is set in any process: all of them must ask."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


def _age() -> float:
    """Seconds since the process began, imports included, where the system tells."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0


def _keep_config(out: Path, options: argparse.Namespace, blocks: Blocks, lead: bool) -> None:
    """Writes what the run is, or compares it with what it was; blocks in a round are as many as they were.

    Raises:
      DataError: if it was another, saying in what.
    """
    file = out / "config.json"
    try:
        there = file.exists()
        if options.blocks is None:
            options.blocks = json.loads(file.read_text())["blocks"] if there else jax.device_count()
        config = {name: getattr(options, name) for name in SETTINGS} | {"table": blocks.described}
        config = json.loads(json.dumps(config))
        if not there:
            out.mkdir(parents=True, exist_ok=True)
            if lead:
                aside = file.with_suffix(".unfinished")
                aside.write_text(json.dumps(config, indent=1))
                os.replace(aside, file)
            return
        was = json.loads(file.read_text())
    except OSError as error:
        raise DataError(f"cannot write to {out}: {error.strerror}") from error
    for name in config:
        if was.get(name) != config[name]:
            raise DataError(
                f"{out} holds a run of another {name}: {was.get(name)}, not {config[name]}; give another --out"
            )


class Log:
    """``metrics.jsonl``: a line for each look at the model, of the rounds since the last."""

    def __init__(self, file: Path, step: int, lead: bool):
        """Lines of steps beyond ``step``, which a run that goes on makes again, are taken back."""
        self._file, self._lead, self._last, self._rounds = file, lead, -1, []
        self.score = float("nan")  # of the last look
        if lead and file.exists():
            whole = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
            aside = file.with_suffix(".unfinished")
            kept = [line for line in whole if json.loads(line)["step"] <= step]
            aside.write_text("".join(kept))
            os.replace(aside, file)
            self._last = json.loads(kept[-1])["step"] if kept else -1

    @property
    def unsaid(self) -> bool:
        """Whether there were rounds since the last line."""
        return bool(self._rounds)

    def round(self, *of_round: Any) -> None:
        """A round: its loss, which may be computed yet, rows, seconds, and seconds that it waited for data."""
        self._rounds.append(of_round)

    def write(self, step: int, loss: float, score: float) -> None:
        """A line, but where the last is of the same step."""
        self.score = score
        if step == self._last:
            return
        losses, rows, seconds, waited = np.array(self._rounds or [[np.nan, 0, 0, 0]], float).T
        line = {"step": step, "rows": int(rows.sum()), "seconds": seconds.sum(), "waited": waited.sum()}
        line |= {"loss": float(losses.mean())} if self._rounds else {}
        line |= {"rows_per_second": float(rows.sum() / seconds.sum())} if self._rounds else {}
        line |= {"held_out_loss": loss, "held_out_score": score}
        if self._lead:
            with self._file.open("a") as file:
                file.write(json.dumps(line | {"peak_gb": benchmark.peak_memory()}) + "\n")
        self._rounds, self._last = [], step


class _bar:
    """A bar where there is a terminal."""

    def __init__(self, rounds: int | None, done: int):
        console = Console(stderr=True)
        self._progress = Progress(console=console, disable=rounds is None or not console.is_terminal, transient=True)
        self._task = self._progress.add_task("", total=rounds, completed=done)

    def __enter__(self) -> Any:
        self._progress.start()
        return lambda done, loss: self._progress.update(self._task, completed=done, description=f"loss {loss:.4g}")

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()


# --- The command line ------------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    positive = lambda text: _positive(out, text)
    out.add_argument("--out", type=Path, required=True, help="the run's folder")
    out.add_argument("--data", type=Path, help="a folder of .parquet or .npy shards")
    out.add_argument("--target", help="the column of Parquet shards to learn")
    out.add_argument("--synthetic", help="rows=1e8,p=64: made as they are needed")
    out.add_argument("--task", choices=("regression", "classification"), default="regression")
    out.add_argument("--method", choices=list(METHODS), default="dgt")
    out.add_argument("--set", nargs="+", default=[], metavar="OPTION=VALUE", help="options of the method: depth=6")
    out.add_argument("--block", type=positive, default=4096, help="rows in a block")
    out.add_argument("--blocks", type=positive, help="blocks in a round, a multiple of the devices (default: one each)")
    out.add_argument("--batch", type=positive, default=256, help="rows in a mini-batch, of all devices")
    out.add_argument("--epochs", type=positive, default=1, help="passes that are planned")
    out.add_argument("--held-out", type=positive, default=8, help="blocks to judge by, the last")
    out.add_argument("--seed", type=int, default=0)
    out.add_argument("--save-every", type=positive, default=2000, metavar="STEPS")
    out.add_argument("--evaluate-every", type=positive, default=2000, metavar="STEPS")
    out.add_argument("--max-steps", type=positive)
    out.add_argument("--max-seconds", type=float, help="of this command, compilation included")
    out.add_argument("--coordinator", help="host:port of the first process, where there are several")
    out.add_argument("--processes", type=positive)
    out.add_argument("--process", type=int)
    return out.parse_args(arguments)


def _positive(parser: argparse.ArgumentParser, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 was expected, got {text!r}")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 also where it was stopped."""
    stop, options = Stop(), parse(arguments)
    try:
        if options.coordinator is not None:
            jax.distributed.initialize(options.coordinator, options.processes, options.process)
        Run(options, stop).train()
    except Stopped:
        print("stopped before the first step: nothing is lost", flush=True)
    except (DataError, CheckpointError, OSError) as error:
        print(f"train_large: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
