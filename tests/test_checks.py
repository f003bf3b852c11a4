"""Scikit-learn's own checks of the two estimators, for every recipe."""

from estimator_checks import COMBINATORS, OTHERS, QUICK
import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

import jtrees
from jtrees.estimators import TreeClassifier, TreeRegressor

pytestmark = [
    # The checks warn of labels (n, 1), and of another version of pandas.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("standard_promotion"),  # optax's Adam raises a float to an int32 power
]

_LINEAR = OTHERS[0].replace(leaves="linear")  # for regression
# Their classification has no code of its own.
_REGRESSORS = [recipe for recipe in OTHERS if isinstance(recipe, jtrees.RADDT | jtrees.CO2 | jtrees.NonGreedy)]
_REGRESSORS += [*COMBINATORS, _LINEAR]
_RECIPES = [
    *(recipe for recipe in OTHERS if recipe not in _REGRESSORS),
    jtrees.NODE(depth=3, trees=5, epochs=60),
    jtrees.GRANDE(depth=3, trees=5, epochs=200, learning_rate=0.1),
    jtrees.DTSemNet(depth=3, epochs=200, learning_rate=0.1),
    jtrees.SoftDecisionTree(depth=3, epochs=200, learning_rate=0.1),
]
[_DGT] = QUICK

# scikit-learn fits 12 different rows of 30 features, weighted by 0 to 4, and the same rows repeated and shuffled, and
# expects equal answers. The other recipes fit these rows exactly.
_FAILURES = {
    "check_sample_weight_equivalence_on_dense_data": "mini-batches and bootstrap samples are drawn from the rows as "
    "they come, and leaves that are smoothed or shrunk count uneven weights as fewer samples"
}
_DRAWING = (jtrees.LatentTree, jtrees.TEL, jtrees.NODE, jtrees.GRANDE, jtrees.SoftDecisionTree)
_DRAWING += (jtrees.Bagged, jtrees.Boosted, jtrees.Sparse)

# Checks of the estimators before and after a recipe. DGT shows them for all recipes, and for classes if labels matter.
_OF_LABELS = {
    f"check_{name}"
    for name in (
        *("classifier_data_not_an_array", "dtype_object", "estimators_dtypes", "estimators_pickle", "supervised_y_2d"),
    )
}
_OF_ESTIMATORS = _OF_LABELS | {
    f"check_{name}"
    for name in (
        *("dict_unchanged", "dont_overwrite_parameters", "estimators_fit_returns_self", "estimators_overwrite_params"),
        *("f_contiguous_array_estimator", "fit2d_predict1d", "fit_check_is_fitted", "fit_score_takes_y"),
        *("n_features_in", "n_features_in_after_fitting", "pipeline_consistency", "positive_only_tag_during_fit"),
        *("readonly_memmap_input", "regressor_data_not_an_array", "regressor_multioutput", "regressors_int"),
        *("regressors_no_decision_function", "sample_weights_list", "sample_weights_not_an_array"),
        *("sample_weights_not_overwritten", "sample_weights_pandas_series", "sample_weights_shape"),
    )
}
# A matter of the model that a recipe ends in, which for these has the type of another's.
_OF_MODELS = {"check_methods_sample_order_invariance", "check_methods_subset_invariance"}
_SAME_MODELS = (jtrees.Bagged, jtrees.BestOf, jtrees.Polished, jtrees.Sparse)


def fails(estimator):
    drawing = isinstance(estimator.recipe, _DRAWING) or estimator.recipe == _LINEAR
    return _FAILURES if drawing or isinstance(estimator, TreeClassifier) else {}


def checks(estimators, shown=frozenset()):
    """Scikit-learn's checks of the estimators but those that other estimators have shown.

    Those that are expected to fail are listed and not run, as either outcome would do.
    """
    names, cases = (every := parametrize_with_checks(estimators, expected_failed_checks=fails)).args

    def wanted(case):
        estimator, check = getattr(case, "values", case)
        name = check.func.__name__
        return name not in shown and not (name in _OF_MODELS and isinstance(estimator.recipe, _SAME_MODELS))

    def not_run(case):
        marks = [pytest.mark.xfail(**mark.kwargs | {"run": False}) for mark in getattr(case, "marks", ())]
        return pytest.param(*case.values, marks=marks) if marks else case

    return pytest.mark.parametrize(names, [not_run(case) for case in cases if wanted(case)], **every.kwargs)


@pytest.mark.slow
@checks([TreeRegressor(_DGT, random_state=0)])
def test_a_regressor(estimator, check):
    check(estimator)


@pytest.mark.slow
@checks([TreeClassifier(_DGT, random_state=0)], _OF_ESTIMATORS - _OF_LABELS)
def test_a_classifier(estimator, check):
    check(estimator)


@pytest.mark.wide
@checks([TreeRegressor(recipe, random_state=0) for recipe in _RECIPES + _REGRESSORS], _OF_ESTIMATORS)
def test_regressors_of_all_recipes(estimator, check):
    check(estimator)


@pytest.mark.wide
@checks([TreeClassifier(recipe, random_state=0) for recipe in _RECIPES], _OF_ESTIMATORS)
def test_classifiers_of_all_recipes(estimator, check):
    check(estimator)


def test_every_recipe_is_checked():
    classes = {value for value in vars(jtrees).values() if isinstance(value, type) and issubclass(value, jtrees.Recipe)}
    checked = {type(recipe) for recipe in [*QUICK, *_RECIPES, *_REGRESSORS]}
    # The names of a check would hold the addresses of functions, and no two processes would find the same.
    assert classes - {jtrees.Recipe, jtrees.LatentClustering, jtrees.FromMethod, jtrees.Refined} == checked
