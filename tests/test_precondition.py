"""Preconditioning: the same trees in other coordinates, and the choice of how far from the data's own."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from jtrees.search import Evaluation, Fitted, precondition
from jtrees.search.minibatch import trained
from jtrees.search.monitor import Monitor
from jtrees.search.precondition import matrix, preconditioned, spectrum
from jtrees.tables import checked_table
from jtrees.training import Batch
from tests import recipes, sweeps
from tests.problems import problem_of_table, run, search
from tests.tables import X, Y

pytestmark = pytest.mark.usefixtures("standard_promotion")  # Adam; see the fixture

KEY = jax.random.key(0)
SMALL = {
    "DGT": jtrees.DGT(depth=2, epochs=60, widths=()),
    "LatentTree": jtrees.LatentTree(depth=2, epochs=60),
    "LatentTree-mlp": jtrees.LatentTree(depth=2, epochs=30, split="mlp", predictor="mlp", hidden=8),
    "TEL": jtrees.TEL(depth=2, trees=4, epochs=60),
    "NonGreedy": jtrees.NonGreedy(depth=2, greedy_epochs=10, epochs=30),
}


@pytest.fixture(scope="module")
def collinear():
    """Two pairs of nearly equal features, of which only the differences matter: x ``(600, 5)``, y ``(600,)``."""
    rng = np.random.default_rng(0)
    x = np.repeat(rng.normal(size=(600, 2)), 2, axis=1) + 0.01 * rng.normal(size=(600, 4))
    x = np.column_stack([x, rng.normal(size=600)])
    y = np.sign(x[:, 0] - x[:, 1]) + 0.5 * np.sign(x[:, 2] - x[:, 3]) + 0.05 * rng.normal(size=600)
    return x, y


def batch_of(x, weight=None):
    return Batch(np.asarray(x, np.float32), None, None if weight is None else np.asarray(weight, np.float32))


@pytest.mark.parametrize("shape", [(50, 4), (6, 9)], ids=["n > p", "p > n"])
@pytest.mark.parametrize("strength", [0.0, 0.5, 0.99])
def test_the_matrix_is_the_inverse_root_of_the_shrunk_correlations(shape, strength):
    x = np.random.default_rng(0).normal(size=shape) @ np.diag(np.arange(1.0, shape[1] + 1))
    x[:, 1] += x[:, 0]
    features = spectrum(batch_of(x))
    shrunk = (1 - strength) * np.eye(shape[1]) + strength * np.corrcoef(x.T)
    for power, expected in ((-0.5, np.linalg.inv(shrunk)), (0.5, shrunk)):
        root = matrix(features, strength, power)
        # Rounding in float32, amplified by eigenvalues down to 1 - strength.
        np.testing.assert_allclose(root @ root, expected, rtol=1e-4, atol=1e-4)


def test_weights_are_repetitions_and_rows_of_weight_0_are_ignored():
    x = np.random.default_rng(0).normal(size=(20, 3))
    weighted = spectrum(batch_of(np.vstack([x, 100 * x[:5]]), [2] * 10 + [1] * 10 + [0] * 5))
    repeated = spectrum(batch_of(np.vstack([x, x[:10]])))
    np.testing.assert_allclose(matrix(weighted, 0.9), matrix(repeated, 0.9), rtol=1e-5, atol=1e-5)


def test_a_constant_feature_is_uncorrelated_and_equal_features_stay_finite():
    x = np.random.default_rng(0).normal(size=(30, 3))
    x[:, 1], x[:, 2] = 0, x[:, 0]
    root = matrix(spectrum(batch_of(x)), 0.99)
    assert np.isfinite(root).all() and np.abs(root).max() <= (1 - 0.99) ** -0.5 + 1e-4
    np.testing.assert_allclose(root[1], [0, 1, 0], atol=1e-6)


def problem_of(recipe, x, y):
    return problem_of_table(recipe, checked_table(x, y, None, "regression"), key=7)


@pytest.mark.slow
@pytest.mark.parametrize("name", sweeps.quick(["DGT", "LatentTree-mlp", "NonGreedy"], ["DGT"], []))
def test_a_fixed_strength_is_the_search_on_mapped_features(name, collinear):
    short = {"epochs": 2} | ({"greedy_epochs": 2} if name == "NonGreedy" else {})  # rounding grows with the steps
    problem, plain = (problem_of(SMALL[name].replace(precondition=p, **short), *collinear) for p in (0.5, 0.0))
    x, m = problem.batch.x, matrix(spectrum(problem.batch), 0.5)
    mapped = plain.replace(batch=plain.batch._replace(x=x @ m))
    results = [search(part) for part in (problem, mapped)]
    fitted, expected = (result.scaled if result.scaled is not None else result.model.network for result in results)
    apply = lambda model, x: model.apply(x) if isinstance(model, jtrees.ObliqueTree) else model.outputs(x)
    outputs = lambda model, x: np.asarray(apply(*jax.tree.map(jnp.asarray, (model, x))))
    ours, theirs = outputs(fitted, x), outputs(expected, x @ m)
    # A sample at a split may fall to its other side.
    assert np.mean(np.abs(ours - theirs) > 1e-3) < 0.02


def preconditioned_by(train, problem, **options):
    return run(preconditioned(problem, "auto", train, **options), engine=problem.engine)[0]


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        *[((1.0, 0.96, 0.97), 0), ((1.0, 0.95, 0.97), 1), ((1.0, 2.0, 0.5), 2), ((1.0, 2.0, 3.0), 0)],
        *[((-1.0, -1.04, -1.03), 0), ((-1.0, -1.05, -1.03), 1)],  # minus mean rewards
        ((1.0, np.inf, 0.5), 2),
        ((1.0, np.inf, np.inf), 0),
    ],
)
def test_a_strength_must_be_clearly_better_than_none(losses, best, collinear):
    """A trial that became non-finite is not chosen."""
    scores = iter(losses)

    async def train(problem, trial):
        score = next(scores) if problem.count < 600 else 0.0
        if np.isinf(score):
            raise FloatingPointError
        return Fitted(None, score, 0, None)

    result = preconditioned_by(train, problem_of(SMALL["DGT"], *collinear))
    assert result.preconditioning.strength == (0.0, 0.9, 0.99)[best]
    np.testing.assert_allclose(result.preconditioning.losses, losses)
    assert result.fitted.score == 0 and result.trial.score == losses[best]  # also where others had lower losses
    assert result.held_out.sum() == 120


def test_the_best_trial_is_the_result_if_the_last_training_became_non_finite(collinear):
    async def train(problem, trial):
        if trial is not None:
            raise FloatingPointError
        return Fitted(None, 0.5, 3, None, report="the trial's")

    with pytest.warns(UserWarning, match="the last training became non-finite, so the trial is kept"):
        result = preconditioned_by(train, problem_of(SMALL["DGT"], *collinear))
    assert result.fitted.report == "the trial's"


def test_with_a_validation_set_the_best_of_the_trainings_on_all_rows_is_the_result(collinear):
    counts, problem = [], problem_of(SMALL["DGT"], *collinear)
    problem = problem.replace(evaluation=problem.batch, kind=Evaluation.VALIDATION)

    async def train(problem, trial):
        counts.append(problem.count)
        return Fitted(None, (1.0, 0.5, 0.7)[len(counts) - 1], 3, None, report=len(counts))

    result = preconditioned_by(train, problem)
    assert counts == [problem.count] * 3 and result.fitted.report == 2
    assert result.preconditioning.strength == 0.9 and result.trial is None


def test_the_best_trial_is_the_result_if_the_time_is_up_after_it(collinear):
    trained_on = []

    async def train(problem, trial):
        problem.monitor.ended = "max_seconds"
        trained_on.append(problem)
        return Fitted(None, 0.5, 3, None, report="the trial's")

    result = preconditioned_by(train, problem_of(SMALL["DGT"], *collinear))
    assert len(trained_on) == 1 and result.fitted.report == "the trial's"
    np.testing.assert_array_equal(result.preconditioning.losses, np.float32([0.5, np.inf, np.inf]))


def test_trials_do_not_see_the_held_out_rows(collinear):
    problem = problem_of(SMALL["DGT"].replace(epochs=6), *collinear)

    def first_trial(problem):
        trials = []

        async def train(problem, trial):
            trials.append((problem, await trained(problem)))
            return trials[-1][1]

        preconditioned_by(train, problem, trial=train)
        return trials[0]

    trial, fitted = first_trial(problem)
    held_out = trial.evaluation.weight > 0
    assert held_out.sum() == len(collinear[0]) // 5 and not (held_out & trial.weighed).any()
    y = np.where(held_out, 1 - problem.batch.y, problem.batch.y)
    _, changed = first_trial(problem.replace(batch=problem.batch._replace(y=y)))
    np.testing.assert_array_equal(changed.history, fitted.history)
    assert changed.score != fitted.score


def test_no_strength_is_tried_on_uncorrelated_features():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 3))
    fit = jtrees.fit(SMALL["DGT"].replace(epochs=2), x, x[:, 0], key=KEY)
    assert fit.report.search.preconditioning is None


@pytest.mark.parametrize("name", ["DGT", *sweeps.slow(["LatentTree", "TEL", "NonGreedy"], ["TEL"])])
def test_by_default_the_strength_with_the_lowest_loss_on_rows_left_out_is_chosen(name, collinear):
    x, y = collinear
    fit = jtrees.fit(SMALL[name], x, y, key=KEY)
    losses = fit.report.search.preconditioning.losses
    assert losses.shape == (3,) and np.isfinite(losses).all()
    clearly = losses.min() < (1 - 0.5 / np.sqrt(len(x) // 5)) * losses[0]
    strength = (0.0, 0.9, 0.99)[int(losses.argmin()) if clearly else 0]
    assert fit.report.search.preconditioning.strength == np.float32(strength)
    if name != "NonGreedy":  # whose start from a ridge regression needs none
        without = jtrees.fit(SMALL[name].replace(precondition=0.0), x, y, key=KEY)
        assert fit.loss < 0.7 * without.loss  # what carries the targets has a variance of 1e-4


@pytest.mark.slow
def test_the_starts_of_get_have_different_strengths(collinear):
    x, y = collinear
    get = jtrees.GET(depth=2, starts=4, epochs=200, cart=False, halving=False)
    fit, without = (jtrees.fit(get.replace(precondition=p), x, y, key=KEY) for p in ("auto", 0.0))
    np.testing.assert_array_equal(fit.report.search.strengths, np.float32([0, 0.9, 0, 0.99]))
    assert fit.report.search.chosen in (1, 3) and fit.loss < 0.7 * without.loss
    assert without.report.search.strengths is None


def test_a_start_from_cart_is_cart_in_any_coordinates(collinear):
    x, y = collinear
    fit = jtrees.fit(jtrees.GET(depth=2, starts=1, epochs=1, learning_rate=1e-9, precondition=0.9), x, y, key=KEY)
    np.testing.assert_allclose(fit.report.search.losses[0], fit.report.search.cart_loss, rtol=1e-3)


@pytest.mark.parametrize("rows", sweeps.slow([96, 97, 300, 1024, 1025], [300]))
def test_what_a_trial_found_is_handed_to_the_last_run(rows):
    """Uncorrelated features: only tables of 100 to 1024 rows have a trial, to find a strength of shrinkage."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 3)), rng.normal(size=rows)
    learn = lambda **options: jtrees.fit(jtrees.CO2(depth=6, epochs=1, **options), x, y, key=jax.random.key(4))
    fit, shrunk_by_gcv, unshrunk = learn(), learn(precondition=0.0), learn(shrink=False)
    has_trial = 100 <= rows <= 1024
    assert (fit.report.search.preconditioning is not None) == has_trial
    assert unshrunk.report.search.preconditioning is None
    assert np.isfinite(fit.report.search.shrinkage) == has_trial
    # Targets that are noise: means are the best for rows held out, unless those are few.
    spread = lambda fit: np.std(fit.predict(x))
    assert spread(shrunk_by_gcv) < spread(unshrunk)
    if not has_trial:
        assert spread(fit) == spread(shrunk_by_gcv)
    elif rows >= 300:
        assert spread(fit) < 0.5 * spread(shrunk_by_gcv)


@pytest.mark.parametrize("name", sweeps.quick(["DGT", "NODE", "GRANDE"], ["DGT"]))
def test_correlations_are_computed_only_if_a_strength_needs_them(name, monkeypatch):
    calls = []
    monkeypatch.setattr(precondition, "spectrum", lambda *args, **options: calls.append(1))
    recipe = recipes.DGT.replace(precondition=0) if name == "DGT" else recipes.RECIPES[name]
    jtrees.fit(recipe, X, Y, key=KEY)
    assert not calls


@pytest.mark.slow
def test_correlations_are_those_of_a_sample_of_the_rows_if_the_time_is_short():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3000, 200)) @ np.diag(np.arange(1.0, 201.0))
    x[:, 0] += x[:, 1]
    late, exact = spectrum(batch_of(x), monitor=Monitor(deadline=time.monotonic() - 1)), spectrum(batch_of(x))
    assert not np.array_equal(late.values, exact.values)
    np.testing.assert_allclose(matrix(late, 0.5)[0, 1], matrix(exact, 0.5)[0, 1], atol=0.05)
