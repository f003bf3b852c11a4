"""Weights of samples: only their ratios matter, they have mean 1 wherever they count samples, and none is lost."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import r2_score

import jtrees
from jtrees import losses, segments
from jtrees.estimators import TreeClassifier
from jtrees.tables import TableEncoder, checked_dataset, checked_table
from tests import recipes, sweeps, tables
from tests.estimator_checks import COMBINATORS, OTHERS, QUICK
from tests.tables import X, Y

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore::jtrees.report.BehindBaselineWarning"),
]

KEY = jax.random.key(0)
RNG = np.random.default_rng(1)
X_TEST = RNG.normal(size=(1000, 4))
Y_TEST = np.where(X_TEST[:, 0] + X_TEST[:, 1] > 0, 2.0, -1.0) + X_TEST[:, 2]
HALF_LIFE = 0.5 ** np.arange(400.0)[::-1]  # float32 holds the last 127 weights, float64 all of them
SUMS = [COMBINATORS[0], jtrees.Boosted(COMBINATORS[0].base, rounds=20, patience=5)]


def score(recipe, x=X, y=Y, weight=None):
    return r2_score(Y_TEST, jtrees.fit(recipe, x, y, sample_weight=weight, key=KEY).predict(X_TEST))


@pytest.mark.parametrize("raw", [False, True])
def test_rows_whose_weights_float32_cannot_hold_are_left_out(raw):
    x = np.where(RNG.random(X.shape) < 0.1, np.nan, X) if raw else X
    table = checked_table(x, Y, HALF_LIFE, "regression")
    remaining = np.finfo(np.float32).tiny <= HALF_LIFE
    assert len(table.x) == remaining.sum() == 127 and table.weight.mean() == pytest.approx(1)
    assert np.array_equal(table.y, Y[remaining]) and (table.weight.astype(np.float32) > 0).all()
    if raw:
        alone = TableEncoder.fit(x[remaining], Y[remaining], sample_weight=HALF_LIFE[remaining])
        assert table.encoder == alone[0]
        np.testing.assert_array_equal(table.x, alone[1])


def test_weights_of_classes_are_normalised_with_those_of_rows():
    label = (Y > 0).astype(int)
    weight = RNG.uniform(0.5, 2, 400)
    table = checked_table(X, label, weight, jtrees.Classification(2, class_weight=(1.0, 1e5)))
    expected = weight * np.array([1.0, 1e5])[label]
    np.testing.assert_allclose(table.weight, expected / expected.mean(), rtol=1e-12)


def test_target_means_of_levels_do_not_count_rows_of_weight_zero():
    rng, count = np.random.default_rng(0), 2000
    numbers = rng.integers(0, 60, count)
    levels = pd.DataFrame({"level": np.char.add("level ", numbers.astype(str))})
    y, weight = (numbers > 9) + rng.normal(size=count), 1.0 * (rng.random(count) < 0.2)
    used = weight > 0
    fit = lambda rows: TableEncoder.fit(levels.iloc[rows], y[rows], sample_weight=weight[rows])[0]
    complete, alone = fit(np.arange(count)), fit(np.flatnonzero(used))
    means = lambda encoder: encoder.transform(levels)[used, 0]
    np.testing.assert_allclose(means(complete), means(alone), rtol=1e-9)


def test_weights_have_mean_one_over_rows_of_positive_weight():
    weight = np.tile(np.array([0, 1, 3, 0], np.float32), 20)
    for xp, unit in ((np, 1e37), (jnp, 1e37), (jnp, 1e-30)):  # the sum of the first two is infinite in float32
        np.testing.assert_allclose(segments.mean_one(xp.asarray(np.float32(unit) * weight)), weight / 2, rtol=1e-6)


def test_huge_weights_of_a_raw_table():
    """The sum of the weights is beyond double precision."""
    x = np.where(X > 1.5, np.nan, X)
    plain, huge = (TableEncoder.fit(x, Y, sample_weight=weight)[1] for weight in (None, np.full(400, 1e308)))
    np.testing.assert_array_equal(plain, huge)


def test_a_class_of_weight_zero_in_float32_has_no_probability():
    label = np.where(np.arange(400) < 200, "old", np.where(np.arange(400) % 2 == 0, "new", "other"))
    model = TreeClassifier(jtrees.GET(depth=1, starts=1, epochs=5), random_state=0)
    model.fit(X, label, sample_weight=HALF_LIFE)
    assert model.classes_.tolist() == ["new", "old", "other"]  # as in scikit-learn
    assert not model.predict_proba(X)[:, 1].any()


def test_weights_of_a_validation_set_are_like_repeated_rows():
    x, y, count = tables.X[:200], tables.Y[:200], np.arange(200) % 3
    fit = lambda *validation: jtrees.fit(recipes.DGT, tables.X, tables.Y, validation=validation, key=KEY)
    y_unused = np.where(count == 0, 1e6, y)  # the targets of rows of weight 0 do not matter
    weighted, repeated = fit(x, y_unused, 5.0 * count), fit(np.repeat(x, count, 0), np.repeat(y, count))
    assert weighted.step == repeated.step and weighted.loss == pytest.approx(repeated.loss, rel=1e-6)


@pytest.mark.parametrize("soft", [False, True])
def test_class_weights_count_in_a_validation_set_and_its_verdict(soft):
    """No feature informs, so the best probability is 9 / 10 and its loss is an entropy."""
    y = np.arange(tables.ROWS) % 2
    y = np.eye(2)[y] if soft else y
    task = jtrees.Classification(2, class_weight=(1.0, 9.0))
    fit = jtrees.fit(recipes.DGT.replace(depth=1), tables.X, y, task=task, validation=(tables.X, y), key=KEY)
    assert fit.loss < 0.5 and fit.report.baselines["constant"] == pytest.approx(0.325, abs=0.01)


def test_class_weights_of_an_estimator_count_in_its_validation_rows():
    y = np.arange(tables.ROWS) % 2
    options = {"validation_fraction": 0.25, "random_state": 0, "class_weight": {0: 1.0, 1: 9.0}}
    model = TreeClassifier(recipes.DGT.replace(depth=1), **options).fit(tables.X, y)
    assert model.loss_ < 0.5


@pytest.mark.parametrize("weight", [np.ones(3), -np.ones(tables.ROWS), np.zeros(tables.ROWS)])
def test_wrong_weights_of_a_validation_set_are_named(weight):
    with pytest.raises(ValueError, match="validation: sample_weight must"):
        jtrees.fit(recipes.DGT, tables.X, tables.Y, validation=(tables.X, tables.Y, weight), key=KEY)


def test_part_of_a_table_has_weights_of_mean_one():
    dataset = checked_dataset(X, Y, RNG.lognormal(sigma=2, size=400), "regression")
    training, out = dataset.divided(0.5, KEY)
    assert training.table().weight.mean() == pytest.approx(1) == dataset.weight.mean()
    weight_by_row = {tuple(x): weight for x, weight in zip(dataset.x, dataset.weight, strict=True)}
    np.testing.assert_array_equal(out.weight, [weight_by_row[tuple(x)] for x in out.x])


@pytest.mark.parametrize("recipe", sweeps.slow([*QUICK, *OTHERS, *SUMS, *COMBINATORS[1:]], [*QUICK, *SUMS]), ids=type)
def test_rows_of_little_weight_hardly_count(recipe):
    """Their targets are of the other sign. A recipe without weights would learn nothing."""
    heavy = np.arange(400) % 2 == 0
    y, weight = np.where(heavy, Y, -Y), np.where(heavy, 10.0, 0.01)
    assert score(recipe, y=y, weight=weight) > score(recipe, X[heavy], Y[heavy]) - 0.15


@pytest.mark.slow
@pytest.mark.parametrize("unit", [1e-20, 1e20])
def test_leaves_depend_on_ratios_of_weights_alone(unit):
    """Squares of these weights are beyond single precision."""
    leaf, x, y = jnp.asarray(np.arange(40) % 2), jnp.asarray(X[:40], jnp.float32), jnp.asarray(Y[:40], jnp.float32)
    weight = jnp.asarray(np.linspace(1, 2, 40), jnp.float32)
    kinds = jtrees.leaves.Values(jnp.zeros(2)), jtrees.leaves.Linear(jnp.zeros((2, 4)), jnp.zeros(2))
    for kind in kinds:
        plain, scaled = (kind.refit_shrunk(leaf, x, y, w)[0].at(leaf, x) for w in (weight, unit * weight))
        np.testing.assert_allclose(scaled, plain, rtol=1e-4, atol=1e-4)


def test_a_sample_of_weight_zero_does_not_count_even_with_an_infinite_loss():
    row_losses, weight = jnp.array([1.0, jnp.inf, 3.0]), jnp.array([2.0, 0.0, 1.0])
    assert losses.mean_loss(row_losses, weight) == pytest.approx(5 / 3)
    assert losses.weighted_mean(row_losses, weight) == pytest.approx(5 / 3)  # weights of mean 1
    assert losses.mean_loss(row_losses[::2], None) == 2


@pytest.mark.parametrize(
    ("recipe", "most"),
    [
        (jtrees.CO2(depth=3, epochs=10, ridge=False, precondition=0), 0.15),
        (jtrees.CO2(depth=3, epochs=10, precondition=0, rows=2000), 0.15),
        (jtrees.GET(depth=3, starts=1, epochs=20, cart="binned", halving=False, precondition=0), 0.02),
    ],
)
def test_splits_lie_where_the_weight_lies(recipe, most):
    """Bins of equal numbers of rows would put almost all edges among the rows of a thousandth of the weight."""
    rng = np.random.default_rng(0)
    x, weight = np.r_[rng.uniform(1, 100, 4000), rng.random(300)][:, None], np.r_[np.full(4000, 1e-3), np.ones(300)]
    y = np.where(x[:, 0] > 1, 0, np.sign(np.sin(12 * x[:, 0])))
    fit = jtrees.fit(recipe, x, y, sample_weight=weight, key=KEY)
    assert np.mean((fit.predict(x) - y)[4000:] ** 2) < most
