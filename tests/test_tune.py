"""Options chosen by rows that were not trained on. Errors: ``test_sweep.py`` and ``test_recipes.py``."""

import importlib
import itertools
import types

import jax
import numpy as np
import optax
from polynomials import Polynomial, Polynomials
from problems import problem_of, search
import pytest
import sweeps

import jtrees
from jtrees.data import Scaling
from jtrees.data.scaling import losses_of
from jtrees.search import engine, fit as driver, monitor
from jtrees.search.monitor import Monitor
from jtrees.selection.grid import groups_of, with_options
from jtrees.tables import checked_table
from jtrees.tasks import Regression

KEY = jax.random.key(0)
module = importlib.import_module("jtrees.selection.tune")  # jtrees.selection.tune is the function


@pytest.fixture(scope="module")
def table():
    """A polynomial of degree 3 with noise; the second feature is for nothing."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (96, 2))
    return x, 1 + x[:, 0] ** 3 - 2 * x[:, 0] + 0.3 * rng.normal(size=96)


def tune(table, grid, recipe=None, **options):
    return jtrees.tune(recipe or Polynomials(), *table, key=KEY, grid=grid, **options)


def trials(result) -> dict:
    """By the values of their options, in the order in which they were made."""
    return {tuple(trial.options.values()): trial for trial in result.report.tuning.trials}


def depths(result) -> list[int]:
    return [depth for (depth,) in trials(result)]


def evaluated(monkeypatch, combinations, losses):
    """The trials where combination c has ``losses(c)`` on the rows, ``(n,)``."""
    of_group = lambda recipe, group, *_: [module._Candidate(options, losses(options), 1.0) for options in group]
    monkeypatch.setattr(module, "_evaluate_group", of_group)
    return module._evaluate(Polynomials(), combinations, None, KEY, Monitor())


# --- What is chosen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tried", sweeps.quick([range(1, 9), (5, 1, 3, 4, 2)], [(5, 1, 3, 4, 2)]))
def test_the_degree_is_found_and_deeper_ones_are_not_tried(table, tried):
    """In the order of their depths, whatever that of the grid."""
    result = tune(table, {"depth": tried})
    assert result.report.tuning.options == {"depth": 3}
    assert result.model.num_parameters == 4
    assert depths(result) == [1, 2, 3, 4, 5]
    assert result.report.ended == "finished"
    assert result.loss < 0.12  # the noise: 0.09


@pytest.mark.usefixtures("standard_promotion")
def test_tuned_options_stand_beside_the_start_that_get_chose(table):
    recipe = jtrees.GET(depth=1, starts=1, epochs=2)
    report = tune(table, {"depth": (1, 2)}, recipe).report
    assert report.tuning.options["depth"] in (1, 2) and report.search.chosen in (-1, 0)


def test_without_depth_everything_is_tried(monkeypatch):
    combinations = [{"steps": steps} for steps in range(1, 10)]
    assert len(evaluated(monkeypatch, combinations, lambda options: np.ones(5))) == 9


def test_ties_within_the_error_take_the_smaller_model():
    """Losses of a real table: 3035.0480, 3035.0479, 3035.0482, 3035.0480. The least says nothing there."""
    rng = np.random.default_rng(0)
    rows = 3035 + 1000 * rng.normal(size=500)
    losses = [3035.0480, 3035.0479, 3035.0482, 3035.0480]
    trials = [
        module._Candidate({"depth": i}, rows - rows.mean() + loss + 0.1 * rng.normal(size=500), 10.0 * 2**i)
        for i, loss in enumerate(losses)
    ]
    found, chosen = module._chosen(trials)
    assert chosen == {"depth": 0}
    assert found[0].loss == pytest.approx(losses[0], abs=0.02) and found[0].size == 10
    # The error is that of the difference to the best, row by row.
    best = min(trials, key=lambda trial: trial.losses.mean()).losses
    errors = [np.std(trial.losses - best, ddof=1) / np.sqrt(500) for trial in trials]
    assert [trial.error for trial in found] == pytest.approx(errors) and min(errors) == 0
    # A clear difference wins, whatever the size; the same loss on every row needs no error.
    better = module._Candidate({"depth": 9}, rows - rows.mean() + 3000, 1e6)
    assert module._chosen([*trials, better])[1] == {"depth": 9}
    equal, chosen = module._chosen([module._Candidate({"depth": i}, rows, 10.0 - i) for i in range(3)])
    assert chosen == {"depth": 2} and all(trial.error == 0 for trial in equal)


@pytest.mark.parametrize(
    ("gains", "tried"),
    [
        ([0, 0, 0, 0], 3),  # nothing twice
        ([1, 0, 1, 0, 0, 1], 6),  # counted anew after an improvement
        ([0.4, 0.4, 0.4, 0.4], 5),  # each is within the error, two together are not
    ],
)
def test_an_improvement_within_the_error_is_none(gains, tried, monkeypatch):
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(len(gains) + 1, 100))
    noise = (noise - noise.mean(1, keepdims=True)) / noise.std(1, keepdims=True)
    error = np.sqrt(2) / 10  # of the difference of two of them
    level = -1.5 * error * np.concatenate([[0], np.cumsum(gains)])
    lost = level[:, None] + noise
    combinations = [{"depth": depth} for depth in range(1, len(level) + 1)]
    found = evaluated(monkeypatch, combinations, lambda options: lost[options["depth"] - 1])
    assert [trial.options["depth"] for trial in found] == list(range(1, tried + 1))


def test_a_combination_that_diverges_is_not_chosen(table):
    result = tune(table, {"learning_rate": (0.5, 1e30)}, Polynomials(depth=3))
    assert result.report.tuning.options == {"learning_rate": 0.5}
    assert trials(result)[(1e30,)].loss == np.inf
    assert [trial.state for trial in result.report.tuning.trials] == ["finished", "diverged"]
    with pytest.raises(FloatingPointError, match="no combination has a finite loss"):
        tune(table, {"learning_rate": (1e29, 1e30)}, Polynomials(depth=3))


# --- Trials ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", sweeps.slow([False, True], [True]))
def test_a_trial_is_a_fit_to_the_other_rows(table, weighted):
    """The loss of a trial is the mean over all folds, by weight, of the losses of rows that were left out."""
    x, y = table
    weight = np.geomspace(0.01, 10, len(x)) if weighted else None
    grid = {"depth": (2, 3), "learning_rate": (0.1, 0.5)}
    result = tune(table, grid, validation=3, sample_weight=weight)
    split_key, search_key, _ = jax.random.split(KEY, 3)
    folds = np.array_split(np.asarray(jax.random.permutation(split_key, len(x))), 3)
    for depth, rate in itertools.product(*grid.values()):
        recipe = Polynomials(depth=depth, learning_rate=rate)
        losses = []
        for fold in folds:
            rest = np.setdiff1d(np.arange(len(x)), fold)
            training = checked_table(x[rest], y[rest], weight[rest] if weighted else None, "regression")
            scaling = Scaling.fit(training)
            fitted = search(problem_of(recipe, scaling.batch(training), key=search_key))
            losses.append((Polynomial(fitted.scaled, scaling).predict(x[fold]) - y[fold]) ** 2)
        trial = trials(result)[(depth, rate)]
        loss = np.average(np.concatenate(losses), weights=weight[np.concatenate(folds)] if weighted else None)
        assert trial.loss == pytest.approx(loss, rel=1e-5)  # one by one or together
        assert trial.size == depth + 1
    assert set(trials(result)) == set(itertools.product(*grid.values()))


def test_none_among_numbers(table):
    """None is another structure than a number, and 0 may be the same: two programs, and all values are tried."""
    result = tune(table, {"momentum": (None, 0.3, 0.0, 0.5)}, Polynomials(depth=3))
    assert set(trials(result)) == {(None,), (0.0,), (0.3,), (0.5,)}
    assert trials(result)[(None,)].loss == trials(result)[(0.0,)].loss


def test_a_pair_chooses_epochs_and_options(table):
    pair = table[0][:30], table[1][:30]
    result = tune(table, {"learning_rate": (0.4,)}, Polynomials(depth=3), validation=pair)
    assert result.loss == pytest.approx(np.mean((result.model.predict(pair[0]) - pair[1]) ** 2))
    # A trial has all rows, as the fit has; that has another key, and ends where there is but one minimum.
    assert trials(result)[(0.4,)].loss == pytest.approx(result.loss, rel=2e-2)


def watched(monkeypatch, before):
    """Calls ``before(number, monitor)`` before each search, which are counted from 1."""
    search, number = Polynomials.search, itertools.count(1)

    async def searched(self, problem):
        before(next(number), problem.monitor)
        return await search(self, problem)

    monkeypatch.setattr(Polynomials, "search", searched)


def test_time_is_for_all_fits_together(table, monkeypatch):
    """By a clock that ticks a second each time it is read."""
    ticks, began = [0], []

    def read():
        ticks[0] += 1
        return float(ticks[0])

    for where in (driver, monitor, engine, module):
        monkeypatch.setattr(where, "time", types.SimpleNamespace(monotonic=read))
    watched(monkeypatch, lambda number, monitor: began.append(ticks[0]))
    result = tune(table, {"depth": (1, 3)}, max_seconds=1e6)
    assert result.report.ended == "finished" and depths(result) == [1, 3]
    # Three quarters of the time end amid the updates of the second depth, which is no trial then.
    assert len(began) == 3 and began[2] - began[1] > 103
    in_second = (began[1] + began[2]) / 2
    result = tune(table, {"depth": (1, 3)}, max_seconds=in_second / 0.75)
    assert result.report.ended == "max_seconds" and depths(result) == [1]
    assert result.step > 1  # time was kept for the fit to all rows
    # A trial that was interrupted is chosen from where it is all there is.
    result = tune(table, {"depth": (1, 3)}, max_seconds=3)
    assert result.report.ended == "max_seconds" and depths(result) == [1]


def test_interrupted_trials_are_not_compared(table, monkeypatch):
    """The second depth is interrupted in its first updates: it is no trial, and the fit follows."""
    watched(monkeypatch, lambda number, monitor: monitor._interrupt() if number == 2 else None)
    with pytest.warns(UserWarning, match="the trials were interrupted: the choice is among 1 of 2 combinations"):
        result = tune(table, {"depth": (1, 3)})
    assert depths(result) == [1]
    assert result.report.ended == "interrupted"
    assert result.step == 103


@pytest.mark.parametrize("halving", [None, 2])
def test_finished_trials_of_an_interrupted_program_are_chosen_from(table, monkeypatch, halving):
    """Of three of one program, one at a time, the second is interrupted: it is no trial, whatever its loss."""
    monkeypatch.setattr(driver, "_AT_ONCE_CPU", 1)
    watched(monkeypatch, lambda number, monitor: monitor._interrupt() if number == 2 else None)
    with pytest.warns(UserWarning, match="the choice is among 1 of 3 combinations"):
        result = tune(table, {"learning_rate": (1e-6, 0.4, 0.5)}, Polynomials(depth=3), halving=halving)
    [trial] = result.report.tuning.trials
    assert (trial.options, trial.state) == ({"learning_rate": 1e-6}, "finished")


def test_an_interrupted_trial_says_so_where_it_is_all_there_is(table, monkeypatch):
    watched(monkeypatch, lambda number, monitor: monitor._interrupt() if number == 1 else None)
    with pytest.warns(UserWarning, match="the choice is among 2 of 2 combinations"):
        result = tune(table, {"learning_rate": (0.4, 0.5)}, Polynomials(depth=3))
    assert [trial.state for trial in result.report.tuning.trials] == ["interrupted", "interrupted"]


def test_combinations_that_time_did_not_reach_are_no_trials(table, monkeypatch):
    """Of five of one program two run at once, and then the time is up."""

    def no_time(monitor, seconds=0):
        monitor.ended = "max_seconds"
        return False

    monkeypatch.setattr(driver, "_AT_ONCE_CPU", 2)
    monkeypatch.setattr(Monitor, "has_time", no_time)
    rates = (0.1, 0.2, 0.3, 0.4, 0.5)
    result = tune(table, {"learning_rate": rates}, Polynomials(depth=2), validation=2)
    assert 0 < len(result.report.tuning.trials) < 5 and result.report.tuning.options["learning_rate"] in rates
    assert all(np.isfinite(trial.loss) for trial in result.report.tuning.trials)


# --- Recipes of the library ------------------------------------------------------------------------------------------


def test_options_of_a_base():
    base = jtrees.DGT(depth=1)
    recipe = jtrees.Bagged(jtrees.Polished(base, epochs=7), trees=7)
    other = with_options(recipe, {"base__base__depth": 3, "base__epochs": 2, "trees": 5})
    assert (other.base.base.depth, other.base.epochs, other.trees) == (3, 2, 5)
    assert other.base.base.replace(depth=1) == base
    pairs = itertools.product((0.1, 0.2), (2, 1))
    combinations = [{"base__base__learning_rate": rate, "base__base__depth": depth} for rate, depth in pairs]
    assert groups_of(recipe, combinations) == [[0, 2], [1, 3]]


def huber(outputs, y):
    return optax.losses.huber_loss(outputs, y, delta=0.1)


def test_combinations_are_evaluated_by_a_loss_of_the_users_own():
    y = np.array([0.0, 10.0, 20.0])
    table = checked_table(np.arange(3.0)[:, None], y, None, "regression")

    class Model:
        def predict(self, x):
            return y + np.array([0.0, 1.0, 10.0])

    losses = losses_of(Model(), table.replace(task=Regression(loss_function=huber)), Scaling.fit(table))
    np.testing.assert_allclose(losses, huber(np.array([0, 0.05, 0.5]), np.zeros(3)), rtol=1e-5)
    np.testing.assert_allclose(losses_of(Model(), table, Scaling.fit(table)), [0, 1, 100])
