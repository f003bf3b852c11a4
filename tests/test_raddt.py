"""RADDT: routing by violation, centred thresholds, its sharpnesses. Its search: test_annealed."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from jtrees.leaves import Values
from jtrees.methods.annealed.raddt import centre_thresholds
from tests import oracles

pytestmark = pytest.mark.usefixtures("standard_promotion")

DEPTH = 2
centred_by = jax.jit(centre_thresholds)


def random_tree(depth, seed, leaves=True):
    rng = np.random.default_rng(seed)
    nodes = 2**depth - 1
    draw = lambda *shape: jax.device_put(rng.normal(size=shape).astype(np.float32))
    return jtrees.ObliqueTree(draw(nodes, 3), 0.5 * draw(nodes), Values(draw(nodes + 1)) if leaves else None)


def test_loss_is_what_softmin_of_violations_expects(data):
    x, y = (a.astype(np.float64) for a in data)
    params = random_tree(3, 0)
    weights, bias, values = (np.asarray(a, np.float64) for a in jax.tree.leaves(params))
    outputs = values[:, None] + np.zeros(len(y))
    batch = jtrees.Batch(*map(jnp.asarray, data))
    method = partial(jtrees.methods.raddt, 3)
    value = jax.jit(lambda sharpness, l1: method(sharpness, l1=l1).loss(params, batch, key=None, step=0))
    for sharpness in (0.5, 20.0):
        loss, score = value(sharpness, 0.0)
        softmin = lambda scores, sharpness=sharpness: oracles.violation(scores, sharpness)
        expected = oracles.expected_leaf_loss(weights, bias, outputs, x, y, np.ones(len(y)), route=softmin)
        assert float(loss) == pytest.approx(expected, rel=1e-4)
        means = oracles.leaf_means(leaf := oracles.walk(weights, bias, x), y, 8, 0)
        assert float(score) == pytest.approx(np.mean((y - means[leaf]) ** 2), rel=1e-4)
        assert float(value(sharpness, 0.5)[0] - loss) == pytest.approx(0.5 * np.abs(weights).sum(), rel=1e-4)


@pytest.mark.parametrize("seed", range(2))
def test_centred_thresholds_are_half_way_and_move_no_sample(data, seed):
    """Nodes that send all their samples to one side, or have none, stay."""
    x, tree = data[0], random_tree(3, seed)
    tree = tree.replace(bias=tree.bias.at[2].set(-100))
    centred = centred_by(tree, x)
    assert np.array_equal(centred.weights, tree.weights)
    assert np.array_equal(centred.leaf_index(x), tree.leaf_index(x))
    path, moved = np.asarray(tree.decision_path(jnp.asarray(x))), 0
    for node in range(7):
        level = (node + 1).bit_length() - 1
        reaches = path[level] == node
        right = reaches & (path[level + 1] == 2 * node + 2)
        scores = x.astype(np.float64) @ np.asarray(tree.weights[node], np.float64) + float(centred.bias[node])
        left, right = scores[reaches & ~right], scores[right]
        if len(left) and len(right):
            assert left.max() + right.min() == pytest.approx(0, abs=1e-5)  # scores of size one, in float32
            moved += not np.isclose(tree.bias[node], centred.bias[node], atol=1e-4)
        else:
            assert centred.bias[node] == tree.bias[node]
    assert moved >= 2 and centred.bias[2] == -100


def test_samples_of_weight_zero_do_not_hold_thresholds(data):
    x, tree = data[0], random_tree(3, 0)
    weight = np.random.default_rng(0).integers(0, 3, len(x)).astype(np.float32)
    centred = centred_by(tree, x, weight)
    repeated = np.where((weight > 0)[:, None], x, x[weight > 0][0])  # one that counts, again and again
    np.testing.assert_allclose(centred.bias, centred_by(tree, repeated).bias, rtol=1e-6)
    assert not np.allclose(centred.bias, centred_by(tree, x).bias, rtol=1e-3)


def test_the_tree_has_centred_thresholds_and_each_start_the_same_sharpnesses(data):
    result = jtrees.fit(jtrees.RADDT(depth=DEPTH, starts=2, epochs=30, halving=False), *data, key=jax.random.key(0))
    np.testing.assert_allclose(result.report.search.sharpness, np.tile(2 * 50 ** (np.arange(5) / 4), (2, 1)), rtol=1e-5)
    deep = jtrees.RADDT(depth=9).sharpness_ranges[:, 0]  # trees deeper than 8 go on
    assert deep[4:].tolist() == [100, 130, 170, 200] and len(jtrees.RADDT(depth=8).sharpness_ranges) == 5
    tree = result.tree
    np.testing.assert_allclose(centred_by(tree.replace(leaves=None), data[0]).bias, tree.bias, atol=1e-4)
