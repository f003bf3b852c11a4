"""How programs of a fit are compiled: which calls compile, ahead of the data, and in a folder for later processes."""

import logging
import os
import subprocess
import sys

import jax
from jax.experimental.compilation_cache import compilation_cache
import jax.numpy as jnp
import numpy as np
import pytest
from recipes import BAGGED, DGT, GET, LINEAR, RECIPES

import jtrees
from jtrees import caching, cli, compilation
from jtrees.estimators import TreeRegressor

KEY = jax.random.key(1)
ROWS, COLUMNS = 66, 3


def table(rows: int = 68, seed: int = 0):
    """A table that differs from a made one: oblique signal, units of its own, a share of equal values."""
    rng = np.random.default_rng(seed)
    x = 50 * rng.normal(size=(rows, COLUMNS)) + [10, 0, 200]
    x[: rows // 4, 1] = 0
    return x, np.where(x[:, 0] + x[:, 1] > 0, 300.0, -100.0) + x[:, 2] + rng.normal(size=rows)


# --- Programs in memory ----------------------------------------------------------------------------------------------


def test_a_function_compiles_once_for_each_shape_and_static_option(count_compilations):
    @compilation.once(static_argnames="power")
    def total(x, power):
        return (x**power).sum()

    x, large = jnp.arange(4.0), jnp.ones(compilation.SMALL_SIZE + 1)
    assert total(x, 2) == total.__wrapped__(x, 2) == 14
    assert total(large, 3) == len(large)
    assert count_compilations(lambda: (total(x, 2), total(large, 3))) == 0
    assert total(x, 3) == 36


@pytest.mark.slow
def test_programs_beyond_a_number_are_dropped(monkeypatch, count_compilations):
    total = compilation.often()(lambda x: x.sum())
    call = lambda: [total(jnp.ones(n)) for n in range(1, 4)]
    call()
    compilation.bound_memory()  # the fixture allows for many
    assert total.programs() == 3 and count_compilations(call) == 0
    monkeypatch.setattr(compilation, "KEPT_PROGRAMS", 2)
    compilation.bound_memory()
    assert total.programs() == 0
    call()
    assert total.programs() == 3


@pytest.mark.slow
@pytest.mark.exact
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", ["GET", "LatentTree", "TEL"])
def test_code_compiled_quickly_makes_the_same_model(monkeypatch, data, name):
    x, y = data
    predictions = []
    for size in (2**16, 0):
        monkeypatch.setattr(compilation, "SMALL_SIZE", size)
        predictions.append(jtrees.fit(RECIPES[name], x, y, key=KEY).predict(x))
    # Rounding of float32, through some updates.
    np.testing.assert_allclose(*predictions, rtol=1e-3, atol=1e-3 * np.ptp(y))


# --- Compilation ahead -----------------------------------------------------------------------------------------------

AHEAD = [GET.replace(starts=6), LINEAR, *(RECIPES[name] for name in ("DGT", "TEL", "LatentTree", "Sparse")), BAGGED]
OTHERS = [RECIPES[name] for name in ("RADDT", "CO2", "NonGreedy")]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [*AHEAD, *(pytest.param(recipe, marks=pytest.mark.wide) for recipe in OTHERS)])
def test_a_fit_after_a_warm_up_of_its_shape_compiles_nothing(recipe, count_compilations):
    assert count_compilations(lambda: jtrees.warmup(recipe, rows=ROWS, columns=COLUMNS)) > 0
    x, y = table()
    assert count_compilations(lambda: jtrees.fit(recipe, x, y, key=KEY).predict(x)) == 0


@pytest.mark.slow
def test_boosting_then_compiles_the_predictions_of_its_numbers_of_trees_alone(count_compilations):
    recipe = jtrees.Boosted(jtrees.GET(depth=2), rounds=12, learning_rate=0.3)
    jtrees.warmup(recipe, rows=ROWS, columns=COLUMNS)
    # A small table has five sums. Each predicts the rows that it left out with the program of their mean.
    assert count_compilations(lambda: jtrees.fit(recipe, *table(), key=KEY).loss) <= 1


CASES = {
    "classes": ({"classes": 3}, {"task": "classification"}),
    "targets": ({"outputs": 2}, {}),
    "loss": ({"task": jtrees.Regression(loss_function="gamma")},) * 2,
    "policy": ({"task": jtrees.Policy(2)},) * 2,
    "validation": ({"validation_rows": 37}, {"validation": table(38, seed=1)}),
    "held out": ({"held_out": 0.5}, {"held_out": 0.5}),
    "monotone": ({"monotone": True}, {"monotone": {1: -1}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_tasks_rows_to_evaluate_on_and_constraints_are_part_of_a_warm_up(case, count_compilations):
    shape, options = CASES[case]
    recipe, (x, y) = RECIPES["CO2"] if case == "monotone" else DGT, table()
    both, three = np.stack([y, -y], 1), np.digitize(y, np.quantile(y, [0.3, 0.6]))
    y = {"classes": three, "targets": both, "policy": both, "loss": y - y.min() + 1}.get(case, y)
    assert count_compilations(lambda: jtrees.warmup(recipe, rows=ROWS, columns=COLUMNS, **shape)) > 0
    assert count_compilations(lambda: jtrees.fit(recipe, x, y, key=KEY, **options).predict(x)) == 0


@pytest.mark.slow
def test_a_warm_up_takes_few_updates_and_leaves_fits_as_they_are():
    x, y = table()
    before = jtrees.fit(DGT, x, y, key=KEY).predict(x)
    seconds = jtrees.warmup(DGT.replace(epochs=10**7), rows=len(x), columns=COLUMNS)  # all would take many minutes
    assert 0 < seconds < 60
    np.testing.assert_array_equal(jtrees.fit(DGT, x, y, key=KEY).predict(x), before)


@pytest.mark.slow
def test_groups_by_name_need_no_names_in_a_warm_up():
    recipe = jtrees.Sparse(DGT, interactions=[["area", "age"]], epochs=4)
    assert jtrees.warmup(recipe, rows=ROWS, columns=COLUMNS) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 1}, "rows must be at least 2, got 1"),
        ({"columns": 0}, "columns must be at least 1, got 0"),
        ({"classes": 1}, "classes must be at least 2, got 1"),
        ({"classes": 2, "outputs": 2}, "classes must be None with outputs, got 2"),
        ({"task": "classification"}, "task must be a task, .*got 'classification'"),
        ({"validation_rows": -1}, "validation_rows must be at least 0, got -1"),
        ({"held_out": 1.0}, "held_out must be a number of at least 0 and below 1, got 1.0"),
        ({"held_out": 0.5, "validation_rows": 9}, "held_out must be 0 with a validation set, got 0.5"),
        ({"recipe": "GET"}, "recipe must be a recipe"),
    ],
)
def test_a_warm_up_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        jtrees.warmup(**{"recipe": DGT, "rows": 20, "columns": 2} | change)


# --- Programs in a folder --------------------------------------------------------------------------------------------

THRESHOLDS = ["compile_time_secs", "entry_size_bytes"]
SETTINGS = ["jax_compilation_cache_dir", *(f"jax_persistent_cache_min_{name}" for name in THRESHOLDS)]


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


@pytest.mark.usefixtures("no_folder")
def test_a_folder_keeps_small_programs_also_after_the_first_compilation(tmp_path):
    assert programs_read(double) == 0
    folder = jtrees.cache(tmp_path / "programs")
    assert folder == str(tmp_path / "programs") == folder_of_jax()
    assert programs_read(double) == 0
    assert os.listdir(folder)
    assert programs_read(double) == 1


@pytest.mark.usefixtures("no_folder")
@pytest.mark.parametrize("broken", [lambda entry: b"", lambda entry: entry[:-9], lambda entry: b"text" + entry[4:]])
def test_an_entry_that_cannot_be_read_is_replaced(tmp_path, broken):
    """A killed process leaves half of an entry: the next compiles the program again, and the one after it reads it."""
    jtrees.cache(tmp_path)
    double()
    [entry] = tmp_path.iterdir()
    entry.write_bytes(broken(entry.read_bytes()))
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        assert programs_read(double) == 0
    assert programs_read(double) == 1


@pytest.mark.usefixtures("no_folder")
def test_the_folder_by_default(tmp_path, monkeypatch):
    assert jtrees.cache() == str(tmp_path / "user" / "jtrees")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "of JAX"))
    assert jtrees.cache() == str(tmp_path / "of JAX")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    assert jtrees.cache() == str(tmp_path / ".cache" / "jtrees")
    monkeypatch.chdir(tmp_path)
    assert jtrees.cache("here") == str(tmp_path / "here")
    assert jtrees.cache("~/there") == str(tmp_path / "there")


@pytest.mark.usefixtures("no_folder")
def test_a_threshold_of_the_environment_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "7")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 7.0)
    jtrees.cache(tmp_path)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 7


@pytest.mark.usefixtures("no_folder")
def test_a_folder_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match="folder must be one that can be made and written to, got '/"):
            jtrees.cache(folder)
    for folder in ("", b"bytes"):
        with pytest.raises(ValueError, match="folder must be a path, got"):
            jtrees.cache(folder)  # type: ignore[arg-type]
    monkeypatch.setenv("JTREES_CACHE", __file__)
    with pytest.raises(ValueError, match="JTREES_CACHE: folder must be one that can be made and written to, got '"):
        caching.cache_by_environment()
    assert folder_of_jax() is None


@pytest.mark.slow
def test_the_environment_variable_switches_the_folder_on_at_import(tmp_path):
    code = "import jtrees, jax; print(jax.config.jax_compilation_cache_dir)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION")}
    environment["JTREES_CACHE"] = str(tmp_path / "programs")
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "programs")


@pytest.mark.usefixtures("no_folder")
@pytest.mark.parametrize("value, folder", [("", None), ("0", None), ("1", "user/jtrees"), ("programs", "programs")])
def test_values_of_the_environment_variable(value, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JTREES_CACHE", value)
    caching.cache_by_environment()
    assert folder_of_jax() == (None if folder is None else str(tmp_path / folder))


@pytest.mark.usefixtures("no_folder")
def test_the_command_line_keeps_programs_unless_told_not_to(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JTREES_CACHE", "0")
    cli.keep_programs()
    assert folder_of_jax() is None
    monkeypatch.delenv("JTREES_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", __file__)
    cli.keep_programs()
    error = capsys.readouterr().err
    assert error.startswith("jtrees: compiled programs are not kept: folder must be one") and error.count("\n") == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cli.keep_programs()
    assert folder_of_jax() == str(tmp_path / "jtrees")
    jax.config.update("jax_compilation_cache_dir", "of JAX")
    cli.keep_programs()
    assert folder_of_jax() == "of JAX"


# --- Advice ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_advice(no_folder, monkeypatch, caplog):
    """A process without advice so far, in which every fit is long."""
    monkeypatch.setattr(caching, "ADVICE", [])
    monkeypatch.setattr(caching, "LONG_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, "jtrees"):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("no_advice")
def test_a_long_first_fit_is_followed_by_one_line_of_advice(monkeypatch, caplog, tmp_path):
    def compiled():
        with caching.advising():
            jax.jit(lambda a: a + 1)(np.ones(3))

    monkeypatch.setattr(caching, "LARGE_SHARE", 0.0)
    monkeypatch.setattr(caching, "LONG_SECONDS", 5.0)
    compiled()
    assert not caplog.messages  # it was short
    monkeypatch.setattr(caching, "LONG_SECONDS", 0.0)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compiled()
    assert not caplog.messages  # there is a folder
    jax.config.update("jax_compilation_cache_dir", None)
    TreeRegressor(DGT).fit(*table(20))
    compiled()
    assert len(caplog.messages) == 1
    assert "s of this fit were compilation: jtrees.cache(), or JTREES_CACHE=1" in caplog.messages[0]


@pytest.mark.usefixtures("no_advice")
def test_a_fit_that_mostly_ran_is_followed_by_no_advice(caplog):
    with caching.advising():
        pass
    assert not caplog.messages


@pytest.mark.slow
@pytest.mark.usefixtures("no_advice")
def test_the_command_line_prints_the_advice_where_it_cannot_keep_programs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(caching, "LARGE_SHARE", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", __file__)
    x, y = table(20)
    np.savetxt(tmp_path / "t.csv", np.column_stack([x, y]), delimiter=",", header="a,b,c,y", comments="")
    options = ["--recipe", "DGT", "--set", "depth=1", "epochs=3", "widths=()"]
    assert cli.main(["fit", str(tmp_path / "t.csv"), "--target", "y", "--out", str(tmp_path / "m"), *options]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "programs" in line]
    assert len(lines) == 2 and lines[0].startswith("jtrees: compiled programs are not kept: folder must be")
    assert "s of this fit were compilation: jtrees.cache(), or JTREES_CACHE=1" in lines[1]
    assert not logging.getLogger("jtrees").handlers
