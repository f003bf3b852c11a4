"""The losses that a fit is compared with, by scikit-learn's models; verdicts, and warnings of fits that are behind."""

import time
import warnings

import jax
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, Ridge, TweedieRegressor
from sklearn.metrics import log_loss
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import jtrees
from jtrees.data import Scaling
from jtrees.description import count_free
from jtrees.report import BehindBaselineWarning, Comparison, compared
from jtrees.report.rivals import rivals
from jtrees.ridge import least_squares
from jtrees.search import LeftOut
from jtrees.search.monitor import Monitor
from jtrees.tables import checked_dataset, checked_table
from jtrees.tables.dataset import held_out_table

pytestmark = pytest.mark.usefixtures("standard_promotion")

KEY = jax.random.key(0)
LATE = Monitor(deadline=time.monotonic() - 1)
rng = np.random.default_rng(0)
X = rng.normal(size=(200, 6)) * [1, 10, 1e-3, 1, 1, 0] + [0, 1e4, 0, 0, 0, 5]
Y = X[:, 0] + (X[:, 1] - 1e4) / 5 - 500 * X[:, 2] + 0.3 * rng.normal(size=200)
CLASS = np.digitize(Y, [-1, 1])
STUMP = jtrees.GET(depth=1, starts=1, epochs=5, cart=False)


class Constant:
    """A model that predicts a constant, of several outputs if given."""

    def __init__(self, value, *columns):
        self.value, self.columns = value, columns

    def predict(self, x):
        return np.full((len(x), *self.columns), self.value)


def losses_of(x, y, *, held_out=None, weight=None, task="regression", model=None, left_out=None):
    table = checked_table(x, y, weight, task)
    other = None if held_out is None else held_out_table(*held_out, table)
    model = model or Constant(0.0, *y.shape[1:])
    return compared(model, table, Scaling.fit(table), held_out=other, left_out=left_out).losses


def ridge(x, y, weight=None):
    weight = None if weight is None else weight / weight.mean()  # as a table has them
    return make_pipeline(StandardScaler(), Ridge(1.0)).fit(x, y, ridge__sample_weight=weight)


@pytest.mark.parametrize("several", [False, True])
def test_losses_on_held_out_rows_are_those_of_scikit_learn(several):
    y = np.stack([Y, X[:, 3] ** 2], 1) if several else Y
    weight = rng.uniform(0.1, 2, 150)
    result = losses_of(X[:150], y[:150], weight=weight, held_out=(X[150:], y[150:]))
    linear = ridge(X[:150], y[:150], weight).predict(X[150:])
    mean = np.average(y[:150], axis=0, weights=weight)
    unit = np.ptp(y[:150], axis=0) if several else 1  # several targets count alike
    for name, predictions in {"model": 0, "constant": mean, "linear": linear}.items():
        assert result[name] == pytest.approx(np.mean(((predictions - y[150:]) / unit) ** 2), rel=1e-6), name


@pytest.mark.parametrize("kind", ["two", "three", "weighted"])
def test_log_losses_on_held_out_rows_are_those_of_scikit_learn(kind):
    y = (Y > 0).astype(int) if kind == "two" else CLASS
    weight = rng.uniform(0.1, 2, 150) if kind == "weighted" else None
    options = {"held_out": (X[150:], y[150:]), "task": "classification", "model": Constant(1 / 3, 3)}
    result = losses_of(X[:150], y[:150], weight=weight, **options)
    scale = StandardScaler().fit(X[:150])
    total = 150 if weight is None else weight / weight.mean()  # as a table has them
    linear = LogisticRegression(C=2 if kind == "two" else 1, tol=1e-8, max_iter=1000).fit(
        scale.transform(X[:150]), y[:150], None if weight is None else total
    )
    expected = log_loss(y[150:], linear.predict_proba(scale.transform(X[150:])))
    assert result["linear"] == pytest.approx(expected, rel=0.01)  # two outputs of two classes share a slope
    share = np.bincount(y[:150], None if weight is None else total) + 1 / (y.max() + 1)
    share = share / share.sum()
    assert result["constant"] == pytest.approx(-np.log(share[y[150:]]).mean(), rel=1e-6)
    assert result["model"] == pytest.approx(np.log(3))


@pytest.mark.parametrize(
    ("loss", "power"), [("poisson", 1.0), (jtrees.losses.Tweedie(1.5), 1.5), ("gamma", 2.0)], ids=["1", "1.5", "2"]
)
def test_linear_model_with_a_log_link_is_that_of_scikit_learn(loss, power):
    """Means are small: a penalty of a fixed size would leave nearly a constant."""
    rng = np.random.default_rng(0)
    mean = 0.02 * np.exp(X[:, 0])
    y = rng.gamma(2.0, mean / 2) if power > 1 else rng.poisson(20 * mean).astype(float)
    weight = rng.uniform(0.1, 2, 150)
    task = jtrees.Regression(loss_function=loss)
    result = losses_of(X[:150], y[:150], weight=weight, held_out=(X[150:], y[150:]), task=task, model=Constant(0.02))
    scale = StandardScaler().fit(X[:150])
    unit = np.average(y[:150], weights=weight)  # the ridge penalty is that of targets of mean 1
    linear = TweedieRegressor(power=power, link="log", alpha=1 / 150, tol=1e-8, max_iter=1000).fit(
        scale.transform(X[:150]), y[:150] / unit, weight
    )
    predicted = unit * linear.predict(scale.transform(X[150:]))
    expected = task.loss_function.of_predictions(predicted, y[150:]).mean()
    assert result["linear"] == pytest.approx(expected, rel=1e-3) and result["linear"] < result["constant"]


@pytest.mark.parametrize(("loss", "level"), [("absolute_error", 0.5), (jtrees.losses.Quantile(0.9), 0.9)])
def test_rivals_of_quantiles_minimise_the_pinball_loss(loss, level):
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(2000, 2))
    y = x[:, 0] * (1 + rng.exponential(5.0, 2000))
    task = jtrees.Regression(loss_function=loss)
    row_losses = {}
    for rows in (1000, 10_000):  # a linear program, and least squares
        models, other_loss = rivals(task, rows, depth=2, seed=0, forests=False)
        predicted = models["linear model"].fit(x[:1000], y[:1000]).predict(x[1000:])
        row_losses[rows] = task.prediction_loss(predicted, y[1000:]).mean()
        assert ("linear model" in other_loss) == (rows > 5000)
        constant = models["constant"].fit(x[:1000], y[:1000]).predict(x)
        np.testing.assert_allclose(constant, np.quantile(y[:1000], level), rtol=0.02)
    assert row_losses[1000] < 0.99 * row_losses[10_000]


def test_on_training_data_the_linear_model_is_charged_for_its_parameters():
    result = losses_of(X, Y)
    residual = Y - ridge(X, Y).predict(X)
    assert result["linear"] == pytest.approx(np.mean(residual**2) / (1 - 7 / 200) ** 2, rel=1e-5)
    assert result["constant"] == pytest.approx(Y.var() / (1 - 1 / 200) ** 2)
    assert losses_of(X[:6], Y[:6])["linear"] == np.inf  # as many parameters as samples
    many = losses_of(np.tile(X, (120, 1)), np.tile(Y, 120))  # of which some are taken, evenly
    assert many["constant"] == pytest.approx(Y.var(), rel=0.01) and many["linear"] < 1.1 * result["linear"]


def test_rows_that_a_search_left_out_are_those_of_the_comparison():
    losses = np.append(np.full(150, np.nan), np.linspace(1, 6, 50))
    result = losses_of(X, Y, left_out=LeftOut(losses, chose=True, several=False))
    assert result == pytest.approx(losses_of(X[:150], Y[:150], held_out=(X[150:], Y[150:])) | {"model": 3.5})
    # Rows that were left out in turns are compared with models of all rows.
    result = losses_of(X, Y, left_out=LeftOut(np.append([np.nan] * 20, np.ones(180)), chose=False, several=True))
    residual = (Y - ridge(X, Y).predict(X))[20:]
    assert result["model"] == 1 and result["linear"] == pytest.approx(
        np.mean(residual**2) / (1 - 7 / 200) ** 2, rel=1e-5
    )


def test_margins_are_two_standard_errors_of_paired_differences():
    rng = np.random.default_rng(0)
    weight, easy = rng.uniform(0.5, 2, 400), rng.normal(10, 5, 400)  # rows differ much more than models
    losses = {"model": easy, "constant": easy + 4 + rng.normal(size=400), "CART, depth 3": easy - 0.2}
    losses["gradient boosting"] = easy - 0.6 + rng.normal(size=400)
    comparison = Comparison.from_losses(losses, weight, "loss", "held-out rows")
    share = weight / weight.sum()
    for rival, margin in comparison.margins.items():
        difference = easy - losses[rival]
        error = np.sqrt((share**2 * (difference - share @ difference) ** 2).sum())
        assert margin == pytest.approx(max(2 * error, 0.002 * comparison.losses["constant"])), rival
        assert (rival in comparison.better) == (share @ difference > margin)
    assert comparison.better == ["gradient boosting", "CART, depth 3"]
    assert comparison.verdict("GET").startswith("Gradient boosting and CART are better than GET: loss ")
    leading = Comparison({"model": 1.0, "linear": 2.0}, "loss", "held-out rows", {"linear": 0.05})
    assert leading.verdict("GET") == "GET is better than a linear model: loss 1, 2 for a linear model, on held-out rows"
    ranked = {"model": 5.0, "random forest": 5.2, "linear": 5.3, "constant": 5.4, "CART, depth 3": 5.5, "other": 9.0}
    behind = Comparison(ranked, "loss", "held-out rows", dict.fromkeys([*ranked][1:], 0.1) | {"CART, depth 3": 0.6})
    sentence = behind.verdict("GET")
    assert sentence.startswith("GET is neither clearly better nor clearly worse than CART: loss 5, 5.2 for ")
    assert sentence.endswith("5.4 for a constant and 5.5 for CART, on held-out rows")  # a named rival has its loss
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        leading.warn_if_behind("GET", "another recipe may do better")


@pytest.mark.parametrize(
    ("task", "y"), [("regression", Y), pytest.param("classification", CLASS, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("where", ["validation", "held_out", "training"])
def test_a_fit_that_is_behind_warns(task, y, where):
    how = {"validation": {"validation": (X, y)}, "held_out": {"held_out": 0.2}, "training": {}}[where]
    rows = {"validation": "the validation set", "held_out": "held-out rows", "training": "the training rows"}[where]
    advice = f"a sum of trees may do better: jtrees.estimators.Boosted{'Regress' if y is Y else 'Classifi'}(or|er)"
    with pytest.warns(BehindBaselineWarning, match=rf"A linear model .*better than GET: .*, on {rows}.*: {advice}"):
        fit = jtrees.fit(STUMP, X, y, key=KEY, task=task, **how)
    result = fit.report.baselines
    assert result["linear"] < result["model"] and fit.report.verdict in str(fit)


def test_a_loss_of_the_users_own_is_compared_with_nothing():
    task = jtrees.Regression(loss_function=lambda outputs, y: abs(outputs - y))
    report = jtrees.fit(jtrees.DGT(depth=1, widths=(), epochs=6), X, Y, key=KEY, task=task).report
    assert report.baselines is None and report.verdict is None


def test_a_fit_that_is_behind_for_lack_of_time_says_so():
    with pytest.warns(BehindBaselineWarning, match="max_seconds ended the training early$"):
        jtrees.fit(STUMP, X, Y, key=KEY, max_seconds=0.001)


def test_free_parameters_of_directions_that_are_shared_are_counted_once():
    leaves = lambda n: jtrees.leaves.Values(np.zeros(n + 1))
    tree = lambda w: jtrees.ObliqueTree(np.float32(w), np.zeros(len(w), np.float32), leaves(len(w)))
    direction = np.random.default_rng(0).normal(size=4)
    assert count_free(tree(np.outer([1, -2, 3], direction))) == 4 + 3 - 1 + 4  # with three thresholds and four leaves
    assert count_free(tree(np.random.default_rng(0).normal(size=(3, 4)))) == 3 * 4 + 4
    assert count_free(tree(np.eye(4)[[0, 1, 0]])) == 3 * (1 + 2) + 4  # one of four columns each
    assert count_free(tree(np.zeros((3, 4)))) == 1


@pytest.mark.parametrize("classes", [False, True])
def test_held_out_rows_are_not_trained_on(classes):
    y, options = (CLASS, {"task": "classification"}) if classes else (Y, {})
    table, out = checked_dataset(X, y, None, *options.values() or ["regression"]).divided(0.25, KEY)
    assert len(table.x) + len(out.x) == 200 and not set(map(tuple, table.x)) & set(map(tuple, out.x))
    if classes:
        np.testing.assert_array_equal(np.bincount(out.y), np.bincount(CLASS) // 4)
    with pytest.warns(BehindBaselineWarning):
        fit = jtrees.fit(STUMP, X, y, key=KEY, held_out=0.25, **options)
        same = jtrees.fit(STUMP, table.x, table.y, key=KEY, **options)
    np.testing.assert_array_equal(fit.predict(X), same.predict(X))
    for share in (-0.1, 1, True, np.nan, 0.001):
        with pytest.raises(ValueError, match="held_out must"):
            jtrees.fit(STUMP, X, Y, key=KEY, held_out=share)


@pytest.mark.parametrize("shape", [(30, 90), (90, 30)])
def test_least_squares_of_long_and_wide_tables_are_those_of_a_decomposition(shape):
    """Some columns are sums of other columns, so that the rank is lower."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape)
    x[:, 1] = x[:, 0] + x[:, 2]
    y = np.stack([x[:, :9].sum(1) + rng.normal(size=len(x)), rng.normal(size=len(x))], axis=1)
    expected = Ridge(1.0, fit_intercept=False, solver="svd").fit(x, y).coef_.T
    np.testing.assert_allclose(least_squares(x, y), expected, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["regression", "classification", "counts"])
def test_the_linear_model_takes_what_time_there_is(kind):
    task: jtrees.tasks.Task = {
        "regression": jtrees.Regression(),
        "classification": jtrees.Classification(3),
        "counts": jtrees.Regression(loss_function="poisson"),
    }[kind]
    x = np.random.default_rng(0).normal(size=(3000, 400))
    y = np.digitize(x[:, 0], [-1, 1]) if kind != "regression" else x[:, 0]
    table = checked_table(x, y, None, task)
    late, whole = (
        compared(Constant(1 / 3, *task.shape), table, Scaling.fit(table), held_out=table, monitor=monitor).losses
        for monitor in (LATE, None)
    )
    assert whole["linear"] < 0.9 * late["linear"] < late["linear"] < late["constant"]
