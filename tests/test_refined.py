"""All trees of a boosted sum trained together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sweeps

import jtrees
from jtrees.ensembles import refined
from jtrees.ensembles.refined import SoftForest, SoftTrees

pytestmark = pytest.mark.usefixtures("standard_promotion")  # Adam

KEY = jax.random.key(0)
WEAK = jtrees.GET(depth=2, starts=1, epochs=10, cart="binned", precondition=0, shrink=False, halving=False)
BOOSTED = jtrees.Boosted(WEAK, rounds=6, patience=6, learning_rate=0.3)
rng = np.random.default_rng(0)
X = rng.normal(size=(240, 3)).astype(np.float32)
Y = np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2]
TEST = X[160:], Y[160:]
TRAIN = X[:160], Y[:160]
LINEAR = BOOSTED.replace(base=WEAK.replace(leaves="linear"))
COUNTS = jtrees.Regression(loss_function=jtrees.losses.Poisson())
BOUNDS = jtrees.Regression(loss_function=jtrees.losses.Quantile((0.1, 0.9)))
RECIPES = {"constant": BOOSTED, "linear": LINEAR}


def fit(base=BOOSTED, data=TRAIN, **more):
    keyword = {name: more.pop(name) for name in ("task", "validation", "max_seconds") if name in more}
    return jtrees.fit(
        jtrees.Refined(base, **{"epochs": 30, "batch_size": 32, "learning_rate": 0.01} | more),
        *data,
        key=KEY,
        **keyword,
    )


def error(model, data=TEST):
    return np.mean((np.asarray(model.predict(data[0]), np.float64) - data[1]) ** 2)


def plain_outputs(network, x):
    """The sum of the trees' expected outputs: path by path, in double precision."""
    wide = lambda a: np.asarray(a, np.float64)
    trees, total = network.trees, np.zeros(len(x)) + wide(network.initial)
    for t in range(len(trees.bias)):
        right = 1 / (1 + np.exp(-wide(network.sharpness) * (x @ wide(trees.weights[t]).T + wide(trees.bias[t]))))
        for leaf in range(trees.bias.shape[1] + 1):
            reach, node = np.ones(len(x)), leaf + trees.bias.shape[1]
            while node:
                parent, goes_right = (node - 1) // 2, node % 2 == 0
                reach *= right[:, parent] if goes_right else 1 - right[:, parent]
                node = parent
            if isinstance(trees.leaves, jtrees.leaves.Linear):
                value = x @ wide(trees.leaves.coefficients[t, leaf]) + wide(trees.leaves.intercept[t, leaf])
            else:
                value = wide(trees.leaves.values[t, leaf])
            total += reach * value
    return np.clip(total, wide(network.lower), wide(network.upper))


@pytest.fixture
def one_sum(monkeypatch):
    """Boosting has no sum for each fold, as within jtrees.Refined."""
    monkeypatch.setattr("jtrees.ensembles.boosted._FEW_ROWS", 0)


@pytest.mark.usefixtures("one_sum")
@pytest.mark.parametrize("kind", sweeps.slow(RECIPES, ["constant"]))
def test_outputs_are_those_of_the_definition_and_better_than_boosting(kind):
    boosted, both = jtrees.fit(RECIPES[kind], *TRAIN, key=KEY), fit(RECIPES[kind])
    assert both.report.search.refined and error(both) < error(boosted)
    assert both.report.search.base.rounds == boosted.report.search.rounds and both.tree is None
    assert isinstance(both.model, SoftForest)
    np.testing.assert_allclose(both.report.search.boosted_loss, boosted.report.search.losses.min(), rtol=1e-5)
    scaled = np.asarray(both.model.scaling.transform(TEST[0]), np.float64)
    expected = both.model.scaling.inverse(plain_outputs(both.model.network, scaled))
    np.testing.assert_allclose(both.predict(TEST[0]), expected, atol=2e-5)  # float32


@pytest.mark.wide
@pytest.mark.usefixtures("one_sum")
def test_a_training_that_lowers_nothing_leaves_the_trees_of_boosting():
    """Softened, and hardly trained, they are worse."""
    boosted = jtrees.fit(BOOSTED, *TRAIN, key=KEY)
    both = fit(learning_rate=1e-9, first_sharpness=1.0, last_sharpness=1.0)
    assert not both.report.search.refined
    np.testing.assert_allclose(both.predict(TEST[0]), boosted.predict(TEST[0]), atol=1e-4)


@pytest.mark.wide
def test_a_validation_set_takes_the_place_of_rows_held_out():
    both = fit(validation=TEST)
    boosted = jtrees.fit(BOOSTED, *TRAIN, key=KEY, validation=TEST)
    assert both.report.search.boosted_loss == pytest.approx(boosted.report.search.losses.min(), rel=1e-5)
    assert both.loss == pytest.approx(error(both), rel=1e-4) and both.loss < boosted.loss
    chosen = both.report.search.losses.min()
    # On targets scaled to [0, 1].
    assert chosen == pytest.approx(both.loss / np.ptp(TRAIN[1]) ** 2, rel=1e-3)


@pytest.mark.slow
def test_a_deadline_leaves_the_trees_of_boosting():
    both = fit(max_seconds=1e-6)
    assert both.report.ended == "max_seconds" and not both.report.search.refined
    assert np.isfinite(both.predict(TEST[0])).all()


@pytest.mark.wide
@pytest.mark.parametrize(
    ("task", "y"),
    [
        pytest.param(jtrees.Classification(3), np.digitize(Y, [-0.5, 0.5]), id="classes"),
        pytest.param(COUNTS, np.random.default_rng(1).poisson(np.exp(Y / 2)), id="counts"),
        pytest.param(BOUNDS, Y, id="quantiles"),
        pytest.param(jtrees.Regression(2), np.stack([Y, X[:, 0]], axis=1), id="targets"),
    ],
)
def test_every_loss(task, y):
    both = fit(data=(X, y), task=task)
    assert np.isfinite(both.loss) and np.isfinite(both.predict(X)).all()
    assert both.report.search.losses.min() < both.report.search.boosted_loss * 1.05
    if isinstance(task, jtrees.Classification):
        np.testing.assert_allclose(both.predict(X).sum(1), 1, rtol=1e-5)


@pytest.mark.wide
def test_fits_are_saved(tmp_path):
    both = fit(LINEAR)
    jtrees.save(both, tmp_path / "fit.jtrees")
    again = jtrees.load(tmp_path / "fit.jtrees")
    np.testing.assert_array_equal(again.predict(X), both.predict(X))
    assert both.model.num_parameters == sum(np.size(a) for a in jax.tree.leaves(both.model.network.params))


def test_splits_without_weights_stay_on_their_side():
    tree = jtrees.ObliqueTree(
        jnp.array([[[3.0, 4.0], [0, 0], [0, 0]]]),
        jnp.array([[10.0, -5.0, 2.0]]),
        jtrees.leaves.Values(jnp.zeros((1, 4))),
    )
    unit = refined._of_unit_length(tree)
    np.testing.assert_allclose(unit.weights[0, 0], [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(unit.bias[0], [2, -1, 1], rtol=1e-6)
    network = SoftTrees(unit, jnp.zeros(()), jnp.float32(30), jnp.float32(-1), jnp.float32(1))
    assert network.features == 2 and "trees=1, depth=2" in str(network)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (lambda: jtrees.Refined(jtrees.DGT()), "base must be a jtrees.Boosted with patience"),
        (lambda: jtrees.Refined(BOOSTED.replace(patience=None)), "base must be a jtrees.Boosted with patience"),
        (lambda: jtrees.Refined(BOOSTED, learning_rate=0.0), "learning_rate must be"),
        (lambda: jtrees.Refined(BOOSTED, last_sharpness=-1.0), "last_sharpness must be"),
        (
            lambda: jtrees.Refined(BOOSTED, learning_rate=(0.1, 0.2)),
            r"learning_rate must be one number, got shape \(2,\)",
        ),
        (
            lambda: jtrees.Refined(BOOSTED, first_sharpness=[[1.0]]),
            r"first_sharpness must be one number, got shape \(1, 1\)",
        ),
        (lambda: jtrees.Refined(BOOSTED, epochs=0), "epochs must be at least 1"),
    ],
)
def test_bad_options_are_refused(recipe, said):
    with pytest.raises(ValueError, match=said):
        jtrees.fit(recipe(), *TRAIN, key=KEY)


@pytest.mark.slow
def test_joint_training_ends_when_a_fifth_of_the_evaluations_lower_no_loss():
    noise = rng.normal(size=240)
    losses = fit(data=(X, noise), epochs=400, learning_rate=0.02).report.search.losses  # 2800 updates, 56 evaluations
    assert len(losses) == np.argmin(losses) + 1 + 12
