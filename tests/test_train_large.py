"""examples/train_large.py: shards, a run, and what a stopped, killed or faulty run leaves."""

import json
import os
from pathlib import Path
import re
import shutil
import signal

from etils import epath
import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples import train_large
from examples.train_large import Job, Shards
from experiments import scaling
import jtrees
from tests import ROOT, sweeps
from tests.large_runs import SMALL, STEPS, output_of, pair, round_of, run_here, same_run, shards, started, table, write

TARGET = {"npy": None, "parquet": "price"}
both_kinds = pytest.mark.parametrize("kind", ["npy", "parquet"])


# --- Shards ----------------------------------------------------------------------------------------------------------


def read(folder, kind, block=500):
    return Shards(epath.Path(folder), block, TARGET[kind])


@both_kinds
def test_blocks_have_the_rows_of_the_shards_in_order(tmp_path, kind):
    shards(tmp_path / "data", kind)
    if kind == "parquet":  # columns are read by name
        rows = pq.read_table(file := tmp_path / "data" / "1.parquet").select(["x2", "price", "x3", "x0", "x1"])
        pq.write_table(rows.cast(pa.schema([(name, pa.float64()) for name in rows.column_names])), file)
    write(tmp_path / "data" / f"2.{kind}", table(499))  # too short for a block
    blocks = read(tmp_path / "data", kind)
    assert len(blocks.blocks) == 40 and blocks.unused == 519 and blocks.names == ["x0", "x1", "x2", "x3"]
    for i in (39, 0, 20, 19):
        rows = table(10_010, i // 20)[i % 20 * 500 :][:500]
        for result, expected in zip(blocks[i], (rows[:, :-1], rows[:, -1]), strict=True):
            np.testing.assert_array_equal(result, expected)


@both_kinds
@pytest.mark.parametrize(
    ("column", "value", "classes", "message"),
    [
        (1, np.nan, None, "be finite and within the range of float32, got "),
        (1, 1e300, None, "be finite and within the range of float32, got "),
        (4, 0.5, np.inf, "have a class of the first blocks, got "),
        (4, 2, 2, "have a class of the first blocks, got "),
    ],
)
def test_a_wrong_number_is_named_by_file_and_row(tmp_path, kind, column, value, classes, message):
    rows = np.ones((300, 5))
    rows[217, column] = value
    write(file := tmp_path / f"0.{kind}", rows)
    blocks = read(tmp_path, kind, 100)
    blocks.classes = classes
    assert len(blocks[1][0]) == 100
    with pytest.raises(ValueError, match=rf"{re.escape(str(file))}: row 217 \(from 0\) must {message}"):
        blocks[2]


@both_kinds
def test_a_missing_cut_or_short_shard_is_named(tmp_path, kind):
    shards(tmp_path / "data", kind)
    blocks, file = read(tmp_path / "data", kind), tmp_path / "data" / f"1.{kind}"
    content = file.read_bytes()
    message = rf"the shard .*1\.{kind} cannot be read"
    file.unlink()
    with pytest.raises(ValueError, match=message):
        blocks[39]
    for length in (0, len(content) // 2):
        file.write_bytes(content[:length])
        for use in (lambda: blocks[39], lambda: read(tmp_path / "data", kind)):
            with pytest.raises(ValueError, match=message):
                use()
    write(file, table(700))
    with pytest.raises(ValueError, match=message):
        blocks[39]


def test_folders_and_columns_that_are_refused(tmp_path):
    folders = {name: tmp_path / name for name in ("empty", "flat", "text", "wide")}
    for folder in folders.values():
        folder.mkdir()
    np.save(folders["flat"] / "0.npy", np.zeros(5))
    pq.write_table(pa.table({"price": [1.0], "town": ["Kiel"]}), folders["text"] / "0.parquet")
    for i in range(2):
        write(folders["wide"] / f"{i}.npy", np.zeros((10, 3 + i)))
    for name, target, message in (
        ("empty", None, "--data must be a folder of .parquet or .npy shards, got "),
        ("flat", None, "0.npy cannot be read: not enough values"),
        ("text", "cost", r"--target must be one of its columns, \['price', 'town'\], got 'cost'"),
        ("text", "price", "0.parquet cannot be read"),
        ("wide", None, r"shards must have the same columns, but .*1.npy differs in {'x2'}"),
    ):
        with pytest.raises(ValueError, match=message):
            Shards(epath.Path(folders[name]), 1, target)[0]


# --- The job ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def job(monkeypatch):
    """A function that returns the job of a command, and the numbers of the blocks that it reads."""
    parsed, numbers, inner = [], [], Shards.__getitem__
    monkeypatch.setattr(train_large, "train", lambda options, requests: parsed.append(options))
    monkeypatch.setattr(Shards, "__getitem__", lambda self, i: (numbers.append(i), inner(self, i))[1])

    def created(*arguments):
        run_here("run", *SMALL, *arguments)
        return Job(parsed[-1]), numbers

    return created


def test_rows_are_centred_in_double_precision(tmp_path, job):
    rows = np.add(table(2000), [1.7e9, -3e9, 0, 0, 1e9])
    write(tmp_path / "0.npy", rows)
    created, numbers = job("--data", tmp_path, "--block", 100, "--blocks", 1)
    result = jax.jit(created.batch)(*created.stream[0])
    x, y = created.table[numbers[-1]]
    np.testing.assert_allclose(created.scaling.x_center, rows[:, :-1].mean(0), rtol=0, atol=0.1)
    np.testing.assert_allclose(result.x, (x - created.scaling.x_center) / created.scaling.x_unit, atol=2e-5)
    np.testing.assert_allclose(result.y, (y - created.scaling.y_low) / created.scaling.y_unit, atol=1e-6)


def test_every_block_comes_once_in_a_pass_and_in_another_order_in_the_next(tmp_path, job):
    created, numbers = job(*shards(tmp_path / "data"))
    held_out = numbers[36:]
    assert [i // 10 for i in held_out] == [0, 1, 2, 3]  # a block of each quarter of the table
    numbers.clear()
    assert len([created.stream[k] for k in range(created.rounds)]) == 36 and created.steps == 20
    assert sorted(numbers[:36]) == sorted(numbers[36:]) == sorted({*range(40)} - {*held_out})
    assert numbers[:36] != numbers[36:]
    orders = {tuple(job("--data", tmp_path / "data", "--seed", seed)[1][-4:]) for seed in range(5)}
    assert len(orders) == 5


def trained(job, rounds=2):
    """The model after some rounds, and its validation loss."""
    with jax.set_mesh(jtrees.sharding.mesh()):
        state, advance = job.begin(*job.stream[0]), jax.jit(job.advance)
        for k in range(rounds):
            state, _ = advance(state, *job.stream[k])
    return job.evaluated(state)


@pytest.mark.parametrize("method", sweeps.quick(["dgt", "tel"], ["dgt"]))
@pytest.mark.parametrize("task", sweeps.quick(["regression", "classification"], ["regression"], []))
@pytest.mark.usefixtures("standard_promotion")
def test_each_method_learns_numbers_and_classes(tmp_path, job, method, task):
    rows = table(20_000)
    rows[:, -1] = rows[:, -1] > 0 if task == "classification" else 7 + 5 * rows[:, -1]
    write(tmp_path / "0.npy", rows)
    created, _ = job("--data", tmp_path, "--method", method, "--task", task)
    model, loss = trained(created, 18)
    constant = np.log(2) if task == "classification" else rows[:, -1].var()
    assert loss < 0.8 * constant
    if task == "regression":
        x, y = created.validation.x, created.validation.y
        np.testing.assert_allclose(loss, np.square(np.asarray(model.predict(x)) - y).mean(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_a_preconditioned_run_is_a_run_on_preconditioned_features(tmp_path, job):
    """The oracle: the rows of the shards are mapped before they are read. The models differ by that map alone."""
    rows, mixing = table(20_000), np.eye(4)
    mixing[:2, 1] = 0.6, 0.8
    rows[:, :-1] = rows[:, :-1] @ mixing
    (tmp_path / "mixed").mkdir(), (tmp_path / "mapped").mkdir()
    write(tmp_path / "mixed" / "0.npy", rows)
    mixed, _ = job("--data", tmp_path / "mixed", "--precondition", 0.9)
    mapped = (rows[:, :-1] - mixed.scaling.x_center) / mixed.scaling.x_unit @ mixed.matrix
    assert np.abs(np.corrcoef(mapped.T) - np.eye(4)).max() < 0.2 < np.abs(np.corrcoef(rows[:, :-1].T) - np.eye(4)).max()
    write(tmp_path / "mapped" / "0.npy", np.column_stack([mapped, rows[:, -1]]))
    other, _ = job("--data", tmp_path / "mapped")
    # The mapped features as they are, because they would be standardised once more.
    other.scaling = other.scaling.replace(x_center=np.zeros(4), x_unit=np.ones(4), x_most=np.inf)
    answers = [trained(created)[0].predict(x) for created, x in ((mixed, rows[:, :-1]), (other, mapped))]
    np.testing.assert_allclose(*answers, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("more", "status", "message"),
    [
        (["--batch", "0"], 2, "must be at least 1, and precondition at least 0 and below 1"),
        (["--precondition", "1"], 2, "must be at least 1, and precondition at least 0 and below 1"),
        (["--max-steps", "1.5"], 2, "argument --max-steps: invalid int value: '1.5'"),
        (["--batch", "300"], 1, "--batch a divisor of 1000, the rows of a round; got 2 and 300"),
        (["--held-out", "40"], 1, "--block must give 42 blocks, --held-out and --blocks, got 40"),
        (["--set", "deep=3"], 1, "--set must be arguments of jtrees.methods.dgt: "),
        (["--set", "depth=0"], 1, "--set must be arguments of jtrees.methods.dgt: depth must be"),
        (["--set", "depth"], 1, "--set must be arguments of jtrees.methods.dgt: "),
        (["--data", "nowhere"], 1, "nowhere"),
    ],
)
def test_arguments_that_are_refused(tmp_path, more, status, message):
    assert message in run_here(tmp_path / "run", *shards(tmp_path / "data"), *SMALL, *more, status=status)


# --- A run -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The options of a command, without its folder."""
    return [*shards(tmp_path_factory.mktemp("runs") / "data"), *SMALL]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, data):
    """The folder of a run in its own process, from its beginning to its end."""
    out = tmp_path_factory.mktemp("runs") / "uninterrupted"
    assert output_of(started("train_large", out, *data)).endswith(f"{STEPS} steps: {out / 'model.jtrees'}\n")
    return out


@pytest.mark.slow
def test_a_run(uninterrupted, data, tmp_path):
    lines = [json.loads(line) for line in (uninterrupted / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(100, 701, 100), 720]
    assert lines[-1]["validation_loss"] < min(0.4, lines[0]["validation_loss"])
    assert all(line["training_loss"] < 0.1 and line["rows_per_second"] > 0 for line in lines)
    header = jtrees.io.header(uninterrupted / "model.jtrees")
    assert header["feature_names"] == ["x0", "x1", "x2", "x3"]
    # The same command again changes nothing; another is refused.
    shutil.copytree(uninterrupted, out := tmp_path / "run")
    assert "not used: 20 rows at the ends of shards; constant features: none" in run_here(out, *data)
    assert (out / "metrics.jsonl").read_bytes() == (uninterrupted / "metrics.jsonl").read_bytes()
    same_run(out, uninterrupted)
    assert "holds a run of other options, " in run_here(out, *data, "--batch", 100, status=1)


@pytest.mark.parametrize("by", sweeps.slow(["SIGTERM", "SIGINT", "--max-seconds"], ["SIGTERM"]))
def test_a_run_stops_and_resumes_to_the_same_bits(uninterrupted, data, tmp_path, monkeypatch, by):
    out, inner, more = tmp_path / "run", Job.evaluated, []

    def stop(*args):
        os.kill(os.getpid(), getattr(signal, by))
        return inner(*args)

    run_here(out, *data, "--max-steps", 205)
    assert round_of(out) == 11 and jtrees.load(out / "model.jtrees").depth == 3
    (out / "model.jtrees").unlink()
    if by == "--max-seconds":
        more = ["--max-seconds", 0.01]
    with monkeypatch.context() as patched:
        patched.setattr(Job, "evaluated", inner if more else stop)
        assert "resumes from step 220" in run_here(out, *data, *more, status=os.EX_TEMPFAIL)
    assert 11 < round_of(out) < 36 and not (out / "model.jtrees").exists()
    run_here(out, *data)
    same_run(out, uninterrupted)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == STEPS and lines == sorted(lines, key=lambda line: line["step"])


@pytest.mark.slow
def test_a_cut_checkpoint_is_named_and_the_one_before_resumes(uninterrupted, data, tmp_path):
    shutil.copytree(uninterrupted, out := tmp_path / "run")
    newest = out / "checkpoints" / str(round_of(out))
    for file in newest.rglob("*"):
        if file.is_file():
            os.truncate(file, file.stat().st_size // 2)
    assert f"train_large: {newest} cannot be read; delete it to go back: " in run_here(out, *data, status=1)
    shutil.rmtree(newest)
    assert "resumes from step 700" in run_here(out, *data)
    same_run(out, uninterrupted)


@pytest.mark.slow
def test_training_that_diverges_ends_with_an_error_and_without_a_model(tmp_path, data):
    output = run_here(tmp_path / "run", *data, "--learning-rate", 1e38, status=1)
    assert "training became non-finite: try a smaller --learning-rate in another --out" in output
    assert not (tmp_path / "run" / "model.jtrees").exists()


# --- Several processes -----------------------------------------------------------------------------------------------


@pytest.mark.wide
def test_two_processes_stop_together_and_end_as_one_process_with_two_devices(data, tmp_path):
    """SIGTERM to the second stops both at the same round. A process with another number of devices also resumes."""
    command = [*data, "--epochs", 40, "--save-every", 1000]
    first, second = pair("train_large", out := tmp_path / "two", *command)
    assert any(line.startswith("of ") for line in first.stdout)  # until it trains
    second.send_signal(signal.SIGTERM)
    texts = [output_of(process, status=os.EX_TEMPFAIL) for process in (first, second)]
    assert all(line.startswith("[Gloo]") for line in texts[1].splitlines())
    steps = 20 * round_of(out)
    assert 1000 <= steps < 14_400 and not (out / "model.jtrees").exists()
    shutil.copytree(out, other := tmp_path / "other")
    end = ["--max-steps", steps + 100]
    first, second = map(output_of, pair("train_large", out, *command, *end))
    assert f"resumes from step {steps}" in first and "resumes" not in second
    output_of(started("train_large", tmp_path / "one", *command, *end, devices=2))
    same_run(out, tmp_path / "one")
    assert f"{steps + 100} steps" in output_of(started("train_large", other, *command, *end, devices=1))


# --- The page --------------------------------------------------------------------------------------------------------


def test_the_page_has_the_figures_of_the_tables(capsys):
    page = (ROOT / "docs" / "scaling.md").read_text()
    text, measured = " ".join(page.split()), (Path(scaling.__file__).parent / "results/bench_streaming.md").read_text()
    cells = {row.split(" | ")[0][2:]: row.strip(" |").split(" | ") for row in measured.splitlines() if row[:2] == "| "}
    [many] = [row[-1] for name, row in cells.items() if name.startswith("1e+07 rows")]
    for statement in (
        f"{cells['4 shards, parquet'][2]} for Parquet with row groups of a block, and {cells['4 shards, npy'][2]} for",
        f"10^7 rows needs {many} GB, and a pass over 2.6 10^5 rows needs {cells['4 shards, npy'][-1]} GB",
    ):
        assert statement in text
    scaling.main()
    assert capsys.readouterr().out.strip() in page
