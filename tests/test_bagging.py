"""Bagging: each tree from its own bootstrap sample, by any recipe; and the best of several runs of a recipe."""

from dataclasses import dataclass
from typing import Any, ClassVar
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from jtrees import pytree, training
from jtrees.search import Fitted, Problem, Run
from jtrees.search.monitor import Monitor
from jtrees.search.problem import OutOfTimeError
from jtrees.tables import checked_table
from tests import oracles
from tests.problems import problem_of_table, search

KEY = jax.random.key(0)
SLOW = pytest.mark.slow
N, TREES = 197, 4  # padded to 200 rows, bags of 138 to 140
WEIGHT = np.random.default_rng(0).uniform(0.5, 2, N)


@dataclass(frozen=True)
class SampleReport(jtrees.search.Report):
    """The rows of a sample in the user's units, its weights, and the key."""

    x: np.ndarray
    weight: np.ndarray
    key: np.ndarray


@pytree.dataclass
class OneSplit(jtrees.Recipe):
    """A recipe whose result can be checked by hand: one split at the mean of the first column of all rows, and in each
    leaf the mean of the targets (or the class frequencies) of the samples that it is fitted to.
    """

    async def search(self, problem):
        scaled, weight, key = (await problem.map(stump)).host
        scaling, x = problem.data.scaling, problem.data.table.x
        with problem.restoring():
            tree = scaling.restore_splits(scaled).replace(leaves=scaling.restore_leaves(scaled.leaves))
        options = {"model": tree, "tree": tree, "loss": float(len(x)), "report": SampleReport(x, weight, key)}
        return Fitted(scaled, 0.0, 7, np.zeros(1, np.float32), **options)


def stump(run: Run):
    """The split of a run with the leaves of its sample, the weights of the sample, and the key."""
    x, y, weight = training.state.normalised(run.batch)
    leaves = jtrees.leaves.kind_of("constant", run.task).empty(2, 0, run.task.shape)
    tree = jtrees.ObliqueTree(jnp.zeros((1, x.shape[1])).at[0, 0].set(1), jnp.zeros(1), leaves)
    return tree.refit(x, y, weight), run.batch.weight, jax.random.key_data(run.key)


def stumps(x, y, trees=TREES, fraction=0.7, seed=0, combine=None, **options):
    bagged = jtrees.Bagged(OneSplit(), trees=trees, fraction=fraction, combine=combine)
    return jtrees.fit(bagged, x, y, key=jax.random.key(seed), **options)


def each(result, x):
    return np.stack([tree.predict(x) for tree in result.model])


def by_hand(x, y, in_bag, weight=None, classes=None):
    """The prediction of each stump for every row, ``(trees, n)`` or ``(trees, n, k)``."""
    weight = np.ones(len(x)) if weight is None else weight
    leaf = (x[:, 0] > np.average(x[:, 0], weights=weight)).astype(int)
    if classes is None:
        return np.array([oracles.leaf_means(leaf, y, 2, np.nan, times * weight)[leaf] for times in in_bag])
    # An even weight of mean 1 each: whole numbers of samples.
    return np.array([oracles.class_frequencies(leaf, y, 2, classes, times)[1][leaf] for times in in_bag])


@pytest.fixture(scope="module")
def table(data):
    x, y = data[0][:N], data[1][:N]
    return x, y, np.digitize(y, [-1, 1])


def test_drawn_evenly_with_replacement(table):
    x, y, _ = table
    report = stumps(x[:20], y[:20], trees=400, fraction=1.0).report.search
    assert report.in_bag.shape == (400, 20) and (report.in_bag.sum(1) == 20).all()
    weights = np.stack([tree.weight for tree in report.bases])
    assert weights.shape == (400, 32) and (weights[:, 20:] == 0).all()  # as padded as the table
    # 400 x 20 draws of 20 rows: mean 400, deviation 19.5; and a row is left out by a sample with 0.95^20 = 0.358.
    assert np.abs(report.in_bag.sum(0) - 400).max() < 4 * 19.5
    assert abs(np.mean(report.in_bag == 0) - 0.358) < 0.02


def test_held_out_rows_are_not_drawn_wherever_they_lie(table):
    x, y, _ = table
    problem = problem_of_table(jtrees.Bagged(OneSplit(), trees=20), checked_table(x, y, None, "regression"))
    held_out = np.arange(len(problem.batch.x)) % 3 == 0  # the last row is not held out
    report = search(problem.holding_out(held_out & (problem.rows >= 0))).report
    rest = x[np.arange(N) % 3 > 0]
    assert report.in_bag.shape == (20, len(rest)) and (report.in_bag.sum(1) == len(rest)).all()
    for tree, in_bag in zip(report.bases, report.in_bag, strict=True):
        assert sorted(map(tuple, tree.x)) == sorted(map(tuple, np.repeat(rest, in_bag, axis=0)))
        assert (tree.weight == 1).sum() == len(rest)  # a row drawn without weight would have 0


@pytest.mark.parametrize("targets", [1, pytest.param(2, marks=SLOW)])
def test_regression_is_the_mean_of_the_trees(table, targets):
    x, y, _ = table
    y = y if targets == 1 else np.stack([y, 100 * x[:, 2] - 7 * y], axis=1)
    result = stumps(x, y, sample_weight=WEIGHT)
    in_bag = result.report.search.in_bag
    assert (in_bag.sum(1) == 138).all()
    assert len(set(map(tuple, in_bag))) == len({tuple(report.key) for report in result.report.search.bases}) == TREES
    expected = by_hand(x, y, in_bag, WEIGHT)
    alone = each(result, x)
    np.testing.assert_allclose(alone, expected, rtol=1e-4, atol=1e-3 * np.ptp(y))  # float32 of scaled targets
    np.testing.assert_allclose(result.model.predict(x), alone.mean(0), rtol=1e-5, atol=1e-5)
    assert (result.model.combine, result.tree) == ("mean", None)
    off = (result.model.predict(x) - y) ** 2
    off = off if targets == 1 else (off / np.ptp(y, axis=0) ** 2).mean(1)
    assert result.loss == pytest.approx(np.average(off, weights=WEIGHT), rel=1e-5)


@pytest.mark.parametrize("combine", [None, pytest.param("mean", marks=SLOW)])
def test_classes_are_voted_for_or_averaged(table, combine):
    x, _, y = table
    result = stumps(x, y, task="classification", combine=combine)
    expected = by_hand(x, y, result.report.search.in_bag, classes=3)
    alone = each(result, x)
    np.testing.assert_allclose(alone, expected, rtol=1e-4)
    shares = alone if combine else np.eye(3)[alone.argmax(2)]
    np.testing.assert_allclose(result.model.predict(x), shares.mean(0), atol=1e-6)
    assert result.model.combine == (combine or "vote")


@pytest.mark.parametrize("kind", ["regression", "classification", pytest.param("several", marks=SLOW)])
def test_out_of_bag_predictions_are_of_trees_that_did_not_see_the_row(table, kind):
    x, y, labels = table
    y = {"several": np.stack([y, x[:, 2] ** 2], axis=1), "classification": labels}.get(kind, y)
    task = "classification" if kind == "classification" else "regression"
    result = stumps(x, y, task=task, sample_weight=WEIGHT)
    report = result.report
    outputs = each(result, x)
    outputs = np.eye(3)[outputs.argmax(-1)] if kind == "classification" else outputs
    unseen = report.search.in_bag == 0
    rows = np.flatnonzero(unseen.any(0))
    assert 0 < len(rows) < N
    mean = np.stack([outputs[unseen[:, i], i].mean(0) for i in rows])
    np.testing.assert_allclose(report.search.out_of_bag[rows], mean, rtol=1e-4, atol=1e-5)
    assert np.isnan(np.delete(report.search.out_of_bag, rows, axis=0)).all()
    share = WEIGHT[rows] / WEIGHT[rows].sum()
    if kind == "classification":
        expected = share @ (mean.argmax(1) == y[rows])
    else:
        expected = np.mean(1 - share @ (mean - y[rows]) ** 2 / (share @ (y[rows] - share @ y[rows]) ** 2))
    assert report.search.out_of_bag_score == pytest.approx(expected, rel=1e-4)


def test_fewer_than_two_rows_out_of_bag_have_no_score():
    x, y = np.array([[0.0], [1.0]]), np.array([0, 1])
    reports = [stumps(x, y, trees=2, fraction=1.0, seed=seed).report.search for seed in range(6)]
    unseen = [(report.in_bag == 0).any(0).sum() for report in reports]
    assert all(np.isnan(report.out_of_bag_score) for report in reports)
    assert 1 in unseen


DGT = jtrees.DGT(depth=2, epochs=20, batch_size=35, widths=())


def bagged(base):
    return jtrees.Bagged(base, trees=TREES, fraction=0.7)


@pytest.mark.parametrize("base", [DGT, jtrees.BestOf(DGT, runs=2), jtrees.Bagged(DGT, trees=2)])
def test_trees_without_time_are_left_out(table, base, monkeypatch):
    monkeypatch.setattr(Monitor, "may_be_late", lambda monitor, seconds=0.0: False)
    x, y, _ = table
    fit = jtrees.fit(bagged(base), x, y, key=KEY, max_seconds=1e-6)
    assert len(fit.model) == len(fit.report.search.bases) == 1 and fit.report.ended == "max_seconds"
    best = jtrees.fit(jtrees.BestOf(DGT, runs=3), x, y, key=KEY, max_seconds=1e-6).report.search
    assert best.run == 0 and np.isfinite(best.scores).tolist() == [True, False, False]


@pytest.mark.parametrize("limit", [1, 3])
def test_samples_of_large_tables_are_not_in_memory_at_once(table, limit, monkeypatch):
    """The forest is the same; after a deadline, trees that have not begun are left out."""
    x, y, _ = table
    fit = lambda **options: jtrees.fit(bagged(DGT), x, y, key=KEY, **options)
    full, samples, bootstrap = fit(), [], Problem.bootstrap
    monkeypatch.setattr("jtrees.ensembles.bagged._MEMORY", limit * 16 * 200 * 3)

    def counted(problem, rows):
        sample = bootstrap(problem, rows)
        samples.append(weakref.ref(sample))
        assert sum(reference() is not None for reference in samples) <= limit
        return sample

    monkeypatch.setattr(Problem, "bootstrap", counted)
    np.testing.assert_array_equal(fit().predict(x), full.predict(x))
    assert len(samples) == TREES
    late = fit(max_seconds=1e-6)
    assert 0 < len(late.model) <= limit < TREES and late.report.ended == "max_seconds"


BAD = [({"trees": 2**40}, "trees must be at most"), ({"combine": "vote"}, 'combine must be "mean" in regression')]


@pytest.mark.parametrize(("options", "message"), [*BAD, ({"base": DGT.replace(depth=0)}, "depth must be")])
def test_bad_arguments_are_refused(data, options, message):
    with pytest.raises(ValueError, match=message):
        jtrees.fit(jtrees.Bagged(**({"base": DGT} | options)), *data, key=KEY)


def test_a_tree_that_became_non_finite_is_left_out(data, monkeypatch):
    calls, search = [], OneSplit.search

    async def fails(recipe, problem):
        calls.append(problem)
        if len(calls) in failing:
            raise FloatingPointError("training became non-finite")
        return await search(recipe, problem)

    monkeypatch.setattr(OneSplit, "search", fails)
    failing = {1, 3}
    with pytest.warns(UserWarning, match=f"2 of {TREES} trees became non-finite and are left out"):
        fit = jtrees.fit(jtrees.Bagged(OneSplit(), trees=TREES), *data, key=KEY)
    assert len(fit.model) == len(fit.report.search.losses) == TREES - 2
    failing = {*range(100)}
    with pytest.raises(FloatingPointError, match="training became non-finite"):
        jtrees.fit(jtrees.Bagged(OneSplit(), trees=TREES), *data, key=KEY)


@pytree.dataclass
class Scored(jtrees.Recipe):
    """A recipe whose runs have the next of ``scores``, or raise it."""

    scores: ClassVar[Any] = iter(())

    async def search(self, problem):
        if isinstance(score := next(Scored.scores), Exception):
            raise score
        return Fitted(None, score, 0, np.zeros(2, np.float32), report=score)


@pytest.mark.parametrize(
    ("scores", "best"), [([3, 1, 2], 1), ([None, np.inf, 0.5], 2), ([None, np.inf, np.inf], 1), ([None] * 3, None)]
)
@pytest.mark.parametrize("error", [FloatingPointError("no result"), OutOfTimeError("no result")], ids=repr)
def test_the_best_is_a_run_with_a_result(table, scores, best, error):
    Scored.scores = iter([error if score is None else score for score in scores])
    problem = problem_of_table(jtrees.BestOf(Scored(), runs=3), checked_table(*table[:2], None, "regression"))
    [result] = problem.engine.run(problem.recipe.search(problem))
    if best is None:
        assert result is error
    else:
        assert result.report.run == best and result.report.base == result.score == scores[best]
        np.testing.assert_array_equal(result.report.scores, [np.inf if score is None else score for score in scores])
        histories = [np.full(2, np.nan) if score is None else np.zeros(2) for score in scores]
        np.testing.assert_array_equal(result.history, histories)


def test_a_run_is_chosen_by_the_loss_of_the_tree_that_it_returns(table):
    """The polish changes the trees, so the losses before the polish do not choose."""
    x, y = table[:2]
    base = jtrees.DGT(depth=2, epochs=3, widths=(), precondition=0.0)
    fit = jtrees.fit(jtrees.BestOf(jtrees.Polished(base, epochs=20), runs=3), x, y, task="regression", key=KEY)
    scores, losses = fit.report.search.scores, fit.report.search.base.losses
    assert fit.loss == pytest.approx(scores.min() * np.ptp(y) ** 2) and losses[-1] <= losses[0]


@pytest.mark.parametrize("combinator", ["Bagged", "Boosted"])
def test_the_best_run_has_the_lowest_loss_of_the_model(combinator):
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (200, 2))
    y = np.sin(5 * x[:, 0]) + 0.3 * rng.normal(size=200)
    base = jtrees.DGT(depth=2, epochs=5, precondition=0)
    sums = jtrees.Bagged(base, trees=3) if combinator == "Bagged" else jtrees.Boosted(base, rounds=2)
    fit = jtrees.fit(jtrees.BestOf(sums, runs=4), x, y, key=KEY, validation=(x[:50], y[:50]))
    report = fit.report.search
    assert report.scores.min() * np.ptp(y) ** 2 == pytest.approx(fit.loss, rel=1e-3)
    assert len(set(report.scores)) > 1
