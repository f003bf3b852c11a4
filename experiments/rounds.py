"""A job of train_large: what is trained on what, in rounds; the compiled programs, and the judge of what they learn."""

import argparse
from collections.abc import Sequence
import json
import os
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from experiments.blocks import Block, Blocks, DataError, Shards, Synthetic
import jtrees
from jtrees import training
from jtrees.methods.one_run import OneRun
from jtrees.options import with_options
from jtrees.recipes import Watch
from jtrees.table import Scale, Table
from jtrees.tasks import Classification, Regression, Task

METHODS = {"dgt": jtrees.DGT, "pat": jtrees.PAT, "latent": jtrees.LatentTree, "tel": jtrees.TEL}
SAMPLE = 2**16  # rows in memory: for moments, for the first parameters, for the leaves that a tree ends in


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
    if options.target is not None:
        raise DataError(f"--target is for --data, got {options.target!r}")
    try:
        numbers = {name: int(float(value)) for name, value in (one.split("=") for one in options.synthetic.split(","))}
        made = Synthetic(block=options.block, classes=classes, **numbers)
        if made.rows < 1 or made.p < 1 or made.seed < 0:
            raise ValueError("numbers must be positive")
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"--synthetic must be like rows=1e8,p=64 or rows=1e8,p=64,seed=1, got {options.synthetic!r}"
        ) from error
    return made


def recipe_of(options: argparse.Namespace) -> OneRun:
    """The recipe with its options."""
    pairs = [one.partition("=") for one in options.set]
    if taken := {"batch_size", "epochs"} & {name for name, _, _ in pairs}:
        raise DataError(f"--set: {min(taken)} is given by --batch and --epochs")
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
    if (rows := a_round * options.block) % options.batch or options.batch % devices:
        said = f"--batch must divide {rows}, the rows of a round, and be a multiple of {devices}, the devices"
        raise DataError(f"{said}; got {options.batch}")
    count = len(blocks) - options.held_out
    few = max(a_round, -(-SAMPLE // options.block))
    if count < a_round:
        raise DataError(
            f"{len(blocks)} blocks of {options.block} rows are too few: {options.held_out} held out, {a_round} a round"
            "; try a smaller --block"
        )
    order: Any = grain.MapDataset.range(count).shuffle(seed=options.seed).repeat()
    seen = [blocks[order[i]] for i in range(min(few, count))]
    task = Classification(_classes(seen)) if options.task == "classification" else Regression()
    if len({float(one) for _, y in seen for one in (y.min(), y.max())}) == 1:
        raise DataError(f"the target must vary, got {seen[0][1][0]} in all of the first {len(seen)} blocks")
    held_out = [blocks[i] for i in range(count, len(blocks))]
    for i, (_, y) in enumerate(held_out, count):
        _check_classes(blocks, i, y, task)
    judge, sample = _table(held_out, task), _table(seen, task)
    updates = a_round * options.block // options.batch
    rounds = max(1, -(-options.epochs * count // a_round))
    try:
        recipe = recipe_of(options).checked(sample)
    except ValueError as error:
        raise DataError(f"--set: {error}") from error
    return Job(blocks, order, a_round, rounds, updates, recipe, scale_of(seen, task), sample, judge)


def _classes(seen: list[Block]) -> int:
    return int(max(y.max() for _, y in seen)) + 1


def _check_classes(blocks: Blocks, i: int, y: np.ndarray, task: Task) -> None:
    """Raises :class:`DataError` for a class that the first blocks do not have, naming its row in block i."""
    if isinstance(task, Classification) and y.max() >= task.classes:
        row = int(np.argmax(y >= task.classes))
        raise DataError(
            f"classes must be among the {task.classes} of the first blocks, got {y[row]} in {blocks.where(i, row)}: "
            "spread the rows of each class over the shards"
        )


def _table(parts: list[Block], task: Task) -> Table:
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Table(x, y.astype(np.float64) if isinstance(task, Regression) else y, None, task)


def scale_of(parts: Sequence[Block], task: Task) -> Scale:
    """The scale of a table by the moments of its parts, in double precision.

    Rows are counted from the first of them, so that a constant column has a deviation of exactly 0.
    """
    origin, n = parts[0][0][0].astype(np.float64), sum(len(x) for x, _ in parts)
    mean = sum((x - origin).sum(0) for x, _ in parts) / n
    deviation = np.sqrt(sum(np.square(x - origin - mean).sum(0) for x, _ in parts) / n)
    targets: Any = (None, None, None)
    if isinstance(task, Regression):
        y = np.concatenate([y for _, y in parts]).astype(np.float64)
        targets = y.min(), np.ptp(y), y.mean()
    return Scale.by(origin + mean, deviation, 1.0, *targets)


def counted(job: Job, x: np.ndarray, y: np.ndarray) -> Block:
    """Rows in the user's units, counted from the scale's origin in double precision; float32, classes as they are."""
    origin = job.scale.origin
    if origin is not None:
        x, y = origin.enter(x), y if origin.y is None else y - np.asarray(origin.y, np.float64)
    y = y.astype(np.float32, copy=False) if isinstance(job.sample.task, Regression) else y
    return x.astype(np.float32, copy=False), y


def scale_of_counted(scale: Scale) -> Scale:
    """The scale of rows that are counted from this one's origin."""
    if scale.origin is None:
        return scale
    low = None if scale.y_low is None else scale.y_low - scale.origin.y
    return scale.replace(x_center=scale.x_center - scale.origin.x, y_low=low, origin=None)


def stream(job: Job) -> Any:
    """The rounds of this process as an iterator of Grain: its share of the blocks of each round, :func:`counted`."""
    share = job.a_round // jax.process_count()
    first = jax.process_index() * share

    def read(k: int) -> Block:
        numbers = [job.order[k * job.a_round + first + j] for j in range(share)]
        mine = [job.blocks[i] for i in numbers]
        for i, (_, y) in zip(numbers, mine, strict=True):
            _check_classes(job.blocks, i, y, job.sample.task)
        x, y = zip(*(counted(job, *block) for block in mine), strict=True)
        return (x[0], y[0]) if share == 1 else (np.concatenate(x), np.concatenate(y))

    rounds = grain.MapDataset.range(job.rounds).map(read)
    threads = max(1, (os.cpu_count() or 1) // 2)  # the others compute
    return iter(rounds.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)))


# --- The programs ----------------------------------------------------------------------------------------------------


def first_state(job: Job, key: jax.Array) -> training.TrainState:
    """The state of a run that has not begun, the same on every device."""
    rows = job.a_round * len(job.blocks[0][0])
    unit = job.scale.unit(job.sample)
    data = jax.tree.map(lambda a: np.resize(a, (rows, *a.shape[1:])), training.Batch(unit.x, unit.y))
    method, optimizer = method_of(job), optimizer_of(job)

    def start(data: training.Batch, key: jax.Array) -> training.TrainState:
        return training.start(method, data, key=key, optimizer=optimizer)

    state = jax.jit(start)(data, key)
    # Rounds take the place of the state before, in which nothing may be held twice.
    return jax.device_put(jax.tree.map(jnp.copy, state), _everywhere())


def _everywhere() -> NamedSharding:
    return NamedSharding(jax.sharding.get_mesh(), PartitionSpec())


def method_of(job: Job) -> training.Method:
    """The recipe's, with schedules for all steps that are planned: it takes them from the number of rows of a pass."""
    rows = job.rounds * job.updates // job.recipe.epochs * job.recipe.batch_size
    return job.recipe.method(job.sample.replace(x=jax.ShapeDtypeStruct((rows, job.sample.x.shape[1]), np.float32)))


def optimizer_of(job: Job) -> Any:
    """The recipe's, for all steps that are planned."""
    return job.recipe.optimizer(job.rounds * job.updates, max(1, job.rounds * job.updates // job.recipe.epochs))


def round_of(job: Job) -> Any:
    """``(state, x, y) -> (state, mean loss)``, to be compiled: a round of mini-batches on rows of :func:`stream`."""
    method, optimizer = method_of(job), optimizer_of(job)
    scale = scale_of_counted(job.scale)

    def run(state: training.TrainState, x: jax.Array, y: jax.Array) -> tuple[training.TrainState, jax.Array]:
        data = training.Batch(scale.enter(x), scale.y(y))
        many: Any = {"steps": job.updates, "batch_size": job.recipe.batch_size}
        state, history = training.advance(method, state, data, optimizer=optimizer, **many)
        return state, history.losses.mean()

    return jax.jit(run, donate_argnums=0, out_shardings=_everywhere())


class Judge:
    """Hardens a state and judges the model on the rows held out; compiled once."""

    def __init__(self, job: Job):
        """For a job."""
        self._job, self._tables = job, tuple(job.scale.unit(table) for table in (job.sample, job.judge))
        self.constant_loss = _constant_loss(job.sample, job.judge)
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
        """Accuracy, or R^2, on the validation rows; NaN for R^2 if their targets are all the same."""
        judge = self._job.judge
        return judge.task.score(np.asarray(fit.model.predict(judge.x)), judge.y, None)


def _constant_loss(train: Table, validation: Table) -> float:
    """The validation loss of a model that predicts the mean of the targets, or the frequencies of the classes."""
    if isinstance(train.task, Regression):
        return float(np.square(validation.y - train.y.mean()).mean())
    counts = np.bincount(train.y, minlength=train.task.classes) + 1  # no class has frequency 0
    return float(-np.log(counts / counts.sum())[validation.y].mean())
