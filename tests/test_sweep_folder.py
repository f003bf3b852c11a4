"""Folders of sweeps: no finished run is lost or repeated, and runs of another sweep are refused."""

import dataclasses
import functools
import json
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest

import jtrees
from jtrees.selection.definition import definition
from tests import polynomials, wait_until
from tests.large_runs import output_of, pair, started
from tests.polynomials import Polynomials

KEY = jax.random.key(3)
rng = np.random.default_rng(0)
X = rng.uniform(-2, 2, (96, 2))
Y = X[:, 0] ** 3 - 2 * X[:, 0] + 0.3 * rng.normal(size=96)
DGT = jtrees.DGT(depth=1, epochs=4, batch_size=32, widths=(), precondition=0)
RATES = {"learning_rate": (0.01, 0.1)}

pytestmark = pytest.mark.usefixtures("standard_promotion")


def sweep(folder, recipe=None, x=X, y=Y, **options):
    options = {"grid": RATES, "seeds": 2, "validation": 3, "key": KEY} | options
    return jtrees.sweep(recipe or Polynomials(), x, y, folder=folder, **options)


def tune(folder, **options):
    options = TUNED | options
    return jtrees.tune(Polynomials(), X, Y, key=KEY, folder=folder, **options)


def same(a, b):
    """Two sweeps have the same numbers and states."""
    np.testing.assert_array_equal(a.losses, b.losses)
    np.testing.assert_array_equal(a.sizes, b.sizes)
    assert a.states.tolist() == b.states.tolist() and a.options == b.options


@pytest.fixture
def searches(monkeypatch):
    """The recipes that were fitted so far."""
    search, fitted = Polynomials.search, []

    async def counted(self, problem):
        fitted.append(self)
        return await search(self, problem)

    monkeypatch.setattr(Polynomials, "search", counted)
    return fitted


def test_a_second_sweep_repeats_no_run(tmp_path, searches):
    first = sweep(tmp_path)
    assert len(searches) == 12
    second = sweep(tmp_path, grid={"learning_rate": (value for value in RATES["learning_rate"])})
    assert len(searches) == 12
    same(first, second)
    same(first, sweep(None))
    np.testing.assert_allclose(first.seconds, second.seconds, atol=1e-3)
    numbers = [json.loads(file.read_text()) for file in run_files(tmp_path)]
    assert len(numbers) == 12
    for run in numbers:
        cell = RATES["learning_rate"].index(run["options"]["learning_rate"]), run["seed"], run["fold"]
        assert run["loss"] == first.losses[cell] and run["state"] == "finished"
    # Polynomials cannot be saved.
    with pytest.raises(ValueError, match="the best run must have a fit in memory or in the folder"):
        _ = second.fit
    # More seeds and more samples continue a sweep.
    count, draws = len(searches), {"grid": None, "space": {"learning_rate": jtrees.LogUniform(0.01, 0.1)}}
    first = sweep(tmp_path / "drawn", samples=2, **draws)
    extended = sweep(tmp_path / "drawn", samples=4, seeds=3, **draws)
    assert len(searches) == count + 4 * 3 * 3
    np.testing.assert_array_equal(extended.losses[:2, :2], first.losses)


def test_diverged_runs_are_kept_and_interrupted_runs_are_not(tmp_path, monkeypatch, searches):
    grid = {"learning_rate": (1e30, 0.5)}
    assert sweep(tmp_path / "a", grid=grid).states[0].tolist() == [["diverged"] * 3] * 2
    sweep(tmp_path / "a", grid=grid)
    assert len(searches) == 12
    search = Polynomials.search

    async def interrupted(self, problem):
        if len(searches) == 12 + 5:
            signal.raise_signal(signal.SIGINT)
        return await search(self, problem)

    monkeypatch.setattr(Polynomials, "search", interrupted)
    with pytest.warns(UserWarning, match="the sweep was interrupted"):
        stopped = sweep(tmp_path / "b", batch=1)
    assert 0 < (stopped.states == "finished").sum() < 12
    monkeypatch.setattr(Polynomials, "search", search)
    same(sweep(tmp_path / "b"), sweep(None))


def test_an_error_loses_only_the_runs_in_progress(tmp_path, monkeypatch, searches):
    """So does the death of the process: the runs of each batch are written before the next batch begins."""
    search = Polynomials.search

    async def failing(self, problem):
        if len(searches) == 5:
            raise RuntimeError
        return await search(self, problem)

    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setattr(Polynomials, "search", failing)
        sweep(tmp_path, batch=2)
    same(sweep(tmp_path), sweep(None))
    assert len(searches) == 5 + (12 - 4) + 12


FRAME = pd.DataFrame({"p": X[:, 0], "q": X[:, 1], "level": np.where(X[:, 0] > 0, "a", "b")})
TUNED = {"grid": {"depth": (1, 2, 3)}, "validation": 3}
# What differs, the first call and the second.
CHANGES = {
    "x": (sweep, {}, sweep, {"x": X + 1}),
    "y": (sweep, {}, sweep, {"y": Y + 1e-9}),
    "key": (sweep, {}, sweep, {"key": jax.random.key(4)}),
    "learning_rate": (sweep, {}, sweep, {"recipe": Polynomials(learning_rate=0.25)}),
    "recipe": (sweep, {}, sweep, {"recipe": DGT}),
    "x, of other folds": (sweep, {}, sweep, {"validation": 4}),
    "sample_weight": (sweep, {}, sweep, {"sample_weight": np.arange(1.0, 97)}),
    "columns": (sweep, {"x": FRAME}, sweep, {"x": FRAME.rename(columns={"p": "q", "q": "p"})}),
    "columns, levels": (sweep, {"x": FRAME}, sweep, {"x": FRAME.replace({"level": {"a": "dog", "b": "eel"}})}),
    "columns, roles": (sweep, {"x": FRAME}, sweep, {"x": FRAME, "columns": {"q": "drop"}}),
    "task": (sweep, {}, sweep, {"task": jtrees.Regression(loss_function="huber")}),
    "runs": (sweep, {"grid": TUNED["grid"], "seeds": 1}, tune, {}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_sweep_is_refused_with_what_differs(tmp_path, searches, name):
    first, options, second, changes = CHANGES[name]
    first(tmp_path, **options)
    with pytest.raises(ValueError, match=rf"folder must hold runs of this sweep: '.*' has {name.partition(',')[0]} "):
        second(tmp_path, **changes)
    if name == "y":  # nor are the runs taken without the description
        (tmp_path / "sweep.json").unlink()
        same(sweep(tmp_path, **changes), sweep(None, **changes))
        assert len(searches) == 36


def test_the_order_and_the_length_of_a_grid_do_not_matter(tmp_path, searches):
    grid = {"learning_rate": (0.01, 0.1), "depth": (1, 2)}
    first = sweep(tmp_path, grid=grid, seeds=1, validation=0.25)
    other = sweep(tmp_path, grid={"depth": (2, 1), "learning_rate": (0.1, 0.01)}, seeds=1, validation=0.25)
    assert len(searches) == 4
    losses_of = lambda result: {
        tuple(sorted(options.items())): loss.item() for options, loss in zip(result.options, result.losses, strict=True)
    }
    assert losses_of(first) == losses_of(other)
    larger = sweep(tmp_path, grid={"learning_rate": (0.01, 0.1, 0.5), "depth": (1, 2)}, seeds=1, validation=0.25)
    assert len(searches) == 6
    assert losses_of(larger).items() >= losses_of(first).items()


def holding(values):
    """A rule whose closure holds values that it does not use."""
    return lambda rate: optax.adam(rate) if values is not None else None


def recursive():
    def rule(rate, depth=1):
        return rule(rate, depth - 1) if depth else optax.adam(rate)

    return rule


@pytest.mark.parametrize("name", ["jtrees", "jax_enable_x64"])
def test_another_version_or_precision_is_refused(tmp_path, searches, monkeypatch, name):
    sweep(tmp_path)
    if name == "jtrees":
        monkeypatch.setattr(jtrees.selection.folder, "__version__", "9.9.9")
    with jax.enable_x64(name != "jtrees"), pytest.raises(ValueError, match=f" has {name} "):
        sweep(tmp_path)


def test_values_in_closures_are_compared_whole(tmp_path):
    recipe = jtrees.FromMethod(make=jtrees.methods.get, options={"alpha": 4.0}, static={"depth": 1}, epochs=1)
    numbers = np.arange(5000.0)  # too many to be printed
    call = lambda rule: sweep(tmp_path, recipe.replace(rule=rule), grid={"epochs": (1,)}, seeds=1, validation=0.25)
    call(holding(numbers))
    call(holding(numbers.copy()))
    rest = [holding(np.where(numbers == 2500, 0, numbers)), jax.jit(holding(numbers + 1)), recursive()]
    for rule in (*rest, holding({"a", "b"})):
        with pytest.raises(ValueError, match="has rule"):
            call(rule)


def test_sets_have_the_same_text_in_any_order():
    """Text in a set has another order in each process."""
    first, second = {0, 8}, {8, 0}
    assert list(first) != list(second)
    assert definition("rule", holding(first)) == definition("rule", holding(second))


# --- What a loss reads -----------------------------------------------------------------------------------------------

DELTA, TABLE = 0.1, {"delta": 0.1}


class Pinball:
    """A loss that is an object."""

    def __init__(self, level):
        self.level = level

    def __call__(self, outputs, y):
        return jnp.maximum(self.level * (y - outputs), (self.level - 1) * (y - outputs))

    def method(self, outputs, y):
        return self(outputs, y)


@dataclasses.dataclass(frozen=True)
class OwnLoss(jtrees.losses.Loss):
    """A loss with a formula."""

    level: float = 0.5

    def of_predictions(self, predictions, y):
        return jnp.square(predictions - y) * self.level


def helper(outputs, y):
    return jnp.abs(outputs - y) * DELTA


def reads_global(outputs, y):
    return jnp.abs(outputs - y) * DELTA


def reads_table(outputs, y):
    return (lambda: jnp.abs(outputs - y) * TABLE["delta"])()


def calls_helper(outputs, y):
    return helper(outputs, y)


def defaults(level):
    return lambda outputs, y, *, level=level: jnp.abs(outputs - y) * level


@jax.custom_jvp
def with_rule(outputs, y):
    return jnp.square(outputs - y)


with_rule.defjvp(lambda primals, tangents: (with_rule(*primals), tangents[0] * DELTA))


PAIRS = {  # losses that differ
    "objects": (Pinball(0.1), Pinball(0.9)),
    "methods": (Pinball(0.1).method, Pinball(0.9).method),
    "partial": (functools.partial(Pinball.__call__, Pinball(0.1)), functools.partial(Pinball.__call__, Pinball(0.2))),
    "defaults": (defaults(0.1), defaults(0.2)),
    "losses": (OwnLoss(0.5), OwnLoss(0.6)),
    "names": (jtrees.losses.CustomLoss(helper, name="a 0.1"), jtrees.losses.CustomLoss(helper, name="a 0.2")),
    "libraries": (jnp.abs, jnp.square),
    "vmap": (jax.vmap(helper), jax.vmap(reads_table)),
}


class Scaled:
    """A function of the user's own with attributes, which looks like a wrapper of a library."""

    def __init__(self, factor):
        functools.update_wrapper(self, helper)
        self.factor = factor


class Ruled:
    rule = functools.partial(helper, 1.0)


class OtherwiseRuled:
    rule = functools.partial(helper, 2.0)


OtherwiseRuled.__qualname__ = Ruled.__qualname__
PAIRS |= {"wrapped": (Scaled(1.0), Scaled(5.0)), "partial of a class": (Ruled, OtherwiseRuled)}


@pytest.mark.parametrize("name", PAIRS)
def test_losses_that_differ_have_other_definitions(name):
    first, second = (definition("task", loss) for loss in PAIRS[name])
    assert first != second
    assert [first, second] == [definition("task", loss) for loss in PAIRS[name]]
    assert " at 0x" not in first


@pytest.mark.parametrize(
    "loss",
    [reads_global, reads_table, calls_helper, with_rule, jax.jit(reads_global), Pinball(0.1)],
    ids=["global", "table", "helper", "rule", "jit", "object"],
)
def test_globals_and_helpers_are_a_part_of_a_loss(monkeypatch, loss):
    before = definition("task", loss)
    monkeypatch.setitem(globals(), "UNREAD", 2)
    assert definition("task", loss) == before
    monkeypatch.setitem(globals(), "DELTA", 0.2)
    monkeypatch.setitem(TABLE, "delta", 0.2)
    monkeypatch.setattr(Pinball, "__call__", lambda self, outputs, y: helper(outputs, y))
    assert definition("task", loss) != before


def reads_module(outputs, y):
    return polynomials.values([1.0], outputs)


def imports(outputs, y):
    from tests import polynomials

    return polynomials.values([1.0], outputs)


class Slotted:
    __slots__ = ("level",)

    def __call__(self, outputs, y):
        return outputs - y


@pytest.mark.parametrize(
    "loss",
    [reads_module, imports, Slotted(), holding(np.random.default_rng(0))],
    ids=["module", "import", "slots", "closure"],
)
def test_what_cannot_be_compared_is_refused_before_the_first_run(tmp_path, searches, loss):
    task = jtrees.Regression(loss_function=loss)
    with pytest.raises(ValueError, match=r"task must be defined by code, .* got .*: give it a version of your own"):
        sweep(tmp_path, task=task)
    assert not searches and not [*tmp_path.iterdir()]
    named = jtrees.losses.CustomLoss(loss, name="pinball 0.1")
    assert "pinball 0.1" in definition("task", jtrees.Regression(loss_function=named))


def test_the_code_of_a_recipe_and_its_version(monkeypatch):
    class Mine(Polynomials):
        pass

    before = definition("recipe", Mine)
    monkeypatch.setattr(Mine, "search", lambda self, problem: None, raising=False)
    changed = definition("recipe", Mine)
    assert changed != before
    monkeypatch.setattr(Mine, "version", "1", raising=False)
    named = definition("recipe", Mine)
    monkeypatch.setattr(Mine, "search", lambda self, problem: 1)
    assert named == definition("recipe", Mine) != changed


def run_files(folder, kind="json"):
    return sorted(file for file in folder.glob(f"*.{kind}") if file.stem != "sweep")


def test_damaged_files_are_made_again(tmp_path, searches):
    first = sweep(tmp_path)
    damaged = ("", "{}", "[1", '{"loss": 1}', "null", "[]", "3")
    for file, contents in zip(run_files(tmp_path), damaged, strict=False):
        file.write_text(contents)
    same(sweep(tmp_path), first)
    assert len(searches) == 12 + len(damaged)
    tune(tmp_path / "tuned")
    files = run_files(tmp_path / "tuned", "npy")
    files[0].write_bytes(b"")
    files[1].unlink()
    count = len(searches)
    tune(tmp_path / "tuned")
    assert len(searches) == count + 3  # with the fit to all rows


def test_a_run_without_its_file_of_the_fit_is_not_finished(tmp_path):
    call = lambda: sweep(tmp_path, DGT, seeds=1, validation=0.25)
    first = call()
    [gone, _] = run_files(tmp_path, "jtrees")
    gone.unlink()
    second = call()
    assert gone.exists() and all(fit is not None for fit in second.fits.ravel())
    same(second, first)


@pytest.mark.parametrize("contents", ["null", "{"])
def test_a_damaged_description_is_an_error_with_a_remedy(tmp_path, searches, contents):
    sweep(tmp_path)
    (tmp_path / "sweep.json").write_text(contents)
    with pytest.raises(
        ValueError, match=r"folder must hold a complete sweep.json, got the damaged .*: delete the file"
    ):
        sweep(tmp_path)
    (tmp_path / "sweep.json").unlink()
    same(sweep(tmp_path), sweep(None))
    assert len(searches) == 24


def test_a_report_that_cannot_be_saved_costs_its_fit_alone(tmp_path, monkeypatch):
    training = jtrees.DGT.search

    async def with_report(self, problem):
        return (await training(self, problem))._replace(report=Unsaved(value=object()))

    monkeypatch.setattr(jtrees.DGT, "search", with_report)
    first = sweep(tmp_path, DGT, seeds=1, validation=0.25)
    second = sweep(tmp_path, DGT, seeds=1, validation=0.25)
    same(first, second)
    assert first.fit is not None and second.fits.ravel().tolist() == [None, None] and len(run_files(tmp_path)) == 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unsaved(jtrees.search.Report):
    value: object = None


def test_shares_are_disjoint_and_complete(tmp_path, searches):
    parts = [sweep(tmp_path, share=(k, 3)) for k in range(3)]
    assert len(searches) == 12
    finished = np.array([part.states == "finished" for part in parts])
    assert finished[-1].all() and (np.diff(finished.astype(int), axis=0) >= 0).all()
    same(sweep(tmp_path), sweep(None))
    shares = [sweep(tmp_path / str(k), seeds=1, validation=0.25, share=(np.int64(k), np.int64(6))) for k in range(6)]
    states = np.array([part.states.ravel() for part in shares])
    assert (states == "finished").sum() == 2 and any((part == "not started").all() for part in states)
    assert sweep(None, seeds=[1, 1]).states.shape == (2, 1, 3)  # a seed counts once


@pytest.mark.parametrize("share", [(2, 2), (-1, 2), (0.5, 2), 3], ids=str)
def test_bad_shares_are_refused(tmp_path, share):
    with pytest.raises(ValueError, match=r"share must be \(k, n\) with whole numbers 0 <= k < n, got "):
        sweep(tmp_path, share=share)
    with pytest.raises(ValueError, match="folder must be given with a share"):
        sweep(None, share=(0, 2))


@pytest.mark.parametrize("halving", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_tune_continues_and_chooses_the_same(tmp_path, searches, halving):
    x, y = np.tile(X, (9, 1)), np.tile(Y, 9)
    options = {"grid": {"depth": (1, 2, 3), "learning_rate": (0.1, 0.5)}, "validation": 3, "halving": halving}
    call = lambda folder: jtrees.tune(Polynomials(), x, y, key=KEY, folder=folder, **options)
    first, count = call(tmp_path), len(searches)
    reloaded = call(tmp_path)
    assert len(searches) == count + 1  # the fit to all rows
    trials = lambda fit: [trial._replace(options=tuple(trial.options.items())) for trial in fit.report.tuning.trials]
    assert trials(reloaded) == trials(first) == trials(call(None))
    assert reloaded.report.tuning.options == first.report.tuning.options


# --- The example for pods --------------------------------------------------------------------------------------------

SIZE = ("--samples", 3, "--seeds", 2, "--epochs", 1)


def run_times(out):
    """The times of the files of the finished runs."""
    return {path.name: path.stat().st_mtime_ns for path in (out / "runs").glob("*.json")}


@pytest.mark.wide
def test_a_sweep_whose_process_is_killed_resumes_and_repeats_no_finished_run(tmp_path):
    first, second = pair("sweep_pod", out := tmp_path / "sweep", *SIZE)
    wait_until(lambda: len(run_times(out)) >= 2 or first.poll() is not None)
    before = run_times(out)
    second.kill()
    _, messages = first.communicate(timeout=200)
    second.communicate()
    assert first.returncode == os.EX_TEMPFAIL, messages
    assert messages.splitlines()[-1] == "another process has ended: the same command resumes the run"
    texts = [output_of(process) for process in pair("sweep_pod", out, *SIZE)]
    assert "best of 6 runs: {" in texts[0] and "best" not in texts[1]
    assert before.items() <= run_times(out).items()
    frame = pd.read_csv(out / "runs.csv")
    assert len(frame) == 3 and np.isfinite(frame.loss).all() and jtrees.load(out / "best.jtrees").tree is not None


@pytest.mark.wide
def test_hosts_with_shares_make_all_runs(tmp_path):
    for host in range(2):
        output_of(started("sweep_pod", tmp_path, *SIZE, "--share", host, 2))
    runs = run_times(tmp_path)
    assert "best of 6 runs: {" in output_of(started("sweep_pod", tmp_path, *SIZE))
    assert run_times(tmp_path) == runs
