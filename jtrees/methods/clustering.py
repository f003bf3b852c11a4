"""Hierarchical clustering by a LatentTree that predicts some features from the others (Zantedeschi et al. 2021, section
4.2), and the measure of a hierarchy.
"""

from collections.abc import Sequence
from typing import Any, Literal

from flax import struct
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array
import numpy as np

from jtrees import validation as checks
from jtrees.methods import latent
from jtrees.tree import ConstantLeaves, ObliqueTree


@struct.dataclass
class ClusteringResult:
    """A hierarchy of clusters.

    Attributes:
      tree: takes raw x, all features (weights of the target features are 0); inactive nodes do not split. Its leaves
        are the clusters, and hold the means of the target features, ``(leaves, targets)``.
        ``tree.leaf_index(x)`` says to which cluster a sample belongs, ``tree.decision_path(x)`` to which larger ones.
      active: activity of the nodes of the whole tree, ``(2**(depth + 1) - 1,)``; 0: pruned.
      losses: training loss before each update, on scaled targets, ``(steps,)``.
      score: loss on ``validation`` where that was given, else on the training data; on scaled targets.
    """

    tree: ObliqueTree
    active: np.ndarray
    losses: np.ndarray
    score: float


def fit_latent_clustering(
    x: ArrayLike,
    target_features: Sequence[int],
    *,
    key: Array,
    depth: int = 5,
    penalty: float = 0.1,
    inputs: Literal["z", "xz"] = "z",
    epochs: int = 100,
    batch_size: int = 8,
    learning_rate: float = 1e-3,
    patience: int = 10,
    validation: ArrayLike | None = None,
) -> ClusteringResult:
    """Clusters samples without labels: a tree is learnt that helps to predict some features from the others.

    Linear splits, a linear predictor, squared error, the rest as in :func:`jtrees.fit_latent`. Target features are
    scaled to mean 0 and deviation 1. The others are centred and divided by one number: which of them are large matters,
    as in any clustering by distances; scale them first if their units differ.

    Args:
      x: features, ``(n, p)``, finite.
      target_features: columns to predict from the others: at least one, and not all.
      key: for everything random.
      depth: depth of the tree, 1 to 10.
      penalty: price of an active node, per sample.
      inputs: what the predictor sees, ``"z"`` (where a sample is) or ``"xz"`` (and the features).
      epochs: passes over the data.
      batch_size: samples in a mini-batch; n if that is less.
      learning_rate: at the start.
      patience: epochs without a lower loss before the learning rate falls.
      validation: samples to choose the best epoch by; not trained on.

    Raises:
      ValueError: naming the argument, what was expected and what came.
      FloatingPointError: if training became non-finite.
    """
    x = np.asarray(checks.check_x(x), np.float32)
    n, p = x.shape
    targets = _checked_columns(target_features, p)
    others = np.setdiff1d(np.arange(p), targets)
    constant = [int(i) for i in targets if np.ptp(x[:, i]) == 0]
    if constant:
        raise ValueError(f"target_features must vary, got column {constant[0]}, which is the same in every row")
    held_out = None if validation is None else np.asarray(checks.check_x(validation, features=p), np.float32)
    of = latent.architecture(depth, None, len(targets), "linear", "linear", inputs, 1, 0.0)
    checks.check_number("penalty", penalty)
    checks.check_number("learning_rate", learning_rate)
    batch_size = min(checks.check_count("batch_size", batch_size), n)
    epochs, patience = checks.check_count("epochs", epochs), checks.check_count("patience", patience)
    recipe = latent.Recipe(of, None, len(targets), None, batch_size, epochs, n // batch_size, patience)

    # Deviations: of the targets each its own; of the others the root of the mean square.
    wide = x.astype(np.float64)
    mean, unit = wide.mean(0), wide.std(0)
    unit[others] = np.sqrt(np.square(unit[others]).mean()) or 1
    scaled = lambda a: ((a - mean) / unit).astype(np.float32)
    parts = lambda a: (scaled(a)[:, others], scaled(a)[:, targets])
    judge = None if held_out is None else parts(held_out)
    result, active, tree = latent.run(*parts(x), judge, key, penalty, learning_rate, recipe)
    if not result.finite:
        raise FloatingPointError("training became non-finite: try a smaller learning_rate")
    weights = np.zeros((len(tree.bias), p))
    weights[:, others] = np.asarray(tree.weights, np.float64) / unit[others]
    bias = np.asarray(tree.bias, np.float64) - weights @ mean
    values = mean[targets] + unit[targets] * np.asarray(tree.leaves.values, np.float64)
    weights, bias, values = (jnp.asarray(a, jnp.float32) for a in (weights, bias, values))
    tree = ObliqueTree(weights, bias, ConstantLeaves(values))
    return ClusteringResult(tree, np.asarray(active), np.asarray(result.losses), float(result.score))


def _checked_columns(target_features: Any, p: int) -> np.ndarray:
    columns = np.asarray(target_features)
    if columns.ndim != 1 or columns.dtype.kind not in "iu" or len(np.unique(columns)) != len(columns):
        raise ValueError(f"target_features must be different numbers of columns, got {target_features!r}")
    if not 0 < len(columns) < p or (columns < 0).any() or (columns >= p).any():
        raise ValueError(f"target_features must be some of the columns 0..{p - 1}, not all, got {target_features!r}")
    return columns


def dendrogram_purity(leaves: ArrayLike, labels: ArrayLike, *, parent: ArrayLike | None = None) -> float:
    """How well a hierarchy keeps classes together (Heller & Ghahramani, 2005): over all pairs of samples of one class,
    the mean part of that class among the samples below their lowest common ancestor.

    Pairs are never listed: those of a class that meet at a node are those below it less those below its children, so
    that the work is O(n + nodes x classes).

    Args:
      leaves: where each sample ends, ``(n,)``: leaf numbers of a perfect binary tree, from 0; or, with ``parent``,
        numbers of nodes.
      labels: class of each sample, ``(n,)``, of any kind.
      parent: parent of each node of another tree, with any number of children, -1 for the root; children have larger
        numbers than their parents.

    Returns:
      Between 0 and 1.

    Raises:
      ValueError: for shapes that differ, numbers out of range, parents that are no such tree, or no two samples of the
        same class.
    """
    ends, labels = np.asarray(leaves), np.asarray(labels)
    if ends.ndim != 1 or labels.shape != ends.shape or ends.dtype.kind not in "iu" or (ends < 0).any():
        raise ValueError(
            f"leaves must be whole numbers from 0 and labels one for each, got shapes {ends.shape} and {labels.shape}"
        )
    ends = ends.astype(np.int64)
    if parent is None:
        inner = 2 ** int(ends.max(initial=0)).bit_length() - 1
        ends, above = ends + inner, (np.arange(2 * inner + 1) - 1) // 2
    else:
        above = np.asarray(parent)
        ordered = above.ndim == 1 and above.dtype.kind in "iu" and (above < np.arange(len(above))).all()
        if not ordered or (above < -1).any() or (above[1:] < 0).any():
            raise ValueError("parent must hold -1 first, and for every later node the number of an earlier one")
        if ends.max(initial=0) >= len(above):
            raise ValueError(f"leaves must be nodes 0..{len(above) - 1} of parent, got {ends.max()}")
    classes, of = np.unique(labels, return_inverse=True)
    below = np.zeros((len(above), len(classes)))
    np.add.at(below, (ends, of), 1)
    for node in range(len(above) - 1, 0, -1):
        below[above[node]] += below[node]
    pairs = below * (below - 1) / 2
    meet = pairs.copy()
    np.subtract.at(meet, above[1:], pairs[1:])
    if not (total := meet.sum()):
        raise ValueError("labels must have at least two samples of one class, got none")
    size = below.sum(1, keepdims=True)
    return float((meet * below / np.maximum(size, 1)).sum() / total)
