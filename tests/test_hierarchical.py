"""Hierarchical shrinkage: values and strength against the definition, by loops, and what recipes do with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from jtrees import leaves, losses
from jtrees.leaves.hierarchical import STRENGTHS
from jtrees.tasks.fits import samples_of_leaves
from tests import sweeps

DEPTH, LEAVES, N = 3, 8, 60
fit_hierarchical = jax.jit(leaves.fit_hierarchical, static_argnums=2)


def definition(leaf, y, weight, strength):
    """Values of the leaves, and weights times the diagonal of the map from targets to fitted values, by loops."""
    values, leverage = np.zeros(LEAVES), np.zeros(LEAVES)
    for item in range(LEAVES):
        value = share = mean = parent = samples = None
        for level in range(DEPTH + 1):
            inside = (leaf >> (DEPTH - level)) == (item >> (DEPTH - level))
            count = weight[inside].sum()
            if level == 0:
                value = mean = np.average(y, weights=weight)
                share = 1 / count
            elif count == 0:
                break
            else:
                node_mean = np.average(y[inside], weights=weight[inside])
                value += (node_mean - mean) / (1 + strength / samples)
                share += (1 / count - 1 / parent) / (1 + strength / samples)
                mean = node_mean
            parent, samples = count, count**2 / (weight[inside] ** 2).sum()
        values[item], leverage[item] = value, share
    return values, leverage[leaf] * weight**2


@pytest.mark.parametrize("noise", [0.01, 1.0, 30.0])
def test_values_and_strength_are_those_of_the_definition(noise):
    rng = np.random.default_rng(0)
    leaf = rng.choice([0, 1, 2, 3, 4, 7], N)  # two leaves are empty
    y = np.arange(LEAVES)[leaf] + noise * rng.normal(size=N)
    weight = rng.integers(0, 3, N) * rng.uniform(0.5, 2, N)
    results = []
    for strength in STRENGTHS:
        values, diagonal = definition(leaf, y, weight, strength)
        left = 1 - 2 * diagonal.sum() / weight.sum()
        results.append(((weight * (y - values[leaf]) ** 2).sum() / left**2 if left > 0 else np.inf, strength, values))
    _, strength, values = min(results, key=lambda result: result[0])
    with jax.enable_x64(True):
        ours, chosen = fit_hierarchical(leaf, y, LEAVES, sample_weight=weight)
        np.testing.assert_allclose(ours, values, rtol=1e-9, atol=1e-9)
    assert float(chosen) == pytest.approx(strength)


def test_what_a_split_costs():
    """With a cost of each node, the sum of its share in the trace; and a strength that is given is kept."""
    rng = np.random.default_rng(0)
    leaf, y, cost = rng.choice([0, 1, 2, 3, 4, 7], N), rng.normal(size=N), rng.uniform(2, 5, LEAVES - 1)
    y += 0.5 * leaf
    actual = []
    for strength in STRENGTHS:
        values, _ = definition(leaf, y, np.ones(N), strength)
        df = 2.0
        for level in range(DEPTH):
            for node in range(2**level):
                below = leaf[(leaf >> (DEPTH - level)) == node] >> (DEPTH - level - 1)
                if len(set(below)) == 2:
                    df += cost[2**level - 1 + node] * len(below) / (len(below) + strength)
        actual.append((((y - values[leaf]) ** 2).sum() / (1 - df / N) ** 2 if df < N else np.inf, strength, values))
    _, strength, values = min(actual, key=lambda item: item[0])
    assert 0 < strength < 1e4
    with jax.enable_x64(True):
        fit = lambda **options: fit_hierarchical(leaf, y, LEAVES, **options)
        for options in ({"cost": cost}, {"strength": strength}):
            ours, chosen = fit(**options)
            np.testing.assert_allclose(ours, values, rtol=1e-9, atol=1e-9)
            assert float(chosen) == pytest.approx(strength)
        assert fit()[1] < strength  # at a cost of 2


def test_targets_of_several_columns_and_far_from_zero():
    rng = np.random.default_rng(1)
    leaf, y = jnp.asarray(rng.integers(0, LEAVES, N)), rng.normal(size=N).astype(np.float32)
    alone = fit_hierarchical(leaf, y, LEAVES)[0]
    twice = fit_hierarchical(leaf, np.column_stack([y, y]), LEAVES)[0]
    np.testing.assert_allclose(twice, np.column_stack([alone, alone]), rtol=1e-5, atol=1e-6)
    far = fit_hierarchical(leaf, y + 1000, LEAVES)[0]
    np.testing.assert_allclose(far - 1000, alone, atol=1e-3)  # float32 at 1000


@pytest.mark.parametrize("xp", [np, jnp])
def test_the_effective_number_of_samples_of_an_empty_leaf_is_that_of_its_parent(xp):
    leaf, weight = xp.array([0, 0, 0, 3, 3]), xp.array([1.0, 1.0, 2.0, 0.5, 0.5])
    np.testing.assert_allclose(samples_of_leaves(leaf, weight, 4), [16 / 6, 16 / 6, 2, 2])


def test_class_frequencies_are_shrunk_indicators_smoothed(data):
    x, _ = data
    y = jnp.asarray(np.random.default_rng(0).integers(0, 3, len(x)), jnp.int32)
    rng = np.random.default_rng(3)
    splits = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((7, 3), (7,)))
    tree = jtrees.ObliqueTree(*splits, leaves.Values(jnp.zeros((8, 3)), losses.Frequencies()))
    refit = jax.jit(jtrees.ObliqueTree.refit, static_argnames="shrink")
    shrunk, plain = (np.asarray(refit(tree, x, y, shrink=s).leaves.values) for s in (True, False))
    np.testing.assert_allclose(shrunk.sum(1), 1, rtol=1e-5)
    prior = (np.bincount(y, minlength=3) + 1) / (len(y) + 3)
    # The classes are noise: leaves come nearer to what all rows have.
    assert np.abs(shrunk - prior).sum() < 0.5 * np.abs(plain - prior).sum()


@pytest.mark.parametrize("xp", sweeps.quick([np, jnp], [np]))
@pytest.mark.parametrize("strength", [0.0, 3.0])
def test_an_empty_leaf_of_a_classifier_has_the_value_of_its_parent(xp, strength):
    rng = np.random.default_rng(0)
    leaf, y, weight = rng.choice([0, 2, 4, 5], N), rng.integers(0, 3, N), rng.uniform(0.5, 2, N).astype(np.float32)
    empty = lambda depth: leaves.Values(jnp.zeros((2**depth, 3)), losses.Frequencies())

    def values(depth):
        rows = xp.asarray(leaf >> (DEPTH - depth)), None, xp.asarray(y), xp.asarray(weight)
        return np.asarray(empty(depth).refit_shrunk(*rows, strength=strength)[0].values)

    deep, middle, root = values(DEPTH), values(2), values(1)
    for item, parent in ((1, middle[0]), (3, middle[1]), (6, root[1]), (7, root[1])):
        np.testing.assert_allclose(deep[item], parent, rtol=1e-5)


SHRINKING = jtrees.GET(depth=4, starts=1, epochs=20), jtrees.CO2(depth=4, epochs=5)


@pytest.mark.parametrize("recipe", sweeps.quick(SHRINKING, SHRINKING[:1]), ids=["GET", "CO2"])
def test_recipes_shrink_unless_told_not_to(recipe, data, standard_promotion):
    x, y = data
    y = y + 5 * np.random.default_rng(0).normal(size=len(y))
    recipe = recipe.replace(precondition=0.0)
    shrunk, plain = (jtrees.fit(recipe.replace(shrink=s), x, y, key=jax.random.key(0)) for s in (True, False))
    np.testing.assert_array_equal(shrunk.tree.leaf_index(x), plain.tree.leaf_index(x))
    assert shrunk.loss > plain.loss
    assert np.var(shrunk.predict(x)) < np.var(plain.predict(x))
    assert shrunk.loss == pytest.approx(np.mean((shrunk.predict(x) - y) ** 2), rel=1e-4)


def test_empty_nodes_without_shrinkage_divide_by_nothing():
    leaf, y = np.arange(40) % 2, np.arange(40.0) % 2
    values, strength = leaves.fit_hierarchical(leaf, y, 8)
    assert strength == 0 and values[:2].tolist() == [0, 1] and np.isfinite(values).all()
