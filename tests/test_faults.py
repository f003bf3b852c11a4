"""Whatever may happen to examples.train_large: what is left of it is a run that goes on, to the same bits."""

import os
import re
import shutil
import signal
import subprocess
import time

import jax
import numpy as np
import pytest

from examples.train_large import command as large, identity, rounds, run
from examples.train_large.checkpoints import CheckpointError, Checkpoints
from jtrees import distributed
from tests import needs, sweeps
from tests.large_runs import SMALL, STEPS, ended, free_address, parameters, same_run, script, steps_of, within


@pytest.mark.wide
def test_four_kills(uninterrupted, tmp_path):
    """At random moments, those of saving among them: what is left is a run that goes on, to the same bits."""
    out, rng, kills = tmp_path / "run", np.random.default_rng(0), 0
    often = ["--save-every", "10", "--evaluate-every", "50"]
    while kills < 4:
        before = set(out.glob("checkpoints/*"))
        process = script(out, *SMALL, *often)
        while kills % 2 and set(out.glob("checkpoints/*")) <= before and process.poll() is None:
            time.sleep(0.01)  # until it trains and saves
        time.sleep(rng.uniform(0, 0.5 if kills % 2 else 3))
        if process.poll() is not None:
            shutil.rmtree(out)  # it came to its end: once more from the beginning
        else:
            kills += 1
        process.kill()
        process.communicate()
    ended(script(out, *SMALL, *often))
    same_run(out, uninterrupted)
    steps = steps_of(out)
    assert steps == sorted(set(steps)) and steps[-1] == STEPS


PHASES = {
    "before": (identity, "source"),
    "reading": (rounds, "scaling_of"),
    "compiling": (run, "round_of"),
    "evaluating": (run.Evaluator, "fit"),
    "saving": (Checkpoints, "save"),
    "training": (run.Log, "round"),
}


@pytest.mark.parametrize("phase", sweeps.slow(PHASES, ["saving", "training"]))
def test_sigterm_in_any_phase(uninterrupted, tmp_path, monkeypatch, phase):
    """The signal comes while a function of that phase runs (Ctrl-C in training): status 75, and where it stopped."""
    out, (owner, name) = tmp_path / "run", PHASES[phase]
    inner = getattr(owner, name)

    def outer(*args, **options):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGINT if phase == "training" else signal.SIGTERM)
        return inner(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, outer)
        output = within(out, *SMALL, status=75)
    assert not (out / "model.jtrees").exists()
    if phase in ("before", "reading"):
        assert output == "stopped before the first step: nothing is lost\n" and not list(out.glob("checkpoints/*"))
    else:
        where = out / "checkpoints" / ("10" if phase == "training" else "0")
        assert output == f"stopped at step {where.name}: the same command resumes from {where}\n" and where.is_dir()
    within(out, *SMALL)
    same_run(out, uninterrupted)


@pytest.mark.slow
def test_a_full_disk(uninterrupted, tmp_path):
    """It says so and ends; with room again the same command goes on."""
    (small := tmp_path / "small").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    needs.check(mounted.returncode == 0, "permission to mount a tmpfs")
    try:
        out = small / "run"
        within(out, *SMALL, "--max-steps", 200)
        room = os.statvfs(small)
        (small / "filler").write_bytes(b"0" * (room.f_bavail * room.f_frsize - 4096))
        # In a process of its own: what Orbax cannot finish there it leaves to the end of the process.
        assert "No space left on device" in ended(script(out, *SMALL), status=1)
        (small / "filler").unlink()
        within(out, *SMALL)
        same_run(out, uninterrupted)
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.wide
def test_one_of_two_processes_is_told_to_stop_or_dies(tmp_path):
    """SIGTERM to the second: both end, with a checkpoint. Killed, the first ends at once, with one line."""

    def both(name, *arguments, epochs=10_000):
        options = [*SMALL, "--epochs", epochs, "--save-every", 100_000, "--evaluate-every", 100_000, "--processes", 2]
        options += ["--coordinator", free_address()]
        return [script(tmp_path / name, *options, "--process", i, *(arguments if i else [])) for i in range(2)]

    first, second = both("run")
    assert any(line.startswith("step ") for line in first.stderr)  # until it trains
    second.send_signal(signal.SIGTERM)
    assert "stopped at step" in ended(first, status=75) and "stopped" not in ended(second, status=75)
    assert parameters(tmp_path / "run")[0] > 0
    first, second = both("killed")
    assert any(line.startswith("step ") for line in first.stderr)
    second.kill()
    second.communicate()
    died = time.monotonic()
    _, output = first.communicate(timeout=100)
    assert first.returncode == os.EX_TEMPFAIL and time.monotonic() - died < 5, output
    lines = [line for line in output.splitlines() if not line.startswith("step ")]
    assert lines == ["another process has ended: the same command resumes the run"]
    # Started unlike each other they do not begin.
    for process in both("other", "--max-steps", 100):
        assert "must be started with the same options" in ended(process, status=1)
    first, second = (ended(process, status=1) for process in both("blind", "--data", tmp_path / "nowhere"))
    assert "see the same data" in first and "give either --data FOLDER or --synthetic" in second


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ("UNKNOWN: Gloo all-reduce failed: [pair.cc:538] Read error [127.0.0.1]:1: Connection reset by peer", 75),
        ("UNAVAILABLE: Task 1 heartbeat timeout.", 75),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes", None),
        ("--target must be a column, got 'barrier'", None),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_only_errors_of_other_processes_mean_run_again(monkeypatch, capsys, message, status, wrapped):
    statuses: list = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    error: Exception = CheckpointError("cannot write a checkpoint") if wrapped else ValueError(message)
    error.__cause__ = ValueError(message) if wrapped else None
    for processes in (1, 2):
        monkeypatch.setattr(jax, "process_count", lambda processes=processes: processes)
        with pytest.raises(type(error)), distributed.resumable():
            raise error
        assert statuses == ([] if status is None or processes == 1 else [status])
    assert capsys.readouterr().err.count("another process has ended") == len(statuses)


def test_a_run_goes_on_only_if_the_blocks_that_it_has_used_are_the_same(half, folder):
    """The time of modification says that a file must be compared. A block that was not used may change."""
    command, blocks = half
    original = {file: file.read_bytes() for file in folder.iterdir()}
    output = changed_block(folder, blocks[1])  # which is not in memory
    assert output in within(*command, status=1)
    for file, content in original.items():
        file.write_bytes(content)
    changed_block(folder, blocks[7])
    output = within(*command)
    changed = blocks[7] // 6
    assert f"{changed}.npy was written again: its " in output and "its others may differ" in output
    assert re.search(rf"{1 - changed}.npy was written again: its \d+ blocks that the run has used are the same", output)
    assert "100 steps, all that was planned" in output


@pytest.mark.slow
def test_a_block_that_changed_without_a_trace_is_refused_where_it_is_read_again(half, folder):
    command, blocks = half
    output = changed_block(folder, blocks[1], stamp=True)
    assert output in within(*command, status=1)
    assert 50 <= parameters(command[0])[0] < 100  # in the second pass


OPTIONS = ["--block", 50, "--batch", 10, "--held-out", 2, "--epochs", 2, "--save-every", 1000]
OPTIONS += ["--set", "depth=2", "widths=[]"]


def table(rows, seed=0, classes=False):
    x = np.random.default_rng(seed).normal(size=(rows, 3))
    y = np.abs(x[:, 0]) + x[:, 1]
    return np.column_stack([x, y > 0.5 if classes else y])


@pytest.fixture
def folder(tmp_path):
    """Two shards of 300 rows, which fill 12 blocks."""
    (tmp_path / "data").mkdir()
    for i in range(2):
        np.save(tmp_path / "data" / f"{i}.npy", table(300, i))
    return tmp_path / "data"


def replaced(file, array):
    """Writes a file in the place of another, which threads that read ahead for an earlier run may still have mapped."""
    np.save(file.with_suffix(".new.npy"), array)
    os.replace(file.with_suffix(".new.npy"), file)


@pytest.mark.wide
def test_a_run_does_not_go_on_with_other_data(folder, tmp_path):
    """It names what differs, and loses nothing: with the first data again it goes on."""
    command = [tmp_path / "run", "--data", folder, *OPTIONS]
    within(*command, "--max-seconds", 0.01, status=75)
    left = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}

    def refused(message):
        assert message in within(*command, status=1)
        assert {file: file.read_bytes() for file in left} == left

    replaced(folder / "1.npy", table(350, 1))
    refused("holds a run on other data: 1.npy had 300 rows, and has 350 rows now; give another --out")
    replaced(folder / "1.npy", table(300, 1))
    replaced(folder / "2.npy", table(100, 2))
    refused("holds a run on other data: 2.npy had no rows, and has 100 rows now; give another --out")
    (folder / "2.npy").unlink()
    replaced(folder / "1.npy", table(300, 1)[:, [0, 1, 2, 2, 3]])
    refused("shards must have the same columns, but 1.npy has 4 features")
    replaced(folder / "1.npy", table(300, 1) * [1, 1, 1, 2])  # another target
    refused("the block that begins there has changed since the run read it; restore the data, or give another --out")
    replaced(folder / "1.npy", table(300, 1).astype(">f8"))  # the same numbers in another byte order
    assert "100 steps, all that was planned" in within(*command)


@pytest.fixture
def half(folder, tmp_path, monkeypatch):
    """A run that has used four of ten blocks; its command, and the numbers of the blocks after those in memory."""
    monkeypatch.setattr(rounds, "SAMPLE", 50)
    command = [tmp_path / "run", "--data", folder, *OPTIONS]
    within(*command, "--max-steps", 20)
    options = large.parse(["--out", *map(str, command), "--blocks", "1"])
    order = rounds.prepared(options, rounds.source(options)).order
    return command, [order[k] for k in range(1, 10)]


def changed_block(folder, i, stamp=False):
    """Adds 1 to a number of block i; with ``stamp``, size and time of modification stay."""
    file, times = folder / f"{i // 6}.npy", (folder / f"{i // 6}.npy").stat()
    rows = np.load(file)
    rows[50 * (i % 6) + 7, 1] += 1
    replaced(file, rows)
    if stamp:
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    return f"{file}, row {50 * (i % 6)} (from 0): the block that begins there has changed since the run read it"


@pytest.mark.parametrize("task", sweeps.slow(["regression", "classification"], ["classification"]))
def test_a_row_that_will_not_do_loses_no_step(folder, tmp_path, monkeypatch, task):
    """Its place is named, the rounds before it are kept, and when it is mended the run ends with the same bits."""
    command = ["--data", folder, *OPTIONS, "--task", task]
    for i in range(2):
        np.save(folder / f"{1 - i}.npy", original := table(300, 1 - i, task == "classification"))
    monkeypatch.setattr(rounds, "SAMPLE", 50)
    within(tmp_path / "original", *command)
    options = large.parse(["--out", "x", *map(str, command), "--blocks", "1"])
    order = rounds.prepared(options, rounds.source(options)).order
    later = next(i for i in range(3, 10) if order[i] < 6)  # the first block of the file that comes in round 3 or later
    broken = original.copy()
    broken[50 * order[later] + 7, 3] = np.nan if task == "regression" else 5
    replaced(folder / "0.npy", broken)
    output = within(tmp_path / "run", *command, status=1)
    assert f"0.npy, row {50 * order[later] + 7} (from 0)" in output
    assert parameters(tmp_path / "run")[0] == 5 * later
    replaced(folder / "0.npy", original)
    assert f"resumes at step {5 * later}," in within(tmp_path / "run", *command)
    same_run(tmp_path / "run", tmp_path / "original", steps=100, features=3)


@pytest.mark.wide
def test_a_row_of_one_of_two_processes_ends_both_and_loses_no_step(tmp_path):
    """The second has a row that will not do: both end before its round, and go on when it is mended."""
    (data := tmp_path / "data").mkdir()
    np.save(data / "0.npy", original := table(40 * 4096))
    command = ["--data", data, "--block", 4096, "--batch", 512, *OPTIONS[4:]]
    options = large.parse(["--out", "x", *map(str, command), "--blocks", "2"])
    later = rounds.SAMPLE // 4096 // 2 + 2  # a round of rows that are not read before training
    at = 4096 * rounds.prepared(options, rounds.source(options)).order[2 * later + 1] + 7

    def both(status):
        options = ["--coordinator", free_address(), "--processes", 2]
        processes = [script(tmp_path / "run", *command, *options, "--process", i) for i in range(2)]
        return [ended(process, status) for process in processes]

    original[at, 3], value = np.nan, original[at, 3]
    replaced(data / "0.npy", original)
    first, second = both(1)
    assert "another process cannot read its data" in first and f"0.npy, row {at} (from 0)" in second
    assert parameters(tmp_path / "run")[0] == 16 * later
    original[at, 3] = value
    replaced(data / "0.npy", original)
    first, second = both(0)
    assert f"resumes at step {16 * later}," in first and "resumes" not in second


@pytest.mark.wide
def test_training_that_diverges(folder, tmp_path):
    """Not finite: an error, and no checkpoint of it. Finite, and worse than a constant: a line that says so."""
    command = ["--data", folder, "--evaluate-every", 50, *OPTIONS]
    output = within(tmp_path / "run", *command, "learning_rate=1e38", status=1)
    assert "training became non-finite before step 50: try a smaller learning_rate in another --out" in output
    assert parameters(tmp_path / "run")[0] == 0
    output = within(tmp_path / "other", *command, "learning_rate=1e3")
    assert "100 steps, all that was planned" in output and "the model is worse than a constant, whose " in output
