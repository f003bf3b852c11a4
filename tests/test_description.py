"""The kind of a tree, from every recipe."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest

import jtrees
from jtrees.description import kind_of
from jtrees.leaves import Linear, Values
from jtrees.search import FitReport, Report
from tests import recipes

DIRECTION = np.random.default_rng(0).normal(size=5)


def tree(weights, leaves=None):
    weights = np.float32(weights)
    return jtrees.ObliqueTree(
        weights, np.zeros(len(weights), np.float32), leaves or Values(np.arange(len(weights) + 1.0))
    )


@pytest.mark.parametrize(
    ("weights", "kind"),
    [
        (np.eye(5)[[2, 2, 2]], "axis-aligned, as trees of CART: each of the 3 splits has one column, and all the same"),
        (DIRECTION[None], "oblique: the only split combines 5 columns"),
        (
            np.outer([1, -2, 1e-3], DIRECTION * [1e4, 1e-4, 1, 1, 1]),
            "one direction: all 3 splits divide one linear score of 5 columns into intervals",
        ),
        (
            [DIRECTION, np.eye(5)[0], 2 * DIRECTION],
            "oblique: 2 of the 3 splits combine several columns, up to 5 columns, along 2 directions",
        ),
        (
            [DIRECTION, DIRECTION * [1, 1, 1, 1, 2], [1, 1, 0, 0, 0]],
            "oblique: all 3 splits combine several columns, up to 5 columns",
        ),
        (np.zeros((3, 5)), "no split: one answer for all rows"),
    ],
)
def test_kind_of_a_tree_is_read_from_its_splits(weights, kind):
    assert kind_of(tree(weights)) == kind


def test_splits_out_of_reach_do_not_count():
    """The left child sends all rows to the left; its right child is oblique."""
    weights = np.zeros((7, 5))
    weights[0, 1] = weights[2, 0] = 1
    weights[4] = DIRECTION
    stump = tree(weights).replace(bias=-np.ones(7, np.float32))
    assert kind_of(stump) == "axis-aligned, as trees of CART: both splits have one column"


def test_one_linear_leaf_is_a_linear_model_and_a_batch_of_trees_has_no_kind():
    assert kind_of(tree(np.zeros((1, 5)), Linear(np.ones((2, 5)), np.ones(2)))) == "no split: one linear model"
    with pytest.raises(ValueError, match="tree must be a single tree"):
        kind_of(jax.tree.map(lambda a: np.stack([a, a]), tree(np.eye(5)[:1])))


@dataclass(frozen=True)
class Chosen(Report):
    chosen: int


@pytest.mark.parametrize(
    ("chosen", "origin"),
    [
        (-2, "; found by CART on the outputs of a ridge regression"),
        (3, "; found by gradient descent, start 3"),
        (None, ""),
    ],
)
def test_fit_says_what_kind_of_tree_it_is_and_how_it_was_found(chosen, origin):
    stump = tree(np.outer([1, 2, 3], DIRECTION))
    report = FitReport(search=Report() if chosen is None else Chosen(chosen))
    fit = jtrees.FitResult(model=stump, tree=stump, loss=0.0, step=0, history=np.zeros(1), report=report)
    kind = f"one direction: all 3 splits divide one linear score of 5 columns into intervals{origin}"
    assert fit.kind == kind and f"tree: {kind}\n" in str(fit)
    assert fit.to_text(digits=5) == f"# {kind}\n{stump.to_text(digits=5)}"


def test_fit_of_another_model_has_no_rules(fitted):
    fit = fitted(recipes.BAGGED)
    assert "tree:" not in str(fit) and "Forest" in fit.kind
    with pytest.raises(ValueError, match="model must be a single tree to have rules, got Forest"):
        fit.to_text()
