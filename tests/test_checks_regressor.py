"""Scikit-learn's own checks of the regressor, for every recipe. A file of its own, and so a process, for each task."""

import estimator_checks as small
import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

import jtrees
from jtrees.estimators import TreeRegressor

# What the checks themselves warn of: labels (n, 1), a pandas of another day. Optax's Adam raises a float to an int32
# power, and users have jax's own promotion.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("standard_promotion")]


def fails(estimator):
    """The other recipes fit the few rows of that check exactly."""
    drawing = (jtrees.LatentTree, jtrees.TEL, jtrees.Bagged, jtrees.Boosted, jtrees.Sparse)
    return small.EXPECTED_FAILURES if isinstance(estimator.recipe, drawing) or estimator.recipe == small.LINEAR else {}


@pytest.mark.slow  # the quick ones of classes are the same but for a few
@parametrize_with_checks([TreeRegressor(recipe, random_state=0) for recipe in small.QUICK])
def test_quick(estimator, check):
    check(estimator)


@pytest.mark.wide
@small.parametrize_with_checks_of_recipes(
    [TreeRegressor(recipe, random_state=0) for recipe in [*small.OTHERS, *small.COMBINATORS, small.LINEAR]], fails
)
def test_all_recipes(estimator, check):
    check(estimator)


def test_every_recipe_is_checked():
    recipes = {
        value
        for value in map(vars(jtrees).get, jtrees.__all__)
        if isinstance(value, type) and issubclass(value, jtrees.Recipe)
    }
    checked = {type(recipe) for recipe in small.QUICK + small.OTHERS + small.COMBINATORS}
    # The names of a check would hold the addresses of functions, and no two processes would find the same.
    assert recipes - {jtrees.Recipe, jtrees.LatentClustering, jtrees.FromMethod, jtrees.Refined} == checked
