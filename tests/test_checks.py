"""Scikit-learn's own checks of the estimators. Other recipes: ``test_properties.py`` and ``test_battery.py``."""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

import jtrees
from jtrees.estimators import BoostedClassifier, BoostedRegressor, TreeClassifier, TreeRegressor
from tests.estimator_checks import COMBINATORS, OTHERS, QUICK

pytestmark = [
    # The checks warn of labels (n, 1), and of another version of pandas.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("standard_promotion"),  # optax's Adam raises a float to an int32 power
]

# scikit-learn fits 12 different rows of 30 features, weighted by 0 to 4, and the same rows repeated and shuffled, and
# expects equal answers.
_FAILURES = {
    "check_sample_weight_equivalence_on_dense_data": "mini-batches and bootstrap samples are drawn from the rows as "
    "they come, and leaves that are smoothed or shrunk count uneven weights as fewer samples"
}


def checks(*estimators):
    """Scikit-learn's checks, without those that are expected to fail."""
    exact = lambda estimator: isinstance(estimator, TreeRegressor) and estimator.recipe == QUICK[0]
    fails = lambda estimator: {} if exact(estimator) else _FAILURES
    names, cases = (every := parametrize_with_checks(estimators, expected_failed_checks=fails)).args
    return pytest.mark.parametrize(names, [case for case in cases if not getattr(case, "marks", ())], **every.kwargs)


@pytest.mark.slow
@checks(TreeRegressor(QUICK[0], random_state=0), TreeClassifier(QUICK[0], random_state=0))
def test_estimators(estimator, check):
    check(estimator)


_GET = OTHERS[0].replace(leaves="linear")
_LATENT = next(recipe for recipe in OTHERS if isinstance(recipe, jtrees.LatentTree))
_BOOSTED = (BoostedRegressor(COMBINATORS[0], random_state=0), BoostedClassifier(COMBINATORS[0], random_state=0))


@pytest.mark.wide
@checks(TreeRegressor(_GET, random_state=0), TreeClassifier(_LATENT, random_state=0), *_BOOSTED)
def test_estimators_of_other_recipes(estimator, check):
    check(estimator)
