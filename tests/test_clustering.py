"""Hierarchical clustering, and dendrogram purity against its definition over pairs."""

import itertools

import jax
import numpy as np
import pytest

from experiments.paper_latent import dendrogram_purity
import jtrees

CHAIN_OF_THREE = [-1, 0, 0, 0, 1, 1]  # a root with three children, the first of which has two


def over_pairs(parent, ends, labels) -> float:
    """The definition: over pairs of one class, the part of that class below their lowest common ancestor."""
    paths = []
    for end in ends:
        path = [end]
        while parent[path[-1]] >= 0:
            path.append(parent[path[-1]])
        paths.append(path)
    purities = []
    for i, j in itertools.combinations(range(len(ends)), 2):
        if labels[i] == labels[j]:
            common = next(node for node in paths[i] if node in paths[j])
            purities.append(np.mean([labels[k] == labels[i] for k in range(len(ends)) if common in paths[k]]))
    return float(np.mean(purities))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_purity_is_its_definition(depth):
    rng = np.random.default_rng(depth)
    leaves, labels = rng.integers(0, 2**depth, 40), rng.integers(0, 3, 40)
    parent = (np.arange(2 ** (depth + 1) - 1) - 1) // 2
    parent[0] = -1
    ends = leaves + 2**depth - 1
    expected = over_pairs(parent, ends, labels)
    np.testing.assert_allclose(dendrogram_purity(leaves, labels), expected, rtol=1e-12)
    np.testing.assert_allclose(dendrogram_purity(ends, labels, parent=parent), expected, rtol=1e-12)
    ends, labels = rng.integers(0, 6, 30), rng.choice(["a", "b"], 30)  # of another tree, with other labels
    expected = over_pairs(CHAIN_OF_THREE, ends, labels)
    parent = np.array(CHAIN_OF_THREE)
    np.testing.assert_allclose(dendrogram_purity(ends, labels, parent), expected, rtol=1e-12)


@pytest.mark.parametrize("labels", [[1, 1, 0, 0], [2**40, 2**40, -1, -1], [-(2**60), -(2**60), 0.5, 0.5]])
def test_purity_at_its_ends_whatever_the_size_of_labels(labels):
    assert dendrogram_purity(np.array([0, 0, 3, 3]), labels) == 1
    assert dendrogram_purity(np.zeros(4, int), labels) == 0.5


@pytest.fixture(scope="module")
def blobs():
    """Four groups in two features; a third that their place determines, and a fourth that is noise."""
    rng = np.random.default_rng(0)
    label = rng.integers(0, 4, 300)
    place = np.array([[3, 3], [3, -3], [-3, 3], [-3, -3]])[label] + 0.5 * rng.normal(size=(300, 2))
    value = np.array([0.0, 5.0, 20.0, 30.0])[label] + 0.1 * rng.normal(size=300)
    return np.column_stack([place, value, rng.normal(size=300)]).astype(np.float32), label


# Two targets, of which the second is noise; some rows are held out, without y.
RECIPE = jtrees.LatentClustering(target_features=(2, 3), depth=3, learning_rate=0.01, epochs=30)


def cluster(x, recipe=RECIPE, *, seed=0, **options):
    return jtrees.fit(recipe, x[:250], key=jax.random.key(seed), **{"validation": (x[250:], None)} | options)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_clusters_are_found(blobs):
    (x, label), purity = blobs, []
    for seed in range(3):
        result = cluster(x, seed=seed)
        leaves = result.tree.leaf_index(x)
        purity.append(dendrogram_purity(leaves, label))
    assert np.mean(purity) > 0.7  # groups that meet at the root: 0.25
    np.testing.assert_array_equal(result.tree.weights[:, 2:], 0)  # the target features are not split on
    for leaf in np.unique(leaves[:250]):
        mean = x[:250, 2:][leaves[:250] == leaf].mean(0)
        np.testing.assert_allclose(result.tree.leaves.values[leaf], mean, rtol=1e-3, atol=1e-2)
    # The loss on the rows held out, on targets of deviation 1.
    scaled = (result.model.predict(x[250:]) - x[250:, 2:]) / x[:250, 2:].std(0)
    assert result.loss == pytest.approx(np.mean(scaled**2), rel=1e-4)


@pytest.mark.parametrize(
    ("options", "changed", "message"),
    [
        ({"target_features": (0, 1, 2, 3)}, {}, r"target_features must be some of the columns 0\.\.3, not all"),
        ({"target_features": (1, 1)}, {}, "target_features must be different"),
        ({"target_features": 0}, {}, "target_features must be different numbers of columns, got 0"),
        ({}, {"task": jtrees.Regression(2, "absolute_error")}, "task must be a Regression with squared error in"),
        ({"target_features": (1,)}, {"x": np.eye(300, 4)[::-1] * [1, 0, 1, 1] + 3}, "y must take at least two values"),
    ],
)
def test_bad_options_and_arguments_are_refused(options, changed, message, blobs):
    with pytest.raises(ValueError, match="^" + message):
        cluster(recipe=RECIPE.replace(**options), **{"x": blobs[0], **changed})
