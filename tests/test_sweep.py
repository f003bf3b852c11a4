"""Sweeps: each run is the run alone. Results, interrupts, and the arguments of sweep and of tune."""

import itertools
import pickle
import signal

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest

import jtrees
from jtrees import LogUniform, Uniform
from tests.polynomials import Polynomials

KEY = jax.random.key(3)

rng = np.random.default_rng(0)
X = rng.uniform(-2, 2, (96, 2))
Y = 1 + X[:, 0] ** 3 - 2 * X[:, 0] + 0.3 * rng.normal(size=96)
CLASS = (X[:, 0] + 0.2 * rng.normal(size=96) > 0).astype(int)
DGT = jtrees.DGT(depth=2, epochs=6, batch_size=32, widths=(), cycles=1)
RATES = {"learning_rate": (0.01, 0.1)}

pytestmark = pytest.mark.usefixtures("standard_promotion")


def sweep(recipe=None, y=Y, **options):
    return jtrees.sweep(recipe or Polynomials(), X, y, key=KEY, **({"grid": RATES} | options))


def single(recipe=None, y=Y, **options):
    """A sweep of one combination."""
    return sweep(recipe, y, grid=None, **options)


def same(a, b):
    """Two fits, bit for bit."""
    assert a.step == b.step
    jax.tree.map(np.testing.assert_array_equal, (a.loss, a.history, a.model), (b.loss, b.history, b.model))


def mse(fit, rows, weight=None):
    return np.average((fit.model.predict(X[rows]) - Y[rows]) ** 2, weights=weight)


def test_each_run_is_the_fit_alone():
    result = sweep(DGT, validation=(X[:30], Y[:30]), seeds=(0, 5), grid=RATES | {"depth": jnp.arange(2, 4)})
    assert result.options == [{"learning_rate": a, "depth": d} for a in (0.01, 0.1) for d in (2, 3)]
    assert result.fits.shape == (4, 2, 1)
    for (c, options), (s, seed) in itertools.product(enumerate(result.options), enumerate((0, 5))):
        key = jax.random.fold_in(KEY, seed)
        alone = jtrees.fit(DGT.replace(**options), X, Y, validation=(X[:30], Y[:30]), key=key)
        same(result.fits[c, s, 0], alone)
        assert result.losses[c, s, 0] == alone.loss and result.sizes[c, s, 0] == alone.model.num_parameters
        assert result.fits[c, s, 0].report.recipe["learning_rate"] == pytest.approx(options["learning_rate"])
    assert len({float(fit.loss) for fit in result.fits.ravel()}) == 8  # no two runs are one
    same(pickle.loads(pickle.dumps(result)).fit, result.fit)


@pytest.mark.parametrize("batch", [1, 2])
def test_batches_change_nothing(batch):
    options = {"samples": [{"learning_rate": 0.02 * (i + 1)} for i in range(5)], "grid": None}
    result, batched = sweep(**options), sweep(**options, batch=batch)
    assert result.fits.shape == batched.fits.shape
    list(map(same, result.fits.ravel(), batched.fits.ravel()))


ORDER = np.asarray(jax.random.permutation(jax.random.fold_in(KEY, 2**31 - 1), 96))  # in which rows are left out
FOLDS = np.array_split(ORDER, 3)
WEIGHT = np.arange(1.0, 97)


@pytest.mark.parametrize("part", [1 / 3, np.float32(0.5)])
@pytest.mark.parametrize("weight", [None, WEIGHT], ids=["even", "weighted"])
def test_a_part_is_evaluated_by_a_fit_to_the_others(part, weight):
    """Not even the scaling knows the rows left out."""
    held_out, rest = np.sort(ORDER[: round(float(part) * 96)]), np.sort(ORDER[round(float(part) * 96) :])
    subset = lambda rows: None if weight is None else weight[rows]
    result = single(validation=part, sample_weight=weight)
    alone = jtrees.fit(Polynomials(), X[rest], Y[rest], key=jax.random.fold_in(KEY, 0), sample_weight=subset(rest))
    # Weights are normalised twice, once among all rows.
    np.testing.assert_allclose(result.fit.predict(X), alone.predict(X), rtol=0 if weight is None else 1e-12)
    assert result.losses == pytest.approx(mse(alone, held_out, subset(held_out)))


def test_every_row_is_evaluated_once_by_a_run_that_did_not_see_it():
    options = {"validation": np.int64(3), "seeds": 2, "sample_weight": WEIGHT}
    result = sweep(**options)
    losses = [mse(fit, rows, WEIGHT[rows]) for fit, rows in zip(result.fits[1, 1], FOLDS, strict=True)]
    assert result.losses.shape == (2, 2, 3) and result.losses[1, 1] == pytest.approx(losses)
    # The targets of a fold in another order (the range of all, by which they are scaled, stays what it is).
    other = Y.copy()
    other[FOLDS[0]] = Y[FOLDS[0]][::-1]
    first, second = ([fit.model.predict(X) for fit in each.fits[1, 1]] for each in (result, sweep(y=other, **options)))
    assert [np.array_equal(a, b) for a, b in zip(first, second, strict=True)] == [True, False, False]


def results(losses, states="finished", sizes=1.0):
    """A sweep of which only the numbers are known."""
    losses = np.asarray(losses, float)
    filled = lambda value: np.broadcast_to(np.asarray(value), losses.shape)
    options = [{"depth": 1 + c} for c in range(len(losses))]
    seeds = tuple(range(losses.shape[1]))
    fits = np.full(losses.shape, None)
    return jtrees.SweepResult(options, seeds, fits, losses, filled(sizes), filled(2.0), filled(states))


def test_the_best_run_and_the_best_combination():
    result = sweep(grid={"depth": (1, 3)}, validation=(X, Y))
    assert result.fit is result.fits[*result.best_run, 0]
    assert result.losses[result.best_run].mean() == result.losses.min()
    # The lowest loss is a lucky seed of the first combination; the second has the lower mean.
    lucky = results([[[0.1], [0.9]], [[0.3], [0.3]]])
    assert lucky.best_run == (0, 0) and lucky.best == {"depth": 2}
    # Equal losses: the smaller model.
    ties = results([[[0.5]], [[0.5]]], sizes=[[[3.0]], [[2.0]]])
    assert ties.best_run == (1, 0) and ties.best == {"depth": 2}
    # A combination that lacks a seed is not compared with one that has all.
    diverged = results([[[0.1], [np.inf]], [[0.5], [0.5]]], states=[[["finished"], ["diverged"]], [["finished"]] * 2])
    assert diverged.best_run == (0, 0) and diverged.best == {"depth": 2}


def test_means_of_combinations():
    frame = results([[[0.4], [0.8], [np.inf]], [[0.3]] * 3], [[["finished"]] * 2 + [["diverged"]], [["finished"]] * 3])
    rows = frame.frame(by="mean")
    assert rows["depth"].tolist() == [2, 1] and rows["seeds"].tolist() == [3, 2] and rows["diverged"].tolist() == [0, 1]
    np.testing.assert_allclose(rows["loss"], [0.3, 0.6])
    np.testing.assert_allclose(rows["error"], [0, np.std([0.4, 0.8], ddof=1) / np.sqrt(2)], atol=1e-12)
    assert rows["seconds"].tolist() == [2, 2]
    with pytest.raises(ValueError, match="by must be one of 'mean'"):
        frame.frame(by="median")


def test_the_state_and_the_losses_of_a_run_of_several_folds():
    for expected, folds in (
        ("finished", ["finished"] * 3),
        ("not started", ["not started"] * 3),
        ("interrupted", ["finished", "finished", "not started"]),
        ("diverged", ["finished", "diverged", "not started"]),
    ):
        assert results(np.ones((1, 1, 3)), [[folds]]).rows()[0]["state"] == expected
    # The first has only an easy fold. The second has all folds. The third has two, and one is unfinished.
    losses = np.array([[[0.1, np.inf, np.inf]], [[1.0, 1.0, 1.0]], [[0.2, 0.2, np.inf]]])
    states = [["finished", "diverged", "diverged"], ["finished"] * 3, ["finished", "interrupted", "not started"]]
    best = lambda rows: rows[results(losses[rows], np.array(states)[rows, None]).best_run[0]]
    assert best([0, 1, 2]) == 1 and best([0, 2]) == 2


@pytest.mark.slow
def test_reports_of_folds_are_about_the_rows_that_were_trained_on():
    """Those that a fold leaves out are in the program with weight 0."""
    for fit in single(jtrees.Bagged(DGT, trees=2), validation=3).fits[0, 0]:
        in_bag, out_of_bag = fit.report.search.in_bag, fit.report.search.out_of_bag
        assert in_bag.shape == (2, 64) and in_bag.sum(1).tolist() == [64, 64]
        np.testing.assert_array_equal(np.isnan(out_of_bag), in_bag.all(0))


def test_what_diverges_is_marked_and_not_fatal():
    result = sweep(grid={"learning_rate": (1e30, 0.5)})
    assert [row["state"] for row in result.rows()] == ["diverged", "finished"] and result.best_run == (1, 0)
    assert repr(result).startswith("SweepResult(2 combinations x 1 seeds x 1 folds, best run: ")
    assert result.fits[0, 0, 0] is None and result.losses[0, 0, 0] == np.inf and np.isnan(result.sizes[0, 0, 0])
    frame = result.frame()
    assert list(frame.columns) == ["learning_rate", "seed", "loss", "size", "seconds", "state"]
    assert len(frame) == 2 and frame.loss[0] == result.losses.min()
    with pytest.raises(FloatingPointError, match="no run has a finite loss"):
        sweep(grid={"learning_rate": (1e29, 1e30)})


def test_a_sweep_is_drawn_by_option_and_by_size():
    matplotlib.use("Agg")
    result = sweep(grid={"learning_rate": (1e-3, 0.1, 1e30), "depth": (1, 2)}, seeds=2)
    axes = jtrees.plotting.plot_sweep(result)
    assert [ax.get_xlabel() for ax in axes] == ["learning_rate", "depth", "numbers in the model"]
    assert [ax.get_xscale() for ax in axes] == ["log", "linear", "linear"]
    finished = np.sort(result.losses[result.states == "finished"])
    for ax in axes:  # the runs that diverged are left out
        np.testing.assert_array_equal(np.sort(ax.lines[0].get_ydata()), finished)
    for value, mean in zip(*axes[1].lines[1].get_data(), strict=True):
        runs = [row["loss"] for row in result.rows() if row["depth"] == value and row["state"] == "finished"]
        np.testing.assert_allclose(mean, np.mean(runs))
    named = results([[[0.1]], [[0.2]]])._replace(options=[{"leaves": "a$"}, {"leaves": "b"}])
    labels = jtrees.plotting.plot_sweep(named)[0].get_xticklabels()
    assert [text.get_text() for text in labels] == [r"a\$", "b"]
    # An option that only unfinished runs have.
    partly = results([[[0.1]], [[np.inf]]], [[["finished"]], [["not started"]]])
    axes_partly = jtrees.plotting.plot_sweep(partly._replace(options=[{"rounds": 1}, {"trees": 2}]))
    assert [(ax.get_xlabel(), len(ax.lines) > 0) for ax in axes_partly] == [
        ("rounds", True),
        ("trees", False),
        ("numbers in the model", True),
    ]
    with pytest.raises(ValueError, match="result must have a finished run to plot"):
        jtrees.plotting.plot_sweep(results([[[np.inf]]], "diverged"))
    matplotlib.pyplot.close("all")


def ctrl_c(monkeypatch, run, after=True):
    """Ctrl-C comes in the search of a run, counted from 1: after its training or before."""
    search, number = Polynomials.search, itertools.count(1)

    async def searched(self, problem):
        interrupts = next(number) == run
        if interrupts and not after:
            signal.raise_signal(signal.SIGINT)
        result = await search(self, problem)
        if interrupts and after:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(Polynomials, "search", searched)


def test_an_interrupted_sweep_says_which_runs_are_not_finished(monkeypatch):
    """Six batches of two runs have two programs. The second batch is interrupted."""
    ctrl_c(monkeypatch, 4)
    with pytest.warns(UserWarning, match="interrupted: of 12 runs, 2 finished, 2 interrupted, 8 not started"):
        result = sweep(grid={"depth": (2, 3)}, seeds=6, batch=2)
    states = ["finished"] * 2 + ["interrupted"] * 2 + ["not started"] * 8
    assert result.states.ravel().tolist() == [row["state"] for row in result.rows()] == states
    assert [fit is not None for fit in result.fits.ravel()] == [True] * 4 + [False] * 8
    assert np.isfinite(result.losses.ravel()[:4]).all() and np.isinf(result.losses.ravel()[4:]).all()
    assert repr(result).startswith("SweepResult(2 of 12 runs finished: 2 combinations x 6 seeds x 1 folds, best run: ")
    ctrl_c(monkeypatch, 2)  # before any combination had its folds: the fits that there are decide
    with pytest.warns(UserWarning, match="of 3 runs, 2 interrupted, 1 not started"):
        result = single(validation=3, batch=2)
    assert result.best_run == (0, 0) and result.fit is result.fits[0, 0, 0]
    assert [row["state"] for row in result.rows()] == ["interrupted"]


def test_a_run_that_came_to_its_end_is_the_best_whatever_an_interrupted_run_has_lost(monkeypatch):
    """The options of a run that trained only partly do not give its loss again."""
    ctrl_c(monkeypatch, 2, after=False)
    with pytest.warns(UserWarning, match="of 3 runs, 1 finished, 1 interrupted, 1 not started"):
        result = sweep(grid={"learning_rate": (1e-6, 0.5, 0.6)}, batch=1)
    assert result.losses[1] < result.losses[0] and result.best_run == (0, 0)
    assert result.frame()["learning_rate"].tolist()[0] == 1e-6


BOTH = [
    *(({"grid": grid}, "grid must hold values by name") for grid in ({}, {"depth": ()}, {"depth": 3}, [3])),
    ({"grid": {"leaves": "linear"}}, "grid must hold values by name"),
    ({"grid": {"deep": (1, 2)}}, "grid: options of DGT are 'epochs', 'batch_size', .* more, got 'deep': write 'depth'"),
    ({"grid": {"base__depth": (1, 2)}}, "grid: options of DGT are .*, got 'base'"),
    ({"grid": {"depth": (1, "two")}}, "depth must be a whole number from 1 to 16, got 'two'"),
    (
        {"recipe": jtrees.LatentClustering(), "grid": {"target_features": ((0,), (1,))}},
        "grid must hold options that do not change the targets, got 'target_features'",
    ),
    *(({"space": wrong}, "space must hold ranges or choices") for wrong in ({}, [3])),
    ({"space": {"learning_rate": 0.1}}, r"space\['learning_rate'\] must be Uniform, LogUniform or at least one choice"),
    *(
        ({"space": {"learning_rate": range_}}, f"{count}finite numbers")
        for count, ranges in (
            ("", (LogUniform(0, 1), LogUniform(2, 1), Uniform(1, 1), Uniform(0, np.inf), Uniform(np.nan, 1))),
            ("two ", (Uniform("0", 1), Uniform(0, [1, 2]))),
        )
        for range_ in ranges
    ),
    ({"space": {"depth": Uniform(2, 5)}}, "depth must be a whole number from 1 to 16, got "),
    ({"space": {"deep": (1, 2)}}, "space: options of DGT are .* write 'depth'"),
    ({"grid": RATES, "samples": 4}, "grid and samples exclude each other"),
    ({"grid": RATES, "space": {"depth": (1, 2)}}, "grid and space exclude each other"),
    ({"space": {"depth": (1, 2)}, "samples": None}, "samples must be the number of draws"),
    ({"space": {"depth": (1, 2)}, "samples": 0}, "samples must be at least 1, got 0"),
    ({"samples": 64}, "samples must hold combinations, .* with a space be a number of draws, got 64"),
    *(({"validation": part}, "validation must be a fraction between 0 and 1") for part in (0.0, 1.0, np.nan)),
    *(({"validation": folds}, "validation must be from 2 to 96 folds") for folds in (1, 97)),
    ({"validation": True}, r"validation must be a pair \(x, y\), a fraction"),
]
# The same functions check what both have: for tune, some cases show that they are called.
CASES = [
    *((jtrees.sweep, *case) for case in BOTH),
    *((jtrees.sweep, {"samples": samples}, "samples must hold combinations") for samples in ([], [3])),
    (jtrees.sweep, {"samples": [{"deep": 3}]}, "samples: options of DGT are "),
    (
        jtrees.sweep,
        {"recipe": jtrees.Bagged(jtrees.Sparse(jtrees.GET(depth=2))), "grid": {"starts": (1, 2)}},
        "grid: options of Bagged are .*, got 'starts': write 'base__base__starts'",
    ),
    (
        jtrees.sweep,
        {"recipe": jtrees.BestOf(jtrees.Polished(jtrees.GET(depth=2))), "grid": {"epochs": (1, 2)}},
        "grid: options of BestOf are .*, got 'epochs': write 'base__epochs'",
    ),
    *((jtrees.sweep, {"seeds": seeds}, "seeds must ") for seeds in (0, (), (1, -2))),
    *((jtrees.sweep, {"batch": batch}, "batch must be") for batch in (0, "some")),
    *((jtrees.tune, *case) for case in BOTH[::3]),
    (jtrees.tune, {"validation": None}, r"validation must be a pair \(x, y\), a fraction .*, got None"),
    (jtrees.tune, {"grid": None}, "grid, samples or space must be given"),
    *((jtrees.tune, {"halving": factor}, "halving must be") for factor in (1, 2.5)),
]


@pytest.mark.parametrize(("function", "options", "message"), CASES)
def test_bad_arguments_are_refused(function, options, message):
    options = ({"samples": 4} if "space" in options and "grid" not in options else {}) | options
    options = ({} if options.keys() & {"grid", "space", "samples"} else {"grid": RATES}) | options
    with pytest.raises(ValueError, match=message):
        function(**{"recipe": DGT, "x": X, "y": Y, "key": KEY} | options)


def test_rows_that_do_not_vary_once_some_are_left_out():
    x, y = np.arange(8.0)[:, None], np.array([0.0, 0, 0, 0, 0, 0, 0, 1])
    with pytest.raises(ValueError, match=r"y must vary in the 7 rows drawn to train on: give validation as a pair"):
        jtrees.sweep(DGT, x, y, key=KEY, validation=8)


def test_an_option_that_is_none_stays_none_beside_numbers_in_a_frame():
    result = sweep(grid={"momentum": (None, 0.3)})
    for frame in (result.frame(), result.frame(by="mean")):
        assert set(frame["momentum"].tolist()) == {None, 0.3}


def test_a_frame_of_samples_with_different_options_has_gaps():
    result = sweep(grid=None, samples=[{"momentum": None}, {"learning_rate": 0.02}])
    for frame in (result.frame(), result.frame(by="mean")):
        frame = frame.sort_values("learning_rate")  # gaps come last
        assert frame["learning_rate"].tolist()[0] == 0.02 and np.isnan(frame["learning_rate"].tolist()[1])
        assert np.isnan(frame["momentum"].tolist()[0]) and frame["momentum"].tolist()[1] is None
