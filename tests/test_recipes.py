"""A fit from the door to the report: rounds, Ctrl-C, time, progress, what is refused. The recipes: test_battery."""

import builtins
import contextlib
import itertools
import os
import signal
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
from polynomials import Polynomials
import pytest

import jtrees
from jtrees import recipes
from jtrees.recipes import Rounds, Watch

KEY = jax.random.key(0)
FOR_EVER = Polynomials(steps=10_000_000)


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (64, 2))  # 64: a bucket, so that nothing is padded
    return x, 3 + x[:, 0] - 2 * x[:, 0] ** 2


def fit(table, recipe=None, **options):
    return jtrees.fit(recipe or Polynomials(), *table, key=KEY, **options)


# --- Rounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 3, 255, 256, 257, 997])
@pytest.mark.parametrize(("elements", "stages"), [(1, 1), (2**18, 3), (2**19 + 1, 1), (2**20, 3), (2**40, 2)])
def test_rounds_cover_every_step_of_every_stage_once(steps, elements, stages):
    rounds = Rounds.of(steps, elements, stages)
    within = [int(rounds.within(i)) for i in range(rounds.count)]
    seen = [(i // rounds.a_stage, rounds.before(i) + step) for i, size in enumerate(within) for step in range(size)]
    assert seen == [(stage, step) for stage in range(stages) for step in range(steps)]
    assert max(within) <= min(256, max(2, 2**25 // elements))  # about half a second
    assert min(within) > max(within) - rounds.a_stage  # of about equal size: nobody waits for a last step by itself


def test_rounds_say_the_same_of_traced_numbers():
    rounds = Rounds.of(997, 2**22, 2)
    i = jnp.arange(rounds.count)
    within, before = jax.jit(jax.vmap(lambda i: (rounds.within(i), rounds.before(i))))(i)
    np.testing.assert_array_equal(within, [int(rounds.within(i)) for i in range(rounds.count)])
    np.testing.assert_array_equal(before, [rounds.before(i) for i in range(rounds.count)])


# --- A fit -----------------------------------------------------------------------------------------------------------


search = jax.jit(lambda recipe, table, key: recipe.search(None, table, None, key=key))


def test_a_fit_in_rounds_is_the_pure_search(table):
    recipe = Polynomials()  # 103 steps: rounds of 26, and one of 25
    result = fit(table, recipe)
    assert result.step == 103 and result.report["ended"] == "finished"
    assert result.report["recipe"]["name"] == "Polynomials"
    assert result.history.shape == (103,) and np.isfinite(result.history).all()  # no tail of NaN
    whole = recipe.table(*table, None, "regression")
    unit = recipe.scale(whole).unit(whole)
    found = search(recipe.checked(whole), unit, jax.random.split(KEY, 3)[1])
    # Float32: two programs, in which a sum may be rounded otherwise.
    np.testing.assert_allclose(found.model, result.model.coefficients, rtol=1e-5)
    # The history is of losses before each update: the first is that of the start.
    first = recipe.begin(None, unit, key=jax.random.split(KEY, 3)[1])[0]
    np.testing.assert_allclose(result.history[0], recipe.mse(first, unit), rtol=1e-6)
    assert result.loss == pytest.approx(np.mean((result.model.predict(table[0]) - table[1]) ** 2), rel=1e-12)


def test_a_search_is_vmapped_over_numbers_keys_and_weights(table):
    recipe = Polynomials()
    whole = recipe.table(*table, None, "regression")
    unit = recipe.scale(whole).unit(whole)
    rates, keys = jnp.asarray([0.1, 0.5]), jax.random.split(KEY, 2)
    weights = jnp.stack([jnp.ones(64), jnp.arange(64.0) % 2])

    of = lambda rate, key, weight: (recipe.replace(learning_rate=rate), unit.replace(weight=weight), key)
    together = jax.jit(jax.vmap(lambda *one: search(*of(*one))))(rates, keys, weights)
    for i, one in enumerate(zip(rates, keys, weights, strict=True)):
        np.testing.assert_allclose(together.model[i], search(*of(*one)).model, rtol=1e-5)  # float32, a hundred updates


def test_a_second_fit_of_other_numbers_compiles_nothing(table, count_compilations):
    fit(table)
    again = lambda: fit(table, Polynomials(learning_rate=0.1)).model.coefficients
    assert count_compilations(again) == 0
    whole = lambda: fit((table[0][:63], table[1][:63]), Polynomials(learning_rate=0.2)).model.coefficients
    assert count_compilations(whole) == 0  # 63 rows are padded to 64


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def handler_of_ours():
    """So that a signal which the fit does not catch fails a test, and does not end the whole run."""
    got = []
    handler = lambda *_: got.append(1)
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield handler, got
    finally:
        signal.signal(signal.SIGINT, before)


in_main_thread = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals reach the main thread alone"
)


@in_main_thread
def test_ctrl_c_ends_a_fit_with_the_best_so_far(table):
    with handler_of_ours() as (ours, got):

        def press():
            while signal.getsignal(signal.SIGINT) is ours:  # the fit has not begun to listen
                time.sleep(0.01)
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)

        presses = threading.Thread(target=press)
        presses.start()
        result = fit(table, FOR_EVER)
        presses.join()
        assert signal.getsignal(signal.SIGINT) is ours
        assert not got
    assert result.report["ended"] == "interrupted"
    assert 0 < result.step == len(result.history) < FOR_EVER.steps
    assert np.isfinite(result.history).all()
    assert result.loss < 0.3 * np.var(table[1])  # after one round it is far below


@in_main_thread
def test_ctrl_c_twice_breaks_off():
    watch = Watch()
    with handler_of_ours() as (ours, got):
        with pytest.raises(KeyboardInterrupt), watch.listening():
            signal.raise_signal(signal.SIGINT)
            assert watch.ended == "interrupted"
            assert not watch.goes_on()
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is ours
        signal.raise_signal(signal.SIGINT)
        assert got == [1]


@in_main_thread
def test_the_handler_is_restored_after_an_error(table):
    with handler_of_ours() as (ours, _):
        with pytest.raises(FloatingPointError):
            fit(table, Polynomials(learning_rate=1e30))
        assert signal.getsignal(signal.SIGINT) is ours


def test_fits_run_in_other_threads(table):
    before, results = signal.getsignal(signal.SIGINT), []
    threads = [threading.Thread(target=lambda: results.append(fit(table))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(results[0].history, results[1].history)
    assert results[0].report["ended"] == "finished"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_fit_predicts_as_its_model_does(table):
    result = fit(table)
    np.testing.assert_array_equal(result.predict(table[0]), result.model.predict(table[0]))


# --- Time ------------------------------------------------------------------------------------------------------------


def test_max_seconds_end_a_fit_with_the_best_so_far(table, monkeypatch):
    """By a clock that ticks a second at each look: at the start of the fit, of the search, and after each round."""
    ticks = itertools.count()
    monkeypatch.setattr(recipes, "time", types.SimpleNamespace(monotonic=lambda: float(next(ticks))))
    result = fit(table, FOR_EVER, max_seconds=10)
    assert result.report["ended"] == "max_seconds"
    assert result.step == len(result.history) == 9 * 32  # half of a tenth round would have been late
    assert result.loss < 1e-2 * np.var(table[1])


def test_the_shortest_time_gives_a_model(table):
    result = fit(table, FOR_EVER, max_seconds=1e-6)
    assert result.report["ended"] == "max_seconds"
    assert len(result.history) == 32


def test_time_enough_is_said_to_be(table):
    result = fit(table, max_seconds=600)
    assert result.report["ended"] == "finished"
    assert len(result.history) == Polynomials().steps


def test_the_last_round_is_not_late():
    """Whoever has done all is finished, however long it took."""
    watch = Watch(deadline=time.monotonic() - 1)
    with watch.over(1):
        assert not watch.seen(0, np.ones(3))
    assert watch.ended == "finished"


# --- Progress --------------------------------------------------------------------------------------------------------


def test_progress_without_rich_is_some_lines(table, capsys, monkeypatch):
    real = builtins.__import__

    def without_rich(name, *args, **options):
        if name.startswith("rich"):
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    result = fit(table, Polynomials(a_round=2), progress=True)  # 52 rounds
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert lines[-1] == f"Polynomials: round 52 of 52, loss {result.history[-1]:.4g}"


def test_progress_in_a_pipe_is_some_lines(table, capsys):
    pytest.importorskip("rich")
    fit(table, progress=True)
    assert capsys.readouterr().out.splitlines()[-1].startswith("Polynomials: round 4 of 4, loss ")


def test_progress_in_a_terminal_is_a_bar_with_the_loss(table, capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes it for a terminal
    monkeypatch.setenv("TERM", "xterm")
    result = fit(table, progress=True)
    out = capsys.readouterr().out
    assert f"loss {result.history[-25:].min():.4g}" in out
    assert "round 4 of 4" not in out


def test_without_progress_nothing_is_said(table, capsys):
    fit(table)
    assert capsys.readouterr().out == ""


# --- What is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe": 3}, r"recipe must be a recipe, such as jtrees.GET\(depth=4\), got 3"),
        ({"recipe": Polynomials}, "recipe must be a recipe"),
        ({"key": 0}, r"key must be a random key, such as jax.random.key\(0\), got 0"),
        ({"max_seconds": -1}, "max_seconds must be finite and above 0, got -1"),
        ({"max_seconds": "soon"}, "max_seconds must be a number above 0, got 'soon'"),
        ({"max_seconds": [1.0]}, r"max_seconds must be one number above 0, got \[1\.0\]"),
        ({"key": jax.random.split(KEY, 2)}, r"key must be one random key, got keys of shape \(2,\)"),
        ({"x": np.full((64, 2), "2020", "M8[D]")}, r"x must be numeric, got values of type datetime64\[D\]: make"),
        (
            {"y": np.full(64, "2020", "M8[D]")},
            r"y must be numeric, got values of type datetime64\[D\]: make numbers of",
        ),
        (
            {"sample_weight": np.full(64, 3, "m8[s]")},
            r"sample_weight must be numeric, got values of type timedelta64\[",
        ),
        (
            {"validation": (np.array([[1, "a"]], object), [1])},
            r"validation: x must be numeric, .* 'a' at \(0, 1\): enc",
        ),
        ({"validation": (np.ones((2, 2)), ["a", "b"])}, "validation: y must be numeric, got values of type <U1"),
        ({"y": None}, "y must hold the targets to learn, got None"),
        (
            {"task": "ranking"},
            "task must be one of 'regression', 'classification', or a task such as .*, got 'ranking'",
        ),
        ({"validation": 0.3}, r"validation must be a pair \(x, y\), got float"),
        ({"validation": np.ones((2, 2))}, r"validation must be a pair \(x, y\), got ndarray"),
        ({"validation": (np.ones((3, 2)),)}, r"validation must be a pair \(x, y\), got tuple"),
        ({"validation": (np.ones((3, 9)), np.ones(3))}, "validation: x must have 2 columns, got 9"),
        ({"validation": (np.ones((3, 2)), None)}, "validation: y must hold the targets to judge by, got None"),
        ({"validation": (np.ones((3, 2)), np.ones(4))}, r"validation: y must have shape \(3,\), got \(4,\)"),
        ({"validation": (np.full((3, 2), 1e300), np.ones(3))}, "validation: x must be within the range of float32"),
        ({"validation": (np.full((3, 2), np.nan), np.ones(3))}, "validation: x must be finite"),
        (
            {"x": np.ma.masked_less(np.arange(128.0).reshape(64, 2), 3)},
            "x must have no masked values, got 3, the first",
        ),
        ({"y": np.ma.masked_less(np.arange(64.0), 3)}, r"y must have no masked values, got 3, the first at \(0,\)"),
        ({"sample_weight": np.ma.masked_less(np.arange(64.0), 3)}, "sample_weight must have no masked values, got 3"),
        ({"validation": (np.ma.masked_less(np.ones((2, 2)), 3), [1, 2])}, "validation: x must have no masked values"),
        ({"validation": (np.ones((2, 2)), np.ma.masked_less([1, 2], 2))}, "validation: y must have no masked values"),
        ({"sample_weight": np.ones(3)}, r"sample_weight must have shape \(64,\)"),
        ({"recipe": Polynomials(learning_rate=jnp.ones(2))}, r"learning_rate must be one number, got shape \(2,\)"),
        ({"recipe": Polynomials(learning_rate="fast")}, "learning_rate must be a number, got 'fast'"),
        ({"recipe": Polynomials(learning_rate=None)}, "learning_rate must be a number above 0, got None"),
    ],
)
def test_bad_arguments(table, change, message):
    options = {"recipe": Polynomials(), "x": table[0], "y": table[1], "key": KEY} | change
    with pytest.raises(ValueError, match=message):
        jtrees.fit(**options)


@pytest.mark.parametrize("run", [jtrees.tune, jtrees.sweep])
@pytest.mark.parametrize("name", ["x", "y", "sample_weight"])
def test_masked_values_are_refused_in_tune_and_sweep(table, run, name):
    options = {"x": table[0], "y": table[1], "sample_weight": np.ones(64), "grid": {"depth": (1, 2)}, "key": KEY}
    options[name] = np.ma.masked_array(options[name], np.arange(options[name].size).reshape(options[name].shape) == 3)
    with pytest.raises(ValueError, match=f"{name} must have no masked values, got 1"):
        run(Polynomials(), **options)


def test_the_base_class_says_what_a_recipe_needs(table):
    with pytest.raises(NotImplementedError):
        jtrees.fit(recipes.Recipe(), *table, key=KEY)


@pytest.mark.parametrize("value", ["0.1", 1 + 0j, np.complex64(1), np.datetime64("2020-01-01"), [0.1, [0.2]], {}])
def test_numbers_of_another_kind_are_refused(value):
    """Not read as text, nor without their imaginary part."""
    with pytest.raises(ValueError, match="learning_rate must be a number, got"):
        jtrees.fit(jtrees.DGT(depth=1, learning_rate=value), np.eye(4), np.arange(4.0), key=jax.random.key(0))
