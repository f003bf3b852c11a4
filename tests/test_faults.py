"""Whatever may happen to experiments.train_large: what is left of it is a run that goes on, to the same bits."""

import os
import shutil
import signal
import subprocess
import time

from large_runs import SMALL, STEPS, ended, free_address, parameters, same_run, script, steps_of, within
import numpy as np
import pytest

from experiments import rounds, train_large
from experiments.checkpoints import Checkpoints


@pytest.mark.slow
def test_twenty_kills(uninterrupted, tmp_path):
    """At random moments, those of saving among them: what is left is a run that goes on, to the same bits."""
    out, rng, kills = tmp_path / "run", np.random.default_rng(0), 0
    often = ["--save-every", "10", "--evaluate-every", "50"]
    while kills < 20:
        before = set(out.glob("checkpoints/*"))
        process = script(out, *SMALL, *often)
        if kills % 2:  # while it trains and saves
            while set(out.glob("checkpoints/*")) <= before and process.poll() is None:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 0.5))
        else:
            time.sleep(rng.uniform(0, 3))
        if process.poll() is not None:
            process.communicate()
            shutil.rmtree(out)  # it came to its end: once more from the beginning
            continue
        process.kill()
        process.communicate()
        kills += 1
    ended(script(out, *SMALL, *often))
    same_run(out, uninterrupted)
    steps = steps_of(out)
    assert steps == sorted(set(steps)) and steps[-1] == STEPS


PHASES = {
    "before": (train_large, "source"),
    "reading": (rounds, "scale_of"),
    "compiling": (train_large, "round_of"),
    "evaluating": (train_large.Judge, "fit"),
    "saving": (Checkpoints, "save"),
    "training": (train_large.Log, "round"),
}


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_sigterm_in_any_phase(uninterrupted, tmp_path, monkeypatch, phase):
    """The signal comes while a function of that phase runs; the run ends with status 75 and prints where it stopped."""
    out, (owner, name) = tmp_path / "run", PHASES[phase]
    inner = getattr(owner, name)

    def outer(*args, **options):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGTERM)
        return inner(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, outer)
        said = within(out, *SMALL, status=75)
    assert not (out / "model.jtrees").exists()
    if phase in ("before", "reading"):
        assert said == "stopped before a step was made: nothing is lost\n" and not list(out.glob("checkpoints/*"))
    else:
        where = out / "checkpoints" / ("10" if phase == "training" else "0")
        assert said == f"stopped at step {where.name}: the same command goes on from {where}\n" and where.is_dir()
    within(out, *SMALL)
    same_run(out, uninterrupted)


@pytest.mark.slow
def test_a_truncated_checkpoint(uninterrupted, tmp_path):
    out = tmp_path / "run"
    within(out, *SMALL, "--max-steps", 400)
    for file in (out / "checkpoints" / "400").rglob("*"):
        if file.is_file():
            os.truncate(file, file.stat().st_size // 2)
    said = within(out, *SMALL)
    assert "the checkpoint of step 400" in said and "going back to step 300" in said
    same_run(out, uninterrupted)


@pytest.mark.slow
def test_a_full_disk(uninterrupted, tmp_path):
    """It says so and ends; with room again the same command goes on."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no permission to mount a small tmpfs")
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


@pytest.mark.slow
def test_one_of_two_processes_is_told_to_stop(tmp_path):
    """SIGTERM to the second: both end, with a checkpoint. And started unlike each other they do not begin."""

    def both(name, *more):
        where = free_address()
        of = ["--coordinator", where, "--processes", 2]
        several = [*SMALL, "--epochs", 100, "--save-every", 100_000, "--evaluate-every", 100_000]
        return [script(tmp_path / name, *several, *of, "--process", i, *(more if i else [])) for i in range(2)]

    first, second = both("run")
    for _ in range(600):
        time.sleep(0.1)
        if (tmp_path / "run" / "checkpoints" / "0").exists():
            break
    time.sleep(3)
    second.send_signal(signal.SIGTERM)
    assert "stopped at step" in ended(first, status=75) and "stopped" not in ended(second, status=75)
    assert parameters(tmp_path / "run")[0] > 0
    for process in both("other", "--max-steps", 100):
        assert "must be started with the same options" in ended(process, status=1)
