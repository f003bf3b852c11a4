"""Scikit-learn's own checks of the classifier, for every recipe but combinators: as ``test_checks_regressor.py``."""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks
import small_recipes as small

from jtrees.estimators import TreeClassifier

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("standard_promotion")]

fails = lambda estimator: small.EXPECTED_FAILURES  # each of the recipes: class frequencies are smoothed, at the least


@parametrize_with_checks(
    [TreeClassifier(recipe, random_state=0) for recipe in small.QUICK], expected_failed_checks=fails
)
def test_quick(estimator, check):
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks(
    [TreeClassifier(recipe, random_state=0) for recipe in small.OTHERS], expected_failed_checks=fails
)
def test_all_recipes(estimator, check):
    check(estimator)
