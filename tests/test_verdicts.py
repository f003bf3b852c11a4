"""Every loss of a report and of a verdict is computed again by hand, from predictions in the user's units."""

import re

import jax
import numpy as np
import pandas as pd
import pytest
from sklearn import metrics

import jtrees
from jtrees import Classification, Regression, losses
from jtrees.tables import checked_dataset
from tests import sweeps
from tests.estimator_checks import COMBINATORS, OTHERS, QUICK

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore::jtrees.report.BehindBaselineWarning"),
]

KEY = jax.random.key(0)
VALIDATION = "the validation set, which also chose the model"
SUM = jtrees.Boosted(COMBINATORS[0].base.replace(rows=200), rounds=8, learning_rate=0.5, patience=3)


def table(n, seed=0):
    """Features, and counts around 30: a loss in wrong units is wrong by orders of magnitude."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 4))
    return x, 1.0 + rng.poisson(np.exp(3 + 0.5 * (x[:, 0] + x[:, 1] > 0) + 0.3 * x[:, 2]))


X, Y = table(600)
X_NEW, Y_NEW = table(2000, seed=1)


def pinball(y, p):
    return np.mean([metrics.mean_pinball_loss(y, p[:, j], alpha=level) for j, level in enumerate((0.1, 0.8))])


def log_loss(y, p):
    return -np.mean(np.log(np.where(y > 30, p[:, 1], p[:, 0])))


def squared_errors(y, p, trained=None):
    """The loss of two targets, each divided by its range over the training rows."""
    span = np.ptp(targets("two targets", Y if trained is None else trained), axis=0)
    return np.mean(((p - targets("two targets", y)) / span) ** 2)


# The task, the mean loss of predictions, and the constant with the lowest loss. Half a sample of each class is added.
TASKS = {
    "squared error": (Regression(), metrics.mean_squared_error, np.mean),
    "quantiles": (
        Regression(loss_function=losses.Quantile((0.1, 0.8))),
        pinball,
        lambda y: np.quantile(y, (0.1, 0.8), method="inverted_cdf"),
    ),
    "poisson": (Regression(loss_function="poisson"), metrics.mean_poisson_deviance, np.mean),
    "two targets": (Regression(2), squared_errors, lambda y: targets("two targets", y).mean(0)),
    "classes": (Classification(2), log_loss, lambda y: (np.bincount(y > 30) + 0.5) / (len(y) + 1)),
}
EACH_TASK = pytest.mark.parametrize("name", TASKS)


def targets(name, y):
    if name == "classes":
        return (y > 30).astype(int)
    return np.stack([y, np.sqrt(y) * 1e3], axis=1) if name == "two targets" else y


def fit(recipe, name, x=X, y=Y, **options):
    return jtrees.fit(recipe, x, targets(name, y), task=TASKS[name][0], key=KEY, **options)


def check(report, name, predictions, y, trained, where):
    """Compares the losses of a report with those of predictions for some rows, and of a constant for training rows."""
    _, mean, constant = TASKS[name]
    constants = np.broadcast_to(best := constant(trained), (len(y), *np.shape(best)))
    assert report.baselines["model"] == pytest.approx(mean(y, predictions), rel=1e-5)
    assert report.baselines["constant"] == pytest.approx(mean(y, constants), rel=1e-3)
    number = re.search(r": [a-zA-Z ]+ ([-0-9.e+]+), ", report.verdict)
    assert float(number[1]) == pytest.approx(mean(y, predictions), rel=1e-3)
    assert report.verdict.endswith(f"on {where}")


@pytest.mark.slow
@EACH_TASK
def test_losses_on_a_validation_set(name):
    result = fit(QUICK[0], name, validation=(X_NEW, targets(name, Y_NEW)))
    predictions = result.predict(X_NEW)
    check(result.report, name, predictions, Y_NEW, Y, VALIDATION)
    assert result.loss == pytest.approx(TASKS[name][1](Y_NEW, predictions), rel=1e-5)


@pytest.mark.parametrize("recipe", sweeps.slow([*OTHERS, *COMBINATORS], COMBINATORS), ids=type)
def test_losses_of_every_recipe_on_held_out_rows(recipe):
    result = fit(recipe, "squared error", held_out=0.2)
    training, test = checked_dataset(X, Y, None, "regression").divided(0.2, KEY)
    check(result.report, "squared error", result.predict(test.x), test.y, training.y, "held-out rows")


@pytest.fixture
def first_leaves(monkeypatch):
    """The model is the sum that held out rows: its leaves are not fitted to all rows at the end."""

    async def late(*_):
        return None

    monkeypatch.setattr("jtrees.ensembles.boosted.refitted", late)


@pytest.mark.parametrize("name", sweeps.slow(TASKS, ["classes", "poisson"]))
@pytest.mark.usefixtures("first_leaves")
def test_losses_of_rows_that_a_sum_held_out(name):
    x, y = table(4100)  # a single sum
    result = fit(SUM, name, x, y)
    rows = result.report.held_out_rows
    assert len(rows) == 820
    units = {"trained": y} if name == "two targets" else {}
    expected = TASKS[name][1](y[rows], result.predict(x[rows]), **units)
    assert result.report.held_out_loss == result.report.baselines["model"] == pytest.approx(expected, rel=1e-5)
    assert result.report.verdict.endswith("on rows left out in training, which also chose the model")


@pytest.mark.parametrize("name", sweeps.quick(["poisson", "classes"], ["classes"]))
def test_losses_of_out_of_bag_rows(name):
    recipe = jtrees.Bagged(QUICK[0], trees=4, combine="mean")
    result = fit(recipe, name)
    out, mean = result.report.search.in_bag == 0, TASKS[name][1]
    trees = [result.model[i].predict(X) for i in range(4)]
    row_losses = np.array([[mean(Y[i : i + 1], tree[i : i + 1]) for i in range(len(Y))] for tree in trees])
    count = out.sum(0)
    rows = count > 0
    partial_loss = mean(Y[rows], result.report.search.out_of_bag[rows])
    single = np.average(row_losses[:, rows], axis=0, weights=out[:, rows]).mean()
    inverse = np.mean(1 / count[rows])
    expected = partial_loss - (single - partial_loss) / (1 - inverse) * (inverse - 1 / 4)
    assert result.report.held_out_loss == result.report.baselines["model"] == pytest.approx(expected, rel=1e-4)
    assert result.report.verdict.endswith("on rows left out in training")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "name"),
    [(OTHERS[4], "poisson"), (OTHERS[5], "quantiles"), (OTHERS[3], "squared error")],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_losses_of_trials_are_near_the_losses_of_new_rows(recipe, name):
    """In the units of the task, whatever the search minimises. Correlated features make searches try strengths."""
    x, y = table(1000)
    mix = np.array([[1, 1, 1, 0], [0, 0.1, 0, 0], [0, 0, 0.1, 0], [0, 0, 0, 1]])
    result = fit(recipe, name, x @ mix, y)
    new = TASKS[name][1](Y_NEW, result.predict(X_NEW @ mix))
    assert result.report.held_out_loss == result.report.baselines["model"] == pytest.approx(new, rel=0.35)


@pytest.mark.slow
@pytest.mark.usefixtures("first_leaves")
@pytest.mark.parametrize("raw", [False, True])
def test_numbers_of_left_out_rows_are_those_of_the_users_rows(raw):
    """Also with weights, some of them 0, and with rows that ``held_out`` sets aside."""
    x, y = table(n := 8200)  # a single sum in each fit
    weight = np.random.default_rng(0).uniform(0.2, 3, n) * (np.arange(n) % 3 > 0)
    frame = pd.DataFrame(x) if raw else x
    result = fit(SUM, "squared error", frame, y, sample_weight=weight, held_out=0.2)
    folds = jtrees.sweep(SUM, frame, y, key=jax.random.key(0), validation=2).fits.ravel()
    for single, weights in ((result, weight), *((fold, np.ones(n)) for fold in folds)):
        rows = single.report.held_out_rows
        assert (weights[rows] > 0).all() and len(set(rows.tolist())) == len(rows)
        errors = (single.predict(frame.iloc[rows] if raw else x[rows]) - y[rows]) ** 2
        assert single.report.held_out_loss == pytest.approx(np.average(errors, weights=weights[rows]), rel=1e-5)


def test_losses_on_training_rows():
    """Of a sum without a charge, and of a tree with a charge for its parameters."""
    result = fit(COMBINATORS[0], "squared error")
    assert result.report.held_out_loss is None and result.report.verdict.endswith("on the training rows")
    trained = metrics.mean_squared_error(Y, result.predict(X))
    assert result.report.baselines["model"] == pytest.approx(trained, rel=1e-5)
    assert result.report.baselines["constant"] == pytest.approx(Y.var() / (1 - 1 / 600) ** 2, rel=1e-6)
    result = fit(OTHERS[0], "squared error")
    trained = metrics.mean_squared_error(Y, result.predict(X))
    assert result.loss == pytest.approx(trained, rel=1e-5)
    assert 1 < result.report.baselines["model"] / trained < 1.2
    assert result.report.verdict.endswith("on the training rows, with a penalty for each parameter")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["squared error", "poisson"])
def test_scores_of_monotone_trees_are_those_of_ordered_leaves(name):
    recipe = jtrees.BestOf(jtrees.NonGreedy(depth=3, greedy_epochs=3, epochs=6, shrink=False, precondition=0), runs=2)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 2))
    y = -x[:, 0] + np.sin(3 * x[:, 1]) + 0.3 * rng.normal(size=400)  # falls, against the constraint
    y, task = (y, "regression") if name == "squared error" else (np.exp(y), TASKS[name][0])
    unit = np.ptp(y[:200]) ** 2 if name == "squared error" else y[:200].mean()
    validation = x[200:], y[200:]
    result = jtrees.fit(recipe, x[:200], y[:200], validation=validation, monotone={0: 1}, task=task, key=KEY)
    assert unit * result.report.search.scores.min() == pytest.approx(result.loss, rel=1e-3)
