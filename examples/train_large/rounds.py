"""A job of train_large: data, rounds of training, compiled programs, and the evaluation of the model."""

import argparse
from collections.abc import Sequence
import dataclasses
from functools import partial
import itertools
import json
import os
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from examples.train_large.blocks import Block, Blocks, Checked, DataError, Shards, Synthetic
import jtrees
from jtrees import distributed, sharding, training
from jtrees.data import Data, Scaling, Table
from jtrees.data.scaling import with_map
from jtrees.search import Engine, Evaluation, FitReport, Fitted, MiniBatchRecipe, Problem, Run, options as kinds
from jtrees.search.minibatch import Result
from jtrees.search.monitor import Monitor
from jtrees.search.precondition import matrix, spectrum
from jtrees.selection.grid import with_options
from jtrees.tasks import Classification, Regression, Task

# Recipes that are a single run on mini-batches.
METHODS = {"dgt": jtrees.DGT, "latent": jtrees.LatentTree, "tel": jtrees.TEL}
SAMPLE = 2**16  # rows in memory: for moments, for the initial parameters, and for the final leaves


class Job(NamedTuple):
    """The parts of a training job.

    Attributes:
      blocks: the table, with the checksums of the blocks that were read.
      order: order of the training blocks, pass after pass.
      blocks_per_round: blocks per round of all processes.
      rounds: number of planned rounds.
      updates: steps in a round.
      recipe: the recipe.
      plan: a run on as many rows as the planned steps take; its rows have no values.
      scaling: scaling of the data.
      sample: rows in memory, in the user's units.
      validation: held-out rows, in the user's units.
      matrix: preconditioner of scaled features, ``(p, p)``, from the correlations of the rows in memory; or None.
    """

    blocks: Checked
    order: Any
    blocks_per_round: int
    rounds: int
    updates: int
    recipe: MiniBatchRecipe
    plan: Run
    scaling: Scaling
    sample: Table
    validation: Table
    matrix: jax.Array | None

    @property
    def batch_size(self) -> int:
        """Rows of a mini-batch."""
        return self.recipe.schedule(len(self.plan.batch.x)).batch_size

    def preconditioned(self, x: Any) -> Any:
        """Returns scaled features after preconditioning."""
        return x if self.matrix is None else jnp.matmul(x, self.matrix, precision="highest")

    def batch(self, table: Table) -> jtrees.Batch:
        """Returns a table after scaling and preconditioning."""
        batch = self.scaling.batch(table)
        return batch._replace(x=np.asarray(self.preconditioned(batch.x)))


# --- The job ---------------------------------------------------------------------------------------------------------


def source(options: argparse.Namespace) -> Blocks:
    """Returns the table."""
    classes = options.task == "classification"
    if (options.data is None) == (options.synthetic is None):
        raise DataError("give either --data FOLDER or --synthetic rows=N,p=P")
    if options.data is not None:
        return Shards(options.data, options.block, options.target, classes, options.batch)
    if options.target is not None:
        raise DataError(f"--target is for --data, got {options.target!r}")
    try:
        numbers = {
            name: int(float(value)) for name, value in (text.split("=") for text in options.synthetic.split(","))
        }
        synthetic = Synthetic(block=options.block, classes=classes, **numbers)
        if synthetic.rows < 1 or synthetic.p < 1 or synthetic.seed < 0:
            raise ValueError("numbers must be positive")
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"--synthetic must be like rows=1e8,p=64 or rows=1e8,p=64,seed=1, got {options.synthetic!r}"
        ) from error
    return synthetic


def recipe_of(options: argparse.Namespace) -> tuple[Any, float]:
    """Returns the recipe without a preconditioner, and its strength; refuses options that need all rows in memory."""
    pairs = [text.partition("=") for text in options.set]
    if fixed := {"batch_size", "epochs"} & {name for name, _, _ in pairs}:
        raise DataError(f"--set: {min(fixed)} is given by --batch and --epochs")
    if "early_stopping" in {name for name, _, _ in pairs}:
        raise DataError("--set: early_stopping needs all rows in memory")
    try:
        values = {"precondition": 0.0} | {name: _value(text) for name, _, text in pairs}
        chosen = kinds.checked(with_options(METHODS[options.method](), values))
    except ValueError as error:
        raise DataError(f"--set: {error}") from error
    if (strength := chosen.precondition) == "auto":
        raise DataError('--set: precondition must be a number, as "auto" needs all rows in memory')
    stream: Any = {"batch_size": options.batch, "epochs": options.epochs}
    return chosen.replace(**stream, precondition=0.0, early_stopping=False), strength


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    return tuple(value) if isinstance(value, list) else value


def prepared(options: argparse.Namespace, blocks: Blocks) -> Job:
    """Returns the job, which a resumed run computes again from the same data.

    Raises:
      DataError: there are too few rows, the devices cannot share the blocks, or the batches do not divide a round.
    """
    devices, blocks_per_round = jax.device_count(), options.blocks
    if blocks_per_round % devices:
        raise DataError(f"--blocks must be a multiple of the {devices} devices, got {blocks_per_round}")
    if (rows := blocks_per_round * options.block) % options.batch or options.batch % devices:
        message = f"--batch must divide {rows}, the rows of a round, and be a multiple of {devices}, the devices"
        raise DataError(f"{message}; got {options.batch}")
    count = len(blocks) - options.held_out
    sample_size = max(blocks_per_round, -(-SAMPLE // options.block))
    if count < blocks_per_round:
        raise DataError(
            f"{len(blocks)} blocks of {options.block} rows are too few: {options.held_out} held out, "
            f"{blocks_per_round} a round; try a smaller --block"
        )
    held_out = drawn_blocks(len(blocks), options.held_out, options.seed)
    trained_on = np.setdiff1d(np.arange(len(blocks)), held_out).tolist()
    order: Any = grain.MapDataset.range(count).shuffle(seed=options.seed).repeat().map(trained_on.__getitem__)
    checked = Checked(blocks)
    sample_blocks = [checked[order[i]] for i in range(min(sample_size, count))]
    task = Classification(_classes(sample_blocks)) if options.task == "classification" else Regression()
    if len({float(value) for _, y in sample_blocks for value in (y.min(), y.max())}) == 1:
        first = f"all of the first {len(sample_blocks)} blocks of the shuffled order"
        raise DataError(f"the target must vary, got {sample_blocks[0][1][0]} in {first}")
    validation_blocks = [checked[i] for i in held_out]
    for i, (_, y) in zip(held_out, validation_blocks, strict=True):
        _check_classes(blocks, i, y, task)
    validation, sample = _table(validation_blocks, task), _table(sample_blocks, task)
    updates = rows // options.batch
    rounds = max(1, -(-options.epochs * count // blocks_per_round))
    # Schedules are made for the planned steps. The rows in memory would give fewer steps.
    shape = -(-rounds * updates // options.epochs) * options.batch, sample.x.shape[1]
    recipe, strength = recipe_of(options)
    try:
        recipe = kinds.checked(recipe)
        recipe.check(task, shape)
    except ValueError as error:
        raise DataError(f"--set: {error}") from error
    scaling = scaling_of(sample_blocks, task)
    planned = jax.ShapeDtypeStruct(shape, np.float32), jax.ShapeDtypeStruct(shape[:1], np.float32)
    plan = _run_on(recipe, task, training.Batch(*planned))  # type: ignore[arg-type]
    mapping = jnp.asarray(matrix(spectrum(scaling.batch(sample)), strength)) if strength else None
    return Job(checked, order, blocks_per_round, rounds, updates, recipe, plan, scaling, sample, validation, mapping)


def _run_on(recipe: Any, task: Task, batch: training.Batch, evaluation: Any = None) -> Run:
    """Returns a run that trains on ``batch`` and evaluates its result on ``evaluation``."""
    return Run(recipe, task, batch, evaluation, jax.random.key(0), Evaluation.HELD_OUT)


def drawn_blocks(blocks: int, held_out: int, seed: int) -> list[int]:
    """Returns the numbers of the validation blocks: a random block from each of several equal parts of the table.

    Shards may be sorted by time or by the target. Their last blocks would then not be representative.
    """
    ends = np.linspace(0, blocks, held_out + 1).astype(int)
    rng = np.random.default_rng([seed, blocks])
    return [int(rng.integers(low, high)) for low, high in itertools.pairwise(ends)]


def _classes(sample_blocks: list[Block]) -> int:
    return int(max(y.max() for _, y in sample_blocks)) + 1


def _check_classes(blocks: Blocks, i: int, y: np.ndarray, task: Task) -> None:
    """Raises :class:`DataError` for a class that the first blocks do not have; the message names its row in block i."""
    if isinstance(task, Classification) and y.max() >= task.classes:
        row = int(np.argmax(y >= task.classes))
        raise DataError(
            f"classes must be among the {task.classes} of the first blocks of the shuffled order, got {y[row]} in "
            f"{blocks.where(i, row)}: spread the rows of each class over the shards"
        )


def _table(parts: list[Block], task: Task) -> Table:
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return Table(x, y.astype(np.float64) if isinstance(task, Regression) else y, None, task)


def scaling_of(parts: Sequence[Block], task: Task) -> Scaling:
    """Returns the scaling of a table by the moments of its parts, in double precision.

    The first row is subtracted from all rows. A constant column then has a deviation of exactly 0.
    """
    origin, n = parts[0][0][0].astype(np.float64), sum(len(x) for x, _ in parts)
    mean = sum((x - origin).sum(0) for x, _ in parts) / n
    deviation = np.sqrt(sum(np.square(x - origin - mean).sum(0) for x, _ in parts) / n)
    targets: Any = (None, None, None)
    if isinstance(task, Regression):
        y = np.concatenate([y for _, y in parts]).astype(np.float64)
        targets = y.min(), np.ptp(y), y.mean()
    return Scaling.from_moments(origin + mean, deviation, 1.0, *targets)


def counted(job: Job, x: np.ndarray, y: np.ndarray) -> Block:
    """Returns rows minus the scaling's origin, subtracted in float64, as float32; classes are unchanged.

    Rows and origin are in the user's units.
    """
    origin = job.scaling.origin
    if origin is not None:
        x, y = origin.transform(x), y if origin.y is None else y - np.asarray(origin.y, np.float64)
    y = y.astype(np.float32, copy=False) if isinstance(job.sample.task, Regression) else y
    return x.astype(np.float32, copy=False), y


def scaling_of_counted(scaling: Scaling) -> Scaling:
    """Returns the scaling of rows from which this scaling's origin is subtracted."""
    if scaling.origin is None:
        return scaling
    low = None if scaling.y_low is None else scaling.y_low - scaling.origin.y
    return scaling.replace(x_center=scaling.x_center - scaling.origin.x, y_low=low, origin=None)


def share_of(job: Job, k: int) -> list[int]:
    """Returns the numbers of the blocks that this process reads for round k."""
    share = job.blocks_per_round // jax.process_count()
    first = k * job.blocks_per_round + jax.process_index() * share
    return [job.order[first + j] for j in range(share)]


def stream(job: Job) -> Any:
    """Returns a Grain iterator of this process's rounds: its share of the blocks of each round, :func:`counted`."""

    def read(k: int) -> Block:
        numbers = share_of(job, k)
        mine = [job.blocks[i] for i in numbers]
        for i, (_, y) in zip(numbers, mine, strict=True):
            _check_classes(job.blocks.table, i, y, job.sample.task)
        x, y = zip(*(counted(job, *block) for block in mine), strict=True)
        return (x[0], y[0]) if len(numbers) == 1 else (np.concatenate(x), np.concatenate(y))

    rounds = grain.MapDataset.range(job.rounds).map(read)
    threads = max(1, (os.cpu_count() or 1) // 2)  # the remaining cores compute
    return iter(rounds.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)))


# --- The programs ----------------------------------------------------------------------------------------------------


def first_state(job: Job, key: jax.Array) -> training.TrainState:
    """Returns the initial state of a run, the same on every device."""
    scaled, rows = job.batch(job.sample), job.updates * job.batch_size
    data = jax.tree.map(lambda a: np.resize(a, (rows, *a.shape[1:])), training.Batch(scaled.x, scaled.y))
    method, optimizer = job.recipe.method(job.plan), job.recipe.optimizer(job.plan)
    state = jax.jit(lambda data, key: training.start(method, data, key=key, optimizer=optimizer))(data, key)
    # A round donates the previous state. The state must therefore not contain the same buffer twice.
    return jax.device_put(jax.tree.map(jnp.copy, state), _places())


def _everywhere() -> NamedSharding:
    return NamedSharding(jax.sharding.get_mesh(), PartitionSpec())


def _places() -> Any:
    """Returns the shardings of the state; each device keeps the order of its own rows, which saves a gather."""
    fields = dataclasses.fields(training.TrainState)
    places: Any = {field.name: _everywhere() for field in fields}
    return training.TrainState(
        **places | {"order": NamedSharding(jax.sharding.get_mesh(), PartitionSpec(sharding.DATA))}
    )


def round_of(job: Job) -> Any:
    """Returns ``(state, x, y) -> (state, mean loss)``, a jitted round of mini-batches on rows of :func:`stream`."""
    scaling, method = scaling_of_counted(job.scaling), job.recipe.method(job.plan)
    options: Any = {"optimizer": job.recipe.optimizer(job.plan), "steps": job.updates, "batch_size": job.batch_size}

    def run(state: training.TrainState, x: jax.Array, y: jax.Array) -> tuple[training.TrainState, jax.Array]:
        data = training.Batch(job.preconditioned(scaling.transform(x)), scaling.transform_y(y))
        state, history = training.advance(method, state, data, **options)
        return state, history.losses.mean()

    return jax.jit(run, donate_argnums=0, out_shardings=(_places(), _everywhere()))


class Evaluator:
    """Makes a model from a state and evaluates it on the validation set; compiled once."""

    def __init__(self, job: Job):
        """Prepares the batches and the program of a job."""
        self._job, self._batches = job, tuple(job.batch(table) for table in (job.sample, job.validation))
        self._scaled = self._batches[0] if job.matrix is None else job.scaling.batch(job.sample)
        self.constant_loss = _constant_loss(job.sample, job.validation)
        self._result = jax.jit(self._evaluated)

    def fit(self, state: training.TrainState) -> jtrees.FitResult:
        """Returns the model, in the user's units.

        Raises:
          FloatingPointError: the state is not finite.
        """
        job, key = self._job, state.key
        host_state = distributed.to_host(state.replace(key=jax.random.key_data(key)))
        host_state = host_state.replace(
            key=jax.random.wrap_key_data(jnp.asarray(host_state.key), impl=jax.random.key_impl(key))
        )
        result = jax.device_get(self._result(host_state, *self._batches))
        if not np.isfinite(result.score):
            raise FloatingPointError("training became non-finite: try a smaller learning_rate")
        task = job.sample.task.scaled(job.scaling.y_unit)
        engine, data = Engine(Monitor(), "threefry2x32"), Data(job.sample, job.validation, job.scaling, self._scaled)
        problem = Problem(job.recipe, task, self._scaled, None, np.zeros(2, np.uint32), engine=engine, data=data)
        model = with_map(result.model, None if job.matrix is None else np.asarray(job.matrix))
        fitted = Fitted(model, float(result.score), int(result.step), np.zeros(0), report=result.report)
        done = job.recipe.finish(problem, fitted)
        return jtrees.FitResult(
            done.model, done.tree, done.loss, done.step, done.history, FitReport(search=done.report)
        )

    def _evaluated(self, state: training.TrainState, batch: training.Batch, rows: training.Batch) -> Result:
        """Returns the result of the run; its models take the features of the batch."""
        job, recipe = self._job, self._job.recipe
        run = _run_on(recipe, job.sample.task, batch, rows)
        best = training.best(recipe.method(run), state, batch, score=partial(recipe.evaluate, run))
        model, report = recipe.model(run, best.params), recipe.describe(run, best.params)
        return Result(model, best.score, best.step, report)

    def score(self, fit: jtrees.FitResult) -> float:
        """Returns accuracy, or R^2, on the validation set; NaN for R^2 if all its targets are equal."""
        rows = self._job.validation
        return rows.task.score(np.asarray(fit.model.predict(rows.x)), rows.y, None)


def _constant_loss(train: Table, validation: Table) -> float:
    """Returns the validation loss of a model that predicts the mean target, or the frequencies of the classes."""
    if isinstance(train.task, Regression):
        return float(np.square(validation.y - train.y.mean()).mean())
    counts = np.bincount(train.y, minlength=train.task.classes) + 1  # every class has a frequency above 0
    return float(-np.log(counts / counts.sum())[validation.y].mean())
