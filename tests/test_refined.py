"""All trees of a boosted sum trained together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from jtrees.ensembles.refined import SoftTrees
from jtrees.leaves import Values
from tests import oracles, sweeps

pytestmark = pytest.mark.usefixtures("standard_promotion")  # Adam

KEY = jax.random.key(0)
WEAK = jtrees.GET(depth=2, starts=1, epochs=10, cart="binned", precondition=0, shrink=False, halving=False)
BOOSTED = jtrees.Boosted(WEAK, rounds=6, patience=6, learning_rate=0.3)
rng = np.random.default_rng(0)
X = rng.normal(size=(240, 3)).astype(np.float32)
Y = np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2]
TEST = X[160:], Y[160:]
TRAIN = X[:160], Y[:160]
BASES = {"constant": BOOSTED, "linear": BOOSTED.replace(base=WEAK.replace(leaves="linear"))}
# Few updates of few trees, which need sharp splits at once.
SHORT = {"epochs": 30, "batch_size": 32, "learning_rate": 0.01, "weight_decay": 0.0, "first_sharpness": 10.0}
UNTRAINED = {"learning_rate": 1e-9, "first_sharpness": 1.0, "last_sharpness": 1.0}


def fit(base=BOOSTED, data=TRAIN, options=None, **keywords):
    recipe = jtrees.Refined(base, **SHORT | {"last_sharpness": 100.0} | (options or {}))
    return jtrees.fit(recipe, *data, key=KEY, **keywords)


def error(model, data=TEST):
    return np.mean((np.asarray(model.predict(data[0]), np.float64) - data[1]) ** 2)


def plain_outputs(network, x):
    """The sum of the trees' expected outputs, path by path, in double precision."""
    wide = lambda a: np.asarray(a, np.float64)
    trees, total = network.trees, np.zeros(len(x)) + wide(network.initial)
    for t in range(len(trees.bias)):
        right = oracles.sigmoid(wide(network.sharpness) * (wide(trees.weights[t]) @ x.T + wide(trees.bias[t])[:, None]))
        if isinstance(trees.leaves, jtrees.leaves.Linear):
            values = wide(trees.leaves.coefficients[t]) @ x.T + wide(trees.leaves.intercept[t])[:, None]
        else:
            values = wide(trees.leaves.values[t])
        total += oracles.expected_value(right, values)
    return np.clip(total, wide(network.lower), wide(network.upper))


def test_each_of_several_outputs_is_a_sum_of_expected_outputs():
    draw = lambda *shape: jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)
    values, bound = draw(5, 4, 2), jnp.full(2, 2.0)
    network = SoftTrees(
        jtrees.ObliqueTree(draw(5, 3, 3), draw(5, 3), Values(values)), draw(2), jnp.float32(3), -bound, bound
    )
    outputs = np.asarray(network.outputs(jnp.asarray(X)))
    assert (abs(outputs) == 2).any() and (abs(outputs) < 2).any()
    for k in range(2):
        trees, initial = network.trees.replace(leaves=Values(values[..., k])), network.initial[k]
        alone = network.replace(trees=trees, initial=initial, lower=-bound[k], upper=bound[k])
        np.testing.assert_allclose(outputs[:, k], plain_outputs(alone, X), atol=1e-5)


@pytest.mark.parametrize("kind", sweeps.quick(BASES, ["constant"]))
def test_a_validation_set_chooses_updates_and_outputs_are_those_of_the_definition(kind):
    boosted = jtrees.fit(BASES[kind], *TRAIN, key=KEY, validation=TEST)
    joint = fit(BASES[kind], validation=TEST)
    report = joint.report.search
    assert report.refined and report.base.rounds == boosted.report.search.rounds and joint.tree is None
    assert report.boosted_loss == pytest.approx(boosted.report.search.losses.min(), rel=1e-5)
    assert joint.loss == pytest.approx(error(joint), rel=1e-4) and joint.loss < boosted.loss
    assert report.losses.min() == pytest.approx(joint.loss / np.ptp(TRAIN[1]) ** 2, rel=1e-3)  # scaled to [0, 1]
    assert joint.model.network.sharpness == pytest.approx(
        10 * 10 ** ((joint.step - report.base.rounds) / 150), rel=1e-5
    )
    scaled = np.asarray(joint.model.scaling.transform(X), np.float64)
    expected = joint.model.scaling.inverse(plain_outputs(joint.model.network, scaled))
    np.testing.assert_allclose(joint.predict(X), expected, atol=2e-5)  # float32
    assert joint.model.num_parameters == sum(np.size(a) for a in jax.tree.leaves(joint.model.network.params))
    size = f"trees={report.base.rounds}, depth=2, features=3"
    assert repr(joint.model) == f"SoftModel(SoftTrees({size}), Regression(), parameters={joint.model.num_parameters})"


def test_training_keeps_the_slopes_of_boosting_and_decays_the_constants():
    leaves = [
        fit(BASES["linear"], options={"weight_decay": decay}, validation=TEST).model.network.trees.leaves
        for decay in (0.0, 0.5)
    ]
    untrained = fit(BASES["linear"], options=UNTRAINED, validation=TEST).model.network.trees.leaves
    for trained in leaves:
        np.testing.assert_allclose(trained.coefficients, untrained.coefficients, rtol=1e-5, atol=1e-7)
        assert np.abs(trained.intercept - untrained.intercept).max() > 0.01
    assert np.square(leaves[1].intercept).sum() < 0.5 * np.square(leaves[0].intercept).sum()


@pytest.mark.slow
def test_a_training_that_lowers_nothing_leaves_the_trees_of_boosting():
    """Some splits have no weights, and send all rows to their side."""
    x = np.sign(X[:, :1])
    data, validation = (x[:160], x[:160, 0] + Y[:160]), (x[160:], x[160:, 0] + Y[160:])
    boosted = jtrees.fit(BOOSTED, *data, key=KEY, validation=validation)
    assert (np.asarray(boosted.model.trees.weights) == 0).all(-1).any()
    joint = fit(data=data, options=UNTRAINED, validation=validation)
    assert not joint.report.search.refined
    np.testing.assert_allclose(joint.predict(x), boosted.predict(x), atol=1e-4)


@pytest.mark.slow
def test_a_deadline_before_the_first_update_leaves_the_trees_of_boosting():
    options = {"epochs": 100, "first_sharpness": 40.0, "last_sharpness": 100.0}  # soft trees are better untrained
    joint = fit(options=options, max_seconds=1e-3)
    assert not joint.report.search.refined and joint.report.search.losses.tolist() == [np.inf]


@pytest.mark.slow
def test_rows_held_out_choose_the_updates_of_a_training_on_all_rows():
    joint = fit()
    search, losses = joint.report.search, joint.report.search.losses
    assert search.refined and losses.min() < search.boosted_loss and joint.step > search.base.rounds
    assert error(joint) < error(fit(options=UNTRAINED)) and joint.loss == pytest.approx(error(joint, TRAIN), rel=1e-4)
    assert len(joint.report.held_out_rows) == 32


@pytest.mark.parametrize("base", [jtrees.DGT(), BOOSTED.replace(patience=None)])
def test_bases_that_are_refused(base):
    with pytest.raises(ValueError, match=r"base must be a jtrees.Boosted with patience"):
        fit(base)


def test_a_decay_that_diverges_is_refused():
    expected = r"weight_decay must be at most 1 / \(learning_rate \* base.rounds\) = 16.7, got 17"
    with pytest.raises(ValueError, match=expected):
        fit(options={"weight_decay": 17.0})


@pytest.mark.slow
def test_joint_training_ends_when_a_fifth_of_the_evaluations_lower_no_loss():
    options = {"epochs": 400, "learning_rate": 0.02}  # 2800 updates, 40 evaluations
    losses = fit(data=(X, rng.normal(size=240)), options=options).report.search.losses
    assert len(losses) == np.argmin(losses) + 1 + 8
