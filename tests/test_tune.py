"""Options chosen by rows that were not trained on."""

import importlib
import itertools
import types

import jax
import numpy as np
import optax
from polynomials import Polynomials
import pytest

import jtrees
from jtrees.recipes import Monitor, run_rounds
from jtrees.selection.sweep import row_losses

KEY = jax.random.key(0)
module = importlib.import_module("jtrees.tune")  # jtrees.tune is the function


# Programs are shared: of 96 rows a third is left out by default, and by three folds; numbers come in twos.


def cubic(n):
    """A polynomial of degree 3 with noise; the second feature is for nothing."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (n, 2))
    return x, 1 + x[:, 0] ** 3 - 2 * x[:, 0] + 0.3 * rng.normal(size=n)


@pytest.fixture(scope="module")
def table():
    return cubic(96)


def tune(table, grid, recipe=None, **options):
    return jtrees.tune(recipe or Polynomials(), *table, key=KEY, grid=grid, **options)


def trials(result) -> dict:
    return {tuple(trial.options.values()): trial for trial in result.report["tuning"]}


# --- What is chosen --------------------------------------------------------------------------------------------------


def test_the_degree_is_found_and_deeper_ones_are_given_up(table):
    result = tune(table, {"depth": range(1, 9)})
    assert result.report["chosen"] == {"depth": 3}
    assert result.model.num_parameters == 4
    assert [trial.options["depth"] for trial in result.report["tuning"]] == [1, 2, 3, 4, 5]
    assert result.report["ended"] == "finished"
    assert result.loss < 0.12  # the noise: 0.09


def test_depths_are_tried_in_their_order(table):
    result = tune(table, {"depth": (5, 1, 3, 4, 2)})
    assert [trial.options["depth"] for trial in result.report["tuning"]] == [1, 2, 3, 4, 5]


def test_without_depth_nothing_is_given_up(monkeypatch):
    groups = [module._Group(None, [{"steps": steps}]) for steps in range(9)]
    one = lambda recipe, options, *_: [module._Tried(options[0], np.ones(5), 1.0)]
    monkeypatch.setattr(module, "_tried", one)
    assert len(module._all_tried(None, groups, [], KEY, Monitor())) == 9


def test_ties_within_the_error_take_the_smaller_model():
    """Losses as they were seen: 3035.0480, 3035.0479, 3035.0482, 3035.0480. The least says nothing there."""
    rng = np.random.default_rng(0)
    rows = 3035 + 1000 * rng.normal(size=500)
    losses = [3035.0480, 3035.0479, 3035.0482, 3035.0480]
    tried = [
        module._Tried({"depth": i}, rows - rows.mean() + loss + 0.1 * rng.normal(size=500), 10.0 * 2**i)
        for i, loss in enumerate(losses)
    ]
    found, chosen = module._chosen(tried)
    assert chosen == {"depth": 0}
    assert found[0].loss == pytest.approx(losses[0], abs=0.02) and found[0].size == 10
    # A clear difference wins, whatever the size; the same loss on every row needs no error.
    better = module._Tried({"depth": 9}, rows - rows.mean() + 3000, 1e6)
    assert module._chosen([*tried, better])[1] == {"depth": 9}
    same = [module._Tried({"depth": i}, rows, 10.0 - i) for i in range(3)]
    assert module._chosen(same)[1] == {"depth": 2}
    assert all(trial.error == 0 for trial in module._chosen(same)[0])


def test_the_error_is_that_of_the_difference_row_by_row():
    rng = np.random.default_rng(0)
    best, other = rng.normal(size=50), 1 + rng.normal(size=50)
    found, _ = module._chosen([module._Tried({"a": 0}, other, 1.0), module._Tried({"a": 1}, best, 2.0)])
    assert found[0].error == pytest.approx(np.std(other - best, ddof=1) / np.sqrt(50))
    assert found[1].error == 0


@pytest.mark.parametrize(
    ("gains", "tried"),
    [
        ([0, 0, 0, 0], 3),  # nothing twice
        ([1, 0, 1, 0, 0, 1], 6),  # it begins anew after what brings something
        ([0.4, 0.4, 0.4, 0.4], 5),  # each is within the error, two together are not
    ],
)
def test_what_brings_no_more_than_the_error_brings_nothing(gains, tried, monkeypatch):
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(len(gains) + 1, 100))
    noise = (noise - noise.mean(1, keepdims=True)) / noise.std(1, keepdims=True)
    error = np.sqrt(2) / 10  # of the difference of two of them
    level = -1.5 * error * np.concatenate([[0], np.cumsum(gains)])
    lost = level[:, None] + noise
    one = lambda recipe, options, *_: [module._Tried(options[0], lost[options[0]["depth"]], 1.0)]
    monkeypatch.setattr(module, "_tried", one)
    groups = [module._Group(depth, [{"depth": depth}]) for depth in range(len(level))]
    found = module._all_tried(None, groups, [], KEY, Monitor())
    assert [trial.options["depth"] for trial in found] == list(range(tried))


def test_a_combination_that_diverges_is_not_chosen(table):
    result = tune(table, {"learning_rate": (0.5, 1e30)}, Polynomials(depth=3))
    assert result.report["chosen"] == {"learning_rate": 0.5}
    assert trials(result)[(1e30,)].loss == np.inf
    with pytest.raises(FloatingPointError, match="no combination of the grid found anything finite"):
        tune(table, {"learning_rate": (1e29, 1e30)}, Polynomials(depth=3))


# --- How it is found -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
def test_a_trial_is_a_fit_to_the_other_rows(table, weighted):
    """The loss of a trial is the mean over all folds, by weight, of the losses of rows that were left out."""
    x, y = table
    weight = np.geomspace(0.01, 10, len(x)) if weighted else None
    grid = {"depth": (2, 3), "learning_rate": (0.1, 0.5)}
    result = tune(table, grid, validation=3, sample_weight=weight)
    split_key, search_key, _ = jax.random.split(KEY, 3)
    folds = np.array_split(np.asarray(jax.random.permutation(split_key, len(x))), 3)
    for depth, rate in itertools.product(*grid.values()):
        lost = []
        for i, fold in enumerate(folds):
            rest = np.setdiff1d(np.arange(len(x)), fold)
            recipe = Polynomials(depth=depth, learning_rate=rate)
            part = recipe.table(x[rest], y[rest], weight[rest] if weighted else None, "regression")
            scale, keys = recipe.scale(part), jax.random.split(jax.random.fold_in(search_key, i), 3)
            found, _ = run_rounds(recipe.checked(part), None, scale.batch(part), None, keys[1], Monitor())
            model = recipe.finish(found, None, part, None, scale=scale, key=keys[2], watch=Monitor()).model
            lost.append((model.predict(x[fold]) - y[fold]) ** 2)
        trial = trials(result)[(depth, rate)]
        loss = np.average(np.concatenate(lost), weights=weight[np.concatenate(folds)] if weighted else None)
        assert trial.loss == pytest.approx(loss, rel=1e-5)  # one by one or together
        assert trial.size == depth + 1
    assert set(trials(result)) == set(itertools.product(*grid.values()))


def test_the_fit_is_that_of_the_options_chosen(table):
    x, y = table
    result = tune(table, {"depth": (1, 3)})
    alone = jtrees.fit(Polynomials(depth=3), x, y, key=jax.random.split(KEY, 3)[2])
    np.testing.assert_array_equal(result.history, alone.history)
    assert result.loss == alone.loss and result.step == 103


def test_structure_compiles_once_and_numbers_together(table, count_compilations):
    grid = lambda *rates: {"depth": (2, 3), "learning_rate": rates}
    model = lambda *rates: tune(table, grid(*rates)).model.coefficients
    model(0.3, 0.5)
    assert count_compilations(model, 0.2, 0.4) == 0  # other numbers, as many of them
    # How many there are is a shape: three programs for a structure (to begin, a round, to end), whatever it is.
    model = lambda *rates: tune(table, {"learning_rate": rates}, Polynomials(depth=3)).model.coefficients
    assert 0 < count_compilations(model, 0.1, 0.2, 0.4) <= 3
    assert count_compilations(model, 0.1, 0.3, 0.5) == 0


def test_one_combination_alone_shares_the_program_of_a_fit(table, count_compilations):
    pair = table[0][:30], table[1][:30]
    jtrees.fit(Polynomials(depth=3), *table, key=KEY, validation=pair)
    tuned = lambda: tune(table, {"learning_rate": (0.4,)}, Polynomials(depth=3), validation=pair).model.coefficients
    assert count_compilations(tuned) == 0


def test_options_of_two_structures_at_once(table):
    """None is another structure than a number, and 0 may be the same: two programs, and all values are tried."""
    result = tune(table, {"momentum": (None, 0.3, 0.0, 0.5)}, Polynomials(depth=3))
    assert {trial.options["momentum"] for trial in result.report["tuning"]} == {None, 0.0, 0.3, 0.5}
    losses = {trial.options["momentum"]: trial.loss for trial in result.report["tuning"]}
    assert losses[None] == losses[0.0]


@pytest.mark.parametrize("validation", [1 / 3, 0.1, np.float32(0.5), 2, np.int64(5)])
def test_rows_left_out(table, validation):
    recipe, whole = Polynomials(), Polynomials().table(*table, np.arange(1, 97), "regression")
    parts = list(module._parts(recipe, whole, validation, KEY))
    n, folds = len(table[0]), int(validation) if validation >= 2 else 1
    assert len(parts) == folds
    left_out = np.concatenate([part.judge.x for part in parts])
    assert len(left_out) == (n if folds > 1 else round(float(validation) * n))
    assert len(np.unique(left_out, axis=0)) == len(left_out)
    for part in parts:
        assert part.chooser is None
        both = np.concatenate([part.rows.weight, part.judge.weight])
        np.testing.assert_allclose(np.sort(both), np.arange(1, 97) / 96)  # rows keep their weights


def test_a_pair_judges_and_chooses(table):
    pair = table[0][:30], table[1][:30]
    parts = list(module._parts(Polynomials(), Polynomials().table(*table, None, "regression"), pair, KEY))
    assert len(parts) == 1 and len(parts[0].rows.x) == 96
    assert parts[0].judge is parts[0].chooser
    result = tune(table, {"learning_rate": (0.4,)}, Polynomials(depth=3), validation=pair)
    assert result.loss == pytest.approx(np.mean((result.model.predict(pair[0]) - pair[1]) ** 2))
    # A trial has all rows, as the fit has; that begins elsewhere, and ends where there is but one minimum.
    assert trials(result)[(0.4,)].loss == pytest.approx(result.loss, rel=2e-2)


def test_weights_count():
    """Rows of weight 0 neither teach nor judge."""
    x, y = cubic(192)
    weight = np.arange(192) % 2
    spoilt = np.where(weight > 0, y, 1e3)
    result = tune((x, spoilt), {"depth": (1, 3)}, sample_weight=weight)
    alone = tune((x[1::2], y[1::2]), {"depth": (1, 3)})
    assert trials(result)[(3,)].loss == pytest.approx(trials(alone)[(3,)].loss, rel=1e-6)
    np.testing.assert_allclose(result.model.coefficients, alone.model.coefficients, rtol=1e-5)


def test_time_is_for_all_fits_together(table, monkeypatch):
    """By a clock that ticks a second at each look: at the start, once a search, and after each of its four rounds."""
    ticks = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: float(next(ticks)))
    monkeypatch.setattr(jtrees.recipes, "time", clock)
    monkeypatch.setattr(module, "time", clock)
    depths = lambda result: [trial.options["depth"] for trial in result.report["tuning"]]
    result = tune(table, {"depth": (1, 3)}, max_seconds=1e6)
    assert result.report["ended"] == "finished" and depths(result) == [1, 3]
    # The first depth is done within three quarters; the second is broken off, and no trial.
    result = tune(table, {"depth": (1, 3)}, max_seconds=12)
    assert result.report["ended"] == "max_seconds" and depths(result) == [1]
    assert result.step > 26  # time was kept for more than a round of the fit to all rows
    # What was broken off is chosen from where it is all there is.
    result = tune(table, {"depth": (1, 3)}, max_seconds=3)
    assert result.report["ended"] == "max_seconds" and depths(result) == [1]


def test_trials_broken_off_are_not_compared(table, monkeypatch):
    """The second depth is interrupted in its first round: it is no trial, and the fit follows."""
    real = Watch.seen
    rounds = []

    def seen(watch, i, losses):
        rounds.append(i)
        if len(rounds) == 5:  # four rounds of the first depth, one of the second
            watch._interrupt()
        return real(watch, i, losses)

    monkeypatch.setattr(Watch, "seen", seen)
    result = tune(table, {"depth": (1, 3)})
    assert [trial.options["depth"] for trial in result.report["tuning"]] == [1]
    assert result.report["ended"] == "interrupted"
    assert result.step == 103


def test_combinations_that_time_did_not_reach_are_no_trials(table, monkeypatch):
    """Of five of one program two run at once, and then the time is up."""

    def ended(watch):
        watch.ended = "max_seconds"
        return False

    monkeypatch.setattr(importlib.import_module("jtrees.sweep"), "_AT_ONCE_CPU", 2)
    monkeypatch.setattr(Watch, "goes_on", ended)
    rates = (0.1, 0.2, 0.3, 0.4, 0.5)
    result = tune(table, {"learning_rate": rates}, Polynomials(depth=2), validation=2)
    assert 0 < len(result.report["tuning"]) < 5 and result.report["chosen"]["learning_rate"] in rates
    assert all(np.isfinite(trial.loss) for trial in result.report["tuning"])


# --- Recipes of the library ------------------------------------------------------------------------------------------

PAT = jtrees.PAT(depth=1, epochs=8, batch_size=16)


@pytest.mark.slow  # the small sibling is test_battery, where every recipe is tuned
@pytest.mark.usefixtures("standard_promotion")
def test_classes_and_numbers_in_pairs():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(48, 2)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)
    grid = {"slopes": ((1.0, 5.0), (1.0, 100.0))}
    options = {"task": "classification", "sample_weight": rng.uniform(1, 2, 48), "validation": (x[:16], y[:16])}
    result = jtrees.tune(PAT, x, y, key=KEY, grid=grid, **options)
    assert result.model.predict(x).shape == (48, 2)
    assert {trial.options["slopes"] for trial in result.report["tuning"]} == {(1.0, 5.0), (1.0, 100.0)}
    assert all(0 < trial.loss < 2 for trial in result.report["tuning"])  # log loss; that of a coin is 0.7


def test_options_of_a_base():
    recipe = jtrees.Bagged(base=jtrees.Polished(base=PAT, epochs=7), trees=7)
    other = module.with_options(recipe, {"base__base__depth": 3, "base__epochs": 2, "trees": 5})
    assert (other.base.base.depth, other.base.epochs, other.trees) == (3, 2, 5)
    assert other.base.base.replace(depth=1) == PAT
    table = recipe.table(np.arange(40.0).reshape(20, 2), np.arange(20.0), None, "regression")
    groups = module._groups(recipe, {"base__base__learning_rate": (0.1, 0.2), "base__base__depth": (2, 1)}, table)
    assert [group.depth for group in groups] == [1, 2]
    assert [len(group.options) for group in groups] == [2, 2]


def huber(outputs, y):
    return optax.losses.huber_loss(outputs, y, delta=0.1)


def test_a_loss_of_ones_own_is_what_combinations_are_judged_by():
    y = np.array([0.0, 10.0, 20.0])
    recipe = jtrees.PAT(loss=huber)
    table = recipe.table(np.arange(3.0)[:, None], y, None, "regression")

    class Model:
        def predict(self, x):
            return y + np.array([0.0, 1.0, 10.0])

    lost = row_losses(recipe, Model(), table, recipe.scale(table))
    np.testing.assert_allclose(lost, huber(np.array([0, 0.05, 0.5]), np.zeros(3)), rtol=1e-5)
    np.testing.assert_allclose(row_losses(PAT, Model(), table, recipe.scale(table)), [0, 1, 100])


# --- What is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({}, "grid must hold values by name"),
        ({"depth": ()}, "grid must hold values by name"),
        ({"depth": 3}, "grid must hold values by name"),
        ([3], "grid must hold values by name"),
        ({"deepness": (1, 2)}, r"grid: options of \w+ are depth, steps, .*got 'deepness'"),
        ({"base__depth": (1, 2)}, "grid: options of .*got 'base'"),
        ({"depth": (1, "two")}, "depth must be a whole number from 1 to 16, got 'two'"),
        ({"depth": (1, 99)}, "depth must be from 1 to 16, got 99"),
        ({"learning_rate": (0.1, -1)}, "learning_rate must be finite and above 0"),
    ],
)
def test_bad_grids(table, grid, message):
    with pytest.raises(ValueError, match=message):
        tune(table, grid)


def test_what_is_learnt_is_no_option():
    x = np.random.default_rng(0).normal(size=(20, 3))
    with pytest.raises(ValueError, match=r"not what is to be learnt, got 'target_features'"):
        jtrees.tune(jtrees.LatentClustering(), x, key=KEY, grid={"target_features": ((0,), (1,))})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"validation": 0.0}, "validation must be a part between 0 and 1"),
        ({"validation": 1.0}, "validation must be a part between 0 and 1"),
        ({"validation": np.nan}, "validation must be a part between 0 and 1"),
        ({"validation": 1}, "validation must be at least 2 folds and at most 96, a row each, got 1"),
        ({"validation": 97}, "validation must be at least 2 folds"),
        ({"validation": True}, r"validation must be a pair \(x, y\), a part or a number of folds, got True"),
        ({"validation": "third"}, "validation must be a pair"),
        ({"validation": None}, "validation must be a pair"),
        ({"validation": (np.ones((3, 9)), np.ones(3))}, "validation: x must have 2 columns, got 9"),
        ({"recipe": 3}, r"recipe must be a recipe, such as jtrees.GET\(depth=4\), got 3"),
        ({"key": 3}, "key must be a random key"),
        ({"max_seconds": -1}, "max_seconds must be finite and above 0, got -1"),
        ({"max_seconds": [1.0]}, "max_seconds must be one number"),
        ({"y": None}, "y must hold the targets to learn, got None"),
        ({"task": "ranking"}, "task must be one of"),
    ],
)
def test_bad_arguments(table, change, message):
    options = {"recipe": Polynomials(), "x": table[0], "y": table[1], "key": KEY, "grid": {"depth": (1, 2)}} | change
    with pytest.raises(ValueError, match=message):
        jtrees.tune(**options)


def test_options_that_fit_has_not(table):
    with pytest.raises(TypeError, match=r"options must be of task, .*got 'epochs'"):
        tune(table, {"depth": (1, 2)}, epochs=3)


def test_rows_that_do_not_vary_once_some_are_left_out():
    x, y = np.arange(8.0)[:, None], np.array([0.0, 0, 0, 0, 0, 0, 0, 1])
    with pytest.raises(ValueError, match=r"y must vary in the 7 rows drawn to tune by: give validation as a pair"):
        tune((x, y), {"depth": (1, 2)}, validation=8)
