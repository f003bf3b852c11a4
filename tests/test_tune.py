"""Options chosen by rows that were not trained on: the choice, trials, time, search spaces and successive halving.

Errors: ``test_sweep.py`` and ``test_recipes.py``.
"""

from dataclasses import dataclass
import itertools
import math
import signal
import time

import jax
import numpy as np
import pytest

import jtrees
from jtrees import pytree
from jtrees.search import Fitted, option
from jtrees.selection import halving
from jtrees.selection.grid import with_options
from jtrees.selection.space import draw
from jtrees.selection.sweep import splits_of
from jtrees.tables import checked_dataset
from tests.polynomials import Polynomials

KEY = jax.random.key(0)
# A polynomial of degree 3 with noise; the second feature is for nothing.
rng = np.random.default_rng(0)
X = rng.uniform(-2, 2, (96, 2))
Y = 1 + X[:, 0] ** 3 - 2 * X[:, 0] + 0.3 * rng.normal(size=96)
# Rows that hold their number.
ROWS = np.stack([np.arange(3000.0), np.arange(3000.0) % 7], axis=1)
TARGETS = rng.normal(size=3000)

pytestmark = pytest.mark.usefixtures("standard_promotion")


@dataclass
class RowModel:
    """A model with a loss for each row."""

    losses: np.ndarray
    num_parameters: float

    def predict(self, x):
        row = np.asarray(x)[:, 0].astype(int)
        return TARGETS[row] + np.sqrt(self.losses[row])


@pytree.dataclass(kw_only=True)
class Prescribed(jtrees.Recipe):
    """Trains nothing: its model has prescribed losses, and a size that grows with depth."""

    depth: int = option(1, most=16)
    steps: int = option(1)
    rate: float = option(1.0, above=0)

    async def search(self, problem):
        loss = self.begins(problem)
        if not np.isfinite(loss).all():
            raise FloatingPointError("diverged")
        problem.monitor.has_time()
        model = RowModel(np.broadcast_to(loss, len(TARGETS)), 2.0**self.depth)
        return Fitted(None, 0.0, 1, np.zeros(1), model=model, loss=problem.data.loss(model))


@pytest.fixture
def prescribed(monkeypatch):
    """A function that tunes with losses ``losses(options, training rows)``.

    ``before(number)`` is called before each search, counted from 1.
    """

    def tune(losses, before=lambda number: None, rows=96, **options):
        number = itertools.count(1)

        def begins(recipe, problem):
            before(next(number))
            return losses(recipe, len(problem.data.table.x))

        monkeypatch.setattr(Prescribed, "begins", begins, raising=False)
        options = {"validation": (ROWS[rows:], TARGETS[rows:])} | options
        return jtrees.tune(Prescribed(), ROWS[:rows], TARGETS[:rows], key=KEY, **options)

    return tune


@pytest.fixture
def clock(monkeypatch):
    """The seconds of a clock that a test advances."""
    seconds = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    return seconds


def interrupt(*numbers):
    """Ctrl-C comes before these searches."""
    return lambda number: signal.raise_signal(signal.SIGINT) if number in numbers else None


def tune(recipe, grid, **options):
    return jtrees.tune(recipe, X, Y, key=KEY, grid=grid, **options)


def trials(result) -> dict:
    """The trials by the values of their options, in their order."""
    return {tuple(trial.options.values()): trial for trial in result.report.tuning.trials}


def depths(result) -> list[int]:
    return [trial.options["depth"] for trial in result.report.tuning.trials]


def test_the_degree_is_found_and_deeper_ones_are_not_tried():
    """Trials have ascending depths, in whatever order the grid has them."""
    result = tune(Polynomials(), {"depth": (5, 1, 8, 3, 4, 2)})
    assert result.report.tuning.options == {"depth": 3} and result.model.num_parameters == 4
    assert depths(result) == [1, 2, 3, 4, 5] and result.report.ended == "finished"
    assert result.loss < 0.12  # the noise: 0.09


def test_ties_within_the_error_take_the_smaller_model(prescribed):
    """Losses of a real table: 3035.0480, 3035.0479, 3035.0482, 3035.0480. The least says nothing there."""
    row_losses = np.zeros((4, 3000))
    row_losses[:, -500:] = np.abs(3035 + 500 * rng.normal(size=500)) + 0.1 * rng.normal(size=(4, 500))
    means = np.array([3035.0480, 3035.0479, 3035.0482, 3035.0480])
    row_losses[:, -500:] += (means - row_losses[:, -500:].mean(1))[:, None]
    samples = [{"depth": 2}, {"depth": 3}, {"depth": 4}, {"steps": 1}]  # one without a depth: all are tried
    losses = dict(zip((2, 3, 4, 1), row_losses, strict=True))

    def tuning(factor=1.0):
        prescribed_losses = lambda recipe, _: losses[recipe.depth] * (factor if recipe.depth == 4 else 1)
        return prescribed(prescribed_losses, rows=2500, samples=samples).report.tuning

    assert tuning().options == {"steps": 1} and len(tuning().trials) == 4
    for trial in tuning().trials:
        depth = trial.options.get("depth", 1)
        assert trial.loss == pytest.approx(losses[depth][-500:].mean(), rel=1e-9) and trial.size == 2**depth
        # The error is the standard error of the paired difference from the best.
        difference = losses[depth][-500:] - losses[3][-500:]
        assert trial.error == pytest.approx(np.std(difference, ddof=1) / np.sqrt(500), rel=1e-4)
    assert tuning(0.9).options == {"depth": 4}  # a clear difference wins, whatever the size


@pytest.mark.parametrize(
    ("gains", "expected_trials"),
    [
        ([0, 0, 0, 0], 3),  # nothing twice
        ([1, 0, 1, 0, 0, 1], 6),  # counted again after an improvement
        ([0.4, 0.4, 0.4, 0.4], 5),  # each is within the error, two together are not
    ],
)
def test_an_improvement_within_the_error_is_none(gains, expected_trials, prescribed):
    noise = np.random.default_rng(0).normal(size=(len(gains) + 1, 100))
    noise = (noise - noise.mean(1, keepdims=True)) / noise.std(1, keepdims=True)
    error = np.sqrt(2) / 10  # of the difference of two of them
    level = 100 - 1.5 * error * np.concatenate([[0], np.cumsum(gains)])
    losses = np.pad(level[:, None] + noise, ((0, 0), (2900, 0)))
    result = prescribed(lambda recipe, _: losses[recipe.depth - 1], rows=2900, grid={"depth": range(1, len(level) + 1)})
    assert depths(result) == list(range(1, expected_trials + 1))


def test_depths_that_diverge_do_not_end_the_trials(prescribed):
    losses = lambda recipe, _: np.full(3000, np.inf if recipe.depth < 4 else 1.0)
    result = prescribed(losses, rows=2900, grid={"depth": range(1, 5)})
    assert result.report.tuning.options == {"depth": 4} and depths(result) == [1, 2, 3, 4]


def test_a_combination_that_diverges_is_not_chosen():
    result = tune(Polynomials(depth=3), {"learning_rate": (0.5, 1e30)})
    assert result.report.tuning.options == {"learning_rate": 0.5}
    assert trials(result)[(1e30,)].loss == np.inf
    assert [trial.state for trial in result.report.tuning.trials] == ["finished", "diverged"]
    with pytest.raises(FloatingPointError, match="no combination has a finite loss"):
        tune(Polynomials(depth=3), {"learning_rate": (1e29, 1e30)})


def test_a_trial_is_a_fit_to_the_other_rows():
    """The loss of a trial is the mean over all folds, by weight, of the losses of rows that were left out."""
    grid, weight = {"depth": (2, 3), "learning_rate": (0.1, 0.5)}, np.geomspace(0.01, 10, 96)
    result = tune(Polynomials(), grid, validation=3, sample_weight=weight)
    split_key, search_key, _ = jax.random.split(KEY, 3)
    folds = np.array_split(np.asarray(jax.random.permutation(split_key, 96)), 3)
    for depth, rate in itertools.product(*grid.values()):
        recipe, losses = Polynomials(depth=depth, learning_rate=rate), np.zeros(96)
        for fold in folds:
            rest = np.setdiff1d(np.arange(96), fold)
            fit = jtrees.fit(recipe, X[rest], Y[rest], key=search_key, sample_weight=weight[rest])
            losses[fold] = (fit.predict(X[fold]) - Y[fold]) ** 2
        trial = trials(result)[(depth, rate)]
        assert trial.loss == pytest.approx(np.average(losses, weights=weight), rel=1e-5)
        assert trial.size == depth + 1
    assert set(trials(result)) == set(itertools.product(*grid.values()))


def test_none_among_numbers():
    """None is another structure than a number, and 0 may be the same: two programs, and all values are tried."""
    result = trials(tune(Polynomials(depth=3), {"momentum": (None, 0.3, 0.0, 0.5)}))
    assert set(result) == {(None,), (0.0,), (0.3,), (0.5,)} and result[(None,)].loss == result[(0.0,)].loss


@pytest.mark.parametrize(
    ("max_seconds", "values", "expected", "reason"),
    [
        (1e6, {"depth": (1, 3, 4)}, [1, 3, 4], "finished"),
        (300, {"depth": (1, 3, 4)}, [1, 3], "max_seconds"),  # three quarters end in the third search
        (10, {"depth": (1, 3, 4)}, [1], "max_seconds"),  # an interrupted trial is chosen where it is all there is
        # A program has 32 combinations. Sixteen run at once, and the time ends among the next sixteen.
        (3000, {"rate": range(1, 33)}, [*range(1, 17)], "max_seconds"),
    ],
)
def test_time_is_for_all_fits_together(prescribed, clock, max_seconds, values, expected, reason):
    """Each search takes 100 seconds."""

    def before(number):
        clock[0] += 100

    result = prescribed(lambda recipe, _: 9 + recipe.rate - recipe.depth, before, grid=values, max_seconds=max_seconds)
    assert [*trials(result)] == [(value,) for value in expected] and result.report.ended == reason


@pytest.mark.parametrize(
    ("grid", "number", "expected_trials", "state"),
    [
        ({"depth": (1, 3)}, 2, 1, "finished"),  # the second program
        ({"rate": np.linspace(0.5, 0.1, 32).tolist()}, 20, 16, "finished"),  # the second batch of a program
        ({"rate": (0.4, 0.5)}, 1, 2, "interrupted"),  # all there is
    ],
)
def test_interrupted_trials_are_not_compared(prescribed, grid, number, expected_trials, state):
    """Whatever their loss; and the fit follows."""
    count = len(next(iter(grid.values())))
    with pytest.warns(UserWarning, match=f"interrupted: the choice is among {expected_trials} of {count} combinations"):
        result = prescribed(lambda recipe, _: recipe.rate / recipe.depth, interrupt(number), grid=grid)
    assert result.report.ended == "interrupted"
    assert [trial.state for trial in result.report.tuning.trials] == [state] * expected_trials


def test_draws_fill_every_interval_once_and_lie_within_the_bounds():
    """Of 64 Sobol points, each of 64 intervals of a range has a point, and so has each of 8 x 8 cells of two ranges."""
    space = {"a": jtrees.LogUniform(1e-3, 0.1), "b": jtrees.Uniform(-3, 5), "c": tuple("xyz"), "d": [None, "linear"]}
    draws = draw(space, 64, jax.random.key(1))
    a, b, c, d = zip(*(options.values() for options in draws), strict=True)
    parts = np.log(np.array(a) / 1e-3) / math.log(100), (np.array(b) + 3) / 8
    for part in parts:
        assert sorted(np.floor(64 * part)) == list(range(64))
    assert len(set(zip(*np.floor(8 * np.array(parts)).astype(int).tolist(), strict=True))) == 64
    assert {type(value) for value in a} == {float} and list(draws[0]) == list("abcd")
    assert sorted(map(c.count, "xyz")) == [21, 21, 22] and d.count(None) == 32  # choices are drawn equally often
    assert draw({"b": jtrees.Uniform(-1e308, 1e308)}, 1, KEY)
    for kind, (low, high) in itertools.product((jtrees.Uniform, jtrees.LogUniform), ((1e-3, 0.1), (1e-30, 1e30))):
        first, last = kind(low, high).quantile(np.array([0.0, 1.0]))
        assert low <= first == pytest.approx(low, rel=1e-12) and high >= last == pytest.approx(high, rel=1e-12)


def test_the_key_makes_the_draws():
    space = {"learning_rate": jtrees.LogUniform(0.05, 0.5), "depth": (2, 3)}
    first = draw(space, 20, KEY)
    assert draw(space, 20, jax.random.PRNGKey(0)) == draw(space, 33, KEY)[:20] == first
    rates = lambda draws: {options["learning_rate"] for options in draws}
    assert not rates(draw(space, 20, jax.random.key(4))) & rates(first)


@pytest.mark.parametrize(
    ("combinations", "rows", "factor", "expected"),
    [(64, 8100, 3, [300, 900, 2700]), (3, 8100, 3, []), (4, 8100, 3, [2700]), (64, 500, 3, []), (10, 400, 2, [200])],
)
def test_budgets(combinations, rows, factor, expected):
    assert halving.budgets(combinations, rows, factor) == expected


# Each number of steps is a program, and so a group, of its own.
TWELVE = (5, 8, 1, 12, 3, 10, 2, 7, 4, 11, 6, 9)
FOUR = {1: 900, 2: 900, 3: 900, 4: 900}
EIGHT = dict.fromkeys(range(5, 13), 300)


def halved(prescribed, losses, before=lambda number: None):
    """The rows of the trial of each combination, and the chosen combination."""
    tuning = prescribed(losses, before, rows=2700, halving=3, grid={"steps": TWELVE}).report.tuning
    rows = {trial.options["steps"]: trial.rows for trial in tuning.trials}
    assert len(rows) == len(tuning.trials)  # one trial of each
    return rows, tuning.options["steps"]


@pytest.mark.parametrize(
    ("losses", "last", "chosen"),
    [
        (lambda recipe, rows: recipe.steps, (1, 2), 1),
        (lambda recipe, rows: recipe.steps if rows == 300 else 20 - recipe.steps, (3, 4), 4),  # the last rows decide
        (lambda recipe, rows: np.inf if recipe.steps < 3 else recipe.steps, (3, 4), 3),  # what diverges goes out first
        (lambda recipe, rows: recipe.steps if rows < 2700 else np.inf, (), 1),  # all that is left diverges
    ],
)
def test_halving_keeps_the_best(prescribed, losses, last, chosen):
    """The budgets of twelve combinations are 300 rows for all, 900 for four and 2700 for two."""
    began = []
    recorded = lambda recipe, rows: began.append(rows) or losses(recipe, rows)
    if not last:  # the fit to all rows diverges, too
        with pytest.raises(FloatingPointError):
            halved(prescribed, recorded)
        return
    rows, best = halved(prescribed, recorded)
    assert best == chosen and {steps for steps in rows if rows[steps] == 2700} == set(last)
    assert sorted(rows.values()) == [300] * 8 + [900] * 2 + [2700] * 2
    assert began == [300] * 12 + [900] * 4 + [2700] * 3  # and the fit to all rows


@pytest.mark.parametrize(
    ("number", "trials_of", "chosen"),
    [
        (1, {5: 300}, 5),  # nothing else is there
        (13, dict.fromkeys(range(1, 13), 300), 1),  # the first with 900 rows
        (15, FOUR | EIGHT | {3: 300, 4: 300}, 1),
        (18, FOUR | EIGHT | {1: 2700}, 1),
    ],
)
def test_interrupted_halving_chooses_from_complete_trials(prescribed, number, trials_of, chosen):
    with pytest.warns(UserWarning, match="the trials were interrupted"):
        result = halved(prescribed, lambda recipe, rows: recipe.steps, interrupt(number))
    assert result == (trials_of, chosen)


def test_halving_of_folds_and_classes():
    """Each fold trains on a sample of its own training rows, and rare classes stay."""
    labels = np.where(np.arange(3000) < 30, 2, TARGETS > 0)
    dataset = checked_dataset(ROWS, labels, np.geomspace(1, 9, 3000), "classification")
    splits = splits_of(Polynomials(), dataset, 3, KEY)
    samples = halving.subsampled(splits, 300, np.random.default_rng(0))
    assert samples is not None
    for sample, split in zip(samples, splits, strict=True):
        assert abs(len(sample.table.x) - 300) < 30 and sample.evaluated is split.evaluated
        assert set(sample.table.y) == {0, 1, 2} and sample.table.weight.mean() == pytest.approx(1)
        assert set(map(bytes, sample.table.x)) <= set(map(bytes, split.table.x))
        assert not set(map(bytes, split.table.x)) & set(map(bytes, split.evaluated.x))


def test_a_budget_whose_targets_do_not_vary_is_left_out():
    y = np.zeros(2700)
    y[7] = 1
    grid = {"learning_rate": (0.1, 0.2, 0.3, 0.4)}
    x = ROWS[:2700] / 1000
    result = jtrees.tune(Polynomials(), x, y, key=KEY, grid=grid, halving=2, validation=(x, y))
    assert {trial.rows for trial in result.report.tuning.trials} <= {1350, 2700}


def test_options_of_a_base_follow_the_base_in_any_order():
    recipe = jtrees.Bagged(jtrees.DGT())
    options = {"base__depth": 5, "base": jtrees.GET(depth=2)}
    for order in (options, dict(reversed(options.items()))):
        assert with_options(recipe, order).base == jtrees.GET(depth=5)
