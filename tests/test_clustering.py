"""Hierarchical clustering, and dendrogram purity against its definition over pairs."""

import itertools

import jax
import numpy as np
import pytest

import jtrees
from jtrees import dendrogram_purity

CHAIN_OF_THREE = [-1, 0, 0, 0, 1, 1]  # a root with three children, the first of which has two


def over_pairs(path_of, ends, labels) -> float:
    """The definition: over pairs of one class, the part of that class below their lowest common ancestor."""
    purities = []
    paths = [path_of(end) for end in ends]
    for i, j in itertools.combinations(range(len(ends)), 2):
        if labels[i] == labels[j]:
            common = next(node for node in paths[i] if node in paths[j])
            below = [labels[k] for k in range(len(ends)) if common in paths[k]]
            purities.append(np.mean([label == labels[i] for label in below]))
    return float(np.mean(purities))


def upwards(parent):
    def path(node):
        out = [node]
        while parent[out[-1]] >= 0:
            out.append(parent[out[-1]])
        return out

    return path


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_purity_of_perfect_trees(depth):
    rng = np.random.default_rng(depth)
    leaves, labels = rng.integers(0, 2**depth, 40), rng.integers(0, 3, 40)
    parent = (np.arange(2 ** (depth + 1) - 1) - 1) // 2
    parent[0] = -1
    expected = over_pairs(upwards(parent), leaves + 2**depth - 1, labels)
    np.testing.assert_allclose(dendrogram_purity(leaves, labels), expected, rtol=1e-12)
    ends = leaves + 2**depth - 1
    np.testing.assert_allclose(dendrogram_purity(ends, labels, parent=parent), expected, rtol=1e-12)


def test_purity_of_other_trees():
    rng = np.random.default_rng(0)
    ends, labels = rng.integers(0, 6, 30), rng.choice(["a", "b"], 30)
    expected = over_pairs(upwards(CHAIN_OF_THREE), ends, labels)
    np.testing.assert_allclose(dendrogram_purity(ends, labels, parent=CHAIN_OF_THREE), expected, rtol=1e-12)


def test_purity_at_its_ends():
    assert dendrogram_purity([0, 0, 3, 3], [1, 1, 0, 0]) == 1
    assert dendrogram_purity([0, 0, 0, 0], [1, 1, 0, 0]) == 0.5
    assert dendrogram_purity(np.array([0, 1, 200, 201], np.uint8), [0, 0, 1, 1]) == 1


@pytest.mark.parametrize(
    ("leaves", "labels", "parent", "message"),
    [
        ([0, 1], [0], None, r"leaves must be .* got shapes \(2,\) and \(1,\)"),
        ([0.0, 1.0], [0, 0], None, "leaves must be whole numbers"),
        ([-1, 0], [0, 0], None, "leaves must be whole numbers from 0"),
        ([0, 1], [0, 1], None, "labels must have at least two samples of one class"),
        ([], [], None, "leaves must be whole numbers|labels must have at least two"),
        ([0, 6], [0, 0], CHAIN_OF_THREE, r"leaves must be nodes 0\.\.5 of parent, got 6"),
        ([0, 1], [0, 0], [-1, 2, 0], "parent must hold -1 first"),
        ([0, 1], [0, 0], [0, 0], "parent must hold -1 first"),
        ([0, 1], [0, 0], [-1, -1], "parent must hold -1 first"),
    ],
)
def test_bad_input_to_purity(leaves, labels, parent, message):
    with pytest.raises(ValueError, match=message):
        dendrogram_purity(leaves, labels, parent=parent)


@pytest.fixture(scope="module")
def blobs():
    """Four groups in two features; a third that their place determines, and a fourth that is noise."""
    rng = np.random.default_rng(0)
    label = rng.integers(0, 4, 300)
    place = np.array([[3, 3], [3, -3], [-3, 3], [-3, -3]])[label] + 0.5 * rng.normal(size=(300, 2))
    value = np.array([0.0, 5.0, 20.0, 30.0])[label] + 0.1 * rng.normal(size=300)
    return np.column_stack([place, value, rng.normal(size=300)]).astype(np.float32), label


@pytest.mark.usefixtures("standard_promotion")
def test_clusters_are_found(blobs):
    x, label = blobs
    options = {"depth": 3, "learning_rate": 0.01, "epochs": 30, "validation": x[250:]}
    purity = []
    for seed in range(3):
        result = jtrees.fit_latent_clustering(x[:250], [2], key=jax.random.key(seed), **options)
        leaves = result.tree.leaf_index(x)
        purity.append(dendrogram_purity(leaves, label))
    assert np.mean(purity) > 0.7  # groups that meet at the root: 0.25
    np.testing.assert_array_equal(result.tree.weights[:, 2], 0)  # what is predicted is not looked at
    for leaf in np.unique(leaves[:250]):
        mean = x[:250, 2][leaves[:250] == leaf].mean()
        np.testing.assert_allclose(result.tree.leaves.values[leaf, 0], mean, rtol=1e-3, atol=1e-2)
    assert result.active.shape == (15,)
    assert result.losses[-20:].mean() < result.losses[:20].mean() / 5


@pytest.mark.parametrize(
    ("target_features", "change", "message"),
    [
        ([], {}, "target_features must be"),
        ([0, 1, 2, 3], {}, r"target_features must be some of the columns 0\.\.3, not all"),
        ([4], {}, "target_features must be some of the columns"),
        ([-1], {}, "target_features must be some of the columns"),
        ([1, 1], {}, "target_features must be different"),
        (["a"], {}, "target_features must be different numbers"),
        ([0], {"penalty": 0.0}, "penalty must be finite and above 0"),
        ([0], {"depth": 11}, "depth must be from 1 to 10"),
        ([0], {"inputs": "x"}, "inputs must be one of"),
        ([0], {"validation": np.zeros((3, 2))}, "x must have 4 columns, got 2"),
    ],
)
def test_bad_input_to_clustering(target_features, change, message, blobs):
    with pytest.raises(ValueError, match=message):
        jtrees.fit_latent_clustering(blobs[0], target_features, key=jax.random.key(0), **change)


def test_a_target_must_vary(blobs):
    x = blobs[0].copy()
    x[:, 1] = 3
    with pytest.raises(ValueError, match="target_features must vary, got column 1"):
        jtrees.fit_latent_clustering(x, [1], key=jax.random.key(0))
