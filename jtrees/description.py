"""The kind of a tree, found from the weights of its reachable splits, and its number of free parameters."""

from typing import Any

import numpy as np

from jtrees import validation
from jtrees.forest import Forest
from jtrees.tree import ObliqueTree

_FOUND = {-1: "CART", -2: "CART on the outputs of a ridge regression"}
_PARALLEL = 1e-5  # largest difference of two directions that count as one, relative to their length


def kind_of(tree: ObliqueTree, chosen: int | None = None) -> str:
    """Returns a description of the kind of a tree, such as ``"axis-aligned, as trees of CART"``."""
    # A column is a feature of the tree. In a raw table, each level of a category is a column. `chosen` is the start
    # that GET or RADDT chose; the description then says how the tree was found.
    if np.ndim(tree.weights) != 2:
        raise ValueError(f"tree must be a single tree, got {validation.quoted(tree)}")
    kind = _kind(tree)
    if chosen is None:
        return kind
    return f"{kind}; found by {_FOUND.get(chosen, f'gradient descent, start {chosen}')}"


def kind_of_forest(model: Any) -> str:
    """Returns a description of a model of several trees, such as ``"a sum of 30 trees of depth 5, 1200 numbers"``."""
    # Another model is described by its `repr`.
    if not isinstance(model, Forest) or not isinstance(model.trees, ObliqueTree):
        return repr(model)
    kinds = {"sum": "a sum", "mean": "a mean", "vote": "a vote"}
    return f"{kinds[model.combine]} of {len(model)} trees of depth {model[0].depth}, {model.num_parameters} numbers"


def _kind(tree: ObliqueTree) -> str:
    directions = _directions(tree)
    splits, columns = len(directions), np.count_nonzero(directions, axis=1)
    if splits == 0:
        return "no split: " + ("one answer for all rows" if tree.leaves.is_constant else "one linear model")
    if (columns == 1).all():
        used = int(directions.any(0).sum())
        subject = {1: "the only split has", 2: "both splits have"}.get(splits, f"each of the {splits} splits has")
        which = ", and all the same" if used == 1 and splits > 1 else ""
        return f"axis-aligned, as trees of CART: {subject} one column{which}"
    if splits == 1:
        return f"oblique: the only split combines {columns[0]} columns"
    if _count(directions) == 1:
        all_of = "both" if splits == 2 else f"all {splits}"
        return f"one direction: {all_of} splits divide one linear score of {columns.max()} columns into intervals"
    oblique = int((columns > 1).sum())
    which = f"{oblique} of the {splits}" if oblique < splits else "both" if splits == 2 else f"all {splits}"
    along = _count(directions)
    extent = f"up to {columns.max()} columns" + (f", along {along} directions" if along < splits else "")
    return f"oblique: {which} splits combine several columns, {extent}"


def count_free(tree: ObliqueTree) -> float:
    """Returns the number of free parameters of a tree, for a correction of its training loss."""
    # The directions of s splits over p columns of similar spread form a matrix of rank r, which has `r (p + s - r)`
    # free parameters. The s thresholds add s parameters, and the s lengths remove s, since a length does not change a
    # split. A split of a single column has a threshold and a choice of column, which counts log2(p). The leaves add
    # their own.
    directions = _directions(tree)
    splits, features = directions.shape
    free = tree.num_parameters - np.count_nonzero(directions) - splits  # the parameters of the leaves
    if tree.classes is not None:
        free *= (tree.classes - 1) / tree.classes  # probabilities sum to 1
    if not splits:
        return float(free)
    single = np.count_nonzero(directions, axis=1) == 1
    free += single.sum() * (1 + np.log2(features))
    if (oblique := directions[~single]).size:
        size, used = np.linalg.svd(oblique, compute_uv=False), int(oblique.any(0).sum())
        rank = int((size > _PARALLEL * np.sqrt(len(oblique))).sum())
        free += rank * (used + len(oblique) - rank)
    return float(free)


def _directions(tree: ObliqueTree) -> np.ndarray:
    """Returns the weights of the reachable splits, divided by the largest of each column and scaled to length 1."""
    weights = np.asarray(tree.weights, np.float64)[tree.splits]
    largest = np.abs(weights).max(0, initial=0)
    scaled = weights / np.where(largest > 0, largest, 1)
    return scaled / np.linalg.norm(scaled, axis=1, keepdims=True)


def _count(directions: np.ndarray) -> int:
    """Returns the number of different directions. A direction and its opposite count as one."""
    parallel = np.abs(directions @ directions.T) > 1 - _PARALLEL**2
    return int((~np.tril(parallel, -1).any(1)).sum())
