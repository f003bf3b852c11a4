"""Losses of tasks: values, derivatives, best constants, units; every recipe with every loss; policies."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import metrics

import jtrees
from jtrees import Classification, Policy, Regression, leaves, losses
from jtrees.tasks.base import linked
from jtrees.tasks.fits import newton_constants

pytestmark = pytest.mark.usefixtures("standard_promotion")  # Adam; see the fixture

KEY = jax.random.key(0)
rng = np.random.default_rng(0)
N = 200
COUNTS = rng.poisson(1.5, N).astype(float)
POSITIVE = rng.gamma(2.0, 1.5, N)
REAL = rng.normal(size=N)
OUTPUTS = rng.normal(size=N)
WEIGHT = rng.integers(0, 3, N).astype(float)
LEAF = rng.integers(0, 4, N)
LEAF[LEAF == 3] = 2  # the last leaf is empty


def quartic(outputs, y):
    """A loss of the user's own, without a closed form."""
    return (outputs - y) ** 4 + 0.5 * (outputs - y) ** 2


# A loss, targets that it takes, and the mean loss of predictions by scikit-learn, if it has it.
LOSSES = {
    "squared": (losses.SquaredError(), REAL, metrics.mean_squared_error),
    "absolute": (losses.AbsoluteError(), REAL, metrics.mean_absolute_error),
    "huber": (losses.Huber(0.7), REAL, None),
    "quantile": (losses.Quantile(0.8), REAL, lambda y, p, **o: metrics.mean_pinball_loss(y, p, alpha=0.8, **o)),
    "poisson": (losses.Poisson(), COUNTS, metrics.mean_poisson_deviance),
    "gamma": (losses.Gamma(), POSITIVE, metrics.mean_gamma_deviance),
    "tweedie": (losses.Tweedie(1.4), COUNTS, lambda y, p, **o: metrics.mean_tweedie_deviance(y, p, power=1.4, **o)),
    "own": (losses.CustomLoss(quartic), REAL, None),
}
SMOOTH = [name for name, (loss, _, _) in LOSSES.items() if loss.smooth]


def in_double(loss, y):
    return jnp.asarray(OUTPUTS, jnp.float64), jnp.asarray(y, jnp.float64)


@pytest.mark.parametrize("name", [name for name, (_, _, theirs) in LOSSES.items() if theirs])
def test_values_are_those_of_sklearn(name, x64):
    loss, y, theirs = LOSSES[name]
    predictions = linked(loss.link, OUTPUTS)
    expected = theirs(y, predictions, sample_weight=WEIGHT)
    assert np.average(loss.of_predictions(predictions, y), weights=WEIGHT) == pytest.approx(expected, rel=1e-12)
    ours = loss.samples(*in_double(loss, y))
    assert ours.shape == (N,)
    assert np.average(ours, weights=WEIGHT) == pytest.approx(expected, rel=1e-12)


def test_huber_is_its_definition():
    error = np.array([-2.0, -0.7, 0.1, 3.0])
    expected = [0.7 * (2 - 0.35), 0.245, 0.005, 0.7 * (3 - 0.35)]
    np.testing.assert_allclose(losses.Huber(0.7).of_predictions(error, np.zeros(4)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_derivatives_are_those_of_automatic_differentiation(name, x64):
    loss, y, _ = LOSSES[name]
    outputs, y = in_double(loss, y)
    slope = jax.grad(lambda outputs: loss.samples(outputs, y).sum())
    curve = jax.jvp(slope, (outputs,), (jnp.ones(N),))[1]
    gradient, curvature = loss.derivatives(outputs, y)
    np.testing.assert_allclose(gradient, slope(outputs), rtol=1e-9, atol=1e-12)
    if loss.smooth:
        np.testing.assert_allclose(curvature, curve, rtol=1e-9, atol=1e-12)
        assert (curvature >= 0).all()
    h = 1e-5
    across = (loss.samples(outputs + h, y) - loss.samples(outputs - h, y)) / (2 * h)
    away = np.abs(outputs - y) > 1e-4  # from kinks
    np.testing.assert_allclose(gradient[away], across[away], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_derivatives_of_several_outputs(x64):
    loss, own = losses.LogLoss(0.1), losses.CustomLoss(lambda outputs, y: losses.LogLoss(0.1).samples(outputs, y))
    outputs, y = jnp.asarray(rng.normal(size=(N, 3))), jnp.asarray(rng.integers(0, 3, N))
    for ours, theirs in zip(loss.derivatives(outputs, y), own.derivatives(outputs, y), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
    rewards = jnp.asarray(rng.normal(size=(N, 3)))
    slope = jax.grad(lambda outputs: losses.Rewards().samples(outputs, rewards).sum())(outputs)
    np.testing.assert_allclose(losses.Rewards().derivatives(outputs, rewards)[0], slope, rtol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_constants_are_the_best_of_each_leaf(name):
    """Beside others that differ a little, on the weighted loss of the samples in each leaf."""
    loss, y, _ = LOSSES[name]
    y = jnp.asarray(y, jnp.float32)
    weight = jnp.asarray(WEIGHT, jnp.float32)
    best = loss.constants(jnp.asarray(LEAF), y, 4, weight)
    mean = lambda values: jax.ops.segment_sum(weight * loss.samples(values[LEAF], y), LEAF, 4)
    for change in (-0.02, -0.005, 0.005, 0.02):
        assert (mean(best)[:3] <= mean(best + change)[:3] * (1 + 1e-6)).all()
    of_all = loss.constants(jnp.zeros(N, jnp.int32), y, 1, weight)
    np.testing.assert_allclose(best[3], of_all[0], atol=1e-5)  # an empty leaf


@pytest.mark.slow
def test_constants_ignore_rows_without_weight_and_count_others():
    twice = np.repeat(np.arange(N), WEIGHT.astype(int))
    for loss, y, _ in LOSSES.values():
        y = jnp.asarray(y, jnp.float32)
        weighted = loss.constants(jnp.asarray(LEAF), y, 4, jnp.asarray(WEIGHT, jnp.float32))
        repeated = loss.constants(jnp.asarray(LEAF)[twice], y[twice], 4, jnp.ones(len(twice)))
        np.testing.assert_allclose(weighted, repeated, rtol=1e-3, atol=1e-4)  # 20 Newton steps in float32


@pytest.mark.parametrize("levels", [(0.5,), (0.1, 0.5, 0.9), (0.25, 0.3)])
def test_quantiles_are_middles_of_all_minimisers(levels):
    y, weight = np.round(REAL, 1), WEIGHT
    found = losses.weighted_quantiles(
        jnp.asarray(LEAF), jnp.asarray(y, jnp.float32), 4, levels, sample_weight=jnp.asarray(weight, jnp.float32)
    )
    for leaf, (j, level) in itertools.product(range(3), enumerate(levels)):
        inside = (leaf == LEAF) & (weight > 0)
        values = np.unique(y[inside])
        loss = losses.Quantile(level)
        total = np.array([(weight[inside] * loss.of_predictions(np.float64(v), y[inside])).sum() for v in values])
        best = values[total <= total.min() + 1e-9]
        assert found[leaf, j] == pytest.approx((best[0] + best[-1]) / 2, abs=1e-6)
    assert (np.diff(found, axis=1) >= 0).all()


def test_newton_steps_go_down_where_curvature_is_missing():
    flat = lambda outputs, y: jnp.abs(outputs - y) ** 1.5 + jnp.where(jnp.abs(outputs) > 5, 1.0, 0.0)
    own = losses.CustomLoss(flat)
    y, leaf = jnp.asarray([1.0, 2.0, 4.0]), jnp.zeros(3, jnp.int32)
    start = jnp.asarray([-3.0])
    found = newton_constants(own.samples, own.derivatives, start, leaf, y, jnp.ones(3))
    grid = np.linspace(0, 5, 5001)
    best = grid[np.abs(grid[:, None] - np.asarray(y)[None]).__pow__(1.5).sum(1).argmin()]
    assert found[0] == pytest.approx(best, abs=2e-2)


@pytest.mark.parametrize("name", LOSSES)
def test_steps_of_boosting_lower_the_loss_and_are_newtons(name):
    loss, y, _ = LOSSES[name]
    weight, y = jnp.asarray(WEIGHT, jnp.float32), jnp.asarray(y, jnp.float32)
    outputs = jnp.full(N, 0.3)
    step = loss.steps(jnp.asarray(LEAF), outputs, y, 4, weight, 2.0)
    assert step.shape == (4,) and step[3] == 0
    mean = lambda outputs: (weight * loss.samples(outputs, y)).sum()
    assert mean(outputs + 0.1 * step[LEAF]) < mean(outputs)
    if not loss.smooth:
        return
    gradient, curvature = (np.asarray(a, float) for a in loss.derivatives(outputs, y))
    total = np.bincount(LEAF, WEIGHT * curvature, 4) + 2
    np.testing.assert_allclose(step, -np.bincount(LEAF, WEIGHT * gradient, 4) / total, rtol=1e-4, atol=1e-6)


def test_losses_do_not_depend_on_the_unit_of_the_targets():
    """A loss of scaled targets, times the power of the unit, is that of the targets."""
    for loss, y, _ in LOSSES.values():
        if not loss.in_units:
            continue
        offset, unit = loss.units(10 + 3 * y if loss.link == "identity" else 3 * y)
        scaled, of_scaled = (y * 3 + 10 * (loss.link == "identity") - offset) / unit, loss.scaled(unit)
        predictions = np.linspace(0.1, 0.9, N)
        ours = Regression(loss_function=loss).loss_unit(unit) * of_scaled.of_predictions(predictions, scaled)
        theirs = loss.of_predictions(offset + unit * predictions, offset + unit * scaled)
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


# --- Tasks -----------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_sklearn():
    y, predictions = POSITIVE, POSITIVE * np.exp(0.3 * OUTPUTS)
    score = lambda name, y=y: Regression(loss_function=name).score(predictions, y, WEIGHT)
    tweedie = lambda power: metrics.d2_tweedie_score(y, predictions, power=power, sample_weight=WEIGHT)
    assert score("squared_error") == pytest.approx(metrics.r2_score(y, predictions, sample_weight=WEIGHT))
    assert score("gamma") == pytest.approx(tweedie(2), abs=1e-3)  # one sample more in the constant
    assert score("poisson") == pytest.approx(tweedie(1), abs=1e-3)
    even = Regression(loss_function="absolute_error").score(predictions, y, None)
    assert even == pytest.approx(metrics.d2_absolute_error_score(y, predictions), rel=1e-4)


@pytest.mark.slow
def test_class_weights_are_weights_of_rows():
    x, y = rng.normal(size=(120, 2)), np.arange(120) % 3
    recipe = jtrees.GET(depth=1, starts=1, epochs=3)
    fit = lambda task, **options: jtrees.fit(recipe, x, y, key=KEY, task=task, **options).predict(x)
    weighed = fit(Classification(3, class_weight=(1, 2, 4)))
    np.testing.assert_allclose(weighed, fit(Classification(3), sample_weight=np.array([1, 2, 4])[y]), rtol=1e-6)


def test_smoothed_labels_bound_probabilities():
    x, y = rng.normal(size=(200, 2)), (np.arange(200) % 2)
    x[:, 0] += 5 * y
    task = Classification(2, losses.LogLoss(0.2))
    fit = jtrees.fit(jtrees.GET(depth=1, starts=1, epochs=20), x, y, key=KEY, task=task)
    probabilities = fit.predict(x)
    assert probabilities.min() >= 0.1 - 1e-6 and probabilities.max() > 0.85
    leaf = leaves.Values(jnp.asarray([[0.1, 0.9]]), losses.Frequencies(0.2))
    np.testing.assert_allclose(
        leaf.losses(x[:1], jnp.asarray([1])), [[-0.9 * np.log(0.9) - 0.1 * np.log(0.1)]], rtol=1e-5
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.Quantile(1), "levels must be above 0 and below 1, got 1"),
        (lambda: losses.Quantile((0.5, 0.2)), r"levels must increase, got \(0.5, 0.2\)"),
        (lambda: losses.Quantile(()), r"levels must be a number, or several, got \(\)"),
        (lambda: losses.Huber(0), "delta must be above 0, got 0"),
        (lambda: losses.Tweedie(2.5), "variance_power must be above 1 and below 2, got 2.5"),
        (lambda: losses.LogLoss(1.5), "smoothing must be above 0 and below 1, got 1.5"),
        (lambda: Regression(loss_function="cubic"), "loss must be one of 'squared_error', .*got 'cubic'"),
        (lambda: Regression(loss_function=3), r"loss must be a function \(outputs, y\) -> \(n,\), got 3"),
        (lambda: Regression(2, losses.Quantile((0.1, 0.9))), "outputs must be None for Quantile"),
        (lambda: Classification(2, "poisson"), r"loss_function must be LogLoss or a function, got Poisson\(\)"),
        (lambda: Classification(2, class_weight=(1, 0)), "class_weight must be 2 numbers above 0, one a class"),
        (lambda: Policy(1), "actions must be at least 2, got 1"),
    ],
)
def test_bad_losses_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("recipe", ["GET", "RADDT", "CO2", "NonGreedy", "Boosted"])
def test_functions_of_logits_are_refused_where_leaves_are_class_frequencies(recipe):
    """Which minimise the log loss, so that the function would be ignored."""
    task = Classification(2, lambda logits, y: jnp.square(logits).sum(1))
    with pytest.raises(ValueError, match=r"loss_function must be LogLoss here, got Classification\(classes=2, loss_"):
        jtrees.fit(RECIPES[recipe], X, SIGNAL, key=KEY, task=task)


@pytest.mark.parametrize(
    ("loss", "y", "message"),
    [
        (
            "poisson",
            np.where(np.arange(N) == 7, -2.0, COUNTS),
            r"y must be at least 0 for Poisson\(\), got .*-2.0.* in row 7",
        ),
        ("gamma", COUNTS, r"y must be above 0 for Gamma\(\), got .*0.0.* in row"),
        (losses.Tweedie(1.2), -COUNTS, r"y must be at least 0 for Tweedie\(variance_power=1.2\)"),
        (quartic, None, None),
        (
            lambda outputs, y: jnp.float32(0),
            REAL,
            r"loss must give one number a sample, of shape \(\d+,\), got shape \(\)",
        ),
        (losses.Huber(1.0), np.stack([REAL, COUNTS], 1), "loss must be of one target"),
    ],
)
def test_targets_that_a_loss_cannot_take_are_refused_by_row(loss, y, message):
    if message is None:
        return
    task = Regression(y.shape[1] if y.ndim > 1 else None, loss)
    with pytest.raises(ValueError, match=message):
        jtrees.fit(jtrees.GET(depth=1, starts=1, epochs=2), OUTPUTS[:, None], y, key=KEY, task=task)


# --- Recipes ---------------------------------------------------------------------------------------------------------

X = np.random.default_rng(1).normal(size=(320, 3))
SIGNAL = X[:, 0] + X[:, 1] > 0
SMALL = {"depth": 2, "epochs": 20, "batch_size": 80}
RECIPES = {
    "GET": jtrees.GET(depth=2, starts=2, epochs=40),
    "RADDT": jtrees.RADDT(depth=2, starts=2, epochs=20),
    "DGT": jtrees.DGT(**SMALL, widths=()),
    "LatentTree": jtrees.LatentTree(depth=2, epochs=60, batch_size=80),
    "TEL": jtrees.TEL(**SMALL, trees=4),
    "CO2": jtrees.CO2(**SMALL),
    "NonGreedy": jtrees.NonGreedy(**SMALL, greedy_epochs=5),
    "Boosted": jtrees.Boosted(jtrees.GET(depth=2, starts=1, epochs=10, cart="binned", halving=False), rounds=20),
    "Bagged": jtrees.Bagged(jtrees.DGT(**SMALL, widths=()), trees=3),
}
TASKS = {
    "absolute": (Regression(loss_function="absolute_error"), np.where(SIGNAL, 2, -1.0)),
    "huber": (Regression(loss_function=losses.Huber(0.5)), np.where(SIGNAL, 2, -1.0)),
    "poisson": (Regression(loss_function="poisson"), np.where(SIGNAL, 4, 1.0)),
    "gamma": (Regression(loss_function="gamma"), np.where(SIGNAL, 400, 100.0)),
    "tweedie": (Regression(loss_function="tweedie"), np.where(SIGNAL, 4, 0.0)),
    "quantiles": (Regression(loss_function=losses.Quantile((0.1, 0.5, 0.9))), np.where(SIGNAL, 2, -1.0)),
    "own": (Regression(loss_function=quartic), np.where(SIGNAL, 1, 0.0)),
    "policy": (Policy(2), np.stack([np.where(SIGNAL, 1, 0.0), np.where(SIGNAL, 0.0, 1)], 1)),
}
# All losses are there; of the other recipes, which share its leaves or the first Newton step, each link once.
LINKS = ("poisson", "quantiles", "policy")
PAIRS = [("GET", task) for task in TASKS] + [(recipe, task) for recipe in RECIPES for task in LINKS if recipe != "GET"]
PAIRS += [("DGT", "own"), ("TEL", "huber"), ("Boosted", "gamma")]
# Boosting takes no policies; a forest predicts as its trees, and RADDT is GET but for its schedule.
WITHOUT = [("Boosted", "policy"), ("Bagged", "quantiles"), ("Bagged", "policy"), ("RADDT", "poisson")]
PAIRS = [pair for pair in PAIRS if pair not in (*WITHOUT, ("RADDT", "policy"), ("GET", "huber"), ("GET", "gamma"))]
MARKS = {("GET", "poisson"): (), ("DGT", "quantiles"): pytest.mark.slow}  # of others: wide


@pytest.mark.parametrize(
    ("recipe", "name"), [pytest.param(*pair, marks=MARKS.get(pair, pytest.mark.wide)) for pair in PAIRS]
)
def test_every_recipe_takes_every_loss(recipe, name, tmp_path):
    task, y = TASKS[name]
    fit = jtrees.fit(RECIPES[recipe], X, y + 0.0, key=KEY, task=task)
    predictions = np.asarray(fit.predict(X), np.float64)
    assert predictions.shape == (320, *task.shape)
    best = 0.5 if name == "policy" else 0.0  # one action everywhere; the best constant
    assert task.score(predictions, y, None) > best + 0.3
    if name in ("poisson", "gamma", "tweedie"):
        assert (predictions > 0).all()
    if name == "quantiles":
        assert (np.diff(predictions, axis=1) >= 0).all()
    jtrees.save(fit, tmp_path / "fit.jtrees")
    np.testing.assert_array_equal(jtrees.load(tmp_path / "fit.jtrees").predict(X), fit.predict(X))


def test_a_log_link_follows_the_unit_of_the_targets():
    y = TASKS["poisson"][1]
    fit = lambda y: jtrees.fit(RECIPES["GET"], X, y, key=KEY, task=Regression(loss_function="poisson"))
    plain, scaled = fit(y), fit(1000 * y)
    np.testing.assert_allclose(scaled.predict(X), 1000 * plain.predict(X), rtol=1e-4)
    assert scaled.loss == pytest.approx(1000 * plain.loss, rel=1e-3)
    assert "->" in plain.tree.to_text()


@pytest.mark.slow
def test_policies_are_near_those_of_exhaustive_search():
    """Over axis-aligned splits at every value, whose best mean reward an oblique tree should reach."""
    depth, draw = 2, np.random.default_rng(2)
    x = draw.integers(0, 5, size=(60, 2)).astype(float)
    rewards = 0.3 * draw.normal(size=(60, 3)) + np.stack([x[:, 0] > 2, x[:, 1] > 2, np.full(60, 0.3)], 1)

    def best(rows, depth):
        value = rewards[rows].sum(0).max()
        if depth == 0:
            return value
        for column, threshold in itertools.product(range(2), range(4)):
            right = x[rows, column] > threshold
            value = max(value, best(rows[right], depth - 1) + best(rows[~right], depth - 1))
        return value

    exhaustive = best(np.arange(60), depth) / 60
    fit = jtrees.fit(jtrees.GET(depth=depth, starts=8, epochs=300), x, rewards, key=KEY, task=Policy(3))
    played = np.asarray(fit.predict(x))
    assert set(np.unique(played)) <= {0.0, 1.0} and (played.sum(1) == 1).all()
    assert fit.loss == pytest.approx(-(played * rewards).sum(1).mean(), rel=1e-6)
    assert -fit.loss >= exhaustive - 0.03  # it may find better, oblique ones


@pytest.mark.wide
@pytest.mark.parametrize("name", ["poisson", "quantiles", "policy"])
def test_validation_and_sweeps_use_the_loss(name):
    task, y = TASKS[name]
    options = {"key": KEY, "task": task}
    fit = jtrees.fit(RECIPES["GET"], X[:240], y[:240], validation=(X[240:], y[240:]), **options)
    of_rows = task.host_losses(np.asarray(fit.predict(X[240:]), np.float64), y[240:], np.float64(1))
    assert fit.loss == pytest.approx(of_rows.mean(), rel=1e-4)
    sweep = jtrees.sweep(RECIPES["GET"], X, y, grid={"l1": (0.0, 1e-3)}, validation=0.25, **options)
    assert np.isfinite(sweep.losses).all() and sweep.fit.report.recipe["name"] == "GET"
    assert sweep.losses.min() < task.host_losses(np.asarray(_constant(task, y)), y, np.float64(1)).mean()


def _constant(task, y):
    """Predictions of the best constant."""
    if isinstance(task, Policy):
        return np.broadcast_to(np.eye(2)[y.mean(0).argmax()], y.shape)
    return np.broadcast_to(task.loss_function.best(y, None), (len(y), *task.shape))
