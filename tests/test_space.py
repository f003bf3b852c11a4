"""Search spaces and successive halving. Errors: ``test_sweep.py``."""

import importlib
import itertools
import math

import jax
import numpy as np
from polynomials import Polynomials
import pytest

import jtrees
from jtrees.search.fit import Split
from jtrees.search.monitor import Monitor
from jtrees.selection import halving
from jtrees.selection.space import draw
from jtrees.selection.sweep import splits_of
from jtrees.tables import checked_dataset, checked_table

KEY = jax.random.key(3)
tuning = importlib.import_module("jtrees.selection.tune")  # jtrees.selection.tune is the function

rng = np.random.default_rng(0)
X = rng.uniform(-2, 2, (96, 2))
Y = 1 + X[:, 0] ** 3 - 2 * X[:, 0] + 0.3 * rng.normal(size=96)
LONG = rng.uniform(-2, 2, (2700, 2))
LONG_Y = 1 + LONG[:, 0] ** 3 - 2 * LONG[:, 0] + 0.3 * rng.normal(size=2700)
SPACE = {"learning_rate": jtrees.LogUniform(0.05, 0.5), "depth": (2, 3)}

pytestmark = pytest.mark.usefixtures("standard_promotion")


def column(draws, name) -> np.ndarray:
    return np.array([draw[name] for draw in draws])


# --- Draws -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_draws_fill_every_interval_once(seed):
    """Of 2^k points of a Sobol sequence, each of 2^k equal intervals of a range has one, and so has each of 8 x 8 cells
    of the first two ranges.
    """
    low, high = 1e-3, 0.1
    space = {"a": jtrees.LogUniform(low, high), "b": jtrees.Uniform(-3, 5)}
    draws = draw(space, 64, jax.random.key(seed))
    parts = np.log(column(draws, "a") / low) / math.log(high / low), (column(draws, "b") + 3) / 8
    for part in parts:
        assert sorted(np.floor(64 * part)) == list(range(64))
    cells = np.floor(8 * np.array(parts)).astype(int)
    assert len(set(zip(*cells.tolist(), strict=True))) == 64


@pytest.mark.parametrize("count", [1, 7, 100])
def test_draws_lie_within_the_bounds(count):
    space = {"a": jtrees.LogUniform(1e-9, 1e9), "b": jtrees.Uniform(-1e308, 1e308), "c": tuple("xyz"), "d": range(4)}
    draws = draw(space, count, KEY)
    assert len(draws) == count and all(list(draw) == list("abcd") for draw in draws)
    a, b = column(draws, "a"), column(draws, "b")
    assert (a >= 1e-9).all() and (a <= 1e9).all() and (np.abs(b) <= 1e308).all()
    assert {type(draw["a"]) for draw in draws} == {float}
    assert set(column(draws, "c")) <= set("xyz") and set(column(draws, "d")) <= set(range(4))


def test_quantiles_end_at_the_bounds():
    for kind, (low, high) in itertools.product((jtrees.Uniform, jtrees.LogUniform), ((1e-3, 0.1), (1e-30, 1e30))):
        first, last = kind(low, high).quantile(np.array([0.0, 1.0]))
        assert low <= first == pytest.approx(low, rel=1e-12) and high >= last == pytest.approx(high, rel=1e-12)


def test_choices_are_drawn_equally_often():
    draws = draw({"rate": jtrees.Uniform(0, 1), "depth": (3, 4, 5), "leaves": [None, "linear"]}, 64, KEY)
    counts = [np.sum(column(draws, "depth") == depth) for depth in (3, 4, 5)]
    assert sum(counts) == 64 and max(counts) - min(counts) <= 1
    assert sum(draw["leaves"] is None for draw in draws) == 32


def test_the_key_makes_the_draws():
    first = draw(SPACE, 20, KEY)
    assert draw(SPACE, 20, jax.random.key(3)) == first
    assert draw(SPACE, 33, KEY)[:20] == first
    other = draw(SPACE, 20, jax.random.key(4))
    assert not set(column(other, "learning_rate")) & set(column(first, "learning_rate"))
    assert draw(SPACE, 20, jax.random.PRNGKey(3)) == first


# --- Sweeps ----------------------------------------------------------------------------------------------------------


def test_each_run_is_the_fit_of_its_draw():
    result = jtrees.sweep(Polynomials(), X, Y, key=KEY, space=SPACE, samples=5, seeds=(0, 4))
    assert result.fits.shape == (5, 2, 1) and {draw["depth"] for draw in result.options} == {2, 3}
    for (c, options), (s, seed) in itertools.product(enumerate(result.options), enumerate((0, 4))):
        alone = jtrees.fit(Polynomials(**options), X, Y, key=jax.random.fold_in(KEY, seed))
        assert result.losses[c, s, 0] == alone.loss
        np.testing.assert_array_equal(result.fits[c, s, 0].model.coefficients, alone.model.coefficients)


def test_drawn_values_are_columns_of_the_frame():
    result = jtrees.sweep(Polynomials(), X, Y, key=KEY, space=SPACE, samples=6, seeds=2)
    frame = result.frame()
    assert (
        list(frame.columns) == ["learning_rate", "depth", "seed", "loss", "size", "seconds", "state"]
        and len(frame) == 12
    )
    assert set(zip(frame.learning_rate, frame.depth, strict=True)) == {tuple(d.values()) for d in result.options}


def test_draws_of_one_structure_share_one_program(count_compilations):
    of = lambda seed, samples: jtrees.sweep(
        Polynomials(steps=5), X, Y, key=jax.random.key(seed), space=SPACE, samples=samples
    )
    of(0, 4)
    assert count_compilations(of, 1, 9) == 0


# --- Tuning ----------------------------------------------------------------------------------------------------------


def test_tune_chooses_among_the_draws():
    key = jax.random.key(1)
    result = jtrees.tune(Polynomials(), X, Y, key=key, space=SPACE, samples=6)
    report = result.report.tuning
    draws = jtrees.sweep(Polynomials(), X, Y, key=key, space=SPACE, samples=6).options
    assert sorted(map(str, draws)) == sorted(str(trial.options) for trial in report.trials)
    assert report.options in draws and report.options["depth"] == 3
    assert {trial.rows for trial in report.trials} == {64}


def test_tune_takes_combinations_without_a_depth():
    samples = [{"depth": 3}, {"learning_rate": 0.1}]
    result = jtrees.tune(Polynomials(), X, Y, key=KEY, samples=samples)
    assert result.report.tuning.options == {"depth": 3} and len(result.report.tuning.trials) == 2


# --- Successive halving ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("combinations", "rows", "factor", "expected"),
    [
        (64, 8100, 3, [300, 900, 2700]),
        (64, 2700, 3, [300, 900]),
        (64, 10**6, 4, [62500, 250000]),
        (3, 8100, 3, []),
        (4, 8100, 3, [2700]),
        (64, 500, 3, []),
        (10, 400, 2, [200]),
    ],
)
def test_budgets(combinations, rows, factor, expected):
    assert halving.budgets(combinations, rows, factor) == expected


def halved(monkeypatch, losses, ends=None):
    """Halving where ``losses(options, rows)`` are the losses, and the group number ``ends`` is interrupted."""
    number, calls = itertools.count(1), []

    def of_group(recipe, group, splits, key, monitor, folder):
        rows = len(splits[0].table.x)
        calls.append((rows, [options["steps"] for options in group]))
        state = "interrupted" if next(number) == ends else "finished"
        monitor.ended = state
        return [tuning._Candidate(one, np.full(4, losses(one, rows)), 1.0, rows, state) for one in group]

    monkeypatch.setattr(tuning, "_evaluate_group", of_group)
    monkeypatch.setattr(Monitor, "has_time", lambda self: self.ended == "finished")
    splits = [Split(checked_table(LONG, LONG_Y, None, "regression"))]
    chosen_from, left = tuning._halved(Polynomials(), TWELVE, splits, KEY, Monitor(), 3)
    rows_of = lambda trials: {trial.options["steps"]: trial.rows for trial in trials}
    assert len(chosen_from) + len(left) == len({**rows_of(chosen_from), **rows_of(left)})  # one trial of each
    return rows_of(chosen_from), rows_of(left), calls


# Each number of steps is a program, and so a group, of its own.
TWELVE = [{"steps": steps} for steps in (5, 8, 1, 12, 3, 10, 2, 7, 4, 11, 6, 9)]


def test_halving_keeps_the_best(monkeypatch):
    """The budgets of twelve combinations are 300 rows for all, 900 for four and 2700 for two."""
    chosen_from, left, calls = halved(monkeypatch, lambda options, rows: options["steps"])
    assert chosen_from == {1: 2700, 2: 2700}
    assert left == {3: 900, 4: 900} | {steps: 300 for steps in range(5, 13)}
    assert [rows for rows, _ in calls] == [300] * 12 + [900] * 4 + [2700] * 2


def test_another_order_on_more_rows(monkeypatch):
    """The last budget decides, and combinations that diverge go out first."""
    losses = lambda options, rows: options["steps"] if rows == 300 else -options["steps"]
    chosen_from, *_ = halved(monkeypatch, losses)
    assert sorted(chosen_from) == [3, 4]
    losses = lambda options, rows: np.inf if options["steps"] < 3 else options["steps"]
    chosen_from, *_ = halved(monkeypatch, losses)
    assert sorted(chosen_from) == [3, 4]
    # All that is left diverges on all rows.
    chosen_from, *_ = halved(monkeypatch, lambda one, rows: one["steps"] if rows < 2700 else np.inf)
    assert chosen_from == dict.fromkeys((1, 2, 3, 4), 900)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (1, {5: 300}),  # nothing else is there
        (4, dict.fromkeys((5, 8, 1), 300)),
        (13, dict.fromkeys(range(1, 13), 300)),  # the first with 900 rows
        (15, {1: 900, 2: 900}),
        (17, dict.fromkeys(range(1, 5), 900)),
        (18, {1: 2700}),
    ],
)
def test_interrupted_halving_chooses_from_complete_trials(monkeypatch, ends, expected):
    chosen_from, left, calls = halved(monkeypatch, lambda options, rows: options["steps"], ends)
    assert chosen_from == expected and len(calls) == ends
    assert len(chosen_from) + len(left) == max(1, min(ends - 1, 12))


@pytest.mark.slow
def test_halving_of_a_table():
    """The rows of all trials. The last are fits to all rows, and the choice is among them."""
    space = {"learning_rate": jtrees.LogUniform(1e-4, 0.5), "depth": (2, 3)}
    of = {"key": KEY, "space": space, "samples": 12, "validation": (X, Y)}
    result = jtrees.tune(Polynomials(), LONG, LONG_Y, halving=3, **of)
    rows = sorted(trial.rows for trial in result.report.tuning.trials)
    assert rows == [300] * 8 + [900] * 2 + [2700] * 2
    assert result.report.tuning.options["depth"] == 3 and result.report.ended == "finished"
    last = [trial for trial in result.report.tuning.trials if trial.rows == 2700]
    _, search_key, _ = jax.random.split(KEY, 3)
    for trial in last:
        alone = jtrees.fit(Polynomials(**trial.options), LONG, LONG_Y, key=search_key, validation=(X, Y))
        assert trial.loss == pytest.approx(alone.loss)
    assert result.report.tuning.options in [trial.options for trial in last]


def test_halving_of_folds_and_classes():
    """Each fold trains on a sample of its own training rows, and rare classes stay."""
    labels = np.where(np.arange(2700) < 30, 2, LONG[:, 0] > 0)
    dataset = checked_dataset(LONG, labels, np.geomspace(1, 9, 2700), "classification")
    splits = splits_of(Polynomials(), dataset, 3, KEY)
    samples = halving.subsampled(splits, 300, np.random.default_rng(0))
    assert samples is not None
    for sample, split in zip(samples, splits, strict=True):
        assert abs(len(sample.table.x) - 300) < 30 and sample.evaluated is split.evaluated
        assert set(sample.table.y) == {0, 1, 2} and sample.table.weight.mean() == pytest.approx(1)
        assert set(map(bytes, sample.table.x)) <= set(map(bytes, split.table.x))
        assert not set(map(bytes, split.table.x)) & set(map(bytes, split.evaluated.x))


def test_targets_that_do_not_vary_on_few_rows():
    """That budget is left out."""
    y = np.zeros(2700)
    y[7] = 1
    splits = [Split(checked_table(LONG, y, None, "regression"))]
    assert halving.subsampled(splits, 300, np.random.default_rng(0)) is None
    grid = {"learning_rate": (0.1, 0.2, 0.3, 0.4)}
    result = jtrees.tune(Polynomials(), LONG, y, key=KEY, grid=grid, halving=2, validation=(LONG, y))
    assert {trial.rows for trial in result.report.tuning.trials} <= {1350, 2700}
