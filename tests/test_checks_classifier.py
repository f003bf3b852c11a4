"""Scikit-learn's own checks of the classifier: as ``test_checks_regressor.py``, which has all recipes.

Here are those whose classification is code of its own on the way to and from the estimator: RADDT is GET with another
schedule, and trees of CO2 and NonGreedy have the leaves of GET's.
"""

import estimator_checks as small
import pytest

import jtrees
from jtrees.estimators import TreeClassifier

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("standard_promotion")]

fails = lambda estimator: small.EXPECTED_FAILURES  # each of the recipes: class frequencies are smoothed, at the least


@small.parametrize_with_checks_of_recipes(  # what knows no labels, the regressor has shown
    [TreeClassifier(recipe, random_state=0) for recipe in small.QUICK], fails, small.OF_ESTIMATORS - small.OF_LABELS
)
def test_quick(estimator, check):
    check(estimator)


@pytest.mark.wide
@small.parametrize_with_checks_of_recipes(
    [
        TreeClassifier(recipe, random_state=0)
        for recipe in small.OTHERS
        if type(recipe) not in (jtrees.RADDT, jtrees.CO2, jtrees.NonGreedy)
    ],
    fails,
)
def test_all_recipes(estimator, check):
    check(estimator)
