"""Sizes of models: the leaves of all trees, and how many numbers the model stores."""

from typing import Any

import numpy as np
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

import jtrees
from jtrees import warmstart
from jtrees.report.rivals import Constant, LinearModel


def as_tree(model: Any, x: np.ndarray) -> jtrees.ObliqueTree | None:
    """Returns the model as an oblique tree without splits that divide no row of x; None if it is not a single tree."""
    if isinstance(model, (DecisionTreeRegressor, DecisionTreeClassifier)):
        return warmstart.from_sklearn(model)
    return model.prune(x) if isinstance(model, jtrees.ObliqueTree) else None


def size(model: Any, x: np.ndarray) -> tuple[int, int]:
    """Returns leaves and numbers of a model; an axis-parallel split counts its feature and its threshold."""
    counted = lambda nodes, leaves, outputs=1: (leaves, 2 * (nodes - leaves) + leaves * outputs)
    if (tree := as_tree(model, x)) is not None:
        return tree.num_leaves, tree.num_parameters
    if isinstance(model, (Constant, LinearModel)):
        return 1, model.count
    if isinstance(model, (RandomForestRegressor, RandomForestClassifier)):
        trees = [member.tree_ for member in model.estimators_]
        return counted(sum(t.node_count for t in trees), sum(int(t.n_leaves) for t in trees), trees[0].value[0].size)
    if hasattr(model, "_predictors"):  # HistGradientBoosting
        nodes = [tree.nodes["is_leaf"] for trees in model._predictors for tree in trees]
        return counted(sum(map(len, nodes)), sum(int(is_leaf.sum()) for is_leaf in nodes))
    if hasattr(model, "get_booster"):  # XGBoost
        nodes = model.get_booster().trees_to_dataframe()["Feature"]
        return counted(len(nodes), int((nodes == "Leaf").sum()))
    if hasattr(model, "booster_"):  # LightGBM
        trees = [tree["tree_structure"] for tree in model.booster_.dump_model()["tree_info"]]
        return tuple(map(sum, zip(*map(lightgbm_size, trees), strict=True)))  # type: ignore[return-value]
    if hasattr(model, "get_tree_leaf_counts"):  # CatBoost: all splits of a level are equal
        counts = model.get_tree_leaf_counts()
        return int(counts.sum()), len(model.get_leaf_values()) + 2 * int(np.log2(counts).sum())
    if isinstance(model, jtrees.Forest):
        return tuple(map(sum, zip(*(size(member, x) for member in model), strict=True)))  # type: ignore[return-value]
    if isinstance(getattr(model.network, "params", None), jtrees.methods.Ensemble):
        return int(np.prod(model.network.params.leaf_values.shape[:2])), model.num_parameters
    # A LatentTree: a tree and a predictor on it.
    active = np.asarray(model.network.active)
    return int((active[len(active) // 2 :] > 0).sum()), model.num_parameters


def numbers_of(model: Any, x: np.ndarray) -> int:
    """Returns how many numbers a model stores; a model of jtrees also stores the splits that divide no row of x."""
    return int(model.num_parameters if hasattr(model, "num_parameters") else size(model, x)[1])


def lightgbm_size(node: dict[str, Any]) -> tuple[int, int]:
    """Returns leaves and numbers of a tree of LightGBM; a linear leaf counts coefficients, features and a constant."""
    if "left_child" not in node:
        return 1, 1 + 2 * len(node.get("leaf_coeff", []))
    (left, a), (right, b) = lightgbm_size(node["left_child"]), lightgbm_size(node["right_child"])
    return left + right, 2 + a + b
