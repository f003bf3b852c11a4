"""The first call: compilation ahead of the data, and programs kept for later processes."""

import logging
import os
import subprocess
import sys

import jax
from jax.experimental.compilation_cache import compilation_cache
import numpy as np
import pytest

import jtrees
from jtrees import caching, cli
from jtrees.estimators import TreeRegressor

KEY = jax.random.key(1)
ROWS, COLUMNS = 66, 3


def table(rows: int = 68, seed: int = 0):
    """A table that differs from a made one: oblique signal, units of its own, a share of equal values."""
    rng = np.random.default_rng(seed)
    x = 50 * rng.normal(size=(rows, COLUMNS)) + [10, 0, 200]
    x[: rows // 4, 1] = 0
    return x, np.where(x[:, 0] + x[:, 1] > 0, 300.0, -100.0) + x[:, 2] + rng.normal(size=rows)


# --- Compilation ahead -----------------------------------------------------------------------------------------------

GET = jtrees.GET(depth=2, starts=6, epochs=30)
DGT = jtrees.DGT(depth=2, epochs=30, widths=(5,))
OTHERS = [
    jtrees.RADDT(depth=2, starts=2, epochs=10),
    jtrees.CO2(depth=2, epochs=10),
    jtrees.NonGreedy(depth=2, greedy_epochs=5, epochs=10),
]
RECIPES = [
    GET,
    GET.replace(leaves="linear", starts=2, epochs=40),
    DGT,
    jtrees.TEL(depth=2, trees=3, epochs=20),
    jtrees.LatentTree(depth=2, epochs=20),
    jtrees.Bagged(DGT, trees=2),
    jtrees.Sparse(DGT, terms=1, epochs=10),
    *(pytest.param(one, marks=pytest.mark.wide) for one in OTHERS),
]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda one: f"{type(one).__name__} {getattr(one, 'leaves', '')}")
def test_a_fit_after_a_warm_up_of_its_shape_compiles_nothing(recipe, count_compilations):
    warm_up = lambda: jtrees.warmup(recipe, rows=ROWS, columns=COLUMNS)
    assert count_compilations(warm_up) > 0
    x, y = table()
    fit = lambda: jtrees.fit(recipe, x, y, key=KEY).predict(x)
    assert count_compilations(fit) == 0


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
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_tasks_and_rows_to_evaluate_on_are_part_of_a_warm_up(case, count_compilations):
    shape, options = CASES[case]
    x, y = table()
    both, three = np.stack([y, -y], 1), np.digitize(y, np.quantile(y, [0.3, 0.6]))
    y = {"classes": three, "targets": both, "policy": both, "loss": y - y.min() + 1}.get(case, y)
    assert count_compilations(lambda: jtrees.warmup(DGT, rows=ROWS, columns=COLUMNS, **shape)) > 0
    fit = lambda: jtrees.fit(DGT, x, y, key=KEY, **options).predict(x)
    assert count_compilations(fit) == 0


@pytest.mark.slow
def test_a_warm_up_takes_few_updates_and_leaves_fits_as_they_are():
    x, y = table()
    before = jtrees.fit(DGT, x, y, key=KEY).predict(x)
    seconds = jtrees.warmup(DGT.replace(epochs=10**7), rows=len(x), columns=COLUMNS)  # all would take many minutes
    assert 0 < seconds < 60
    np.testing.assert_array_equal(jtrees.fit(DGT, x, y, key=KEY).predict(x), before)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"rows": 1}, "rows must be at least 2, got 1"),
        ({"columns": 0}, "columns must be at least 1, got 0"),
        ({"classes": 1}, "classes must be at least 2, got 1"),
        ({"classes": 2, "outputs": 2}, "classes must be None with outputs, got 2"),
        ({"task": "classification"}, "task must be a task, such as jtrees.Classification.3., got 'classification'"),
        ({"validation_rows": -1}, "validation_rows must be at least 0, got -1"),
        ({"held_out": 1.0}, "held_out must be a number of at least 0 and below 1, got 1.0"),
        ({"held_out": 0.5, "validation_rows": 9}, "held_out must be 0 with a validation set, got 0.5"),
    ],
)
def test_a_warm_up_refuses(given, message):
    with pytest.raises(ValueError, match=message):
        jtrees.warmup(DGT, **{"rows": 20, "columns": 2} | given)
    with pytest.raises(ValueError, match="recipe must be a recipe"):
        jtrees.warmup("GET", rows=20, columns=2)  # type: ignore[arg-type]


# --- Programs in a folder --------------------------------------------------------------------------------------------

THRESHOLDS = ["compile_time_secs", "entry_size_bytes"]
SETTINGS = ["jax_compilation_cache_dir", *(f"jax_persistent_cache_min_{name}" for name in THRESHOLDS)]


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


def found_in_folder(fn, *args) -> int:
    """Number of programs that are read from a folder while ``fn(*args)`` runs."""
    events = []
    jax.monitoring.register_event_listener(listen := lambda event, **_: events.append(event))
    fn(*args)
    jax.monitoring.unregister_event_listener(listen)
    return sum(event.endswith("cache_hits") for event in events)


@pytest.mark.usefixtures("no_folder")
def test_a_folder_keeps_small_programs_also_after_the_first_compilation(tmp_path):
    double = lambda: jax.jit(lambda a: 2 * a)(np.ones(3))  # a new function: JAX compiles at every call
    assert found_in_folder(double) == 0
    folder = jtrees.cache(tmp_path / "programs")
    assert folder == str(tmp_path / "programs") == jax.config.jax_compilation_cache_dir
    assert found_in_folder(double) == 0
    assert os.listdir(folder)
    assert found_in_folder(double) == 1


@pytest.mark.usefixtures("no_folder")
@pytest.mark.parametrize("broken", [lambda entry: b"", lambda entry: entry[:-9], lambda entry: b"text" + entry[4:]])
def test_an_entry_that_cannot_be_read_is_replaced(tmp_path, broken):
    """A killed process leaves half of an entry: the next compiles the program again, and the one after it reads it."""
    double = lambda: jax.jit(lambda a: 2 * a)(np.ones(3))
    jtrees.cache(tmp_path)
    double()
    [entry] = tmp_path.iterdir()
    entry.write_bytes(broken(entry.read_bytes()))
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        assert found_in_folder(double) == 0
    assert found_in_folder(double) == 1


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
def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        expected = f"folder must be one that can be made and written to, got '{str(folder)[:60]}"
        with pytest.raises(ValueError, match=expected):
            jtrees.cache(folder)
    for folder in ("", b"bytes"):
        with pytest.raises(ValueError, match="folder must be a path, got"):
            jtrees.cache(folder)  # type: ignore[arg-type]
    assert jax.config.jax_compilation_cache_dir is None


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
    assert jax.config.jax_compilation_cache_dir == (None if folder is None else str(tmp_path / folder))


@pytest.mark.usefixtures("no_folder")
def test_an_environment_variable_that_names_no_folder_is_refused(monkeypatch):
    monkeypatch.setenv("JTREES_CACHE", __file__)
    with pytest.raises(ValueError, match="JTREES_CACHE: folder must be one that can be made and written to, got '"):
        caching.cache_by_environment()


@pytest.mark.usefixtures("no_folder")
def test_the_command_line_keeps_programs_unless_told_not_to(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JTREES_CACHE", "0")
    cli.keep_programs()
    assert jax.config.jax_compilation_cache_dir is None
    monkeypatch.delenv("JTREES_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", __file__)
    cli.keep_programs()
    error = capsys.readouterr().err
    assert error.startswith("jtrees: compiled programs are not kept: folder must be one") and error.count("\n") == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cli.keep_programs()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "jtrees")
    jax.config.update("jax_compilation_cache_dir", "of JAX")
    cli.keep_programs()
    assert jax.config.jax_compilation_cache_dir == "of JAX"


# --- Advice ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("no_folder")
def test_a_long_first_fit_is_followed_by_one_line_of_advice(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(caching, "_SAID", [])
    monkeypatch.setattr(caching, "_LARGE", 0.0)

    def compiled():
        with caching.advising():
            jax.jit(lambda a: a + 1)(np.ones(3))

    with caplog.at_level(logging.INFO, "jtrees"):
        compiled()
        assert not caplog.messages  # it was short
        monkeypatch.setattr(caching, "_LONG", 0.0)
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        compiled()
        assert not caplog.messages  # there is a folder
        jax.config.update("jax_compilation_cache_dir", None)
        TreeRegressor(DGT.replace(epochs=3)).fit(*table(20))
        compiled()
    assert len(caplog.messages) == 1
    assert "s of this fit were compilation: jtrees.cache(), or JTREES_CACHE=1" in caplog.messages[0]


@pytest.mark.usefixtures("no_folder")
def test_a_fit_that_mostly_ran_is_followed_by_no_advice(monkeypatch, caplog):
    monkeypatch.setattr(caching, "_SAID", [])
    monkeypatch.setattr(caching, "_LONG", 0.0)
    with caplog.at_level(logging.INFO, "jtrees"), caching.advising():
        pass
    assert not caplog.messages


@pytest.mark.usefixtures("no_folder")
def test_the_command_line_prints_the_advice_where_it_cannot_keep_programs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(caching, "_SAID", [])
    monkeypatch.setattr(caching, "_LONG", 0.0)
    monkeypatch.setattr(caching, "_LARGE", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", __file__)
    x, y = table(20)
    np.savetxt(tmp_path / "t.csv", np.column_stack([x, y]), delimiter=",", header="a,b,c,y", comments="")
    how = ["--recipe", "DGT", "--set", "depth=1", "epochs=3", "widths=()"]
    assert cli.main(["fit", str(tmp_path / "t.csv"), "--target", "y", "--out", str(tmp_path / "m"), *how]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "programs" in line]
    assert len(said) == 2 and said[0].startswith("jtrees: compiled programs are not kept: folder must be")
    assert "s of this fit were compilation: jtrees.cache(), or JTREES_CACHE=1" in said[1]
    assert not logging.getLogger("jtrees").handlers


# --- Constraints by column -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_monotone_fit_compiles_nothing_after_a_warm_up_for_it(count_compilations):
    recipe = jtrees.CO2(depth=2, epochs=3, precondition=0)
    jtrees.warmup(recipe, rows=ROWS, columns=COLUMNS, monotone=True)
    x, y = table()
    fit = lambda: jtrees.fit(recipe, x, y, key=KEY, monotone={1: -1}).predict(x)
    assert count_compilations(fit) == 0


def test_groups_by_name_need_no_names_in_a_warm_up():
    recipe = jtrees.Sparse(DGT, interactions=[["area", "age"]], epochs=10)
    assert jtrees.warmup(recipe, rows=ROWS, columns=COLUMNS) > 0
