"""A run on a pod: examples/pod.py on one and two processes, how processes find each other, folders in buckets."""

import json
import os
import signal
import subprocess
import sys
import time

from etils import epath
from etils.epath import testing
import grain
import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples import pod
from examples.train_large import Shards
import jtrees
from jtrees import distributed
from tests import ROOT, needs
from tests.large_runs import SMALL, free_address, output_of, pair, same_model, shards, started

ROUNDS = 40


def by_hand(devices):
    """The plain definition: the parameters after ``ROUNDS`` rounds, one after the other, on this device."""
    order = grain.MapDataset.range(pod.BLOCKS).shuffle(seed=0).repeat(ROUNDS)
    join = lambda k: [pod.block(order[k * devices + j]) for j in range(devices)]
    rounds = [jax.tree.map(lambda *parts: np.concatenate(parts), *join(k)) for k in range(ROUNDS)]
    state, advance = pod.begin(rounds[0]), jax.jit(pod.advance)
    for data in rounds:
        state, _ = advance(state, data)
    return pod.METHOD.harden(state.params, jtrees.Batch(**rounds[0]))


def interrupted(processes, target):
    """Sends SIGTERM to a process once the first shows that it trains; all of them end."""
    assert any(line.startswith("round 10: loss") for line in processes[0].stdout)
    target.send_signal(signal.SIGTERM)
    for process in processes:
        output_of(process, status=os.EX_TEMPFAIL)


@pytest.mark.wide
@pytest.mark.usefixtures("standard_promotion")
def test_one_process_trains_as_a_plain_loop_and_resumes_to_the_same_bits(tmp_path):
    output = output_of(started("pod", tmp_path / "whole", "--rounds", ROUNDS, "--profile", tmp_path / "profile"))
    assert [line.split(":")[0] for line in output.splitlines()] == [f"round {i}" for i in range(10, ROUNDS + 1, 10)]
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    expected, result = by_hand(1), jtrees.load(tmp_path / "whole" / "tree.jtrees")
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    process = started("pod", out := tmp_path / "run", "--rounds", ROUNDS)
    interrupted([process], process)
    [step] = [int(path.name) for path in (out / "checkpoints").iterdir()]
    assert 10 <= step < ROUNDS and not (out / "tree.jtrees").exists()
    assert output_of(started("pod", out, "--rounds", ROUNDS)).startswith(f"resumed from round {step}\n")
    same_model(out / "tree.jtrees", tmp_path / "whole" / "tree.jtrees")


@pytest.mark.wide
def test_two_processes_are_interrupted_together_and_end_as_one_with_two_devices(tmp_path):
    processes = pair("pod", out := tmp_path / "run", "--rounds", 400)
    interrupted(processes, processes[1])
    steps = [int(path.name) for path in (out / "checkpoints").iterdir()]
    assert 10 <= max(steps) < 400
    rounds = max(steps) + 20
    first, second = (output_of(process) for process in pair("pod", out, "--rounds", rounds))
    assert "round" in first and "round" not in second
    output_of(started("pod", tmp_path / "one", "--rounds", rounds, devices=2))
    same_model(out / "tree.jtrees", tmp_path / "one" / "tree.jtrees")


@pytest.mark.wide
def test_a_process_whose_partner_is_killed_says_so_and_the_run_resumes(tmp_path):
    first, second = pair("pod", out := tmp_path / "run", "--rounds", 400, "--save-every", 10)
    assert any(line.startswith("round 30: loss") for line in first.stdout)
    second.kill()
    _, message = first.communicate(timeout=200)
    second.communicate()
    assert first.returncode == os.EX_TEMPFAIL, message
    assert message.splitlines()[-1] == "another process has ended: the same command resumes the run"
    assert "Traceback" not in message
    rounds = max(int(path.name) for path in (out / "checkpoints").iterdir() if path.name.isdecimal()) + 10
    texts = [output_of(process) for process in pair("pod", out, "--rounds", rounds)]
    assert "resumed from round " in texts[0] and "resumed" not in texts[1]


def compiled_for(pod):
    """The example compiles a round for a pod, in a process of its own."""
    paths, flags = os.pathsep.join([str(ROOT), *sys.path]), ""  # the flags of the tests are for CPUs
    environment = os.environ | {"PYTHONPATH": paths, "XLA_FLAGS": flags, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    command = [sys.executable, str(ROOT / "examples" / "pod.py"), "--compile-only", pod]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_compiling_for_a_pod_needs_a_compiler_and_a_pod():
    run = compiled_for("v5e:1x999")
    assert run.returncode == 1 and "Traceback" not in run.stderr
    assert "--compile-only needs libtpu, and a pod such as v5e:8x8, got 'v5e:1x999': " in run.stderr


@pytest.mark.slow
def test_a_round_compiled_for_a_pod_reduces_sums_alone():
    needs.package("libtpu")
    run = compiled_for("v5e:8x8")
    first, *rest = run.stdout.splitlines()
    assert first.startswith("64 chips, each with ") and "temp_size_in_bytes=" in first
    assert rest == ["all-reduce f32[]", "all-reduce (f32[63,64], f32[63,1], f32[64], f32[])"]


def test_the_page_has_the_figures_of_the_committed_table():
    page = (ROOT / "docs" / "scaling.md").read_text()
    result = json.loads((ROOT / "experiments" / "results" / "accelerators.json").read_text())
    names = [name.partition(", ")[2] for name in result if name.startswith("v5e:8x8, ")]
    assert len(names) >= 6
    for name in names:
        small, middle, large = (result[f"{chips}, {name}"] for chips in ("v5e:2x4", "v5e:8x8", "v5e:16x16"))
        bytes_ = " | ".join(f"{size['exchanged'] / 1e3:.1f}" for size in (small, middle, large))
        assert f"| {name} | {small['collectives']} | {bytes_} | {small['temporary'] / 1e3:.0f} |" in page


@pytest.fixture
def joined(monkeypatch):
    """What ``jax.distributed.initialize`` is called with; it finds no cluster."""
    calls = []

    def initialize(*address, **options):
        calls.append((*address, *options.items()))
        if None in address:
            raise ValueError("coordinator_address should be defined.")
        if address[2] >= address[1]:
            raise ValueError("The process_id must be below num_processes")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    for name in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID"):
        monkeypatch.delenv(f"JAX_{name}", raising=False)
    return calls


def test_an_address_comes_from_arguments_or_the_environment(joined, monkeypatch):
    distributed.initialize()  # without a cluster and an address a process is alone
    with pytest.raises(ValueError, match=r"^The process_id must be below"):  # in the words of JAX
        distributed.initialize("localhost:1", 2, 5)
    with pytest.raises(ValueError, match=r"process must be given together, got \('a:1', None, 0\)"):
        distributed.initialize("a:1", process=0)
    assert joined[0] == (None, None, None)
    joined.clear()
    distributed.initialize("a:1", 2, 0, heartbeat_timeout_seconds=10)
    for name, value in {"COORDINATOR_ADDRESS": "b:2", "NUM_PROCESSES": "3", "PROCESS_ID": "2"}.items():
        monkeypatch.setenv(f"JAX_{name}", value)
    distributed.initialize()
    distributed.initialize(process=1)
    assert joined == [("a:1", 2, 0, ("heartbeat_timeout_seconds", 10)), ("b:2", 3, 2), ("b:2", 3, 1)]


@pytest.mark.wide
def test_processes_with_folders_of_their_own_end_within_a_minute(tmp_path):
    address, processes, data = free_address(), [], shards(tmp_path / "data")
    for i in range(2):
        (folder := tmp_path / f"host-{i}").mkdir()
        processes.append(started("train_large", folder / "run", *data, *SMALL, address=address, process=i))
    began = time.monotonic()
    errors = [process.communicate(timeout=100)[1] for process in processes]
    assert time.monotonic() - began < 60
    assert {process.returncode for process in processes} <= {1, os.EX_TEMPFAIL}
    expected = "train_large: folder must be one that all processes see, such as a shared disk or a bucket, got"
    assert any(expected in text and "did not come to process 1 in 30 s" in text for text in errors)


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
    error: Exception = RuntimeError("cannot write a checkpoint") if wrapped else ValueError(message)
    error.__cause__ = ValueError(message) if wrapped else None
    for processes in (1, 2):
        monkeypatch.setattr(jax, "process_count", lambda processes=processes: processes)
        with pytest.raises(type(error)), distributed.resumable():
            raise error
        assert statuses == ([] if status is None or processes == 1 else [status])
    assert capsys.readouterr().err.count("another process has ended") == len(statuses)


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """A folder that stands for ``gs://bucket``; the current folder must stay empty."""
    (current := tmp_path / "here").mkdir()
    monkeypatch.chdir(current)
    (held := tmp_path / "held").mkdir()

    local = lambda path: str(path).replace("gs://bucket", str(held))
    on_path = lambda original, path, *args, **options: original(local(path), *args, **options)
    names = ("exists", "isdir", "listdir", "makedirs", "mkdir", "open", "remove", "stat")
    with testing.mock_epath(**dict.fromkeys(names, on_path)):
        yield held
    assert not list(current.iterdir())


@pytest.mark.slow
def test_files_in_a_bucket_are_written_and_read(bucket):
    distributed.check_folder(out := epath.Path("gs://bucket/run"))
    (out / "metrics.jsonl").write_text("{}")
    assert (bucket / "run" / "metrics.jsonl").read_text() == (out / "metrics.jsonl").read_text() == "{}"
    fit = jtrees.fit(jtrees.DGT(depth=1, epochs=1), np.eye(4), np.arange(4), key=jax.random.key(0))
    for name in (out / "model.jtrees", "gs://bucket/run/other.jtrees"):
        jtrees.save(fit, name)
        np.testing.assert_array_equal(jtrees.load(name).predict(np.eye(4)), fit.predict(np.eye(4)))
        assert jtrees.io.header(name)["kind"] == "FitResult"
    assert sorted(path.name for path in (bucket / "run").iterdir()) == ["metrics.jsonl", "model.jtrees", "other.jtrees"]


def test_shards_in_a_bucket_are_parquet(bucket):
    table = pa.table({"a": np.arange(20.0), "price": np.arange(20.0) + 1})
    pq.write_table(table, bucket / "0.parquet", row_group_size=10)
    x, y = Shards(epath.Path("gs://bucket"), 5, "price")[1]
    np.testing.assert_array_equal(x[:, 0], np.arange(5.0, 10.0))
    np.testing.assert_array_equal(y, np.arange(6.0, 11.0))
    np.save(bucket / "0.npy", np.zeros((4, 2)))
    (bucket / "0.parquet").unlink()
    with pytest.raises(ValueError, match=r"gs://bucket/0.npy cannot be read"):
        Shards(epath.Path("gs://bucket"), 2, None)
