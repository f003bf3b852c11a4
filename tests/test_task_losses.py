"""Tasks and losses: values, derivatives, best constants, units, scores, refusals; recipes with losses; policies."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import metrics

import jtrees
from jtrees import Classification, Policy, Regression, leaves, losses
from jtrees.tasks import checked_targets
from jtrees.tasks.base import linked
from jtrees.tasks.custom import check_without_link
from jtrees.tasks.fits import newton_constants
from tests import recipes, sweeps, tables

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
FEW = ("squared", "quantile", "poisson", "own")  # of the quick tests
f32 = lambda a: jnp.asarray(a, jnp.float32)


@pytest.mark.parametrize("name", [name for name, (_, _, theirs) in LOSSES.items() if theirs])
def test_values_are_those_of_sklearn(name, x64):
    loss, y, theirs = LOSSES[name]
    predictions = linked(loss.link, OUTPUTS)
    expected = theirs(y, predictions, sample_weight=WEIGHT)
    output_losses = loss.samples(jnp.asarray(OUTPUTS), jnp.asarray(y))
    for values in (loss.of_predictions(predictions, y), output_losses):
        assert values.shape == (N,) and np.average(values, weights=WEIGHT) == pytest.approx(expected, rel=1e-12)


def test_values_are_those_of_their_definitions():
    """Log losses are finite where the probability is zero. Squared errors are means over outputs."""
    error = np.array([-2.0, -0.7, 0.1, 3.0])
    expected = [0.7 * (2 - 0.35), 0.245, 0.005, 0.7 * (3 - 0.35)]
    np.testing.assert_allclose(losses.Huber(0.7).of_predictions(error, np.zeros(4)), expected)
    predictions, y = rng.normal(size=(2, 20, 3))
    actual = losses.SquaredError().samples(f32(predictions), f32(y))
    np.testing.assert_allclose(actual, ((predictions - y) ** 2).mean(1), rtol=1e-5)
    probabilities = np.array([[0.25, 0.75], [1, 0], [0, 1]], np.float32)
    actual = losses.log_loss(probabilities, np.array([1, 1, 1], np.int32))
    np.testing.assert_allclose(actual, [-np.log(0.75), -np.log(np.finfo(np.float32).tiny), 0], rtol=1e-6)
    logits = np.array([[0.5, -1, 2], [400, 0, 0]])
    expected = [np.log(np.exp(logits[0]).sum()) - 2, 400]
    np.testing.assert_allclose(Classification(3).loss(f32(logits), np.array([2, 1])), expected, rtol=1e-6)
    assert float(losses.weighted_mean(jnp.asarray([1.0, 2, 6]), jnp.asarray([2.0, 0.5, 0]))) == 1  # not divided


LOG_LOSS = losses.LogLoss(0.1)
DERIVATIVES = {name: (loss, OUTPUTS, y) for name, (loss, y, _) in LOSSES.items()} | {
    "log": (LOG_LOSS, rng.normal(size=(N, 3)), rng.integers(0, 3, N)),
    "own, log": (losses.CustomLoss(LOG_LOSS.samples), rng.normal(size=(N, 3)), rng.integers(0, 3, N)),
    "rewards": (losses.Rewards(), rng.normal(size=(N, 3)), rng.normal(size=(N, 3))),
}


@pytest.mark.parametrize("name", sweeps.quick(DERIVATIVES, ("squared", "quantile", "poisson", "log", "own, log")))
def test_derivatives_are_those_of_automatic_and_of_finite_differences(name, x64):
    """Curvatures are those along each output alone."""
    loss, outputs, y = DERIVATIVES[name]
    outputs, y = jnp.asarray(outputs), jnp.asarray(y)
    sample = lambda outputs, y: loss.samples(outputs[None], y[None])[0]
    automatic = [jax.vmap(derivative(sample)) for derivative in (jax.grad, jax.hessian)]
    everything = jax.jit(lambda *rows: (loss.derivatives(*rows), [derivative(*rows) for derivative in automatic]))
    (gradient, curvature), (slopes, hessian) = everything(outputs, y)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-9, atol=1e-12)
    if name not in ("absolute", "huber", "quantile", "rewards"):
        curve = hessian if outputs.ndim == 1 else jnp.diagonal(hessian, axis1=1, axis2=2)
        if name == "log":  # three outputs step at once, and a common shift of them changes nothing
            curve = 3 / 2 * curve
        np.testing.assert_allclose(curvature, curve, rtol=1e-9, atol=1e-12)
        assert (curvature >= 0).all()
    for step in [1e-5] if outputs.ndim == 1 else 1e-5 * np.eye(3):
        across = (loss.samples(outputs + step, y) - loss.samples(outputs - step, y)) / 2e-5
        away = np.abs(outputs - y) > 1e-4 if outputs.ndim == 1 else np.ones(N, bool)  # from kinks
        along = gradient if outputs.ndim == 1 else gradient @ (step / 1e-5)
        np.testing.assert_allclose(along[away], across[away], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", sweeps.quick(LOSSES, FEW))
def test_constants_are_the_best_of_each_leaf(name):
    """Nearby constants have a higher weighted loss in each leaf. Weights are numbers of copies."""
    loss, y, _ = LOSSES[name]
    y, weight = f32(y), f32(WEIGHT)
    constants = jax.jit(loss.constants, static_argnums=2)
    best = constants(LEAF, y, 4, weight)
    row_losses = lambda values: np.asarray(loss.samples(values[LEAF], y), float)
    mean = lambda values: np.bincount(LEAF, WEIGHT * row_losses(values), 4)
    for change in (-0.02, -0.005, 0.005, 0.02):
        assert (mean(best)[:3] <= mean(best + change)[:3] * (1 + 1e-6)).all()
    np.testing.assert_allclose(best[3], constants(0 * LEAF, y, 4, weight)[0], atol=1e-5)  # empty
    copies = np.repeat(np.arange(N), WEIGHT.astype(int))
    repeated = constants(LEAF[copies], y[copies], 4, jnp.ones(len(copies)))
    np.testing.assert_allclose(best, repeated, rtol=1e-3, atol=1e-4)  # 20 Newton steps in float32


def test_newton_steps_go_down_where_curvature_is_missing():
    flat = lambda outputs, y: jnp.abs(outputs - y) ** 1.5 + jnp.where(jnp.abs(outputs) > 5, 1.0, 0.0)
    custom = losses.CustomLoss(flat)
    y, leaf = jnp.asarray([1.0, 2.0, 4.0]), jnp.zeros(3, jnp.int32)
    actual = newton_constants(custom.samples, custom.derivatives, jnp.asarray([-3.0]), leaf, y, jnp.ones(3))
    grid = np.linspace(0, 5, 5001)
    best = grid[(np.abs(grid[:, None] - np.asarray(y)) ** 1.5).sum(1).argmin()]
    assert actual[0] == pytest.approx(best, abs=2e-2)


@pytest.mark.parametrize("unit", [1.0, 1000.0])
@pytest.mark.parametrize("module", [np, jnp])
def test_constants_do_not_depend_on_the_unit_of_the_targets(module, unit):
    y, leaf = module.asarray([0.0, 0.0, 0.0, 3.0], np.float32) * np.float32(unit), module.zeros(4, np.int32)
    loss = losses.Huber(10 * unit)
    assert loss.constants(leaf, y, 1, module.ones(4, np.float32))[0] / unit == pytest.approx(0.75, rel=1e-4)
    squares = losses.CustomLoss(lambda outputs, y: (outputs - y) ** 2)
    assert squares.constants(leaf, y, 1, module.ones(4, np.float32))[0] / unit == pytest.approx(0.75, rel=1e-4)


# Losses of a user, and whether their curvature has a lower bound.
OF_USERS = {
    "absolute": (lambda p, t: jnp.abs(p - t), False),
    "pinball": (lambda p, t: jnp.maximum(0.7 * (t - p), 0.3 * (p - t)), False),
    "pseudo-Huber": (lambda p, t: jnp.sqrt(1 + jnp.square((p - t) / 0.01)) - 1, False),
    "log cosh": (lambda p, t: jnp.logaddexp(50 * (p - t), 50 * (t - p)), False),
    "fourth power": (lambda p, t: (p - t) ** 4, False),
    "asymmetric square": (lambda p, t: jnp.where(p > t, 3.0, 1.0) * (p - t) ** 2, True),
    "mean of squares": (lambda p, t: jnp.square(p - t).mean(1), True),
    "mean of errors": (lambda p, t: jnp.abs(p - t).mean(1), False),
}


@pytest.mark.parametrize("name", sweeps.quick(OF_USERS, ("absolute", "fourth power", "asymmetric square")))
def test_the_step_of_a_loss_of_a_user_follows_its_curvature(name):
    """Without a lower bound of the curvature, no other step has a lower loss."""
    function, smooth = OF_USERS[name]
    loss, shape = losses.CustomLoss(function), (2,) if name.startswith("mean") else ()
    outputs, y = (f32(a) for a in rng.uniform(size=(2, N, *shape)))
    steps = lambda outputs: loss.steps(jnp.asarray(LEAF), outputs, y, 4, f32(WEIGHT), 0.0)
    step = np.asarray(jax.jit(steps)(outputs))
    assert loss.is_smooth(shape) == smooth and (step[3] == 0).all()
    total = lambda step: np.bincount(LEAF, WEIGHT * np.asarray(loss.samples(outputs + step[LEAF], y), float), 4)[:3]
    for change in (-0.3, -0.05, -0.01, 0.01, 0.05, 0.3) if not smooth else ():
        assert (total(step) <= 1.001 * total(step + np.float32(change))).all()
    assert (total(step) <= total(0 * step)).all()


@pytest.mark.parametrize("name", sweeps.quick(LOSSES, FEW))
def test_steps_of_boosting_lower_the_loss_and_are_newtons(name):
    loss, y, _ = LOSSES[name]
    outputs = jnp.full(N, 0.3)
    step = loss.steps(jnp.asarray(LEAF), outputs, f32(y), 4, f32(WEIGHT), 2.0)
    assert step.shape == (4,) and step[3] == 0
    mean = lambda outputs: (WEIGHT * np.asarray(loss.samples(outputs, f32(y)))).sum()
    assert mean(outputs + 0.1 * step[LEAF]) < mean(outputs)
    if loss.is_smooth(()):
        gradient, curvature = (np.asarray(a, float) for a in loss.derivatives(outputs, f32(y)))
        total = np.bincount(LEAF, WEIGHT * curvature, 4) + 2
        np.testing.assert_allclose(step, -np.bincount(LEAF, WEIGHT * gradient, 4) / total, rtol=1e-4, atol=1e-6)
    else:
        best, count = loss.steps(jnp.asarray(LEAF), outputs, f32(y), 4, f32(WEIGHT), 0.0), np.bincount(LEAF, WEIGHT, 4)
        np.testing.assert_allclose(step, best * count / (count + 2), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [name for name, (loss, _, _) in LOSSES.items() if loss.in_units])
def test_losses_do_not_depend_on_the_unit_of_the_targets(name):
    """The loss of scaled targets, times the power of the unit, is the loss of the targets."""
    loss, y, _ = LOSSES[name]
    y = 3 * y + 10 * (loss.link == "identity")
    offset, unit = loss.units(y)
    predictions, scaled = np.linspace(0.1, 0.9, N), (y - offset) / unit
    ours = Regression(loss_function=loss).loss_unit(unit) * loss.scaled(unit).of_predictions(predictions, scaled)
    np.testing.assert_allclose(ours, loss.of_predictions(offset + unit * predictions, y), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("task", [Regression, partial(Classification, 3)], ids=["regression", "classification"])
def test_a_loss_of_the_users_own_gives_a_number_for_each_sample(task):
    outputs, y = jnp.asarray([1.0, 2, 3]), jnp.asarray([3.0, 2, 0])
    absolute = task(loss_function=lambda outputs, y: jnp.abs(outputs - y)).loss
    assert jax.jit(absolute)(outputs, y).tolist() == [2, 0, 3]
    for loss in (lambda outputs, y: jnp.square(outputs - y).mean(), lambda outputs, y: outputs[:, None] - y):
        with pytest.raises(ValueError, match=r"one number a sample, of shape \(3,\), got shape \("):
            task(loss_function=loss).loss(outputs, y)


def test_fitted_models_hold_the_task_without_a_function():
    custom = lambda outputs, y: jnp.abs(outputs - y)
    assert Regression(2, custom).of_models == Regression(2)
    weighed = Classification(3, custom, class_weight=(1, 2, 4))
    assert weighed.of_models == Classification(3, class_weight=(1, 2, 4))
    assert weighed.link_name == "softmax"  # logits, whatever their loss
    for task in (Regression(None, "poisson"), Classification(3, losses.LogLoss(0.1))):
        assert task.of_models is task


def test_losses_with_a_link_are_refused():
    """A tree would predict negative counts: targets are scaled, and outputs are logarithms."""
    poisson = lambda outputs, y: jnp.exp(outputs) - y * outputs
    wide = lambda outputs, y: jnp.maximum(jnp.abs(outputs - y) - 0.2, 0).reshape(len(y), -1).mean(1)
    for columns in ((), (3,)):
        check_without_link(wide, columns)
    for step in (-0.5, -0.1, 0.1, 0.5):
        elsewhere = lambda outputs, y, step=step: -1.0 * (jnp.abs(outputs - y - step) < 1e-3)
        with pytest.raises(ValueError, match=f"it is 0 there and -1 at the output {step:.2g}:"):
            check_without_link(elsewhere)
    with pytest.raises(ValueError, match="a loss with a link needs targets that range from exactly 0 to 1"):
        jtrees.fit(recipes.TEL, tables.X, 1 + tables.COUNTS, key=KEY, task=Regression(loss_function=poisson))


def test_names_stand_for_tasks_whose_outputs_are_counted_in_y():
    y = np.arange(6.0)
    assert checked_targets("regression", y, 6)[0] == Regression()
    assert checked_targets("regression", y.reshape(3, 2), 3)[0] == Regression(2)
    task, labels = checked_targets("classification", y % 3, 6)
    assert task == Classification(3) and labels.dtype == np.int32
    tasks = Regression(), Regression(1), Regression(3), Classification(3)
    assert [task.shape for task in tasks] == [(), (1,), (3,), (3,)]
    assert checked_targets(Policy(2), y.reshape(3, 2), 3)[0].units(y) == (0, 1)  # rewards are not scaled
    with pytest.raises(ValueError, match=r"y must hold the rewards of 2 actions, .*, got \(2, 3\)"):
        checked_targets(Policy(2), y.reshape(2, 3), 2)
    with pytest.raises(ValueError, match="task must be one of 'regression', 'classification', or a task such as"):
        checked_targets("ranking", y, 6)


def test_scores_are_those_of_sklearn():
    y, predictions = POSITIVE, POSITIVE * np.exp(0.3 * OUTPUTS)
    score = lambda name, weight=WEIGHT: Regression(loss_function=name).score(predictions, y, weight)
    tweedie = lambda power: metrics.d2_tweedie_score(y, predictions, power=power, sample_weight=WEIGHT)
    assert score("squared_error") == pytest.approx(metrics.r2_score(y, predictions, sample_weight=WEIGHT))
    assert score("gamma") == pytest.approx(tweedie(2), abs=1e-3)  # one sample more in the constant
    assert score("poisson") == pytest.approx(tweedie(1), abs=1e-3)
    assert score("absolute_error", None) == pytest.approx(metrics.d2_absolute_error_score(y, predictions), rel=1e-4)
    assert np.isnan(Regression().score(predictions, np.ones(N), None))
    two_targets, rest = np.stack([y, REAL], 1), np.stack([predictions, OUTPUTS], 1)
    assert Regression(2).score(rest, two_targets, WEIGHT) == pytest.approx(
        metrics.r2_score(two_targets, rest, sample_weight=WEIGHT)
    )
    labels, chances = rng.integers(0, 3, N), rng.dirichlet(np.ones(3), N)
    expected = metrics.accuracy_score(labels, chances.argmax(1), sample_weight=WEIGHT)
    assert Classification(3).score(chances, labels, WEIGHT) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.Quantile(1), "levels must be a finite number above 0 and below 1, got 1"),
        (lambda: losses.Quantile((0.5, 0.2)), r"levels must increase, got \(0.5, 0.2\)"),
        (lambda: losses.Huber(0), "delta must be a finite number above 0, got 0"),
        (lambda: losses.Tweedie(2.5), "variance_power must be a finite number above 1 and below 2, got 2.5"),
        (lambda: losses.LogLoss(1.5), "smoothing must be a finite number of at least 0 and below 1, got 1.5"),
        (lambda: Regression(loss_function="cubic"), "loss must be one of 'squared_error', .*got 'cubic'"),
        (lambda: Regression(loss_function=3), r"loss must be a function \(outputs, y\) -> \(n,\), got 3"),
        (lambda: Regression(0), "outputs must be at least 1, got 0"),
        (lambda: Regression(2, losses.Quantile((0.1, 0.9))), "outputs must be None for Quantile"),
        (lambda: Classification(1), "classes must be at least 2, got 1"),
        (lambda: Classification(2, "poisson"), r"loss_function must be LogLoss or a function, got Poisson\(\)"),
        (lambda: Classification(2, class_weight=(1, 0)), "class_weight must be 2 numbers above 0, one a class"),
        (lambda: Policy(1), "actions must be at least 2, got 1"),
    ],
)
def test_bad_losses_and_tasks_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("name", ["CO2", "Boosted"])
def test_functions_of_logits_are_refused_where_leaves_are_class_frequencies(name):
    """Which minimise the log loss, so that the function would be ignored."""
    task = Classification(2, lambda logits, y: jnp.square(logits).sum(1))
    with pytest.raises(ValueError, match=r"loss_function must be LogLoss here, got Classification\(classes=2, loss_"):
        jtrees.fit(recipes.RECIPES[name], tables.X, tables.BINARY, key=KEY, task=task)


@pytest.mark.parametrize(
    ("loss", "y", "message"),
    [
        ("poisson", np.where(np.arange(N) == 7, -2.0, COUNTS), r"y must be at least 0 .*, got .*-2.0.* in row 7"),
        ("gamma", COUNTS, r"y must be above 0 for Gamma\(\), got .*0.0.* in row"),
        (losses.Huber(1.0), np.stack([REAL, COUNTS], 1), "loss must be of one target"),
    ],
)
def test_targets_that_a_loss_cannot_take_are_refused_by_row(loss, y, message):
    task = Regression(y.shape[1] if y.ndim > 1 else None, loss)
    with pytest.raises(ValueError, match=message):
        jtrees.fit(recipes.GET, OUTPUTS[:, None], y, key=KEY, task=task)


@pytest.mark.parametrize("name", ["get", "dgt", "tel"])
def test_targets_of_another_shape_are_refused_by_methods(name):
    def init(columns, **task):
        batch = jtrees.Batch(jnp.ones((6, 2)), jnp.ones((6, columns)))
        method = getattr(jtrees.methods, name)(*((2, 1.0) if name == "get" else (2,)), **task)
        return jax.eval_shape(lambda: method.init(batch, key=KEY))

    for columns, task, message in (
        (2, {}, r"y must have shape \(n,\) for Regression\(\), got shape \(6, 2\)"),
        (1, {"task": Regression(2)}, r"y must have shape \(n, 2\) for .*use Regression\(outputs=1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            init(columns, **task)
    init(2, task=Regression(2))


SIGNAL = tables.BINARY == 1
LEARNERS = {
    name: recipes.RECIPES[name].replace(epochs=20)
    for name in ("GET", "RADDT", "DGT", "LatentTree", "TEL", "CO2", "NonGreedy")
}
LEARNERS["Boosted"] = recipes.BOOSTED.replace(rounds=20)
LEARNERS["Bagged"] = recipes.BAGGED.replace(base=LEARNERS["DGT"])
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
# GET has all losses; other recipes share its leaves or the first Newton step, and have each link once. Boosting
# refuses policies. A forest predicts as its trees. RADDT differs from GET only in its schedule.
PAIRS = [("GET", task) for task in ("absolute", "poisson", "tweedie", "quantiles", "own", "policy")]
PAIRS += [(name, task) for name in ("DGT", "LatentTree", "TEL", "CO2", "NonGreedy") for task in ("poisson", "policy")]
PAIRS += [(name, "quantiles") for name in LEARNERS if name not in ("GET", "Bagged")]
PAIRS += [("Boosted", "poisson"), ("Bagged", "poisson"), ("DGT", "own"), ("TEL", "huber"), ("Boosted", "gamma")]
MARKS = {("GET", "poisson"): (), ("DGT", "quantiles"): pytest.mark.slow}  # of others: wide


@pytest.mark.parametrize(
    ("recipe", "name"), [pytest.param(*pair, marks=MARKS.get(pair, pytest.mark.wide)) for pair in PAIRS]
)
def test_every_recipe_takes_every_loss(recipe, name, tmp_path):
    task, y = TASKS[name]
    fit = jtrees.fit(LEARNERS[recipe], tables.X, y, key=KEY, task=task)
    predictions = np.asarray(fit.predict(tables.X), np.float64)
    assert predictions.shape == (400, *task.shape)
    best = 0.5 if name == "policy" else 0.0  # one action everywhere; the best constant
    assert task.score(predictions, y, None) > best + 0.3
    if name in ("poisson", "gamma", "tweedie"):
        assert (predictions > 0).all()
    if name == "quantiles":
        assert (np.diff(predictions, axis=1) >= 0).all()
    jtrees.save(fit, tmp_path / "fit.jtrees")
    np.testing.assert_array_equal(jtrees.load(tmp_path / "fit.jtrees").predict(tables.X), fit.predict(tables.X))


def test_a_log_link_follows_the_unit_of_the_targets():
    task, y = TASKS["poisson"]
    plain, scaled = (jtrees.fit(LEARNERS["GET"], tables.X, unit * y, key=KEY, task=task) for unit in (1, 1000))
    np.testing.assert_allclose(scaled.predict(tables.X), 1000 * plain.predict(tables.X), rtol=1e-4)
    assert scaled.loss == pytest.approx(1000 * plain.loss, rel=1e-3)
    assert "->" in plain.tree.to_text()


def test_leaves_of_smoothed_labels_lose_what_smoothed_labels_do():
    leaf = leaves.Values(jnp.asarray([[0.1, 0.9]]), losses.Frequencies(0.2))
    expected = [[-0.9 * np.log(0.9) - 0.1 * np.log(0.1)]]
    np.testing.assert_allclose(leaf.losses(f32(tables.X[:1]), jnp.asarray([1])), expected, rtol=1e-5)


def test_the_step_of_two_classes_is_the_newton_step_of_their_difference(x64):
    outputs, y = jnp.asarray(rng.normal(size=(N, 2))), jnp.asarray(rng.integers(0, 2, N))
    margin_loss = lambda margin, label: jnp.logaddexp(0, margin) - label * margin
    derivatives = jax.vmap(jax.grad(margin_loss)), jax.vmap(jax.grad(jax.grad(margin_loss)))
    of_margin = lambda margin, y: [derivative(margin, y) for derivative in derivatives]
    everything = lambda outputs, y: (
        losses.LogLoss().newton(outputs, y)[0],
        *of_margin(outputs[:, 1] - outputs[:, 0], y),
    )
    step, gradient, curvature = map(np.asarray, jax.jit(everything)(outputs, y))
    inside = np.abs(step).max(1) < 4  # longer steps are clipped
    assert inside.sum() > N / 2
    np.testing.assert_allclose((step[:, 1] - step[:, 0])[inside], (-gradient / curvature)[inside], rtol=1e-9)


def test_models_are_chosen_by_the_loss_of_the_user():
    """Not by the squared error."""
    fit = jtrees.fit(recipes.GET, tables.X, tables.Y, key=KEY, task=Regression(loss_function=quartic), validation=ROWS)
    error = (fit.predict(tables.X[:100]) - tables.Y[:100]) / np.ptp(tables.Y)
    assert fit.report.search.losses.min() == pytest.approx(np.mean(quartic(error, 0)), rel=1e-3)


def brier(logits, y):
    return jnp.square(jax.nn.softmax(logits, axis=1) - jax.nn.one_hot(y, 3)).sum(1)


def test_a_loss_of_logits_takes_the_logarithms_of_probabilities():
    probabilities, y = np.array([[0.5, 0.5, 0.0], [0.1, 0.2, 0.7]]), np.array([0, 1])
    losses_of_rows = Classification(3, brier).prediction_loss(probabilities, y)
    np.testing.assert_allclose(losses_of_rows, [0.5, 0.01 + 0.64 + 0.49], rtol=1e-5)


OF_CLASSES = [name for name in recipes.RECIPES if name != "LatentClustering"]


@pytest.mark.parametrize("name", sweeps.slow(OF_CLASSES, ["GET", "TEL", "DTSemNet", "SoftDecisionTree"]))
def test_recipes_take_a_function_of_classes_or_refuse_it(name):
    recipe, task = recipes.RECIPES[name], Classification(3, brier)
    fit = lambda: jtrees.fit(recipe, tables.X, tables.CLASSES, key=KEY, task=task, validation=CLASS_ROWS)
    base = getattr(recipe, "base", recipe)
    takes = type(base).__name__ in ("DGT", "LatentTree", "TEL", "NODE", "GRANDE", "DTSemNet")
    if takes and not isinstance(recipe, (jtrees.Boosted, jtrees.Polished, jtrees.Sparse)):
        np.testing.assert_allclose(fit().predict(tables.X).sum(1), 1, rtol=1e-5)
        return
    with pytest.raises(ValueError, match="loss_function must be LogLoss here"):
        fit()


ROWS, CLASS_ROWS = (tables.X[:100], tables.Y[:100]), (tables.X[:100], tables.CLASSES[:100])


@pytest.mark.parametrize("power", [1.0, 1.5])
def test_a_prediction_of_0_for_0_costs_nothing(power):
    loss = losses.Poisson() if power == 1 else losses.Tweedie(power)
    y = np.array([0.0, 1.0, 2.0])
    np.testing.assert_allclose(Regression(loss_function=loss).prediction_loss(y, y), 0, atol=1e-12)
