"""Subtree polish: never worse, whatever the tree; and side by side the same as one subtree after the other."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.tree import DecisionTreeClassifier

import jtrees
from jtrees import losses, pytree
from jtrees.data import Scaling
from jtrees.leaves import Values
from jtrees.search import Engine, Fitted
from jtrees.search.monitor import Monitor
from jtrees.tables import checked_table
from jtrees.warmstart import from_sklearn
from tests import oracles, sweeps
from tests.problems import problem_of_table, search

pytestmark = pytest.mark.usefixtures("standard_promotion")

DEPTH, EPOCHS = 2, 40
REPORT = jtrees.search.Report()


@pytree.dataclass
class Given(jtrees.Recipe):
    """A recipe that returns a given tree."""

    tree: Any

    async def search(self, problem):
        history = np.zeros(1, np.float32)
        return Fitted((), 0.0, 7, history, model=self.tree, tree=self.tree, loss=99.0, report=REPORT)

    def scaling(self, table):
        return Scaling.fit(table, 3.0)


def polish(tree, x, y, *, task="regression", sample_weight=None, monitor=None, key=0, **options):
    table = checked_table(x, y, sample_weight, task)
    recipe = jtrees.Polished(Given(tree), **{"epochs": EPOCHS, "shrink": False, **options})
    fitted = search(problem_of_table(recipe, table, key=key, engine=Engine(monitor or Monitor(), "threefry2x32")))
    return SimpleNamespace(tree=fitted.tree, losses=fitted.report.losses, accepted=fitted.report.accepted)


def random_tree(seed, classes=None, depth=DEPTH):
    rng, n = np.random.default_rng(seed), 2**depth
    draw = lambda *shape: jax.device_put(rng.normal(size=shape).astype(np.float32))
    leaves = Values(draw(n)) if classes is None else Values(jax.nn.softmax(draw(n, classes)), losses.Frequencies())
    return jtrees.ObliqueTree(draw(n - 1, 3), 0.5 * draw(n - 1), leaves)


def squared_loss(tree, x, y, weight=None):
    means = oracles.leaf_means(leaf := tree.leaf_index(x), y, len(tree.bias) + 1, (y.min() + y.max()) / 2, weight)
    return np.average((y - means[leaf]) ** 2, weights=weight)


def check(result, before, after):
    losses = result.losses
    assert losses.shape == (len(result.accepted) + 1,)
    assert (np.diff(losses) <= 0).all()
    assert np.array_equal(np.diff(losses) < 0, result.accepted > 0)
    assert (result.accepted <= 2 ** np.arange(len(result.accepted))).all()
    assert losses[0] == pytest.approx(before, rel=1e-5)
    assert losses[-1] == pytest.approx(after, rel=1e-5)


def check_unchanged(result, tree, nodes=slice(None)):
    assert np.array_equal(result.tree.weights[nodes], tree.weights[nodes])
    assert np.array_equal(result.tree.bias[nodes], tree.bias[nodes])


def test_weights_count(data):
    """Many light rows speak against the split of few heavy ones."""
    x, heavy = data[0], np.arange(200) % 5 == 0
    weight = np.where(heavy, 50.0, 0.1)
    y = np.where(x[:, 0] > 0, 4.0, np.where(x[:, 1] > -0.5, 1.0, -1.0) * np.where(heavy, 1, -1))
    tree = jtrees.ObliqueTree(jnp.eye(3).at[2, 2].set(0), jnp.asarray([0.0, -0.3, -1.0]), Values(jnp.zeros(4)))
    result = polish(tree, x, y, sample_weight=weight)
    check(result, squared_loss(tree, x, y, weight), squared_loss(result.tree, x, y, weight))
    assert result.losses[-1] < 0.2 * result.losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, DEPTH])
def test_classes(data, depth):
    x, y = data[0], np.digitize(data[1], [-1.0, 1.0])

    def log_loss(tree):
        leaf = tree.leaf_index(x)
        return -np.log(oracles.class_frequencies(leaf, y, 2**depth, 3, np.ones(200))[1][leaf, y]).mean()

    for tree in (random_tree(0, 3, depth), from_sklearn(DecisionTreeClassifier(max_depth=depth).fit(x, y))):
        result = polish(tree, x, y.astype(float), task="classification")
        after = -np.log(result.tree.predict(x)[np.arange(200), y]).mean()
        check(result, log_loss(tree), after)
        assert after == pytest.approx(log_loss(result.tree), rel=1e-5)
        assert result.losses[-1] < 0.95 * result.losses[0]


def test_a_subtree_is_replaced_where_that_helps_and_nowhere_else(data):
    # Right of the root an oblique split that is perfect, left of it one at the wrong place, which CART puts right.
    x = data[0]
    weights = jnp.asarray([[1.0, 0, 0], [0, 1, 0], [0, 1, 1]])
    tree = jtrees.ObliqueTree(weights, jnp.asarray([0.0, -0.3, 0.0]), Values(jnp.zeros(4)))
    right = np.where(x[:, 1] + x[:, 2] > 0, 5.0, 3.0)
    y = np.where(x[:, 0] > 0, right, np.where(x[:, 1] > 0.5, 1.0, -1.0))
    result = polish(tree, x, y, learning_rate=1e-8)  # so small that the starts are all there is
    assert result.accepted.tolist() == [0, 1]
    assert result.losses[0] > 0.01
    assert result.losses[2] == pytest.approx(0, abs=1e-10)
    check_unchanged(result, tree, jnp.asarray([0, 2]))


def test_an_interrupted_polish_keeps_the_tree(data):
    monitor = Monitor()
    monitor.ended = "max_seconds"
    result = polish(random_tree(0), *data, monitor=monitor)
    assert len(result.losses) == 1 and not len(result.accepted)
    check_unchanged(result, random_tree(0))


@pytest.mark.parametrize(("alone", "left"), [(0, 1.0), (1, 1.0), (40, 1.0), (40, 0.0)])
def test_subtrees_without_anything_to_learn_stay_as_they_are(data, alone, left):
    # On the right of the root: nothing, one sample, or many of one target; on the left another subtree that is right,
    # or one that has nothing to learn either.
    x, _ = data
    top = np.sort(x[:, 0])[::-1]
    threshold = top[0] + 1 if alone == 0 else (top[alone - 1] + top[alone]) / 2
    bias = jnp.asarray([-threshold, 0.0, 0.25], jnp.float32)
    tree = jtrees.ObliqueTree(jnp.eye(3)[jnp.asarray([0, 1, 2])], bias, Values(jnp.zeros(4)))
    y = np.where(x[:, 0] > threshold, 5.0, np.where(x[:, 1] > 0, left, 0.0))
    result = polish(tree, x, y)
    assert result.accepted.tolist() == [0, 0]
    check_unchanged(result, tree.refit(x, y.astype(np.float32)).merged())  # a fit merges leaves of equal values


@pytest.mark.parametrize("classes", sweeps.slow([False, True], [False]))
def test_leaves_are_finally_drawn_towards_their_ancestors(data, classes):
    x, y = data[0], np.random.default_rng(0).integers(0, 3, len(data[0]))
    options = {"key": jax.random.key(0), "task": "classification" if classes else "regression"}
    recipe = jtrees.Polished(Given(random_tree(0, 3 if classes else None)), epochs=EPOCHS)
    shrunk, means = (jtrees.fit(recipe.replace(shrink=shrink), x, y, **options) for shrink in (True, False))
    check_unchanged(shrunk, means.tree)
    spread = lambda fit: np.ptp(np.asarray(fit.tree.leaves.values)[np.unique(fit.tree.leaf_index(x))], axis=0).max()
    assert spread(shrunk) < 0.8 * spread(means)
    again = means.tree.refit(x, y if classes else y.astype(np.float32), shrink=True)
    np.testing.assert_allclose(shrunk.tree.leaves.values, again.leaves.values, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(shrunk.report.search.losses, means.report.search.losses)
    assert shrunk.loss > means.loss == means.report.search.losses[-1]


def test_subtrees_are_replaced_by_the_loss_on_validation(data):
    x, y = data
    recipe = jtrees.Polished(Given(random_tree(0)), epochs=EPOCHS, shrink=False)
    for targets, improves in ((y[:50], True), (-y[:50], False)):  # the latter are best predicted by few leaves
        fit = jtrees.fit(recipe, x, y, key=jax.random.key(0), validation=(x[:50], targets))
        losses, accepted = fit.report.search.losses, fit.report.search.accepted
        assert (np.diff(losses) <= 0).all() and fit.loss == losses[-1]
        assert fit.loss == pytest.approx(np.mean((fit.predict(x[:50]) - targets) ** 2, dtype=np.float64), rel=1e-5)
        training_loss = lambda tree: squared_loss(tree, x, y)
        assert (training_loss(fit.tree) < 0.9 * training_loss(random_tree(0))) == improves, accepted
        assert fit.step == 7 and fit.report.search.base is REPORT and fit.report.ended == "finished"


@pytest.mark.parametrize("base", [jtrees.GET(leaves="linear"), jtrees.LatentTree()])
def test_bases_that_are_refused(data, base):
    with pytest.raises(ValueError, match=r"base must .*constant leaves"):
        jtrees.fit(jtrees.Polished(base), *data, key=jax.random.key(0))


def test_an_action_of_constant_reward_does_not_end_the_polish():
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (200, 2))
    rewards = np.stack([np.sin(5 * x[:, 0]) * np.cos(4 * x[:, 1]), np.zeros(200)], axis=1)
    recipe = jtrees.Polished(jtrees.GET(depth=3, starts=1, epochs=5, halving=False), epochs=60)
    report = jtrees.fit(recipe, x, rewards, key=jax.random.key(0), task=jtrees.Policy(2)).report.search
    assert np.sum(report.accepted) > 0 and report.losses[-1] < report.losses[0]
