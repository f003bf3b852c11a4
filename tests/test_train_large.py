"""Training on tables larger than memory: data, script, parts. Faults are in test_faults.py."""

import itertools
import json
import os
from pathlib import Path
import re
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.train_large import command, logs, rounds, run
from examples.train_large.blocks import DataError, Shards, Synthetic
from examples.train_large.checkpoints import CheckpointError, Checkpoints
from experiments import scaling
import jtrees
from jtrees.tasks import Classification, Regression
from tests import ROOT, sweeps
from tests.large_runs import SMALL, STEPS, ended, free_address, parameters, same_run, script, steps_of, within

TARGET = {"npy": None, "parquet": "price"}
TABLE = Synthetic(rows=1000, p=3, block=100, seed=1)
both_kinds = pytest.mark.parametrize("kind", ["npy", "parquet"])


# --- Blocks ----------------------------------------------------------------------------------------------------------


def rewritten(file, change):
    """Writes a shard again, its rows (target last) as ``change`` returns them."""
    if file.suffix == ".npy":
        np.save(file, change(np.load(file)))
    else:
        frame = pq.read_table(file).to_pandas()[["x0", "x1", "x2", "price"]]
        pq.write_table(pa.Table.from_pandas(pd.DataFrame(change(frame.to_numpy()), columns=frame.columns)), file)


def shards(folder, kind, parts=((0, 4), (4, 10))):
    """The table as shards, 30 more rows in each; in Parquet the target comes first."""
    folder.mkdir()
    for k, (low, high) in enumerate(parts):
        x, y = (np.concatenate(arrays) for arrays in zip(*(TABLE[i] for i in range(low, high)), strict=True))
        x, y = np.concatenate([x, x[:30]]), np.concatenate([y, y[:30]])
        if kind == "npy":
            np.save(folder / f"{k}.npy", np.concatenate([x, y[:, None]], 1))
        else:
            columns = {"price": y} | {f"x{i}": x[:, i] for i in range(3)}
            pq.write_table(pa.table(columns), folder / f"{k}.parquet", row_group_size=70)
    return folder


def same_as_table(blocks):
    assert len(blocks) == len(TABLE)
    for i in reversed(range(len(TABLE))):
        for a, b in zip(blocks[i], TABLE[i], strict=True):
            np.testing.assert_array_equal(a, b)


@both_kinds
def test_shards_are_read_in_any_order_and_shards_of_no_row_or_one_fill_no_block(tmp_path, kind):
    folder = shards(tmp_path / "data", kind)
    read = Shards(folder, 100, target=TARGET[kind])
    note = "60 rows at the ends of shards fill no block of 100: they are not used (5.7 % of all)"
    assert read.notes == [note] and read.names == ["x0", "x1", "x2"]
    same_as_table(read)
    advice = "; with --block 70 it is 0.94 %"
    assert Shards(folder, 100, target=TARGET[kind], batch=10).notes == [note + advice]
    for rows in (0, 1):
        shutil.copy(folder / f"0.{kind}", file := folder / f"0{rows}.{kind}")
        rewritten(file, lambda table, rows=rows: table[:rows])
    read = Shards(folder, 100, target=TARGET[kind])
    assert read.notes[0].startswith("61 rows at the ends of shards fill no block of 100")
    same_as_table(read)


@both_kinds
@pytest.mark.parametrize(
    ("column", "value", "classes", "message"),
    [
        (1, np.nan, False, "every number must be finite, got NaN or infinity"),
        (1, 1e300, False, r"every number must be within the range of float32, got 1e\+300"),
        (3, 0.5, True, "classes must be 0, 1, ..., got 0.5"),
        (3, 3e9, True, "classes must be 0, 1, ..., got 3000000000"),
    ],
)
def test_a_wrong_number_is_named_by_file_and_row(tmp_path, kind, column, value, classes, message):
    def change(rows):
        rows = rows.astype(np.float64)
        rows[:, 3] = 1
        rows[217, column] = value
        return rows

    folder = shards(tmp_path / "data", kind)
    for file in folder.iterdir():
        rewritten(file, change if file.stem == "1" else np.ones_like)
    read = Shards(folder, 100, target=TARGET[kind], classes=classes)
    assert len(read[5][0]) == 100 and read[5][1].dtype == (np.int32 if classes else np.float64)
    with pytest.raises(DataError, match=rf"1\.{kind}, row 217 \(from 0\): {message}"):
        read[6]


def test_columns_of_parquet_are_read_by_name_whatever_their_order_and_type(tmp_path):
    folder = shards(tmp_path / "data", "parquet")
    table = pq.read_table(folder / "1.parquet").select(["x2", "price", "x0", "x1"])
    types = pa.schema([(name, pa.float64()) for name in table.column_names])
    pq.write_table(table.cast(types), folder / "1.parquet")
    same_as_table(Shards(folder, 100, target="price"))
    pq.write_table(table.rename_columns(["x3", "price", "x0", "x1"]), folder / "1.parquet")
    with pytest.raises(DataError, match=r"but 1.parquet has 3 features, x3, x0, x1 and .*: not in both is x2, x3"):
        Shards(folder, 100, target="price")


@both_kinds
def test_shards_that_are_missing_cut_or_of_another_width(tmp_path, kind):
    folder = shards(tmp_path / "data", kind)
    read, file = Shards(folder, 100, target=TARGET[kind]), folder / f"1.{kind}"
    content = file.read_bytes()
    file.unlink()
    with pytest.raises(DataError, match=rf"the shard .*1\.{kind} is missing"):
        read[9]
    for length in (0, len(content) // 2):
        file.write_bytes(content[:length])
        for use in (lambda: read[8], lambda: Shards(folder, 100, target=TARGET[kind])):
            with pytest.raises(DataError, match=rf"the shard .*1\.{kind} cannot be read"):
                use()
    file.write_bytes(content)
    if kind == "npy":
        np.save(file, np.zeros((300, 5)))
    else:
        pq.write_table(pq.read_table(file).drop_columns(["x1"]), file)
    with pytest.raises(DataError, match=rf"shards must have the same columns, but 1\.{kind} has \d features"):
        Shards(folder, 100, target=TARGET[kind])


def test_folders_and_columns_that_are_refused(tmp_path):
    npy, parquet = shards(tmp_path / "npy", "npy"), shards(tmp_path / "parquet", "parquet")
    (flat := tmp_path / "flat").mkdir()
    np.save(flat / "flat.npy", np.zeros(5))
    (text := tmp_path / "text").mkdir()
    pq.write_table(pa.table({"price": [1.0], "town": ["Kiel"]}), text / "0.parquet")
    for folder, target, message in (
        (tmp_path / "nowhere", None, r"cannot read .*nowhere"),
        (tmp_path, None, "has no shards"),
        (parquet, "cost", r"--target must be a column of 0.parquet, 4 features, .*; got 'cost'"),
        (text, "price", "every column must hold numbers, got string in 'town'"),
        (npy, "y", r"--target is for Parquet: in .*0.npy the last column is the target, got 'y'"),
        (flat, None, r"must hold numbers .* got float64 of shape"),
    ):
        with pytest.raises(DataError, match=message):
            Shards(folder, 10, target=target)


def test_few_row_groups_stay_in_memory_whatever_the_number_of_shards(tmp_path, monkeypatch):
    groups, read_group = [], pq.ParquetFile.read_row_group

    def counted(file, i, **options):
        groups.append(i)
        return read_group(file, i, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    read = Shards(shards(tmp_path / "data", "parquet", [(i, i + 1) for i in range(10)]), 10, target="price")
    assert "row groups of up to 70 rows are read whole for each block of 10" in read.notes[-1]
    for i in range(len(read)):
        read[i]
    assert len(groups) == 20  # two of each shard, each read once in this order
    assert len(read[0][0]) == 10 and len(groups) == 21  # the first group did not stay


# --- Checkpoints and the log -----------------------------------------------------------------------------------------


def test_checkpoints_hold_keys_and_a_cut_checkpoint_gives_way_to_the_one_before(tmp_path):
    tree = {"key": jax.random.key(3), "a": np.arange(4.0, dtype=np.float32)}
    kept = Checkpoints(tmp_path / "kept")
    assert kept.newest(tree) is None
    for step in (1, 2, 3, 4):
        kept.save(step, tree | {"a": tree["a"] + step}, {"data": {"next": step}})
    kept.wait()
    assert sorted(path.name for path in (tmp_path / "kept").iterdir() if path.name.isdigit()) == ["2", "3", "4"]
    for file in (tmp_path / "kept" / "4").rglob("*"):
        if file.is_file():
            os.truncate(file, file.stat().st_size // 2)
    kept.close()
    kept = Checkpoints(tmp_path / "kept")
    step, saved, told, [wrong] = kept.newest(tree)
    assert step == 3 and told == {"data": {"next": 3}} and "the checkpoint of step 4" in wrong
    np.testing.assert_array_equal(saved["a"], tree["a"] + 3)
    assert saved["key"] == tree["key"]
    kept.save(4, tree, {"data": {}})  # in the place of the one that was cut
    assert kept.newest(tree)[0] == 4
    with pytest.raises(CheckpointError, match=r"step 4 .* cannot be read"):
        kept.newest(tree | {"a": np.zeros(5, np.float32)})
    kept.close()


def test_sums_of_the_log_outlive_the_process(tmp_path):
    file, names = tmp_path / "metrics.jsonl", logs.NAMES["classification"]
    log = logs.Log(file, 0, True, names)
    log.round(np.float32(2.0), 100, 1.0, 0.25)
    log.write(10, 0.5, 0.9)
    log.round(np.float32(4.0), 100, 1.0, 0.5)
    log = logs.Log(file, 20, True, names, log.sums())
    log.round(np.float32(8.0), 100, 3.0, 0.0)
    for _ in range(2):
        log.write(30, 0.4, 0.95)
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert (first["step"], first["rows"], first["training loss (nats)"]) == (10, 100, 2.0)
    assert (second["step"], second["rows"], second["training loss (nats)"], second["waited"]) == (30, 200, 6.0, 0.5)
    assert second["rows_per_second"] == 50
    assert (second["validation log loss (nats)"], second["validation accuracy"]) == (0.4, 0.95)
    file.write_text('{"step": 10}\nfoo\n')
    with pytest.raises(DataError, match=r"metrics.jsonl is not what a run wrote"):
        logs.Log(file, 20, True, names)


def test_lines_during_training(monkeypatch, capsys):
    """At most one a second, after hours one a minute, and one when the last round is done; the first process alone."""
    now, names = [100.0], logs.NAMES["regression"]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    options = SimpleNamespace(batch=50, max_seconds=None)
    state = SimpleNamespace(done=4, last=44, lead=True, began=90.0, names=names, options=options)
    state.job, state.step = SimpleNamespace(updates=10), 0
    lines = logs.Lines(state)
    for state.done in range(5, 45):
        now[0], state.step = now[0] + 0.3, 10 * state.done
        lines.show(None if state.done == 5 else 0.25)
    texts = capsys.readouterr().err.splitlines()
    loss = "training loss (scaled targets) 0.25"
    assert texts[0] == f"step 80 of 440, 4000 rows, {loss}, 1667 rows/s, 0:00:11 left" and len(texts) == 10
    assert texts[-1] == f"step 440 of 440, 22000 rows, {loss}, 1667 rows/s, 0:00:00 left"
    state.done, state.began, options.max_seconds = 4, now[0], 50_000
    lines = logs.Lines(state)
    for state.done, passed in ((5, 36_000), (6, 50), (7, 50)):
        now[0] += passed
        lines.show(0.25)
    texts = capsys.readouterr().err.splitlines()
    assert [line[-12:] for line in texts] == ["3:53:20 left", "3:51:40 left"]  # what --max-seconds leaves
    state.lead, state.done = False, 44
    lines.show(0.25)
    assert not capsys.readouterr().err


# --- The script ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run(uninterrupted, tmp_path):
    lines = [json.loads(line) for line in (uninterrupted / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 100, 200, 300, 400, 500, 600, 700, 720]
    assert sum(line["rows"] for line in lines) == 36_000
    assert lines[-1]["validation R2"] > 0.3 > 0 > lines[0]["validation R2"]
    loss, *_ = losses = [name for name in lines[-1] if "loss" in name or "error" in name]
    assert losses == ["training loss (scaled targets)", "validation mean squared error (target units squared)"]
    assert all(line[loss] < 0.1 for line in lines[1:])
    header = jtrees.io.header(uninterrupted / "model.jtrees")
    assert header["feature_names"] == ["x0", "x1", "x2", "x3"] and header["kind"] == "FitResult"
    # The same command again changes nothing; another is refused.
    shutil.copytree(uninterrupted, out := tmp_path / "run")
    assert "resumes at step 720" in within(out, *SMALL)
    assert steps_of(out) == steps_of(uninterrupted)
    same_run(out, uninterrupted)
    message = within(out, *SMALL, "--batch", 100, status=1)
    assert "holds a run of another batch: 50, not 100; give another --out" in message


@pytest.mark.slow
def test_a_run_stops_at_its_steps_or_seconds_and_resumes(uninterrupted, tmp_path):
    out = tmp_path / "run"
    within(out, *SMALL, "--max-steps", 205)
    assert parameters(out)[0] == 210 and jtrees.load(out / "model.jtrees").tree is not None
    # Time for the first evaluation, and for nothing else: a model, and status 75 until the run is finished.
    output = within(out, *SMALL, "--max-seconds", 0.01, status=75)
    assert output.splitlines()[-1].startswith("210 steps, as far as --max-seconds allows: ")
    assert parameters(out)[0] == 210
    within(out, *SMALL)
    same_run(out, uninterrupted)


@pytest.mark.slow
def test_wrong_data_and_commands_are_refused_and_not_remembered(tmp_path):
    def change(rows):
        rows[105, 0] = np.inf
        return rows

    folder, out = shards(tmp_path / "data", "npy"), tmp_path / "run"
    rewritten(file := folder / "0.npy", change)
    options = ["--data", folder, "--block", 50, "--batch", 10, "--held-out", 2, "--set", "depth=2", "widths=[]"]
    message = within(tmp_path / "wrong", *options, status=1)
    assert message == f"train_large: {file}, row 105 (from 0): every number must be finite, got NaN or infinity\n"
    assert "--batch must divide" in within(out, *SMALL, "--batch", 51, status=1)
    (out / "config.json").write_text("")
    assert "config.json is not what a run wrote" in within(out, *SMALL, status=1)
    (out / "config.json").unlink()
    within(out, *SMALL, "--max-steps", 10)


@pytest.mark.wide
def test_two_processes_train_as_two_devices_of_one(tmp_path, monkeypatch):
    """One process then resumes the run of two, to the same bits; with one device it says so, with four it refuses."""
    where, one, two = free_address(), tmp_path / "one", tmp_path / "two"
    half = [*SMALL, "--max-steps", 300]
    both = [script(two, *half, "--coordinator", where, "--processes", 2, "--process", i) for i in range(2)]
    texts = [[line for line in ended(process).splitlines() if not line.startswith("[Gloo]")] for process in both]
    assert len(texts[0]) == 1 and texts[0][0].startswith("300 steps, as far as") and texts[1] == []
    shutil.copytree(two, other := tmp_path / "other")
    ended(script(one, *SMALL, devices=2))
    assert "resumes at step 300" in ended(script(two, *SMALL, devices=2))
    same_run(one, two)
    message = "started on 2 devices, resumes on 1: rows are shuffled differently from here on"
    assert message in ended(script(other, *SMALL)) and steps_of(other)[-1] == STEPS
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    assert "--blocks must be a multiple of the 4 devices, got 2" in within(other, *SMALL, status=1)


# --- Its parts -------------------------------------------------------------------------------------------------------


def job(*more, table=None):
    options = command.parse(["--out", "x", *SMALL, "--blocks", "1", *more])
    return rounds.prepared(options, table or rounds.source(options))


def trained(job, count=2):
    """The model after some rounds, and the last rows."""
    with jax.set_mesh(jtrees.sharding.mesh()):
        state, program = rounds.first_state(job, jax.random.key(0)), rounds.round_of(job)
        for rows in itertools.islice(rounds.stream(job), count):
            state, loss = program(state, *jtrees.sharding.join_rows(rows))
    assert np.isfinite(float(loss))
    return rounds.Evaluator(job).fit(state), rows


def test_the_scaling_is_that_of_the_rows():
    """Merged moments of blocks against those of all rows; constants are found, and a mean of 1e6 costs no digits."""
    plain, rng = job(), np.random.default_rng(0)
    x = np.stack([1e6 + 10 * rng.standard_normal(4000), np.full(4000, 0.1), rng.standard_normal(4000)], 1)
    x, y = x.astype(np.float32), (1e5 + rng.standard_normal(4000)).astype(np.float32)
    far = rounds.scaling_of([(x[:1000], y[:1000]), (x[1000:], y[1000:])], Regression())
    assert far.constant.tolist() == [False, True, False]
    for scaled, rows, targets in ((far, x, y), (plain.scaling, plain.sample.x, plain.sample.y)):
        rows, kept = rows.astype(float), ~scaled.constant
        np.testing.assert_allclose(scaled.x_center[kept], rows.mean(0)[kept], rtol=1e-7, atol=1e-5)
        np.testing.assert_allclose(scaled.x_unit[kept], rows.std(0)[kept], rtol=1e-5)
        np.testing.assert_allclose((scaled.y_low, scaled.y_unit), (targets.min(), np.ptp(targets)), rtol=1e-6)


@both_kinds
def test_integers_beyond_float32_are_read_exactly(tmp_path, kind):
    """Times in nanoseconds; a float64 holds them to 256 ns."""
    times = 17 * 10**17 + np.arange(100) * 10**9
    if kind == "npy":
        np.save(tmp_path / "0.npy", np.stack([times, times], 1))
    else:
        pq.write_table(pa.table({"time": times, "price": times.astype(float)}), tmp_path / "0.parquet")
    x, y = Shards(tmp_path, 50, target=TARGET[kind])[1]
    np.testing.assert_array_equal(x[:, 0], times[50:].astype(float))
    np.testing.assert_array_equal(y, times[50:].astype(float))


def test_rows_are_centred_in_double_precision():
    """The rows that the device gets, in its units, against the formula in float64: features, targets, validation."""
    far = np.array([1.7e9, -3e9, 0.0, 0.0])

    class Far(Synthetic):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x + far, y + np.float64(1e9)

    plain, moved = job(), job(table=Far(rows=20000, p=4, block=500))
    (x, y), (plain_x, plain_y) = (next(rounds.stream(each)) for each in (moved, plain))
    near = rounds.scaling_of_counted(moved.scaling)
    assert x.dtype == y.dtype == np.float32
    np.testing.assert_allclose(jax.jit(near.transform)(x), plain.scaling.transform(plain_x), atol=2e-5)
    np.testing.assert_allclose(jax.jit(near.transform_y)(y), plain.scaling.transform_y(plain_y), atol=1e-6)
    np.testing.assert_allclose(moved.validation.y - 1e9, plain.validation.y, atol=1e-6)
    np.testing.assert_allclose(moved.validation.x - far, plain.validation.x, atol=1e-6)


def table_job(folder, columns, classes=False):
    """The job of a folder with a shard of 1030 rows, some of its columns replaced; blocks of 100, two held out."""

    def change(rows):
        rows = rows.astype(np.float64)
        for column, values in columns.items():
            rows[:, column] = values
        return rows

    rewritten(shards(folder, "npy", [(0, 10)]) / "0.npy", change)
    options = ["--data", str(folder), "--block", "100", "--batch", "50", "--held-out", "2", "--blocks", "1"]
    options = command.parse(["--out", "x", *options, "--task", "classification" if classes else "regression"])
    return rounds.prepared(options, rounds.source(options))


def test_a_class_of_the_validation_rows_alone_is_named_by_file_and_row(tmp_path):
    targets, row = np.arange(1030) % 2, 100 * rounds.drawn_blocks(10, 2, 0)[1] + 37
    targets[row] = 2
    message = rf"classes must be among the 2 of .*, got 2 in .*0.npy, row {row} \(from 0\): spread"
    with pytest.raises(DataError, match=message):
        table_job(tmp_path / "data", {3: targets}, classes=True)


def test_validation_rows_of_one_target_and_constant_features(tmp_path):
    y = np.random.default_rng(0).normal(size=1030)
    held_out = np.isin(np.arange(1030) // 100, rounds.drawn_blocks(10, 2, 0))
    y[held_out] = 0.1
    data = table_job(tmp_path / "data", {3: y, 1: np.full(1030, 1e9 + 0.1)})
    assert run.notes(data) == [
        "constant in the first 800 rows of the shuffled order, and not used: x1 (1 in all)",
        "the target is 0.1 in all validation rows: validation R2 is not defined",
    ]
    evaluator = rounds.Evaluator(data)
    fit = SimpleNamespace(model=SimpleNamespace(predict=lambda x: np.zeros(len(x))))
    assert np.isnan(evaluator.score(fit))
    np.testing.assert_allclose(evaluator.constant_loss, np.square(0.1 - y[:1000][~held_out[:1000]].mean()))


def test_the_loss_of_a_constant_in_classification(tmp_path):
    """That of the frequencies of the training rows, of which none is 0."""
    data = table_job(tmp_path / "data", {3: np.where(np.arange(1030) % 4 == 0, 2, 0)}, classes=True)
    assert data.sample.task == Classification(3)
    shares = np.array([601, 1, 201]) / 803
    expected = -(0.75 * np.log(shares[0]) + 0.25 * np.log(shares[2]))
    np.testing.assert_allclose(rounds.Evaluator(data).constant_loss, expected)


def test_every_block_comes_once_in_a_pass_and_in_another_order_in_the_next(monkeypatch):
    data, numbers, read = job(), [], Synthetic.__getitem__
    monkeypatch.setattr(Synthetic, "__getitem__", lambda self, i: (numbers.append(i), read(self, i))[1])
    order = [data.order[i] for i in range(72)]
    trained_on = sorted(set(range(40)) - set(rounds.drawn_blocks(40, 4, 0)))
    assert sorted(order[:36]) == sorted(order[36:]) == trained_on and order[:36] != order[36:]
    assert len(list(rounds.stream(data))) == 72 and sorted(numbers) == sorted(order)


def test_validation_blocks_are_drawn_by_the_seed_from_all_parts(tmp_path):
    drawn = [rounds.drawn_blocks(41, 8, seed) for seed in range(20)]
    assert drawn == [rounds.drawn_blocks(41, 8, seed) for seed in range(20)] and len(set(map(tuple, drawn))) == 20
    assert set(np.concatenate(drawn)) == set(range(41))
    for blocks in drawn:
        assert [np.searchsorted(blocks, end) for end in (5, 10, 20, 41)] == [1, 2, 4, 8]
    data = table_job(tmp_path / "data", {3: np.arange(1030.0)})  # sorted shards
    first, second = np.unique(data.validation.y // 100)
    assert first < 5 <= second and len(data.validation.y) == 200
    assert not np.isin(data.validation.y, data.sample.y).any()


@pytest.mark.parametrize(("rows", "note"), [(20_000, "(18 % of all); with --block 6656 it is 0.16 %"), (4100, "")])
def test_rows_that_fill_no_block_are_counted_and_a_better_block_is_named(tmp_path, rows, note):
    for i in range(3):
        np.save(tmp_path / f"{i}.npy", np.zeros((rows, 2), np.float32))
    assert Shards(tmp_path, 4096, batch=256).notes[0].endswith(note or "(0.098 % of all)")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--batch", "300"], "--batch must divide 500, the rows of a round, and be a multiple of 1, the devices; got"),
        (["--synthetic", "rows=-5,p=2"], "--synthetic must be like rows=1e8,p=64"),
        (["--synthetic", "rows=many"], "--synthetic must be like rows=1e8,p=64"),
        (["--set", "epochs=3"], "--set: epochs is given by --batch and --epochs"),
        (["--target", "y"], "--target is for --data, got 'y'"),
        (["--held-out", "40"], "40 blocks of 500 rows are too few: 40 held out, 1 a round"),
        (["--data", "x"], "give either --data FOLDER or --synthetic"),
        (["--set", "deep=3"], "--set: options of DGT are .*, got 'deep'"),
        (["--set", "depth=0"], "--set: depth must be"),
        (["--set", "precondition=auto"], '--set: precondition must be a number, as "auto" needs all rows in memory'),
        (["--set", "precondition=1"], "--set: precondition must be"),
        (["--set", "early_stopping=true"], "--set: early_stopping needs all rows in memory"),
    ],
)
def test_options_that_data_or_recipes_do_not_allow(more, message):
    with pytest.raises(DataError, match=message):
        job(*more)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--max-seconds", "0"], "--max-seconds: a number above 0 was expected, got '0'"),
        (["--max-seconds", "nan"], "--max-seconds: a number above 0 was expected, got 'nan'"),
        (["--max-steps", "1.5"], "--max-steps: a whole number of at least 1 was expected, got '1.5'"),
        (["--processes", "2"], "--coordinator, --processes and --process go together"),
        (["--coordinator", "a:1", "--processes", "2", "--process", "2"], "--process must be from 0 to 1, got 2"),
    ],
)
def test_commands_that_cannot_be_parsed(more, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.parse(["--out", "x", *more])
    assert message in capsys.readouterr().err


def test_the_docs_have_the_figures_of_the_tables(capsys):
    page = (ROOT / "docs" / "scaling.md").read_text()
    text, measured = " ".join(page.split()), (Path(scaling.__file__).parent / "results/bench_streaming.md").read_text()
    cells = {row.split(" | ")[0][2:]: row.strip(" |").split(" | ") for row in measured.splitlines() if row[:2] == "| "}
    [resumes] = re.findall(r"Resuming takes ([\d.]+) ", measured)
    for statement in (
        f"reaches {cells['4 shards, parquet'][2]} (Parquet, row groups of a block) to {cells['4 shards, npy'][2]} ",
        f"10^7 synthetic rows needs {cells['1e+07 rows, made'][4]} GB, and over 2.6 10^5 rows ",
        f"{cells['made as needed'][4]} GB",
        f"resumes within {resumes} s",
    ):
        assert statement in text
    scaling.main()
    assert capsys.readouterr().out.strip() in page


def test_schedules_are_made_for_all_rows_and_not_for_those_in_memory(monkeypatch):
    monkeypatch.setattr(rounds, "SAMPLE", 500)
    data = job("--epochs", "3", "--blocks", "5")
    assert len(data.sample.x) == 2500 and (data.rounds, data.updates) == (22, 50)
    assert 22 * 50 <= data.recipe.schedule(len(data.plan.batch.x)).steps < 22 * 50 + 3


@pytest.mark.parametrize("method", sweeps.quick(rounds.METHODS, ["latent"]))
@pytest.mark.usefixtures("standard_promotion")
def test_every_method_takes_rounds(method):
    data = job("--method", method, "--set", "depth=2")
    fit, rows = trained(data)
    assert np.isfinite(rounds.Evaluator(data).score(fit)) and fit.predict(rows[0]).shape == (500,) and fit.step == 20


@pytest.mark.wide
@pytest.mark.parametrize("method", rounds.METHODS)
@pytest.mark.usefixtures("standard_promotion")
def test_a_preconditioned_run_is_a_run_on_preconditioned_features(method):
    """The oracle: the same rows, mapped before they are read. The models differ by that map alone."""
    given, table = ["--method", method, "--set", "depth=2"], {"rows": 20000, "p": 4, "block": 500}
    mixing = np.eye(4)
    mixing[:2, 1] = 0.6, 0.8

    class Mixed(Synthetic):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return x @ mixing, y

    class Mapped(Mixed):
        def __getitem__(self, i):
            x, y = super().__getitem__(i)
            return np.asarray(mixed.preconditioned(mixed.scaling.transform(x)), np.float64), y

    mixed = job(*given, "precondition=0.9", table=Mixed(**table))
    correlations = np.corrcoef(mixed.batch(mixed.sample).x.T)
    assert np.abs(correlations - np.eye(4)).max() < 0.2 < np.abs(np.corrcoef(mixed.sample.x.T) - np.eye(4)).max()
    mapped = job(*given, table=Mapped(**table))
    # The mapped features as they are, as they would be standardised once more.
    same = mapped.scaling.replace(x_center=np.zeros(4), x_unit=np.ones(4), x_most=np.inf)
    fits = [trained(each)[0] for each in (mixed, mapped._replace(scaling=same))]
    answers = fits[0].predict(mixed.validation.x), fits[1].predict(mapped.validation.x)
    np.testing.assert_allclose(*answers, rtol=1e-3, atol=1e-3)
