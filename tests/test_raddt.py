"""RADDT: routing by violation, centred thresholds, and the recipe."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from sklearn.tree import DecisionTreeRegressor

import jtrees
from jtrees.leaves import Constant
from jtrees.methods.raddt import centre_thresholds

pytestmark = pytest.mark.usefixtures("standard_promotion")

DEPTH = 2
SMALL = {"depth": DEPTH, "starts": 2, "epochs": 30}  # one program
centred_by = jax.jit(centre_thresholds)


def fit(x, y, *, seed=0, **options):
    return jtrees.fit(jtrees.RADDT(**{**SMALL, **options}), x, y, key=jax.random.key(seed))


def random_tree(depth, seed, leaves=True):
    rng = np.random.default_rng(seed)
    nodes = 2**depth - 1
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return jtrees.ObliqueTree(draw(nodes, 3), 0.5 * draw(nodes), Constant(draw(nodes + 1)) if leaves else None)


# --- The method ------------------------------------------------------------------------------------------------------


def expected_loss(weights, bias, outputs, x, y, scale):
    """Of one sample after the other: softmin of the scaled violations of each path, and what each leaf then loses."""
    depth, total = len(outputs).bit_length() - 1, 0.0
    for i, sample in enumerate(x):
        z = weights @ sample + bias
        paths = [oracles.path_to(leaf, depth) for leaf in range(2**depth)]
        violations = np.array([sum(max(-z[j] if right else z[j], 0) for j, right in path) for path in paths])
        chance = np.exp(-scale * violations)
        total += (chance / chance.sum() * (y[i] - outputs[:, i]) ** 2).sum()
    return total / len(x)


def test_loss_is_what_softmin_of_violations_expects(data):
    x, y = (a.astype(np.float64) for a in data)
    params = random_tree(3, 0)
    weights, bias, values = (np.asarray(a, np.float64) for a in jax.tree.leaves(params))
    outputs = values[:, None] + np.zeros(len(y))
    batch = jtrees.Batch(*map(jnp.asarray, data))
    value = jax.jit(lambda scale, l1: jtrees.methods.raddt(3, scale, l1=l1).loss(params, batch, key=None, step=0))
    for scale in (0.5, 20.0):
        loss, score = value(scale, 0.0)
        assert float(loss) == pytest.approx(expected_loss(weights, bias, outputs, x, y, scale), rel=1e-4)
        means = oracles.leaf_means(leaf := oracles.walk(weights, bias, x), y, 8, 0)
        assert float(score) == pytest.approx(np.mean((y - means[leaf]) ** 2), rel=1e-4)
        assert float(value(scale, 0.5)[0] - loss) == pytest.approx(0.5 * np.abs(weights).sum(), rel=1e-4)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
def test_bad_scales_are_refused(scale):
    with pytest.raises(ValueError, match="scale must be"):
        jtrees.methods.raddt(2, scale)


# --- Thresholds ------------------------------------------------------------------------------------------------------


def sides(tree, x):
    """Scores of the samples that reach each node, in float64: ``node -> (left, right)``."""
    path = np.asarray(tree.decision_path(jnp.asarray(x)))
    out = {}
    for node in range(len(tree.bias)):
        level = (node + 1).bit_length() - 1
        here = path[level] == node
        right = here & (path[level + 1] == 2 * node + 2)
        scores = x.astype(np.float64) @ np.asarray(tree.weights[node], np.float64) + float(tree.bias[node])
        out[node] = scores[here & ~right], scores[right]
    return out


@pytest.mark.parametrize("seed", range(5))
def test_centred_thresholds_are_half_way_and_move_no_sample(data, seed):
    x = data[0]
    tree = random_tree(3, seed)
    centred = centred_by(tree, x)
    assert np.array_equal(centred.weights, tree.weights)
    assert np.array_equal(centred.leaf_index(x), tree.leaf_index(x))
    before, moved = sides(tree, x), 0
    for node, (left, right) in sides(centred, x).items():
        assert [len(a) for a in before[node]] == [len(left), len(right)]
        if len(left) and len(right):
            assert left.max() + right.min() == pytest.approx(0, abs=1e-5)  # scores of size one, in float32
            moved += not np.isclose(tree.bias[node], centred.bias[node], atol=1e-4)
        else:
            assert centred.bias[node] == tree.bias[node]
    assert moved >= 2


def test_nodes_that_do_not_divide_stay(data):
    weights = np.zeros((7, 3), np.float32)
    weights[0, 0] = weights[2, 1] = 1
    bias = np.float32([0.0, 1.0, -100.0, -1, -1, -1, 1])  # to the right, to the left, and below likewise
    centred = centred_by(random_tree(3, 0).replace(weights=weights, bias=bias), data[0])
    assert np.array_equal(centred.bias[1:], bias[1:])
    assert centred.bias[0] != 0
    right, left = data[0][data[0][:, 0] > 0, 0].min(), data[0][data[0][:, 0] <= 0, 0].max()
    assert float(centred.bias[0]) == pytest.approx(-(right + left) / 2, rel=1e-5)


def test_samples_of_weight_zero_do_not_hold_thresholds(data):
    x, tree = data[0], random_tree(3, 0)
    weight = np.random.default_rng(0).integers(0, 3, len(x)).astype(np.float32)
    centred = centred_by(tree, x, weight)
    others = np.where((weight > 0)[:, None], x, x[weight > 0][0])  # one that counts, again and again
    np.testing.assert_allclose(centred.bias, centred_by(tree, others).bias, rtol=1e-6)
    assert not np.allclose(centred.bias, centred_by(tree, x).bias, rtol=1e-3)


# --- The recipe ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_never_worse_than_cart_and_reported_as_it_is(data, seed):
    rng = np.random.default_rng(seed)
    x, y = data[0], (data[1] + seed * rng.normal(size=len(data[1]))).astype(np.float32)
    tree, report = (result := fit(x, y, seed=seed)).tree, result.report
    cart = np.mean((DecisionTreeRegressor(max_depth=DEPTH, random_state=0).fit(x, y).predict(x) - y) ** 2)
    assert report["cart_loss"] == pytest.approx(cart, rel=1e-5)
    assert result.loss <= report["cart_loss"]
    assert result.loss == pytest.approx(np.mean((y - tree.predict(x)) ** 2, dtype=np.float64), rel=1e-5)
    np.testing.assert_allclose(report["sharpness"], np.tile(2 * 50 ** (np.arange(5) / 4), (2, 1)), rtol=1e-5)
    assert report["losses"].shape == report["steps"].shape == (2, 5)
    assert report["dropped"] == 0
    # Every tree that is looked at goes on from thresholds in the middle, and is returned with them there.
    np.testing.assert_allclose(centred_by(tree.replace(leaves=None), x).bias, tree.bias, atol=1e-4)


def test_beats_cart_clearly_on_an_oblique_signal(data):
    found = fit(*data)
    assert found.loss < 0.85 * found.report["cart_loss"]


def test_trees_deeper_than_8_have_scales_beyond():
    for depth, last in [(8, [100]), (9, [100, 130, 170, 200])]:
        recipe = jtrees.RADDT(depth=depth)
        scales = recipe.scales(jnp.zeros((3, recipe.stages())))
        np.testing.assert_allclose(scales[:, 4:], np.tile(last, (3, 1)), rtol=1e-5)


@pytest.mark.slow
def test_deep_trees_go_on_under_larger_scales():
    x = np.random.default_rng(0).normal(size=(8, 2))
    report = fit(x, np.arange(8.0), depth=9, starts=1, epochs=1).report
    np.testing.assert_allclose(report["sharpness"][0, 4:], [100, 130, 170, 200], rtol=1e-5)


def test_same_key_same_tree_and_no_compilation(data, count_compilations):
    first = fit(*data)
    assert count_compilations(lambda: fit(*data, l1=1e-3)) == 0
    assert jax.tree.all(jax.tree.map(np.array_equal, first.tree, fit(*data).tree))
