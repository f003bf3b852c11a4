"""How programs of a fit are compiled: which calls compile, ahead of the data, and in a folder for later processes."""

import os
from pathlib import Path
import shutil
import subprocess
import sys

import jax
from jax.experimental.compilation_cache import compilation_cache
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from jtrees import caching, compilation
from jtrees.processes import processors
from tests import needs, sweeps
from tests.recipes import DGT, GET, RECIPES

KEY = jax.random.key(1)
ROWS, COLUMNS = 66, 3


def table(rows: int = 68, seed: int = 0):
    """A table that differs from a made one: oblique signal, units of its own, a share of equal values."""
    rng = np.random.default_rng(seed)
    x = 50 * rng.normal(size=(rows, COLUMNS)) + [10, 0, 200]
    x[: rows // 4, 1] = 0
    return x, np.where(x[:, 0] + x[:, 1] > 0, 300.0, -100.0) + x[:, 2] + rng.normal(size=rows)


def test_a_function_compiles_once_for_each_shape_and_static_option(count_compilations):
    @compilation.jit(often=False, static_argnames="power")
    def total(x, power):
        return (x**power).sum()

    x, large = jnp.arange(4.0), jnp.ones(compilation.SMALL_SIZE + 1)
    assert total(x, 2) == total.__wrapped__(x, 2) == 14
    assert total(large, 3) == len(large)
    assert count_compilations(lambda: (total(x, 2), total(large, 3))) == 0
    assert total(x, 3) == 36


@pytest.mark.slow
def test_programs_beyond_a_number_are_dropped(monkeypatch, count_compilations):
    total = compilation.jit(often=True)(lambda x: x.sum())
    call = lambda: [total(jnp.ones(n)) for n in range(1, 4)]
    call()
    compilation.bound_memory()  # the fixture allows for many
    assert total.programs() == 3 and count_compilations(call) == 0
    monkeypatch.setattr(compilation, "KEPT_PROGRAMS", 2)
    compilation.bound_memory()
    assert total.programs() == 0
    call()
    assert total.programs() == 3


CASES = {
    "classes": ({"classes": 3}, {"task": "classification"}),
    "targets": ({"outputs": 2}, {}),
    "loss": ({"task": jtrees.Regression(loss_function="gamma")},) * 2,
    "policy": ({"task": jtrees.Policy(2)},) * 2,
    "validation": ({"validation_rows": 37}, {"validation": table(38, seed=1)}),
    "held out": ({"held_out": 0.5}, {"held_out": 0.5}),
    "monotone": ({"monotone": True}, {"monotone": {1: -1}}),
}
# Without the sums, which have a program for each number of trees.
SHAPED = (
    RECIPES | {"GET": GET.replace(starts=6), "monotone": RECIPES["CO2"]} | dict.fromkeys(set(CASES) - {"monotone"}, DGT)
)
PLAIN = [name for name in RECIPES if name not in ("Boosted", "Refined")]


@pytest.mark.parametrize("name", sweeps.slow([*PLAIN, *CASES], ["GET", "LatentTree", "classes", "validation"]))
def test_a_fit_after_a_warm_up_of_its_shape_compiles_nothing(name, count_compilations):
    """The task, rows to evaluate on and constraints are part of the warm-up."""
    shape, options = CASES.get(name, ({}, {}))
    x, y = table()
    pair, three = np.stack([y, -y], 1), np.digitize(y, np.quantile(y, [0.3, 0.6]))
    y = {"classes": three, "targets": pair, "policy": pair, "loss": y - y.min() + 1}.get(name, y)
    assert count_compilations(lambda: jtrees.warmup(SHAPED[name], rows=ROWS, columns=COLUMNS, **shape)) > 0
    assert count_compilations(lambda: jtrees.fit(SHAPED[name], x, y, key=KEY, **options).predict(x)) == 0


def test_a_warm_up_takes_few_updates_and_leaves_fits_as_they_are():
    x, y = table()
    before = jtrees.fit(DGT, x, y, key=KEY).predict(x)
    seconds = jtrees.warmup(DGT.replace(epochs=10**7), rows=len(x), columns=COLUMNS)  # all would take many minutes
    assert 0 < seconds < 60
    np.testing.assert_array_equal(jtrees.fit(DGT, x, y, key=KEY).predict(x), before)
    named_columns = jtrees.Sparse(DGT, interactions=[["area", "age"]], epochs=4)
    assert jtrees.warmup(named_columns, rows=ROWS, columns=COLUMNS) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 1}, "rows must be at least 2, got 1"),
        ({"columns": 0}, "columns must be at least 1, got 0"),
        ({"classes": 1}, "classes must be at least 2, got 1"),
        ({"classes": 2, "outputs": 2}, "classes must be None with outputs, got 2"),
        ({"task": "classification"}, "task must be a task, .*got 'classification'"),
        ({"validation_rows": -1}, "validation_rows must be at least 0, got -1"),
        ({"held_out": 1.0}, "held_out must be a finite number of at least 0 and below 1, got 1.0"),
        ({"held_out": 0.5, "validation_rows": 9}, "held_out must be 0 with a validation set, got 0.5"),
        ({"recipe": "GET"}, "recipe must be a recipe"),
    ],
)
def test_a_warm_up_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        jtrees.warmup(**{"recipe": DGT, "rows": 20, "columns": 2} | change)


LIMITS = [f"jax_persistent_cache_min_{name}" for name in ("compile_time_secs", "entry_size_bytes")]
SETTINGS = ["jax_compilation_cache_dir", "jax_enable_compilation_cache", *LIMITS]


def folder_of_jax():
    return jax.config.jax_compilation_cache_dir


@pytest.fixture
def no_folder(monkeypatch, tmp_path):
    """JAX without a folder of programs, and the user's folder of caches in a temporary one; restored afterwards."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    for name in ("JTREES_CACHE", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.delenv(name, raising=False)
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def programs_read(fn) -> int:
    """Number of programs that are read from a folder while ``fn()`` runs."""
    events = []
    jax.monitoring.register_event_listener(listen := lambda event, **_: events.append(event))
    fn()
    jax.monitoring.unregister_event_listener(listen)
    return sum(event.endswith("cache_hits") for event in events)


def double():
    """Compiles at every call, as the function is new."""
    jax.jit(lambda a: 2 * a)(np.ones(3))


BROKEN = [None, lambda entry: b"", lambda entry: entry[:-9], lambda entry: b"text" + entry[4:]]


def entries(folder) -> list:
    return sorted(folder.rglob("*-cache"))


@pytest.mark.usefixtures("no_folder")
@pytest.mark.parametrize("broken", BROKEN)
def test_a_folder_keeps_small_programs_also_after_the_first_compilation(tmp_path, broken):
    """A killed process leaves half of an entry: the next compiles the program again, and the one after it reads it."""
    assert programs_read(double) == 0
    folder = jtrees.cache(tmp_path / "programs")
    assert folder == folder_of_jax() and os.path.dirname(folder) == str(tmp_path / "programs")
    assert programs_read(double) == 0
    [entry] = entries(tmp_path / "programs")
    if broken is not None:
        entry.write_bytes(broken(entry.read_bytes()))
        assert programs_read(double) == 0
    assert programs_read(double) == 1


@pytest.mark.usefixtures("no_folder")
def test_a_folder_that_vanishes_costs_compilations_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(caching, "_WRITES", 1)  # every write checks the limits of the folder
    folder = jtrees.cache(tmp_path / "programs")
    double()
    shutil.rmtree(tmp_path / "programs")
    (tmp_path / "programs").write_text("")  # in its place is a file
    assert programs_read(double) == 0
    assert folder == folder_of_jax()


@pytest.mark.usefixtures("no_folder")
@pytest.mark.parametrize("limits", [{"LARGEST_SIZE": 7500}, {"MOST_ENTRIES": 2}])
def test_the_programs_that_nobody_reads_are_deleted_beyond_a_limit(limits, tmp_path, monkeypatch):
    """The entries of all processors count; ``b`` was read last. Other programs share the user's folder of caches."""
    folder, other = Path(jtrees.cache(tmp_path)), tmp_path / f"{'0f' * 6}-64"
    names = "other", "0f" * 6, f"{'0f' * 6}-x", f"{'0f' * 7}-64", f"{'0F' * 6}-64"
    foreign = [tmp_path / name for name in names]
    for new in (other, *foreign):
        new.mkdir()
    times = {folder / "a-cache": 1, folder / "b-cache": 3, other / "c-cache": 2}
    times |= {new / "foreign-cache": 0 for new in foreign}
    for file, read in times.items():
        file.write_bytes(bytes(3000))
        os.utime(file, (read, 0))
    for name, value in limits.items():
        monkeypatch.setattr(caching, name, value)
    monkeypatch.setattr(caching, "_WRITES", 1)
    double()
    assert all((new / "foreign-cache").exists() for new in foreign)
    remaining = {entry.name[0] for entry in entries(tmp_path) if entry.parent not in foreign}
    assert remaining == {"b", "j"}  # jit_... is the program of ``double``


@pytest.mark.usefixtures("no_folder")
def test_the_folder_by_default(tmp_path, monkeypatch):
    parent = lambda folder: os.path.dirname(folder)
    assert parent(jtrees.cache()) == str(tmp_path / "user" / "jtrees")
    assert parent(jtrees.cache()) == str(tmp_path / "user" / "jtrees")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "of JAX"))
    assert jtrees.cache() == str(tmp_path / "of JAX")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    for system, home in {"linux": ".cache", "darwin": "Library/Caches", "win32": "local"}.items():
        monkeypatch.setattr(caching.sys, "platform", system)
        jax.config.update("jax_compilation_cache_dir", None)
        assert parent(jtrees.cache()) == str(tmp_path / home / "jtrees")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "7")  # which stays
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 7.0)
    for name, folder in {"here": "here", "~/there": "there"}.items():
        assert parent(jtrees.cache(name)) == str(tmp_path / folder)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 7


@pytest.mark.usefixtures("no_folder")
def test_a_folder_that_cannot_be_made_is_refused_except_by_default(tmp_path, monkeypatch, capfd):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match="folder must be one that can be made and written to, got '/"):
            jtrees.cache(folder)
    for folder in ("", b"bytes"):
        with pytest.raises(ValueError, match="folder must be a path, got"):
            jtrees.cache(folder)  # type: ignore[arg-type]
    monkeypatch.setenv("XDG_CACHE_HOME", __file__)
    caching.keep_by_default()
    monkeypatch.setenv("JTREES_CACHE", __file__)
    with pytest.raises(ValueError, match="JTREES_CACHE: folder must be one that can be made and written to, got '"):
        caching.keep_by_default()
    assert folder_of_jax() is None and capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("no_folder")
@pytest.mark.parametrize("value", [None, "", "0", "1", "programs"])
def test_values_of_the_environment_variable(value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if value is not None:
        monkeypatch.setenv("JTREES_CACHE", value)
    caching.keep_by_default()
    folder = {"0": None, "programs": "programs"}.get(value, "user/jtrees")
    assert folder_of_jax() is None if folder is None else Path(folder_of_jax()).parent == tmp_path / folder


@pytest.mark.usefixtures("no_folder")
def test_settings_of_the_user_for_jax_stay(tmp_path):
    limits = [getattr(jax.config, name) for name in LIMITS]
    jax.config.update("jax_enable_compilation_cache", False)
    caching.keep_by_default()
    assert folder_of_jax() is None
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "of JAX"))
    caching.keep_by_default()
    assert folder_of_jax() == str(tmp_path / "of JAX")
    assert [getattr(jax.config, name) for name in LIMITS] == limits


@pytest.mark.usefixtures("no_folder")
def test_a_folder_that_is_set_in_jax_after_the_import_keeps_small_programs_too(tmp_path):
    caching.keep_by_default()
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "of JAX"))
    compilation_cache.reset_cache()
    double()
    assert len(entries(tmp_path / "of JAX")) == 1


FIRST_FIT = """
import sys, jax, jtrees
import numpy as np

read = []
jax.monitoring.register_event_listener(lambda event, **_: read.append(event.endswith("cache_hits")))
x = np.random.default_rng(0).normal(size=(60, 3))
predictions = jtrees.fit(jtrees.DGT(depth=2, epochs=3), x, x[:, 0] * x[:, 1], key=jax.random.key(0)).predict(x)
print(sum(read), predictions.tobytes().hex())
"""


@pytest.mark.slow
def test_a_later_process_reads_the_programs_and_predicts_equal_bits(tmp_path):
    """By default, and without a word on standard error."""
    names = ("JTREES_CACHE", *(name.upper() for name in SETTINGS))
    quiet = {name: value for name, value in os.environ.items() if name not in names}
    quiet |= {"XDG_CACHE_HOME": str(tmp_path)}
    outputs = []
    for _ in range(2):
        command = [sys.executable, "-W", "ignore::UserWarning", "-c", FIRST_FIT]
        process = subprocess.run(command, env=quiet, capture_output=True, text=True, check=True)
        assert process.stderr == ""
        outputs.append(process.stdout.split())
    (cold, compiled), (warm, read) = outputs
    assert int(cold) == 0 and int(warm) == len(entries(tmp_path)) > 0
    assert read == compiled


PROCESSORS = """
import hashlib, json, os, sys, warnings
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:int(sys.argv[1])])  # before XLA starts its threads
import jax
import numpy as np
import jtrees

warnings.simplefilter("ignore")
rng = np.random.default_rng(0)
x = rng.normal(size=(400, 5))
y = (x[:, 0] * x[:, 1] + x[:, 2] + 0.5 * rng.normal(size=400) > 0).astype(int)
fit = jtrees.fit(jtrees.Boosted(rounds=1), x, y, key=jax.random.key(0), task="classification")
arrays = *jax.tree.leaves(fit.model), fit.predict(x)
print(json.dumps([hashlib.md5(np.ascontiguousarray(a)).hexdigest() for a in arrays]))
"""


@pytest.mark.wide
@needs.mark(processors() > 1 and hasattr(os, "sched_setaffinity"), "Linux on two processors")
def test_a_fit_has_the_same_bits_on_any_number_of_processors():
    """Without the option of sums, Boosted had 75 rounds on one processor and 105 on two."""
    environment = os.environ | {"XLA_FLAGS": ""}  # the code that users get
    run = lambda count: subprocess.run(
        [sys.executable, "-c", PROCESSORS, count], capture_output=True, text=True, check=True, env=environment
    )
    assert run("1").stdout == run("2").stdout
