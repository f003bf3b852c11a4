"""Scikit-learn's checks of the two estimators, and recipes with a budget that passes them."""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

import jtrees

_GET = jtrees.GET(depth=2, starts=1, epochs=30)
_DGT = jtrees.DGT(depth=3, epochs=60, widths=())

QUICK = [_DGT]
OTHERS = [
    _GET,
    jtrees.RADDT(depth=2, starts=1, epochs=10),
    jtrees.LatentTree(depth=2, epochs=60),
    jtrees.TEL(depth=3, trees=5, epochs=60),
    jtrees.CO2(depth=3, epochs=20),
    jtrees.NonGreedy(depth=3, greedy_epochs=10, epochs=30),
]
_WEAK = jtrees.GET(depth=2, starts=1, epochs=10, cart="binned", halving=False, precondition=0, shrink=False)
COMBINATORS = [
    jtrees.Boosted(_WEAK, rounds=10, learning_rate=0.5, patience=None),
    jtrees.Bagged(_DGT, trees=3),
    jtrees.BestOf(_DGT, runs=2),
    jtrees.Polished(_GET, epochs=10),
    jtrees.Sparse(_DGT, terms=2, epochs=10),
]
LINEAR = _GET.replace(leaves="linear")  # for regression

# scikit-learn fits 12 different rows of 30 features, weighted by 0 to 4, and the same rows repeated and shuffled, and
# expects equal answers.
WEIGHTS = "check_sample_weight_equivalence_on_dense_data"
EXPECTED_FAILURES = {
    WEIGHTS: "mini-batches and bootstrap samples are drawn from the rows as they come, and leaves that are smoothed or "
    "shrunk count uneven weights as fewer samples"
}

# What the estimators do before a recipe is asked, and after: one recipe has shown it, at a shape of data for each.
OF_ESTIMATORS = {
    "check_classifier_data_not_an_array",
    "check_dict_unchanged",
    "check_dont_overwrite_parameters",
    "check_dtype_object",
    "check_estimators_dtypes",
    "check_estimators_fit_returns_self",
    "check_estimators_overwrite_params",
    "check_estimators_pickle",
    "check_f_contiguous_array_estimator",
    "check_fit2d_predict1d",
    "check_fit_check_is_fitted",
    "check_fit_score_takes_y",
    "check_n_features_in",
    "check_n_features_in_after_fitting",
    "check_pipeline_consistency",
    "check_positive_only_tag_during_fit",
    "check_readonly_memmap_input",
    "check_regressor_data_not_an_array",
    "check_regressor_multioutput",
    "check_regressors_int",
    "check_regressors_no_decision_function",
    "check_sample_weights_list",
    "check_sample_weights_not_an_array",
    "check_sample_weights_not_overwritten",
    "check_sample_weights_pandas_series",
    "check_sample_weights_shape",
    "check_supervised_y_2d",
}


# Those of them that may depend on what y holds.
OF_LABELS = {"check_classifier_data_not_an_array", "check_dtype_object", "check_estimators_dtypes"}
OF_LABELS |= {"check_estimators_pickle", "check_supervised_y_2d"}


# A matter of the model that a recipe ends in, which for these has the type of another's.
OF_MODELS = {"check_methods_sample_order_invariance", "check_methods_subset_invariance"}
SAME_MODELS = (jtrees.Bagged, jtrees.BestOf, jtrees.Polished, jtrees.Sparse)


def parametrize_with_checks_of_recipes(estimators, fails, shown=OF_ESTIMATORS):
    """Scikit-learn's checks of the estimators but those that others have shown.

    Those that are expected to fail are listed and not run, as either outcome would do.
    """
    names, cases = (every := parametrize_with_checks(estimators, expected_failed_checks=fails)).args

    def wanted(case):
        estimator, check = getattr(case, "values", case)
        name = check.func.__name__
        return name not in shown and not (name in OF_MODELS and isinstance(estimator.recipe, SAME_MODELS))

    def not_run(case):
        marks = [pytest.mark.xfail(**mark.kwargs | {"run": False}) for mark in getattr(case, "marks", ())]
        return pytest.param(*case.values, marks=marks) if marks else case

    return pytest.mark.parametrize(names, [not_run(case) for case in cases if wanted(case)], **every.kwargs)
