"""The expected loss at the leaves that samples reach, against that of all leaves."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrees import blocking, leaves as kinds, losses, ops, topology
from jtrees.routing import sharp
from tests import oracles, sweeps

N, P, DEPTH = 60, 3, 5
NODES = topology.num_nodes(DEPTH)


def draw(kind, sharpness, dtype, seed=0):
    """Splits, leaves, samples, targets and shares (some 0, as of padding)."""
    rng = np.random.default_rng(seed)
    weights, bias = sharpness * rng.normal(size=(NODES, P)), sharpness * rng.normal(size=NODES)
    x, y, share = rng.normal(size=(N, P)), rng.normal(size=N), rng.uniform(size=N) / N
    share[::7] = 0
    match kind:
        case "constant":
            leaves = kinds.Values(rng.normal(size=NODES + 1))
        case "linear":
            leaves = kinds.Linear(rng.normal(size=(NODES + 1, P)), rng.normal(size=NODES + 1))
        case "several":
            y = rng.normal(size=(N, 2))
            leaves = kinds.Linear(rng.normal(size=(NODES + 1, P, 2)), rng.normal(size=(NODES + 1, 2)))
        case "classes":
            y, leaves = rng.integers(3, size=N), kinds.Values(rng.normal(size=(NODES + 1, 3)), losses.LogLoss())
    cast = lambda a: jnp.asarray(a, dtype if np.issubdtype(a.dtype, np.floating) else np.int32)
    return jax.tree.map(cast, (weights, bias, leaves, x, y, share))


def dense(weights, bias, leaves, x, y, share):
    """The value and gradient of all leaves, and the leaf of each sample."""

    def loss(weights, bias, leaves):
        right = jax.nn.sigmoid(weights @ x.T + bias[:, None])
        return (share * oracles.expected_value(right, leaves.losses(x, y))).sum()

    return jax.value_and_grad(loss, (0, 1, 2))(weights, bias, leaves), ops.hard(weights, bias, x)


def refuses(*operands):
    spoilt = lambda a: jnp.full_like(a, jnp.nan) if jnp.issubdtype(a.dtype, jnp.floating) else a
    return jax.tree.map(spoilt, dense(*operands))


def same(first, other, atol):
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol * max(1, float(jnp.abs(b).max())))


@pytest.mark.parametrize("kind", sweeps.quick(["constant", "linear", "several", "classes"], ["linear"], ["classes"]))
@pytest.mark.parametrize("sharpness", sweeps.quick([0.3, 3, 30, 1e3], [3], [0.3]))
def test_value_gradient_and_leaf_are_those_of_all_leaves(kind, sharpness):
    operands = draw(kind, sharpness, np.float32)
    result = jax.jit(partial(sharp.visit, 2**DEPTH, refuses))(*operands)
    # A sample has at most 31 certain splits, of 1e-6 of the range of losses each; and float32 is rounded.
    same(result, jax.jit(dense)(*operands), atol=3e-5)


@pytest.mark.slow
def test_more_paths_than_there_is_room_for_are_computed_densely():
    operands = draw("constant", 1.0, np.float32)
    visit = lambda otherwise: jax.jit(partial(sharp.visit, 2, otherwise))(*operands)
    same(visit(dense), jax.jit(dense)(*operands), atol=1e-6)
    assert np.isnan(visit(refuses)[0][0])


@pytest.fixture
def deep(monkeypatch):
    monkeypatch.setitem(sharp.WIDTHS, DEPTH, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", sweeps.quick(["constant", "linear", "several", "classes"], ["constant", "classes"], [])
)
def test_the_expected_loss_takes_them_where_they_are_few(deep, monkeypatch, kind):
    weights, bias, leaves, x, y, share = draw(kind, 30, np.float32)
    weight = share / share.mean()

    def loss(weights, bias, leaves):
        return ops.expected_loss(weights, bias, leaves, x, y, weight=weight)

    slopes = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
    result = jax.jit(slopes)(weights, bias, leaves)
    monkeypatch.setattr(blocking, "samples_on_paths", lambda trees: 25)  # 3 blocks, the last padded
    same(jax.jit(lambda *args: slopes(*args))(weights, bias, leaves), result, atol=1e-6)
    monkeypatch.setattr(sharp, "WIDTHS", {DEPTH + 1: 4})
    same(jax.jit(lambda *args: slopes(*args))(weights, bias, leaves), result, atol=3e-5)


@pytest.mark.slow
def test_far_and_equal_scores_give_no_nan():
    weights, bias, *rest = draw("constant", 1.0, np.float32)
    visit = jax.jit(partial(sharp.visit, 2**DEPTH, refuses))
    for scale in (0.0, 1e30):
        splits = jnp.float32(scale) * weights, jnp.float32(scale) * bias
        (loss, gradient), leaf = visit(*splits, *rest)
        assert all(np.isfinite(a).all() for a in jax.tree.leaves((loss, gradient)))
        np.testing.assert_array_equal(leaf, ops.hard(*splits, rest[1]))


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, NODES - 1])
def test_splits_that_are_not_numbers_are_in_the_loss(node):
    weights, bias, *rest = draw("constant", 1.0, np.float32)
    first, every = np.array(bias), np.full_like(bias, np.nan)
    first[node] = np.nan
    for width in (1, 2**DEPTH):
        visit = jax.jit(partial(sharp.visit, width, dense))
        assert all(np.isnan(visit(weights, spoilt, *rest)[0][0]) for spoilt in (first, every))
