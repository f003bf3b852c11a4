"""Trains on shards that do not fit in memory, on all devices of all processes. The same command resumes a stopped run.

python -m examples.train_large --out RUN --data FOLDER --target price    # .parquet; .npy has the target last
python -m examples.train_large --out gs://bucket/run --data gs://bucket/shards --target price --method tel
Start it on every host of a TPU pod, or with srun under Slurm. Elsewhere set JAX_COORDINATOR_ADDRESS=host:1234
JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 for each process.

A round reads --blocks blocks of --block rows, in an order that --seed shuffles, and trains on mini-batches of --batch
rows; --held-out blocks are the validation set. RUN receives a checkpoint and a line of metrics.jsonl every --save-every
steps, and model.jtrees at the end. SIGTERM, Ctrl-C and --max-seconds stop a run after a round, with a checkpoint. Exit
status: 0 if all steps are done, 75 if the run was stopped or another process has ended, 1 or 2 for an error.
"""

import argparse
import itertools
import json
import os
import signal
import sys
import time
from typing import Any

from etils import epath
import grain
import jax
from jax.sharding import NamedSharding, PartitionSpec as Spec
import numpy as np
import optax
import orbax.checkpoint as ocp
import pyarrow.parquet as pq

import jtrees
from jtrees.data import Scaling, Table
from jtrees.data.scaling import mean_loss, with_map
from jtrees.search.precondition import matrix, spectrum

SAMPLE = 2**16  # rows in memory: for scaling, and for leaves that are fitted at the end
COUNTS = {"block": 4096, "blocks": 8, "batch": 256, "epochs": 1, "held_out": 8, "save_every": 2000, "max_steps": 10**9}
NUMBERS = {"seed": 0, "learning_rate": 0.01, "precondition": 0.0, "max_seconds": 0.0}  # 0 seconds: no limit
FREE = "out", "data", "save_every", "max_steps", "max_seconds"  # options that may differ when a run is resumed


class Shards:
    """Blocks of rows of a folder's shards. Rows at the end of a shard that do not fill a block are not used."""

    def __init__(self, folder: epath.Path, block: int, target: str | None):
        self.block, self.target, self.classes = block, target, None  # classes: their number, infinite if not known
        files = sorted(file for file in folder.iterdir() if file.suffix in (".npy", ".parquet"))
        if not files:
            raise ValueError(f"--data must be a folder of .parquet or .npy shards, got {folder}")
        columns, rows, meta = zip(*map(self.header, files), strict=True)
        for file, names in zip(files, columns, strict=True):
            if differ := {*names} ^ {*columns[0]}:
                raise ValueError(f"shards must have the same columns, but {file} differs in {differ!s:.80}")
        shards = zip(files, meta, rows, strict=True)
        self.blocks = [(file, meta, k * block) for file, meta, count in shards for k in range(count // block)]
        self.names, self.unused = columns[0], sum(rows) - len(self.blocks) * block

    def header(self, file: epath.Path) -> tuple[list[str], int, Any]:
        """Returns the features, the number of rows and, for Parquet, the metadata of a shard."""
        try:
            if file.suffix == ".npy":
                n, columns = np.load(file, mmap_mode="r").shape
                return [f"x{i}" for i in range(columns - 1)], n, None
            with file.open("rb") as source, pq.ParquetFile(source) as parquet:
                names, meta = parquet.schema_arrow.names, parquet.metadata
            if self.target not in names:
                raise ValueError(f"--target must be one of its columns, {names!s:.80}, got {self.target!r}")
            return [name for name in names if name != self.target], meta.num_rows, meta
        except Exception as error:  # NumPy and Arrow raise many kinds
            raise ValueError(f"the shard {file} cannot be read: {error}") from error

    def read(self, file: epath.Path, meta: Any, first: int) -> np.ndarray:
        """Returns a block of rows with the target last; of Parquet, it reads the row groups that overlap the block."""
        if meta is None:
            return np.load(file, mmap_mode="r")[first : first + self.block]
        ends = np.cumsum([0] + [meta.row_group(i).num_rows for i in range(meta.num_row_groups)])
        low, high = np.searchsorted(ends, [first, first + self.block - 1], side="right") - 1
        with file.open("rb") as source, pq.ParquetFile(source, metadata=meta) as parquet:
            names = [*self.names, self.target]
            groups = parquet.read_row_groups(range(low, high + 1), names, use_threads=False).select(names)
        return np.column_stack(list(map(np.asarray, groups.columns)))[first - ends[low] :][: self.block]

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        file, meta, first = self.blocks[i]
        try:
            rows = self.read(file, meta, first)
            x, y, valid = rows[:, :-1], rows[:, -1], (np.abs(rows) <= np.finfo(np.float32).max).all(1)
            if rows.shape != (self.block, len(self.names) + 1):
                raise ValueError(f"it has an array {rows.shape} instead of {self.block} rows from row {first} on")
        except Exception as error:
            raise ValueError(f"the shard {file} cannot be read: {error}") from error
        expected = "be finite and within the range of float32"
        if self.classes and valid.all():
            valid, expected = (y >= 0) & (y < self.classes) & (y == np.round(y)), "have a class of the first blocks"
        if not valid.all():
            row = int(np.argmin(valid))
            raise ValueError(f"{file}: row {first + row} (from 0) must {expected}, got {rows[row]!s:.80}")
        return x, y


class Job:
    """What a resumed run computes again: the order of the blocks, the scaling, and the functions of a round."""

    def __init__(self, options: argparse.Namespace):
        self.table = Shards(options.data, options.block, options.target)
        rows, batch, devices = options.blocks * options.block, options.batch, jax.device_count()
        self.count = count = len(self.table.blocks)
        if options.blocks % devices or batch % devices or rows % batch:
            needs = f"multiples of {devices}, the devices, and --batch a divisor of {rows}, the rows of a round"
            raise ValueError(f"--blocks and --batch must be {needs}; got {options.blocks} and {batch}")
        if count < (needed := options.held_out + options.blocks):
            raise ValueError(f"--block must give {needed} blocks, --held-out and --blocks, got {count}")
        # Shards may be sorted, so each of equal parts of the table has a validation block.
        ends, rng = np.linspace(0, count, options.held_out + 1, dtype=int), np.random.default_rng(options.seed)
        held_out = [int(rng.integers(*part)) for part in itertools.pairwise(ends)]
        trained_on = np.setdiff1d(np.arange(count), held_out)
        order: Any = grain.MapDataset.source(trained_on.tolist()).shuffle(seed=options.seed).repeat(options.epochs + 1)
        first = [order[i] for i in range(min(len(trained_on), max(options.blocks, -(-SAMPLE // options.block))))]
        self.table.classes = np.inf if options.task == "classification" else None
        x, y = self.rows(first)
        if y.min() == y.max():
            raise ValueError(f"the target must vary, got {y[0]} in the {len(y)} rows that determine the scaling")
        task = jtrees.Classification(int(y.max()) + 1) if self.table.classes else jtrees.Regression()
        self.table.classes = getattr(task, "classes", None)
        sample, self.validation = Table(x, y, None, task), Table(*self.rows(held_out), None, task)
        self.scaling, strength, key = Scaling.fit(sample, near=True), options.precondition, jax.random.key(options.seed)
        self.matrix = matrix(spectrum(self.scaling.batch(sample)), strength) if strength else None
        self.sample = self.batch(*self.centred(x, y))
        self.rounds, self.steps = max(1, -(-options.epochs * len(trained_on) // options.blocks)), rows // batch
        read = lambda blocks: self.centred(*self.rows(np.split(blocks, jax.process_count())[jax.process_index()]))
        self.stream = order.batch(options.blocks)[: self.rounds].map(read)
        optimizer = optax.adam(optax.cosine_decay_schedule(options.learning_rate, self.rounds * self.steps))
        self.training: Any = {"optimizer": optimizer, "steps": self.steps, "batch_size": batch}
        self.begin = lambda x, y: jtrees.training.start(self.method, self.batch(x, y), key=key, optimizer=optimizer)
        try:
            chosen = {name: json.loads(value) for name, value in (text.split("=") for text in options.set)}
            self.method = getattr(jtrees.methods, options.method)(**chosen, task=task.scaled(self.scaling.y_unit))
        except (TypeError, ValueError) as error:
            raise ValueError(f"--set must be arguments of jtrees.methods.{options.method}: {error}") from error

    def rows(self, numbers: Any) -> tuple[np.ndarray, np.ndarray]:
        x, y = (np.concatenate(parts) for parts in zip(*(self.table[int(i)] for i in numbers), strict=True))
        return x, y.astype(np.int32 if self.table.classes else np.float64)

    def centred(self, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns features minus their centres, which needs double precision, and scaled targets."""
        return (x - self.scaling.x_center).astype(np.float32), self.scaling.transform_y(y)

    def batch(self, x: Any, y: Any) -> jtrees.Batch:
        """Returns centred rows as the method trains on them."""
        x = self.scaling.replace(x_center=np.zeros_like(self.scaling.x_center), origin=None).transform(x)
        return jtrees.Batch(x if self.matrix is None else jax.numpy.matmul(x, self.matrix, precision="highest"), y)

    def advance(self, state: Any, x: Any, y: Any) -> tuple[Any, jax.Array]:
        state, history = jtrees.training.advance(self.method, state, self.batch(x, y), **self.training)
        return state, history.losses.mean()

    def evaluated(self, state: Any) -> tuple[Any, float]:
        """Returns the hard model in the user's units, and its loss on the validation set."""
        if not state.finite:
            raise ValueError("training became non-finite: try a smaller --learning-rate in another --out")
        hard = jax.device_get(jax.jit(self.method.harden)(jax.device_get(state.params), self.sample))
        model = self.scaling.restore(with_map(hard, self.matrix))
        return model, mean_loss(model, self.validation, self.scaling)


def train(options: argparse.Namespace, requests: list[bool]) -> None:
    """Trains until all steps are done, or until a request stops the run."""
    jtrees.distributed.check_folder(out := options.out)
    job, mesh, lead = Job(options), jtrees.sharding.mesh(), jax.process_index() == 0
    say = lambda text: print(text, flush=True) if lead else None
    constant = ", ".join(np.array(job.table.names)[job.scaling.constant]) or "none"
    say(f"not used: {job.table.unused} rows at the ends of shards; constant features: {constant}")
    replicated, shared = NamedSharding(mesh, Spec()), NamedSharding(mesh, Spec("data"))
    with jax.set_mesh(mesh):
        first = jtrees.sharding.join_rows(job.stream[0])
        places = jax.tree.map(lambda _: replicated, jax.eval_shape(job.begin, *first)).replace(order=shared)
        state = jax.tree.map(jax.numpy.copy, jax.jit(job.begin, out_shardings=places)(*first))  # no buffer twice
    program = jax.jit(job.advance, out_shardings=(places, replicated), donate_argnums=0)
    settings = {name: value for name, value in vars(options).items() if name not in FREE} | {"table": job.count}
    keep = ocp.CheckpointManagerOptions(max_to_keep=3)
    manager = ocp.CheckpointManager(out / "checkpoints", options=keep, metadata=settings)
    with manager, jtrees.distributed.resumable():
        if (was := manager.metadata().custom_metadata) != settings:
            raise ValueError(f"{out} holds a run of other options, {was}: give another --out")
        data = iter(job.stream.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)))
        done, lines = manager.latest_step() or 0, []
        if done:
            items = ocp.args.Composite(state=ocp.args.StandardRestore(state), reader=ocp.args.JsonRestore())
            try:
                saved: Any = manager.restore(done, args=items)
            except Exception as error:  # an incomplete file leads to many kinds of errors
                raise ValueError(f"{manager.directory}/{done} cannot be read; delete it to go back: {error}") from error
            state, lines = saved.state, saved.reader["lines"]
            data.set_state(saved.reader["position"])
            say(f"resumes from step {done * job.steps}")
        last, every = min(job.rounds, -(-options.max_steps // job.steps)), max(1, options.save_every // job.steps)
        losses, began = [], time.monotonic()
        for rows in itertools.islice(data, max(0, last - done)):
            with jax.set_mesh(mesh):
                state, loss = program(state, *jtrees.sharding.join_rows(rows))
            done, losses = done + 1, [*losses, loss]
            stop, due = requests or manager.reached_preemption(done), done % every == 0 or done == last
            jax.block_until_ready(losses[-1 if due else -2 :][0])  # the round before, as few rounds fit in memory
            if due:
                line = {"step": done * job.steps, "training_loss": float(np.mean(losses))}
                line["rows_per_second"] = len(losses) * job.steps * options.batch / (time.monotonic() - began)
                lines.append(line | {"validation_loss": job.evaluated(state)[1]})
                say(f"of {last * job.steps} steps: {lines[-1]}")
                (out / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines)) if lead else None
            if due or stop:
                reader = ocp.args.JsonSave({"lines": lines, "position": data.get_state()})
                items = ocp.args.Composite(state=ocp.args.StandardSave(state), reader=reader)
                manager.save(done, args=items, force=True)  # written during training
                losses, began = [], time.monotonic()
            sys.exit(os.EX_TEMPFAIL) if stop and done < last else None
    jtrees.save(job.evaluated(state)[0], out / "model.jtrees", feature_names=job.table.names) if lead else None
    say(f"{done * job.steps} steps: {out / 'model.jtrees'}")


def main(arguments: list[str] | None = None) -> None:
    place = lambda text: epath.Path(text if "://" in text else os.path.abspath(text))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=place, required=True, help="folder of the run")
    parser.add_argument("--data", type=place, required=True, help="folder of the shards")
    parser.add_argument("--target", help="column of Parquet shards to predict")
    parser.add_argument("--task", choices=("regression", "classification"), default="regression")
    parser.add_argument("--method", choices=("dgt", "tel"), default="dgt", help="default: dgt")
    parser.add_argument("--set", nargs="+", default=["depth=6"], metavar="NAME=VALUE", help="default: depth=6")
    for name, value in (COUNTS | NUMBERS).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value, help="default: %(default)s")
    options, requests = parser.parse_args(arguments), []
    if min(vars(options)[name] for name in COUNTS) < 1 or not 0 <= options.precondition < 1:
        parser.error(f"{', '.join(COUNTS)} must be at least 1, and precondition at least 0 and below 1")
    try:
        jtrees.distributed.initialize()  # with several processes, JAX handles SIGTERM, as all must agree
        is_alone = jax.process_count() == 1
        stop = lambda *_: requests.append(True) if is_alone else os.kill(os.getpid(), signal.SIGTERM)
        for number in [signal.SIGINT, signal.SIGALRM] + [signal.SIGTERM] * is_alone:
            signal.signal(number, stop)
        signal.setitimer(signal.ITIMER_REAL, options.max_seconds)
        train(options, requests)
    except (OSError, ValueError) as error:
        print(f"train_large: {error}", file=sys.stderr, flush=True)
        os._exit(1) if jax.process_count() > 1 else sys.exit(1)  # at a regular end, it would wait for the others


if __name__ == "__main__":
    main()
